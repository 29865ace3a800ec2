"""What an offline run of Weights & Biases has stored: its .wandb file, in wandb's own messages.

Records are framed as in LevelDB's log: blocks of 32 KiB, and in each parts with a checksum, a length and a kind. The
versions of wandb without a Python core have no reader of their own in Python.
"""

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _HEADER = 32 * 1024, struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def parts(data: bytes) -> Iterator[tuple[int, bytes]]:
    assert data[:4] == b":W&B"
    place = 7  # of the file's own header
    while place + _HEADER.size <= len(data):
        if _BLOCK - place % _BLOCK < _HEADER.size:  # padding
            place += _BLOCK - place % _BLOCK
            continue
        checksum, length, kind = _HEADER.unpack_from(data, place)
        body = data[place + _HEADER.size :][:length]
        assert len(body) == length and zlib.crc32(bytes([kind]) + body) == checksum
        yield kind, body
        place += _HEADER.size + length


def records(file: Path) -> Iterator[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    whole = b""
    for kind, body in parts(file.read_bytes()):
        assert (not whole) == (kind in (_FULL, _FIRST))
        whole += body
        if kind in (_FULL, _LAST):
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def history(file: Path) -> list[dict[str, Any]]:
    """The rows that were logged, in order, each with `_step`."""
    rows = []
    for record in records(file):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def summary(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for record in records(file):
        if record.WhichOneof("record_type") == "summary":
            for item in record.summary.update:
                found[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
    return found


def config(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for record in records(file):
        if (kind := record.WhichOneof("record_type")) in ("run", "config"):
            for item in (record.run.config if kind == "run" else record.config).update:
                found[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
    return found
