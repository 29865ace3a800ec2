"""Sessions of browsers: how long they last, and that the database alone opens none."""

import base64
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hvd_transformer.service.storage import sessions as sessions_module
from hvd_transformer.service.storage.database import Database
from hvd_transformer.service.storage.sessions import Sessions
from hvd_transformer.service.storage.tokens import Principal, Role, Tokens

WEEK = 7 * 86_400.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(tmp_path / "service.db")
    yield database
    database.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tokens(database: Database, clock: Clock) -> Tokens:
    return Tokens(database, clock)


@pytest.fixture
def sessions(database: Database, clock: Clock) -> Sessions:
    return Sessions(database, clock)


def count(database: Database) -> int:
    with database.read() as connection:
        return int(connection.execute("SELECT count(*) FROM sessions").fetchone()[0])


def test_a_session_is_of_the_owner_of_its_token(tokens: Tokens, sessions: Sessions) -> None:
    ann, ben = tokens.add("laptop", "ann", Role.SUBMIT), tokens.add("screen", "ben", Role.VIEW)
    for token, wanted in ((ann, Principal("ann", Role.SUBMIT)), (ben, Principal("ben", Role.VIEW))):
        session = sessions.find(sessions.open(token))
        assert session is not None and session.principal == wanted


def test_a_session_lasts_a_week(tokens: Tokens, sessions: Sessions, clock: Clock) -> None:
    secret = sessions.open(tokens.add("laptop", "ann", Role.VIEW))
    clock.now += WEEK - 1
    assert sessions.find(secret)
    clock.now += 1
    assert sessions.find(secret) is None


def test_a_session_ends_with_its_token(tokens: Tokens, sessions: Sessions, database: Database, clock: Clock) -> None:
    revoked, expired = (
        sessions.open(tokens.add("revoked", "ann", Role.ADMIN)),
        sessions.open(tokens.add("expired", "ann", Role.ADMIN, expires=2000.0)),
    )
    tokens.revoke(1)
    assert sessions.find(revoked) is None and sessions.find(expired)
    assert count(database) == 1
    clock.now = 2000.0
    assert sessions.find(expired) is None


def test_the_role_is_that_of_the_token_now(tokens: Tokens, sessions: Sessions, database: Database) -> None:
    secret = sessions.open(tokens.add("laptop", "ann", Role.ADMIN))
    with database.write() as connection:
        connection.execute("UPDATE tokens SET role = 'view'")
    session = sessions.find(secret)
    assert session is not None and session.principal.role is Role.VIEW


def test_a_session_is_closed(tokens: Tokens, sessions: Sessions) -> None:
    token = tokens.add("laptop", "ann", Role.VIEW)
    secret, other = sessions.open(token), sessions.open(token)
    sessions.close(secret)
    sessions.close("unknown")
    assert sessions.find(secret) is None and sessions.find(other)


def test_without_a_token_there_is_none(tokens: Tokens, sessions: Sessions, database: Database) -> None:
    tokens.add("laptop", "ann", Role.VIEW)
    assert sessions.find(sessions.open("hvd_wrong")) is None
    for wrong in ("", "é", "\ud800", "x" * 10_000):
        assert sessions.find(wrong) is None
    assert count(database) == 0


def test_secrets_and_their_csrf_values_do_not_repeat(tokens: Tokens, sessions: Sessions) -> None:
    token = tokens.add("laptop", "ann", Role.VIEW)
    secrets = {sessions.open(token) for _ in range(50)}
    values = {session.csrf for session in map(sessions.find, secrets) if session is not None}
    assert len(secrets) == len(values) == 50 and not secrets & values


def test_a_token_has_so_many_sessions(
    tokens: Tokens, sessions: Sessions, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest ends, also where all end at the same time, with their token; other tokens have their own."""
    monkeypatch.setattr(sessions_module, "_MOST_PER_TOKEN", 3)
    ann, ben = tokens.add("a", "ann", Role.VIEW, expires=2000.0), tokens.add("b", "ben", Role.VIEW)
    of_ben = sessions.open(ben)
    of_ann = [sessions.open(ann) for _ in range(5)]
    assert [sessions.find(secret) is not None for secret in of_ann] == [False, False, True, True, True]
    assert sessions.find(of_ben) and count(database) == 4


def test_sessions_that_have_ended_are_forgotten(
    tokens: Tokens, sessions: Sessions, database: Database, clock: Clock
) -> None:
    sessions.open(tokens.add("short", "ann", Role.VIEW, expires=2000.0))
    kept = sessions.open(tokens.add("long", "ann", Role.VIEW))
    clock.now = 2000.0
    sessions.forget_ended()
    assert sessions.find(kept) and count(database) == 1
    clock.now = 1000.0 + WEEK
    sessions.forget_ended()
    assert count(database) == 0


def test_a_request_writes_nothing_but_the_hour_of_the_last_use(
    tokens: Tokens, sessions: Sessions, database: Database, clock: Clock
) -> None:
    secret = sessions.open(tokens.add("laptop", "ann", Role.VIEW))

    def changes() -> int:
        with database.write() as connection:
            return connection.total_changes

    before = changes()
    for clock.now in (1000.0, 1001.0, 4599.0):
        assert sessions.find(secret)
    assert changes() == before + 1 and tokens.list()[0].last_used == 1000.0


def test_a_renewed_token_keeps_its_sessions_and_loses_its_secret(
    tokens: Tokens, sessions: Sessions, clock: Clock
) -> None:
    old = tokens.renew("link", "root", Role.ADMIN, expires=2000.0)
    secret = sessions.open(old)
    clock.now = 1500.0
    new = tokens.renew("link", "root", Role.ADMIN, expires=3000.0)
    assert tokens.check(old) is None and tokens.check(new) == Principal("root", Role.ADMIN)
    assert sessions.find(secret)
    assert [(token.name, token.expires) for token in tokens.list()] == [("link", 3000.0)]
    clock.now = 2000.0  # as long as the first secret lasted
    assert sessions.find(secret) is None


@pytest.mark.parametrize(("owner", "role"), [("ann", Role.ADMIN), ("root", Role.VIEW)])
def test_nobody_gets_the_rights_of_a_renewed_token_by_its_name(
    tokens: Tokens, sessions: Sessions, owner: str, role: Role
) -> None:
    theirs = tokens.add("link", owner, role)
    secret = sessions.open(theirs)
    tokens.renew("link", "root", Role.ADMIN, expires=2000.0)
    assert tokens.check(theirs) is None and sessions.find(secret) is None


def test_a_stolen_database_opens_no_session(
    tokens: Tokens, sessions: Sessions, database: Database, tmp_path: Path
) -> None:
    token = tokens.add("laptop 7", "ann", Role.ADMIN)
    secret = sessions.open(token)
    session = sessions.find(secret)
    assert session is not None
    running = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    database.close()
    closed = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    for data in (running, closed):
        assert b"laptop 7" in data  # the data is there to be found
        raw = base64.urlsafe_b64decode(secret + "=")
        for form in (secret.encode(), raw, raw.hex().encode(), session.csrf.encode(), bytes.fromhex(session.csrf)):
            assert form not in data
    with closing(sqlite3.connect(tmp_path / "service.db")) as connection:
        (digest,) = connection.execute("SELECT digest FROM sessions").fetchone()
    stolen = Database(tmp_path / "service.db")
    found = Sessions(stolen, lambda: 1000.0)
    try:
        assert found.find(secret)
        for text in (digest.hex(), base64.urlsafe_b64encode(digest).decode().rstrip("="), digest.decode("latin-1")):
            assert found.find(text) is None
    finally:
        stolen.close()
