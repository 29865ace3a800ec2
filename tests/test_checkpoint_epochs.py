"""Checkpoints by epochs, beside those by steps."""

import json
from pathlib import Path

import pytest
from commands import command

TEXT = "the cat sat on my big red rug\n" * 60


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["checkpoint.every_epochs=1"], lambda steps, ends: ends),
        (["checkpoint.every_epochs=2"], lambda steps, ends: {*ends[1::2], ends[-1]}),
        (["checkpoint.every_epochs=3", "checkpoint.every_steps=4"], lambda steps, ends: {*steps[3::4], *ends[2:]}),
    ],
)  # fmt: skip
def test_checkpoints_come_at_the_ends_of_epochs(words, wanted, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    done = command(
        "hvd-train", "--preset", "tiny", f"data.source={tmp_path / 'text.txt'}", f"data.cache_dir={tmp_path / 'cache'}",
        f"output_dir={tmp_path / 'run'}", "data.workers=1", "data.tokenizer=char", "data.vocab_size=none",
        "data.sequence_length=32", "training.max_steps=none", "training.epochs=4", "training.log_every=1",
        "training.device=cpu", "checkpoint.every_steps=none", "checkpoint.keep_best=false", "checkpoint.keep_last=99",
        *words,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    epochs = {line["step"]: line["epoch"] for line in lines if "loss" in line}
    steps = sorted(epochs)
    ends = [step for step in steps if epochs.get(step + 1) != epochs[step]]
    assert len(ends) == 4 and len(steps) > 12
    found = {int(folder.name.split("-")[1]) for folder in (tmp_path / "run" / "checkpoints").glob("step-*")}
    assert found == set(wanted(steps, ends))
