"""A launcher that leaves its terminal: whom it tells, and that nobody who is gone can hold it up."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

LEAVE = """
import sys
from hvd_transformer.launch.detach import is_detached, leave_terminal
print("before", is_detached(), flush=True)
print("not yet written", end="")
leave_terminal()
print("after", is_detached(), flush=True)
leave_terminal()
sys.exit(9)
"""


def leave(begun: int | None, output: Path) -> int:
    environment = {**os.environ, **({} if begun is None else {"HVD_TRANSFORMER_BEGUN": str(begun)})}
    with output.open("wb") as file:
        words, fds = [sys.executable, "-c", LEAVE], [] if begun is None else [begun]
        return subprocess.run(words, stdout=file, stderr=file, env=environment, pass_fds=fds, timeout=60).returncode


def test_it_tells_a_file_and_prints_nothing_more(tmp_path: Path) -> None:
    with (tmp_path / "begun").open("wb") as begun:
        assert leave(begun.fileno(), tmp_path / "out") == 9
    assert (tmp_path / "begun").read_bytes() == b"!"
    assert (tmp_path / "out").read_text() == "before True\nnot yet written"


def test_a_starter_that_is_gone_does_not_end_it(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert leave(writing, tmp_path / "out") == 9
    finally:
        os.close(writing)
    assert (tmp_path / "out").read_text() == "before True\nnot yet written"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_does_not_end_it(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as begun:
        assert leave(begun.fileno(), tmp_path / "out") == 9


def test_others_keep_their_output(tmp_path: Path) -> None:
    assert leave(None, tmp_path / "out") == 9
    assert (tmp_path / "out").read_text() == "before False\nnot yet writtenafter False\n"
