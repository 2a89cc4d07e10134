"""Tests of midus_costs.py; `python test_all.py` runs them too."""
import json
import sys
from pathlib import Path

import pytest
import torch
from pytest import approx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments import midus_costs
from prepare_fineweb import ConfigError


def test_midus_costs_counts_what_autograd_keeps():
    """Of tanh(x @ W) it keeps x, a view of 6 x 5 numbers, for W's gradient, and the output."""

    class Tiny(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.W = torch.nn.Parameter(torch.zeros(4, 5))

        def forward(self, x, y):
            return None, (x @ self.W).tanh().sum() + 1

    assert midus_costs.kept_bytes(Tiny(), torch.zeros(6, 5)) == 2 * 6 * 5 * 4


def test_midus_costs_times_every_method(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(midus_costs, "ROOT", tmp_path)
    (tmp_path / "experiments/results").mkdir(parents=True)
    for name, value in midus_costs._defaults.items():          # undone after what main() sets
        monkeypatch.setattr(midus_costs, name, value)
    monkeypatch.setattr(midus_costs, "WARMUP", 1)
    midus_costs.main("--depth=8 --n_embd=64 --n_keys=4 --batch=1 --block_size=24 --prompt=8 "
                     "--steps=1".split())
    file = tmp_path / "experiments/results/midus_costs-cpu.json"
    found = json.loads(file.read_text())["methods"]
    said = capsys.readouterr().out
    for name, row in found.items():
        assert f"\n{name} " in said
        assert min(row["step_ms"], row["prefill_ms"], row["token_ms"]) > 0
        weights = 4 * row["parameters"] + 12 * row["trained"]  # gradients and two moments
        assert row["held_mb"] == approx(row["kept_mb"] + weights / 2 ** 20)
        if name not in ("base", "SOLAR"):
            assert row["trained"] == row["parameters"] - found["base"]["parameters"]
    kept = {name: row["kept_mb"] for name, row in found.items()}
    assert kept["HML top-heavy"] < kept["HML"] < kept["HML bottom-heavy"]
    assert kept["OpT-DeUS"] < kept["Llama Pro"] < kept["SOLAR"]
    with pytest.raises(ConfigError, match="multiple of 4"):
        midus_costs.main(["--depth=6"])
