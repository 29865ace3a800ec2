"""Whether a job that has failed starts again, when, and without which hosts. Decisions alone: nothing is done here."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from hvd_transformer.errors import WRONG_INPUT
from hvd_transformer.launch.attempt import AttemptResult

_SAME_STEP = 3  # failures at the same step, after which the job is given up
_SAME_HOST = 2  # consecutive failures in which a rank of the same host failed first, after which it is set aside
_BACK_OFF_SECONDS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)  # by consecutive failures without a new step


@dataclass(frozen=True)
class Limits:
    """What `launch` tolerates."""

    restarts: int
    give_up_seconds: float  # from the first failure, or stop, after the last new step


class Verdict(NamedTuple):
    """`give_up`: why the job ends; "" if the failure itself says why. None: it starts again after `back_off` seconds.

    `at_fault`: the hosts to set aside, and why.
    """

    give_up: str | None
    back_off: float = 0.0
    at_fault: Mapping[str, str] = MappingProxyType({})


class RestartPolicy:
    """Judges the failures of one job, in their order."""

    def __init__(self, limits: Limits, now: Callable[[], float] = time.monotonic) -> None:
        self.restarts = 0
        self._limits, self._now = limits, now
        self._failing_since: float | None = None
        self._failed_steps: list[int | None] = []  # of the latest failures, all at the same step
        self._last_step = -1
        self._fruitless = 0  # consecutive failures without a new step
        self._made_steps = False
        self._failed_first: list[str] = []  # the host of the latest failures, all the same

    def note_steps(self, ended: AttemptResult) -> bool:
        """Note the steps of a start, however it ended; return whether some are new, with which failures begin anew."""
        self._made_steps |= any(beat.get("loss") is not None for beat in ended.beats.values())
        step = _reached(ended)
        if step is None or step <= self._last_step:
            return False
        self._last_step, self._fruitless, self._failing_since = step, 0, None
        return True

    def note_stop(self, ended: AttemptResult) -> None:
        """Note a start whose ranks have saved so that the job resumes on other hosts: it may wait for them in vain."""
        self.note_steps(ended)
        self._begin_time()

    def judge(self, ended: AttemptResult, *, replaceable: Callable[[str], bool]) -> Verdict:
        """Count a failure. `replaceable`: whether the job can go on without a host."""
        step = _reached(ended)
        self._note_failure(new_steps=self.note_steps(ended))
        host = None if ended.lost else ended.at_fault
        self._failed_first = [] if host is None else [*(old for old in self._failed_first if old == host), host]
        wrong_host = self._made_steps and host is not None and replaceable(host)
        if ended.code == WRONG_INPUT and not ended.lost and not wrong_host:
            return Verdict("")
        if not ended.lost:
            self._failed_steps = [*(old for old in self._failed_steps if old == step), step]
        return self._restart(step, self._at_fault(ended, host, replaceable))

    def judge_lost_host(self) -> Verdict:
        """Count a start that failed because a host was lost before its ranks ran."""
        self._note_failure(new_steps=False)
        return self._restart(None, {})

    def out_of_time(self) -> str | None:
        """Why the job is given up now, also while it waits for hosts; None: it is not."""
        if self._failing_since is None or self._now() - self._failing_since <= self._limits.give_up_seconds:
            return None
        return f"giving up: no new step for {self._limits.give_up_seconds:.0f} s after a failure (--give-up-after)"

    def _note_failure(self, new_steps: bool) -> None:
        self._fruitless += not new_steps
        self._begin_time()

    def _begin_time(self) -> None:
        if self._failing_since is None:
            self._failing_since = self._now()

    def _at_fault(
        self, ended: AttemptResult, host: str | None, replaceable: Callable[[str], bool]
    ) -> Mapping[str, str]:
        if ended.lost:
            return {host: f"host {host} is lost" for host in ended.lost}
        if host is None or not replaceable(host):
            return {}
        if ended.code == WRONG_INPUT:
            return {host: f"host {host} refuses what worked before"}
        if len(self._failed_first) >= _SAME_HOST:
            return {host: f"host {host}: its ranks failed first {len(self._failed_first)} times in a row"}
        return {}

    def _restart(self, step: int | None, at_fault: Mapping[str, str]) -> Verdict:
        if not self._limits.restarts:
            return Verdict("")
        if self.restarts == self._limits.restarts:
            return Verdict(f"giving up after {self.restarts} restarts")
        if len(self._failed_steps) == _SAME_STEP:
            where = "before the first step" if step is None else f"after step {step}"
            return Verdict(f"giving up: failed {_SAME_STEP} times {where}")
        if (late := self.out_of_time()) is not None:
            return Verdict(late)
        self.restarts += 1
        return Verdict(None, _BACK_OFF_SECONDS[min(self._fruitless, len(_BACK_OFF_SECONDS) - 1)], at_fault)


def _reached(ended: AttemptResult) -> int | None:
    """The last step that a rank told of."""
    return max((beat["step"] for beat in ended.beats.values()), default=None)
