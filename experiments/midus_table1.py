"""MIDUS, Table 1 (Llama 3.2 1B, CPT): the ways to make a model deeper, by what they learn of a new domain and what they keep of the old one.

The base has learned the OpenStax part of educational prose; every method starts from it and goes on with another domain, the Standard Ebooks part
(on more of the same text, whoever trains all parameters wins). val_loss is that of the new domain, retention_loss that of the old domain's held-out
text. The paper's numbers are the log of its WikiText perplexities after CPT on FineWeb-Edu, a text that it does not train on; under HML they hardly move
(11.62 to 11.64 at rates of 1e-5 to 1e-4, Table 10). The loss on the new domain rewards whoever trains most, retention whoever trains least ("base
untouched" keeps everything), and the paper's column has something of both: its order is asked of both columns, and only both together say something.
There is one base; the seeds are those of what comes after. "base on old" is what as many tokens of the old domain would still have given the base: if more
than 0.01, it was not trained to its end; if less than nothing, the rate is rough on whoever trains all parameters. data/edu is a folder of records
{"text", "source"}. All methods run at the recipe's learning rate; at another each would learn and forget more, or less, so that an order in one
column alone is also one of rates: midus_rates.py has a line for each method."""
from math import log

model, metric, also, seeds = "midus", "val_loss", ("retention_loss",), 3
prepare = dict(cpu="experiments/tasks.py domains --source=data/edu --prefix=standardebooks/ --out=data/ebooks",
               gpu="experiments/tasks.py domains --source=data/edu --prefix=standardebooks/ --vocab_size=16384 --out=data/ebooks_gpu")
cpu = dict(depth=8, n_embd=128, n_head=4, n_kv_head=2, n_inner=352, n=32, block_size=256, batch_size=4, batch_tokens=1024, max_iters=1024,
           eval_interval=1024, eval_tokens=131072, sample_tokens=0)                       # CPT: 1.05M tokens; D 4, k 4 and r 32 are automatic
gpu = dict(depth=8, n_embd=512, n_head=8, n_kv_head=4, n_inner=1408, n=64, block_size=1024, batch_tokens=65536, max_iters=192,
           eval_interval=192, eval_tokens=1048576, sample_tokens=0)                       # 12.6M
base = dict(dense=True, dataset="@_old", cpu=dict(batch_size=16, batch_tokens=4096, max_iters=3328, eval_interval=832), gpu=dict(max_iters=768, eval_interval=192))      # 13.6M, 50M
cpt = dict(init_from="@base", phase="cpt")
variants = {
    "base": (base, None, 1),
    "base untouched": (dict(cpt, upscale="base", cpu=dict(max_iters=0), gpu=dict(max_iters=0)), None, 1),
    "base on old": (dict(cpt, upscale="base", dataset="@_old"), None, 1),
    "MIDUS-HML": (dict(cpt, upscale="midus"), log(11.64)),
    "OpT-DeUS": (dict(cpt, upscale="opt_deus"), log(11.72)),
    "Avg-DeUS": (dict(cpt, upscale="avg_deus"), log(12.04)),
    "LESA": (dict(cpt, upscale="lesa"), log(12.06)),
    "Llama Pro": (dict(cpt, upscale="llama_pro"), log(12.33)),
    "base continued": (dict(cpt, upscale="base"), log(13.22)),
    "SOLAR": (dict(cpt, upscale="solar"), log(13.41)),
}
baseline = {name: "MIDUS-HML" for name in variants if name not in ("base", "base on old")} | {"base on old": "base"}
others = ("OpT-DeUS", "Avg-DeUS", "LESA", "Llama Pro", "base continued", "SOLAR")
claims = [f"{other} > MIDUS-HML" for other in (*others, "base untouched")] + [f"retention_loss: {other} > MIDUS-HML" for other in others]
