"""MIDUS, Tables 3, 8, 9, 11 and 12 (Llama 3.2 1B): by perplexity HML is better than linear and
product keys and as good as UltraMem; a norm on its queries costs; slots, Top-k, placement and the
other structures hardly matter.

Starts from midus_table1.py's base, on its data, with its columns: `python train.py
experiments/midus_table1.py --only=base`. Everything at two rates, beside HML at the same rate. The
paper's numbers are the log of its WikiText perplexities, which ask what is kept: they stand beside
the old text. Its n = 16, 32, 64 are 8, 16, 32 here (gpu: 16, 32, 64). Where it finds no difference,
or one of 0.003 nats (LayerNorm), nothing is claimed: all should be small.

At one rate memories of several heads that are summed move the stream faster than HML's, whose heads
lie side by side, and who moves it less forgets less; "values 1/4" take that away on a CPU, where
there are four heads. With k 1 the chosen slot has the weight 1, and nothing teaches the choice:
queries and keys stay as they start.
"""
from math import log

from experiments.midus_table1 import cpu, gpu, prepare

model = "midus"
metric = "retention_loss"
also = ("val_loss", "unseen_loss", "blimp")
seeds = 3
structures = {                  # overrides, the paper's number, seeds
    "HML": ({}, log(11.64)),
    "Linear": (dict(memory="linear"), log(11.82)),
    "PKM": (dict(memory="pkm"), log(11.97)),
    "UltraMem": (dict(memory="ultramem"), log(11.64)),
    "Linear values 1/4": (dict(memory="linear", value_lr=0.25), None, 1),
    "PKM values 1/4": (dict(memory="pkm", value_lr=0.25), None, 1),
    "BatchNorm": (dict(queries="batch_norm"), log(11.74)),
    "LayerNorm": (dict(queries="layer_norm"), log(11.68)),
    "n / 4": (dict(cpu=dict(n_keys=8), gpu=dict(n_keys=16)), log(11.63), 1),
    "n / 2": (dict(cpu=dict(n_keys=16), gpu=dict(n_keys=32)), log(11.64), 1),
    "k 1": (dict(top_k=1), log(11.67), 1),
    "k 2": (dict(top_k=2), log(11.63), 1),
    "k 8": (dict(top_k=8), log(11.64), 1),
    "residual": (dict(queries="residual"), log(11.64), 1),
    "output projection": (dict(queries="out_proj"), log(11.64), 1),
    "Top-heavy": (dict(placement="top-heavy"), log(11.63), 1),
    "Bottom-heavy": (dict(placement="bottom-heavy"), log(11.60), 1),
}
variants = {}
baseline = {}
claims = []
for rate in (1.25e-4, 5e-4):
    cpt = dict(init_from="@midus_table1/base", phase="cpt", upscale="midus", learning_rate=rate)
    for name, (overrides, *rest) in structures.items():
        variants[f"{name} {rate:g}"] = (cpt | overrides, *rest)
        baseline[f"{name} {rate:g}"] = f"HML {rate:g}"
    claims += [f"{name} {rate:g} > HML {rate:g}" for name in ("Linear", "PKM", "BatchNorm")]
