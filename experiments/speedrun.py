"""Speedrun: train to a fixed validation loss in the least time. The board is results/speedrun.md.

    python experiments/speedrun.py --track=cpu --seeds=1 --batch_tokens=8192     # a try, one seed
    python experiments/speedrun.py --track=cpu --batch_tokens=8192 --note="batch of 8,192"
    python experiments/speedrun.py board                                         # the board again

An entry is train.py's --key=value. Three seeds are run, after the first one the track's dense
baseline, and they are judged by the end of the whole schedule. Who is not above the mark in the
mean, and in less of the baseline's time than the last record on the same data, gets a row in
results/speedrun.jsonl, from which the board is made. A try runs no baseline. A run that was stopped
begins anew, since its clock would have a gap; the same command skips those that have finished.
"""
import hashlib
import json
import os
import shlex
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from experiments import run as runner
from prepare_fineweb import configure, find_dataset, guard, help_text, load_meta, need, reading

track = "cpu"               # cpu | gpu
seeds = 3                   # 3, or fewer for a try
note = ""                   # what changed since the last record, for the board
machine = ""                # what the board calls this machine
out = "out"                 # folder of the runs
_defaults = {"track": track, "seeds": seeds, "note": note, "machine": machine, "out": out}


@dataclass
class Track:
    metric: str             # of result.json
    mark: float             # the highest mean that counts; another mark would be another track
    prepare: str            # the command that makes the data
    tokenizer: str
    fixed: dict             # keys of train.py that are the same for all
    baseline: dict          # what is run beside every entry
    aim: str                # a sentence for the board
    threads: int = 0        # of a CPU


# All validation tokens, before the first step and after the last.
whole = dict(eval_tokens=10 ** 12, eval_interval=10 ** 9, sample_tokens=0)
TRACKS = {
    "cpu": Track(
        "val_bpb", 1.83, "prepare_fineweb.py --source=pydocs", "bpe",
        dict(dataset="pydocs", device="cpu", block_size=256, **whole),
        dict(model="move", dense=True, depth=4, optimizer="muon", batch_tokens=4096,
             max_iters=480),
        "Meant for some three minutes of MoVE on two cores.", threads=2),
    "gpu": Track(
        "val_loss", 3.28, "prepare_fineweb.py --max_tokens=2_000_000_000", "gpt2",
        dict(dataset="fineweb_edu", device="cuda", block_size=1024, **whole),
        dict(model="move", dense=True, depth=12, optimizer="muon", batch_tokens=131072,
             max_iters=10000), "The aim: less than 30 minutes on one GPU."),
}
FIXED = ("seed", "out_dir", "init_from", "skip_steps", "dry_run")    # beside the tracks' own
GUIDE = """# Speedruns

Train to the mark in the least time. Most records change one thing in the one above: read the table
downwards.

1. Fork, install, run `python train.py --model=move`: that makes the CPU track's text.
2. Try an entry, flags of train.py:
   `python experiments/speedrun.py --seeds=1 --batch_tokens=4096 --max_iters=280`.
3. Change one thing: a key (`--batch_tokens=`), or the code of a copy: `cp model_move.py
   model_mine.py`, then `--model=mine`.
4. Find the smallest `--max_iters=` that *ends* below the mark: only whole schedules count.
5. All may change but the text, how it is evaluated, and the keys below that are "for all".
6. `python test_all.py -k mine` must pass: a model that looks ahead sets no record.
7. The baseline runs with your train.py and kernels.py: a change there is off unless a flag says so.
8. Commit, close other programs, run three seeds and the baseline: `--note="what changed"`.
9. It writes a row if the mean meets the mark and your share of the baseline's time is a new low.
10. Send a pull request with that commit, `results/speedrun.jsonl` and `speedrun.md`.

The clock is train_seconds: loading of data is in, compiling and evaluating are out; "in all" is the
whole process, with them. Machines are compared by the ratio to the baseline, which runs between the
first seed and the second. Texts are never compared: each data_id has a board of its own. The text
comes from your Python, numpy, networkx and torch: with other versions you begin a new board.
"""
HEAD = ["date", "commit", "entry", "steps", "mean of seeds", "seconds", "in all", "of baseline",
        "machine", "what changed"]


# ---------------------------------------------------------------- the runs

def as_flags(keys):
    return [f"--{key}={value}" for key, value in keys.items()]


def key_of(flag):
    return flag.removeprefix("--").partition("=")[0]


def model_of(flags):
    names = [flag.partition("=")[2] for flag in flags if key_of(flag) == "model"]
    return names[-1] if names else "move"


def plan(opt, flags, data_id):
    """The entry's seeds, and the baseline after the first; a try has none. Other flags, code, data
    or number of seeds have another folder."""
    track = TRACKS[opt["track"]]
    code = [runner.source_hash(name) for name in (model_of(flags), track.baseline["model"])]
    beside = [(ROOT / file).read_text(encoding="utf-8")
              for file in ("sample.py", "prepare_fineweb.py")]
    same = repr([flags, track, code, beside, data_id, opt["seeds"]])
    name = hashlib.sha256(same.encode()).hexdigest()[:8]

    def a_run(side, seed, own):
        folder = f"{opt['out']}/speedrun-{opt['track']}/{name}/{side}/s{seed}"
        return runner.Run(side, seed, folder, [*own, *as_flags({**track.fixed, "seed": seed})])

    own = [f"--model={model_of(flags)}", *flags]                # run.py wants the model first
    runs = [a_run("entry", seed, own) for seed in range(opt["seeds"])]
    if opt["seeds"] == 3:
        runs.insert(1, a_run("baseline", 0, as_flags(track.baseline)))
    return runs


def run_in_order(runs, metric):
    for run in runs:
        if not run.result():                                    # from the start, clocks and all
            for name in ("ckpt.pt", "flags.txt"):
                (ROOT / run.folder / name).unlink(missing_ok=True)
        failed = runner.run_all([run], runner.Options(), metric, lambda: None, set())
        need(not failed, f"the run failed: its last lines are above, all in {run.folder}/train.log")


def seconds_in_all(run):
    """From the start of the process to its result."""
    folder = ROOT / run.folder
    return (folder / "result.json").stat().st_mtime - (folder / "flags.txt").stat().st_mtime


# ---------------------------------------------------------------- rows and verdict

def row_of(opt, flags, runs):
    metric = TRACKS[opt["track"]].metric
    entries = [run for run in runs if run.name == "entry"]
    results = [run.result() for run in entries]
    baseline = next((run.result() for run in runs if run.name == "baseline"), None)
    last = results[-1]
    changed = any(result["source_hash"] != last["source_hash"] for result in results)
    need(not changed, f"the code changed while it ran: remove {entries[0].folder} and run it again")
    every = [run.result() for run in runs]
    for key in ("device", "threads", "torch", "data_id"):
        need(len({result[key] for result in every}) == 1, f"its runs differ in {key}: remove "
             f"{Path(entries[0].folder).parent.parent} and run it again")
    for result in every:
        need(len(every) < 3 or not result["commit"].endswith("-dirty"), "the code changed while it "
             f"ran: remove {Path(entries[0].folder).parent.parent} and run it again")
    same = ("model", "commit", "source_hash", "data_id", "dtype", "device", "threads", "torch",
            "tokens", "params")
    return {"track": opt["track"], "date": str(date.today()), **{key: last[key] for key in same},
            "flags": flags, "note": opt["note"], "machine": opt["machine"] or last["device"],
            "steps": last["config"]["max_iters"],
            "values": [result[metric] for result in results],
            "seconds": [result["train_seconds"] for result in results],
            "in_all": [seconds_in_all(run) for run in entries],
            "baseline_value": baseline and baseline[metric],
            "baseline_seconds": baseline and baseline["train_seconds"]}


def ratio(row):
    """The mean time of the entry's seeds in units of the baseline's."""
    return mean(row["seconds"]) / row["baseline_seconds"]


def read_rows():
    file = ROOT / "experiments/results/speedrun.jsonl"
    rows = []
    if file.exists():
        with reading(file):
            rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            board(rows)                                         # has all that it wants
    return file, rows


def verdict(row, rows):
    """-> whether it is a record, and why."""
    track = TRACKS[row["track"]]
    if mean(row["values"]) > track.mark:
        return False, f"missed the mark {track.mark}"
    if len(row["values"]) < 3:
        return False, f"met the mark {track.mark}: a try, three seeds make a row"
    rivals = [ratio(old) for old in rows
              if (old["track"], old["data_id"]) == (row["track"], row["data_id"])]
    if rivals and ratio(row) >= min(rivals):
        return False, f"met the mark {track.mark}, but the record is {min(rivals):.3f}"
    return True, f"met the mark {track.mark}: a record"


# ---------------------------------------------------------------- the board

def board_line(row):
    note = " ".join(row["note"].split()).replace("|", "\\|")     # it stays in its cell
    return runner.line([
        row["date"], row["commit"], f"`{shlex.join(row['flags'])}`", f"{row['steps']:,}",
        runner.text(row["values"]), f"{mean(row['seconds']):.0f}", f"{mean(row['in_all']):.0f}",
        f"{ratio(row):.3f}", f"{row['machine']}, {row['dtype']}, {row['threads']} threads",
        note])


def baselines(records):
    """What the baseline came to on each machine, and in how many seconds."""
    found = []
    for machine in dict.fromkeys(row["machine"] for row in records):
        here = [row for row in records if row["machine"] == machine]
        values = sorted({f"{row['baseline_value']:.4f}" for row in here})
        spent = sorted(row["baseline_seconds"] for row in here)
        ends = dict.fromkeys(f"{seconds:.0f}" for seconds in (spent[0], spent[-1]))
        found.append(f"{', '.join(values)} after {' to '.join(ends)} seconds on {machine}")
    return "; ".join(found)


def board(rows):
    """Markdown: the guide, then each track with the records on each data folder."""
    lines = [GUIDE]
    for name, track in TRACKS.items():
        fixed = " ".join(as_flags(track.fixed))
        threads = f", {track.threads} threads" if track.threads else ""
        lines += [f"## Track {name}: {track.metric} {track.mark}", "", track.aim,
                  f"Text: `python {track.prepare}`. For all: `{fixed}`{threads}.",
                  f"Baseline: `{' '.join(as_flags(track.baseline))}`.", ""]
        mine = [row for row in rows if row["track"] == name]
        for data_id in dict.fromkeys(row["data_id"] for row in mine):
            records = [row for row in mine if row["data_id"] == data_id]
            lines += [f"Data {data_id}; the baseline beside these: {baselines(records)}.", "",
                      *runner.heading(HEAD), *map(board_line, records), ""]
        if not mine:
            lines += ["No record yet.", ""]
    return "\n".join(lines)


# ---------------------------------------------------------------- the command

def checked(opt, flags):
    """What would be accepted in silence and make no fair entry. -> the data's id"""
    need(opt["track"] in TRACKS, f"track={opt['track']}: choose {' or '.join(TRACKS)}")
    need(1 <= opt["seeds"] <= 3, f"seeds={opt['seeds']}: must be 3, or 1 or 2 for a try")
    track = TRACKS[opt["track"]]
    for flag in flags:
        need(key_of(flag) not in (*FIXED, *track.fixed), f"{flag}: the track decides that")
    meta = load_meta(find_dataset(track.fixed["dataset"]))
    need(meta["tokenizer"] == track.tokenizer, f"{track.fixed['dataset']} has tokens of "
         f"{meta['tokenizer']}, not {track.tokenizer}: make it by python {track.prepare}")
    if opt["seeds"] == 3:
        need(opt["note"], "a record says what changed: --note=\"...\" (--seeds=1 is a try)")
        changed = runner.git("status", "--porcelain", "--", ".", ":!experiments/results").stdout
        need(runner.commit() and not changed, "a record names the commit that has its code: commit "
             "your changes first (--seeds=1 is a try)")
    return meta["data_id"]


def main(argv):
    if {"-h", "--help"} & set(argv):
        print(__doc__ + "\n" + help_text(Path(__file__).read_text(encoding="utf-8"), _defaults))
        return
    flags = [arg for arg in argv if arg[:2] == "--" and key_of(arg) not in _defaults]
    overrides, others = configure([arg for arg in argv if arg not in flags], _defaults)
    opt = {**_defaults, **overrides}
    need(others in ([], ["board"]), f"what is {' '.join(others)}? Options are written --key=value")
    file, rows = read_rows()
    if not others:
        runs = plan(opt, flags, checked(opt, flags))
        if TRACKS[opt["track"]].threads:
            os.environ["OMP_NUM_THREADS"] = str(TRACKS[opt["track"]].threads)
        run_in_order(runs, TRACKS[opt["track"]].metric)
        row = row_of(opt, flags, runs)
        record, why = verdict(row, rows)
        print(f"{runner.text(row['values'])} after {mean(row['seconds']):.0f} s: {why}")
        if row["baseline_seconds"]:
            print(f"{ratio(row):.3f} of the time of the baseline, which ends at "
                  f"{row['baseline_value']:.4f}")
        if not record:
            return
        rows.append(row)
        runner.add_line(file, row)
    file.with_suffix(".md").write_text(board(rows), encoding="utf-8")
    print(f"wrote {file.with_suffix('.md')}")


if __name__ == "__main__":
    guard("speedrun.py")
    main(sys.argv[1:])
