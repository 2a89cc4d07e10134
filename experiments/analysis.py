"""What the layers of trained models hold: the papers' analyses, as pictures and numbers.

    python experiments/analysis.py NAME --runs=out/A,out/B

LIMe (section 5.3, Appendix D):
    entropy         Renyi entropy of values and hidden states; --standardise=False as printed
    separability    of is, are, was, were, by a linear classifier
    blimp           grammatical or not? by a linear classifier, --blimp=FOLDER
MIDUS (Figure 3):
    importance      of every attention head, before continued pre-training and after
    slots           which memory slots each head uses
    sizes           how much each block adds to the residual stream
Hierarchical memories:
    retrieval       the loss with fetched, generic, wrong and no memories
    prompt          the loss by how many tokens choose the memories
    blocking        the loss of each topic's text with each topic's memories
    rag             the loss with a retrieved text in the context (Appendix H)
Any model:
    parts           the loss without one layer's attention, FFN or (UltraMemV2, MIDUS) memory

Values are what W_V puts out; mixed values are what attention sums up: MoVE's memory and LIMe's
router have changed them. Where nothing else is said, hierarchical memories are the generic ones.
Hidden states are what a block puts out. The entropy is of order 1/2 (the paper prints none), of
features with mean 0 and variance 1 (the paper's are as they are). A head's importance is the mean
over windows of |sum over t of a_ht . dl/da_ht|, where l is the window's summed loss, or that of its
answers to prompts. Writes analysis_NAME.png and analysis_NAME.json into the first run's folder.
Runs that are compared must have been trained on the same tokens.
"""
import contextlib
import json
import sys
from pathlib import Path
from statistics import mean, pstdev, pvariance

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import sample
from experiments.run import options
from experiments.tasks import batched_loss, check_tree, read_jsonl, read_pairs, recall
from model_hiermem import find_retriever
from prepare_fineweb import ConfigError, TokenShards, find_dataset, guard, load_meta, need

# ---------------------------------------------------------------- settings: --key=value
runs = ""                     # folders of runs, by commas
dataset = ""                  # data folder; empty: the one that the first run was trained on
sequences = 64                # validation windows (of hierarchical memories: four times as many)
datastore = 20000             # rag: training texts to retrieve from
occurrences = 1100            # separability: of each word
standardise = True            # entropy: of features with mean 0 and variance 1
blimp = ""                    # folder of BLiMP's PARADIGM.jsonl or .jsonl.xz
device = "cpu"                # cpu | cuda
# ----------------------------------------------------------------
KINDS = ("values", "mixed values", "hiddens")
WORDS = ("is", "are", "was", "were")
BLIMP = (                     # Appendix D's ten, in its order
    "determiner_noun_agreement_with_adj_irregular_1", "complex_NP_island",
    "regular_plural_subject_verb_agreement_2", "determiner_noun_agreement_with_adj_2",
    "determiner_noun_agreement_1", "determiner_noun_agreement_2",
    "irregular_plural_subject_verb_agreement_1", "irregular_plural_subject_verb_agreement_2",
    "distractor_agreement_relational_noun", "determiner_noun_agreement_with_adjective_1")


# ---------------------------------------------------------------- reading the layers

@contextlib.contextmanager
def while_hooked(hooks):
    """Removes the hooks at the end, whatever happens."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def first_of(attention, *names):
    """The first of these submodules that an attention has."""
    for name in names:
        if getattr(attention, name, None) is not None:
            return getattr(attention, name)


@torch.no_grad()
def states(model, idx):
    """idx (B, T) -> {kind: a list over layers of (B, T, features)} of the KINDS."""
    found = {kind: [] for kind in KINDS}

    def keep(kind):
        def hook(module, inputs, output):
            if isinstance(output, tuple):                      # a router's k, v; UltraMem's x, ..
                output = output[0 if kind == "hiddens" else -1]
            found[kind].append(output.flatten(2).float())
        return hook

    hooks = []
    for block in model.blocks:
        projection = first_of(block.attn, "W_UV", "W_V")
        mixing = first_of(block.attn, "W_UV", "router", "memory", "W_V")
        for kind, module in zip(KINDS, (projection, mixing, block)):
            hooks.append(module.register_forward_hook(keep(kind)))
    with while_hooked(hooks):
        model(idx)
    return found


def collect(model, rows, pick):
    """rows: 1-D tensors of token ids -> {kind: over layers [pick(n, z) of every row n]};
    z (tokens, features)."""
    kept = {kind: [[] for _ in model.blocks] for kind in KINDS}
    device = next(model.parameters()).device
    for n, row in enumerate(rows):
        for kind, found in states(model, row[None].to(device)).items():
            for layer, z in enumerate(found):
                kept[kind][layer].append(pick(n, z[0]).cpu())
    return kept


def windows(model, folder, c):
    """(x, y), each (1, T), of the first c.sequences windows of the validation split."""
    data = TokenShards(folder, "val", model.config.block_size)
    for window in range(min(c.sequences, data.n_windows)):
        x, y = data.batch([window])
        yield x.to(c.device), y.to(c.device)


# ---------------------------------------------------------------- entropy

def renyi_entropy(z, alpha=0.5):
    """z (T, features) -> nats: 0 if the tokens' vectors are multiples of one, log T if they are
    orthogonal and equally long (section 5.3)."""
    z = z.double()
    gram = z @ z.T if len(z) <= z.size(1) else z.T @ z          # the same eigenvalues but for zeros
    p = torch.linalg.eigvalsh(gram).clamp(min=0)
    return float(((p / p.sum()) ** alpha).sum().log() / (1 - alpha))


def standardised(pieces):
    """Tensors (T_i, features): each feature gets mean 0 and variance 1 over all of them."""
    together = torch.cat(pieces)
    center = together.mean(0)
    spread = together.std(0).clamp(min=1e-6)
    return [(z - center) / spread for z in pieces]


def entropy(model, tok, folder, c):
    """{kind: over layers [entropy of every validation window]}; where a document is a window, of
    it without the padding."""
    padded = "block_size" in load_meta(folder)
    rows = []
    for x, y in windows(model, folder, c):
        length = int((y[0] >= 0).nonzero()[-1]) + 1 if padded else x.size(1)
        rows.append(x[0, :length])
    found = {}
    for kind, layers in collect(model, rows, lambda n, z: z).items():
        if c.standardise:
            layers = map(standardised, layers)
        found[kind] = [[renyi_entropy(z) for z in layer] for layer in layers]
    return found


# ---------------------------------------------------------------- linear classifiers

def fit(x, y, classes):
    """Logistic regression: weights and biases. The penalty is |w|^2 / 2 to a sum of the losses."""
    w = torch.zeros(x.size(1), classes, requires_grad=True)
    b = torch.zeros(classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([w, b], max_iter=100, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        loss = F.cross_entropy(x @ w + b, y) + w.square().sum() / (2 * len(y))
        loss.backward()
        return loss

    optimizer.step(loss)
    return w.detach(), b.detach()


def probe(x, y, groups, folds=5):
    """A linear classifier of the classes y (N,) on x (N, features): its accuracy on each fold
    after training on the others. Members of a group (N,) share a fold."""
    order = torch.randperm(int(groups.max()) + 1, generator=torch.Generator().manual_seed(0))
    fold = order[groups] % folds
    accuracies = []
    for n in range(folds):
        rest = fold != n
        z = (x - x[rest].mean(0)) / x[rest].std(0).clamp(min=1e-6)
        w, b = fit(z[rest], y[rest], int(y.max()) + 1)
        right = (z[~rest] @ w + b).argmax(1) == y[~rest]
        accuracies.append(float(right.float().mean()))
    return accuracies


def probe_layers(kept, y, groups):
    found = {}
    for kind, layers in kept.items():
        found[kind] = [probe(torch.cat(layer), y, groups) for layer in layers]
    return found


def find_words(folder, tok, block_size, count):
    """The first `count` occurrences of each word, of the validation split, then of the training
    one -> windows, [(position, class)] of each."""
    ids = [tok.encode(f" {word}") for word in WORDS]
    need(all(len(i) == 1 for i in ids), f"{folder}: its tokenizer {tok.name} has no token of its "
         f"own for each of {', '.join(WORDS)}: take gpt2 or a larger bpe")
    counts = [0] * len(WORDS)
    rows = []
    places = []
    for split in ("val", "train"):
        data = TokenShards(folder, split, block_size)
        for window in range(data.n_windows):
            x = data.batch([window])[0][0]
            here = []
            for label, (i,) in enumerate(ids):
                positions = (x == i).nonzero().flatten().tolist()[:count - counts[label]]
                counts[label] += len(positions)
                here += [(position, label) for position in positions]
            if here:
                rows.append(x)
                places.append(here)
            if min(counts) == count:
                return rows, places
    raise ConfigError(f"{folder} has too few of {', '.join(WORDS)}: --occurrences={min(counts)}")


def separability(model, tok, folder, c):
    """Accuracies of the four-way classifier: {kind: over layers [of each fold]}."""
    need(c.occurrences > 1, f"occurrences={c.occurrences}: five folds need at least 2 of each word")
    rows, places = find_words(folder, tok, model.config.block_size, c.occurrences)

    def at_words(n, z):
        return z[[position for position, _ in places[n]]]

    y = torch.tensor([label for here in places for _, label in here])
    return probe_layers(collect(model, rows, at_words), y, torch.arange(len(y)))


def read_blimp(folder, task):
    """[(good sentence, bad sentence)]"""
    paths = sorted(Path(folder).glob(f"{task}.jsonl*"))
    need(paths, f"--blimp={folder} has no {task}.jsonl or .jsonl.xz: it must be the data folder of "
         "BLiMP (github.com/alexwarstadt/blimp)")
    return read_pairs(paths[0])


def probe_blimp(model, tok, folder, c):
    """Accuracies of the classifier good/bad of one sentence's mean vector, mean over the ten
    tasks. The two of a pair share a fold."""
    tasks = []
    for task in BLIMP:
        rows = []
        for pair in read_blimp(c.blimp, task):
            rows += [torch.tensor([tok.eot, *tok.encode(sentence)]) for sentence in pair]
        kept = collect(model, rows, lambda n, z: z[1:].mean(0, keepdim=True))
        n = torch.arange(len(rows))
        tasks.append(probe_layers(kept, n % 2, n // 2))
    found = {}
    for kind in KINDS:
        grid = torch.tensor([task[kind] for task in tasks])     # (tasks, layers, folds)
        found[kind] = grid.mean(0).tolist()
    return found


# ---------------------------------------------------------------- hierarchical memories

def has_memories(model):
    """Whether it fetches memories by a tree."""
    config = model.config
    return bool(getattr(config, "retriever", "")) and config.memory != "none"


def tree_of(model, folder):
    """The tree of the model's memories, which must be the data folder's."""
    need(has_memories(model),
         "this is for --model=hiermem with memories, trained on data with a tree")
    return find_retriever(model.config, [folder], "")


def without_best(tree, texts, level):
    """-> (N, p), each text's path where the node that it would take at this level is closed."""
    path = tree.path(texts)
    best = path[:, level - 1].clone()
    for node in best.unique().tolist():
        mine = (best == node).nonzero()[:, 0]
        path[mine] = tree.path([texts[i] for i in mine], [(level, node)])
    return path


@torch.no_grad()
def retrieval(model, tok, folder, c, prefix=32):
    """Losses (nats) of the validation tokens after the first 32 of each sequence, and where the
    folder has facts their recall, by what is fetched: the memories of the whole sequence's leaf
    (which has seen the targets), of the first 32 tokens' path, of that without its best node of a
    level (Figure 6b), of a leaf under another node of level 1, the generic ones, none."""
    tree = tree_of(model, folder)
    need(model.config.block_size > prefix, f"block_size={model.config.block_size}: `retrieval` "
         f"asks for what comes after {prefix} tokens")
    data = TokenShards(folder, "val", model.config.block_size)
    rows = range(min(data.n_windows, c.sequences * 4))
    x, y = data.batch(rows)
    y[:, :prefix] = -1
    texts = [tok.decode(row[1:prefix + 1].tolist()) for row in x]
    whole = data.context(rows)["leaf"]
    leaves = {"whole sequence": whole, "first 32 tokens": tree.path(texts)[:, -1]}
    asked = {}                                                  # what recall() fetches
    if Path(folder, "facts.jsonl").exists():
        asked = {"first 32 tokens": "", "generic": -1, "none": None}
        prompts = [row["text"] for row in read_jsonl(Path(folder, "facts.jsonl"))]
    for level in range(1, len(model.config.nodes) + 1):
        leaves[f"level {level} blocked"] = without_best(tree, texts, level)[:, -1]
        if asked:
            closed = without_best(tree, prompts, level)[:, -1]
            asked[f"level {level} blocked"] = closed.tolist()
    n = model.config.nodes[-1]
    leaves["wrong"] = (whole + n // 2) % n
    leaves["generic"] = torch.full_like(whole, -1)
    leaves["none"] = None
    found = {}
    for name, leaf in leaves.items():
        found[name] = {"loss": batched_loss(model, x, y, leaf=leaf)}
        if name in asked:
            found[name].update(recall(model, folder, asked[name]))
    return found


@torch.no_grad()
def prompt(model, tok, folder, c):
    """Losses (nats) of the second half of validation sequences, of those within one document:
    without memories; and if there are some, with those that the first 8, 16, ... tokens ask for, as
    long as the first half has them, and with those of the sequence's leaf, which was found from the
    512 tokens around it. "same leaf": the share that fetch these."""
    need(hasattr(model.config, "clusters"), "`prompt` is for --model=hiermem")
    data = TokenShards(folder, "val", model.config.block_size)
    x, y = data.batch(range(data.n_windows))
    kept = (x[:, 1:] != tok.eot).all(1).nonzero()[:c.sequences * 4, 0]
    need(len(kept), f"no sequence of {folder} is within one document")
    x = x[kept]
    y = y[kept]
    half = x.size(1) // 2
    y[:, :half] = -1
    found = {"none": {"loss": batched_loss(model, x, y, leaf=None)}}
    if not has_memories(model):
        return found
    whole = data.context(kept)["leaf"]
    tree = tree_of(model, folder)
    leaves = {}
    length = 8
    while length <= half:
        texts = [tok.decode(row[1:length + 1].tolist()) for row in x]
        leaves[f"first {length}"] = tree.path(texts)[:, -1]
        length *= 2
    leaves["whole sequence"] = whole
    for name, leaf in leaves.items():
        same = (leaf == whole).float().mean().item()
        found[name] = {"loss": batched_loss(model, x, y, leaf=leaf), "same leaf": same}
    return found


@torch.no_grad()
def blocking(model, tok, folder, c):
    """What closing a node of level 1 does to its own texts, and what its memories do for others'.
    Losses (nats) of the validation sequences of each node, (n_1): "own", with the memories that a
    sequence's text asks for; "closed", if the node that it would take may not be entered;
    "none", without memories; "memories", (n_1, n_1), column j: with node j alone open."""
    tree = tree_of(model, folder)
    data = TokenShards(folder, "val", model.config.block_size)
    rows = range(min(data.n_windows, c.sequences * 4))
    x, y = data.batch(rows)
    n = model.config.nodes[0]
    topics = data.context(rows)["leaf"] // (model.config.nodes[-1] // n)
    texts = [tok.decode(row[1:].tolist()) for row in x]
    counts = torch.bincount(topics, minlength=n).tolist()
    need(all(counts), f"of {len(x)} sequences the topics have {counts}: --sequences= takes more")

    def by_topic(leaf):
        losses = []
        for topic in range(n):
            mine = topics == topic
            fetched = None if leaf is None else leaf[mine]
            losses.append(batched_loss(model, x[mine], y[mine], leaf=fetched))
        return losses

    columns = []
    for node in range(n):
        others = [(1, other) for other in range(n) if other != node]
        columns.append(by_topic(tree.path(texts, others)[:, -1]))
    return {"sequences": counts, "own": by_topic(tree.path(texts)[:, -1]),
            "closed": by_topic(without_best(tree, texts, 1)[:, -1]),
            "none": by_topic(None), "memories": [list(row) for row in zip(*columns)]}


@torch.no_grad()
def rag(model, tok, folder, c, prefix=32):
    """Losses (nats) of the first half of the validation sequences, from the 33rd token on (or the
    middle of that half, if it comes first), after a training text that takes the other half of the
    context (vanilla retrieval-augmented generation, Appendix H): nothing, the nearest to the tokens
    before in their leaf, the nearest to the whole text in its leaf, any text. So the model must
    have been trained with twice the context that it is compared in: prepare_fineweb.py
    --block_size=512. All without memories; where there are some, "memories" are those that the
    tokens before ask for, without a text."""
    from experiments.topics import Retriever, walk
    need(hasattr(model.config, "clusters"), "`rag` is for --model=hiermem")
    data = TokenShards(folder, "val", model.config.block_size)
    train = TokenShards(folder, "train", model.config.block_size)
    if has_memories(model):
        tree = tree_of(model, folder)
    else:
        tree = Retriever.load(Path(folder, "retriever.npz"))
    half = model.config.block_size // 2
    prefix = min(prefix, half // 2)

    def embed(rows):
        return tree.embedder([tok.decode(row.tolist()) for row in rows])

    def of_one_document(rows):                                  # attention stops at an eot
        return (rows[:, 1:half] != tok.eot).all(1)

    store = torch.linspace(0, train.n_windows - 1, min(c.datastore, train.n_windows)).long()
    rows = train.batch(store)[0]
    kept = of_one_document(rows)
    need(kept.any(), f"no training sequence of {folder} begins with {half} tokens of one document")
    texts = rows[kept, 1:half]
    leaves = train.context(store)["leaf"][kept]
    stored = embed(texts)
    x, y = data.batch(range(data.n_windows))
    kept = of_one_document(x).nonzero()[:c.sequences * 4, 0]
    need(len(kept), f"no held-out sequence of {folder} begins with {half} tokens of one document")
    x = x[kept, :half]
    y = y[kept, :half]

    def nearest(queries):
        vectors = embed(queries)
        other = walk(vectors, tree.centroids)[:, -1:] != leaves
        need(not other.all(1).any(), f"datastore={c.datastore} leaves a leaf without a text")
        return texts[torch.cdist(vectors, stored).masked_fill(other, torch.inf).argmin(1)]

    draw = torch.Generator().manual_seed(0)
    before = {
        "nothing": texts[:1, :0].expand(len(x), 0),
        f"nearest to {prefix} tokens": nearest(x[:, 1:prefix + 1]),
        "nearest to the whole": nearest(x[:, 1:]),
        "any text": texts[torch.randint(len(texts), (len(x),), generator=draw)],
    }
    fetched = {}
    if has_memories(model):
        prompts = [tok.decode(row.tolist()) for row in x[:, 1:prefix + 1]]
        before["memories"] = before["nothing"]
        fetched["memories"] = tree.path(prompts)[:, -1]
    found = {}
    for name, rows in before.items():
        idx = torch.cat((torch.full_like(x[:, :1], tok.eot), rows, x[:, 1:]), 1)
        targets = torch.cat((torch.full_like(rows, -1), y), 1)
        targets[:, :rows.size(1) + prefix] = -1
        loss = batched_loss(model, idx, targets, leaf=fetched.get(name))
        found[name] = {"loss": loss}
    return found


# ---------------------------------------------------------------- attention heads

def all_blocks(model):
    """The blocks, then those that MIDUS has inserted."""
    return [*model.blocks, *getattr(model, "inserted", ())]


def head_importance(model, x, y):
    """x, y (B, T) -> (layers, B, H), |sum over t of a_ht . dl/da_ht| of each example: |dl/dg| for
    a gate g = 1 on the head (MIDUS, eq. 16). a_h is what head h puts out, before the output
    projection where there is one."""
    layers = [block.attn for block in all_blocks(model)]
    H = model.config.n_head
    gates = next(model.parameters()).new_ones(len(layers), len(x), 1, H, 1).requires_grad_()

    def gated(a, gate):
        return (a.unflatten(-1, (H, -1)) * gate).flatten(2)

    def gate_output(gate):
        return lambda module, inputs, output: gated(output, gate)

    def gate_input(gate):
        return lambda module, inputs: (gated(inputs[0], gate),)

    hooks = []
    for attention, gate in zip(layers, gates):
        if attention.W_O is None:                               # a memory block: it reads the heads
            hooks.append(attention.register_forward_hook(gate_output(gate)))
        else:
            hooks.append(attention.W_O.register_forward_pre_hook(gate_input(gate)))
    with while_hooked(hooks):
        loss = model(x, y)[1] * (y >= 0).sum()                  # each example has its own gates
        return torch.autograd.grad(loss, gates)[0].squeeze((2, 4)).abs()


def importance(model, tok, folder, c):
    """IS_h: {"blocks": (layer, head), "inserted": likewise, and the variance over each layer's
    heads: "blocks variance", "inserted variance"}"""
    found = [head_importance(model, x, y) for x, y in windows(model, folder, c)]
    means = torch.cat(found, 1).double().mean(1).tolist()
    kinds = {"blocks": means[:len(model.blocks)], "inserted": means[len(model.blocks):]}
    for kind in ("blocks", "inserted"):
        kinds[f"{kind} variance"] = [pvariance(heads) for heads in kinds[kind]]
    return kinds


# ---------------------------------------------------------------- memory slots

@torch.no_grad()
def slot_use(model, tok, folder, c):
    """{"slots": of a head, "tokens": that were read, "touched": (layer, head), slots with any
    weight, "dead": (layer, head), the share of the others, "ranked": (layer, slot), shares of a
    head's retrievals, largest first, mean over heads}"""
    use = 0
    tokens = 0
    for x, _ in windows(model, folder, c):
        seen = model.inspect(x)
        by_head = "use" in seen and seen["use"][1] == ("layer", "head", "slot")
        need(by_head, "`slots` is for models with memory slots whose inspect() returns their "
             "use, such as --model=midus")
        use = use + seen["use"][0].double().cpu() * x.size(1)   # (layer, head, slot)
        tokens += x.size(1)
    dead = use == 0
    ranked = use.sort(-1, descending=True).values.mean(1) / tokens
    return {"slots": use.size(-1), "tokens": tokens, "touched": (~dead).sum(-1).tolist(),
            "dead": dead.double().mean(-1).tolist(), "ranked": ranked.tolist()}


# ---------------------------------------------------------------- what a block adds

@torch.no_grad()
def block_sizes(model, tok, folder, c):
    """Root mean squares over tokens and channels, from the bottom: {"stream": of what comes into
    each block, "added": of what the block adds to it, "inserted": whether it is an inserted one}"""
    need(hasattr(model, "stack"), "`sizes` is for --model=midus")
    squares = {block: [] for block in model.stack}

    def keep(block, inputs, output):
        x = inputs[0].float()
        squares[block].append((x.square().mean(), (output - x).square().mean()))

    with while_hooked([block.register_forward_hook(keep) for block in model.stack]):
        for x, _ in windows(model, folder, c):
            model(x)
    means = torch.stack([torch.tensor(found).mean(0).sqrt() for found in squares.values()])
    stream, added = means.T.tolist()
    new = [block in [*model.inserted] for block in model.stack]
    return {"stream": stream, "added": added, "inserted": new}


# ---------------------------------------------------------------- parts of a layer

def mean_loss(model, folder, c):
    """Nats on the validation windows' targets, with the memories of each window's leaf."""
    data = TokenShards(folder, "val", model.config.block_size)
    check_tree(model, data)
    rows = range(min(c.sequences, data.n_windows))
    context = model.training_context(data.context(rows), 0, None)
    return batched_loss(model, *data.batch(rows), **context)


def part_losses(model, tok, folder, c):
    """{"loss": nats on the validation windows, "attn": over layers, by how much it rises if that
    layer's attention adds nothing (None: it has none), "mlp", "memory": likewise, "all memories":
    if none adds anything}. A grown MIDUS's inserted layers come last. Memories that are fetched
    stay."""
    called = set()

    def silence(part, inputs, output):
        called.add(part)
        if isinstance(output, tuple):
            return torch.zeros_like(output[0]), *output[1:]
        return torch.zeros_like(output)

    whole = mean_loss(model, folder, c)

    def rise(parts):
        with while_hooked([part.register_forward_hook(silence) for part in parts]):
            loss = mean_loss(model, folder, c)
        # A part that is called in another way cannot be silenced.
        return loss - whole if called & set(parts) else None

    found = {"loss": whole}
    memories = []
    for name in ("attn", "mlp", "memory"):
        found[name] = []
        for block in all_blocks(model):
            part = getattr(block, name, None)
            found[name].append(None if part is None else rise([part]))
            if part is not None and name == "memory":
                memories.append(part)
    found["all memories"] = rise(memories) if memories else None
    return found


# ---------------------------------------------------------------- pictures: a run's row of panels

def heat_map(axes, grid, label, vmin=0, vmax=None, cmap="viridis", **names):
    image = axes.imshow(grid, cmap, vmin=vmin, vmax=vmax, aspect="auto", interpolation="nearest")
    axes.set(**names)
    axes.locator_params(integer=True, min_n_ticks=1)
    axes.figure.colorbar(image, ax=axes, label=label)


def draw_layers(row, run, kinds, label):
    """A line with deviations over the layers, all runs in one row."""
    for axes, (kind, layers) in zip(row, kinds.items()):
        means = [mean(numbers) for numbers in layers]
        deviations = [pstdev(numbers) for numbers in layers]
        axes.errorbar(range(1, len(means) + 1), means, yerr=deviations, fmt="o-", capsize=3,
                      label=run)
        axes.set(title=kind, xlabel="layer", ylabel=label)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(fontsize=8)
        print(f"  {kind}:", *(f"{m:.3f} ± {sd:.3f}" for m, sd in zip(means, deviations)), sep="  ")


def show(modes):
    for mode, values in modes.items():
        shown = "  ".join(f"{key} {value:.4f}" for key, value in values.items())
        print(f"  {mode:20}  {shown}")


def draw_losses(row, run, modes, label):
    """A bar for each way to fetch or to retrieve."""
    show(modes)
    losses = [values["loss"] for values in modes.values()]
    row[0].barh(list(modes), losses)
    row[0].invert_yaxis()
    row[0].set(title=run, xlabel=label, xlim=(min(losses) - 0.1, max(losses) + 0.02))


def draw_prompt(row, run, modes, label):
    """A line over the prompt's length; dashed: without memories."""
    lengths = [name for name in modes if name != "none"]
    losses = [modes[name]["loss"] for name in lengths]
    show(modes)
    line, = row[0].plot(lengths, losses, "o-", label=run if lengths else "_")      # _: unnamed
    row[0].axhline(modes["none"]["loss"], color=line.get_color(), linestyle="--",
                   label="_" if lengths else run)
    row[0].set(xlabel="tokens that choose the memories (dashed: none)", ylabel=label)
    row[0].legend(fontsize=7)


def draw_blocking(row, run, found, label):
    """What each topic's memories add to the loss of each topic's text."""
    print("  topic  sequences  own     closed  none")
    columns = zip(found["sequences"], found["own"], found["closed"], found["none"])
    for topic, (count, *losses) in enumerate(columns):
        print(f"  {topic:5}  {count:9}", *(f"{loss:.4f}" for loss in losses), sep="  ")
    grid = torch.tensor(found["memories"]) - torch.tensor(found["none"])[:, None]
    top = grid.abs().max().item()
    heat_map(row[0], grid.numpy(), label, -top, top, "RdBu_r", title=run,
             xlabel="memories of topic", ylabel="text of topic")


def draw_importance(row, run, kinds, label):
    """Blocks and inserted layers, and the variance over each layer's heads."""
    for axes, kind in zip(row, ("blocks", "inserted")):
        if kinds[kind]:
            heat_map(axes, kinds[kind], label, title=f"{run}, {kind}", xlabel="head",
                     ylabel="layer")
        variances = kinds[f"{kind} variance"]
        row[2].plot(variances, "o-", label=kind)
        print(f"  {kind}, variance over heads:", *(f"{v:.3g}" for v in variances))
    row[2].set(title="variance over heads", xlabel="layer", yscale="log")
    row[2].legend()


def draw_slots(row, run, use, label):
    """The share of dead slots of each head, and how unequal the others are."""
    left, right = row
    print(f"  slots that each head touches, of {use['slots']:,}, by {use['tokens']:,} tokens")
    for layer, touched in enumerate(use["touched"]):
        print(f"  layer {layer}:", *touched)
        shares = [share for share in use["ranked"][layer] if share > 0]
        right.loglog(range(1, len(shares) + 1), shares, label=f"layer {layer}")
    heat_map(left, use["dead"], label, title=run, xlabel="head", ylabel="inserted layer")
    right.set(title="mean over heads", xlabel="slot, by rank",
              ylabel="share of a head's retrievals")
    right.legend()


def draw_sizes(row, run, sizes, label):
    """What blocks add, and what it is added to."""
    stream, added = sizes["stream"], sizes["added"]
    for layer, new in enumerate(sizes["inserted"]):
        name = "inserted" if new else ""
        print(f"  {layer:3}: {added[layer]:.4f} to {stream[layer]:.4f} {name}")
    row[0].plot(stream, "o-", label="the stream")
    row[0].bar(range(len(added)), added, label="what a block adds")
    places = [layer for layer, new in enumerate(sizes["inserted"]) if new]
    row[0].bar(places, [added[layer] for layer in places], label="an inserted block")
    row[0].set(title=run, xlabel="block, from the bottom", ylabel=label, yscale="log")
    row[0].set_ylim(top=10 * max(stream))                      # room for the legend
    row[0].legend(loc="upper left")


def draw_parts(row, run, parts, label):
    """Bars of attention, FFN and memory for each layer."""
    print(f"  loss {parts['loss']:.4f}; what is added to it, layer by layer, without")
    for place, name in enumerate(("attn", "mlp", "memory")):
        rises = {layer: rise for layer, rise in enumerate(parts[name]) if rise is not None}
        places = [layer + 0.27 * (place - 1) for layer in rises]
        row[0].bar(places, list(rises.values()), 0.27, label=name)
        print(f"  {name:8}", *(f"{layer}: {rise:.4f}" for layer, rise in rises.items()), sep="  ")
    print(f"  all memories  {parts['all memories']}")
    row[0].set(title=run, xlabel="layer, from 0", ylabel=label, xticks=range(len(parts["mlp"])))
    row[0].set_yscale("symlog", linthresh=0.01)
    row[0].legend()


def draw_rows(file, found, draw_run, columns, label):
    from matplotlib.figure import Figure
    rows = 1 if draw_run in (draw_layers, draw_prompt) else len(found)
    figure = Figure(figsize=(3 + 3.5 * columns, 3.5 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for n, (run, result) in enumerate(found.items()):
        print(f"{run}: {label}")
        draw_run(grid[n % rows], run, result, label)
    figure.savefig(file, dpi=120)


# ---------------------------------------------------------------- the command

ANALYSES = {                    # what to compute, how to draw a run, in how many panels, of what
    "entropy": (entropy, draw_layers, 3, "Renyi entropy (nats)"),
    "separability": (separability, draw_layers, 3, "accuracy"),
    "blimp": (probe_blimp, draw_layers, 3, "accuracy"),
    "importance": (importance, draw_importance, 3, "importance IS_h"),
    "slots": (slot_use, draw_slots, 2, "share of dead slots"),
    "retrieval": (retrieval, draw_losses, 1, "validation loss (nats)"),
    "prompt": (prompt, draw_prompt, 1, "validation loss (nats)"),
    "blocking": (blocking, draw_blocking, 1, "loss with memories, minus loss without"),
    "rag": (rag, draw_losses, 1, "validation loss (nats)"),
    "sizes": (block_sizes, draw_sizes, 1, "root mean square"),
    "parts": (part_losses, draw_parts, 1, "loss without it, minus loss (nats)"),
}


def main(argv):
    c, commands = options(argv, globals())
    need(len(commands) == 1 and commands[0] in ANALYSES and c.runs,
         f"give one of {', '.join(ANALYSES)} and --runs=FOLDER,FOLDER (--help tells more)")
    for key in ("sequences", "datastore", "occurrences"):
        need(getattr(c, key) >= 1, f"{key}={getattr(c, key)}: must be at least 1")
    name = commands[0]
    analyse, *picture = ANALYSES[name]
    found = {}
    c.device = sample.pick_device(c.device)
    for path in c.runs.split(","):
        model, tok, ckpt = sample.load_model(path, c.device)
        folder = find_dataset(c.dataset) if c.dataset else Path(ckpt["data"]["folder"])
        c.dataset = str(folder)                                 # the first run's, for all
        sample.check_tokens(path, ckpt["data"], folder)
        found[path] = analyse(model, tok, folder, c)
    first = Path(c.runs.split(",")[0])                         # or a ckpt.pt
    file = (first if first.is_dir() else first.parent) / f"analysis_{name}.png"
    draw_rows(file, found, *picture)
    file.with_suffix(".json").write_text(json.dumps(found))
    print(f"wrote {file} and .json")


if __name__ == "__main__":
    guard("analysis.py")
    main(sys.argv[1:])
