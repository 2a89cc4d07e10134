"""UltraMemV2, Table 3: the learning rate of each model, whole runs, one seed.

Quarter runs mislead: after 256 steps the dense model is better at three times the published rate (5.617 nats against 5.702), after 1,024 a quarter of
a nat worse. Each model's winner belongs in ultramem_table3.py, whose rows are those at 4e-4, before an order is believed. Rates are times 3 at the
width of 256 (gpu: times 1); Memory+'s values stay at 1e-3."""
from experiments.ultramem_table3 import cpu, gpu, prepare, variants as ladder

model, metric, seeds = "ultramem", "val_loss", 1
variants = {f"{name} {rate:g}": (dict(keys, learning_rate=rate), None) for name, (keys, *_) in ladder.items() for rate in (1e-4, 2e-4, 4e-4, 8e-4)}
baseline = {name: f"{name.rsplit(' ', 1)[0]} 0.0004" for name in variants}
