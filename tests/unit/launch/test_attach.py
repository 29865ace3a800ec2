"""A launcher seen and stopped by other processes: its lock, its socket, and how it ended."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from waiting import wait_until

from hvd_transformer.errors import UserError
from hvd_transformer.folder_lock import Owner
from hvd_transformer.launch import launched_job
from hvd_transformer.launch.agents import Failure, HostAgents
from hvd_transformer.launch.attempt import AttemptResult
from hvd_transformer.launch.hostfile import Host
from hvd_transformer.launch.launch_record import LaunchRecord
from hvd_transformer.launch.launched_job import LaunchedJob
from hvd_transformer.launch.output import launch_client, outlet
from hvd_transformer.launch.output.launch_client import LaunchClient, why_it_ended
from hvd_transformer.launch.output.launch_output import LaunchOutput
from hvd_transformer.launch.output.launch_screen import Screen
from hvd_transformer.launch.output.launch_server import LaunchServer, is_trusted
from hvd_transformer.launch.supervisor import Supervisor

HOW = {"cause": "rank 1 on host h1 failed first", "restarts": 2, "step": 70, "hosts": ["h1"]}
AGENTS = cast(HostAgents, SimpleNamespace(beats={}, have_begun=True))


class Stopped:
    """Stands for a supervisor: notes how it was asked to stop."""

    def __init__(self) -> None:
        self.asked: list[bool] = []
        self.event = threading.Event()

    def ask_to_stop(self, now: bool) -> None:
        self.asked.append(now)
        self.event.set()

    def how(self) -> Mapping[str, Any]:
        return HOW


@contextmanager
def running(run: Path, code: int = 1) -> Iterator[tuple[LaunchOutput, Stopped]]:
    """A launched job whose ranks run; it ends with `code`."""
    supervisor = Stopped()
    with LaunchedJob(run) as job, closing(LaunchOutput(Screen(False), job)) as output:
        job.watch(cast(Supervisor, supervisor))
        output.start([Host("h1", 2)], "")
        output.look(AGENTS)
        (run / "logs").mkdir(exist_ok=True)
        yield output, supervisor
        job.code = code


def test_it_shows_what_the_launcher_shows_and_ends_with_its_exit_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, codes = tmp_path / "run", list[int | None]()
    with running(run, code=7) as (output, _):
        output.show(0, "out", "step 1\n")
        with closing(LaunchClient(run)) as client:
            showing = threading.Thread(target=lambda: codes.append(client.show()))
            showing.start()
            time.sleep(0.2)
            capfd.readouterr()
            output.show(0, "out", "step 2\n")
            output.show(1, "err", "the cause\n")
            failure = Failure(1.0, 1, 7, "h1", "h1")
            output.failed(AttemptResult(7, failure, {}, False, {}, ""), "rank 1 on host h1 failed first")
            output.close()
            alone = capfd.readouterr()
            output._job.server.close(7)  # type: ignore[union-attr]
            showing.join(10)
    assert codes == [7]
    assert "step 2" in alone.out


def test_a_client_is_told_the_last_lines_first(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with running(run) as (output, _):
        for number in range(100):
            output.show(0, "out", f"step {number}\n")
        with closing(LaunchClient(run)) as client:
            events = client._events()
            assert next(events) == {"event": "start", "hosts": [["h1", 2]], "restart": ""}
            assert [next(events)["text"] for _ in range(40)] == [f"step {number}\n" for number in range(60, 100)]


def test_a_client_is_not_told_the_end_of_an_earlier_start(tmp_path: Path) -> None:
    """It would end the view of the start that is shown."""
    server = LaunchServer(lambda what: None)
    try:
        for event in ("start", "show", "end", "message", "start", "show"):
            server.publish(event, number=1)
        assert [own["event"] for own in server._recent] == ["show", "message", "show"]
        server.publish("end")
        assert server._recent[-1]["event"] == "end"
    finally:
        server.close(0)


@pytest.mark.parametrize(("what", "now"), [("stop", False), ("kill", True)])
def test_it_is_asked_to_stop(tmp_path: Path, what: str, now: bool) -> None:
    with running(tmp_path / "run") as (_, supervisor), closing(LaunchClient(tmp_path / "run")) as client:
        client.ask(what)
        assert supervisor.event.wait(10)
    assert supervisor.asked == [now]


@pytest.mark.parametrize("what", ["stop", "kill"])
def test_who_asks_before_there_is_a_supervisor_is_heard(tmp_path: Path, what: str) -> None:
    supervisor = Stopped()
    with LaunchedJob(tmp_path / "run") as job, closing(LaunchClient(tmp_path / "run")) as client:
        client.ask(what)
        deadline = time.monotonic() + 10
        while not job._asked:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        job.watch(cast(Supervisor, supervisor))
    assert supervisor.asked == [what == "kill"]


def test_a_client_is_told_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are named, and otherwise how many each rank may use of those that are visible here."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    hosts = [Host("h1", 2, (4, 5)), Host("h2", 1)]
    with LaunchedJob(tmp_path / "run") as job, closing(LaunchOutput(Screen(False), job, 1)) as output:
        output.start(hosts, "")
        with closing(LaunchClient(tmp_path / "run")) as client:
            told = next(client._events())
        assert told["hosts"] == [["h1", 2, [4, 5]], ["h2", 1]]
        assert (told["gpus_per_rank"], told["visible"]) == (1, "2,3")
        assert [(host.name, host.slots) for host in (Host(*host) for host in told["hosts"])] == [("h1", 2), ("h2", 1)]


def test_a_second_launcher_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [sys.executable, "-c", SECOND, run]
    with running(run):
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    host = os.uname().nodename
    assert f"output_dir={run}: in use by a launcher on host {host} (process {os.getpid()}, since " in done.stderr
    assert f"or see it with hvd-transformer attach {run}" in done.stderr


SECOND = """
import sys
from pathlib import Path
from hvd_transformer import folder_lock
from hvd_transformer.launch.output.launch_server import LaunchServer, is_trusted
from hvd_transformer.launch.launched_job import LaunchedJob
folder_lock.END_SECONDS = 0.2
with LaunchedJob(Path(sys.argv[1])):
    pass
"""


def test_how_it_ended_is_in_the_run_directory(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with running(run, code=75):
        assert not (run / "exit.json").exists()
    found = json.loads((run / "exit.json").read_text())
    assert found.pop("began") <= found.pop("ended")
    assert found == {"code": 75, **HOW}
    with pytest.raises(UserError) as raised:
        LaunchClient(run)
    assert str(raised.value).startswith(f"{run}: no launcher is at work here; the last one ended at 2")
    assert str(raised.value).endswith("with exit code 75: rank 1 on host h1 failed first")
    assert sorted(path.name for path in run.iterdir()) == ["exit.json", "logs"]


def test_nobody_waits_for_storage_that_stands_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moves = threading.Event()
    monkeypatch.setattr(launched_job, "_END_SECONDS", 0.5)
    for name in ("begun", "ended", "close"):
        monkeypatch.setattr(LaunchRecord, name, lambda record, *_: moves.wait(60))
    began = time.monotonic()
    with LaunchedJob(tmp_path / "run") as job:
        job.watch(cast(Supervisor, SimpleNamespace(how=dict)))
        job.begun()
        assert time.monotonic() - began < 5
    assert time.monotonic() - began < 10
    moves.set()


def test_a_refused_start_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError), LaunchedJob(tmp_path / "a" / "run"):
        raise UserError("host h1: cannot be reached")
    assert not list(tmp_path.iterdir())


def test_without_a_run_directory_there_is_no_launcher(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run: no such run directory$"):
        LaunchClient(tmp_path / "run")
    (tmp_path / "launch.log").touch()
    with pytest.raises(UserError, match=r"launch.log: no such run directory$"):
        LaunchClient(tmp_path / "launch.log")
    with pytest.raises(UserError, match=r": no launcher is at work here$"):
        LaunchClient(tmp_path)


def test_a_launcher_that_accepts_nobody_blocks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"hvd-transformer-{tmp_path}"
    found = SimpleNamespace(here=True, words="launcher 7", more={"socket": name})
    monkeypatch.setattr(launch_client, "launcher_of", lambda folder: found)
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(f"\0{name}")
        listener.listen(0)
        with closing(LaunchClient(tmp_path)), pytest.raises(UserError, match="launcher 7 does not answer: "):
            LaunchClient(tmp_path)


def test_the_launcher_of_another_host_is_named(tmp_path: Path) -> None:
    with running(tmp_path):
        lock = tmp_path / ".launcher"
        owner = json.loads(lock.read_bytes())
        lock.unlink()
        lock.write_text(json.dumps({**owner, "host": "h9", "processes": "another kernel"}))
        with pytest.raises(UserError, match=r"its launcher is on host h9; run this command there$"):
            LaunchClient(tmp_path)


def test_a_client_that_takes_nothing_delays_nobody(tmp_path: Path) -> None:
    with running(tmp_path / "run") as (output, _), closing(LaunchClient(tmp_path / "run")):
        began = time.monotonic()
        for _ in range(100):
            output.show(0, "out", "x" * 100_000 + "\n")
        assert time.monotonic() - began < 5


def test_a_client_that_takes_too_little_is_left_and_told_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlet, "_MOST_BYTES", 1 << 20)
    run = tmp_path / "run"
    with running(run) as (output, _), closing(LaunchClient(run)) as client:
        server = output._job.server
        assert server is not None
        wait_until(lambda: server._clients)
        for _ in range(100):
            output.show(0, "out", "x" * 100_000 + "\n")
        assert not server._clients
        sys.stdout.flush()
        assert client.show() is None  # what it was sent before, and then an end
        assert "attach again" in why_it_ended(run)
        assert server._thread.is_alive()  # although the last lines alone were too much for this client
    with pytest.raises(UserError):
        LaunchClient(run)
    assert why_it_ended(run) == "its launcher was killed"


@contextmanager
def another_user() -> Iterator[None]:
    os.seteuid(54321)
    try:
        yield
    finally:
        os.seteuid(0)


by_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")


@by_root
def test_another_user_may_not_attach() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0hvd-transformer-test-" + str(os.getpid()))
        listener.listen()
        for known in (False, True):
            with socket.socket(socket.AF_UNIX) as client:
                if known:
                    client.connect(listener.getsockname())
                else:
                    with another_user():
                        client.connect(listener.getsockname())
                with listener.accept()[0] as accepted:
                    assert is_trusted(accepted) is known


@by_root
def test_another_user_cannot_answer_in_place_of_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who takes the name of a socket after the launcher was killed."""
    name = f"hvd-transformer-test-{os.getpid()}"
    owner = Owner("a launcher on host h1", "h1", True, {"socket": name})
    monkeypatch.setattr(launch_client, "launcher_of", lambda folder: owner)
    with socket.socket(socket.AF_UNIX) as theirs:
        with another_user():
            theirs.bind(f"\0{name}")
            theirs.listen()
        LaunchClient(tmp_path).close()  # root's, who may see every job
        monkeypatch.setattr("os.geteuid", lambda: 1000)
        with pytest.raises(UserError, match=r": another user answers in place of a launcher on host h1$"):
            LaunchClient(tmp_path)


def test_only_stop_and_kill_are_obeyed() -> None:
    asked: list[str] = []
    server = LaunchServer(asked.append)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(f"\0{server.name}")
        client.sendall(b'{"do": "shout"}\n["do"]\n{"do": "kill"}\n')
        client.shutdown(socket.SHUT_WR)
        assert client.makefile("rb").read() == b""
    server.close(0)
    assert asked == ["kill"]


def test_a_closed_server_listens_no_more() -> None:
    server = LaunchServer(lambda what: None)
    server.close(0)
    assert "launch server" not in [thread.name for thread in threading.enumerate()]
    with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
        client.connect(f"\0{server.name}")
