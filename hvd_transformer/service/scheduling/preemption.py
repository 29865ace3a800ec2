"""Which running jobs of lower priority are stopped, so that the whole of a job finds room: the fewest and cheapest.

A victim saves and loses no step, but its restart costs minutes. So one victim is better than several, lower priorities
go first, and then the youngest, which has done least.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hvd_transformer.service.scheduling.backfill import Event, Time
from hvd_transformer.service.scheduling.placement import FreeSpace, Shape
from hvd_transformer.service.scheduling.snapshot import Running


@dataclass(frozen=True)
class Candidate:
    """A running job that may be stopped, and the event of its end."""

    job: Running
    end: Event

    @property
    def slots(self) -> int:
        return sum(part.slots for part in self.end.parts)

    def may_add(self, shape: Shape) -> int:
        """A bound on the room that it leaves."""
        parts = self.end.parts
        if shape.gpus:
            return sum(max(part.slots, -(-part.gpus // shape.gpus)) + shape.group - 1 for part in parts)
        return sum(part.slots + shape.group - 1 for part in parts)


Spaces = Sequence[tuple[Time, FreeSpace]]  # free once victims have stopped, and when it may be less: `spaces_from`


def room_in(spaces: Spaces, shape: Shape) -> int:
    """The room that there will be without any victim."""
    return _Room(spaces).of(shape)


def choose_victims(spaces: Spaces, candidates: Sequence[Candidate], shape: Shape, ranks: int) -> list[Candidate]:
    """The victims that make room for so many ranks, for which there is none; empty: even all would not."""
    cheapest = sorted(candidates, key=lambda victim: (victim.job.priority, -victim.job.began, victim.job.id))
    enough = _first_that_make_room(spaces, cheapest, shape, ranks)
    if len(enough) <= 1:
        return enough
    dearest = enough[-1].job.priority
    room = _Room(spaces)
    missing = ranks - room.of(shape)
    for victim in cheapest:
        if victim.job.priority <= dearest and victim.may_add(shape) >= missing:
            room.stop(victim)
            if room.of(shape) >= ranks:
                return [victim]
            room.stop(victim, -1)
    largest = sorted(cheapest, key=lambda victim: (victim.job.priority, -victim.slots))
    fewer = _without_needless(spaces, _first_that_make_room(spaces, largest, shape, ranks), shape, ranks)
    young = _without_needless(spaces, enough, shape, ranks)
    return min(young, fewer, key=len)


class _Room:
    """The room for a job while candidates are assumed to stop."""

    def __init__(self, spaces: Spaces) -> None:
        self._spaces = [(time, space.copy()) for time, space in spaces]
        self._least = self._spaces[0][1].copy()
        for _, space in self._spaces[1:]:
            self._least.lower(range(len(space.slots)), space)

    def stop(self, victim: Candidate, sign: int = 1) -> None:
        for time, space in self._spaces:
            if victim.end.time > time:  # it would have run then
                space.add(victim.end.parts, sign)
        for host, _, _ in victim.end.parts:
            _, first = self._spaces[0]
            slots, gpus = first.slots[host], first.gpus[host]
            for _, space in self._spaces[1:]:
                slots, gpus = min(slots, space.slots[host]), min(gpus, space.gpus[host])
            self._least.set(host, slots, gpus)

    def of(self, shape: Shape) -> int:
        return self._least.room(shape)


def _first_that_make_room(spaces: Spaces, candidates: Sequence[Candidate], shape: Shape, ranks: int) -> list[Candidate]:
    """The shortest beginning of the candidates that makes room; empty: there is none."""
    room = _Room(spaces)
    for number, candidate in enumerate(candidates, start=1):
        room.stop(candidate)
        if room.of(shape) >= ranks:
            return list(candidates[:number])
    return []


def _without_needless(spaces: Spaces, victims: Sequence[Candidate], shape: Shape, ranks: int) -> list[Candidate]:
    """These victims but for those that are not needed: the dearest are kept running first."""
    room = _Room(spaces)
    for victim in victims:
        room.stop(victim)
    kept = []
    for victim in reversed(victims):
        room.stop(victim, -1)
        if room.of(shape) < ranks:
            room.stop(victim)
            kept.append(victim)
    return kept
