"""The sparse-memory operations: Triton kernels, pure-torch fallbacks, one dispatch rule.

A memory layer is a search and a sum. The search picks k of the N rows of a table for each of P queries:

    product_key_topk    the k largest s_row[i] + s_col[j] of an n x n grid                  (MIDUS, PKM, Memory+, PEER)
    tucker_topk         the m largest sum_xy s_row[x,i] core[x,y] s_col[y,j]                (UltraMem, UltraMemV2)

The sum reads these rows. It and its gradients are sums over the same P*k triples (query p, slot u, row j = indices[p,u]); they differ
only in where the result goes, so three sums are closed under differentiation:

    to the queries      y[p]   = sum_u w[p,u] table[j]                gather_sum; also gather_dot's gradient for x
    to the pairs        s[p,u] = <table[j], x[p]>                     gather_dot; also gather_sum's gradient for the weights
    to the rows         G[j]   = sum of w[p,u] g[p] over (p,u) -> j   the gradient of both for the table (MIDUS Algorithm 1)

The third is the hard one, since many queries may hit one row. The P*k indices are sorted, which makes a row's hits one run, and each row
is written once: no atomics (the gradient is bitwise the same in every run), no (P*k, d) tensor, and with sparse_grad=True nothing of the
table's size. mix_values (MoVE) is gather_sum over bank rows that gather_rows has read once for all layers.

Sums run in fp32 whatever the inputs (in fp64 if one is fp64). use_triton is the one place of dispatch: CUDA tensors go to Triton, all else
to torch; NANOMEM_KERNELS=torch|triton forces one, and with TRITON_INTERPRET=1 Triton runs on CPU tensors too. NANOMEM_DEBUG=1 checks that
indices are in range.

python kernels.py [--json=PATH] [--quick]      times every operation against the obvious torch way
"""
import ctypes
import functools
import itertools
import json
import math
import os
import platform
import sys
import time
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl
    jit = triton.jit
except ImportError:                                  # no Triton on this system: the kernels below are never launched
    class tl:
        constexpr = int
    triton, jit = None, lambda kernel: kernel

BACKEND = os.environ.get("NANOMEM_KERNELS", "")      # "" | "torch" | "triton"
DEBUG = os.environ.get("NANOMEM_DEBUG", "") not in ("", "0")


def use_triton(*tensors: Optional[Tensor]) -> bool:
    """The dispatch rule. fp64 always takes the torch path, which is the reference."""
    if BACKEND not in ("", "torch", "triton"):
        raise ValueError(f"NANOMEM_KERNELS={BACKEND!r}: use torch or triton, or leave it unset")
    if BACKEND == "triton" and triton is None:
        raise RuntimeError("NANOMEM_KERNELS=triton, but there is no Triton: pip install triton, or unset it")
    if BACKEND == "torch" or triton is None or acc_dtype(*tensors) == torch.float64:
        return False
    if BACKEND == "triton" and not tensors[0].is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("NANOMEM_KERNELS=triton on CPU tensors needs TRITON_INTERPRET=1, set before kernels.py is imported")
    return BACKEND == "triton" or tensors[0].is_cuda


def acc_dtype(*tensors: Optional[Tensor]) -> torch.dtype:
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def operator(fake):
    """Make a function a torch operator: opaque to torch.compile, which asks `fake` for the results' shapes."""
    def register(function):
        op = torch.library.custom_op(f"nanomem::{function.__name__}", function, mutates_args=())
        op.register_fake(fake)
        return op
    return register


def require(ok: bool, message: str):
    if not ok:
        raise ValueError(message)


def describe(t: Optional[Tensor]) -> str:
    return "None" if t is None else f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"


def check_integers(name: str, t: Tensor, shape: tuple, below: int):
    require(t.shape == shape and t.dtype in (torch.int32, torch.int64),
            f"{name} must be {shape} int32 or int64, got {describe(t)}")
    if DEBUG and t.numel():                                                            # costs a synchronisation
        low, high = (int(v) for v in t.aminmax())
        require(0 <= low and high < below, f"{name} must lie in [0, {below}), found {low if low < 0 else high}")


def power_of_2(n: int, at_least: int = 2) -> int:
    return max(at_least, 1 << (n - 1).bit_length())


# ================================================================ search: product keys

@functools.lru_cache(maxsize=64)
def staircase(k: int, n: int, device: torch.device) -> Tensor:
    """The pairs of ranks (i, j), from 0 to n-1, with (i+1)(j+1) <= k: about k ln k of them. -> (2, C) int64.

    The k best sums of two descending lists lie among them: order all pairs by descending score, ties by (i, j). The (i+1)(j+1) - 1 others
    (i' <= i, j' <= j) score no less than (i, j) and stand before it; so if (i+1)(j+1) > k, it is not one of the first k.
    """
    pairs = [(i, j) for i in range(min(k, n)) for j in range(min(k // (i + 1), n))]
    return torch.tensor(pairs, device=device).t().contiguous()


def product_key_search_torch(s_row, s_col, k, fused):
    s_row, s_col, n = s_row.to(acc_dtype(s_row)), s_col.to(acc_dtype(s_col)), s_row.shape[1]
    if fused:
        best = (s_row[:, :, None] + s_col[:, None, :]).flatten(1).topk(k).indices      # (P, k) of the n x n grid
        return best // n, best % n
    (row, i), (col, j) = s_row.topk(min(k, n)), s_col.topk(min(k, n))                 # descending, and their indices
    a, b = staircase(k, n, s_row.device)
    best = (row.index_select(1, a) + col.index_select(1, b)).topk(k).indices          # (P, k) of the C candidates
    return i.gather(1, a[best]), j.gather(1, b[best])


# Top-k inside a Triton program: a score and its index travel as one int64, the score in the upper half, so that sorting these sorts the
# scores. The bits of fp32 compare like integers once those of negative numbers are flipped. PADDING loses to every score, to -inf too.

PADDING = tl.constexpr(-2**63)


@jit
def pack(score, index):
    bits = score.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | index.to(tl.int64)


@jit
def unpack_score(packed):
    bits = (packed >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


# One program owns BLOCK_P queries. It reads their n row and n column scores, sorts the Top-k of each into `lists`, (P, 2, K2) scratch from
# which it picks the staircase candidates by their ranks (FUSED: forms all n x n pairs instead, MIDUS G.1), and writes row and column of the
# k best. A pair travels as row << 16 | column. N2, K2, C2, O2: n, the ranks kept, the number of candidates C, and k, as powers of two.
@jit
def product_key_kernel(s_row, s_col, ranks, lists, rows, cols, P, n, k, C, N2: tl.constexpr, K2: tl.constexpr, C2: tl.constexpr,
                       O2: tl.constexpr, BLOCK_P: tl.constexpr, FUSED: tl.constexpr):
    p = (tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P))[:, None]
    c, u = tl.arange(0, C2)[None, :], tl.arange(0, O2)[None, :]
    candidate = (p < P) & (c < C)
    if FUSED:
        i, j = c // n, c % n
        score = (tl.load(s_row + p * n + i, mask=candidate, other=0.0).to(tl.float32)
                 + tl.load(s_col + p * n + j, mask=candidate, other=0.0).to(tl.float32))
    else:
        x, r = tl.arange(0, N2)[None, :], tl.arange(0, K2)[None, :]
        ok = (p < P) & (x < n)
        row = tl.where(ok, pack(tl.load(s_row + p * n + x, mask=ok, other=0.0).to(tl.float32), x), PADDING)
        col = tl.where(ok, pack(tl.load(s_col + p * n + x, mask=ok, other=0.0).to(tl.float32), x), PADDING)
        tl.store(lists + p * (2 * K2) + r, tl.topk(row, K2), mask=p < P)
        tl.store(lists + p * (2 * K2) + K2 + r, tl.topk(col, K2), mask=p < P)
        tl.debug_barrier()                                                            # now its threads see each other's ranks
        row = tl.load(lists + p * (2 * K2) + tl.load(ranks + c, mask=c < C, other=0), mask=candidate, other=0)
        col = tl.load(lists + p * (2 * K2) + K2 + tl.load(ranks + C + c, mask=c < C, other=0), mask=candidate, other=0)
        i, j, score = row & 0xFFFF, col & 0xFFFF, unpack_score(row) + unpack_score(col)
    best = tl.topk(tl.where(candidate, pack(score, (i << 16) | j), PADDING), O2)
    tl.store(rows + p * k + u, (best >> 16) & 0xFFFF, mask=(p < P) & (u < k))
    tl.store(cols + p * k + u, best & 0xFFFF, mask=(p < P) & (u < k))


@operator(lambda s_row, s_col, k, fused: tuple(s_row.new_empty(len(s_row), k, dtype=torch.int64) for _ in range(2)))
def product_key_search(s_row: Tensor, s_col: Tensor, k: int, fused: bool) -> tuple[Tensor, Tensor]:
    if not use_triton(s_row, s_col):
        return product_key_search_torch(s_row, s_col, k, fused)
    P, n = s_row.shape
    ranks, rows, cols = staircase(k, n, s_row.device), *(s_row.new_empty(P, k, dtype=torch.int64) for _ in range(2))
    C, K2 = n * n if fused else ranks.shape[1], power_of_2(min(k, n))
    N2, C2 = power_of_2(n, K2), power_of_2(C)
    BLOCK_P, lists = max(1, 2048 // max(N2, C2)), ranks if fused else ranks.new_empty(P, 2, K2)
    if P:
        product_key_kernel[(triton.cdiv(P, BLOCK_P),)](s_row.contiguous(), s_col.contiguous(), ranks, lists, rows, cols, P, n,
                                                       k, C, N2, K2, C2, power_of_2(k), BLOCK_P, fused)
    return rows, cols


FUSED_BELOW = 8192   # P*n*n below which one Top-k over the whole grid beats the two stages on CPU (by some 10 us a call)


def product_key_topk(s_row: Tensor, s_col: Tensor, k: int, fused: Optional[bool] = None) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest s_row[p,i] + s_col[p,j] of the n x n grid: two-stage search with staircase pruning (MIDUS eqs. 13-15).

    s_row, s_col (P, n) float, 1 <= k <= n*n -> scores (P, k) fp32 (fp64 for fp64), descending; rows i and columns j, (P, k) int64: row
    i*n + j of the table. Gradients flow through the scores into s_row and s_col. Of equal scores any may be picked; NaN, and +inf together
    with -inf, are outside the promise. fused=True searches the whole grid at once (MIDUS G.1; n <= 128). None chooses: on CPU by
    FUSED_BELOW, on CUDA two stages, which are one launch here.
    """
    require(s_row.dim() == 2 and s_row.shape == s_col.shape and s_row.is_floating_point() and s_col.is_floating_point(),
            f"s_row and s_col must both be (P, n) float, got {describe(s_row)} and {describe(s_col)}")
    P, n = s_row.shape
    require(n < 2**16, f"s_row and s_col: n must be below 65,536, got {n}")
    require(1 <= k <= n * n, f"k must lie in [1, n*n] = [1, {n * n}], got {k}")
    require(not fused or n <= 128, f"fused=True holds the whole grid and takes n <= 128, got {n}: use fused=None")
    if fused is None:
        fused = not s_row.is_cuda and P * n * n <= FUSED_BELOW and n <= 128
    rows, cols = product_key_search(s_row.detach(), s_col.detach(), k, fused)
    return pick(s_row, rows) + pick(s_col, cols), rows, cols


# A search returns indices. The scores are read again by pick, so that one rule gives every search its gradient.

@operator(lambda s, index: s.new_empty(index.shape, dtype=acc_dtype(s)))
def pick(s: Tensor, index: Tensor) -> Tensor:
    """s (Q, n), index (Q, k) -> s[q, index[q,u]] (Q, k) fp32 (fp64). ds[q,i] = sum of g[q,u] over the u with index[q,u] = i."""
    return s.gather(1, index).to(acc_dtype(s))


def pick_setup(ctx, inputs, output):
    s, index = inputs
    ctx.n, ctx.dtype = s.shape[1], s.dtype
    ctx.save_for_backward(index)


def pick_backward(ctx, grad):
    index, = ctx.saved_tensors
    return scatter_scores(grad, index, ctx.n).to(ctx.dtype), None


pick.register_autograd(pick_backward, setup_context=pick_setup)


# One program owns BLOCK_Q queries x BLOCK_N of their n scores and walks over the K picks: no two programs write one score.
@jit
def scatter_scores_kernel(grad, index, out, Q, n, K: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr):
    q = tl.program_id(0).to(tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    i = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_Q, BLOCK_N], tl.float32)
    for u in range(K):
        pick = tl.load(index + q * K + u, mask=q < Q, other=-1)
        g = tl.load(grad + q * K + u, mask=q < Q, other=0.0)
        total += tl.where(pick[:, None] == i[None, :], g[:, None], 0.0)
    tl.store(out + q[:, None] * n + i[None, :], total, mask=(q < Q)[:, None] & (i < n)[None, :])


@operator(lambda grad, index, n: grad.new_empty(grad.shape[0], n))
def scatter_scores(grad: Tensor, index: Tensor, n: int) -> Tensor:
    if not use_triton(grad):
        return grad.new_zeros(grad.shape[0], n).scatter_add_(1, index, grad)
    (Q, k), out, BLOCK_N = grad.shape, grad.new_empty(grad.shape[0], n), min(power_of_2(n), 128)
    BLOCK_Q = 1024 // BLOCK_N
    if Q:
        grid = (triton.cdiv(Q, BLOCK_Q), triton.cdiv(n, BLOCK_N))
        scatter_scores_kernel[grid](grad.contiguous(), index.contiguous(), out, Q, n, k, BLOCK_Q, BLOCK_N)
    return out


# ================================================================ search: Tucker scores

def tucker_search_torch(s_row, s_col, u, v, core_sum, m_key, m):
    P, R, r, n = s_row.shape
    s_row, s_col, u, v, core_sum = (t.to(acc_dtype(s_row)) for t in (s_row, s_col, u, v, core_sum))
    i = (u[..., None] * s_row).sum(2).topk(m_key).indices                             # (P, R, m_key)
    j = (v[..., None] * s_col).sum(2).topk(m_key).indices
    row, col = (s.gather(3, x[:, :, None].expand(P, R, r, m_key)) for s, x in ((s_row, i), (s_col, j)))
    with torch.autocast(s_row.device.type, enabled=False):
        best = (row.transpose(2, 3) @ core_sum @ col).flatten(2).topk(m).indices      # (P, R, m) of the m_key x m_key grid
    return i.gather(2, best // m_key), j.gather(2, best % m_key)


# One program owns one query and one retrieval head. It projects the RANK x n scores of both sides on u and v, keeps the m_key best rows
# and columns, reads their scores again (from the cache), builds the m_key x m_key Tucker grid in registers and writes row and column
# of its m best.
@jit
def tucker_kernel(s_row, s_col, u, v, core_sum, rows, cols, n, m_key, m, HEADS, RANK: tl.constexpr, N2: tl.constexpr,
                  M2: tl.constexpr, O2: tl.constexpr):
    query, head = tl.program_id(0).to(tl.int64), tl.program_id(0) % HEADS             # queries count (p, head)
    s_row += query * RANK * n
    s_col += query * RANK * n
    x, o, ok = tl.arange(0, N2), tl.arange(0, O2), tl.arange(0, M2) < m_key
    a, b = tl.zeros([N2], tl.float32), tl.zeros([N2], tl.float32)
    for r in tl.static_range(RANK):
        a += tl.load(u + head * RANK + r) * tl.load(s_row + r * n + x, mask=x < n, other=0.0).to(tl.float32)
        b += tl.load(v + head * RANK + r) * tl.load(s_col + r * n + x, mask=x < n, other=0.0).to(tl.float32)
    i = tl.where(ok, tl.topk(tl.where(x < n, pack(a, x), PADDING), M2) & 0xFFFF, 0)   # (M2,)
    j = tl.where(ok, tl.topk(tl.where(x < n, pack(b, x), PADDING), M2) & 0xFFFF, 0)
    grid = tl.zeros([M2, M2], tl.float32)
    for r in tl.static_range(RANK):
        row = tl.load(s_row + r * n + i).to(tl.float32)
        for c in tl.static_range(RANK):
            col = tl.load(core_sum + (head * RANK + r) * RANK + c) * tl.load(s_col + c * n + j).to(tl.float32)
            grid += row[:, None] * col[None, :]
    packed = tl.where(ok[:, None] & ok[None, :], pack(grid, (i << 16)[:, None] | j[None, :]), PADDING)
    best = tl.topk(tl.reshape(packed, [M2 * M2]), O2)
    tl.store(rows + query * m + o, (best >> 16) & 0xFFFF, mask=o < m)
    tl.store(cols + query * m + o, best & 0xFFFF, mask=o < m)


@operator(lambda s_row, s_col, u, v, core_sum, m_key, m:
          tuple(s_row.new_empty(*s_row.shape[:2], m, dtype=torch.int64) for _ in range(2)))
def tucker_search(s_row: Tensor, s_col: Tensor, u: Tensor, v: Tensor, core_sum: Tensor, m_key: int,
                  m: int) -> tuple[Tensor, Tensor]:
    if not use_triton(s_row, s_col):
        return tucker_search_torch(s_row, s_col, u, v, core_sum, m_key, m)
    (P, R, r, n), M2 = s_row.shape, power_of_2(m_key)
    rows, cols = (s_row.new_empty(P, R, m, dtype=torch.int64) for _ in range(2))
    if P * R:
        u, v, core_sum = (t.float().contiguous() for t in (u, v, core_sum))
        tucker_kernel[(P * R,)](s_row.contiguous(), s_col.contiguous(), u, v, core_sum, rows, cols, n, m_key, m, R, r,
                                power_of_2(n, M2), M2, power_of_2(m), num_warps=4 if M2 <= 32 else 16)
    return rows, cols


def tucker_topk(s_row: Tensor, s_col: Tensor, u: Tensor, v: Tensor, core: Tensor, m_key: int,
                m: int) -> tuple[Tensor, Tensor]:
    """The m best of Tucker-decomposed scores (UltraMemV2 eqs. 6, 7, 11): a rank-1 prefilter, then the full score.

    s_row, s_col (P, R, r, n): scores of R retrieval heads and r Tucker ranks; core (H, R, r, r); u, v (R, r): leading singular vectors of
    core.sum(0) -> raw scores (P, R, m, H) fp32 (fp64 for fp64) and indices i*n + j (P, R, m) int64, in descending order of the sum over H.
        stage 1   the m_key rows i with the largest sum_x u[x] s_row[x,i], and columns j with v and s_col
        stage 2   score[h,i,j] = sum_xy s_row[x,i] core[h,x,y] s_col[y,j] on that grid; the m largest by the sum over h
    Gradients flow through the returned scores into s_row, s_col and core; none through the choice of indices, so none into u and v.
    """
    require(s_row.dim() == 4 and s_row.shape == s_col.shape and s_row.is_floating_point() and s_col.is_floating_point(),
            f"s_row and s_col must both be (P, R, r, n) float, got {describe(s_row)} and {describe(s_col)}")
    P, R, r, n = s_row.shape
    require(u.shape == v.shape == (R, r), f"u and v must be (R, r) = {(R, r)}, got {describe(u)} and {describe(v)}")
    require(core.shape[1:] == (R, r, r), f"core must be (H, R, r, r) with R, r = {(R, r)}, got {describe(core)}")
    require(1 <= m_key <= n < 2**16, f"m_key must lie in [1, n] = [1, {n}], and n below 65,536, got {m_key}")
    require(1 <= m <= m_key**2, f"m must lie in [1, m_key^2] = [1, {m_key**2}], got {m}")
    rows, cols = tucker_search(s_row.detach(), s_col.detach(), u.detach(), v.detach(), core.detach().sum(0), m_key, m)
    row, col = (pick(s.reshape(-1, n), x[:, :, None].expand(P, R, r, m).reshape(-1, m)).view(P, R, r, m)
                for s, x in ((s_row, rows), (s_col, cols)))
    with torch.autocast(s_row.device.type, enabled=False):
        return torch.einsum("prxm,hrxy,prym->prmh", row, core.to(row.dtype), col), rows * n + cols


# ================================================================ the three sums: torch path
# weights are (P, k, H): weight h is for slice h of the row, H slices of d/H columns. blocks is None or (P, k): then query p has
# n_blocks results, and the pair (p, u) belongs to result p*n_blocks + blocks[p,u].

def touched_rows(table, indices, dtype):
    """A table in another dtype is not converted whole, only the rows that are read."""
    if table.dtype == dtype:
        return table.contiguous(), indices.long()
    rows, indices = indices.unique(return_inverse=True)
    return table[rows].to(dtype), indices


def segment_sum(source, index, start, weights):
    """y[s] = sum of weights[e] * source[index[e]] over e in [start[s], start[s+1]); weights (L, H), for H slices of the row.

    source (R, d), index (L,), start (S,) -> (S, d). One embedding_bag with a bag per slice and segment: no (L, d) tensor.
    """
    (L, H), S, d = weights.shape, len(start), source.shape[1]
    h = torch.arange(H, device=source.device)[:, None]
    index = index if H == 1 else (index * H + h).view(-1)
    y = F.embedding_bag(index, source.reshape(-1, d // H), (start + L * h).view(-1), mode="sum",
                        per_sample_weights=weights.t().reshape(-1))                   # (H*S, d/H)
    return y.view(H, S, d // H).transpose(0, 1).reshape(S, d)


def gather_sum_torch(table, indices, weights, blocks, n_blocks, dtype, base, base_weight):
    (P, k, H), d, device, acc = weights.shape, table.shape[1], table.device, acc_dtype(table, weights, base)
    (table, indices), weights = touched_rows(table, indices, acc), weights.to(acc)
    if blocks is None:                                                                # one bag per query and slice
        index = indices[:, None] if H == 1 else indices[:, None] * H + torch.arange(H, device=device)[:, None]
        y = F.embedding_bag(index.reshape(P * H, k), table.view(-1, d // H), mode="sum",
                            per_sample_weights=weights.transpose(1, 2).reshape(P * H, k))
    else:
        bag, order = (torch.arange(P, device=device)[:, None] * n_blocks + blocks).reshape(-1).sort(stable=True)
        start = torch.searchsorted(bag, torch.arange(P * n_blocks, device=device))
        y = segment_sum(table, indices.reshape(-1)[order], start, weights.reshape(-1, H)[order])
    if base is not None:
        weight = 1.0 if base_weight is None else base_weight[..., None].to(acc)
        y = y.view(P, H, d // H) + base.view(P, H, d // H).to(acc) * weight
    return y.view(P * n_blocks, d).to(dtype)


OUT_OF_CACHE = 2**22     # elements; short rows of a larger table are fetched by embedding_bag, which prefetches, unlike the operator below


def gather_dot_torch(table, indices, x, blocks, n_blocks, H, dtype):
    (P, k), d, device, acc = indices.shape, table.shape[1], table.device, acc_dtype(table, x)
    table, indices, h, n = *touched_rows(table, indices, acc), torch.arange(H, device=device), max(1, 8192 // k)
    if device.type == "cpu" and table.numel() > OUT_OF_CACHE and d <= 128 and P > n:
        parts = zip(indices.split(n), x.split(n * n_blocks), [None] * P if blocks is None else blocks.split(n))
        return torch.cat([gather_dot_torch(F.embedding_bag(i.reshape(-1, 1), table, mode="sum"),
                                           torch.arange(i.numel()).view(i.shape), x_part, part, n_blocks, H, dtype)
                          for i, x_part, part in parts])
    result = torch.arange(P, device=device)[:, None] * n_blocks + (0 if blocks is None else blocks)
    index = (indices[..., None] * H + h).reshape(-1)                                  # (P*k*H,) slice of the table
    bag = (result[..., None] * H + h).expand(P, k, H).reshape(-1).contiguous()        # (P*k*H,) slice of x; one query: a view
    # the operator behind embedding_bag's own gradient for its weights: one dot product per entry, no (P*k, d) tensor
    dots = torch.ops.aten._embedding_bag_per_sample_weights_backward(
        x.to(acc).reshape(-1, d // H), table.view(-1, d // H), index, bag[:1], bag, 0, -1)
    return dots.view(P, k, H).to(dtype)


def row_sums_torch(grad, indices, weights, blocks, n_blocks, order, n_rows, dtype, sparse):
    (P, k, H), keys, acc = weights.shape, indices.reshape(-1)[order], acc_dtype(grad, weights)
    rows, count = keys.unique_consecutive(return_counts=True) if sparse else (None, torch.bincount(keys, minlength=n_rows))
    result = order // k * n_blocks + (0 if blocks is None else blocks.reshape(-1)[order])
    start, weights = count.cumsum(0) - count, weights.reshape(-1, H)[order].to(acc)
    return rows, segment_sum(grad.to(acc), result, start, weights).to(dtype)          # a row that was not hit: an empty bag, 0


# ================================================================ the three sums: Triton path
# A program works on BLOCK_D columns of one of the H slices, which are D = d/H wide. Weights are read through their strides, so that a
# sliced or transposed gate is not copied. Row numbers are int64 before they are multiplied: N*d exceeds 2^31 soon.

# To the queries. One program owns BLOCK_P queries x BLOCK_D columns of their result. It walks over the K retrieved rows, reading in
# each step one row per query (neighbouring columns: coalesced), and writes its tile once. E > 1: it sums only the rows of one of E
# blocks and reads no other. BASE: start from the query's own row of `base` (1), or from that row times base_weight (2; MoVE's g_0 * V).
@jit
def gather_sum_kernel(table, indices, weights, blocks, base, base_weight, out, P, w_p, w_u, w_h, b_p, b_h, K: tl.constexpr,
                      H: tl.constexpr, E: tl.constexpr, D: tl.constexpr, BASE: tl.constexpr, BLOCK_P: tl.constexpr,
                      BLOCK_D: tl.constexpr):
    parts: tl.constexpr = E * H * ((D + BLOCK_D - 1) // BLOCK_D)                      # programs with the same queries
    part = tl.program_id(0) % parts
    p = (tl.program_id(0) // parts).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    e, h, c = part % E, part // E % H, part // (E * H) * BLOCK_D + tl.arange(0, BLOCK_D)
    ok, ok_c, col = p < P, (c < D)[None, :], (h * D + c)[None, :]
    total = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    if BASE > 0:
        total += tl.load(base + p[:, None] * (H * D) + col, mask=ok[:, None] & ok_c, other=0.0).to(tl.float32)
    if BASE == 2:
        total *= tl.load(base_weight + p * b_p + h * b_h, mask=ok, other=0.0).to(tl.float32)[:, None]
    for u in tl.range(0, K, loop_unroll_factor=4):
        use = ok
        if E > 1:
            use = ok & (tl.load(blocks + p * K + u, mask=ok, other=-1) == e)
        row = tl.load(indices + p * K + u, mask=use, other=0).to(tl.int64)
        weight = tl.load(weights + p * w_p + u * w_u + h * w_h, mask=use, other=0.0).to(tl.float32)
        values = tl.load(table + row[:, None] * (H * D) + col, mask=use[:, None] & ok_c, other=0.0)
        total += weight[:, None] * values.to(tl.float32)
    tl.store(out + (p * E + e)[:, None] * (H * D) + col, total, mask=ok[:, None] & ok_c)


# To the pairs. One program owns one slice of BLOCK_P queries and walks over their K rows: it reads a row and the query's x (which stays
# in the cache), reduces over the columns and writes one number per query and row.
@jit
def gather_dot_kernel(table, indices, x, blocks, out, P, K: tl.constexpr, H: tl.constexpr, E: tl.constexpr, D: tl.constexpr,
                      BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr):
    h = tl.program_id(0) % H
    p = (tl.program_id(0) // H).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    ok = p < P
    for u in tl.range(0, K, loop_unroll_factor=4):
        row = tl.load(indices + p * K + u, mask=ok, other=0).to(tl.int64)
        result = p * E
        if E > 1:
            result += tl.load(blocks + p * K + u, mask=ok, other=0)
        total = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
        for first in range(0, D, BLOCK_D):
            c = first + tl.arange(0, BLOCK_D)
            mask, col = ok[:, None] & (c < D)[None, :], (h * D + c)[None, :]
            values = tl.load(table + row[:, None] * (H * D) + col, mask=mask, other=0.0).to(tl.float32)
            total += values * tl.load(x + result[:, None] * (H * D) + col, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + (p * K + u) * H + h, tl.sum(total, 1), mask=ok)


# To the rows. `keys` are the L = P*K indices in sorted order, so that the hits of a row are one run of equal keys. A window is C
# consecutive positions of it; one program owns one window x BLOCK_D columns whatever the runs are: a row hit by every query is spread
# over L/C programs. The program gathers the window's weighted gradients into a C x BLOCK_D tile and multiplies it by the C x C matrix
# of equal keys: then every position holds the sum over its run, as far as the run lies in the window, and the run's last position
# writes it. A run inside the window goes to its row of `out`, which nobody else writes; one that came in from the window before goes to
# partial[w, 0], one that starts here and goes on to partial[w, 1]. (inf or NaN in one gradient spreads to its window, since 0 * inf is
# NaN: such a step is lost anyway.)
@jit
def row_sums_kernel(grad, keys, order, dest, weights, blocks, out, partial, L, w_p, w_u, w_h, K: tl.constexpr,
                    H: tl.constexpr, E: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BLOCK_D: tl.constexpr):
    parts: tl.constexpr = H * ((D + BLOCK_D - 1) // BLOCK_D)
    part = tl.program_id(0) % parts
    w, t = (tl.program_id(0) // parts).to(tl.int64), tl.arange(0, C)
    h, c, e = part % H, part // H * BLOCK_D + tl.arange(0, BLOCK_D), w * C + t        # e: sorted positions
    ok, ok_c, col = e < L, (c < D)[None, :], (h * D + c)[None, :]
    key = tl.load(keys + e, mask=ok, other=-1)
    entry = tl.load(order + e, mask=ok, other=0)
    p, u = entry // K, entry % K
    result = p * E
    if E > 1:
        result += tl.load(blocks + entry, mask=ok, other=0)
    weight = tl.load(weights + p * w_p + u * w_u + h * w_h, mask=ok, other=0.0).to(tl.float32)
    g = tl.load(grad + result[:, None] * (H * D) + col, mask=ok[:, None] & ok_c, other=0.0).to(tl.float32)
    same = (key[:, None] == key[None, :]).to(tl.float32)                              # (C, C)
    total = tl.dot(same, g * weight[:, None], input_precision="ieee")                 # (C, BLOCK_D)
    last = ok & ((t == C - 1) | (key != tl.load(keys + e + 1, mask=e + 1 < L, other=-1)))
    came_in = key == tl.load(keys + w * C - 1, mask=w > 0, other=-1)
    goes_on = (key == tl.load(keys + w * C + C, mask=w * C + C < L, other=-1)) & ~came_in
    inside = ~came_in & ~goes_on
    row = tl.load(dest + e, mask=ok, other=0).to(tl.int64)
    tl.store(out + row[:, None] * (H * D) + col, total, mask=(last & inside)[:, None] & ok_c)
    half = 2 * w + goes_on.to(tl.int64)
    tl.store(partial + half[:, None] * (H * D) + col, total, mask=(last & ~inside)[:, None] & ok_c)


# Second step: one program per window x BLOCK_D columns of the whole row (D here). Where a run starts in window w and goes on, the
# program adds partial[w, 1] and the partial[., 0] of the windows that the run covers, BLOCK_W at a time, and writes the row. The others
# have nothing to do.
@jit
def merge_kernel(keys, dest, partial, out, L, W, D: tl.constexpr, C: tl.constexpr, BLOCK_W: tl.constexpr,
                 BLOCK_D: tl.constexpr):
    parts: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    w, c = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts * BLOCK_D + tl.arange(0, BLOCK_D)
    last = w * C + C - 1
    key = tl.load(keys + last, mask=last < L, other=-1)
    goes_on = key == tl.load(keys + last + 1, mask=last + 1 < L, other=-2)
    came_in = key == tl.load(keys + w * C - 1, mask=w > 0, other=-2)
    if goes_on & ~came_in:
        total, first, more = tl.load(partial + (2 * w + 1) * D + c, mask=c < D, other=0.0), w + 1, goes_on
        while more:
            i = first + tl.arange(0, BLOCK_W)
            hit = (i < W) & (key == tl.load(keys + i * C, mask=i < W, other=-1))
            mask = hit[:, None] & (c < D)[None, :]
            total += tl.sum(tl.load(partial + (2 * i)[:, None] * D + c[None, :], mask=mask, other=0.0), 0)
            first, more = first + BLOCK_W, tl.sum(hit.to(tl.int32), 0) == BLOCK_W
        tl.store(out + tl.load(dest + last).to(tl.int64) * D + c, total, mask=c < D)


def column_block(D, largest):
    """The largest power of two that divides D, so that no lane idles; where that is below 32, D rounded up. At most `largest`."""
    divisor = D & -D
    return min(divisor if divisor >= 32 else power_of_2(D, 16), largest)


# ================================================================ the three sums: operations

def sort_indices(indices: Tensor) -> Tensor:
    """indices (P, k) -> (P*k,) int64 that sorts the flattened indices: the `order` of all operations on the same indices."""
    return indices.reshape(-1).to(torch.int32).sort(stable=True).indices              # N < 2^31: half the bytes to sort


def row_sums(grad, indices, weights, blocks, n_blocks, order, n_rows, dtype, sparse):
    """-> the distinct rows that were hit and their sums, if sparse; else anything and the sums of all n_rows rows."""
    order = sort_indices(indices) if order is None else order
    if not use_triton(grad, weights):
        return row_sums_torch(grad, indices, weights, blocks, n_blocks, order, n_rows, dtype, sparse)
    (P, k, H), d, L, C = weights.shape, grad.shape[1], order.numel(), 32
    rows = dest = keys = indices.reshape(-1)[order]
    if sparse:                          # number the distinct rows; how many they are is data, hence one synchronisation
        rows, count = keys.unique_consecutive(return_counts=True)
        dest, n_rows = torch.arange(len(rows), device=keys.device).repeat_interleave(count, output_size=L), len(rows)
    out = (grad.new_empty if sparse else grad.new_zeros)(n_rows, d, dtype=dtype)
    if L:
        W, BLOCK_D, BLOCK_ROW = triton.cdiv(L, C), column_block(d // H, 64), column_block(d, 64)
        partial = grad.new_empty(W, 2, d, dtype=torch.float32)
        row_sums_kernel[(W * H * triton.cdiv(d // H, BLOCK_D),)](
            grad.contiguous(), keys, order, dest, weights, blocks, out, partial, L, *weights.stride(), k, H, n_blocks,
            d // H, C, BLOCK_D)
        merge_kernel[(W * triton.cdiv(d, BLOCK_ROW),)](keys, dest, partial, out, L, W, d, C, 32, BLOCK_ROW)
    return rows, out


@operator(lambda grad, indices, weights, blocks, n_blocks, order, n_rows, dtype:
          grad.new_empty(n_rows, grad.shape[1], dtype=dtype))
def row_sums_dense(grad: Tensor, indices: Tensor, weights: Tensor, blocks: Optional[Tensor], n_blocks: int,
                   order: Optional[Tensor], n_rows: int, dtype: torch.dtype) -> Tensor:
    return row_sums(grad, indices, weights, blocks, n_blocks, order, n_rows, dtype, False)[1]


def coalesced(rows, values, shape):
    return torch.sparse_coo_tensor(rows[None].long(), values, shape, is_coalesced=True, check_invariants=False)


def table_grad(ctx, grad, weights):
    """G[j] = sum of weights[p,u] * grad[p] over the (p, u) with indices[p,u] = j: dense, or COO of the touched rows."""
    table, indices, _, blocks, order = ctx.saved_tensors[:5]
    arguments = grad, indices, weights, blocks, ctx.n_blocks, order, table.shape[0], table.dtype
    return coalesced(*row_sums(*arguments, True), table.shape) if ctx.sparse_grad else row_sums_dense(*arguments)


@operator(lambda table, indices, weights, blocks, n_blocks, order, sparse_grad, dtype, base=None, base_weight=None:
          table.new_empty(indices.shape[0] * n_blocks, table.shape[1], dtype=dtype))
def gather_sum_op(table: Tensor, indices: Tensor, weights: Tensor, blocks: Optional[Tensor], n_blocks: int,
                  order: Optional[Tensor], sparse_grad: bool, dtype: torch.dtype, base: Optional[Tensor] = None,
                  base_weight: Optional[Tensor] = None) -> Tensor:
    if not use_triton(table, weights, base):
        return gather_sum_torch(table, indices, weights, blocks, n_blocks, dtype, base, base_weight)
    (P, k, H), d = weights.shape, table.shape[1]
    out, BLOCK_D = table.new_empty(P * n_blocks, d, dtype=dtype), column_block(d // H, 256)
    BLOCK_P, mode = 1024 // BLOCK_D, 0 if base is None else 1 if base_weight is None else 2
    base = base if base is None else base.contiguous()
    if P:
        gather_sum_kernel[(triton.cdiv(P, BLOCK_P) * n_blocks * H * triton.cdiv(d // H, BLOCK_D),)](
            table.contiguous(), indices.contiguous(), weights, blocks, base, base_weight, out, P, *weights.stride(),
            *(base_weight.stride() if mode == 2 else (0, 0)), k, H, n_blocks, d // H, mode, BLOCK_P, BLOCK_D)
    return out


def gather_sum_setup(ctx, inputs, output):
    table, indices, weights, blocks, ctx.n_blocks, order, ctx.sparse_grad, _, base, base_weight = inputs
    ctx.save_for_backward(table, indices, weights, blocks, order, base, base_weight)


def gather_sum_backward(ctx, grad):
    table, indices, weights, blocks, order, base, base_weight = ctx.saved_tensors
    d_table = d_weights = d_base = d_base_weight = None
    if ctx.needs_input_grad[0]:
        d_table = table_grad(ctx, grad, weights)
    if ctx.needs_input_grad[2]:                                                       # <table[j], grad[p]>, slice by slice
        H = weights.shape[2]
        d_weights = gather_dot_op(table, indices, grad, blocks, ctx.n_blocks, H, order, False, weights.dtype)
    if base is not None:                                                              # mix_values adds base_weight * base
        d_base = grad
    if base_weight is not None:
        (P, H), d = base_weight.shape, base.shape[1]
        g, b = grad.reshape(P, H, d // H), base.reshape(P, H, d // H)
        d_base = (g * base_weight[..., None]).to(base.dtype).view(P, d)
        d_base_weight = (g * b).sum(-1, dtype=acc_dtype(g)).to(base_weight.dtype)
    return d_table, None, d_weights, None, None, None, None, None, d_base, d_base_weight


@operator(lambda table, indices, x, blocks, n_blocks, H, order, sparse_grad, dtype:
          table.new_empty(*indices.shape, H, dtype=dtype))
def gather_dot_op(table: Tensor, indices: Tensor, x: Tensor, blocks: Optional[Tensor], n_blocks: int, H: int,
                  order: Optional[Tensor], sparse_grad: bool, dtype: torch.dtype) -> Tensor:
    if not use_triton(table, x):
        return gather_dot_torch(table, indices, x, blocks, n_blocks, H, dtype)
    (P, k), d = indices.shape, table.shape[1]
    out, BLOCK_D = table.new_empty(P, k, H, dtype=dtype), column_block(d // H, 256)
    BLOCK_P = 1024 // BLOCK_D
    if P:
        gather_dot_kernel[(triton.cdiv(P, BLOCK_P) * H,)](table.contiguous(), indices.contiguous(), x.contiguous(), blocks,
                                                          out, P, k, H, n_blocks, d // H, BLOCK_P, BLOCK_D)
    return out


def gather_dot_setup(ctx, inputs, output):
    table, indices, x, blocks, ctx.n_blocks, _, order, ctx.sparse_grad, _ = inputs
    ctx.save_for_backward(table, indices, x, blocks, order)


def gather_dot_backward(ctx, grad):
    table, indices, x, blocks, order = ctx.saved_tensors
    d_table = table_grad(ctx, x, grad) if ctx.needs_input_grad[0] else None           # x is summed, grad weighs it
    d_x = None
    if ctx.needs_input_grad[2]:                                                       # sum_u grad[p,u] table[j]
        d_x = gather_sum_op(table, indices, grad, blocks, ctx.n_blocks, order, False, x.dtype)
    return d_table, None, d_x, None, None, None, None, None, None


gather_sum_op.register_autograd(gather_sum_backward, setup_context=gather_sum_setup)
gather_dot_op.register_autograd(gather_dot_backward, setup_context=gather_dot_setup)


# A compiled backward cannot build a COO tensor: with sparse_grad=True an operation stays outside the graph, the one documented break.
gather_sum_eager, gather_dot_eager = torch.compiler.disable(gather_sum_op), torch.compiler.disable(gather_dot_op)


def check_gather(table, indices, order):
    require(table.dim() == 2 and table.is_floating_point() and table.shape[0] < 2**31,
            f"table must be (N, d) float with N < 2^31, got {describe(table)}")
    require(indices.dim() == 2 and indices.shape[1] > 0, f"indices must be (P, k) with k > 0, got {describe(indices)}")
    check_integers("indices", indices, tuple(indices.shape), table.shape[0])
    require(order is None or (order.shape == (indices.numel(),) and order.dtype == torch.int64),
            f"order must be sort_indices(indices), ({indices.numel()},) int64, got {describe(order)}")


def gather_sum(table: Tensor, indices: Tensor, weights: Tensor, blocks: Optional[Tensor] = None, n_blocks: int = 1,
               sparse_grad: bool = False, order: Optional[Tensor] = None) -> Tensor:
    """Weighted sum of retrieved rows: y[p] = sum_u weights[p,u] * table[indices[p,u]] (MIDUS G.3, UltraMemV2 eq. 12).

    table (N, d) float; indices (P, k) int32 or int64 in [0, N), repeats allowed; weights (P, k) float -> (P, d) in the weights' dtype.
    weights (P, k, H): weight h is for slice h of the row's H slices of d/H columns. With blocks (P, k) int in [0, n_blocks) the sum is kept
    per block -> (P, n_blocks, d) (UltraMem; UltraMemV2 eq. 9). Gradients: for the weights <table[j], g[p]>; for the table MIDUS Algorithm 1,
    dense, or with sparse_grad=True a coalesced COO tensor of the touched rows (see keep_coalesced), which costs a compiled graph one break.
    order: sort_indices(indices), where several operations share the indices.
    """
    check_gather(table, indices, order)
    if blocks is not None:
        check_integers("blocks", blocks, tuple(indices.shape), n_blocks)
        blocks = blocks.contiguous()
    require(n_blocks >= 1 and (blocks is not None or n_blocks == 1), f"n_blocks goes with blocks, from 1 up; got {n_blocks}")
    require(weights.dim() in (2, 3) and weights.shape[:2] == indices.shape and weights.is_floating_point(),
            f"weights must be {tuple(indices.shape)} float, or with a third axis for H slices, got {describe(weights)}")
    weights = weights if weights.dim() == 3 else weights[..., None]
    require(table.shape[1] % weights.shape[2] == 0, f"weights: H = {weights.shape[2]} does not divide d = {table.shape[1]}")
    op = gather_sum_eager if sparse_grad else gather_sum_op
    y = op(table, indices, weights, blocks, n_blocks, order, sparse_grad, weights.dtype)
    return y if blocks is None else y.view(indices.shape[0], n_blocks, table.shape[1])


def gather_dot(table: Tensor, indices: Tensor, x: Tensor, sparse_grad: bool = False, order: Optional[Tensor] = None) -> Tensor:
    """Dot products with retrieved rows: s[p,u] = <table[indices[p,u]], x[p]> (PEER; the pre-values of UltraMemV2 eq. 15).

    table (N, d) float; indices (P, k) int32 or int64 in [0, N); x (P, d) float -> (P, k) in x's dtype.
    Gradients: dx[p] = sum_u g[p,u] table[j]; for the table, sparse_grad and order as in gather_sum.
    """
    check_gather(table, indices, order)
    require(x.shape == (indices.shape[0], table.shape[1]) and x.is_floating_point(),
            f"x must be (P, d) = {(indices.shape[0], table.shape[1])} float, got {describe(x)}")
    op = gather_dot_eager if sparse_grad else gather_dot_op
    return op(table, indices, x, None, 1, 1, order, sparse_grad, x.dtype).squeeze(2)


def keep_coalesced(parameter: Tensor):
    """Keep parameter.grad a coalesced COO tensor through any number of backward passes (micro-batches) and uses (shared tables).

    Autograd drops the coalesced mark and appends rows; then the optimizer would sort them in every step, which costs more than the gradient.
    """
    def after_accumulation(p):
        if p.grad.is_sparse and not p.grad.is_coalesced():
            rows, values = p.grad._indices()[0], p.grad._values()
            if not bool((rows.diff() > 0).all()):                                     # several gradients: add up equal rows
                flat, ones = values.flatten(1), values.new_ones(len(rows), 1, 1)
                rows, flat = row_sums(flat, rows[:, None], ones, None, 1, None, p.shape[0], values.dtype, True)
                values = flat.view(-1, *values.shape[1:])
            p.grad = coalesced(rows, values, p.shape)

    return parameter.register_post_accumulate_grad_hook(after_accumulation)


# ================================================================ MoVE: a bank read once for all layers

@operator(lambda table, rows, sparse_grad: table.new_empty(len(rows), *table.shape[1:]))
def gather_rows_op(table: Tensor, rows: Tensor, sparse_grad: bool) -> Tensor:
    return table.index_select(0, rows)


def gather_rows_setup(ctx, inputs, output):
    table, rows, ctx.sparse_grad = inputs
    ctx.shape = table.shape
    ctx.save_for_backward(rows)


def gather_rows_backward(ctx, grad):
    rows, = ctx.saved_tensors
    d_table = coalesced(rows, grad, ctx.shape) if ctx.sparse_grad else grad.new_zeros(ctx.shape).index_copy_(0, rows, grad)
    return d_table, None, None


gather_rows_op.register_autograd(gather_rows_backward, setup_context=gather_rows_setup)
gather_rows_eager = torch.compiler.disable(gather_rows_op)


def gather_rows(table: Tensor, rows: Tensor, sparse_grad: bool = False) -> Tensor:
    """table[rows] for distinct rows; the gradient reaches the table once, however many layers use the result.

    table (N, ...); rows (U,) int64, ascending and distinct, as torch.unique returns them -> (U, ...).
    The gradient is dense (zeros and one write of U rows) or, with sparse_grad=True, a coalesced COO tensor of these rows.
    """
    check_integers("rows", rows, (rows.numel(),), table.shape[0])
    require(not DEBUG or bool((rows.diff() > 0).all()), "rows must be ascending and distinct: take them from torch.unique")
    return (gather_rows_eager if sparse_grad else gather_rows_op)(table, rows, sparse_grad)


def mix_order(inverse: Tensor, M: int) -> Tensor:
    """inverse (T,) -> (T*M,): the `order` of mix_values, for callers that sort once for all layers."""
    return sort_indices(inverse[:, None] * M + torch.arange(M, device=inverse.device))


def mix_values(v: Tensor, bank_rows: Tensor, inverse: Tensor, gate: Tensor, gate_v: bool = True,
               order: Optional[Tensor] = None) -> Tensor:
    """MoVE eq. 4: out[t,h] = gate[t,h,0] * v[t,h] + sum_i gate[t,h,i+1] * bank_rows[inverse[t],i,h].

    v (T, H, d_h) float; bank_rows (U, M, H, d_h) or (U, M, H*d_h): the distinct tokens' value rows (gather_rows); inverse (T,) int in
    [0, U); gate (T, H, M+1), or (T, H, M) with gate_v=False: v is added as it is. Dtypes may differ. -> (T, H, d_h) in v's dtype.
    Differentiable in v, bank_rows and gate, without any (T, M, d) tensor. order: mix_order(inverse, M), where layers share inverse.
    """
    require(v.dim() == 3 and v.is_floating_point(), f"v must be (T, H, d_h) float, got {describe(v)}")
    (T, H, d_h), M, U = v.shape, gate.shape[-1] - gate_v, bank_rows.shape[0]
    require(gate.dim() == 3 and gate.shape[:2] == (T, H) and M >= 1,
            f"gate must be (T, H, M + gate_v) with T, H = {(T, H)}, got {describe(gate)}")
    require(bank_rows.shape in ((U, M, H, d_h), (U, M, H * d_h)),
            f"bank_rows must be (U, M, H, d_h) with M, H, d_h = {(M, H, d_h)} as in gate and v, got {describe(bank_rows)}")
    check_integers("inverse", inverse, (T,), U)
    table, indices = bank_rows.reshape(U * M, H * d_h), inverse[:, None] * M + torch.arange(M, device=inverse.device)
    check_gather(table, indices, order)
    return gather_sum_op(table, indices, gate[..., gate_v:].transpose(1, 2), None, 1, order, False, v.dtype,
                         v.reshape(T, H * d_h), gate[..., 0] if gate_v else None).view(T, H, d_h)


# ================================================================ row-sparse gradients in training

class LazyAdam(torch.optim.SparseAdam):
    """torch's SparseAdam, same update and same state, in a third of its time: every touched row is read and written once.

    Lazy: rows without a gradient keep their values and moments, and the bias correction counts the steps of the whole table.
    On a CPU the rows go in chunks of 256k numbers, which stay in its cache. Gradients: COO (keep_coalesced saves a sort a step).
    """

    @torch.no_grad()
    def step(self, closure=None):
        loss = torch.enable_grad()(closure)() if closure is not None else None
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                grad, home = p.grad.coalesce(), getattr(p, "home", None)
                if home is not None:                           # a table that is elsewhere: its rows come, with their moments and counts,
                    table, state = home.fetch(grad._indices()[0])
                    indices = torch.arange(len(table), device=table.device)
                else:
                    table, state, indices = p, self.state[p], grad._indices()[0]
                if not state:
                    state.update(self.no_steps(p), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                self.count(state, indices)
                chunk = max(1, 2**18 * p.shape[0] // p.numel()) if p.device.type == "cpu" else max(1, grad._nnz())
                for rows, g in zip(indices.split(chunk), grad._values().split(chunk)):
                    m = state["exp_avg"].index_select(0, rows).lerp_(g, 1 - beta1)
                    v = state["exp_avg_sq"].index_select(0, rows).mul_(beta2).addcmul_(g, g, value=1 - beta2)
                    state["exp_avg"].index_copy_(0, rows, m)
                    state["exp_avg_sq"].index_copy_(0, rows, v)
                    table.index_copy_(0, rows, self.updated(table.index_select(0, rows), m, v, rows, state, group))
                if home is not None:                           # and go back
                    home.put(grad._indices()[0], table, state)
        return loss

    def no_steps(self, p):
        return {"step": 0}

    def count(self, state, rows):
        state["step"] += 1

    def updated(self, w, m, v, rows, state, group):
        """w, m, v: the rows and their moments, to be overwritten. -> the rows after the step."""
        (beta1, beta2), t = group["betas"], state["step"]
        return w.addcdiv_(m, v.sqrt_().add_(group["eps"]), value=-group["lr"] * math.sqrt(1 - beta2**t) / (1 - beta1**t))


class RowAdamW(LazyAdam):
    """AdamW row by row: a row with a gradient gets torch.optim.AdamW's update, its bias corrected for the steps of this row; the others keep
    values, moments and counts. For tables whose rows are models of their own, visited at different rates (hierarchical memories).
    A table that is not on the device has p.home: fetch(rows) -> (rows, their state), and put(rows, rows', state) after the step."""

    def no_steps(self, p):
        return {"steps": p.new_zeros(len(p))}

    def count(self, state, rows):
        state["steps"].index_add_(0, rows, torch.ones_like(rows, dtype=state["steps"].dtype))

    def updated(self, w, m, v, rows, state, group):
        t = state["steps"][rows].view(-1, *[1] * (w.dim() - 1))
        m, v = (moment.div_(1 - beta**t) for moment, beta in zip((m, v), group["betas"]))
        return w.mul_(1 - group["lr"] * group.get("weight_decay", 0)).addcdiv_(m, v.sqrt_().add_(group["eps"]), value=-group["lr"])


def clip_grads(params, max_norm):
    """Norm over dense and coalesced row-sparse gradients; scales them in place when it exceeds max_norm > 0. Returns the norm, a tensor."""
    grads = [p.grad._values() if p.grad.is_sparse else p.grad for p in params if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
    if max_norm > 0:
        torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def average_sparse(grad):
    """Mean over processes of a coalesced row-sparse gradient, which DDP cannot reduce: everyone's rows and values are gathered,
    padded to the longest, and summed."""
    import torch.distributed as dist
    world, count = dist.get_world_size(), torch.tensor([grad._nnz()], device=grad.device)
    counts = [torch.zeros_like(count) for _ in range(world)]
    dist.all_gather(counts, count)
    parts = []
    for t in (grad._indices()[0], grad._values()):
        padded = torch.cat([t, t.new_zeros(int(max(counts)) - len(t), *t.shape[1:])])
        everyone = [torch.empty_like(padded) for _ in range(world)]
        dist.all_gather(everyone, padded)
        parts.append(torch.cat([g[:int(n)] for g, n in zip(everyone, counts)]))
    return torch.sparse_coo_tensor(parts[0][None], parts[1] / world, grad.shape, check_invariants=False).coalesce()


# ================================================================ the head: linear layer and cross-entropy in one

SLICE = 2**18       # logits that are turned at once into a loss and their gradient on a CPU: 1 MB in fp32, which stays in its cache


def cross_entropy_rows_torch(z, targets, softcap, gradient):
    """z (rows, V) logits, targets (rows,) -> losses (rows,), 0 where the target is negative. With gradient, z becomes dloss/dz."""
    losses = []
    rows = max(1, SLICE // z.shape[1])
    for part, target in zip(z.split(rows), targets.split(rows)):
        s = part.to(acc_dtype(z))                                                      # z itself in fp32, else a copy
        if softcap:
            tanh = torch.tanh(s / softcap)
            s = torch.mul(tanh, softcap, out=s)
        ignored = (target < 0)[:, None]
        target = target.clamp(min=0)[:, None]
        lse = s.logsumexp(1, keepdim=True)
        losses.append((lse - s.gather(1, target)).masked_fill(ignored, 0).squeeze(1))
        if gradient:
            s.sub_(lse.masked_fill(ignored, math.inf)).exp_()                          # softmax; 0 in ignored rows
            s.scatter_add_(1, target, ignored.to(s.dtype) - 1)
            if softcap:
                s.mul_(1 - tanh.square_())
            part.copy_(s)
    return torch.cat(losses)


def linear_cross_entropy_fake(x, weight, targets, softcap, dtype, wants_x, wants_weight):
    acc = acc_dtype(x, weight)
    return x.new_empty((), dtype=acc), x.new_empty(x.shape if wants_x else (0,), dtype=dtype), weight.new_empty(
        weight.shape if wants_weight else (0,), dtype=acc)


@operator(linear_cross_entropy_fake)
def linear_cross_entropy_op(x: Tensor, weight: Tensor, targets: Tensor, softcap: float, dtype: torch.dtype, wants_x: bool,
                            wants_weight: bool) -> tuple[Tensor, Tensor, Tensor]:
    """-> the sum of the losses and, where wanted, its gradients for x (in dtype) and weight (fp32). Products run in dtype."""
    acc = acc_dtype(x, weight)
    total = x.new_zeros((), dtype=acc)
    d_x = x.new_empty(x.shape if wants_x else (0,), dtype=dtype)
    d_weight = weight.new_zeros(weight.shape if wants_weight else (0,), dtype=acc)
    x, weight = x.to(dtype), weight.to(dtype)
    V = len(weight)
    rows = max(1024, 2**26 // V) if x.is_cuda else max(256, 2**21 // V)
    for start in range(0, len(x), rows):
        part = slice(start, start + rows)
        z = x[part] @ weight.T                                                         # (rows, V)
        total += cross_entropy_rows_torch(z, targets[part], softcap, wants_x or wants_weight).sum()
        if wants_x:
            torch.mm(z, weight, out=d_x[part])
        if wants_weight and dtype == acc:
            d_weight.addmm_(z.T, x[part])
        elif wants_weight:
            d_weight += z.T @ x[part]
    return total, d_x, d_weight


def linear_cross_entropy_setup(ctx, inputs, output):
    ctx.set_materialize_grads(False)                                                   # no zeros for the outputs that nobody uses
    ctx.dtypes = inputs[0].dtype, inputs[1].dtype
    ctx.save_for_backward(*output[1:])


def linear_cross_entropy_backward(ctx, grad, *_):
    grads = [None, None]
    for n, (gradient, dtype) in enumerate(zip(ctx.saved_tensors, ctx.dtypes)):
        if ctx.needs_input_grad[n] and grad is not None:
            grads[n] = (gradient * grad).to(dtype)
    return *grads, None, None, None, None, None


linear_cross_entropy_op.register_autograd(linear_cross_entropy_backward, setup_context=linear_cross_entropy_setup)


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, softcap: float = 0.0) -> Tensor:
    """Mean cross-entropy in nats of the logits z = x weight^T at the targets >= 0; 0 if there is none.

    x (..., d), weight (V, d), targets (...) int64, negative where there is no loss. softcap c > 0: c tanh(z / c) in place of z.
    -> a scalar in fp32 (fp64 for fp64). Under autocast the products run in its dtype. The gradients are made in the forward pass, chunk by
    chunk, while the logits are in the cache: nothing of (tokens, V) is ever held.
    """
    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    x, targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    learns = torch.is_grad_enabled()
    total, _, _ = linear_cross_entropy_op(x, weight, targets, float(softcap), dtype, learns and x.requires_grad,
                                          learns and weight.requires_grad)
    return total / (targets >= 0).sum().clamp(min=1)


# ================================================================ training on a CPU
# There a step waits for memory. These three have the gradients that torch gives them, from half as many passes over the activations; on a
# GPU torch.compile fuses the plain expressions.

class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        scale = (torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.size(-1) + torch.finfo(x.dtype).eps).rsqrt()
        y = x * scale
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx, grad):
        y, scale = ctx.saved_tensors                                                  # dx = scale * (grad - y * mean(grad * y))
        return torch.addcmul(grad, y, (grad * y).mean(-1, keepdim=True), value=-1).mul_(scale)


class ReLUSquared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        r = x.relu()
        ctx.save_for_backward(r)
        return r * r

    @staticmethod
    def backward(ctx, grad):
        return (grad * ctx.saved_tensors[0]).mul_(2)


class ScaledSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, x, b, y):
        ctx.save_for_backward(a, x, b, y)
        return (x * a).addcmul_(y, b)

    @staticmethod
    def backward(ctx, grad):
        a, x, b, y = ctx.saved_tensors
        g = grad.reshape(-1)
        return torch.dot(g, x.reshape(-1)), grad * a, torch.dot(g, y.reshape(-1)), grad * b


def rms_norm(x: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis, as F.rms_norm has it, eps included."""
    return RMSNorm.apply(x) if x.device.type == "cpu" else F.rms_norm(x, (x.size(-1),))


def relu_squared(x: Tensor) -> Tensor:
    return ReLUSquared.apply(x) if x.device.type == "cpu" else F.relu(x).square()


def scaled_sum(a: Tensor, x: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """a*x + b*y for two scalars a, b and two tensors of one shape and dtype."""
    return ScaledSum.apply(a, x, b, y) if x.device.type == "cpu" else a * x + b * y


def keep_freed_memory() -> bool:
    """glibc returns large tensors to the system and faults them in again in every step: tell it not to. False without glibc.
    Also asks for huge pages, with which a step on a few rows of a table takes the same time at 4 million rows as at 262,144 (without
    them up to twice as long); torch reads that variable at its first allocation."""
    if platform.libc_ver()[0] != "glibc":
        return False
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    for option, value in ((-3, 2**30), (-1, 2**31 - 1), (-2, 2**28)):                  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD
        ctypes.CDLL(None).mallopt(option, value)
    return True


def newton_schulz_fp32(G, coefficients, steps, eps):
    """Muon's orthogonalisation of a gradient G (rows, columns), step for step as torch.optim has it, but in fp32: a CPU without bf16
    instructions is a hundred times slower in bf16."""
    a, b, c = coefficients
    X = G.T if G.size(0) > G.size(1) else G
    X = X / X.norm().clamp(min=eps)
    for _ in range(steps):
        A = X @ X.T
        X = torch.addmm(X, torch.addmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X.T if G.size(0) > G.size(1) else X


def tune_cpu():
    """Settings of this process without which training on a CPU is slow."""
    keep_freed_memory()
    torch.optim._muon._zeropower_via_newtonschulz = newton_schulz_fp32


def usage(flops_per_second):
    """" mfu 41% 11.2G": a model's FLOP/s on one GPU as a share of its dense bf16 peak by the data sheet (where listed), and peak memory."""
    name = torch.cuda.get_device_name() if torch.cuda.is_initialized() else ""
    peak = next((tflops for key, tflops in {"H200": 989, "H100": 989, "A100": 312, "L40": 181, "4090": 165}.items() if key in name), None)
    return (f" mfu {flops_per_second / peak / 1e10:.0f}%" if peak else "") + f" {peak_memory() / 2 ** 30:.1f}G"


def peak_memory():
    """Bytes: the most that the GPU's allocator held, or else the process's resident set."""
    import resource
    kilo = 1 if sys.platform == "darwin" else 1024
    return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else kilo * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# ================================================================ benchmark: python kernels.py

def medians(functions, device, rounds):
    """Milliseconds per call; the functions take turns. On CUDA a sample is five calls in a row, so that launches overlap the work."""
    calls, samples = 5 if device == "cuda" else 1, [[] for _ in functions]
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for turn in range(rounds + 2):                                                    # two rounds to warm up
        for function, sample in zip(functions, samples):
            wait()
            start = time.perf_counter()
            for _ in range(calls):
                function()
            wait()
            sample.append((time.perf_counter() - start) / calls * 1e3)
    return [sorted(sample[2:])[rounds // 2] for sample in samples]


def draw(kind, N, shape, device):
    """Uniform rows, or Zipf-like ones (the i-th most used row has a chance of about 1/i) spread over the table."""
    zipf = (N ** torch.rand(shape, device=device)).long().clamp_(max=N - 1) * 7919 % N
    return torch.randint(N, shape, device=device) if kind == "uniform" else zipf


def three_topk(s_row, s_col, k):
    (row, i), (col, j) = s_row.topk(k), s_col.topk(k)
    scores, best = (row[:, :, None] + col[:, None, :]).flatten(1).topk(k)
    return scores, i.gather(1, best // k), j.gather(1, best % k)


def naive_mix(v, bank_rows, inverse, gate):
    return gate[..., :1] * v + (gate[..., 1:].transpose(1, 2)[..., None] * bank_rows[inverse]).sum(1)


def cases(device, dtype, quick):
    """Yields operation, size, ours, theirs, their name, differentiable inputs, bytes that must move forward and backward together."""
    big, b, real = device == "cuda" and not quick, dtype.itemsize, functools.partial(torch.randn, device=device)
    for name, n, k, d, P, cpu_P in (("MIDUS", 64, 4, 64, 2**20, 2**14), ("MIDUS", 64, 4, 128, 2**20, 2**14),
                                    ("UltraMemV2", 360, 32, 192, 2**16, 2**11), ("Memory+", 1138, 160, 768, 2**13, 2**8)):
        for kind in ("uniform", "zipf") if n < 1138 or not quick else ():
            N, P, sparse = n * n, P if big else cpu_P, device == "cpu" and n == 1138  # sparse where the gradient has 4 GB
            indices, table, x, w = draw(kind, N, (P, k), device), real(N, d).to(dtype), real(P, d), real(P, k)
            size = f"{name} N={N} d={d} P={P} k={k} {kind}" + " sparse" * sparse
            read, rows = P * k * (d * b + 12), (indices.unique().numel() if sparse else N) * d * b
            yield ("gather_sum", size, lambda t, w: gather_sum(t, indices, w, sparse_grad=sparse),
                   lambda t, w: F.embedding_bag(indices, t, mode="sum", per_sample_weights=w.to(t.dtype), sparse=sparse),
                   "embedding_bag", (table, w), 2 * read + rows + P * d * 8)
            if not sparse:
                yield ("gather_dot", size, lambda t, x: gather_dot(t, indices, x),
                       lambda t, x: (t[indices] * x[:, None]).sum(-1), "gather, sum", (table, x), 2 * read + rows + P * d * 12)
                yield ("table gradient", size, lambda: row_sums_dense(x, indices, w[..., None], None, 1, None, N, dtype),
                       lambda: table.new_zeros(N, d).index_add_(
                           0, indices.view(-1), (x[:, None] * w[..., None]).flatten(0, 1).to(dtype)),
                       "index_add_", (), rows + P * d * 4 + P * k * 12)
    for n, k, P in ((64, 4, 2**16), (64, 32, 2**16), (360, 32, 2**14), (1138, 80, 2**13)):
        P, s = P if big else P // 16, (real(P if big else P // 16, n), real(P if big else P // 16, n))
        for theirs, name in ((lambda r, c: three_topk(r, c, k)[0], "three topk"),
                             (lambda r, c: (r[:, :, None] + c[:, None]).flatten(1).topk(k)[0], "full grid"))[:1 + (n == 64)]:
            yield ("product_key_topk", f"P={P} n={n} k={k}", lambda r, c: product_key_topk(r, c, k)[0], theirs, name, s,
                   P * (16 * n + 40 * k))
    P, n, m, u, core = 2**14 if big else 2**10, 360, 32, torch.ones(1, 2, device=device), torch.rand(2, 1, 2, 2, device=device)
    yield ("tucker_topk", f"P={P} n={n} m={m} r=2 H=2", lambda r, c: tucker_topk(r, c, u, u, core, m, m)[0], None, "-",
           (real(P, 1, 2, n), real(P, 1, 2, n)), P * (32 * n + 40 * m))
    for name, M in (("x1", 6), ("x8", 48)):
        T, H, d = 2**15 if big else 2**11, 6, 128
        tokens, inverse = draw("zipf", 65536, (T,), device).unique(return_inverse=True)
        v, bank_rows, gate = real(T, H, d).to(dtype), real(len(tokens), M, H, d).to(dtype), real(T, H, M + 1)
        yield ("mix_values", f"MoVE D12 {name} T={T} U={len(tokens)} M={M}", lambda v, r, g: mix_values(v, r, inverse, g),
               lambda v, r, g: naive_mix(v, r, inverse, g), "gather, sum", (v, bank_rows, gate),
               3 * bank_rows.nbytes + 5 * v.nbytes + 3 * gate.nbytes)


def training_step(way, indices, weights, x, table):
    """-> a function: forward, backward and optimizer step of one memory table."""
    ours, sparse = way.startswith("ours"), not way.endswith("AdamW")
    optimizer = (LazyAdam if ours else torch.optim.SparseAdam)([table]) if sparse else torch.optim.AdamW([table], fused=True)
    if ours and sparse:
        keep_coalesced(table)

    def step():
        w = weights.clone().requires_grad_()
        y = gather_sum(table, indices, w, sparse_grad=sparse) if ours else F.embedding_bag(
            indices, table, mode="sum", per_sample_weights=w, sparse=sparse)
        y.backward(x)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return step


def benchmark(argv):
    options = dict(argument.removeprefix("--").partition("=")[::2] for argument in argv)
    require(set(options) <= {"json", "quick"}, f"python kernels.py [--json=PATH] [--quick], not {' '.join(argv)}")
    device, quick = "cuda" if torch.cuda.is_available() else "cpu", "quick" in options
    rounds, keep = 5 if quick else 15, device == "cpu" and keep_freed_memory()         # for both sides
    a, b = torch.randn(2, 2**26 if device == "cuda" else 2**25, device=device)
    copy = 2 * a.nbytes / medians([lambda: b.copy_(a)], device, rounds)[0]             # bytes per ms
    report = dict(device=torch.cuda.get_device_name() if device == "cuda" else "cpu", threads=torch.get_num_threads(),
                  torch=torch.__version__, triton=getattr(triton, "__version__", None), malloc_keeps=keep,
                  path="triton" if use_triton(a) else "torch", copy_gb_per_s=round(copy / 1e6, 1), operations=[], steps=[])
    print(", ".join(f"{key} {value}" for key, value in list(report.items())[:7]), "\n")
    print(f"{'':74}{'ours: fwd':>11}{'bwd':>9}{'of copy':>9}{'theirs:':>16}{'fwd':>9}{'bwd ms':>9}{'ratio':>8}")
    for dtype in (torch.float32, torch.bfloat16) if device == "cuda" else (torch.float32,):
        for op, size, ours, theirs, name, inputs, must_move in cases(device, dtype, quick):
            calls = []
            for function in filter(None, (ours, theirs)):
                leaves = [t.requires_grad_() for t in inputs]
                y = function(*leaves)
                backward = functools.partial(torch.autograd.grad, y, leaves, torch.randn_like(y), retain_graph=True)
                calls += [functools.partial(function, *leaves), backward if leaves else lambda: None]
            fwd, bwd, *peer = *medians(calls, device, rounds), *[math.nan] * (4 - len(calls))
            ratio, of_copy = sum(peer) / (fwd + bwd), must_move / (fwd + bwd) / copy
            report["operations"].append(dict(op=op, size=size, dtype=str(dtype), fwd_ms=fwd, bwd_ms=bwd, of_copy=of_copy,
                                             peer=name, peer_fwd_ms=peer[0], peer_bwd_ms=peer[1], ratio=ratio))
            print(f"{op:16} {size:50} {'bf16' if dtype.itemsize == 2 else 'fp32':6}{fwd:11.3f}{bwd:9.3f}{of_copy:9.0%}"
                  f"{name:>16}{peer[0]:9.3f}{peer[1]:9.3f}{ratio:7.1f}x", flush=True)
    ways = ["ours + LazyAdam", "embedding_bag + SparseAdam", "ours + fused AdamW", "embedding_bag + fused AdamW"]
    print("\nforward + backward + optimizer in ms, 65,536 retrievals from (N, 64)\n" + f"{'':34}" + "".join(f"{way:>29}" for way in ways))
    for N, kind in itertools.product((2**18, 2**20, 2**22)[:2 if quick else 3], ("uniform", "zipf")):
        indices = draw(kind, N, (2**14, 4), device)
        data = indices, torch.randn(2**14, 4, device=device), torch.randn(2**14, 64, device=device)
        row = dict(N=N, indices=kind, rows=indices.unique().numel())
        for way in ways:                                                              # one after the other: 4 GB a way at the largest N
            table = torch.nn.Parameter(torch.randn(N, 64, device=device))
            row[way], = medians([training_step(way, *data, table)], device, rounds)
        report["steps"].append(row)
        print(f"N={N:<8} {kind:8} {row['rows']:6} rows  " + "".join(f"{row[way]:29.1f}" for way in ways), flush=True)
    if "json" in options:
        with open(options["json"], "w") as f:
            json.dump(report, f, indent=1)


if __name__ == "__main__":
    benchmark(sys.argv[1:])
