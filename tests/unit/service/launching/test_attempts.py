"""Launchers are started once, watched, adopted and stopped, whenever the service is killed: with a stub launcher."""

import errno
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from hvd_transformer.folder_lock import LEFT_OVER_SECONDS
from hvd_transformer.launch.host_pool import from_script
from hvd_transformer.launch.hostfile import Host, read_hostfile
from hvd_transformer.service.jobs import Attempt, Job, Needs, Placement, State
from hvd_transformer.service.launching import attempts, orphans
from hvd_transformer.service.launching.attempts import Change, Launchers
from hvd_transformer.service.outcome import Exit, not_started
from hvd_transformer.service.submitting import not_now

# Does what its words after -- say, in order. Leaves a line of its own for every time that it was started.
STUB = """
import json, os, signal, sys, time
with open("starts", "a") as file:
    file.write(json.dumps({"words": sys.argv[1:], "environment": dict(os.environ), "session": os.getsid(0)}) + "\\n")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
for word in sys.argv[sys.argv.index("--") + 1 :]:
    what, _, value = word.partition("=")
    if what == "print":
        print(value, flush=True)
    elif what == "begin":
        os.write(int(os.environ["HVD_TRANSFORMER_BEGUN"]), b"!")
    elif what == "wait":
        while not os.path.exists(value):
            time.sleep(0.01)
    elif what == "tell":
        with open(os.environ["HVD_TRANSFORMER_EXIT_FILE"] + ".new", "w") as file:
            file.write(value)
        os.rename(file.name, os.environ["HVD_TRANSFORMER_EXIT_FILE"])
    elif what == "exit":
        sys.exit(int(value))
    elif what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
"""
TOLD = {"code": 3, "cause": "rank 1 failed", "restarts": 0, "step": 7, "hosts": ["h1"], "refused": {}, "lost": ["h2"]}
HOSTS = (Placement("h1", 2, (4, 5)), Placement("h2", 1))


@pytest.fixture
def stub(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "stub.py").write_text(STUB)
    return (sys.executable, "-S", "-E", str(tmp_path / "stub.py"))


@pytest.fixture
def launchers(tmp_path: Path, stub: tuple[str, ...]) -> Iterator[Launchers]:
    made = Launchers(tmp_path / "state", stub)
    yield made
    for pid in made.pids():
        os.kill(pid, signal.SIGKILL)
    made.close()


def job(folder: Path, *words: str, number: int = 1, **more: Any) -> Job:
    needs = more.pop("needs", Needs(3, 3))
    run = str(folder / "runs" / str(number))
    return Job(number, "x", "me", State.STARTING, 0, 0.0, needs, run, str(folder), words, **more)


def attempt(of: Job, number: int = 1) -> Attempt:
    return Attempt(of.id, number, HOSTS, 0.0)


def start(launchers: Launchers, of: Job, number: int = 1, **environment: str) -> None:
    launchers.start(of, attempt(of, number), environment)


def changes(launchers: Launchers, count: int) -> list[Change]:
    """The next so many changes."""
    found: list[Change] = []
    deadline = time.monotonic() + 30
    while len(found) < count:
        assert time.monotonic() < deadline, found
        launchers.wait(5)
        found += launchers.poll()
    return found


def starts(folder: Path) -> list[dict[str, Any]]:
    file = folder / "starts"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_it_begins_and_ends_and_tells_how(tmp_path: Path, launchers: Launchers) -> None:
    of = job(tmp_path, "begin", "wait=go", f"tell={json.dumps(TOLD)}", "exit=3")
    start(launchers, of)
    assert changes(launchers, 1) == [Change(1, 1)]
    assert list(launchers.poll()) == []
    (pid,) = launchers.pids()
    (tmp_path / "go").touch()
    assert changes(launchers, 1) == [Change(1, 1, Exit(3, "rank 1 failed", 7, {}, ("h2",)))]
    assert list(launchers.poll()) == []
    assert launchers.pids() == frozenset()
    with pytest.raises(ChildProcessError):  # no zombie is left
        os.waitpid(pid, os.WNOHANG)


def test_a_change_that_cannot_be_settled_is_told_again(tmp_path: Path, launchers: Launchers) -> None:
    """As long as the disk of the database is full."""
    start(launchers, job(tmp_path, "begin", f"tell={json.dumps(TOLD)}"))
    start(launchers, job(tmp_path, "exit=4", number=2))
    wait_until(lambda: not any(found.files.is_held() for found in launchers._launchers.values()))
    settled: list[Change] = []
    for room in (0, 1, 1, 0, 5):
        with suppress(OSError):
            for change in launchers.poll():
                if not room:
                    raise OSError
                settled.append(change)
                room -= 1
    exit = Exit(3, "rank 1 failed", 7, {}, ("h2",))
    assert settled == [Change(1, 1), Change(1, 1, exit), Change(2, 1, Exit(4, ""))]
    assert list(launchers.poll()) == []


def test_its_command_line_hosts_and_environment(
    tmp_path: Path, launchers: Launchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_SERVICE", "1")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    of = job(tmp_path, "print=x", launch=("--restarts", "2"))
    start(launchers, of, OMP_NUM_THREADS="3", OF_THE_SERVICE="2")
    changes(launchers, 1)
    [started] = starts(tmp_path)
    spool = tmp_path / "state" / "jobs" / "1"
    assert started["words"] == [
        "launch", "--detach", "-np", "3", "--hostfile", str(spool / "hosts"), "--restarts", "2", "--", "print=x",
    ]  # fmt: skip
    assert read_hostfile(spool / "hosts") == [Host("h1", 2, (4, 5)), Host("h2", 1)]
    environment = started["environment"]
    assert (environment["OMP_NUM_THREADS"], environment["OF_THE_SERVICE"]) == ("3", "1")
    assert environment["HVD_TRANSFORMER_EXIT_FILE"] == str(spool / "1.exit")
    assert environment["HVD_TRANSFORMER_JOB"] == f"1-{of.submitted * 1e6:.0f}"
    assert started["session"] not in (os.getsid(0), 0)
    assert spool.stat().st_mode & 0o777 == 0o700
    assert (spool / "1.out").read_text() == "x\n"


def test_an_elastic_job_finds_its_hosts_by_a_script_and_grows(tmp_path: Path, launchers: Launchers) -> None:
    of = job(tmp_path, needs=Needs(4, 2))
    start(launchers, of)
    changes(launchers, 1)
    words = starts(tmp_path)[0]["words"]
    script = tmp_path / "state" / "jobs" / "1" / "discover"
    assert words[:8] == ["launch", "--detach", "-np", "4", "--min-np", "2", "--host-discovery-script", str(script)]
    find = from_script(script, os.environ)
    assert find() == [Host("h1", 2, (4, 5)), Host("h2", 1)]
    launchers.write_hosts(of, (*HOSTS, Placement("h3", 1)))
    assert find() == [Host("h1", 2, (4, 5)), Host("h2", 1), Host("h3", 1)]


@pytest.mark.parametrize(
    ("words", "exit"),
    [
        (["print=Usage: …", "print=Error: no such option", "print=", "exit=2"], Exit(2, "Error: no such option")),
        (["exit=0"], Exit(0, "")),
        (['tell={"code": 3}', "exit=4"], Exit(4, "")),
        (["begin", "tell=nonsense", "exit=5"], Exit(5, "")),
    ],
)
def test_one_that_could_not_tell_how_it_ended_has_its_exit_code(
    tmp_path: Path, launchers: Launchers, words: list[str], exit: Exit
) -> None:
    start(launchers, job(tmp_path, *words))
    assert changes(launchers, 1 + ("begin" in words))[-1] == Change(1, 1, exit)


def test_a_program_that_is_not_there_ends_the_attempt(tmp_path: Path) -> None:
    launchers = Launchers(tmp_path / "state", ["/no/such/python"])
    start(launchers, job(tmp_path))
    [change] = changes(launchers, 1)
    assert change.exit is not None and change.exit.code == 127
    assert "/no/such/python" in change.exit.cause
    launchers.close()


def test_no_attempt_is_started_twice(tmp_path: Path, launchers: Launchers, stub: tuple[str, ...]) -> None:
    of = job(tmp_path, "begin", "wait=go", "exit=0")
    start(launchers, of)
    changes(launchers, 1)
    for again in (launchers, Launchers(tmp_path / "state", stub)):
        with pytest.raises(FileExistsError):
            start(again, of)
    (tmp_path / "go").touch()
    assert changes(launchers, 1) == [Change(1, 1, Exit(0, ""))]
    with pytest.raises(FileExistsError):
        start(launchers, of)
    assert len(starts(tmp_path)) == 1
    start(launchers, of, number=2)
    assert [change.attempt for change in changes(launchers, 2)] == [2, 2]


def test_a_start_that_is_not_possible_is_refused(tmp_path: Path, launchers: Launchers) -> None:
    (tmp_path / "file").touch(0o600)
    jobs = [
        job(tmp_path / "file"),
        job(tmp_path, env_names=["TOKEN"], env_file=str(tmp_path / "file"), number=2),
        job(tmp_path, code="0123", number=3),
    ]
    found = [launchers.start(of, attempt(of), {}) for of in jobs]
    assert [exit and exit.code for exit in found] == [2, 2, 2]
    for exit, line in zip(
        found,
        (
            "file: Not a directory; the job starts in this folder",
            f"--env TOKEN: not in {tmp_path / 'file'}",
            "the snapshot of the job's code is missing; submit the job again",
        ),
        strict=True,
    ):
        assert exit and exit.cause.endswith(line)
    assert [launchers.why_not_now(of) for of in jobs] == [None] * 3
    assert list(launchers.poll()) == [] and starts(tmp_path) == []
    for number in (1, 2, 3):  # as a later service sees them
        of = job(tmp_path, number=number)
        assert launchers.adopt(of, attempt(of)) == not_started("the service ended")


def test_a_folder_or_a_private_file_that_is_away_is_waited_for(tmp_path: Path, launchers: Launchers) -> None:
    folder, secret = tmp_path / "project", tmp_path / "mounted" / "secret"
    jobs = [job(folder, "begin"), job(tmp_path, "begin", env_names=["TOKEN"], env_file=str(secret), number=2)]
    expected = [
        not_started(f"{folder}: No such file or directory; the job starts in this folder"),
        not_started(f"--env-file {secret}: cannot be read: No such file or directory"),
    ]
    assert [launchers.start(of, attempt(of), {}) for of in jobs] == expected
    assert [launchers.why_not_now(of) for of in jobs] == [exit.cause for exit in expected]
    assert starts(tmp_path) == []
    folder.mkdir()
    secret.parent.mkdir()
    secret.write_text("TOKEN=1")
    secret.chmod(0o600)
    assert [launchers.why_not_now(of) for of in jobs] == [None, None]
    assert [launchers.start(of, attempt(of, 2), {}) for of in jobs] == [None, None]
    changes(launchers, 4)


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOTCONN, errno.ESTALE, errno.EIO, errno.EHOSTDOWN])
def test_whatever_a_file_system_says_that_is_away_the_job_is_not_to_blame(
    tmp_path: Path, launchers: Launchers, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    of, stat = job(tmp_path), os.stat

    def away(path: Any, *more: Any, **named: Any) -> os.stat_result:
        if str(path) == f"{tmp_path}/.":
            raise OSError(code, os.strerror(code), path)
        return stat(path, *more, **named)

    monkeypatch.setattr(os, "stat", away)
    ended = launchers.start(of, attempt(of), {})
    assert ended == not_started(f"{tmp_path}: {os.strerror(code)}; the job starts in this folder")


def test_a_run_directory_that_cannot_be_written_now_is_waited_for(
    tmp_path: Path, launchers: Launchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, mkdir = job(tmp_path), Path.mkdir

    def read_only(self: Path, *more: Any, **named: Any) -> None:
        if self == Path(of.output_dir):
            raise OSError(errno.EROFS, "Read-only file system", str(self))
        mkdir(self, *more, **named)

    monkeypatch.setattr(Path, "mkdir", read_only)
    expected = not_started(f"{tmp_path / 'runs'}: Read-only file system; the run directory is made there")
    assert launchers.start(of, attempt(of), {}) == expected
    assert launchers.why_not_now(of) == expected.cause
    monkeypatch.undo()
    assert launchers.why_not_now(of) is None


@pytest.mark.parametrize("which", ["folder", "run", "env_file"])
def test_a_folder_that_never_answers_keeps_no_other_job_from_its_start(
    tmp_path: Path, launchers: Launchers, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    hung, go, looks = tmp_path / "hung", threading.Event(), list[str]()
    hung.mkdir()
    of = job(tmp_path, number=1)
    if which == "folder":
        of = replace(of, folder=str(hung))
    elif which == "run":
        of = replace(of, output_dir=str(hung / "1"))
    else:
        of = replace(of, env_names=("A",), env_file=str(hung / "values"))

    def hang(do: Callable[..., Any], path: Any, *more: Any, **named: Any) -> Any:
        if str(path).startswith(str(hung)) and not go.is_set():
            looks.append(str(path))
            go.wait(60)
        return do(path, *more, **named)

    monkeypatch.setattr(not_now, "_ANSWER_SECONDS", 2.0)
    monkeypatch.setattr(not_now, "_ANSWER_SECONDS_MEANWHILE", 20.0)
    for name in ("stat", "lstat", "open"):
        monkeypatch.setattr(os, name, partial(hang, getattr(os, name)))
    expected = not_started(f"{hung}: does not answer")
    try:
        assert launchers.start(of, attempt(of), {}) == expected
        assert launchers.why_not_now(of) == expected.cause
        start(launchers, job(tmp_path, "exit=4", number=2))
        assert changes(launchers, 1) == [Change(2, 1, Exit(4, ""))]
        assert len(looks) == 1
    finally:
        go.set()


@pytest.mark.parametrize("name", ["hosts", "begun", "out"])
def test_with_a_full_disk_nothing_is_started_and_the_job_is_not_to_blame(
    tmp_path: Path, launchers: Launchers, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    real_open, real_replace = os.open, Path.replace

    def open_file(path: object, *more: Any, **named: Any) -> int:
        if str(path).endswith(f".{name}"):
            raise full
        return real_open(path, *more, **named)  # type: ignore[arg-type]

    def replace(self: Path, target: Path) -> Path:
        if target.name == name:
            raise full
        return real_replace(self, target)

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(Path, "replace", replace)
    of = job(tmp_path, "begin")
    spool = tmp_path / "state" / "jobs" / "1"
    assert launchers.start(of, attempt(of), {}) == not_started(f"{spool}: No space left on device")
    assert launchers.adopt(of, attempt(of)) == not_started("the service ended")
    assert starts(tmp_path) == []


def test_a_launcher_whose_process_cannot_be_written_down_does_not_start(
    tmp_path: Path, launchers: Launchers, stub: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later service would not know whom to stop, and whether there are ranks."""
    to_a_full_disk = attempts._WITH_PID[2].replace('"$0"', "/dev/full")
    monkeypatch.setattr(attempts, "_WITH_PID", ("/bin/sh", "-c", to_a_full_disk))
    of = job(tmp_path, "begin", "wait=never")
    start(launchers, of)
    [change] = changes(launchers, 1)
    assert change.exit is not None and not change.exit.started
    assert change.exit.cause.startswith("not started: ")
    assert starts(tmp_path) == []
    assert Launchers(tmp_path / "state", stub).adopt(of, attempt(of)) == not_started("the service ended")


def test_values_reach_the_launcher_and_no_file(tmp_path: Path, launchers: Launchers) -> None:
    secret = tmp_path / "secret"
    secret.write_text("TOKEN=hush hush\nOTHER=quiet\n")
    secret.chmod(0o600)
    of = job(tmp_path, "begin", env_names=["TOKEN"], env_file=str(secret))
    start(launchers, of)
    changes(launchers, 2)
    [started] = starts(tmp_path)
    assert started["environment"]["TOKEN"] == "hush hush"
    assert "OTHER" not in started["environment"]
    assert started["words"][6:8] == ["--env", "TOKEN"]
    kept = b"".join(path.read_bytes() for path in (tmp_path / "state").rglob("*") if path.is_file())
    assert b"h1 slots=2" in kept and b"hush" not in kept


def test_the_code_of_a_job_is_put_into_its_run_directory(tmp_path: Path, launchers: Launchers) -> None:
    snapshot = tmp_path / "state" / "code" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "mine.py").write_text("x = 1")
    of = job(tmp_path, code="0123")
    start(launchers, of)
    changes(launchers, 1)
    code = Path(starts(tmp_path)[0]["environment"]["HVD_TRANSFORMER_CODE"])
    assert code.is_relative_to(of.output_dir)
    assert (code / "mine.py").read_text() == "x = 1"


def test_a_run_directory_that_is_a_file_is_wrong_input(tmp_path: Path, launchers: Launchers) -> None:
    of = job(tmp_path)
    Path(of.output_dir).parent.mkdir()
    Path(of.output_dir).touch()
    ended = launchers.start(of, attempt(of), {})
    assert ended is not None
    assert (ended.code, ended.cause, ended.started) == (2, f"{of.output_dir}: File exists", True)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank outlives a launcher for long."""
    monkeypatch.setattr(orphans, "LEFT_OVER_SECONDS", 0.3)
    monkeypatch.setattr(orphans, "_END_SECONDS", -100.0)
    monkeypatch.setattr(attempts, "_ORPHANS_SECONDS", 0.05)


def test_a_killed_launcher_is_told_once_no_rank_can_be_alive(tmp_path: Path, launchers: Launchers, soon: None) -> None:
    began = time.monotonic()
    start(launchers, job(tmp_path, "begin", "die"))
    assert changes(launchers, 2) == [Change(1, 1), Change(1, 1, Exit(None, "its launcher was killed"))]
    assert time.monotonic() - began > 0.3


def test_a_later_service_adopts_what_runs_and_learns_its_end(
    tmp_path: Path, launchers: Launchers, stub: tuple[str, ...]
) -> None:
    of = job(tmp_path, "begin", "wait=go", f"tell={json.dumps(TOLD)}")
    start(launchers, of)
    changes(launchers, 1)
    later = Launchers(tmp_path / "state", stub)
    assert later.adopt(of, attempt(of)) is None
    assert list(later.poll()) == [Change(1, 1)]
    assert later.pids() == launchers.pids() != frozenset()
    (tmp_path / "go").touch()
    assert changes(later, 1) == [Change(1, 1, Exit(3, "rank 1 failed", 7, {}, ("h2",)))]
    assert Launchers(tmp_path / "state", stub).adopt(of, attempt(of)) == Exit(3, "rank 1 failed", 7, {}, ("h2",))
    later.close()


def test_a_later_service_tells_the_hosts_of_a_growth(
    tmp_path: Path, launchers: Launchers, stub: tuple[str, ...]
) -> None:
    """The earlier one ended after it had given the slots, and before it wrote them down for the launcher."""
    of = job(tmp_path, "begin", "wait=never", needs=Needs(4, 2))
    start(launchers, of)
    changes(launchers, 1)
    later = Launchers(tmp_path / "state", stub)
    later.adopt(of, Attempt(1, 1, (*HOSTS, Placement("h3", 1)), 0.0))
    assert [host.name for host in read_hostfile(tmp_path / "state" / "jobs" / "1" / "hosts")] == ["h1", "h2", "h3"]
    later.close()


def test_a_later_service_sees_ranks_begin(tmp_path: Path, launchers: Launchers, stub: tuple[str, ...]) -> None:
    of = job(tmp_path, "wait=go", "begin", "wait=never")
    start(launchers, of)
    later = Launchers(tmp_path / "state", stub)
    assert later.adopt(of, attempt(of)) is None
    assert list(later.poll()) == []
    (tmp_path / "go").touch()
    assert changes(later, 1) == [Change(1, 1)]
    later.close()


def test_a_later_service_waits_for_the_ranks_of_a_killed_launcher(
    tmp_path: Path, launchers: Launchers, stub: tuple[str, ...], soon: None
) -> None:
    of = job(tmp_path, "die")
    start(launchers, of)
    wait_until(lambda: not launchers._launchers[1].files.is_held())
    later = Launchers(tmp_path / "state", stub)
    assert later.adopt(of, attempt(of)) is None
    assert changes(later, 1) == [Change(1, 1, Exit(None, "its launcher was killed"))]
    later.close()


def test_a_service_on_an_old_kernel_looks_at_locks(
    tmp_path: Path, launchers: Launchers, stub: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", missing)
    of = job(tmp_path, "begin", "wait=go", f"tell={json.dumps(TOLD)}")
    start(launchers, of)
    assert changes(launchers, 1) == [Change(1, 1)]
    later = Launchers(tmp_path / "state", stub)
    later.adopt(of, attempt(of))
    assert (list(launchers.poll()), list(later.poll())) == ([], [Change(1, 1)])
    (tmp_path / "go").touch()
    end = Change(1, 1, Exit(3, "rank 1 failed", 7, {}, ("h2",)))
    assert changes(launchers, 1) == changes(later, 1) == [end]
    later.close()


def kill_at(event: int, launchers: Launchers, of: Job) -> bool:
    """Start the job in a process that is killed at its audit event of this number; whether it got that far."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def hook(name: str, arguments: object) -> None:
            nonlocal count
            count += 1
            if count == event:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        start(launchers, of)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def test_a_service_that_is_killed_anywhere_in_a_start_starts_it_once_or_not(
    tmp_path: Path, launchers: Launchers, stub: tuple[str, ...]
) -> None:
    """Each event is an instant: a file opened, renamed or locked, a process started."""
    found, number = set(), 1
    while True:
        folder = tmp_path / str(number)
        folder.mkdir()
        of = job(folder, "begin", f"tell={json.dumps(TOLD)}", number=number)
        killed = kill_at(number, launchers, of)
        later = Launchers(tmp_path / "state", stub)
        exit = later.adopt(of, attempt(of)) or changes(later, 2)[-1].exit
        later.close()
        assert exit is not None and len(starts(folder)) == exit.started
        assert exit.code == 3 or not exit.started
        found.add(exit.started)
        if not killed:
            break
        number += 1
    assert found == {True, False}
    assert number > 10


SERVED = """
import os, sys, time
from pathlib import Path
from hvd_transformer.launch.launched_job import LaunchedJob
class Supervisor:
    asked = None
    def ask_to_stop(self, now):
        self.asked = now
    def how(self):
        return {}
supervisor = Supervisor()
with LaunchedJob(Path(sys.argv[-1])) as job:
    job.watch(supervisor)
    os.write(int(os.environ["HVD_TRANSFORMER_BEGUN"]), b"!")
    while supervisor.asked is None:
        time.sleep(0.01)
sys.exit(8 if supervisor.asked else 7)
"""


@pytest.mark.parametrize(("now", "code"), [(False, 7), (True, 8)])
def test_a_launcher_is_asked_to_stop(tmp_path: Path, now: bool, code: int) -> None:
    launchers = Launchers(tmp_path / "state", [sys.executable, "-c", SERVED])
    of = job(tmp_path, str(tmp_path / "runs" / "1"))
    start(launchers, of)
    assert changes(launchers, 1) == [Change(1, 1)]
    launchers.stop(of, attempt(of, 2), now)  # another attempt is none of its business
    launchers.stop(of, attempt(of), now)
    assert changes(launchers, 1) == [Change(1, 1, Exit(code, ""))]
    launchers.stop(of, attempt(of), now)
    launchers.close()


def test_the_launcher_of_somebody_else_is_left_alone(tmp_path: Path, launchers: Launchers) -> None:
    """One that a user started in the run directory of the job, whose own launcher is about to be refused."""
    foreign = Launchers(tmp_path / "other", [sys.executable, "-c", SERVED])
    of = job(tmp_path, str(tmp_path / "runs" / "1"))
    start(foreign, of)
    changes(foreign, 1)
    mine = job(tmp_path, "begin", "wait=never")
    start(launchers, mine)
    changes(launchers, 1)
    launchers.stop(mine, attempt(mine), now=False)
    assert changes(launchers, 1) == [Change(1, 1, Exit(143, ""))]
    assert list(foreign.poll()) == []
    foreign.stop(of, attempt(of), now=False)
    changes(foreign, 1)
    foreign.close()


def test_one_that_had_no_ranks_yet_is_ended_at_once(tmp_path: Path) -> None:
    """So early it does not take signals itself."""
    launchers = Launchers(tmp_path / "state", ["/bin/sh", "-c", "exec sleep 100"])
    of = job(tmp_path)
    start(launchers, of)
    launchers.stop(of, attempt(of), now=False)
    began = time.monotonic()
    assert changes(launchers, 1) == [Change(1, 1, Exit(None, "its launcher was killed", stopped="SIGTERM"))]
    assert time.monotonic() - began < LEFT_OVER_SECONDS
    launchers.close()


@pytest.mark.usefixtures("soon")
def test_one_without_a_socket_gets_a_signal(tmp_path: Path, launchers: Launchers) -> None:
    for now, exit in ((False, Exit(143, "")), (True, Exit(None, "its launcher was killed"))):
        number = 1 + now
        of = job(tmp_path, "begin", "wait=never", number=number)
        start(launchers, of)
        changes(launchers, 1)
        launchers.stop(of, attempt(of), now)
        assert changes(launchers, 1) == [Change(number, 1, exit)]


@pytest.mark.usefixtures("soon")
def test_one_whose_run_directory_does_not_answer_gets_a_signal(
    tmp_path: Path, launchers: Launchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manager waits for no file system that stands still."""
    go = threading.Event()
    monkeypatch.setattr(not_now, "_ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(attempts, "_ask", lambda run, pid, what: go.wait(60))
    of = job(tmp_path, "begin", "wait=never")
    start(launchers, of)
    changes(launchers, 1)
    try:
        launchers.stop(of, attempt(of), now=False)
        assert changes(launchers, 1) == [Change(1, 1, Exit(143, ""))]
    finally:
        go.set()


@pytest.mark.usefixtures("soon")
def test_one_that_does_not_obey_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "_OBEY_SECONDS", 0.2)
    launchers = Launchers(tmp_path / "state", [sys.executable, "-c", SERVED])
    of = job(tmp_path, str(tmp_path / "runs" / "1"))
    start(launchers, of)
    changes(launchers, 1)
    [pid] = launchers.pids()
    os.kill(pid, signal.SIGSTOP)
    launchers.stop(of, attempt(of), now=True)
    launchers.stop(of, attempt(of), now=True)
    assert list(launchers.poll()) == []
    time.sleep(0.3)
    launchers.stop(of, attempt(of), now=True)
    assert changes(launchers, 1) == [Change(1, 1, Exit(None, "its launcher was killed"))]
    launchers.close()


def test_wake_ends_a_wait(launchers: Launchers) -> None:
    launchers.wake()
    began = time.monotonic()
    launchers.wait(30)
    assert time.monotonic() - began < 15
    assert list(launchers.poll()) == []
    launchers.wait(0)
    for _ in range(100_000):  # nobody listens
        launchers.wake()
