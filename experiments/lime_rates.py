"""LIMe: the learning rates at which each model of lime_routers.py is best, at a quarter of its
length: three of the base (3e-3, 6e-3, 1.2e-2) by two of the routers (3e-3, 1e-2).

The warm-up is as long as the table's, not a quarter of it.
DenseFormer and Hyper-Connections learn their mixing weights at the routers' rate. LLaMA, which has
neither, has one more base rate, 2.4e-2.
"""
from experiments.lime_routers import cpu, gpu, prepare, start

model = "lime"
metric = "val_loss"
seeds = 1
cpu = dict(cpu, max_iters=500, warmup=0.4)
gpu = dict(gpu, max_iters=250, warmup=0.4)
models = {
    "LIMe": dict(), "LIMe published start": start,
    "average": dict(router="average"), "no-head-mix": dict(router="no-head-mix"),
    "last-2": dict(router="last-2"), "last-4": dict(router="last-4"),
    "first-2": dict(router="first-2-prev"), "first-4": dict(router="first-4-prev"),
    "per-dim": dict(router="per-dim"), "dynamic": dict(router="dynamic"),
    "DenseFormer": dict(baseline="denseformer"), "Hyper-Connections": dict(baseline="hyper"),
}
variants = {}
baseline = {}
for rate in (3e-3, 6e-3, 1.2e-2, 2.4e-2):
    variants[f"LLaMA {rate:g}"] = (dict(dense=True, learning_rate=rate), None)
    baseline[f"LLaMA {rate:g}"] = "LLaMA 0.003"
for title, keys in models.items():
    for rate in (3e-3, 6e-3, 1.2e-2):
        for routers in (3e-3, 1e-2):
            name = f"{title} {rate:g} routers {routers:g}"
            rates = dict(learning_rate=rate, router_lr=routers / rate)
            variants[name] = (dict(keys, **rates), None)
            baseline[name] = "LLaMA 0.003"
