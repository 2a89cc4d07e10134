"""Hierarchical memories: the time of a training step does not depend on the size of the bank, only on the blocks that a batch fetches.

    python experiments/bank_size.py                            # 10M against 1B numbers; takes 12 GB with Adam's moments

One level of memories for an anchor of 7 layers x 128, 244,608 numbers a block. A step is forward and backward pass, clipping and update of anchor and
bank, on four sequences of 256 tokens, each with a block of its own. The 4,096 blocks once with only the first 40 in use (their memory stays in the
processor's cache as much as the small bank's) and once with all of them. Steps in turn, medians. Writes results/hiermem_bank_size-DEVICE.json.
"""
import json
import statistics
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from kernels import RowAdamW, clip_grads, keep_coalesced, tune_cpu
from model_hiermem import Config, Model
from prepare_fineweb import ConfigError, configure

# ------------------------------------------------------------------------------ settings: --key=value
blocks = 4096                 # of the large bank, the generic one among them; the small one has 41
rank = 91                     # FFN channels of a block
steps = 40                    # that count, after five to warm up
device = "cpu"                # cpu | cuda
_defaults = {k: v for k, v in globals().items() if not k.startswith("_") and isinstance(v, (int, str))}
# ------------------------------------------------------------------------------


def trainer(nodes, device):
    """-> step(leaf) -> its seconds, numbers in the bank"""
    torch.manual_seed(0)
    with torch.device(device):
        model = Model(Config.from_depth(7, n_embd=128, n_head=4, vocab_size=4096, block_size=256, clusters=str(nodes), ranks=str(rank)))
    model.init_weights()
    anchor, bank = model.param_groups("adamw", 1e-3, 0.0)
    for p in bank["params"]:
        keep_coalesced(p)
    params, optimizers = list(model.parameters()), (torch.optim.AdamW(anchor["params"], fused=True), RowAdamW(bank["params"], lr=1e-3))

    def step(leaf):
        x = torch.randint(4096, (len(leaf), 257), device=device)
        began = time.perf_counter()
        model(x[:, :-1], x[:, 1:], leaf=leaf)[1].backward()
        clip_grads(params, 1.0)
        for o in optimizers:
            o.step()
            o.zero_grad()
        if x.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - began
    return step, model.param_counts()["memory"] + model.param_counts()["generic"]


def main(argv):
    overrides, others = configure(argv, _defaults)
    globals().update(overrides)
    if others or blocks < 42 or rank < 1 or steps < 1 or device not in ("cpu", "cuda"):
        raise ConfigError(f"no file, not {others[0]}" if others else "blocks must be 42 or more, rank and steps 1 or more, device cpu or cuda")
    tune_cpu()
    (small, few), (large, many) = trainer(40, device), trainer(blocks - 1, device)
    racers = {f"41 blocks, {few:,} numbers": (small, 40), f"{blocks:,} blocks, {many:,} numbers, 40 in use": (large, 40),
              f"{blocks:,} blocks, {many:,} numbers, all in use": (large, blocks - 1)}
    times = {name: [] for name in racers}
    for i in range(5 + steps):
        for name, (step, nodes) in racers.items():
            times[name] += [step(torch.randperm(nodes)[:4].to(device))] * (i >= 5)
    found = {name: round(1e3 * statistics.median(t), 2) for name, t in times.items()}
    first = next(iter(found.values()))
    for name, ms in found.items():
        print(f"{name:50} {ms:8.1f} ms a step, {ms / first:.3f}")
    facts = dict(device=torch.cuda.get_device_name() if device == "cuda" else "cpu", threads=torch.get_num_threads(), torch=torch.__version__, steps=steps)
    (ROOT / f"experiments/results/hiermem_bank_size-{device}.json").write_text(json.dumps(dict(ms_a_step=found, **facts), indent=1) + "\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"error: {error}")
