"""MIDUS: what each method of Table 1 learns of the new text for what it forgets of the old, at four
learning rates: one seed, a quarter of that table's length.

Every method learns more and forgets more at a higher rate, so that one rate a method says little.
midus_rates-cpu-plane.md has how far a method is below the untouched base on the new text (nats)
where it is 0.05, 0.1 or 0.2 above it on the old: on straight lines from the untouched base through
the points of its rates, without those that forget more and learn less than another; beyond the last
point it gains nothing more. "mean" is the average over all rises up to 0.2. In the picture a lower
line is a better method. unseen_loss is that of the text that nobody trains on.

HML's values start at 0, and Adam moves them by about the rate a step, without a matrix's fan-in to
multiply that. "values 30x" gives them 30 times the rate. The paper's memories keep the highest rate
to the end; "annealed" lets theirs fall with the others', for a value is read here 64 times a step,
there 4,096 times, and a rate that stays high is noisier. "values at 0.06" have that rate whatever
the others': those of "values 30x" at 2e-3. "residual": queries with x in them (midus_queries.py).
"base on old" is what as many tokens of the old text would still give the base; its val_loss is that
of the old text, too.

Starts from midus_table1.py's base: `python train.py experiments/midus_table1.py --only=base
--seeds=1`.
"""
from pathlib import Path
from statistics import mean

import numpy as np

from experiments import run
from experiments.midus_table1 import (after_base, annealed, cpu, fast_values, gpu, methods,
                                      prepare, untouched)

model = "midus"
metric = "unseen_loss"
also = ("val_loss", "retention_loss", "blimp")
seeds = 1
cpu = dict(cpu, max_iters=500, eval_interval=250)
gpu = dict(gpu, max_iters=48)
RATES = (1.25e-4, 5e-4, 2e-3, 8e-3)
PRICES = (0.05, 0.1, 0.2)       # nats of the old text
curves = {title: dict(upscale=upscale) for title, (upscale, _) in methods.items()}
curves["MIDUS-HML values 30x"] = fast_values
curves["MIDUS-HML values 30x annealed"] = annealed
curves["MIDUS-HML residual"] = dict(upscale="midus", queries="residual")
cpt = dict(init_from="@midus_table1/base", phase="cpt")
same = dict(cpt, upscale="base")
variants = {
    "base untouched": (dict(same, **untouched), None),
    "base on old 0.0005": (dict(same, dataset="@_old", learning_rate=5e-4, **after_base), None),
}
baseline = {"base on old 0.0005": "base untouched"}
for title, keys in curves.items():
    for rate in RATES:
        variants[f"{title} {rate:g}"] = (dict(cpt, **keys, learning_rate=rate), None)
        baseline[f"{title} {rate:g}"] = "base untouched"
for rate in RATES[:2]:
    fixed = dict(cpt, **annealed, learning_rate=rate) | dict(value_lr=0.06 / rate)
    variants[f"MIDUS-HML values at 0.06 annealed {rate:g}"] = (fixed, None)
    baseline[f"MIDUS-HML values at 0.06 annealed {rate:g}"] = "base untouched"


def learned(price, points):
    """How much lower the new text's loss is where the old text's is higher by `price` than at the
    first of the points (old, new), the untouched base."""
    kept = []
    for old, new in sorted(points):
        if not kept or new < kept[-1][1]:                       # else another forgets and has less
            kept.append((old, new))
    old, new = np.array(kept).T
    return np.interp(price, old - points[0][0], points[0][1] - new)


def names_of(title):
    return ["base untouched", *(f"{title} {rate:g}" for rate in RATES)]


def points_of(rows, title):
    """{seed: [(loss of the old text, loss of the new)]}, the untouched base's and each rate's, of
    the seeds that have them all."""
    found = [rows[name] for name in names_of(title)]
    points = {}
    for seed in sorted(set.intersection(*map(set, found))):
        points[seed] = [(row[seed]["retention_loss"], row[seed]["val_loss"]) for row in found]
    return points


def price_table(rows):
    all_prices = np.linspace(0, max(PRICES), 201)
    columns = [f"learned for {price:g}" for price in PRICES]
    lines = run.heading(["method", *columns, "mean", "MIDUS-HML learns more"])
    means = {}
    for title in curves:
        points = points_of(rows, title)
        means[title] = {seed: learned(all_prices, at).mean() for seed, at in points.items()}
        hml = means["MIDUS-HML"]                                # the first title
        more = [hml[seed] - mean for seed, mean in means[title].items() if seed in hml]
        cells = [run.text([learned(price, at) for at in points.values()]) for price in PRICES]
        verdict = "-" if title == "MIDUS-HML" else run.verdict(more)
        lines.append(run.line([title, *cells, run.text([*means[title].values()]), verdict]))
    return "\n".join(lines) + "\n"


def finish(rows, scale):
    """A line for each method, a point for each rate and the untouched base: means over seeds. On
    the right, the left end."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(12, 5), layout="constrained")
    panels = figure.subplots(1, 2)
    markers = dict(zip(("untouched", *map("{:g}".format, RATES)), "*os^D"))
    starts = []
    for n, title in enumerate(curves):
        points = []
        for name in names_of(title):
            found = rows[name].values()
            if found:
                kept = mean(row["retention_loss"] for row in found)
                new = mean(row["val_loss"] for row in found)
                marker = markers[name.rpartition(" ")[2]]
                for axes in panels:
                    axes.scatter(kept, new, marker=marker, color=f"C{n}")
                points.append((kept, new))
        if len(points) > 1:
            starts.append(points[0][0])
            for axes in panels:
                axes.plot(*zip(*points), color=f"C{n}", label=title)
    for rate, marker in markers.items():
        panels[0].scatter([], [], marker=marker, color="grey", label=rate)
    for axes in panels:
        axes.set(xlabel="loss of the old text", ylabel="loss of the new text")
    if starts:
        panels[1].set_xlim(min(starts) - 0.02, min(starts) + 2 * max(PRICES))
    panels[0].legend()
    figure.suptitle("down is learned, left is kept")
    stem = Path(__file__).parent / "results" / f"midus_rates-{scale}-plane"
    figure.savefig(f"{stem}.png", dpi=120)
    stem.with_suffix(".md").write_text(price_table(rows), encoding="utf-8")
