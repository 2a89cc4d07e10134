"""Hierarchical memories, the kinds of block of hiermem_memories.py: the learning rate of each on a
CPU, one seed, for a quarter of the steps. (On a GPU all have A.2's.)

First make the anchor: `python train.py experiments/hiermem_table1.py --only="A1 anchor" --seeds=1`.
"""
from experiments.hiermem_memories import KINDS, bank, cpu, gpu, prepare

model = "hiermem"
metric = "val_loss"
baseline = "ffn 0.01"
seeds = 1
cpu = dict(cpu, max_iters=500, warmup=0.4)                      # 200 steps, as in the table
grid = [(kind, rate) for rate in (1e-2, 2e-2, 5e-3) for kind in KINDS]
grid += [(kind, 2.5e-3) for kind in KINDS if "lora" in kind] + [("kv", 4e-2)]
variants = {}
for kind, rate in grid:
    variants[f"{kind} {rate:g}"] = (dict(bank(kind, rate), gpu=None), None)
