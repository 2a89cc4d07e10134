"""Tests of bank.py and bank_size.py. `python test_all.py` runs them too."""
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from test_all import HIER, POST, clustered, load_ckpt, parametrize, some_tokens, train

import model_hiermem
import sample
from experiments import bank, bank_size
from prepare_fineweb import TokenShards

JOBS = {                      # data, --generic=, the rows of levels 1 and 2 that are the job's
    "job0": ("data-subtree0", 0, {1: [0], 2: [0, 1]}),
    "job1": ("data-subtree1", 0, {1: [1], 2: [2, 3]}),
    "generic": ("data", 1, {1: [2], 2: [4]}),
}


@pytest.fixture(scope="module")
def runs(clustered, tmp_path_factory):
    """The data of a tree 2,2 and of its subtrees, an anchor, the jobs on it and their merge."""
    out = tmp_path_factory.mktemp("bank")
    shutil.copytree(clustered, out / "data")
    bank.main(["split", f"--dataset={out}/data"])
    train(*HIER, f"--dataset={out}/data", "--dense=True --max_iters=8", f"--out_dir={out}/anchor")
    for job, (data, generic, own) in JOBS.items():
        train(*POST, f"--init_from={out}/anchor", "--memory=ffn --ranks=4,2 --frozen=True",
              f"--dataset={out}/{data}", "--learning_rate=0.01 --max_iters=8",
              f"--out_dir={out}/{job}", generic=generic)
    folders = ",".join(f"{out}/{job}" for job in JOBS)
    bank.main(["merge", f"--jobs={folders}", f"--out_dir={out}/merged"])
    return out


def sequences(folder, part):
    """All of a split: (windows, inputs, targets and leaf)."""
    data = TokenShards(folder, part, 32)
    windows = np.arange(data.n_windows)
    leaf = data.context(windows)["leaf"]
    return torch.cat((*data.batch(windows), leaf[:, None]), 1)


@parametrize("part", ["train", "val"])
def test_split_puts_every_sequence_into_the_folder_of_its_subtree(part, runs):
    parts = [sequences(runs / f"data-subtree{i}", part) for i in (0, 1)]
    assert [rows[:, -1].unique().tolist() for rows in parts] == [[0, 1], [2, 3]]
    whole = sequences(runs / "data", part)
    assert sorted(torch.cat(parts).tolist()) == sorted(whole.tolist())
    with pytest.raises(ValueError, match="data-subtree0 is there already"):
        bank.split(runs / "data")


@parametrize("level", [1, 2])
@parametrize("job", JOBS)
def test_a_job_trains_its_own_blocks_and_merge_takes_them_with_their_moments(job, level, runs):
    own = JOBS[job][2][level]
    ours = bank.blocks_of(load_ckpt(runs / job))[level]
    merged = bank.blocks_of(load_ckpt(runs / "merged"))[level]
    assert ours["steps"].nonzero()[:, 0].tolist() == own
    assert {"exp_avg", "exp_avg_sq"} < merged.keys()
    for name, rows in merged.items():
        assert torch.equal(rows[own], ours[name][own]), name
    others = [bank.blocks_of(load_ckpt(runs / other))[level] for other in JOBS if other != job]
    assert torch.equal(others[0]["table"][own], others[1]["table"][own]), "they left it alone"
    for row in own:
        assert not torch.equal(ours["table"][row], others[0]["table"][row])


def test_merge_refuses_what_does_not_belong_together_and_to_replace_a_checkpoint(runs, tmp_path):
    job = load_ckpt(runs / "job1")
    (tmp_path / "spoilt").mkdir()

    def merge(jobs, **more):
        folders = [tmp_path / job if job == "spoilt" else runs / job for job in jobs.split()]
        bank.merge(folders, tmp_path / "all", **more)

    anchor = {**job["model"], "blocks.0.attn.W_Q.weight": torch.zeros(64, 64)}
    tree = {**job["model_config"], "retriever": "x"}
    for jobs, changes, message in (
        ("job0 job1", {}, "0 of the jobs have --generic=1"),
        ("job0 generic", {}, "no job has trained the subtrees 1"),
        ("job0 job1 spoilt generic", {}, "spoilt has trained blocks of level 1 that another job"),
        ("job0 spoilt generic", {"model": anchor}, "spoilt started from another anchor"),
        ("job0 spoilt generic", {"model_config": tree}, "spoilt has another model or tree"),
        ("anchor generic", {}, "anchor has no bank of topics"),
    ):
        torch.save({**job, **changes}, tmp_path / "spoilt" / "ckpt.pt")
        with pytest.raises(ValueError, match=message):
            merge(jobs)
    assert not (tmp_path / "all").exists()
    merge("job0 job1 generic")
    before = (tmp_path / "all" / "ckpt.pt").read_bytes()
    with pytest.raises(ValueError, match="ckpt.pt is there already"):
        merge("job0 job1 generic")
    assert (tmp_path / "all" / "ckpt.pt").read_bytes() == before
    merge("job0 job1 generic", overwrite=True)
    assert load_ckpt(tmp_path / "all")["model_config"]["generic"] == -1


def test_adding_under_a_node_leaves_everything_else_bitwise_as_it_was(runs, tmp_path):
    train(*POST, f"--init_from={runs}/merged", f"--dataset={runs}/data-subtree1", "--frozen=True "
          "--generic=0 --learning_rate=0.01 --max_iters=5", out_dir=tmp_path)
    new = load_ckpt(tmp_path)["model"]
    moved = {"bank.1.table": [1], "bank.2.table": [2, 3]}
    for key, tensor in load_ckpt(runs / "merged")["model"].items():
        rows = (tensor != new[key]).view(len(tensor), -1).any(1)
        assert rows.nonzero()[:, 0].tolist() == moved.get(key, []), key


def test_a_removed_node_adds_nothing_for_its_subtree_and_all_else_is_bitwise_as_it_was(
        runs, tmp_path):
    run = shutil.copytree(runs / "merged", tmp_path / "run")
    old = bank.blocks_of(load_ckpt(run))

    def logits(model):
        leaf = torch.tensor([0, 1, 2, 3, -1])
        return model(some_tokens(5, 12), leaf=leaf)[0].detach()

    model = sample.load_model(runs / "merged", "cpu")[0]
    whole = logits(model)
    bank.main(["remove", f"--out_dir={run}", "--nodes=1:0"])
    removed = logits(sample.load_model(run, "cpu")[0])
    same = [torch.equal(a, b) for a, b in zip(whole, removed)]
    assert same == [False, False, True, True, True], "leaves 0 and 1 are under node 0"
    model.bank["1"].table.data[0] = 0
    assert torch.equal(removed, logits(model)), "the level is as if it were not there"
    new = bank.blocks_of(load_ckpt(run))
    for name, rows in new[1].items():
        assert torch.equal(rows[1:], old[1][name][1:])
        assert torch.equal(new[2][name], old[2][name])
        assert rows[0].any() == (name == "table"), "to be trained anew; no moments, no count"
    block = old[1]["table"][0].numpy().tobytes()
    assert block not in (run / "ckpt.pt").read_bytes(), "nothing is left of it in the file"


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
def test_a_prompt_reads_its_own_blocks_of_a_large_checkpoint(tmp_path, capsys):
    """65 blocks of 0.8 MB; without a tree a prompt fetches the generic one."""
    fields = dict(n_head=2, vocab_size=257, block_size=32, clusters="64", ranks="250")
    model = model_hiermem.Model(model_hiermem.Config.from_depth(2, **fields))
    model.init_weights()
    ckpt = dict(format="nanomem-1", step=0, config=dict(model="hiermem"), model=model.state_dict(),
                model_config=vars(model.config), log=[], train={}, rng=torch.ones(1),
                optimizers=[{"state": {}}],
                data=dict(tokenizer="bytes", eot=256, folder=""))
    torch.save(ckpt, tmp_path / "ckpt.pt")
    found = bank.read(tmp_path, "river boat")
    assert found["bank"] == 64 * found["blocks"] == 49_152_000
    read = found["prompt"] - found["anchor"]
    page, neighbours = 4096, 2 ** 22                           # of a page; some systems take many
    assert found["blocks"] - page < read < found["blocks"] + neighbours
    assert found["prompt"] < found["file"] / 4
    assert f"{found['prompt']:15,} after the prompt's blocks" in capsys.readouterr().out


def test_bank_size_times_a_step(tmp_path, monkeypatch, capsys):
    """41 blocks and more, all of the larger bank's blocks in reach. No figure is asserted."""
    results = tmp_path / "experiments" / "results"
    results.mkdir(parents=True)
    monkeypatch.setattr(bank_size, "ROOT", tmp_path)
    found = bank_size.main(["--blocks=44", "--rank=2", "--steps=1"])
    facts = json.loads((results / "hiermem_bank_size-cpu.json").read_text())
    assert facts["ms_a_step"] == found and facts["steps"] == 1
    block = 7 * 3 * 2 * 128                                    # layers, matrices, channels, width
    assert list(found) == [f"41 blocks, {41 * block:,} numbers",
                           f"44 blocks, {44 * block:,} numbers, 40 in use",
                           f"44 blocks, {44 * block:,} numbers, all in use"]
    text = capsys.readouterr().out
    for name, ms in found.items():
        assert name in text and ms > 0
    with pytest.raises(ValueError, match="blocks=41: must be 42 or more"):
        bank_size.main(["--blocks=41"])
