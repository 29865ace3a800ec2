"""Ends an attempt by the rules of `outcome.py`, whoever has run it."""

from hvd_transformer.service.jobs import Cause, Job, State
from hvd_transformer.service.outcome import Exit, outcome
from hvd_transformer.service.storage.store import Store


def settle(store: Store, job: Job, number: int, ended: Exit, now: float) -> Job:
    """End the attempt `number` of a job; returns the job as it is then.

    Within a `store.batch()` that has read the job: nobody cancels it between the decision and its end.
    """
    what = outcome(job, ended)
    if what.state is State.CANCELLED and job.state is not State.STOPPING:  # by `hvd-transformer stop`
        store.update(job.id, state=State.STOPPING, stopping=Cause.CANCELLED)
    # Attempts resume at the last step that the one before has told, or a little earlier.
    before = [earlier.last_step or 0 for earlier in store.attempts(job.id)]
    return store.end_attempt(
        job.id,
        number,
        ended=now,
        state=what.state,
        code=ended.code,
        cause=ended.cause if ended.stopped is None else what.reason,  # its launcher does not know what for
        first_step=max(before, default=0),
        last_step=ended.step,
        reason=what.reason,
        retries=job.retries + 1 if what.retry else None,
    )
