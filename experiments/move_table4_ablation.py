"""MoVE, Table 4 (D12): the shared bank and the gate g_0 on the ordinary value, apart; only "MoVE with g_0 is best" holds in every column."""
model, metric, baseline, seeds = "move", "val_bpb", "LaVE x1", 3
prepare = dict(cpu="--source=fineweb_edu --tokenizer=bpe --vocab_size=4096 --max_tokens=20_000_000 --out=data/fineweb_edu_bpe4096",
               gpu="--source=fineweb_edu --max_tokens=200_000_000 --out=data/fineweb_edu_200M")
cpu = dict(depth=4, block_size=256, batch_tokens=4096, max_iters=366, eval_interval=183, eval_tokens=131072)     # 1.5M tokens a run
gpu = dict(depth=12, block_size=1024, batch_tokens=131072, max_iters=1000, eval_interval=1000)                  # 131M tokens a run
variants = {                                                     # overrides, the paper's D12 number, seeds
    "LaVE x1": (dict(memory="lave", memory_scale=1, gate_v=0), .8223),
    "LaVE x1 with g_0": (dict(memory="lave", memory_scale=1, gate_v=1), .8229),
    "MoVE x1 without g_0": (dict(memory="move", memory_scale=1, gate_v=0), .8229),
    "MoVE x1 with g_0": (dict(memory="move", memory_scale=1, gate_v=1), .8189),
    "LaVE x2": (dict(memory="lave", memory_scale=2, gate_v=0), .8182, 1),
    "LaVE x2 with g_0": (dict(memory="lave", memory_scale=2, gate_v=1), .8128, 1),
    "MoVE x2 without g_0": (dict(memory="move", memory_scale=2, gate_v=0), .8176, 1),
    "MoVE x2 with g_0": (dict(memory="move", memory_scale=2, gate_v=1), .8124, 1),
}
claims = [f"{other} > MoVE x{x} with g_0" for x in (1, 2) for other in (f"LaVE x{x}", f"LaVE x{x} with g_0", f"MoVE x{x} without g_0")]
