"""
LIMe, Layer-Integrated Memory (Gerasimov et al. 2025, "You Do Not Fully Utilize Transformer's
Representation Capacity").

The idea: a Transformer's layer sees an earlier token only as that token's present hidden state, so
one vector has to carry all that later layers may need. But the keys and values of all earlier
layers have been computed anyway. LIMe makes every key/value head of layer l a learned mixture of
all heads of the layers 1 .. l. The mixture is one small matrix a layer, the router; it
starts as the identity on the layer's own heads, with noise on the others.

    K_l, V_l = x W_K, x W_V                                (B, T, H_kv, d_h)             eq. 1
    K~_l[h]  = sum_l' sum_h' R_l[h, l' h'] K_l'[h']        R_l (H_kv, l*H_kv), l' <= l   eq. 2
    V~_l[h]  = sum_l' sum_h' R_l[h, l' h'] V_l'[h']        (the paper's R[l', h', h] as a matrix)
    Y        = softmax(Q K~^T / sqrt(d_h)) V~              RoPE on Q and K~; the cache holds K~, V~

       the buffer    K_1,V_1    K_2,V_2    K_3,V_3         each layer adds its own, from the normed
                        |          |          |            hidden state x, without RoPE
       layer 1          *          |          |     -> attention(Q_1, K_1, V_1)
       layer 2          +---R_2----+          |     -> attention(Q_2, K~_2, V~_2)
       layer 3          +----------+---R_3----+     -> attention(Q_3, K~_3, V~_3)

The first layer has no router (Appendix H; section 4 gives it one). The backbone is LLaMA: RMSNorm,
RoPE, grouped-query attention, SwiGLU, tied embeddings. Below the fold: the paper's other routers (a
few layers only, an average, the same head only, one weight a channel, weights from the input) and
its baselines, DenseFormer and Hyper-Connections.

    python train.py --model=lime --depth=4       # --dense=True: LLaMA; --router=last-2: another
"""
import re
import zlib
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from kernels import attend, linear_cross_entropy, rms_norm


@dataclass
class Config:
    vocab_size: int = 50257       # tokens
    block_size: int = 2048        # tokens of context in training
    n_layer: int = 16             # L
    n_head: int = 32              # H, query heads
    n_kv_head: int = -1           # H_kv, key/value heads; -1: n_head (fewer: grouped queries)
    n_embd: int = 2048            # d, width
    n_inner: int = -1             # width of the MLP's hidden layer; -1: 4*n_embd
    router: str = ""              # static | none | a name in ROUTERS, such as last-4; "": static
                                  # (none beside a baseline)
    router_init: str = "identity" # of a layer's own heads; random: like the others' (paper: worse)
    router_lr: float = 10.0       # the routers' rate over the others' (the paper: 1e-2 / 1e-3)
    router_decay: float = 0.0     # their weight decay (none in the paper)
    kv_init: float = 0.02         # std of W_K, W_V at the start; published code: 1/sqrt(3d)
    baseline: str = ""            # denseformer | hyper: another way to reach earlier layers
    tied: bool = True             # one matrix for the embedding and the head
    rope_base: float = 10000.0    # of the rotary embedding
    norm_eps: float = 1e-6        # added to the mean square in a norm

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
        if self.router == "":
            self.router = "none" if self.baseline else "static"
        sizes = "vocab_size block_size n_layer n_head n_kv_head n_embd n_inner"
        for name in sizes.split():
            self.check(getattr(self, name) > 0, name, "must be at least 1")
        self.check(self.n_embd % (2 * self.n_head) == 0, "n_embd n_head",
                   "n_embd must be a multiple of 2*n_head")
        self.check(self.n_head % self.n_kv_head == 0, "n_head n_kv_head",
                   "n_head must be a multiple of n_kv_head")
        self.check(self.rope_base > 0, "rope_base", "must be positive")
        for name in ("norm_eps", "router_lr", "router_decay", "kv_init"):
            self.check(getattr(self, name) >= 0, name, "must not be negative")
        if self.router not in ("static", "none"):
            self.check(is_router(self.router), "router",
                       f"choose one of none, static, {', '.join(ROUTERS)}, with a number for j")
        self.check(self.router_init in ("identity", "random"), "router_init",
                   "choose identity or random")
        self.check(self.baseline in ("", "denseformer", "hyper"), "baseline",
                   "choose denseformer or hyper, or leave it out")
        self.check(not self.baseline or self.router == "none", "baseline router",
                   "a baseline goes without a router, leave one of them out")

    @classmethod
    def from_depth(cls, depth, **overrides):
        """The depth dial: width 64*depth, heads of 64 channels as in the paper's 1B model."""
        return cls(**{"n_layer": depth, "n_embd": 64 * depth, "n_head": depth, **overrides})

    @property
    def head_dim(self):
        return self.n_embd // self.n_head


PRESETS = {                       # the 1b ones, with --dense=True and --baseline=...: Table 13
    "1b_gqa": dict(n_layer=16, n_embd=2048, n_head=32, n_kv_head=8, n_inner=8192),
    "1b_mha": dict(n_layer=16, n_embd=2048, n_head=32, n_kv_head=32, n_inner=8192),
    "150m": dict(n_layer=12, n_embd=768, n_head=12, n_inner=3072),
    # Section 5.6. The paper prints no width of this one nor of 150m; 896 fits Table 12's memory
    # (a published configuration has 1,024).
    "deep128": dict(n_layer=128, n_embd=256, n_head=8, n_inner=896),
}
DENSE = dict(router="none")
RECIPE = {                        # Table 3, but for the warm-up: 1% of a run there, 2% in train.py
    "adamw": dict(learning_rate=1e-3, weight_decay=0.1, beta1=0.9, beta2=0.95, grad_clip=1.0,
                  schedule="cosine", min_lr=1e-6),
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
    """Attention whose keys and values pass through a router over the earlier layers."""

    def __init__(self, config, layer):
        super().__init__()
        d = config.n_embd
        d_kv = config.n_kv_head * config.head_dim
        self.layer = layer
        self.n_head = config.n_head
        self.n_kv_head = config.n_kv_head
        self.buffered = config.router != "none"                # later layers read this one's K, V
        self.W_Q = nn.Linear(d, d, bias=False)
        self.W_K = nn.Linear(d, d_kv, bias=False)
        self.W_V = nn.Linear(d, d_kv, bias=False)
        self.W_O = nn.Linear(d, d, bias=False)
        self.router = make_router(config, layer)

    def forward(self, x, rotary, buffer, cache=None):
        B, T, d = x.shape
        q = self.W_Q(x).view(B, T, self.n_head, -1)            # (B, T, H, d_h)
        k = self.W_K(x).view(B, T, self.n_kv_head, -1)         # (B, T, H_kv, d_h)       eq. 1
        v = self.W_V(x).view(B, T, self.n_kv_head, -1)
        if self.buffered:
            buffer.append((k, v))
        if self.router is not None:
            k, v = self.router(buffer, x)                      # the same shapes         eq. 2
        q = rotate(q, rotary)
        k = rotate(k, rotary)
        if cache is not None:
            # K~, V~ of a past token never change. (The paper keeps K and V.)
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


# ================================================================ the idea

class Router(nn.Module):
    """One layer's mixture of the keys and values of the layers so far (section 4).

    R (H_kv, n*H_kv): row h says how head h of this layer is made of the H_kv heads of each of n
    layers; the last H_kv columns are the layer's own heads. One R mixes keys and values. The keys
    come without RoPE and get it afterwards; before would be the same, since RoPE turns all keys of
    one position alike and R mixes within a position.
    """

    def __init__(self, config, sources):
        """sources: the layers that it mixes, from 0; the last one is its own."""
        super().__init__()
        self.sources = list(sources)
        self.n_kv_head = config.n_kv_head
        self.identity = config.router_init == "identity"
        columns = len(self.sources) * config.n_kv_head
        self.R = nn.Parameter(torch.empty(config.n_kv_head, columns))
        # Multiplications a token, for keys and values.
        self.macs = 2 * config.head_dim * config.n_kv_head * columns

    def init_weights(self, name):
        """A layer's own heads: the identity. The others: Kaiming uniform of variance 1/columns, so
        that the n-1 earlier layers add (n-1)/n of a head's variance. (Appendix H prints the bound
        as sqrt(3 / n * H_kv), above 1 in most of its models; we read sqrt(3 / (n * H_kv)). It
        prints no other router's start; here it is this.)"""
        bound = (3 / self.R.size(-1)) ** 0.5
        self.R.uniform_(-bound, bound, generator=own_generator(name, self.R))
        if self.identity:
            own = self.R.size(-1) // len(self.sources)         # columns of a source
            self.R[..., -own:] = torch.eye(own, device=self.R.device)

    def weights(self, x):
        """What to mix with; only below the fold does it depend on x."""
        return self.R

    def forward(self, buffer, x):
        """buffer: (K, V) of each layer so far, each (B, T, H_kv, d_h); x (B, T, d) the normed
        hidden state -> K~, V~ (B, T, H_kv, d_h)."""
        keys = [buffer[layer][0] for layer in self.sources]
        values = [buffer[layer][1] for layer in self.sources]
        R = self.weights(x)
        return self.mix_again_backward(R, keys), self.mix_again_backward(R, values)

    def mix_again_backward(self, R, sources):
        """mix(), without keeping its joined matrix for the backward pass: one in every layer would
        be O(L^2) memory. checkpoint keeps the sources, which all layers share, so O(L), and joins
        them again. (A dynamic router's R_t, which is large, is kept as well.)"""
        if not torch.is_grad_enabled():
            return self.mix(R, *sources)
        return checkpoint(self.mix, R, *sources, use_reentrant=False, preserve_rng_state=False)

    def mix(self, R, *sources):
        B, T, H, d_h = sources[0].shape
        joined = torch.cat([source.permute(2, 0, 1, 3) for source in sources])
        mixed = R @ joined.flatten(1)                          # (H_kv, n*H_kv) (n*H_kv, B*T*d_h)
        return mixed.view(H, B, T, d_h).permute(1, 2, 0, 3)


def make_router(config, layer):
    if config.router == "none" or layer == 0:                  # Appendix H: none in the first layer
        return None
    if config.router == "static":
        return Router(config, range(layer + 1))
    kind, j = read_router(config.router)
    router, sources = ROUTERS[kind]
    return router(config, sources(layer, j))


# ================================================================ the model

class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.attn_norm = RMSNorm(config.n_embd, config.norm_eps)
        self.attn = Attention(config, layer)
        self.mlp_norm = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, rotary, buffer, cache):
        x = x + self.attn(self.attn_norm(x), rotary, buffer, cache)
        return x + self.mlp(self.mlp_norm(x))


def make_block(config, layer):
    if config.baseline == "":
        return Block(config, layer)
    return BLOCKS[config.baseline](config, layer)


def own_generator(name, p):
    """A generator for tensor p alone, seeded by torch's seed and p's name: a tensor that two models
    both have, by name and shape, starts with equal values."""
    seed = torch.initial_seed() % 2 ** 31 + zlib.crc32(name.encode())
    return torch.Generator(p.device).manual_seed(seed)


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(make_block(config, layer) for layer in range(config.n_layer))
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        self.head = None                                       # tied: the embedding's matrix
        if not config.tied:
            self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    @torch.no_grad()
    def init_weights(self):
        """N(0, 0.02) for every matrix, in LIMe and its baselines alike (the paper prints the start
        of routers alone); routers and residual mixtures have starts of their own."""
        for name, p in self.named_parameters():
            std = self.config.kv_init if name.endswith(("W_K.weight", "W_V.weight")) else 0.02
            if p.ndim == 1:
                p.fill_(1.0)
            else:
                p.normal_(0, std, generator=own_generator(name, p))
        for name, module in self.named_modules():
            if hasattr(module, "init_weights") and module is not self:
                module.init_weights(name)

    def forward(self, idx, targets=None, cache=None):
        """idx (B, T) int64. With targets (B, T), -1 where there is no loss: (None, mean
        cross-entropy in nats). Without: (logits (B, T, vocab) fp32, None), only the last
        position's when a cache from new_cache() is given."""
        start = 0 if cache is None else cache.pos
        theta = rotary_frequencies(self.config, idx.device)
        rotary = rotary_tables(theta, start, idx.size(1))
        buffer = []                                            # what layers leave for later ones
        x = self.embed(idx)                                    # (B, T, d)
        for block in self.blocks:
            x = block(x, rotary, buffer, cache)
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
        return Cache(max_len)

    def param_groups(self, optimizer, learning_rate, weight_decay):
        """Routers learn faster than the rest. They have no weight decay; nor, which the paper does
        not say, have embedding, head, norms and the static part of hyper-connections. The other
        numbers of a baseline decay like matrices. (A dynamic router's W learns at a tenth of a
        router's rate, without weight decay.)"""
        c = self.config
        groups = {                                             # rate, as a ratio, and weight decay
            "router": (c.router_lr, c.router_decay),
            "dynamic": (c.router_lr / 10, 0.0),
            "undecayed": (1.0, 0.0),
            "matrix": (1.0, weight_decay),
        }
        members = {kind: [] for kind in groups}
        for name, p in self.named_parameters():
            members[group_of(name)].append(p)
        return [dict(params=members[kind], kind="adamw", lr=ratio * learning_rate,
                     weight_decay=decay, schedule=True)
                for kind, (ratio, decay) in groups.items() if members[kind]]

    def param_counts(self):
        """total, memory (the routers), active: what one token touches (one row of an embedding that
        is not the head too)."""
        total = sum(p.numel() for p in self.parameters())
        memory = sum(p.numel() for name, p in self.named_parameters() if ".router." in name)
        active = total if self.config.tied else total - self.embed.weight[1:].numel()
        return dict(total=total, memory=memory, active=active)

    def flops_per_token(self):
        """Forward and backward of the matrix products: 6 for a weight or a multiplication in a
        mixture (routers, baselines), 12*T*d a layer for attention over T x T pairs."""
        c = self.config
        macs = c.vocab_size * c.n_embd if c.tied else 0        # the head
        for module in self.modules():
            if isinstance(module, nn.Linear):
                macs += module.weight.numel()
            elif hasattr(module, "macs"):
                macs += module.macs
        return 6 * macs + 12 * c.n_layer * c.block_size * c.n_embd

    @torch.no_grad()
    def inspect(self, idx):
        """The routers' heat map: {"router": (tensor (L, H_kv, L), names of its axes)}. Entry
        [l, h, l'], layers from 0, is the share of layer l' in what head h of layer l reads:
        |R_l[h, l' h']|, mean over h' (and over tokens or channels where weights differ in them),
        divided by the layer's sum over l' (mean over h). So the mean over heads is Figure 5; each
        head divided by its own sum is Figure 9."""
        routers = [m for m in self.modules() if isinstance(m, Router)]
        if not routers:
            return {}
        L = self.config.n_layer
        H = self.config.n_kv_head
        grid = torch.zeros(L, H, L, device=idx.device)
        grid[0, :, 0] = 1.0                                    # the first layer reads itself

        def keep(router, inputs):
            buffer, x = inputs
            R = router.weights(x).float().abs()                # (..., H_kv, n*H_kv)
            R = R.reshape(-1, H, len(router.sources), H)       # (..., H_kv, n, H_kv)
            grid[router.sources[-1]][:, router.sources] = R.mean((0, 3))

        hooks = [router.register_forward_pre_hook(keep) for router in routers]
        self(idx)
        for hook in hooks:
            hook.remove()
        total = grid.sum(-1, keepdim=True).mean(1, keepdim=True)
        return {"router": (grid / total, ("layer", "head", "source"))}


def group_of(name):
    """Which of param_groups' groups the parameter `name` is in."""
    if name.endswith("router.R"):
        return "router"
    if name.endswith("router.W"):
        return "dynamic"
    if name.startswith(("embed", "head")) or "norm" in name or "static" in name:
        return "undecayed"
    return "matrix"


# ================================================================ below the fold

class Average(Router):
    """The mean over layers: nothing is learned (Appendix F). Of the same head: our reading."""

    def __init__(self, config, sources):
        super().__init__(config, sources)
        self.R = None
        self.macs = self.macs * 2 // 3                         # backward: no gradient of R

    def init_weights(self, name):
        pass

    def weights(self, x):
        eye = torch.eye(self.n_kv_head, device=x.device, dtype=x.dtype)
        return eye.repeat(1, len(self.sources)) / len(self.sources)


class NoHeadMix(Router):
    """R (H_kv, n): head h reads head h of every layer (Appendix F)."""

    def __init__(self, config, sources):
        super().__init__(config, sources)
        self.R = nn.Parameter(torch.empty(self.n_kv_head, len(self.sources)))

    def weights(self, x):
        return torch.diag_embed(self.R.T, dim1=0, dim2=2).flatten(1)             # (H_kv, n*H_kv)


class PerDim(Router):
    """R (d_h, H_kv, n*H_kv): each channel has weights of its own (Appendix F). RoPE before mixing
    would be another model."""

    def __init__(self, config, sources):
        super().__init__(config, sources)
        self.R = nn.Parameter(torch.empty(config.head_dim, *self.R.shape))

    def mix(self, R, *sources):
        B, T, H, d_h = sources[0].shape
        joined = torch.cat([source.permute(3, 2, 0, 1) for source in sources], 1)
        mixed = R @ joined.flatten(2)                          # (d_h, H_kv, B*T)
        mixed = mixed.view(d_h, H, B, T).permute(2, 3, 1, 0)
        return mixed.contiguous()                              # flash attention needs it


class Dynamic(Router):
    """R_t = R + W x_t (Appendix E). The paper prints no formula: weights come from "projecting the
    current hidden state (queries) against per-layer, per-head learnable keys". (The published code
    has an older one, of hidden states: softmax(W x), W at the routers' rate.) Ours are: x_t is
    the key's token, so that routed keys can be cached; the static R; W starts at 0. W is a
    Parameter, not a Linear: train.py's --optimizer=muon takes those, in steps too large for a
    mixture."""

    def __init__(self, config, sources):
        super().__init__(config, sources)
        self.W = nn.Parameter(torch.empty(self.R.numel(), config.n_embd))
        self.macs += self.W.numel()

    def init_weights(self, name):
        super().init_weights(name)
        self.W.zero_()

    def weights(self, x):
        change = F.linear(x, self.W)                           # (B, T, H_kv*n*H_kv)
        return self.R + change.unflatten(-1, self.R.shape)

    def mix(self, R, *sources):
        return R @ torch.cat(sources, 2)                       # (B, T, n*H_kv, d_h)


# The layers that a router of layer l mixes, counted from 0 (from 1 in the paper), its own last.

def every(layer, j):
    return range(layer + 1)


def last(layer, j):
    """The j most recent, its own included (Appendix F)."""
    return range(max(0, layer - j + 1), layer + 1)


def first(layer, j):
    """The first j and its own (Appendix G)."""
    return sorted({*range(min(layer, j)), layer})


def first_prev(layer, j):
    """The first j and the one before it (Appendix F), and its own, which the paper leaves open."""
    return sorted({*range(min(layer, j)), layer - 1, layer})


def dilated(layer, j):
    """Every j-th (Appendix G's dil-d), counted back from its own: our choice."""
    return range(layer % j, layer + 1, j)


def read_router(name):
    """"last-4" -> ("last-j", 4); a name without a number -> (name, 0)."""
    number = re.search(r"[1-9]\d*", name)
    if number is None:
        return name, 0
    return name.replace(number[0], "j", 1), int(number[0])


def is_router(name):
    kind, j = read_router(name)
    return kind in ROUTERS and ("j" in kind) == (j > 0)


class DenseFormerBlock(Block):
    """DenseFormer (Pagliardini et al. 2024): Y_i = sum_j alpha_ij X_j over the embeddings X_0 and
    all blocks' outputs X_j = block_j(Y_{j-1}), j <= i, after every block. It starts as the plain
    model."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.alpha = nn.Parameter(torch.empty(layer + 2))
        self.macs = (layer + 2) * config.n_embd                # of the sum

    def init_weights(self, name):
        self.alpha.zero_()
        self.alpha[-1] = 1.0

    def forward(self, x, rotary, buffer, cache):
        if not buffer:
            buffer.append(x)                                   # X_0
        buffer.append(super().forward(x, rotary, None, cache))
        return sum(alpha * x for alpha, x in zip(self.alpha, buffer))


class HyperConnection(nn.Module):
    """Dynamic hyper-connections (Zhu et al. 2024) of one sub-layer: n streams instead of one
    residual. alpha (n, n+1) mixes the streams h into the sub-layer's input and n new streams,
    beta (n) adds its output to each; both depend on the streams. At the start all streams are
    equal, and each is the plain model's residual."""
    n = 4                                                      # the paper's expansion rate

    def __init__(self, config, number):
        """number counts the sub-layers (in LIMe's published code: the blocks)."""
        super().__init__()
        d = config.n_embd
        self.number = number
        self.norm = nn.LayerNorm(d, config.norm_eps, elementwise_affine=False)
        self.static_alpha = nn.Parameter(torch.empty(self.n, self.n + 1))
        self.static_beta = nn.Parameter(torch.empty(self.n))
        self.alpha_fn = nn.Parameter(torch.empty(d, self.n + 1))
        self.beta_fn = nn.Parameter(torch.empty(d, 1))
        self.alpha_scale = nn.Parameter(torch.empty(1))
        self.beta_scale = nn.Parameter(torch.empty(1))
        self.macs = d * self.n * (self.n + 2 + self.n + 1)     # alpha and beta, then the mixture

    def init_weights(self, name):
        for p in self.parameters():
            p.zero_()
        self.static_alpha[:, 1:] = torch.eye(self.n)
        self.static_alpha[self.number % self.n, 0] = 1.0
        self.static_beta.fill_(1.0)
        self.alpha_scale.fill_(0.01)
        self.beta_scale.fill_(0.01)

    def forward(self, h, sublayer):
        """h (B, T, n, d), the streams; sublayer: a function of x (B, T, d)."""
        z = self.norm(h)
        alpha = self.static_alpha + self.alpha_scale * torch.tanh(z @ self.alpha_fn)
        beta = self.static_beta[:, None] + self.beta_scale * torch.tanh(z @ self.beta_fn)
        mixed = alpha.mT @ h             # (B, T, n+1, n) (B, T, n, d); under autocast it rounds h
        x = mixed[..., 0, :]
        streams = mixed[..., 1:, :]
        return streams + beta * sublayer(x)[..., None, :]      # beta (B, T, n, 1)


class HyperBlock(Block):
    """A block between hyper-connections. The first block copies the embedding to all streams, the
    last one sums them; the norms are layer norms without weights. Zhu et al. also scale the start
    of W_O and of the MLP's last matrix by sqrt(n); here they start as in LLaMA."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.first = layer == 0
        self.last = layer == config.n_layer - 1
        self.attn_norm = nn.LayerNorm(config.n_embd, config.norm_eps, elementwise_affine=False)
        self.mlp_norm = nn.LayerNorm(config.n_embd, config.norm_eps, elementwise_affine=False)
        self.attn_connection = HyperConnection(config, 2 * layer)
        self.mlp_connection = HyperConnection(config, 2 * layer + 1)

    def forward(self, h, rotary, buffer, cache):
        def attention(x):
            return self.attn(self.attn_norm(x), rotary, buffer, cache)

        def mlp(x):
            return self.mlp(self.mlp_norm(x))

        if self.first:
            h = h[:, :, None].expand(-1, -1, HyperConnection.n, -1)              # (B, T, n, d)
        h = self.attn_connection(h, attention)
        h = self.mlp_connection(h, mlp)
        return h.sum(2) if self.last else h


ROUTERS = {                       # by Config.router, its number written j: class, and which layers
    "last-j": (Router, last),
    "first-j": (Router, first),                     # Appendix G; Table 10's is the next
    "first-j-prev": (Router, first_prev),
    "dilated-j": (Router, dilated),
    "average": (Average, every),
    "no-head-mix": (NoHeadMix, every),
    "per-dim": (PerDim, every),
    "dynamic": (Dynamic, every),
}
BLOCKS = {"denseformer": DenseFormerBlock, "hyper": HyperBlock}        # by Config.baseline
