"""Heartbeats from a launcher, by its real server."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from made_runs import foreign_lock, left_over_lock
from waiting import wait_until

from hvd_transformer.folder_lock import FolderLock
from hvd_transformer.launch.output.launch_server import LaunchServer
from hvd_transformer.service.runs import launcher_beats as module
from hvd_transformer.service.runs.launcher_beats import LauncherBeats


@pytest.fixture
def beats() -> Iterator[LauncherBeats]:
    made = LauncherBeats()
    yield made
    made.close()


class _Launcher:
    """Publishes heartbeats as often as asked."""

    def __init__(self, run: Path) -> None:
        self.asked: list[str] = []
        self.server = LaunchServer(self.asked.append)
        self.lock = FolderLock(run / ".launcher", "a launcher", socket=self.server.name)
        self.lock.take()

    def look(self, *seen: dict[str, Any]) -> None:
        self.server.publish("look", beats=list(seen))

    def close(self) -> None:
        self.lock.release()
        self.server.close(0)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[_Launcher]:
    made = _Launcher(tmp_path)
    yield made
    made.close()


def _repeat(launcher: _Launcher, *seen: dict[str, Any]) -> Callable[[], None]:
    """Publish until the returned function is called: a client that is not connected yet is told nothing."""
    end = threading.Event()

    def publish() -> None:
        while not end.wait(0.01):
            launcher.look(*seen)

    thread = threading.Thread(target=publish, daemon=True)
    thread.start()

    def stop() -> None:
        end.set()
        thread.join()

    return stop


def test_heartbeats_of_a_launched_run(tmp_path: Path, launcher: _Launcher, beats: LauncherBeats) -> None:
    stop = _repeat(launcher, {"rank": 0, "age": 1.5}, {"rank": 1, "age": 0.5})
    found = beats.of(tmp_path, wait=30)
    stop()
    assert [beat.beat["rank"] for beat in found] == [0, 1]
    assert 1.5 <= found[0].age < 10
    assert found[0].age - found[1].age == pytest.approx(1.0)
    wait_until(lambda: beats.of(tmp_path)[0].age > found[0].age)  # nothing new is told: it becomes older
    assert launcher.asked == []


def test_heartbeats_of_an_earlier_start_are_forgotten(
    tmp_path: Path, launcher: _Launcher, beats: LauncherBeats
) -> None:
    stop = _repeat(launcher, {"rank": 0, "age": 0.0})
    assert beats.of(tmp_path, wait=30)
    stop()
    launcher.server.publish("start", hosts=[["h1", 1]], restart="restart 1 of 3")
    while beats.of(tmp_path, wait=0):
        time.sleep(0.001)


@pytest.mark.parametrize("lock", ["none", "foreign", "left over"])
def test_without_a_launcher_here_there_are_none(tmp_path: Path, beats: LauncherBeats, lock: str) -> None:
    if lock == "foreign":
        foreign_lock(tmp_path / ".launcher")
    elif lock == "left over":
        left_over_lock(tmp_path / ".launcher")
    assert beats.of(tmp_path, wait=0) == []


def test_the_end_of_a_launcher_is_noticed(tmp_path: Path, beats: LauncherBeats) -> None:
    launcher = _Launcher(tmp_path)
    stop = _repeat(launcher, {"rank": 0, "age": 0.0})
    assert beats.of(tmp_path, wait=30)
    stop()
    launcher.close()
    while not beats._connections[tmp_path].closed:
        time.sleep(0.001)
    assert beats.of(tmp_path, wait=0) == []
    again = _Launcher(tmp_path)
    stop = _repeat(again, {"rank": 7, "age": 0.0})
    assert [beat.beat["rank"] for beat in beats.of(tmp_path, wait=30)] == [7]
    stop()
    again.close()


def test_a_connection_that_nobody_asks_is_closed(
    tmp_path: Path, launcher: _Launcher, beats: LauncherBeats, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_IDLE_SECONDS", 0.05)
    stop = _repeat(launcher, {"rank": 0, "age": 0.0})
    beats.of(tmp_path, wait=30)
    connection = beats._connections[tmp_path]
    while not connection.closed:
        time.sleep(0.001)
    stop()


def test_rubbish_from_a_launcher_does_no_harm(tmp_path: Path, launcher: _Launcher, beats: LauncherBeats) -> None:
    stop = _repeat(launcher, {"no": "rank"})
    assert beats.of(tmp_path, wait=30) == []
    stop()
