"""Sessions of browsers: each stands for the token that somebody has logged in with, and ends with it at the latest."""

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from hvd_transformer.service.storage.database import Database
from hvd_transformer.service.storage.tokens import Principal, principal, secret_digest

SESSION_SECONDS = 7 * 86_400.0
_BYTES = 32  # of randomness, as in a token
_MOST_PER_TOKEN = 100  # the oldest ones end then


@dataclass(frozen=True)
class Session:
    """Who has logged in. `csrf`: what each change must bring."""

    principal: Principal
    csrf: str


class Sessions:
    """The sessions of a database, which has only the SHA-256 of their secrets. Thread-safe."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database, self._clock = database, clock

    def open(self, token: str) -> str:
        """Begin a session of whoever has this token, and return its secret. Without such a token there is none."""
        secret, digest, ends = secrets.token_urlsafe(_BYTES), secret_digest(token), self._clock() + SESSION_SECONDS
        with self._database.write(durable=False) as connection:  # who loses it in a power failure logs in again
            connection.execute(
                "INSERT INTO sessions (token, digest, ends)"
                " SELECT id, ?, min(?, coalesce(expires, ?)) FROM tokens WHERE digest = ?",
                (secret_digest(secret), ends, ends, digest),
            )
            connection.execute(
                "DELETE FROM sessions WHERE id IN (SELECT sessions.id FROM sessions JOIN tokens ON tokens.id = token"
                " WHERE tokens.digest = ? ORDER BY sessions.id DESC LIMIT -1 OFFSET ?)",
                (digest, _MOST_PER_TOKEN),
            )
        return secret

    def find(self, secret: str) -> Session | None:
        """The session of a secret; None if there is none, or if it or its token has ended."""
        # Found by its digest: how long the search takes tells nothing that could be used.
        query = "SELECT tokens.*, ends FROM sessions JOIN tokens ON tokens.id = token WHERE sessions.digest = ?"
        with self._database.read() as connection:
            row = connection.execute(query, (secret_digest(secret),)).fetchone()
        now = self._clock()
        if row is None or row["ends"] <= now:
            return None
        found = principal(self._database, row, now)
        return None if found is None else Session(found, hmac.new(secret.encode(), b"csrf", hashlib.sha256).hexdigest())

    def close(self, secret: str) -> None:
        """End a session."""
        with self._database.write() as connection:
            connection.execute("DELETE FROM sessions WHERE digest = ?", (secret_digest(secret),))

    def forget_ended(self) -> None:
        """Remove the sessions that have ended."""
        with self._database.write(durable=False) as connection:
            connection.execute("DELETE FROM sessions WHERE ends <= ?", (self._clock(),))
