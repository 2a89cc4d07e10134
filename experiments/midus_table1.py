"""MIDUS, Table 1 (Llama 3.2 1B, CPT): the ways to make a model deeper, by what they keep of the old
text, what they learn of the new, and what that is worth on a text that is neither.

The base has learned OpenStax's textbooks of mathematics and the sciences; every method starts from
it and goes on with those of the humanities, society and business: new text of a kind that it knows
in part, as FineWeb-Edu is to Llama. retention_loss is that of the old text, val_loss that of the
new, both held out; unseen_loss is that of the Standard Ebooks, which nobody trains on. The paper's
numbers are the log of WikiText's perplexities, of a word by that harness. They stand beside the old
text's loss, because Llama knows WikiText: untouched it has a perplexity of 11.58 (the model card of
d-matrix/Llama-3.2-1B, same harness; the paper does not print it), after every method it has more.
So that column asks who forgets least. blimp, in place of the paper's seven zero-shot tasks, is the
share of BLiMP's minimal pairs of which the grammatical sentence is likelier; its sampling error is
0.006.

All methods have one rate here, as we read the paper's E.2: the lowest of midus_rates.py's four, at
which they forget least, yet more a byte than the paper's do. At a higher one most learn more and
forget more; the rows "at 0.002" are three of that file's, four times as long, and it says what
"values 30x annealed" is. SOLAR, Avg-DeUS and LESA begin worse than the base. LESA's network has few
steps to learn in at this width (model_midus.py's fill_lesa).

There is one base; the seeds are those of what comes after. "base on old" is what as many tokens of
the old domain would still have given the base: if more than 0.01, it was not trained to its end.
The val_loss of these two, "base" and "base on old", is that of the old text, too.
data/edu is a folder of records {"text", "source"}, data/blimp one of BLiMP's sets.

"OpT-DeUS" puts neurons in order, as its paper says; its published code, from which the paper's
number comes, we suppose, leaves almost nothing of the lower block: "as published".
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
metric = "retention_loss"
also = ("val_loss", "unseen_loss", "blimp")
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
after_base = dict(cpu=dict(skip_steps=6000), gpu=dict(skip_steps=768))
untouched = dict(cpu=dict(max_iters=0), gpu=dict(max_iters=0))
cpt = dict(init_from="@base", phase="cpt", learning_rate=1.25e-4)
fast_values = dict(upscale="midus", value_lr=30.0)
annealed = dict(fast_values, memory_schedule=True)
methods = {                     # the name, its `upscale` and the paper's perplexity
    "MIDUS-HML": ("midus", 11.64),
    "OpT-DeUS": ("opt_deus", None),
    "OpT-DeUS as published": ("opt_deus_published", 11.72),
    "Avg-DeUS": ("avg_deus", 12.04),
    "LESA": ("lesa", 12.06),
    "Llama Pro": ("llama_pro", 12.33),
    "base continued": ("base", 13.22),
    "SOLAR": ("solar", 13.41),
}
on_old = dict(cpt, upscale="base", dataset="@_old", learning_rate=5e-4, **after_base)
variants = {
    "base": (base, None, 1),
    "base untouched": (dict(cpt, upscale="base", **untouched), None, 1),
    "base on old": (on_old, None, 1),
}
claims = []
for name, (upscale, perplexity) in methods.items():
    variants[name] = (dict(cpt, upscale=upscale), perplexity and log(perplexity))
    if name != "MIDUS-HML":
        claims += [f"{name} > MIDUS-HML", f"unseen_loss: {name} > MIDUS-HML"]
faster = "MIDUS-HML values 30x annealed"
variants[faster] = (dict(cpt, **annealed), None)
for name in ("Llama Pro", "base continued"):
    claims += [f"{name} > {faster}", f"unseen_loss: {name} > {faster}"]
for name, keys in ((faster, annealed), ("Llama Pro", dict(upscale="llama_pro")),
                   ("base continued", dict(upscale="base"))):
    variants[f"{name} at 0.002"] = (dict(cpt, **keys, learning_rate=2e-3), None, 1)
baseline = dict.fromkeys(variants, "MIDUS-HML") | {"base": "base", "base on old": "base"}
