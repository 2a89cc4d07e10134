"""Hierarchical memories, Figure 1: what is rarely said is remembered in blocks that only its own topic trains.

Invented facts, 208 a number of mentions (experiments/tasks.py facts; guessing gets 1/8), in text that a run sees once. The plain anchor; a plain
model as large as anchor and fetched memories are at run time (a wider FFN); and the anchor with its bank, both from scratch, with Muon as in
which_memory.py. The first level of the tree parts the facts from the prose, the second has a leaf for each of their 16 domains: all prompts take
their domain's path, those in a new form too (preparing the data prints it). The paper's figure has the elements of the periodic table.
`python experiments/hiermem_longtail.py` then asks the models with a bank again, with the generic blocks and with none, and draws the picture."""
import json
import sys
from pathlib import Path
from statistics import mean, stdev

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments import run
from experiments.tasks import MENTIONS

model, metric, baseline, seeds = "hiermem", "recall", "anchor", 3
prepare = dict(cpu="experiments/tasks.py facts --clusters=2,16 --text_chars=3200000 --per_bucket=208 --out=data/longtail_cpu",
               gpu="experiments/tasks.py facts --clusters=16,16 --text_chars=400000000 --per_bucket=208 --vocab_size=16384 --out=data/longtail_gpu")
cpu = dict(depth=4, n_embd=128, batch_size=4, batch_tokens=1024, max_iters=1380, eval_interval=345, eval_tokens=109568, sample_tokens=0,
           optimizer="muon", schedule="wsd", learning_rate=15e-3)               # 1.4M tokens, one epoch
gpu = dict(depth=12, batch_tokens=131072, max_iters=800, eval_interval=400, sample_tokens=0, optimizer="muon", schedule="wsd")
variants = {
    "anchor": (dict(dense=True), None),
    "wider": (dict(dense=True, cpu=dict(n_inner=600), gpu=dict(n_inner=3344)), None),
    "memories": (dict(cpu=dict(ranks="24,64", memory_lr=1 / 3), gpu=dict(ranks="64,208")), None),
}
also = ("val_bpb", *(f"recall_{m}" for m in MENTIONS))
claims = ["memories > anchor", "memories > wider"]


def main(scale="cpu"):
    """Table and picture of {name: [a seed's recall_N and new_N]}, from the results and the checkpoints with a bank."""
    import sample
    from matplotlib.figure import Figure
    from experiments.tasks import recall
    stem, found = run.ROOT / "experiments" / "results" / f"hiermem_longtail-{scale}", {}
    for row in map(json.loads, Path(f"{stem}.jsonl").read_text().splitlines()):
        found.setdefault(row["variant"], []).append(row)
        if row["variant"] == "memories":
            folder = run.ROOT / f"out/hiermem_longtail-{scale}/memories/s{row['seed']}"
            net, _, ckpt = sample.load_model(folder, "cpu")
            for name, leaf in (("generic memories", -1), ("without its memories", None)):
                found.setdefault(name, []).append(recall(net, ckpt["config"]["dataset"], leaf))
    lines = [f"| recall by mentions | {' | '.join(map(str, MENTIONS))} | seeds |", "| --- " * (len(MENTIONS) + 2) + "|"]
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    for axes, form, title in zip(figure.subplots(1, 2, sharey=True), ("recall", "new"), ("in a form of the text", "in a new form")):
        for n, (name, rows) in enumerate(found.items()):
            values = [[row[f"{form}_{m}"] for row in rows] for m in MENTIONS]
            lines.append(f"| {name}, {title} | " + " | ".join(map(run.text, values)) + f" | {len(rows)} |")
            axes.errorbar(MENTIONS, list(map(mean, values)), yerr=[stdev(v) if len(v) > 1 else 0 for v in values], fmt="o-", capsize=3,
                          color=f"C{n}", label=name)
        axes.axhline(1 / 8, color="lightgrey", linewidth=1)
        axes.set(xscale="log", xticks=MENTIONS, xticklabels=MENTIONS, title=f"asked {title}", xlabel="mentions", ylabel="facts recalled")
        axes.minorticks_off()
    axes.legend(fontsize=8)
    figure.savefig(f"{stem}-recall.png", dpi=120)
    Path(f"{stem}-recall.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
