"""Launches outside the service are seen with their hosts and GPUs, from their start to their end."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from hvd_transformer.launch.hostfile import Host
from hvd_transformer.launch.launched_job import LaunchedJob
from hvd_transformer.launch.output.launch_output import LaunchOutput
from hvd_transformer.launch.output.launch_screen import Screen
from hvd_transformer.service.jobs import Placement
from hvd_transformer.service.launching import plain_launches
from hvd_transformer.service.launching.plain_launches import PlainLaunches

FAR = f"far-{os.getpid()}.invalid"  # tests that run beside this one launch on other hosts


@pytest.fixture(autouse=True)
def no_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"localhost": "127.0.0.1", "127.0.0.1": "127.0.0.1", "alias": "192.0.2.1", "far": "192.0.2.1"}

    def look_up(name: str) -> str:
        if name not in addresses:
            raise socket.gaierror
        return addresses[name]

    monkeypatch.setattr(socket, "gethostbyname", look_up)


@contextmanager
def seeing(own: Sequence[int] = (), hosts: Sequence[str] = ()) -> Iterator[PlainLaunches]:
    plain = PlainLaunches(lambda: own, lambda: hosts)
    yield plain
    plain.close()


@contextmanager
def launched(run: Path, gpus_per_rank: int = 0) -> Iterator[LaunchOutput]:
    with LaunchedJob(run) as job, closing(LaunchOutput(Screen(False), job, gpus_per_rank)) as output:
        yield output


def until(plain: PlainLaunches, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, plain.taken()
        time.sleep(0.01)
        plain.refresh()


def of(plain: PlainLaunches, *names: str) -> list[Placement]:
    return [place for place in plain.taken() if place.host in names]


def test_a_launch_is_seen_from_its_start_to_its_end(tmp_path: Path) -> None:
    with seeing() as plain:
        with launched(tmp_path / "run") as output:
            plain.refresh()
            assert of(plain, FAR) == []  # it has no ranks yet
            output.start([Host(FAR, 3), Host("else.invalid", 1)], "")
            until(plain, lambda: of(plain, FAR) == [Placement(FAR, 3)])
            assert of(plain, "else.invalid") == [Placement("else.invalid", 1)]
            for number in range(5000):
                output.show(0, "out", f"step {number}\n")
            output.start([Host(FAR, 5)], "restart 1 of 1")
            until(plain, lambda: of(plain, FAR) == [Placement(FAR, 5)])
            assert of(plain, "else.invalid") == []
        until(plain, lambda: not of(plain, FAR))


def test_one_that_began_before_the_service_is_seen(tmp_path: Path) -> None:
    with launched(tmp_path / "run") as output:
        output.start([Host(FAR, 3)], "")
        with seeing() as plain:
            plain.start()
            assert of(plain, FAR) == [Placement(FAR, 3)]


def test_the_launchers_of_the_service_do_not_count(tmp_path: Path) -> None:
    with launched(tmp_path / "run") as output, seeing(own=[os.getpid()]) as plain, seeing() as other:
        output.start([Host(FAR, 3)], "")
        until(other, lambda: of(other, FAR))
        plain.refresh()
        plain.refresh()
        assert of(plain, FAR) == []


@pytest.mark.parametrize(
    ("host", "gpus_per_rank", "visible", "gpus"),
    [
        (Host(FAR, 2, (4, 5)), 1, None, (4, 5)),
        (Host(FAR, 1, (7, 6, 5, 4)), 2, "0,1", (7, 6)),
        (Host(FAR, 2), 2, "4,5,6,7", (0, 1, 2, 3)),
        (Host("localhost", 2), 1, "6,4,2", (6, 4)),
        (Host("localhost", 2), 1, "GPU-1,GPU-2", (0, 1)),
        (Host("localhost", 2), 0, "6,4", ()),
        (Host(FAR, 2, (4, 5)), 0, None, ()),
    ],
)
def test_its_gpus_are_those_that_its_ranks_see(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    host: Host,
    gpus_per_rank: int,
    visible: str | None,
    gpus: tuple[int, ...],
) -> None:
    """The first of those that are named, or visible here, or of all: as each rank takes one per stage."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with launched(tmp_path / "run", gpus_per_rank) as output, seeing() as plain:
        output.start([host], "")
        until(plain, lambda: Placement(host.name, host.slots, gpus) in plain.taken())


def test_hosts_have_the_names_that_the_service_knows(tmp_path: Path) -> None:
    with launched(tmp_path / "run") as output, seeing(hosts=["alias", "127.0.0.1"]) as plain:
        output.start([Host("localhost", 31), Host("far", 32), Host(FAR, 33)], "")
        wanted = {Placement("127.0.0.1", 31), Placement("alias", 32), Placement(FAR, 33)}
        until(plain, lambda: wanted <= set(plain.taken()))


def test_a_change_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Placement, ...]] = []
    plain = PlainLaunches(tuple, tuple, lambda: told.append(plain.taken()))
    with launched(tmp_path / "run") as output:
        own = output._job.server.name.encode()  # type: ignore[union-attr]
        monkeypatch.setattr(plain_launches, "_listening", lambda: [own])  # none of others
        output.start([Host(FAR, 3)], "")
        until(plain, lambda: told)
        for _ in range(3):
            plain.refresh()
        assert told == [(Placement(FAR, 3),)]
    until(plain, lambda: len(told) == 2)
    assert told[1] == ()
    plain.close()


def test_nothing_is_asked_again_if_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither launchers nor name servers."""
    with launched(tmp_path / "run") as output, seeing(hosts=["alias"]) as plain:
        output.start([Host(FAR, 3)], "")
        until(plain, lambda: of(plain, FAR))
        monkeypatch.setattr(PlainLaunches, "_connect", lambda self, name: pytest.fail("connected again"))
        monkeypatch.setattr(socket, "gethostbyname", lambda name: pytest.fail("looked up again"))
        monkeypatch.setattr(plain_launches, "_listening", lambda: [name.encode() for name in [output._job.server.name]])  # type: ignore[union-attr]
        for _ in range(3):
            plain.refresh()
        assert of(plain, FAR) == [Placement(FAR, 3)]


def test_it_looks_on_a_thread_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_launches, "_LOOK_SECONDS", 0.02)
    seen = threading.Event()
    plain = PlainLaunches(tuple, tuple, lambda: seen.set() if of(plain, FAR) else None)
    with closing(plain), launched(tmp_path / "run") as output:
        plain.start()
        output.start([Host(FAR, 3)], "")
        assert seen.wait(20)


LISTEN = """
import os, socket, sys
os.setuid(54321)
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind("\\0" + sys.argv[1])
    listener.listen()
    print("listens", flush=True)
    with listener.accept()[0] as client:
        client.sendall(sys.argv[2].encode() + b"\\n")
        sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_other_users_cannot_take_slots() -> None:
    """By a socket of that name, which anybody may make."""
    words = [sys.executable, "-c", LISTEN, f"hvd-transformer-{uuid4().hex}"]
    event = '{"event": "start", "hosts": [["far.invalid", 1000]], "restart": ""}'
    pipe = subprocess.PIPE
    with seeing() as plain, subprocess.Popen([*words, event], stdin=pipe, stdout=pipe) as other:
        assert other.stdout and other.stdout.readline() == b"listens\n"
        name = words[-1].encode()
        until(plain, lambda: name in plain._left)
        assert of(plain, FAR) == [] and name not in plain._launches
        other.communicate()


def test_nonsense_ends_nothing(tmp_path: Path) -> None:
    """A launcher of another version, or a program that uses its names."""
    with seeing() as plain, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0hvd-transformer-{uuid4().hex}")
        listener.listen()
        plain.refresh()
        with listener.accept()[0] as client, launched(tmp_path / "run") as output:
            for line in ("x", '{"event": "start"', '{"event": "start"}', '{"event": "start", "hosts": 3}'):
                client.sendall(line.encode() + b"\n")
            output.start([Host(FAR, 3)], "")
            until(plain, lambda: of(plain, FAR))
