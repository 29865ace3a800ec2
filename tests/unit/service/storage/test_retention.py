"""Jobs that ended long ago are forgotten, with all that belongs to them and nothing else."""

import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from new_jobs import new_job, on

from hvd_transformer.errors import UserError
from hvd_transformer.service.jobs import Host, State
from hvd_transformer.service.storage import retention
from hvd_transformer.service.storage.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "service.db")
    store.put_hosts([Host("h1", 8)])
    yield store
    store.close()


@pytest.fixture
def spools(tmp_path: Path) -> Path:
    for number in range(1, 8):
        (tmp_path / "jobs" / str(number) / "code").mkdir(parents=True)
        (tmp_path / "jobs" / str(number) / "1.out").write_text("said")
    return tmp_path / "jobs"


def run(store: Store, job: int, ended: float) -> None:
    assert store.start(job, on("h1"), 2000.0)
    store.end_attempt(job, 1, ended=ended, state=State.SUCCEEDED)


def test_only_what_ended_before_is_forgotten(store: Store, spools: Path, tmp_path: Path) -> None:
    store.add_jobs([new_job(f"j{number}", tags=("x",), code=f"c{number}") for number in range(5)])
    for job, ended in ((1, 3000.0), (2, 4000.0), (3, 3999.0)):
        run(store, job, ended)
    assert store.start(4, on("h1"), 1000.0)
    seq = store.last_seq()
    assert store.forget(4000.0, spools) == [1, 3]
    assert [job.id for job in store.jobs()] == [2, 4, 5]
    assert sorted(path.name for path in spools.iterdir()) == ["2", "4", "5", "6", "7"]
    assert store.code_in_use() == {"c1", "c3", "c4"}
    assert [event.id for event in store.events_after(seq)] == ["1", "3"]
    assert store.attempts(1) == [] and [job.id for job in store.jobs(tag="x")] == [2, 4, 5]
    store.close()
    with closing(sqlite3.connect(tmp_path / "service.db")) as connection:
        for table in ("requests", "tags", "attempts", "placements"):
            found = {row[0] for row in connection.execute(f"SELECT job FROM {table}")}
            assert found and found <= {2, 4, 5}, table


def test_what_a_job_waits_for_is_kept(store: Store, spools: Path) -> None:
    store.add_jobs([new_job("a"), new_job("b")])
    store.add_jobs([new_job("c", after=(1, 2))])
    run(store, 1, 3000.0)
    assert store.forget(9000.0, spools) == []
    run(store, 2, 3000.0)
    assert [job.id for job in store.waiting()] == [3]
    assert store.forget(9000.0, spools) == []
    run(store, 3, 8000.0)
    assert store.forget(9000.0, spools) == [1, 2, 3]


def test_what_a_job_would_wait_for_if_it_were_retried_is_kept(store: Store, spools: Path) -> None:
    store.add_jobs([new_job("a")])
    store.add_jobs([new_job("b", after=(1,))])
    store.update(1, state=State.CANCELLED, ended=3000.0)
    store.update(2, state=State.CANCELLED, ended=9500.0)
    assert store.forget(9000.0, spools) == []
    store.update(2, state=State.QUEUED)
    assert store.waiting() == []


def test_a_crash_between_folder_and_rows_is_made_up_for(
    store: Store, spools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add_jobs([new_job("a"), new_job("b")])
    run(store, 1, 3000.0)
    run(store, 2, 3000.0)
    remove = shutil.rmtree

    def crash(path: Path, **options: bool) -> None:
        remove(path)
        raise KeyboardInterrupt

    monkeypatch.setattr(retention.shutil, "rmtree", crash)
    with pytest.raises(KeyboardInterrupt):
        store.forget(9000.0, spools)
    monkeypatch.undo()
    assert len(store.jobs()) == 2
    assert store.forget(9000.0, spools) == [1, 2]
    assert store.jobs() == [] and not (spools / "1").exists() and not (spools / "2").exists()


def test_a_job_that_is_retried_meanwhile_is_forgotten_as_a_whole_or_not(
    store: Store, spools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder and its row belong together: the lock of its next attempt is in that folder."""
    store.add_jobs([new_job()])
    assert store.start(1, on("h1"), 2000.0)
    store.end_attempt(1, 1, ended=3000.0, state=State.FAILED)
    remove, refused = shutil.rmtree, list[str]()

    def retry() -> None:
        try:
            store.update(1, state=State.QUEUED)
        except UserError as error:
            refused.append(str(error))

    thread = threading.Thread(target=retry)

    def remove_as_it_is_retried(path: Path, **options: bool) -> None:
        thread.start()
        thread.join(0.3)  # long enough for one that nothing keeps waiting
        remove(path)

    monkeypatch.setattr(retention.shutil, "rmtree", remove_as_it_is_retried)
    assert store.forget(9000.0, spools) == [1]
    thread.join()
    assert refused == ["job 1: no such job"]


def test_many_are_forgotten_in_parts(store: Store, spools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_AT_ONCE", 3)
    ids = store.add_jobs([new_job(f"j{number}") for number in range(7)])
    for job in ids:
        run(store, job, 3000.0)
    calls: list[int] = []
    with store.listening(lambda: calls.append(len(store.jobs()))):
        assert store.forget(9000.0, spools) == ids
    assert calls == [4, 1, 0]
    assert list(spools.iterdir()) == []


def test_an_id_is_never_used_again_once_a_backup_was_put_back(tmp_path: Path, spools: Path) -> None:
    """`spools` has the folders of the jobs 1 to 7, one of which may still run."""
    with closing(Store(tmp_path / "backup.db")) as restored:
        restored.skip_used_ids(spools)
        assert restored.add_jobs([new_job("a"), new_job("b")]) == [8, 9]
        restored.skip_used_ids(spools)
        restored.skip_used_ids(tmp_path / "none")
        assert restored.add_jobs([new_job("c")]) == [10]
        shutil.rmtree(spools)
        (spools / "12").mkdir(parents=True)
        restored.skip_used_ids(spools)
        assert restored.add_jobs([new_job("d")]) == [13]
