"""UltraMemV2: what a training step costs as the memory grows and a token reads as many slots as before.

    python experiments/ultramem_growth.py                      # n = 512, 1,024, 2,048: up to 4.2M slots
    python experiments/ultramem_growth.py --sizes=256,512 --batch=2

With row-sparse gradients and lazy Adam (--sparse_memory=True) the 4n dot products and the Top-m_key among them should be all that grows. So two parts of the
step are timed alone, there and back, clipping and optimizer included: the scoring, from tokens to slots, and the rows, which only grow until no two tokens
read the same one. Their growth is compared with the whole step's. With dense gradients all N = n^2 rows count. One block, so that little else is in a step; a
step is forward and backward pass, clipping and the optimizers; steps in turn, medians. Writes results/ultramem_growth-DEVICE.json.
"""
import copy
import json
import statistics
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from kernels import LazyAdam, clip_grads, gather_dot, gather_sum, keep_coalesced, sort_indices, tune_cpu
from model_ultramem import Config, Model
from prepare_fineweb import ConfigError, configure

# ------------------------------------------------------------------------------ settings: --key=value
sizes = "512,1024,2048"       # n, row (and column) keys
n_embd = 256                  # width, in heads of 64
top_m = 32                    # slots a token reads
batch = 4                     # sequences of a step
block_size = 256              # tokens of a sequence
steps = 25                    # that count, after three to warm up
device = "cpu"                # cpu | cuda
_defaults = {k: v for k, v in globals().items() if not k.startswith("_") and isinstance(v, (int, str))}
# ------------------------------------------------------------------------------


def timed(parameters, optimizers, forward):
    """Milliseconds of one update by the gradients that forward() leaves."""
    began = time.perf_counter()
    forward()
    clip_grads(parameters, 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


def racers(n, x):
    """For a memory of n^2 slots on tokens x (B, T + 1) -> {"sparse" | "dense": a step; "scoring" | "rows": that part alone}, how many slots x reads.
    Each is what timed() takes."""
    found, lowered = {}, torch.autocast("cuda", torch.bfloat16, enabled=x.is_cuda)
    for name, sparse in (("dense", False), ("sparse", True)):
        torch.manual_seed(0)
        with torch.device(device):
            model = Model(Config.from_depth(1, n_embd=n_embd, n_head=n_embd // 64, vocab_size=256, block_size=block_size, n_inner=4 * n_embd, n_keys=n,
                                            top_m=top_m, sparse_memory=sparse))
        model.init_weights()
        groups = {group["kind"]: [group] for group in model.param_groups("adamw", 1e-4, 0.1)} if sparse else model.param_groups("adamw", 1e-4, 0.1)
        optimizers = [torch.optim.AdamW(groups["adamw"], fused=True), LazyAdam(groups["sparse"])] if sparse else [torch.optim.AdamW(groups, fused=True)]
        if sparse:
            for p in model.tables.parameters():
                keep_coalesced(p)

        def step(model=model):
            with lowered:
                loss = model(x[:, :-1], x[:, 1:])[1]
            loss.backward()
        found[name] = list(model.parameters()), optimizers, step
    c, memory = model.config, model.blocks[0].memory
    h = torch.randn(x[:, 1:].numel(), n_embd, device=device, requires_grad=True)
    retrieve, tables = copy.deepcopy(memory.retrieve), copy.deepcopy(model.tables[0])     # weights of their own: the steps move the model's
    with torch.no_grad(), lowered:
        scores, slots, _ = retrieve(h)
        hidden = memory.W_pre(h)
    toward, back = torch.randn_like(scores), torch.randn(len(h), c.value_dim, device=device, dtype=hidden.dtype)

    def score():
        with lowered:
            retrieve(h)[0].backward(toward)
        h.grad = None
    found["scoring"] = list(retrieve.parameters()), [torch.optim.AdamW(retrieve.parameters(), lr=1e-4, fused=True)], score
    inputs = [scores.requires_grad_(), hidden.requires_grad_()]
    for p in tables.parameters():
        keep_coalesced(p)

    def read():
        order = sort_indices(slots)
        weights = scores * gather_dot(tables.pre_table, slots, hidden, True, order)[..., None]
        gather_sum(tables.value_table, slots, weights, None, 1, True, order).backward(back)
        for t in inputs:
            t.grad = None
    found["rows"] = list(tables.parameters()), [LazyAdam(tables.parameters(), lr=1e-4)], read
    return found, len(slots.unique())


def main(argv):
    overrides, others = configure(argv, _defaults)
    globals().update(overrides)
    ns = [int(n) if n.isdigit() else 0 for n in sizes.split(",")]
    if others or min(batch, steps, block_size, *ns, len(ns) - 1) < 1 or n_embd % 64 or ns != sorted(set(ns)) or device not in ("cpu", "cuda"):
        raise ConfigError(f"no file, not {others[0]}" if others else "sizes must be two or more whole numbers that grow, as 512,1024; batch, steps and "
                          "block_size 1 or more, n_embd a multiple of 64, device cpu or cuda")
    tune_cpu()
    torch.manual_seed(0)
    x = torch.randint(256, (batch, block_size + 1), device=device)
    found, race = {}, {}
    for n in ns:
        race[n], touched = racers(n, x)
        found[n] = dict(slots=n * n, touched=touched, parameters=sum(p.numel() for p in race[n]["sparse"][0]))
    times = {}
    for names in (("sparse", "scoring", "rows"), ("dense",)):          # a dense step of 100M parameters leaves no cache as it was
        for i in range(3 + steps):
            for n, name in [(n, name) for name in names for n in ns]:
                times.setdefault((n, name), []).extend([timed(*race[n][name])] * (i >= 3))
    print(f"{'n':>5}      slots    read   parameters   dense ms  sparse ms  scoring ms  rows ms")
    for n, row in found.items():
        row |= {f"{name}_ms": round(statistics.median(times[n, name]), 3) for name in race[n]}
        print(f"{n:5} {row['slots']:10,} {row['touched']:7,} {row['parameters']:12,} {row['dense_ms']:10.1f} {row['sparse_ms']:10.1f} {row['scoring_ms']:11.1f} "
              f"{row['rows_ms']:8.1f}")
    growth = []
    for a, b in zip(ns, ns[1:]):
        more = {name: round(statistics.median(q - p for p, q in zip(times[a, name], times[b, name])), 3) for name in race[a]}    # within a round
        growth.append(dict(of=[a, b], **{f"{name}_ms": ms for name, ms in more.items()}))
        print(f"from {a} to {b}: a step takes {more['sparse']:.1f} ms more, its scoring {more['scoring']:.1f} ({more['scoring'] / more['sparse']:.0%}), "
              f"its rows {more['rows']:.1f} ({more['rows'] / more['sparse']:.0%}); dense {more['dense']:.1f}")
    facts = dict(device=torch.cuda.get_device_name() if device == "cuda" else "cpu", threads=torch.get_num_threads(), torch=torch.__version__,
                 **{key: globals()[key] for key in _defaults if key not in ("device", "sizes")})
    (ROOT / f"experiments/results/ultramem_growth-{device}.json").write_text(json.dumps(dict(sizes=found, growth=growth, **facts), indent=1) + "\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:                                # ConfigError, or Config on the sizes
        sys.exit(f"error: {error}")
