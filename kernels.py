"""The sparse-memory operations of the five architectures (torch path; see each function's docstring)."""
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
