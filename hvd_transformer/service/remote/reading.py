"""What listing commands read of jobs and runs: from the service or, while it is down, from its database."""

import re
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any, Protocol

from hvd_transformer.errors import UserError
from hvd_transformer.service.jobs import LONGEST_NUMBER
from hvd_transformer.service.remote.address import expanded
from hvd_transformer.service.remote.client import Client, Refused
from hvd_transformer.service.runs.index import run_id

Document = dict[str, Any]
_RUN = re.compile(r"[0-9a-f]{12}")


class UnknownRun(UserError):
    """The service has no such run."""


class Reading(Protocol):
    """Documents have the shape of the HTTP interface."""

    def jobs(self, states: Sequence[str], user: str | None, tag: str | None) -> Iterable[Document]:
        """The jobs in these states, of a user, with a tag."""

    def job_and_run(self, word: str) -> tuple[Document | None, Document | None]:
        """The job and the run of a job's number, a run's id or its directory. Raises `UserError` for neither."""

    def compare(self, words: Sequence[str]) -> Document:
        """What differs between several runs, and their final metrics."""


class Online:
    """The service itself. With `directories`, run directories that it does not have are read here."""

    def __init__(self, client: Client, *, directories: bool = False) -> None:
        self._client, self._directories = client, directories

    def jobs(self, states: Sequence[str], user: str | None, tag: str | None) -> Iterable[Document]:
        return self._client.items("jobs", state=",".join(states), user=user, tag=tag, limit=500)

    def job_and_run(self, word: str) -> tuple[Document | None, Document | None]:
        try:
            number, run = locate(self._client, word)
        except UnknownRun as error:
            return self._here([word], error).job_and_run(word)
        job = None if number is None else self._client.get(f"jobs/{number}")
        found = self._client.get(f"runs/{run}")
        return job, found if found["began"] is not None else None

    def compare(self, words: Sequence[str]) -> Document:
        try:
            runs = [locate(self._client, word)[1] for word in words]
        except UnknownRun as error:
            return self._here(words, error).compare(words)
        found: Document = self._client.get("compare", runs=",".join(runs))
        return found

    def _here(self, words: Sequence[str], error: UnknownRun) -> Reading:
        """For run directories alone. Raises `error` for other words."""
        from hvd_transformer.service.remote.offline import Offline

        if not self._directories or any(job_number(word) or _RUN.fullmatch(word) for word in words):
            raise error
        return Offline.of_directories()


def job_number(word: str) -> int | None:
    """The number of a job, if the word is one. Raises `UserError` for one that no job can have."""
    if not (word.isascii() and word.isdecimal()) or _RUN.fullmatch(word):
        return None
    if len(word) > LONGEST_NUMBER:
        raise UserError(f"job {word[:40]}: no such job")
    return int(word)


def run_of(word: str) -> str:
    """The id of a run: the word itself, or that of a run directory. Raises `UserError`."""
    if _RUN.fullmatch(word):
        return word
    path = expanded(word)
    if not path.is_dir():
        raise UserError(f"{word}: neither the number of a job nor a run directory nor the id of a run")
    return run_id(path)


def locate(client: Client, word: str) -> tuple[int | None, str]:
    """The number of a job, if there is one, and the id of its run. Raises `UserError`."""
    number = job_number(word)
    if number is not None:
        return number, client.get(f"jobs/{number}")["run"]
    run = run_of(word)
    try:
        job = client.get(f"runs/{run}")["job"]
    except Refused as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
        raise UnknownRun(f"{word}: the service has no such run") from None
    return (None if job is None else job["id"]), run
