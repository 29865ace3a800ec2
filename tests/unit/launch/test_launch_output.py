"""What a launched job prints, where the terminal or the disk of the log takes nothing for a while."""

import io
import json
import os
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from hvd_transformer.cli.exit_file import EXIT_FILE
from hvd_transformer.launch.output import launch_log, launch_output, launch_screen, outlet
from hvd_transformer.launch.output.launch_log import LaunchLog
from hvd_transformer.launch.output.launch_output import LaunchOutput
from hvd_transformer.launch.output.launch_screen import Screen


class Terminal:
    """A pipe in place of standard output, which nobody reads until `drain`."""

    def __init__(self) -> None:
        self._reading, writing = os.pipe()
        self.stream = os.fdopen(writing, "w")
        self.read = b""
        self._thread = threading.Thread(target=self._drain, daemon=True)

    def drain(self) -> None:
        self._thread.start()

    def close(self) -> None:
        if not self._thread.is_alive():
            self.drain()
        time.sleep(0.1)  # for a writer that waits
        self.stream.close()
        self._thread.join(20)
        os.close(self._reading)

    def _drain(self) -> None:
        while data := os.read(self._reading, 1 << 16):
            self.read += data


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """Where what is shown goes. Not by sys.stdout, which pytest sets again before the test."""
    with closing(Terminal()) as made:
        monkeypatch.setattr(launch_screen, "sys", SimpleNamespace(stdout=made.stream, stderr=sys.stderr))
        yield made


def lines(number: int) -> str:
    return "".join(f"line {at} {'x' * 100}\n" for at in range(number))


def test_a_terminal_that_takes_nothing_stops_nobody(terminal: Terminal, tmp_path: Path) -> None:
    log = LaunchLog(tmp_path / "launch.log")
    output = LaunchOutput(Screen(), SimpleNamespace(log=log, server=MagicMock(), begun=lambda: None))
    began = time.monotonic()
    for _ in range(20):
        output.show(0, "out", lines(1000))  # a pipe holds 64 KiB
    output.message("the end")
    assert time.monotonic() - began < 2
    deadline = time.monotonic() + 20
    while not (tmp_path / "launch.log").exists() or "the end" not in (tmp_path / "launch.log").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    terminal.drain()
    output.close()
    while len(terminal.read) < 20 * len(lines(1000)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert terminal.read.decode() == 20 * lines(1000)


def test_what_waits_for_too_long_is_left_out_of_the_screen_and_told(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outlet, "_MOST_BYTES", 1 << 20)
    shown = io.StringIO()
    monkeypatch.setattr(launch_screen.sys, "stderr", shown)
    output = LaunchOutput(Screen(), None)
    for _ in range(20):
        output.show(0, "out", lines(1000))
    terminal.drain()
    deadline = time.monotonic() + 20
    while output._outlet._waiting:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with closing(output):
        output.show(0, "out", "more\n")
    assert re.fullmatch(r"hvd-transformer: \d+ lines were not shown: the terminal took nothing\n", shown.getvalue())


def test_the_end_does_not_wait_for_ever(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_output, "_END_SECONDS", 0.2)
    output = LaunchOutput(Screen(), None)
    output.show(0, "out", lines(10_000))
    began = time.monotonic()
    output.close()
    assert time.monotonic() - began < 2


def test_a_log_whose_folder_comes_later_has_everything(tmp_path: Path) -> None:
    log = LaunchLog(tmp_path / "run" / "launch.log")
    log.write("before\n")
    log.write("the folder\n")
    time.sleep(0.2)
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    log.write("after\n")
    log.close()
    assert (tmp_path / "run" / "launch.log").read_text() == "before\nthe folder\nafter\n"


def test_a_log_whose_folder_never_comes_keeps_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job without a run directory may print for weeks."""
    monkeypatch.setattr(launch_log, "_MOST_UNWRITTEN", 100)
    log = LaunchLog(tmp_path / "run" / "launch.log")
    for number in range(100):
        log.write(f"line {number:4}\n")
    log.make_folder = True
    log.close()
    assert (tmp_path / "run" / "launch.log").read_text() == "".join(f"line {number:4}\n" for number in range(90, 100))


def test_a_log_on_a_full_disk_has_every_line_once_when_there_is_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_log, "_MOST_UNWRITTEN", 20_000)
    log, lines = LaunchLog(tmp_path / "launch.log"), [letter * 2999 + "\n" for letter in "abcdefghijklm"]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        for line in lines[:-1]:
            log.write(line)
        log._outlet.close(20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "launch.log").read_text() == lines[0]
    assert len(log._unwritten) == 6  # the last ones: what waits is limited
    log._append(lines[-1])
    assert (tmp_path / "launch.log").read_text() == "".join([lines[0], *lines[-7:]])


def test_a_log_without_a_folder_is_lost_unless_nobody_has_seen_it(tmp_path: Path) -> None:
    for make_folder in (False, True):
        log = LaunchLog(tmp_path / "run" / "logs" / "launch.log")
        log.write("why it ended\n")
        log.make_folder = make_folder
        log.close()
        assert (tmp_path / "run").exists() == make_folder
    assert (tmp_path / "run" / "logs" / "launch.log").read_text() == "why it ended\n"


def test_the_last_line_of_a_rank() -> None:
    with closing(LaunchOutput(Screen(False), None)) as output:
        output.start([], "")
        output.show(1, "err", "Traceback:\n  File x\nKeyError: 'y'\n\n")
        output.show(1, "out", "not this\n")
        output.show(2, "err", "z" * 1000)
        output.show(3, "err", "\x1b[31mred\x07\n")
        assert [output.last_line(rank) for rank in (0, 1)] == ["", "KeyError: 'y'"]
        assert output.last_line(2) == "z" * 299 + "…"
        assert output.last_line(3) == " [31mred "  # others show it on their terminals
        output.start([], "restart 1 of 1")
        assert output.last_line(1) == ""


def test_one_view_waits_for_a_blocked_terminal(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_output, "_LOOK_SECONDS", 0.0)
    output = LaunchOutput(Screen(), None)
    put, agents = MagicMock(wraps=output._outlet.put), SimpleNamespace(beats={}, have_begun=True)
    output.show(0, "out", lines(1000))  # more than the pipe holds
    monkeypatch.setattr(output._outlet, "put", put)
    for _ in range(100):
        output.look(agents)
        time.sleep(0.001)
    assert put.call_count == 1
    terminal.drain()
    output.close()
    assert not output.blocked


LEAVES = """
import sys
from hvd_transformer.cli.exit_file import ExitFile
from hvd_transformer.launch.output import launch_output
from hvd_transformer.launch.output.launch_screen import Screen
launch_output._END_SECONDS = 0.5
output = launch_output.LaunchOutput(Screen(), None)
output.show(0, "out", "x" * 1_000_000 + "\\n")
output.close()
with ExitFile() as exit_file:
    assert output.blocked
    exit_file.leave(7)
"""


def test_with_a_blocked_terminal_the_exit_code_is_the_jobs(tmp_path: Path) -> None:
    """Python itself would wait for what writes to the terminal, and abort."""
    reading, writing = os.pipe()
    environment = {**os.environ, EXIT_FILE: str(tmp_path / "exit")}
    done = subprocess.run([sys.executable, "-c", LEAVES], stdout=writing, env=environment, timeout=60)
    os.close(reading), os.close(writing)
    assert (done.returncode, json.loads((tmp_path / "exit").read_text())["code"]) == (7, 7)
