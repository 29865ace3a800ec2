"""The process of one tracker: follows metrics.jsonl and sends its rows, at the pace of the tracker's server.

    rank 0    starts it → "ready" or "refused …" → {"follow": job} → trains …           → {"end": …} → waits, bounded
    process   check()                              open(), log() the rows as they come    last rows, close()

The file is the queue: a server that is slow or away costs neither memory nor time of training, and no row is lost. What
the tracker has already is asked of it (`open`), so that after a kill, or a request that failed half-way, each step is
there once: a resumed run repeats its steps bit for bit, and steps that the tracker missed are still in the file. When
rank 0 is gone, the process ends the run as failed and leaves.
"""

import fcntl
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from hvd_transformer.reporting.step_lines import is_number, read_line
from hvd_transformer.reporting.trackers.mlflow_tracker import MlflowTracker
from hvd_transformer.reporting.trackers.tracker import Job, Refused, Row, Tracker, without_passwords
from hvd_transformer.reporting.trackers.trackio_tracker import TrackioTracker
from hvd_transformer.reporting.trackers.wandb_tracker import WandbTracker

TRACKERS: dict[str, Callable[[], Tracker]] = {"wandb": WandbTracker, "mlflow": MlflowTracker, "trackio": TrackioTracker}

_LOOK_SECONDS = 1.0  # between two looks at metrics.jsonl
_MOST_RETRY_SECONDS = 60.0
_LEAVE_SECONDS = 20.0  # when rank 0 is gone
_MOST_BYTES = 2**20  # read at once


class Rows:
    """The rows of metrics.jsonl after a step. A step's lines (training, evaluation) are one row, whole when the next
    step begins."""

    def __init__(self, path: Path, after: int) -> None:
        self._path, self._after, self._offset = path, after, 0
        self._open: tuple[int, dict[str, float]] | None = None

    def take(self, *, last: bool = False) -> list[Row]:
        """Rows that are whole, of at most 1 MiB of the file; empty: no more for now. `last`: no line will follow."""
        rows: list[Row] = []
        while not rows:  # a part of the file may have only what the tracker has already
            before = self._offset
            for line in self._lines():
                self._add(line, rows)
            if self._offset == before:
                break
        if last and not rows and self._open is not None:
            rows, self._after, self._open = [self._open], self._open[0], None
        return rows

    def _add(self, line: bytes, rows: list[Row]) -> None:
        row = read_line(line)
        if row is None or row["step"] <= self._after:
            return
        step = int(row.pop("step"))
        if self._open is not None and self._open[0] != step:
            rows.append(self._open)
            self._after, self._open = self._open[0], None
        values = {} if self._open is None else self._open[1]
        self._open = step, values | {key: value for key, value in row.items() if is_number(value)}

    def _lines(self) -> Iterator[bytes]:
        with self._path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < self._offset:  # lines that did not fit on the disk were removed
                self._offset, self._open = 0, None
            file.seek(self._offset)
            data = file.read(_MOST_BYTES)
        end = data.rfind(b"\n") + 1
        self._offset += end
        return iter(data[:end].splitlines())


class TrackerProcess:
    """Sends the rows of one job until it ends. A failure is told once; then it tries again, ever more seldom."""

    def __init__(self, tracker: Tracker, job: Job, tell: Callable[[str], None]) -> None:
        self._tracker, self._job, self._tell = tracker, job, tell
        self._rows: Rows | None = None  # None: not open
        self._failures = 0

    def send(self) -> float:
        """Send what is there. Returns the seconds to wait until the next call."""
        return self._try(self._send) or _LOOK_SECONDS

    def end(self, status: str, summary: dict[str, Any]) -> None:
        """Send the rest and close the run, however often that fails: whoever waits sets the limit."""
        pause = threading.Event()
        while seconds := self._try(lambda: self._end(status, summary)):
            pause.wait(min(seconds, _LOOK_SECONDS * 5))

    def _try(self, action: Callable[[], None]) -> float:
        """Do it; returns 0, or after a failure the seconds to wait."""
        try:
            action()
        except Exception as error:  # whatever a library may raise
            if self._failures == 0:
                reason = without_passwords(" ".join(str(error).split())) or type(error).__name__
                self._tell(f"{reason[:300]}; training continues, and the steps are sent later")
            self._failures += 1
            self._rows = None  # asks the tracker again what it has
            return min(_LOOK_SECONDS * 2.0**self._failures, _MOST_RETRY_SECONDS)
        if self._failures:
            self._failures = 0
            self._tell("logs again")
        return 0.0

    def _send(self) -> None:
        rows = self._opened()
        while found := rows.take():
            self._tracker.log(found)

    def _end(self, status: str, summary: dict[str, Any]) -> None:
        self._send()
        # A stopped run may still evaluate its last step when it resumes.
        if status == "finished" and (found := self._opened().take(last=True)):
            self._tracker.log(found)
        self._tracker.close(status, summary)

    def _opened(self) -> Rows:
        if self._rows is None:
            after = self._tracker.open(self._job)
            self._rows = Rows(Path(self._job.folder) / "metrics.jsonl", after)
        return self._rows


def main() -> None:
    """`python -m … NAME`, started by `processes.Trackers`."""
    # Slurm signals every process of a job; rank 0 says when this one ends.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # What libraries print must not be taken for ours.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)

    def say(word: str, text: str = "") -> None:
        with_text = f"{word} {text}".strip()
        try:
            out.write(" ".join(with_text.splitlines()) + "\n")
        except OSError:  # rank 0 is gone
            os._exit(1)

    os.nice(10)  # the ranks first, where cores are few
    name = sys.argv[1]
    orders: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_read_orders, args=(sys.stdin, orders), daemon=True).start()
    tracker = TRACKERS[name]()
    try:
        tracker.check()
    except Refused as error:
        say("refused", str(error))
        return
    except Exception as error:  # broken packages fail in many ways
        say("refused", without_passwords(f"cannot be used: {type(error).__name__}: {error}"))
        return
    say("ready")
    job = orders.get().get("follow")
    if job is None:  # the job did not start
        return
    _log_to(Path(job["folder"]) / "logs" / f"tracker-{name}.log")
    process = TrackerProcess(tracker, Job(**job), lambda text: say("told", f"{name}: {text}"))
    while True:
        seconds = process.send()
        try:
            order = orders.get(timeout=seconds)
        except queue.Empty:
            continue
        process.end(**order["end"])
        say("done")
        return


def _read_orders(stream: TextIO, orders: "queue.Queue[dict[str, Any]]") -> None:
    """Each line is an order. When rank 0 is gone the run has failed; a server that hangs must not keep this process."""
    for line in stream:
        orders.put(json.loads(line))
    timer = threading.Timer(_LEAVE_SECONDS, os._exit, (1,))
    timer.daemon = True
    timer.start()
    orders.put({"end": {"status": "failed", "summary": {}}})


def _log_to(file: Path) -> None:
    """What libraries print goes there. The lock of the file waits for the process of a start before, which may be
    sending its last rows; children that have inherited the descriptor (wandb-core) hold it, too."""
    try:
        number = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)  # addresses may hold passwords
    except OSError:
        return
    deadline = time.monotonic() + 2 * _LEAVE_SECONDS
    while time.monotonic() < deadline:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(_LOOK_SECONDS / 4)
        except OSError:  # a file system without locks
            break
    os.dup2(number, 1)
    os.dup2(number, 2)
    os.close(number)


if __name__ == "__main__":
    main()
