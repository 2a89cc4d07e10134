"""Where does your own model stand? model_mine.py beside the other memories, each against its plain
baseline, as in which_memory, but on text that every machine has: Python's own documentation.

    cp model_move.py model_mine.py              # and change it
    python train.py experiments/mine.py --jobs=2

1M tokens and one seed, which ranks what differs by 0.02 bits per byte or more. Muon trains the
matrices of all. The others have their best learning rates of which_rates.py, yours that of its own
recipe for Muon, or where it has none `rate` for all but the matrices, which is near the best of
LIMe and of hierarchical memories: try three times as much, and a third.
"""
import sys
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments import run
from experiments import which_memory as study
from sample import load_module

rate = 45e-3
model = "move"
metric = "val_bpb"
seeds = 1
facts = "experiments/tasks.py facts --clusters=8,8 --source=pydocs"
prepare = dict(cpu=f"{facts} --text_chars=3100000 --out=data/facts_mine",
               gpu=f"{facts} --text_chars=12000000 --out=data/facts_mine_gpu")
cpu = study.cpu
gpu = dict(study.gpu, max_iters=80, eval_interval=40)
variants, baseline = {}, {}
for title in ("mine", "MoVE", "LIMe", "UltraMemV2", "HierMem"):
    if title in study.models:
        own_rate = {}
        if title == "mine" and "muon" not in load_module("mine").RECIPE:
            own_rate = dict(learning_rate=rate)
        baseline[title] = study.baseline[title]
        for name in (baseline[title], title):
            keys, paper = study.variants[name]
            variants[name] = (dict(keys, **own_rate), paper)


def places(rows):
    """[(gain in bits per byte, time of a step in units of its baseline's, memory)], best first."""
    found = []
    for title, dense in baseline.items():
        gain = run.differences(metric, rows, dense, title)
        if gain:
            ratios = [rows[title][seed]["step_ms"] / rows[dense][seed]["step_ms"]
                      for seed in rows[title].keys() & rows[dense].keys()]
            found.append((mean(gain), mean(ratios), title))
    return sorted(found, reverse=True)


def finish(rows, scale):
    found = places(rows)
    measured = {"ratios": {title: {"step": step} for _, step, title in found}}
    picture = run.ROOT / f"experiments/results/mine-{scale}-gain.png"
    study.draw_gains(rows, measured, picture)
    print("place  gain in bpb  step time  memory")
    for place, (gain, step, title) in enumerate(found, 1):
        print(f"{place:5}  {gain:+11.4f}  {step:8.2f}x  {title}")
    print(f"picture: {picture}")
    if "mine" not in baseline:
        print("there is no model_mine.py yet: cp model_move.py model_mine.py, and change it")
