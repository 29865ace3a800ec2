"""What becomes of a job when an attempt has ended: the rules of retries, as a pure function."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hvd_transformer.errors import STALLED
from hvd_transformer.service.jobs import Cause, Job, State

_AFTER_STOP = {
    Cause.CANCELLED: State.CANCELLED,
    Cause.KILLED: State.CANCELLED,
    Cause.PREEMPTED: State.QUEUED,
    Cause.HELD: State.HELD,
    Cause.TIME_LIMIT: State.FAILED,
}


@dataclass(frozen=True)
class Exit:
    """How an attempt ended. `code`: the launcher's exit code; None if it was killed.

    `refused`: hosts that could not be used at the start, and why; `lost`: hosts that no longer answered. `started`:
    False if there never was a launcher, for a reason that is no fault of the job. `stopped`: what asked it to save and
    stop, if something did: the name of a signal, or "request", which was the service or `hvd-transformer stop`.
    """

    code: int | None
    cause: str = ""
    step: int | None = None  # the last one that a rank told
    refused: Mapping[str, str] = field(default_factory=dict)
    lost: Sequence[str] = ()
    started: bool = True
    interrupted: bool = False  # by another scheduler that ran it, through no fault of the job
    stopped: str | None = None


def not_started(why: str) -> Exit:
    """The end of an attempt that never had a launcher."""
    return Exit(None, f"not started: {why}", started=False)


@dataclass(frozen=True)
class Outcome:
    """The job's next state, why in words, and whether it uses up one of its retries."""

    state: State
    reason: str
    retry: bool = False


def outcome(job: Job, ended: Exit) -> Outcome:
    """The rules: a job that was stopped becomes what it was stopped for, wrong input and errors of the job are never
    tried again, stalled jobs, lost hosts and killed launchers are, and a job that was not started, or was interrupted,
    as by a reboot of this machine, loses no retry.
    """
    if ended.code == 0:
        return Outcome(State.SUCCEEDED, "")
    if job.stopping is not None:
        return Outcome(_AFTER_STOP[job.stopping], _stopped(job))
    if ended.stopped == "request":
        return Outcome(State.CANCELLED, "stopped with hvd-transformer stop")
    if ended.stopped is not None:
        return Outcome(State.QUEUED, f"its launcher got {ended.stopped}")
    if not ended.started or ended.interrupted:
        return Outcome(State.QUEUED, ended.cause)
    if ended.refused:
        return Outcome(State.QUEUED, f"not started: {'; '.join(ended.refused.values())}")
    if not _is_transient(ended):
        return Outcome(State.FAILED, ended.cause or f"exit code {ended.code}")
    why = ended.cause or _transient_words(ended)
    if job.retries < job.max_retries:
        return Outcome(State.QUEUED, f"retry {job.retries + 1} of {job.max_retries}: {why}", retry=True)
    return Outcome(State.FAILED, f"{why}; gave up after {job.max_retries} retries")


def _is_transient(ended: Exit) -> bool:
    """Whether another start may go well: not after wrong input or an error of the job itself."""
    return ended.code in (None, STALLED) or bool(ended.lost)


def _transient_words(ended: Exit) -> str:
    if ended.lost:
        return f"lost {', '.join(ended.lost)}"
    return "its launcher was killed" if ended.code is None else "it stalled"


def _stopped(job: Job) -> str:
    if job.stopping is Cause.TIME_LIMIT:
        return f"reached its time limit of {job.time_limit:.0f} s"
    words = {Cause.KILLED: "cancelled without saving", Cause.PREEMPTED: "preempted", Cause.HELD: "held"}
    return words.get(job.stopping or Cause.CANCELLED, "cancelled")
