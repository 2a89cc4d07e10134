"""
Train one of nanoMem's models on one GPU (or several, or a CPU). One flat script: read it from top to bottom.

    python train.py                                            # MoVE on an embedded corpus, a minute or two on a laptop
    python train.py --model=move --depth=12                    # the canonical call: the paper's D12
    python train.py --model=move --depth=12 --dense=True       # its baseline without the memory
    python train.py --model=move --init_from=resume            # go on where a run was stopped, bit for bit on a CPU
    python train.py experiments/move_table1.py --scale=cpu     # a whole table: variants, seeds, verdicts
    torchrun --nproc_per_node=8 train.py --model=move --depth=12

The globals below are the configuration. `--key=value` overrides one; a key that is not here but is a field of the
model's Config (--memory_scale=4) goes there; --help lists all (--help --model=lime: that model's too). A positional
argument is a Python file of such assignments. Precedence: globals < the model's RECIPE < file < command line.
"""
import datetime, importlib, json, math, os, platform, signal, sys, time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import prepare_fineweb
from kernels import LazyAdam, RowAdamW, average_sparse, clip_grads, keep_coalesced, peak_memory, tune_cpu, usage
from prepare_fineweb import ConfigError, TokenShards, configure, find_dataset, help_text, load_meta, load_token_bytes, need
from sample import generate, load_checkpoint, write_checkpoint

# ---------------------------------------------------------------- configuration: value on cpu | cuda where two; -1 and "" are automatic
model = "move"                  # which file: model_<name>.py; `cp model_move.py model_mine.py` makes --model=mine
preset = ""                     # a row of the model's PRESETS, such as d12_move_x1; or
depth = -1                      # 4 | 12: layers, width 64*depth
dense = False                   # the model's own baseline without memory (its DENSE)
out_dir = ""                    # out/<model>-d<depth> or out/<model>-<preset>
init_from = "scratch"           # scratch | resume (out_dir's checkpoint) | path of a checkpoint, or what else the model can start from
seed = 1337                     # initial values and order of the data
dataset = ""                    # folder, or a name under data/; fineweb_edu if it is there, else pydocs (built on the spot)
block_size = -1                 # the data folder's, where a document is a window; 256 | 1024: tokens of context
batch_size = -1                 # 8 | 32: sequences in one forward (the micro-batch)
batch_tokens = -1               # 1024 | 131072: tokens per optimizer step, all GPUs together; accumulation follows from it
skip_steps = 0                  # batches to pass over first: those that an earlier phase on the same data has seen
max_iters = -1                  # 128 | about 10 tokens per dense parameter, at most 4 epochs
optimizer = ""                  # muon | adamw: the first of the model's RECIPE; muon works for every model, though most have no recipe for it:
muon_lr = 0.02                  # then the Linear layers but the head go to Muon at this rate, and the rest is as in the recipe for adamw
learning_rate = -1.0            # RECIPE
min_lr = 0.0                    # where the schedule ends
schedule = ""                   # wsd (constant, then down linearly) | cosine: RECIPE, else cosine
warmup_iters = -1               # RECIPE, else the fraction warmup of max_iters
warmup = 0.02                   # fraction of the run over which the rate rises; RECIPE
warmdown = 0.4                  # wsd: fraction of the run over which the rate falls
weight_decay = 0.1              # RECIPE
beta1 = 0.9                     # RECIPE
beta2 = 0.95                    # RECIPE
grad_clip = 1.0                 # norm over all gradients, dense and sparse; 0: off; RECIPE
eval_interval = -1              # steps between evaluations (each saves a checkpoint); a quarter | a twentieth of the run
eval_tokens = -1                # 16384 | 10485760: validation tokens, the same ones each time
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
bench = False                   # time some steps (of the dataset, else random tokens) beside the dense baseline, and stop
profile = False                 # trace a few steps into out_dir/trace.json, and stop
wandb_log = False               # log to Weights & Biases (pip install wandb)
wandb_project = "nanomem"       # its project
wandb_run_name = ""             # its name; out_dir's
# ----------------------------------------------------------------
defaults = {k: v for k, v in globals().items() if not k.startswith("_") and type(v) in (int, float, bool, str)}
root = Path(__file__).resolve().parent
world, rank, local_rank = (int(os.environ.get(k, v)) for k, v in (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0)))
master = rank == 0


def build_model_config(c, module, overrides):
    """The model's Config from a preset or the depth dial, DENSE and the fields that were given."""
    dense, presets = getattr(module, "DENSE", {}) if c["dense"] else {}, getattr(module, "PRESETS", {})
    for key in dense.keys() & overrides.keys():
        raise ConfigError(f"dense and {key}: dense=True sets {key}={dense[key]}; give one of them")
    fields = {"block_size": c["block_size"], **dense, **overrides}
    if not c["preset"]:
        return module.Config.from_depth(c["depth"], **fields)
    need(c["preset"] in presets, f"preset={c['preset']}: model_{c['model']}.py has {', '.join(presets) or 'none'}")
    return module.Config(**{**presets[c["preset"]], **fields})



def data_fields(meta, module):
    """What a data folder's meta.json says of the model: fields of its Config, such as the tree of clusters."""
    return {k: meta[k] for k in meta.keys() & module.Config.__dataclass_fields__.keys() - {"vocab_size", "block_size"}}



def load_start(config, given, overrides, module):
    """The checkpoint that init_from names, or None. Its model, and on resume its whole config, win over the defaults; on a start the context may
    change. A model file with start(path, its checkpoint or None, fields) makes another model of it: {"model_config", "model"}."""
    resume, source, out = config["init_from"] == "resume", Path(config["init_from"]).resolve(), Path(config["out_dir"]).resolve()
    if config["init_from"] == "scratch":
        return None
    need(resume or out not in (source, source.parent), f"out_dir={config['out_dir']} is where init_from's checkpoint lies: give another --out_dir")
    own = not resume and hasattr(module, "start")
    ckpt = None if own and source.is_dir() and not (source / "ckpt.pt").exists() else load_checkpoint(config["out_dir"] if resume else config["init_from"])
    if own:
        known = data_fields(load_meta(find_dataset(config["dataset"])), module)
        ckpt = module.start(config["init_from"], ckpt, {**known, **overrides, **{k: given[k] for k in ("block_size",) if k in given}})
        config["block_size"] = ckpt["model_config"]["block_size"]
        return ckpt
    fixed = {"model", "preset", "depth", "dense", *overrides} | ({"block_size", "seed", "batch_tokens", "optimizer"} if resume else set())
    saved = {**ckpt["config"], **ckpt["model_config"]}
    for key in [k for k in given if k in fixed and given[k] not in (-1, "", saved.get(k))]:
        raise ConfigError(f"{key}={given[key]}: the checkpoint has {key}={saved.get(key)}; leave {key} out, or start from scratch")
    if not resume:                                             # tasks have rows of their own length
        window = load_meta(find_dataset(config["dataset"])).get("block_size", -1) if config["dataset"] else -1
        saved["block_size"] = next(n for n in (given.get("block_size", -1), window, saved["block_size"]) if n != -1)
        ckpt["model_config"]["block_size"] = saved["block_size"]
    keep = saved if resume else {k: saved[k] for k in ("model", "preset", "depth", "dense", "block_size")}
    config |= {k: v for k, v in keep.items() if k in config and k not in given and k not in ("out_dir", "init_from", "device")}
    return ckpt



def plot_losses(log, png, title):
    """The loss curves of a log.jsonl that train.py wrote, as a picture."""
    from matplotlib.figure import Figure
    rows = [json.loads(line) for line in Path(log).read_text().splitlines()]
    figure = Figure(figsize=(7, 4), layout="tight")
    axes = figure.subplots()
    train, val = [r for r in rows if "loss" in r], [r for r in rows if "val_loss" in r]
    axes.plot([r["step"] for r in train], [r["loss"] for r in train], color="tab:blue", alpha=0.6, lw=1, label="training batches")
    end = f": {val[-1]['val_loss']:.3f} nats" + (f", {val[-1]['val_bpb']:.3f} bits per byte" if val[-1]["val_bpb"] else "") if val else ""
    axes.plot([r["step"] for r in val], [r["val_loss"] for r in val], "o-", color="tab:red", label=f"validation{end}")
    axes.set(xlabel="step", ylabel="cross-entropy (nats per token)", title=title)
    axes.legend()
    figure.savefig(png, dpi=100)



def read_config(argv):
    """argv -> (config, the keys that were given, the model's module, the fields of its Config that were given)."""
    files, source = [a for a in argv if not a.startswith("-")], {}
    for path in files:
        need(Path(path).is_file(), f"no config file {path} (options are written --key=value)")
        source["__file__"] = path
        exec(Path(path).read_text(), source)
        if "variants" in source:
            from experiments.run import main
            sys.exit(main(path, [a for a in argv if a not in files]))
    source = {k: v for k, v in source.items() if not k.startswith("_") and type(v) in (int, float, bool, str)}
    name = next((a.split("=", 1)[1] for a in reversed(argv) if a.startswith("--model=")), source.get("model", model))
    there = sorted(p.stem[6:] for p in root.glob("model_*.py"))
    need(name in there, f"model={name}: no model_{name}.py here; there are {', '.join(there)}")
    module = importlib.import_module(f"model_{name}")
    fields = {k: f.default for k, f in module.Config.__dataclass_fields__.items()}
    if {"-h", "--help"} & set(argv):
        print(__doc__ + "\n" + help_text((root / "train.py").read_text(), defaults))
        print(f"\nfields of model_{name}.py's Config:\n" + help_text(Path(module.__file__).read_text(), fields))
        sys.exit(0)
    given, _ = configure([f"--{k}={v}" for k, v in source.items()] + [a for a in argv if a not in files], {**fields, **defaults})
    recipes = getattr(module, "RECIPE", {"adamw": {}})
    chosen = given.get("optimizer") or next(iter(recipes))
    need(chosen in (*recipes, "muon"), f"optimizer={chosen}: model_{name}.py has recipes for {', '.join(recipes)}, and muon works for all")
    config = {**defaults, **recipes.get(chosen, recipes.get("adamw", {})), **{k: v for k, v in given.items() if k in defaults}, "model": name, "optimizer": chosen}
    return config, given, module, {k: v for k, v in given.items() if k not in defaults}


def locate(c):
    """Where the run computes and where it writes: device, depth and out_dir of the config c, in place."""
    c["device"] = c["device"] or ("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")
    kind = c["device"].split(":")[0]
    need(kind in ("cuda", "mps", "cpu"), f"device={c['device']}: choose cuda, mps or cpu")
    need(kind != "cuda" or torch.cuda.is_available(), f"device={c['device']}: this torch sees no CUDA GPU; leave the key out to run on the CPU")
    need(not c["preset"] or c["depth"] == -1, "preset and depth: give one of them")
    c["depth"] = (12 if kind == "cuda" else 4) if not c["preset"] and c["depth"] == -1 else c["depth"]
    c["out_dir"] = c["out_dir"] or f"out/{c['model']}-{c['preset'] or 'd%d' % c['depth']}" + "-dense" * c["dense"]


def resolve(c, meta):
    """Fill in what else is automatic in the config c, in place, and check it."""
    gpu, window = c["device"].startswith("cuda"), meta.get("block_size")
    bf16 = gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    for key, cpu, cuda in (("dtype", "float32", "bfloat16" if bf16 else "float32"), ("compile", 0, 1), ("block_size", window or 256, window or 1024),
                           ("batch_size", 8, 32), ("eval_tokens", 16384, 10485760), ("schedule", "cosine", "cosine"), ("learning_rate", 1e-3, 1e-3)):
        if c[key] in (-1, ""):
            c[key] = cuda if gpu else cpu
    for key, low, high in (("block_size", 1, 1e9), ("batch_size", 1, 1e9), ("log_interval", 1, 1e9), ("eval_tokens", 1, 1e18), ("sample_tokens", 0, 1e9),
                           ("skip_steps", 0, 1e9), ("eval_interval", -1, 1e9), ("warmup_iters", -1, 1e9), ("min_lr", 0, 1e9), ("max_iters", -1, 1e9),
                           ("weight_decay", 0, 1e9), ("grad_clip", 0, 1e9), ("beta1", 0, 1), ("beta2", 0, 1), ("warmup", 0, 1), ("warmdown", 0, 1)):
        need(low <= c[key] <= high, f"{key}={c[key]}: must be " + (f"at least {low}" if high > 1 else "between 0 and 1"))
    for key, choices in dict(dtype=("float32", "bfloat16"), schedule=("cosine", "wsd")).items():
        need(c[key] in choices, f"{key}={c[key]}: choose {' or '.join(choices)}")
    if c["batch_tokens"] == -1:                                                          # about so many: whole micro-batches
        rows = max(1, (131072 if gpu else 1024) // (c["block_size"] * world))
        c["batch_tokens"] = (rows - rows % min(rows, c["batch_size"])) * c["block_size"] * world
    rows, rest = divmod(c["batch_tokens"], c["block_size"] * world)                      # rows of one process
    need(rows > 0 and not rest, f"batch_tokens={c['batch_tokens']}: must be a multiple of block_size={c['block_size']}" + f" x {world} processes" * (world > 1))
    c["batch_size"] = max(b for b in range(1, min(c["batch_size"], rows) + 1) if rows % b == 0)   # the micro-batch divides the batch


# ---------------------------------------------------------------- set-up: config, data, model, optimizers
try:
    config, given, module, overrides = read_config(sys.argv[1:])
    locate(config)
    torch.manual_seed(config["seed"])                          # for blocks that load_start() adds to a model; below for the rest
    ckpt, resume = load_start(config, given, overrides, module), config["init_from"] == "resume"
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if config["device"].startswith("cuda") else "gloo")
    idle = config["dry_run"] or config["bench"] and not config["dataset"]
    folder = None if idle and not config["dataset"] else find_dataset(config["dataset"])
    config["dataset"] = str(folder or "")
    meta = load_meta(folder) if folder else {"vocab_size": 50257}                        # shapes and times need no text
    resolve(config, meta)
    overrides.setdefault("vocab_size", meta["vocab_size"])
    model_config = module.Config(**ckpt["model_config"]) if ckpt else build_model_config(config, module, {**data_fields(meta, module), **overrides})
    need(world == 1 or {*getattr(model_config, "places", ())} <= {"device"}, "placement: torchrun trains no bank that is off the device; "
         "train its subtrees as jobs of their own, --frozen=True --subtree=0, 1, ..., generic, and merge them with model_hiermem.py")
    need(model_config.vocab_size >= meta["vocab_size"] or not folder, f"vocab_size={model_config.vocab_size}: {folder} needs {meta['vocab_size']}")
    need(not resume or ckpt["data"]["data_id"] == meta["data_id"], f"{folder} holds other text than the checkpoint was trained on (data_id in its meta.json)")
    task_tokenizer = prepare_fineweb.get_tokenizer(str(folder)) if "task" in meta and not idle else None
    if not idle:
        train_data, val_data = (TokenShards(folder, split, config["block_size"]) for split in ("train", "val"))
        for data in (train_data, val_data) if hasattr(model_config, "wanted") else ():   # a model may train on a part of the data
            data.keep(model_config.wanted(data.context(np.arange(data.n_windows))))
except (ConfigError, ValueError, OSError) as error:
    sys.exit(f"train.py: {error}")

gpu, out, rows = config["device"].startswith("cuda"), Path(config["out_dir"]), config["batch_tokens"] // config["block_size"]
if gpu:
    torch.cuda.set_device(local_rank)
    torch.backends.cuda.matmul.allow_tf32 = True
else:
    tune_cpu()
torch.manual_seed(config["seed"])
autocast = torch.autocast(config["device"].split(":")[0], torch.bfloat16) if config["dtype"] == "bfloat16" else nullcontext()

foreign = config["optimizer"] == "muon" and "muon" not in getattr(module, "RECIPE", {})            # Muon for a model whose groups are AdamW's


def build(model_config):
    with torch.device("meta"):                                 # no memory and no time yet
        net = module.Model(model_config)
    if not config["dry_run"]:
        net.to_empty(device=config["device"])
        net.init_weights()
    return net


def build_optimizers(net):
    """torch's AdamW and Muon, and LazyAdam and RowAdamW for row-sparse tables, over the model's groups. A group's rate is base_lr times the schedule."""
    betas, kinds = (config["beta1"], config["beta2"]), {"adamw": [], "muon": [], "sparse": [], "rows": []}
    groups = net.param_groups("adamw" if foreign else config["optimizer"], config["learning_rate"], config["weight_decay"])
    matrices = {m.weight for name, m in net.named_modules() if isinstance(m, torch.nn.Linear) and name != "head"} if foreign else ()
    for group in [group for group in groups if group["kind"] == "adamw" and group["schedule"] and foreign]:
        groups.append(dict(group, params=[p for p in group["params"] if p in matrices], kind="muon", lr=config["muon_lr"]))
        group["params"] = [p for p in group["params"] if p not in matrices]
    for group in [group for group in groups if group["params"]]:
        kinds[group["kind"]].append(dict(group, base_lr=group["lr"], base_decay=group["weight_decay"]))
    for p in [p for group in kinds["sparse"] + kinds["rows"] for p in group["params"]]:
        keep_coalesced(p)
    makers = {"adamw": lambda groups: torch.optim.AdamW(groups, betas=betas, fused=config["device"] != "mps"),
              "muon": lambda groups: torch.optim.Muon(groups, momentum=0.95, nesterov=True),
              "sparse": lambda groups: LazyAdam(groups, betas=betas), "rows": lambda groups: RowAdamW(groups, betas=betas)}
    return [makers[kind](groups) for kind, groups in kinds.items() if groups]


raw = net = build(model_config)
wants_context = hasattr(raw, "training_context")               # whether forward() takes what the data knows besides tokens, such as leaf ids
counts = raw.param_counts() if hasattr(raw, "param_counts") else {"total": sum(p.numel() for p in raw.parameters())}
flops = raw.flops_per_token() if hasattr(raw, "flops_per_token") else 6 * counts["total"]
if config["max_iters"] == -1:
    config["max_iters"] = int(min(10 * flops / 6, 4 * train_data.n_tokens) // config["batch_tokens"]) if gpu and not idle else 128
if config["warmup_iters"] == -1:
    config["warmup_iters"] = round(config["warmup"] * config["max_iters"])
if config["eval_interval"] < 1:
    config["eval_interval"] = max(1, config["max_iters"] // (20 if gpu else 4))
if master:
    rates = f"{config['learning_rate']:g}" + f", {config['muon_lr']:g} for the matrices" * foreign
    print(f"{model_config}\nparameters: {', '.join(f'{v:,} {k}' for k, v in counts.items())}; {flops / 1e6:,.1f} MFLOP a token, forward and backward\n"
          f"{config['batch_tokens']:,} tokens a step = {rows} x {config['block_size']}, {config['batch_size']} sequences at once; {config['max_iters']} steps\n"
          f"{config['optimizer']}, learning rate {rates}, {config['schedule']}; {config['device']}, {config['dtype']}, data {folder}")
if config["dry_run"]:
    for name, p in raw.named_parameters():
        print(f"{str(tuple(p.shape)):>24} {p.numel():>15,}  {name}")
    print(f"about {16 * counts['total'] / 2 ** 30:.2f} GiB for parameters, gradients and Adam's moments, and the activations on top")
    sys.exit(0)

optimizers, wandb, step = build_optimizers(raw), None, 0
progress = {"val_loss": None, "val_bpb": None, "best": math.inf, "train_seconds": 0.0}
if ckpt:
    raw.load_state_dict((raw.state_dict() if not resume and hasattr(module, "start") else {}) | ckpt["model"])   # what its start() left out is new
if resume:
    for o, state in zip(optimizers, ckpt["optimizers"]):
        o.load_state_dict(state)
    torch.set_rng_state(ckpt["rng"])
    step, progress = ckpt["step"], ckpt["train"]
if config["compile"]:
    net = torch.compile(net)
if world > 1:
    from torch.nn.parallel import DistributedDataParallel as DDP
    sparse = {p for o in optimizers if isinstance(o, LazyAdam) for g in o.param_groups for p in g["params"]}
    DDP._set_params_and_buffers_to_ignore_for_model(net, [n for n, p in raw.named_parameters() if p in sparse])   # average_sparse's part
    if any(p.requires_grad and p not in sparse for p in raw.parameters()):               # with a frozen anchor there is nothing left for it
        net = DDP(net, device_ids=[local_rank] if gpu else None, find_unused_parameters=getattr(raw, "unused_parameters", False))


# ---------------------------------------------------------------- one step
def fetch(step):
    """This process's part of the batch of update `step`: a pure function of (seed, global row), whatever the split. -> x, y, context"""
    first = (config["skip_steps"] + step) * rows
    mine = range(first + rank * rows // world, first + (rank + 1) * rows // world)
    windows = train_data.shuffled(config["seed"], mine)
    context = raw.training_context(train_data.context(windows), config["seed"], mine) if wants_context else {}
    if hasattr(raw, "prefetch"):
        raw.prefetch(context)
    return *train_data.batch(windows), context


def on_device(context):
    return {k: v.to(config["device"]) for k, v in context.items()}


def forward_backward(net, x, y, context):
    """One optimizer step's gradients: micro-batches of batch_size sequences, each weighted by its share of the targets, so
    that the gradient is that of the mean over the whole batch. Returns the batch's loss as a tensor."""
    targets = (y >= 0).sum().clamp(min=1).float()
    if world > 1:
        targets = targets.to(config["device"])
        dist.all_reduce(targets)
    size = config["batch_size"]
    total, micro = 0.0, [(x[i:i + size], y[i:i + size], {k: v[i:i + size] for k, v in context.items()}) for i in range(0, len(x), size)]
    for i, (x, y, context) in enumerate(micro):
        if world > 1:
            net.require_backward_grad_sync = i == len(micro) - 1
        share = float((y >= 0).sum()) / float(targets)
        with autocast:
            loss = net(x.to(config["device"]), y.to(config["device"]), **on_device(context))[1] * share
        (loss * world).backward()                              # DDP takes the mean over processes
        total = total + loss.detach()
    if world > 1:
        dist.all_reduce(total)
    return total


def schedule_factor(step):
    """Multiplier of every scheduled learning rate for update number `step`, from 0."""
    floor, left = config["min_lr"] / max(config["learning_rate"], 1e-30), 1 - step / config["max_iters"]
    if step < config["warmup_iters"]:
        return (step + 1) / (config["warmup_iters"] + 1)
    if config["schedule"] == "wsd":
        return floor + (1 - floor) * min(1.0, left / max(config["warmdown"], 1e-9))
    return floor + (1 - floor) * 0.5 * (1 - math.cos(math.pi * left * config["max_iters"] / max(1, config["max_iters"] - config["warmup_iters"])))


def train_step(net, params, optimizers, x, y, context, step, want_norm=False):
    """One update from the batch (x, y, context). Returns the loss and, if wanted or clipped, the gradient norm, as tensors."""
    loss = forward_backward(net, x, y, context)
    for p in [p for p in params if world > 1 and p.grad is not None and p.grad.is_sparse]:
        p.grad = average_sparse(p.grad)
    norm = clip_grads(params, config["grad_clip"]) if want_norm or config["grad_clip"] else None
    factor = schedule_factor(step)
    for o in optimizers:
        for group in o.param_groups:
            boost, until = group.get("boost", (1.0, 1.0))          # UltraMem's values: so many times the rate at first, 1 from this fraction on
            group["lr"] = group["base_lr"] * (factor if group["schedule"] else 1.0) * (1 + (boost - 1) * max(0.0, 1 - step / (config["max_iters"] * until)))
            if isinstance(o, torch.optim.Muon):                # nanochat's: momentum 0.85 -> 0.95, weight decay -> 0
                group["momentum"] = 0.85 + 0.1 * min(1.0, step / max(1, min(300, config["max_iters"] // 10)))
                group["weight_decay"] = group["base_decay"] * (1 - step / config["max_iters"])
        o.step()
        o.zero_grad(set_to_none=True)
    if gpu:
        torch.cuda.synchronize()
    return loss, norm


@torch.no_grad()
def evaluate():
    """val_loss (nats) and val_bpb (or None) over the first eval_tokens of the validation split, tokens without bytes left out; a task's accuracy."""
    net.eval()
    n = min(max(1, config["eval_tokens"] // config["block_size"]), val_data.n_windows)
    sums = torch.zeros(3, dtype=torch.float64)                 # nats, targets, bytes
    for start in range(rank * config["batch_size"], n, config["batch_size"] * world):
        windows = np.arange(start, min(n, start + config["batch_size"]))
        x, y = val_data.batch(windows)
        if token_bytes is not None:
            lengths = token_bytes[y.clamp(min=0)] * (y >= 0)
            y, sums[2] = y.masked_fill(lengths == 0, -1), sums[2] + lengths.sum()
        with autocast:
            loss = net(x.to(config["device"]), y.to(config["device"]), **on_device(val_data.context(windows) if wants_context else {}))[1].item()
        sums[0], sums[1] = sums[0] + loss * (y >= 0).sum(), sums[1] + (y >= 0).sum()
    if world > 1:
        sums = sums.to(config["device"])
        dist.all_reduce(sums)
    nats, count, size = sums.tolist()
    values = {"val_loss": nats / max(count, 1), "val_bpb": nats / math.log(2) / size if size else None}
    if "task" in meta and master:
        from experiments.tasks import accuracy
        with autocast:
            values |= accuracy(raw, val_data, task_tokenizer)
    net.train()
    return values


if config["bench"]:                                            # the model and its dense baseline, step by step in turn
    zipf = 1.0 / np.arange(1, model_config.vocab_size + 1)     # Zipf's law: roughly the token frequencies of text
    racers, draw = {"model": (net, raw, optimizers)}, np.random.default_rng(config["seed"])
    if any(getattr(model_config, k) != v for k, v in getattr(module, "DENSE", {}).items()):
        base = build(module.Config(**{**vars(model_config), **module.DENSE}))
        racers["dense"] = (torch.compile(base) if config["compile"] else base, base, build_optimizers(base))
    times = {name: [] for name in racers}
    for i in range(15):                                        # three to warm up, twelve that count
        if folder:
            x, y, context = fetch(i)
        else:
            batch = torch.from_numpy(draw.choice(len(zipf), size=(rows, config["block_size"] + 1), p=zipf / zipf.sum()))
            x, y, context = batch[:, :-1], batch[:, 1:], {}
        for name, (racer, base, its_optimizers) in racers.items():
            start = time.perf_counter()
            train_step(racer, list(base.parameters()), its_optimizers, x, y, context, min(i, config["max_iters"] - 1))
            times[name] += [time.perf_counter() - start] * (i >= 3)
    for name, seconds in ((name, float(np.median(t))) for name, t in times.items()):
        pace, ratio = config["batch_tokens"] / seconds, seconds / float(np.median(times.get("dense", times["model"])))
        print(f"{name:5} {1e3 * seconds:8.1f} ms a step, {pace:,.0f} tok/s, {ratio:.3f} of dense,{usage(racers[name][1].flops_per_token() * pace / world)}")
    print(f"medians of 12 steps in turn; peak memory is of both; torch {torch.__version__}, {torch.get_num_threads()} threads")
    sys.exit(0)


# ---------------------------------------------------------------- what a run leaves behind
def check_losses():
    """Stop, with step and rows named, if one of the losses since the last look is not a number."""
    for n, loss in recent:
        if not math.isfinite(loss):
            last = f"; {out}/ckpt.pt holds the last good state" if (out / "ckpt.pt").exists() else ""
            first = (config["skip_steps"] + n - 1) * rows
            sys.exit(f"train.py: the loss is {float(loss)} at step {n}, rows {first} to {first + rows - 1} of the data order; "
                     f"try a learning_rate below {config['learning_rate']:g}, or grad_clip=1{last}")
    recent.clear()


def save(text):
    check_losses()
    if master:
        write_checkpoint(out / "ckpt.pt", {
            "format": "nanomem-1", "model": raw.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "step": step, "rng": torch.get_rng_state(),
            "config": config, "model_config": dict(vars(model_config)), "train": progress, "data": {**meta, "folder": str(folder)}})
    if hasattr(raw, "settle"):
        raw.settle(out, True)
    show(f"{text} | saved {out}/ckpt.pt")


def score(val_loss, val_bpb, accuracy=None, recall=None, **parts):
    second = f"accuracy {accuracy:.4f}" if accuracy is not None else "bpb n/a" if val_bpb is None else f"bpb {val_bpb:.4f}"
    return f"val {val_loss:.4f} {second}" + (f" recall {recall:.3f}" if recall is not None else "")


def log_line(**values):
    with open(out / "log.jsonl", "a") as f:
        f.write(json.dumps(values) + "\n")
    if wandb is not None:
        wandb.log({k: v for k, v in values.items() if v is not None}, step=values["step"])


def show(text, live=False):
    """A line; on a terminal a live one, cut to 79 columns, is overwritten by the next."""
    if master:
        tty = sys.stdout.isatty()
        print(("\r\033[K" if tty else "") + (text[:79] if live else text), end="" if live and tty else "\n", flush=True)


def clock(seconds):
    return f"{int(seconds) // 60}m{int(seconds) % 60:02d}s"


token_bytes = load_token_bytes(folder)
token_bytes = torch.from_numpy(token_bytes) if token_bytes is not None else None
if config["eval_only"]:
    show(score(**evaluate()))
    sys.exit(0)
if master:
    out.mkdir(parents=True, exist_ok=True)
    homes = [p.name for p in out.glob("ckpt.*.home") if (out / "ckpt.pt").exists()]      # the checkpoint's own, not what a killed run left
    for name in [name for name in (*homes, "ckpt.pt", "log.jsonl") if not resume and (out / name).exists()]:
        os.replace(out / name, out / f"previous-{name}")
        print(f"an earlier run's {out}/{name} is now previous-{name}")
    (out / "result.json").unlink(missing_ok=True)
    for file in [folder / name for name in ("tokenizer.json", "retriever.npz") if (folder / name).exists()]:
        (out / file.name).write_bytes(file.read_bytes())       # so that sample.py does not need the data
    if resume:                                                 # the log up to the checkpoint: what came after is done again
        lines = [line for line in (out / "log.jsonl").read_text().splitlines(True) if line.endswith("}\n") and json.loads(line)["step"] <= step]
        (out / "log.jsonl.tmp").write_text("".join(lines))
        os.replace(out / "log.jsonl.tmp", out / "log.jsonl")
        show(f"resumed {out}/ckpt.pt at step {step} of {config['max_iters']}")
    if config["wandb_log"]:
        import wandb
        wandb.init(project=config["wandb_project"], name=config["wandb_run_name"] or out.name, config=config, resume="allow")

# ---------------------------------------------------------------- the run
recent, step_times, first_step, params, loss, stop = [], [], step, list(raw.parameters()), None, []
if hasattr(raw, "settle"):
    raw.settle(out, resume)                                    # what of the model lies in files of its own


def interrupted(number, frame):
    """The first Ctrl-C (or SIGTERM) lets the step end, so that the checkpoint is exact; the second stops at once."""
    if stop:
        raise KeyboardInterrupt
    stop.append(number)


if world == 1:                                                 # torchrun stops its processes itself
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupted)
try:
    batch = fetch(step) if step < config["max_iters"] else None
    if config["compile"] and batch:                            # compile before the clock runs: a step's gradients, thrown away
        forward_backward(net, *batch)
        raw.zero_grad(set_to_none=True)
    if config["profile"]:
        with torch.profiler.profile(acc_events=True) as trace:     # without it torch 2.11 warns
            for i in range(3):
                train_step(net, params, optimizers, *batch, i)
        trace.export_chrome_trace(str(out / "trace.json"))
        sys.exit(f"wrote {out}/trace.json: open it in chrome://tracing or ui.perfetto.dev")
    while True:
        if (step % config["eval_interval"] == 0 or step == config["max_iters"]) and not (resume and step == first_step):
            values = evaluate()
            better = values["val_loss"] < progress["best"]
            progress |= values | {"best": min(values["val_loss"], progress["best"])}
            text = f"{step:5}/{config['max_iters']} {score(**values)} | trained {clock(progress['train_seconds'])}"
            if master:
                log_line(step=step, **values, train_seconds=progress["train_seconds"])
            if step and (config["always_save_checkpoint"] or better):
                save(text)
            else:
                show(text)
        if stop:
            save(f"{step:5}/{config['max_iters']} interrupted")
            sys.exit(f"train.py: stopped; go on with: python train.py --model={config['model']} --out_dir={out} --init_from=resume")
        if step == config["max_iters"]:
            break
        start = time.perf_counter()
        if hasattr(raw, "begin_step"):
            raw.begin_step(step, config["max_iters"])
        logged = (step + 1) % config["log_interval"] == 0 or step + 1 == config["max_iters"]
        following = fetch(step + 1) if step + 1 < config["max_iters"] else None
        loss, norm = train_step(net, params, optimizers, *batch, step, logged)
        step, batch = step + 1, following
        recent.append((step, loss))
        step_times.append(time.perf_counter() - start)
        progress["train_seconds"] += step_times[-1]
        if logged:
            check_losses()
            pace, lr = config["batch_tokens"] / float(np.median(step_times[-50:])), config["learning_rate"] * schedule_factor(step - 1)
            if master:
                log_line(step=step, loss=float(loss), lr=lr, grad_norm=float(norm), tokens=step * config["batch_tokens"], tokens_per_second=pace)
            show(f"{step:5}/{config['max_iters']} loss {float(loss):.4f} lr {lr:.1e} |g| {float(norm):.2f} {pace / 1e3:.1f}k tok/s"
                 f"{usage(flops * pace / world)} eta {clock((config['max_iters'] - step) * config['batch_tokens'] / pace)}", live=True)
except (torch.OutOfMemoryError, RuntimeError) as error:
    if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
        raise
    sys.exit(f"train.py: out of memory with batch_size={config['batch_size']}: try --batch_size={max(1, config['batch_size'] // 2)}; "
             "accumulation makes up for it")

# ---------------------------------------------------------------- the end: result.json, picture, sample
if master:
    from experiments.run import commit, source_hash
    seconds = float(np.median(step_times)) if step_times else None
    curve = [line for line in map(json.loads, (out / "log.jsonl").read_text().splitlines()) if "val_loss" in line]
    result = {"model": config["model"], "seed": config["seed"], **progress, "curve": curve, "train_loss": None if loss is None else float(loss), "params": counts,
              "flops_per_token": flops, "step_ms": seconds and 1e3 * seconds, "tokens_per_second": seconds and config["batch_tokens"] / seconds,
              "peak_memory_mb": peak_memory() / 2 ** 20, "tokens": step * config["batch_tokens"], "iters": step, "threads": torch.get_num_threads(),
              "device": torch.cuda.get_device_name() if gpu else f"{config['device']} {platform.machine()}", "torch": torch.__version__,
              "commit": commit(), "data_id": meta["data_id"], "source_hash": source_hash(config["model"]),
              "config": config, "model_config": vars(model_config), "date": datetime.date.today().isoformat()}
    (out / "result.json").write_text(json.dumps(result, indent=1))
    plot_losses(out / "log.jsonl", out / "loss.png", f"model_{config['model']}.py on {folder.name}")
    for key, value, goal in (("bpb", progress["val_bpb"], config["target_bpb"]), ("loss", progress["val_loss"], config["target_loss"])):
        if goal and value:
            show(f"target {key} {goal}: {'met' if value <= goal else 'missed'} with {value:.4f} after {clock(progress['train_seconds'])} of training")
    if config["sample_tokens"]:
        tok, start = prepare_fineweb.get_tokenizer(str(folder)), torch.tensor([[meta["eot"]]], device=config["device"])
        rng = torch.Generator(config["device"]).manual_seed(config["seed"])
        ids = torch.cat(list(generate(raw.eval(), start, config["sample_tokens"], temperature=0.8, top_k=50, generator=rng)))
        print(f"\na sample:\n{tok.decode(ids.flatten().tolist())}\n")
    kept = (out / "ckpt.pt").exists()                          # always_save_checkpoint=False keeps none that is no better than the start
    print(f"checkpoint {f'{out}/ckpt.pt' if kept else 'none'}, log {out}/log.jsonl, curve {out}/loss.png, result {out}/result.json"
          + f"\nnext: python sample.py --out_dir={out} --prompt=\"...\"" * kept)
if world > 1:
    if wandb is not None:
        wandb.finish()
    dist.barrier()                                             # nobody leaves while another works on
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)                                                # gloo's threads now and then abort the interpreter's own way out
