"""The learning rates of what starts from a trained baseline in which_memory.py, one seed, 3.9M
tokens (cpu_16M: 15.7M): MIDUS, the post-hoc bank, and their baselines going on. On the text of the
rows (3.9M: of the EPYC's); those of 1M tokens are in which_rates.py.

The name of a row has its learning rate, of all that Muon does not take; the post-hoc bank has a
third of it, and all else is frozen. "Muon 0.007" has about a third of Muon's own rate, 0.02, at
which going on begins by unlearning. Scale cpu_16M, with 15.7M tokens, asks whether a better rate
would keep going on with HierMem's baseline ahead of the bank.
"""
from experiments import which_memory
from experiments.which_memory import prepare, started, untuned

model = "midus"
metric = "val_bpb"
seeds = 1
prepare = dict(prepare, cpu=prepare["cpu_4M"])
cpu = which_memory.cpu_4M
cpu_16M = which_memory.cpu_16M
gpu = dict(which_memory.gpu, max_iters=200)
# What goes on or grows starts from these; which_memory.py's MIDUS base has 0.006, level with 0.018.
bases = {"midus": "MIDUS base 0.018", "hiermem": "HierMem dense 0.015"}
grid = [("HierMem dense", 15e-3)]                               # by which_rates.py, 3.9M tokens
grid += [("MIDUS base", rate) for rate in (54e-3, 18e-3, 6e-3, 162e-3)]
grid += [("MIDUS base continued", rate) for rate in (135e-4, 45e-4, 15e-4)]
grid += [("MIDUS", rate) for rate in (18e-3, 6e-3, 2e-3, 54e-3)]
grid += [("HierMem dense continued", rate) for rate in (15e-3, 5e-3, 15e-4)]
grid += [("HierMem post-hoc", rate) for rate in (15e-3, 5e-3, 45e-3)]
variants = {}
baseline = {}
for title, rate in grid:
    name = title.split()[0].lower()
    keys = dict(started.get(title, dict(dense=True)))
    if "init_from" in keys:
        keys["init_from"] = f"@{bases[name]}"
    if title == "HierMem post-hoc":
        keys["memory_lr"] = 1 / 3
    variants[f"{title} {rate:g}"] = (dict(untuned, model=name, learning_rate=rate, **keys), None)
    baseline[f"{title} {rate:g}"] = bases[name]
slow_muon = dict(variants["HierMem dense continued 0.005"][0], muon_lr=7e-3)
variants["HierMem dense continued 0.005 Muon 0.007"] = (slow_muon, None)
baseline["HierMem dense continued 0.005 Muon 0.007"] = bases["hiermem"]
