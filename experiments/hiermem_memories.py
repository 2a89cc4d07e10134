"""Hierarchical memories on a frozen anchor: what a block is (Figure 3's types, at equal size), its level, and in which layers it stands (Table 9).

The paper's numbers are log perplexities of Wikipedia: Table 9's. It finds FFN memories best, deeper levels better (they had
more tokens there, as many here), and memories in all layers best."""
from math import log

model, metric, baseline, seeds = "hiermem", "val_loss", "ffn", 1
prepare = dict(cpu="--source=fineweb_edu --tokenizer=bpe --vocab_size=4096 --max_tokens=20_000_000 --clusters=8,8 --out=data/fineweb_edu_8_8",
               gpu="--source=fineweb_edu --max_tokens=400_000_000 --clusters=16,16 --out=data/fineweb_edu_16_16")
cpu = dict(depth=7, n_embd=128, n_head=4, block_size=256, batch_size=4, batch_tokens=1024, max_iters=1024, eval_interval=512, eval_tokens=131072,
           sample_tokens=0, optimizer="muon", schedule="wsd", learning_rate=15e-3)       # 1.05M tokens a phase, hiermem_table1's rates
gpu = dict(preset="openlm_160m", block_size=1024, batch_tokens=131072, max_iters=1000, eval_interval=250, clusters="16,16", ranks="0,80")
post = dict(init_from="@anchor", frozen=True, weight_decay=1e-3)                            # A.2
ranks = lambda kind, cpu, gpu: dict(post, memory=kind, cpu=dict(ranks=cpu, skip_steps=1024, memory_lr=1 / 3),
                                    gpu=dict(ranks=gpu, skip_steps=1000, learning_rate=1e-4, min_lr=1e-5))
variants = {
    "anchor": (dict(dense=True), None),
    "ffn": (ranks("ffn", "0,80", "0,80"), log(16.0)),
    "lora_qk": (ranks("lora_qk", "0,60", "0,69"), None), "lora_vo": (ranks("lora_vo", "0,60", "0,69"), None),
    "lora_ffn": (ranks("lora_ffn", "0,16", "0,16"), None), "kv": (ranks("kv", "0,120", "0,160"), None),
    "level 1": (ranks("ffn", "80,0", "80,0"), None),
    "early": (dict(ranks("ffn", "0,80", "0,80"), layers="early"), log(16.6)), "middle": (dict(ranks("ffn", "0,80", "0,80"), layers="middle"), log(16.5)),
    "late": (dict(ranks("ffn", "0,80", "0,80"), layers="late"), log(16.1)),
}
claims = ["anchor > ffn", "lora_qk > ffn", "lora_vo > ffn", "lora_ffn > ffn", "kv > ffn", "level 1 > ffn", "early > middle > late > ffn"]
