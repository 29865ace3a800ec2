"""The metrics of a run on disk: `metrics.jsonl` (one JSON object per line) and TensorBoard event files."""

import io
import json
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeGuard

from hvd_transformer import atomic
from hvd_transformer.errors import UserError

# Records kept in memory while the disk is full; later ones are dropped.
_MOST_WAITING = 10_000


class MetricsLog:
    """Append to `metrics.jsonl` and `tensorboard/` of a run directory; used only by rank 0.

    Lines after `resume_step` are removed: a killed process wrote them for steps that this one repeats. A full disk is
    reported once through `warn`; the lines stay in memory until there is space.
    """

    def __init__(self, folder: Path, resume_step: int, warn: Callable[[str], None]) -> None:
        self._path = folder / "metrics.jsonl"
        self._resume_step = resume_step
        self._warn = warn
        self._warned = False
        _cut_after(self._path, resume_step)
        self._lines = _AppendedFile(self._path)
        self._lines.append(b"")  # created at once, as it marks the folder as a run directory
        self._events: _AppendedFile | None = None
        self._event_steps: dict[str, int] = {}

    def write(self, step: int, **values: float | int) -> None:
        """Write one line. NaN and infinity, which JSON lacks, become null."""
        line = {"step": step} | {key: value if math.isfinite(value) else None for key, value in values.items()}
        errors = [self._lines.append(json.dumps(line, allow_nan=False).encode() + b"\n")]
        if due := {key: value for key, value in values.items() if self._due(key, step)}:
            errors.append(self._append_event(step, due))
        self._report(errors)

    def close(self) -> None:
        """Try once more to write pending lines, then close the files."""
        files = [file for file in (self._lines, self._events) if file is not None]
        self._report([file.append(b"") for file in files])
        for file in files:
            file.close()

    def _due(self, key: str, step: int) -> bool:
        """Tell whether TensorBoard gets this point.

        It gets all of the first 5,000 steps, then points at least 1/5,000 of the current step apart, so that the event
        file of a long run grows logarithmically. TensorBoard itself draws 1,000 points per curve.
        """
        last = self._event_steps.get(key)
        if last is not None and step - last < step // 5000:
            return False
        self._event_steps[key] = step
        return True

    def _append_event(self, step: int, values: Mapping[str, float]) -> OSError | None:
        """Write one TensorBoard record with all `values`. Returns the error instead of raising it."""
        # Imported here to save 0.1 s at start-up.
        from tensorboard.compat.proto.event_pb2 import SessionLog  # type: ignore[import-untyped]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        if self._events is None:
            # TensorBoard recognizes this name; names sort by time.
            name = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}"
            self._events = _AppendedFile(self._path.parent / "tensorboard" / name)
            # TensorBoard discards earlier files' values from the first step of this one on.
            start = _event(step=self._resume_step + 1, session_log=SessionLog(status=SessionLog.START))
            self._events.append(_event(file_version="brain.Event:2") + start)
        points = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        return self._events.append(_event(step=step, summary=Summary(value=points)))

    def _report(self, errors: list[OSError | None]) -> None:
        error = next((error for error in errors if error is not None), None)
        if error is not None and not self._warned:
            self._warn(
                f"{self._path}: cannot write: {error.strerror}. Training continues; "
                "the metrics stay in memory until there is space."
            )
        self._warned = error is not None


class _AppendedFile:
    """A file that grows by whole records: a record that did not fit is removed and retried later."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._size = 0  # of whole records
        self._torn = False
        self._waiting: list[bytes] = []

    def append(self, record: bytes) -> OSError | None:
        """Write pending records and `record`. Returns the error instead of raising it."""
        if record and len(self._waiting) < _MOST_WAITING:
            self._waiting.append(record)
        data = b"".join(self._waiting)
        try:
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
        except OSError as error:
            if self._descriptor is not None:  # remove a half-written record, now or at the next call
                self._torn = True
                with suppress(OSError):
                    os.ftruncate(self._descriptor, self._size)
                    self._torn = False
            return error
        self._size += len(data)
        self._waiting.clear()
        return None

    def close(self) -> None:
        if self._descriptor is not None:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


def _cut_after(path: Path, step: int) -> None:
    """Remove the lines after `step`, and incomplete lines."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    lines = [line for line in data.splitlines(keepends=True) if line.endswith(b"\n")]
    kept = b"".join(line for line in lines if (row := _row(line)) and row["step"] <= step)
    if kept == data:
        return
    try:
        atomic.write_bytes(path, kept)
    except OSError:
        # No space for a second file. What is removed is nearly always the end, and truncating needs no space.
        if not data.startswith(kept):
            raise
        os.truncate(path, len(kept))


def _event(**fields: Any) -> bytes:
    """One record of an event file."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

    buffer = io.BytesIO()
    RecordWriter(buffer).write(Event(wall_time=time.time(), **fields).SerializeToString())
    return buffer.getvalue()


def read_rows(run: Path) -> list[dict[str, Any]]:
    """The complete lines of metrics.jsonl; a run in progress may be writing the last one. Raises `UserError`."""
    path = run / "metrics.jsonl"
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        reason = "no metrics.jsonl in it" if run.is_dir() else (error.strerror or "").lower()
        raise UserError(f"{run}: not a run directory: {reason}") from None
    return [row for row in map(_row, lines) if row is not None]


def _row(line: bytes) -> dict[str, Any] | None:
    """A line of metrics.jsonl; None for one that is incomplete or not ours."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and is_number(row.get("step")) else None


def read_summary(path: Path) -> dict[str, Any]:
    """The content of summary.json; empty while the run is in progress."""
    try:
        summary = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def is_number(value: object) -> TypeGuard[int | float]:
    """Tell whether a value of metrics.jsonl can be drawn: null, text and booleans cannot."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
