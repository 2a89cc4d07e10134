"""
Load a checkpoint of any model_NAME.py; generate with a cache, score answers, draw what the model computes inside.

    python sample.py                                       # the newest checkpoint in out/, from nothing
    python sample.py --out_dir=out/move-d12 --prompt="The Moon is" --temperature=0
    git log -3 | python sample.py --prompt=-               # the prompt from stdin (read for "-" only, less its last newline)
    python sample.py --bench=True                          # prefill and decode times, with the cache and without
    python sample.py --inspect=True --prompt="We sat on the river bank" --words=river,bank
    python sample.py --inspect=True --words=bank           # MoVE's Appendix B, on the texts of experiments/words.json

A prompt opens a document, so the end-of-text token goes before it as in training; the empty prompt is that token alone. The same
token ends a sample. The text goes to stdout, what a pipe should not see to stderr.
"""
import codecs
import importlib
import json
import os
import re
import sys
import time
from itertools import accumulate, takewhile
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from prepare_fineweb import EOT, ConfigError, configure, find_dataset, get_tokenizer, help_text, load_meta, need

# -----------------------------------------------------------------------------
out_dir = ""            # a run's folder, or a ckpt.pt; empty: the newest out/*/ckpt.pt
prompt = ""             # "-": stdin
num_samples = 3
max_new_tokens = 200    # more than the context holds is fine
temperature = 0.8       # 0: always the most likely token
top_k = 200             # only the k most likely tokens; 0: all
top_p = 0.0             # only the most likely tokens that together reach this probability; 0: all
stop_at_eot = True      # False: write on into the next document, as nanoGPT does
seed = 1337
device = ""             # cuda | cuda:1 | mps | cpu; empty: the accelerator if there is one
dtype = ""              # float32 | bfloat16, by autocast; empty: bfloat16 on a GPU that has it
bench = False           # time prefill and decoding
inspect = False         # heat maps of what the model's inspect() returns, into the checkpoint's folder
leaf = ""               # of a model with hierarchical memories: generic | none | a leaf's number; empty: the path of the prompt
block = ""              # its nodes that may not be entered: "level:node,..." or "best:level", the one that the prompt would take
embedder_path = ""      # folder of its embedder, where that is not installed
words = ""              # words of the prompt, by commas; empty: its last. Without a prompt: words of experiments/words.json
_defaults = {k: v for k, v in globals().items() if not k.startswith("_") and isinstance(v, (int, float, str))}
# -----------------------------------------------------------------------------


def write_checkpoint(path, state):
    """Temporary file, fsync, rename: whatever is killed when, `path` is a whole checkpoint, the old one or the new one."""
    with open(f"{path}.tmp", "wb") as f:
        torch.save(state, f)
        f.flush()
        os.fsync(f.fileno())
    os.replace(f"{path}.tmp", path)


def load_checkpoint(path) -> dict:
    """A ckpt.pt, or the folder it is in -> what train.py saved (the tensors stay in the file until they are used)."""
    path = Path(path) / "ckpt.pt" if Path(path).is_dir() else Path(path)
    if not path.is_file():
        raise ConfigError(f"no checkpoint {path}: `python train.py` makes one, --out_dir= names another")
    try:
        ckpt = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as e:      # a torn file can raise almost anything
        raise ConfigError(f"{path} cannot be read, it is cut short or no checkpoint: {str(e).splitlines()[0]}") from None
    if not isinstance(ckpt, dict) or ckpt.get("format") != "nanomem-1":
        raise ConfigError(f"{path} is not a checkpoint of nanoMem's train.py")
    for key in [key for key, t in ckpt["model"].items() if key.endswith(".home") and not t.numel()]:    # a table in a file of its own
        file = path.with_name(f"{path.stem}.{key}")
        need(file.is_file(), f"{path} goes with {file.name}, which is not beside it")
        ckpt["model"][key] = torch.from_file(str(file), shared=True, size=file.stat().st_size // 4)
    return ckpt


def build_model_config(c, module, overrides):
    """The model's Config from a preset or the depth dial, DENSE and the fields that were given."""
    dense, presets = getattr(module, "DENSE", {}) if c["dense"] else {}, getattr(module, "PRESETS", {})
    for key in dense.keys() & overrides.keys():
        raise ConfigError(f"dense and {key}: dense=True sets {key}={dense[key]}; give one of them")
    fields = {"block_size": c["block_size"], **dense, **overrides}
    if not c["preset"]:
        return module.Config.from_depth(c["depth"], **fields)
    need(c["preset"] in presets, f"preset={c['preset']}: model_{c['model']}.py has {', '.join(presets) or 'none'}")
    return module.Config(**{**presets[c["preset"]], **fields})


def data_fields(meta, module):
    """What a data folder's meta.json says of the model: fields of its Config, such as the tree of clusters."""
    return {k: meta[k] for k in meta.keys() & module.Config.__dataclass_fields__.keys() - {"vocab_size", "block_size"}}


def load_start(config, given, overrides, module):
    """The checkpoint that init_from names, or None. Its model, and on resume its whole config, win over the defaults; on a start the context may
    change. A model file with start(path, its checkpoint or None, fields) makes another model of it: {"model_config", "model"}."""
    resume, source, out = config["init_from"] == "resume", Path(config["init_from"]).resolve(), Path(config["out_dir"]).resolve()
    if config["init_from"] == "scratch":
        return None
    need(resume or out not in (source, source.parent), f"out_dir={config['out_dir']} is where init_from's checkpoint lies: give another --out_dir")
    own = not resume and hasattr(module, "start")
    ckpt = None if own and source.is_dir() and not (source / "ckpt.pt").exists() else load_checkpoint(config["out_dir"] if resume else config["init_from"])
    if own:
        known = data_fields(load_meta(find_dataset(config["dataset"])), module)
        ckpt = module.start(config["init_from"], ckpt, {**known, **overrides, **{k: given[k] for k in ("block_size",) if k in given}})
        config["block_size"] = ckpt["model_config"]["block_size"]
        return ckpt
    fixed = {"model", "preset", "depth", "dense", *overrides} | ({"block_size", "seed", "batch_tokens", "optimizer"} if resume else set())
    saved = {**ckpt["config"], **ckpt["model_config"]}
    for key in [k for k in given if k in fixed and given[k] not in (-1, "", saved.get(k))]:
        raise ConfigError(f"{key}={given[key]}: the checkpoint has {key}={saved.get(key)}; leave {key} out, or start from scratch")
    if not resume:                                             # tasks have rows of their own length
        window = load_meta(find_dataset(config["dataset"])).get("block_size", -1) if config["dataset"] else -1
        saved["block_size"] = next(n for n in (given.get("block_size", -1), window, saved["block_size"]) if n != -1)
        ckpt["model_config"]["block_size"] = saved["block_size"]
    keep = saved if resume else {k: saved[k] for k in ("model", "preset", "depth", "dense", "block_size")}
    config |= {k: v for k, v in keep.items() if k in config and k not in given and k not in ("out_dir", "init_from", "device")}
    return ckpt


def load_model(path, device) -> tuple:
    """Checkpoint -> (model on `device` in eval mode, tokenizer, checkpoint). ConfigError if model_NAME.py no longer fits it."""
    ckpt = load_checkpoint(path)
    name = ckpt["config"]["model"]
    changed = f"{path} does not fit model_{name}.py, which has changed since:"
    try:
        module = importlib.import_module(f"model_{name}")
        config = module.Config(**ckpt["model_config"])
    except ModuleNotFoundError as e:
        if e.name != f"model_{name}":
            raise
        raise ConfigError(f"{path} is a checkpoint of model {name!r}, but there is no model_{name}.py") from None
    except (TypeError, ValueError) as e:
        raise ConfigError(f"{changed} {e}") from None
    with torch.device(device):
        model = module.Model(config)
    if dict(model.named_buffers()).keys() - model.state_dict().keys():
        model.init_weights()    # it has tables that are computed, not saved (nanochat's rotary ones)
    try:
        model.load_state_dict(ckpt["model"])
    except RuntimeError as e:
        raise ConfigError(f"{changed} {' '.join(str(e).split()[6:])[:400]}") from None
    model.eval()
    if hasattr(model, "cache_values"):
        model.cache_values()    # what only inference uses
    return model, find_tokenizer(path, ckpt["data"]), ckpt


def find_tokenizer(path, data):
    """By name, or the tokenizer.json beside the checkpoint, or that of the data folder."""
    if data["tokenizer"] in ("gpt2", "bytes"):
        return get_tokenizer(data["tokenizer"])
    for place in (path, Path(path).parent, data["folder"]):
        if Path(place, "tokenizer.json").is_file():
            return get_tokenizer(str(Path(place, "tokenizer.json")))
    raise ConfigError(f"{path} needs the tokenizer.json of its data folder {data['folder']}, which has none: copy it beside the checkpoint")


def check_length(model, length):
    if not 0 < length <= model.config.block_size:
        raise ConfigError(f"the prompt has {length} tokens, the model's context (block_size) is {model.config.block_size}")


def choose(logits, temperature, top_k, top_p, generator=None):
    """logits (B, vocab) -> one token a row, (B,)."""
    if temperature == 0:
        return logits.argmax(-1)
    logits, tokens = logits.topk(min(top_k or logits.size(-1), logits.size(-1)))     # most likely first
    probs = F.softmax(logits / temperature, -1)
    if top_p:
        probs[probs.cumsum(-1) - probs >= top_p] = 0       # the token that crosses top_p stays
    return tokens.gather(1, torch.multinomial(probs, 1, generator=generator))[:, 0]


def plot_losses(log, png, title):
    """The loss curves of a log.jsonl that train.py wrote, as a picture."""
    from matplotlib.figure import Figure
    rows = [json.loads(line) for line in Path(log).read_text().splitlines()]
    figure = Figure(figsize=(7, 4), layout="tight")
    axes = figure.subplots()
    train, val = [r for r in rows if "loss" in r], [r for r in rows if "val_loss" in r]
    axes.plot([r["step"] for r in train], [r["loss"] for r in train], color="tab:blue", alpha=0.6, lw=1, label="training batches")
    end = f": {val[-1]['val_loss']:.3f} nats" + (f", {val[-1]['val_bpb']:.3f} bits per byte" if val[-1]["val_bpb"] else "") if val else ""
    axes.plot([r["step"] for r in val], [r["val_loss"] for r in val], "o-", color="tab:red", label=f"validation{end}")
    axes.set(xlabel="step", ylabel="cross-entropy (nats per token)", title=title)
    axes.legend()
    figure.savefig(png, dpi=100)


@torch.inference_mode()
def generate(model, idx, max_new_tokens, temperature=1.0, top_k=0, top_p=0.0, eot=None, generator=None, cached=True, **context):
    """
    idx (B, T) int64, 1 <= T <= block_size -> yields the next token of every row, (B,) int64, max_new_tokens times; with `eot` only until
    every row has had it. When the context is full, its last half is read again and opens a new one. A model without new_cache() reads
    the whole context for every token, and so does any with cached=False. context: what else the model wants to know. ConfigError for a prompt or a setting out of range.
    """
    check_length(model, idx.size(1))
    if temperature < 0 or top_k < 0 or not 0 <= top_p <= 1:
        raise ConfigError(f"temperature={temperature}, top_k={top_k}, top_p={top_p}: none may be negative, nor top_p above 1")
    block_size, cache, start = model.config.block_size, None, 0
    room = min(block_size, idx.size(1) + max_new_tokens)
    ended = torch.zeros(len(idx), dtype=torch.bool, device=idx.device)
    for _ in range(max_new_tokens):
        if idx.size(1) - start > block_size:
            cache, start = None, idx.size(1) - max(1, block_size // 2)
        if cached and hasattr(model, "new_cache"):
            cache = cache or model.new_cache(len(idx), room)
            logits, _ = model(idx[:, start + cache.pos:], cache=cache, **context)
        else:
            logits, _ = model(idx[:, start:], **context)
        token = choose(logits[:, -1].float(), temperature, top_k, top_p, generator)
        yield token
        idx = torch.cat((idx, token[:, None]), 1)
        if eot is not None:
            ended |= token == eot
            if ended.all():
                return


def text_pieces(tok, ids):
    """Token ids as they come -> the text, each character as soon as its UTF-8 bytes are whole (a token may end inside one)."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for i in ids:       # a vocabulary that was padded for speed has ids that mean nothing
        yield decoder.decode(EOT.encode() if i == tok.eot else tok.token_bytes(i) if i < tok.vocab_size else b"")
    yield decoder.decode(b"", final=True)


@torch.inference_mode()
def score(model, prompts, answers, batch_size=16, **context):
    """Two lists of lists of token ids -> (N,) float32: the log-probability (nats) of each answer after its prompt, summed over its tokens.
    context: what else the model wants to know, tensors with a row for each prompt."""
    device, sums = next(model.parameters()).device, []
    for first in range(0, len(prompts), batch_size):
        pairs = list(zip(prompts[first:first + batch_size], answers[first:first + batch_size]))
        longest = max(len(p) + len(a) for p, a in pairs) - 1
        check_length(model, longest)
        idx = torch.zeros(len(pairs), longest, dtype=torch.long)       # padding on the right, where a causal model never looks
        targets = torch.full_like(idx, -1)
        for row, (p, a) in enumerate(pairs):
            idx[row, :len(p) + len(a) - 1] = torch.tensor((p + a)[:-1])
            targets[row, len(p) - 1:len(p) + len(a) - 1] = torch.tensor(a)
        rows = {k: v[first:first + batch_size].to(device) for k, v in context.items()}
        logits, _ = model(idx.to(device), **rows)                      # (B, T, vocab)
        nats = F.cross_entropy(logits.transpose(1, 2).float(), targets.to(device), ignore_index=-1, reduction="none")
        sums.append(-nats.sum(1).cpu())
    return torch.cat(sums)


def answer_greedy(model, prompts, max_new_tokens, eot, batch_size=64):
    """Lists of token ids -> their greedy continuations up to `eot`, without it. Prompts of one length share a batch."""
    device, answers = next(model.parameters()).device, [None] * len(prompts)
    for length in {len(p) for p in prompts}:
        same = [n for n, p in enumerate(prompts) if len(p) == length]
        for members in (same[i:i + batch_size] for i in range(0, len(same), batch_size)):
            idx = torch.tensor([prompts[n] for n in members], device=device)
            rows = torch.stack(list(generate(model, idx, max_new_tokens, temperature=0, eot=eot)), 1).tolist()
            for n, row in zip(members, rows):
                answers[n] = list(takewhile(lambda i: i != eot, row))
    return answers


def run_bench(model, device, steps=8):
    """Medians: ms of the prefill and of each later token, tokens/s over the batch."""
    print("batch  context  prefill ms | cached: ms/token  tokens/s | not: ms/token  tokens/s")
    block_size = model.config.block_size
    for B in (1, 8):
        for length in sorted({max(1, n) for n in (block_size // 8, block_size // 2, block_size - steps)}):
            idx, medians = torch.randint(model.config.vocab_size, (B, length), device=device), []
            for cached in (True, False):
                times = []
                for _ in range(4):
                    stream = generate(model, idx, steps, temperature=0, cached=cached)
                    for n in range(steps):
                        start = time.perf_counter()
                        next(stream)
                        if idx.device.type != "cpu":
                            torch.accelerator.synchronize()
                        times.append((n, 1000 * (time.perf_counter() - start)))
                times = times[steps:]       # the first round warms up
                medians += [median(t for n, t in times if n == 0), median(t for n, t in times if n > 0)]
            prefill, decode, _, again = medians
            print(f"{B:5d}  {length:7d}  {prefill:10.1f} | {decode:16.2f} {1000 * B / decode:9.0f} | {again:13.2f} {1000 * B / again:9.0f}")
    for line in model.load_times() if hasattr(model, "load_times") else ():
        print(line)
    if not hasattr(model, "new_cache"):
        print("the model has no new_cache(): both columns read the whole context for every token")


# ----------------------------------------------------------------------------- inspecting

def word_tokens(tok, ids, word=""):
    """Positions of the tokens that hold a byte of the last place where `word` (in any case; "" is any word) stands by itself."""
    pieces = [tok.token_bytes(i) for i in ids]
    letter = rb"[\w\x80-\xff]"
    pattern = rb"(?<!%b)%b(?!%b)" % (letter, re.escape(word.encode()) or letter + b"+", letter)
    found = list(re.finditer(pattern, b"".join(pieces), re.IGNORECASE))
    if not found:
        raise ConfigError(f"there is no {word!r} in the prompt" if word else "there is no word in the prompt")
    ends = list(accumulate(map(len, pieces)))
    return [n for n, end in enumerate(ends) if end > found[-1].start() and end - len(pieces[n]) < found[-1].end()]


@torch.inference_mode()
def look(model, tok, text, word=""):
    """
    What model.inspect() returns for a text, {name: (grid (rows, columns), axes, gate_v)}: the mean over the tokens of a word and, where
    more than two axes are left, over heads. gate_v: 1 where column 0 is no slot but the gate on V itself, else 0.
    """
    ids, seen = [tok.eot] + tok.encode(text), {}
    check_length(model, len(ids))
    tokens = torch.tensor(word_tokens(tok, ids, word))
    for name, (tensor, axes) in model.inspect(torch.tensor([ids], device=next(model.parameters()).device)).items():
        grid, axes = tensor.float().cpu(), list(axes)
        if "token" in axes:
            grid = grid.index_select(axes.index("token"), tokens).mean(axes.index("token"))
            axes.remove("token")
        if len(axes) > 2 and "head" in axes:
            grid = grid.mean(axes.index("head"))
            axes.remove("head")
        if len(axes) > 2:
            raise ConfigError(f"inspect() returns {name!r} over {tuple(axes)}: a picture has two axes")
        gate_v = int(name == "gates" and bool(getattr(model.config, "gate_v", False)))
        seen[name] = torch.atleast_2d(grid), ["", "", *axes][-2:], gate_v
    if not seen:
        raise ConfigError("this model has nothing to inspect: is it the baseline without memory?")
    return seen


def colours(name, grids):
    """(map, low, high); gates are 2 * sigmoid, so they go from 0 to 2, and 1, in white, changes nothing."""
    return ("RdBu_r", 0, 2) if name == "gates" else ("viridis", min(g.min().item() for g in grids), max(g.max().item() for g in grids))


def draw(path, panels, axes, gate_v):
    """panels: rows of (title, grid, colours) -> a PNG. gate_v: column 0 is the gate on V itself, a line sets it apart."""
    from matplotlib.figure import Figure
    fig = Figure(figsize=(1.5 + 2.5 * len(panels[0]), 0.5 + 2.5 * len(panels)), layout="constrained")
    plots, images = fig.subplots(len(panels), len(panels[0]), squeeze=False), {}
    for plot, (title, grid, (cmap, low, high)) in zip(plots.flat, (panel for row in panels for panel in row)):
        rows, columns = grid.shape
        image = plot.imshow(grid.numpy(), cmap=cmap, vmin=low, vmax=high, aspect="auto", interpolation="nearest")
        images.setdefault(cmap, (image, set()))[1].add(plot)
        plot.set(title=title, xticks=range(0, columns, max(1, columns // 8)), yticks=range(0, rows, max(1, rows // 8)))
        if gate_v:
            plot.axvline(0.5, color="black", linewidth=3)
    fig.supxlabel(axes[1] + ", 0: the gate on V itself" * gate_v)
    fig.supylabel(axes[0])
    for image, of in images.values():
        fig.colorbar(image, ax=list(of))
    fig.savefig(path, dpi=120)
    print(f"wrote {path}")


def print_grid(title, grid, axes):
    """Nine columns to a line, so that it fits a terminal; at most five lines of them, the picture has all."""
    print(f"{title}: {axes[0]} by {axes[1]}")
    for first in range(0, min(grid.size(1), 45), 9):
        columns = range(first, min(grid.size(1), first + 9))
        print(" " * 6 + "".join(f" {n:7d}" for n in columns))
        for n, row in enumerate(grid[:, columns].tolist()):
            print(f"{n:6d}" + "".join(f" {v:7.3g}" for v in row))


def inspect_prompt(model, tok, text, words, folder):
    """A table for each word, and for each tensor of inspect() a picture with a panel for each word."""
    seen = [look(model, tok, text, word) for word in words]
    for name, (_, axes, gate_v) in seen[0].items():
        grids = {word or "last word": s[name][0] for word, s in zip(words, seen)}
        for word, grid in grids.items():
            print_grid(f"{name}, {word}", grid, axes)
        palette = colours(name, grids.values())
        draw(folder / f"inspect_{name}.png", [[(f"{name}, {word}", grid, palette) for word, grid in grids.items()]], axes, gate_v)


def inspect_word(model, tok, word, folder):
    """MoVE's Appendix B: texts A1 and A2 share a sense of the word, B1 has another. Is |A1-B1| above |A1-A2|, and at which length?"""
    texts = json.loads((Path(__file__).parent / "experiments" / "words.json").read_text())
    if word not in texts:
        raise ConfigError(f"experiments/words.json has no texts for {word!r}, only for {', '.join(texts)}; other texts: --prompt=")
    seen = {length: [look(model, tok, text, word) for text in three] for length, three in texts[word].items()}
    for name, (_, axes, gate_v) in seen["short"][0].items():
        grids = {length: [s[name][0] for s in three] for length, three in seen.items()}
        apart = {length: [(a1 - a2).abs(), (a1 - b1).abs()] for length, (a1, a2, b1) in grids.items()}
        largest = max(d[:, gate_v:].max().item() for two in apart.values() for d in two) or 1.0      # of the slots, as in the paper
        palette, panels = colours(name, sum(grids.values(), [])), []
        print(f"{name} at {word!r}: mean difference, in parts of the largest ({largest:.3g})")
        print("  length   |A1-A2| same sense   |A1-B1| other sense")
        for length in grids:
            same, other = (d / largest for d in apart[length])
            means = same[:, gate_v:].mean(), other[:, gate_v:].mean()
            print(f"  {length:7s}{means[0]:21.4f}{means[1]:22.4f}")
            panels.append([(f"{length} {text}", grid, palette) for text, grid in zip(("A1", "A2", "B1"), grids[length])]
                          + [(f"|A1-A2| mean {means[0]:.4f}", same, ("Reds", 0, 1)), (f"|A1-B1| mean {means[1]:.4f}", other, ("Reds", 0, 1))])
        draw(folder / f"inspect_{name}_{word}.png", panels, axes, gate_v)


# ----------------------------------------------------------------------------- the command

def write_samples(model, tok, text, c, context):
    idx = torch.tensor([[tok.eot] + tok.encode(text)], device=c.device)
    generator = torch.Generator(c.device).manual_seed(c.seed)
    for n in range(c.num_samples):
        tokens = generate(model, idx, c.max_new_tokens, c.temperature, c.top_k, c.top_p, generator=generator, **context)
        ids = takewhile(lambda i: i != tok.eot or not c.stop_at_eot, (token.item() for token in tokens))
        print("---------------\n" * (n > 0) + text, end="", flush=True)
        for piece in text_pieces(tok, ids):
            print(piece, end="", flush=True)
        print()


def main(argv):
    if {"-h", "--help"} & set(argv):
        return print(__doc__ + "\n" + help_text(Path(__file__).read_text(), _defaults))
    overrides, positionals = configure(argv, _defaults)
    c = SimpleNamespace(**_defaults | overrides)
    if positionals:
        raise ConfigError(f"what is {positionals[0]!r}? A checkpoint is given as --out_dir={positionals[0]}, a text as --prompt=")
    if c.num_samples < 1 or c.max_new_tokens < 1:
        raise ConfigError(f"num_samples={c.num_samples}, max_new_tokens={c.max_new_tokens}: both must be at least 1")
    if c.words and not c.inspect or c.inspect and not (c.words or c.prompt):
        raise ConfigError("--inspect=True goes with a text, --prompt=..., or with a word of experiments/words.json, --words=bank")
    if c.dtype not in ("", "float32", "bfloat16"):
        raise ConfigError(f"dtype={c.dtype}: float32 or bfloat16")
    path = c.out_dir or max(Path("out").glob("*/ckpt.pt"), key=os.path.getmtime, default="out/*/ckpt.pt")
    c.device = c.device or (torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu")
    try:
        kind = torch.empty(1, device=c.device).device.type
    except (RuntimeError, AssertionError) as e:
        raise ConfigError(f"device={c.device}: {str(e).splitlines()[0]}") from None
    half = c.dtype == "bfloat16" or not c.dtype and kind == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    model, tok, ckpt = load_model(path, c.device)
    print(f"{path}: model {ckpt['config']['model']}, step {ckpt['step']}, {c.device} {'bfloat16' if half else 'float32'}", file=sys.stderr)
    text = sys.stdin.buffer.read().decode(errors="replace").removesuffix("\n") if c.prompt == "-" else c.prompt
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    context = {}
    if hasattr(model, "prompt_context"):
        try:
            context, note = model.prompt_context(text, (folder, ckpt["data"]["folder"]), c.leaf, c.block, c.embedder_path)
        except ValueError as e:
            raise ConfigError(str(e)) from None
        context = {k: v.to(c.device) if torch.is_tensor(v) else v for k, v in context.items()}
        print(note, file=sys.stderr)
    elif c.leaf or c.block:
        raise ConfigError(f"leaf={c.leaf}, block={c.block}: model_{ckpt['config']['model']}.py has no memories to choose from")
    with torch.autocast(kind, torch.bfloat16, enabled=half):
        if c.bench:
            run_bench(model, c.device)
        elif c.inspect and not hasattr(model, "inspect"):
            raise ConfigError(f"model_{ckpt['config']['model']}.py has no inspect()")
        elif c.inspect and c.prompt:
            inspect_prompt(model, tok, text, c.words.split(","), folder)
        elif c.inspect:
            for word in c.words.split(","):
                inspect_word(model, tok, word, folder)
        else:
            write_samples(model, tok, text, c, context)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as e:
        sys.exit(f"sample.py: {e}")
    except KeyboardInterrupt:
        sys.exit("")
