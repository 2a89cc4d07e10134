"""
LIMe, Layer-Integrated Memory (Gerasimov et al. 2025, "You Do Not Fully Utilize Transformer's Representation Capacity").

The idea: a Transformer's layer sees the past through the newest hidden state alone, so everything that later layers may
need has to be squeezed through one vector. But the keys and values of all earlier layers lie there anyway, kept for the
backward pass. LIMe lets every key/value head of layer l attend to a learned mixture of all heads of the layers 1 .. l.
The mixture is one small matrix a layer, the router; it starts as the identity on the layer's own heads plus noise.

    K_l, V_l = x W_K, x W_V                                    (B, T, H_kv, d_h)           eq. 1, into the buffer, before RoPE
    K~_l[h]  = sum_l' sum_h' R_l[h, l' h'] K_l'[h']            R_l (H_kv, l*H_kv), l' <= l eq. 2
    V~_l[h]  = sum_l' sum_h' R_l[h, l' h'] V_l'[h']            the same weights
    Y        = softmax(Q K~^T / sqrt(d_h)) V~                  RoPE on Q and K~; K~ and V~ are what the cache holds

       the buffer    K_1,V_1    K_2,V_2    K_3,V_3             each layer adds its own, from the normed hidden state x
                        |          |          |
       layer 1          *          |          |     -> attention(Q_1, K_1, V_1)
       layer 2          +---R_2----+          |     -> attention(Q_2, K~_2, V~_2)
       layer 3          +----------+---R_3----+     -> attention(Q_3, K~_3, V~_3)

The first layer has no router. The backbone is LLaMA: RMSNorm, RoPE, grouped-query attention, SwiGLU, tied embeddings.
Below the fold: the paper's other routers (a few layers only, an average, one head, one weight a channel, weights from
the input), its baselines DenseFormer and Hyper-Connections, and the names of Hugging Face's Llama.

    python train.py --model=lime --depth=4                     # --dense=True: LLaMA; --router=last-2, --baseline=hyper
"""
import re
import zlib
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


@dataclass
class Config:
    vocab_size: int = 50257       # tokens
    block_size: int = 2048        # tokens of context in training
    n_layer: int = 16             # L
    n_head: int = 32              # H, query heads
    n_kv_head: int = -1           # H_kv, key/value heads; -1: n_head (fewer: grouped-query attention; the paper has 8 and 32)
    n_embd: int = 2048            # d, width
    n_inner: int = -1             # width of the MLP's hidden layer; -1: 4*n_embd
    router: str = ""              # static | none | average | last-4 | first-4 | first-4-prev | dilated-8 | no-head-mix | per-dim | dynamic
                                  # "": static, or none beside a baseline; any number for 4 and 8
    router_init: str = "identity" # of a layer's own heads; random: like the others' (worse in the paper)
    router_lr: float = 10.0       # learning rate of the routers, times the others' (the paper's 1e-2 to 1e-3)
    router_decay: float = 0.0     # their weight decay (none in the paper)
    baseline: str = ""            # denseformer | hyper: another way to reach earlier layers, instead of a router
    tied: bool = True             # one matrix for the embedding and the head
    rope_base: float = 10000.0    # of the rotary embedding
    norm_eps: float = 1e-6        # added to the mean square in a norm

    def check(self, ok, fields, rule):
        if not ok:
            raise ValueError(", ".join(f"{name}={getattr(self, name)!r}" for name in fields.split()) + f": {rule}")

    def __post_init__(self):
        self.n_kv_head = self.n_head if self.n_kv_head == -1 else self.n_kv_head
        self.n_inner = 4 * self.n_embd if self.n_inner == -1 else self.n_inner
        self.router = self.router or ("none" if self.baseline else "static")
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_kv_head", "n_embd", "n_inner"):
            self.check(getattr(self, name) > 0, name, "must be at least 1")
        self.check(self.n_embd % (2 * self.n_head) == 0, "n_embd n_head", "n_embd must be a multiple of 2*n_head")
        self.check(self.n_head % self.n_kv_head == 0, "n_head n_kv_head", "n_head must be a multiple of n_kv_head")
        self.check(self.router == "none" or read_router(self.router), "router", f"choose one of none, {', '.join(ROUTERS)} with a number of layers for j")
        self.check(self.router_init in ("identity", "random"), "router_init", "choose identity or random")
        self.check(self.baseline in BLOCKS, "baseline", f"choose one of {', '.join(filter(None, BLOCKS))}, or none at all")
        self.check(not self.baseline or self.router == "none", "baseline router", "a baseline goes without a router, leave one of them out")

    @classmethod
    def from_depth(cls, depth, **overrides):
        """The depth dial: width 64*depth, heads of 64 channels as in the paper's 1B model."""
        return cls(**{**dict(n_layer=depth, n_embd=64 * depth, n_head=depth), **overrides})

    @property
    def head_dim(self):
        return self.n_embd // self.n_head


PRESETS = {                       # with --dense=True or --baseline=...: the other columns of Table 13
    "1b_gqa": dict(n_layer=16, n_embd=2048, n_head=32, n_kv_head=8, n_inner=8192),
    "1b_mha": dict(n_layer=16, n_embd=2048, n_head=32, n_kv_head=32, n_inner=8192),
    "150m": dict(n_layer=12, n_embd=768, n_head=12, n_inner=3072),
    "deep128": dict(n_layer=128, n_embd=256, n_head=8, n_inner=896),   # section 5.6; widths that fit the memory of Table 12
}
DENSE = dict(router="none")
RECIPE = {                        # Table 3, but for its warm-up over 1% of the run: train.py's is 2%
    "adamw": dict(learning_rate=1e-3, weight_decay=0.1, beta1=0.9, beta2=0.95, grad_clip=1.0, schedule="cosine", min_lr=1e-6),
}


# ---------------------------------------------------------------- the backbone: Llama

class RMSNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(width)), eps

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotary_frequencies(config, device):
    """theta (d_h/2,): base^(-2i/d_h)."""
    return config.rope_base ** (-torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32) / config.head_dim)


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
    """What attention must remember of the tokens so far."""

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
    """Attention whose keys and values pass through a router over the earlier layers."""

    def __init__(self, config, layer):
        super().__init__()
        d, d_h = config.n_embd, config.head_dim
        self.layer, self.n_head, self.n_kv_head = layer, config.n_head, config.n_kv_head
        self.W_Q = nn.Linear(d, config.n_head * d_h, bias=False)
        self.W_K = nn.Linear(d, config.n_kv_head * d_h, bias=False)
        self.W_V = nn.Linear(d, config.n_kv_head * d_h, bias=False)
        self.W_O = nn.Linear(config.n_head * d_h, d, bias=False)
        self.buffered, self.router = config.router != "none", make_router(config, layer)

    def forward(self, x, rotary, buffer, cache=None):
        B, T, _ = x.shape
        q = self.W_Q(x).view(B, T, self.n_head, -1)            # (B, T, H, d_h)
        k = self.W_K(x).view(B, T, self.n_kv_head, -1)         # (B, T, H_kv, d_h)               eq. 1
        v = self.W_V(x).view(B, T, self.n_kv_head, -1)
        if self.buffered:
            buffer.append((k, v))
        if self.router is not None:
            k, v = self.router(buffer, x)                      # the same shapes                 eq. 2
        q, k = rotate(q, rotary), rotate(k, rotary)
        if cache is not None:                                  # routed keys and values never change: the size of a plain cache
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

class Router(nn.Module):
    """One layer's mixture of the keys and values of all layers so far (section 4).

    R (H_kv, n*H_kv): row h says how head h of this layer is made of the H_kv heads of each of n layers; the last H_kv
    columns are the layer's own heads. One R mixes keys and values. The keys come without RoPE and get it afterwards;
    before would be the same, since RoPE turns all keys of one position alike and R mixes within a position.
    """

    def __init__(self, config, sources):
        super().__init__()
        self.sources, self.heads = sources, config.n_kv_head   # sources: the layers it mixes, from 0; the last one is its own
        self.identity = config.router_init == "identity"
        self.R = nn.Parameter(torch.empty(self.heads, len(sources) * self.heads))
        self.macs = 2 * config.head_dim * self.heads * self.heads * len(sources)         # multiplications a token, keys and values

    def init_weights(self, name):
        """Own heads: the identity. The others: Kaiming uniform, so that the mixture has the variance of one more head (Appendix H, where
        the parentheses of 3/((l+1)H) are missing)."""
        bound = (3 / self.R.size(-1)) ** 0.5
        self.R.uniform_(-bound, bound, generator=own_generator(name, self.R))
        own = self.R.size(-1) // len(self.sources)             # columns of a source
        if self.identity:
            self.R[..., -own:] = torch.eye(own, device=self.R.device)

    def weights(self, x):
        return self.R

    def forward(self, buffer, x):
        """buffer: (K, V) of the layers so far, each (B, T, H_kv, d_h); x (B, T, d) the normed hidden state -> K~, V~."""
        keys, values = zip(*[buffer[layer] for layer in self.sources])
        R = self.weights(x)
        if not torch.is_grad_enabled():
            return self.mix(R, *keys), self.mix(R, *values)
        # mix() makes one matrix of all sources, for one product. If every layer kept its matrix for the backward pass, that would
        # be O(L^2) memory: checkpoint keeps the sources, which all layers share, so O(L), and joins them again.
        return tuple(checkpoint(self.mix, R, *sources, use_reentrant=False, preserve_rng_state=False) for sources in (keys, values))

    def mix(self, R, *sources):
        B, T, H, d_h = sources[0].shape
        joined = torch.cat([source.permute(2, 0, 1, 3) for source in sources]).flatten(1)                # (n*H_kv, B*T*d_h)
        return (R @ joined).view(H, B, T, d_h).permute(1, 2, 0, 3)


ROUTERS = {"static": (Router, lambda layer, j: range(layer + 1))}      # class, and the layers that it mixes; more below the fold


def read_router(name):
    """"last-4" -> ("last-j", 4); a name without a number -> (name, 0); None if there is no such router."""
    kind, numbers = re.sub(r"\d+", "j", name), [int(n) for n in re.findall(r"\d+", name)]
    return (kind, *numbers, 0)[:2] if kind in ROUTERS and ("j" in kind) == (sum(numbers) > 0) else None


def make_router(config, layer):
    if config.router == "none" or layer == 0:                  # the first layer has nothing to mix
        return None
    kind, j = read_router(config.router)
    router, sources = ROUTERS[kind]
    return router(config, list(sources(layer, j)))


# ================================================================ the model ===============================================================

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


BLOCKS = {"": Block}                                           # by Config.baseline


def own_generator(name, p):
    """Random numbers of tensor p's own, from torch's seed and its name: models that share a tensor start from equal values in it."""
    return torch.Generator(p.device).manual_seed(torch.initial_seed() % 2 ** 31 + zlib.crc32(name.encode()))


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(BLOCKS[config.baseline](config, layer) for layer in range(config.n_layer))
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        self.head = None if config.tied else nn.Linear(config.n_embd, config.vocab_size, bias=False)   # None: the embedding's matrix

    @torch.no_grad()
    def init_weights(self):
        """N(0, 0.02) for every matrix, in LIMe and its baselines alike; routers and residual mixtures have starts of their own."""
        for name, p in self.named_parameters():
            p.normal_(0, 0.02, generator=own_generator(name, p)) if p.ndim > 1 else p.fill_(1.0)
        for name, module in self.named_modules():
            if name and hasattr(module, "init_weights"):
                module.init_weights(name)

    def forward(self, idx, targets=None, cache=None):
        """idx (B, T) int64. With targets (B, T), -1 where there is no loss: (None, mean cross-entropy in nats).
        Without: (logits (B, T, vocab) fp32, None), only the last position's when a cache from new_cache() is given."""
        start = 0 if cache is None else cache.pos
        rotary = rotary_tables(rotary_frequencies(self.config, idx.device), start, idx.size(1))
        x, buffer = self.embed(idx), []                        # (B, T, d); what each layer leaves for the later ones
        for block in self.blocks:
            x = block(x, rotary, buffer, cache)
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
        """Routers learn ten times as fast as the rest (a dynamic one's W as fast) and do not decay, but for router_lr and router_decay; nor do
        embedding, head and norms."""
        router_lr, router_decay = self.config.router_lr, self.config.router_decay
        groups = {"R": ([], router_lr, router_decay), "W": ([], router_lr / 10, 0.0), "plain": ([], 1.0, 0.0), "matrix": ([], 1.0, weight_decay)}
        for name, p in self.named_parameters():
            plain = name.startswith(("embed", "head")) or "norm" in name or "static" in name
            groups[name[-1] if ".router." in name else "plain" if plain else "matrix"][0].append(p)
        return [dict(params=params, kind="adamw", lr=ratio * learning_rate, weight_decay=decay, schedule=True)
                for params, ratio, decay in groups.values() if params]

    def param_counts(self):
        """total, memory (the routers), active: what one token touches (one row of an embedding that is not the head too)."""
        total = sum(p.numel() for p in self.parameters())
        memory = sum(p.numel() for name, p in self.named_parameters() if ".router." in name)
        return dict(total=total, memory=memory, active=total if self.config.tied else total - self.embed.weight[1:].numel())

    def flops_per_token(self):
        """Forward and backward of the matrix products, at full context: 6 a weight and a multiplication of a router's or a
        hyper-connection's mixture, 12*T*d a layer for attention."""
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear)) + self.config.tied * self.embed.weight.numel()
        macs = sum(getattr(m, "macs", 0) for m in self.modules())
        return 6 * (weights + macs) + 12 * self.config.n_layer * self.config.block_size * self.config.n_embd

    @torch.no_grad()
    def inspect(self, idx):
        """The routers' heat map: {"router": (L, H_kv, L)}, entry [l, h, l'] is the share of layer l' in what head h of layer l
        reads: |R_l[h, l' h']|, mean over h' (and over tokens or channels where weights differ in them), divided by the layer's
        sum over l' (mean over h). So the mean over heads is Figure 5; each head divided by its own sum is Figure 9."""
        grid = torch.zeros(self.config.n_layer, self.config.n_kv_head, self.config.n_layer, device=idx.device)
        grid[0, :, 0] = 1.0                                    # the first layer reads itself

        def keep(attn, args):
            router, heads = attn.router, self.config.n_kv_head
            R = router.weights(args[0]).float().abs()
            grid[attn.layer][:, router.sources] = R.reshape(-1, heads, len(router.sources), heads).mean((0, 3))

        hooks = [block.attn.register_forward_pre_hook(keep) for block in self.blocks if block.attn.router is not None]
        try:
            self(idx)
        finally:
            for hook in hooks:
                hook.remove()
        return {"router": (grid / grid.sum(-1, keepdim=True).mean(1, keepdim=True), ("layer", "head", "source"))} if hooks else {}


# ================================================================ below the fold: baselines, ablations, foreign checkpoints ==============

# Which layers (Appendices F and G); counted from 0 here, from 1 in the names.
ROUTERS |= {
    "last-j": (Router, lambda layer, j: range(max(0, layer - j + 1), layer + 1)),                        # the j most recent, its own included
    "first-j": (Router, lambda layer, j: sorted({*range(min(layer, j)), layer})),                        # Appendix G: 1 .. j and its own
    "first-j-prev": (Router, lambda layer, j: sorted({*range(min(layer, j)), layer - 1, layer})),        # Appendix F: and the one before it
    "dilated-j": (Router, lambda layer, j: range(layer % j, layer + 1, j)),                              # every j-th, counted back from its own
}


class Average(Router):
    """The mean over layers of the same head: nothing is learned (Appendix F)."""

    def __init__(self, config, sources):
        super().__init__(config, sources)
        del self.R

    def init_weights(self, name):
        pass

    def weights(self, x):
        return torch.eye(self.heads, device=x.device, dtype=x.dtype).repeat(1, len(self.sources)) / len(self.sources)


class NoHeadMix(Router):
    """R (H_kv, n): head h reads the heads h of the other layers (Appendix F)."""

    def __init__(self, config, sources):
        super().__init__(config, sources)
        self.R = nn.Parameter(torch.empty(self.heads, len(sources)))

    def weights(self, x):
        return (self.R[:, :, None] * torch.eye(self.heads, device=x.device)[:, None]).flatten(1)         # (H_kv, n*H_kv)


class PerDim(Router):
    """R (d_h, H_kv, n*H_kv): each channel has weights of its own (Appendix F). RoPE before mixing would be another model."""

    def __init__(self, config, sources):
        super().__init__(config, sources)
        self.R = nn.Parameter(torch.empty(config.head_dim, *self.R.shape))

    def mix(self, R, *sources):
        B, T, H, d_h = sources[0].shape
        joined = torch.cat([source.permute(3, 2, 0, 1) for source in sources], 1).flatten(2)             # (d_h, n*H_kv, B*T)
        return (R @ joined).view(d_h, H, B, T).permute(2, 3, 1, 0).contiguous()                          # flash attention needs it


class Dynamic(Router):
    """R_t = R + W x_t: the router of the key's token t (Appendix E), so that routed keys can be cached. The paper prints no formula:
    the static R and the zero start of W are ours. W is no Linear, for --optimizer=muon takes those, in steps too large for a mixture."""

    def __init__(self, config, sources):
        super().__init__(config, sources)
        self.W = nn.Parameter(torch.empty(self.R.numel(), config.n_embd))
        self.macs += self.W.numel()

    def init_weights(self, name):
        super().init_weights(name)
        self.W.zero_()

    def weights(self, x):
        return self.R + F.linear(x, self.W).view(*x.shape[:2], *self.R.shape)                            # (B, T, H_kv, n*H_kv)

    def mix(self, R, *sources):
        return R @ torch.cat(sources, 2)                                                                 # (B, T, n*H_kv, d_h)


EVERY = ROUTERS["static"][1]
ROUTERS |= {"average": (Average, EVERY), "no-head-mix": (NoHeadMix, EVERY), "per-dim": (PerDim, EVERY), "dynamic": (Dynamic, EVERY)}


class DenseFormerBlock(Block):
    """DenseFormer (Pagliardini et al. 2024): Y_i = sum_j alpha_ij X_j over the embeddings X_0 and all blocks' outputs
    X_j = block_j(Y_{j-1}), j <= i, after every block. It starts as the plain model."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.alpha = nn.Parameter(torch.empty(layer + 2))

    def init_weights(self, name):
        self.alpha.zero_()[-1] = 1.0

    def forward(self, x, rotary, buffer, cache):
        if not buffer:
            buffer.append(x)                                   # X_0
        buffer.append(super().forward(x, rotary, None, cache))
        return sum(alpha * x for alpha, x in zip(self.alpha, buffer))


class HyperConnection(nn.Module):
    """Dynamic hyper-connections (Zhu et al. 2024) of one sub-layer: n streams instead of one residual. alpha (n, n+1) mixes the
    streams h into the sub-layer's input and n new streams, beta (n) adds its output to each; both depend on the streams.
    number counts the sub-layers. At the start all streams are equal, and each is the plain model's residual."""
    n = 4                                                      # the paper's expansion rate

    def __init__(self, config, number):
        super().__init__()
        self.number, self.norm = number, nn.LayerNorm(config.n_embd, config.norm_eps, elementwise_affine=False)
        self.static_alpha, self.static_beta = nn.Parameter(torch.empty(self.n, self.n + 1)), nn.Parameter(torch.empty(self.n))
        self.alpha_fn, self.beta_fn = nn.Parameter(torch.empty(config.n_embd, self.n + 1)), nn.Parameter(torch.empty(config.n_embd, 1))
        self.alpha_scale, self.beta_scale = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))
        self.macs = config.n_embd * self.n * (self.n + 2 + self.n + 1)                   # alpha and beta, then the mixture

    def init_weights(self, name):
        for p in self.parameters():
            p.zero_()
        self.static_alpha[:, 1:] = torch.eye(self.n)
        self.static_alpha[self.number % self.n, 0] = 1.0
        self.static_beta.fill_(1.0)
        self.alpha_scale.fill_(0.01)
        self.beta_scale.fill_(0.01)

    def forward(self, h, sublayer):                            # h (B, T, n, d)
        z = self.norm(h)
        alpha = self.static_alpha + self.alpha_scale * torch.tanh(z @ self.alpha_fn)     # (B, T, n, n+1)
        beta = self.static_beta[:, None] + self.beta_scale * torch.tanh(z @ self.beta_fn)                # (B, T, n, 1)
        mixed = alpha.mT @ h                                   # (B, T, n+1, d): the sub-layer's input, then the streams
        return mixed[..., 1:, :] + beta * sublayer(mixed[..., 0, :])[..., None, :]


class HyperBlock(Block):
    """A block between hyper-connections. The first block makes the streams of the embedding, the last one sums them; the norms
    are layer norms without weights."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.first, self.last = layer == 0, layer == config.n_layer - 1
        self.attn_norm = nn.LayerNorm(config.n_embd, config.norm_eps, elementwise_affine=False)
        self.mlp_norm = nn.LayerNorm(config.n_embd, config.norm_eps, elementwise_affine=False)
        self.attn_connection, self.mlp_connection = HyperConnection(config, 2 * layer), HyperConnection(config, 2 * layer + 1)

    def forward(self, x, rotary, buffer, cache):
        h = x[:, :, None].expand(-1, -1, HyperConnection.n, -1) if self.first else x                     # (B, T, n, d)
        h = self.attn_connection(h, lambda x: self.attn(self.attn_norm(x), rotary, buffer, cache))
        h = self.mlp_connection(h, lambda x: self.mlp(self.mlp_norm(x)))
        return h.sum(2) if self.last else h


BLOCKS |= {"denseformer": DenseFormerBlock, "hyper": HyperBlock}


def from_llama(state, config):
    """A Hugging Face Llama's state_dict -> Model of the same logits. `config` must have router="none" (DENSE), its sizes, and
    rms_norm_eps and rope_theta as norm_eps and rope_base. RuntimeError if names or shapes differ; RoPE scaling is not known here."""
    if config.router != "none" or config.baseline:
        raise ValueError(f"router={config.router!r}, baseline={config.baseline!r}: a Llama has neither, give Config(router='none', ...)")
    names = {"model.embed_tokens": "embed", "model.layers": "blocks", "model.norm": "norm", "lm_head": "head", "self_attn": "attn",
             "q_proj": "W_Q", "k_proj": "W_K", "v_proj": "W_V", "o_proj": "W_O", "input_layernorm": "attn_norm",
             "post_attention_layernorm": "mlp_norm", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
    pattern = re.compile(r"(?<![^.])(" + "|".join(re.escape(name) for name in names) + r")(?=\.)")
    ours = {pattern.sub(lambda match: names[match[1]], name): p for name, p in state.items() if not name.endswith("inv_freq")}
    if config.tied and "head.weight" in ours and not torch.equal(ours.pop("head.weight"), ours["embed.weight"]):
        raise ValueError("tied=True: this Llama has a head of its own, give Config(tied=False, ...)")
    model = Model(config)
    model.load_state_dict(ours)
    return model
