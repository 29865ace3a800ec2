"""News for browsers as Server-Sent Events: one look at the service serves all of them.

The id of an event says how far its reader has come: the last change of a job or host, the last change of a run, and
which start of the service counts the latter. Readers have no queues: all read one list of the latest events, each from
its own place. Who falls behind it, or was away for too long, gets the event `resync`: read everything again.
"""

import asyncio
import json
import logging
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException

from hvd_transformer.errors import UserError
from hvd_transformer.service.runs.index import RunIndex, run_id
from hvd_transformer.service.storage.event_log import EVENTS_KEPT
from hvd_transformer.service.storage.store import Store
from hvd_transformer.service.web.pool import Pool

_LOOK_SECONDS = 0.25  # between two looks at the version of the index of runs, while anybody reads
_REST_SECONDS = 0.1  # after a look that found something: a burst of changes is one look
_KEPT = 2000  # events for readers that are behind
_MOST_MISSED = 1000  # events that are told one by one
PING_SECONDS = 15.0
_FAILED_SECONDS = 5.0

_log = logging.getLogger(__name__)


class Mark(NamedTuple):
    """How far a reader has come."""

    seq: int  # of the database's events
    version: int  # of the index of runs
    start: str  # of the service

    @classmethod
    def parse(cls, text: str) -> "Mark | None":
        """The mark in a Last-Event-ID; None if it is none of ours."""
        parts = text.split("-")
        if len(parts) != 3 or not all(part.isascii() and part.isdigit() and len(part) < 19 for part in parts[:2]):
            return None
        return cls(int(parts[0]), int(parts[1]), parts[2])

    def __str__(self) -> str:
        return f"{self.seq}-{self.version}-{self.start}"

    def event(self, kind: str, data: dict[str, Any]) -> bytes:
        """An event after which a reader has come so far."""
        head = f"id: {self}\nevent: {kind}\n"
        return f"{head}data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


class EventStream:
    """Used in the event loop alone, but for `now`."""

    def __init__(self, store: Store, runs: RunIndex, pool: Pool) -> None:
        self._store, self._runs, self._pool = store, runs, pool
        self._start = secrets.token_hex(4)
        self._mark: Mark | None = None  # of the last look
        self._kept: deque[bytes] = deque(maxlen=_KEPT)
        self._told = 0  # events there have ever been in `_kept`
        self._news: asyncio.Future[None] | None = None  # done at the next event
        self._looking: asyncio.Task[None] | None = None
        self._closed = False
        self._readers = 0

    def now(self) -> Mark:
        """The present moment, as the id that resumes from it. May block; from any thread."""
        return Mark(self._store.last_seq(), self._runs.version, self._start)

    async def read(self, last_id: str | None, check: Callable[[], Awaitable[bool]]) -> AsyncGenerator[bytes, None]:
        """The events from now on, or since a Last-Event-ID. `check` tells now and then whether to go on."""
        self._readers += 1
        try:
            now = await self._pool.run(self.now)
            self._mark = self._mark or now
            if self._looking is None:
                self._looking = asyncio.create_task(self._look())
            place = self._told
            yield b": events\n\n"
            if last_id:
                missed, _ = await self._pool.run(partial(self._since, Mark.parse(last_id)))
                if missed:
                    yield b"".join(missed)
            async for part in self._from(place, check):
                yield part
        finally:
            self._readers -= 1
            if not self._readers:
                self._stop()

    def close(self) -> None:
        """End all streams."""
        self._closed = True
        self._stop()
        self._tell([])

    async def _from(self, place: int, check: Callable[[], Awaitable[bool]]) -> AsyncGenerator[bytes, None]:
        loop = asyncio.get_running_loop()
        checked = loop.time()
        while not self._closed:
            behind = self._told - place
            place = self._told
            if behind > len(self._kept):
                assert self._mark is not None  # something was told
                yield self._mark.event("resync", {})
            elif behind:
                yield b"".join(islice(self._kept, len(self._kept) - behind, None))
            if loop.time() - checked >= PING_SECONDS:
                checked = loop.time()
                if not await check():
                    return
                yield b": ping\n\n"
            if self._told == place and not self._closed:
                self._news = self._news or loop.create_future()
                await asyncio.wait({self._news}, timeout=checked + PING_SECONDS - loop.time())

    async def _look(self) -> None:
        """Look for changes for as long as anybody reads."""
        loop, wake = asyncio.get_running_loop(), asyncio.Event()
        changed = True  # since `_mark`

        def has_changed() -> None:
            nonlocal changed
            changed = True
            with suppress(RuntimeError):  # the loop has just ended
                loop.call_soon_threadsafe(wake.set)

        with self._store.listening(has_changed):
            while self._mark is not None:
                if changed or self._runs.version != self._mark.version:
                    changed = False
                    try:
                        events, self._mark = await self._pool.run(partial(self._since, self._mark))
                        self._tell(events)
                    except (UserError, HTTPException):  # of the disk, or of a pool that has too much to do
                        changed = True
                    except Exception:
                        _log.exception("events could not be read; it is tried again")
                        changed = True
                        await asyncio.sleep(_FAILED_SECONDS)
                    await asyncio.sleep(_REST_SECONDS)
                    continue
                wake.clear()
                timer = loop.call_later(_LOOK_SECONDS, wake.set)
                await wake.wait()
                timer.cancel()

    def _tell(self, events: list[bytes]) -> None:
        self._kept.extend(events)
        self._told += len(events)
        if self._news is not None and (events or self._closed):
            self._news.set_result(None)
            self._news = None

    def _stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        self._looking = self._mark = None
        self._kept.clear()

    def _since(self, mark: Mark | None) -> tuple[list[bytes], Mark]:
        """What has changed since then, and until when. May block."""
        now = self.now()
        if mark is None or mark.start != self._start or not 0 <= now.seq - mark.seq <= EVENTS_KEPT:
            return [now.event("resync", {})], now
        changes = self._store.events_after(mark.seq, _MOST_MISSED + 1)
        runs = self._runs.changed_since(mark.version)
        if len(changes) + len(runs) > _MOST_MISSED:
            return [now.event("resync", {})], now
        events = []
        for change in changes:
            mark = mark._replace(seq=change.seq)
            if change.kind == "job":
                events.append(mark.event("job", self._job(int(change.id))))
            elif change.kind == "run":
                events.append(mark.event("run", self._run(change.id)))
            elif change.kind in ("hosts", "waits"):
                events.append(mark.event(change.kind, {}))
        for number, run in enumerate(runs, start=1):
            if number == len(runs):
                mark = mark._replace(version=now.version)
            events.append(mark.event("run", self._run(run)))
        return events, mark._replace(version=now.version)

    def _run(self, run: str) -> dict[str, Any]:
        row = self._runs.row(run)
        return {"id": run, "step": None if row is None else row.step}

    def _job(self, number: int) -> dict[str, Any]:
        job = self._store.job(number)
        if job is None:  # forgotten
            return {"id": number, "state": None, "run": None}
        return {"id": number, "state": job.state.value, "run": run_id(Path(job.output_dir))}
