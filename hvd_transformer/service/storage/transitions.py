"""Which state of a job may follow which."""

from collections.abc import Mapping

from hvd_transformer.errors import UserError
from hvd_transformer.service.jobs import State

ALLOWED: Mapping[State, frozenset[State]] = {
    State.HELD: frozenset({State.QUEUED, State.CANCELLED}),
    State.QUEUED: frozenset({State.HELD, State.STARTING, State.CANCELLED}),
    # Its end may be seen before its begin; a lost job goes back to QUEUED.
    State.STARTING: frozenset({State.RUNNING, State.STOPPING, State.SUCCEEDED, State.FAILED, State.QUEUED}),
    State.RUNNING: frozenset({State.STOPPING, State.SUCCEEDED, State.FAILED, State.QUEUED}),
    # It may end by itself before it is stopped.
    State.STOPPING: frozenset({State.CANCELLED, State.QUEUED, State.HELD, State.FAILED, State.SUCCEEDED}),
    State.SUCCEEDED: frozenset(),
    State.FAILED: frozenset({State.QUEUED}),
    State.CANCELLED: frozenset({State.QUEUED}),
}


def check_transition(job: int, old: State, new: State) -> None:
    """Raise `UserError` if the job cannot go from `old` to `new`. It may stay where it is."""
    if new is not old and new not in ALLOWED[old]:
        allowed = ", ".join(state.value for state in State if state in ALLOWED[old]) or "nothing else"
        raise UserError(f"job {job} is {old.value}: it cannot become {new.value}, only {allowed}")
