"""Hierarchical memories, Figures 7 and 8: memories keep gaining with the tokens that they have
seen, and fetched ones more than the generic one. (That larger ones gain longer is our guess.)

Of one level of 64 nodes, on hiermem_table1.py's anchor, frozen or learning on: `python train.py
experiments/hiermem_table1.py --only="A1 anchor"` first. A variant's name has its rank, and its
tokens as a multiple of 8.2M (gpu: 131M); each is a whole schedule, with as many steps of warm-up.
The bank has 2.75M numbers at rank 16 (gpu: 220M), five times as many at rank 80: at rank 16 0.7 to
6 tokens (gpu: 0.15 to 1.2) for each, where the paper has 1 to 312. Beside "co-trained x1/2" and
"x1" stand "A1 continued" of hiermem_rates.py and hiermem_table1.py. `python experiments/analysis.py
retrieval` then gives each run's loss with the generic memories: the gap of Figure 8, which is the
verdict.
"""
from experiments.hiermem_memories import cpu, gpu, post, prepare

model = "hiermem"
metric = "val_loss"
seeds = 1
steps = {                       # cpu, gpu
    "x1/4": (500, 250), "x1/2": (1000, 500), "x1": (2000, 1000), "x2": (4000, 2000),
}
co_trained = dict(post, frozen=False)
kinds = {                       # keys, ranks, cpu's rates, lengths
    "rank 16": (post, "0,16", dict(learning_rate=1e-2), ("x1/4", "x1", "x2")),
    "rank 80": (post, "0,80", dict(learning_rate=1e-2), ("x1/4", "x1", "x2")),
    "co-trained": (co_trained, "0,16", dict(learning_rate=5e-3, memory_lr=2.0),
                   ("x1/2", "x1", "x2")),
}
variants = {}
baseline = {}
claims = []
for kind, (keys, ranks, rates, lengths) in kinds.items():
    for name in lengths:
        on_cpu, on_gpu = steps[name]
        on_cpu = dict(rates, skip_steps=2000, max_iters=on_cpu, warmup=200 / on_cpu)
        on_gpu = dict(learning_rate=1e-4, min_lr=1e-5, skip_steps=1000, max_iters=on_gpu,
                      warmup=100 / on_gpu)
        bank = dict(keys, memory="ffn", ranks=ranks, cpu=on_cpu, gpu=on_gpu)
        variants[f"{kind} {name}"] = (bank, None)
        baseline[f"{kind} {name}"] = f"{kind} {lengths[0]}"
    claims.append(" > ".join(f"{kind} {name}" for name in lengths))
claims += ["rank 16 x1/4 > rank 80 x1/4", "rank 16 x2 > rank 80 x2"]
