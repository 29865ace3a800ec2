"""Requests that a client sends again, because it did not see the answer, add their jobs once."""

import json
import sqlite3

from hvd_transformer.errors import UserError

_KEPT_SECONDS = 7 * 86_400.0
_LONGEST_KEY = 200


def earlier(connection: sqlite3.Connection, owner: str, key: str, body: bytes) -> list[int] | None:
    """The jobs that the owner has added with this key; None if there are none.

    `body`: the digest of the request. Raises `UserError` if the key came with another one.
    """
    if not 0 < len(key) <= _LONGEST_KEY:
        raise UserError(f"Idempotency-Key: must have 1 to {_LONGEST_KEY} characters")
    query = "SELECT body, jobs FROM idempotency_keys WHERE owner = ? AND key = ?"
    row = connection.execute(query, (owner, key)).fetchone()
    if row is None:
        return None
    if row["body"] != body:
        raise UserError(f"Idempotency-Key {key!r}: was sent with another request before; take a new key")
    return [int(job) for job in json.loads(row["jobs"])]


def remember(connection: sqlite3.Connection, owner: str, key: str, body: bytes, jobs: list[int], now: float) -> None:
    """Keep the answer to this key for 7 days, and forget those that are older."""
    connection.execute("DELETE FROM idempotency_keys WHERE time < ?", (now - _KEPT_SECONDS,))
    values = (owner, key, body, json.dumps(jobs), now)
    connection.execute("INSERT INTO idempotency_keys VALUES (?, ?, ?, ?, ?)", values)
