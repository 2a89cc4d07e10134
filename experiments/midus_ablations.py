"""MIDUS, Tables 8, 9, 11 and 12 (Llama 3.2 1B): a norm on the queries costs; slots, Top-k,
placement and the other structures hardly matter.

Starts from midus_table1.py's base, on its data, with its columns: `python train.py
experiments/midus_table1.py --only=base`. Every structure at two rates, beside HML at the same rate.
The paper's numbers are the log of its WikiText perplexities; its n = 16, 32, 64 are 8, 16, 32 here
(gpu: 16, 32, 64). Where it finds no difference, or one of 0.003 nats (LayerNorm), nothing is
claimed: all should be small. With k 1 the chosen slot has the weight 1, and nothing teaches the
choice: queries and keys stay as they start.
"""
from math import log

from experiments.midus_table1 import cpu, gpu, prepare, two_rates

model = "midus"
metric = "retention_loss"
also = ("val_loss", "unseen_loss", "blimp")
seeds = 3
structures = {                  # overrides, the paper's number, seeds
    "HML": ({}, log(11.64)),
    "n / 4": (dict(cpu=dict(n_keys=8), gpu=dict(n_keys=16)), log(11.63), 1),
    "n / 2": (dict(cpu=dict(n_keys=16), gpu=dict(n_keys=32)), log(11.64), 1),
    "n x 2": (dict(cpu=dict(n_keys=64), gpu=dict(n_keys=128)), None, 1),
    "k 1": (dict(top_k=1), log(11.67), 1),
    "k 2": (dict(top_k=2), log(11.63), 1),
    "k 8": (dict(top_k=8), log(11.64), 1),
    "r / 4": (dict(cpu=dict(r=8), gpu=dict(r=16)), None, 1),
    "r x 2": (dict(cpu=dict(r=64), gpu=dict(r=128)), None, 1),
    "BatchNorm": (dict(queries="batch_norm"), log(11.74)),
    "LayerNorm": (dict(queries="layer_norm"), log(11.68)),
    "residual": (dict(queries="residual"), log(11.64)),
    "output projection": (dict(queries="out_proj"), log(11.64)),
    "Top-heavy": (dict(placement="top-heavy"), log(11.63)),
    "Bottom-heavy": (dict(placement="bottom-heavy"), log(11.60)),
}
variants = {}
baseline = {}
claims = []
for rate in two_rates:
    cpt = dict(init_from="@midus_table1/base", phase="cpt", upscale="midus", learning_rate=rate)
    for name, (overrides, *rest) in structures.items():
        variants[f"{name} {rate:g}"] = (cpt | overrides, *rest)
        baseline[f"{name} {rate:g}"] = f"HML {rate:g}"
    for column in ("", "val_loss: ", "unseen_loss: "):
        claims.append(f"{column}BatchNorm {rate:g} > HML {rate:g}")
