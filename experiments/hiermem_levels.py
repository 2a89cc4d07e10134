"""Hierarchical memories, Figure 3c: of a tree's levels, with as large a fetch from each, the deeper
one is worth more.

A tree of 2, 6 and 18 nodes (gpu: 4, 32, 256), memories of one level only, on hiermem_table1.py's
anchor, frozen: `python train.py experiments/hiermem_table1.py --only="A1 anchor"` first. That has
seen about a third of the text before. With a generic share of 1/17 the smallest of the 18 leaves
sees 330,000 of the CPU's 16M tokens (on textbooks), each of the 2 nodes of level 1 some 7M. The
levels of the paper's Figure 3d see 69B to 2.2T in all.

Being told one of n nodes is worth up to log(n)/256 nats a token: 0.003, 0.007 and 0.011. The paper
fetches by the question. So `python experiments/analysis.py retrieval` gives the verdict: each
level's loss with the memories that the first 32 tokens ask for.
"""
from experiments.hiermem_memories import cpu as one_level
from experiments.hiermem_memories import gpu as one_level_gpu
from experiments.hiermem_memories import post

model = "hiermem"
metric = "val_loss"
baseline = "level 1"
seeds = 3
prepare = dict(
    cpu="--source=fineweb_edu --tokenizer=bpe --vocab_size=4096 --max_tokens=30_000_000 "
        "--clusters=2,3,3 --out=data/fineweb_edu_2_3_3",
    gpu="--source=fineweb_edu --max_tokens=400_000_000 --clusters=4,8,8 "
        "--out=data/fineweb_edu_4_8_8")
cpu = dict(one_level, clusters="2,3,3", max_iters=4000, warmup=0.05)
gpu = dict(one_level_gpu, clusters="4,8,8")
variants = {}
for n, ranks in (1, "80,0,0"), (2, "0,80,0"), (3, "0,0,80"):
    keys = dict(post, memory="ffn", generic=1 / 17, ranks=ranks, cpu=dict(learning_rate=1e-2),
                gpu=dict(learning_rate=1e-4, min_lr=1e-5))
    variants[f"level {n}"] = (keys, None)
claims = ["level 1 > level 2 > level 3"]
