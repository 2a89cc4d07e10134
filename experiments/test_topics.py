"""Tests of experiments/topics.py: the embedders, the tree and the sequences of one leaf each."""
import math
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pytest import approx
from torch.testing import assert_close

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments import topics
from experiments.topics import HashEmbedder, Retriever, k_means, walk
from prepare_fineweb import TokenShards, load_meta, prepare, read_documents
from test_all import CLUSTERED, clustered, topic_texts


def sequences(folder, split):
    """(S, 65): the tokens of each sequence, its targets (-1: nothing is predicted), its leaf."""
    data = TokenShards(folder, split, 32)
    windows = range(data.n_windows)
    leaves = data.context(windows)["leaf"][:, None]
    return torch.cat((*data.batch(windows), leaves), 1)


def test_sequences_hold_windows_of_one_leaf_and_each_token_once(clustered):
    """Of the held-out texts; | is where one ends."""
    texts = [row["text"] for row in topic_texts()[:8]]
    windows = [text[i:i + 64] for text in texts for i in range(0, len(text), 64)]
    leaf_of = Retriever.load(clustered / "retriever.npz").path(windows)[:, -1]
    pieces = []
    for *row, leaf in sequences(clustered, "val").tolist():
        tokens = [*row[:32], row[-1]]
        text = "".join(chr(i) if 0 <= i < 256 else "|" for i in tokens)
        for piece in text.split("|"):
            where = [piece in window for window in windows]
            assert leaf in leaf_of[where]
            pieces.append(piece)
    assert sorted("".join(pieces)) == sorted("".join(texts))


def test_the_tree_finds_the_subjects_and_the_seed_decides(clustered, capsys):
    meta = load_meta(clustered)
    retriever = Retriever.load(clustered / "retriever.npz")
    texts = [row["text"] for row in topic_texts()]
    leaves = retriever.path(texts)[:, 1].tolist()
    assert leaves == leaves[:4] * 12
    assert len(set(leaves)) == 4
    upper, lower = meta["tree"]
    assert 0.6 < upper["nmi"] < 0.75     # two nodes, four subjects: 2 ln 2 / 3 ln 2
    assert lower["nmi"] > 0.95
    assert lower["first_10_words"] > 0.8
    smallest, _, largest = upper["tokens"]
    assert smallest + largest == sum(len(text) for text in texts[8:])
    folder = clustered.parent
    prepare(source=folder / "source", out=folder / "again", **CLUSTERED)
    again = load_meta(folder / "again")
    assert again["data_id"] == meta["data_id"]
    assert again["retriever"] == meta["retriever"] == retriever.hash
    assert "level 2, nodes 4, tokens" in capsys.readouterr().out
    moved = [c + 0.1 for c in retriever.centroids]
    assert Retriever(retriever.embedder, "2,2", moved).hash != retriever.hash


def test_cut_and_pack_by_hand():
    """Two documents, 12345 and 67, in windows of two tokens: 12 34 5. 67."""
    def digits(table):
        return ["".join(map(str, row)) for row in table]

    in_order = SimpleNamespace(permutation=np.arange)
    tokens = np.array([0, 1, 2, 3, 4, 5, 0, 6, 7], np.uint16)     # eot is 0
    spans = topics.cut(tokens, 0, 2)
    assert digits(spans) == ["1300", "3500", "5601", "7911"]
    leaves = np.array([1, 0, 1, 1])
    rows, masks, row_leaves = topics.pack(tokens, spans, leaves, 0, 6, in_order)
    assert digits(rows) == ["034000", "012050", "670000"]
    assert digits(masks) == ["011000", "011011", "111000"]
    assert row_leaves.tolist() == [0, 1, 1]


def test_hash_embeddings_have_the_cosines_of_tf_idf():
    texts = ["River boat, river!", "boat engine", "engine fuel engine engine"]
    embedder = HashEmbedder.fit(texts)
    columns = [topics.bucket(word) for word in ("river", "boat", "engine", "fuel")]
    counts = torch.tensor([
        [1 + math.log(2), 1, 0, 0],
        [0, 1, 1, 0],
        [0, 0, 1 + math.log(3), 1],
    ])
    idf = 1 + torch.tensor([4 / 2, 4 / 3, 4 / 3, 4 / 2]).log()
    assert_close(torch.from_numpy(embedder.state["idf"][columns]), idf)
    x = embedder(texts)
    expected = F.normalize(counts * idf)
    cosines = expected @ expected.T
    assert_close(x @ x.T, cosines, atol=1e-5, rtol=1e-4)
    assert embedder([""]).abs().sum() == 0


def test_the_projection_spans_the_first_singular_vectors():
    rng = random.Random(1)
    words = [f"word{i}" for i in range(300)]
    texts = [" ".join(rng.choices(words[i % 5 * 60:][:90], k=40)) for i in range(200)]
    embedder = HashEmbedder.fit(texts)
    projection = embedder.state["projection"]
    assert projection.shape == (32768, 128)
    weighted = (HashEmbedder.count(texts) * embedder.state["idf"]).toarray()
    unit = weighted / np.linalg.norm(weighted, axis=1, keepdims=True)
    values = np.linalg.svd(unit[:, unit.any(0)], compute_uv=False)
    best = np.square(values[:128]).sum()
    kept = np.square(unit @ projection).sum()
    assert 0.99 * best < kept <= 1.0001 * best


def test_k_means_is_balanced_and_reproducible():
    # 90 points are more than 1.5/2 of 100: 45 of them go to the other cluster, whose mean is not
    # normalised again.
    crowd = torch.cat((torch.zeros(90, 2), torch.ones(10, 2)))
    for limit, mixed in ((1.5, 20 / 55), (2.0, 2.0)):
        centroids = k_means(crowd, 2, torch.manual_seed(0), steps=1, limit=limit)
        sums = centroids.sum(1).tolist()
        assert sorted(sums) == approx([0.0, mixed])
    x = F.normalize(torch.randn(400, 6, generator=torch.manual_seed(0)), dim=1)
    centroids = k_means(x, 5, torch.manual_seed(3))
    assert torch.equal(centroids, k_means(x, 5, torch.manual_seed(3)))
    assert torch.bincount(walk(x, [centroids])[:, 0]).max() < 160


def test_k_means_starts_in_every_cluster():
    """k-means++: of ten groups far from each other, each has its centroid at once."""
    x = torch.arange(10).repeat(20)[:, None] * torch.tensor([[100.0, 1.0]])
    centroids = k_means(x, 10, torch.manual_seed(0), steps=0)
    assert sorted(centroids[:, 1].tolist()) == list(range(10))


def test_walk_is_greedy():
    torch.manual_seed(0)
    x = torch.randn(50, 5)
    centroids = [torch.randn(n, 5) for n in (3, 6, 24)]
    for row, path in zip(x, walk(x, centroids).tolist()):
        node = 0
        for c, k, got in zip(centroids, (3, 2, 4), path):
            first = node * k
            distances = (row - c[first:first + k]).norm(dim=1)
            node = first + int(distances.argmin())
            assert node == got


def test_every_node_splits_its_own_points():
    """Children lie among their parent's points: at level 2 of a tree over four far groups."""
    torch.manual_seed(0)
    groups = torch.tensor([
        [10.0, 0],
        [10, 1],
        [-10, 0],
        [-10, 1],
    ])
    x = groups.repeat(40, 1) + 0.01 * torch.randn(160, 2)
    tree = Retriever.fit(x, "2,2", HashEmbedder({}))
    upper, lower = tree.centroids
    assert ((lower - upper.repeat_interleave(2, 0)).norm(dim=1) < 1).all()
    with pytest.raises(ValueError, match="at level 1 a node has 159 windows .* needs 160"):
        Retriever.fit(x[:159], "40", HashEmbedder({}))


def test_a_topic_that_is_null_is_none(tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "x", "topic": null}\n{"text": "y"}\n{"text": "z", "topic": 3}\n')
    c = SimpleNamespace(source=str(source), text_field="text", topic_field="topic")
    assert [topic for *_, topic in read_documents(c)] == ["", "", "3"]
