"""Why a start of a job failed: the rank that failed first, and the host that is at fault."""

import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from hvd_transformer.errors import STALLED
from hvd_transformer.launch.agents import Beat, Failure
from hvd_transformer.monitoring.stall_report import PeerHeartbeat, late_ranks


class RootCause(NamedTuple):
    """`first` may be a rank that has not failed by itself: one that the first failed rank waited for, or a silent one.

    `host`: the host at fault, by its name on the command line; None if it is not known.
    """

    first: Failure | None = None
    host: str | None = None


def root_cause(failures: Sequence[Failure], beats: Mapping[int, Beat], is_silent: Callable[[Beat], bool]) -> RootCause:
    """What made a start fail, by its failed ranks in their order and the last heartbeat of every rank.

    A rank that exits because no step ended (`STALLED`) waited, and did not fail by itself. The cause is then a rank
    whose heartbeat `is_silent`: the phases of the others may be healthy. If no rank is silent, it is the rank that
    waits for no other.
    """
    first = failures[0] if failures else None
    if first is not None and (first.code != STALLED or first.rank not in beats):
        return RootCause(first, first.given_host)
    for beat in beats.values():
        if is_silent(beat):
            return _blame(beat)
    if first is None:
        return RootCause()
    seen = [PeerHeartbeat(beat, beat["age"]) for beat in beats.values()]
    late = [found.beat for found in late_ranks(seen, beats[first.rank]["limit_seconds"])]
    if any(beat["rank"] == first.rank for beat in late):
        return RootCause(first, first.given_host)
    return _blame(late[0]) if late else RootCause(first)  # all of them waited


def in_words(first: Failure | None, lost: Mapping[str, str]) -> str:
    """The root cause in words. `lost`: the hosts that no longer answer, and their last words."""
    if lost:
        return "; ".join(f"host {host} is lost" + f": {why}" * bool(why) for host, why in lost.items())
    if first is None:
        return "horovodrun failed"
    how = f"with exit code {first.code}"
    if first.code == STALLED:
        how = "because no step ended within the limit (exit code 75)"
    elif first.code > 128:
        with suppress(ValueError):
            how += f" ({signal.Signals(first.code - 128).name})"
    return f"rank {first.rank} on host {first.host} failed first, {how}"


def _blame(beat: Beat) -> RootCause:
    return RootCause(Failure(0.0, beat["rank"], STALLED, beat["host"], beat["given_host"]), beat["given_host"])
