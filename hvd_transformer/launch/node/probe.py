"""Runs on every host, sent there through ssh's standard input, and answers the doctor's queries.

It uses only the standard library of Python 3.8 and later, because the package may be missing or outdated there. Its
first line begins with `MARK`, as a login shell may print before it: `hello()` in JSON. A query is a line of JSON on
standard input: {"ask": name of a function below, its arguments}. The answer is a line of JSON on standard output. The
probe ends with its input, or becomes the host's node agent over the same connection.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import mmap
import os
import platform
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

MARK = "hvd-transformer-probe "
_DISTRIBUTIONS = ("hvd-transformer", "torch", "horovod", "mpi4py")
# Symbols of classes that Horovod's library contains only if it was built with the feature.
_FEATURES = {
    "gloo": b"13GlooAllreduceE",
    "MPI": b"12MPIAllreduceE",
    "NCCL": b"13NCCLAllreduceE",
    "MPI on GPUs": b"16MPI_GPUAllreduceE",
}
_SIOCGIFADDR, _SIOCGIFFLAGS, _IFF_UP = 0x8915, 0x8913, 1
_PINGS = 20
_LATE = 4  # seconds for a command
_DRIVER = Path("/proc/driver/nvidia")
_FORMATS = {"bf16": {"avx512_bf16", "amx_bf16"}, "fp16": {"avx512_fp16", "amx_fp16"}}  # their instructions on x86
_OUTPUT = 1 << 16  # characters at the end of what a command prints
_MPI4PY = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version().split(",")[0].strip("\\0 \\n"))
print(next(line.split(maxsplit=5)[-1].strip() for line in open("/proc/self/maps") if "/libmpi" in line))
"""

_server = None


def hello() -> dict[str, Any]:
    """What every start of a job needs to know of its hosts."""
    return {
        "interfaces": interfaces(),
        "reached": os.environ.get("SSH_CONNECTION", "- - - -").split()[2],  # the address that ssh used
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],  # hard limit per process; -1: none
    }


def become(command: list[str], environment: dict[str, str]) -> None:
    """Run the command in place of this process. Standard input must hold nothing more until the command speaks."""
    os.execvpe(command[0], command, {**os.environ, **environment})


def facts(environment: dict[str, str], cwd: str, folders: dict[str, str], full: bool) -> dict[str, Any]:
    """What this host offers to a job with this environment. `full` adds facts that take longer to find out.

    Sizes are in bytes.
    """
    os.environ.update(environment)
    # As for an installed command, which does not import from the current folder.
    sys.path = [path for path in [*environment.get("PYTHONPATH", "").split(os.pathsep), *sys.path] if path]
    try:
        os.chdir(cwd)
        has_cwd = True
    except OSError:
        has_cwd = False
    slow = {"horovod": _horovod, "mpi4py": _mpi4py} if full else {}
    with ThreadPoolExecutor() as pool:  # each waits for a command
        devices = pool.submit(_all_devices)
        answers = {name: pool.submit(function) for name, function in slow.items()}
    memory = _memory()
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "versions": {name: _version(name) for name in _DISTRIBUTIONS},
        "source": _source_digest(),
        "cores": _cores(),
        "number_formats": _number_formats(),
        "load": os.getloadavg()[0],
        "memory": memory.get("MemTotal", 0),
        "memory_free": memory.get("MemAvailable", 0),
        "interfaces": interfaces(),
        "cwd": has_cwd,
        "folders": {label: _folder(Path(path).expanduser()) for label, path in folders.items()},
        "all_devices": devices.result(),
        "devices": _visible(devices.result()),
        **{name: answer.result() for name, answer in answers.items()},
    }


def run(command: list[str], seconds: float) -> dict[str, Any]:
    """Run a command of the job's environment; `code` is None if it had to be killed after `seconds`."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return {"code": 127, "output": f"{command[0]}: {error.strerror}"}
    try:
        output, code = process.communicate(timeout=seconds)[0], process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, code = process.communicate()[0], None
    return {"code": code, "output": output[-_OUTPUT:]}


def clock() -> float:
    """Seconds since the epoch."""
    return time.time()


def exists(path: str) -> bool:
    """Whether the file exists on this host."""
    return os.path.exists(path)  # noqa: PTH110 - Path.exists raises where a folder on the way cannot be entered


def listen(address: str) -> int:
    """Open a port on which the next `link` waits for the previous host; return its number."""
    global _server
    _server = socket.create_server((address, 0))
    return int(_server.getsockname()[1])


def link(address: str, port: int, seconds: float) -> dict[str, Any]:
    """Make the traffic of a ring allreduce, without its sums: send to the next host, receive from the previous one.

    All hosts do so at once, for `seconds`. `round_trip`: the shortest of 20 one-byte round trips to the next host, in
    seconds; `rate`: bytes per second received from the previous host; `error`: why the next host was not reached.
    """
    assert _server is not None
    answer: dict[str, Any] = {}
    with _server as server, ThreadPoolExecutor() as pool:
        received = pool.submit(_receive, server, seconds)
        try:
            with socket.create_connection((address, port), timeout=2) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                answer["round_trip"] = min(_ping(connection) for _ in range(_PINGS))
                block, end = bytes(1 << 18), time.perf_counter() + seconds
                with suppress(OSError):  # the other side has closed the connection
                    while time.perf_counter() < end:
                        connection.sendall(block)
        except OSError as error:
            answer["error"] = error.strerror or str(error)
        return {**answer, "rate": received.result()}


def interfaces() -> dict[str, str]:
    """The IPv4 address of each network interface that is up, by name, without the loopback interface."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                flags = struct.unpack("H", fcntl.ioctl(trial, _SIOCGIFFLAGS, request)[16:18])[0]
                address = socket.inet_ntoa(fcntl.ioctl(trial, _SIOCGIFADDR, request)[20:24])
            except OSError:  # no address
                continue
            if flags & _IFF_UP and not address.startswith("127."):
                found[name] = address
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package(name: str) -> Path | None:
    """The folder of a package, without importing it."""
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


def _source_digest() -> str | None:
    """A digest of our package's sources, since checkouts of the same version may differ."""
    folder = _package("hvd_transformer")
    if folder is None:
        return None
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def _cores(root: Path = Path("/")) -> int:
    """As `usable_cores` in comm/horovod_env.py."""
    path = {"": "/", "cpu": "/"}  # by controller: of version 2 there is one for all
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, own = line.split(":", 2)
            path.update(dict.fromkeys(controllers.split(","), own))
    mount, quotas = root / "sys/fs/cgroup", [math.inf]
    joint = [top for top in mount.glob("*cpu*") if "cpu" in top.name.split(",")]  # also "cpu,cpuacct"
    for top, own, names in (
        (mount, path[""], ("cpu.max",)),
        *((top, path["cpu"], ("cpu.cfs_quota_us", "cpu.cfs_period_us")) for top in joint),
    ):
        inside = [part for part in own.split("/") if part]
        for depth in range(1 + (0 if ".." in inside else len(inside))):
            with suppress(OSError, ValueError):  # no such group, or "max"
                texts = [top.joinpath(*inside[:depth], name).read_text(encoding="ascii") for name in names]
                quota, period = map(int, " ".join(texts).split())
                quotas += [quota / period] * (quota > 0 and period > 0)  # -1: no limit
    return math.ceil(min(len(os.sched_getaffinity(0)), *quotas))


def _number_formats() -> list[str]:
    """The 16-bit formats that this CPU has instructions for; all of them if it is not an x86 processor."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), None)
    return [name for name, instructions in _FORMATS.items() if flags is None or instructions & flags]


def _memory() -> dict[str, int]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return {name: int(value.split()[0]) * 1024 for name, value in (line.split(":") for line in lines)}


def _all_devices() -> list[dict[str, Any]]:
    """The GPUs of this host."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    devices = []
    for line in _output(query, late="".join(map("{}, [N/A], [N/A]\n".format, _driver_devices()))).splitlines():
        name, *sizes = (word.strip() for word in line.split(","))
        if len(sizes) == 2:
            total, free = (int(size) << 20 if size.isdigit() else 0 for size in sizes)  # [N/A]: the host's memory
            devices.append({"name": name, "memory": total, "memory_free": free})
    return devices


def _driver_devices() -> list[str]:
    """The names of the GPUs as the driver lists them: where it is not kept loaded, nvidia-smi may need longer."""
    names = []
    for file in sorted(_DRIVER.glob("gpus/*/information")):
        model = re.search(r"^Model:\s*(.*\S)", file.read_text(), re.MULTILINE)
        names.append(model[1] if model else "GPU")
    return names


def _visible(devices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Devices visible to processes on this host."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return devices
    words = (word.strip() for word in visible.split(","))
    names = list(takewhile(re.compile(r"\d+$|GPU-|MIG-", re.ASCII).match, words))  # CUDA ignores what follows
    if not all(name.isdigit() for name in names):  # identifiers
        return devices[: len(names)]
    known = takewhile(lambda name: int(name) < len(devices), names)  # CUDA ignores all after the first unknown one
    return [devices[int(name)] for name in known]


def _folder(path: Path) -> dict[str, Any]:
    """Whether the path exists, is writable, and the free space; of its nearest existing parent if it does not exist.

    A folder that is empty does not count as existing: it may be a mount point without its file system.
    """
    here = path.absolute()
    while not exists(str(here)) and here != here.parent:
        here = here.parent
    disk = os.statvfs(here)
    full = disk.f_files > 0 and disk.f_favail == 0  # no inodes left
    has_size = disk.f_blocks > 0  # /proc has none, nor has a tmpfs without limit
    return {
        "exists": exists(str(path)) and not _is_empty(path),
        "writable": os.access(here, os.W_OK) and (has_size or _takes_files(here)),
        "free": 0 if full else disk.f_bavail * disk.f_frsize if has_size else sys.maxsize,
    }


def _takes_files(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _is_empty(path: Path) -> bool:
    try:
        return not any(path.iterdir())
    except OSError:  # a file, or a folder of somebody else
        return False


def _horovod() -> dict[str, Any] | None:
    """What Horovod was built with, read from its library file: loading it would take all of torch."""
    folder = _package("horovod")
    library = next(folder.glob("torch/mpi_lib*.so"), None) if folder else None
    if folder is None or library is None:
        return None
    with library.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        features = [name for name, word in _FEATURES.items() if data.find(word) >= 0]
    try:
        built_for = json.loads((folder / "metadata.json").read_text()).get("pytorch")
    except (OSError, ValueError):
        built_for = None
    mpi = re.search(r"libmpi\.so\S* => (/.+(?= \()|not found)", _output(["ldd", str(library)]))
    return {"features": features, "torch": built_for, "mpi": str(Path(mpi[1]).resolve()) if mpi else None}


def _mpi4py() -> dict[str, str] | None:
    """The MPI library that mpi4py loads, found in a separate process that has the job's environment."""
    lines = _output([sys.executable, "-c", _MPI4PY]).splitlines()
    return {"version": lines[0], "mpi": str(Path(lines[1]).resolve())} if len(lines) == 2 else None


def _output(command: list[str], late: str = "") -> str:
    """Output of the command; empty if it is missing or fails, `late` if it takes too long."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        english = {**os.environ, "LC_ALL": "C"}
        done = subprocess.run(
            command, env=english, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=_LATE, text=True
        )
        return done.stdout
    except subprocess.TimeoutExpired:
        return late
    except (OSError, subprocess.SubprocessError):
        return ""


def _ping(connection: socket.socket) -> float:
    start = time.perf_counter()
    connection.sendall(b"x")
    connection.recv(1)
    return time.perf_counter() - start


def _receive(server: socket.socket, seconds: float) -> float | None:
    """Answer the pings of the previous host and measure its bytes per second; None if it does not connect."""
    server.settimeout(2.5)
    block = bytearray(1 << 18)
    try:
        with server.accept()[0] as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(seconds)
            for _ in range(_PINGS):
                connection.sendall(connection.recv(1))
            count, start = 0, time.perf_counter()
            while time.perf_counter() < start + seconds:
                received = connection.recv_into(block)
                if not received:
                    break
                count += received
            return count / (time.perf_counter() - start)
    except OSError:
        return None


def main() -> None:
    print(f"\n{MARK}{json.dumps(hello())}", flush=True)
    functions = {function.__name__: function for function in (become, facts, run, clock, exists, listen, link)}
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps(functions[question.pop("ask")](**question)), flush=True)


if __name__ == "__main__":
    main()
