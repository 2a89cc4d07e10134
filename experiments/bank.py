"""
Work on the bank of a model with hierarchical memories: training it in parts, taking blocks out of
it, and what a prompt reads of it.

With a frozen anchor the memories under each node of level 1 are trained by a job of their own, on
the text of that subtree alone; the jobs need not run at the same time or on the same machine
(section A.2; it has no job for the generic blocks, here one more). A job is an ordinary run:

    python experiments/bank.py split --dataset=data/x       # writes data/x-subtree0, -subtree1, ...
    python train.py --model=hiermem --init_from=out/anchor --memory=ffn --frozen=True --generic=0 \\
                    --dataset=data/x-subtree0 --out_dir=out/job0                  # and so on
    python train.py --model=hiermem --init_from=out/anchor --memory=ffn --frozen=True --generic=1 \\
                    --dataset=data/x --out_dir=out/generic
    python experiments/bank.py merge --jobs=out/job0,out/job1,out/generic --out_dir=out/all

The generic job's val_loss stays the anchor's, for evaluation fetches a text's own path. A job may
go on with the merged bank, --init_from=out/all: it moves the blocks of its subtree and leaves every
other bit of the model as it is. And:

    python experiments/bank.py remove --out_dir=out/all --nodes=1:0,2:3    # level:node, ...
    python experiments/bank.py read --out_dir=out/all --prompt="..."

remove: the blocks are again as before any training, when a block adds nothing to any text. (Keys of
kv memories still take their share of the softmax.) Full removal of a document takes all blocks of
its path, and a frozen anchor and generic blocks that never saw it.
read: the bytes of the checkpoint that one prompt brings into memory. The file is mapped, and the
system reads the pages that are used and their neighbours.
"""
import json
import math
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import sample
from experiments.run import options
from model_hiermem import Config, Model, parse_nodes
from prepare_fineweb import find_dataset, guard, load_meta, lock, need, reading

# ------------------------------------------------------------------ settings: --key=value
dataset = ""              # split: the folder of the whole data
jobs = ""                 # merge: the jobs' folders, by commas
out_dir = ""              # merge: where to; remove, read: the model's folder
overwrite = False         # merge: replace a checkpoint in out_dir
nodes = ""                # remove: level:node, ...
prompt = "The"            # read: the text
embedder_path = ""        # read: folder of the tree's embedder, where that is not installed
# ------------------------------------------------------------------


def split(dataset):
    """A data folder for each subtree of level 1, with the sequences of its leaves."""
    need(dataset, "no --dataset= to split")
    folder = find_dataset(dataset)
    meta = load_meta(folder)
    need("clusters" in meta, f"{folder} has no tree: prepare_fineweb.py --clusters= makes one")
    factors = [int(k) for k in meta["clusters"].split(",")]
    targets = [folder.with_name(f"{folder.name}-subtree{i}") for i in range(factors[0])]
    for target in targets:
        need(not target.exists(), f"{target} is there already: remove it first")
    below = math.prod(factors[1:])                             # leaves under a node of level 1
    for subtree, target in enumerate(targets):
        partial = target.with_name(target.name + ".partial")             # until it is whole
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        tokens = {"train": 0, "val": 0}
        for path in sorted(folder.glob("*.bin")):
            leaf = np.fromfile(path.with_suffix(".leaf"), np.int32)
            part = path.name.split("_")[0]
            tokens[part] += split_shard(path, partial, leaf // below == subtree)
        for name in ("tokenizer.json", "token_bytes.npy", "retriever.npz"):
            if (folder / name).exists():
                shutil.copy(folder / name, partial)
        own = dict(meta, tokens=tokens, data_id=f"{meta['data_id']}-{subtree}")
        for key in ("settings", "documents", "bytes", "tree", "task"):   # of the whole folder
            own.pop(key, None)
        (partial / "meta.json").write_text(json.dumps(own, indent=1))
        need(min(tokens.values()), f"subtree {subtree} has {tokens['train']} train and "
             f"{tokens['val']} val tokens: prepare {folder} with more text or fewer clusters")
        os.rename(partial, target)
        print(f"{target}: {tokens['train']:,} train and {tokens['val']:,} val tokens")
    return targets


def split_shard(path, folder, wanted):
    """Copies the sequences of a shard that are wanted (n,) into folder; returns their tokens."""
    header = np.fromfile(path, np.int32, 256)
    dtype = np.uint16 if header[0] == 20240520 else np.uint32
    tokens = np.fromfile(path, dtype, offset=header.nbytes).reshape(len(wanted), -1)[wanted]
    header[2] = tokens.size
    with open(folder / path.name, "wb") as file:
        header.tofile(file)
        tokens.tofile(file)
    mask = np.fromfile(path.with_suffix(".mask"), np.uint8).reshape(len(wanted), -1)
    mask[wanted].tofile(folder / path.with_suffix(".mask").name)
    leaf = np.fromfile(path.with_suffix(".leaf"), np.int32)
    leaf[wanted].tofile(folder / path.with_suffix(".leaf").name)
    return tokens.size


def load(folder):
    """A checkpoint that has a bank."""
    ckpt = sample.load_checkpoint(folder)
    has_bank = any(re.match("bank.*table", key) for key in ckpt["model"])
    need(has_bank and "clusters" in ckpt["model_config"], f"{folder} has no bank of topics")
    with reading(folder):                                      # it is whole
        sample.assemble(folder, ckpt)
        blocks_of(ckpt)
    return ckpt


def blocks_of(ckpt):
    """{level: {"table", "steps", "exp_avg", "exp_avg_sq"}}: what a checkpoint has of the nodes of
    every level, a row each, the last one generic. Only the table where nothing was trained."""
    optimizer = ckpt["optimizers"][-1]["state"]                # RowAdamW, or AdamW with all else
    keys = [key for key in ckpt["model"] if key.startswith("bank.")]
    blocks = {}
    for number, key in enumerate(keys):
        blocks[int(key.split(".")[1])] = {"table": ckpt["model"][key], **optimizer.get(number, {})}
    return blocks


def zeros_at_start(level, rows):
    """What is 0 in a block before any training, of these rows of a level; the rest is random, and
    jobs may differ in seed."""
    new = torch.empty(2, rows.size(1))              # a random number that is 0 is not so in both
    level.init(new, torch.Generator().manual_seed(0))
    return rows[:, (new == 0).all(0)]


def merge(jobs, out_dir, overwrite=False):
    """The jobs' checkpoints -> out_dir/ckpt.pt, each block with its moments from the job that has
    trained it."""
    need(out_dir, "no --out_dir= to merge into")
    out = Path(out_dir)
    target = out / "ckpt.pt"
    need(overwrite or not target.exists(),
         f"{target} is there already: another --out_dir, or --overwrite=True to replace it")
    inside = out.resolve() in [Path(folder).resolve() for folder in jobs]
    need(not inside, f"out_dir={out_dir} is one of the jobs: give another, they are kept")
    ckpts = {folder: load(folder) for folder in jobs}
    generic = [folder for folder in jobs if ckpts[folder]["model_config"].get("generic") == 1]
    need(len(generic) == 1, f"{len(generic)} of the jobs have --generic=1: exactly one must")
    merged = ckpts.pop(generic[0])
    config = Config(**{**merged["model_config"], "generic": -1})
    with torch.device("meta"):
        bank = Model(config).bank
    begun = blocks_of(load(generic[0]))                        # a copy: `merged` changes below
    blocks = blocks_of(merged)
    trained = {}                                               # {level: (n_l + 1,) bool}
    for level, rows in blocks.items():
        need("steps" in rows, f"{generic[0]} has trained no block of level {level}, or with "
             "sparse_memory=False, which keeps no count of a block's steps")
        trained[level] = rows["steps"] > 0
    for folder, ckpt in ckpts.items():
        fields = {**ckpt["model_config"], "generic": -1}
        need(fields == vars(config), f"{folder} has another model or tree than {generic[0]}")
        for key, tensor in ckpt["model"].items():
            same = key.startswith("bank.") or torch.equal(tensor, merged["model"][key])
            need(same, f"{folder} started from another anchor than {generic[0]}")
        for level, theirs in blocks_of(ckpt).items():
            if "steps" not in theirs:
                continue
            moved = theirs["steps"] > 0
            finite = theirs["table"][moved].isfinite().all()
            need(finite, f"{folder} has blocks of level {level} that are not numbers")
            still = ~moved & (begun[level]["steps"] == 0)
            start = zeros_at_start(bank[str(level)], begun[level]["table"][still])
            their_start = zeros_at_start(bank[str(level)], theirs["table"][still])
            same = torch.equal(start, their_start)
            need(same, f"{folder} started from another bank than {generic[0]}")
            twice = moved & trained[level]
            need(not twice.any(), f"{folder} has trained blocks of level {level} that another job "
                 "has, too: give each job a subtree of its own, and --generic=0")
            for name, rows in blocks[level].items():
                rows[moved] = theirs[name][moved]
            trained[level] |= moved
    for rows in trained.values():
        by_subtree = rows[:-1].view(config.factors[0], -1).any(1)
        missing = (~by_subtree).nonzero()[:, 0].tolist()
        need(not missing, f"no job has trained the subtrees {', '.join(map(str, missing))}")
    out.mkdir(parents=True, exist_ok=True)
    with lock(out):
        merged["model_config"] = dict(vars(config))
        merged["config"]["out_dir"] = str(out)
        sample.write_checkpoint(target, merged)
        for name in ("tokenizer.json", "retriever.npz"):
            if Path(generic[0], name).exists():
                shutil.copy(Path(generic[0], name), out)
    print(f"{target} has the blocks of {len(jobs)} jobs")


def remove(out_dir, nodes):
    """Makes blocks new, moments and counts too: zeros where a new block has them, else random."""
    need(nodes.strip(","), "no --nodes=level:node,... to remove")
    folder = Path(out_dir)
    load(folder)
    with lock(folder):
        ckpt = load(folder)
        config = Config(**ckpt["model_config"])
        need(config.sparse_memory, f"{folder} was trained with sparse_memory=False: AdamW's "
             "moments would move what is removed when training goes on")
        blocks, pairs = blocks_of(ckpt), parse_nodes(config, nodes)
        for level, node in pairs:
            need(level in blocks and node != "best", f"nodes={nodes}: {folder} has no such block")
        with torch.device("meta"):
            bank = Model(config).bank
        for level, node in pairs:
            for name, rows in blocks[level].items():
                if name == "table":
                    generator = torch.Generator().manual_seed(node)
                    bank[str(level)].init(rows[node:node + 1], generator)
                else:
                    rows[node] = 0
        sample.write_checkpoint(folder / "ckpt.pt", ckpt)
    print(f"{folder}/ckpt.pt is without {nodes}")


def resident(path):
    """Bytes of a file that this process has in memory because it has used them: the resident pages
    of the file's mappings (Linux)."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):             # a mapping begins
            ours = line.endswith(str(Path(path).resolve()))
        elif ours and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


@torch.inference_mode()
def read(out_dir, prompt, embedder_path=""):
    """Bytes of the checkpoint in memory: after loading, after the anchor alone has read the prompt,
    and after the anchor with the prompt's blocks has."""
    path = Path(out_dir, "ckpt.pt")
    load(out_dir)
    model, tokenizer, ckpt = sample.load_model(out_dir, "cpu")
    folders = [out_dir, ckpt["data"]["folder"]]
    context, line = model.prompt_context(prompt, folders, embedder_path=embedder_path)
    ids = torch.tensor([[ckpt["data"]["eot"], *tokenizer.encode(prompt)]])
    ids = ids[:, :model.config.block_size]
    found = {"file": path.stat().st_size, "bank": 4 * model.param_counts()["memory"],
             "blocks": 4 * sum(model.config.level_sizes), "loaded": resident(path)}
    model(ids, leaf=None)
    found["anchor"] = resident(path)
    model(ids, **context)
    found["prompt"] = resident(path)
    print(f"{line}\n{found['file']:15,} bytes in {path}\n{found['bank']:15,} bytes in the bank\n"
          f"{found['loaded']:15,} bytes in memory after loading\n"
          f"{found['anchor']:15,} after the anchor alone has read the prompt\n"
          f"{found['prompt']:15,} after the prompt's blocks of {found['blocks']:,} bytes")
    return found


def main(argv):
    c, commands = options(argv, globals())
    need(len(commands) == 1, "one of split, merge, remove, read; --help tells more")
    if commands[0] == "split":
        split(c.dataset)
    elif commands[0] == "merge":
        merge([job for job in c.jobs.split(",") if job], c.out_dir, c.overwrite)
    elif commands[0] == "remove":
        remove(c.out_dir, c.nodes)
    elif commands[0] == "read":
        read(c.out_dir, c.prompt, c.embedder_path)
    else:
        need(False, f"{commands[0]}: choose split, merge, remove or read")


if __name__ == "__main__":
    guard("bank.py")
    main(sys.argv[1:])
