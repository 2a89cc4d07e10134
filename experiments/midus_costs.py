"""MIDUS, Tables 2 and 12, Figures 4 and 5: what training and use of a model cost after each way to
make it deeper.

    python experiments/midus_costs.py                     # 8 + 4 blocks x 256, sequences of 512
    python experiments/midus_costs.py --batch=4 --block_size=1024

The first phase: what is frozen there is frozen here. A step is forward and backward pass, clipping
and AdamW; steps in turn, medians, as are the prompt and the tokens after it (with cached values,
Appendix G.2; G.1's search for a single query is left out: the slots are the same).
"kept" is what autograd keeps for the backward pass of one step, each storage once and no weights
(but on a GPU their copies in bf16); "held" adds weights, gradients and AdamW's moments. The blocks
of opt_deus, avg_deus and lesa are the same, and so is their cost. Weights are random: no result
depends on them but the rows of the memories that a step touches. Writes
results/midus_costs-DEVICE.json.
"""
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments.run import options, save_costs
from experiments.ultramem_growth import timed
from kernels import keep_freed_memory
from model_midus import DENSE, Config, Model, upscale
from prepare_fineweb import guard, need
from sample import pick_device

# -------------------------------------------------------------------------- settings: --key=value
depth = 8                     # blocks of the base; half as many are inserted
n_embd = 256                  # width, in heads of 64
n_keys = 16                   # row and column sub-keys of a head
batch = 2                     # sequences of a step
block_size = 512              # tokens of a sequence
prompt = 256                  # tokens
steps = 15                    # that count, after three to warm up
device = "cpu"                # cpu | cuda
# --------------------------------------------------------------------------
WARMUP = 3                    # steps that do not count
NEW_TOKENS = 8
WAYS = {
    "base": dict(method="base", inserted=0),
    "SOLAR": dict(method="solar"),
    "Llama Pro": dict(method="llama_pro"),
    "OpT-DeUS": dict(method="opt_deus"),
    "Linear": dict(memory="linear"),
    "PKM": dict(memory="pkm"),
    "UltraMem": dict(memory="ultramem"),
    "HML": dict(),
    "HML top-heavy": dict(placement="top-heavy"),
    "HML bottom-heavy": dict(placement="bottom-heavy"),
}


def compute_loss(model, x):
    with torch.autocast("cuda", torch.bfloat16, enabled=x.is_cuda):
        return model(x[:, :-1], x[:, 1:])[1]


def step(model, optimizer, x):
    """One of training, on x (B, T + 1) -> milliseconds."""
    parameters = list(model.parameters())
    return timed(parameters, [optimizer], lambda: compute_loss(model, x).backward())


@torch.inference_mode()
def decode(model, idx):
    """A prompt and the tokens after it, greedily -> milliseconds of each. Making the cache with the
    heads' values is not timed."""
    cache = model.new_cache(len(idx), idx.size(1) + NEW_TOKENS)
    times = []
    for _ in range(1 + NEW_TOKENS):
        began = time.perf_counter()
        idx = model(idx, cache=cache)[0][:, -1].argmax(-1, keepdim=True)
        if idx.is_cuda:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return times


def kept_bytes(model, x):
    """Of the storages that autograd saves for the backward pass, weights left out."""
    kept = {}

    def pack(t):
        storage = t.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = compute_loss(model, x)                          # alive: no address comes twice
    for p in model.parameters():
        kept.pop(p.untyped_storage().data_ptr(), None)
    return sum(kept.values())


def total_bytes(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def count(model, optimizer, kept):
    """Numbers of parameters and megabytes, after a step."""
    trained = [p for p in model.parameters() if p.requires_grad]
    moments = [t for state in optimizer.state.values() for t in state.values() if t.ndim]
    held = kept + total_bytes(model.parameters()) + total_bytes([*trained, *moments])
    return dict(
        parameters=sum(p.numel() for p in model.parameters()),
        trained=sum(p.numel() for p in trained),
        kept_mb=kept / 2 ** 20,
        held_mb=held / 2 ** 20,
    )


def make_base():
    config = Config.from_depth(
        depth, n_embd=n_embd, n_head=n_embd // 64, n_kv_head=1, vocab_size=4096,
        block_size=block_size, n_keys=n_keys, **DENSE)
    with torch.device(device):
        base = Model(config)
    base.init_weights()
    return base


def measure():
    """{way: {column: number}}; all ways take turns."""
    torch.manual_seed(0)
    base = make_base()
    x = torch.randint(4096, (batch, block_size + 1), device=device)
    racers = {}
    found = {}
    for name, fields in WAYS.items():
        model = upscale(base, **fields, phase="cpt")
        optimizer = torch.optim.AdamW(model.param_groups("adamw", 1e-4, 1e-6), fused=True)
        kept = kept_bytes(model, x)
        step(model, optimizer, x)
        racers[name] = model, optimizer
        found[name] = count(model, optimizer, kept)
    times = {name: dict(step_ms=[], prefill_ms=[], token_ms=[]) for name in WAYS}
    for _ in range(WARMUP + steps):
        for name, (model, optimizer) in racers.items():
            times[name]["step_ms"].append(step(model.train(), optimizer, x))
    for _ in range(WARMUP + steps):
        for name, (model, _) in racers.items():
            prefill, *later = decode(model.eval(), x[:1, :prompt])
            times[name]["prefill_ms"].append(prefill)
            times[name]["token_ms"].append(statistics.median(later))
    for name, columns in times.items():
        for column, numbers in columns.items():
            found[name][column] = round(statistics.median(numbers[WARMUP:]), 3)
    return found


def main(argv):
    c, others = options(argv, globals())
    c.device = pick_device(c.device)
    globals().update(vars(c))
    need(not others, f"midus_costs.py takes no file, such as {others[:1]}")
    need(min(batch, steps, prompt) >= 1, "batch, steps and prompt must be 1 or more")
    need(prompt + NEW_TOKENS <= block_size, f"block_size must be prompt + {NEW_TOKENS} or more")
    need(depth % 4 == 0 < depth and n_embd % 64 == 0 < n_embd,
         "depth must be a multiple of 4, n_embd of 64")
    keep_freed_memory()
    found = measure()
    print(f"{'':17} parameters    trained   kept MiB held MiB    "
          "step ms          prompt ms        token ms")
    for name, row in found.items():
        ratios = [f"{row[column]:8.1f} ({row[column] / found['base'][column]:4.2f})"
                  for column in ("step_ms", "prefill_ms", "token_ms")]
        print(f"{name:17} {row['parameters']:10,} {row['trained']:10,} {row['kept_mb']:9.1f} "
              f"{row['held_mb']:8.1f} ", *ratios)
    save_costs("midus_costs", "midus", device, methods=found, settings=vars(c))


if __name__ == "__main__":
    guard("midus_costs.py")
    main(sys.argv[1:])
