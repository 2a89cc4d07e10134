"""MIDUS, Table 3 (Llama 3.2 1B): of the memories that a block may hold, HML is better than linear
and product keys, and as good as UltraMem.

Starts from midus_table1.py's base, on its data, with its columns: `python train.py
experiments/midus_table1.py --only=base`. The paper's numbers are the log of its WikiText
perplexities; it prints 11.64 for UltraMem and HML alike, so that between them there is nothing to
claim.
"""
from math import log

from experiments.midus_table1 import cpu, gpu, prepare

model = "midus"
metric = "unseen_loss"
also = ("val_loss", "retention_loss")
baseline = "HML"
seeds = 3
cpt = dict(init_from="@midus_table1/base", phase="cpt", upscale="midus")
variants = {
    "HML": (cpt, log(11.64)),
    "Linear": (dict(cpt, memory="linear"), log(11.82)),
    "PKM": (dict(cpt, memory="pkm"), log(11.97)),
    "UltraMem": (dict(cpt, memory="ultramem"), log(11.64)),
}
claims = ["Linear > HML", "PKM > HML", "val_loss: Linear > HML",
          "val_loss: PKM > HML", "retention_loss: Linear > HML", "retention_loss: PKM > HML"]
