"""The newest samples are found in a file of any size, with anything in it."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_transformer.reporting.samples_log import SamplesLog
from hvd_transformer.service.runs import samples as module
from hvd_transformer.service.runs.samples import StepSamples, newest_samples


def line(step: Any, *samples: Any) -> bytes:
    return json.dumps({"step": step, "samples": samples}).encode() + b"\n"


def text(number: int) -> dict[str, str]:
    return {"prompt": f"prompt {number}", "continuation": f"<script>alert({number})</script>\n\\"}


def steps(run: Path) -> list[int]:
    return [found.step for found in newest_samples(run)]


def test_a_run_without_samples_has_none(tmp_path: Path) -> None:
    assert newest_samples(tmp_path) == newest_samples(tmp_path / "gone") == []
    (tmp_path / "samples.jsonl").touch()
    assert newest_samples(tmp_path) == []


def test_reads_what_hvd_train_writes_at_most(tmp_path: Path) -> None:
    """Also the longest line that it can write: ten samples of three texts, of characters that JSON escapes."""
    log = SamplesLog(tmp_path, 0, pytest.fail)
    longest = [dict.fromkeys(("source", "reference", "translation"), "\0" * 2000)] * 10
    for step in range(3):
        log.write(step, longest)
    assert (tmp_path / "samples.jsonl").stat().st_size > 3 * 180_000
    (found,) = newest_samples(tmp_path)
    assert found.step == 2
    assert [text[:999] for sample in found.samples for text in sample.values()] == ["\0" * 999] * 30


def test_the_newest_steps_oldest_first(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_bytes(b"".join(line(step, text(step)) for step in range(0, 200, 5)))
    assert newest_samples(tmp_path) == [StepSamples(step, [text(step)]) for step in range(150, 200, 5)]


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    whole = line(1, text(1)) + line(2, text(2))
    for end in range(len(whole)):
        (tmp_path / "samples.jsonl").write_bytes(whole[:end])
        assert steps(tmp_path) == ([] if end < len(line(1, text(1))) else [1])
    (tmp_path / "samples.jsonl").write_bytes(whole)
    assert steps(tmp_path) == [1, 2]


def test_a_step_that_was_evaluated_again_counts_once(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_bytes(line(1, text(1)) + line(2, text(2)) + line(2, text(3)))
    assert newest_samples(tmp_path) == [StepSamples(1, [text(1)]), StepSamples(2, [text(3)])]


def test_of_a_gigabyte_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "samples.jsonl").open("wb") as file:
        file.seek(1 << 30)
        file.write(b"\n" + line(7, text(7)))
    read = []

    def pread(file: int, size: int, place: int) -> bytes:
        read.append(size)
        return os.pread(file, size, place)

    # The module has no other way to read.
    monkeypatch.setattr(module, "os", SimpleNamespace(pread=pread, fstat=os.fstat, close=os.close))
    assert steps(tmp_path) == [7]
    assert 0 < sum(read) <= 1 << 18


@pytest.mark.parametrize(
    "hostile",
    [
        b"[" * 100_000 + b"\n",
        b"\xff\xfe\n",
        b"null\n[1]\n5\n",
        b'{"step": 3}\n',
        line(3, 4, "a", None, [text(1)], {}),
        line(3, {"a": 1, "b": None, "c": {"d": "e"}}),
        line("3", text(3)),
        line(-3, text(3)),
        line(1 << 60, text(3)),
        b'{"step": NaN, "samples": [{"a": "b"}]}\n',
        b'{"step": 3, "samples": {"a": "b"}}\n',
        b'{"step": 1' + b"0" * 5000 + b', "samples": [{"a": "b"}]}\n',
        b'{"step": 3, "samples": [{"a": "' + b"x" * (1 << 19) + b'"}]}\n',
    ],
)
def test_what_is_not_ours_is_left_out(tmp_path: Path, hostile: bytes) -> None:
    (tmp_path / "samples.jsonl").write_bytes(hostile + line(9, text(9)))
    assert newest_samples(tmp_path) == [StepSamples(9, [text(9)])]
    (tmp_path / "samples.jsonl").write_bytes(line(9, text(9)) + hostile)
    assert newest_samples(tmp_path) in ([], [StepSamples(9, [text(9)])])


def test_numbers_of_samples_and_texts_are_limited(tmp_path: Path) -> None:
    many = {f"name {number}": "text" for number in range(1000)}
    (tmp_path / "samples.jsonl").write_bytes(line(1, *[many] * 5, *[text(1)] * 1000))
    (found,) = newest_samples(tmp_path)
    assert [len(sample) for sample in found.samples] == [10] * 5 + [2] * 5


def test_half_characters_become_question_marks(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_bytes(line(1, {"a\ud800": "\udcffb"}))
    assert newest_samples(tmp_path) == [StepSamples(1, [{"a?": "?b"}])]


def test_links_and_pipes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(line(1, text(1)))
    (tmp_path / "samples.jsonl").symlink_to("secret")
    assert newest_samples(tmp_path) == []
    (tmp_path / "samples.jsonl").unlink()
    os.mkfifo(tmp_path / "samples.jsonl")
    assert newest_samples(tmp_path) == []
