"""What the layers of trained models hold: LIMe's analyses (sections 5.3 and 5.5, Appendix D) and MIDUS's (Figures 2 and 3), as pictures and numbers.

    python experiments/analysis.py entropy --runs=out/lime-d4,out/lime-d4-dense            # Renyi entropy of values and hidden states
    python experiments/analysis.py separability --runs=out/lime-d4,out/lime-d4-dense       # of is, are, was, were, by a linear classifier
    python experiments/analysis.py blimp --blimp=FOLDER --runs=out/lime-d4,out/lime-d4-dense    # grammatical or not? by a linear classifier
    python experiments/analysis.py retrieval --runs=out/hiermem-d4                         # loss with fetched, generic, wrong and no memories
    python experiments/analysis.py rag --runs=out/hiermem-d4-dense                         # loss with a retrieved text in the context
    python experiments/analysis.py router --runs=out/lime-d4                               # which layers each layer reads
    python experiments/analysis.py importance --dataset=ebooks --runs=out/base,out/midus   # of every attention head, before CPT and after
    python experiments/analysis.py slots --runs=out/midus                                  # which memory slots each head uses; what is constant
    python experiments/analysis.py parts --runs=out/ultramem-d4,out/ultramem-d4-dense      # loss without one layer's attention, FFN or memory
    python experiments/analysis.py timings --runs=out/llama-pro,out/midus,out/base         # of prefill and decoding, by prompt length

Values are what a layer's attention sums up, after a router or another memory has mixed them; hidden states are what its block puts out. A head's
importance is the mean over windows of |sum over t of a_ht . dl/da_ht|, where l is the window's summed loss, or that of its answers to prompts.
Timings go round the runs, and are medians; "uncached" is the same model without its cache of values, searching for slots in two stages. Writes
analysis_NAME.png and analysis_NAME.json into the first run's folder. Runs that are compared must have been trained on the same tokens.
"""
import contextlib
import functools
import json
import lzma
import re
import sys
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from prepare_fineweb import ConfigError, TokenShards, configure, find_dataset, help_text, load_meta
from sample import generate, load_model

# ------------------------------------------------------------------------------ settings: --key=value
runs = ""                     # folders of runs (or ckpt.pt files), by commas
out = ""                      # folder to write; empty: the first run's
dataset = ""                  # data folder; empty: the one that the first run was trained on
sequences = 64                # entropy, importance, slots, parts: validation windows (retrieval, rag: four times as many)
datastore = 20000             # rag: training texts to retrieve from
alpha = 0.5                   # entropy: its order
projected = False             # entropy, separability, blimp: of what W_V puts out, as LIMe's text has it, not of what its code measures, the routed values
occurrences = 1100            # separability: of each word
blimp = ""                    # folder of BLiMP's PARADIGM.jsonl or .jsonl.xz
lengths = ""                  # timings: tokens of the prompts, by commas; empty: an eighth of the context, half, all but the new tokens
repetitions = 7               # timings: of each, in turn
new_tokens = 8                # timings: after the prompt; the first is the prefill's
device = "cpu"                # cpu | cuda
_defaults = {k: v for k, v in globals().items() if not k.startswith("_") and isinstance(v, (int, float, str))}
# ------------------------------------------------------------------------------
WORDS = ("is", "are", "was", "were")
BLIMP = ("determiner_noun_agreement_with_adj_irregular_1", "complex_NP_island", "regular_plural_subject_verb_agreement_2",
         "determiner_noun_agreement_with_adj_2", "determiner_noun_agreement_1", "determiner_noun_agreement_2",
         "irregular_plural_subject_verb_agreement_1", "irregular_plural_subject_verb_agreement_2", "distractor_agreement_relational_noun",
         "determiner_noun_agreement_with_adjective_1")         # Appendix D's ten, in its order


# ---------------------------------------------------------------- reading the layers

def value_module(attention, projected=False):
    """The submodule that puts out what the attention sums up: LIMe's router (keys and values), MoVE's memory, or the projection; projected: the last."""
    return next(m for name in (("W_UV", "W_V") if projected else ("W_UV", "router", "memory", "W_V")) if (m := getattr(attention, name, None)) is not None)


@torch.no_grad()
def states(model, idx, projected=False):
    """idx (B, T) -> {"values": a list over layers of (B, T, features), "hiddens": likewise}, fp32, by forward hooks."""
    modules = {"values": [value_module(block.attn, projected) for block in model.blocks], "hiddens": list(model.blocks)}
    found, hooks = {kind: [None] * len(model.blocks) for kind in modules}, []
    for kind, layers in modules.items():
        for layer, module in enumerate(layers):
            def keep(module, inputs, output, kind=kind, layer=layer):
                found[kind][layer] = (output[-1] if isinstance(output, tuple) else output).flatten(2).float()
            hooks.append(module.register_forward_hook(keep))
    try:
        model(idx)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def collect(model, rows, pick, projected=False, batch_size=16):
    """rows: 1-D tensors of token ids -> {"values": over layers [pick(n, z) of every row n], "hiddens": likewise}; z (tokens, features)."""
    kept, device = {}, next(model.parameters()).device
    for first in range(0, len(rows), batch_size):
        part = rows[first:first + batch_size]
        idx = torch.nn.utils.rnn.pad_sequence(part, batch_first=True).to(device)       # causal: what is on the right does not matter
        for kind, layers in states(model, idx, projected).items():
            for layer, z in zip(kept.setdefault(kind, [[] for _ in layers]), layers):
                layer += [pick(first + n, z[n, :len(row)]).cpu() for n, row in enumerate(part)]
    return kept


# ---------------------------------------------------------------- entropy

def renyi_entropy(z, alpha=0.5):
    """z (T, features) -> nats: 0 if the tokens' vectors are multiples of one, log T if they are orthogonal and equally long (section 5.3)."""
    z = z.double()
    p = torch.linalg.eigvalsh(z @ z.T if len(z) <= z.size(1) else z.T @ z).clamp(min=0)        # the same eigenvalues, but for zeros
    return float(((p / p.sum()) ** alpha).sum().log() / (1 - alpha))


def standardise(pieces):
    """Tensors (T_i, features): each feature gets mean 0 and variance 1 over all of them."""
    together = torch.cat(pieces)
    mean, std = together.mean(0), together.std(0).clamp(min=1e-6)
    return [(z - mean) / std for z in pieces]


def entropy(model, tok, folder, c):
    """{"values": over layers [entropy of every validation window], "hiddens": likewise}; of a task's rows without the padding."""
    data = TokenShards(folder, "val", model.config.block_size)
    x, y = data.batch(range(min(c.sequences, data.n_windows)))
    lengths = [int((row >= 0).nonzero()[-1]) + 1 if "block_size" in data.meta else len(row) for row in y]
    kept = collect(model, [row[:n] for row, n in zip(x, lengths)], lambda n, z: z, c.projected)
    return {kind: [[renyi_entropy(z, c.alpha) for z in standardise(layer)] for layer in layers] for kind, layers in kept.items()}


# ---------------------------------------------------------------- linear classifiers

def probe(x, y, groups, folds=5):
    """Logistic regression of the classes y (N,) on x (N, features): the accuracy on each fold after training on the others. Members of
    a group (N,) share a fold. Features are standardised; the penalty is |w|^2 / 2 to a sum of the losses."""
    fold = torch.randperm(int(groups.max()) + 1, generator=torch.Generator().manual_seed(0))[groups] % folds
    accuracies = []
    for held_out in (fold == n for n in range(folds)):
        mean, std = x[~held_out].mean(0), x[~held_out].std(0).clamp(min=1e-6)
        z, classes = (x - mean) / std, int(y.max()) + 1
        w, b = torch.zeros(x.size(1), classes, requires_grad=True), torch.zeros(classes, requires_grad=True)
        optimizer = torch.optim.LBFGS([w, b], max_iter=100, line_search_fn="strong_wolfe")

        def loss():
            optimizer.zero_grad()
            loss = F.cross_entropy(z[~held_out] @ w + b, y[~held_out]) + w.square().sum() / (2 * (~held_out).sum())
            loss.backward()
            return loss

        optimizer.step(loss)
        accuracies.append(float(((z[held_out] @ w + b).argmax(1) == y[held_out]).float().mean()))
    return accuracies


def probe_layers(kept, y, groups):
    return {kind: [probe(torch.cat(layer), y, groups) for layer in layers] for kind, layers in kept.items()}


def find_words(folder, tok, block_size, count):
    """The first `count` occurrences of each word, of the validation split, then of the training one -> windows, [(position, class)] of each."""
    ids = [tok.encode(" " + word) for word in WORDS]
    if any(len(i) != 1 for i in ids):
        raise ConfigError(f"{folder}: its tokenizer {tok.name} has no token of its own for each of {', '.join(WORDS)}: take gpt2 or a larger bpe")
    counts, rows, places = [0] * len(WORDS), [], []
    for data in (TokenShards(folder, split, block_size) for split in ("val", "train")):
        for window in range(data.n_windows):
            if min(counts) == count:
                return rows, places
            x = data.batch([window])[0][0]
            here = []
            for label, (i,) in enumerate(ids):
                positions = (x == i).nonzero().flatten().tolist()[:count - counts[label]]
                counts[label] += len(positions)
                here += [(position, label) for position in positions]
            if here:
                rows.append(x)
                places.append(here)
    raise ConfigError(f"{folder} has too few of {', '.join(f'{word} ({n})' for word, n in zip(WORDS, counts))}: --occurrences={min(counts)}")


def separability(model, tok, folder, c):
    """Accuracies of the four-way classifier, {"values": over layers [of each fold], "hiddens": likewise}"""
    rows, places = find_words(folder, tok, model.config.block_size, c.occurrences)
    y = torch.tensor([label for here in places for _, label in here])
    kept = collect(model, rows, lambda n, z: z[[position for position, _ in places[n]]], c.projected)
    return probe_layers(kept, y, torch.arange(len(y)))


def read_blimp(folder, task):
    """[(good sentence, bad sentence)]"""
    path = next((p for p in (Path(folder, task + ".jsonl.xz"), Path(folder, task + ".jsonl")) if p.is_file()), None)
    if path is None:
        raise ConfigError(f"--blimp={folder} has no {task}.jsonl or .jsonl.xz: it must be the data folder of BLiMP (github.com/alexwarstadt/blimp)")
    try:
        with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8") as file:
            return [(row["sentence_good"], row["sentence_bad"]) for row in map(json.loads, file)]
    except (OSError, ValueError, KeyError, TypeError, EOFError, lzma.LZMAError) as error:
        raise ConfigError(f"{path} is not a BLiMP file: {error!r}") from None


def probe_blimp(model, tok, folder, c):
    """Accuracies of the classifier good/bad of one sentence's mean vector, mean over the ten tasks. The two of a pair share a fold."""
    tasks = []
    for task in BLIMP:
        pairs = read_blimp(c.blimp, task)
        rows = [torch.tensor([tok.eot, *tok.encode(sentence)]) for pair in pairs for sentence in pair]
        kept = collect(model, rows, lambda n, z: z[1:].mean(0, keepdim=True), c.projected)
        tasks.append(probe_layers(kept, torch.arange(len(rows)) % 2, torch.arange(len(rows)) // 2))
    return {kind: [[sum(fold) / len(fold) for fold in zip(*(task[kind][layer] for task in tasks))] for layer in range(len(tasks[0][kind]))]
            for kind in tasks[0]}


# ---------------------------------------------------------------- hierarchical memories

@torch.no_grad()
def retrieval(model, tok, folder, c, prefix=32):
    """Losses (nats) of the validation tokens after the first 32 of each sequence, and where the folder has facts their recall, by what is fetched: the
    memories of the whole sequence's leaf (which has seen the targets), of the first 32 tokens' path, of that without its best node of a level (Figure
    6b), of another sequence's leaf, the generic ones, none."""
    from model_hiermem import Retriever
    from experiments.tasks import recall
    if not getattr(model.config, "retriever", ""):
        raise ConfigError("`retrieval` is for --model=hiermem, trained with memories on data with a tree")
    data, found = TokenShards(folder, "val", model.config.block_size), {}
    windows = range(min(data.n_windows, c.sequences * 4))
    x, y = data.batch(windows)
    y[:, :prefix], whole, n = -1, data.context(windows)["leaf"], model.config.nodes[-1]
    tree, texts = Retriever.load(Path(folder, "retriever.npz")), [tok.decode(row[1:prefix + 1].tolist()) for row in x]
    blocked = {f"level {level} blocked": without_best(tree, texts, level)[:, -1] for level in range(1, len(model.config.nodes) + 1)}
    facts = Path(folder, "facts.jsonl").read_text().splitlines() if Path(folder, "facts.jsonl").exists() else []
    prompts = [tok.decode([t for t in json.loads(line)["prompt"] if t != tok.eot]) for line in facts]
    modes = {"whole sequence": whole, "first 32 tokens": tree.path(texts)[:, -1], **blocked, "wrong": (whole + n // 2) % n,
             "generic": torch.full_like(whole, -1), "none": None}
    for mode, leaf in modes.items():
        sums = torch.zeros(2, dtype=torch.float64)
        for at in torch.arange(len(x)).split(16):
            loss = model(x[at].to(c.device), y[at].to(c.device), leaf=None if leaf is None else leaf[at].to(c.device))[1].item()
            sums += torch.tensor([loss, 1.0]) * (y[at] >= 0).sum()
        found[mode] = {"loss": float(sums[0] / sums[1])}
        if facts and mode not in ("whole sequence", "wrong"):
            found[mode] |= recall(model, folder, without_best(tree, prompts, int(mode.split()[1]))[:, -1].tolist() if mode in blocked else
                                  {"first 32 tokens": "", "generic": -1, "none": None}[mode])
    return found


def without_best(tree, texts, level):
    """-> (N, p), each text's path where the node that it would take at this level may not be entered."""
    path = tree.path(texts)
    best = path[:, level - 1].clone()
    for node in best.unique().tolist():
        mine = (best == node).nonzero()[:, 0]
        path[mine] = tree.path([texts[i] for i in mine], [(level, node)])
    return path


def draw_retrieval(file, found, label):
    from matplotlib.figure import Figure
    figure = Figure(figsize=(7, 1 + 1.5 * len(found)), layout="constrained")
    for axes, (run, modes) in zip(figure.subplots(len(found), 1, squeeze=False)[:, 0], found.items()):
        print(run)
        for mode, values in modes.items():
            print(f"  {mode:20}", *(f"{key} {value:.4f}" for key, value in values.items()), sep="  ")
        losses = [values["loss"] for values in modes.values()]
        axes.barh(list(modes), losses)
        axes.invert_yaxis()
        axes.set(title=run, xlabel=label, xlim=(min(losses) - 0.1, max(losses) + 0.02))
    figure.savefig(file, dpi=120)


@torch.no_grad()
def rag(model, tok, folder, c, prefix=32):
    """Losses (nats) of the first half of the validation sequences, from the 32nd token on, after a training text that takes the other half of the
    context (vanilla retrieval-augmented generation, Appendix H): nothing, the nearest to the first 32 tokens in their leaf, the nearest to the whole
    text in its leaf, any text. So the model must have been trained with twice the context that it is compared in: prepare_fineweb.py --block_size=512."""
    from model_hiermem import Retriever, walk
    data = {split: TokenShards(folder, split, model.config.block_size) for split in ("train", "val")}
    if data["val"].leaves is None:
        raise ConfigError(f"`rag` retrieves within a leaf, and {folder} has no tree: prepare_fineweb.py --clusters= makes one")
    tree, half, found = Retriever.load(Path(folder, "retriever.npz")), model.config.block_size // 2, {}
    prefix = min(prefix, half // 2)
    embed = lambda rows: tree.embedder([tok.decode(row.tolist()) for row in rows])
    store = torch.linspace(0, data["train"].n_windows - 1, min(c.datastore, data["train"].n_windows)).long()
    texts = data["train"].batch(store)[0][:, 1:half]
    store, texts = (rows[(texts != tok.eot).all(1)] for rows in (store, texts))          # of one document each: what is before an eot is not attended to
    stored, leaves = embed(texts), data["train"].context(store)["leaf"]
    x, y = (rows[:, :half] for rows in data["val"].batch(range(data["val"].n_windows)))
    x, y = (rows[(x[:, 1:] != tok.eot).all(1)][:c.sequences * 4] for rows in (x, y))

    def nearest(queries):
        vectors = embed(queries)
        other = walk(vectors, tree.centroids)[:, -1:] != leaves
        if other.all(1).any():
            raise ConfigError(f"datastore={c.datastore} leaves a leaf without a text: give more")
        return texts[torch.cdist(vectors, stored).masked_fill(other, torch.inf).argmin(1)]

    any_text = texts[torch.randint(len(texts), (len(x),), generator=torch.Generator().manual_seed(0))]
    before = {"nothing": texts[:1, :0].expand(len(x), 0), "nearest to 32 tokens": nearest(x[:, 1:prefix + 1]), "nearest to the whole": nearest(x[:, 1:]),
              "any text": any_text}
    for mode, rows in before.items():
        idx, targets = torch.cat((torch.full_like(x[:, :1], tok.eot), rows, x[:, 1:]), 1), torch.cat((torch.full_like(rows, -1), y), 1)
        targets[:, :rows.size(1) + prefix] = -1
        losses = [(model(a.to(c.device), b.to(c.device), leaf=None)[1].item(), int((b >= 0).sum())) for a, b in zip(idx.split(16), targets.split(16))]
        found[mode] = {"loss": sum(loss * n for loss, n in losses) / sum(n for _, n in losses)}
    return found


# ---------------------------------------------------------------- routers

def router_maps(model, tok, folder, c):
    """Figures 5 and 9 from inspect(): {"layers": (layer, source), what a layer reads of each layer, "heads": (layer * head, source)}"""
    text = torch.tensor([[tok.eot]], device=c.device)
    grid = getattr(model, "inspect", lambda idx: {})(text).get("router")
    if grid is None:
        raise ConfigError("`router` is for models with routers, such as --model=lime")
    shares = grid[0].cpu()                                     # (layer, head, source)
    return {"layers": shares.mean(1).tolist(), "heads": (shares / shares.sum(-1, keepdim=True)).flatten(0, 1).tolist()}


# ---------------------------------------------------------------- attention heads

def head_importance(model, x, y):
    """x, y (B, T) -> (layers, B, H), |sum over t of a_ht . dl/da_ht| of each example: |dl/dg| for a gate g = 1 on the head (MIDUS, eq. 16).
    a_h is what head h puts out, before the output projection where there is one; layers: the blocks, then the inserted ones."""
    layers, H, hooks = [block.attn for block in [*model.blocks, *getattr(model, "inserted", [])]], model.config.n_head, []
    gates = next(model.parameters()).new_ones(len(layers), len(x), 1, H, 1).requires_grad_()
    gated = lambda a, gate: (a.unflatten(-1, (H, -1)) * gate).flatten(2)
    for attention, gate in zip(layers, gates):
        if attention.W_O is None:                              # a memory block: its memory reads the heads
            hooks.append(attention.register_forward_hook(lambda module, inputs, a, gate=gate: gated(a, gate)))
        else:
            hooks.append(attention.W_O.register_forward_pre_hook(lambda module, inputs, gate=gate: (gated(inputs[0], gate),)))
    try:
        loss = model(x, y)[1] * (y >= 0).sum()                 # summed over the examples too: each has gates of its own
        return torch.autograd.grad(loss, gates)[0].squeeze((2, 4)).abs()
    finally:
        for hook in hooks:
            hook.remove()


def importance(model, tok, folder, c, batch_size=8):
    """IS_h, {"blocks": (layer, head), "inserted": likewise, "blocks variance": over the heads of each layer, "inserted variance": likewise}"""
    data, found = TokenShards(folder, "val", model.config.block_size), []
    n = min(c.sequences, data.n_windows)
    for first in range(0, n, batch_size):
        x, y = data.batch(range(first, min(n, first + batch_size)))
        found.append(head_importance(model, x.to(c.device), y.to(c.device)).double().cpu())
    mean = torch.cat(found, 1).mean(1)
    kinds = {"blocks": mean[:len(model.blocks)], "inserted": mean[len(model.blocks):]}
    variances = {f"{kind} variance": [float(heads.var(correction=0)) for heads in grid] for kind, grid in kinds.items()}
    return {kind: grid.tolist() for kind, grid in kinds.items()} | variances


# ---------------------------------------------------------------- memory slots

@torch.no_grad()
def slot_use(model, tok, folder, c):
    """From inspect(): {"slots": of a head, "tokens": that were read, "touched": (layer, head), slots with any weight, "dead": (layer, head), the
    share of the others, "dead in all heads": (layer,), "ranked": (layer, slot), shares of a head's retrievals, largest first, mean over heads}"""
    data, use, tokens = TokenShards(folder, "val", model.config.block_size), 0, 0
    for window in range(min(c.sequences, data.n_windows)):
        x = data.batch([window])[0].to(c.device)
        seen = getattr(model, "inspect", lambda idx: {})(x).get("use")
        if seen is None:
            raise ConfigError("`slots` is for models with memory slots whose inspect() returns their use, such as --model=midus")
        use, tokens = use + seen[0].double().cpu() * x.size(1), tokens + x.size(1)       # (layer, head, slot)
    dead, ranked = use == 0, use.sort(-1, descending=True).values.mean(1) / tokens
    return {"slots": use.size(-1), "tokens": tokens, "touched": (~dead).sum(-1).tolist(), "dead": dead.double().mean(-1).tolist(),
            "dead in all heads": dead.all(1).double().mean(-1).tolist(), "ranked": ranked.tolist()}


@torch.no_grad()
def mean_loss(model, folder, c, parts=(), change=None):
    """Nats on the validation windows, with the forward hook `change` on each of the modules `parts`."""
    data, hooks = TokenShards(folder, "val", model.config.block_size), [part.register_forward_hook(change) for part in parts]
    windows = range(min(c.sequences, data.n_windows))
    try:
        return sum(model(*(t.to(c.device) for t in data.batch([window])))[1].item() for window in windows) / len(windows)
    finally:
        for hook in hooks:
            hook.remove()


def block_losses(model, folder, c):
    """{"loss": of a grown MIDUS on the validation windows, in nats, "silent": where the inserted blocks add nothing, "constant": where each adds
    its mean over these tokens, whatever the token}: from silent to constant is what a bias would do, from there to the loss what looks at the text."""
    seen = {}

    def watch(block, inputs, output):
        seen.setdefault(block, []).append((output - inputs[0]).mean((0, 1)))
    ways = {"loss": watch, "silent": lambda block, inputs, output: inputs[0],
            "constant": lambda block, inputs, output: inputs[0] + torch.stack(seen[block]).mean(0)}
    return {name: mean_loss(model, folder, c, model.inserted, change) for name, change in ways.items()}


def slots_and_losses(model, tok, folder, c):
    return slot_use(model, tok, folder, c) | (block_losses(model, folder, c) if hasattr(model, "inserted") else {})


# ---------------------------------------------------------------- parts of a layer

def part_losses(model, tok, folder, c):
    """{"loss": nats on the validation windows, "attn": over layers, by how much it rises if that layer's attention adds nothing (None: it has
    none), "mlp", "memory": likewise, "all memories": if none adds anything}. A grown MIDUS's inserted layers come last."""
    blocks, called = [*model.blocks, *getattr(model, "inserted", ())], set()

    def silence(part, inputs, output):
        called.add(part)
        return (torch.zeros_like(output[0]), *output[1:]) if isinstance(output, tuple) else torch.zeros_like(output)
    whole = mean_loss(model, folder, c)

    def rise(*parts):
        parts = [part for part in parts if part is not None]
        loss = mean_loss(model, folder, c, parts, silence) if parts else None
        return loss - whole if called & {*parts} else None     # a part that is called in another way cannot be silenced
    found = {name: [rise(getattr(block, name, None)) for block in blocks] for name in ("attn", "mlp", "memory")}
    return {"loss": whole, **found, "all memories": rise(*(getattr(block, "memory", None) for block in blocks))}


# ---------------------------------------------------------------- time of inference

@contextlib.contextmanager
def uncached(model):
    """Without the cache of values, and with the search in two stages (MIDUS, Appendices G.1 and G.2)."""
    module = sys.modules[type(model).__module__]
    search, module.product_key_topk = module.product_key_topk, functools.partial(module.product_key_topk, fused=False)
    try:
        model.train().eval()                                   # train() drops the cache
        yield
    finally:
        module.product_key_topk = search
        model.cache_values()


def time_tokens(model, idx, count):
    """Milliseconds that each of `count` tokens after the prompt idx (B, T) takes; the first is the prefill."""
    stream, times = generate(model, idx, count, temperature=0), []
    for _ in range(count):
        start = time.perf_counter()
        next(stream)
        if idx.device.type != "cpu":
            torch.accelerator.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return times


def timings(models, c):
    """{run: model} -> {run: {"prefill": {length: ms}, "decode": {length: ms a token}}}, medians; "RUN uncached" where it caches values."""
    racers = {run: (model, contextlib.nullcontext) for run, model in models.items()}
    racers |= {f"{run} uncached": (model, functools.partial(uncached, model)) for run, model in models.items() if hasattr(model, "cache_values")
               and any(name.endswith(".V_h") for name, _ in model.named_buffers())}
    context, vocab_size = (min(getattr(model.config, key) for model in models.values()) for key in ("block_size", "vocab_size"))
    room, given = context - c.new_tokens, re.fullmatch(r"(\d+(,\d+)*)?", c.lengths)
    lengths = sorted({*map(int, c.lengths.split(","))} if c.lengths and given else {max(1, context // 8), context // 2, room})
    if not given or c.new_tokens < 2 or c.repetitions < 1 or not 0 < lengths[0] <= lengths[-1] <= room:
        raise ConfigError(f"lengths={c.lengths}, new_tokens={c.new_tokens}, repetitions={c.repetitions}: with a context of {context} tokens a prompt "
                          f"has 1 to {room}; new_tokens must be 2 or more, repetitions 1 or more")
    found = {run: {"prefill": {}, "decode": {}} for run in racers}
    for length in lengths:
        idx = torch.randint(vocab_size, (1, length), generator=torch.Generator().manual_seed(0)).to(c.device)
        times = {run: [] for run in racers}
        for _ in range(1 + c.repetitions):
            for run, (model, way) in racers.items():
                with way():
                    times[run].append(time_tokens(model, idx, c.new_tokens))
        for run, rounds in times.items():                      # the first round warms up
            found[run]["prefill"][length] = median(row[0] for row in rounds[1:])
            found[run]["decode"][length] = median(ms for row in rounds[1:] for ms in row[1:])
    return found


# ---------------------------------------------------------------- the command

def mean_and_sd(numbers):
    t = torch.tensor(numbers, dtype=torch.float64)
    return float(t.mean()), float(t.std()) if len(t) > 1 else 0.0


def draw_layers(file, found, label):
    """found: {run: {"values": over layers [numbers], "hiddens": ...}} -> a panel for each kind, a line with deviations for each run."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(9, 4), layout="constrained")
    for axes, kind in zip(figure.subplots(1, 2), ("values", "hiddens")):
        print(f"{label} of {kind}, layer by layer: mean ± standard deviation")
        for run, kinds in found.items():
            means, deviations = zip(*map(mean_and_sd, kinds[kind]))
            axes.errorbar(range(1, len(means) + 1), means, yerr=deviations, fmt="o-", capsize=3, label=run)
            print(f"  {run:30}", *(f"{m:.3f} ± {d:.3f}" for m, d in zip(means, deviations)), sep="  ")
        axes.set(title=kind, xlabel="layer", ylabel=label)
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(file, dpi=120)


def draw_router(file, found, label):
    """A row of two heat maps for each run; blocks of rows on the right are a layer's heads."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(9, 4 * len(found)), layout="constrained")
    for row, (run, maps) in zip(figure.subplots(len(found), 2, squeeze=False), found.items()):
        for axes, (kind, grid) in zip(row, maps.items()):
            image = axes.imshow(grid, cmap="viridis", vmin=0, aspect="auto", interpolation="nearest")
            axes.set(title=f"{run}, {kind}", xlabel="layer that is read, from 0", ylabel="layer" if kind == "layers" else "layer and head")
            figure.colorbar(image, ax=axes, label=label)
    figure.savefig(file, dpi=120)


def draw_importance(file, found, label):
    """A row for each run: blocks and inserted layers, layers from the bottom up. Below, the variance over the heads of each layer."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(9, 3.2 * (len(found) + 1)), layout="constrained")
    *rows, last = figure.subplots(len(found) + 1, 2)
    for row, (run, kinds) in zip(rows, found.items()):
        for axes, kind in zip(row, ("blocks", "inserted")):
            if not kinds[kind]:
                axes.set_axis_off()
                continue
            largest = max(max(map(max, other[kind])) for other in found.values() if other[kind])         # one scale for all runs
            image = axes.imshow(kinds[kind], cmap="viridis", vmin=0, vmax=largest, aspect="auto", interpolation="nearest", origin="lower")
            axes.set(title=f"{run}, {kind}", xlabel="head", ylabel="layer" if kind == "blocks" else "inserted layer")
            for axis in (axes.xaxis, axes.yaxis):
                axis.get_major_locator().set_params(integer=True)
            figure.colorbar(image, ax=axes, label=label)
    for axes, kind in zip(last, ("blocks", "inserted")):
        for color, (run, kinds) in enumerate(found.items()):
            axes.plot(kinds[f"{kind} variance"], "o-", color=f"C{color}", label=run)
            if not kinds[kind]:
                continue
            print(f"{run}, {kind}: importance, layer by layer: mean ± standard deviation of the heads")
            print(" ", *(f"{sum(row) / len(row):.3g} ± {v ** .5:.3g}" for row, v in zip(kinds[kind], kinds[f"{kind} variance"])), sep="  ")
        axes.set(title=f"variance over heads, {kind}", xlabel="layer" if kind == "blocks" else "inserted layer", yscale="log")
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", fontsize=8)
    figure.savefig(file, dpi=120)


def draw_slots(file, found, label):
    """A row for each run: the share of dead slots of each head, and how unequally the others are used."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(9, 3.5 * len(found)), layout="constrained")
    for (left, right), (run, use) in zip(figure.subplots(len(found), 2, squeeze=False), found.items()):
        print(f"{run}: slots that each head touches, of {use['slots']:,}, by {use['tokens']:,} tokens")
        if "silent" in use:
            print(f"  loss {use['loss']:.4f}; {use['silent']:.4f} without the blocks, {use['constant']:.4f} if each adds its mean, whatever the token")
        for layer, (touched, dead) in enumerate(zip(use["touched"], use["dead in all heads"])):
            print(f"  layer {layer}:", *(f"{n:6d}" for n in touched), f"   {dead:.1%} dead in all heads")
            shares = [share for share in use["ranked"][layer] if share > 0]
            right.loglog(range(1, len(shares) + 1), shares, label=f"layer {layer}")
        image = left.imshow(use["dead"], cmap="viridis", vmin=0, vmax=1, aspect="auto", interpolation="nearest", origin="lower")
        left.set(title=run, xlabel="head", ylabel="inserted layer")
        for axis in (left.xaxis, left.yaxis):
            axis.get_major_locator().set_params(integer=True)
        right.set(title="mean over heads", xlabel="slot, by rank", ylabel="share of a head's retrievals")
        right.legend()
        figure.colorbar(image, ax=left, label=label)
    figure.savefig(file, dpi=120)


def draw_parts(file, found, label):
    """A panel for each run: bars of attention, FFN and memory for each layer."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(8, 3 * len(found)), layout="constrained")
    for axes, (run, parts) in zip(figure.subplots(len(found), 1, squeeze=False)[:, 0], found.items()):
        print(f"{run}: loss {parts['loss']:.4f}; what is added to it, layer by layer, without")
        for place, (name, title) in enumerate((("attn", "attention"), ("mlp", "FFN"), ("memory", "memory"))):
            rises = {layer: rise for layer, rise in enumerate(parts[name]) if rise is not None}
            if rises:
                print(f"  {title:10}", *(f"{rises[layer]:8.4f}" if layer in rises else " " * 7 + "-" for layer in range(len(parts[name]))))
                axes.bar([layer + 0.27 * (place - 1) for layer in rises], [*rises.values()], 0.27, color=f"C{place}", label=title)
        if parts["all memories"] is not None:
            print(f"  all memories {parts['all memories']:.4f}")
        axes.set(title=f"{run}, loss {parts['loss']:.3f}", xlabel="layer, from 0", ylabel=label)
        axes.set_yscale("symlog", linthresh=0.01)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend()
    figure.savefig(file, dpi=120)


def draw_timings(file, found, label):
    """Milliseconds by prompt length; printed, also in parts of the first run's."""
    from matplotlib.figure import Figure
    figure, first = Figure(figsize=(9, 4), layout="constrained"), next(iter(found.values()))
    for axes, (kind, title) in zip(figure.subplots(1, 2), (("prefill", "prefill"), ("decode", "each later token"))):
        print(f"{title}, ms (and parts of the first), for prompts of {', '.join(map(str, first[kind]))} tokens")
        for run, kinds in found.items():
            print(f"  {run:30}", *(f"{ms:9.2f} ({ms / first[kind][length]:.2f})" for length, ms in kinds[kind].items()))
            axes.plot([*kinds[kind]], [*kinds[kind].values()], "o--" if run.endswith(" uncached") else "o-", label=run)
        axes.set(title=title, xlabel="tokens of the prompt", ylabel=label, ylim=(0, None))
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(file, dpi=120)


ANALYSES = {"entropy": (entropy, draw_layers, "Renyi entropy (nats)"), "separability": (separability, draw_layers, "accuracy"),
            "blimp": (probe_blimp, draw_layers, "accuracy"), "retrieval": (retrieval, draw_retrieval, "validation loss (nats)"),
            "rag": (rag, draw_retrieval, "validation loss (nats)"),
            "router": (router_maps, draw_router, "share"), "importance": (importance, draw_importance, "importance IS_h"),
            "slots": (slots_and_losses, draw_slots, "share of dead slots"), "parts": (part_losses, draw_parts, "loss without it, minus loss (nats)"),
            "timings": (lambda model, *others: model, draw_timings, "ms")}


def main(argv):
    if {"-h", "--help"} & {*argv}:
        return print(__doc__ + "\n" + help_text(Path(__file__).read_text(encoding="utf-8"), _defaults))
    overrides, commands = configure(argv, _defaults)
    c = SimpleNamespace(**_defaults | overrides)
    if len(commands) != 1 or commands[0] not in ANALYSES or not c.runs:
        raise ConfigError(f"give one of {', '.join(ANALYSES)} and --runs=FOLDER,FOLDER (--help tells more)")
    (analyse, draw, label), paths, found = ANALYSES[commands[0]], c.runs.split(","), {}
    for path in paths:
        model, tok, ckpt = load_model(path, c.device)
        folder = find_dataset(c.dataset) if c.dataset else Path(ckpt["data"]["folder"])
        c.dataset, trained = str(folder), [ckpt["data"][key] for key in ("tokenizer", "vocab_size")]
        if [load_meta(folder)[key] for key in ("tokenizer", "vocab_size")] != trained:
            raise ConfigError(f"{path} was trained with another tokenizer, {trained[0]} of {trained[1]:,}, than {folder}: --dataset= names a folder")
        found[path] = analyse(model, tok, folder, c)
    if commands[0] == "timings":
        found = timings(found, c)                              # of all in turn
    target = Path(c.out or (paths[0] if Path(paths[0]).is_dir() else Path(paths[0]).parent))
    target.mkdir(parents=True, exist_ok=True)
    file = target / f"analysis_{commands[0]}.png"
    draw(file, found, label)
    file.with_suffix(".json").write_text(json.dumps(found))
    print(f"wrote {file} and .json")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"analysis.py: {error}")
