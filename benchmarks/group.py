"""A contestant kept alive: its processes train a block when asked, and stand still in between.

start            block            block          release
| start, connect | thaw steps freeze |  frozen  | thaw steps freeze | thaw, connections close, processes end |
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from benchmarks.channel import Channel, Listener
from benchmarks.processes import ProcessTree

REPOSITORY = Path(__file__).parent.parent
_LAST_LINES = 80


class ContestantFailed(RuntimeError):
    """A contestant's process ended, or said nothing for too long; the message ends with its output."""


@dataclass(frozen=True)
class Contestant:
    """What to measure: commands that together start `num_processes` processes which `channel.serve`.

    The word `SOCKET` in a command stands for the address to connect to. Contestants of equal `trains` take the same
    steps, so that their losses must agree; None: nobody else takes these steps. `steps`: of its blocks, in place of
    those that the others take.
    """

    name: str
    commands: Sequence[Sequence[str]]
    num_processes: int
    environment: Mapping[str, str] = field(default_factory=dict)
    trains: str | None = "the same"
    steps: int | None = None


class Group:
    """The running processes of one contestant; frozen except in a block."""

    def __init__(self, contestant: Contestant, folder: Path, timeout: float) -> None:
        self.name, self.trains, self.steps = contestant.name, contestant.trains, contestant.steps
        self._timeout = timeout
        self._contestant, self._folder = contestant, folder
        self._listener = Listener(folder / "s")
        self._channels: list[Channel] = []
        self._launchers: list[subprocess.Popen[bytes]] = []
        self._tree = ProcessTree()
        self._frozen: tuple[float, float] | None = None  # when, and the CPU time by then
        self._idle_seconds = self._idle_cpu = 0.0
        self.note = ""  # the latest
        self.losses: list[float] = []  # of each block's last step, the mean of the processes that know it

    def start(self) -> None:
        """Returns when all processes have connected, and freezes them. Raises `ContestantFailed`."""
        for command in self._contestant.commands:
            try:
                self._launch(command)
            except OSError as error:
                raise self._failure(f"cannot be started ({error})") from None
        deadline = time.monotonic() + self._timeout
        while len(self._channels) < self._contestant.num_processes:
            try:
                self._channels.append(self._listener.accept(timeout=0.2))
            except TimeoutError:
                if any(launcher.poll() is not None for launcher in self._launchers):
                    raise self._failure("ended before it was ready") from None
                if time.monotonic() > deadline:
                    raise self._failure(f"was not ready within {self._timeout:.0f} s") from None
        self._freeze()

    def settle(self, steps: int) -> None:
        """Takes the first steps, unmeasured."""
        self.block(steps, 0)
        self.losses.clear()

    def block(self, steps: int, warmup: int) -> float:
        """Tokens a second over `steps` steps after `warmup` unmeasured ones: the sum of the processes' own rates."""
        self._thaw()
        for channel in self._channels:
            with suppress(ConnectionError):  # `receive` says so
                channel.send({"steps": steps, "warmup": warmup})
        rate, losses = 0.0, []
        for channel in self._channels:
            try:
                answer = channel.receive(self._timeout)
            except TimeoutError:
                raise self._failure(f"did not finish {warmup + steps} steps in {self._timeout:.0f} s") from None
            if answer is None:
                raise self._failure("lost a process while it trained")
            self.note = answer["note"]
            rate += answer["tokens"] / answer["seconds"]
            if answer["loss"] is not None:
                losses.append(answer["loss"])
        self._freeze()
        self.losses.append(mean(losses))
        return rate

    @property
    def idle_share(self) -> float:
        """Cores in use while frozen, on the average: should be 0."""
        return self._idle_cpu / self._idle_seconds if self._idle_seconds else 0.0

    def release(self) -> None:
        """Tells the processes that it is over; does not wait."""
        for channel in self._channels:
            channel.close()
        self._listener.close()
        self._tree.thaw()

    def end(self, patience: float = 20) -> None:
        """After `release`: waits until all has ended, and ends what does not by itself."""
        for number, seconds in ((None, patience), (signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0)):
            if number is signal.SIGTERM:  # launchers pass it on and tidy up; horovodrun takes up to 10 s
                for launcher in self._launchers:
                    launcher.send_signal(number)
            elif number is signal.SIGKILL:
                self._tree.signal(number)
            if self._all_ended(seconds):
                return

    def _launch(self, command: Sequence[str]) -> None:
        with (self._folder / "output").open("ab") as output:
            launcher = subprocess.Popen(
                [self._listener.address if word == "SOCKET" else word for word in command],
                cwd=REPOSITORY,
                # Whatever a launcher leaves behind lies in the folder and goes with it.
                env={**os.environ, **self._contestant.environment, "TMPDIR": str(self._folder)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is the driver's alone
            )
        self._launchers.append(launcher)
        self._tree.add(launcher.pid)

    def _all_ended(self, seconds: float) -> bool:
        """Within so many seconds; a launcher's helpers, which tidy up after it, count too."""
        deadline = time.monotonic() + seconds
        while any(launcher.poll() is None for launcher in self._launchers) or self._tree:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def _freeze(self) -> None:
        self._tree.freeze()
        self._frozen = (time.monotonic(), self._tree.cpu_seconds())

    def _thaw(self) -> None:
        assert self._frozen is not None
        since, cpu = self._frozen
        self._idle_seconds += time.monotonic() - since
        self._idle_cpu += self._tree.cpu_seconds() - cpu
        self._frozen = None
        self._tree.thaw()

    def _failure(self, what: str) -> ContestantFailed:
        self.release()
        self.end(patience=5)  # its launcher may still be writing the reason
        output = (self._folder / "output").read_text(encoding="utf-8", errors="replace")
        lines = output.splitlines()[-_LAST_LINES:]
        return ContestantFailed(
            "\n".join([f"{self.name} {what}; its last output:", *(f"    {line}" for line in lines)])
        )
