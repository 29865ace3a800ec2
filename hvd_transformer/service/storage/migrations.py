"""The tables of the service's database, and the steps from one version of them to the next."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hvd_transformer.errors import UserError

_APPLICATION = 0x68766474  # "hvdt": tells our databases from those of other programs

# Version n of the tables is what the first n scripts make. A script that has been released never changes.
# What a job was submitted with is in a table of its own, so that a change of state rewrites a short row.
MIGRATIONS: tuple[str, ...] = (
    f"""
    PRAGMA application_id = {_APPLICATION};

    CREATE TABLE jobs (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        name TEXT NOT NULL,
        owner TEXT NOT NULL,
        state TEXT NOT NULL,
        priority INTEGER NOT NULL,
        submitted REAL NOT NULL,
        num_ranks INTEGER NOT NULL,
        min_ranks INTEGER NOT NULL,
        tensor INTEGER NOT NULL,
        gpus_per_rank INTEGER NOT NULL,
        output_dir TEXT NOT NULL,
        array INTEGER,
        code TEXT NOT NULL,
        time_limit REAL,
        max_retries INTEGER NOT NULL,
        retries INTEGER NOT NULL DEFAULT 0,
        stopping TEXT,
        reason TEXT NOT NULL DEFAULT '',
        estimated_start REAL,
        ended REAL
    );
    CREATE INDEX jobs_by_state ON jobs (state, id);
    CREATE INDEX jobs_by_owner ON jobs (owner, state, id);
    CREATE INDEX jobs_by_output ON jobs (output_dir, id);
    CREATE INDEX jobs_by_end ON jobs (ended) WHERE ended IS NOT NULL;

    CREATE TABLE requests (
        job INTEGER PRIMARY KEY REFERENCES jobs ON DELETE CASCADE,
        body TEXT NOT NULL
    );
    CREATE TABLE tags (
        job INTEGER NOT NULL REFERENCES jobs ON DELETE CASCADE,
        tag TEXT NOT NULL,
        PRIMARY KEY (job, tag)
    ) WITHOUT ROWID;
    CREATE INDEX tags_by_tag ON tags (tag, job);

    CREATE TABLE dependencies (
        job INTEGER NOT NULL REFERENCES jobs ON DELETE CASCADE,
        after INTEGER NOT NULL,
        PRIMARY KEY (job, after)
    ) WITHOUT ROWID;
    CREATE INDEX dependencies_by_after ON dependencies (after);

    CREATE TABLE attempts (
        job INTEGER NOT NULL REFERENCES jobs ON DELETE CASCADE,
        number INTEGER NOT NULL,
        began REAL NOT NULL,
        ended REAL,
        first_step INTEGER,
        last_step INTEGER,
        code INTEGER,
        cause TEXT NOT NULL DEFAULT '',
        PRIMARY KEY (job, number)
    ) WITHOUT ROWID;
    CREATE UNIQUE INDEX one_open_attempt ON attempts (job) WHERE ended IS NULL;

    CREATE TABLE placements (
        job INTEGER NOT NULL,
        number INTEGER NOT NULL,
        position INTEGER NOT NULL,
        host TEXT NOT NULL,
        ranks INTEGER NOT NULL,
        gpus TEXT NOT NULL,
        in_use INTEGER NOT NULL DEFAULT 1,
        PRIMARY KEY (job, number, position),
        FOREIGN KEY (job, number) REFERENCES attempts ON DELETE CASCADE
    ) WITHOUT ROWID;
    CREATE INDEX placements_in_use ON placements (host) WHERE in_use;

    CREATE TABLE hosts (
        id INTEGER PRIMARY KEY,
        name TEXT NOT NULL UNIQUE,
        slots INTEGER NOT NULL,
        gpus TEXT NOT NULL,
        threads INTEGER NOT NULL,
        drained INTEGER NOT NULL DEFAULT 0,
        down TEXT NOT NULL DEFAULT ''
    );

    CREATE TABLE usage (
        owner TEXT PRIMARY KEY,
        slot_seconds REAL NOT NULL,
        at REAL NOT NULL
    ) WITHOUT ROWID;

    CREATE TABLE settings (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

    CREATE TABLE idempotency_keys (
        owner TEXT NOT NULL,
        key TEXT NOT NULL,
        body BLOB NOT NULL,
        jobs TEXT NOT NULL,
        time REAL NOT NULL,
        PRIMARY KEY (owner, key)
    ) WITHOUT ROWID;
    CREATE INDEX idempotency_keys_by_time ON idempotency_keys (time);

    CREATE TABLE events (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        kind TEXT NOT NULL,
        id TEXT NOT NULL,
        UNIQUE (kind, id)
    );

    CREATE TABLE tokens (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        name TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        role TEXT NOT NULL,
        digest BLOB NOT NULL UNIQUE,
        created REAL NOT NULL,
        last_used REAL,
        expires REAL
    );
    """,
    """
    CREATE TABLE sessions (
        id INTEGER PRIMARY KEY,
        token INTEGER NOT NULL REFERENCES tokens ON DELETE CASCADE,
        digest BLOB NOT NULL UNIQUE,
        ends REAL NOT NULL
    );
    CREATE INDEX sessions_by_token ON sessions (token, id);
    """,
    """
    CREATE TABLE run_tags (run TEXT NOT NULL, tag TEXT NOT NULL, PRIMARY KEY (run, tag)) WITHOUT ROWID;
    """,
    """
    ALTER TABLE jobs ADD COLUMN engine TEXT NOT NULL DEFAULT 'hosts';
    CREATE INDEX jobs_by_engine ON jobs (engine, state, id);
    ALTER TABLE attempts ADD COLUMN external TEXT;
    ALTER TABLE attempts ADD COLUMN asked_to_stop INTEGER NOT NULL DEFAULT 0;
    """,
    """
    CREATE TABLE job_kinds (
        job INTEGER PRIMARY KEY REFERENCES jobs ON DELETE CASCADE,
        kind TEXT NOT NULL,
        max_steps INTEGER,
        shared INTEGER NOT NULL
    );
    CREATE TABLE paces (
        kind TEXT PRIMARY KEY,
        seconds_per_step REAL NOT NULL,
        total_steps INTEGER,
        ranks INTEGER NOT NULL,
        seen REAL NOT NULL
    ) WITHOUT ROWID;
    CREATE INDEX paces_by_time ON paces (seen);
    """,
    """
    CREATE TABLE news (
        seq INTEGER PRIMARY KEY,
        job INTEGER NOT NULL REFERENCES jobs ON DELETE CASCADE,
        state TEXT NOT NULL,
        reason TEXT NOT NULL,
        ended REAL NOT NULL
    );
    CREATE INDEX news_by_job ON news (job);
    """,
    """
    ALTER TABLE attempts ADD COLUMN waits INTEGER NOT NULL DEFAULT 0;
    UPDATE attempts SET waits = 1 WHERE ended IS NULL
        AND (SELECT engine != 'hosts' AND state = 'STARTING' FROM jobs WHERE id = job);
    """,
)


def check_version(connection: sqlite3.Connection, path: Path) -> int:
    """The version of the tables; 0: the file is new. Raises `UserError` if they are of another program or too new."""
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    strange = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] if version == 0 else 0
    if strange or (version and application != _APPLICATION):
        raise UserError(f"{path}: is the database of another program; choose another folder with --state")
    if version > len(MIGRATIONS):
        raise UserError(
            f"{path}: was written by a newer hvd-transformer (version {version} of the tables; this one knows up to "
            f"{len(MIGRATIONS)}); upgrade hvd-transformer, or choose another folder with --state"
        )
    return version


def migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Bring the tables to the newest version, each step in a transaction of its own. Foreign keys are off meanwhile."""
    version = check_version(connection, path)
    if 0 < version < len(MIGRATIONS):
        _copy(connection, path.with_name(f"{path.name}.version-{version}"))
    for number, script in enumerate(MIGRATIONS[version:], start=version + 1):
        with _rolled_back_on_error(connection):
            connection.executescript(f"BEGIN IMMEDIATE; {script}; PRAGMA user_version = {number};")
            broken = connection.execute("PRAGMA foreign_key_check").fetchone()
            assert broken is None, f"migration {number}: {tuple(broken)}"
            connection.execute("COMMIT")


def _copy(connection: sqlite3.Connection, path: Path) -> None:
    """Keep the database as it is, for a return to the earlier release."""
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    target = sqlite3.connect(path, isolation_level=None)
    try:
        connection.backup(target)
    finally:
        target.close()


@contextmanager
def _rolled_back_on_error(connection: sqlite3.Connection) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
