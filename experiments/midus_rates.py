"""MIDUS: the learning rate of each method of Table 1, on one seed: what it learns of the new text and what it forgets of the old.

Every method learns more and forgets more at a higher rate, so that one rate a method says little: the picture has a line for each, and one method is
better than another where its line is below the other's. Starts from midus_table1.py's base: `python train.py experiments/midus_table1.py --only=base --seeds=1`.
HML's row at 0.0005 is from an earlier base, trained alike, which ended at 3.700."""
from experiments.midus_table1 import cpu, gpu, prepare

model, metric, also, seeds = "midus", "val_loss", ("retention_loss",), 1
cpt = dict(init_from="@midus_table1/base", phase="cpt")
methods = ("midus", "opt_deus", "avg_deus", "lesa", "llama_pro", "base", "solar")
variants = {f"{method} {rate:g}": (dict(cpt, upscale=method, learning_rate=rate), None) for method in methods
            for rate in (1.25e-4, 5e-4, 2e-3, 8e-3)}
baseline = {name: f"{name.split()[0]} 0.002" for name in variants}
