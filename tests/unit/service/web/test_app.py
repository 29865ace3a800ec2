"""What the application answers whatever is asked for: health, unknown addresses, failures of its own."""

import sqlite3
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from web_service import AgreeingChecker, Running, running

from hvd_transformer.errors import UserError


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("service")) as found:
        yield found


def test_health_needs_no_login(service: Running) -> None:
    assert service.request("GET", "/health").json == {"status": "ok"}
    service.problems.append("the manager has done nothing for 31 s")
    sick = service.request("GET", "/health")
    assert (sick.status, sick.error) == (503, "the manager has done nothing for 31 s")
    service.problems.clear()
    assert service.request("GET", "/health").status == 200


@pytest.mark.parametrize(
    "path",
    ["/nothing", "/api/v1/nothing", "/api/v2/jobs", "/api/v1/jobs/", "//evil.example/", "/runs/a/b", "/%0d%0aX-Evil:1"],
)
def test_unknown_addresses(service: Running, path: str) -> None:
    answer = service.request("GET", path, token=service.token("ann"))
    assert (answer.status, answer.headers["content-type"]) == (404, "application/json")
    assert answer.error
    assert "location" not in answer.headers
    assert "x-evil" not in answer.headers


def test_unknown_methods(service: Running) -> None:
    for method in ("PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "FOO"):
        answer = service.request(method, "/api/v1/jobs", token=service.token("ann"))
        assert (answer.status, bool(answer.error)) == (405, True)
        assert "access-control-allow-methods" not in answer.headers


def test_a_failure_of_its_own_tells_nothing(service: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("hunter2")

    monkeypatch.setattr(service.store, "hosts", fail)
    answer = service.request("GET", "/api/v1/hosts", token=service.token("ann"))
    assert (answer.status, answer.error) == (500, "RuntimeError in the service: see its log")
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_full_disk_is_told_in_one_line(service: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise UserError("service.db: the disk is full;\nfree some space") from sqlite3.OperationalError("full")

    monkeypatch.setattr(service.store, "add_jobs", fail)
    answer = service.request("POST", "/api/v1/jobs", {"folder": "/"}, token=service.token("ann"))
    assert (answer.status, answer.error) == (503, "service.db: the disk is full; free some space")


def test_a_slow_request_does_not_keep_others_waiting(service: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, go_on = threading.Event(), threading.Event()
    hosts, token = service.store.hosts, service.token("ann")

    def slow() -> object:
        asked.set()
        go_on.wait(10)
        return hosts()

    monkeypatch.setattr(service.store, "hosts", slow)
    statuses: list[int] = []
    thread = threading.Thread(
        target=lambda: statuses.append(service.request("GET", "/api/v1/hosts", token=token).status)
    )
    thread.start()
    assert asked.wait(10)
    assert service.request("GET", "/api/v1/me", token=token).status == 200
    assert statuses == []
    go_on.set()
    thread.join(10)
    assert statuses == [200]


def test_submissions_that_wait_for_each_other_keep_nobody_else_waiting(
    service: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than there are threads for pages."""
    asked, go_on, token = threading.Event(), threading.Event(), service.token("ann")

    def slow(self: AgreeingChecker, *words: Any) -> Any:
        asked.set()
        go_on.wait(20)
        raise UserError("seed=x: must be a number")

    monkeypatch.setattr(AgreeingChecker, "check", slow)
    statuses: list[int] = []

    def submit() -> None:
        answer = service.request("POST", "/api/v1/jobs", {"folder": str(service.folder)}, token=token)
        statuses.append(answer.status)

    threads = [threading.Thread(target=submit) for _ in range(12)]
    for thread in threads:
        thread.start()
    assert asked.wait(10)
    time.sleep(0.2)  # until all of them wait
    assert service.request("GET", "/api/v1/me", token=token).status == 200
    assert service.request("GET", "/health").status == 200
    assert statuses == []
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert statuses == [422] * 12
