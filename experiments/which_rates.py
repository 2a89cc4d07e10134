"""The learning rates at which the models of which_memory.py are best: a quarter of its steps, one
seed.

A comparison of memories is one of tuned models, or it compares luck with rates. The first number is
muon_lr, for the matrices; the second the rate of all else, from the paper's (LIMe's: 1e-3) upwards
until the loss rises again. The rates are constant until they fall to zero over the last 40%, as in
MoVE's recipe, whose own rates are nanochat's and were not tuned. A memory that is a table learns at
the second rate, too, and has rows of its own; HierMem's bank wants a fraction of it.
"""
from experiments.which_memory import cpu, gpu, models, prepare

model = "move"
metric = "val_bpb"
seeds = 1
cpu = dict(cpu, max_iters=500)
gpu = dict(gpu, max_iters=200)
recipes = {"LIMe": 3e-3, "UltraMemV2": 4e-4, "HierMem": 5e-3, "MIDUS base": 2e-3}
variants = {}
baseline = {}


def add(title, what, muon, rate, **keys):
    """A variant TITLE WHAT, MUON RATE; its baseline is the dense model at the recipe's rate."""
    name = f"{title}{what} {muon:g} {rate:.2g}"
    variants[name] = (dict(model=models.get(title, "midus"), optimizer="muon", schedule="wsd",
                           muon_lr=muon, learning_rate=rate, **keys), None)
    baseline[name] = f"{title} 0.02 {recipes[title]:.2g}"


for title, rate in recipes.items():
    for factor in (1, 3, 9, 27):
        add(title, "", 0.02, factor * rate, dense=True)
    add(title, "", 0.04, rate, dense=True)
    add(title, "", 0.01, 9 * rate, dense=True)
for factor in (3, 9, 27):
    add("UltraMemV2", " memory", 0.02, factor * 4e-4)
for factor in (3, 9):
    add("HierMem", " memory", 0.02, factor * 5e-3)
# UltraMemV2's tables at four times the rate at first (Figure 13), or at a fraction throughout.
add("UltraMemV2", " values x4", 0.02, 36e-4, value_lr=4.0)
for part in (3, 9):
    add("UltraMemV2", f" values /{part}", 0.02, 36e-4, value_lr=1 / part, value_lr_until=1e9)
for part in (3, 9, 27):
    add("HierMem", f" memory /{part}", 0.02, 0.045, memory_lr=1 / part)
