"""
The tree of topics over a training text, for hierarchical memories (Pouransari et al. 2025, section
2.1 and Appendix C): embedders of text, balanced k-means, the greedy walk from the root to a leaf,
and the sequences of one leaf each that `prepare_fineweb.py --clusters=8,8` writes.

    text --phi--> x (c,) --nearest of 8--> node of level 1 --nearest of its 8--> leaf

Nodes are numbered from 0 at every level; node i's children are i*k ... i*k + k-1. What the tree is,
its centroids and its embedder's state, stands in one file, retriever.npz, and has one hash, which
data and checkpoints carry: blocks learned under one tree mean nothing under another.
Another machine or number of threads may round the embedder's state differently, which gives
another hash: copy the file, do not build the tree again.
This file imports nothing of ours. A mistake that can be put right is a ValueError.
"""
import functools
import hashlib
import math
import re
import zipfile
import zlib
from collections import Counter

import numpy as np
import torch
import torch.nn.functional as F
from scipy.sparse import csr_array

FIT_WINDOWS = 50_000     # the embedder is fitted to so many windows
SEED = 1337              # of the tree, and of the sequences' order


# ------------------------------------------------------------------ text -> unit vector

class HashEmbedder:
    """
    Words in 32,768 buckets, weighted tf-idf, reduced to 128 dimensions by a truncated SVD of the
    training windows. Nothing to download.
    """
    name = "hash"
    buckets = 32768

    def __init__(self, state, path=""):
        self.state = state     # idf (buckets,), projection (buckets, 128)

    @classmethod
    def fit(cls, texts, path=""):
        counts = cls.count(texts)                                            # (N, buckets)
        present = np.bincount(counts.indices, minlength=cls.buckets)         # texts with it
        idf = np.log((1 + len(texts)) / (1 + present)) + 1
        weighted = counts * idf
        norm = np.sqrt((weighted * weighted).sum(1))
        unit = (weighted / np.maximum(norm, 1e-12)[:, None]).tocsr()
        # Subspace iteration: U comes to span the first left singular vectors, and V the right ones.
        # Which basis of that space V is does not matter, for distances do not depend on it.
        U = np.random.default_rng(0).standard_normal((len(texts), min(128, len(texts))))
        for _ in range(6):
            U = np.linalg.qr(unit @ (unit.T @ U))[0]                         # (N, 128)
        V = np.linalg.qr(unit.T @ U)[0]                                      # (buckets, 128)
        return cls({"idf": idf.astype(np.float32), "projection": V.astype(np.float32)})

    @classmethod
    def count(cls, texts):
        """(N, buckets), sparse: 1 + log of each word's count. Words that share a bucket add up."""
        rows, columns = [], []
        values = []
        for row, text in enumerate(texts):
            for word, count in Counter(re.findall(r"\w+", text.lower())).items():
                rows.append(row)
                columns.append(bucket(word))
                values.append(1 + math.log(count))
        return csr_array((values, (rows, columns)), (len(texts), cls.buckets), dtype=np.float32)

    def __call__(self, texts):
        x = (self.count(texts) * self.state["idf"]) @ self.state["projection"]     # (N, 128)
        return F.normalize(torch.from_numpy(x).float())


@functools.lru_cache(2**20)
def bucket(word):     # Python's own hash() differs from run to run
    return zlib.crc32(word.encode()) % HashEmbedder.buckets


class MiniLM:
    """all-MiniLM-L6-v2, the paper's embedder: mean of the last states of up to 256 word pieces."""
    name = "minilm"
    probe = "The embedder of a tree of clusters must not change."

    def __init__(self, state, path=""):
        from transformers import AutoModel, AutoTokenizer
        path = path or "sentence-transformers/all-MiniLM-L6-v2"
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModel.from_pretrained(path).eval()
        seen = self([self.probe])[0].numpy()
        self.state = state or {"probe": seen}     # what it makes of one sentence
        known = self.state["probe"]
        if known.shape != seen.shape or known @ seen < 0.999:
            raise ValueError(f"{path} is another embedder than the one that the tree was made with")

    @classmethod
    def fit(cls, texts, path=""):
        return cls({}, path)

    @torch.no_grad()
    def __call__(self, texts):
        found = []
        for first in range(0, len(texts), 64):
            batch = self.tokenizer(texts[first:first + 64], padding=True, truncation=True,
                                   max_length=256, return_tensors="pt")
            weight = batch["attention_mask"][:, :, None].float()             # (B, T, 1)
            states = self.model(**batch).last_hidden_state                   # (B, T, c)
            found.append((states * weight).sum(1) / weight.sum(1))
        return F.normalize(torch.cat(found))


EMBEDDERS = {"hash": HashEmbedder, "minilm": MiniLM}


# ------------------------------------------------------------------ the tree

def walk(x, centroids, blocked=()):
    """
    The greedy walk: embeddings x (N, c) -> path (N, p), the node at every level.

    centroids: of every level, (n_l, c). blocked: (level, node) pairs, levels from 1, that may not
    be entered: the next nearest sibling is (Figure 6b).
    """
    node = torch.zeros(len(x), dtype=torch.long)
    path = []
    above = 1     # nodes of the level above
    for level, c in enumerate(centroids, 1):
        k = len(c) // above
        child = node[:, None] * k + torch.arange(k)                          # (N, k)
        distance = (x[:, None] - c[child]).square().sum(-1)                  # (N, k)
        for blocked_level, blocked_node in blocked:
            if blocked_level == level:
                distance[child == blocked_node] = math.inf
        nearest, at = distance.min(1, keepdim=True)
        if nearest.isinf().any():
            raise ValueError(f"every node of level {level} that this text could enter is blocked: "
                             "leave one of its siblings open")
        node = child.gather(1, at)[:, 0]
        path.append(node)
        above = len(c)
    return torch.stack(path, 1)


def k_means(x, k, generator, sample=6400, steps=20, limit=1.5):
    """
    k centroids of x (N, c): k-means++ and then EM, every step on a fresh sample. A cluster with
    more than limit/k of the sample gives half of its points, drawn at random, to the smallest, once
    a step (the paper does not say how often); the M-step is the plain mean. This keeps centroids
    in use while they are fitted; texts go to the nearest one, so that leaves are not of equal size.
    """
    points = draw(x, sample, generator)
    centroids = points[:1]
    while len(centroids) < k:
        distance = torch.cdist(points, centroids).amin(1).square() + 1e-12
        chosen = torch.multinomial(distance, 1, generator=generator)
        centroids = torch.cat((centroids, points[chosen]))
    for _ in range(steps):
        points = draw(x, sample, generator)
        nearest = torch.cdist(points, centroids).argmin(1)
        counts = torch.bincount(nearest, minlength=k)
        for cluster in counts.argsort(descending=True).tolist():
            if counts[cluster] > limit * len(points) / k:
                members = (nearest == cluster).nonzero()[:, 0]
                half = draw(members, len(members) // 2, generator)
                nearest[half] = torch.bincount(nearest, minlength=k).argmin()
        counts = torch.bincount(nearest, minlength=k)[:, None]
        sums = torch.zeros_like(centroids).index_add_(0, nearest, points)
        means = sums / counts.clamp(min=1)     # not normalised again
        centroids = torch.where(counts > 0, means, centroids)
    return centroids


def draw(rows, n, generator):
    """n of the rows, or all if there are fewer, in a random order."""
    return rows[torch.randperm(len(rows), generator=generator)[:n]]


class Retriever:
    """Text -> path in the tree: an embedder, and the centroids of every level, (n_l, c)."""

    def __init__(self, embedder, clusters, centroids):
        self.embedder = embedder
        self.clusters = clusters
        self.centroids = centroids

    @classmethod
    def fit(cls, x, clusters, embedder):
        """The tree over the unit vectors x (N, c), from the root to the leaves."""
        generator = torch.Generator().manual_seed(SEED)
        node = torch.zeros(len(x), dtype=torch.long)
        centroids = []
        above = 1
        for level, k in enumerate(map(int, clusters.split(",")), 1):
            counts = torch.bincount(node, minlength=above)
            if counts.min() < 4 * k:
                raise ValueError(f"clusters={clusters}: at level {level} a node has {counts.min()} "
                                 f"windows to split {k} ways and needs {4 * k}: take fewer "
                                 "clusters, a smaller window, or more text")
            parts = [k_means(x[node == parent], k, generator) for parent in range(above)]
            centroids.append(torch.cat(parts))
            node = walk_all(x, centroids)[:, -1]
            above *= k
        return cls(embedder, clusters, centroids)

    def path(self, texts, blocked=()):
        """texts -> (N, p) int64: the nodes that a text's path goes through."""
        return walk_all(self.embedder(texts), self.centroids, blocked)

    def arrays(self):
        arrays = {f"state_{name}": value for name, value in self.embedder.state.items()}
        for level, c in enumerate(self.centroids, 1):
            arrays[f"centroids_{level}"] = c.numpy()
        return arrays

    @property
    def hash(self):
        content = hashlib.sha256(f"{self.embedder.name} {self.clusters}".encode())
        for name, array in sorted(self.arrays().items()):
            content.update(f"{name} {array.shape}".encode() + array.tobytes())
        return content.hexdigest()[:16]

    def save(self, path):
        np.savez(path, embedder=self.embedder.name, clusters=self.clusters, **self.arrays())

    @classmethod
    def load(cls, path, embedder_path=""):
        try:
            with np.load(path) as file:
                arrays = dict(file)
            embedder = EMBEDDERS[str(arrays["embedder"])]
            clusters = str(arrays["clusters"])
            levels = range(1, clusters.count(",") + 2)
            centroids = [torch.from_numpy(arrays[f"centroids_{level}"]) for level in levels]
        except (OSError, KeyError, TypeError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} is missing, or not a whole retriever file ({error}): "
                             "prepare_fineweb.py --clusters= writes it") from None
        state = {}
        for name, array in arrays.items():
            if name.startswith("state_"):
                state[name.removeprefix("state_")] = array
        return cls(embedder(state, embedder_path), clusters, centroids)


def walk_all(x, centroids, blocked=()):
    """walk(), a thousand at a time."""
    return torch.cat([walk(part, centroids, blocked) for part in x.split(1024)])


# ------------------------------------------------------------------ a text under its tree

def cluster(tokens, labels, tok, clusters, window, length, embedder, embedder_path):
    """
    Cuts the documents of both splits into windows, fits the tree to those of train, and packs the
    windows of each leaf into sequences of `length` tokens, in random order.

    tokens: {split: (N,) a document is tok.eot and its text}; labels: {split: [topic or "" of every
    document]}; tok: .eot and .decode(ids).
    -> (retriever, {split: (rows (S, length), masks (S, length), leaves (S,))}, report)
    """
    from tqdm import tqdm
    rng = np.random.default_rng(SEED)
    spans = {split: cut(tokens[split], tok.eot, window) for split in tokens}

    def texts(split, chosen):
        return [tok.decode(tokens[split][a:b].tolist()) for a, b in spans[split][chosen, :2]]

    sample = np.sort(rng.permutation(len(spans["train"]))[:FIT_WINDOWS])
    embedder = EMBEDDERS[embedder].fit(texts("train", sample), embedder_path)
    x = {}
    for split in tokens:
        parts = np.array_split(np.arange(len(spans[split])), 1 + len(spans[split]) // 1024)
        progress = tqdm(parts, f"embedding {split}", disable=None)
        x[split] = torch.cat([embedder(texts(split, part)) for part in progress])
    retriever = Retriever.fit(x["train"], clusters, embedder)
    paths = {split: walk_all(x[split], retriever.centroids).numpy() for split in tokens}
    sequences = {}
    for split in tokens:
        leaves = paths[split][:, -1]
        sequences[split] = pack(tokens[split], spans[split], leaves, tok.eot, length, rng)
    chosen = np.sort(rng.permutation(len(spans["val"]))[:1000])
    agreement = prefix_agreement(retriever, texts("val", chosen), paths["val"][chosen])
    topics = np.array(labels["train"])[spans["train"][:, 2]]
    report = describe(retriever, spans["train"], topics, paths["train"], agreement)
    return retriever, sequences, report


def cut(tokens, eot, window):
    """
    (N, 4): the windows of at most `window` tokens that the documents are cut into, without eot:
    start, end, the document's number, and whether the document ends there.
    """
    spans = []
    starts = np.flatnonzero(tokens == eot) + 1
    ends = np.append(starts[1:] - 1, len(tokens))
    for document, (start, end) in enumerate(zip(starts.tolist(), ends.tolist())):
        for a in range(start, end, window):
            b = min(a + window, end)
            spans.append((a, b, document, b == end))
    return np.array(spans, np.int64).reshape(-1, 4)


def pack(tokens, spans, leaves, eot, length, rng):
    """
    The windows of each leaf, in random order and each after an eot, as sequences of `length` tokens
    -> rows (S, length), masks (S, length): 0 where nothing is predicted, leaves (S,).
    """
    rows, masks = [], []
    row_leaves = []
    order = rng.permutation(len(spans))
    for leaf in np.unique(leaves):
        ids, mask = [], []
        ended = False     # whether the window before is its document's last: its eot is predicted
        for a, b, _, last in spans[order[leaves[order] == leaf]]:
            ids += [[eot], tokens[a:b]]
            mask += [[ended], np.ones(b - a)]
            ended = last
        padding = -sum(len(part) for part in ids) % length
        ids.append(np.full(padding, eot))
        mask.append(np.arange(padding) < ended)     # the first eot ends the last document
        rows.append(np.concatenate(ids).astype(tokens.dtype).reshape(-1, length))
        masks.append(np.concatenate(mask).astype(np.uint8).reshape(-1, length))
        row_leaves += [leaf] * len(rows[-1])
    order = rng.permutation(len(row_leaves))
    leaves = np.array(row_leaves, np.int32)
    return np.concatenate(rows)[order], np.concatenate(masks)[order], leaves[order]


def prefix_agreement(retriever, texts, paths):
    """{words: (p,)}: how often the first words of a longer window lead to its node, by level."""
    agreement = {}
    for n in (10, 32, 128):
        words = [text.split() for text in texts]
        longer = [i for i in range(len(texts)) if len(words[i]) > n]
        if longer:
            prefixes = retriever.path([" ".join(words[i][:n]) for i in longer]).numpy()
            agreement[n] = (prefixes == paths[longer]).mean(0)
    return agreement


def describe(retriever, spans, topics, paths, agreement):
    """
    For every level, printed and returned: tokens per node (least, median, most), the normalised
    mutual information 2 I / (H1 + H2) of nodes and topics, and the agreement of prefixes.
    """
    report = []
    for level, centroids in enumerate(retriever.centroids):
        node = paths[:, level]
        tokens = np.bincount(node, spans[:, 1] - spans[:, 0], minlength=len(centroids))
        tokens = np.quantile(tokens, (0, 0.5, 1)).astype(int).tolist()
        line = dict(level=level + 1, nodes=len(centroids), tokens=tokens)
        if len(set(topics)) > 1:
            line["nmi"] = round(mutual_information(node, topics), 4)
        for n, share in agreement.items():
            line[f"first_{n}_words"] = round(float(share[level]), 4)
        print(", ".join(f"{key} {value}" for key, value in line.items()))
        report.append(line)
    return report


def mutual_information(a, b):
    """2 I / (H(a) + H(b)) of two labellings."""
    both = [f"{x} {y}" for x, y in zip(a, b)]
    h_a = entropy(a)
    h_b = entropy(b)
    return float(2 * (h_a + h_b - entropy(both)) / (h_a + h_b))


def entropy(labels):
    p = np.unique(labels, return_counts=True)[1] / len(labels)
    return -(p * np.log(p)).sum()
