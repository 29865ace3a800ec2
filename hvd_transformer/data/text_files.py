"""Text files: parts of them, read in pieces of bounded size or line by line."""

import gzip
import json
import sys
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from hvd_transformer.data.compressed import blocks, opened
from hvd_transformer.errors import UserError

PIECE_BYTES = 4 * 2**20
_NO_OBJECT = "must be a JSON object with the column"


@dataclass(frozen=True)
class TextSpan:
    """Bytes `start` to `end` - 1 of a UTF-8 text, decompressed if the file is compressed: running text, or with a
    `column` JSON lines, each with a document in that column. Of a Parquet file rows `start` to `end` - 1.

    `end` is None for all up to an end that only reading the file tells.
    """

    path: Path
    start: int
    end: int | None
    column: str | None = None

    @property
    def size(self) -> int:
        """Bytes from the start to the end of the span, or of the file."""
        return (self.path.stat().st_size if self.end is None else self.end) - self.start


@dataclass(frozen=True)
class Piece:
    """Some bytes of a file and their position: `data[0]` is byte `start` of the file; `column` as in `TextSpan`."""

    path: Path
    start: int
    data: bytes
    column: str | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.data)

    @property
    def size(self) -> int:
        return len(self.data)

    def text(self) -> str:
        """Decode the piece. Raises `UserError` with the offset of an invalid byte in the file."""
        try:
            return self.data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self.path}: not valid UTF-8 at byte {self.start + error.start} "
                f"({error.reason}); data must be UTF-8 text"
            ) from None

    def texts(self) -> Iterator[str]:
        """The documents of JSON lines, or the whole text. Raises `UserError` with the line that is wrong."""
        if self.column is None:
            yield self.text()
            return
        for number, line in enumerate(self.data.split(b"\n")):
            if line.strip():
                try:
                    yield _document(line, self.column)
                except ValueError as error:
                    with opened(self.path) as file:  # told once: pieces need not count lines
                        before = sum(block.count(b"\n") for block in blocks(file, self.start))
                    raise UserError(f"{self.path}, line {before + number + 1}: {error}") from None


def _document(line: bytes, column: str) -> str:
    """The text of a JSON line. Raises `ValueError`, which says what is wrong."""
    if line.lstrip().startswith(b"["):  # a file that is one array, perhaps over many lines
        raise ValueError(f"{_NO_OBJECT} {column}, not an array")
    try:
        found = json.loads(line)
    except UnicodeDecodeError as error:
        raise ValueError(f"not valid UTF-8: {error.reason}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{_NO_OBJECT} {column}")
    if column not in found:
        raise ValueError(f"has no column {column} (data.text_column); it has {', '.join(found) or 'none'}")
    if not isinstance(text := found[column], str):
        raise ValueError(f"{column} must be a text, not {json.dumps(text)[:40]}")
    if not is_text(text):
        raise ValueError(f"{column} contains an unpaired surrogate (invalid Unicode)")
    return text


def check_no_array(span: TextSpan) -> None:
    """Raise `UserError` for JSON lines that are a JSON array, before its single line is read as a whole."""
    if span.column is not None and not span.path.name.endswith(".parquet"):
        with opened(span.path) as file:
            if file.read(64).removeprefix(BOM_UTF8).lstrip().startswith(b"["):
                raise UserError(f"{span.path}: each line {_NO_OBJECT} {span.column}, not an array")


def is_text(text: str) -> bool:
    """Whether it consists of characters. Half of a surrogate pair is none: JSON may escape it, and Python makes it of a
    byte on the command line that is no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_pieces(span: TextSpan, piece_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """Yield the span in order, in pieces of at most `piece_bytes`.

    A piece ends before white space, at a line end if possible (see `_cut`), so that tokenizing it piece by piece gives
    the same tokens as tokenizing the whole text. That is true of the tokenizers that are learned here, where the text
    has such white space, and of others that split text like GPT-2. Other tokenizers of `data.tokenizer` may have other
    tokens at the cuts: some add a space to the start of a text, and some have tokens that span words.

    The cuts depend on the text alone: results do not depend on which process works on which piece. JSON lines are cut
    between lines; a line longer than a piece makes a longer one. A byte order mark is no text. Raises `UserError` if
    the file shrinks meanwhile, or is a JSON array instead.
    """
    if not span.start:
        check_no_array(span)
    position, rest, at_end = span.start, bytearray(), False
    with opened(span.path, span.start) as file:
        while not at_end:
            room = piece_bytes - len(rest) if len(rest) < piece_bytes else piece_bytes  # a line longer than that
            wanted = room if span.end is None else min(room, span.end - position - len(rest))
            more = file.read(wanted)
            if len(more) < wanted and span.end is not None:
                raise UserError(f"{span.path}: shrank while it was read")
            rest += more
            if not position and rest.startswith(BOM_UTF8):
                position, rest = len(BOM_UTF8), rest[len(BOM_UTF8) :]
            at_end = len(more) < wanted if span.end is None else position + len(rest) == span.end
            if at_end:
                cut = len(rest)
            elif span.column is None:
                cut = _cut(rest)
            elif not (cut := rest.rfind(b"\n", len(rest) - len(more)) + 1):  # there is none before
                continue
            if cut:
                with memoryview(rest) as whole:
                    data = bytes(whole[:cut])
                yield Piece(span.path, position, data, span.column)
            position += cut
            del rest[:cut]


def _cut(data: bytearray) -> int:
    """The length of a piece that starts with `data`: in its second half, and never within a character.

    Preferably before a line feed that follows no other white space, else before such a space, such a carriage return or
    such a tab, else (a single word of megabytes) anywhere. No token of the byte-pair tokenizer's pattern spans a
    character and the white space after it; in basic_english, which drops quotation marks first, `<br />` is the only
    one.
    """
    for space in (b"\n", b" ", b"\r", b"\t"):
        cut = len(data)
        for _ in range(1000):  # beyond that the text is blank: no good place
            cut = data.rfind(space, len(data) // 2, cut)
            if cut <= 0:
                break
            before = data[max(cut - 16, 0) : cut].decode("utf-8", "ignore")
            if before and not before[-1].isspace() and before.replace('"', "")[-3:].lower() != "<br":
                return cut
    for back in range(1, 4):
        if back < len(data) and data[-back] >= 0xC0:  # the first byte of a character that may continue behind the end
            return len(data) - back
    return len(data)


def line_boundary(path: Path, target: int) -> int:
    """Where the first line begins at or after byte `target`: the size of the text if there is none."""
    if target <= 0:
        return 0
    with opened(path, target - 1) as file:
        return target - 1 + len(file.readline())


def boundary(path: Path, target: int, reach: int = 2**20) -> int:
    """Where to cut a text at or after byte `target`: at the first line boundary.

    If no line ends within `reach` bytes (text8 is one line of 100 MB): after the first space, else at the first whole
    character.
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


def read_lines(path: Path | None) -> Iterator[str]:
    """The lines of a file, which may be compressed (.gz), or of standard input (None), without line ends. Only line
    feeds end a line, as in tools that align texts.

    Raises `UserError` with the line that is not valid UTF-8, or if the file is damaged.
    """
    name, number = path or "standard input", 0
    try:
        with _lines_of(path) as file:
            for number, line in enumerate(file, start=1):
                yield line.rstrip(b"\r\n").decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{name}, line {number}: not valid UTF-8: {error.reason}") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{name}, after line {number}: damaged: {error}") from None
    except OSError as error:
        raise UserError(f"{name}: cannot be read: {error.strerror}") from None


def _lines_of(path: Path | None) -> AbstractContextManager[Iterable[bytes]]:
    if path is None:
        if sys.stdin is None:
            raise UserError("standard input: cannot be read: closed")
        return nullcontext(sys.stdin.buffer)
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")
