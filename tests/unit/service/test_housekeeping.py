"""What the run directories of each user take, which limits per user need."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from threading import Event

import pytest

from hvd_transformer.own_folder import user_name
from hvd_transformer.service import housekeeping as housekeeping_module
from hvd_transformer.service.housekeeping import Housekeeping
from hvd_transformer.service.jobs import Needs
from hvd_transformer.service.runs import folders
from hvd_transformer.service.runs.index import RunIndex, RunRow
from hvd_transformer.service.runs.metrics.curves import Curves
from hvd_transformer.service.storage.settings import Limits
from hvd_transformer.service.storage.store import NewJob, Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store(tmp_path / "service.db")) as store:
        yield store


def make_run(folder: Path, size: int) -> int:
    """A run directory with a file of that size; returns what it takes on the disk."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text("task: language_model\n")
    (folder / "metrics.jsonl").write_text("{}\n")
    (folder / "checkpoints" / "weights").write_bytes(os.urandom(size))
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())


def first_measured(housekeeping: Housekeeping) -> Mapping[str, int]:
    """What is known first, from the start of the threads on."""
    assert housekeeping.disk_bytes() is None
    housekeeping.start()
    try:
        deadline = time.monotonic() + 60
        while (found := housekeeping.disk_bytes()) is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return found
    finally:
        housekeeping.close()


class SlowIndex(RunIndex):
    """Finds its runs late: gives whoever does not wait for them the time to look."""

    looked_at = Event()

    def refresh(self) -> None:
        self.looked_at.wait(0.5)
        super().refresh()

    def rows(self) -> list[RunRow]:
        self.looked_at.set()
        return super().rows()


def test_it_ends_while_it_measures(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage is slow, and there are many folders: the end comes after one of them."""
    for number in range(300):
        (make := tmp_path / "runs" / "a" / "checkpoints" / str(number)).mkdir(parents=True)
        (make / "weights").touch()
    make_run(tmp_path / "runs" / "b", 10)
    for name in folders.MARKS:
        (tmp_path / "runs" / "a" / name).write_text("{}\n")
    store.set_limits(Limits(disk_bytes=1))
    housekeeping = Housekeeping(store, RunIndex(tmp_path / "runs"), Curves(), tmp_path)
    monkeypatch.setattr(housekeeping_module, "_END_SECONDS", 12.0)
    measured, scandir = Event(), os.scandir

    def slow(folder: str) -> "os._ScandirIterator[str]":
        if "checkpoints" in str(folder):
            measured.set()
            time.sleep(0.05)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", slow)
    housekeeping.start()
    assert measured.wait(30)
    began = time.monotonic()
    housekeeping.close()
    assert time.monotonic() - began < 8
    assert not any(thread.is_alive() for thread in housekeeping._threads)
    assert housekeeping.disk_bytes() is None  # not the half of it


def test_storage_that_stands_still_does_not_keep_it_from_ending(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping_module, "_END_SECONDS", 0.1)
    stands, go_on = Event(), Event()

    class Still(RunIndex):
        def refresh(self) -> None:
            stands.set()
            go_on.wait(30)

    housekeeping = Housekeeping(store, Still(tmp_path), Curves(), tmp_path)
    housekeeping.start()
    assert stands.wait(30)
    began = time.monotonic()
    housekeeping.close()
    assert time.monotonic() - began < 5
    go_on.set()


def test_runs_count_for_those_who_submitted_them(store: Store, tmp_path: Path) -> None:
    """All folders belong to the service's user."""
    runs = tmp_path / "runs"
    ann = make_run(runs / "a-1", 100_000) + make_run(runs / "sweep-2" / "2", 50_000)
    ben = make_run(runs / "b-3", 30_000)
    mine = make_run(runs / "by-hand", 10_000)
    for owner, name in (("ann", "a-1"), ("ann", "sweep-2/2"), ("ben", "b-3"), ("ben", "has-not-begun")):
        store.add_jobs([NewJob("x", owner, 1e9, Needs(1, 1), str(runs / name), "/", ())])
    store.set_limits(Limits(disk_bytes=1))
    found = first_measured(Housekeeping(store, SlowIndex(runs), Curves(), tmp_path))
    assert found == {"ann": ann, "ben": ben, user_name(os.geteuid()): mine}
