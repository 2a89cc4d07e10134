"""LIMe: the learning rates at which each model of lime_routers.py is best, at a quarter of its
length: three of the base (3e-3, 6e-3, 1.2e-2) by two of the routers (3e-3, 1e-2).

The warm-up is as long as the table's, not a quarter of it. LLaMA has one more base rate, 2.4e-2,
and LIMe two more of its routers. Rows about the routers' start and decay have LIMe's. The mixing
weights of DenseFormer and Hyper-Connections learn at the base rate, as published; with "average"
nothing is learned.
"""
from experiments.lime_routers import cpu, gpu, prepare, start

model = "lime"
metric = "val_loss"
seeds = 1
cpu = dict(cpu, max_iters=500, warmup=0.4)
gpu = dict(gpu, max_iters=250, warmup=0.4)
plain = {                       # without routers that learn at a rate of their own
    "LLaMA": dict(dense=True),
    "average": dict(router="average"),
    "DenseFormer": dict(baseline="denseformer"),
    "Hyper-Connections": dict(baseline="hyper"),
}
routed = {
    "LIMe": dict(), "LIMe published start": start, "no-head-mix": dict(router="no-head-mix"),
    "last-2": dict(router="last-2"), "last-4": dict(router="last-4"),
    "first-2": dict(router="first-2-prev"), "per-dim": dict(router="per-dim"),
}
variants = {}


def add(title, keys, rate, routers):
    rates = dict(learning_rate=rate, router_lr=routers / rate)
    variants[f"{title} {rate:g} routers {routers:g}"] = (dict(keys, **rates), None)


for title, keys in plain.items():
    for rate in (3e-3, 6e-3, 1.2e-2):
        variants[f"{title} {rate:g}"] = (dict(keys, learning_rate=rate), None)
variants["LLaMA 0.024"] = (dict(dense=True, learning_rate=2.4e-2), None)
for title, keys in routed.items():
    for rate in (3e-3, 6e-3, 1.2e-2):
        for routers in (3e-3, 1e-2):
            add(title, keys, rate, routers)
for routers in (1e-3, 3e-2):
    add("LIMe", {}, 6e-3, routers)
baseline = dict.fromkeys(variants, "LLaMA 0.003")
