"""Work outside the training steps that takes some ranks much longer than others, such as preparing data on one host."""

import threading
from collections.abc import Callable
from typing import TypeVar, cast

import torch

from hvd_transformer.comm.world import World, agree
from hvd_transformer.data.build_once import ShouldStop, Stopped
from hvd_transformer.errors import UserError
from hvd_transformer.monitoring.heartbeat import Heartbeat
from hvd_transformer.training.process import StopRequest

Result = TypeVar("Result")
ROUND_SECONDS = 2.0


def agree_in_rounds(
    work: Callable[[ShouldStop], Result], world: World, stop: StopRequest, heartbeat: Heartbeat
) -> Result:
    """Like `agree`, for long work: ranks that have done theirs see whether the others make progress. Collective.

    `work` gets a function to call often: each call is a sign of progress, and it returns True once a rank was asked to
    stop or has failed. Raises `Stopped` on all ranks in the first case, the `UserError` on all ranks in the second.
    """
    rounds = _Rounds(world, stop, heartbeat)
    link, heartbeat.link = heartbeat.link, rounds
    try:
        return cast(Result, agree(world, lambda: rounds.run(work)))  # it is not None where no rank failed
    finally:
        heartbeat.link = link


class _Rounds:
    """Every two seconds the ranks tell each other how they are doing, until all have done their work.

    To the watchdog it stands for the collectives: a round alone is no progress. `ended` counts those in which another
    rank made progress while this one waited for it.
    """

    def __init__(self, world: World, stop: StopRequest, heartbeat: Heartbeat) -> None:
        self.waiting: dict[str, int] = {}
        self.ended = 0
        self._world, self._stop, self._heartbeat = world, stop, heartbeat
        self._done, self._calls = threading.Event(), 0
        self._own_failed = self._failed = self._stopped = False
        self._lost: Exception | None = None

    def run(self, work: Callable[[ShouldStop], Result]) -> Result | None:
        """None: this rank stopped because another one failed."""
        thread = threading.Thread(target=self._keep, name="rounds", daemon=True)
        thread.start()
        result: Result | None = None
        error: UserError | Stopped | None = None
        try:
            result = work(self._should_stop)
        except (UserError, Stopped) as raised:
            error, self._own_failed = raised, isinstance(raised, UserError)
        self.waiting["other ranks"] = threading.get_ident()
        self._done.set()
        thread.join()
        if self._lost is not None:
            raise self._lost
        if self._stopped:
            raise Stopped
        if error is not None and not (isinstance(error, Stopped) and self._failed):
            raise error
        return result

    def _should_stop(self) -> bool:
        self._heartbeat.tick()
        self._calls += 1
        return bool(self._stop) or self._failed or self._stopped or self._lost is not None

    def _keep(self) -> None:
        calls, working = 0, 1
        try:
            while working:
                self._done.wait(ROUND_SECONDS)
                done, now = self._done.is_set(), self._calls
                own = [not done, not done and now != calls, done and self._own_failed, bool(self._stop)]
                working, moving, failed, stopped = self._world.all_reduce_(torch.tensor(own).int(), "rounds").tolist()
                self._failed, self._stopped = self._failed or failed > 0, self._stopped or stopped > 0
                self.ended += done and moving > 0
                calls = now
        except Exception as error:  # another rank is lost
            self._lost = error
