"""Running text and documents: `data.source` and `data.split` give a range of bytes for every split."""

from pathlib import Path

from hvd_transformer.config.schema import DataConfig
from hvd_transformer.data import python_docs
from hvd_transformer.data.build_once import ALONE, PrepareContext, build_once
from hvd_transformer.data.published import TEXTS, fetch_published, unknown_source
from hvd_transformer.data.splits import (
    SPLITS,
    WHOLE,
    Files,
    Source,
    check_no_names,
    check_whole,
    chosen_split,
    file_identity,
    find_splits,
    first_file,
    split_stems,
)
from hvd_transformer.data.text_files import TextSpan, boundary, line_boundary
from hvd_transformer.errors import UserError

SOURCES = ("python-docs", *TEXTS)
# File names accepted for each split of a folder: stems, unless data.train and so on name others, and patterns, in order
# of preference.
_STEMS = {"train": ("train",), "valid": ("valid", "validation", "val"), "test": ("test",)}
_PATTERNS = ("{}.txt", "{}.raw", "wiki.{}.tokens", "wiki.{}.raw", "ptb.{}.txt", "{}.jsonl")
DOCUMENTS = ".jsonl"  # JSON lines
Corpus = Source[TextSpan]


def open_corpus(config: DataConfig, context: PrepareContext = ALONE) -> Corpus:
    """The splits of `data.source`: a file, a folder, or one of `SOURCES`, which is downloaded or written first.

    Raises `UserError` with what is missing or empty, and what is allowed.
    """
    source = config.source
    if source in SOURCES:
        check_no_names(config, f"{source} is no folder")
    if source == "python-docs":
        return _open_python_docs(Path(config.cache_dir).expanduser().absolute(), context)
    if source in TEXTS:
        return _corpus(source, _folder_spans(fetch_published(config, TEXTS, context), config))
    path = Path(source).expanduser()
    try:
        if path.is_dir():
            path = path.resolve()
            return _corpus(path.name, _folder_spans(path, config))
        if path.is_file():
            check_no_names(config, f"{path} is one file, which data.split splits")
            path = path.resolve()
            return _corpus(path.stem, _file_spans(path, config))
    except OSError as error:
        raise UserError(f"{error.filename or path}: cannot be read: {error.strerror}") from None
    raise unknown_source(source, SOURCES)


def open_text(config: DataConfig, path: Path, wanted: str | None) -> Corpus:
    """One text file as a whole, or one split of a folder (see `splits.chosen_split`), which needs no other splits.

    Raises `UserError` with what is missing or empty.
    """
    if path.is_dir():
        files = _find(path, config)
        split = chosen_split(wanted, files, str(path))
        span = _whole(files[split][0], config)
    else:
        check_whole(wanted, path)
        split, span = WHOLE, _whole(path, config)
    if not span.size:
        raise UserError(f"{span.path}: the file is empty; it must hold text")
    return _corpus(path.stem, {split: span})


def _open_python_docs(cache: Path, context: PrepareContext) -> Corpus:
    folder = cache / f"python-docs-{python_docs.version()}"

    def load(folder: Path) -> dict[str, TextSpan] | None:
        try:
            spans = {split: TextSpan(file := folder / f"{split}.txt", 0, file.stat().st_size) for split in SPLITS}
        except FileNotFoundError:
            return None
        return spans if all(span.size for span in spans.values()) else None

    def build(aside: Path) -> None:
        context.report("Collecting Python's own documentation")
        python_docs.write_splits(aside)
        if not all((aside / f"{split}.txt").stat().st_size for split in SPLITS):
            raise UserError(
                "data.source=python-docs: this Python's standard library comes without sources; "
                "choose another data.source"
            )

    spans = build_once(folder, load, build, context.should_stop)
    sizes = {split: span.size for split, span in spans.items()}
    return Corpus("python-docs", {"python": python_docs.version(), "bytes": sizes}, spans, sizes["train"])


def _find(folder: Path, config: DataConfig) -> dict[str, Files]:
    return find_splits(split_stems(config, _STEMS), lambda stem: first_file(folder, stem, _PATTERNS))


def _folder_spans(folder: Path, config: DataConfig) -> dict[str, TextSpan]:
    if not any(folder.iterdir()):
        raise UserError(f"{folder}: the folder is empty; it must hold train.txt, valid.txt and test.txt")
    files, spans = _find(folder, config), {}
    for split in SPLITS:
        if split not in files:
            stems = split_stems(config, _STEMS)[split]
            accepted = ", ".join(pattern.format(stem) for stem in stems for pattern in _PATTERNS)
            raise UserError(f"{folder}: no file of the {split} split; accepted names: {accepted}")
        spans[split] = _whole(files[split][0], config)
        if not spans[split].size:
            raise UserError(f"{spans[split].path}: the {split} split is empty; it must hold text")
    return spans


def _file_spans(path: Path, config: DataConfig) -> dict[str, TextSpan]:
    """Cut one file by shares of its bytes, each cut moved to the next line end (see `text_files.boundary`)."""
    size, shares, column = path.stat().st_size, config.split, _column(path, config)
    cut = boundary if column is None else line_boundary
    if not size:
        raise UserError(f"{path}: the file is empty; it must hold text")
    spans: dict[str, TextSpan] = {}
    start, total = 0, 0.0
    for split, share in zip(SPLITS, shares, strict=False):
        total += share
        end = size if total > 1 - 1e-9 else max(start, cut(path, round(total * size)))
        if end == start:
            raise UserError(
                f"{path}: data.split={list(shares)} leaves the {split} split empty (cuts are at line ends); "
                "give it a larger share, two shares for no test split, or a file with more lines"
            )
        spans[split] = TextSpan(path, start, end, column)
        start = end
    return spans


def _whole(path: Path, config: DataConfig) -> TextSpan:
    return TextSpan(path, 0, path.stat().st_size, _column(path, config))


def _column(path: Path, config: DataConfig) -> str | None:
    """The column with the text, of JSON lines. Raises `UserError` if one is named for another file."""
    if path.suffix == DOCUMENTS:
        return config.text_column
    if config.text_column != type(config).model_fields["text_column"].default:
        raise UserError(f"data.text_column={config.text_column}: {path} has no columns; it must end in {DOCUMENTS}")
    return None


def _corpus(name: str, spans: dict[str, TextSpan]) -> Corpus:
    files = {split: [*file_identity(span.path), span.start, span.end] for split, span in spans.items()}
    columns = {split: span.column for split, span in spans.items() if span.column is not None}
    identity = {"files": files, **({"columns": columns} if columns else {})}
    return Corpus(name, identity, spans, spans["train"].size if "train" in spans else 0)
