"""Which hosts are taken into a job: with real probes, under a stand-in for ssh."""

import os
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from node_agents import ready
from waiting import wait_until

from hvd_transformer.launch.connection.connections import HostConnections
from hvd_transformer.launch.connection.ssh import Ssh
from hvd_transformer.launch.doctor import examine
from hvd_transformer.launch.doctor.examine import Admission
from hvd_transformer.launch.doctor.findings import Job
from hvd_transformer.launch.hostfile import Host
from hvd_transformer.launch.node import probe
from hvd_transformer.launch.time_limits import TimeLimits

HOSTS = [Host("one.invalid", 1), Host("two.invalid", 1)]


@pytest.fixture
def admission(connections: HostConnections, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Admission:
    monkeypatch.setattr(examine.findings, "about_network", lambda *_: [])  # all have this machine's addresses
    folders = {"output_dir": str(tmp_path / "runs" / "x"), "data.source": str(tmp_path / "text")}
    return Admission(Job(HOSTS, 1, "cpu", str(Path.cwd()), folders, None), connections, dict(os.environ))


def test_a_host_that_no_longer_sees_the_output_folder_is_refused(
    admission: Admission, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert admission.refused(HOSTS) == {}
    assert list(admission._sharing)
    wait_until(lambda: not list(tmp_path.glob(".hvd-transformer-*")))
    monkeypatch.setattr(examine, "_mark", lambda output: Path("/nowhere/else"))
    refused = admission.refused(HOSTS)
    assert refused.keys() == {"one.invalid", "two.invalid"}
    assert f"output_dir={tmp_path}/runs/x is another folder there than here" in str(refused["two.invalid"])


def test_a_host_may_have_an_output_folder_of_its_own(admission: Admission, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "_mark", lambda output: Path("/nowhere/else"))
    assert admission.refused(HOSTS) == {}
    assert admission.refused(HOSTS) == {}


def test_an_output_folder_that_stands_still_keeps_nobody(
    admission: Admission, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that tells is made later, and removed."""
    go, made = tmp_path / "fifo", []
    os.mkfifo(go)
    mark = examine._mark
    monkeypatch.setattr(examine, "_SHARING_SECONDS", 0.2)
    monkeypatch.setattr(examine, "_mark", lambda output: (go.read_bytes(), made.append(mark(output)))[1] or made[0])
    assert admission.refused(HOSTS) == {}
    assert not made
    go.write_bytes(b"")
    wait_until(lambda: made and not made[0].exists())


STANDS_STILL = """
import os, sys, time
from hvd_transformer.launch.connection.ssh import Ssh
from hvd_transformer.launch.doctor import examine
from hvd_transformer.launch.doctor.findings import Job
from hvd_transformer.launch.hostfile import Host

examine._mark = lambda output: time.sleep(60)
job = Job([Host("localhost", 1)], 1, "cpu", "/tmp", {"output_dir": "/tmp/x", "/tmp": "/tmp"})
examine.examine(job, Ssh(), dict(os.environ))
print("examined", flush=True)
"""


def test_the_doctor_ends_while_the_output_folder_stands_still() -> None:
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", STANDS_STILL], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (0, "examined\n"), done.stderr
    assert time.monotonic() - began < 40


def test_the_file_that_tells_is_removed_before_the_answer(admission: Admission, tmp_path: Path) -> None:
    """The process may end at once."""
    assert admission.refused(HOSTS) == {}
    assert admission._sharing == {host.name for host in HOSTS}
    assert not list(tmp_path.rglob(".hvd-transformer-*"))


@pytest.fixture
def two_gpus(ssh_log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On each host."""
    smi = ssh_log.parent / "bin" / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'a GPU, 80, 79'\necho 'another one, 80, 78'\n")
    smi.chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(examine.findings, "about_network", lambda *_: [])


def on_gpus(connections: HostConnections) -> Admission:
    """With training.device=auto, as the torch of these tests may be built for CPUs."""
    job = Job([], 1, "auto", str(Path.cwd()), {"/tmp": "/tmp"}, None)
    return Admission(job, connections, dict(os.environ))


def refused(admission: Admission, *hosts: Host) -> dict[str, str]:
    return {host: finding.message for host, finding in admission.refused(hosts).items()}


def test_a_host_shows_the_gpus_that_are_named_for_it(two_gpus: None, connections: HostConnections) -> None:
    hosts = [Host("one.invalid", 1, (1,)), Host("two.invalid", 1, (2,))]
    assert refused(on_gpus(connections), *hosts) == {"two.invalid": "gpus=2: it has only 2 GPUs"}


def test_a_connected_host_may_get_other_gpus(two_gpus: None, connections: HostConnections) -> None:
    """It is not asked again, as its node agent answers no questions."""
    admission = on_gpus(connections)
    assert refused(admission, Host("one.invalid", 1, (1,))) == {}
    ready(connections, "one.invalid")
    assert refused(admission, Host("one.invalid", 2, (0, 1))) == {}
    assert refused(admission, Host("one.invalid", 2, (0, 2))) == {"one.invalid": "gpus=0,2: it has only 2 GPUs"}


def test_the_gpus_of_this_host_are_counted_as_launch_counts_them(two_gpus: None, connections: HostConnections) -> None:
    admission = on_gpus(connections)
    assert refused(admission, Host("localhost", 2)) == {}
    assert refused(admission, Host("localhost", 3)) == {"localhost": "2 GPUs for 3 slots × 1 stage"}
    assert refused(admission, Host("one.invalid", 3)) == {}  # of another host it does not know them


def test_a_host_that_hangs_takes_no_time_from_the_others(admission: Admission, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when its sshd answers and the home folder does not."""
    monkeypatch.setattr(examine, "_CONNECTED", 3.0)
    for _ in range(2):
        assert admission.refused([*HOSTS, Host("waits.invalid", 1)]).keys() == {"waits.invalid"}


def test_a_host_may_answer_as_late_as_the_user_allows(ssh_log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the preflight waits by itself, and no longer."""
    monkeypatch.setattr(examine, "_CONNECTED", 0.2)
    monkeypatch.setattr(examine.findings, "about_network", lambda *_: [])
    hosts = [Host("waits.invalid", 1)]
    with closing(HostConnections(Ssh(), dict(os.environ), TimeLimits.of(1, start=20.0))) as connections:
        admission = Admission(Job([], 1, "cpu", str(Path.cwd()), {"/tmp": "/tmp"}), connections, dict(os.environ))
        threading.Timer(1.0, (ssh_log.parent / "go").touch).start()
        assert admission.refused(hosts) == {}
    (ssh_log.parent / "go").unlink()
    with closing(HostConnections(Ssh(), dict(os.environ), TimeLimits.of(1, start=0.3))) as connections:
        admission = Admission(Job([], 1, "cpu", str(Path.cwd()), {"/tmp": "/tmp"}), connections, dict(os.environ))
        assert "too slowly" in str(admission.refused(hosts)["waits.invalid"])


def test_an_empty_folder_is_a_mount_point_without_its_file_system(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    found = {name: probe._folder(tmp_path / name)["exists"] for name in ("", "file", "empty", "none")}
    assert found == {"": True, "file": True, "empty": False, "none": False}
