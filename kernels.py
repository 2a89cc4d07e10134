"""The sparse-memory operations of the five architectures: Triton kernels, pure-torch fallbacks, one dispatch rule.

A memory layer is a search and a sum. The search picks k of the N rows of a table for each of P queries:

    product_key_topk    the k largest s_row[i] + s_col[j] of an n x n grid           (MIDUS, PKM, Memory+, PEER)
    tucker_topk         the m largest Tucker scores sum_xy s_row[x,i] C[x,y] s_col[y,j]     (UltraMem, UltraMemV2)

The sum reads these rows. It and all its gradients are sums over the same P*k triples (query p, slot u, row j = indices[p,u]); only where the
result goes differs, so three kernels are closed under differentiation:

    to the queries      y[p]   = sum_u w[p,u] table[j]                gather_sum; the x gradient of gather_dot
    to the pairs        s[p,u] = <table[j], x[p]>                     gather_dot; the weight gradient of gather_sum
    to the rows         G[j]   = sum of w[p,u] g[p] over (p,u) -> j   the table gradient of both (MIDUS Algorithm 1)

The third is the hard one: many queries may hit one row. The P*k indices are sorted, so a row's hits are one run, and each row is written once:
no atomics (the gradient is bitwise the same in every run), no (P*k, d) tensor, and with sparse_grad=True nothing of the table's size at all.
mix_values (MoVE) is gather_sum over a bank that gather_rows has read once for all layers.

Sums run in fp32 whatever the inputs (fp64 if an input is). Dispatch (use_triton, one place): CUDA tensors go to Triton, all else to torch, and
NANOMEM_KERNELS=torch|triton forces one; with TRITON_INTERPRET=1 Triton runs on CPU tensors too. NANOMEM_DEBUG=1 checks index ranges.

python kernels.py [--json=PATH] [--quick=1]         times every operation against the obvious torch way
"""
import functools
import os
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
DEBUG = os.environ.get("NANOMEM_DEBUG", "0") not in ("", "0")


def use_triton(*tensors: Optional[Tensor]) -> bool:
    """The dispatch rule. fp64 always takes the torch path, which is the reference that gradients are checked against."""
    if BACKEND not in ("", "torch", "triton"):
        raise ValueError(f"NANOMEM_KERNELS={BACKEND!r}: use torch or triton, or leave it unset")
    if BACKEND == "torch" or any(t is not None and t.dtype == torch.float64 for t in tensors):
        return False
    if BACKEND == "triton" and triton is None:
        raise RuntimeError("NANOMEM_KERNELS=triton, but triton is not installed: pip install triton, or unset it")
    return BACKEND == "triton" or (triton is not None and tensors[0].is_cuda)


def require(ok: bool, message: str):
    if not ok:
        raise ValueError(message)


def acc_dtype(*tensors: Optional[Tensor]) -> torch.dtype:
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


# ================================================================ search: product keys

@functools.lru_cache(maxsize=64)
def staircase(k: int, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Pairs of ranks (i, j), from 0 and below n, with (i+1)(j+1) <= k: about k ln k of the k^2 pairs. -> two (C,) int64.

    The k best sums of two descending lists are among them: the (i+1)(j+1) pairs (i', j') with i' <= i, j' <= j score at least as much as (i, j);
    order the pairs by score and ties by (i, j): all but (i, j) itself come before it, so with (i+1)(j+1) > k it is not one of the first k.
    """
    pairs = [(i, j) for i in range(min(k, n)) for j in range(min(k // (i + 1), n))]
    i, j = torch.tensor(pairs, device=device).unbind(1)
    return i.contiguous(), j.contiguous()


def product_key_search_torch(s_row, s_col, k, fused):
    n = s_row.shape[1]
    s_row, s_col = s_row.to(acc_dtype(s_row)), s_col.to(acc_dtype(s_col))
    if fused:
        best = (s_row[:, :, None] + s_col[:, None, :]).flatten(1).topk(k).indices                        # (P, k) of the n x n grid
        return best // n, best % n
    (row, i), (col, j) = s_row.topk(min(k, n)), s_col.topk(min(k, n))                                   # sorted, with their indices
    a, b = staircase(k, n, s_row.device)
    best = (row[:, a] + col[:, b]).topk(k).indices                                                      # (P, k) of the C candidates
    return i.gather(1, a[best]), j.gather(1, b[best])


# Top-k inside a Triton program: a score and the index it belongs to travel as one int64, score in the upper half, so that sorting the packed
# numbers sorts the scores. fp32 bits compare like integers once the bits of negative numbers are flipped.

@jit
def pack(score, payload):
    bits = score.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | payload.to(tl.int64)


@jit
def unpack_score(packed):
    bits = (packed >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


# One program owns BLOCK_P queries. It reads their n row and n column scores, keeps the Top-k of each sorted in registers, forms the staircase
# candidates from them (or, FUSED, all n x n pairs: MIDUS G.1) and writes the indices of the k best. N2, K2, C2, O2: n, ranks, candidates, k rounded up to
# powers of two; padding is the smallest int64 and loses to every score, -inf included. A pair's payload is row << 16 | column.
@jit
def product_key_kernel(s_row, s_col, rank_i, rank_j, rows, cols, P, n, k, n_candidates, N2: tl.constexpr, K2: tl.constexpr, C2: tl.constexpr,
                       O2: tl.constexpr, BLOCK_P: tl.constexpr, FUSED: tl.constexpr):
    p = (tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P))[:, None]
    cand = tl.arange(0, C2)[None, :]
    if FUSED:
        i, j = cand // n, cand % n
        ok = (p < P) & (cand < n_candidates)
        score = tl.load(s_row + p * n + i, mask=ok, other=0.0).to(tl.float32) + tl.load(s_col + p * n + j, mask=ok, other=0.0).to(tl.float32)
        pair = (i << 16) | j
    else:
        x = tl.arange(0, N2)[None, :]
        ok = (p < P) & (x < n)
        padding = tl.full([BLOCK_P, N2], -9223372036854775808, tl.int64)
        row = tl.topk(tl.where(ok, pack(tl.load(s_row + p * n + x, mask=ok, other=0.0).to(tl.float32), x), padding), K2)   # (BLOCK_P, K2)
        col = tl.topk(tl.where(ok, pack(tl.load(s_col + p * n + x, mask=ok, other=0.0).to(tl.float32), x), padding), K2)
        ok = cand < n_candidates
        zero = tl.zeros([BLOCK_P, C2], tl.int32)
        row = tl.gather(row, tl.load(rank_i + cand, mask=ok, other=0).to(tl.int32) + zero, 1)                              # (BLOCK_P, C2)
        col = tl.gather(col, tl.load(rank_j + cand, mask=ok, other=0).to(tl.int32) + zero, 1)
        score = unpack_score(row) + unpack_score(col)
        pair = ((row & 0xFFFF) << 16) | (col & 0xFFFF)
    best = tl.topk(tl.where(ok, pack(score, pair), tl.full([BLOCK_P, C2], -9223372036854775808, tl.int64)), O2)
    u = tl.arange(0, O2)[None, :]
    ok = (p < P) & (u < k)
    tl.store(rows + p * k + u, (best >> 16) & 0xFFFF, mask=ok)
    tl.store(cols + p * k + u, best & 0xFFFF, mask=ok)


def power_of_2(n, at_least=2):
    return max(at_least, 1 << (n - 1).bit_length())


def product_key_search_triton(s_row, s_col, k, fused):
    P, n = s_row.shape
    s_row, s_col = s_row.contiguous(), s_col.contiguous()
    rows, cols = (torch.empty(P, k, dtype=torch.int64, device=s_row.device) for _ in range(2))
    rank_i, rank_j = staircase(k, n, s_row.device)
    n_candidates = n * n if fused else len(rank_i)
    K2, C2, O2 = power_of_2(min(k, n)), power_of_2(n_candidates), power_of_2(k)
    N2 = power_of_2(n, K2)
    BLOCK_P = max(1, 2048 // max(N2, C2))
    if P:
        product_key_kernel[(triton.cdiv(P, BLOCK_P),)](s_row, s_col, rank_i, rank_j, rows, cols, P, n, k, n_candidates, N2, K2, C2, O2, BLOCK_P, fused)
    return rows, cols


@torch.library.custom_op("nanomem::product_key_search", mutates_args=())
def product_key_search(s_row: Tensor, s_col: Tensor, k: int, fused: bool) -> tuple[Tensor, Tensor]:
    return (product_key_search_triton if use_triton(s_row, s_col) else product_key_search_torch)(s_row, s_col, k, fused)


@product_key_search.register_fake
def _(s_row, s_col, k, fused):
    return tuple(s_row.new_empty(s_row.shape[0], k, dtype=torch.int64) for _ in range(2))


def product_key_topk(s_row: Tensor, s_col: Tensor, k: int, fused: Optional[bool] = None) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest s_row[p,i] + s_col[p,j] of the n x n grid, by two-stage search with staircase pruning (MIDUS D.3, eqs. 13-15).

    s_row, s_col (P, n) float -> scores (P, k) fp32 (fp64 for fp64), descending; rows i and columns j (P, k) int64; the table row is i*n + j.
    k from 1 to n*n. Gradients flow through the scores into s_row and s_col. Of equal scores any may be picked; scores with NaN, or with +inf and
    -inf together, are outside the promise. fused=True searches the whole grid in one go (MIDUS G.1, n <= 128) and None chooses: see FUSED_BELOW.
    """
    require(s_row.dim() == 2 and s_row.shape == s_col.shape and s_row.is_floating_point() and s_col.is_floating_point(),
            f"s_row and s_col must both be (P, n) floats, got {describe(s_row)} and {describe(s_col)}")
    n = s_row.shape[1]
    require(1 <= k <= n * n, f"k must lie between 1 and n*n = {n * n}, got {k}")
    require(n < 2**16, f"s_row and s_col: n must be below 65,536, got {n}")
    require(not fused or n <= 128, f"fused=True holds the n x n grid at once and takes n <= 128, got n = {n}: use fused=None")
    if fused is None:
        fused = not s_row.is_cuda and s_row.shape[0] * n * n <= FUSED_BELOW
    rows, cols = product_key_search(s_row.detach(), s_col.detach(), k, fused)
    return Pick.apply(s_row, rows) + Pick.apply(s_col, cols), rows, cols


FUSED_BELOW = 1 << 15


def describe(t):
    return f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"


# The searches return indices; the scores are read again by Pick, so that one rule gives every search its gradient.

class Pick(torch.autograd.Function):
    """s (Q, n), index (Q, k) -> s[q, index[q,u]] (Q, k) in fp32 (fp64). Gradient: ds[q,i] = sum of g[q,u] over u with index[q,u] = i."""

    @staticmethod
    def forward(ctx, s, index):
        ctx.save_for_backward(index)
        ctx.n, ctx.dtype = s.shape[1], s.dtype
        return s.gather(1, index).to(acc_dtype(s))

    @staticmethod
    def backward(ctx, grad):
        return scatter_scores(grad, ctx.saved_tensors[0], ctx.n).to(ctx.dtype), None


# One program owns BLOCK_Q queries x BLOCK_N of their n scores and walks over the k picks: no two programs write the same score, no atomics.
@jit
def scatter_scores_kernel(grad, index, out, Q, n, K: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr):
    q = tl.program_id(0).to(tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    i = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_Q, BLOCK_N], tl.float32)
    for u in range(K):
        pick = tl.load(index + q * K + u, mask=q < Q, other=-1)
        g = tl.load(grad + q * K + u, mask=q < Q, other=0.0).to(tl.float32)
        total += tl.where(pick[:, None] == i[None, :], g[:, None], 0.0)
    tl.store(out + q[:, None] * n + i[None, :], total, mask=(q < Q)[:, None] & (i < n)[None, :])


@torch.library.custom_op("nanomem::scatter_scores", mutates_args=())
def scatter_scores(grad: Tensor, index: Tensor, n: int) -> Tensor:
    out = grad.new_zeros(grad.shape[0], n)
    if not use_triton(grad):
        return out.scatter_add_(1, index, grad)
    (Q, k), BLOCK_N = grad.shape, min(power_of_2(n), 128)
    BLOCK_Q = max(1, 1024 // BLOCK_N)
    if Q:
        grid = (triton.cdiv(Q, BLOCK_Q), triton.cdiv(n, BLOCK_N))
        scatter_scores_kernel[grid](grad.contiguous(), index.contiguous(), out, Q, n, k, BLOCK_Q, BLOCK_N)
    return out


@scatter_scores.register_fake
def _(grad, index, n):
    return grad.new_empty(grad.shape[0], n)


# ================================================================ search: Tucker scores

def tucker_search_torch(s_row, s_col, u, v, core_sum, m_key, m):
    P, R, r, n = s_row.shape
    s_row, s_col, u, v, core_sum = (t.to(acc_dtype(s_row)) for t in (s_row, s_col, u, v, core_sum))
    i = (u[..., None] * s_row).sum(2).topk(m_key).indices                                               # (P, R, m_key)
    j = (v[..., None] * s_col).sum(2).topk(m_key).indices
    row = s_row.gather(3, i[:, :, None].expand(P, R, r, m_key))                                         # (P, R, r, m_key)
    col = s_col.gather(3, j[:, :, None].expand(P, R, r, m_key))
    with torch.autocast(s_row.device.type, enabled=False):
        best = (row.transpose(2, 3) @ core_sum @ col).flatten(2).topk(m).indices                        # (P, R, m) of the m_key x m_key grid
    return i.gather(2, best // m_key), j.gather(2, best % m_key)


# One program owns one query and one retrieval head. It reads the RANK x n scores of both sides, projects them on u and v, keeps the m_key best
# rows and columns, reads their RANK scores again (they are in the cache), builds the m_key x m_key Tucker grid in registers and keeps the m best of it.
@jit
def tucker_kernel(s_row, s_col, u, v, core_sum, rows, cols, n, m_key, m, HEADS, RANK: tl.constexpr, N2: tl.constexpr, MK2: tl.constexpr, O2: tl.constexpr):
    query, head = tl.program_id(0).to(tl.int64), tl.program_id(0) % HEADS                               # query counts (p, head)
    s_row += query * RANK * n
    s_col += query * RANK * n
    x = tl.arange(0, N2)
    a, b = tl.zeros([N2], tl.float32), tl.zeros([N2], tl.float32)
    for r in tl.static_range(RANK):
        a += tl.load(u + head * RANK + r) * tl.load(s_row + r * n + x, mask=x < n, other=0.0).to(tl.float32)
        b += tl.load(v + head * RANK + r) * tl.load(s_col + r * n + x, mask=x < n, other=0.0).to(tl.float32)
    padding = tl.full([N2], -9223372036854775808, tl.int64)
    ok = tl.arange(0, MK2) < m_key
    i = tl.where(ok, tl.topk(tl.where(x < n, pack(a, x), padding), MK2) & 0xFFFF, 0)                    # (MK2,)
    j = tl.where(ok, tl.topk(tl.where(x < n, pack(b, x), padding), MK2) & 0xFFFF, 0)
    grid = tl.zeros([MK2, MK2], tl.float32)
    for r in tl.static_range(RANK):
        for c in tl.static_range(RANK):
            weight = tl.load(core_sum + (head * RANK + r) * RANK + c)
            grid += (weight * tl.load(s_row + r * n + i).to(tl.float32))[:, None] * tl.load(s_col + c * n + j).to(tl.float32)[None, :]
    packed = tl.where(ok[:, None] & ok[None, :], pack(grid, (i << 16)[:, None] | j[None, :]), tl.full([MK2, MK2], -9223372036854775808, tl.int64))
    best = tl.topk(tl.reshape(packed, [MK2 * MK2]), O2)
    o = tl.arange(0, O2)
    tl.store(rows + query * m + o, (best >> 16) & 0xFFFF, mask=o < m)
    tl.store(cols + query * m + o, best & 0xFFFF, mask=o < m)


def tucker_search_triton(s_row, s_col, u, v, core_sum, m_key, m):
    P, R, r, n = s_row.shape
    rows, cols = (torch.empty(P, R, m, dtype=torch.int64, device=s_row.device) for _ in range(2))
    MK2 = power_of_2(m_key)
    if P * R:
        u, v, core_sum = (t.float().contiguous() for t in (u, v, core_sum))
        tucker_kernel[(P * R,)](s_row.contiguous(), s_col.contiguous(), u, v, core_sum, rows, cols, n, m_key, m, R, r, power_of_2(n, MK2), MK2,
                                power_of_2(m), num_warps=4 if MK2 <= 32 else 16)
    return rows, cols


@torch.library.custom_op("nanomem::tucker_search", mutates_args=())
def tucker_search(s_row: Tensor, s_col: Tensor, u: Tensor, v: Tensor, core_sum: Tensor, m_key: int, m: int) -> tuple[Tensor, Tensor]:
    return (tucker_search_triton if use_triton(s_row, s_col) else tucker_search_torch)(s_row, s_col, u, v, core_sum, m_key, m)


@tucker_search.register_fake
def _(s_row, s_col, u, v, core_sum, m_key, m):
    return tuple(s_row.new_empty(*s_row.shape[:2], m, dtype=torch.int64) for _ in range(2))


def tucker_topk(s_row: Tensor, s_col: Tensor, u: Tensor, v: Tensor, core: Tensor, m_key: int, m: int) -> tuple[Tensor, Tensor]:
    """Top-m of Tucker-decomposed scores (UltraMem, UltraMemV2 eqs. 6-7 and 10-11): a rank-1 prefilter, then the full score.

    s_row, s_col (P, R, r, n): scores of R retrieval heads and r Tucker ranks; u, v (R, r): leading singular vectors of core.sum(0);
    core (H, R, r, r) -> raw scores (P, R, m, H) fp32 (fp64 for fp64) and indices i*n + j (P, R, m) int64, by descending sum over H.
        stage 1   i, j of the m_key largest sum_x u[x] s_row[x,i] and sum_y v[y] s_col[y,j]
        stage 2   score[h,i,j] = sum_xy s_row[x,i] core[h,x,y] s_col[y,j] on that m_key x m_key grid, ranked by the sum over h
    Gradients flow through the returned scores into s_row, s_col and core, none through the choice of indices, hence none into u and v.
    """
    require(s_row.dim() == 4 and s_row.shape == s_col.shape and s_row.is_floating_point() and s_col.is_floating_point(),
            f"s_row and s_col must both be (P, R, r, n) floats, got {describe(s_row)} and {describe(s_col)}")
    P, R, r, n = s_row.shape
    require(u.shape == (R, r) and v.shape == (R, r), f"u and v must be (R, r) = {(R, r)}, got {describe(u)} and {describe(v)}")
    require(core.dim() == 4 and core.shape[1:] == (R, r, r), f"core must be (H, R, r, r) with R, r = {(R, r)}, got {describe(core)}")
    require(1 <= m_key <= n < 2**16, f"m_key must lie between 1 and n = {n} (below 65,536), got {m_key}")
    require(1 <= m <= m_key * m_key, f"m must lie between 1 and m_key^2 = {m_key * m_key}, got {m}")
    rows, cols = tucker_search(s_row.detach(), s_col.detach(), u.detach(), v.detach(), core.detach().sum(0), m_key, m)
    row, col = (Pick.apply(s.reshape(-1, n), index[:, :, None].expand(P, R, r, m).reshape(-1, m)).view(P, R, r, m)
                for s, index in ((s_row, rows), (s_col, cols)))
    with torch.autocast(s_row.device.type, enabled=False):
        scores = torch.einsum("prxm,hrxy,prym->prmh", row, core.to(row.dtype), col)
    return scores, rows * n + cols


# ================================================================ the three sums: torch path

def touched_rows(table, indices, dtype):
    """A table in another dtype is not converted whole, only the rows that are read."""
    if table.dtype == dtype:
        return table.contiguous(), indices.long()
    rows, indices = indices.unique(return_inverse=True)
    return table[rows].to(dtype), indices


def segment_sum(source, index, start, weights):
    """y[s] = sum over entries e in [start[s], start[s+1]) of weights[e] * source[index[e]]; weights (L, H) weigh H slices of the row.

    source (R, d), index (L,), start (S,) -> (S, d). One embedding_bag over (head, segment) bags: it never forms the L x d products.
    """
    (L, H), d, heads = weights.shape, source.shape[1], torch.arange(weights.shape[1], device=source.device)[:, None]
    y = F.embedding_bag((index * H + heads).view(-1), source.reshape(-1, d // H), (start + L * heads).view(-1), mode="sum",
                        per_sample_weights=weights.t().reshape(-1))                                     # (H*S, d/H)
    return y.view(H, len(start), d // H).transpose(0, 1).reshape(len(start), d)


def bag_sum_torch(table, indices, weights, blocks, n_blocks, dtype, base=None, base_weight=None):
    acc = acc_dtype(table, weights, base)
    (table, indices), weights, (P, k, H), d = touched_rows(table, indices, acc), weights.to(acc), weights.shape, table.shape[1]
    if blocks is None:
        index = indices[:, None] * H + torch.arange(H, device=table.device)[:, None]                    # (P, H, k): one bag per query and slice
        y = F.embedding_bag(index.view(P * H, k), table.view(-1, d // H), mode="sum", per_sample_weights=weights.transpose(1, 2).reshape(P * H, k))
    else:
        bag = (torch.arange(P, device=table.device)[:, None] * n_blocks + blocks).view(-1)
        bag, order = bag.sort(stable=True)
        start = torch.searchsorted(bag, torch.arange(P * n_blocks, device=table.device))
        y = segment_sum(table, indices.reshape(-1)[order], start, weights.reshape(-1, H)[order])
    if base is not None:
        base = base.view(P, H, d // H).to(acc)
        y = y.view(P, H, d // H) + (base if base_weight is None else base * base_weight[..., None].to(acc))
    return y.view(P * n_blocks, d).to(dtype)


def bag_dot_torch(table, indices, x, blocks, n_blocks, heads, dtype):
    acc, (P, k), d, dev = acc_dtype(table, x), indices.shape, table.shape[1], table.device
    table, indices = touched_rows(table, indices, acc)
    slices = torch.arange(heads, device=dev)
    bag = torch.arange(P, device=dev)[:, None] * n_blocks + (0 if blocks is None else blocks)           # row of x, (P, 1) or (P, k)
    index = (indices[..., None] * heads + slices).view(-1)                                              # (P*k*H,) rows of the sliced table
    bag = (bag[..., None] * heads + slices).expand(P, k, heads).reshape(-1)
    # the operator that embedding_bag's own backward uses for its weights: one dot product per entry, no (P*k, d) tensor
    dots = torch.ops.aten._embedding_bag_per_sample_weights_backward(
        x.to(acc).reshape(-1, d // heads), table.view(-1, d // heads), index, bag[:1], bag, 0, -1)
    return dots.view(P, k, heads).to(dtype)


def sort_indices(indices: Tensor) -> Tensor:
    """indices (P, k) -> order (P*k,) int64 that sorts the flattened indices. Pass it as `order` to operations on the same indices to sort once."""
    return indices.reshape(-1).to(torch.int32).sort(stable=True).indices                                # N < 2^31 is checked; half the keys to move


def row_sums_torch(grad, indices, weights, blocks, n_blocks, order, n_rows, dtype, sparse):
    acc, (P, k, H), keys = acc_dtype(grad, weights), weights.shape, indices.reshape(-1)[order]
    rows, count = keys.unique_consecutive(return_counts=True)
    query = order // k if blocks is None else order // k * n_blocks + blocks.reshape(-1)[order]
    values = segment_sum(grad.to(acc), query, count.cumsum(0) - count, weights.reshape(-1, H)[order].to(acc)).to(dtype)
    if sparse:
        return rows.long(), values
    if len(rows) == n_rows:                                                                             # every row was hit: these are all of them
        return rows, values
    return rows, values.new_zeros(n_rows, values.shape[1]).index_copy_(0, rows.long(), values)


# ================================================================ the three sums: Triton path
# A row of the table is cut into H slices of width D = d/H with a weight each (H = 1: the whole row); a program works on BLOCK_D columns of one slice.
# Weights are read through their strides, so that a transposed or sliced gate is never copied. All offsets of rows are int64: N*d exceeds 2^31 soon.

# One program owns BLOCK_P queries x BLOCK_D columns of their result. It walks over the k retrieved rows, in each step reading one row for every query
# (BLOCK_D neighbouring columns: coalesced), and writes its tile once. E > 1: it sums only the rows of one of E blocks, and no other row is read.
# BASE = 1 starts from the query's own row of `base`, BASE = 2 from that row times base_weight (MoVE eq. 4's g_0 * V).
@jit
def bag_sum_kernel(table, indices, weights, blocks, base, base_weight, out, P, w_p, w_u, w_h, b_p, b_h, K: tl.constexpr, H: tl.constexpr, E: tl.constexpr,
                   D: tl.constexpr, BASE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr):
    parts: tl.constexpr = E * H * ((D + BLOCK_D - 1) // BLOCK_D)                                        # programs that share the queries
    part = tl.program_id(0) % parts
    p = (tl.program_id(0) // parts).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    e, h, c = part % E, part // E % H, part // (E * H) * BLOCK_D + tl.arange(0, BLOCK_D)
    ok_p, ok_c, col = p < P, (c < D)[None, :], (h * D + c)[None, :]
    total = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    if BASE > 0:
        total += tl.load(base + p[:, None] * (H * D) + col, mask=ok_p[:, None] & ok_c, other=0.0).to(tl.float32)
    if BASE == 2:
        total *= tl.load(base_weight + p * b_p + h * b_h, mask=ok_p, other=0.0).to(tl.float32)[:, None]
    for u in tl.range(0, K, loop_unroll_factor=4):
        ok = ok_p
        if E > 1:
            ok = ok & (tl.load(blocks + p * K + u, mask=ok_p, other=-1) == e)
        row = tl.load(indices + p * K + u, mask=ok, other=0).to(tl.int64)
        weight = tl.load(weights + p * w_p + u * w_u + h * w_h, mask=ok, other=0.0).to(tl.float32)
        total += weight[:, None] * tl.load(table + row[:, None] * (H * D) + col, mask=ok[:, None] & ok_c, other=0.0).to(tl.float32)
    tl.store(out + (p * E + e)[:, None] * (H * D) + col, total, mask=ok_p[:, None] & ok_c)


# One program owns one slice of BLOCK_P queries and walks over their k rows: it reads a row and the query's x, reduces over the columns and writes one
# number per query and row. x stays in the cache between the steps.
@jit
def bag_dot_kernel(table, indices, x, blocks, out, P, o_p, o_u, o_h, K: tl.constexpr, H: tl.constexpr, E: tl.constexpr, D: tl.constexpr,
                   BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr):
    h = tl.program_id(0) % H
    p = (tl.program_id(0) // H).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    ok = p < P
    for u in tl.range(0, K, loop_unroll_factor=4):
        row = tl.load(indices + p * K + u, mask=ok, other=0).to(tl.int64)
        query = p * E
        if E > 1:
            query += tl.load(blocks + p * K + u, mask=ok, other=0)
        total = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
        for first in range(0, D, BLOCK_D):
            c = first + tl.arange(0, BLOCK_D)
            mask, col = ok[:, None] & (c < D)[None, :], (h * D + c)[None, :]
            total += (tl.load(table + row[:, None] * (H * D) + col, mask=mask, other=0.0).to(tl.float32)
                      * tl.load(x + query[:, None] * (H * D) + col, mask=mask, other=0.0).to(tl.float32))
        tl.store(out + p * o_p + u * o_u + h * o_h, tl.sum(total, 1), mask=ok)


# The sum to the rows. keys are the L = P*k indices in sorted order, so the hits of a row are one run of equal keys. A *window* is C consecutive sorted
# positions, one program owns one window x BLOCK_D columns whatever the runs look like: a row hit by every query is spread over L/C programs.
# The program gathers the C weighted gradient rows into a tile and multiplies it by the C x C matrix of equal keys: now every position holds the sum over
# its run inside the window, and the run's last position writes it. A run that lies inside the window goes to its row of `out`: nobody else
# writes that row. A run that came in from the window before goes to partial[w, 0], one that starts here and goes on to partial[w, 1].
# (A NaN or inf in one gradient row spreads over its window, 0 * inf being NaN: such a step is lost anyway.)
@jit
def row_sums_kernel(grad, keys, order, dest, weights, blocks, out, partial, L, w_p, w_u, w_h, K: tl.constexpr, H: tl.constexpr, E: tl.constexpr,
                    D: tl.constexpr, C: tl.constexpr, BLOCK_D: tl.constexpr):
    parts: tl.constexpr = H * ((D + BLOCK_D - 1) // BLOCK_D)
    part = tl.program_id(0) % parts
    w = (tl.program_id(0) // parts).to(tl.int64)
    h, c = part % H, part // H * BLOCK_D + tl.arange(0, BLOCK_D)
    t = tl.arange(0, C)
    e = w * C + t                                                                                       # sorted positions
    ok, ok_c, col = e < L, (c < D)[None, :], (h * D + c)[None, :]
    key = tl.load(keys + e, mask=ok, other=-1)
    entry = tl.load(order + e, mask=ok, other=0)
    p, u = entry // K, entry % K
    weight = tl.load(weights + p * w_p + u * w_u + h * w_h, mask=ok, other=0.0).to(tl.float32)
    query = p * E
    if E > 1:
        query += tl.load(blocks + entry, mask=ok, other=0)
    g = tl.load(grad + query[:, None] * (H * D) + col, mask=ok[:, None] & ok_c, other=0.0).to(tl.float32) * weight[:, None]
    same = (key[:, None] == key[None, :]).to(tl.float32)                                                # (C, C)
    total = tl.dot(same, g, input_precision="ieee")                                                     # (C, BLOCK_D)
    before = tl.load(keys + w * C - 1, mask=w > 0, other=-1)
    after = tl.load(keys + w * C + C, mask=w * C + C < L, other=-1)
    last = ok & ((t == C - 1) | (key != tl.load(keys + e + 1, mask=e + 1 < L, other=-1)))
    came_in = key == before
    goes_on = (key == after) & (came_in == 0)
    inside = (came_in | goes_on) == 0
    row = tl.load(dest + e, mask=ok, other=0).to(tl.int64)
    tl.store(out + row[:, None] * (H * D) + col, total, mask=(last & inside)[:, None] & ok_c)
    half = 2 * w + goes_on.to(tl.int64)
    tl.store(partial + half[:, None] * (H * D) + col, total, mask=(last & (inside == 0))[:, None] & ok_c)


# Second step: one program per window x BLOCK_D columns. Where a run starts in window w and goes on, the program adds partial[w, 1] and the partial[., 0] of
# the windows that the run covers, BLOCK_W windows at a time, and writes the row. All other programs have nothing to do.
@jit
def merge_kernel(keys, dest, partial, out, L, W, D: tl.constexpr, C: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr):
    parts: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    w = (tl.program_id(0) // parts).to(tl.int64)
    c = tl.program_id(0) % parts * BLOCK_D + tl.arange(0, BLOCK_D)
    last = w * C + C - 1
    key = tl.load(keys + last, mask=last < L, other=-1)
    goes_on = tl.load(keys + last + 1, mask=last + 1 < L, other=-2) == key
    came_in = tl.load(keys + w * C - 1, mask=w > 0, other=-2) == key
    if goes_on & (came_in == 0):
        total = tl.load(partial + (2 * w + 1) * D + c, mask=c < D, other=0.0)
        first, more = w + 1, True
        while more:
            i = first + tl.arange(0, BLOCK_W)
            hit = (i < W) & (tl.load(keys + i * C, mask=i < W, other=-1) == key)
            total += tl.sum(tl.load(partial + (2 * i)[:, None] * D + c[None, :], mask=hit[:, None] & (c < D)[None, :], other=0.0), 0)
            first += BLOCK_W
            more = tl.sum(hit.to(tl.int32), 0) == BLOCK_W
        tl.store(out + tl.load(dest + last).to(tl.int64) * D + c, total, mask=c < D)


def column_block(D, largest=256):
    """BLOCK_D: the largest power of two up to 256 that divides D, so that no lane idles; if that is below 32, D rounded up."""
    divisor = min(D & -D, largest)
    return divisor if divisor >= 32 else min(power_of_2(D, 16), largest)


def bag_sum_triton(table, indices, weights, blocks, n_blocks, dtype, base=None, base_weight=None):
    (P, k, H), d = weights.shape, table.shape[1]
    out = torch.empty(P * n_blocks, d, dtype=dtype, device=table.device)
    BLOCK_D = column_block(d // H)
    BLOCK_P = max(1, 1024 // BLOCK_D)
    grid = (triton.cdiv(P, BLOCK_P) * n_blocks * H * triton.cdiv(d // H, BLOCK_D),)
    mode = 0 if base is None else 1 if base_weight is None else 2
    if P:
        bag_sum_kernel[grid](table.contiguous(), indices.contiguous(), weights, blocks, base, base_weight, out, P, *weights.stride(),
                             *(base_weight.stride() if mode == 2 else (0, 0)), k, H, n_blocks, d // H, mode, BLOCK_P, BLOCK_D)
    return out


def bag_dot_triton(table, indices, x, blocks, n_blocks, heads, dtype):
    (P, k), d = indices.shape, table.shape[1]
    out = torch.empty(P, k, heads, dtype=dtype, device=table.device)
    BLOCK_D = column_block(d // heads)
    BLOCK_P = max(1, 1024 // BLOCK_D)
    if P:
        bag_dot_kernel[(triton.cdiv(P, BLOCK_P) * heads,)](table.contiguous(), indices.contiguous(), x.contiguous(), blocks, out, P, *out.stride(),
                                                           k, heads, n_blocks, d // heads, BLOCK_P, BLOCK_D)
    return out


def row_sums_triton(grad, indices, weights, blocks, n_blocks, order, n_rows, dtype, sparse, C=32):
    (P, k, H), d, L = weights.shape, grad.shape[1], order.numel()
    keys = indices.reshape(-1)[order]
    rows, dest = keys, keys
    if sparse:                                                                                          # number the distinct rows; their count is data:
        rows, count = keys.unique_consecutive(return_counts=True)                                       # the one synchronisation of a sparse gradient
        dest, n_rows = torch.arange(len(rows), device=keys.device).repeat_interleave(count, output_size=L), len(rows)
    out = torch.empty(n_rows, d, dtype=dtype, device=grad.device) if sparse else torch.zeros(n_rows, d, dtype=dtype, device=grad.device)
    if L:
        W, BLOCK_D = triton.cdiv(L, C), column_block(d // H, 128)
        partial = torch.empty(W, 2, d, dtype=torch.float32, device=grad.device)
        row_sums_kernel[(W * H * triton.cdiv(d // H, BLOCK_D),)](grad.contiguous(), keys, order, dest, weights, blocks, out, partial, L, *weights.stride(),
                                                                 k, H, n_blocks, d // H, C, BLOCK_D)
        BLOCK_D = column_block(d, 128)
        merge_kernel[(W * triton.cdiv(d, BLOCK_D),)](keys, dest, partial, out, L, W, d, C, 32, BLOCK_D)
    return rows.long(), out


# ================================================================ the three sums: operations

def row_sums(grad, indices, weights, blocks, n_blocks, order, n_rows, dtype, sparse):
    order = sort_indices(indices) if order is None else order
    path = row_sums_triton if use_triton(grad, weights) else row_sums_torch
    return path(grad, indices, weights, blocks, n_blocks, order, n_rows, dtype, sparse)


@torch.library.custom_op("nanomem::row_sums_dense", mutates_args=())
def row_sums_dense(grad: Tensor, indices: Tensor, weights: Tensor, blocks: Optional[Tensor], n_blocks: int, order: Optional[Tensor], n_rows: int,
                   dtype: torch.dtype) -> Tensor:
    return row_sums(grad, indices, weights, blocks, n_blocks, order, n_rows, dtype, False)[1]


@row_sums_dense.register_fake
def _(grad, indices, weights, blocks, n_blocks, order, n_rows, dtype):
    return grad.new_empty(n_rows, grad.shape[1], dtype=dtype)


def table_grad(table, grad, indices, weights, blocks, n_blocks, order, sparse):
    """G[j] = sum of weights[p,u] * grad[p] over the (p,u) with indices[p,u] = j: dense, or a coalesced COO tensor of the touched rows."""
    if not sparse:
        return row_sums_dense(grad, indices, weights, blocks, n_blocks, order, table.shape[0], table.dtype)
    rows, values = row_sums(grad, indices, weights, blocks, n_blocks, order, table.shape[0], table.dtype, True)
    return torch.sparse_coo_tensor(rows[None], values, table.shape, is_coalesced=True, check_invariants=False)


@torch.library.custom_op("nanomem::gather_sum", mutates_args=())
def gather_sum_op(table: Tensor, indices: Tensor, weights: Tensor, blocks: Optional[Tensor], n_blocks: int, order: Optional[Tensor],
                  sparse_grad: bool) -> Tensor:
    path = bag_sum_triton if use_triton(table, weights) else bag_sum_torch
    return path(table, indices, weights, blocks, n_blocks, weights.dtype)


@torch.library.custom_op("nanomem::gather_dot", mutates_args=())
def gather_dot_op(table: Tensor, indices: Tensor, x: Tensor, blocks: Optional[Tensor], n_blocks: int, heads: int, order: Optional[Tensor],
                  sparse_grad: bool) -> Tensor:
    path = bag_dot_triton if use_triton(table, x) else bag_dot_torch
    return path(table, indices, x, blocks, n_blocks, heads, x.dtype)


@gather_sum_op.register_fake
def _(table, indices, weights, blocks, n_blocks, order, sparse_grad):
    return weights.new_empty(indices.shape[0] * n_blocks, table.shape[1])


@gather_dot_op.register_fake
def _(table, indices, x, blocks, n_blocks, heads, order, sparse_grad):
    return x.new_empty(*indices.shape, heads)


def gather_sum_setup(ctx, inputs, output):
    table, indices, weights, blocks, ctx.n_blocks, order, ctx.sparse_grad = inputs
    ctx.save_for_backward(table, indices, weights, blocks, order)


def gather_sum_backward(ctx, grad):
    table, indices, weights, blocks, order = ctx.saved_tensors
    d_table = d_weights = None
    if ctx.needs_input_grad[0]:
        d_table = table_grad(table, grad, indices, weights, blocks, ctx.n_blocks, order, ctx.sparse_grad)
    if ctx.needs_input_grad[2]:                                                     # dw[p,u,h] = <table[j], grad[p]> over slice h
        d_weights = gather_dot_op(table, indices, grad, blocks, ctx.n_blocks, weights.shape[2], order, False)
    return d_table, None, d_weights, None, None, None, None


def gather_dot_setup(ctx, inputs, output):
    table, indices, x, blocks, ctx.n_blocks, _, order, ctx.sparse_grad = inputs
    ctx.save_for_backward(table, indices, x, blocks, order)


def gather_dot_backward(ctx, grad):
    table, indices, x, blocks, order = ctx.saved_tensors
    d_table = d_x = None
    if ctx.needs_input_grad[0]:                                                     # the pairs' gradients are the weights, x is what they weigh
        d_table = table_grad(table, x, indices, grad, blocks, ctx.n_blocks, order, ctx.sparse_grad)
    if ctx.needs_input_grad[2]:                                                     # dx[p] = sum_u grad[p,u] table[j]
        d_x = gather_sum_op(table, indices, grad, blocks, ctx.n_blocks, order, False)
    return d_table, None, d_x, None, None, None, None, None


gather_sum_op.register_autograd(gather_sum_backward, setup_context=gather_sum_setup)
gather_dot_op.register_autograd(gather_dot_backward, setup_context=gather_dot_setup)
# A compiled backward cannot build a COO tensor, so with sparse_grad=True the operation is left out of the graph: the one documented break.
gather_sum_eager, gather_dot_eager = torch.compiler.disable(gather_sum_op), torch.compiler.disable(gather_dot_op)


def check_gather(table, indices, order, blocks=None, n_blocks=1):
    require(table.dim() == 2 and table.is_floating_point() and table.shape[0] < 2**31, f"table must be (N, d) float with N < 2^31, got {describe(table)}")
    require(indices.dim() == 2 and indices.dtype in (torch.int32, torch.int64), f"indices must be (P, k) int32 or int64, got {describe(indices)}")
    require(blocks is None or (blocks.shape == indices.shape and blocks.dtype in (torch.int32, torch.int64)),
            f"blocks must be {tuple(indices.shape)} int32 or int64, like indices, got {blocks is not None and describe(blocks)}")
    require(n_blocks >= 1 and (blocks is not None or n_blocks == 1), f"n_blocks must be positive, and 1 without blocks, got {n_blocks}")
    require(order is None or (order.shape == (indices.numel(),) and order.dtype == torch.int64),
            f"order must be sort_indices(indices), ({indices.numel()},) int64, got {order is not None and describe(order)}")
    check_range("indices", indices, table.shape[0])
    check_range("blocks", blocks, n_blocks)


def check_range(name, t, n):
    if DEBUG and t is not None and t.numel():                                       # costs a synchronisation
        low, high = (int(v) for v in t.aminmax())
        if low < 0 or high >= n:
            raise IndexError(f"{name} must lie in [0, {n}), found {low if low < 0 else high}")


def check_devices(**tensors):
    where = {name: t.device for name, t in tensors.items() if t is not None}
    require(len(set(where.values())) == 1, "all tensors must be on one device, got " + ", ".join(f"{k}: {v}" for k, v in where.items()))


def gather_sum(table: Tensor, indices: Tensor, weights: Tensor, blocks: Optional[Tensor] = None, n_blocks: int = 1, sparse_grad: bool = False,
               order: Optional[Tensor] = None) -> Tensor:
    """Weighted sum of retrieved rows, y[p] = sum_u weights[p,u] * table[indices[p,u]] (MIDUS G.3, UltraMemV2 eq. 12), in the weights' dtype.

    table (N, d) float; indices (P, k) int32|int64 in [0, N), repeats allowed; weights (P, k) float -> (P, d), or (P, k, H), where weight h is for slice h of
    the row's H slices of d/H columns. With blocks (P, k) int in [0, n_blocks) the sum is kept per block -> (P, n_blocks, d) (UltraMem eq. 9).
    Gradients: weights <table[j], g[p]>, table by MIDUS Algorithm 1: dense, or with sparse_grad=True a coalesced sparse COO tensor of the touched rows, for
    torch.optim.SparseAdam (see keep_coalesced); sparse_grad breaks a torch.compile graph. order: sort_indices(indices), if at hand.
    """
    check_gather(table, indices, order, blocks, n_blocks)
    check_devices(table=table, indices=indices, weights=weights, blocks=blocks, order=order)
    require(weights.dim() in (2, 3) and weights.shape[:2] == indices.shape and weights.is_floating_point(),
            f"weights must be {tuple(indices.shape)} like indices, or with a third axis for H slices, got {describe(weights)}")
    weights = weights if weights.dim() == 3 else weights[..., None]
    require(table.shape[1] % weights.shape[2] == 0, f"weights: {weights.shape[2]} slices do not divide the table's {table.shape[1]} columns")
    op = gather_sum_eager if sparse_grad else gather_sum_op
    y = op(table, indices, weights, blocks, n_blocks, order, sparse_grad)
    return y if blocks is None else y.view(-1, n_blocks, table.shape[1])


def gather_dot(table: Tensor, indices: Tensor, x: Tensor, sparse_grad: bool = False, order: Optional[Tensor] = None) -> Tensor:
    """Dot products with retrieved rows, s[p,u] = <table[indices[p,u]], x[p]> (PEER; UltraMemV2 eq. 15's pre-values), in x's dtype.

    table (N, d) float; indices (P, k) int32|int64 in [0, N); x (P, d) float -> (P, k). sparse_grad and order as in gather_sum.
    """
    check_gather(table, indices, order)
    check_devices(table=table, indices=indices, x=x, order=order)
    require(x.shape == (indices.shape[0], table.shape[1]) and x.is_floating_point(),
            f"x must be (P, d) = {(indices.shape[0], table.shape[1])} float, got {describe(x)}")
    op = gather_dot_eager if sparse_grad else gather_dot_op
    return op(table, indices, x, None, 1, 1, order, sparse_grad).squeeze(2)


# ================================================================ MoVE: a bank read once for all layers

class GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table, rows, sparse_grad):
        ctx.save_for_backward(rows)
        ctx.shape, ctx.sparse_grad = table.shape, sparse_grad
        return table.index_select(0, rows)

    @staticmethod
    def backward(ctx, grad):
        rows, = ctx.saved_tensors
        if ctx.sparse_grad:
            return torch.sparse_coo_tensor(rows[None], grad, ctx.shape, is_coalesced=True, check_invariants=False), None, None
        return grad.new_zeros(ctx.shape).index_copy_(0, rows, grad), None, None


def gather_rows(table: Tensor, rows: Tensor, sparse_grad: bool = False) -> Tensor:
    """table[rows] for distinct rows, whose gradient reaches the table once however many layers use the result.

    table (N, ...) float; rows (U,) int64, ascending and distinct, as torch.unique returns them -> (U, ...).
    Gradient: dense (zeros and one write of U rows) or, with sparse_grad=True, a coalesced sparse COO tensor of these rows.
    """
    require(rows.dim() == 1 and rows.dtype == torch.int64, f"rows must be (U,) int64, got {describe(rows)}")
    check_devices(table=table, rows=rows)
    check_range("rows", rows, table.shape[0])
    if DEBUG:
        require(bool((rows.diff() > 0).all()), "rows must be ascending and distinct: take them from torch.unique")
    return (gather_rows_eager if sparse_grad else GatherRows.apply)(table, rows, sparse_grad)


gather_rows_eager = torch.compiler.disable(GatherRows.apply)


def mix_indices(inverse, M):
    return inverse[:, None] * M + torch.arange(M, device=inverse.device)             # (T, M) rows of the bank seen as (U*M, H*d_h)


@torch.library.custom_op("nanomem::mix_values", mutates_args=())
def mix_values_op(v: Tensor, bank_rows: Tensor, inverse: Tensor, gate: Tensor, gate_v: bool, order: Optional[Tensor]) -> Tensor:
    (T, H, d_h), (U, M) = v.shape, bank_rows.shape[:2]
    path = bag_sum_triton if use_triton(v, bank_rows, gate) else bag_sum_torch
    return path(bank_rows.reshape(U * M, H * d_h), mix_indices(inverse, M), gate[..., gate_v:].transpose(1, 2), None, 1, v.dtype,
                v.reshape(T, H * d_h), gate[..., 0] if gate_v else None).view(T, H, d_h)


@mix_values_op.register_fake
def _(v, bank_rows, inverse, gate, gate_v, order):
    return torch.empty_like(v, memory_format=torch.contiguous_format)


def mix_values_setup(ctx, inputs, output):
    v, bank_rows, inverse, gate, ctx.gate_v, order = inputs
    ctx.save_for_backward(v, bank_rows, inverse, gate, order)


def mix_values_backward(ctx, grad):
    v, bank_rows, inverse, gate, order = ctx.saved_tensors
    (T, H, d_h), (U, M) = v.shape, bank_rows.shape[:2]
    indices, flat, table = mix_indices(inverse, M), grad.reshape(T, H * d_h), bank_rows.reshape(U * M, H * d_h)
    d_rows = row_sums_dense(flat, indices, gate[..., ctx.gate_v:].transpose(1, 2), None, 1, order, U * M, bank_rows.dtype).view(bank_rows.shape)
    d_gate = gather_dot_op(table, indices, flat, None, 1, H, order, False).transpose(1, 2)               # (T, H, M)
    if not ctx.gate_v:
        return grad, d_rows, None, d_gate.to(gate.dtype), None, None
    d_own = (grad * v).sum(-1, keepdim=True, dtype=acc_dtype(grad, v))
    return (grad * gate[..., :1]).to(v.dtype), d_rows, None, torch.cat((d_own, d_gate), -1).to(gate.dtype), None, None


mix_values_op.register_autograd(mix_values_backward, setup_context=mix_values_setup)


def mix_values(v: Tensor, bank_rows: Tensor, inverse: Tensor, gate: Tensor, gate_v: bool = True, order: Optional[Tensor] = None) -> Tensor:
    """MoVE eq. 4: out[t,h] = gate[t,h,0] * v[t,h] + sum_i gate[t,h,i+1] * bank_rows[inverse[t],i,h], in v's dtype.

    v (T, H, d_h) float; bank_rows (U, M, H, d_h) or (U, M, H*d_h) float: the distinct tokens' value rows (gather_rows); inverse (T,) int32|int64 in [0, U);
    gate (T, H, M+1), or (T, H, M) with gate_v=False, where v is added as it is. The dtypes may differ. -> (T, H, d_h).
    No (T, M, d) tensor is made, forward or backward. order: mix_order(inverse, M), which sorts once for all layers.
    """
    require(v.dim() == 3 and v.is_floating_point(), f"v must be (T, H, d_h) float, got {describe(v)}")
    (T, H, d_h), M = v.shape, gate.shape[-1] - gate_v
    require(gate.dim() == 3 and gate.shape[:2] == (T, H) and M >= 1, f"gate must be (T, H, M + gate_v) with T, H = {(T, H)}, got {describe(gate)}")
    U = bank_rows.shape[0]
    require(bank_rows.shape in ((U, M, H, d_h), (U, M, H * d_h)),
            f"bank_rows must be (U, M, H, d_h) with M, H, d_h = {(M, H, d_h)} as gate and v say, got {describe(bank_rows)}")
    require(inverse.shape == (T,) and inverse.dtype in (torch.int32, torch.int64), f"inverse must be (T,) = ({T},) int32 or int64, got {describe(inverse)}")
    require(order is None or order.shape == (T * M,), f"order must be mix_order(inverse, M), ({T * M},), got {order is not None and describe(order)}")
    check_devices(v=v, bank_rows=bank_rows, inverse=inverse, gate=gate, order=order)
    check_range("inverse", inverse, U)
    return mix_values_op(v, bank_rows.reshape(U, M, H, d_h), inverse, gate, gate_v, order)


def mix_order(inverse: Tensor, M: int) -> Tensor:
    return sort_indices(mix_indices(inverse, M))
