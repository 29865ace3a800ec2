"""What rank 0 shows of a run: a progress bar on a terminal, plain lines elsewhere. Other ranks are `Silent`."""

import math
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

# The environment variable that tells rank 0, by the value "launcher", that the launcher shows the progress.
SCREEN = "HVD_TRANSFORMER_SCREEN"
_LAUNCHERS = ("horovodrun", "mpirun", "mpiexec", "orterun", "prterun")


def screen(num_ranks: int) -> tuple[TextIO, bool]:
    """The stream to show progress on, and whether it is a terminal: with several ranks, the launcher's terminal."""
    if num_ranks == 1:
        return sys.stdout, sys.stdout.isatty()
    terminal = _launcher_terminal()
    if terminal is None:
        return sys.stdout, False
    try:
        return terminal.open("w", encoding="utf-8"), True
    except OSError:
        return sys.stdout, False


def _launcher_terminal() -> Path | None:
    """The terminal that the outermost launcher prints to, if any. Linux only: None on other systems."""
    found: Path | None = None
    for process in _ancestors():
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            target = (process / "fd" / "1").readlink()
        except OSError:
            continue
        if any(Path(word.decode(errors="replace")).name in _LAUNCHERS for word in words[:2]):
            found = target if target.is_char_device() and str(target).startswith(("/dev/pts/", "/dev/tty")) else None
    return found


def _ancestors() -> list[Path]:
    """The parents of this process in /proc, nearest first."""
    result: list[Path] = []
    process = Path("/proc/self")
    while True:
        try:
            status = (process / "status").read_text()
        except OSError:
            return result
        parent = next(line.split()[1] for line in status.splitlines() if line.startswith("PPid:"))
        if parent == "0":
            return result
        process = Path("/proc") / parent
        result.append(process)


class Silent:
    """Shows nothing: for every rank except 0. Also the interface of the others."""

    def start(self, total_steps: int, first_step: int) -> None:
        """Begins. `first_step`: steps already completed; 0, or those of the checkpoint."""

    def step(
        self,
        step: int,
        epoch: int,
        loss: float,
        perplexity: float | None,
        lr: float,
        tokens_per_second: float,
        unit: str = "tokens",
    ) -> None:
        """Shows the numbers after `step`; cheap enough to call in every step."""

    def message(self, text: str) -> None:
        """Prints a line above the bar: an evaluation, a checkpoint, a warning."""

    def stop(self) -> None:
        """Ends; the last numbers stay on the screen. Call it in a `finally`: it restores the cursor."""


@dataclass
class _State:
    """The newest numbers of a run and its pace."""

    total_steps: int
    step: int
    started: float
    numbers: tuple[str, ...] = ()  # epoch, loss, perplexity, rate, speed
    at: float = 0.0  # when `step` was shown
    seconds_a_step: float | None = None

    def elapsed(self) -> str:
        return duration(time.monotonic() - self.started)

    def left(self) -> str:
        if self.seconds_a_step is None:
            return "?"
        left = self.seconds_a_step * (self.total_steps - self.step) - (time.monotonic() - self.at)
        return duration(max(0.0, left))


class Progress(Silent):
    """A progress bar on a terminal; elsewhere a line at the first step, the last one, and every `every_seconds` in
    between (infinity: messages only).

    A closed screen, or a full disk behind it, does not end the training.
    """

    def __init__(self, stream: TextIO | None = None, terminal: bool | None = None, every_seconds: float = 5.0) -> None:
        """`terminal`: whether the stream is a terminal; None: ask the stream."""
        stream = sys.stdout if stream is None else stream
        terminal = stream.isatty() if terminal is None else terminal
        terminal = terminal and os.environ.get("TERM") not in ("dumb", "unknown")
        if os.environ.get(SCREEN) == "launcher":
            every_seconds = math.inf  # the launcher shows the numbers, from the ranks' heartbeats
        self._view = _Bar(stream) if terminal else _Lines(stream, every_seconds)
        self._encoding = stream.encoding or "utf-8"
        self._state: _State | None = None
        self._pace_from: tuple[int, float] | None = None

    def start(self, total_steps: int, first_step: int) -> None:
        self._state = _State(total_steps, first_step, time.monotonic())
        self._pace_from = None
        with suppress(OSError):
            self._view.start(self._state)

    def step(
        self,
        step: int,
        epoch: int,
        loss: float,
        perplexity: float | None,
        lr: float,
        tokens_per_second: float,
        unit: str = "tokens",
    ) -> None:
        state = self._state
        assert state is not None, "step() before start()"
        now = time.monotonic()
        # The pace counts from the first step shown, as that step includes compilation and warm-up.
        since_step, since = self._pace_from or (state.step, state.started)
        if step > since_step:
            state.seconds_a_step = (now - since) / (step - since_step)
        self._pace_from = self._pace_from or (step, now)
        state.step, state.at = step, now
        state.numbers = (
            f"epoch {epoch}",
            f"loss {loss:.3f}",
            *([] if perplexity is None else [f"ppl {perplexity:.1f}" if perplexity < 1e5 else f"ppl {perplexity:.1e}"]),
            f"lr {lr:.1e}",
            f"{tokens_per_second:,.0f} {unit}/s",
        )
        with suppress(OSError):
            self._view.show(state)

    def message(self, text: str) -> None:
        # An accent in a path must not end a run on a terminal without UTF-8.
        text = text.encode(self._encoding, "backslashreplace").decode(self._encoding)
        with suppress(OSError):
            self._view.message(text)

    def stop(self) -> None:
        with suppress(OSError):
            self._view.stop()


class _Lines:
    """Plain lines, each flushed, for a pipe, a log file or horovodrun."""

    def __init__(self, stream: TextIO, every_seconds: float) -> None:
        self._stream = stream
        self._every_seconds = every_seconds
        self._printed_at: float | None = None
        self._waiting: _State | None = None

    def start(self, state: _State) -> None:
        self._printed_at = None

    def show(self, state: _State) -> None:
        self._waiting = state
        due = self._printed_at is None or state.at - self._printed_at >= self._every_seconds
        if self._every_seconds < math.inf and (due or state.step >= state.total_steps):
            self._print_state()

    def message(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def stop(self) -> None:
        if self._every_seconds < math.inf:
            self._print_state()

    def _print_state(self) -> None:
        state, self._waiting = self._waiting, None
        if state is not None:
            self._printed_at = state.at
            count = f"step {state.step:>{len(str(state.total_steps))}}/{state.total_steps}"
            self.message("  ".join((count, *state.numbers, f"eta {state.left()}")))


class _Bar:
    """Two lines that stay at the bottom of a terminal: the bar with its times, and the numbers."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False)
        self._live = Live(
            self,
            console=self._console,
            refresh_per_second=4,
            # Other output to the terminal goes above the bar.
            redirect_stdout=stream is sys.stdout,
            redirect_stderr=sys.stderr.isatty(),
        )
        self._state: _State | None = None

    def start(self, state: _State) -> None:
        self._state = state
        self._live.start(refresh=True)

    def show(self, state: _State) -> None:
        """Does nothing: the bar's own thread reads the state four times per second."""

    def message(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def stop(self) -> None:
        self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        state = self._state
        if state is None:
            return
        width = options.max_width
        count = f"step {state.step}/{state.total_steps}"
        share = min(1.0, state.step / max(1, state.total_steps))
        times = _fit(
            [(f"{share:4.0%}", 1), (f"{state.elapsed()} elapsed", 2), (f"{state.left()} left", 0)],
            width - len(count) - 12,
        )
        room = width - len(count) - len(times) - 2
        yield Text(count + " ", end="", no_wrap=True, overflow="crop")
        if room >= 5:
            yield ProgressBar(total=1.0, completed=share, width=room)
            yield Text(f" {times}", no_wrap=True, overflow="crop")
        else:
            yield Text("")
        keep = (2, 0, 1, 4, 3)
        numbers = _fit(list(zip(state.numbers, keep, strict=False)), width)
        yield Text(numbers or "waiting for the first step", no_wrap=True, overflow="crop")


def _fit(fields: list[tuple[str, int]], width: int) -> str:
    """The fields in order; if `width` is too small, those with the largest numbers are dropped."""
    fields = list(fields)
    while len(text := "  ".join(word for word, _ in fields)) > width and fields:
        fields.remove(max(fields, key=lambda field: field[1]))
    return text


def duration(seconds: float) -> str:
    """Formats seconds as 1:23, or 4:05:06 from one hour on."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
