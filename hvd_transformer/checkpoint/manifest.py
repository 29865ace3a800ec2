"""MANIFEST.json: the size and checksums of every file of a checkpoint, to detect damage before loading.

    {"files": {
        "model.safetensors": {"size": 70, "crc32": [[64, "…"], [70, "…"]]},
        "state.json": {"size": 9, "sha256": "…"}
    }}

A file of tensors has a checksum per range, given by its end: the ranks that write it take them while they write, and
the ranks that load it verify different ones.
"""

import errno
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvd_transformer.checkpoint.crc import Range, merge
from hvd_transformer.errors import UserError

NAME = "MANIFEST.json"
SUFFIXES = (".safetensors", ".json", ".jinja")  # chat templates, which transformers runs in a sandbox
# Ranges are joined until they have this many bytes: the manifest does not grow with ranks and layers.
RANGE_BYTES = 64 << 20
_READ_BYTES = 1 << 20
Verify = Callable[[Path], None]
Advance = Callable[[], object]


class DamagedCheckpoint(UserError):
    """A damaged checkpoint; the message names the file and the damage."""


class _Check(NamedTuple):
    """The checksum of the bytes [start, stop) of a file."""

    file: Path
    start: int
    stop: int
    kind: str
    checksum: str


def write(folder: Path, ranges: Mapping[str, Sequence[Range]] | None = None) -> None:
    """Write the manifest of all files in the folder. A file without `ranges` is small, and is read for its checksum.

    CRC-32 for tensors: ranks can combine those of their parts, it detects damage as well as a longer checksum does, and
    it costs a third of SHA-256 (a tenth without instructions for SHA). It is no protection against forgery, and neither
    is any other checksum beside the file.
    """
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.iterdir()):
        entry: dict[str, Any] = {"size": path.stat().st_size}
        files[path.name] = entry
        if ranges is not None and path.name in ranges:
            joined = merge(ranges[path.name], RANGE_BYTES)
            ends = [0, *(own.stop for own in joined)]
            assert [own.start for own in joined] == ends[:-1] and ends[-1] == entry["size"], (
                f"{path}: not written whole"
            )
            entry["crc32"] = [[own.stop, f"{own.crc:08x}"] for own in joined]
        else:
            entry["sha256"] = _sha256(path, 0, entry["size"])
    (folder / NAME).write_text(json.dumps({"files": files}, indent=1), encoding="utf-8")


def unreadable(file: Path, error: OSError) -> UserError:
    """What it means that a file of a checkpoint, or its folder, cannot be read: damage if the disk fails or it is not
    there; else something, such as permissions, that says nothing about the checkpoint."""
    if error.errno in (errno.EIO, errno.ENOENT):
        return DamagedCheckpoint(f"{file}: damaged: {error.strerror}")
    return UserError(f"{file}: cannot be read: {error.strerror}")


def verify(
    folder: Path,
    index: int = 0,
    count: int = 1,
    unread: tuple[str, ...] = (),
    advance: Advance | None = None,
) -> None:
    """Raise `DamagedCheckpoint` unless the folder has exactly the listed files, undamaged and in safe formats.

    Each file is read once, from its start to its end; of `count` ranks, each reads an equal part. Files whose names
    begin as one of `unread` are not looked at. `advance` is called after every MB.

    Raises `UserError` if a file cannot be read for another reason.
    """
    try:
        _verify(folder, index, count, unread, advance)
    except OSError as error:
        raise unreadable(Path(error.filename or folder), error) from None


def _verify(folder: Path, index: int, count: int, unread: tuple[str, ...], advance: Advance | None) -> None:
    if not folder.is_dir():
        raise DamagedCheckpoint(f"{folder}: no such checkpoint folder")
    try:
        files = json.loads((folder / NAME).read_text(encoding="utf-8"))["files"]
        expected = {str(name): (int(entry["size"]), _checks(folder / name, entry)) for name, entry in files.items()}
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{folder}: no checkpoint: {NAME} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{folder / NAME}: damaged: {error}") from None
    for path in sorted(folder.iterdir()):
        if path.suffix not in SUFFIXES:
            raise DamagedCheckpoint(
                f"{path}: not a file of a checkpoint; only {', '.join(SUFFIXES)} files are ever read, never pickles"
            )
        if path.name not in expected and path.name != NAME:
            raise DamagedCheckpoint(f"{path}: not in {NAME}")
    read = {name: entry for name, entry in expected.items() if not name.startswith(unread)}
    for name, (size, _) in read.items():
        path = folder / name
        if Path(name).name != name or not path.is_file():
            raise DamagedCheckpoint(f"{path}: missing")
        if path.stat().st_size != size:
            raise DamagedCheckpoint(f"{path}: truncated: {path.stat().st_size} bytes of {size}")
    for check in _share([check for _, checks in read.values() for check in checks], index, count):
        if _KINDS[check.kind](check.file, check.start, check.stop, advance) != check.checksum:
            raise DamagedCheckpoint(
                f"{check.file}: damaged: the checksum of bytes {check.start} to {check.stop} is not the one in {NAME}"
            )


def _checks(file: Path, entry: Mapping[str, Any]) -> list[_Check]:
    """The checksums of a file's entry. Raises `ValueError` and the like if they are not of the whole file."""
    size = entry["size"]
    if "crc32" not in entry:
        return [_Check(file, 0, size, "sha256", str(entry["sha256"]))]
    stops = [stop for stop, _ in entry["crc32"]]
    starts = [0, *stops[:-1]]
    if not all(start < stop for start, stop in zip(starts, stops, strict=True)) or stops[-1:] != [size]:
        raise ValueError(f"the ranges of {file.name} do not add up to its size")
    return [
        _Check(file, start, stop, "crc32", str(checksum))
        for start, (stop, checksum) in zip(starts, entry["crc32"], strict=True)
    ]


def _share(checks: Sequence[_Check], index: int, count: int) -> Iterator[_Check]:
    """One rank's part of the checks: equal parts by bytes, in order."""
    total, before = sum(check.stop - check.start for check in checks), 0
    for check in checks:
        if min(count * before // max(1, total), count - 1) == index:
            yield check
        before += check.stop - check.start


def _crc32(file: Path, start: int, stop: int, advance: Advance | None) -> str:
    crc = 0
    for block in _blocks(file, start, stop, advance):
        crc = zlib.crc32(block, crc)
    return f"{crc:08x}"


def _sha256(file: Path, start: int, stop: int, advance: Advance | None = None) -> str:
    digest = hashlib.sha256()
    for block in _blocks(file, start, stop, advance):
        digest.update(block)
    return digest.hexdigest()


_KINDS = {"crc32": _crc32, "sha256": _sha256}


def _blocks(file: Path, start: int, stop: int, advance: Advance | None) -> Iterator[bytes]:
    with file.open("rb", buffering=0) as opened:
        opened.seek(start)
        while start < stop and (block := opened.read(min(_READ_BYTES, stop - start))):
            start += len(block)
            yield block
            if advance is not None:
                advance()
