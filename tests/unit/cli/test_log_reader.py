"""The log of a run as `logs` reads it from the service: its last lines, however long it is."""

from pathlib import Path
from typing import Any, cast

import pytest

from hvd_transformer.cli import log_reader as module
from hvd_transformer.cli.log_reader import LogReader
from hvd_transformer.service.remote.client import Client
from hvd_transformer.service.runs.logs import log_page

RUN = "0123456789ab"


class LogClient:
    """A service with one run, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bytes = folder, 0

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        if path == f"runs/{RUN}":
            return {"job": None}
        page = log_page(self.folder, query.pop("rank"), **query)
        self.bytes += page.next - page.offset
        return vars(page)


@pytest.fixture
def client(tmp_path: Path) -> LogClient:
    (tmp_path / "logs").mkdir()
    return LogClient(tmp_path)


def tail(client: LogClient, lines: int) -> tuple[str, int]:
    """The last lines, and where reading has come to."""
    reader = LogReader(cast(Client, client), RUN, "launch")
    return "".join(reader.text(lines)), reader.offset


def write(client: LogClient, text: str) -> None:
    (client.folder / "logs" / "launch.log").write_text(text)


@pytest.mark.parametrize("count", [0, 1, 5000, 9999, 10_000, 20_000])
def test_as_many_lines_as_are_asked_for(client: LogClient, count: int) -> None:
    """Of a log of 2 MB: a page of the service has 1 MiB."""
    lines = [f"{number:06d} {'x' * 193}\n" for number in range(10_000)]
    write(client, "".join(lines))
    assert tail(client, count) == ("".join(lines[max(0, len(lines) - count) :]), 2_010_000)
    assert client.bytes <= max(5 * 201 * count, 10_000)


def test_long_and_short_lines(client: LogClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_BYTES", 1000)
    lines = [f"{number} {'ä' * (number % 7) ** 4}\u2028{'y' * (number % 3)}\n" for number in range(300)]
    write(client, "".join(lines))
    for count in (1, 2, 17, 299, 300, 301, 10**18):
        assert tail(client, count)[0] == "".join(lines[-count:])


def test_a_last_line_without_an_end(client: LogClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvd_transformer.service.runs.logs._UNFINISHED_SECONDS", -1.0)
    write(client, "one\ntwo\nthree")
    assert [tail(client, count)[0] for count in (0, 1, 2, 9)] == ["", "three", "two\nthree", "one\ntwo\nthree"]


def test_a_log_that_is_replaced_meanwhile(client: LogClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_BYTES", 1000)
    write(client, "old line\n" * 1000)
    get, asked = client.get, []

    def replaced(path: str, **query: Any) -> dict[str, Any]:
        asked.append(query)
        if len(asked) == 4:
            write(client, "new 1\nnew 2\nnew 3\n")
        return get(path, **query)

    monkeypatch.setattr(client, "get", replaced)
    assert tail(client, 500) == ("new 1\nnew 2\nnew 3\n", 18)
