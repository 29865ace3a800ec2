"""The commands that start contestants: under horovodrun, under torchrun, or alone."""

import json
import socket
import sys

from benchmarks.group import Contestant
from benchmarks.settings import ENVIRONMENT, INTERFACE, RANKS, Peer


def worker(kind: str, *settings: str, peer: Peer | None = None) -> list[str]:
    """The command of one rank."""
    chosen = [] if peer is None else ["--peer", json.dumps(peer.options())]
    return [sys.executable, "-m", "benchmarks.contestants", *chosen, kind, "SOCKET", *settings]


def horovodrun(backend: str, ranks: int = RANKS) -> list[str]:
    """The words before the command of so many ranks on this machine."""
    return [
        "horovodrun", "-np", str(ranks), "-H", f"localhost:{ranks}", f"--{backend}", "--network-interfaces", INTERFACE
    ]  # fmt: skip


def local_torchrun() -> list[str]:
    """The words before what Python gets, of both ranks on this machine; another port each time."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    return ["torchrun", "--nproc-per-node", str(RANKS), "--master-addr", "127.0.0.1", "--master-port", port]


def horovod(name: str, backend: str, *settings: str, **environment: str) -> Contestant:
    """Ours under horovodrun, with the package's defaults but for KEY=VALUE settings and variables."""
    command = [*horovodrun(backend), *worker("trainer", *settings)]
    return Contestant(name, [command], RANKS, {**ENVIRONMENT, **environment})


def torchrun(name: str, kind: str, *settings: str, peer: Peer | None = None) -> Contestant:
    """A contestant of torch's own tools under torchrun."""
    # torchrun puts Python before the words itself.
    command = [*local_torchrun(), *worker(kind, *settings, peer=peer)[1:]]
    return Contestant(name, [command], RANKS, ENVIRONMENT)


def alone(name: str, kind: str, *settings: str, copies: int = 1, peer: Peer | None = None) -> Contestant:
    """Processes that know nothing of each other."""
    return Contestant(name, [worker(kind, *settings, peer=peer)] * copies, copies, ENVIRONMENT)
