"""Whether a run is at work, from what its processes leave."""

import os
from pathlib import Path

import pytest
from made_runs import foreign_lock, left_over_lock

from hvd_transformer.folder_lock import FolderLock
from hvd_transformer.service.runs import status as module
from hvd_transformer.service.runs.status import Ended, LockWatch, RunStatus, lock_owner


class _Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    made = _Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def test_a_lock_of_this_host_is_held_as_long_as_its_process_lives(tmp_path: Path) -> None:
    watch = LockWatch(tmp_path / ".lock")
    assert watch.state() is None
    lock = FolderLock(tmp_path / ".lock", "hvd-train")
    lock.take()
    assert watch.state() is RunStatus.RUNNING
    lock.release()
    assert watch.state() is None
    left_over_lock(tmp_path / ".lock")
    assert watch.state() is None


def test_a_lock_of_another_host_is_held_as_long_as_it_is_renewed(tmp_path: Path, clock: _Clock) -> None:
    path = tmp_path / ".lock"
    foreign_lock(path)
    os.utime(path, (clock.now - 3600, clock.now - 3600))
    watch = LockWatch(path)
    assert watch.state() is RunStatus.UNKNOWN
    clock.now += 5
    os.utime(path, (clock.now - 3600, clock.now - 3600))  # renewed, by a clock that is slow
    assert watch.state() is RunStatus.RUNNING
    clock.now += 19
    assert watch.state() is RunStatus.RUNNING
    clock.now += 2
    assert watch.state() is None


def test_an_old_lock_of_another_host_does_not_look_at_work_for_ever(tmp_path: Path, clock: _Clock) -> None:
    path = tmp_path / ".lock"
    foreign_lock(path)
    os.utime(path, (clock.now - 3600, clock.now - 3600))
    watch = LockWatch(path)
    assert watch.state() is RunStatus.UNKNOWN
    clock.now += 21
    assert watch.state() is None
    clock.now += 1000
    assert watch.state() is None
    os.utime(path, (clock.now, clock.now))
    assert watch.state() is RunStatus.RUNNING


def test_a_new_lock_of_another_host_is_held(tmp_path: Path, clock: _Clock) -> None:
    foreign_lock(tmp_path / ".lock")
    os.utime(tmp_path / ".lock", (clock.now - 3, clock.now - 3))
    assert LockWatch(tmp_path / ".lock").state() is RunStatus.RUNNING


def test_hostile_locks_are_nobody_s(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    (tmp_path / "large").write_bytes(b" " * 100_000)
    for name in ("pipe", "link", "large", "missing"):
        assert lock_owner(tmp_path / name) is None


@pytest.mark.parametrize(
    ("summary", "record", "status"),
    [
        ({}, {}, RunStatus.FAILED),
        ({"status": "finished"}, {}, RunStatus.FINISHED),
        ({"status": "finished"}, {"code": 0, "cause": ""}, RunStatus.FINISHED),
        ({"status": "stopped"}, {}, RunStatus.STOPPED),
        ({}, {"code": 1, "cause": "it was asked to stop"}, RunStatus.STOPPED),
        ({}, {"code": 75, "cause": "rank 1 stalled"}, RunStatus.FAILED),
        ({"status": 3}, {"code": "x", "cause": None}, RunStatus.FAILED),
    ],
)
def test_how_a_run_ended(summary: dict[str, object], record: dict[str, object], status: RunStatus) -> None:
    assert Ended(summary, record).status() is status
