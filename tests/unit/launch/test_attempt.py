"""The signals that ask a launcher to exit, and how it sees processes end."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from hvd_transformer.launch import attempt
from hvd_transformer.launch.attempt import Stop


@pytest.fixture
def stop() -> Iterator[Stop]:
    # Under nohup the first is ignored, in the background of a shell the second.
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGHUP, signal.SIGINT)}
    made = Stop()
    yield made
    made.restore()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("numbers", "count"),
    [
        ((signal.SIGTERM, signal.SIGTERM), 1),  # of a scheduler and its script
        ((signal.SIGHUP, signal.SIGHUP), 1),  # of a closed terminal and its shell
        ((signal.SIGHUP, signal.SIGTERM), 1),
        ((signal.SIGINT, signal.SIGINT), 2),  # on purpose
    ],
)
def test_signals_at_once_are_one_request(stop: Stop, numbers: tuple[signal.Signals, ...], count: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)
    assert stop.count == count


def test_a_later_sigterm_is_a_second_one(stop: Stop, monkeypatch: pytest.MonkeyPatch) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    monkeypatch.setattr(attempt, "_SAME_SECONDS", 0.0)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.count == 2


def test_sigterms_that_follow_each_other_closely_end_with_a_second_one(
    stop: Stop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five seconds are counted from the first one, not from the last."""
    counts = []
    for now in (100.0, 104.0, 108.0, 112.0):
        monkeypatch.setattr(attempt.time, "monotonic", lambda now=now: now)
        stop._note(signal.SIGTERM, None)
        counts.append(stop.count)
    assert counts == [1, 1, 2, 2]


def test_names_of_processes_may_be_any_bytes() -> None:
    """The kernel cuts them at 15 bytes, also within a character; /proc has those of all users."""
    code = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'caf\\xc3'); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert attempt._group_lives(process.pid)
        process.kill()
    assert not attempt._group_lives(process.pid)


def test_a_start_that_stands_still_can_be_stopped(stop: Stop) -> None:
    """As where horovodrun's files are on a server that is away."""
    with subprocess.Popen(["sleep", "60"], stdout=subprocess.PIPE) as process:
        threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGTERM]).start()
        assert attempt._plan(process, stop) is None
        process.kill()
    assert stop.count == 1
