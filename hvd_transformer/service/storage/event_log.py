"""What has changed, in order, for those who follow it: the pages of the service.

A subject (a job, a host, …) has one event, its latest. So who was away learns of each subject once.
"""

import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from hvd_transformer.service.storage.database import Database

EVENTS_KEPT = 10_000


class Event(NamedTuple):
    """A change of the subject `id` of `kind`: "job", "run" (its tags), or without an id "hosts" and "waits", which are
    reasons and estimates.
    """

    seq: int
    kind: str
    id: str


class EventLog:
    """The table of events. The other tables append to it in the transaction of their change."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._listeners: list[Callable[[], None]] = []
        self._listeners_turn = threading.Lock()

    def events_after(self, seq: int, limit: int = 1000) -> list[Event]:
        """The events after `seq`, the oldest first.

        Some are missing if `seq` is more than `EVENTS_KEPT` behind `last_seq`: load everything anew then.
        """
        with self.database.read() as connection:
            query = "SELECT seq, kind, id FROM events WHERE seq > ? ORDER BY seq LIMIT ?"
            return [Event(*row) for row in connection.execute(query, (seq, limit))]

    def last_seq(self) -> int:
        """The number of the newest event; 0 if there is none."""
        with self.database.read() as connection:
            return int(connection.execute("SELECT coalesce(max(seq), 0) FROM events").fetchone()[0])

    @contextmanager
    def listening(self, call: Callable[[], None]) -> Iterator[None]:
        """While in the block, `call` after each change, in the thread that made it. It must neither wait nor raise."""
        with self._listeners_turn:
            self._listeners.append(call)
        try:
            yield
        finally:
            with self._listeners_turn:
                self._listeners.remove(call)

    def changed(self, connection: sqlite3.Connection, kind: str, ids: Iterable[int | str] = ("",)) -> None:
        """Append an event for each subject, within a transaction."""
        connection.executemany(
            "INSERT OR REPLACE INTO events (kind, id) VALUES (?, ?)", ((kind, str(subject)) for subject in ids)
        )
        connection.execute("DELETE FROM events WHERE seq <= (SELECT max(seq) FROM events) - ?", (EVENTS_KEPT,))
        self.database.after_commit(self._tell)

    def _tell(self) -> None:
        with self._listeners_turn:
            listeners = list(self._listeners)
        for call in listeners:
            call()
