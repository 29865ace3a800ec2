"""`wait` and `logs -f` while the service is busy or restarted, also behind a proxy."""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from command_service import job
from commands import command

from hvd_transformer.cli import wait as module
from hvd_transformer.cli.wait import ends
from hvd_transformer.service.remote.address import Address
from hvd_transformer.service.remote.client import Client, Interrupted, Refused

Answer = tuple[int, object]
BAD_GATEWAY: Answer = (502, None)
BUSY: Answer = (503, {"error": "too many listen to events: close some pages"})


class Proxy:
    """Answers what `answer` says, by the number of the request and its path. A stream of events ends at once."""

    def __init__(self) -> None:
        self.answer: Callable[[str], Answer] = lambda path: (404, {"error": path})
        self.asked: list[str] = []
        self.url = ""

    def __call__(self, path: str) -> Answer:
        """Ends a command that would ask for ever."""
        self.asked.append(path)
        return self.answer(path) if len(self.asked) < 500 else (404, {"error": "asked too often"})

    def count(self, path: str) -> int:
        return sum(asked.startswith(path) for asked in self.asked)


class Server(ThreadingHTTPServer):
    """Says nothing of a client that leaves: the tests read what the command prints."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    made = Proxy()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.removeprefix("/api/v1/")
            status, document = made(path)
            data = b"<html>" if document is None else json.dumps(document).encode()
            if path == "events" and status == 200:
                data = b": events\n\n"
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *words: object) -> None: ...

    with Server(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        made.url = f"http://127.0.0.1:{server.server_port}"
        yield made
        server.shutdown()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Those that `wait` makes, which take no time."""
    made: list[float] = []
    monkeypatch.setattr(module.time, "sleep", made.append)
    return made


def waited(proxy: Proxy, jobs: list[int]) -> list[tuple[int, str]]:
    with closing(Client(Address(None, proxy.url))) as client:
        return [(found["id"], found["state"]) for found in ends(client, jobs)]


def test_jobs_are_polled_while_too_many_listen(proxy: Proxy, pauses: list[float]) -> None:
    states = iter(["RUNNING", "RUNNING", "SUCCEEDED"])
    proxy.answer = lambda path: BUSY if path == "events" else (200, job(3, next(states)))
    assert waited(proxy, [3]) == [(3, "SUCCEEDED")]
    assert pauses == [5.0, 5.0]
    assert proxy.asked == ["events", "jobs/3"] * 3  # perhaps there is room for one more by now


def test_of_many_jobs_those_are_looked_at_that_are_not_open_any_more(proxy: Proxy, pauses: list[float]) -> None:

    def answer(path: str) -> Answer:
        assert len(pauses) < 9
        ended = 30 * len(pauses)
        if path == "events":
            return BUSY
        if path.startswith("jobs?"):
            assert "state=HELD%2CQUEUED%2CSTARTING%2CRUNNING%2CSTOPPING&" in path
            return (200, {"items": [job(number) for number in range(ended + 1, 101)], "next": None})
        number = int(path.removeprefix("jobs/"))
        return (200, job(number, "FAILED" if number <= ended else "QUEUED"))

    proxy.answer = answer
    assert waited(proxy, [*range(1, 101)]) == [(number, "FAILED") for number in range(1, 101)]
    assert proxy.count("jobs/") <= 110  # each but for the last ten once


def test_a_busy_service_is_waited_for_from_the_beginning(
    proxy: Proxy, pauses: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    proxy.answer = lambda path: BUSY if len(pauses) < 3 else (200, job(3, "CANCELLED"))
    assert waited(proxy, [3]) == [(3, "CANCELLED")]
    line = "hvd-transformer: too many listen to events: close some pages; still waiting\n"
    assert capfd.readouterr().err == line


def test_a_restart_behind_a_proxy_is_waited_for(
    proxy: Proxy, pauses: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    def answer(path: str) -> Answer:
        if 1 <= len(pauses) < 4:
            return (502 + 2 * (len(pauses) % 2), None)
        return (200, job(3, "RUNNING" if len(pauses) < 4 else "SUCCEEDED"))

    proxy.answer = answer
    assert waited(proxy, [3]) == [(3, "SUCCEEDED")]
    assert "answers with HTTP status 504 Gateway Timeout; still waiting" in capfd.readouterr().err


@pytest.mark.parametrize(("answer", "kind"), [(BAD_GATEWAY, Interrupted), ((404, {"error": "no such job"}), Refused)])
def test_what_is_wrong_at_first_is_told(
    proxy: Proxy, pauses: list[float], answer: Answer, kind: type[Exception]
) -> None:
    proxy.answer = lambda path: answer
    with pytest.raises(kind):
        waited(proxy, [3])
    assert pauses == []


def test_logs_are_followed_over_a_restart_behind_a_proxy(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("hvd_transformer.cli.logs.time.sleep", pauses.append)
    texts = ["one\n", "two\n"]

    def answer(path: str) -> Answer:
        if 1 <= len(pauses) < 4:
            return (502 + len(pauses) - 1, None)
        if path.startswith("jobs/"):
            return (200, job(3, "SUCCEEDED" if pauses else "RUNNING"))
        offset = int(path.partition("offset=")[2] or 0)
        text = "".join(texts[: 1 if not pauses else 2])
        page = {"text": text[offset:], "offset": offset, "next": len(text), "size": len(text)}
        return (200, page)

    proxy.answer = answer
    environment = {"HVD_TRANSFORMER_SERVER": proxy.url, "HVD_TRANSFORMER_TOKEN": "x"}
    done = command("hvd-transformer", "logs", "-f", 3, folder=tmp_path, environment=environment)
    assert (done.returncode, done.stdout) == (0, "one\ntwo\n")
    assert done.stderr == (f"hvd-transformer: {proxy.url}: answers with HTTP status 502 Bad Gateway; still waiting\n")
