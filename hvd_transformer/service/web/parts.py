"""The parts of the service that the HTTP interface talks to."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hvd_transformer.service.actions import Actions
from hvd_transformer.service.histogram import Histogram
from hvd_transformer.service.jobs import Placement
from hvd_transformer.service.launching.host_checks import HostState
from hvd_transformer.service.runs.index import RunIndex
from hvd_transformer.service.runs.launcher_beats import LauncherBeats
from hvd_transformer.service.runs.metrics.curves import Curves
from hvd_transformer.service.storage.store import Store
from hvd_transformer.service.storage.tokens import Tokens


class Manager(Protocol):
    """The loop of the queue."""

    pass_seconds: Histogram  # of the scheduler
    wait_seconds: Histogram  # from submit to start

    def estimated_end(self, id: int) -> float | None: ...


@dataclass(frozen=True)
class Queue:
    """What a service with a queue has. `taken`: slots that launches outside the service use.

    `taken` and `host_states` must answer at once, from memory.
    """

    actions: Actions
    manager: Manager
    taken: Callable[[], Sequence[Placement]] = tuple
    host_states: Callable[[], Mapping[str, HostState]] = dict


@dataclass(frozen=True)
class Service:
    """`queue`: None for a tracker of run directories.

    `problem`: why the service does not work, in a line; None: it works. Anybody may ask it, and often.
    """

    version: str
    store: Store
    tokens: Tokens
    runs: RunIndex
    curves: Curves
    launchers: LauncherBeats
    queue: Queue | None
    problem: Callable[[], str | None]
