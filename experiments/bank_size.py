"""
Hierarchical memories: the time of a training step does not depend on the size of the bank, only on
the blocks that a batch fetches.

    python experiments/bank_size.py           # 10M against 1B numbers; takes 12 GB with the moments

One level of memories for an anchor of 7 layers x 128, 244,608 numbers a block. A step is forward
and backward pass, clipping and update of anchor and bank, on four sequences of 256 tokens, each
with a block of its own. The 4,096 blocks once with only the first 40 in use (their memory stays in
the processor's cache as much as the small bank's) and once with all of them. Steps in turn,
medians. Writes results/hiermem_bank_size-DEVICE.json.
"""
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments.run import options, save_costs
from experiments.ultramem_growth import timed
from kernels import RowAdamW, keep_coalesced, keep_freed_memory
from model_hiermem import Config, Model
from prepare_fineweb import guard, need
from sample import pick_device

# ------------------------------------------------------------------ settings: --key=value
blocks = 4096                 # of the large bank, the generic one among them; the small one has 41
rank = 91                     # FFN channels of a block
steps = 40                    # that count, after five to warm up
device = "cpu"                # cpu | cuda
# ------------------------------------------------------------------


class Racer:
    """A model whose bank has so many nodes; its batches take their blocks from the first in_use."""

    def __init__(self, nodes, rank, device):
        torch.manual_seed(0)
        with torch.device(device):
            self.model = Model(Config.from_depth(
                7, n_embd=128, n_head=4, vocab_size=4096, block_size=256, clusters=str(nodes),
                ranks=str(rank)))
        self.model.init_weights()
        anchor, bank = self.model.param_groups("adamw", 1e-3, 0.0)
        for p in bank["params"]:
            keep_coalesced(p)
        self.params = list(self.model.parameters())
        self.optimizers = [torch.optim.AdamW(anchor["params"], lr=1e-3, fused=True),
                           RowAdamW(bank["params"], lr=1e-3)]
        counts = self.model.param_counts()
        self.numbers = counts["memory"] + counts["generic"]

    def step(self, in_use):
        """Milliseconds of a training step."""
        device = self.params[0].device
        leaf = torch.randperm(in_use)[:4].to(device)
        idx = torch.randint(4096, (4, 257), device=device)

        def forward():
            self.model(idx[:, :-1], idx[:, 1:], leaf=leaf)[1].backward()

        return timed(self.params, self.optimizers, forward)


def main(argv):
    c, others = options(argv, globals())
    need(not others, f"no file or command, not {others}")
    need(c.blocks >= 42, f"blocks={c.blocks}: must be 42 or more")
    need(min(c.rank, c.steps) > 0, f"rank={c.rank}, steps={c.steps}: must be 1 or more")
    c.device = pick_device(c.device)
    keep_freed_memory()
    small = Racer(40, c.rank, c.device)
    large = Racer(c.blocks - 1, c.rank, c.device)
    name = f"{c.blocks:,} blocks, {large.numbers:,} numbers"
    racers = {f"41 blocks, {small.numbers:,} numbers": (small, 40),
              f"{name}, 40 in use": (large, 40),
              f"{name}, all in use": (large, c.blocks - 1)}
    times = {name: [] for name in racers}
    for _ in range(5 + c.steps):
        for name, (racer, in_use) in racers.items():
            times[name].append(racer.step(in_use))
    found = {name: round(statistics.median(t[5:]), 2) for name, t in times.items()}
    first = next(iter(found.values()))
    for name, ms in found.items():
        print(f"{name:50} {ms:8.1f} ms a step, {ms / first:.3f}")
    save_costs("hiermem_bank_size", "hiermem", c.device, ms_a_step=found, steps=c.steps)


if __name__ == "__main__":
    guard("bank_size.py")
    main(sys.argv[1:])
