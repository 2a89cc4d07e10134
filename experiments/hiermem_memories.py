"""Hierarchical memories on a frozen anchor: what a block is (Figure 3's types, at equal size), and
in which layers it stands (Table 9).

The paper's numbers are log perplexities of Wikipedia: Table 9's. It finds FFN memories best, and
memories in all layers (by perplexity; late ones are as good in accuracy). Its blocks are of level
2; so they are here on a GPU. On a CPU they are of level 1, for of the 64 nodes of level 2 most
would see less than 200,000 tokens.

On hiermem_table1.py's anchor: `python train.py experiments/hiermem_table1.py --only="A1 anchor"`.
Each kind's rate on a CPU is the best of hiermem_kind_rates.py.
"""
from math import log

from experiments.hiermem_table1 import cpu, prepare

model = "hiermem"
metric = "val_loss"
baseline = "ffn"
seeds = 3
gpu = dict(preset="openlm_160m", block_size=1024, batch_tokens=131072, max_iters=1000,
           eval_interval=125, clusters="16,16", ranks="0,80", warmup=0.1)
post = dict(init_from="@hiermem_table1/A1 anchor", frozen=True, weight_decay=1e-3)      # A.2
KINDS = {                       # ranks: cpu, gpu; the rate on a CPU
    "ffn": ("80,0", "0,80", 1e-2),
    "lora_qk": ("60,0", "0,69", 2.5e-3),
    "lora_vo": ("60,0", "0,69", 2.5e-3),
    "lora_ffn": ("16,0", "0,16", 5e-3),
    "kv": ("120,0", "0,160", 4e-2),
}


def bank(kind, rate=None, **more):
    ranks, gpu_ranks, own_rate = KINDS[kind]
    return dict(post, memory=kind, **more,
                cpu=dict(ranks=ranks, skip_steps=2000, learning_rate=rate or own_rate),
                gpu=dict(ranks=gpu_ranks, skip_steps=1000, learning_rate=1e-4, min_lr=1e-5))


variants = {kind: (bank(kind), log(16.0) if kind == "ffn" else None) for kind in KINDS}
for place, number in (("early", 16.6), ("middle", 16.5), ("late", 16.1)):
    variants[place] = (bank("ffn", memory_layers=place), log(number))
claims = ["lora_qk > ffn", "lora_vo > ffn", "lora_ffn > ffn", "kv > ffn",
          "early > middle > late > ffn"]
