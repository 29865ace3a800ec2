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


def horovod(name: str, backend: str, *settings: str, **environment: str) -> Contestant:
    """Ours under horovodrun, with the package's defaults but for KEY=VALUE settings and variables."""
    launcher = ["horovodrun", "-np", str(RANKS), "-H", f"localhost:{RANKS}", f"--{backend}"]
    launcher += ["--network-interfaces", INTERFACE]
    return Contestant(name, [[*launcher, *worker("trainer", *settings)]], RANKS, {**ENVIRONMENT, **environment})


def torchrun(name: str, kind: str, *settings: str, peer: Peer | None = None) -> Contestant:
    """A contestant of torch's own tools under torchrun."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    launcher = ["torchrun", "--nproc-per-node", str(RANKS), "--master-addr", "127.0.0.1", "--master-port", port]
    # torchrun puts Python before the words itself.
    return Contestant(name, [[*launcher, *worker(kind, *settings, peer=peer)[1:]]], RANKS, ENVIRONMENT)


def alone(name: str, kind: str, *settings: str, copies: int = 1, peer: Peer | None = None) -> Contestant:
    """Processes that know nothing of each other."""
    return Contestant(name, [worker(kind, *settings, peer=peer)] * copies, copies, ENVIRONMENT)
