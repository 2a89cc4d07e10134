"""Where does your own model stand? model_mine.py beside the other memories, each against its plain
baseline, as in which_memory, but on text that every machine has: Python's own documentation.

    cp model_move.py model_mine.py              # and change it
    python train.py experiments/mine.py --jobs=2

1M tokens (gpu: 2.6M) and one seed: differences below 0.02 bits per byte say nothing. The others
have their best learning rates of which_rates.py; yours has those of the one of them whose Config is
most like its own, from which it was copied (of MIDUS, which is not here, a copy needs its own, in
this file).
"""
import sys
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments import run
from experiments import which_memory as study
from sample import load_module

model = "move"
metric = "val_bpb"
seeds = 1
facts = "experiments/tasks.py facts --clusters=8,8 --source=pydocs"
prepare = dict(cpu=f"{facts} --text_chars=3100000 --out=data/facts_mine",
               gpu=f"{facts} --text_chars=8500000 --out=data/facts_mine_gpu")
cpu = study.cpu
gpu = dict(study.gpu, max_iters=20, eval_interval=10)            # one epoch, like cpu's
titles = ("MoVE", "LIMe", "UltraMemV2", "HierMem")


def fields_of(title):
    return set(load_module(study.models[title]).Config.__dataclass_fields__)


def origin_of(own):
    """The model that has most of these fields and fewest others."""
    return min(titles, key=lambda title: len(own ^ fields_of(title)))


def keys_like(name, lacks):
    """Another model's keys for model_mine.py, less the fields that it does not have."""
    keys, _ = study.variants[name]
    own = {key: value for key, value in keys.items() if key not in lacks}
    if "cpu" in own:
        own["cpu"] = {key: value for key, value in own["cpu"].items() if key not in lacks}
    return {**own, "model": "mine"}, None


variants = {}
baseline = {}
if "mine" in study.models:
    origin = origin_of(fields_of("mine"))
    lacks = fields_of(origin) - fields_of("mine")
    baseline["mine"] = "mine dense"
    variants["mine dense"] = keys_like(study.baseline[origin], lacks)
    variants["mine"] = keys_like(origin, lacks)
for title in titles:
    baseline[title] = study.baseline[title]
    for name in (baseline[title], title):
        variants[name] = study.variants[name]


def places(rows):
    """[(gain in bits per byte, time of a step in units of its baseline's, memory)], best first:
    of those with a time on the machine of their baseline; --graph=True takes none."""
    found = []
    for title, dense in baseline.items():
        gain = run.differences(metric, rows, dense, title)
        ratios = run.step_times(rows, title, dense)
        if gain and ratios:
            found.append((mean(gain), mean(ratios), title))
    return sorted(found, reverse=True)


def outdated(rows):
    """Which of model_mine.py's rows older code has made: run.py never runs a row again."""
    now = run.source_hash("mine")
    found = []
    for name in ("mine dense", "mine"):
        hashes = {row["source_hash"] for row in rows[name].values()}
        if any(now not in run.same_code(old) for old in hashes):
            found.append(name)
    return found


def finish(rows, scale):
    found = places(rows)
    measured = {"ratios": {title: {"step": step} for _, step, title in found}}
    picture = run.ROOT / f"experiments/results/mine-{scale}-gain.png"
    study.draw_gains(rows, measured, picture)
    for title, dense in baseline.items():
        if run.differences(metric, rows, dense, title) and title not in measured["ratios"]:
            print(f"{title} has no step time beside its baseline's, on one machine: no place")
    print("place  gain in bpb  step time  memory")
    for place, (gain, step, title) in enumerate(found, 1):
        print(f"{place:5}  {gain:+11.4f}  {step:8.2f}x  {title}")
    print(f"picture: {picture}")
    if "mine" not in baseline:
        print("there is no model_mine.py yet: cp model_move.py model_mine.py, and change it")
        return
    for name in outdated(rows):
        print(f"{name}: by older code. To run it again remove out/mine-{scale}/{run.slug(name)} "
              f"and its line in experiments/results/mine-{scale}.jsonl")
