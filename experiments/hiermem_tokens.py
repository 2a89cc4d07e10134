"""Hierarchical memories, Figures 7 and 8: memories keep gaining with the tokens that they have seen, and fetched ones more than the generic one.

Of one level of 64 nodes, on hiermem_memories.py's anchor, frozen or learning on: `python train.py experiments/hiermem_memories.py --only=anchor`
first. A variant's name has its tokens as a multiple of 1.05M (gpu: 131M); each is a whole schedule. The bank has 2.75M numbers (gpu: 220M): 0.1 to
1.5 tokens for each, where the paper has 1 to 312. `python experiments/analysis.py retrieval` then gives each run's loss with the generic memories:
the gap of Figure 8."""
from experiments.hiermem_memories import cpu, gpu, prepare

model, metric, seeds = "hiermem", "val_loss", 1
bank = dict(init_from="@hiermem_memories/anchor", weight_decay=1e-3, memory="ffn")
tokens = {"x1/4": (256, 250), "x1/2": (512, 500), "x1": (1024, 1000), "x2": (2048, 2000), "x4": (4096, 4000)}               # steps (cpu, gpu)
steps = lambda cpu, gpu, **more: dict(bank, **more, cpu=dict(ranks="0,16", skip_steps=1024, memory_lr=1 / 3, max_iters=cpu, eval_interval=cpu),
                                      gpu=dict(ranks="0,16", skip_steps=1000, learning_rate=1e-4, min_lr=1e-5, max_iters=gpu, eval_interval=gpu))
variants = {f"frozen {k}": (steps(*n, frozen=True), None) for k, n in tokens.items()}
variants |= {f"co-trained {k}": (steps(*n), None) for k, n in tokens.items() if k != "x4"}
baseline = {name: f"{name.split()[0]} x1/4" for name in variants}
claims = [" > ".join(f"frozen {k}" for k in tokens), " > ".join(f"co-trained {k}" for k in tokens if k != "x4")]
