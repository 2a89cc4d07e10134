"""MoVE, Table 3 (D12): inside multi-head latent attention LaVE stops at x1 and beats MoVE there; MoVE falls steadily to x32."""
model, metric, baseline, seeds = "move", "val_bpb", "MLA", 3
prepare = dict(cpu="--source=fineweb_edu --tokenizer=bpe --vocab_size=4096 --max_tokens=20_000_000 --out=data/fineweb_edu_bpe4096",
               gpu="--source=fineweb_edu --max_tokens=200_000_000 --out=data/fineweb_edu_200M")
cpu = dict(depth=4, block_size=256, batch_tokens=4096, max_iters=366, eval_interval=183, eval_tokens=131072)     # 1.5M tokens a run
gpu = dict(depth=12, block_size=1024, batch_tokens=131072, max_iters=1000, eval_interval=1000)                  # 131M tokens a run
variants = {                                                     # overrides, the paper's D12 number, seeds
    "MLA": (dict(attention="mla", dense=True), .8826),
    "LaVE x1": (dict(attention="mla", memory="lave", memory_scale=1), .8803),
    "LaVE x2": (dict(attention="mla", memory="lave", memory_scale=2), .8806),
    "MoVE x1": (dict(attention="mla", memory="move", memory_scale=1), .8822),
    **{f"MoVE x{x}": (dict(attention="mla", memory="move", memory_scale=x), bpb, 1)
       for x, bpb in ((2, .8805), (4, .8782), (8, .8762), (16, .8728), (32, .8690))},
}
claims = ["MoVE x1 > LaVE x1", "LaVE x2 > LaVE x1", "MLA > MoVE x1 > MoVE x2 > MoVE x4 > MoVE x8 > MoVE x16 > MoVE x32"]
