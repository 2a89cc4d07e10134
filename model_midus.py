"""
MIDUS-HML, memory-infused depth up-scaling (Kim et al. 2025, "MIDUS: Memory-Infused Depth
Up-Scaling"; equations as numbered in the workshop version of 2026).

The idea: a trained transformer grows deeper by D new blocks, and only those are trained on
(continual pre-training, CPT). Others insert copies of whole blocks. MIDUS inserts *memory blocks*:
attention copied from the block that follows, and in place of the FFN a head-wise memory layer
(HML), where every head's output is the query to a product-key memory with keys of its own. The
heads share one table V of narrow latent values (V with a bar in the paper), and each head realises
them with its own matrix W_h (HIVE). V starts at zero: the deeper model is, to the last bit, the
base it grew from. LN is an RMS norm, as in Llama.

    a'    = Attn'(LN(x)) = [a_1 | ... | a_H]  (B, T, H, d_h)  no output projection        eq. 3
    q_h   = a_h, its halves for row and for column          without x, which eq. 1's a(x) holds
    s     = q_h[row] K_h[row]^T, q_h[col] K_h[col]^T  (n) and (n)                         eq. 13
    slots = of every head the k pairs (i, j) with the largest s_i + s_j               eqs. 14, 15
    alpha = softmax over these k                                                   after eq. 15
    M_h   = (sum alpha_ij V[i n + j]) W_h     (B, T, d_h)     V (n*n, r), W_h (r, d_h)    eq. 4
    M(x)  = x + [M_1 | ... | M_H]             (B, T, d)                                   eq. 5

    a base block                           a memory block, before it
    x -+-> LN -> attention -> W_O -(+)-> a x -+-> LN -> attention -+- a_1 -> keys 1 -> V -> W_1 -+
       +----------------------------+         |      (no W_O)      +- a_2 -> keys 2 -> V -> W_2 -+
    a -+-> LN -> SwiGLU -----------(+)->      |                    +- ...    one V for all     (+)->
       +----------------------------+         +-------------------------------------------------+

`upscale(base, method)` grows a base, one of train.py's (--dense=True) or a Hugging Face Llama. With
phase="cpt" only the inserted blocks train (with upscale=solar or base everything does), with "sft"
or "" everything. Below the fold is what to compare with: SOLAR, Llama Pro, Avg-DeUS, OpT-DeUS and
LESA, which duplicate blocks; linear, product-key and UltraMem memories; Table 11's structures.

    python train.py --model=midus --depth=4 --dense=True   # a base, in out/midus-d4-dense; grow it:
    python train.py --model=midus --upscale=midus --phase=cpt --init_from=out/midus-d4-dense

(The second reads the base's batches again. With --skip_steps=N, the base's steps, it reads on.)
"""
import math
import re
import zlib
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from kernels import (attend, gather_sum, linear_cross_entropy, product_key_topk, rms_norm,
                     tucker_topk)


@dataclass
class Config:
    vocab_size: int = 128256      # tokens
    block_size: int = 2048        # tokens of context in training
    n_layer: int = 16             # L, blocks of the base; the paper has 16 (1B) and 32 (8B)
    n_head: int = 32              # H, query heads
    n_kv_head: int = -1           # H_kv, key/value heads; -1: n_head (fewer: grouped queries)
    n_embd: int = 2048            # d, width
    n_inner: int = -1             # width of the MLP's hidden layer; -1: 4*n_embd
    tied: bool = True             # one matrix for the embedding and the head
    qkv_bias: bool = False        # biases of queries, keys and values (Qwen2.5)
    norm_eps: float = 1e-5        # of RMSNorm
    rope_base: float = 500000.0   # of the rotary embedding
    rope_scaling: str = ""        # Llama 3's factor:low:high:context, 32:1:4:8192 for the 1B model
    upscale: str = "midus"        # midus | solar | llama_pro | avg_deus | opt_deus | lesa | base
    inserted: int = -1            # D, inserted blocks; -1: L/2, the paper's 8 and 16; base has none
    placement: str = "distributed"    # distributed | top-heavy | bottom-heavy: the memory blocks
    phase: str = ""               # cpt: the inserted blocks train (solar, base: all); sft, "": all
    memory: str = "hml"           # hml | linear | pkm | ultramem: of the memory blocks
    n_keys: int = 64              # n, row sub-keys, and column sub-keys, of a head: n*n slots
    top_k: int = 4                # k, slots that a head reads for a token
    r: int = -1                   # width of the latent values; -1: d_h
    value_lr: float = 1.0         # rate of the values, in units of the other memory tensors'; ours
    memory_schedule: bool = False     # do the memories' rates follow the schedule? the paper's stay
    queries: str = ""             # "": the paper's; Table 11's batch_norm, layer_norm, residual or
                                  # out_proj

    def check(self, ok, fields, rule):
        """Raise ValueError that names the fields and the rule they break."""
        if not ok:
            values = ", ".join(f"{name}={getattr(self, name)!r}" for name in fields.split())
            raise ValueError(f"{values}: {rule}")

    def __post_init__(self):
        if self.n_kv_head == -1:
            self.n_kv_head = self.n_head
        if self.n_inner == -1:
            self.n_inner = 4 * self.n_embd
        sizes = "vocab_size block_size n_layer n_head n_kv_head n_embd n_inner n_keys"
        for name in sizes.split():
            self.check(getattr(self, name) > 0, name, "must be at least 1")
        if self.r == -1:
            self.r = self.head_dim
        self.check(self.r > 0, "r", "must be at least 1")
        self.check(self.rope_base > 0, "rope_base", "must be positive")
        self.check(self.norm_eps >= 0, "norm_eps", "must not be negative")
        if self.inserted == -1:
            self.inserted = 0 if self.upscale == "base" else max(1, self.n_layer // 2)
        if self.upscale not in ("midus", "base"):
            self.choose("upscale", ["midus", "base", *METHODS])
        if self.memory != "hml":
            self.choose("memory", ["hml", *MEMORIES])
        self.choose("placement", ["distributed", "top-heavy", "bottom-heavy"])
        self.choose("phase", ["", "cpt", "sft"])
        self.choose("queries", ["", "batch_norm", "layer_norm", "residual", "out_proj"])
        self.check(self.n_embd % (2 * self.n_head) == 0, "n_embd n_head",
                   "n_embd must be a multiple of 2*n_head")
        self.check(self.n_head % self.n_kv_head == 0, "n_head n_kv_head",
                   "n_head must be a multiple of n_kv_head")
        self.check(1 <= self.top_k <= self.n_keys ** 2, "top_k n_keys", "needs top_k <= n_keys^2")
        self.check(self.value_lr > 0, "value_lr", "must be more than 0")
        if self.rope_scaling:
            four = re.fullmatch(r"[0-9]*[.]?[0-9]+(:[0-9]*[.]?[0-9]+){3}", self.rope_scaling)
            self.check(four, "rope_scaling", "give factor:low:high:context, like 32:1:4:8192")
            factor, low, high, context = map(float, self.rope_scaling.split(":"))
            self.check(low < high, "rope_scaling", "factor:low:high:context needs low < high")
            self.check(min(factor, context) > 0, "rope_scaling", "factor, context must be positive")
        if self.upscale == "base":
            self.check(self.inserted == 0, "upscale inserted", "a base has no inserted blocks")
        else:
            self.check(1 <= self.inserted <= self.n_layer, "n_layer inserted",
                       "needs 1 to n_layer inserted blocks")
        own = (self.memory, self.placement, self.queries) == ("hml", "distributed", "")
        self.check(self.upscale == "midus" or own, "upscale memory placement queries",
                   "these kinds of memory blocks need upscale=midus")
        self.check(self.upscale in ("midus", "base") or self.value_lr == 1, "upscale value_lr",
                   "only memory blocks, those of upscale=midus, have values")
        self.check(self.memory == "hml" or not self.queries, "memory queries",
                   "Table 11's queries need memory=hml")

    def choose(self, name, choices):
        self.check(getattr(self, name) in choices, name, f"choose one of {choices}")

    @classmethod
    def from_depth(cls, depth, **overrides):
        """The depth dial: a base of `depth` blocks, width 64*depth in heads of 64 channels, two
        query heads to a key/value head where that is possible."""
        fields = dict(n_layer=depth, n_embd=64 * depth, n_head=depth)
        if depth % 2 == 0:
            fields["n_kv_head"] = depth // 2
        return cls(**{**fields, **overrides})

    @property
    def head_dim(self):
        return self.n_embd // self.n_head


PRESETS = {                       # the paper's two models, grown with HML; --dense=True: the bases
    "llama3.2_1b": dict(n_layer=16, n_head=32, n_kv_head=8, n_embd=2048, n_inner=8192,
                        rope_scaling="32:1:4:8192"),
    "llama3.1_8b": dict(n_layer=32, n_head=32, n_kv_head=8, n_embd=4096, n_inner=14336,
                        rope_scaling="8:1:4:8192", tied=False),
}
DENSE = dict(upscale="base", placement="distributed", memory="hml", queries="", inserted=0)
# Betas, clipping and the rate are ours, for short runs. The paper's rate is 1e-4 in CPT (8B on
# FineWeb-Edu: 5e-5), 1e-5 in SFT (1B), on 64 x 2,048 tokens a step.
RECIPE = {
    "adamw": dict(learning_rate=2e-3, weight_decay=1e-6, beta1=0.9, beta2=0.999, grad_clip=1.0,
                  schedule="cosine", warmup=0.1),
}


# ---------------------------------------------------------------- the backbone: Llama

class RMSNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x):
        return rms_norm(x, self.weight, self.eps)


def rotary_frequencies(config, device):
    """theta (d_h/2,): base^(-2i/d_h). Llama 3 divides by `factor` the frequencies that turn less
    than `low` times in its old context, and leaves those alone that turn more than `high` times."""
    exponent = -torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32)
    theta = config.rope_base ** (exponent / config.head_dim)
    if not config.rope_scaling:
        return theta
    factor, low, high, context = map(float, config.rope_scaling.split(":"))
    turns = context * theta / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * theta + (1 - keep) * theta / factor


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
    """Grouped queries; without the output projection the heads stay apart (memory blocks)."""

    def __init__(self, config, layer, output=True):
        super().__init__()
        d = config.n_embd
        d_kv = config.n_kv_head * config.head_dim
        bias = config.qkv_bias
        self.layer = layer
        self.n_head = config.n_head
        self.n_kv_head = config.n_kv_head
        self.W_Q = nn.Linear(d, d, bias=bias)
        self.W_K = nn.Linear(d, d_kv, bias=bias)
        self.W_V = nn.Linear(d, d_kv, bias=bias)
        self.W_O = nn.Linear(d, d, bias=False) if output else None

    def forward(self, x, rotary, cache=None):
        B, T, d = x.shape
        q = self.W_Q(x).view(B, T, self.n_head, -1)            # (B, T, H, d_h)
        k = self.W_K(x).view(B, T, self.n_kv_head, -1)         # (B, T, H_kv, d_h)
        v = self.W_V(x).view(B, T, self.n_kv_head, -1)         # (B, T, H_kv, d_h)
        q = rotate(q, rotary)
        k = rotate(k, rotary)
        if cache is not None:
            k = cache.append((self.layer, "k"), k)
            v = cache.append((self.layer, "v"), v)
        y = attend(q, k, v)                                    # (B, T, H*d_h), the heads in a row
        return y if self.W_O is None else self.W_O(y)


class MLP(nn.Module):
    """SwiGLU."""

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


# ================================================================ the idea

class HeadKeys(nn.Module):
    """Each head's n*n keys: the pairs of its n row and n column sub-keys (Appendix D.3)."""

    def __init__(self, config):
        super().__init__()
        self.top_k = config.top_k
        self.n_keys = config.n_keys
        self.n_slots = config.n_keys ** 2
        self.keys = nn.Parameter(
            torch.empty(config.n_head, 2, config.n_keys, config.head_dim // 2))

    def forward(self, q):
        """q (P, H, d_h), a query for every head -> slots (P, H, k), their weights (P, H, k)."""
        P, H, d_h = q.shape
        halves = q.view(P, H, 2, d_h // 2)                                 # for rows, for columns
        s = torch.einsum("phxd,hxnd->xphn", halves, self.keys)             # (2, P, H, n)    eq. 13
        s_row, s_col = s.flatten(1, 2)                                     # (P*H, n) each
        sigma, i, j = product_key_topk(s_row, s_col, self.top_k)           # (P*H, k)    eqs. 14, 15
        alpha = sigma.softmax(-1).to(q.dtype)                              #           after eq. 15
        slots = i * self.n_keys + j                                        # pi(i, j), from 0
        return slots.view(P, H, -1), alpha.view(P, H, -1)


class HML(nn.Module):
    """Head-wise memory layer: each head has keys of its own; one latent table V serves all, and
    W_h makes the head's values of it (section 2.2)."""

    def __init__(self, config):
        super().__init__()
        self.retrieve = HeadKeys(config)
        self.values = nn.Parameter(torch.empty(config.n_keys ** 2, config.r))   # V: 0 at first
        self.W_h = nn.Parameter(torch.empty(config.n_head, config.r, config.head_dim))

    def forward(self, a, V_h=None):
        """a' (B, T, H*d_h), the heads' outputs, which are the queries -> HML(a') (B, T, H*d_h).
        V_h: what head_values() made, for decoding: W_h is in its rows already."""
        B, T, d = a.shape
        H, r, d_h = self.W_h.shape
        slots, alpha = self.retrieve(a.reshape(B * T, H, d_h))             # (B*T, H, k)
        alpha = alpha.flatten(0, 1)
        if V_h is not None:
            first = torch.arange(H, device=a.device) * len(self.values)    # row of each head
            slots = slots + first[:, None]
            return gather_sum(V_h, slots.flatten(0, 1), alpha).view(B, T, d)
        latent = gather_sum(self.values, slots.flatten(0, 1), alpha)       # (B*T*H, r)  eq. 4, left
        latent = latent.view(B * T, H, r)
        y = torch.einsum("phr,hrd->phd", latent, self.W_h)                 #            eq. 4, right
        return y.reshape(B, T, d)                                          #            eq. 5

    @torch.no_grad()
    def head_values(self):
        """V W_h of all heads, one below the other, (H*n*n, d_h): the paper's V_h^cache (Appendix
        G.2), whose rows decoding reads in place of V's. It is H*d_h/r times as large as V."""
        with torch.autocast(self.values.device.type, enabled=False):
            V_h = self.values.float() @ self.W_h.float()                   # (H, n*n, d_h)
        return V_h.flatten(0, 1).to(self.values.dtype)


class MemoryBlock(nn.Module):
    """M(x) = x + HML(a'(x)) (eq. 5): no internal residual, so that queries know the token itself
    only through attention; no projection of outputs or queries."""

    def __init__(self, config, layer):
        super().__init__()
        self.layer = layer
        self.attn_norm = RMSNorm(config.n_embd, config.norm_eps)
        self.attn = Attention(config, layer, output=False)
        self.memory = HML(config)

    def queries(self, x, rotary, cache):
        return self.attn(self.attn_norm(x), rotary, cache)                 # a'          eq. 3

    def forward(self, x, rotary, cache):
        V_h = None if cache is None else cache.store.get((self.layer, "V_h"))
        return x + self.memory(self.queries(x, rotary, cache), V_h)


def make_block(config, layer):
    """A block to be inserted. Above the fold: the paper's own; the others are below."""
    if config.upscale != "midus":
        return Block(config, layer)
    if config.memory != "hml":
        return FullBlock(config, layer)
    if config.queries:
        return QueryBlock(config, layer)
    return MemoryBlock(config, layer)


def places(config):
    """The base block that each inserted one stands before, from bottom to top (Appendix G.4)."""
    L, D = config.n_layer, config.inserted
    if config.upscale not in ("midus", "base"):
        find_places, fill = METHODS[config.upscale]
        return find_places(L, D)
    if config.placement == "top-heavy":
        return list(range(L - D, L))
    if config.placement == "bottom-heavy":
        return list(range(D))
    return [(j + 1) * L // D - 1 for j in range(D)]            # the last block of each of D groups


def layout(config):
    """The names of the blocks from bottom to top: blocks.0, inserted.0, blocks.1, ..."""
    names = [f"blocks.{i}" for i in range(config.n_layer)]
    for j, place in reversed(list(enumerate(places(config)))):
        names.insert(place, f"inserted.{j}")                   # from the top: places stay true
    return names


@torch.no_grad()
def upscale(base, method="midus", **fields):
    """A deeper model from `base`, a Model with upscale="base": its weights, and new blocks that the
    method fills. fields: others of Config, such as inserted (D), placement, memory, phase. After
    midus, llama_pro and both opt_deus it computes what the base computes, bit for bit."""
    if base.config.upscale != "base":
        raise ValueError(f"upscale={method!r}: the model to start from is already deeper "
                         f"(upscale={base.config.upscale!r}); give its base")
    grown = dict(upscale=method, inserted=-1, phase="")        # a base's own phase ends with it
    config = Config(**{**vars(base.config), **grown, **fields})
    model = Model(config).to(base.embed.weight)                # its device and dtype
    model.init_weights()
    model.load_state_dict({**model.state_dict(), **base.state_dict()})
    if method == "midus":
        for block, i in zip(model.inserted, places(config)):
            # The attention of the block that follows (D.2) and, our choice, the norm before it.
            # strict=False: a memory block has no MLP, and most have no W_O.
            source = model.blocks[i].state_dict()
            block.load_state_dict(source, strict=False)
    elif method != "base":
        find_places, fill = METHODS[method]
        fill(model.inserted, model.blocks, places(config))
    return model


# ================================================================ the model

def own_generator(name, p):
    """A generator for tensor p alone, seeded by torch's seed and p's name: a tensor that two models
    both have, by name and shape, starts with equal values."""
    seed = torch.initial_seed() % 2 ** 31 + zlib.crc32(name.encode())
    return torch.Generator(p.device).manual_seed(seed)


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        order = layout(config)
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(
            Block(config, order.index(f"blocks.{i}")) for i in range(config.n_layer))
        self.inserted = nn.ModuleList(
            make_block(config, order.index(f"inserted.{j}")) for j in range(config.inserted))
        # Two lists, so that a base's tensors keep their names; this is the order of computing.
        self.stack = [self.get_submodule(name) for name in order]          # bottom to top
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        self.head = None                                                   # the embedding is it
        if not config.tied:
            self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.phase == "cpt" and config.upscale not in ("base", "solar"):
            # Autograd then keeps nothing of what is below the first inserted block.
            for name, p in self.named_parameters():
                p.requires_grad_(name.startswith("inserted."))

    @torch.no_grad()
    def init_weights(self):
        """Initial values, and a batch norm's first statistics.

            values                    0, so that a memory block adds nothing       Appendix D.2
            sub-keys                  uniform within 1/sqrt(their width)           ours from here
            UltraMem's cores          uniform in [0, 1)
            embedding, head           N(0, 0.02^2); and W_q of memories below the fold
            W_h                       N(0, 1/r)
            other matrices            N(0, 1/fan-in)
        """
        for name, p in self.named_parameters():
            generator = own_generator(name, p)
            if name.endswith("norm.weight"):
                p.fill_(1)
            elif name.endswith(("bias", "values")):
                p.zero_()
            elif name.endswith("keys"):
                bound = p.size(-1) ** -0.5
                p.uniform_(-bound, bound, generator=generator)
            elif name.endswith("core"):
                p.uniform_(0, 1, generator=generator)
            elif name.endswith(("embed.weight", "head.weight", "W_q.weight")):
                p.normal_(0, 0.02, generator=generator)
            else:
                p.normal_(0, p.size(1) ** -0.5, generator=generator)       # W_h (H, r, d_h) too
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.reset_running_stats()

    def forward(self, idx, targets=None, cache=None):
        """idx (B, T) int64. With targets (B, T), -1 where there is no loss: (None, mean
        cross-entropy in nats). Without: (logits (B, T, vocab) fp32, None), only the last position's
        when a cache from new_cache() is given."""
        start = 0 if cache is None else cache.pos
        theta = rotary_frequencies(self.config, idx.device)
        rotary = rotary_tables(theta, start, idx.size(1))
        x = self.embed(idx)                                    # (B, T, d)
        for block in self.stack:
            x = block(x, rotary, cache)
        x = self.norm(x)
        if targets is not None:
            return None, linear_cross_entropy(x, (self.head or self.embed).weight, targets)
        if cache is not None:
            cache.pos += idx.size(1)
            x = x[:, -1:]
        return self.logits(x), None

    def logits(self, x):
        return F.linear(x, (self.head or self.embed).weight).float()

    def new_cache(self, batch_size, max_len):
        """For max_len tokens of decoding; the values of every head are made here (G.2)."""
        cache = Cache(max_len)
        for block in self.inserted:
            if isinstance(block, MemoryBlock):
                cache.store[block.layer, "V_h"] = block.memory.head_values()
        return cache

    def memories(self):
        """Those of the inserted blocks; duplicated blocks have none."""
        if self.config.upscale != "midus":
            return []
        return [block.memory for block in self.inserted]

    def param_groups(self, optimizer, learning_rate, weight_decay):
        """What trains: values, other tensors of the memories, matrices, vectors.

        The memories have no decay and, unless memory_schedule, a constant rate. (Appendix E.2 says
        so of HML's keys and values; W_h and all of the other memories go with them here.) The rest
        follows the schedule; no decay for norms and biases is ours.

        value_lr: Adam moves a number by about the rate in a step. In a matrix a whole row of d such
        moves adds up in each output; in the values, which start at 0, a weighted mean of k of them,
        and W_h sums r of these, each times about r^-1/2. So at equal rates a memory block changes
        the stream less than a duplicated block."""
        values = []
        memories = []
        matrices = []
        vectors = []
        for name, p in self.named_parameters():
            if not p.requires_grad:
                continue
            if name.endswith("memory.values"):
                values.append(p)
            elif ".memory." in name:
                memories.append(p)
            elif p.ndim > 1:
                matrices.append(p)
            else:
                vectors.append(p)
        common = dict(kind="adamw", lr=learning_rate)
        memory = dict(common, weight_decay=0.0, schedule=self.config.memory_schedule)
        groups = [
            dict(memory, params=values, lr=self.config.value_lr * learning_rate),
            dict(memory, params=memories),
            dict(common, params=matrices, weight_decay=weight_decay, schedule=True),
            dict(common, params=vectors, weight_decay=0.0, schedule=True),
        ]
        return [group for group in groups if group["params"]]

    def param_counts(self):
        """total, memory (of the inserted blocks), active: what one token touches, at most H*k rows
        of each value table and one of an embedding that is not the head."""
        total = sum(p.numel() for p in self.parameters())
        memory = 0
        idle = 0 if self.config.tied else self.embed.weight[1:].numel()
        for layer in self.memories():
            memory += sum(p.numel() for p in layer.parameters())
            idle += layer.values[self.config.n_head * self.config.top_k:].numel()
        return dict(total=total, memory=memory, active=total - idle)

    def flops_per_token(self):
        """Matrix products at full context: 2 a weight forward, 2 more where the backward pass goes
        through, 2 where the weight trains. Attention is not halved for causality."""
        attention = self.config.block_size * self.config.n_embd
        reached = self.embed.weight.requires_grad              # does a gradient come down here?
        total = 0
        for block in self.stack:
            trains = any(p.requires_grad for p in block.parameters())
            reached = reached or trains
            total += (4 + 8 * reached) * attention
            for name, p in block.named_parameters():
                if p.ndim > 1 and not name.endswith(("values", "core")):
                    total += (2 + 2 * reached + 2 * trains) * p.numel()
        head = (self.head or self.embed).weight
        return total + (2 + 2 * reached + 2 * head.requires_grad) * head.numel()

    @torch.no_grad()
    def inspect(self, idx):
        """Slot use by one text idx (1, T): {"use": (memory blocks, H, slots)}, each slot's share of
        its head's retrieval weights."""
        use = []

        def keep(retrieve, inputs, found):
            slots, alpha = (t.transpose(0, 1).flatten(1) for t in found)   # (H, P*k)
            share = torch.zeros(len(slots), retrieve.n_slots, device=idx.device)
            use.append(share.scatter_add_(1, slots, alpha.float() / idx.numel()))

        hooks = [memory.retrieve.register_forward_hook(keep) for memory in self.memories()]
        self(idx)
        for hook in hooks:
            hook.remove()
        if not use:
            return {}
        return {"use": (torch.stack(use), ("layer", "head", "slot"))}


# ================================================================ below the fold
# ---------------------------------------------------------------- a grown model from a checkpoint's

def start(path, ckpt, fields):
    """train.py's --init_from=PATH, with or without --upscale. ckpt: PATH's checkpoint or a Hugging
    Face folder's; fields: those of Config that were given -> {"model_config", "model"}."""
    model = Model(Config(**ckpt["model_config"]))
    model.load_state_dict(ckpt["model"])
    have = vars(model.config)
    grows = have["upscale"] == "base" and fields.get("upscale", "base") != "base"
    free = ["phase", "block_size", "value_lr", "memory_schedule"]
    of_blocks = ["inserted", "placement", "memory", "n_keys", "top_k", "r", "queries"]
    if grows:
        free += ["upscale", *of_blocks]
    if have["upscale"] == "base" and "upscale" not in fields:
        for key in ("phase", "value_lr", "memory_schedule", *of_blocks):
            value = fields.get(key, have[key])
            if value not in (-1, "", "sft", have[key]):
                raise ValueError(f"{key}={value}: {path} is a base; give --upscale=midus, or "
                                 "another method, to grow it, or --upscale=base to train it all")
    for key, value in fields.items():
        if key not in free and value not in (-1, "", have[key]):
            raise ValueError(f"{key}={value}: {path} has {key}={have[key]}; leave {key} out")
    chosen = {key: value for key, value in fields.items() if key in free}
    if grows:
        model = upscale(model, chosen.pop("upscale"), **chosen)
    config = Config(**{**vars(model.config), **chosen})
    return {"model_config": vars(config), "model": model.state_dict()}


# ------------------------------------------------------ queries (Table 11), memories (Table 3)

class QueryBlock(MemoryBlock):
    """Table 11's structures, which change the queries: the internal residual, the attention's
    output projection, a norm of each channel over batch and time or of each head's query. (K.4
    prints the residual and says that the norms are of queries; over what they run is our reading.)
    """

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.kind = config.queries
        if self.kind == "batch_norm":
            self.query_norm = nn.BatchNorm1d(config.n_embd)
        elif self.kind == "layer_norm":
            self.query_norm = nn.LayerNorm(config.head_dim)
        elif self.kind == "out_proj":
            self.attn = Attention(config, layer)

    def queries(self, x, rotary, cache):
        a = super().queries(x, rotary, cache)                  # (B, T, H*d_h)
        if self.kind == "residual":
            return x + a
        if self.kind == "batch_norm":
            return self.query_norm(a.flatten(0, 1)).view_as(a)
        if self.kind == "layer_norm":
            heads = a.unflatten(-1, (self.attn.n_head, -1))
            return self.query_norm(heads).flatten(2)
        return a


class FullBlock(nn.Module):
    """x + Mem(a(x)) with a(x) = x + Attn(LN(x)), un-normalised (eq. 1): for memories that project
    their own queries."""

    def __init__(self, config, layer):
        super().__init__()
        self.attn_norm = RMSNorm(config.n_embd, config.norm_eps)
        self.attn = Attention(config, layer)
        self.memory = MEMORIES[config.memory](config)

    def forward(self, x, rotary, cache):
        a = x + self.attn(self.attn_norm(x), rotary, cache)
        return x + self.memory(a)


class PKMMemory(nn.Module):
    """Product-key memory: queries a W_q, keys for each head, one table of full-width values; the
    heads' results are summed (ours: the paper prints one head)."""

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.W_q = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.retrieve = HeadKeys(config)
        self.values = nn.Parameter(torch.empty(config.n_keys ** 2, config.n_embd))

    def read(self, slots, alpha):
        """slots, alpha (P, H*k) -> (P, d)"""
        return gather_sum(self.values, slots, alpha)

    def forward(self, a):
        q = self.W_q(a).view(a.size(0) * a.size(1), self.n_head, -1)       # (P, H, d_h)
        slots, alpha = self.retrieve(q)                                    # (P, H, k)
        return self.read(slots.flatten(1), alpha.flatten(1)).view_as(a)


class LinearKeys(nn.Module):
    """Every slot has a key of its own: each head scores all n*n (Appendix C)."""

    def __init__(self, config):
        super().__init__()
        self.top_k = config.top_k
        self.n_slots = config.n_keys ** 2
        self.keys = nn.Parameter(torch.empty(config.n_head, self.n_slots, config.head_dim))

    def forward(self, q):
        scores = torch.einsum("phd,hnd->phn", q, self.keys)                # eq. 8
        sigma, slots = scores.topk(self.top_k)
        return slots, sigma.softmax(-1).to(q.dtype)


class LinearMemory(PKMMemory):
    def __init__(self, config):
        super().__init__(config)
        self.retrieve = LinearKeys(config)


class TuckerKeys(nn.Module):
    """UltraMem's search: two scores (Tucker ranks) a row and a column, mixed by each head's core C:
    s_i C s_j. Twice the sub-keys a side, four times the (virtual) slots."""

    def __init__(self, config):
        super().__init__()
        self.top_k = config.top_k
        self.n_slots = 4 * config.n_keys ** 2
        self.keys = nn.Parameter(
            torch.empty(config.n_head, 2, 2, 2 * config.n_keys, config.head_dim // 2))
        self.core = nn.Parameter(torch.empty(config.n_head, 2, 2))

    def forward(self, q):
        halves = q.unflatten(-1, (2, -1))                                  # (P, H, 2, d_h/2)
        s = torch.einsum("phxd,hxynd->xphyn", halves, self.keys)           # (2, P, H, 2, 2n)
        s_row, s_col = s.contiguous()
        u, _, vh = torch.linalg.svd(self.core.detach().float())
        left, right = u[:, :, 0], vh[:, 0]                                 # (H, 2) each
        # (left, right) and their negatives are both right: take the pair that points up.
        up = torch.where(left.sum(1, keepdim=True) < 0, -1.0, 1.0)
        left, right = up * left, up * right
        m_key = min(self.top_k, s_row.size(-1))                            # of 2n rows
        sigma, slots = tucker_topk(
            s_row, s_col, left, right, self.core[None], m_key, self.top_k)
        return slots, sigma[..., 0].softmax(-1).to(q.dtype)


class UltraMemMemory(PKMMemory):
    """UltraMem: implicit value expansion. 4 n*n virtual slots share n*n rows of width d/4; the
    slot's number says which of four matrices takes its row to width d. The paper prints only +1.29B
    at 8B, which these shapes give; both sizes, the number of sub-keys, softmax as in the other
    memories, one core, no norms, no shuffle (each quarter of the row keys has its matrix) and no
    auxiliary loss are our choice."""

    def __init__(self, config):
        super().__init__(config)
        width = max(1, config.n_embd // 4)
        self.retrieve = TuckerKeys(config)
        self.values = nn.Parameter(torch.empty(config.n_keys ** 2, width))
        self.W_v = nn.Parameter(torch.empty(4, width, config.n_embd))

    def read(self, slots, alpha):
        N = len(self.values)
        rows = gather_sum(self.values, slots % N, alpha, blocks=slots // N, n_blocks=4)
        return rows.flatten(1) @ self.W_v.flatten(0, 1)                    # (P, 4*d/4) -> (P, d)


# ---------------------------------------------------------------- up-scaling by duplicated blocks
# Each method has two functions: places(L, D) -> the base blocks that the new ones stand before (L:
# after the last), and fill(new, blocks, places), which gives the new blocks their weights.

def silence(block):
    """The block adds nothing."""
    block.attn.W_O.weight.zero_()
    block.mlp.down.weight.zero_()


def mean(a, b):
    return {name: (tensor + b[name]) / 2 for name, tensor in a.items()}


def place_solar(L, D):
    if (L + D) % 2:
        raise ValueError(f"upscale=solar, n_layer={L}, inserted={D}: their sum must be even, since "
                         "both halves have (L + D)/2 blocks")
    return [(L + D) // 2] * D


def fill_solar(new, blocks, places):
    """Blocks 0 .. c-1, then L-c .. L-1, c = (L + D)/2: the overlap is there twice. Plain copies."""
    c = places[0]
    for block, source in zip(new, blocks[-c:]):
        block.load_state_dict(source.state_dict())


def place_llama_pro(L, D):
    """After the blocks that "distributed" stands before: of 16, with D = 8, the 2nd, 4th, ..."""
    return [(j + 1) * L // D for j in range(D)]


def fill_llama_pro(new, blocks, places):
    """Copies of the blocks below; with the output projections at zero each adds nothing."""
    for block, i in zip(new, places):
        block.load_state_dict(blocks[i - 1].state_dict())
        silence(block)


def place_gaps(L, D):
    """One block in each of the last D gaps (LESA's code); in the final stack the top-heavy list."""
    if D >= L:
        raise ValueError(f"n_layer={L}, inserted={D}: a block in each of the last gaps between "
                         "blocks needs inserted < n_layer")
    return list(range(L - D, L))


def fill_avg_deus(new, blocks, places):
    """Every tensor the mean of the two neighbours'."""
    for block, i in zip(new, places):
        block.load_state_dict(mean(blocks[i - 1].state_dict(), blocks[i].state_dict()))


def align(A, B):
    """The order of A's rows that brings them nearest, in Euclidean distance, to B's: (rows,)."""
    from scipy.optimize import linear_sum_assignment
    distance = torch.cdist(B.float(), A.float())
    rows, columns = linear_sum_assignment(distance.cpu().numpy())
    return torch.from_numpy(columns).to(A.device)


def fill_opt_deus(new, blocks, places, share=lambda rows: 1):
    """The mean of the two neighbours after the neurons of the lower, A, are put in the order of the
    upper's, B. Then the output projections are set to zero, so that the block adds nothing. share:
    of a matrix of so many rows, what is taken of A's."""
    for block, i in zip(new, places):
        A = dict(blocks[i - 1].state_dict())
        B = blocks[i].state_dict()
        for name in ("attn.W_Q", "attn.W_K", "attn.W_V", "attn.W_O"):
            order = align(A[f"{name}.weight"], B[f"{name}.weight"])
            for key in (f"{name}.weight", f"{name}.bias"):
                if key in A:
                    A[key] = A[key][order] * share(len(order))
        norm = A["mlp_norm.weight"]                            # order is W_O's now, whose output
        P_o_norm = norm[order] * share(len(order))             # the MLP reads: (P_o + I)/2
        A["mlp_norm.weight"] = (P_o_norm + norm) / 2
        for name in ("mlp.gate.weight", "mlp.up.weight"):
            weight = A[name][:, order] * share(len(order))
            A[name] = weight[align(weight, B[name])] * share(len(weight))
        block.load_state_dict(mean(A, B))
        silence(block)


def fill_opt_deus_published(new, blocks, places):
    """The published code's (voalmciaf/OpT-DeUS): the columns of its Sinkhorn plan sum to 1/rows, so
    that almost nothing of A is left: B/2 (of the MLP's norm A/4 + B/2). Our plan is exact."""
    fill_opt_deus(new, blocks, places, share=lambda rows: 1 / rows)


def fill_lesa(new, blocks, places):
    """Each matrix from its neighbours' by a network trained on the base. For each kind of matrix
    [W_0|...|W_(L-1)] = U S [V_0|...|V_(L-1)], and an MLP learns row by row to make V_i from V_(i-1)
    and V_(i+1). Norms are block 0's; biases, of which LESA has none, the neighbours' mean.

    Ten epochs, as published, are thousands of steps at a width of 2048; in midus_table1.py's models
    they are 60 to 330, too few for the MLP to learn much."""
    L = len(blocks)
    if L < 6:
        raise ValueError(f"upscale=lesa, n_layer={L}: LESA learns from triples of blocks and needs "
                         "n_layer >= 6")
    fill_avg_deus(new, blocks, places)
    for name in [name for name, p in blocks[0].named_parameters() if p.ndim == 2]:
        W = torch.cat([block.get_parameter(name).float() for block in blocks], 1)  # (out, L*in)
        U, S, V = torch.linalg.svd(W, full_matrices=False)
        V = V.view(len(V), L, -1).transpose(0, 1)                                  # (L, R, in)
        between = train_between(V)
        for block, i in zip(new, places):
            guess = between(torch.cat((V[i - 1], V[i]), 1))                        # (R, in)
            block.get_parameter(name).copy_(U * S @ guess)
    for block in new:
        block.attn_norm.load_state_dict(blocks[0].attn_norm.state_dict())
        block.mlp_norm.load_state_dict(blocks[0].mlp_norm.state_dict())


@torch.enable_grad()
def train_between(V):
    """V (L, R, in) -> a network from a row of [V_(i-1) | V_(i+1)] (2 in) to that row of V_i."""
    x = torch.cat((V[:-2], V[2:]), 2).flatten(0, 1)                        # ((L-2) R, 2 in)
    y = V[1:-1].flatten(0, 1)                                              # ((L-2) R, in)
    with torch.random.fork_rng([V.device] if V.is_cuda else []):
        net = nn.Sequential(
            nn.Linear(x.size(1), 256), nn.ReLU(),
            nn.Linear(256, 256), nn.ReLU(),
            nn.Linear(256, y.size(1)),
        ).to(V.device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        for epoch in range(10):
            for rows in torch.randperm(len(x)).to(V.device).split(64):
                guess = net(x[rows])
                size = guess.norm() - y[rows].norm()           # of the two matrices
                loss = 0.9995 * F.mse_loss(guess, y[rows]) + 0.0005 * size ** 2
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return net.requires_grad_(False)


# Each maps a (B, T, d) to what its block adds to it. What it calls `values` starts at 0, learns at
# value_lr and is counted as read by rows, H k a token.
MEMORIES = {
    "linear": LinearMemory,
    "pkm": PKMMemory,
    "ultramem": UltraMemMemory,
}
METHODS = {
    "solar": (place_solar, fill_solar),
    "llama_pro": (place_llama_pro, fill_llama_pro),
    "avg_deus": (place_gaps, fill_avg_deus),
    "opt_deus": (place_gaps, fill_opt_deus),
    "opt_deus_published": (place_gaps, fill_opt_deus_published),
    "lesa": (place_gaps, fill_lesa),
}
