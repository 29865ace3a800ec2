"""What a launched job shows: a live view on a terminal, plain lines elsewhere."""

import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TextIO

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from hvd_transformer.errors import WRONG_INPUT
from hvd_transformer.launch.agents import Beat
from hvd_transformer.launch.attempt import AttemptResult
from hvd_transformer.launch.hostfile import Host
from hvd_transformer.reporting.progress import duration

_LAST_LINES = 12  # shown of the rank that failed first
_HOST_ROWS = 8
_HELD_SECONDS = 3.0  # for which rank 0's errors are held back: another rank's failure may have caused them
_QUIET_BEAT_SECONDS = 5.0  # without a heartbeat, after which a rank is shown as silent


class Screen:
    """Shows one job across its restarts: rank 0's output as it comes, another rank's if that rank fails first."""

    def __init__(self, terminal: bool | None = None) -> None:
        """`terminal`: whether to draw the live view. Default: if standard output is a terminal."""
        self._last: dict[int, deque[str]] = {}
        self._held: list[tuple[float, str]] = []
        self._live: Live | None = None
        self._view: _View | None = None
        self.terminal = sys.stdout.isatty() if terminal is None else terminal

    def start(self, hosts: Sequence[Host], restart: str) -> None:
        """Begin the view of one start of the job. `restart`: the which, in words."""
        self._last.clear()
        if self.terminal:
            self._view = _View(hosts, restart)
            self._live = Live(self._view, refresh_per_second=4, redirect_stderr=sys.stderr.isatty())
            self._live.start()

    def look(self, beats: Mapping[int, Beat]) -> None:
        """Update the view; called often."""
        if self._held and time.monotonic() - self._held[0][0] > _HELD_SECONDS:
            self._release()
        if self._view is not None:
            self._view.beats = beats

    def show(self, rank: int, stream: str, text: str) -> None:
        """Take whole lines that a rank has printed."""
        lines = text.splitlines()
        self._last.setdefault(rank, deque(maxlen=_LAST_LINES)).extend(lines)
        if rank == 0 and stream == "err":
            self._held.append((time.monotonic(), text))
        elif rank == 0:
            _write(sys.stdout, text)

    def message(self, text: str) -> None:
        """Print a line of the launcher's own."""
        _write(sys.stderr, f"hvd-transformer: {text}")

    def failed(self, ended: AttemptResult, cause: str) -> None:
        """Print why a start failed, with the last lines of the rank that failed first, or else of horovodrun."""
        first, source, lines = ended.first, "", list[str]()
        if not ended.lost:
            if first is None:
                source, lines = "horovodrun", ended.said.splitlines()[-_LAST_LINES:]
            elif first.rank == 0:
                self._release()
            else:
                source, lines = f"rank {first.rank}", list(self._last.get(first.rank, []))
        self._held.clear()
        if first is not None and first.code == WRONG_INPUT:  # the rank's own line explains it
            for line in lines:
                _write(sys.stderr, line)
            return
        self.message(cause)
        if lines:
            self.message(f"the last lines of {source}:")
            _write(sys.stderr, "\n".join(f"  {line}" for line in lines))

    def end(self, failed: bool = False) -> None:
        """End the view of a start; its last state stays visible. With `failed`, a call of `failed` follows."""
        if not failed:
            self._release()
        if self._live is not None:
            self._live.stop()
            self._live = self._view = None

    def _release(self) -> None:
        for _, text in self._held:
            _write(sys.stderr, text)
        self._held.clear()


def _write(file: TextIO, text: str) -> None:
    encoding = file.encoding or "utf-8"  # a terminal may not have all characters
    text = text.encode(encoding, "backslashreplace").decode(encoding)
    with suppress(OSError):  # a closed terminal does not end the job
        file.write(text if text.endswith("\n") else f"{text}\n")
        file.flush()


class _View:
    """The state of the job at the bottom of a terminal: progress, numbers, a row per host."""

    def __init__(self, hosts: Sequence[Host], restart: str) -> None:
        self.beats: Mapping[int, Beat] = {}
        self._hosts, self._restart, self._began = hosts, restart, time.monotonic()
        self._first: tuple[float, int] | None = None  # time and number of the first step seen

    def __rich__(self) -> Group:
        return Group(self._progress(), Text(self._numbers(), no_wrap=True, overflow="crop"), self._rows())

    def _progress(self) -> Table:
        beat = self.beats.get(0, {})
        step, total = beat.get("step") or 0, beat.get("total_steps") or 0
        elapsed = time.monotonic() - self._began
        grid = Table.grid(Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True), padding=(0, 1), expand=True)
        if not total:
            grid.add_row("starting", ProgressBar(total=1, completed=0, pulse=True), f"{duration(elapsed)} elapsed")
            return grid
        self._first = self._first or (time.monotonic(), step)
        since, first = self._first
        left = duration((time.monotonic() - since) / (step - first) * (total - step)) if step > first else "?"
        grid.add_row(
            f"step {step}/{total}",
            ProgressBar(total=total, completed=step),
            f"{step / total:4.0%}  {duration(elapsed)} elapsed  {left} left",
        )
        return grid

    def _numbers(self) -> str:
        beat = self.beats.get(0, {})
        ranks, hosts = sum(host.slots for host in self._hosts), len(self._hosts)
        words = []
        if beat.get("loss") is not None:
            words.append(f"loss {beat['loss']:.3f}")
        if beat.get("tokens_per_second"):
            words.append(f"{beat['tokens_per_second']:,.0f} {beat['unit']}/s")
        if beat.get("mfu") is not None:
            words.append(f"MFU {100 * beat['mfu']:.1f} %")
        words += [f"{ranks} rank{'s' * (ranks > 1)} on {hosts} host{'s' * (hosts > 1)}", self._restart]
        return "  ".join(filter(None, words))

    def _rows(self) -> Table:
        """One row per host; ranks are numbered in the order of the hosts."""
        table = Table.grid(padding=(0, 2))
        first = 0
        for host in self._hosts[:_HOST_ROWS]:
            ranks = range(first, first + host.slots)
            first += host.slots
            numbers = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}–{ranks[-1]}"
            table.add_row(f"  {host.name}", numbers, self._state(ranks))
        if len(self._hosts) > _HOST_ROWS:
            table.add_row(
                f"  and {len(self._hosts) - _HOST_ROWS} more",
                "",
                self._state(range(first, sum(host.slots for host in self._hosts))),
            )
        return table

    def _state(self, ranks: range) -> Text:
        """The phases of the ranks, or which ranks are late or silent."""
        beats = [self.beats[rank] for rank in ranks if rank in self.beats]
        late = []
        for beat in beats:
            if beat["age"] > _QUIET_BEAT_SECONDS:
                late.append(f"rank {beat['rank']} silent for {beat['age']:.0f} s")
            elif beat.get("late"):
                late.append(f"rank {beat['rank']} late")
        if late:
            return Text(", ".join(late), style="bold red")
        phases = sorted({str(beat.get("phase", "")) for beat in beats})
        return Text(", ".join(phases) or "starting", style="dim")
