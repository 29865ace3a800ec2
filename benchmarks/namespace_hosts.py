"""Hosts on one Linux machine, for benchmarks and tests: each with an address, a name and a link of its own.

A host is a network, a UTS and a mount namespace, kept by one idle process: an own address on `eth0` (`eth1`, …) and an
own name. A further network namespace holds the bridges between them, one per interface. Nothing of it is seen outside,
so several sets of hosts may exist at once. The file system is shared, but for some files of /etc. Needs root.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TypeVar

_UNSHARE = ("unshare", "--net", "--uts", "--mount")
_SYSTEM = ":/usr/sbin:/sbin"
PATH = f"{os.environ['PATH']}{_SYSTEM}"
Self = TypeVar("Self", bound="NamespaceHosts")


def missing(commands: Sequence[str] = ()) -> str | None:
    """Why this machine cannot have such hosts, or lacks one of these further commands."""
    if os.geteuid() != 0:
        return "needs root, to make hosts of network namespaces"
    for command in sorted({"ip", "nsenter", "unshare", *commands}):
        if shutil.which(command, path=PATH) is None:
            return f"needs the command {command}, to make hosts of network namespaces"
    trial = "ip link add br0 type bridge && ip link add eth0 type veth peer name h1 && mount -t tmpfs none /run"
    result = subprocess.run([*_UNSHARE, "sh", "-c", trial], capture_output=True, text=True, env=system_environment())
    return f"cannot make hosts of network namespaces: {result.stderr.strip()}" if result.returncode else None


class NamespaceHosts:
    """Hosts h1, h2, … from construction to `close`. With several networks each host has an interface on each; its name
    stands for its address on eth0."""

    def __init__(self, num_hosts: int = 2, num_networks: int = 1) -> None:
        self.names = [f"h{number}" for number in range(1, num_hosts + 1)]
        self._num_networks = num_networks
        self.folder = Path(tempfile.mkdtemp(prefix="hvd-transformer-hosts-", dir="/var/tmp"))
        self._keepers: dict[str, subprocess.Popen[bytes]] = {}
        self._networks: dict[str, Path] = {}  # by what /proc calls them, as a keeper can be killed
        try:
            self._write_files()
            self._keep("bridge")
            for network in range(num_networks):
                self._ip("bridge", f"link add br{network} type bridge", f"link set br{network} up")
            for host in self.names:
                self._keep(host)
                checked(*self.enter(host), "sh", "-ec", "\n".join(self._mounts(host)))
                self._connect(host)
                self._ready(host)
        except BaseException:
            self.close()
            raise

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def address(self, host: str, network: int = 0) -> str:
        return f"10.77.{network}.{self.names.index(host) + 1}"

    def keeper(self, host: str) -> int:
        """A process with the host's namespaces; /proc has its view of the file system."""
        return self._keepers[host].pid

    def enter(self, host: str) -> list[str]:
        """The words before a command that is to run on a host; the command's process is that of nsenter."""
        return ["nsenter", "-t", str(self.keeper(host)), "--net", "--uts", "--mount", "--"]

    def processes(self, host: str) -> dict[int, str]:
        """The command line of every process on the host, by pid."""
        keeper, network, found = self.keeper(host), self._networks[host], {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # ended meanwhile
                if folder.name != str(keeper) and (folder / "ns/net").readlink() == network:
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(folder.name)] = line.decode(errors="replace").strip()
        return found

    def kill_host(self, host: str) -> None:
        """SIGKILL to everything on the host; its network stays, and refuses connections."""
        while found := self.processes(host):
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def cut(self, host: str) -> None:
        """Takes the links of the host away: nobody answers, nobody is told."""
        self._ip("bridge", *(f"link set {host}-{network} down" for network in range(self._num_networks)))

    def join(self, host: str) -> None:
        """Gives a host that was cut off its links back."""
        self._ip("bridge", *(f"link set {host}-{network} up" for network in range(self._num_networks)))

    def shape(self, mbit: int) -> None:
        """Limits what each host sends on eth0 to so many Mbit/s, by a token bucket (tc-tbf)."""
        burst = max(32_000, 64 * mbit)  # bytes: some packets, but little of a message, whose rest alone has this speed
        for host in self.names:
            words = f"qdisc replace dev eth0 root tbf rate {mbit}mbit burst {burst} latency 400ms"
            checked(*self.enter(host), "tc", *words.split())

    def close(self) -> None:
        """Ends everything on all hosts and removes them."""
        for host in self._networks:
            self.kill_host(host)
        for keeper in self._keepers.values():
            keeper.kill()
            keeper.communicate()
        self._keepers.clear()
        self._networks.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write_files(self) -> None:
        """The files in `etc` are mounted over the machine's of these names."""
        (etc := self.folder / "etc").mkdir()
        names = [f"{self.address(host)} {host}\n" for host in self.names]
        (etc / "hosts").write_text("".join(["127.0.0.1 localhost\n", *names]))

    def _mounts(self, host: str) -> list[str]:
        """Shell commands; a new /sys shows the network interfaces of this namespace."""
        mounts = [f"mount --bind {file} /etc/{file.name}" for file in sorted((self.folder / "etc").iterdir())]
        return ["mount -t sysfs none /sys", f"hostname {host}", *mounts]

    def _ready(self, host: str) -> None:
        """The host has its links."""

    def _keep(self, host: str) -> None:
        """Makes the namespaces of a host and the process that keeps them, until this one ends too."""
        words = [*_UNSHARE, "sh", "-c", "echo && exec cat"]
        keeper = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=system_environment())
        self._keepers[host] = keeper
        assert keeper.stdout and keeper.stdout.readline(), "no namespaces"
        self._networks[host] = Path(f"/proc/{keeper.pid}/ns/net").readlink()

    def _connect(self, host: str) -> None:
        self._ip(host, "link set lo up")
        for network in range(self._num_networks):
            ours, its = f"{host}-{network}", f"eth{network}"
            self._ip("bridge", f"link add {ours} type veth peer name {its} netns {self.keeper(host)}")
            self._ip("bridge", f"link set {ours} master br{network} up")
            self._ip(host, f"address add {self.address(host, network)}/24 dev {its}", f"link set {its} up")

    def _ip(self, host: str, *commands: str) -> None:
        for command in commands:
            checked(*self.enter(host), "ip", *command.split())


def system_environment(given: dict[str, str] | None = None) -> dict[str, str]:
    """This environment, or another, with the commands of the system's administration."""
    environment = {**(os.environ if given is None else given)}
    environment.pop("SSH_AUTH_SOCK", None)  # an agent would offer the user's own keys
    return {**environment, "PATH": f"{environment.get('PATH', '')}{_SYSTEM}"}


def checked(*words: str | Path) -> None:
    """Run a command that must succeed."""
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL, env=system_environment())
