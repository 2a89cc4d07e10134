"""Run an experiment: every variant and seed through train.py, then table, verdicts, picture.

    python train.py experiments/move_table1.py --seeds=3        (or python experiments/run.py ...)
    python experiments/run.py claims                            every claim -> results/claims.md

Each run is a printed `python train.py --key=value` in out/<experiment>-<scale>/<variant>/s<seed>.
It is finished when its result.json exists or its row is in results/, so the same command goes on.
Seeds are the outer loop: a table that is cut short is already paired. README.md beside this file
shows an experiment file and how to read a table.
"""
import ast
import ctypes
import functools
import hashlib
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from types import NoneType, SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from prepare_fineweb import ConfigError, configure, cores, guard, help_text, load_meta, lock
from prepare_fineweb import naming, need, parse_value, reading, run_file

# One-sided 95% quantiles of Student's t, for 1 to 9 degrees of freedom.
T95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)
CLAIMS_TITLE = """# Claims and their verdicts

"A > B" says that A's number is higher. In hiermem_longtail (recall), lime_arithmetic and
lime_prosqa (accuracy) higher is better, and a positive difference is A's lead. The others are
losses: lower is better, and a positive difference is B's lead. A linked table's first lines explain
its variants; [the verdicts](../README.md#how-to-read-a-table). Tables at other settings have theirs
in their own files: [lime_routers_short_warmup](lime_routers_short_warmup-cpu.md),
[ultramem_moe_z](ultramem_moe_z-cpu.md); on other machines:
[which_memory_amd](which_memory_amd-cpu_4M.md),
[which_memory_h200](which_memory_h200-cpu_16M.md).

"""
CLAIM_HEAD = ["claim", "difference", "paper's", "trend: 1/4, 1/2, whole", "seeds", "verdict"]


@dataclass
class Options:
    scale: str = "cpu"          # cpu | gpu | one more that the file has: which of its settings
    seeds: int = -1             # seeds per variant; -1: the experiment's number
    only: str = ""              # comma list of variants (their bases run, too); "": all
    dataset: str = ""           # data folder; "": what the experiment's `prepare` makes
    jobs: int = 1               # runs at once; of more than one each gets its share of the cores
                                # and no torch.compile
    graph: bool = False         # on a GPU: a step as one CUDA graph (cuda_graph.py)
    table_only: bool = False    # run nothing, make table and picture from the results there are


@dataclass
class Variant:
    overrides: dict
    paper: float                # the paper's number, or None
    seeds: int = 10 ** 6        # at most so many


@dataclass(eq=False)
class Run:
    name: str                   # the variant's
    seed: int
    folder: str                 # relative to ROOT
    flags: list                 # for train.py, without out_dir
    needs: str = ""             # folder of the run whose checkpoint it starts from
    start: tuple = ()           # the settings of that run, of the one that it starts from, ...

    def result(self):
        file = ROOT / self.folder / "result.json"
        with reading(file):
            return parse(file.read_text()) if file.exists() else {}


# ---------------------------------------------------------------- for every program here

def options(argv, program, defaults=None):
    """--key=value arguments of a program, its globals() -> (settings, the other arguments). Its
    settings are its numbers and strings with small letters. Ends it after --help."""
    if defaults is None:
        defaults = {}
        for key, value in program.items():
            if key.islower() and key[0] != "_" and isinstance(value, (int, float, str)):
                defaults[key] = value
    if {"-h", "--help"} & {*argv}:
        source = Path(program["__file__"]).read_text(encoding="utf-8")
        print(program["__doc__"], help_text(source, defaults), sep="\n")
        sys.exit()
    given, others = configure(argv, defaults)
    return SimpleNamespace(**{**defaults, **given}), others


def scale_of(program, argv, doc):
    """The only argument of an experiment that is a program, too: cpu if none is given. Ends it
    after --help."""
    if {"-h", "--help"} & {*argv}:
        print(f"python experiments/{program} cpu     after the runs of this scale\n")
        print(doc)
        sys.exit()
    need(len(argv) < 2 and not any(word.startswith("-") for word in argv),
         f"a scale is wanted, such as cpu, and nothing else, not {' '.join(argv)}")
    return argv[0] if argv else "cpu"


def save_costs(name, model, device, **figures):
    """What a program that measures costs has found -> results/NAME-DEVICE.json."""
    file = results_file(name, device).with_suffix(".json")
    text = json.dumps({**figures, **origin(model, device)}, indent=1)
    file.write_text(text + "\n", encoding="utf-8")


def add_line(file, row):
    """A row more, on a line of its own: an editor may have left the last one without an end."""
    text = Path(file).read_text(encoding="utf-8") if Path(file).is_file() else ""
    end = "" if text.endswith("\n") or not text else "\n"
    with open(file, "a", encoding="utf-8") as lines:
        lines.write(f"{end}{json.dumps(row)}\n")


# ---------------------------------------------------------------- where a result comes from

def source_hash(model, folder=""):
    """8 hex digits over the code of model, kernels and trainer in a folder ("": here), the same by
    any Python; comments and docstrings do not count."""
    texts = []
    for file in (f"model_{model}.py", "kernels.py", "train.py"):
        texts.append((file, (Path(folder or ROOT) / file).read_text(encoding="utf-8")))
    return hash_of(tuple(texts))


@functools.cache                                                # a table asks once a row
def hash_of(texts):
    code = []
    for file, text in texts:
        tree = ast.parse(text, file)                            # which an error names
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                if ast.get_docstring(node) is not None:
                    del node.body[0]
        code.append(outline(tree))
    return hashlib.sha256(repr(code).encode()).hexdigest()[:8]


def outline(node):
    """A syntax tree as nested lists; what ast.unparse and ast.dump print depends on Python."""
    if isinstance(node, list):
        return [outline(part) for part in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    parts = [[name, outline(value)] for name, value in ast.iter_fields(node)
             if value is not None and value != []]
    return [type(node).__name__, *parts]


def same_code(old):
    """This source hash, and those of later code that was seen to train as it did: same.py."""
    file = ROOT / "experiments" / "results" / "same.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    found = [old]
    with reading(file):
        for row in map(json.loads, lines):                     # in the order of time
            if row["old"] in found:
                found.append(row["new"])
    return found


def git(*command):
    return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)


def commit(model="move"):
    """The checkout's commit, "-dirty" if more than results differ from it, or if it lacks the
    model's file; "" without git, or in another checkout."""
    try:
        top = git("rev-parse", "--show-toplevel").stdout.strip()
        if not top or Path(top).resolve() != ROOT.resolve():
            return ""
        name = git("describe", "--always", "--exclude=*").stdout.strip()
        changed = git("diff", "--quiet", "HEAD", "--", ".", ":!experiments/results").returncode == 1
        untracked = git("ls-files", "--others", f"model_{model}.py").stdout
    except OSError:
        return ""
    return f"{name}-dirty" if changed or untracked else name


def machine(device):
    """The name of what computes."""
    import torch
    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    file = Path("/proc/cpuinfo")                                # Linux has it
    model = re.search(r"model name\s*: (.+)", file.read_text() if file.exists() else "")
    name = f"{device} {platform.machine()}"
    return f"{name} {model[1]}" if model else name


def origin(model, device):
    """What a result says of where it comes from: machine, torch, commit, sources."""
    import torch
    return {"device": machine(device), "threads": torch.get_num_threads(),
            "torch": torch.__version__, "commit": commit(model), "source_hash": source_hash(model)}


# ---------------------------------------------------------------- the experiment file

def slug(name):
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def load_experiment(path, scale):
    """The names that an experiment file defines, with variants as Variants."""
    need(Path(path).is_file(), f"there is no experiment file {path}")
    exp = SimpleNamespace(claims=[], prepare="", also=())
    vars(exp).update(run_file(path))
    exp.name = Path(path).stem
    wanted = ("model", "metric", "baseline", "seeds", "variants", scale)
    missing = [name for name in wanted if not hasattr(exp, name)]
    need(not missing, f"{path} does not define {', '.join(missing)} (experiments/README.md shows "
         "a whole file)")
    for name, value in exp.variants.items():
        kinds = tuple(map(type, value)) if isinstance(value, tuple) else ()
        good = kinds[:1] == (dict,) and len(kinds) in (2, 3) and kinds[1] in (float, int, NoneType)
        need(isinstance(name, str) and good, f"{path}: variant {name!r} must be (overrides, "
             "paper's number or None[, seeds])")
    exp.variants = {name: Variant(*value) for name, value in exp.variants.items()}
    if isinstance(exp.baseline, str):                           # one for all
        exp.baseline = dict.fromkeys(exp.variants, exp.baseline)
    for names in (exp.claims, exp.also):
        need(isinstance(names, (list, tuple)), f"{path}: claims and also must be lists of names")
    leave_out(exp, scale)
    bases = list(dict.fromkeys(exp.baseline.values()))
    exp.minus = bases[0] if len(bases) == 1 else "its baseline"
    check_names(exp, path)
    need(type(exp.seeds) is int and exp.seeds > 0, f"{path}: seeds must be a number, 1 or more")
    need(isinstance(exp.metric, str), f"{path}: metric must be a name")
    for name in exp.variants:
        model = settings(exp, scale, name)["model"]
        need((ROOT / f"model_{model}.py").exists(), f"{path}: there is no model_{model}.py")
    return exp


def leave_out(exp, scale):
    """Without the variants that say None for this scale, or for its device, as in gpu=None, and
    nothing for the scale; pairs() knows them."""
    exp.left_out = set()
    for name, variant in list(exp.variants.items()):
        of_device = variant.overrides.get(scale.partition("_")[0], {})
        if variant.overrides.get(scale, of_device) is None:
            exp.left_out.add(name)
            del exp.variants[name]
            exp.baseline.pop(name, None)


def check_names(exp, path):
    """What would run but mean something else: a wrong name, or two variants in one folder."""
    folders = []
    for name, variant in exp.variants.items():
        good = slug(name) not in folders and not {",", "|"} & {*name}
        need(good, f"{path}: variant {name!r} has a comma, a | or another one's folder name, "
             f"{slug(name)}")
        start = str(variant.overrides.get("init_from", ""))
        if start.startswith("@") and "/" not in start:
            need(slug(start) in folders, f"{path}: {name!r} has init_from={start!r}, which must "
                 "name a variant above it, or @EXPERIMENT/VARIANT")
        folders.append(slug(name))
    names = [*exp.baseline, *exp.baseline.values()]
    for a, b, column in pairs(exp):
        names += [a, b]
        need(column in (exp.metric, *exp.also), f"{path}: {column!r} of a claim is no column")
    for name in names:
        need(name in exp.variants, f"{path}: {name!r} of baseline or claims is no variant "
             f"({', '.join(exp.variants)})")


def pairs(exp):
    """(A, B, column) of every "A > B"; the column is the metric, in "column: A > B" another."""
    found = []
    for claim in exp.claims:
        column, _, chain = claim.rpartition(": ")
        names = [name.strip() for name in chain.split(">")]
        for a, b in zip(names, names[1:]):
            if not exp.left_out & {a, b}:
                found.append((a, b, column or exp.metric))
    return found


def settings(exp, scale, name):
    """A variant's keys for train.py. cpu=dict(...) in its overrides is for scale cpu and those
    whose names begin with cpu_; cpu_4M=dict(...), then, for that scale alone. gpu=None: it is not
    run on a GPU."""
    overrides = dict(exp.variants[name].overrides)
    own = {key: overrides.pop(key) for key in list(overrides) if key[:3] in ("cpu", "gpu")}
    device = scale.partition("_")[0]
    return {"model": exp.model, **getattr(exp, scale), **overrides, **(own.get(device) or {}),
            **own.get(scale, {})}


def prepared_data(exp, opt):
    """The data folder; runs `prepare` (prepare_fineweb.py's options, or a command) once."""
    prepare = exp.prepare
    if opt.dataset or not prepare:
        return opt.dataset.rstrip("/")
    if isinstance(prepare, dict):
        need(opt.scale in prepare, f"{exp.name}: `prepare` has no {opt.scale}: add it, or give "
             "--dataset=FOLDER")
        prepare = prepare[opt.scale]
    folder = re.search(r"--out=(\S+)", prepare)
    need(folder, f"{exp.name}: `prepare` must say --out=data/NAME, a folder of its own")
    meta = ROOT / folder[1] / "meta.json"
    with reading(meta):
        known = json.loads(meta.read_text(encoding="utf-8")) if meta.is_file() else {}
    last = "task" if "tasks.py" in prepare else "data_id"       # what is written last of all
    if last not in known:
        command = prepare.split()
        if prepare.startswith("--"):
            command.insert(0, "prepare_fineweb.py")
        if known:                                               # it was broken off
            command.append("--overwrite=True")
        print("$ python", *command, flush=True)
        code = subprocess.run([sys.executable, *command], cwd=ROOT).returncode
        need(code == 0, "the data could not be prepared (see above). Give the command after the $ "
             "a --source=PATH of texts that you have, or this one a --dataset=FOLDER")
    return folder[1]


# ---------------------------------------------------------------- the runs

def find_start(exp, scale, name):
    """The experiment and the variant that a variant's init_from="@VARIANT" or "@EXPERIMENT/VARIANT"
    names; None and "" if it starts from none."""
    init_from = str(settings(exp, scale, name).get("init_from", ""))
    if not init_from.startswith("@"):
        return None, ""
    other, _, start = init_from[1:].rpartition("/")
    if init_from[1:] in exp.variants:                           # its name may have a /
        return exp, init_from[1:]
    if other:
        exp = load_experiment(ROOT / "experiments" / f"{other}.py", scale)
    for name in exp.variants:
        if slug(name) == slug(start):
            return exp, name
    raise ConfigError(f"init_from={init_from}: {exp.name}.py has no variant of that name")


def starts(exp, scale, name):
    """What a variant starts from: the settings of its base, of that one's base, and so on."""
    exp, base = find_start(exp, scale, name)
    return [settings(exp, scale, base), *starts(exp, scale, base)] if exp else []


def folder_of(exp, scale, name, seed):
    return f"out/{exp.name}-{scale}/{slug(name)}/s{seed}"


def names_of(exp, opt):
    """The variants that --only= names."""
    only = [name.strip() for name in opt.only.split(",")] if opt.only else []
    for name in only:
        need(name in exp.variants, f"--only={opt.only}: there is no variant {name!r}, "
             f"but {', '.join(exp.variants)}")
    return only


def plan(exp, opt, dataset):
    """All runs, seed by seed."""
    only = names_of(exp, opt)
    wanted = {exp.baseline.get(name, name) for name in only} | set(only)      # a row has two runs
    for name in reversed(exp.variants):                         # and what it starts from: above it
        other, base = find_start(exp, opt.scale, name)
        if name in wanted and other is exp:
            wanted.add(base)
    names = [name for name in exp.variants if name in wanted or not only]
    runs = []
    for seed in range(opt.seeds if opt.seeds > 0 else exp.seeds):
        for name in names:
            if seed >= exp.variants[name].seeds:
                continue
            keys = settings(exp, opt.scale, name)
            needs = ""
            other, base = find_start(exp, opt.scale, name)
            if other:
                last = other.variants[base].seeds - 1           # a base may have fewer seeds
                needs = folder_of(other, opt.scale, base, min(seed, last))
                keys["init_from"] = f"{needs}/ckpt.pt"
            own = keys.pop("dataset", "@").replace("@", dataset)    # "@": the experiment's folder
            keys["seed"] = seed
            if own:
                keys["dataset"] = own
            flags = [f"--{key}={value}" for key, value in keys.items()]
            folder = folder_of(exp, opt.scale, name, seed)
            bases = tuple(starts(exp, opt.scale, name))
            runs.append(Run(name, seed, folder, flags, needs, bases))
    return runs


def check_begun(run):
    """Never go on with a run that was begun with other flags or code, nor take the result of other
    flags."""
    memo = ROOT / run.folder / "flags.txt"
    result = run.result()
    begun = result or (ROOT / run.folder / "ckpt.pt").exists()
    if begun and memo.exists():
        was = memo.read_text()
        same = was in (memo_of(run), " ".join(run.flags))       # the base is not in older ones
        need(same, f"{run.folder} was begun with other settings:\n  {was}\nand is now to be\n"
             f"  {memo_of(run)}\nRemove that folder, or rename it.")
    config = result.get("config", {})
    for flag in run.flags:                                      # it may have gone on by hand
        key, _, text = flag.removeprefix("--").partition("=")
        if key in config and key not in ("init_from", "dataset", "batch_size"):
            same = text in ("", "-1") or parse_value(text, type(config[key])) == config[key]
            need(same, f"{run.folder} has a result of {key}={config[key]}, which is now to be "
                 f"{text}. Remove that folder, or rename it.")
    code = ROOT / run.folder / "code.txt"                       # older runs have none
    if begun and not result and code.exists():
        same = code_of(run) in same_code(code.read_text())
        need(same, f"{run.folder} was begun with other code, of its model, kernels.py or train.py. "
             "Remove that folder, or rename it.")


def check_free(run):
    """No other process may be at work on it: a second run.py, or a trainer that is left over."""
    folder = ROOT / run.folder
    if (folder / ".lock").exists() and not run.result():
        lock(folder).close()


def code_of(run):
    """The hash of the code that it runs with."""
    return source_hash(run.flags[0].removeprefix("--model="))


def memo_of(run):
    """What decides a run: its flags, and the settings of what it starts from."""
    return "\n".join([" ".join(run.flags), *map(json.dumps, run.start)])


def end_with_parent():
    """In the child, on Linux: SIGINT when run.py dies, even of SIGKILL; the trainer saves."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGINT)


def start(run, opt):
    """Start or resume the trainer of a run. Returns its process."""
    folder = ROOT / run.folder
    folder.mkdir(parents=True, exist_ok=True)
    memo = folder / "flags.txt"
    if not memo.exists() or memo.read_text() != memo_of(run):
        memo.write_text(memo_of(run))
    flags = list(run.flags)
    if (folder / "ckpt.pt").exists():                           # its own settings count
        model = run.flags[0]
        flags = [model, "--init_from=resume"]
    else:
        (folder / "code.txt").write_text(code_of(run))
    flags.append(f"--out_dir={run.folder}")
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if opt.jobs > 1:
        env["OMP_NUM_THREADS"] = str(max(1, cores() // opt.jobs))
        flags.append("--compile=0")
    program = "experiments/cuda_graph.py" if opt.graph else "train.py"
    print("$ python", program, shlex.join(flags), flush=True)
    command = [sys.executable, program, *flags]
    linux = sys.platform == "linux"
    with open(folder / "train.log", "a") as log:
        # In a session of its own, on Ctrl-C the trainer gets one signal, run_all()'s.
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log,
                                start_new_session=True,
                                preexec_fn=end_with_parent if linux else None)


def next_run(pending, running):
    """The first run that waits for no other one's checkpoint, or None."""
    unfinished = [run.folder for run in (*pending, *running)]
    for run in pending:
        if run.needs not in unfinished:
            return run
    return None


def wrong_base(run):
    """What is wrong with the base in out/ that a run starts from: it is not finished, or was made
    with other settings than those that this run's row will say. "": nothing, or nobody knows."""
    if not run.needs:
        return ""
    base = ROOT / run.needs
    if not (base / "ckpt.pt").exists() or not (base / "result.json").exists():
        return ("is not finished: its ckpt.pt and result.json are not both there; remove that "
                "folder and make it again (if results/ has its row, move that .jsonl away "
                "meanwhile)")
    memo = base / "flags.txt"
    if not memo.exists():
        return ""
    flags, *starts = memo.read_text().split("\n")
    was = set(f" {flags}".split(" --")[1:])
    now = {f"{key}={value}" for key, value in run.start[0].items()}
    found = ("seed=", "dataset=", "init_from=")                 # there as they were found
    other = any(not flag.startswith(found) for flag in was ^ now)
    if other or starts and starts != [*map(json.dumps, run.start[1:])]:
        return "has other settings than its experiment's file: remove that folder, make it again"
    return ""


def has_result(run, code, metric):
    """Whether a run that ended with this exit code has a result; prints it, or what went wrong."""
    value = run.result().get(metric)
    if code == 0 and value is not None:
        print(f"  {run.name}, seed {run.seed}: {metric} {value:.4f}", flush=True)
        return True
    log = (ROOT / run.folder / "train.log").read_text(errors="replace").splitlines()
    left = f"no {metric}" if value is None else "after its result, which counts"
    print(f"  {run.name}, seed {run.seed}: failed, code {code}, {left}. "
          f"{run.folder}/train.log ends:", *log[-15:], sep="\n    ", flush=True)
    return False


def stop(processes):
    """Ctrl-C: the trainers save and leave; who has not left after two minutes is killed."""
    for process in processes:
        process.send_signal(signal.SIGINT)
    end = time.time() + 120
    try:
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0, end - time.time()))
    finally:
        for process in processes:
            process.kill()


def recorded(runs, rows):
    """The folders of runs that have a row among the results, made here or elsewhere, and whose
    checkpoint no other one needs."""
    folders = {run.folder for run in runs if run.seed in rows[run.name]}
    while True:
        needed = {run.needs for run in runs if run.folder not in folders} & folders
        if not needed:
            return folders
        folders -= needed


def run_all(runs, opt, metric, finished, known):
    """Run what is neither finished nor among the folders known, opt.jobs at once, calling
    finished() after each. -> the failed."""
    pending = []
    running = {}                                                # run -> process
    failed = []
    for run in runs:
        result = run.result()
        if result and result.get(metric) is None:
            print(f"  {run.name}, seed {run.seed}: {run.folder} has no {metric}; remove the folder")
            failed.append(run)
        elif result or run.folder in known:
            print(f"  {run.name}, seed {run.seed}: finished earlier")
        else:
            pending.append(run)
    if len(pending) > 1:
        print(f"{len(pending)} runs to go")
    began = time.time()
    done = 0
    try:
        while pending or running:
            run = next_run(pending, running)
            if run and len(running) < opt.jobs:
                pending.remove(run)
                if run.result():                                # made by another process meanwhile
                    continue
                wrong = wrong_base(run)
                if wrong:
                    print(f"  {run.name}, seed {run.seed}: needs {run.needs}, which {wrong}")
                    failed.append(run)
                else:
                    running[run] = start(run, opt)
                continue
            time.sleep(0.1)
            for run, process in list(running.items()):
                code = process.poll()
                if code is None:
                    continue
                del running[run]
                if not has_result(run, code, metric):
                    failed.append(run)
                    continue
                finished()
                done += 1
                half = len(running) / 2                         # the others are under way
                hours = (time.time() - began) / 3600 / (done + half) * (len(pending) + half)
                left = len(pending) + len(running)
                if left:
                    print(f"  {left} to go, about {hours:.1f} hours at this pace", flush=True)
    finally:
        stop(running.values())
    return failed


# ---------------------------------------------------------------- the results

def parse(text):
    """JSON; what is NaN or infinite there is None, as if it were missing."""
    return json.loads(text, parse_constant=lambda name: None)


def read_rows(file):
    """{(variant, seed): row} of a results file."""
    rows = {}
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            with reading(file):
                row = parse(line)
                name, seed = row["variant"], row["seed"]
                need((name, seed) not in rows, f"{file} has two rows of {name}, seed {seed}: "
                     "remove one")
                rows[name, seed] = row
                need({"overrides", "data_id"} <= row.keys(), f"{file} has a row without data_id")
    return rows


def check_data(rows, file, dataset):
    """Rows of one data folder must have one data_id, the present one if `dataset` is given; a
    variant's own folder is another one."""
    seen = {}
    for row in rows:
        own = row["overrides"].get("dataset", "@")
        now = data_id_of(own.replace("@", dataset)) if dataset else ""
        seen.setdefault(own, {now} - {""}).add(str(row["data_id"]))
    for ids in seen.values():
        need(len(ids) == 1, f"results on different data (data_id {', '.join(sorted(ids))}) are "
             f"never mixed: move {file.relative_to(ROOT)} and the runs of the other data in out/ "
             "away, or give the --dataset= on which its rows were made")


def make_way(file, data_id):
    """Rows of another text move aside, to NAME-SCALE.DATA_ID.jsonl; those of this one come back."""
    def aside(data_id):
        return file.with_suffix(f".{data_id}.jsonl")

    rows = read_rows(file).values()
    others = {str(row["data_id"]) for row in rows if "dataset" not in row["overrides"]}
    if not data_id or data_id in others or len(others) > 1:
        return
    for other in others:
        need(not aside(other).exists(), f"{file} and {aside(other)} both have rows of data_id "
             f"{other}: move one away")
        file.rename(aside(other))
        print(f"{file.name} has rows of another text: they are in {aside(other).name} now")
    if aside(data_id).exists():
        need(others or not rows, f"{file} has rows of other data alone, and {aside(data_id)} would "
             "come in its place: move one away")
        aside(data_id).rename(file)


def collect(exp, opt, runs, file, dataset=""):
    """Bring the results file up to date. -> {variant: {seed: row}} of the present settings."""
    rows = read_rows(file)
    known = current(exp, opt.scale, rows)
    for run in runs:
        result = run.result()
        if result and run.seed not in known[run.name]:          # a base made again keeps its row
            for private in ("config", "model_config"):          # these may hold paths
                result.pop(private, None)
            overrides = settings(exp, opt.scale, run.name)
            row = {"variant": run.name, **result, "overrides": overrides}
            memo = ROOT / run.folder / "flags.txt"
            if run.start and memo.exists() and memo.read_text() == memo_of(run):
                row["start"] = list(run.start)
            rows[run.name, run.seed] = row
    check_data(rows.values(), file, dataset)
    file.parent.mkdir(exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows.values())
    new = file.with_name(f"{file.stem}.{os.getpid()}.tmp")
    try:
        with naming(new):
            new.write_text(lines, encoding="utf-8")
            os.replace(new, file)                               # on a full disk the old one stays
    finally:
        new.unlink(missing_ok=True)
    return current(exp, opt.scale, rows)


def current(exp, scale, rows):
    """{variant: {seed: row}} of the present settings, its own and those of what it starts from."""
    present = {name: {} for name in exp.variants}
    bases = {name: starts(exp, scale, name) for name in present}
    for (name, seed), row in sorted(rows.items(), key=lambda item: item[0][1]):
        if name not in present or row.get(exp.metric) is None:
            continue
        same_base = row.get("start", bases[name]) == bases[name]        # older rows have none
        if same_base and row["overrides"] == settings(exp, scale, name):
            present[name][seed] = row
    return present


def results_file(name, scale):
    return ROOT / "experiments" / "results" / f"{name}-{scale}.jsonl"


def rows_of(path, scale):
    """{variant: {seed: row}} of what the experiment file has run with its present settings; {}:
    nothing."""
    exp = load_experiment(path, scale)
    file = results_file(exp.name, scale)
    rows = collect(exp, Options(scale=scale), [], file) if file.exists() else {}
    return rows if any(rows.values()) else {}


def results_of(path, scale):
    """rows_of() where there must be some."""
    name = Path(path).stem
    rows = rows_of(path, scale)
    need(rows, f"no results in {results_file(name, scale).relative_to(ROOT)} yet: first "
         f"python train.py experiments/{name}.py --scale={scale}")
    return rows


def differences(column, rows, a, b):
    """A's value of the column minus B's, of the seeds that both have."""
    found = []
    for seed, row in rows[a].items():
        mine = row.get(column)
        other = rows[b].get(seed, {}).get(column)
        if mine is not None and other is not None:
            found.append(mine - other)
    return found


def step_times(rows, a, b):
    """A's times of a step in units of B's, of the seeds that both have on the same machine."""
    found = []
    for seed, row in rows[a].items():
        other = rows[b].get(seed)
        if other is None:
            continue
        alike = all(row[key] == other[key] for key in ("device", "threads"))
        if alike and row["step_ms"] and other["step_ms"]:       # without steps there is no time
            found.append(row["step_ms"] / other["step_ms"])
    return found


def value_at(row, column, fraction):
    """The column's value when this fraction of the run's steps was done, or None."""
    curve = row.get("curve")
    if not curve:
        return None
    last = curve[-1]["step"]

    def away(at):
        return abs(at["step"] - fraction * last)

    nearest = min(curve, key=away)
    return nearest.get(column) if away(nearest) <= last / 20 else None


def trend(column, rows, a, b):
    """Mean difference after a quarter, a half and the whole of the runs, as text."""
    cells = []
    for fraction in (0.25, 0.5, 1.0):
        found = []
        for seed in rows[a]:
            if seed in rows[b]:
                found.append((value_at(rows[a][seed], column, fraction),
                              value_at(rows[b][seed], column, fraction)))
        known = found and all(None not in both for both in found)
        cells.append(f"{mean(x - y for x, y in found):+.3f}" if known else "-")
    return ", ".join(cells)


def noise(d):
    """What the mean of the differences must exceed: one-sided 95% t; of three, 1.69 deviations."""
    return T95[min(len(d) - 1, 9) - 1] * stdev(d) / len(d) ** 0.5


def verdict(d):
    """On "A > B", from the differences A - B."""
    if not d:
        return "not run"
    if len(d) == 1:
        return f"sign {'agrees' if d[0] > 0 else 'differs'} (1 seed)"
    if abs(mean(d)) <= noise(d):
        return "inside noise"
    return "holds" if mean(d) > 0 else "reversed"


def text(values, sign=""):
    """Mean and standard deviation."""
    if not values:
        return "-"
    shown = f"{mean(values):{sign}.4f}"
    return f"{shown} ± {stdev(values):.4f}" if len(values) > 1 else shown


def paper(exp, a, b):
    """[the paper's difference], or [] where it has none."""
    a = exp.variants[a].paper
    b = exp.variants[b].paper
    return [] if a is None or b is None else [a - b]


# ---------------------------------------------------------------- table, claims and picture

def line(cells):
    return f"| {' | '.join(cells)} |"


def heading(cells):
    return [line(cells), line(["---"] * len(cells))]


def variant_line(exp, scale, rows, name):
    """A variant's line of the table: its own values, and what it has more than its baseline."""
    mine = rows[name]
    base = exp.baseline.get(name, name)
    number = exp.variants[name].paper
    gain = []
    printed = []
    if name != base:
        gain = differences(exp.metric, rows, name, base)
        printed = paper(exp, name, base)
    columns = []
    for column in (exp.metric, *exp.also):
        columns.append(text([row[column] for row in mine.values() if row.get(column) is not None]))
    title = name
    size = "-"
    flops = "-"
    times = step_times(rows, name, base)
    now = source_hash(settings(exp, scale, name)["model"])
    for seed, row in mine.items():
        if now not in same_code(row["source_hash"]):
            title = f"{name} †"
        flops = f"{row['flops_per_token'] / 1e6:.1f}"
        other = rows[base].get(seed)
        if other is None:
            continue
        total = row["params"]["total"]
        size = f"{total:,}" if name == base else f"{total - other['params']['total']:+,}"
    return line([
        title, size, columns[0], text(gain, "+"), "-" if number is None else f"{number:.5g}",
        text(printed, "+"), *columns[1:], flops, f"{mean(times):.2f}x" if times else "-",
        str(len(mine))])


def claim_text(exp, a, b, column):
    return f"{a} > {b}" if column == exp.metric else f"{column}: {a} > {b}"


def claim_line(claim, d, printed=(), trend="-"):
    return line([claim, text(d, "+"), text(printed, "+"), trend, str(len(d)), verdict(d)])


def first_of(names, size):
    more = f" and {len(names) - size} more" if len(names) > size else ""
    return "; ".join(names[:size]) + more


def table(exp, opt, rows):
    """Markdown: one line per variant that has run, one per claim."""
    lines = [f"# {exp.name}, scale {opt.scale}", "", (exp.__doc__ or "").strip(), ""]
    lines += heading(["variant", "parameters", exp.metric, f"minus {exp.minus}", "paper",
                      "paper's difference", *exp.also, "MFLOP a token", "step time", "seeds"])
    lines += [variant_line(exp, opt.scale, rows, name) for name in exp.variants if rows[name]]
    missing = [name for name in exp.variants if not rows[name]]
    if missing:
        lines += ["", f"Not run: {first_of(missing, 8)}."]
    if exp.claims:
        lines += ["", *heading(CLAIM_HEAD)]
    for a, b, column in pairs(exp):
        printed = paper(exp, a, b) if column == exp.metric else []
        lines.append(claim_line(claim_text(exp, a, b, column), differences(column, rows, a, b),
                                printed, trend(column, rows, a, b)))
    notes = "Mean ± standard deviation over seeds; differences are paired by seed."
    if any("†" in shown for shown in lines):
        notes += (" † Older sources than the present ones: to run these again remove their folders "
                  "in out/ and their lines in the .jsonl.")
    facts = []
    for key in ("tokens", "data_id", "device", "threads", "torch", "commit"):
        seen = [str(row[key]) for by_seed in rows.values() for row in by_seed.values()]
        facts.append(f"{key} {', '.join(dict.fromkeys(seen))}")
    flags = " ".join(f"--{key}={value}" for key, value in getattr(exp, opt.scale).items())
    lines += ["", notes, f"`{flags}`; {'; '.join(facts)}."]
    return "\n".join(lines) + "\n"


def reported_claims(report):
    """The cells of every claim in a report of the results folder."""
    lines = report.read_text(encoding="utf-8").splitlines()
    rows = [shown.strip("| ").split(" | ") for shown in lines if " > " in shown]
    return [cells for cells in rows if len(cells) == len(CLAIM_HEAD)]


def claims_table():
    """Markdown: every claim as the reports have it; what has not run is one line a report."""
    folder = ROOT / "experiments"
    lines = heading(["experiment", *CLAIM_HEAD])
    for path in sorted(folder.glob("*.py")):
        if not re.search(r"^claims\b", path.read_text(encoding="utf-8"), re.M):
            continue
        reports = sorted((folder / "results").glob(f"{path.stem}-*.md"))
        for report in reports:
            name = f"[{report.stem}]({report.name})"
            waiting = []
            for cells in reported_claims(report):
                if cells[-1] == "not run":
                    waiting.append(cells[0])
                else:
                    lines.append(line([name, *cells]))
            lines += not_run(name, waiting)
        if not reports:
            exp = load_experiment(path, "cpu" if "cpu" in run_file(path) else "gpu")
            lines += not_run(path.stem, [claim_text(exp, *pair) for pair in pairs(exp)])
    return CLAIMS_TITLE + "\n".join(lines) + "\n"


def not_run(name, claims):
    """One line of the table for all of them."""
    if not claims:
        return []
    return [line([name, first_of(claims, 4), "-", "-", "-", "0", "not run"])]


def draw_losses(log, file):
    """The losses in the lines of a run's log.jsonl, over its steps."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(7, 4), layout="tight")
    axes = figure.subplots()
    for key in ("loss", "val_loss"):
        rows = [row for row in log if key in row]
        axes.plot([row["step"] for row in rows], [row[key] for row in rows], label=key)
    axes.set(xlabel="step", ylabel="nats per token")
    axes.legend()
    figure.savefig(file)


def plot(exp, rows, file):
    """Differences to the baseline: every seed, their mean with its 95% bar, and the paper's. No
    picture without any."""
    from matplotlib.figure import Figure
    shown = {}
    for name, base in exp.baseline.items():
        d = differences(exp.metric, rows, name, base)
        if d and name != base:
            shown[name] = d
    if not shown:
        file.unlink(missing_ok=True)
        return
    meaning = "one-sided 95%"
    figure = Figure(figsize=(7, 1.5 + 0.4 * len(shown)), layout="constrained")
    axes = figure.subplots()
    for y, (name, d) in enumerate(shown.items()):
        axes.plot(d, [y] * len(d), ".", color="C0", alpha=0.5)
        bar = noise(d) if len(d) > 1 else None
        axes.errorbar(mean(d), y, xerr=bar, fmt="o", color="C0", capsize=4)
        for printed in paper(exp, name, exp.baseline[name]):
            axes.plot(printed, y + 0.25, "D", color="C1", markersize=5)
            meaning = "one-sided 95%; diamonds: the paper's"
    axes.axvline(0, color="grey", linewidth=1)
    axes.set(yticks=range(len(shown)), yticklabels=shown, ylim=(len(shown) - 0.5, -0.5),
             title=file.stem)
    axes.locator_params(axis="x", nbins=6)
    figure.supxlabel(f"{exp.metric} minus {exp.minus}: {meaning}",
                     fontsize="medium")                         # wider than axes with long names
    figure.savefig(file, dpi=120)


# ---------------------------------------------------------------- the command

def data_id_of(dataset):
    for folder in (ROOT / dataset, ROOT / "data" / dataset):
        meta = folder / "meta.json"
        if dataset and folder.is_dir() and not meta.exists():
            return load_meta(folder)["data_id"]                 # of shards alone, or an error
        if dataset and meta.exists():
            with reading(meta):
                return str(json.loads(meta.read_text(encoding="utf-8"))["data_id"])
    return ""


def main(path, argv, dataset=""):
    """Run the experiment file. -> exit code: 0; 1 if a run failed; 130 after Ctrl-C."""
    defaults = vars(Options(dataset=dataset))
    if {"-h", "--help"} & {*argv}:                              # then of the options
        file = run_file(path)
        print(file["__doc__"] or "")
        print(f"variants: {', '.join(file.get('variants', ()))}\n")
    opt, files = options([str(path), *argv], globals(), defaults)
    need(files, "which experiment? Its file comes first: experiments/move_table1.py, say")
    others = files[1:]
    need(not others, f"one experiment at a time, not also {', '.join(others)}")
    need(opt.scale[:3] in ("cpu", "gpu"), f"--scale={opt.scale}: must be cpu or gpu, or what the "
         "experiment has beside them")
    need(opt.jobs >= 1, f"jobs={opt.jobs}: must be at least 1")
    need(opt.seeds == -1 or opt.seeds >= 1, f"seeds={opt.seeds}: must be at least 1")
    with reading(path):
        exp = load_experiment(path, opt.scale)
    names_of(exp, opt)                                          # before any data is prepared
    results = results_file(exp.name, opt.scale)
    need(results.exists() or not opt.table_only, f"no results in {results.relative_to(ROOT)} yet")
    runs = []
    code = 0

    def report(dataset=""):
        with reading(results):
            rows = collect(exp, opt, runs, results, dataset)
            text = table(exp, opt, rows)
        results.with_suffix(".md").write_text(text, encoding="utf-8")
        return rows

    if not opt.table_only:
        with reading(path):
            dataset = prepared_data(exp, opt)
            runs = plan(exp, opt, dataset)
        there = [place for place in (ROOT, ROOT / "data") if (place / dataset).is_dir()]
        need(there, f"dataset={dataset}: there is no such data folder")
        for run in runs:
            check_begun(run)
            check_free(run)
        with reading(results):
            make_way(results, data_id_of(dataset))
        known = recorded(runs, report(dataset))                 # refuses other data before it runs
        for number in (signal.SIGINT, signal.SIGTERM):          # a shell's & ignores SIGINT
            signal.signal(number, signal.default_int_handler)
        try:
            code = 1 if run_all(runs, opt, exp.metric, report, known) else 0
        except KeyboardInterrupt:
            print(f"\nstopped; go on with: python train.py {shlex.join([str(path), *argv])}")
            code = 130
    rows = report()
    plot(exp, rows, results.with_suffix(".png"))
    print("", results.with_suffix(".md").read_text(encoding="utf-8"), results, sep="\n")
    if code == 0 and hasattr(exp, "finish"):
        exp.finish(rows, opt.scale)
    return code


if __name__ == "__main__":
    guard("run.py")
    first, *rest = sys.argv[1:] or ["--help"]
    if first == "claims":
        need(not rest, f"claims stands alone, without {' '.join(rest)}")
        file = ROOT / "experiments" / "results" / "claims.md"
        file.write_text(claims_table(), encoding="utf-8")
        print(f"wrote {file.relative_to(ROOT)}")
    else:
        sys.exit(main(first, rest))
