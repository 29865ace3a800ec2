"""Where the output of a launched job goes: to the screen and to the log, each in its own time.

A terminal that takes nothing, because of Ctrl-S or a pager, and a disk that stands still delay no restart, no signal
and no end of the job. The server tells other processes (`attach`).
"""

import math
import os
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from hvd_transformer.launch.agents import HostAgents
from hvd_transformer.launch.attempt import AttemptResult
from hvd_transformer.launch.hostfile import Host
from hvd_transformer.launch.output.launch_log import LaunchLog
from hvd_transformer.launch.output.launch_screen import Screen
from hvd_transformer.launch.output.launch_server import LaunchServer
from hvd_transformer.launch.output.outlet import Outlet

_LOOK_SECONDS = 0.1
_PUBLISH_SECONDS = 1.0  # between two messages with all heartbeats
_END_SECONDS = 10.0  # for the rest to be shown
_LINE = 300  # characters of a rank's last line in a cause


class Listeners(Protocol):
    """Where the output goes besides the screen: a `LaunchedJob`."""

    log: LaunchLog
    server: LaunchServer

    def begun(self) -> None:
        """The ranks run."""


class LaunchOutput:
    """Does what `Screen` does, in the same order, without waiting for it.

    `job` has the log that receives all output and the server that tells other processes; None: there is neither. They
    are told of `gpus_per_rank`, which the ranks use where there are any.
    """

    def __init__(self, screen: Screen, job: Listeners | None, gpus_per_rank: int = 0) -> None:
        self._screen, self._job = screen, job
        self._gpus = {"gpus_per_rank": gpus_per_rank, "visible": os.environ.get("CUDA_VISIBLE_DEVICES")}
        self._outlet = Outlet("screen")
        self._looked, self._published, self._left_out = -math.inf, -math.inf, 0
        self._begun = self._look_waits = False
        self.blocked = False  # after `close`: the terminal has not taken the rest
        self._last: dict[int, str] = {}  # what each rank has printed last to standard error in this start

    def start(self, hosts: Sequence[Host], restart: str) -> None:
        """Begin the view of one start of the job."""
        self._last.clear()
        listed = [[host.name, host.slots, *([host.gpus] if host.gpus else [])] for host in hosts]
        self._publish("start", hosts=listed, restart=restart, **(self._gpus if self._gpus["gpus_per_rank"] else {}))
        self._outlet.put(partial(self._screen.start, hosts, restart))

    def look(self, agents: HostAgents) -> None:
        """Update the view; called often."""
        now = time.monotonic()
        if not self._begun and agents.have_begun:
            self._begun = True
            if self._job is not None:
                self._job.begun()
        # One view waits at most: a terminal may take nothing for days.
        if now - self._looked > _LOOK_SECONDS and not self._look_waits:
            self._looked, self._look_waits = now, True
            self._outlet.put(partial(self._look, agents))
        if now - self._published > _PUBLISH_SECONDS:
            self._published = now
            self._publish("look", beats=list(agents.beats.copy().values()))

    def show(self, rank: int, stream: str, text: str) -> None:
        """Take whole lines that a rank has printed. Those that wait too long to be shown are in the log alone."""
        self._write_log("".join(f"rank {rank}: {line}\n" for line in text.splitlines()))
        if stream == "err" and (last := text.rstrip().rpartition("\n")[2].strip()):
            self._last[rank] = last if len(last) <= _LINE else f"{last[: _LINE - 1]}…"
        self._publish("show", rank=rank, stream=stream, text=text)
        if not self._outlet.put(partial(self._screen.show, rank, stream, text), size=len(text)):
            self._left_out += text.count("\n")
        elif self._left_out:
            self.message(f"{self._left_out} lines were not shown: the terminal took nothing")
            self._left_out = 0

    def message(self, text: str) -> None:
        """Print a line of the launcher's own."""
        self._write_log(f"{text}\n")
        self._publish("message", text=text)
        self._outlet.put(partial(self._screen.message, text))

    def last_line(self, rank: int) -> str:
        """What this rank has printed last to standard error in this start, such as why it ends; may be empty."""
        return "".join(character if character.isprintable() else " " for character in self._last.get(rank, ""))

    def failed(self, ended: AttemptResult, cause: str) -> None:
        """Print why a start failed."""
        said = ended.said if ended.first is None and not ended.lost else ""
        self._write_log("".join(f"{line}\n" for line in [cause, *said.splitlines()]))
        self._publish("failed", code=ended.code, first=ended.first, lost=ended.lost, said=said, cause=cause)
        self._outlet.put(partial(self._screen.failed, ended, cause))

    def end(self, failed: bool = False) -> None:
        """End the view of a start; its last state stays visible. With `failed`, a call of `failed` follows."""
        self._publish("end", failed=failed)
        self._outlet.put(partial(self._screen.end, failed))

    def close(self) -> None:
        """Show and log the rest, unless terminal or disk take nothing."""
        self.blocked = not self._outlet.close(_END_SECONDS)
        if self._job is not None:
            self._job.log.close()

    def _look(self, agents: HostAgents) -> None:
        self._look_waits = False
        self._screen.look(agents.beats)

    def _publish(self, event: str, **values: Any) -> None:
        if self._job is not None:
            self._job.server.publish(event, **values)

    def _write_log(self, text: str) -> None:
        if self._job is not None:
            self._job.log.write(text)
