"""The learning rate at which each architecture of which_memory.py, and its baseline, is best: a quarter of its steps, one seed, its recipe's rate and others.

The winners belong in which_memory.py's `rates`: a comparison of memories is one of tuned models, or it compares luck with rates. LIMe's routers stay at
the paper's 1e-2 whatever the others' rate."""
from experiments.which_memory import cpu, gpu, plain, prepare

model, metric, seeds = "move", "val_bpb", 1
cpu, gpu = dict(cpu, max_iters=248, eval_interval=124), dict(gpu, max_iters=200, eval_interval=100)
rates = {"MoVE": (.01, .02, .04), "LIMe": (1e-3, 2e-3, 4e-3, 8e-3), "UltraMemV2": (2e-4, 4e-4, 8e-4, 16e-4), "HierMem": (2.5e-3, 5e-3, 1e-2)}    # differences: to the second
variants, baseline = {}, {}
for title, tried in rates.items():
    for name, keys in ((f"{title} dense", dict(dense=True)), (title, {})):
        for rate in tried:
            routers = dict(router_lr=1e-2 / rate) if name == "LIMe" else {}
            variants[f"{name} {rate:g}"] = dict(model=plain[title], learning_rate=rate, **keys, **routers), None
            baseline[f"{name} {rate:g}"] = f"{name} {tried[1]:g}"
variants |= {f"MIDUS base {rate:g}": (dict(model="midus", dense=True, learning_rate=rate), None) for rate in (1e-3, 2e-3, 4e-3)}
baseline |= {name: "MIDUS base 0.002" for name in variants if name.startswith("MIDUS")}
