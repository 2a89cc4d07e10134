"""Tests of bank.py and bank_size.py. `python test_all.py` runs them too."""
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from test_all import HIER, POST, clustered, some_tokens, train, weights

import model_hiermem
import sample
from experiments import bank, bank_size
from prepare_fineweb import TokenShards

JOBS = {"job0": ("data-subtree0", 0, {1: [0], 2: [0, 1]}),     # data, --generic=, the job's blocks
        "job1": ("data-subtree1", 0, {1: [1], 2: [2, 3]}), "generic": ("data", 1, {1: [2], 2: [4]})}


@pytest.fixture(scope="module")
def runs(clustered, tmp_path_factory):
    """The data of a tree 2,2 and of its subtrees, an anchor, the jobs on it and their merge."""
    out = tmp_path_factory.mktemp("bank")
    shutil.copytree(clustered, out / "data")
    bank.main(["split", f"--dataset={out / 'data'}"])
    train(*HIER, f"--dataset={out / 'data'}", "--dense=True", f"--out_dir={out / 'anchor'}",
          "--max_iters=8")
    for job, (data, generic, own) in JOBS.items():
        train(*POST, f"--init_from={out / 'anchor'}", "--memory=ffn", "--ranks=4,2", "--frozen=True",
              f"--generic={generic}", f"--dataset={out / data}", "--learning_rate=0.01",
              f"--out_dir={out / job}", "--max_iters=8")
    folders = ",".join(str(out / job) for job in JOBS)
    bank.main(["merge", f"--jobs={folders}", f"--out_dir={out / 'merged'}"])
    return out


def test_split_puts_every_sequence_into_the_folder_of_its_subtree(runs):
    for part in ("train", "val"):
        whole, rows = TokenShards(runs / "data", part, 32), []
        for subtree in (0, 1):
            data = TokenShards(runs / f"data-subtree{subtree}", part, 32)
            windows = np.arange(data.n_windows)
            leaf = data.context(windows)["leaf"]
            assert set((leaf // 2).tolist()) == {subtree} and len(leaf.unique()) == 2
            rows += torch.cat((*data.batch(windows), leaf[:, None]), 1).tolist()
        windows = np.arange(whole.n_windows)
        leaf = whole.context(windows)["leaf"][:, None]
        assert sorted(rows) == sorted(torch.cat((*whole.batch(windows), leaf), 1).tolist())
    with pytest.raises(ValueError, match="data-subtree0 is there already"):
        bank.split(runs / "data")


def test_jobs_train_their_own_blocks_and_merge_puts_them_together_with_their_moments(runs):
    ckpts = {job: weights(runs / job) for job in JOBS}
    merged = weights(runs / "merged")
    assert merged["model_config"]["generic"] == -1
    for level, rows in bank.blocks_of(merged).items():
        for job, (_, _, own) in JOBS.items():
            theirs = bank.blocks_of(ckpts[job])[level]
            assert theirs["steps"].nonzero()[:, 0].tolist() == own[level]
            for name, tensor in rows.items():
                assert torch.equal(tensor[own[level]], theirs[name][own[level]])
            others = [other for other in JOBS if other != job]
            untouched = bank.blocks_of(ckpts[others[0]])[level]["table"][own[level]]
            assert torch.equal(untouched, bank.blocks_of(ckpts[others[1]])[level]["table"][own[level]])
            assert not torch.equal(rows["table"][own[level]], untouched)
        assert (rows["steps"][rows["steps"] > 0] <= 8).all() and (rows["steps"] > 0).all()


def test_merge_refuses_what_does_not_belong_together(runs, tmp_path, capsys):
    def merge(jobs, **more):
        bank.merge([runs / job for job in jobs.split()], tmp_path / "wrong", **more)

    def spoil(job, **changes):
        (runs / "spoilt").mkdir(exist_ok=True)
        torch.save({**weights(runs / job), **changes}, runs / "spoilt" / "ckpt.pt")

    job = weights(runs / "job1")
    for jobs, changes, message in (
            ("job0 job1", {}, "0 of the jobs have --generic=1"),
            ("job0 generic", {}, "no job has trained the subtrees 1"),
            ("job0 job0 spoilt generic", {}, "spoilt has trained blocks of level 1 that another job"),
            ("job0 spoilt generic", dict(model={**job["model"], "norm.weight": torch.zeros(64)}),
             "spoilt started from another anchor"),
            ("job0 spoilt generic", dict(model_config={**job["model_config"], "retriever": "x"}),
             "spoilt has another model or tree")):
        spoil("job0" if "job0 job0" in jobs else "job1", **changes)
        with pytest.raises(ValueError, match=message):
            merge(jobs)
    assert not (tmp_path / "wrong").exists()
    merge("job0 job1 generic")
    before = (tmp_path / "wrong/ckpt.pt").read_bytes()
    with pytest.raises(ValueError, match="ckpt.pt is there already"):
        merge("job0 job1 generic")
    assert (tmp_path / "wrong/ckpt.pt").read_bytes() == before
    merge("job0 job1 generic", overwrite=True)


def test_adding_under_a_node_leaves_everything_else_bitwise_as_it_was(runs, tmp_path):
    train(*POST, f"--init_from={runs / 'merged'}", f"--dataset={runs / 'data-subtree1'}",
          "--frozen=True", "--generic=0", "--learning_rate=0.01", "--max_iters=5",
          f"--out_dir={tmp_path}")
    old, new = weights(runs / "merged")["model"], weights(tmp_path)["model"]
    moved = {"bank.1.table": [1], "bank.2.table": [2, 3]}
    for key, tensor in old.items():
        same = [torch.equal(a, b) for a, b in zip(tensor, new[key])]
        assert [n for n, equal in enumerate(same) if not equal] == moved.get(key, []), key


def test_a_removed_node_adds_nothing_for_its_subtree_and_all_else_is_bitwise_as_it_was(
        runs, tmp_path):
    run = shutil.copytree(runs / "merged", tmp_path / "run")

    def logits(model):
        return model(some_tokens(5, 12), leaf=torch.tensor([0, 1, 2, 3, -1]))[0].detach()

    model = sample.load_model(run, "cpu")[0]
    whole, old = logits(model), bank.blocks_of(weights(run))
    bank.main(["remove", f"--out_dir={run}", "--nodes=1:0"])
    removed, new = logits(sample.load_model(run, "cpu")[0]), bank.blocks_of(weights(run))
    same = [torch.equal(a, b) for a, b in zip(whole, removed)]
    assert same == [False, False, True, True, True], "leaves 0 and 1 are under node 0"
    model.bank["1"].table.data[0] = 0
    assert torch.equal(removed, logits(model)), "the level is as if it were not there"
    for name, tensor in new[1].items():
        assert torch.equal(tensor[1:], old[1][name][1:])
        assert name == "table" or not tensor[0].any(), "no moments, no count"
        assert torch.equal(new[2][name], old[2][name])
    assert new[1]["table"][0].any(), "what it was at first can be trained anew"
    block = old[1]["table"][0].numpy().tobytes()
    assert block not in (run / "ckpt.pt").read_bytes(), "nothing is left of it in the file"
    ckpt = weights(run)
    ckpt["model_config"]["sparse_memory"] = False
    (tmp_path / "dense").mkdir()
    torch.save(ckpt, tmp_path / "dense/ckpt.pt")
    for folder, nodes, message in ((run, "1:1,3:0", "levels are 1 to 2"), (run, "", "no --nodes"),
                                   (run, "best:1", "no such block"), (run, "1:2", "0 to 1"),
                                   (tmp_path / "dense", "1:0", "would move what is removed")):
        with pytest.raises(ValueError, match=message):
            bank.remove(folder, nodes)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
def test_a_prompt_reads_its_own_blocks_of_a_large_checkpoint(tmp_path, capsys):
    """64 nodes of 0.4 MB; the generic block of a bank without a tree is what the prompt fetches."""
    config = model_hiermem.Config.from_depth(
        2, n_head=2, vocab_size=257, block_size=32, clusters="64", ranks="250")
    model = model_hiermem.Model(config)
    model.init_weights()
    torch.save(dict(format="nanomem-1", model=model.state_dict(), model_config=vars(config), step=0,
                    config=dict(model="hiermem"),
                    data=dict(tokenizer="bytes", eot=256, folder="")), tmp_path / "ckpt.pt")
    bank.main(["read", f"--out_dir={tmp_path}", "--prompt=river boat"])
    found = bank.read(tmp_path, "river boat")
    assert found["bank"] == 64 * found["blocks"] > 24_000_000
    read = found["prompt"] - found["anchor"]
    assert found["blocks"] <= read < found["blocks"] + 2 ** 18, "and pages beside them"
    assert found["prompt"] < found["file"] / 10
    assert f"{found['prompt']:15,} after the prompt's blocks" in capsys.readouterr().out


@pytest.mark.parametrize("flags, message", [
    ([], "one of split, merge, remove, read"), (["divide"], "divide: choose split"),
    (["merge", "--jobs=nowhere"], "no checkpoint nowhere"), (["remove", "--nodes=1:0"], "no check"),
    (["read", "--out_dir=nowhere"], "no checkpoint nowhere"), (["read", "--nodes"], "needs a value"),
    (["split", "--dataset=FLAT"], "has no tree")])
def test_what_bank_is_asked_wrongly_is_named(flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flat = dict(tokenizer="bytes", vocab_size=257, eot=256, data_id="x")
    (tmp_path / "meta.json").write_text(json.dumps(flat))
    with pytest.raises(ValueError, match=message):
        bank.main([flag.replace("FLAT", str(tmp_path)) for flag in flags])


def test_bank_size_times_a_step(tmp_path, monkeypatch, capsys):
    """41 blocks and more, all of the larger bank's blocks in reach. No figure is asserted."""
    results = tmp_path / "experiments/results"
    results.mkdir(parents=True)
    monkeypatch.setattr(bank_size, "ROOT", tmp_path)
    found = bank_size.main(["--blocks=44", "--rank=2", "--steps=1"])
    facts = json.loads((results / "hiermem_bank_size-cpu.json").read_text())
    assert facts["ms_a_step"] == found and facts["steps"] == 1
    numbers = 7 * 3 * 2 * 128                                  # layers, matrices, channels, width
    assert list(found) == [f"41 blocks, {41 * numbers:,} numbers",
                           f"44 blocks, {44 * numbers:,} numbers, 40 in use",
                           f"44 blocks, {44 * numbers:,} numbers, all in use"]
    text = capsys.readouterr().out
    assert all(name in text and ms > 0 for name, ms in found.items())
    with pytest.raises(ValueError, match="blocks=41: must be 42 or more"):
        bank_size.main(["--blocks=41"])
