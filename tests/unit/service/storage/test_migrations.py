"""Databases of earlier versions are converted as they are, and steps that fail leave the version before."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from hvd_transformer.errors import UserError
from hvd_transformer.service.jobs import Attempt, Cause, Engine, Host, Job, Needs, Placement, State
from hvd_transformer.service.storage import database as database_module
from hvd_transformer.service.storage import migrations
from hvd_transformer.service.storage.sessions import Sessions
from hvd_transformer.service.storage.settings import Limits
from hvd_transformer.service.storage.store import Store
from hvd_transformer.service.storage.tokens import Principal, Role, Tokens

VERSION_1 = Path(__file__).with_name("database_version_1.sql").read_text(encoding="utf-8")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A database as the first release left it."""
    path = tmp_path / "service.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(VERSION_1)
    return path


def tables(path: Path) -> list[tuple[str, str, str]]:
    """What SQLite knows of each table and index, without regard to spaces and quotes."""
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT type, name, coalesce(sql, '') FROM sqlite_master")
        return sorted((kind, name, "".join(sql.replace('"', "").split())) for kind, name, sql in rows)


def version(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute("PRAGMA user_version").fetchone()[0])


def add_step(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    more = (*migrations.MIGRATIONS, script)
    monkeypatch.setattr(migrations, "MIGRATIONS", more)
    monkeypatch.setattr(database_module, "MIGRATIONS", more)


def test_a_converted_database_has_the_tables_of_a_new_one(old: Path, tmp_path: Path) -> None:
    Store(tmp_path / "new.db").close()
    Store(old).close()
    assert tables(old) == tables(tmp_path / "new.db")
    assert version(old) == version(tmp_path / "new.db") == len(migrations.MIGRATIONS)


def test_all_that_version_1_knew_is_kept(old: Path) -> None:
    with closing(Store(old)) as store:
        config = {"task": "language_model", "optimizer.lr": 0.001, "data.files": ["a.txt", "é.txt"]}
        assert store.job(1) == Job(
            id=1,
            name="small",
            owner="ann",
            state=State.RUNNING,
            priority=5,
            submitted=1764000000.5,
            needs=Needs(2, 2),
            output_dir="/runs/small-1",
            folder="/home/ann",
            words=("task=language_model", "output_dir=/runs/small-1"),
            launch=("--timeline",),
            config=config,
            code="abc",
            env_names=("TOKEN",),
            env_file="/home/ann/.env",
            tags=("first", "optimizer.lr=1e-3"),
            time_limit=3600.0,
            retries=1,
        )
        jobs = store.jobs()
        assert [(job.name, job.state.value, job.array, job.after) for job in jobs] == [
            ("small", "RUNNING", None, ()),
            ("sweep", "STOPPING", 2, ()),
            ("sweep", "QUEUED", 2, ()),
            ("after", "HELD", None, (1, 3)),
            ("big", "QUEUED", None, ()),
            ("gone", "CANCELLED", None, ()),
        ]
        assert {job.engine for job in jobs} == {Engine.HOSTS} and store.external_attempts() == []
        assert jobs[1].stopping is Cause.PREEMPTED and jobs[5].ended == 1764000040.0
        assert (jobs[2].reason, jobs[2].estimated_start) == ("resources: needs 2 slots, 0 are free", 1764000900.0)
        assert jobs[4].needs == Needs(4, 2, 2, 1) and jobs[4].max_retries == 0
        assert store.attempts(1) == [
            Attempt(1, 1, (Placement("h2", 2, (0, 1)),), 1764000010.0, 1764000020.0, 0, 40, 75, cause="rank 1 stalled"),
            Attempt(1, 2, (Placement("h2", 1, (2,)), Placement("h1", 1)), 1764000030.0),
        ]
        assert [attempt.job for attempt in store.open_attempts()] == [1, 2]
        assert store.hosts() == [
            Host("h2", 4, (0, 1, 2, 3), 8, drained=True),
            Host("h1", 2, down="ssh: connection refused"),
        ]
        assert store.usage(1764000050.0) == {"ann": 120.5}
        assert store.limits("ann") == Limits(max_slots=8) and store.limits("ben") == Limits(max_queued=5)
        assert store.retention_days() == 30.0
        assert store.submitted_before("ann", "key 1", "{}") == [1]
        assert store.last_seq() == 22
        tokens = Tokens(store.database).list()
        assert [(token.name, token.owner, token.role, token.expires) for token in tokens] == [
            ("laptop", "ann", Role.SUBMIT, 1765000000.0)
        ]


def test_attempts_that_wait_in_another_scheduler_s_queue_are_known_as_such(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of Slurm that runs and one that waits there, in a database of before."""
    for module in (migrations, database_module):
        monkeypatch.setattr(module, "MIGRATIONS", migrations.MIGRATIONS[:6])
    Store(old).close()
    monkeypatch.undo()
    with closing(sqlite3.connect(old)) as connection:
        for job, state in ((3, "RUNNING"), (5, "STARTING")):
            connection.execute("UPDATE jobs SET engine = 'slurm', state = ? WHERE id = ?", (state, job))
            connection.execute("INSERT INTO attempts (job, number, began) VALUES (?, 1, 1000.0)", (job,))
        connection.commit()
    with closing(Store(old)) as store:
        store.end_attempt(1, 2, ended=1764000031.0, state=State.FAILED)
        for job in (3, 5):
            store.end_attempt(job, 1, ended=1100.0, state=State.FAILED)
        assert [store.attempts(job)[-1].seconds for job in (1, 3, 5)] == [1.0, 100.0, 0.0]


def test_the_steps_are_taken_once_and_the_file_before_them_is_kept(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(old).close()
    first = len(migrations.MIGRATIONS)
    add_step(monkeypatch, "ALTER TABLE jobs ADD COLUMN colour TEXT NOT NULL DEFAULT 'red'")
    for _ in range(2):
        with closing(Store(old)) as store:
            assert len(store.jobs()) == 6
            with store.database.read() as connection:
                assert {row["colour"] for row in connection.execute("SELECT colour FROM jobs")} == {"red"}
    kept = old.with_name(f"service.db.version-{first}")
    assert (version(kept), version(old)) == (first, first + 1)
    assert kept.stat().st_mode & 0o777 == 0o600
    monkeypatch.undo()
    with pytest.raises(UserError, match=rf"^{old}: was written by a newer hvd-transformer \(version {first + 1} of"):
        Store(old)
    old.unlink()
    kept.rename(old)
    with closing(Store(old)) as store:
        assert len(store.jobs()) == 6


def test_a_step_that_fails_leaves_the_version_before(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(old).close()
    before = tables(old)
    add_step(monkeypatch, "DROP TABLE tags; DELETE FROM jobs; INSERT INTO nowhere VALUES (1)")
    with pytest.raises(sqlite3.OperationalError, match="nowhere"):
        Store(old)
    monkeypatch.undo()
    assert tables(old) == before
    with closing(Store(old)) as store:
        assert store.jobs()[0].tags == ("first", "optimizer.lr=1e-3")


def test_a_step_must_not_break_references(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_step(monkeypatch, "DELETE FROM jobs WHERE id = 1")
    with pytest.raises(AssertionError, match=f"migration {len(migrations.MIGRATIONS)}:"):
        Store(old)
    monkeypatch.undo()
    with closing(Store(old)) as store:
        assert len(store.jobs()) == 6


def test_who_looks_does_not_convert(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = old.read_bytes()
    add_step(monkeypatch, "ALTER TABLE jobs ADD COLUMN colour TEXT")
    with pytest.raises(
        UserError, match=f"^{old}: is of an earlier release; start hvd-transformer serve, which converts"
    ):
        Store(old, read_only=True)
    assert old.read_bytes() == before


def test_the_principal_of_a_token_of_version_1(tmp_path: Path) -> None:
    """Its digest is the SHA-256 of its secret, in this version and in every later one."""
    path = tmp_path / "service.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(VERSION_1)
        digest = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"  # printf secret | sha256sum
        connection.execute("UPDATE tokens SET digest = ?, expires = NULL", (bytes.fromhex(digest),))
        connection.commit()
    with closing(Store(path)) as store:
        assert Tokens(store.database).check("secret") == Principal("ann", Role.SUBMIT)
        sessions = Sessions(store.database)
        session = sessions.find(sessions.open("secret"))
        assert session is not None and session.principal == Principal("ann", Role.SUBMIT)
