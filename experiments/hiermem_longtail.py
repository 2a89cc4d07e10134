"""Hierarchical memories, Figure 1: what is rarely said is remembered in blocks that only its own
topic trains.

Invented facts, the more of them the rarer they are said (experiments/tasks.py facts; the answer is
one of 8), in text that a run sees once. Three seeds find a gain of 2.5 points over guessing, among
the facts said once, in nine cases of ten. Three models from scratch: the plain anchor, a plain
model as large as anchor and fetched memories are at run time (a wider FFN), the anchor with a bank.
And as in the paper, whose figure shows rows A2, B2 and C2, a trained anchor that goes on with a
bank, beside one that goes on without: these two have seen every mention twice. Generic blocks take
1 of 17 sequences, as in the paper: with two nodes at the first level the rule would be 1 of 3. At
scale cpu the first level of the tree is to part the facts from the prose, and the second has a leaf
for each of their 16 domains. The rates are those that hiermem_rates.py found for a model of 7
layers. A bank from scratch learns at its anchor's rate, for one seed also at a third of it and at
three times.

`python experiments/hiermem_longtail.py` then asks the models with a bank again, with the generic
blocks and with none, which they were never trained for, reports how many prompts take their
domain's path, and draws the picture.
"""
import sys
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments import run
from experiments.tasks import MENTIONS, commonest_recall, plot_recall, read_jsonl, recall
from prepare_fineweb import guard, load_meta, need

model = "hiermem"
metric = "recall"
seeds = 3
prepare = dict(
    cpu="experiments/tasks.py facts --clusters=2,16 --text_chars=28500000 "
        "--per_bucket=3328,1664,832,208,48 --out=data/longtail_cpu",
    gpu="experiments/tasks.py facts --clusters=16,16 --text_chars=400000000 "
        "--per_bucket=3328,1664,832,208,48 --vocab_size=16384 --out=data/longtail_gpu")
cpu = dict(depth=4, n_embd=128, batch_tokens=4096, max_iters=2000, eval_interval=500,
           eval_tokens=131072, sample_tokens=0, warmup=0.1,     # 8.2M tokens, one epoch
           learning_rate=1e-2)
gpu = dict(depth=12, batch_tokens=131072, max_iters=800, eval_interval=100, sample_tokens=0,
           warmup=0.125)
bank = dict(memory="ffn", generic=1 / 17, cpu=dict(ranks="24,64"), gpu=dict(ranks="128,320"))
later = dict(init_from="@anchor", weight_decay=1e-3,            # A.2
             cpu=dict(learning_rate=5e-3), gpu=dict(learning_rate=1e-4, min_lr=1e-5))
co_trained = dict(later, memory="ffn", generic=1 / 17,
                  cpu=dict(later["cpu"], ranks="24,64", memory_lr=2.0),
                  gpu=dict(later["gpu"], ranks="128,320"))
variants = {                                                    # a fetch of 9 to 10%
    "anchor": (dict(dense=True), None),
    "wider": (dict(dense=True, cpu=dict(n_inner=600), gpu=dict(n_inner=3520)), None),
    "memories": (bank, None),
    "anchor continued": (dict(later, dense=True), None),
    "co-trained": (co_trained, None),
    "memories bank 1/3": (dict(bank, memory_lr=1 / 3), None, 1),
    "memories bank x3": (dict(bank, memory_lr=3.0), None, 1),
}
baseline = {"wider": "anchor", "memories": "anchor", "co-trained": "anchor continued",
            "memories bank 1/3": "anchor", "memories bank x3": "anchor"}
also = ("val_bpb", *(f"recall_{m}" for m in MENTIONS))
claims = []
for column in ("", "recall_1: ", "recall_3: ", "recall_10: "):
    claims.append(f"{column}memories > anchor")
    claims.append(f"{column}co-trained > anchor continued")
claims += ["memories > wider", "memories bank 1/3 > memories", "memories bank x3 > memories"]
WITH_BANK = ("memories", "co-trained")


def ask_again(rows, scale):
    """({"NAME, generic", "NAME, none": {seed: recall}}, the data folder) of the banks' models."""
    import torch

    import sample
    found = {}
    folder = None
    for name in WITH_BANK:
        for seed in rows[name]:
            out = run.ROOT / f"out/hiermem_longtail-{scale}/{run.slug(name)}/s{seed}"
            net, _, ckpt = sample.load_model(out, "cpu")
            folder = run.ROOT / ckpt["config"]["dataset"]
            for blocks, leaf in (("generic", -1), ("none", None)):
                by_seed = found.setdefault(f"{name}, {blocks}", {})
                half = ckpt["config"]["dtype"] == "bfloat16"   # as the row's own recall
                with torch.autocast("cpu", torch.bfloat16, enabled=half):
                    by_seed[seed] = recall(net, folder, leaf)
    need(folder, "no model with a bank has run yet")
    return found, folder


def recall_table(found, asked, prior):
    """Markdown: recall by mentions, and of who always says a domain's commonest material; claims;
    how many prompts take their domain's path."""
    lines = run.heading(["recall by mentions", *map(str, MENTIONS), "all", "seeds"])
    for form, title in (("recall", "a form of the text"), ("new", "a new form")):
        for name, rows in found.items():
            values = [[row[f"{form}_{m}"] for row in rows.values()] for m in MENTIONS]
            every = [mean(seed) for seed in zip(*values)]
            cells = [run.text(column) for column in (*values, every)]
            lines.append(run.line([f"{name}, {title}", *cells, str(len(rows))]))
    shares = [f"{share:.4f}" for share in (*prior.values(), mean(prior.values()))]
    lines.append(run.line(["always a domain's commonest material", *shares, "-"]))
    lines += ["", *run.heading(run.CLAIM_HEAD)]
    for name in WITH_BANK:
        if f"{name}, generic" in found:
            gap = run.differences("recall", found, name, f"{name}, generic")
            lines.append(run.claim_line(f"{name} > {name}, generic", gap))
    old, new = (mean(all(row["agrees"]) for row in asked if row["new"] == form)
                for form in (False, True))
    lines += ["", f"Prompts on their domain's usual path: {old:.0%} in a form of the text, "
                  f"{new:.0%} in a new form (the design asks for 90%)."]
    return "\n".join(lines) + "\n"


def picture(found, file):
    from matplotlib.figure import Figure
    figure = Figure(figsize=(11, 3.5), layout="constrained")
    forms = {"recall": "a form of the text", "new": "a new form"}
    styles = {"": "o-", "generic": "s--", "none": "^:"}
    for axes, (form, title) in zip(figure.subplots(1, 2, sharey=True), forms.items()):
        for name, rows in found.items():
            base, _, blocks = name.partition(", ")
            plot_recall(axes, rows.values(), form, label=name, fmt=styles[blocks],
                        color=f"C{list(variants).index(base)}")
        axes.axhline(1 / 8, color="lightgrey", linewidth=1)
        axes.set(title=f"asked in {title}", ylabel="facts recalled")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.savefig(file, dpi=120)


def main(scale):
    rows = run.results_of(__file__, scale)
    again, folder = ask_again(rows, scale)
    found = {name: by_seed for name, by_seed in rows.items() if by_seed} | again
    task = load_meta(folder)["task"]
    prior = commonest_recall(task["per_bucket"], task["seed"])
    table = recall_table(found, read_jsonl(folder / "facts.jsonl"), prior)
    stem = run.ROOT / "experiments" / "results" / f"hiermem_longtail-{scale}"
    Path(f"{stem}-recall.md").write_text(table, encoding="utf-8")
    picture(found, f"{stem}-recall.png")
    print(table)


if __name__ == "__main__":
    guard("hiermem_longtail.py")
    main(run.scale_of("hiermem_longtail.py", sys.argv[1:], __doc__))
