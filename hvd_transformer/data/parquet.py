"""Documents in the rows of Parquet files, read by pyarrow a few rows at a time."""

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from hvd_transformer.data.text_files import TextSpan
from hvd_transformer.errors import UserError, missing_extra

PARQUET = ".parquet"
_ROWS = 256  # decoded at a time
_BUFFER_BYTES = 2**20  # of a column, instead of all its bytes in a row group


@dataclass(frozen=True)
class Rows:
    """The documents of some rows; the first one is row `start` of the file. Like `text_files.Piece`."""

    path: Path
    start: int
    documents: list[str | None]
    column: str

    @property
    def end(self) -> int:
        return self.start + len(self.documents)

    @property
    def size(self) -> int:
        """The number of characters, about that of bytes."""
        return sum(map(len, filter(None, self.documents)))

    def texts(self) -> Iterator[str]:
        """The documents. Raises `UserError` with the row that has none."""
        for number, text in enumerate(self.documents, start=self.start):
            if text is None:
                raise UserError(f"{self.path}, row {number}: {self.column} must be a text, not null")
            yield text


def num_rows(path: Path, column: str) -> int:
    """The number of rows, which the end of the file tells. Raises `UserError` as `read_rows` does."""
    with _opened(path, column) as file:
        return int(file.metadata.num_rows)


def read_rows(span: TextSpan, piece_bytes: int) -> Iterator[Rows]:
    """Rows `span.start` to `span.end` - 1 in order, each time as many as have `piece_bytes` characters or more.

    Raises `UserError` if the file is no Parquet, is damaged or has no such column of strings, or without pyarrow.
    """
    assert span.column is not None
    with _opened(span.path, span.column) as file:
        rows, size, start = list[str | None](), 0, span.start
        for text in _column(file, span.column, span.start, span.end):
            rows.append(text)
            size += len(text or "")
            if size >= piece_bytes:
                yield Rows(span.path, start, rows, span.column)
                rows, size, start = [], 0, start + len(rows)
        if rows:
            yield Rows(span.path, start, rows, span.column)


def _column(file: Any, name: str, start: int, end: int | None) -> Iterator[str | None]:
    """The values of a column from row `start` on. Earlier row groups are not read."""
    ends = list(accumulate(file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)))
    skipped = bisect_right(ends, start)
    groups, first = list(range(skipped, len(ends))), ends[skipped - 1] if skipped else 0
    for batch in file.iter_batches(_ROWS, row_groups=groups, columns=[name], use_threads=False):
        values = batch.column(0).to_pylist()
        before, first = first, first + len(values)
        yield from values[max(0, start - before) : None if end is None else max(0, end - before)]
        if end is not None and first >= end:
            return


@contextmanager
def _opened(path: Path, column: str) -> Iterator[Any]:
    try:
        from pyarrow import ArrowException, parquet, types
    except ImportError:
        raise missing_extra(str(path), "pyarrow", "parquet") from None
    try:
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER_BYTES) as file:
            schema = file.schema_arrow
            if column not in schema.names:
                raise UserError(f"{path}: has no column {column} (data.text_column); it has {', '.join(schema.names)}")
            if schema.names.count(column) > 1:
                raise UserError(
                    f"{path}: has several columns {column} (data.text_column); give each column its own name"
                )
            kind = schema.field(column).type
            kind = kind.value_type if types.is_dictionary(kind) else kind
            if not any(check(kind) for check in (types.is_string, types.is_large_string, types.is_string_view)):
                raise UserError(f"{path}: {column} (data.text_column) must be a column of strings, not {kind}")
            yield file
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: {column} is not valid UTF-8: {error.reason}") from None
    except (ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:  # of the file system
            raise
        raise UserError(f"{path}: not a valid Parquet file: {(str(error).splitlines() or [''])[0]}") from None
