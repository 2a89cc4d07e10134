"""Tests of the timers: bank_size.py, bank_tiers.py, midus_costs.py and ultramem_growth.py.
`python test_all.py` runs them too."""
import copy
import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from pytest import approx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments import bank_size, bank_tiers, midus_costs, run, ultramem_growth
from model_hiermem import Config


@pytest.fixture
def measure(tmp_path, monkeypatch, capsys):
    """Runs one of them in a folder of its own -> what it writes and what it prints."""
    def start(program, name, flags):
        monkeypatch.setattr(run, "results_file", lambda name, scale: tmp_path / f"{name}-{scale}.x")
        for key, value in vars(program).copy().items():        # undone after what main() sets
            monkeypatch.setattr(program, key, value)
        program.main(flags.split())
        return json.loads((tmp_path / f"{name}-cpu.json").read_text()), capsys.readouterr().out

    return start


def test_bank_size_times_a_step(measure):
    """41 blocks and more, all of the larger bank's blocks in reach. No figure is asserted."""
    found, said = measure(bank_size, "hiermem_bank_size", "--blocks=44 --rank=2 --steps=1")
    block = 7 * 3 * 2 * 128                                    # layers, matrices, channels, width
    large = f"44 blocks, {44 * block:,} numbers"
    assert list(found["ms_a_step"]) == [f"41 blocks, {41 * block:,} numbers", f"{large}, 40 in use",
                                        f"{large}, all in use"]
    for name, ms in found["ms_a_step"].items():
        assert name in said
        assert ms > 0
    assert found["steps"] == 1


TINY = dict(n_layer=2, n_embd=32, n_head=2, vocab_size=61, block_size=16)
linux = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="files leave the cache there")


@linux
def test_bank_tiers_times_every_placement(measure, monkeypatch, tmp_path):
    monkeypatch.setitem(bank_tiers.PRESETS, "tiny", TINY)
    found, said = measure(bank_tiers, "hiermem_bank_tiers", "--preset=tiny --clusters=2,4 "
                          f"--ranks=8,4 --rounds=2 --prompt=5 --device=cpu --out_dir={tmp_path}")
    assert found["bank"] == 2 * 2 * 3 * 32 * (8 + 4 * 4)       # layers, children, matrices, width
    assert found["mb"] == [4 * 2 * 3 * 32 * rank / 2 ** 20 for rank in (8, 4)]
    assert list(found["placements"]) == ["host memory", "file, read before",
                                         "file, its deepest level", "file"]
    for name, row in found["placements"].items():
        assert f"\n{name} " in said
        assert len(row["levels_ms"]) == 2
        assert min(row["levels_ms"]) > 0
        assert min(row["ms"], row["next_ms"], row["token_ms"]) > 0
    assert min(found["anchor_token_ms"], found["load_ms"]) > 0
    assert not (tmp_path / "ckpt.pt").exists()


@linux
def test_bank_tiers_fetches_the_same_block_from_everywhere(tmp_path):
    path = tmp_path / "ckpt.pt"
    tiers = bank_tiers.Tiers(Config(**TINY, clusters="2,4", ranks="8,4"), path, "cpu")
    wanted = [table.clone() for table in tiers.in_memory]
    maps = Path("/proc/self/maps")
    for placement in bank_tiers.placements(2, "cpu").values():
        tiers.place(placement)
        found = re.findall(rf"(?m)^(\w+)-(\w+) .*{path}$", maps.read_text())
        spans = [range(int(a, 16), int(b, 16)) for a, b in found]
        for tier, level, table in zip(placement, tiers.levels, wanted):
            place = level.table.data_ptr()
            here = any(place in span for span in spans)
            assert here == (tier in ("warm", "cold"))
            block = level(torch.tensor([1]), "cpu")
            assert block.flatten().equal(table[1])
    tiers.load()
    assert str(path) not in maps.read_text()                   # or it would not leave the cache


def test_midus_costs_counts_what_autograd_keeps():
    """Of tanh(x @ W) it keeps x, a view of 6 x 5 numbers, for W's gradient, and the output."""
    class Tiny(torch.nn.Linear):
        def forward(self, x, y):
            return None, (x @ self.weight).tanh().sum() + 1

    assert midus_costs.kept_bytes(Tiny(5, 4), torch.zeros(6, 5)) == 2 * 6 * 5 * 4


def test_midus_costs_times_every_method(measure, monkeypatch):
    monkeypatch.setattr(midus_costs, "WARMUP", 1)
    facts, said = measure(midus_costs, "midus_costs", "--depth=8 --n_embd=64 --n_keys=4 --batch=1 "
                          "--block_size=24 --prompt=8 --steps=1")
    found = facts["methods"]
    for name, row in found.items():
        assert f"\n{name} " in said
        assert min(row["step_ms"], row["prefill_ms"], row["token_ms"]) > 0
        weights = 4 * row["parameters"] + 12 * row["trained"]  # gradients and two moments
        assert row["held_mb"] == approx(row["kept_mb"] + weights / 2 ** 20)
    kept = {name: row["kept_mb"] for name, row in found.items()}
    assert kept["HML top-heavy"] < kept["HML"] < kept["HML bottom-heavy"]
    assert kept["OpT-DeUS"] < kept["Llama Pro"] < kept["SOLAR"]


def test_ultramem_growth_times_what_grows_with_the_slots(measure):
    """Its parts change what they should: all weights of the scoring, of the tables the rows that
    are read."""
    found, said = measure(ultramem_growth, "ultramem_growth", "--sizes=12,24 --n_embd=64 --top_k=4 "
                          "--batch=1 --block_size=24 --steps=2")
    a, b = found["sizes"].values()
    assert a["slots"] == 144
    assert a["touched"] <= 24 * 4
    for part in ("dense", "sparse", "scoring", "rows"):
        assert min(a[f"{part}_ms"], b[f"{part}_ms"]) > 0
    slots = 24 ** 2 - 12 ** 2
    assert b["parameters"] - a["parameters"] == slots * (12 + 4) + 12 * 64   # D_v + D_p; the keys
    assert found["growth"][0]["of"] == [12, 24]
    assert "from 12 to 24" in said
    race, touched = ultramem_growth.racers(12, torch.randint(256, (1, 25)))
    changed = {}
    for name in ("scoring", "rows"):
        parameters = race[name][0]
        before = copy.deepcopy(parameters)
        ultramem_growth.timed(*race[name])
        changed[name] = list(map(torch.ne, parameters, before))
    assert all(part.any() for part in changed["scoring"])
    assert [part.any(1).sum() for part in changed["rows"]] == [touched, touched]


def test_the_parts_of_a_step_read_the_slots_that_the_step_reads():
    x = torch.randint(256, (2, 25))
    race, touched = ultramem_growth.racers(64, x)
    read = []
    model = ultramem_growth.make_model(64, True)
    model.blocks[0].memory.retrieve.register_forward_hook(
        lambda module, inputs, found: read.append(found[1]))
    model(x[:, :-1])
    assert touched == len(read[0].unique())
