"""Text files line by line, also compressed, with the line of what is no UTF-8."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from hvd_transformer.errors import UserError


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
