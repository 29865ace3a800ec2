"""Ends of jobs that the webhook has yet to tell: written with the end itself, so that none is ever forgotten."""

import json
import sqlite3
from collections.abc import Iterable
from typing import NamedTuple

from hvd_transformer.service.jobs import State
from hvd_transformer.service.storage.settings import SettingsTable


class News(NamedTuple):
    """The end of a job, as it was then: the job may have been retried since."""

    seq: int
    job: int
    state: State
    reason: str
    ended: float


class NewsTable(SettingsTable):
    """The ends in their order. `keeps_news`: whether somebody tells them; otherwise none are added."""

    keeps_news = False

    def news(self, limit: int = 100) -> list[News]:
        """What is to be told, the oldest first."""
        with self.database.read() as connection:
            rows = connection.execute("SELECT seq, job, state, reason, ended FROM news ORDER BY seq LIMIT ?", (limit,))
            return [News(seq, job, State(state), reason, ended) for seq, job, state, reason, ended in rows]

    def forget_news(self, told: Iterable[int]) -> None:
        """These are told."""
        with self.database.write(durable=False) as connection:
            connection.execute("DELETE FROM news WHERE seq IN (SELECT value FROM json_each(?))", (json.dumps([*told]),))

    def _add_news(self, connection: sqlite3.Connection, job: int, state: State, reason: str, ended: float) -> None:
        if self.keeps_news:
            values = (job, state.value, reason, ended)
            connection.execute("INSERT INTO news (job, state, reason, ended) VALUES (?, ?, ?, ?)", values)
