"""The command line of `hvd-transformer launch` as one object."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hvd_transformer.errors import UserError

if TYPE_CHECKING:
    from hvd_transformer.launch.time_limits import TimeLimits

_LEAST_SILENCE = 3


@dataclass(frozen=True)
class LaunchOptions:
    """The command line of `launch`: a field per parameter. Raises `UserError` for a number out of range."""

    num_ranks: int | None
    hosts: str | None
    hostfile: Path | None
    gloo: bool | None
    ssh_port: int | None
    ssh_identity: Path | None
    network_interface: str | None
    named: tuple[str, ...]  # of --env
    timeline: Path | None
    autotune: bool
    restarts: int
    min_ranks: int | None
    give_up_seconds: float
    start_timeout: float | None
    silence_timeout: float | None
    save_timeout: float | None
    host_discovery_script: Path | None
    no_preflight: bool
    detach: bool
    dry_run: bool
    scheduler: str | None
    output: Path | None
    image: str | None
    memory_gib: float | None
    settings: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.num_ranks is not None and self.num_ranks < 1:
            raise UserError(f"-np {self.num_ranks}: must be at least 1")
        if self.restarts < 0:
            raise UserError(f"--restarts {self.restarts}: must be 0 or more")
        if self.silence_timeout is not None and self.silence_timeout < _LEAST_SILENCE:
            raise UserError(
                f"--silence-timeout: must be at least {_LEAST_SILENCE} seconds, as hosts report every second"
            )
        if self.detach and self.scheduler is not None:
            raise UserError("--detach: not with --scheduler, which writes a job file; the scheduler runs the job")
        if self.memory_gib is not None:
            if self.scheduler != "kubernetes":
                raise UserError("--memory-gib: only with --scheduler kubernetes")
            if not 0 < self.memory_gib < math.inf:
                raise UserError(f"--memory-gib {self.memory_gib:g}: must be above 0")

    def limits(self, num_hosts: int) -> "TimeLimits":
        """How long to wait for so many hosts."""
        from hvd_transformer.launch.time_limits import TimeLimits

        return TimeLimits.of(num_hosts, self.start_timeout, self.silence_timeout, self.save_timeout)

    @property
    def for_scheduler(self) -> bool:
        """Whether a scheduler's job file is to be written."""
        return not (self.scheduler is None and self.output is None and self.image is None)
