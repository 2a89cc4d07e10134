"""Which memory is worth its cost? Each architecture against its own plain baseline: same data, tokens and shape, paired seeds.

The text is educational prose with invented facts in it, each mentioned 1 to 100 times (experiments/tasks.py facts), and a run goes over it once, so
that one run gives both the bits per byte and what was remembered. MIDUS and the post-hoc bank start from the trained baseline and are compared
with going on with the baseline over the same text. The baselines' runs over half of the text say what more steps would have bought. All train their
matrices with Muon (MoVE by its recipe): with AdamW a million tokens leave a model that has learned too little to judge its memory by.
`python experiments/which_memory.py` then measures the costs, if they are not there yet, and makes the table and the two pictures of the README.
"""
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, median, stdev

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import sample
from experiments import run
from experiments.tasks import MENTIONS

model, metric, seeds = "move", "val_bpb", 3
prepare = dict(cpu="experiments/tasks.py facts --clusters=8,8 --text_chars=3200000 --out=data/facts_cpu",
               gpu="experiments/tasks.py facts --clusters=16,16 --text_chars=400000000 --per_bucket=208 --vocab_size=16384 --out=data/facts_gpu")
cpu = dict(depth=4, n_embd=128, batch_size=4, batch_tokens=1024, max_iters=992, eval_interval=248, eval_tokens=109568, sample_tokens=0)   # one epoch
gpu = dict(depth=12, batch_tokens=131072, max_iters=800, eval_interval=400, sample_tokens=0)           # batches of 131k tokens: about one epoch
half = {"cpu": dict(max_iters=496), "gpu": dict(max_iters=400)}
tuned = {                                                       # close to the best of which_rates.py, or less where a whole run asks for less
    "LIMe": dict(muon_lr=0.02, learning_rate=27e-3, router_lr=1e-2 / 27e-3), "UltraMemV2": dict(muon_lr=0.02, learning_rate=36e-4),
    "HierMem": dict(muon_lr=0.02, learning_rate=15e-3), "MIDUS base": dict(muon_lr=0.02, learning_rate=18e-3),
}
bank = dict(memory_lr=1 / 3)                                    # HierMem's memories: 5e-3, the recipe's rate
untuned = dict(optimizer="muon", schedule="wsd")                # at the recipe's rate: your own model, and MIDUS's second phase
muon = {"MoVE": {}} | {title: dict(untuned, cpu=keys) for title, keys in tuned.items()}
plain = {"MoVE": "move", "LIMe": "lime", "UltraMemV2": "ultramem", "HierMem": "hiermem"}
plain |= {path.stem[6:]: path.stem[6:] for path in sorted(run.ROOT.glob("model_*.py")) if path.stem[6:] not in (*plain.values(), "midus")}  # your own
variants = {}
for title, file in plain.items():
    keys = dict(model=file, **muon.get(title, untuned))
    variants |= {f"{title} dense": (dict(keys, dense=True), None), title: (keys | (bank if title == "HierMem" else {}), None)}
    variants[f"{title} dense x0.5"] = dict(keys, dense=True, **{scale: half[scale] | keys.get(scale, {}) for scale in half}), None, 1
midus, hiermem = dict(model="midus", init_from="@MIDUS base", phase="cpt", **untuned), dict(model="hiermem", **muon["HierMem"])
variants |= {
    "MIDUS base": (dict(model="midus", dense=True, **muon["MIDUS base"]), None),
    "MIDUS base continued": (dict(midus, upscale="base"), None),                         # both at the recipe's rate
    "MIDUS": (dict(midus, upscale="midus"), None),
    "HierMem dense continued": (dict(hiermem, dense=True, init_from="@HierMem dense"), None),
    "HierMem post-hoc": (dict(hiermem, **bank, memory="ffn", frozen=True, init_from="@HierMem dense"), None),
}
baseline = {title: f"{title} dense" for title in plain} | {f"{title} dense x0.5": f"{title} dense" for title in plain}
baseline |= {"MIDUS": "MIDUS base continued", "MIDUS base continued": "MIDUS base", "HierMem post-hoc": "HierMem dense continued",
             "HierMem dense continued": "HierMem dense"}
memories = (*plain, "MIDUS", "HierMem post-hoc")
claims = [f"{baseline[title]} > {title}" for title in memories]


# ---------------------------------------------------------------- python experiments/which_memory.py [cpu|gpu]: costs, table and pictures

def costs(rows, scale, folder):
    """Ratios to the baseline for each memory: a training step and decoding one sequence by turns on this machine, peak memory of the runs."""
    found, device = {}, "cuda" if torch.cuda.is_available() else "cpu"
    for title in [title for title in memories if 0 in rows[title]]:
        keys = rows[title][0]["overrides"] | dict(bench=True, dataset=folder)
        out = f"out/which_memory-{scale}"
        if "init_from" in keys:
            keys["init_from"] = f"{out}/{run.slug(keys['init_from'])}/s0/ckpt.pt"
        steps = []
        for _ in range(5):                                     # medians of 12 steps each; a busy host moves one of them by a tenth
            shown = subprocess.run([sys.executable, "train.py", *(f"--{k}={v}" for k, v in keys.items())], cwd=run.ROOT, capture_output=True, text=True)
            if not (step := re.search(r"^model .* (\S+) of dense", shown.stdout, re.M)):
                sys.exit(f"train.py --bench failed for {title}:\n{shown.stdout[-500:]}{shown.stderr[-1500:]}")
            steps.append(float(step[1]))
        models = [sample.load_model(run.ROOT / out / run.slug(name) / "s0", device)[0] for name in (title, baseline[title])]
        times = [[], []]
        for turn in range(2 * 8):                              # the first of each is to warm up
            idx, start = torch.zeros(1, 128, dtype=torch.long, device=device), time.perf_counter()
            for token in sample.generate(models[turn % 2], idx, 64, temperature=0):
                int(token)                                     # waits for a GPU
            times[turn % 2].append(time.perf_counter() - start)
        memory = [a["peak_memory_mb"] / rows[baseline[title]][seed]["peak_memory_mb"] for seed, a in rows[title].items()]
        found[title] = dict(step=median(steps), steps=steps, decode=median(times[1][1:]) / median(times[0][1:]), memory=mean(memory))
        print(title, found[title], flush=True)
    return {"machine": f"{rows['MoVE'][0]['device']}, {torch.get_num_threads()} threads, torch {torch.__version__}", "ratios": found}


def more_steps(rows, title, ratio):
    """What the baseline would gain in bits per byte if it had `ratio` times the time: as much per doubling of its tokens as it gained by the last one.
    Curves flatten: this flatters a baseline with more time, and is unkind to one with less. Of a continued baseline the second phase alone is scaled."""
    again = "continued" in baseline[title]
    before = baseline[baseline[title]] if again else f"{baseline[title]} x0.5"
    return math.log2((1 + ratio) / 2 if again else ratio) * mean(run.differences(metric, rows, before, baseline[title]))


def table(rows, measured):
    lines = ["| memory | parameters | step time | memory in training | decoding | bpb of its baseline | gain, equal tokens | gain, equal time | verdict | seeds |",
             "| --- " * 10 + "|"]
    for title, ratios in measured["ratios"].items():
        base, gain = baseline[title], run.differences(metric, rows, baseline[title], title)
        added = rows[title][0]["params"]["total"] - rows[base][0]["params"]["total"]
        verdict = run.verdict(gain).replace("holds", "worth it").replace("reversed", "worse")
        in_time = mean(gain) - more_steps(rows, title, ratios["step"])
        if verdict == "worth it" and len(gain) > 1 and abs(in_time) <= run.noise(gain):
            verdict = "better; at equal time inside noise"
        elif verdict == "worth it" and in_time < 0:
            verdict = "better; not at equal time"
        elif verdict == "worse" and in_time >= -run.noise(gain):
            verdict = "worse; not at equal time"
        elif verdict == "inside noise" and in_time < -run.noise(gain):
            verdict = "inside noise; at equal time worse"
        lines.append(f"| {title} | {added:+,} | {ratios['step']:.2f}x | {ratios['memory']:.2f}x | {ratios['decode']:.2f}x | "
                     f"{run.text([row[metric] for row in rows[base].values()])} | {run.text(gain, '+')} | {in_time:+.4f} | {verdict} | {len(gain)} |")
    lines += ["", "| recall by mentions | " + " | ".join(map(str, MENTIONS)) + " |", "| --- " * (len(MENTIONS) + 1) + "|"]
    for name in dict.fromkeys(name for title in measured["ratios"] for name in (baseline[title], title)):
        lines.append(f"| {name} | " + " | ".join(run.text([row[f'recall_{m}'] for row in rows[name].values()]).replace("0.", ".") for m in MENTIONS) + " |")
    return "\n".join(lines) + f"\n\nTimes: {measured['machine']}, by turns; decoding in tokens/s. Guessing recalls .125.\n"


def pictures(rows, measured, stem):
    from matplotlib.figure import Figure
    figure = Figure(figsize=(6.5, 4), layout="constrained")
    axes = figure.subplots()
    for n, (title, ratios) in enumerate(measured["ratios"].items()):
        gain = run.differences(metric, rows, baseline[title], title)
        axes.errorbar(ratios["step"], mean(gain), yerr=run.noise(gain) if len(gain) > 1 else None, fmt="o", capsize=4, color=f"C{n}", label=title)
        axes.plot(ratios["step"], mean(gain) - more_steps(rows, title, ratios["step"]), "v", mfc="none", color=f"C{n}")
    axes.plot([], [], "v", mfc="none", color="grey", label="at equal time")
    axes.axhline(0, color="grey", linewidth=1)
    axes.set(xlabel="time of a training step, x its baseline's", ylabel="gain in bits per byte", title="Which memory is worth its cost?")
    axes.legend()
    figure.savefig(f"{stem}-gain.png", dpi=120)
    figure = Figure(figsize=(11, 2.8), layout="constrained")
    for n, (panel, title) in enumerate(zip(figure.subplots(1, len(measured["ratios"]), sharey=True), measured["ratios"])):
        for name, style, color in ((baseline[title], "o--", "grey"), (title, "o-", f"C{n}")):
            recalled = [[row[f"recall_{m}"] for row in rows[name].values()] for m in MENTIONS]
            panel.errorbar(MENTIONS, list(map(mean, recalled)), yerr=[stdev(r) if len(r) > 1 else 0 for r in recalled], fmt=style, capsize=3, color=color,
                           label="its baseline" if style == "o--" else title)
        panel.axhline(1 / 8, color="lightgrey", linewidth=1)
        panel.set(xscale="log", xticks=MENTIONS, xticklabels=MENTIONS, title=title, xlabel="mentions", **{"ylabel": "facts recalled"} if n == 0 else {})
        panel.minorticks_off()
        panel.legend(fontsize=8)
    figure.savefig(f"{stem}-recall.png", dpi=120)


def main(scale="cpu"):
    stem, rows = run.ROOT / "experiments" / "results" / f"which_memory-{scale}", run.results_of(__file__, scale)
    file, first = Path(f"{stem}-cost.json"), run.ROOT / f"out/which_memory-{scale}/move/s0/result.json"
    if not file.exists():
        if not first.exists():
            raise run.ConfigError(f"the costs are measured where the runs were made: {first.relative_to(run.ROOT)} is not here")
        file.write_text(json.dumps(costs(rows, scale, json.loads(first.read_text())["config"]["dataset"]), indent=1))
    measured = json.loads(file.read_text())
    Path(f"{stem}-summary.md").write_text(table(rows, measured))
    pictures(rows, measured, stem)
    print(table(rows, measured))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except run.ConfigError as error:
        sys.exit(f"error: {error}")
