"""The table in memory is what the database and the run directories say, whatever happens."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvd_transformer.service.jobs import ID, Needs, State
from hvd_transformer.service.runs.index import RunIndex
from hvd_transformer.service.runs.query import TableRow, table_rows
from hvd_transformer.service.storage.new_job import NewJob
from hvd_transformer.service.storage.store import Store
from hvd_transformer.service.web.api.run_table import RunTable


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "service.db")
    yield made
    made.close()


@pytest.fixture
def runs(tmp_path: Path) -> RunIndex:
    (tmp_path / "runs").mkdir()
    return RunIndex(tmp_path / "runs")


def make_run(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("task: language_model\nseed: 1\n")
    (folder / "metrics.jsonl").write_text("")


def new_job(folder: Path, output_dir: str = f"j-{ID}", **config: object) -> NewJob:
    return NewJob("j", "ann", 1.0, Needs(1, 1), f"{folder}/{output_dir}", "/", ("word",), config=config)


def comparable(rows: list[TableRow]) -> list[object]:
    """What the table must have of a row: all but the words of its job."""
    return sorted(
        (row.id, row.name, row.state, row.user, tuple(row.tags), row.run, row.job and row.job.id, dict(row.config))
        for row in rows
    )


def expected(store: Store, runs: RunIndex) -> list[object]:
    return comparable(table_rows(runs.rows(), store.jobs(), store.run_tags()))


def test_it_follows_all_changes(store: Store, runs: RunIndex) -> None:
    table, chance = RunTable(store, runs), random.Random(7)
    for number in range(80):
        what = chance.randrange(6)
        if what == 0:
            store.add_jobs([new_job(runs.root, seed=number)])
        elif what == 1 and (jobs := store.jobs([State.QUEUED])):
            store.update(chance.choice(jobs).id, state=State.HELD)
        elif what == 2 and (jobs := store.jobs()):
            store.set_tags(chance.choice(jobs).id, [f"tag{number}"])
        elif what == 5 and (found := runs.rows()):
            store.tag_runs([chance.choice(found).id], [f"tag{number}"], store.run_tags().get(found[0].id, ()))
        elif what == 3:
            make_run(runs.root / f"run-{number}")
            runs.refresh()
        elif what == 4 and (jobs := store.jobs()) and not Path(folder := chance.choice(jobs).output_dir).exists():
            make_run(Path(folder))
            runs.refresh()
        assert sorted(comparable(list(table.rows().values())), key=str) == sorted(expected(store, runs), key=str)


def test_a_forgotten_job_is_gone(store: Store, runs: RunIndex) -> None:
    table = RunTable(store, runs)
    kept, gone = store.add_jobs([new_job(runs.root), new_job(runs.root)])
    assert len(table.rows()) == 2
    with store.database.write() as connection:
        connection.execute("DELETE FROM jobs WHERE id = ?", (gone,))
        store.changed(connection, "job", [gone])
    assert [row.job.id for row in table.rows().values() if row.job] == [kept]


def test_of_two_jobs_on_one_folder_the_later_one_counts(store: Store, runs: RunIndex) -> None:
    table = RunTable(store, runs)
    (first,) = store.add_jobs([new_job(runs.root, "same")])
    store.update(first, state=State.CANCELLED, ended=5.0)
    (second,) = store.add_jobs([new_job(runs.root, "same")])
    for _ in range(2):
        (row,) = table.rows().values()
        assert row.job is not None
        assert row.job.id == second
        store.set_tags(first, ["later"])


def test_it_starts_anew_when_it_has_missed_too_much(
    store: Store, runs: RunIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvd_transformer.service.web.api.run_table.EVENTS_KEPT", 3)
    table = RunTable(store, runs)
    store.add_jobs([new_job(runs.root)])
    assert len(table.rows()) == 1
    store.add_jobs([new_job(runs.root) for _ in range(20)])
    store.events_after = lambda *args: []  # type: ignore[method-assign]
    assert len(table.rows()) == 21


def test_only_what_has_changed_is_read(store: Store, runs: RunIndex) -> None:
    """The cost of a look grows with the changes, not with the jobs."""
    table = RunTable(store, runs)
    store.add_jobs([new_job(runs.root) for _ in range(30)])
    table.rows()
    reads: list[int] = []
    job, jobs = store.job, store.jobs
    store.job = lambda number: reads.append(number) or job(number)  # type: ignore[method-assign, func-returns-value]
    store.jobs = lambda *args, **more: reads.append(-1) or jobs(*args, **more)  # type: ignore[method-assign, func-returns-value]
    before = table.rows()
    assert table.rows() is before
    store.update(7, priority=3)
    store.set_waits({8: "priority"}, {8: 70.0})
    changed = [row.job for row in table.rows().values() if row.job and row.job.id in (7, 8)]
    assert reads == [7]
    assert [(found.id, found.priority, found.estimated_start) for found in changed] == [(7, 3, None), (8, 0, 70.0)]


def test_configurations_share_their_keys(store: Store, runs: RunIndex) -> None:
    keys = {f"some.key.{number}": f"value {number % 3}" for number in range(100)}
    table = RunTable(store, runs)
    store.add_jobs([new_job(runs.root, **keys) for _ in range(3)])
    first, second, third = (row.job.config for row in table.rows().values() if row.job)
    assert dict(first) == dict(second) == dict(third) == keys
    assert all(own is other for own, other in zip(first, second, strict=True))
    assert all(first[key] is third[key] for key in keys)
    assert len(first) == 100
    assert "other" not in first
