"""LIMe, section 5.6 and Table 12: the deeper the model, the more LIMe gains; the first layers are enough to read from.

It finds LIMe with 64 layers better than LLaMA with 128. Width 64 at scale cpu, 256 at scale gpu, 8 heads; the paper has 32, 64 and 128 layers, and its
numbers here are the log of Table 12's perplexities. With 8 layers first-7 is LIMe itself. At scale cpu the matrices learn with Muon and the rest at 1e-2,
the paper's rate of the routers, as in lime_routers.py.
"slow routers" is ours: AdamW moves each of a row's l*H weights by its rate in every step, and the noise of batches of 1,024 tokens may add up.
On a CPU stop at 32: --only="LLaMA 8,LIMe 8,LLaMA 16,LIMe 16,first-7 16,slow routers 16,LLaMA 32,LIMe 32,first-7 32,slow routers 32"."""
from math import log

model, metric, seeds = "lime", "val_loss", 1
prepare = dict(cpu="--source=fineweb_edu --tokenizer=bpe --vocab_size=4096 --max_tokens=20_000_000 --out=data/fineweb_edu_bpe4096",
               gpu="--source=fineweb_edu --max_tokens=200_000_000 --out=data/fineweb_edu_200M")
cpu = dict(n_embd=64, n_head=8, block_size=256, batch_size=4, batch_tokens=1024, max_iters=1024, eval_interval=256, eval_tokens=131072,
           sample_tokens=0, optimizer="muon", schedule="wsd", learning_rate=1e-2, router_lr=1.0)     # 1.05M tokens a run
gpu = dict(n_embd=256, n_head=8, n_inner=896, block_size=1024, batch_tokens=131072, max_iters=1000, eval_interval=200)
depths = (8, 16, 32, 64, 128)
kinds = {"LLaMA": (dict(dense=True), log(23.73)), "LIMe": (dict(), log(20.72)), "first-7": (dict(router="first-7"), log(20.55)),
         "slow routers": (dict(cpu=dict(router_lr=0.1), gpu=dict(router_lr=1.0)), None)}                # at 1e-3: see the docstring
variants, baseline = {}, {}
for depth in depths:
    for name, (keys, number) in list(kinds.items())[:2 if depth == 8 else 4]:
        variants[f"{name} {depth}"], baseline[f"{name} {depth}"] = (dict(keys, depth=depth), number if depth == 128 else None), f"LLaMA {depth}"
claims = [f"LLaMA {depth} > LIMe {depth}" for depth in depths] + [f"LIMe {depth} > first-7 {depth}" for depth in depths[1:]]
claims += [f"LLaMA {2 * depth} > LIMe {depth}" for depth in depths[:-1]] + [f"LIMe {depth} > slow routers {depth}" for depth in depths[1:]]
