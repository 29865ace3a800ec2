"""Building a folder once: among threads (flock tells open files apart, not processes) and after a kill."""

import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hvd_transformer.data import build_once as build_once_module
from hvd_transformer.data.build_once import PROGRESS, Stopped, build_once
from hvd_transformer.errors import UserError


def load(folder: Path) -> str | None:
    try:
        return (folder / "content").read_text() or None
    except FileNotFoundError:
        return None


def test_only_one_of_several_builds(tmp_path):
    built = []

    def build(aside):
        built.append(threading.get_ident())
        time.sleep(0.3)
        (aside / "content").write_text("whole")

    with ThreadPoolExecutor(4) as threads:
        results = [threads.submit(build_once, tmp_path / "x", load, build) for _ in range(4)]
        assert [result.result(10) for result in results] == ["whole"] * 4
    assert len(built) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "x.lock"]


def test_those_that_wait_get_the_builders_error(tmp_path):
    attempts = []

    def build(aside):
        attempts.append(1)
        time.sleep(0.5)
        raise UserError("text.txt: is wrong")

    with ThreadPoolExecutor(3) as threads:
        results = [threads.submit(build_once, tmp_path / "x", load, build) for _ in range(3)]
        for result in results:
            with pytest.raises(UserError, match="^text.txt: is wrong$"):
                result.result(10)
    assert len(attempts) == 1
    # One that comes later tries again: the user may have put it right.
    assert build_once(tmp_path / "x", load, lambda aside: (aside / "content").write_text("a") and None) == "a"


def test_a_damaged_folder_is_replaced(tmp_path):
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / "content").write_text("")
    assert build_once(folder, load, lambda aside: (aside / "content").write_text("new") and None) == "new"


def test_a_kill_while_a_damaged_folder_is_removed_does_no_harm(tmp_path):
    """What was done so far is kept, and with it what is left of the damaged folder."""
    aside = tmp_path / ".x.tmp"
    (aside / "damaged" / "part").mkdir(parents=True)
    (aside / PROGRESS).write_text("{}")
    assert build_once(tmp_path / "x", load, lambda aside: (aside / "content").write_text("new") and None) == "new"
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["content"]


def test_waiting_stops_when_asked(tmp_path):
    release = threading.Event()

    def build(aside):
        release.wait(10)
        (aside / "content").write_text("whole")

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(build_once, tmp_path / "x", load, build)
        time.sleep(0.1)
        started = time.monotonic()
        with pytest.raises(Stopped):
            build_once(tmp_path / "x", load, build, lambda: time.monotonic() - started > 0.3)
        assert time.monotonic() - started < 2
        release.set()
        assert first.result(10) == "whole"


def test_after_a_kill_the_next_builds_and_cleans(tmp_path):
    script = f"""
import time
from pathlib import Path
from hvd_transformer.data.build_once import build_once
def build(aside):
    (aside / "content").write_text("half")
    print("building", flush=True)
    time.sleep(60)
build_once(Path({str(tmp_path / "x")!r}), lambda folder: None, build)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "building\n"
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "x").exists()
    assert (tmp_path / ".x.tmp" / "content").exists()
    assert build_once(tmp_path / "x", load, lambda aside: (aside / "content").write_text("a") and None) == "a"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "x.lock"]


@pytest.fixture
def kernel_locks_of_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that keeps the locks of the kernel to each host: none of them is seen."""
    monkeypatch.setattr(build_once_module, "_try_lock", lambda file: True)


@pytest.mark.usefixtures("kernel_locks_of_other_hosts")
def test_only_one_of_several_hosts_builds(tmp_path: Path) -> None:
    built = []

    def build(aside: Path) -> None:
        built.append(aside)
        for number in range(8):
            with (aside / "content").open("a") as file:
                file.write(str(number))
            time.sleep(0.1)

    with ThreadPoolExecutor(3) as threads:
        results = [threads.submit(build_once, tmp_path / "x", load, build) for _ in range(3)]
        assert [result.result(20) for result in results] == ["01234567"] * 3
    assert len(built) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "x.lock"]


@pytest.mark.usefixtures("kernel_locks_of_other_hosts")
def test_other_hosts_get_the_builders_error(tmp_path: Path) -> None:
    attempts, begun = [], threading.Event()

    def build(aside: Path) -> None:
        attempts.append(1)
        begun.set()
        time.sleep(0.7)
        raise UserError("text.txt: is wrong")

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(build_once, tmp_path / "x", load, build)
        assert begun.wait(10)
        for result in (threads.submit(build_once, tmp_path / "x", load, build), first):
            with pytest.raises(UserError, match="^text.txt: is wrong$"):
                result.result(20)
    assert len(attempts) == 1


@pytest.mark.parametrize("vanished", [False, True])
def test_a_builder_that_another_host_has_replaced_leaves_its_work_alone(tmp_path: Path, vanished: bool) -> None:
    """It was suspended for so long that the other took it for dead."""

    def build(aside: Path) -> None:
        (aside / "content").write_text("of the other")
        (tmp_path / ".x.builder").unlink()
        (tmp_path / ".x.builder").write_text("the other")
        if vanished:
            (aside / "gone").read_text()

    with pytest.raises(UserError, match="/x: prepared by another host at the same time; start again"):
        build_once(tmp_path / "x", load, build)
    assert (tmp_path / ".x.tmp" / "content").exists() and (tmp_path / ".x.builder").exists()
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("kind", ["loop", "long"])
def test_a_cache_that_cannot_be_is_one_line(tmp_path: Path, kind: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    folder = tmp_path / {"loop": "loop", "long": "n" * 300}[kind] / "x"
    message = {"loop": "loop of symbolic links|Too many levels", "long": "File name too long; data.cache_dir must be"}
    with pytest.raises(UserError, match=message[kind]):
        build_once(folder, load, lambda aside: None)


def test_a_cache_that_is_no_folder_is_the_users_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"/file.*: Not a directory; data.cache_dir must be a writable folder"):
        build_once(tmp_path / "file" / "x", load, lambda aside: None)
