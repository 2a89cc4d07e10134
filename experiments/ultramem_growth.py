"""UltraMemV2: what a training step costs as the memory grows and a token reads as many slots as
before.

    python experiments/ultramem_growth.py                 # n = 512, 1,024, 2,048: to 4.2M slots
    python experiments/ultramem_growth.py --sizes=256,512 --batch=2

With row-sparse gradients and lazy Adam (--sparse_memory=True) the 4n dot products and the Top-m_key
among them should be all that grows. So two parts of the step are timed alone, there and back,
clipping and optimizer included: the scoring, from tokens to slots, and the rows, which only grow
until no two tokens read the same one. Their growth is compared with the whole step's. With dense
gradients all N = n^2 rows count. One block, so that little else is in a step; a step is forward and
backward pass, clipping and the optimizers; steps in turn, medians.
Writes results/ultramem_growth-DEVICE.json.
"""
import copy
import re
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments.run import options, save_costs
from kernels import (LazyAdam, clip_grads, gather_dot, gather_sum, keep_coalesced,
                     keep_freed_memory, sort_indices)
from model_ultramem import Config, Model
from prepare_fineweb import guard, need
from sample import pick_device

# -------------------------------------------------------------------------- settings: --key=value
sizes = "512,1024,2048"       # n, row (and column) keys
n_embd = 256                  # width, in heads of 64
top_k = 32                    # slots a token reads
batch = 4                     # sequences of a step
block_size = 256              # tokens of a sequence
steps = 25                    # that count, after three to warm up
device = "cpu"                # cpu | cuda
# --------------------------------------------------------------------------
WARMUP = 3                    # steps that do not count


def lowered():
    """As train.py computes on a GPU; fp32 on a CPU."""
    return torch.autocast("cuda", torch.bfloat16, enabled=device == "cuda")


def timed(parameters, optimizers, forward):
    """Milliseconds of one update by the gradients that forward() leaves."""
    began = time.perf_counter()
    forward()
    clip_grads(parameters, 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    if parameters[0].is_cuda:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


def make_model(n, sparse):
    torch.manual_seed(0)
    config = Config(n_layer=1, n_embd=n_embd, n_head=n_embd // 64, vocab_size=256,
                    block_size=block_size, n_inner=4 * n_embd, n_keys=n, top_k=top_k,
                    sparse_memory=sparse)
    with torch.device(device):
        model = Model(config)
    model.init_weights()
    return model


def whole_step(model, x):
    """What timed() takes for a step on the tokens x (B, T + 1)."""
    rest, tables = model.param_groups("adamw", 1e-4, 0.1)
    if model.config.sparse_memory:
        optimizers = [torch.optim.AdamW([rest], fused=True), LazyAdam([tables])]
        for p in tables["params"]:
            keep_coalesced(p)
    else:
        optimizers = [torch.optim.AdamW([rest, tables], fused=True)]

    def forward():
        with lowered():
            loss = model(x[:, :-1], x[:, 1:])[1]
        loss.backward()

    return list(model.parameters()), optimizers, forward


def scoring(retrieve, h):
    """What timed() takes for the way from tokens h (P, d) to slots and back."""
    retrieve = copy.deepcopy(retrieve)                         # the steps move the model's
    with torch.no_grad(), lowered():
        toward = torch.randn_like(retrieve(h)[0])

    def forward():
        with lowered():
            retrieve(h)[0].backward(toward)
        h.grad = None

    parameters = list(retrieve.parameters())
    return parameters, [torch.optim.AdamW(parameters, lr=1e-4, fused=True)], forward


def rows(tables, scores, slots, hidden):
    """What timed() takes for reading the rows of slots (P, k) and back."""
    tables = copy.deepcopy(tables)
    scores = scores.detach().requires_grad_()
    hidden = hidden.detach().requires_grad_()
    back = torch.randn(len(slots), tables.values.size(1), device=device, dtype=hidden.dtype)
    parameters = list(tables.parameters())
    for p in parameters:
        keep_coalesced(p)

    def forward():
        order = sort_indices(slots)
        p = gather_dot(tables.pre_values, slots, hidden, sparse_grad=True, order=order)
        y = gather_sum(tables.values, slots, scores * p[..., None], sparse_grad=True, order=order)
        y.backward(back)
        scores.grad = hidden.grad = None

    return parameters, [LazyAdam(parameters, lr=1e-4)], forward


def racers(n, x):
    """For a memory of n^2 slots on tokens x (B, T + 1) -> {name: what timed() takes}, and how many
    slots x reads."""
    dense, sparse = make_model(n, False), make_model(n, True)
    memory = sparse.blocks[0].memory
    seen = []
    hook = memory.retrieve.register_forward_hook(lambda module, inputs, _: seen.extend(inputs))
    with torch.no_grad(), lowered():
        sparse(x[:, :-1])
    hook.remove()
    h = seen[0].requires_grad_()                               # (P, d), as a step has it
    with torch.no_grad(), lowered():
        scores, slots, _ = memory.retrieve(h)
        hidden = memory.W_pre(h)
    race = dict(sparse=whole_step(sparse, x), scoring=scoring(memory.retrieve, h),
                rows=rows(sparse.tables[0], scores, slots, hidden), dense=whole_step(dense, x))
    return race, len(slots.unique())


def measure(race, ns):
    """{(n, name): milliseconds of each step}. Dense steps come last: one of 100M parameters leaves
    no cache as it was."""
    times = {}
    for names in (("sparse", "scoring", "rows"), ("dense",)):
        for i in range(WARMUP + steps):
            for name in names:
                for n in ns:
                    taken = timed(*race[n][name])
                    if i >= WARMUP:
                        times.setdefault((n, name), []).append(taken)
    return times


def compare(times, a, b):
    """By how many milliseconds b's step and its parts take longer than a's, within a round."""
    more = {"of": [a, b]}
    for name in ("sparse", "scoring", "rows", "dense"):
        differences = [q - p for p, q in zip(times[a, name], times[b, name])]
        more[f"{name}_ms"] = round(statistics.median(differences), 3)
    return more


def main(argv):
    c, others = options(argv, globals())
    globals().update(vars(c))
    need(not others, f"no file is wanted, not {others}")
    need(device in ("cpu", "cuda"), f"device={device}: choose cpu or cuda")
    pick_device(device)                                # says so if it is not there
    for key in ("batch", "block_size", "steps"):
        need(getattr(c, key) >= 1, f"{key}={getattr(c, key)}: must be at least 1")
    need(n_embd > 0 and n_embd % 64 == 0, f"n_embd={n_embd}: must be a multiple of 64")
    need(re.fullmatch("[0-9]+(,[0-9]+)*", sizes), f"sizes={sizes}: whole numbers, by commas")
    ns = [int(n) for n in sizes.split(",")]
    need(ns == sorted(set(ns)) and len(ns) > 1, "sizes must be two or more whole numbers that grow")
    keep_freed_memory()
    torch.manual_seed(0)
    x = torch.randint(256, (batch, block_size + 1), device=device)
    found, race = {}, {}
    for n in ns:
        race[n], touched = racers(n, x)
        parameters = sum(p.numel() for p in race[n]["sparse"][0])
        found[n] = dict(slots=n * n, touched=touched, parameters=parameters)
    times = measure(race, ns)
    for n, row in found.items():
        for name in race[n]:
            row[f"{name}_ms"] = round(statistics.median(times[n, name]), 3)
        print(f"n = {n}:", ", ".join(f"{key} {value:,}" for key, value in row.items()))
    growth = [compare(times, a, b) for a, b in zip(ns, ns[1:])]
    for more in growth:
        a, b = more["of"]
        step = more["sparse_ms"]
        shares = ", ".join(f"its {part} {more[f'{part}_ms']:.1f} ({more[f'{part}_ms'] / step:.0%})"
                           for part in ("scoring", "rows"))
        print(f"from {a} to {b} a step takes {step:.1f} ms more, {shares}; "
              f"dense {more['dense_ms']:.1f}")
    save_costs("ultramem_growth", "ultramem", device, sizes=found, growth=growth,
               settings=vars(c))


if __name__ == "__main__":
    guard("ultramem_growth.py")
    main(sys.argv[1:])
