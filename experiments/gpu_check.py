"""Ten minutes on a GPU: are the compiled kernels right, are they fast, do the models train?

    python experiments/gpu_check.py                   # on a machine with a GPU
    python experiments/gpu_check.py sums searches     # these parts alone
    python experiments/gpu_check.py --tiny            # a rehearsal on a CPU: Triton's interpreter

Most operations and their gradients against plain torch in fp64, rows beyond 2^31 numbers, one
compiled graph, the optimizers of touched rows and of matrices, five models trained for some steps
in bfloat16 and compiled; then kernel_speed.py's tables and step_time.py's for each model. A part
that fails does not keep the next ones from running. The parts: sums, mixed_values, searches, head,
far_rows, compiled, optimizers, steps, speed. Ends with what failed; exit code 1 if anything did.
"""
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

tiny = "--tiny" in sys.argv
os.environ["TRITON_INTERPRET"] = "1" if tiny else "0"
import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import kernels
from kernels import gather_dot, gather_sum, linear_cross_entropy, mix_values
from kernels import product_key_topk, tucker_topk
from prepare_fineweb import guard, need

SEARCHES = ((2, 1, 5), (3, 9, 5), (64, 4, 33), (64, 2, 33), (64, 32, 5), (128, 4, 33), (360, 32, 9),
            (512, 16, 9), (1138, 80, 3))                        # n, k, queries
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 8e-3}         # relative, of a whole tensor
MODELS = ("move", "lime", "ultramem", "midus", "hiermem")
failed = []


def compare(name, ours, exact, tolerance):
    for i, (a, b) in enumerate(zip(ours, exact)):
        a, b = a.to_dense().double(), b.to_dense().double()
        error = ((a - b).norm() / (b.norm() + 1e-30)).item()
        if not error <= tolerance:
            failed.append(f"{name} [{i}]")
            print(f"FAILED {name} [{i}]: relative error {error:.1e}, allowed {tolerance:.0e}")


def with_gradients(function, *inputs):
    """-> the result and its gradients for the inputs, of one and the same random direction."""
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    y = function(*inputs)
    torch.manual_seed(7)
    direction = torch.randn(y.shape, dtype=torch.float64).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, inputs, direction)]


def doubled(tensors):
    return [t.double() for t in tensors]


# ---------------------------------------------------------------- right?

def sums():
    """Odd sizes, slices of a row, blocks, a hot row, both dtypes; twice the same bits."""
    many = 3 if tiny else 70_001
    for P, k, N, d, H, blocks, dtype in (
            (37, 5, 9, 40, 1, 1, torch.float32), (33, 4, 5000, 64, 1, 1, torch.bfloat16),
            (70, 7, 3, 192, 2, 4, torch.float32), (65, 3, 2, 768, 6, 1, torch.float32),
            (many, 4, 4096, 64, 1, 1, torch.float32)):
        table = torch.randn(N, d).to(dtype)
        indices = torch.randint(N, (P, k))
        indices[:P // 2] = 1
        weights = torch.randn(P, k, H).to(dtype)
        x = torch.randn(P, d).to(dtype)
        block = torch.randint(blocks, (P, k)) if blocks > 1 else None

        def exact_sum(table, weights):
            parts = table[indices].view(P, k, H, -1) * weights[..., None]
            parts = parts.flatten(2)                            # (P, k, d)
            if block is None:
                return parts.sum(1)
            kept = [parts * (block == b)[..., None] for b in range(blocks)]
            return torch.stack([part.sum(1) for part in kept], 1)

        def exact_dot(table, x):
            return (table[indices] * x[:, None]).sum(-1)

        size = f"P={P} k={k} N={N} d={d} H={H} blocks={blocks} {dtype}"
        want = with_gradients(exact_sum, *doubled((table, weights)))
        for sparse in (False, True):
            def our_sum(table, weights):
                return gather_sum(table, indices, weights, block, blocks, sparse)

            one = with_gradients(our_sum, table, weights)
            two = with_gradients(our_sum, table, weights)
            compare(f"gather_sum {size} sparse={sparse}", one, want, TOLERANCE[dtype])
            if not all(torch.equal(a.to_dense(), b.to_dense()) for a, b in zip(one, two)):
                failed.append(f"gather_sum {size}: two runs differ")
        compare(f"gather_dot {size}",
                with_gradients(lambda table, x: gather_dot(table, indices, x), table, x),
                with_gradients(exact_dot, *doubled((table, x))), TOLERANCE[dtype])


def mixed_values():
    inverse = torch.randint(9, (50,))
    inputs = (torch.randn(50, 2, 40), torch.randn(9, 3, 2, 40), torch.rand(50, 2, 4))

    def exact(v, rows, gate):
        bank = gate[..., 1:].transpose(1, 2)[..., None] * rows[inverse]
        return gate[..., :1] * v + bank.sum(1)

    compare("mix_values",
            with_gradients(lambda v, rows, gate: mix_values(v, rows, inverse, gate), *inputs),
            with_gradients(exact, *doubled(inputs)), 5e-6)


def searches():
    """The scores must be those of the whole grid; Tucker's those of the torch path in fp64."""
    for n, k, P in SEARCHES[:3] if tiny else SEARCHES:
        for dtype in (torch.float32, torch.bfloat16):
            row, col = torch.randn(2, P, n).to(dtype)
            grid = (row.float()[:, :, None] + col.float()[:, None]).flatten(1)
            scores, *_ = product_key_topk(row, col, k)
            compare(f"product_key_topk n={n} k={k} {dtype}", [scores], [grid.topk(k).values], 0)
    for n, m in ((5, 3),) if tiny else ((5, 3), (360, 32), (528, 128)):
        u = torch.rand(2, 2)
        inputs = (torch.randn(7, 2, 2, n), torch.randn(7, 2, 2, n), torch.rand(2, 2, 2, 2))

        def tucker(row, col, core):
            return tucker_topk(row, col, u.to(row.dtype), u.to(row.dtype), core, m, m)[0]

        compare(f"tucker_topk n={n} m={m}", with_gradients(tucker, *inputs),
                with_gradients(tucker, *doubled(inputs)), 1e-5)


def head():
    sizes = ((70, 301, 0.0), (70, 301, 15.0), (4, 5003, 0.0), (3000, 50257, 15.0))
    for tokens, V, softcap in sizes[:3] if tiny else sizes:     # the last in three chunks
        targets = torch.randint(-1, V, (tokens,))
        inputs = (torch.randn(tokens, 64), torch.randn(V, 64))

        def exact(x, weight):
            z = x @ weight.T
            z = softcap * torch.tanh(z / softcap) if softcap else z
            return F.cross_entropy(z, targets, ignore_index=-1)

        compare(f"linear_cross_entropy {tokens} x {V}, softcap {softcap}",
                with_gradients(lambda x, w: linear_cross_entropy(x, w, targets, softcap), *inputs),
                with_gradients(exact, *doubled(inputs)), 1e-5)


def far_rows():
    """A table of 2.2e9 numbers."""
    if tiny:
        return
    N, d = 34_000_000, 64
    table = torch.zeros(N, d, dtype=torch.bfloat16)
    table[-100:] = torch.randn(100, d).bfloat16()
    table.requires_grad_()
    indices = torch.randint(N - 100, N, (5000, 4))
    weights = torch.randn(5000, 4)
    y = gather_sum(table, indices, weights, sparse_grad=True)
    exact = (table.detach()[indices].double() * weights[..., None]).sum(1)
    compare("far rows", [y], [exact], 1e-5)
    y.sum().backward()
    rows = table.grad.coalesce().indices()[0]
    if len(rows) != 100 or rows.min() < N - 100:
        failed.append("far rows: the gradient's rows")


def small_table():
    indices = torch.randint(999, (77, 4))
    return torch.randn(999, 64), indices, torch.randn(77, 4)


def compiled():
    table, indices, weights = small_table()

    def function(table, weights):
        scores = gather_dot(table, indices, torch.ones(77, 64))
        return gather_sum(table, indices, weights * scores).sin()

    backend = "aot_eager" if tiny else "inductor"
    one_graph = torch.compile(function, fullgraph=True, backend=backend)
    compare("one compiled graph", with_gradients(one_graph, table, weights),
            with_gradients(function, table, weights), 1e-5)


def optimizers():
    table, indices, weights = small_table()
    ours, theirs = (torch.nn.Parameter(table.clone()) for _ in range(2))
    kernels.keep_coalesced(ours)
    for p, optimizer in ((ours, kernels.LazyAdam([ours])),
                         (theirs, torch.optim.SparseAdam([theirs]))):
        for _ in range(3):
            gather_sum(p, indices, weights, sparse_grad=True).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    compare("LazyAdam", [ours], [theirs], 1e-6)

    start = [torch.randn(shape) for shape in ((24, 40), (40, 24), (24, 40))]
    moved = []
    for kind in (kernels.Muon, torch.optim.Muon):
        torch.manual_seed(7)
        matrices = [torch.nn.Parameter(matrix.clone()) for matrix in start]
        optimizer = kind(matrices, lr=0.1)
        for _ in range(3):
            for p in matrices:
                p.grad = torch.randn(p.shape)
            optimizer.step()
        moved.append([p.detach() - matrix for p, matrix in zip(matrices, start)])
    compare("Muon", *moved, 2e-2)                               # in bf16


# ---------------------------------------------------------------- fast?

def program(*command):
    """Runs python with these arguments, at most three minutes; its output is shown."""
    print("$ python", *command, flush=True)
    env = {**os.environ, "NANOMEM_KERNELS": ""}
    try:
        code = subprocess.run([sys.executable, *command], cwd=ROOT, env=env, timeout=180).returncode
    except subprocess.TimeoutExpired:
        code = "none after three minutes"
    if code != 0:
        failed.append(f"{' '.join(command)}: exit code {code}")


def speed():
    if not tiny:                                                # minutes on a CPU
        program("experiments/kernel_speed.py")


def steps():
    """Models trained, compiled, in bfloat16, each step beside its baseline's."""
    size = ["--depth=2", "--n_embd=64", "--dtype=bfloat16"] if tiny else ["--depth=12"]
    for model in MODELS:
        program("experiments/step_time.py", f"--model={model}", *size,
                f"--compile={0 if tiny else 1}", f"--rounds={2 if tiny else 12}")


PARTS = (sums, mixed_values, searches, head, far_rows, compiled, optimizers, steps, speed)


def main(argv):
    chosen = [argument for argument in argv if argument != "--tiny"]
    known = [part.__name__ for part in PARTS]
    for name in chosen:
        need(name in known, f"there is no part {name!r}: choose {', '.join(known)}")
    torch.manual_seed(0)
    if not tiny:
        torch.set_default_device("cuda")
    kernels.BACKEND = "triton"
    name = "cpu" if tiny else torch.cuda.get_device_name()
    print(f"torch {torch.__version__}, triton {kernels.triton.__version__}, {name}", flush=True)
    for part in PARTS:
        if chosen and part.__name__ not in chosen:
            continue
        start = time.time()
        try:
            part()
        except Exception:
            failed.append(part.__name__)
            traceback.print_exc()
        print(f"-- {part.__name__}: {time.time() - start:.0f} s", flush=True)
    print("failed: " + ", ".join(failed) if failed else "all right")
    return 1 if failed else 0


if __name__ == "__main__":
    guard("gpu_check.py")
    if {"-h", "--help"} & {*sys.argv[1:]}:
        sys.exit(print(__doc__))
    need(tiny or torch.cuda.is_available(), "no GPU here; --tiny rehearses on a CPU")
    sys.exit(main(sys.argv[1:]))
