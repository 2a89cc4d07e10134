"""
Load a checkpoint of any model_NAME.py, generate with a cache, draw what the model computes inside.

    python sample.py                                       # the newest checkpoint in out/
    python sample.py --out_dir=out/move-d12 --prompt="The Moon is" --temperature=0
    git log -3 | python sample.py --prompt=-               # the prompt from stdin
    python sample.py --inspect=True --prompt="We sat on the river bank" --words=river,bank

A prompt opens a document, so the end-of-text token goes before it as in training; the empty prompt
is that token alone. The same token ends a sample. The text goes to stdout, what a pipe should not
see to stderr. Of a prompt from stdin the last newline is the shell's and is left out.
"""
import codecs
import importlib
import json
import math
import os
import re
import sys
import zipfile
from itertools import accumulate, takewhile
from pathlib import Path
from types import SimpleNamespace

from prepare_fineweb import EOT, TOKENIZERS, ConfigError, configure, get_tokenizer, guard
from prepare_fineweb import help_text, load_meta, need, reading

if __name__ == "__main__":
    guard("sample.py")

import torch
import torch.nn.functional as F

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
inspect = False         # pictures of what the model's inspect() returns for the prompt
words = ""              # of the prompt, by commas: those that --inspect looks at; empty: its last
leaf = ""               # hierarchical memories: generic | none | a leaf; empty: the prompt's path
block = ""              # theirs: closed nodes, 2:17,... or best:2, the path's own of level 2
embedder_path = ""      # theirs: folder of the tree's embedder, where that is not installed
_defaults = {key: value for key, value in globals().items()
             if key[0].islower() and isinstance(value, (int, float, str))}
# -----------------------------------------------------------------------------
AT_LEAST = dict(num_samples=1, max_new_tokens=1, temperature=0, top_k=0, top_p=0)


# ----------------------------------------------------------------------------- model files

class Hooks:
    """The optional methods of a Model, as load_module() adds them where a model has none: they do
    nothing. The table in train.py says what each is for."""

    def begin_step(self, step, max_iters):
        pass

    def training_context(self, context, seed, rows):
        return {}

    def prompt_context(self, text, folders, leaf, block, embedder_path):
        need(not leaf and not block, f"leaf={leaf}, block={block}: this model has no such memories")
        return {}, ""

    def new_cache(self, batch_size, max_len):
        return None

    def inspect(self, idx, **context):
        return {}


def start(path, ckpt, fields):
    """The sixth hook, of the module: the checkpoint's model as it is, except for its context."""
    have = ckpt["model_config"]
    for key, value in fields.items():
        same = key == "block_size" or value in (-1, "", have.get(key))
        need(same, f"{key}={value}: {path} has {key}={have.get(key)} and goes on so; leave {key}, "
             "depth and preset out, or start from scratch")
    block_size = fields.get("block_size", have["block_size"])
    return {"model_config": {**have, "block_size": block_size}, "model": ckpt["model"]}


def load_module(name):
    """model_NAME.py, imported, with every hook that it does not have itself."""
    try:
        module = importlib.import_module(f"model_{name}")
    except ModuleNotFoundError as error:
        whole = f"model_{name}"
        if error.name not in (whole, whole.partition(".")[0]):     # what it imports is not there
            raise
        found = sorted(path.stem[6:] for path in Path(__file__).parent.glob("model_*.py"))
        message = f"model={name}: there is no model_{name}.py here; there are {', '.join(found)}"
        raise ConfigError(message) from None
    for hook, default in vars(Hooks).items():
        if not hook.startswith("_") and not hasattr(module.Model, hook):
            setattr(module.Model, hook, default)
    if not hasattr(module, "start"):
        module.start = start
    return module


def make_config(module, preset, depth, fields):
    """The module's Config from a row of its PRESETS, or from the depth dial."""
    if not preset:
        return module.Config.from_depth(depth, **fields)
    there = ", ".join(module.PRESETS) or "none"
    need(preset in module.PRESETS, f"preset={preset}: {module.__name__}.py has {there}")
    return module.Config(**{**module.PRESETS[preset], **fields})


# ----------------------------------------------------------------------------- checkpoints

def write_checkpoint(path, state):
    """Temporary file, fsync, rename: whatever is killed when, `path` is a whole checkpoint, the old
    one or the new one. On a full disk the temporary file goes and the old checkpoint stays."""
    temporary = Path(f"{path}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        if "OutOfMemoryError" in repr(error) or "allocate memory" in repr(error):
            raise
        raise ConfigError(f"{path} cannot be written, {error}: make room on its disk, or give "
                          "another --out_dir=") from None
    finally:
        temporary.unlink(missing_ok=True)


PARTS = dict(model=dict, step=int, log=list, optimizers=list, config=dict, model_config=dict,
             rng=torch.Tensor, train=dict, data=dict)           # of a checkpoint, beside the format


def load_checkpoint(path, sums=False) -> dict:
    """A ckpt.pt, or its folder -> what train.py saved; the tensors stay in the file until used.
    sums: compares the checksums of all its parts first, for which it is read whole."""
    path = Path(path) / "ckpt.pt" if Path(path).is_dir() else Path(path)
    need(path.is_file(), f"no checkpoint {path}: train.py makes one in its out_dir")
    with reading(path, "cannot be read, it is cut short or no checkpoint"):
        damaged = sums and zipfile.ZipFile(path).testzip()
        need(not damaged, f"{path} is damaged: the sum of {damaged} is wrong")
        ckpt = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    ours = isinstance(ckpt, dict) and ckpt.get("format") == "nanomem-1"
    need(ours, f"{path} is not a checkpoint of nanoMem's train.py")
    for key, kind in PARTS.items():
        need(isinstance(ckpt.get(key), kind), f"{path} is damaged: its {key} must be of type "
             f"{kind.__name__}")
    whole = "model" in ckpt["config"] and {"tokenizer", "folder", "eot"} <= ckpt["data"].keys()
    need(whole and ckpt["step"] >= 0, f"{path} is damaged: its step, config or data")
    return ckpt


def materialize(model, device):
    """A model made on the meta device gets its memory and initial values. What init_weights() does
    not fill would be whatever lay in that memory: an error."""
    model.to_empty(device=device)

    def floats():
        tensors = (*model.named_parameters(), *model.named_buffers())
        return {name: t.detach() for name, t in tensors if t.is_floating_point()}

    for t in floats().values():
        t.fill_(math.nan)
    model.init_weights()
    empty = [name for name, t in floats().items() if t.sum().isnan()]
    need(not empty, f"{type(model).__module__}.py: init_weights() must fill all tensors, buffers, "
         f"too; it leaves out {', '.join(empty)}")


def assemble(path, ckpt):
    """A checkpoint -> its model on the CPU, with the checkpoint's own tensors, which are in the
    mapped file. ConfigError if model_NAME.py no longer fits it."""
    name = ckpt["config"]["model"]
    module = load_module(name)
    with reading(path, f"does not fit model_{name}.py, which has changed since"):
        with torch.device("meta"):
            model = module.Model(module.Config(**ckpt["model_config"]))
        if dict(model.named_buffers()).keys() - model.state_dict().keys():
            materialize(model, "cpu")   # it has tables that are computed, not saved (rotary, say)
        model.load_state_dict(ckpt["model"], assign=True)
        for key, p in model.named_parameters():
            need(p.is_floating_point(), f"{path}: {key} holds {p.dtype}")
    return model


def load_model(path, device) -> tuple:
    """Checkpoint -> (model on `device` in eval mode, tokenizer, checkpoint)."""
    ckpt, device = load_checkpoint(path), pick_device(device)
    model = assemble(path, ckpt)
    with reading(path):
        return model.to(device).eval(), find_tokenizer(path, ckpt["data"]), ckpt


def load_start(path, module, fields, dataset=None) -> dict:
    """--init_from=PATH, a run's checkpoint or a Hugging Face folder -> {"model_config", "model"},
    as module's start() makes them. fields: those of Config that were given. dataset: the data
    folder to train on, which must have the same tokens."""
    source = Path(path)
    if (source / "config.json").exists() and not (source / "ckpt.pt").exists():
        ckpt = load_hugging_face(source, module)
    else:
        ckpt = load_checkpoint(source, sums=True)
        assemble(source, ckpt)      # a checkpoint that lacks a tensor must not train from random
    unknown = sorted(ckpt["model_config"].keys() - module.Config.__dataclass_fields__.keys())
    need(not unknown, f"{path} is a checkpoint of another model: it has {', '.join(unknown[:3])}")
    if dataset:
        check_tokens(path, ckpt.get("data", {}), dataset)
    return module.start(path, ckpt, fields)


def check_tokens(path, data, dataset):
    """The data folder must have the tokens of the checkpoint or Hugging Face folder at PATH: equal
    vocabularies where both have a file, else equal sizes. Names and paths may differ."""
    meta = load_meta(dataset)
    theirs = tokenizer_file(path, data)
    ours = Path(dataset, "tokenizer.json")
    known = {**meta, **data}
    if theirs and not data:
        known["vocab_size"] = 1 + max(vocabulary(theirs, added=True).values())
    if theirs and ours.is_file():
        same = vocabulary(theirs) == vocabulary(ours)
    else:
        same = known["vocab_size"] == meta["vocab_size"]
        if theirs or ours.is_file():        # `bytes` has no file
            same = same and "bytes" not in (known["tokenizer"], meta["tokenizer"])
    need(same, f"{dataset} has another tokenizer than {path}: prepare it with that one, "
         f"{theirs or known['tokenizer']}")


def vocabulary(file, added=False):
    """{token: id} of a tokenizer.json, with or without what was added to its vocabulary."""
    from tokenizers import Tokenizer
    with reading(file):
        return Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=added)


def tokenizer_file(path, data):
    """The tokenizer.json beside a checkpoint. If there is none, and the tokenizer is not gpt2 or
    bytes, the data folder's."""
    name = "tokenizer.json"
    path = Path(path)
    if path.is_dir():
        path /= "ckpt.pt"
    if path.name.startswith("previous-"):
        name = "previous-tokenizer.json"
    file = path.with_name(name)
    if "folder" in data and data["tokenizer"] not in TOKENIZERS and not file.is_file():
        file = Path(data["folder"], "tokenizer.json")
    return file if file.is_file() else None


def find_tokenizer(path, data):
    """The checkpoint's, by its name or from its file."""
    file = tokenizer_file(path, data)
    name = data["tokenizer"]
    named = TOKENIZERS.get(name)
    # Of another size: a tokenizer.json from a folder that happens to be called gpt2 or bytes.
    if named and named.vocab_size == data["vocab_size"]:
        return get_tokenizer(name)
    need(file or named, f"{path} needs the tokenizer.json of its data folder "
         f"{data['folder']}, which has none: copy it beside the checkpoint")
    name = str(file or name)
    tok = get_tokenizer(name)
    need(tok.vocab_size == data["vocab_size"], f"{name} is not the tokenizer of {path}: "
         "copy that of its data beside the checkpoint")
    return tok


# ----------------------------------------------------------------------------- generating

def pick_device(name):
    """"" -> the environment's NANOMEM_DEVICE, else the accelerator if there is one, else the CPU; a
    name -> itself, if it is there. One with a number becomes the current GPU."""
    name = name or os.environ.get("NANOMEM_DEVICE", "")
    hint = "leave the key out to take what is" if name else "give --device=cpu"
    if not name:
        name = "cpu"
        if torch.accelerator.is_available():
            name = torch.accelerator.current_accelerator().type
    need(name.split(":")[0] in ("cuda", "mps", "cpu"), f"device={name}: choose cuda, mps or cpu")
    try:
        torch.empty(1, device=name)
        name = "cpu" if name.startswith("cpu:") else name
        if name.startswith("cuda:"):
            torch.cuda.set_device(name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].split(". ")[0]
        message = f"device={name} is not there ({reason}); {hint}"
        raise ConfigError(message) from None
    return name


def check_length(model, length):
    block_size = model.config.block_size
    need(0 < length <= block_size, f"the prompt has {length} tokens, the model's context "
         f"(block_size) is {block_size}: shorten it")


def choose(logits, temperature, top_k, top_p, generator=None):
    """logits (B, vocab) -> one token a row, (B,)."""
    if temperature < 1e-30:         # a quotient by it could be infinite
        return logits.argmax(-1)
    size = logits.size(-1)
    logits, tokens = logits.topk(min(top_k, size) if top_k else size)       # most likely first
    probs = F.softmax(logits / temperature, -1)
    if top_p:
        before = probs.cumsum(-1) - probs                   # of all that are more likely
        before[:, 0] = -1                                   # the likeliest is never left out
        probs[before >= top_p] = 0                          # the token that crosses top_p stays
    return tokens.gather(1, torch.multinomial(probs, 1, generator=generator))[:, 0]


@torch.inference_mode()
def generate(model, idx, max_new_tokens, temperature=1.0, top_k=0, top_p=0.0, eot=None,
             generator=None, cached=True, **context):
    """
    idx (B, T) int64, 1 <= T <= block_size -> yields the next token of every row, (B,) int64,
    max_new_tokens times; with `eot` only until every row has had it. When the context is full, it
    goes on from the last half of it. Without a cache (new_cache() gives None, or cached=False) the
    whole context is read for every token. context: more arguments of forward().
    """
    check_length(model, idx.size(1))
    block_size = model.config.block_size
    cache, start = None, 0
    ended = torch.zeros(len(idx), dtype=torch.bool, device=idx.device)
    for n in range(max_new_tokens):
        if idx.size(1) - start > block_size:
            start = idx.size(1) - max(1, block_size // 2)
            cache = None
        if cached and cache is None:
            cache = model.new_cache(len(idx), min(block_size, idx.size(1) + max_new_tokens))
        if cache is not None:
            logits, _ = model(idx[:, start + cache.pos:], cache=cache, **context)
        else:
            logits, _ = model(idx[:, start:], **context)
        last = logits[:, -1].float()
        if n == 0:                  # only once: the CPU waits here for the GPU
            need(last.isfinite().all(),
                 "the model's output is not a number: take another checkpoint")
        token = choose(last, temperature, top_k, top_p, generator)
        yield token
        idx = torch.cat((idx, token[:, None]), 1)
        if eot is not None:
            ended |= token == eot
            if ended.all():
                return


def text_pieces(tok, ids):
    """Token ids as they come -> the text, each character as soon as its UTF-8 bytes are whole (a
    token may end inside one)."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for i in ids:
        if i == tok.eot:
            yield decoder.decode(EOT.encode())
        elif i < tok.vocab_size:        # a vocabulary padded for speed has ids that mean nothing
            yield decoder.decode(tok.between + tok.token_bytes(i))
    yield decoder.decode(b"", final=True)


def write_samples(model, tok, c, context):
    idx = torch.tensor([[tok.eot] + tok.encode(c.prompt)], device=c.device)
    generator = torch.Generator(c.device).manual_seed(c.seed)
    for _ in range(c.num_samples):
        tokens = generate(model, idx, c.max_new_tokens, c.temperature, c.top_k, c.top_p,
                          generator=generator, **context)
        ids = map(int, tokens)
        if c.stop_at_eot:
            ids = takewhile(lambda i: i != tok.eot, ids)
        print(c.prompt, end="", flush=True)
        for piece in text_pieces(tok, ids):
            print(piece, end="", flush=True)
        print("\n---------------")


# ----------------------------------------------------------------------------- inspecting

def word_tokens(tok, ids, word=""):
    """Positions of the tokens that hold a byte of the last place where `word` (in any case; "" is
    any word) stands by itself."""
    pieces = [tok.between + tok.token_bytes(i) for i in ids]
    # A context may begin within the bytes of a letter.
    text = b"".join(pieces).decode(errors="surrogateescape")
    wanted = re.escape(word) or r"\w+"
    found = list(re.finditer(rf"(?<!\w){wanted}(?!\w)", text, re.IGNORECASE))
    need(found, f"there is no {word!r} in the prompt" if word else "there is no word in the prompt")
    before = text[:found[-1].start()].encode(errors="surrogateescape")
    first = len(before)
    last = first + len(found[-1][0].encode(errors="surrogateescape"))
    ends = list(accumulate(map(len, pieces)))
    starts = [0, *ends]
    return [n for n, end in enumerate(ends) if end > first and starts[n] < last]


@torch.inference_mode()
def look(model, tok, text, word="", **context):
    """
    model.inspect() of a text, as pictures: {name: (grid (rows, columns), axes, gate_v, by_word)}.
    grid: the mean over the tokens of `word` and, if more than two axes are left, over heads.
    gate_v: 1 if column 0 is MoVE's gate on V and no slot, else 0. by_word: False if the grid is of
    the whole text. context: from prompt_context().
    """
    ids, seen = [tok.eot] + tok.encode(text), {}
    tokens = torch.tensor(word_tokens(tok, ids, word))
    device = next(model.parameters()).device
    found = model.inspect(torch.tensor([ids], device=device), **context)
    for name, (tensor, axes) in found.items():
        grid, axes = tensor.float().cpu(), list(axes)
        by_word = "token" in axes
        if by_word:
            grid = grid.index_select(axes.index("token"), tokens).mean(axes.index("token"))
            axes.remove("token")
        if len(axes) > 2 and "head" in axes:
            grid = grid.mean(axes.index("head"))
            axes.remove("head")
        need(len(axes) <= 2, f"inspect() returns {name!r} over {axes}: a picture has two axes")
        gate_v = int(name == "gates" and getattr(model.config, "gate_v", 0))
        seen[name] = torch.atleast_2d(grid), ["", "", *axes][-2:], gate_v, by_word
    need(seen, "this model has nothing to inspect: is it the baseline without memory, "
         "or without an inspect() of its own?")
    return seen


def draw(path, name, grids, axes, gate_v):
    """grids: {title: (rows, columns)} -> a PNG, a panel for each, on one scale. gate_v: a line sets
    column 0 apart."""
    from matplotlib.figure import Figure
    least = min(grid.min().item() for grid in grids.values())
    most = max(grid.max().item() for grid in grids.values())
    colours = dict(cmap="viridis", vmin=least, vmax=most)
    if name == "gates":         # 2 * sigmoid: 1, in white, changes nothing
        colours = dict(cmap="RdBu_r", vmin=0, vmax=2)
    fig = Figure(figsize=(1.5 + 2.5 * len(grids), 3), layout="constrained")
    plots = fig.subplots(1, len(grids), squeeze=False)[0]
    for plot, (title, grid) in zip(plots, grids.items()):
        image = plot.imshow(grid.numpy(), aspect="auto", **colours)
        plot.set_title(f"{name}, {title}")
        plot.locator_params(nbins=8, integer=True, min_n_ticks=1)
        if gate_v:
            plot.axvline(0.5, color="black", linewidth=3)
    fig.supxlabel(f"{axes[1]}, 0: the gate on V itself" if gate_v else axes[1])
    fig.supylabel(axes[0])
    fig.colorbar(image, ax=plots)
    fig.savefig(path, dpi=120)
    print(f"wrote {path}")


def inspect_prompt(model, tok, text, words, folder, context):
    """For each tensor of inspect() a picture with a panel a word, or one of the whole text."""
    seen = {word: look(model, tok, text, word, **context) for word in words}
    for name, (whole, axes, gate_v, by_word) in seen[words[0]].items():
        grids = {"whole text": whole}
        if by_word:
            grids = {word or "last word": found[name][0] for word, found in seen.items()}
        draw(folder / f"inspect_{name}.png", name, grids, axes, gate_v)


# ----------------------------------------------------------------------------- Hugging Face

HUGGING_FACE = {       # their names of a Llama's or Qwen2's tensors -> ours
    "model.embed_tokens": "embed", "model.layers": "blocks", "model.norm": "norm",
    "lm_head": "head", "input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm",
    "self_attn.q_proj": "attn.W_Q", "self_attn.k_proj": "attn.W_K", "self_attn.v_proj": "attn.W_V",
    "self_attn.o_proj": "attn.W_O", "mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down"}
SUPPORTED = dict(       # what the models here compute, of a config.json's fields; absent: the first
    model_type=("llama", "qwen2"), hidden_act=("silu",), rope_type=("default", "llama3"),
    partial_rotary_factor=(1,), attention_bias=(False,), mlp_bias=(False,),
    use_sliding_window=(False,), quantization_config=(None,))
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def load_hugging_face(path, module) -> dict:
    """A folder of a Llama or Qwen2 -> {"model_config", "model"} of module's dense model."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError:
        message = f"{path} is a Hugging Face folder: pip install transformers safetensors"
        raise ConfigError(message) from None
    logging.set_verbosity(logging.CRITICAL)     # what it only warns about is refused here
    logging.disable_progress_bar()
    with reading(f"{path}/config.json", "cannot be read"):
        theirs = AutoConfig.from_pretrained(path, local_files_only=True)
    fields = fields_of_hugging_face(path, theirs, module)
    check_safetensors(path)
    with reading(path, "cannot be loaded"):
        model, info = AutoModelForCausalLM.from_pretrained(
            path, config=theirs, dtype=torch.float32, use_safetensors=True, local_files_only=True,
            output_loading_info=True, ignore_mismatched_sizes=True)
    for kind in ("missing", "unexpected", "mismatched"):
        names = sorted(map(str, info[f"{kind}_keys"]))
        need(not names, f"{path}: {len(names)} {kind} tensors, beside its config.json: {names[:1]}")
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and fields["tied"]:
            same = torch.equal(tensor, model.get_input_embeddings().weight)
            need(same, f"{path}: its config.json ties head and embedding, but they differ")
            continue
        for their_part, our_part in HUGGING_FACE.items():
            name = name.replace(their_part, our_part)
        tensors[name] = tensor
    return {"model_config": vars(module.Config(**fields)), "model": tensors}


def fields_of_hugging_face(path, theirs, module):
    """Their config -> the fields of module's Config; ConfigError for what it does not compute."""
    rope = getattr(theirs, "rope_parameters", None) or {}
    given = theirs.to_dict() | rope
    for name, choices in SUPPORTED.items():
        value = given.get(name, choices[0])
        need(value in choices,
             f"{path}/config.json: {name}={value!r} is not supported, only {choices}")
    width, n_head = theirs.hidden_size, theirs.num_attention_heads
    d_h = getattr(theirs, "head_dim", None) or width // n_head
    need(d_h * n_head == width and d_h % 2 == 0, f"{path}/config.json: head_dim={d_h} with "
         f"hidden_size={width} and {n_head} heads is not supported: it must be even, and "
         "hidden_size its product with the heads")
    fields = dict(
        n_layer=theirs.num_hidden_layers, n_head=n_head, n_kv_head=theirs.num_key_value_heads,
        n_embd=width, n_inner=theirs.intermediate_size, vocab_size=theirs.vocab_size,
        block_size=min(2048, theirs.max_position_embeddings), tied=theirs.tie_word_embeddings,
        norm_eps=theirs.rms_norm_eps, rope_base=float(rope["rope_theta"]), rope_scaling="",
        qkv_bias=theirs.model_type == "qwen2", qk_norm=False, **module.DENSE)
    if rope.get("rope_type") == "llama3":
        fields["rope_scaling"] = ":".join(f"{rope[part]:.12g}" for part in LLAMA3)
    known = module.Config.__dataclass_fields__
    for name in fields.keys() - known.keys():
        need(fields[name] in (False, ""), f"{path}: {module.__name__}.py has no {name}, which this "
             f"model needs ({name}={fields[name]})")
    return {name: value for name, value in fields.items() if name in known}


def check_safetensors(path):
    """What transformers would accept without a word: a file of another folder, integer weights."""
    from safetensors import safe_open
    index, files = path / "model.safetensors.index.json", ["model.safetensors"]
    if index.exists():
        with reading(index, "cannot be read"):
            files = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    for file in files:
        need(Path(str(file)).name == file, f"{index} names {file}, which is outside of its folder")
        with reading(path / file, "cannot be read, it is missing, cut short or of another kind"):
            with safe_open(path / file, "pt") as tensors:
                kinds = {tensors.get_slice(name).get_dtype() for name in tensors.keys()}
        wrong = sorted(kinds - {"F64", "F32", "F16", "BF16"})
        need(not wrong, f"{path / file} holds {', '.join(wrong)}: quantized weights are refused")


# ----------------------------------------------------------------------------- the command

def main(argv):
    if {"-h", "--help"} & set(argv):
        return print(__doc__ + "\n" + help_text(Path(__file__).read_text("utf-8"), _defaults))
    overrides, others = configure(argv, _defaults)
    c = SimpleNamespace(**{**_defaults, **overrides})
    need(not others, f"what is {others[:1]}? A run is given as --out_dir=, a text as --prompt=")
    for key, least in AT_LEAST.items():
        need(getattr(c, key) >= least, f"{key}={getattr(c, key)}: must be at least {least}")
    need(c.top_p <= 1, f"top_p={c.top_p}: must be between 0 and 1")
    need(0 <= c.seed < 2 ** 63, f"seed={c.seed}: must be from 0 to 2^63 - 1")
    need(c.dtype in ("", "float32", "bfloat16"), f"dtype={c.dtype}: float32 or bfloat16")
    need(c.inspect or not c.words, "--words=... goes with --inspect=True")
    c.device = pick_device(c.device)
    kind = c.device.split(":")[0]
    half = c.dtype == "bfloat16"
    if not c.dtype and kind == "cuda":
        half = torch.cuda.is_bf16_supported(including_emulation=False)
    runs = Path("out").glob("*/ckpt.pt")
    path = Path(c.out_dir or max(runs, key=os.path.getmtime, default="out/*/ckpt.pt"))
    model, tok, ckpt = load_model(path, c.device)
    if c.prompt == "-":
        need(sys.stdin, "--prompt=-: there is no stdin; pipe the text in")
        c.prompt = sys.stdin.buffer.read().decode(errors="replace").removesuffix("\n")
    # From stdin or the command line: bytes that are no UTF-8 become U+FFFD.
    c.prompt = c.prompt.encode(errors="surrogateescape").decode(errors="replace")
    folder = path if path.is_dir() else path.parent
    places = (folder, ckpt["data"]["folder"])
    context, note = model.prompt_context(c.prompt, places, c.leaf, c.block, c.embedder_path)
    for key, value in context.items():
        if torch.is_tensor(value):
            context[key] = value.to(c.device)
    header = f"{path}: model {ckpt['config']['model']}, step {ckpt['step']}"
    if note:
        header += f"\n{note}"
    check_length(model, 1 + len(tok.encode(c.prompt)))
    with torch.autocast(kind, torch.bfloat16, enabled=half):
        if c.inspect:
            words = [word.strip() for word in c.words.split(",")]
            inspect_prompt(model, tok, c.prompt, words, folder, context)
            print(header, file=sys.stderr)
        else:
            print(header, file=sys.stderr)
            write_samples(model, tok, c, context)


if __name__ == "__main__":
    main(sys.argv[1:])
