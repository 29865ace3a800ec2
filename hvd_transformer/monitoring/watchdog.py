"""The watchdog thread of every rank: it reports what the rank is doing, and ends a job that makes no progress.

Twice a second it looks for a sign of progress and writes the file `beat-RANK` (every few seconds where many ranks share
one folder). If there is no progress within the limit of the current phase, every rank writes its stacks to its log, one
rank prints which ranks are late, and all exit with the code `STALLED`, so that a launcher restarts the job.

    phase                                               limit
    steps                                               `training.stall_seconds`, or ten times the longest of the
                                                          last 100 steps, at least 30 s
      while they read data or write logs                7.5 minutes or `training.stall_seconds`
    evaluations and checkpoints, with the step          ten times the longest so far, at least 7.5 minutes or
      after them                                          `training.stall_seconds`
    whatever happens for the first time (start, first   ten minutes or `training.stall_seconds`, whichever is longer
      step, first evaluation); the end
    whatever, while the storage of the run directory    7.5 minutes
      stands still

An NFS server may take five minutes to fail over. The ranks that wait for one that waits for the storage find out by
themselves that it stands still. gloo itself gives up after ten minutes on a rank that does not answer, Horovod after
fifteen on a missing tensor.
"""

import faulthandler
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from hvd_transformer.errors import STALLED
from hvd_transformer.monitoring.heartbeat import Heartbeat
from hvd_transformer.monitoring.stall_report import PeerHeartbeat, stall_report
from hvd_transformer.monitoring.storage import StorageThread

FOLDER = "HVD_TRANSFORMER_FOLDER"  # the launcher's private folder on this host
LOOK_SECONDS = 0.5
# A longer gap between two looks means that this process was suspended (Ctrl-Z, a suspended job): it does not count.
_STOPPED_SECONDS = 5 * LOOK_SECONDS
_FACTOR = 10.0
_STORAGE_SECONDS = 450.0
_SHORTEST = {"step": 30.0, "evaluation": _STORAGE_SECONDS, "checkpoint": _STORAGE_SECONDS}  # seconds
_STORAGE_PHASES = ("data", "log")  # of a step
_ANSWER_SECONDS = 3.0  # in which a storage that does not stand still makes an empty file
_UNKNOWN_SECONDS = 600.0
_SETTLE_SECONDS = 1.5  # for the other ranks to see `beat-late`
_BACKSTOP_SECONDS = 2.0  # past the limit, when faulthandler dumps the stacks by itself
_END_SECONDS = 10.0
_LATE = "beat-late"
# Where no launcher gave each host a folder, all ranks write to one. Together they write at most so many files a second,
# but each often enough for its silence to be seen within 30 s.
_WRITES_PER_SECOND = 64
_MOST_BEAT_SECONDS = 9.0
_SILENT_BEATS = 3  # a rank is silent after this many missing heartbeats
# Ranks look for `beat-late` only when they have made no progress for this long, or for half their limit.
_QUIET_SECONDS = 15.0

log = logging.getLogger(__name__)


class Watchdog:
    """Watches this rank from `start` to `close`. SIGUSR1 makes it write its stacks.

    `stall_seconds`: `training.stall_seconds`, if the user set it.
    """

    def __init__(self, rank: int, size: int, stall_seconds: float | None = None) -> None:
        self.heartbeat = Heartbeat()
        self.rank, self.stall_seconds = rank, stall_seconds
        self._hosts: Sequence[str] = [socket.gethostname()] * size
        self._stacks: IO[Any] = sys.stderr
        self._logs = "no log yet: above"
        folder = os.environ.get(FOLDER)
        self._private = Path(folder) if folder else None
        self._shared: Path | None = None  # the run directory's `logs/`: only the storage thread touches it
        self._storage = StorageThread()
        self._stands_still = self._others_late = False
        self._gone = False  # as this rank ends: the storage of the run directory has not answered
        self._beat_seconds = LOOK_SECONDS  # between two files
        self._looked = self._beaten = self._phase_began = time.monotonic()
        self._quiet, self._signs, self._phase = 0.0, -1, ""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        faulthandler.register(signal.SIGUSR1, self._stacks)
        self._thread.start()

    def use(self, logs: Path | None, hosts: Sequence[str]) -> None:
        """Write stacks to the run directory's `logs/` from now on; heartbeats too, if no launcher gave a folder."""
        self._hosts = hosts
        if logs is None:  # an evaluation: it has no run directory
            return
        self._logs = f"{logs}{os.sep}"
        with suppress(OSError):  # full disk: stacks go to the screen
            self._stacks = (logs / f"rank-{self.rank:03d}.log").open("ab", buffering=0)
        if self._thread.is_alive():
            faulthandler.register(signal.SIGUSR1, self._stacks)
        if self._private is None:  # many ranks may share this folder
            self._beat_seconds = min(max(LOOK_SECONDS, len(hosts) / _WRITES_PER_SECOND), _MOST_BEAT_SECONDS)
        self._shared = logs

    def close(self) -> None:
        """End the thread and remove the heartbeat files."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()
            faulthandler.unregister(signal.SIGUSR1)
        for folder in self._folders():
            self._in(folder, partial((folder / f"beat-{self.rank}").unlink, missing_ok=True))
        if self._stacks is not sys.stderr:
            self._stacks.close()

    def limit(self) -> float:
        """Seconds without a sign of progress that are allowed in the current phase."""
        period, stall = self.heartbeat.period, self.stall_seconds
        if period == "step" and stall is not None:
            return stall
        lasted = list(self.heartbeat.lasted.get(period, ()))
        if not lasted:
            return max(stall or 0.0, _UNKNOWN_SECONDS)
        shortest = _STORAGE_SECONDS if self.heartbeat.place()[0] in _STORAGE_PHASES else _SHORTEST[period]
        return max(stall or shortest, _FACTOR * max(lasted))

    def beat(self, late: bool = False) -> dict[str, Any]:
        """The heartbeat file's content. Times are in seconds, `time` on the host's monotonic clock."""
        heartbeat, (phase, waits_for) = self.heartbeat, self.heartbeat.place()
        return {
            "rank": self.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": time.monotonic(),
            "step": heartbeat.step,
            "ahead": heartbeat.ahead,
            "total_steps": heartbeat.total_steps,
            "phase": phase,
            "waits_for": waits_for,
            "phase_seconds": round(time.monotonic() - self._phase_began, 1),
            "progress_seconds": round(self._quiet, 1),
            "limit_seconds": round(self.limit(), 1),
            "loss": heartbeat.loss,
            "tokens_per_second": heartbeat.tokens_per_second,
            "unit": heartbeat.unit,
            "mfu": heartbeat.mfu,
            "work_seconds": heartbeat.work_seconds,
            "memory": _resident_bytes(),
            "late": late,
        }

    def _run(self) -> None:
        try:
            while not self._end.wait(LOOK_SECONDS):
                self._look()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _look(self) -> None:
        now = time.monotonic()
        passed, self._looked = now - self._looked, now
        if passed > _STOPPED_SECONDS:
            self.heartbeat.forgive(passed)
            passed = LOOK_SECONDS
        signs, (phase, _) = self.heartbeat.signs(), self.heartbeat.place()
        self._quiet = self._quiet + passed if signs == self._signs else 0.0
        if signs != self._signs or phase != self._phase:
            self._phase_began = now
        self._signs, self._phase = signs, phase
        limit = self.limit()
        left = limit - self._quiet
        # If something holds the interpreter lock so that this thread cannot run, the stacks are still written, and the
        # other ranks see an old heartbeat. Past the limit this thread runs, and the storage may stand still: with a
        # dump that cannot be written, the next call would stop the whole process.
        if left >= 0:
            faulthandler.dump_traceback_later(left + _BACKSTOP_SECONDS, file=self._stacks)
        else:
            faulthandler.cancel_dump_traceback_later()
        quiet = self._quiet > min(_QUIET_SECONDS, limit / 2)
        due = now - self._beaten >= self._beat_seconds
        if due:
            self._beaten = now
        if due and self._private is not None:
            self._write(self._private, self.beat())
        share_beat = due and self._private is None
        if self._shared is not None and (share_beat or quiet):
            self._storage.start(partial(self._share, self._shared, self.beat() if share_beat else None, quiet))
        waits = left < 0 and self._waits_for_storage(limit)
        waited = time.monotonic() - now  # for the storage: this process was not suspended
        self._looked += waited
        if self._quiet:
            self._quiet += min(waited, 2 * _ANSWER_SECONDS)
        if (left < 0 and not waits) or (quiet and self._sees_late()):
            self._stall()

    def _share(self, folder: Path, beat: dict[str, Any] | None, look_for_late: bool) -> None:
        """On the storage thread."""
        if beat is not None:
            self._write(folder, beat)
        if look_for_late:
            self._others_late = (folder / _LATE).exists()

    def _waits_for_storage(self, limit: float) -> bool:
        """Whether the storage stands still, or did so until now; then the time before does not count."""
        shared = self._shared
        if shared is None or self._quiet > max(limit, _STORAGE_SECONDS):
            return False
        probe = shared / f"beat-{self.rank}.probe"

        def make() -> None:
            probe.touch()
            probe.unlink()

        stood_still, self._stands_still = self._stands_still, not self._storage.answers(make, _ANSWER_SECONDS)
        if stood_still and not self._stands_still:
            self.heartbeat.forgive(self._quiet)
            self._quiet = 0.0
        return stood_still or self._stands_still

    def _sees_late(self) -> bool:
        """Whether another rank has said that it ends."""
        return self._others_late or (self._private is not None and (self._private / _LATE).exists())

    def _stall(self) -> None:
        # Exits even if a disk or the screen blocks, and, a little later and with code 1, if that holds the interpreter
        # lock.
        with Path(os.devnull).open("wb") as nowhere:
            faulthandler.dump_traceback_later(_END_SECONDS + _BACKSTOP_SECONDS, exit=True, file=nowhere)
            report = threading.Thread(target=self._report_stall, name="stall report", daemon=True)
            report.start()
            report.join(_END_SECONDS)
            os._exit(STALLED)

    def _report_stall(self) -> None:
        """Write the stacks to the log; one rank prints which ranks are late."""
        beat = self.beat(late=True)
        what = "step" if self.heartbeat.period == "step" else "progress"
        if self._private is not None:  # the launcher and the ranks of this host look there
            self._in(self._private, partial(self._write, self._private, beat))
            self._in(self._private, (self._private / _LATE).touch)
        self._log("no %s for %.0f s here; the stacks of all threads:", what, self._quiet)
        if not self._on_storage(partial(faulthandler.dump_traceback, self._stacks)):
            faulthandler.dump_traceback(sys.stderr)
        for folder in self._folders():
            self._in(folder, partial(self._write, folder, beat))
            self._in(folder, (folder / _LATE).touch)
        time.sleep(_SETTLE_SECONDS)
        for folder in self._folders():
            self._in(folder, partial(self._write, folder, beat))
        seen = {**self._read_heartbeats(), self.rank: PeerHeartbeat(beat, 0.0)}
        silent_seconds = _SILENT_BEATS * self._beat_seconds + _SETTLE_SECONDS
        late_beats = {
            rank: found.beat for rank, found in seen.items() if found.beat["late"] and found.age <= silent_seconds
        }
        longest = max(beat["progress_seconds"] for beat in late_beats.values())
        line = f"no {what} for {longest:.0f} s: {stall_report(list(seen.values()), self._hosts, silent_seconds)}"
        self._log("%s", line)
        if self.rank == min(late_beats):
            logs = "above" if self._gone else f"in {self._logs}"
            print(f"hvd-transformer: {line}; stacks are {logs}", file=sys.stderr, flush=True)
        else:
            time.sleep(_SETTLE_SECONDS)  # a launcher may kill the others at the first exit

    def _folders(self) -> list[Path]:
        """Folders for heartbeats: the launcher's, which is on this host, then the run directory's."""
        return [folder for folder in (self._private, self._shared) if folder is not None]

    def _in(self, folder: Path, action: Callable[[], object]) -> None:
        """Do something in a folder, but do not wait long for shared storage. A full disk does not end the training."""
        with suppress(OSError):
            if folder == self._shared:
                self._on_storage(action)
            else:
                action()

    def _on_storage(self, action: Callable[[], object]) -> bool:
        """Whether the run directory's storage took this within some seconds. One that did not is not asked again."""
        if self._shared is None:
            action()
        elif not self._gone:
            self._gone = not self._storage.answers(action, _ANSWER_SECONDS)
        return not self._gone

    def _log(self, message: str, *values: object) -> None:
        self._on_storage(partial(log.error, message, *values))

    def _write(self, folder: Path, beat: dict[str, Any]) -> None:
        file, data = folder / f"beat-{self.rank}", json.dumps(beat).encode()
        aside = file.with_suffix(".tmp")
        try:
            aside.write_bytes(data)
            aside.replace(file)
        except OSError:  # on a full disk there is still room for what is there; readers skip a torn heartbeat
            with suppress(OSError), file.open("r+b") as there:
                there.write(data.ljust(os.fstat(there.fileno()).st_size))

    def _read_heartbeats(self) -> dict[int, PeerHeartbeat]:
        """The newest visible heartbeat of each rank.

        Ages compare file times with that of this rank's own file, because the hosts' clocks may differ.
        """
        newest: dict[int, PeerHeartbeat] = {}

        def read(folder: Path) -> None:
            now = (folder / f"beat-{self.rank}").stat().st_mtime
            for rank in range(len(self._hosts)):
                with suppress(OSError, ValueError), (folder / f"beat-{rank}").open(encoding="utf-8") as file:
                    age = now - os.fstat(file.fileno()).st_mtime
                    if rank not in newest or age < newest[rank].age:
                        newest[rank] = PeerHeartbeat(json.load(file), age)

        for folder in self._folders():
            self._in(folder, partial(read, folder))
        return newest


def _resident_bytes() -> int | None:
    """The memory of this process; None where there is no /proc."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None
