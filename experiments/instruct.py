"""Instructions with answers, in Alpaca's schema, as a data folder for supervised fine-tuning: the loss is on the answer alone.

    python experiments/instruct.py --source=instruct_train.jsonl.xz --tokenizer=data/edu/tokenizer.json --out=data/sft --skip=code
    python train.py --model=midus --dataset=data/sft --init_from=out/midus-d4 --phase=sft --learning_rate=1e-5 --out_dir=out/midus-sft

A source is a .jsonl (.gz, .xz) file of {"instruction", "input", "output"} (Alpaca) or {"instruction", "context", "response"} (Dolly), or a .json
file with an array of them; "input" may be "" or absent; "source", if it is there, says where a record is from, and --skip leaves records out by
it. The tokenizer must be the one that the model was trained with. The records lie in OUT_records/train.jsonl.
"""
import json
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from prepare_fineweb import ConfigError, configure, help_text, prepare, read_files

# ------------------------------------------------------------------------------ settings: --key=value
source = ""                   # the file, or a folder of them
out = "data/sft"              # folder to write
tokenizer = "gpt2"            # gpt2 | bytes | a tokenizer.json
skip = ""                     # leave out records whose "source" holds one of these words, by commas
_defaults = {k: v for k, v in globals().items() if not k.startswith("_") and isinstance(v, (int, float, str))}
# ------------------------------------------------------------------------------


def read_records(path):
    """[(record, where it stands)]"""
    if path.suffix != ".json":
        return [(row, where) for _, where, row in read_files(path, "text")]
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(rows, list):
        raise ConfigError(f"{path} must be an array of records; one record a line is a .jsonl file")
    return [(row, f"{path}, record {n}") for n, row in enumerate(rows, 1)]


def to_record(row, where):
    """An instruction with its answer -> {"prompt", "answer"}, in Alpaca's layout."""
    if isinstance(row, dict) and "response" in row:            # Dolly's names
        row = {"instruction": row.get("instruction"), "input": row.get("context") or "", "output": row["response"]}
    texts = [row.get(key, "") for key in ("instruction", "output", "input")] if isinstance(row, dict) else [""]
    if not all(isinstance(text, str) for text in texts) or not all(texts[:2]):
        raise ConfigError(f"{where}: a record must have texts 'instruction' and 'output', and may have a text 'input'; this is {str(row)[:60]}")
    given = f"### Input:\n{row['input']}\n\n" if row.get("input") else ""
    return {"prompt": f"### Instruction:\n{row['instruction']}\n\n{given}### Response:\n", "answer": row["output"]}


def main(argv):
    if {"-h", "--help"} & {*argv}:
        return print(__doc__ + "\n" + help_text(Path(__file__).read_text(encoding="utf-8"), _defaults))
    overrides, extra = configure(argv, _defaults)
    c = SimpleNamespace(**_defaults | overrides)
    if extra or not c.source or not Path(c.source).exists():
        raise ConfigError(f"source={c.source!r}: give --source=FILE, a file of instructions" + f", and not {' '.join(extra)}" * bool(extra))
    words = [word for word in c.skip.split(",") if word]
    rows = read_records(Path(c.source))
    records = [to_record(row, where) for row, where in rows if not any(word in str(isinstance(row, dict) and row.get("source")) for word in words)]
    folder = Path(f"{c.out}_records")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    print(f"{len(records):,} of {len(rows):,} records")
    prepare(source=str(folder), tokenizer=c.tokenizer, out=c.out)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"instruct.py: {error}")
