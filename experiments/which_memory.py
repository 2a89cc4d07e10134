"""Which memory is worth its cost? Each architecture against its own plain baseline: same data,
tokens and shape, paired seeds.

The text has invented facts in it, each mentioned 1 to 100 times (experiments/tasks.py facts), and a
run goes over it once, so that one run gives both the bits per byte and what was remembered. MIDUS
and the post-hoc bank start from the trained baseline and are compared with going on with the
baseline over the same text. The baselines' runs over half of the text say what more steps would
have bought. All train their matrices with Muon, at which_rates.py's rates, and MoVE by its recipe.

`python experiments/which_memory.py` then measures the costs, if they are not there yet, and makes
the table and the two pictures of the README.
"""
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import sample
from experiments import run
from experiments.tasks import MENTIONS, plot_recall
from prepare_fineweb import guard, need

model = "move"
metric = "val_bpb"
seeds = 3
prepare = dict(
    cpu="experiments/tasks.py facts --clusters=8,8 --text_chars=29000000 --out=data/facts_cpu",
    gpu="experiments/tasks.py facts --clusters=16,16 --text_chars=400000000 --per_bucket=208 "
        "--vocab_size=16384 --out=data/facts_gpu")
cpu = dict(depth=4, n_embd=128, batch_tokens=4096, max_iters=2000, eval_interval=250,
           eval_tokens=131072, sample_tokens=0)                 # 8.2M tokens, one epoch
gpu = dict(depth=12, batch_tokens=131072, max_iters=800, eval_interval=100, sample_tokens=0)
half = {"cpu": dict(max_iters=1000), "gpu": dict(max_iters=400)}
untuned = dict(optimizer="muon", schedule="wsd")                # at the recipe's other rates
tuned = {                       # at scale cpu; close to the best of which_rates.py
    "MoVE": {},
    "LIMe": dict(learning_rate=27e-3, router_lr=1e-2 / 27e-3),
    "UltraMemV2": dict(learning_rate=36e-4),
    "HierMem": dict(learning_rate=15e-3),
    "MIDUS base": dict(learning_rate=18e-3),
}
bank = dict(memory_lr=1 / 3)                                    # HierMem's: 5e-3, the recipe's rate
models = {"MoVE": "move", "LIMe": "lime", "UltraMemV2": "ultramem", "HierMem": "hiermem"}
for path in sorted(run.ROOT.glob("model_*.py")):                # and your own
    own = path.stem.removeprefix("model_")
    if own not in (*models.values(), "midus"):
        models[own] = own


def keys_of(title, name):
    if title == "MoVE":                                         # its recipe has Muon
        return dict(model=name)
    return dict(model=name, **untuned, cpu=tuned.get(title, {}))


variants = {}
baseline = {}
for title, name in models.items():
    keys = keys_of(title, name)
    shorter = {scale: {**keys.get(scale, {}), **half[scale]} for scale in half}
    memory = bank if title == "HierMem" else {}
    variants[f"{title} dense"] = (dict(keys, dense=True), None)
    variants[title] = (dict(keys, **memory), None)
    variants[f"{title} dense x0.5"] = ({**keys, "dense": True, **shorter}, None, 1)
    baseline[title] = f"{title} dense"
    baseline[f"{title} dense x0.5"] = f"{title} dense"
midus = dict(model="midus", init_from="@MIDUS base", phase="cpt", **untuned)
hiermem = dict(keys_of("HierMem", "hiermem"), init_from="@HierMem dense")
variants.update({
    "MIDUS base": (dict(keys_of("MIDUS base", "midus"), dense=True), None),
    "MIDUS base continued": (dict(midus, upscale="base"), None),        # both at the recipe's rate
    "MIDUS": (dict(midus, upscale="midus"), None),
    "HierMem dense continued": (dict(hiermem, dense=True), None),
    "HierMem post-hoc": (dict(hiermem, **bank, memory="ffn", frozen=True), None),
})
baseline.update({
    "MIDUS": "MIDUS base continued", "MIDUS base continued": "MIDUS base",
    "HierMem post-hoc": "HierMem dense continued", "HierMem dense continued": "HierMem dense",
})
memories = (*models, "MIDUS", "HierMem post-hoc")
claims = [f"{baseline[title]} > {title}" for title in memories]


# ---------------------------------------------------------------- costs, table and pictures

def folder_of(title, scale):
    return run.ROOT / f"out/which_memory-{scale}" / run.slug(title) / "s0"


def step_ratio(title, scale, keys):
    """Time of a training step in units of the baseline's: the median of five measurements."""
    if "init_from" in keys:
        keys = dict(keys, init_from=folder_of(keys["init_from"], scale) / "ckpt.pt")
    flags = [f"--{key}={value}" for key, value in keys.items()]
    command = [sys.executable, "experiments/step_time.py", *flags]
    found = []
    for _ in range(5):                                          # a busy host moves one by a tenth
        shown = subprocess.run(command, cwd=run.ROOT, capture_output=True, text=True)
        ratio = re.search(r"(\S+) of dense", shown.stdout)
        need(ratio, f"step_time.py failed for {title}: {shown.stdout[-500:]}{shown.stderr[-1500:]}")
        found.append(float(ratio[1]))
    return median(found)


def decode_ratio(title, scale, device):
    """Time of 64 tokens after a prompt of 128, in units of the baseline's, measured by turns."""
    names = (title, baseline[title])
    nets = [sample.load_model(folder_of(name, scale), device)[0] for name in names]
    times = ([], [])
    for _ in range(8):
        for net, spent in zip(nets, times):
            idx = torch.zeros(1, 128, dtype=torch.long, device=device)
            start = time.perf_counter()
            for token in sample.generate(net, idx, 64, temperature=0):
                int(token)                                      # waits for a GPU
            spent.append(time.perf_counter() - start)
    mine, dense = (median(spent[1:]) for spent in times)        # the first was to warm up
    return mine / dense


def costs(rows, scale):
    """Of each memory, in units of its baseline's: a training step, decoding, peak memory."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ratios = {}
    for title in memories:
        if 0 not in rows[title]:
            continue
        result = json.loads((folder_of(title, scale) / "result.json").read_text())
        keys = dict(rows[title][0]["overrides"], dataset=result["config"]["dataset"])
        peaks = []
        for seed, row in rows[title].items():
            peaks.append(row["peak_memory_mb"] / rows[baseline[title]][seed]["peak_memory_mb"])
        ratios[title] = dict(step=step_ratio(title, scale, keys),
                             decode=decode_ratio(title, scale, device), memory=mean(peaks))
        print(title, ratios[title], flush=True)
    machine = f"{rows['MoVE'][0]['device']}, {torch.get_num_threads()} threads"
    return {"machine": f"{machine}, torch {torch.__version__}", "ratios": ratios}


def more_steps(rows, title, ratio):
    """Bits per byte that the baseline would gain in `ratio` times the time: as much per doubling of
    its tokens as by the last one. Curves flatten: this flatters a baseline with more time, and is
    unkind to one with less. Of a continued baseline the second phase alone is scaled."""
    base = baseline[title]
    if "continued" in base:
        before = baseline[base]
        tokens = (1 + ratio) / 2
    else:
        before = f"{base} x0.5"
        tokens = ratio
    return math.log2(tokens) * mean(run.differences(metric, rows, before, base))


def gains(rows, title, ratio):
    """The gain of each seed in bits per byte, at equal tokens and at equal time."""
    gain = run.differences(metric, rows, baseline[title], title)
    extra = more_steps(rows, title, ratio)
    return gain, [g - extra for g in gain]


def table(rows, measured):
    lines = run.heading(["memory", "parameters", "step time", "memory in training", "decoding time",
                         "bpb of its baseline", "gain, equal tokens", "verdict",
                         "gain, equal time", "verdict", "seeds"])
    for title, cost in measured["ratios"].items():
        base = rows[baseline[title]]
        gain, in_time = gains(rows, title, cost["step"])
        added = rows[title][0]["params"]["total"] - base[0]["params"]["total"]
        lines.append(run.line([
            title, f"{added:+,}", f"{cost['step']:.2f}x", f"{cost['memory']:.2f}x",
            f"{cost['decode']:.2f}x", run.text([row[metric] for row in base.values()]),
            run.text(gain, "+"), run.verdict(gain), f"{mean(in_time):+.4f}", run.verdict(in_time),
            str(len(gain))]))
    lines += ["", *run.heading(["recall by mentions", *map(str, MENTIONS)])]
    for title in measured["ratios"]:
        for name in (baseline[title], title):
            recalled = []
            for m in MENTIONS:
                recalled.append(run.text([row[f"recall_{m}"] for row in rows[name].values()]))
            lines.append(run.line([name, *recalled]))
    lines += ["", f"Times: {measured['machine']}, by turns. Guessing recalls 0.125."]
    return "\n".join(lines) + "\n"


def draw_gains(rows, measured, file):
    from matplotlib.figure import Figure
    figure = Figure(figsize=(6.5, 4), layout="constrained")
    axes = figure.subplots()
    for n, (title, cost) in enumerate(measured["ratios"].items()):
        gain, in_time = gains(rows, title, cost["step"])
        bar = run.noise(gain) if len(gain) > 1 else None
        axes.errorbar(cost["step"], mean(gain), yerr=bar, fmt="o", capsize=4, color=f"C{n}",
                      label=title)
        axes.plot(cost["step"], mean(in_time), "v", mfc="none", color=f"C{n}")
    axes.plot([], [], "v", mfc="none", color="grey", label="at equal time")
    axes.axhline(0, color="grey", linewidth=1)
    axes.set(xlabel="time of a training step, x its baseline's", ylabel="gain in bits per byte",
             title="Which memory is worth its cost?")
    axes.legend()
    figure.savefig(file, dpi=120)


def draw_recall(rows, measured, file):
    from matplotlib.figure import Figure
    titles = list(measured["ratios"])
    figure = Figure(figsize=(11, 2.8), layout="constrained")
    panels = figure.subplots(1, len(titles), sharey=True, squeeze=False)[0]
    for n, (axes, title) in enumerate(zip(panels, titles)):
        plot_recall(axes, rows[baseline[title]].values(), fmt="o--", color="grey",
                    label="its baseline")
        plot_recall(axes, rows[title].values(), fmt="o-", color=f"C{n}", label=title)
        axes.axhline(1 / 8, color="lightgrey", linewidth=1)
        axes.set(title=title)
        axes.legend(fontsize=8)
    panels[0].set(ylabel="facts recalled")
    figure.savefig(file, dpi=120)


def main(scale="cpu"):
    rows = run.results_of(__file__, scale)
    stem = run.ROOT / "experiments" / "results" / f"which_memory-{scale}"
    file = Path(f"{stem}-cost.json")
    if not file.exists():
        need(folder_of("MoVE", scale).exists(), "the costs are measured where the runs were made: "
             f"{folder_of('MoVE', scale).relative_to(run.ROOT)} is not here")
        file.write_text(json.dumps(costs(rows, scale), indent=1))
    measured = json.loads(file.read_text())
    Path(f"{stem}-summary.md").write_text(table(rows, measured), encoding="utf-8")
    draw_gains(rows, measured, f"{stem}-gain.png")
    draw_recall(rows, measured, f"{stem}-recall.png")
    print(table(rows, measured))


if __name__ == "__main__":
    guard("which_memory.py")
    main(*sys.argv[1:2])
