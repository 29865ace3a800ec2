"""Paths and published names; what is not there is told with what to do."""

import gzip
from pathlib import Path

import pytest

from hvd_transformer.config import load
from hvd_transformer.data import published
from hvd_transformer.data.build_once import ALONE
from hvd_transformer.data.parallel_text import PairFiles
from hvd_transformer.data.published import PAIRS, source_path
from hvd_transformer.errors import UserError


def found(folder: Path, source: str) -> Path:
    config = load(overrides=[f"data.source={source}", f"data.cache_dir={folder / 'cache'}"]).data
    return source_path(config, PAIRS, ALONE)


def test_a_path_wins_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "multi30k").mkdir()
    assert found(tmp_path, "multi30k") == tmp_path / "multi30k"


def test_names_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.source=multi3k: .*no known name, did you mean multi30k\?"):
        found(tmp_path, "multi3k")
    folder = tmp_path / "cache" / "wmt14"
    with pytest.raises(UserError) as caught:
        found(tmp_path, "wmt14")
    wanted = f"put train.{{de,en}}, valid.{{de,en}} and test.{{de,en}} into {folder} by hand"
    assert str(caught.value) == f"data.source=wmt14: cannot be downloaded by a program; {wanted}"
    folder.mkdir(parents=True)
    (folder / "train.de").write_text("a\n")
    assert found(tmp_path, "wmt14") == folder


def test_multi30k_is_fetched_checked_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    counts = {"train": 29000, "val": 1014, "test_2016_flickr": 1000}

    def fake(address: str, folder: Path, should_stop: object) -> Path:
        asked.append(address)
        name = address.rpartition("/")[2]
        (folder / name).write_bytes(gzip.compress(b"a b\n" * counts[name.partition(".")[0]]))
        return folder / name

    monkeypatch.setattr(published, "_download", fake)
    folder = found(tmp_path, "multi30k")
    rows = PairFiles(load().data).open(folder, seed=1)
    assert {split: sum(1 for _ in rows.splits[split]()) for split in rows.splits} == {
        "train": 29000, "valid": 1014, "test": 1000
    }  # fmt: skip
    assert len(asked) == 6
    assert found(tmp_path, "multi30k") == folder
    assert len(asked) == 6


def test_a_download_of_other_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for content, reason in (
        (gzip.compress(b"a\n"), "has 1 lines, not the published 29000"),
        (b"no gzip", "is damaged"),
    ):

        def fake(address: str, folder: Path, should_stop: object, content: bytes = content) -> Path:
            path = folder / address.rpartition("/")[2]
            path.write_bytes(content)
            return path

        monkeypatch.setattr(published, "_download", fake)
        with pytest.raises(UserError, match=reason) as caught:
            found(tmp_path, "multi30k")
        assert "into " in str(caught.value) and str(caught.value).endswith("by hand")
        assert not (tmp_path / "cache" / "multi30k").exists()
