"""What the layers of trained models hold: LIMe's analyses (sections 5.3 and 5.5, Appendix D), as pictures and numbers.

    python experiments/analysis.py entropy --runs=out/lime-d4,out/lime-d4-dense            # Renyi entropy of values and hidden states
    python experiments/analysis.py separability --runs=out/lime-d4,out/lime-d4-dense       # of is, are, was, were, by a linear classifier
    python experiments/analysis.py blimp --blimp=FOLDER --runs=out/lime-d4,out/lime-d4-dense    # grammatical or not? by a linear classifier
    python experiments/analysis.py retrieval --runs=out/hiermem-d4                         # loss with fetched, generic, wrong and no memories
    python experiments/analysis.py router --runs=out/lime-d4                               # which layers each layer reads

Values are what a layer's attention sums up, after a router or another memory has mixed them; hidden states are what its block puts out. Writes
analysis_NAME.png and analysis_NAME.json into the first run's folder. Runs that are compared must have been trained on the same tokens.
"""
import json
import lzma
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from prepare_fineweb import ConfigError, TokenShards, configure, find_dataset, help_text, load_meta
from sample import load_model

# ------------------------------------------------------------------------------ settings: --key=value
runs = ""                     # folders of runs (or ckpt.pt files), by commas
out = ""                      # folder to write; empty: the first run's
dataset = ""                  # data folder; empty: the one that the first run was trained on
sequences = 64                # entropy: validation windows
alpha = 0.5                   # entropy: its order
occurrences = 1100            # separability: of each word
blimp = ""                    # folder of BLiMP's PARADIGM.jsonl or .jsonl.xz
device = "cpu"                # cpu | cuda
_defaults = {k: v for k, v in globals().items() if not k.startswith("_") and isinstance(v, (int, float, str))}
# ------------------------------------------------------------------------------
WORDS = ("is", "are", "was", "were")
BLIMP = ("determiner_noun_agreement_with_adj_irregular_1", "complex_NP_island", "regular_plural_subject_verb_agreement_2",
         "determiner_noun_agreement_with_adj_2", "determiner_noun_agreement_1", "determiner_noun_agreement_2",
         "irregular_plural_subject_verb_agreement_1", "irregular_plural_subject_verb_agreement_2", "distractor_agreement_relational_noun",
         "determiner_noun_agreement_with_adjective_1")         # Appendix D's ten, in its order


# ---------------------------------------------------------------- reading the layers

def value_module(attention):
    """The submodule that puts out what the attention sums up: LIMe's router (keys and values), MoVE's memory, or the projection."""
    return next(m for name in ("W_UV", "router", "memory", "W_V") if (m := getattr(attention, name, None)) is not None)


@torch.no_grad()
def states(model, idx):
    """idx (B, T) -> {"values": a list over layers of (B, T, features), "hiddens": likewise}, fp32, by forward hooks."""
    modules = {"values": [value_module(block.attn) for block in model.blocks], "hiddens": list(model.blocks)}
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


def collect(model, rows, pick, batch_size=16):
    """rows: 1-D tensors of token ids -> {"values": over layers [pick(n, z) of every row n], "hiddens": likewise}; z (tokens, features)."""
    kept, device = {}, next(model.parameters()).device
    for first in range(0, len(rows), batch_size):
        part = rows[first:first + batch_size]
        idx = torch.nn.utils.rnn.pad_sequence(part, batch_first=True).to(device)       # causal: what is on the right does not matter
        for kind, layers in states(model, idx).items():
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
    kept = collect(model, [row[:n] for row, n in zip(x, lengths)], lambda n, z: z)
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
    kept = collect(model, rows, lambda n, z: z[[position for position, _ in places[n]]])
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
        kept = collect(model, rows, lambda n, z: z[1:].mean(0, keepdim=True))
        tasks.append(probe_layers(kept, torch.arange(len(rows)) % 2, torch.arange(len(rows)) // 2))
    return {kind: [[sum(fold) / len(fold) for fold in zip(*(task[kind][layer] for task in tasks))] for layer in range(len(tasks[0][kind]))]
            for kind in tasks[0]}


# ---------------------------------------------------------------- hierarchical memories

@torch.no_grad()
def retrieval(model, tok, folder, c, prefix=32):
    """Losses (nats) of the validation tokens after the first 32 of each sequence, and where the folder has facts their recall, by what is fetched: the
    memories of the whole sequence's leaf (which has seen the targets), of the first 32 tokens' path, of another sequence's leaf, the generic ones, none."""
    from model_hiermem import Retriever
    from experiments.tasks import recall
    if not getattr(model.config, "retriever", ""):
        raise ConfigError("`retrieval` is for --model=hiermem, trained with memories on data with a tree")
    data, found = TokenShards(folder, "val", model.config.block_size), {}
    windows = range(min(data.n_windows, c.sequences * 4))
    x, y = data.batch(windows)
    y[:, :prefix], whole = -1, data.context(windows)["leaf"]
    asked = Retriever.load(Path(folder, "retriever.npz")).path([tok.decode(row[1:prefix + 1].tolist()) for row in x])[:, -1]
    modes = {"whole sequence": whole, "first 32 tokens": asked, "wrong": whole.roll(1), "generic": torch.full_like(whole, -1), "none": None}
    for mode, leaf in modes.items():
        sums = torch.zeros(2, dtype=torch.float64)
        for at in torch.arange(len(x)).split(16):
            loss = model(x[at].to(c.device), y[at].to(c.device), leaf=None if leaf is None else leaf[at].to(c.device))[1].item()
            sums += torch.tensor([loss, 1.0]) * (y[at] >= 0).sum()
        found[mode] = {"loss": float(sums[0] / sums[1])}
        if Path(folder, "facts.jsonl").exists() and mode in ("first 32 tokens", "generic", "none"):
            found[mode] |= recall(model, folder, {"first 32 tokens": "", "generic": -1, "none": None}[mode])
    return found


def draw_retrieval(file, found, label):
    from matplotlib.figure import Figure
    figure = Figure(figsize=(7, 1 + 1.5 * len(found)), layout="constrained")
    for axes, (run, modes) in zip(figure.subplots(len(found), 1, squeeze=False)[:, 0], found.items()):
        print(run)
        for mode, values in modes.items():
            print(f"  {mode:16}", *(f"{key} {value:.4f}" for key, value in values.items()), sep="  ")
        losses = [values["loss"] for values in modes.values()]
        axes.barh(list(modes), losses)
        axes.invert_yaxis()
        axes.set(title=run, xlabel=label, xlim=(min(losses) - 0.1, max(losses) + 0.02))
    figure.savefig(file, dpi=120)


# ---------------------------------------------------------------- routers

def router_maps(model, tok, folder, c):
    """Figures 5 and 9 from inspect(): {"layers": (layer, source), what a layer reads of each layer, "heads": (layer * head, source)}"""
    text = torch.tensor([[tok.eot]], device=c.device)
    grid = getattr(model, "inspect", lambda idx: {})(text).get("router")
    if grid is None:
        raise ConfigError("`router` is for models with routers, such as --model=lime")
    shares = grid[0].cpu()                                     # (layer, head, source)
    return {"layers": shares.mean(1).tolist(), "heads": (shares / shares.sum(-1, keepdim=True)).flatten(0, 1).tolist()}


# ---------------------------------------------------------------- the command

def mean_and_sd(numbers):
    t = torch.tensor(numbers, dtype=torch.float64)
    return float(t.mean()), float(t.std()) if len(t) > 1 else 0.0


def draw_layers(file, found, label):
    """found: {run: {"values": over layers [numbers], "hiddens": ...}} -> a panel for each kind, a line with deviations for each run."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(9, 3.5), layout="tight")
    for axes, kind in zip(figure.subplots(1, 2), ("values", "hiddens")):
        print(f"{label} of {kind}, layer by layer: mean ± standard deviation")
        for run, kinds in found.items():
            means, deviations = zip(*map(mean_and_sd, kinds[kind]))
            axes.errorbar(range(1, len(means) + 1), means, yerr=deviations, fmt="o-", capsize=3, label=run)
            print(f"  {run:30}", *(f"{m:.3f} ± {d:.3f}" for m, d in zip(means, deviations)), sep="  ")
        axes.set(title=kind, xlabel="layer", ylabel=label)
        axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()
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


ANALYSES = {"entropy": (entropy, draw_layers, "Renyi entropy (nats)"), "separability": (separability, draw_layers, "accuracy"),
            "blimp": (probe_blimp, draw_layers, "accuracy"), "retrieval": (retrieval, draw_retrieval, "validation loss (nats)"), "router": (router_maps, draw_router, "share")}


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
