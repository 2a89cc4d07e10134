"""
MIDUS-HML, memory-infused depth up-scaling (2026, "MIDUS: Memory-Infused Depth Up-Scaling").

The idea: a trained transformer grows deeper by D new blocks, and only those are trained on (continual pre-training, CPT).
Others insert copies of whole blocks. MIDUS inserts *memory blocks*: attention as in the block that follows, but where the
FFN would be, every attention head looks its own output up in a product-key memory of its own (head-wise memory layer, HML).
The heads share one table of narrow latent values, and each head realises them with its own matrix W_h (HIVE). The table
starts at zero: the deeper model is, to the last bit, the base it grew from, and the residual stream carries x through.

    a'    = Attn'(LN(x)) = [a_1 | ... | a_H]                   (B, T, H, d_h)  no output projection                eq. 3
    s     = a_h[row] K_h[row]^T, a_h[col] K_h[col]^T           (n) and (n)     the halves of a_h are the queries   eq. 13
    slots = the k pairs (i, j) with the largest s_i + s_j      alpha = softmax over these k                        eqs. 14, 15
    M_h   = (sum alpha_ij V[i n + j]) W_h                      (B, T, d_h)     V (n*n, r), W_h (r, d_h)            eq. 4
    M(x)  = x + [M_1 | ... | M_H]                              (B, T, d)                                           eq. 5

        a base block                                    a memory block, before it
        x -+-> LN -> attention -> W_O -(+)-> a          x -+-> LN -> attention -+- a_1 -> keys 1 -> V -> W_1 -+
           +----------------------------+               |      (no W_O)         +- a_2 -> keys 2 -> V -> W_2 -+
        a -+-> LN -> SwiGLU -----------(+)-> out        |                       +- ...      one V for all    -+- (+) -> out
           +----------------------------+               +------------------------------------------------------+

`upscale(base, method)` grows a base of train.py's (--dense=True) or of Hugging Face's (from_pretrained). What trains, by phase: ""
everything, which is training from scratch; "cpt" the inserted blocks; "sft" everything. Below the fold is what to compare with: SOLAR,
Llama Pro, Avg-DeUS, OpT-DeUS and LESA, which duplicate blocks; linear, product-key and UltraMem memories; Table 11's structures.

    python train.py --model=midus --dense=True                                                    # a base, in out/midus-d4-dense
    python train.py --model=midus --init_from=out/midus-d4-dense --upscale=midus --phase=cpt      # grown, in out/midus-d4
"""
import json, math, os, zlib
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from kernels import gather_sum, product_key_topk, tucker_topk


@dataclass
class Config:
    vocab_size: int = 128256      # tokens
    block_size: int = 2048        # tokens of context in training
    n_layer: int = 16             # L, blocks of the base; the paper has 16 (Llama 3.2 1B) and 32 (Llama 3.1 8B)
    n_head: int = 32              # H, query heads
    n_kv_head: int = -1           # H_kv, key/value heads; -1: n_head (fewer: grouped-query attention)
    n_embd: int = 2048            # d, width
    n_inner: int = -1             # width of the MLP's hidden layer; -1: 4*n_embd
    tied: bool = True             # one matrix for the embedding and the head
    qkv_bias: bool = False        # biases of queries, keys and values (Qwen2.5)
    norm_eps: float = 1e-5        # of RMSNorm
    rope_base: float = 500000.0   # of the rotary embedding
    rope_scaling: str = ""        # Llama 3's, factor:low:high:context: 32:1:4:8192 (3.2 1B), 8:1:4:8192 (3.1 8B)
    upscale: str = "midus"        # midus | solar | llama_pro | avg_deus | opt_deus | lesa | base (nothing inserted)
    inserted: int = -1            # D, inserted blocks; -1: L/2, the paper's 8 and 16
    placement: str = ""           # distributed | top-heavy | bottom-heavy; "": the method's own, distributed for midus
    phase: str = ""               # what trains: cpt, the inserted blocks (solar, base: everything); sft and "", everything
    memory: str = "hml"           # hml | linear | pkm | ultramem: of the memory blocks
    n: int = 64                   # row sub-keys, and column sub-keys, of a head: n*n slots
    k: int = 4                    # slots that a head retrieves for a token
    r: int = -1                   # width of the latent values; -1: d_h
    query_norm: str = ""          # Table 11: batch (BatchNorm1d) | layer (LayerNorm) on the queries
    internal_residual: bool = False   # Table 11: a' = x + Attn'(LN(x))
    out_proj: bool = False        # Table 11: a' passes the attention's output projection

    def check(self, ok, fields, rule):
        if not ok:
            raise ValueError(", ".join(f"{name}={getattr(self, name)!r}" for name in fields.split()) + f": {rule}")

    def __post_init__(self):
        L = self.n_layer
        self.n_kv_head = self.n_head if self.n_kv_head == -1 else self.n_kv_head
        self.n_inner = 4 * self.n_embd if self.n_inner == -1 else self.n_inner
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_kv_head", "n_embd", "n_inner", "n", "k"):
            self.check(getattr(self, name) > 0, name, "must be at least 1")
        self.check(self.n_embd % (2 * self.n_head) == 0, "n_embd n_head", "n_embd must be a multiple of 2*n_head")
        self.check(self.n_head % self.n_kv_head == 0, "n_head n_kv_head", "n_head must be a multiple of n_kv_head")
        self.r = self.head_dim if self.r == -1 else self.r
        scaling = [float(x) for x in self.rope_scaling.split(":")] if self.rope_scaling else [1, 1, 4, 1]
        self.check(self.rope_base > 0 and len(scaling) == 4 and min(scaling) > 0 and scaling[1] < scaling[2], "rope_base rope_scaling",
                   "needs base > 0, factor:low:high:context, low < high")
        for name, choices in (("upscale", METHODS), ("memory", MEMORIES), ("phase", ("", "cpt", "sft")), ("query_norm", ("", "batch", "layer"))):
            self.check(getattr(self, name) in choices, name, f"choose one of {', '.join(c or repr(c) for c in choices)}")
        self.check(self.k <= self.n ** 2 and self.r > 0, "k n r", "needs k <= n*n and r >= 1")
        table_11 = self.query_norm or self.internal_residual or self.out_proj
        self.check(self.upscale == "midus" or self.memory == "hml" and not table_11, "upscale memory", "the kinds of memory blocks need midus")
        self.check(self.memory == "hml" or not table_11, "memory query_norm internal_residual out_proj", "Table 11's structures need hml")
        placements = METHODS[self.upscale][0]
        self.placement = self.placement or placements[0]
        self.check(self.placement in placements, "upscale placement", f"this method goes with {', '.join(placements) or 'none'}")
        self.inserted = max(1, L // 2) * bool(self.placement) if self.inserted == -1 else self.inserted
        self.check(bool(self.placement) <= self.inserted <= L * bool(self.placement), "upscale n_layer inserted",
                   "needs 1 to n_layer of them, and none for base")
        PLACEMENTS[self.placement](L, self.inserted)           # some methods ask more of L and D

    @classmethod
    def from_depth(cls, depth, **overrides):
        """The depth dial: a base of `depth` blocks, width 64*depth in heads of 64 channels, two query heads to a key/value head."""
        return cls(**{**dict(n_layer=depth, n_embd=64 * depth, n_head=depth, n_kv_head=depth // (2 - depth % 2)), **overrides})

    @property
    def head_dim(self):
        return self.n_embd // self.n_head


PRESETS = {                       # the paper's two models, grown with HML; --dense=True: the bases
    "llama3.2_1b": dict(n_layer=16, n_head=32, n_kv_head=8, n_embd=2048, n_inner=8192, rope_scaling="32:1:4:8192"),
    "llama3.1_8b": dict(n_layer=32, n_head=32, n_kv_head=8, n_embd=4096, n_inner=14336, rope_scaling="8:1:4:8192", tied=False),
}
DENSE = dict(upscale="base", placement="", inserted=0)
RECIPE = {                        # betas and clipping are ours, and the rate: 1e-4 (1B), 5e-5 (8B) in CPT, 1e-5 in SFT, 64 x 2,048 tokens a step
    "adamw": dict(learning_rate=2e-3, weight_decay=1e-6, beta1=0.9, beta2=0.999, grad_clip=1.0, schedule="cosine", warmup=0.1),
}


# ---------------------------------------------------------------- the backbone: Llama

class RMSNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(width)), eps

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotary_frequencies(config, device):
    """theta (d_h/2,): base^(-2i/d_h). Llama 3 stretches the wavelengths that turn less than `low` times in its old context."""
    theta = config.rope_base ** (-torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32) / config.head_dim)
    if not config.rope_scaling:
        return theta
    factor, low, high, context = map(float, config.rope_scaling.split(":"))
    keep = ((context * theta / (2 * math.pi) - low) / (high - low)).clamp(0, 1)          # 1 beyond `high` turns
    return keep * theta + (1 - keep) * theta / factor


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
    """What attention must remember of the tokens so far, in base and memory blocks alike."""

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
    def __init__(self, config, layer, output=True):
        super().__init__()
        d, d_h, bias = config.n_embd, config.head_dim, config.qkv_bias
        self.layer, self.n_head, self.n_kv_head = layer, config.n_head, config.n_kv_head
        self.W_Q = nn.Linear(d, config.n_head * d_h, bias=bias)
        self.W_K = nn.Linear(d, config.n_kv_head * d_h, bias=bias)
        self.W_V = nn.Linear(d, config.n_kv_head * d_h, bias=bias)
        self.W_O = nn.Linear(config.n_head * d_h, d, bias=False) if output else None

    def forward(self, x, rotary, cache=None):
        B, T, d = x.shape
        q = rotate(self.W_Q(x).view(B, T, self.n_head, -1), rotary)                      # (B, T, H, d_h)
        k = rotate(self.W_K(x).view(B, T, self.n_kv_head, -1), rotary)                   # (B, T, H_kv, d_h)
        v = self.W_V(x).view(B, T, self.n_kv_head, -1)
        if cache is not None:
            k, v = cache.append((self.layer, "k"), k), cache.append((self.layer, "v"), v)
        y = attend(q, k, v)                                                              # (B, T, H*d_h), the heads side by side
        return y if self.W_O is None else self.W_O(y)


class MLP(nn.Module):                                          # SwiGLU
    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(config.n_embd, config.n_inner, bias=False)
        self.up = nn.Linear(config.n_embd, config.n_inner, bias=False)
        self.down = nn.Linear(config.n_inner, config.n_embd, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.attn_norm = RMSNorm(config.n_embd, config.norm_eps)
        self.attn = Attention(config, layer)
        self.mlp_norm = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, rotary, cache):
        x = x + self.attn(self.attn_norm(x), rotary, cache)
        return x + self.mlp(self.mlp_norm(x))


# ================================================================ the idea ================================================================

class ProductKeys(nn.Module):
    """Each head's n*n keys: the pairs of its n row and n column sub-keys, each d_p = d_h/2 wide (Appendix D.3)."""

    def __init__(self, config):
        super().__init__()
        self.n, self.k, self.slots = config.n, config.k, config.n ** 2
        self.keys = nn.Parameter(torch.empty(config.n_head, 2, config.n, config.head_dim // 2))

    def forward(self, q):
        """q (P, H, d_h), a query for every head -> slots (P, H, k) int64 and their weights alpha (P, H, k)."""
        P, H, d_h = q.shape
        s = torch.einsum("phxd,hxnd->xphn", q.view(P, H, 2, -1), self.keys)                              # (2, P, H, n)    eq. 13
        sigma, i, j = product_key_topk(*s.reshape(2, P * H, self.n), self.k)                                 # (P*H, k)   eqs. 14, 15
        return (i * self.n + j).view(P, H, -1), sigma.softmax(-1).to(q.dtype).view(P, H, -1)


class HML(nn.Module):
    """Head-wise memory layer: keys of its own for every head, one latent table V for all, realised by W_h (section 2.2)."""

    def __init__(self, config):
        super().__init__()
        self.search = ProductKeys(config)
        self.values = nn.Parameter(torch.empty(config.n ** 2, config.r))                                     # V: zero at first
        self.W_h = nn.Parameter(torch.empty(config.n_head, config.r, config.head_dim))

    def forward(self, a):
        """a' (B, T, H*d_h), the heads' outputs, which are the queries -> HML(a') (B, T, H*d_h)."""
        B, T, d = a.shape
        H, r, d_h = self.W_h.shape
        slots, alpha = (t.view(B * T * H, -1) for t in self.search(a.reshape(B * T, H, d_h)))                # (B*T*H, k)
        latent = gather_sum(self.values, slots, alpha).view(B * T, H, r)                                     # eq. 4, left
        return torch.einsum("phr,hrd->phd", latent, self.W_h).reshape(B, T, d)                               # eq. 4, right; eq. 5


class MemoryBlock(nn.Module):
    """M(x) = x + HML(a'(x)): no internal residual, no output projection, no query projection (eqs. 3 and 5)."""

    def __init__(self, config, layer, memory, output=False):
        super().__init__()
        self.attn_norm = RMSNorm(config.n_embd, config.norm_eps)
        self.attn = Attention(config, layer, output)
        self.memory = memory

    def forward(self, x, rotary, cache):
        return x + self.memory(self.attn(self.attn_norm(x), rotary, cache))


def copy_shared(block, source):
    """Every tensor that both blocks have: for a memory block the norm and the attention, biases too."""
    block.load_state_dict({name: t for name, t in source.state_dict().items() if name in block.state_dict()}, strict=False)


def fill_midus(new, blocks, places):
    for block, i in zip(new, places):
        copy_shared(block, blocks[i])                          # attention from the base block that follows; the values stay zero (D.2)


PLACEMENTS = {                                                 # (L, D) -> the base block that each inserted one stands before (Appendix G.4)
    "": lambda L, D: [],
    "distributed": lambda L, D: [(j + 1) * L // D - 1 for j in range(D)],                # the last of each of D groups
    "top-heavy": lambda L, D: list(range(L - D, L)),
    "bottom-heavy": lambda L, D: list(range(D)),
}
METHODS = {                                                    # the placements, the method's own first; fill; whether CPT freezes the base
    "midus": (("distributed", "top-heavy", "bottom-heavy"), fill_midus, True),
    "base": (("",), lambda *blocks: None, False),
}
MEMORIES = {"hml": lambda config, layer: MemoryBlock(config, layer, HML(config))}        # methods and memories go on below the fold


def layout(config):
    """The names of the blocks from bottom to top: blocks.0, inserted.0, blocks.1, ..."""
    places, names = PLACEMENTS[config.placement](config.n_layer, config.inserted), []
    for i in range(config.n_layer + 1):
        names += [f"inserted.{j}" for j, place in enumerate(places) if place == i] + [f"blocks.{i}"] * (i < config.n_layer)
    return names


@torch.no_grad()
def upscale(base, method="midus", **fields):
    """A deeper model from `base`, a Model with upscale="base": its weights, and new blocks filled by the method.
    fields: others of Config, such as inserted (D), placement, memory, phase. After midus, llama_pro and opt_deus it computes what the
    base computes, bit for bit."""
    if base.config.upscale != "base":
        raise ValueError(f"upscale={method!r}: the model to start from is already deeper (upscale={base.config.upscale!r}); give its base")
    config, p = Config(**{**vars(base.config), "upscale": method, "inserted": -1, "placement": "", **fields}), base.embed.weight
    with torch.device("meta"):
        model = Model(config).to(p.dtype)
    model.to_empty(device=p.device).init_weights("inserted.")
    model.load_state_dict({**model.state_dict(), **base.state_dict()})
    METHODS[method][1](model.inserted, model.blocks, PLACEMENTS[config.placement](config.n_layer, config.inserted))
    return model


# ================================================================ the model ===============================================================

def own_generator(name, p):
    """Random numbers of tensor p's own, from torch's seed and its name: models that share a tensor start from equal values in it."""
    return torch.Generator(p.device).manual_seed(torch.initial_seed() % 2 ** 31 + zlib.crc32(name.encode()))


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, order = config, layout(config)
        new_block = MEMORIES[config.memory] if config.upscale == "midus" else Block
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, order.index(f"blocks.{i}")) for i in range(config.n_layer))
        self.inserted = nn.ModuleList(new_block(config, order.index(f"inserted.{j}")) for j in range(config.inserted))
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        self.head = None if config.tied else nn.Linear(config.n_embd, config.vocab_size, bias=False)   # None: the embedding's matrix
        self.stack = [self.get_submodule(name) for name in order]                        # bottom to top
        if config.phase == "cpt" and METHODS[config.upscale][2]:
            for name, p in self.named_parameters():            # autograd then keeps nothing below the lowest inserted block
                p.requires_grad_(name.startswith("inserted."))

    @torch.no_grad()
    def init_weights(self, only=""):
        """Values zero, as in the paper; ours, for it has no others: sub-keys uniform within 1/sqrt(d_p), matrices N(0, 1/fan-in), W_h N(0, 1/r) too.
        only: of names that begin so."""
        for name, p in ((name, p) for name, p in self.named_parameters() if name.startswith(only)):
            g = own_generator(name, p)
            if p.ndim == 1:
                p.fill_(float(name.endswith("norm.weight")))   # biases: 0
            elif name.endswith("values"):
                p.zero_()
            elif name.endswith("core"):
                p.uniform_(0, 1, generator=g)
            elif ".search." in name:
                p.uniform_(-p.size(-1) ** -0.5, p.size(-1) ** -0.5, generator=g)
            else:
                p.normal_(0, 0.02 if name.endswith(("embed.weight", "head.weight", "W_q.weight")) else p.size(1) ** -0.5, generator=g)
        for module in self.modules():
            getattr(module, "reset_running_stats", int)()      # BatchNorm's

    def forward(self, idx, targets=None, cache=None):
        """idx (B, T) int64. With targets (B, T), -1 where there is no loss: (None, mean cross-entropy in nats).
        Without: (logits (B, T, vocab) fp32, None), only the last position's when a cache from new_cache() is given."""
        start = 0 if cache is None else cache.pos
        rotary = rotary_tables(rotary_frequencies(self.config, idx.device), start, idx.size(1))
        x = self.embed(idx)                                    # (B, T, d)
        for block in self.stack:
            x = block(x, rotary, cache)
        x = self.norm(x)
        if targets is not None:
            return None, self.loss(x, targets)
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
        """The memories at the highest rate throughout and without decay (section E.2 says so of keys and values; W_h and the other memories'
        matrices go with them here), the rest on the schedule; nothing of what is frozen."""
        groups = {(0.0, False): [], (weight_decay, True): [], (0.0, True): []}
        for name, p in self.named_parameters():
            if p.requires_grad:
                groups[(0.0, False) if ".memory." in name else (weight_decay if p.ndim > 1 else 0.0, True)].append(p)
        return [dict(params=params, kind="adamw", lr=learning_rate, weight_decay=decay, schedule=scheduled)
                for (decay, scheduled), params in groups.items() if params]

    def param_counts(self):
        """total, memory (of the inserted blocks), active: what one token touches, at most H*k rows of each value table."""
        total, memories = sum(p.numel() for p in self.parameters()), [block.memory for block in self.inserted if hasattr(block, "memory")]
        idle = 0 if self.config.tied else self.embed.weight[1:].numel()
        idle += sum(memory.values[self.config.n_head * self.config.k:].numel() for memory in memories)
        return dict(total=total, memory=sum(p.numel() for memory in memories for p in memory.parameters()), active=total - idle)

    def flops_per_token(self):
        """Matrix products at full context: 2 a weight forward, 2 more where the backward pass goes through, 2 where the weight trains."""
        reached, total = self.embed.weight.requires_grad, 0
        for block in [*self.stack, self.head or self.embed]:
            trains = any(p.requires_grad for p in block.parameters())
            reached = reached or trains
            weights = sum(p.numel() for name, p in block.named_parameters() if p.ndim > 1 and not name.endswith(("values", "core")))
            attention = self.config.block_size * self.config.n_embd * hasattr(block, "attn")
            total += (2 + 2 * reached + 2 * trains) * weights + (4 + 8 * reached) * attention
        return total


# ================================================================ below the fold: baselines, ablations, foreign checkpoints ==============

class CachedHML(HML):
    """HML with head-specific values for decoding (Appendix G.2): V_h = V W_h, H times the space of V, read while no gradient is wanted."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("V_h", None, persistent=False)                              # (H*n*n, d_h); train() and loading drop it
        self.register_load_state_dict_pre_hook(lambda module, *rest: setattr(module, "V_h", None))

    @torch.no_grad()
    def cache_values(self):
        self.V_h = (self.values.float() @ self.W_h.float()).flatten(0, 1).to(self.values.dtype)

    def train(self, mode=True):
        self.V_h = None if mode else self.V_h
        return super().train(mode)

    def forward(self, a):
        if self.V_h is None or torch.is_grad_enabled():
            return super().forward(a)
        B, T, d = a.shape
        slots, alpha = self.search(a.reshape(B * T, len(self.W_h), -1))                  # (B*T, H, k)
        slots = slots + torch.arange(len(self.W_h), device=a.device)[:, None] * len(self.values)
        return gather_sum(self.V_h, slots.flatten(0, 1), alpha.flatten(0, 1)).view(B, T, d)


def cache_values(self):
    """For inference: build every HML's value cache. Who changes weights by hand after it calls it again, or train()."""
    for module in self.modules():
        if isinstance(module, CachedHML):
            module.cache_values()


# ---------------------------------------------------------------- other memories (Table 3) and other queries (Table 11)

class QueryBlock(MemoryBlock):
    """Table 11's structures: the output projection, the internal residual and a norm on the way from the heads to the queries."""

    def __init__(self, config, layer, memory):
        super().__init__(config, layer, memory, output=config.out_proj)
        self.n_head, self.internal_residual, self.norm = config.n_head, config.internal_residual, config.query_norm
        if self.norm:
            self.query_norm = nn.BatchNorm1d(config.n_embd) if self.norm == "batch" else nn.LayerNorm(config.head_dim)

    def forward(self, x, rotary, cache):
        a = self.attn(self.attn_norm(x), rotary, cache)                                  # (B, T, H*d_h)
        a = x + a if self.internal_residual else a
        if self.norm == "batch":
            a = self.query_norm(a.flatten(0, 1)).view_as(a)
        elif self.norm == "layer":
            a = self.query_norm(a.unflatten(-1, (self.n_head, -1))).flatten(2)
        return x + self.memory(a)


class WholeBlock(MemoryBlock):
    """x + Mem(a(x)) with a(x) = x + Attn(LN(x)), un-normalised (eq. 1): for memories that project their own queries."""

    def forward(self, x, rotary, cache):
        return x + self.memory(x + self.attn(self.attn_norm(x), rotary, cache))


class PKM(nn.Module):
    """Product-key memory: queries a W_q, keys for each head, one table of full-width values; the heads' results are summed."""

    def __init__(self, config, search=ProductKeys):
        super().__init__()
        self.W_q = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.search = search(config)
        self.values = nn.Parameter(torch.empty(config.n ** 2, config.n_embd))

    def read(self, slots, alpha):                                                        # (P, H*k) both -> (P, d)
        return gather_sum(self.values, slots, alpha)

    def forward(self, a):
        q = self.W_q(a).view(a.size(0) * a.size(1), len(self.search.keys), -1)           # (P, H, d_h)
        return self.read(*(t.flatten(1) for t in self.search(q))).view_as(a)


class LinearKeys(nn.Module):
    """Every slot has a key of its own: each head scores all n*n (Appendix C)."""

    def __init__(self, config):
        super().__init__()
        self.k, self.slots = config.k, config.n ** 2
        self.keys = nn.Parameter(torch.empty(config.n_head, config.n ** 2, config.head_dim))

    def forward(self, q):
        sigma, slots = torch.einsum("phd,hnd->phn", q, self.keys).topk(self.k)           # eq. 8
        return slots, sigma.softmax(-1).to(q.dtype)


class TuckerKeys(nn.Module):
    """UltraMem's search: two scores (Tucker ranks) a row and a column, mixed by a core C of each head: s_i C s_j. Twice the sub-keys
    a side, four times the (virtual) slots."""

    def __init__(self, config):
        super().__init__()
        self.k, self.slots = config.k, 4 * config.n ** 2
        self.keys = nn.Parameter(torch.empty(config.n_head, 2, 2, 2 * config.n, config.head_dim // 2))
        self.core = nn.Parameter(torch.empty(config.n_head, 2, 2))

    def forward(self, q):
        s = torch.einsum("phxd,hxynd->xphyn", q.unflatten(-1, (2, -1)), self.keys)       # (2, P, H, 2, 2n)
        u, _, vh = torch.linalg.svd(self.core.detach().float())
        sign = u[:, :, 0].sum(1, keepdim=True).sign()                                    # of (u, v) and (-u, -v) the one that points up
        sigma, slots = tucker_topk(*s.contiguous(), sign * u[:, :, 0], sign * vh[:, 0], self.core[None], min(self.k, s.size(-1)), self.k)
        return slots, sigma[..., 0].softmax(-1).to(q.dtype)


class UltraMem(PKM):
    """UltraMem: implicit value expansion. 4 n*n virtual slots share n*n rows of width d/4; the slot's number says which of four
    matrices takes its row to width d. The paper prints only +1.29B at 8B, which these shapes give; both sizes, the number of sub-keys,
    softmax as in the other memories and no auxiliary loss are our choice."""

    def __init__(self, config):
        super().__init__(config, TuckerKeys)
        self.values = nn.Parameter(torch.empty(config.n ** 2, max(1, config.n_embd // 4)))
        self.W_v = nn.Parameter(torch.empty(4, self.values.size(1), config.n_embd))

    def read(self, slots, alpha):
        N = len(self.values)
        rows = gather_sum(self.values, slots % N, alpha, blocks=slots // N, n_blocks=4)  # (P, 4, d/4)
        return rows.flatten(1) @ self.W_v.flatten(0, 1)


def hml_block(config, layer):
    switched = config.query_norm or config.internal_residual or config.out_proj
    return (QueryBlock if switched else MemoryBlock)(config, layer, CachedHML(config))


MEMORIES |= {
    "hml": hml_block,
    "linear": lambda config, layer: WholeBlock(config, layer, PKM(config, LinearKeys), output=True),
    "pkm": lambda config, layer: WholeBlock(config, layer, PKM(config), output=True),
    "ultramem": lambda config, layer: WholeBlock(config, layer, UltraMem(config), output=True),
}


# ---------------------------------------------------------------- depth up-scaling by duplicated blocks

def fill_llama_pro(new, blocks, places):
    """Copies of the blocks below; with the output projections at zero each adds nothing."""
    for block, i in zip(new, places):
        copy_shared(block, blocks[i - 1])
        silence(block)


def silence(block):
    block.attn.W_O.weight.zero_()
    block.mlp.down.weight.zero_()


def fill_solar(new, blocks, places):
    """Blocks 0 .. c-1, then L-c .. L-1, c = (L + D)/2: the overlap is there twice. Plain copies."""
    for j, block in enumerate(new):
        copy_shared(block, blocks[len(blocks) - places[0] + j])


def fill_avg_deus(new, blocks, places):
    """Every tensor the mean of the two neighbours'."""
    for block, i in zip(new, places):
        above = blocks[i].state_dict()
        block.load_state_dict({name: (t + above[name]) / 2 for name, t in blocks[i - 1].state_dict().items()})


def align(A, B):
    """The order of A's rows that brings them nearest to B's, row by row in Euclidean distance: (rows,) int64."""
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError:
        raise ImportError("upscale=opt_deus needs scipy: pip install scipy") from None
    return torch.from_numpy(linear_sum_assignment(torch.cdist(B.float(), A.float()).cpu().numpy())[1]).to(A.device)


def fill_opt_deus(new, blocks, places):
    """The mean of the two neighbours after the neurons of the lower, A, are put in the order of the upper's, B. Exact assignment; the
    published one is Sinkhorn's. Then the output projections are set to zero, so that the block adds nothing."""
    for block, i in zip(new, places):
        A, B = dict(blocks[i - 1].state_dict()), blocks[i].state_dict()
        for name in ("attn.W_Q", "attn.W_K", "attn.W_V", "attn.W_O"):
            order = align(A[f"{name}.weight"], B[f"{name}.weight"])
            A |= {key: A[key][order] for key in (f"{name}.weight", f"{name}.bias") if key in A}
        A["mlp_norm.weight"] = (A["mlp_norm.weight"][order] + A["mlp_norm.weight"]) / 2  # (P_o + I)/2
        for name in ("mlp.gate.weight", "mlp.up.weight"):
            A[name] = A[name][:, order]                                                  # its input is W_O's output, in B's order
            A[name] = A[name][align(A[name], B[name])]
        block.load_state_dict({name: (A[name] + B[name]) / 2 for name in B})
        silence(block)


def fill_lesa(new, blocks, places):
    """Each weight from its neighbours' by a network trained on the base: for each kind [W_0|...|W_(L-1)] = U S [V_0|...|V_(L-1)], and an
    MLP learns row by row to tell V_i from V_(i-1) and V_(i+1). Norms are block 0's; biases, of which LESA has none, the neighbours' mean."""
    if len(blocks) < 6:
        raise ValueError(f"upscale=lesa, n_layer={len(blocks)}: LESA learns from triples of blocks and needs n_layer >= 6")
    fill_avg_deus(new, blocks, places)
    for name in ("attn.W_Q.weight", "attn.W_K.weight", "attn.W_V.weight", "attn.W_O.weight", "mlp.gate.weight", "mlp.up.weight", "mlp.down.weight"):
        W = torch.cat([block.get_parameter(name).float() for block in blocks], 1)        # (out, L*in)
        U, S, V = torch.linalg.svd(W, full_matrices=False)
        V = V.view(len(V), len(blocks), -1).transpose(0, 1)                              # (L, R, in)
        between = train_between(V)
        for block, i in zip(new, places):
            block.get_parameter(name).copy_(U * S @ between(torch.cat((V[i - 1], V[i]), 1)))
    for block in new:
        block.attn_norm.load_state_dict(blocks[0].attn_norm.state_dict())
        block.mlp_norm.load_state_dict(blocks[0].mlp_norm.state_dict())


@torch.enable_grad()
def train_between(V, epochs=10, batch=64):
    """V (L, R, in) -> a network from a row of [V_(i-1) | V_(i+1)] (2 in) to that row of V_i (in)."""
    x, y = torch.cat((V[:-2], V[2:]), 2).flatten(0, 1), V[1:-1].flatten(0, 1)             # ((L-2) R, 2 in), ((L-2) R, in)
    with torch.random.fork_rng([V.device] if V.is_cuda else []):
        net = nn.Sequential(nn.Linear(x.size(1), 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, y.size(1))).to(V.device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        for rows in (rows for _ in range(epochs) for rows in torch.randperm(len(x)).to(V.device).split(batch)):
            guess = net(x[rows])
            loss = 0.9995 * F.mse_loss(guess, y[rows]) + 0.0005 * (guess.norm() - y[rows].norm()) ** 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return net.requires_grad_(False)


def solar_place(L, D):
    if (L + D) % 2:
        raise ValueError(f"upscale=solar, n_layer={L}, inserted={D}: their sum must be even, since both halves have (L + D)/2 blocks")
    return [(L + D) // 2] * D


def gaps(L, D):
    if D >= L:
        raise ValueError(f"n_layer={L}, inserted={D}: a block in each of the last gaps between blocks needs inserted < n_layer")
    return list(range(L - D, L))


PLACEMENTS |= {
    "llama-pro": lambda L, D: [(j + 1) * L // D for j in range(D)],                      # after the anchors of "distributed"
    "solar": solar_place,
    "gaps": gaps,                                                                        # in the final stack the top-heavy list
}
METHODS |= {
    "llama_pro": (("llama-pro",), fill_llama_pro, True),
    "solar": (("solar",), fill_solar, False),
    "avg_deus": (("gaps",), fill_avg_deus, True),
    "opt_deus": (("gaps",), fill_opt_deus, True),
    "lesa": (("gaps",), fill_lesa, True),
}


# ---------------------------------------------------------------- foreign checkpoints

FOREIGN = DENSE                   # fields of a foreign model's Config that its config.json does not decide


def config_from_hf(path):
    """config.json of a Hugging Face Llama or Qwen2 folder -> the fields of Config. ValueError names what this file does not compute."""
    try:
        c = dict(json.loads((path / "config.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} holds no readable config.json of a Hugging Face model ({error}), nor a ckpt.pt") from None
    rope = {"rope_theta": c.get("rope_theta", 10000.0), **(c.get("rope_scaling") or {}), **(c.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    refused = [("model_type", c.get("model_type"), ("llama", "qwen2")), ("hidden_act", c.get("hidden_act", "silu"), ("silu",)),
               ("rope type", kind, ("default", "llama3")), ("partial_rotary_factor", rope.get("partial_rotary_factor", 1), (1,)),
               ("attention_bias", c.get("attention_bias", False), (False,)), ("mlp_bias", c.get("mlp_bias", False), (False,)),
               ("use_sliding_window", c.get("use_sliding_window", False), (False,)), ("quantization_config", c.get("quantization_config"), (None,))]
    for name, value, supported in refused:
        if value not in supported:
            raise ValueError(f"{path}/config.json: {name}={value!r} is not supported, only {' and '.join(map(repr, supported))}")
    try:
        names = dict(n_layer="num_hidden_layers", n_head="num_attention_heads", n_embd="hidden_size", n_inner="intermediate_size")
        fields = {ours: c[theirs] for ours, theirs in names.items()} | {"vocab_size": c["vocab_size"]}
        if kind == "llama3":
            keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            fields["rope_scaling"] = ":".join(f"{rope[key]:.12g}" for key in keys)
    except KeyError as error:
        raise ValueError(f"{path}/config.json has no {error}") from None
    d_h = c.get("head_dim") or fields["n_embd"] // fields["n_head"]
    if d_h * fields["n_head"] != fields["n_embd"] or d_h % 2:
        raise ValueError(f"{path}/config.json: head_dim={d_h} with hidden_size={fields['n_embd']} and {fields['n_head']} heads is not supported: "
                         "it must be even, and hidden_size its product with the heads")
    return dict(fields, n_kv_head=c.get("num_key_value_heads") or fields["n_head"], tied=c.get("tie_word_embeddings", False),
                qkv_bias=c["model_type"] == "qwen2", norm_eps=c.get("rms_norm_eps", 1e-6), rope_base=float(rope["rope_theta"]),
                block_size=min(2048, c.get("max_position_embeddings", 2048)))


def from_pretrained(path, dtype=torch.float32):
    """A Hugging Face Llama or Qwen2.5 folder (config.json and safetensors, in one file or sharded) -> Model, nothing added to it."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ImportError("from_pretrained needs safetensors: pip install safetensors") from None
    path = Path(path)
    config = Config(**config_from_hf(path), **FOREIGN)
    with torch.device("meta"):
        model = Model(config).to(dtype)
    model.to_empty(device="cpu")
    ours = {"embed_tokens.weight": "embed.weight", "norm.weight": "norm.weight", "lm_head.weight": "" if config.tied else "head.weight"}
    parts = {"input_layernorm": "attn_norm", "self_attn.q_proj": "attn.W_Q", "self_attn.k_proj": "attn.W_K", "self_attn.v_proj": "attn.W_V",
             "self_attn.o_proj": "attn.W_O", "post_attention_layernorm": "mlp_norm", "mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up",
             "mlp.down_proj": "mlp.down"}
    for i in range(config.n_layer):
        ours |= {f"layers.{i}.{theirs}.{end}": f"blocks.{i}.{name}.{end}" for theirs, name in parts.items() for end in ("weight", "bias")}
    index, missing = path / "model.safetensors.index.json", dict(model.named_parameters())
    try:
        files = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else ["model.safetensors"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} cannot be read: {error!r}") from None
    for file in files:
        try:
            with safe_open(path / file, "pt") as tensors:
                for name in tensors.keys():
                    own, tensor = ours.get(name.removeprefix("model.")), tensors.get_tensor(name)
                    if own == "" or name.endswith("rotary_emb.inv_freq"):
                        continue                               # a tied head that was written all the same; frequencies, which are computed
                    if own not in missing:
                        raise ValueError(f"{path / file}: {name} is there twice or has no place in the model of config.json")
                    if missing[own].shape != tensor.shape:
                        raise ValueError(f"{path / file}: {name} is {tuple(tensor.shape)}, config.json asks for {tuple(missing[own].shape)}")
                    missing.pop(own).data.copy_(tensor)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path / file} cannot be read, it is missing, cut short or no safetensors file: {error}") from None
    if missing:
        theirs = {own: name for name, own in ours.items()}
        raise ValueError(f"{path}: {len(missing)} tensors are missing, the first is {theirs[next(iter(missing))]}")
    return model


def start(path, ckpt, fields):
    """train.py's --init_from=PATH, with or without --upscale: ckpt is PATH's checkpoint, or None for a Hugging Face folder; fields are
    those of Config that were given -> {"model_config", "model"} to train from."""
    try:
        model = Model(Config(**ckpt["model_config"])) if ckpt else from_pretrained(path)
    except TypeError as error:
        raise ValueError(f"{path} is a checkpoint of another model: {error}") from None
    if ckpt:
        model.load_state_dict(ckpt["model"])
    have, free = vars(model.config), {"phase", "block_size"}
    grows = have["upscale"] == "base" and fields.get("upscale", "base") != "base"
    if grows:
        free |= {"upscale", "inserted", "placement", "memory", "n", "k", "r", "query_norm", "internal_residual", "out_proj"}
    for key in fields.keys() - free:
        if fields[key] not in (-1, "", have[key]):
            raise ValueError(f"{key}={fields[key]}: {path} has {key}={have[key]}; leave {key} out")
    chosen = {key: fields[key] for key in free & fields.keys()}
    if not grows:
        return {"model_config": dict(vars(Config(**{**have, **chosen}))), "model": model.state_dict()}
    grown, idx = upscale(model, chosen.pop("upscale"), **chosen), torch.arange(32)[None] % have["vocab_size"]
    with torch.no_grad():
        difference = (grown.eval()(idx)[0] - model.eval()(idx)[0]).abs().max()
    if os.environ.get("RANK", "0") == "0":
        print(f"{fields['upscale']}: {grown.config.inserted} blocks into {path}; at step 0 logits differ from its own by {difference:.3g} at most")
    return {"model_config": dict(vars(grown.config)), "model": grown.state_dict()}


@torch.no_grad()
def inspect(self, idx):
    """Slot use by one text idx (1, T): {"use": (memory blocks, H, slots)}, each slot's share of its head's retrieval weights."""
    use, hooks = [], []

    def keep(search, inputs, found):
        slots, alpha = (t.transpose(0, 1).flatten(1) for t in found)                 # (H, P*k)
        use.append(torch.zeros(len(slots), search.slots, device=idx.device).scatter_add_(1, slots, alpha.float() / idx.size(1)))
    try:
        hooks = [block.memory.search.register_forward_hook(keep) for block in self.inserted if hasattr(block, "memory")]
        self(idx)
    finally:
        for hook in hooks:
            hook.remove()
    return {"use": (torch.stack(use), ("layer", "head", "slot"))} if use else {}


Model.cache_values, Model.inspect, Model.from_pretrained = cache_values, inspect, staticmethod(from_pretrained)
