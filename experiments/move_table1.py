"""MoVE, Table 1 (D12): value embeddings lower the bits per byte, and more slots of one shared bank
lower them further.

nanochat scales its rates with the square root of the batch over 524,288 tokens, which train.py does
not: here they are 8 times what that gives. Its weight decay of 0.2 (12/L)^2 is 1.8 at four layers,
which makes the standard model in batches of 4,096 far worse (which_rates.py); on a CPU it is a
tenth of that. "rate/M" divides the bank's rate by its slots M = x L/2; move_rates.py has rates
between.
"""
model = "move"
metric = "val_bpb"
baseline = "standard"
seeds = 3
prepare = dict(
    cpu="--source=fineweb_edu --tokenizer=bpe --vocab_size=4096 --max_tokens=20_000_000 "
        "--out=data/fineweb_edu_bpe4096",
    gpu="--source=fineweb_edu --max_tokens=200_000_000 --out=data/fineweb_edu_200M")
cpu = dict(depth=4, block_size=256, batch_tokens=8192, max_iters=1000, eval_interval=125,
           eval_tokens=131072, sample_tokens=0, weight_decay=0.02)      # 8.2M tokens a run
gpu = dict(depth=12, block_size=1024, batch_tokens=131072, max_iters=1000, eval_interval=125)
variants = {                                                    # overrides, the paper's D12 number
    "standard": (dict(dense=True), .838),
    "LaVE x1": (dict(memory="lave", memory_scale=1), .822),
    "MoVE x1": (dict(memory="move", memory_scale=1), .819),
    "LaVE x2": (dict(memory="lave", memory_scale=2), .818),
    "MoVE x2": (dict(memory="move", memory_scale=2), .812),
    "MoVE x4": (dict(memory="move", memory_scale=4), .806),
    "MoVE x8": (dict(memory="move", memory_scale=8), .797),
}
for x in (1, 2, 4, 8):
    slower = dict(cpu=dict(memory_lr=1 / (2 * x)), gpu=dict(memory_lr=1 / (6 * x)))
    variants[f"MoVE x{x} rate/M"] = (dict(memory="move", memory_scale=x, **slower), None)
claims = [
    "standard > LaVE x1 > MoVE x1 > MoVE x2 > MoVE x4 > MoVE x8",
    "LaVE x1 > LaVE x2",
    "MoVE x1 rate/M > MoVE x2 rate/M > MoVE x4 rate/M > MoVE x8 rate/M",
    "MoVE x8 > MoVE x8 rate/M",
]
