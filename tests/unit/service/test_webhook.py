"""News of ended jobs, posted to a real server on the loopback interface."""

import json
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread, enumerate

import pytest

from hvd_transformer.errors import UserError
from hvd_transformer.service import webhook as module
from hvd_transformer.service.webhook import Webhook


@contextmanager
def listening(codes: list[int]) -> Iterator[tuple[str, list[dict]]]:
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

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/hook", posted
        server.shutdown()
        thread.join()


def test_each_end_is_posted_once_and_in_order() -> None:
    with listening([200, 204]) as (address, posted):
        webhook = Webhook(address)
        webhook.tell({"id": 1, "state": "SUCCEEDED"})
        webhook.tell({"id": 2, "state": "FAILED"})
        webhook.close()
        assert posted == [{"id": 1, "state": "SUCCEEDED"}, {"id": 2, "state": "FAILED"}]


def test_an_error_is_tried_again_and_keeps_no_later_news_from_coming() -> None:
    with listening([500, 500, 500, 200]) as (address, posted):
        webhook = Webhook(address, again_after=lambda tries: 0.0)
        webhook.tell({"id": 1})
        webhook.tell({"id": 2})
        webhook.close()
        assert [news["id"] for news in posted] == [1, 1, 1, 2]


@pytest.mark.parametrize("code", [301, 302, 307])
def test_a_redirect_is_an_error(code: int, caplog: pytest.LogCaptureFixture) -> None:
    """urllib would fetch the other address and call that a success."""
    with listening([code, 200]) as (address, posted):
        webhook = Webhook(address, again_after=lambda tries: 0.0)
        webhook.tell({"id": 1})
        webhook.close()
        assert [news["id"] for news in posted] == [1, 1]
    assert f"HTTP Error {code}" in caplog.text


def test_an_answer_that_is_no_http_keeps_no_later_news_from_coming(caplog: pytest.LogCaptureFixture) -> None:
    connections = 0
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            nonlocal connections
            while connections < 6:  # each of the two documents is tried three times
                with server.accept()[0] as connection:
                    connections += 1
                    connection.recv(1 << 16)
                    connection.sendall(b"hello\r\n\r\n")

        thread = Thread(target=answer, daemon=True)
        thread.start()
        webhook = Webhook(f"http://127.0.0.1:{server.getsockname()[1]}/", again_after=lambda tries: 0.0)
        webhook.tell({"id": 1})
        webhook.tell({"id": 2})
        webhook.close()
        thread.join(10)
    assert connections == 6 and "job 2: hello" in caplog.text


def test_the_log_does_not_have_the_path_which_may_be_a_secret(caplog: pytest.LogCaptureFixture) -> None:
    with listening([500] * 3) as (address, _), caplog.at_level(logging.WARNING):
        webhook = Webhook(address, again_after=lambda tries: 0.0)
        webhook.tell({"id": 7})
        webhook.close()
    assert f"{address.removesuffix('/hook')}: job 7: HTTP Error 500" in caplog.text and "/hook" not in caplog.text


def test_close_does_not_wait_between_tries_nor_for_room(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """More news than may wait, at an address where nobody answers."""
    monkeypatch.setattr(module, "_MOST", 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}/"
    webhook = Webhook(address, again_after=lambda tries: 3600.0)
    for number in range(5):
        webhook.tell({"id": number})
    closing = Thread(target=webhook.close, daemon=True)
    closing.start()
    closing.join(30)
    assert "too slow; the end of job 4 is not told" in caplog.text
    assert not {"webhook", closing.name} & {thread.name for thread in enumerate()}


@pytest.mark.parametrize(
    "address",
    [
        "ftp://host/x", "host/x", "http://", "file:///etc/passwd", "", "http://host:port/", "http://host:0/",
        "http://ann:word@host/", "http://host/a b", "http://host/\n",
    ],
)  # fmt: skip
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(UserError, match="--webhook"):
        Webhook(address)
