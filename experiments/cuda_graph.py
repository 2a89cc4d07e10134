"""train.py with the forward and backward pass of a step as one CUDA graph: for models so small that
a GPU waits for their launches.

    python experiments/cuda_graph.py --model=lime --depth=4           # train.py's flags
    python train.py experiments/lime_routers.py --jobs=30 --graph=True         # a whole table

After three ordinary steps the pass is captured, and replayed from then on; clipping and optimizers
stay as they are. What is captured must not depend on the data: so MoVE takes all tokens of the
vocabulary for distinct, and a mixture of experts runs every expert on all tokens. The losses are
train.py's; a mixture's differ by some 0.02. Batches with context (hierarchical memories) or with
tokens that have no loss, row-sparse gradients, several processes and torch.compile are left to
train.py, and so is all without a GPU. With many runs on one GPU a step's time means nothing: the
result has none.
"""
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from prepare_fineweb import need

BEFORE = "step_times = []\n"                          # train.py's line where all is ready to run
TIME = "1e3 * median(step_times) if step_times else None"      # and what its result has of a step
ORDINARY = 3                                       # steps before: libraries and kernels load


def read_all(module):
    """MoVE's Model.read() without torch.unique."""
    def read(self, idx):
        if self.config.memory == "none":
            return None
        tokens = torch.arange(self.config.vocab_size, device=idx.device)
        inverse = idx.flatten()
        rows = self.bank(tokens) if self.bank is not None else None
        order = module.mix_order(inverse, self.config.slots)
        return module.Reading(tokens, inverse, rows, order)
    return read


def run_all(self, x, tables):
    """MoE.forward() of model_ultramem.py: a token's experts by their gates, 0 for the others."""
    tokens = x.flatten(0, 1)
    weights, experts, aux = self.retrieve(tokens)              # (P, m, 1), (P, m)
    E, _, width, d = self.experts.shape
    gates = weights.new_zeros(len(tokens), E).scatter(1, experts, weights[..., 0])
    gate, up, down = (w.reshape(E * width, d) for w in self.experts.unbind(1))
    h = F.silu(F.linear(tokens, gate)) * F.linear(tokens, up)  # (P, E * width)
    h = h.view(-1, E, width) * gates[..., None].to(h.dtype)
    return F.linear(h.flatten(1), down.t()).view(x.shape), aux


def count_all(x, minlength):
    """torch.bincount, which asks the GPU how many there are."""
    return x.new_zeros(minlength).scatter_add_(0, x, torch.ones_like(x))


def without_data(module):
    """A context in which the module's model does the same whatever the tokens are."""
    changes = ExitStack()
    changes.enter_context(patch.object(torch, "bincount", count_all))
    if hasattr(module, "mix_order"):
        changes.enter_context(patch.object(module.Model, "read", read_all(module)))
    if hasattr(module, "MoE"):
        changes.enter_context(patch.object(module.MoE, "forward", run_all))
    return changes


class Captured:
    """In the place of train.py's forward_backward(). t: its globals."""

    def __init__(self, t):
        self.t = t
        self.ordinary = t["forward_backward"]
        self.possible = t["gpu"] and not (t["sparse"] or t["parallel"] or t["compile"])
        self.steps = 0
        self.graph = None

    def __call__(self, x, y, context):
        self.steps += 1
        plain = self.possible and not context and bool((y >= 0).all())
        if not plain or self.steps <= ORDINARY:
            return self.ordinary(x, y, context)
        if self.graph is None:
            self.x = x.to(self.t["device"])
            self.y = y.to(self.t["device"])
            with without_data(self.t["module"]):
                self.capture()
        self.x.copy_(x)
        self.y.copy_(y)
        self.graph.replay()
        for p, grad in self.grads:
            p.grad = grad
        return self.loss

    def capture(self):
        parameters = list(self.t["raw"].parameters())
        for p in parameters:
            p.grad = None
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = self.forward_backward()
        self.grads = [(p, p.grad) for p in parameters if p.grad is not None]

    def forward_backward(self):
        """The loss of self.x, self.y; gradients into the parameters' grad."""
        total = 0.0
        size = self.t["batch_size"]
        for first in range(0, len(self.x), size):
            part = slice(first, first + size)
            share = len(self.x[part]) / len(self.x)
            with self.t["autocast"]:
                loss = self.t["net"](self.x[part], self.y[part])[1] * share
            loss.backward()
            total = total + loss.detach()
        return total


def prepared(t):
    """Called from train.py before its first step."""
    t["forward_backward"] = Captured(t)
    if t["gpu"]:
        done = torch.cuda.Event(blocking=True)                 # a process that waits sleeps

        def wait():
            done.record()
            done.synchronize()
        torch.accelerator.synchronize = wait


def main(argv):
    if not any(flag.startswith("--compile=") for flag in argv):
        argv = [*argv, "--compile=0"]
    path = ROOT / "train.py"
    source = path.read_text(encoding="utf-8")
    for part in (BEFORE, TIME):
        need(source.count(part) == 1, f"{path} has not once what is wanted there: {part}")
    sys.argv = [str(path), *argv]
    t = {"__name__": __name__, "__file__": str(path), "prepared": prepared}
    source = source.replace(BEFORE, f"prepared(globals()); {BEFORE}")          # lines keep numbers
    source = source.replace(TIME, "None")
    exec(compile(source, str(path), "exec"), t)


if __name__ == "__main__":
    main(sys.argv[1:])
