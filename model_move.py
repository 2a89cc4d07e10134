"""
MoVE, Mixture of Value Embeddings (Li 2026, "A New Axis for Scaling Parametric Memory in
Auto-Regressive Models").

The idea: attention moves *values* around, and a value is a function of the hidden state alone.
MoVE gives every token of the vocabulary M further value vectors, kept in one bank that all layers
share. In every layer and every head a gate computed from the hidden state mixes them with the
ordinary value. Reading the bank is an embedding lookup, so the memory grows (at 12 layers M = 6,
12, 24, 48 slots a token) while the arithmetic hardly does: by the fraction H(M+1)/(12d+2T), eq. 5.
(The paper has H_kv = H. With fewer key/value heads, gates and value vectors are those of the H_kv
heads, and a value vector has d_kv = H_kv d_h numbers.)

    V     = x W_V                                        (B, T, H_kv, d_h)       eq. 1
    bank[w]                                              (B, T, M, H_kv, d_h)    eq. 2: M_t = E[w_t]
    gate  = 2 * sigmoid(x W_G)                           (B, T, H_kv, M+1)       eq. 3, 1 at W_G = 0
    V_S   = gate[0] * V  +  sum_i gate[i] * bank[w][i]   (B, T, H_kv, d_h)       eq. 4
    Y     = softmax(Q K^T / sqrt(d_h)) V_S               V_S is what the cache holds

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

What to compare it with (below the fold): LaVE, a table of value embeddings for every second layer
(eq. 6), and both inside Multi-head Latent Attention (section 4.4, MoVE by eq. 7). The backbone is
nanochat's of January 2026: norms without weights, rotary embeddings, normed queries and keys,
relu^2, untied embeddings, soft-capped logits, full attention (since 11 January three nanochat
layers in four see half of the context), and x = resid_lambda * x + x0_lambda * x0 before each
block, where x0 is the normed embedding.

    python train.py --model=move --depth=4 --memory_scale=4     # x4; --dense=True: without a memory
"""
import math
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn

from kernels import attend, gather_rows, linear_cross_entropy, mix_order, mix_values
from kernels import relu_squared, rms_norm, scaled_sum


@dataclass
class Config:
    vocab_size: int = 65536       # tokens; embedding and head are padded to a multiple of 64
    block_size: int = 2048        # tokens of context in training
    n_layer: int = 12             # L; the paper has 12, 20 and 32
    n_head: int = 6               # H, query heads
    n_kv_head: int = -1           # H_kv, key/value heads (fewer: grouped queries); mla: chunks of
                                  # the latent; -1: n_head
    n_embd: int = 768             # d, width
    memory: str = "move"          # move | lave | none
    memory_scale: float = 1.0     # M = ceil(scale L/2) slots; LaVE at 1: every other layer, 2: all
    gate_v: int = -1              # gate g_0 on V, 0 or 1; -1: the paper's, 1 for MoVE, 0 for LaVE
    attention: str = "mha"        # mha | mla
    d_c: int = -1                 # width of mla's latent; -1: H_kv floor(d_h/32), at least H_kv
    plain_keys: bool = False      # mla: keys are read from c as it was, without the memory
    latent_norm: bool = False     # mla: c is normed (RMSNorm without weights), as in DeepSeek-V2
    memory_lr: float = 1.0        # learning rate of bank or tables, times the embedding's
                                  # At first all gates are 1 and a token's M slots get equal
                                  # updates: their sum moves M times as far as one. Best here: 1
                                  # with 1M tokens (M=2), with 8M 1/4 (M=2, 4) to 1/16 (M=16)
    sparse_memory: bool = False   # row-sparse gradients, lazy Adam: cost independent of vocabulary

    def check(self, ok, fields, rule):
        """Raise ValueError that names the fields and the rule they break."""
        if not ok:
            values = ", ".join(f"{name}={getattr(self, name)!r}" for name in fields.split())
            raise ValueError(f"{values}: {rule}")

    def __post_init__(self):
        if self.n_kv_head == -1:
            self.n_kv_head = self.n_head
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_kv_head", "n_embd"):
            self.check(getattr(self, name) > 0, name, "must be at least 1")
        self.check(self.n_embd % (2 * self.n_head) == 0, "n_embd n_head",
                   "n_embd must be a multiple of 2*n_head")
        self.check(self.n_head % self.n_kv_head == 0, "n_head n_kv_head",
                   "n_head must be a multiple of n_kv_head")
        self.check(self.attention in ("mha", "mla"), "attention", "choose mha or mla")
        d_c = self.n_kv_head * max(1, self.head_dim // 32)
        if self.d_c == -1:
            self.d_c = d_c
        mla = self.attention == "mla"
        own = self.d_c != d_c or self.plain_keys or self.latent_norm
        self.check(mla or not own, "attention d_c plain_keys latent_norm",
                   "a latent's width, keys and norm need attention=mla")
        self.check(self.d_c > 0 and self.d_c % self.n_kv_head == 0, "d_c n_kv_head",
                   "d_c must be a multiple of n_kv_head")
        self.check(self.memory in ("move", "lave", "none"), "memory", "choose move, lave or none")
        self.check(self.memory_scale > 0, "memory_scale", "must be positive")
        self.check(self.memory != "lave" or self.memory_scale in (1, 2), "memory_scale",
                   "choose 1 or 2 for memory=lave")
        self.check(self.memory_lr > 0, "memory_lr", "must be positive")
        self.check(self.gate_v in (-1, 0, 1), "gate_v", "choose 0, 1 or -1 (automatic)")
        if self.gate_v == -1:
            self.gate_v = int(self.memory == "move")

    @classmethod
    def from_depth(cls, depth, **overrides):
        """The depth dial: width 64*depth; heads: the number nearest width/128 that divides it."""
        width = 64 * depth
        target = round(width / 128)
        possible = [n for n in range(1, width) if width % (2 * n) == 0]
        n_head = min(possible, key=lambda n: (abs(n - target), n < target))
        return cls(**{"n_layer": depth, "n_embd": width, "n_head": n_head, **overrides})

    @property
    def head_dim(self):
        return self.n_embd // self.n_head

    @property
    def slots(self):
        """M, value vectors of a token in a table."""
        if self.memory == "move":
            # -1e-9, since 4.4 * 25 / 2 is a little more than 55 in floating point.
            return math.ceil(self.memory_scale * self.n_layer / 2 - 1e-9)
        return int(self.memory == "lave")

    @property
    def d_kv(self):
        """Width of such a vector: that of all values of a token, or of the latent c."""
        return self.d_c if self.attention == "mla" else self.n_kv_head * self.head_dim


# Tables 1 and 3; their rows: --dense=True, --memory_scale=1 ... 32, --memory=lave.
PRESETS = {
    "d12": dict(n_layer=12, n_embd=768, n_head=6),
    "d20": dict(n_layer=20, n_embd=1280, n_head=10),
    "d32": dict(n_layer=32, n_embd=2048, n_head=16),
    "d12_mla": dict(n_layer=12, n_embd=768, n_head=6, attention="mla"),
    "d20_mla": dict(n_layer=20, n_embd=1280, n_head=10, attention="mla"),
}
DENSE = dict(memory="none")
RECIPE = {                        # nanochat's (the paper's, for 524,288 tokens a step) comes first
    "muon": dict(learning_rate=0.02, weight_decay=0.2, beta1=0.8, beta2=0.95, grad_clip=0.0,
                 schedule="wsd", warmup=0.0, warmdown=0.4),
    "adamw": dict(learning_rate=2e-3, weight_decay=0.1, beta1=0.9, beta2=0.95, grad_clip=1.0),
}


# ---------------------------------------------------------------- the backbone: nanochat

SOFTCAP = 15.0                                                 # no logit is beyond +-15


def rotary_frequencies(config, device):
    """theta (d_h/2,): -10000^(-2i/d_h), negative since nanochat turns the other way than Llama."""
    exponent = -torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32)
    return -(10000.0 ** (exponent / config.head_dim))


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
    """Multi-head or grouped-query attention whose values pass through a memory."""

    def __init__(self, config, layer):
        super().__init__()
        d = config.n_embd
        self.layer = layer
        self.n_head = config.n_head
        self.n_kv_head = config.n_kv_head
        self.W_Q = nn.Linear(d, d, bias=False)
        self.W_K = nn.Linear(d, config.d_kv, bias=False)
        self.W_V = nn.Linear(d, config.d_kv, bias=False)
        self.W_O = nn.Linear(d, d, bias=False)
        self.memory = make_memory(config, layer)

    def forward(self, x, rotary, reading, cache=None):
        B, T, d = x.shape
        q = self.W_Q(x).view(B, T, self.n_head, -1)            # (B, T, H, d_h)
        k = self.W_K(x).view(B, T, self.n_kv_head, -1)         # (B, T, H_kv, d_h)
        v = self.W_V(x).view(B, T, self.n_kv_head, -1)         # the same            eq. 1
        if self.memory is not None:
            v = self.memory(x, v, reading)                     # V_S                 eq. 4
        q = rms_norm(rotate(q, rotary))
        k = rms_norm(rotate(k, rotary))
        if cache is not None:                                  # V_S, which is as large as V
            k = cache.append((self.layer, "k"), k)
            v = cache.append((self.layer, "v"), v)
        return self.W_O(attend(q, k, v))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.down = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x):
        return self.down(relu_squared(self.up(x)))


# ================================================================ the idea

class Bank(nn.Module):
    """M value vectors for every token of the vocabulary (eq. 2). All layers share one bank (but
    each LaVE layer has its own, with M = 1).

    Read once a forward, not once a layer: the distinct tokens of the batch, U of them (at
    most B*T), are fetched into `rows`, and every layer reaches its tokens' vectors through
    `inverse`. So the layers' gradients meet in one (U, M, d_kv) buffer, and the bank gets one
    gradient a backward: dense, or of the touched rows alone (sparse_memory).
    """

    def __init__(self, config):
        super().__init__()
        self.sparse = config.sparse_memory
        self.table = nn.Parameter(torch.empty(config.vocab_size, config.slots, config.d_kv))

    def forward(self, distinct):
        return gather_rows(self.table, distinct, self.sparse)  # (U, M, d_kv)


class Reading(NamedTuple):
    """What one forward reads."""
    distinct: torch.Tensor        # (U,) the batch's token ids, sorted, each once
    inverse: torch.Tensor         # (B*T,) where in `distinct` each token is
    rows: torch.Tensor            # (U, M, d_kv) what the bank holds for them; LaVE: None
    order: torch.Tensor           # (B*T*M,) puts all uses of a row side by side: one sort for all
                                  # layers' gradients; None without gradients


class MoVE(nn.Module):
    """One layer's gates over the shared bank (section 3.2)."""

    def __init__(self, config):
        super().__init__()
        self.n_kv_head = config.n_kv_head
        self.gate_v = bool(config.gate_v)
        n_gates = config.slots + config.gate_v                 # M + 1, or M where V has no gate
        self.W_G = nn.Linear(config.n_embd, config.n_kv_head * n_gates, bias=False)

    def gates(self, x):
        """x (..., d) -> (..., H_kv, M+1), each between 0 and 2."""
        return 2 * torch.sigmoid(self.W_G(x)).unflatten(-1, (self.n_kv_head, -1))    # eq. 3

    def forward(self, x, v, reading):
        """x (B, T, d) the normed hidden state that W_V saw too; v (B, T, H_kv, d_h) -> V_S:
        gate[..., :1] * v + einsum("btmhd,bthm->bthd", bank[w], gate[..., 1:]). bank[w] is never
        made: mix_values sums from reading.rows. (Without g_0, v is added as it is.)"""
        v_s = mix_values(v.flatten(0, 1), reading.rows, reading.inverse,
                         self.gates(x).flatten(0, 1), self.gate_v, reading.order)    # eq. 4
        return v_s.view(v.shape)


def make_memory(config, layer):
    """What the values of a layer pass through, or None."""
    if config.memory == "move":
        return MoVE(config)
    if config.memory == "lave" and layer in lave_layers(config):
        return LaVE(config)
    return None


# ================================================================ the model

class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        if config.attention == "mla":
            self.attn = LatentAttention(config, layer)
        else:
            self.attn = Attention(config, layer)
        self.mlp = MLP(config)

    def forward(self, x, rotary, reading, cache):
        x = x + self.attn(rms_norm(x), rotary, reading, cache)
        return x + self.mlp(rms_norm(x))


def own_generator(name, p):
    """A generator for tensor p alone, seeded by torch's seed and p's name: a tensor that two models
    both have, by name and shape, starts with equal values."""
    seed = torch.initial_seed() % 2 ** 31 + zlib.crc32(name.encode())
    return torch.Generator(p.device).manual_seed(seed)


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
        """nanochat's initial values (later versions start x0_lambda at 0.1). Output projections and
        gates are zero: blocks start as the identity, gates at 2*sigmoid(0) = 1. The bank's slots
        must differ, since equal ones would stay equal for ever."""
        for name, p in self.named_parameters():
            generator = own_generator(name, p)
            if name == "embed.weight":
                p.normal_(0, 1, generator=generator)
            elif name == "head.weight":
                p.normal_(0, 0.001, generator=generator)
            elif name == "resid_lambda":
                p.fill_(1.0)
            elif name.endswith(("x0_lambda", "W_O.weight", "down.weight", "W_G.weight")):
                p.zero_()
            else:                                              # uniform of std 1/sqrt(fan_in)
                fan_in = self.config.n_embd if name.endswith("table") else p.size(1)
                bound = (3 / fan_in) ** 0.5
                p.uniform_(-bound, bound, generator=generator)

    @torch.compiler.disable    # a graph break: how many tokens are distinct depends on the data
    def read(self, idx):
        distinct, inverse = torch.unique(idx.flatten(), return_inverse=True)
        rows = self.bank(distinct) if self.bank is not None else None
        order = mix_order(inverse, self.config.slots) if torch.is_grad_enabled() else None
        return Reading(distinct, inverse, rows, order)

    def forward(self, idx, targets=None, cache=None):
        """idx (B, T) int64. With targets (B, T), -1 where there is no loss: (None, mean
        cross-entropy in nats). Without: (logits (B, T, vocab) fp32, None), only the last
        position's when a cache from new_cache() is given."""
        start = 0 if cache is None else cache.pos
        theta = rotary_frequencies(self.config, idx.device)
        rotary = rotary_tables(theta, start, idx.size(1))
        reading = self.read(idx) if self.config.memory != "none" else None
        x0 = rms_norm(self.embed(idx))                         # (B, T, d)
        x = x0
        for block, resid, skip in zip(self.blocks, self.resid_lambda, self.x0_lambda):
            x = block(scaled_sum(resid, x, skip, x0), rotary, reading, cache)
        x = rms_norm(x)
        if targets is not None:
            weight = self.head.weight[:self.config.vocab_size]
            return None, linear_cross_entropy(x, weight, targets, softcap=SOFTCAP)
        if cache is not None:
            cache.pos += idx.size(1)
            x = x[:, -1:]
        return self.logits(x), None

    def logits(self, x):
        z = self.head(x)[..., :self.config.vocab_size].float()
        return SOFTCAP * torch.tanh(z / SOFTCAP)

    def new_cache(self, batch_size, max_len):
        return Cache(max_len)

    def tables(self):
        """The memory: the bank, or LaVE's tables."""
        return [p for name, p in self.named_parameters() if name.endswith("table")]

    def param_groups(self, optimizer, learning_rate, weight_decay):
        """nanochat's groups and rates (optimizer "muon"), or the same groups at rates of our own
        (AdamW). All are ratios to learning_rate, the matrices' rate. Ours is torch's Muon, without
        nanochat's variance reduction and Polar Express. Every weight decays (there only where the
        update shrinks it anyway), all at the group's rate (there a tall matrix at its larger one).
        nanochat also multiplies all rates by sqrt(batch_tokens / 524288); here a rate is what is
        given."""
        def group(params, kind, ratio, decay=0.0):
            return dict(params=params, kind=kind, lr=ratio * learning_rate, weight_decay=decay,
                        schedule=True)

        if optimizer == "muon":
            wide = (768 / self.config.n_embd) ** 0.5
            ratio = dict(embed=15 * wide, head=0.2 * wide, resid=0.25, x0=25.0)
            decay = weight_decay * (12 / self.config.n_layer) ** 2
        else:
            ratio = dict(embed=10.0, head=1.0, resid=1.0, x0=10.0)
            decay = weight_decay
        matrices = [m.weight for m in self.blocks.modules() if isinstance(m, nn.Linear)]
        groups = [
            group(matrices, optimizer, 1.0, decay),
            group([self.embed.weight], "adamw", ratio["embed"]),
            group([self.head.weight], "adamw", ratio["head"]),
            group([self.resid_lambda], "adamw", ratio["resid"]),
            group([self.x0_lambda], "adamw", ratio["x0"]),
        ]
        if self.tables():
            kind = "sparse" if self.config.sparse_memory else "adamw"
            rate = ratio["embed"] * self.config.memory_lr
            groups.append(group(self.tables(), kind, rate))
        if optimizer == "muon":
            for adam in groups[1:]:
                adam["eps"] = 1e-10
        return groups

    def param_counts(self):
        """total, memory (bank or tables), active: what one token touches (one row of the embedding
        and of each table)."""
        total = sum(p.numel() for p in self.parameters())
        memory = sum(p.numel() for p in self.tables())
        unread = sum(p[1:].numel() for p in (self.embed.weight, *self.tables()))
        return dict(total=total, memory=memory, active=total - unread)

    def flops_per_token(self):
        """Forward and backward of the matrix products, at full context: 6 a weight, 12*T*d a layer
        for attention."""
        c = self.config
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        return 6 * weights + 12 * c.n_layer * c.block_size * c.n_embd

    @torch.no_grad()
    def inspect(self, idx):
        """Gates (eq. 3) for one text idx (1, T): {"gates": (tensor (layers, T, H_kv, gates), names
        of its axes)}; the first gate is g_0 where V is gated. Layers without a memory are left
        out (LaVE x1)."""
        memories = [m for m in self.modules() if isinstance(m, MoVE)]    # LaVE is one, too
        if not memories:
            return {}
        gates = []

        def keep(memory, inputs):
            x, _, _ = inputs
            gates.append(memory.gates(x[0]).float())

        hooks = [memory.register_forward_pre_hook(keep) for memory in memories]
        self(idx)
        for hook in hooks:
            hook.remove()
        layer = "layer" if len(gates) == self.config.n_layer else "layer with a table"
        return {"gates": (torch.stack(gates), (layer, "token", "head", "slot"))}


# ================================================================ below the fold

class LaVE(MoVE):
    """Layer-wise value embeddings (eq. 6): MoVE with one slot and a table of the layer's own, by
    default without g_0. (Eq. 6 has no index of heads; Table 3's counts have a gate per head.
    Section 4.5's g_0 is "a sigmoid gate"; here 2*sigmoid, as the others.)"""

    def __init__(self, config):
        super().__init__(config)
        self.bank = Bank(config)                               # (vocab, 1, d_kv)

    def forward(self, x, v, reading):
        return super().forward(x, v, reading._replace(rows=self.bank(reading.distinct)))


def lave_layers(config):
    """x1: L-1, L-3, ...; x2: every layer (section 4.1)."""
    step = 2 if config.memory_scale == 1 else 1
    return range(config.n_layer - 1, -1, -step)


class LatentAttention(nn.Module):
    """Multi-head latent attention (section 4.4). Keys and values are made from a narrow latent
    c = x W_DKV (the paper's c_KV). The memory is mixed into it, chunk by chunk, which gives c_S
    (eq. 7). The cache holds c_S alone, d_c numbers a token and layer.

    The paper does not say from which of the two keys are made: c_S is used "for the final
    projection", and is what the cache stores. So here keys, too, are made from c_S. (plain_keys:
    from c, and the cache holds both.) Nor does it say whether c is normed, as in DeepSeek-V2; here
    it is not. (latent_norm: it is, before the memory.) Nor does it speak of positions: keys are
    rotated and normed as in Attention. The paper absorbs W_UV into W_O; here values are made."""

    def __init__(self, config, layer):
        super().__init__()
        d = config.n_embd
        d_c = config.d_kv
        self.config = config
        self.layer = layer
        self.W_Q = nn.Linear(d, d, bias=False)
        self.W_DKV = nn.Linear(d, d_c, bias=False)
        self.W_UK = nn.Linear(d_c, d, bias=False)
        self.W_UV = nn.Linear(d_c, d, bias=False)
        self.W_O = nn.Linear(d, d, bias=False)
        self.memory = make_memory(config, layer)

    def forward(self, x, rotary, reading, cache=None):
        heads = (self.config.n_head, self.config.head_dim)
        q = rms_norm(rotate(self.W_Q(x).unflatten(-1, heads), rotary))           # (B, T, H, d_h)
        c = self.W_DKV(x)                                                        # (B, T, d_c)
        if self.config.latent_norm:
            c = rms_norm(c)
        c_S = c
        if self.memory is not None:
            chunks = c.unflatten(-1, (self.config.n_kv_head, -1))
            c_S = self.memory(x, chunks, reading).flatten(2)                     # eq. 7
        if cache is not None:
            c_S = cache.append((self.layer, "c_S"), c_S)                         # (B, S, d_c)
            if self.config.plain_keys:
                c = cache.append((self.layer, "c"), c)
            theta = rotary_frequencies(self.config, x.device)
            rotary = rotary_tables(theta, 0, c_S.size(1))      # all keys are made again
        c_K = c if self.config.plain_keys else c_S
        k = rms_norm(rotate(self.W_UK(c_K).unflatten(-1, heads), rotary))        # (B, S, H, d_h)
        v = self.W_UV(c_S).unflatten(-1, heads)
        return self.W_O(attend(q, k, v))
