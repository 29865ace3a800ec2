"""Tells a web address when a job has ended. It waits for nobody: an address that does not answer misses the news."""

import json
import logging
import urllib.request
from collections.abc import Callable
from queue import Full, Queue
from threading import Thread
from time import sleep
from typing import Any
from urllib.parse import urlsplit

from hvd_transformer.errors import UserError

_SECONDS = 10.0
_TRIES = 3
_MOST = 1000  # news that wait

_log = logging.getLogger(__name__)


def check_address(address: str) -> None:
    """Raise `UserError` for an address that no news can be sent to."""
    if urlsplit(address).scheme not in ("http", "https") or not urlsplit(address).hostname:
        raise UserError(f"--webhook {address}: must be an address that begins with http:// or https://")


class Webhook:
    """Posts each document as JSON, in the order in which they came, from a thread of its own."""

    def __init__(self, address: str, again_after: Callable[[int], float] = lambda tries: 2.0**tries) -> None:
        check_address(address)
        self._address, self._again_after = address, again_after
        self._news: Queue[dict[str, Any] | None] = Queue(_MOST)
        self._thread = Thread(target=self._run, name="webhook", daemon=True)
        self._thread.start()

    def tell(self, document: dict[str, Any]) -> None:
        """Post this soon."""
        try:
            self._news.put_nowait(document)
        except Full:
            _log.warning("%s: too slow; the end of job %s is not told", self._address, document.get("id"))

    def close(self) -> None:
        """Post what is left, and end."""
        self._news.put(None)
        self._thread.join(_SECONDS)

    def _run(self) -> None:
        while (document := self._news.get()) is not None:
            self._post(json.dumps(document).encode())

    def _post(self, body: bytes) -> None:
        headers = {"Content-Type": "application/json", "User-Agent": "hvd-transformer"}
        for tries in range(1, _TRIES + 1):
            try:
                request = urllib.request.Request(self._address, body, headers, method="POST")
                with urllib.request.urlopen(request, timeout=_SECONDS):
                    return
            except (OSError, ValueError) as error:
                _log.warning("%s: %s (try %d of %d)", self._address, error, tries, _TRIES)
                if tries < _TRIES:
                    sleep(self._again_after(tries))
