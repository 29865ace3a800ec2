"""Labelled texts: CSV, tab-separated values or JSON lines with a column for the text and one for the label."""

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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

ENDINGS = tuple(f"{kind}{end}" for kind in (".csv", ".tsv", ".jsonl", ".json") for end in ("", ".gz"))
csv.field_size_limit(2**31 - 1)  # a text may be long


def open_table(config: DataConfig, path: Path, seed: int) -> ExampleSource:
    """The rows of one file, split at random, or of a folder with a file a split.

    Raises `UserError` with what is missing and what is allowed.
    """
    columns = _columns(config)
    if path.is_file():
        splits = split_at_random(_reader(config, path), config.split, seed, path)
        identity: dict[str, Any] = {"file": file_identity(path), "split": config.split, "seed": seed}
        return ExampleSource(_name(path), {**identity, **columns}, splits)
    files = _files(config, path)
    for split in ("train", "valid"):
        if split not in files:
            name = getattr(config, split) or split
            raise UserError(f"{path}: no {split} split; it must hold {name}.csv, {name}.tsv or {name}.jsonl")
    return ExampleSource(
        path.name,
        {**{split: file_identity(file) for split, file in files.items()}, **columns},
        {split: _reader(config, file) for split, file in files.items()},
    )


def open_table_split(config: DataConfig, path: Path, wanted: str | None) -> ExampleSource:
    """One file as a whole, or one split of a folder (`splits.chosen_split`), whatever others that has.

    Raises `UserError`.
    """
    if path.is_file():
        check_whole(wanted, path)
        return ExampleSource(
            _name(path), {"whole": file_identity(path), **_columns(config)}, {WHOLE: _reader(config, path)}
        )
    files = _files(config, path)
    split = chosen_split(wanted, files, str(path))
    identity = {split: file_identity(files[split]), **_columns(config)}
    return ExampleSource(path.name, identity, {split: _reader(config, files[split])})


def _columns(config: DataConfig) -> dict[str, str]:
    return {"text": config.text_column, "label": config.label_column}


def _name(path: Path) -> str:
    return path.name.partition(".")[0]


def _files(config: DataConfig, folder: Path) -> dict[str, Path]:
    return {split: file for split in SPLITS if (file := _find(config, folder, split))}


def _find(config: DataConfig, folder: Path, split: str) -> Path | None:
    given = getattr(config, split)
    names = (given,) if given else SPLIT_NAMES[split]
    return next((file for name in names for end in ENDINGS if (file := folder / f"{name}{end}").is_file()), None)


def _reader(config: DataConfig, path: Path) -> Callable[[], Iterator[RawExample]]:
    kind = next((end for end in ENDINGS if path.name.endswith(end)), None)
    if kind is None:
        raise UserError(f"{path}: must end in {', '.join(ENDINGS[::2])}, each also with .gz")
    if kind.startswith(".json"):
        return lambda: _json_lines(path, config.text_column, config.label_column)
    delimiter = "\t" if kind.startswith(".tsv") else ","
    return lambda: _separated(path, delimiter, config.text_column, config.label_column)


class _Tabs(csv.excel_tab):
    """Tab-separated values know no quotes: a text may have a single one."""

    quoting = csv.QUOTE_NONE


def _separated(path: Path, delimiter: str, text: str, label: str) -> Iterator[RawExample]:
    lines = (f"{line}\n" for line in read_lines(path))
    dialect = _Tabs if delimiter == "\t" else csv.excel
    reader = csv.reader(lines, dialect, strict=True)
    start = 1
    try:
        names = next(reader, [])
        places = [_column(path, names, "data.text_column", text), _column(path, names, "data.label_column", label)]
        start = reader.line_num + 1
        for values in reader:
            if values:  # no empty line
                if len(values) != len(names):
                    raise UserError(
                        f"{path}, line {start}: {len(values)} columns, but the first line names {len(names)}"
                    )
                yield RawExample((values[places[0]],), values[places[1]], f"{path}, line {start}")
            start = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}, line {start}: a broken quote: {error}") from None


def _column(path: Path, names: list[str], key: str, name: str) -> int:
    if name not in names:
        raise UserError(f"{key}={name}: {path} has no such column; it has {', '.join(names)}")
    return names.index(name)


def _json_lines(path: Path, text: str, label: str) -> Iterator[RawExample]:
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}, line {number}: no JSON: {error}") from None
        if not isinstance(values, dict):
            raise UserError(f'{path}, line {number}: must be an object, such as {{"{text}": …, "{label}": …}}')
        for key, name in (("data.text_column", text), ("data.label_column", label)):
            if name not in values:
                raise UserError(f"{key}={name}: {path}, line {number} has no such column; it has {', '.join(values)}")
        if not isinstance(values[text], str):
            raise UserError(f"{path}, line {number}: {text} must be a string")
        yield RawExample((values[text],), str(values[label]), f"{path}, line {number}")
