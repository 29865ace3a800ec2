"""The API of the queue: submit, look at and change jobs."""

import base64
from collections.abc import Callable, Sequence
from typing import Annotated

from pydantic import Field
from starlette.exceptions import HTTPException

from hvd_transformer.errors import UserError
from hvd_transformer.service.jobs import LONGEST_NUMBER, Job, State
from hvd_transformer.service.storage.tokens import Role
from hvd_transformer.service.submitting.request import Request
from hvd_transformer.service.web.api import models
from hvd_transformer.service.web.api.routes import BASE, Call, Route
from hvd_transformer.service.web.api.views import JobViews
from hvd_transformer.service.web.parts import Queue

_AT_ONCE = 100  # changes between two syncs of the disk, while other requests that write wait


class JobsQuery(models.Body):
    """`state`: one or several, also with commas."""

    state: list[str] = []
    user: str | None = None
    tag: str | None = None
    cursor: Annotated[str, Field(max_length=100)] | None = None
    limit: Annotated[int, Field(ge=1, le=500)] = 50
    order: models.Order = models.Order.ASC


def submit(call: Call) -> models.Submitted:
    """`Idempotency-Key`: a request that is sent again adds nothing."""
    jobs = _queue(call).actions.submit(call.body, call.user.owner, call.request.headers.get("idempotency-key"))
    views = JobViews(call.service)
    return models.Submitted(ids=[job.id for job in jobs], jobs=[views.job(job) for job in jobs])


def list_jobs(call: Call) -> models.Jobs:
    query: JobsQuery = call.query
    found = call.service.store.jobs(
        _states(query.state),
        query.user,
        query.tag,
        None if query.cursor is None else _read_cursor(query.cursor),
        query.limit + 1,
        query.order is models.Order.DESC,
    )
    views, page = JobViews(call.service), found[: query.limit]
    following = _cursor(page[-1].id) if len(found) > len(page) else None
    return models.Jobs(items=[views.job(job) for job in page], next=following)


def show_job(call: Call) -> models.JobDetails:
    return JobViews(call.service).details(_known(call, call.number))


def change(action: Callable[[Call, Job], object]) -> Callable[[Call], models.Job]:
    """A handler that changes the job in the path, and answers how it is then."""

    def handler(call: Call) -> models.Job:
        action(call, _own(call, call.number))
        return JobViews(call.service).job(_known(call, call.number))

    return handler


def bulk(call: Call) -> models.BulkDone:
    """Each job by itself: one that refuses does not keep the others."""
    body: models.Bulk = call.body
    done: list[int] = []
    errors: dict[int, str] = {}
    numbers = list(dict.fromkeys(body.ids))
    for first in range(0, len(numbers), _AT_ONCE):
        changed = []
        with call.service.store.batch():
            for number in numbers[first : first + _AT_ONCE]:
                try:
                    _BULK[body.action](call, _own(call, number))
                    changed.append(number)
                except UserError as error:
                    errors[number] = str(error)
                except HTTPException as error:
                    errors[number] = error.detail
        done += changed
    return models.BulkDone(done=done, errors=errors)


def _queue(call: Call) -> Queue:
    assert call.service.queue is not None  # Route.needs_queue
    return call.service.queue


def _cancel(call: Call, job: Job) -> object:
    return _queue(call).actions.cancel(job.id, call.body.now)


def _hold(call: Call, job: Job) -> object:
    return _queue(call).actions.hold(job.id)


def _release(call: Call, job: Job) -> object:
    return _queue(call).actions.release(job.id)


def _retry(call: Call, job: Job) -> object:
    return _queue(call).actions.retry(job.id)


def _prioritize(call: Call, job: Job) -> object:
    return _queue(call).actions.set_priority(job.id, call.body.priority)


def _tag(call: Call, job: Job) -> object:
    return _queue(call).actions.set_tags(job.id, call.body.add, call.body.remove)


_BULK = {"cancel": _cancel, "hold": _hold, "release": _release, "retry": _retry, "tags": _tag}


def _known(call: Call, number: int) -> Job:
    job = call.service.store.job(number)
    if job is None:
        raise HTTPException(404, f"job {number}: no such job")
    return job


def _own(call: Call, number: int) -> Job:
    """The job, if this user may change it."""
    job = _known(call, number)
    if job.owner != call.user.owner and not call.user.may(Role.ADMIN):
        raise HTTPException(403, f"job {number} is {job.owner}'s: only {job.owner} and admins may change it")
    return job


def _states(names: Sequence[str]) -> list[State] | None:
    try:
        states = [State(name.strip().upper()) for part in names for name in part.split(",") if name.strip()]
    except ValueError as error:
        raise UserError(f"state: {error}; states: {', '.join(state.value for state in State)}") from None
    return states or None


def _cursor(number: int) -> str:
    return base64.urlsafe_b64encode(b"job %d" % number).decode().rstrip("=")


def _read_cursor(cursor: str) -> int:
    try:
        kind, number = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).split()
        if kind == b"job" and number.isdigit() and len(number) <= LONGEST_NUMBER:
            return int(number)
    except ValueError:
        pass
    raise UserError("cursor: not one that this service has given; leave it out for the first page")


def _change(name: str, action: Callable[[Call, Job], object], body: type[models.Body], summary: str) -> Route:
    return Route(
        "POST",
        f"{BASE}/jobs/{{id}}/{name}",
        Role.SUBMIT,
        change(action),
        f"{summary}: one's own, or any as admin.",
        models.Job,
        body=body,
        refused=409,
        needs_queue=True,
    )


ROUTES = [
    Route(
        "POST",
        f"{BASE}/jobs",
        Role.SUBMIT,
        submit,
        "Queue a job, or an array of them.",
        models.Submitted,
        body=Request,
        headers=("Idempotency-Key",),
        status=201,
        needs_queue=True,
        takes_turns=True,
    ),
    Route("GET", f"{BASE}/jobs", Role.VIEW, list_jobs, "Jobs by id.", models.Jobs, query=JobsQuery),
    Route(
        "POST",
        f"{BASE}/jobs/bulk",
        Role.SUBMIT,
        bulk,
        "Change many jobs, each by itself.",
        models.BulkDone,
        body=models.Bulk,
        needs_queue=True,
    ),
    Route("GET", f"{BASE}/jobs/{{id}}", Role.VIEW, show_job, "One job.", models.JobDetails),
    _change("cancel", _cancel, models.Cancel, "End a job for good"),
    _change("hold", _hold, models.Nothing, "Keep a job from running"),
    _change("release", _release, models.Nothing, "Queue a held job"),
    _change("retry", _retry, models.Nothing, "Queue a failed or cancelled job again"),
    _change("priority", _prioritize, models.Priority, "Change a job's place in the queue"),
    _change("tags", _tag, models.ChangeTags, "Change a job's tags"),
]
