"""A job as a scheduler's file: what all formats need."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from hvd_transformer.config import Config
from hvd_transformer.errors import UserError
from hvd_transformer.launch.hostfile import Host

GROUP_ID = 1000  # of their user
SSH_PORT = 2222  # ssh's default in them
FOLDER = "/work"  # where commands start, and theirs to write
LAUNCHER_KEY = "/keys/launcher"  # workers let in whom authorized_keys there names
WORKER_KEYS = "/keys/workers"  # where workers put their host keys for the launcher


def output_folder(output_dir: str) -> str:
    """Where the volume for the output is: an absolute output_dir lies in it, a relative one starts from it."""
    output = PurePosixPath(output_dir)
    if not output.is_absolute():
        return FOLDER
    return str(output.parent if output.parent.name else output)


class Word(str):
    """A text that stands in quotes: readers of YAML do not agree which bare words are numbers or truth values."""


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(Word, lambda dumper, word: dumper.represent_scalar("tag:yaml.org,2002:str", word, style='"'))


def command(words: Sequence[str]) -> list[Word]:
    """A command's words. Kubernetes and compose put variables in where a word has a dollar sign; two are one."""
    return [Word(word.replace("$", "$$")) for word in words]


def text(header: str, *documents: Mapping[str, Any]) -> str:
    """The documents, below a comment."""
    comment = "".join(f"# {line}".rstrip() + "\n" for line in header.splitlines())
    return comment + "---\n".join(
        yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6) for document in documents
    )


SAVE_SECONDS = 120  # that `launch` gives the ranks, from the signal to the end
# One computes, one talks to the other ranks.
_CORES_PER_STAGE = 2


@dataclass(frozen=True)
class ScheduledJob:
    """A job that a scheduler starts later, on hosts that it chooses itself."""

    hosts: Sequence[Host]  # as many slots as ranks
    options: Sequence[str]  # of `launch`, but for the hosts
    named: Sequence[str]  # variables whose values stay out of the file
    settings: Sequence[str]  # hvd-train's arguments
    config: Config  # what they say
    image: str | None = None

    @property
    def name(self) -> str:
        """The run directory's, as Kubernetes takes it: letters, digits and dashes, a letter first."""
        folder = PurePosixPath(self.config.output_dir).name.lower()
        name = re.sub(r"[^a-z0-9]+", "-", folder).strip("-")[:40].strip("-")
        return name if name[:1].isalpha() else f"hvd-{name}".strip("-")

    @property
    def num_ranks(self) -> int:
        """One a slot."""
        return sum(host.slots for host in self.hosts)

    @property
    def slots(self) -> int:
        """Of each host; the last one may have more than it needs.

        Raises `UserError` where the hosts differ.
        """
        first, last = self.hosts[0].slots, self.hosts[-1].slots
        if any(host.slots != first for host in self.hosts[:-1]) or last > first:
            slots = ", ".join(f"{host.name}:{host.slots}" for host in self.hosts[:4])
            raise UserError(f"--scheduler: its hosts all have the same number of slots; these have not: {slots}")
        return first

    @property
    def gpus_per_rank(self) -> int:
        """One a pipeline stage with training.device=cuda; `auto` takes what it finds and asks for none."""
        return self.config.parallel.pipeline if self.config.training.device == "cuda" else 0

    @property
    def cores_per_rank(self) -> int:
        """The fewest that make sense."""
        return _CORES_PER_STAGE * self.config.parallel.pipeline

    @property
    def container(self) -> str:
        """The image: the given one, or as docker/ builds it."""
        return self.image or f"hvd-transformer:{'gpu' if self.gpus_per_rank else 'cpu'}"

    def launch(self, *hosts: str) -> list[str]:
        """The launch command; `hosts` are the options that name them."""
        words = ["hvd-transformer", "launch", "-np", str(self.num_ranks), *hosts, *self.options]
        return [*words, "--", *self.settings] if self.settings else words
