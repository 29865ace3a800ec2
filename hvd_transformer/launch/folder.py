"""A job's private folder on every host: what its ranks read from the launcher and tell it.

It holds the variables of `--env`, a note for each running rank, and the exit codes of failed ones. On each host a small
shell (`keeper.sh`, through ssh where the host is another one) makes it, only for its user, and removes it when the
connection to the launcher ends: also when the launcher was killed. Values travel through standard input alone.
"""

import json
import secrets
import shlex
import socket
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hvd_transformer.errors import UserError
from hvd_transformer.launch.command import Ssh

_KEEPER = Path(__file__).with_name("keeper.sh")
_SSH_OPTIONS = (
    "BatchMode=yes",
    "LogLevel=ERROR",
    "StrictHostKeyChecking=accept-new",  # a key that has changed is refused
    "ConnectTimeout=10",
    "ServerAliveInterval=5",  # a network that is gone is noticed
    "ServerAliveCountMax=3",
)


class Failure(NamedTuple):
    """A rank that ended with an exit code other than 0."""

    time: float
    rank: int
    code: int
    host: str


class JobFolder:
    """The folder on all hosts, from construction to `close`.

    Raises `UserError` naming the first host where it cannot be made, and why.
    """

    def __init__(
        self, hosts: Sequence[str], ssh: Ssh, values: Mapping[str, str], environment: Mapping[str, str]
    ) -> None:
        self.path = f"/tmp/hvd-transformer-{secrets.token_hex(16)}"
        data = json.dumps(dict(values)).encode()
        keeper = ["sh", "-c", _KEEPER.read_text(encoding="utf-8"), "sh", self.path, str(len(data))]
        with ThreadPoolExecutor(64) as pool:
            local = dict(zip(hosts, pool.map(_is_local, hosts), strict=True))
        commands = {host: [*_ssh(ssh), host, shlex.join(keeper)] for host in hosts if not local[host]}
        if any(local.values()):
            commands["localhost"] = keeper
        self._keepers: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for host, command in commands.items():
                self._keepers[host] = _start(command, environment)
            for keeper_ in self._keepers.values():
                _send(keeper_, data)
            for host in self._keepers:
                self._wait_ready(host)
        except BaseException:
            self.close()
            raise

    def stop(self) -> int:
        """Asks every rank to save and end; the number of those that run."""
        for keeper in self._keepers.values():
            _send(keeper, b"stop\n")
        return sum(int(_line(keeper) or 0) for keeper in self._keepers.values())

    def close(self) -> list[Failure]:
        """Ends what still runs on any host and removes the folder; the ranks that failed, the first one first."""
        for keeper in self._keepers.values():
            assert keeper.stdin
            with suppress(OSError):  # gone before
                keeper.stdin.close()
        found = set()
        for keeper in self._keepers.values():
            assert keeper.stdout
            for line in keeper.stdout:
                word, *note = line.decode().split()
                if word == "failed" and len(note) == 4:  # no answer from before, no note that a full disk cut off
                    found.add(Failure(float(note[0]), int(note[1]), int(note[2]), note[3]))
            keeper.wait()
        return sorted(found)

    def _wait_ready(self, host: str) -> None:
        keeper = self._keepers[host]
        if _line(keeper) == b"ready\n":
            return
        assert keeper.stderr
        said = keeper.stderr.read().decode(errors="replace").strip().splitlines() or ["no answer"]
        raise UserError(f"host {host}: cannot be used: {said[-1].strip()}")


def _ssh(ssh: Ssh) -> list[str]:
    words = ["ssh", "-T", *(word for option in _SSH_OPTIONS for word in ("-o", option))]
    if ssh.port is not None:
        words += ["-p", str(ssh.port)]
    if ssh.identity is not None:
        words += ["-i", str(ssh.identity)]
    return words


def _is_local(host: str) -> bool:
    """Whether the host's address is one of this machine, as horovodrun asks too."""
    with socket.socket() as trial:
        try:
            trial.bind((socket.gethostbyname(host), 0))
        except (OSError, UnicodeError):  # another machine's, or no such name: ssh says which
            return False
    return True


def _start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """In a session of its own: Ctrl-C is for the launcher alone, which tells the ranks."""
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def _send(keeper: subprocess.Popen[bytes], data: bytes) -> None:
    assert keeper.stdin
    with suppress(OSError):  # a host that is gone answers with the end of its output
        keeper.stdin.write(data)
        keeper.stdin.flush()


def _line(keeper: subprocess.Popen[bytes]) -> bytes:
    assert keeper.stdout
    return keeper.stdout.readline()
