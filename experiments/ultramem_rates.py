"""UltraMemV2, Table 3: the learning rate of each model, whole runs, one seed.

Quarter runs mislead: after 256 steps the dense model is better at three times the published rate (5.617 nats against 5.702), after 1,024 a quarter of
a nat worse; UltraMem is ahead at half of it until step 768, then behind. Rates are times 3 at the width of 256 (gpu: times 1); Memory+'s values stay at 1e-3.
All end at 4e-5, the cpu rows by wsd, gpu by cosine.
ultramem_table3's rows are at 4e-4, the best of the rates that have run for the dense model, UltraMemV2 and UltraMem."""
from experiments.ultramem_table3 import cpu as table3, gpu, prepare, variants as ladder

model, metric, seeds = "ultramem", "val_loss", 1
cpu = {key: value for key, value in table3.items() if key != "learning_rate"}
variants = {f"{name} {rate:g}": (dict(keys, learning_rate=rate), None) for name, (keys, *_) in ladder.items() for rate in (2e-4, 4e-4, 8e-4)}
baseline = {name: f"{name.rsplit(' ', 1)[0]} 0.0004" for name in variants}
