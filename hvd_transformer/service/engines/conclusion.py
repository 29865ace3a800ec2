"""How an attempt has ended, from what its launcher has told and what the scheduler says."""

from dataclasses import replace

from hvd_transformer.errors import STALLED
from hvd_transformer.service.engines.backend import Ended, Sighting
from hvd_transformer.service.jobs import Engine, Job
from hvd_transformer.service.outcome import Exit


def conclude(job: Job, seen: Sighting, told: Exit | None, last_line: str) -> tuple[Exit, bool]:
    """How it ended, and whether the job has reached its own time limit.

    `told`: by the launcher, if it could; `last_line`: of the attempt's output.
    """
    step = None if told is None else told.step
    ended = seen.ended
    if told is not None and told.code == 0:
        return told, False
    if ended is Ended.EXITED and seen.code == STALLED and told is not None and told.code != STALLED:
        # The script was told that the time limit is near, has saved, and asks to be started again.
        near = Exit(told.code, f"{seen.words}: saved before its time limit", step, interrupted=True)
        return near, job.time_limit is not None
    if ended is Ended.TIME_LIMIT:
        return Exit(None, seen.words, step), job.time_limit is not None
    if ended is Ended.LOST:
        return Exit(None, seen.words, step), False
    if ended is Ended.PREEMPTED:
        return Exit(None, seen.words, step, interrupted=True), False
    if ended is Ended.CANCELLED:
        return Exit(1, seen.words, step), False
    if told is not None and job.engine is Engine.SLURM and told.stopped not in (None, "request"):
        # The script would have asked to be started again: it has given up, or somebody else has sent the signal.
        return replace(told, stopped=None, cause=last_line or seen.words), False
    if told is not None:  # a host that was refused counts as lost: the scheduler may give others
        return replace(told, refused={}, lost=(*told.lost, *told.refused)), False
    return Exit(seen.code, ": ".join(filter(None, (seen.words, last_line)))), False
