"""Where the text is: `data.source` and `data.split` give the byte range of every split."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_transformer.config.schema import DataConfig
from hvd_transformer.data import python_docs
from hvd_transformer.data.build_once import Report, ShouldStop, build_once, never, silent
from hvd_transformer.data.published import PUBLISHED, fetch
from hvd_transformer.data.splits import SPLITS, WHOLE, check_whole, chosen_split
from hvd_transformer.data.text_files import TextSpan, boundary
from hvd_transformer.errors import UserError

SOURCES = ("python-docs", *PUBLISHED)
# What a split's file may be called in a folder; the first that is there is taken.
FILE_NAMES = {
    split: tuple(
        pattern.format(name)
        for name in names
        for pattern in (
            "{}.txt",
            "{}.raw",
            "wiki.{}.tokens",
            "wiki.{}.raw",
            "ptb.{}.txt",
        )
    )
    for split, names in {
        "train": ("train",),
        "valid": ("valid", "validation", "val"),
        "test": ("test",),
    }.items()
}


@dataclass(frozen=True)
class Corpus:
    """The text of every split, and what tells it from any other."""

    name: str
    spans: dict[str, TextSpan]
    identity: dict[str, Any]


def open_corpus(config: DataConfig, report: Report = silent, should_stop: ShouldStop = never) -> Corpus:
    """The source's splits; downloads or writes it first where it is one of `SOURCES`.

    Raises `UserError` with what is missing or empty, and what is allowed.
    """
    source = config.source
    cache = Path(config.cache_dir).expanduser().absolute()
    if source == "python-docs":
        return _open_python_docs(cache, report, should_stop)
    if source in PUBLISHED:
        folder = _open_published(source, cache, report, should_stop)
        return _corpus(source, _folder_spans(folder))
    path = Path(source).expanduser()
    try:
        if path.is_dir():
            path = path.resolve()
            return _corpus(path.name, _folder_spans(path))
        if path.is_file():
            path = path.resolve()
            return _corpus(path.stem, _file_spans(path, config.split))
    except OSError as error:
        raise UserError(f"{error.filename or path}: cannot be read: {error.strerror}") from None
    near = difflib.get_close_matches(source, SOURCES, n=1, cutoff=0.6)
    hint = f", did you mean {near[0]}?" if near else ""
    raise UserError(
        f"data.source={source}: no such file or folder, and no known name{hint}; known: {', '.join(SOURCES)}"
    )


def open_text(path: Path, wanted: str | None) -> Corpus:
    """One text file as a whole, or one split of a folder (`splits.chosen_split`), whatever others that has.

    Raises `UserError`.
    """
    if path.is_dir():
        files = {split: file for split in SPLITS if (file := _find(path, split))}
        split = chosen_split(wanted, files, str(path))
        span = _whole(files[split])
    else:
        check_whole(wanted, path)
        split, span = WHOLE, _whole(path)
    if not span.size:
        raise UserError(f"{span.path}: the file is empty; it must hold text")
    return _corpus(path.stem, {split: span})


def only(corpus: Corpus, wanted: str | None, origin: str) -> Corpus:
    """One split, as `splits.chosen_split` says."""
    split = chosen_split(wanted, corpus.spans, origin)
    return Corpus(corpus.name, {split: corpus.spans[split]}, {**corpus.identity, "only": split})


def _open_python_docs(cache: Path, report: Report, should_stop: ShouldStop) -> Corpus:
    folder = cache / f"python-docs-{python_docs.version()}"

    def load(folder: Path) -> dict[str, TextSpan] | None:
        try:
            spans = {split: _whole(folder / f"{split}.txt") for split in SPLITS}
        except FileNotFoundError:
            return None
        return spans if all(span.size for span in spans.values()) else None

    def build(aside: Path) -> None:
        report("Collecting Python's own documentation")
        python_docs.write_splits(aside)
        if not all((aside / f"{split}.txt").stat().st_size for split in SPLITS):
            raise UserError(
                "data.source=python-docs: this Python's standard library comes without sources; "
                "choose another data.source"
            )

    spans = build_once(folder, load, build, should_stop)
    sizes = {split: span.size for split, span in spans.items()}
    return Corpus("python-docs", spans, {"python": python_docs.version(), "bytes": sizes})


def _open_published(source: str, cache: Path, report: Report, should_stop: ShouldStop) -> Path:
    folder = cache / source
    data_set = PUBLISHED[source]

    def load(folder: Path) -> Path | None:
        # A folder filled by hand counts, under any of the accepted names.
        return folder if all(_find(folder, split) for split in SPLITS) else None

    def build(aside: Path) -> None:
        filled = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        if filled:  # by hand, in part: not ours to replace
            missing = next(split for split in SPLITS if not _find(folder, split))
            raise UserError(_missing(folder, missing))
        fetch(data_set, aside, folder, report, should_stop)

    return build_once(folder, load, build, should_stop)


def _find(folder: Path, split: str) -> Path | None:
    return next((folder / name for name in FILE_NAMES[split] if (folder / name).is_file()), None)


def _missing(folder: Path, split: str) -> str:
    accepted = ", ".join(FILE_NAMES[split])
    return f"{folder}: no file of the {split} split; accepted names: {accepted}"


def _folder_spans(folder: Path) -> dict[str, TextSpan]:
    if not any(folder.iterdir()):
        raise UserError(f"{folder}: the folder is empty; it must hold train.txt, valid.txt and test.txt")
    spans = {}
    for split in SPLITS:
        path = _find(folder, split)
        if path is None:
            raise UserError(_missing(folder, split))
        spans[split] = _whole(path)
        if not spans[split].size:
            raise UserError(f"{path}: the {split} split is empty; it must hold text")
    return spans


def _file_spans(path: Path, shares: Iterable[float]) -> dict[str, TextSpan]:
    """Cuts one file at the line ends next behind the shares of its bytes (see `text.boundary`)."""
    size = path.stat().st_size
    if not size:
        raise UserError(f"{path}: the file is empty; it must hold text")
    spans: dict[str, TextSpan] = {}
    start, total = 0, 0.0
    for split, share in zip(SPLITS, shares, strict=False):
        total += share
        end = size if total > 1 - 1e-9 else max(start, boundary(path, round(total * size)))
        if end == start:
            raise UserError(
                f"{path}: data.split={list(shares)} leaves the {split} split empty (cuts are at line ends); "
                "give it a larger share, two shares for no test split, or a file of more lines"
            )
        spans[split] = TextSpan(path, start, end)
        start = end
    return spans


def _whole(path: Path) -> TextSpan:
    return TextSpan(path, 0, path.stat().st_size)


def _corpus(name: str, spans: dict[str, TextSpan]) -> Corpus:
    files = {}
    for split, span in spans.items():
        status = span.path.stat()
        files[split] = [str(span.path), status.st_size, status.st_mtime_ns, span.start, span.end]
    return Corpus(name, spans, {"files": files})
