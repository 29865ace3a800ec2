"""The bytes of a TensorBoard event file.

Not SummaryWriter: its thread loses up to two minutes of numbers with a killed process, and prints a
traceback and leaves a torn record (all after it unreadable) when the disk is full. Here each line of
numbers is one record, written by whoever holds the file.
"""

import io
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


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
