"""
Hierarchical memories (Pouransari et al. 2025, "Pretraining with Hierarchical Memories: Separating
Long-Tail and Common Knowledge").

The idea: a small *anchor* model is always in use; the knowledge of special topics lies in a large
*bank* of parameters, one block for every node of a tree of clusters over the training text. The
text at hand (a window of a document, or a prompt) is embedded and walked down the tree, and the
blocks W_{l,i_l} on its path are fetched and added to the model for the whole sequence. A block is
updated by text of its own topic alone, so rare facts are not overwritten, and a model with billions
of parameters in its bank runs with 10% more than its anchor. Level l has n_l = k_1 ... k_l nodes.

    I(x)     = (i_1, ..., i_p)          greedy walk: always to the nearest of a node's k_l centroids
    R(x; W)  = [W_{1,i_1}, ..., W_{p,i_p}]                                                 eq. 2.2
    L(x)     = - sum_t log P_{theta, R(x; W)}(x_t | x_<t)                                  eq. 2.1
    |R|      = s_1 + ... + s_p            numbers are fetched
    |W|      = n_1 s_1 + ... + n_p s_p    numbers are in the bank

FFN memories (the default) widen the SwiGLU of every layer by r = r_1 + ... + r_p channels,
s_l = 3 r_l d n_layer:

    y = W3 (silu(W1 x) * W2 x)  +  M3 (silu(M1 x) * M2 x)       W1, W2, W3: MLP's gate, up, down
    M1, M2, M3^T (r, d) are fetched; M3 = 0 at first

      text --embed--> phi --walk--> path   bank, level 1: [ ][#][ ][ ]              generic [ ]
                                      |          level 2: [ ][ ][ ][ ][ ][#][ ] ... generic [ ]
                                      +---------------------------- R(x; W) ---+
      tokens --> embed --> [ attention, FFN + fetched FFN memory ] x L --> head

Every level also has a *generic* block, for any text, not counted in |W|: a training sequence takes
those of all levels with probability 1/(k_1 + 1), else the blocks of its path (section 4 says
so of co-training; here frozen anchors, too). A leaf is a window's, as in Appendix C (A.2 speaks of
a document's), found from all of it: validation, too, is told the topic, which is worth
log(leaves) nats a window at most. Below the fold are the other kinds of memory.
The tree is made and walked by experiments/topics.py; experiments/bank.py trains a bank in jobs and
takes blocks out of it. The anchor alone, and then with memories (Table 1, A1 and A2; with
--frozen=True A3; the paper's rates for them are at RECIPE). The last command reads the anchor's
batches again; with --skip_steps=N, the anchor's steps, it reads on.

    python prepare_fineweb.py --source=TEXTS --clusters=8,8 --out=data/topics
    python train.py --model=hiermem --dense=True --dataset=topics --out_dir=out/anchor
    python train.py --model=hiermem --init_from=out/anchor --memory=ffn --dataset=topics
"""
import functools
import math
import random
import re
import zlib
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from kernels import attend, gather_rows, gather_sum, linear_cross_entropy, rms_norm


@dataclass
class Config:
    vocab_size: int = 50432       # tokens
    block_size: int = 2048        # tokens of context in training
    n_layer: int = 35             # L
    n_head: int = 12              # H, query heads (the paper's h)
    n_kv_head: int = -1           # key/value heads; -1: n_head (fewer in anchors like Llama 3)
    head_dim: int = -1            # d_h; -1: n_embd/n_head (OpenLM-160M: 32)
    n_embd: int = 512             # d, width
    n_inner: int = -1             # d_f, width of the MLP's hidden layer; -1: 4*n_embd
    tied: bool = True             # one matrix for the embedding and the head
    norm_eps: float = 1e-5        # of the norms
    qk_norm: bool = True          # norm of queries and keys over their whole width, before RoPE
    qkv_bias: bool = False        # biases of queries, keys and values (Qwen2.5)
    rope_base: float = 100000.0   # of the rotary embedding
    rope_scaling: str = ""        # Llama 3's, factor:low:high:context: 32:1:4:8192 (3.2 1B)
    eot: int = -1                 # opens a document or window; attention stays inside; -1: none
    memory: str = "ffn"           # ffn | lora_qk | lora_vo | lora_ffn | kv | none
    clusters: str = "8,8"         # k_1,...,k_p: children of a node, root to leaves (paper: 16 each)
    ranks: str = "64,24"          # r_1,...,r_p: FFN channels, LoRA ranks or key-value pairs
    memory_layers: str = "all"    # all | early | middle | late: 2L/7 of them (Table 9: 10 of 35)
    generic: float = -1.0         # share of sequences with the generic memory; -1: 1/(k_1 + 1)
    memory_lr: float = 1.0        # learning rate of the bank, in units of the anchor's
    frozen: bool = False          # only memories are trained
    bank_device: str = "device"   # device | cpu: the bank stays in host memory, its blocks travel
    sparse_memory: bool = True    # only fetched blocks cost time; False: AdamW over the whole bank
    retriever: str = ""           # content hash of the blocks' tree; set from the data

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
        for name in "vocab_size block_size n_layer n_head n_kv_head n_embd n_inner".split():
            self.check(getattr(self, name) > 0, name, "must be at least 1")
        if self.head_dim == -1:
            self.head_dim = self.n_embd // self.n_head
        even = self.head_dim > 1 and self.head_dim % 2 == 0
        self.check(even, "n_embd n_head head_dim", "head_dim must be even")
        grouped = self.n_head % self.n_kv_head == 0
        self.check(grouped, "n_head n_kv_head", "n_head must be a multiple of n_kv_head")
        inside = -1 <= self.eot < self.vocab_size
        self.check(inside, "eot vocab_size", "eot must be a token of the vocabulary, or -1")
        share = self.generic == -1 or 0 <= self.generic <= 1
        self.check(share, "generic", "must be between 0 and 1, or -1 (automatic)")
        self.check(self.memory_lr > 0, "memory_lr", "must be positive")
        self.check(self.rope_base > 0, "rope_base", "must be positive")
        self.check(self.norm_eps >= 0, "norm_eps", "must not be negative")
        if self.rope_scaling:
            four = re.fullmatch(r"[0-9]*[.]?[0-9]+(:[0-9]*[.]?[0-9]+){3}", self.rope_scaling)
            self.check(four, "rope_scaling", "give factor:low:high:context, like 32:1:4:8192")
            factor, low, high, context = map(float, self.rope_scaling.split(":"))
            self.check(low < high, "rope_scaling", "factor:low:high:context needs low < high")
            self.check(min(factor, context) > 0, "rope_scaling", "factor, context must be positive")
        self.check(self.bank_device in ("device", "cpu"), "bank_device", "choose device or cpu")
        self.check_memory()

    def check_memory(self):
        if self.memory not in ("ffn", "none"):
            self.check(self.memory in MEMORIES, "memory", f"choose none, {', '.join(MEMORIES)}")
        known = self.memory_layers in ("all", "early", "middle", "late")
        self.check(known, "memory_layers", "choose all, early, middle, late")
        numbers = r"[0-9]+(,[0-9]+)*"
        ok = re.fullmatch(numbers, self.clusters) and min(self.factors) > 1
        self.check(ok, "clusters", "a factor of 2 or more for each level of the tree, like 8,8")
        if self.memory == "none":
            self.check(not self.frozen, "memory frozen", "nothing is left to train")
            return
        rule = "a rank for each level, like 64,24, and not all of them 0: that is memory=none"
        ok = re.fullmatch(numbers, self.ranks) and self.ranks.count(",") == self.clusters.count(",")
        self.check(ok and any(self.level_ranks), "clusters ranks", rule)

    @classmethod
    def from_depth(cls, depth, **overrides):
        """The depth dial: width 64*depth in heads of 64 channels."""
        fields = dict(n_layer=depth, n_embd=64 * depth, n_head=depth)
        return cls(**{**fields, **overrides})

    @property
    def kind(self):
        """The class of memory; None: no memory."""
        if self.memory == "none":
            return None
        if self.memory == "ffn":
            return FFN
        return MEMORIES[self.memory]                           # below the fold

    @property
    def layers(self):
        """The layers that have a memory: all, or 2L/7 of them (Table 9)."""
        L = self.n_layer
        if self.memory_layers == "all":
            return range(L)
        n = max(1, round(2 * L / 7))
        first = dict(early=0, middle=(L - n) // 2, late=L - n)[self.memory_layers]
        return range(first, first + n)

    @property
    def factors(self):
        """k_l: children of a node."""
        return [int(k) for k in self.clusters.split(",")]

    @property
    def nodes(self):
        """n_l = k_1 ... k_l."""
        return list(accumulate(self.factors, mul))

    @property
    def level_ranks(self):
        """r_l in a layer that has a memory: fewer such layers have more each."""
        if self.kind is None:
            return [0] * len(self.factors)
        share = self.n_layer / len(self.layers)
        return [round(int(r) * share) for r in self.ranks.split(",")]

    @property
    def level_sizes(self):
        """s_l: numbers in a block."""
        if self.kind is None:
            return [0] * len(self.factors)
        width = len(self.layers) * sum(self.kind.widths(self).values())
        return [r * width for r in self.level_ranks]


# Tables 4 to 6 with the memories of rows A2, B2, C2 of Table 1; --dense=True: the anchors alone,
# in the paper with --block_size=8192.
PRESETS = {
    "openlm_160m": dict(n_layer=35, n_embd=512, n_head=12, head_dim=32,
                        clusters="16,16,16,16", ranks="256,64,16,0"),
    "openlm_410m": dict(n_layer=24, n_embd=1024, n_head=16, n_inner=2816, tied=False,
                        clusters="16,16,16,16", ranks="512,128,32,0"),
    "openlm_1b": dict(n_layer=24, n_embd=2048, n_head=16, n_inner=5632, tied=False,
                      clusters="16,16,16,16", ranks="768,256,16,0"),
}
DENSE = dict(memory="none", frozen=False)
# The paper's for an anchor (A.1); its warm-up is 1% of that run, train.py's 2%. All runs take it;
# give the others' by hand: for memories, with or without the anchor (A.2), --learning_rate=1e-4
# --min_lr=1e-5 --weight_decay=1e-3; for both from scratch (A.5) 1e-3, 1e-5 and 0.1. (Small models
# want more than 1e-4: experiments/hiermem_table1.py.)
RECIPE = {
    "adamw": dict(learning_rate=5e-3, min_lr=5e-5, weight_decay=0.05, beta1=0.9, beta2=0.95,
                  grad_clip=1.0, schedule="cosine"),
}


# ---------------------------------------------------------------- the backbone
# OpenLM, which is Llama with a norm of queries and keys. (OpenLM's norms are LayerNorms, the paper
# names none; these are Llama's.)

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
    def __init__(self, config, layer):
        super().__init__()
        queries = config.n_head * config.head_dim
        keys = config.n_kv_head * config.head_dim
        self.layer = layer
        self.head_dim = config.head_dim
        self.W_Q = nn.Linear(config.n_embd, queries, bias=config.qkv_bias)
        self.W_K = nn.Linear(config.n_embd, keys, bias=config.qkv_bias)
        self.W_V = nn.Linear(config.n_embd, keys, bias=config.qkv_bias)
        self.W_O = nn.Linear(queries, config.n_embd, bias=False)
        self.q_norm = RMSNorm(queries, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(keys, config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x, rotary, mask, memory, cache):
        q = self.q_norm(memory.linear("q", self.W_Q, x)).unflatten(-1, (-1, self.head_dim))
        k = self.k_norm(memory.linear("k", self.W_K, x)).unflatten(-1, (-1, self.head_dim))
        v = memory.linear("v", self.W_V, x).unflatten(-1, (-1, self.head_dim))
        k = rotate(k, rotary)                                  # (B, T, H_kv, d_h), q (B, T, H, d_h)
        if cache is not None:
            k = cache.append((self.layer, "k"), k)             # (B, S, H_kv, d_h)
            v = cache.append((self.layer, "v"), v)
        y = attend(rotate(q, rotary), k, v, mask)              # (B, T, H*d_h)
        return memory.linear("o", self.W_O, memory.heads(q, y))


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

def init_normal(p, std, generator):
    """Normal, cut at three standard deviations."""
    nn.init.trunc_normal_(p, 0, std, -3 * std, 3 * std, generator)


class Memory:
    """What a sequence has fetched for one layer, and the three places of a block where it can act.

    This class does nothing there: it is a layer without memory. A kind of memory overrides some of
    linear(), heads() and mlp(). What is fetched is r rows (FFN channels, LoRA ranks or key-value
    pairs): widths() has the parts of a row, and init() their first values, with which the anchor's
    output stays as it is, bit for bit."""

    def __init__(self, config, weights):
        """weights (B, r, width): the rows of all levels together; None: no memory."""
        if weights is not None:
            widths = self.widths(config)
            self.part = dict(zip(widths, weights.split(list(widths.values()), -1)))

    def linear(self, name, W, x):
        """W x; W is attention's matrix `name`: q, k, v or o."""
        return W(x)

    def heads(self, q, y):
        """The heads' outputs y (B, T, H*d_h); q (B, T, H, d_h) before its rotation."""
        return y

    def mlp(self, mlp, x):
        return mlp(x)


class FFN(Memory):
    """FFN memory (Figure 18): r more channels in the SwiGLU, as a gated product of their own."""

    @staticmethod
    def widths(config):
        return {"gate": config.n_embd, "up": config.n_embd, "down": config.n_embd}

    @staticmethod
    def init(name, part, config, generator):
        if name == "down":
            part.zero_()
        else:
            init_normal(part, config.n_embd ** -0.5, generator)

    def mlp(self, mlp, x):                                     # x (B, T, d)
        M1, M2, M3T = self.part.values()                       # each (B, r, d)
        return mlp(x) + (F.silu(x @ M1.mT) * (x @ M2.mT)) @ M3T


class Level(nn.Module):
    """One level of the bank: table[i] is the block of node i, s_l = layers * r_l * width numbers;
    the last is generic. With bank_device=cpu it stays in host memory wherever the model goes."""

    def __init__(self, config, nodes, rank, size):
        super().__init__()
        self.config = config
        self.shape = (len(config.layers), rank, -1)
        self.stays = config.bank_device == "cpu"
        device = torch.get_default_device()
        if self.stays and device.type != "meta":
            device = "cpu"
        self.table = nn.Parameter(torch.empty(nodes + 1, size, device=device))

    def init(self, rows, generator):
        """Blocks (n, s_l) as they are before any training."""
        kind = self.config.kind
        widths = kind.widths(self.config)
        parts = rows.view(len(rows), *self.shape).split(list(widths.values()), -1)
        for name, part in zip(widths, parts):
            kind.init(name, part, self.config, generator)

    def forward(self, node, device):
        """node (B,) int64, -1: generic -> (B, layers, r_l, width) on the device. A row that
        sequences share is read once, and their gradients add up in it, always in one order."""
        node = node.to(self.table.device) % len(self.table)                # -1: the last row
        distinct, inverse = node.unique(return_inverse=True)
        rows = gather_rows(self.table, distinct, self.config.sparse_memory).to(device)   # (U, s_l)
        inverse = inverse[:, None].to(device)
        rows = gather_sum(rows, inverse, torch.ones_like(inverse, dtype=rows.dtype))     # (B, s_l)
        return rows.view(len(rows), *self.shape)

    def _apply(self, fn, recurse=True):
        """torch calls this for model.to() and to_empty(). A table that stays on the CPU changes its
        dtype but not its device; one that was made on "meta" gets its memory here."""
        if not self.stays:
            return super()._apply(fn, recurse)
        dtype = fn(self.table.detach()[:1]).dtype
        if self.table.is_meta:
            table = torch.empty_like(self.table, dtype=dtype, device="cpu")
            self.table = nn.Parameter(table, self.table.requires_grad)
        else:
            self.table.data = self.table.data.to(dtype)
        return self


class Bank(nn.ModuleDict):
    """W, the memories: {"l": Level} for every level with a rank. A sequence fetches the blocks on
    the path from the root to its leaf, one a level."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        levels = zip(config.nodes, config.level_ranks, config.level_sizes)
        for l, (nodes, rank, size) in enumerate(levels, 1):
            if size:
                self[str(l)] = Level(config, nodes, rank, size)

    @torch.compiler.disable     # how many blocks are distinct depends on the data: a graph break
    def forward(self, leaf, device):
        """R(x; W) (eq. 2.2): leaf (B,) int64 -> {layer: (B, r, width)} on the device."""
        rows = []
        for l, level in self.items():
            below = self.config.nodes[-1] // self.config.nodes[int(l) - 1]   # leaves under a node
            rows.append(level(leaf // below, device))          # -1 // n is -1: generic stays so
        weights = torch.cat(rows, 2)                           # (B, layers, r, width)
        return dict(zip(self.config.layers, weights.unbind(1)))


# ================================================================ the model

class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.attn_norm = RMSNorm(config.n_embd, config.norm_eps)
        self.attn = Attention(config, layer)
        self.mlp_norm = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, rotary, mask, memory, cache):
        x = x + self.attn(self.attn_norm(x), rotary, mask, memory, cache)
        return x + memory.mlp(self.mlp, self.mlp_norm(x))


def own_generator(name, p):
    """A generator for tensor p alone, seeded by torch's seed and p's name: a tensor that two models
    both have, by name and shape, starts with equal values."""
    seed = torch.initial_seed() % 2 ** 31 + zlib.crc32(name.encode())
    return torch.Generator(p.device).manual_seed(seed)


@functools.cache
def say_once(text):
    print(text, flush=True)


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        self.head = None                                       # tied: the embedding's matrix
        if not config.tied:
            self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.requires_grad_(not config.frozen)
        self.bank = Bank(config)

    @torch.no_grad()
    def init_weights(self):
        """OpenLM's: normal, cut at three standard deviations.

            embedding, head, W_Q, W_K, W_V, gate, up    1/sqrt(d)
            W_O                                         1/sqrt(d) / sqrt(2(l+1))
            down                                        1/sqrt(d_f) / sqrt(2(l+1))
            norms 1, biases 0, blocks of the bank as their kind says

        What writes to the residual stream starts smaller in deeper layers (l from 0).
        """
        d, d_f = self.config.n_embd, self.config.n_inner
        for name, p in self.named_parameters():
            generator = own_generator(name, p)
            if name.startswith("bank."):
                self.bank[name.split(".")[1]].init(p, generator)
            elif name.endswith("bias"):
                p.zero_()
            elif p.ndim == 1:
                p.fill_(1)
            elif name.endswith("W_O.weight"):
                layer = int(name.split(".")[1])
                init_normal(p, (d * 2 * (layer + 1)) ** -0.5, generator)
            elif name.endswith("down.weight"):
                layer = int(name.split(".")[1])
                init_normal(p, (d_f * 2 * (layer + 1)) ** -0.5, generator)
            else:
                init_normal(p, d ** -0.5, generator)

    def fetch(self, leaf, B):
        """What B sequences fetch, {layer: (B, r, width)}: leaf (B,) int64, or one for all, or None
        for nothing."""
        if leaf is None or not self.bank:
            return {}
        device = self.embed.weight.device
        leaf = torch.as_tensor(leaf, device=device).expand(B)
        return self.bank(leaf, device)

    def document_mask(self, idx, cache):
        """(B, 1, T, S) bool: which of all S positions each of the last T attends to: those of its
        own document that are not ahead (A.2). None: all that are not ahead."""
        if self.config.eot == -1:
            return None
        here = (idx == self.config.eot).cumsum(1)              # (B, T) number of the document
        if cache is not None and cache.pos:
            here = here + cache.store["documents"][:, cache.pos - 1:cache.pos]
        seen = here if cache is None else cache.append("documents", here)          # (B, S)
        same = here[:, :, None] == seen[:, None]
        return same.tril(seen.size(1) - here.size(1))[:, None]

    def forward(self, idx, targets=None, cache=None, leaf=-1):
        """idx (B, T) int64. With targets (B, T), -1 where there is no loss: (None, mean
        cross-entropy in nats). Without: (logits (B, T, vocab) fp32, None), only the last position's
        when a cache from new_cache() is given. leaf: the leaves that the sequences belong to (B,)
        int64, -1: generic; None: the anchor alone. A cache keeps what its first tokens fetched."""
        config = self.config
        start = 0 if cache is None else cache.pos
        if start:
            fetched = cache.store["memory"]
        else:
            fetched = self.fetch(leaf, len(idx))               # {layer: (B, r, width)}
        rotary = rotary_tables(rotary_frequencies(config, idx.device), start, idx.size(1))
        mask = self.document_mask(idx, cache)
        x = self.embed(idx)                                    # (B, T, d)
        for layer, block in enumerate(self.blocks):
            kind = config.kind if layer in fetched else Memory
            x = block(x, rotary, mask, kind(config, fetched.get(layer)), cache)
        x = self.norm(x)
        if targets is not None:
            return None, linear_cross_entropy(x, (self.head or self.embed).weight, targets)
        if cache is not None:
            cache.pos += idx.size(1)
            cache.store["memory"] = fetched
            x = x[:, -1:]
        return self.logits(x), None

    def logits(self, x):
        return F.linear(x, (self.head or self.embed).weight).float()

    def new_cache(self, batch_size, max_len):
        return Cache(max_len)

    def training_context(self, context, seed, rows):
        """What the training sequences of the global rows `rows` fetch: the generic memory with
        probability 1/(k_1 + 1), drawn from (seed, row) so that it depends on nothing else, or the
        path of their leaf (section 4). rows None: all fetch that path."""
        if "leaf" not in context:
            if self.bank:
                say_once("this text has no tree of topics (--clusters of prepare_fineweb.py makes "
                         "one): only the generic memory is trained")
            return {}
        if rows is None:
            return {"leaf": context["leaf"]}
        share = self.config.generic
        if share == -1:
            share = 1 / (self.config.factors[0] + 1)
        drawn = [random.Random(f"{seed} {row}").random() < share for row in rows]
        return {"leaf": context["leaf"].masked_fill(torch.tensor(drawn), -1)}

    def prompt_context(self, text, folders, leaf="", block="", embedder_path=""):
        """What sample.py's prompt fetches -> (context, a line that says so).

        leaf: generic | none | a leaf's number | "": the prompt's path in the tree of
        retriever.npz, which lies in one of the folders. block: nodes that may not be entered,
        level:node,... or best:level; then the next nearest sibling is (Figure 6b)."""
        config = self.config
        blocked = parse_nodes(config, block)
        if not self.bank or leaf == "none":
            return {"leaf": None}, "no memory"
        if leaf == "generic":
            return {"leaf": -1}, "generic memory"
        if leaf:
            path = leaf_path(config, leaf)
        elif not text:
            return {"leaf": -1}, "generic memory: there is no prompt"
        elif not config.retriever:
            return {"leaf": -1}, "generic memory: the model was trained on data without a tree"
        else:
            retriever = find_retriever(config, folders, embedder_path)
            best = retriever.path([text])[0].tolist()
            blocked = [(l, best[l - 1] if node == "best" else node) for l, node in blocked]
            path = retriever.path([text], blocked)[0].tolist()
        for l, node in blocked:
            if node in (path[l - 1], "best"):
                raise ValueError(f"leaf={leaf}, block={block}: the leaf is under a blocked node "
                                 f"of level {l}; leave one of the two out")
        fetched, bank = sum(config.level_sizes), self.param_counts()["memory"]
        where = f"path {' > '.join(map(str, path))}"
        line = f"{where}: fetched {fetched:,} of the bank's {bank:,} parameters"
        return {"leaf": torch.tensor(path[-1:])}, line

    @torch.no_grad()
    def inspect(self, idx, leaf=-1):
        """How far the memory moves the residual stream of idx (1, T): {"memory": (layers, T)}, as a
        share of the norm of the anchor's own stream."""
        if not self.bank:
            return {}
        anchor = self.streams(idx, None)
        moved = self.streams(idx, leaf) - anchor
        share = moved.norm(dim=-1) / anchor.norm(dim=-1)
        return {"memory": (share, ("layer", "token"))}

    def streams(self, idx, leaf):
        """The residual stream of idx (1, T) after every block: (layers, T, d)."""
        found = []

        def keep(block, inputs, output):
            found.append(output[0].float())

        hooks = [block.register_forward_hook(keep) for block in self.blocks]
        self(idx, leaf=leaf)
        for hook in hooks:
            hook.remove()
        return torch.stack(found)

    def param_groups(self, optimizer, learning_rate, weight_decay):
        """Anchor and bank, both with decay, norms too, as in OpenLM. With sparse_memory a step
        changes only the blocks that were fetched (RowAdamW, "rows"). The paper does not say what
        its AdamW does with the others."""
        anchor = [p for name, p in self.named_parameters() if not name.startswith("bank.")]
        groups = [dict(params=anchor, kind="adamw", lr=learning_rate)]
        if self.bank:
            kind = "rows" if self.config.sparse_memory else "adamw"
            rate = learning_rate * self.config.memory_lr
            groups.append(dict(params=list(self.bank.parameters()), kind=kind, lr=rate))
        return [dict(group, weight_decay=weight_decay, schedule=True) for group in groups]

    def param_counts(self):
        """total; memory |W|, the generic blocks (as large as what is fetched) counted apart;
        active: what one token touches."""
        config = self.config
        total = sum(p.numel() for p in self.parameters())
        memory = sum(map(mul, config.nodes, config.level_sizes))
        active = total - memory
        if not config.tied:
            active -= self.embed.weight.numel() - config.n_embd          # one row of the embedding
        return dict(total=total, memory=memory, generic=sum(config.level_sizes), active=active)

    def flops_per_token(self):
        """Forward and backward at full context: 6 a weight (at most 4 in a frozen anchor: up to its
        first memory nothing needs a gradient), fetched memory too (a key or value for each of its
        group's heads), and 12*T*H*d_h a layer."""
        config = self.config
        weights = (self.head or self.embed).weight.numel()
        for module in self.blocks.modules():
            if isinstance(module, nn.Linear):
                weights += module.weight.numel()
        each = 4 if config.frozen else 6
        attention = 12 * config.block_size * config.n_head * config.head_dim * config.n_layer
        uses = config.n_head // config.n_kv_head if config.memory == "kv" else 1
        return each * weights + 6 * uses * sum(config.level_sizes) + attention


# ================================================================ below the fold: other memories

class LoRA(Memory):
    """Low-rank patches of some of a block's matrices, W x + 2 B(A x) (Figures 14 to 16). The
    paper's alpha = 2 is read as a factor that is not divided by the rank."""

    matrices = ()

    @classmethod
    def widths(cls, config):
        d, d_f = config.n_embd, config.n_inner
        queries = config.n_head * config.head_dim
        keys = config.n_kv_head * config.head_dim
        shapes = {"q": (d, queries), "k": (d, keys), "v": (d, keys), "o": (queries, d),
                  "gate": (d, d_f), "up": (d, d_f), "down": (d_f, d)}
        widths = {}
        for W in cls.matrices:
            widths[f"{W}.A"], widths[f"{W}.B"] = shapes[W]
        return widths

    @staticmethod
    def init(name, part, config, generator):
        if name.endswith("B"):
            part.zero_()
        else:                                                  # as LoRA's code, for A's fan-in
            bound = part.size(-1) ** -0.5
            part.uniform_(-bound, bound, generator=generator)

    def linear(self, name, W, x):
        if name not in self.matrices:
            return W(x)
        A, BT = self.part[f"{name}.A"], self.part[f"{name}.B"] # (B, r, in), (B, r, out)
        return W(x) + 2 * (x @ A.mT) @ BT


class LoRAQK(LoRA):
    matrices = ("q", "k")


class LoRAVO(LoRA):
    matrices = ("v", "o")


class LoRAFFN(LoRA):
    matrices = ("gate", "up", "down")

    def mlp(self, mlp, x):
        hidden = F.silu(self.linear("gate", mlp.gate, x)) * self.linear("up", mlp.up, x)
        return self.linear("down", mlp.down, hidden)


class KV(Memory):
    """Learned keys and values that every query attends to, without mask or positions, in a softmax
    of their own (Figure 17). Ours: the queries are normed (by qk_norm, which Llama's and Qwen's
    anchors lack), the keys are not, so that at first all get about the same weight."""

    @staticmethod
    def widths(config):
        width = config.n_kv_head * config.head_dim
        return {"keys": width, "values": width}

    @staticmethod
    def init(name, part, config, generator):
        if name == "values":
            part.zero_()
        else:
            init_normal(part, config.n_embd ** -0.5, generator)

    def heads(self, q, y):
        k, v = (t.unflatten(-1, (-1, q.size(-1))).transpose(1, 2) for t in self.part.values())
        found = F.scaled_dot_product_attention(                # k, v (B, H_kv, r, d_h)
            q.transpose(1, 2), k, v, enable_gqa=k.size(1) != q.size(2))
        return y + found.transpose(1, 2).reshape(y.shape)


# ---------------------------------------------------------------- a prompt's path; another start

def parse_nodes(config, text):
    """"2:17,best:1", level:node or best:level -> [(2, 17), (1, "best")]."""
    nodes = []
    for pair in filter(None, text.split(",")):
        if not re.fullmatch(r"(best|[0-9]+):[0-9]+", pair):
            raise ValueError(f"{pair} is no node: level:node, several by commas, or best:level")
        first, second = pair.split(":")
        if first == "best":
            level, node = int(second), "best"
        else:
            level, node = int(first), int(second)
        if not 1 <= level <= len(config.nodes):
            raise ValueError(f"there is no node {pair}: the levels are 1 to {len(config.nodes)}")
        if node != "best" and node >= config.nodes[level - 1]:
            raise ValueError(f"there is no node {pair}: those of level {level} are 0 to "
                             f"{config.nodes[level - 1] - 1}")
        nodes.append((level, node))
    return nodes


def leaf_path(config, leaf):
    """The nodes above a leaf, and the leaf."""
    if not re.fullmatch("[0-9]+", leaf) or int(leaf) >= config.nodes[-1]:
        raise ValueError(f"leaf={leaf}: generic, none, or a leaf from 0 to {config.nodes[-1] - 1}")
    return [int(leaf) // (config.nodes[-1] // n) for n in config.nodes]


def find_retriever(config, folders, embedder_path):
    """The tree that the blocks belong to: with another they would mean nothing."""
    from experiments.topics import Retriever
    names = ("retriever.npz", "previous-retriever.npz")        # the latter of an earlier run
    files = [Path(folder, name) for folder in folders for name in names]
    files = [file for file in files if file.exists()]
    if not files:
        raise ValueError(f"no retriever.npz in {' or '.join(map(str, folders))}: copy it from the "
                         "data folder, or give --leaf=generic")
    for file in files:
        retriever = Retriever.load(file, embedder_path)
        if retriever.hash == config.retriever:
            return retriever
    raise ValueError(f"{file} is the tree {retriever.hash}, the model was trained with "
                     f"{config.retriever}: its blocks mean nothing here")


def start(path, ckpt, fields):
    """train.py's --init_from=PATH: an anchor to which memories are added, or a model that has them.

    fields: those of Config that were given or that the data has. Blocks that the checkpoint lacks
    get their initial values from train.py."""
    have = ckpt["model_config"]
    free = {"frozen", "generic", "memory_lr", "block_size", "sparse_memory", "bank_device"}
    if have["memory"] == "none":
        have = {**have, "retriever": ""}                       # new blocks are the data's tree's
        free |= {"memory", "clusters", "ranks", "memory_layers", "retriever"}
    changed = {}
    for name, value in fields.items():
        if name in free:
            changed[name] = value
        elif name != "eot" and value not in (-1, "", have.get(name)):    # eot: the checkpoint's own
            raise ValueError(f"{name}={value}: {path} has {name}={have.get(name)}; leave {name} "
                             "out, or take data with its tree")
    config = Config(**{**have, **changed})
    return {"model_config": vars(config), "model": ckpt["model"]}


MEMORIES = {"ffn": FFN, "lora_qk": LoRAQK, "lora_vo": LoRAVO, "lora_ffn": LoRAFFN, "kv": KV}
