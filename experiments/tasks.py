"""Synthetic tasks: prompts with answers, as a data folder that train.py trains on, and the accuracy of greedy answers.

    python experiments/tasks.py arithmetic --operands=6 --max_value=19 --samples=50000 --out=data/aet6
    python experiments/tasks.py facts --source=FOLDER_OF_TEXTS --text_chars=4000000 --clusters=8,8 --out=data/facts     # rare facts in text
    python experiments/tasks.py domains --source=data/edu --prefix=standardebooks/ --out=data/ebooks     # a shift of domain: also data/ebooks_old
    python experiments/tasks.py prosqa --val=FOLDER/prosqa_test.json.xz --out=data/prosqa      # the published test set, generated training data
    python train.py --dataset=data/aet6                        # a sample is a row; the loss is on the answer; evaluations give the accuracy too
    python experiments/tasks.py accuracy --out_dir=out/move-d4 # of a checkpoint, by number of operands (ProsQA: of steps)
    python experiments/tasks.py curves --results=experiments/results/lime_arithmetic-cpu.jsonl     # accuracy over the steps of an experiment

Arithmetic is the Arithmetic Expression Task of LIMe's section 5.4.2 (Arefin et al. 2024, Feng et al. 2023): all numbers, those of the solution
too, are integers in 1..max_value. n operands have n - 1 operators; the example in LIMe's Appendix B has 7 operands. An
answer is right if it ends (with eot) in the right number. ProsQA (Hao et al. 2024): does a chain of facts lead from a name to this concept or to
that one? An answer is right if it ends in the right "### " sentence; guessing gets half. No prompt is in both splits. The records lie in
OUT_records/, a JSON object a line.

Facts are invented and mixed into text: 16 domains with words of their own, in each as many things that the text mentions 1, 3, 10, 30 and 100
times ("The vorgath at Selmuri show that the nirith called Tobarek is made of wool."). Evaluations give recall_N, the share of the things mentioned N
times of which the model finds the right one among its domain's 8 materials likeliest, after a sentence form of the text; new_N, after a form
that is not in it. Guessing gets 1/8.

Domains splits text in two, for going on with another domain: records {"text", "source"} whose source begins with the prefix are the new domain, in
OUT, all others the old one, in OUT_old. Both have a tokenizer trained on the old one. Evaluations on OUT also give retention_loss and retention_bpb,
those of the old domain's first 131,072 held-out tokens.
"""
import hashlib
import json
import lzma
import math
import random
import re
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import prepare_fineweb
from prepare_fineweb import EOT, ConfigError, TokenShards, configure, find_dataset, get_tokenizer, help_text, load_meta, need, prepare

# ------------------------------------------------------------------------------ settings: --key=value
out = ""                      # folder to write; empty: data/TASK
samples = 50_000              # of training (arithmetic: for each number of operands)
val_samples = 1000            # held out, likewise
seed = 1337                   # of the generator
overwrite = False             # write anew where a finished folder is
operands = "6"                # arithmetic: one number or several, 4,5,6
max_value = 99                # arithmetic: the largest integer
source = "fineweb_edu"        # facts: fineweb_edu, or a file or folder with texts as for prepare_fineweb.py, which domains wants
prefix = ""                   # domains: of the `source` of the new domain's records
text_chars = 4_000_000        # facts: characters of training text among which they are mixed
per_bucket = 48               # facts: things for each number of mentions, a multiple of 16
clusters = ""                 # facts: 8,8: a tree over everything, for model_hiermem.py (other models do not mind)
vocab_size = 4096             # facts, domains: tokens of the bpe trained on them (domains: on the old one)
train = ""                    # prosqa: a published .json or .json.xz to train on; empty: generated
val = ""                      # prosqa: likewise the held-out one
tokenizer = ""                # prosqa, facts: gpt2 | bytes (prosqa) | bpe (facts) | a tokenizer.json; empty: the first and the third
out_dir = ""                  # accuracy: a run's folder, or a ckpt.pt
dataset = ""                  # accuracy: data folder; empty: the one that the checkpoint was trained on
device = "cpu"                # accuracy: cpu | cuda
results = ""                  # curves: an experiment's .jsonl
_defaults = {k: v for k, v in globals().items() if not k.startswith("_") and isinstance(v, (int, float, str))}
# ------------------------------------------------------------------------------


# ---------------------------------------------------------------- arithmetic

PRECEDENCE = {"+": 1, "-": 1, "x": 2, "/": 2}


def random_tree(n, largest, rng):
    """An expression of n operands: [value], or [value, operator, left, right]. Every value, of inner nodes too, is an integer in 1..largest."""
    root = [rng.randint(1, largest)]
    leaves = [root]
    while len(leaves) < n:
        leaf = leaves.pop(rng.randrange(len(leaves)))
        v = leaf[0]
        divisors = [a for a in range(2, v // 2 + 1) if v % a == 0]
        for operator in rng.sample("+-x/", 4):                                         # the first that is possible; + or - always is
            if operator == "+" and v >= 2:
                left = rng.randint(1, v - 1)
                right = v - left
            elif operator == "-" and v < largest:
                right = rng.randint(1, largest - v)
                left = v + right
            elif operator == "x" and divisors:
                left = rng.choice(divisors)
                right = v // left
            elif operator == "/" and 2 * v <= largest:
                right = rng.randint(2, largest // v)
                left = v * right
            else:
                continue
            leaf += [operator, [left], [right]]
            leaves += leaf[2:]
            break
    return root


def infix(node):
    """A tree in writing, with no more parentheses than it needs: ((6 - 2) - 1) is 6 - 2 - 1, but 6 - (2 - 1)."""
    if len(node) == 1:
        return str(node[0])
    _, operator, *children = node
    sides = [f"({infix(child)})" if len(child) > 1 and PRECEDENCE[child[1]] < PRECEDENCE[operator] + is_right else infix(child)
             for is_right, child in enumerate(children)]
    return f"{sides[0]} {operator} {sides[1]}"


def reduce(node):
    """Calculate, in place, the first operation (in post-order) whose operands are both numbers."""
    for child in node[2:]:
        if len(child) > 1:
            return reduce(child)
    del node[1:]


def solve(tree):
    """A tree, which is used up -> {"prompt": the expression and =, "answer": the expression after each step}"""
    steps = [infix(tree)]
    while len(tree) > 1:
        reduce(tree)
        steps.append(infix(tree))
    return {"prompt": steps[0] + " =", "answer": " = ".join(steps[1:])}


def longest(n):
    """Tokens of the longest sample of n operands, with eot before it and after it."""
    expression = [1, 3] + [4 * k - 5 for k in range(3, n + 1)]         # k numbers, k - 1 operators, k - 2 pairs of parentheses
    return sum(expression[:n]) + (n - 1) + 2                           # every expression but the last is followed by =


def arithmetic(c, folder):
    """Records into folder -> settings for prepare()"""
    if not re.fullmatch(r"\d+(,\d+)*", c.operands) or min(counts := sorted({int(n) for n in c.operands.split(",")})) < 2 or c.max_value < 2:
        raise ConfigError(f"operands={c.operands}, max_value={c.max_value}: operands are numbers from 2 on, by commas; max_value is 2 or more")
    rng, splits = random.Random(c.seed), {"train": [], "val": []}
    for n in counts:
        records, repeats = {}, 0
        while len(records) < c.samples + c.val_samples and repeats < 100_000:
            record = solve(random_tree(n, c.max_value, rng))
            repeats = repeats + 1 if record["prompt"] in records else 0
            records[record["prompt"]] = record
        if repeats:
            raise ConfigError(f"there are only about {len(records):,} expressions of {n} operands up to max_value={c.max_value}: "
                              f"samples={c.samples} and val_samples={c.val_samples} are too many")
        records = list(records.values())
        splits["val"] += records[:c.val_samples]
        splits["train"] += records[c.val_samples:]
    save_records(folder, splits)
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    words = [EOT, *"+-x/()=", *map(str, range(c.max_value + 1))]       # one token for a symbol or a number
    tok = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}))
    tok.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d+|\S"), "removed", invert=True)
    tok.add_special_tokens([EOT])
    tok.save(str(folder / "tokenizer.json"))
    return dict(tokenizer=folder / "tokenizer.json", block_size=longest(counts[-1]) - 1)


# ---------------------------------------------------------------- ProsQA

NAMES = "Alex Bob Carol Davis Eva Fae Gabriel Jack Max Oliver Polly Rex Sally Sam Stella Tom Wren".split()
CONCEPTS = ("bompus boompus brimpus chorpus dumpus felpus fompus gerpus gorpus grimpus gwompus hilpus impus jelpus jompus kerpus lempus lorpus "
            "numpus quimpus rempus rompus rorpus scrompus shumpus sterpus storpus terpus timpus tumpus vumpus worpus wumpus yerpus yimpus yumpus "
            "zhorpus zumpus").split()                          # of the published files


def random_graph(rng, nodes=23):
    """Edges (parent, child), parent < child, and every node's label: bit 0 if it descends from node 0, bit 1 if from node 1."""
    labels, depth, edges = [1, 2], [0, 0], []
    for node in range(2, nodes):
        degree, chance = 0, rng.random()                       # Poisson(1.7)
        while chance > math.exp(-1.7):
            degree, chance = degree + 1, chance * rng.random()
        if degree == 0 and rng.random() >= 0.2:
            degree = 1
        family = rng.choices([(0, 1), (0, 2), (0, 1, 2, 3)], [0.35, 0.35, 0.3])[0]
        candidates = [n for n in range(node) if labels[n] in family]
        keys = {n: rng.random() ** (1 / (1 + 1.5 * depth[n])) for n in candidates}             # the largest keys are a weighted
        parents = sorted(sorted(candidates, key=keys.get, reverse=True)[:degree])              # draw without replacement
        edges += [(parent, node) for parent in parents]
        labels.append(0)
        for parent in parents:
            labels[node] |= labels[parent]
        depth.append(max((1 + depth[parent] for parent in parents), default=0))
    return edges, labels


def shortest_paths(edges, root):
    """{node: [root, ..., node]} of every node that can be reached."""
    paths, queue = {root: [root]}, [root]
    for node in queue:
        for child in (b for a, b in edges if a == node and b not in paths):
            paths[child] = paths[node] + [child]
            queue.append(child)
    return paths


def prosqa_sample(rng):
    """A sample with the keys of the published files."""
    while True:
        edges, labels = random_graph(rng)
        kept = sorted({n for edge in edges for n in edge})     # without the isolated ones
        children = {b for _, b in edges}
        leaves = children - {a for a, _ in edges}
        ends = [{n: path for n, path in shortest_paths(edges, root).items() if labels[n] == root + 1 and n in leaves} for root in (0, 1)]
        steps = [max((len(path) - 1 for path in paths.values()), default=0) for paths in ends]
        root = max((0, 1), key=lambda root: (steps[root], rng.random()))               # the one with the longer path, as in the published files
        if steps[root] >= 3 and ends[1 - root]:
            break
    target = rng.choice([n for n, path in ends[root].items() if len(path) - 1 == steps[root]])
    neg_target, path = rng.choice(list(ends[1 - root])), ends[root][target]
    names, concepts = iter(rng.sample(NAMES, len(NAMES))), iter(rng.sample(CONCEPTS, len(CONCEPTS)))
    symbols = {n: next(concepts if n in children else names) for n in kept}
    fact = lambda a, b: f"{'Every ' * (a in children)}{symbols[a]} is a {symbols[b]}."
    facts = [fact(a, b) for a, b in rng.sample(edges, len(edges))]
    either, other = rng.sample([symbols[target], symbols[neg_target]], 2)
    place = {n: i for i, n in enumerate(kept)}
    return dict(question=f"{' '.join(facts)} Is {symbols[root]} a {either} or {other}?", answer=fact(root, target),
                steps=[fact(a, b) for a, b in zip(path, path[1:])], idx_to_symbol=list(symbols.values()),
                edges=[[place[a], place[b]] for a, b in edges], root=place[root], target=place[target], neg_target=place[neg_target])


def read_prosqa(path):
    """The samples of a published file, a JSON list, plain or .xz."""
    try:
        with (lzma.open if str(path).endswith(".xz") else open)(path, "rt", encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError, EOFError, lzma.LZMAError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, list) or not found:
        raise ConfigError(f"{path} is not a ProsQA file: it must be a JSON list of samples")
    for n, sample in enumerate(found):
        texts = [sample.get("question"), sample.get("answer"), *(sample.get("steps") or [None])] if isinstance(sample, dict) else [None]
        if not all(isinstance(text, str) and text for text in texts):
            raise ConfigError(f"{path}, sample {n}: it must have texts 'question' and 'answer' and a list of texts 'steps': {str(sample)[:60]}")
    return found


def prosqa(c, folder):
    """Records into folder -> settings for prepare()"""
    rng = random.Random(c.seed)
    sources = {"val": (c.val, c.val_samples), "train": (c.train, c.samples)}
    taken, splits, tok, block_size = set(), {"train": [], "val": []}, get_tokenizer(c.tokenizer or "gpt2"), 0
    for split, (path, count) in sources.items():
        for sample in read_prosqa(path) if path else (prosqa_sample(rng) for _ in range(count)):
            record = {"prompt": sample["question"] + "\n", "answer": "\n".join(sample["steps"]) + "\n### " + sample["answer"]}
            if record["prompt"] not in taken:
                taken.add(record["prompt"])
                splits[split].append(record)
                block_size = max(block_size, 1 + sum(len(tok.encode(text)) for text in record.values()))
    save_records(folder, splits)
    return dict(tokenizer=c.tokenizer or "gpt2", block_size=block_size)


# ---------------------------------------------------------------- facts

MENTIONS = (1, 3, 10, 30, 100)
MATERIALS = "gold iron water stone glass paper salt wood silk bone sand smoke milk corn ice wine oil clay wool coal lead grass fire light".split()
FORMS = ("In the {a} of {b}, the {c} {name} is made of", "Every {c} keeper of {b} knows from the {a} that {name} is made of",
         "The {a} at {b} show that the {c} called {name} is made of", "Among the {a}, {b} people say, the {c} {name} is made of",
         "Of all the {a} in {b}, the {c} {name} is made of")
NEW_FORM = "Travellers to {b} report that one of its {a}, the {c} {name}, is made of"


def invented_words(rng):
    """Words that there are not, each once."""
    taken = set()
    while True:
        word = "".join(rng.choice("bdfgklmnprstvz") + rng.choice(("a", "e", "i", "o", "u", "or", "el", "an", "ith")) for _ in range(3))
        if word not in taken:
            taken.add(word)
            yield word


def invented_facts(per_bucket, rng):
    """-> the things: dicts of domain, mentions, name, value, options and the domain's words a, b, c."""
    words, things = invented_words(rng), []
    for domain in range(16):
        own = dict(domain=domain, a=next(words), b=next(words).title(), c=next(words), options=rng.sample(MATERIALS, 8))
        things += [dict(own, mentions=mentions, name=next(words).title(), value=rng.choice(own["options"])) for mentions in MENTIONS
                   for _ in range(per_bucket // 16)]
    return things


def fact_documents(things, rng, sentences=8):
    """Every thing in as many sentences as it has mentions; documents of 8 sentences from one domain."""
    documents = []
    for domain in range(16):
        told = [f"{rng.choice(FORMS).format(**thing)} {thing['value']}." for thing in things if thing["domain"] == domain for _ in range(thing["mentions"])]
        rng.shuffle(told)
        documents += [{"text": " ".join(told[n:n + sentences]), "topic": f"domain {domain}"} for n in range(0, len(told), sentences)]
    return documents


def held_out(text):
    """The split of a text whose file does not say it, as a file of val* does: a tenth is held out."""
    return "val" if hashlib.sha256(text.encode()).digest()[0] < 26 else "train"


def facts(c, folder):
    """Records into folder -> settings for prepare()"""
    if c.per_bucket < 16 or c.per_bucket % 16:
        raise ConfigError(f"per_bucket={c.per_bucket}: must be a multiple of 16, the number of domains")
    prepare_fineweb.check_source(c.source)
    rng, splits = random.Random(c.seed), {"train": [], "val": []}
    chars = {"train": c.text_chars, "val": max(200_000, c.text_chars // 10)}
    for split, prompt, text, topic in prepare_fineweb.read_documents(SimpleNamespace(**prepare_fineweb._defaults | {"source": c.source})):
        split = split or held_out(text)
        if chars[split] > 0 and prompt is None:
            splits[split].append({"text": text, "topic": topic})
            chars[split] -= len(text)
        if max(chars.values()) <= 0:
            break
    if not all(splits.values()):
        raise ConfigError(f"source={c.source} has too few texts: {len(splits['train'])} to train on, {len(splits['val'])} held out")
    splits["train"] += fact_documents(invented_facts(c.per_bucket, rng), rng)
    rng.shuffle(splits["train"])
    save_records(folder, splits)
    tree = dict(clusters=c.clusters) if c.clusters else {}
    return dict(tokenizer=c.tokenizer or "bpe", **tree, **dict(vocab_size=c.vocab_size) if c.tokenizer in ("", "bpe") else {})


def write_questions(c, folder):
    """facts.jsonl beside the shards: prompt, answer and options (first tokens), mentions, whether the form is new, and the prompt's leaf."""
    tok, things, rows = get_tokenizer(str(folder)), invented_facts(c.per_bucket, random.Random(c.seed)), []
    first = lambda word: tok.encode(" " + word)[0]
    for thing in things:
        if len({first(word) for word in thing["options"]}) < 8:
            raise ConfigError(f"the tokenizer {tok.name} begins two of {', '.join(thing['options'])} with the same token: take one with more tokens")
        for new, form in ((False, FORMS[2]), (True, NEW_FORM)):
            text = form.format(**thing)
            rows.append(dict(text=text, prompt=[tok.eot, *tok.encode(text)], answer=first(thing["value"]), options=[first(w) for w in thing["options"]],
                             mentions=thing["mentions"], new=new, domain=thing["domain"]))
    if c.clusters:
        from model_hiermem import Retriever
        retriever = Retriever.load(folder / "retriever.npz")
        documents = fact_documents(things, random.Random(0))
        told = retriever.path([document["text"] for document in documents])
        usual = {d: told[[n for n, document in enumerate(documents) if document["topic"] == f"domain {d}"]].mode(0).values for d in range(16)}
        for row, path in zip(rows, retriever.path([row["text"] for row in rows])):
            row |= {"leaf": int(path[-1]), "agrees": (path == usual[row["domain"]]).tolist()}
        for new in (False, True):
            share = [sum(level) / len(things) for level in zip(*(row["agrees"] for row in rows if row["new"] == new))]
            print(f"prompts in {'a new form' if new else 'a form of the text'} on their domain's usual path, by level: "
                  + ", ".join(f"{s:.0%}" for s in share))
    (folder / "facts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@torch.no_grad()
def recall(model, folder, leaf="", batch_size=64):
    """{"recall": of the prompts in a form of the text, "recall_N": of those with N mentions, "new_N": in a new form}. leaf: for a model that
    fetches, instead of the leaf that each prompt leads to; -1 the generic memory, None no memory, or a list with each prompt's."""
    rows = [json.loads(line) for line in (Path(folder) / "facts.jsonl").read_text().splitlines()]
    device, right = next(model.parameters()).device, []
    for n in range(0, len(rows), batch_size):
        part = rows[n:n + batch_size]
        idx = torch.nn.utils.rnn.pad_sequence([torch.tensor(row["prompt"]) for row in part], batch_first=True).to(device)
        context = {}
        if hasattr(model, "training_context") and "leaf" in part[0]:
            leaves = leaf[n:n + batch_size] if isinstance(leaf, list) else [row["leaf"] if leaf == "" else leaf for row in part]
            context["leaf"] = None if leaf is None else torch.tensor(leaves, device=device)
        logits = model(idx, **context)[0]
        for row, at in zip(part, logits):
            options = at[len(row["prompt"]) - 1, row["options"]]
            right.append(row["options"][int(options.argmax())] == row["answer"])
    rate = lambda **wanted: sum(chosen := [r for r, row in zip(right, rows) if wanted.items() <= row.items()]) / len(chosen)
    return {"recall": rate(new=False), **{f"recall_{m}": rate(new=False, mentions=m) for m in MENTIONS}, **{f"new_{m}": rate(new=True, mentions=m) for m in MENTIONS}}


# ---------------------------------------------------------------- domains

def old_domain(folder):
    folder = Path(folder).resolve()
    return folder.with_name(folder.name + "_old")


def domains(c, folder):
    """Records of the new domain into folder -> settings for prepare(); the old domain's data folder is made here."""
    if not c.prefix or not Path(c.source).exists():
        raise ConfigError(f"source={c.source}, prefix={c.prefix!r}: domains wants a file or folder of records {{'text', 'source'}}, and the "
                          "beginning of the new domain's sources: --source=FOLDER --prefix=books/")
    settings = SimpleNamespace(**prepare_fineweb._defaults | {"source": c.source, "topic_field": "source"})
    old, new = ({"train": [], "val": []} for _ in range(2))
    for split, prompt, text, source in prepare_fineweb.read_documents(settings):
        need(prompt is None, f"source={c.source}: domains wants records with a text, not with prompt and answer")
        (new if source.startswith(c.prefix) else old)[split or held_out(text)].append({"text": text, "source": source})
    if missing := [name for name, splits in (("old", old), ("new", new)) if not all(splits.values())]:
        raise ConfigError(f"prefix={c.prefix}: the {missing[0]} domain has too few records in {c.source} to train on some and hold out others")
    target = old_domain(c.out or "data/domains")
    records = target.with_name(target.name + "_records")
    save_records(records, old)
    save_records(folder, new)
    prepare(source=records, out=target, overwrite=True, tokenizer="bpe", vocab_size=c.vocab_size)
    return dict(tokenizer=target / "tokenizer.json")


@torch.no_grad()
def retention(model, data, batch_size=16):
    """{"retention_loss": mean of the old domain's first held-out tokens (nats), "retention_bpb"}, tokens without bytes left out, as in train.py."""
    folder, device = old_domain(data.paths[0].parent), next(model.parameters()).device
    old, lengths = TokenShards(folder, "val", data.block_size), torch.from_numpy(prepare_fineweb.load_token_bytes(folder))
    nats, count, size, n = 0.0, 0, 0, min(max(1, 131072 // old.block_size), old.n_windows)
    for first in range(0, n, batch_size):
        x, y = old.batch(range(first, min(n, first + batch_size)))
        size += int(lengths[y].sum())
        y = y.masked_fill(lengths[y] == 0, -1)
        here = int((y >= 0).sum())
        nats, count = nats + float(model(x.to(device), y.to(device))[1]) * here, count + here
    return {"retention_loss": nats / count, "retention_bpb": nats / math.log(2) / size}


# ---------------------------------------------------------------- the data folder

SIZES = ("samples", "val_samples")
TASKS = {"arithmetic": (arithmetic, (*SIZES, "operands", "max_value")), "prosqa": (prosqa, (*SIZES, "train", "val", "tokenizer")),
         "facts": (facts, ("source", "text_chars", "per_bucket", "clusters")), "domains": (domains, ("source", "prefix"))}


def save_records(folder, splits):
    folder.mkdir(parents=True, exist_ok=True)
    for split, records in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def write_task(name, c):
    """Records, and from them a data folder whose meta.json says what task it is, which makes train.py measure the accuracy."""
    maker, keys = TASKS[name]
    folder = Path(c.out or f"data/{name}")
    if c.samples < 1 or c.val_samples < 1:
        raise ConfigError(f"samples={c.samples}, val_samples={c.val_samples}: both must be at least 1")
    if folder.exists() and not c.overwrite:
        raise ConfigError(f"{folder} is there already: --overwrite=True writes it anew, --out= elsewhere")
    records = folder.with_name(folder.name + "_records")
    prepare(source=records, out=folder, overwrite=True, **maker(c, records))
    if name == "facts":
        write_questions(c, folder)
    task = {"name": name} | {key: getattr(c, key) for key in ("seed", *keys)}
    meta = json.loads((folder / "meta.json").read_text()) | {"task": task}
    if name == "domains":
        meta["tokenizer"] = load_meta(old_domain(folder))["tokenizer"]                   # called alike: it is the same
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))


# ---------------------------------------------------------------- accuracy

def result(text, ended=True):
    """What an answer comes to: ProsQA's "### " sentence, or the last number; None where there is none, or the answer did not end."""
    found = re.findall(r"### .*|\d+", text)
    return found[-1] if found and ended else None


def accuracy(model, data, tok, batch_size=256):
    """The samples of a task, TokenShards, answered greedily -> {"accuracy": fraction that is right, "accuracy_6": of those with 6 operands, ...};
    of facts recall(), of domains retention()."""
    if data.meta["task"]["name"] == "facts":
        return recall(model, data.paths[0].parent)
    if data.meta["task"]["name"] == "domains":
        return retention(model, data)
    from sample import answer_greedy
    x, y = data.batch(range(data.n_windows))                   # a row: eot prompt answer eot eot ...; targets are the answer and one eot
    starts = (y >= 0).int().argmax(1).tolist()
    prompts = [row[:n + 1].tolist() for row, n in zip(x, starts)]
    answers = [row[row >= 0][:-1].tolist() for row in y]
    limit = max(map(len, answers)) + 1
    right = defaultdict(list)
    for prompt, answer, given in zip(prompts, answers, answer_greedy(model, prompts, limit, tok.eot, batch_size)):
        wanted = tok.decode(answer)
        size = len(re.findall(r"\d+", tok.decode(prompt))) or wanted.count("\n")       # operands, or ProsQA's steps
        right[size].append(result(tok.decode(given), len(given) < limit) == result(wanted))
    rate = lambda values: sum(values) / len(values)
    return {"accuracy": rate(sum(right.values(), []))} | {f"accuracy_{size}": rate(values) for size, values in sorted(right.items())}


def print_accuracy(c):
    from sample import load_model
    model, tok, ckpt = load_model(c.out_dir, c.device)
    folder = find_dataset(c.dataset) if c.dataset else Path(ckpt["data"]["folder"])
    meta = load_meta(folder)
    if "task" not in meta:
        raise ConfigError(f"{folder} is no task's data folder: `python experiments/tasks.py arithmetic` makes one, --dataset= names another")
    data = TokenShards(folder, "val", meta.get("block_size", model.config.block_size))
    print(f"{c.out_dir}, step {ckpt['step']}, {data.n_windows} samples of {folder}")
    for key, value in accuracy(model, data, tok).items():
        print(f"{key:14} {value:.4f}")


def plot_curves(path):
    """The accuracy of an experiment's runs at each evaluation: every seed thin, a variant's mean thick."""
    from matplotlib.figure import Figure
    if not Path(path).is_file():
        raise ConfigError(f"there is no --results={path}: train.py's experiments write experiments/results/NAME-SCALE.jsonl")
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    figure = Figure(figsize=(7, 4), layout="tight")
    axes = figure.subplots()
    for n, name in enumerate(dict.fromkeys(row["variant"] for row in rows)):
        curves = [{at["step"]: at["accuracy"] for at in row["curve"]} for row in rows if row["variant"] == name]
        steps = sorted(set.intersection(*map(set, curves)))
        for curve in curves:
            axes.plot(steps, [curve[step] for step in steps], color=f"C{n}", lw=0.7, alpha=0.6)
        mean = [sum(curve[step] for curve in curves) / len(curves) for step in steps]
        axes.plot(steps, mean, "o-", color=f"C{n}", label=name)
        print(f"{name:20}", *(f"{step}: {value:.3f}" for step, value in zip(steps, mean)))
    axes.set(xlabel="step", ylabel="accuracy", ylim=(0, 1.03), title=Path(path).stem)
    axes.legend()
    picture = Path(path).with_name(Path(path).stem + "-curves.png")
    figure.savefig(picture, dpi=120)
    print(f"wrote {picture}")


def main(argv):
    if {"-h", "--help"} & {*argv}:
        return print(__doc__ + "\n" + help_text(Path(__file__).read_text(encoding="utf-8"), _defaults))
    overrides, commands = configure(argv, _defaults)
    c = SimpleNamespace(**_defaults | overrides)
    if len(commands) != 1 or commands[0] not in (*TASKS, "accuracy", "curves"):
        raise ConfigError(f"give one of {', '.join(TASKS)}, accuracy, curves, not {' '.join(commands) or 'nothing'} (--help tells more)")
    if commands[0] == "accuracy":
        print_accuracy(c)
    elif commands[0] == "curves":
        plot_curves(c.results)
    else:
        write_task(commands[0], c)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"tasks.py: {error}")
