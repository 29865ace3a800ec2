"""Labelled texts from every form of file, and one line for what is wrong with them."""

import errno
import gzip
import json
import os
from pathlib import Path

import pytest

from hvd_transformer.config import load
from hvd_transformer.data.build_once import ALONE, Stopped
from hvd_transformer.data.published import source_path
from hvd_transformer.data.splits import real_path
from hvd_transformer.data.tables import TableFiles
from hvd_transformer.data.text_corpus import open_text
from hvd_transformer.errors import UserError

ROWS = [('房间很好，服务 "不错"', "1"), ("a, b\nand c", "0"), ("", "1")]


def read(path: Path, *words: str) -> dict[str, list[tuple[str, str | None]]]:
    rows = TableFiles(load(overrides=["task=classification", *words]).data).open(path, seed=1)
    return {split: [(row.texts[0], row.label) for row in rows.splits[split]()] for split in rows.splits}


def refused(path: Path, *words: str) -> str:
    with pytest.raises(UserError) as caught:
        read(path, *words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


CSV = 'id,label,text\n7,1,"房间很好，服务 ""不错"""\n\n8,0,"a, b\nand c"\n9,1,\n'


def test_csv(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("\ufeff" + CSV, encoding="utf-8")
    (tmp_path / "val.csv.gz").write_bytes(gzip.compress(CSV.replace("\n", "\r\n").encode()))
    assert read(tmp_path)["train"] == ROWS
    assert [label for _, label in read(tmp_path)["valid"]] == ["1", "0", "1"]


def test_tab_separated_values_and_json_lines(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text('review\tstars\na "quote\t5\nb\t1\n')
    lines = [{"review": "a", "stars": 5}, {"stars": 1, "review": "b"}]
    (tmp_path / "valid.jsonl").write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    found = read(tmp_path, "data.text_column=review", "data.label_column=stars")
    assert found == {"train": [('a "quote', "5"), ("b", "1")], "valid": [("a", "5"), ("b", "1")]}


def test_a_carriage_return_in_a_tabbed_text_is_a_character(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_bytes(b"text\tlabel\r\nfoo\rbar\ty\r\n\r\nb\tn\r\n")
    (tmp_path / "valid.tsv").write_text("text\tlabel\nb\tn\n")
    assert read(tmp_path)["train"] == [("foo\rbar", "y"), ("b", "n")]


def test_one_file_is_split_by_seed(tmp_path: Path) -> None:
    file = tmp_path / "all.csv"
    file.write_text("text,label\n" + "".join(f"t{number},{number % 2}\n" for number in range(50)))
    found = read(file, "data.split=[0.9, 0.1]")
    assert {split: len(rows) for split, rows in found.items()} == {"train": 45, "valid": 5}
    assert sorted(row for rows in found.values() for row in rows) == sorted(
        (f"t{number}", str(number % 2)) for number in range(50)
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'text,label\na,1\n"b\nc,2\nd,3\n',
            ", line 3: a broken quote, or a carriage return outside of quotes: unexpected end of data",
        ),
        (
            'text,label\na,1\n"b"c,2\n',
            ", line 3: a broken quote, or a carriage return outside of quotes: ',' expected after '\"'",
        ),
        ("text,label\na,1\nb\n", ", line 3: 1 columns, but the first line names 2"),
    ],
)
def test_broken_rows_are_told_with_their_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "x.csv"
    file.write_text(text)
    assert refused(file) == f"{file}{message}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (r'{"text": "a \ud83d b", "label": 1}', "text contains an unpaired surrogate (invalid Unicode)"),
        (r'{"text": "a", "label": "\udc00"}', "label contains an unpaired surrogate (invalid Unicode)"),
        ('{"text": "a", "label": null}', "label must be a string or a number, and not empty"),
        ('{"text": "a", "label": [1]}', "label must be a string or a number, and not empty"),
        ('{"text": "a", "label": ""}', "label must be a string or a number, and not empty"),
    ],
)
def test_a_line_without_text_or_label_is_named(tmp_path: Path, line: str, message: str) -> None:
    """Python's word for null would be a class of its own."""
    file = tmp_path / "x.jsonl"
    file.write_text('{"text": "a", "label": true}\n' + line + "\n")
    assert refused(file) == f"{file}, line 2: {message}"


@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_a_row_without_label_is_named(tmp_path: Path, ending: str) -> None:
    separator = "," if ending == "csv" else "\t"
    file = tmp_path / f"x.{ending}"
    file.write_text("text,label\na,1\nb,\n".replace(",", separator))
    assert refused(file) == f"{file}, line 3: label is empty; each text needs a label"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "{file}: its first line must name the columns, such as text"),
        ("\ntext,label\na,1\n", "{file}: its first line must name the columns, such as text"),
        ("text,label\n", "{file}: has no rows"),
        ("text,label,text\na,1,b\n", "data.text_column=text: {file} has several columns of this name; give each "),
        ("label,text,label\n1,a,1\n", "data.label_column=label: {file} has several columns of this name; give each "),
    ],
)
def test_a_table_without_rows_or_with_odd_columns(tmp_path: Path, text: str, message: str) -> None:
    for name, data in {"x.csv": text, "x.tsv": text.replace(",", "\t")}.items():
        (file := tmp_path / name).write_text(data)
        assert refused(file).startswith(message.format(file=file))


def test_what_is_missing_is_told_with_what_there_is(tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.write_text("review,stars\na,1\n")
    told = "has no such column; it has review, stars (its first line must name the columns)"
    assert refused(file) == f"data.text_column=text: {file} {told}"
    assert refused(file, "data.text_column=review").startswith("data.label_column=label: ")
    lines = tmp_path / "x.jsonl"
    lines.write_text('{"text": "a", "label": 1}\n{"text": "a"}\n')
    assert refused(lines) == f"data.label_column=label: {lines}, line 2 has no such column; it has text"
    lines.write_text('{"text": "a", "label": 1}\n{oops\n')
    assert refused(lines).startswith(f"{lines}, line 2: not valid JSON: ")
    lines.write_text('{"text": 5, "label": 1}\n')
    assert refused(lines) == f"{lines}, line 1: text must be a string"
    other = tmp_path / "x.xlsx"
    other.write_text("")
    assert refused(other) == f"{other}: must end in .csv, .tsv, .jsonl, .json, each optionally followed by .gz"
    folder = tmp_path / "folder"
    folder.mkdir()
    assert refused(folder) == f"{folder}: no train split; it must hold train.csv, train.tsv or train.jsonl"


def test_a_link_to_a_file_without_ending(tmp_path: Path) -> None:
    """As in the cache of huggingface_hub."""
    (tmp_path / "3f2a").write_text(CSV, encoding="utf-8")
    (tmp_path / "test.csv").symlink_to("3f2a")
    (tmp_path / "v1.2").mkdir()
    (tmp_path / "current").symlink_to("v1.2")
    (tmp_path / "blob.gz").touch()
    (tmp_path / "test.jsonl.gz").symlink_to("blob.gz")
    (tmp_path / "other.csv").symlink_to("test.csv")
    (tmp_path / "all.csv").touch()
    (tmp_path / "link.csv").symlink_to("all.csv")
    for name, wanted in {
        "test.csv": "test.csv", "other.csv": "other.csv", "test.jsonl.gz": "test.jsonl.gz", "link.csv": "all.csv",
        "current": "v1.2",
    }.items():  # fmt: skip
        assert real_path(tmp_path / name) == tmp_path / wanted
    config = load(overrides=["task=classification", f"data.source={tmp_path / 'test.csv'}"]).data
    assert source_path(config, {}, ALONE) == tmp_path / "test.csv"


def test_counting_the_rows_of_a_large_file_can_be_stopped(tmp_path: Path) -> None:
    (tmp_path / "all.csv").write_text("label,text\n" + "1,a\n" * 20_000)
    looks: list[None] = []
    config = load(overrides=["task=classification"]).data
    rows = TableFiles(config, lambda: bool(looks.append(None)) or len(looks) == 3).open(tmp_path / "all.csv", seed=1)
    with pytest.raises(Stopped):
        next(iter(rows.splits["train"]()))
    assert len(looks) == 3


def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(path: Path, *more: object, **options: object) -> bool:  # root may read everything
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    files = TableFiles(load(overrides=["task=classification"]).data)
    monkeypatch.setattr(Path, "is_file", refuses)
    for call in (lambda: files.open(tmp_path, seed=1), lambda: files.open_split(tmp_path, None)):
        with pytest.raises(UserError, match=rf"^{tmp_path}: cannot be read: Permission denied$"):
            call()
    with pytest.raises(UserError, match="cannot be read: Permission denied"):
        open_text(load().data, tmp_path / "a.txt", None)
