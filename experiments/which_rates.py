"""The learning rates at which the models of which_memory.py are best: a quarter of its steps, one seed.

A comparison of memories is one of tuned models, or it compares luck with rates. The winners stand in which_memory.py's `tuned`. The first number is
muon_lr, for the matrices; the second the rate of all else. With Muon the rates are constant until they fall to zero over the last 40%, as in MoVE's
recipe, with AdamW a cosine."""
from experiments.which_memory import cpu, gpu, plain, prepare

model, metric, seeds = "move", "val_bpb", 1
cpu, gpu = dict(cpu, max_iters=248, eval_interval=248), dict(gpu, max_iters=200, eval_interval=200)
recipes = {"LIMe": 3e-3, "UltraMemV2": 4e-4, "HierMem": 5e-3, "MIDUS base": 2e-3}         # of their papers (LIMe's: 1e-3), with AdamW for everything
variants = {f"MoVE {rate:g}": (dict(model="move", dense=True, learning_rate=rate), None) for rate in (.02, .01, .04)}
baseline = {name: "MoVE 0.02" for name in variants}
for title, rate in recipes.items():
    plain_model = dict(model=plain.get(title, "midus"), dense=True)
    variants[f"{title} AdamW {rate:g}"] = plain_model, None
    tried = [(.02, rate), (.04, rate), (.02, rate / 3), (.02, 3 * rate), (.02, 9 * rate), (.02, 27 * rate), (.01, 9 * rate)]
    tried += [(.02, 81 * rate), (.02, 243 * rate)] * (title == "MIDUS base")
    variants |= {f"{title} {muon:g} {rest:.2g}": (dict(plain_model, optimizer="muon", schedule="wsd", muon_lr=muon, learning_rate=rest), None) for muon, rest in tried}
    if title in ("UltraMemV2", "HierMem"):                      # whose tables learn at the second rate
        variants |= {f"{title} memory 0.02 {rest:.2g}": (dict(model=plain[title], optimizer="muon", schedule="wsd", muon_lr=.02, learning_rate=rest), None)
                     for rest in (3 * rate, 9 * rate, 27 * rate)}
    if title == "HierMem":                                      # ... or at a fraction of it
        variants |= {f"HierMem memory 0.02 0.045/{part}": (dict(model="hiermem", optimizer="muon", schedule="wsd", muon_lr=.02, learning_rate=.045,
                                                                memory_lr=1 / part), None) for part in (3, 9, 27)}
    baseline |= {name: f"{title} 0.02 {rate:.2g}" for name in variants if name.startswith(title)}
