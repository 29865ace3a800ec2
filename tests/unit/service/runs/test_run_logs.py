"""Pages of logs of any size, with anything in them."""

import os
import time
from pathlib import Path

import pytest

from hvd_transformer.errors import UserError
from hvd_transformer.service.runs import logs as module
from hvd_transformer.service.runs.logs import log_names, log_page


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


def _write(run: Path, data: bytes, name: str = "rank-000.log", age: float = 60.0) -> Path:
    path = run / "logs" / name
    path.write_bytes(data)
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def test_pages_are_whole_lines_and_give_everything_once(run: Path) -> None:
    data = b"".join(b"line %d\n" % number for number in range(1000)) + b"the end"
    _write(run, data)
    text, offset, pages = "", 0, 0
    while True:
        page = log_page(run, "0", offset, limit=100)
        assert (page.offset, page.size) == (offset, len(data))
        if page.next == page.offset:
            break
        assert page.text.endswith("\n") or page.next == len(data)
        text, offset, pages = text + page.text, page.next, pages + 1
    assert text.encode() == data
    assert pages > 80


def test_an_unfinished_line_is_waited_for(run: Path) -> None:
    _write(run, b"one\ntw", age=0.0)
    page = log_page(run, "0")
    assert (page.text, page.next, page.size) == ("one\n", 4, 6)
    _write(run, b"one\ntwo\n", age=0.0)
    assert log_page(run, "0", page.next).text == "two\n"


def test_the_tail_begins_with_a_whole_line(run: Path) -> None:
    _write(run, b"first line\nsecond line\nthird\n")
    assert log_page(run, "0", tail=17).text == "third\n"
    assert log_page(run, "0", tail=18).offset == 11
    assert log_page(run, "0", tail=1000).text == "first line\nsecond line\nthird\n"
    assert log_page(run, "0", tail=2).text == "d\n"
    assert log_page(run, "0", tail=0).text == ""


def test_a_huge_log_is_not_read_whole(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (run / "logs" / "launch.log").open("wb") as file:
        file.seek(1 << 30)
        file.write(b"\nthe last line\n")
    read = []
    pread = os.pread
    monkeypatch.setattr(module.os, "pread", lambda file, size, place: read.append(size) or pread(file, size, place))
    page = log_page(run, "launch", tail=65_536)
    assert page.text == "the last line\n"
    assert page.size == (1 << 30) + 15
    assert sum(read) < 1 << 20
    assert log_page(run, "launch", 1 << 29, limit=10**12).next <= (1 << 29) + (1 << 20)


def test_a_line_longer_than_a_page_is_given_in_parts(run: Path) -> None:
    text = "äö€😀" * 100
    _write(run, text.encode() + b"\n")
    found, offset = "", 0
    for limit in (10, 11, 12, 13, 14, 3000):
        page = log_page(run, "0", offset, limit)
        found, offset = found + page.text, page.next
    assert found == text + "\n"


def test_other_bytes_are_replaced(run: Path) -> None:
    _write(run, b"a\xff\xfeb\nc\x00d\n\xc3")
    assert log_page(run, "0").text == "a\ufffd\ufffdb\nc\ufffdd\n\ufffd"
    _write(run, b"\x80" * 100)
    assert log_page(run, "0", limit=5).next == 5


def test_progress_bars_show_their_last_state(run: Path) -> None:
    _write(run, b"10%\r50%\r100%\nwindows\r\n\x1b[31mred\x1b[0m \x1b]0;title\x07text\n 90%\r")
    assert log_page(run, "0").text == "100%\nwindows\nred text\n 90%"


def test_nothing_that_a_terminal_acts_upon_is_left(run: Path) -> None:
    _write(run, bytes(range(256)) * 3)
    assert all(character.isprintable() or character in "\n\t\xa0\xad\ufffd" for character in log_page(run, "0").text)


def test_a_log_that_became_shorter_begins_anew(run: Path) -> None:
    _write(run, b"one\n")
    page = log_page(run, "0", offset=1000)
    assert (page.text, page.offset, page.next) == ("one\n", 0, 4)


@pytest.mark.parametrize(
    "which", ["", "..", "0/../../x", "-1", "1.5", "launch.log", "٣", "9999999", "0\n", "x" * 10_000]
)
def test_names_that_are_no_log(run: Path, which: str) -> None:
    with pytest.raises(UserError, match="must be the number of a rank, or launch") as error:
        log_page(run, which)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 200


def test_links_and_missing_logs(run: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (run / "logs" / "rank-000.log").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match="cannot be read"):
        log_page(run, "0")
    _write(run, b"", "rank-012.log")
    _write(run, b"", "launch.log")
    with pytest.raises(UserError, match="has no log rank-005.log; logs: launch, 0, 12"):
        log_page(run, "5")
    with pytest.raises(UserError, match="must not be negative"):
        log_page(run, "12", offset=-1)
    assert log_names(run / "missing") == []
    with pytest.raises(UserError, match="logs: none yet"):
        log_page(run / "missing", "0")
