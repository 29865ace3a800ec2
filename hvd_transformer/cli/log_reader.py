"""Reads the log of a run from the service, page by page, also while it grows or is replaced."""

from collections.abc import Iterator
from typing import Any

from hvd_transformer.errors import UserError
from hvd_transformer.service.jobs import ENDED
from hvd_transformer.service.remote.client import Client, Refused
from hvd_transformer.service.remote.reading import locate

_LINE_BYTES = 200  # of a usual line: how much is read at first for the last N lines
_MOST_BYTES = 1 << 20  # of a page
_LARGEST = 1 << 50  # larger than any log
_NOT_FOUND = 404


class Missing(UserError):
    """There is no such log yet."""


class LogReader:
    """The log of one rank, or of the launcher. `word`: the number of a job, a run's id or its directory."""

    def __init__(self, client: Client, word: str, rank: str) -> None:
        self._client, self._rank = client, rank
        self._job, self.run = locate(client, word)
        self.offset = 0  # up to where it has been read
        self.complete = False  # nothing more was there; the service keeps back a line that is being written

    def text(self, lines: int | None = None) -> Iterator[str]:
        """What has not been read yet; of that the last `lines`. Raises `Missing` if there is no log."""
        if lines is not None:
            yield self._tail(lines)
        while True:
            page = self._page(offset=self.offset)
            if page["size"] < self.offset:  # another start has replaced it
                self.offset = 0
                continue
            self.offset, self.complete = page["next"], page["next"] == page["size"]
            if not page["text"]:
                return
            yield page["text"]

    def ended(self) -> bool:
        """Whether nothing more will be written."""
        if self._job is not None:
            return self._client.get(f"jobs/{self._job}")["state"] in ENDED
        return bool(self._client.get(f"runs/{self.run}")["state"] != "RUNNING")

    def _tail(self, lines: int) -> str:
        size = min(max(1, lines) * _LINE_BYTES, _LARGEST)
        while True:
            start, text = self._end(size)
            found = text.split("\n")
            ended = found[-1] == ""  # the last line is whole
            if len(found) - ended > lines or start == 0:
                return "\n".join(found[max(0, len(found) - ended - lines) :])
            size = min(4 * size, _LARGEST)

    def _end(self, size: int) -> tuple[int, str]:
        """The last `size` bytes, from the beginning of a line on, and where that is."""
        page = self._page(tail=size, limit=min(size, _MOST_BYTES))
        start, end, text = page["offset"], page["size"], [page["text"]]
        while page["offset"] < page["next"] < end:
            self.offset = page["next"]
            page = self._page(offset=self.offset, limit=_MOST_BYTES)
            if page["offset"] < self.offset:  # another start has replaced it
                return self._end(size)
            text.append(page["text"])
        self.offset = page["next"]
        return start, "".join(text)

    def _page(self, **query: int) -> dict[str, Any]:
        try:
            page: dict[str, Any] = self._client.get(f"runs/{self.run}/log", rank=self._rank, **query)
        except Refused as error:
            if error.status == _NOT_FOUND:
                raise Missing(str(error)) from None
            raise
        return page
