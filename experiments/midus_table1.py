"""MIDUS, Table 1 (Llama 3.2 1B, CPT): the ways to make a model deeper, by what they learn of a new
domain and what they keep of the old one.

The base has learned the OpenStax part of educational prose; every method starts from it and goes on
with another domain, the Standard Ebooks part. val_loss is that of the new domain, retention_loss
that of the old domain's held-out text. The paper's numbers are the log of its WikiText perplexities
after CPT on FineWeb-Edu, a text that it does not train on. The loss on the new domain rewards
whoever trains most, retention whoever trains least ("base untouched" keeps everything), and the
paper's column has something of both: only both columns together say something, and
midus_rates.py has a line of learned against kept for each method.

There is one base; the seeds are those of what comes after. "base on old" is what as many tokens of
the old domain would still have given the base: if more than 0.01, it was not trained to its end; if
less than nothing, the rate is rough on whoever trains all parameters. data/edu is a folder of
records {"text", "source"}.
"""
from math import log

model = "midus"
metric = "val_loss"
also = ("retention_loss",)
seeds = 3
prepare = dict(
    cpu="experiments/tasks.py domains --source=data/edu --prefix=standardebooks/ --out=data/ebooks",
    gpu="experiments/tasks.py domains --source=data/edu --prefix=standardebooks/ "
        "--vocab_size=16384 --out=data/ebooks_gpu")
cpu = dict(depth=8, n_embd=128, n_head=4, n_kv_head=2, n_inner=352, n_keys=32, block_size=256,
           batch_tokens=4096, max_iters=2000, eval_interval=250, eval_tokens=131072,
           sample_tokens=0)                                     # CPT: 8.2M tokens
gpu = dict(depth=8, n_embd=512, n_head=8, n_kv_head=4, n_inner=1408, n_keys=64, block_size=1024,
           batch_tokens=65536, max_iters=192, eval_interval=24, eval_tokens=1048576,
           sample_tokens=0)                                     # 12.6M
base = dict(dense=True, dataset="@_old", cpu=dict(max_iters=4000), gpu=dict(max_iters=768))
untouched = dict(cpu=dict(max_iters=0), gpu=dict(max_iters=0))
cpt = dict(init_from="@base", phase="cpt")
methods = {                     # the name, its `upscale` and the paper's perplexity
    "MIDUS-HML": ("midus", 11.64),
    "OpT-DeUS": ("opt_deus", 11.72),
    "Avg-DeUS": ("avg_deus", 12.04),
    "LESA": ("lesa", 12.06),
    "Llama Pro": ("llama_pro", 12.33),
    "base continued": ("base", 13.22),
    "SOLAR": ("solar", 13.41),
}
variants = {
    "base": (base, None, 1),
    "base untouched": (dict(cpt, upscale="base", **untouched), None, 1),
    "base on old": (dict(cpt, upscale="base", dataset="@_old"), None, 1),
}
baseline = {"base untouched": "MIDUS-HML", "base on old": "base"}
claims = ["base untouched > MIDUS-HML"]
for name, (upscale, perplexity) in methods.items():
    variants[name] = (dict(cpt, upscale=upscale), log(perplexity))
    baseline[name] = "MIDUS-HML"
    if name != "MIDUS-HML":
        claims += [f"{name} > MIDUS-HML", f"retention_loss: {name} > MIDUS-HML"]
