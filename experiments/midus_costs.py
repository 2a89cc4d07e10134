"""MIDUS, Tables 2 and 12, Figures 4 and 5: what training and use of a model cost after each way to make it deeper.

    python experiments/midus_costs.py                          # 8 + 4 blocks x 256, sequences of 512
    python experiments/midus_costs.py --batch=4 --block_size=1024

The first phase: what is frozen there is frozen here. A step is forward and backward pass, clipping and AdamW; steps in turn, medians, as are the prompt and
the tokens after it (value caching on). "kept" is what autograd keeps for the backward pass of one step, each storage once and no weights; "held" adds
weights, gradients and AdamW's moments. The blocks of opt_deus, avg_deus and lesa are the same, and so is their cost. Weights are random: no result
depends on them but the rows of the memories that a step touches. Writes results/midus_costs-DEVICE.json.
"""
import json
import statistics
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from experiments.analysis import time_tokens
from kernels import clip_grads, tune_cpu
from model_midus import DENSE, Config, Model, upscale
from prepare_fineweb import ConfigError, configure

# ------------------------------------------------------------------------------ settings: --key=value
depth = 8                     # blocks of the base; half as many are inserted
n_embd = 256                  # width, in heads of 64
n = 64                        # row and column sub-keys of a head
batch = 2                     # sequences of a step
block_size = 512              # tokens of a sequence
prompt = 256                  # tokens
steps = 15                    # that count, after three to warm up
device = "cpu"                # cpu | cuda
_defaults = {k: v for k, v in globals().items() if not k.startswith("_") and isinstance(v, (int, str))}
# ------------------------------------------------------------------------------
METHODS = {"base": dict(method="base", inserted=0), "SOLAR": dict(method="solar"), "Llama Pro": dict(method="llama_pro"), "OpT-DeUS": dict(method="opt_deus"),
           "Linear": dict(memory="linear"), "PKM": dict(memory="pkm"), "UltraMem": dict(memory="ultramem"), "HML": dict(),
           "HML top-heavy": dict(placement="top-heavy"), "HML bottom-heavy": dict(placement="bottom-heavy")}


def step(model, optimizer, x):
    """One of training, on x (B, T + 1)."""
    with torch.autocast("cuda", torch.bfloat16, enabled=x.is_cuda):
        loss = model(x[:, :-1], x[:, 1:])[1]
    loss.backward()
    clip_grads(list(model.parameters()), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if x.is_cuda:
        torch.cuda.synchronize()


def kept_bytes(model, x):
    """Of the storages that autograd saves for the backward pass, weights left out."""
    weights, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast("cuda", torch.bfloat16, enabled=x.is_cuda):
        loss = model(x[:, :-1], x[:, 1:])[1]                   # alive, so that no address is used twice
    return sum(size for address, size in kept.items() if address not in weights)


def main(argv):
    overrides, others = configure(argv, _defaults)
    globals().update(overrides)
    if others or min(batch, steps, prompt) < 1 or prompt + 8 > block_size or n_embd % 64 or depth % 4 or device not in ("cpu", "cuda"):
        raise ConfigError(f"no file, not {others[0]}" if others else "batch, steps and prompt must be 1 or more, block_size prompt + 8 or more, "
                          "depth a multiple of 4, n_embd of 64, device cpu or cuda")
    tune_cpu()
    torch.manual_seed(0)
    with torch.device(device):
        base = Model(Config.from_depth(depth, n_embd=n_embd, n_head=n_embd // 64, n_kv_head=-1, vocab_size=4096, block_size=block_size, n=n, **DENSE))
    base.init_weights()
    x, racers, found = torch.randint(4096, (batch, block_size + 1), device=device), {}, {}
    for name, fields in METHODS.items():
        model = upscale(base, **fields, phase="cpt")
        optimizer = torch.optim.AdamW(model.param_groups("adamw", 1e-4, 1e-6), fused=True)
        kept = kept_bytes(model, x)
        step(model, optimizer, x)
        trained = [p for p in model.parameters() if p.requires_grad]
        moments = sum(t.numel() * t.element_size() for state in optimizer.state.values() for t in state.values() if t.ndim)
        weights, gradients = (sum(p.numel() * p.element_size() for p in ps) for ps in (model.parameters(), trained))
        found[name] = dict(parameters=sum(p.numel() for p in model.parameters()), trained=sum(p.numel() for p in trained), kept_mb=kept / 2 ** 20,
                           held_mb=(kept + weights + gradients + moments) / 2 ** 20)
        racers[name] = model, optimizer
    times = {name: {"step_ms": [], "prefill_ms": [], "token_ms": []} for name in racers}
    for i in range(3 + steps):
        for name, (model, optimizer) in racers.items():
            began = time.perf_counter()
            step(model.train(), optimizer, x)
            times[name]["step_ms"] += [1e3 * (time.perf_counter() - began)] * (i >= 3)
    for model, _ in racers.values():
        model.eval().cache_values()
    for i in range(3 + steps):
        for name, (model, _) in racers.items():
            first, *later = time_tokens(model, x[:1, :prompt], 8)
            times[name]["prefill_ms"] += [first] * (i >= 3)
            times[name]["token_ms"] += later * (i >= 3)
    print(f"{'':17} parameters    trained   kept MB  held MB    step ms          prompt ms        token ms")
    for name, columns in times.items():
        row = found[name]
        row |= {column: round(statistics.median(numbers), 3) for column, numbers in columns.items()}
        ratios = (f"{row[c]:8.1f} ({row[c] / found['base'][c]:4.2f})" for c in columns)
        print(f"{name:17} {row['parameters']:10,} {row['trained']:10,} {row['kept_mb']:9.1f} {row['held_mb']:8.1f} ", *ratios)
    facts = dict(device=torch.cuda.get_device_name() if device == "cuda" else "cpu", threads=torch.get_num_threads(), torch=torch.__version__,
                 **{key: globals()[key] for key in _defaults if key != "device"})
    (ROOT / f"experiments/results/midus_costs-{device}.json").write_text(json.dumps(dict(methods=found, **facts), indent=1) + "\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"error: {error}")
