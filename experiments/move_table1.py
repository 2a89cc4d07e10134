"""MoVE, Table 1 (D12): value embeddings lower the bits per byte, and more slots of one shared bank lower them further.

nanochat scales all its rates with the square root of the batch over 524,288 tokens, which train.py does not: at 4,096 tokens the rates here are 11 times
what it would take. That more slots want a smaller rate for the bank ("rate/M") may come from this."""
model, metric, baseline, seeds = "move", "val_bpb", "standard", 3
prepare = dict(cpu="--source=fineweb_edu --tokenizer=bpe --vocab_size=4096 --max_tokens=20_000_000 --out=data/fineweb_edu_bpe4096",
               gpu="--source=fineweb_edu --max_tokens=200_000_000 --out=data/fineweb_edu_200M")
cpu = dict(depth=4, block_size=256, batch_tokens=4096, max_iters=366, eval_interval=183, eval_tokens=131072)     # 1.5M tokens a run
gpu = dict(depth=12, block_size=1024, batch_tokens=131072, max_iters=1000, eval_interval=1000)                  # 131M tokens a run
variants = {                                                     # overrides, the paper's D12 number, seeds
    "standard": (dict(dense=True), .838),
    "LaVE x1": (dict(memory="lave", memory_scale=1), .822),
    "MoVE x1": (dict(memory="move", memory_scale=1), .819),
    "LaVE x2": (dict(memory="lave", memory_scale=2), .818, 2),
    "MoVE x2": (dict(memory="move", memory_scale=2), .812, 2),
    "MoVE x4": (dict(memory="move", memory_scale=4), .806, 2),
    "MoVE x8": (dict(memory="move", memory_scale=8), .797, 2),
}
for x in (1, 2, 4, 8):                                           # ours: the bank's rate divided by the number of slots, M = x L/2
    variants[f"MoVE x{x} rate/M"] = dict(memory="move", memory_scale=x, cpu=dict(memory_lr=1 / (2 * x)), gpu=dict(memory_lr=1 / (6 * x))), None, 1
claims = ["standard > LaVE x1 > MoVE x1 > MoVE x2 > MoVE x4 > MoVE x8", "LaVE x1 > LaVE x2",
          "MoVE x1 rate/M > MoVE x2 rate/M > MoVE x4 rate/M > MoVE x8 rate/M", "MoVE x8 > MoVE x8 rate/M"]
