"""What a process and its host use: peak memory, CPU share, network traffic."""

import resource
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hvd_transformer.control_groups import control_groups

# A control group's files of its limit and its use, and the prefix of the names in memory.stat, by version.
_MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}


def peak_resident_bytes() -> int:
    """The most memory that this process has had at once: its peak resident set."""
    # getrusage also counts what the process was before exec.
    with suppress(OSError):  # Linux only
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1 << 10)


class HostMemory(NamedTuple):
    """Bytes that this process may use, on its host or in its container."""

    total: int
    available: int


def host_memory_left(root: Path = Path("/")) -> HostMemory | None:
    """Bytes that Linux and this process's control groups still allow; None if unknown."""
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
        values = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}
        total, available = values["MemTotal"], values["MemAvailable"]
    except (OSError, ValueError, KeyError, IndexError):
        return None
    for group, version in control_groups("memory", root):
        limit, used, prefix = _MEMORY_FILES[version]
        with suppress(OSError, ValueError):  # no such group, or "max"
            most, now = (int((group / name).read_text(encoding="ascii")) for name in (limit, used))
            now -= min(now, _file_cache(group / "memory.stat", prefix))
            total, available = min(total, most), min(available, max(0, most - now))
    return HostMemory(total, available)


def _file_cache(stat: Path, prefix: str) -> int:
    """Bytes of a control group that hold pages of files: the kernel takes them back when memory is needed."""
    try:
        lines = [line.split() for line in stat.read_text(encoding="ascii").splitlines()]
        values = {name: int(value) for name, value in lines}
        return values[f"{prefix}inactive_file"] + values[f"{prefix}active_file"]
    except (OSError, ValueError, KeyError):
        return 0


class HostUsage(NamedTuple):
    """Use of a host's CPU and network by all its processes over a time. Traffic that bypasses the kernel (RDMA) is not
    counted."""

    cpu: float  # busy share of all cores
    sent: float  # bytes per second, without those to the host itself
    received: float


# Between two measurements, each of which takes up to half a millisecond in a job.
_LEAST_SECONDS = 1.0


class HostMeter:
    """Measures the host from one `read` to the next; the first counts from here.

    It needs psutil, as Horovod does; without it there is nothing to read.
    """

    def __init__(self) -> None:
        self._before: tuple[float, int, int] | None = None
        self._usage: HostUsage | None = None
        self.read()

    def read(self) -> HostUsage | None:
        """The usage since the last measurement, which this is unless it was just now; None: not known."""
        if self._before is not None and time.monotonic() - self._before[0] < _LEAST_SECONDS:
            return self._usage
        try:
            import psutil
        except ImportError:
            return None
        counters = [card for name, card in psutil.net_io_counters(pernic=True).items() if _is_card(name)]
        now = time.monotonic(), sum(card.bytes_sent for card in counters), sum(card.bytes_recv for card in counters)
        cpu = psutil.cpu_percent() / 100  # since its last call
        before, self._before = self._before, now
        if before is not None:
            seconds, sent, received = (new - old for new, old in zip(now, before, strict=True))
            self._usage = HostUsage(cpu, max(0.0, sent / seconds), max(0.0, received / seconds))
        return self._usage


def _is_card(name: str) -> bool:
    """Neither the host itself nor an interface on top of others (bond, VLAN, bridge), which has their bytes again."""
    return not name.startswith("lo") and not any(Path(f"/sys/class/net/{name}").glob("lower_*"))
