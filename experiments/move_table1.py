"""MoVE, Tables 1 and 4 (D12): value embeddings lower the bits per byte, more slots of one shared
bank lower them further, and so does MoVE's gate g_0 on the ordinary value (LaVE x1's does not in
Table 4). And section 5's question: is a bank worth a layer?

How fast a bank should learn depends on its slots. So each is tried at three parts of the rate that
the recipe gives it, "bank 1/4" being a quarter; the one that stands first in RATES has three seeds
and the claims. The paper prints no rate, and has one for all its rows.

"L+1" and "L+2" are the standard model with more layers. The paper asks for D13 and D14, which have
1.20 and 1.42 times D12's work. On a CPU they keep their width, which costs about that (1.19 and
1.39), and their weight decay. Times of a step are step_time.py's to say.

nanochat scales its rates with the square root of the batch over 524,288 tokens, which train.py does
not: here they are 8 (gpu: 2) times what that gives. Its weight decay of 0.2 (12/L)^2 is 1.8 at four
layers, which makes the standard model in batches of 4,096 far worse (which_rates.py); on a CPU it
is a tenth of that. nanochat's rows each begin with a document, ours are cut anywhere.
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
RATES = {                       # of a bank, 1/4 of the recipe's being 4: the table's first
    "LaVE x1": (4, 1, 16),
    "LaVE x2": (4, 1, 16),
    "MoVE x1": (4, 1, 16),
    "MoVE x2": (4, 1, 16),
    "MoVE x4": (16, 4, 64),
    "MoVE x8": (16, 4, 64),
}
printed = {                     # the paper's D12, where it can Table 4's, which has a digit more
    "LaVE x1": .8223, "LaVE x2": .8182,
    "MoVE x1": .8189, "MoVE x2": .8124, "MoVE x4": .806, "MoVE x8": .797,
}


def bank(name):
    """The keys of "MoVE x8"."""
    kind, slots = name.split(" x")
    return dict(memory=kind.lower(), memory_scale=int(slots))


variants = {"standard": (dict(dense=True), .838)}
best = {}
for name, parts in RATES.items():
    best[name] = f"{name} bank 1/{parts[0]}"
    variants[best[name]] = (dict(bank(name), memory_lr=1 / parts[0]), printed[name])
    for part in parts[1:]:
        variants[f"{name} bank 1/{part}"] = (dict(bank(name), memory_lr=1 / part), None, 1)
for name, gate_v, number, n_seeds in (("LaVE x1", 1, .8229, 1), ("LaVE x2", 1, .8128, 3),
                                      ("MoVE x1", 0, .8229, 3), ("MoVE x2", 0, .8176, 3)):
    keys = dict(bank(name), memory_lr=1 / RATES[name][0], gate_v=gate_v)
    variants[f"{name} {'with' if gate_v else 'without'} g_0"] = (keys, number, n_seeds)
for more, n_seeds in ((1, 3), (2, 1)):
    deeper = dict(cpu=dict(n_layer=4 + more, weight_decay=0.02 * (1 + more / 4) ** 2),
                  gpu=dict(depth=12 + more))
    variants[f"L+{more}"] = (dict(deeper, dense=True), None, n_seeds)
x1, x8 = best["MoVE x1"], best["MoVE x8"]
claims = [
    " > ".join(["standard", best["LaVE x1"], x1, best["MoVE x2"], best["MoVE x4"], x8]),
    f"{x1} > {x8}",
    f"{best['LaVE x1']} > {best['LaVE x2']} > {best['MoVE x2']}",
    f"LaVE x1 with g_0 > {x1}", f"MoVE x1 without g_0 > {x1}",
    f"LaVE x2 with g_0 > {best['MoVE x2']}", f"MoVE x2 without g_0 > {best['MoVE x2']}",
    f"{best['LaVE x2']} > LaVE x2 with g_0",
    f"L+1 > {x1}", f"L+1 > {x8}", f"L+2 > {x8}",                # questions rather
]
