"""Instructions with answers, in Alpaca's schema, as a data folder for supervised fine-tuning: the
loss is on the answer alone (our choice, the papers do not say). One record is one training window,
so that every answer sees its instruction; records that are longer than block_size are left out.

    python experiments/instruct.py --source=instruct.jsonl.xz --tokenizer=data/edu/tokenizer.json
    python train.py --model=midus --dataset=data/sft --init_from=out/midus-cpt --phase=sft \\
        --learning_rate=1e-5 --out_dir=out/midus-sft

A source is a .jsonl (.gz, .xz) file of {"instruction", "input", "output"} (Alpaca) or
{"instruction", "context", "response"} (Dolly), or a .json file with an array of them; "input" may
be "" or absent. A record with an empty answer is left out. The tokenizer must be the one that the
model was trained with. In a folder the files named val* are held out, as by prepare_fineweb.py. The
records lie in OUT_records/.
"""
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments.run import options
from experiments.tasks import write_jsonl
from prepare_fineweb import ConfigError, get_tokenizer, guard, need, prepare, read_files

# ---------------------------------------------------------------- settings: --key=value
source = ""                   # the file, or a folder of them
out = "data/sft"              # folder to write
tokenizer = "gpt2"            # gpt2 | bytes | a tokenizer.json
block_size = 256              # tokens of a window
overwrite = False             # write anew what is there
# ----------------------------------------------------------------


def read_records(path):
    """[(split, where it stands, record)]; a file named val* beside others is held out, as in
    prepare_fineweb.py."""
    if path.suffix != ".json":
        return [(split or "train", where, row) for split, where, row in read_files(path, "text")]
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:                                 # it does not name the file
        raise ConfigError(f"{path} cannot be read: {error}") from None
    need(isinstance(rows, list), f"{path} must be an array of records; one record a line is a "
         ".jsonl file")
    return [("train", f"{path}, record {n}", row) for n, row in enumerate(rows, 1)]


def to_record(row, where):
    """An instruction with its answer -> {"prompt", "answer"}, in Alpaca's layout without its
    preamble."""
    need(isinstance(row, dict), f"{where}: a record must be an object, not {str(row)[:60]}")
    given = row.get("input") or row.get("context") or ""        # Alpaca's names, Dolly's names
    answer = row.get("output") or row.get("response", row.get("output"))
    instruction = row.get("instruction")
    for value in (instruction, answer, given):
        need(isinstance(value, str), f"{where}: a record must have texts 'instruction' and "
             f"'output', and may have a text 'input'; this is {str(row)[:60]}")
    # A lone surrogate, which JSON can spell, has no UTF-8.
    texts = [text.encode(errors="replace").decode() for text in (instruction, answer, given)]
    instruction, answer, given = texts
    between = f"### Input:\n{given}\n\n" if given else ""
    prompt = f"### Instruction:\n{instruction}\n\n{between}### Response:\n"
    return {"prompt": prompt, "answer": answer}


def short_enough(records, tok, block_size):
    """Those that are a window of block_size + 1 tokens with an eot before and after."""
    prompts = tok.encode_batch([record["prompt"] for record in records])
    answers = tok.encode_batch([record["answer"] for record in records])
    lengths = [len(a) + len(b) + 2 for a, b in zip(prompts, answers)]
    return [record for record, n in zip(records, lengths) if n <= block_size + 1]


def main(argv):
    c, extra = options(argv, globals())
    need(c.source and not extra, "give --source=FILE, a file of instructions, and options only")
    need(c.overwrite or not Path(c.out).exists(),
         f"{c.out} is there already: --overwrite=True writes it anew, --out= elsewhere")
    folder = Path(f"{Path(c.out)}_records")
    source = Path(c.source).resolve()
    need(folder.resolve() not in (source, *source.parents),
         f"source={c.source} lies in {folder}, which is written anew: --out= elsewhere")
    records = {"train": [], "val": []}
    for split, where, row in read_records(Path(c.source)):
        record = to_record(row, where)
        if record["answer"]:
            records[split].append(record)
    need(c.tokenizer != "bpe", "tokenizer=bpe: it must be the one that the model was trained with, "
         "gpt2, bytes or its tokenizer.json")
    tok = get_tokenizer(c.tokenizer)
    short = {split: short_enough(records[split], tok, c.block_size) for split in records}
    there, fit = (sum(map(len, splits.values())) for splits in (records, short))
    need(fit or not there, f"block_size={c.block_size}: all records are longer")
    print(f"{fit:,} of {there:,} records fit into {c.block_size} tokens")
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "train.jsonl", short["train"])
    (folder / "val.jsonl").unlink(missing_ok=True)              # an earlier source's
    if short["val"]:
        write_jsonl(folder / "val.jsonl", short["val"])
    prepare(source=str(folder), tokenizer=c.tokenizer, out=c.out, block_size=c.block_size,
            overwrite=True)


if __name__ == "__main__":
    guard("instruct.py")
    main(sys.argv[1:])
