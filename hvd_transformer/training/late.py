"""Which rank do the others wait for? Found from the heartbeats that one rank can see."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

# So many ranks are named with their places, the rest are counted.
_NAMED = 4


class Seen(NamedTuple):
    """A rank's newest heartbeat (`Watchdog.beat`), and how many seconds old it is."""

    beat: dict[str, Any]
    age: float


def who_is_late(seen: Sequence[Seen], hosts: Sequence[str], silent_seconds: float) -> str:
    """A sentence that names late ranks with their hosts and phases, and who waits for them where.

    Late is a rank whose heartbeat is older than `silent_seconds` (stopped, or its host is gone) or that waits for
    nobody. `hosts` are those of all ranks.
    """
    silent = [found for found in seen if found.age > silent_seconds]
    working = [found for found in seen if found.age <= silent_seconds and not found.beat["waits_for"]]
    waiting = [found for found in seen if found.age <= silent_seconds and found.beat["waits_for"]]
    ranks = {found.beat["rank"] for found in seen}
    unseen = [rank for rank in range(len(hosts)) if rank not in ranks]
    late = sorted(silent + working, key=lambda found: found.beat["rank"])
    parts = [_late(found, silent_seconds) for found in late[:_NAMED]]
    if len(late) > _NAMED:
        parts.append(f"{len(late) - _NAMED} more ranks are late")
    if late:
        parts += _waiting(waiting, "for it" if len(late) == 1 else "for them")
    else:
        parts += _waiting(waiting, "for others" if unseen else "for each other")
        parts += [
            f"nothing is seen from here of {_ranks(list(group))} on host {host}"
            for host, group in groupby(unseen, key=lambda rank: hosts[rank])
        ]
    return "; ".join(parts)


def _late(found: Seen, silent_seconds: float) -> str:
    beat = found.beat
    who, place = f"rank {beat['rank']} on host {beat['host']} is late", _place(beat)
    if found.age > silent_seconds:
        return f"{who}: no sign of life for {found.age:.0f} s, last in {place}"
    return f"{who}: in {place} for {beat['phase_seconds']:.0f} s"


def _waiting(waiting: Sequence[Seen], whom: str) -> list[str]:
    """Who waits where, the ranks of one place together."""
    by_place: dict[str, list[int]] = {}
    for found in waiting:
        by_place.setdefault(_place(found.beat), []).append(found.beat["rank"])
    return [
        f"{_ranks(ranks)} wait{'s' if len(ranks) == 1 else ''} {whom} in {place}" for place, ranks in by_place.items()
    ]


def _place(beat: dict[str, Any]) -> str:
    """As in "forward of step 31", "allreduce of bucket 4 of step 31", "checkpoint after step 30"."""
    phase, step = beat["phase"], beat["step"]
    if phase == "allreduce":
        phase = f"allreduce of {beat['waits_for']}"
    if phase in ("start", "end"):
        return f"the {phase}"
    between = phase in ("evaluation", "checkpoint", "log")
    return f"{phase} after step {step}" if between else f"{phase} of step {step + 1}"


def _ranks(ranks: Sequence[int]) -> str:
    """As in "rank 3", "ranks 0, 2", "ranks 0, 2 to 7"."""
    stretches: list[list[int]] = []
    for rank in sorted(ranks):
        if stretches and stretches[-1][-1] == rank - 1:
            stretches[-1].append(rank)
        else:
            stretches.append([rank])
    words = [
        f"{stretch[0]} to {stretch[-1]}" if len(stretch) > 2 else ", ".join(map(str, stretch)) for stretch in stretches
    ]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words)}"
