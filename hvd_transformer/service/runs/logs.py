"""Pages of the logs of a run, by byte offset: a log may have any size and grow meanwhile."""

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from hvd_transformer.errors import UserError
from hvd_transformer.service.runs.plain_files import list_folder, open_plain

PAGE_BYTES = 1 << 16
_MOST_BYTES = 1 << 20
_RANK = re.compile(r"[0-9]{1,6}")
_FILE = re.compile(r"rank-([0-9]{3,6})\.log|(launch)\.log")
_UNFINISHED_SECONDS = 2.0  # for which the end of a last line is waited for
# Colours and movements of the cursor, and other characters that a terminal acts upon.
_ESCAPES = re.compile(r"\x1b\[[0-9;:<=>?]*[ -/]*[@-~]|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class LogPage:
    """The lines in the bytes [offset, next) of a log that has `size` bytes now."""

    text: str
    offset: int
    next: int
    size: int


def log_page(run: Path, which: str, offset: int = 0, limit: int = PAGE_BYTES, tail: int | None = None) -> LogPage:
    """A page of the log of a rank ("0") or of the launcher ("launch"): whole lines, about `limit` bytes of them.

    It begins at `offset`, or with the first line of the last `tail` bytes. An offset beyond the end means that the log
    was replaced by a shorter one: then the page begins at 0. Raises `UserError`.
    """
    name = _name(which)
    limit = min(max(limit, 1), _MOST_BYTES)
    if offset < 0 or (tail is not None and tail < 0):
        raise UserError(f"log of {which}: offset and tail must not be negative")
    try:
        file = open_plain(run / "logs" / name)
    except FileNotFoundError:
        raise UserError(f"{run}: has no log {name}; logs: {', '.join(log_names(run)) or 'none yet'}") from None
    except OSError as error:
        raise UserError(f"{run / 'logs' / name}: cannot be read: {error.strerror or error}") from None
    try:
        status = os.fstat(file)
        if tail is not None:
            offset = _line_start(file, max(0, status.st_size - tail), status.st_size)
        elif offset > status.st_size:
            offset = 0
        data = os.pread(file, limit, offset)
    except OSError as error:
        raise UserError(f"{run / 'logs' / name}: cannot be read: {error.strerror or error}") from None
    finally:
        os.close(file)
    at_end = offset + len(data) >= status.st_size
    data = data[: _cut(data, at_end, finished=time.time() - status.st_mtime > _UNFINISHED_SECONDS)]
    return LogPage(_readable(data), offset, offset + len(data), max(status.st_size, offset + len(data)))


def log_names(run: Path) -> list[str]:
    """Which logs there are: "launch", and the numbers of ranks in order."""
    try:
        found = [match for name in list_folder(run / "logs") if (match := _FILE.fullmatch(name))]
    except OSError:
        return []
    ranks = sorted(int(match[1]) for match in found if match[1])
    return [match[2] for match in found if match[2]] + [str(rank) for rank in ranks]


def _name(which: str) -> str:
    if which == "launch":
        return "launch.log"
    if not _RANK.fullmatch(which):
        raise UserError(f"log of {which[:40]!r}: must be the number of a rank, or launch")
    return f"rank-{int(which):03d}.log"


def _line_start(file: int, offset: int, size: int) -> int:
    """The offset of the first line that begins there or later; `offset` itself if none does within `_MOST_BYTES`."""
    if offset == 0:
        return 0
    before = os.pread(file, min(_MOST_BYTES, size - offset + 1), offset - 1)
    newline = before.find(b"\n")
    return offset if newline < 0 or offset + newline == size else offset + newline


def _cut(data: bytes, at_end: bool, finished: bool) -> int:
    """The length of the whole lines. A line that is longer than the page is given in parts."""
    if at_end and finished:
        return len(data)
    end = data.rfind(b"\n") + 1
    if end or at_end:
        return end
    end = len(data)
    while end > max(1, len(data) - 3) and data[end - 1] & 0xC0 == 0x80:  # not within a character
        end -= 1
    return end - 1 if end > 1 and data[end - 1] >= 0xC0 else len(data)


def _readable(data: bytes) -> str:
    """Text without what only a terminal understands; of a progress bar that was drawn over itself, the last state."""
    text = _ESCAPES.sub("", data.decode(errors="replace").replace("\r\n", "\n"))
    lines = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", "\n".join(lines))
