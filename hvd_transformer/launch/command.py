"""The horovodrun command line of a job."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_transformer.errors import UserError
from hvd_transformer.launch.hostfile import Host

# horovodrun puts paths and names unquoted into a shell's command line.
_PATH = re.compile(r"[\w@%+=:,./~-]+")
_INTERFACE = re.compile(r"[\w.-]+(,[\w.-]+)*", re.ASCII)


@dataclass(frozen=True)
class Ssh:
    """How hosts are reached; a user or port of one host's own is for ~/.ssh/config.

    Raises `UserError` where the port or the key file cannot be one.
    """

    port: int | None = None
    identity: Path | None = None

    def __post_init__(self) -> None:
        if self.port is not None and not 1 <= self.port <= 65535:
            raise UserError(f"--ssh-port {self.port}: must be from 1 to 65535")
        if self.identity is not None:
            try:
                self.identity.open("rb").close()
            except (OSError, ValueError) as error:
                raise UserError(f"--ssh-identity {self.identity}: cannot be read: {error}") from None
            if not _PATH.fullmatch(str(self.identity)):
                raise UserError(f"--ssh-identity {self.identity}: horovodrun takes no spaces or quotes in this path")


@dataclass(frozen=True)
class Horovodrun:
    """What horovodrun is to do.

    gloo is the default controller: it needs nothing on the hosts but ssh, where MPI needs the same MPI on each.

    Raises `UserError` for a host or a network interface that horovodrun cannot take.
    """

    hosts: Sequence[Host]
    mpi: bool = False
    ssh: Ssh = Ssh()
    network_interface: str | None = None
    timeline: Path | None = None
    autotune: bool = False

    def __post_init__(self) -> None:
        for host in self.hosts:
            if ":" in host.name:
                raise UserError(
                    f"[{host.name}]: horovodrun knows no IPv6 addresses; use a name or an address of the host in IPv4"
                )
        if self.network_interface is not None and not _INTERFACE.fullmatch(self.network_interface):
            raise UserError(f"--network-interface {self.network_interface!a}: must be names such as eth0 or eth0,eth1")

    @property
    def num_ranks(self) -> int:
        """One a slot."""
        return sum(host.slots for host in self.hosts)

    def check_path(self) -> None:
        """Raises `UserError` where mpirun could not start its daemon on other hosts: it quotes no path for them."""
        if self.mpi and len(self.hosts) > 1 and not _PATH.fullmatch(sys.prefix):
            raise UserError(
                f"--mpi: Open MPI takes no spaces or quotes in the path of its installation, {sys.prefix}, "
                "on other hosts; use --gloo, or another path"
            )

    def words(self, worker: Sequence[str]) -> list[str]:
        """The command that starts `worker` on every rank."""
        words = ["horovodrun", "-np", str(self.num_ranks)]
        words += ["-H", ",".join(f"{host.name}:{host.slots}" for host in self.hosts)]
        words += ["--mpi" if self.mpi else "--gloo"]
        if self.network_interface is None:
            # horovodrun would believe for an hour what it found out about hosts of these names.
            words += ["--disable-cache"]
        words += ["--start-timeout", str(30 + 2 * len(self.hosts))]
        if self.ssh.port is not None:
            words += ["--ssh-port", str(self.ssh.port)]
        if self.ssh.identity is not None:
            words += ["--ssh-identity-file", str(self.ssh.identity)]
        if self.network_interface is not None:
            words += ["--network-interfaces", self.network_interface]
        if self.timeline is not None:
            words += ["--timeline-filename", str(self.timeline)]
        if self.autotune:
            words += ["--autotune"]
        return [*words, *worker]
