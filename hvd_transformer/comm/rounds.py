"""Work outside collectives that takes some ranks much longer than others: preparing, writing or reading files.

    rank 0   | works: advance, advance, …     | returns
    rank 1   | works | waits ................ | returns
    rounds           |    |    |    |    |    |            one every two seconds: "I work and make progress"

A rank that waited for the others in one collective would look like one that hangs, and gloo gives up after ten minutes.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from hvd_transformer.comm.group import ROUNDS
from hvd_transformer.comm.world import World
from hvd_transformer.errors import UserError

Result = TypeVar("Result")
Advance = Callable[[], bool]
ROUND_SECONDS = 2.0


def _never() -> bool:
    return False


class Rounds:
    """One such work of all ranks. While another rank makes progress, it counts as progress of those that wait for it.

    `asked`: whether this rank is asked to stop. `waits`: whether its work only waits for that of others now.
    `stopped`, once a rank was asked to, and `failed`, once a rank's work has, are equal on all ranks after `run`.
    """

    def __init__(self, world: World, asked: Callable[[], bool] = _never, waits: Callable[[], bool] = _never) -> None:
        self.stopped = self.failed = False
        self._world, self._asked, self._waits = world, asked, waits
        self._done, self._calls = threading.Event(), 0
        self._own_failed = False
        self._lost: Exception | None = None

    @property
    def lost(self) -> bool:
        """Whether another rank is lost: `run` raises that error once this rank's work has ended."""
        return self._lost is not None

    def run(self, work: Callable[[Advance], Result]) -> Result:
        """Do this rank's work, and wait for the others'. Collective; `work` itself calls no collectives.

        `work` gets a function to call often: each call is a sign of progress, and it returns True once a rank was asked
        to stop or has failed. Raises the `UserError` that `work` raised, after the others have ended.
        """
        thread = threading.Thread(target=self._keep, name="rounds", daemon=True)
        thread.start()
        result: list[Result] = []
        error: UserError | None = None
        try:
            result.append(work(self._advance))
        except UserError as raised:
            error, self._own_failed = raised, True
        with self._world.link.waits_for("other ranks"):
            self._done.set()
            thread.join()
        if self._lost is not None:
            raise self._lost
        if error is not None:
            raise error
        return result[0]

    def _advance(self) -> bool:
        self._world.link.ended += 1
        self._calls += 1
        return self._asked() or self.failed or self.stopped or self._lost is not None

    def _keep(self) -> None:
        calls, working = 0, 1
        try:
            while working:
                self._done.wait(ROUND_SECONDS)
                done, now = self._done.is_set(), self._calls
                own = [not done, not done and now != calls, done and self._own_failed, self._asked()]
                working, moving, failed, stopped = self._world.all_reduce_(torch.tensor(own).int(), ROUNDS).tolist()
                self.failed, self.stopped = self.failed or failed > 0, self.stopped or stopped > 0
                if moving and (done or self._waits()):
                    self._world.link.ended += 1
                calls = now
        except Exception as error:  # another rank is lost
            self._lost = error
