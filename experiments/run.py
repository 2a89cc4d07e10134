"""Run an experiment: every variant and seed through train.py, then a table, verdicts on the claims, and a plot.

    python train.py experiments/move_table1.py --scale=cpu --seeds=3      (or python experiments/run.py experiments/...)

Each run is a printed `python train.py --key=value` command in out/<experiment>-<scale>/<variant>/s<seed>. It is finished when
its result.json exists, so after an interruption the same command goes on. Seeds are the outer loop: a table that is cut short
is already paired. README.md beside this file tells how to read the tables and how verdicts are made.
"""
import ast
import hashlib
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from prepare_fineweb import ConfigError, configure, help_text

T95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)     # one-sided 95% quantiles of t, 1..9 degrees of freedom


@dataclass
class Options:
    scale: str = "cpu"          # cpu | gpu: which of the experiment's settings
    seeds: int = -1             # seeds per variant; -1: the experiment's number
    only: str = ""              # comma list of variants; "": all
    dataset: str = ""           # data folder; "": what the experiment's `prepare` makes
    jobs: int = 1               # runs at once; with more than one, each gets its share of the cores
    table_only: bool = False    # run nothing, make table and plot from the results there are
    out: str = "out"            # folder of the runs


@dataclass(eq=False)
class Run:
    variant: str
    seed: int
    folder: str                 # relative to ROOT
    flags: list                 # for train.py, without out_dir
    needs: str = ""             # folder of the run whose checkpoint it starts from


def source_hash(model):
    """First 8 hex of a hash over the syntax trees of model, kernels and trainer: comments, docstrings and layout do not count."""
    def strip(node):            # nested lists rather than ast.dump, whose text differs between Python versions
        if isinstance(node, list):
            return [strip(n) for n in node]
        if not isinstance(node, ast.AST):
            return repr(node)
        fields = dict(ast.iter_fields(node))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node, clean=False) is not None:
            fields["body"] = node.body[1:]
        return [type(node).__name__, *([k, strip(v)] for k, v in fields.items() if v is not None and v != [])]

    digest = hashlib.sha256()
    for file in (f"model_{model}.py", "kernels.py", "train.py"):
        digest.update(repr(strip(ast.parse((ROOT / file).read_text(encoding="utf-8")))).encode())
    return digest.hexdigest()[:8]


def load_experiment(path, scale):
    """The experiment file's namespace, checked; variants become {name: (overrides, paper's number or None, seeds)}."""
    if not Path(path).is_file():
        raise ConfigError(f"no experiment file {path}; there are: {', '.join(sorted(p.name for p in Path(__file__).parent.glob('*_*.py')))}")
    exp = runpy.run_path(str(path))
    missing = [k for k in ("model", "metric", "baseline", "seeds", "variants", scale) if k not in exp]
    if missing:
        raise ConfigError(f"{path} does not define {', '.join(missing)} (experiments/README.md shows a whole experiment file)")
    variants, slugs = {}, {}
    for name, value in exp["variants"].items():
        if not (isinstance(value, tuple) and 2 <= len(value) <= 3 and isinstance(value[0], dict)):
            raise ConfigError(f"{path}: variant {name!r} must be (dict of overrides, paper's number or None[, seeds]), not {value!r}")
        if (other := slugs.setdefault(slug(name), name)) != name or "," in name:
            raise ConfigError(f"{path}: variant {name!r} " + ("has a comma" if "," in name else f"would share {other!r}'s folder {slug(name)}"))
        variants[name] = (*value[:2], min((*value[2:], exp["seeds"])))
    named = [exp["baseline"]] + [n for claim in exp.get("claims", []) for n in split_claim(claim)]
    named += [o["init_from"][1:] for o, *_ in variants.values() if str(o.get("init_from", "")).startswith("@")]
    if unknown := [n for n in named if n not in variants]:
        raise ConfigError(f"{path}: baseline, claims or init_from name {unknown[0]!r}, which is no variant ({', '.join(variants)})")
    return {**exp, "variants": variants, "name": Path(path).stem, "claims": exp.get("claims", [])}


def slug(name):
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def split_claim(claim):
    return [name.strip() for name in claim.split(">")]


def prepared_data(exp, opt):
    """The data folder for train.py's --dataset; runs the experiment's `prepare` when it is not there yet."""
    prepare = exp.get("prepare", "")
    prepare = shlex.split(prepare[opt.scale] if isinstance(prepare, dict) else prepare)
    if opt.dataset or not prepare:
        return opt.dataset
    folder = next((a[6:] for a in prepare if a.startswith("--out=")), None)
    if folder is None:
        raise ConfigError(f"{exp['name']}: `prepare` must say --out=data/NAME, so that other settings do not share its folder")
    if not (ROOT / folder / "meta.json").is_file():
        print("$ python prepare_fineweb.py", *prepare, flush=True)
        if subprocess.run([sys.executable, "prepare_fineweb.py", *prepare], cwd=ROOT).returncode:
            raise ConfigError("the data could not be prepared (see above); --dataset=FOLDER runs the experiment on data that you have")
    return folder


def plan(exp, opt):
    """All runs, seed by seed."""
    only = [n.strip() for n in opt.only.split(",")] if opt.only else list(exp["variants"])
    if unknown := [n for n in only if n not in exp["variants"]]:
        raise ConfigError(f"--only={opt.only}: no variant {unknown[0]!r}; there are: {', '.join(exp['variants'])}")
    base = f"{opt.out}/{exp['name']}-{opt.scale}"
    runs = []
    for seed in range(opt.seeds if opt.seeds > 0 else exp["seeds"]):
        for name in only:
            overrides, _, seeds = exp["variants"][name]
            settings, needs = {"model": exp["model"], **exp[opt.scale], **overrides, "seed": seed}, ""
            if str(settings.get("init_from", "")).startswith("@"):
                needs = f"{base}/{slug(settings['init_from'][1:])}/s{seed}"
                settings["init_from"] = f"{needs}/ckpt.pt"
            if seed < seeds or seeds == exp["seeds"]:          # a variant's own smaller number of seeds stays
                runs.append(Run(name, seed, f"{base}/{slug(name)}/s{seed}", [f"--{k}={v}" for k, v in settings.items()], needs))
    return runs


def check_begun(run, dataset):
    """Add the data folder to the run's flags, and never go on with a run that was begun with other flags."""
    run.flags += [f"--dataset={dataset}"] if dataset else []
    memo, flags = ROOT / run.folder / "flags.txt", " ".join(run.flags)
    if memo.exists() and memo.read_text() != flags:
        raise ConfigError(f"{run.folder} was begun with other settings:\n  {memo.read_text()}\nand is now to be\n  {flags}\n"
                          "Remove that folder, or keep it and give another --out=FOLDER.")
    memo.parent.mkdir(parents=True, exist_ok=True)
    memo.write_text(flags)


def start(run, jobs):
    resume = (ROOT / run.folder / "ckpt.pt").exists()           # the checkpoint's own settings count then
    flags = [*(["--init_from=resume"] if resume else run.flags), f"--out_dir={run.folder}"]
    print("$ python train.py", *map(shlex.quote, flags), flush=True)
    env = {**os.environ, **({"OMP_NUM_THREADS": str(max(1, os.cpu_count() // jobs))} if jobs > 1 else {})}
    with open(ROOT / run.folder / "train.log", "a") as log:
        # a session of its own, so that Ctrl-C reaches the trainer once, from stop(), and not from the terminal as well
        return subprocess.Popen([sys.executable, "train.py", *flags], cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)


def stop(processes):
    """Let the trainers save their checkpoints and leave; whoever does not within two minutes is killed."""
    try:
        for p in processes:
            p.send_signal(signal.SIGINT)
        for p in processes:
            p.wait(120)
    finally:
        for p in processes:
            p.kill()


def run_all(runs, jobs, metric, finished):
    """Run what is not finished, `jobs` at once, calling finished() after each. Returns the runs that failed."""
    pending, running, failed = list(runs), {}, []
    try:
        while pending or running:
            busy = {r.folder for r in [*pending, *running]}
            run = next((r for r in pending if r.needs not in busy), None)
            if run and len(running) < jobs:
                pending.remove(run)
                if (ROOT / run.folder / "result.json").exists():
                    print(f"  {run.variant}, seed {run.seed}: finished earlier")
                elif run.needs and not (ROOT / run.needs / "ckpt.pt").exists():
                    failed.append(run)
                    print(f"  {run.variant}, seed {run.seed}: needs {run.needs}/ckpt.pt, which is not there")
                else:
                    running[run] = start(run, jobs), time.time()
                continue
            if not running:
                raise ConfigError(f"init_from goes round in a circle: {', '.join(r.variant for r in pending)}")
            time.sleep(0.1)
            for run, (process, began) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[run]
                file = ROOT / run.folder / "result.json"
                value = json.loads(file.read_text()).get(metric) if process.returncode == 0 and file.exists() else None
                left = f"{len(pending) + len(running)} to go"
                if value is None:
                    failed.append(run)
                    lines = (ROOT / run.folder / "train.log").read_text(errors="replace").splitlines()[-15:]
                    print(f"  {run.variant}, seed {run.seed}: failed with code {process.returncode} (no {metric}); {left}; {run.folder}/train.log ends:")
                    print(*("    | " + line for line in lines), sep="\n", flush=True)
                else:
                    print(f"  {run.variant}, seed {run.seed}: {metric} {value:.4f} in {time.time() - began:.0f} s, {left}", flush=True)
                    finished()
    finally:
        if running:
            print("\nstopping the trainers...", flush=True)
            stop([process for process, _ in running.values()])
    return failed


def collect(exp, runs, path):
    """Rows {(variant, seed): row} of the results file, brought up to date with the result.json files of `runs`."""
    rows = {}
    if path.exists():
        rows = {(r["variant"], r["seed"]): r for r in map(json.loads, path.read_text(encoding="utf-8").splitlines())}
    for run in runs:
        file = ROOT / run.folder / "result.json"
        if file.exists():
            result = {k: v for k, v in json.loads(file.read_text()).items() if k not in ("config", "model_config")}
            rows[run.variant, run.seed] = {"variant": run.variant, **result, "seed": run.seed, "overrides": exp["variants"][run.variant][0]}
    one_data(rows, path)
    if rows:
        write(path, "".join(json.dumps(row) + "\n" for row in rows.values()))
    return rows


def one_data(rows, path, data_id=None):
    ids = {row.get("data_id") for row in rows.values()} | ({data_id} if data_id else set())
    if len(ids) > 1:
        raise ConfigError(f"{path.name}: results on different data (data_id {', '.join(map(str, sorted(ids, key=str)))}) are never mixed. "
                          f"Move {path.relative_to(ROOT)} away, or give the --dataset= that its rows were made on.")


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def values_of(exp, rows):
    """{variant: {seed: metric}} of the runs there are."""
    return {name: {s: r[exp["metric"]] for (v, s), r in sorted(rows.items(), key=lambda i: i[0][1]) if v == name and r.get(exp["metric"]) is not None}
            for name in exp["variants"]}


def paired(a, b):
    """Differences of the seeds that both have."""
    return [a[s] - b[s] for s in a if s in b]


def half_width(d):
    """What the mean of the differences `d` must exceed: one-sided 95% t; three seeds: 1.69 standard deviations."""
    return T95[min(len(d) - 1, 9) - 1] * stdev(d) / len(d) ** 0.5


def verdict(d):
    """On a claim A > B with the differences d = A - B paired by seed."""
    if len(d) < 2:
        return f"sign {'agrees' if d[0] > 0 else 'differs'} (1 seed)" if d else "not run"
    return "holds" if mean(d) > half_width(d) else "reversed" if -mean(d) > half_width(d) else "inside noise"


def pm(values, form=".4f"):
    """Mean and standard deviation as text."""
    return (f"{mean(values):{form}}" + (f" ± {stdev(values):.4f}" if len(values) > 1 else "")) if values else "-"


def table(exp, opt, rows):
    """The results as markdown: one line per variant, one per claim."""
    values, paper, now = values_of(exp, rows), {n: v[1] for n, v in exp["variants"].items()}, source_hash(exp["model"])
    base = exp["baseline"]

    def paper_difference(a, b, form="+.4f"):
        return f"{paper[a] - paper[b]:{form}}" if None not in (paper[a], paper[b]) else "-"

    lines = [f"# {exp['name']}, scale {opt.scale}", "", (exp.get("__doc__") or "").strip(), ""]
    lines += [f"| variant | parameters | {exp['metric']} | against {base} | paper | paper's difference | step time | seeds |", "| --- " * 8 + "|"]
    for name in exp["variants"]:
        mine = {s: rows[name, s] for s in values[name]}
        pairs = [(r, rows[base, s]) for s, r in mine.items() if s in values[base]]
        pairs = [(a, b) for a, b in pairs if (a["device"], a["threads"]) == (b["device"], b["threads"])]
        added = f"{pairs[0][0]['params']['total'] - pairs[0][1]['params']['total']:+,}" if pairs else "-"
        if name == base and mine:
            added = f"{next(iter(mine.values()))['params']['total']:,}"
        stale = " †" if any(r["source_hash"] != now for r in mine.values()) else ""
        lines.append(f"| {name}{stale} | {added} | {pm(list(values[name].values()))} | {pm(paired(values[name], values[base]), '+.4f') if name != base else ''} "
                     f"| {'-' if paper[name] is None else paper[name]} | {paper_difference(name, base) if name != base else ''} "
                     f"| {format(mean(a['step_ms'] / b['step_ms'] for a, b in pairs), '.2f') + 'x' if pairs else '-'} | {len(mine)} |")
    if exp["claims"]:
        lines += ["", "| claim | difference | paper's | seeds | verdict |", "| --- " * 5 + "|"]
    for claim in exp["claims"]:
        names = split_claim(claim)
        for a, b in zip(names, names[1:]):
            d = paired(values[a], values[b])
            lines.append(f"| {a} > {b} | {pm(d, '+.4f')} | {paper_difference(a, b)} | {len(d)} | {verdict(d)} |")
    used = [rows[name, s] for name in values for s in values[name]]
    facts = {k: ", ".join(dict.fromkeys(str(r.get(k)) for r in used)) for k in ("data_id", "device", "threads", "torch", "commit", "tokens")}
    lines += ["", "Settings: " + " ".join(f"`{k}={v}`" for k, v in exp[opt.scale].items()) + ". " + "; ".join(f"{k} {v}" for k, v in facts.items()) + ".",
              "Means ± standard deviation over seeds; differences are paired by seed. " + ("† from older sources than the present ones." if any(" †" in x for x in lines) else "")]
    return "\n".join(lines).rstrip() + "\n"


def plot(exp, rows, path):
    """Differences to the baseline: single seeds, their mean with its 95% bar, and the paper's."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    values, base = values_of(exp, rows), exp["baseline"]
    names = [n for n in exp["variants"] if n != base]
    fig, ax = plt.subplots(figsize=(7, 1.2 + 0.45 * len(names)), layout="constrained")
    for y, name in enumerate(names):
        d = paired(values[name], values[base])
        ax.plot(d, [y] * len(d), ".", color="C0", alpha=0.4)
        if d:
            ax.errorbar(mean(d), y, xerr=half_width(d) if len(d) > 1 else None, fmt="o", color="C0", capsize=4)
        if None not in (here := (exp["variants"][name][1], exp["variants"][base][1])):
            ax.plot(here[0] - here[1], y + 0.22, "D", color="C1", markersize=5)
    ax.axvline(0, color="grey", linewidth=1)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set_xlabel(f"{exp['metric']} minus {base}'s")
    ax.plot([], [], "o", color="C0", label="here (mean, one-sided 95%)")
    ax.plot([], [], "D", color="C1", label="paper")
    ax.legend(fontsize=8)
    ax.set_title(f"{path.stem}", fontsize=10)
    fig.savefig(path, dpi=120)
    plt.close(fig)


def main(path, argv, dataset=""):
    """Run the experiment file `path` with the options `argv`. Returns the exit code: 0, 1 if a run failed, 130 after Ctrl-C."""
    if {"-h", "--help"} & set(argv):
        print(__doc__, help_text(Path(__file__).read_text(encoding="utf-8"), vars(Options())), sep="\n")
        return 0
    overrides, extra = configure(argv, vars(Options(dataset=dataset)))
    if extra:
        raise ConfigError(f"one experiment at a time, not also {' '.join(extra)}")
    opt = Options(**{"dataset": dataset, **overrides})
    if opt.scale not in ("cpu", "gpu"):
        raise ConfigError(f"scale must be cpu or gpu, not {opt.scale}")
    exp = load_experiment(path, opt.scale)
    runs, results = plan(exp, opt), ROOT / "experiments" / "results" / f"{Path(path).stem}-{opt.scale}.jsonl"

    def report():
        rows = collect(exp, runs, results)
        write(results.with_suffix(".md"), table(exp, opt, rows))
        return rows

    code = 0
    if not opt.table_only:
        dataset = prepared_data(exp, opt)
        meta = next((f for f in (ROOT / dataset / "meta.json", ROOT / "data" / dataset / "meta.json") if dataset and f.is_file()), None)
        one_data(collect(exp, runs, results), results, meta and json.loads(meta.read_text()).get("data_id"))
        for run in runs:
            check_begun(run, dataset)
        try:
            code = 1 if (failed := run_all(runs, opt.jobs, exp["metric"], report)) else 0
            print(*(f"failed: {r.variant}, seed {r.seed} ({r.folder}/train.log)" for r in failed), sep="\n", end="\n" if failed else "")
        except KeyboardInterrupt:
            print(f"interrupted; go on with: python train.py {shlex.join([str(path), *argv])}")
            code = 130
    rows = report()
    plot(exp, rows, results.with_suffix(".png"))
    print(results.with_suffix(".md").read_text(encoding="utf-8"))
    print(f"table, rows and plot: {results.with_suffix('').relative_to(ROOT)}.md .jsonl .png")
    return code


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python experiments/run.py experiments/NAME.py [--scale=cpu] [--seeds=3] ...   (--help after the name lists all)")
    try:
        sys.exit(main(sys.argv[1], sys.argv[2:]))
    except ConfigError as error:
        sys.exit(f"error: {error}")
