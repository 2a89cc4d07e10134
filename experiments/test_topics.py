"""Tests of experiments/topics.py: the embedders, the tree and the sequences of one leaf each."""
import math
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments import topics
from experiments.topics import HashEmbedder, Retriever, k_means, walk
from prepare_fineweb import TokenShards, load_meta, prepare
from test_all import write_jsonl

SUBJECTS = (
    "river boat water fish shore", "engine piston fuel wheel brake",
    "violin chord melody sonata tempo", "enzyme protein cell membrane acid",
)
CLUSTERED = dict(tokenizer="bytes", clusters="2,2", window=64, block_size=32, workers=1)


def subject_texts(n=48):
    rng = random.Random(0)
    texts = []
    for i in range(n):
        words = SUBJECTS[i % 4].split() + "the a of and".split()
        text = f"{i} " + " ".join(rng.choice(words) for _ in range(60 + i))
        texts.append({"text": text, "topic": str(i % 4)})
    return texts


@pytest.fixture(scope="module")
def clustered(tmp_path_factory):
    """A data folder of four subjects under a tree 2,2, in sequences of 33 tokens; windows of 64."""
    folder = tmp_path_factory.mktemp("clustered")
    write_jsonl(folder / "source" / "train.jsonl", subject_texts()[8:])
    write_jsonl(folder / "source" / "val.jsonl", subject_texts()[:8])
    return Path(prepare(source=folder / "source", out=folder / "data", **CLUSTERED))


def sequences(folder, split):
    """rows (S, 33), masks (S, 33) and leaves (S,) of a split, as they lie in the files."""
    rows, masks, leaves = [], [], []
    for path in sorted(folder.glob(f"{split}_*.bin")):
        rows.append(np.fromfile(path, np.uint16)[512:].reshape(-1, 33))
        masks.append(np.fromfile(path.with_suffix(".mask"), np.uint8).reshape(-1, 33))
        leaves.append(np.fromfile(path.with_suffix(".leaf"), np.int32))
    return np.concatenate(rows), np.concatenate(masks), np.concatenate(leaves)


@pytest.mark.parametrize("split", ["train", "val"])
def test_sequences_hold_windows_of_one_leaf_and_each_token_once(split, clustered):
    retriever = Retriever.load(clustered / "retriever.npz")
    texts = subject_texts()[8:] if split == "train" else subject_texts()[:8]
    windows, last = [], set()     # of 64 bytes
    for text in (row["text"] for row in texts):
        windows += [text[i:i + 64] for i in range(0, len(text), 64)]
        last.add(windows[-1])
    leaf_of = dict(zip(windows, retriever.path(windows)[:, -1].tolist()))
    rows, masks, leaves = sequences(clustered, split)
    seen = []
    for leaf in range(4):
        for row, mask in zip(rows[leaves == leaf], masks[leaves == leaf]):
            text = "".join(chr(i) if i < 256 else "|" for i in row)
            seen.append(text.replace("|", ""))
            for piece in filter(None, text.split("|")):
                assert leaf in {leaf_of[window] for window in windows if piece in window}
            assert mask[row != 256].all()
            for at in np.flatnonzero(row[1:] == 256) + 1:
                if row[at - 1] != 256:     # an eot is predicted exactly where a document ends
                    before = text[:at].split("|")[-1]
                    ends = {window in last for window in windows if window.endswith(before)}
                    assert bool(mask[at]) in ends
    assert sorted("".join(seen)) == sorted("".join(windows))
    data = TokenShards(clustered, split, 32)
    assert data.n_windows == len(rows) == load_meta(clustered)["tokens"][split] / 33
    everything = range(data.n_windows)
    x, y = data.batch(everything)
    assert np.array_equal(x, rows[:, :-1])
    assert np.array_equal(y, np.where(masks, rows.astype(int), -1)[:, 1:])
    assert np.array_equal(data.context(everything)["leaf"], leaves)
    assert data.context([3])["leaf"].dtype == torch.int64


def test_the_tree_finds_the_subjects_and_the_seed_decides(clustered, capsys):
    meta = load_meta(clustered)
    retriever = Retriever.load(clustered / "retriever.npz")
    assert (meta["clusters"], meta["block_size"], meta["window"]) == ("2,2", 32, 64)
    assert meta["retriever"] == retriever.hash
    leaves = retriever.path([row["text"] for row in subject_texts()])[:, 1].tolist()
    assert len(set(leaves)) == 4 and leaves == leaves[:4] * 12
    upper, lower = meta["tree"]
    assert (upper["nodes"], lower["nodes"]) == (2, 4)
    assert lower["nmi"] > 0.95 > 0.75 > upper["nmi"] > 0.6     # two of four: 2 ln 2 / 3 ln 2
    assert lower["agreement"]["10"] > 0.8
    sizes = [len(row["text"]) for row in subject_texts()[8:]]
    assert lower["tokens"][2] < sum(sizes) / 2 and upper["tokens"][0] + upper["tokens"][2] == sum(sizes)
    again = prepare(source=clustered.parent / "source", out=clustered.parent / "again", **CLUSTERED)
    assert load_meta(again)["data_id"] == meta["data_id"]
    assert load_meta(again)["retriever"] == retriever.hash
    assert "level 2: 4 nodes of" in capsys.readouterr().out
    other = Retriever(retriever.embedder, "2,2", [c + 0.1 for c in retriever.centroids])
    assert other.hash != retriever.hash


def test_several_shards_hold_the_same_sequences(clustered):
    source = clustered.parent / "source"
    many = Path(prepare(source=source, out=clustered.parent / "many", shard_tokens=500, **CLUSTERED))
    for split in ("train", "val"):
        assert len(list(many.glob(f"{split}*.leaf"))) > 3
        for one, other in zip(sequences(clustered, split), sequences(many, split)):
            assert np.array_equal(one, other)


def test_cut_and_pack_by_hand():
    """Two documents, abcde and fg, and windows of two tokens: ab cd e. fg."""
    a, b, c, d, e, f, g, eot = range(1, 9)
    tokens = np.array([eot, a, b, c, d, e, eot, f, g], np.uint16)
    spans = topics.cut(tokens, eot, 2)
    assert spans.tolist() == [[1, 3, 0, 0], [3, 5, 0, 0], [5, 6, 0, 1], [7, 9, 1, 1]]

    class InOrder:
        def permutation(self, n):
            return np.arange(n)

    rows, masks, leaves = topics.pack(tokens, spans, np.array([1, 0, 1, 1]), eot, 6, InOrder())
    assert rows.tolist() == [[eot, c, d, eot, eot, eot],
                             [eot, a, b, eot, e, eot], [f, g, eot, eot, eot, eot]]
    assert masks.tolist() == [[0, 1, 1, 0, 0, 0], [0, 1, 1, 0, 1, 1], [1, 1, 1, 0, 0, 0]]
    assert leaves.tolist() == [0, 1, 1]


def test_hash_embeddings_have_the_cosines_of_tf_idf():
    texts = ["River boat, river!", "boat engine", "engine fuel engine engine"]
    embedder = HashEmbedder.fit(texts)
    columns = [topics.bucket(word) for word in "river boat engine fuel".split()]
    counts = torch.tensor([[1 + math.log(2), 1, 0, 0], [0, 1, 1, 0], [0, 0, 1 + math.log(3), 1]])
    idf = torch.tensor([4 / 2, 4 / 3, 4 / 3, 4 / 2]).log() + 1
    torch.testing.assert_close(torch.from_numpy(embedder.state["idf"][columns]), idf)
    x = embedder(texts)
    expected = F.normalize(counts * idf)
    torch.testing.assert_close(x @ x.T, expected @ expected.T, atol=1e-5, rtol=1e-4)
    assert embedder([""]).abs().sum() == 0


def test_the_projection_spans_the_first_singular_vectors():
    rng = random.Random(1)
    words = [f"word{i}" for i in range(300)]
    texts = [" ".join(rng.choices(words[i % 5 * 60:][:90], k=40)) for i in range(200)]
    embedder = HashEmbedder.fit(texts)
    weighted = (HashEmbedder.count(texts) * embedder.state["idf"]).toarray()
    unit = weighted / np.linalg.norm(weighted, axis=1, keepdims=True)
    s = np.linalg.svd(unit[:, unit.any(0)], compute_uv=False)
    kept = np.square(unit @ embedder.state["projection"]).sum()
    assert embedder.state["projection"].shape == (32768, 128)
    assert 0.99 * np.square(s[:128]).sum() < kept <= 1.0001 * np.square(s[:128]).sum()


def test_k_means_is_balanced_and_reproducible():
    def seeded(seed):
        return torch.Generator().manual_seed(seed)

    # 90 points are more than 1.5/2 of 100: 45 of them go to the other cluster, whose mean is not
    # normalised again.
    crowd = torch.cat((torch.zeros(90, 2), torch.ones(10, 2)))
    for limit, expected in ((1.5, [0.0, 20 / 55]), (2.0, [0.0, 2.0])):
        centroids = k_means(crowd, 2, seeded(0), steps=1, limit=limit)
        assert sorted(centroids.sum(1).tolist()) == pytest.approx(expected)
    x = F.normalize(torch.randn(400, 6, generator=seeded(0)), dim=1)
    centroids = k_means(x, 5, seeded(3))
    assert torch.equal(centroids, k_means(x, 5, seeded(3)))
    assert not torch.equal(centroids, k_means(x, 5, seeded(4)))
    assert torch.bincount(walk(x, [centroids])[:, 0]).max() < 160


def test_k_means_starts_in_every_cluster():
    """k-means++: of ten groups far from each other, each has its centroid at once."""
    x = torch.arange(10).repeat(20)[:, None] * torch.tensor([[100.0, 1.0]])
    for seed in range(5):
        centroids = k_means(x, 10, torch.Generator().manual_seed(seed), steps=0)
        assert sorted(centroids[:, 1].tolist()) == list(range(10))


def test_walk_is_greedy_and_blocked_nodes_are_bypassed():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 5, generator=generator)
    centroids = [torch.randn(n, 5, generator=generator) for n in (3, 6, 24)]
    for row, path in zip(x, walk(x, centroids).tolist()):
        node = 0
        for c, k, got in zip(centroids, (3, 2, 4), path):
            children = range(node * k, node * k + k)
            node = min(children, key=lambda n: float((row - c[n]).norm()))
            assert node == got
    best = walk(x[:1], centroids)[0].tolist()
    other = walk(x[:1], centroids, [(2, best[1])])[0].tolist()
    assert other[0] == best[0] and other[1] == best[1] ^ 1 and other[2] // 4 == other[1]
    with pytest.raises(ValueError, match="every node of level 1 that this text could enter"):
        walk(x, centroids, [(1, 0), (1, 1), (1, 2)])


def test_every_node_splits_its_own_points():
    """Children lie among their parent's points: at level 2 of a tree over four far groups."""
    groups = torch.tensor([[10.0, 0], [10, 1], [-10, 0], [-10, 1]]).repeat(40, 1)
    x = groups + 0.01 * torch.randn(160, 2, generator=torch.Generator().manual_seed(0))
    upper, lower = Retriever.fit(x, "2,2", HashEmbedder({})).centroids
    for child, centroid in enumerate(lower):
        assert (centroid - upper[child // 2]).norm() < 1
    with pytest.raises(ValueError, match="clusters=4,8,8: at level 3 a node has .* needs 32"):
        Retriever.fit(torch.randn(400, 6), "4,8,8", HashEmbedder({}))


@pytest.mark.parametrize("spoil", ["missing", "no zip", "cut", "no centroids", "no such embedder"])
def test_a_retriever_file_that_is_not_whole_is_refused(spoil, clustered, tmp_path):
    path = tmp_path / "retriever.npz"
    whole = (clustered / "retriever.npz").read_bytes()
    arrays = dict(np.load(clustered / "retriever.npz"))
    if spoil == "no zip":
        path.write_bytes(b"no zip")
    elif spoil == "cut":
        path.write_bytes(whole[:-100])
    elif spoil == "no centroids":
        np.savez(path, **{name: array for name, array in arrays.items() if "centroids" not in name})
    elif spoil == "no such embedder":
        np.savez(path, **arrays | {"embedder": "rand"})
    with pytest.raises(ValueError, match="retriever.npz is missing, or not a whole retriever file"):
        Retriever.load(path)
