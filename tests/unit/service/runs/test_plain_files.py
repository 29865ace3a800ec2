"""What anybody may have put into a run directory is read without harm."""

import gc
import os
from pathlib import Path

import pytest

from hvd_transformer.config import dump, load
from hvd_transformer.config.schema import flatten
from hvd_transformer.service.runs.plain_files import list_folder, open_plain, plain, read_config, read_json, read_plain


def test_reads_what_hvd_train_writes(tmp_path: Path) -> None:
    config = load(
        preset="tiny", overrides=["output_dir=ä", "task=classification", "data.class_weights={good: 1, bad: 2.5}"]
    )
    (tmp_path / "config.yaml").write_text(dump(config), encoding="utf-8")
    assert read_config(tmp_path / "config.yaml") == flatten(config)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,  # crashes libyaml's loader
        "- " * 100_000,
        "a: &a [1]\n" + "".join(f"{chr(98 + n)}: &{chr(98 + n)} [{f'*{chr(97 + n)},' * 9}]\n" for n in range(8)),
        "a: &a [*a]",
        "key: !!python/object/apply:os.system [true]",
        "a: 2020-13-45",
        "\x00",
        "just text",
        "a: [",
        "x: " + "y" * 1_000_000,
        "a: &a !!pairs [k: x]\n"
        + "".join(
            f"{chr(98 + n)}: &{chr(98 + n)} !!pairs [{', '.join([f'k: *{chr(97 + n)}'] * 9)}]\n" for n in range(8)
        ),
        "x: &a !!pairs [k: *a]",
        "x: !!bool maybe",
        "x: !!timestamp y",
        'x: !!int ""',
    ],
)
def test_hostile_configurations_are_empty(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    assert read_config(tmp_path / "config.yaml") == {}


def test_half_characters_become_question_marks() -> None:
    assert plain({"a\ud800": ["\udcff", "ä", float("nan")]}) == {"a?": ["?", "ä", "nan"]}


def test_what_json_lacks_becomes_text(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: 2020-01-02\nb: {1: .inf, c: !!set {x}}\n2: {}\n", encoding="utf-8")
    assert read_config(tmp_path / "config.yaml") == {"a": "2020-01-02", "b.1": "inf", "b.c": ["x"], "2": {}}


@pytest.mark.parametrize("text", ["", "[1]", '{"a": ', "[" * 100_000, "\udcff", " " * (5 << 20) + "{}"])
def test_bad_json_is_empty(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_bytes(text.encode(errors="surrogateescape"))
    assert read_json(tmp_path / "a.json") == {}


@pytest.mark.parametrize("part", ["file", "folder"])
def test_links_are_refused_wherever_they_are(tmp_path: Path, part: str) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_text("secret")
    if part == "file":
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "file").symlink_to(tmp_path / "real" / "file")
    else:
        (tmp_path / "run").symlink_to(tmp_path / "real")
        with pytest.raises(OSError):
            list_folder(tmp_path / "run")
    with pytest.raises(OSError):
        read_plain(tmp_path / "run" / "file", 100)
    assert read_plain(tmp_path / "real" / "file", 6) == b"secret"
    with pytest.raises(OSError):
        read_plain(tmp_path / "real" / "file", 5)


def test_leaves_no_descriptor_open(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    gc.collect()  # what other tests left is not to go meanwhile
    before = len(list(Path("/proc/self/fd").iterdir()))
    for name in ("pipe", "missing", "file/inner"):
        with pytest.raises(OSError):
            open_plain(tmp_path / name)
    read_plain(tmp_path / "file", 1)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
