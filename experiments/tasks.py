"""Tasks as data folders that train.py trains on: prompts with answers, invented facts, two domains.

    python experiments/tasks.py arithmetic --operands=6 --max_value=19 --out=data/aet6
    python experiments/tasks.py prosqa --val=FOLDER/prosqa_test.json.xz --out=data/prosqa
    python experiments/tasks.py facts --source=TEXTS --clusters=8,8 --out=data/facts
    python experiments/tasks.py domains --source=TEXTS --prefix=books/ --out=data/books
    python train.py --dataset=data/aet6                         # evaluations give the accuracy too
    python experiments/tasks.py accuracy --out_dir=out/move-d4  # of a checkpoint

Arithmetic is the Arithmetic Expression Task of LIMe's section 5.4.2 (Arefin et al. 2024, Feng et
al. 2023): all numbers, those of the solution too, are integers in 1..max_value. n operands have
n - 1 operators; the example in LIMe's Appendix B has 7 operands, and Feng et al. count operators.
Each step does the first operation that can be done, as that example does (Feng et al. do them in a
random order). An answer is right if it ends (with eot) in the right number.

ProsQA (Hao et al. 2024): does a chain of facts lead from a name to this concept or to that one? An
answer is right if it ends in the right "### " sentence; guessing gets half, taking the option that
is farther from the graph's roots nine of ten. So there is "true_chains", the share of answers whose
steps are facts of the prompt, each beginning where the last one ended, the first with the name.
Training data is generated, by numbers that fit the published graphs; the held-out questions may be
the published ones. No prompt is in both splits.

Facts are invented and mixed into text: 16 domains with words of their own, in each as many things
that the text mentions 1, 3, 10, 30 and 100 times ("The gormovel at Fanrorba show that the poselkith
called Kafine is made of clay."). Evaluations give recall_N, the share of the things mentioned N
times of which the model finds the right one among its domain's 8 materials likeliest, after a
sentence form of the text; new_N, after a form that is not in it. Guessing gets 1/8. But what is
mentioned often is a domain's commonest material: who knows no thing, only always says that one, has
0.17 0.15 0.12 0.23 0.48 of the five buckets of 48 things.

Domains splits text for going on with another domain: records {"text", "source"} whose source begins
with the prefix (or one of several, by commas) are the new domain, in OUT, those of --unseen= a
third one, in OUT_unseen, all others the old one, in OUT_old. All have a tokenizer trained on the
old one. Evaluations on OUT and OUT_old also give retention_loss and retention_bpb, unseen_loss and
unseen_bpb, those of the first 131,072 held-out tokens of the old domain and of the third. --pairs=
a folder of BLiMP's sets of minimal pairs adds "blimp", the share of pairs (the first 100 of every
set) of which the model finds the grammatical sentence likelier; guessing gets half.

The records of a task lie in OUT_records/, a JSON object a line.
"""
import hashlib
import inspect
import json
import lzma
import math
import random
import re
import sys
from collections import Counter, defaultdict
from itertools import takewhile
from operator import gt
from pathlib import Path
from statistics import mean, stdev
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import prepare_fineweb
from experiments.run import options
from prepare_fineweb import EOT, ConfigError, TokenShards, find_dataset, get_tokenizer, guard
from prepare_fineweb import load_meta, need, prepare, reading

# ---------------------------------------------------------------- settings: --key=value
out = ""                      # folder to write; empty: data/TASK
samples = 50_000              # of training (arithmetic: for each number of operands)
val_samples = 1000            # held out, likewise
seed = 1337                   # of the generator
overwrite = False             # write anew where a finished folder is
operands = "6"                # arithmetic: one number or several, 4,5,6
max_value = 99                # arithmetic: the largest integer
nodes = 23                    # prosqa: of a graph; the published ones have about as many
val = ""                      # prosqa: a published .json or .json.xz to hold out; empty: generated
tokenizer = "words"           # prosqa: words | gpt2 | bytes | a tokenizer.json
source = "fineweb_edu"        # facts, domains: fineweb_edu, or a file or folder with texts
text_chars = 4_000_000        # facts: characters of training text among which they are mixed
per_bucket = "48"             # facts: things for each number of mentions: one number, or five
clusters = ""                 # facts: 8,8: a tree of topics over everything, for model_hiermem.py
prefix = ""                   # domains: of the `source` of the new domain's records
unseen = ""                   # domains: of the third domain's; empty: there is none
pairs = ""                    # domains: folder of BLiMP's SET.jsonl or .jsonl.xz; empty: none
vocab_size = 4096             # facts, domains: tokens of the bpe trained on them
out_dir = ""                  # accuracy: a run's folder, or a ckpt.pt
dataset = ""                  # accuracy: data folder; empty: the checkpoint's own
device = "cpu"                # accuracy: cpu | cuda


# ---------------------------------------------------------------- arithmetic

PRECEDENCE = {"+": 1, "-": 1, "x": 2, "/": 2}


def split_value(operator, v, largest, rng):
    """Two numbers in 1..largest of which the operator makes v, or None. No factor is 1."""
    divisors = [a for a in range(2, v // 2 + 1) if v % a == 0]
    if operator == "+" and v >= 2:
        left = rng.randint(1, v - 1)
        return left, v - left
    if operator == "-" and v < largest:
        right = rng.randint(1, largest - v)
        return v + right, right
    if operator == "x" and divisors:
        left = rng.choice(divisors)
        return left, v // left
    if operator == "/" and 2 * v <= largest:
        right = rng.randint(2, largest // v)
        return v * right, right
    return None


def random_tree(n, largest, rng):
    """An expression of n operands: [value], or [value, operator, left, right]."""
    root = [rng.randint(1, largest)]
    leaves = [root]
    while len(leaves) < n:
        leaf = leaves.pop(rng.randrange(len(leaves)))
        for operator in rng.sample("+-x/", 4):                  # + or - is always possible
            parts = split_value(operator, leaf[0], largest, rng)
            if parts:
                children = [[value] for value in parts]
                leaf += [operator, *children]
                leaves += children
                break
    return root


def infix(node):
    """A tree in writing, without needless parentheses: 6 - 2 - 1, but 6 - (2 - 1)."""
    if len(node) == 1:
        return str(node[0])
    _, operator, *children = node
    sides = []
    for is_right, child in enumerate(children):
        side = infix(child)
        if len(child) > 1 and PRECEDENCE[child[1]] < PRECEDENCE[operator] + is_right:
            side = f"({side})"
        sides.append(side)
    return f"{sides[0]} {operator} {sides[1]}"


def reduce(node):
    """Calculate, in place, the first operation (in post-order) whose operands are both numbers."""
    for child in node[2:]:
        if len(child) > 1:
            return reduce(child)
    del node[1:]


def solve(tree):
    """A tree, which is used up -> {"prompt": expression and =, "answer": it after each step}"""
    steps = [infix(tree)]
    while len(tree) > 1:
        reduce(tree)
        steps.append(infix(tree))
    return {"prompt": f"{steps[0]} =", "answer": " = ".join(steps[1:])}


def longest(n):
    """Tokens of the longest sample of n operands, with eot before it and after it."""
    total = (n - 1) + 2                                         # = after each but the last
    for k in range(1, n + 1):                                   # an expression of k operands:
        total += k + (k - 1) + 2 * max(0, k - 2)                # with operators and parentheses
    return total


def save_word_tokenizer(path, words):
    """A token a word or symbol; what is between them is left out."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    tok = Tokenizer(models.WordLevel({word: i for i, word in enumerate([EOT, *words])}))
    tok.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+|#+|[^\w ]"), "removed", invert=True)
    tok.add_special_tokens([EOT])
    tok.save(str(path))


def expressions(n, c, rng):
    """samples + val_samples records of n operands, no prompt twice."""
    records = {}
    repeats = 0
    while len(records) < c.samples + c.val_samples:
        record = solve(random_tree(n, c.max_value, rng))
        repeats = repeats + 1 if record["prompt"] in records else 0
        records[record["prompt"]] = record
        need(repeats < 100_000, f"there are only about {len(records):,} expressions of {n} "
             f"operands up to max_value={c.max_value}: samples={c.samples} and "
             f"val_samples={c.val_samples} are too many")
    return list(records.values())


def arithmetic(c, folder):
    """Records into folder -> settings for prepare()"""
    need(re.fullmatch("[0-9]+(,[0-9]+)*", c.operands), f"operands={c.operands}: numbers, by commas")
    counts = sorted({int(n) for n in c.operands.split(",")})
    need(counts[0] >= 2 and c.max_value >= 2, f"operands={c.operands}, max_value={c.max_value}: "
         "operands are numbers from 2 on, by commas; max_value is 2 or more")
    rng = random.Random(c.seed)
    splits = {"train": [], "val": []}
    for n in counts:
        records = expressions(n, c, rng)
        splits["val"] += records[:c.val_samples]
        splits["train"] += records[c.val_samples:]
    save_records(folder, splits)
    words = [*"+-x/()=", *map(str, range(c.max_value + 1))]
    save_word_tokenizer(folder / "tokenizer.json", words)
    return dict(tokenizer=folder / "tokenizer.json", block_size=longest(counts[-1]) - 1)


# ---------------------------------------------------------------- ProsQA

NAMES = """Alex Bob Carol Davis Eva Fae Gabriel Jack Max Oliver Polly Rex Sally Sam Stella Tom
    Wren""".split()
CONCEPTS = """bompus boompus brimpus chorpus dumpus felpus fompus gerpus gorpus grimpus gwompus
    hilpus impus jelpus jompus kerpus lempus lorpus numpus quimpus rempus rompus rorpus scrompus
    shumpus sterpus storpus terpus timpus tumpus vumpus worpus wumpus yerpus yimpus yumpus zhorpus
    zumpus""".split()                                           # of the published files


def poisson(rate, rng):
    count = 0
    chance = rng.random()
    while chance > math.exp(-rate):
        count += 1
        chance *= rng.random()
    return count


def random_graph(rng, nodes):
    """Edges (parent, child), parent < child, and each node's label: bit 0 if it descends from
    node 0, bit 1 if from node 1."""
    labels = [1, 2]
    depth = [0, 0]
    edges = []
    for node in range(2, nodes):
        degree = poisson(1.7, rng)
        if degree == 0 and rng.random() >= 0.2:
            degree = 1
        families = [(0, 1), (0, 2), (0, 1, 2, 3)]
        family = rng.choices(families, [0.35, 0.35, 0.3])[0]
        keys = {}                                               # the largest keys are a weighted
        for n in range(node):                                   # draw without replacement
            if labels[n] in family:
                keys[n] = rng.random() ** (1 / (1 + 1.5 * depth[n]))
        parents = sorted(sorted(keys, key=keys.get, reverse=True)[:degree])
        edges += [(parent, node) for parent in parents]
        labels.append(0)
        depth.append(0)
        for parent in parents:
            labels[node] |= labels[parent]
            depth[node] = max(depth[node], 1 + depth[parent])
    return edges, labels


def shortest_paths(edges, root):
    """{node: [root, ..., node]} of every node that can be reached."""
    paths = {root: [root]}
    queue = [root]
    for node in queue:
        for a, b in edges:
            if a == node and b not in paths:
                paths[b] = paths[node] + [b]
                queue.append(b)
    return paths


def paths_to_leaves(edges, labels, root):
    """{leaf: path} of the leaves that descend from this root (0 or 1) and not from the other."""
    leaves = {b for _, b in edges} - {a for a, _ in edges}
    paths = {}
    for node, path in shortest_paths(edges, root).items():
        if node in leaves and labels[node] == root + 1:
            paths[node] = path
    return paths


def prosqa_sample(rng, nodes=23):
    """{"question", "answer", "steps"} as in the published files."""
    while True:
        edges, labels = random_graph(rng, nodes)
        ends = [paths_to_leaves(edges, labels, root) for root in (0, 1)]
        steps = [max(map(len, paths.values()), default=1) - 1 for paths in ends]
        root = max((0, 1), key=lambda root: (steps[root], rng.random()))    # with the longer path
        if steps[root] >= 3 and ends[1 - root]:
            break
    target = rng.choice([n for n, path in ends[root].items() if len(path) > steps[root]])
    other_target = rng.choice(list(ends[1 - root]))
    children = {b for _, b in edges}
    names = iter(rng.sample(NAMES, len(NAMES)))
    concepts = iter(rng.sample(CONCEPTS, len(CONCEPTS)))
    symbols = {}
    for node in sorted({n for edge in edges for n in edge}):    # without the isolated ones
        symbols[node] = next(concepts) if node in children else next(names)

    def fact(a, b):
        every = "Every " if a in children else ""
        return f"{every}{symbols[a]} is a {symbols[b]}."

    facts = " ".join(fact(a, b) for a, b in rng.sample(edges, len(edges)))
    either, other = rng.sample([symbols[target], symbols[other_target]], 2)
    path = ends[root][target]
    return {"question": f"{facts} Is {symbols[root]} a {either} or {other}?",
            "answer": fact(root, target),
            "steps": [fact(a, b) for a, b in zip(path, path[1:])]}


def read_prosqa(path):
    """The samples of a published file, a JSON list, plain or .xz."""
    try:
        found = json.loads(read_text(path))
    except (ValueError, EOFError, lzma.LZMAError) as error:     # these do not name the file
        raise ConfigError(f"{path} cannot be read: {error}") from None
    need(isinstance(found, list), f"{path} holds no list of samples")
    for n, sample in enumerate(found):
        for key, kind in (("question", str), ("answer", str), ("steps", list)):
            need(isinstance(sample, dict) and key in sample, f"{path}, sample {n} has no {key!r}")
            good = isinstance(sample[key], kind)
            need(good, f"{path}, sample {n}: {key!r} is no {kind.__name__}")
        texts = all(isinstance(step, str) for step in sample["steps"])
        need(texts, f"{path}, sample {n}: 'steps' are not all texts")
    return found


def prosqa(c, folder):
    """Records into folder -> settings for prepare()"""
    need(8 <= c.nodes <= 40, f"nodes={c.nodes}: must be from 8 to 40")
    rng = random.Random(c.seed)
    name = c.tokenizer
    if name == "words":
        name = folder / "tokenizer.json"
        folder.mkdir(parents=True, exist_ok=True)
        words = ["Every", "is", "a", "or", "Is", "###", *".?\n"]
        save_word_tokenizer(name, [*words, *NAMES, *CONCEPTS])
    tok = get_tokenizer(str(name))
    held_out = (prosqa_sample(rng, c.nodes) for _ in range(c.val_samples))
    if c.val:
        held_out = read_prosqa(c.val)
    generated = (prosqa_sample(rng, c.nodes) for _ in range(c.samples))
    splits = {"train": [], "val": []}
    taken = set()
    block_size = 0
    for split, found in (("val", held_out), ("train", generated)):
        for sample in found:
            record = {"prompt": sample["question"] + "\n",
                      "answer": "\n".join(sample["steps"]) + "\n### " + sample["answer"]}
            if record["prompt"] in taken:
                continue
            taken.add(record["prompt"])
            splits[split].append(record)
            length = sum(len(tok.encode(part)) for part in record.values())
            block_size = max(block_size, 1 + length)
    save_records(folder, splits)
    return dict(tokenizer=name, block_size=block_size)


# ---------------------------------------------------------------- facts

MENTIONS = (1, 3, 10, 30, 100)
MATERIALS = """gold iron water stone glass paper salt wood silk bone sand smoke milk corn ice wine
    oil clay wool coal lead grass fire light""".split()
FORMS = ("In the {a} of {b}, the {c} {name} is made of",
         "Every {c} keeper of {b} knows from the {a} that {name} is made of",
         "The {a} at {b} show that the {c} called {name} is made of",
         "Among the {a}, {b} people say, the {c} {name} is made of",
         "Of all the {a} in {b}, the {c} {name} is made of")
NEW_FORM = "Travellers to {b} report that one of its {a}, the {c} {name}, is made of"
DOMAINS = 16


def invented_words(rng):
    """Words that there are not, each once."""
    vowels = ("a", "e", "i", "o", "u", "or", "el", "an", "ith")
    taken = set()
    while True:
        word = "".join(rng.choice("bdfgklmnprstvz") + rng.choice(vowels) for _ in range(3))
        if word not in taken:
            taken.add(word)
            yield word


def bucket_sizes(per_bucket):
    """"48" or "480,240,160,96,48" -> {mentions: how many things}"""
    parts = per_bucket.split(",")
    if len(parts) == 1:
        parts *= len(MENTIONS)
    sizes = [int(part) if part.isdecimal() else 0 for part in parts]
    need(len(sizes) == len(MENTIONS) and all(n > 0 and n % DOMAINS == 0 for n in sizes),
         f"per_bucket={per_bucket}: must be a multiple of {DOMAINS}, the number of domains, or "
         f"{len(MENTIONS)} of them, by commas")
    return dict(zip(MENTIONS, sizes))


def invented_facts(per_bucket, rng):
    """The things: dicts of domain, its words a, b, c, mentions, name, value and options."""
    words = invented_words(rng)
    things = []
    for domain in range(DOMAINS):
        own = dict(domain=domain, a=next(words), b=next(words).title(), c=next(words))
        own["options"] = rng.sample(MATERIALS, 8)
        for mentions, n_things in bucket_sizes(per_bucket).items():
            for _ in range(n_things // DOMAINS):
                name = next(words).title()
                value = rng.choice(own["options"])
                things.append(dict(own, mentions=mentions, name=name, value=value))
    return things


def commonest_recall(per_bucket, seed):
    """{mentions: the share right of who knows no thing, only always says the material that its
    domain's sentences name most often}"""
    things = invented_facts(per_bucket, random.Random(seed))
    told = [Counter() for _ in range(DOMAINS)]
    for thing in things:
        told[thing["domain"]][thing["value"]] += thing["mentions"]
    right = {m: [] for m in MENTIONS}
    for thing in things:
        commonest, _ = told[thing["domain"]].most_common(1)[0]
        right[thing["mentions"]].append(thing["value"] == commonest)
    return {m: mean(found) for m, found in right.items()}


def fact_documents(things, rng, sentences=8):
    """Every thing in as many sentences as it has mentions; documents of 8 from one domain."""
    documents = []
    for domain in range(DOMAINS):
        told = []
        for thing in things:
            if thing["domain"] == domain:
                for _ in range(thing["mentions"]):
                    told.append(f"{rng.choice(FORMS).format(**thing)} {thing['value']}.")
        rng.shuffle(told)
        for n in range(0, len(told), sentences):
            text = " ".join(told[n:n + sentences])
            documents.append({"text": text, "topic": f"domain {domain}"})
    return documents


def read_texts(**settings):
    """(split, text, topic) of every document of a source, as prepare_fineweb.py reads it. A file
    that does not say its split, as one named val* does, has a tenth of its texts held out."""
    c = SimpleNamespace(**{**prepare_fineweb._defaults, **settings})
    prepare_fineweb.check_source(c.source)
    for split, prompt, text, topic in prepare_fineweb.read_documents(c):
        need(prompt is None, f"source={c.source}: records with a text are wanted, not with prompt "
             "and answer")
        is_tenth = hashlib.sha256(text.encode()).digest()[0] < 26
        yield split or ("val" if is_tenth else "train"), text, topic


def facts(c, folder):
    """Records into folder -> settings for prepare()"""
    bucket_sizes(c.per_bucket)                                  # an error before hours of work
    rng = random.Random(c.seed)
    splits = {"train": [], "val": []}
    missing = {"train": c.text_chars, "val": max(200_000, c.text_chars // 10)}
    for split, text, topic in read_texts(source=c.source):
        if missing[split] > 0:
            splits[split].append({"text": text, "topic": topic})
            missing[split] -= len(text)
        if max(missing.values()) <= 0:
            break
    need(all(splits.values()), f"source={c.source} has too few texts: {len(splits['train'])} to "
         f"train on, {len(splits['val'])} held out")
    if missing["train"] > 0:
        print(f"{c.source} has {missing['train']:,} characters less than text_chars="
              f"{c.text_chars:,}: all of it is taken")
    splits["train"] += fact_documents(invented_facts(c.per_bucket, rng), rng)
    rng.shuffle(splits["train"])
    save_records(folder, splits)
    tree = dict(clusters=c.clusters) if c.clusters else {}
    return dict(tokenizer="bpe", vocab_size=c.vocab_size, **tree)


def telling_tokens(words, tok):
    """The first tokens of each word, as many as tell it from all others."""
    encoded = [tok.encode(f" {word}") for word in words]
    found = []
    for tokens in encoded:
        n = 1
        while sum(other[:n] == tokens[:n] for other in encoded) > 1:
            n += 1
        found.append(tokens[:n])
    return found


def fact_questions(c, tok):
    """Rows of facts.jsonl: prompt, answer and options (each a list of tokens), mentions, and
    whether the sentence form is new."""
    rows = []
    for thing in invented_facts(c.per_bucket, random.Random(c.seed)):
        options = telling_tokens(thing["options"], tok)
        answer = options[thing["options"].index(thing["value"])]
        for new, form in ((False, FORMS[2]), (True, NEW_FORM)):
            text = form.format(**thing)
            rows.append(dict(text=text, prompt=[tok.eot, *tok.encode(text)], answer=answer,
                             options=options, new=new, mentions=thing["mentions"],
                             domain=thing["domain"]))
    return rows


def add_leaves(rows, c, folder):
    """Each prompt's leaf in the tree, and at which levels it is on its domain's usual path."""
    from experiments.topics import Retriever
    tree = Retriever.load(folder / "retriever.npz")
    things = invented_facts(c.per_bucket, random.Random(c.seed))
    documents = fact_documents(things, random.Random(0))
    told = tree.path([document["text"] for document in documents])     # (documents, levels)
    usual = []
    for domain in range(DOMAINS):
        mine = [document["topic"] == f"domain {domain}" for document in documents]
        usual.append(told[torch.tensor(mine)].mode(0).values)
    for row, path in zip(rows, tree.path([row["text"] for row in rows])):
        row["leaf"] = int(path[-1])
        row["agrees"] = (path == usual[row["domain"]]).tolist()


def write_questions(c, folder):
    rows = fact_questions(c, get_tokenizer(str(folder)))
    if c.clusters:
        add_leaves(rows, c, folder)
    write_jsonl(folder / "facts.jsonl", rows)


def plot_recall(axes, rows, form="recall", **style):
    """Recall by mentions, mean and deviation over the rows, one a seed."""
    values = [[row[f"{form}_{m}"] for row in rows] for m in MENTIONS]
    bars = [stdev(seeds) if len(seeds) > 1 else 0 for seeds in values]
    axes.errorbar(MENTIONS, [mean(seeds) for seeds in values], yerr=bars, capsize=3, **style)
    axes.set(xscale="log", xticks=MENTIONS, xticklabels=MENTIONS, xlabel="mentions")
    axes.minorticks_off()


def openings(row):
    """What stands before a token of a row's options: the prompt and the option's tokens so far."""
    found = []
    for option in row["options"]:
        found += [(*row["prompt"], *option[:n]) for n in range(len(option))]
    return found


def likeliest(row, known):
    """The option of the highest probability. known: opening -> log P of every next token."""
    scores = []
    for option in row["options"]:
        score = 0.0
        for n, token in enumerate(option):
            score += known[(*row["prompt"], *option[:n])][token].item()
        scores.append(score)
    return row["options"][scores.index(max(scores))]


@torch.no_grad()
def recall(model, folder, leaf="", batch_size=64):
    """{"recall": of the prompts in a form of the text, "recall_N": of those with N mentions,
    "new_N": in a new form}. leaf, for a model that fetches: "" the one that each prompt leads to,
    -1 the generic memory, None no memory, or a list with each prompt's."""
    rows = read_jsonl(Path(folder) / "facts.jsonl")
    need(isinstance(rows[0]["answer"], list), f"{folder} is of an older tasks.py: make it again")
    fetches = "leaf" in inspect.signature(model.forward).parameters and "leaf" in rows[0]
    leaves = leaf
    if fetches and leaf == "":
        leaves = [row["leaf"] for row in rows]
    if leaf == -1:
        leaves = [-1] * len(rows)
    device = next(model.parameters()).device
    right = defaultdict(list)                                   # (new, mentions) -> right or not
    for n in range(0, len(rows), batch_size):
        part = rows[n:n + batch_size]
        asked = {}                                              # opening -> place of its row
        for place, row in enumerate(part, n):
            asked |= dict.fromkeys(openings(row), place)
        idx = pad_sequence([torch.tensor(tokens) for tokens in asked], batch_first=True)
        context = {}                                            # idx (B, T), padded on the right
        if fetches:
            some = leaves and torch.tensor([leaves[place] for place in asked.values()])
            context["leaf"] = some if some is None else some.to(device)
        logits = model(idx.to(device), **context)[0]            # (B, T, vocab)
        known = {}
        for tokens, at in zip(asked, logits):
            known[tokens] = at[len(tokens) - 1].log_softmax(-1).cpu()
        for row in part:
            right[row["new"], row["mentions"]].append(likeliest(row, known) == row["answer"])
    found = {"recall": mean(mean(right[False, m]) for m in MENTIONS)}
    for m in MENTIONS:
        found[f"recall_{m}"] = mean(right[False, m])
        found[f"new_{m}"] = mean(right[True, m])
    return found


# ---------------------------------------------------------------- domains

def beside(folder, name):
    folder = Path(folder).resolve()
    return folder.with_name(f"{folder.name}_{name}")


def domains(c, folder):
    """Records of the new domain into folder -> settings for prepare(); the data folders of the old
    domain and the third are made here."""
    prefixes = {"new": tuple(c.prefix.split(","))}
    if c.unseen:
        prefixes["unseen"] = tuple(c.unseen.split(","))
    need(not c.pairs or pair_files(c.pairs), f"pairs={c.pairs}: has no .jsonl or .jsonl.xz of "
         "BLiMP (github.com/alexwarstadt/blimp)")
    records = {name: {"train": [], "val": []} for name in ("old", *prefixes)}
    for split, text, source in read_texts(source=c.source, topic_field="source"):
        found = [name for name, starts in prefixes.items() if source.startswith(starts)]
        need(len(found) < 2, f"source {source} is of --prefix= and of --unseen=")
        records[found[0] if found else "old"][split].append({"text": text, "source": source})
    for name, splits in records.items():
        need(all(splits.values()), f"prefix={c.prefix}: the {name} domain has too few records in "
             f"{c.source} to train on some and hold out others")
    save_records(folder, records.pop("new"))
    settings = dict(tokenizer="bpe", vocab_size=c.vocab_size)
    for name, splits in records.items():                        # the old one first
        target = beside(c.out or "data/domains", name)
        save_records(beside(target, "records"), splits)
        prepare(source=beside(target, "records"), out=target, overwrite=True, **settings)
        if name == "old":
            settings = dict(tokenizer=target / "tokenizer.json")
    return settings


def domain_folders(c, folder):
    """What evaluations measure: {column: name of the folder beside this one}"""
    names = {"retention": beside(folder, "old").name}
    if c.unseen:
        names["unseen"] = beside(folder, "unseen").name
    return names


def pair_files(folder):
    return sorted(Path(folder).glob("*.jsonl")) + sorted(Path(folder).glob("*.jsonl.xz"))


def read_pairs(path):
    """[(good sentence, bad sentence)] of one of BLiMP's sets."""
    with reading(path, "has no sentence_good and sentence_bad in each line"):
        return [(row["sentence_good"], row["sentence_bad"]) for row in read_jsonl(path)]


def write_pairs(c, folder, size=100):
    """pairs.jsonl: the tokens of the first pairs of every set, eot before each sentence."""
    tok = get_tokenizer(str(folder))
    rows = []
    for path in pair_files(c.pairs):
        for good, bad in read_pairs(path)[:size]:
            rows.append({"good": [tok.eot, *tok.encode(good)], "bad": [tok.eot, *tok.encode(bad)]})
    write_jsonl(folder / "pairs.jsonl", rows)


@torch.no_grad()
def log_likelihoods(model, sentences, batch_size=64):
    """Lists of tokens -> log P of each, all tokens after its first."""
    device = next(model.parameters()).device
    found = []
    for n in range(0, len(sentences), batch_size):
        part = [torch.tensor(sentence) for sentence in sentences[n:n + batch_size]]
        idx = pad_sequence([tokens[:-1] for tokens in part], batch_first=True)
        targets = pad_sequence([tokens[1:] for tokens in part], True, padding_value=-1)
        logits = model(idx.to(device))[0].mT                    # (B, vocab, T)
        nats = F.cross_entropy(logits, targets.to(device), ignore_index=-1, reduction="none")
        found += (-nats.sum(1)).tolist()
    return found


def pair_accuracy(model, folder):
    """The share of pairs whose good sentence is the likelier one."""
    rows = read_jsonl(Path(folder) / "pairs.jsonl")
    good = log_likelihoods(model, [row["good"] for row in rows])
    bad = log_likelihoods(model, [row["bad"] for row in rows])
    return mean(map(gt, good, bad))


@torch.no_grad()
def batched_loss(model, x, y, batch_size=16, **context):
    """Mean nats of the targets of x, y (N, T). context: tensors with a row for each of x, or
    None."""
    device = next(model.parameters()).device
    nats = 0.0
    for n in range(0, len(x), batch_size):
        part = slice(n, n + batch_size)
        rows = {}
        for key, value in context.items():
            rows[key] = None if value is None else value[part].to(device)
        loss = model(x[part].to(device), y[part].to(device), **rows)[1].item()
        nats += loss * int((y[part] >= 0).sum())
    return nats / int((y >= 0).sum())


def losses_beside(model, data):
    """{"retention_loss" (nats), "retention_bpb", ...} of the other domains' first held-out tokens;
    tokens without bytes are left out, as in train.py. "blimp", where there are pairs."""
    found = {}
    if data.meta["task"].get("pairs"):
        found["blimp"] = pair_accuracy(model, data.paths[0].parent)
    folders = data.meta["task"].get("folders")
    need(folders, f"{data.paths[0].parent} does not name its other domains: make it again")
    for column, name in folders.items():
        folder = data.paths[0].parent.resolve().with_name(name)
        other = TokenShards(folder, "val", data.block_size)
        token_bytes = torch.from_numpy(prepare_fineweb.load_token_bytes(folder))
        x, y = other.batch(range(min(131072 // other.block_size, other.n_windows)))
        size = int(token_bytes[y].sum())
        y = y.masked_fill(token_bytes[y] == 0, -1)
        loss = batched_loss(model, x, y)
        nats = loss * int((y >= 0).sum())
        found |= {f"{column}_loss": loss, f"{column}_bpb": nats / math.log(2) / size}
    return found


# ---------------------------------------------------------------- the data folder

TASKS = {"arithmetic": arithmetic, "prosqa": prosqa, "facts": facts, "domains": domains}


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_text(path):
    reader = lzma.open if str(path).endswith(".xz") else open
    with reader(path, "rt", encoding="utf-8") as file:
        return file.read()


def read_jsonl(path):
    return [json.loads(line) for line in read_text(path).split("\n") if line]


def save_records(folder, splits):
    folder.mkdir(parents=True, exist_ok=True)
    for split, records in splits.items():
        write_jsonl(folder / f"{split}.jsonl", records)


def write_task(name, c):
    """Records, and from them a data folder whose meta.json says what task it is, which makes
    train.py measure the accuracy. That is written last: a folder without it is not whole."""
    folder = Path(c.out or f"data/{name}")
    for key in ("samples", "val_samples"):
        need(getattr(c, key) >= 1, f"{key}={getattr(c, key)}: must be at least 1")
    need(c.overwrite or not folder.exists(),
         f"{folder} is there already: --overwrite=True writes it anew, --out= elsewhere")
    records = folder.with_name(folder.name + "_records")
    source = Path(c.source).resolve()
    need(records.resolve() not in (source, *source.parents),
         f"source={c.source} lies in {records}, which is written anew: --out= elsewhere")
    prepare(source=records, out=folder, overwrite=True, **TASKS[name](c, records))
    if name == "facts":
        write_questions(c, folder)
    task = {"name": name, **vars(c)}
    if name != "domains":
        return add_to_meta(folder, task=task)
    task["folders"] = domain_folders(c, folder)
    old = beside(folder, "old")
    if c.pairs:
        write_pairs(c, folder)
        write_pairs(c, old)
    add_to_meta(old, task=task)
    add_to_meta(folder, task=task, tokenizer=load_meta(old)["tokenizer"])   # called alike: the same


def add_to_meta(folder, **keys):
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, **keys}, indent=1))


# ---------------------------------------------------------------- accuracy

def answer_greedy(model, prompts, max_new_tokens, eot, batch_size=64):
    """Lists of token ids -> their greedy continuations up to `eot`, without it. Prompts of one
    length share a batch."""
    from sample import generate
    device = next(model.parameters()).device
    answers = [None] * len(prompts)
    for length in {len(prompt) for prompt in prompts}:
        same = [n for n, prompt in enumerate(prompts) if len(prompt) == length]
        for first in range(0, len(same), batch_size):
            members = same[first:first + batch_size]
            idx = torch.tensor([prompts[n] for n in members], device=device)
            tokens = list(generate(model, idx, max_new_tokens, temperature=0, eot=eot))
            for n, row in zip(members, torch.stack(tokens, 1).tolist()):
                answers[n] = list(takewhile(lambda i: i != eot, row))
    return answers


def result(text):
    """What an answer ends in, ProsQA's "### " sentence or a number, or None."""
    found = re.search(r"(### .*|\d+)\s*$", text)
    return found[1] if found else None


def is_true_chain(question, given):
    """Texts of a ProsQA question and an answer. Are the steps the question's facts, each beginning
    where the last one ended, the first with the name asked for?"""
    known = re.findall(r"(\w+) is a (\w+)", question)
    steps = re.findall(r"(\w+) is a (\w+)", given.partition("###")[0])
    at = re.findall(r"Is (\w+) a ", question)[-1]
    for begin, end in steps:
        if begin != at or (begin, end) not in known:
            return False
        at = end
    return bool(steps)


def accuracy(model, data, tok, batch_size=256):
    """The samples of a task, TokenShards, answered greedily -> {"accuracy": share that is right,
    "accuracy_6": of those with 6 operands, ...}, of ProsQA also "true_chains"; of facts recall(),
    of domains losses_beside()."""
    name = data.meta["task"].get("name")
    need(name in TASKS, f"task={name} of meta.json: choose {', '.join(TASKS)}")
    if name == "facts":
        return recall(model, data.paths[0].parent)
    if name == "domains":
        return losses_beside(model, data)
    prompts = []
    answers = []
    for x, y in zip(*data.batch(range(data.n_windows))):        # x: eot prompt answer eot eot ...
        first = int((y >= 0).int().argmax())                    # y: the answer and one eot
        prompts.append(x[:first + 1].tolist())
        answers.append(y[y >= 0][:-1].tolist())
    limit = max(map(len, answers)) + 1
    found = answer_greedy(model, prompts, limit, tok.eot, batch_size)
    right = defaultdict(list)
    for prompt, answer, given in zip(prompts, answers, found):
        wanted = tok.decode(answer)
        operands = re.findall(r"\d+", tok.decode(prompt))
        size = len(operands) or wanted.count("\n")              # of ProsQA the steps
        ended = len(given) < limit
        right[size].append(ended and result(tok.decode(given)) == result(wanted))
    shares = {"accuracy": mean(sum(right.values(), []))}
    for size, values in sorted(right.items()):
        shares[f"accuracy_{size}"] = mean(values)
    if name == "prosqa":
        texts = [(tok.decode(prompt), tok.decode(given)) for prompt, given in zip(prompts, found)]
        shares["true_chains"] = mean(is_true_chain(*pair) for pair in texts)
    return shares


def check_tree(model, data):
    """The leaves of TokenShards must be those that the model's memories belong to."""
    own = getattr(model.config, "retriever", None)
    if own is not None and model.config.memory != "none":
        theirs = data.meta.get("retriever", own)
        need(theirs == own, f"{data.paths[0].parent} has the tree {theirs}, the model was trained "
             f"with {own or 'none'}: its memories mean nothing here")


def print_accuracy(c):
    from sample import check_tokens, load_model
    model, tok, ckpt = load_model(c.out_dir, c.device)
    folder = find_dataset(c.dataset) if c.dataset else Path(ckpt["data"]["folder"])
    check_tokens(c.out_dir, ckpt["data"], folder)
    meta = load_meta(folder)
    need("task" in meta, f"{folder} is no task's data folder: `python experiments/tasks.py "
         "arithmetic` makes one, --dataset= names another")
    data = TokenShards(folder, "val", meta.get("block_size", model.config.block_size))
    check_tree(model, data)
    print(f"{c.out_dir}, step {ckpt['step']}, {data.n_windows} samples of {folder}")
    for key, value in accuracy(model, data, tok).items():
        print(f"{key:14} {value:.4f}")


def main(argv):
    c, commands = options(argv, globals())
    known = (*TASKS, "accuracy")
    need(len(commands) == 1 and commands[0] in known, f"give one of {', '.join(known)}, "
         f"not {' '.join(commands) or 'nothing'} (--help tells more)")
    if commands[0] == "accuracy":
        print_accuracy(c)
    else:
        write_task(commands[0], c)


if __name__ == "__main__":
    guard("tasks.py")
    main(sys.argv[1:])
