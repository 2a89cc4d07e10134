"""Which memory is worth its cost? Each architecture against its own plain baseline: same data, tokens and shape, paired seeds.

The text is educational prose with invented facts in it, each mentioned 1 to 100 times (experiments/tasks.py facts), and a run goes over it once, so
that one run gives both the bits per byte and what was remembered. MIDUS and the post-hoc bank start from the trained baseline and are compared
with going on with the baseline over the same text. The baselines' runs of 1.5 times the tokens say what more steps would have bought.
`python experiments/which_memory.py` measures the costs, if they are not there yet, and makes the table and the two pictures of the README.
"""
model, metric, seeds = "move", "val_bpb", 3
prepare = dict(cpu="experiments/tasks.py facts --clusters=8,8 --text_chars=3200000 --out=data/facts_cpu",
               gpu="experiments/tasks.py facts --clusters=16,16 --text_chars=400000000 --per_bucket=208 --vocab_size=16384 --out=data/facts_gpu")
cpu = dict(depth=4, n_embd=128, batch_size=16, batch_tokens=4096, max_iters=248, eval_interval=124, eval_tokens=109568, sample_tokens=0)
gpu = dict(depth=12, batch_tokens=131072, max_iters=800, eval_interval=400, sample_tokens=0)           # batches of 131k tokens: about one epoch
longer = {"cpu": dict(max_iters=372), "gpu": dict(max_iters=1200)}
plain = {"MoVE": "move", "LIMe": "lime", "UltraMemV2": "ultramem", "HierMem": "hiermem"}
variants = {}
for title, file in plain.items():
    variants |= {f"{title} dense": (dict(model=file, dense=True), None), title: (dict(model=file), None)}
variants |= {
    "MIDUS base": (dict(model="midus", dense=True), None),
    "MIDUS base continued": (dict(model="midus", init_from="@MIDUS base", upscale="base", phase="cpt"), None),
    "MIDUS": (dict(model="midus", init_from="@MIDUS base", upscale="midus", phase="cpt"), None),
    "HierMem dense continued": (dict(model="hiermem", dense=True, init_from="@HierMem dense"), None, 1),
    "HierMem post-hoc": (dict(model="hiermem", frozen=True, init_from="@HierMem dense"), None, 1),
}
variants |= {f"{title} dense x1.5": (dict(model=file, dense=True, **longer), None, 1) for title, file in plain.items()}
baseline = {title: f"{title} dense" for title in plain} | {f"{title} dense x1.5": f"{title} dense" for title in plain}
baseline |= {"MIDUS": "MIDUS base continued", "MIDUS base continued": "MIDUS base", "HierMem post-hoc": "HierMem dense continued",
             "HierMem dense continued": "HierMem dense"}
claims = [f"{other} > {title}" for title, other in baseline.items() if title in (*plain, "MIDUS", "HierMem post-hoc")]
