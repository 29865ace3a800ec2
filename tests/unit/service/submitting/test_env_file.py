"""Private files with values of variables: what is read, and that no message shows a value."""

import os
from pathlib import Path

import pytest

from hvd_transformer.errors import UserError
from hvd_transformer.service.submitting.env_file import read_values

ME = {os.geteuid()}


def private(folder: Path, text: str | bytes, mode: int = 0o600) -> Path:
    file = folder / "values.env"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    file.chmod(mode)
    return file


def test_values_go_to_the_end_of_the_line(tmp_path: Path) -> None:
    file = private(tmp_path, "# a comment\n\n  export TOKEN=a=b 'c' #d\nOTHER=\n  \nTOO=1\n")
    assert read_values(file, ["TOKEN", "OTHER"], ME) == {"TOKEN": "a=b 'c' #d", "OTHER": ""}
    assert read_values(private(tmp_path, "A=1\r\nA=2\r\n"), ["A"], ME) == {"A": "2"}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("SECRET", ", line 1: not of the form NAME=VALUE"),
        ("A=SECRET\n2B=SECRET", ", line 2: not of the form NAME=VALUE"),
        (b"A=SECRET\xff", ": not valid UTF-8"),
        ("A=" + "SECRET" * 200_000, ": larger than 1 MiB"),
    ],
    ids=["no name", "digit", "bytes", "large"],  # they become a part of the path
)
def test_a_malformed_file(tmp_path: Path, text: str | bytes, line: str) -> None:
    file = private(tmp_path, text)
    with pytest.raises(UserError) as error:
        read_values(file, ["A"], ME)
    assert str(error.value) == f"--env-file {file}{line}"
    assert "SECRET" not in str(error.value)


def test_what_it_lacks(tmp_path: Path) -> None:
    file = private(tmp_path, "A=1")
    with pytest.raises(UserError, match=f"^--env B: not in {file}$"):
        read_values(file, ["A", "B"], ME)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o610])
def test_others_must_not_read_it(tmp_path: Path, mode: int) -> None:
    with pytest.raises(UserError, match="others may read or write it; use: chmod 600"):
        read_values(private(tmp_path, "A=1", mode), ["A"], ME)


def test_another_users_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="belongs to another user"):
        read_values(private(tmp_path, "A=1"), ["A"], {os.geteuid() + 1})


def test_only_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path, why in (
        (tmp_path, "Is a directory"),
        (tmp_path / "pipe", "not a file"),
        (tmp_path / "no", "cannot be read"),
    ):
        with pytest.raises(UserError, match=why):
            read_values(path, ["A"], ME)
