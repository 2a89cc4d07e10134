"""The learning rates at which the models of which_memory.py are best: a quarter of its steps, one seed.

A comparison of memories is one of tuned models, or it compares luck with rates. The first number is muon_lr, for the matrices; the second the rate of
all else, from the paper's (LIMe's: 1e-3) upwards until the loss rises again. The rates are constant until they fall to zero over the last 40%, as in
MoVE's recipe, whose own rates are nanochat's and were not tuned. A memory that is a table learns at the second rate, too, and has rows of its own;
HierMem's bank wants a fraction of it. Whole runs want less than quarter runs: which_memory.py's `tuned` are close to the winners here, or below."""
from experiments.which_memory import cpu, gpu, plain, prepare

model, metric, seeds = "move", "val_bpb", 1
cpu, gpu = dict(cpu, max_iters=248, eval_interval=248), dict(gpu, max_iters=200, eval_interval=200)
recipes, variants, baseline = {"LIMe": 3e-3, "UltraMemV2": 4e-4, "HierMem": 5e-3, "MIDUS base": 2e-3}, {}, {}


def add(title, name, muon, rate, **keys):
    name = f"{title}{name} {muon:g} {rate:.2g}" + (f"/{1 / keys['memory_lr']:.0f}" if "memory_lr" in keys else "")
    variants[name] = dict(model=plain.get(title, "midus"), optimizer="muon", schedule="wsd", muon_lr=muon, learning_rate=rate, **keys), None
    baseline[name] = f"{title} whole run 0.02 0.015" if "whole" in name else f"{title} 0.02 {recipes[title]:.2g}"


for title, rate in recipes.items():
    for factor in (1, 3, 9, 27, *(81, 243) * (title == "MIDUS base")):
        add(title, "", .02, factor * rate, dense=True)
    add(title, "", .04, rate, dense=True)
    if title != "MIDUS base":
        add(title, "", .01, 9 * rate, dense=True)
for factor in (3, 9):
    add("HierMem", " whole run", .02, factor * 5e-3, dense=True, cpu=dict(max_iters=992))
for factor in (3, 9, 27):
    add("UltraMemV2", " memory", .02, factor * 4e-4)
for more in (4, 1 / 3, 1 / 9):                                  # the tables at four times the rate at first, as in the paper's Figure 13, or at a fraction of it
    add("UltraMemV2", f" values x{more:.2g}", .02, 36e-4, value_lr=more, **dict(value_lr_until=1e9) if more < 1 else {})
for factor in (3, 9):
    add("HierMem", " memory", .02, factor * 5e-3)
for part in (3, 9, 27):
    add("HierMem", " memory", .02, .045, memory_lr=1 / part)
