"""MIDUS, Table 3 (Llama 3.2 1B): of the memories that a block may hold, HML is better than linear
and product keys, and as good as UltraMem.

Starts from midus_table1.py's base, on its data, with its columns: `python train.py
experiments/midus_table1.py --only=base`. Every memory at two rates, beside HML at the same rate.
The paper's numbers are the log of its WikiText perplexities; it prints 11.64 for UltraMem and HML
alike, so that between them there is nothing to claim.
"""
from math import log

from experiments.midus_table1 import cpu, gpu, prepare, two_rates

model = "midus"
metric = "retention_loss"
also = ("val_loss", "unseen_loss", "blimp")
seeds = 3
memories = {                    # `memory` and the paper's perplexity
    "HML": ("hml", 11.64),
    "Linear": ("linear", 11.82),
    "PKM": ("pkm", 11.97),
    "UltraMem": ("ultramem", 11.64),
}
variants = {}
baseline = {}
claims = []
for rate in two_rates:
    cpt = dict(init_from="@midus_table1/base", phase="cpt", upscale="midus", learning_rate=rate)
    for name, (memory, perplexity) in memories.items():
        variants[f"{name} {rate:g}"] = (dict(cpt, memory=memory), log(perplexity))
        baseline[f"{name} {rate:g}"] = f"HML {rate:g}"
    for column in ("", "val_loss: ", "unseen_loss: "):
        claims.append(f"{column}Linear {rate:g} > HML {rate:g}")
        claims.append(f"{column}PKM {rate:g} > HML {rate:g}")
