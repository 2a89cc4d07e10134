"""Tests of run.py, tasks.py, analysis.py and the experiment files. `python test_all.py` runs them too."""
import ast
import importlib
import io
import itertools
import json
import lzma
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from contextlib import redirect_stdout, suppress
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from test_all import (ROOT, TINY, clustered, log_of, make, midus_base, midus_grown, midus_run,
                      some_tokens, text_folder, train, write_jsonl)

import kernels
import model_hiermem
import model_midus
import model_move
import prepare_fineweb as pf
import sample
from experiments import analysis, tasks
from experiments import run as runner
from model_hiermem import Retriever
from prepare_fineweb import ConfigError, TokenShards, get_tokenizer, load_meta, prepare

real_plot = runner.plot
STAND_IN = '''"""Stands in for train.py: leaves a checkpoint and a result, whose score is the one of its seed in --score=1.0:1.1:1.2."""
import json, os, signal, sys, time
from pathlib import Path
args = dict(flag[2:].split("=", 1) for flag in sys.argv[1:])
out = Path(args["out_dir"])
with open("calls.txt", "a") as file:
    print(*sys.argv[1:], file=file)
if args.get("init_from") == "resume":
    args |= json.loads((out / "ckpt.pt").read_text())
elif "init_from" in args:
    args["started"] = json.loads(Path(args["init_from"]).read_text())
if args.get("fail") == "yes":
    print("step 1\\nthe gradients broke")
    sys.exit(3)
(out / "ckpt.pt").write_text(json.dumps(args))
if "interrupt" in args:
    time.sleep(0.3)
    try:
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(30)
    except KeyboardInterrupt:
        (out / "ckpt.pt").write_text(json.dumps({**args, "saved": "after Ctrl-C"}))
    sys.exit(1)
data = Path(args["dataset"], "meta.json") if "dataset" in args else None
result = {"model": args["model"], "seed": int(args["seed"]), "val_bpb": float(args["score"].split(":")[int(args["seed"])]),
          "params": {"total": int(args.get("total", 1000))}, "step_ms": float(args.get("ms", 10)), "flops_per_token": 6e6, "device": "cpu",
          "threads": 1, "tokens": 4096, "torch": "2", "commit": "abc", "data_id": json.loads(data.read_text())["data_id"] if data else "d0", "source_hash": Path("hash.txt").read_text(),
          "config": {"folder": "private", "compile": int(args.get("compile", 0))}, "model_config": {}}
(out / "result.json").write_text(json.dumps(result))
'''


class AtOnce:
    """Popen for the stand-in: it runs to its end in this process, which takes no time."""

    def __init__(self, command, *, stdout, **others):
        argv, sys.argv, self.returncode = sys.argv, command[1:], 0
        try:
            with redirect_stdout(io.StringIO()) as printed:
                exec(compile(Path(command[1]).read_text(), command[1], "exec"), {})
        except SystemExit as stop:
            self.returncode = stop.code
        finally:
            sys.argv = argv
            stdout.write(printed.getvalue())

    def poll(self):
        return self.returncode


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A root folder of its own, with a stand-in for the trainer, for experiments on a model named toy. No processes, no pictures."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setattr(runner, "subprocess", SimpleNamespace(Popen=AtOnce, run=subprocess.run))
    monkeypatch.setattr(runner, "time", SimpleNamespace(time=time.time, sleep=lambda seconds: None))
    monkeypatch.setattr(runner, "plot", lambda *arguments: None)
    (tmp_path / "experiments").mkdir()
    for file, content in {"train.py": STAND_IN, "kernels.py": "", "model_toy.py": "width = 1\n"}.items():
        (tmp_path / file).write_text(content)
    (tmp_path / "hash.txt").write_text(runner.source_hash("toy"))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield tmp_path
    for number, handler in handlers.items():
        signal.signal(number, handler)


def experiment(lab, variants, **more):
    """Write the experiment file of these variants; a name set to None is left out. Returns its path."""
    names = {"model": "toy", "metric": "val_bpb", "baseline": next(iter(variants), ""), "seeds": 2, "cpu": {"steps": 7}, "variants": variants, **more}
    path = lab / "experiments" / "toy_table.py"
    path.write_text('"""A toy."""\n' + "".join(f"{key} = {value!r}\n" for key, value in names.items() if value is not None))
    return path


def calls(lab):
    """Every start of the stand-in so far, as {key: value} of its flags, with "run" = variant/seed."""
    lines = (lab / "calls.txt").read_text().splitlines() if (lab / "calls.txt").exists() else []
    flags = [dict(flag[2:].split("=", 1) for flag in line.split()) for line in lines]
    return [{**f, "run": "/".join(f["out_dir"].split("/")[-2:])} for f in flags]


def report_of(lab):
    """{first cell: cells} of the table in the results folder."""
    lines = (lab / "experiments/results/toy_table-cpu.md").read_text().splitlines()
    return {cells[0]: cells for cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| "))}


TOYS = {"standard": (dict(score="1.0:1.2:1.1"), .838), "Big x1": (dict(score="0.9:1.0:1.05", total=1500, ms=12), .822), "Big x2": (dict(score="0.8:0.9"), None, 1)}


def test_an_experiment_runs_seed_by_seed_and_pairs_by_seed(lab):
    variants = TOYS | {"tuned": (dict(score="0.7:0.8:0.9", init_from="@standard", cpu=dict(steps=9), gpu=dict(steps=100)), None)}
    assert runner.main(experiment(lab, variants, claims=["standard > Big x1"]), ["--seeds=3"]) == 0
    order = ["standard/s0", "big-x1/s0", "big-x2/s0", "tuned/s0", "standard/s1", "big-x1/s1", "tuned/s1", "standard/s2", "big-x1/s2", "tuned/s2"]
    assert [call["run"] for call in calls(lab)] == order
    assert all(call["seed"] == call["run"][-1] and call["model"] == "toy" for call in calls(lab))
    assert {call["run"][:-3]: call["steps"] for call in calls(lab)} == {"standard": "7", "big-x1": "7", "big-x2": "7", "tuned": "9"}
    for seed in range(3):                                      # "@standard": the checkpoint of the same seed
        started = json.loads((lab / f"out/toy_table-cpu/tuned/s{seed}/ckpt.pt").read_text())["started"]
        assert started["out_dir"] == f"out/toy_table-cpu/standard/s{seed}"
    once = {"once": (dict(score="0.8"), None, 1), "grown": (dict(score="0.7:0.8:0.9", init_from="@once"), None)}
    assert [run.needs[-2:] for run in runner.plan(runner.load_experiment(experiment(lab, once), "cpu"), runner.Options(seeds=3), "")] == ["", "s0", "s0", "s0"]
    rows = [json.loads(line) for line in (lab / "experiments/results/toy_table-cpu.jsonl").read_text().splitlines()]
    assert "private" not in str(rows) and {"variant", "overrides", "val_bpb", "data_id", "source_hash"} <= rows[0].keys()
    by_seed = {name: {row["seed"]: row for row in rows if row["variant"] == name} for name in variants}
    assert runner.differences("val_bpb", by_seed, "standard", "Big x1") == pytest.approx([.1, .2, .05])
    del by_seed["standard"][0]
    assert runner.differences("val_bpb", by_seed, "standard", "Big x1") == pytest.approx([.2, .05])     # seeds 1 and 2, not the first two of each


def test_an_interrupted_table_goes_on(lab, capsys):
    path = experiment(lab, TOYS)
    assert runner.main(path, ["--seeds=1"]) == 0
    assert runner.main(path, ["--seeds=2"]) == 0 and "Big x1, seed 0: finished earlier" in capsys.readouterr().out
    assert [call["run"] for call in calls(lab)] == ["standard/s0", "big-x1/s0", "big-x2/s0", "standard/s1", "big-x1/s1"]
    (lab / "out/toy_table-cpu/big-x1/s1/result.json").unlink()                           # stopped after a checkpoint
    shutil.rmtree(lab / "out/toy_table-cpu/standard/s1")                                 # never begun
    assert runner.main(path, []) == 0
    anew, resumed = calls(lab)[5:]
    assert anew == {**calls(lab)[3]} and resumed == dict(model="toy", init_from="resume", out_dir="out/toy_table-cpu/big-x1/s1", run="big-x1/s1")
    assert report_of(lab)["Big x1"][-1] == "2" and len(calls(lab)) == 7


def test_a_run_begun_with_other_settings_is_not_continued(lab):
    runner.main(experiment(lab, TOYS), ["--only=standard", "--seeds=1"])
    with pytest.raises(ConfigError, match=r"standard/s0 was begun with other settings:\n.*--steps=7.*\n.*\n.*--steps=8"):
        runner.main(experiment(lab, TOYS, cpu=dict(steps=8)), [])
    assert len(calls(lab)) == 1
    runner.main(experiment(lab, TOYS, cpu=dict(steps=8)), ["--table_only=True"])
    assert report_of(lab)["standard"][2] == "-"                # nor is its result shown as one of the present settings
    assert runner.main(experiment(lab, TOYS, cpu=dict(steps=8)), ["--out=other", "--only=standard,Big x1"]) == 0
    assert [call["out_dir"] for call in calls(lab)[1:3]] == ["other/toy_table-cpu/standard/s0", "other/toy_table-cpu/big-x1/s0"]


@pytest.fixture
def processes(lab, monkeypatch):
    """The lab with processes after all."""
    monkeypatch.setattr(runner, "subprocess", subprocess)
    monkeypatch.setattr(runner, "time", time)
    return lab


def test_ctrl_c_lets_the_running_trainer_save(processes, capsys):
    lab = processes
    variants = {"slow": (dict(score="1:1", interrupt=1), None), "late": (dict(score="1:1"), None)}
    assert runner.main(experiment(lab, variants), ["--seeds=1"]) == 130
    assert json.loads((lab / "out/toy_table-cpu/slow/s0/ckpt.pt").read_text())["saved"] == "after Ctrl-C"
    assert "go on with: python train.py " in capsys.readouterr().out and len(calls(lab)) == 1


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_failing_run_does_not_stop_the_others(jobs, processes, capsys):
    lab = processes
    variants = {"standard": TOYS["standard"], "broken": (dict(score="1:1", fail="yes"), None), "after": (dict(score="2:2", init_from="@broken"), None),
                "Big x1": TOYS["Big x1"]}
    assert runner.main(experiment(lab, variants, claims=["standard > broken"]), [f"--jobs={jobs}", "--seeds=1"]) == 1
    assert sorted(call["run"] for call in calls(lab)) == ["big-x1/s0", "broken/s0", "standard/s0"]     # "after" has nothing to start from
    printed = capsys.readouterr().out
    assert "broken, seed 0" in printed and "failed, code 3" in printed and "step 1\n    the gradients broke" in printed
    assert "needs out/toy_table-cpu/broken/s0/ckpt.pt, which is not there" in printed
    assert report_of(lab)["broken"][2] == "-" and report_of(lab)["standard > broken"][-1] == "not run" and report_of(lab)["Big x1"][2] == "0.9000"


@pytest.mark.parametrize("differences, verdict", [
    ([.01, .02, .03], "holds"), ([-.03, -.01, -.02], "reversed"), ([0, .02, .04], "inside noise"), ([0, -.02, -.04], "inside noise"),
    ([.0070, .0170, .0270], "holds"), ([.0068, .0168, .0268], "inside noise"),          # mean 1.70 and 1.68 standard deviations of .01
    ([.01, .011], "holds"), ([.01, .02], "inside noise"),                               # bounds 6.314 / sqrt 2 sd = .0032 and .032
    ([.001], "sign agrees (1 seed)"), ([-.001], "sign differs (1 seed)"), ([], "not run"),
])
def test_verdicts(differences, verdict):
    assert runner.verdict(differences) == verdict


def test_the_noise_bound_is_students():
    assert runner.noise([1.0, 2.0, 3.0]) == pytest.approx(1.69, abs=.005)
    for n, quantile in enumerate(runner.T95, 1):               # the density integrated from 0 to the quantile is 0.45
        x = (np.arange(20000) + .5) / 20000 * quantile
        density = math.gamma((n + 1) / 2) / math.gamma(n / 2) / math.sqrt(n * math.pi) * (1 + x ** 2 / n) ** (-(n + 1) / 2)
        assert density.mean() * quantile == pytest.approx(.45, abs=1e-4), n
    d = [.1 * i for i in range(12)]                            # beyond the table: its last entry, which is a little too strict
    assert runner.noise(d) == pytest.approx(1.833 * np.std(d, ddof=1) / 12 ** .5)


def test_the_table_and_its_plot(lab, monkeypatch):
    path = experiment(lab, TOYS, claims=["standard > Big x1 > Big x2"])
    assert runner.main(path, ["--seeds=3"]) == 0
    lines = (lab / "experiments/results/toy_table-cpu.md").read_text().splitlines()
    assert lines[:3] == ["# toy_table, scale cpu", "", "A toy."]
    rows = [line for line in lines if line.startswith("| ") and "---" not in line]
    assert rows == [                                           # by hand: differences -.1 -.2 -.05, mean -.1167, sd .0764; bound .1288
        "| variant | parameters | val_bpb | minus standard | paper | paper's difference | MFLOP a token | step time | seeds |",
        "| standard | 1,000 | 1.1000 ± 0.1000 | - | 0.838 | - | 6.0 | 1.00x | 3 |",
        "| Big x1 | +500 | 0.9833 ± 0.0764 | -0.1167 ± 0.0764 | 0.822 | -0.0160 | 6.0 | 1.20x | 3 |",
        "| Big x2 | +0 | 0.8000 | -0.2000 | - | - | 6.0 | 1.00x | 1 |",
        "| claim | difference | paper's | seeds | verdict |",
        "| standard > Big x1 | +0.1167 ± 0.0764 | +0.0160 | 3 | inside noise |",
        "| Big x1 > Big x2 | +0.1000 | - | 1 | sign agrees (1 seed) |"]
    assert lines[-1] == "`--steps=7`; tokens 4096; data_id d0; device cpu; threads 1; torch 2; commit abc."
    shutil.rmtree(lab / "out")
    monkeypatch.setattr(runner, "plot", real_plot)
    from matplotlib.axes import Axes
    bars, errorbar = [], Axes.errorbar
    monkeypatch.setattr(Axes, "errorbar", lambda axes, x, y, **more: bars.append((x, more["xerr"])) or errorbar(axes, x, y, **more))
    assert runner.main(path, ["--table_only=True"]) == 0       # from the results file alone
    assert bars == [(pytest.approx(-.1167, abs=1e-4), pytest.approx(.1288, abs=1e-4)), (pytest.approx(-.2), None)]
    assert (lab / "experiments/results/toy_table-cpu.md").read_text().splitlines() == lines and len(calls(lab)) == 7
    assert (lab / "experiments/results/toy_table-cpu.png").read_bytes().startswith(b"\x89PNG")


def test_a_shift_of_domain_is_drawn_as_a_plane_too(tmp_path, monkeypatch):
    """Beside the differences: the new text's loss by the old one's, means over seeds; "a 1" and "a 2e-3" are one line, in the file's order."""
    from matplotlib.figure import Figure
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    exp = {"metric": "val_loss", "also": ("retention_loss",), "minus": "b", "baseline": {"a 1": "b", "a 2e-3": "b", "b / 4": "b", "d": "b"},
           "variants": {name: ({}, None, 1) for name in ("a 1", "b", "a 2e-3", "b / 4", "c", "d")}}
    rows = {"a 1": {0: {"val_loss": 1., "retention_loss": 2.}, 1: {"val_loss": 3., "retention_loss": 4.}}, "a 2e-3": {0: {"val_loss": 5., "retention_loss": 6.}},
            "b": {0: {"val_loss": 7., "retention_loss": 8.}}, "b / 4": {0: {"val_loss": 9., "retention_loss": 1.}}, "c": {}, "d": {0: {"val_loss": 1.}}}
    real_plot(exp, rows, tmp_path / "x.png")
    real_plot(exp | {"also": ()}, rows, tmp_path / "x.png")
    assert [len(figure.axes) for figure in drawn] == [2, 1]
    plane = drawn[0].axes[1]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in plane.lines] == [([3., 6.], [2., 5.]), ([8., 1.], [7., 9.])]
    assert [text.get_text() for text in plane.texts] == ["a 1", "a 2e-3", "b", "b / 4"]


def test_rows_of_older_sources_are_marked(lab):
    path, table = experiment(lab, TOYS), lambda: (runner.main(path, ["--table_only=True"]), report_of(lab))[1]
    runner.main(path, ["--seeds=1"])
    (lab / "model_toy.py").write_text("# a comment\nwidth = 1\n")
    assert not any("†" in name for name in table())
    (lab / "model_toy.py").write_text("width = 2\n")
    assert {"standard †", "Big x1 †", "Big x2 †"} <= table().keys()
    (lab / "hash.txt").write_text(runner.source_hash("toy"))
    shutil.rmtree(lab / "out/toy_table-cpu/standard")
    runner.main(path, ["--seeds=1"])
    assert {"standard", "Big x1 †", "Big x2 †"} <= report_of(lab).keys()


def test_a_variant_may_have_data_of_its_own_and_start_from_another_experiment(lab):
    """dataset="@_old" is the folder beside the experiment's own; init_from="@other/base" a run of experiments/other.py. No steps, no time."""
    for name in ("new", "new_old"):
        (lab / f"data/{name}").mkdir(parents=True)
        (lab / f"data/{name}/meta.json").write_text(json.dumps({"data_id": f"id-{name}"}))
    (lab / "out/other-cpu/base/s0").mkdir(parents=True)
    experiment(lab, {"base": ({}, None)}).rename(lab / "experiments/other.py")
    (lab / "out/other-cpu/base/s0/ckpt.pt").write_text('{"score": "from the other"}')
    variants = {"base": (dict(score="1.0", dataset="@_old"), None), "grown": (dict(score="0.9", init_from="@base"), None),
                "far": (dict(score="0.8", init_from="@other/base"), None)}
    path, flags = experiment(lab, variants, seeds=1, baseline={"far": "grown", "grown": "grown"}, also=("train_loss",)), ["--dataset=data/new"]
    assert runner.main(path, flags) == 0
    assert [call["dataset"] for call in calls(lab)] == ["data/new_old", "data/new", "data/new"]
    assert json.loads((lab / "out/toy_table-cpu/far/s0/ckpt.pt").read_text())["started"] == {"score": "from the other"}
    file = lab / "experiments/results/toy_table-cpu.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["data_id"] for row in rows] == ["id-new_old", "id-new", "id-new"]
    by_seed = {row["variant"]: {0: row | dict(train_loss=.25, step_ms=None)} for row in rows}
    table = runner.table(runner.load_experiment(path, "cpu"), runner.Options(), by_seed)
    assert "| far | +0 | 0.8000 | -0.1000 | - | - | 0.2500 | 6.0 | - | 1 |" in table and "| train_loss | MFLOP a token | step time |" in table
    by_seed["grown"][0]["train_loss"] = .75                    # a claim about another column
    exp = runner.load_experiment(experiment(lab, variants, claims=["grown > far", "train_loss: grown > far"], also=("train_loss",)), "cpu")
    table = runner.table(exp, runner.Options(), by_seed)
    assert "| grown > far | +0.1000 | - | 1 | " in table and "| train_loss: grown > far | +0.5000 | - | 1 | sign agrees" in table
    file.write_text(file.read_text().replace("id-new_old", "id-older") + json.dumps(rows[0] | {"seed": 1}) + "\n")
    with pytest.raises(ConfigError, match="id-new_old, id-older"):
        runner.main(path, [*flags, "--table_only=True", "--only=grown"])
    file.unlink()
    shutil.rmtree(lab / "out/other-cpu")
    assert runner.main(experiment(lab, {"far": variants["far"]}, seeds=1), [*flags, "--out=out_b"]) == 1


def test_results_on_different_data_are_not_mixed(lab):
    for name in "ab":
        (lab / f"data/{name}").mkdir(parents=True)
        (lab / f"data/{name}/meta.json").write_text(json.dumps({"data_id": f"id-{name}"}))
    path, flags = experiment(lab, TOYS), ["--only=standard", "--seeds=1"]
    assert runner.main(path, ["--dataset=data/a", *flags]) == 0
    with pytest.raises(ConfigError, match="different data .data_id id-a, id-b. are never mixed: move experiments/results/toy_table-cpu.jsonl away"):
        runner.main(path, ["--dataset=data/b", "--out=out_b", *flags])
    assert len(calls(lab)) == 1 and not (lab / "out_b").exists()                         # refused before the first run
    (lab / "experiments/results/toy_table-cpu.jsonl").unlink()
    assert runner.main(path, ["--dataset=data/b", "--out=out_b", *flags]) == 0
    assert calls(lab)[1]["dataset"] == "data/b"


def test_an_experiment_prepares_its_data_once(lab):
    (lab / "prepare_fineweb.py").write_text('import sys, pathlib\nopen("prepared.txt", "a").write(" ".join(sys.argv[1:]) + "\\n")\n'
        'folder = pathlib.Path("data/small")\nfolder.mkdir(parents=True)\n(folder / "meta.json").write_text(\'{"data_id": "small"}\')\n')
    path = experiment(lab, TOYS, prepare="--source=x --out=data/small")
    assert runner.main(path, ["--seeds=1"]) == runner.main(path, ["--seeds=2"]) == 0
    assert (lab / "prepared.txt").read_text() == "--source=x --out=data/small\n" and {call["dataset"] for call in calls(lab)} == {"data/small"}
    with pytest.raises(ConfigError, match="`prepare` must say --out=data/NAME"):
        runner.main(experiment(lab, TOYS, prepare=dict(cpu="--source=x", gpu="")), [])
    (lab / "experiments/make.py").write_text((lab / "prepare_fineweb.py").read_text().replace("small", "task"))
    assert runner.prepared_data(dict(prepare="experiments/make.py toy --out=data/task"), runner.Options()) == "data/task"        # a command
    (lab / "prepare_fineweb.py").write_text("import sys; sys.exit(1)")
    with pytest.raises(ConfigError, match="the data could not be prepared.*--source=PATH.*--dataset=FOLDER"):
        runner.main(experiment(lab, TOYS, prepare="--source=x --out=data/other"), [])


@pytest.mark.parametrize("changes, flags, message", [
    (dict(metric=None, seeds=None), [], "does not define metric, seeds"),
    ({}, ["--scale=gpu"], "does not define gpu"),
    (dict(claims=["standard > Big x3"]), [], "claims name 'Big x3', which is no variant (standard, Big x1, Big x2)"),
    (dict(baseline="dense"), [], "'dense', which is no variant"),
    (dict(variants={"standard": dict(score=1)}), [], "variant 'standard' must be (dict of overrides, paper's number or None[, seeds])"),
    (dict(variants={"standard": ("score", 1)}), [], "variant 'standard' must be (dict"),
    (dict(variants={"A x1": ({}, 1), "a-x1": ({}, 1)}), [], "variant 'a-x1' has a comma or the same folder name as 'A x1': a-x1"),
    (dict(variants={"A, B": ({}, 1)}), [], "variant 'A, B' has a comma"),
    (dict(variants={"A": (dict(init_from="@B"), 1), "B": ({}, 1)}), [], "'A' has init_from='@B', which must name a variant above it"),
    (dict(claims=["train_loss: standard > Big x1"]), [], "a claim is about 'train_loss', which is no column (val_bpb)"),
    ({}, ["--scale=tpu"], "--scale=tpu: must be cpu or gpu"),
    ({}, ["--only=standard,Big x9"], "there is no variant 'Big x9', but standard, Big x1, Big x2"),
    ({}, ["--seed=1"], "seeds"),
    ({}, ["experiments/other.py"], "one experiment at a time, not also experiments/other.py"),
])
def test_bad_experiments_are_named(changes, flags, message, lab):
    path = experiment(lab, **{"variants": TOYS, **changes})
    with pytest.raises(ConfigError, match=re.escape(message)):
        runner.main(path, flags)
    assert not calls(lab)


def test_how_runs_are_computed(lab, monkeypatch):
    """Cores are shared by the runs at once, --compile goes to each, and neither is part of what a run is."""
    seen, run = [], runner.Run("standard", 0, "out/standard/s0", ["--model=toy"])
    monkeypatch.setattr(runner, "subprocess", SimpleNamespace(Popen=lambda command, *, env, **others: seen.append((command[2:], env.get("OMP_NUM_THREADS")))))
    monkeypatch.setattr(runner.os, "sched_getaffinity", lambda process: range(7), raising=False)
    for options in (dict(jobs=1), dict(jobs=3, compile=0), dict(jobs=9, compile=1)):
        runner.start(run, runner.Options(**options))
    flags = ["--model=toy", "--out_dir=out/standard/s0"]
    assert seen == [(flags, os.environ.get("OMP_NUM_THREADS")), ([*flags, "--compile=0"], "2"), ([*flags, "--compile=1"], "1")]
    assert (lab / "out/standard/s0/flags.txt").read_text() == "--model=toy"


def test_step_times_are_compared_between_runs_that_were_computed_alike(lab):
    path = experiment(lab, TOYS)
    runner.main(path, ["--seeds=2", "--only=standard"])
    runner.main(path, ["--seeds=2", "--only=Big x1", "--compile=1"])
    assert report_of(lab)["Big x1"][3:] == ["-0.1500 ± 0.0707", "0.822", "-0.0160", "6.0", "-", "2"]


def test_an_experiment_file_that_is_not_there(lab):
    with pytest.raises(ConfigError, match="there is no experiment file experiments/nothing.py"):
        runner.main("experiments/nothing.py", [])


def test_source_hash_sees_code_alone(lab):
    code = 'import math\n\n\nclass A:\n    def f(self, x):\n        return math.sin(x) + 1\n'
    prose = '"""A module."""\nimport math   # why\n\nclass A:\n    """A class."""\n    def f(self, x):\n        """A function."""\n        return (math.sin(x)\n                + 1)\n'
    hashes = {}
    for file in ("model_toy.py", "kernels.py", "train.py"):
        for content in (code, prose, code.replace("+ 1", "+ 2"), code.replace("sin", "cos"), code.replace("(self, x)", "(self, x=1)"), code + '"text"\n'):
            (lab / file).write_text(content)
            hashes[file, content] = runner.source_hash("toy")
        assert hashes[file, code] == hashes[file, prose] and re.fullmatch("[0-9a-f]{8}", hashes[file, code])
        (lab / file).write_text("")
    assert len(set(hashes.values())) == 15                     # five kinds of code in each of three files


def test_the_commit_of_a_run_is_dirty_by_code_and_not_by_results(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert runner.commit() == ""                               # no repository
    for file in ("train.py", "experiments/results/a.md"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("1")
    for command in ("init -q", "add .", "-c user.name=a -c user.email=b commit -qm 1"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    name = runner.commit()
    assert re.fullmatch("[0-9a-f]{7,}", name)
    (tmp_path / "experiments/results/a.md").write_text("2")
    assert runner.commit() == name
    (tmp_path / "train.py").write_text("2")
    assert runner.commit() == name + "-dirty"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert runner.commit() == ""                               # no git


def test_the_experiments_here_fit_their_models():
    """Each variant's keys are train.py's or its model's and make a Config; the claims are true of the paper's own numbers."""
    keys = set(re.findall(r"^(\w+) = ", (ROOT / "train.py").read_text().split("defaults =")[0], re.M)) | {"vocab_size"}
    files = [path for path in (ROOT / "experiments").glob("*.py") if re.search(r"^variants\b", path.read_text(), re.M)]
    assert len(files) >= 12
    for path, scale in itertools.product(files, ("cpu", "gpu")):
        if path.stem == "lime_prosqa" and scale == "cpu":      # a GPU's work
            continue
        exp = runner.load_experiment(path, scale)
        assert exp["name"] == path.stem                        # also where the file's loops run over names
        assert all(runner.paper(exp, a, b) is None or runner.paper(exp, a, b) > 0 for a, b, _ in runner.pairs(exp)), path
        for name in exp["variants"]:
            chosen = runner.settings(exp, scale, name)
            module = importlib.import_module(f"model_{chosen['model']}")
            fields = {k: v for k, v in chosen.items() if k in module.Config.__dataclass_fields__}
            assert chosen.keys() <= keys | fields.keys(), (path, name)
            assert not chosen.get("dense") or not fields.keys() & module.DENSE.keys()
            fields |= module.DENSE if chosen.get("dense") else {}
            if "preset" in chosen:
                module.Config(**{**module.PRESETS[chosen["preset"]], **fields})
            else:
                module.Config.from_depth(chosen["depth"], **fields)
            assert runner.slug(name) and chosen["batch_tokens"] % chosen.get("block_size", 589 if path.stem == "lime_prosqa" else 256) == 0
            if str(chosen.get("init_from", "")).startswith("@"):                         # also of another experiment
                other, _, start = chosen["init_from"][1:].rpartition("/")
                base = runner.load_experiment(ROOT / "experiments" / f"{other or exp['name']}.py", scale)
                assert start in base["variants"] and (base["prepare"] == exp["prepare"] or path.stem == "lime_prosqa")
                dense = not chosen.get("upscale") and runner.settings(base, scale, start).get("dense")
                assert not dense or chosen.get("dense") or "memory" in chosen, (path, name)       # or the checkpoint's "none" is kept


def test_readme_has_every_claim():
    table = runner.claims_table()
    assert "| [which_memory-cpu](results/which_memory-cpu.md) | MoVE dense > MoVE | - | " in table
    if table not in (ROOT / "experiments/README.md").read_text(encoding="utf-8"):        # as after every experiment that somebody runs
        message = "experiments/README.md has other claims than `python experiments/run.py claims`"
        assert not os.environ.get("CI"), message
        warnings.warn(message)


def test_exchange_rate_same_flops():
    for scale, vocab_size in (("cpu", 4096), ("gpu", 50257)):
        exp, cost = runner.load_experiment(ROOT / "experiments/move_exchange_rate.py", scale), {}
        for name in exp["variants"]:
            chosen = runner.settings(exp, scale, name)
            fields = model_move.DENSE if chosen.get("dense") else {k: chosen[k] for k in ("memory", "memory_scale")}
            with torch.device("meta"):
                net = model_move.Model(model_move.Config.from_depth(chosen["depth"], vocab_size=vocab_size, block_size=chosen["block_size"], **fields))
            cost[name] = chosen["max_iters"] * net.flops_per_token()
        for name in ("L+1 same FLOPs", "L+2 same FLOPs"):
            assert cost[name] == pytest.approx(cost["MoVE x1"], rel=.005)
        assert cost["L+2 same steps"] > cost["L+1 same steps"] > 1.1 * cost["MoVE x8"]


# ---------------------------------------------------------------- experiments/tasks.py

def test_a_document_may_be_a_window_of_its_own(tmp_path):
    records = [{"prompt": f"{i}?", "answer": "a" * (i % 5 + 1)} for i in range(40)]
    source, rows = write_jsonl(tmp_path / "tasks.jsonl", records), []
    settings = dict(source=source, tokenizer="bytes", val_fraction=0.3, workers=1)
    folder = prepare(**settings, block_size=9, out=tmp_path / "data")
    for split in ("train", "val"):
        data = TokenShards(folder, split, 9)
        for ids, wanted in zip(*(t.tolist() for t in data.batch(range(data.n_windows)))):
            prompt, answer = re.fullmatch(r"(\d+\?)(a+)\0*", bytes(i % 256 for i in ids[1:]).decode()).groups()
            rows.append({"prompt": prompt, "answer": answer})
            assert ids[0] == 256 and wanted == [-1] * len(prompt) + [97] * len(answer) + [256] + [-1] * (8 - len(prompt + answer))
        assert len(data.shards[0]) == 10 * data.n_windows and load_meta(folder)["documents"][split] == data.n_windows
    assert sorted(rows, key=str) == sorted(records, key=str)
    with pytest.raises(ConfigError, match="block_size=8: a document of .* is a window of block_size=9"):
        TokenShards(folder, "val", 8)
    with pytest.raises(ConfigError, match="block_size=8: a document has 10 tokens with eot before and after it, .* needs block_size=9"):
        prepare(**settings, block_size=8, out=tmp_path / "short")


def python(expression):                                        # "(7 + 5) / 6 x 2" in Python
    return ast.parse(expression.replace("x", "*"), mode="eval").body


def operations(node, values):
    """An expression's value, exactly; that of every operation is added to values."""
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    a, b = operations(node.left, values), operations(node.right, values)
    values.append(a + b if isinstance(node.op, ast.Add) else a - b if isinstance(node.op, ast.Sub) else a * b if isinstance(node.op, ast.Mult) else a / b)
    return values[-1]


def test_arithmetic_is_exact_at_every_step():
    rng, operators = random.Random(0), ""
    for n, largest in [(2, 2), (2, 99), (3, 5), (4, 19), (5, 99), (6, 19), (6, 199)] * 15:
        record = tasks.solve(tasks.random_tree(n, largest, rng))
        steps = (record["prompt"] + " " + record["answer"]).split(" = ")
        assert len(steps) == n and steps[-1].isdigit()
        for k, step in zip(range(n, 0, -1), steps):
            values, numbers = [], [int(number) for number in re.findall(r"\d+", step)]
            assert operations(python(step), values) == int(steps[-1]) and (len(numbers), len(values)) == (k, k - 1), record
            assert not re.search(r"(?<!\d)1 x|[x/] 1(?!\d)", step), "a factor 1 is no operation"
            assert all(v.denominator == 1 and 1 <= v <= largest for v in [*map(Fraction, numbers), *values]), record
            for i, j in itertools.combinations([i for i, c in enumerate(step) if c in "()"], 2):         # no parentheses without need
                with suppress(SyntaxError):         # if those two are not a pair
                    bare = step[:i] + " " + step[i + 1:j] + " " + step[j + 1:]
                    assert step[i] + step[j] != "()" or ast.dump(python(bare.strip())) != ast.dump(python(step)), record
        operators += re.sub("[^-+x/]", "", record["prompt"])
    assert all(operators.count(o) > len(operators) / 10 for o in "+-x/")


def test_arithmetic_of_appendix_b():
    tree = [3, "/", [12, "+", [7], [5]], [4, "-", [18, "+", [6], [12, "x", [4], [3]]], [14, "x", [2], [7]]]]
    assert tasks.solve(tree) == {"prompt": "(7 + 5) / (6 + 4 x 3 - 2 x 7) =", "answer":
        "12 / (6 + 4 x 3 - 2 x 7) = 12 / (6 + 12 - 2 x 7) = 12 / (18 - 2 x 7) = 12 / (18 - 14) = 12 / 4 = 3"}


def task_folder(tmp_path, *flags):
    tasks.main([*flags, f"--out={tmp_path / 'data'}"])
    return tmp_path / "data", {s: [json.loads(line) for line in (tmp_path / "data_records" / f"{s}.jsonl").open()] for s in ("train", "val")}


def test_a_task_trains_and_its_accuracy_is_a_result(tmp_path, capsys):
    folder, records = task_folder(tmp_path, "arithmetic", "--operands=2,3", "--max_value=12", "--samples=90", "--val_samples=9")
    meta, everything, run = load_meta(folder), records["train"] + records["val"], tmp_path / "run"
    assert len({r["prompt"] for r in everything}) == len(everything) == 198 and len(records["val"]) == 18, "no prompt twice"
    assert (meta["vocab_size"], meta["task"]["operands"]) == (13 + 7 + 1, "2,3")
    lengths = {len(re.findall(r"\d+|\S", r["prompt"] + r["answer"])) + 2 for r in everything}
    assert [min(lengths), max(lengths)] == [tasks.longest(2), tasks.longest(3)] == [7, meta["block_size"] + 1]
    train("--depth=1", f"--dataset={folder}", f"--out_dir={run}", "--max_iters=2", "--batch_tokens=112", "--sample_tokens=0", "--eval_interval=1")
    result = json.loads((run / "result.json").read_text())
    assert [at["step"] for at in result["curve"]] == [0, 1, 2] and result["accuracy"] == result["curve"][2]["accuracy"] == log_of(run, "accuracy")[2]
    assert f"val {result['val_loss']:.4f} accuracy {result['accuracy']:.4f}" in capsys.readouterr().out
    tasks.main(["accuracy", f"--out_dir={run}"])
    assert re.findall(r"(?m)^(accuracy\w*) +([\d.]+)$", capsys.readouterr().out) == [(k, f"{result[k]:.4f}") for k in ("accuracy", "accuracy_2", "accuracy_3")]
    row = json.dumps({"variant": "A", **result}) + "\n"
    (tmp_path / "toy.jsonl").write_text(row + row.replace('"accuracy": 0.0', '"accuracy": 0.5'))
    tasks.main(["curves", f"--results={tmp_path / 'toy.jsonl'}"])
    assert "0: 0.250" in capsys.readouterr().out and (tmp_path / "toy-curves.png").exists()


class Parrot(torch.nn.Module):
    """Knows the answers by heart; `spoil` changes them, eot included."""

    def __init__(self, data, spoil):
        super().__init__()
        self.config, self.weight, self.next = SimpleNamespace(block_size=data.block_size), torch.nn.Parameter(torch.zeros(1)), {}
        for x, y in zip(*data.batch(range(data.n_windows))):
            prompt, answer = x[:int((y >= 0).int().argmax()) + 1].tolist(), spoil(y[y >= 0].tolist())
            self.next |= {(*prompt, *answer[:i]): token for i, token in enumerate(answer)}

    def forward(self, idx):
        return F.one_hot(torch.tensor([[self.next.get(tuple(row), 1)] for row in idx.tolist()]), 257).float(), None


@pytest.mark.parametrize("spoil, expected", [
    (lambda answer: answer, [1, 1, 1]),
    (lambda answer: answer if len(answer) == 2 else [*answer[:-2], 8 + (answer[-2] - 7) % 21, 0], [.5, 1, 0]),         # the next number; number v is token 8 + v
    (lambda answer: answer[:-1] + [1] * 20, [0, 0, 0]),        # the right number, but no end
    (lambda answer: [7, answer[-2], 0], [1, 1, 1]),            # only the last number counts
])
def test_accuracy_wants_the_last_number_and_an_end(spoil, expected, tmp_path):
    folder, _ = task_folder(tmp_path, "arithmetic", "--operands=2,3", "--max_value=20", "--samples=5", "--val_samples=20")
    data, tok = TokenShards(folder, "val", 14), get_tokenizer(str(folder))
    assert list(tasks.accuracy(Parrot(data, spoil), data, tok, batch_size=7).items()) == list(zip(("accuracy", "accuracy_2", "accuracy_3"), expected))


def test_prosqa_is_a_graph_with_one_answer(tmp_path):
    rng, lengths, chosen = random.Random(0), [], []
    for s in (tasks.prosqa_sample(rng) for _ in range(60)):
        edges, symbols, frontier = s["edges"], s["idx_to_symbol"], {s["root"]}
        above = lambda n: {n}.union(*(above(a) for a, b in edges if b == n))
        entities = set(range(len(symbols))) - {b for _, b in edges}
        fact = lambda a, b: ("" if a in entities else "Every ") + f"{symbols[a]} is a {symbols[b]}."
        *facts, question = re.findall(r"[^.?]+[.?]", s["question"])
        assert sorted(text.strip() for text in facts) == sorted(fact(a, b) for a, b in edges) and all(a < b for a, b in edges)
        assert len(set(symbols)) == len(symbols) and {symbols[n] for n in entities} <= set(tasks.NAMES) and s["root"] in entities
        assert set(re.findall(r"\w+", question)) == {"Is", "a", "or", *(symbols[s[key]] for key in ("root", "target", "neg_target"))}
        assert not {a for a, _ in edges} & {s["target"], s["neg_target"]} and s["answer"] == fact(s["root"], s["target"])
        assert s["root"] in above(s["target"]) and s["root"] not in above(s["neg_target"]) and not above(s["target"]) & above(s["neg_target"]) & {0, 1}
        path = [s["root"]]
        for step in s["steps"]:
            assert s["target"] not in frontier, "there is a shorter way"
            path.append(next(b for a, b in edges if a == path[-1] and fact(a, b) == step))
            frontier = {b for a, b in edges if a in frontier}
        assert path[-1] == s["target"] and len(path) >= 4
        lengths.append(len(path) - 1)
        chosen.append((s["root"], re.findall(r"\w+", question)[3] == symbols[s["target"]]))
    assert all(15 < sum(choice) < 45 for choice in zip(*chosen)), "neither the place of a name nor that of an answer tells"
    assert 3.5 < np.mean(lengths) < 4.2                        # of the published files: 3.8
    samples = [tasks.prosqa_sample(rng) for _ in range(4)]
    (tmp_path / "val.json").write_text(json.dumps(samples[:2]))
    (tmp_path / "train.json.xz").write_bytes(lzma.compress(json.dumps(samples[1:]).encode()))
    folder, records = task_folder(tmp_path, "prosqa", "--tokenizer=bytes", f"--val={tmp_path / 'val.json'}", f"--train={tmp_path / 'train.json.xz'}")
    assert records["val"][0] == {"prompt": samples[0]["question"] + "\n", "answer": "\n".join(samples[0]["steps"]) + "\n### " + samples[0]["answer"]}
    assert [r["prompt"] for r in records["train"]] == [s["question"] + "\n" for s in samples[2:]]      # the second one is in the held-out file
    data = TokenShards(folder, "val", load_meta(folder)["block_size"])
    assert tasks.accuracy(Parrot(data, lambda answer: answer), data, get_tokenizer("bytes"))["accuracy"] == 1
    assert tasks.accuracy(Parrot(data, lambda answer: answer[:9] + [256]), data, get_tokenizer("bytes"))["accuracy"] == 0


def test_domains_are_two_folders_with_the_old_ones_tokenizer_and_evaluations_give_both_losses(tmp_path, capsys):
    rng, words = random.Random(0), {"shop": "bread milk apple price coin scale".split(), "sea/a": "harbour sail mast wave anchor".split()}
    for split, n in (("train", 40), ("val", 16)):
        rows = [{"text": " ".join(rng.choices(words[source], k=60)), "source": source} for _ in range(n) for source in words]
        write_jsonl(tmp_path / "source" / f"{split}.jsonl", rows)
    flags = ["domains", f"--source={tmp_path / 'source'}", "--vocab_size=300"]
    folder, records = task_folder(tmp_path, *flags, "--prefix=sea/")
    old = folder.with_name("data_old")
    for where, source, split in ((folder, "sea/a", "train"), (folder, "sea/a", "val"), (old, "shop", "train"), (old, "shop", "val")):
        rows = [json.loads(line) for line in (tmp_path / f"{where.name}_records/{split}.jsonl").open()]
        assert [row["source"] for row in rows] == [source] * (40 if split == "train" else 16) and set(rows[0]["text"].split()) <= set(words[source])
    assert (folder / "tokenizer.json").read_bytes() == (old / "tokenizer.json").read_bytes()
    assert load_meta(folder)["tokenizer"] == load_meta(old)["tokenizer"]
    tok = get_tokenizer(str(folder))
    assert len(tok.encode(" milk")) == 1 < len(tok.encode(" mast")), "trained on the old domain"
    flags = ["--model=midus", *TINY, "--depth=2", "--max_iters=3", "--eval_tokens=1000000", "--learning_rate=0.01"]
    train(*flags, "--dense=True", f"--dataset={old}", f"--out_dir={tmp_path / 'base'}")
    grow = ["--upscale=midus", "--phase=cpt", "--n=8", f"--init_from={tmp_path / 'base'}"]
    train(*flags, *grow, f"--dataset={folder}", f"--out_dir={tmp_path / 'grown'}")
    base, grown = (json.loads((tmp_path / run / "result.json").read_text()) for run in ("base", "grown"))
    for key in ("loss", "bpb"):                                # of other batches: equal but for rounding
        first, last = grown["curve"][0][f"retention_{key}"], grown[f"retention_{key}"]
        assert first == pytest.approx(base[f"val_{key}"], rel=1e-5) and last != first != grown["curve"][0][f"val_{key}"]
    capsys.readouterr()
    tasks.main(["accuracy", f"--out_dir={tmp_path / 'grown'}"])
    assert f"retention_loss {grown['retention_loss']:.4f}" in capsys.readouterr().out
    for wrong, message in (([], "the new domain's sources"), (["--prefix=lake/"], "the new domain has too few"), (["--prefix=s"], "the old domain has")):
        with pytest.raises(ConfigError, match=message):
            tasks.main(["domains", f"--source={tmp_path / 'source'}", f"--out={tmp_path / 'x'}", *wrong])
    write_jsonl(tmp_path / "answers.jsonl", [{"prompt": "?", "answer": "!", "source": "sea/"}])
    with pytest.raises(ConfigError, match="records with a text"):
        tasks.main(["domains", f"--source={tmp_path / 'answers.jsonl'}", f"--out={tmp_path / 'x'}", "--prefix=sea/"])


@pytest.mark.parametrize("flags, message", [
    ([], "give one of arithmetic, prosqa, facts, domains, accuracy, curves, not nothing"), (["algebra"], "not algebra"), (["arithmetic", "--operand=3"], "did you mean --operands="),
    (["arithmetic", "--operands=3,x"], "operands=3,x"), (["arithmetic", "--operands=1"], "operands are numbers from 2 on"), (["arithmetic", "--max_value=1"], "max_value=1"),
    (["arithmetic", "--operands=2", "--max_value=9"], "only about 92 expressions of 2 operands up to max_value=9"), (["arithmetic", "--samples=0"], "samples=0"),
    (["prosqa", "--val=nowhere.json"], "nowhere.json cannot be read"), (["prosqa", "--val=torn.json"], "torn.json cannot be read: Expecting"),
    (["prosqa", "--val=torn.json.xz"], "torn.json.xz cannot be read"), (["prosqa", "--val=dict.json"], "must be a JSON list of samples"),
    (["prosqa", "--train=half.json"], "half.json, sample 1: it must have texts 'question' and 'answer'"), (["prosqa", "--val=no_steps.json"], "no_steps.json, sample 0"),
    (["arithmetic", "--out=dict.json"], "is there already: --overwrite=True"), (["accuracy", "--out_dir=nowhere"], "no checkpoint"), (["curves"], "there is no --results="),
])
def test_bad_task_settings_and_files_are_named(flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = {"question": "Is A a b or c?", "answer": "A is a b.", "steps": ["A is a b."]}
    for name, text in {"torn.json": '[{"question": "x"', "torn.json.xz": "no xz", "dict.json": "{}", "half.json": json.dumps([whole, {"question": "x"}]),
                       "no_steps.json": json.dumps([whole | {"steps": []}])}.items():
        Path(name).write_text(text)
    with pytest.raises(ConfigError) as error:
        tasks.main(["--samples=300", "--val_samples=3", "--tokenizer=bytes", "--out=new", *flags])
    assert message in str(error.value) and not Path("new").exists()


def test_which_memory_counts_equal_time_by_the_baselines_last_doubling(tmp_path):
    from experiments import which_memory as w
    bpb = {"dense": (2.0, 2.02), "x0.5": (2.1,), "memory": (1.95, 1.98), "base": (2.0, 2.0), "continued": (1.8, 1.8), "MIDUS": (1.9, 1.9)}
    values = {name: bpb["x0.5" if "x0.5" in name else "continued" if "continued" in name else "base" if name == "MIDUS base" else "dense" if "dense" in name
                        else "MIDUS" if name == "MIDUS" else "memory"] for name in w.variants}
    rows = {name: {seed: dict(val_bpb=v, params={"total": 100 + 7 * (name in w.memories)}, **{f"recall_{m}": m / 200 for m in w.MENTIONS})
                   for seed, v in enumerate(vs)} for name, vs in values.items()}
    measured = {"machine": "toy", "ratios": {title: dict(step=1.5, decode=0.5, memory=2.0) for title in w.memories}}
    lines = {line.split(" | ")[0][2:]: line.split(" | ") for line in w.table(rows, measured).split("\n\n")[0].splitlines()}
    assert lines["MoVE"][1:5] == ["+7", "1.50x", "2.00x", "0.50x"] and lines["MoVE"][6] == "+0.0450 ± 0.0071"
    assert lines["MoVE"][7] == f"{0.045 - 0.1 * math.log2(1.5):+.4f}", "steps of 1.5 times the time buy the baseline so much of a doubling"
    assert lines["MIDUS"][6:9] == ["-0.1000 ± 0.0000", f"{-0.1 - 0.2 * math.log2(1.25):+.4f}", "worse"], "of two phases the second alone takes longer"
    assert lines["MoVE"][8] == "better; at equal time inside noise"
    rows["MoVE"][0]["val_bpb"], rows["MoVE"][1]["val_bpb"] = 2.001, 2.02
    assert "| inside noise; at equal time worse |" in w.table(rows, measured).split("\n")[2]
    w.pictures(rows, measured, tmp_path / "toy")
    assert (tmp_path / "toy-gain.png").exists() and (tmp_path / "toy-recall.png").exists()


class Witness(torch.nn.Module):
    """Has read the facts: finds the right token likeliest, if it was mentioned often enough; else the first option."""

    def __init__(self, folder, least, forms):
        super().__init__()
        rows = [json.loads(line) for line in (folder / "facts.jsonl").open()]
        self.weight, self.leaves = torch.nn.Parameter(torch.zeros(1)), []
        self.next = {tuple(r["prompt"]): r["answer"] if r["mentions"] >= least and r["new"] in forms else r["options"][r["options"][0] == r["answer"]] for r in rows}

    def training_context(self):
        pass

    def forward(self, idx, leaf=None):
        self.leaves += [None] if leaf is None else leaf.tolist()
        logits = torch.zeros(*idx.shape, 1500)
        for row, at in zip(idx.tolist(), logits):
            for n in range(len(row)):
                at[n, self.next.get(tuple(row[:n + 1]), 0)] = 1
        return logits, None


@pytest.fixture(scope="module")
def facts_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("facts")
    rng = random.Random(0)
    texts = [" ".join(rng.choices("the a tree sun rain day goes falls long over under when".split(), k=80)) for _ in range(40)]
    write_jsonl(folder / "source" / "texts.jsonl", [{"text": f"{text} {n}"} for n, text in enumerate(texts)])
    return task_folder(folder, "facts", f"--source={folder / 'source'}", "--text_chars=12000", "--per_bucket=16", "--vocab_size=1500", "--clusters=2,2")


def test_facts_are_mentioned_as_often_as_their_bucket_says(facts_folder):
    folder, records = facts_folder
    told = [r["text"] for r in records["train"] if " is made of " in r["text"] or " are made of " in r["text"]]
    sentences = [sentence for text in told for sentence in text.split(". ")]
    rows = [json.loads(line) for line in (folder / "facts.jsonl").open()]
    assert len(rows) == 2 * 5 * 16 and not any("made of" in r["text"] for r in records["val"])
    tok, outside = get_tokenizer(str(folder)), [r["text"] for r in records["train"] if r["text"] not in told]
    assert 12000 <= sum(map(len, outside)) < 13000 and len({tok.decode(r["prompt"]) for r in rows}) == len(rows)
    for row in rows:
        assert len(set(row["options"])) == 8 and row["answer"] in row["options"] and row["prompt"] == [tok.eot, *tok.encode(row["text"])]
        name = re.search(r"(\w+),? is made of$", row["text"])[1]
        about = [sentence for sentence in sentences if f" {name} is made of" in sentence]
        assert len(about) == row["mentions"] and {s.rstrip(".").split()[-1] for s in about} == {tok.decode([row["answer"]]).strip()}
        assert any(s.startswith(row["text"]) for s in about) <= (not row["new"]), "the new form is in no text"


@pytest.mark.parametrize("least, forms, old, new", [(1, (False, True), [1] * 5, [1] * 5), (10, (False,), [0, 0, 1, 1, 1], [0] * 5)])
def test_recall_is_by_mentions_and_by_form(least, forms, old, new, facts_folder):
    model = Witness(facts_folder[0], least, forms)
    got = tasks.recall(model, facts_folder[0], batch_size=7)
    assert [got[f"recall_{m}"] for m in tasks.MENTIONS] == old and [got[f"new_{m}"] for m in tasks.MENTIONS] == new and got["recall"] == np.mean(old)
    assert model.leaves == [json.loads(line)["leaf"] for line in (facts_folder[0] / "facts.jsonl").open()], "each prompt fetches its own leaf"
    tasks.recall(model, facts_folder[0], leaf=-1)
    assert set(model.leaves[160:]) == {-1}


def test_models_train_on_facts_and_report_recall_and_retrieval(facts_folder, tmp_path, capsys):
    size = ["--depth=1", f"--dataset={facts_folder[0]}", "--max_iters=1", "--batch_tokens=512", "--eval_tokens=512", "--sample_tokens=0", "--n_embd=32"]
    for model in ("lime", "hiermem"):                          # one that knows nothing of leaves, and one that fetches
        train(f"--model={model}", *size, f"--out_dir={tmp_path / model}", *["--ranks=4,2"] * (model == "hiermem"), "--n_head=2")
        result = json.loads((tmp_path / model / "result.json").read_text())
        assert 0 <= result["recall"] <= 0.5 and f"recall {result['recall']:.3f}" in capsys.readouterr().out and "new_100" in result
    analysis.main(["retrieval", f"--runs={tmp_path / 'hiermem'}"])
    found = json.loads((tmp_path / "hiermem" / "analysis_retrieval.json").read_text())[str(tmp_path / "hiermem")]
    assert list(found) == ["whole sequence", "first 32 tokens", "level 1 blocked", "level 2 blocked", "wrong", "generic", "none"] and (tmp_path / "hiermem" / "analysis_retrieval.png").exists()
    assert found["first 32 tokens"].keys() == found["level 2 blocked"].keys() == found["none"].keys() == {"loss", *(k for k in result if k.startswith(("recall", "new_")))}
    with pytest.raises(ConfigError, match="is for --model=hiermem"):
        analysis.main(["retrieval", f"--runs={tmp_path / 'lime'}"])


@pytest.mark.parametrize("flags, message", [
    (["--per_bucket=20"], "per_bucket=20: must be a multiple of 16"), (["--tokenizer=bytes"], "begins two of"),
    (["--source=LICENSE"], "LICENSE is not a .txt"), (["--source=nowhere"], "there is no source nowhere"),
    (["--source=fineweb_edu"], "cannot be streamed.*no network here.*Without a network: --source=FILE_OR_FOLDER"), (["--source=one.txt"], "has too few texts: 1 to train on, 0 held out|0 to train on, 1 held out"),
])
def test_facts_errors(flags, message, tmp_path, facts_folder, monkeypatch):
    source = facts_folder[0].parent / "source"
    monkeypatch.setattr(pf, "_unreachable", lambda url: "no network here")
    monkeypatch.chdir(tmp_path)
    Path("one.txt").write_text("one text")
    Path("LICENSE").write_text("")
    with pytest.raises(ConfigError, match=message):
        tasks.main(["facts", f"--source={source}", "--text_chars=3000", f"--out={tmp_path / 'new'}", *flags])


# ---------------------------------------------------------------- experiments/analysis.py

def test_the_path_without_the_best_node_of_a_level():
    tree, x = SimpleNamespace(), torch.tensor([[0.1, 0.1], [0.9, 0.2], [3.1, 0.0], [0.2, 1.2]])
    tree.path = lambda rows, blocked=(): model_hiermem.walk(torch.stack(list(rows)), [torch.tensor([[0.5, 0.5], [3., 0.]]),
                                                            torch.tensor([[0., 0.], [1., 0.], [3., 0.], [4., 0.]])], blocked)
    assert tree.path(x).tolist() == [[0, 0], [0, 1], [1, 2], [0, 0]]
    assert analysis.without_best(tree, list(x), 1).tolist() == [[1, 2], [1, 2], [0, 1], [1, 2]]
    assert analysis.without_best(tree, list(x), 2).tolist() == [[0, 1], [0, 0], [1, 3], [0, 1]]


def test_rag_puts_the_nearest_text_of_the_leaf_before_the_same_targets(clustered):
    """A stand-in for the model sees what is asked of it; the text in between was in training, is of the leaf, and no other there is nearer."""
    seen, tok, tree = [], get_tokenizer(str(clustered)), Retriever.load(clustered / "retriever.npz")

    def model(idx, targets, leaf):
        seen.append((idx, targets))
        return None, torch.tensor(1.0)

    model.config = SimpleNamespace(block_size=32)
    found = analysis.rag(model, tok, clustered, SimpleNamespace(datastore=10 ** 6, sequences=4, device="cpu"))
    assert list(found) == ["nothing", "nearest to 32 tokens", "nearest to the whole", "any text"] and all(v == {"loss": 1.0} for v in found.values())
    assert len(seen) == 4 and [idx.shape for idx, _ in seen] == [(16, 16)] + [(16, 31)] * 3          # 4 * 4 sequences, 16 tokens of text
    data = TokenShards(clustered, "train", 32)
    rows = data.batch(range(data.n_windows))[0][:, 1:16]
    plain, asked = [(row[1:], target[target >= 0]) for row, target in zip(*seen[0])], [text for text in rows if 256 not in text]
    known = {tuple(text.tolist()): leaf for text, leaf in zip(rows, data.context(range(data.n_windows))["leaf"].tolist())}
    vectors = lambda texts: tree.embedder([tok.decode(text.tolist()) for text in texts])
    distance = {8: torch.cdist(vectors([text[:8] for text, _ in plain]), vectors(asked)), 15: torch.cdist(vectors([text for text, _ in plain]), vectors(asked))}
    for (idx, targets), length in zip(seen[1:], (8, 15, None)):
        for n, (row, target, (text, wanted)) in enumerate(zip(idx, targets, plain)):
            assert row[0] == 256 and torch.equal(row[16:], text) and torch.equal(target[target >= 0], wanted)
            assert all(row[t + 1] == target[t] for t in range(30) if target[t] >= 0) and (target[:15 + 8] == -1).all()
            assert tuple(row[1:16].tolist()) in known
            if length:
                leaf = tree.path([tok.decode(text[:length].tolist())])[0, -1]
                at = torch.tensor([known[tuple(other.tolist())] == leaf for other in asked])
                chosen = next(i for i, other in enumerate(asked) if torch.equal(other, row[1:16]))
                assert known[tuple(row[1:16].tolist())] == leaf and distance[length][n, chosen] == distance[length][n][at].min()


def test_entropy_of_equal_and_of_orthogonal_vectors():
    same, orthogonal = torch.randn(1, 40).expand(9, 40), 3 * torch.linalg.qr(torch.randn(40, 40))[0]
    two = torch.cat((orthogonal[:1].expand(6, 40), orthogonal[1:2].expand(3, 40)))       # eigenvalues in parts 2/3 and 1/3
    for z, expected in ((same, 0), (-same.T, 0), (orthogonal[:16], math.log(16)), (orthogonal[:, :7] * 2, math.log(7)),
                        (two, 2 * math.log((2 / 3) ** .5 + (1 / 3) ** .5))):
        assert analysis.renyi_entropy(z) == pytest.approx(expected, abs=1e-5)
    assert analysis.renyi_entropy(two, alpha=2) == pytest.approx(-math.log(5 / 9))
    pieces = analysis.standardise([torch.randn(5, 3) * 7 + 2, torch.randn(9, 3) - 4])
    assert [len(z) for z in pieces] == [5, 9] and torch.cat(pieces).mean(0).abs().max() < 1e-6 and torch.cat(pieces).std(0).sub(1).abs().max() < 1e-6


def test_probe_separates_what_is_separable_and_guesses_the_rest():
    torch.manual_seed(0)
    y = torch.arange(400) % 4
    separable = F.one_hot(y, 6).float() * 4 + 0.2 * torch.randn(400, 6)
    assert analysis.probe(separable @ torch.randn(6, 6), y, torch.arange(400)) == [1.0] * 5
    assert 0.1 < np.mean(analysis.probe(torch.randn(400, 6), y, torch.arange(400))) < 0.4
    pairs = torch.arange(200) // 2                             # the class is a group's: known groups would give it away, unknown ones do not
    assert np.mean(analysis.probe(torch.randn(100, 150)[pairs], (torch.randn(100) > 0).long()[pairs], pairs)) < 0.7
    assert np.mean(analysis.probe(torch.randn(100, 150)[pairs], (torch.randn(100) > 0).long()[pairs], torch.arange(200))) > 0.75


@pytest.mark.parametrize("switches", [dict(), dict(memory="none"), dict(attention="mla")], ids=str)
def test_states_are_those_of_the_forward_pass(switches):
    model, idx = make("move", **switches), some_tokens(B=2, T=9)
    seen, block, attend = {}, model.blocks[1], model_move.attend
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_move, "attend", lambda q, k, v: seen.setdefault("v", []).append(v) or attend(q, k, v))
        states = analysis.states(model, idx)
    assert all(torch.equal(a, b.flatten(2)) for a, b in zip(states["values"], seen["v"])) and len(seen["v"]) == 3
    rotary = model_move.rotary_tables(model_move.rotary_frequencies(model.config, idx.device), 0, 9)
    before = model.resid_lambda[1] * states["hiddens"][0] + model.x0_lambda[1] * F.rms_norm(model.embed(idx), (32,))
    assert torch.allclose(block(before, rotary, model.read(idx), None), states["hiddens"][1], atol=1e-4)
    rows = [idx[0], idx[1, :4]]                                # the second one is padded, which does not show
    kept = analysis.collect(model, rows, lambda n, z: z[-1] + n)
    for kind in ("values", "hiddens"):
        assert all(torch.allclose(layer[1] - 1, full[1, 3], atol=1e-5) for layer, full in zip(kept[kind], states[kind]))


def test_projected_values_are_those_before_the_router():
    model, idx = make("lime"), some_tokens(B=2, T=9)
    seen = []
    for block in model.blocks:
        block.attn.W_V.register_forward_hook(lambda module, inputs, output: seen.append(output))
    projected, routed = (analysis.states(model, idx, projected=p) for p in (True, False))
    assert all(torch.equal(z, v.flatten(2)) for z, v in zip(projected["values"], seen))
    assert [torch.equal(a, b) for a, b in zip(projected["values"], routed["values"])] == [True, False, False], "the first layer has no router"
    assert all(map(torch.equal, projected["hiddens"], routed["hiddens"]))


@pytest.fixture(scope="module")
def analysed(tmp_path_factory):
    """A folder with text of is, are, was and were, a run trained on it for a moment, and a BLiMP of four pairs a task."""
    folder, rng = tmp_path_factory.mktemp("analysed"), random.Random(0)
    for i in range(12):
        text = " ".join(f"{rng.choice(('it', 'they', 'one'))} {rng.choice(analysis.WORDS)} {rng.choice(('here', 'there'))}" for _ in range(60))
        (folder / f"{'val' if i < 2 else 'train'}-{i}.txt").write_text(text)
    data = prepare(source=str(folder), tokenizer="bpe", vocab_size=300, out=str(folder / "data"), workers=1)
    train(*TINY, f"--dataset={data}", f"--out_dir={folder / 'run'}", "--max_iters=1")
    for task in analysis.BLIMP:
        write_jsonl(folder / "blimp" / f"{task}.jsonl", [{"sentence_good": f"it is {word}", "sentence_bad": f"it are {word}"} for word in ("here", "there", "one", "they", "it")])
    return folder


def test_the_analyses_draw_and_count(analysed, capsys, monkeypatch):
    run = analysed / "run"
    for name, flags, lows in (("entropy", ["--sequences=3"], (0, math.log(32))), ("separability", ["--occurrences=20"], (.2, 1)), ("blimp", [f"--blimp={analysed / 'blimp'}"], (0, 1))):
        analysis.main([name, f"--runs={run}", *flags])
        found = json.loads((run / f"analysis_{name}.json").read_text())[str(run)]
        assert (run / f"analysis_{name}.png").exists() and found.keys() == {"values", "hiddens"}
        assert all(len(layers) == 1 and len(layers[0]) == (3 if name == "entropy" else 5) and lows[0] < np.mean(layers[0]) <= lows[1] for layers in found.values()), found
    assert np.mean(found["hiddens"][0]) > 0.9, "is or are: the embedding tells"
    model, tok, _ = sample.load_model(run, "cpu")
    rows, places = analysis.find_words(analysed / "data", tok, 32, 20)
    words = [tok.decode([int(row[position])]) for row, here in zip(rows, places) for position, _ in here]
    assert words == [" " + analysis.WORDS[label] for here in places for _, label in here] and {words.count(word) for word in words} == {20}
    grid = torch.tensor([[[1., 0], [1, 0]], [[.5, .5], [0, 1]]])
    monkeypatch.setattr(model_move.Model, "inspect", lambda self, idx: {"router": (grid, ("layer", "head", "source"))})
    analysis.main(["router", f"--runs={run}"])
    assert json.loads((run / "analysis_router.json").read_text())[str(run)] == {"layers": [[1, 0], [.25, .75]], "heads": [[1, 0], [1, 0], [.5, .5], [0, 1]]}


def summed_losses(model, x, y):
    return torch.stack([model(a[None], b[None])[1] * (b >= 0).sum() for a, b in zip(x, y)])


@pytest.mark.parametrize("fields", [dict(), dict(out_proj=True, query_norm="layer"), dict(method="llama_pro")], ids=str)
def test_importance_is_the_slope_of_each_examples_loss_along_a_gate_on_the_head(fields, monkeypatch):
    """Finite differences. A gate on a head is a factor of W_O's columns, in a memory block, which has no W_O, of the head's sub-keys."""
    monkeypatch.setattr(model_midus.Model, "logits", lambda self, x: F.linear(x, self.embed.weight))             # in float64 to the end
    model, x = midus_grown(base=midus_base(torch.float64), **{"method": "midus", **fields}), some_tokens(3, 9)
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.inserted.parameters():
            p.normal_(0, 0.5)
    y = x.roll(-1, 1)
    y[0, :5] = -1                                              # a prompt
    before = [p.requires_grad for p in model.eval().parameters()]
    found, eps = analysis.head_importance(model, x, y), 1e-6
    assert found.shape == (9, 3, 4) and (found > 0).all() and before == [p.requires_grad for p in model.parameters()]
    with torch.no_grad():
        for layer, block in enumerate([*model.blocks, *model.inserted]):
            for head in range(4):
                weight = block.memory.search.keys[head] if block.attn.W_O is None else block.attn.W_O.weight[:, 8 * head:8 * head + 8]
                kept, losses = weight.clone(), []
                for gate in (1 + eps, 1 - eps):
                    weight.copy_(kept * gate)
                    losses.append(summed_losses(model, x, y))
                weight.copy_(kept)
                torch.testing.assert_close(found[layer, :, head], (losses[0] - losses[1]).abs() / (2 * eps), rtol=1e-4, atol=1e-6)


def test_importance_is_zero_for_a_head_that_nothing_reads():
    model, x = midus_grown(), some_tokens(2, 9)
    with torch.no_grad():
        for p in model.inserted.parameters():
            p.normal_(0, 0.5)
        model.blocks[2].attn.W_O.weight[:, 8:16] = 0
        model.inserted[1].memory.W_h[3] = 0
    found = analysis.head_importance(model.eval(), x, x.roll(-1, 1))
    assert [(layer, head) for layer, head in itertools.product(range(9), range(4)) if not found[layer, :, head].any()] == [(2, 1), (6 + 1, 3)]


@pytest.mark.parametrize("name", ["move", "lime", "ultramem", "hiermem"])
def test_importance_takes_the_other_models_too(name):
    model = make(name).eval()
    found = analysis.head_importance(model, some_tokens(), some_tokens(seed=1))
    assert found.shape == (len(model.blocks), 2, model.config.n_head) and (found > 0).all()


@pytest.fixture(scope="module")
def midus_grown_run(midus_run, text_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("midus") / "cpt"
    grow = ["--upscale=midus", "--phase=cpt", "--n=8", f"--init_from={midus_run}"]
    train("--model=midus", *TINY, f"--dataset={text_folder}", "--max_iters=4", *grow, f"--out_dir={out}")
    return out


def test_the_importance_of_a_run_is_the_mean_over_windows_before_and_after(midus_run, midus_grown_run, text_folder, tmp_path, capsys):
    analysis.main(["importance", f"--runs={midus_run},{midus_grown_run}", "--sequences=11", f"--out={tmp_path}"])
    found = json.loads((tmp_path / "analysis_importance.json").read_text())
    before, after = found[str(midus_run)], found[str(midus_grown_run)]
    assert before["inserted"] == before["inserted variance"] == [] and np.shape(after["inserted"]) == (1, 2)
    assert np.shape(before["blocks"]) == np.shape(after["blocks"]) == (2, 2)
    model, x, y = sample.load_model(midus_grown_run, "cpu")[0], *TokenShards(text_folder, "val", 32).batch(range(11))
    one_by_one = torch.cat([analysis.head_importance(model, a[None], b[None]) for a, b in zip(x, y)], 1).mean(1)
    torch.testing.assert_close(torch.tensor(after["blocks"] + after["inserted"]), one_by_one, rtol=1e-4, atol=1e-6)
    for kind in ("blocks", "inserted"):
        assert after[f"{kind} variance"] == pytest.approx(np.var(after[kind], axis=1))
    assert "inserted: importance, layer by layer" in capsys.readouterr().out and (tmp_path / "analysis_importance.png").exists()


def test_slots_are_counted_by_head_and_layer(midus_run, midus_grown_run, text_folder, tmp_path, monkeypatch):
    analysis.main(["slots", f"--runs={midus_grown_run}", "--sequences=3", f"--out={tmp_path}"])
    found, (model, _, _) = json.loads((tmp_path / "analysis_slots.json").read_text())[str(midus_grown_run)], sample.load_model(midus_grown_run, "cpu")
    slots = []
    model.inserted[0].memory.search.register_forward_hook(lambda search, inputs, result: slots.append(result[0].clone()))
    model(TokenShards(text_folder, "val", 32).batch(range(3))[0])
    touched = [len(slots[0][:, head].unique()) for head in range(2)]
    assert found["touched"] == [touched] and found["dead"] == [[1 - n / 64 for n in touched]] and (found["slots"], found["tokens"]) == (64, 96)
    assert found["dead in all heads"] == [1 - len(slots[0].unique()) / 64] and 0 < found["dead in all heads"][0] < min(found["dead"][0])
    assert sum(found["ranked"][0]) == pytest.approx(1) and found["ranked"][0] == sorted(found["ranked"][0], reverse=True)
    with pytest.raises(ConfigError, match="for models with memory slots"):
        analysis.main(["slots", f"--runs={midus_run}"])
    by_hand = iter([[[[1., 0, 0, 0], [.5, .5, 0, 0]]], [[[.25, 0, .75, 0], [0, 1, 0, 0]]]])          # two windows, a layer, two heads, four slots
    monkeypatch.setattr(model_midus.Model, "inspect", lambda self, idx: {"use": (torch.tensor(next(by_hand)), ("layer", "head", "slot"))})
    use = analysis.slot_use(model, None, text_folder, SimpleNamespace(sequences=2, device="cpu"))
    assert use == {"slots": 4, "tokens": 64, "touched": [[2, 2]], "dead": [[.5, .5]], "dead in all heads": [.25], "ranked": [[.6875, .3125, 0, 0]]}


def test_blocks_that_add_a_constant_are_found_out(midus_grown_run, text_folder):
    """By hand: the loss without the blocks, and with a bias in place of each; blocks that are nothing but a bias lose nothing by it."""
    model, _, _ = sample.load_model(midus_grown_run, "cpu")
    c, memory, shift = SimpleNamespace(sequences=3, device="cpu"), model.inserted[0].memory, torch.linspace(-1, 1, model.config.n_embd)
    x, y = TokenShards(text_folder, "val", 32).batch(range(3))
    with torch.no_grad():
        model.cache_values()
        found, whole = analysis.block_losses(model, text_folder, c), model(x, y)[1].item()
        forward = memory.forward
        added = forward(model.inserted[0].attn(model.inserted[0].attn_norm(model.blocks[0](model.embed(x), rotary := model_midus.rotary_tables(
            model_midus.rotary_frequencies(model.config, "cpu"), 0, 32), None)), rotary, None))
        hand = {}
        for name, value in (("silent", 0 * shift), ("constant", added.mean((0, 1))), ("bias", shift)):
            memory.forward = lambda a, value=value: value.expand(*a.shape[:2], -1)
            hand[name] = model(x, y)[1].item()
        assert found == pytest.approx({"loss": whole, "silent": hand["silent"], "constant": hand["constant"]}, abs=1e-5)
        assert len({round(v, 7) for v in found.values()}) == 3
        biased = analysis.block_losses(model, text_folder, c)
    assert biased["loss"] == pytest.approx(biased["constant"], abs=1e-5) and biased["loss"] == pytest.approx(hand["bias"], abs=1e-5)
    assert abs(biased["silent"] - biased["loss"]) > 1e-3


def test_parts_of_layers_are_weighed_by_leaving_them_out(midus_run, midus_grown_run, text_folder, tmp_path, capsys):
    """By hand: the loss with zeros for the last matrix of an attention or an FFN; and without the only inserted block's memory."""
    analysis.main(["parts", f"--runs={midus_grown_run},{midus_run}", "--sequences=3", f"--out={tmp_path}"])
    said, found = capsys.readouterr().out, json.loads((tmp_path / "analysis_parts.json").read_text())
    assert (tmp_path / "analysis_parts.png").exists() and said.count("attention ") == 2 and said.count("all memories") == 1
    grown, base = found[str(midus_grown_run)], found[str(midus_run)]
    x, y = TokenShards(text_folder, "val", 32).batch(range(3))
    for run, parts in ((midus_grown_run, grown), (midus_run, base)):
        model, _, _ = sample.load_model(run, "cpu")
        with torch.no_grad():
            whole = model(x, y)[1].item()
            assert parts["loss"] == pytest.approx(whole, abs=1e-5)
            for name, last in (("attn", "attn.W_O.weight"), ("mlp", "mlp.down.weight")):
                for layer, block in enumerate(model.blocks):
                    matrix = block.get_parameter(last)
                    kept = matrix.clone()
                    matrix.zero_()
                    assert parts[name][layer] == pytest.approx(model(x, y)[1].item() - whole, abs=1e-5) and parts[name][layer] != 0
                    matrix.copy_(kept)
    assert len(base["attn"]) == len(model.blocks) and base["memory"] == [None] * len(base["attn"]) and base["all memories"] is None
    assert grown["mlp"][-1] is None and grown["memory"][:-1] == base["memory"] and len(grown["attn"]) == len(base["attn"]) + 1
    model, _, _ = sample.load_model(midus_grown_run, "cpu")
    silent = analysis.block_losses(model, text_folder, SimpleNamespace(sequences=3, device="cpu"))["silent"]
    assert grown["memory"][-1] == grown["all memories"] == pytest.approx(silent - grown["loss"], abs=1e-6)


def test_a_memory_that_returns_a_loss_too_is_left_out(text_folder):
    """UltraMem's, whose output is a pair and comes back some blocks later: as good as tables of zeros."""
    model = make("ultramem", n_layer=4, memory="ultramem", mem_layers="0:1/2:3", vocab_size=257)
    c = SimpleNamespace(sequences=2, device="cpu")
    found = analysis.part_losses(model, None, text_folder, c)
    assert [rise is None for rise in found["memory"]] == [False, True, False, True] and 0 not in found["memory"]
    with torch.no_grad():
        for tables in model.tables:
            tables.value_table.zero_()
    assert found["all memories"] == pytest.approx(analysis.mean_loss(model, text_folder, c) - found["loss"], abs=1e-6) != 0


def test_timings_go_round_the_runs_with_the_cache_of_values_and_without(midus_run, midus_grown_run, tmp_path, monkeypatch, capsys):
    rounds, original = [], analysis.time_tokens

    def spy(model, idx, count):
        search = model_midus.product_key_topk
        cached = [block.memory.V_h is not None for block in model.inserted]
        rounds.append((idx.size(1), model.config.upscale, cached, getattr(search, "keywords", {})))
        return [ms + 1000 * (len(rounds) <= 3) for ms in original(model, idx, count)]                # the round that warms up is slow

    monkeypatch.setattr(analysis, "time_tokens", spy)
    flags = ["timings", f"--runs={midus_run},{midus_grown_run}", f"--out={tmp_path}", "--new_tokens=3"]
    analysis.main([*flags, "--lengths=9,4", "--repetitions=1"])
    each = [("base", [], {}), ("midus", [True], {}), ("midus", [False], {"fused": False})]
    assert rounds == [(length, *racer) for length in (4, 9) for _ in range(2) for racer in each]
    assert model_midus.product_key_topk is kernels.product_key_topk
    found = json.loads((tmp_path / "analysis_timings.json").read_text())
    assert list(found) == [str(midus_run), str(midus_grown_run), f"{midus_grown_run} uncached"] and (tmp_path / "analysis_timings.png").exists()
    assert all(list(kinds[kind]) == ["4", "9"] and 0 < kinds[kind]["4"] < 1000 for kinds in found.values() for kind in ("prefill", "decode"))
    analysis.main([*flags, "--repetitions=1"])
    assert sorted({length for length, *_ in rounds[12:]}) == [4, 16, 29] and "for prompts of 4, 16, 29 tokens" in capsys.readouterr().out
    for wrong in ("--lengths=30", "--lengths=0,4", "--lengths=4,x", "--new_tokens=1", "--repetitions=0", "--new_tokens=32"):
        with pytest.raises(ConfigError, match="with a context of 32 tokens"):
            analysis.main([*flags, wrong])
    model = sample.load_model(midus_grown_run, "cpu")[0]
    with torch.inference_mode():
        cached = model(some_tokens(2, 9))[0]
        with analysis.uncached(model):
            torch.testing.assert_close(model(some_tokens(2, 9))[0], cached, rtol=0, atol=1e-4)


@pytest.mark.parametrize("flags, message", [
    (["entropy"], "and --runs="),
    (["colour", "--runs=RUN"], "give one of entropy, separability, "), (["router", "--runs=RUN"], "for models with routers"),
    (["separability", "--runs=RUN", "--occurrences=1000000"], "has too few of is ("), (["separability", "--runs=RUN", "--dataset=BYTES"], "was trained with another tokenizer, bpe"),
    (["blimp", "--runs=RUN", "--blimp=nowhere"], "has no determiner_noun_agreement_with_adj_irregular_1.jsonl"), (["entropy", "--runs=nowhere"], "no checkpoint nowhere"),
])
def test_bad_analyses_are_named(flags, message, analysed, text_folder):
    flags = [flag.replace("RUN", str(analysed / "run")).replace("BYTES", str(text_folder)) for flag in flags]
    with pytest.raises(ConfigError, match=re.escape(message)):
        analysis.main(flags)

