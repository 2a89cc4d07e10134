"""Hierarchical memories, Figures 7 and 8: memories keep gaining with the tokens that they have
seen, and fetched ones more than the generic one.

Of one level of 64 nodes, on hiermem_memories.py's anchor, frozen or learning on: `python train.py
experiments/hiermem_memories.py --only=anchor` first. A variant's name has its tokens as a multiple
of 8.2M (gpu: 131M); each is a whole schedule. The bank has 2.75M numbers (gpu: 220M): 0.4 to 6
tokens for each, where the paper has 1 to 312. `python experiments/analysis.py retrieval` then gives
each run's loss with the generic memories: the gap of Figure 8.
"""
from experiments.hiermem_memories import cpu, gpu, prepare

model = "hiermem"
metric = "val_loss"
seeds = 1
steps = {"x1/8": (250, 125), "x1/4": (500, 250), "x1/2": (1000, 500), "x1": (2000, 1000),
         "x2": (4000, 2000)}                                    # cpu, gpu
variants = {}
baseline = {}
claims = []
for kind, frozen in (("frozen", True), ("co-trained", False)):
    for name, (on_cpu, on_gpu) in steps.items():
        bank = dict(init_from="@hiermem_memories/anchor", weight_decay=1e-3, memory="ffn",
                    frozen=frozen,
                    cpu=dict(ranks="0,16", skip_steps=2000, max_iters=on_cpu),
                    gpu=dict(ranks="0,16", skip_steps=1000, learning_rate=1e-4, min_lr=1e-5,
                             max_iters=on_gpu))
        variants[f"{kind} {name}"] = (bank, None)
        baseline[f"{kind} {name}"] = f"{kind} x1/8"
    claims.append(" > ".join(f"{kind} {name}" for name in steps))
