"""Tokens, by which the service knows who asks over TCP, and what they may do."""

import hashlib
import hmac
import secrets
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from hvd_transformer.errors import UserError
from hvd_transformer.service.storage.database import Database

_BYTES = 32  # of randomness: too many to guess, so that a plain hash protects them as well as a slow one
_USED_SECONDS = 3600.0  # the time of the last use is written this seldom, not on every request
_LONGEST_NAME = 100


class Role(str, Enum):
    """What a token allows. Each role may do what those before it may."""

    VIEW = "view"
    SUBMIT = "submit"
    ADMIN = "admin"


@dataclass(frozen=True)
class Principal:
    """Who asks."""

    owner: str
    role: Role


@dataclass(frozen=True)
class Token:
    """What is known of a token; not its secret. Times are seconds since the epoch."""

    id: int
    name: str
    owner: str
    role: Role
    created: float
    last_used: float | None  # to the hour
    expires: float | None


class Tokens:
    """The tokens of a database. It has only the SHA-256 of their secrets."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database, self._clock = database, clock

    def add(self, name: str, owner: str, role: Role, expires: float | None = None) -> str:
        """Make a token and return its secret, which cannot be seen again.

        Raises `UserError` if the name is taken, or is no name.
        """
        for what, value in (("name", name), ("owner", owner)):
            if not (value.isprintable() and value.strip() and len(value) <= _LONGEST_NAME):
                raise UserError(f"token: {what}={value!r} must have 1 to {_LONGEST_NAME} printable characters")
        now = self._clock()
        if expires is not None and expires <= now:
            raise UserError(f"token {name}: its expiry must be in the future")
        secret = _new_secret()
        with self._database.write() as connection:
            if connection.execute("SELECT 1 FROM tokens WHERE name = ?", (name,)).fetchone():
                raise UserError(f"token {name}: there is one of this name; revoke it, or choose another name")
            connection.execute(
                "INSERT INTO tokens (name, owner, role, digest, created, expires) VALUES (?, ?, ?, ?, ?, ?)",
                (name, owner, role.value, secret_digest(secret), now, expires),
            )
        return secret

    def renew(self, name: str, owner: str, role: Role, expires: float) -> str:
        """Give the token of this name a new secret, which is returned, or make it: its old secret is refused.

        Sessions go on, but not those of a token of the same name that was somebody else's.
        """
        now, secret = self._clock(), _new_secret()
        with self._database.write() as connection:
            connection.execute(
                "DELETE FROM tokens WHERE name = ? AND (owner, role) != (?, ?)", (name, owner, role.value)
            )
            connection.execute(
                "INSERT INTO tokens (name, owner, role, digest, created, expires) VALUES (?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (name) DO UPDATE SET digest = excluded.digest, created = excluded.created,"
                " last_used = NULL, expires = excluded.expires",
                (name, owner, role.value, secret_digest(secret), now, expires),
            )
        return secret

    def check(self, secret: str) -> Principal | None:
        """Whose token this is; None if it is none, or has expired."""
        digest = secret_digest(secret)
        with self._database.read() as connection:
            row = connection.execute("SELECT * FROM tokens WHERE digest = ?", (digest,)).fetchone()
        # How long the search takes tells of the digest at most, of which nobody can choose a part.
        if not hmac.compare_digest(digest, bytes(len(digest)) if row is None else row["digest"]):
            return None
        return principal(self._database, row, self._clock())

    def list(self) -> list[Token]:
        """All tokens, expired ones included."""
        query = "SELECT id, name, owner, role, created, last_used, expires FROM tokens ORDER BY id"
        with self._database.read() as connection:
            return [Token(**{**dict(row), "role": Role(row["role"])}) for row in connection.execute(query)]

    def revoke(self, token_id: int) -> None:
        """Remove a token and its sessions: their next request is refused.

        Raises `UserError` if there is none of this id.
        """
        with self._database.write() as connection:
            if connection.execute("DELETE FROM tokens WHERE id = ?", (token_id,)).rowcount == 0:
                raise UserError(f"token {token_id}: no such token; see hvd-transformer token list")


def principal(database: Database, token: sqlite3.Row, now: float) -> Principal | None:
    """Who uses a token now, by its row; None if it has expired."""
    if token["expires"] is not None and token["expires"] <= now:
        return None
    if token["last_used"] is None or now - token["last_used"] >= _USED_SECONDS:
        with suppress(UserError), database.write(durable=False) as connection:  # a full disk locks nobody out
            connection.execute("UPDATE tokens SET last_used = ? WHERE id = ?", (now, token["id"]))
    return Principal(token["owner"], Role(token["role"]))


def secret_digest(secret: str) -> bytes:
    """What the database has of a secret: its SHA-256."""
    return hashlib.sha256(secret.encode(errors="surrogatepass")).digest()


def _new_secret() -> str:
    return f"hvd_{secrets.token_urlsafe(_BYTES)}"
