"""The files of a split: one text, or many shards of documents, cut by shares where the files name no splits."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from hvd_transformer.data.build_once import PROGRESS, PrepareContext
from hvd_transformer.data.compressed import COMPRESSED, text_size
from hvd_transformer.data.in_thread import computing
from hvd_transformer.data.parquet import PARQUET, Rows, num_rows, read_rows
from hvd_transformer.data.splits import Files
from hvd_transformer.data.text_files import PIECE_BYTES, Piece, TextSpan, check_no_array, line_boundary
from hvd_transformer.data.text_files import read_pieces as read_text_pieces
from hvd_transformer.errors import UserError

_LINES = (".jsonl", ".json")  # JSON lines
DOCUMENTS = (*_LINES, PARQUET)
_KINDS = (".txt", *_LINES)
ENDINGS = (*(kind + end for end in ("", *COMPRESSED) for kind in _KINDS), PARQUET)


@dataclass(frozen=True)
class TextSplit:
    """What a split is read from, in order. With a `share` it is still to be cut out of all spans together: from the
    first fraction of them to the second, between two lines or rows."""

    spans: tuple[TextSpan, ...]
    share: tuple[float, float] | None = None


def ending(path: Path) -> str:
    """Which of `ENDINGS` the name has; empty for another one."""
    return next((own for own in ENDINGS if path.name.endswith(own)), "")


def has_documents(path: Path) -> bool:
    """Whether the file holds documents in columns."""
    return ending(path).removesuffix(".gz").removesuffix(".zst") in DOCUMENTS


def find_shards(paths: Iterable[Path], origin: str) -> Files:
    """Files of text or documents among the paths, by name. Raises `UserError` if they have several endings:
    the same documents may be there twice."""
    files = sorted(path for path in paths if ending(path) and not path.name.startswith(".") and is_there(path))
    if len(found := sorted({ending(path) for path in files})) > 1:
        raise UserError(f"{origin}: files that end in {' and in '.join(found)}; give one kind, such as '*{found[0]}'")
    return tuple(files)


def is_there(path: Path) -> bool:
    """Whether the path is a file. Raises `UserError` for a link whose target is away: training would do without it."""
    if path.is_file():
        return True
    if path.is_symlink() and not path.exists():
        raise UserError(f"{path}: a link to {path.readlink()}, which is not there")
    return False


def read_pieces(span: TextSpan, piece_bytes: int = PIECE_BYTES) -> Iterator[Piece | Rows]:
    """The span in order, in pieces of about so many bytes. Raises `UserError` if the file is damaged."""
    return read_rows(span, piece_bytes) if span.path.suffix == PARQUET else read_text_pieces(span, piece_bytes)


def text_bytes(spans: Sequence[TextSpan], context: PrepareContext) -> int:
    """The number of bytes of their text; of characters in Parquet files. Compressed files are read to their ends."""
    return sum(_in_threads(_text_bytes, spans, context))


def _text_bytes(span: TextSpan) -> int:
    if span.path.suffix == PARQUET:
        return sum(rows.size for rows in read_rows(span, PIECE_BYTES))
    return (text_size(span.path) if span.end is None else span.end) - span.start


def cut_splits(splits: dict[str, TextSplit], context: PrepareContext) -> dict[str, tuple[TextSpan, ...]]:
    """The spans of each split, those with a `share` cut: rows are counted, and compressed files read to their ends.

    Raises `UserError`.
    """
    spans = next((split.spans for split in splits.values() if split.share), ())
    for span in spans:
        check_no_array(span)  # to find where its single line ends, all of it would be read
    lengths = _in_threads(_length, spans, context)
    if spans and not sum(lengths):
        others = f" and {len(spans) - 1} more files" if len(spans) > 1 else ""
        kind = "rows" if spans[0].path.suffix == PARQUET else "text"
        raise UserError(f"{spans[0].path}{others}: no {kind} in {'them' if others else 'it'}")

    def place(share: float) -> tuple[int, int]:
        """The number of the span where this share of all ends, and the position in it: compressed files are read up to
        there."""
        target = round(share * sum(lengths))
        number = next((number for number, end in enumerate(accumulate(lengths)) if target < end), len(spans) - 1)
        position, path = target - sum(lengths[:number]), spans[number].path
        if path.suffix != PARQUET and position < lengths[number]:
            position = line_boundary(path, position)
        return (number, position) if position < lengths[number] else (number + 1, 0)

    shares = dict.fromkeys(share for split in splits.values() for share in split.share or ())
    places = computing(lambda: {share: place(share) for share in shares}, context.should_stop)

    def cut(name: str, split: TextSplit) -> tuple[TextSpan, ...]:
        if split.share is None:
            return split.spans
        (first, start), (last, end) = (places[share] for share in split.share)
        whole = [replace(span, end=length) for span, length in zip(spans, lengths, strict=True)][first:]
        found = [*whole[: last - first], *(replace(span, end=end) for span in whole[last - first :][:1])]
        found[:1] = [replace(span, start=start) for span in found[:1]]
        if not (left := tuple(span for span in found if span.start < (span.end or 0))):
            raise UserError(
                f"{spans[0].path}: data.split leaves the {name} split of {len(spans)} files empty (cuts are at line "
                "ends); give it a larger share, or two shares for no test split"
            )
        return left

    return {name: cut(name, split) for name, split in splits.items()}


def _length(span: TextSpan) -> int:
    """The number of rows of a Parquet file, else of bytes of the text."""
    return num_rows(span.path, span.column or "") if span.path.suffix == PARQUET else text_size(span.path)


def _in_threads(function: Callable[[TextSpan], int], spans: Sequence[TextSpan], context: PrepareContext) -> list[int]:
    """Libraries decompress without Python's lock. Workers of `mpirun` may be on hosts that do not have the files."""

    def work() -> list[int]:
        if in_threads := getattr(context.map, "in_threads", None):
            return list(in_threads(function, spans))
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            return list(threads.map(function, spans))

    return computing(work, context.should_stop)


def check_shards(settings: dict[str, Any], prepared: Path) -> None:
    """Raise `UserError` if a file of an earlier preparation of the same source, finished or not, vanished or changed:
    training would go on with other data. Added files are no error."""
    current = _files_of(settings["corpus"])
    folders = {Path(path).parent for path, *_ in current}
    earlier = dict[Path, list[Any]]()
    for index in sorted([*prepared.glob("*/index.json"), *prepared.glob(f".*.tmp/{PROGRESS}")]):
        try:
            status = index.stat()
            found = _prepared_from(index, status.st_mtime_ns, status.st_size)
        except OSError:
            continue
        if found is not None and found.source == settings["source"] and folders & found.folders:
            earlier[index.parent] = found.shards
    if current in earlier.values():
        return
    for folder, shards in earlier.items():
        for path, size, changed in shards:
            what = change(Path(path), size, changed)
            if what is not None:
                raise UserError(f"{path}: {what} since {folder} was prepared; restore it, or remove that folder")


def _files_of(corpus: Mapping[str, Any]) -> list[Any]:
    """Path, size and time of the last change of each file of a corpus to train on; none of one to be evaluated."""
    if "tokens" in corpus:
        splits = corpus["tokens"]
        files = {tuple(state[:3]): None for spans in splits.values() for state in spans}
        return [list(state) for state in files] if "train" in splits else []
    if "shards" in corpus:
        return list(corpus["shards"]) if "train" in corpus["splits"] else []
    files = corpus.get("files", {})
    return [state[:3] for state in files.values()] if "train" in files else []


def _has_shards(corpus: Mapping[str, Any]) -> bool:
    """Whether a split has, or is cut out of, several files: one that is made anew does not contradict the others."""
    if "tokens" not in corpus:
        return "shards" in corpus
    splits, num_files = corpus["tokens"].values(), len(_files_of(corpus))
    return num_files > 1 and (num_files < len(splits) or any(len(spans) > 1 for spans in splits))


class _Shards(NamedTuple):
    source: str
    folders: set[Path]  # the source may be a relative path
    shards: list[Any]


@cache  # each source of a mixture asks for those of all others
def _prepared_from(index: Path, changed: int, size: int) -> _Shards | None:
    """The shards of a preparation by its index, or its progress, in this state; None if it is damaged, or of no such
    corpus. Raises `OSError`."""
    text = index.read_bytes()
    try:
        kept = json.loads(text)
        if kept.get("failed"):  # at a file that is to change; `take_over` compares the others
            return None
        source, corpus = kept["settings"]["source"], kept["settings"]["corpus"]
        files = _files_of(corpus)
        if not files or not _has_shards(corpus):
            return None
        return _Shards(source, {Path(path).parent for path, *_ in files}, files)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def change(path: Path, size: int, changed: int) -> str | None:
    """What happened to a file of this size and time of the last change; None: nothing."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return "vanished"
    return None if (status.st_size, status.st_mtime_ns) == (size, changed) else "changed"
