"""The whole test suite: `python test_all.py` or `pytest test_all.py` (add --slow for the long ones; CI runs them)."""
import os

os.environ.setdefault("TRITON_INTERPRET", "1")    # before kernels.py is imported: the Triton kernels run on CPU tensors
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

# ================================================================ prepare_fineweb.py: data, tokenizers, configure()

# ================================================================ kernels.py
import itertools
import math
import subprocess

import kernels
from torch.utils._python_dispatch import TorchDispatchMode


@pytest.fixture(params=["torch", "triton"])
def backend(request, monkeypatch):
    if request.param == "triton" and kernels.triton is None:
        pytest.skip("no Triton here")
    monkeypatch.setattr(kernels, "BACKEND", request.param)
    return request.param


def scores_of_every_kind(n):
    """(P, n) twice: random and adversarial score vectors in all pairs."""
    x, ramp = torch.randn(n, generator=torch.Generator().manual_seed(n)), torch.arange(n, dtype=torch.float32)
    hole = torch.where(ramp % 3 == 1, -math.inf, x)
    kinds = torch.stack([x, x.flip(0), x.round(), torch.zeros(n), ramp, -ramp, -1000 * ramp, hole, 1e30 * x, 1e8 + ramp, x.sign() * 2.0**(ramp % 60)])
    pairs = list(itertools.product(range(len(kinds)), repeat=2))
    return kinds[[i for i, _ in pairs]], kinds[[j for _, j in pairs]]


def full_grid(s_row, s_col, k):
    return (s_row[:, :, None] + s_col[:, None, :]).flatten(1).topk(k).values


def test_kernels_staircase_search_equals_the_full_grid_for_all_k():
    assert [kernels.staircase(k, 999, torch.device("cpu")).shape[1] for k in (1, 4, 32, 128)] == [1, 8, 119, 645]
    for n in (3, 12, 130):
        s_row, s_col = scores_of_every_kind(n)
        for k in range(1, min(n * n, 128) + 1):
            rows, cols = kernels.product_key_search_torch(s_row, s_col, k, fused=False)
            assert torch.equal(s_row.gather(1, rows) + s_col.gather(1, cols), full_grid(s_row, s_col, k)), (n, k)
            assert ((rows * n + cols).sort(1).values.diff(dim=1) != 0).all(), "a pair was picked twice"


@pytest.mark.parametrize("n, k", [(2, 1), (5, 5), (6, 4), (3, 8)])
@pytest.mark.parametrize("fused", [False, True])
def test_kernels_product_key_topk_scores_and_gradients(backend, n, k, fused):
    s_row, s_col = (s[torch.randperm(121, generator=torch.Generator().manual_seed(k))[:13]] for s in scores_of_every_kind(n))
    s_row, s_col = s_row.clone().requires_grad_(), s_col.clone().requires_grad_()
    scores, rows, cols = kernels.product_key_topk(s_row, s_col, k, fused)
    assert torch.equal(scores, full_grid(s_row, s_col, k)) and torch.equal(scores, s_row.gather(1, rows) + s_col.gather(1, cols))
    weights = torch.randn(scores.shape)
    scores.backward(weights)
    for s, picks in ((s_row, rows), (s_col, cols)):
        assert torch.allclose(s.grad, torch.zeros(s.shape).scatter_add(1, picks, weights), atol=1e-5)
    empty = kernels.product_key_topk(s_row[:0], s_col[:0], k, fused)
    assert [t.shape for t in empty] == [(0, k)] * 3


def test_kernels_product_key_topk_bf16_and_choice_of_path(monkeypatch):
    s_row, s_col = torch.randn(2, 4, 6).bfloat16()
    for fused in (None, False, True):
        scores, rows, cols = kernels.product_key_topk(s_row, s_col, 7, fused)
        assert scores.dtype == torch.float32 and torch.equal(scores, full_grid(s_row.float(), s_col.float(), 7))
    seen = []
    monkeypatch.setattr(kernels, "product_key_search", lambda a, b, k, fused: seen.append(fused) or (torch.zeros(len(a), k).long(),) * 2)
    for P in (1, kernels.FUSED_BELOW):
        kernels.product_key_topk(torch.zeros(P, 4), torch.zeros(P, 4), 2)
    assert seen == [True, False]


def tucker_inputs(P=3, R=2, r=2, n=7, H=2, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    s_row, s_col = (torch.randn(P, R, r, n, generator=g, dtype=dtype) for _ in range(2))
    core = torch.rand(H, R, r, r, generator=g, dtype=dtype)
    U, _, V = torch.linalg.svd(core.sum(0))
    return s_row, s_col, U[:, :, 0], V[:, 0], core


@pytest.mark.parametrize("m_key, m", [(1, 1), (4, 3), (5, 16), (7, 7)])
def test_kernels_tucker_topk_equals_brute_force(backend, m_key, m):
    s_row, s_col, u, v, core = tucker_inputs()
    i = torch.einsum("rx,prxn->prn", u, s_row).topk(m_key).indices
    j = torch.einsum("rx,prxn->prn", v, s_col).topk(m_key).indices
    full = torch.einsum("prxi,hrxy,pryj->prijh", s_row, core, s_col)                                    # every pair of the n x n grid
    dtype = torch.float32 if backend == "triton" else torch.float64
    scores, indices = kernels.tucker_topk(*(t.to(dtype) for t in (s_row, s_col, u, v, core)), m_key, m)
    assert scores.shape == (3, 2, m, 2) and indices.shape == (3, 2, m)
    tolerance = dict(rtol=1e-4, atol=1e-5) if backend == "triton" else dict(rtol=1e-10, atol=1e-12)
    for p, r in itertools.product(range(3), range(2)):
        grid = full[p, r][i[p, r]][:, j[p, r]].sum(-1).flatten()
        torch.testing.assert_close(scores[p, r].sum(-1).double(), grid.topk(m).values, **tolerance)    # ranked by the sum over cores
        torch.testing.assert_close(scores[p, r].double(), full[p, r].flatten(0, 1)[indices[p, r]], **tolerance)
        assert len(set(indices[p, r].tolist())) == m


def test_kernels_tucker_topk_gradients():
    s_row, s_col, u, v, core = (t.requires_grad_() for t in tucker_inputs())
    assert torch.autograd.gradcheck(lambda a, b, c: kernels.tucker_topk(a, b, u, v, c, 4, 5)[0], (s_row, s_col, core))
    kernels.tucker_topk(s_row, s_col, u, v, core, 4, 5)[0].sum().backward()
    assert u.grad is None and v.grad is None and core.grad.abs().min() > 0
    positive = [t.detach().abs() for t in (s_row, s_col, u, v)]                                         # rank-1 core: the prefilter is exact
    rank_1 = torch.einsum("rx,ry->rxy", positive[2], positive[3])[None]
    scores, _ = kernels.tucker_topk(*positive, rank_1, 4, 4)
    grid = torch.einsum("prxi,rxy,pryj->prij", positive[0], rank_1[0], positive[1]).flatten(2)
    torch.testing.assert_close(scores[..., 0], grid.topk(4).values)


# What the three sums must survive, as (N, d, P, k, H, n_blocks). C = 32 positions make a window, so "hot" and "runs" cross several.
SUMS = {
    "plain": (20, 6, 10, 3, 1, 1), "k=1": (9, 4, 7, 1, 1, 1), "k=N": (6, 4, 5, 6, 1, 1), "odd d": (7, 3, 9, 4, 1, 1), "P=0": (5, 8, 0, 3, 2, 1),
    "hot": (1, 4, 60, 4, 1, 1), "runs": (3, 8, 50, 5, 1, 1), "one window": (2, 4, 16, 2, 1, 1), "slices": (9, 6, 7, 4, 3, 1), "blocks": (5, 3, 8, 4, 1, 3),
    "blocks, slices": (4, 6, 9, 4, 2, 2), "wide": (12, 300, 6, 3, 1, 1),
}


def sum_inputs(case, dtype=torch.float64, int_dtype=torch.int64):
    N, d, P, k, H, n_blocks = SUMS[case]
    g = torch.Generator().manual_seed(1)
    table, weights, x = (torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype) for shape in ((N, d), (P, k, H), (P, d)))
    indices, blocks = torch.randint(N, (P, k), generator=g), torch.randint(n_blocks, (P, k), generator=g)
    if case == "k=N":
        indices = torch.stack([torch.randperm(N, generator=g) for _ in range(P)])
    if case == "runs":                                                                                  # runs that end exactly at a window's edge, and beyond
        indices = torch.tensor([0] * 64 + [1] * 33 + [2] * 153).view(P, k)
    return table, indices.to(int_dtype), weights, blocks.to(int_dtype) if n_blocks > 1 else None, n_blocks, x


def slow_gather_sum(table, indices, weights, blocks, n_blocks):
    H, d = weights.shape[2], table.shape[1]
    pairs = table[indices] * weights.repeat_interleave(d // H, 2)                                       # (P, k, d)
    if blocks is None:
        return pairs.sum(1)
    return torch.stack([(pairs * (blocks == e)[..., None]).sum(1) for e in range(n_blocks)], 1)


def slow_gather_dot(table, indices, x):
    return (table[indices] * x[:, None]).sum(-1)


def forward_and_gradients(function, *inputs, seed=2):
    """[output, gradients...] for a fixed random output gradient, sparse ones made dense, all in float64."""
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    y = function(*inputs)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(y.dtype))
    return [t.detach().to_dense().double() for t in (y, *(t.grad for t in inputs))]


def close(ours, reference, relative):
    assert len(ours) == len(reference)
    for a, b in zip(ours, reference):
        assert a.shape == b.shape and (a - b).norm() <= relative * b.norm() + 1e-30, (a - b).norm() / b.norm()


@pytest.mark.parametrize("case", SUMS)
@pytest.mark.parametrize("dtype, relative", [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)], ids=["fp32", "bf16"])
def test_kernels_sums_equal_float64(backend, case, dtype, relative):
    table, indices, weights, blocks, n_blocks, x = sum_inputs(case, dtype, torch.int32 if dtype == torch.bfloat16 else torch.int64)
    exact = [t.double() for t in (table, weights, x)]
    expected = forward_and_gradients(lambda t, w: slow_gather_sum(t, indices, w, blocks, n_blocks), *exact[:2])
    for sparse in (False, True):
        ours = forward_and_gradients(lambda t, w: kernels.gather_sum(t, indices, w, blocks, n_blocks, sparse), table, weights)
        close(ours, expected, relative)
    if blocks is None:
        expected = forward_and_gradients(lambda t, x: slow_gather_dot(t, indices, x), exact[0], exact[2])
        for sparse in (False, True):
            close(forward_and_gradients(lambda t, x: kernels.gather_dot(t, indices, x, sparse), table, x), expected, relative)


@pytest.mark.parametrize("case", [c for c in SUMS if c not in ("hot", "runs", "wide")])
def test_kernels_sums_gradcheck(case):
    table, indices, weights, blocks, n_blocks, x = sum_inputs(case)
    table, weights, x = (t.requires_grad_() for t in (table, weights, x))
    order = kernels.sort_indices(indices)
    assert torch.autograd.gradcheck(lambda t, w: kernels.gather_sum(t, indices, w, blocks, n_blocks, order=order), (table, weights))
    assert torch.autograd.gradcheck(lambda t, x: kernels.gather_dot(t, indices, x, order=order), (table, x))


def test_kernels_sums_take_non_contiguous_inputs_mixed_dtypes_and_frozen_tables(backend):
    table, indices, weights, _, _, x = sum_inputs("slices", torch.float32)
    expected = forward_and_gradients(lambda t, w: slow_gather_sum(t, indices, w, None, 1), table.double(), weights.double())
    strided = [t.permute(*range(t.dim())[::-1]).contiguous().permute(*range(t.dim())[::-1]) for t in (table, weights, indices)]
    assert not any(t.is_contiguous() for t in strided)
    close(forward_and_gradients(lambda t, w: kernels.gather_sum(t, strided[2], w), *strided[:2]), expected, 2e-6)
    wide = torch.cat((indices, indices), 1)[:, ::2]                                                     # a strided view
    close([kernels.gather_dot(table, wide, x).double()], [slow_gather_dot(table.double(), wide, x.double())], 2e-6)
    blocks = indices.T.contiguous().T % 3
    close([kernels.gather_sum(table, indices, weights, blocks, 3).double()], [slow_gather_sum(table.double(), indices, weights.double(), blocks, 3)], 2e-6)
    y = kernels.gather_sum(table.bfloat16(), indices, weights)
    assert y.dtype == torch.float32
    close([y.double()], [slow_gather_sum(table.bfloat16().double(), indices, weights.double(), None, 1)], 2e-6)
    assert kernels.gather_sum(table, indices, weights.bfloat16()).dtype == torch.bfloat16
    y = kernels.gather_sum(table, indices, weights.requires_grad_())                                    # only what is asked for is computed
    y.sum().backward()
    assert table.grad is None and weights.grad is not None


def test_kernels_a_row_hit_by_every_query_is_split_and_merged(backend):
    indices, grad = torch.ones(300, 4, dtype=torch.long), torch.randn(300, 3, generator=torch.Generator().manual_seed(0))
    indices[:10], indices[-2:] = 0, 2                                                                   # 38 windows; 32 are merged at a time
    _, sums = kernels.row_sums(grad, indices, torch.ones(300, 4, 1), None, 1, None, 4, torch.float32, False)
    torch.testing.assert_close(sums, 4 * torch.stack([grad[:10].sum(0), grad[10:-2].sum(0), grad[-2:].sum(0), torch.zeros(3)]), rtol=1e-5, atol=1e-5)


def test_kernels_dots_with_a_table_beyond_the_cache(monkeypatch):
    monkeypatch.setattr(kernels, "BACKEND", "torch")
    g = torch.Generator().manual_seed(0)
    table, indices, blocks = torch.randn(50, 6, generator=g), torch.randint(50, (4100, 5), generator=g), torch.randint(2, (4100, 5), generator=g)
    for rest in ((torch.randn(8200, 6, generator=g), blocks, 2, 3, torch.float32), (torch.randn(4100, 6, generator=g), None, 1, 1, torch.float32)):
        monkeypatch.setattr(kernels, "OUT_OF_CACHE", 2**22)
        at_once = kernels.gather_dot_torch(table, indices, *rest)
        monkeypatch.setattr(kernels, "OUT_OF_CACHE", 0)                                                 # in chunks, rows fetched first
        torch.testing.assert_close(kernels.gather_dot_torch(table, indices, *rest), at_once)


@pytest.mark.parametrize("sparse", [False, True])
def test_kernels_table_gradient_is_bitwise_reproducible(backend, sparse):
    table, indices, weights, *_, x = sum_inputs("runs", torch.float32)
    first, second = (forward_and_gradients(lambda t, w: kernels.gather_sum(t, indices, w, sparse_grad=sparse), table, weights) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    order = kernels.sort_indices(indices)                                                               # one sort for both tables: the same bits
    shared = forward_and_gradients(lambda t, w: kernels.gather_sum(t, indices, w, sparse_grad=sparse, order=order), table, weights)
    assert all(torch.equal(a, b) for a, b in zip(first, shared))


def mix_inputs(dtype=torch.float64, T=9, H=2, d_h=5, M=3, U=4, gate_v=True):
    g = torch.Generator().manual_seed(0)
    v, rows, gate = (torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype) for shape in ((T, H, d_h), (U, M, H, d_h), (T, H, M + gate_v)))
    return v, rows, torch.randint(max(U - 1, 1), (T,), generator=g), gate                               # the last row is padding: never used


def slow_mix(v, rows, inverse, gate, gate_v=True):
    mixed = torch.einsum("tmhd,thm->thd", rows[inverse], gate[..., int(gate_v):])
    return mixed + (v * gate[..., :1] if gate_v else v)


@pytest.mark.parametrize("gate_v", [True, False])
@pytest.mark.parametrize("T", [12, 0])                                                              # 36 hits: more than a window
def test_kernels_mix_values_is_move_eq_4(backend, gate_v, T):
    v, rows, inverse, gate = mix_inputs(torch.float32, T=T, gate_v=gate_v)
    exact = forward_and_gradients(lambda v, r, g: slow_mix(v, r, inverse, g, gate_v), v.double(), rows.double(), gate.double())
    order = kernels.mix_order(inverse, 3)
    for bank in (rows, rows.flatten(2)):
        ours = forward_and_gradients(lambda v, r, g: kernels.mix_values(v, r, inverse, g, gate_v, order), v, bank, gate)
        ours[2] = ours[2].view(rows.shape)
        close(ours, exact, 2e-6)
    wide = torch.cat((v, v), 2)                                                                         # V as a slice of a wider projection
    ours = forward_and_gradients(lambda w, r, g: kernels.mix_values(w[..., :5], r, inverse, g, gate_v), wide, rows, gate)
    close(ours[:1] + ours[2:], exact[:1] + exact[2:], 2e-6)
    wide = torch.cat((v.flatten(1), v.flatten(1)), 1)
    ours = forward_and_gradients(lambda w, r, g: kernels.mix_values(w[:, :10].view(T, 2, 5), r, inverse, g, gate_v), wide, rows, gate)
    close(ours[:1] + ours[2:], exact[:1] + exact[2:], 2e-6)
    mixed = forward_and_gradients(lambda v, r, g: kernels.mix_values(v, r, inverse, g, gate_v), v.bfloat16(), rows, gate)
    close(mixed, exact, 1e-2)                                                                           # as under autocast: V in bf16, the rest in fp32
    v, rows, inverse, gate = mix_inputs(T=min(T, 5), gate_v=gate_v)
    assert torch.autograd.gradcheck(lambda v, r, g: kernels.mix_values(v, r, inverse, g, gate_v), [t.requires_grad_() for t in (v, rows, gate)])


def test_kernels_bank_gradient_sums_over_layers_and_reaches_the_table_once():
    v, _, _, gate = mix_inputs(torch.float32)
    tokens, g = torch.tensor([7, 3, 3, 9, 0, 7, 7, 3, 11]), torch.Generator().manual_seed(3)
    bank = torch.randn(20, 3, 2, 5, generator=g)

    def two_layers(bank, sparse):
        rows, inverse = tokens.unique(return_inverse=True)
        bank_rows = kernels.gather_rows(bank, rows, sparse)
        return kernels.mix_values(kernels.mix_values(v, bank_rows, inverse, gate), bank_rows, inverse, gate.flip(0))

    expected = forward_and_gradients(lambda b: slow_mix(slow_mix(v, b, tokens, gate), b, tokens, gate.flip(0)), bank)
    for sparse in (False, True):
        close(forward_and_gradients(lambda b: two_layers(b, sparse), bank), expected, 2e-6)
    bank.requires_grad_()
    two_layers(bank, True).sum().backward()
    assert bank.grad.coalesce().indices()[0].tolist() == [0, 3, 7, 9, 11]


class LargestAllocation(TorchDispatchMode):
    """The number of elements of the largest tensor that any operator returns or writes, `own` ones (parameters, optimizer state) left out."""
    largest = 0

    def __init__(self, own):
        super().__init__()
        self.own = {t.untyped_storage().data_ptr() for t in own}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(result):
            if isinstance(t, torch.Tensor):
                t = t._values() if t.is_sparse else t
                if t.untyped_storage().data_ptr() not in self.own:
                    self.largest = max(self.largest, t.untyped_storage().nbytes() // t.element_size())
        return result


def train_sparse(N, backend_sparse=True, steps=3, micro_batches=2):
    """A small memory layer trained with SparseAdam: micro-batches, clipping, a shared table. -> table, largest temporary of a later step."""
    g = torch.Generator().manual_seed(0)
    table = torch.nn.Parameter(torch.randn(40, 8, generator=g).repeat(N // 40, 1))
    kernels.keep_coalesced(table)
    optimizer = torch.optim.SparseAdam([table], lr=0.01)
    for step in range(steps):
        own = [table, *(s for state in optimizer.state.values() for s in state.values() if isinstance(s, torch.Tensor))]
        with LargestAllocation(own) as seen:
            for _ in range(micro_batches):
                indices, weights, x = torch.randint(40, (6, 4), generator=g), torch.randn(6, 4, generator=g), torch.randn(6, 8, generator=g)
                y = kernels.gather_sum(table, indices, weights * kernels.gather_dot(table, indices, x, sparse_grad=True), sparse_grad=True)
                (y - x).square().mean().backward()
            assert table.grad.is_sparse and table.grad.is_coalesced() and len(table.grad.values()) <= 40
            values = table.grad.values()
            values.mul_((1.0 / (values.norm() + 1e-6)).clamp(max=1.0))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return table.detach(), seen.largest


def test_kernels_row_sparse_training_allocates_nothing_of_the_tables_size(backend):
    small, _ = train_sparse(N=40)
    table, largest = train_sparse(N=40_000)
    assert torch.equal(table[:40], small) and largest < 4000                                            # against 320,000 in the table
    before = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(table[:40], before) and torch.equal(table[40:80], before), "only touched rows move"


def test_kernels_row_sparse_step_equals_dense_adam_on_the_touched_rows():
    table, indices, weights, *_ = sum_inputs("plain", torch.float32)
    results = []
    for sparse, optimizer in ((True, torch.optim.SparseAdam), (False, torch.optim.Adam)):
        p = torch.nn.Parameter(table.clone())
        kernels.keep_coalesced(p) if sparse else None
        step = optimizer([p], lr=0.1)
        for _ in range(2):                                                                              # two micro-batches in one step
            kernels.gather_sum(p, indices, weights, sparse_grad=sparse).square().sum().backward()
        step.step()
        results.append(p.detach())
    torch.testing.assert_close(*results, rtol=0, atol=1e-4)                                              # of a step of 0.1; the two place eps differently


def test_kernels_keep_coalesced_restores_the_mark_and_adds_equal_rows(backend):
    table, indices, weights, *_ = sum_inputs("plain", torch.float32)
    p, q = torch.nn.Parameter(table.clone()), torch.nn.Parameter(table.clone())
    kernels.keep_coalesced(p)
    for micro_batch in range(3):
        kernels.gather_sum(p, indices, weights, sparse_grad=True).square().sum().backward()
        kernels.gather_sum(q, indices, weights).square().sum().backward()
        assert p.grad.is_coalesced() and p.grad.indices()[0].tolist() == indices.unique().tolist()
        torch.testing.assert_close(p.grad.to_dense(), q.grad)
    p.grad = None
    torch.nn.functional.embedding(torch.tensor([5, 2, 5]), p, sparse=True).sum().backward()              # leaves equal rows
    assert p.grad.is_coalesced() and p.grad.indices()[0].tolist() == [2, 5] and p.grad.values()[:, 0].tolist() == [1, 2]


def operator_calls():
    table, indices, weights, blocks, n_blocks, x = sum_inputs("blocks, slices", torch.float32)
    order, grad = kernels.sort_indices(indices), torch.randn(len(x) * n_blocks, 6)
    table, weights = table.requires_grad_(), weights.requires_grad_()
    s = torch.randn(4, 6)
    t_row, t_col, u, v, core = tucker_inputs(dtype=torch.float32)
    yield kernels.product_key_search, (s, s.flip(1), 3, False)
    yield kernels.tucker_search, (t_row, t_col, u.contiguous(), v.contiguous(), core.sum(0), 4, 3)
    yield kernels.scatter_scores, (torch.randn(4, 3), torch.randint(6, (4, 3)), 6)
    yield kernels.pick, (torch.randn(4, 6, requires_grad=True), torch.randint(6, (4, 3)))
    yield kernels.gather_rows_op, (table, torch.tensor([0, 2]), False)
    yield kernels.row_sums_dense, (grad, indices, weights.detach(), blocks, n_blocks, order, 4, torch.float32)
    yield kernels.gather_sum_op, (table, indices, weights, blocks, n_blocks, order, False, torch.float32)
    yield kernels.gather_sum_op, (table, indices, weights, None, 1, None, False, torch.bfloat16, x.requires_grad_(), weights[:, 0])
    yield kernels.gather_dot_op, (table, indices, grad.requires_grad_(), blocks, n_blocks, 2, None, False, torch.float32)


@pytest.mark.parametrize("path", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
def test_kernels_opcheck(path, monkeypatch):
    monkeypatch.setattr(kernels, "BACKEND", path)
    for op, args in operator_calls():
        torch.library.opcheck(op, args)


def every_operation(table, s, x, v, gate, core):
    """All five operations in one function."""
    scores, rows, cols = kernels.product_key_topk(s, s.flip(1), 3)
    indices = rows * s.shape[1] + cols
    order = kernels.sort_indices(indices)
    y = kernels.gather_sum(table, indices, scores.softmax(1) * kernels.gather_dot(table, indices, x, order=order), order=order)
    t = torch.stack((s, s * s), 1)[:, None]                                                             # (P, 1, 2, n)
    ones = torch.ones(1, 2)
    raw, picks = kernels.tucker_topk(t, t.flip(3), ones, ones, core, 3, 4)
    y = y + kernels.gather_sum(table, picks[:, 0], raw[:, 0])
    mixed = kernels.mix_values(v, kernels.gather_rows(table, torch.arange(0, 20, 2)).view(10, 1, 2, -1), indices[:, 0] % 10, gate)
    return y.sum() + mixed.square().sum()


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_kernels_compile_without_a_graph_break(backend, compiler):
    g = torch.Generator().manual_seed(0)
    inputs = [torch.randn(*shape, generator=g) for shape in ((25, 8), (6, 5), (6, 8), (6, 2, 4), (6, 2, 2), (2, 1, 2, 2))]
    expected = forward_and_gradients(every_operation, *inputs)
    torch._dynamo.reset()
    compiled = torch.compile(every_operation, fullgraph=True, backend=compiler)
    close(forward_and_gradients(compiled, *inputs), expected, 2e-6)


def test_kernels_row_sparse_gradients_are_one_graph_break():
    torch._dynamo.reset()
    table, indices, weights, *_ = sum_inputs("plain", torch.float32)

    def layer(table, weights):
        return kernels.gather_sum(table, indices, weights.tanh(), sparse_grad=True).tanh()

    graphs = []
    compiled = torch.compile(layer, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    close(forward_and_gradients(compiled, table, weights), forward_and_gradients(layer, table, weights), 1e-6)
    assert len(graphs) == 2                                                                             # before the operation and after it


@pytest.mark.parametrize("call, error", [
    (lambda t, i, w, x: kernels.gather_sum(t[0], i, w), "table must be .N, d. float"),
    (lambda t, i, w, x: kernels.gather_sum(t, i.float(), w), "indices must be .* int32 or int64"),
    (lambda t, i, w, x: kernels.gather_sum(t, i[0], w), "indices must be .P, k."),
    (lambda t, i, w, x: kernels.gather_sum(t, i[:, :0], w[:, :0]), "with k > 0"),
    (lambda t, i, w, x: kernels.gather_sum(t, i, w[:, :2]), "weights must be"),
    (lambda t, i, w, x: kernels.gather_sum(t, i, w.expand(-1, -1, 4)), "H = 4 does not divide d = 6"),
    (lambda t, i, w, x: kernels.gather_sum(t, i, w, i[:2], 2), "blocks must be"),
    (lambda t, i, w, x: kernels.gather_sum(t, i, w, None, 2), "n_blocks goes with blocks"),
    (lambda t, i, w, x: kernels.gather_sum(t, i, w, order=i), "order must be"),
    (lambda t, i, w, x: kernels.gather_dot(t, i, x[:, :3]), "x must be .P, d. = .10, 6."),
    (lambda t, i, w, x: kernels.product_key_topk(x, x[:3], 2), "s_row and s_col must both"),
    (lambda t, i, w, x: kernels.product_key_topk(x, x, 37), "k must lie in"),
    (lambda t, i, w, x: kernels.product_key_topk(x.repeat(1, 22), x.repeat(1, 22), 2, True), "fused=True .* n <= 128"),
    (lambda t, i, w, x: kernels.tucker_topk(*tucker_inputs(), 8, 2), "m_key must lie in"),
    (lambda t, i, w, x: kernels.tucker_topk(*tucker_inputs(), 2, 5), "m must lie in"),
    (lambda t, i, w, x: kernels.tucker_topk(*tucker_inputs()[:2], x, x, x, 2, 2), "u and v must be .R, r."),
    (lambda t, i, w, x: kernels.gather_rows(t, i), "rows must be"),
    (lambda t, i, w, x: kernels.mix_values(x[:, None], t[:, None, None], i[:, 0], w), "gate must be"),
    (lambda t, i, w, x: kernels.mix_values(x[:, None], t[:, None, :5], i[:, 0], w.mT), "bank_rows must be"),
    (lambda t, i, w, x: kernels.mix_values(x[:, None], t[:, None].expand(-1, 2, -1), i, w.mT), "inverse must be"),
])
def test_kernels_argument_errors_name_the_argument(call, error):
    table, indices, weights, _, _, x = sum_inputs("plain", torch.float32)
    with pytest.raises(ValueError, match=error):
        call(table, indices, weights, x)


def test_kernels_debug_mode_checks_index_ranges(monkeypatch):
    monkeypatch.setattr(kernels, "DEBUG", True)
    table, indices, weights, *_ = sum_inputs("plain", torch.float32)
    kernels.gather_sum(table, indices, weights)
    for bad in (-1, 20):
        indices[2, 1] = bad
        with pytest.raises(ValueError, match=rf"indices must lie in \[0, 20\), found {bad}"):
            kernels.gather_sum(table, indices, weights)
    with pytest.raises(ValueError, match="ascending and distinct"):
        kernels.gather_rows(table, torch.tensor([3, 3]))


def test_kernels_dispatch_rule(monkeypatch):
    t = torch.zeros(1)
    monkeypatch.setattr(kernels, "BACKEND", "")
    assert not kernels.use_triton(t)                                                                    # CPU tensors take the torch path
    monkeypatch.setattr(kernels, "BACKEND", "triton")
    assert kernels.use_triton(t, None) and not kernels.use_triton(t, t.double())                        # fp64 is the reference's
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(RuntimeError, match="needs TRITON_INTERPRET=1"):
        kernels.use_triton(t)
    monkeypatch.setattr(kernels, "triton", None)
    with pytest.raises(RuntimeError, match="pip install triton"):
        kernels.use_triton(t)
    monkeypatch.setattr(kernels, "BACKEND", "cuda")
    with pytest.raises(ValueError, match="NANOMEM_KERNELS='cuda'"):
        kernels.use_triton(t)


COMPILE_FOR_HOPPER = """
import re, torch, triton, kernels
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.int64: "*i64"}
compiled = set()

def compile_only(kernel, grid):
    def launch(*args, **options):
        fixed = {(i,): a for i, (a, p) in enumerate(zip(args, kernel.params)) if p.is_constexpr or a is None}
        kinds = ["constexpr" if (i,) in fixed else TYPES[a.dtype] if isinstance(a, torch.Tensor) else "i32" for i, a in enumerate(args)]
        source = ASTSource(kernel, dict(zip(kernel.arg_names, kinds)), fixed)
        ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
        assert not re.search(r"\\b(atom|red)\\.", ptx), "an atomic operation"
        compiled.add(kernel.__name__)
    return launch

triton.runtime.jit.JITFunction.__getitem__ = compile_only
kernels.use_triton = lambda *tensors: True
x, w, s, i = torch.randn(9, 96), torch.randn(9, 4, 2), torch.randn(9, 20), torch.zeros(9, 4, dtype=torch.long)
for table in (torch.randn(30, 96), torch.randn(30, 96).bfloat16()):
    kernels.gather_sum(table.requires_grad_(), i, w.requires_grad_()).sum().backward()
    kernels.gather_sum(table, i.int(), w, i, 3).sum().backward()
    kernels.mix_values(x.view(9, 2, 48), table.view(10, 3, 96), i[:, 0], w.mT).sum().backward()
for d in (3, 64, 300):
    kernels.gather_sum(torch.randn(5, d, requires_grad=True), i[:, :1], w[:, :1, 0]).sum().backward()
for n, k, fused in ((20, 5, True), (64, 4, False), (20, 25, False), (360, 32, False), (1138, 80, False), (3, 1, False)):
    kernels.product_key_search(torch.randn(9, n), torch.randn(9, n), k, fused)
kernels.scatter_scores(s, torch.zeros(9, 20, dtype=torch.long), 40)
for n, m in ((20, 5), (360, 32)):
    t = torch.randn(3, 2, 2, n)
    kernels.tucker_search(t, t, torch.ones(2, 2), torch.ones(2, 2), torch.ones(2, 2, 2), m, m)
print(*sorted(compiled))
"""


@pytest.mark.slow
@pytest.mark.skipif(kernels.triton is None, reason="no Triton here")
def test_kernels_compile_for_hopper_without_a_gpu_and_without_atomics():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE_FOR_HOPPER], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["gather_dot_kernel", "gather_sum_kernel", "merge_kernel", "product_key_kernel", "row_sums_kernel",
                                   "scatter_scores_kernel", "tucker_kernel"]


# ================================================================ every model: the generic block

# ================================================================ model_move.py: MoVE

# ================================================================ sample.py

# ================================================================ train.py

# ================================================================ experiments/


if __name__ == "__main__":
    sys.exit(pytest.main([str(ROOT / "test_all.py"), "-q", "-x", *sys.argv[1:]]))
