"""How a rank's process starts and ends, in every command that runs on all ranks."""

import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from hvd_transformer.cli.main import show
from hvd_transformer.errors import WRONG_INPUT, UserError

if TYPE_CHECKING:
    from hvd_transformer.comm.world import World
    from hvd_transformer.monitoring.watchdog import Watchdog
    from hvd_transformer.training.process import StopRequest

    Work = Callable[[World, StopRequest, Watchdog], int]

# A rank that has lost another one, or lets rank 0 say what is wrong, exits so much later: the first to exit is taken
# for the cause, and who notes the exits looks at them in turn.
_CAUSE_SECONDS = 0.3


def run_ranks(
    command: str, work: "Work", tensor: int, stall_seconds: float | None = None, mistake: UserError | None = None
) -> int:
    """Join the other ranks and run `work`. Return the exit code of `work`, or that of its error, which is printed.

    `mistake` is an error in this rank's command line. With several ranks `work` raises it after they have joined, so
    that all of them learn of it; a single process fails at once.
    """
    from hvd_transformer.comm.horovod_env import launched

    place = launched()
    if mistake is not None and place.size == 1:  # before torch is imported, which takes seconds
        show(command, mistake)
        return WRONG_INPUT
    from hvd_transformer.monitoring.watchdog import Watchdog
    from hvd_transformer.parallel.mesh import process_groups

    watchdog = Watchdog(place.rank, place.size, stall_seconds)
    watchdog.start()
    try:
        return _run(command, work, place.rank, watchdog, process_groups(place.size, tensor))
    finally:
        watchdog.close()


def tensor_of(settings: Sequence[str]) -> int:
    """`parallel.tensor` on the command line alone: Horovod must know the process sets before it starts."""
    given = [value for key, _, value in (word.partition("=") for word in settings) if key == "parallel.tensor"]
    number = given[-1] if given else ""
    return max(1, int(number)) if number.isdecimal() and len(number) < 10 else 1


def _run(command: str, work: "Work", rank: int, watchdog: "Watchdog", groups: Sequence[Sequence[int]]) -> int:
    from hvd_transformer.comm.group import PeerLost
    from hvd_transformer.comm.world import AgreedError, World
    from hvd_transformer.data.build_once import Stopped
    from hvd_transformer.parallel.replica_check import ReplicasDiffer
    from hvd_transformer.training.out_of_memory import OutOfMemory
    from hvd_transformer.training.process import StopRequest
    from hvd_transformer.training.session import NotSaved
    from hvd_transformer.training.training_step import Diverged

    stop = StopRequest()
    try:
        world = World.start(watchdog.stall_seconds, groups)
    except UserError as error:
        if rank == 0:
            show(command, error)
        else:
            time.sleep(1)  # a launcher kills all ranks at the first exit
        _leave(WRONG_INPUT)  # an MPI that failed to start would not shut down either
    except PeerLost as error:
        if not _ended_by_launcher(stop):  # then the rank that left first has said why
            show(command, error)
        _leave(1)
    watchdog.heartbeat.link = world.link
    try:
        code = work(world, stop, watchdog)
        world.close()
        return code
    except UserError as error:
        if world.rank == 0 or not isinstance(error, AgreedError):
            show(command, error)
        if isinstance(error, AgreedError):
            world.close()  # a barrier: the message is out before a launcher kills the job at the first exit code
            if error.rank != world.rank:
                time.sleep(1)  # the first to exit is taken for the cause
        return WRONG_INPUT
    except (Diverged, NotSaved, ReplicasDiffer) as error:
        if world.rank == 0:
            show(command, error)
        else:
            time.sleep(_CAUSE_SECONDS)
        return 1
    except OutOfMemory as error:
        show(command, error)
        _leave(error.code)
    except Stopped:
        show(command, UserError("stopped while preparing the data; the same command starts over"))
        _leave(1)
    except PeerLost as error:
        show(command, error)
        time.sleep(_CAUSE_SECONDS)
        _leave(1)
    except BaseException:
        _report_crash(command, world.rank)
        _leave(1)


def _ended_by_launcher(stop: "StopRequest", seconds: float = 5.0) -> bool:
    """Whether a launcher asks this rank to end, as most do within this time of the first rank's exit."""
    deadline = time.monotonic() + seconds
    while not stop and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(stop)


def _report_crash(command: str, rank: int) -> None:
    """Print the traceback of a bug, on the screen and in this rank's log."""
    text = traceback.format_exc()
    logging.getLogger("hvd_transformer").error("%s", text)
    print(f"{command}: rank {rank} failed:\n{text}", file=sys.stderr, flush=True)


def _leave(code: int) -> NoReturn:
    """Exit at once: an orderly shutdown would wait for ranks that may never arrive."""
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    os._exit(code)
