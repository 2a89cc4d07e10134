"""UltraMemV2, Table 3: the learning rate of each model, one seed, a quarter of the table's length.

The first rate is the published one. All end at 4e-5, which is a tenth of that (Memory+'s values
keep theirs). Few slots, the appendix's start and plain UltraMem have the rates of the rows here.
"""
from experiments.ultramem_table3 import cpu, gpu, prepare
from experiments.ultramem_table3 import variants as table3

model = "ultramem"
metric = "val_loss"
seeds = 1
cpu = dict(cpu, max_iters=250, warmup=0.4)                      # 100 steps, as in the table
gpu = dict(gpu, max_iters=250, warmup=0.4)
swept = ("dense", "UltraMemV2", "UltraMemV2 values 4x", "MoE-8", "MoE-8 as FFN",
         "UltraMem values 4x", "Memory+", "PKM", "PEER")
variants = {}
baseline = {}


def add(title, rate):
    keys = table3[title][0]
    own = dict(keys.get("cpu", {}), learning_rate=rate)         # in place of the table's
    variants[f"{title} {rate:g}"] = (dict(keys, learning_rate=rate, cpu=own), None)
    baseline[f"{title} {rate:g}"] = f"{title} 0.0016"


for title in swept:
    for rate in (4e-4, 8e-4, 16e-4, 32e-4):
        add(title, rate)
add("MoE-8", 64e-4)
