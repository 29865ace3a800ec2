"""What commands that run on every rank have in common: how their world starts, and how each rank ends."""

import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hvd_transformer.cli import main
from hvd_transformer.errors import WRONG_INPUT, UserError

if TYPE_CHECKING:
    from hvd_transformer.comm.world import World
    from hvd_transformer.monitoring.watchdog import Watchdog
    from hvd_transformer.training.process import StopRequest

    Work = Callable[[World, StopRequest, Watchdog], int]


def run_ranks(
    command: str, work: "Work", tensor: int, stall_seconds: float | None = None, mistake: UserError | None = None
) -> int:
    """Joins the other ranks and does the work; returns its exit code, or that of its error, which is shown.

    A `mistake` in this rank's words is for the work to raise where other ranks wait to hear of it. Horovod tells them.
    """
    from hvd_transformer.comm.horovod_env import launched

    place = launched()
    if mistake is not None and place.size == 1:  # before torch is imported, which takes seconds
        return _fail(command, mistake)
    from hvd_transformer.monitoring.watchdog import Watchdog
    from hvd_transformer.parallel.mesh import process_groups

    watchdog = Watchdog(place.rank, place.size, stall_seconds)
    watchdog.start()
    try:
        return _run(command, work, place.rank, watchdog, process_groups(place.size, tensor))
    finally:
        watchdog.close()


def tensor_of(settings: Sequence[str]) -> int:
    """`parallel.tensor` as the words alone have it: Horovod must know the groups of ranks before anything else."""
    given = [value for key, _, value in (word.partition("=") for word in settings) if key == "parallel.tensor"]
    return int(given[-1]) if given and given[-1].isdecimal() and int(given[-1]) else 1


def _run(command: str, work: "Work", rank: int, watchdog: "Watchdog", groups: Sequence[Sequence[int]]) -> int:
    from hvd_transformer.comm.group import PeerLost
    from hvd_transformer.comm.world import AgreedError, World
    from hvd_transformer.data.build_once import Stopped
    from hvd_transformer.parallel.replica_check import ReplicasDiffer
    from hvd_transformer.training.process import StopRequest
    from hvd_transformer.training.trainer import Diverged

    stop = StopRequest()
    try:
        world = World.start(watchdog.stall_seconds, groups)
    except UserError as error:
        if rank == 0:
            _fail(command, error)
        else:
            time.sleep(1)  # a launcher ends all ranks at the first exit
        _leave(WRONG_INPUT)  # an MPI that did not start right would not end either
    watchdog.heartbeat.world = world
    try:
        code = work(world, stop, watchdog)
        world.close()
        return code
    except UserError as error:
        if world.rank == 0 or not isinstance(error, AgreedError):
            _fail(command, error)
        if isinstance(error, AgreedError):
            world.close()  # waits until the message is out, before a launcher ends the job for the first exit code
        return WRONG_INPUT
    except (Diverged, ReplicasDiffer) as error:
        if world.rank == 0:
            _fail(command, error)
        return 1
    except Stopped:
        _fail(command, UserError("stopped while the data was prepared; the same command begins again"))
        _leave(1)
    except PeerLost as error:
        _fail(command, error)
        _leave(1)
    except BaseException:
        _report_crash(command, world.rank)
        _leave(1)
    return 1


def _fail(command: str, error: Exception) -> int:
    main.show(command, error)
    return WRONG_INPUT


def _report_crash(command: str, rank: int) -> None:
    """A fault of ours: the whole traceback, on the screen and in this rank's log."""
    text = traceback.format_exc()
    logging.getLogger("hvd_transformer").error("%s", text)
    print(f"{command}: rank {rank} failed:\n{text}", file=sys.stderr, flush=True)


def _leave(code: int) -> None:
    """Ends this process at once: an orderly shutdown would wait for ranks that may never come."""
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    os._exit(code)
