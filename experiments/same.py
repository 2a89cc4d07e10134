"""Does a model still train as it did at an older commit? Its memory and its baseline, by each of
its optimizers and Muon, and what starts from a trained baseline, for twelve steps in both trees:
every loss, to the last digit.

    python experiments/same.py --commit=1d5e793 --dataset=data/facts_1M   # a text with a tree

Where that is so, results/same.jsonl says it, and rows made by the older code stand in their tables
without a dagger. No other option is tried: if a change is about one, delete its rows.
"""
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product, repeat
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import sample
from experiments import run
from prepare_fineweb import configure, find_dataset, guard, help_text, load_meta, need

commit = ""             # the older one
dataset = ""            # data folder
models = "move,lime,ultramem,midus,hiermem"
_defaults = {"commit": commit, "dataset": dataset, "models": models}
STEPS = ["--depth=2", "--n_embd=64", "--batch_tokens=1024", "--max_iters=12", "--log_interval=1",
         "--eval_tokens=4096", "--sample_tokens=0", "--device=cpu"]
STARTS = {"midus": ["--upscale=midus", "--phase=cpt"], "hiermem": ["--memory=ffn"]}


def losses(tree, name, flags, folder):
    """Of twelve steps and the validations among them, by the code in a tree. The run goes into
    folder/name; "=@/" in its flags is that folder."""
    flags = [flag.replace("=@/", f"={folder}/") for flag in flags]
    command = [sys.executable, "train.py", *STEPS, *flags, f"--out_dir={folder}/{name}"]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}              # two runs at once do not wait
    done = subprocess.run(command, cwd=tree, env=one_thread, capture_output=True, text=True)
    need(done.returncode == 0, f"{' '.join(command)} failed in {tree}: {done.stderr[-1500:]}")
    log = Path(folder, name, "log.jsonl").read_text().splitlines()
    return [row.get("loss", row.get("val_loss")) for row in map(json.loads, log)]


def ways(model):
    """{name: flags} of every run of a model."""
    optimizers = {"muon", *sample.load_module(model).RECIPE}
    runs = {}
    for kind, optimizer in product(("baseline", "memory"), sorted(optimizers)):
        dense = kind == "baseline"
        runs[f"{kind}-{optimizer}"] = [f"--dense={dense}", f"--optimizer={optimizer}"]
    if model in STARTS:
        runs["start"] = [*STARTS[model], "--init_from=@/baseline-muon"]
    return runs


def main(argv):
    if {"-h", "--help"} & set(argv):
        return print(__doc__ + "\n" + help_text(Path(__file__).read_text("utf-8"), _defaults))
    overrides, others = configure(argv, _defaults)
    need(not others, f"what is {others[:1]}?")
    c = {**_defaults, **overrides}
    need(c["commit"], "--commit= says which older code")
    data = find_dataset(c["dataset"]).resolve()
    models = c["models"].split(",")
    has_tree = "clusters" in load_meta(data)
    need(has_tree or "hiermem" not in models, f"{data} has no tree, which hiermem fetches by: give "
         "a --dataset= with one, or --models= without hiermem")
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        done = run.git("worktree", "add", "--detach", str(tree), c["commit"])
        need(done.returncode == 0, f"commit={c['commit']}: {done.stderr}")
        try:
            changed = 0
            for model in models:
                changed += not compare(model, tree, f"--dataset={data}")
        finally:
            run.git("worktree", "remove", "--force", str(tree))
    return int(changed > 0)


def compare(model, tree, data):
    """Whether a model trains alike in the older tree; a line of same.jsonl if it does."""
    old = run.source_hash(model, tree)
    new = run.source_hash(model)
    if old == new:
        print(f"{model}: the code is the same")
        return True
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        folders = (f"{folder}/before", f"{folder}/after")
        for name, flags in ways(model).items():
            flags = [f"--model={model}", data, *flags]
            before, after = pool.map(losses, (tree, run.ROOT), repeat(name), repeat(flags), folders)
            if before != after:
                print(f"{model}: {' '.join(flags)} has other losses: {before}, {after}")
                return False
    row = dict(model=model, old=old, new=new, commit=run.commit(), losses=len(after))
    run.add_line(run.ROOT / "experiments/results/same.jsonl", row)
    print(f"{model}: {old} and {new} train alike")
    return True


if __name__ == "__main__":
    guard("same.py")
    sys.exit(main(sys.argv[1:]))
