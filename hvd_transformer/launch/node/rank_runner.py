"""What mpirun starts on each rank: it has the node agent of its host start the rank, and passes on its exit code.

    python -m hvd_transformer.launch.node.rank_runner FOLDER COMMAND...

FOLDER is how the name of the agent's private folder begins. So the agent is the parent of every rank, over gloo and
over MPI, and sees output, exit codes and processes itself: horovodrun turns every exit code into 1 and prefixes each
line, and over ssh a signal reaches the local client only.
"""

import json
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvd_transformer.launch.node.agent_folder import sockets

_RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "HOROVOD_RANK")
_AGENT_SECONDS = 30.0
_DAEMONS = ("orted", "hydra_pmi_proxy")  # MPI's daemons, on each host except the launcher's
_READ_BYTES = 1 << 16


class Runner:
    """The agent's end of the connection to a runner. `gone`: it has ended, or was killed."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection, self.gone = connection, False
        self.rank, self.pid, self.daemon = -1, 0, 0
        self._unread = b""

    def read(self) -> list[dict[str, Any]]:
        """The messages that have come: its rank's command, later requests to end it."""
        try:
            data = self.connection.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        self.gone = not data
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def release(self, code: int) -> None:
        """Let it exit with its rank's exit code."""
        with suppress(OSError):
            self.connection.send(json.dumps({"code": code}).encode() + b"\n")

    def lives(self) -> bool:
        """Whether its process is there."""
        return _lives(self.pid)

    def kill(self) -> None:
        """Kill it if it is still there, and MPI's daemon, which outlives a launcher that cannot reach it."""
        for pid in (self.pid, self.daemon):
            if pid and _lives(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def main() -> int:
    """Return the rank's exit code; 128 + N if signal N killed it, as in a shell."""
    base, command = sys.argv[1], sys.argv[2:]
    rank = int(next((os.environ[name] for name in _RANK if name in os.environ), "0"))
    with _agent(base) as agent:
        # mpirun asks its processes to exit by signals.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: _send(agent, {"terminate": True}))
        request = {"rank": rank, "command": command, "cwd": str(Path.cwd()), "environment": dict(os.environ)}
        _send(agent, {**request, "pid": os.getpid(), "daemon": _daemon()})
        with agent.makefile("rb") as answers:
            line = answers.readline()
    return int(json.loads(line)["code"]) if line else 1  # the agent is gone, and the rank with it


def _agent(base: str) -> socket.socket:
    """A connection to a node agent on this host, which starts at the same time."""
    deadline = time.monotonic() + _AGENT_SECONDS
    while time.monotonic() < deadline:
        for path in sockets(base):
            agent = socket.socket(socket.AF_UNIX)
            with suppress(OSError):
                agent.connect(path)
                return agent
            agent.close()
        time.sleep(0.02)
    sys.exit(f"{base}: no node agent answers on host {os.uname().nodename}")


def _send(agent: socket.socket, message: dict[str, Any]) -> None:
    with suppress(OSError):  # the agent is gone
        agent.sendall(json.dumps(message).encode() + b"\n")


def _daemon() -> int:
    """The process of MPI's daemon on this host, or 0."""
    parent = os.getppid()
    with suppress(OSError):
        if Path(f"/proc/{parent}/comm").read_text(encoding="utf-8", errors="replace").strip() in _DAEMONS:
            return parent
    return 0


def _lives(pid: int) -> bool:
    with suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return text.rpartition(")")[2].split()[0] not in "ZX"
    try:  # it has ended, or this is not Linux
        os.kill(pid, 0)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
