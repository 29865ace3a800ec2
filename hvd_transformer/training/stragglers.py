"""Which rank makes the others wait? From the seconds that each works of a step: all but those it waits for others."""

from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

# A rank is slow when it works so much longer than the middle one of the others, and until it is this near again.
_SLOW, _NO_LONGER = 1.2, 1.1
_LEAST_SECONDS = 0.005
# What is judged at once: at least so many steps of so many seconds together, and not more than the last of them.
_STEPS, _SECONDS, _MOST_STEPS = 10, 3.0, 100


class Stragglers:
    """Rank 0's view of all ranks; `hosts` are theirs."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts
        self._steps: deque[Sequence[float]] = deque(maxlen=_MOST_STEPS)
        self._seconds = 0.0  # of the steps since the last judgement
        self._slow: int | None = None

    def add(self, work: Sequence[float]) -> None:
        """Each rank's seconds of work in one step."""
        if len(work) > 1 and all(work):
            self._steps.append(work)
            self._seconds += max(work)

    def judge(self, warn: Callable[[str], None]) -> dict[str, float]:
        """Tells `warn` of a rank that is slow now or is so no longer; numbers for metrics.jsonl.

        Nothing happens before there were enough steps to judge by. Their median counts, so a single long one does not.
        """
        if len(self._steps) < _STEPS or self._seconds < _SECONDS:
            return {}
        work = [median(seconds) for seconds in zip(*self._steps, strict=True)]
        self._steps.clear()
        self._seconds = 0.0
        slowest = max(range(len(work)), key=work.__getitem__)
        others = median(work[:slowest] + work[slowest + 1 :])
        longer = work[slowest] - others
        factor = _NO_LONGER if slowest == self._slow else _SLOW
        if longer <= max((factor - 1) * others, _LEAST_SECONDS):
            if self._slow is not None:
                warn(f"rank {self._slow} on host {self._hosts[self._slow]} is no longer slow")
            self._slow = None
        elif slowest != self._slow:
            self._slow = slowest
            warn(
                f"rank {slowest} on host {self._hosts[slowest]} is slow: {1000 * work[slowest]:.0f} ms of work a step "
                f"where the others need {1000 * others:.0f} ms; "
                f"each step of the job waits {1000 * longer:.0f} ms for it"
            )
        return {
            "slowest_rank": slowest,
            "slowest_work_milliseconds": 1000 * work[slowest],
            "others_work_milliseconds": 1000 * others,
        }
