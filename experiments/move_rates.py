"""MoVE: learning rates, one seed, a quarter of move_table1.py's length.

For each number of slots the bank's rate: 1, 1/sqrt(M) and 1/M of the recipe's, with M = x L/2 slots
in the bank. And the rate that moves all others, Muon's too, at half and twice the recipe's 0.02,
for the standard model and for MoVE x1. On a CPU also with the recipe's whole weight decay.
"""
from experiments.move_table1 import cpu, gpu, prepare

model = "move"
metric = "val_bpb"
seeds = 1
cpu = dict(cpu, max_iters=250)
gpu = dict(gpu, max_iters=250)
variants = {}
baseline = {}
for rate in (0.01, 0.02, 0.04):
    variants[f"standard {rate:g}"] = (dict(dense=True, learning_rate=rate), None)
    baseline[f"standard {rate:g}"] = "standard 0.02"
for x in (1, 2, 4, 8):
    for name, power in (("1", 0), ("1/sqrt(M)", 0.5), ("1/M", 1)):
        keys = dict(memory="move", memory_scale=x,
                    cpu=dict(memory_lr=(2 * x) ** -power),
                    gpu=dict(memory_lr=(6 * x) ** -power))
        variants[f"x{x} rate {name}"] = (keys, None)
        baseline[f"x{x} rate {name}"] = f"x{x} rate 1"
whole = dict(cpu=dict(weight_decay=0.2))
variants["standard decay 0.2"] = (dict(whole, dense=True), None)
baseline["standard decay 0.2"] = "standard 0.02"
variants["x1 decay 0.2"] = (dict(whole, memory="move", memory_scale=1), None)
baseline["x1 decay 0.2"] = "x1 rate 1"
for rate in (0.01, 0.04):
    keys = dict(memory="move", memory_scale=1, learning_rate=rate)
    variants[f"x1 at {rate:g}"] = (keys, None)
    baseline[f"x1 at {rate:g}"] = "x1 rate 1"
