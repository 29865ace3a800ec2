"""Which rank makes the others wait? From the seconds that each works of a step: all but those it waits for others.

The first slow rank is named at once. Each later change of the verdict must last before it is told, longer after every
line: on a busy machine the verdicts alternate, and there nobody is to be told every few seconds.
"""

from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

# A rank is slow when it works so much longer than the middle one of the others, and until it is this near again.
_SLOW, _NO_LONGER = 1.2, 1.1
_LEAST_SECONDS = 0.005
# What is judged at once: at least so many steps of so many seconds together, and not more than the last of them.
_STEPS, _SECONDS, _MOST_STEPS = 10, 3.0, 100
# How long a change must last to be told: after the first line, doubled by each line, and at most.
_LASTING_SECONDS, _MOST_LASTING_SECONDS = 30.0, 900.0


class Stragglers:
    """Rank 0's view of all ranks; `hosts` are theirs."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts
        self._steps: deque[Sequence[float]] = deque(maxlen=_MOST_STEPS)
        self._seconds = 0.0  # of the steps since the last judgement
        self._told: int | None = None  # the slow rank that the last line has named
        self._verdict: int | None = None  # the slow rank now
        self._held = self._absent = 0.0  # seconds since the verdict is this one, and since it was `_told`
        self._lasting = 0.0

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
        slowest = max(range(len(work)), key=work.__getitem__)
        others = median(work[:slowest] + work[slowest + 1 :])
        factor = _NO_LONGER if slowest == self._told else _SLOW
        slow = work[slowest] - others > max((factor - 1) * others, _LEAST_SECONDS)
        self._note(slowest if slow else None, self._seconds)
        self._steps.clear()
        self._seconds = 0.0
        if slow and slowest != self._told and self._held >= self._lasting:
            self._tell(slowest)
            warn(
                f"rank {slowest} on host {self._hosts[slowest]} is slow: {1000 * work[slowest]:.0f} ms of work a step "
                f"where the others need {1000 * others:.0f} ms; "
                f"each step of the job waits {1000 * (work[slowest] - others):.0f} ms for it"
            )
        elif self._told is not None and self._absent >= self._lasting:
            warn(f"rank {self._told} on host {self._hosts[self._told]} is no longer slow")
            self._tell(None)
        return {
            "slowest_rank": slowest,
            "slowest_work_milliseconds": 1000 * work[slowest],
            "others_work_milliseconds": 1000 * others,
        }

    def _note(self, verdict: int | None, seconds: float) -> None:
        """How long the verdict has been this one, and another one than what was told: from its first time on."""
        self._held = self._held + seconds if verdict == self._verdict else 0.0
        self._absent = 0.0 if self._told in (verdict, self._verdict) else self._absent + seconds
        self._verdict = verdict

    def _tell(self, rank: int | None) -> None:
        self._told, self._absent = rank, 0.0
        self._lasting = min(max(2 * self._lasting, _LASTING_SECONDS), _MOST_LASTING_SECONDS)
