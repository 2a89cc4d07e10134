"""UltraMemV2, Table 3: the learning rate of each model, one seed, a quarter of the table's length.

The first rate is the published one. Memory+'s values stay at 1e-3.
"""
from experiments.ultramem_table3 import cpu, gpu, prepare
from experiments.ultramem_table3 import variants as ladder

model = "ultramem"
metric = "val_loss"
seeds = 1
cpu = dict(cpu, max_iters=250, warmup=0.4)                      # 100 steps, as in the table
gpu = dict(gpu, max_iters=250, warmup=0.4)
variants = {}
baseline = {}
for title, (keys, *_) in ladder.items():
    for rate in (4e-4, 8e-4, 16e-4, 32e-4):
        variants[f"{title} {rate:g}"] = (dict(keys, learning_rate=rate), None)
        baseline[f"{title} {rate:g}"] = f"{title} 0.0016"
