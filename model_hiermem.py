"""
Hierarchical memories (Pouransari et al. 2025, "Pretraining with Hierarchical Memories: Separating Long-Tail and Common Knowledge").

The idea: a small *anchor* model is always in use; the knowledge of special topics lies in a large *bank* of parameters,
one block for every node of a tree of clusters over the training text. The text at hand (a window of a document, or a
prompt) is embedded and walked down the tree, and the blocks W_{l,i_l} on its path are fetched and added to the model for
the whole sequence. A block is updated by text of its own topic alone, so rare facts are not overwritten, and a model with
billions of parameters in its bank runs with 10% more than its anchor. Level l has n_l = k_1 ... k_l nodes.

    I(x)     = (i_1, ..., i_p)          greedy walk: at every level the nearest of the node's k_l centroids
    R(x; W)  = [W_{1,i_1}, ..., W_{p,i_p}]                                                              eq. 2.2
    L(x)     = - sum_t log P_{theta, R(x; W)}(x_t | x_<t)                                               eq. 2.1
    |R|      = s_1 + ... + s_p  numbers are fetched;    |W| = n_1 s_1 + ... + n_p s_p  are in the bank

FFN memories (the default) widen the SwiGLU of every layer by R = r_1 + ... + r_p channels, s_l = 3 r_l L d:

    y = W3 (silu(W1 x) * W2 x)  +  M3 (silu(M1 x) * M2 x)       M1, M2, M3^T (R, d) are fetched; M3 = 0 at first

      text --embed--> phi --walk--> path     bank, level 1:  [ ][#][ ][ ]              generic [ ]
                                      |            level 2:  [ ][ ][ ][ ][ ][#][ ] ... generic [ ]
                                      +----------------------------- R(x; W) ---+
      tokens --> embed --> [ attention, FFN + fetched FFN memory ] x L --> head

Every level also has a *generic* block, for any text: a training sequence takes it with probability 1/(k_1 + 1), else the
blocks of its path (section 4). Below the fold are the other kinds of memory, banks off the device, the tree, subtrees and
their merge. The anchor alone, and then with memories (Table 1, A1 and A2):

    python prepare_fineweb.py --source=TEXTS --clusters=8,8 --window=512       # the tree, and sequences of one leaf each
    python train.py --model=hiermem --dense=True --dataset=TEXTS --out_dir=out/anchor
    python train.py --model=hiermem --init_from=out/anchor --memory=ffn --learning_rate=1e-3 --dataset=TEXTS    # --frozen=True: A3
"""
import functools, hashlib, json, math, os, random, re, shutil, sys, time, zipfile, zlib
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from kernels import gather_rows


@dataclass
class Config:
    vocab_size: int = 50432       # tokens
    block_size: int = 2048        # tokens of context in training
    n_layer: int = 35             # L
    n_head: int = 12              # h, query heads
    n_kv_head: int = -1           # key/value heads; -1: n_head (fewer: grouped-query attention, of foreign anchors)
    head_dim: int = -1            # d_h; -1: n_embd/n_head (OpenLM-160M: 32)
    n_embd: int = 512             # d, width
    n_inner: int = -1             # d_f, width of the MLP's hidden layer; -1: 4*n_embd
    tied: bool = True             # one matrix for the embedding and the head
    norm: str = "rms"             # rms | layer, either with a gain only
    norm_eps: float = 1e-5        # of the norms
    qk_norm: bool = True          # norm of queries and keys over their whole width, before the rotary embedding
    qkv_bias: bool = False        # biases of queries, keys and values (Qwen2.5)
    rope_base: float = 100000.0   # of the rotary embedding
    rope_scaling: str = ""        # Llama 3's, factor:low:high:context: 32:1:4:8192 (3.2 1B)
    eot: int = -1                 # token that opens a document, beyond which attention does not look; -1: no such limit
    memory: str = "ffn"           # ffn | lora_qk | lora_vo | lora_ffn | kv | none
    clusters: str = "8,8"         # k_1,...,k_p: children of a node of the tree, root to leaves (paper 16,16,16,16)
    ranks: str = "64,24"          # r_1,...,r_p: FFN channels, LoRA ranks or key-value pairs; 0: no memory at a level
    layers: str = "all"           # all | early | middle | late: 2L/7 of them, with as much memory in all (Table 9)
    generic: float = -1.0         # share of training sequences that take the generic memory; -1: 1/(k_1 + 1)
    memory_lr: float = 1.0        # learning rate of the bank, in units of the anchor's
    frozen: bool = False          # only memories are trained
    subtree: str = ""             # train the memories under a node of level 1, 0 ... k_1-1, or any node, level:node, or generic; "": all
    placement: str = ""           # where each level is, cpu,disk: on the device, in host memory or in a file; "": all on the device
    sparse_memory: bool = True    # only fetched blocks cost time (RowAdamW); False: dense gradients, AdamW over the whole bank
    retriever: str = ""           # content hash of the tree that the blocks belong to; set from the data

    def check(self, ok, fields, rule):
        if not ok:
            raise ValueError(", ".join(f"{name}={getattr(self, name)!r}" for name in fields.split()) + f": {rule}")

    def __post_init__(self):
        self.n_kv_head = self.n_head if self.n_kv_head == -1 else self.n_kv_head
        self.n_inner = 4 * self.n_embd if self.n_inner == -1 else self.n_inner
        self.head_dim = self.n_embd // self.n_head if self.head_dim == -1 else self.head_dim
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_kv_head", "n_embd", "n_inner"):
            self.check(getattr(self, name) > 0, name, "must be at least 1")
        for name, choices in dict(norm=NORMS, memory=(*MEMORIES, "none"), layers=PLACES).items():
            self.check(getattr(self, name) in choices, name, f"choose one of {', '.join(choices)}")
        self.check(self.head_dim > 1 and self.head_dim % 2 == 0, "n_embd n_head head_dim", "head_dim must be even")
        self.check(self.n_head % self.n_kv_head == 0, "n_head n_kv_head", "n_head must be a multiple of n_kv_head")
        self.check(-1 <= self.eot < self.vocab_size, "eot vocab_size", "eot must be a token of the vocabulary, or -1")
        numbers = all(re.fullmatch(r"\d+(,\d+)*", text) for text in (self.clusters, self.ranks))
        fit = numbers and min(self.factors) > 1 and (not self.kind or len(self.factors) == len(self.level_ranks) and any(self.level_ranks))
        self.check(fit, "clusters ranks", "needs a factor of 2 or more and a rank for each level (8,8 and 64,24), not all ranks 0: that is memory=none")
        for rules in CHECKS:
            rules(self)

    @classmethod
    def from_depth(cls, depth, **overrides):
        """The depth dial: width 64*depth in heads of 64 channels."""
        return cls(**{**dict(n_layer=depth, n_embd=64 * depth, n_head=depth), **overrides})

    factors = property(lambda self: tuple(map(int, self.clusters.split(","))))           # k_l: children of a node, by level
    nodes = property(lambda self: tuple(accumulate(self.factors, mul)))                  # n_l; then r_l and s_l, the numbers in a block
    level_ranks = property(lambda self: tuple(round(int(r) * self.n_layer / len(self.memory_layers)) for r in self.ranks.split(",")))
    level_sizes = property(lambda self: tuple(len(self.memory_layers) * r * sum(width for width, _ in self.kind.parts(self).values())
                                              for r in self.level_ranks) if self.kind else (0,) * len(self.factors))
    memory_layers = property(lambda self: PLACES[self.layers](self.n_layer, round(2 * self.n_layer / 7) or 1))
    places = property(lambda self: tuple(self.placement.split(",")) if self.placement else ("device",) * len(self.factors))
    root = property(lambda self: int(self.subtree.rpartition(":")[0] or 1))                  # level of the subtree's node
    make_norm = lambda self, width: NORMS[self.norm](width, self.norm_eps)
    kind = property(lambda self: MEMORIES.get(self.memory))    # None: no memory


PRESETS = {                       # Tables 4 to 6 with the memories of rows A2, B2, C2 of Table 1; --dense=True: the anchors alone
    "openlm_160m": dict(n_layer=35, n_embd=512, n_head=12, head_dim=32, clusters="16,16,16,16", ranks="256,64,16,0"),
    "openlm_410m": dict(n_layer=24, n_embd=1024, n_head=16, n_inner=2816, tied=False, clusters="16,16,16,16", ranks="512,128,32,0"),
    "openlm_1b": dict(n_layer=24, n_embd=2048, n_head=16, n_inner=5632, tied=False, clusters="16,16,16,16", ranks="768,256,16,0"),
}
PLACES, CHECKS = {"all": lambda L, n: range(L)}, []             # (L, n) -> the layers that have a memory; more rules for Config's fields
DENSE = dict(memory="none", frozen=False, subtree="")
RECIPE = {                        # the paper's for an anchor; memories and co-training: 1e-4 -> 1e-5, wd 1e-3; all from scratch: 1e-3 -> 1e-5, wd 0.1
    "adamw": dict(learning_rate=5e-3, min_lr=5e-5, weight_decay=0.05, beta1=0.9, beta2=0.95, grad_clip=1.0, schedule="cosine"),
}


# ---------------------------------------------------------------- the backbone: OpenLM, which is Llama with a norm of queries and keys

class RMSNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(width)), eps

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


NORMS = {"rms": RMSNorm, "layer": lambda width, eps: nn.LayerNorm(width, eps, bias=False)}


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


def attend(q, k, v, mask):
    """Attention of the last T positions to those of all S that mask (B, 1, T, S) allows; None: causal.
    q (B, T, H, d_h), k and v (B, S, H_kv, d_h) -> (B, T, H*d_h)."""
    B, T, H, d_h = q.shape
    S = k.size(1)
    if mask is None and 1 < T < S:
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and T > 1, enable_gqa=k.size(1) != H)
    return y.transpose(1, 2).reshape(B, T, H * d_h)


class Cache:
    """What attention must remember of the tokens so far, and the fetched memory."""

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
        d, d_h, bias = config.n_embd, config.head_dim, config.qkv_bias
        self.layer, self.n_head, self.n_kv_head = layer, config.n_head, config.n_kv_head
        self.W_Q = nn.Linear(d, config.n_head * d_h, bias=bias)
        self.W_K = nn.Linear(d, config.n_kv_head * d_h, bias=bias)
        self.W_V = nn.Linear(d, config.n_kv_head * d_h, bias=bias)
        self.W_O = nn.Linear(config.n_head * d_h, d, bias=False)
        self.q_norm, self.k_norm = (config.make_norm(n * d_h) if config.qk_norm else nn.Identity() for n in (self.n_head, self.n_kv_head))

    def forward(self, x, rotary, mask, memory, cache=None):
        B, T, d = x.shape
        q = self.q_norm(memory.linear("q", self.W_Q, x)).view(B, T, self.n_head, -1)         # (B, T, H, d_h)
        k = self.k_norm(memory.linear("k", self.W_K, x)).view(B, T, self.n_kv_head, -1)      # (B, T, H_kv, d_h)
        v = memory.linear("v", self.W_V, x).view(B, T, self.n_kv_head, -1)
        k = rotate(k, rotary)
        if cache is not None:
            k, v = cache.append((self.layer, "k"), k), cache.append((self.layer, "v"), v)
        y = memory.heads(q, attend(rotate(q, rotary), k, v, mask))                           # (B, T, H*d_h)
        return memory.linear("o", self.W_O, y)


class MLP(nn.Module):                                          # SwiGLU
    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(config.n_embd, config.n_inner, bias=False)
        self.up = nn.Linear(config.n_embd, config.n_inner, bias=False)
        self.down = nn.Linear(config.n_inner, config.n_embd, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


# ================================================================ the idea ================================================================

normal = lambda std: lambda p, g: nn.init.trunc_normal_(p, 0, std, -3 * std, 3 * std, g)           # cut at three standard deviations
zero = lambda p, g: p.zero_()


class Memory:
    """What a sequence has fetched for one layer, and the three places of a block where a kind of memory can act.

    weights (B, R, width): the channels of all levels together, cut into the parts that the kind declares. This class is a
    layer without memory. At step 0 every kind leaves the anchor's output as it is, bit for bit."""

    def __init__(self, config=None, weights=None):
        parts = self.parts(config)
        self.part = dict(zip(parts, weights.split([width for width, _ in parts.values()], -1))) if parts else {}

    @classmethod
    def parts(cls, config):                                    # {name: (width, how it is initialised)}
        return {}

    def linear(self, name, W, x):                              # one of the block's matrices: q, k, v, o
        return W(x)

    def heads(self, q, y):                                     # the heads' outputs; q before its rotation
        return y

    def mlp(self, mlp, x):
        return mlp(x)


class FFN(Memory):
    """FFN memory (Figure 18): R more channels in the SwiGLU, as a gated product of their own."""

    @classmethod
    def parts(cls, config):
        d = config.n_embd
        return {"gate": (d, normal(d ** -0.5)), "up": (d, normal(d ** -0.5)), "down": (d, zero)}

    def mlp(self, mlp, x):                                     # x (B, T, d)
        gate, up, down = self.part.values()                    # M1, M2, M3^T: (B, R, d)
        return mlp(x) + (F.silu(x @ gate.mT) * (x @ up.mT)) @ down


MEMORIES = {"ffn": FFN}                                        # LoRA and key-value memories join below the fold


class Level(nn.Module):
    """One level of the bank: a row of s_l = layers*rank*width numbers for every node, and the last row, which is generic."""
    gather = staticmethod(gather_rows)

    def __init__(self, config, nodes, rank, size):
        super().__init__()
        self.shape, self.sparse, self.parts = (len(config.memory_layers), rank, -1), config.sparse_memory, config.kind.parts(config).values()
        self.table = nn.Parameter(torch.empty(nodes + 1, size))

    def init(self, rows, nodes, g):                            # a block has random numbers of its own, so it can be made when it is first needed
        for row, seed in zip(rows, [g.initial_seed() + node for node in nodes]):
            g.manual_seed(seed)
            for part, (_, start) in zip(row.view(self.shape).split([width for width, _ in self.parts], -1), self.parts):
                start(part, g)

    def forward(self, node):
        """node (B,) int64, -1: generic -> (B, layers, rank, width). A row that sequences share is read once, and their gradients add up in it."""
        distinct, inverse = torch.unique(node % len(self.table), return_inverse=True)
        rows = self.gather(self.table, distinct, self.sparse)                            # (U, s_l)
        return rows.view(len(rows), *self.shape).index_select(0, inverse)


LEVELS = {"device": Level}                                     # levels elsewhere join below the fold


# ================================================================ the model ===============================================================

class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.attn_norm = config.make_norm(config.n_embd)
        self.attn = Attention(config, layer)
        self.mlp_norm = config.make_norm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x, rotary, mask, memory, cache):
        x = x + self.attn(self.attn_norm(x), rotary, mask, memory, cache)
        return x + memory.mlp(self.mlp, self.mlp_norm(x))


def own_generator(name, p):
    """Random numbers of tensor p's own, from torch's seed and its name: models that share a tensor start from equal values in it."""
    return torch.Generator(p.device).manual_seed(torch.initial_seed() % 2 ** 31 + zlib.crc32(name.encode()))


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = config.make_norm(config.n_embd)
        self.head = None if config.tied else nn.Linear(config.n_embd, config.vocab_size, bias=False)   # None: the embedding's matrix
        self.requires_grad_(not config.frozen)
        levels = enumerate(zip(config.places, config.nodes, config.level_ranks, config.level_sizes), 1)
        self.bank = nn.ModuleDict({str(l): LEVELS[place](config, n, r, s).requires_grad_(l >= config.root) for l, (place, n, r, s) in levels if s})

    @torch.no_grad()
    def init_weights(self):
        """OpenLM's: normal, cut at three standard deviations; the matrices that write to the residual stream get smaller with depth.
        Each tensor draws from a generator of its own, so models that differ in their memory alone start from equal anchors."""
        d, d_f = self.config.n_embd, self.config.n_inner
        for name, p in self.named_parameters():
            g, depth = own_generator(name, p), (2 * (int(name.split(".")[1]) + 1)) ** -0.5 if name.startswith("blocks") else 1
            if name.endswith("table"):
                self.bank[name.split(".")[1]].init(p, range(len(p)), g)
            elif p.ndim == 1:
                p.fill_(0 if name.endswith("bias") else 1)
            else:
                ends = {"W_O": d ** -0.5 * depth, "down": d_f ** -0.5 * depth}
                normal(ends.get(name.split(".")[-2], d ** -0.5))(p, g)

    @torch.compiler.disable                                    # how many blocks are distinct depends on the data: one graph break
    def fetch(self, leaf, B):
        """R(x; W) of B sequences (eq. 2.2): leaf (B,) int64, or one for all -> {layer: (B, R, width)}, nothing for leaf=None."""
        if leaf is None or not self.bank:
            return {}
        leaf, leaves, nodes = torch.as_tensor(leaf, device=self.embed.weight.device).expand(B), self.config.nodes[-1], self.config.nodes
        rows = [level(leaf // (leaves // nodes[int(l) - 1])) for l, level in self.bank.items()]          # -1 // n is -1 at every level
        return dict(zip(self.config.memory_layers, torch.cat(rows, 2).unbind(1)))

    def document_mask(self, idx, cache):
        """(B, 1, T, S): whether the last T positions may look at all S, those of their own document and not ahead; None: causal."""
        if self.config.eot == -1:
            return None
        here = (idx == self.config.eot).cumsum(1)              # (B, T) the document's number, counting the eot so far
        if cache is not None and cache.pos:
            here = here + cache.store["documents"][:, cache.pos - 1:cache.pos]
        seen = here if cache is None else cache.append("documents", here)
        return (here[:, :, None] == seen[:, None]).tril(seen.size(1) - here.size(1))[:, None]

    def forward(self, idx, targets=None, cache=None, leaf=-1):
        """idx (B, T) int64. With targets (B, T), -1 where there is no loss: (None, mean cross-entropy in nats).
        Without: (logits (B, T, vocab) fp32, None), only the last position's when a cache from new_cache() is given.
        leaf: the leaves that the sequences belong to (B,) int64, -1: generic; None: the anchor alone. A cache keeps what is fetched."""
        config, start = self.config, 0 if cache is None else cache.pos
        rotary = rotary_tables(rotary_frequencies(config, idx.device), start, idx.size(1))
        mask = self.document_mask(idx, cache)
        fetched = self.fetch(leaf, len(idx)) if cache is None or not cache.pos else cache.store["memory"]
        x = self.embed(idx)                                    # (B, T, d)
        for layer, block in enumerate(self.blocks):
            x = block(x, rotary, mask, config.kind(config, fetched[layer]) if layer in fetched else Memory(), cache)
        x = self.norm(x)
        if targets is not None:
            return None, self.loss(x, targets)
        if cache is not None:
            cache.pos += idx.size(1)
            cache.store["memory"] = fetched
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
        """Anchor and bank; weight decay for all (section A). RowAdamW updates the blocks that were fetched, and no other."""
        bank = [p for p in self.bank.parameters() if p.requires_grad]
        anchor = [p for name, p in self.named_parameters() if not name.startswith("bank.")]
        groups = (anchor, "adamw", learning_rate), (bank, "rows" if self.config.sparse_memory else "adamw", learning_rate * self.config.memory_lr)
        return [dict(params=params, kind=kind, lr=lr, weight_decay=weight_decay, schedule=True) for params, kind, lr in groups if params]

    def param_counts(self):
        """total; memory |W|, the generic blocks (as large as what is fetched) counted apart; active: what one token touches."""
        total, sizes = sum(p.numel() for p in self.parameters()), self.config.level_sizes
        memory, fetched = sum(map(mul, self.config.nodes, sizes)), sum(sizes)
        unused = 0 if self.config.tied else self.embed.weight.numel() - self.config.n_embd
        return dict(total=total, memory=memory, generic=fetched, active=total - memory - unused)

    def flops_per_token(self):
        """Forward and backward at full context: 6 a weight (4 in a frozen anchor), fetched memory too, and 12*T*h*d_h a layer."""
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear)) + self.config.tied * self.embed.weight.numel()
        attention = 12 * self.config.n_layer * self.config.block_size * self.config.n_head * self.config.head_dim
        return (4 if self.config.frozen else 6) * weights + 6 * sum(self.config.level_sizes) + attention


# ================================================================ below the fold: baselines, ablations, foreign checkpoints ==============

class LoRA(Memory):
    """Low-rank patches of some of a block's matrices, W x + 2 B(A x) (Figures 14 to 16); the 2 is not divided by the rank."""

    names = ()

    @classmethod
    def parts(cls, config):
        d, d_f, queries, keys = config.n_embd, config.n_inner, config.n_head * config.head_dim, config.n_kv_head * config.head_dim
        widths = dict(q=(d, queries), k=(d, keys), v=(d, keys), o=(queries, d), gate=(d, d_f), up=(d, d_f), down=(d_f, d))
        uniform = lambda bound: lambda p, g: p.uniform_(-bound, bound, generator=g)      # Kaiming's, for the fan-in of A
        sizes = ((name, *widths[name]) for name in cls.names)
        return {name: part for W, inner, outer in sizes for name, part in ((W + ".A", (inner, uniform(inner ** -0.5))), (W + ".B", (outer, zero)))}

    def linear(self, name, W, x):
        if name not in self.names:
            return W(x)
        return W(x) + 2 * (x @ self.part[name + ".A"].mT) @ self.part[name + ".B"]       # A (B, R, in), B^T (B, R, out)


class LoRAQK(LoRA):
    names = ("q", "k")


class LoRAVO(LoRA):
    names = ("v", "o")


class LoRAFFN(LoRA):
    names = ("gate", "up", "down")

    def mlp(self, mlp, x):
        return self.linear("down", mlp.down, F.silu(self.linear("gate", mlp.gate, x)) * self.linear("up", mlp.up, x))


class KV(Memory):
    """Learned keys and values that every query attends to, without mask or positions, in a softmax of their own (Figure 17)."""

    @classmethod
    def parts(cls, config):
        width = config.n_kv_head * config.head_dim
        return {"keys": (width, normal(config.n_embd ** -0.5)), "values": (width, zero)}

    def heads(self, q, y):                                     # q (B, T, H, d_h), y (B, T, H*d_h)
        k, v = (t.unflatten(-1, (-1, q.size(-1))).transpose(1, 2) for t in self.part.values())           # (B, H_kv, R, d_h)
        found = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, enable_gqa=k.size(1) != q.size(2))
        return y + found.transpose(1, 2).reshape(y.shape)


MEMORIES |= {"lora_qk": LoRAQK, "lora_vo": LoRAVO, "lora_ffn": LoRAFFN, "kv": KV}
PLACES |= {"early": lambda L, n: range(n), "middle": lambda L, n: range((L - n) // 2, (L - n) // 2 + n),           # Table 9
           "late": lambda L, n: range(L - n, L)}


# ---------------------------------------------------------------- levels that are not on the device: in host memory, or in a file

class Away(Level):
    """A level of which no more than a batch needs is on the device: blocks, Adam's moments and step counts come, and go back after the step.

    table stands for all the blocks and holds one zero: gradients gather there, and by it RowAdamW finds the level. home (n_l + 1, slots, 3, s_l)
    has each node's block and its moments, in host memory, or with two slots in a sparse file beside the checkpoint. slot (n_l + 1,) says which
    one counts; 0: none, the initial values are made when they are read. The slot that the last checkpoint names is written to only when the
    next is whole: a kill at any moment loses nothing, and a checkpoint need not hold the blocks."""

    def __init__(self, config, nodes, rank, size, slots=1):
        with torch.device("meta"):
            super().__init__(config, nodes, rank, size)
        self.size, self.path, self.kept = (nodes + 1, slots, 3, size), None, None
        self.table = nn.Parameter(torch.zeros(1, 1).expand(nodes + 1, size))
        with torch.device("cpu"):
            state = dict(home=torch.empty(0), slot=torch.zeros(nodes + 1, dtype=torch.long), steps=torch.zeros(nodes + 1), seed=torch.tensor(0))
        for name, t in state.items():
            self.register_buffer(name, t)
        self.table.home, self.saved = self, self.slot.clone()

    def _apply(self, fn, recurse=True):                        # .to() and to_empty() move what stands for the blocks, and no block
        self.table = nn.Parameter(fn(self.table.detach()[:1, :1]).zero_().expand(self.table.shape), self.table.requires_grad)
        self.table.home = self
        return self

    def init(self, rows, nodes, g):
        self.seed.fill_(g.initial_seed())

    def gather(self, table, nodes, sparse):
        if torch.is_grad_enabled():
            return gather_rows(table, nodes, sparse) + self.read(nodes)[0]               # zeros that have the gradient, and the blocks
        if self.kept is None or not torch.equal(self.kept[0], nodes):                    # else the last prompt's, of the same node
            self.kept = nodes, self.read(nodes)[0]
        return self.kept[1]

    @torch.no_grad()
    def read(self, nodes, parts=1):
        """nodes (U,) -> their blocks (U, s_l) and, with parts=3, both moments, on the device."""
        rows = torch.zeros(len(nodes), parts, self.size[-1], device="cpu")
        for row, node in zip(rows, nodes.tolist()):
            if self.slot[node]:
                row.copy_(self.home[node, self.slot[node] - 1, :parts])
            else:
                super().init(row[:1], [node], torch.Generator().manual_seed(int(self.seed)))
        return rows.to(self.table.device).unbind(1)

    def fetch(self, nodes):                                    # for the optimizer, with the state that it keeps of the blocks
        block, m, v = self.read(nodes, 3)
        return block, {"steps": self.steps[nodes.cpu()].to(block.device), "exp_avg": m, "exp_avg_sq": v}

    def put(self, nodes, block, state):
        self.home, nodes, self.kept = self.home if self.home.numel() else self.new_home(), nodes.cpu(), None
        self.slot[nodes] = 1 + self.saved[nodes] % self.size[1]
        for part, rows in enumerate((block, state["exp_avg"], state["exp_avg_sq"])):
            self.home[nodes, self.slot[nodes] - 1, part] = rows.cpu()
        self.steps[nodes] = state["steps"].cpu()

    def prefetch(self, nodes):                                 # the system begins to read them from the file; nobody waits
        if self.path is None or not hasattr(os, "posix_fadvise"):
            return
        nodes, size = (nodes % len(self.slot)).unique(), 12 * self.size[-1]              # bytes of a slot: the block and both moments
        with open(self.path, "rb") as file:
            for node in nodes[self.slot[nodes] > 0].tolist():
                os.posix_fadvise(file.fileno(), (node * self.size[1] + int(self.slot[node]) - 1) * size, size, os.POSIX_FADV_WILLNEED)

    def new_home(self):
        if self.path is None:                                  # pages of zeros, which take memory when they are written to
            import numpy as np
            return torch.from_numpy(np.zeros(self.size, np.float32))
        self.path.unlink(missing_ok=True)
        if 4 * math.prod(self.size) > (free := shutil.disk_usage(self.path.parent).free):
            print(f"{self.path} may grow to {4e-9 * math.prod(self.size):.1f} GB and {1e-9 * free:.1f} GB are free: a full disk would kill the run")
        return torch.from_file(str(self.path), shared=True, size=math.prod(self.size)).view(self.size)

    def settle(self, path, saved):
        """saved: the run's checkpoint has this very state. Else it begins, with the blocks that were loaded, no moments, and a home of its own."""
        self.path, begun = path if self.size[1] == 2 else None, self.home
        if not saved:
            self.home = self.new_home()
            for node in self.slot.nonzero()[:, 0].tolist():
                self.home[node, 0, 0] = begun[node, self.slot[node] - 1, 0]
            self.slot.clamp_(max=1)
            self.steps.zero_()
        self.saved = self.slot.clone()

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[prefix + "table"]
        if self.size[1] == 2:
            destination[prefix + "home"] = torch.empty(0)      # sample.py's load_checkpoint() puts the file here
        if self.path is not None:
            with open(self.path, "rb+") as file:
                os.fsync(file.fileno())

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, unexpected, errors):
        state = [state_dict.get(prefix + name) for name in ("home", "slot", "steps", "seed")]
        if any(t is None for t in state) or state[0].numel() not in (0, math.prod(self.size)):
            return errors.append(f"{prefix}home, slot, steps and seed are not whole")
        (self.home, self.slot, self.steps, self.seed), self.kept = state, None
        self.home, self.saved = self.home.view(self.size) if self.home.numel() else self.home, self.slot.clone()


LEVELS |= {"cpu": Away, "disk": functools.partial(Away, slots=2)}


def settle(self, folder, saved):
    """train.py's folder, at the start of a run and after every checkpoint, and whether a checkpoint there has the state of this moment."""
    for l, level in self.bank.items():
        if isinstance(level, Away):
            level.settle(Path(folder) / f"ckpt.bank.{l}.home", saved)


def prefetch(self, context):
    """train.py's next batch, while the one before it is computed: its blocks, of the levels on disk."""
    for l, level in self.bank.items():
        if isinstance(level, Away) and "leaf" in context:
            level.prefetch(context["leaf"] // (self.config.nodes[-1] // self.config.nodes[int(l) - 1]))


# ---------------------------------------------------------------- the retriever: embedders, the tree, the walk (section 2.1, Appendix C)

class HashEmbedder:
    """Words in 32,768 buckets, weighted tf-idf, reduced to 128 dimensions by a truncated SVD of the training windows. Nothing to download."""
    name, buckets = "hash", 32768

    def __init__(self, state, path=""):
        self.state = state                                     # idf (buckets,), projection (buckets, c)

    @classmethod
    def fit(cls, texts, path=""):
        counts = cls.count(texts)
        present = torch.bincount(counts.indices()[1], minlength=cls.buckets)
        idf = ((1 + len(texts)) / (1 + present)).log() + 1
        weighted = torch.sparse_coo_tensor(counts.indices(), counts.values() * idf[counts.indices()[1]], counts.shape, check_invariants=False)
        size = torch.sparse.mm(weighted * weighted, torch.ones(cls.buckets, 1)).sqrt()
        unit = weighted.coalesce().values() / size[counts.indices()[0], 0]
        unit = torch.sparse_coo_tensor(counts.indices(), unit, counts.shape, check_invariants=False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            V = torch.svd_lowrank(unit, q=min(128, len(texts)), niter=4)[2]
        return cls({"idf": idf, "projection": V.contiguous()})

    @classmethod
    def count(cls, texts):                                     # (N, buckets) sparse: 1 + log of each word's count
        triples = [(n, bucket(word), 1 + math.log(count)) for n, text in enumerate(texts)
                   for word, count in Counter(re.findall(r"\w+", text.lower())).items()]
        rows, columns, values = zip(*triples) if triples else ((), (), ())
        return torch.sparse_coo_tensor(torch.tensor([rows, columns], dtype=torch.long).view(2, -1), torch.tensor(values, dtype=torch.float32),
                                       (len(texts), cls.buckets), check_invariants=False).coalesce()

    def __call__(self, texts):
        return F.normalize(torch.sparse.mm(self.count(texts), self.state["idf"][:, None] * self.state["projection"]))


@functools.lru_cache(2 ** 20)
def bucket(word):                                              # Python's own hash() differs from run to run
    return zlib.crc32(word.encode()) % HashEmbedder.buckets


class MiniLM:
    """all-MiniLM-L6-v2, the paper's embedder: mean of the last states of up to 256 word pieces."""
    name, probe = "minilm", "The embedder of a tree of clusters must not change."

    def __init__(self, state, path=""):
        try:
            from transformers import AutoModel, AutoTokenizer
        except ImportError:
            raise ValueError("embedder=minilm needs transformers: pip install transformers") from None
        path = path or "sentence-transformers/all-MiniLM-L6-v2"
        try:
            self.tokenizer, self.model = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path).eval()
        except (OSError, ValueError) as error:
            raise ValueError(f"embedder=minilm: {path} cannot be loaded ({str(error).splitlines()[0]}); "
                             "--embedder_path=FOLDER names a local copy") from None
        seen = self([self.probe])[0]
        self.state = state or {"probe": seen}                  # what it makes of one sentence: another model would show
        if self.state["probe"].shape != seen.shape or self.state["probe"] @ seen < 0.999:
            raise ValueError(f"{path} is another embedder than the one that the tree was made with")

    @classmethod
    def fit(cls, texts, path=""):
        return cls({}, path)

    @torch.no_grad()
    def __call__(self, texts):
        found = []
        for first in range(0, len(texts), 64):
            batch = self.tokenizer(texts[first:first + 64], padding=True, truncation=True, max_length=256, return_tensors="pt")
            weight = batch["attention_mask"][:, :, None].float()
            found.append((self.model(**batch).last_hidden_state * weight).sum(1) / weight.sum(1))
        return F.normalize(torch.cat(found))


EMBEDDERS = {"hash": HashEmbedder, "minilm": MiniLM}


def walk(x, centroids, blocked=()):
    """The greedy walk: embeddings x (N, c) -> path (N, p), the node at every level.

    centroids: of every level, (n_l, c); node i's children are i*k ... i*k + k-1. blocked: (level, node) pairs, levels from 1,
    that may not be entered: the next nearest sibling is (Figure 6b).
    """
    node, path = torch.zeros(len(x), dtype=torch.long), []
    for level, (c, above) in enumerate(zip(centroids, [1] + [len(c) for c in centroids]), 1):
        k = len(c) // above
        child = node[:, None] * k + torch.arange(k)                                      # (N, k)
        distance = (x[:, None] - c[child]).square().sum(-1)
        for closed in [n for l, n in blocked if l == level]:
            distance[child == closed] = math.inf
        if distance.isinf().all(1).any():
            raise ValueError(f"every node of level {level} that this text could enter is blocked: leave one of its siblings open")
        node = child.gather(1, distance.argmin(1, keepdim=True))[:, 0]
        path.append(node)
    return torch.stack(path, 1)


def k_means(x, k, generator, sample=6400, steps=20, limit=1.5):
    """k centroids of x (N, c): k-means++ and then EM, every step on a fresh sample. A cluster with more than limit/k of the sample gives half of
    its points, drawn at random, to the smallest; so the E-step is balanced, the M-step is the plain mean."""
    draw = lambda: x[torch.randperm(len(x), generator=generator)[:sample]]
    points = draw()
    centroids = points[:1]
    while len(centroids) < k:
        distance = torch.cdist(points, centroids).amin(1).square() + 1e-12
        centroids = torch.cat((centroids, points[torch.multinomial(distance, 1, generator=generator)]))
    for _ in range(steps):
        points = draw()
        nearest = torch.cdist(points, centroids).argmin(1)
        counts = torch.bincount(nearest, minlength=k)
        for large in counts.argsort(descending=True)[:int((counts > limit * len(points) / k).sum())].tolist():
            members = (nearest == large).nonzero()[:, 0]
            half = members[torch.randperm(len(members), generator=generator)[:len(members) // 2]]
            nearest[half] = torch.bincount(nearest, minlength=k).argmin()
        counts = torch.bincount(nearest, minlength=k)[:, None]
        sums = torch.zeros_like(centroids).index_add_(0, nearest, points)
        centroids = torch.where(counts > 0, sums / counts.clamp(min=1), centroids)       # not normalised again
    return centroids


class Retriever:
    """Text -> path in the tree. One npz file holds centroids, the embedder's state and their hash, which data and checkpoints carry."""

    def __init__(self, embedder, clusters, centroids):
        self.embedder, self.clusters, self.centroids = embedder, clusters, centroids

    @classmethod
    def fit(cls, x, clusters, embedder, seed=0):
        """The tree over the unit vectors x (N, c), from the root to the leaves."""
        generator, node, centroids, above = torch.Generator().manual_seed(seed), torch.zeros(len(x), dtype=torch.long), [], 1
        for level, k in enumerate(map(int, clusters.split(",")), 1):
            order, counts = node.argsort(stable=True), torch.bincount(node, minlength=above)
            if counts.min() < 4 * k:
                raise ValueError(f"clusters={clusters}: at level {level} a node has {counts.min()} windows to split {k} ways and needs {4 * k}: "
                                 "take fewer clusters, a smaller window, or more text")
            centroids.append(torch.cat([k_means(x[members], k, generator) for members in order.split(counts.tolist())]))
            node, above = torch.cat([walk(part, centroids)[:, -1] for part in x.split(1024)]), above * k
        return cls(embedder, clusters, centroids)

    def path(self, texts, blocked=()):
        """texts -> (N, p) int64: the nodes that a text's path goes through, numbered from 0 at every level."""
        return torch.cat([walk(part, self.centroids, blocked) for part in self.embedder(texts).split(1024)])

    def arrays(self):
        state = {f"state_{name}": value for name, value in self.embedder.state.items()}
        return {name: value.numpy() for name, value in (state | {f"centroids_{l}": c for l, c in enumerate(self.centroids, 1)}).items()}

    @property
    def hash(self):
        content = hashlib.sha256(f"{self.embedder.name} {self.clusters}".encode())
        for name, array in sorted(self.arrays().items()):
            content.update(f"{name} {array.shape}".encode() + array.tobytes())
        return content.hexdigest()[:16]

    def save(self, path):
        import numpy as np
        np.savez(path, embedder=self.embedder.name, clusters=self.clusters, **self.arrays())

    @classmethod
    def load(cls, path, embedder_path=""):
        import numpy as np
        try:
            with np.load(path) as file:
                arrays = {name: file[name] for name in file.files}
            name, clusters = str(arrays.pop("embedder")), str(arrays.pop("clusters"))
            centroids = [torch.from_numpy(arrays.pop(f"centroids_{l + 1}")) for l in range(len(clusters.split(",")))]
        except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} is missing, or not a whole retriever file ({error}): prepare_fineweb.py --clusters= writes it") from None
        state = {key.removeprefix("state_"): torch.from_numpy(value) for key, value in arrays.items()}
        return cls(EMBEDDERS[name](state, embedder_path), clusters, centroids)


@torch.inference_mode()
def load_times(self):
    """Lines for sample.py --bench: what a prompt waits for its block of each level, after a prompt of another node and after one of the same."""
    for l, level in self.bank.items():
        nodes, times = level.slot.argsort(descending=True) if isinstance(level, Away) else torch.arange(len(level.table)), []
        for node in [*nodes[:16], nodes[:16][-1]]:
            start = time.perf_counter()
            level(node[None].to(level.table.device)).sum().item()
            times.append(1000 * (time.perf_counter() - start))
        yield (f"level {l}, {self.config.places[int(l) - 1]}: {4 * level.table.size(1) / 2 ** 20:.2f} MiB a block, "
               f"{sorted(times[:-1])[len(times) // 2]:.2f} ms from another node, {times[-1]:.2f} from the same")


def prompt_context(self, text, places, leaf="", block="", embedder_path=""):
    """What sample.py's prompt fetches -> (context, a line that says so). leaf: generic | none | a leaf's number | "", the prompt's path in the
    tree of retriever.npz, which lies in one of the folders `places`. block: nodes that may not be entered, "level:node,..." or "best:level"."""
    config = self.config
    if config.kind is None or leaf == "none":
        return {"leaf": None}, "no memory"
    if leaf == "generic" or not leaf and not text:
        return {"leaf": -1}, "generic memory" + (": there is no prompt" if not leaf else "")
    if leaf:
        if not leaf.isdigit() or int(leaf) >= config.nodes[-1]:
            raise ValueError(f"leaf={leaf}: generic, none, or a leaf from 0 to {config.nodes[-1] - 1}")
        path = [int(leaf) // (config.nodes[-1] // n) for n in config.nodes]
    elif not config.retriever:
        return {"leaf": -1}, "generic memory: the model was trained on data without a tree"
    else:
        files = [place / "retriever.npz" for place in map(Path, places) if (place / "retriever.npz").exists()]
        if not files:
            raise ValueError(f"no retriever.npz in {' or '.join(map(str, places))}: copy it from the data folder, or give --leaf=generic")
        retriever = Retriever.load(files[0], embedder_path)
        if retriever.hash != config.retriever:
            raise ValueError(f"{files[0]} is the tree {retriever.hash}, the model was trained with {config.retriever}: its blocks mean nothing here")
        best = retriever.path([text])[0].tolist()
        if not re.fullmatch(r"(best:\d+|\d+:\d+)(,(best:\d+|\d+:\d+))*|", block):
            raise ValueError(f"block={block}: level:node, several by commas, or best:level")
        pairs = [pair.split(":") for pair in block.split(",") if pair]
        if any(not 1 <= int(n if l == "best" else l) <= len(best) for l, n in pairs):
            raise ValueError(f"block={block}: the levels are 1 to {len(best)}")
        path = retriever.path([text], [(int(n), best[int(n) - 1]) if l == "best" else (int(l), int(n)) for l, n in pairs])[0].tolist()
    sizes = f"{sum(config.level_sizes):,} of the bank's {self.param_counts()['memory']:,} parameters"
    return {"leaf": torch.tensor([path[-1]])}, f"path {' > '.join(map(str, path))}: fetched {sizes}"


# ---------------------------------------------------------------- foreign checkpoints

FOREIGN = dict(memory="none", qk_norm=False)   # fields of a foreign model's Config that its config.json does not decide


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


# ---------------------------------------------------------------- training: which memory, which subtree

def training_context(self, context, seed, rows):
    """What the training sequences of the global rows `rows` fetch: the generic memory with probability 1/(k_1 + 1), drawn from
    (seed, row) so that it depends on nothing else, or the path of their leaf (section 4). A subtree's job has one kind."""
    share = 1 / (self.config.factors[0] + 1) if self.config.generic == -1 else self.config.generic
    share = share if not self.config.subtree else float(self.config.subtree == "generic")
    drawn = torch.tensor([random.Random(f"{seed} {row}").random() < share for row in rows])
    return {**context, "leaf": context["leaf"].masked_fill(drawn, -1)} if "leaf" in context else context


def training_and_placement(self):                              # Config's rules for how memories train and where they are
    self.check(self.generic == -1 or 0 <= self.generic <= 1, "generic", "must be between 0 and 1, or -1 (automatic)")
    self.check(self.memory_lr > 0, "memory_lr", "must be positive")
    self.check(self.kind or not (self.frozen or self.subtree), "memory frozen subtree", "without memories there is nothing else to train")
    inner = [f"{l}:{i}" for l, n in enumerate(self.nodes, 1) for i in range(n)]
    self.check(self.subtree in ("", "generic", *map(str, range(self.factors[0])), *inner), "subtree clusters",
               f"choose 0 to {self.factors[0] - 1}, or generic, or level:node")
    self.check(self.frozen or not self.subtree, "subtree frozen", "jobs that are to be merged share their anchor: add frozen=True")
    self.check(self.sparse_memory or not self.subtree, "subtree sparse_memory", "a job leaves all other blocks as they are: sparse_memory=True does")
    self.check(self.retriever or not self.subtree, "subtree retriever", "the data has no tree: prepare it with --clusters=8,8")
    self.check(LEVELS.keys() >= {*self.places} and len(self.places) == len(self.factors), "placement clusters", "device, cpu or disk for each level")
    self.check(self.sparse_memory or {*self.places} == {"device"}, "placement sparse_memory", "off the device only fetched blocks can be updated")


def wanted(self, context):
    """(N,) bool: which of the data's sequences a subtree's job trains on; None: all."""
    if self.subtree in ("", "generic"):
        return None
    return (context["leaf"] // (self.nodes[-1] // self.nodes[self.root - 1]) == int(self.subtree.rpartition(":")[2])).numpy()


def start(path, ckpt, fields):
    """train.py's --init_from=PATH, an anchor to which memories are added, or a model that has them: ckpt is PATH's checkpoint, fields are those
    of Config that were given or that the data has -> {"model_config", "model"}; tables that the start lacks get their initial values."""
    if ckpt is None:
        model = from_pretrained(path)
        ckpt = {"model_config": dict(vars(model.config)), "model": model.state_dict()}
    have, free = ckpt["model_config"], {"frozen", "subtree", "generic", "memory_lr", "block_size", "sparse_memory"}
    if unknown := have.keys() - Config.__dataclass_fields__.keys():
        raise ValueError(f"{path} is a checkpoint of another model: it has {', '.join(sorted(unknown))}")
    free |= {"memory", "clusters", "ranks", "layers", "placement", "retriever"} if have["memory"] == "none" else set()
    for key in fields.keys() - free - {"eot"}:                 # the anchor has learnt its own way with documents
        if fields[key] not in (-1, "", have.get(key)):
            raise ValueError(f"{key}={fields[key]}: {path} has {key}={have.get(key)}; leave {key} out, or take data with its tree")
    config = Config(**{**have, **{key: fields[key] for key in free & fields.keys()}})
    return {"model_config": dict(vars(config)), "model": ckpt["model"]}


def rows_of(ckpt, l):
    """{name: tensor (n_l + 1, ...)}: all that a checkpoint has of the nodes of level l, and what RowAdamW, its last optimizer, keeps of them."""
    config = Config(**ckpt["model_config"])
    trained = [level for level, size in enumerate(config.level_sizes, 1) if size and level >= config.root and config.sparse_memory]
    rows = {key: t for key, t in ckpt["model"].items() if key.startswith(f"bank.{l}.") and t.dim()}
    rows |= ckpt["optimizers"][-1]["state"].get(trained.index(l), {}) if l in trained else {}
    return {key: t.view(config.nodes[l - 1] + 1, -1) for key, t in rows.items()}


def write_bank(folder, ckpt):                                  # the levels on disk are in their files already
    from sample import write_checkpoint
    files = {f"bank.{l}.home": torch.empty(0) for l, place in enumerate(ckpt["model_config"]["placement"].split(","), 1) if place == "disk"}
    for key in files.keys() & ckpt["model"].keys():
        with open(Path(folder) / f"ckpt.{key}", "rb+") as file:
            os.fsync(file.fileno())
    write_checkpoint(Path(folder) / "ckpt.pt", {**ckpt, "model": {key: files.get(key, t) for key, t in ckpt["model"].items()}})


def merge(folders, out):
    """The checkpoints of asynchronous jobs, one for each level-1 subtree and one for the generic blocks -> out/ckpt.pt with everything that they
    learnt, moments too. ValueError if the jobs had other anchors or trees, if one is missing or there twice."""
    from sample import load_checkpoint
    jobs = {}
    for folder in folders:
        ckpt = load_checkpoint(folder)
        name = ckpt["model_config"].get("subtree", "")
        if not name or name in jobs or ":" in name:
            raise ValueError(f"{folder} " + (f"is a second job of subtree {name}" if name in jobs else "was not trained with --subtree=, of level 1"))
        jobs[name] = ckpt
    if "generic" not in jobs:
        raise ValueError("these jobs are missing: generic")
    merged = jobs.pop("generic")
    config = Config(**{**merged["model_config"], "subtree": ""})
    for name, ckpt in jobs.items():
        if {**ckpt["model_config"], "subtree": ""} != vars(config):
            raise ValueError(f"the job of subtree {name} has another model or tree than the others")
        if any(not torch.equal(t, merged["model"][key]) for key, t in ckpt["model"].items() if not key.startswith("bank.")):
            raise ValueError(f"the job of subtree {name} started from another anchor than the others")
    if missing := set(map(str, range(config.factors[0]))) - jobs.keys():
        raise ValueError(f"these jobs are missing: {', '.join(sorted(missing))}")
    Path(out).mkdir(parents=True, exist_ok=True)
    for l in sorted({int(key.split(".")[1]) for key in merged["model"] if key.startswith("bank.")}):
        key, file, n = f"bank.{l}.home", Path(out) / f"ckpt.bank.{l}.home", config.nodes[l - 1]
        rows = {name: rows_of(ckpt, l) for name, ckpt in {**jobs, "generic": merged}.items()}
        if config.places[l - 1] == "disk":
            file.unlink(missing_ok=True)
            merged["model"][key] = torch.from_file(str(file), shared=True, size=merged["model"][key].numel())
        for name, ours in rows_of(merged, l).items():
            for node in range(n + 1):
                theirs = rows[str(node * config.factors[0] // n) if node < n else "generic"]
                if name != key or theirs[f"bank.{l}.slot"][node]:                        # what was never written stays a hole in the file
                    ours[node] = theirs[name][node]
    write_bank(out, merged | {"model_config": dict(vars(config)), "config": {**merged["config"], "out_dir": str(out)}})
    for file in [Path(folders[0]) / name for name in ("tokenizer.json", "retriever.npz") if (Path(folders[0]) / name).exists()]:
        (Path(out) / file.name).write_bytes(file.read_bytes())


def remove(folder, nodes):
    """Takes blocks, "level:node,...", out of the checkpoint in `folder`: they are again as before any training, when a block adds nothing to any
    text. (Keys of kv memories still take their share of the softmax.) Full removal of a document takes all blocks of its path, and a frozen
    anchor and generic blocks that never saw it."""
    from sample import load_checkpoint
    ckpt, later = load_checkpoint(folder), []
    config = Config(**ckpt["model_config"])
    levels = {f"{l}:{node}": (l, node) for l, n in enumerate(config.nodes, 1) for node in range(n) if config.level_sizes[l - 1]}
    if unknown := [pair for pair in nodes.split(",") if pair not in levels]:
        raise ValueError(f"{folder} has no block {unknown[0]}: level:node, several by commas")
    if not config.sparse_memory:
        raise ValueError(f"{folder} was trained with sparse_memory=False: AdamW's moments would move what is removed when training goes on")
    with torch.device("meta"):
        bank = Model(config).bank
    for l, node in (levels[pair] for pair in nodes.split(",")):
        for name, rows in rows_of(ckpt, l).items():
            if name.endswith("table"):
                bank[str(l)].init(rows[node:node + 1], [node], torch.Generator().manual_seed(l))
            elif name.endswith("home") and config.places[l - 1] == "disk":
                later.append(rows[node])
            else:
                rows[node] = 0                                 # a slot too: initial values
    write_bank(folder, ckpt)
    for row in later:                                          # which the checkpoint no longer names
        row.zero_()


@torch.no_grad()
def inspect(self, idx, leaf=-1):
    """How far the memory moves the residual stream of idx (1, T): {"memory": (layers, T)}, in parts of the anchor's own norm."""
    streams = []
    hooks = [block.register_forward_hook(lambda block, x, y: streams.append(y[0])) for block in self.blocks]
    try:
        self(idx, leaf=leaf)
        self(idx, leaf=None)
    finally:
        for hook in hooks:
            hook.remove()
    ours, anchor = torch.stack(streams).float().chunk(2)   # (layers, T, d)
    return {"memory": ((ours - anchor).norm(dim=-1) / anchor.norm(dim=-1), ("layer", "token"))} if self.bank else {}


Model.training_context, Model.prompt_context, Model.inspect, Config.wanted = training_context, prompt_context, inspect, wanted
Model.from_pretrained, Model.settle, Model.prefetch, Model.load_times = staticmethod(from_pretrained), settle, prefetch, load_times
CHECKS.append(training_and_placement)


if __name__ == "__main__":                                     # python model_hiermem.py out/job-* out/merged; remove out/all 2:17
    try:
        remove(*sys.argv[2:]) if sys.argv[1:2] == ["remove"] else merge(sys.argv[1:-1], sys.argv[-1])
    except (ValueError, IndexError, TypeError) as error:
        sys.exit(f"model_hiermem.py: {error}; usage: python model_hiermem.py JOB_FOLDERS... MERGED_FOLDER, or remove FOLDER LEVEL:NODE,...")
