"""The whole test suite: `python test_all.py` or `pytest test_all.py` (add --slow for the long ones; CI runs them)."""
import os

os.environ.setdefault("TRITON_INTERPRET", "1")    # before kernels.py is imported: the Triton kernels run on CPU tensors
import functools
import importlib
import json
import math
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))
import kernels
import model_move
import prepare_fineweb

torch.set_num_threads(1)                                       # sizes here are tiny
slow = pytest.mark.skipif(not os.environ.get("NANOMEM_SLOW"), reason="slow: python test_all.py --slow")

# ================================================================ prepare_fineweb.py: data, tokenizers, configure()

# ================================================================ kernels.py

# ================================================================ every model: the generic block

VARIANTS = {                                                   # every model file's main switches, at a size that trains in milliseconds
    "move": [dict(), dict(memory="none"), dict(memory="lave"), dict(memory="lave", memory_scale=2, gate_v=1), dict(n_kv_head=1), dict(slots=3, gate_v=0),
             dict(attention="mla"), dict(attention="mla", memory="lave"), dict(attention="mla", memory="none", n_kv_head=1), dict(sparse_memory=True)],
}
CASES = [pytest.param(name, switches, id=f"{name}-{'-'.join(f'{k}={v}' for k, v in switches.items()) or 'default'}")
         for name, rows in VARIANTS.items() for switches in rows]
SIZE = dict(n_layer=3, n_head=2, n_embd=32, vocab_size=61, block_size=16)


def make(name="move", dtype=torch.float32, randomize=True, seed=0, **switches):
    """A small model; randomize: every matrix random, since output projections and gates start at zero, which would hide errors."""
    module = importlib.import_module(f"model_{name}")
    torch.manual_seed(seed)
    model = module.Model(module.Config(**{**SIZE, **switches}))
    model.init_weights()
    if randomize:
        for p in model.parameters():
            p.data.normal_(0, 0.3) if p.ndim > 1 else p.data.uniform_(0.5, 1.5)
    return model.to(dtype)


def some_tokens(B=2, T=12, vocab=61, seed=0):
    return torch.randint(0, vocab, (B, T), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name, switches", CASES)
def test_loss_falls_and_every_parameter_learns(name, switches):
    model = make(name, randomize=False, **switches)
    idx = some_tokens(4, 17)
    before, first = {n: p.clone() for n, p in model.named_parameters()}, None
    groups = model.param_groups("adamw", 1e-2, 0.0)
    assert {id(p) for g in groups for p in g["params"]} == {id(p) for p in model.parameters()}
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters())), "a parameter is in two groups"
    sparse = [p for g in groups if g["kind"] == "sparse" for p in g["params"]]
    optimizers = [torch.optim.AdamW([p for p in model.parameters() if not any(p is q for q in sparse)], lr=1e-2)]
    optimizers += [torch.optim.SparseAdam(sparse, lr=1e-2)] if sparse else []
    for step in range(20):
        loss = model(idx[:, :-1], idx[:, 1:])[1]
        first = first if first is not None else loss.item()
        loss.backward()
        for o in optimizers:
            o.step()
            o.zero_grad()
    assert first == pytest.approx(math.log(61), abs=0.1) and loss.item() < 0.7 * first
    still = [n for n, p in model.named_parameters() if torch.equal(p, before[n])]
    assert not still, f"never updated: {still}"


@pytest.mark.parametrize("name, switches", CASES)
def test_cache_equals_full_forward(name, switches):
    model, idx = make(name, **switches).eval(), some_tokens(2, 12)
    with torch.no_grad():
        full = model(idx)[0]
        cache = model.new_cache(2, 12)
        parts = [model(idx[:, a:b], cache=cache)[0] for a, b in ((0, 5), (5, 6), (6, 9), (9, 10), (10, 11), (11, 12))]
    assert [p.shape[1] for p in parts] == [1] * 6 and cache.pos == 12
    torch.testing.assert_close(torch.cat(parts, 1), full[:, [4, 5, 8, 9, 10, 11]], atol=2e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="cache holds 12 tokens"):
        model(idx[:, :1], cache=cache)


@pytest.mark.parametrize("name, switches", CASES)
def test_later_tokens_do_not_change_earlier_logits(name, switches):
    model, idx = make(name, **switches).eval(), some_tokens(2, 12)
    other = idx.clone()
    other[:, 7:] = some_tokens(2, 5, seed=1)
    with torch.no_grad():
        a, b = model(idx)[0], model(other)[0]
    torch.testing.assert_close(a[:, :7], b[:, :7], atol=1e-5, rtol=1e-5)
    assert (a[:, 7:] - b[:, 7:]).abs().max() > 1e-3


@pytest.mark.parametrize("name, switches", CASES)
def test_loss_is_the_mean_over_targets_and_chunks_do_not_matter(name, switches):
    model, idx = make(name, torch.float64, **switches), some_tokens(2, 13)
    x, y = idx[:, :-1], idx[:, 1:].clone()
    y[0, 3:9] = -1
    loss = model(x, y)[1]
    logp = F.log_softmax(model(x)[0], -1)
    want = -logp[y >= 0].gather(1, y[y >= 0][:, None]).mean()
    torch.testing.assert_close(loss.double(), want.double(), atol=1e-6, rtol=1e-6)
    dense = [p for n, p in model.named_parameters() if not (switches.get("sparse_memory") and n.endswith("table"))]
    whole = torch.autograd.grad(loss, dense)
    hidden = lambda at_once: functools.partial(type(model).loss, model, at_once=at_once)
    model.loss = hidden(61 * 5)                                # chunks of five tokens
    chunked = model(x, y)[1]
    torch.testing.assert_close(chunked, loss, atol=1e-6, rtol=1e-6)
    for a, b in zip(whole, torch.autograd.grad(chunked, dense)):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
    assert model(x, torch.full_like(y, -1))[1].item() == 0     # a batch without targets is no division by zero


@pytest.mark.parametrize("name", VARIANTS)
def test_file_cut_at_the_fold_still_trains(name, tmp_path, monkeypatch):
    text = (ROOT / f"model_{name}.py").read_text()
    above, below = text.split("# ================================================================ below the fold")
    assert len(above.splitlines()) <= 420, "above the fold a file has about 420 lines at most"
    (tmp_path / f"model_{name}_above.py").write_text(above)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module(f"model_{name}_above")
    model = module.Model(module.Config.from_depth(2, vocab_size=61, block_size=16))
    model.init_weights()
    idx = some_tokens(2, 13)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        losses.append(model(idx[:, :-1], idx[:, 1:])[1])
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name, switches", CASES)
def test_flops_per_token_against_torch(name, switches):
    from torch.utils.flop_counter import FlopCounterMode
    model = make(name, **{**switches, "sparse_memory": False})
    T = model.config.block_size
    idx = some_tokens(2, T + 1)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(idx[:, :-1], idx[:, 1:])[1].backward()
    assert model.flops_per_token() == pytest.approx(counter.get_total_flops() / (2 * T), rel=0.02)


@pytest.mark.parametrize("name", VARIANTS)
def test_meta_device_depth_dial_and_inspect(name):
    module = importlib.import_module(f"model_{name}")
    start = time.time()
    with torch.device("meta"):
        for preset, fields in module.PRESETS.items():
            assert module.Model(module.Config(**fields)).param_counts()["total"] > 1e8
    assert time.time() - start < 60
    assert [module.Config.from_depth(d).n_embd for d in (1, 4, 12)] == [64, 256, 768]
    assert all(getattr(module.Config.from_depth(4, **module.DENSE), k) == v for k, v in module.DENSE.items())
    assert set(module.RECIPE) <= {"adamw", "muon"}
    model = make(name)
    for key, (tensor, axes) in model.inspect(some_tokens(1, 9)).items():
        assert tensor.ndim == len(axes) and torch.isfinite(tensor).all() and tensor.std() > 0


@pytest.mark.parametrize("name", VARIANTS)
def test_shared_tensors_start_equal_across_variants(name):
    """Paired comparisons need it: adding a memory must not change how anything else is initialised."""
    module = importlib.import_module(f"model_{name}")
    with_memory, without = make(name, randomize=False, seed=7), make(name, randomize=False, seed=7, **module.DENSE)
    theirs, ours = dict(without.named_parameters()), dict(with_memory.named_parameters())
    assert theirs.keys() < ours.keys() and all(torch.equal(p, ours[n]) for n, p in theirs.items())
    other = dict(make(name, randomize=False, seed=8).named_parameters())
    assert not torch.equal(other["embed.weight"], ours["embed.weight"])


# ================================================================ model_move.py: MoVE

MOVE_COUNTS = {                                                # parameters: the paper's tables, and spec formulas where it rounds
    "d12": 185_597_976, "d20": 560_988_200, "d32": 1_879_048_256, "d12_mla": 172_105_752, "d20_mla": 498_524_200,
    "d12_move_x1": 185_597_976 + 302_376_960, "d20_move_x1": 560_988_200 + 841_676_800, "d32_move_x1": 1_879_048_256 + 2_165_309_440,
    "d12_lave_x1": 185_597_976 + 302_017_536, "d12_mla_move_x1": 172_105_752 + 9_824_256, "d12_mla_move_x32": 172_105_752 + 312_662_016,
    "d20_mla_move_x1": 498_524_200 + 29_030_400, "d12_mla_lave_x1": 172_105_752 + 9_464_832, "d20_mla_lave_x1": 498_524_200 + 26_342_400,
}


@pytest.mark.parametrize("preset, total", MOVE_COUNTS.items())
def test_move_parameter_counts(preset, total):
    with torch.device("meta"):
        model = model_move.Model(model_move.Config(**model_move.PRESETS[preset]))
    counts = model.param_counts()
    assert counts["total"] == total == sum(p.numel() for p in model.parameters())
    c = model.config
    tables = 0 if c.memory == "none" else c.slots if c.memory == "move" else len(model_move.lave_layers(c))
    assert counts["memory"] == tables * c.vocab_size * c.d_kv
    assert counts["active"] == total - (c.vocab_size - 1) * (tables * c.d_kv + c.n_embd)


def slow_move(model, idx):
    """MoVE's forward in loops over layers, positions, heads and slots, from the paper's equations; float64."""
    c, P = model.config, {n: p.double() for n, p in model.named_parameters()}
    norm = lambda x: x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float64).eps).sqrt()
    d_h, out = c.n_embd // c.n_head, []

    def turn(x, position):                                     # pairs (j, j + d_h/2) as complex numbers, times exp(-i position theta_j)
        angle = position * 10000.0 ** (-torch.arange(d_h // 2).double() * 2 / d_h)
        z = torch.complex(x[:d_h // 2], x[d_h // 2:]) * torch.polar(torch.ones_like(angle), -angle)
        return torch.cat((z.real, z.imag))

    for tokens in idx.tolist():
        x0 = norm(P["embed.weight"][tokens])
        x = x0
        for l in range(c.n_layer):
            x = P["resid_lambda"][l] * x + P["x0_lambda"][l] * x0
            h, w = norm(x), lambda name: P[f"blocks.{l}.attn.{name}.weight"]
            y = torch.zeros_like(x)
            for head in range(c.n_head):
                kv, span = head * c.n_kv_head // c.n_head, lambda i: slice(i * d_h, (i + 1) * d_h)
                keys, values = [], []
                for t, token in enumerate(tokens):
                    v = w("W_V")[span(kv)] @ h[t]                                                           # eq. 1
                    gates = 2 * torch.sigmoid(w("memory.W_G") @ h[t]).view(c.n_kv_head, -1)[kv]             # eq. 3
                    if c.gate_v:
                        v, gates = gates[0] * v, gates[1:]
                    for i in range(c.slots):
                        v = v + gates[i] * P["bank.table"][token, i, span(kv)]                              # eqs. 2, 4
                    keys.append(norm(turn(w("W_K")[span(kv)] @ h[t], t)))
                    values.append(v)
                    q = norm(turn(w("W_Q")[span(head)] @ h[t], t))
                    scores = torch.softmax(torch.stack([q @ k / d_h ** 0.5 for k in keys]), 0)
                    y[t, span(head)] = sum(s * v for s, v in zip(scores, values))
            x = x + y @ w("W_O").T
            up = torch.relu(norm(x) @ P[f"blocks.{l}.mlp.up.weight"].T) ** 2
            x = x + up @ P[f"blocks.{l}.mlp.down.weight"].T
        z = norm(x) @ P["head.weight"][:c.vocab_size].T
        out.append(15 * torch.tanh(z / 15))
    return torch.stack(out)


@pytest.mark.parametrize("switches", [dict(), dict(n_head=4, n_kv_head=2), dict(gate_v=0, slots=3)], ids=str)
def test_move_equals_its_equations_written_as_loops(switches):
    model, idx = make(dtype=torch.float64, **switches), some_tokens(2, 7)
    with torch.no_grad():
        torch.testing.assert_close(model(idx)[0].double(), slow_move(model, idx), atol=2e-5, rtol=1e-5)


def test_move_gates_start_at_one():
    gates, axes = make(randomize=False).inspect(some_tokens(1, 9))["gates"]
    assert axes == ("layer", "token", "head", "slot") and gates.shape == (3, 9, 2, 3) and (gates == 1).all()
    gates, _ = make().inspect(some_tokens(1, 9))["gates"]
    assert gates.min() >= 0 and gates.max() <= 2 and gates.std() > 0.1


@pytest.mark.parametrize("attention", ["mha", "mla"])
def test_move_with_an_empty_bank_is_the_standard_model(attention):
    model, plain, idx = make(gate_v=0, attention=attention), make(memory="none", attention=attention), some_tokens()
    model.load_state_dict(plain.state_dict(), strict=False)
    assert (model(idx)[0] - plain(idx)[0]).abs().max() > 1e-2
    model.bank.table.data.zero_()
    torch.testing.assert_close(model(idx)[0], plain(idx)[0])


def test_move_reads_the_bank_once_and_every_layer_feeds_its_gradient(monkeypatch):
    model, idx, reads = make(dtype=torch.float64), some_tokens(2, 13), []
    monkeypatch.setattr(model_move, "gather_rows", lambda table, rows, sparse: reads.append(rows) or kernels.gather_rows(table, rows, sparse))

    def bank_gradient(listening):                              # the other layers see a bank without gradient
        class Ear(torch.nn.Module):
            def __init__(self, memory):
                super().__init__()
                self.memory = memory

            def forward(self, x, v, reading):
                return self.memory(x, v, reading._replace(rows=reading.rows.detach()))
        kept = [block.attn.memory for block in model.blocks]
        for layer, block in enumerate(model.blocks):
            block.attn.memory = kept[layer] if layer in listening else Ear(kept[layer])
        grad, = torch.autograd.grad(model(idx[:, :-1], idx[:, 1:])[1], model.bank.table)
        for memory, block in zip(kept, model.blocks):
            block.attn.memory = memory
        return grad

    whole = bank_gradient({0, 1, 2})
    assert len(reads) == 1 and torch.equal(reads[0], idx[:, :-1].unique())
    parts = [bank_gradient({layer}) for layer in range(3)]
    assert all(part.abs().max() > 1e-6 for part in parts)
    torch.testing.assert_close(sum(parts), whole)
    untouched = [t for t in range(61) if t not in idx[:, :-1]]
    assert (whole[untouched] == 0).all() and untouched


@pytest.mark.parametrize("memory", ["move", "lave"])
def test_move_sparse_and_dense_training_agree_on_step_one(memory):
    idx, after = some_tokens(2, 13), []
    for sparse in (False, True):
        model = make(memory=memory, sparse_memory=sparse, seed=3)
        model(idx[:, :-1], idx[:, 1:])[1].backward()
        tables = [p for n, p in model.named_parameters() if n.endswith("table")]
        assert all(p.grad.is_sparse == sparse for p in tables)
        for p in tables:
            if sparse:
                assert p.grad._nnz() == len(idx[:, :-1].unique()) and p.grad._indices().shape[0] == 1
        optimizer = (torch.optim.SparseAdam if sparse else torch.optim.Adam)(tables, lr=0.1, eps=1e-10)
        grads = [p.grad.to_dense() if sparse else p.grad.clone() for p in tables]
        optimizer.step()
        after.append((grads, [p.detach() for p in tables]))
    for (grad, table), (sparse_grad, sparse_table) in zip(zip(*after[0]), zip(*after[1])):
        torch.testing.assert_close(sparse_grad, grad, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(sparse_table, table, atol=5e-4, rtol=0)    # of a step of 0.1: the two Adams place eps differently


def test_move_sparse_gradients_accumulate_over_micro_batches():
    model, dense = make(sparse_memory=True, seed=3), make(seed=3)
    for seed in (0, 1):
        idx = some_tokens(2, 9, seed=seed)
        for m in (model, dense):
            m(idx[:, :-1], idx[:, 1:])[1].backward()
    torch.testing.assert_close(model.bank.table.grad.to_dense(), dense.bank.table.grad)


def test_lave_has_tables_of_its_own_in_every_second_layer():
    layers = lambda L, x: sorted(model_move.lave_layers(model_move.Config.from_depth(L, memory="lave", memory_scale=x)))
    assert layers(12, 1) == [1, 3, 5, 7, 9, 11] and layers(5, 1) == [0, 2, 4] and layers(4, 2) == [0, 1, 2, 3]
    model, idx = make(memory="lave"), some_tokens(1, 5)
    attn = model.blocks[2].attn
    assert model.bank is None and model.blocks[1].attn.memory is None and attn.memory.bank.table is not model.blocks[0].attn.memory.bank.table
    x, v = torch.randn(1, 5, 32), torch.randn(1, 5, 2, 16)
    rows = attn.memory.bank.table[idx[0], 0].view(5, 2, 16)
    gate = 2 * torch.sigmoid(attn.memory.W_G(x))[0][..., None]                                              # (5, 2, 1), per head
    torch.testing.assert_close(attn.memory(x, v, model.read(idx))[0], v[0] + gate * rows)                   # eq. 6


def test_caches_have_the_size_of_plain_attention():
    def numbers(**switches):
        model = make(**switches)
        cache = model.new_cache(1, 10)
        model(some_tokens(1, 4), cache=cache)
        return sum(t.numel() for t in cache.store.values()), {key for _, key in cache.store}
    assert numbers() == numbers(memory="none") == (3 * 10 * 2 * 32, {"k", "v"})
    assert numbers(attention="mla") == numbers(attention="mla", memory="none") == (3 * 10 * 2 * 1, {"c"})   # d_c = H_kv * max(1, 16 // 32)


def test_move_overhead_is_the_papers_equation_10():
    """FLOPs that MoVE adds to the blocks: H(M+1) / (12d + 2T); D12 at x1 .. x8 and the paper's 1.8% (D32, M = 32, T = 2048)."""
    def ratio(preset):
        with torch.device("meta"):
            move, plain = (model_move.Model(model_move.Config(**model_move.PRESETS[p])) for p in (preset, preset.split("_")[0]))
        head = 6 * plain.head.weight.numel()
        return 100 * (move.flops_per_token() - plain.flops_per_token()) / (plain.flops_per_token() - head)
    assert [round(ratio(f"d12_move_x{x}"), 2) for x in (1, 2, 4, 8)] == [0.32, 0.59, 1.13, 2.21]
    assert round(ratio("d32_move_x2"), 1) == 1.8


def test_move_scale_and_heads():
    C = model_move.Config
    assert [C.from_depth(12, memory_scale=x).slots for x in (1, 2, 4, 8)] == [6, 12, 24, 48] and C.from_depth(5).slots == 3
    assert [C.from_depth(d).n_head for d in (1, 4, 6, 12, 20, 32)] == [1, 2, 3, 6, 10, 16]
    assert [C.from_depth(12, memory=m).gate_v for m in ("move", "lave", "none")] == [1, 0, 0]
    saved = vars(C.from_depth(3, memory_scale=2))
    assert vars(C(**saved)) == saved, "a checkpoint's fields must build the same Config"


@pytest.mark.parametrize("fields, message", [
    (dict(n_embd=30), "n_embd=30, n_head=4: n_embd must be a multiple of 2\\*n_head"), (dict(n_kv_head=3), "n_head=4, n_kv_head=3"),
    (dict(memory="mova"), "memory='mova': choose one of none, move, lave"), (dict(attention="mqa"), "attention='mqa': choose one of mha, mla"),
    (dict(gate_v=2), "gate_v=2"), (dict(memory_scale=0), "memory_scale=0"), (dict(memory="lave", memory_scale=4), "1 or 2 for memory=lave"),
    (dict(slots=0), "slots=0: must be at least 1; memory=none"), (dict(n_layer=0), "n_layer=0: must be at least 1"), (dict(vocab_size=-5), "vocab_size=-5"),
])
def test_move_config_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        model_move.Config(**{**dict(n_layer=2, n_head=4, n_embd=64, vocab_size=61), **fields})


# ================================================================ sample.py

# ================================================================ train.py

TINY = ["--depth=1", "--block_size=32", "--batch_tokens=128", "--batch_size=4", "--eval_tokens=256", "--log_interval=1", "--sample_tokens=0"]


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    """A data folder of bytes: some easy text, enough for a few epochs of tiny runs."""
    folder = tmp_path_factory.mktemp("text")
    words = "the memory of a model is a table of values that every layer may read and a gate decides how much".split()
    rng = random.Random(0)
    for i in range(40):
        (folder / f"{'val' if i < 4 else 'train'}-{i}.txt").write_text(" ".join(rng.choice(words) for _ in range(150)))
    return prepare_fineweb.prepare(source=str(folder), tokenizer="bytes", out=str(folder / "data"), workers=1)


def train(*flags, expect=""):
    """Run train.py in this process (nothing imports it); with `expect`, it must stop with a message that holds that text."""
    argv, sys.argv = sys.argv, ["train.py", *map(str, flags)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")                     # a run prints no warnings
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            if not expect:
                return runpy.run_path(str(ROOT / "train.py"), run_name="train")
            with pytest.raises(SystemExit) as stop:
                runpy.run_path(str(ROOT / "train.py"), run_name="train")
            assert expect in str(stop.value.code), stop.value.code
    finally:
        sys.argv = argv
        torch.set_grad_enabled(True)


def log_of(out, key="loss"):
    return {row["step"]: row[key] for row in map(json.loads, open(Path(out) / "log.jsonl")) if key in row}


def test_train_end_to_end(text_folder, tmp_path, capsys):
    out = tmp_path / "run"
    train(*TINY, f"--dataset={text_folder}", f"--out_dir={out}", "--max_iters=60", "--sample_tokens=30", "--target_bpb=7", "--target_loss=0.1")
    text, result = capsys.readouterr().out, json.loads((out / "result.json").read_text())
    losses, vals, bpbs = log_of(out), log_of(out, "val_loss"), log_of(out, "val_bpb")
    assert sorted(losses) == list(range(1, 61)) and sorted(vals) == [0, 15, 30, 45, 60]
    assert vals[0] == pytest.approx(math.log(257), abs=0.1) and vals[60] < 3.5 and losses[60] < losses[1] - 1.5
    assert all(bpbs[s] == pytest.approx(vals[s] / math.log(2)) for s in vals), "a byte is a token here: BPB is the loss in bits"
    assert result["val_loss"] == vals[60] and result["tokens"] == 60 * 128 and result["params"]["memory"] == 257 * 64
    assert len(result["source_hash"]) == 8 and result["data_id"] == prepare_fineweb.load_meta(text_folder)["data_id"]
    assert (out / "loss.png").read_bytes()[:4] == b"\x89PNG" and not (out / "ckpt.pt.tmp").exists()
    lines = text.splitlines()
    assert "target bpb 7.0: met" in text and "target loss 0.1: missed" in text and "a sample:" in text and str(out / "ckpt.pt") in text
    progress = [line for line in lines if re.match(r" +\d+/60 ", line)]
    assert len(progress) == 65 and all(len(line) <= 79 for line in progress) and "eta 0m" in progress[1] and "tok/s" in progress[1]
    ckpt = torch.load(out / "ckpt.pt", weights_only=True)
    assert ckpt["step"] == 60 and ckpt["config"]["model"] == "move" and ckpt["model_config"]["slots"] == 1


@pytest.mark.parametrize("switches", [["--optimizer=muon"], ["--optimizer=adamw", "--schedule=wsd"], ["--sparse_memory=True"], ["--memory=lave"]], ids=str)
def test_resume_is_exact(switches, text_folder, tmp_path):
    """Ctrl-C at step 10, resumed: every loss bit for bit the uninterrupted run's."""
    flags = [*TINY, *switches, f"--dataset={text_folder}", "--max_iters=16", "--eval_interval=4", "--grad_clip=1"]
    train(*flags, f"--out_dir={tmp_path / 'whole'}")
    calls = []

    def shuffled(self, seed, rows, original=prepare_fineweb.TokenShards.shuffled):
        calls.append(rows)
        if len(calls) == 11:
            raise KeyboardInterrupt
        return original(self, seed, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_fineweb.TokenShards, "shuffled", shuffled)
        train(*flags, f"--out_dir={tmp_path / 'part'}", expect="--init_from=resume")
    assert torch.load(tmp_path / "part" / "ckpt.pt", weights_only=True)["step"] == 10, "Ctrl-C saves"
    with open(tmp_path / "part" / "log.jsonl", "a") as f:
        f.write('{"step": 11, "loss": 9}\n{"step": 12, "lo')   # what a kill may leave behind the checkpoint
    train(f"--dataset={text_folder}", f"--out_dir={tmp_path / 'part'}", "--init_from=resume")
    for key in ("loss", "grad_norm", "lr", "val_loss"):
        assert log_of(tmp_path / "part", key) == log_of(tmp_path / "whole", key)
    a, b = (torch.load(tmp_path / run / "ckpt.pt", weights_only=True)["model"] for run in ("whole", "part"))
    assert all(torch.equal(a[k], b[k]) for k in a)


@slow
def test_sigkill_at_random_moments_loses_nothing(text_folder, tmp_path):
    flags = [sys.executable, str(ROOT / "train.py"), *TINY, f"--dataset={text_folder}", "--max_iters=120", "--eval_interval=2"]
    whole, part, kills = tmp_path / "whole", tmp_path / "part", 0
    subprocess.run([*flags, f"--out_dir={whole}"], check=True, capture_output=True)
    rng = random.Random(0)
    while True:
        began = (part / "ckpt.pt").exists()
        process = subprocess.Popen([*flags, f"--out_dir={part}"] + ["--init_from=resume"] * began, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for _ in range(rng.randint(8, 40)):                    # so many lines of output, then a little longer
            if not process.stdout.readline():
                break
        time.sleep(rng.random() * 0.05)
        if kills < 5 and process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        rest, _ = process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, rest.decode()
    assert kills >= 3
    for key in ("loss", "val_loss"):
        assert log_of(part, key) == log_of(whole, key)


def test_micro_batches_do_not_change_a_run(text_folder, tmp_path):
    logs = []
    for batch_size in (4, 1, 3):                               # 3 does not divide 4 rows: 2 is taken
        train(*TINY, f"--dataset={text_folder}", f"--out_dir={tmp_path}", "--max_iters=4", f"--batch_size={batch_size}", "--optimizer=adamw", "--sparse_memory=True")
        logs.append(log_of(tmp_path))
        torch.testing.assert_close(list(logs[0].values()), list(logs[-1].values()), atol=2e-5, rtol=0)
    assert json.loads((tmp_path / "result.json").read_text())["config"]["batch_size"] == 2


def test_targets_are_weighted_over_the_whole_batch(tmp_path):
    """Prompt/answer records: rows have different numbers of targets; the loss of a step is the mean over all of them."""
    rows = [{"prompt": "q" * (i % 7 + 1), "answer": "a" * (1 + i % 13)} for i in range(300)]
    (tmp_path / "qa.jsonl").write_text("\n".join(map(json.dumps, rows)))
    folder = prepare_fineweb.prepare(source=str(tmp_path / "qa.jsonl"), tokenizer="bytes", out=str(tmp_path / "data"), val_fraction=0.1, workers=1)
    logs = []
    for batch_size in (4, 1):
        train(*TINY, f"--dataset={folder}", f"--out_dir={tmp_path / 'run'}", "--max_iters=3", f"--batch_size={batch_size}", "--optimizer=adamw")
        logs.append(log_of(tmp_path / "run"))
    torch.testing.assert_close(list(logs[0].values()), list(logs[1].values()), atol=1e-5, rtol=0)


def torchrun(processes, *flags):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", str(ROOT / "train.py"), *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr


@slow
@pytest.mark.parametrize("sparse", [False, True])
def test_two_processes_equal_one(sparse, text_folder, tmp_path):
    """DDP over gloo: step 1's gradients within 1e-5, ten AdamW steps within 1e-3. After one step Adam's first moment is (1 - beta1) * gradient."""
    flags = [*TINY, f"--dataset={text_folder}", "--optimizer=adamw", "--beta1=0.5", f"--sparse_memory={sparse}", "--batch_size=1"]
    for steps, tolerance in ((1, 1e-5), (10, 1e-3)):
        train(*flags, f"--out_dir={tmp_path / 'one'}", f"--max_iters={steps}")
        torchrun(2, *flags, f"--out_dir={tmp_path / 'two'}", f"--max_iters={steps}")
        one, two = (torch.load(tmp_path / run / "ckpt.pt", weights_only=True) for run in ("one", "two"))
        if steps == 1:
            for a, b in zip(one["optimizers"], two["optimizers"]):
                for i, state in a["state"].items():
                    torch.testing.assert_close(2 * b["state"][i]["exp_avg"], 2 * state["exp_avg"], atol=tolerance, rtol=0)
        for name in one["model"]:
            torch.testing.assert_close(two["model"][name], one["model"][name], atol=tolerance if steps > 1 else 5e-3, rtol=0)
        assert log_of(tmp_path / "one", "val_loss")[steps] == pytest.approx(log_of(tmp_path / "two", "val_loss")[steps], abs=1e-3)


def test_schedules_and_clipping(text_folder, tmp_path):
    lrs = {}
    for name, flags in dict(wsd=["--schedule=wsd", "--warmdown=0.5", "--warmup_iters=0", "--min_lr=0.001"], cosine=["--schedule=cosine", "--warmup_iters=2"]).items():
        train(*TINY, f"--dataset={text_folder}", f"--out_dir={tmp_path}", "--max_iters=8", "--learning_rate=0.01", "--optimizer=adamw", "--grad_clip=0.01", *flags)
        lrs[name] = [log_of(tmp_path, "lr")[s] for s in range(1, 9)]
    assert lrs["wsd"] == pytest.approx([0.01] * 5 + [0.001 + 0.009 * f for f in (0.75, 0.5, 0.25)])
    cosine = [0.5 * (1 + math.cos(math.pi * i / 6)) for i in range(6)]
    assert lrs["cosine"] == pytest.approx([0.01 / 3, 0.02 / 3] + [0.01 * f for f in cosine])
    a, b = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(5, 2))
    a.grad, b.grad = torch.full((3,), 2.0), torch.sparse_coo_tensor([[1, 4]], torch.full((2, 2), 1.0), (5, 2)).coalesce()
    assert kernels.clip_grads([a, b], 1.0).item() == pytest.approx(4.0)
    assert a.grad.tolist() == pytest.approx([0.5] * 3) and b.grad.to_dense()[4].tolist() == pytest.approx([0.25] * 2, abs=1e-5)


def test_precedence_file_and_help(text_folder, tmp_path, capsys):
    (tmp_path / "config.py").write_text("import math\nlearning_rate = 0.003\nmax_iters = 2\nmemory_scale = 4\nhelper = [1]\n")
    result = train(*TINY, tmp_path / "config.py", f"--dataset={text_folder}", f"--out_dir={tmp_path / 'run'}", "--max_iters=1", "--optimizer=adamw")
    config = result["config"]                                  # globals < RECIPE < file < command line
    assert (config["log_interval"], config["weight_decay"], config["learning_rate"], config["max_iters"]) == (1, 0.1, 0.003, 1)
    assert result["model_config"].slots == 2 and config["grad_clip"] == 1.0 and train_muon_recipe(text_folder, tmp_path)["grad_clip"] == 0.0
    train("--help", expect="0")
    text = capsys.readouterr().out
    assert "--batch_tokens=-1" in text and "--memory_scale=1.0" in text and "tokens per optimizer step" in text


def train_muon_recipe(text_folder, tmp_path):
    return train(*TINY, f"--dataset={text_folder}", f"--out_dir={tmp_path / 'run'}", "--max_iters=1")["config"]


def test_a_copied_model_file_needs_no_registration(text_folder, tmp_path):
    for file in ("sample.py", "kernels.py", "prepare_fineweb.py", "experiments"):
        (tmp_path / file).symlink_to(ROOT / file)
    shutil.copy(ROOT / "train.py", tmp_path)                   # it looks for model files beside itself
    text = (ROOT / "model_move.py").read_text()
    (tmp_path / "model_mine.py").write_text(text.replace("F.relu(self.up(x)).square()", "F.gelu(self.up(x))"))
    done = subprocess.run([sys.executable, "train.py", "--model=mine", *TINY, f"--dataset={text_folder}", "--max_iters=2", "--sample_tokens=5"], cwd=tmp_path,
                          capture_output=True, text=True)
    assert done.returncode == 0 and "out/mine-d1/ckpt.pt" in done.stdout, done.stdout + done.stderr


def test_dry_run_bench_eval_only_and_profile(text_folder, tmp_path, capsys):
    train("--preset=d12_move_x8", "--dry_run=True", expect="0")
    text = capsys.readouterr().out
    assert "(50257, 48, 768)" in text and "GiB" in text and "bank.table" in text
    train(*TINY, "--bench=True", "--vocab_size=100", expect="0")
    text = capsys.readouterr().out
    assert re.search(r"model +[\d.]+ ms a step", text) and re.search(r"dense +[\d.]+ ms a step.* 1.000 of dense", text)
    train(*TINY, f"--dataset={text_folder}", f"--out_dir={tmp_path}", "--max_iters=3")
    want = log_of(tmp_path, "val_loss")[3]
    capsys.readouterr()
    train(f"--dataset={text_folder}", f"--out_dir={tmp_path}", "--init_from=resume", "--eval_only=True", expect="0")
    assert f"val {want:.4f} bpb" in capsys.readouterr().out
    train(*TINY, f"--dataset={text_folder}", f"--out_dir={tmp_path / 'p'}", "--profile=True", expect="trace.json")
    assert "traceEvents" in (tmp_path / "p" / "trace.json").read_text()[:5000]


def test_a_loss_that_is_not_a_number_stops_the_run(text_folder, tmp_path):
    train(*TINY, f"--dataset={text_folder}", f"--out_dir={tmp_path}", "--max_iters=40", "--eval_interval=40", "--learning_rate=1e30", "--optimizer=adamw", "--grad_clip=0",
          expect="rows 4 to 7 of the data order")
    assert not (tmp_path / "ckpt.pt").exists()


@pytest.fixture(scope="module")
def finished_run(text_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished")
    train(*TINY, f"--dataset={text_folder}", f"--out_dir={out}", "--max_iters=2")
    return out


@pytest.mark.parametrize("flags, message", [
    (["--model=mova"], "model=mova: no model_mova.py here; there are"), (["--memory_scael=2"], "memory_scale"), (["--depht=4"], "depth"), (["--depth=four"], "depth"),
    (["--dense"], "--dense=True"), (["--preset=d13"], "preset=d13"), (["--preset=d12", "--depth=4"], "preset and depth"), (["--optimizer=sgd"], "optimizer=sgd"),
    (["--dense=True", "--memory=lave"], "dense and memory"), (["--device=tpu"], "device=tpu"), (["--device=cuda"], "sees no CUDA GPU"), (["--dtype=float16"], "dtype=float16"),
    (["--schedule=linear"], "schedule=linear: choose cosine or wsd"), (["--batch_tokens=100"], "multiple of block_size=32"), (["--batch_tokens=0"], "batch_tokens=0"),
    (["--block_size=0"], "block_size=0: must be at least 1"), (["--log_interval=0"], "log_interval=0"), (["--beta2=1.5"], "beta2=1.5: must be between 0 and 1"),
    (["--grad_clip=-1"], "grad_clip"), (["--vocab_size=100"], "vocab_size=100"), (["--n_head=3"], "n_head=3"), (["--memory=ring"], "memory='ring'"), (["--gate_v=7"], "gate_v=7"),
    (["nowhere.py"], "no config file nowhere.py"), (["--init_from=nowhere"], "nowhere"), (["--init_from=resume"], "ckpt.pt"), (["--block_size=100000", "--batch_tokens=100000"], "too short"),
    (["--dataset=nowhere"], "nowhere"), (["--learning_rate=fast"], "learning_rate"), (["--max_iters="], "max_iters"), (["--seed=nan"], "seed"),
])
def test_train_bad_flags(flags, message, text_folder, tmp_path):
    train(*TINY, f"--dataset={text_folder}", f"--out_dir={tmp_path}", "--max_iters=1", *flags, expect=message)


@pytest.mark.parametrize("flags, message", [
    (["--depth=2"], "depth=2: the checkpoint has depth=1"), (["--memory=lave"], "memory=lave: the checkpoint has memory=move"), (["--seed=2"], "seed=2"),
    (["--batch_tokens=256"], "batch_tokens=256"), (["--dense=True"], "dense=True"), (["--optimizer=adamw"], "optimizer=adamw"), (["--memory_scale=2"], "memory_scale"),
])
def test_resume_refuses_what_would_change_the_run(flags, message, text_folder, finished_run):
    train(f"--dataset={text_folder}", f"--out_dir={finished_run}", "--init_from=resume", *flags, expect=message)


def test_resume_goes_on_for_longer_and_init_from_starts_anew(text_folder, finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path / "more")
    train(f"--dataset={text_folder}", f"--out_dir={tmp_path / 'more'}", "--init_from=resume", "--max_iters=4")
    assert sorted(log_of(tmp_path / "more")) == [1, 2, 3, 4]
    train(*TINY, f"--dataset={text_folder}", f"--out_dir={tmp_path / 'new'}", f"--init_from={finished_run}", "--max_iters=1")
    assert log_of(tmp_path / "new", "val_loss")[0] == pytest.approx(log_of(finished_run, "val_loss")[2], abs=1e-5)
    train(*TINY, f"--dataset={text_folder}", f"--out_dir={finished_run}", f"--init_from={finished_run}", expect="give another --out_dir")


@pytest.mark.parametrize("spoil, message", [
    (lambda p: p.write_bytes(p.read_bytes()[:1000]), "ckpt.pt"), (lambda p: p.write_bytes(b""), "ckpt.pt"), (lambda p: torch.save({"a": 1}, p), "nanoMem checkpoint"), (lambda p: p.unlink(), "ckpt.pt"),
])
def test_spoilt_checkpoints(spoil, message, text_folder, finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path / "run")
    spoil(tmp_path / "run" / "ckpt.pt")
    train(f"--dataset={text_folder}", f"--out_dir={tmp_path / 'run'}", "--init_from=resume", expect=message)


def test_layers_of_the_code_base():
    """Nothing imports train.py; a model file imports torch, the standard library and kernels; the top level holds the ten files."""
    allowed = {"train", "sample", "kernels", "prepare_fineweb", "test_all"}
    for path in ROOT.glob("*.py"):
        imports = set(re.findall(r"^(?:from|import) (\w+)", path.read_text(), re.M))
        assert "train" not in imports, path
        assert path.stem in allowed or path.stem.startswith("model_")
        if path.stem.startswith("model_"):
            assert imports <= {"torch", "kernels"} | sys.stdlib_module_names, (path, imports)


# ================================================================ experiments/


if __name__ == "__main__":
    os.environ["NANOMEM_SLOW"] = "1" if "--slow" in sys.argv else ""
    sys.exit(pytest.main([__file__, "-q", *[a for a in sys.argv[1:] if a != "--slow"]]))
