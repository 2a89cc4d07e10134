"""LIMe, Appendix F (Tables 10 and 11): routers, rivals, and the three findings of Appendix A.

The paper's numbers are the log of its perplexities at 150M parameters, from two tables whose
LLaMAs differ by 0.0006. Its first-j there also reads the layer before. It prints no losses of
DenseFormer and Hyper-Connections, nor numbers for its findings on the routers' start, rate and
decay.

Routers learn at the paper's 1e-2, "slow routers" at the rate of all else. At scale cpu that is
LIMe's best in lime_rates.py, and the warm-up takes the paper's 200 steps. The published code starts
K and V of LIMe with variance 1/(3d), and so do the rows "published start": at the paper's width of
768 that is the 0.02 of all other matrices, at 128 it is 0.051. Muon rows come last.
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
muon = dict(optimizer="muon", schedule="wsd", learning_rate=1e-2)
variants = {
    "LLaMA": (dict(dense=True), log(16.4611)),
    "LIMe": (dict(), log(15.9267)),
    "average": (dict(router="average"), log(16.4611)),
    "no-head-mix": (dict(router="no-head-mix"), 2.83235),
    "DenseFormer": (dict(baseline="denseformer"), None),
    "Hyper-Connections": (dict(baseline="hyper"), None),
    "last-2": (dict(router="last-2"), log(16.2810), 1),
    "last-4": (dict(router="last-4"), log(16.1675), 1),
    "last-6": (dict(router="last-6"), log(16.1351), 1),
    "first-2": (dict(router="first-2-prev"), log(15.9746), 1),
    "first-4": (dict(router="first-4-prev"), log(15.9586), 1),
    "first-6": (dict(router="first-6-prev"), log(15.9906), 1),
    "per-dim": (dict(router="per-dim"), 2.77911, 1),
    "dynamic": (dict(router="dynamic"), None, 1),
    "random init": (dict(router_init="random"), None, 1),
    "router decay": (dict(router_decay=0.1), None, 1),
    "slow routers": (dict(router_lr=1.0), None),
    "LIMe published start": (start, None),
    "LLaMA published start": (dict(start, dense=True), None),
    "LLaMA Muon": (dict(muon, dense=True), None),
    "LIMe Muon": (dict(muon, router_lr=1.0), None),
}
claims = [
    "LLaMA > LIMe", "average > LIMe", "no-head-mix > LLaMA",
    "LLaMA > DenseFormer > Hyper-Connections > LIMe",
    "LLaMA > last-2 > last-4 > last-6 > first-2 > LIMe", "first-4 > LIMe", "first-6 > LIMe",
    "LLaMA > per-dim > LIMe", "dynamic > LIMe", "random init > LIMe", "router decay > LIMe",
    "slow routers > LIMe", "LIMe published start > LIMe",
    "LLaMA published start > LLaMA", "LLaMA published start > LIMe published start",
    "LLaMA Muon > LIMe Muon",
]
