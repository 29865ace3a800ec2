"""Finds run directories, and looks only where something has changed."""

import os
import shutil
import time
from pathlib import Path

import pytest

from hvd_transformer.service.runs import folders as module
from hvd_transformer.service.runs.folders import FolderScan


def _run(path: Path) -> Path:
    path.mkdir(parents=True)
    for name in module.MARKS:
        (path / name).touch()
    return path


def _age(root: Path) -> None:
    """As if nothing had changed for a minute."""
    before = time.time() - 60
    for path in (root, *root.rglob("*")):
        os.utime(path, (before, before), follow_symlinks=False)


def test_finds_runs_at_any_level(tmp_path: Path) -> None:
    runs = {_run(tmp_path / "a"), _run(tmp_path / "sweep" / "1"), _run(tmp_path / "b" / "c" / "d" / "e")}
    _run(tmp_path / "a" / "inner")  # within a run
    _run(tmp_path / ".hidden")
    _run(tmp_path / "1" / "2" / "3" / "4" / "5" / "6")  # too deep
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.yaml").touch()
    scan = FolderScan(tmp_path)
    assert scan.find() == runs
    assert not scan.cut


def test_the_root_may_be_a_run(tmp_path: Path) -> None:
    run = _run(tmp_path / "run")
    assert FolderScan(run).find() == {run}


def test_links_are_not_followed(tmp_path: Path) -> None:
    outside = _run(tmp_path / "outside")
    root = tmp_path / "runs"
    (root / "files").mkdir(parents=True)
    (root / "link").symlink_to(outside)
    (root / "loop").symlink_to(root)
    for name in module.MARKS:
        (root / "files" / name).symlink_to(outside / name)
    assert FolderScan(root).find() == set()


def test_new_and_removed_runs_are_noticed(tmp_path: Path) -> None:
    first = _run(tmp_path / "sweep" / "1")
    _age(tmp_path)
    scan = FolderScan(tmp_path)
    assert scan.find() == {first}
    second = tmp_path / "sweep" / "2"
    second.mkdir()
    assert scan.find() == {first}
    (second / "config.yaml").touch()
    (second / "metrics.jsonl").touch()
    assert scan.find() == {first, second}
    for name in module.MARKS:
        (first / name).unlink()
    scan.forget(first)
    assert scan.find() == {second}


def test_settled_folders_are_not_listed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _run(tmp_path / "sweep" / "1")
    (tmp_path / "other").mkdir()
    _age(tmp_path)
    scan = FolderScan(tmp_path)
    found = scan.find()
    listed: list[Path] = []
    scandir = os.scandir
    monkeypatch.setattr(module.os, "scandir", lambda path: listed.append(path) or scandir(path))
    assert scan.find() == found
    assert listed == []
    (tmp_path / "other" / "new").mkdir()
    scan.find()
    assert listed == [tmp_path / "other", tmp_path / "other" / "new"]


def test_the_number_of_folders_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_FOLDERS", 5)
    for number in range(10):
        (tmp_path / str(number)).mkdir()
    scan = FolderScan(tmp_path)
    scan.find()
    assert scan.cut


def test_known_runs_stay_where_there_are_too_many_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders that come later, and precede the runs, hide only new ones."""
    monkeypatch.setattr(module, "MOST_FOLDERS", 5)
    runs = {_run(tmp_path / name) for name in ("zz-1", "zz-2", "zz-3")}
    scan = FolderScan(tmp_path)
    assert scan.find() == runs
    for number in range(10):
        (tmp_path / str(number)).mkdir()
    for _ in range(3):
        assert scan.find() == runs
        assert scan.cut
    shutil.rmtree(tmp_path / "zz-1")
    (tmp_path / "zz-2").rename(tmp_path / "zz-4")
    assert scan.find() == {tmp_path / "zz-3"}
    for number in range(10):
        (tmp_path / str(number)).rmdir()
    assert scan.find() == {tmp_path / "zz-3", tmp_path / "zz-4"}
    assert not scan.cut


def test_unreadable_folders_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run(tmp_path / "a")
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def refuse(path: Path) -> "os._ScandirIterator[str]":
        if path.name == "closed":  # root may list every folder
            raise PermissionError(path)
        return scandir(path)

    monkeypatch.setattr(module.os, "scandir", refuse)
    assert FolderScan(tmp_path).find() == {run}
    assert FolderScan(tmp_path / "missing").find() == set()
