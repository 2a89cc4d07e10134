"""
Hierarchical memories: how long a prompt waits for its blocks when the bank lies on a slower tier.

    python experiments/bank_tiers.py          # 3.8 GB in out/bank_tiers while it runs; Linux

The shape of the paper's 160M anchor (openlm_160m) with a bank of 8, 64 and 512 nodes, random
numbers in fp32. Figure 5 reckons with hardware that it imagines: 38 ms if each level lies on a tier
of its own, 198 ms if as much is fetched from an external disk, 47 ms from there if the next prompt
only needs other blocks of deeper levels. Here the tiers are those of this machine: the GPU if there
is one, host memory, and a checkpoint mapped from disk, read before (the system has it in its cache)
or not (its pages are dropped first; the bytes that came from the disk are counted). For each
placement: milliseconds to fetch every level's block for one prompt, and to the first token of the
prompt, fetching included. Beside them, the time to load the whole model. Medians over rounds with a
leaf of their own. Writes results/hiermem_bank_tiers-DEVICE.json.
"""
import gc
import os
import random
import sys
import time
from pathlib import Path
from statistics import median

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments.run import options, save_costs
from kernels import keep_freed_memory
from model_hiermem import PRESETS, Config, Model
from prepare_fineweb import guard, need
from sample import pick_device

# ------------------------------------------------------------------ settings: --key=value
clusters = "8,8,8"            # children of a node; the paper has 16,16,16
ranks = "256,64,16"           # FFN channels of the levels
preset = "openlm_160m"        # the anchor
prompt = 64                   # tokens
rounds = 7                    # prompts for each figure
out_dir = "out/bank_tiers"    # for the checkpoint, which is removed in the end
device = ""                   # cuda | cpu; empty: the accelerator if there is one
# ------------------------------------------------------------------


def disk_bytes():
    """Bytes that this process has had read from disks so far."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])


def drop(path):
    """The file leaves the system's cache; nobody may have it mapped."""
    gc.collect()
    file = os.open(path, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


class Tiers:
    """A model whose levels can be put on any tier, and the checkpoint they come from."""

    def __init__(self, config, path, device):
        self.path = path
        self.device = device
        with torch.device("meta"):
            self.model = Model(config)
        self.model.to_empty(device="cpu")
        for p in self.model.parameters():
            p.data.uniform_(-0.05, 0.05)
        torch.save(self.model.state_dict(), path)
        with open(path, "rb") as file:
            os.fsync(file.fileno())                            # or it could not leave the cache
        self.levels = list(self.model.bank.values())
        self.in_memory = [level.table.data for level in self.levels]
        self.model.eval().to(device)

    def place(self, placement):
        """placement: a tier for each level, of device, memory, warm and cold (a mapped file)."""
        for level in self.levels:
            level.table = None                                 # no longer mapped
        if "cold" in placement:
            drop(self.path)
        mapped = torch.load(self.path, mmap=True, weights_only=True)
        for l, (tier, level) in enumerate(zip(placement, self.levels)):
            table = self.in_memory[l]
            if tier == "device":
                table = table.to(self.device)
            elif tier == "warm":
                table = mapped[f"bank.{l + 1}.table"]
                table.sum()                                    # reads it
            elif tier == "cold":
                table = mapped[f"bank.{l + 1}.table"]
            level.table = nn.Parameter(table, requires_grad=False)

    def timed(self, work):
        """Milliseconds of work()."""
        start = time.perf_counter()
        work()
        if self.device != "cpu":
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start)

    def fetch(self, leaf):
        """Milliseconds to fetch each level's block of a leaf."""
        times, nodes = [], self.model.config.nodes
        for n, level in zip(nodes, self.levels):
            node = torch.tensor([leaf // (nodes[-1] // n)])
            times.append(self.timed(lambda: level(node, self.device)))
        return times

    def first_token(self, leaf, tokens):
        """Milliseconds to a prompt's first token, its blocks still to be fetched; leaf None: the
        anchor alone."""
        idx = torch.randint(self.model.config.vocab_size, (1, tokens), device=self.device)
        cache = self.model.new_cache(1, tokens)
        return self.timed(lambda: self.model(idx, cache=cache, leaf=leaf))

    def load(self):
        """Milliseconds to load the whole model that is in no cache."""
        for level in self.levels:
            level.table = None
        drop(self.path)
        return self.timed(lambda: torch.load(self.path, self.device, weights_only=True))


@torch.inference_mode()
def measure(tiers, placement, rounds, tokens):
    """-> ms of each level; bytes that these came from disk; ms of a next prompt with another leaf
    under the same parent; ms to the first token"""
    nodes = tiers.model.config.nodes
    fetches = []
    read = []
    again = []
    first = []
    leaves = random.Random(0).sample(range(0, nodes[-1], 2), rounds)
    for leaf in leaves:
        tiers.place(placement)
        before = disk_bytes()
        fetches.append(tiers.fetch(leaf))
        read.append(disk_bytes() - before)
        again.append(sum(tiers.fetch(leaf + 1)))               # its sibling
        tiers.place(placement)
        first.append(tiers.first_token(leaf, tokens))
    return {"levels_ms": list(map(median, zip(*fetches))), "ms": median(map(sum, fetches)),
            "disk_mb": median(read) / 2 ** 20, "next_ms": median(again), "token_ms": median(first)}


def placements(levels, device):
    """What is compared, {name: a tier for each level}; the file cold last."""
    above = levels - 1
    found = {"host memory": ("memory",) * levels, "file, read before": ("warm",) * levels,
             "file, its deepest level": ("memory",) * above + ("cold",),
             "file": ("cold",) * levels}
    if device != "cpu":
        middle = ("memory",) * (above - 1)
        found = {"device": ("device",) * levels,
                 "device, memory, file": ("device", *middle, "cold"), **found}
    return found


def main(argv):
    c, others = options(argv, globals())
    need(not others, f"no file or command, not {others}")
    need(min(c.prompt, c.rounds) > 0, f"prompt={c.prompt}, rounds={c.rounds}: must be 1 or more")
    need(hasattr(os, "posix_fadvise"), "files leave the system's cache on Linux only")
    need(c.preset in PRESETS, f"preset={c.preset}: choose {', '.join(PRESETS)}")
    device = pick_device(c.device)
    keep_freed_memory()
    config = Config(**{**PRESETS[c.preset], "clusters": c.clusters, "ranks": c.ranks})
    need(min(config.level_ranks) > 0, f"ranks={c.ranks}: a rank for each level")
    need(2 * c.rounds <= config.nodes[-1], f"rounds={c.rounds}: two leaves each, there are "
         f"{config.nodes[-1]}")
    need(config.factors[-1] % 2 == 0, f"clusters={c.clusters}: the last must be even, for pairs "
         "of leaves under one parent")
    path = Path(c.out_dir, "ckpt.pt")
    need(not path.exists(), f"{path} is there already: remove it, or give another --out_dir=")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        tiers = Tiers(config, path, device)
        counts = tiers.model.param_counts()
        sizes = [4 * size / 2 ** 20 for size in config.level_sizes]
        print(f"{counts['memory']:,} numbers in the bank; a prompt fetches "
              f"{' + '.join(f'{size:.1f}' for size in sizes)} MB; first token of {c.prompt}")
        heads = "".join(f"{f'level {l}':>9}" for l in range(1, len(sizes) + 1))
        print(f"{'ms, the bank in':24}{heads}{'all':>9}{'from disk':>12}{'next':>9}{'token':>9}")
        found = {}
        measure(tiers, ("memory",) * len(sizes), 1, c.prompt)                  # to warm up
        for name, placement in placements(len(sizes), device).items():
            row = measure(tiers, placement, c.rounds, c.prompt)
            found[name] = row
            shown = "".join(f"{ms:9.1f}" for ms in [*row["levels_ms"], row["ms"]])
            print(f"{name:24}{shown}{row['disk_mb']:9.1f} MB{row['next_ms']:9.1f}"
                  f"{row['token_ms']:9.1f}", flush=True)
        with torch.inference_mode():
            anchor = median(tiers.first_token(None, c.prompt) for _ in range(c.rounds))
        whole = median(tiers.load() for _ in range(3))
        print(f"the anchor's first token without memory: {anchor:.1f} ms\n"
              f"loading the whole model: {whole:,.0f} ms, {path.stat().st_size / 2 ** 20:,.0f} MB")
    finally:
        path.unlink(missing_ok=True)
    save_costs("hiermem_bank_tiers", "hiermem", device, placements=found, anchor_token_ms=anchor,
               load_ms=whole, mb=sizes, bank=counts["memory"], prompt=c.prompt, rounds=c.rounds)


if __name__ == "__main__":
    guard("bank_tiers.py")
    main(sys.argv[1:])
