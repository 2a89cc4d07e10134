"""Times most operations of kernels.py against the obvious torch way, on the device it runs on.

python experiments/kernel_speed.py [--json_file=PATH]

Tables: the operations at the papers' sizes, a training step of one memory table, the head with its
loss; then Muon. "of copy" is the bytes that must move, over the time, as a fraction of a measured
copy's bandwidth. The two sides of every comparison take turns.
"""
import concurrent.futures
import itertools
import json
import math
import multiprocessing
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Callable

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import kernels
from experiments.run import options
from kernels import LazyAdam, gather_dot, gather_sum, keep_coalesced, keep_freed_memory
from kernels import linear_cross_entropy, mix_values, product_key_topk, row_sums_dense, tucker_topk
from prepare_fineweb import guard, need

json_file = ""    # for the figures; empty: none is written


def wait(device):
    if device == "cuda":
        torch.cuda.synchronize()


def medians(functions, device, rounds=15):
    """Milliseconds per call. The functions take turns: two to warm up, then `rounds`, or fewer (at
    least three) where those take longer than three seconds. On CUDA a sample is five calls in a
    row, so that launches overlap the work."""
    calls = 5 if device == "cuda" else 1
    samples = [[] for _ in functions]
    began = time.perf_counter()
    for turn in range(rounds + 2):
        for function, sample in zip(functions, samples):
            wait(device)
            start = time.perf_counter()
            for _ in range(calls):
                function()
            wait(device)
            sample.append((time.perf_counter() - start) / calls * 1e3)
        if turn >= 4 and time.perf_counter() - began > 3:
            break
    return [median(sample[2:]) for sample in samples]


def draw(kind, N, shape, device):
    """Uniform rows, or Zipf-like ones (the i-th most used has a chance of about 1/i), spread."""
    if kind == "uniform":
        return torch.randint(N, shape, device=device)
    zipf = (N ** torch.rand(shape, device=device)).long().clamp_(max=N - 1)
    return zipf * 7919 % N


# ================================================================ the obvious torch ways

def bag(table, indices, weights, sparse=False):
    return F.embedding_bag(
        indices, table, mode="sum", per_sample_weights=weights.to(table.dtype), sparse=sparse)


def naive_sum(table, indices, weights):
    return (table[indices] * weights[..., None]).sum(1)


def naive_dot(table, indices, x):
    return (table[indices] * x[:, None]).sum(-1)


def naive_table_gradient(table, indices, weights, grad):
    pairs = (grad[:, None] * weights[..., None]).flatten(0, 1)
    return table.new_zeros(table.shape).index_add_(0, indices.view(-1), pairs.to(table.dtype))


def three_topk(s_row, s_col, k):
    row, i = s_row.topk(k)
    col, j = s_col.topk(k)
    scores, best = (row[:, :, None] + col[:, None, :]).flatten(1).topk(k)
    return scores, i.gather(1, best // k), j.gather(1, best % k)


def naive_mix(v, bank_rows, inverse, gate):
    weights = gate[..., 1:].transpose(1, 2)[..., None]
    return gate[..., :1] * v + (weights * bank_rows[inverse]).sum(1)


def two_ops(x, weight, targets):
    return F.cross_entropy(F.linear(x, weight).float(), targets, ignore_index=-1)


# ================================================================ the operations

@dataclass
class Case:
    """ours and theirs: functions of the tensors `inputs`, which get gradients."""
    op: str
    size: str
    ours: Callable
    theirs: Callable    # or None
    name: str           # of theirs
    inputs: tuple
    must_move: int      # the bytes that forward and backward together have to move


def cases(device, dtype):
    yield from sum_cases(device, dtype)
    yield from search_cases(device)
    yield from mix_cases(device, dtype)


def sum_cases(device, dtype):
    sizes = (    # paper, n, k, d, queries on a GPU and on a CPU
        ("MIDUS", 64, 4, 64, 2**20, 2**14), ("MIDUS", 64, 4, 128, 2**20, 2**14),
        ("UltraMemV2", 360, 32, 192, 2**16, 2**11), ("Memory+", 1138, 160, 768, 2**13, 2**8))
    for (paper, n, k, d, P, cpu_P), kind in itertools.product(sizes, ("uniform", "zipf")):
        N = n * n
        P = P if device == "cuda" else cpu_P
        sparse = device == "cpu" and n == 1138    # there a dense gradient has 4 GB
        indices = draw(kind, N, (P, k), device)
        table = torch.randn(N, d, device=device).to(dtype)
        x = torch.randn(P, d, device=device)
        w = torch.randn(P, k, device=device)
        size = f"{paper} N={N} d={d} P={P} k={k} {kind}" + (" sparse" if sparse else "")
        row = d * dtype.itemsize
        read = P * k * (row + 12)
        written = row * (indices.unique().numel() if sparse else N)
        peer = lambda table, w: bag(table, indices, w, sparse)
        name = "embedding_bag"
        if device == "cuda" and dtype == torch.bfloat16:    # whose backward CUDA has not
            peer = lambda table, w: naive_sum(table, indices, w)
            name = "gather, sum"
        yield Case("gather_sum", size,
                   lambda table, w: gather_sum(table, indices, w, sparse_grad=sparse),
                   peer, name, (table, w), 2 * read + written + P * d * 8)
        if sparse:
            continue
        yield Case("gather_dot", size,
                   lambda table, x: gather_dot(table, indices, x),
                   lambda table, x: naive_dot(table, indices, x),
                   "gather, sum", (table, x), 2 * read + written + P * d * 12)
        yield Case("table gradient", size,
                   lambda: row_sums_dense(x, indices, w[..., None], None, 1, None, N, dtype),
                   lambda: naive_table_gradient(table, indices, w, x),
                   "index_add_", (), written + P * d * 4 + P * k * 12)


def search_cases(device):
    fewer = 1 if device == "cuda" else 16
    for n, k, P in ((64, 4, 2**16), (64, 32, 2**16), (360, 32, 2**14), (1138, 80, 2**13)):
        P = P // fewer
        scores = (torch.randn(P, n, device=device), torch.randn(P, n, device=device))
        yield Case("product_key_topk", f"P={P} n={n} k={k}",
                   lambda row, col: product_key_topk(row, col, k)[0],
                   lambda row, col: three_topk(row, col, k)[0],
                   "three topk", scores, P * (16 * n + 40 * k))
    P = 2**14 // fewer
    n = 360
    m = 32
    u = torch.ones(1, 2, device=device)
    core = torch.rand(2, 1, 2, 2, device=device)
    scores = (torch.randn(P, 1, 2, n, device=device), torch.randn(P, 1, 2, n, device=device))
    yield Case("tucker_topk", f"P={P} n={n} m={m} r=2 H=2",
               lambda row, col: tucker_topk(row, col, u, u, core, m, m)[0],
               None, "-", scores, P * (32 * n + 40 * m))


def mix_cases(device, dtype):
    T = 2**15 if device == "cuda" else 2**11
    H = 6
    for name, M in (("x1", 6), ("x8", 48)):
        tokens, inverse = draw("zipf", 65536, (T,), device).unique(return_inverse=True)
        v = torch.randn(T, H, 128, device=device).to(dtype)
        rows = torch.randn(len(tokens), M, H, 128, device=device).to(dtype)
        gate = torch.randn(T, H, M + 1, device=device)
        yield Case("mix_values", f"MoVE D12 {name} T={T} U={len(tokens)} M={M}",
                   lambda v, rows, gate: mix_values(v, rows, inverse, gate),
                   lambda v, rows, gate: naive_mix(v, rows, inverse, gate),
                   "gather, sum", (v, rows, gate), 3 * rows.nbytes + 5 * v.nbytes + 3 * gate.nbytes)


def forward_and_backward(function, inputs):
    """-> the two as functions without arguments."""
    leaves = [t.requires_grad_() for t in inputs]
    forward = partial(function, *leaves)
    if not leaves:
        return forward, lambda: None
    y = forward()
    return forward, partial(torch.autograd.grad, y, leaves, torch.randn_like(y), retain_graph=True)


def time_operations(device, copy):
    print(f"{'':74}{'ours: fwd':>11}{'bwd':>9}{'of copy':>9}{'theirs:':>16}{'fwd':>9}{'bwd ms':>9}"
          f"{'ratio':>8}")
    dtypes = [torch.float32, torch.bfloat16] if device == "cuda" else [torch.float32]
    for dtype in dtypes:
        for case in cases(device, dtype):
            calls = [*forward_and_backward(case.ours, case.inputs)]
            if case.theirs:
                calls += forward_and_backward(case.theirs, case.inputs)
            times = medians(calls, device)
            times += [math.nan] * (4 - len(times))
            ours = times[0] + times[1]
            result = dict(
                op=case.op, size=case.size, dtype=str(dtype), fwd_ms=times[0], bwd_ms=times[1],
                of_copy=case.must_move / ours / copy, peer=case.name, peer_fwd_ms=times[2],
                peer_bwd_ms=times[3], ratio=(times[2] + times[3]) / ours)
            short = "bf16" if dtype == torch.bfloat16 else "fp32"
            print(f"{case.op:16} {case.size:50} {short:6}{times[0]:11.3f}{times[1]:9.3f}"
                  f"{result['of_copy']:9.0%}{case.name:>16}{times[2]:9.3f}{times[3]:9.3f}"
                  f"{result['ratio']:7.1f}x", flush=True)
            yield result


# ================================================================ a training step of a table

WAYS = ("ours + LazyAdam", "embedding_bag + SparseAdam", "ours + fused AdamW",
        "embedding_bag + fused AdamW")


def training_step(way, indices, weights, x, table):
    """-> a function: forward, backward and optimizer step of one memory table."""
    ours = way.startswith("ours")
    sparse = not way.endswith("AdamW")
    if not sparse:
        optimizer = torch.optim.AdamW([table], fused=True)
    elif ours:
        optimizer = LazyAdam([table])
        keep_coalesced(table)
    else:
        optimizer = torch.optim.SparseAdam([table])

    def step():
        w = weights.clone().requires_grad_()
        if ours:
            y = gather_sum(table, indices, w, sparse_grad=sparse)
        else:
            y = bag(table, indices, w, sparse)
        y.backward(x)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def time_steps(device):
    print("\nforward + backward + optimizer in ms, 65,536 retrievals from (N, 64)")
    print(" " * 34 + "".join(f"{way:>29}" for way in WAYS))
    for N, kind in itertools.product((2**18, 2**20, 2**22), ("uniform", "zipf")):
        indices = draw(kind, N, (2**14, 4), device)
        weights = torch.randn(2**14, 4, device=device)
        x = torch.randn(2**14, 64, device=device)
        result = dict(N=N, indices=kind, rows=indices.unique().numel())
        for way in WAYS:    # one after the other: 4 GB a way at the largest N
            table = torch.nn.Parameter(torch.randn(N, 64, device=device))
            step = training_step(way, indices, weights, x, table)
            result[way] = medians([step], device)[0]
        print(f"N={N:<8} {kind:8} {result['rows']:6} rows  "
              + "".join(f"{result[way]:29.1f}" for way in WAYS), flush=True)
        yield result


# ================================================================ the head and its loss

def head_step(ours, tokens, V, d, dtype, device):
    """-> a function: loss and gradients of a head."""
    x = torch.randn(tokens, d, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(V, d, device=device) / d**0.5).to(dtype).requires_grad_()
    targets = torch.randint(V, (tokens,), device=device)
    loss = linear_cross_entropy if ours else two_ops
    return lambda: torch.autograd.grad(loss(x, weight, targets), (x, weight))


def peak_bytes(*arguments):
    """What one step needs beside its inputs, at its peak."""
    step = head_step(*arguments)
    if arguments[-1] == "cuda":
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    torch.set_num_threads(1)
    before = most_resident()
    step()
    return most_resident() - before


def most_resident():
    """The most bytes that this process has held so far; where Linux does not tell, not a number."""
    status = Path("/proc/self/status")
    if not status.exists():
        return math.nan
    return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024


def peak(*arguments):
    """peak_bytes() in a process of its own; a GPU's allocator can forget earlier peaks."""
    if arguments[-1] == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return peak_bytes(*arguments)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as process:
        return process.submit(peak_bytes, *arguments).result()


def time_heads(device):
    print("\nlinear_cross_entropy against F.cross_entropy(F.linear(...)), forward and backward")
    sizes = [(4096, 4096, 128), (4096, 4096, 384), (1024, 50304, 384)]
    if device == "cuda":
        sizes.append((32768, 50304, 768))
    for (tokens, V, d), dtype in itertools.product(sizes, (torch.float32, torch.bfloat16)):
        steps = []
        peaks = []
        for ours in (True, False):
            arguments = (ours, tokens, V, d, dtype, device)
            steps.append(head_step(*arguments))
            peaks.append(peak(*arguments) / 2**20)
        times = medians(steps, device, rounds=5)
        print(f"{tokens:6} tokens x {V:6}, d {d} {str(dtype)[6:]:9} ours {times[0]:8.1f} ms"
              f"{peaks[0]:7.0f} MiB   theirs {times[1]:8.1f} ms{peaks[1]:7.0f} MiB"
              f"   {times[1] / times[0]:4.1f}x", flush=True)
        yield dict(
            tokens=tokens,
            vocabulary=V,
            d=d,
            dtype=str(dtype),
            ms=times[0],
            peak_mib=peaks[0],
            peer_ms=times[1],
            peer_peak_mib=peaks[1])


# ================================================================ Muon

def time_muon(device):
    """A step of the matrices of a model, four of d x d and two of four times that in each layer."""
    layers, d = (12, 768) if device == "cuda" else (4, 128)
    shapes = [(d, d)] * 4 * layers + [(4 * d, d), (d, 4 * d)] * layers
    steps = []
    for kind in (kernels.Muon, torch.optim.Muon):
        matrices = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
        for p in matrices:
            p.grad = torch.randn_like(p)
        steps.append(kind(matrices).step)
    ours, theirs = medians(steps, device, rounds=5)
    print(f"\nMuon, {layers} layers x {d}: ours {ours:.1f} ms, theirs {theirs:.1f} ms   "
          f"{theirs / ours:4.1f}x", flush=True)
    return dict(layers=layers, d=d, ms=ours, peer_ms=theirs)


def main(argv):
    c, others = options(argv, globals())
    need(not others, f"no file or command, not {others}: --json_file=FILE")
    file = Path(c.json_file)
    need(file.parent.is_dir(), f"json_file={file}: there is no folder {file.parent}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    keeps = device == "cpu" and keep_freed_memory()    # for both sides
    a, b = torch.randn(2, 2**26 if device == "cuda" else 2**25, device=device)
    copy = 2 * a.nbytes / medians([lambda: b.copy_(a)], device)[0]    # bytes per ms
    report = dict(
        device=torch.cuda.get_device_name() if device == "cuda" else "cpu",
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        triton=getattr(kernels.triton, "__version__", None),
        malloc_keeps=keeps,
        path="triton" if kernels.use_triton(a) else "torch",
        copy_gb_per_s=round(copy / 1e6, 1))
    print(", ".join(f"{key} {value}" for key, value in report.items()), "\n")
    report["operations"] = list(time_operations(device, copy))
    report["steps"] = list(time_steps(device))
    report["heads"] = list(time_heads(device))
    report["muon"] = time_muon(device)
    if c.json_file:
        file.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    guard("kernel_speed.py")
    main(sys.argv[1:])
