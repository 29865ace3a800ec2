"""News as Server-Sent Events, over the real server, and what a look costs."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from web_service import Running, running

from hvd_transformer.service.jobs import Host, State
from hvd_transformer.service.remote.address import Address
from hvd_transformer.service.remote.client import Client
from hvd_transformer.service.runs.index import RunIndex
from hvd_transformer.service.web import event_stream, server
from hvd_transformer.service.web.event_stream import EventStream, Mark
from hvd_transformer.service.web.pool import Pool


class Reader:
    """One browser's stream."""

    def __init__(self, service: Running, token: str, last_id: str = "") -> None:
        self._connection = socket.create_connection(("127.0.0.1", service.server.port), timeout=10)
        resumed = f"Last-Event-ID: {last_id}\r\n" if last_id else ""
        head = f"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n{resumed}\r\n"
        self._connection.sendall(head.encode())
        self._lines = self._connection.makefile("rb")
        self.status = int(self._lines.readline().split()[1])
        self.headers = dict(
            line.decode().strip().lower().split(": ", 1) for line in iter(self._lines.readline, b"\r\n")
        )
        self.last_id = ""
        if self.status == 200:
            assert self.block() == [": events"]

    def block(self) -> list[str]:
        """The lines up to the next empty one; none at the end of the stream."""
        lines: list[str] = []
        while line := self._lines.readline():
            text = line.decode().rstrip("\r\n")
            is_size = text and all(c in "0123456789abcdef" for c in text)  # of a chunk
            if text == "0":  # the last chunk
                return []
            if not text and lines:
                return lines
            if text and not is_size:
                lines.append(text)
        return lines

    def event(self) -> tuple[str, Any]:
        """The next event but for comments."""
        while True:
            lines = self.block()
            assert lines, "the stream has ended"
            if lines[0].startswith("id: "):
                fields = dict(line.split(": ", 1) for line in lines)
                self.last_id = fields["id"]
                return fields["event"], json.loads(fields["data"])

    def close(self) -> None:
        self._lines.close()
        self._connection.close()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path) as found:
        yield found


def test_each_change_is_told(service: Running) -> None:
    token = service.token("ann")
    with closing(Reader(service, token)) as reader:
        assert reader.headers["content-type"] == "text/event-stream"
        assert reader.headers["cache-control"] == "no-store"
        job = service.submit(token)
        assert reader.event() == ("job", {"id": job["id"], "state": "QUEUED", "run": job["run"]})
        service.store.update(job["id"], state=State.HELD)
        assert reader.event() == ("job", {"id": job["id"], "state": "HELD", "run": job["run"]})
        service.store.put_hosts([Host("h3", 1)])
        assert reader.event() == ("hosts", {})
        run = service.make_run("new", lines=[{"step": 3, "loss": 1.0}])
        assert reader.event() == ("run", {"id": run, "step": 3})
        service.store.tag_runs([run], ["paper"])
        assert reader.event() == ("run", {"id": run, "step": 3})


def test_a_reader_that_comes_back_is_told_what_it_missed(service: Running) -> None:
    token = service.token("ann")
    with closing(Reader(service, token)) as reader:
        first = service.submit(token)
        reader.event()
    second = service.submit(token)
    service.store.update(first["id"], state=State.HELD)
    run = service.make_run("new", lines=[{"step": 3, "loss": 1.0}])
    with closing(Reader(service, token, reader.last_id)) as reader:
        told = [reader.event() for _ in range(3)]
        assert [(kind, data["id"]) for kind, data in told] == [
            ("job", second["id"]),
            ("job", first["id"]),
            ("run", run),
        ]
        assert told[1][1]["state"] == "HELD"
        third = service.submit(token)
        assert reader.event()[1]["id"] == third["id"]


def test_a_page_is_told_what_happens_after_it_asked_who_it_is(service: Running) -> None:
    """However long it takes from its first read to its stream, and though nobody listens meanwhile."""
    token = service.token("ann")
    before = service.submit(token)
    service.make_run("before")
    events = service.request("GET", "/api/v1/me", token=token).json["events"]
    job = service.submit(token)
    run = service.make_run("after", lines=[{"step": 3, "loss": 1.0}])
    with closing(Reader(service, token, events)) as reader:
        assert [reader.event()[1]["id"] for _ in range(2)] == [job["id"], run]
        service.store.update(before["id"], state=State.HELD)
        assert reader.event()[1]["id"] == before["id"]


@pytest.mark.parametrize(
    "last_id", ["7", "0-0-another", "999999-0-{start}", "x-y-z", "1-1", "-" * 5, "0" * 99 + "-0-x"]
)
def test_who_cannot_resume_reads_everything_again(service: Running, last_id: str) -> None:
    token = service.token("ann")
    with closing(Reader(service, token)) as reader:
        service.submit(token)
        reader.event()
    start = reader.last_id.rpartition("-")[2]
    with closing(Reader(service, token, last_id.format(start=start))) as reader:
        assert reader.event() == ("resync", {})
        job = service.submit(token)
        assert reader.event()[1]["id"] == job["id"]


def test_a_thousand_changes_at_once_are_one_event(service: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "_MOST_MISSED", 5)
    token = service.token("ann")
    with closing(Reader(service, token)) as reader:
        service.submit(token, array=["seed=1,2,3,4,5,6"])
        assert reader.event() == ("resync", {})


def test_twenty_tabs_are_served_by_one_look(service: Running) -> None:
    """The number of queries must not grow with the number of readers."""
    token = service.token("ann")
    readers = [Reader(service, token) for _ in range(20)]
    looks = []
    events_after = service.store.events_after
    service.store.events_after = lambda *args: looks.append(1) or events_after(*args)  # type: ignore[method-assign, func-returns-value]
    jobs = [service.submit(token)["id"] for _ in range(3)]
    for reader in readers:
        seen = set()
        while seen != set(jobs):
            seen.add(reader.event()[1]["id"])
        reader.close()
    assert 1 <= len(looks) <= 4


class CountedIndex(RunIndex):
    """An index that tells when its version is looked at."""

    looks = threading.Semaphore(0)

    @property
    def version(self) -> int:
        self.looks.release()
        return 0

    @version.setter
    def version(self, value: int) -> None: ...


def test_nothing_is_looked_at_while_nothing_changes(service: Running) -> None:
    """With readers only a number in memory is compared; without any, not even that."""
    token, ended = service.token("ann"), threading.Event()
    listening, read = service.store.listening, service.store.database.read

    @contextmanager
    def until_ended(call: Callable[[], None]) -> Iterator[None]:
        try:
            with listening(call):
                yield
        finally:
            ended.set()

    service.store.listening = until_ended  # type: ignore[method-assign, assignment]
    with closing(Reader(service, token)) as reader:
        service.submit(token)
        reader.event()
        service.runs.__class__ = CountedIndex
        assert CountedIndex.looks.acquire(timeout=10)
        queries = []
        service.store.database.read = lambda: queries.append(1) or read()  # type: ignore[method-assign, func-returns-value]
        for _ in range(3):
            assert CountedIndex.looks.acquire(timeout=10)
        assert queries == []
    assert ended.wait(10)


def test_who_falls_behind_reads_everything_again(service: Running) -> None:
    """Nothing is kept for one reader: all have their places in one list."""

    async def work() -> list[bytes]:
        pool = Pool()
        stream = EventStream(service.store, service.runs, pool)

        async def is_allowed() -> bool:
            return True

        quick, slow = stream.read(None, is_allowed), stream.read(None, is_allowed)
        await anext(quick), await anext(slow)
        stream._tell([b"a", b"b"])
        found = [await anext(quick)]
        stream._tell([b"c"] * event_stream._KEPT)
        found += [await anext(quick), (await anext(slow)).partition(b"\n")[2]]
        stream._tell([b"d"])
        found += [await anext(quick), await anext(slow)]
        stream.close()
        assert [part async for part in quick] == [part async for part in slow] == []
        pool.close()
        return found

    resync = b"event: resync\ndata: {}\n\n"
    assert asyncio.run(work()) == [b"ab", b"c" * event_stream._KEPT, resync, b"d", b"d"]


def test_a_revoked_token_ends_its_stream(service: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "PING_SECONDS", 0.1)
    token = service.token("ann")
    with closing(Reader(service, token)) as reader:
        assert reader.block() == [": ping"]
        service.tokens.revoke(service.tokens.list()[-1].id)
        while lines := reader.block():
            assert lines == [": ping"]


def test_only_so_many_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the connections of a door are for requests; those of another door do not count."""
    monkeypatch.setattr(server, "_MOST_TCP", 6)
    with running(tmp_path) as service, ExitStack() as stack:
        token = service.token("ann")
        for _ in range(3):
            stack.enter_context(closing(Reader(service, token)))
        for _ in range(3):
            refused = stack.enter_context(closing(Reader(service, token)))
            assert (refused.status, refused.headers["retry-after"]) == (503, "60")
            refused.close()
            assert service.request("GET", "/api/v1/me", token=token).status == 200
        local = stack.enter_context(closing(Client(Address(tmp_path)).events()))
        assert next(local) == ("open", {})
        stack.close()
        while True:  # until the service has noticed
            with closing(Reader(service, token)) as reader:
                if reader.status == 200:
                    break


def test_a_stream_needs_a_login(service: Running) -> None:
    with closing(Reader(service, "wrong")) as reader:
        assert reader.status == 401


@pytest.mark.parametrize(
    ("text", "mark"), [("3-4-ab", Mark(3, 4, "ab")), ("3-4", None), ("", None), ("-1-4-ab", None), ("3-٤-ab", None)]
)
def test_marks(text: str, mark: Mark | None) -> None:
    assert Mark.parse(text) == mark
