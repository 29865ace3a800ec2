"""Replays the work of one step beside its messages, which go through one link one after the other.

    work    | layer 4 | layer 3 | layer 2 | layer 1 |..waits..|
    link              | == 4 == | == 3 ==   | == 2 == | == 1 == |      each starts when its gradients are there and
                                                                       the link is free

On a CPU a message takes time from the work that goes on beside it (`Seconds.cpu`), spread evenly over the transfer.
"""

from collections.abc import Sequence
from typing import NamedTuple

from hvd_transformer.planning.scaling.collectives import Seconds


class Work(NamedTuple):
    """A stretch of computing."""

    seconds: float
    sends: Sequence[Seconds] = ()  # messages that can start when it has ended
    needs: int = 0  # how many of all messages so far must have arrived before it starts


class Replay(NamedTuple):
    """When a step's work and messages have ended."""

    end: float  # of the last of both
    work: float  # the seconds of the work alone
    waited: float  # for messages, the tail behind the last work included
    stolen: float  # from the work, on a CPU


def replay(step: Sequence[Work]) -> Replay:
    """Replay the stretches of work in their order; one pass, linear in work and messages."""
    now = link = stolen = waited = debt = 0.0
    arrivals: list[float] = []
    for seconds, sends, needs in step:
        if needs and arrivals[needs - 1] > now:
            debt *= (link - arrivals[needs - 1]) / (link - now)
            waited += arrivals[needs - 1] - now
            now = arrivals[needs - 1]
        took, paid = _beside(seconds, link - now, debt)
        stolen += took - seconds
        debt -= paid
        now += took
        for message in sends:
            link = max(link, now) + message.total
            debt += message.cpu
            arrivals.append(link)
    waited += max(0.0, link - now)
    return Replay(max(now, link), sum(work.seconds for work in step), waited, stolen)


def _beside(seconds: float, busy: float, debt: float) -> tuple[float, float]:
    """How long work of so many seconds takes beside messages that go on for `busy` seconds and need `debt` seconds of
    the same core; and how much of that they then have had."""
    if busy <= 0 or debt <= 0:
        return seconds, max(debt, 0.0)
    share = min(debt / busy, 1.0)
    if seconds <= busy * (1 - share):
        took = seconds / (1 - share) if seconds else 0.0
        return took, share * took
    return seconds + share * busy, debt
