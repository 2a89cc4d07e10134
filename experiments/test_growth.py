"""Test of ultramem_growth.py; `python test_all.py` runs it."""
import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments import ultramem_growth
from prepare_fineweb import ConfigError


def test_ultramem_growth_times_what_grows_with_the_slots(tmp_path, monkeypatch, capsys):
    """Its parts change what they should: all weights of the scoring, of the tables the rows that
    are read."""
    monkeypatch.setattr(ultramem_growth, "ROOT", tmp_path)
    for name, value in ultramem_growth._defaults.items():
        monkeypatch.setattr(ultramem_growth, name, value)
    results = tmp_path / "experiments/results"
    results.mkdir(parents=True)
    ultramem_growth.main(["--sizes=12,24", "--n_embd=64", "--top_k=4", "--batch=1",
                          "--block_size=24", "--steps=2"])
    found = json.loads((results / "ultramem_growth-cpu.json").read_text())
    a, b = found["sizes"]["12"], found["sizes"]["24"]
    assert a["slots"] == 144 and a["touched"] <= 24 * 4
    for part in ("dense", "sparse", "scoring", "rows"):
        assert a[f"{part}_ms"] > 0 and b[f"{part}_ms"] > 0
    rows = (24 ** 2 - 12 ** 2) * (12 + 4)                      # of D_v + D_p
    keys = 12 * 2 * 2 * 16                                     # of D_k
    assert b["parameters"] - a["parameters"] == rows + keys
    assert found["growth"][0]["of"] == [12, 24]
    assert "from 12 to 24" in capsys.readouterr().out
    race, touched = ultramem_growth.racers(12, torch.randint(256, (1, 25)))
    changed = {}
    for name in ("scoring", "rows"):
        before = [p.detach().clone() for p in race[name][0]]
        ultramem_growth.timed(*race[name])
        changed[name] = [(p != old) for p, old in zip(race[name][0], before)]
    assert all(part.any() for part in changed["scoring"])
    assert [part.any(1).sum() for part in changed["rows"]] == [touched, touched]
    with pytest.raises(ConfigError, match="two or more whole numbers that grow"):
        ultramem_growth.main(["--sizes=24,12"])
