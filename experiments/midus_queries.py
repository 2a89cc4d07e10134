"""MIDUS: what does HML need to learn more at this size? In midus_rates.py it learns least for what
it forgets.

HML's query is a head's output alone (eq. 13); linear, product-key and UltraMem memories ask with
x + Attn(LN(x)) (eq. 1). So HML knows the token itself only by what attention passes on. "residual"
asks with x + Attn'(LN(x)), Table 11's "w/ Residual", which in the paper changes nothing. And the
values start at 0 and move by about the rate a step: "100x" gives them so many times the rate, kept
to the end as in the paper, or "annealed" with the others' (midus_rates.py).

On midus_table1.py's texts, from a base of half the depth and 6.1M tokens, so one that still learns
much from any text: not Table 1 itself, but a question to its rows. Each row 2.0M tokens; a row's
name ends with its learning rate. Who forgets less learns less: compare rows that forget alike. The
val_loss of "base" is that of the old text, on half as many windows as its retention_loss.
"""
from experiments.midus_table1 import base as table1_base
from experiments.midus_table1 import cpu, gpu, prepare, untouched

model = "midus"
metric = "unseen_loss"
also = ("val_loss", "retention_loss", "blimp")
seeds = 1
cpu = dict(cpu, depth=4, max_iters=500, eval_interval=500, eval_tokens=65536)
gpu = dict(gpu, depth=4, max_iters=48)
base = dict(table1_base, cpu=dict(max_iters=1500, eval_interval=1500), gpu=dict(max_iters=192))
cpt = dict(init_from="@base", phase="cpt")
residual = dict(queries="residual")
annealed = dict(memory_schedule=True)
kinds = {                       # what a row has beside HML, rates
    "HML": ({}, (2e-3, 5e-4)),
    "HML 100x annealed": (dict(annealed, value_lr=100.0), (2e-3, 5e-4)),
    "residual": (residual, (2e-3,)),
    "residual 100x annealed": (dict(residual, **annealed, value_lr=100.0), (2e-3, 5e-4)),
    "residual 100x": (dict(residual, value_lr=100.0), (2e-3,)),
    "Llama Pro": (dict(upscale="llama_pro"), (2e-3,)),
    "base continued": (dict(upscale="base"), (2e-3,)),
}
variants = {
    "base": (base, None, 1),
    "base untouched": (dict(cpt, upscale="base", **untouched), None),
}
for name, (keys, rates) in kinds.items():
    for rate in rates:
        row = f"{name} {rate:g}"
        variants[row] = (dict(cpt, upscale="midus", learning_rate=rate) | keys, None)
baseline = dict.fromkeys(variants, "base untouched") | {"base": "base"}
claims = ["HML 0.002 > residual 0.002", "val_loss: HML 0.002 > residual 0.002",
          "retention_loss: residual 0.002 > HML 0.002", "HML 0.002 > HML 100x annealed 0.002",
          "HML 100x annealed 0.002 > residual 100x annealed 0.002",
          "Llama Pro 0.002 > residual 100x annealed 0.002"]
