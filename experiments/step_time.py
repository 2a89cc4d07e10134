"""
The time of a training step beside that of the model's own dense baseline, step by step in turn.

    python experiments/step_time.py --model=lime --depth=4
    python experiments/step_time.py --model=move --dtype=float32 --profile=True   # and what takes it

All options but these two are train.py's; the data decides nothing here but the vocabulary. The
figures are medians; the steps are train.py's own, forward, backward, clipping and optimizers.
"""
import contextlib
import io
import runpy
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from prepare_fineweb import configure, guard, help_text, need

import torch

rounds = 12                     # steps that count, after three to warm up
profile = False                 # print torch.profiler's table of three more steps
_defaults = {"rounds": rounds, "profile": profile}


def trained(flags):
    """The globals of train.py with these flags, after three steps."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        sys.argv = ["train.py", "--eval_tokens=1", "--sample_tokens=0", *flags,
                    f"--out_dir={folder}", "--max_iters=3"]
        return runpy.run_path(str(ROOT / "train.py"), run_name="step_time")


def dense_flags(flags, run):
    """Flags for the model's baseline: its Config with DENSE, written out, from scratch."""
    config = {**vars(run["model_config"]), **run["module"].DENSE}
    gone = {"dense", "preset", "depth", "init_from", *config}
    kept = [flag for flag in flags if flag.removeprefix("--").split("=")[0] not in gone]
    return kept + [f"--{key}={value}" for key, value in config.items()]


def race(runs, rounds):
    """{name: globals of train.py} -> {name: the median of its steps in seconds}"""
    times = {name: [] for name in runs}
    for turn in range(rounds):
        for name, run in runs.items():
            batch = run["fetch"](turn)
            start = time.perf_counter()
            run["train_step"](batch, 2)
            times[name].append(time.perf_counter() - start)
    return {name: median(seconds) for name, seconds in times.items()}


def print_profile(run):
    """Where the time of a step goes: torch's operations by their own time."""
    order = "self_cuda_time_total" if run["gpu"] else "self_cpu_time_total"
    batch = run["fetch"](0)
    with torch.profiler.profile(acc_events=True) as profiler:
        for _ in range(3):
            run["train_step"](batch, 2)
    print(profiler.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=40))


def main(argv):
    if "-h" in argv or "--help" in argv:
        return print(__doc__ + "\n" + help_text(Path(__file__).read_text(), _defaults))
    own = [flag for flag in argv if flag.removeprefix("--").split("=")[0] in _defaults]
    options = {**_defaults, **configure(own, _defaults)[0]}
    need(options["rounds"] >= 1, f"rounds={options['rounds']}: must be at least 1")
    flags = [flag for flag in argv if flag not in own]
    runs = {"model": trained(flags)}
    run = runs["model"]
    dense = run["module"].DENSE
    if any(getattr(run["model_config"], key) != value for key, value in dense.items()):
        runs["dense"] = trained(dense_flags(flags, run))
    times = race(runs, options["rounds"])
    for name, seconds in times.items():
        pace, ratio = run["batch_tokens"] / seconds, seconds / times.get("dense", seconds)
        print(f"{name:5} {1e3 * seconds:8.1f} ms a step, {pace:,.0f} tok/s, {ratio:.3f} of dense")
    print(f"medians of {options['rounds']} steps in turn; {run['device']}, {run['dtype']}, torch "
          f"{torch.__version__}, {torch.get_num_threads()} threads")
    if options["profile"]:
        print_profile(run)


if __name__ == "__main__":
    guard("step_time.py")
    main(sys.argv[1:])
