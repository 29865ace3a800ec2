"""Which ranks are late (the job stalls) and which are slow (stragglers)."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from statistics import median
from typing import Any, NamedTuple

# Late ranks that are listed with their phases; the others are only counted.
_NAMED = 4


class PeerHeartbeat(NamedTuple):
    """A rank's newest heartbeat (`Watchdog.beat`) and its age in seconds."""

    beat: dict[str, Any]
    age: float


def stall_report(seen: Sequence[PeerHeartbeat], hosts: Sequence[str], silent_seconds: float) -> str:
    """One sentence: the late ranks with their hosts and phases, and which ranks wait for them, and where.

    `hosts` has the host of every rank.
    """
    late = late_ranks(seen, silent_seconds)
    late_numbers = {found.beat["rank"] for found in late}
    waiting = [found for found in seen if found.beat["rank"] not in late_numbers]
    ranks = {found.beat["rank"] for found in seen}
    unseen = [rank for rank in range(len(hosts)) if rank not in ranks]
    parts = [_late(found, silent_seconds) for found in late[:_NAMED]]
    if len(late) > _NAMED:
        parts.append(f"{len(late) - _NAMED} more ranks are late")
    if late:
        parts += _waiting(waiting, "for it" if len(late) == 1 else "for them")
    else:
        parts += _waiting(waiting, "for others" if unseen else "for each other")
        parts += [
            f"no heartbeat is visible from here of {_ranks(list(group))} on host {host}"
            for host, group in groupby(unseen, key=lambda rank: hosts[rank])
        ]
    return "; ".join(parts)


def late_ranks(seen: Iterable[PeerHeartbeat], silent_seconds: float) -> list[PeerHeartbeat]:
    """Ranks that wait for no other, or whose heartbeat is older than `silent_seconds` (suspended, on a lost host)."""
    late = [found for found in seen if found.age > silent_seconds or not found.beat["waits_for"]]
    return sorted(late, key=lambda found: int(found.beat["rank"]))


def _late(found: PeerHeartbeat, silent_seconds: float) -> str:
    beat = found.beat
    who, place = f"rank {beat['rank']} on host {beat['host']} is late", _place(beat)
    if found.age > silent_seconds:
        return f"{who}: no sign of life for {found.age:.0f} s, last in {place}"
    return f"{who}: in {place} for {beat['phase_seconds']:.0f} s"


def _waiting(waiting: Sequence[PeerHeartbeat], whom: str) -> list[str]:
    """Which ranks wait where, grouped by place."""
    by_place: dict[str, list[int]] = {}
    for found in waiting:
        by_place.setdefault(_place(found.beat), []).append(found.beat["rank"])
    return [
        f"{_ranks(ranks)} wait{'s' if len(ranks) == 1 else ''} {whom} in {place}" for place, ranks in by_place.items()
    ]


def _place(beat: dict[str, Any]) -> str:
    """Such as "forward of step 31", "allreduce of bucket 4 of step 31", "checkpoint after step 30"."""
    phase, step = beat["phase"], beat["step"]
    if phase == "allreduce":
        phase = f"allreduce of {beat['waits_for']}"
    if phase in ("start", "end"):
        return f"the {phase}"
    between = phase in ("evaluation", "checkpoint", "log")
    return f"{phase} after step {step}" if between else f"{phase} of step {step + beat.get('ahead', 0) + 1}"


def _ranks(ranks: Sequence[int]) -> str:
    """Such as "rank 3", "ranks 0, 2", "ranks 0, 2 to 7"."""
    words: list[str] = []
    # Consecutive ranks differ from their indices by the same number.
    for _, group in groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0]):
        own = [str(rank) for _, rank in group]
        words += [f"{own[0]} to {own[-1]}"] if len(own) > 2 else own
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words)}"


# A rank is slow from this multiple of the other ranks' median work per step, until it is below the second multiple.
_SLOW, _NO_LONGER = 1.2, 1.1
_LEAST_SECONDS = 0.005
# Judged together: at least this many steps, which took at least this many seconds; at most the last 100 steps.
_STEPS, _SECONDS, _MOST_STEPS = 10, 3.0, 100
# How long a change must last to be reported: after the first report, doubled by every report, up to the maximum.
_LASTING_SECONDS, _MOST_LASTING_SECONDS = 30.0, 900.0


class Stragglers:
    """Finds slow ranks. Every rank adds its own steps; when they are `due`, rank 0 judges what all ranks took.

    `hosts` has the host of every rank; `rank` is this one.
    """

    def __init__(self, hosts: Sequence[str], rank: int = 0) -> None:
        self._hosts, self._rank = hosts, rank
        self._work: deque[float] = deque(maxlen=_MOST_STEPS)
        self._seconds = 0.0  # of the steps since the last judgement
        self._reported: int | None = None  # the slow rank named in the last report
        self._verdict: int | None = None  # the slow rank now
        self._held = self._absent = 0.0  # seconds for which the verdict has held, and for which it was not `_reported`
        self._lasting = 0.0

    def add(self, work: float, seconds: float) -> None:
        """Add one step: this rank's seconds of work in it, and all of its seconds."""
        self._work.append(work)
        self._seconds += seconds

    @property
    def due(self) -> bool:
        """Whether rank 0 asks for a judgement: only after enough steps, which took long enough."""
        enough = len(self._work) >= _STEPS and self._seconds >= _SECONDS
        return self._rank == 0 and len(self._hosts) > 1 and enough

    def take_work(self) -> float:
        """This rank's median work per step since the last judgement: a single long step does not count."""
        own = median(self._work)
        self._work.clear()
        return own

    def judge(self, work: Sequence[float], warn: Callable[[str], None]) -> dict[str, float]:
        """Report through `warn` that a rank has become slow, or is no longer slow; return values for metrics.jsonl.

        `work` is what `take_work` returned on each rank.
        """
        slowest = max(range(len(work)), key=work.__getitem__)
        others = median(seconds for rank, seconds in enumerate(work) if rank != slowest)
        factor = _NO_LONGER if slowest == self._reported else _SLOW
        slow = work[slowest] - others > max((factor - 1) * others, _LEAST_SECONDS)
        verdict, lasted = slowest if slow else None, self._seconds
        self._held = self._held + lasted if verdict == self._verdict else 0.0
        self._absent = 0.0 if self._reported in (verdict, self._verdict) else self._absent + lasted
        self._verdict = verdict
        self._seconds = 0.0
        if slow and slowest != self._reported and self._held >= self._lasting:
            self._report(slowest)
            warn(
                f"rank {slowest} on host {self._hosts[slowest]} is slow: {1000 * work[slowest]:.0f} ms of work per "
                f"step, the others need {1000 * others:.0f} ms; "
                f"every step of the job waits {1000 * (work[slowest] - others):.0f} ms for it"
            )
        elif self._reported is not None and self._absent >= self._lasting:
            warn(f"rank {self._reported} on host {self._hosts[self._reported]} is no longer slow")
            self._report(None)
        return {
            "slowest_rank": slowest,
            "slowest_work_milliseconds": 1000 * work[slowest],
            "others_work_milliseconds": 1000 * others,
        }

    def _report(self, rank: int | None) -> None:
        self._reported, self._absent = rank, 0.0
        self._lasting = min(max(2 * self._lasting, _LASTING_SECONDS), _MOST_LASTING_SECONDS)
