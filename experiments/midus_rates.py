"""MIDUS: the learning rate of each method of Table 1, on one seed and a quarter of its length: what
it learns of the new text, what it forgets of the old, and the loss of a text that is neither.

Every method learns more and forgets more at a higher rate, so that one rate a method says little. A
second picture has the new text's loss by the old one's, a line a method: one method is better than
another where its line is below the other's. The table beside it has the area of the plane in which
a method's points are better in both losses, up to the worst losses of all methods.

HML's values start at 0, and Adam moves them by about the rate a step, without a matrix's fan-in to
multiply that. "values 30x" gives them 30 times the rate.

Starts from midus_table1.py's base: `python train.py experiments/midus_table1.py --only=base
--seeds=1`.
"""
from itertools import pairwise
from pathlib import Path
from statistics import mean

from experiments import run
from experiments.midus_table1 import cpu, gpu, methods, prepare

model = "midus"
metric = "unseen_loss"
also = ("val_loss", "retention_loss", "blimp")
seeds = 1
cpu = dict(cpu, max_iters=500, eval_interval=250)
gpu = dict(gpu, max_iters=48)
RATES = (1.25e-4, 5e-4, 2e-3, 8e-3)
curves = {title: dict(upscale=upscale) for title, (upscale, _) in methods.items()}
curves["MIDUS-HML values 30x"] = dict(upscale="midus", value_lr=30.0)
variants = {}
baseline = {}
for title, keys in curves.items():
    for rate in RATES:
        cpt = dict(init_from="@midus_table1/base", phase="cpt", **keys)
        variants[f"{title} {rate:g}"] = (dict(cpt, learning_rate=rate), None)
        baseline[f"{title} {rate:g}"] = f"{title} 0.002"


def area(points, corner):
    """Of the part of the plane that is worse in both losses than one of the points (kept, learned),
    up to the corner."""
    total = 0.0
    best = corner[1]
    for (kept, learned), (next_kept, _) in pairwise([*sorted(points), corner]):
        best = min(best, learned)
        total += (next_kept - kept) * (corner[1] - best)
    return total


def points_of(rows, title, seed):
    """(loss of the old text, loss of the new) at every rate that has run."""
    found = [rows[f"{title} {rate:g}"].get(seed) for rate in RATES]
    return [(row["retention_loss"], row["val_loss"]) for row in found if row]


def area_table(rows):
    """Over the seeds for which all rates of all methods have run."""
    areas = {title: [] for title in curves}
    for seed in set.intersection(*map(set, rows.values())):
        points = {title: points_of(rows, title, seed) for title in curves}
        corner = tuple(map(max, zip(*sum(points.values(), []))))
        for title in curves:
            areas[title].append(area(points[title], corner))
    hml = areas["MIDUS-HML"]
    lines = run.heading(["method", "area, learned against kept", "MIDUS-HML has more"])
    for title, found in areas.items():
        less = [a - b for a, b in zip(hml, found)]
        lines.append(run.line([title, run.text(found), run.verdict(less)]))
    return "\n".join(lines) + "\n"


def finish(rows, scale):
    """A line for each method, a point for each rate: means over seeds."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(8, 6), layout="constrained")
    axes = figure.subplots()
    for title in curves:
        points = []
        for rate in RATES:
            found = rows[f"{title} {rate:g}"].values()
            if found:
                kept = mean(row["retention_loss"] for row in found)
                learned = mean(row["val_loss"] for row in found)
                axes.annotate(f"{title} {rate:g}", (kept, learned), (4, 4),
                              textcoords="offset points", fontsize=7)
                points.append((kept, learned))
        if points:
            axes.plot(*zip(*points), "o-", markersize=4)
    axes.set(xlabel="loss of the old text", ylabel="loss of the new text",
             title="down is learned, left is kept", xmargin=0.15)
    stem = Path(__file__).parent / "results" / f"midus_rates-{scale}-plane"
    figure.savefig(f"{stem}.png", dpi=120)
    stem.with_suffix(".md").write_text(area_table(rows), encoding="utf-8")
