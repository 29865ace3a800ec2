"""Tells a web address when a job has ended. It waits for nobody: an address that does not answer misses the news."""

import json
import logging
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any
from urllib.parse import urlsplit

from hvd_transformer.errors import UserError

_SECONDS = 10.0
_TRIES = 3
_MOST = 1000  # news that wait

_log = logging.getLogger(__name__)


def check_address(address: str) -> None:
    """Raise `UserError` for an address that no news can be sent to."""
    try:
        parts = urlsplit(address)
        fits = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and parts.username is None
    except ValueError:  # the port is not a number
        fits = False
    if not fits or not address.isascii() or not address.isprintable() or " " in address:
        raise UserError(f"--webhook {address}: must be like https://host:8080/path, without a user name")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: urllib would follow it with a GET, without the news."""

    def redirect_request(self, *answer: Any) -> None:
        return None


class Webhook:
    """Posts each document as JSON, in the order in which they came, from a thread of its own."""

    def __init__(self, address: str, again_after: Callable[[int], float] = lambda tries: 2.0**tries) -> None:
        check_address(address)
        self._address, self._again_after = address, again_after
        parts = urlsplit(address)
        self._host = f"{parts.scheme}://{parts.netloc}"  # for the log: the path is often a secret
        self._opener = urllib.request.build_opener(_NoRedirect)
        self._news: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._closing = Event()
        self._thread = Thread(target=self._run, name="webhook", daemon=True)
        self._thread.start()

    def tell(self, document: dict[str, Any]) -> None:
        """Post this soon."""
        if self._news.qsize() < _MOST:
            self._news.put(document)
        else:
            _log.warning("%s: too slow; the end of job %s is not told", self._host, document.get("id"))

    def close(self) -> None:
        """Post what is left, as far as that takes no more than 10 seconds, and end."""
        self._closing.set()
        self._news.put(None)
        self._thread.join(_SECONDS)

    def _run(self) -> None:
        while (document := self._news.get()) is not None:
            self._post(document)

    def _post(self, document: dict[str, Any]) -> None:
        headers = {"Content-Type": "application/json", "User-Agent": "hvd-transformer"}
        body = json.dumps(document).encode()
        for tries in range(1, _TRIES + 1):
            try:
                request = urllib.request.Request(self._address, body, headers, method="POST")
                with self._opener.open(request, timeout=_SECONDS):
                    return
            except (OSError, ValueError, HTTPException) as error:
                why = str(error) or type(error).__name__
                _log.warning("%s: job %s: %s (try %d of %d)", self._host, document.get("id"), why, tries, _TRIES)
                if tries < _TRIES:
                    self._closing.wait(self._again_after(tries))
