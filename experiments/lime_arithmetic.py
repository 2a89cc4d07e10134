"""LIMe, section 5.4.2: on the Arithmetic Expression Task of 6 operands LIMe beats LLaMA.

4 layers, width 32, 4 heads, linear decay, as in the paper's Appendix A, but numbers up to 19 and 10
epochs (gpu: 199 and the paper's 200). At two learning rates (the router's 1e-2 with both), since
the gap is one of learning speed: a second picture has the accuracy over the steps, 195 to an epoch.
"""
from pathlib import Path
from statistics import mean

model = "lime"
metric = "accuracy"
baseline = "LLaMA 1e-3"
seeds = 3
prepare = dict(
    cpu="experiments/tasks.py arithmetic --operands=6 --max_value=19 --out=data/aet6_19",
    gpu="experiments/tasks.py arithmetic --operands=6 --max_value=199 --out=data/aet6_199")
shape = dict(depth=4, n_embd=32, n_head=4, n_inner=128, block_size=62, batch_size=256,
             batch_tokens=256 * 62, eval_tokens=62000, sample_tokens=0,
             schedule="wsd", warmdown=1.0)                      # down from the warm-up on
cpu = dict(shape, max_iters=1950, eval_interval=195, warmup=0.1)    # 10 epochs of 50,000 samples
gpu = dict(shape, max_iters=39000, eval_interval=1950)          # 200 epochs
variants = {
    "LLaMA 1e-3": (dict(dense=True, learning_rate=1e-3), .413),
    "LIMe 1e-3": (dict(learning_rate=1e-3), .716),
    "LLaMA 3e-3": (dict(dense=True, learning_rate=3e-3), None),
    "LIMe 3e-3": (dict(learning_rate=3e-3, router_lr=10 / 3), None),
}
claims = ["LIMe 1e-3 > LLaMA 1e-3", "LIMe 3e-3 > LLaMA 3e-3"]


def finish(rows, scale):
    """The accuracy at each evaluation, a variant's mean over its seeds."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(7, 4), layout="tight")
    axes = figure.subplots()
    for name, by_seed in rows.items():
        points = {}
        for row in by_seed.values():
            for at in row["curve"]:
                points.setdefault(at["step"], []).append(at["accuracy"])
        means = [mean(accuracies) for accuracies in points.values()]
        axes.plot(list(points), means, "o-", label=name)
    axes.set(xlabel="step", ylabel="accuracy", ylim=(0, 1.03))
    axes.legend()
    figure.savefig(Path(__file__).parent / "results" / f"lime_arithmetic-{scale}-curves.png")
