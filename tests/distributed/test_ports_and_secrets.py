"""While a job starts and runs on hosts with two networks: what listens there, and what `ps` shows."""

import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
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
    """What is seen on each host: addresses at which processes listen, command lines."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts, self._ended = hosts, threading.Event()
        self.listeners: dict[str, set[tuple[str, str]]] = {host: set() for host in hosts.names}  # address, process
        self.commands: dict[str, set[str]] = {host: set() for host in hosts.names}
        self._inodes: dict[str, set[int]] = {host: set(hosts.listening(host)) for host in hosts.names}  # sshd's
        self._thread = threading.Thread(target=self._look_for_listeners)
        self._thread.start()

    def look(self) -> None:
        for host in self._hosts.names:
            self.commands[host] |= set(self._hosts.processes(host).values())

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _look_for_listeners(self) -> None:
        """Without a pause: those of gloo are gone as soon as two ranks are connected."""
        while not self._ended.wait(0.001):
            for host, known in self._inodes.items():
                for inode, address in self._hosts.listening(host).items():
                    if inode not in known:
                        known.add(inode)
                        self.listeners[host].add((address, self._hosts.owner(host, inode)))


ETH1 = ("10.77.1.1", "10.77.1.2")
BOTH = ["-H", "h1:1,h2:1"]


def watch(hosts: Hosts, folder: Path, options: Sequence[str], more: Sequence[str] = ()) -> Seen:
    """Runs a job of two ranks."""
    corpus = write_corpus(folder / "text", train=12_000)
    words = [*tiny(corpus), f"output_dir={folder / 'run'}", "training.max_steps=10", "training.epochs=100", *more]
    launch = [BIN / "hvd-transformer", "launch", "-np", "2", *options, "--env", "HF_TOKEN", "--"]
    environment = {**rank_environment(), **SECRETS}
    with (folder / "output").open("wb") as file, closing(Seen(hosts)) as seen:
        process = hosts.popen(
            "h1", [*launch, *words], env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
        while process.poll() is None:
            seen.look()
            time.sleep(0.05)
    assert process.returncode == 0, (folder / "output").read_text(encoding="utf-8")
    assert summary(folder / "run")["world"] == 2
    assert any("hvd-train" in line for line in seen.commands["h1"])
    for host in hosts.names:
        for line in seen.commands[host]:
            assert not [word for word in (*HOROVODS, "secret-of-") if word in line], line
    for file in folder.rglob("*"):
        assert not file.is_file() or b"secret-of-" not in file.read_bytes(), file
    return seen


@pytest.mark.parametrize(
    ("options", "interface", "addresses"),
    [
        (BOTH, "eth0", ("10.77.0.1", "10.77.0.2")),
        pytest.param([*BOTH, "--network-interface", "eth1"], "eth1", ETH1, marks=pytest.mark.slow),
        (["-H", "h1:1,10.77.1.2:1"], "eth1", ETH1),
        pytest.param(["-H", "h1:2"], None, ("127.0.0.1", None), marks=pytest.mark.slow),
    ],
    ids=["what the names stand for", "the option", "the address that ssh is given", "one host"],
)
def test_over_gloo_all_ports_are_on_one_interface(
    hosts: Hosts, tmp_path: Path, options: Sequence[str], interface: str | None, addresses: Sequence[str | None]
) -> None:
    seen = watch(hosts, tmp_path, ["--gloo", *options])
    (horovodrun,) = (line for line in seen.commands["h1"] if "-m hvd_transformer.comm.horovodrun" in line)
    assert interface is None or f"--network-interfaces {interface} " in horovodrun
    assert any(process.startswith("python") for _, process in seen.listeners["h1"])  # the rendezvous
    for host, address in zip(hosts.names, addresses, strict=True):
        assert {found for found, _ in seen.listeners[host]} <= {address}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "addresses"),
    [([*BOTH, "--network-interface", "eth1"], set(ETH1)), (["-H", "h1:2"], {"127.0.0.1"})],
    ids=["two hosts", "one host"],
)
def test_tensor_groups_over_torch_use_that_interface_too(
    hosts: Hosts, tmp_path: Path, where: Sequence[str], addresses: set[str]
) -> None:
    more = ["parallel.tensor=2", "parallel.pipeline=2", "parallel.partition=uniform"]
    seen = watch(hosts, tmp_path, ["--gloo", *where], [*more, "communication.tensor_backend=torch"])
    assert "torch.distributed over gloo" in (tmp_path / "run/logs/rank-000.log").read_text(encoding="utf-8")
    assert {found for own in seen.listeners.values() for found, _ in own} == addresses


@no_space
@pytest.mark.slow
def test_over_mpi_only_its_own_ports_are_on_all_interfaces(hosts: Hosts, tmp_path: Path) -> None:
    seen = watch(hosts, tmp_path, ["--mpi", *BOTH])
    for host in hosts.names:
        for address, process in seen.listeners[host]:
            assert address == "127.0.0.1" or process in OPEN_MPI
        assert not [line for line in seen.commands[host] if hosts.address("h1", 1) in line]


@pytest.fixture
def as_debian_names_itself(hosts: Hosts, tmp_path: Path) -> Iterator[None]:
    """Each host's own name stands for 127.0.1.1 there, as Debian's installer writes it."""
    for host in hosts.names:
        others = [f"{hosts.address(other)} {other}\n" for other in hosts.names if other != host]
        file = tmp_path / f"hosts-{host}"
        file.write_text("".join(["127.0.0.1 localhost\n", f"127.0.1.1 {host}\n", *others]))
        assert hosts.run(host, ["mount", "--bind", file, "/etc/hosts"]).returncode == 0
    yield
    for host in hosts.names:
        assert hosts.run(host, ["umount", "/etc/hosts"]).returncode == 0


@pytest.mark.slow
@pytest.mark.usefixtures("as_debian_names_itself")
def test_what_a_host_calls_itself_does_not_matter(hosts: Hosts, tmp_path: Path) -> None:
    """Horovod as published connects process sets, also the one of all ranks, to the address of that name."""
    seen = watch(hosts, tmp_path, ["--gloo", *BOTH])
    for host in hosts.names:
        assert {address for address, _ in seen.listeners[host]} <= {hosts.address(host)}


def test_the_doctor_names_the_interface_of_the_ranks(hosts: Hosts) -> None:
    words = [BIN / "hvd-transformer", "doctor", "-H", "h1:1,10.77.1.2:1", "--", "data.source=/etc/hostname"]
    table = hosts.run("h1", words, env={**rank_environment(), "COLUMNS": "150"}).stdout
    assert "network interface: eth1 (the hosts also share eth0: choose with --network-interface)" in table
