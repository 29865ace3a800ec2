"""Trees of processes that we started, as /proc shows them: freeze, thaw, signal, count time and memory. Linux only."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")


class _Entry(NamedTuple):
    parent: int
    state: str
    cpu: float
    started: int


class ProcessTree:
    """Some children of ours and their descendants; these are remembered also after their parent has gone."""

    def __init__(self) -> None:
        self._started: dict[int, int] = {}  # pid: when, so that another process's pid is never taken for ours

    def add(self, child: int) -> None:
        """A child that has not been waited for yet: its pid is nobody else's."""
        self._started[child] = _read_table()[child].started

    def __bool__(self) -> bool:
        """Whether any process is left."""
        return bool(self._running())

    def freeze(self) -> None:
        """Stops every process: not even a background thread that spins uses the CPU."""
        stopped: set[int] = set()
        deadline = time.monotonic() + 10
        # Again until all are seen to stand: one may have been starting another.
        while running := self._running("T"):
            for pid in running - stopped:
                _kill(pid, signal.SIGSTOP)
            stopped |= running
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes {sorted(running)} do not stop")
            time.sleep(0.001)

    def thaw(self) -> None:
        """Lets every process go on."""
        self.signal(signal.SIGCONT)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to every process that is left, the oldest last."""
        for pid in reversed(self._alive()):
            _kill(pid, number)

    def cpu_seconds(self) -> float:
        """CPU time that the processes that are left have used."""
        return sum(entry.cpu for entry in self._alive().values())

    def memory(self) -> int:
        """Bytes of memory of the processes that are left; a page that several of them share counts once."""
        return sum(_memory(pid) for pid in self._alive())

    def _running(self, but: str = "") -> set[int]:
        """Those that are no zombies, nor in the state `but`."""
        return {pid for pid, entry in self._alive().items() if entry.state not in f"ZX{but}"}

    def _alive(self) -> dict[int, _Entry]:
        table = _read_table()
        children: dict[int, list[int]] = {}
        for pid, entry in table.items():
            children.setdefault(entry.parent, []).append(pid)
        queue = [pid for pid, started in self._started.items() if pid in table and table[pid].started == started]
        for pid in queue:
            queue.extend(child for child in children.get(pid, []) if child not in queue)
        self._started.update((pid, table[pid].started) for pid in queue)
        return {pid: table[pid] for pid in queue}


def _read_table() -> dict[int, _Entry]:
    """Every process of this machine."""
    table = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # proc(5): pid (name) state parent …; the name may hold anything.
            fields = file.read_text(errors="replace").rpartition(")")[2].split()
            cpu = (int(fields[11]) + int(fields[12])) / _TICKS
            table[int(file.parent.name)] = _Entry(int(fields[1]), fields[0], cpu, int(fields[19]))
    return table


def _memory(pid: int) -> int:
    """Its proportional share of pages, or where that may not be read all its resident pages; 0 if it has gone."""
    for name, key in (("smaps_rollup", "Pss:"), ("status", "VmRSS:")):
        with suppress(OSError, StopIteration):
            lines = Path(f"/proc/{pid}/{name}").read_text(errors="replace").splitlines()
            return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])
    return 0


def _kill(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
