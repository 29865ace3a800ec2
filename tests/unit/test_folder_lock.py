"""One owner at a time has a folder: real processes that end, are killed and stopped, and owners on other hosts."""

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hvd_transformer import folder_lock
from hvd_transformer.errors import UserError
from hvd_transformer.folder_lock import FolderLock

OWNER = """
import sys, time
from pathlib import Path
from hvd_transformer import folder_lock
folder_lock.RENEW_SECONDS = 0.05
lock = folder_lock.FolderLock(Path(sys.argv[1]), "a job")
lock.take()
print("has it", flush=True)
while not lock.lost:
    time.sleep(0.02)
print("lost it", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("RENEW_SECONDS", 0.05), ("LEFT_OVER_SECONDS", 1.0), ("END_SECONDS", 0.3)):
        monkeypatch.setattr(folder_lock, name, seconds)
    monkeypatch.setattr(folder_lock, "_LOOK_SECONDS", 0.02)


@contextmanager
def another_process(file: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has the lock."""
    words = [sys.executable, "-c", OWNER, file]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "has it\n"
            yield process
        finally:
            process.kill()


def on_another_host(file: Path) -> None:
    """What the lock of a process on another host looks like from here."""
    owner = json.loads(file.read_bytes())
    file.unlink()
    file.write_text(json.dumps({**owner, "host": "h7", "processes": "another kernel"}))


def test_one_after_the_other(tmp_path: Path) -> None:
    for _ in range(3):
        lock = FolderLock(tmp_path / ".lock", "a job")
        lock.take(pytest.fail)
        assert not lock.lost
        lock.release()
        assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_release_waits_for_a_renewal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow file system: the number of the closed file may soon be another file's."""
    renews, in_place = threading.Event(), FolderLock._in_place

    def slow(lock: FolderLock) -> bool:
        found = in_place(lock)
        if threading.current_thread() is not threading.main_thread():
            renews.set()
            time.sleep(0.1)
        return found

    monkeypatch.setattr(FolderLock, "_in_place", slow)
    lock = FolderLock(tmp_path / ".lock", "a job")
    before = threading.enumerate()
    lock.take()
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "folder lock" and thread not in before)
    assert renews.wait(10)
    lock.release()
    thread.join(10)


def test_an_owner_that_lives_is_named(tmp_path: Path) -> None:
    file, said = tmp_path / ".lock", list[str]()
    with another_process(file) as process:
        with pytest.raises(UserError) as raised:
            FolderLock(file, "a job").take(said.append)
        host = os.uname().nodename
        assert str(raised.value).startswith(
            f"{tmp_path}: in use by a job on host {host} (process {process.pid}, since 2"
        )
        assert said[0].startswith(f"{tmp_path}: was in use by a job on host {host} (process {process.pid}, since 2")
        assert len(said) == 1
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_killed_owner_is_followed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "LEFT_OVER_SECONDS", 1000.0)
    file = tmp_path / ".lock"
    with another_process(file) as process:
        process.kill()
        process.wait()
        lock = FolderLock(file, "a job")
        lock.take(pytest.fail)
        assert not lock.lost
        lock.release()


def test_a_number_of_a_process_that_is_used_again_is_another_process(tmp_path: Path) -> None:
    file = tmp_path / ".lock"
    with another_process(file):
        owner = json.loads(file.read_bytes())
    file.write_text(json.dumps({**owner, "pid": os.getpid()}))
    lock = FolderLock(file, "a job")
    lock.take(pytest.fail)
    assert json.loads(file.read_bytes())["token"] != owner["token"] and not lock.lost


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, which may become another user")
@pytest.mark.parametrize("how", ["hidepid=2", "hidepid=1"])
def test_a_process_that_proc_does_not_show_to_this_user_may_live(how: str, tmp_path: Path) -> None:
    file, look = tmp_path / ".lock", tmp_path / "look.py"
    look.write_text(
        "import codecs, os, sys\nfrom pathlib import Path\nfrom hvd_transformer.folder_lock import _Watch\n"
        "codecs.lookup('ascii')  # while Python may be read\n"
        "os.setgroups([])\nos.setgid(65534)\nos.setuid(65534)\n"
        "print(_Watch.of(Path(sys.argv[1]), None)._process_lives())\n"
    )
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == "root" and not folder.stat().st_mode & stat.S_IXOTH:
            folder.chmod(0o755)
    words = [sys.executable, str(look), str(file)]
    hiding = ["unshare", "--mount", "sh", "-c", f'mount -t proc -o {how} proc /proc && exec "$@"', "sh"]

    if subprocess.run([*hiding, "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("needs the right to mount")

    def seen(*before: str) -> str:
        return subprocess.run([*before, *words], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()

    with another_process(file) as owner:
        file.chmod(0o644)
        assert (seen(), seen(*hiding)) == ("True", "None")
        owner.kill()
        owner.wait()
        assert (seen(), seen(*hiding)) == ("False", "False")


def test_of_an_owner_on_another_host_only_its_renewals_tell(tmp_path: Path) -> None:
    file = tmp_path / ".lock"
    gone = FolderLock(file, "a job")
    gone.take()
    on_another_host(file)
    began, said = time.monotonic(), list[str]()
    lock = FolderLock(file, "a job")
    lock.take(said.append)
    assert time.monotonic() - began > 1.0
    assert said == [
        f"{tmp_path}: was in use by a job on host h7 (process {os.getpid()}, since {gone._owner['since']}); "
        "waiting for its end"
    ]
    assert gone.lost
    assert not lock.lost

    on_another_host(file)
    ended = threading.Event()

    def renew() -> None:
        for count in range(1000):
            if ended.wait(0.02):
                return
            file.write_text(json.dumps({**json.loads(file.read_bytes()), "renewals": count}))

    renewing = threading.Thread(target=renew)
    renewing.start()
    with pytest.raises(UserError, match="in use by a job on host h7"):
        FolderLock(file, "a job").take()
    ended.set()
    renewing.join()


def test_an_earlier_start_of_the_same_job_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / ".lock"
    monkeypatch.setenv(folder_lock.START, "first")
    earlier = FolderLock(file, "a job")
    earlier.take()
    on_another_host(file)
    monkeypatch.setenv(folder_lock.START, "third")
    monkeypatch.setenv(folder_lock.ENDED_STARTS, "first second")
    lock = FolderLock(file, "a job")
    lock.take(pytest.fail)
    assert earlier.lost and not lock.lost


def test_a_rank_of_the_same_job_that_is_cut_off_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host ends it later than the job starts again, and it renews its lock until then."""
    file = tmp_path / ".lock"
    monkeypatch.setenv(folder_lock.START, "job.1")
    FolderLock(file, "a job").take()
    on_another_host(file)
    monkeypatch.setenv(folder_lock.START, "job.2")
    lasting = 5 * folder_lock.END_SECONDS
    end = time.monotonic() + lasting

    def renew() -> None:
        count = 0
        while time.monotonic() < end:
            time.sleep(0.02)
            count += 1
            file.write_text(json.dumps({**json.loads(file.read_bytes()), "renewals": count}))

    renewing = threading.Thread(target=renew)
    renewing.start()
    FolderLock(file, "a job").take()
    assert time.monotonic() > end
    renewing.join()


def test_who_was_stopped_for_long_has_lost_the_folder_and_leaves_it_alone(tmp_path: Path) -> None:
    file = tmp_path / ".lock"
    with another_process(file) as process:
        process.send_signal(signal.SIGSTOP)
        on_another_host(file)
        lock = FolderLock(file, "a job")
        lock.take()
        process.send_signal(signal.SIGCONT)
        assert process.stdout
        assert process.stdout.readline() == "lost it\n"
        time.sleep(0.2)
        assert not lock.lost


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"processes": 7}'])
def test_a_truncated_lock_is_left_over_after_a_while(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / ".lock"
    file.write_bytes(content)
    lock = FolderLock(file, "a job")
    lock.take()
    assert not lock.lost


def test_of_many_that_find_it_left_over_one_takes_it(tmp_path: Path) -> None:
    file = tmp_path / ".lock"
    for _ in range(5):
        with another_process(file) as process:
            process.kill()
        locks = [FolderLock(file, "a job") for _ in range(8)]
        taken: list[FolderLock] = []

        def take(lock: FolderLock, taken: list[FolderLock] = taken) -> None:
            try:
                lock.take()
            except UserError:
                return
            taken.append(lock)

        threads = [threading.Thread(target=take, args=(lock,)) for lock in locks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(taken) == 1
        assert not taken[0].lost
        taken[0].release()
        assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FolderLock(tmp_path / "gone" / ".lock", "a job").take()


@pytest.mark.parametrize("target", ["file", "nothing"])
def test_a_link_is_no_lock(tmp_path: Path, target: str) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "lock").symlink_to(tmp_path / target)
    with pytest.raises(UserError, match="lock: is a symbolic link; remove it$"):
        FolderLock(tmp_path / "lock", "a job").take()
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["file", "lock"]
    assert (tmp_path / "file").read_text() == "precious"


def test_what_a_lock_tells_leads_to_no_other_folder(tmp_path: Path) -> None:
    folder, file = tmp_path / "run", tmp_path / "run" / "lock"
    folder.mkdir()
    with another_process(file):
        owner = json.loads(file.read_bytes())
    file.write_text(json.dumps({**owner, "token": "/../../made"}))
    lock = FolderLock(file, "a job")
    lock.take()
    lock.release()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
