"""Node agents on this machine, for tests of the launcher: started ranks, and what is left of them."""

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hvd_transformer.launch.agents import HostAgents
from hvd_transformer.launch.connection.connections import HostConnections

VALUES = {"TOKEN": "line one\nline 'two' \"é\" $(x) \\"}


def folders(connections: HostConnections) -> list[Path]:
    folder = Path(connections.folder)
    return sorted(folder.parent.glob(f"{folder.name}*"))


def ready(connections: HostConnections, *hosts: str) -> HostAgents:
    agents = HostAgents(hosts, connections)
    agents.begin(VALUES)
    agents.wait_ready()
    return agents


class Started:
    """A rank that was started over gloo by its agent, or as mpirun does by a runner."""

    def __init__(
        self, connections: HostConnections, agents: HostAgents, way: str, rank: int, command: Sequence[str]
    ) -> None:
        self.runner: subprocess.Popen[bytes] | None = None
        if way == "mpi":
            words = [sys.executable, "-m", "hvd_transformer.launch.node.rank_runner", connections.folder, *command]
            self.runner = subprocess.Popen(words, env={**os.environ, "OMPI_COMM_WORLD_RANK": str(rank)})
        else:
            order = {"command": list(command), "cwd": "/", "environment": {}}
            agents.start(order, [{"HOROVOD_RANK": str(rank), "HOROVOD_HOSTNAME": next(iter(agents._agent_of))}])

    def exits_with(self, code: int) -> None:
        if self.runner is not None:
            assert self.runner.wait(10) == code


def connections_opened(log: Path) -> int:
    """How many times ssh was started."""
    return len(log.read_text().splitlines()) if log.exists() else 0


def agents_of(folder: str) -> list[int]:
    """The node agents of a job."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = file.read_bytes().decode().split("\0")
            if words[1:2] == ["-c"] and "launch.node.node_agent" in words[2] and words[3:4] == [folder]:
                found.append(int(file.parent.name))
    return found
