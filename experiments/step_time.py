"""
The time of a training step beside that of the model's own dense baseline, step by step in turn.

    python experiments/step_time.py --model=lime --depth=4
    python experiments/step_time.py --model=move --dtype=float32 --profile=True
    python experiments/step_time.py --model=lime --depth=6 --n_embd=384 --gpt=True

All options but these are train.py's; the data decides nothing here but the vocabulary. The figures
are medians; the steps are train.py's own, forward, backward, clipping and optimizers. --gpt=True
adds a plain GPT of the same shape to the race, built and trained as nanoGPT does it: in float32, on
a GPU in bfloat16 and compiled where the model is.
--eager=True, for --compile=1, takes the model without torch.compile in the baseline's place.
--profile=True prints which of torch's operations take the time. --json_file=FILE adds a line with
the figures to a file.
"""
import contextlib
import io
import runpy
import signal
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from experiments.run import add_line, machine
from prepare_fineweb import configure, guard, help_text, need

import torch
import torch.nn.functional as F
from torch import nn

rounds = 12                     # steps that count, after three to warm up
gpt = False                     # beside them a plain GPT
eager = False                   # --compile=1 against the same model without it
profile = False                 # print torch.profiler's table of three more steps
json_file = ""                  # a line with the figures is added to this file
_defaults = {"rounds": rounds, "gpt": gpt, "eager": eager, "profile": profile,
             "json_file": json_file}


def trained(flags):
    """The globals of train.py with these flags, after three steps; it writes no checkpoint, which
    has gigabytes on a GPU."""
    keep = mock.patch("sample.write_checkpoint", lambda path, content: None)
    with keep, tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        sys.argv = ["train.py", *flags, "--eval_tokens=1", "--sample_tokens=0",
                    f"--out_dir={folder}", "--max_iters=3"]
        run = runpy.run_path(str(ROOT / "train.py"), run_name="step_time")
    signal.signal(signal.SIGINT, signal.default_int_handler)    # train.py would end its own step
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return run


def dense_flags(flags, run):
    """Flags for the model's baseline: its Config with DENSE, written out, from scratch."""
    config = {**vars(run["model_config"]), **run["module"].DENSE}
    gone = {"dense", "preset", "depth", "init_from", *config}
    kept = [flag for flag in flags if flag.removeprefix("--").split("=")[0] not in gone]
    return kept + [f"--{key}={value}" for key, value in config.items()]


class Block(nn.Module):
    """A block of GPT-2, without biases."""

    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.norm_1 = nn.LayerNorm(n_embd, bias=False)
        self.qkv = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.proj = nn.Linear(n_embd, n_embd, bias=False)
        self.norm_2 = nn.LayerNorm(n_embd, bias=False)
        self.up = nn.Linear(n_embd, 4 * n_embd, bias=False)
        self.down = nn.Linear(4 * n_embd, n_embd, bias=False)

    def forward(self, x):
        B, T, d = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(B, T, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, d))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """nanoGPT's model: learned positions, a head that is the embedding, the loss of all logits."""

    def __init__(self, config):
        super().__init__()
        d = config.n_embd
        self.embed = nn.Embedding(config.vocab_size, d)
        self.positions = nn.Parameter(0.02 * torch.randn(config.block_size, d))
        self.blocks = nn.Sequential(*(Block(d, config.n_head) for _ in range(config.n_layer)))
        self.norm = nn.LayerNorm(d, bias=False)

    def forward(self, idx, targets):
        x = self.embed(idx) + self.positions[:idx.size(1)]
        logits = F.linear(self.norm(self.blocks(x)), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def plain_gpt(run):
    """A GPT of the model's shape and its training step, for race()."""
    model = GPT(run["model_config"]).to(run["device"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    size = run["batch_size"]
    net = torch.compile(model) if run["compile"] else model
    in_bf16 = run["gpu"] and run["dtype"] == "bfloat16"
    autocast = torch.autocast("cuda", torch.bfloat16, enabled=in_bf16)

    def train_step(batch, step):
        x, y, _ = batch
        for first in range(0, len(x), size):
            part = slice(first, first + size)
            with autocast:
                loss = net(x[part].to(run["device"]), y[part].to(run["device"]))
            (loss * size / len(x)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if run["gpu"]:
            torch.cuda.synchronize()

    return {"get_batch": run["get_batch"], "train_step": train_step}


def race(runs, rounds):
    """{name: globals of train.py} -> {name: the median of its steps in seconds}"""
    times = {name: [] for name in runs}
    for turn in range(rounds):
        for name, run in runs.items():
            batch = run["get_batch"](turn)
            start = time.perf_counter()
            run["train_step"](batch, 2)
            times[name].append(time.perf_counter() - start)
    return {name: median(seconds) for name, seconds in times.items()}


def print_profile(run):
    """Where the time of a step goes: torch's operations by their own time."""
    order = "self_cuda_time_total" if run["gpu"] else "self_cpu_time_total"
    batch = run["get_batch"](0)
    with torch.profiler.profile(acc_events=True) as profiler:
        for _ in range(3):
            run["train_step"](batch, 2)
    print(profiler.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=60))


def main(argv):
    if "-h" in argv or "--help" in argv:
        return print(__doc__ + "\n" + help_text(Path(__file__).read_text("utf-8"), _defaults))
    own = [flag for flag in argv if flag.removeprefix("--").split("=")[0] in _defaults]
    options = {**_defaults, **configure(own, _defaults)[0]}
    need(options["rounds"] >= 1, f"rounds={options['rounds']}: must be at least 1")
    folder = Path(options["json_file"]).parent
    need(folder.is_dir(), f"json_file={options['json_file']}: there is no folder {folder}")
    flags = [flag for flag in argv if flag not in own]
    start = time.perf_counter()
    runs = {"model": trained(flags)}
    run = runs["model"]
    print(f"the first three steps and all before them: {time.perf_counter() - start:.0f} s")
    dense = run["module"].DENSE
    if options["eager"]:
        runs["eager"] = trained([*flags, "--compile=0"])
    elif any(getattr(run["model_config"], key) != value for key, value in dense.items()):
        runs["dense"] = trained(dense_flags(flags, run))
    if options["gpt"]:
        runs["gpt"] = plain_gpt(run)
        race({"gpt": runs["gpt"]}, 3)
    times = race(runs, options["rounds"])
    others = [name for name in ("dense", "eager", "gpt") if name in times]
    for name, seconds in times.items():
        pace = run["batch_tokens"] / seconds
        ratios = [f", {seconds / times[other]:.3f} of {other}" for other in others]
        print(f"{name:5} {1e3 * seconds:8.1f} ms a step, {pace:,.0f} tok/s{''.join(ratios)}")
    print(f"medians of {options['rounds']} steps in turn; {run['device']}, {run['dtype']}, torch "
          f"{torch.__version__}, {torch.get_num_threads()} threads")
    if options["json_file"]:
        result = {"model": run["model"], "seconds": times, "tokens": run["batch_tokens"],
                  "config": vars(run["model_config"]), "compile": run["compile"],
                  "dtype": run["dtype"], "device": run["device"],
                  "machine": machine(run["device"]), "torch": torch.__version__,
                  "threads": torch.get_num_threads(), "rounds": options["rounds"]}
        add_line(options["json_file"], result)
    if options["profile"]:
        print_profile(run)


if __name__ == "__main__":
    guard("step_time.py")
    main(sys.argv[1:])
