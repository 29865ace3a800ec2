"""The newest value of each key, from the end of the file."""

import os
from pathlib import Path

import pytest
from made_runs import add_lines, line, training

from hvd_transformer.service.runs import newest_values as module
from hvd_transformer.service.runs.newest_values import NewestValues


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "metrics.jsonl").touch()
    return tmp_path


def test_follows_the_file(run: Path) -> None:
    newest = NewestValues(run / "metrics.jsonl")
    assert not newest.refresh()
    add_lines(run, [{"step": 1, "loss": 2, "text": "x"}, {"step": 1, "valid_loss": 3}])
    assert newest.refresh()
    assert (newest.step, newest.values) == (1, {"loss": 2, "valid_loss": 3})
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "loss": null}\n{"step": 3, "lo')
    assert newest.refresh()
    assert (newest.step, newest.values) == (2, {"valid_loss": 3})
    assert not newest.refresh()


def test_finds_the_last_evaluation_of_a_long_file(run: Path) -> None:
    add_lines(run, [{"step": 1, "valid_loss": 7}, {"step": 2, "valid_loss": 8, "valid_bleu": 9}])
    add_lines(run, training(range(3, 6000)))
    assert (run / "metrics.jsonl").stat().st_size > 10 * module._TAIL_BYTES
    newest = NewestValues(run / "metrics.jsonl")
    newest.refresh()
    assert newest.step == 5999
    assert newest.values["valid_loss"] == 8
    assert newest.values["valid_bleu"] == 9
    assert newest.values["loss"] == 10 / 5999


def test_reads_little_of_a_long_file(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SEARCHED_BYTES", 100_000)
    add_lines(run, [{"step": 1, "valid_loss": 7}])
    add_lines(run, training(range(3, 6000)))
    newest = NewestValues(run / "metrics.jsonl")
    newest.refresh()
    assert "valid_loss" not in newest.values


def test_cut_lines_are_forgotten(run: Path) -> None:
    add_lines(run, [*training([1, 2]), {"step": 2, "valid_loss": 3}])
    newest = NewestValues(run / "metrics.jsonl")
    newest.refresh()
    os.truncate(run / "metrics.jsonl", len(line(training([1])[0])))
    assert newest.refresh()
    assert newest.step == 1
    assert "valid_loss" not in newest.values
