"""
The time of decoding: ms of the prefill and of each later token, with the cache and without.

    python experiments/decode_time.py --out_dir=out/move-d4

Medians of three rounds, after one to warm up; tokens/s are of the whole batch. A model whose
new_cache() gives none reads its whole context for every token in both columns.
"""
import sys
import time
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments.run import options
from prepare_fineweb import guard, need
from sample import generate, load_model, pick_device

out_dir = ""            # a run's folder, or a ckpt.pt
device = ""             # cuda | mps | cpu; empty: the accelerator if there is one
steps = 8               # tokens of each measurement


def token_times(model, idx, steps, cached):
    """Seconds until each of `steps` tokens after idx."""
    times, start = [], time.perf_counter()
    for token in generate(model, idx, steps, temperature=0, cached=cached):
        token.sum().item()                  # waits for a GPU
        now = time.perf_counter()
        times.append(now - start)
        start = now
    return times


def measure(model, batch_size, length, steps, device, cached):
    """-> ms of the prefill, ms of each token after it"""
    idx = torch.randint(model.config.vocab_size, (batch_size, length), device=device)
    rounds = [token_times(model, idx, steps, cached) for _ in range(4)][1:]
    prefill = median(times[0] for times in rounds)
    later = median(seconds for times in rounds for seconds in times[1:])
    return 1e3 * prefill, 1e3 * later


def main(argv):
    c, others = options(argv, globals())
    need(c.out_dir, "out_dir: which run? --out_dir=out/move-d4")
    need(not others, f"no file or command, not {others}")
    need(c.steps >= 2, f"steps={c.steps}: must be at least 2")
    device = pick_device(c.device)
    model, _, _ = load_model(c.out_dir, device)
    block_size = model.config.block_size
    need(c.steps < block_size, f"steps={c.steps}: the run's context is {block_size} tokens")
    lengths = {max(1, n) for n in (block_size // 8, block_size // 2, block_size - c.steps)
               if n + c.steps <= block_size}
    print("batch  context  prefill ms | cached: ms/token  tokens/s | not: ms/token  tokens/s")
    for batch_size in (1, 8):
        for length in sorted(lengths):
            prefill, cached = measure(model, batch_size, length, c.steps, device, True)
            _, plain = measure(model, batch_size, length, c.steps, device, False)
            with_cache, without = 1e3 * batch_size / cached, 1e3 * batch_size / plain
            print(f"{batch_size:5d}  {length:7d}  {prefill:10.1f} | {cached:16.2f} "
                  f"{with_cache:9.0f} | {plain:13.2f} {without:9.0f}")


if __name__ == "__main__":
    guard("decode_time.py")
    main(sys.argv[1:])
