"""Submitting, listing and changing jobs over HTTP, with the real database and actions."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from web_service import AgreeingChecker, Running, running

from hvd_transformer.service.jobs import Placement, State
from hvd_transformer.service.storage.settings import Limits
from hvd_transformer.service.storage.tokens import Role
from hvd_transformer.service.web.api import job_routes

JOBS = "/api/v1/jobs"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("service")) as found:
        yield found


def test_a_job_is_submitted_and_shown(service: Running) -> None:
    token = service.token("ann")
    body = {"folder": "/home", "words": ["optimizer.lr=0.1"], "num_ranks": 2, "tags": ["sweep"], "priority": 3}
    answer = service.request("POST", JOBS, body, token=token)
    assert answer.status == 201
    (job,) = answer.json["jobs"]
    assert answer.json["ids"] == [job["id"]]
    assert (job["owner"], job["state"], job["priority"], job["tags"]) == ("ann", "QUEUED", 3, ["sweep"])
    assert job["needs"] == {"num_ranks": 2, "min_ranks": 2, "tensor": 1, "gpus_per_rank": 0}
    assert "config" not in job
    shown = service.request("GET", f"{JOBS}/{job['id']}", token=token).json
    assert shown["config"]["optimizer.lr"] == "0.1"
    assert shown["attempts"] == []
    assert {key: shown[key] for key in job} == job


def test_the_allocation_and_attempts_of_a_running_job(service: Running) -> None:
    token = service.token("ann")
    number = service.submit(token, num_ranks=3)["id"]
    service.store.start(number, (Placement("h1", 2, (0, 1)), Placement("h2", 1)), 50.0)
    shown = service.request("GET", f"{JOBS}/{number}", token=token).json
    where = [{"host": "h1", "ranks": 2, "gpus": [0, 1]}, {"host": "h2", "ranks": 1, "gpus": []}]
    assert shown["allocation"] == where
    (attempt,) = shown["attempts"]
    assert (attempt["number"], attempt["began"], attempt["ended"], attempt["allocation"]) == (1, 50.0, None, where)


def test_a_full_queue_is_told_from_a_wrong_request(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        service.store.set_limits(Limits(max_queued=1))
        token = service.token("ann")
        service.submit(token)
        answer = service.request("POST", JOBS, {"folder": "/"}, token=token)
    assert (answer.status, answer.error) == (429, "ann has 1 jobs in the queue and may have 1; 1 more are too many")


def test_a_request_that_is_sent_again_adds_nothing(service: Running) -> None:
    token, key, before = service.token("ann"), {"Idempotency-Key": "k1"}, len(service.store.jobs())
    first = service.request("POST", JOBS, {"folder": "/"}, key, token).json["ids"]
    assert service.request("POST", JOBS, {"folder": "/"}, key, token).json["ids"] == first
    assert service.request("POST", JOBS, {"folder": "/", "priority": 1}, key, token).status == 422
    assert service.request("POST", JOBS, {"folder": "/"}, key, service.token("bob")).json["ids"] != first
    assert len(service.store.jobs()) == before + 2


def test_a_request_that_is_sent_again_while_it_is_checked_adds_nothing(
    service: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a client that has waited for a minute."""
    token, key, body = service.token("ann"), {"Idempotency-Key": "k2"}, {"folder": "/", "words": ["output_dir=/runs/x"]}
    asked, go_on, check = threading.Event(), threading.Event(), AgreeingChecker.check

    checks: list[object] = []

    def slow(self: AgreeingChecker, *words: Any) -> Any:
        checks.append(words)
        asked.set()
        go_on.wait(10)
        return check(self, *words)

    monkeypatch.setattr(AgreeingChecker, "check", slow)
    found: list[list[int]] = []

    def submit() -> None:
        found.append(service.request("POST", JOBS, body, key, token).json["ids"])

    threads = [threading.Thread(target=submit) for _ in range(2)]
    for thread in threads:
        thread.start()
        assert asked.wait(10)
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert found[0] == found[1] and len(checks) == 1


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({"folder": "/", "prioritty": 1}, "prioritty: unknown field; known: words"),
        ({"words": []}, "folder: "),
        ({"folder": "/", "priority": "high"}, "priority: "),
        ({"folder": "/", "num_ranks": 99}, "-np 99: can never run"),
        ({"folder": "/", "after": [777]}, "--after 777: no such job"),
        ([], "object"),
        (b"{", "JSON"),
        (b"\xff", ""),
    ],
)
def test_wrong_requests_are_refused_in_one_line(service: Running, body: Any, part: str) -> None:
    headers, before = {"Content-Type": "application/json"}, len(service.store.jobs())
    answer = service.request("POST", JOBS, body, headers, service.token("ann"))
    assert answer.status == 422
    assert part in answer.error
    assert len(service.store.jobs()) == before


def test_a_refusal_does_not_repeat_what_was_sent(service: Running) -> None:
    body = {"folder": "/", "env_names": {"PASSWORD": "hunter2"}, "hunter2": "hunter2"}
    answer = service.request("POST", JOBS, {**body, "folder": 1}, token=service.token("ann"))
    assert answer.status == 422
    assert "hunter2" not in answer.error


def test_pages_of_jobs(service: Running) -> None:
    token = service.token("pat")
    numbers = [service.submit(token, tags=["even"] if i % 2 == 0 else [])["id"] for i in range(5)]
    seen, cursor = [], ""
    for _ in range(10):
        page = service.request("GET", f"{JOBS}?user=pat&limit=2{cursor}", token=token).json
        seen += [job["id"] for job in page["items"]]
        if page["next"] is None:
            break
        cursor = f"&cursor={page['next']}"
    assert seen == numbers
    newest = service.request("GET", f"{JOBS}?order=desc&limit=3&tag=even&user=pat", token=token).json
    assert [job["id"] for job in newest["items"]] == numbers[::2][::-1]
    service.store.update(numbers[0], state=State.HELD)
    held = service.request("GET", f"{JOBS}?user=pat&state=held,running", token=token).json
    assert [job["id"] for job in held["items"]] == numbers[:1]
    both = service.request("GET", f"{JOBS}?user=pat&state=HELD&state=QUEUED", token=token).json
    assert [job["id"] for job in both["items"]] == numbers


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=501",
        "limit=x",
        "state=ASLEEP",
        "cursor=abc",
        "cursor=%00",
        "order=up",
        "page=2",
        "user=a&user=b",
    ],
)
def test_wrong_queries_are_refused(service: Running, query: str) -> None:
    answer = service.request("GET", f"{JOBS}?{query}", token=service.token("ann"))
    assert answer.status == 422
    assert answer.error.startswith(query.partition("=")[0])


@pytest.mark.parametrize("number", ["777", "0", "-1", "1e3", "9" * 18, "9" * 19, "9" * 5000, "%00", "..%2f1"])
def test_unknown_jobs_are_not_found(service: Running, number: str) -> None:
    token = service.token("ann", Role.ADMIN)
    assert service.request("GET", f"{JOBS}/{number}", token=token).status == 404
    assert service.request("POST", f"{JOBS}/{number}/cancel", {}, token=token).status == 404


def test_actions_change_one_job(service: Running) -> None:
    token = service.token("ann")
    number = service.submit(token)["id"]

    def act(name: str, body: Any = None) -> dict[str, Any]:
        answer = service.request("POST", f"{JOBS}/{number}/{name}", body or {}, token=token)
        assert answer.status == 200, answer
        job: dict[str, Any] = answer.json
        return job

    assert act("hold")["state"] == "HELD"
    assert act("release")["state"] == "QUEUED"
    assert act("priority", {"priority": 7})["priority"] == 7
    assert act("tags", {"add": ["a", "b"]})["tags"] == ["a", "b"]
    assert act("tags", {"remove": ["a"]})["tags"] == ["b"]
    assert act("cancel", {"now": True})["state"] == "CANCELLED"
    refused = service.request("POST", f"{JOBS}/{number}/cancel", {}, token=token)
    assert (refused.status, refused.error) == (409, f"job {number} has ended: CANCELLED")
    assert act("retry")["state"] == "QUEUED"


def test_only_its_owner_and_admins_change_a_job(service: Running) -> None:
    number = service.submit(service.token("ann"))["id"]
    for token in (service.token("bob"), service.token("ann", Role.VIEW)):
        for name in ("cancel", "hold", "release", "retry", "tags"):
            assert service.request("POST", f"{JOBS}/{number}/{name}", {}, token=token).status == 403
        assert service.request("POST", f"{JOBS}/{number}/priority", {"priority": 1}, token=token).status == 403
    assert service.request("POST", JOBS, {"folder": "/"}, token=service.token("eve", Role.VIEW)).status == 403
    assert service.store.job(number).state is State.QUEUED  # type: ignore[union-attr]
    assert service.request("POST", f"{JOBS}/{number}/hold", {}, token=service.token("root", Role.ADMIN)).status == 200


def test_many_jobs_at_once_each_by_itself(service: Running) -> None:
    ann, bob = service.token("ann"), service.token("bob")
    mine, ended, theirs = (service.submit(token)["id"] for token in (ann, ann, bob))
    service.request("POST", f"{JOBS}/{ended}/cancel", {}, token=ann)
    body = {"ids": [mine, ended, theirs, 999], "action": "cancel", "now": False}
    answer = service.request("POST", f"{JOBS}/bulk", body, token=ann).json
    assert answer["done"] == [mine]
    assert set(answer["errors"]) == {str(ended), str(theirs), "999"}
    assert "bob's" in answer["errors"][str(theirs)]
    tagged = service.request("POST", f"{JOBS}/bulk", {"ids": [mine], "action": "tags", "add": ["x"]}, token=ann)
    assert tagged.json == {"done": [mine], "errors": {}}
    assert service.request("POST", f"{JOBS}/bulk", {"ids": [mine], "action": "delete"}, token=ann).status == 422


def test_many_changes_are_few_transactions(service: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each one waits for the disk."""
    ann, bob = service.token("ann"), service.token("bob")
    mine = [service.submit(ann)["id"] for _ in range(5)]
    theirs = service.submit(bob)["id"]
    monkeypatch.setattr(job_routes, "_AT_ONCE", 3)
    batches: list[list[State]] = []
    batch = service.store.batch

    @contextmanager
    def counted() -> Iterator[None]:
        outermost = service.store.database._writing is None
        with batch():
            yield
        if outermost:
            batches.append([job.state for job in service.store.jobs() if job.id in mine])

    monkeypatch.setattr(service.store, "batch", counted)
    body = {"ids": [*mine[:2], theirs, *mine[2:]], "action": "hold"}
    answer = service.request("POST", f"{JOBS}/bulk", body, token=ann).json
    assert (answer["done"], set(answer["errors"])) == (mine, {str(theirs)})
    assert [states.count(State.HELD) for states in batches] == [2, 5]


def test_a_service_without_hosts_only_shows(tmp_path: Path) -> None:
    with running(tmp_path, queue=False) as service:
        token = service.token("ann", Role.ADMIN)
        assert service.request("GET", "/api/v1/me", token=token).json["queue"] is False
        assert service.request("GET", JOBS, token=token).json == {"items": [], "next": None}
        for path in (JOBS, f"{JOBS}/bulk", "/api/v1/hosts", "/api/v1/hosts/h1/drain"):
            answer = service.request("POST", path, {"folder": "/"}, token=token)
            assert (answer.status, "no queue" in answer.error) == (409, True)
