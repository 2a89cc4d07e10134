"""
Text -> token shards. `python prepare_fineweb.py` streams FineWeb-Edu; `--source=PATH` reads local files; `--source=pydocs` needs nothing.

    python prepare_fineweb.py --max_tokens=300_000_000                    # FineWeb-Edu sample-10BT, gpt2 tokens -> data/fineweb_edu
    python prepare_fineweb.py --source=books/ --tokenizer=bpe --vocab_size=4096     # .txt .jsonl(.gz .xz) .parquet, or folders of them
    python prepare_fineweb.py --source=pydocs                             # the documentation of this Python installation -> data/pydocs

A record is {"text"} or {"prompt", "answer"} (one kind per corpus). A document is [eot] text, or [eot] prompt answer; prompt and answer
are tokenised apart, and a .mask file beside the shard holds a 1 for every token that is to be predicted: the answer's, and eot, since
the next document's opening eot is what ends an answer. Held-out documents are chosen by the sha256 of their text, so a text falls on
the same side in every run; or they are the files whose names start with "val".

A data folder holds llm.c's shards train_000000.bin, val_000000.bin, ... (256 int32: magic 20240520, version 1, token count; then uint16;
with magic 20240801, version 7: uint32, for vocabularies over 65,536), token_bytes.npy (UTF-8 bytes of every token, for bits per byte),
tokenizer.json (if it is not gpt2 or bytes) and meta.json. All of it is written in NAME.partial-PID, which becomes NAME once it is whole.
"""
import ast
import difflib
import gzip
import hashlib
import json
import lzma
import multiprocessing
import os
import shutil
import sys
import sysconfig
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

# -----------------------------------------------------------------------------
source = "fineweb_edu"        # fineweb_edu (streamed) | pydocs | a file or folder of .txt .jsonl .parquet (.gz and .xz too)
tokenizer = ""                # gpt2 | bpe (trained on the corpus) | bytes | a tokenizer.json; empty: gpt2, bpe for pydocs
vocab_size = -1               # of bpe; -1: 65536, 4096 for pydocs
max_tokens = -1               # stop after this many training tokens
val_fraction = -1.0           # of the documents, held out; -1: 0.05 for pydocs, 0.005 for fineweb_edu, else 0.01
shard_tokens = 100_000_000    # tokens in a shard
bpe_chars = 200_000_000       # bpe is trained on the first so many characters of the train split
text_field = "text"           # the field of a jsonl or parquet record that holds the text
out = ""                      # folder; empty: data/NAME with the source's name
workers = -1                  # processes; -1: one per core
overwrite = False             # rebuild a folder that is there already
_defaults = {k: v for k, v in globals().items() if not k.startswith("_") and isinstance(v, (int, float, str))}
# -----------------------------------------------------------------------------
FORMATS = {np.dtype(np.uint16): (20240520, 1), np.dtype(np.uint32): (20240801, 7)}     # token type -> magic, version (llm.c)
HEADER = 256                                                                           # int32 values before the tokens
EOT = "<|endoftext|>"


class ConfigError(ValueError):
    """A mistake that the person at the keyboard can put right; the programs print it without a traceback."""


# ----------------------------------------------------------------------------- --key=value

def configure(argv: list, namespace: dict) -> tuple:
    """--key=value arguments -> (overrides, positional arguments). A value gets the type of namespace[key]; the last of several wins."""
    defaults = {k: v for k, v in namespace.items() if not k.startswith("_") and isinstance(v, (int, float, str))}
    overrides, positionals = {}, []
    for argument in argv:
        if not argument.startswith("-"):
            positionals.append(argument)
            continue
        key, given, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or key not in defaults:
            near = difflib.get_close_matches(key.strip("-"), defaults, n=3)
            hint = "did you mean " + " or ".join(f"--{k}=" for k in near) + "?" if near else "--help lists the keys"
            raise ConfigError(f"unknown option {argument!r}: {hint}")
        if not given:
            raise ConfigError(f"--{key} needs a value: --{key}={'True' if isinstance(defaults[key], bool) else 'VALUE'}")
        overrides[key] = _parse(key, value, type(defaults[key]))
    return overrides, positionals


def _parse(key, text, kind):
    if kind is str:
        return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
    truth = {"true": True, "false": False}.get(text.lower())
    if kind is bool and (truth is not None or text in "01" and text):
        return truth if truth is not None else text == "1"
    if kind is int and truth is not None:       # for ints that mean no / yes / automatic, such as compile=-1
        return int(truth)
    try:
        number = None if kind is bool else kind(text)
    except ValueError:
        number = None
    try:
        if kind is int and number is None and float(text).is_integer():       # 1e4
            number = int(float(text))
    except (ValueError, OverflowError):
        pass
    if number is None or not abs(number) < float("inf"):                      # nan and inf fail the comparison too
        wanted = {bool: "True or False", int: "a whole number", float: "a finite number"}[kind]
        raise ConfigError(f"--{key} wants {wanted}, not {text!r}")
    return number


def help_text(source: str, namespace: dict) -> str:
    """One line per key of namespace, in the order of the source text, with the comment that stands behind `key = default` there."""
    lines = {}
    for line in source.splitlines():
        key = line.partition("=")[0].partition(":")[0].strip()
        value = namespace.get(key)
        if "=" in line and not key.startswith("_") and isinstance(value, (int, float, str)) and key not in lines:
            lines[key] = f"--{key}={value}".ljust(28) + "  " + line.partition("#")[2].strip()
    return "\n".join(line.rstrip()[:120] for line in lines.values())


# ----------------------------------------------------------------------------- tokenizers

class BytesTokenizer:
    """A token per byte of UTF-8."""
    name, vocab_size, eot = "bytes", 257, 256

    def encode(self, text):
        return list(text.encode())

    def encode_batch(self, texts):
        return [self.encode(text) for text in texts]

    def decode(self, ids):
        return b"".join(self.token_bytes(i) for i in ids).decode(errors="replace")

    def token_bytes(self, i):
        return bytes([i]) if i < 256 else b""


class GPT2Tokenizer(BytesTokenizer):
    """GPT-2's, by tiktoken; 50,257 tokens."""
    name, vocab_size, eot = "gpt2", 50257, 50256

    def __init__(self):
        self.encoding = load_gpt2()

    def encode(self, text):
        return self.encoding.encode_ordinary(text)

    def token_bytes(self, i):
        return b"" if i == self.eot else self.encoding.decode_single_token_bytes(int(i))


class JSONTokenizer(BytesTokenizer):
    """Any tokenizer.json, by `tokenizers`. Special tokens that a text happens to spell are plain text to it."""

    def __init__(self, path, name=""):
        from tokenizers import Tokenizer
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as e:          # `tokenizers` raises plain Exception
            raise ConfigError(f"{path} is not a tokenizer.json that `tokenizers` can read: {e}") from None
        self.tokenizer.encode_special_tokens = True
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.name = name or str(path)
        vocab = self.tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1                     # ids may have gaps
        ends = [t for t in (EOT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]") if t in vocab]
        if not ends:
            raise ConfigError(f"{path} has no end-of-text token ({EOT}, <|end_of_text|>, </s>, <eos>)")
        self.eot = vocab[ends[0]]
        added = self.tokenizer.get_added_tokens_decoder()
        self.added = {i: b"" if token.special else token.content.encode() for i, token in added.items()}
        self.byte_level = "ByteLevel" in self.tokenizer.to_str()
        self.pieces = {i: piece for piece, i in vocab.items()}

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts):
        return [e.ids for e in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def token_bytes(self, i):
        if i in self.added or i not in self.pieces:
            return self.added.get(i, b"")
        piece = self.pieces[i]
        if self.byte_level:
            return bytes(_BYTE_OF[c] for c in piece)
        if len(piece) == 6 and piece.startswith("<0x"):               # SentencePiece: "▁" is a space, <0x0A> a byte
            return bytes([int(piece[3:5], 16)])
        return piece.replace("▁", " ").encode()


def _byte_of():     # GPT-2 writes every byte as a printable character: itself, or else the next one from U+0100 on
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(rest)}


_BYTE_OF = _byte_of()


def load_gpt2():
    import tiktoken
    return tiktoken.get_encoding("gpt2")


def get_tokenizer(name: str):
    """"gpt2" | "bytes" | a data folder | a tokenizer.json -> .name .vocab_size .eot .encode .encode_batch .decode .token_bytes"""
    if name == "gpt2":
        return GPT2Tokenizer()
    if name == "bytes":
        return BytesTokenizer()
    if os.path.isdir(name):
        meta = load_meta(name)
        if meta["tokenizer"] in ("gpt2", "bytes"):
            return get_tokenizer(meta["tokenizer"])
        return JSONTokenizer(Path(name) / "tokenizer.json", meta["tokenizer"])
    if os.path.isfile(name):
        return JSONTokenizer(name)
    raise ConfigError(f"unknown tokenizer {name!r}: gpt2, bpe, bytes, or the path of a tokenizer.json")


def train_bpe(texts, size: int, path) -> None:
    """Byte-level BPE with GPT-2's way of splitting words; eot is token 0."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    if size < 257:
        raise ConfigError(f"--vocab_size={size} is too small: 256 bytes and the end-of-text token need 257")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[EOT], initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(texts, trainer)
    bpe.save(str(path))


# ----------------------------------------------------------------------------- reading a data folder

def load_meta(folder) -> dict:
    """meta.json of a data folder. Shards of llm.c or modded-nanogpt have none; they are gpt2's."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"no data folder {folder}: make it with `python prepare_fineweb.py`, see --help")
    if ".partial-" in folder.name:
        raise ConfigError(f"{folder} is what an interrupted preparation left: run prepare_fineweb.py again")
    if (folder / "meta.json").exists():
        try:
            return json.loads((folder / "meta.json").read_text())
        except ValueError as e:
            raise ConfigError(f"{folder}/meta.json cannot be read ({e}): prepare the folder again") from None
    shards = sorted(folder.glob("*.bin"))
    if not shards:
        raise ConfigError(f"{folder} holds neither meta.json nor *.bin shards: make it with `python prepare_fineweb.py`")
    state = hashlib.sha256()
    for path in shards:
        with open(path, "rb") as f:
            state.update(f"{path.name} {path.stat().st_size}".encode() + f.read(4 * HEADER))
    wide = _open_shard(shards[0]).dtype == np.uint32                  # llm.c writes Llama 3 tokens so
    meta = dict(tokenizer="llama-3", vocab_size=128256, eot=128000) if wide else dict(tokenizer="gpt2", vocab_size=50257, eot=50256)
    return meta | {"data_id": state.hexdigest()[:8]}


def load_token_bytes(folder):
    """UTF-8 bytes of every token, (vocab,) int32, 0 for eot; None where they are not known (bits per byte cannot be had then)."""
    path = Path(folder) / "token_bytes.npy"
    if path.exists():
        return np.load(path)
    if (Path(folder) / "meta.json").exists():
        return None
    try:
        return token_lengths(get_tokenizer(load_meta(folder)["tokenizer"]))
    except ConfigError:
        return None


def token_lengths(tok) -> np.ndarray:
    return np.array([len(tok.token_bytes(i)) for i in range(tok.vocab_size)], dtype=np.int32)


def _open_shard(path):
    """The tokens of a shard, memory-mapped."""
    size = path.stat().st_size
    header = np.fromfile(path, dtype=np.int32, count=HEADER)
    dtype = {magic: dtype for dtype, magic in FORMATS.items()}.get(tuple(header[:2].tolist()))
    if len(header) < HEADER or dtype is None:
        raise ConfigError(f"{path} is not a token shard (magic 20240520 version 1, or 20240801 version 7)")
    if size != 4 * HEADER + int(header[2]) * dtype.itemsize:
        raise ConfigError(f"{path} is truncated: {header[2]:,} tokens and the header make "
                          f"{4 * HEADER + int(header[2]) * dtype.itemsize:,} bytes, the file has {size:,}")
    return np.memmap(path, dtype=dtype, mode="r", offset=4 * HEADER, shape=(int(header[2]),)) if header[2] else np.empty(0, dtype)


class TokenShards:
    """
    The windows of one split of a data folder: window w is block_size + 1 tokens, its start block_size after that of window w - 1
    (neighbours share one token, so that every token but a shard's first is predicted once). No window crosses shards.
    """

    def __init__(self, folder, split: str, block_size: int):
        self.meta = load_meta(folder)
        self.paths = [p for p in sorted(Path(folder).glob("*.bin")) if split in p.name and (split == "val" or "val" not in p.name)]
        if not self.paths:
            raise ConfigError(f"{folder} has no *{split}*.bin shards")
        self.shards = [_open_shard(path) for path in self.paths]
        masks = [path.with_suffix(".mask") for path in self.paths]
        self.has_mask = any(m.exists() for m in masks)
        self.masks = [np.memmap(m, dtype=np.uint8, mode="r") for m in masks] if self.has_mask else None
        self.block_size, self.n_tokens = block_size, sum(map(len, self.shards))
        self.first = np.cumsum([0] + [max(len(s) - 1, 0) // block_size for s in self.shards])     # first window of every shard
        self.n_windows = int(self.first[-1])
        if not self.n_windows:
            raise ConfigError(f"the {split} shards of {folder} are too short for one window: {self.n_tokens:,} tokens, "
                              f"block_size={block_size} needs {block_size + 1:,} in one shard")

    def batch(self, windows):
        """(B,) window numbers -> x, y, both (B, T) int64; y is x one token on, and -1 where the mask asks for no loss."""
        import torch
        B, T = len(windows), self.block_size
        tokens = np.empty((B, T + 1), dtype=np.int64)
        target = np.ones((B, T), dtype=bool)
        shards = np.searchsorted(self.first, windows, side="right") - 1
        for row, (shard, window) in enumerate(zip(shards, windows)):
            start = int(window - self.first[shard]) * T
            tokens[row] = self.shards[shard][start : start + T + 1]
            if self.has_mask:
                target[row] = self.masks[shard][start + 1 : start + T + 1] > 0
        if tokens.max() >= self.meta["vocab_size"]:
            row = int(tokens.max(1).argmax())
            raise ConfigError(f"{self.paths[shards[row]]} holds token {tokens.max()}, but the vocabulary has {self.meta['vocab_size']}")
        return torch.from_numpy(tokens[:, :-1]), torch.from_numpy(np.where(target, tokens[:, 1:], -1))


# ----------------------------------------------------------------------------- sources: each yields (split or "", prompt or None, text)

def read_files(path, text_field):
    kinds = (".txt", ".jsonl", ".parquet")
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    files = [f for f in files if any(k in f.suffixes[-2:] for k in kinds)]
    if not files:
        raise ConfigError(f"no .txt .jsonl .parquet in {path}")
    given = [f for f in files if f.name.startswith("val")]
    has_val = 0 < len(given) < len(files)
    for file in sorted(files, key=lambda f: f not in given):        # val first: max_tokens counts training tokens
        split = "" if not has_val else "val" if file in given else "train"
        for where, row in _rows(file, text_field):
            yield split, *_record(row, where, text_field)


def _rows(file, text_field):
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(file.suffix, open)
    if ".parquet" in file.suffixes:
        from datasets import load_dataset
        rows = load_dataset("parquet", data_files=str(file), split="train", streaming=True)
        for n, row in enumerate(rows):
            yield f"{file}, row {n}", row
        return
    with opener(file, "rt", encoding="utf-8") as f:
        if ".txt" in file.suffixes:
            yield str(file), {text_field: f.read()}
            return
        for n, line in enumerate(f, 1):
            yield f"{file}, line {n}", json.loads(line)


def _record(row, where, text_field):
    if text_field in row:
        return None, row[text_field]
    return row["prompt"], row["answer"]


def documents(c):
    return read_files(Path(c.source), c.text_field)


# ----------------------------------------------------------------------------- preparing

class ShardWriter:
    """Appends documents to train_000000.bin, ...; a shard gets its header when it is full, so that half a shard is none."""

    def __init__(self, folder, split, dtype, shard_tokens):
        self.folder, self.split, self.dtype, self.shard_tokens = folder, split, np.dtype(dtype), shard_tokens
        self.file = self.mask_file = None
        self.tokens = self.in_shard = self.shards = self.documents = self.bytes = 0

    def write(self, ids, mask):
        while len(ids):
            if self.file is None:
                path = self.folder / f"{self.split}_{self.shards:06d}.bin"
                self.file = open(path, "wb")
                self.file.write(bytes(4 * HEADER))
                self.mask_file = None if mask is None else open(path.with_suffix(".mask"), "wb")
            room = self.shard_tokens - self.in_shard
            self.file.write(ids[:room].tobytes())
            if mask is not None:
                self.mask_file.write(mask[:room].tobytes())
                mask = mask[room:]
            self.in_shard += len(ids[:room])
            ids = ids[room:]
            if self.in_shard == self.shard_tokens:
                self.close()

    def close(self):
        if self.file is None:
            return
        header = np.zeros(HEADER, dtype=np.int32)
        header[:3] = *FORMATS[self.dtype], self.in_shard
        self.file.seek(0)
        self.file.write(header.tobytes())
        for file in filter(None, (self.file, self.mask_file)):
            file.flush()
            os.fsync(file.fileno())
            file.close()
        self.tokens += self.in_shard
        self.shards += 1
        self.file, self.in_shard = None, 0


def _chunks(docs, characters=500_000):
    chunk, size = [], 0
    for doc in docs:
        chunk.append(doc)
        size += len(doc[2])
        if size > characters:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def held_out(prompt, text, fraction):
    digest = hashlib.sha256(((prompt or "") + text).encode("utf-8", "replace")).hexdigest()
    return int(digest[:8], 16) < fraction * 16**8


_worker = None      # (tokenizer, val_fraction, dtype) in the processes that tokenise, which are forked


def _tokenize(chunk):
    """[(split, prompt, text)] -> [(split, ids, mask or None, bytes of text)]"""
    tok, fraction, dtype = _worker
    done = []
    texts = tok.encode_batch([text for _, _, text in chunk])
    prompts = tok.encode_batch([prompt for _, prompt, _ in chunk if prompt is not None]) if chunk[0][1] is not None else [None] * len(chunk)
    for (split, prompt, text), answer, question in zip(chunk, texts, prompts):
        split = split or ("val" if held_out(prompt, text, fraction) else "train")
        ids = np.array([tok.eot] + (question or []) + answer, dtype=dtype)
        mask = None
        if question is not None:
            mask = np.ones(len(ids), dtype=np.uint8)
            mask[1 : 1 + len(question)] = 0
        done.append((split, ids, mask, len(((prompt or "") + text).encode())))
    return done


def _ignore_interrupt():
    import signal
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def prepare(**overrides):
    """Keyword arguments are the settings at the top of the file. Returns the data folder."""
    global _worker
    from tqdm import tqdm
    c = SimpleNamespace(**_defaults | overrides)
    c.tokenizer = c.tokenizer or ("bpe" if c.source == "pydocs" else "gpt2")
    c.vocab_size = c.vocab_size if c.vocab_size > 0 else 4096 if c.source == "pydocs" else 65536
    fraction = c.val_fraction if c.val_fraction >= 0 else {"pydocs": 0.05, "fineweb_edu": 0.005}.get(c.source, 0.01)
    folder = Path(c.out or Path("data") / Path(c.source).stem)
    workers = c.workers if c.workers > 0 else os.cpu_count()
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    if c.tokenizer == "bpe":
        def texts():
            left = c.bpe_chars
            for split, prompt, text in documents(c):
                if split == "train" or not split and not held_out(prompt, text, fraction):
                    yield (prompt or "") + text
                    left -= len(text)
                    if left <= 0:
                        return
        train_bpe(texts(), c.vocab_size, partial / "tokenizer.json")
        tok = JSONTokenizer(partial / "tokenizer.json", "bpe")
    else:
        tok = get_tokenizer(c.tokenizer)
        if isinstance(tok, JSONTokenizer):
            shutil.copy(c.tokenizer, partial / "tokenizer.json")
    dtype = np.uint16 if tok.vocab_size <= 65536 else np.uint32
    lengths = token_lengths(tok)
    np.save(partial / "token_bytes.npy", lengths)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = (tok, fraction, dtype)
    writers = {split: ShardWriter(partial, split, dtype, c.shard_tokens) for split in ("train", "val")}
    start = time.time()
    with multiprocessing.get_context("fork").Pool(workers, _ignore_interrupt) as pool, tqdm(unit="doc", disable=None) as bar:
        for chunk in pool.imap(_tokenize, _chunks(documents(c))):
            for split, ids, mask, n_bytes in chunk:
                w = writers[split]
                w.write(ids, mask)
                w.documents += 1
                w.bytes += n_bytes
            bar.update(len(chunk))
            if 0 < c.max_tokens <= writers["train"].tokens + writers["train"].in_shard:
                break
    for w in writers.values():
        w.close()
    n_docs, seconds = sum(w.documents for w in writers.values()), time.time() - start
    state = hashlib.sha256()
    for path in sorted([*partial.glob("*.bin"), *partial.glob("*.mask")]):
        with open(path, "rb") as f:
            while block := f.read(1 << 20):
                state.update(block)
    meta = dict(tokenizer=tok.name, vocab_size=tok.vocab_size, eot=tok.eot, source=c.source,
                documents={s: w.documents for s, w in writers.items()}, bytes={s: w.bytes for s, w in writers.items()},
                tokens={s: w.tokens for s, w in writers.items()}, data_id=state.hexdigest()[:8])
    (partial / "meta.json").write_text(json.dumps(meta, indent=1))
    os.rename(partial, folder)
    print(meta, f"{n_docs / seconds:.0f} documents/s")
    return folder


def main(argv):
    try:
        if {"-h", "--help"} & set(argv):
            print(__doc__ + "\n" + help_text(Path(__file__).read_text(), _defaults))
            return 0
        overrides, positionals = configure(argv, _defaults)
        if positionals:
            raise ConfigError(f"what is {positionals[0]!r}? A file or folder is given as --source={positionals[0]}")
        prepare(**overrides)
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
