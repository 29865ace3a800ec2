"""The horovodrun command line: hosts, controller, GPUs, environment."""

import mmap
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from hvd_transformer.config import Config
from hvd_transformer.errors import UserError
from hvd_transformer.launch.hostfile import Host
from hvd_transformer.launch.ssh import _PATH, Ssh, is_local

# Tells rank 0 that the launcher draws the progress.
SCREEN = "HVD_TRANSFORMER_SCREEN"
# To find commands, libraries and the user's files; how text looks; where ssh asks for keys. The devices of a user who
# chose some are for the ranks of this host alone: horovodrun does not send that variable to others.
_NAMES = {
    "PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "HOME", "USER", "TMPDIR",
    "LANG", "TERM", "TZ", "PYTHONUNBUFFERED", "SSH_AUTH_SOCK", "CUDA_VISIBLE_DEVICES",
}  # fmt: skip
# Locale, threads a rank, and the tuning variables of Horovod, gloo, NCCL and Open MPI.
_PREFIXES = ("LC_", "OMP_", "MKL_", "HOROVOD_", "NCCL_", "OMPI_ALLOW_RUN_AS_ROOT", "OMPI_MCA_")


def launcher_environment(environment: Mapping[str, str], named: Sequence[str]) -> dict[str, str]:
    """The environment of horovodrun; not the variables of `--env`, whatever they are called."""
    result = {
        name: value
        for name, value in environment.items()
        if (name in _NAMES or name.startswith(_PREFIXES)) and name not in named
    }
    # The commands beside this Python, also where its virtual environment is not activated.
    commands = Path(sys.executable).parent
    result["PATH"] = f"{commands}{os.pathsep}{environment.get('PATH', os.defpath)}"
    # The same for Open MPI from a Python package: what mpirun starts on other hosts, and where that finds its files.
    if (commands / "orted").exists():
        result.setdefault("OMPI_MCA_orte_launch_agent", str(commands / "orted"))
        result["OPAL_PREFIX"] = str(commands.parent)
    return result


def secret_values(environment: Mapping[str, str], named: Sequence[str]) -> dict[str, str]:
    """The values of the variables of `--env`.

    Raises `UserError` for one that is not set or no name.
    """
    check_names(named)
    for name in named:
        if name not in environment:
            raise UserError(f"--env {name}: not set in this environment")
    return {name: environment[name] for name in named}


def check_names(named: Sequence[str]) -> None:
    """Raises `UserError` for what is no name of a variable."""
    for name in named:
        if "=" in name:
            name = name.partition("=")[0]
            raise UserError(f"--env {name}=…: takes the name alone; a value on a command line is seen by everyone")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UserError(f"--env {name!a}: no name of an environment variable")


# What the compiled library holds where it was built with them. To ask Horovod itself takes torch, and seconds.
_MARKS = {"gloo": b"_ZN4gloo9transport", "mpi": b"MPI_Init_thread"}


def takes_mpi(gloo: bool | None, library: Path | None) -> bool:
    """Whether MPI it is. None: gloo where Horovod's `library` has it, as it needs nothing on the hosts but ssh.

    Raises `UserError` where the library was built without the wanted one.
    """
    built = built_with(library) if library else {"gloo", "mpi"}
    if gloo is None:
        return built == {"mpi"}
    wanted = "gloo" if gloo else "mpi"
    if wanted not in built:
        other = f"use --{min(built)}, or build it again" if built else "build it again"
        raise UserError(f"--{wanted}: Horovod was built without it here; {other}, as `make install` does")
    return not gloo


def built_with(library: Path) -> set[str]:
    """Of "gloo" and "mpi"."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return {name for name, mark in _MARKS.items() if data.find(mark) >= 0}


def horovod_library() -> Path | None:
    """Horovod's compiled part for torch, without importing it."""
    package = find_spec("horovod")
    folders = package.submodule_search_locations if package else None
    return next((file for folder in folders or () for file in Path(folder).glob("torch/mpi_lib*.so")), None)


def check_devices(hosts: Sequence[Host], config: Config, environment: Mapping[str, str]) -> None:
    """Raises `UserError` where this host has fewer GPUs than its ranks have stages.

    Also for training.device=auto, where it has any: all ranks would compute on the CPU then.
    """
    device, stages = config.training.device, config.parallel.pipeline
    if device == "cpu" or (gpus := num_gpus(environment)) is None or (device == "auto" and not gpus):
        return
    for host in hosts:
        if host.slots * stages > gpus and is_local(host.name):
            needed = f"{host.slots} ranks × {stages} stages" if stages > 1 else f"{host.slots} ranks"
            raise UserError(
                f"host {host.name}: has {gpus} GPUs for {needed} (training.device={device}); at most "
                f"{gpus // stages} ranks fit, or set training.device=cpu"
            )


def num_gpus(environment: Mapping[str, str]) -> int | None:
    """As CUDA_VISIBLE_DEVICES or the driver's tool says; None where neither does."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        names = [name.strip() for name in chosen.split(",")]
        # CUDA ends its list at the first name that is none.
        return next((at for at, name in enumerate(names) if name in ("", "-1")), len(names))
    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=10)
        if said.returncode == 0:
            return sum(line.startswith("GPU ") for line in said.stdout.splitlines())
    return None


_INTERFACE = re.compile(r"[\w.-]+(,[\w.-]+)*", re.ASCII)


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
