"""Filters, order and pages of the table."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvd_transformer.errors import UserError
from hvd_transformer.service.jobs import Job, Needs, State
from hvd_transformer.service.runs.query import Page, Query, TableRow, select, table_rows
from hvd_transformer.service.runs.status import RunStatus
from hvd_transformer.service.runs.watched_run import RunRow, run_id


def _run(number: int, **fields: Any) -> RunRow:
    path = Path(f"/runs/{number}")
    return RunRow(run_id(path), f"run {number}", path, "ann", **{"status": RunStatus.FINISHED, **fields})


def _job(number: int, folder: str, **fields: Any) -> Job:
    job = Job(number, f"job {number}", "bob", State.QUEUED, 0, 100.0 + number, Needs(1, 1), folder, "/", ())
    return replace(job, **fields)


def _names(page: Page) -> list[str]:
    return [row.name for row in page.items]


def _rows(*runs: RunRow) -> list[TableRow]:
    return table_rows(runs, [], {})


def test_runs_and_jobs_are_put_together() -> None:
    jobs = [_job(1, "/runs/1", state=State.FAILED), _job(2, "/runs/1", tags=("a",)), _job(3, "/runs/new")]
    rows = {row.id: row for row in table_rows([_run(1), _run(2)], jobs, {_run(2).id: ["b"]})}
    assert set(rows) == {run_id(Path(f"/runs/{name}")) for name in ("1", "2", "new")}
    both, run, job = (rows[run_id(Path(f"/runs/{name}"))] for name in ("1", "2", "new"))
    assert (both.name, both.state, both.user, both.tags) == ("run 1", "QUEUED", "bob", ("a",))
    assert both.run is not None
    assert (run.name, run.state, run.user, run.tags, run.job) == ("run 2", "FINISHED", "ann", ["b"], None)
    assert (job.name, job.run) == ("new", None)
    (of_array,) = table_rows([], [_job(4, "/runs/sweep-4/2", array=4)], {})
    assert of_array.name == "sweep-4/2"


@pytest.mark.parametrize(
    ("query", "found"),
    [
        (Query(text="RUN 1"), ["run 1"]),
        (Query(text="transl"), ["run 2"]),
        (Query(text="bob"), ["job 7"]),
        (Query(text="7"), ["job 7"]),
        (Query(text="nothing"), []),
        (Query(state="running"), ["run 2"]),
        (Query(user="bob"), ["job 7"]),
        (Query(tag="x"), ["run 1"]),
        (Query(where=[("optimizer.lr", "1e-3")]), ["run 1", "run 2"]),
        (Query(where=[("optimizer.lr", "0.001"), ("seed", "2")]), ["run 2"]),
        (Query(where=[("optimizer.lr", "fast")]), []),
        (Query(where=[("optimizer.betas", "[0.9, 0.95]")]), ["run 1"]),
        (Query(where=[("training.compile", "true")]), ["run 2"]),
        (Query(where=[("model.pretrained", "none")]), ["run 1"]),
        (Query(where=[("no.such.key", "1")]), []),
    ],
)
def test_filters(query: Query, found: list[str]) -> None:
    config = {"optimizer.lr": 0.001, "seed": 1, "optimizer.betas": [0.9, 0.95], "model.pretrained": None}
    runs = [
        _run(1, config=config),
        _run(2, status=RunStatus.RUNNING, config={"optimizer.lr": 0.001, "seed": 2, "training.compile": True}),
    ]
    runs[1] = replace(runs[1], config={**runs[1].config, "task": "translation"})
    rows = table_rows(runs, [_job(7, "/runs/job 7")], {runs[0].id: ["x", "y"]})
    page = select(rows, replace(query, sort="name", descending=False))
    assert _names(page) == found
    assert page.total == len(found)


@pytest.mark.parametrize(
    ("sort", "ascending"),
    [
        ("name", ["run 1", "run 2", "run 3", "run 4"]),
        ("valid_loss", ["run 3", "run 1", "run 2", "run 4"]),
        ("seed", ["run 2", "run 3", "run 1", "run 4"]),
        ("step", ["run 4", "run 1", "run 3", "run 2"]),
    ],
)
def test_order(sort: str, ascending: list[str]) -> None:
    rows = _rows(
        _run(1, metrics={"valid_loss": 2.0}, config={"seed": "text"}, step=5),
        _run(2, metrics={"valid_loss": 3.0}, config={"seed": 9}, step=90),
        _run(3, metrics={"valid_loss": 1.0}, config={"seed": 10}, step=6),
        _run(4),
    )
    assert _names(select(rows, Query(sort=sort, descending=False))) == ascending
    missing = [] if sort in ("name", "step") else ["run 4"]  # at the end either way
    there = [name for name in ascending if name not in missing]
    assert _names(select(rows, Query(sort=sort, descending=True))) == there[::-1] + missing


def test_order_by_job() -> None:
    rows = table_rows([_run(2), _run(1)], [_job(9, "/runs/1"), _job(10, "/runs/job 10"), _job(2, "/runs/job 2")], {})
    assert _names(select(rows, Query(sort="job"))) == ["job 10", "run 1", "job 2", "run 2"]


def test_order_by_turn() -> None:
    jobs = [_job(1, "/runs/1"), _job(2, "/runs/2", priority=1), _job(3, "/runs/3"), _job(4, "/runs/4", priority=-1000)]
    jobs += [_job(5, "/runs/5", estimated_start=2e9), _job(6, "/runs/6", estimated_start=1e9)]
    rows = table_rows([_run(9)], jobs, {})
    assert _names(select(rows, Query(sort="turn", descending=False))) == ["6", "5", "2", "1", "3", "4", "run 9"]


def test_order_by_estimated_end() -> None:
    """Ends are estimated for the rows that match, and only to sort by them."""
    rows, ends, asked = _rows(*map(_run, range(1, 6))), {"run 1": 30.0, "run 3": 10.0, "run 4": 20.0}, list[str]()

    def estimated_end(row: TableRow) -> float | None:
        asked.append(row.name)
        return ends.get(row.name)

    query = Query(text="run", sort="estimated_end", descending=False, limit=2)
    first = select(rows[:4], query, estimated_end)
    assert _names(first) == ["run 3", "run 4"] and sorted(asked) == ["run 1", "run 2", "run 3", "run 4"]
    assert _names(select(rows[:4], replace(query, cursor=first.next), estimated_end)) == ["run 1", "run 2"]
    asked.clear()
    select(rows, Query(sort="step"), estimated_end)
    select(rows, replace(query, text="nothing"), estimated_end)
    assert asked == []


def test_jobs_are_ordered_among_runs_by_their_time() -> None:
    rows = table_rows([_run(1, updated=101.5), _run(2, updated=300.0)], [_job(2, "/runs/job 2")], {})
    assert _names(select(rows, Query())) == ["run 2", "job 2", "run 1"]


@pytest.mark.parametrize("descending", [True, False])
def test_pages_show_each_row_once(descending: bool) -> None:
    rows = _rows(*(_run(number, metrics={"loss": float(number % 5)} if number % 3 else {}) for number in range(100)))
    query, seen = Query(sort="loss", descending=descending, limit=7), list[str]()
    while True:
        page = select(rows, query)
        seen += _names(page)
        assert page.total == 100
        assert list(page.keys) == ["loss"]
        if page.next is None:
            break
        query = replace(query, cursor=page.next)
    assert seen == _names(select(rows, Query(sort="loss", descending=descending, limit=500)))
    assert len(seen) == len(set(seen)) == 100


def test_rows_that_come_and_go_shift_no_page() -> None:
    runs = [_run(number, step=number) for number in range(10)]
    page = select(_rows(*runs), Query(sort="step", descending=False, limit=5))
    del runs[0]
    runs += [_run(20, step=0), _run(21, step=20)]
    following = select(_rows(*runs), Query(sort="step", descending=False, limit=50, cursor=page.next))
    assert _names(following) == ["run 5", "run 6", "run 7", "run 8", "run 9", "run 21"]


@pytest.mark.parametrize(
    "cursor",
    ["", "x", "ä", "W10=", "WzAsInRleHQiLCJhIl0=", "WzAsMSwiYSIsMl0=", "WyJ4IiwxLDJd", "MQ==", "WzFlOTk5LDAsImEiXQ=="],
)
def test_damaged_cursors_are_refused(cursor: str) -> None:
    with pytest.raises(UserError, match="is not one that a list has given"):
        select(_rows(_run(1, step=1), _run(2, step=2)), Query(sort="step", cursor=cursor))


def test_pages_are_bounded() -> None:
    rows = _rows(*map(_run, range(600)))
    assert len(select(rows, Query(limit=10**9)).items) == 500
    assert len(select(rows, Query(limit=-1)).items) == 1
