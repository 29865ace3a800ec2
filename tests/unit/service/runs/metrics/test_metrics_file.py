"""Every complete line is read once, whatever the file went through."""

import os
from pathlib import Path

import pytest

from hvd_transformer.service.runs.metrics import metrics_file
from hvd_transformer.service.runs.metrics.metrics_file import MetricsFile


def _all(file: MetricsFile) -> bytes:
    found = b""
    while (lines := file.read()) is not None:
        found += lines
    return found


def test_reads_each_line_once_and_half_lines_when_they_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"one\ntw")
    file = MetricsFile(path)
    assert _all(file) == b"one\n"
    with path.open("ab") as appended:
        appended.write(b"o\nthree\n")
    assert _all(file) == b"two\nthree\n"
    assert _all(file) == b""
    assert file.restarts == 0


def test_reads_a_long_file_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_file, "READ_BYTES", 64)
    path = tmp_path / "metrics.jsonl"
    data = b"".join(b"line %d\n" % number for number in range(100))
    path.write_bytes(data)
    assert _all(MetricsFile(path)) == data


def test_leaves_out_a_line_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_file, "READ_BYTES", 64)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"one\n" + b"x" * 1000 + b"\ntwo\n")
    assert _all(MetricsFile(path)) == b"one\ntwo\n"


def test_unchanged_file_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"one\n")
    file = MetricsFile(path)
    _all(file)
    monkeypatch.setattr(metrics_file, "open_plain", lambda path: pytest.fail("opened"))
    assert file.read() is None


@pytest.mark.parametrize("way", ["truncated", "truncated and grown again", "replaced", "replaced by a longer one"])
def test_notices_that_the_file_was_cut(tmp_path: Path, way: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"one\ntwo\nthree\n")
    file = MetricsFile(path)
    _all(file)
    new = {"truncated": b"one\n", "replaced": b"one\n"}.get(way, b"one\ntwo again\nthree again\nfour\n")
    if way.startswith("truncated"):
        os.truncate(path, 4)
        with path.open("ab") as appended:
            appended.write(new[4:])
    else:
        aside = tmp_path / "aside"
        aside.write_bytes(new)
        aside.replace(path)
    assert _all(file) == new
    assert file.restarts == 1


def test_tail_begins_with_a_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"one\ntwo\nthree\n")
    assert _all(MetricsFile(path, tail=8)) == b"three\n"
    assert _all(MetricsFile(path, tail=100)) == b"one\ntwo\nthree\n"


def test_refuses_links_and_pipes(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret\n")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "missing"):
        with pytest.raises(OSError):
            MetricsFile(tmp_path / name).read()
