"""
Train one of nanoMem's models on one GPU (or several, or a CPU). One flat script: read it from top to bottom.

    python train.py                                            # MoVE on an embedded corpus, about a minute on a laptop
    python train.py --model=move --depth=12                    # the canonical call: the paper's D12 on FineWeb-Edu
    python train.py --model=move --depth=12 --dense=True       # its baseline without the memory
    python train.py --model=move --init_from=resume            # go on where a run was killed, bit for bit on a CPU
    python train.py experiments/move_table1.py --scale=cpu     # a whole table: variants, seeds, verdicts
    torchrun --nproc_per_node=8 train.py --model=move --depth=12

The globals below are the configuration. `--key=value` overrides one; a key that is not here but is a field of the
model's Config (--memory_scale=4) goes there; --help lists all (--help --model=lime: the model's too). A positional
argument is a Python file of such assignments. Precedence: globals < the model's RECIPE < file < command line.
"""
import ctypes, datetime, importlib, json, math, os, platform, resource, subprocess, sys, time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import prepare_fineweb
from prepare_fineweb import ConfigError, TokenShards, configure, help_text, load_meta, load_token_bytes
from sample import generate, load_checkpoint

# ---------------------------------------------------------------- configuration: value on cpu | cuda where two; -1 and "" are automatic
model = "move"                  # which file: model_<name>.py; `cp model_move.py model_mine.py` makes --model=mine
preset = ""                     # a row of the model's PRESETS, such as d12_move_x1; or
depth = -1                      # 4 | 12: layers, width 64*depth
dense = False                   # the model's own baseline without memory (its DENSE)
out_dir = ""                    # out/<model>-d<depth> or out/<model>-<preset>
init_from = "scratch"           # scratch | resume (out_dir's checkpoint) | path of a checkpoint whose weights to start from
seed = 1337                     # initial values and order of the data
dataset = ""                    # folder, or a name under data/; fineweb_edu if it is there, else pydocs (built on the spot)
block_size = -1                 # 256 | 1024: tokens of context
batch_size = -1                 # 8 | 32: sequences in one forward (the micro-batch)
batch_tokens = -1               # 2048 | 131072: tokens per optimizer step, all GPUs together; accumulation follows from it
max_iters = -1                  # 200 | about 10 tokens per dense non-embedding parameter, at most 4 epochs
optimizer = ""                  # muon | adamw: the first of the model's RECIPE
learning_rate = -1.0            # RECIPE
min_lr = 0.0                    # where the schedule ends
schedule = ""                   # wsd (constant, then down linearly) | cosine: RECIPE, else cosine
warmup_iters = -1               # RECIPE, else 2% of max_iters
warmdown = 0.4                  # wsd: fraction of the run over which the rate falls
weight_decay = 0.1              # RECIPE
beta1 = 0.9                     # RECIPE
beta2 = 0.95                    # RECIPE
grad_clip = 1.0                 # norm over all gradients, dense and sparse; 0: off; RECIPE
eval_interval = -1              # steps between evaluations (each saves a checkpoint); a quarter | a twentieth of the run
eval_tokens = -1                # 32768 | 10485760: validation tokens, the same ones each time
eval_only = False               # evaluate the checkpoint of init_from and stop
log_interval = 10               # steps between lines
always_save_checkpoint = True   # at every evaluation; False: only when the validation loss is the best so far
sample_tokens = 200             # tokens of the sample at the end; 0: none
target_bpb = 0.0                # say at the end whether the run met it
target_loss = 0.0               # likewise, in nats
device = ""                     # cuda | mps | cpu
dtype = ""                      # float32 | bfloat16: autocast; parameters stay fp32
compile = -1                    # 0 | 1: torch.compile
dry_run = False                 # print parameters, FLOPs and memory, and stop
bench = False                   # time some steps on random tokens beside the dense baseline, and stop
profile = False                 # trace a few steps into out_dir/trace.json, and stop
wandb_log = False               # log to Weights & Biases (pip install wandb)
wandb_project = "nanomem"       # its project
wandb_run_name = ""             # its name; out_dir's
# ----------------------------------------------------------------
defaults = {k: v for k, v in globals().items() if not k.startswith("_") and type(v) in (int, float, bool, str)}


def fail(message):
    sys.exit(f"train.py: {message}")


def read_config(argv):
    """argv -> (config, keys that were given, the model's module, its Config fields that were given)."""
    files = [a for a in argv if not a.startswith("-")]
    source = {}
    for path in files:
        if not Path(path).is_file():
            raise ConfigError(f"no config file {path} (options are written --key=value)")
        exec(compile_source(Path(path).read_text(), path, "exec"), source)
        if "variants" in source:
            from experiments.run import main
            sys.exit(main(path, [a for a in argv if a not in files]))
    source = {k: v for k, v in source.items() if not k.startswith("_") and type(v) in (int, float, bool, str)}
    name = next((a.split("=", 1)[1] for a in reversed(argv) if a.startswith("--model=")), source.get("model", model))
    if not (root / f"model_{name}.py").is_file():
        there = ", ".join(sorted(p.stem[6:] for p in root.glob("model_*.py")))
        raise ConfigError(f"model={name}: there is no model_{name}.py here; there are {there}")
    module = importlib.import_module(f"model_{name}")
    fields = {k: f.default for k, f in module.Config.__dataclass_fields__.items()}
    if {"-h", "--help"} & set(argv):
        print(__doc__ + "\n" + help_text((root / "train.py").read_text(), defaults))
        print(f"\nfields of model_{name}.py's Config:\n" + help_text(Path(module.__file__).read_text(), fields))
        sys.exit(0)
    known = {**fields, **defaults}
    given, _ = configure([f"--{k}={v}" for k, v in source.items()] + [a for a in argv if a not in files], known)
    recipes = getattr(module, "RECIPE", {"adamw": {}})
    config = {**defaults, "optimizer": given.get("optimizer") or next(iter(recipes))}
    if config["optimizer"] not in recipes:
        raise ConfigError(f"optimizer={config['optimizer']}: model_{name}.py has recipes for {', '.join(recipes)}")
    recipe = dict(recipes[config["optimizer"]])
    config |= {"tuned_for": recipe.pop("tuned_for", 0)} | recipe | {k: v for k, v in given.items() if k in defaults and v != ""}
    return config, given, module, {k: v for k, v in given.items() if k not in defaults}


def resolve(config, given, module, overrides):
    """Fill in what is automatic; build the model's Config. Everything that a run depends on ends up in `config`."""
    c = config
    c["device"] = c["device"] or ("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")
    if c["device"].split(":")[0] not in ("cuda", "mps", "cpu"):
        raise ConfigError(f"device={c['device']}: choose cuda, mps or cpu")
    if c["device"].startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={c['device']}: this torch sees no CUDA GPU; leave the key out to run on the CPU")
    gpu = c["device"].startswith("cuda")
    auto = lambda key, cpu, cuda: c.__setitem__(key, (cuda if gpu else cpu) if c[key] in (-1, "") else c[key])
    auto("dtype", "float32", "bfloat16" if gpu and torch.cuda.is_bf16_supported(including_emulation=False) else "float32")
    auto("compile", 0, 1)
    auto("batch_size", 8, 32)
    auto("eval_tokens", 32768, 10485760)
    if c["block_size"] == -1:
        c["block_size"] = 1024 if gpu else 256
    if c["preset"] and c["depth"] != -1:
        raise ConfigError("preset and depth: give one of them")
    if c["preset"] and c["preset"] not in getattr(module, "PRESETS", {}):
        raise ConfigError(f"preset={c['preset']}: model_{c['model']}.py has {', '.join(getattr(module, 'PRESETS', {})) or 'none'}")
    auto("depth", *((-1, -1) if c["preset"] else (4, 12)))
    dense = getattr(module, "DENSE", {}) if c["dense"] else {}
    for key in dense:
        if key in overrides:
            raise ConfigError(f"dense and {key}: dense=True already sets {key}={dense[key]}")
    sizes = dict(block_size=c["block_size"]) | dense | overrides
    if c["preset"]:
        model_config = module.Config(**{**module.PRESETS[c["preset"]], **sizes})
    else:
        model_config = module.Config.from_depth(c["depth"], **sizes)
    if c["batch_tokens"] == -1:
        c["batch_tokens"] = max(131072 if gpu else 2048, c["block_size"] * world)
    rows = c["batch_tokens"] // c["block_size"]
    if c["batch_tokens"] % (c["block_size"] * world) or not rows:
        raise ConfigError(f"batch_tokens={c['batch_tokens']}: must be a multiple of block_size={c['block_size']} x {world} processes")
    while (rows // world) % c["batch_size"]:
        c["batch_size"] -= 1                                   # the largest micro-batch that divides the batch
    if c["learning_rate"] == -1:
        c["learning_rate"] = 1e-3
    elif "learning_rate" not in given and c["tuned_for"]:
        c["learning_rate"] *= (c["batch_tokens"] / c["tuned_for"]) ** 0.5
    c["schedule"] = c["schedule"] or "cosine"
    if c["schedule"] not in ("cosine", "wsd"):
        raise ConfigError(f"schedule={c['schedule']}: choose cosine or wsd")
    if c["dtype"] not in ("float32", "bfloat16"):
        raise ConfigError(f"dtype={c['dtype']}: choose float32 or bfloat16")
    for key, low in dict(log_interval=1, eval_tokens=1, sample_tokens=0, learning_rate=0, weight_decay=0, grad_clip=0, min_lr=0).items():
        if c[key] < low:
            raise ConfigError(f"{key}={c[key]}: must be at least {low}")
    for key in ("beta1", "beta2", "warmdown"):
        if not 0 <= c[key] <= 1:
            raise ConfigError(f"{key}={c[key]}: must be between 0 and 1")
    c["out_dir"] = c["out_dir"] or f"out/{c['model']}-{c['preset'] or 'd%d' % c['depth']}" + "-dense" * c["dense"]
    return model_config


def find_dataset(name):
    """--dataset, as a folder or a name under data/; the embedded corpus is built when nothing else is prepared."""
    if not name:
        name = "fineweb_edu" if (root / "data/fineweb_edu/meta.json").exists() else "pydocs"
        if name == "pydocs" and not (root / "data/pydocs/meta.json").exists():
            if master:
                prepare_fineweb.prepare(source="pydocs", out=str(root / "data/pydocs"))
            if world > 1:
                dist.barrier()
    return Path(name) if Path(name).is_dir() else root / "data" / name


def schedule_factor(step):
    """Multiplier of every scheduled learning rate for update number `step` (from 0)."""
    c, floor = config, config["min_lr"] / max(config["learning_rate"], 1e-30)
    if step < c["warmup_iters"]:
        return (step + 1) / (c["warmup_iters"] + 1)
    left = (c["max_iters"] - step) / max(1, c["max_iters"] - c["warmup_iters"])             # 1 .. 0
    if c["schedule"] == "cosine":
        return floor + (1 - floor) * 0.5 * (1 - math.cos(math.pi * left))
    return floor + (1 - floor) * min(1.0, left / max(c["warmdown"], 1e-9))


def build_optimizers(net):
    """torch's AdamW, Muon and SparseAdam over the model's groups. Rates: group["base_lr"] times the schedule."""
    c, betas = config, (config["beta1"], config["beta2"])
    kinds = {"adamw": [], "muon": [], "sparse": []}
    for group in net.param_groups(c["optimizer"], c["learning_rate"], c["weight_decay"]):
        group = dict(group, base_lr=group["lr"], base_decay=group["weight_decay"])
        kinds[group.pop("kind")].append(group)
    for group in kinds["sparse"]:
        group.pop("weight_decay")
    found = []
    if kinds["adamw"]:
        found.append(torch.optim.AdamW(kinds["adamw"], betas=betas, fused=not c["device"].startswith("mps")))
    if kinds["muon"]:
        found.append(torch.optim.Muon(kinds["muon"], momentum=0.95, nesterov=True))
    if kinds["sparse"]:
        found.append(torch.optim.SparseAdam(kinds["sparse"], betas=betas))
    return found


def newton_schulz_fp32(G, coefficients, steps, eps):
    """Muon's orthogonalisation as in torch.optim, but in fp32: without bf16 instructions a CPU is a hundred times slower in bf16."""
    a, b, c = coefficients
    X = G.T if G.size(0) > G.size(1) else G
    X = X / X.norm().clamp(min=eps)
    for _ in range(steps):
        A = X @ X.T
        X = torch.addmm(X, torch.addmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X.T if G.size(0) > G.size(1) else X


def clip_grads(params, max_norm):
    """Norm over dense and (coalesced) sparse gradients; scales them in place when it exceeds max_norm > 0."""
    grads = [p.grad._values() if p.grad.is_sparse else p.grad for p in params if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
    if max_norm > 0:
        torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def exchange_sparse(grad):
    """Mean over processes of row-sparse gradients of different lengths: gather rows and values, padded to the longest."""
    count = torch.tensor([grad._nnz()], device=grad.device)
    counts = [torch.zeros_like(count) for _ in range(world)]
    dist.all_gather(counts, count)
    longest = int(max(counts))
    parts = []
    for t in (grad._indices()[0], grad._values()):
        padded = torch.cat([t, t.new_zeros(longest - len(t), *t.shape[1:])])
        gathered = [torch.empty_like(padded) for _ in range(world)]
        dist.all_gather(gathered, padded)
        parts.append(torch.cat([g[:int(n)] for g, n in zip(gathered, counts)]))
    return torch.sparse_coo_tensor(parts[0][None], parts[1] / world, grad.shape, check_invariants=False).coalesce()


def step_rows(step):
    """The windows of this process for update `step`: a pure function of (seed, global row), whatever the batch split."""
    rows = config["batch_tokens"] // config["block_size"]
    mine = np.arange(rank * rows // world, (rank + 1) * rows // world) + step * rows
    epochs = mine // train_data.n_windows
    for epoch in set(epochs.tolist()) - permutations.keys():
        permutations[epoch] = np.random.default_rng([config["seed"], epoch]).permutation(train_data.n_windows)
    for epoch in [e for e in permutations if e < epochs[0]]:
        del permutations[epoch]
    return np.array([permutations[e][r % train_data.n_windows] for e, r in zip(epochs.tolist(), mine.tolist())])


def to_device(*tensors):
    if config["device"].startswith("cuda"):
        return [t.pin_memory().to(config["device"], non_blocking=True) for t in tensors]
    return [t.to(config["device"]) for t in tensors]


def forward_backward(net, x, y):
    """One optimizer step's gradients: micro-batches of batch_size sequences, each weighted by its share of the targets, so
    that the gradient is that of the mean over the whole batch. Returns the loss as a tensor."""
    targets = (y >= 0).sum().float()
    if world > 1:
        targets = targets.to(config["device"])
        dist.all_reduce(targets)
        targets = targets.cpu()
    total = 0.0
    micro = list(zip(x.split(config["batch_size"]), y.split(config["batch_size"])))
    for i, (xs, ys) in enumerate(micro):
        share = float((ys >= 0).sum() / targets)
        if world > 1:
            net.require_backward_grad_sync = i == len(micro) - 1
        xs, ys = to_device(xs, ys)
        with autocast:
            loss = net(xs, ys)[1] * share
        (loss * world).backward()                              # DDP takes the mean over processes
        total = total + loss.detach()
    return total


@torch.no_grad()
def evaluate(net):
    """(validation loss in nats, bits per byte or None) over the first eval_tokens; tokens without bytes are left out."""
    net.eval()
    n = min(max(1, config["eval_tokens"] // config["block_size"]), val_data.n_windows)
    sums = torch.zeros(3, dtype=torch.float64)                 # nats, targets, bytes
    for start in range(rank * config["batch_size"], n, config["batch_size"] * world):
        x, y = val_data.batch(np.arange(start, min(n, start + config["batch_size"])))
        size = torch.zeros(1)
        if token_bytes is not None:
            lengths = token_bytes[y.clamp(min=0)]
            y = y.masked_fill(lengths == 0, -1)
            size = lengths[y >= 0].sum()
        count = (y >= 0).sum()
        x, y = to_device(x, y)
        with autocast:
            loss = net(x, y)[1]
        sums += torch.tensor([loss.item() * count, count, size], dtype=torch.float64)
    if world > 1:
        sums = sums.to(config["device"]) if config["device"].startswith("cuda") else sums
        dist.all_reduce(sums)
    net.train()
    nats, count, size = sums.tolist()
    return nats / max(count, 1), nats / math.log(2) / size if size else None


def save_checkpoint(path):
    """Temporary file, fsync, rename: whatever is killed when, `path` is a whole checkpoint, the old one or the new one."""
    state = {"format": "nanomem-1", "model": raw.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "step": step,
             "rng": torch.get_rng_state(), "config": config, "model_config": dict(vars(raw.config)), "train": progress,
             "data": {**meta, "folder": str(folder)}}
    with open(f"{path}.tmp", "wb") as f:
        torch.save(state, f)
        f.flush()
        os.fsync(f.fileno())
    os.replace(f"{path}.tmp", path)


def log_line(**values):
    with open(out / "log.jsonl", "a") as f:
        f.write(json.dumps(values) + "\n")
    if wandb is not None:
        wandb.log({k: v for k, v in values.items() if v is not None}, step=values["step"])


def show(text, live=False):
    """One line of at most 79 columns; on a terminal a live line is overwritten by the next."""
    if master:
        tty = sys.stdout.isatty()
        print(("\r\033[K" if tty else "") + text[:79], end="" if live and tty else "\n", flush=True)


def clock(seconds):
    m, s = divmod(int(seconds), 60)
    return f"{m // 60}h{m % 60:02d}m" if m >= 60 else f"{m}m{s:02d}s"


def peak_memory():
    """Peak bytes: the GPU allocator's, or the process's resident set."""
    if config["device"].startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def peak_flops():
    """Dense bf16 FLOP/s by the vendors' data sheets; None for a device that is not listed."""
    name = torch.cuda.get_device_name() if config["device"].startswith("cuda") else ""
    return next((f for key, f in {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40": 181e12, "4090": 165e12}.items() if key in name), None)


def plot_losses(path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    lines = [json.loads(line) for line in open(out / "log.jsonl")]
    train = [(l["step"], l["loss"]) for l in lines if "loss" in l]
    val = [(l["step"], l["val_loss"]) for l in lines if "val_loss" in l]
    plt.figure(figsize=(7, 4))
    plt.plot(*zip(*train), color="tab:blue", alpha=0.6, lw=1, label="train")
    plt.plot(*zip(*val), "o-", color="tab:red", label=f"validation: {val[-1][1]:.3f} nats" + (f", {progress['val_bpb']:.3f} bits/byte" if progress["val_bpb"] else ""))
    plt.xlabel("step")
    plt.ylabel("cross-entropy (nats per token)")
    plt.title(f"model_{config['model']}.py on {Path(folder).name}")
    plt.legend()
    plt.tight_layout()
    plt.savefig(path, dpi=100)
    plt.close()
