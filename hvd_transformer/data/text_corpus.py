"""Running text and documents: `data.source` and `data.split` give the files of every split, and their parts."""

import glob
import re
import sys
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

from hvd_transformer.config.schema import DataConfig
from hvd_transformer.data import python_docs
from hvd_transformer.data.build_once import ALONE, PrepareContext, build_once
from hvd_transformer.data.compressed import COMPRESSED
from hvd_transformer.data.foreign_tokens import INDEX, TOKENS
from hvd_transformer.data.parquet import PARQUET
from hvd_transformer.data.published import TEXTS, fetch_published, unknown_source
from hvd_transformer.data.shards import ENDINGS, TextSplit, find_shards, has_documents
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
    readable,
    real_path,
    split_stems,
)
from hvd_transformer.data.text_files import TextSpan, boundary, check_no_array, line_boundary
from hvd_transformer.data.token_corpus import (
    TokenCorpus,
    find_token_files,
    open_token_file,
    open_token_files,
    open_token_folder,
)
from hvd_transformer.errors import UserError

SOURCES = ("python-docs", *TEXTS)
# File names accepted for each split of a folder: stems, unless data.train and so on name others, and patterns, in order
# of preference.
_STEMS = {"train": ("train",), "valid": ("valid", "validation", "val"), "test": ("test",)}
_TEXTS = ("{}.txt", "{}.raw", "wiki.{}.tokens", "wiki.{}.raw", "ptb.{}.txt", "{}.jsonl")
_PATTERNS = (*_TEXTS, *(pattern for ending in ENDINGS if (pattern := f"{{}}{ending}") not in _TEXTS))
_SHARDS = "{}[-_.]*"  # as Hugging Face names them: train-00000-of-00008.parquet
_NAMED = "(?:{})[-_.]"
_NUMBERED = re.compile(r"[-_.]\d")  # beside train.txt only these are shards, not train_small.txt or train.meta.json
# Of files that are no running text, in other cases of letters, too: their syntax would be trained on.
_ROWS = (".jsonl", ".ndjson", ".jsonlines", ".json", PARQUET, ".csv", ".tsv")
_PACKED = (".bz2", ".xz", ".zip")
Corpus = Source[TextSplit]


def open_corpus(config: DataConfig, context: PrepareContext = ALONE) -> Corpus | TokenCorpus:
    """The splits of `data.source`: a file, a folder, a pattern of files, or one of `SOURCES`, which is downloaded or
    written first.

    Raises `UserError` with what is missing or empty, and what is allowed.
    """
    return _open(config, context, trained=True)


def open_evaluated(config: DataConfig, context: PrepareContext = ALONE) -> Corpus | TokenCorpus:
    """Like `open_corpus`, for a source that is only evaluated: without the training split. A folder needs only a valid
    split. A file, or the files of a pattern, is the valid split as a whole."""
    return _open(config, context, trained=False).evaluated()


def _open(config: DataConfig, context: PrepareContext, trained: bool) -> Corpus | TokenCorpus:
    source, shares = config.source, config.split if trained else None
    if source in SOURCES:
        check_no_names(config, f"{source} is not a folder")
    if source == "python-docs":
        _refuse_column(config, source)
        return _open_python_docs(Path(config.cache_dir).expanduser().absolute(), context)
    if source in TEXTS:
        return _open_folder(fetch_published(config, TEXTS, context), config, trained, source)
    path = Path(source).expanduser()
    try:
        if path.is_dir():
            path = path.resolve()
            stems, needed = split_stems(config, _STEMS), ("train", "valid") if trained else ("valid",)
            if not _find(path, config) and (folder := open_token_folder(path, stems, needed)) is not None:
                _refuse_column(config, str(path))
                return folder
            return _open_folder(path, config, trained)
        if (tokens := open_token_file(path, shares)) is not None:
            check_no_names(config, f"{path} is one file, which data.split splits")
            _refuse_column(config, str(path))
            return tokens
        if path.is_file():
            check_no_names(config, f"{path} is one file, which data.split splits")
            _refuse_rows(path)
            path = real_path(path)
            return _open_file(path, config) if trained else _open_whole(path, config)
        if glob.has_magic(source):
            check_no_names(config, f"{source} is cut by data.split")
            return _open_pattern(path, config, shares)
    except OSError as error:
        raise UserError(f"{error.filename or path}: cannot be read: {error.strerror}") from None
    except (NotImplementedError, ValueError) as error:  # of a pattern
        raise UserError(f"data.source={source}: invalid file pattern or split names: {error}") from None
    raise unknown_source(source, SOURCES)


def open_text(config: DataConfig, path: Path, wanted: str | None) -> Corpus | TokenCorpus:
    """One file as a whole, or one split of a folder (see `splits.chosen_split`), which needs no other splits.

    Raises `UserError` with what is missing or empty.
    """
    with readable(path):
        if path.is_dir():
            files = _find(path, config)
            if not files and (folder := open_token_folder(path, split_stems(config, _STEMS), needed=())) is not None:
                return folder.only(wanted, str(path))
            split = chosen_split(wanted, files, str(path))
            found = _whole(files[split], _for_other_data(config, files[split]))
            _check_not_empty(found, "the file is empty")
            return _corpus(path.stem, {split: found})
        check_whole(wanted, path)
        if (tokens := open_token_file(path, None)) is not None:
            return tokens
        return _open_whole(path, _for_other_data(config, (path,)))


def _for_other_data(config: DataConfig, files: Files) -> DataConfig:
    """Without the column of the training data if these files have none."""
    if any(map(has_documents, files)):
        return config
    return config.model_copy(update={"text_column": type(config).model_fields["text_column"].default})


def _open_whole(path: Path, config: DataConfig) -> Corpus:
    found = _whole((path,), config)
    _check_not_empty(found, "the file is empty")
    return _corpus(path.stem, {WHOLE: found})


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

    spans = build_once(folder, load, build, context.should_stop, context.report)
    sizes, splits = (
        {split: span.size for split, span in spans.items()},
        {split: TextSplit((spans[split],)) for split in spans},
    )
    return Corpus("python-docs", {"python": python_docs.version(), "bytes": sizes}, splits, sizes["train"])


def _find(folder: Path, config: DataConfig) -> dict[str, Files]:
    def find(stem: str) -> Files:
        origin, named = f"{folder}: {stem}", first_file(folder, stem, _PATTERNS) or ()
        beside = set(folder.glob(_SHARDS.format(stem))).difference(named)
        if named:
            beside = {path for path in beside if _NUMBERED.match(path.name.removeprefix(stem))}
        kinds = [named, find_shards((folder / stem).glob("*"), origin), find_shards(beside, origin)]
        found = [files for files in kinds if files]
        if len(found) > 1:
            one, other = (files[0].relative_to(folder) for files in found[:2])
            raise UserError(f"{origin}: both {one} and {other}; the same documents may be there twice; move one away")
        return found[0] if found else ()

    return find_splits(split_stems(config, _STEMS), find)


def _open_folder(folder: Path, config: DataConfig, trained: bool, name: str | None = None) -> Corpus:
    if not any(folder.iterdir()):
        raise UserError(f"{folder}: the folder is empty; it must hold train.txt, valid.txt and test.txt")
    files, splits = _find(folder, config), dict[str, TextSplit]()
    for number, split in enumerate(SPLITS):
        if split in files:
            splits[split] = _whole(files[split], config)
            _check_not_empty(splits[split], f"the {split} split is empty")
        elif split == "valid" or (trained and number < len(config.split)):
            stems = split_stems(config, _STEMS)[split]
            accepted = ", ".join(pattern.format(stem) for stem in stems for pattern in _TEXTS)
            raise UserError(
                f"{folder}: no file of the {split} split; accepted names: {accepted}, or shards of documents such as "
                f"{stems[0]}-*.parquet or {stems[0]}/*.jsonl.gz"
                + ("; two numbers in data.split: no test split" if split == "test" else "")
            )
    return _corpus(name or folder.name, splits)


def _open_file(path: Path, config: DataConfig) -> Corpus:
    """Cut one file by shares of its bytes, each cut moved to the next line end (see `text_files.boundary`)."""
    if not path.stat().st_size:
        raise UserError(f"{path}: the file is empty; it must hold text")
    if not _is_plain(path):
        return _corpus(path.stem, _shares(_whole((path,), config), config.split))
    size, shares, column = path.stat().st_size, config.split, _column(path, config)
    check_no_array(TextSpan(path, 0, size, column))  # a cut in its single line would read all of it
    cut = boundary if column is None else line_boundary
    splits: dict[str, TextSplit] = {}
    start, total = 0, 0.0
    for split, share in zip(SPLITS, shares, strict=False):
        total += share
        end = size if total > 1 - 1e-9 else max(start, cut(path, round(total * size)))
        if end == start:
            raise UserError(
                f"{path}: data.split={list(shares)} leaves the {split} split empty (cuts are at line ends); "
                "give it a larger share, two shares for no test split, or a file with more lines"
            )
        splits[split] = TextSplit((TextSpan(path, start, end, column),))
        start = end
    return _corpus(path.stem, splits)


def _open_pattern(pattern: Path, config: DataConfig, shares: list[float] | None) -> Corpus | TokenCorpus:
    """Cut all files of a pattern, such as shards/*.jsonl.gz, by shares of their text or tokens (None: all of them, to
    be evaluated)."""
    given = f"data.source={config.source}"
    pattern = pattern.absolute()
    paths = list(Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor))))
    texts = find_shards(paths, given)
    if not (files := texts or find_token_files(paths, given)):
        raise UserError(f"{given}: no such file; names must end in {', '.join((*ENDINGS, TOKENS, INDEX))}")
    names = {split: re.compile(_NAMED.format("|".join(_STEMS[split]))) for split in SPLITS}
    named = [split for split in SPLITS if any(names[split].match(file.name) for file in files)]
    if len(named) > 1:
        raise UserError(
            f"{given}: has files of the splits {' and '.join(named)}; name their folder, or the files of one split"
        )
    name = files[0].parent.name
    if not texts:
        _refuse_column(config, given)
        return open_token_files(files, shares, name)
    whole = _whole(files, config)
    return _corpus(name, {WHOLE: whole} if shares is None else _shares(whole, shares))


def _shares(whole: TextSplit, shares: list[float]) -> dict[str, TextSplit]:
    ends = accumulate(shares, initial=0.0)
    return {split: replace(whole, share=share) for split, share in zip(SPLITS, pairwise(ends), strict=False)}


def _whole(files: Files, config: DataConfig) -> TextSplit:
    plain = len(files) == 1 and _is_plain(files[0])
    return TextSplit(
        tuple(TextSpan(path, 0, path.stat().st_size if plain else None, _column(path, config)) for path in files)
    )


def _is_plain(path: Path) -> bool:
    """Whether positions in it are bytes of the file."""
    return path.suffix not in (*COMPRESSED, PARQUET)


def _check_not_empty(split: TextSplit, what: str) -> None:
    if not any(span.path.stat().st_size for span in split.spans):
        raise UserError(f"{split.spans[0].path}: {what}; it must hold text")


def _column(path: Path, config: DataConfig) -> str | None:
    """The column with the text, of documents. Raises `UserError` if one is named for another file, and for a file of
    rows or a compressed one whose ending is none of `ENDINGS`."""
    if has_documents(path):
        return config.text_column
    _refuse_rows(path)
    _refuse_column(config, str(path))
    return None


def _refuse_rows(path: Path) -> None:
    if has_documents(path):
        return
    name = path.name.lower()
    if name.endswith(_PACKED):
        raise UserError(f"{path}: of compressed files only .gz and .zst are read")
    for end in COMPRESSED:
        name = name.removesuffix(end)
    if name.endswith(_ROWS):
        lines = ", ".join(f"{kind}{end}" for kind in (".jsonl", ".json") for end in ("", *COMPRESSED))
        raise UserError(
            f"{path}: its rows would be read as running text; documents must end in {lines} or {PARQUET}, running text "
            "in another name such as .txt"
        )


def _refuse_column(config: DataConfig, given: str) -> None:
    if config.text_column != type(config).model_fields["text_column"].default:
        raise UserError(
            f"data.text_column={config.text_column}: {given} has no columns; it must end in .jsonl or {PARQUET}"
        )


def _corpus(name: str, splits: dict[str, TextSplit]) -> Corpus:
    """Its identity is that of its files, so that a start with prepared data reads none of them."""
    columns = {split: own.spans[0].column for split, own in splits.items() if own.spans[0].column is not None}
    with_columns = {"columns": columns} if columns else {}
    spans = [span for split in splits.values() for span in split.spans]
    has_shares = any(own.share for own in splits.values())  # of the whole file each, which its spans do not tell
    if len(spans) == len(splits) and all(span.end is not None for span in spans) and not has_shares:
        files = {
            split: [*file_identity(span.path), span.start, span.end] for split, span in zip(splits, spans, strict=True)
        }
        return Corpus(name, {"files": files, **with_columns}, splits, spans[0].size if "train" in splits else 0)
    shards = [file_identity(path) for path in dict.fromkeys(span.path for span in spans)]
    parts = {split: own.share or [str(span.path) for span in own.spans] for split, own in splits.items()}
    identity = {"shards": shards, "splits": parts, **with_columns}
    return Corpus(name, identity, splits, sys.maxsize if "train" in splits else 0)
