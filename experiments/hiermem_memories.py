"""Hierarchical memories on a frozen anchor: what a block is (Figure 3's types, at equal size), its
level, and in which layers it stands (Table 9).

The paper's numbers are log perplexities of Wikipedia: Table 9's. It finds FFN memories best, deeper
levels better (they had more tokens there, as many here), and memories in all layers best.
"""
from math import log

from experiments.hiermem_table1 import cpu, prepare

model = "hiermem"
metric = "val_loss"
baseline = "ffn"
seeds = 3
gpu = dict(preset="openlm_160m", block_size=1024, batch_tokens=131072, max_iters=1000,
           eval_interval=125, clusters="16,16", ranks="0,80")
post = dict(init_from="@anchor", frozen=True, weight_decay=1e-3)            # A.2


def bank(kind, ranks, gpu_ranks, **more):
    return dict(post, memory=kind, **more, cpu=dict(ranks=ranks, skip_steps=2000),
                gpu=dict(ranks=gpu_ranks, skip_steps=1000, learning_rate=1e-4, min_lr=1e-5))


variants = {
    "anchor": (dict(dense=True), None),
    "ffn": (bank("ffn", "0,80", "0,80"), log(16.0)),
    "lora_qk": (bank("lora_qk", "0,60", "0,69"), None),
    "lora_vo": (bank("lora_vo", "0,60", "0,69"), None),
    "lora_ffn": (bank("lora_ffn", "0,16", "0,16"), None),
    "kv": (bank("kv", "0,120", "0,160"), None),
    "level 1": (bank("ffn", "80,0", "80,0"), None),
    "early": (bank("ffn", "0,80", "0,80", memory_layers="early"), log(16.6)),
    "middle": (bank("ffn", "0,80", "0,80", memory_layers="middle"), log(16.5)),
    "late": (bank("ffn", "0,80", "0,80", memory_layers="late"), log(16.1)),
}
claims = ["anchor > ffn", "lora_qk > ffn", "lora_vo > ffn", "lora_ffn > ffn", "kv > ffn",
          "level 1 > ffn", "early > middle > late > ffn"]
