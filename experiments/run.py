"""Run an experiment: every variant and seed through train.py, then a table, verdicts on the claims, and a plot.

    python train.py experiments/move_table1.py --scale=cpu --seeds=3      (or python experiments/run.py experiments/...)
    python experiments/run.py claims                                      the table of all claims in README.md beside this file

Each run is a printed `python train.py --key=value` in out/<experiment>-<scale>/<variant>/s<seed>; it is finished when its
result.json exists, so the same command goes on after an interruption. Seeds are the outer loop: a table that is cut short is
already paired. README.md beside this file shows an experiment file and how to read the tables.
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

T95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)   # one-sided 95% quantiles of t, 1 to 9 degrees of freedom


@dataclass
class Options:
    scale: str = "cpu"          # cpu | gpu: which of the experiment's settings
    seeds: int = -1             # seeds per variant; -1: the experiment's number
    only: str = ""              # comma list of variants; "": all
    dataset: str = ""           # data folder; "": what the experiment's `prepare` makes
    jobs: int = 1               # runs at once; with more than one, each gets its share of the cores
    compile: int = -1           # 0 | 1: train.py's; -1: its own choice
    table_only: bool = False    # run nothing, make table and plot from the results there are
    out: str = "out"            # folder of the runs


@dataclass(eq=False)
class Run:
    name: str                   # the variant's
    seed: int
    folder: str                 # relative to ROOT
    flags: list                 # for train.py, without out_dir
    needs: str = ""             # folder of the run whose checkpoint it starts from

    def result(self):
        file = ROOT / self.folder / "result.json"
        return json.loads(file.read_text()) if file.exists() else {}


def source_hash(model):
    """First 8 hex of a hash over the syntax trees of model, kernels and trainer: comments, docstrings and layout do not count."""
    def plain(node):            # nested lists; the text of ast.dump differs between Python versions
        if isinstance(node, list):
            return [plain(n) for n in node]
        if not isinstance(node, ast.AST):
            return repr(node)
        fields = dict(ast.iter_fields(node))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node, clean=False) is not None:
            fields["body"] = node.body[1:]
        return [type(node).__name__, *([key, plain(value)] for key, value in fields.items() if value not in (None, []))]

    trees = [plain(ast.parse((ROOT / file).read_text(encoding="utf-8"))) for file in (f"model_{model}.py", "kernels.py", "train.py")]
    return hashlib.sha256(repr(trees).encode()).hexdigest()[:8]


def commit():
    """The checkout's commit, "-dirty" if files other than results differ from it; "" where there is no git or no repository."""
    git = lambda *command: subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
    try:
        name = git("describe", "--always", "--exclude=*").stdout.strip()
        return name + "-dirty" * (git("diff", "--quiet", "HEAD", "--", ".", ":!experiments/results").returncode == 1)
    except OSError:
        return ""


# ---------------------------------------------------------------- the experiment file

def load_experiment(path, scale):
    """The experiment file's names, checked; variants become {name: (overrides, the paper's number or None, seeds)}."""
    if not Path(path).is_file():
        raise ConfigError(f"there is no experiment file {path}")
    exp = {"claims": [], "prepare": "", "also": (), **runpy.run_path(str(path)), "name": Path(path).stem}    # not a loop variable called name
    if missing := [k for k in ("model", "metric", "baseline", "seeds", "variants", scale) if k not in exp]:
        raise ConfigError(f"{path} does not define {', '.join(missing)} (experiments/README.md shows a whole experiment file)")
    folders = {}
    for name, value in exp["variants"].items():
        if not (isinstance(value, tuple) and len(value) in (2, 3) and isinstance(value[0], dict)):
            raise ConfigError(f"{path}: variant {name!r} must be (dict of overrides, paper's number or None[, seeds]), not {value!r}")
        if folders.setdefault(slug(name), name) != name or "," in name:
            raise ConfigError(f"{path}: variant {name!r} has a comma or the same folder name as {folders[slug(name)]!r}: {slug(name)}")
        start = str(value[0].get("init_from", ""))
        if start.startswith("@") and "/" not in start and slug(start) not in list(folders)[:-1]:
            raise ConfigError(f"{path}: {name!r} has init_from={start!r}, which must name a variant above it, or @EXPERIMENT/VARIANT")
    if not isinstance(exp["baseline"], dict):                   # one for all; a dict has each variant's own
        exp["baseline"] = dict.fromkeys(exp["variants"], exp["baseline"])
    exp["minus"] = next(iter(exp["baseline"].values())) if len({*exp["baseline"].values()}) == 1 else "its baseline"
    if unknown := [n for n in (*exp["baseline"], *exp["baseline"].values(), *sum([[a, b] for a, b, _ in pairs(exp)], [])) if n not in exp["variants"]]:
        raise ConfigError(f"{path}: baseline or claims name {unknown[0]!r}, which is no variant ({', '.join(exp['variants'])})")
    if unknown := [column for _, _, column in pairs(exp) if column not in (exp["metric"], *exp["also"])]:
        raise ConfigError(f"{path}: a claim is about {unknown[0]!r}, which is no column ({', '.join([exp['metric'], *exp['also']])})")
    exp["variants"] = {name: (*value, 10**6)[:3] for name, value in exp["variants"].items()}
    return exp


def slug(name):
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def pairs(exp):
    """(A, B, column) of every "A > B" in the claims; the column is the metric, in "column: A > B" another one."""
    found = []
    for claim in exp["claims"]:
        column, chain = claim.split(": ", 1) if ": " in claim else (exp["metric"], claim)
        names = [name.strip() for name in chain.split(">")]
        found += [(a, b, column) for a, b in zip(names, names[1:])]
    return found


def says(exp, a, b, column):
    return f"{column}: " * (column != exp["metric"]) + f"{a} > {b}"


def settings(exp, scale, name):
    """A variant's keys for train.py. Its overrides may hold cpu=dict(...) and gpu=dict(...) for what only one scale changes."""
    overrides = dict(exp["variants"][name][0])
    own = {s: overrides.pop(s, {}) for s in ("cpu", "gpu")}
    return {"model": exp["model"], **exp[scale], **overrides, **own[scale]}


def prepared_data(exp, opt):
    """The folder for train.py's --dataset; runs the experiment's `prepare` (prepare_fineweb.py's options, or a command) if it is not there yet."""
    prepare = exp["prepare"][opt.scale] if isinstance(exp["prepare"], dict) else exp["prepare"]
    if opt.dataset or not prepare:
        return opt.dataset
    folder = re.search(r"--out=(\S+)", prepare)
    if not folder:
        raise ConfigError(f"{exp['name']}: `prepare` must say --out=data/NAME, so that it shares no folder with other settings")
    if not (ROOT / folder[1] / "meta.json").is_file():
        command = [*["prepare_fineweb.py"] * prepare.startswith("--"), *prepare.split()]
        print("$ python", *command, flush=True)
        if subprocess.run([sys.executable, *command], cwd=ROOT).returncode:
            raise ConfigError("the data could not be prepared (see above). Give the command after the $ a --source=PATH of texts that you have, then run "
                              "this one again; or --dataset=FOLDER takes a data folder that is ready")
    return folder[1]


# ---------------------------------------------------------------- the runs

def plan(exp, opt, dataset):
    """All runs, seed by seed."""
    names = [n.strip() for n in opt.only.split(",")] if opt.only else list(exp["variants"])
    if unknown := [n for n in names if n not in exp["variants"]]:
        raise ConfigError(f"--only={opt.only}: there is no variant {unknown[0]!r}, but {', '.join(exp['variants'])}")
    runs, base = [], f"{opt.out}/{exp['name']}-{opt.scale}"
    for seed in range(opt.seeds if opt.seeds > 0 else exp["seeds"]):
        for name in (n for n in names if seed < exp["variants"][n][2]):
            keys, needs = settings(exp, opt.scale, name), ""
            if str(keys.get("init_from", "")).startswith("@"):
                other, _, start = keys["init_from"][1:].rpartition("/")                  # the part before / is another experiment
                theirs = load_experiment(ROOT / "experiments" / f"{other}.py", opt.scale) if other else exp
                last = {slug(n): variant[2] for n, variant in theirs["variants"].items()}.get(slug(start), 1) - 1   # a base may have fewer seeds
                needs = f"{opt.out}/{other or exp['name']}-{opt.scale}/{slug(start)}/s{min(seed, last)}"
                keys["init_from"] = f"{needs}/ckpt.pt"
            own = keys.pop("dataset", "@").replace("@", dataset)                         # "@" is the experiment's own folder
            keys |= {"seed": seed, **({"dataset": own} if own else {})}
            runs.append(Run(name, seed, f"{base}/{slug(name)}/s{seed}", [f"--{k}={v}" for k, v in keys.items()], needs))
    return runs


def check_begun(run):
    """Never go on with a run that was begun with other flags, nor take its result."""
    memo, flags = ROOT / run.folder / "flags.txt", " ".join(run.flags)
    if (run.result() or (ROOT / run.folder / "ckpt.pt").exists()) and memo.exists() and memo.read_text() != flags:
        raise ConfigError(f"{run.folder} was begun with other settings:\n  {memo.read_text()}\nand is now to be\n  {flags}\n"
                          "Remove that folder, or keep it and give another --out=FOLDER.")


def start(run, opt):
    folder = ROOT / run.folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "flags.txt").write_text(" ".join(run.flags))
    resume = (folder / "ckpt.pt").exists()                      # then the checkpoint's own settings count
    flags = [*([run.flags[0], "--init_from=resume"] if resume else run.flags), f"--out_dir={run.folder}"]    # flags[0] is --model
    flags += [f"--compile={opt.compile}"] * (opt.compile >= 0)        # like the cores: how a run is computed, not what
    print("$ python train.py", shlex.join(flags), flush=True)
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if opt.jobs > 1:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        env["OMP_NUM_THREADS"] = str(max(1, cores // opt.jobs))
    with open(folder / "train.log", "a") as log:
        # a session of its own: on Ctrl-C the trainer gets one signal, from run_all(), and not another one from the terminal
        return subprocess.Popen([sys.executable, "train.py", *flags], cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)


def run_all(runs, opt, metric, finished):
    """Run what is not finished, opt.jobs at once, calling finished() after each. Returns the runs that failed."""
    pending, running, failed = list(runs), {}, []
    try:
        while pending or running:
            unfinished = {r.folder for r in (*pending, *running)}
            run = next((r for r in pending if r.needs not in unfinished), None)
            if run and len(running) < opt.jobs:
                pending.remove(run)
                if run.result():
                    print(f"  {run.name}, seed {run.seed}: finished earlier")
                elif run.needs and not (ROOT / run.needs / "ckpt.pt").exists():
                    print(f"  {run.name}, seed {run.seed}: needs {run.needs}/ckpt.pt, which is not there")
                    failed.append(run)
                else:
                    running[run] = start(run, opt), time.time()
                continue
            time.sleep(0.1)
            for run, (process, began) in [item for item in running.items() if item[1][0].poll() is not None]:
                del running[run]
                about = f"  {run.name}, seed {run.seed} ({time.time() - began:.0f} s, {len(pending) + len(running)} to go): "
                if process.returncode == 0 and run.result().get(metric) is not None:
                    print(f"{about}{metric} {run.result()[metric]:.4f}", flush=True)
                    finished()
                else:
                    failed.append(run)
                    log = (ROOT / run.folder / "train.log").read_text(errors="replace").splitlines()
                    print(f"{about}failed, code {process.returncode}, no {metric}. {run.folder}/train.log ends:", *log[-15:], sep="\n    ", flush=True)
    finally:                                    # Ctrl-C: the trainers save and leave; who does not within two minutes is killed
        for process, _ in running.values():
            process.send_signal(signal.SIGINT)
        try:
            for process, _ in running.values():
                process.wait(120)
        finally:
            for process, _ in running.values():
                process.kill()
    return failed


# ---------------------------------------------------------------- the results

def collect(exp, opt, runs, file, data_id=""):
    """The results file brought up to date with the runs' result.json. Returns {variant: {seed: row}} of the present settings."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    rows = {(row["variant"], row["seed"]): row for row in rows}
    for run in runs:
        if result := run.result():
            compiled = bool(result["config"]["compile"])
            result = {key: value for key, value in result.items() if key not in ("config", "model_config")}   # these may hold paths
            rows[run.name, run.seed] = {"variant": run.name, **result, "compile": compiled, "seed": run.seed, "overrides": settings(exp, opt.scale, run.name)}
    ids = {"": {data_id} - {""}}                                # by the variant's own `dataset`
    for row in rows.values():
        ids.setdefault(row["overrides"].get("dataset", ""), set()).add(str(row["data_id"]))
    if mixed := [sorted(group) for group in ids.values() if len(group) > 1]:
        raise ConfigError(f"results on different data (data_id {', '.join(mixed[0])}) are never mixed: move {file.relative_to(ROOT)} away, "
                          "or give the --dataset= on which its rows were made")
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows.values()), encoding="utf-8")
    return {name: {seed: row for (n, seed), row in sorted(rows.items(), key=lambda item: item[0][1])
                   if n == name and row["overrides"] == settings(exp, opt.scale, name) and row.get(exp["metric"]) is not None}
            for name in exp["variants"]}


def results_of(path, scale):
    """{variant: {seed: row}} of what the experiment file `path` has run with its present settings. ConfigError if that is nothing."""
    exp = load_experiment(path, scale)
    file = ROOT / "experiments" / "results" / f"{exp['name']}-{scale}.jsonl"
    rows = collect(exp, Options(scale=scale), [], file) if file.exists() else {}
    if not any(rows.values()):
        raise ConfigError(f"no results in {file.relative_to(ROOT)} yet: first python train.py experiments/{exp['name']}.py --scale={scale}")
    return rows


def differences(column, rows, a, b):
    """A's value of the column minus B's, of the seeds that both have."""
    return [rows[a][seed][column] - rows[b][seed][column] for seed in rows[a] if seed in rows[b]]


def noise(d):
    """What the mean of the differences must exceed: one-sided 95% t; for three seeds 1.69 standard deviations."""
    return T95[min(len(d) - 1, 9) - 1] * stdev(d) / len(d) ** 0.5


def verdict(d):
    """On "A > B", from the differences A - B."""
    if len(d) < 2:
        return f"sign {'agrees' if d[0] > 0 else 'differs'} (1 seed)" if d else "not run"
    return "holds" if mean(d) > noise(d) else "reversed" if -mean(d) > noise(d) else "inside noise"


def paper(exp, a, b):
    """The paper's difference, or None."""
    a, b = exp["variants"][a][1], exp["variants"][b][1]
    return None if a is None or b is None else a - b


def text(values, sign=""):
    """Mean and standard deviation."""
    return (f"{mean(values):{sign}.4f}" + (f" ± {stdev(values):.4f}" if len(values) > 1 else "")) if values else "-"


def table(exp, opt, rows):
    """Markdown: one line per variant, one per claim."""
    bases, metric = exp["baseline"], exp["metric"]
    head = ["variant", "parameters", metric, f"minus {exp['minus']}", "paper", "paper's difference", *exp["also"], "MFLOP a token", "step time", "seeds"]
    lines = [f"# {exp['name']}, scale {opt.scale}", "", (exp["__doc__"] or "").strip(), "", f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for name, (_, printed, _) in exp["variants"].items():
        mine, base, now = rows[name], bases.get(name, name), source_hash(settings(exp, opt.scale, name)["model"])
        both = [(mine[s], rows[base][s]) for s in mine if s in rows[base]]
        alike = [(a, b) for a, b in both if all(a.get(key, 0) == b.get(key, 0) for key in ("device", "threads", "compile"))]
        times = [a["step_ms"] / b["step_ms"] for a, b in alike if a["step_ms"] and b["step_ms"]]         # no steps, no time
        total = [a["params"]["total"] - (name != base) * b["params"]["total"] for a, b in both]
        cells = [name + " †" * any(row["source_hash"] != now for row in mine.values()), f"{total[0]:{'+' * (name != base)},}" if both else "-",
                 text([row[metric] for row in mine.values()]), text(differences(metric, rows, name, base) if name != base else [], "+"),
                 "-" if printed is None else f"{printed:.5g}", text([d] if name != base and (d := paper(exp, name, base)) is not None else [], "+"),
                 *(text([row[m] for row in mine.values() if row.get(m) is not None]) for m in exp["also"]),
                 f"{next(iter(mine.values()))['flops_per_token'] / 1e6:.1f}" if mine else "-", f"{mean(times):.2f}x" if times else "-", str(len(mine))]
        lines.append(f"| {' | '.join(cells)} |")
    if exp["claims"]:
        lines += ["", "| claim | difference | paper's | seeds | verdict |", "| --- " * 5 + "|"]
    for a, b, column in pairs(exp):
        d, printed = differences(column, rows, a, b), paper(exp, a, b)
        lines.append(f"| {says(exp, a, b, column)} | {text(d, '+')} | {text([] if printed is None else [printed], '+')} | {len(d)} | {verdict(d)} |")
    facts = {key: ", ".join(dict.fromkeys(str(row[key]) for name in rows for row in rows[name].values()))
             for key in ("tokens", "data_id", "device", "threads", "torch", "commit")}
    lines += ["", "Mean ± standard deviation over seeds; differences are paired by seed." + " † Older sources than the present ones." * any("†" in x for x in lines),
              f"`{' '.join(f'--{k}={v}' for k, v in exp[opt.scale].items())}`; " + "; ".join(f"{k} {v}" for k, v in facts.items()) + "."]
    return "\n".join(lines) + "\n"


def claims_table():
    """Markdown: every claim of every experiment, as the reports in results/ have it; what has not run is one line an experiment."""
    lines = ["| experiment | claim | paper's difference | here | seeds | verdict |", "| --- " * 6 + "|"]
    for path in sorted(path for path in (ROOT / "experiments").glob("*.py") if re.search(r"^claims\b", path.read_text(encoding="utf-8"), re.M)):
        waiting, reports = [], sorted((ROOT / "experiments" / "results").glob(f"{path.stem}-*.md"))
        for report in reports:
            for claim, here, printed, seeds, said in re.findall(r"^\| (.+ > .+) \| (.+) \| (.+) \| (\d+) \| (.+) \|$", report.read_text(encoding="utf-8"), re.M):
                if said == "not run":
                    waiting.append(claim)
                else:
                    lines.append(f"| [{report.stem}](results/{report.name}) | {claim} | {printed} | {here} | {seeds} | {said} |")
        if waiting := waiting if reports else [says(exp, *pair) for exp in [load_experiment(path, "gpu")] for pair in pairs(exp)]:
            more = f" and {len(waiting) - 4} more" * (len(waiting) > 4)
            lines.append(f"| {path.stem} | {'; '.join(waiting[:4])}{more} | - | - | 0 | not run |")
    return "\n".join(lines) + "\n"


def plot(exp, rows, file):
    """Differences to the baseline of what has run: every seed, their mean with its 95% bar, and the paper's. After a shift of domain also the loss on
    the new text by that on the old: variants that differ in a number at the name's end are one line."""
    from matplotlib.figure import Figure
    bases = exp["baseline"]
    shown = {name: d for name in exp["variants"] if bases.get(name, name) != name and (d := differences(exp["metric"], rows, name, bases[name]))}
    shift = "retention_loss" in exp["also"]
    fig = Figure(figsize=(15, max(6, 1.5 + 0.4 * len(shown))) if shift else (7, 1.5 + 0.4 * len(shown)), layout="constrained")
    ax, *plane = fig.subplots(1, 1 + shift, squeeze=False)[0]
    for y, (name, d) in enumerate(shown.items()):
        ax.plot(d, [y] * len(d), ".", color="C0", alpha=0.5)
        ax.errorbar(mean(d), y, xerr=noise(d) if len(d) > 1 else None, fmt="o", color="C0", capsize=4, label="here, one-sided 95%")
        if (printed := paper(exp, name, bases[name])) is not None:
            ax.plot(printed, y + 0.25, "D", color="C1", markersize=5, label="paper")
    ax.axvline(0, color="grey", linewidth=1)
    ax.set(yticks=range(len(shown)), yticklabels=shown, ylim=(max(len(shown), 1) - 0.5, -0.5),
           xlabel=f"{exp['metric']} minus {exp['minus']}", title=file.stem)
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(*zip(*{label: (handle, label) for handle, label in zip(handles, labels)}.values())) if labels else None
    lines = {}
    for name in exp["variants"]:
        if points := [(row["retention_loss"], row[exp["metric"]]) for row in rows[name].values() if row.get("retention_loss")]:
            method, number = re.fullmatch(r"(.+?)((?: [/x])? [\d.e-]+)?", name).groups()
            lines.setdefault(method, []).append((number or "", *map(mean, zip(*points))))
    for ax in plane:
        for method, points in lines.items():
            ax.plot([x for _, x, _ in points], [y for _, _, y in points], "o-", markersize=4)
            for number, x, y in points:
                ax.annotate(method + number, (x, y), (4, 4), textcoords="offset points", fontsize=7)
        ax.set(xlabel="retention_loss: of the old text", ylabel=f"{exp['metric']}: of the new", title="down is learned, left is kept", xmargin=0.15)
    fig.savefig(file, dpi=120)


def main(path, argv, dataset=""):
    """Run the experiment file `path` with the options in `argv`. Returns the exit code: 0; 1 if a run failed; 130 after Ctrl-C."""
    if {"-h", "--help"} & set(argv):
        print(__doc__, help_text(Path(__file__).read_text(encoding="utf-8"), vars(Options())), sep="\n")
        return 0
    overrides, others = configure(argv, vars(Options()))
    opt = Options(**{"dataset": dataset, **overrides})
    if others or opt.scale not in ("cpu", "gpu"):
        raise ConfigError(f"one experiment at a time, not also {others[0]}" if others else f"--scale={opt.scale}: must be cpu or gpu")
    exp = load_experiment(path, opt.scale)
    results = ROOT / "experiments" / "results" / f"{exp['name']}-{opt.scale}.jsonl"
    runs, code = [], 0

    def report(data_id=""):
        rows = collect(exp, opt, runs, results, data_id)
        results.with_suffix(".md").write_text(table(exp, opt, rows), encoding="utf-8")
        return rows

    if not opt.table_only:
        dataset = prepared_data(exp, opt)
        runs = plan(exp, opt, dataset)
        for run in runs:
            check_begun(run)
        meta = [f for f in (ROOT / dataset / "meta.json", ROOT / "data" / dataset / "meta.json") if dataset and f.exists()]
        report(str(json.loads(meta[0].read_text())["data_id"]) if meta else "")           # refuses other data before the first run
        for number in (signal.SIGINT, signal.SIGTERM):          # SIGINT too: it is ignored in what a script started with &
            signal.signal(number, signal.default_int_handler)
        try:
            code = 1 if run_all(runs, opt, exp["metric"], report) else 0
        except KeyboardInterrupt:
            print(f"\nstopped; go on with: python train.py {shlex.join([str(path), *argv])}")
            code = 130
    plot(exp, report(), results.with_suffix(".png"))
    print("", results.with_suffix(".md").read_text(encoding="utf-8"), f"{results.with_suffix('.md').relative_to(ROOT)}, .png and .jsonl", sep="\n")
    return code


if __name__ == "__main__":
    if not sys.argv[1:] or sys.argv[1].startswith("-"):
        sys.exit("usage: python experiments/run.py experiments/NAME.py [--scale=cpu] [--seeds=3] ...; add --help for all options")
    try:
        sys.exit(print(claims_table(), end="") if sys.argv[1:] == ["claims"] else main(sys.argv[1], sys.argv[2:]))
    except ConfigError as error:
        sys.exit(f"error: {error}")
