"""A job that a scheduler starts later, and what all formats of job files share."""

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from hvd_transformer.config import Config
from hvd_transformer.errors import UserError
from hvd_transformer.launch.hostfile import Host

# The containers that docker/ builds:
USER_ID = GROUP_ID = 1000  # their user and its group
SSH_PORT = 2222  # port of their sshd
FOLDER = "/work"  # their working directory, writable
LAUNCHER_KEY = "/keys/launcher"  # workers accept the keys in its authorized_keys
WORKER_KEYS = "/keys/workers"  # workers put their host keys there for the launcher

_END_SECONDS = 30  # after the save: for the agents and sshd

# What containers need as it is in their image: neither these nor anything below can be a volume …
_SYSTEM = ("bin", "boot", "dev", "etc", "keys", "lib", "lib64", "proc", "root", "run", "sbin", "sys", "usr")
# … and these cannot themselves.
_TOP = {"/", "/home", "/home/trainer", "/opt", "/opt/venv", "/tmp", "/var"}


def output_folder(output_dir: str) -> str:
    """The mount point of the output volume: an absolute output_dir itself; a relative one is in the working folder.

    Raises `UserError` for a folder of the containers' system, and for one that no volume can have.
    """
    if output_dir.startswith("~"):
        raise UserError(f"output_dir={output_dir}: containers have another home folder; give a full or a relative path")
    folder = posixpath.normpath(posixpath.join(FOLDER, output_dir)).replace("//", "/")
    if folder in _TOP or folder.split("/")[1] in _SYSTEM:
        raise UserError(
            f"output_dir={output_dir}: a system folder of the containers; choose another one, such as /data/x"
        )
    if PurePosixPath(folder).is_relative_to(FOLDER):
        return FOLDER
    if ":" in folder:
        raise UserError(f"output_dir={output_dir}: the path of a volume has no colon; choose another one")
    return folder


class Word(str):
    """A string that is always quoted: YAML parsers disagree on which bare words are numbers or booleans."""


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(Word, lambda dumper, word: dumper.represent_scalar("tag:yaml.org,2002:str", word, style='"'))


def command(words: Sequence[str]) -> list[Word]:
    """A command for Kubernetes or compose, which expand variables: dollar signs are doubled to escape them."""
    return [Word(word.replace("$", "$$")) for word in words]


def text(header: str, *documents: Mapping[str, Any]) -> str:
    """The YAML documents, below a comment."""
    comment = "".join(f"# {line}".rstrip() + "\n" for line in header.splitlines())
    return comment + "---\n".join(
        yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6) for document in documents
    )


@dataclass(frozen=True)
class ScheduledJob:
    """A job for a scheduler, which chooses the hosts itself."""

    hosts: Sequence[Host]  # one slot per rank
    options: Sequence[str]  # of `launch`, except those that name hosts
    named: Sequence[str]  # environment variables whose values stay out of the file
    settings: Sequence[str]  # arguments of hvd-train
    config: Config  # the configuration that they give
    save_seconds: int  # that `launch` gives the ranks, from the signal to the end
    image: str | None = None
    worker_bytes: int = 0  # memory of a worker, without what it puts into /dev/shm
    given_name: str | None = None

    @property
    def name(self) -> str:
        """The given name, or that of the run directory as Kubernetes accepts it: letters, digits and dashes; a letter
        first."""
        if self.given_name is not None:
            return self.given_name
        folder = PurePosixPath(self.config.output_dir).name.lower()
        name = re.sub(r"[^a-z0-9]+", "-", folder).strip("-")[:40].strip("-")
        return name if name[:1].isalpha() else f"hvd-{name}".strip("-")

    @property
    def grace_seconds(self) -> int:
        """Until a container is killed: after the ranks their agents and sshd end, too."""
        return self.save_seconds + _END_SECONDS

    @property
    def slots(self) -> int:
        """Slots per host; the last host may have more than it needs.

        Raises `UserError` if the hosts differ.
        """
        first, last = self.hosts[0].slots, self.hosts[-1].slots
        if any(host.slots != first for host in self.hosts[:-1]) or last > first:
            slots = ", ".join(f"{host.name}:{host.slots}" for host in self.hosts[:4])
            raise UserError(f"--scheduler: all hosts must have the same number of slots: {slots}")
        return first

    @property
    def gpus_per_rank(self) -> int:
        """One per pipeline stage with training.device=cuda; none for `auto`, which uses what it finds."""
        return self.config.parallel.pipeline if self.config.training.device == "cuda" else 0

    @property
    def cores_per_rank(self) -> int:
        """Two per pipeline stage: one to compute, one to communicate."""
        return 2 * self.config.parallel.pipeline

    @property
    def container(self) -> str:
        """The container image: the given one, or the one that docker/ builds."""
        return self.image or f"hvd-transformer:{'gpu' if self.gpus_per_rank else 'cpu'}"

    def launch(self, *hosts: str) -> list[str]:
        """The launch command; `hosts` are the options that name the hosts."""
        num_ranks = sum(host.slots for host in self.hosts)
        words = ["hvd-transformer", "launch", "-np", str(num_ranks), *hosts, *self.options]
        return [*words, "--", *self.settings] if self.settings else words
