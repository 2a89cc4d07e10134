"""Hierarchical memories, Figure 3c: of a tree's levels, with as large a fetch from each, the deeper
one is worth more.

A tree of 4, 16 and 64 nodes (gpu: 16, 256, 4,096), memories of one level only, on a frozen anchor.
The paper's memories see 275B tokens or more (at level 4 2.2T: 34M a node); here it is 4M for a node
of level 1 and 260k for one of level 3: deeper should stop paying somewhere.
"""
from experiments.hiermem_memories import cpu as one_level
from experiments.hiermem_memories import gpu as one_level_gpu
from experiments.hiermem_memories import post

model = "hiermem"
metric = "val_loss"
baseline = "anchor"
seeds = 3
prepare = dict(
    cpu="--source=fineweb_edu --tokenizer=bpe --vocab_size=4096 --max_tokens=30_000_000 "
        "--clusters=4,4,4 --out=data/fineweb_edu_4_4_4",
    gpu="--source=fineweb_edu --max_tokens=400_000_000 --clusters=16,16,16 "
        "--out=data/fineweb_edu_16_16_16")
cpu = dict(one_level, clusters="4,4,4")
gpu = dict(one_level_gpu, clusters="16,16,16")


def level(ranks):
    return dict(post, memory="ffn", cpu=dict(ranks=ranks, skip_steps=2000, max_iters=4000),
                gpu=dict(ranks=ranks, skip_steps=1000, learning_rate=1e-4, min_lr=1e-5))


variants = {
    "anchor": (dict(dense=True), None),
    "level 1": (level("80,0,0"), None),
    "level 2": (level("0,80,0"), None),
    "level 3": (level("0,0,80"), None),
}
claims = ["anchor > level 1 > level 2 > level 3"]
