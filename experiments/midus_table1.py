"""MIDUS, Table 1 (Llama 3.2 1B, CPT): the ways to make a model deeper, by what they learn of new
text, what they keep of the old, and what that is worth on a text that is neither.

The base has learned OpenStax's textbooks of mathematics and the sciences; every method starts from
it and goes on with those of the humanities, society and business: new text of a kind that it knows
in part, as FineWeb-Edu is to Llama. unseen_loss is that of the Standard Ebooks, which nobody trains
on, as WikiText is in the paper; its numbers are the log of those perplexities, nats a word. Llama
3.2 1B untouched, which the paper does not print, has a perplexity of 11.58 (the model card of
d-matrix/Llama-3.2-1B, same harness), less than all: that column is won by who forgets least, and so
is retention_loss here, that of the old text. val_loss is that of the new text held out, which
rewards whoever trains most. blimp, in place of the paper's seven zero-shot tasks, is the share of
BLiMP's minimal pairs of which the grammatical sentence is likelier (0.5: by chance).
midus_rates.py finds each method's rate: the one with the best unseen_loss. Until all its rows are
there, this table has the recipe's rate for all.

There is one base; the seeds are those of what comes after. "base on old" is what as many tokens of
the old domain would still have given the base: if more than 0.01, it was not trained to its end.
data/edu is a folder of records {"text", "source"}, data/blimp one of BLiMP's sets.
"""
from math import log

NEW = ["openstax/osbooks-" + book for book in (
    "american-government,business-ethics,business-law,college-success,entrepreneurship,"
    "introduction-anthropology,introduction-business,introduction-intellectual-property,"
    "introduction-philosophy,introduction-political-science,introduction-sociology,"
    "life-liberty-and-pursuit-happiness,principles-,psychology,us-history,"
    "workplace-software-skills,world-history,writing-guide").split(",")]
domains = (f"experiments/tasks.py domains --source=data/edu --prefix={','.join(NEW)} "
           "--unseen=standardebooks/ --pairs=data/blimp")
model = "midus"
metric = "unseen_loss"
also = ("val_loss", "retention_loss", "blimp")
seeds = 3
prepare = dict(cpu=f"{domains} --out=data/humanities",
               gpu=f"{domains} --vocab_size=16384 --out=data/humanities_gpu")
cpu = dict(depth=8, n_embd=128, n_head=4, n_kv_head=2, n_inner=352, n_keys=32, block_size=256,
           batch_tokens=4096, max_iters=2000, eval_interval=500, eval_tokens=131072,
           sample_tokens=0)                                     # CPT: 8.2M tokens
gpu = dict(depth=8, n_embd=512, n_head=8, n_kv_head=4, n_inner=1408, n_keys=64, block_size=1024,
           batch_tokens=65536, max_iters=192, eval_interval=24, eval_tokens=1048576,
           sample_tokens=0)                                     # 12.6M
base = dict(dense=True, dataset="@_old", cpu=dict(max_iters=6000), gpu=dict(max_iters=768))
untouched = dict(cpu=dict(max_iters=0), gpu=dict(max_iters=0))
cpt = dict(init_from="@base", phase="cpt")
two_rates = (5e-4, 2e-3)        # of every variant in midus_memories.py and midus_ablations.py
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
        claims += [f"{name} > MIDUS-HML", f"val_loss: {name} > MIDUS-HML",
                   f"retention_loss: {name} > MIDUS-HML", f"blimp: MIDUS-HML > {name}"]
