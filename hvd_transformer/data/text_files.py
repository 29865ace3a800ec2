"""Byte ranges of text files, and reading them in pieces of bounded size."""

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hvd_transformer.errors import UserError

PIECE_BYTES = 4 * 2**20


@dataclass(frozen=True)
class TextSpan:
    """Bytes `start` to `end` of a UTF-8 file."""

    path: Path
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Piece:
    """Some bytes of a file, and where they were: `data[0]` is the file's byte `start`."""

    path: Path
    start: int
    data: bytes

    def text(self) -> str:
        """The piece as text. Raises `UserError` with the offset in the whole file."""
        try:
            return self.data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self.path}: no valid UTF-8 at byte {self.start + error.start} "
                f"({error.reason}); data must be UTF-8 text"
            ) from None


def read_pieces(span: TextSpan, piece_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """The span in order, in pieces of at most `piece_bytes`.

    A piece ends before white space, at a line's end where it can (see `_cut`): tokenizing the pieces one by
    one then gives what tokenizing the whole text would. The cuts depend on the text alone, so that results
    do not depend on who works on which piece.
    """
    position = span.start
    rest = b""
    with span.path.open("rb") as file:
        file.seek(span.start)
        while position + len(rest) < span.end:
            wanted = min(piece_bytes - len(rest), span.end - position - len(rest))
            more = file.read(wanted)
            if len(more) < wanted:
                raise UserError(f"{span.path}: became shorter while it was read")
            rest += more
            cut = len(rest) if position + len(rest) == span.end else _cut(rest)
            yield Piece(span.path, position, rest[:cut])
            position += cut
            rest = rest[cut:]


def _cut(data: bytes) -> int:
    """Where to end a piece that starts with `data`: in its second half, and never within a character.

    Best before a line feed that follows no other white space, else before such a space, else (one word of
    megabytes) anywhere. No token of the byte-pair tokenizer's pattern goes from a character to white space
    behind it, and none of basic_english does but `<br />`.
    """
    for space in (b"\n", b" "):
        cut = len(data)
        for _ in range(1000):  # more is a text of blanks: no good place
            cut = data.rfind(space, len(data) // 2, cut)
            if cut <= 0:
                break
            before = data[max(cut - 4, 0) : cut].decode("utf-8", "ignore")
            if before and not before[-1].isspace() and before[-3:].lower() != "<br":
                return cut
    for back in range(1, 4):
        if back < len(data) and data[-back] >= 0xC0:  # a character's first byte: it may go on behind the end
            return len(data) - back
    return len(data)


def boundary(path: Path, target: int, reach: int = 2**20) -> int:
    """Where to cut a text at or after byte `target`: the first line boundary.

    Where no line ends within `reach` bytes (text8 is one line of 100 MB): behind the first space, else at the
    first whole character.
    """
    if target <= 0:
        return 0
    with path.open("rb") as file:
        file.seek(target - 1)
        data = file.read(reach)
    for mark in (b"\n", b" "):
        found = data.find(mark)
        if found >= 0:
            return target + found
    rest = data[1:]
    return target + next((place for place, byte in enumerate(rest) if byte & 0xC0 != 0x80), len(rest))


def read_lines(path: Path) -> Iterator[str]:
    """Without line ends. Lines end at line feeds alone, as tools that align texts count them.

    Raises `UserError` with the line that is no UTF-8.
    """
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield line.rstrip(b"\r\n").decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}, line {number}: no UTF-8: {error.reason}") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}, after line {number}: damaged: {error}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
