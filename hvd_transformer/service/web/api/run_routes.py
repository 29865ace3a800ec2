"""The API of runs: the table, one run, its curves and logs, and several side by side."""

import re
from typing import Annotated, Literal

from pydantic import Field
from starlette.exceptions import HTTPException

from hvd_transformer.errors import UserError
from hvd_transformer.service.jobs import ENDED
from hvd_transformer.service.runs.comparison import MOST_RUNS
from hvd_transformer.service.runs.logs import PAGE_BYTES, log_names, log_page
from hvd_transformer.service.runs.metrics.metrics_rows import MOST_KEYS
from hvd_transformer.service.runs.query import Query, TableRow, select
from hvd_transformer.service.storage.tokens import Role
from hvd_transformer.service.submitting.request import check_tags
from hvd_transformer.service.web.api import models
from hvd_transformer.service.web.api.routes import BASE, Call, Route
from hvd_transformer.service.web.api.views import JobViews

_ID = re.compile(r"[0-9a-f]{12}")
_MOST_KEYS = 50  # of the configuration
_MOST_CONDITIONS = 20
_LONGEST_CURSOR = 20_000  # it has the value that the table is sorted by; a request's head may be 32 KiB
_LONGEST_KEYS = 20_000  # of all metrics of a run

Text = Annotated[str, Field(max_length=1000)]


class RunsQuery(models.Body):
    """`where`: KEY:VALUE of the configuration; `config`: keys of it to answer for each run."""

    text: Text = ""
    state: Text = ""
    user: Text = ""
    tag: Text = ""
    where: Annotated[list[Text], Field(max_length=_MOST_CONDITIONS)] = []
    sort: Text = "updated"
    order: models.Order = models.Order.DESC
    cursor: Annotated[str, Field(max_length=_LONGEST_CURSOR)] | None = None
    limit: Annotated[int, Field(ge=1, le=500)] = 50
    config: Annotated[list[Text], Field(max_length=_MOST_KEYS)] = []


class MetricsQuery(models.Body):
    """`keys`: with commas between. `from`, `to`: on the axis `x`. `width`: pixels."""

    keys: Annotated[str, Field(max_length=_LONGEST_KEYS)] = ""
    first: float | None = Field(None, alias="from")
    last: float | None = Field(None, alias="to")
    width: Annotated[int, Field(ge=1, le=4000)] = 800
    x: Literal["step", "seconds", "samples", "tokens"] = "step"


class LogQuery(models.Body):
    """`rank`: a number, or launch. `tail`: begin that many bytes before the end."""

    rank: Text = "0"
    offset: Annotated[int, Field(ge=0, lt=1 << 62)] = 0
    limit: Annotated[int, Field(ge=1, le=1 << 20)] = PAGE_BYTES
    tail: Annotated[int, Field(ge=0, lt=1 << 62)] | None = None


class CompareQuery(models.Body):
    """`runs`: their ids, with commas between."""

    runs: Text


def list_runs(call: Call) -> models.Rows:
    query: RunsQuery = call.query
    views = JobViews(call.service)
    page = select(
        call.table.rows().values(),
        Query(
            text=query.text,
            state=query.state,
            user=query.user,
            tag=query.tag,
            where=[_condition(text) for text in query.where],
            sort=query.sort,
            descending=query.order is models.Order.DESC,
            cursor=query.cursor,
            limit=query.limit,
        ),
        views.estimated_end,
    )
    items = [views.row(row, query.config) for row in page.items]
    return models.Rows(
        items=items, next=page.next, total=page.total, keys=list(page.keys), notes=call.service.runs.notes
    )


def show_run(call: Call) -> models.RunDetails:
    return JobViews(call.service).run(_row(call, call.path["run"]))


def tag_runs(call: Call) -> models.RunsTagged:
    """Each run by itself: one that refuses does not keep the others."""
    body: models.TagRuns = call.body
    check_tags(body.add)
    rows = call.table.rows()
    done: list[str] = []
    errors: dict[str, str] = {}
    for run in dict.fromkeys(body.runs):
        row = rows.get(run)
        if row is None:
            errors[run] = f"run {run}: no such run"
        elif row.job is not None:
            errors[run] = f"run {run} is that of job {row.job.id}: change the job's tags"
        else:
            done.append(run)
    call.service.store.tag_runs(done, body.add, body.remove)
    return models.RunsTagged(done=done, errors=errors)


def show_metrics(call: Call) -> models.Metrics:
    query: MetricsQuery = call.query
    row = _row(call, call.path["run"])
    if row.run is None:
        return models.Metrics(keys={}, available=[], last_step=None)
    curve = call.service.curves.of(row.run.path)
    wanted = _words(query.keys)
    if len(wanted) > MOST_KEYS:
        raise UserError(f"keys: {len(wanted)} are too many; at most {MOST_KEYS}")
    found = {}
    for key in wanted:
        points = curve.points(key, query.first, query.last, query.width, query.x)
        found[key] = models.Points(x=points.x, y=points.y, n=points.n)
    return models.Metrics(
        keys=found, available=curve.keys(), last_step=int(curve.last_step), complete=curve.complete.is_set()
    )


def show_log(call: Call) -> models.LogPage:
    query: LogQuery = call.query
    row = _row(call, call.path["run"])
    if row.run is None and not log_names(row.path):  # what ended before it had a configuration may have the launcher's
        if row.job is not None and row.job.state in ENDED:
            raise HTTPException(
                404, f"job {row.job.id} has no log: it became {row.job.state.value} before it was started"
            )
        raise HTTPException(404, f"{row.path}: no log yet")
    page = log_page(row.path, query.rank, query.offset, query.limit, query.tail)
    return models.LogPage(text=page.text, offset=page.offset, next=page.next, size=page.size)


def compare_runs(call: Call) -> models.Comparison:
    query: CompareQuery = call.query
    ids = _words(query.runs)
    if not 1 <= len(ids) <= MOST_RUNS:
        raise UserError(f"runs: {len(ids)} ids; must be 1 to {MOST_RUNS}, with commas between")
    rows = call.table.rows()
    known = [rows[run] for run in ids if run in rows]
    if not known:
        raise HTTPException(404, "no such run")
    return JobViews(call.service).comparison(known, [run for run in ids if run not in rows])


def _row(call: Call, run: str) -> TableRow:
    row = call.table.rows().get(run) if _ID.fullmatch(run) else None
    if row is None:
        raise HTTPException(404, "no such run")
    return row


def _condition(text: str) -> tuple[str, str]:
    key, colon, value = text.partition(":")
    if not (key and colon):
        raise UserError(f"where={text[:100]}: must be KEY:VALUE, such as optimizer.lr:0.001")
    return key, value


def _words(text: str) -> list[str]:
    return [word for word in dict.fromkeys(text.split(",")) if word]


_RUN = f"{BASE}/runs/{{run}}"
ROUTES = [
    Route("GET", f"{BASE}/runs", Role.VIEW, list_runs, "Runs and jobs.", models.Rows, query=RunsQuery),
    Route(
        "POST",
        f"{BASE}/runs/tags",
        Role.SUBMIT,
        tag_runs,
        "Change the tags of runs without a job.",
        models.RunsTagged,
        body=models.TagRuns,
    ),
    Route("GET", _RUN, Role.VIEW, show_run, "One run.", models.RunDetails),
    Route(
        "GET",
        f"{_RUN}/metrics",
        Role.VIEW,
        show_metrics,
        "Points of curves, at most two per pixel.",
        models.Metrics,
        query=MetricsQuery,
    ),
    Route("GET", f"{_RUN}/log", Role.VIEW, show_log, "A page of a log.", models.LogPage, query=LogQuery, refused=404),
    Route(
        "GET",
        f"{BASE}/compare",
        Role.VIEW,
        compare_runs,
        "Runs side by side.",
        models.Comparison,
        query=CompareQuery,
    ),
]
