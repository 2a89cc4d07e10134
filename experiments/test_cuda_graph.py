"""Tests of cuda_graph.py without a GPU: a stand-in's replay() runs the pass again.
`python test_all.py` runs them too."""
import contextlib
import json
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from test_all import make, parametrize, some_tokens, text_folder, train, typed

import sample
from experiments import cuda_graph


def loss_and_gradients(model, idx):
    model.zero_grad()
    loss = model(idx, idx)[1]
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


@parametrize("case", ["move", "move memory=none", "move memory=lave", "move memory_scale=2",
                      "move attention=mla", "ultramem memory=moe n_keys=4 top_k=2"])
def test_a_pass_without_sizes_from_the_data_is_the_same_pass(case):
    name, _, switches = case.partition(" ")
    model = make(name, torch.float64, **typed(name, switches))
    idx = some_tokens()
    want = loss_and_gradients(model, idx)
    with cuda_graph.without_data(sample.load_module(name)):
        assert_close(loss_and_gradients(model, idx), want)
    assert_close(loss_and_gradients(model, idx), want, rtol=0, atol=0)


class StandIn:
    """Of torch.cuda.CUDAGraph: what was captured runs again, into the same tensors."""
    now = None

    def replay(self):
        captured = self.now
        with torch.enable_grad():
            for p, grad in captured.grads:
                p.grad = None
            loss = captured.forward_backward()
        captured.loss.copy_(loss)
        for p, grad in captured.grads:
            grad.copy_(p.grad)


def test_replayed_steps_are_ordinary_steps(monkeypatch):
    """In micro-batches; a batch in which tokens have no loss is an ordinary step."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", StandIn)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    model = make("move")
    ordinary = []

    def forward_backward(x, y, context):
        ordinary.append(len(x))
        loss = model(x, y)[1]
        loss.backward()
        return loss.detach()

    pass_of_step = cuda_graph.Captured(dict(
        forward_backward=forward_backward, gpu=True, sparse=set(), parallel=None, compile=0,
        device="cpu", module=sample.load_module("move"), raw=model, net=model, batch_size=1,
        autocast=contextlib.nullcontext()))
    StandIn.now = pass_of_step
    for step in range(8):
        x = some_tokens(2, seed=step)
        y = x.clone()
        if step == 6:
            y[0, 0] = -1
        want = model(x, y)[1]
        gradients = torch.autograd.grad(want, [*model.parameters()])
        model.zero_grad()
        assert_close(pass_of_step(x, y, {}), want.detach())
        assert_close([p.grad for p in model.parameters()], [*gradients])
    assert len(ordinary) == cuda_graph.ORDINARY + 1


def test_without_a_gpu_it_is_train_py(tmp_path, text_folder, monkeypatch):
    """But the result has no time of a step."""
    flags = (f"--model=lime --depth=1 --dataset={text_folder} --block_size=16 --device=cpu "
             "--batch_tokens=32 --max_iters=5 --eval_tokens=64 --sample_tokens=0 --compile=0")
    train(flags, out_dir=tmp_path / "train")
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)
    monkeypatch.setattr(sys, "argv", [])
    cuda_graph.main([*flags.split(), f"--out_dir={tmp_path / 'graph'}"])
    ours, theirs = (json.loads((tmp_path / name / "result.json").read_text())
                    for name in ("graph", "train"))
    assert ours["val_loss"] == theirs["val_loss"]
    assert theirs["step_ms"] > 0 and ours["step_ms"] is None
    monkeypatch.setattr(sample, "generate", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cuda_graph.main([*flags.split(), "--sample_tokens=1", f"--out_dir={tmp_path / 'ends'}"])
    ends = json.loads((tmp_path / "ends/result.json").read_text())
    assert ends["step_ms"] is None, "not even where the sample after it fails"
