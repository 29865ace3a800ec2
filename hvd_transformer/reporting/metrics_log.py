"""The run's numbers on disk: `metrics.jsonl`, one JSON object a line, and the same for TensorBoard."""

import io
import json
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvd_transformer import atomic
from hvd_transformer.errors import UserError
from hvd_transformer.reporting import charts

# Records kept in memory while the disk is full; later ones are lost.
_MOST_WAITING = 10_000


class MetricsLog:
    """Appends to `metrics.jsonl` and `tensorboard/` of a run directory; used by rank 0 alone.

    What was written after `resume_step` belongs to steps that a killed process lost and this one takes
    again: it is removed. A full disk is reported once through `warn`; the lines wait in memory until there
    is room.
    """

    def __init__(self, folder: Path, resume_step: int, warn: Callable[[str], None]) -> None:
        self._path = folder / "metrics.jsonl"
        self._resume_step = resume_step
        self._warn = warn
        self._warned = False
        _cut_after(self._path, resume_step)
        self._lines = _AppendedFile(self._path)
        self._lines.append(b"")  # there from the start, so that the folder is known for a run directory
        self._events: _AppendedFile | None = None
        self._event_steps: dict[str, int] = {}

    def write(self, step: int, **values: float | int) -> None:
        """One line. NaN and infinities, which JSON does not have, become null."""
        line = {"step": step} | {key: value if math.isfinite(value) else None for key, value in values.items()}
        errors = [self._lines.append(json.dumps(line, allow_nan=False).encode() + b"\n")]
        if due := {key: value for key, value in values.items() if self._due(key, step)}:
            errors.append(self._event_file().append(scalars(step, due)))
        self._report(errors)

    def close(self) -> None:
        """Try once more what still waits, then close the files."""
        files = [file for file in (self._lines, self._events) if file is not None]
        self._report([file.append(b"") for file in files])
        for file in files:
            file.close()

    def _due(self, key: str, step: int) -> bool:
        """Whether TensorBoard gets this point.

        All of the first 5,000 steps; then no two closer than 1/5,000 of the steps so far, so that a long
        run's event file grows with the logarithm of its steps. TensorBoard itself draws 1,000 points a curve.
        """
        last = self._event_steps.get(key)
        if last is not None and step - last < step // 5000:
            return False
        self._event_steps[key] = step
        return True

    def _event_file(self) -> "_AppendedFile":
        if self._events is None:
            self._events = _AppendedFile(new_path(self._path.parent / "tensorboard"))
            self._events.append(header(self._resume_step + 1))
        return self._events

    def _report(self, errors: list[OSError | None]) -> None:
        error = next((error for error in errors if error is not None), None)
        if error is not None and not self._warned:
            self._warn(
                f"{self._path}: cannot write: {error.strerror}. Training goes on; "
                "the numbers wait in memory until there is room."
            )
        self._warned = error is not None


class _AppendedFile:
    """A file that grows by whole records: one that did not fit is taken back, and tried again later."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._size = 0  # of whole records
        self._torn = False
        self._waiting: list[bytes] = []

    def append(self, record: bytes) -> OSError | None:
        """Write what waits and `record`. Returns what went wrong instead of raising it."""
        if record and len(self._waiting) < _MOST_WAITING:
            self._waiting.append(record)
        try:
            data = b"".join(self._waiting)
            self._write(data)
        except OSError as error:
            self._take_back()
            return error
        self._size += len(data)
        self._waiting.clear()
        return None

    def close(self) -> None:
        if self._descriptor is not None:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None

    def _write(self, data: bytes) -> None:
        if self._descriptor is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            self._size = os.fstat(self._descriptor).st_size
        if self._torn:
            os.ftruncate(self._descriptor, self._size)
            self._torn = False
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]

    def _take_back(self) -> None:
        """Cut a half-written record off; where even that fails, the next try cuts it first."""
        if self._descriptor is not None:
            self._torn = True
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
                self._torn = False


def _cut_after(path: Path, step: int) -> None:
    """Remove the lines after `step`, and those that are torn."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    lines = data.splitlines(keepends=True)
    kept = b"".join(line for line in lines if line.endswith(b"\n") and _step_of(line) <= step)
    if kept == data:
        return
    try:
        atomic.write_bytes(path, kept)
    except OSError:
        # No room for a second file: what goes is nearly always the end, and cutting that off needs none.
        if not data.startswith(kept):
            raise
        os.truncate(path, len(kept))


def _step_of(line: bytes) -> float:
    """The line's step; infinite for a line that is none of ours."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
    return step if isinstance(step, int) else math.inf


def new_path(folder: Path) -> Path:
    """A name that TensorBoard takes for an event file; names sort by time."""
    return folder / f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}"


def header(first_step: int) -> bytes:
    """The file's beginning. TensorBoard drops what earlier files say about `first_step` and later."""
    from tensorboard.compat.proto.event_pb2 import SessionLog  # type: ignore[import-untyped]

    return _record(file_version="brain.Event:2") + _record(
        step=first_step, session_log=SessionLog(status=SessionLog.START)
    )


def scalars(step: int, values: Mapping[str, float]) -> bytes:
    """One record with all of `values` at `step`."""
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

    points = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
    return _record(step=step, summary=Summary(value=points))


def _record(**fields: Any) -> bytes:
    # Imported here: 0.1 s that a start-up does not need.
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

    buffer = io.BytesIO()
    RecordWriter(buffer).write(Event(wall_time=time.time(), **fields).SerializeToString())
    return buffer.getvalue()


def _read_rows(run: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl; the last may be half-written by a run that still goes."""
    path = run / "metrics.jsonl"
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        reason = "no metrics.jsonl in it" if run.is_dir() else (error.strerror or "").lower()
        raise UserError(f"{run}: not a run directory: {reason}") from None
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and charts.is_number(row.get("step")):
            rows.append(row)
    return rows


def _read_summary(path: Path) -> dict[str, Any]:
    """Empty while the run goes on."""
    try:
        summary = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}
