"""Files that may be compressed, by their ending: gzip (.gz) or Zstandard (.zst). They are read as a stream."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from hvd_transformer.errors import UserError, missing_extra

COMPRESSED = (".gz", ".zst")
BLOCK_BYTES = 2**20
_STORED_BYTES = 2**14  # read at a time: a block of text that compresses well stays small
_LONGEST_WINDOW = 2**31  # of `zstd --long=31`


class _Damaged(Exception):
    """What is wrong with a file."""


@contextmanager
def opened(path: Path, start: int = 0) -> Iterator[BinaryIO]:
    """The text of a file as bytes, decompressed, from byte `start` on.

    Raises `UserError`, also where the stream is read, if the file is damaged or its library is missing.
    """
    try:
        with _stream(path) as file:
            if path.suffix in COMPRESSED:
                for _ in blocks(file, start):  # a compressed file can only be read from its beginning
                    pass
            else:
                file.seek(start)
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error, _Damaged) as error:
        raise UserError(f"{path}: damaged: {error}") from None


def blocks(file: BinaryIO, size: int) -> Iterator[bytes]:
    """The next `size` bytes of a file, or all up to its end, in blocks."""
    while size > 0 and (block := file.read(min(size, BLOCK_BYTES))):
        size -= len(block)
        yield block


def text_size(path: Path) -> int:
    """The number of bytes of the text. A compressed file is read to its end."""
    if path.suffix not in COMPRESSED:
        return path.stat().st_size
    with opened(path) as file:
        return sum(map(len, iter(lambda: file.read(BLOCK_BYTES), b"")))


def _stream(path: Path) -> Any:
    if path.suffix == ".gz":
        return gzip.open(path)
    if path.suffix == ".zst":
        return io.BufferedReader(_ZstdFile(path), BLOCK_BYTES)
    return path.open("rb")


class _ZstdFile(io.RawIOBase):
    """All frames of a file in order; tools that compress in parallel write many. Unlike the stream reader of
    zstandard it notices a file that ends within a frame."""

    def __init__(self, path: Path) -> None:
        try:
            import zstandard
        except ImportError:
            raise missing_extra(str(path), "zstandard", "zstd") from None
        self._error = zstandard.ZstdError
        self._new_frame = zstandard.ZstdDecompressor(max_window_size=_LONGEST_WINDOW).decompressobj
        self._frame: Any = None
        self._stored, self._text = b"", memoryview(b"")
        self._file = path.open("rb")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._text:
            self._stored = self._stored or self._file.read(_STORED_BYTES)
            if not self._stored:
                if self._frame is not None:
                    raise _Damaged("the file ends within a frame")
                return 0
            self._decompress()
        size = min(len(buffer), len(self._text))
        buffer[:size] = self._text[:size]
        self._text = self._text[size:]
        return size

    def _decompress(self) -> None:
        self._frame = self._frame or self._new_frame()
        try:
            self._text = memoryview(self._frame.decompress(self._stored))
        except self._error as error:
            raise _Damaged(str(error)) from None
        self._stored = b""
        if self._frame.eof:
            self._stored, self._frame = self._frame.unused_data, None

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
