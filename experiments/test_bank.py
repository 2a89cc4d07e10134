"""Tests of bank.py. `python test_all.py` runs them too."""
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from test_all import (HIER, POST, clustered, load_ckpt, parametrize, some_tokens, text_folder,
                      train)
from test_topics import sequences

import sample
from experiments import bank

JOBS = {                      # data, --generic=, the rows of levels 1 and 2 that are the job's
    "job0": ("tree-subtree0", 0, {1: [0], 2: [0, 1]}),
    "job1": ("tree-subtree1", 0, {1: [1], 2: [2, 3]}),
    "generic": ("tree", 1, {1: [2], 2: [4]}),
}


@pytest.fixture(scope="module")
def runs(clustered, tmp_path_factory):
    """The data of a tree 2,2 and of its subtrees, an anchor, the jobs on it and their merge."""
    out = tmp_path_factory.mktemp("bank")
    shutil.copytree(clustered, out / "tree")
    bank.main(["split", f"--dataset={out}/tree"])
    train(*HIER, "--dense=True --max_iters=8", dataset=out / "tree", out_dir=out / "anchor")
    for job, (data, generic, _) in JOBS.items():
        train(*POST, "--memory=ffn --ranks=4,2 --frozen=True --learning_rate=0.01 --max_iters=8",
              init_from=out / "anchor", dataset=out / data, out_dir=out / job, generic=generic)
    jobs = ",".join(f"{out}/{job}" for job in JOBS)
    for more in ([], ["--overwrite=True"]):
        bank.main(["merge", f"--jobs={jobs}", f"--out_dir={out}/bank", *more])
    return out


def blocks(run):
    return bank.blocks_of(load_ckpt(run))


def test_split_puts_every_sequence_into_the_folder_of_its_subtree(runs):
    names = ("tree-subtree0", "tree-subtree1", "tree")
    first, second, whole = (sequences(runs / name, "train").tolist() for name in names)
    leaves = [{row[-1] for row in rows} for rows in (first, second)]
    assert leaves == [{0, 1}, {2, 3}]
    assert sorted(first + second) == sorted(whole)


def test_the_parts_of_a_folder_with_facts_train_without_their_questions(runs, tmp_path):
    shutil.copytree(runs / "tree", tmp_path / "facts")
    meta = tmp_path / "facts/meta.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "task": {"name": "facts"}}))
    part = bank.split(str(tmp_path / "facts"))[0]
    train(*HIER, "--max_iters=1", dataset=part, out_dir=tmp_path / "job")
    assert (tmp_path / "job/result.json").exists()


@parametrize("level", [1, 2])
@parametrize("job", JOBS)
def test_a_job_trains_its_own_blocks_and_merge_takes_them_with_their_moments(job, level, runs):
    own = JOBS[job][2][level]
    ours = blocks(runs / job)[level]
    others = [blocks(runs / other)[level]["table"] for other in JOBS if other != job]
    assert ours["steps"].nonzero()[:, 0].tolist() == own
    merged = blocks(runs / "bank")[level]
    assert {"exp_avg", "exp_avg_sq"} < merged.keys()
    for name, rows in merged.items():
        assert torch.equal(rows[own], ours[name][own]), name
    assert torch.equal(others[0][own], others[1][own]), "they left it alone"
    assert (ours["table"] != others[0])[own].flatten(1).any(1).all()
    assert load_ckpt(runs / "bank")["model_config"]["generic"] == -1


def test_jobs_may_differ_in_the_seed_of_what_they_do_not_train(runs, tmp_path):
    train(*POST, "--memory=ffn --ranks=4,2 --frozen=True --generic=0 --seed=5 --max_iters=8",
          init_from=runs / "anchor", dataset=runs / "tree-subtree1", out_dir=tmp_path / "job1")
    jobs = f"{runs}/job0,{tmp_path}/job1,{runs}/generic"
    bank.main(["merge", f"--jobs={jobs}", f"--out_dir={tmp_path}/bank"])
    assert (tmp_path / "bank/ckpt.pt").exists()


def test_adding_under_a_node_leaves_everything_else_bitwise_as_it_was(runs, tmp_path):
    train(*POST, "--frozen=True --generic=0 --learning_rate=0.01 --max_iters=5",
          init_from=runs / "bank", dataset=runs / "tree-subtree1", out_dir=tmp_path)
    new = load_ckpt(tmp_path)["model"]
    moved = {"bank.1.table": [1], "bank.2.table": [2, 3]}
    for key, tensor in load_ckpt(runs / "bank")["model"].items():
        rows = (tensor != new[key]).view(len(tensor), -1).any(1)
        assert rows.nonzero()[:, 0].tolist() == moved.get(key, []), key


def test_a_removed_node_adds_nothing_for_its_subtree_and_all_else_is_bitwise_as_it_was(
        runs, tmp_path):
    run = shutil.copytree(runs / "bank", tmp_path / "run")
    old = blocks(run)

    def logits(model):
        leaf = torch.tensor([0, 1, 2, 3, -1])
        return model(some_tokens(5, 12), leaf=leaf)[0].detach()

    model = sample.load_model(runs / "bank", "cpu")[0]
    whole = logits(model)
    bank.main(["remove", f"--out_dir={run}", "--nodes=1:0"])
    removed = logits(sample.load_model(run, "cpu")[0])
    same = [torch.equal(a, b) for a, b in zip(whole, removed)]
    assert same == [False, False, True, True, True], "leaves 0 and 1 are under node 0"
    model.bank["1"].table.data[0] = 0
    assert torch.equal(removed, logits(model)), "the level is as if it were not there"
    new = blocks(run)
    for name, rows in new[1].items():
        assert rows[0].any() == (name == "table"), "to be trained anew; no moments, no count"
        old[1][name][0] = rows[0]
    assert_close(new, old, rtol=0, atol=0)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
def test_a_prompt_reads_its_own_blocks_of_a_large_checkpoint(text_folder, tmp_path, capsys):
    """65 blocks of 0.8 MB; without a tree a prompt fetches the generic one."""
    train(*POST, "--depth=2 --n_head=2 --clusters=64 --ranks=250 --block_size=32 --max_iters=1",
          dataset=text_folder, out_dir=tmp_path)
    found = bank.read(tmp_path, "river boat")
    assert found["bank"] == 64 * found["blocks"] == 49_152_000
    read = found["prompt"] - found["anchor"]
    page = 4096
    neighbours = 2 ** 22                                       # of a page; some systems take many
    assert found["blocks"] - page < read < found["blocks"] + neighbours
    assert found["prompt"] < found["bank"] / 4
    said = capsys.readouterr().out
    assert f"{found['prompt']:15,} after the prompt's blocks" in said
