"""The operations of sparse memories and the head's loss: torch for every device, Triton for CUDA.

A memory layer is a search and a sum: a search finds k of the N rows of a table for each of P
queries, a sum reads these rows. Here is what each operation computes, in torch that is plain, slow
and large.

product_key_topk(s_row, s_col, k)            MIDUS, PKM, Memory+, PEER: the best of the n x n pairs
    (s_row[:, :, None] + s_col[:, None, :]).flatten(1).topk(k)
tucker_topk(s_row, s_col, u, v, core, ..)    UltraMem, UltraMemV2: the best cells, sifted by u and v
    einsum("prxi,hrxy,pryj->prijh", s_row, core, s_col), the largest sums over h
gather_sum(table, indices, weights)          every product-key memory
    (weights[..., None] * table[indices]).sum(1)
gather_dot(table, indices, x)                PEER, UltraMemV2's pre-values
    (table[indices] * x[:, None]).sum(-1)
gather_rows(table, rows)                     MoVE, hierarchical memories: read once for all layers
    table[rows]
mix_values(v, bank_rows, inverse, gate)      MoVE
    gate[..., :1] * v + einsum("tmhd,thm->thd", bank_rows[inverse], gate[..., 1:])
linear_cross_entropy(x, weight, targets)     every model's loss
    F.cross_entropy(F.linear(x, weight), targets, ignore_index=-1)
attend(q, k, v)                              every model's attention, heads after positions
    F.scaled_dot_product_attention(q, k, v, is_causal=True), for as many queries as keys

gather_sum, gather_dot and their gradients are sums over the same P*k triples: query p, slot u, row
j = indices[p,u]. They differ only in where the result goes, so three sums are all there is:

    to the queries   y[p]   = sum_u w[p,u] table[j]
    to the pairs     s[p,u] = <table[j], x[p]>
    to the rows      G[j]   = sum of w[p,u] g[p] over (p,u) -> j

The first is gather_sum and gather_dot's gradient for x, the second gather_dot and gather_sum's
gradient for the weights, the third the gradient of both for the table (MIDUS, Appendix G.3). The
third is the hard one, since many queries may hit one row. The P*k indices are sorted, which makes a
row's hits one run, and each row is written once: no atomics (the gradient is bitwise the same in
every run), no (P*k, d) tensor, and with sparse_grad=True nothing of the table's size.

Sums run in fp32 whatever the inputs are (in fp64 if what is summed is). use_triton() is the one
place of dispatch. NANOMEM_KERNELS=torch or =triton forces a path; with TRITON_INTERPRET=1 beside
=triton kernels run on CPU tensors, too. NANOMEM_DEBUG=1 checks the range of indices.
experiments/kernel_speed.py times most operations against the obvious torch way.
"""
import ctypes
import functools
import math
import os
import platform
import time
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl
    jit = triton.jit
except ImportError:    # no Triton on this system: the kernels below are never launched
    class tl:
        constexpr = int
    triton = None

    def jit(kernel):
        return kernel

BACKEND = os.environ.get("NANOMEM_KERNELS", "")    # "" | "torch" | "triton"
DEBUG = os.environ.get("NANOMEM_DEBUG", "") not in ("", "0")


def use_triton(*tensors: Tensor) -> bool:
    """The dispatch rule. fp64 always takes the torch path, which is the reference."""
    if BACKEND not in ("", "torch", "triton"):
        raise ValueError(f"NANOMEM_KERNELS={BACKEND!r}: use torch or triton, or leave it unset")
    if BACKEND == "torch" or acc_dtype(*tensors) == torch.float64:
        return False
    if BACKEND == "":
        return triton is not None and tensors[0].is_cuda
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if triton is None or not (tensors[0].is_cuda or interpreted):
        raise ValueError("NANOMEM_KERNELS=triton needs Triton and a GPU, or TRITON_INTERPRET=1 "
                         "set before kernels.py is imported")
    return True


def acc_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype in which sums of these tensors run."""
    double = any(t.dtype == torch.float64 for t in tensors)
    return torch.float64 if double else torch.float32


def operator(outputs):
    """Make a function an operator, opaque to torch.compile. `outputs` takes the same arguments and
    returns empty tensors of the results' shapes; some functions also call it to allocate.
    """
    def register(function):
        op = torch.library.custom_op(f"nanomem::{function.__name__}", function, mutates_args=())
        op.register_fake(outputs)
        return op
    return register


def only_once(name):
    """For the backward pass of `name`: refuse a second derivative, which would be wrong without a
    word, since what the forward pass has saved would count as constant."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():    # create_graph=True
        raise RuntimeError(f"{name} has no second derivative")


def check(name, t, shape, kind="float"):
    """shape: the sizes that t must have, or a letter where any size will do."""
    fits = t.dim() == len(shape)
    for size, wanted in zip(t.shape, shape):
        fits = fits and (isinstance(wanted, str) or size == wanted)
    if kind == "float":
        fits = fits and t.is_floating_point()
    else:
        fits = fits and t.dtype in (torch.int32, torch.int64)
    if not fits:
        sizes = ", ".join(str(wanted) for wanted in shape)
        raise ValueError(f"{name} must be ({sizes}) {kind}, got {tuple(t.shape)} {t.dtype}")


def check_indices(name, t, shape, below):
    check(name, t, shape, "int32 or int64")
    if DEBUG and t.numel():    # costs a synchronisation
        low, high = t.aminmax()
        if low < 0 or high >= below:
            raise ValueError(f"{name} must lie in [0, {below}), found {int(low)} to {int(high)}")


# ================================================================ search

def product_key_topk(s_row: Tensor, s_col: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest s_row[p,i] + s_col[p,j] of the n x n grid, in two stages (MIDUS eqs. 14, 15).

    s_row, s_col (P, n) float, 1 <= k <= n*n -> scores (P, k) fp32 (fp64 for fp64), descending; rows
    i and columns j, (P, k) int64: row i*n + j of the table. Gradients flow through the scores into
    s_row and s_col. Of equal scores any may be picked; NaN, and +inf together with -inf, are
    outside the promise.
    """
    check("s_row", s_row, ("P", "n"))
    check("s_col", s_col, s_row.shape)
    n = s_row.shape[1]
    if n >= 2**16 or not 1 <= k <= n * n:
        raise ValueError(f"k must lie in [1, n*n] and n below 65,536, got k = {k}, n = {n}")
    rows, cols = product_key_search(s_row, s_col, k)
    return pick(s_row, rows) + pick(s_col, cols), rows, cols


def tucker_topk(s_row: Tensor, s_col: Tensor, u: Tensor, v: Tensor, core: Tensor, m_key: int,
                m: int) -> tuple[Tensor, Tensor]:
    """The m best of Tucker-decomposed scores (UltraMemV2 eqs. 6, 7, 11): a rank-1 prefilter, then
    the full score.

    s_row, s_col (P, R, r, n), n < 65536: scores of R retrieval heads and r Tucker ranks; core (H,
    R, r, r): H cores, one score each; u, v (R, r): leading singular vectors of core.sum(0) -> raw
    scores (P, R, m, H) fp32 (fp64 for fp64) and indices i*n + j (P, R, m) int64, in descending
    order of the sum over H. No scores may be NaN.
        stage 1   the m_key rows i with the largest sum_x u[x] s_row[x,i], columns with v and s_col
        stage 2   score[h,i,j] = sum_xy s_row[x,i] core[h,x,y] s_col[y,j] on that grid;
                  the m largest by the sum over h
    Gradients flow through the returned scores into s_row, s_col and core; none through the choice
    of indices, so none into u and v.
    """
    check("s_row", s_row, ("P", "R", "r", "n"))
    check("s_col", s_col, s_row.shape)
    P, R, r, n = s_row.shape
    check("u", u, (R, r))
    check("v", v, (R, r))
    check("core", core, ("H", R, r, r))
    if not 1 <= m_key <= n < 2**16 or not 1 <= m <= m_key**2:
        raise ValueError(f"m_key must lie in [1, n], m in [1, m_key^2] and n below 65536, "
                         f"got m_key = {m_key}, m = {m}, n = {n}")
    with torch.no_grad():
        sum_of_cores = core.sum(0, dtype=acc_dtype(core))
        rows, cols = tucker_search(s_row, s_col, u, v, sum_of_cores, m_key, m)
    row = pick_ranks(s_row, rows)
    col = pick_ranks(s_col, cols)
    right = core_times(core.to(row.dtype), col)    # (H, R, r, P, m)
    scores = (row * right).sum(2)    # (H, R, P, m)
    return scores.permute(2, 1, 3, 0), rows * n + cols


def core_times(core, s):
    """sum_y core[x,y] s[y] for core (..., R, r, r), s (R, r, P, m) -> (..., R, r, P, m): products
    and sums, since a matrix product of fp32 may run in TF32.
    """
    return (core[..., None, None] * s[:, None]).sum(-3)


def pick_ranks(s, index):
    """s (P, R, r, n), index (P, R, m) -> s[p, h, x, index[p, h, u]] (R, r, P, m): the ranks' scores
    lie apart, so that what weighs them is one number for all of P and m.
    """
    index = index.transpose(0, 1)[:, None]    # (R, 1, P, m)
    return pick(s.permute(1, 2, 0, 3), index.expand(-1, s.shape[2], -1, -1))


# ================================================================ the sums

def gather_sum(table: Tensor, indices: Tensor, weights: Tensor, blocks: Optional[Tensor] = None,
               n_blocks: int = 1, sparse_grad: bool = False,
               order: Optional[Tensor] = None) -> Tensor:
    """Weighted sum of retrieved rows: y[p] = sum_u weights[p,u] * table[indices[p,u]] (MIDUS G.3,
    UltraMemV2 eq. 12).

    table (N, d) float; indices (P, k) int32 or int64 in [0, N), repeats allowed; weights (P, k)
    float -> (P, d) in the weights' dtype. weights (P, k, H): weight h is for slice h of the row's H
    slices of d/H columns. With blocks (P, k) int in [0, n_blocks) the sum is kept per block -> (P,
    n_blocks, d) (UltraMem; UltraMemV2 eq. 9). Gradients: for the weights <table[j], g[p]>; for the
    table G (the file's head), dense, or with sparse_grad=True a coalesced COO tensor of the touched
    rows (see keep_coalesced), which breaks a compiled graph at every call. order:
    sort_indices(indices), where several operations share the indices.
    """
    check_gather(table, indices, order)
    P, k = indices.shape
    d = table.shape[1]
    weights = weights if weights.dim() == 3 else weights[..., None]
    check("weights", weights, (P, k, "H"))
    if d % weights.shape[2]:
        raise ValueError(f"weights: H = {weights.shape[2]} does not divide d = {d}")
    if blocks is not None:
        check_indices("blocks", blocks, (P, k), n_blocks)
        blocks = blocks.contiguous()
    elif n_blocks != 1:
        raise ValueError("n_blocks goes with blocks")
    op = gather_sum_eager if sparse_grad else gather_sum_op
    y = op(table, indices, weights, blocks, n_blocks, order, sparse_grad)
    return y if blocks is None else y.view(P, n_blocks, d)


def gather_dot(table: Tensor, indices: Tensor, x: Tensor, sparse_grad: bool = False,
               order: Optional[Tensor] = None) -> Tensor:
    """Dot products with retrieved rows: s[p,u] = <table[indices[p,u]], x[p]> (PEER; the pre-values
    of UltraMemV2 eq. 15).

    table (N, d) float; indices (P, k) int32 or int64 in [0, N); x (P, d) float -> (P, k) in x's
    dtype. Gradients: dx[p] = sum_u g[p,u] table[j]; for the table, sparse_grad and order as in
    gather_sum.
    """
    check_gather(table, indices, order)
    check("x", x, (indices.shape[0], table.shape[1]))
    op = gather_dot_eager if sparse_grad else gather_dot_op
    return op(table, indices, x, None, 1, 1, order, sparse_grad).squeeze(2)


def check_gather(table, indices, order):
    check("table", table, ("N", "d"))
    check_indices("indices", indices, ("P", "k"), table.shape[0])
    if indices.shape[1] == 0:
        raise ValueError("indices must be (P, k) with k of at least 1")
    if order is not None:
        check("order", order, (indices.shape[0] * indices.shape[1],), "int64")


def sort_indices(indices: Tensor) -> Tensor:
    """indices (P, k) -> (P*k,) int64 that sorts the flattened indices: the `order` of all
    operations on the same indices.
    """
    flat = indices.reshape(-1).to(torch.int32)    # N < 2^31: half the bytes to sort
    return flat.sort(stable=True).indices


def gather_rows(table: Tensor, rows: Tensor, sparse_grad: bool = False) -> Tensor:
    """table[rows] for distinct rows; the gradient reaches the table once, however many layers use
    the result.

    table (N, ...); rows (U,) int64, ascending and distinct, as torch.unique returns them -> (U,
    ...). The gradient is dense (zeros and one write of U rows) or, with sparse_grad=True, a
    coalesced COO tensor of these rows.
    """
    check_indices("rows", rows, ("U",), table.shape[0])
    if DEBUG and not (rows.diff() > 0).all():
        raise ValueError("rows must be ascending and distinct: take them from torch.unique")
    op = gather_rows_eager if sparse_grad else gather_rows_op
    return op(table, rows, sparse_grad)


def mix_values(v: Tensor, bank_rows: Tensor, inverse: Tensor, gate: Tensor, gate_v: bool = True,
               order: Optional[Tensor] = None) -> Tensor:
    """MoVE eq. 4: out[t,h] = gate[t,h,0] v[t,h] + sum_i gate[t,h,i+1] bank_rows[inverse[t],i,h].

    v (T, H, d_h) float; bank_rows (U, M, H, d_h) or (U, M, H*d_h): the distinct tokens' value rows
    (gather_rows); inverse (T,) int in [0, U); gate (T, H, M+1), or (T, H, M) with gate_v=False: v
    is added as it is. Dtypes may differ. -> (T, H, d_h) in v's dtype. Differentiable in v,
    bank_rows and gate, without any (T, M, d) tensor. order: mix_order(inverse, M), where layers
    share inverse.
    """
    check("v", v, ("T", "H", "d_h"))
    T, H, d_h = v.shape
    check("gate", gate, (T, H, "M + gate_v"))
    U, M = bank_rows.shape[:2]
    n_banks = gate.shape[2] - int(gate_v)
    check("bank_rows", bank_rows.flatten(2), (U, n_banks, H * d_h))
    check_indices("inverse", inverse, (T,), U)
    if order is not None:
        check("order", order, (T * M,), "int64")
    table = bank_rows.reshape(U * M, H * d_h)
    indices = mix_indices(inverse, M)
    gate_bank = gate[..., int(gate_v):].transpose(1, 2)    # (T, M, H)
    mixed = gather_sum_op(table, indices, gate_bank, None, 1, order, False)    # in the gate's dtype
    kept = v * gate[..., :1] if gate_v else v
    return (kept + mixed.view(T, H, d_h)).to(v.dtype)


def mix_indices(inverse, M):
    """inverse (T,) -> (T, M): the rows of a token in a bank of (U*M, d)."""
    return inverse[:, None] * M + torch.arange(M, device=inverse.device)


def mix_order(inverse: Tensor, M: int) -> Tensor:
    """inverse (T,) -> (T*M,): mix_values' `order`, for callers that sort once for all layers."""
    return sort_indices(mix_indices(inverse, M))


# ================================================================ the head

def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor,
                         softcap: float = 0.0) -> Tensor:
    """Mean cross-entropy in nats of the logits z = x weight^T at the targets >= 0; 0 without any.

    x (..., d), weight (V, d), targets (...) int64 below V, negative where there is no loss. softcap
    c > 0: c tanh(z / c) in place of z. -> a scalar in fp32 (fp64 for fp64). Under autocast the
    products run in its dtype. The gradients are made in the forward pass, chunk of tokens by chunk,
    while its logits are at hand: never more than a chunk's logits exist.
    """
    if softcap < 0:
        raise ValueError(f"softcap must be positive, or 0 for none, got {softcap}")
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    targets = targets.reshape(-1)
    x = x.reshape(-1, x.shape[-1])
    check("weight", weight, ("V", x.shape[1]))
    check("targets", targets, (x.shape[0],), "int32 or int64")
    if DEBUG:    # any negative number is right
        check_indices("targets", targets.clamp(min=0), targets.shape, weight.shape[0])
    wants_x = torch.is_grad_enabled() and x.requires_grad
    wants_weight = torch.is_grad_enabled() and weight.requires_grad
    total, _, _ = linear_cross_entropy_op(
        x, weight, targets, float(softcap), dtype, wants_x, wants_weight)
    return total / (targets >= 0).sum().clamp(min=1)


# ================================================================ operators and gradients: search
# A search returns indices; the scores are read again by pick, with a gradient.

def product_key_search_outputs(s_row, s_col, k):
    rows = s_row.new_empty(s_row.shape[0], k, dtype=torch.int64)
    return rows, torch.empty_like(rows)


@operator(product_key_search_outputs)
def product_key_search(s_row: Tensor, s_col: Tensor, k: int) -> tuple[Tensor, Tensor]:
    search = product_key_search_triton if use_triton(s_row, s_col) else product_key_search_torch
    return search(s_row, s_col, k)


def tucker_search_outputs(s_row, s_col, u, v, core_sum, m_key, m):
    P, R = s_row.shape[:2]
    rows = s_row.new_empty(P, R, m, dtype=torch.int64)
    return rows, torch.empty_like(rows)


@operator(tucker_search_outputs)
def tucker_search(s_row: Tensor, s_col: Tensor, u: Tensor, v: Tensor, core_sum: Tensor, m_key: int,
                  m: int) -> tuple[Tensor, Tensor]:
    search = tucker_search_triton if use_triton(s_row, s_col) else tucker_search_torch
    return search(s_row, s_col, u, v, core_sum, m_key, m)


@operator(lambda s, index: s.new_empty(index.shape, dtype=acc_dtype(s)))
def pick(s: Tensor, index: Tensor) -> Tensor:
    """s (..., n), index (..., k) -> s[..., index[..., u]] (..., k) fp32 (fp64). ds[..., i] = sum of
    g[..., u] over the u with index[..., u] = i.
    """
    return s.gather(-1, index).to(acc_dtype(s))


def pick_setup(ctx, inputs, output):
    s, index = inputs
    ctx.shape = s.shape
    ctx.dtype = s.dtype
    ctx.save_for_backward(index)


def pick_backward(ctx, grad):
    index, = ctx.saved_tensors
    grad = grad.flatten(0, -2)
    ds = scatter_scores(grad, index.flatten(0, -2), ctx.shape[-1])
    return ds.view(ctx.shape).to(ctx.dtype), None


pick.register_autograd(pick_backward, setup_context=pick_setup)


@operator(lambda grad, index, n: grad.new_empty(grad.shape[0], n))
def scatter_scores(grad: Tensor, index: Tensor, n: int) -> Tensor:
    if use_triton(grad):
        return scatter_scores_triton(grad, index, n)
    return grad.new_zeros(grad.shape[0], n).scatter_add_(1, index, grad)


# ================================================================ operators and gradients: the sums
# weights are (P, k, H): weight h is for slice h of the row, H slices of d/H columns. blocks is None
# or (P, k): then query p has n_blocks results, and the pair (p, u) belongs to result
# p*n_blocks + blocks[p,u].

def gather_sum_outputs(table, indices, weights, blocks, n_blocks, order, sparse_grad):
    return weights.new_empty(indices.shape[0] * n_blocks, table.shape[1])


@operator(gather_sum_outputs)
def gather_sum_op(table: Tensor, indices: Tensor, weights: Tensor, blocks: Optional[Tensor],
                  n_blocks: int, order: Optional[Tensor], sparse_grad: bool) -> Tensor:
    path = gather_sum_triton if use_triton(table, weights) else gather_sum_torch
    return path(table, indices, weights, blocks, n_blocks)


def gather_sum_setup(ctx, inputs, output):
    table, indices, weights, blocks, ctx.n_blocks, order, ctx.sparse_grad = inputs
    ctx.save_for_backward(table, indices, weights, blocks, order)


def gather_sum_backward(ctx, grad):
    table, indices, weights, blocks, order = ctx.saved_tensors
    d_table = None
    d_weights = None
    if ctx.needs_input_grad[0]:
        d_table = table_grad(ctx, grad, weights)
    if ctx.needs_input_grad[2]:    # <table[j], grad[p]>, slice by slice
        H = weights.shape[2]
        d_weights = gather_dot_op(table, indices, grad, blocks, ctx.n_blocks, H, order, False)
    return d_table, None, d_weights, None, None, None, None


gather_sum_op.register_autograd(gather_sum_backward, setup_context=gather_sum_setup)


def gather_dot_outputs(table, indices, x, blocks, n_blocks, H, order, sparse_grad):
    P, k = indices.shape
    return x.new_empty(P, k, H)


@operator(gather_dot_outputs)
def gather_dot_op(table: Tensor, indices: Tensor, x: Tensor, blocks: Optional[Tensor],
                  n_blocks: int, H: int, order: Optional[Tensor], sparse_grad: bool) -> Tensor:
    path = gather_dot_triton if use_triton(table, x) else gather_dot_torch
    return path(table, indices, x, blocks, n_blocks, H)


def gather_dot_setup(ctx, inputs, output):
    table, indices, x, blocks, ctx.n_blocks, _, order, ctx.sparse_grad = inputs
    ctx.save_for_backward(table, indices, x, blocks, order)


def gather_dot_backward(ctx, grad):
    table, indices, x, blocks, order = ctx.saved_tensors
    d_table = None
    d_x = None
    if ctx.needs_input_grad[0]:
        d_table = table_grad(ctx, source=x, weights=grad)
    if ctx.needs_input_grad[2]:    # sum_u grad[p,u] table[j]
        d_x = gather_sum_op(table, indices, grad, blocks, ctx.n_blocks, order, False)
    return d_table, None, d_x, None, None, None, None, None


gather_dot_op.register_autograd(gather_dot_backward, setup_context=gather_dot_setup)


def table_grad(ctx, source, weights):
    """G[j] = sum of weights[p,u] * source[p] over the (p, u) with indices[p,u] = j: dense, or COO
    of the touched rows.
    """
    table, indices, _, blocks, order = ctx.saved_tensors
    arguments = (source, indices, weights, blocks, ctx.n_blocks, order, table.shape[0], table.dtype)
    if not ctx.sparse_grad:
        return row_sums_dense(*arguments)
    only_once("a row-sparse gradient")
    rows, sums = row_sums(*arguments, True)
    return coalesced(rows, sums, table.shape)


def coalesced(rows, values, shape):
    return torch.sparse_coo_tensor(
        rows[None].long(), values, shape, is_coalesced=True, check_invariants=False)


def row_sums(source, indices, weights, blocks, n_blocks, order, n_rows, dtype, sparse):
    """-> the distinct rows that were hit and their sums, if sparse; else anything and the sums of
    all n_rows rows.
    """
    order = sort_indices(indices) if order is None else order.contiguous()
    path = row_sums_triton if use_triton(source, weights) else row_sums_torch
    return path(source, indices, weights, blocks, n_blocks, order, n_rows, dtype, sparse)


def row_sums_outputs(source, indices, weights, blocks, n_blocks, order, n_rows, dtype):
    return source.new_empty(n_rows, source.shape[1], dtype=dtype)


@operator(row_sums_outputs)
def row_sums_dense(source: Tensor, indices: Tensor, weights: Tensor, blocks: Optional[Tensor],
                   n_blocks: int, order: Optional[Tensor], n_rows: int,
                   dtype: torch.dtype) -> Tensor:
    return row_sums(source, indices, weights, blocks, n_blocks, order, n_rows, dtype, False)[1]


def gather_rows_outputs(table, rows, sparse_grad):
    return table.new_empty(rows.shape[0], *table.shape[1:])


@operator(gather_rows_outputs)
def gather_rows_op(table: Tensor, rows: Tensor, sparse_grad: bool) -> Tensor:
    return table.index_select(0, rows)


def gather_rows_setup(ctx, inputs, output):
    table, rows, ctx.sparse_grad = inputs
    ctx.shape = table.shape
    ctx.save_for_backward(rows)


def gather_rows_backward(ctx, grad):
    rows, = ctx.saved_tensors
    if ctx.sparse_grad:
        d_table = coalesced(rows, grad.clone(), ctx.shape)    # grad may be another's, too
    else:
        d_table = grad.new_zeros(ctx.shape).index_copy_(0, rows.long(), grad)
    return d_table, None, None


gather_rows_op.register_autograd(gather_rows_backward, setup_context=gather_rows_setup)

# A compiled backward cannot build a COO tensor: with sparse_grad=True an operation stays outside
# the graph. A loop over layers that has such a break in it is not compiled itself, only the pieces
# of its layers are; with dense gradients an UltraMemV2 is a single graph.
gather_sum_eager = torch.compiler.disable(gather_sum_op)
gather_dot_eager = torch.compiler.disable(gather_dot_op)
gather_rows_eager = torch.compiler.disable(gather_rows_op)


# ================================================================ operators and gradients: the head

def linear_cross_entropy_outputs(x, weight, targets, softcap, dtype, wants_x, wants_weight):
    acc = acc_dtype(x, weight)
    d_x = x.new_empty(x.shape if wants_x else (0,), dtype=dtype)
    d_weight = weight.new_empty(weight.shape if wants_weight else (0,), dtype=acc)
    return x.new_empty((), dtype=acc), d_x, d_weight


@operator(linear_cross_entropy_outputs)
def linear_cross_entropy_op(x: Tensor, weight: Tensor, targets: Tensor, softcap: float,
                            dtype: torch.dtype, wants_x: bool,
                            wants_weight: bool) -> tuple[Tensor, Tensor, Tensor]:
    """-> the sum of the losses and, where wanted, its gradients for x (in dtype) and for weight
    (fp32). Products run in dtype.
    """
    total, d_x, d_weight = linear_cross_entropy_outputs(
        x, weight, targets, softcap, dtype, wants_x, wants_weight)
    total.zero_()
    d_weight.zero_()
    x = x.to(dtype)
    V = weight.shape[0]
    if use_triton(x, weight):
        rows = max(1024, 2**26 // V // 64 * 64)    # of a chunk
        chunk_loss = cross_entropy_triton
        weight = padded_rows(weight, dtype)
    else:
        rows = max(256, (2**21 if x.device.type == "cpu" else 2**25) // V)
        chunk_loss = cross_entropy_torch
        weight = weight.to(dtype)
    for start in range(0, x.shape[0], rows):
        part = slice(start, start + rows)
        z = x[part] @ weight.T    # (rows, V), 0 in the columns beyond
        total += chunk_loss(z[:, :V], targets[part], softcap, wants_x or wants_weight).sum()
        if wants_x:
            torch.mm(z, weight, out=d_x[part])
        if wants_weight and dtype == d_weight.dtype:
            d_weight.addmm_(z[:, :V].T, x[part])
        elif wants_weight:
            d_weight += (z.T @ x[part])[:V]
        del z    # before the next chunk's
    return total, d_x, d_weight


def padded_rows(weight, dtype):
    """weight (V, d) in dtype, with rows of 0 up to a multiple of 64. cuBLAS multiplies rows of
    50,257 numbers of bf16, which start anywhere in memory, in kernels of an older kind: on an H200
    the head took half of a training step.
    """
    V, d = weight.shape
    if V % 64 == 0:
        return weight.to(dtype)
    padded = weight.new_zeros(64 * math.ceil(V / 64), d, dtype=dtype)
    padded[:V] = weight
    return padded


def linear_cross_entropy_setup(ctx, inputs, output):
    ctx.set_materialize_grads(False)    # no zeros for the outputs that nobody uses
    ctx.dtypes = inputs[0].dtype, inputs[1].dtype
    ctx.save_for_backward(*output[1:])


def linear_cross_entropy_backward(ctx, grad, *_):
    only_once("linear_cross_entropy")
    grads = [None] * 7
    for n, (gradient, dtype) in enumerate(zip(ctx.saved_tensors, ctx.dtypes)):
        if ctx.needs_input_grad[n] and grad is not None:
            grads[n] = (gradient * grad).to(dtype)
    return tuple(grads)


linear_cross_entropy_op.register_autograd(
    linear_cross_entropy_backward, setup_context=linear_cross_entropy_setup)


# ================================================================ torch path: search

@functools.lru_cache(maxsize=64)
def staircase(k, n, device):
    """The pairs of ranks (i, j), from 0 to n-1, with (i+1)(j+1) <= k: some k ln k. -> (2, C) int64.

    The k best sums of two descending lists lie among them: order all pairs by descending score,
    ties by (i, j). The (i+1)(j+1) - 1 others (i' <= i, j' <= j) score no less than (i, j) and stand
    before it; so if (i+1)(j+1) > k, it is not one of the first k.
    """
    pairs = []
    for i in range(min(k, n)):
        for j in range(min(k // (i + 1), n)):
            pairs.append((i, j))
    return torch.tensor(pairs, device=device).t().contiguous()


def top_indices(s, k):
    """s (Q, n) -> (Q, k): s.topk(k).indices, two or three times as fast on one thread of a CPU.

    A score and its index are sorted as one int64, the score in the upper half: NumPy's sort takes
    several of these at once and is at its best up to 256 a row. A longer row is cut into groups of
    four: the k groups with the largest maxima hold the k largest. The padding of -inf stands behind
    three of each group, so it never wins, but against NaN: then the last index stands for it.
    """
    if s.device.type != "cpu" or s.dtype != torch.float32:
        return s.topk(k).indices
    n = s.shape[1]
    groups = math.ceil(n / 4)
    if n > 256 and groups + 4 * k < n:
        if n % 4:
            s = F.pad(s, (0, 4 * groups - n), value=-math.inf)
        best = top_indices(s.view(-1, 4, groups).amax(1), k)
        index = best[:, None] + groups * torch.arange(4)[:, None]    # (Q, 4, k)
        index = index.flatten(1)
        return index.gather(1, top_indices(s.gather(1, index), k)).clamp_(max=n - 1)
    bits = (-s).view(torch.int32)
    bits ^= (bits >> 31) & 0x7FFFFFFF    # ascending like the numbers, see pack
    packed = bits.long()
    packed <<= 32
    packed |= torch.arange(n)
    packed.numpy().sort(1)
    return packed[:, :k] & 0xFFFFFFFF


def product_key_search_torch(s_row, s_col, k):
    n = s_row.shape[1]
    dtype = acc_dtype(s_row, s_col)
    s_row = s_row.to(dtype)
    s_col = s_col.to(dtype)
    i = top_indices(s_row, min(k, n))    # of descending scores
    j = top_indices(s_col, min(k, n))
    a, b = staircase(k, n, s_row.device)
    row = s_row.gather(1, i).index_select(1, a)
    col = s_col.gather(1, j).index_select(1, b)
    candidates = row + col    # (P, C)
    best = top_indices(candidates, k)    # (P, k)
    return i.gather(1, a[best]), j.gather(1, b[best])


def tucker_search_torch(s_row, s_col, u, v, core_sum, m_key, m):
    P, R, r, n = s_row.shape
    dtype = acc_dtype(s_row)
    first = []    # the rows and the columns of stage 1
    for vector, s in ((u, s_row), (v, s_col)):
        s = s.permute(1, 2, 0, 3).to(dtype)    # (R, r, P, n)
        score = (vector.to(dtype)[..., None, None] * s).sum(1)    # (R, P, n)
        best = top_indices(score.view(R * P, n), m_key)
        first.append(best.view(R, P, m_key).transpose(0, 1))
    i, j = first    # (P, R, m_key)
    row = pick_ranks(s_row, i)    # (R, r, P, m_key)
    right = core_times(core_sum.to(dtype), pick_ranks(s_col, j))
    grid = row[:, 0, :, :, None] * right[:, 0, :, None]    # (R, P, m_key, m_key)
    for x in range(1, r):
        grid.addcmul_(row[:, x, :, :, None], right[:, x, :, None])
    best = top_indices(grid.view(R * P, m_key**2), m)
    best = best.view(R, P, m).transpose(0, 1)
    return i.gather(2, best // m_key), j.gather(2, best % m_key)


# ================================================================ torch path: the sums

def touched_rows(table, indices, dtype):
    """A table in another dtype is not converted whole, only the rows that are read."""
    if table.dtype == dtype:
        return table.contiguous(), indices.long()
    rows, indices = indices.unique(return_inverse=True)
    return table.index_select(0, rows).to(dtype), indices    # table[rows] takes -1 for the last


def gather_sum_torch(table, indices, weights, blocks, n_blocks):
    P, k, H = weights.shape
    d = table.shape[1]
    device = table.device
    dtype = weights.dtype
    table, indices = touched_rows(table, indices, acc_dtype(table, weights))
    weights = weights.to(table.dtype).movedim(2, 0)    # (H, P, k)
    if blocks is None:    # one bag per query and slice, for a row's slices lie together
        index = indices[:, None] * H + torch.arange(H, device=device)[:, None]    # (P, H, k)
        y = F.embedding_bag(index.reshape(P * H, k), table.view(-1, d // H), mode="sum",
                            per_sample_weights=weights.transpose(0, 1).reshape(P * H, k))
    else:
        bag = torch.arange(P, device=device)[:, None] * n_blocks + blocks
        bag, order = bag.reshape(-1).sort(stable=True)
        start = torch.searchsorted(bag, torch.arange(P * n_blocks, device=device))
        index = indices.reshape(-1)[order]
        y = slice_sums(table, index, start, weights.flatten(1).index_select(1, order))
    return y.view(P * n_blocks, d).to(dtype)


def gather_dot_torch(table, indices, x, blocks, n_blocks, H):
    P, k = indices.shape
    d = table.shape[1]
    dtype = x.dtype
    table, indices = touched_rows(table, indices, acc_dtype(table, x))
    x = x.to(table.dtype)
    if blocks is not None:
        blocks = blocks + torch.arange(P, device=x.device)[:, None] * n_blocks    # rows of x
    dots = table.new_empty(P, k, H, dtype=dtype)
    numbers = 2**18 if x.device.type == "cpu" else 2**26    # 1 MB, for a CPU's cache
    queries = max(1, numbers // (k * d))
    for start in range(0, P, queries):
        part = slice(start, start + queries)
        rows = table.index_select(0, indices[part].flatten())
        if blocks is None:
            rows.view(-1, k, d).mul_(x[part, None])
        else:
            rows *= x.index_select(0, blocks[part].flatten())
        dots[part] = rows.view(-1, k, H, d // H).sum(3)
    return dots


def row_sums_torch(source, indices, weights, blocks, n_blocks, order, n_rows, dtype, sparse):
    P, k, H = weights.shape
    acc = acc_dtype(source, weights)
    keys = indices.flatten().index_select(0, order)
    if sparse:
        rows, count = keys.unique_consecutive(return_counts=True)
    else:
        rows = None
        count = torch.bincount(keys, minlength=n_rows)    # a row that was not hit: an empty bag, 0
    start = count.cumsum(0) - count
    result = order // k * n_blocks
    if blocks is not None:
        result = result + blocks.reshape(-1)[order]
    weights = weights.to(acc).movedim(2, 0).flatten(1)    # (H, P*k)
    weights = weights.index_select(1, order)
    return rows, slice_sums(source.to(acc), result, start, weights).to(dtype)


def slice_sums(source, index, start, weights):
    """y[s] = sum of weights[:, e] * source[index[e]] over e in [start[s], start[s+1]), weight h for
    slice h of the row's H.

    source (R, d), index (L,), start (S,), weights (H, L) -> (S, d). An embedding_bag for each
    slice: no (L, d) tensor.
    """
    sums = []
    for part, weight in zip(source.chunk(len(weights), 1), weights.contiguous()):
        sums.append(F.embedding_bag(index, part, start, mode="sum", per_sample_weights=weight))
    return sums[0] if len(sums) == 1 else torch.cat(sums, 1)


# ================================================================ torch path: the head

SLICE = 2**18    # logits that become a loss and its gradient at once: 1 MB, for a CPU's cache


def cross_entropy_torch(z, targets, softcap, gradient):
    """z (rows, V) logits, targets (rows,) -> losses (rows,), 0 where the target is negative. With
    gradient, z becomes dloss/dz.
    """
    losses = []
    rows = max(1, SLICE // z.shape[1]) if z.device.type == "cpu" else len(z)
    for part, target in zip(z.split(rows), targets.split(rows)):
        s = part.to(acc_dtype(z))    # fp32 logits themselves, of others a copy
        if softcap:
            tanh = torch.sigmoid(s * (2 / softcap)).mul_(2).sub_(1)    # a quarter of tanh's time
            torch.mul(tanh, softcap, out=s)
        p = s.softmax(1)
        log_sum = s.amax(1, keepdim=True) - p.amax(1, keepdim=True).log()    # one exp in all
        ignored = (target < 0)[:, None]
        target = target.clamp(min=0)[:, None]
        losses.append((log_sum - s.gather(1, target)).masked_fill(ignored, 0).squeeze(1))
        if gradient:
            if z.device.type != "cpu" or ignored.any():    # a GPU would wait for the answer
                p.masked_fill_(ignored, 0)
            p.scatter_add_(1, target, ignored.to(p.dtype) - 1)
            if softcap:
                p.mul_(1 - tanh.square_())
            part.copy_(p)
    return torch.cat(losses)


# ================================================================ Triton path: search

def launch(kernel, grid, *args, **options):
    """On the device of the first tensor, where Triton by itself takes the current one; not at all
    for a grid of 0 programs."""
    if all(grid):
        with torch.cuda.device_of(args[0]):
            kernel[grid](*args, **options)


# Top-k inside a program: a score and its index travel as one int64, the score in the upper half, so
# that sorting these sorts the scores. The bits of fp32 compare like integers once those of negative
# numbers are flipped. PADDING loses to every score, to -inf too.

PADDING = tl.constexpr(-2**63)


def dense_rows(s):
    """s with neighbours in its last dimension, copied only if they are not."""
    return s if s.stride(-1) == 1 else s.contiguous()


def power_of_2(n, at_least=2):
    return max(at_least, 1 << (n - 1).bit_length())


@jit
def pack(score, index):
    bits = score.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) | index.to(tl.int64)


@jit
def unpack_score(packed):
    bits = (packed >> 32).to(tl.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@jit
def top(score, index, ok, K: tl.constexpr):
    return tl.topk(tl.where(ok, pack(score, index), PADDING), K)


@jit
def load(pointer, mask):
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@jit
def load_index(pointer, mask):
    return tl.load(pointer, mask=mask, other=-1).to(tl.int64)


@jit
def load_tile(pointer, width, row, col, row_ok, col_ok):
    mask = row_ok[:, None] & col_ok[None, :]
    return load(pointer + row[:, None] * width + col[None, :], mask)


@jit
def store_tile(pointer, width, row, col, row_ok, col_ok, value):
    mask = row_ok[:, None] & col_ok[None, :]
    tl.store(pointer + row[:, None] * width + col[None, :], value, mask=mask)


@jit
def gather_ranks(t, rank):
    """t (P, K), rank (1, C) -> (P, C). Gathered as one long row: Triton 3.6 and 3.7 cannot compile
    tl.gather along the second dimension where several warps would share it."""
    P: tl.constexpr = t.shape[0]
    K: tl.constexpr = t.shape[1]
    C: tl.constexpr = rank.shape[1]
    at = tl.arange(0, P)[:, None] * K + rank
    return tl.reshape(tl.gather(tl.reshape(t, [P * K]), tl.reshape(at, [P * C]), 0), [P, C])


# One program owns BLOCK_P queries. It reads their n row and n column scores, sorts the Top-k of
# each, picks the staircase candidates by their ranks, and writes row and column of the k best. A
# pair travels as row << 16 | column. N2, K2, C2, O2: n, the ranks kept, the number of candidates C,
# and k, as powers of two.
@jit
def product_key_kernel(s_row, s_col, ranks, rows, cols, row_p, col_p, P, n, k, C, N2: tl.constexpr,
                       K2: tl.constexpr, C2: tl.constexpr, O2: tl.constexpr,
                       BLOCK_P: tl.constexpr):
    p = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    p = p[:, None]
    x = tl.arange(0, N2)[None, :]
    ok = (p < P) & (x < n)
    row_list = top(load(s_row + p * row_p + x, ok), x, ok, K2)    # (BLOCK_P, K2)
    col_list = top(load(s_col + p * col_p + x, ok), x, ok, K2)

    c = tl.arange(0, C2)[None, :]
    candidate = (p < P) & (c < C)
    row_rank = tl.load(ranks + c, mask=c < C, other=0).to(tl.int32)
    col_rank = tl.load(ranks + C + c, mask=c < C, other=0).to(tl.int32)
    row = gather_ranks(row_list, row_rank)
    col = gather_ranks(col_list, col_rank)
    pair = ((row & 0xFFFF) << 16) | (col & 0xFFFF)
    score = unpack_score(row) + unpack_score(col)
    best = top(score, pair, candidate, O2)
    u = tl.arange(0, O2)[None, :]
    keep = (p < P) & (u < k)
    tl.store(rows + p * k + u, (best >> 16) & 0xFFFF, mask=keep)
    tl.store(cols + p * k + u, best & 0xFFFF, mask=keep)


def product_key_search_triton(s_row, s_col, k):
    P, n = s_row.shape
    ranks = staircase(k, n, s_row.device)
    C = ranks.shape[1]
    K2 = power_of_2(min(k, n))
    N2 = power_of_2(n, K2)
    C2 = power_of_2(C)
    BLOCK_P = max(1, 2048 // max(N2, C2))
    rows, cols = product_key_search_outputs(s_row, s_col, k)
    s_row = dense_rows(s_row)
    s_col = dense_rows(s_col)
    launch(
        product_key_kernel, (triton.cdiv(P, BLOCK_P),),
        s_row, s_col, ranks, rows, cols, s_row.stride(0), s_col.stride(0), P, n, k, C,
        N2, K2, C2, power_of_2(k), BLOCK_P)
    return rows, cols


# Of a Tucker grid, sorted at once: before Triton 3.8, 128 x 64 take 64 KB of shared memory.
COLUMNS = 64


# One program owns one query and one retrieval head. It projects the RANK x n scores of both sides
# on u and v, keeps the m_key best rows and columns, reads their scores again (from the cache),
# builds the m_key x m_key Tucker grid in registers, W2 columns at a time, and writes row and column
# of its m best. row_p, row_h, row_r: strides of s_row's dimensions, likewise of s_col.
@jit
def tucker_kernel(s_row, s_col, u, v, core_sum, rows, cols, row_p, row_h, row_r, col_p, col_h,
                  col_r, n, m_key, m, HEADS, RANK: tl.constexpr, N2: tl.constexpr,
                  M2: tl.constexpr, W2: tl.constexpr, O2: tl.constexpr):
    query = tl.program_id(0).to(tl.int64)    # counts (p, head)
    head = query % HEADS
    p = query // HEADS
    s_row += p * row_p + head * row_h
    s_col += p * col_p + head * col_h
    x = tl.arange(0, N2)
    a = tl.zeros([N2], tl.float32)
    b = tl.zeros([N2], tl.float32)
    for r in tl.static_range(RANK):
        u_r = tl.load(u + head * RANK + r)
        v_r = tl.load(v + head * RANK + r)
        a += u_r * load(s_row + r * row_r + x, x < n)
        b += v_r * load(s_col + r * col_r + x, x < n)
    i = top(a, x, x < n, M2) & 0xFFFF    # (M2,)
    j_all = top(b, x, x < n, M2) & 0xFFFF
    row_ok = tl.arange(0, M2) < m_key
    best = tl.full([O2], PADDING, tl.int64)
    for start in range(0, M2, W2):
        w = start + tl.arange(0, W2)
        col_ok = w < m_key
        j = tl.gather(j_all, w, 0)
        grid = tl.zeros([M2, W2], tl.float32)
        for r in tl.static_range(RANK):
            row = load(s_row + r * row_r + i, row_ok)
            for c in tl.static_range(RANK):
                weight = tl.load(core_sum + (head * RANK + r) * RANK + c)
                col = load(s_col + c * col_r + j, col_ok)
                grid += row[:, None] * (weight * col)[None, :]
        pair = (i << 16)[:, None] | j[None, :]
        packed = tl.where(row_ok[:, None] & col_ok[None, :], pack(grid, pair), PADDING)
        found = tl.topk(tl.reshape(packed, [M2 * W2]), O2)
        if W2 < M2:
            found = tl.topk(tl.reshape(tl.join(best, found), [2 * O2]), O2)
        best = found
    o = tl.arange(0, O2)
    tl.store(rows + query * m + o, (best >> 16) & 0xFFFF, mask=o < m)
    tl.store(cols + query * m + o, best & 0xFFFF, mask=o < m)


def tucker_search_triton(s_row, s_col, u, v, core_sum, m_key, m):
    P, R, r, n = s_row.shape
    M2 = power_of_2(m_key)
    O2 = power_of_2(m)
    W2 = max(min(M2, COLUMNS), O2 // M2)
    rows, cols = tucker_search_outputs(s_row, s_col, u, v, core_sum, m_key, m)
    u, v, core_sum = (t.float().contiguous() for t in (u, v, core_sum))
    s_row = dense_rows(s_row)
    s_col = dense_rows(s_col)
    launch(
        tucker_kernel, (P * R,),
        s_row, s_col, u, v, core_sum, rows, cols, *s_row.stride()[:3], *s_col.stride()[:3],
        n, m_key, m, R, r, power_of_2(n, M2), M2, W2, O2,
        num_warps=4 if M2 <= 32 else 16)
    return rows, cols


# One program owns BLOCK_Q queries x BLOCK_N of their n scores and walks over the K picks: no two
# programs write one score.
@jit
def scatter_scores_kernel(grad, index, out, Q, n, K: tl.constexpr, BLOCK_Q: tl.constexpr,
                          BLOCK_N: tl.constexpr):
    q = tl.program_id(0).to(tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    i = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_Q, BLOCK_N], tl.float32)
    for u in range(K):
        pick = load_index(index + q * K + u, q < Q)
        g = load(grad + q * K + u, q < Q)
        hit = pick[:, None] == i[None, :]
        total += tl.where(hit, g[:, None], 0.0)
    store_tile(out, n, q, i, q < Q, i < n, total)


def scatter_scores_triton(grad, index, n):
    Q, k = grad.shape
    out = grad.new_empty(Q, n)
    BLOCK_N = min(power_of_2(n), 128)
    BLOCK_Q = 1024 // BLOCK_N
    grid = (triton.cdiv(Q, BLOCK_Q), triton.cdiv(n, BLOCK_N))
    launch(
        scatter_scores_kernel, grid,
        grad.contiguous(), index.contiguous(), out, Q, n, k, BLOCK_Q, BLOCK_N)
    return out


# ================================================================ Triton path: the sums
# A program works on BLOCK_D columns of one of the H slices, which are D = d/H wide. Weights are
# read through their strides, so that a sliced or transposed gate is not copied. Row numbers are
# int64 before they are multiplied: N*d exceeds 2^31 soon.

# To the queries. One program owns BLOCK_P queries x BLOCK_D columns of their result. It walks over
# the K retrieved rows, reading in each step one row per query (neighbouring columns: coalesced),
# and writes its tile once. E > 1: it sums only the rows of one of E blocks and reads no other.
@jit
def gather_sum_kernel(table, indices, weights, blocks, out, P, w_p, w_u, w_h, K: tl.constexpr,
                      H: tl.constexpr, E: tl.constexpr, D: tl.constexpr, BLOCK_P: tl.constexpr,
                      BLOCK_D: tl.constexpr):
    width: tl.constexpr = H * D
    parts: tl.constexpr = E * H * ((D + BLOCK_D - 1) // BLOCK_D)    # programs of the same queries
    part = tl.program_id(0) % parts
    e = part % E
    h = part // E % H
    p = (tl.program_id(0) // parts).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = part // (E * H) * BLOCK_D + tl.arange(0, BLOCK_D)
    col = h * D + c
    ok = p < P
    total = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    for u in tl.range(0, K, loop_unroll_factor=4):
        use = ok
        if E > 1:
            use = ok & (load_index(blocks + p * K + u, ok) == e)
        row = load_index(indices + p * K + u, use)
        weight = load(weights + p * w_p + u * w_u + h * w_h, use)
        total += weight[:, None] * load_tile(table, width, row, col, use, c < D)
    store_tile(out, width, p * E + e, col, ok, c < D, total)


def gather_sum_triton(table, indices, weights, blocks, n_blocks):
    P, k, H = weights.shape
    D = table.shape[1] // H
    out = weights.new_empty(P * n_blocks, H * D)
    BLOCK_D = column_block(D, 256)
    BLOCK_P = 1024 // BLOCK_D
    programs = triton.cdiv(P, BLOCK_P) * n_blocks * H * triton.cdiv(D, BLOCK_D)
    launch(
        gather_sum_kernel, (programs,),
        table.contiguous(), indices.contiguous(), weights, blocks, out, P, *weights.stride(),
        k, H, n_blocks, D, BLOCK_P, BLOCK_D)
    return out


def column_block(D, largest):
    """The largest power of two that divides D, so that no lane idles; where that is below 32, D
    rounded up, to 32 at least (of 16 columns Triton 3.6 cannot compile row_sums_kernel). At most
    `largest`.
    """
    divisor = D & -D
    return min(divisor if divisor >= 32 else power_of_2(D, 32), largest)


# To the pairs. One program owns one slice of BLOCK_P queries and walks over their K rows: it reads
# a row and the query's x (which stays in the cache), reduces over the columns and writes one number
# per query and row.
@jit
def gather_dot_kernel(table, indices, x, blocks, out, P, K: tl.constexpr, H: tl.constexpr,
                      E: tl.constexpr, D: tl.constexpr, BLOCK_P: tl.constexpr,
                      BLOCK_D: tl.constexpr):
    width: tl.constexpr = H * D
    h = tl.program_id(0) % H
    p = (tl.program_id(0) // H).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    ok = p < P
    for u in tl.range(0, K, loop_unroll_factor=4):
        row = load_index(indices + p * K + u, ok)
        result = p * E
        if E > 1:
            result += load_index(blocks + p * K + u, ok)
        total = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
        for first in range(0, D, BLOCK_D):
            c = first + tl.arange(0, BLOCK_D)
            col = h * D + c
            values = load_tile(table, width, row, col, ok, c < D)
            total += values * load_tile(x, width, result, col, ok, c < D)
        pair = p * K + u
        tl.store(out + pair * H + h, tl.sum(total, 1), mask=ok)


def gather_dot_triton(table, indices, x, blocks, n_blocks, H):
    P, k = indices.shape
    D = table.shape[1] // H
    out = x.new_empty(P, k, H)
    BLOCK_D = column_block(D, 256)
    BLOCK_P = 1024 // BLOCK_D
    launch(
        gather_dot_kernel, (triton.cdiv(P, BLOCK_P) * H,),
        table.contiguous(), indices.contiguous(), x.contiguous(), blocks, out, P, k, H,
        n_blocks, D, BLOCK_P, BLOCK_D)
    return out


# To the rows. The L = P*k hits are sorted by row, so that those of one row are a run of equal keys.
# A window is C consecutive hits; one program owns BLOCK_W windows x BLOCK_D columns whatever the
# runs are: a row hit by every query is spread over L/C windows. It walks over the hits with a
# running sum, which begins anew where the key changes and is written at the end of a run. A run
# inside the window goes to its row of `out`, which nobody else writes. The others go to `partial`,
# two sums for every border of windows: of the run that goes on beyond it, of the run that came in
# over it. These sums are hits again, a sixteenth as many and sorted, with their keys in `borders`
# (-1: no run crosses this border): the kernel adds them up in turn, until one window holds all. Of
# a run that crosses a whole window its sum stands at the left border and 0 at the right one.
@jit
def row_sums_kernel(source, keys, order, weights, blocks, out, partial, borders, w_p, w_u, w_h, L,
                    steps, K: tl.constexpr, H: tl.constexpr, E: tl.constexpr, D: tl.constexpr,
                    C: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr):
    width: tl.constexpr = H * D
    parts: tl.constexpr = H * ((D + BLOCK_D - 1) // BLOCK_D)
    part = tl.program_id(0) % parts
    w = (tl.program_id(0) // parts).to(tl.int64) * BLOCK_W + tl.arange(0, BLOCK_W)
    h = part % H
    c = part // H * BLOCK_D + tl.arange(0, BLOCK_D)
    col = h * D + c
    first = w * C
    border = (first > 0) & (first < L)
    before = load_index(keys + first - 1, border)    # the window
    key = before
    following = load_index(keys + first, first < L)
    tl.store(borders + 2 * w - 1, tl.where(following == before, before, -1), mask=border)
    total = tl.zeros([BLOCK_W, BLOCK_D], tl.float32)
    for t in tl.range(0, steps, loop_unroll_factor=4):    # C, or L where that is less
        e = first + t
        same = key == following
        key = following
        following = load_index(keys + e + 1, e + 1 < L)
        ok = key >= 0
        if order is None:
            g = load_tile(source, width, e, col, ok, c < D)
        else:
            entry = load_index(order + e, ok)
            p = entry // K
            u = entry % K
            result = p * E
            if E > 1:
                result += load_index(blocks + entry, ok)
            weight = load(weights + p * w_p + u * w_u + h * w_h, ok)
            g = weight[:, None] * load_tile(source, width, result, col, ok, c < D)
        total = tl.where(same[:, None], total, 0.0) + g
        last = ok & ((key != following) | (t == C - 1))
        came_in = last & (key == before)
        goes_on = last & (key == following) & ~came_in
        inside = last & ~came_in & ~goes_on
        store_tile(out, width, key, col, inside, c < D, total)
        store_tile(partial, width, 2 * w - came_in.to(tl.int64), col, last & ~inside, c < D, total)
    border = first + C < L
    tl.store(borders + 2 * w, tl.where(following == key, key, -1), mask=border)


def row_sums_triton(source, indices, weights, blocks, n_blocks, order, n_rows, dtype, sparse):
    P, k, H = weights.shape
    D = source.shape[1] // H
    C = 32
    BLOCK_D = column_block(D, 128)
    BLOCK_W = 512 // BLOCK_D
    rows = indices.reshape(-1)[order]
    keys = rows
    if sparse:    # number the distinct rows; how many they are is data, hence one synchronisation
        rows, count = keys.unique_consecutive(return_counts=True)
        n_rows = rows.shape[0]
        keys = torch.arange(n_rows, device=keys.device)
        keys = keys.repeat_interleave(count, output_size=P * k)
    out = source.new_zeros(n_rows, H * D, dtype=dtype)
    source = source.contiguous()
    while keys.numel():
        L = keys.shape[0]
        W = triton.cdiv(L, C)
        partial = source.new_zeros(2 * W - 2, H * D, dtype=torch.float32)
        borders = keys.new_empty(2 * W - 2)
        programs = triton.cdiv(W, BLOCK_W) * H * triton.cdiv(D, BLOCK_D)
        launch(
            row_sums_kernel, (programs,),
            source, keys, order, weights, blocks, out, partial, borders, *weights.stride(), L,
            min(L, C), k, H, n_blocks, D, C, BLOCK_W, BLOCK_D)
        source = partial
        keys = borders
        order = None
    return rows, out


# ================================================================ Triton path: the head
# One program owns one token. It walks over its V logits in blocks for their maximum and the sum of
# exponentials, and once more (they are in the cache now) to put softmax - target in their place, in
# the pattern of the first walk: no thread reads what another one wrote. It reads whole rows of z,
# `width` numbers: bounded by a V such as 50,257 it would load them one by one.
@jit
def logit(pointer, mask, softcap, CAPPED: tl.constexpr):
    z = load(pointer, mask)
    if CAPPED:
        z = softcap * (2 * tl.sigmoid(2 * z / softcap) - 1)    # softcap * tanh(z / softcap)
    return z


@jit
def cross_entropy_kernel(z, targets, losses, V, width, softcap, CAPPED: tl.constexpr,
                         GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    z += row * width
    target = tl.load(targets + row)
    at_target = logit(z + target, target >= 0, softcap, CAPPED)
    largest = -float("inf")
    total = 0.0
    for first in range(0, width, BLOCK):
        c = first + tl.arange(0, BLOCK)
        s = logit(z + c, c < width, softcap, CAPPED)
        s = tl.where(c < V, s, -float("inf"))
        larger = tl.maximum(largest, tl.max(s, 0))
        total *= tl.exp(largest - larger)
        total += tl.sum(tl.exp(s - larger), 0)
        largest = larger
    lse = largest + tl.log(total)
    tl.store(losses + row, tl.where(target >= 0, lse - at_target, 0.0))
    if GRADIENT:
        tl.debug_barrier()    # every thread has read the target's logit
        for first in range(0, width, BLOCK):
            c = first + tl.arange(0, BLOCK)
            s = logit(z + c, c < width, softcap, CAPPED)
            g = tl.exp(s - lse) - tl.where(c == target, 1.0, 0.0)
            if CAPPED:
                g *= 1 - (s / softcap) * (s / softcap)
            tl.store(z + c, tl.where((target >= 0) & (c < V), g, 0.0), mask=c < width)


def cross_entropy_triton(z, targets, softcap, gradient):
    """As cross_entropy_torch. z may be the first V columns of wider rows; with gradient the others
    become 0."""
    rows, V = z.shape
    losses = z.new_empty(rows, dtype=torch.float32)
    launch(
        cross_entropy_kernel, (rows,),
        z, targets.contiguous(), losses, V, z.stride(0), softcap, softcap > 0, gradient,
        min(power_of_2(V), 4096), num_warps=8)
    return losses


# ================================================================ Triton path: lazy Adam
# One program owns BLOCK_R touched rows x BLOCK_D of their D columns: row, moments and gradient are
# read once and written once. size, scale (L,): for each row the step's size and what corrects
# sqrt(v).
@jit
def lazy_adam_kernel(grad, rows, p, m, v, size, scale, L, share_1, share_2, eps, decay,
                     D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    parts: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    e = (tl.program_id(0) // parts).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(0) % parts * BLOCK_D + tl.arange(0, BLOCK_D)
    ok = e < L
    row = load_index(rows + e, ok)
    g = load_tile(grad, D, e, c, ok, c < D)
    m_row = load_tile(m, D, row, c, ok, c < D)
    v_row = load_tile(v, D, row, c, ok, c < D)
    w = load_tile(p, D, row, c, ok, c < D)
    m_row += share_1 * (g - m_row)
    v_row += share_2 * (g * g - v_row)
    root = tl.sqrt(v_row) * load(scale + e, ok)[:, None]
    w = decay * w - load(size + e, ok)[:, None] * m_row / (root + eps)
    store_tile(m, D, row, c, ok, c < D, m_row)
    store_tile(v, D, row, c, ok, c < D, v_row)
    store_tile(p, D, row, c, ok, c < D, w)


def lazy_adam_triton(grad, rows, p, state, group, size, scale, decay):
    L = rows.shape[0]
    D = p[:1].numel()
    BLOCK_D = column_block(D, 256)
    BLOCK_R = 1024 // BLOCK_D
    beta1, beta2 = group["betas"]
    launch(
        lazy_adam_kernel, (triton.cdiv(L, BLOCK_R) * triton.cdiv(D, BLOCK_D),),
        grad.contiguous(), rows.contiguous(), p, state["exp_avg"], state["exp_avg_sq"], size, scale,
        L, 1 - beta1, 1 - beta2, group["eps"], decay, D, BLOCK_R, BLOCK_D)


# ================================================================ optimizers, row-sparse gradients

def keep_coalesced(parameter: Tensor):
    """Keep parameter.grad a coalesced COO tensor through any number of backward passes
    (micro-batches) and uses (shared tables).

    Autograd drops the coalesced mark and appends rows; then the optimizer would sort them in every
    step, which costs more than the gradient.
    """
    def after_accumulation(p):
        if p.grad.is_sparse and not p.grad.is_coalesced():
            rows = p.grad._indices()[0]
            values = p.grad._values()
            if not (rows.diff() > 0).all():    # several gradients: add up equal rows
                ones = values.new_ones(rows.shape[0], 1, 1)
                flat = values.reshape(rows.shape[0], -1)    # a table may be a vector
                rows, sums = row_sums(
                    flat, rows[:, None], ones, None, 1, None, p.shape[0], flat.dtype, True)
                values = sums.view(-1, *p.shape[1:])
            p.grad = coalesced(rows, values, p.shape)

    return parameter.register_post_accumulate_grad_hook(after_accumulation)


class LazyAdam(torch.optim.SparseAdam):
    """torch's SparseAdam, same update, same state, on a CPU in a third of its time: every touched
    row is read and written once.

    Lazy: rows without a gradient keep their values and moments, and the bias correction counts the
    steps of the whole table. On a GPU the update is one kernel; on a CPU the rows go in chunks of
    256k numbers, which stay in its cache. Gradients: COO (keep_coalesced saves a sort a step).
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):    # maximize is left out
        super().__init__(params, lr, betas, eps)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group)

    def update(self, p, group):
        beta1, beta2 = group["betas"]
        if not p.grad.is_sparse or p.grad.sparse_dim() != 1:
            raise ValueError("a gradient must be sparse in its rows alone, as to_sparse(1) is")
        grad = p.grad.coalesce()
        indices = grad._indices()[0]
        state = self.state[p]
        if not state:
            state.update(self.no_steps(p))
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)
        self.count(state, indices)
        if use_triton(p) and p.is_contiguous():
            scales = self.scales(state, indices, group)
            return lazy_adam_triton(grad._values(), indices, p, state, group, *scales)
        chunk = max(1, grad._nnz())
        if p.device.type == "cpu":
            chunk = max(1, 2**18 * p.shape[0] // p.numel())
        for rows, g in zip(indices.split(chunk), grad._values().split(chunk)):
            m = state["exp_avg"].index_select(0, rows)
            m.lerp_(g, 1 - beta1)
            v = state["exp_avg_sq"].index_select(0, rows)
            v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            state["exp_avg"].index_copy_(0, rows, m)
            state["exp_avg_sq"].index_copy_(0, rows, v)
            w = self.updated(p.index_select(0, rows), m, v, rows, state, group)
            p.index_copy_(0, rows, w)

    def no_steps(self, p):
        return {"step": 0}

    def count(self, state, rows):
        state["step"] += 1

    def size(self, state, group):
        beta1, beta2 = group["betas"]
        t = state["step"]
        return group["lr"] * math.sqrt(1 - beta2**t) / (1 - beta1**t)

    def scales(self, state, rows, group):
        """lazy_adam_triton's size, scale and decay."""
        ones = torch.ones_like(rows, dtype=torch.float32)
        return self.size(state, group) * ones, ones, 1.0

    def updated(self, w, m, v, rows, state, group):
        """w, m, v: the rows and their moments, to be overwritten. -> the rows after the step."""
        size = self.size(state, group)
        return w.addcdiv_(m, v.sqrt_().add_(group["eps"]), value=-size)


class RowAdamW(LazyAdam):
    """AdamW row by row: a row with a gradient gets torch.optim.AdamW's update, its bias corrected
    for the steps of this row; the others keep values, moments and counts. For tables whose rows are
    models of their own, visited at different rates (hierarchical memories).
    """

    def no_steps(self, p):
        return {"steps": p.new_zeros(p.shape[0], dtype=acc_dtype(p))}

    def count(self, state, rows):
        state["steps"].index_add_(0, rows, torch.ones_like(rows, dtype=state["steps"].dtype))

    def scales(self, state, rows, group):
        beta1, beta2 = group["betas"]
        t = state["steps"][rows].float()
        decay = 1 - group["lr"] * group.get("weight_decay", 0)
        return group["lr"] / (1 - beta1**t), (1 - beta2**t).rsqrt(), decay

    def updated(self, w, m, v, rows, state, group):
        beta1, beta2 = group["betas"]
        t = state["steps"][rows].view(-1, *[1] * (w.dim() - 1))
        m.div_(1 - beta1**t)
        v.div_(1 - beta2**t)
        w.mul_(1 - group["lr"] * group.get("weight_decay", 0))
        return w.addcdiv_(m, v.sqrt_().add_(group["eps"]), value=-group["lr"])


class Muon(torch.optim.Muon):
    """torch's Muon, same update and same state. On a GPU all matrices of one shape go through the
    iteration together: one by one they are 25 launches each and leave it idle. On a CPU, whose
    cache they would leave, they go one by one, in fp32 where it multiplies bf16 no faster.
    """

    def __init__(self, params, lr=1e-3, weight_decay=0.1, momentum=0.95):    # the rest is fixed
        super().__init__(params, lr, weight_decay, momentum)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            alike = {}
            for p in group["params"]:
                if p.grad is not None:
                    key = p if p.device.type == "cpu" else p.shape
                    alike.setdefault(key, []).append(p)
            for params in alike.values():
                self.update(params, group)

    def update(self, params, group):
        """params: matrices of one shape."""
        grads = [p.grad for p in params]
        moments = []
        for p in params:
            state = self.state[p]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(p)
            moments.append(state["momentum_buffer"])
        torch._foreach_lerp_(moments, grads, 1 - group["momentum"])
        ahead = torch._foreach_lerp(grads, moments, group["momentum"])    # Nesterov's
        G = ahead[0] if len(ahead) == 1 else torch.stack(ahead)
        slow = G.device.type == "cpu" and bf16_speedup() < 1.2
        X = newton_schulz(G if slow else G.bfloat16()).to(G.dtype).contiguous()
        rows, columns = params[0].shape
        rate = group["lr"] * math.sqrt(max(1, rows / columns))
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(params, X.view(-1, rows, columns).unbind(), alpha=-rate)


def newton_schulz(G):
    """Muon's orthogonalisation of a gradient G (rows, columns), or of N (N, rows, columns), step
    for step as torch.optim has it. On a CPU with slow bf16 (384, 1536) takes 39 ms in fp32 and 68
    in bf16; without bf16 instructions the latter is a hundred times slower.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    addmm = torch.addmm if G.dim() == 2 else torch.baddbmm
    tall = G.size(-2) > G.size(-1)
    X = G.mT if tall else G
    X = X / X.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        A = X @ X.mT
        B = addmm(A, A, A, beta=b, alpha=c)
        X = addmm(X, B, X, beta=a)
    return X.mT if tall else X


def make_optimizers(groups, betas):
    """
    The groups of a model's param_groups() -> an optimizer for every kind among them: "adamw",
    "muon", "sparse" (LazyAdam), "rows" (RowAdamW). A group keeps its rate and weight decay as
    base_lr and base_decay for the schedules.
    """
    kinds = {
        "adamw": functools.partial(torch.optim.AdamW, betas=betas, fused=True),
        "muon": Muon,
        "sparse": functools.partial(LazyAdam, betas=betas),
        "rows": functools.partial(RowAdamW, betas=betas),
    }
    for group in groups:
        if group["kind"] not in kinds:
            raise ValueError(f"kind must be one of {', '.join(kinds)}, got {group['kind']!r}")
    optimizers = []
    for kind, optimizer in kinds.items():
        asked = [{**group, "base_lr": group["lr"], "base_decay": group["weight_decay"]}
                 for group in groups if group["kind"] == kind and group["params"]]
        if asked:
            optimizers.append(optimizer(asked))
    return optimizers


def clip_grads(params, max_norm):
    """Norm over dense and coalesced row-sparse gradients; scales them in place when it exceeds
    max_norm > 0. -> the norm, a tensor.
    """
    grads = [p.grad for p in params if p.grad is not None]
    if not grads:
        return torch.zeros(())
    grads = [grad._values() if grad.is_sparse else grad for grad in grads]
    norms = [norm.to(grads[0].device) for norm in torch._foreach_norm(grads)]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    if max_norm > 0:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for device in {grad.device for grad in grads}:         # a bank may be in host memory
            mine = [grad for grad in grads if grad.device == device]
            torch._foreach_mul_(mine, scale.to(device))
    return norm


def average_sparse(grad):
    """Mean over processes of a coalesced row-sparse gradient, which DDP cannot reduce: everyone's
    rows and values are gathered, padded to the longest, and summed.
    """
    import torch.distributed as dist
    count = torch.tensor([grad._nnz()], device=grad.device)
    counts = [torch.zeros_like(count) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, count)
    counts = torch.cat(counts).tolist()
    longest = max(counts)

    def of_everyone(t):
        padded = t.new_zeros(longest, *t.shape[1:])
        padded[:t.shape[0]] = t
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded)
        return torch.cat([part[:n] for part, n in zip(parts, counts)])

    rows = of_everyone(grad._indices()[0])
    values = of_everyone(grad._values()) / len(counts)
    mean = torch.sparse_coo_tensor(rows[None], values, grad.shape, check_invariants=False)
    return mean.coalesce()


# ================================================================ training on a CPU
# There a step waits for memory. The first three have the gradients that torch gives them, from
# fewer passes over the activations; on a GPU torch.compile fuses the plain expressions. "Of its
# time" is of the plain expression's, forward and backward, on one thread of a Xeon.

class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, eps):
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=acc_dtype(x))
        mean_square = norm.square() / x.size(-1)
        scale = (mean_square + eps).rsqrt().to(x.dtype)
        y = x * scale
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx, grad):
        only_once("rms_norm")
        y, scale = ctx.saved_tensors
        mean = (grad * y).mean(-1, keepdim=True)
        d_x = torch.addcmul(grad, y, mean, value=-1).mul_(scale)    # scale * (grad - y * mean)
        return d_x, None


class ReLUSquared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        r = x.relu()
        ctx.save_for_backward(r)
        return r * r

    @staticmethod
    def backward(ctx, grad):
        only_once("relu_squared")
        r, = ctx.saved_tensors
        return (grad * r).mul_(2)


class ScaledSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, x, b, y):
        ctx.save_for_backward(a, x, b, y)
        return (x * a).addcmul_(y, b)

    @staticmethod
    def backward(ctx, grad):
        a, x, b, y = ctx.saved_tensors
        g = grad.reshape(-1)
        d_a = torch.dot(g, x.reshape(-1))
        d_b = torch.dot(g, y.reshape(-1))
        return d_a, grad * a, d_b, grad * b


def rms_norm(x: Tensor, weight: Optional[Tensor] = None, eps: Optional[float] = None) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last axis, on a CPU in half of F.rms_norm's
    time. eps None: there finfo(x.dtype).eps, as its documentation says. (On a GPU torch takes
    fp32's, in bf16 too: 1.2e-7 instead of 0.0078.)
    """
    if weight is not None:
        weight = weight.to(x.dtype)    # mixed types have no fused path
    if x.device.type != "cpu":
        return F.rms_norm(x, (x.size(-1),), weight, eps)
    y = RMSNorm.apply(x, torch.finfo(x.dtype).eps if eps is None else eps)
    return y if weight is None else y * weight


def relu_squared(x: Tensor) -> Tensor:
    """relu(x)^2, on a CPU in 0.6 of torch's time, 0.8 in bf16."""
    if x.device.type == "cpu":
        return ReLUSquared.apply(x)
    return F.relu(x).square()


def scaled_sum(a: Tensor, x: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """a*x + b*y for two scalars a, b and two tensors of one shape and dtype, in 0.7 of its time. In
    bf16 it would take three times as long.
    """
    plain = torch.compiler.is_compiling()     # which fuses this, and refuses one tensor as x and y
    if x.device.type == "cpu" and x.dtype != torch.bfloat16 and not plain:
        return ScaledSum.apply(a, x, b, y)
    return a * x + b * y


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor] = None) -> Tensor:
    """Attention of the last T positions to all S but those ahead of them; with mask (B, 1, T, S),
    bool, to those that it allows, none of them ahead. q (B, T, H, d_h), k and v (B, S, H_kv, d_h)
    -> (B, T, H*d_h).
    """
    B, T, H, d_h = q.shape
    S = k.size(1)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    causal = mask is None and T == S
    if mask is None and 1 < T < S:
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    slow = q.requires_grad and q.dtype == torch.bfloat16 and q.device.type == "cpu"
    if slow and 0 < T == S <= 1024:
        y = attend_in_blocks(q, k, v, mask)
    else:
        # Under torch.compile a comparison of sizes may be a symbol, which this operation refuses.
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=True if causal and T > 1 else False,
            enable_gqa=True if k.size(1) != H else False)
    return y.transpose(1, 2).reshape(B, T, H * d_h)


def attend_in_blocks(q, k, v, mask=None, rows=128):
    """Causal attention, `rows` queries at a time, each block with the keys up to its end. For 4 x
    256 tokens with 6 heads of 64 forward and backward take 13 ms in bf16, torch's own 29 (in fp32
    25 both; one thread of an EPYC with avx512_bf16); from 2,048 tokens on torch's is faster.
    q (B, H, T, d_h), k and v (B, H_kv, T, d_h) -> (B, H, T, d_h)
    """
    T = q.size(2)
    group = q.size(1) // k.size(1)
    if group > 1:
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    if mask is None:
        mask = torch.ones(1, 1, T, T, dtype=torch.bool).tril()
    bias = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -math.inf)
    q = q * q.size(3) ** -0.5
    blocks = []
    for start in range(0, T, rows):
        end = min(start + rows, T)
        scores = q[:, :, start:end] @ k[:, :, :end].mT
        weights = (scores + bias[:, :, start:end, :end]).softmax(-1)
        blocks.append(weights @ v[:, :, :end])
    return torch.cat(blocks, 2)


def keep_freed_memory() -> bool:
    """glibc returns large tensors to the system and faults them in again in every step: tell it not
    to. False without glibc.

    zeros(2^20, 64) takes 34 ms with this and 126 without, the plain relu(x)^2 of (1024, 8192) 11
    and 39. It also asks for huge pages, with which a step on a few rows of a table takes the same
    time at 4 million rows as at 262,144 (without them up to twice as long); torch reads that
    variable at its first allocation.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    libc = ctypes.CDLL(None)
    if not libc.mallopt(-3, 2**30):    # M_MMAP_THRESHOLD
        libc.mallopt(-3, 2**25)    # the most that an older glibc takes
    libc.mallopt(-1, 2**31 - 1)    # M_TRIM_THRESHOLD
    libc.mallopt(-2, 2**28)    # M_TOP_PAD
    return True


@functools.cache
def bf16_speedup() -> float:
    """How many times faster than fp32 this CPU multiplies bf16. The features that it reports do not
    tell: on a Xeon with avx512_bf16 (without AMX) it was 0.5, and a step took 1.3 to 1.7 times as
    long in bf16.
    """
    factors = [torch.ones(256, 256, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    seconds = [math.inf, math.inf]
    for _ in range(7):    # in turns, the best of each: other processes only slow a turn down
        for n, x in enumerate(factors):
            start = time.perf_counter()
            x @ x
            seconds[n] = min(seconds[n], time.perf_counter() - start)
    return seconds[0] / seconds[1]


def fast_dtype(device: str) -> tuple[str, str]:
    """bfloat16 where this device multiplies it faster, else float32; and why."""
    if device.startswith("cuda"):
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bfloat16", "this GPU has it"
        return "float32", "this GPU has no bfloat16"
    if device != "cpu":
        return "float32", f"bfloat16 was not tried on {device}"
    speedup = bf16_speedup()
    faster = "bfloat16" if speedup > 1.2 else "float32"
    return faster, f"products in bfloat16 run at {speedup:.2g} times float32's pace"
