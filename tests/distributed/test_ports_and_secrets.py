"""While a job starts and runs on hosts with two networks: what listens there, and what `ps` shows."""

import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from conftest import BIN, rank_environment
from hosts import Hosts, missing, no_space
from jobs import summary, tiny, write_corpus

pytestmark = pytest.mark.distributed

SECRETS = {"https_proxy": "http://user:secret-of-proxy@proxy:1", "HF_TOKEN": "secret-of-token"}
HOROVODS = ("SECRET_KEY", "horovod.runner.run_task", "task_fn", "driver_service", "task_service")
# These bind to all addresses, whatever Open MPI is told; docs/security.md says so.
OPEN_MPI = {"orterun", "orterun_wrapper", "orted", "hvd-train"}


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    if reason := missing():
        pytest.skip(reason)
    with Hosts(2, num_networks=2) as made:
        yield made


class Seen:
    """What was seen on each host: listening sockets by (address, port, process), command lines."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self.listeners: dict[str, set[tuple[str, int, str]]] = {host: set() for host in hosts.names}
        self.commands: dict[str, set[str]] = {host: set() for host in hosts.names}

    def look(self) -> None:
        for host in self._hosts.names:
            self.commands[host] |= set(self._hosts.processes(host).values())
            self.listeners[host] |= {found for found in self._hosts.listeners(host) if found[2] != "sshd"}


def watch(hosts: Hosts, folder: Path, options: Sequence[str]) -> Seen:
    """Runs a job on both hosts."""
    corpus = write_corpus(folder / "text", train=12_000)
    words = [*tiny(corpus), f"output_dir={folder / 'run'}", "training.max_steps=10", "training.epochs=100"]
    launch = [BIN / "hvd-transformer", "launch", "-np", "2", "-H", "h1:1,h2:1", *options, "--env", "HF_TOKEN", "--"]
    seen = Seen(hosts)
    environment = {**rank_environment(), **SECRETS}
    with (folder / "output").open("wb") as file:
        process = hosts.popen(
            "h1", [*launch, *words], env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
        while process.poll() is None:
            seen.look()
            time.sleep(0.01)
    assert process.returncode == 0, (folder / "output").read_text(encoding="utf-8")
    assert summary(folder / "run")["world"] == 2
    for host in hosts.names:
        assert any("hvd-train" in line for line in seen.commands[host])
        for line in seen.commands[host]:
            assert not [word for word in (*HOROVODS, "secret-of-") if word in line], line
    return seen


@pytest.mark.parametrize(
    ("options", "network"),
    [([], 0), pytest.param(["--network-interface", "eth1"], 1, marks=pytest.mark.slow)],
    ids=["the interface of ssh", "another one"],
)
def test_over_gloo_all_ports_are_on_one_interface(
    hosts: Hosts, tmp_path: Path, options: Sequence[str], network: int
) -> None:
    seen = watch(hosts, tmp_path, ["--gloo", *options])
    for host in hosts.names:
        assert seen.listeners[host]
        assert {address for address, _, _ in seen.listeners[host]} == {hosts.address(host, network)}


@no_space
@pytest.mark.slow
def test_over_mpi_only_its_own_ports_are_on_all_interfaces(hosts: Hosts, tmp_path: Path) -> None:
    seen = watch(hosts, tmp_path, ["--mpi"])
    for host in hosts.names:
        for address, _, process in seen.listeners[host]:
            assert address == "127.0.0.1" or process in OPEN_MPI
        assert not [line for line in seen.commands[host] if hosts.address("h1", 1) in line]
