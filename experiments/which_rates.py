"""The learning rates at which the models of which_memory.py are best: one seed, whole runs of
1M tokens at scale cpu, a quarter of which_memory's length at the others.

A comparison of memories is one of tuned models, or it compares luck with rates. The name of a row
has its learning rate, of all that Muon does not take (MoVE: of all, Muon's matrices too, as in its
recipe). It is constant until it falls over the last 40%. Rates are the recipes' (LIMe's:
1e-3) times 3, 9 and 27, then 81, 243 or 1 where the outermost was best; MoVE's a ninth, a third,
one and three times nanochat's, with less weight decay also twice and four times that.

- "LIMe 0.003", "HierMem 0.015", ...: baselines. "MoVE memory", "UltraMemV2 memory": the memories.
- "decay 0.02": MoVE with a tenth of its recipe's weight decay, which grows with (12/depth)^2;
  "decay 0": with none; "bank x3": its bank at 3 times the recipe's rate.
- "Muon 0.0067": a third of the rate that Muon's matrices have otherwise.
- "routers": LIMe with a rate of their own; "memory 1/9": HierMem, the bank at a fraction.
- "values x3": UltraMemV2's values begin at 3 times the rate and fall to it.
- "published start": LIMe's K and V from the published code's variance.
- "long warm-up": 36 steps instead of 5.
- "continued", "grown", "post-hoc": start from the best of the first three baselines ("AdamW" and
  "Muon" rows from that at 0.16).

The "whole" rows (cpu_16M only) are as long as which_memory's, MoVE's with the recipe's weight
decay.
"""
from experiments.which_memory import cpu, cpu_4M, cpu_16M, gpu, models, prepare

model = "move"
metric = "val_bpb"
seeds = 1
whole = dict(cpu_16M)
cpu_4M = dict(cpu_4M, max_iters=240, eval_interval=60)
cpu_16M = dict(cpu_16M, max_iters=960, eval_interval=240)
gpu = dict(gpu, max_iters=200)
recipes = {
    "LIMe": 3e-3,
    "UltraMemV2": 4e-4,
    "HierMem": 5e-3,
    "MIDUS base": 2e-3,
    "MoVE": 2e-2 / 9,
}
variants = {}
baseline = {}


def add(title, first, rate, **keys):
    """A variant TITLE RATE; its baseline is FIRST."""
    name = f"{title} {rate:.2g}"
    rate = float(f"{rate:.2g}")
    owner = next(other for other in recipes if title.startswith(other.split()[0]))
    variants[name] = (dict(model=models.get(owner, "midus"), optimizer="muon", schedule="wsd",
                           learning_rate=rate, **keys), None)
    baseline[name] = first


for title, rate in recipes.items():
    for factor in (3, 9, 27):
        add(title, f"{title} {3 * rate:.2g}", factor * rate, dense=True)
for title, factor in (("LIMe", 81), ("MIDUS base", 81), ("MIDUS base", 243), ("MoVE", 1),
                      ("HierMem", 1), ("LIMe", 1), ("UltraMemV2", 1)):
    add(title, f"{title} {3 * recipes[title]:.2g}", factor * recipes[title], dense=True)
for factor in (3, 9, 27, 1):
    add("UltraMemV2 memory", "UltraMemV2 0.0012", factor * 4e-4)
    add("MoVE memory", "MoVE 0.0067", factor * 2e-2 / 9)
for decay in (0.0, 0.02):                                       # the recipe's 0.2: 1.8 at 4 layers
    for rate in (0.0067, 0.02, 0.04, 0.08):
        dense = f"MoVE decay {decay:g} at {rate:g}"
        add(f"MoVE decay {decay:g} at", "MoVE 0.0067", rate, dense=True, weight_decay=decay)
        add(f"MoVE memory decay {decay:g} at", dense, rate, weight_decay=decay)
for rate in (0.0067, 0.02):
    for title, keys in (("MoVE whole", dict(dense=True)), ("MoVE memory whole", {})):
        keys = dict(keys, model="move", learning_rate=rate, cpu_16M=whole)
        variants[f"{title} {rate:g}"] = (keys, None)
        baseline[f"{title} {rate:g}"] = f"MoVE whole {rate:g}"
for rate in (0.009, 0.027, 0.003):
    add("LIMe whole", "LIMe whole 0.009", rate, dense=True, cpu_16M=whole)
    add("LIMe routers whole", "LIMe whole 0.009", rate, router_lr=1e-2 / rate, cpu_16M=whole)
for rate in (0.015, 0.005):
    add("HierMem whole", "HierMem whole 0.015", rate, dense=True, cpu_16M=whole)
    add("HierMem memory 1/9 whole", "HierMem whole 0.015", rate, memory_lr=1 / 9, cpu_16M=whole)
for rate in (0.0012, 0.0004):
    add("UltraMemV2 whole", "UltraMemV2 whole 0.0012", rate, dense=True, cpu_16M=whole)
    add("UltraMemV2 memory whole", "UltraMemV2 whole 0.0012", rate, cpu_16M=whole)
for rate in (0.02, 0.04):
    for part in (1 / 9, 1 / 3, 3):
        add(f"MoVE memory bank x{part:.2g} decay 0.02 at", f"MoVE decay 0.02 at {rate:g}", rate,
            weight_decay=0.02, memory_lr=part)
for part in (1 / 3, 3, 9):
    add(f"UltraMemV2 values x{part:.2g} at", "UltraMemV2 0.0036", 36e-4,
        value_lr=part, value_lr_until=1.0)
for rate in (0.081, 0.027, 0.009, 0.003):
    for router in (1e-3, 3e-3, 1e-2):
        add(f"LIMe routers {router:.2g} at", f"LIMe {rate}", rate, router_lr=router / rate)
published = dict(kv_init=(3 * 128) ** -0.5)                     # of the published LIMe's K and V
add("LIMe published start at", "LIMe 0.081", 0.081, router_lr=1e-2 / 0.081, **published)
add("LIMe dense published start at", "LIMe 0.081", 0.081, dense=True, **published)
for title, rate in (("LIMe", 0.081), ("UltraMemV2", 36e-4), ("HierMem", 0.045)):
    add(f"{title} long warm-up at", f"{title} {rate:.2g}", rate, dense=True, warmup=0.15)
add("LIMe routers long warm-up at", "LIMe 0.081", 0.081, router_lr=1e-2 / 0.081, warmup=0.15)
for rate in (0.045, 0.015, 0.005):
    for part in (1, 3, 9, 27):
        add(f"HierMem memory 1/{part} at", f"HierMem {rate}", rate, memory_lr=1 / part)
for rate, part in ((0.015, 3), (0.045, 9)):                     # the bank's rate: 5e-3
    add("HierMem Muon 0.0067 at", "HierMem 0.045", rate, dense=True, muon_lr=67e-4)
    add(f"HierMem memory 1/{part} Muon 0.0067 at", "HierMem 0.045", rate, memory_lr=1 / part,
        muon_lr=67e-4)
for factor in (1, 3, 9):
    add("MIDUS base continued", "MIDUS base 0.054", factor * 15e-4,
        init_from="@MIDUS base 0.054", phase="cpt", upscale="base")
    add("MIDUS grown", "MIDUS base 0.054", factor * 6e-3,
        init_from="@MIDUS base 0.054", phase="cpt", upscale="midus")
    add("HierMem continued", "HierMem 0.045", factor * 5e-3,
        init_from="@HierMem 0.045", dense=True)
    add("HierMem post-hoc", "HierMem 0.045", factor * 5e-3,
        init_from="@HierMem 0.045", memory="ffn", frozen=True, memory_lr=1 / 3)
# What else MIDUS may want: another optimizer, faster values, a norm of its queries, a lower rate of
# Muon.
adamw = dict(optimizer="adamw", schedule="cosine")
for title, keys in {
        "AdamW 0.0005": dict(adamw, learning_rate=5e-4),
        "AdamW 0.002": dict(adamw, learning_rate=2e-3),
        "AdamW 0.002 values 10x": dict(adamw, learning_rate=2e-3, value_lr=10.0),
        "AdamW 0.002 values 100x": dict(adamw, learning_rate=2e-3, value_lr=100.0),
        "AdamW 0.006 batch norm": dict(adamw, learning_rate=6e-3, queries="batch_norm"),
        "Muon 0.0005": dict(optimizer="muon", schedule="wsd", muon_lr=5e-4, learning_rate=6e-3),
}.items():
    grown = dict(model="midus", init_from="@MIDUS base 0.16", phase="cpt", upscale="midus")
    variants[f"MIDUS grown {title}"] = (dict(grown, **keys), None)
    baseline[f"MIDUS grown {title}"] = "MIDUS base 0.16"
