"""Long work of the ranks that ends when one of them is asked to stop, such as preparing data on one host."""

from collections.abc import Callable
from typing import TypeVar, cast

from hvd_transformer.comm.rounds import Advance, Rounds
from hvd_transformer.comm.world import World, agree
from hvd_transformer.data.build_once import ShouldStop, Stopped
from hvd_transformer.errors import UserError
from hvd_transformer.training.process import StopRequest

Result = TypeVar("Result")


def agree_in_rounds(work: Callable[[ShouldStop], Result], world: World, stop: StopRequest) -> Result:
    """Like `agree`, for long work: ranks that have done theirs see whether the others make progress. Collective.

    `work` gets a function to call often: each call is a sign of progress, and it returns True once a rank was asked to
    stop or has failed. Raises `Stopped` on all ranks in the first case, the `UserError` on all ranks in the second.
    """

    def in_rounds() -> Result | None:
        rounds, result, has_stopped = Rounds(world, lambda: bool(stop)), None, False

        def until_stopped(should_stop: Advance) -> Result | None:
            nonlocal has_stopped
            try:
                return work(should_stop)
            except Stopped:
                has_stopped = True
                return None

        try:
            result = rounds.run(until_stopped)
        except UserError:
            if not rounds.stopped:
                raise
        if rounds.stopped or (has_stopped and not rounds.failed):
            raise Stopped
        return result

    return cast(Result, agree(world, in_rounds))  # it is not None where no rank failed
