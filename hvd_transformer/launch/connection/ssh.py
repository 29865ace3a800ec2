"""ssh to the hosts of a job: the command line, and what a failed connection means."""

import re
import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_transformer.errors import UserError

# Part of ssh's message, what it means, and what to do. The first match counts.
_REASONS = (
    ("Could not resolve hostname", "unknown host name", "correct the name, or add it to /etc/hosts or the name server"),
    ("No route to host", "there is no route to it", "check that it is switched on and its network link is up"),
    ("Network is unreachable", "there is no route to it", "check that this host has a route to that network"),
    ("Connection refused", "its ssh port is closed", "start sshd there, or set its port with --ssh-port"),
    ("timed out", "no answer", "check that it is switched on and that no firewall drops packets to its ssh port"),
    (
        "IDENTIFICATION HAS CHANGED",
        "its host key has changed since the last connection",
        "if the host was reinstalled, remove the old key with `ssh-keygen -R {host}`; otherwise suspect an attack",
    ),
    ("Host key verification failed", "its host key is not accepted", "verify the key and accept it with `ssh {host}`"),
    (
        "Permission denied",
        "it refuses the ssh key",
        "add your public key there with `ssh-copy-id {host}`, or choose the key with --ssh-identity",
    ),
)
# How sshd ends connections before it asks who they are, for example those above its MaxStartups.
_DROPPED = ("exchange_identification: ", "Not allowed at this time")
_CONNECT_SECONDS = 10  # at most
# Paths that are safe without quotes: horovodrun does not quote them on the shell command lines that it builds.
PLAIN_PATH = re.compile(r"[\w@%+=:,./~-]+")


@dataclass(frozen=True)
class Ssh:
    """How all hosts are reached; a user or port of a single host belongs into ~/.ssh/config.

    Raises `UserError` for an invalid port, or a key file that cannot be read.
    """

    port: int | None = None
    identity: Path | None = None

    def __post_init__(self) -> None:
        if self.port is not None and not 1 <= self.port <= 65535:
            raise UserError(f"--ssh-port {self.port}: must be from 1 to 65535")
        if self.identity is not None:
            try:
                self.identity.open("rb").close()
            except (OSError, ValueError) as error:
                raise UserError(f"--ssh-identity {self.identity}: cannot be read: {error}") from None
            if not PLAIN_PATH.fullmatch(str(self.identity)):
                raise UserError(f"--ssh-identity {self.identity}: horovodrun takes no spaces or quotes in this path")


def ssh_command(ssh: Ssh, host: str, command: Sequence[str], seconds: float) -> list[str]:
    """The ssh command that runs `command` on the host, without prompts and without hanging on a dead network.

    `seconds`: in which the command is to answer; ssh itself gives up a little before, and says why.
    """
    connect_seconds = max(1, min(_CONNECT_SECONDS, int(seconds) - 2))
    options = [
        "BatchMode=yes",
        "LogLevel=ERROR",
        "StrictHostKeyChecking=accept-new",  # refuses a key that has changed
        f"ConnectTimeout={connect_seconds}",
        "ServerAliveInterval=5",  # notices a lost network
        "ServerAliveCountMax=3",
    ]
    words = ["ssh", "-T", *(word for option in options for word in ("-o", option))]
    if ssh.port is not None:
        words += ["-p", str(ssh.port)]
    if ssh.identity is not None:
        words += ["-i", str(ssh.identity)]
    return [*words, host, shlex.join(command)]


def why_refused(host: str, said: str) -> tuple[str, str]:
    """What ssh's output (with LC_ALL=C) means, and what to do."""
    for part, meaning, cure in _REASONS:
        if part in said:
            return f"cannot be reached by ssh: {meaning}", cure.format(host=host)
    last = (said.strip().splitlines() or ["no answer"])[-1].strip()
    return f"cannot be reached by ssh: {last}", f"make `ssh {host} true` work"


def was_dropped(said: str) -> bool:
    """Whether sshd closed the connection at once, as it does if too many start at a time: another try may succeed."""
    return any(part in said for part in _DROPPED)


def is_local(host: str) -> bool:
    """Whether the host's address belongs to this machine; horovodrun tests it in the same way."""
    with socket.socket() as trial:
        try:
            trial.bind((socket.gethostbyname(host), 0))
        except (OSError, UnicodeError):  # another machine, or an unknown name: ssh will tell
            return False
    return True
