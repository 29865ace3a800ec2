"""Real hosts on one Linux machine, for tests that need ssh, different addresses and links that can be cut.

They are those of `benchmarks.namespace_hosts`, each with an own sshd and an own host key. The file system is shared,
but for what ssh reads of the machine's own configuration: a changed passwd file gives root another home folder, as ssh
looks for keys there and not in $HOME.
"""

import ipaddress
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote
from typing import Any

import pytest

from benchmarks import namespace_hosts
from benchmarks.namespace_hosts import PATH, NamespaceHosts, checked, system_environment

_COMMANDS = ("ssh", "ssh-keygen", "sshd")
# Both write the paths of their programs unquoted into what ssh gives to a shell.
no_space = pytest.mark.skipif(" " in sys.prefix, reason="mpirun and bare horovodrun need a path without spaces")


def missing() -> str | None:
    """Why this machine cannot have such hosts."""
    return namespace_hosts.missing(_COMMANDS)


class Hosts(NamespaceHosts):
    """Hosts h1, h2, … from construction to `close`; h1 is where launchers run.

    `private_tmp` gives each host a /tmp of its own: of the machine's /tmp it shows the checkout and its Python alone.
    """

    def __init__(self, num_hosts: int = 2, private_tmp: bool = False, num_networks: int = 1) -> None:
        self._private_tmp = private_tmp
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        super().__init__(num_hosts, num_networks)

    @property
    def home(self) -> Path:
        return self.folder / "home"

    def popen(self, host: str, command: Sequence[str | Path], **options: Any) -> subprocess.Popen[Any]:
        """Starts a command on a host; its pid is that of the command. Options are those of `subprocess.Popen`."""
        environment = {**system_environment(options.pop("env", None)), "HOME": str(self.home)}
        words = [*self.enter(host), "env", "-C", str(options.pop("cwd", Path.cwd())), *map(str, command)]
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

    def listening(self, host: str) -> dict[int, str]:
        """The address of every TCP socket that listens on the host, by inode."""
        found = {}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{self.keeper(host)}/net/{table}").read_text().splitlines()[1:]:
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
        super().kill_host(host)
        if server := self._servers.pop(host, None):
            server.wait()

    def start_host(self, host: str, *options: str) -> None:
        """Starts sshd, with more of its options such as -p 2222; returns when it listens."""
        log = self.folder / f"{host}.log"
        command = [shutil.which("sshd", path=PATH) or "sshd", "-D", "-e", "-f", self.folder / "sshd_config"]
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
        checked("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self._host_key(host))

    @contextmanager
    def own_tmp(self, host: str, options: str) -> Iterator[None]:
        """Gives a host a /tmp of its own, as `private_tmp` does, with these options of tmpfs."""
        checked(*self.enter(host), "sh", "-ec", "\n".join(self._hide_tmp(f",{options}")))
        try:
            yield
        finally:
            checked(*self.enter(host), "umount", "--recursive", "--lazy", "/tmp")

    def _write_files(self) -> None:
        """What ssh and sshd read; `etc` is mounted over the machine's files of these names."""
        super()._write_files()
        keys, etc = self.home / ".ssh", self.folder / "etc"
        self.home.mkdir(mode=0o700)
        keys.mkdir(mode=0o700)
        checked("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / "id_ed25519")
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

    def _mounts(self, host: str) -> list[str]:
        # sshd wants /run/sshd.
        lines = ["mount -t tmpfs none /run", "mkdir /run/sshd", *super()._mounts(host)]
        return lines + (self._hide_tmp() if self._private_tmp else [])

    def _ready(self, host: str) -> None:
        self.start_host(host)

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

    def _host_key(self, host: str) -> Path:
        return self.folder / f"{host}-key"
