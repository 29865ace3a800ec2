"""Tells a web address when a job has ended. It waits for nobody, and tells what an address that was away has missed."""

import json
import logging
import time
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

from hvd_transformer.errors import UserError
from hvd_transformer.service.runs.index import run_id
from hvd_transformer.service.storage.news_table import News
from hvd_transformer.service.storage.store import Store

_SECONDS = 10.0
_TRIES = 3  # of an end that the address answers with an error
_LONGEST_REST = 300.0
_OLDEST = 86_400.0  # seconds since an end; older ones are not told
_AWAY = frozenset({429, 502, 503, 504})  # answers of an address whose program does not run at the moment

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
    """Posts the end of each job as JSON, in their order, on a thread of its own, from `start` to `close`.

    The ends are in the database until they are told. So each is told at least once, also by a service that is started
    after a crash; after a crash perhaps twice.
    """

    def __init__(self, address: str, store: Store, again_after: Callable[[int], float] = lambda tries: 2.0**tries):
        check_address(address)
        self._address, self._store, self._again_after = address, store, again_after
        store.keeps_news = True
        parts = urlsplit(address)
        self._host = f"{parts.scheme}://{parts.netloc}"  # for the log: the path is often a secret
        self._opener = urllib.request.build_opener(_NoRedirect)
        self._due, self._closing, self._until = Event(), Event(), float("inf")
        self._failures = 0  # in a row
        self._refusals = 0  # answers to the present news that are errors
        self._thread = Thread(target=self._run, name="webhook", daemon=True)

    def start(self) -> None:
        """Begin; what an earlier service has left is told first."""
        self._thread.start()

    def close(self) -> None:
        """Tell what is left, as far as that takes no more than 10 seconds, and end."""
        self._until = time.monotonic() + _SECONDS
        self._closing.set()
        self._due.set()
        self._thread.join(_SECONDS)

    def _run(self) -> None:
        with self._store.listening(self._due.set):
            last = False
            while not last:
                last = self._closing.is_set()
                self._due.clear()
                try:
                    told = self._tell()
                except Exception as error:  # a full disk, for example: it is tried again
                    _log.warning("webhook: %s", error)
                    told = False
                if not told and not last:
                    self._failures += 1
                    self._closing.wait(min(self._again_after(min(self._failures, 99)), _LONGEST_REST))
                elif not last:
                    self._failures = 0
                    self._due.wait()

    def _tell(self) -> bool:
        """Tell all that there is; returns False at the first failure that is worth another try."""
        while news := self._store.news():
            for one in news:
                if time.monotonic() >= self._until or not self._tell_one(one):
                    return False
                self._store.forget_news([one.seq])
                self._failures = self._refusals = 0
        return True

    def _tell_one(self, news: News) -> bool:
        """Whether the news is told, or given up."""
        job = self._store.job(news.job)
        if job is None:
            return True
        if time.time() - news.ended > _OLDEST:
            _log.warning("%s: job %d: ended more than a day ago; that is not told any more", self._host, job.id)
            return True
        run = {"run": run_id(Path(job.output_dir)), "output_dir": job.output_dir}
        end = {"state": news.state.value, "reason": news.reason, "submitted": job.submitted, "ended": news.ended}
        why = self._post({"id": job.id, "name": job.name, "owner": job.owner, **end, **run})
        if why is None:
            return True
        error, may_come = why
        self._refusals += not may_come
        given_up = self._refusals >= _TRIES
        what = "it is given up" if given_up else f"try {self._failures + 1}"
        _log.warning("%s: job %d: %s (%s)", self._host, job.id, error, what)
        return given_up

    def _post(self, document: dict[str, Any]) -> tuple[str, bool] | None:
        """None: it is told. Otherwise why not, and whether the address is only away."""
        headers = {"Content-Type": "application/json", "User-Agent": "hvd-transformer"}
        request = urllib.request.Request(self._address, json.dumps(document).encode(), headers, method="POST")
        seconds = max(0.1, min(_SECONDS, self._until - time.monotonic()))
        try:
            with self._opener.open(request, timeout=seconds):
                return None
        except HTTPError as error:
            return str(error), error.code in _AWAY
        except (OSError, ValueError, HTTPException) as error:
            return str(error) or type(error).__name__, isinstance(error, OSError)
