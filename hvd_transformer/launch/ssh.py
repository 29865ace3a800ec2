"""ssh to the hosts of a job: the command line, why a host refuses, and lasting connections."""

import re
import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_transformer.errors import UserError

# A part of what ssh says in its own or the C library's words, what it means, what to do. The first that fits.
_REASONS = (
    (
        "Could not resolve hostname",
        "this name is not known",
        "correct the name, or add it to /etc/hosts or the name server",
    ),
    ("No route to host", "there is no route to it", "see that it is switched on and its network cable or link is up"),
    ("Network is unreachable", "there is no route to it", "see that this host has a network with a way to it"),
    ("Connection refused", "its ssh port is closed", "start sshd there, or name its port with --ssh-port"),
    ("timed out", "no answer", "see that it is switched on and that no firewall drops packets to its ssh port"),
    (
        "IDENTIFICATION HAS CHANGED",
        "its host key has changed since the last time",
        "if it was installed anew, remove the old key with `ssh-keygen -R {host}`; else somebody is in between",
    ),
    ("Host key verification failed", "its host key is not accepted", "compare the key and accept it with `ssh {host}`"),
    (
        "Permission denied",
        "it refuses the ssh key",
        "add your public key there with `ssh-copy-id {host}`, or name the key with --ssh-identity",
    ),
)


# horovodrun puts paths and names unquoted into a shell's command line.
_PATH = re.compile(r"[\w@%+=:,./~-]+")


@dataclass(frozen=True)
class Ssh:
    """How hosts are reached; a user or port of one host's own is for ~/.ssh/config.

    Raises `UserError` where the port or the key file cannot be one.
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
            if not _PATH.fullmatch(str(self.identity)):
                raise UserError(f"--ssh-identity {self.identity}: horovodrun takes no spaces or quotes in this path")


def ssh_command(ssh: Ssh, host: str, command: Sequence[str], connect_seconds: int = 10) -> list[str]:
    """The words that run `command` on the host: without a question to anyone, and not waiting on a dead network."""
    options = [
        "BatchMode=yes",
        "LogLevel=ERROR",
        "StrictHostKeyChecking=accept-new",  # a key that has changed is refused
        f"ConnectTimeout={connect_seconds}",
        "ServerAliveInterval=5",  # a network that is gone is noticed
        "ServerAliveCountMax=3",
    ]
    words = ["ssh", "-T", *(word for option in options for word in ("-o", option))]
    if ssh.port is not None:
        words += ["-p", str(ssh.port)]
    if ssh.identity is not None:
        words += ["-i", str(ssh.identity)]
    return [*words, host, shlex.join(command)]


def why_refused(host: str, said: str) -> tuple[str, str]:
    """What ssh's messages (in the language of LC_ALL=C) mean, and what to do."""
    for part, meaning, cure in _REASONS:
        if part in said:
            return f"cannot be reached by ssh: {meaning}", cure.format(host=host)
    last = (said.strip().splitlines() or ["no answer"])[-1].strip()
    return f"cannot be reached by ssh: {last}", f"make `ssh {host} true` work"


def is_local(host: str) -> bool:
    """Whether the host's address is one of this machine, as horovodrun asks too."""
    with socket.socket() as trial:
        try:
            trial.bind((socket.gethostbyname(host), 0))
        except (OSError, UnicodeError):  # another machine's, or no such name: ssh says which
            return False
    return True
