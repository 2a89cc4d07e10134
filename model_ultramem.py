"""
UltraMemV2 (Huang et al. 2025, "UltraMemV2: Memory Networks Scaling to 120B Parameters with Superior
Long-Context Learning").

The idea: beside the FFN of every block stands an enormous second FFN of which a token uses a few
hidden units only. Its N = n^2 units are tiny experts: a pre-value row P_i, a value row V_i, no
activation. They stand on an n x n grid whose rows and columns have keys; cell (a, b) scores by a
small bilinear form of row a's and column b's scores: 4n dot products rank n^2 experts. No softmax,
no activation: choosing is the nonlinearity. P = B*T tokens (P_i is a pre-value), R retrieval heads,
r = 2 Tucker ranks, H = 2 Tucker cores C (H, R, r, r), m slots picked by each head (top_k in the
code), k = R*m. (Eq. 7 has one core; H of them, each weighing a slice of V_i, are the published
code's.)

    h     = RMSNorm(x)                          (P, d)      the FFN's input; the paper's x
    q     = RMSNorm(h W_q)                      (P, 2, r, D_k)   for rows and columns, one a rank
    S_row = q_row K_row,  S_col = q_col K_col   (P, R, r, n)     eq. 6; the keys RMS-normed, too
    u, v  = first singular vectors of sum_H C   (R, r)      eqs. 16, 18: C taken as of rank 1
    rows, columns: Top-m_key of u^T S_row and of v^T S_col  stage 1, indices only
    s, i  = Top-m of S_row^T C S_col there      (P, k, H), (P, k)   stage 2, by sums over H; eq. 7
    i     = Shuffle(i)                          eq. 8, a fixed permutation
    p     = P_i (h W_pre)                       (P, k)      eq. 15; W_pre: Appendix 6
    y     = sum of p s V_i over the k slots     (P, D_v)    slice c of H weighted by core c's score
    x     = x + FFN(h) + y W_out                eq. 12

              x ---- h -------+---------------+-------------+
              |             SwiGLU    W_q, keys, core C   W_pre
              |               |          Top-m of n^2       |
              |               |       scores s   slots i -> P_i . h W_pre = p
              x <---- + ------+---- W_out -- sum of (p s) V_i

Below the fold: the start of Appendix 6 (by default memories start as in the published code), a
balance loss, tables that layers share; then the predecessors (UltraMem, PKM, PEER, Memory+) and the
mixture of experts to beat.

    python train.py --model=ultramem       # --memory=moe | pkm | peer | memory+ | ultramem
"""
import math
import re
import zlib
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from kernels import (attend, gather_dot, gather_sum, linear_cross_entropy, product_key_topk,
                     rms_norm, sort_indices, tucker_topk)

RANK = 2                          # r, Tucker ranks
CORES = 2                         # H, Tucker cores; each weighs a slice of the value


@dataclass
class Config:
    vocab_size: int = 50304       # tokens
    block_size: int = 2048        # tokens of context in training
    n_layer: int = 20             # L
    n_head: int = 12              # heads of the attention
    n_embd: int = 768             # d, width
    n_inner: int = -1             # FFN's hidden units; -1: 4d less the memory's work (MoE: 4d)
    tied: bool = True             # one matrix for the embedding and the head
    norm_eps: float = 1e-5        # of every RMS norm
    rope_base: float = 10000.0    # of the rotary embedding
    memory: str = "ultramemv2"    # none | moe | pkm | memory+ | peer | ultramem | ultramemv2
    memory_layers: str = ""       # 4,8 | all | 2:5/6:9 (reads in 2, adds after 5); "": by memory
    n_keys: int = -1              # n: n^2 slots; -1: the size of 56 experts (MoE: n experts, 8 m)
    heads: int = -1               # R, retrieval heads; -1: 1 (older memories 2)
    top_k: int = -1               # m, slots a head picks; -1: 32 L in all layers together (MoE: 8)
    key_dim: int = -1             # D_k; -1: d/4 (Table 10); one-query V2, PKM, PEER, Memory+ d/2
    value_dim: int = -1           # D_v; -1: 3d/16, 4.2.5 (UltraMem d/2, MoE's own, else d)
    pre_value_dim: int = -1       # D_p; -1: d/16 (PEER d); 0: plain values (-1 of older memories)
    rank_queries: int = -1        # 1: a query per Tucker rank; 0: one; -1: 1 (UltraMem 0)
    virtual: int = -1             # E, blocks of virtual slots over the values; -1: 1 (UltraMem 4)
    projectors: int = -1          # 1, or E: a W_out for each block (eq. 9); -1: 1 (UltraMem E)
    share: str = ""               # ring:g | noring:g | block:g: slots of g layers' tables (4.2.8)
    init: str = "published"       # published (code) | appendix (eq. 26); MoE: published | ffn
    value_lr: float = 1.0         # rate of the values at the start, in units of the others' (4.2.9)
    value_lr_until: float = 0.25  # the fraction of the run at which it has fallen to 1
    balance_loss: float = 0.0     # beta of eq. 19 (the paper: 0.001; see balance_loss)
    sparse_memory: bool = False   # lazy Adam for tables: cost independent of N; no weight decay

    def __post_init__(self):
        """Check, and fill in what is automatic: the memory's size and the FFN's beside it, so that
        any two memories do equal work, that of an FFN of 4d, and have equal totals, those of 64
        experts of which 8 are used (a MoE that stands in all blocks)."""
        d, L = self.n_embd, self.n_layer
        memory = memory_class(self.memory)
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd"):
            self.check(getattr(self, name) > 0, name, "must be at least 1")
        for name in ("n_keys", "heads", "top_k", "key_dim", "value_dim", "virtual"):
            value = getattr(self, name)
            self.check(value > 0 or value == -1, name, "must be at least 1, or -1 (automatic)")
        self.check(self.pre_value_dim >= -1, "pre_value_dim", "must be 0 or more, or -1")
        self.check(self.rank_queries in (-1, 0, 1), "rank_queries", "must be 0 or 1, or -1")
        self.check(self.rope_base > 0, "rope_base", "must be positive")
        for name in ("norm_eps", "value_lr", "balance_loss"):
            self.check(getattr(self, name) >= 0, name, "must not be negative")
        self.check(d % (2 * self.n_head) == 0, "n_embd n_head",
                   "n_embd must be a multiple of 2*n_head")
        self.check(self.value_lr_until > 0, "value_lr_until", "must be more than 0")
        if memory is None:
            self.sparse_memory = False
            self.fill(n_inner=4 * d)
        else:
            self.fill(**memory.defaults(self))
            self.fill(heads=1, rank_queries=1, virtual=1, projectors=1)
            how = (f"give different blocks from 0 to {L - 1} as 4,8,12, or reads:adds pairs as "
                   "2:5/6:9, or all")
            pairs = re.fullmatch(r"all|\d+(:\d+)?([,/]\d+(:\d+)?)*", self.memory_layers)
            self.check(pairs, "memory_layers", how)
            layers, adds = len(self.added_after), set(self.added_after.values())
            inside = all(a <= b < L for a, b in self.added_after.items())
            given = len(re.split("[,/]", self.memory_layers))
            once = len(adds) == layers and (given == layers or self.memory_layers == "all")
            self.check(inside and once, "memory_layers", how)
            self.check(self.value_dim > 0 and self.key_dim != 0, "n_embd key_dim value_dim",
                       "n_embd is too small for this memory: give key_dim and value_dim")
            width = self.value_dim + self.pre_value_dim
            unused = 56 * 1.5 * d * d * L                      # 56 experts of 3 * d * d/2
            tables = 1 if self.memory == "memory+" else layers
            self.fill(top_k=max(1, 32 * L // (self.heads * layers)),
                      n_keys=round((unused / (width * tables)) ** 0.5))
            for name, value in memory.fixed.items():
                rule = f"must be {value!r} for this memory"
                self.check(getattr(self, name) == value, f"memory {name}", rule)
            memory.check_fields(self)
            if self.n_inner == -1:             # from 3 d n_inner L + beside * layers = 12 d^2 L
                beside = memory.n_weights(self) + self.heads * self.top_k * width
                self.n_inner = round((12 * d * d * L - beside * layers) / (24 * d * L)) * 8
        self.check(self.n_inner > 0, "n_inner", "must be at least 1; the memory may leave no room "
                   "for it: make the memory smaller, or give n_inner")

    def check(self, ok, fields, rule):
        """Raise ValueError that names the fields and the rule they break."""
        if not ok:
            values = ", ".join(f"{name}={getattr(self, name)!r}" for name in fields.split())
            raise ValueError(f"{values}: {rule}")

    def fill(self, **automatic):
        """Give the fields that are -1 or "" what follows from the others."""
        for name, value in automatic.items():
            if getattr(self, name) in (-1, ""):
                setattr(self, name, value)

    @classmethod
    def from_depth(cls, depth, **overrides):
        """The depth dial: width 64*depth, heads of 64 channels; the memory follows from them."""
        sizes = dict(n_layer=depth, n_embd=64 * depth, n_head=depth)
        return cls(**{**sizes, **overrides})

    @property
    def head_dim(self):
        return self.n_embd // self.n_head

    @property
    def added_after(self):
        """{block whose FFN input a memory reads: block after which its output is added}."""
        if self.memory == "none":
            return {}
        if self.memory_layers == "all":
            return {layer: layer for layer in range(self.n_layer)}
        pairs = [pair.split(":") for pair in re.split("[,/]", self.memory_layers)]
        return dict(sorted((int(pair[0]), int(pair[-1])) for pair in pairs))

    @property
    def reach(self):
        """Values that a layer picks from: floor(n sqrt(g))^2, with those of g layers shared."""
        g = int(self.share.partition(":")[2] or 1)
        return math.isqrt(self.n_keys ** 2 * g) ** 2

    @property
    def n_rows(self):
        """Row (and column) keys of a head: their square is E times the values in reach."""
        return math.isqrt(self.reach * self.virtual)

    @property
    def m_key(self):
        """Rows (and columns) that stage 1 keeps: at most 128 (section 4.1), as all pairs of them
        are scored."""
        return min(self.top_k, 128, self.n_rows)


# Table 10; n_inner from the authors' launch scripts, which have none for 1b_7b: 7,004 gives the
# printed 1,079M active parameters, counted without embedding, head and values. Without embedding
# and head there are 6.22B in all, where 6.70B is printed, and with Memory+'s printed D_v of 384
# there would be 0.70B; here that is d, which makes 241M active parameters of the printed 228M.
PRESETS = {
    "227m_1.2b": dict(n_layer=20, n_embd=768, n_head=12, n_inner=2496, n_keys=360, key_dim=192,
                      top_k=32, value_dim=192, pre_value_dim=192),
    "1b_7b": dict(n_layer=16, n_embd=2048, n_head=16, n_inner=7004, n_keys=528, key_dim=512,
                  top_k=128, value_dim=768, pre_value_dim=384, tied=False),
    "ultramem_227m_1.2b": dict(memory="ultramem", n_inner=2752, n_keys=808, key_dim=192, top_k=80,
                               value_dim=384),
    "memoryplus_227m_1.2b": dict(memory="memory+", n_inner=3008, n_keys=1138, key_dim=384,
                                 top_k=80),
    "olmoe_227m_1.2b": dict(memory="moe", n_inner=8 * 384),
    "olmoe_1b_7b": dict(n_layer=16, n_embd=2048, n_head=16, tied=False, memory="moe",
                        n_inner=8 * 1024),
}
DENSE = dict(memory="none")       # beside a preset, whose FFN is narrow, give --n_inner=4d, too
RECIPE = {                        # of the published code
    "adamw": dict(learning_rate=4e-4, min_lr=4e-5, weight_decay=0.1, beta1=0.9, beta2=0.95,
                  grad_clip=1.0, schedule="cosine"),
}


# ---------------------------------------------------------------- the backbone: Llama with QK norm

class RMSNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x):
        return rms_norm(x, self.weight, self.eps)


def rotary_frequencies(config, device):
    """theta (d_h/2,): base^(-2i/d_h)."""
    exponent = -torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32)
    return config.rope_base ** (exponent / config.head_dim)


def rotary_tables(theta, start, length):
    """cos and signed sin of positions start .. start+length-1: each (length, 1, d_h) fp32."""
    position = torch.arange(start, start + length, device=theta.device, dtype=torch.float32)
    angle = position[:, None, None] * theta                    # (length, 1, d_h/2)
    cos = torch.cat((angle.cos(), angle.cos()), -1)
    sin = torch.cat((-angle.sin(), angle.sin()), -1)
    return cos, sin


def rotate(x, rotary):
    """Rotary embedding of x (B, T, H, d_h), half-split as in Hugging Face's Llama."""
    cos, sin = (t.to(x.dtype) for t in rotary)
    return x * cos + x.roll(x.size(-1) // 2, -1) * sin


class Cache:
    """What attention must remember of the tokens so far."""

    def __init__(self, max_len):
        self.pos = 0                                           # tokens so far
        self.max_len = max_len
        self.store = {}

    def append(self, key, new):
        """new (B, T, ...) at positions pos .. pos+T-1; returns all so far (B, pos+T, ...)."""
        end = self.pos + new.size(1)
        if end > self.max_len:
            raise ValueError(f"the cache holds {self.max_len} tokens and is asked for {end}: "
                             "make it longer with new_cache()")
        if key not in self.store:
            self.store[key] = new.new_empty(new.size(0), self.max_len, *new.shape[2:])
        self.store[key][:, self.pos:end] = new
        return self.store[key][:, :end]


class Attention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        d = config.n_embd
        self.layer = layer
        self.head_dim = config.head_dim
        self.W_Q = nn.Linear(d, d, bias=False)
        self.W_K = nn.Linear(d, d, bias=False)
        self.W_V = nn.Linear(d, d, bias=False)
        self.W_O = nn.Linear(d, d, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps)

    def forward(self, x, rotary, cache=None):
        heads = (-1, self.head_dim)
        q = self.W_Q(x).unflatten(-1, heads)                   # (B, T, n_head, d_h)
        k = self.W_K(x).unflatten(-1, heads)
        v = self.W_V(x).unflatten(-1, heads)
        q = rotate(self.q_norm(q), rotary)
        k = rotate(self.k_norm(k), rotary)
        if cache is not None:
            k = cache.append((self.layer, "k"), k)
            v = cache.append((self.layer, "v"), v)
        return self.W_O(attend(q, k, v))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(config.n_embd, config.n_inner, bias=False)
        self.up = nn.Linear(config.n_embd, config.n_inner, bias=False)
        self.down = nn.Linear(config.n_inner, config.n_embd, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


def own_generator(name, p):
    """A generator for tensor p alone, seeded by torch's seed and p's name: a tensor that two models
    both have, by name and shape, starts with equal values."""
    seed = torch.initial_seed() % 2 ** 31 + zlib.crc32(name.encode())
    return torch.Generator(p.device).manual_seed(seed)


# ================================================================ the idea

class Retrieval(nn.Module):
    """Tucker-decomposed query-key retrieval (TDQKR): a token's k = R*m slots and scores (eqs. 6-8).
    Eq. 11's h is not the h above: its h^2 heads are E `virtual` blocks of slots, one C for all, as
    in the published code; E is 1, which Table 4's shares of work fit. Each rank has its own query
    (section 3.2); that code makes them, but scores all ranks of a head's rows with one of them and
    all ranks of its columns with another. As there, heads share the queries, and a norm has one
    weight for all keys. (By section 4.2.3 two heads of half D_k are as much work as one; so shared,
    they are less.)"""

    def __init__(self, config):
        super().__init__()
        self.config = config
        R, D_k = config.heads, config.key_dim
        n = config.n_rows
        queries = RANK if config.rank_queries else 1
        self.W_q = nn.Linear(config.n_embd, 2 * queries * D_k, bias=False)   # heads share it
        self.q_norm = RMSNorm(D_k, config.norm_eps)
        self.k_norm = RMSNorm(D_k, config.norm_eps)
        self.keys = nn.Parameter(torch.empty(R, 2, RANK, n, D_k))
        self.core = nn.Parameter(torch.empty(CORES, R, RANK, RANK))
        self.register_buffer("u", torch.empty(R, RANK))        # singular vectors, of this step
        self.register_buffer("v", torch.empty(R, RANK))
        self.register_buffer("perm", torch.empty(n * n, dtype=torch.int64))

    def forward(self, x):
        """x (P, d), the h at the top -> raw scores (P, k, H), slots (P, k), auxiliary loss."""
        c = self.config
        q = self.W_q(x).view(len(x), 2, -1, c.key_dim)
        q = self.q_norm(q).expand(-1, -1, RANK, -1)            # (P, 2, r, D_k)
        keys = self.k_norm(self.keys)                          # (R, 2, r, n, D_k)
        s_row, s_col = torch.einsum("psxd,rsxnd->sprxn", q, keys)              # eq. 6
        # Stages 1, 2 (eq. 7): scores (P, R, m, H), cells i*n + j of the grid (P, R, m)
        scores, cells = tucker_topk(s_row, s_col, self.u, self.v, self.core, c.m_key, c.top_k)
        aux = 0
        if c.balance_loss and self.training:
            aux = c.balance_loss * balance_loss(self, s_row, s_col)
        slots = self.perm[cells.flatten(1)]                    # eq. 8
        return scores.flatten(1, 2).to(x.dtype), slots, aux


@torch.no_grad()
def update_vectors(retrievals):
    """u, v (R, r) of each layer: the first singular vectors of the cores' sum. (u, v) and (-u, -v)
    are both right and rank oppositely: take the pair nearer to the last step's."""
    cores = torch.stack([layer.core.float().sum(0) for layer in retrievals])
    U, _, Vh = torch.linalg.svd(cores)                         # (L, R, r, r)
    for layer, u, v in zip(retrievals, U[..., 0], Vh[..., 0, :]):
        near = (u * layer.u + v * layer.v).sum(1, keepdim=True) >= 0
        layer.u.copy_(torch.where(near, u, -u))
        layer.v.copy_(torch.where(near, v, -v))


class Tables(nn.Module):
    """The experts: their values V, and pre-values P."""

    def __init__(self, config, rows):
        super().__init__()
        self.values = nn.Parameter(torch.empty(rows, config.value_dim))
        self.pre_values = None
        if config.pre_value_dim:
            self.pre_values = nn.Parameter(torch.empty(rows, config.pre_value_dim))


def table_rows(config):
    """The length of each table: one for each memory layer, or one that they have together."""
    layers, N = len(config.added_after), config.n_keys ** 2
    if config.memory in ("none", "moe"):
        return []
    if config.memory == "memory+":
        return [N]
    return [N * layers] if config.share else [N] * layers


# What a memory has beside forward(): defaults(c), what -1 and "" stand for; `fixed`, the fields
# that have one value for it; check_fields(c); n_weights(c), for the FFN's width beside it; and
# stds(c), norm_power and finish_init() for its start.

class UltraMemV2(nn.Module):
    """k experts with one hidden unit each, weighted by their retrieval scores (eq. 15)."""

    fixed = {}
    norm_power = 0.4

    def __init__(self, config, layer):
        super().__init__()
        self.config = config
        self.table = list(config.added_after).index(layer)
        self.offset = 0
        if config.share:                                       # one long table
            self.offset = first_table(config, self.table) * config.n_keys ** 2
            self.table = 0
        self.retrieve = Retrieval(config)
        self.W_pre = None
        if config.pre_value_dim:
            self.W_pre = nn.Linear(config.n_embd, config.pre_value_dim, bias=False)
        self.W_out = nn.Linear(config.projectors * config.value_dim, config.n_embd, bias=False)

    def forward(self, x, table):
        """x (B, T, d), the normed input of the FFN (h at the top) -> (B, T, d), auxiliary loss."""
        c = self.config
        tokens = x.flatten(0, 1)
        scores, slots, aux = self.retrieve(tokens)             # (P, k, H), (P, k)
        # By default rows are the slots, and blocks is None. The rest is for what is below the fold.
        rows = self.offset + slots % c.reach                   # virtual blocks repeat
        rows = rows % len(table.values)                        # a ring of layers closes
        order = sort_indices(rows) if torch.is_grad_enabled() else None    # for both tables
        if self.W_pre is not None:
            hidden = self.W_pre(tokens)                        # (P, D_p)
            p = gather_dot(table.pre_values, rows, hidden, c.sparse_memory, order)   # (P, k)
            scores = scores * p[..., None]                     # eq. 15
        blocks = slots // c.reach if c.projectors > 1 else None
        y = gather_sum(table.values, rows, scores, blocks, c.projectors, c.sparse_memory, order)
        return self.W_out(y.flatten(1)).view(x.shape), aux     # eq. 12, or eq. 9

    @staticmethod
    def stds(c):
        """Standard deviations at the start, for matrices that do not start as the backbone's.

        The published ones are those of olmo/ultramem_layer_v2.py in the code that the paper links,
        github.com/ZihaoHuang-notabot/Ultra-Sparse-Memory-Network, commit e95379a:

            W_q, keys               std D_k^-1/2
            W_pre                   std d^-1/2
            W_out                   std (E D_v)^-1/2, E its projectors
            weights of both norms   D_k^-0.4 (ultramem_layer.py, UltraMem: D_k^-0.33)
            cores                   uniform in [0, 1), in Model.init_weights
            values, pre-values      std 0.02

        So it is not the equation of Appendix 6, with which memories start larger than the FFN.
        (Commit 6da52aa has that equation, and W_out as small as the FFN's last matrix.)
        """
        if c.init == "appendix":
            return dict(values=1, pre_values=1)                # times what appendix_start() finds
        return dict(W_q=c.key_dim ** -0.5, keys=c.key_dim ** -0.5, W_pre=c.n_embd ** -0.5,
                    W_out=(c.projectors * c.value_dim) ** -0.5, values=0.02, pre_values=0.02)

    def finish_init(self, name, table):
        """The rest of the initial values, once the matrices have theirs."""
        c, r = self.config, self.retrieve
        generator = own_generator(name, r.perm)
        r.perm.copy_(torch.randperm(len(r.perm), generator=generator, device=r.perm.device))
        r.u.fill_(1)                                           # the first u has a positive sum
        r.v.zero_()
        update_vectors([r])
        if c.init == "appendix":
            return appendix_start(self, table, generator)
        r.q_norm.weight.fill_(c.key_dim ** -self.norm_power)
        r.k_norm.weight.fill_(c.key_dim ** -self.norm_power)

    @staticmethod
    def defaults(c):
        """What -1 and "" stand for."""
        d = c.n_embd
        return dict(memory_layers="all", key_dim=d // 4 if c.rank_queries else d // 2,
                    value_dim=3 * d // 32 * 2, pre_value_dim=d // 16)

    @staticmethod
    def check_fields(c):
        c.check(c.init in ("published", "appendix"), "init", "choose published or appendix")
        c.check(c.value_dim % CORES == 0, "value_dim",
                f"must be a multiple of {CORES}, a slice for each Tucker core")
        layers = len(c.added_after)
        if c.share:
            kind, _, g = c.share.partition(":")
            fits = g.isdecimal() and 1 <= int(g) <= layers
            fits = fits and (kind in ("ring", "noring") or kind == "block" and layers % int(g) == 0)
            c.check(fits, "share", "give ring:g, noring:g or block:g for g of the "
                    f"{layers} memory layers (block: a divisor)")
        c.check(c.top_k <= c.m_key ** 2, "top_k n_keys", f"needs top_k <= {c.m_key ** 2}")
        c.check(c.init != "appendix" or c.top_k < c.n_rows ** 2, "init top_k n_keys",
                "init=appendix needs a mean score above 0: fewer picks than there are slots")
        square = math.isqrt(c.virtual) ** 2 == c.virtual
        c.check(square and c.projectors in (1, c.virtual), "virtual projectors",
                "give a square, and 1 or as many")

    @staticmethod
    def n_weights(c):
        """Parameters of a layer beside its tables (but norms and cores)."""
        queries = RANK if c.rank_queries else 1
        keys = c.heads * 2 * RANK * c.n_rows * c.key_dim
        into = 2 * queries * c.key_dim + c.pre_value_dim
        return keys + c.n_embd * (into + c.projectors * c.value_dim)


def memory_class(name):
    """The class of a memory: the paper's own, or one from below the fold."""
    if name == "none":
        return None
    if name == "ultramemv2":
        return UltraMemV2
    if name not in MEMORIES:
        raise ValueError(f"memory={name!r}: choose one of none, {', '.join(MEMORIES)}")
    return MEMORIES[name]


# ================================================================ the model

class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.attn_norm = RMSNorm(config.n_embd, config.norm_eps)
        self.attn = Attention(config, layer)
        self.mlp_norm = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)
        self.memory = None
        if layer in config.added_after:
            self.memory = memory_class(config.memory)(config, layer)
            if config.memory == "moe":
                self.mlp = None                                # its experts are the FFN

    def forward(self, x, rotary, table, cache):
        """-> x, what the memory adds to it here or after a later block, auxiliary loss."""
        x = x + self.attn(self.attn_norm(x), rotary, cache)
        h = self.mlp_norm(x)
        y, aux = None, 0
        if self.memory is not None:
            y, aux = self.memory(h, table)
        if self.mlp is not None:
            x = x + self.mlp(h)
        return x, y, aux


def in_table(name):
    """Whether a parameter is one of which a token touches few rows: values, pre-values, experts."""
    return name.startswith("tables.") or name.endswith(".experts")


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.added_after = config.added_after
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.tables = nn.ModuleList(Tables(config, rows) for rows in table_rows(config))
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        self.head = None                                       # None: the embedding's matrix
        if not config.tied:
            self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    @torch.no_grad()
    def init_weights(self):
        """Normal of std sqrt(2/(5d)), times sqrt(1/(2L)) for the FFN's last matrix (Appendix 6).
        Not said there: the cut at 3 std, W_O as that matrix, embedding and head as the rest. The
        memories as stds() and finish_init() say."""
        c = self.config
        memory = memory_class(c.memory)
        stds = {} if memory is None else memory.stds(c)
        for name, p in self.named_parameters():
            generator = own_generator(name, p)
            std = (2 / (5 * c.n_embd)) ** 0.5
            if name.endswith(("W_O.weight", "mlp.down.weight")):
                std *= (2 * c.n_layer) ** -0.5
            key = name.removesuffix(".weight").split(".")[-1]
            if p.ndim == 1:
                p.fill_(1)
            elif key == "core":
                p.uniform_(0, 1, generator=generator)
            elif key in stds:
                p.normal_(0, stds[key], generator=generator)
            else:
                nn.init.trunc_normal_(p, 0, std, -3 * std, 3 * std, generator=generator)
        for layer in self.added_after:
            block = self.blocks[layer]
            block.memory.finish_init(f"blocks.{layer}.memory", self.table_of(block))

    def table_of(self, block):
        """What its memory reads; None: it has no memory, or experts."""
        if block.memory is None or block.memory.table is None:
            return None
        return self.tables[block.memory.table]

    def begin_step(self, step, max_iters):
        """Before an optimizer step: the singular vectors of the cores as they are now."""
        retrievals = [module for module in self.modules() if isinstance(module, Retrieval)]
        if retrievals:
            update_vectors(retrievals)

    def forward(self, idx, targets=None, cache=None):
        """idx (B, T) int64. With targets (B, T), -1 where there is no loss: (None, mean
        cross-entropy in nats). Without: (logits (B, T, vocab) fp32, None), of the last position
        only when a cache from new_cache() is given."""
        start = 0 if cache is None else cache.pos
        rotary = rotary_tables(rotary_frequencies(self.config, idx.device), start, idx.size(1))
        x = self.embed(idx)                                    # (B, T, d)
        aux = x.new_zeros(())
        later = {}                                             # {block: what is added after it}
        for layer, block in enumerate(self.blocks):
            x, y, loss = block(x, rotary, self.table_of(block), cache)
            aux = aux + loss
            if y is not None:
                later[self.added_after[layer]] = y
            if layer in later:
                x = x + later.pop(layer)
        x = self.norm(x)
        if targets is not None:
            loss = linear_cross_entropy(x, (self.head or self.embed).weight, targets)
            return None, loss + (aux - aux.detach())           # gradients of aux, not its value
        if cache is not None:
            cache.pos += idx.size(1)
            x = x[:, -1:]
        return self.logits(x), None

    def logits(self, x):
        return F.linear(x, (self.head or self.embed).weight).float()

    def new_cache(self, batch_size, max_len):
        return Cache(max_len)

    def param_groups(self, optimizer, learning_rate, weight_decay):
        """AdamW with weight decay on everything, norms and values too, as published; but lazy Adam
        (sparse_memory) decays nothing. The published rate is for widths from 768 on; ours for
        narrower models is 768/d times as much. Memory+'s values keep one rate (if value_lr is 1),
        1e-3 where all else begins with 4e-4, as in the code published with Table 3; in its own
        authors' code that rate falls, too. Those of PKM learned at 1e-3, too; here as all else."""
        c = self.config
        rest, tables = [], []
        for name, p in self.named_parameters():
            group = tables if in_table(name) else rest
            group.append(p)
        groups = [dict(params=rest, kind="adamw", lr=learning_rate * max(1.0, 768 / c.n_embd),
                       weight_decay=weight_decay, schedule=True)]
        if tables:
            values = dict(groups[0], params=tables, boost=(c.value_lr, c.value_lr_until))
            if c.sparse_memory:
                values["kind"] = "sparse"
            if c.memory == "memory+":
                values.update(lr=2.5 * values["lr"], schedule=False)
            groups.append(values)
        return groups

    def param_counts(self):
        """total, memory (tables or experts), active: what one token touches, all keys included."""
        c = self.config
        total = sum(p.numel() for p in self.parameters())
        memory = sum(p.numel() for name, p in self.named_parameters() if in_table(name))
        touched = c.heads * c.top_k * (c.value_dim + c.pre_value_dim) * len(self.added_after)
        unread = 0 if c.tied else (c.vocab_size - 1) * c.n_embd
        return dict(total=total, memory=memory, active=total - memory + touched - unread)

    def flops_per_token(self):
        """Forward and backward: 6 for an active weight (a value is one, too) and 12*T*d a layer for
        attention at full context."""
        c = self.config
        vectors = sum(p.numel() for p in self.parameters() if p.ndim == 1)
        attention = 12 * c.n_layer * c.block_size * c.n_embd
        return 6 * (self.param_counts()["active"] - vectors) + attention

    @torch.no_grad()
    def inspect(self, idx):
        """What the tokens of idx (B, T) pick, layer by layer, {name: (tensor, names of its axes)}:
        "dead", the share of slots that none picks; "kl" of their use to a uniform one; "use", the
        share of those that are picked 0, 1, 2-3, 4-7, ..., 1024 times or more."""
        found = []

        def look(retrieve, inputs, output):
            c = retrieve.config
            n_slots = c.n_keys if c.memory == "moe" else c.reach * c.virtual
            uses = torch.bincount(output[1].flatten(), minlength=n_slots)
            share = uses / uses.sum()
            doubling = torch.where(uses > 0, uses.float().log2().floor().long() + 1, 0)
            use = torch.bincount(doubling.clamp(max=11), minlength=12) / n_slots
            kl = torch.special.xlogy(share, share * n_slots).sum()
            found.append(((uses == 0).float().mean(), kl, use))

        memories = [self.blocks[layer].memory for layer in self.added_after]
        hooks = [memory.retrieve.register_forward_hook(look) for memory in memories]
        self(idx)
        for hook in hooks:
            hook.remove()
        if not found:
            return {}
        dead, kl, use = map(torch.stack, zip(*found))
        return {"dead": (dead, ("layer",)), "kl": (kl, ("layer",)), "use": (use, ("layer", "uses"))}


# ================================================================ below the fold: ablations, rivals

def appendix_start(memory, table, generator):
    """Appendix 6: norm weights with which a score is 1 on average, and tables with which the
    memory's output has the variance that eq. 25 gives to the FFN's. (Eqs. 23-25 take SiLU's output
    for a normal cut off at 0; a real SwiGLU's standard deviation is 1.8 times smaller.) The
    appendix's k is our m, its k_inner h our n_inner."""
    c, r = memory.config, memory.retrieve
    x = torch.randn(512, c.n_embd, generator=generator, device=r.perm.device)
    scores = r(x)[0]
    mean = scores.mean()
    r.q_norm.weight.fill_(mean ** -0.25)                       # a score has four such factors
    r.k_norm.weight.fill_(mean ** -0.25)
    spread = 1 + (scores.std() / mean).square()                # 1 + sigma_s^2
    ratio = 0.2 * c.n_inner / (c.heads * c.top_k * spread * c.value_dim * c.n_layer)
    std = (0.4 * ratio) ** 0.5                                 # eq. 22 without pre-values
    if c.pre_value_dim:
        std = (ratio / c.pre_value_dim) ** 0.25                # eq. 26
    for p in table.parameters():                               # shared: as its last layer says
        p.mul_(std / p.std())


def balance_loss(retrieval, s_row, s_col):
    """Eqs. 18-20 for rows plus columns, mean over heads: 1 + 1 where use is uniform. The frequency
    is a share of stage 1's picks, as in the published code; eq. 20 prints a share of the tokens,
    m_key times as much. The layers' losses add up."""
    m_key = retrieval.config.m_key
    loss = 0
    for vector, s in ((retrieval.u, s_row), (retrieval.v, s_col)):
        a = (vector[:, :, None] * s.float()).sum(2)            # (P, R, n)
        picks = torch.zeros_like(a).scatter(2, a.topk(m_key).indices, 1.0)
        frequency = picks.mean(0) / m_key                      # (R, n)
        probability = a.softmax(-1).mean(0)                    # eq. 18
        loss = loss + a.size(2) * (frequency * probability).sum(-1).mean()     # eq. 19
    return loss


def first_table(config, i):
    """The first of the g layers' tables that the i-th memory layer picks from (Table 7)."""
    kind, _, g = config.share.partition(":")
    layers, g = len(config.added_after), int(g)
    if kind == "ring":
        return i    # Table 7 begins one earlier: the same model, its tables numbered otherwise
    if kind == "block":
        return i // g * g
    return min(max(i - (g - 1) // 2, 0), layers - g)           # noring: (g-1)/2 before its own


# ---------------------------------------------------------------- the predecessors

class UltraMem(UltraMemV2):
    """UltraMem (Huang et al. 2024), V1: a few layers, one query for all ranks, plain values, a
    projector for each of E blocks of virtual slots (IVE, eqs. 8, 9); what is read before one FFN is
    added some blocks later. Without its penalty on the cores (eq. 17); its values learn with
    --value_lr=4 (4.2.9)."""

    fixed = dict(init="published")
    norm_power = 0.33

    @staticmethod
    def defaults(c):
        d, L = c.n_embd, c.n_layer
        skip = max(1, 3 * L // 20)                             # 20 layers: 2:5/6:9/10:13/14:17
        reads = sorted({L * i // 10 for i in (1, 3, 5, 7)})
        layers = "/".join(f"{a}:{a + skip}" for a in reads if a + skip < L)
        c.fill(virtual=4)
        return dict(memory_layers=layers or "0", heads=2, key_dim=d // 4, value_dim=d // 2,
                    pre_value_dim=0, rank_queries=0, projectors=c.virtual)


# Fields that mean nothing to a memory without Tucker scores.
PLAIN = dict(share="", rank_queries=1, virtual=1, projectors=1, balance_loss=0.0)


class ProductKeys(nn.Module):
    """A token's k = R*m slots by sums of a row's and a column's score (eqs. 3, 4), weighted by
    softmax (Lample et al.'s, not in the equations); every head has queries and keys of its own."""

    def __init__(self, config):
        super().__init__()
        R, D_k = config.heads, config.key_dim
        self.config = config
        self.W_q = nn.Linear(config.n_embd, R * 2 * D_k, bias=False)
        self.keys = nn.Parameter(torch.empty(R, 2, config.n_keys, D_k))

    def forward(self, x):
        """x (P, d) -> weights (P, k, 1), slots (P, k), no auxiliary loss."""
        c = self.config
        q = self.W_q(x).view(len(x), c.heads, 2, c.key_dim)
        s = torch.einsum("prsd,rsnd->sprn", q, self.keys)      # (2, P, R, n)        eq. 3
        s_row, s_col = s.flatten(1, 2)                         # (P*R, n) each
        scores, i, j = product_key_topk(s_row, s_col, c.top_k)         # (P*R, m)    eq. 4
        weights = scores.softmax(-1).to(x.dtype).view(len(x), -1, 1)
        return weights, (i * c.n_keys + j).view(len(x), -1), 0


class PKM(nn.Module):
    """Product-key memory (Lample et al. 2019): heads summed, values as wide as x (eq. 5). The
    original stands in the FFN's place, its queries pass a batch norm, and its keys start sqrt(2)
    times as large."""

    fixed = dict(PLAIN, init="published", pre_value_dim=0)

    def __init__(self, config, layer):
        super().__init__()
        self.config = config
        self.table = list(config.added_after).index(layer)
        self.retrieve = ProductKeys(config)

    def forward(self, x, table):
        tokens = x.flatten(0, 1)
        weights, slots, aux = self.retrieve(tokens)
        y = self.read(tokens, weights, slots, table)
        return y.view(x.shape), aux

    def read(self, x, weights, slots, table):
        return gather_sum(table.values, slots, weights, sparse_grad=self.config.sparse_memory)

    @staticmethod
    def stds(c):
        """Memory+'s constants, for all three; numbers are normal here, uniform there."""
        W_q = (2 / (c.n_embd + 2 * c.heads * c.key_dim)) ** 0.5        # Xavier
        return dict(keys=(6 * c.key_dim) ** -0.5, W_q=W_q, values=c.value_dim ** -0.5)

    def finish_init(self, name, table):
        pass

    @staticmethod
    def defaults(c):
        d, L = c.n_embd, c.n_layer
        layers = sorted({L * i // 5 for i in range(1, 5)})     # 20 layers: 4,8,12,16
        return dict(memory_layers=",".join(map(str, layers)), heads=2, key_dim=d // 2, value_dim=d,
                    pre_value_dim=0)

    @staticmethod
    def check_fields(c):
        c.check(c.top_k <= c.n_keys ** 2, "top_k n_keys", f"needs top_k <= {c.n_keys ** 2}")
        c.check(c.memory == "memory+" or c.value_dim == c.n_embd, "memory value_dim n_embd",
                "value_dim must be n_embd")
        c.check(c.memory != "peer" or c.pre_value_dim == c.n_embd, "memory pre_value_dim n_embd",
                "pre_value_dim must be n_embd")

    @staticmethod
    def n_weights(c):
        return 2 * c.heads * c.key_dim * (c.n_embd + c.n_keys)


class MemoryPlus(PKM):
    """Memory+ (Berges et al. 2024): its layers share one table, and a gate decides what the values
    are worth here. Beside the FFN, as in the code published with Table 3; by section 4.2.6 the
    original stands in its place. Queries are not normalised, as in the original; that code does."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.table = 0
        self.W_g = nn.Linear(config.n_embd, config.value_dim, bias=False)
        self.W_out = nn.Linear(config.value_dim, config.n_embd, bias=False)

    def read(self, x, weights, slots, table):
        y = super().read(x, weights, slots, table)
        return self.W_out(y * F.silu(self.W_g(x)))

    @staticmethod
    def stds(c):
        std = c.value_dim ** -0.5
        return dict(PKM.stds(c), W_g=std, W_out=std)

    @staticmethod
    def n_weights(c):
        return PKM.n_weights(c) + 2 * c.n_embd * c.value_dim


class PEER(PKM):
    """PEER (He 2024): experts with one hidden unit and a GELU, found by product keys, weighted by a
    softmax. In every block, beside the FFN, with keys for each head; the original stands in one
    FFN's place, its heads share one set of keys, and its queries pass a batch norm."""

    fixed = dict(PLAIN, init="published")

    def read(self, x, weights, slots, table):
        sparse = self.config.sparse_memory
        order = sort_indices(slots) if torch.is_grad_enabled() else None
        p = F.gelu(gather_dot(table.pre_values, slots, x, sparse, order))      # (P, k)
        weights = weights * p[..., None]
        return gather_sum(table.values, slots, weights, sparse_grad=sparse, order=order)

    @staticmethod
    def stds(c):
        return dict(PKM.stds(c), pre_values=c.n_embd ** -0.5)  # as Memory+'s authors

    @staticmethod
    def defaults(c):
        return dict(PKM.defaults(c), memory_layers="all", pre_value_dim=c.n_embd)


# ---------------------------------------------------------------- the mixture of experts

class MoEGate(nn.Module):
    """A token's top_k of n_keys experts by softmax (eq. 1 has none), not renormalised, with OLMoE's
    load balance and z loss, both over n_layer (its code divides the latter by top_k, too). Eight
    gates of 64 are far from 1 in sum, so that a MoE starts much smaller than the FFN (26 times at
    width 256); init="ffn" starts as large, by gates of 1 in the mean over those picked."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.W_g = nn.Linear(config.n_embd, config.n_keys, bias=False)

    def forward(self, x):
        """x (P, d) -> weights (P, m, 1), experts (P, m), auxiliary loss."""
        c = self.config
        logits = self.W_g(x).float()
        probability = logits.softmax(-1)                       # (P, n)
        weights, experts = probability.topk(c.top_k)
        if c.init == "ffn":
            weights = weights / weights.mean(-1, keepdim=True)
        aux = 0
        if self.training:
            visits = torch.bincount(experts.flatten(), minlength=c.n_keys)
            balance = c.n_keys * (visits / experts.numel() * probability.mean(0)).sum()
            z = logits.logsumexp(-1).square().mean()
            aux = (0.01 * balance + 0.001 * z / c.top_k) / c.n_layer
        return weights[..., None], experts, aux


class MoE(nn.Module):
    """Mixture of SwiGLU experts in the FFN's place, as in OLMoE (eq. 2's have no up), dropless:
    every expert runs on all tokens that chose it. Their number is data, so a compiled graph breaks
    here."""

    fixed = dict(PLAIN, heads=1, key_dim=-1, pre_value_dim=0, sparse_memory=False, value_lr=1.0)

    def __init__(self, config, layer):
        super().__init__()
        self.config = config
        width = config.n_inner // config.top_k
        self.table = None
        self.retrieve = MoEGate(config)
        self.experts = nn.Parameter(torch.empty(config.n_keys, 3, width, config.n_embd))

    def forward(self, x, table):
        tokens = x.flatten(0, 1)
        weights, experts, aux = self.retrieve(tokens)          # (P, m, 1), (P, m)
        y = torch.zeros_like(tokens)
        for e, (gate, up, down) in enumerate(self.experts):
            token, pick = (experts == e).nonzero(as_tuple=True)        # this expert's visitors
            h = tokens[token]
            h = F.silu(F.linear(h, gate)) * F.linear(h, up)
            h = F.linear(h, down.t()) * weights[token, pick]
            y.index_add_(0, token, h.to(y.dtype))
        return y.view(x.shape), aux

    @staticmethod
    def stds(c):
        return {}                                              # the FFN's start

    def finish_init(self, name, table):
        self.experts[:, 2].mul_((2 * self.config.n_layer) ** -0.5)     # what enters the residual

    @staticmethod
    def defaults(c):
        c.fill(n_inner=4 * c.n_embd, top_k=8)
        width = c.n_inner // c.top_k                           # value_dim: what a visit reads
        return dict(memory_layers="all", n_keys=8 * c.top_k, value_dim=3 * c.n_embd * width,
                    pre_value_dim=0)

    @staticmethod
    def check_fields(c):
        c.check(c.top_k <= c.n_keys and c.n_inner % c.top_k == 0, "top_k n_keys n_inner",
                "top_k of n_keys experts are used, and they divide n_inner")
        width = 3 * c.n_embd * (c.n_inner // c.top_k)
        c.check(c.value_dim == width, "memory value_dim", f"must be an expert's {width} numbers")
        c.check(c.init in ("published", "ffn"), "memory init", "choose published or ffn")
        c.check(":" not in c.memory_layers, "memory memory_layers",
                "a MoE stands in its block's FFN's place: no reads:adds pairs")


MEMORIES = {
    "ultramemv2": UltraMemV2,
    "ultramem": UltraMem,
    "pkm": PKM,
    "memory+": MemoryPlus,
    "peer": PEER,
    "moe": MoE,
}
