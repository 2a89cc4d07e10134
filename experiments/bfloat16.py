"""Does training in bfloat16 lose anything? Every model twice, on the same data with the same
initial values: products in float32, and in bfloat16 under autocast, as train.py does where the
machine multiplies bfloat16 faster.

Each minus its float32 run at the end; the picture has the curves side by side.
"""
from pathlib import Path

model = "move"
metric = "val_loss"
seeds = 1
prepare = dict(cpu="experiments/tasks.py facts --clusters=8,8 --text_chars=14500000 "
                   "--out=data/facts_4M",
               gpu="--source=fineweb_edu --max_tokens=200_000_000 --out=data/fineweb_edu_200M")
cpu = dict(depth=4, n_embd=128, batch_tokens=4096, max_iters=480, eval_interval=40,
           eval_tokens=65536, sample_tokens=0)                  # 2.0M tokens
gpu = dict(depth=12, batch_tokens=131072, max_iters=400, eval_interval=40, sample_tokens=0)
models = {"MoVE": dict(model="move"), "LIMe": dict(model="lime"),
          "UltraMemV2": dict(model="ultramem"), "MIDUS": dict(model="midus"),
          "HierMem": dict(model="hiermem")}
variants = {}
baseline = {}
for title, keys in models.items():
    for dtype in ("float32", "bfloat16"):
        variants[f"{title} {dtype}"] = (dict(keys, dtype=dtype), None)
    baseline[f"{title} bfloat16"] = f"{title} float32"


def finish(rows, scale):
    """The validation loss over the steps, a panel a model."""
    from matplotlib.figure import Figure
    titles = [title for title in models if rows[f"{title} float32"]]
    if not titles:
        return
    figure = Figure(figsize=(3 * len(titles), 2.8), layout="constrained")
    panels = figure.subplots(1, len(titles), sharey=True, squeeze=False)[0]
    for axes, title in zip(panels, titles):
        for dtype, style in (("float32", "-"), ("bfloat16", "--")):
            for row in rows[f"{title} {dtype}"].values():
                steps = [at["step"] for at in row["curve"]]
                axes.plot(steps, [at[metric] for at in row["curve"]], style, label=dtype)
        axes.set(title=title, xlabel="step")
        axes.legend(fontsize=8)
    panels[0].set(ylabel="validation loss, nats")
    figure.savefig(Path(__file__).parent / "results" / f"bfloat16-{scale}-curves.png", dpi=120)
