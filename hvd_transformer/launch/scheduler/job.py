"""What the files of all schedulers have in common: the job, and how it is launched where the scheduler put it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from hvd_transformer.config import Config
from hvd_transformer.errors import UserError
from hvd_transformer.launch.hostfile import Host

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
