"""
MoVE, Mixture of Value Embeddings (Li 2026, "A New Axis for Scaling Parametric Memory in Auto-Regressive Models").

The idea: attention moves *values* around, and a value is a function of the hidden state alone. MoVE gives every token
of the vocabulary M further value vectors, kept in one bank that all layers share. In every layer and every head a gate
computed from the hidden state mixes them with the ordinary value. Reading the bank is an embedding lookup, so the
memory grows (M = 6, 12, 24, 48 slots a token) while the arithmetic hardly does: H(M+1)/(12d+2T) more (eq. 5).

    V     = x W_V                                              (B, T, H_kv, d_h)       eq. 1
    rows  = bank[w]                                            (B, T, M, H_kv, d_h)    eq. 2, w the token ids
    gate  = 2 * sigmoid(x W_G)                                 (B, T, H_kv, M+1)       eq. 3, 1.0 at W_G = 0
    V_S   = gate[0] * V  +  sum_i gate[i] * rows[i]            (B, T, H_kv, d_h)       eq. 4
    Y     = softmax(Q K^T / sqrt(d_h)) V_S                     V_S is what the cache holds

          token ids w ------------------------> bank (vocab, M, d_kv), one for all layers
                |                                     | M value vectors of each token
              embed                                   |
                |      +---------------------------+  |
                x -----| W_Q  W_K  W_V        W_G  |  |
                       |  q    k    V    gates  |  |  |
                       |  |    |    +---(mix)<--+--|--+
                       |  |    |        V_S        |
                       |  attention(q, k, V_S)     |   layer l
                       +---------------------------+

What to compare it with (below the fold): LaVE, a private table of value embeddings in every second layer (eq. 6), and
both of them inside Multi-head Latent Attention (eq. 7). The backbone is nanochat's of January 2026: no norm weights,
rotary embeddings, norm of queries and keys, relu^2, untied embeddings, soft-capped logits.

    python train.py --model=move --depth=4 --memory_scale=4        # x4; --dense=True: the same model without a memory
"""
import math
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from kernels import gather_rows, mix_order, mix_values, relu_squared, rms_norm, scaled_sum


@dataclass
class Config:
    vocab_size: int = 65536       # tokens; the embedding and the head are padded to a multiple of 64
    block_size: int = 2048        # tokens of context in training
    n_layer: int = 12             # L; the paper has 12, 20 and 32
    n_head: int = 6               # H, query heads
    n_kv_head: int = -1           # H_kv, key/value heads; -1: n_head (fewer: grouped-query attention)
    n_embd: int = 768             # d, width
    memory: str = "move"          # move | lave | none
    memory_scale: float = 1.0     # the paper's "x": M = ceil(x L/2) slots (MoVE); x1 every second layer, x2 all (LaVE)
    slots: int = -1               # M directly; -1: from memory_scale
    gate_v: int = -1              # gate g_0 on the ordinary value, 0 or 1; -1: the paper's, 1 for MoVE and 0 for LaVE
    attention: str = "mha"        # mha | mla
    memory_lr: float = 1.0        # learning rate of bank or tables, in units of the embedding's. While gates are 1 a token's M slots get
                                  # equal gradients: at 1/M their sum moves as fast as one row, which pays in short runs
    sparse_memory: bool = False   # row-sparse gradients and lazy Adam for the bank: cost independent of the vocabulary

    def check(self, ok, fields, rule):
        if not ok:
            raise ValueError(", ".join(f"{name}={getattr(self, name)!r}" for name in fields.split()) + f": {rule}")

    def __post_init__(self):
        self.n_kv_head = self.n_head if self.n_kv_head == -1 else self.n_kv_head
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_kv_head", "n_embd"):
            self.check(getattr(self, name) > 0, name, "must be at least 1")
        self.check(self.n_embd % (2 * self.n_head) == 0, "n_embd n_head", "n_embd must be a multiple of 2*n_head")
        self.check(self.n_head % self.n_kv_head == 0, "n_head n_kv_head", "n_head must be a multiple of n_kv_head")
        self.check(self.memory in ("none", *MEMORIES), "memory", f"choose one of none, {', '.join(MEMORIES)}")
        self.check(self.attention in ATTENTIONS, "attention", f"choose one of {', '.join(ATTENTIONS)}")
        self.check(self.memory_lr > 0, "memory_lr", "must be positive")
        self.check(self.gate_v in (-1, 0, 1), "gate_v", "choose 0, 1 or -1 (automatic)")
        if self.memory == "none":
            self.slots, self.gate_v, self.sparse_memory = 0, 0, False
            return
        lave = self.memory == "lave"
        self.check(self.memory_scale in (1, 2) if lave else self.memory_scale > 0, "memory_scale", "must be positive, and 1 or 2 for memory=lave")
        self.slots = 1 if lave else math.ceil(self.memory_scale * self.n_layer / 2) if self.slots == -1 else self.slots
        self.check(self.slots > 0, "slots", "must be at least 1; memory=none is the model without a bank")
        self.gate_v = int(not lave) if self.gate_v == -1 else self.gate_v

    @classmethod
    def from_depth(cls, depth, **overrides):
        """The depth dial: width 64*depth, heads of about 128 channels (their number nudged until it divides the width)."""
        width, target = 64 * depth, round(64 * depth / 128)
        n_head = min((n for n in range(1, width) if width % (2 * n) == 0), key=lambda n: (abs(n - target), n < target))
        return cls(**{**dict(n_layer=depth, n_embd=width, n_head=n_head), **overrides})

    @property
    def head_dim(self):
        return self.n_embd // self.n_head

    @property
    def d_kv(self):                                            # width of a value vector in the bank
        return ATTENTIONS[self.attention].value_width(self)


def presets():
    """The paper's rows (Tables 1 and 3): d12 | d20 | d32, then _mla or nothing, then _move_x1 ... | _lave_x1 | _lave_x2."""
    table = {}
    for depth, n_head in ((12, 6), (20, 10), (32, 16)):
        for attention, scales in (("mha", (1, 2, 4, 8)), ("mla", (1, 2, 4, 8, 16, 32))):
            name = f"d{depth}" + "_mla" * (attention == "mla")
            row = dict(n_layer=depth, n_embd=64 * depth, n_head=n_head, attention=attention)
            table[name] = dict(row, memory="none")
            table |= {f"{name}_move_x{x}": dict(row, memory="move", memory_scale=x) for x in scales}
            table |= {f"{name}_lave_x{x}": dict(row, memory="lave", memory_scale=x) for x in (1, 2)}
    return table


PRESETS = presets()
DENSE = dict(memory="none")
RECIPE = {                        # train.py's settings; the paper's (nanochat's, for 524,288 tokens a step) first
    "muon": dict(learning_rate=0.02, weight_decay=0.2, beta1=0.8, beta2=0.95, grad_clip=0.0,
                 schedule="wsd", warmup_iters=0, warmdown=0.4),
    "adamw": dict(learning_rate=2e-3, weight_decay=0.1, beta1=0.9, beta2=0.95, grad_clip=1.0),
}


# ---------------------------------------------------------------- the backbone: nanochat, January 2026

def rotary_frequencies(config, device):
    """theta (d_h/2,): 10000^(-2i/d_h); below zero, since nanochat turns the other way round than Llama."""
    return -10000.0 ** (-torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32) / config.head_dim)


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
    """What attention must remember of the tokens so far. MoVE stores V_S, already mixed: the size of a plain cache."""

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
    """Multi-head (or grouped-query) attention whose values pass through a memory."""

    @staticmethod
    def value_width(config):
        return config.n_kv_head * config.head_dim

    def __init__(self, config, layer):
        super().__init__()
        d, d_kv = config.n_embd, config.d_kv
        self.layer, self.n_head, self.n_kv_head = layer, config.n_head, config.n_kv_head
        self.W_Q = nn.Linear(d, d, bias=False)
        self.W_K = nn.Linear(d, d_kv, bias=False)
        self.W_V = nn.Linear(d, d_kv, bias=False)
        self.W_O = nn.Linear(d, d, bias=False)
        self.memory = make_memory(config, layer)

    def forward(self, x, rotary, reading, cache=None):
        B, T, d = x.shape
        q = self.W_Q(x).view(B, T, self.n_head, -1)            # (B, T, H, d_h)                  eq. 1
        k = self.W_K(x).view(B, T, self.n_kv_head, -1)         # (B, T, H_kv, d_h)
        v = self.W_V(x).view(B, T, self.n_kv_head, -1)
        if self.memory is not None:
            v = self.memory(x, v, reading)                     # V_S                             eq. 4
        q, k = rms_norm(rotate(q, rotary)), rms_norm(rotate(k, rotary))
        if cache is not None:
            k, v = cache.append((self.layer, "k"), k), cache.append((self.layer, "v"), v)
        return self.W_O(attend(q, k, v))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.down = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x):
        return self.down(relu_squared(self.up(x)))


# ================================================================ the idea ================================================================

class Bank(nn.Module):
    """The memory that all layers share: M value vectors for every token of the vocabulary (eq. 2).

    Read once a forward, not once a layer: the distinct tokens of the batch, U of them (far fewer than B*T), are fetched
    into `rows`, and every layer reaches its tokens' vectors through `inverse`. So the layers' gradients meet in one
    (U, M, d_kv) buffer, and the bank gets one gradient a step: dense, or of the touched rows alone (sparse_memory).
    """

    def __init__(self, config):
        super().__init__()
        self.sparse = config.sparse_memory
        self.table = nn.Parameter(torch.empty(config.vocab_size, config.slots, config.d_kv))

    def forward(self, distinct):
        return gather_rows(self.table, distinct, self.sparse)  # (U, M, d_kv)


class MoVE(nn.Module):
    """One layer's gates over the shared bank (section 3.2)."""

    def __init__(self, config, layer):
        super().__init__()
        self.n_gates = config.slots + config.gate_v            # M + 1, or M when V is not gated
        self.gate_v = bool(config.gate_v)
        self.W_G = nn.Linear(config.n_embd, config.n_kv_head * self.n_gates, bias=False)

    def forward(self, x, v, reading):
        """x (B, T, d) the normed hidden state that W_V saw too; v (B, T, H_kv, d_h) -> V_S, of v's shape."""
        B, T, H, d_h = v.shape
        gate = 2 * torch.sigmoid(self.W_G(x)).view(B * T, H, self.n_gates)                                   # eq. 3
        v_s = mix_values(v.reshape(B * T, H, d_h), reading.rows, reading.inverse, gate, self.gate_v, reading.order)   # eq. 4
        return v_s.view(B, T, H, d_h)


class Reading(NamedTuple):
    """One forward's view of the memory."""
    distinct: torch.Tensor                                     # (U,) the batch's token ids, sorted, each once
    inverse: torch.Tensor                                      # (B*T,) position of each token's id in `distinct`
    rows: torch.Tensor                                         # (U, M, d_kv) what the bank holds for them
    order: torch.Tensor                                        # (B*T*M,) the uses of each row together: sorted once for all layers


MEMORIES = {"move": MoVE}                                      # LaVE joins below the fold
ATTENTIONS = {"mha": Attention}                                # so does latent attention


def make_memory(config, layer):
    return MEMORIES[config.memory](config, layer) if config.memory == "move" or layer in lave_layers(config) else None


def lave_layers(config):                                       # x1: L-1, L-3, ...; x2: every layer (section 4.1)
    return range(config.n_layer - 1, -1, -2 if config.memory_scale == 1 else -1) if config.memory == "lave" else ()


# ================================================================ the model ===============================================================

class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.attn = ATTENTIONS[config.attention](config, layer)
        self.mlp = MLP(config)

    def forward(self, x, rotary, reading, cache):
        x = x + self.attn(rms_norm(x), rotary, reading, cache)
        return x + self.mlp(rms_norm(x))


def own_generator(name, p):
    """Random numbers of tensor p's own, from torch's seed and its name: models that share a tensor start from equal values in it."""
    return torch.Generator(p.device).manual_seed(torch.initial_seed() % 2 ** 31 + zlib.crc32(name.encode()))


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        padded = (config.vocab_size + 63) // 64 * 64
        self.embed = nn.Embedding(padded, config.n_embd)
        self.bank = Bank(config) if config.memory == "move" else None
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.resid_lambda = nn.Parameter(torch.empty(config.n_layer))
        self.x0_lambda = nn.Parameter(torch.empty(config.n_layer))
        self.head = nn.Linear(config.n_embd, padded, bias=False)

    @torch.no_grad()
    def init_weights(self):
        """nanochat's initial values."""
        uniform = lambda p, fan_in, g: p.uniform_(-(3 / fan_in) ** 0.5, (3 / fan_in) ** 0.5, generator=g)   # std 1/sqrt(fan_in)
        for name, p in self.named_parameters():
            g = own_generator(name, p)
            if name == "embed.weight":
                p.normal_(0, 1, generator=g)
            elif name == "head.weight":
                p.normal_(0, 0.001, generator=g)
            elif name == "resid_lambda":
                p.fill_(1.0)
            elif name == "x0_lambda" or name.endswith(("W_O.weight", "down.weight", "W_G.weight")):
                p.zero_()                                      # blocks start as the identity, gates at 2*sigmoid(0) = 1
            elif name.endswith("table"):
                uniform(p, self.config.n_embd, g)              # slots must differ: equal ones would stay equal for ever
            else:
                uniform(p, p.size(1), g)

    @torch.compiler.disable                                    # U depends on the data: one graph break, before any arithmetic
    def read(self, idx):
        if self.config.memory == "none":
            return None
        distinct, inverse = torch.unique(idx.reshape(-1), return_inverse=True)
        order = mix_order(inverse, self.config.slots) if torch.is_grad_enabled() else None
        return Reading(distinct, inverse, self.bank(distinct) if self.bank is not None else None, order)

    def forward(self, idx, targets=None, cache=None):
        """idx (B, T) int64. With targets (B, T), -1 where there is no loss: (None, mean cross-entropy in nats).
        Without: (logits (B, T, vocab) fp32, None), only the last position's when a cache from new_cache() is given."""
        start = 0 if cache is None else cache.pos
        rotary = rotary_tables(rotary_frequencies(self.config, idx.device), start, idx.size(1))
        reading = self.read(idx)
        x0 = x = rms_norm(self.embed(idx))                     # (B, T, d)
        for block, resid, skip in zip(self.blocks, self.resid_lambda, self.x0_lambda):
            x = block(scaled_sum(resid, x, skip, x0), rotary, reading, cache)
        x = rms_norm(x)
        if targets is not None:
            return None, self.loss(x, targets)
        if cache is not None:
            cache.pos += idx.size(1)
            x = x[:, -1:]
        return self.logits(x), None

    def logits(self, x):
        z = self.head(x)[..., :self.config.vocab_size].float()
        return 15 * torch.tanh(z / 15)                         # soft cap: no logit beyond +-15

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
        """nanochat's groups (optimizer "muon"), or the same with AdamW for the matrices; rates as ratios to learning_rate."""
        tables = [p for name, p in self.named_parameters() if name.endswith("table")]
        matrices = [p for p in self.blocks.parameters() if p.ndim == 2 and not any(p is t for t in tables)]
        if optimizer == "muon":                                # learning_rate 0.02 for the matrices
            wide = (768 / self.config.n_embd) ** 0.5
            decay = weight_decay * (12 / self.config.n_layer) ** 2
            embed, head, resid, skip, extra = 15 * wide, 0.2 * wide, 0.25, 25.0, dict(eps=1e-10)
        else:
            embed, head, resid, skip, extra, decay = 10.0, 1.0, 1.0, 10.0, {}, weight_decay
        rows = [(matrices, optimizer, 1.0, decay, {}), ([self.embed.weight], "adamw", embed, 0.0, extra), ([self.head.weight], "adamw", head, 0.0, extra),
                ([self.resid_lambda], "adamw", resid, 0.0, extra), ([self.x0_lambda], "adamw", skip, 0.0, extra),
                (tables, "sparse" if self.config.sparse_memory else "adamw", embed * self.config.memory_lr, 0.0, extra)]
        return [dict(params=params, kind=kind, lr=ratio * learning_rate, weight_decay=decay, schedule=True, **extra)
                for params, kind, ratio, decay, extra in rows if params]

    def param_counts(self):
        """total, memory (bank or tables), active: what one token touches (one row of the embedding and of each table)."""
        total = sum(p.numel() for p in self.parameters())
        tables = [p for name, p in self.named_parameters() if name.endswith("table")]
        lookups = [*tables, self.embed.weight]
        memory = sum(p.numel() for p in tables)
        return dict(total=total, memory=memory, active=total - sum(p.numel() - p[0].numel() for p in lookups))

    def flops_per_token(self):
        """Forward and backward of the matrix products, at full context: 6 a weight, 12*T*d a layer for attention."""
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        return 6 * weights + 12 * self.config.n_layer * self.config.block_size * self.config.n_embd

    @torch.no_grad()
    def inspect(self, idx):
        """Gates (eq. 3) for one text idx (1, T): {"gates": (layers, T, H_kv, gates)}; the first gate is g_0 where V is gated."""
        gates, hooks = [], []
        for module in self.modules():
            if isinstance(module, MoVE):                       # LaVE too: it is one
                keep = lambda W_G, x, z, n=module.n_gates: gates.append(2 * torch.sigmoid(z.float()).view(idx.size(1), -1, n))
                hooks.append(module.W_G.register_forward_hook(keep))
        try:
            self(idx)
        finally:
            for hook in hooks:
                hook.remove()
        return {"gates": (torch.stack(gates), ("layer", "token", "head", "slot"))} if gates else {}


# ================================================================ below the fold: baselines, ablations, foreign checkpoints ==============

class LaVE(MoVE):
    """Layer-wise value embeddings (eq. 6): MoVE with one slot and a table of the layer's own; g_0 is off by default."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.bank = Bank(config)                               # (vocab, 1, d_kv), private to this layer

    def forward(self, x, v, reading):
        return super().forward(x, v, reading._replace(rows=self.bank(reading.distinct)))


class LatentAttention(nn.Module):
    """Multi-head latent attention (section 4.4): keys and values are read from a narrow latent c = x W_DKV, and the memory is
    mixed into that latent, chunk by chunk (eq. 7). The cache holds c_S alone, d_c = d/32 numbers a token and layer; that keys, too, are read from
    c_S follows from that, the paper does not print it."""

    @staticmethod
    def value_width(config):
        return config.n_kv_head * max(1, config.head_dim // 32)                          # d_c

    def __init__(self, config, layer):
        super().__init__()
        d, d_c, self.config = config.n_embd, config.d_kv, config
        self.layer, self.n_head, self.n_kv_head = layer, config.n_head, config.n_kv_head
        self.W_Q = nn.Linear(d, d, bias=False)
        self.W_DKV = nn.Linear(d, d_c, bias=False)
        self.W_UK = nn.Linear(d_c, d, bias=False)
        self.W_UV = nn.Linear(d_c, d, bias=False)
        self.W_O = nn.Linear(d, d, bias=False)
        self.memory = make_memory(config, layer)

    def forward(self, x, rotary, reading, cache=None):
        B, T, d = x.shape
        q = rms_norm(rotate(self.W_Q(x).view(B, T, self.n_head, -1), rotary))                # (B, T, H, d_h)
        c = self.W_DKV(x)                                                                # (B, T, d_c)
        if self.memory is not None:
            c = self.memory(x, c.view(B, T, self.n_kv_head, -1), reading).view(B, T, -1) # c_S   eq. 7
        if cache is not None:
            c = cache.append((self.layer, "c"), c)                                       # (B, S, d_c)
            rotary = rotary_tables(rotary_frequencies(self.config, x.device), 0, c.size(1))     # keys are rebuilt from position 0 on
        k = rms_norm(rotate(self.W_UK(c).view(B, c.size(1), self.n_head, -1), rotary))       # (B, S, H, d_h)
        v = self.W_UV(c).view(B, c.size(1), self.n_head, -1)
        return self.W_O(attend(q, k, v))


MEMORIES["lave"] = LaVE
ATTENTIONS["mla"] = LatentAttention
