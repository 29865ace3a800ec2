"""What the process of a tracker asks of it, and what it knows of the job."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

DEFAULT_PROJECT = "hvd-transformer"

Row = tuple[int, Mapping[str, float]]  # a step and all its values


class Refused(Exception):
    """The tracker cannot be used as it is set up; says why, in a few words."""


@dataclass(frozen=True)
class Job:
    """The run as a tracker sees it."""

    id: str  # the same for all starts of a run
    name: str
    project: str | None  # tracking_project
    folder: str  # the run directory
    config: Mapping[str, Any]  # by dotted key


class Tracker(Protocol):
    """One run in one tracker."""

    def check(self) -> None:
        """Raise `Refused` if a key is missing or the setup is wrong. Uses no network."""

    def open(self, job: Job) -> int:
        """Create the run, or go on with it. Returns the last step that the tracker has whole, below 0: none."""

    def log(self, rows: Sequence[Row]) -> None:
        """Add rows; steps increase."""

    def close(self, status: str, summary: Mapping[str, Any]) -> None:
        """End the run; `status`: finished, stopped (it will resume) or failed (`summary` is then empty)."""


def in_parts(items: Sequence[Any], size: int) -> Iterable[Sequence[Any]]:
    """Slices of at most `size` items: servers limit their requests."""
    return (items[start : start + size] for start in range(0, len(items), size))


def without_passwords(text: str) -> str:
    """The text without the users and passwords of addresses in it."""
    return re.sub(r"://[^/@\s]+@", "://…@", text)
