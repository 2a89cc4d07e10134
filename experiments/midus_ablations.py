"""MIDUS, Tables 8, 9, 11 and 12 (Llama 3.2 1B): a norm on the queries costs; slots, Top-k, placement and the other structures hardly matter.

Starts from midus_table1.py's base, on its data: `python train.py experiments/midus_table1.py --only=base`. The paper's numbers are the log of its
WikiText perplexities (midus_table1.py says what that means for the two columns); its n = 16, 32, 64 are 8, 16, 32 here (gpu: 16, 32, 64). Where it finds
no difference, or one of 0.003 nats (LayerNorm), nothing is claimed: all should be small. With k 1 the chosen slot has the weight 1, and nothing teaches
the choice: queries and keys stay as they start."""
from math import log
from experiments.midus_table1 import cpu, gpu, prepare

model, metric, also, baseline, seeds = "midus", "val_loss", ("retention_loss",), "HML", 2
cpt = dict(init_from="@midus_table1/base", phase="cpt", upscale="midus")
changes = {                                                      # paper's perplexity, seeds
    "n / 4": (dict(cpu=dict(n=8), gpu=dict(n=16)), 11.63, 1),
    "n / 2": (dict(cpu=dict(n=16), gpu=dict(n=32)), 11.64, 1),
    "n x 2": (dict(cpu=dict(n=64), gpu=dict(n=128)), None, 1),
    "k 1": (dict(k=1), 11.67, 1),
    "k 2": (dict(k=2), 11.63, 1),
    "k 8": (dict(k=8), 11.64, 1),
    "r / 4": (dict(cpu=dict(r=8), gpu=dict(r=16)), None, 1),
    "r x 2": (dict(cpu=dict(r=64), gpu=dict(r=128)), None, 1),
    "BatchNorm": (dict(query_norm="batch"), 11.74, 2),
    "LayerNorm": (dict(query_norm="layer"), 11.68, 2),
    "residual": (dict(internal_residual=True), 11.64, 2),
    "output projection": (dict(out_proj=True), 11.64, 2),
    "Top-heavy": (dict(placement="top-heavy"), 11.63, 2),
    "Bottom-heavy": (dict(placement="bottom-heavy"), 11.60, 2),
}
variants = {"HML": (cpt, log(11.64))} | {name: (dict(cpt, **keys), printed and log(printed), n) for name, (keys, printed, n) in changes.items()}
claims = ["BatchNorm > HML", "retention_loss: BatchNorm > HML"]
