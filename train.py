"""
Train one of nanoMem's models on one GPU, several, or a CPU. One column: read it from top to bottom.

    python train.py                                        # MoVE on your Python's documentation
    python train.py --model=move --depth=12                # the canonical call: the paper's D12
    python train.py --model=move --depth=12 --dense=True   # its baseline without the memory
    python train.py --model=move --init_from=resume        # go on where a run was stopped
    python train.py experiments/move_table1.py --scale=cpu # a whole table with verdicts
    torchrun --nproc_per_node=8 train.py --model=move --depth=12

The globals below are the configuration. `--key=value` overrides one; a key that is not here but is
a field of the model's Config (--memory_scale=4) goes there; --help lists all (--help --model=lime:
that model's too). In the comments "a | b" are the choices or, of a number, its automatic value on a
CPU | on CUDA; -1 and "" are automatic; RECIPE: the model's own value comes before the one here. A
positional argument is a Python file of such assignments. Precedence: globals < the model's RECIPE <
file < command line.

A model file has Config with from_depth, PRESETS, DENSE, RECIPE (of the globals below) and Model;
LEAST in test_all.py is the shortest. Model has:

    init_weights()                                   fills every tensor, buffers, too
    forward(idx, targets=None, cache=None, ...)      logits, None; or None, the mean loss over
                                                     targets >= 0 (0 if there are none)
    param_groups(optimizer, learning_rate,           dicts of params, kind (see make_optimizers in
                 weight_decay)                       kernels.py), lr, weight_decay, schedule (False:
                                                     the rate is constant); boost, if it has one
                                                     (see set_rates); its optimizer's own options
    param_counts(), flops_per_token()                reports: total, memory, active; training

It may have six hooks; load_module() in sample.py fills in what is missing:

    hook                                             for                                     default
    Model.begin_step(step, max_iters)                before every update                     nothing
    Model.training_context(context, seed, rows)      more arguments of forward(). context:   {}
                                                     what the data has of a batch; rows:
                                                     its numbers in the run, None in
                                                     evaluation, where nothing is drawn
    Model.prompt_context(text, folders, leaf,        the same for sample.py's prompt,        {}, ""
                         block, embedder_path)       and a line that says so
    Model.new_cache(batch_size, max_len)             decoding                                None
    Model.inspect(idx, **prompt_context's)           {name: (tensor, axes)}, pictures        {}
    start(path, ckpt, fields), of the module         what --init_from's checkpoint becomes   as is
"""
import copy
import json
import math
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from statistics import median

# need(condition, message) or the user sees that line; reading(path), naming(path): what goes wrong
# inside is reported with the path.
from prepare_fineweb import (ConfigError, TokenShards, configure, find_dataset, get_tokenizer,
                             guard, help_text, load_meta, load_token_bytes, lock, naming, need,
                             reading, run_file)

if __name__ == "__main__":
    guard("train.py")
    signal.signal(signal.SIGINT, signal.SIG_DFL)   # Ctrl-C while torch is imported: no traceback

import torch
import torch.distributed as dist

from kernels import (average_sparse, clip_grads, fast_dtype, keep_coalesced, keep_freed_memory,
                     make_optimizers, triton)
from sample import (assemble, generate, load_checkpoint, load_module, load_start, make_config,
                    materialize, pick_device, write_checkpoint)

# ---------------------------------------------------------------- configuration
model = "move"              # `cp model_move.py model_mine.py` makes --model=mine
preset = ""                 # a row of the model's PRESETS, such as d12 (or depth)
depth = -1                  # 4 | 12: layers, width 64*depth
dense = False               # the model's own baseline without memory (its DENSE)
out_dir = ""                # out/<model>-d<depth>, -<preset> (dense: and -dense) or -from-<folder>
init_from = "scratch"       # scratch | resume (out_dir's) | a checkpoint or Hugging Face folder
seed = 1337                 # initial values and order of the data
dataset = ""                # folder, or a name under data/; fineweb_edu if it is there, else pydocs
block_size = -1             # 256 | 1024: tokens of context; or what the data folder says
batch_size = -1             # 8 | 32 (8 below 20 GB): sequences in a forward (the micro-batch)
batch_tokens = -1           # 1024 | 131072: tokens per optimizer step, all GPUs together
skip_steps = 0              # batches to pass over: those of an earlier phase on the same data
max_iters = -1              # 128 | about 10 tokens per dense parameter, at most 4 epochs
optimizer = ""              # muon | adamw; "": the first of the model's RECIPE
muon_lr = 0.02              # of Linear layers but the head, if the model has no RECIPE for muon
learning_rate = 1e-3        # at its highest; RECIPE
min_lr = 0.0                # where the schedule ends; RECIPE
schedule = "cosine"         # cosine | wsd (constant, then down linearly); RECIPE
warmup = 0.02               # fraction of the run over which the rate rises; RECIPE
warmdown = 0.4              # wsd: fraction of the run over which the rate falls; RECIPE
weight_decay = 0.1          # of Muon it falls to 0 over the run; RECIPE
beta1 = 0.9                 # RECIPE
beta2 = 0.95                # RECIPE
grad_clip = 1.0             # norm over all gradients, dense and sparse; 0: off; RECIPE
eval_interval = -1          # steps between evaluations and checkpoints; 1/4 | 1/20 of the run
eval_tokens = -1            # 16384 | 10485760: validation tokens, the same ones each time
log_interval = 10           # steps between lines
sample_tokens = 200         # tokens of the sample at the end; 0: none
device = ""                 # cuda | cuda:1 | mps | cpu
dtype = ""                  # float32 | bfloat16: autocast; "": bfloat16 where it is faster
compile = -1                # 0 | 1: torch.compile
dry_run = False             # print parameters, FLOPs and memory, and stop
# ----------------------------------------------------------------
KINDS = (int, float, bool, str)
defaults = {k: v for k, v in globals().items() if type(v) in KINDS and k[0] != "_"}
AT_LEAST_ONE = ("depth", "block_size", "batch_size", "batch_tokens", "eval_interval", "eval_tokens",
                "log_interval")                    # the other numbers may be 0, none is negative
AT_MOST = dict(depth=1000, compile=1, warmup=1, warmdown=1, beta1=0.999999, beta2=0.999999)
FIXED = ("model", "preset", "depth", "dense", "block_size", "seed", "batch_tokens", "skip_steps",
         "optimizer")
OUTPUTS = ("ckpt.pt", "log.jsonl", "result.json", "loss.png", "tokenizer.json", "retriever.npz")

# ---------------------------------------------------------------- what was asked for
assigned = {}                                      # what config files assign, of any type
options = [argument for argument in sys.argv[1:] if argument.startswith("-")]
files = [argument for argument in sys.argv[1:] if not argument.startswith("-")]


def flags_of(path):
    """A config file's assignments as flags; a file with `variants` is an experiment, and runs."""
    need(Path(path).is_file(), f"no config file {path} (options are written --key=value)")
    settings = run_file(path)
    if "variants" in settings:
        from experiments.run import main
        sys.exit(main(path, [*(file for file in files if file != path), *options]))
    need("Model" not in settings, f"{path} is a model: --model={Path(path).stem[6:]} trains it")
    assigned.update(settings)
    return [f"--{key}={value}" for key, value in settings.items()
            if (isinstance(value, KINDS) or key in defaults) and key[0] != "_"]


def automatic(value, cpu, cuda):
    """The value that was given, or the one for this kind of device."""
    if value != -1:
        return value
    return cuda if gpu else cpu


def automatic_interval(max_iters):
    return max(1, max_iters // automatic(-1, 4, 20))


flags = sum(map(flags_of, files), []) + options
names = [flag.removeprefix("--model=") for flag in flags if flag.startswith("--model=")]
module = load_module([model, *names][-1])
config_keys = {name: f.default for name, f in module.Config.__dataclass_fields__.items()}
if {"-h", "--help"} & set(options):
    print(__doc__ + "\n" + help_text(Path(__file__).read_text("utf-8"), defaults))
    print(f"\nfields of {module.__name__}.py's Config:")
    print(help_text(Path(module.__file__).read_text("utf-8"), config_keys))
    sys.exit(0)
for key in (config_keys.keys() - defaults.keys()) & assigned.keys():
    need(isinstance(assigned[key], KINDS), f"{key}={assigned[key]}: must be of type "
         f"{type(config_keys[key]).__name__}")
given, _ = configure(flags, {**config_keys, **defaults})
given_to_config = {key: given.pop(key) for key in given.keys() - defaults.keys()}
signal.signal(signal.SIGINT, signal.default_int_handler)

recipes = module.RECIPE or {"adamw": {}}
optimizer = given.get("optimizer") or next(iter(recipes))
need(optimizer in (*recipes, "muon"), f"optimizer={optimizer}: {module.__name__}.py has recipes "
     f"for {', '.join(recipes)}, and muon works for all")
recipe = recipes.get(optimizer, recipes.get("adamw", {}))
need("muon_lr" not in given or optimizer not in recipes, "muon_lr: is for --optimizer=muon of a "
     f"model without a RECIPE for it; {module.__name__}.py's {optimizer} has learning_rate alone")
need(recipe.keys() <= defaults.keys(), f"{module.__name__}.py: its RECIPE has "
     f"{', '.join(sorted(recipe.keys() - defaults.keys()))}, which train.py does not know")
globals().update({**recipe, **given, "optimizer": optimizer})
for key, default in defaults.items():
    value = globals()[key]
    low, high = int(key in AT_LEAST_ONE), AT_MOST.get(key, 10 ** 12)
    if type(default) in (int, float) and value != default:
        need(low <= value <= high, f"{key}={value}: must be from {low} to {high}")
need(schedule in ("cosine", "wsd"), f"schedule={schedule}: choose cosine or wsd")
need(dtype in ("", "float32", "bfloat16"), f"dtype={dtype}: choose float32 or bfloat16")
need(not preset or depth == -1, "preset and depth: give one of them")

world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
local_rank = int(os.environ.get("LOCAL_RANK", 0))
master = rank == 0
need(world == 1 or ":" not in device, f"device={device}: torchrun gives each process its own; "
     "leave the number out")
if world > 1 and device in ("", "cuda") and torch.cuda.is_available():
    need(local_rank < torch.cuda.device_count(),
         f"there are {torch.cuda.device_count()} GPUs: give torchrun as many --nproc_per_node")
    torch.cuda.set_device(local_rank)              # first, or all would open the same GPU
keep_freed_memory()                                # before torch allocates anything
device = pick_device(device)
gpu = device.startswith("cuda")
need(world == 1 or device != "mps", "device=mps: torchrun needs GPUs of CUDA, or --device=cpu")
if gpu:
    torch.backends.cuda.matmul.allow_tf32 = True
if world > 1:
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")   # a bank may be on the CPU
if not preset:
    depth = automatic(depth, 4, 12)
resume = init_from == "resume"
if not out_dir:
    out_dir = f"out/{model}-{preset or f'd{depth}'}{'-dense' if dense else ''}"
    if init_from not in ("scratch", "resume"):     # its sizes are those of what it starts from
        base = Path(init_from).resolve()
        out_dir = f"out/{model}-from-{base.parent.name if base.is_file() else base.name}"
out, locked = Path(out_dir), None
itself = Path(init_from).resolve() in (out.resolve(), out.resolve() / "ckpt.pt")
need(init_from in ("scratch", "resume") or not itself, f"init_from={init_from}: this run would "
     "write there, too; give another --out_dir=")
need(not (out / "meta.json").exists(), f"{out} is a data folder: choose another out_dir")
if master and not dry_run and (out.exists() or not resume):
    out.mkdir(parents=True, exist_ok=True)
    locked = lock(out)                             # until the process ends, however that is

ckpt = None
if resume:                                         # the run that stopped decides
    ckpt = load_checkpoint(out, sums=True)
    saved = {**ckpt["config"], **ckpt["model_config"]}
    for key, value in {**given, **given_to_config, "model": model}.items():
        same = value in (-1, "", saved.get(key)) or key in defaults and key not in FIXED
        need(same, f"{key}={value}: the checkpoint has {key}={saved.get(key)}; give that, or start "
             "from scratch")
    assemble(out, ckpt)                            # an error if model_NAME.py has changed since
    here = {key for key, value in given.items() if value not in (-1, "")} - {*FIXED}
    here |= {"out_dir", "init_from", "device"}     # these are not the saved ones
    globals().update({key: saved[key] for key in defaults if key in saved and key not in here})
    if "eval_interval" not in here and eval_interval == automatic_interval(saved["max_iters"]):
        eval_interval = -1                         # of a longer run, maybe
    done = max_iters < ckpt["step"] or max_iters == ckpt["step"] and (out / "result.json").exists()
    need(not done, f"{out}/ckpt.pt is of step {ckpt['step']} and max_iters={max_iters}: give a "
         "larger --max_iters to go on")
need(min_lr <= learning_rate, f"min_lr={min_lr:g}: must not be above learning_rate="
     f"{learning_rate:g}, from which the schedule falls to it")

# ---------------------------------------------------------------- data and model
folder, meta = None, {"vocab_size": 50257}         # a dry run needs no text
tok = token_bytes = None
if dataset or not dry_run:
    folder = find_dataset(dataset)
    meta, dataset = load_meta(folder), str(folder)
of_data = {key: meta[key] for key in config_keys if key in meta and key != "vocab_size"}
for key in of_data.keys() & given_to_config.keys():    # eot or clusters, say
    need(given_to_config[key] == of_data[key], f"{key}={given_to_config[key]}: {folder} has "
         f"{key}={of_data[key]}")
fields = {**of_data, **given_to_config}
if block_size != -1:
    fields["block_size"] = block_size
if dense:
    clash = sorted(module.DENSE.keys() & given_to_config.keys())
    need(not clash, f"dense and {', '.join(clash)}: dense=True sets it; give one of them")
    fields |= module.DENSE
torch.manual_seed(seed)                            # for blocks that start() adds to a model
if resume:
    need(ckpt["data"].get("data_id") == meta["data_id"],
         f"{folder} holds other text than the checkpoint was trained on (data_id in its meta.json)")
    model_config = module.Config(**ckpt["model_config"])
elif init_from == "scratch":
    fields = {"block_size": automatic(-1, 256, 1024), "vocab_size": meta["vocab_size"], **fields}
    model_config = make_config(module, preset, depth, fields)
else:
    if preset or given.get("depth", -1) != -1:
        dial = make_config(module, preset, depth, {})
        shape = {"n_layer": dial.n_layer, "n_embd": dial.n_embd}
        fields = {**shape, **module.PRESETS.get(preset, {}), **fields}
    with reading(init_from, "cannot be used here"):
        ckpt = load_start(init_from, module, fields, folder)
        model_config = module.Config(**ckpt["model_config"])
    if not preset:
        depth = getattr(model_config, "n_layer", depth)        # for the record
need(model_config.vocab_size >= meta["vocab_size"] or not folder,
     f"vocab_size={model_config.vocab_size}: {folder} needs {meta['vocab_size']}")
block_size = model_config.block_size
if folder and not dry_run:
    train_data = TokenShards(folder, "train", block_size)
    val_data = TokenShards(folder, "val", block_size)
    token_bytes = load_token_bytes(folder)         # None: not known
    if token_bytes is not None:
        token_bytes = torch.from_numpy(token_bytes)
    if sample_tokens or "task" in meta:
        try:
            tok = get_tokenizer(str(folder))
        except ConfigError as error:
            raise ConfigError(f"{error}; or --sample_tokens=0, which needs none") from None

# ---------------------------------------------------------------- what is automatic, resolved
why = "as asked for"
if not dtype:
    dtype, why = fast_dtype(device)
elif resume and not given.get("dtype"):
    why = f"the checkpoint's; this device by itself: {fast_dtype(device)[0]}"
compile = automatic(compile, 0, int(triton is not None))
eval_tokens = automatic(eval_tokens, 16384, 10485760)
if batch_tokens == -1:                             # about so many
    batch_tokens = max(1, automatic(-1, 1024, 131072) // (block_size * world)) * block_size * world
need(batch_tokens % (block_size * world) == 0, f"batch_tokens={batch_tokens}: must be a multiple "
     f"of block_size={block_size} (times {world} processes)")
n_sequences = batch_tokens // block_size           # of a step, in all processes
if batch_size == -1:
    large = gpu and torch.cuda.get_device_properties(device).total_memory > 20e9
    batch_size = 32 if large else 8
batch_size = min(batch_size, n_sequences // world)
while n_sequences // world % batch_size:
    batch_size -= 1                                # the micro-batch divides a process's share

torch.manual_seed(seed)
with torch.device("meta"):                         # no memory and no time yet
    raw = module.Model(model_config)
counts, flops = raw.param_counts(), raw.flops_per_token()
if max_iters == -1:
    max_iters = 128
    if gpu and folder and not dry_run:
        max_iters = int(min(10 * flops / 6, 4 * train_data.n_tokens) // batch_tokens)
        need(max_iters, f"{folder} has {train_data.n_tokens:,} training tokens, four epochs of "
             f"them are less than a step of batch_tokens={batch_tokens:,}: give fewer, or "
             "--max_iters=")
warmup_iters = round(warmup * max_iters)
if eval_interval == -1:
    eval_interval = automatic_interval(max_iters)
config = {key: globals()[key] for key in defaults}


stop = []                                          # the signals that came


def show(text):
    if master:
        try:
            print(text, flush=True)
        except OSError:                            # a pipe's reader left, `| head`, or a terminal
            stop.append(signal.SIGPIPE)            # did: as by Ctrl-C


show(f"{model_config}")
show(f"parameters: {', '.join(f'{n:,} {name}' for name, n in counts.items())}; "
     f"{flops / 1e6:,.1f} MFLOP a token, forward and backward")
show(f"{batch_tokens:,} tokens a step = {n_sequences} x {block_size}, {batch_size} sequences at "
     f"once; {max_iters} steps")
linear = "" if optimizer in recipes else f" (Linear layers' {muon_lr:g})"
text = f"data {folder}" if folder else f"no --dataset=: {model_config.vocab_size:,} kinds of tokens"
show(f"{optimizer}, learning rate {learning_rate:g}{linear}, {schedule}; {text}")
show(f"{device}, {dtype} ({why})")
if init_from == "scratch" and not all(p.requires_grad for p in raw.parameters()):
    show("what is frozen stays random: --init_from= gives it trained values")
without = module.DENSE and module.DENSE.items() <= vars(model_config).items()
if without and init_from not in ("scratch", "resume"):
    show(f"{init_from} is a baseline, without memory, and goes on so")
if dry_run:
    for name, p in raw.named_parameters():
        show(f"{str(tuple(p.shape)):>24} {p.numel():>15,}  {name}")
memory = sum((12 if p.requires_grad else 4) * p.numel() for p in raw.parameters())
show(f"{memory / 2 ** 30:.2f} GiB for weights and Adam's moments; gradients and activations on top")
if dry_run:
    sys.exit(0)
if device == "cpu":                                # Linux would kill the process without a word
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    need(memory < there, f"{memory / 2 ** 30:.0f} GiB of {there / 2 ** 30:.0f}: choose a smaller "
         "model")
if master:
    import matplotlib                              # noqa: F401  if it is missing: now, not later
    from experiments.run import draw_losses, origin
    made_by = origin(model, device)                # now: the files may be edited while it runs
materialize(raw, device)

# ---------------------------------------------------------------- optimizers, resume, processes


def muon_for_all():
    """For models whose groups have none for Muon: their groups for AdamW, but Muon takes the
    Linear layers, all except the head and those whose rate is constant."""
    linear = {m.weight for name, m in raw.named_modules()
              if isinstance(m, torch.nn.Linear) and name != "head"}
    groups = []
    for group in raw.param_groups("adamw", learning_rate, weight_decay):
        if group["kind"] == "adamw" and group["schedule"]:
            matrices = [p for p in group["params"] if p in linear]
            groups.append({**group, "params": matrices, "kind": "muon", "lr": muon_lr})
            group["params"] = [p for p in group["params"] if p not in linear]
        groups.append(group)
    return groups


kinds = []
if optimizer in recipes:
    groups = raw.param_groups(optimizer, learning_rate, weight_decay)
    kinds = [group["kind"] for group in groups]
if optimizer == "muon" and "muon" not in kinds:
    groups = muon_for_all()
grouped = {p for group in groups for p in group["params"]}
forgotten = [name for name, p in raw.named_parameters() if p.requires_grad and p not in grouped]
need(not forgotten, f"model_{model}.py: no group of param_groups() has {', '.join(forgotten)}")
optimizers = make_optimizers(groups, (beta1, beta2))
sparse = {p for group in groups if group["kind"] in ("sparse", "rows") for p in group["params"]}
for p in sparse:
    keep_coalesced(p)

step = 0
log = []                                           # the lines of log.jsonl
progress = {"val_loss": None, "val_bpb": None, "train_seconds": 0.0}
with reading(out / "ckpt.pt" if resume else init_from):
    if ckpt:
        raw.load_state_dict({**raw.state_dict(), **ckpt["model"]})     # start() may leave some out
        for name, p in raw.named_parameters():
            need(p.detach().sum().isfinite(), f"{name} is not a number in {init_from}")
    if resume:
        for o, state in zip(optimizers, ckpt["optimizers"], strict=True):
            now = o.state_dict()["param_groups"]               # rates and decays are this run's
            state = copy.deepcopy(state)           # out of the mapped file, which save() replaces
            o.load_state_dict({**state, "param_groups": now})
        torch.set_rng_state(ckpt["rng"])
        step, progress = ckpt["step"], ckpt["train"]
        log = ckpt["log"]
ckpt = None                                        # its tensors are copied

net, parallel = raw, None
if world > 1 and any(p.requires_grad and p not in sparse for p in raw.parameters()):
    from torch.nn.parallel import DistributedDataParallel as DDP
    left_out = [name for name, p in raw.named_parameters() if p in sparse]     # see train_step
    DDP._set_params_and_buffers_to_ignore_for_model(raw, left_out)
    net = parallel = DDP(raw, device_ids=[local_rank] if gpu else None, broadcast_buffers=False)
if compile:
    net = torch.compile(net)                       # after DDP, which must see the model's own names
autocast = torch.autocast(device.split(":")[0], torch.bfloat16, enabled=dtype == "bfloat16")

# ---------------------------------------------------------------- one step


def over_processes(tensor):
    """The sum over all processes."""
    if world == 1:
        return tensor
    tensor = tensor.to(device)
    dist.all_reduce(tensor)
    return tensor


def get_batch(step):
    """This process's part of the batch of update `step` -> x, y (B, T), context. A row depends on
    seed and its number alone: any number of processes trains on the same batches."""
    share = n_sequences // world
    first = (skip_steps + step) * n_sequences + rank * share
    rows = range(first, first + share)
    windows = train_data.shuffled(seed, rows)
    context = raw.training_context(train_data.context(windows), seed, rows)
    return *train_data.batch(windows), context


def forward_backward(x, y, context):
    """One optimizer step's gradients: micro-batches of batch_size sequences, each weighted by its
    share of the targets, so that the gradient is that of the mean over the whole batch. Returns the
    batch's loss as a tensor."""
    targets = over_processes((y >= 0).sum()).clamp(min=1).item()
    total = 0.0
    for first in range(0, len(x), batch_size):
        part = slice(first, first + batch_size)
        if parallel is not None:
            parallel.require_backward_grad_sync = first + batch_size >= len(x)
        share = (y[part] >= 0).sum().item() / targets
        extra = {key: value[part].to(device) for key, value in context.items()}
        with autocast:
            loss = net(x[part].to(device), y[part].to(device), **extra)[1] * share
        (loss * world).backward()                  # DDP takes the mean over processes
        total = total + loss.detach()
    return over_processes(total)


def schedule_factor(step):
    """Multiplier of every scheduled learning rate for update number `step`, from 0. Another
    schedule is a branch here and its name in the need(schedule in ...) above."""
    rising = min(1.0, (step + 1) / (warmup_iters + 1))
    floor = min_lr / max(learning_rate, 1e-30)
    left = max_iters - step
    if schedule == "wsd":
        down = min(1.0, left / max(warmdown * max_iters, 1e-9))
        return min(rising, floor + (1 - floor) * down)
    if step < warmup_iters:
        return rising
    falling = max(1, max_iters - warmup_iters)
    return floor + (1 - floor) * 0.5 * (1 - math.cos(math.pi * left / falling))


def set_rates(step):
    """Every group's learning rate for this step, and nanochat's schedules of Muon: momentum 0.85 ->
    0.95 in 300 steps (here a tenth of the run, if that is less), weight decay -> 0."""
    for o in optimizers:
        for group in o.param_groups:
            group["lr"] = group["base_lr"]
            if group["schedule"]:
                group["lr"] *= schedule_factor(step)
            if "boost" in group:                   # so many times the rate, 1 from `until` on
                boost, until = group["boost"]
                group["lr"] *= 1 + (boost - 1) * max(0.0, 1 - step / (max_iters * until))
            if isinstance(o, torch.optim.Muon):
                rising = max(1, min(300, max_iters // 10))
                group["momentum"] = 0.85 + 0.1 * min(1.0, step / rising)
                group["weight_decay"] = group["base_decay"] * (1 - step / max_iters)


def train_step(batch, step, want_norm=False):
    """One update. Returns the loss and, if wanted or clipped, the gradient norm, as tensors."""
    raw.begin_step(step, max_iters)
    loss, norm = forward_backward(*batch), None
    if world > 1:
        for p in raw.parameters():                 # in the same order everywhere
            if p.grad is not None and p.grad.is_sparse:
                p.grad = average_sparse(p.grad)
    if want_norm or grad_clip:
        norm = clip_grads(raw.parameters(), grad_clip)
    set_rates(step)
    for o in optimizers:
        o.step()
        o.zero_grad(set_to_none=True)
    if device != "cpu":
        torch.accelerator.synchronize()
    return loss, norm


@torch.no_grad()
def evaluate():
    """val_loss (nats) and val_bpb (or None) over the first windows of the validation split, in all
    eval_tokens (at least one window), the same each time; tokens without bytes left out; a task's
    accuracy."""
    net.eval()
    for b in raw.buffers() if world > 1 else ():   # a batch norm's: the checkpoint has rank 0's
        dist.broadcast(b, 0)
    forward = net if parallel is None else raw     # processes may have unequal numbers of batches
    n = min(max(1, eval_tokens // block_size), val_data.n_windows)
    sums = torch.zeros(3, dtype=torch.float64)     # nats, targets, bytes
    for first in range(rank * batch_size, n, batch_size * world):
        windows = range(first, min(n, first + batch_size))
        x, y = val_data.batch(windows)
        lengths = torch.zeros(1)
        if token_bytes is not None:
            lengths = token_bytes[y.clamp(min=0)].masked_fill(y < 0, 0)
            y = y.masked_fill(lengths == 0, -1)
        context = raw.training_context(val_data.context(windows), seed, None)
        context = {key: value.to(device) for key, value in context.items()}
        with autocast:
            loss = forward(x.to(device), y.to(device), **context)[1].item()
        targets = (y >= 0).sum().item()
        sums += torch.tensor([loss * targets, targets, lengths.sum()], dtype=torch.float64)
    nats, targets, size = over_processes(sums).tolist()
    bpb = nats / math.log(2) / size if size else None
    values = {"val_loss": nats / max(targets, 1), "val_bpb": bpb}
    if "task" in meta and master:
        from experiments.tasks import accuracy
        with autocast:
            values |= accuracy(raw, val_data, tok)
    net.train()
    return values


# ---------------------------------------------------------------- what a run leaves behind


def must_be_finite(value, what):
    need(math.isfinite(value), f"{what} is not a number; try a learning_rate below "
         f"{learning_rate:g}, or grad_clip=1 ({out}/ckpt.pt is the last good state, if there)")


def begin_output():
    """An earlier run's files become previous-NAME, and what sample.py needs of the data, tokenizer
    and tree of topics, is copied. All previous- files are of one run: where there are some, those
    of a run that saved no checkpoint are deleted instead. ckpt.pt is the last to move, so that a
    kill on the way loses nothing."""
    prefix = "previous-" if (out / "ckpt.pt").exists() else ""
    if (out / "previous-ckpt.pt").exists():
        for name in reversed(OUTPUTS):
            (out / f"{prefix}{name}").unlink(missing_ok=True)
    for name in reversed(OUTPUTS):
        if (out / name).exists():
            os.replace(out / name, out / f"previous-{name}")
            show(f"an earlier run's {out}/{name} is now previous-{name}")
    for file in folder.iterdir():
        if file.suffix in (".json", ".npz") and file.name != "meta.json":
            (out / file.name).write_bytes(file.read_bytes())


def log_line(**values):
    log.append(values)
    if master:
        with naming(out / "log.jsonl"), open(out / "log.jsonl", "a") as file:
            file.write(json.dumps(values) + "\n")


def save():
    """The checkpoint; never one whose weights are not finite: the earlier one stays."""
    for name, p in raw.named_parameters():
        must_be_finite(p.detach().sum().item(), f"{name} after step {step}")
    if master:
        write_checkpoint(out / "ckpt.pt", {
            "format": "nanomem-1", "model": raw.state_dict(), "step": step, "log": log,
            "optimizers": [o.state_dict() for o in optimizers], "rng": torch.get_rng_state(),
            "config": config, "model_config": dict(vars(model_config)), "train": progress,
            "data": {**meta, "folder": str(folder)}})
    show(f"{step:5}/{max_iters} saved {out}/ckpt.pt")


def clock(seconds):
    return f"{int(seconds) // 60}m{int(seconds) % 60:02d}s"


def peak_memory():
    """Bytes at the peak: the tensors on the GPU, or else the process's resident set."""
    import resource
    if gpu:
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# ---------------------------------------------------------------- the run
step_times = []


def interrupted(number, frame):
    """The first Ctrl-C (or SIGTERM, or the end of the terminal) lets the step end, so that the
    checkpoint is exact; the second stops at once, but not where several come by themselves: under
    torchrun, and when a terminal ends."""
    if stop and number != signal.SIGHUP and "LOCAL_RANK" not in os.environ:
        raise KeyboardInterrupt
    stop.append(number)


def leave(message=""):
    """The end of this process; os._exit, because gloo's threads sometimes crash a normal one."""
    if locked is not None:
        locked.close()
    if world > 1:
        if message and master:
            print(message, file=sys.stderr)
        dist.barrier()                             # nobody leaves while another works on
        dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(1 if message else 0)
    if message:
        sys.exit(message)


for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) != signal.SIG_IGN:             # nohup's
        signal.signal(number, interrupted)
if resume and master:
    show(f"resumed {out}/ckpt.pt at step {step} of {max_iters}")
    (out / "result.json").unlink(missing_ok=True)  # what came after the checkpoint is done again
    (out / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
if compile:                                        # before the clock runs: gradients, thrown away
    show("compiling: this can take minutes")
    buffers = [(b, b.clone()) for b in raw.buffers()]              # a batch norm's statistics
    with torch.random.fork_rng([device] if gpu else []):
        for n in (step, step + 1):                 # two, so that sizes that vary are compiled so
            forward_backward(*get_batch(n))
            raw.zero_grad(set_to_none=True)
    for b, before in buffers:
        b.copy_(before)
while True:
    due = step % eval_interval == 0 or step == max_iters
    evaluated = log and log[-1]["step"] == step and "val_loss" in log[-1]  # before it was resumed
    if due and not evaluated:
        values = evaluate()
        must_be_finite(values["val_loss"], f"the validation loss after step {step}")
        if master and step == 0 and not resume:
            begin_output()
        progress |= values
        log_line(step=step, **values, train_seconds=progress["train_seconds"])
        shown = [f"{key} {value:.4f}" for key, value in values.items() if value is not None]
        show(f"{step:5}/{max_iters} {' '.join(shown[:3])} | trained "
             f"{clock(progress['train_seconds'])}")
        if step:
            save()
    if over_processes(torch.tensor(len(stop))) > 0:            # all end after the same step
        save()
        leave(f"train.py: stopped; go on with: python train.py --model={model} "
              f"--out_dir={shlex.quote(str(out))} --init_from=resume")
    if step == max_iters:
        break
    start = time.perf_counter()
    logged = (step + 1) % log_interval == 0 or step + 1 == max_iters
    loss, norm = train_step(get_batch(step), step, logged)
    step += 1
    step_times.append(time.perf_counter() - start)
    progress["train_seconds"] += step_times[-1]
    if logged:
        must_be_finite(loss.item(), f"the loss of step {step}")
        pace = batch_tokens / median(step_times[-50:])
        lr = learning_rate * schedule_factor(step - 1)
        log_line(step=step, loss=loss.item(), lr=lr, grad_norm=norm.item(),
                 tokens_per_second=pace)
        show(f"{step:5}/{max_iters} loss {loss.item():.4f} lr {lr:.1e} |g| {norm.item():.2f} "
             f"{pace / 1e3:.1f}k tok/s {peak_memory() / 2 ** 30:.1f}G eta "
             f"{clock((max_iters - step) * batch_tokens / pace)}")

# ---------------------------------------------------------------- the end: result, picture, sample
if master:
    result = {
        "model": model, "seed": seed, **progress,
        "curve": [row for row in log if "val_loss" in row],
        "params": counts, "flops_per_token": flops,
        "step_ms": 1e3 * median(step_times) if step_times else None,
        "peak_memory_mb": peak_memory() / 2 ** 20, "tokens": step * batch_tokens,
        "dtype": dtype, "data_id": meta["data_id"], **made_by, "config": config}
    with naming(out / "result.json"):
        (out / "result.json.tmp").write_text(json.dumps(result, indent=1))
        os.replace(out / "result.json.tmp", out / "result.json")
    draw_losses(log, out / "loss.png")
    if sample_tokens:
        begin = torch.tensor([[meta["eot"]]], device=device)
        rng = torch.Generator(device).manual_seed(seed)
        ids = generate(raw.eval(), begin, sample_tokens, temperature=0.8, top_k=50, generator=rng)
        show(f"\na sample:\n{tok.decode(ids)}\n")
    if step:                                       # else no checkpoint has been saved
        show(f"checkpoint {out}/ckpt.pt, log {out}/log.jsonl, curve {out}/loss.png, result "
             f"{out}/result.json\nnext: python sample.py --out_dir={shlex.quote(str(out))} "
             "--prompt=\"...\"")
leave()
