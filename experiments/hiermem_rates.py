"""Hierarchical memories, Table 1: the learning rates of each row, one seed, a quarter as long.

A frozen anchor has one rate, the bank's. Where both learn, the bank learns at the anchor's rate or
at a ninth of it. Rows that go on start from hiermem_table1.py's anchor:
`python train.py experiments/hiermem_table1.py --only="A1 anchor" --seeds=1`.
"""
from experiments.hiermem_table1 import cpu, gpu, prepare
from experiments.hiermem_table1 import variants as table

model = "hiermem"
metric = "val_loss"
seeds = 1
cpu = dict(cpu, max_iters=500, warmup=0.4)                      # as many steps as in the table
gpu = dict(gpu, max_iters=250, warmup=0.4)
variants = {}
baseline = {}


def quarter(keys, scale, rate):
    """The row's own settings at this scale, for a quarter of its steps at this rate."""
    own = dict(keys.get(scale, {}), learning_rate=rate)
    if "max_iters" in own:
        own["max_iters"] //= 4
    return own


for title, (keys, *_) in table.items():
    both_learn = not keys.get("dense") and not keys.get("frozen")
    rates = (2.5e-3, 5e-3, 1e-2)
    if "init_from" in keys:
        keys = dict(keys, init_from="@hiermem_table1/A1 anchor")
        rates = (1.25e-3, 2.5e-3, 5e-3)
    for rate in rates:
        chosen = dict(keys, cpu=quarter(keys, "cpu", rate), gpu=quarter(keys, "gpu", rate))
        variants[f"{title} {rate:g}"] = (chosen, None)
        baseline[f"{title} {rate:g}"] = f"{title} 0.005"
        if both_learn:
            variants[f"{title} {rate:g} bank 1/9"] = (dict(chosen, memory_lr=1 / 9), None)
            baseline[f"{title} {rate:g} bank 1/9"] = f"{title} 0.005"
