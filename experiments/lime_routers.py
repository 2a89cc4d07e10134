"""LIMe, Appendix F (Tables 10 and 11): routers, rivals, and the three findings of Appendix A.

The paper's numbers are losses, or the log of perplexities, at 150M parameters, from two tables
whose LLaMAs differ by 0.0006 and LIMes by 0.0009. Its first-j there also reads the layer before. It
prints no losses of DenseFormer and Hyper-Connections (the order claimed here is that of the mean
accuracies in its Table 1), of its dynamic routers (here they are added to a static one), nor of its
findings on the routers' start, rate and decay.

Routers learn at 1e-2, as in the paper's Table 3, "slow routers" at a tenth of that. "router
decay" shrinks them as much over the run as in the paper's 20,000 steps. All else learns at LIMe's
best rate in lime_rates.py (cpu), "at 0.003" and "at 0.012" at its neighbours: the best of a shorter
run need not be this one's. The warm-up takes the paper's 200 steps (gpu: 100). With 8 layers
first-6 is LIMe itself, first-4 and last-6 are nearly that. The published code starts K and V of
LIMe with variance 1/(3d), and so do the rows "published start": at a width of 768 that is near the
0.02 of all other matrices, at 128 it is 0.051. Muon rows come last, at which_rates.py's best of
3.9M tokens.
"""
from math import log

model = "lime"
metric = "val_loss"
baseline = "LLaMA"
seeds = 3
prepare = dict(
    cpu="--source=fineweb_edu --tokenizer=bpe --vocab_size=4096 --max_tokens=20_000_000 "
        "--out=data/fineweb_edu_bpe4096",
    gpu="--source=fineweb_edu --max_tokens=200_000_000 --out=data/fineweb_edu_200M")
cpu = dict(depth=8, n_embd=128, n_head=8, block_size=256, batch_tokens=4096, max_iters=2000,
           eval_interval=250, eval_tokens=131072, sample_tokens=0, optimizer="adamw",
           learning_rate=6e-3, router_lr=10 / 6, warmup=0.1)    # 8.2M tokens a run
gpu = dict(preset="150m", block_size=1024, batch_tokens=131072, max_iters=1000, eval_interval=125,
           warmup=0.1)
start = dict(cpu=dict(kv_init=(3 * 128) ** -0.5), gpu=dict(kv_init=(3 * 768) ** -0.5))
muon = dict(optimizer="muon", schedule="wsd", warmup=0.02)
deep = dict(cpu=None)           # asks nothing of 8 layers
variants = {
    "LLaMA": (dict(dense=True), log(16.4611)),
    "LIMe": (dict(), log(15.9267)),
    "average": (dict(router="average"), log(16.4611)),
    "no-head-mix": (dict(router="no-head-mix"), 2.83235),
    "DenseFormer": (dict(baseline="denseformer"), None),
    "Hyper-Connections": (dict(baseline="hyper"), None),
    "last-2": (dict(router="last-2"), log(16.2810), 1),
    "last-4": (dict(router="last-4"), log(16.1675), 1),
    "last-6": (dict(deep, router="last-6"), log(16.1351), 1),
    "first-2": (dict(router="first-2-prev"), log(15.9746), 1),
    "first-4": (dict(deep, router="first-4-prev"), log(15.9586), 1),
    "first-6": (dict(deep, router="first-6-prev"), log(15.9906), 1),
    "per-dim": (dict(router="per-dim"), 2.77911, 1),
    "static + dynamic": (dict(router="dynamic"), None, 1),
    "random init": (dict(router_init="random"), None, 1),
    "router decay": (dict(cpu=dict(router_decay=1.0), gpu=dict(router_decay=2.0)), None, 1),
    "slow routers": (dict(cpu=dict(router_lr=1 / 6), gpu=dict(router_lr=1.0)), None),
    "LLaMA at 0.003": (dict(dense=True, learning_rate=3e-3, gpu=None), None, 1),
    "LLaMA at 0.012": (dict(dense=True, learning_rate=12e-3, gpu=None), None, 1),
    "LIMe at 0.003": (dict(learning_rate=3e-3, router_lr=10 / 3, gpu=None), None, 1),
    "LIMe at 0.012": (dict(learning_rate=12e-3, router_lr=10 / 12, gpu=None), None, 1),
    "LIMe published start": (start, None),
    "LLaMA published start": (dict(start, dense=True), None),
    "LLaMA Muon": (dict(muon, dense=True, learning_rate=9e-3), None),
    "LIMe Muon": (dict(muon, learning_rate=27e-3, router_lr=10 / 27), None),
}
claims = [
    "LLaMA > LIMe", "average > LIMe", "no-head-mix > LLaMA",
    "LLaMA > DenseFormer > Hyper-Connections > LIMe", "DenseFormer > LIMe",
    "LLaMA > last-2 > last-4 > first-2 > LIMe", "last-4 > last-6 > first-2", "first-4 > LIMe",
    "first-6 > LIMe", "LLaMA > per-dim > LIMe", "random init > LIMe", "router decay > LIMe",
    "slow routers > LIMe", "LIMe published start > LIMe",
    "LLaMA published start > LLaMA", "LLaMA published start > LIMe published start",
    "LLaMA > LIMe published start", "DenseFormer > LIMe published start",
    "Hyper-Connections > LIMe published start",
    "LLaMA Muon > LIMe Muon",
]
