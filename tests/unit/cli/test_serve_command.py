"""`hvd-transformer serve`: what it refuses before it makes anything, what it remembers, and backups."""

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from commands import command

from hvd_transformer.service import service as module
from hvd_transformer.service.remote.address import DATABASE
from hvd_transformer.service.storage.settings import Limits
from hvd_transformer.service.storage.store import Store

Serve = Callable[..., str]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Starts and ends a service in `tmp_path`; returns what it prints."""
    monkeypatch.setattr(module.TrainingService, "run", lambda service: None)

    def served(*words: object, code: int = 0) -> str:
        folders = ["--state", "state"] if "--state" not in words else []
        port = ["--port", 0] if "--port" not in words else []
        done = command("hvd-transformer", "serve", *folders, *port, *words, folder=tmp_path)
        assert done.returncode == code, done.stdout + done.stderr
        assert not (code and done.stdout)
        return done.stderr if code else done.stdout

    return served


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--port 99999", "--port 99999: must be from 0"),
        ("--address 0.0.0.0", "--address 0.0.0.0: tokens would cross"),
        ("--webhook ftp://x", "--webhook ftp://x: must be like https://host"),
        ("--max-slots -1", "-1 is not in the range x>=0"),
        ("--max-slots many", "'many' is not a valid integer"),
        ("--retention-days 0", "0.0 is not in the range x>0"),
        ("--retention-days inf", "inf is not a finite number"),
        ("--hostfile absent", "absent: cannot be read"),
        ("--state ~nosuch/x", "Invalid value for '--state': ~nosuch/x: this machine knows no such home folder"),
    ],
)
def test_what_is_refused_leaves_nothing_behind(serve: Serve, tmp_path: Path, words: str, line: str) -> None:
    said = serve(*words.split(), code=2)
    assert line in said and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["--state", "--runs"])
def test_a_folder_that_cannot_be_made(serve: Serve, tmp_path: Path, option: str) -> None:
    (tmp_path / "file").touch()
    for path, why in ((tmp_path / "file", "File exists"), (tmp_path / "file" / "sub", "Not a directory")):
        said = serve(option, path, code=2)
        assert said == f"hvd-transformer: {option} {path}: cannot be used as a folder: {why}\n"


def test_limits_are_remembered_until_they_are_lifted(serve: Serve, tmp_path: Path) -> None:
    def remembered() -> tuple[Limits, float | None]:
        with closing(Store(tmp_path / "state" / DATABASE, read_only=True)) as store:
            return store.all_limits()[None], store.retention_days()

    serve("--max-running", 4, "--max-disk-gib", 2, "--retention-days", 90)
    assert remembered() == (Limits(max_running=4, disk_bytes=2**31), 90)
    serve("--max-slots", 16)
    assert remembered() == (Limits(max_running=4, max_slots=16, disk_bytes=2**31), 90)
    serve("--max-running", "none", "--max-disk-gib", "none", "--retention-days", "none")
    assert remembered() == (Limits(max_slots=16), None)


def test_the_secret_address_of_the_webhook_comes_from_the_environment(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No list of processes shows it there, and what the service starts does not have it."""
    found: list[tuple[str | None, bool]] = []
    init = module.Webhook.__init__

    def made(webhook: module.Webhook, address: str, *rest: object) -> None:
        found.append((address, "HVD_TRANSFORMER_WEBHOOK" in os.environ))
        init(webhook, address, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module.Webhook, "__init__", made)
    monkeypatch.setenv("HVD_TRANSFORMER_WEBHOOK", "https://hooks.example/secret")
    serve("-H", "localhost:1")
    serve("-H", "localhost:1", "--webhook", "https://hooks.example/given")
    assert found == [("https://hooks.example/secret", False), ("https://hooks.example/given", False)]
    monkeypatch.setenv("HVD_TRANSFORMER_WEBHOOK", "nonsense")
    assert "must be like https://host" in serve(code=2)


def test_backup(serve: Serve, tmp_path: Path) -> None:
    serve("--max-slots", 16)
    assert serve("--backup", "copy.db") == f"copy.db: has the database of {tmp_path}/state\n"
    with closing(sqlite3.connect(tmp_path / "copy.db")) as copy:
        assert copy.execute("SELECT count(*) FROM settings WHERE key = 'limits'").fetchone() == (1,)
    assert "no such file" in serve("--backup", "copy.db", "--state", "absent", code=2)
    assert not (tmp_path / "absent").exists()
