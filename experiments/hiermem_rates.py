"""Hierarchical memories, Table 1: the learning rates of each row, one seed.

What starts from scratch has a quarter of its steps. What goes on from hiermem_table1.py's anchor
has half of them: a leaf of the tree is read by one sequence in 64, on average. Where anchor and
bank learn together each has its rate, "A2 co-trained 0.0025 bank 0.005"; a frozen anchor has the
bank's alone. "Whole" rows have all steps. What else a frozen anchor's bank may want: AdamW that
moves all rows at every step, by momentum ("dense AdamW"); the whole fetch from level 1, whose
blocks see eight times as much text. First make that anchor:
`python train.py experiments/hiermem_table1.py --only="A1 anchor" --seeds=1`.
"""
from experiments.hiermem_table1 import cpu, gpu, prepare
from experiments.hiermem_table1 import variants as table

model = "hiermem"
metric = "val_loss"
seeds = 1
whole = dict(cpu=cpu, gpu=gpu)
cpu = dict(cpu, max_iters=500, warmup=0.4)                      # as many steps as in the table
gpu = dict(gpu, max_iters=250, warmup=0.4)
variants = {}
baseline = {}
grid = {                        # rates; of the bank, where both learn
    "A1 anchor": ((2.5e-3, 5e-3, 1e-2, 2e-2), ()),
    "A1 continued": ((1.25e-3, 2.5e-3, 5e-3, 1e-2), ()),
    "A3 frozen": ((5e-3, 1e-2, 2e-2, 4e-2), ()),
    "A2 co-trained": ((2.5e-3, 5e-3, 1e-2), (5e-3, 1e-2, 2e-2)),
    "A4 from scratch": ((5e-3, 1e-2, 2e-2), (1.7e-3, 5e-3, 1e-2)),
    "wider": ((5e-3, 1e-2, 2e-2), ()),
}


def shortened(title, scale, rate):
    """The row's own settings at this scale, for a part of its steps at this rate."""
    keys = table[title][0]
    own = dict(keys.get(scale, {}), learning_rate=rate)
    own.pop("memory_lr", None)
    if "init_from" in keys:
        own.update(max_iters=whole[scale]["max_iters"] // 2, warmup=0.2)
    elif "max_iters" in own:
        own["max_iters"] //= 4
    return own


def add(title, rate, bank=None, note="", **more):
    keys = dict(table[title][0], **more)
    if "init_from" in keys:
        keys["init_from"] = "@hiermem_table1/A1 anchor"
    name = f"{title} {rate:g}"
    if bank:
        keys["memory_lr"] = round(bank / rate, 4)
        name += f" bank {bank:g}"
    name += note
    keys.update(cpu=shortened(title, "cpu", rate), gpu=shortened(title, "gpu", rate))
    variants[name] = (keys, None)
    return name


for title, (rates, banks) in grid.items():
    names = [add(title, rate, bank) for rate in rates for bank in banks or (None,)]
    goes_on = "init_from" in table[title][0]
    baseline.update(dict.fromkeys(names, "A1 continued 0.005" if goes_on else names[0]))
for rate in (1e-2, 2e-2):
    dense = add("A3 frozen", rate, note=" dense AdamW", sparse_memory=False)
    level = add("A3 frozen", rate, note=" level 1", ranks="88,0")
    variants[level][0]["gpu"]["ranks"] = "320,0"
    baseline[dense] = baseline[level] = "A1 continued 0.005"
for rate in (5e-3, 1e-2, 2e-2):
    scales = {scale: dict(keys, learning_rate=rate) for scale, keys in whole.items()}
    variants[f"A1 anchor whole {rate:g}"] = (dict(dense=True, **scales), None)
    baseline[f"A1 anchor whole {rate:g}"] = "A1 anchor whole 0.005"
