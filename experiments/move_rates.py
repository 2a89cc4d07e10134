"""MoVE: the bank's learning rate for each number of slots, at a quarter of move_table1.py's length.

The rates are 1, 1/sqrt(M) and 1/M of the recipe's, with M = x L/2 slots in the bank.
"""
from experiments.move_table1 import cpu, gpu, prepare

model = "move"
metric = "val_bpb"
seeds = 1
cpu = dict(cpu, max_iters=250)
gpu = dict(gpu, max_iters=250)
variants = {}
baseline = {}
for x in (1, 2, 4, 8):
    for name, power in (("1", 0), ("1/sqrt(M)", 0.5), ("1/M", 1)):
        keys = dict(memory="move", memory_scale=x,
                    cpu=dict(memory_lr=(2 * x) ** -power),
                    gpu=dict(memory_lr=(6 * x) ** -power))
        variants[f"x{x} rate {name}"] = (keys, None)
        baseline[f"x{x} rate {name}"] = f"x{x} rate 1"
