"""LIMe, section 5.6 and Table 12: the deeper the model, the more LIMe gains; the first layers are
enough to read from.

It finds LIMe with 64 layers better than LLaMA with 128. Its numbers here are the log of Table 12's
perplexities, by which first-7 and first-15 are best; its caption says the full LIMe is. A claim
about depth can be asked only where depth helps LLaMA: "LLaMA 8 > LLaMA 16" and so on ask that
first. With 8 layers first-7 is LIMe itself. A CPU stops at 32 layers. "at 0.003" and "at 0.012":
its 32 layers at other rates than 6e-3, the best of lime_rates.py's 8 x 128.
"""
from math import log

from experiments.lime_routers import prepare

model = "lime"
metric = "val_loss"
seeds = 3
cpu = dict(n_embd=64, n_head=8, block_size=256, batch_tokens=4096, max_iters=2000,
           eval_interval=250, eval_tokens=131072, sample_tokens=0, optimizer="adamw",
           learning_rate=6e-3, router_lr=10 / 6, warmup=0.1)    # 8.2M tokens a run
gpu = dict(n_embd=256, n_head=8, n_inner=896, block_size=1024, batch_tokens=131072,
           max_iters=1000, eval_interval=125, warmup=0.1)
depths = (8, 16, 32, 64, 128)
kinds = {"LLaMA": (dict(dense=True), log(23.73)),
         "LIMe": (dict(), log(20.72)),
         "first-7": (dict(router="first-7"), log(20.55))}
variants = {}
baseline = {}
for depth in depths:
    for kind, (keys, number) in kinds.items():
        if depth > 8 or kind != "first-7":
            printed = number if depth == 128 else None
            deep = dict(cpu=None) if depth > 32 else {}
            variants[f"{kind} {depth}"] = (dict(keys, **deep, depth=depth), printed)
            baseline[f"{kind} {depth}"] = f"LLaMA {depth}"
for rate in (3e-3, 12e-3):
    for kind in ("LLaMA", "LIMe"):
        name = f"{kind} 32 at {rate:g}"
        keys = dict(kinds[kind][0], depth=32, learning_rate=rate, router_lr=1e-2 / rate, gpu=None)
        variants[name] = (keys, None, 1)
        baseline[name] = f"LLaMA 32 at {rate:g}"
claims = []
for depth in depths:
    claims.append(f"LLaMA {depth} > LIMe {depth}")
    if depth > 8:
        claims.append(f"LIMe {depth} > first-7 {depth}")
        claims.append(f"LLaMA {depth} > LIMe {depth // 2}")
        claims.append(f"LLaMA {depth // 2} > LLaMA {depth}")
