"""Real hosts on one Linux machine, for tests that need ssh, different addresses and links that can be cut.

A host is a network, a UTS and a mount namespace, kept by one idle process: an own address on `eth0` (`eth1`, …), an own
name, an own sshd with an own host key. A further network namespace holds the bridges between them, one per interface.
Nothing of it is seen outside, so several sets of hosts may exist at once. The file system is shared, but for what ssh
reads of the machine's own configuration: a changed passwd file gives root another home folder, as ssh looks for keys
there and not in $HOME.
"""

import ipaddress
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote
from types import TracebackType
from typing import Any

import pytest

_COMMANDS = ("ip", "nsenter", "ssh", "ssh-keygen", "sshd", "unshare")
_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
_UNSHARE = ("unshare", "--net", "--uts", "--mount")
# Both write the paths of their programs unquoted into what ssh gives to a shell.
no_space = pytest.mark.skipif(" " in sys.prefix, reason="mpirun and bare horovodrun need a path without spaces")


def missing() -> str | None:
    """Why this machine cannot have such hosts."""
    if os.geteuid() != 0:
        return "needs root, to make hosts of network namespaces"
    for command in _COMMANDS:
        if shutil.which(command, path=_PATH) is None:
            return f"needs the command {command}, to make hosts of network namespaces"
    trial = "ip link add br0 type bridge && ip link add eth0 type veth peer name h1 && mount -t tmpfs none /run"
    result = subprocess.run([*_UNSHARE, "sh", "-c", trial], capture_output=True, text=True, env=_environment())
    return f"cannot make hosts of network namespaces: {result.stderr.strip()}" if result.returncode else None


class Hosts:
    """Hosts h1, h2, … from construction to `close`; h1 is where launchers run.

    `private_tmp` gives each host a /tmp of its own: of the machine's /tmp it shows the checkout and its Python alone.
    With several networks each host has an interface on each; its name stands for its address on eth0.
    """

    def __init__(self, num_hosts: int = 2, private_tmp: bool = False, num_networks: int = 1) -> None:
        self.names = [f"h{number}" for number in range(1, num_hosts + 1)]
        self._num_networks = num_networks
        self.folder = Path(tempfile.mkdtemp(prefix="hvd-transformer-hosts-", dir="/var/tmp"))
        self.home = self.folder / "home"
        self._keepers: dict[str, subprocess.Popen[bytes]] = {}
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        try:
            self._write_files()
            self._keep("bridge")
            for network in range(num_networks):
                self._ip("bridge", f"link add br{network} type bridge", f"link set br{network} up")
            for host in self.names:
                self._keep(host)
                self._mount(host, private_tmp)
                self._connect(host)
                self.start_host(host)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Hosts":
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

    def popen(self, host: str, command: Sequence[str | Path], **options: Any) -> subprocess.Popen[Any]:
        """Starts a command on a host; its pid is that of the command. Options are those of `subprocess.Popen`."""
        environment = {**_environment(options.pop("env", None)), "HOME": str(self.home)}
        words = [*self._enter(host), "env", "-C", str(options.pop("cwd", Path.cwd())), *map(str, command)]
        return subprocess.Popen(words, env=environment, **options)

    def run(self, host: str, command: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs a command on a host, for at most `timeout` (60) seconds; what it printed is text."""
        given, timeout = options.pop("input", None), options.pop("timeout", 60)
        options.setdefault("stdin", subprocess.DEVNULL if given is None else subprocess.PIPE)
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        with self.popen(host, command, **options) as process:
            try:
                out, err = process.communicate(given, timeout)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(list(command), process.returncode, out, err)

    def processes(self, host: str) -> dict[int, str]:
        """The command line of every process on the host, by pid."""
        keeper, found = self._keepers[host].pid, {}
        network = Path(f"/proc/{keeper}/ns/net").readlink()
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # ended meanwhile
                if folder.name != str(keeper) and (folder / "ns/net").readlink() == network:
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(folder.name)] = line.decode(errors="replace").strip()
        return found

    def listening(self, host: str) -> dict[int, str]:
        """The address of every TCP socket that listens on the host, by inode."""
        found = {}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{self._keepers[host].pid}/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A":
                    address = bytes.fromhex(words[1].partition(":")[0])
                    numbers = b"".join(address[at : at + 4][::-1] for at in range(0, len(address), 4))
                    found[int(words[9])] = str(ipaddress.ip_address(numbers))
        return found

    def owner(self, host: str, inode: int) -> str:
        """The name of the process that has the socket; "" if it has just ended."""
        for pid in self.processes(host):
            with suppress(OSError):
                if any(str(file.readlink()) == f"socket:[{inode}]" for file in Path(f"/proc/{pid}/fd").iterdir()):
                    return Path(f"/proc/{pid}/comm").read_text().strip()
        return ""

    def kill_host(self, host: str) -> None:
        """SIGKILL to sshd and everything else on the host; its network stays, and refuses connections."""
        while found := self.processes(host):
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        if server := self._servers.pop(host, None):
            server.wait()

    def start_host(self, host: str, *options: str) -> None:
        """Starts sshd, with more of its options such as -p 2222; returns when it listens."""
        log = self.folder / f"{host}.log"
        command = [shutil.which("sshd", path=_PATH) or "sshd", "-D", "-e", "-f", self.folder / "sshd_config"]
        command += ["-h", self._host_key(host), *options]
        with log.open("wb") as stream:
            self._servers[host] = self.popen(
                host, command, cwd="/", stdin=subprocess.DEVNULL, stdout=stream, stderr=stream
            )
        deadline = time.monotonic() + 10
        while b"Server listening" not in log.read_bytes():
            assert self._servers[host].poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.01)

    def new_host_key(self, host: str) -> None:
        """Another host key, for the next `start_host`: to clients that know the host, an attacker's."""
        self._host_key(host).unlink(missing_ok=True)
        _checked("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self._host_key(host))

    def cut(self, host: str) -> None:
        """Takes the links of the host away: nobody answers, nobody is told."""
        self._ip("bridge", *(f"link set {host}-{network} down" for network in range(self._num_networks)))

    def join(self, host: str) -> None:
        """Gives a host that was cut off its links back."""
        self._ip("bridge", *(f"link set {host}-{network} up" for network in range(self._num_networks)))

    @contextmanager
    def own_tmp(self, host: str, options: str) -> Iterator[None]:
        """Gives a host a /tmp of its own, as `private_tmp` does, with these options of tmpfs."""
        _checked(*self._enter(host), "sh", "-ec", "\n".join(self._hide_tmp(f",{options}")))
        try:
            yield
        finally:
            _checked(*self._enter(host), "umount", "--recursive", "--lazy", "/tmp")

    def close(self) -> None:
        """Ends everything on all hosts and removes them."""
        for host in self._keepers:
            self.kill_host(host)
        for keeper in self._keepers.values():
            keeper.kill()
            keeper.communicate()
        self._keepers.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write_files(self) -> None:
        """What ssh and sshd read; `etc` is mounted over the machine's files of these names."""
        keys, etc = self.home / ".ssh", self.folder / "etc"
        self.home.mkdir(mode=0o700)
        keys.mkdir(mode=0o700)
        etc.mkdir()
        _checked("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / "id_ed25519")
        shutil.copy(keys / "id_ed25519.pub", keys / "authorized_keys")
        (keys / "config").write_text("StrictHostKeyChecking accept-new\nGSSAPIAuthentication no\n")
        (self.folder / "sshd_config").write_text(
            "AuthenticationMethods publickey\nPermitRootLogin prohibit-password\nUsePAM no\nUseDNS no\nPidFile none\n"
            "MaxStartups 100\nMaxSessions 100\nStrictModes no\nAuthorizedKeysFile .ssh/authorized_keys\n"
        )
        for host in self.names:
            self.new_host_key(host)
        users = Path("/etc/passwd").read_text().splitlines(keepends=True)
        others = [line for line in users if not line.startswith("root:")]
        (etc / "passwd").write_text("".join([f"root:x:0:0:root:{self.home}:/bin/bash\n", *others]))
        (etc / "shadow").write_text("root:*:::::::\n")  # no password, and not locked: sshd refuses keys then
        (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nshadow: files\nhosts: files\n")
        names = [f"{self.address(host)} {host}\n" for host in self.names]
        (etc / "hosts").write_text("".join(["127.0.0.1 localhost\n", *names]))

    def _keep(self, host: str) -> None:
        """Makes the namespaces of a host and the process that keeps them, until this one ends too."""
        words = [*_UNSHARE, "sh", "-c", "echo && exec cat"]
        keeper = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment())
        self._keepers[host] = keeper
        assert keeper.stdout and keeper.stdout.readline(), "no namespaces"

    def _mount(self, host: str, private_tmp: bool) -> None:
        # sshd wants /run/sshd; a new /sys shows the network interfaces of this namespace.
        lines = ["mount -t tmpfs none /run", "mkdir /run/sshd", "mount -t sysfs none /sys", f"hostname {host}"]
        lines += [f"mount --bind {file} /etc/{file.name}" for file in sorted((self.folder / "etc").iterdir())]
        lines += self._hide_tmp() if private_tmp else []
        _checked(*self._enter(host), "sh", "-ec", "\n".join(lines))

    def _hide_tmp(self, options: str = "") -> list[str]:
        """Shell commands: mounts what the tests run from aside, an empty /tmp over the other, and that back into it."""
        needed = (Path(__file__).parents[1], sys.prefix, sys.base_prefix, Path.cwd())
        aside, back = [], []
        for place, path in enumerate(sorted({Path(name).resolve() for name in needed})):
            if Path("/tmp") in path.parents:
                here, there = quote(str(path)), self.folder / f"kept-{place}"
                aside.append(f"mkdir -p {there} && mount --bind {here} {there}")
                back.append(f"mkdir -p {here} && mount --bind {there} {here}")
        return [*aside, f"mount -t tmpfs -o mode=1777{options} none /tmp", *back]

    def _connect(self, host: str) -> None:
        self._ip(host, "link set lo up")
        for network in range(self._num_networks):
            ours, its = f"{host}-{network}", f"eth{network}"
            self._ip("bridge", f"link add {ours} type veth peer name {its} netns {self._keepers[host].pid}")
            self._ip("bridge", f"link set {ours} master br{network} up")
            self._ip(host, f"address add {self.address(host, network)}/24 dev {its}", f"link set {its} up")

    def _ip(self, host: str, *commands: str) -> None:
        for command in commands:
            _checked(*self._enter(host), "ip", *command.split())

    def _enter(self, host: str) -> list[str]:
        return ["nsenter", "-t", str(self._keepers[host].pid), "--net", "--uts", "--mount", "--"]

    def _host_key(self, host: str) -> Path:
        return self.folder / f"{host}-key"


def _environment(given: dict[str, str] | None = None) -> dict[str, str]:
    environment = {**(os.environ if given is None else given)}
    environment.pop("SSH_AUTH_SOCK", None)  # an agent would offer the user's own keys
    return {**environment, "PATH": f"{environment.get('PATH', '')}:/usr/sbin:/sbin"}


def _checked(*words: str | Path) -> None:
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL, env=_environment())
