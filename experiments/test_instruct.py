"""Tests of instruct.py and of a run on what it makes; `python test_all.py` runs them too."""
import json
import lzma
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from test_all import log_of, midus_run, text_folder, train_midus, write_jsonl

from experiments import instruct
from prepare_fineweb import ConfigError, TokenShards

INSTRUCTIONS = [
    dict(
        instruction=f"Repeat {i}.",
        input="a word" if i % 2 else "",
        output=f"word {i}",
        source="prose" if i % 3 else "code",
    )
    for i in range(120)
]


def records_of(source, out, *flags):
    """experiments/instruct.py -> the records it made."""
    instruct.main([f"--source={source}", "--tokenizer=bytes", f"--out={out}", *flags])
    records = Path(f"{out}_records") / "train.jsonl"
    return [json.loads(line) for line in records.open()]


def test_midus_sft_on_instructions(midus_run, tmp_path, capsys):
    """Alpaca's records become prompts and answers, and the loss is on the answers."""
    with lzma.open(tmp_path / "rows.jsonl.xz", "wt") as f:
        f.writelines(json.dumps(row) + "\n" for row in INSTRUCTIONS)
    data = tmp_path / "sft"
    first, second, *_ = records_of(tmp_path / "rows.jsonl.xz", data, "--skip=code,math")
    assert "80 of 120 records" in capsys.readouterr().out
    prompt = "### Instruction:\nRepeat 1.\n\n### Input:\na word\n\n### Response:\n"
    assert first == {"prompt": prompt, "answer": "word 1"}
    assert second["prompt"] == "### Instruction:\nRepeat 2.\n\n### Response:\n"
    x, y = TokenShards(str(data), "train", 128).batch(range(4))
    learned = y[y >= 0]
    answers = bytes(t for t in learned.tolist() if t < 256).decode()
    assert re.fullmatch(r"(word \d+|\d*)+", answers)
    assert len(learned) < y.numel() / 3
    run = tmp_path / "run"
    train_midus("--max_iters=3 --upscale=midus --phase=sft --n_keys=8", dataset=data, out_dir=run,
                init_from=midus_run)
    assert log_of(run)[1] > 0


def test_instruct_reads_arrays_and_dollys_names_and_refuses_the_rest(tmp_path):
    array, dolly = tmp_path / "array.json", tmp_path / "dolly.jsonl"
    array.write_text(json.dumps(INSTRUCTIONS[:60]))
    write_jsonl(dolly, [
        dict(instruction=row["instruction"], context=row["input"], response=row["output"])
        for row in INSTRUCTIONS[:60]])
    records = records_of(array, tmp_path / "other")
    assert len(records) == 60 and records[1]["answer"] == "word 1"
    assert records_of(dolly, tmp_path / "other") == records
    for file, text, message in (
            (array, '{"a": 1}', "must be an array"), (array, "[", "cannot be read"),
            (dolly, '{"instruction": "?", "input": ""}', "record 1: a record must have texts")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            records_of(file, tmp_path / "x")
