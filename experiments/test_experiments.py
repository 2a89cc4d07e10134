"""Tests of run.py, tasks.py, analysis.py and the tables; `python test_all.py` runs them too."""
import collections
import itertools
import json
import lzma
import math
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import networkx
import numpy as np
import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pytest import approx
from torch.testing import assert_close

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from test_all import (ROOT, TINY, clustered, hier_runs, log_of, make, midus_base, midus_grown,
                      midus_run, parametrize, prepare_bytes, rows, slow, some_tokens, text_folder,
                      train, train_midus, write_jsonl)

import model_midus
import model_move
import sample
from experiments import analysis, instruct, lime_arithmetic, midus_rates, mutants, tasks
from experiments import run as runner
from experiments.tasks import read_jsonl
from experiments.topics import Retriever
from prepare_fineweb import ConfigError, TokenShards, get_tokenizer, load_meta, lock

# ================================================================ run.py

real_plot = runner.plot
STAND_IN = '''"""Stands in for train.py: leaves a checkpoint and a result, the score of its seed."""
import json, os, signal, sys, time
from pathlib import Path

args = dict(flag[2:].split("=", 1) for flag in sys.argv[1:])
out = Path(args["out_dir"])
with open("calls.jsonl", "a") as file:
    print(json.dumps({**args, "run": "/".join(out.parts[-2:])}), file=file)
with open("threads.txt", "a") as file:
    print(os.environ.get("OMP_NUM_THREADS"), file=file)
if args.get("init_from") == "resume":
    args |= json.loads((out / "ckpt.pt").read_text())
elif "init_from" in args:
    Path(args["init_from"]).read_text()                        # is there
(out / "ckpt.pt").write_text(json.dumps(args))
if args.get("fail") == "yes":
    print("step 1\\nthe gradients broke")
    sys.exit(3)
if "waits" in args:
    try:
        Path("pid.txt").write_text(str(os.getpid()))
        if args["waits"] == "interrupt":
            os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)
    except KeyboardInterrupt:
        (out / "ckpt.pt").write_text(json.dumps({**args, "saved": "after SIGINT"}))
    sys.exit(1)
data = Path(args["dataset"], "meta.json") if "dataset" in args else None
score = float(args["score"].split(":")[int(args["seed"])])
result = {"model": args["model"], "seed": int(args["seed"]), "val_bpb": score,
          "train_loss": 5 * score,
          "curve": [{"step": n, "val_bpb": score * (5 - n)} for n in range(5)],
          "params": {"total": int(args.get("total", 1000))}, "step_ms": float(args.get("ms", 10)),
          "flops_per_token": 6e6, "device": "cpu", "threads": int(args.get("threads", 1)),
          "tokens": 4096, "torch": "2", "commit": "abc", "config": {"folder": "private"},
          "data_id": json.loads(data.read_text())["data_id"] if data else "d0",
          "source_hash": Path("hash.txt").read_text(), "model_config": {}}
(out / "result.json").write_text(json.dumps(result))
'''


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A root folder of its own, with a stand-in for the trainer and a model named toy."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setattr(runner, "plot", lambda *arguments: None)
    (tmp_path / "experiments").mkdir()
    (tmp_path / "train.py").write_text(STAND_IN)
    (tmp_path / "kernels.py").touch()
    (tmp_path / "model_toy.py").write_text("width = 1\n")
    (tmp_path / "hash.txt").write_text(runner.source_hash("toy"))
    yield tmp_path
    signal.signal(signal.SIGTERM, signal.SIG_DFL)              # run.py takes it for Ctrl-C


def experiment(lab, body):
    """Writes an experiment file; a name that is in the body has its value of there."""
    path = lab / "experiments" / "toy_table.py"
    path.write_text(HEAD + textwrap.dedent(body))
    return path


def calls(lab):
    """The flags of every start of the stand-in so far, and its "run", variant/seed."""
    return list(read_jsonl(lab / "calls.jsonl"))


def runs_of(lab):
    return [call["run"] for call in calls(lab)]


def forget(lab, name, seed):
    """Removes a run's row, as a person does who wants it again; seed "." is any."""
    file = lab / f"{RESULTS}.jsonl"
    row = f'(?m)^{{"variant": "{name}", "model": "toy", "seed": {seed},.*\n'
    file.write_text(re.sub(row, "", file.read_text()))


def report_of(lab):
    """{first cell: cells} of the table in the results folder."""
    lines = re.findall(r"(?m)^\| (.*) \|$", (lab / f"{RESULTS}.md").read_text())
    rows = [line.split(" | ") for line in lines]
    return {cells[0]: cells for cells in rows}


HEAD = '''"""A toy."""
model, metric, baseline, seeds = "toy", "val_bpb", "standard", 2
cpu = dict(steps=7)
'''
TOYS = '''
    seeds, gpu, also = 3, dict(steps=7), ["train_loss"]
    prepare = "--source=x --out=data/new"
    claims = ["standard > Big x1 > Big x2", "train_loss: standard > Big x1"]
    variants = {
        "standard": (dict(score="1.0:1.2:1.1"), .838),
        "Big x1": (dict(score="0.9:1.0:1.05", total=1500, ms=12), .822),
        "Big x2": (dict(score="0.8", ms=0), None, 1),
        "tuned": (dict(score="0.7:0.8:0.9", init_from="@standard", threads=2, cpu=dict(steps=9),
                       gpu=dict(steps=99)), None),
        "grown": (dict(score="0.75:0.75:0.75", init_from="@Big x2"), None),
        "far": (dict(score="0.8", init_from="@other/base", dataset="@_old"), None, 1),
    }
'''
RESULTS = "experiments/results/toy_table-cpu"
PREPARE = """import sys, pathlib
open("prepared.txt", "a").write(" ".join(sys.argv[1:]))
for name in ("new", "new_old"):
    folder = pathlib.Path("data", name)
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text('{"data_id": "id-%s"}' % name)
"""


@pytest.fixture
def finished(lab):
    """The experiment file of a table that was run in two parts."""
    (lab / "prepare_fineweb.py").write_text(PREPARE)
    (lab / "out/other-cpu/base/s0").mkdir(parents=True)
    for name in ("ckpt.pt", "result.json"):
        (lab / "out/other-cpu/base/s0" / name).touch()
    other = experiment(lab, 'baseline = "base"\nvariants = {"base": ({}, None)}')
    other.rename(lab / "experiments/other.py")
    path = experiment(lab, TOYS)
    waiting = "standard > Big x1; Big x1 > Big x2; train_loss: standard > Big x1"
    assert f"| toy_table | {waiting} | - | - | - | 0 | not run |" in runner.claims_table()
    assert runner.main(path, ["--seeds=1", "--only=Big x1"]) == 0
    of_report = "| [toy_table-cpu](toy_table-cpu.md) | Big x1 > Big x2 | - | - | - | 0 | not run |"
    assert of_report in runner.claims_table()
    assert runner.main(path, []) == 0
    return path


LONGER = '''
    cpu_long = dict(steps=8)
    variants = {
        "standard": (dict(score="1"), None),
        "other": ({}, None),
        "tuned": (dict(score="1", cpu=dict(steps=9), cpu_long=dict(steps=11)), None),
    }


    def finish(rows, scale):
        open("finished.txt", "w").write(f"{scale} {len(rows)}")
'''


def test_one_row_runs_with_its_baseline_at_a_scale_of_the_files_own(lab):
    """A function `finish` comes after the table."""
    path = experiment(lab, LONGER)
    assert runner.main(path, ["--scale=cpu_long", "--seeds=1", "--only=tuned"]) == 0
    assert runs_of(lab) == ["standard/s0", "tuned/s0"]
    assert [call["steps"] for call in calls(lab)] == ["8", "11"]
    assert Path("finished.txt").read_text() == "cpu_long 3"


STARTS = """
standard/s0 0 toy 7 data/new
big-x1/s0 0 toy 7 data/new
big-x2/s0 0 toy 7 data/new
tuned/s0 0 toy 9 data/new out/toy_table-cpu/standard/s0/ckpt.pt
grown/s0 0 toy 7 data/new out/toy_table-cpu/big-x2/s0/ckpt.pt
far/s0 0 toy 7 data/new_old out/other-cpu/base/s0/ckpt.pt
standard/s1 1 toy 7 data/new
big-x1/s1 1 toy 7 data/new
tuned/s1 1 toy 9 data/new out/toy_table-cpu/standard/s1/ckpt.pt
grown/s1 1 toy 7 data/new out/toy_table-cpu/big-x2/s0/ckpt.pt
standard/s2 2 toy 7 data/new
big-x1/s2 2 toy 7 data/new
tuned/s2 2 toy 9 data/new out/toy_table-cpu/standard/s2/ckpt.pt
grown/s2 2 toy 7 data/new out/toy_table-cpu/big-x2/s0/ckpt.pt
"""


def test_an_experiment_runs_seed_by_seed_and_goes_on(finished, lab, capsys):
    """"@_old" is the folder beside the experiment's own; "@other/base" a run of another file, and
    "@Big x2" has one seed alone."""
    flags = ("run", "seed", "model", "steps", "dataset", "init_from")
    started = [" ".join(call[key] for key in flags if key in call) for call in calls(lab)]
    assert started == STARTS.split("\n")[1:-1]
    assert (lab / "prepared.txt").read_text() == "--source=x --out=data/new"       # once
    capsys.readouterr()
    (lab / "out/toy_table-cpu/big-x1/s1/result.json").unlink()     # stopped after a checkpoint
    forget(lab, "Big x1", 1)
    shutil.rmtree(lab / "out/toy_table-cpu/standard/s1")           # never begun
    forget(lab, "standard", 1)
    shutil.rmtree(lab / "out/toy_table-cpu/grown")                 # has its rows: made elsewhere
    assert runner.main(finished, []) == 0
    anew, resumed = calls(lab)[14:]
    assert anew == calls(lab)[6]
    assert resumed == dict(model="toy", init_from="resume", run="big-x1/s1",
                           out_dir="out/toy_table-cpu/big-x1/s1")
    printed = capsys.readouterr().out
    assert "Big x1, seed 0: finished earlier" in printed
    assert "2 runs to go" in printed and "1 to go, about 0.0 hours at this pace" in printed


def test_the_table_and_its_picture(finished, lab, monkeypatch):
    """By hand: differences -.1 -.2 -.05, mean -.1167, deviation .0764, bound .1288; the stand-in's
    curve is 4, 3 and 1 times the end at a quarter, a half and the whole. Step times are compared
    between runs on as many threads."""
    text = (lab / f"{RESULTS}.md").read_text()
    lines = text.splitlines()
    assert lines[:3] == ["# toy_table, scale cpu", "", "A toy."]
    table = [line for line in lines if line.startswith("| ") and "---" not in line]
    assert table[:5] + table[7:] == [
        "| variant | parameters | val_bpb | minus standard | paper | paper's difference "
        "| train_loss | MFLOP a token | step time | seeds |",
        "| standard | 1,000 | 1.1000 ± 0.1000 | - | 0.838 | - | 5.5000 ± 0.5000 | 6.0 | 1.00x "
        "| 3 |",
        "| Big x1 | +500 | 0.9833 ± 0.0764 | -0.1167 ± 0.0764 | 0.822 | -0.0160 "
        "| 4.9167 ± 0.3819 | 6.0 | 1.20x | 3 |",
        "| Big x2 | +0 | 0.8000 | -0.2000 | - | - | 4.0000 | 6.0 | - | 1 |",
        "| tuned | +0 | 0.8000 ± 0.1000 | -0.3000 ± 0.1000 | - | - | 4.0000 ± 0.5000 | 6.0 | - "
        "| 3 |",
        "| claim | difference | paper's | trend: 1/4, 1/2, whole | seeds | verdict |",
        "| standard > Big x1 | +0.1167 ± 0.0764 | +0.0160 | +0.467, +0.350, +0.117 | 3 "
        "| inside noise |",
        "| Big x1 > Big x2 | +0.1000 | - | +0.400, +0.300, +0.100 | 1 | sign agrees (1 seed) |",
        "| train_loss: standard > Big x1 | +0.5833 ± 0.3819 | - | -, -, - | 3 | inside noise |"]
    assert lines[-1] == ("`--steps=7`; tokens 4096; data_id id-new, id-new_old; device cpu; "
                         "threads 1, 2; torch 2; commit abc.")
    claim = "| [toy_table-cpu](toy_table-cpu.md) | standard > Big x1 | +0.1167"
    assert claim in runner.claims_table()
    assert "private" not in (lab / f"{RESULTS}.jsonl").read_text()
    shutil.rmtree(lab / "out")
    monkeypatch.setattr(runner, "plot", real_plot)
    bars = []
    monkeypatch.setattr(Axes, "errorbar", lambda axes, x, y, xerr, **_: bars.append((x, xerr)))
    assert runner.main(finished, ["--table_only=True"]) == 0   # from the results file alone
    assert bars[0] == approx((-.1167, .1288), abs=1e-4)
    assert bars[1] == (approx(-.2), None)
    assert (lab / f"{RESULTS}.md").read_text() == text
    assert (lab / f"{RESULTS}.png").read_bytes().startswith(b"\x89PNG")
    assert len(runner.rows_of(finished, "cpu")["standard"]) == 3
    whole = (lab / f"{RESULTS}.jsonl").read_text().splitlines()
    alone = [line for line in whole if '"variant": "standard"' in line]
    (lab / f"{RESULTS}.jsonl").write_text("\n".join(alone))
    assert runner.main(finished, ["--table_only=True"]) == 0
    assert not (lab / f"{RESULTS}.png").exists(), "there is nothing to compare"
    (lab / f"{RESULTS}.jsonl").write_text("")
    assert runner.rows_of(finished, "cpu") == {}
    with pytest.raises(ConfigError, match="no results in experiments/results/toy_table-cpu.jsonl"):
        runner.results_of(finished, "cpu")


def test_rows_of_older_sources_are_marked(finished, lab):
    def marked():
        runner.main(finished, ["--table_only=True"])
        return [name[:-2] for name in report_of(lab) if "†" in name]

    (lab / "model_toy.py").write_text("# a comment\nwidth = 1\n")
    assert marked() == []
    (lab / "model_toy.py").write_text("width = 2\n")
    assert marked() == ["standard", "Big x1", "Big x2", "tuned", "grown", "far"]
    (lab / "hash.txt").write_text(runner.source_hash("toy"))
    shutil.rmtree(lab / "out/toy_table-cpu/standard")
    forget(lab, "standard", ".")
    runner.main(finished, [])
    assert marked() == ["Big x1", "Big x2", "tuned", "grown", "far"]


def test_rows_of_older_sources_that_train_alike_are_not_marked(finished, lab, monkeypatch):
    from experiments import same
    older = lab / "older"
    older.mkdir()
    for file in ("model_toy.py", "kernels.py", "train.py"):
        shutil.copy(lab / file, older)
    monkeypatch.setattr(same, "ways", lambda model: {"baseline": [], "memory": []})

    def marked():
        runner.main(finished, ["--table_only=True"])
        return any("†" in name for name in report_of(lab))

    def alike(here):
        monkeypatch.setattr(same, "losses",
                            lambda tree, *run: [3.0] if tree == older else here)
        return same.compare("toy", older, "--dataset=text")

    assert alike([2.0]) and not marked(), "not even run: the code is the same"
    (lab / "model_toy.py").write_text("width = 2\n")
    assert not alike([2.0]) and marked()
    assert alike([3.0]) and not marked()
    shutil.copy(lab / "model_toy.py", older)
    (lab / "model_toy.py").write_text("width = 3\n")
    assert marked()
    assert alike([3.0]) and not marked(), "alike by way of the second"


@slow
def test_twelve_steps_are_the_same_twice(text_folder, tmp_path):
    from experiments import same
    ways = same.ways("midus")
    assert [*ways][0] == "baseline-adamw" and [*ways][-1] == "start"
    common = ["--model=midus", "--n_head=2", "--n_kv_head=2", "--n_keys=8", "--block_size=16",
              f"--dataset={text_folder}"]

    def of(name):
        return same.losses(runner.ROOT, name, [*common, *ways[name]], tmp_path)

    baseline, start = of("baseline-muon"), of("start")
    assert len(baseline) > 12 and baseline != start
    assert start == of("start")


def test_a_run_begun_with_other_settings_or_data_is_not_continued(finished, lab):
    text = finished.read_text()
    finished.write_text(text.replace("cpu = dict(steps=7)", "cpu = dict(steps=8)"))
    message = r"standard/s0 was begun with other settings:\n.*--steps=7.*\n.*\n.*--steps=8"
    with pytest.raises(ConfigError, match=message):
        runner.main(finished, [])
    runner.main(finished, ["--table_only=True"])
    assert "standard" not in report_of(lab)                    # nor is its result shown
    finished.write_text(text)
    (lab / "data/new/meta.json").write_text('{"data_id": "id-b"}')
    message = "different data .data_id id-b, id-new. are never mixed: move experiments/results/toy"
    with pytest.raises(ConfigError, match=message):
        runner.main(finished, [])
    (lab / "data/new/meta.json").write_text('{"data_id": "id-new"}')
    (lab / "data/new_old/meta.json").write_text('{"data_id": "id-c"}')     # that of "far" alone
    with pytest.raises(ConfigError, match="different data .data_id id-c, id-new_old. are never"):
        runner.main(finished, [])
    assert len(calls(lab)) == 14                               # refused before the first run


def test_rows_of_another_text_make_way_and_come_back(finished, lab, capsys):
    meta, file = lab / "data/new/meta.json", lab / f"{RESULTS}.jsonl"
    before = file.read_text()
    for data_id, starts in (("id-b", 28), ("id-new", 28), ("id-b", 28)):
        shutil.rmtree(lab / "out/toy_table-cpu", ignore_errors=True)       # as in a fresh clone
        meta.write_text(json.dumps({"data_id": data_id}))
        assert runner.main(finished, []) == 0
        assert len(calls(lab)) == starts, "each text's rows are made once"
        assert (file.read_text() == before) == (data_id == "id-new")
        other = "id-new" if data_id == "id-b" else "id-b"
        said = f"they are in toy_table-cpu.{other}.jsonl now"
        assert said in capsys.readouterr().out and file.with_suffix(f".{other}.jsonl").exists()
    file.with_suffix(".id-b.jsonl").touch()
    meta.write_text('{"data_id": "id-new"}')
    with pytest.raises(ConfigError, match="both have rows of data_id id-b: move one away"):
        runner.main(finished, [])


def test_rows_of_other_data_alone_are_not_written_over(finished, lab):
    """A base on "@_old", run by itself, says nothing of the text beside it."""
    path = experiment(lab, """
        baseline = {}
        variants = {
            "base": (dict(score="1", dataset="@_old"), None, 1),
            "standard": (dict(score="2"), None, 1),
        }
    """)
    (lab / f"{RESULTS}.jsonl").unlink()
    meta, file = lab / "data/new/meta.json", lab / f"{RESULTS}.jsonl"
    for data_id, only in (("id-new", ""), ("id-b", "base")):
        shutil.rmtree(lab / "out/toy_table-cpu")
        meta.write_text(json.dumps({"data_id": data_id}))
        assert runner.main(path, ["--dataset=data/new", f"--only={only}"]) == 0
    before = file.read_text()
    meta.write_text('{"data_id": "id-new"}')
    with pytest.raises(ConfigError, match="would come in its place: move one away"):
        runner.main(path, ["--dataset=data/new"])
    assert file.read_text() == before and len(before.splitlines()) == 1


def test_a_run_begun_with_other_code_is_not_continued(lab):
    path = experiment(lab, 'variants = {"standard": (dict(fail="yes"), None)}')
    for text in ("width = 1\n", "# no code\nwidth = 1\n"):
        (lab / "model_toy.py").write_text(text)
        assert runner.main(path, ["--seeds=1"]) == 1
    assert ["init_from" in call for call in calls(lab)] == [False, True]
    (lab / "model_toy.py").write_text("width = 2\n")
    with pytest.raises(ConfigError, match="standard/s0 was begun with other code"):
        runner.main(path, ["--seeds=1"])
    assert len(calls(lab)) == 2


def test_a_run_that_went_on_by_hand_is_not_taken(lab):
    path = experiment(lab, 'variants = {"standard": (dict(score="1:1", rate=0.5), None)}')
    runner.main(path, ["--seeds=1"])
    forget(lab, "standard", 0)
    file = lab / "out/toy_table-cpu/standard/s0/result.json"
    for config in ({"steps": 7, "rate": 0.5, "dataset": "elsewhere"}, {"steps": 9}):
        file.write_text(json.dumps({**json.loads(file.read_text()), "config": config}))
        if config["steps"] == 7:
            assert runner.main(path, ["--seeds=1"]) == 0
    message = "standard/s0 has a result of steps=9, which is now to be 7"
    with pytest.raises(ConfigError, match=message):
        runner.main(path, ["--seeds=1"])


def test_what_a_run_is_to_be_is_written_once(lab):
    """A disk that is full when it goes on leaves it as it was."""
    path = experiment(lab, 'variants = {"standard": (dict(fail="yes"), None)}')
    runner.main(path, ["--seeds=1"])
    memo = lab / "out/toy_table-cpu/standard/s0/flags.txt"
    os.utime(memo, (1, 1))
    runner.main(path, ["--seeds=1"])
    assert len(calls(lab)) == 2 and memo.stat().st_mtime == 1


def test_a_variant_may_be_left_out_at_one_scale_and_a_base_may_have_a_slash(lab):
    path = experiment(lab, """
        cpu_4M = cpu_9M = dict(steps=8)
        prepare = dict(cpu="")
        variants = {
            "standard": ({}, None),
            "longer": (dict(cpu=None, cpu_4M=dict(rate=2)), None),
            "bank 1/4": ({}, None),
            "tuned": (dict(init_from="@bank 1/4"), None),
        }
    """)
    found = {scale: runner.load_experiment(path, scale) for scale in ("cpu", "cpu_4M", "cpu_9M")}
    assert ["longer" in exp.variants for exp in found.values()] == [False, True, False]
    exp = found["cpu_4M"]
    assert runner.settings(exp, "cpu_4M", "longer") == dict(model="toy", steps=8, rate=2)
    assert runner.plan(exp, runner.Options(scale="cpu_4M"), "")[3].needs.endswith("bank-1-4/s0")
    with pytest.raises(ConfigError, match="`prepare` has no cpu_4M: add it, or give --dataset="):
        runner.prepared_data(exp, runner.Options(scale="cpu_4M"))
    given = runner.Options(scale="cpu_4M", dataset="books")
    assert runner.prepared_data(exp, given) == "books"


STARTED = '''
    variants = {
        "standard": (dict(score="1:1"), None),
        "tuned": (dict(score="3:3", init_from="@standard"), None),
    }
'''


def test_a_run_that_started_from_another_base_is_not_taken(lab):
    path = experiment(lab, STARTED)
    assert runner.main(path, ["--seeds=1"]) == 0
    path = experiment(lab, STARTED.replace("1:1", "2:2"))
    runner.main(path, ["--table_only=True"])
    assert "tuned" not in report_of(lab)
    shutil.rmtree(lab / "out/toy_table-cpu/standard")
    message = r"tuned/s0 was begun with other settings:\n.*\n.*1:1.*\n.*\n.*\n.*2:2"
    with pytest.raises(ConfigError, match=message):
        runner.main(path, ["--seeds=1"])
    shutil.rmtree(lab / "out/toy_table-cpu/tuned")
    assert runner.main(path, ["--seeds=1"]) == 0
    assert runs_of(lab) == 2 * ["standard/s0", "tuned/s0"]
    assert report_of(lab)["tuned"][3] == "+1.0000"


FROM_OTHER = """
    seeds = 1
    baseline = "tuned"
    variants = {"tuned": (dict(score="3", init_from="@other/standard"), None)}
"""


def test_a_base_of_another_experiment_must_have_that_ones_settings(lab, capsys):
    """Its data, seed and start may be written otherwise."""
    other = lab / "experiments/other.py"
    experiment(lab, STARTED).rename(other)
    assert runner.main(other, ["--seeds=1", "--only=standard"]) == 0
    text = other.read_text()
    other.write_text(text.replace("1:1", "2:2"))
    path = experiment(lab, FROM_OTHER)
    assert runner.main(path, []) == 1
    said = capsys.readouterr().out
    assert "tuned, seed 0: needs out/other-cpu/standard/s0, which has other settings" in said
    assert runs_of(lab) == ["standard/s0"]
    other.write_text(text)
    assert runner.main(path, []) == 0
    assert runs_of(lab) == ["standard/s0", "tuned/s0"]


def test_a_row_alone_runs_with_all_that_it_starts_from(lab):
    path = experiment(lab, STARTED.replace("""    }
""", """        "third": (dict(score="4:4", init_from="@tuned"), None),
        "fourth": (dict(score="5:5", init_from="@third"), None),
    }
    baseline = dict.fromkeys(variants, "third")
"""))
    assert runner.main(path, ["--seeds=1", "--only=third"]) == 0
    assert runs_of(lab) == ["standard/s0", "tuned/s0", "third/s0"]


def test_a_base_that_is_made_again_for_its_checkpoint_keeps_its_row(lab):
    path = experiment(lab, STARTED)
    assert runner.main(path, ["--seeds=1"]) == 0
    before = (lab / f"{RESULTS}.jsonl").read_text()
    shutil.rmtree(lab / "out")                                  # another machine, say
    (lab / "hash.txt").write_text("another")
    more = '    variants["late"] = (dict(score="4:4", init_from="@standard"), None)\n'
    path = experiment(lab, STARTED + more)
    assert runner.main(path, ["--seeds=1"]) == 0
    assert runs_of(lab)[2:] == ["standard/s0", "late/s0"]
    assert (lab / f"{RESULTS}.jsonl").read_text().startswith(before)


def test_runs_and_rows_of_before_bases_were_noted_are_taken(lab):
    path = experiment(lab, STARTED)
    assert runner.main(path, ["--seeds=1"]) == 0
    rows = lab / f"{RESULTS}.jsonl"
    flags = lab / "out/toy_table-cpu/tuned/s0/flags.txt"
    flags.write_text(flags.read_text().split("\n")[0])
    rows.write_text(re.sub(r', "start": \[.*\]', "", rows.read_text()))
    assert "start" not in rows.read_text()
    assert runner.main(path, ["--seeds=1"]) == 0
    assert "tuned" in report_of(lab) and len(calls(lab)) == 2
    rows.unlink()
    assert runner.main(path, ["--seeds=1"]) == 0               # its base is not known: not said
    assert "tuned" in report_of(lab) and "start" not in rows.read_text()


def test_a_full_disk_leaves_the_results_that_there_are(finished, lab, monkeypatch):
    before = (lab / f"{RESULTS}.jsonl").read_text()
    monkeypatch.setattr(runner.os, "replace", Mock(side_effect=OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        runner.main(finished, ["--table_only=True"])
    assert before and (lab / f"{RESULTS}.jsonl").read_text() == before
    assert not list((lab / RESULTS).parent.glob("*.tmp"))


def test_a_run_that_another_process_has_finished_meanwhile_is_left_alone(lab):
    exp = runner.load_experiment(experiment(lab, STARTED.replace(', init_from="@standard"', "")),
                                 "cpu")
    first, second = runner.plan(exp, runner.Options(seeds=1), "")

    def finish_the_other():
        folder = lab / second.folder
        folder.mkdir(parents=True)
        (folder / "result.json").write_text('{"val_bpb": 3}')

    failed = runner.run_all([first, second], runner.Options(), "val_bpb", finish_the_other, set())
    assert failed == [] and runs_of(lab) == ["standard/s0"]


def test_a_run_that_another_process_is_at_work_on_is_left_alone(lab):
    path = experiment(lab, STARTED)
    folder = lab / "out/toy_table-cpu/tuned/s0"
    folder.mkdir(parents=True)
    with lock(folder):
        with pytest.raises(ConfigError, match="tuned/s0 is in use by the process [0-9]+: wait"):
            runner.main(path, ["--seeds=1"])
        assert not (lab / "calls.jsonl").exists(), "refused before the first run"
        assert runner.main(path, ["--seeds=1", "--only=standard"]) == 0
    assert runner.main(path, ["--seeds=1"]) == 0
    assert runs_of(lab) == ["standard/s0", "tuned/s0"]


def test_a_damaged_file_is_named(lab):
    path = experiment(lab, STARTED)
    assert runner.main(path, ["--seeds=1"]) == 0
    (lab / "experiments/results/same.jsonl").write_text("{")
    with pytest.raises(ConfigError, match="same.jsonl cannot be used"):
        runner.main(path, ["--table_only=True"])
    (lab / "experiments/results/same.jsonl").unlink()
    result = lab / "out/toy_table-cpu/tuned/s0/result.json"
    result.write_text('{"val_bpb": ')
    with pytest.raises(ConfigError, match="tuned/s0/result.json cannot be used"):
        runner.main(path, ["--seeds=1"])


def test_of_two_rows_of_one_run_none_is_dropped(lab):
    """Two machines' files put together, say: the last one may be of older settings."""
    path = experiment(lab, STARTED)
    assert runner.main(path, ["--seeds=1"]) == 0
    file = lab / f"{RESULTS}.jsonl"
    first = file.read_text().splitlines()[0]
    both = file.read_text() + first.replace('"steps": 7', '"steps": 5') + "\n"
    file.write_text(both)
    with pytest.raises(ConfigError, match="jsonl has two rows of standard, seed 0: remove one"):
        runner.main(path, ["--table_only=True"])
    assert file.read_text() == both


def test_a_data_folder_is_looked_at_before_the_first_run(lab):
    """One line of what is wrong with it, not one a run."""
    path = experiment(lab, STARTED)
    folder = lab / "data/own"
    folder.mkdir(parents=True)
    for content, message in ((None, "neither meta.json nor"), ("{", "meta.json cannot be used"),
                             ("{}", "meta.json cannot be used")):
        if content:
            (folder / "meta.json").write_text(content)
        with pytest.raises(ConfigError, match=message):
            runner.main(path, ["--dataset=own", "--seeds=1"])
    assert not (lab / "calls.jsonl").exists()


def test_a_data_folder_may_end_in_a_slash(lab):
    exp = runner.load_experiment(experiment(lab, TOYS), "cpu")
    dataset = runner.prepared_data(exp, runner.Options(dataset="data/books/"))
    assert dataset == "data/books", "@_old is the folder data/books_old"


def test_a_table_of_nothing_is_not_written(lab):
    path = experiment(lab, STARTED)
    message = "no results in experiments/results/toy_table-cpu.jsonl yet"
    with pytest.raises(ConfigError, match=message):
        runner.main(path, ["--table_only=True"])
    assert not (lab / RESULTS).parent.exists()


def test_claims_are_listed_of_an_experiment_for_a_cpu_alone(lab):
    experiment(lab, 'claims = ["standard > tuned"]\n' + textwrap.dedent(STARTED))
    assert "| toy_table | standard > tuned | - | - | - | 0 | not run |" in runner.claims_table()


def test_help_tells_of_the_experiment(lab, capsys):
    path = experiment(lab, STARTED)
    with pytest.raises(SystemExit):
        runner.main(path, ["--help"])
    said = capsys.readouterr().out
    assert "A toy." in said and "variants: standard, tuned" in said and "--jobs=1" in said


def test_a_command_that_takes_a_scale_has_help(capsys):
    assert runner.scale_of("figures.py", [], "Why.") == "cpu"
    assert runner.scale_of("figures.py", ["gpu"], "Why.") == "gpu"
    with pytest.raises(SystemExit):
        runner.scale_of("figures.py", ["--help"], "Why.")
    said = capsys.readouterr().out
    assert "python experiments/figures.py cpu" in said and "Why." in said
    for argv in (["--scale=gpu"], ["cpu", "gpu"]):
        with pytest.raises(ConfigError, match="a scale is wanted"):
            runner.scale_of("figures.py", argv, "Why.")


def test_a_run_without_the_metric_fails_every_time(lab, capsys):
    path = experiment(lab, STARTED)
    folder = lab / "out/toy_table-cpu/standard/s0"
    folder.mkdir(parents=True)
    for name in ("ckpt.pt", "result.json"):
        (folder / name).write_text('{"seed": 0, "data_id": "d0"}')
    for _ in range(2):
        assert runner.main(path, ["--seeds=1", "--only=standard"]) == 1
        assert "standard/s0 has no val_bpb; remove the folder" in capsys.readouterr().out


def test_a_folder_that_is_not_yet_a_task_is_prepared(lab):
    path = experiment(lab, 'prepare = "experiments/tasks.py facts --out=data/new"\n'
                           + textwrap.dedent(STARTED))
    (lab / "data/new").mkdir(parents=True)
    asks = "import sys; open('asked.txt', 'w').write(sys.argv[-1])"
    (lab / "experiments/tasks.py").write_text(asks)
    for meta, asked in (('{"data_id": "d"}', True), ('{"task": {}, "data_id": "d"}', False)):
        (lab / "data/new/meta.json").write_text(meta)
        runner.prepared_data(runner.load_experiment(path, "cpu"), runner.Options())
        assert (lab / "asked.txt").exists() == asked
        assert not asked or (lab / "asked.txt").read_text() == "--overwrite=True"
        (lab / "asked.txt").unlink(missing_ok=True)


WAITING = """
    variants = {{
        "standard": (dict(score="1:1", waits="{}"), None),
        "late": ({{}}, None),
    }}
"""


def test_ctrl_c_lets_the_running_trainer_save(lab, capsys):
    path = experiment(lab, WAITING.format("interrupt"))
    assert runner.main(path, ["--seeds=1"]) == 130
    ckpt = lab / "out/toy_table-cpu/standard/s0/ckpt.pt"
    assert json.loads(ckpt.read_text())["saved"] == "after SIGINT"
    assert "go on with: python train.py " in capsys.readouterr().out
    assert len(calls(lab)) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
def test_the_trainer_of_a_killed_experiment_saves_and_leaves(lab):
    path = experiment(lab, WAITING.format("long"))
    code = (f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom pathlib import Path\n"
            "from experiments import run\nrun.ROOT = Path()\n"
            f"run.main({str(path)!r}, [])")
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    wait_for((lab / "pid.txt").exists)
    parent.kill()
    parent.wait()
    ckpt = lab / "out/toy_table-cpu/standard/s0/ckpt.pt"
    wait_for(lambda: "after SIGINT" in ckpt.read_text())


def wait_for(condition):
    end = time.time() + 60
    while not condition():
        assert time.time() < end
        time.sleep(0.05)


def test_who_does_not_leave_is_killed(monkeypatch):
    """Ctrl-C is no error then either."""
    process = subprocess.Popen([sys.executable, "-c", "import signal, time\nfor n in (2, 15): "
                                "signal.signal(n, signal.SIG_IGN)\nprint(flush=True)\n"
                                "time.sleep(60)"], stdout=subprocess.PIPE)
    process.stdout.readline()
    times = iter([0, 120])                                     # the two minutes are over
    monkeypatch.setattr(runner, "time", SimpleNamespace(time=lambda: next(times)))
    runner.stop([process])
    assert process.wait(10) == -signal.SIGKILL


FAILING = '''
    claims = ["standard > broken"]
    variants = {
        "standard": (dict(score="1:1"), None),
        "tuned": (dict(score="3:3", init_from="@standard"), None),
        "broken": (dict(fail="yes"), None),
        "after": (dict(score="2:2", init_from="@broken"), None),
    }
'''


def test_graph_runs_another_program(lab):
    (lab / "experiments" / "cuda_graph.py").write_text(STAND_IN)
    (lab / "train.py").write_text("1 / 0")
    path = experiment(lab, FAILING)
    assert runner.main(path, ["--graph=True", "--only=tuned", "--seeds=1"]) == 0
    assert sorted(runs_of(lab)) == ["standard/s0", "tuned/s0"]


@parametrize("jobs", [1, 2])
def test_a_failing_run_does_not_stop_the_others(jobs, lab, capsys):
    path = experiment(lab, FAILING)
    assert runner.main(path, [f"--jobs={jobs}", "--seeds=1"]) == 1
    assert sorted(runs_of(lab)) == ["broken/s0", "standard/s0", "tuned/s0"]
    printed = capsys.readouterr().out
    assert "broken, seed 0: failed, code 3" in printed
    assert "step 1\n    the gradients broke" in printed
    assert (lab / "out/toy_table-cpu/broken/s0/ckpt.pt").exists()
    assert "needs out/toy_table-cpu/broken/s0, which is not finished" in printed
    assert "\nNot run: broken; after.\n" in (lab / f"{RESULTS}.md").read_text()
    report = report_of(lab)
    assert report["standard > broken"][-1] == "not run"
    assert report["tuned"][2] == "3.0000"


def test_a_run_that_fails_after_its_result_has_one(lab, capsys):
    """Its sample fails, say, or its picture."""
    path = experiment(lab, 'variants = {"standard": (dict(score="3:3"), None)}')
    (lab / "train.py").write_text(STAND_IN + "sys.exit('no room for the picture')")
    assert runner.main(path, ["--seeds=1"]) == 1
    said = capsys.readouterr().out
    assert "seed 0: failed, code 1, after its result, which counts." in said
    assert "no room for the picture" in said and report_of(lab)["standard †"][2] == "3.0000"


def test_a_metric_that_is_not_a_number_is_missing(lab, capsys):
    path = experiment(lab, """
        claims = ["standard > broken"]
        variants = {"standard": (dict(score="1:1"), None), "broken": (dict(score="nan:inf"), None)}
    """)
    assert runner.main(path, []) == 1
    said = capsys.readouterr().out
    assert said.count("failed, code 0, no val_bpb") == 2
    assert runner.main(path, []) == 1
    assert "broken/s1 has no val_bpb; remove the folder" in capsys.readouterr().out
    assert report_of(lab)["standard > broken"][-1] == "not run"
    assert report_of(lab)["standard"][-1] == "2"


@parametrize("differences, verdict", rows("""
.01 .02 .03           holds
-.03 -.01 -.02        reversed
0 .02 .04             inside noise
0 -.02 -.04           inside noise
.0070 .0170 .0270     holds
.0068 .0168 .0268     inside noise
.01 .011              holds
.01 .02               inside noise
.001                  sign agrees (1 seed)
-.001                 sign differs (1 seed)
-                     not run
"""))
def test_verdicts(differences, verdict):
    """The bound: for three seeds 1.69 deviations, here .01; for two .0032 and .032."""
    found = [float(number) for number in differences.split() if number != "-"]
    assert runner.verdict(found) == verdict


def test_the_noise_bound_is_students():
    freedom = np.arange(len(runner.T95)) + 1                   # two-sided: 5% above, 5% below
    assert runner.T95 == approx(scipy.stats.t.ppf(0.95, freedom), abs=6e-4)


@parametrize("steps, expected", rows("""
0 100 200 300 400   +0.100, +0.200, +0.400
0 400               -, -, +0.400
0 70 195 400        -, +0.195, +0.400
0 85 100 190 200 400   +0.100, +0.200, +0.400
"""))
def test_a_trend_is_taken_at_evaluations_near_the_quarters(steps, expected):
    curve = [{"step": int(step), "val_loss": int(step) / 1000} for step in steps.split()]
    flat = [{**point, "val_loss": 0.0} for point in curve]
    rows = {"A": {0: {"curve": curve}, 1: {"x": 5}}, "B": {0: {"curve": flat}, 2: {"x": 3}}}
    assert runner.trend("val_loss", rows, "A", "B") == expected
    rows["B"][1] = {"x": 2}
    assert runner.differences("x", rows, "A", "B") == [3], "of the seed that both have"
    rows["B"][0]["curve"] = []
    assert runner.trend("val_loss", rows, "A", "B") == "-, -, -"


def test_runs_at_once_share_the_cores_and_are_not_compiled(lab, monkeypatch, capsys):
    monkeypatch.setattr(runner.os, "sched_getaffinity", lambda process: range(7), raising=False)
    path = experiment(lab, STARTED)
    for jobs in (1, 3, 9):
        (lab / f"{RESULTS}.jsonl").unlink(missing_ok=True)
        shutil.rmtree(lab / "out", ignore_errors=True)
        runner.main(path, [f"--jobs={jobs}", "--only=standard", "--seeds=1"])
    threads = (lab / "threads.txt").read_text().split()
    assert threads == [str(os.environ.get("OMP_NUM_THREADS")), "2", "1"]
    assert capsys.readouterr().out.count("--compile=0") == 2


def test_a_cpu_has_its_name_where_the_system_tells(monkeypatch):
    plain = f"cpu {platform.machine()}"
    monkeypatch.setattr(Path, "exists", lambda path: False)
    assert runner.machine("cpu") == plain
    monkeypatch.setattr(Path, "exists", lambda path: True)
    cores = "model\t\t: 17\nmodel name\t: Fast 9\nmodel name\t: Fast 9\n"
    monkeypatch.setattr(Path, "read_text", lambda path: cores)
    assert runner.machine("cpu") == f"{plain} Fast 9"


def test_source_hash_sees_code_alone(lab):
    code = "import math\n\nclass A:\n    def f(self, x):\n        return math.sin(x) + 1\n"
    prose = '''"""A module."""
import math   # why
class A:
    """A class."""
    def f(self, x):
        """A function."""
        return (math.sin(x)
                + 1)
'''
    hashes = set()
    for file in ("model_toy.py", "kernels.py", "train.py"):
        for content in (code, code.replace("+ 1", "+ 2"), code + '"text"\n'):
            (lab / file).write_text(content)
            hashes.add(runner.source_hash("toy"))
        (lab / file).write_text(prose)
        assert runner.source_hash("toy") in hashes
        (lab / file).write_text("")
    assert len(hashes) == 9                                    # three codes in each of three files


def test_a_model_that_is_being_edited_is_named(lab):
    """While a table runs, say: its next row asks for the hash."""
    (lab / "model_toy.py").write_text("def forward(:")
    with pytest.raises(SyntaxError, match="model_toy.py, line 1"):
        runner.source_hash("toy")


def test_source_hash_is_the_same_by_every_python(lab):
    for file in ("model_toy.py", "kernels.py", "train.py"):
        (lab / file).write_text("""def f(x, *, y=-1.5):\n    return f"{x['a']!r:>{y}} " 'it"s'\n""")
    assert runner.source_hash("toy") == "437ce40f"


def test_the_commit_of_a_run_is_dirty_by_code_and_not_by_results(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert runner.commit() == ""                               # no repository
    result = tmp_path / "experiments/results/a.md"
    code = tmp_path / "train.py"
    result.parent.mkdir(parents=True)
    for file in (code, result):
        file.write_text("1")
    for command in ("init -q", "add .", "-c user.name=a -c user.email=b commit -qm 1"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    name = runner.commit()
    assert re.fullmatch("[0-9a-f]{7,}", name)
    result.write_text("2")
    assert runner.commit() == name
    (tmp_path / "model_mine.py").write_text("1")
    assert (runner.commit(), runner.commit("mine")) == (name, name + "-dirty")
    (tmp_path / "unpacked").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(runner, "ROOT", tmp_path / "unpacked")
        assert runner.commit() == "", "that of another repository around it"
    code.write_text("2")
    assert runner.commit() == name + "-dirty"


# ---------------------------------------------------------------- the experiment files

INDEX = (ROOT / "experiments/README.md").read_text(encoding="utf-8")
TABLES = []                                                    # ours: yours may be as they like
for table_file in sorted((ROOT / "experiments").glob("*.py")):
    table_text = table_file.read_text(encoding="utf-8")
    if re.search(r"^variants\b", table_text, re.M) and f"`{table_file.name}`" in INDEX:
        TABLES.append(table_file)


def model_config(exp, scale, name, vocab_size=4096):
    """The Config of a variant."""
    chosen = runner.settings(exp, scale, name)
    module = sample.load_module(chosen["model"])
    known = vars(module.Config())
    fields = {key: value for key, value in chosen.items() if key in known}
    dense = module.DENSE if chosen.get("dense") else {}
    assert not fields.keys() & dense.keys()
    fields |= dense | {"vocab_size": vocab_size}
    if "preset" in chosen:
        return module.Config(**module.PRESETS[chosen["preset"]] | fields)
    if "depth" in chosen:
        return module.Config.from_depth(chosen["depth"], **fields)
    other, _, start = chosen["init_from"][1:].rpartition("/")  # all is the checkpoint's
    base = runner.load_experiment(ROOT / f"experiments/{other}.py", scale)
    return module.Config(**vars(model_config(base, scale, start)) | fields)


@parametrize("scale", ["cpu", "gpu"])
@parametrize("path", TABLES, ids=lambda path: path.stem)
def test_an_experiment_here_fits_its_models(path, scale):
    """Each variant's keys are train.py's or its model's and make a Config; the claims are true of
    the paper's own numbers."""
    settings = (ROOT / "train.py").read_text().split("defaults =")[0]
    keys = set(re.findall(r"^(\w+) = ", settings, re.M))
    exp = runner.load_experiment(path, scale)
    assert exp.name == path.stem                               # also where loops run over names
    for a, b, column in runner.pairs(exp):
        if column == exp.metric:
            assert all(difference > 0 for difference in runner.paper(exp, a, b)), (a, b)
    for name in exp.variants:
        chosen = runner.settings(exp, scale, name)
        config = model_config(exp, scale, name)
        assert chosen.keys() <= keys | vars(config).keys(), name
        row = {"cpu": 150, "gpu": 589}[scale] if path.stem == "lime_prosqa" else 256
        assert chosen["batch_tokens"] % chosen.get("block_size", row) == 0
        start = str(chosen.get("init_from", ""))
        if start.startswith("@"):                              # also of another experiment
            other, _, base_name = start[1:].rpartition("/")
            base = runner.load_experiment(path.with_stem(other or path.stem), scale)
            others = ("lime_prosqa", "midus_sft", "hiermem_levels")     # same vocabulary
            assert base.prepare == exp.prepare or path.stem in others
            dense = runner.settings(base, scale, base_name).get("dense")
            own = {"upscale", "dense", "memory"} & chosen.keys()
            assert own or not dense, f"{name}: the checkpoint's memory, none, is kept"


def test_tables_on_a_cpu_are_long_enough():
    """8M tokens in batches of 4,096 or more, but for tasks, sweeps of rates, one epoch of
    instructions and the like; which_memory's longest length is the one that counts. AdamW from
    scratch warms up for 100 steps or more."""
    for path in TABLES:
        scale = "cpu_16M" if path.stem == "which_memory" else "cpu"
        exp = runner.load_experiment(path, scale)
        rates = 1.9e6 if "rates" in path.stem else 8e6
        shortest = dict(which_rates=0.9e6, mine=0.9e6, bfloat16=1.9e6, midus_sft=1.8e6,
                        midus_queries=1.9e6)
        least = shortest.get(path.stem, rates)
        for name in exp.variants:
            chosen = runner.settings(exp, scale, name)
            tokens = chosen["max_iters"] * chosen["batch_tokens"]
            shorter = re.search("untouched|x1/", name)
            assert chosen["batch_tokens"] >= 4096 or path.stem == "lime_prosqa"
            assert tokens >= least or shorter, (path, name)
            recipe = sample.load_module(chosen["model"]).RECIPE
            optimizer = chosen.get("optimizer") or next(iter(recipe))
            if optimizer == "adamw" and "init_from" not in chosen and path.stem != "bfloat16":
                warmup = {**recipe[optimizer], **chosen}.get("warmup", 0.02)
                assert warmup * chosen["max_iters"] >= 100, (path, name)


@parametrize("sweep, table", [("lime_rates", "lime_routers"),
                              ("ultramem_rates", "ultramem_table3"),
                              ("hiermem_rates", "hiermem_table1")])
def test_a_sweep_warms_up_as_long_as_its_table(sweep, table):
    steps = []
    for name in (sweep, table):
        exp = runner.load_experiment(ROOT / f"experiments/{name}.py", "cpu")
        steps.append(exp.cpu["warmup"] * exp.cpu["max_iters"])
    assert steps[0] == steps[1]


def test_every_mutant_has_its_line():
    for name, right, *_ in mutants.MUTANTS:
        assert (ROOT / name).read_text(encoding="utf-8").count(right) == 1, (name, right)


def test_the_claims_file_is_up_to_date():
    table = runner.claims_table()
    file = ROOT / "experiments/results/claims.md"
    if not file.exists() or table != file.read_text(encoding="utf-8"):     # after an own run
        message = "experiments/results/claims.md is old: python experiments/run.py claims"
        assert not os.environ.get("CI"), message
        warnings.warn(message)


def test_the_deeper_models_beside_move_are_as_wide_and_decay_alike():
    exp = runner.load_experiment(ROOT / "experiments/move_table1.py", "cpu")
    work = {}
    decay = {}
    width = set()
    for name in ("standard", "MoVE x8 bank 1/16", "L+1", "L+2"):
        with torch.device("meta"):
            net = model_move.Model(model_config(exp, "cpu", name))
        keys = {**model_move.RECIPE["muon"], **runner.settings(exp, "cpu", name)}
        groups = net.param_groups("muon", keys["learning_rate"], keys["weight_decay"])
        work[name] = net.flops_per_token()
        decay[name] = max(group["weight_decay"] for group in groups)
        width.add(net.config.n_embd)
    assert len(width) == 1
    assert decay["L+1"] == approx(decay["standard"]) == approx(decay["L+2"])
    assert work["L+1"] == approx(1.19 * work["standard"], rel=.01)
    assert work["L+2"] == approx(1.39 * work["standard"], rel=.01)
    assert work["MoVE x8 bank 1/16"] < 1.01 * work["standard"]


COSTS = """{"ratios": {
    "MoVE": {"step": 1.5, "step_on": "toy", "decode": 0.5, "decode_on": "toy 2"},
    "MIDUS": {"step": 1.5, "step_on": "toy", "decode": 0.5, "decode_on": "toy 2"}}}"""


def test_which_memory_compares_at_equal_tokens_and_at_equal_time(tmp_path, monkeypatch):
    from experiments import which_memory
    keys = which_memory.variants["UltraMemV2 dense longer"][0]
    assert keys["cpu_4M"]["max_iters"] == round(960 * which_memory.times["UltraMemV2"])
    for scale, count in (("cpu_4M", 6), ("gpu", 0)):            # the times are a CPU's
        exp = runner.load_experiment(ROOT / "experiments/which_memory.py", scale)
        names = [*exp.variants, *(a for a, _, _ in runner.pairs(exp))]
        assert sum(name.endswith(" longer") for name in names) == 2 * count
    bpb = dict.fromkeys(which_memory.variants, (2.0, 2.02))     # dense, and whoever is not below
    bpb |= {"MoVE": (1.95, 1.98), "MoVE dense longer": (1.96, 1.97), "MIDUS": (1.9,)}
    bpb["LIMe"] = (2.0, 2.0, 2.0)                               # a seed more than its baseline
    recalls = {f"recall_{m}": m / 200 for m in which_memory.MENTIONS}

    def rows_of(file, scale):
        if scale == "cpu_16M":
            return {}
        row = dict(recalls, tokens={"cpu": 10, "cpu_4M": 40}[scale], data_id=f"{scale} text")
        found = {}
        for name, values in bpb.items():
            row["params"] = {"total": 107 if name == "MoVE" else 100}
            row["peak_memory_mb"] = 30 if name == "LIMe" else 20
            found[name] = {seed: dict(row, val_bpb=x) for seed, x in enumerate(values)}
        return found

    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setattr(runner, "rows_of", rows_of)
    results = tmp_path / "experiments" / "results"
    results.mkdir(parents=True)
    (results / "which_memory-cpu-cost.json").write_text(COSTS)
    drawn = []
    errorbar = Axes.errorbar

    def seen(axes, x, y, **style):
        drawn.append((x, style))
        return errorbar(axes, x, y, **style)

    monkeypatch.setattr(Axes, "errorbar", seen)
    which_memory.finish(rows_of("", "cpu"), "cpu")
    growth = [style["label"] for x, style in drawn if x == (10, 40)]
    assert growth[:2] == ["MoVE", "LIMe"]
    assert "MIDUS" not in growth, "one seed has no bound"
    lines = (results / "which_memory-cpu-summary.md").read_text().splitlines()
    _, _, move, lime, _, _, midus, *_ = lines
    assert move == ("| MoVE | +7 | 1.50x | 1.00x | 0.50x | 2.0100 ± 0.0141 | +0.0450 ± 0.0071 "
                    "| holds | +0.0000 ± 0.0141 | inside noise | 2 |")
    step = which_memory.times["LIMe"]
    assert lime.startswith(f"| LIMe | +0 | {step:.2f}x | 1.50x | - |"), "no checkpoint to decode"
    assert midus.endswith("| +0.1000 | sign agrees (1 seed) | +0.1000 | sign agrees (1 seed) | 1 |")
    assert (f"Times are by turns: of a step, toy; {which_memory.times_on}; of "
            "decoding, toy 2. Memory: peaks of the runs.") in lines
    heading, _, move, *_, last = (results / "which_memory-cpu-growth.md").read_text().splitlines()
    assert last.endswith(" data_id cpu text, cpu_4M text.")
    assert heading == "| gain in bits per byte | 10 | 40 | change | bound | as the text grows |"
    assert move.startswith("| MoVE | +0.0450 ± 0.0071 | +0.0450 ± 0.0071 | +0.0000 | 0.0446 |")
    for picture in ("cpu-gain", "cpu-recall", "cpu-growth"):
        assert (results / f"which_memory-{picture}.png").exists()
    shares = "commonest material 0.17, 0.15, 0.12, 0.23, 0.48."
    assert shares in (results / "which_memory-cpu-summary.md").read_text()
    large = which_memory.table(rows_of("", "cpu"), json.loads(COSTS), "gpu")     # other facts
    assert "commonest material 0.18, 0.14, 0.13, 0.16, 0.25." in large
    bpb |= dict.fromkeys(("MoVE", "MoVE dense", "MoVE dense longer"), ())
    recalls.clear()                                             # a text without facts
    which_memory.finish(rows_of("", "cpu"), "cpu")
    assert "recall" not in (results / "which_memory-cpu-summary.md").read_text()
    lines = (results / "which_memory-cpu-growth.md").read_text().splitlines()
    assert lines[0] == heading
    assert lines[2] == "| MoVE | - | - | - | - | - |"


def test_costs_of_a_model_that_has_changed_are_measured_again(tmp_path, monkeypatch):
    """Your own, say; where no checkpoint is here those that are known stay."""
    from experiments import which_memory
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    (tmp_path / "experiments/results").mkdir(parents=True)
    folder = which_memory.folder_of("MoVE", "cpu")
    folder.mkdir(parents=True)
    (folder / "result.json").write_text('{"config": {"dataset": "x"}}')
    ratios = iter((1.25, 1.5))
    monkeypatch.setattr(which_memory, "decode_ratio", lambda *_: next(ratios))
    row = dict(val_bpb=2.0, params={"total": 100}, peak_memory_mb=20, overrides={})
    for source_hash, here, shown in (("a", True, 1.25), ("a", True, 1.25), ("b", False, 1.25),
                                     ("b", True, 1.5)):
        monkeypatch.setattr(which_memory, "has_checkpoints", lambda *_: here)
        rows = dict.fromkeys(which_memory.variants, {}) | {
            name: {0: dict(row, source_hash=source_hash)} for name in ("MoVE", "MoVE dense")}
        which_memory.summarize(rows, "cpu")
        summary = (tmp_path / "experiments/results/which_memory-cpu-summary.md").read_text()
        assert f"| {shown:.2f}x | 2.0000 |" in summary
    (tmp_path / "experiments/results/which_memory-cpu-cost.json").write_text("{")
    with pytest.raises(ConfigError, match="which_memory-cpu-cost.json cannot be used"):
        which_memory.summarize(rows, "cpu")


def test_without_rows_there_are_no_costs_and_no_pictures(tmp_path, monkeypatch):
    from experiments import bfloat16, which_memory
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setattr(runner, "rows_of", lambda path, scale: {})
    dense = {0: dict(val_bpb=2.0)}
    nothing = dict.fromkeys(which_memory.variants, {})
    which_memory.finish(nothing, "gpu")
    which_memory.finish({**nothing, "MoVE dense": dense}, "gpu")
    bfloat16.finish(dict.fromkeys(bfloat16.variants, {}), "gpu")
    assert not any(tmp_path.iterdir())


def test_a_gain_that_changes_with_length_has_a_bound():
    from experiments.which_memory import change
    a = (0.05, 0.06, 0.07)
    b = (0.04, 0.04, 0.04)
    c = (0.01, 0.03)
    assert change([a]) == ["-", "-", "-"], "one length"
    error = 0.01 / 3 ** 0.5                                     # of a's mean; b has none
    assert change([a, b]) == ["-0.0200", f"{2.920 * error:.4f}", "shrinks"]
    assert change([b, c, a]) == ["+0.0200", f"{2.920 * error:.4f}", "grows"], "first and last"
    error = (error ** 2 + 0.01 ** 2) ** 0.5                     # deviation of c: 0.02 / sqrt(2)
    assert change([a, c]) == ["-0.0400", f"{6.314 * error:.4f}", "inside noise"]
    assert change([b, b]) == ["+0.0000", "0.0000", "inside noise"]


def test_my_own_model_has_the_rates_of_what_it_was_copied_from():
    """LIMe without its router_lr is still LIMe's copy, and is not given that key."""
    from experiments import mine
    own = mine.fields_of("LIMe") - {"router_lr"} | {"width"}
    assert mine.origin_of(own) == "LIMe"
    keys, _ = mine.keys_like("LIMe", mine.fields_of("LIMe") - own)
    assert keys["cpu"] == dict(learning_rate=81e-3)
    assert keys["model"] == "mine"
    assert "router_lr" in mine.variants["LIMe"][0]["cpu"]


def test_my_own_model_gets_its_place(tmp_path, monkeypatch, capsys):
    """Below MoVE, which gains 0.02; LIMe has no baseline yet, HierMem's is of another machine,
    UltraMemV2's had --graph=True, and no time."""
    from experiments import mine
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    (tmp_path / "experiments/results").mkdir(parents=True)
    for file in ("model_mine.py", "kernels.py", "train.py"):
        (tmp_path / file).touch()
    own = {"mine dense": (2.0, 10), "mine": (1.99, 15)}
    for baseline in (mine.baseline, mine.study.baseline):
        monkeypatch.setitem(baseline, "mine", "mine dense")
    rows = {name: {} for name in mine.variants}
    moves = {"MoVE dense": (2.1, 10), "MoVE": (2.08, 11)}
    others = {"LIMe": (1.0, 1), "HierMem dense": (2.1, 1), "HierMem": (2.0, 1),
              "UltraMemV2 dense": (2.1, None), "UltraMemV2": (2.0, 1)}
    for name, (bpb, ms) in {**own, **moves, **others}.items():
        device = "cpu a" if name == "HierMem dense" else "cpu b"
        rows[name] = {0: dict(val_bpb=bpb, step_ms=ms, device=device, threads=1)}
    rows["mine dense"][0]["source_hash"] = runner.source_hash("mine")
    rows["mine"][0]["source_hash"] = "of before"
    mine.finish(rows, "cpu")
    said = capsys.readouterr().out.splitlines()
    for line, title in zip(said, ("UltraMemV2", "HierMem")):
        assert line == f"{title} has no step time beside its baseline's, on one machine: no place"
    assert said[3].split() == ["1", "+0.0200", "1.10x", "MoVE"]
    assert said[4].split() == ["2", "+0.0100", "1.50x", "mine"]
    assert said[6].startswith("mine: by older code. To run it again remove out/mine-cpu/mine and")
    assert len(said) == 7
    assert (tmp_path / "experiments/results/mine-cpu-gain.png").exists()


@pytest.fixture
def lines(monkeypatch):
    """The points of each line of a picture, which is not written."""
    drawn = []

    def savefig(figure, *arguments, **settings):
        drawn.extend(line.get_xydata().tolist() for line in figure.axes[0].lines)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return drawn


def test_rates_of_midus_are_drawn_as_a_line_for_each_method(lines, tmp_path, monkeypatch):
    rows = dict.fromkeys(midus_rates.variants, {})
    rows["base untouched"] = {0: dict(retention_loss=1., val_loss=6.)}
    rows["LESA 0.000125"] = {0: dict(retention_loss=2., val_loss=5.)}
    rows["LESA 0.002"] = {0: dict(retention_loss=3., val_loss=4.)}
    monkeypatch.setattr(midus_rates, "__file__", str(tmp_path / "midus_rates.py"))
    (tmp_path / "results").mkdir()
    midus_rates.finish(rows, "cpu")
    assert lines == [[[1, 6], [2, 5], [3, 4]]]
    assert (tmp_path / "results/midus_rates-cpu-plane.md").exists()


def test_learned_for_what_is_forgotten():
    """On lines from the untouched base; a worse point and what lies beyond the last gain nothing;
    whoever forgets less than nothing learns for nothing."""
    untouched = (3., 5.)
    points = [untouched, (3.1, 4.8), (3.2, 4.9), (3.3, 4.4)]
    for price, gain in ((0, 0), (0.05, 0.1), (0.1, 0.2), (0.2, 0.4), (0.25, 0.5), (9, 0.6)):
        assert midus_rates.learned(price, points) == approx(gain)
    assert midus_rates.learned(0, [untouched, (2.9, 4.8)]) == approx(0.2)
    assert midus_rates.learned(0, [untouched, (2.9, 4.8), (3.1, 4.6)]) == approx(0.3)
    rows = {name: {0: dict(retention_loss=3.2, val_loss=4.6)} for name in midus_rates.variants}
    rows["base untouched"] = {0: dict(retention_loss=3., val_loss=5.)}
    for rate in midus_rates.RATES:
        rows[f"SOLAR {rate:g}"] = {0: dict(retention_loss=3.4, val_loss=4.6)}
    _, _, hml, *_, solar, fast_values, _, _ = midus_rates.price_table(rows).splitlines()
    assert hml == "| MIDUS-HML | 0.1000 | 0.2000 | 0.4000 | 0.2000 | - |"
    assert solar == "| SOLAR | 0.0500 | 0.1000 | 0.2000 | 0.1000 | sign agrees (1 seed) |"
    assert fast_values.startswith("| MIDUS-HML values 30x | 0.1000 |")
    rows["SOLAR 0.002"] = {}
    assert "| SOLAR | - | - | - | - | not run |" in midus_rates.price_table(rows)
    rows["MIDUS-HML 0.002"] = {}
    assert "sign" not in midus_rates.price_table(rows)


def test_curves_of_arithmetic_are_means_over_seeds(lines):
    curves = [[dict(step=5, accuracy=a), dict(step=9, accuracy=2 * a)] for a in (.125, .375)]
    lime_arithmetic.finish({"LIMe": {seed: dict(curve=c) for seed, c in enumerate(curves)}}, "cpu")
    assert lines == [[[5, .25], [9, .5]]]


# ================================================================ tasks.py

def test_arithmetic_is_exact_at_every_step():
    """What an operation makes is a number of the next step, so that the numbers are all there."""
    rng = random.Random(0)
    used = ""
    for n, largest in [(2, 2), (2, 99), (3, 5), (4, 19), (5, 99), (6, 19), (6, 199)] * 15:
        record = tasks.solve(tasks.random_tree(n, largest, rng))
        steps = (record["prompt"] + " " + record["answer"]).split(" = ")
        for k, step in zip(range(n, 0, -1), steps, strict=True):
            numbers = [int(number) for number in re.findall(r"\d+", step)]
            assert eval(step.replace("x", "*")) == int(steps[-1])
            assert len(numbers) == k
            assert 1 <= min(numbers) <= max(numbers) <= largest
            assert not re.search(r"(?<!\d)1 x|[x/] 1(?!\d)", step), "a factor 1 is no operation"
        used += re.sub("[^-+x/]", "", record["prompt"])
    assert all(used.count(operator) > len(used) / 10 for operator in "+-x/")


def test_arithmetic_of_appendix_b():
    left = [12, "+", [7], [5]]
    right = [4, "-", [18, "+", [6], [12, "x", [4], [3]]], [14, "x", [2], [7]]]
    assert tasks.solve([3, "/", left, right]) == {
        "prompt": "(7 + 5) / (6 + 4 x 3 - 2 x 7) =",
        "answer": "12 / (6 + 4 x 3 - 2 x 7) = 12 / (6 + 12 - 2 x 7) = 12 / (18 - 2 x 7) = "
                  "12 / (18 - 14) = 12 / 4 = 3"}


def result_of(run):
    return json.loads((run / "result.json").read_text())


def task_folder(tmp_path, *flags):
    """The task's data folder, and its records by split."""
    tasks.main([*flags, f"--out={tmp_path / 'data'}"])
    made = tmp_path / "data_records"
    records = {split: read_jsonl(made / f"{split}.jsonl") for split in ("train", "val")}
    return tmp_path / "data", records


def test_a_task_trains_and_its_accuracy_is_a_result(tmp_path, capsys):
    folder, records = task_folder(tmp_path, "arithmetic", "--operands=2,3", "--max_value=12",
                                  "--samples=90", "--val_samples=9")
    everything = [record["prompt"] for record in records["train"] + records["val"]]
    assert len(set(everything)) == 198, "no prompt twice"
    assert len(records["val"]) == 18
    lengths = [len(re.findall(r"\d+|\S", r["prompt"] + r["answer"])) for r in records["train"]]
    assert load_meta(folder)["block_size"] + 1 == max(lengths) + 2 == tasks.longest(3)
    run = tmp_path / "run"
    train("--depth=1 --max_iters=2 --batch_tokens=112 --sample_tokens=0 --eval_interval=1",
          dataset=folder, out_dir=run)
    result = result_of(run)
    assert result["accuracy"] == result["curve"][2]["accuracy"] == log_of(run, "accuracy")[2]
    assert f"accuracy {result['accuracy']:.3f}" in capsys.readouterr().out
    tasks.main(["accuracy", f"--out_dir={run}"])
    assert f"accuracy_3     {result['accuracy_3']:.4f}" in capsys.readouterr().out


class Knows(torch.nn.Module):
    """A stand-in for a model: after a row of tokens the one that it has by heart is likeliest."""

    def __init__(self, by_heart):
        super().__init__()
        self.config = SimpleNamespace(block_size=1000)
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.by_heart = by_heart
        self.leaves = []                                       # that it was to fetch

    def new_cache(self, batch_size, max_len):
        return None

    def forward(self, idx, leaf=None):
        self.leaves += [None] if leaf is None else leaf.tolist()
        logits = torch.zeros(*idx.shape, 1500)
        for row, at in zip(idx.tolist(), logits):
            for n in range(len(row)):
                at[n, self.by_heart.get(tuple(row[:n + 1]), 1)] = 50
        return logits, None


def parrot(data, spoil):
    """Knows the answers; `spoil` changes them, eot included."""
    by_heart = {}
    for x, y in zip(*data.batch(range(data.n_windows))):
        row = x[:int((y >= 0).int().argmax()) + 1].tolist()
        for token in spoil(y[y >= 0].tolist()):
            by_heart[tuple(row)] = token
            row.append(token)
    return Knows(by_heart)


@parametrize("spoil, expected", [
    (lambda answer: answer, [1, 1, 1]),
    (lambda answer: answer if len(answer) == 2 else [8, 0], [.5, 1, 0]),    # 0 is never right
    (lambda answer: answer[:-1] + [1] * 20, [0, 0, 0]),        # the right number, but no end
    (lambda answer: [7, answer[-2], 0], [1, 1, 1]),            # only the last number counts
    (lambda answer: [7, answer[-2], 7, 0], [0, 0, 0]),         # which "=" must not follow
])
def test_accuracy_wants_the_last_number_and_an_end(spoil, expected, tmp_path):
    folder, _ = task_folder(tmp_path, "arithmetic", "--operands=2,3", "--max_value=20",
                            "--samples=5", "--val_samples=20")
    data = TokenShards(folder, "val", 14)
    found = tasks.accuracy(parrot(data, spoil), data, get_tokenizer(str(folder)), batch_size=7)
    assert found == dict(zip(("accuracy", "accuracy_2", "accuracy_3"), expected))


def test_a_text_with_words_that_a_task_lacks_is_an_error(tmp_path):
    tasks.save_word_tokenizer(tmp_path / "tokenizer.json", "abc")
    tok = get_tokenizer(tmp_path / "tokenizer.json")
    assert tok.encode("a b  c") == [1, 2, 3]
    with pytest.raises(ConfigError, match="tokenizer.json has no token for a part of this text"):
        tok.encode("a d")


def test_the_words_of_a_sample_have_spaces_between_them(tmp_path):
    """As train.py's own sample has them, which the tokenizer decodes."""
    tasks.save_word_tokenizer(tmp_path / "tokenizer.json", ["one", "two"])
    tok = get_tokenizer(tmp_path / "tokenizer.json")
    assert "".join(sample.text_pieces(tok, [1, 2, 1])) == " one two one"
    assert tok.decode([1, 2, 1]) == "one two one"
    for word, place in (("one", 3), ("two", 2), ("", 3)):      # and --inspect finds each
        assert sample.word_tokens(tok, [tok.eot, 1, 2, 1], word) == [place]


def test_answers_are_those_of_prompts_alone():
    model = make().eval()
    prompts = [[1, 2, 3], [4], [5, 6]]
    alone = []
    for prompt in prompts:
        tokens = sample.generate(model, torch.tensor([prompt]), 6, temperature=0)
        alone.append([token.item() for token in tokens])
    eot = alone[1][0]                                          # its first token ends the second
    wanted = [[*itertools.takewhile(eot.__ne__, row)] for row in alone]
    assert tasks.answer_greedy(model, prompts, 6, eot) == wanted
    assert wanted[1] == []


def test_prosqa_is_a_graph_with_one_answer():
    rng = random.Random(0)
    first = shortcut = 0
    for _ in range(60):
        question = tasks.prosqa_sample(rng)
        *facts, asked = re.findall(r"[^.?]+[.?]", question["question"])
        name, *concepts = re.fullmatch(r" Is (\w+) a (\w+) or (\w+)\?", asked).groups()
        form = re.compile(r" ?(?:Every )?(\w+) is a (\w+)\.")
        edges = [form.fullmatch(fact).groups() for fact in facts]
        below, over = map(set, zip(*edges))
        roots = below - over
        assert name in roots <= set(tasks.NAMES)
        assert len(set(edges)) == len(edges)
        assert not below & set(concepts), "both are leaves"
        lengths = [networkx.single_source_shortest_path_length(networkx.DiGraph(edges), root)
                   for root in (name, *roots)]
        reached = lengths[0]
        right = [concept in reached for concept in concepts]
        far = [max(to.get(concept, 0) for to in lengths) for concept in concepts]
        shortcut += 0.5 if far[0] == far[1] else right[far.index(max(far))]
        assert sorted(right) == [False, True], "one answer"
        target = concepts[right.index(True)]
        assert question["answer"] == f"{name} is a {target}."
        assert reached[target] == len(question["steps"]) >= 3, "there is no shorter way"
        at = name
        for step in question["steps"]:
            assert step in question["question"]
            every = "" if at in roots else "Every "
            at = re.fullmatch(rf"{every}{at} is a (\w+)\.", step)[1]
        assert at == target
        first += right[0]
    assert 15 < first < 45, "the place of an answer does not tell"
    assert 0.85 < shortcut / 60 < 1, "its distance from the roots does, mostly"


@slow
def test_prosqas_rows_have_the_length_that_the_experiment_has(tmp_path):
    exp = runner.load_experiment(ROOT / "experiments/lime_prosqa.py", "cpu")
    _, *flags = exp.prepare["cpu"].split()
    folder, _ = task_folder(tmp_path, *flags, "--samples=8000")    # the longest is among these
    row = load_meta(folder)["block_size"]
    assert exp.cpu["batch_tokens"] == exp.cpu["batch_size"] * row
    assert exp.cpu["eval_tokens"] == 1000 * row


def test_prosqa_holds_out_the_published_questions(tmp_path):
    rng = random.Random(1337)                                  # of what is generated: the first two
    samples = [tasks.prosqa_sample(rng) for _ in range(2)]
    (tmp_path / "val.json.xz").write_bytes(lzma.compress(json.dumps(samples).encode()))
    folder, records = task_folder(tmp_path, "prosqa", f"--val={tmp_path / 'val.json.xz'}",
                                  "--samples=4")
    answer = "\n".join(samples[0]["steps"]) + "\n### " + samples[0]["answer"]
    assert records["val"][0] == {"prompt": samples[0]["question"] + "\n", "answer": answer}
    assert len(records["train"]) == 2, "no prompt in both splits"
    data = TokenShards(folder, "val", load_meta(folder)["block_size"])
    tok = get_tokenizer(str(folder))
    for spoil, right in ((lambda answer: answer, 1), (lambda answer: answer[:9] + answer[-1:], 0)):
        found = tasks.accuracy(parrot(data, spoil), data, tok)
        assert found["accuracy"] == found[f"accuracy_{len(samples[0]['steps'])}"] == right
        assert found["true_chains"] == 1                       # its beginning, too


@parametrize("given, true", [
    ("Fae is a rorpus.\nEvery rorpus is a jompus.\n### Fae is a jompus.", True),
    ("Fae is a rorpus . \n Every rorpus is a numpus . \n ### Fae is a lempus .", False),
    ("Fae is a rorpus.\nEvery jompus is a numpus.\n### Fae is a numpus.", False),
    ("Every rorpus is a jompus.\n### Fae is a jompus.", False),
    ("Stella is a gerpus.\n### Fae is a gerpus.", False),
    ("### Fae is a rorpus.", False)])
def test_a_true_chain_links_facts_of_the_question_from_the_name_on(given, true):
    question = ("Stella is a gerpus. Every jompus is a numpus. Every rorpus is a jompus. "
                "Fae is a rorpus. Is Fae a lempus or numpus?\n")
    assert tasks.is_true_chain(question, given) is true
    spaced = re.sub(r"([.?])", r" \1 ", question)               # as the word tokenizer decodes it
    assert tasks.is_true_chain(spaced, given) is true


WORDS = {"shop": "bread milk apple price coin scale", "sea/a": "harbour sail mast wave anchor",
         "wood": "oak birch resin moss fern"}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Three domains of different words."""
    folder = tmp_path_factory.mktemp("texts")
    rng = random.Random(0)
    for split, n in (("train", 40), ("val", 16)):
        rows = []
        for source, words in WORDS.items():
            for _ in range(n):
                text = " ".join(rng.choices(words.split(), k=60))
                rows.append({"text": text, "source": source})
        write_jsonl(folder / f"{split}.jsonl", rows)
    return folder


def records_of(folder):
    return read_jsonl(folder.with_name(f"{folder.name}_records") / "train.jsonl")


def test_domains_are_three_folders_and_evaluations_give_all_losses(texts, tmp_path, capsys):
    folder, records = task_folder(tmp_path, "domains", f"--source={texts}", "--vocab_size=300",
                                  "--prefix=lake/,sea/", "--unseen=wood")
    old = folder.with_name("data_old")
    unseen = folder.with_name("data_unseen")
    assert [len(rows) for rows in records.values()] == [40, 16]
    for source, rows in (("sea/a", records["train"]), ("shop", records_of(old)),
                         ("wood", records_of(unseen))):
        assert {row["source"] for row in rows} == {source}
    assert load_meta(folder)["tokenizer"] == load_meta(old)["tokenizer"]
    tok = get_tokenizer(str(folder))
    assert len(tok.encode(" milk")) == 1 < len(tok.encode(" mast")), "trained on the old domain"
    common = "--max_iters=3 --eval_tokens=1000000 --learning_rate=0.01"
    base = tmp_path / "base"
    grown = tmp_path / "grown"
    train_midus(common, "--dense=True", dataset=old, out_dir=base)
    train_midus(common, "--upscale=midus --phase=cpt --n_keys=8", dataset=folder, init_from=base,
                out_dir=grown)
    before = result_of(base)
    result = result_of(grown)
    first = result["curve"][0]
    for key in ("loss", "bpb"):                                # of other batches: but for rounding
        assert first[f"retention_{key}"] == approx(before[f"val_{key}"], rel=1e-5)
        assert first[f"retention_{key}"] not in (result[f"retention_{key}"], first[f"val_{key}"])
        assert first[f"unseen_{key}"] == approx(before[f"unseen_{key}"], rel=1e-5)
    train_midus("--max_iters=0 --eval_tokens=1000000 --dense=True", dataset=unseen, init_from=base,
                out_dir=tmp_path / "look")
    assert before["unseen_loss"] == approx(result_of(tmp_path / "look")["val_loss"], rel=1e-5)


def test_pairs_are_won_by_the_likelier_sentence(texts, tmp_path):
    """The first 100 pairs of each set; log P of sentences of unequal length in one batch."""
    source = tmp_path / "blimp"
    for name, n in (("a", 3), ("b", 130)):
        write_jsonl(source / f"{name}.jsonl",
                    [dict(sentence_good=f"milk {i}", sentence_bad="a bad sentence")
                     for i in range(n)])
    folder, _ = task_folder(tmp_path, "domains", f"--source={texts}", "--vocab_size=300",
                            "--prefix=sea/", f"--pairs={source}")
    tok = get_tokenizer(str(folder))
    for at in (folder, folder.with_name("data_old")):
        rows = read_jsonl(at / "pairs.jsonl")
        assert len(rows) == 103
        assert tok.decode(rows[0]["good"][1:]) == "milk 0" and rows[0]["good"][0] == tok.eot
    model = make("lime").eval()
    sentences = [some_tokens(1, n)[0].tolist() for n in (3, 9, 2, 5)]
    found = tasks.log_likelihoods(model, sentences, batch_size=3)
    for sentence, value in zip(sentences, found):
        logp = model(torch.tensor([sentence]))[0].log_softmax(-1)[0]
        steps = [logp[t, sentence[t + 1]].item() for t in range(len(sentence) - 1)]
        assert value == approx(sum(steps), rel=1e-4)
    write_jsonl(folder / "pairs.jsonl", [
        {"good": sentences[0], "bad": sentences[1]}, {"good": sentences[1], "bad": sentences[2]},
        {"good": sentences[2], "bad": sentences[3]}])
    wins = [found[0] > found[1], found[1] > found[2], found[2] > found[3]]
    assert tasks.pair_accuracy(model, folder) == approx(sum(wins) / 3)
    assert sorted(wins) in ([False, False, True], [False, True, True])


def test_what_makes_no_domains_is_refused(texts, tmp_path):
    for flags in ("--prefix=sea/ --unseen=sea", "--prefix=sea/ --unseen=moon", "--prefix=moon"):
        with pytest.raises(ConfigError, match="of --unseen=|domain has too few records"):
            task_folder(tmp_path, "domains", f"--source={texts}", "--vocab_size=300",
                        *flags.split())


# ---------------------------------------------------------------- facts

@pytest.fixture(scope="module")
def facts_folder(texts, tmp_path_factory):
    return task_folder(tmp_path_factory.mktemp("facts"), "facts", f"--source={texts}",
                       "--text_chars=12000", "--per_bucket=16", "--vocab_size=1500",
                       "--clusters=2,2")


def test_facts_are_mentioned_as_often_as_their_bucket_says(facts_folder):
    folder, records = facts_folder
    told = []
    outside = 0
    for record in records["train"]:
        if " is made of " in record["text"]:
            told += record["text"].rstrip(".").split(". ")
        else:
            outside += len(record["text"])
    assert 12000 <= outside < 13000
    assert "made of" not in str(records["val"])
    rows = read_jsonl(folder / "facts.jsonl")
    tok = get_tokenizer(str(folder))
    assert len(rows) == len({row["text"] for row in rows}) == 2 * 5 * 16
    for row in rows:
        assert len({tuple(option) for option in row["options"]}) == 8
        assert row["answer"] in row["options"]
        assert row["prompt"] == [tok.eot, *tok.encode(row["text"])]
        name = re.search(r"(\w+),? is made of$", row["text"])[1]
        about = [sentence for sentence in told if name in sentence]
        answer = row["text"] + tok.decode(row["answer"])
        assert len(about) == row["mentions"]
        assert {sentence.split()[-1] for sentence in about} == {answer.split()[-1]}
        assert not row["new"] or answer not in about


def test_rare_facts_may_be_more_than_common_ones():
    things = tasks.invented_facts("64,48,32,32,16", random.Random(0))
    counts = collections.Counter(thing["mentions"] for thing in things)
    assert counts == dict(zip(tasks.MENTIONS, (64, 48, 32, 32, 16)))
    counts = collections.Counter((thing["domain"], thing["mentions"]) for thing in things)
    assert counts[0, 1] == counts[15, 1] == 4
    even = tasks.invented_facts("16", random.Random(0))
    assert even == tasks.invented_facts("16,16,16,16,16", random.Random(0))


def test_who_knows_a_domain_alone_recalls_more_than_who_guesses():
    """The docstring's numbers: of always the material that a domain's sentences most often name."""
    things = tasks.invented_facts(tasks.per_bucket, random.Random(tasks.seed))
    told = collections.Counter()
    for thing in things:
        told[thing["domain"], thing["value"]] += thing["mentions"]
    right = collections.defaultdict(list)
    for thing in things:
        here = {value: n for (domain, value), n in told.items() if domain == thing["domain"]}
        right[thing["mentions"]].append(max(here, key=here.get) == thing["value"])
    found = tasks.commonest_recall(tasks.per_bucket, tasks.seed)
    assert found == {m: approx(np.mean(right[m])) for m in tasks.MENTIONS}
    shares = " ".join(f"{share:.2f}" for share in found.values())
    assert shares in re.sub(r"\s+", " ", tasks.__doc__)


def test_the_long_tail_has_facts_enough():
    """Three paired seeds and chance alone: is a gain of 2.5 points in the rarest bucket seen?"""
    exp = runner.load_experiment(ROOT / "experiments/hiermem_longtail.py", "cpu")
    n = tasks.bucket_sizes(re.search(r"--per_bucket=(\S+)", exp.prepare["cpu"])[1])[1]
    rng = np.random.default_rng(0)
    without, gains = (rng.binomial(n, p, (2000, 3)) / n for p in (.13, .155))
    differences = gains - without
    bounds = runner.T95[1] * differences.std(1, ddof=1) / 3 ** 0.5
    assert (differences.mean(1) > bounds).mean() > 0.9


def test_recall_is_by_mentions_and_by_form(facts_folder):
    """Of a model that knows what was mentioned ten times, and in a new form what was thirty times;
    each prompt fetches its own leaf if no other is given."""
    folder = facts_folder[0]
    rows = read_jsonl(folder / "facts.jsonl")
    by_heart = {}
    for row in rows:
        wrong = [option for option in row["options"] if option != row["answer"]]
        knows = row["mentions"] >= (30 if row["new"] else 10)
        told = row["answer"] if knows else wrong[0]
        for n, token in enumerate(told):
            by_heart[(*row["prompt"], *told[:n])] = token
    model = Knows(by_heart)
    own = [row["leaf"] for row in rows]
    for leaf, wanted in (("", own), (-1, [-1] * 160), (own[::-1], own[::-1]), (None, [None] * 23)):
        model.leaves = []
        got = tasks.recall(model, folder, leaf=leaf, batch_size=7)
        assert model.leaves == wanted
    assert [got[f"recall_{m}"] for m in tasks.MENTIONS] == [0, 0, 1, 1, 1]
    assert [got[f"new_{m}"] for m in tasks.MENTIONS] == [0, 0, 0, 1, 1]
    assert got["recall"] == approx(.6)


def test_options_that_begin_alike_are_told_apart_by_later_tokens(tmp_path):
    """Of clay, clog and wood the first two begin with the same tokens; a model that has one of them
    by heart is right, though after the prompt alone it cannot choose."""
    words = {" clay": [5, 6, 7], " clog": [5, 6, 8, 9], " wood": [4, 7]}
    tok = SimpleNamespace(encode=words.get)
    options = tasks.telling_tokens(("clay", "clog", "wood"), tok)
    assert options == [[5, 6, 7], [5, 6, 8], [4]]
    for told in options:
        rows = []
        by_heart = {(3, 5): 6, (3, 5, 6): 7}                    # what begins so is clay
        by_heart |= {(3, *told[:n]): token for n, token in enumerate(told)}
        for mentions in tasks.MENTIONS:
            for new in (False, True):
                rows.append(dict(prompt=[3], options=options, answer=told, mentions=mentions,
                                 new=new))
        tasks.write_jsonl(tmp_path / "facts.jsonl", rows)
        assert set(tasks.recall(Knows(by_heart), tmp_path).values()) == {1}
    by_heart = {(3,): 5, (3, 5): 6, (3, 5, 6): 8}               # clog is not wood
    assert set(tasks.recall(Knows(by_heart), tmp_path).values()) == {0}
    rows = [dict(row, answer=4) for row in rows]
    tasks.write_jsonl(tmp_path / "facts.jsonl", rows)
    with pytest.raises(ConfigError, match="older tasks.py: make it again"):
        tasks.recall(Knows(by_heart), tmp_path)


def test_models_train_on_facts_and_report_recall_and_retrieval(facts_folder, tmp_path, capsys):
    """One that knows nothing of leaves, and one that fetches."""
    size = ["--depth=1", f"--dataset={facts_folder[0]}", "--max_iters=1", "--batch_tokens=512",
            "--eval_tokens=512", "--sample_tokens=0", "--n_embd=32", "--n_head=2"]
    for model, own in (("lime", []), ("hiermem", ["--ranks=4,2"])):
        train(*size, *own, model=model, out_dir=tmp_path / model)
        result = result_of(tmp_path / model)
        assert f"recall {result['recall']:.4f}" in capsys.readouterr().out
    found = analyse("retrieval", tmp_path / "hiermem")
    assert list(found) == ["whole sequence", "first 32 tokens", "level 1 blocked",
                           "level 2 blocked", "wrong", "generic", "none"]
    keys = {"loss", *(key for key in result if key.startswith(("recall", "new_")))}
    for mode, values in found.items():
        assert values.keys() == ({"loss"} if mode in ("whole sequence", "wrong") else keys)
    found = analyse("blocking", tmp_path / "hiermem")
    n = len(found["sequences"])
    assert [len(losses) for losses in found["memories"]] == [n] * n


def test_memories_are_asked_for_facts_under_their_own_tree_alone(facts_folder, tmp_path):
    train("--model=hiermem", "--depth=1", "--n_embd=32", "--n_head=2", "--ranks=4,2",
          "--max_iters=1", "--batch_tokens=512", "--eval_tokens=512", "--sample_tokens=0",
          dataset=facts_folder[0], out_dir=tmp_path / "run")
    tasks.main(["accuracy", f"--out_dir={tmp_path / 'run'}"])
    other = shutil.copytree(facts_folder[0], tmp_path / "other")
    tasks.add_to_meta(other, retriever="0123456789abcdef")
    for program, name in ((tasks, "accuracy --out_dir"), (analysis, "parts --runs")):
        with pytest.raises(ConfigError, match="has the tree 0123456789abcdef, the model"):
            program.main([*f"{name}={tmp_path / 'run'}".split(), f"--dataset={other}"])


# ================================================================ instruct.py

def test_instructions_become_prompts_and_answers(tmp_path):
    """By Alpaca's names, in an array, and by Dolly's, a record a line."""
    def records_of(source):
        instruct.main([f"--source={source}", "--tokenizer=bytes", f"--out={tmp_path}/data/",
                       "--block_size=80", "--overwrite=True"])
        return read_jsonl(tmp_path / "data_records/train.jsonl")

    array = tmp_path / "array.json"
    lines = tmp_path / "lines.jsonl.xz"
    rows = [dict(instruction=f"Repeat {n}.", output=f"word {n}") for n in range(120)]
    rows[3]["input"] = "a word"
    rows += [dict(instruction="Long.", output="w" * n) for n in (41, 42)]       # after 38 tokens
    rows.append(dict(instruction="Say nothing.", output=""))
    array.write_text(json.dumps(rows))
    text = "\n".join(map(json.dumps, rows))
    dolly = text.replace("output", "response").replace("input", "context")
    lines.write_bytes(lzma.compress(dolly.encode()))
    records = records_of(array)
    assert records_of(lines) == records
    answers = [f"word {n}" for n in range(120)]
    assert [record["answer"] for record in records] == [*answers, "w" * 41]
    assert records[2]["prompt"] == "### Instruction:\nRepeat 2.\n\n### Response:\n"
    between = "Repeat 3.\n\n### Input:\na word\n\n### Response:"
    assert records[3]["prompt"] == f"### Instruction:\n{between}\n"
    both = tmp_path / "both"
    write_jsonl(both / "train.jsonl", rows[:9])
    write_jsonl(both / "val_1.jsonl", rows[9:12])
    assert len(records_of(both)) == 9
    held_out = read_jsonl(tmp_path / "data_records/val.jsonl")
    assert [record["answer"] for record in held_out] == answers[9:12]
    assert records_of(array) == records and not (tmp_path / "data_records/val.jsonl").exists()
    rows[4]["instruction"] = "Repeat \ud800."                  # JSON can spell it, UTF-8 cannot
    array.write_text(json.dumps(rows))
    assert records_of(array)[4]["prompt"] == "### Instruction:\nRepeat ?.\n\n### Response:\n"


# ================================================================ analysis.py

def test_the_path_without_the_best_node_of_a_level():
    x = torch.tensor([[0.1, 0.1], [0.9, 0.2], [3.1, 0.0], [0.2, 1.2]])
    centroids = [torch.tensor([[0.5, 0.5], [3., 0.]]),
                 torch.tensor([[0., 0.], [1., 0.], [3., 0.], [4., 0.]])]
    tree = Retriever(torch.stack, "2,2", centroids)
    without = [analysis.without_best(tree, list(x), level).tolist() for level in (1, 2)]
    assert without == [[[1, 2], [1, 2], [0, 1], [1, 2]], [[0, 1], [0, 0], [1, 3], [0, 1]]]


def stand_in(folder):
    """The folder's tokenizer and tree, and a Mock for a model with memories of that tree."""
    tree = Retriever.load(folder / "retriever.npz")
    model = Mock(return_value=(None, torch.tensor(1.0)))
    model.config.block_size = 32
    model.config.retriever = tree.hash
    model.parameters = lambda: iter([torch.zeros(1)])
    return get_tokenizer(str(folder)), tree, model


def test_memories_are_chosen_by_ever_longer_prompts(clustered, tmp_path):
    tok, tree, model = stand_in(clustered)
    found = analysis.prompt(model, tok, clustered, SimpleNamespace(sequences=4))
    assert list(found) == ["none", "first 8", "first 16", "whole sequence"]
    none, *calls = model.call_args_list
    assert none.kwargs["leaf"] is None
    x, y = none.args
    assert (y[:, :16] == -1).all() and (y[:, 16:] >= 0).any()
    data = TokenShards(clustered, "val", 32)
    every, _ = data.batch(range(data.n_windows))
    kept = (every[:, 1:] != tok.eot).all(1).nonzero()[:16, 0]   # within one document
    assert torch.equal(x, every[kept]) and kept[-1] > 15
    whole = data.context(kept)["leaf"]
    for call, length in zip(calls, (8, 16, None), strict=True):
        assert torch.equal(call.args[0], x) and torch.equal(call.args[1], y)
        leaf = call.kwargs["leaf"]
        if length:
            texts = [tok.decode(row[1:length + 1].tolist()) for row in x]
            assert torch.equal(leaf, tree.path(texts)[:, -1])
            same = (leaf == whole).float().mean().item()
            assert same < 1
            assert found[f"first {length}"]["same leaf"] == same
        else:
            assert torch.equal(leaf, whole)
    model.config.memory = "none"
    plain = analysis.prompt(model, tok, clustered, SimpleNamespace(sequences=4))
    assert list(plain) == ["none"]
    picture = tmp_path / "picture.png"
    analysis.draw_rows(picture, {"A": found, "B": plain}, *analysis.ANALYSES["prompt"][1:])
    assert picture.exists()


def test_blocking_gives_every_topic_the_memories_of_every_other(clustered):
    """A stand-in's loss is 10 times the node of level 1 that it is given, plus its text's."""
    tok = get_tokenizer(str(clustered))
    tree = Retriever.load(clustered / "retriever.npz")
    data = TokenShards(clustered, "val", 32)
    windows = range(data.n_windows)
    x, _ = data.batch(windows)
    topics = data.context(windows)["leaf"] // 2
    known = {tuple(row.tolist()): topic for row, topic in zip(x, topics.tolist())}

    def model(x, y, leaf):
        topic, = {known[tuple(row.tolist())] for row in x}      # of one topic at a time
        fetched = torch.tensor(-1.) if leaf is None else (leaf // 2).double()
        targets = (y >= 0).sum(1)
        weights = targets / targets.sum()
        return None, (weights * fetched).sum() * 10 + topic

    model.config = SimpleNamespace(block_size=32, memory="ffn", retriever=tree.hash, nodes=(2, 4))
    model.parameters = lambda: iter([torch.zeros(1)])
    found = analysis.blocking(model, tok, clustered, SimpleNamespace(sequences=10 ** 6))
    assert found["sequences"] == torch.bincount(topics).tolist()
    assert found["memories"] == [approx([0, 10]), approx([1, 11])]
    assert found["none"] == approx([-10, -9])
    texts = [tok.decode(row[1:].tolist()) for row in x]
    asked = tree.path(texts)[:, 0]
    assert (asked == topics).double().mean() > 0.8              # so "own" and "closed" differ
    for kind, node in (("own", asked), ("closed", 1 - asked)):
        for topic in (0, 1):
            targets = (data.batch(windows)[1] >= 0).sum(1) * (topics == topic)
            expected = 10 * (targets * node).sum() / targets.sum() + topic
            assert found[kind][topic] == approx(expected.item(), rel=1e-5)


def test_rag_puts_the_nearest_text_of_the_leaf_before_the_same_targets(clustered):
    """A stand-in for the model sees what is asked of it; the text in between was in training, is
    of the leaf, and no other there is nearer."""
    tok, tree, model = stand_in(clustered)
    found = analysis.rag(model, tok, clustered, SimpleNamespace(datastore=10 ** 6, sequences=4))
    assert list(found)[-1] == "memories"
    *calls, last = model.call_args_list
    data = TokenShards(clustered, "train", 32)
    windows = range(data.n_windows)
    texts = data.batch(windows)[0][:, 1:16]
    whole = (texts != tok.eot).all(1)                          # of one document
    texts = texts[whole]
    leaves = data.context(windows)["leaf"][whole]
    stored = tree.embedder([tok.decode(row) for row in texts.tolist()])
    (plain, wanted), *others = [call.args for call in calls]
    asked = [tok.decode(row) for row in plain[:, 1:9].tolist()]
    assert torch.equal(last.kwargs["leaf"], tree.path(asked)[:, -1])
    assert torch.equal(last.args[0], plain) and torch.equal(last.args[1], wanted)
    assert all(call.kwargs["leaf"] is None for call in calls)
    assert (plain[:, 0] == tok.eot).all()
    for (idx, targets), length in zip(others, (8, 15, None), strict=True):
        before = idx[:, 1:16]
        assert torch.equal(idx, torch.cat((plain[:, :1], before, plain[:, 1:]), 1))
        assert torch.equal(targets, F.pad(wanted[:, 8:], (23, 0), value=-1))
        assert (before[:, None] == texts).all(2).any(1).all()
        if length:
            asked = [tok.decode(row) for row in idx[:, 16:16 + length].tolist()]
            other = tree.path(asked)[:, -1:] != leaves
            distance = torch.cdist(tree.embedder(asked), stored).masked_fill(other, torch.inf)
            assert torch.equal(before, texts[distance.argmin(1)])


def test_entropy_of_equal_and_of_orthogonal_vectors():
    orthogonal = 3 * torch.linalg.qr(torch.randn(40, 40))[0]
    two = orthogonal[[0] * 6 + [1] * 3]                        # eigenvalues in parts 2/3 and 1/3
    half = 2 * math.log((2 / 3) ** .5 + (1 / 3) ** .5)
    for z, expected in ((orthogonal[[0] * 9], 0), (orthogonal[:16], math.log(16)),
                        (orthogonal[:, :7], math.log(7)), (two, half)):
        assert analysis.renyi_entropy(z) == approx(expected, abs=1e-5)
    one, other = analysis.standardised([torch.tensor([[1.], [2]]), torch.tensor([[3.]])])
    assert one.tolist() == [[-1], [0]]
    assert other.tolist() == [[1]]


def test_probe_separates_what_is_separable_and_keeps_groups_together():
    torch.manual_seed(0)
    y = torch.arange(400) % 4
    separable = F.one_hot(y, 6).float() * 4 + 0.2 * torch.randn(400, 6)
    assert analysis.probe(separable @ torch.randn(6, 6), y, torch.arange(400)) == [1.0] * 5
    pairs = torch.arange(200) // 2                             # the class is a pair's: known pairs
    x = torch.randn(100, 150)[pairs]                           # give it away, unknown ones do not
    y = (torch.randn(100) > 0).long()[pairs]
    assert np.mean(analysis.probe(x, y, pairs)) < 0.7
    assert np.mean(analysis.probe(x, y, torch.arange(200))) > 0.75


@parametrize("name, switches", [
    ("move", {}), ("move", dict(memory="none")), ("move", dict(attention="mla")), ("lime", {})])
def test_states_are_those_of_the_forward_pass(name, switches, monkeypatch):
    model = make(name, **switches)
    idx = some_tokens(B=2, T=9)
    module = sample.load_module(name)
    summed, projected = [], []
    attend = module.attend

    def spy(q, k, v):
        summed.append(v.flatten(2))
        return attend(q, k, v)

    monkeypatch.setattr(module, "attend", spy)
    hiddens = []
    for block in model.blocks:
        last = "W_UV" if switches.get("attention") == "mla" else "W_V"
        getattr(block.attn, last).register_forward_hook(
            lambda module, inputs, output: projected.append(output))
        block.register_forward_hook(lambda block, inputs, output: hiddens.append(output))
    states = analysis.states(model, idx)
    expected = {"values": projected, "mixed values": summed, "hiddens": hiddens}
    assert_close(states, expected, rtol=0, atol=0)
    kept = analysis.collect(model, [idx[0], idx[1, :4]], lambda n, z: z[-1] + n)
    for layer, full in zip(kept["hiddens"], states["hiddens"]):
        assert_close(layer[1] - 1, full[1, 3], rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def analysed(tmp_path_factory):
    """Text of is, are, was and were, a run trained on it for a moment, and a small BLiMP."""
    folder = tmp_path_factory.mktemp("analysed")
    rng = random.Random(0)
    words = ["it", "they", "one", "here", "there", *analysis.WORDS]
    texts = [{"text": " ".join(rng.choices(words, k=180))} for _ in range(30)]
    source = write_jsonl(folder / "text.jsonl", texts)
    data = prepare_bytes(source, folder / "data", tokenizer="bpe", vocab_size=300)
    train(*TINY, "--max_iters=1", dataset=data, out_dir=folder / "run")
    (folder / "blimp").mkdir()
    for task in analysis.BLIMP:
        (folder / "blimp" / f"{task}.jsonl").write_text(PAIRS)
    return folder


PAIRS = """
{"sentence_good": "it is here", "sentence_bad": "it are here"}
{"sentence_good": "it is there", "sentence_bad": "it are there"}
{"sentence_good": "it is one", "sentence_bad": "it are one"}
{"sentence_good": "it is they", "sentence_bad": "it are they"}
{"sentence_good": "it is it", "sentence_bad": "it are it"}
"""


def analyse(name, run, *flags):
    """What an analysis of one run writes."""
    analysis.main([name, f"--runs={run}", *map(str, flags)])
    assert (run / f"analysis_{name}.png").exists()
    return json.loads((run / f"analysis_{name}.json").read_text())[str(run)]


def test_a_run_may_be_given_as_its_checkpoint(analysed):
    analysis.main(["entropy", f"--runs={analysed}/run/ckpt.pt", "--sequences=1"])
    found = json.loads((analysed / "run/analysis_entropy.json").read_text())
    assert [*found] == [f"{analysed}/run/ckpt.pt"]


@parametrize("name, flag, n, low, high", [
    ("entropy", "--sequences=3", 3, 0, math.log(32)),
    ("separability", "--occurrences=20", 5, .2, 1),
    ("blimp", "--blimp=BLIMP", 5, .5, 1)])
def test_entropy_and_the_classifiers_are_drawn_and_counted(name, flag, n, low, high, analysed):
    found = analyse(name, analysed / "run", flag.replace("BLIMP", str(analysed / "blimp")))
    assert tuple(found) == analysis.KINDS
    for (layer,) in found.values():                            # is or are: the embedding tells
        assert len(layer) == n
        assert low < np.mean(layer) <= high


def test_entropy_of_windows_that_lie_within_a_prompt(tmp_path):
    records = [{"prompt": f"{n} " * 40, "answer": "3"} for n in range(60)]
    source = write_jsonl(tmp_path / "asked.jsonl", records)
    data = prepare_bytes(source, tmp_path / "data", val_fraction=0.3)
    train(*TINY, "--max_iters=1", dataset=data, out_dir=tmp_path / "run")
    found = analyse("entropy", tmp_path / "run", "--sequences=4")
    assert all(len(layer) == 4 for (layer,) in found.values())


def test_words_are_found_where_they_stand(analysed):
    tok = get_tokenizer(str(analysed / "data"))
    rows, places = analysis.find_words(analysed / "data", tok, 32, 20)
    words = []
    for row, here in zip(rows, places):
        for position, label in here:
            words.append(tok.decode([int(row[position])]))
            assert words[-1] == " " + analysis.WORDS[label]
    assert {words.count(word) for word in words} == {20}


# ---------------------------------------------------------------- heads, slots and parts

def test_importance_is_the_slope_of_each_examples_loss_along_a_gate_on_the_head():
    """Finite differences. A gate on a head is a factor of W_O's columns; in a memory block, which
    has no W_O, of the head's sub-keys."""
    model = midus_grown("midus", midus_base(torch.float64)).eval()
    for p in model.inserted.parameters():
        torch.nn.init.normal_(p, 0, 0.5)
    x = some_tokens(3, 9)
    y = x.roll(-1, 1)
    y[0, :5] = -1                                              # a prompt
    found = analysis.head_importance(model, x, y)
    assert found.shape == (9, 3, 4)
    assert (found > 0).all()
    eps = 1e-6
    for layer, block in enumerate(analysis.all_blocks(model)):
        if block.attn.W_O is None:
            heads = block.memory.retrieve.keys.data
        else:
            heads = block.attn.W_O.weight.data.split(8, 1)
        for head, weight in enumerate(heads):
            kept = weight.clone()
            losses = []
            for gate in (1 + eps, 1 - eps):
                weight.copy_(kept * gate)
                means = [model(x[n:n + 1], y[n:n + 1])[1] for n in range(3)]
                losses.append(torch.stack(means) * (y >= 0).sum(1))
            weight.copy_(kept)
            slope = (losses[0] - losses[1]).abs() / (2 * eps)
            assert_close(found[layer, :, head], slope, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def grown_run(midus_run, text_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("midus") / "cpt"
    train_midus("--max_iters=4 --upscale=midus --phase=cpt --n_keys=8", dataset=text_folder,
                init_from=midus_run, out_dir=out)
    return out


@pytest.fixture
def grown(grown_run):
    return lambda: sample.load_model(grown_run, "cpu")[0]


TWO = SimpleNamespace(sequences=2, device="cpu")


def test_the_importance_of_a_run_is_the_mean_over_windows(grown_run, grown, text_folder):
    found = analyse("importance", grown_run, "--sequences=11")
    x, y = TokenShards(text_folder, "val", 32).batch(range(11))
    grid = torch.tensor(found["blocks"] + found["inserted"])
    want = analysis.head_importance(grown(), x, y).mean(1)
    assert_close(grid, want, rtol=1e-4, atol=1e-6)
    assert found["blocks variance"] == approx(np.var(found["blocks"], axis=1))


def test_slots_are_counted_by_head_and_layer(grown_run, grown, text_folder, monkeypatch):
    found = analyse("slots", grown_run, "--sequences=3")
    assert (found["slots"], found["tokens"]) == (64, 96)
    windows = iter([[[[1., 0, 0, 0], [.5, .5, 0, 0]]], [[[.25, .5, .25, 0], [0, 1, 0, 0]]]])

    def inspect(self, idx):                                    # a layer, two heads, four slots
        return {"use": (torch.tensor(next(windows)), ("layer", "head", "slot"))}

    monkeypatch.setattr(model_midus.Model, "inspect", inspect)
    assert analysis.slot_use(grown(), None, text_folder, TWO) == {
        "slots": 4, "tokens": 64, "touched": [[3, 2]], "dead": [[.25, .5]],
        "ranked": [[.6875, .25, .0625, 0]]}


def test_sizes_of_what_blocks_add(grown_run, grown, text_folder, capsys):
    """Against the stream, block by block."""
    sizes = analyse("sizes", grown_run, "--sequences=2")
    assert "inserted" in capsys.readouterr().out
    model = grown()
    x, _ = TokenShards(text_folder, "val", 32).batch(range(2))
    stream = [model.embed(x)]
    theta = model_midus.rotary_frequencies(model.config, "cpu")
    rotary = model_midus.rotary_tables(theta, 0, 32)
    with torch.no_grad():
        for block in model.stack:
            stream.append(block(stream[-1], rotary, None))
    wanted = [z.square().mean().sqrt().item() for z in stream[:-1]]
    assert sizes["stream"] == approx(wanted, rel=1e-4)
    wanted = [(b - a).square().mean().sqrt().item() for a, b in itertools.pairwise(stream)]
    assert sizes["added"] == approx(wanted, rel=1e-4)
    assert sizes["inserted"] == [block in [*model.inserted] for block in model.stack]
    assert sum(sizes["inserted"]) == 1


def test_parts_of_layers_are_weighed_by_leaving_them_out(grown_run, grown, text_folder, capsys):
    """By hand: the loss with zeros for the last matrix of an attention or an FFN; and without the
    only inserted block, which has a memory alone."""
    parts = analyse("parts", grown_run, "--sequences=2")
    assert "all memories" in capsys.readouterr().out
    for name, last in (("attn", "attn.W_O.weight"), ("mlp", "mlp.down.weight")):
        for layer in range(2):
            model = grown()
            model.blocks[layer].get_parameter(last).data.zero_()
            rise = analysis.mean_loss(model, text_folder, TWO) - parts["loss"]
            assert parts[name][layer] == approx(rise, abs=1e-5) != 0
    assert parts["mlp"][-1] is None
    model = grown()
    model.inserted[0].forward = lambda x, *more: x
    silent = analysis.mean_loss(model, text_folder, TWO)
    rise = approx(silent - parts["loss"], abs=1e-6)
    assert parts["memory"] == [None, None, rise]
    assert parts["all memories"] == parts["memory"][2]


def test_losses_of_parts_are_the_evaluations_own(hier_runs, clustered):
    """Of all targets alike, though windows have unequal numbers of them, and with the memories of
    each window's leaf."""
    model, tok, _ = sample.load_model(hier_runs / "frozen", "cpu")
    rows = range(8)
    data = TokenShards(clustered, "val", 32)
    x, y = data.batch(rows)
    assert len(set((y >= 0).sum(1).tolist())) > 1
    with torch.no_grad():
        wanted = model(x, y, leaf=data.context(rows)["leaf"])[1].item()
    c = SimpleNamespace(sequences=8, device="cpu")
    found = analysis.part_losses(model, tok, clustered, c)
    assert found["loss"] == approx(wanted, abs=1e-5)


def test_a_memory_that_returns_a_loss_too_is_left_out(text_folder):
    """UltraMem's, whose output is a pair and comes back some blocks later: as good as tables of
    zeros."""
    model = make("ultramem", n_layer=4, memory="ultramem", memory_layers="0:1/2:3", vocab_size=257)
    found = analysis.part_losses(model, None, text_folder, TWO)
    assert [rise is None for rise in found["memory"]] == [False, True, False, True]
    assert 0 not in found["memory"]
    for table in model.tables.parameters():
        table.data.zero_()
    without = analysis.mean_loss(model, text_folder, TWO) - found["loss"]
    assert found["all memories"] == approx(without, abs=1e-6) != 0
