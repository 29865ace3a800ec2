"""The metrics of a run on disk: `metrics.jsonl` (one JSON object per line) and TensorBoard event files."""

import io
import json
import math
import os
import socket
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hvd_transformer.errors import UserError
from hvd_transformer.reporting.step_lines import AppendedFile, cut_after, is_number, read_line

_EVALUATED = "valid_loss"  # in the lines of evaluations


class MetricsLog:
    """Append to `metrics.jsonl` and `tensorboard/` of a run directory; used only by rank 0.

    Lines after `resume_step` are removed: a killed process wrote them for steps that this one repeats. With `evaluates`
    it evaluates `resume_step` again, and the line of that evaluation is removed, too. A full disk is reported once
    through `warn`; the lines stay in memory until there is space.
    """

    def __init__(self, folder: Path, resume_step: int, warn: Callable[[str], None], *, evaluates: bool = False) -> None:
        self._path = folder / "metrics.jsonl"
        self._resume_step = resume_step
        self._warn = warn
        self._warned = False
        cut_after(
            self._path,
            lambda row: (
                row["step"] <= resume_step and not (evaluates and row["step"] == resume_step and _EVALUATED in row)
            ),
        )
        self._lines = AppendedFile(self._path)
        self._lines.append(b"")  # created at once, as it marks the folder as a run directory
        self._events: AppendedFile | None = None
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
            self._events = AppendedFile(self._path.parent / "tensorboard" / name)
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


def _event(**fields: Any) -> bytes:
    """One record of an event file."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

    buffer = io.BytesIO()
    RecordWriter(buffer).write(Event(wall_time=time.time(), **fields).SerializeToString())
    return buffer.getvalue()


def read_rows(run: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of metrics.jsonl; a run in progress may be writing the last one. Raises `UserError`."""
    try:
        file = (run / "metrics.jsonl").open("rb")
    except OSError as error:
        reason = "no metrics.jsonl in it" if run.is_dir() else (error.strerror or "").lower()
        raise UserError(f"{run}: not a run directory: {reason}") from None

    def rows() -> Iterator[dict[str, Any]]:
        with file:
            for line in file:
                if (row := read_line(line)) is not None:
                    yield row

    return rows()


class Columns:
    """The numbers of many rows by key, in the order of their first rows: 16 bytes each."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self.newest: dict[str, Any] = {}  # of each key the last value, if there is one
        self._curves: dict[str, tuple[array[float], array[float]]] = {}
        for row in rows:
            step = row["step"]
            for key, value in row.items():
                if key not in self._curves:
                    self._curves[key] = array("d"), array("d")
                if is_number(value):
                    steps, values = self._curves[key]
                    steps.append(step)
                    values.append(value)
                if value is not None:
                    self.newest[key] = value

    @property
    def keys(self) -> list[str]:
        """All keys, also those without any number."""
        return list(self._curves)

    def curve(self, key: str) -> tuple["array[float]", "array[float]"]:
        """The steps at which a key has a number, and the numbers."""
        return self._curves.get(key, (array("d"), array("d")))


def read_summary(path: Path) -> dict[str, Any]:
    """The content of summary.json; empty while the run is in progress."""
    try:
        summary = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}
