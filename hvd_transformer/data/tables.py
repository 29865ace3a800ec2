"""Labelled texts: CSV, tab-separated values or JSON lines with one column for the text and one for the label."""

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hvd_transformer.data.splits import ExampleFiles, Files, RawExample, Reader, file_identity, find_splits, first_file
from hvd_transformer.data.text_files import is_text, read_lines
from hvd_transformer.errors import UserError

_KINDS = (".csv", ".tsv", ".jsonl", ".json")
_PATTERNS = tuple(f"{{}}{kind}{end}" for kind in _KINDS for end in ("", ".gz"))
csv.field_size_limit(2**31 - 1)  # a text may be long


class TableFiles(ExampleFiles):
    """One table per split, with the columns `data.text_column` and `data.label_column`."""

    def find(self, folder: Path) -> dict[str, Files]:
        return find_splits(self.stems, lambda stem: first_file(folder, stem, _PATTERNS))

    def reader(self, files: Files) -> Reader:
        (path,) = files
        name, text, label = path.name.removesuffix(".gz"), self.config.text_column, self.config.label_column
        if not name.endswith(_KINDS):
            raise UserError(f"{path}: must end in {', '.join(_KINDS)}, each optionally followed by .gz")
        if name.endswith((".jsonl", ".json")):
            return lambda: _json_lines(path, text, label)
        return lambda: _separated(path, name.endswith(".tsv"), text, label)

    def accepted(self, folder: Path, split: str) -> str:
        name = self.stems[split][0]
        return f"{name}.csv, {name}.tsv or {name}.jsonl"

    def identity(self, files: Files) -> Any:
        return file_identity(files[0])

    @property
    def settings(self) -> dict[str, str]:
        return {"text": self.config.text_column, "label": self.config.label_column}


def _separated(path: Path, tabs: bool, text: str, label: str) -> Iterator[RawExample]:
    rows = _tab_rows(path) if tabs else _comma_rows(path)
    _, names = next(rows, (1, []))
    places = [_column(path, names, "data.text_column", text), _column(path, names, "data.label_column", label)]
    for number, values in rows:
        if values:  # skips empty lines
            place = f"{path}, line {number}"
            if len(values) != len(names):
                raise UserError(f"{place}: {len(values)} columns, but the first line names {len(names)}")
            if not values[places[1]]:
                raise UserError(f"{place}: {label} is empty; each text needs a label")
            yield RawExample((values[places[0]],), values[places[1]], place)


def _tab_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Without quoting: a text may contain a single quote."""
    for number, line in enumerate(read_lines(path), start=1):
        yield number, line.split("\t") if line else []


def _comma_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Each row with the line that it begins in."""
    reader, start = csv.reader((f"{line}\n" for line in read_lines(path)), csv.excel, strict=True), 1
    try:
        for values in reader:
            yield start, values
            start = reader.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"{path}, line {start}: a broken quote, or a carriage return outside of quotes: {error}"
        ) from None


def _column(path: Path, names: list[str], key: str, name: str) -> int:
    first = "its first line must name the columns"
    if not any(names):
        raise UserError(f"{path}: {first}, such as {name}")
    if name not in names:
        raise UserError(f"{key}={name}: {path} has no such column; it has {', '.join(names)} ({first})")
    if names.count(name) > 1:
        raise UserError(f"{key}={name}: {path} has several columns of this name; give each column its own name")
    return names.index(name)


def _json_lines(path: Path, text: str, label: str) -> Iterator[RawExample]:
    for place, values in json_objects(path, {"data.text_column": text, "data.label_column": label}):
        if not isinstance(values[text], str):
            raise UserError(f"{place}: {text} must be a string")
        if not isinstance(values[label], str | int | float) or values[label] == "":
            raise UserError(f"{place}: {label} must be a string or a number, and not empty")
        found = {text: values[text], label: str(values[label])}
        for column, value in found.items():
            if not is_text(value):
                raise UserError(f"{place}: {column} contains an unpaired surrogate (invalid Unicode)")
        yield RawExample((found[text],), found[label], place)


def json_objects(path: Path, columns: Mapping[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of JSON lines, each with its place (file and line). They have these columns, by the key that names
    each. Raises `UserError`."""
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{place}: not valid JSON: {error}") from None
        if not isinstance(values, dict):
            shape = ", ".join(f'"{name}": …' for name in columns.values())
            raise UserError(f"{place}: must be an object, such as {{{shape}}}")
        for key, name in columns.items():
            if name not in values:
                raise UserError(f"{key}={name}: {place} has no such column; it has {', '.join(values)}")
        yield place, values
