"""Backups of the database, made while a service writes to it."""

import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest
from new_jobs import new_job

from hvd_transformer.errors import UserError
from hvd_transformer.service.storage.backup import back_up
from hvd_transformer.service.storage.store import Store


def names(path: Path) -> list[str]:
    """The jobs of a database, read with nothing of ours."""
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return [row[0] for row in connection.execute("SELECT name FROM jobs ORDER BY id")]


def test_a_backup_of_a_service_that_runs(tmp_path: Path) -> None:
    """What is in the WAL only is in it, too; a later backup replaces an earlier one."""
    target = tmp_path / "backup.db"
    with closing(Store(tmp_path / "service.db")) as store:
        store.add_jobs([new_job("a")])
        back_up(tmp_path / "service.db", target)
        assert names(target) == ["a"]
        store.add_jobs([new_job("b")])
        back_up(tmp_path / "service.db", target)
        assert names(target) == ["a", "b"]
        assert [job.name for job in store.jobs()] == ["a", "b"]
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert not list(tmp_path.glob(".*"))


def test_a_backup_is_put_back(tmp_path: Path) -> None:
    with closing(Store(tmp_path / "service.db")) as store:
        store.add_jobs([new_job("a")])
    back_up(tmp_path / "service.db", tmp_path / "backup.db")
    (tmp_path / "new").mkdir()
    (tmp_path / "backup.db").rename(tmp_path / "new" / "service.db")
    with closing(Store(tmp_path / "new" / "service.db")) as store:
        assert [job.name for job in store.jobs()] == ["a"]
        assert store.add_jobs([new_job("b")]) == [2]


def test_what_cannot_be_backed_up(tmp_path: Path) -> None:
    source = tmp_path / "service.db"
    with pytest.raises(UserError, match=f"^{source}: no such file"):
        back_up(source, tmp_path / "backup.db")
    Store(source).close()
    with pytest.raises(UserError, match=f"^{tmp_path}: is a folder; name a file$"):
        back_up(source, tmp_path)
    missing = tmp_path / "none" / "backup.db"
    with pytest.raises(UserError, match=f"^{missing}: cannot be written: No such file or directory$"):
        back_up(source, missing)
    source.write_bytes(b"no database" * 1000)
    (tmp_path / "backup.db").write_text("the last good one")
    with pytest.raises(UserError, match="is no SQLite database"):
        back_up(source, tmp_path / "backup.db")
    assert (tmp_path / "backup.db").read_text() == "the last good one"
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    "name", ["service.db", "../here/service.db", "service.db-wal", "service.db.lock", "link", "twin"]
)
def test_a_backup_is_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A file that took the database's place would destroy it, as its service goes on writing to the old one."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    path = Path("service.db").absolute()
    with closing(Store(path)) as store:
        store.add_jobs([new_job("a")])
        Path("link").symlink_to("service.db")
        Path("twin").hardlink_to("service.db")
        before = path.stat().st_ino
        with pytest.raises(UserError, match=f"^{name}: is the service's own database; name another file$"):
            back_up(path, Path(name))
        assert path.stat().st_ino == before
        store.add_jobs([new_job("b")])
    assert names(path) == ["a", "b"]
