"""Tokens: who has one, what it allows, and that the database does not know it."""

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hvd_transformer.errors import UserError
from hvd_transformer.service.storage import tokens as tokens_module
from hvd_transformer.service.storage.database import Database
from hvd_transformer.service.storage.tokens import Principal, Role, Tokens


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


def test_a_token_is_its_owners(tokens: Tokens) -> None:
    ann = tokens.add("laptop", "ann", Role.SUBMIT)
    ben = tokens.add("screen in the hall", "ben", Role.VIEW)
    assert tokens.check(ann) == Principal("ann", Role.SUBMIT)
    assert tokens.check(ben) == Principal("ben", Role.VIEW)


def test_secrets_have_256_bits_and_do_not_repeat(tokens: Tokens) -> None:
    secrets = {tokens.add(str(number), "ann", Role.VIEW) for number in range(50)}
    assert len(secrets) == 50
    for secret in secrets:
        assert len(base64.urlsafe_b64decode(secret.removeprefix("hvd_") + "=")) == 32


def test_anything_else_is_nobodys(tokens: Tokens) -> None:
    secret = tokens.add("laptop", "ann", Role.ADMIN)
    others = ("", "hvd_", secret[:-1], secret + "=", secret.swapcase(), secret.removeprefix("hvd_"), "' OR 1=1 --")
    for other in (*others, "é", "\ud800", "\x00" * 32, "x" * 1_000_000):
        assert tokens.check(other) is None
    assert tokens.check(secret)


def test_digests_are_compared_whole(tokens: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []
    compare = tokens_module.hmac.compare_digest

    def watched(left: bytes, right: bytes) -> bool:
        compared.append((len(left), len(right)))
        return compare(left, right)

    secret = tokens.add("laptop", "ann", Role.VIEW)
    monkeypatch.setattr(tokens_module.hmac, "compare_digest", watched)
    tokens.check(secret)
    tokens.check("hvd_wrong")
    assert compared == [(32, 32)] * 2


def test_a_token_expires(tokens: Tokens, clock: Clock) -> None:
    secret = tokens.add("laptop", "ann", Role.VIEW, expires=2000.0)
    clock.now = 1999.9
    assert tokens.check(secret)
    clock.now = 2000.0
    assert tokens.check(secret) is None
    assert [token.expires for token in tokens.list()] == [2000.0]
    with pytest.raises(UserError, match="^token old: its expiry must be in the future$"):
        tokens.add("old", "ann", Role.VIEW, expires=1000.0)


def test_a_token_is_revoked(tokens: Tokens) -> None:
    ann, ben = (tokens.add(name, name, Role.VIEW) for name in ("ann", "ben"))
    tokens.revoke(1)
    assert tokens.check(ann) is None and tokens.check(ben)
    with pytest.raises(UserError, match="^token 1: no such token; see hvd-transformer token list$"):
        tokens.revoke(1)
    tokens.revoke(2)
    tokens.add("ann", "ann", Role.VIEW)
    assert [token.id for token in tokens.list()] == [3]  # nobody revokes another token than the one that was shown


def test_the_last_use_is_written_once_an_hour(tokens: Tokens, database: Database, clock: Clock) -> None:
    secret = tokens.add("laptop", "ann", Role.VIEW)
    assert tokens.list()[0].last_used is None

    def changes() -> int:
        with database.write() as connection:
            return connection.total_changes

    before = changes()
    for clock.now in (1000.0, 1001.0, 4599.0):
        assert tokens.check(secret)
    assert changes() == before + 1 and tokens.list()[0].last_used == 1000.0
    clock.now = 4600.0
    assert tokens.check(secret)
    assert changes() == before + 2 and tokens.list()[0].last_used == 4600.0
    clock.now = 9000.0
    assert tokens.check("hvd_wrong") is None
    assert changes() == before + 2


def test_a_full_disk_locks_nobody_out(tokens: Tokens, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tokens.add("laptop", "ann", Role.VIEW)

    @contextmanager
    def full(durable: bool = True) -> Iterator[None]:
        raise UserError("the disk is full")
        yield

    monkeypatch.setattr(database, "write", full)
    assert tokens.check(secret) == Principal("ann", Role.VIEW)


@pytest.mark.parametrize("name", ["", " ", "a\nb", "x" * 101, "\x1b[2J"])
def test_names(tokens: Tokens, name: str) -> None:
    with pytest.raises(UserError, match="^token: name=.* must have 1 to 100 printable characters$"):
        tokens.add(name, "ann", Role.VIEW)
    with pytest.raises(UserError, match="^token: owner=.* must have 1 to 100 printable characters$"):
        tokens.add("laptop", name, Role.VIEW)
    assert tokens.list() == []


def test_a_name_is_taken_once(tokens: Tokens) -> None:
    tokens.add("laptop", "ann", Role.VIEW)
    with pytest.raises(UserError, match="^token laptop: there is one of this name; revoke it, or choose another name$"):
        tokens.add("laptop", "ben", Role.VIEW)


def test_the_files_do_not_have_the_secret(tokens: Tokens, database: Database, tmp_path: Path) -> None:
    secrets = [tokens.add(f"laptop {number}", "ann", Role.ADMIN) for number in range(5)]
    for secret in secrets:
        tokens.check(secret)
    tokens.revoke(3)
    running = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    database.close()
    closed = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    for data in (running, closed):
        assert b"laptop 4" in data  # the data is there to be found
        for secret in secrets:
            text = secret.removeprefix("hvd_")
            for form in (text.encode(), text.encode("utf-16-le"), base64.urlsafe_b64decode(text + "=")):
                assert form not in data and form.hex().encode() not in data
    assert all(secret not in repr((tokens, Principal("ann", Role.ADMIN))) for secret in secrets)
