"""Hierarchical memories, Figure 3c: of a tree's levels, with as large a fetch from each, the deeper one is worth more.

A tree of 4, 16 and 64 nodes (gpu: 16, 256, 4,096), memories of one level only, on a frozen anchor. The paper's memories see 275B tokens, so that even a node
of its level 4 sees 4M; here it is 260k for one of level 1 and 16k for one of level 3: deeper should stop paying somewhere."""
from experiments.hiermem_memories import cpu, gpu, post

model, metric, baseline, seeds = "hiermem", "val_loss", "anchor", 1
prepare = dict(cpu="--source=fineweb_edu --tokenizer=bpe --vocab_size=4096 --max_tokens=20_000_000 --clusters=4,4,4 --out=data/fineweb_edu_4_4_4",
               gpu="--source=fineweb_edu --max_tokens=400_000_000 --clusters=16,16,16 --out=data/fineweb_edu_16_16_16")
cpu, gpu = dict(cpu, clusters="4,4,4"), dict(gpu, clusters="16,16,16")
level = lambda ranks: (dict(post, memory="ffn", cpu=dict(ranks=ranks, skip_steps=1024, memory_lr=1 / 3),
                            gpu=dict(ranks=ranks, skip_steps=1000, learning_rate=1e-4, min_lr=1e-5)), None)
variants = {"anchor": (dict(dense=True), None), "level 1": level("80,0,0"), "level 2": level("0,80,0"), "level 3": level("0,0,80")}
claims = ["anchor > level 1 > level 2 > level 3"]
