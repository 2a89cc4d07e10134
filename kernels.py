"""The sparse-memory operations of the five architectures (torch path; see each function's docstring)."""
import ctypes
import platform

import torch
import torch.nn.functional as F


def _compute_dtype(*tensors):
    """fp32, or fp64 when any input is: bf16 inputs accumulate in fp32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table, rows, sparse_grad):
        ctx.save_for_backward(rows)
        ctx.shape, ctx.sparse_grad = table.shape, sparse_grad
        return table.index_select(0, rows)

    @staticmethod
    def backward(ctx, grad):
        rows, = ctx.saved_tensors
        if ctx.sparse_grad:
            return torch.sparse_coo_tensor(rows[None], grad.contiguous(), ctx.shape, is_coalesced=True, check_invariants=False), None, None
        return grad.new_zeros(ctx.shape).index_copy_(0, rows, grad), None, None


def gather_rows(table, rows, sparse_grad=False):
    """table[rows], with a gradient that reaches the table once.

    table (N, ...); rows (U,) int64, sorted and distinct (as torch.unique returns them) -> (U, ...).
    The gradient is dense (zeros and one write of U rows) or, with sparse_grad, a coalesced COO tensor of those rows.
    """
    return _GatherRows.apply(table, rows, sparse_grad)


class _MixValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v, rows, inverse, gate, gate_v):
        (T, H, d), M, dtype = v.shape, rows.shape[1], _compute_dtype(v, rows, gate)
        table, g = rows.to(dtype).view(-1, d), gate.to(dtype)                                                   # (U*M*H, d)
        index = (inverse[:, None, None] * M + torch.arange(M, device=v.device)) * H + torch.arange(H, device=v.device)[:, None]
        index = index.view(T * H, M)                                                                            # bag (t, h) holds (inverse[t], i, h)
        weights = g[..., gate_v:].reshape(T * H, M)
        own = v.to(dtype) * g[..., :1] if gate_v else v
        out = own + F.embedding_bag(index, table, mode="sum", per_sample_weights=weights).view(T, H, d)
        ctx.save_for_backward(v, rows, inverse, gate)
        ctx.gate_v = gate_v
        return out.to(v.dtype)

    @staticmethod
    def backward(ctx, grad):
        v, rows, inverse, gate = ctx.saved_tensors
        (T, H, d), (U, M), dtype, dev = v.shape, rows.shape[:2], _compute_dtype(v, rows, gate), v.device
        grad, g = grad.to(dtype).contiguous(), gate.to(dtype)
        d_v = grad * g[..., :1] if ctx.gate_v else grad
        # rows: one bag (i, h, u) per bank row, over the tokens that use it, in sorted order
        order = inverse.argsort(stable=True)
        start = torch.searchsorted(inverse[order], torch.arange(U, device=dev))
        index = (order * H + torch.arange(H, device=dev)[:, None]).expand(M, H, T).reshape(-1)
        offsets = (torch.arange(M * H, device=dev)[:, None] * T + start).view(-1)
        weights = g[..., ctx.gate_v:][order].permute(2, 1, 0).reshape(-1)
        d_rows = F.embedding_bag(index, grad.view(T * H, d), offsets, mode="sum", per_sample_weights=weights)
        d_rows = d_rows.view(M, H, U, d).permute(2, 0, 1, 3)                                                    # (U, M, H, d)
        # gates: <grad[t, h], rows[inverse[t], i, h]>, the op that embedding_bag's own backward uses
        index = ((inverse[:, None, None] * M + torch.arange(M, device=dev)) * H + torch.arange(H, device=dev)[:, None]).view(-1)
        bag = torch.arange(T * H * M, device=dev) // M
        d_gate = torch.ops.aten._embedding_bag_per_sample_weights_backward(
            grad.view(T * H, d), rows.to(dtype).view(-1, d), index, torch.arange(0, T * H * M, M, device=dev), bag, 0, -1).view(T, H, M)
        if ctx.gate_v:
            d_gate = torch.cat(((grad * v.to(dtype)).sum(-1, keepdim=True), d_gate), -1)
        return d_v.to(v.dtype), d_rows.to(rows.dtype), None, d_gate.to(gate.dtype), None


def mix_values(v, bank_rows, inverse, gate, gate_v=True):
    """MoVE eq. 4: out[t, h] = gate[t, h, 0] * v[t, h] + sum_i gate[t, h, i + 1] * bank_rows[inverse[t], i, h].

    v (T, H, d_h); bank_rows (U, M, H, d_h) or (U, M, H*d_h), the distinct tokens' value rows (gather_rows); inverse (T,) int64 in [0, U);
    gate (T, H, M+1), or (T, H, M) with gate_v=False, where v is added as it is. -> (T, H, d_h) in v's dtype; accumulates in fp32.
    No (T, M, d) tensor is made, forward or backward.
    """
    (T, H, d), M = v.shape, gate.shape[-1] - gate_v
    return _MixValues.apply(v, bank_rows.reshape(bank_rows.shape[0], M, H, d), inverse, gate, gate_v)


# ---------------------------------------------------------------- row-sparse gradients in training

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


# ---------------------------------------------------------------- training on a CPU

def tune_cpu():
    """Two settings of the process without which training on a CPU is slow: glibc keeps freed memory instead of faulting it in again
    every step, and torch.optim.Muon computes in fp32, since a CPU without bf16 instructions is a hundred times slower in bf16."""
    if platform.libc_ver()[0] == "glibc":
        for option, value in ((-3, 1 << 30), (-1, 2 ** 31 - 1), (-2, 1 << 28)):     # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD
            ctypes.CDLL(None).mallopt(option, value)
    torch.optim._muon._zeropower_via_newtonschulz = newton_schulz_fp32


def newton_schulz_fp32(G, coefficients, steps, eps):
    """Muon's orthogonalisation of a gradient G (rows, columns), step for step as torch.optim has it, but in fp32."""
    a, b, c = coefficients
    X = G.T if G.size(0) > G.size(1) else G
    X = X / X.norm().clamp(min=eps)
    for _ in range(steps):
        A = X @ X.T
        X = torch.addmm(X, torch.addmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X.T if G.size(0) > G.size(1) else X
