"""What rank 0 shows of a run: a progress bar on a terminal, plain lines elsewhere. Other ranks are `Silent`."""

import math
import os
import sys
import time
from collections.abc import Iterable, Iterator
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
_LINE_SECONDS = 5.0  # between two lines
_LAUNCHERS = ("horovodrun", "mpirun", "mpiexec", "orterun", "prterun")


def screen(num_ranks: int) -> tuple[TextIO, bool]:
    """The stream to show progress on, and whether it is a terminal: with several ranks, the launcher's terminal."""
    if num_ranks == 1:
        return sys.stdout, sys.stdout.isatty()
    with suppress(OSError):
        if terminal := _launcher_terminal():
            return terminal.open("w", encoding="utf-8"), True
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


def _ancestors() -> Iterator[Path]:
    """The parents of this process in /proc, nearest first."""
    process = Path("/proc/self")
    with suppress(OSError):
        while parent := int((process / "status").read_text().partition("\nPPid:")[2].split()[0]):
            process = Path(f"/proc/{parent}")
            yield process


class ProgressDisplay:
    """Where a run shows its progress. This base class shows nothing."""

    def start(self, total_steps: int, first_step: int) -> None:
        """Begin. `first_step`: steps already completed; 0, or those of the checkpoint."""

    def step(
        self,
        step: int,
        epoch: int,
        loss: float,
        perplexity: float | None,
        lr: float,
        per_second: float,
        unit: str,
        mfu: float | None = None,
    ) -> None:
        """Show the numbers after `step`; cheap enough to call in every step. `per_second` is in `unit`."""

    def message(self, text: str) -> None:
        """Print a line above the bar: an evaluation, a checkpoint, a warning."""

    def stop(self) -> None:
        """End; the last numbers stay on the screen. Call it in a `finally`: it restores the cursor."""


@dataclass
class _State:
    """The newest numbers of a run and its pace."""

    total_steps: int
    step: int
    started: float
    numbers: tuple[str, ...] = ()  # epoch, loss, perplexity, rate, speed, MFU
    at: float = 0.0  # when `step` was shown
    seconds_per_step: float | None = None

    def left(self) -> str:
        if self.seconds_per_step is None:
            return "?"
        left = self.seconds_per_step * (self.total_steps - self.step) - (time.monotonic() - self.at)
        return duration(max(0.0, left))


class Silent(ProgressDisplay):
    """For every rank except 0."""


class Progress(ProgressDisplay):
    """A progress bar on a terminal; elsewhere a line at the first step, the last one, and every five seconds between.

    A closed screen, or a full disk behind it, does not end the training.
    """

    def __init__(self, stream: TextIO, terminal: bool) -> None:
        self._stream = stream
        self._live: Live | None = None
        if terminal and os.environ.get("TERM") not in ("dumb", "unknown"):
            self._live = Live(
                self,
                console=Console(file=stream, highlight=False),
                refresh_per_second=4,
                # Other output to the terminal goes above the bar.
                redirect_stdout=stream is sys.stdout,
                redirect_stderr=sys.stderr.isatty(),
            )
        # The launcher shows the numbers itself, from the ranks' heartbeats.
        self._prints_numbers = self._live is None and os.environ.get(SCREEN) != "launcher"
        self._state: _State | None = None
        self._pace_from: tuple[int, float] | None = None
        self._printed_at = -math.inf
        self._printed_step = 0

    def start(self, total_steps: int, first_step: int) -> None:
        self._state = _State(total_steps, first_step, time.monotonic())
        self._printed_step = first_step
        if self._live is not None:
            with suppress(OSError):
                self._live.start(refresh=True)

    def step(
        self,
        step: int,
        epoch: int,
        loss: float,
        perplexity: float | None,
        lr: float,
        per_second: float,
        unit: str,
        mfu: float | None = None,
    ) -> None:
        state = self._state
        assert state is not None, "step() before start()"
        now = time.monotonic()
        # The pace counts from the first step shown, as that step includes compilation and warm-up.
        since_step, since = self._pace_from or (state.step, state.started)
        if step > since_step:
            state.seconds_per_step = (now - since) / (step - since_step)
        self._pace_from = self._pace_from or (step, now)
        state.step, state.at = step, now
        state.numbers = (
            f"epoch {epoch}",
            f"loss {loss:.3f}",
            *([] if perplexity is None else [f"ppl {perplexity:.1f}" if perplexity < 1e5 else f"ppl {perplexity:.1e}"]),
            f"lr {lr:.1e}",
            f"{per_second:,.0f} {unit}/s",
            *([] if mfu is None else [f"MFU {100 * mfu:.1f} %"]),
        )
        if now - self._printed_at >= _LINE_SECONDS or step >= state.total_steps:
            self._print_numbers()

    def message(self, text: str) -> None:
        # An accent in a path must not end a run on a terminal without UTF-8.
        encoding = self._stream.encoding or "utf-8"
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        with suppress(OSError):
            if self._live is not None:
                self._live.console.print(Text(text), soft_wrap=True)
            else:
                self._stream.write(text + "\n")
                self._stream.flush()

    def stop(self) -> None:
        self._print_numbers()
        if self._live is not None:
            with suppress(OSError):
                self._live.stop()

    def _print_numbers(self) -> None:
        """Print a line unless the bar or the launcher shows the numbers, or they have been printed."""
        state = self._state
        if self._prints_numbers and state is not None and state.step > self._printed_step:
            self._printed_at, self._printed_step = state.at, state.step
            count = f"step {state.step:>{len(str(state.total_steps))}}/{state.total_steps}"
            self.message("  ".join((count, *state.numbers, f"eta {state.left()}")))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The bar with its times, and below it the numbers. Rich's thread calls this four times per second."""
        state = self._state
        if state is None:
            return
        width = options.max_width
        count = f"step {state.step}/{state.total_steps}"
        share = min(1.0, state.step / max(1, state.total_steps))
        elapsed = duration(time.monotonic() - state.started)
        fields = [(f"{share:4.0%}", 1), (f"{elapsed} elapsed", 2), (f"{state.left()} left", 0)]
        times = _fit(fields, width - len(count) - 12)
        room = width - len(count) - len(times) - 2
        yield Text(count + " ", end="", no_wrap=True, overflow="crop")
        if room >= 5:
            yield ProgressBar(total=1.0, completed=share, width=room)
            yield Text(f" {times}", no_wrap=True, overflow="crop")
        else:
            yield Text("")
        keep = (2, 0, 1, 4, 3, 5)
        numbers = _fit(zip(state.numbers, keep, strict=False), width)
        yield Text(numbers or "waiting for the first step", no_wrap=True, overflow="crop")


def _fit(words: Iterable[tuple[str, int]], width: int) -> str:
    """The words in order; if `width` is too small, those with the largest numbers are dropped."""
    fields = list(words)
    while len(text := "  ".join(word for word, _ in fields)) > width and fields:
        fields.remove(max(fields, key=lambda field: field[1]))
    return text


def duration(seconds: float) -> str:
    """Format seconds as 1:23, or 4:05:06 from one hour on."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
