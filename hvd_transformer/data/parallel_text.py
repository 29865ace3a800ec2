"""Pairs of a source and a target sentence: two files side by side, one with a tab between, or WMT's .sgm."""

import html
import re
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path

from hvd_transformer.config.schema import DataConfig
from hvd_transformer.data.splits import (
    SPLIT_NAMES,
    SPLITS,
    WHOLE,
    ExampleSource,
    RawExample,
    check_whole,
    chosen_split,
    file_identity,
    split_at_random,
)
from hvd_transformer.data.text_files import read_lines
from hvd_transformer.errors import UserError

_TABS = (".tsv", ".tsv.gz")
Read = Callable[[], Iterator[RawExample]]


def open_pairs(config: DataConfig, path: Path, seed: int) -> ExampleSource:
    """The pairs of a folder, or of one tab-separated file, split at random.

    Raises `UserError` with what is missing and what is allowed.
    """
    if path.is_file():
        read: Read = lambda: _tabbed(path)  # noqa: E731
        splits = split_at_random(read, config.split, seed, path)
        return ExampleSource(
            path.name.partition(".")[0], {"file": file_identity(path), "split": config.split, "seed": seed}, splits
        )
    found = _files(config, path)
    for split in ("train", "valid"):
        if split not in found:
            raise UserError(f"{path}: {_missing(config, path, split)}")
    return ExampleSource(
        path.name,
        {split: [file_identity(file) for file in files] for split, files in found.items()},
        {split: _reader(files) for split, files in found.items()},
    )


def open_pairs_split(config: DataConfig, path: Path, wanted: str | None) -> ExampleSource:
    """One tab-separated file as a whole, or one split of a folder (`splits.chosen_split`), whatever others that has.

    Raises `UserError`.
    """
    if path.is_file():
        check_whole(wanted, path)
        return ExampleSource(path.name.partition(".")[0], {"whole": file_identity(path)}, {WHOLE: _reader((path,))})
    found = _files(config, path)
    split = chosen_split(wanted, found, str(path))
    return ExampleSource(
        path.name, {split: [file_identity(file) for file in found[split]]}, {split: _reader(found[split])}
    )


def _files(config: DataConfig, folder: Path) -> dict[str, tuple[Path, ...]]:
    return {split: files for split in SPLITS if (files := _find(config, folder, split))}


def _reader(files: tuple[Path, ...]) -> Read:
    if len(files) == 1:
        return lambda: _tabbed(files[0])
    return lambda: _segments(*files) if files[0].suffix == ".sgm" else _side_by_side(*files)


def _find(config: DataConfig, folder: Path, split: str) -> tuple[Path, ...] | None:
    """The split's file or its two files, the source's first. A test split may have any name that begins so."""
    given = getattr(config, split)
    for name in (given,) if given else SPLIT_NAMES[split]:
        if found := _of_name(config, folder, name):
            return found
    if given or split != "test":
        return None
    ending = f".{config.source_language}"
    names = {file.name.removesuffix(".gz").removesuffix(ending) for file in folder.glob(f"test*{ending}*")}
    names |= {file.name.partition("-src.")[0] for file in folder.glob(f"test*-src{ending}.sgm")}
    if len(names) > 1:
        raise UserError(f"{folder}: several test splits; choose with data.test={' or data.test='.join(sorted(names))}")
    return _of_name(config, folder, names.pop()) if names else None


def _of_name(config: DataConfig, folder: Path, name: str) -> tuple[Path, ...] | None:
    source, target = config.source_language, config.target_language
    for end in ("", ".gz"):
        for middle in ("", f".{source}-{target}", f".{target}-{source}"):
            files = tuple(folder / f"{name}{middle}.{language}{end}" for language in (source, target))
            there = [file.is_file() for file in files]
            if all(there):
                return files
            if any(there):
                raise UserError(f"{files[there.index(True)]}: its partner {files[there.index(False)].name} is missing")
    for tabbed in (folder / f"{name}{end}" for end in _TABS):
        if tabbed.is_file():
            return (tabbed,)
    sources = sorted(folder.glob(f"{name}*-src.{source}.sgm"))
    if len(sources) > 1:
        raise UserError(f"{folder}: several files {name}*-src.{source}.sgm: {', '.join(file.name for file in sources)}")
    if sources:
        reference = sources[0].with_name(sources[0].name.replace(f"-src.{source}.sgm", f"-ref.{target}.sgm"))
        if not reference.is_file():
            raise UserError(f"{sources[0]}: its partner {reference.name} is missing")
        return sources[0], reference
    return None


def _missing(config: DataConfig, folder: Path, split: str) -> str:
    given = getattr(config, split)
    name = given or SPLIT_NAMES[split][0]
    source, target = config.source_language, config.target_language
    there = ", ".join(sorted(file.name for file in folder.iterdir())[:12]) or "nothing"
    return (
        f"no {split} split; it must hold {name}.{source} and {name}.{target} (also .gz), {name}.tsv, or "
        f"{name}-src.{source}.sgm and {name}-ref.{target}.sgm; it holds {there}"
    )


def _side_by_side(source: Path, target: Path) -> Iterator[RawExample]:
    for number, pair in enumerate(zip_longest(read_lines(source), read_lines(target)), start=1):
        if None in pair:
            counts = [sum(1 for _ in read_lines(file)) for file in (source, target)]
            raise UserError(
                f"{source} has {counts[0]:,} lines, {target} has {counts[1]:,}; parallel files must have as many"
            )
        yield RawExample(pair, None, f"{source}, line {number}")


def _tabbed(path: Path) -> Iterator[RawExample]:
    for number, line in enumerate(read_lines(path), start=1):
        parts = line.split("\t")
        if len(parts) != 2:
            raise UserError(f"{path}, line {number}: {len(parts) - 1} tabs; a pair is a source, one tab and its target")
        yield RawExample((parts[0], parts[1]), None, f"{path}, line {number}")


def _segments(source: Path, target: Path) -> Iterator[RawExample]:
    """Matched by document and number, whatever their order in the target's file."""
    others = _read_segments(target)
    own = _read_segments(source)
    for (file, here), (other, there) in (((source, own), (target, others)), ((target, others), (source, own))):
        if alone := next((key for key in here if key not in there), None):
            raise UserError(f"{file}: document {alone[0]}, segment {alone[1]} has no partner in {other.name}")
    for (document, segment), text in own.items():
        yield RawExample((text, others[document, segment]), None, f"{source}, document {document}, segment {segment}")


_DOCUMENT = re.compile(r"<doc\s[^>]*?docid\s*=\s*[\"']?([^\"'>\s]+)", re.IGNORECASE)
_SEGMENT = re.compile(r"<seg\s[^>]*?id\s*=\s*[\"']?([^\"'>\s]+)[^>]*>(.*?)</seg>", re.IGNORECASE | re.DOTALL)
_PLACES = re.compile(f"{_DOCUMENT.pattern}|{_SEGMENT.pattern}", re.IGNORECASE | re.DOTALL)


def _read_segments(path: Path) -> dict[tuple[str, str], str]:
    """By document and segment, in the file's order."""
    found: dict[tuple[str, str], str] = {}
    document = ""
    for match in _PLACES.finditer("\n".join(read_lines(path))):
        if match[1] is not None:
            document = match[1]
            continue
        key = document, match[2]
        if key in found:
            raise UserError(f"{path}: document {document} has segment {match[2]} twice")
        found[key] = html.unescape(" ".join(match[3].split()))
    if not found:
        raise UserError(f"{path}: no segments; an .sgm file has <doc docid=…> with <seg id=…> inside")
    return found
