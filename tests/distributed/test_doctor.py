"""`hvd-transformer doctor` on three real hosts: each fault planted on one is found there, with what to do."""

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import BIN, REPOSITORY, rank_environment
from hosts import Hosts

from hvd_transformer.comm.horovod_env import usable_cores

pytestmark = pytest.mark.distributed
NUM_HOSTS = 3
AHEAD = 300  # seconds
Plant = Callable[[Hosts, Path], AbstractContextManager[object]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Everything that a job names: commands, data, cache, output."""
    for name in ("commands", "data", "cache", "output"):
        (tmp_path / name).mkdir()
    for split in ("train", "valid", "test"):
        (tmp_path / "data" / f"{split}.txt").write_text("some text\n")
    return tmp_path


def command(hosts: Hosts, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs hvd-transformer on h1 with the settings of a job."""
    settings = [f"data.source={folder / 'data'}", f"data.cache_dir={folder / 'cache'}"]
    settings += [f"output_dir={folder / 'output'}"]
    environment = {**rank_environment(), "PYTHONPATH": str(REPOSITORY), "COLUMNS": "150"}
    environment["PATH"] = f"{folder / 'commands'}:{environment['PATH']}"
    return hosts.run("h1", [BIN / "hvd-transformer", *words, "--", *settings], env=environment, cwd=folder)


def examined(hosts: Hosts, folder: Path, names: str = "h1:1,h2:1,h3:1") -> tuple[int, dict[str, Any]]:
    result = command(hosts, folder, "doctor", "-H", names, "--json")
    assert result.stderr == ""
    return result.returncode, json.loads(result.stdout)


def problems(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [finding for finding in found["findings"] if finding["problem"]]


def test_healthy_hosts_pass_and_are_described(hosts: Hosts, folder: Path) -> None:
    code, found = examined(hosts, folder)
    assert (code, problems(found)) == (0, [])
    assert list(found["hosts"]) == ["h1", "h2", "h3"]
    for host, answer in found["hosts"].items():
        assert answer["python"] == sys.version.split()[0]
        assert answer["versions"]["torch"] == importlib.metadata.version("torch")
        assert answer["cores"] == usable_cores()
        assert answer["interfaces"] == {"eth0": hosts.address(host)}
        assert "gloo" in answer["horovod"]["features"]
        assert answer["horovod"]["mpi"] == answer["mpi4py"]["mpi"]
        assert abs(answer["clock"][0]) < 1  # they have one clock
    assert found["interfaces"] == ["eth0"]
    assert [(link["source"], link["target"]) for link in found["links"]] == [("h1", "h2"), ("h2", "h3"), ("h3", "h1")]
    assert all(link["rate"] > 1e6 and 0 < link["round_trip"] < 1 for link in found["links"])
    assert [path for path in folder.rglob("*") if path.name.startswith(".hvd")] == []  # the marker is gone


@contextmanager
def undone_by(function: Callable[..., object], *arguments: object) -> Iterator[None]:
    try:
        yield
    finally:
        function(*arguments)


@contextmanager
def server(hosts: Hosts, *options: str) -> Iterator[None]:
    """h3 with an sshd of these options."""
    hosts.kill_host("h3")
    hosts.start_host("h3", *options)
    try:
        yield
    finally:
        hosts.kill_host("h3")
        hosts.start_host("h3")


@contextmanager
def mounted(hosts: Hosts, *words: str | Path) -> Iterator[None]:
    """h3 with another file system at the last of the words."""
    assert hosts.run("h3", ["mount", *words]).returncode == 0
    try:
        yield
    finally:
        assert hosts.run("h3", ["umount", words[-1]]).returncode == 0


def sshd_down(hosts: Hosts, folder: Path) -> AbstractContextManager[object]:
    hosts.kill_host("h3")
    return undone_by(hosts.start_host, "h3")


def other_port(hosts: Hosts, folder: Path) -> AbstractContextManager[object]:
    return server(hosts, "-p", "2222")


def key_refused(hosts: Hosts, folder: Path) -> AbstractContextManager[object]:
    return server(hosts, "-o", "AuthorizedKeysFile=none")


@contextmanager
def host_key_changed(hosts: Hosts, folder: Path) -> Iterator[None]:
    assert hosts.run("h1", ["ssh", "h3", "true"]).returncode == 0
    hosts.new_host_key("h3")
    with server(hosts), undone_by((hosts.home / ".ssh" / "known_hosts").unlink):
        yield


def link_cut(hosts: Hosts, folder: Path) -> AbstractContextManager[object]:
    hosts.cut("h3")
    return undone_by(hosts.join, "h3")


def no_python(hosts: Hosts, folder: Path) -> AbstractContextManager[object]:
    return mounted(hosts, "-t", "tmpfs", "none", Path(sys.executable).parent)


def other_torch(hosts: Hosts, folder: Path) -> AbstractContextManager[object]:
    place = Path(str(importlib.metadata.distribution("torch").locate_file("")))
    real = next(path for path in place.glob("torch-*.dist-info"))
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.1.0\n")
    return mounted(hosts, "--bind", folder / "METADATA", real / "METADATA")


def other_source(hosts: Hosts, folder: Path) -> AbstractContextManager[object]:
    """As an older checkout."""
    (folder / "errors.py").write_text("")
    return mounted(hosts, "--bind", folder / "errors.py", REPOSITORY / "hvd_transformer" / "errors.py")


def other_interface(hosts: Hosts, folder: Path) -> AbstractContextManager[object]:
    rename_interface(hosts, "eth0", "net0")
    return undone_by(rename_interface, hosts, "net0", "eth0")


def rename_interface(hosts: Hosts, name: str, other: str) -> None:
    for words in (f"set {name} down", f"set {name} name {other}", f"set {other} up"):
        assert hosts.run("h3", ["ip", "link", *words.split()]).returncode == 0


def no_way(hosts: Hosts, folder: Path) -> AbstractContextManager[object]:
    """From h2, as a firewall may block it; from h1 there is one."""
    route = ["unreachable", hosts.address("h3")]
    assert hosts.run("h2", ["ip", "route", "add", *route]).returncode == 0
    return undone_by(hosts.run, "h2", ["ip", "route", "del", *route])


def full_disk(hosts: Hosts, folder: Path) -> AbstractContextManager[object]:
    return mounted(hosts, "-t", "tmpfs", "-o", "size=1m", "none", folder / "cache")


def read_only(hosts: Hosts, folder: Path) -> AbstractContextManager[object]:
    return mounted(hosts, "-t", "tmpfs", "-o", "ro", "none", folder / "cache")


def output_not_shared(hosts: Hosts, folder: Path) -> AbstractContextManager[object]:
    return mounted(hosts, "-t", "tmpfs", "none", folder / "output")


def data_missing(hosts: Hosts, folder: Path) -> AbstractContextManager[object]:
    """The file of a folder that h3 has, empty."""
    (folder / "files").mkdir()
    (folder / "data").rename(folder / "files" / "data")
    (folder / "data").symlink_to(folder / "files" / "data")
    return mounted(hosts, "-t", "tmpfs", "none", folder / "files")


def clock_ahead(hosts: Hosts, folder: Path) -> AbstractContextManager[object]:
    """The hosts share the machine's clock: on h3 every Python reads another time."""
    (folder / "sitecustomize.py").write_text(f"import time\nnow = time.time\ntime.time = lambda: now() + {AHEAD}\n")
    return server(hosts, "-o", f"SetEnv=PYTHONPATH={folder}")


def few_devices(hosts: Hosts, folder: Path) -> AbstractContextManager[object]:
    """A stand-in for the GPU's driver: two devices on a host, none on h3."""
    script = folder / "commands" / "nvidia-smi"
    gpus = "echo 'A GPU, 1000, 900'; echo 'A GPU, 1000, 900'"
    script.write_text(f'#!/bin/sh\n[ "$(hostname)" = h3 ] || {{ {gpus}; }}\n')
    script.chmod(0o755)
    return undone_by(script.unlink)


HOLD = """
import socket, sys, time
connection = socket.create_connection(("h3", 22))
print(flush=True)
while "drop connection" not in open(sys.argv[1]).read():
    time.sleep(0.05)
"""


def test_connections_that_a_busy_sshd_drops_are_tried_again(hosts: Hosts, folder: Path) -> None:
    """It lets one client at a time tell who it is, and another is at that until one has been dropped."""
    log = hosts.folder / "h3.log"
    config = hosts.folder / "sshd_config"
    usual = config.read_text()
    config.write_text(usual.replace("MaxStartups 100", "MaxStartups 1:100:1"))
    with server(hosts, "-o", "LogLevel=VERBOSE"):
        config.write_text(usual)  # the server has read it
        with hosts.popen("h1", [sys.executable, "-c", HOLD, str(log)], stdout=subprocess.PIPE) as holder:
            assert holder.stdout.readline() == b"\n"
            code, found = examined(hosts, folder, "h1:1,h3:1")
        assert (code, problems(found)) == (0, [])
        assert "drop connection" in log.read_text()


# Each on h3: what is found and a part of what to do.
FAULTS: dict[Plant, tuple[str, str]] = {
    sshd_down: ("its ssh port is closed", "start sshd there"),
    other_port: ("its ssh port is closed", "--ssh-port"),
    key_refused: ("it refuses the ssh key", "ssh-copy-id h3"),
    host_key_changed: ("its host key has changed", "ssh-keygen -R h3"),
    link_cut: ("cannot be reached by ssh: ", "check that it is switched on"),
    no_python: (f"there is no Python at {sys.executable}", "same environment under the same path"),
    no_way: ("h2 cannot connect to it over eth0: No route to host", "firewalls"),
    other_interface: ("no network interface in common with the others: it has net0", "same name on each"),
    read_only: ("cannot be written to", "choose another folder"),
    other_torch: ("torch is 2.1.0, but ", "pip install torch=="),
    other_source: ("the source of hvd-transformer is ", "the same checkout"),
    full_disk: ("is full", "free some space there"),
    output_not_shared: ("is another folder there than here", "file system that all hosts share"),
    data_missing: ("is not there", "copy it there"),
    clock_ahead: ("its clock is 300.0 s ahead", "chronyd"),
    few_devices: ("0 GPUs for 1 slot × 1 stage", "leave this host out"),
}
# What stands in no other's way is planted at once, to save time.
TOGETHER = (
    *((plant,) for plant in (other_port, key_refused, host_key_changed, link_cut, no_python, no_way)),
    (other_interface, read_only),
    (other_torch, other_source, full_disk, output_not_shared, data_missing, clock_ahead, few_devices),
)


@pytest.mark.parametrize("plants", TOGETHER, ids=lambda plants: "-".join(plant.__name__ for plant in plants))
def test_each_planted_fault_is_found_on_its_host_with_the_cure(
    plants: tuple[Plant, ...], hosts: Hosts, folder: Path
) -> None:
    with ExitStack() as stack:
        for plant in plants:
            stack.enter_context(plant(hosts, folder))
        code, found = examined(hosts, folder)
    assert code == 1
    assert {finding["host"] for finding in problems(found)} == {"h3"}
    for message, cure in map(FAULTS.__getitem__, plants):
        assert any(message in finding["message"] and cure in finding["cure"] for finding in problems(found)), message


def test_the_table_shows_every_host_every_fault_and_the_cures(hosts: Hosts, folder: Path) -> None:
    with sshd_down(hosts, folder):
        result = command(hosts, folder, "doctor", "-H", "h1:1,h3:1,h4:1")
    assert result.returncode == 1
    assert {"h1", "h3", "h4"} <= {line.split()[0] for line in result.stdout.splitlines() if line.strip()}
    assert "problem h3: cannot be reached by ssh: its ssh port is closed" in result.stdout
    assert "→ start sshd there" in result.stdout
    assert "problem h4: cannot be reached by ssh: unknown host name" in result.stdout
    assert "→ correct the name" in result.stdout


@pytest.mark.parametrize("plant", [key_refused, no_python, other_interface, few_devices])
def test_a_launch_asks_first_and_starts_nothing(plant: Plant, hosts: Hosts, folder: Path) -> None:
    with plant(hosts, folder):
        result = command(hosts, folder, "launch", "-H", "h1:1,h2:1,h3:1")
    assert (result.returncode, result.stdout) == (2, "")
    [line] = result.stderr.splitlines()
    assert line.startswith("hvd-transformer: host h3: ")
    message, cure = FAULTS[plant]
    assert message in line
    assert cure in line
    assert list((folder / "output").iterdir()) == []
