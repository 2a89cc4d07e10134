"""Hierarchical memories, Figure 1: what is rarely said is remembered in blocks that only its own topic trains.

Invented facts, 208 for each number of mentions (experiments/tasks.py facts; the answer is one of 8), in text that a run sees once. Three from scratch,
with Muon as in which_memory.py: the plain anchor, a plain model as large as anchor and fetched memories are at run time (a wider FFN), the anchor with
a bank. And as in the paper, whose figure shows rows A2, B2 and C2, a trained anchor that goes on with a bank, beside one that goes on without: these two
have seen every mention twice. Generic blocks take 1 of 17 sequences, as in the paper: with two nodes at the first level the rule would be 1 of 3. Topics are
not rare here, a third of the text is facts: mentions are. At scale cpu the first level of the tree parts the facts from the prose, and the second has a
leaf for each of their 16 domains. `python experiments/hiermem_longtail.py` then asks the models with a bank again, with the generic blocks
and with none, which they were never trained for, reports how many prompts take their domain's path, and draws the picture."""
import json
import sys
from pathlib import Path
from statistics import mean, stdev

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments import run
from experiments.tasks import MENTIONS

model, metric, seeds = "hiermem", "recall", 3
prepare = dict(cpu="experiments/tasks.py facts --clusters=2,16 --text_chars=3200000 --per_bucket=208 --out=data/longtail_cpu",
               gpu="experiments/tasks.py facts --clusters=16,16 --text_chars=400000000 --per_bucket=208 --vocab_size=16384 --out=data/longtail_gpu")
cpu = dict(depth=4, n_embd=128, batch_size=4, batch_tokens=1024, max_iters=1376, eval_interval=344, eval_tokens=109568, sample_tokens=0,
           optimizer="muon", schedule="wsd", learning_rate=15e-3)               # 1.4M tokens, one epoch
gpu = dict(depth=12, batch_tokens=131072, max_iters=800, eval_interval=400, sample_tokens=0, optimizer="muon", schedule="wsd")
bank = dict(memory="ffn", generic=1 / 17, cpu=dict(ranks="24,64", memory_lr=1 / 3), gpu=dict(ranks="128,320"))       # a fetch of 9 to 10%
variants = {
    "anchor": (dict(dense=True), None),
    "wider": (dict(dense=True, cpu=dict(n_inner=600), gpu=dict(n_inner=3520)), None),
    "memories": (bank, None),
    "anchor continued": (dict(dense=True, init_from="@anchor"), None),
    "co-trained": (dict(bank, init_from="@anchor"), None),
}
baseline = {"wider": "anchor", "memories": "anchor", "co-trained": "anchor continued"}
also = ("val_bpb", *(f"recall_{m}" for m in MENTIONS))
claims = ["memories > anchor", "memories > wider", "co-trained > anchor continued"]


def main(scale="cpu"):
    """Table and picture of {name: {seed: its recall_N and new_N}}, from the results and the checkpoints with a bank."""
    import sample
    from matplotlib.figure import Figure
    from experiments.tasks import recall
    stem, found, folder = run.ROOT / "experiments" / "results" / f"hiermem_longtail-{scale}", {}, None
    for name, rows in run.results_of(__file__, scale).items():
        found |= {name: rows} if rows else {}
        for seed in rows if "memory" in variants[name][0] else ():
            net, _, ckpt = sample.load_model(run.ROOT / f"out/hiermem_longtail-{scale}/{run.slug(name)}/s{seed}", "cpu")
            folder = run.ROOT / ckpt["config"]["dataset"]
            for blocks, leaf in (("generic", -1), ("none", None)):
                found.setdefault(f"{name}, {blocks}", {})[seed] = recall(net, folder, leaf)
    if not folder:
        raise run.ConfigError("no model with a bank has run yet")
    asked = [json.loads(line) for line in (folder / "facts.jsonl").read_text().splitlines()]
    share = [mean(all(row["agrees"]) for row in asked if row["new"] == new) for new in (False, True)]
    lines = [f"| recall by mentions | {' | '.join(map(str, MENTIONS))} | all | seeds |", "| --- " * (len(MENTIONS) + 3) + "|"]
    figure = Figure(figsize=(11, 3.5), layout="constrained")
    for axes, form, title in zip(figure.subplots(1, 2, sharey=True), ("recall", "new"), ("in a form of the text", "in a new form")):
        for name, rows in found.items():
            base, _, blocks = name.partition(", ")
            values = [[row[f"{form}_{m}"] for row in rows.values()] for m in MENTIONS]
            lines.append(f"| {name}, {title} | " + " | ".join(map(run.text, [*values, list(map(mean, zip(*values)))])) + f" | {len(rows)} |")
            axes.errorbar(MENTIONS, list(map(mean, values)), yerr=[stdev(v) if len(v) > 1 else 0 for v in values], capsize=3, label=name,
                          fmt={"generic": "s--", "none": "^:"}.get(blocks, "o-"), color=f"C{list(variants).index(base)}")
        axes.axhline(1 / 8, color="lightgrey", linewidth=1)
        axes.set(xscale="log", xticks=MENTIONS, xticklabels=MENTIONS, title=f"asked {title}", xlabel="mentions", ylabel="facts recalled")
        axes.minorticks_off()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.savefig(f"{stem}-recall.png", dpi=120)
    lines += ["", "| claim | difference | paper's | seeds | verdict |", "| --- " * 5 + "|"]
    for name in [name for name in found if f"{name}, generic" in found]:
        gap = [found[name][seed]["recall"] - found[f"{name}, generic"][seed]["recall"] for seed in found[name]]
        lines.append(f"| {name} > {name}, generic | {run.text(gap, '+')} | - | {len(gap)} | {run.verdict(gap)} |")
    lines.append(f"\nPrompts on their domain's usual path: {share[0]:.0%} in a form of the text, {share[1]:.0%} in a new form"
                 + " (the design asks for 90%)." * (min(share) < 0.9) + "." * (min(share) >= 0.9))
    Path(f"{stem}-recall.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except run.ConfigError as error:
        sys.exit(f"error: {error}")
