"""What a user sees: a bar that fits the terminal, plain lines in a pipe, nothing from the other ranks."""

import errno
import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

import pytest

from hvd_transformer.reporting.progress import Progress, ProgressDisplay, Silent, duration, screen


class Clock:
    """A clock that only tests move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def show(progress: ProgressDisplay, step: int, loss: float = 5.123) -> None:
    progress.step(step, epoch=1, loss=loss, perplexity=168.0, lr=1e-3, per_second=12345.4, unit="tokens")


def test_a_line_of_a_pipe(clock: Clock) -> None:
    stream = io.StringIO()
    progress = Progress(stream, terminal=False)
    progress.start(600, 0)
    clock.now += 10
    show(progress, 50)
    assert stream.getvalue() == (
        "step  50/600  epoch 1  loss 5.123  ppl 168.0  lr 1.0e-03  12,345 tokens/s  eta 1:50\n"
    )


def test_mfu_follows_the_speed(clock: Clock) -> None:
    stream = io.StringIO()
    progress = Progress(stream, terminal=False)
    progress.start(600, 0)
    progress.step(50, 1, 5.0, None, 1e-3, 12345.4, "tokens", 0.4312)
    assert "  12,345 tokens/s  MFU 43.1 %  eta " in stream.getvalue()


def test_two_minutes_are_some_25_lines_with_first_and_last(clock: Clock) -> None:
    stream = io.StringIO()
    progress = Progress(stream, terminal=False)
    progress.start(600, 0)
    for step in range(1, 601):
        clock.now += 0.2
        show(progress, step)
    progress.message("test perplexity 19.1")
    progress.stop()
    lines = stream.getvalue().splitlines()
    assert 24 <= len(lines) <= 27
    assert lines[0].startswith("step   1/600 ")
    assert lines[-2].startswith("step 600/600 ")
    assert lines[-2].endswith("eta 0:00")
    assert lines[-1] == "test perplexity 19.1"


def test_a_run_that_is_stopped_shows_its_last_step_once(clock: Clock) -> None:
    stream = io.StringIO()
    progress = Progress(stream, terminal=False)
    progress.start(600, 0)
    for step in (1, 2, 3):
        show(progress, step)
    progress.stop()
    progress.stop()
    assert [line.split("/")[0] for line in stream.getvalue().splitlines()] == ["step   1", "step   3"]


def test_time_left_of_a_resumed_run_counts_its_own_steps_and_not_the_slow_first(clock: Clock) -> None:
    stream = io.StringIO()
    progress = Progress(stream, terminal=False)
    progress.start(1000, 900)
    clock.now += 60
    show(progress, 901)
    clock.now += 10
    show(progress, 911)
    assert stream.getvalue().splitlines()[-1].endswith("eta 1:29")


def test_numbers_without_bound_stay_short(clock: Clock) -> None:
    stream = io.StringIO()
    progress = Progress(stream, terminal=False)
    progress.start(10, 0)
    progress.step(1, epoch=1, loss=float("nan"), perplexity=float("inf"), lr=0.0, per_second=0.0, unit="tokens")
    progress.step(10, epoch=1, loss=11.9, perplexity=1.5e9, lr=0.0, per_second=1.0, unit="tokens")
    assert "loss nan  ppl inf" in stream.getvalue()
    assert "ppl 1.5e+09" in stream.getvalue()


def test_silent_and_messages_before_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    silent = Silent()
    silent.start(10, 0)
    show(silent, 1)
    silent.message("x")
    silent.stop()
    assert capsys.readouterr().out == ""
    progress = Progress(*screen(num_ranks=1))
    progress.message("resuming [step 10]")
    progress.stop()
    assert capsys.readouterr().out == "resuming [step 10]\n"


def test_a_screen_that_cannot_be_written_does_not_end_the_run(clock: Clock) -> None:
    failures = []

    class Full(io.StringIO):
        def flush(self) -> None:
            failures.append(OSError(errno.ENOSPC, "no space"))
            raise failures[-1]

    progress = Progress(Full(), terminal=False)
    progress.start(10, 0)
    show(progress, 1)
    progress.message("x")
    progress.stop()
    assert len(failures) >= 2  # the step and the message did meet the full disk


def test_a_terminal_without_utf8(clock: Clock) -> None:
    buffer = io.BytesIO()
    progress = Progress(io.TextIOWrapper(buffer, encoding="ascii"), terminal=False)
    progress.message("runs/caf\xe9")
    assert buffer.getvalue() == b"runs/caf\\xe9\n"


def test_every_step_costs_little() -> None:
    progress = Progress(io.StringIO(), terminal=False)
    progress.start(10_000, 0)
    start = time.perf_counter()
    for step in range(10_000):
        show(progress, step)
    assert (time.perf_counter() - start) / 10_000 < 100e-6


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (83.4, "1:23"), (3600, "1:00:00"), (59.6, "1:00")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


PROGRAM = """
import sys, time
from hvd_transformer.reporting.progress import Progress, screen
progress = Progress(*screen(num_ranks=1))
progress.start(60_000, 12_000)
time.sleep(0.3)
for step in range(12_001, 12_021):
    progress.step(step, 12, 5.123, 168.0, 1e-3, 12345.4, "tokens")
    if step == 12_010:
        progress.message("step 12010: valid loss 4.9 [best] " + "long " * 20)
        print("printed by a library")
    time.sleep(0.06)
progress.stop()
print("done")
"""


def on_a_terminal(columns: int, **environment: str) -> str:
    """What PROGRAM writes to a terminal of this width."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    unset = {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"}
    env = {key: value for key, value in os.environ.items() if key not in unset}
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=env | {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"} | environment,
    )
    os.close(theirs)
    output = b""
    while select.select([ours], [], [], 20)[0]:
        try:
            output += os.read(ours, 65536)
        except OSError:  # EIO: the child has closed its end
            break
    assert child.wait(20) == 0
    os.close(ours)
    return output.decode()


def lines_of(output: str) -> list[str]:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output).replace("\r", "\n").split("\n")


def test_the_bar_fits_80_columns() -> None:
    output = on_a_terminal(80)
    lines = lines_of(output)
    bars = [line for line in lines if line.startswith("step 12") and "left" in line]
    assert bars
    for bar in bars:
        assert re.fullmatch(r"step 120\d\d/60000 [━╸╺ ]{10,}  20%  \d:\d\d elapsed  [\d:?]+ left\s*", bar)
    assert max(len(line) for line in lines if "long" not in line) <= 80
    assert any("waiting for the first step" in line for line in lines)
    assert any("epoch 12  loss 5.123  ppl 168.0  lr 1.0e-03  12,345 tokens/s" in line for line in lines)
    assert [line.strip() for line in lines if "[best]" in line or "library" in line] == [
        ("step 12010: valid loss 4.9 [best] " + "long " * 20).strip(),
        "printed by a library",
    ]
    assert [line.strip() for line in lines if line.strip()][-1] == "done"
    # The cursor is visible again.
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")


@pytest.mark.parametrize("columns", [60, 40, 20])
def test_narrow_terminals_drop_fields_and_keep_step_and_loss(columns: int) -> None:
    lines = [line.rstrip() for line in lines_of(on_a_terminal(columns)) if "long" not in line]
    assert max(len(line) for line in lines) <= columns
    assert any(line.startswith("step 12020/60000") for line in lines)
    assert any("loss 5.123" in line for line in lines)
    assert not any("…" in line for line in lines)


def test_a_dumb_terminal_has_plain_lines() -> None:
    output = on_a_terminal(80, TERM="dumb")
    assert "\x1b" not in output
    assert output.count("eta") == 2
