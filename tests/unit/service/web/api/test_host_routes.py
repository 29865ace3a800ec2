"""Hosts over HTTP: who is where, and what admins do with them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from web_service import Running, running

from hvd_transformer.service.jobs import Placement
from hvd_transformer.service.launching.host_checks import HostState
from hvd_transformer.service.storage.tokens import Role

HOSTS = "/api/v1/hosts"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path) as found:
        yield found


@pytest.fixture
def admin(service: Running) -> str:
    return service.token("root", Role.ADMIN)


def test_who_is_where(service: Running, admin: str) -> None:
    job = service.submit(service.token("ann"), num_ranks=3, name="big")
    service.store.start(job["id"], (Placement("h1", 2, (0, 1)), Placement("h2", 1)), 50.0)
    service.taken += [Placement("h2", 2, (5,)), Placement("h1", 1, (1, 7))]
    service.host_states["h2"] = HostState(findings=["its clock is 3 s late"], load=0.5)
    service.store.set_down("h2", "no answer")
    first, second = service.request("GET", HOSTS, token=service.token("eve", Role.VIEW)).json["items"]
    outside = {"job": None, "run": None, "owner": "", "name": "a launch outside the queue"}
    use = {"job": job["id"], "run": job["run"], "owner": "ann", "name": "big"}
    assert first == {
        "name": "h1",
        "slots": 4,
        "gpus": [0, 1],
        "threads": 0,
        "drained": False,
        "down": "",
        "used": [{**use, "ranks": 2, "gpus": [0, 1]}, {**outside, "ranks": 1, "gpus": [1]}],
        "load": None,
        "findings": [],
    }
    assert (second["down"], second["load"], second["findings"]) == ("no answer", 0.5, ["its clock is 3 s late"])
    assert second["used"][0] == {**use, "ranks": 1, "gpus": []}
    assert second["used"][1] == {**outside, "ranks": 2, "gpus": []}  # it has none


def test_hosts_are_added_drained_and_removed(service: Running, admin: str) -> None:
    def post(path: str, body: Any = None) -> list[dict[str, Any]]:
        answer = service.request("POST", f"{HOSTS}{path}", body or {}, token=admin)
        assert answer.status == 200, answer
        items: list[dict[str, Any]] = answer.json["items"]
        return items

    added = post("", {"hosts": "h3:2,n[01-02]:8", "gpus": {"h3": [0, 3]}})
    assert [(host["name"], host["slots"], host["gpus"]) for host in added][2:] == [
        ("h3", 2, [0, 3]),
        ("n01", 8, []),
        ("n02", 8, []),
    ]
    assert [host["drained"] for host in post("/h1/drain")][:2] == [True, False]
    assert [host["drained"] for host in post("/h1/resume")][:2] == [False, False]
    assert [host["name"] for host in post("/h3/remove")] == ["h1", "h2", "n01", "n02"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("", {"hosts": ""}, 422),
        ("", {"hosts": "h1:-1"}, 422),
        ("", {"hosts": "h1:2", "gpus": {"h9": [0]}}, 422),
        ("", {"hosts": "h1:2", "gpus": {"h1": [-1]}}, 422),
        ("", {"hosts": "h1:2", "slots": 2}, 422),
        ("/h9/drain", {}, 409),
        ("/%2e%2e/drain", {}, 409),
        ("/h1/explode", {}, 404),
    ],
)
def test_wrong_requests_are_refused(service: Running, admin: str, path: str, body: Any, status: int) -> None:
    before = service.store.hosts()
    answer = service.request("POST", f"{HOSTS}{path}", body, token=admin)
    assert (answer.status, bool(answer.error)) == (status, True)
    assert service.store.hosts() == before


def test_a_host_in_use_stays(service: Running, admin: str) -> None:
    job = service.submit(service.token("ann"))
    service.store.start(job["id"], (Placement("h1", 1),), 50.0)
    answer = service.request("POST", f"{HOSTS}/h1/remove", {}, token=admin)
    assert (answer.status, f"in use by job {job['id']}" in answer.error) == (409, True)
