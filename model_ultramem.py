"""
UltraMemV2 (Huang et al. 2025, "UltraMemV2: Memory Networks Scaling to 120B Parameters with Superior Long-Context Learning").

The idea: beside the FFN of every block stands an enormous second FFN of which a token uses a few hidden units only. Its N = n^2 units
are tiny experts: a pre-value row P_i, a value row V_i, no activation. They stand on an n x n grid whose rows and columns have keys;
cell (i, j) scores by a small bilinear form of row i's and column j's scores: 4n dot products rank n^2 experts. No softmax, no
activation: choosing is the nonlinearity. The output starts with the variance that Appendix 6 computes for the FFN's, or training diverges.

    q       = RMSNorm(h W_q),  h = RMSNorm(x), FFN's input (P, 2, r, D_k)  P tokens; for rows and columns, one for each of r = 2 Tucker ranks
    S_row   = q_row K_row,  S_col = q_col K_col            (P, R, r, n)    eq. 6; R retrieval heads, each with its keys, RMS-normed too
    u, v    = leading singular vectors of sum_H C          (R, r)          the Tucker cores C (H, R, r, r) taken as rank 1
    rows, columns: Top-m_key of u^T S_row and v^T S_col                    stage 1, indices only
    s, i    = Top-m of S_row^T C S_col there, by sum_H     (P, k, H), (P, k)   stage 2, eq. 7; k = R m
    i       = Shuffle(i)                                   eq. 8, a fixed permutation: the values do not see the grid
    p       = P_i (h W_pre)                                (P, k)          eq. 15, the hidden units
    y       = sum_k (p s)_k V_i                            (P, D_v)        slice c of H weighted by core c's score
    x       = x + FFN(h) + y W_out                         eq. 12

              x --------------+---------------+-------------+
              |             SwiGLU    W_q, keys, core C   W_pre
              |               |          Top-m of n^2       |
              |               |       scores s   slots i -> P_i . = p
              x <---- + ------+---- W_out -- sum of (p s) V_i

Below the fold: the predecessors (PKM, PEER, Memory+, UltraMem), the MoE to beat, two auxiliary losses, counts, inspect.

    python train.py --model=ultramem                       # --memory=moe | pkm | peer | memory+ | ultramem; --dense=True: none
"""
import math
import re
import zlib
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from kernels import gather_dot, gather_sum, product_key_topk, sort_indices, tucker_topk

RANK = 2                          # r, Tucker ranks: the singular vectors below are those of 2 x 2 matrices


@dataclass
class Config:
    vocab_size: int = 50304       # tokens
    block_size: int = 2048        # tokens of context in training
    n_layer: int = 20             # L
    n_head: int = 12              # heads of the attention
    n_embd: int = 768             # d, width
    n_inner: int = -1             # width of the FFN's hidden layer (MoE: a token's experts together); -1: 4d less the memory's work
    tied: bool = True             # one matrix for the embedding and the head
    norm_eps: float = 1e-5        # of every RMS norm
    memory: str = "ultramemv2"    # none | moe | pkm | memory+ | peer | ultramem | ultramemv2
    mem_layers: str = ""          # blocks with a memory: 4,8,12 or all; 2:5/6:9 reads in block 2, adds after 5; "": the memory's own
    n_keys: int = -1              # n: n^2 slots a memory layer (MoE: experts); -1: for the total of 64 experts of which 8 are used
    heads: int = -1               # R, retrieval heads; -1: 1 (older memories 2)
    top_m: int = -1               # m, slots picked by each head; -1: 32 L slots a token over all layers (MoE: 8)
    key_dim: int = -1             # D_k; -1: d/4 with a query per rank, else d/2 (UltraMem d/4)
    value_dim: int = -1           # D_v; -1: 3d/16 (section 4.2.5: D_p : D_v = 1 : 3; UltraMem d/2, older memories d)
    pre_value_dim: int = -1       # D_p; -1: d/16 (PEER d); 0: plain value embeddings (-1 of the other older memories)
    pre_activation: bool = False  # GELU of the hidden units, eq. 13 in place of eq. 15 (values start for eq. 15)
    core_heads: int = 2           # H, Tucker cores; each weighs a slice of the value
    rank_queries: int = -1        # 1: a query per Tucker rank, 0: one for all ranks; -1: 1 (UltraMem 0)
    virtual: int = -1             # E, blocks of virtual slots over the same values (IVE), a square; -1: 1, as Table 10's counts (UltraMem 4)
    projectors: int = -1          # 1, or E: a W_out for each block of virtual slots (eq. 9); -1: 1 (UltraMem E)
    share: str = ""               # ring:g | noring:g | block:g: a layer picks from g layers' tables (4.2.8); one: all have one table (Memory+)
    init_match: str = "paper"     # paper: the variance of eq. 25 (MoE: OLMoE's gates); silu: that of the SwiGLU FFN as it is, 1.8 times less std
    value_lr: float = 1.0         # values' and pre-values' learning rate in units of the others' at the start (section 4.2.9: 4) ...
    value_lr_until: float = 0.25  # ... falling to 1 at this fraction of the run
    tucker_penalty: float = 0.0   # alpha of eq. 17; none is printed
    balance_loss: float = 0.0     # beta of eq. 19 (the paper tried 0.001)
    sparse_memory: bool = False   # row-sparse gradients and lazy Adam for the tables: cost independent of N, but no weight decay

    def check(self, ok, fields, rule):
        if not ok:
            raise ValueError(", ".join(f"{name}={getattr(self, name)!r}" for name in fields.split()) + f": {rule}")

    def __post_init__(self):
        d, L, memory = self.n_embd, self.n_layer, MEMORIES.get(self.memory)
        self.check(memory or self.memory == "none", "memory", f"choose one of none, {', '.join(MEMORIES)}")
        automatic = memory.automatic(self) if memory else dict(n_inner=4 * d)
        for name in [name for name in automatic if getattr(self, name) in (-1, "")]:
            setattr(self, name, automatic[name])
        sizes = "heads key_dim value_dim core_heads" if memory else "n_inner"
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd", *sizes.split()):
            self.check(getattr(self, name) > 0, name, "must be at least 1")
        self.check(d % (2 * self.n_head) == 0, "n_embd n_head", "n_embd must be a multiple of 2*n_head")
        if not memory:
            self.sparse_memory = False
            return
        pairs, many = list(self.placement.items()), len(re.findall("[,/]", self.mem_layers))
        self.check(all(0 <= a <= b < L for a, b in pairs) and len({b for _, b in pairs}) == len(pairs) > many, "mem_layers",
                   f"give different blocks from 0 to {L - 1} as 4,8,12, or reads:adds pairs as 2:5/6:9, or all")
        self.top_m = max(1, 32 * L // (self.heads * len(pairs))) if self.top_m == -1 else self.top_m
        width, tables = self.value_dim + self.pre_value_dim, 1 if self.share == "one" else len(pairs)
        self.n_keys = round((84 * d * d * L / (width * tables)) ** 0.5) if self.n_keys == -1 else self.n_keys    # 56 unused experts of 1.5 d^2
        self.check(min(self.n_keys, self.top_m, self.pre_value_dim + 1) > 0, "n_keys top_m pre_value_dim", "must be positive (pre_value_dim: or 0)")
        memory.check(self)
        if self.n_inner == -1:                                 # 12 d^2 a block: the active parameters of the FFN alone at 4 d
            with torch.device("meta"):
                beside = sum(p.numel() for p in memory(self, pairs[0][0]).parameters()) + self.heads * self.top_m * width
            self.n_inner = round((12 * d * d * L - beside * len(pairs)) / (24 * d * L)) * 8
        self.check(self.n_inner > 0, "n_inner", "must be at least 1; the memory may leave no room for it: make the memory smaller, or give n_inner")

    @classmethod
    def from_depth(cls, depth, **overrides):
        """The depth dial: width 64*depth, heads of 64 channels; the memory's sizes follow from the width."""
        return cls(**{**dict(n_layer=depth, n_embd=64 * depth, n_head=depth), **overrides})

    @property
    def placement(self):
        """{block whose normed FFN input a memory reads: block after which its output is added}; -1 for what cannot be read."""
        layers = ",".join(map(str, range(self.n_layer))) if self.mem_layers == "all" else self.mem_layers.replace("/", ",")
        pairs = [re.fullmatch(r"(\d+)(?::(\d+))?", pair) for pair in layers.split(",")] if self.memory != "none" else []
        return dict(sorted((int(p[1]), int(p[2] or p[1])) if p else (-1, -1) for p in pairs))

    @property
    def grid(self):
        """How a layer's slots are laid out: kind of sharing, its g, values in reach floor(n sqrt(g))^2, row (or column) keys of a head."""
        kind, _, g = self.share.partition(":")
        g = int(g) if g.isdigit() else int(kind in ("", "one"))
        side = math.isqrt(self.n_keys ** 2 * g)
        return kind, g, side ** 2, side * math.isqrt(self.virtual)


PRESETS = {                       # Table 10, n_inner from its launch scripts (others: below); 7,004 gives the active parameters without the values read
    "227m_1.2b": dict(n_layer=20, n_embd=768, n_head=12, n_inner=2496, n_keys=360, key_dim=192, top_m=32, value_dim=192, pre_value_dim=192),
    "1b_7b": dict(n_layer=16, n_embd=2048, n_head=16, n_inner=7004, n_keys=528, key_dim=512, top_m=128, value_dim=768, pre_value_dim=384, tied=False),
}
DENSE = dict(memory="none")
RECIPE = {"adamw": dict(learning_rate=4e-4, min_lr=4e-5, weight_decay=0.1, beta1=0.9, beta2=0.95, grad_clip=1.0, schedule="cosine")}   # published code


# ---------------------------------------------------------------- the backbone: Llama

class RMSNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(width)), eps

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotary_tables(theta, start, length):
    """cos and signed sin of positions start .. start+length-1 for the frequencies theta (d_h/2,): each (length, 1, d_h) fp32."""
    angle = torch.arange(start, start + length, device=theta.device, dtype=torch.float32)[:, None, None] * theta
    return torch.cat((angle.cos(), angle.cos()), -1), torch.cat((-angle.sin(), angle.sin()), -1)


def rotate(x, rotary):                                         # x (B, T, H, d_h)
    cos, sin = (t.to(x.dtype) for t in rotary)
    return x * cos + x.roll(x.size(-1) // 2, -1) * sin         # half-split layout, as in Hugging Face's Llama


def attend(q, k, v):
    """Causal attention of the last T positions to all S: q (B, T, H, d_h), k and v (B, S, H_kv, d_h) -> (B, T, H*d_h)."""
    B, T, H, d_h = q.shape
    S = k.size(1)
    mask = None if T in (1, S) else torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=T == S and T > 1, enable_gqa=k.size(1) != H)
    return y.transpose(1, 2).reshape(B, T, H * d_h)


class Cache:
    """What attention must remember of the tokens so far. A memory looks at one token at a time and needs nothing."""

    def __init__(self, max_len):
        self.pos, self.max_len, self.store = 0, max_len, {}

    def append(self, key, new):
        """new (B, T, ...) at positions pos .. pos+T-1; returns all so far (B, pos+T, ...). `pos` moves once a forward."""
        end = self.pos + new.size(1)
        if end > self.max_len:
            raise ValueError(f"the cache holds {self.max_len} tokens and is asked for {end}: make it longer with new_cache()")
        if key not in self.store:
            self.store[key] = new.new_empty(new.size(0), self.max_len, *new.shape[2:])
        self.store[key][:, self.pos:end] = new
        return self.store[key][:, :end]


class Attention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        d, self.layer, self.n_head = config.n_embd, layer, config.n_head
        self.W_Q, self.W_K, self.W_V, self.W_O = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = (RMSNorm(d // config.n_head, config.norm_eps) for _ in range(2))

    def forward(self, x, rotary, cache=None):
        q, k, v = (W(x).unflatten(-1, (self.n_head, -1)) for W in (self.W_Q, self.W_K, self.W_V))   # (B, T, H, d_h)
        q, k = rotate(self.q_norm(q), rotary), rotate(self.k_norm(k), rotary)
        if cache is not None:
            k, v = cache.append((self.layer, "k"), k), cache.append((self.layer, "v"), v)
        return self.W_O(attend(q, k, v))


class MLP(nn.Module):                                          # SwiGLU
    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(config.n_embd, config.n_inner, bias=False)
        self.up = nn.Linear(config.n_embd, config.n_inner, bias=False)
        self.down = nn.Linear(config.n_inner, config.n_embd, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


# ================================================================ the idea ================================================================

class Retrieval(nn.Module):
    """Tucker-decomposed query-key retrieval (TDQKR): a token's k = R*m slots and scores (eqs. 6-8). Eq. 11's h^2 heads are virtual blocks, of one core here."""

    def __init__(self, config):
        super().__init__()
        self.config, R, n = config, config.heads, config.grid[-1]
        queries = RANK if config.rank_queries else 1
        self.W_q = nn.Linear(config.n_embd, 2 * queries * config.key_dim, bias=False)    # all heads use the same queries
        self.q_norm, self.k_norm = (RMSNorm(config.key_dim, config.norm_eps) for _ in range(2))
        self.keys = nn.Parameter(torch.empty(R, 2, RANK, n, config.key_dim))
        self.core = nn.Parameter(torch.empty(config.core_heads, R, RANK, RANK))
        self.register_buffer("u", torch.empty(R, RANK))        # the singular vectors of the step before: they fix the sign
        self.register_buffer("v", torch.empty(R, RANK))
        self.register_buffer("perm", torch.empty(n * n, dtype=torch.int64))

    def forward(self, x):
        """x (P, d) -> raw scores (P, k, H), slots (P, k), auxiliary loss."""
        c = self.config
        q = self.q_norm(self.W_q(x).view(len(x), 2, -1, c.key_dim)).expand(-1, -1, RANK, -1)       # (P, 2, r, D_k)
        s_row, s_col = torch.einsum("psxd,rsxnd->sprxn", q, self.k_norm(self.keys))                # (P, R, r, n) each   eq. 6
        u, v = self.singular_vectors()
        m_key = min(c.top_m, 128, self.keys.size(3))            # section 4.1: at most 128, for the grid is its square
        scores, cells = tucker_topk(s_row, s_col, u, v, self.core, m_key, c.top_m)                 # eq. 7
        aux = sum(getattr(c, name) * loss(self, s_row, s_col) for name, loss in AUXILIARY.items() if self.training and getattr(c, name))
        return scores.flatten(1, 2), self.perm[cells.flatten(1)], aux                              # eq. 8: Shuffle

    @torch.no_grad()
    def singular_vectors(self):
        """u, v (R, r) fp32 of the cores' sum, in closed form; of (u, v) and (-u, -v), which rank oppositely, the pair nearer to the last step's."""
        C = self.core.float().sum(0)                                                               # (R, r, r)
        G = (C[:, :, None] * C[:, None]).sum(-1)                                                   # C C^T, which u diagonalises
        theta = torch.atan2(2 * G[:, 0, 1], G[:, 0, 0] - G[:, 1, 1]) / 2
        u = torch.stack((theta.cos(), theta.sin()), 1)
        v = F.normalize((C * u[:, :, None]).sum(1), dim=1)
        near = (u * self.u + v * self.v).sum(1, keepdim=True) >= 0
        return torch.where(near, u, -u), torch.where(near, v, -v)


class Tables(nn.Module):                                       # the experts
    def __init__(self, config, rows):
        super().__init__()
        self.value_table = nn.Parameter(torch.empty(rows, config.value_dim))
        self.pre_table = nn.Parameter(torch.empty(rows, config.pre_value_dim)) if config.pre_value_dim else None


class UltraMemV2(nn.Module):
    """k experts with one hidden unit each, weighted by their retrieval scores (eq. 15)."""

    def __init__(self, config, layer):
        super().__init__()
        self.config, i, L = config, list(config.placement).index(layer), len(config.placement)
        kind, g, self.reach, _ = config.grid                   # the first of g tables to pick from: Table 7, ring's from one earlier
        first = {"": 0, "ring": i, "noring": min(max(i - (g + 1) // 2 + 1, 0), L - g), "block": i // g * g}[kind]
        self.offset, self.table = first * config.n_keys ** 2, 0 if kind else i
        self.retrieve = Retrieval(config)
        self.W_pre = nn.Linear(config.n_embd, config.pre_value_dim, bias=False) if config.pre_value_dim else None
        self.W_out = nn.Linear(config.projectors * config.value_dim, config.n_embd, bias=False)

    def forward(self, x, tables):
        """x (B, T, d) the normed FFN input -> (B, T, d), auxiliary loss."""
        c, tables, tokens = self.config, tables[self.table], x.flatten(0, 1)
        scores, slots, aux = self.retrieve(tokens)                                                 # (P, k, H), (P, k)
        rows = (self.offset + slots % self.reach) % len(tables.value_table)                           # virtual blocks repeat, rings close
        order = sort_indices(rows) if torch.is_grad_enabled() else None                            # one sort for both tables' gradients
        if self.W_pre is not None:
            p = gather_dot(tables.pre_table, rows, self.W_pre(tokens), c.sparse_memory, order)     # (P, k) hidden units
            scores = scores * (F.gelu(p) if c.pre_activation else p)[..., None]                    # eq. 13, eq. 15
        blocks, E = slots // self.reach if c.projectors > 1 else None, c.projectors
        y = gather_sum(tables.value_table, rows, scores, blocks, E, c.sparse_memory, order)        # (P, D_v), or (P, E, D_v)
        return self.W_out(y.flatten(1)).view(x.shape), aux                                         # eq. 12, or eq. 9

    @torch.no_grad()
    def init_weights(self, name):
        """Appendix 6: the norm weights with which a score is 1 on average, and the values' standard deviation (returned) with
        which the memory's output has the variance of eq. 25."""
        c, r, g = self.config, self.retrieve, own_generator(name, self.W_out.weight)
        r.perm.copy_(torch.randperm(len(r.perm), generator=g, device=r.perm.device))
        nn.init.ones_(r.u), nn.init.zeros_(r.v)                # the first u has a positive sum
        scores = r(torch.randn(512, c.n_embd, generator=g, device=r.perm.device))[0]
        spread = 1 + (scores.std() / scores.mean()).square()   # 1 + sigma_s^2
        for norm in (r.q_norm, r.k_norm):
            norm.weight.fill_(scores.mean() ** -0.25)          # a score has four factors of them
        ratio = (0.2 if c.init_match == "paper" else 0.0614) * c.n_inner / (c.heads * c.top_m * spread * c.value_dim * c.n_layer)
        return (ratio / c.pre_value_dim) ** 0.25 if c.pre_value_dim else (0.4 * ratio) ** 0.5      # eq. 26; without pre-values

    @staticmethod
    def automatic(c):                                          # what -1 and "" stand for
        return dict(mem_layers="all", heads=1, key_dim=c.n_embd // (4 if c.rank_queries else 2), value_dim=3 * c.n_embd // 16,
                    pre_value_dim=c.n_embd // 16, rank_queries=1, virtual=1, projectors=1)

    @staticmethod
    def check(c):
        (kind, g, _, n), L = c.grid, len(c.placement)
        c.check(kind in ("", "ring", "noring", "block") and 1 <= g <= L and (kind != "block" or L % g == 0), "share",
                f"give ring:g, noring:g or block:g for g of the {L} memory layers (block: g a divisor)")
        c.check(math.isqrt(c.virtual) ** 2 == c.virtual and c.projectors in (1, c.virtual), "virtual projectors", "a square, and 1 or as many")
        c.check(c.top_m <= min(c.top_m, 128, n) ** 2, "top_m n_keys", "at most min(128, n_keys)^2 slots can be picked")
        c.check(c.init_match in ("paper", "silu") and c.value_lr_until > 0, "init_match value_lr_until", "choose paper or silu, and more than 0")
        c.check(c.value_dim % c.core_heads == 0, "value_dim core_heads", "each core weighs a slice: core_heads must divide value_dim")


MEMORIES = {"ultramemv2": UltraMemV2}                          # its predecessors and the MoE join below the fold,
AUXILIARY = {}                                                 # and the losses that the paper left out: {Config field: loss}


# ================================================================ the model ===============================================================

class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.memory = MEMORIES[config.memory](config, layer) if layer in config.placement else None
        self.attn_norm = RMSNorm(config.n_embd, config.norm_eps)
        self.attn = Attention(config, layer)
        self.mlp_norm = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = None if config.memory == "moe" and self.memory else MLP(config)

    def forward(self, x, rotary, tables, cache):
        """-> x, what the memory adds to it here or after a later block, auxiliary loss."""
        x = x + self.attn(self.attn_norm(x), rotary, cache)
        h = self.mlp_norm(x)
        y, aux = self.memory(h, tables) if self.memory is not None else (None, 0)
        return x + self.mlp(h) if self.mlp is not None else x, y, aux


def own_generator(name, p):
    """Random numbers of tensor p's own, from torch's seed and its name: models that share a tensor start from equal values in it."""
    return torch.Generator(p.device).manual_seed(torch.initial_seed() % 2 ** 31 + zlib.crc32(name.encode()))


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.placement = config, config.placement
        N, layers = config.n_keys ** 2, len(self.placement)
        rows = [] if config.memory in ("none", "moe") else [N] if config.share == "one" else [N * layers] if config.share else [N] * layers
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.tables = nn.ModuleList(Tables(config, n) for n in rows)
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        self.head = None if config.tied else nn.Linear(config.n_embd, config.vocab_size, bias=False)   # None: the embedding's matrix

    @torch.no_grad()
    def init_weights(self):
        """Truncated normal of std sqrt(2/(5d)), for W_O and down times sqrt(1/(2L)) (a memory's depth enters its values, not W_out); cores as published."""
        c = self.config
        for name, p in self.named_parameters():
            std = (2 / (5 * c.n_embd)) ** 0.5 * ((2 * c.n_layer) ** -0.5 if name.endswith(("W_O.weight", "mlp.down.weight")) else 1)
            if p.ndim == 1 or name.endswith("core"):
                p.fill_(1) if p.ndim == 1 else p.uniform_(0, 1, generator=own_generator(name, p))
            elif not name.endswith("table"):
                nn.init.trunc_normal_(p, 0, std, -3 * std, 3 * std, generator=own_generator(name, p))
        for i, layer in enumerate(self.placement):
            std = self.blocks[layer].memory.init_weights(f"blocks.{layer}.memory")
            for name, p in self.tables[i].named_parameters() if i < len(self.tables) else ():      # a shared table: its first layer's
                p.normal_(0, std, generator=own_generator(f"tables.{i}.{name}", p))

    def begin_step(self, step, max_iters):
        """Before an optimizer step: keep the singular vectors, whose sign the next ones follow."""
        for retrieval in [m for m in self.modules() if isinstance(m, Retrieval)]:
            for kept, vector in zip((retrieval.u, retrieval.v), retrieval.singular_vectors()):
                kept.copy_(vector)

    def forward(self, idx, targets=None, cache=None):
        """idx (B, T) int64. With targets (B, T), -1 where there is no loss: (None, mean cross-entropy in nats).
        Without: (logits (B, T, vocab) fp32, None), only the last position's when a cache from new_cache() is given."""
        d_h, start = self.config.n_embd // self.config.n_head, 0 if cache is None else cache.pos
        theta = 10000.0 ** (-torch.arange(0, d_h, 2, device=idx.device, dtype=torch.float32) / d_h)
        rotary = rotary_tables(theta, start, idx.size(1))
        x, aux, later = self.embed(idx), 0, {}                     # (B, T, d)
        for layer, block in enumerate(self.blocks):
            x, y, loss = block(x, rotary, self.tables, cache)
            later[self.placement.get(layer)], aux = y, aux + loss  # y: None where nothing is read
            x = x + later.pop(layer) if layer in later else x
        x = self.norm(x)
        if targets is not None:
            return None, self.loss(x, targets) + (aux - aux.detach() if self.training and torch.is_tensor(aux) else 0)
        if cache is not None:
            cache.pos += idx.size(1)
            x = x[:, -1:]
        return self.logits(x), None

    def logits(self, x):
        return F.linear(x, (self.head or self.embed).weight).float()

    def loss(self, x, targets, at_once=2 ** 27):
        """Mean cross-entropy over targets >= 0. At most `at_once` logits are alive: more tokens go through in chunks whose
        logits the backward pass computes again."""
        x, targets = x.reshape(-1, x.size(-1)), targets.reshape(-1)
        chunk = max(1, at_once // self.config.vocab_size)
        summed = lambda x, t: F.cross_entropy(self.logits(x), t, ignore_index=-1, reduction="sum")
        if len(x) <= chunk:
            total = summed(x, targets)
        else:
            total = sum(checkpoint(summed, a, t, use_reentrant=False) for a, t in zip(x.split(chunk), targets.split(chunk)))
        return total / (targets >= 0).sum().clamp(min=1)

    def new_cache(self, batch_size, max_len):
        return Cache(max_len)

    def param_groups(self, optimizer, learning_rate, weight_decay):
        """AdamW with weight decay on everything, norms and values too; but lazy Adam (sparse_memory) decays nothing. The published rate is
        for widths from 768 on, narrower models get 768/d times as much."""
        c, (rest, tables) = self.config, ([p for n, p in self.named_parameters() if n.endswith("table") == table] for table in (False, True))
        rate, constant = learning_rate * max(1.0, 768 / c.n_embd), c.memory == "memory+"           # Memory+: values at 1e-3
        values = dict(params=tables, kind="sparse" if c.sparse_memory else "adamw", lr=1e-3 if constant else rate,
                      weight_decay=weight_decay, schedule=not constant, boost=(c.value_lr, c.value_lr_until))
        return [dict(params=rest, kind="adamw", lr=rate, weight_decay=weight_decay, schedule=True)] + [values] * bool(tables)


# ================================================================ below the fold: baselines, ablations, foreign checkpoints ==============

class UltraMem(UltraMemV2):
    """UltraMem (Huang et al. 2024), V1: a few layers, one query for all ranks, plain values, a projector for each of E blocks of virtual
    slots (IVE, eqs. 8, 9); what is read before one FFN is added some blocks later."""

    @torch.no_grad()
    def init_weights(self, name):                              # the published constants; W_q and keys as V2's
        c, r = self.config, self.retrieve
        super().init_weights(name)                             # for the permutation
        for norm in (r.q_norm, r.k_norm):
            norm.weight.fill_(c.key_dim ** -0.33)
        self.W_out.weight.normal_(0, (c.projectors * c.value_dim) ** -0.5, generator=own_generator(name + ".W_out", self.W_out.weight))
        return 0.02

    @staticmethod
    def automatic(c):
        d, L = c.n_embd, c.n_layer
        skips = {L * (2 * i + 1) // 10: L * (2 * i + 1) // 10 + max(1, 3 * L // 20) for i in range(4)}       # 20 layers: 2:5/6:9/10:13/14:17
        layers = "/".join(f"{a}:{b}" for a, b in skips.items() if b < L)
        return dict(mem_layers=layers or "0", heads=2, key_dim=d // 4, value_dim=d // 2, pre_value_dim=0, rank_queries=0,
                    virtual=4, projectors=4 if c.virtual == -1 else c.virtual)

    @staticmethod
    def check(c):
        UltraMemV2.check(c)
        c.check(c.init_match == "paper", "memory init_match", "silu is for ultramemv2 and moe")


class ProductKeys(nn.Module):
    """A token's k = R*m slots by sums of a row's and a column's score (eqs. 3, 4), weighted by softmax; every head has queries and keys of its own."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.W_q = nn.Linear(config.n_embd, config.heads * 2 * config.key_dim, bias=False)
        self.keys = nn.Parameter(torch.empty(config.heads, 2, config.n_keys, config.key_dim))

    def forward(self, x):
        """x (P, d) -> weights (P, k, 1), slots (P, k), no auxiliary loss."""
        c = self.config
        q = self.W_q(x).view(len(x), c.heads, 2, c.key_dim)
        s_row, s_col = torch.einsum("prsd,rsnd->sprn", q, self.keys).flatten(1, 2)                 # (P*R, n) each    eq. 3
        scores, i, j = product_key_topk(s_row, s_col, c.top_m)                                     # (P*R, m)         eq. 4
        return scores.softmax(-1).view(len(x), -1, 1), (i * c.n_keys + j).view(len(x), -1), 0


class PKM(nn.Module):
    """Product-key memory (Lample et al. 2019): heads summed, values as wide as the model (eq. 5)."""

    def __init__(self, config, layer):
        super().__init__()
        self.config, self.table = config, 0 if config.share else list(config.placement).index(layer)
        self.retrieve = ProductKeys(config)

    def forward(self, x, tables):
        tokens = x.flatten(0, 1)
        weights, slots, aux = self.retrieve(tokens)
        return self.read(tokens, weights, slots, tables[self.table]).view(x.shape), aux

    def read(self, x, weights, slots, tables):
        return gather_sum(tables.value_table, slots, weights, sparse_grad=self.config.sparse_memory)

    @torch.no_grad()
    def init_weights(self, name):                              # Memory+'s constants, for all three
        keys, W_q = self.retrieve.keys, self.retrieve.W_q.weight
        keys.uniform_(-(2 * self.config.key_dim) ** -0.5, (2 * self.config.key_dim) ** -0.5, generator=own_generator(name + ".keys", keys))
        nn.init.xavier_uniform_(W_q, generator=own_generator(name + ".W_q", W_q))
        return self.config.value_dim ** -0.5

    @staticmethod
    def automatic(c):
        d, L = c.n_embd, c.n_layer
        layers = ",".join(map(str, sorted({L * i // 5 for i in range(1, 5)})))                     # 20 layers: 4,8,12,16
        return dict(mem_layers=layers, heads=2, key_dim=d // 2, value_dim=d, pre_value_dim=0, rank_queries=1, virtual=1, projectors=1)

    @staticmethod
    def check(c):
        c.check(c.share in ("", "one"), "memory share", "share=ring:g, noring:g and block:g are for ultramem and ultramemv2")
        c.check(c.virtual == c.rank_queries == c.projectors == 1 and not c.tucker_penalty and not c.balance_loss and c.init_match == "paper",
                "memory virtual rank_queries projectors tucker_penalty balance_loss init_match", "these fields are for ultramem and ultramemv2")
        c.check(c.top_m <= c.n_keys ** 2, "top_m n_keys", "at most n_keys^2 slots can be picked")
        pre = c.n_embd if c.memory == "peer" else 0
        c.check((c.value_dim, c.pre_value_dim) == (c.n_embd, pre), "memory value_dim pre_value_dim", f"must be {c.n_embd} and {pre} at this width")


class MemoryPlus(PKM):
    """Memory+ (Berges et al. 2024): its layers share one table, and a gate decides what the values are worth here.
    Beside the FFN, as in the code published with Table 3; by section 4.2.6 the original stands in its place. Queries are not normalised, as in the original."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.W_g = nn.Linear(config.n_embd, config.value_dim, bias=False)
        self.W_out = nn.Linear(config.value_dim, config.n_embd, bias=False)

    def read(self, x, weights, slots, tables):
        return self.W_out(super().read(x, weights, slots, tables) * F.silu(self.W_g(x)))

    @torch.no_grad()
    def init_weights(self, name):
        for tail, W in (("W_g", self.W_g.weight), ("W_out", self.W_out.weight)):
            W.normal_(0, self.config.value_dim ** -0.5, generator=own_generator(f"{name}.{tail}", W))
        return super().init_weights(name)

    @staticmethod
    def automatic(c):
        return dict(PKM.automatic(c), share="one")


class PEER(PKM):
    """PEER (He 2024): experts with one hidden unit and a GELU, found by product keys, weighted by a softmax."""

    def read(self, x, weights, slots, tables):
        order = sort_indices(slots) if torch.is_grad_enabled() else None
        p = F.gelu(gather_dot(tables.pre_table, slots, x, self.config.sparse_memory, order))       # (P, k)
        return gather_sum(tables.value_table, slots, weights * p[..., None], sparse_grad=self.config.sparse_memory, order=order)

    @staticmethod
    def automatic(c):
        return dict(PKM.automatic(c), mem_layers="all", pre_value_dim=c.n_embd)


class Router(nn.Module):
    """A token's top_m of n_keys experts (eq. 1) by softmax, not renormalised, with OLMoE's z loss and its load balance, the latter a mean over layers.
    So a MoE starts a lot smaller than the FFN (26 times at width 256); init_match="silu": as large, by gates of 1 in the mean over those picked."""

    def __init__(self, config):
        super().__init__()
        self.config, self.W_r = config, nn.Linear(config.n_embd, config.n_keys, bias=False)

    def forward(self, x):
        """x (P, d) -> weights (P, m, 1), experts (P, m), auxiliary loss."""
        logits, n = self.W_r(x).float(), self.config.n_keys
        probability = logits.softmax(-1)                       # (P, n)
        weights, experts = probability.topk(self.config.top_m)
        if self.config.init_match == "silu":
            weights = weights / weights.mean(-1, keepdim=True)
        share = torch.bincount(experts.flatten(), minlength=n) / experts.numel()
        aux = 0.01 / self.config.n_layer * n * (share * probability.mean(0)).sum() + 0.001 * logits.logsumexp(-1).square().mean()
        return weights[..., None], experts, aux


class MoE(nn.Module):
    """Mixture of SwiGLU experts in the FFN's place (OLMoE; eq. 2), dropless: every expert runs on all tokens that
    chose it. Their number is data, so a compiled graph breaks here."""

    def __init__(self, config, layer):
        super().__init__()
        self.config = config
        self.retrieve = Router(config)
        self.expert_table = nn.Parameter(torch.empty(config.n_keys, 3, config.n_inner // config.top_m, config.n_embd))

    def forward(self, x, tables):
        tokens, m = x.flatten(0, 1), self.config.top_m
        weights, experts, aux = self.retrieve(tokens)
        order = experts.flatten().argsort(stable=True)         # the P*m visits, expert by expert
        visits = torch.bincount(experts.flatten(), minlength=self.config.n_keys).tolist()
        y = torch.cat([F.linear(F.silu(F.linear(part, gate)) * F.linear(part, up), down.t())
                       for part, (gate, up, down) in zip(tokens[order // m].split(visits), self.expert_table)])
        y = y * weights.flatten()[order, None].to(y.dtype)
        return torch.zeros_like(tokens, dtype=y.dtype).index_add(0, order // m, y).view(x.shape), aux

    @torch.no_grad()
    def init_weights(self, name):
        c, std = self.config, (2 / (5 * self.config.n_embd)) ** 0.5
        nn.init.trunc_normal_(self.expert_table, 0, std, -3 * std, 3 * std, generator=own_generator(name, self.expert_table))
        self.expert_table[:, 2].mul_((2 * c.n_layer) ** -0.5)  # what enters the residual

    @staticmethod
    def automatic(c):                                          # value_dim: the numbers in an expert
        n_inner, top_m = 4 * c.n_embd if c.n_inner == -1 else c.n_inner, 8 if c.top_m == -1 else c.top_m
        return dict(mem_layers="all", n_inner=n_inner, n_keys=64, heads=1, top_m=top_m, key_dim=c.n_embd, value_dim=3 * c.n_embd * (n_inner // top_m),
                    pre_value_dim=0, rank_queries=1, virtual=1, projectors=1)

    @staticmethod
    def check(c):
        c.check(c.top_m <= c.n_keys and c.n_inner % c.top_m == 0, "top_m n_keys n_inner", "top_m of n_keys experts are used, and they divide n_inner")
        c.check(all(a == b for a, b in c.placement.items()), "memory mem_layers", "a MoE stands in its block's FFN's place: no reads:adds pairs")
        c.check(not c.sparse_memory and not c.share and c.value_lr == 1, "memory sparse_memory share value_lr", "these are for tables of values")
        c.check(c.init_match in ("paper", "silu"), "init_match", "choose paper or silu")


MEMORIES |= {"ultramem": UltraMem, "pkm": PKM, "memory+": MemoryPlus, "peer": PEER, "moe": MoE}
shape_227m = dict(n_layer=20, n_embd=768, n_head=12)
PRESETS |= {
    "ultramem_227m_1.2b": dict(shape_227m, memory="ultramem", n_inner=2752, n_keys=808, key_dim=192, heads=2, top_m=80, value_dim=384),
    "memoryplus_227m_1.2b": dict(shape_227m, memory="memory+", n_inner=3008, n_keys=1138, key_dim=384, heads=2, top_m=80),    # the table's D_v 384 gives 0.70B
    "olmoe_227m_1.2b": dict(shape_227m, memory="moe", n_inner=8 * 384),
    "olmoe_1b_7b": dict(n_layer=16, n_embd=2048, n_head=16, tied=False, memory="moe", n_inner=8 * 1024),
}


# ---------------------------------------------------------------- two auxiliary losses (sections 3.6, 4.2.7)

def singular_values(C):
    """C (R, 2, 2) -> (2, R): the larger and the smaller one, from sum of squares |C|^2 and product |det C|."""
    squares, product = C.square().sum((1, 2)), (C[:, 0, 0] * C[:, 1, 1] - C[:, 0, 1] * C[:, 1, 0]).abs()
    plus, minus = (squares + 2 * product).sqrt(), (squares - 2 * product).clamp(min=1e-12).sqrt()
    return torch.stack((plus + minus, plus - minus)) / 2


def tucker_penalty(retrieval, s_row, s_col):
    """Eq. 17 of the cores' sum, summed over heads: keeps it near rank 1, which stage 1 takes it for. Margin tau = 0.15."""
    return (singular_values(retrieval.core.float().sum(0))[1] - 0.15).relu().square().sum()


def balance_loss(retrieval, s_row, s_col):
    """Eqs. 18-20 for rows plus columns, mean over heads: 1 + 1 where use is uniform. The frequency f is a share of the picks of
    stage 1; eq. 20's own, counts over tokens, is m_key times larger (m_key*heads times, counted over heads)."""
    m_key, loss = min(retrieval.config.top_m, 128, s_row.size(-1)), 0
    for vector, s in zip(retrieval.singular_vectors(), (s_row, s_col)):
        a = (vector[:, :, None] * s.float()).sum(2)                                                # (P, R, n)
        picks = torch.zeros_like(a).scatter(2, a.topk(m_key).indices, 1.0)
        loss = loss + a.size(2) * (picks.mean(0) / m_key * a.softmax(-1).mean(0)).sum(-1).mean()   # eq. 19
    return loss


AUXILIARY |= dict(tucker_penalty=tucker_penalty, balance_loss=balance_loss)


# ---------------------------------------------------------------- counts and pictures

def param_counts(self):
    """total, memory (tables or experts), active: what one token touches, all keys included."""
    c, total = self.config, sum(p.numel() for p in self.parameters())
    memory = sum(p.numel() for name, p in self.named_parameters() if name.endswith("table"))
    touched = c.heads * c.top_m * (c.value_dim + c.pre_value_dim) * len(self.placement)
    unread = 0 if c.tied else (c.vocab_size - 1) * c.n_embd
    return dict(total=total, memory=memory, active=total - memory + touched - unread)


def flops_per_token(self):
    """Forward and backward of the matrix products: 6 an active weight (a value is one too), 12*T*d a layer for attention at full
    context, and the Tucker scores of the picked slots."""
    c = self.config
    vectors = sum(p.numel() for p in self.parameters() if p.ndim == 1)
    tucker = c.heads * c.top_m * c.core_heads * (RANK ** 2 + RANK) * len(self.placement) if c.memory.startswith("ultramem") else 0
    return 6 * (self.param_counts()["active"] - vectors) + 12 * c.n_layer * c.block_size * c.n_embd + 6 * tucker


@torch.no_grad()
def inspect(self, idx):
    """How the memory layers are used on the tokens of idx (B, T), one number a layer: share of dead slots, KL of their use
    to uniform, mean score of the best slot and of all picked ones, std of the output, singular values of the core; and "use",
    the share of slots that are picked 0, 1, 2-3, 4-7, ... times."""
    found, hooks = {}, []
    keep = lambda name, value: found.setdefault(name, []).append(value)

    def picked(retrieve, inputs, output):
        scores, slots = output[:2]                                                             # (P, k, H), (P, k)
        n = self.config.n_keys if self.config.memory == "moe" else self.config.grid[2] * self.config.virtual
        uses = torch.bincount(slots.flatten(), minlength=n)
        keep("dead", (uses == 0).float().mean())
        keep("kl", torch.special.xlogy(p := uses / uses.sum(), p * n).sum())
        keep("use", torch.bincount(torch.where(uses > 0, uses.float().log2().floor().long() + 1, 0).clamp(max=11), minlength=12) / n)
        per_head = scores.float().mean(2).view(len(slots), self.config.heads, -1)              # (P, R, m), best first
        keep("top1_score", per_head[..., 0].mean())
        keep("score", per_head.mean())
        if hasattr(retrieve, "core"):
            keep("lambda1", (pair := singular_values(retrieve.core.sum(0)).mean(1))[0])
            keep("lambda2", pair[1])

    for layer in self.placement:
        memory = self.blocks[layer].memory
        hooks += [memory.retrieve.register_forward_hook(picked),
                  memory.register_forward_hook(lambda module, inputs, output: keep("output_std", output[0].float().std()))]
    try:
        self(idx)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: (torch.stack(values), ("layer", "uses")[:1 + values[0].ndim]) for name, values in found.items()}


Model.param_counts, Model.flops_per_token, Model.inspect = param_counts, flops_per_token, inspect
