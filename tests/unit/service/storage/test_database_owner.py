"""One service at a time has a database: real processes, which are killed."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hvd_transformer.errors import UserError
from hvd_transformer.service.storage import database_owner
from hvd_transformer.service.storage.database_owner import DatabaseOwner

OWNER = """
import subprocess, sys
from pathlib import Path
from hvd_transformer.service.storage.database_owner import DatabaseOwner
owner = DatabaseOwner(Path(sys.argv[1]))
child = subprocess.Popen(["sleep", "60"])
print(child.pid, flush=True)
sys.stdin.read()
"""


@contextmanager
def another_service(database: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that has the database, and one that it has started."""
    words = [sys.executable, "-c", OWNER, database]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        child = int(process.stdout.readline())
        try:
            yield process, child
        finally:
            process.kill()
            subprocess.run(["kill", str(child)], check=False)


def test_the_owner_is_named_and_followed_at_once_after_its_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = tmp_path / "service.db"
    with another_service(database) as (process, child):
        monkeypatch.setattr(database_owner, "_PATIENCE", 0.1)
        with pytest.raises(UserError) as raised:
            DatabaseOwner(database)
        assert str(raised.value).startswith(f"{database}: in use by hvd-transformer serve on host ")
        assert f"(process {process.pid}, since 2" in str(raised.value)
        assert str(raised.value).endswith("end it, or choose another folder with --state")
        process.kill()
        process.wait()
        monkeypatch.setattr(database_owner, "_PATIENCE", 0.0)
        assert Path(f"/proc/{child}").exists()  # what it started goes on, and does not keep the database
        DatabaseOwner(database).release()


def test_one_after_the_other_in_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_owner, "_PATIENCE", 0.0)
    for _ in range(2):
        owner = DatabaseOwner(tmp_path / "service.db")
        with pytest.raises(UserError, match="service.db: in use by hvd-transformer serve"):
            DatabaseOwner(tmp_path / "service.db")
        DatabaseOwner(tmp_path / "other.db").release()
        owner.release()


def test_a_link_is_no_lock(tmp_path: Path) -> None:
    (tmp_path / "diary").write_text("precious")
    (tmp_path / "service.db.lock").symlink_to(tmp_path / "diary")
    with pytest.raises(UserError, match="service.db.lock: cannot be written: Too many levels of symbolic links"):
        DatabaseOwner(tmp_path / "service.db")
    assert (tmp_path / "diary").read_text() == "precious"
