"""The horovodrun command line: hosts, controller (gloo or MPI), GPUs, environment."""

import mmap
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from hvd_transformer.config import Config
from hvd_transformer.errors import UserError, counted
from hvd_transformer.launch.connection.ssh import PLAIN_PATH, Ssh, is_local
from hvd_transformer.launch.hostfile import Host, check_no_ipv6
from hvd_transformer.launch.limits import GLOO_RANKS
from hvd_transformer.plugin import CODE

# Paths, text encoding, the ssh agent. CUDA_VISIBLE_DEVICES is for the ranks of this host only: horovodrun does not
# send it to other hosts.
_NAMES = {
    "PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "HOME", "USER", "TMPDIR",
    "LANG", "TERM", "TZ", "PYTHONUNBUFFERED", "SSH_AUTH_SOCK", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "no_proxy", "NO_PROXY", CODE,
}  # fmt: skip
# Locale, threads per rank, and the tuning variables of torch, Horovod, gloo, NCCL, Open MPI, UCX and libfabric.
_PREFIXES = (
    "LC_", "OMP_", "MKL_", "PYTORCH_", "TORCH_", "TORCHINDUCTOR_", "TRITON_", "CUBLAS_", "HOROVOD_", "NCCL_",
    "GLOO_", "OMPI_ALLOW_RUN_AS_ROOT", "OMPI_MCA_", "UCX_", "FI_",
)  # fmt: skip
_NAMES_AT_ONCE = 32
# They may hold a password, so they go to the ranks as the variables of --env do.
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


def launcher_environment(environment: Mapping[str, str], named: Sequence[str]) -> dict[str, str]:
    """The environment of horovodrun itself; never the variables of `--env`, whatever their names."""
    result = {
        name: value
        for name, value in environment.items()
        if (name in _NAMES or name.startswith(_PREFIXES)) and name not in named
    }
    # The commands next to this Python, even if its virtual environment is not activated.
    commands = Path(sys.executable).parent
    result["PATH"] = f"{commands}{os.pathsep}{environment.get('PATH', os.defpath)}"
    # `python -m` imports from the current folder first, whoever can write there and whatever its files are called;
    # Python 3.10 knows no way to turn it off.
    result["PYTHONSAFEPATH"] = "1"
    # For Open MPI from a Python package: the daemon that mpirun starts on other hosts, and where it finds its files.
    if (commands / "orted").exists():
        result.setdefault("OMPI_MCA_orte_launch_agent", str(commands / "orted"))
        result["OPAL_PREFIX"] = str(commands.parent)
    return result


def secret_values(environment: Mapping[str, str], named: Sequence[str]) -> dict[str, str]:
    """The values of the `--env` variables and of proxies, which only the ranks may see.

    Raises `UserError` for an invalid name or a variable that is not set.
    """
    check_names(named)
    for name in named:
        if name not in environment:
            raise UserError(f"--env {name}: not set in this environment")
    proxies = (name for name in PROXIES if name in environment)
    return {name: environment[name] for name in [*proxies, *named]}


def check_names(named: Sequence[str]) -> None:
    """Raise `UserError` for anything that is not the name of a variable."""
    for name in named:
        if "=" in name:
            name = name.partition("=")[0]
            raise UserError(f"--env {name}=…: takes only the name; everyone can see a value on a command line")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UserError(f"--env {name!a}: not the name of an environment variable")


# Symbols in Horovod's compiled library. Asking Horovod itself would import torch, which takes seconds.
_MARKS = {"gloo": b"_ZN4gloo9transport", "mpi": b"MPI_Init_thread"}


def takes_mpi(gloo: bool | None, library: Path | None, num_ranks: int = 1) -> bool:
    """Whether to use MPI. `gloo=None` selects gloo if Horovod's `library` has it, since it needs only ssh on the hosts,
    but MPI for more ranks than gloo can connect.

    Raises `UserError` if the library was built without the requested one, or without one for so many ranks.
    """
    built = built_with(library) if library else {"gloo", "mpi"}
    if gloo is None:
        if num_ranks > GLOO_RANKS and "mpi" not in built:
            raise UserError(
                f"{num_ranks} ranks: gloo connects at most {GLOO_RANKS}, and Horovod was built without MPI here; use "
                f"-np {GLOO_RANKS}, rebuild Horovod with MPI, or try with --gloo"
            )
        return built == {"mpi"} or num_ranks > GLOO_RANKS
    wanted = "gloo" if gloo else "mpi"
    if wanted not in built:
        other = f"use --{min(built)}, or rebuild it" if built else "rebuild it"
        raise UserError(f"--{wanted}: Horovod was built without it here; {other}, as `make install` does")
    return not gloo


def built_with(library: Path) -> set[str]:
    """Which of "gloo" and "mpi" Horovod's library was built with."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return {name for name, mark in _MARKS.items() if data.find(mark) >= 0}


def horovod_library() -> Path | None:
    """Horovod's compiled library for torch, found without importing it."""
    package = find_spec("horovod")
    folders = package.submodule_search_locations if package else None
    return next((file for folder in folders or () for file in Path(folder).glob("torch/mpi_lib*.so")), None)


def check_devices(hosts: Sequence[Host], config: Config, environment: Mapping[str, str]) -> None:
    """Raise `UserError` if this host has fewer GPUs than its ranks have pipeline stages, or any host whose GPUs are
    named by number.

    Also with training.device=auto if the host has any GPU: all ranks would fall back to the CPU.
    """
    device, stages = config.training.device, config.parallel.pipeline
    if device == "cpu":
        return
    here = None if all(host.gpus for host in hosts) else num_gpus(environment)

    def lacks(host: Host) -> bool:
        gpus = len(host.gpus) or here
        return gpus is not None and (device != "auto" or gpus > 0) and host.slots * stages > gpus

    few = [host for host in hosts if lacks(host)]
    with ThreadPoolExecutor(_NAMES_AT_ONCE) as pool:  # a name server may take seconds for each
        known = list(pool.map(lambda host: bool(host.gpus) or is_local(host.name), few))
    for host, is_known in zip(few, known, strict=True):
        gpus = len(host.gpus) or here or 0
        if is_known:
            needed = f"{counted(host.slots, 'rank')}{f' × {stages} stages' if stages > 1 else ''}"
            named = f" (gpus={','.join(map(str, host.gpus))})" if host.gpus else ""
            most = gpus // stages
            cure = f"at most {most} rank{' fits' if most == 1 else 's fit'}, or " if most else ""
            raise UserError(
                f"host {host.name}: has {counted(gpus, 'GPU')}{named} for {needed} (training.device={device}); {cure}"
                "set training.device=cpu"
            )


# In CUDA_VISIBLE_DEVICES: a number, or an identifier as nvidia-smi prints it.
_GPU_NAME = re.compile(r"\d+$|GPU-|MIG-", re.ASCII)


def gpus_per_rank(config: Config) -> int:
    """How many GPUs a rank may use: one per pipeline stage, none if it computes on the CPU."""
    return 0 if config.training.device == "cpu" else config.parallel.pipeline


def num_gpus(environment: Mapping[str, str]) -> int | None:
    """GPUs by CUDA_VISIBLE_DEVICES or nvidia-smi; None if neither tells."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        names = [name.strip() for name in chosen.split(",")]
        # CUDA ignores everything after the first invalid name; Slurm's NoDevFiles is one.
        return next((at for at, name in enumerate(names) if not _GPU_NAME.match(name)), len(names))
    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=10)
        if said.returncode == 0:
            return sum(line.startswith("GPU ") for line in said.stdout.splitlines())
    return None


_INTERFACE = re.compile(r"[\w.-]+(,[\w.-]+)*", re.ASCII)


@dataclass(frozen=True)
class Horovodrun:
    """The arguments of horovodrun.

    gloo is the default controller: it needs only ssh on the hosts, whereas MPI must be the same on all of them.

    Raises `UserError` for a host or a network interface that horovodrun does not accept.
    """

    hosts: Sequence[Host]
    mpi: bool = False
    ssh: Ssh = Ssh()
    network_interface: str | None = None
    timeline: Path | None = None
    autotune: bool = False

    def __post_init__(self) -> None:
        check_no_ipv6(host.name for host in self.hosts)
        if self.network_interface is not None and not _INTERFACE.fullmatch(self.network_interface):
            raise UserError(f"--network-interface {self.network_interface!a}: must be names such as eth0 or eth0,eth1")

    @property
    def num_ranks(self) -> int:
        """One rank per slot."""
        return sum(host.slots for host in self.hosts)

    def check_path(self) -> None:
        """Raise `UserError` if mpirun could not start its daemon on other hosts, because it does not quote paths."""
        if self.mpi and len(self.hosts) > 1 and not PLAIN_PATH.fullmatch(sys.prefix):
            raise UserError(
                f"--mpi: Open MPI takes no spaces or quotes in the path of its installation, {sys.prefix}, "
                "on other hosts; use --gloo, or install it under another path"
            )

    def words(self, worker: Sequence[str]) -> list[str]:
        """The horovodrun command that starts `worker` on every rank."""
        hosts = ",".join(f"{host.name}:{host.slots}" for host in self.hosts)
        words = ["horovodrun", "-np", str(self.num_ranks), "-H", hosts, "--mpi" if self.mpi else "--gloo"]
        if self.network_interface is None:
            # horovodrun caches what it finds out about hosts for an hour, by name.
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
