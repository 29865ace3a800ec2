"""Which slots and GPUs of which hosts a job gets: all or nothing, whole tensor groups, the fewest hosts, best fit.

A rank takes one slot and, on GPUs, `gpus_per_rank` of the host's. `FreeSpace` counts what is free or will be free;
`Cluster` knows names and GPU numbers.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from hvd_transformer.service.jobs import Allocation, Host, Needs, Placement


class Shape(NamedTuple):
    """What decides how many ranks of a job a host can take."""

    group: int  # ranks that share a host
    gpus: int  # per rank


class Part(NamedTuple):
    """Slots and GPUs of one host, which is given by its index."""

    host: int
    slots: int
    gpus: int


def shape_of(needs: Needs, everything: "FreeSpace") -> Shape:
    """Whole tensor groups per host; groups that span hosts only if the job would not fit otherwise on all hosts."""
    shape = Shape(needs.tensor, needs.gpus_per_rank)
    return shape if everything.room(shape) >= least_ranks(needs) else Shape(1, needs.gpus_per_rank)


def least_ranks(needs: Needs) -> int:
    """The fewest ranks that the job starts with: whole tensor groups."""
    return min(needs.num_ranks, -(-needs.min_ranks // needs.tensor) * needs.tensor)


def best_size(needs: Needs, room: int) -> int:
    """With how many ranks the job starts if there is room for so many; 0: it does not."""
    size = min(needs.num_ranks, room - room % needs.tensor)
    return size if size >= least_ranks(needs) else 0


def all_free(hosts: Sequence[Host]) -> "FreeSpace":
    """The space of these hosts if nothing ran on them."""
    return FreeSpace([host.slots for host in hosts], [len(set(host.gpus)) for host in hosts])


class FreeSpace:
    """The number of free slots and GPUs of each host.

    The room for a shape is kept up to date, so that asking for it looks at no host: a pass over thousands of jobs asks
    for each.
    """

    def __init__(self, slots: Sequence[int], gpus: Sequence[int]) -> None:
        self.slots, self.gpus = list(slots), list(gpus)
        self._rooms: dict[Shape, list[int]] = {}
        self._total: dict[Shape, int] = {}

    def copy(self) -> "FreeSpace":
        return FreeSpace(self.slots, self.gpus)

    def room(self, shape: Shape) -> int:
        """How many ranks of this shape fit, over all hosts."""
        if shape not in self._total:
            self._rooms[shape] = [_room(*free, shape) for free in zip(self.slots, self.gpus, strict=True)]
            self._total[shape] = sum(self._rooms[shape])
        return self._total[shape]

    def room_on(self, host: int, shape: Shape) -> int:
        """How many ranks of this shape fit on one host."""
        return _room(self.slots[host], self.gpus[host], shape)

    def add(self, parts: Iterable[Part], sign: int = 1) -> None:
        for host, slots, gpus in parts:
            self.set(host, self.slots[host] + sign * slots, self.gpus[host] + sign * gpus)

    def set(self, host: int, slots: int, gpus: int) -> None:
        self.slots[host], self.gpus[host] = slots, gpus
        for shape, rooms in self._rooms.items():
            room = _room(slots, gpus, shape)
            self._total[shape] += room - rooms[host]
            rooms[host] = room

    def lower(self, hosts: Iterable[int], other: "FreeSpace") -> None:
        """On these hosts, the lesser of this and the other space."""
        for host in hosts:
            slots, gpus = other.slots[host], other.gpus[host]
            if slots < self.slots[host] or gpus < self.gpus[host]:
                self.set(host, min(slots, self.slots[host]), min(gpus, self.gpus[host]))

    def on_hosts_of(self, parts: Iterable[Part]) -> list[Part]:
        """Everything that is free there."""
        return [Part(part.host, self.slots[part.host], self.gpus[part.host]) for part in parts]

    def fits(self, parts: Iterable[Part]) -> bool:
        """Whether all of these are free."""
        return all(self.slots[host] >= slots and self.gpus[host] >= gpus for host, slots, gpus in parts)

    def place(self, shape: Shape, ranks: int) -> list[Part]:
        """The fewest hosts with room for these ranks, which must fit; among those, the ones that it fills best.

        For 10 ranks and 6, 6, 8 and 8 free slots these are the two with 6, which leaves the 8 together. Equal hosts:
        the one with fewer free slots and GPUs besides, and the first.
        """
        self.room(shape)
        found = zip(self._rooms[shape], self.slots, self.gpus, range(len(self.slots)), strict=True)
        rooms = sorted(entry for entry in found if entry[0])  # tightest first
        largest = [0, *accumulate(entry[0] for entry in reversed(rooms))]  # room of the n largest
        parts = []
        for others in reversed(range(bisect_left(largest, ranks))):
            # The smallest host that does, if the largest ones take the rest. It is none of them.
            room, *_, host = rooms.pop(bisect_left(rooms, (max(1, ranks - largest[others]),)))
            taken = min(room, ranks)
            parts.append(Part(host, taken, taken * shape.gpus))
            ranks -= taken
        assert not ranks
        return sorted(parts)


def _room(slots: int, gpus: int, shape: Shape) -> int:
    ranks = min(slots, gpus // shape.gpus) if shape.gpus else slots
    return ranks - ranks % shape.group if ranks > 0 else 0


class Cluster:
    """The hosts that take new jobs, by index, and the numbers of their free GPUs."""

    def __init__(self, hosts: Sequence[Host], used: Iterable[Placement]) -> None:
        self.names = [host.name for host in hosts]
        self._index = {name: index for index, name in enumerate(self.names)}
        self._gpus = [set(host.gpus) for host in hosts]
        self._free_gpus = [set(host.gpus) for host in hosts]
        slots = [host.slots for host in hosts]
        for placement in used:
            index = self._index.get(placement.host)
            if index is not None:
                slots[index] -= placement.ranks
                self._free_gpus[index] -= set(placement.gpus)
        self.free = FreeSpace(slots, [len(free) for free in self._free_gpus])

    def parts(self, allocation: Iterable[Placement]) -> list[Part]:
        """What an allocation takes of these hosts."""
        found = ((self._index.get(placement.host), placement) for placement in allocation)
        return [
            Part(index, placement.ranks, len(self._gpus[index].intersection(placement.gpus)))
            for index, placement in found
            if index is not None
        ]

    def parts_of(self, place: Iterable[tuple[str, int]], shape: Shape) -> list[Part] | None:
        """What so many ranks on each host take; None: a host is not there."""
        try:
            return [Part(self._index[host], ranks, ranks * shape.gpus) for host, ranks in place]
        except KeyError:
            return None

    def take(self, parts: Iterable[Part]) -> Allocation:
        """These parts with the lowest free GPU numbers, which are then no longer free. Leaves `free` as it is."""
        result = []
        for host, slots, gpus in parts:
            numbers = sorted(self._free_gpus[host])[:gpus]
            assert len(numbers) == gpus
            self._free_gpus[host].difference_update(numbers)
            result.append(Placement(self.names[host], slots, tuple(numbers)))
        return tuple(result)
