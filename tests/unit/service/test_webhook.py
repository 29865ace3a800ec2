"""News of ended jobs, posted to a real server on the loopback interface."""

import json
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread, enumerate

import pytest
from new_jobs import new_job, on
from waiting import wait_until

from hvd_transformer.errors import UserError
from hvd_transformer.service import webhook as module
from hvd_transformer.service.jobs import Host, State
from hvd_transformer.service.runs.index import run_id
from hvd_transformer.service.storage.store import Store
from hvd_transformer.service.webhook import Webhook, check_address


@contextmanager
def listening(codes: list[int], port: int = 0) -> Iterator[tuple[str, list[dict]]]:
    """An address that answers with these codes, in order, and what was posted to it."""
    posted: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            code = codes.pop(0)
            self.send_response(code)
            if code in (301, 302, 303, 307, 308):
                self.send_header("Location", "/elsewhere")
            self.end_headers()

        def do_GET(self) -> None:
            """Of whoever follows a redirect."""
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words: object) -> None:
            """Not on the screen."""

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/hook", posted
        server.shutdown()
        thread.join()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store(tmp_path / "service.db")) as store:
        store.put_hosts([Host("h1", 8)])
        store.keeps_news = True
        yield store


def end(store: Store, *states: State) -> None:
    """A job for each of the states, in which it ends."""
    jobs = store.add_jobs([new_job(f"j{number}") for number in range(len(states))])
    for number, state in zip(jobs, states, strict=True):
        assert store.start(number, on("h1"), time.time())
        store.end_attempt(number, 1, ended=time.time(), state=state, reason=f"why {number}")


def at_once(tries: int) -> float:
    return 0.0


def ids(posted: list[dict]) -> list[int]:
    return [news["id"] for news in posted]


def test_each_end_is_posted_once_and_in_order(store: Store) -> None:
    with listening([200, 204]) as (address, posted):
        webhook = Webhook(address, store)
        webhook.start()
        end(store, State.SUCCEEDED, State.FAILED)
        wait_until(lambda: len(posted) == 2)
        webhook.close()
    assert [(news["id"], news["state"], news["reason"]) for news in posted] == [
        (1, "SUCCEEDED", "why 1"), (2, "FAILED", "why 2"),
    ]  # fmt: skip
    assert posted[0] == {
        "id": 1, "name": "j0", "owner": "ann", "state": "SUCCEEDED", "reason": "why 1", "submitted": 1000.0,
        "ended": posted[0]["ended"], "run": run_id(Path("/runs/j0-1")), "output_dir": "/runs/j0-1",
    }  # fmt: skip
    assert store.news() == []


def test_what_a_service_that_was_killed_has_not_told_the_next_one_tells(store: Store) -> None:
    end(store, State.SUCCEEDED)
    with listening([200]) as (address, posted):
        webhook = Webhook(address, store)
        webhook.start()
        wait_until(lambda: posted)
        webhook.close()
    assert ids(posted) == [1]


def test_an_address_that_is_away_gets_the_news_once_it_is_back(store: Store) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    webhook = Webhook(f"http://127.0.0.1:{port}/hook", store, again_after=lambda tries: 0.05)
    webhook.start()
    end(store, State.SUCCEEDED, State.FAILED)
    wait_until(lambda: webhook._failures > 2 * module._TRIES)
    with listening([503, 200, 200], port) as (_, posted):
        wait_until(lambda: len(posted) == 3)
        webhook.close()
    assert ids(posted) == [1, 1, 2]


def test_tries_while_the_address_was_away_do_not_count_against_it(store: Store) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    webhook = Webhook(f"http://127.0.0.1:{port}/hook", store, again_after=lambda tries: 0.05)
    webhook.start()
    end(store, State.SUCCEEDED)
    wait_until(lambda: webhook._failures > 2 * module._TRIES)
    with listening([500, 500, 200], port) as (_, posted):
        wait_until(lambda: len(posted) == 3)
        webhook.close()
    assert ids(posted) == [1, 1, 1]


def test_an_error_is_tried_again_and_keeps_no_later_news_from_coming(store: Store) -> None:
    end(store, State.FAILED, State.FAILED)
    with listening([500, 400, 500, 200]) as (address, posted):
        webhook = Webhook(address, store, at_once)
        webhook.start()
        wait_until(lambda: len(posted) == 4)
        webhook.close()
    assert ids(posted) == [1, 1, 1, 2]


def test_after_days_of_failures_it_still_tries(store: Store) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}/"
    waits: list[float] = []

    def again_after(tries: int) -> float:
        waits.append(2.0**tries)
        return 0.01

    webhook = Webhook(address, store, again_after)
    webhook._failures = 2000
    end(store, State.FAILED)
    webhook.start()
    wait_until(lambda: len(waits) > 2)
    webhook.close()


@pytest.mark.parametrize("code", [301, 302, 307])
def test_a_redirect_is_an_error(code: int, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """urllib would fetch the other address and call that a success."""
    end(store, State.FAILED)
    with listening([code, 200]) as (address, posted):
        webhook = Webhook(address, store, at_once)
        webhook.start()
        wait_until(lambda: len(posted) == 2)
        webhook.close()
    assert ids(posted) == [1, 1]
    assert f"HTTP Error {code}" in caplog.text


def test_an_answer_that_is_no_http_keeps_no_later_news_from_coming(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    connections = 0
    end(store, State.FAILED, State.FAILED)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            nonlocal connections
            while connections < 6:  # each of the two ends is tried three times
                with server.accept()[0] as connection:
                    connections += 1
                    connection.recv(1 << 16)
                    connection.sendall(b"hello\r\n\r\n")

        thread = Thread(target=answer, daemon=True)
        thread.start()
        webhook = Webhook(f"http://127.0.0.1:{server.getsockname()[1]}/", store, at_once)
        webhook.start()
        wait_until(lambda: store.news() == [])
        webhook.close()
        thread.join(10)
    assert connections == 6 and "job 2: hello" in caplog.text


def test_an_end_of_the_day_before_yesterday_is_not_told(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    end(store, State.FAILED, State.SUCCEEDED)
    with store.database.write() as connection:
        connection.execute("UPDATE news SET ended = ended - 100000 WHERE job = 1")
    with listening([200]) as (address, posted):
        webhook = Webhook(address, store)
        webhook.start()
        wait_until(lambda: posted)
        webhook.close()
    assert ids(posted) == [2] and "job 1: ended more than a day ago" in caplog.text


def test_the_log_does_not_have_the_path_which_may_be_a_secret(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    end(store, State.FAILED)
    with listening([500] * 3) as (address, _), caplog.at_level(logging.WARNING):
        webhook = Webhook(address, store, at_once)
        webhook.start()
        wait_until(lambda: store.news() == [])
        webhook.close()
    assert f"{address.removesuffix('/hook')}: job 1: HTTP Error 500" in caplog.text and "/hook" not in caplog.text


def test_close_does_not_wait_between_tries_and_forgets_nothing(store: Store) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}/"
    webhook = Webhook(address, store, again_after=lambda tries: 3600.0)
    webhook.start()
    end(store, State.FAILED)
    wait_until(lambda: webhook._failures)
    closing = Thread(target=webhook.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not {"webhook", closing.name} & {thread.name for thread in enumerate()}
    assert [news.job for news in store.news()] == [1]


def test_without_a_webhook_nothing_is_kept(store: Store) -> None:
    store.keeps_news = False
    end(store, State.FAILED)
    assert store.news() == []


@pytest.mark.parametrize(
    "address",
    [
        "ftp://host/x", "host/x", "http://", "file:///etc/passwd", "", "http://host:port/", "http://host:0/",
        "http://ann:word@host/", "http://host/a b", "http://host/\n",
    ],
)  # fmt: skip
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(UserError, match="--webhook"):
        check_address(address)
