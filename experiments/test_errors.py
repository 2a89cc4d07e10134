"""What a person can get wrong, by program: each ends in exit code 1 and one line that says what to
do, and touches nothing. `python test_all.py` runs these too."""
import contextlib
import fcntl
import gc
import io
import json
import math
import re
import runpy
import shutil
import signal
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from safetensors.torch import load_file, save_file
from test_all import (ROOT, TINY, clustered, files_of, prepare_bytes, save_tokenizer,
                      text_folder, train, write_jsonl, write_llama)
from test_bank import runs

import prepare_fineweb


# ---------------------------------------------------------------- a program in this process

def outcome(program, argv, home, monkeypatch, capsys):
    """Runs a program in a folder as the interpreter would -> (exit code, its lines on stderr)."""
    lock = prepare_fineweb.lock
    code = 0
    monkeypatch.chdir(home)
    monkeypatch.setattr(prepare_fineweb.atexit, "register", lambda *arguments: None)
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)
    changes = dict(path=[str(home / "repo"), *sys.path], argv=[program, *argv],
                   excepthook=sys.excepthook, stdin=io.StringIO())
    for name, value in changes.items():
        monkeypatch.setattr(sys, name, value)
    with contextlib.ExitStack() as locks, warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in (DeprecationWarning, ResourceWarning):     # files are closed at the end
            warnings.filterwarnings("ignore", category=kind)
        monkeypatch.setattr(prepare_fineweb, "lock",
                            lambda *given, **more: locks.enter_context(lock(*given, **more)))
        try:
            runpy.run_path(str(home / "repo" / program), run_name="__main__")
        except SystemExit as stop:
            code = stop.code
        except BaseException as failure:
            code = 1
            sys.excepthook(type(failure), failure, failure.__traceback__)
    said = capsys.readouterr().err.splitlines()
    return (1, [code]) if isinstance(code, str) else (code, said)


# ---------------------------------------------------------------- a folder with one of everything

@pytest.fixture(scope="module")
def home(runs, text_folder):
    """The programs, data folders, runs, a bank, a Hugging Face folder, sources of text."""
    home = runs
    shutil.copytree(ROOT / "experiments", home / "repo/experiments",
                    ignore=shutil.ignore_patterns("results", "__pycache__"))
    (home / "repo/experiments/results").mkdir()
    for path in ROOT.glob("*.py"):
        shutil.copy(path, home / "repo")
    shutil.copytree(text_folder, home / "data")
    mine = save_tokenizer(home / "mine" / "tokenizer.json")
    source = write_jsonl(home / "text.jsonl", [{"text": f"text {n} of many"} for n in range(200)])
    prepare_bytes(source, home / "own", tokenizer=str(mine))
    train(*TINY, "--max_iters=2", dataset=home / "data", out_dir=home / "run")
    write_llama(home / "hf", tie_word_embeddings=True)
    for path in home.glob("*/retriever.npz"):                  # mostly zeros
        np.savez_compressed(path, **np.load(path))
    (home / "dict.json").write_text('{"a": 1}')
    (home / "exp.py").write_text(EXPERIMENT)
    (home / "image.png").write_bytes(b"no text")
    (home / "empty").mkdir()
    (home / "repo/model_broken.py").write_text("x = = 1\n")
    (home / "repo/model_nano.py").write_text("from model import GPT\n")       # nanoGPT's
    lime = (ROOT / "model_lime.py").read_text()
    field = "    n_shift: int = None\n    tied: bool ="
    (home / "repo/model_unset.py").write_text(lime.replace("    tied: bool =", field, 1))
    typo = lime.replace("dict(learning_rate=1e-3", "dict(learing_rate=1e-3", 1)
    (home / "repo/model_typo.py").write_text(typo)
    return home


EXPERIMENT = (
    '"A table."\n'
    'model, metric, baseline, seeds = "move", "val_loss", "A", 1\n'
    'variants = {"A": ({}, None), "B": (dict(learning_rate=0.01), 1.5)}\n'
    'claims = ["A > B"]\n'
    'cpu = dict(depth=1, max_iters=1)\n')
ROW = (b'"data_id": "", "val_loss": 1, '
       b'"overrides": {"model": "move", "depth": 1, "max_iters": 1}}\n')      # of its results


# ---------------------------------------------------------------- what is broken beforehand

FORMATS = {                                                    # to read a file's parts, to write
    ".pt": (lambda path: torch.load(path, weights_only=True), torch.save),
    ".npz": (lambda path: dict(np.load(path)), lambda c, path: np.savez(path, **c)),
    ".safetensors": (load_file, lambda c, path: save_file(c, path, {"format": "pt"})),
    ".json": (lambda path: json.loads(path.read_text()),
              lambda c, path: path.write_text(json.dumps(c))),
}


def spoil(home, state):
    """"FILE = EXPRESSION": its bytes, of those that it has, c; None: it is gone. "FILE: STATEMENT":
    changes its parts, c."""
    name, sign, code = re.match(r"(\S+?)(:| =) (.*)", state).groups()
    path = home / name
    names = dict(torch=torch, np=np, nan=math.nan, row=ROW)
    if sign == ":":
        read, write = FORMATS[path.suffix]
        names["c"] = read(path)
        exec(code, names)
        path.unlink()                                          # it may be mapped
        write(names["c"], path)
        return
    names["c"] = path.read_bytes() if path.is_file() else b""
    content = eval(code, names)
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content)


def put_back(home, before):
    """The files are again as they were."""
    after = files_of(home)
    for path in after.keys() - before.keys():
        path.unlink()
    for path, content in before.items():
        if after.get(path) != content:
            path.unlink(missing_ok=True)
            path.write_bytes(content)
    shutil.rmtree(home / "new", ignore_errors=True)


# ---------------------------------------------------------------- the table

CASES = r"""
# train.py --depth=1 --block_size=32 --batch_tokens=128 --batch_size=4 --eval_tokens=256
    --log_interval=1 --sample_tokens=0 --dtype=float32 --dataset=data --out_dir=new --max_iters=1
-  --model=mova  model=mova: there is no model_mova.py here; there are
-  --model=../x  model=../x: there is no
-  --model=move.py  model=move.py: there is no
-  --model=  there is no model_.py
-  --model=..  model=..: there is no
-  --model=broken  invalid syntax (model_broken.py, line 1)
-  --depht=4  did you mean --depth=? --help lists all
-  --lr=0.1  did you mean --learning_rate=? --help lists all
-  --zzzzzz=4  unknown option --zzzzzz=4: --help lists all
-  --depth=four  --depth wants a whole number
-  --depth=1.5  --depth wants a whole number
-  --depth=  --depth wants a whole number
-  -depth=4  did you mean --depth=?
-  --depth  --depth needs a value
-  --depth=0  depth=0: must be from 1
-  --depth=-2  depth=-2: must be from 1
-  --depth=100000  depth=100000: must be from 1
-  --depth=100 --n_embd=128000  choose a smaller model
-  --n_embd=1000000000 --n_head=1  Storage size calculation overflowed
-  --memory_scael=2  did you mean --memory_scale=?
-  --dense  --dense=True
-  --dense=maybe  --dense wants True or False
-  --dense=True --memory=lave  dense and memory
-  --preset=d12  preset and depth
-  --preset=d13 --depth=-1  preset=d13: model_move.py has
-  --optimizer=sgd  optimizer=sgd: model_move.py has recipes for
-  --device=tpu  device=tpu: choose cuda, mps or cpu
-  --device=cuda:99  device=cuda:99 is not there
-  --device=cuda:x  device=cuda:x is not there
-  --device=mps  device=mps is not there
-  --device=cpu:x  device=cpu:x is not there
-  --dtype=float16  dtype=float16: choose float32 or bfloat16
-  --schedule=linear  choose cosine or wsd
-  --batch_tokens=100  multiple of block_size=32
-  --batch_tokens=0  batch_tokens=0: must be from 1
-  --batch_size=0  batch_size=0: must be from 1
-  --block_size=0  block_size=0: must be from 1
-  --block_size=-7  block_size=-7: must be from 1
-  --block_size=100000 --batch_tokens=100000  too short for a window
-  --log_interval=0  log_interval=0: must be from 1
-  --eval_interval=0  eval_interval=0: must be from 1
-  --eval_tokens=-2  eval_tokens=-2: must be from 1
-  --beta2=1.5  beta2=1.5: must be from 0
-  --beta1=1  beta1=1.0: must be from 0
-  --beta1=-0.1  beta1=-0.1: must be from 0
-  --grad_clip=-1  grad_clip=-1.0: must be from 0
-  --learning_rate=-0.1  learning_rate=-0.1: must be from 0
-  --learning_rate=fast  --learning_rate wants a finite number
-  --learning_rate=inf  --learning_rate wants a finite number
-  --learning_rate=1e99  learning_rate=1e+99: must be from 0
-  --weight_decay=-1  weight_decay=-1.0: must be from 0
-  --min_lr=-1  min_lr=-1.0: must be from 0
-  --min_lr=0.5  min_lr=0.5: must not be above learning_rate=0.02
-  --model=hiermem --learning_rate=1e-5  min_lr=5e-05: must not be above learning_rate=1e-05
-  --model=lime --optimizer=muon --muon_lr=-1  muon_lr=-1.0: must be from 0
-  --model=lime --muon_lr=0.01  muon_lr: is for --optimizer=muon of a model without a RECIPE
-  --model=move --muon_lr=0.01  model_move.py's muon has learning_rate alone
-  --warmup=1.5  warmup=1.5: must be from 0 to 1
-  --warmup=-1  warmup=-1.0: must be from 0 to 1
-  --warmdown=2  warmdown=2.0: must be from 0 to 1
-  --sample_tokens=-5  sample_tokens=-5: must be from 0
-  --skip_steps=-1  skip_steps=-1: must be from 0
-  --seed=-1  seed=-1: must be from 0
-  --seed=nan  --seed wants a whole number
-  --seed=1e30  seed=
-  --compile=2  compile=2: must be from 0 to 1
-  --max_iters=  --max_iters wants a whole number
-  --max_iters=-3  max_iters=-3: must be from 0
-  --max_iters=99999999999999  must be from 0 to 1000000000000
-  --vocab_size=100  vocab_size=100: data needs 257
-  --vocab_size=100000000000  choose a smaller model
-  --vocab_size=0  vocab_size=0: must be at least 1
-  --n_head=3  n_embd=64, n_head=3
-  --n_head=0  n_head=0: must be at least 1
-  --memory=ring  memory='ring'
-  --model=midus --n_head=0  n_head=0: must be at least 1
-  --model=midus --n_inner=0  n_inner=0: must be at least 1
-  --model=midus --r=-2  r=-2: must be at least 1
-  --model=midus --rope_scaling=8  rope_scaling='8': give factor:low:high:context
-  --model=hiermem --rope_scaling=x  rope_scaling='x': give factor:low:high:context
-  --model=hiermem --rope_base=-1  rope_base=-1.0: must be positive
-  --model=lime --rope_base=0  rope_base=0.0: must be positive
-  --model=lime --router_lr=-2  router_lr=-2.0: must not be negative
-  --model=lime --kv_init=-1  kv_init=-1.0: must not be negative
-  --model=ultramem --value_dim=3  value_dim=3: must be a multiple of 2
-  --model=ultramem --value_dim=-2  value_dim=-2: must be at least 1, or -1
-  --model=ultramem --pre_value_dim=-2  pre_value_dim=-2: must be 0 or more
-  --model=ultramem --n_layer=-1  n_layer=-1: must be at least 1
-  --model=ultramem --n_keys=3  needs top_k <= 9
-  --model=ultramem --value_lr=-2  value_lr=-2.0: must not be negative
-  --gate_v=7  gate_v=7
-  --memory_scale=-1  memory_scale=-1.0
-  nowhere.py  no config file nowhere.py
-  repo/model_lime.py  repo/model_lime.py is a model: --model=lime trains it
-  --model=nano  No module named 'model'
-  --init_from=run --depth=2  leave n_layer, depth and preset out
-  --model=typo  model_typo.py: its RECIPE has learing_rate, which train.py does not know
-  --model=unset --n_shift=3  --n_shift cannot be given: its default is None, no int
-  data  no config file data
-  --dataset=nowhere  there is no data folder
-  --dataset=data/nowhere  there is no data folder data/nowhere:
-  --dataset=text.jsonl  prepare_fineweb.py --source=text.jsonl` makes one of its text
-  --dataset=empty  neither meta.json nor *.bin: `python prepare_fineweb.py --source=empty`
-  --dataset=run  neither meta.json nor *.bin
-  --dataset=data --out_dir=data  data is a data folder: choose another
-  --init_from=nowhere  no checkpoint nowhere
-  --init_from=  no checkpoint
-  --init_from=data  no checkpoint data/ckpt.pt
-  --init_from=resume  no checkpoint new: train.py makes one
-  --out_dir=text.jsonl  text.jsonl: File exists
-  --out_dir=text.jsonl/below  text.jsonl
-  --out_dir=/proc/nanomem  /proc/nanomem
-  --out_dir=/proc/1/x  /proc/1
-  --out_dir=/dev/null  /dev/null
-  --min_lr=none  --min_lr wants a finite number
-  --dry_run=maybe  --dry_run wants True or False
conf.py = b"max_iters = 2\nlearning_rate = = 3\n"  conf.py  invalid syntax (conf.py, line 2)
conf.py = b"max_iters = 2\n\nmin_lr = rate\n"  conf.py  conf.py, line 3: NameError: name 'rate'
conf.py = b"import nowhere_to_be_found\n"  conf.py  conf.py, line 1: ModuleNotFoundError
conf.py = b"def f():\n return 1/0\nmax_iters = f()\n"  conf.py  conf.py, line 2: ZeroDivisionError
conf.py = b"max_itres = 2\n"  conf.py  did you mean --max_iters=?
conf.py = b"max_iters = 2.5\n"  conf.py  --max_iters wants a whole number
conf.py = b"min_lr = -4\n"  conf.py  min_lr=-4.0: must be from 0
conf.py = b"depth = 'four'\n"  conf.py  --depth wants a whole number
conf.py = b"from pathlib import Path; init_from = Path('no')"  conf.py  no checkpoint no
conf.py = b"import numpy as np; min_lr = np.float64(-3)"  conf.py  min_lr=-3.0: must be from 0
conf.py = b"schedule = ['wsd']"  conf.py  schedule=['wsd']: choose cosine or wsd
conf.py = b"x = '\xff'\n"  conf.py  conf.py
conf.py = b"\0"  conf.py  null bytes
conf.py = b"import sys; sys.exit(0)\n"  conf.py  conf.py, line 1: SystemExit
data/meta.json = b"{"  -  data/meta.json cannot be used
data/meta.json = b"[3]"  -  data/meta.json cannot be used
data/meta.json = b"\xff"  -  data/meta.json cannot be used
data/meta.json = None  --sample_tokens=5  data holds token_bytes.npy and no meta.json
data/meta.json: c["eot"] = None  -  eot must be of type int, not None
data/meta.json: c["eot"] = 5  -  are not those of its tokenizer
data/meta.json: del c["eot"]  -  eot must be of type int
data/meta.json: c["vocab_size"] = True  -  vocab_size must be of type int
data/meta.json: c["vocab_size"] = 300  -  are not those of its tokenizer
data/meta.json: c["tokenizer"] = "bpe"  -  tokenizer.json is missing, the tokenizer bpe
data/meta.json: c["tokens"] = []  -  tokens must be of type dict
data/meta.json: c["tokens"] = {"train": 9}  -  train tokens, and meta.json says 9
data/meta.json: c["tokens"]["val"] = "9"  -  val tokens, and meta.json says 9
data/meta.json: c["block_size"] = "9"  -  block_size must be of type int
data/meta.json: c["block_size"] = 9  -  a document of data is a window of block_size=9
data/meta.json: c["block_size"] = 0  --block_size=-1  block_size=0: must be at least 1
data/meta.json: c["clusters"] = 8  -  clusters must be of type str
data/meta.json: c["clusters"] = "a,b"  -  clusters
data/meta.json: c["task"] = "facts"  -  task must be of type dict
data/meta.json: c["task"] = {}  -  task=None of meta.json: choose
data/meta.json: c["task"] = {"name": "chess"}  -  chess
data/train_000000.bin = None  -  no train shards, *train*.bin
data/val_000000.bin = None  -  no val shards, *val*.bin
data/val_000000.bin = b""  -  val_000000.bin is not a token shard
data/train_000000.bin = c[:-2]  -  cut off or damaged
data/train_000000.bin = c[:8] + b"\xfd\xff\xff\xff" + c[12:]  -  cut off or damaged
data/train_000000.bin = c[:8] + bytes(4) + c[12:1024]  -  is not whole: 0 train tokens
data/train_000000.bin = c[:600]  -  is not a token shard
data/train_000000.bin = c + b"!!"  -  cut off or damaged
data/train_000000.bin = b"\2" + c[1:]  -  is not a token shard
data/train_000000.bin = c[:-2] + b"\1\1"  -  holds token 257, the vocabulary is 257
data/val_000000.bin = c[:-2] + b"\xff\xff"  -  holds token 65535
data/train_000000.mask = b"123"  -  train_000000.mask is missing or damaged
data/token_bytes.npy = b"no"  -  token_bytes.npy is damaged
data/token_bytes.npy = c[:-4]  -  token_bytes.npy is damaged
data/token_bytes.npy = b""  -  token_bytes.npy is damaged
data/tokenizer.json = b"{}"  -  is not a tokenizer.json
own/tokenizer.json = None  --dataset=own  tokenizer.json is missing, the tokenizer
own/tokenizer.json = c[:99]  --dataset=own  is not a tokenizer.json that
own/tokenizer.json: c["added_tokens"] = []  --dataset=own  has no token that ends a text
own/meta.json = None  --dataset=own  holds tokenizer.json and no meta.json
tree/train_000000.leaf = None  --model=hiermem --dataset=tree --clusters=2,2 --ranks=4,2
    train_000000.leaf
tree/train_000000.leaf = c[4:]  --model=hiermem --dataset=tree --clusters=2,2 --ranks=4,2
    tree is not whole
tree/val_000000.leaf = b"\4" + c[1:]  --model=hiermem --dataset=tree --clusters=2,2 --ranks=4,2
    to 4 of a tree of 4
tree/val_000000.leaf = b"\xff\xff\xff\xff" + c[4:]
    --model=hiermem --dataset=tree --clusters=2,2 --ranks=4,2  leaves -1
-  --model=hiermem --dataset=tree --clusters=3,2 --ranks=4,2  clusters=3,2: tree has clusters=2,2
run/.lock locked  --out_dir=run  run is in use by the process
# train.py --dataset=data --out_dir=run --init_from=resume --max_iters=4 --dtype=float32
-  --depth=2  depth=2: the checkpoint has depth=1
-  --seed=2  seed=2: the checkpoint has seed=1337
-  --memory=lave  memory=lave: the checkpoint has memory=move
-  --dense=True  dense=True: the checkpoint has dense=False
-  --batch_tokens=256  batch_tokens=256: the checkpoint has
-  --optimizer=adamw  optimizer=adamw: the checkpoint has
-  --memory_scale=2  memory_scale=2.0: the checkpoint has
-  --model=lime  model=lime: the checkpoint has model=move
-  --preset=d12  preset=d12: the checkpoint has
-  --skip_steps=5  skip_steps=5: the checkpoint has skip_steps=0
-  --block_size=16  block_size=16: the checkpoint has block_size=32
-  --learning_rate=0.01 --min_lr=0.015  min_lr=0.015: must not be above learning_rate=0.01
-  --max_iters=1  is of step 2 and max_iters=1: give a larger
-  --max_iters=2  is of step 2 and max_iters=2: give a larger
-  --dataset=own  holds other text than the checkpoint
-  --dataset=nowhere  there is no data folder
run/.lock locked  -  run is in use by the process
run/ckpt.pt = None  -  no checkpoint run/ckpt.pt
run/ckpt.pt = b""  -  cannot be read, it is cut short
run/ckpt.pt = c[:1000]  -  cannot be read, it is cut short
run/ckpt.pt = c[:-1000]  -  cannot be read, it is cut short
run/ckpt.pt = c[:len(c) // 2] + b"junk" * 9 + c[len(c) // 2 + 36:]  -  the sum of
run/ckpt.pt: c = {"a": 1}  -  is not a checkpoint of nanoMem
run/ckpt.pt: c = [c]  -  is not a checkpoint of nanoMem
run/ckpt.pt: c["format"] = "nanomem-0"  -  is not a checkpoint of nanoMem
run/ckpt.pt: del c["optimizers"]  -  run/ckpt.pt
run/ckpt.pt: c["optimizers"] = []  -  run/ckpt.pt
run/ckpt.pt: del c["rng"]  -  run/ckpt.pt
run/ckpt.pt: c["rng"] = torch.ones(3)  -  run/ckpt.pt
run/ckpt.pt: c["step"] = "two"  -  run/ckpt.pt
run/ckpt.pt: c["step"] = -1  -  run/ckpt.pt
run/ckpt.pt: c["log"] = "no"  -  run/ckpt.pt
run/ckpt.pt: c["train"] = None  -  run/ckpt.pt
run/ckpt.pt: c["data"] = {}  -  run/ckpt.pt
run/ckpt.pt: c["config"] = None  -  run/ckpt.pt
run/ckpt.pt: del c["config"]["model"]  -  run/ckpt.pt
run/ckpt.pt: c["config"]["model"] = "gone"  -  the checkpoint has model=gone
run/ckpt.pt: c["model_config"]["new_knob"] = 1  -  new_knob
run/ckpt.pt: del c["model_config"]  -  run/ckpt.pt
run/ckpt.pt: c["model"].pop("embed.weight")  -  Missing key(s) in state_dict: "embed.weight"
run/ckpt.pt: c["model"]["extra"] = torch.ones(1)  -  Unexpected key(s) in state_dict: "extra"
run/ckpt.pt: c["model"]["resid_lambda"] = torch.ones(7)  -  size mismatch for resid_lambda
run/ckpt.pt: c["model"]["embed.weight"][0, 0] = nan  -  embed.weight
run/ckpt.pt: c["model"]["embed.weight"] = 3  -  run
data/meta.json = b"{"  -  data/meta.json cannot be used
data/val_000000.bin = b""  -  is not a token shard
# train.py --dataset=data --out_dir=new --init_from=run --max_iters=1 --dtype=float32
    --sample_tokens=0
-  --depth=2  has n_layer=1
-  --memory=lave  has memory=move
-  --model=lime  run is a checkpoint of another model
-  --vocab_size=300  has vocab_size=257
run/ckpt.pt: c["data"]["vocab_size"] = 9  -  data has another tokenizer than run
-  --init_from=bank  bank is a checkpoint of another model
-  --preset=d12  has n_layer=1
-  --preset=d12_mla --n_layer=1 --n_embd=64 --n_head=1  has attention=mha
run/ckpt.pt: c["model_config"]["new_knob"] = 1  -  new_knob
run/ckpt.pt: c["model"].pop("embed.weight")  -  Missing key(s) in state_dict: "embed.weight"
run/ckpt.pt: c["model"]["extra"] = torch.ones(1)  -  Unexpected key(s) in state_dict: "extra"
run/ckpt.pt: c["model"]["resid_lambda"] = torch.ones(7)  -  size mismatch for resid_lambda
run/ckpt.pt: c = {"a": 1}  -  is not a checkpoint of nanoMem
run/ckpt.pt = c[:1000]  -  cannot be read, it is cut short
run/ckpt.pt: c["model"]["embed.weight"][0, 0] = nan  -  embed.weight is not a number in run
# train.py --model=midus --dataset=data --out_dir=new --init_from=hf
hf/model.safetensors: c.pop("model.layers.1.mlp.up_proj.weight")  -  1 missing tensors
hf/model.safetensors: c["model.norm.weight"] = torch.ones(31)  -  1 mismatched tensors
hf/model.safetensors: c["model.layers.0.self_attn.q_norm.weight"] = torch.ones(8)  -  1 unexpected
hf/model.safetensors: c["model.norm.weight"] = torch.ones(32, dtype=torch.int8)  -  holds I8
hf/model.safetensors = c[:-1000]  -  model.safetensors cannot be read
hf/model.safetensors = None  -  model.safetensors cannot be read
hf/model.safetensors = b""  -  model.safetensors cannot be read
hf/model.safetensors.index.json = b"[]"  -  index.json cannot be read
hf/model.safetensors.index.json = b'{"weight_map": {"model.norm.weight": "model-7.safetensors"}}'  -
    model-7.safetensors cannot
hf/model.safetensors.index.json = b'{"weight_map": {"model.norm.weight": "../model.safetensors"}}'
    -  outside of its folder
hf/model.safetensors.index.json = b'{"weight_map": {"model.norm.weight": 3}}'  -  index.json
hf/config.json = None  -  no checkpoint
hf/config.json = b"{"  -  config.json cannot be read
hf/config.json = b"[]"  -  config.json cannot be read
hf/config.json: c["model_type"] = "gpt2"  -  model_type='gpt2'
hf/config.json: c["model_type"] = "none such"  -  config.json cannot be read
hf/config.json: c["hidden_act"] = "gelu"  -  hidden_act='gelu'
hf/config.json: c["mlp_bias"] = True  -  mlp_bias=True
hf/config.json: c["attention_bias"] = True  -  attention_bias=True
hf/config.json: c["rope_parameters"] = dict(rope_type="yarn", rope_theta=1e4, factor=2.0)  -
    rope_type='yarn'
hf/config.json: c["rope_parameters"] = dict(rope_type="llama3", rope_theta=1e4, factor=2.0)  -
    config.json cannot be read
hf/config.json: c["head_dim"] = 16  -  head_dim=16
hf/config.json: c["quantization_config"] = dict(bits=4)  -  quantization_config
hf/config.json: c["num_hidden_layers"] = 2  -  9 unexpected tensors
hf/config.json: c["hidden_size"] = "big"  -  config.json
hf/config.json: c["num_attention_heads"] = 0  -  config.json
hf/config.json: c["vocab_size"] = -5  -  hf
-  --depth=2  n_layer
-  --model=move  move
-  -  vocab_size=61: data needs 257
# train.py --model=hiermem --batch_tokens=128 --batch_size=2 --eval_tokens=256 --log_interval=1
    --sample_tokens=0 --dtype=float32 --dataset=tree --out_dir=new --init_from=anchor --max_iters=1
-  --memory=none --frozen=True  nothing is left to train
-  --ranks=4 --memory=ffn  a rank for each level
-  --dataset=data --clusters=8,1  a factor of 2 or more
-  --dataset=data --clusters=a  a factor of 2 or more
-  --memory=moe  memory='moe': choose none, ffn
-  --generic=2  generic=2.0: must be between 0 and 1
-  --memory_layers=top  memory_layers='top': choose all
-  --memory_lr=0  memory_lr=0.0: must be positive
-  --bank_device=gpu  bank_device='gpu': choose device or cpu
-  --init_from=bank --clusters=4,2  has clusters=2,2
-  --init_from=bank --ranks=8,8  has ranks=4,2
tree/meta.json: c["retriever"] = "y"  --init_from=bank  has retriever=
# sample.py --out_dir=run --num_samples=1 --max_new_tokens=3
-  --prompt=longlonglonglonglonglonglonglonglong  the prompt has 37 tokens, the model's context
-  --tempereture=1  did you mean --temperature=?
-  --temperature=-1  temperature=-1.0: must be at least 0
-  --temperature=nan  --temperature wants a finite number
-  --top_p=1.5  top_p=1.5: must be between 0 and 1
-  --top_k=-1  top_k=-1: must be at least 0
-  --seed=-1  seed=-1: must be from 0
-  --num_samples=0  num_samples=0: must be at least 1
-  --max_new_tokens=0  max_new_tokens=0: must be at least 1
-  --max_new_tokens=2.5  --max_new_tokens wants a whole number
-  --inspect=True  there is no word in the prompt
-  --words=bank  goes with --inspect=True
-  --inspect=True --prompt=no --words=bank  there is no 'bank' in the prompt
-  --inspect=True --prompt=...  there is no word in the prompt
-  somewhere  what is ['somewhere']
-  --out_dir=nowhere  no checkpoint nowhere
-  --out_dir=text.jsonl  text.jsonl cannot be read
-  --out_dir=data  no checkpoint data/ckpt.pt
-  --dtype=int8  dtype=int8: float32 or bfloat16
-  --device=abacus  device=abacus: choose
-  --device=cuda:99  device=cuda:99 is not there
-  --block=1:2  block=1:2: this model has no such memories
-  --leaf=3  leaf=3, block=: this model has no such
-  --embedder_path  --embedder_path needs a value
run/ckpt.pt: c["config"]["model"] = "gone"  -  there is no model_gone.py
run/ckpt.pt: c["config"]["model"] = "broken"  -  invalid syntax (model_broken.py, line 1)
run/ckpt.pt: c["data"].update(tokenizer="bpe", folder="gone")  -
    needs the tokenizer.json of its data folder
run/ckpt.pt: c["data"]["tokenizer"] = 3  -  run
run/ckpt.pt: c["data"]["vocab_size"] = 9  -  bytes is not the tokenizer of run
run/ckpt.pt: c["data"] = {}  -  run
run/ckpt.pt: del c["data"]  -  run
run/ckpt.pt: del c["config"]  -  run
run/ckpt.pt: c["model_config"]["n_head"] = "2"  -  run
run/ckpt.pt: c["model_config"]["n_head"] = 3  -  run
run/ckpt.pt: c["model_config"]["n_embd"] = 10 ** 9  -  run
run/ckpt.pt: c["model_config"] = []  -  run
run/ckpt.pt: c["model"] = {}  -  Missing key(s)
run/ckpt.pt: c["model"] = 3  -  run
run/ckpt.pt: del c["step"]  -  run
run/ckpt.pt: c = {"a": 1}  -  is not a checkpoint of nanoMem
run/ckpt.pt = b"PK" + c[2:500]  -  cannot be read, it is cut short
run/ckpt.pt = c[:len(c) // 2]  -  cannot be read, it is cut short
# sample.py --out_dir=bank --max_new_tokens=3 --prompt=violin,chord,melody
-  --block=1:0,1:1  every node of level 1
-  --block=2:4  no node 2:4: those of level 2 are 0 to 3
-  --block=3:0  no node 3:0: the levels are 1 to 2
-  --block=0:0  no node 0:0: the levels are 1 to 2
-  --block=best:3  no node best:3
-  --block=here  here is no node: level:node
-  --block=1:-1  1:-1 is no node
-  --leaf=4  leaf=4: generic, none, or a leaf from 0 to 3
-  --leaf=-1  leaf=-1: generic, none, or a leaf
-  --leaf=3 --block=1:1  the leaf is under a blocked node of level 1
-  --leaf=3 --block=best:2  under a blocked node of level 2
-  --leaf=3 --block=2:9  no node 2:9
-  --leaf=generic --block=1:9  no node 1:9
-  --leaf=none --block=4:0  no node 4:0
bank/retriever.npz = c[:-100]  -  not a whole retriever file
bank/retriever.npz = b""  -  not a whole retriever file
bank/retriever.npz: c["embedder"] = "no such"  -  not a whole retriever file
bank/ckpt.pt: c["model_config"]["retriever"] = "0123abcd"  -  is the tree
bank/retriever.npz: c["centroids_1"] = np.array("x")  -  not a whole retriever file
bank/retriever.npz: del c["centroids_2"]  -  not a whole retriever file
bank/ckpt.pt: c["data"].pop("tokenizer")  -  bank
bank/ckpt.pt: c["model"]["norm.weight"] = torch.ones(64).char()  -  norm.weight holds torch.int8
# prepare_fineweb.py --source=text.jsonl --tokenizer=bytes --out=new --workers=1
    --val_fraction=0.2
-  --source=nowhere  there is no source nowhere: fineweb_edu, pydocs
-  --source=image.png  image.png is not, or does not hold, a .txt
-  --source=empty  empty is not, or does not hold, a .txt
-  --source=run  record 1: a record must have a string 'text'
-  --source=dict.json  dict.json is not, or does not hold
-  --tokenizer=gpt3  unknown tokenizer 'gpt3': gpt2, bpe
-  --tokenizer=dict.json  is not a tokenizer.json
-  --tokenizer=image.png  is not a tokenizer.json
-  --vocab_size=4096  vocab_size=4096 is for tokenizer=bpe; bytes has
-  --tokenizer=bpe --vocab_size=256  vocab_size=256: must be at least 257
-  --tokenizer=bpe --vocab_size=-5  vocab_size=-5: must be at least 257
-  --val_fraction=1  'val': 200}; give more text, or prepare_fineweb.py another --val_fraction=
-  --val_fraction=0  val_fraction=0.0
-  --val_fraction=2  val_fraction=2.0
-  --val_fraction=-3  val_fraction=-3.0
-  --max_tokens=0  max_tokens=0
-  --max_tokens=-5  max_tokens=-5
-  --max_tokens=1  max_tokens=1 ended the reading
-  --block_size=-1  block_size=-1
-  --block_size=3  block_size=3: a document has
-  --shard_tokens=0  shard_tokens=0
-  --shard_tokens=2000000001  shard_tokens=2000000001: must be 2000000000 at most
-  --workers=0  workers=0
-  --workers=-4  workers=-4
-  --window=0 --clusters=2,2  window=0
-  --clusters=8,1  clusters=8,1: must be the factors of a tree
-  --clusters=8;8  clusters=8;8: must be the factors of a tree
-  --clusters=8,  clusters=8,: must be the factors of a tree
-  --clusters=99  needs
-  --embedder=bert  embedder=bert: must be hash or minilm
-  --text_field=body  a record must have a string 'body'
-  --out=.  out=.: must name a folder of its own
-  --out=/  out=/: must name a folder of its own
-  --out=/proc  out=/proc: a disk is mounted there, name a folder on it
-  --out=text.jsonl  text.jsonl
-  --out=text.jsonl/data  text.jsonl
-  --out=/proc/x  /proc/.x.lock
-  --out=run --overwrite=True  run holds something else than data
-  --out=run  run holds something else than data
-  --out=data  data was prepared with
-  --out=data.partial  data.partial
-  --sorce=x  did you mean --source=?
-  text.jsonl  is given as --source=PATH
-  --overwrite=perhaps  --overwrite wants True or False
a.txt = b""  --source=a.txt  a.txt holds no text
a.txt = b"\xff\xfe\0"  --source=a.txt  a.txt: 'utf-8' codec
a.jsonl = b'{"text": "x"}\n\n{"text"\n'  --source=a.jsonl  a.jsonl, after record 1:
a.jsonl = b'{"text": "x"}\n["text"]\n'  --source=a.jsonl
    record 2: a record must have a string 'text'
a.jsonl = b'{"text": 3}\n'  --source=a.jsonl  a.jsonl, record 1: a record must have
a.jsonl = b'{"prompt": "x", "answer": null}\n'  --source=a.jsonl  or strings 'prompt' and 'answer'
a.jsonl = b'{"text": "x"}\n{"prompt": "x", "answer": "y"}\n'  --source=a.jsonl
    record 2: a record with ['prompt', 'answer'] after
a.jsonl = b"[" * 100000  --source=a.jsonl  a.jsonl
a.jsonl = b"9" * 5000  --source=a.jsonl  a.jsonl
a.jsonl.gz = __import__("gzip").compress(b'{"text": "x"}\n' * 99)[:-9]  --source=a.jsonl.gz
    a.jsonl.gz
a.jsonl.xz = __import__("lzma").compress(b'{"text": "x"}\n' * 99)[:-9]  --source=a.jsonl.xz
    a.jsonl.xz
a.jsonl.gz = b"no gzip"  --source=a.jsonl.gz --workers=2  a.jsonl.gz: Not a gzip
a.jsonl.gz = b"no gzip"  --source=a.jsonl.gz  a.jsonl.gz: Not a gzip
a.jsonl.gz = b""  --source=a.jsonl.gz  a.jsonl.gz holds no text
a.jsonl = b'{"prompt": "x", "answer": "y"}\n[]\n'  --source=a.jsonl --clusters=2,2
    prompts and answers are not clustered
a.jsonl = b"[]"  --source=a.jsonl --clusters=2,2 --embedder=minilm --embedder_path=empty
    empty cannot be loaded; --embedder_path=
a.parquet = b"no parquet"  --source=a.parquet  a.parquet: parquet cannot be read
data/meta.json = b"{"  --out=data  data/meta.json cannot be used
data/meta.json: c["settings"] = []  --out=data  settings must be of type dict
mine/tokenizer.json: c["added_tokens"] = []  --tokenizer=mine/tokenizer.json
    has no token that ends a text
# train.py exp.py
-  other.py  one experiment at a time, not also other.py
# experiments/run.py
-  --jobs=2  which experiment? Its file comes first
-  claims --table_only=True  claims stands alone, without --table_only=True
-  nowhere.py  there is no experiment file nowhere.py
-  dict.json  dict.json
-  exp.py other.py  one experiment at a time, not also other.py
-  exp.py --scale=tpu  --scale=tpu: must be cpu or gpu
-  exp.py --scale=gpu  does not define gpu
-  exp.py --only=C  there is no variant 'C', but A, B
-  exp.py --only=,  there is no variant ''
-  exp.py --jobs=0  jobs=0
-  exp.py --jobs=-1  jobs=-1
-  exp.py --jobs=many  --jobs wants a whole number
-  exp.py --seeds=0  seeds=0
-  exp.py --seeds=-2  seeds=-2
-  exp.py --seed=1  did you mean --seeds=?
-  exp.py --dataset=nowhere  nowhere
exp.py = c + b"x = = 1"  exp.py  invalid syntax (exp.py, line 6)
exp.py = c + b"x = y"  exp.py  exp.py, line 6: NameError
exp.py = c + b"import nowhere"  exp.py  exp.py, line 6: ModuleNotFoundError
exp.py = b""  exp.py  does not define model, metric
exp.py = c + b'claims = ["A > C"]'  exp.py  'C' of baseline or claims is no variant
exp.py = c + b'claims = ["loss: A > B"]'  exp.py  'loss' of a claim is no column
exp.py = c + b'claims = [3]'  exp.py  exp.py
exp.py = c + b'claims = 3'  exp.py  exp.py
exp.py = c + b'claims = "A > B"'  exp.py  claims and also must be lists
exp.py = c + b'baseline = "C"'  exp.py  'C' of baseline or claims is no variant
exp.py = c + b'baseline = 3'  exp.py  exp.py
exp.py = c + b'variants = {"A": ("score", 1)}'  exp.py  variant 'A' must be (overrides
exp.py = c + b'variants = {"A": ({},)}'  exp.py  variant 'A' must be (overrides
exp.py = c + b'variants = {"A": ()}'  exp.py  variant 'A' must be (overrides
exp.py = c + b'variants = {"A": ({}, "1.5")}'  exp.py  variant 'A' must be (overrides
exp.py = c + b'variants = []'  exp.py  exp.py
exp.py = c + b'variants = {3: ({}, 1)}'  exp.py  exp.py
exp.py = c + b'variants = {"A": ({}, 1), "a": ({}, 1)}'  exp.py  'a' has a comma, a | or another
exp.py = c + b'variants = {"A|B": ({}, 1)}'  exp.py  'A|B' has a comma, a | or another
exp.py = c + b'variants = {"A": ({}, 1), "B": (dict(init_from="@C"), 1)}; claims = []'  exp.py
    must name a variant above it
exp.py = c + b'variants = {"A": ({}, 1), "B": (dict(init_from="@no/C"), 1)}; claims = []'  exp.py
    there is no experiment file
exp.py = c + b'cpu = 3'  exp.py  exp.py
exp.py = c + b'seeds = "two"'  exp.py  exp.py
exp.py = c + b'model = 7'  exp.py  there is no model_7.py
exp.py = c + b'model = "gone"'  exp.py  model_gone.py
exp.py = c + b'metric = 7'  exp.py  exp.py
exp.py = c + b'prepare = "--source=x"'  exp.py  `prepare` must say --out=data/NAME
exp.py = c + b'prepare = 7'  exp.py  exp.py
exp.py = c + b'prepare = "--source=gone --out=data/x"'  exp.py --only=C  there is no variant 'C'
repo/experiments/results/exp-cpu.jsonl = b"{"  exp.py --table_only=True  exp-cpu.jsonl
repo/experiments/results/exp-cpu.jsonl = b"[1]\n"  exp.py --table_only=True  exp-cpu.jsonl
repo/experiments/results/exp-cpu.jsonl = b'{"variant": "A", "seed": 0, ' + row
    exp.py --table_only=True  exp-cpu.jsonl
repo/experiments/results/exp-cpu.jsonl = b"{}\n"  exp.py --table_only=True  exp-cpu.jsonl
repo/experiments/results/exp-cpu.jsonl = b'{"variant": "A", "seed": 0, "overrides": {}}\n'
    exp.py --table_only=True  exp-cpu.jsonl
# experiments/bank.py
-  -  one of split, merge, remove, read
-  divide  divide: choose split
-  split merge  one of split, merge, remove, read
-  split  no --dataset= to split
-  split --dataset=data  data has no tree
-  split --dataset=nowhere  there is no data folder
-  split --dataset=tree  tree-subtree0 is there already
-  merge --jobs=nowhere --out_dir=new  no checkpoint nowhere
-  merge --out_dir=new  0 of the jobs have --generic=1
-  merge --jobs=job0,job1,generic  out_dir
-  merge --jobs=job0,job1,generic --out_dir=generic --overwrite=True  is one of the jobs
-  merge --jobs=job0,job1 --out_dir=new  0 of the jobs have --generic=1
-  merge --jobs=job0,generic --out_dir=new  no job has trained the subtrees 1
-  merge --jobs=job0,job1,bank,generic --out_dir=new  bank has trained blocks of level
-  merge --jobs=job0,job1,./job1,generic --out_dir=new  ./job1 has trained blocks of level
-  merge --jobs=anchor,generic --out_dir=new  anchor has no bank of topics
-  merge --jobs=run,generic --out_dir=new  run has no bank of topics
-  merge --jobs=job0,job1,generic --out_dir=bank  ckpt.pt is there already
-  merge --jobs=job0,job1,generic --out_dir=job0  ckpt.pt is there already
-  merge --jobs=job0,job1,generic --out_dir=text.jsonl  text.jsonl
-  remove --nodes=1:0  no checkpoint
-  remove --out_dir=bank  no --nodes=
-  remove --out_dir=bank --nodes=1:2  those of level 1 are 0 to 1
-  remove --out_dir=bank --nodes=1:1,3:0  no node 3:0: the levels are 1 to 2
-  remove --out_dir=bank --nodes=best:1  has no such block
-  remove --out_dir=bank --nodes=x  x is no node
-  remove --out_dir=bank --nodes=,  no --nodes=
-  remove --out_dir=bank/ckpt.pt --nodes=1:0  bank/ckpt.pt is no folder
-  remove --out_dir=nowhere --nodes=1:0  no checkpoint nowhere
-  remove --out_dir=run --nodes=1:0  run has no bank of topics
-  read --out_dir=nowhere  no checkpoint nowhere
-  read --nodes  --nodes needs a value
-  read  no checkpoint
bank/.lock locked  remove --out_dir=bank --nodes=1:0  bank is in use by the process
bank/.lock locked  merge --jobs=job0,job1,generic --out_dir=bank --overwrite=True
    bank is in use by the process
bank/ckpt.pt: c["model_config"]["sparse_memory"] = False  remove --out_dir=bank --nodes=1:0
    moments would move what is removed
bank/ckpt.pt: c["optimizers"] = []  remove --out_dir=bank --nodes=1:0  bank
bank/ckpt.pt: del c["optimizers"]  remove --out_dir=bank --nodes=1:0  bank
bank/ckpt.pt: c["model"].pop("bank.2.table")  remove --out_dir=bank --nodes=1:0  bank
bank/ckpt.pt = c[:9999]  read --out_dir=bank  cannot be read
job1/ckpt.pt: c["model_config"]["retriever"] = "x"  merge --jobs=job0,job1,generic --out_dir=new
    has another model or tree
job1/ckpt.pt: c["model"]["blocks.0.attn.W_Q.weight"] *= 2
    merge --jobs=job0,job1,generic --out_dir=new  started from another anchor
job1/ckpt.pt: c["model"].pop("bank.2.table")  merge --jobs=job0,job1,generic --out_dir=new  job1
job1/ckpt.pt: c["model"]["bank.2.table"][:] = nan  merge --jobs=job0,job1,generic --out_dir=new
    job1
job1/ckpt.pt: c["model"]["bank.2.table"][0] += 1  merge --jobs=job0,job1,generic --out_dir=new
    job1 started from another bank than generic
tree/meta.json: c["clusters"] = "8,x"  split --dataset=tree  clusters
# experiments/tasks.py --samples=300 --val_samples=3 --tokenizer=bytes --text_chars=3000
    --out=new
-  -  give one of arithmetic, prosqa, facts
-  chess  give one of arithmetic, prosqa, facts
-  arithmetic --operands=1  operands are numbers from 2 on
-  arithmetic --operands=  operands
-  arithmetic --operands=a  operands
-  arithmetic --max_value=1  max_value=1
-  arithmetic --operands=2 --max_value=9  only about 92 expressions of 2 operands
-  arithmetic --samples=0  samples=0
-  arithmetic --samples=-1  samples=-1
-  arithmetic --val_samples=0  val_samples=0
-  arithmetic --out=data  data is there already: --overwrite=True
-  arithmetic --out=text.jsonl  is there already: --overwrite=True
-  arithmetic --out=run --overwrite=True  run holds something else than data
-  arithmetic --seed=x  --seed wants a whole number
-  prosqa --val=text.jsonl  text.jsonl cannot be read
-  prosqa --val=dict.json  dict.json holds no list of samples
-  prosqa --val=nowhere  nowhere
-  prosqa --samples=0  samples=0
-  prosqa --nodes=5  nodes=5: must be from 8 to 40
-  accuracy --out_dir=nowhere  no checkpoint nowhere
-  accuracy  no checkpoint
-  accuracy --out_dir=run  data is no task's data folder
-  accuracy --out_dir=run --dataset=own  own has another tokenizer than run
-  accuracy --out_dir=run --device=x  device=x: choose
-  facts --per_bucket=20 --source=text.jsonl  per_bucket=20: must be a multiple of 16
-  facts --per_bucket=32,16 --source=text.jsonl  per_bucket=32,16: must be a multiple of 16
-  facts --source=nowhere  nowhere
-  domains --source=text.jsonl  domain has too few
-  domains --source=nowhere  nowhere
-  domains --source=text.jsonl --pairs=nowhere  pairs=nowhere: has no .jsonl
a.json = b'[{"question": "x"'  prosqa --val=a.json  a.json cannot be read: Expecting
a.json = b'[3]'  prosqa --val=a.json  a.json, sample 0
a.json = b'5'  prosqa --val=a.json  a.json holds no list of samples
a.json = b'[{"question": "?", "answer": 5, "steps": []}]'  prosqa --val=a.json  'answer' is no str
a_records = b""  facts --source=a_records --out=a --overwrite=True
    source=a_records lies in a_records, which is written anew
a.json = b'[{"question": "?", "answer": "!", "steps": [3]}]'  prosqa --val=a.json
    'steps' are not all texts
a.json = b'[]'  prosqa --val=a.json  too few different documents
a.json.xz = b"no xz"  prosqa --val=a.json.xz  a.json.xz cannot be read
a.jsonl = b'{"prompt": "?", "answer": "!"}'  domains --source=a.jsonl  records with a text
# experiments/analysis.py --runs=run
-  -  give one of entropy, separability
-  entropy slots  give one of entropy, separability
-  chess  give one of entropy, separability
-  entropy --runs=  give one of entropy, separability
-  entropy --runs=nowhere  no checkpoint nowhere
-  entropy --runs=run,nowhere  no checkpoint nowhere
-  entropy --sequences=0  sequences=0
-  entropy --sequences=-1  sequences=-1
-  entropy --device=x  device=x
-  slots  for models with memory slots
-  sizes  for --model=midus
-  separability  its tokenizer bytes has no token of its
-  separability --occurrences=0  occurrences=0
-  retrieval  for --model=hiermem
tree/retriever.npz: c["centroids_1"] = c["centroids_1"] + 1  retrieval --runs=bank  is the tree
-  retrieval --runs=bank  asks for what comes after 32 tokens
-  blocking  for --model=hiermem
-  prompt  for --model=hiermem
-  rag --dataset=tree  `rag` is for --model=hiermem
-  rag --runs=bank --datastore=0  datastore
-  blimp --blimp=nowhere  nowhere has no determiner
-  blimp  determiner
-  importance --runs=run --dataset=nowhere  there is no data folder
-  entropy --dataset=own  own has another tokenizer than run
# experiments/instruct.py --out=new --tokenizer=bytes
-  -  give --source=FILE
-  a b  give --source=FILE
-  --source=nowhere  nowhere
-  --source=text.jsonl --out=data  data is there already: --overwrite=True
-  --source=nowhere.json  nowhere.json
-  --source=dict.json  must be an array of records
-  --source=text.jsonl  record 1: a record must have texts 'instruction'
-  --source=image.png  image.png is not, or does not hold
-  --source  --source needs a value
a_records = b""  --source=a_records --out=a  source=a_records lies in a_records, which is written
a.json = b"["  --source=a.json  a.json cannot be read
a.json = b"[3]"  --source=a.json  a.json, record 1
a.json = b"[]"  --source=a.json  holds no text
a.jsonl = b'{"instruction": "?", "input": ""}'  --source=a.jsonl  record 1: a record must have texts
a.jsonl = b'{"instruction": "?", "input": 3, "output": "x"}'  --source=a.jsonl
    record 1: a record must have texts
a.jsonl = b'{"instruction": "?", "output": "x"}'  --source=a.jsonl --tokenizer=nowhere
    unknown tokenizer 'nowhere'
a.jsonl = b'{"instruction": "?", "output": "x"}'  --source=a.jsonl --out=text.jsonl/x  text.jsonl
# experiments/kernel_speed.py
-  --jsn  unknown option --jsn
-  --json_file=nowhere/x.json  there is no folder nowhere
-  file  no file or command
# experiments/step_time.py
-  --rounds=0  rounds=0: must be at least 1
-  --rounds=x  --rounds wants a whole number
-  --model=mova  model=mova: there is no
-  --depht=4  did you mean --depth=?
-  --profile=x  --profile wants True or False
-  --json_file=nowhere/x.json  there is no folder nowhere
# experiments/same.py
-  --commit=HEAD --dataset=data  data has no tree, which hiermem fetches by
# experiments/decode_time.py
-  -  which run? --out_dir=out/move-d4
-  --out_dir=nowhere  no checkpoint nowhere
run/ckpt.pt: c["model"]["embed.weight"][:] = nan  --out_dir=run  output is not a number
-  --out_dir=run --steps=1  steps=1: must be at least 2
-  --out_dir=run --device=x  device=x: choose
-  --out_dir=run --steps=99  steps=99: the run's context is 32 tokens
-  --out_dir=run blah  no file or command, not ['blah']
-  run  which run? --out_dir=
# experiments/bank_size.py
-  --blocks=41  blocks=41: must be 42 or more
-  --rank=0  rank=0, steps=
-  file  no file or command
-  --device=x  device=x
# experiments/bank_tiers.py
-  --out_dir=run  run/ckpt.pt is there already
# experiments/midus_costs.py
-  --batch=0  batch, steps and prompt must be 1
-  --depth=3  depth must be a multiple of 4
-  --depth=0  depth must be a multiple of 4
-  --prompt=9999  block_size must be prompt
-  file  takes no file
-  --device=x  device=x
# experiments/ultramem_growth.py
-  --sizes=4  sizes must be two or more
-  --sizes=8,4  sizes must be two or more
-  --sizes=a,b  sizes
-  --sizes=0,4  n_keys=0
-  --device=x  device=x: choose cpu or cuda
-  --device=cuda:99  device=cuda:99
-  --steps=0  steps=0: must be at least 1
-  --batch=0  batch=0: must be at least 1
-  --n_embd=32  n_embd=32: must be a multiple of 64
-  file  no file is wanted
# experiments/speedrun.py
-  --track=tpu  track=tpu: choose cpu or gpu
-  --seeds=0  seeds=0: must be 3, or
-  --seeds=x  --seeds wants a whole number
-  --dataset=data  --dataset=data: the track decides that
-  -seeds=1  did you mean --seeds=?
-  file  what is file?
repo/experiments/results/speedrun.jsonl = b"{"  board  speedrun.jsonl cannot be used
repo/experiments/results/speedrun.jsonl = b"{}\n"  board  speedrun.jsonl cannot be used
# experiments/mutants.py
-  --file=x.py  the table has no mutant of it
-  --jobs=0  max_workers must be greater than 0
-  file  no file is wanted
# experiments/hiermem_longtail.py
-  gpu  no results in
-  tpu  tpu
-  --scale=gpu  a scale is wanted
# experiments/which_memory.py
-  tpu  tpu
-  cpu gpu  a scale is wanted
"""


def cases():
    """[(program, state, its flags in one string, piece of the message)]"""
    found = []
    for line in CASES.strip().replace("\n    ", "  ").splitlines():
        if line.startswith("# "):
            program, *base = line[2:].split()
            continue
        state, flags, message = re.split("   *", line)
        if "/proc" in flags and not Path("/proc/self").exists():       # macOS
            continue
        if "mps" in flags and torch.backends.mps.is_available():
            continue
        found.append((program, state, " ".join([*base, flags]).removesuffix("-"), message))
    return found


@pytest.mark.parametrize("program, state, flags, message", cases())
def test_a_mistake_is_one_line_and_touches_nothing(
        program, state, flags, message, home, pristine, monkeypatch, capsys):
    try:
        with contextlib.ExitStack() as stack:
            if state.endswith(" locked"):
                gc.collect()                                   # no earlier program here has it
                file = stack.enter_context(open(home / state.split()[0], "a"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            elif state != "-":
                spoil(home, state)
            before = files_of(home)
            code, said = outcome(program, flags.split(), home, monkeypatch, capsys)
            after = files_of(home)
        assert (code, len(said)) == (1, 1), said[-12:]
        assert said[0].startswith(f"{Path(program).name}: ")
        assert message in said[0]
        assert not [path for path in before if after.get(path) != before[path]]
    finally:
        put_back(home, pristine)


@pytest.fixture(scope="module")
def pristine(home):
    return files_of(home)
