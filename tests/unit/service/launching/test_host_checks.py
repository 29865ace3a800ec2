"""Which hosts are down: the launcher's examination with real probes, under a stand-in for ssh."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from node_agents import connections_opened

from hvd_transformer.comm.horovod_env import usable_cores
from hvd_transformer.launch.doctor import examine
from hvd_transformer.service.jobs import Host
from hvd_transformer.service.launching import host_checks
from hvd_transformer.service.launching.host_checks import HostChecks

ONE, REFUSED = Host("one.invalid", 1), Host("refused.invalid", 1)
WHY = (
    "cannot be reached by ssh: it refuses the ssh key; "
    "add your public key there with `ssh-copy-id refused.invalid`, or choose the key with --ssh-identity"
)
_KEPT = 3600.0


class Stand:
    """Hosts that a test changes, and how often it was told of changes."""

    def __init__(self, folder: Path) -> None:
        self.hosts: list[Host] = []
        self.busy: set[str] = set()
        self.told = 0
        self.checks = HostChecks(lambda: self.hosts, folder, lambda: self.busy, self._tell)

    def _tell(self) -> None:
        self.told += 1

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, self.checks.states()
            time.sleep(0.01)

    def again(self) -> None:
        """Examine once more, and wait for the end of it."""
        before = self.checks.states()
        self.checks._due = 0.0
        self.checks._woken.set()
        self.until(lambda: self.checks.states() is not before)


@pytest.fixture
def stand(ssh_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stand]:
    monkeypatch.setattr(examine.findings, "about_network", lambda *_: [])  # all have this machine's addresses
    monkeypatch.setattr(host_checks, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(host_checks, "_CHECK_SECONDS", _KEPT)
    made = Stand(tmp_path / "runs")
    yield made
    made.checks.close()


@contextmanager
def examined(stand: Stand, *hosts: Host) -> Iterator[HostChecks]:
    stand.hosts = list(hosts)
    stand.checks.start()
    stand.until(lambda: len(stand.checks.states()) == len(hosts))
    yield stand.checks


def test_it_tells_who_is_down_and_what_the_others_have(stand: Stand) -> None:
    cores = usable_cores()
    with examined(stand, ONE, REFUSED, Host("many.invalid", 2 * cores)) as checks:
        assert checks.down() == {"refused.invalid": WHY}
        states = checks.states()
        assert states["refused.invalid"].findings == [WHY]
        assert (states["refused.invalid"].threads, states["refused.invalid"].load) == (0, None)
        assert states["one.invalid"].threads == cores
        assert states["many.invalid"].threads == 1
        [note] = [line for line in states["many.invalid"].findings if "slot" in line]
        assert f"for {2 * cores} slots × 1 stage" in note  # worth a look, but no reason not to use it
        load = states["one.invalid"].load
        assert load is not None and abs(load - os.getloadavg()[0]) < 2
        assert stand.told == 1


def test_one_connection_serves_all_examinations(stand: Stand, ssh_log: Path) -> None:
    with examined(stand, ONE, Host("localhost", 1)):
        assert connections_opened(ssh_log) == 1
        stand.again()
        assert connections_opened(ssh_log) == 1
        assert stand.told == 1


def test_new_hosts_are_examined_at_once_and_others_forgotten(stand: Stand) -> None:
    with examined(stand, ONE) as checks:
        stand.hosts = [REFUSED]
        stand.until(lambda: checks.states().keys() == {"refused.invalid"})
        assert checks.down() == {"refused.invalid": WHY}
        stand.hosts = [replace(REFUSED, slots=2), ONE]
        stand.until(lambda: len(checks.states()) == 2)


def test_a_suspect_is_down_until_a_new_connection_proves_otherwise(
    stand: Stand, ssh_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with examined(stand, ONE, Host("two.invalid", 1)) as checks:
        assert checks.down() == {}
        goes_on, told = threading.Event(), stand.told
        look = examine.Admission.examine
        monkeypatch.setattr(examine.Admission, "examine", lambda *given: goes_on.wait(20) and look(*given))
        checks.suspect({"one.invalid": "no route to it"})
        assert checks.down() == {"one.invalid": "no route to it"}
        assert checks.states()["one.invalid"].threads > 0
        assert stand.told == told + 1
        goes_on.set()
        stand.until(lambda: not checks.down())
        assert stand.told == told + 2
        assert connections_opened(ssh_log) == 3
        assert ssh_log.read_text().count("one.invalid") == 2


def test_a_suspect_of_the_time_of_an_examination_stays_one(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examination may have been before what the attempt saw."""
    with examined(stand, ONE) as checks:
        began, goes_on, seen = threading.Event(), threading.Event(), []
        look = examine.Admission.examine

        def slow(*given: object) -> object:
            began.set()
            assert goes_on.wait(20)
            seen.append(checks.down())
            return look(*given)  # type: ignore[arg-type]

        monkeypatch.setattr(examine.Admission, "examine", slow)
        checks._due = 0.0
        assert began.wait(20)
        checks.suspect({"one.invalid": "no route to it"})
        goes_on.set()
        stand.until(lambda: len(seen) == 2)
        assert seen[1] == {"one.invalid": "no route to it"}
        stand.until(lambda: not checks.down())


def test_a_busy_host_is_not_down_unless_an_attempt_says_so(stand: Stand) -> None:
    stand.busy = {"refused.invalid"}
    with examined(stand, ONE, REFUSED) as checks:
        assert checks.down() == {}
        assert checks.states()["refused.invalid"].findings == [WHY]
        checks.suspect({"refused.invalid": "it no longer answered"})
        stand.until(lambda: checks.down() == {"refused.invalid": WHY})


@pytest.fixture
def two_gpus(ssh_log: Path) -> None:
    """On each host."""
    smi = ssh_log.parent / "bin" / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'a GPU, 80, 79'\necho 'another one, 80, 78'\n")
    smi.chmod(0o755)


def test_the_gpus_that_the_service_gives_must_be_there(stand: Stand, two_gpus: None) -> None:
    with examined(stand, Host("one.invalid", 2, (0, 1)), Host("two.invalid", 3, (0, 1, 2))) as checks:
        why = "GPUs 0, 1, 2 are to be used, but it has only 2 of them; check `nvidia-smi` there, or name other GPUs"
        assert checks.down() == {"two.invalid": why}


def test_gpus_that_the_service_does_not_give_are_named(stand: Stand, two_gpus: None) -> None:
    with examined(stand, Host("one.invalid", 2)) as checks:
        assert checks.down() == {}
        assert checks.states()["one.invalid"].findings == [
            "its GPUs are not assigned to jobs: jobs that share the host use the same ones; list them: "
            "`hvd-transformer hosts add one.invalid:2 --gpus one.invalid=0,1`"
        ]


def test_without_ssh_no_host_can_be_used(stand: Stand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with examined(stand, ONE) as checks:
        assert checks.down() == {"one.invalid": "ssh: not found on this host; install an ssh client"}


def test_an_examination_that_fails_is_tried_again(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_checks, "_CHECK_SECONDS", 0.0)
    look, failed = examine.Admission.examine, []

    def fail_first(*given: object) -> object:
        if not failed:
            failed.append(True)
            raise ValueError
        return look(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(examine.Admission, "examine", fail_first)
    with examined(stand, ONE) as checks:
        assert failed and checks.down() == {}
