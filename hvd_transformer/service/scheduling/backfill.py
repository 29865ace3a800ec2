"""Reservations: when blocked jobs will start and where, and what others may use until then.

    slots of one host
    4 ┤ running, ends at 10:00 │ promised to job 12, from 10:00 on
    3 ┤ free until 10:00       │ promised to job 12
    2 ┤ running, end unknown   │ …
    1 ┤ free                   │ free: a job of unknown length may use it

A job may start now if, until it ends, it takes nothing that a reservation needs. Free space only falls where a
reservation begins, so it suffices to look at now and at these times, and not at the end of each running job.
"""

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from hvd_transformer.service.scheduling.placement import FreeSpace, Part, Shape

Time = tuple[float, float]  # seconds since the epoch; among unknown times, which are infinite, the likely order


class Event(NamedTuple):
    """Slots that are given back (sign 1) or that a reservation begins to use (sign -1)."""

    time: Time
    taken: bool  # at the same time, slots are given back first
    parts: Sequence[Part]

    @property
    def sign(self) -> int:
        return -1 if self.taken else 1


@dataclass
class Reservation:
    """`space`: what is free once the job has started; others that run then must make do with it."""

    job: int
    time: Time
    until: Time
    holds_from: float  # a job that ends by then may use the slots before
    parts: Sequence[Part]
    space: FreeSpace


class Opening(NamedTuple):
    """The earliest time from which a job has room for ever. `space`: free at that time; `spare`: free ever after."""

    time: Time
    space: FreeSpace
    spare: FreeSpace


class Timeline:
    """Free space from now on. `free`: now, and kept up to date; `ends`: when running jobs give back what."""

    def __init__(self, now: float, free: FreeSpace, ends: Iterable[Event]) -> None:
        self.now, self.free = now, free
        self._events = sorted(ends)
        self._at_last = free.copy()  # when all has ended
        for event in self._events:
            self._at_last.add(event.parts)
        self._reservations: list[Reservation] = []  # by holds_from
        self._spare = [free]  # free now and at the first n reservations

    def spare(self, end: float) -> FreeSpace:
        """What a job that ends then may use from now on."""
        return self._spare[self._number_held(end)]

    def held_by(self, shape: Shape, ranks: int, end: float) -> int | None:
        """The first job whose reservation keeps these ranks from running until `end`, although they fit now."""
        if self.free.room(shape) >= ranks:
            for reservation, spare in zip(self._reservations, self._spare[1:], strict=True):
                if reservation.holds_from < end and spare.room(shape) < ranks:
                    return reservation.job
        return None

    def start(self, parts: Sequence[Part], end: Time) -> None:
        """A job starts now. It must fit into `spare(end)`."""
        self.free.add(parts, -1)
        for reservation in self._reservations[: self._number_held(end[0])]:
            reservation.space.add(parts, -1)
        insort(self._events, Event(end, False, parts))
        self._lower({part.host for part in parts})

    def give_back_earlier(self, end: Event, time: Time) -> Event:
        """A running job that would end with this event ends at `time`."""
        del self._events[bisect_left(self._events, end)]
        earlier = end._replace(time=time)
        insort(self._events, earlier)
        for reservation in self._reservations:
            if time <= reservation.time < end.time:
                reservation.space.add(end.parts)
        self._lower({part.host for part in end.parts})
        return earlier

    def opening(self, shape: Shape, ranks: int) -> Opening | None:
        """When and where these ranks have room for ever; None: a job holds it whose own start is unknown.

        Goes backwards from the end of all jobs, as the space that is free ever after only shrinks that way.
        """
        space, spare = self._at_last.copy(), self._at_last.copy()
        if spare.room(shape) < ranks:
            return None
        for time, events in groupby(reversed(self._events), key=attrgetter("time")):
            undone: list[tuple[Event, list[Part]]] = []
            for event in events:
                space.add(event.parts, -event.sign)
                before = [] if event.taken else spare.on_hosts_of(event.parts)
                spare.lower((part.host for part in before), space)
                undone.append((event, before))
            if spare.room(shape) < ranks:
                for event, before in reversed(undone):
                    space.add(event.parts, event.sign)
                    for part in before:
                        spare.set(*part)
                return Opening(time, space, spare)
        return Opening((self.now, 0.0), space, spare)

    def reserve(
        self, job: int, opening: Opening, parts: Sequence[Part], seconds: float | None, latest: float
    ) -> float | None:
        """Promise this place, which is spare at this opening. Returns when they will start; None: unknown.

        Jobs that seem to end by then may use the slots before. But if the start is unknown, or after `latest`, no job
        may: those that take longer than was thought would put it off again and again.
        """
        start = opening.time[0]
        until = (math.inf, start) if seconds is None or math.isinf(start) else (start + seconds, 0.0)
        for other in self._reservations:
            if opening.time <= other.time < until:
                other.space.add(parts, -1)
        opening.space.add(parts, -1)
        holds_from = start if math.isfinite(start) and start <= latest else self.now
        insort(
            self._reservations,
            Reservation(job, opening.time, until, holds_from, parts, opening.space),
            key=lambda reservation: reservation.holds_from,
        )
        insort(self._events, Event(opening.time, True, parts))
        if math.isinf(start):
            self._at_last.add(parts, -1)
        else:
            insort(self._events, Event(until, False, parts))
        self._spare = [self.free, *(self.free.copy() for _ in self._reservations)]
        self._lower(range(len(self.free.slots)))
        return None if math.isinf(start) else start

    def spaces_from(self, time: Time) -> list[tuple[Time, FreeSpace]]:
        """What is free at this time, and at each later one at which it may be less."""
        space = self.free.copy()
        for event in self._events[: bisect_right(self._events, time, key=lambda event: event.time)]:
            space.add(event.parts, event.sign)
        later = [(reservation.time, reservation.space) for reservation in self._reservations if reservation.time > time]
        return [(time, space), *later]

    def _number_held(self, end: float) -> int:
        """How many reservations begin before."""
        if math.isinf(end):
            return len(self._reservations)
        return bisect_left(self._reservations, end, key=lambda reservation: reservation.holds_from)

    def _lower(self, hosts: Iterable[int]) -> None:
        """Keep each `_spare` the least of all spaces up to it."""
        hosts = list(hosts)
        for before, spare, reservation in zip(self._spare, self._spare[1:], self._reservations, strict=False):
            for host in hosts:
                spare.set(host, before.slots[host], before.gpus[host])
            spare.lower(hosts, reservation.space)
