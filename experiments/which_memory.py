"""Which memory is worth its cost, as the text grows? Each architecture against its own plain
baseline: same data, tokens and shape, paired seeds.

The text has invented facts in it, each mentioned 1 to 100 times (experiments/tasks.py facts), and a
run goes over it once, so that one run gives both the bits per byte and what was remembered. MIDUS
and the post-hoc bank start from the trained baseline and are compared with going on with the
baseline over the same text. "longer", on a CPU, is a baseline that has as much time as its memory:
so many more steps (`times`), over the same text again. Scale cpu has 1M tokens, cpu_4M and cpu_16M
have more. All train their matrices with Muon. On a CPU each variant has the best rates of
which_rates.py and which_started_rates.py, and where only its baseline's were swept, that one's;
MoVE a tenth of its recipe's weight decay (no other's was swept) and from 3.9M tokens on a third of
its bank's rate ("bank x1": the whole). With 15.7M tokens only LIMe's and its baseline's were swept
again; LIMe's is lower ("rate x3": that of 3.9M). A model of your own has its recipe's rates.

A model of your own, model_mine.py, has a row, too: on this text by `--only=mine --seeds=1`, on one
that every machine has by mine.py. After the runs the times of decoding, and of a step where `times`
has none, are measured on the machine at hand, which has to be quiet; the table and picture of all
lengths, a CPU's and a GPU's apart, come last.
"""
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, median, variance

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import sample
from experiments import run, tasks
from experiments.tasks import MENTIONS, commonest_recall, plot_recall
from prepare_fineweb import guard, need, reading

model = "move"
metric = "val_bpb"
seeds = 3
facts = "experiments/tasks.py facts --clusters=8,8"
prepare = dict(
    cpu=f"{facts} --text_chars=3100000 --out=data/facts_1M",
    cpu_4M=f"{facts} --text_chars=14500000 --out=data/facts_4M",
    cpu_16M=f"{facts} --text_chars=60000000 --out=data/facts_16M",
    gpu="experiments/tasks.py facts --clusters=16,16 --text_chars=400000000 --per_bucket=208 "
        "--vocab_size=16384 --out=data/facts_gpu")
shape = dict(depth=4, n_embd=128, batch_tokens=4096, eval_tokens=131072, sample_tokens=0)
cpu = dict(shape, max_iters=240, eval_interval=60)              # one epoch
cpu_4M = dict(shape, max_iters=960, eval_interval=240)
cpu_16M = dict(shape, max_iters=3840, eval_interval=480)
gpu = dict(depth=12, batch_tokens=131072, max_iters=800, eval_interval=100, sample_tokens=0)
lengths = dict(cpu=cpu, cpu_4M=cpu_4M, cpu_16M=cpu_16M, gpu=gpu)
untuned = dict(optimizer="muon", schedule="wsd")                # at the recipe's other rates
tuned = {                       # on a CPU: the best of which_rates.py
    "MoVE": dict(learning_rate=0.04, weight_decay=0.02),
    "LIMe": dict(learning_rate=81e-3, router_lr=1e-2 / 81e-3),
    "UltraMemV2": dict(learning_rate=36e-4),
    "HierMem dense": dict(learning_rate=45e-3),
    "HierMem": dict(learning_rate=45e-3, memory_lr=1 / 9),
    "MIDUS base": dict(learning_rate=162e-3),
    "MIDUS base continued": dict(learning_rate=135e-4),
    "MIDUS": dict(learning_rate=18e-3),
    "HierMem dense continued": dict(learning_rate=15e-3),
    "HierMem post-hoc": dict(learning_rate=15e-3, memory_lr=1 / 3),
}
tuned_4M = {                    # from 3.9M tokens on; who is not here keeps those of 1M
    "MoVE dense": dict(learning_rate=0.02),
    "MoVE": dict(learning_rate=0.02, memory_lr=1 / 3),
    "LIMe dense": dict(learning_rate=9e-3),
    "LIMe": dict(learning_rate=27e-3, router_lr=1e-2 / 27e-3),
    "UltraMemV2": dict(learning_rate=12e-4),
    "HierMem dense": dict(learning_rate=15e-3),
    "HierMem": dict(learning_rate=15e-3, memory_lr=1 / 9),
    "MIDUS base": dict(learning_rate=6e-3),                     # these by which_started_rates.py
    "MIDUS base continued": dict(learning_rate=45e-4),
    "MIDUS": dict(learning_rate=6e-3),
    "HierMem dense continued": dict(learning_rate=5e-3),
}
tuned_16M = {                   # with 15.7M; who is not here keeps those of 3.9M, not swept again
    "LIMe": dict(learning_rate=9e-3, router_lr=1e-2 / 9e-3),
}
times_on = "one core of an AMD EPYC (step_time.py; before those of step_time-cpu.jsonl)"
times = {                       # a step of the memory there, its baseline's 1: step_time.py
    "MoVE": 1.10, "LIMe": 1.06, "UltraMemV2": 1.77, "HierMem": 1.10,
    "MIDUS": 1.02, "HierMem post-hoc": 0.76,
}
models = {"MoVE": "move", "LIMe": "lime", "UltraMemV2": "ultramem", "HierMem": "hiermem"}
for path in sorted(run.ROOT.glob("model_*.py")):                # and your own
    own = path.stem.removeprefix("model_")
    if own not in (*models.values(), "midus"):
        models[own] = own


def rates_of(title, rates):
    """A variant's rates; a baseline without its own has its memory's."""
    return rates.get(title, rates.get(title.removesuffix(" dense"), {}))


def keys_of(title, name):
    recipe = {} if name == "move" else untuned                  # MoVE's has Muon
    return dict(model=name, **recipe, cpu=rates_of(title, tuned), cpu_4M=rates_of(title, tuned_4M),
                cpu_16M=rates_of(title, {**tuned_4M, **tuned_16M}))


def longer(title):
    """At each scale of a CPU, the steps of a baseline that takes as much time as the memory."""
    return {scale: dict(max_iters=round(times[title] * keys["max_iters"]))
            for scale, keys in lengths.items() if scale != "gpu"}


variants = {}
baseline = {}
for title, name in models.items():
    dense = f"{title} dense"
    variants[dense] = (dict(keys_of(dense, name), dense=True), None)
    variants[title] = (keys_of(title, name), None)
    baseline[title] = dense
whole = {**tuned["MoVE"], **tuned_4M["MoVE dense"]}              # of the bank; with 1M it is MoVE's
only_longer = dict(cpu=None, cpu_4M=whole, cpu_16M=whole, gpu=None)
variants["MoVE bank x1"] = (dict(keys_of("MoVE dense", "move"), **only_longer), None)
baseline["MoVE bank x1"] = "MoVE dense"
only_16M = dict(cpu=None, cpu_4M=None, cpu_16M=tuned_4M["LIMe"], gpu=None)
variants["LIMe rate x3"] = (dict(keys_of("LIMe", "lime"), **only_16M), None)
baseline["LIMe rate x3"] = "LIMe dense"
started = {
    "MIDUS base": dict(dense=True),
    "MIDUS base continued": dict(init_from="@MIDUS base", phase="cpt", upscale="base"),
    "MIDUS": dict(init_from="@MIDUS base", phase="cpt", upscale="midus"),
    "HierMem dense continued": dict(init_from="@HierMem dense", dense=True),
    "HierMem post-hoc": dict(init_from="@HierMem dense", memory="ffn", frozen=True),
}
for title, keys in started.items():
    name = "midus" if title.startswith("MIDUS") else "hiermem"
    variants[title] = (dict(keys_of(title, name), **keys), None)
baseline.update({
    "MIDUS": "MIDUS base continued", "MIDUS base continued": "MIDUS base",
    "HierMem post-hoc": "HierMem dense continued", "HierMem dense continued": "HierMem dense",
})
memories = (*models, "MIDUS", "HierMem post-hoc")
claims = [f"{baseline[title]} > {title}" for title in (*memories, "MoVE bank x1", "LIMe rate x3")]
for title in times:
    keys = variants[baseline[title]][0]
    scales = {scale: {**keys.get(scale, {}), **more} for scale, more in longer(title).items()}
    variants[f"{baseline[title]} longer"] = ({**keys, **scales, "gpu": None}, None)
    claims.append(f"{baseline[title]} longer > {title}")


# ---------------------------------------------------------------- costs, tables and pictures

def folder_of(title, scale):
    return run.ROOT / f"out/which_memory-{scale}" / run.slug(title) / "s0"


def has_checkpoints(title, scale):
    names = (title, baseline[title])
    return all((folder_of(name, scale) / "ckpt.pt").exists() for name in names)


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
    """Time of a prompt of 128 and 64 tokens after it, the making of the cache included, in units of
    the baseline's, measured by turns."""
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


def costs(rows, scale, titles, ratios):
    """Adds to the ratios those of the titles, in units of their baselines', and where each was
    measured: the time of a training step, and of decoding, for which both checkpoints must be
    here."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    here = f"{run.machine(device)}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    for title in titles:
        on_cpu = device == "cpu" and scale.startswith("cpu")
        step = times.get(title) if on_cpu else None
        cost = dict(step=step, step_on=times_on, decode=None, decode_on=None,
                    source_hash=rows[title][0].get("source_hash"))
        if has_checkpoints(title, scale):
            result = json.loads((folder_of(title, scale) / "result.json").read_text())
            keys = dict(rows[title][0]["overrides"], dataset=result["config"]["dataset"])
            if not step:
                cost.update(step=step_ratio(title, scale, keys), step_on=here)
            cost.update(decode=decode_ratio(title, scale, device), decode_on=here)
        if cost["decode"] or cost["step"] and title not in ratios:
            ratios[title] = cost
            print(title, cost, flush=True)


def is_measured(row, cost):
    """Whether these costs are of the code that made the row: model_mine.py changes. Older ones do
    not say."""
    theirs = row.get("source_hash")
    return cost.get("decode") and cost.get("source_hash", theirs) == theirs


def places(measured, key):
    """Where the costs of a table were measured."""
    found = [cost[key] for cost in measured["ratios"].values() if cost[key]]
    return "; ".join(dict.fromkeys(found)) or "-"


def has_facts(rows):
    return "recall_1" in first_row(rows)


def first_row(rows):
    """One of the memories' rows."""
    return next(row for title in memories for row in rows[title].values())


def gains(rows, title):
    """The gain of each seed in bits per byte, at equal tokens and at equal time."""
    base = baseline[title]
    gain = run.differences(metric, rows, base, title)
    in_time = f"{base} longer"
    if in_time not in rows:
        return gain, []
    return gain, run.differences(metric, rows, in_time, title)


def prior_of(scale):
    """{mentions: share of the scale's facts recalled by always saying the commonest material}"""
    own = re.search(r"--per_bucket=(\S+)", prepare[scale])
    return commonest_recall(own[1] if own else tasks.per_bucket, tasks.seed)


def table(rows, measured, scale):
    """The table of one length."""
    lines = run.heading(["memory", "parameters", "step time", "memory in training",
                         "decoding time", "bpb of its baseline", "gain, equal tokens", "verdict",
                         "gain, equal time", "verdict", "seeds"])
    for title, cost in measured["ratios"].items():
        base = rows[baseline[title]]
        gain, in_time = gains(rows, title)
        added = rows[title][0]["params"]["total"] - base[0]["params"]["total"]
        decode = f"{cost['decode']:.2f}x" if cost["decode"] else "-"
        peaks = [row["peak_memory_mb"] / base[seed]["peak_memory_mb"]
                 for seed, row in rows[title].items()
                 if seed in base and row.get("device") == base[seed].get("device")]
        memory = f"{mean(peaks):.2f}x" if peaks else "-"
        lines.append(run.line([
            title, f"{added:+,}", f"{cost['step']:.2f}x", memory,
            decode, run.text([row[metric] for row in base.values()]),
            run.text(gain, "+"), run.verdict(gain), run.text(in_time, "+"), run.verdict(in_time),
            str(len(gain))]))
    lines += ["", f"Times are by turns: of a step, {places(measured, 'step_on')}; of decoding, "
                  f"{places(measured, 'decode_on')}. Memory: peaks of the runs."]
    if not has_facts(rows):
        return "\n".join(lines) + "\n"
    lines += ["", *run.heading(["recall by mentions", *map(str, MENTIONS)])]
    for title in measured["ratios"]:
        for name in (baseline[title], title):
            recalled = []
            for m in MENTIONS:
                recalled.append(run.text([row[f"recall_{m}"] for row in rows[name].values()]))
            lines.append(run.line([name, *recalled]))
    shares = [f"{share:.2f}" for share in prior_of(scale).values()]
    lines += ["", "Guessing recalls 0.125; always saying a domain's commonest material "
                  f"{', '.join(shares)}."]
    return "\n".join(lines) + "\n"


def growth(found):
    """{scale: rows} -> the table of gains at equal tokens by length, and of their change from the
    first length to the last."""
    lengths = [f"{tokens(rows):,}" for rows in found.values()]
    lines = run.heading(["gain in bits per byte", *lengths, "change", "bound", "as the text grows"])
    for title in memories:
        gain = [gains(rows, title)[0] for rows in found.values()]
        cells = [run.text(d, "+") for d in gain]
        lines.append(run.line([title, *cells, *change([d for d in gain if len(d) > 1])]))
    texts = [first_row(rows)["data_id"] for rows in found.values()]
    lines += ["", "Change: from the first length with two seeds to the last. Bound: one-sided 95%. "
              "Each length has a text and a tree of topics of its own, which the bound leaves out: "
              f"data_id {', '.join(texts)}."]
    return "\n".join(lines) + "\n"


def change(gain):
    """From the first to the last of these gains, each of two seeds or more: the difference of their
    means, what it must exceed, what the gain does. Two texts' seeds are no pairs: the bound is the
    one-sided 95% t of two samples, with the degrees of freedom of the smaller one."""
    if len(gain) < 2:
        return ["-", "-", "-"]
    first, last = gain[0], gain[-1]
    moved = mean(last) - mean(first)
    error = (variance(first) / len(first) + variance(last) / len(last)) ** 0.5
    fewest = min(len(first), len(last))
    bound = run.T95[min(fewest - 1, 9) - 1] * error
    word = "inside noise"
    if abs(moved) > bound:
        word = "grows" if moved > 0 else "shrinks"
    return [f"{moved:+.4f}", f"{bound:.4f}", word]


def tokens(rows):
    return first_row(rows)["tokens"]


def draw_growth(found, file):
    """Gain over tokens, a line a memory, with its one-sided 95% bound, which one seed has not."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    places = set()
    for n, title in enumerate(memories):
        points = []
        for rows in found.values():
            gain, _ = gains(rows, title)
            if len(gain) > 1:
                points.append((tokens(rows), mean(gain), run.noise(gain)))
        if points:
            x, y, bounds = zip(*points)
            axes.errorbar(x, y, yerr=bounds, fmt="o-", capsize=4, color=f"C{n}", label=title)
            places.update(x)
    axes.axhline(0, color="grey", linewidth=1)
    places = sorted(places)
    axes.set(xscale="log", xticks=places, xticklabels=[f"{n / 1e6:.1f}M" for n in places],
             xlabel="tokens of training", ylabel="gain in bits per byte",
             title="What a memory gains as the text grows")
    axes.minorticks_off()
    figure.legend(loc="outside center right")
    figure.savefig(file, dpi=120)


def draw_gains(rows, measured, file):
    """Gain at equal tokens and at equal time, by the time of a step."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(6.5, 4), layout="constrained")
    axes = figure.subplots()
    timed = False
    for n, (title, cost) in enumerate(measured["ratios"].items()):
        gain, in_time = gains(rows, title)
        bar = run.noise(gain) if len(gain) > 1 else None
        axes.errorbar(cost["step"], mean(gain), yerr=bar, fmt="o", capsize=4, color=f"C{n}",
                      label=title)
        if in_time:
            axes.plot(cost["step"], mean(in_time), "v", mfc="none", color=f"C{n}")
            timed = True
    if timed:
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


def finish(rows, scale):
    """After the runs: what has no costs yet is measured, then this length's table and pictures,
    and those of all lengths."""
    summarize(rows, scale)
    compare_lengths(scale.partition("_")[0])


def summarize(rows, scale):
    stem = run.ROOT / "experiments" / "results" / f"which_memory-{scale}"
    kind = scale.partition("_")[0]
    file = stem.with_name(f"which_memory-{kind}-cost.json")     # at any length
    with reading(file):
        known = json.loads(file.read_text())["ratios"] if file.exists() else {}
    ready = [title for title in memories if 0 in rows[title] and 0 in rows[baseline[title]]]
    missing = [title for title in ready if not is_measured(rows[title][0], known.get(title, {}))]
    if missing:
        costs(rows, scale, missing, known)
        file.write_text(json.dumps({"ratios": known}, indent=1))
    measured = {"ratios": {title: known[title] for title in ready if title in known}}
    if not measured["ratios"]:
        return print("no memory has a run beside its baseline's and a time: no table of costs")
    Path(f"{stem}-summary.md").write_text(table(rows, measured, scale), encoding="utf-8")
    draw_gains(rows, measured, f"{stem}-gain.png")
    if has_facts(rows):
        draw_recall(rows, measured, f"{stem}-recall.png")
    print(table(rows, measured, scale))


def compare_lengths(kind):
    found = {}
    for scale in lengths:
        rows = run.rows_of(__file__, scale) if scale.startswith(kind) else {}
        if any(rows.get(title) for title in memories):
            found[scale] = rows
    if not found:
        return
    stem = run.ROOT / "experiments" / "results" / f"which_memory-{kind}-growth"
    Path(f"{stem}.md").write_text(growth(found), encoding="utf-8")
    draw_growth(found, f"{stem}.png")
    print(growth(found))


if __name__ == "__main__":
    guard("which_memory.py")
    scale = run.scale_of("which_memory.py", sys.argv[1:], __doc__)
    finish(run.results_of(__file__, scale), scale)
