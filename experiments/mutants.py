"""One-line mistakes that the tests must catch: does the suite notice?

    python experiments/mutants.py                       # all of them, each in a copy of the tree
    python experiments/mutants.py --file=model_lime.py  # of one file
    python experiments/mutants.py --jobs=2              # two at a time

Each row is (file, text that stands in it once, what takes its place, tests to run: pytest's -k). A
row whose tests pass has survived; the last line counts them, and the exit code is 1 if there are.
"""
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from prepare_fineweb import configure, guard, need

file = ""    # only the mutants of this file
jobs = 1     # how many at a time
defaults = dict(file=file, jobs=jobs)


def survives(mutant):
    """Whether the tests pass in a copy of the tree that has this mistake."""
    name, right, wrong, tests = mutant
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", "out", "data", "results"))
        text = (tree / name).read_text()
        need(text.count(right) == 1, f"{name} has {right!r} not once: mend the table")
        (tree / name).write_text(text.replace(right, wrong))
        files = ["test_all.py", *sorted(str(p) for p in Path("experiments").glob("test_*.py"))]
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-k", tests, *files]
        environment = {**os.environ, "NANOMEM_SLOW": "1", "OMP_NUM_THREADS": "1"}
        run = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    caught = run.returncode == 1
    print("caught  " if caught else "SURVIVED", name, "|", right.strip(), "->", wrong.strip())
    if run.returncode > 1:
        print(f"no test ran with -k {tests!r}:", run.stdout[-500:])
    return not caught


def main(argv):
    overrides, others = configure(argv, defaults)
    need(not others, f"no file is wanted, not {others}")
    options = {**defaults, **overrides}
    chosen = [mutant for mutant in MUTANTS if options["file"] in ("", mutant[0])]
    need(chosen, f"file={options['file']}: the table has no mutant of it")
    with ThreadPoolExecutor(options["jobs"]) as pool:
        survivors = sum(pool.map(survives, chosen))
    print(f"{len(chosen)} mutants, {survivors} survived")
    return int(survivors > 0)


MUTANTS = [
    ("kernels.py", 'if BACKEND == "torch" or acc_dtype(*tensors) == torch.float64:',
     'if BACKEND == "torch":', "dispatch"),
    ("kernels.py", '    kept = v * gate[..., :1] if gate_v else v\n', '    kept = v\n',
     "mix_values"),
    ("kernels.py", "return total / (targets >= 0).sum().clamp(min=1)",
     "return total / targets.numel()", "linear_cross_entropy"),
    ("kernels.py", "rows = max(256, 2**21 // V)    # of a chunk", "rows = 10**9    # of a chunk",
     "linear_cross_entropy"),
    ("kernels.py", "for j in range(min(k // (i + 1), n)):", "for j in range(min(k // (i + 2), n)):",
     "staircase"),
    ("kernels.py", "bags = (start + L * h).view(-1)", "bags = (start + 0 * L * h).view(-1)",
     "sums_equal_float64"),
    ("kernels.py", "p.mul_(1 - tanh.square_())", "p.mul_(1 - tanh)", "linear_cross_entropy"),
    ("kernels.py", "device=q.device).tril(S - T)", "device=q.device).tril()", "cache_equals"),
    ("kernels.py", "scores = q[:, :, start:end] @ k[:, :, :end].mT",
     "scores = q[:, :, start:end] @ k[:, :, :end].mT * 0.5", "attention_in_blocks"),
    ("kernels.py", "bias[:, :, start:end, :end]", "bias[:, :, :end - start, :end]",
     "attention_in_blocks"),
    ("kernels.py", "        total += tl.where(hit, g[:, None], 0.0)",
     "        total = tl.where(hit, g[:, None], total)", "product_key_topk_scores"),
    ("kernels.py", "2 * w - came_in.to(tl.int64)", "2 * w + came_in.to(tl.int64)",
     "sums_equal_float64"),
    ("kernels.py", "tl.store(z + c, tl.where(target >= 0, g, 0.0), mask=c < V)",
     "tl.store(z + c, g, mask=c < V)", "linear_cross_entropy"),
    ("kernels.py", 'group["lr"] * math.sqrt(1 - beta2**t)', 'group["lr"] * (1 - beta2**t)',
     "lazy_adam"),
    ("kernels.py", "mean = (grad * y).mean(-1, keepdim=True)",
     "mean = (grad * y).sum(-1, keepdim=True)", "cpu_operations"),
    ("prepare_fineweb.py", "signal.signal(signal.SIGINT, signal.SIG_IGN)     # a second",
     "sys.exit(1)     # a second", "expected_failure or interrupted"),
    ("prepare_fineweb.py", '        fcntl.flock(file, fcntl.LOCK_EX)\n', '        pass\n',
     "second_waits"),
    ("prepare_fineweb.py", "encode_special_tokens = True", "encode_special_tokens = False",
     "round_trip"),
    ("prepare_fineweb.py", 'known == (meta["vocab_size"], meta["eot"])',
     'known[0] == meta["vocab_size"]', "mistake and vocab_size"),
    ("prepare_fineweb.py", 'if ("val" in path.name) == (split == "val")]', "if split in path.name]",
     "speedruns"),
    ("prepare_fineweb.py", "len(range(0, len(shard) - block_size, self.stride))",
     "len(range(0, len(shard) - block_size - 1, self.stride))",
     "windows_cover or speedruns or block_size_a_document"),
    ("prepare_fineweb.py", "start = int(window - self.first[shard]) * self.stride",
     "start = int(window - self.first[shard]) * self.block_size",
     "block_size_a_document or sequences_hold"),
    ("prepare_fineweb.py", "np.random.default_rng((seed, epoch))", "np.random.default_rng(seed)",
     "every_epoch"),
    ("prepare_fineweb.py", "if length >= size and (not line.strip() or",
     "if length >= size and (line.strip() or", "book"),
    ("prepare_fineweb.py", "mask = [1] + [0] * len(before)", "mask = [0] + [0] * len(before)",
     "prompts_have_no_loss"),
    ("prepare_fineweb.py", '            if split == "val":\n                continue\n', "",
     "held_out_by_its_hash"),
    ("prepare_fineweb.py", "known_bytes += int(lengths[arrays[0]].sum())", "known_bytes += n_bytes",
     "other_tokenizers"),
    ("experiments/topics.py", "np.log((1 + len(texts)) / (1 + present)) + 1",
     "np.log(len(texts) / (1 + present)) + 1", "cosines"),
    ("experiments/topics.py", "return F.normalize(torch.from_numpy(x).float())",
     "return torch.from_numpy(x).float()", "cosines"),
    ("experiments/topics.py", "torch.cdist(points, centroids).amin(1)",
     "torch.cdist(points, centroids).amax(1)", "k_means"),
    ("experiments/topics.py", "if counts.min() < 4 * k:", "if counts.min() < 2 * k:",
     "node_splits"),
    ("experiments/topics.py", 'content.update(f"{name} {array.shape}".encode() + array.tobytes())',
     'content.update(f"{name} {array.shape}".encode())', "subjects"),
    ("experiments/topics.py", "mask.append(np.arange(padding) < ended)",
     "mask.append(np.zeros(padding))", "cut_and_pack"),
    ("model_move.py", 'self.gate_v = int(self.memory == "move")', "self.gate_v = 1",
     "test_move_fills_in"),
    ("model_move.py", "math.ceil(self.memory_scale * self.n_layer / 2)",
     "int(self.memory_scale * self.n_layer / 2)", "test_move_fills_in"),
    ("model_move.py", "return gather_rows(self.table, distinct, self.sparse)",
     "return gather_rows(self.table, distinct)", "sparse_gradients and move"),
    ("model_move.py", "self.attn(rms_norm(x), rotary", "self.attn(x, rotary", "test_move_equals"),
    ("model_move.py", "fan_in = self.config.n_embd if", "fan_in = p.size(-1) if",
     "test_initial_values and move"),
    ("model_move.py", "scaled_sum(resid, x, skip, x0)", "scaled_sum(resid, x, skip, x)",
     "test_move_equals"),
    ("model_move.py", "cache.pos += idx.size(1)", "cache.pos += 1", "test_cache_equals and move"),
    ("model_move.py", 'rate = ratio["embed"] * self.config.memory_lr',
     "rate = self.config.memory_lr", "test_move_learning_rates"),
    ("model_move.py", "for p in (self.embed.weight, *self.tables()))", "for p in self.tables())",
     "test_move_parameter_counts"),
    ("model_move.py", "rows=self.bank(reading.distinct)",
     "rows=self.bank(reading.distinct).flip(0)", "test_move_equals"),
    ("model_move.py", "rotary = rotary_tables(theta, 0, c.size(1))",
     "rotary = rotary_tables(theta, 1, c.size(1))", "test_cache_equals and move"),
    ("model_lime.py", "torch.cat((-angle.sin(), angle.sin()), -1)",
     "torch.cat((angle.sin(), -angle.sin()), -1)", "test_lime_equals"),
    ("model_lime.py", "F.silu(self.gate(x)) * self.up(x)", "F.gelu(self.gate(x)) * self.up(x)",
     "test_lime_equals"),
    ("model_lime.py", '        if self.identity:\n', '        if not self.identity:\n',
     "test_lime_routers"),
    ("model_lime.py", "return self.mix_again_backward(R, keys), self.mix_again_backward(R, values)",
     "return self.mix_again_backward(R, keys), buffer[self.sources[-1]][1]", "test_lime_equals"),
    ("model_lime.py", 'if config.router == "none" or layer == 0:',
     'if config.router == "none" or layer <= 1:', "test_lime_layers"),
    ("model_lime.py", 'else 0.02\n', 'else 0.05\n', "test_initial_values and lime"),
    ("model_lime.py", '"router": (c.router_lr, c.router_decay)', '"router": (1.0, c.router_decay)',
     "test_lime_routers_learn"),
    ("model_lime.py", "R.mean((0, 3))", "R.mean((0, 1))", "test_lime_inspect"),
    ("model_lime.py", "return own.repeat(1, len(self.sources)) / len(self.sources)",
     "return own.repeat(1, len(self.sources)) / self.n_kv_head", "test_lime_equals"),
    ("model_lime.py", "change = F.linear(x, self.W)", "change = F.linear(x.roll(1, 1), self.W)",
     "test_lime_equals"),
    ("model_lime.py", "range(layer % j, layer + 1, j)", "range((layer + 1) % j, layer + 1, j)",
     "test_lime_layers"),
    ("model_lime.py", "    return range(layer + 1)\n", "    return range(layer, -1, -1)\n",
     "test_lime_layers"),
    ("model_lime.py", "        k = rotate(k, rotary)\n        if cache is not None:",
     "        if cache is not None:", "test_lime_equals"),
    ("model_lime.py", "            buffer.append(x)  ", "            buffer.append(2 * x)  ",
     "test_denseformer"),
    ("model_ultramem.py", "beside = memory.n_weights(self) + self.heads", "beside = self.heads",
     "test_ultramem_all_memories_have_equal"),
    ("model_ultramem.py", "keys = self.k_norm(self.keys) ",
     "keys = self.keys * self.k_norm.weight ", "test_ultramem_equals_its_equations"),
    ("model_ultramem.py", "        self.v.copy_(torch.where(near, v, -v))",
     "        self.v.copy_(v)", "test_ultramem_singular_vectors"),
    ("model_ultramem.py", "scores = scores * p[..., None]", "scores = scores + 0 * p[..., None]",
     "test_ultramem_equals_its_equations"),
    ("model_ultramem.py", "        r.u.fill_(1) ", "        r.u.fill_(-1) ",
     "test_ultramem_singular_vectors"),
    ("model_ultramem.py", "later[self.added_after[layer]] = y", "later[layer] = y",
     "test_ultramem_v1_reads"),
    ("model_ultramem.py", "values.update(lr=1e-3, schedule=False)", "values.update(lr=1e-3)",
     "test_ultramem_rates"),
    ("model_ultramem.py", "torch.special.xlogy(share, share * n_slots)",
     "torch.special.xlogy(share, share)", "test_ultramem_inspect"),
    ("model_ultramem.py", "std = (ratio / c.pre_value_dim) ** 0.25",
     "std = (ratio / c.pre_value_dim) ** 0.5", "test_ultramem_appendix_start"),
    ("model_ultramem.py", "weights = scores.softmax(-1).view(len(x), -1, 1)",
     "weights = scores.view(len(x), -1, 1).softmax(1)", "test_ultramem_predecessors"),
    ("model_ultramem.py", '        if not self.training:\n', '        if False:\n',
     "test_loss_is_the_mean and moe"),
    ("model_midus.py", "turns = context * theta / (2 * math.pi)", "turns = context * theta",
     "hugging_face_logits"),
    ("model_midus.py", "return self.attn(self.attn_norm(x), rotary, cache) ",
     "return self.attn(x, rotary, cache) ", "table_11"),
    ("model_midus.py", "source = model.blocks[i].state_dict() ",
     "source = model.blocks[i - 1].state_dict() ", "table_11"),
    ("model_midus.py", 'p.requires_grad_(name.startswith("inserted."))',
     'p.requires_grad_(name.startswith("inserted.") or p.ndim == 1)', "nothing_is_kept"),
    ("model_midus.py", "model.load_state_dict({**model.state_dict(), **base.state_dict()})", "pass",
     "bit_for_bit"),
    ("model_midus.py", 'p.requires_grad_(name.startswith("inserted."))',
     'p.requires_grad_(name.startswith(("inserted.", "norm")))', "nothing_is_kept"),
    ("model_midus.py", "p.normal_(0, p.size(1) ** -0.5", "p.normal_(0, p.size(-1) ** -0.5",
     "initial_values and midus"),
    ("model_midus.py", "layer.values[self.config.n_head * self.config.top_k:]",
     "layer.values[self.config.top_k:]", "slots_and"),
    ("model_midus.py", 'if key not in free and value not in (-1, "", have[key]):',
     "if key not in have:", "midus_start"),
    ("model_midus.py", "return self.query_norm(heads).flatten(2)", "return self.query_norm(a)",
     "table_11"),
    ("model_midus.py", "left, right = u[:, :, 0], vh[:, 0]", "left, right = u[:, :, 0], vh[:, 1]",
     "midus_memories"),
    ("model_midus.py", '    block.attn.W_O.weight.zero_()\n', "", "bit_for_bit"),
    ("model_midus.py", 'A["mlp_norm.weight"] = (norm[order] + norm) / 2',
     'A["mlp_norm.weight"] = norm[order]', "opt_deus_puts"),
    ("model_hiermem.py", 'return [round(int(r) * share) for r in self.ranks.split(",")]',
     'return [int(r) for r in self.ranks.split(",")]', "table_9"),
    ("model_hiermem.py", "sin = torch.cat((-angle.sin(), angle.sin()), -1)",
     "sin = torch.cat((angle.sin(), -angle.sin()), -1)", "appendix_i and ffn"),
    ("model_hiermem.py", "memory.heads(q, y))", "memory.heads(rotate(q, rotary), y))",
     "appendix_i and kv"),
    ("model_hiermem.py", "(F.silu(x @ M1.mT) * (x @ M2.mT)) @ M3",
     "((x @ M1.mT) * F.silu(x @ M2.mT)) @ M3", "appendix_i and ffn"),
    ("model_hiermem.py", "inverse = inverse[:, None].to(device)",
     "inverse = node[:, None].to(device) % len(rows)", "appendix_i"),
    ("model_hiermem.py", "self.requires_grad_(not config.frozen)", "self.requires_grad_(True)",
     "frozen_anchor or frozen_training_moves"),
    ("model_hiermem.py", "below = config.nodes[-1] // config.nodes[int(l) - 1]",
     "below = config.nodes[-1] // config.factors[int(l) - 1]", "appendix_i or generic"),
    ("model_hiermem.py", "return same.tril(seen.size(1) - here.size(1))[:, None]",
     "return same.tril()[:, None]", "cache_equals and hiermem"),
    ("model_hiermem.py", '        x = self.norm(x)\n', "", "appendix_i and ffn"),
    ("model_hiermem.py", 'best[l - 1] if node == "best"', 'best[l - 2] if node == "best"',
     "prints_the_path"),
    ("model_hiermem.py", "rate = learning_rate * self.config.memory_lr", "rate = learning_rate",
     "everything_decays"),
    ("model_hiermem.py", "return W(x) + 2 * (x @ A.mT) @ B", "return W(x) + (x @ A.mT) @ B",
     "appendix_i and lora"),
    ("sample.py", 'fields.get("block_size", have["block_size"])', 'have["block_size"]',
     "a_start_may_change"),
    ("sample.py", "            model.init_weights()    #", "            pass    #",
     "copied_model_file"),
    ("sample.py", "        assemble(source, ckpt)", "        pass", "mistake and start"),
    ("sample.py", '"mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up"',
     '"mlp.gate_proj": "mlp.up", "mlp.up_proj": "mlp.gate"', "hugging_face_logits"),
    ("sample.py", "logits / temperature", "logits * temperature", "top_k_top_p"),
    ("sample.py", "probs[before >= top_p] = 0", "probs[probs.cumsum(-1) >= top_p] = 0",
     "top_k_top_p"),
    ("sample.py", "max(1, block_size // 2)", "max(1, block_size // 4)", "full_context"),
    ("sample.py", "idx[:, start + cache.pos:]", "idx[:, cache.pos:]", "cached_generation"),
    ("sample.py", "yield decoder.decode(EOT.encode())", "yield decoder.decode(tok.token_bytes(i))",
     "opens_with_eot"),
    ("sample.py", "torch.tensor([[tok.eot] + tok.encode(c.prompt)]",
     "torch.tensor([tok.encode(c.prompt)]", "opens_with_eot"),
    ("sample.py", "if end > first and", "if end >= first and", "inspect_draws"),
    ("sample.py", 'grid.index_select(axes.index("token"), tokens).mean(axes.index("token"))',
     'grid.mean(axes.index("token"))', "inspect_draws"),
    ("train.py", "    locked = lock(out)", "    locked = open(out / '.lock', 'a')", "two_runs"),
    ("train.py", 'max_iters < ckpt["step"]', 'max_iters < ckpt["step"] - 1', "resume_refuses"),
    ("train.py", ' and name != "head"}', "}", "muon_trains"),
    ("train.py", '    torch.set_rng_state(ckpt["rng"])', "    pass", "goes_on_for_longer"),
    ("train.py", "first = (skip_steps + step) * rows", "first = step * rows", "seed_decides"),
    ("train.py", "(loss * world).backward()", "loss.backward()", "two_processes"),
    ("train.py", "falling = max(1, max_iters - warmup_iters)", "falling = max(1, max_iters)",
     "test_schedules"),
    ("train.py", "(boost - 1) * max(0.0, 1 - step / (max_iters * until))",
     "(boost - 1) * max(0.0, 1 - step / max_iters)", "own_rate"),
    ("train.py", "p.grad = average_sparse(p.grad)", "pass", "two_processes"),
    ("train.py", "            y = y.masked_fill(lengths == 0, -1)", "            pass",
     "evaluation_is"),
    ("train.py", '    net.train()\n    return values', "    return values", "evaluation_is"),
    ("train.py", 'must_be_finite(values["val_loss"], f"the validation loss after step {step}")',
     "pass", "not_a_number"),
    ("experiments/run.py", '(f"model_{model}.py", "kernels.py", "train.py"):',
     '(f"model_{model}.py", "train.py"):', "source_hash"),
    ("experiments/run.py", "need(memo.read_text() == flags,", "need(memo.read_text(),",
     "begun_with_other"),
    ("experiments/run.py", "preexec_fn=end_with_parent if linux else None)", "preexec_fn=None)",
     "killed"),
    ("experiments/run.py", 'need(len(ids) == 1, f"results on', 'need(len(ids) <= 2, f"results on',
     "begun_with_other"),
    ("experiments/run.py", 'curve[-1]["step"]) <= curve[-1]["step"] / 20:',
     'curve[-1]["step"]) <= curve[-1]["step"]:', "trend or the_table"),
    ("experiments/run.py", "* stdev(d) / len(d) ** 0.5", "* stdev(d) / len(d)",
     "verdicts or the_table"),
    ("experiments/tasks.py", "right = rng.randint(1, largest - v)",
     "right = rng.randint(1, largest)", "arithmetic"),
    ("experiments/tasks.py", "< PRECEDENCE[operator] + is_right:",
     "<= PRECEDENCE[operator] + is_right:", "arithmetic or parentheses"),
    ("experiments/tasks.py", "if steps[root] >= 3 and", "if steps[root] >= 2 and", "prosqa"),
    ("experiments/tasks.py", 'for _ in range(thing["mentions"]):',
     'for _ in range(thing["mentions"] - 1):', "facts_are"),
    ("experiments/tasks.py", "domain = new if source.startswith(c.prefix) else old",
     "domain = old if source.startswith(c.prefix) else new", "domains_are"),
    ("experiments/tasks.py", "targets = [-1] * (len(prompt) - 1) + answer",
     "targets = [-1] * (len(prompt) - 1) + prompt[-1:] + answer[:-1]", "score"),
    ("experiments/analysis.py", 'for name in ("W_UV", "router", "memory", "W_V"):',
     'for name in ("W_V", "router", "memory", "W_UV"):', "states_are"),
    ("experiments/analysis.py", "output = output[-1] if isinstance",
     "output = output[0] if isinstance", "states_are"),
    ("experiments/analysis.py", "best = path[:, level - 1].clone()", "best = path[:, -1].clone()",
     "without_the_best"),
    ("experiments/analysis.py", "loss = model(x, y)[1] * (y >= 0).sum()", "loss = model(x, y)[1]",
     "importance_is_the_slope"),
    ("experiments/analysis.py", "    dead = use == 0", "    dead = use > 0", "slots_are"),
    ("experiments/analysis.py", "(a1 - b1).abs()])", "(a1 - a2).abs()])", "words_in"),
    ("experiments/bank.py", "leaf // below == subtree)", "leaf % factors[0] == subtree)",
     "split_puts"),
    ("experiments/bank.py", "need(overwrite or not target.exists(),", "need(True,", "refuses_what"),
    ("experiments/bank.py", 'same = key.startswith("bank.") or torch',
     'same = key.startswith("b") or torch', "refuses_what"),
    ("experiments/bank.py", "rows[moved] = theirs[name][moved]", "rows[:-1] = theirs[name][:-1]",
     "a_job_trains"),
    ("experiments/bank.py", "trained[level] |= moved", "pass", "refuses_what"),
    ("experiments/bank.py", "rows[node:node + 1], generator)",
     "rows[node + 1:node + 2], generator)", "removed_node"),
]

if __name__ == "__main__":
    guard("mutants.py")
    sys.exit(main(sys.argv[1:]))
