"""News of ended jobs, posted to a real server on the loopback interface."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from hvd_transformer.errors import UserError
from hvd_transformer.service.webhook import Webhook


@contextmanager
def listening(codes: list[int]) -> Iterator[tuple[str, list[dict]]]:
    """An address that answers with these codes, in order, and what was posted to it."""
    posted: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(codes.pop(0))
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


@pytest.mark.parametrize("address", ["ftp://host/x", "host/x", "http://", "file:///etc/passwd", ""])
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(UserError, match="--webhook"):
        Webhook(address)
