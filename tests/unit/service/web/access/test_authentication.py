"""Who may do what, over the real server."""

import os
import pwd
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from web_service import Running, running

from hvd_transformer.service.storage.tokens import Role
from hvd_transformer.service.web.access import authentication, guesses

ME = "/api/v1/me"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("service")) as found:
        yield found


def test_a_token_says_who_asks(service: Running) -> None:
    for owner, role in (("ann", Role.VIEW), ("bob", Role.SUBMIT), ("eve", Role.ADMIN)):
        answer = service.request("GET", ME, token=service.token(owner, role)).json
        assert re.fullmatch(r"\d+-\d+-[0-9a-f]{8}", answer.pop("events"))
        assert answer == {"owner": owner, "role": role.value, "version": "1.2.3", "queue": True, "csrf": ""}


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer wrong", "Basic {token}", "{token}", "Bearer {token}x", "Bearer {long}"]
)
def test_anything_but_a_token_is_refused(service: Running, header: str) -> None:
    sent = header.format(token=service.token("ann"), long="x" * 5000)
    answer = service.request("GET", ME, headers={"Authorization": sent} if header else {})
    assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")


def test_the_socket_says_who_asks(service: Running) -> None:
    answer = service.over_unix("GET", ME).json
    assert (answer["owner"], answer["role"]) == (pwd.getpwuid(os.geteuid()).pw_name, "admin")
    assert service.over_unix("GET", "/metrics").status == 200


def test_a_session_logs_in_and_out(service: Running) -> None:
    token = service.token("ann")
    answer = service.request("POST", "/login", {"token": token})
    cookie = {"Cookie": answer.headers["set-cookie"].partition(";")[0]}
    me = service.request("GET", ME, headers=cookie).json
    assert (me["owner"], me["role"]) == ("ann", "submit")
    assert service.request("POST", "/logout", {}, cookie).status == 403
    out = service.request("POST", "/logout", {}, {**cookie, "X-CSRF": me["csrf"]})
    assert (out.status, "Max-Age=0" in out.headers["set-cookie"]) == (200, True)
    gone = service.request("GET", ME, headers=cookie)
    assert (gone.status, gone.error) == (401, "the session has ended: log in")


def test_a_session_ends_with_its_token(service: Running) -> None:
    token = service.token("ann")
    cookie = {"Cookie": service.request("POST", "/login", {"token": token}).headers["set-cookie"].partition(";")[0]}
    assert service.request("GET", ME, headers=cookie).status == 200
    service.tokens.revoke(service.tokens.list()[-1].id)
    answer = service.request("GET", ME, headers=cookie)
    assert (answer.status, answer.error) == (401, "the session has ended: log in")
    assert service.request("GET", ME, token=token).status == 401


@pytest.mark.parametrize(
    "cookie", ["{name}=", "{name}=" + "x" * 43, "other=1", '{name}="', "{name}=ä", "hvd_session={secret}"]
)
def test_a_wrong_cookie_is_refused(service: Running, cookie: str) -> None:
    set_cookie = service.request("POST", "/login", {"token": service.token("ann")}).headers["set-cookie"]
    name, _, secret = set_cookie.partition(";")[0].partition("=")
    assert service.request("GET", ME, headers={"Cookie": cookie.format(name=name, secret=secret)}).status == 401


def test_two_services_of_one_host_leave_each_others_sessions(tmp_path: Path) -> None:
    """Browsers send the cookies of a host to all of its ports."""
    with ExitStack() as stack:
        jar: dict[str, str] = {}
        services = []
        for folder in (tmp_path / "one", tmp_path / "other"):
            folder.mkdir()
            services.append(stack.enter_context(running(folder)))
            answer = services[-1].request("POST", "/login", {"token": services[-1].token("ann")})
            name, _, secret = answer.headers["set-cookie"].partition(";")[0].partition("=")
            jar[name] = secret
        header = "; ".join(f"{name}={secret}" for name, secret in jar.items())
        for service in services:
            assert service.request("GET", ME, headers={"Cookie": header}).status == 200
            document = service.request("GET", "/api/v1/openapi.json", headers={"Cookie": header}).json
            assert document["components"]["securitySchemes"]["session"]["name"] in jar


# The least role of each address; the others of it must be refused. What is not listed is no route.
LEAST = {
    ("GET", "/api/v1/runs"): "view",
    ("GET", "/api/v1/runs/0123456789ab"): "view",
    ("GET", "/api/v1/runs/0123456789ab/metrics"): "view",
    ("GET", "/api/v1/runs/0123456789ab/log"): "view",
    ("GET", "/api/v1/compare"): "view",
    ("GET", "/api/v1/jobs"): "view",
    ("GET", "/api/v1/jobs/1"): "view",
    ("GET", "/api/v1/hosts"): "view",
    ("GET", "/api/v1/me"): "view",
    ("GET", "/api/v1/openapi.json"): "view",
    ("GET", "/metrics"): "view",
    ("POST", "/api/v1/jobs"): "submit",
    ("POST", "/api/v1/runs/tags"): "submit",
    ("POST", "/api/v1/jobs/bulk"): "submit",
    ("POST", "/api/v1/jobs/1/cancel"): "submit",
    ("POST", "/api/v1/jobs/1/hold"): "submit",
    ("POST", "/api/v1/jobs/1/release"): "submit",
    ("POST", "/api/v1/jobs/1/retry"): "submit",
    ("POST", "/api/v1/jobs/1/priority"): "submit",
    ("POST", "/api/v1/jobs/1/tags"): "submit",
    ("POST", "/api/v1/hosts"): "admin",
    ("POST", "/api/v1/hosts/h1/drain"): "admin",
    ("POST", "/api/v1/hosts/h1/resume"): "admin",
    ("POST", "/api/v1/hosts/h1/remove"): "admin",
    ("GET", "/api/v1/tokens"): "admin",
    ("POST", "/api/v1/tokens"): "admin",
    ("DELETE", "/api/v1/tokens/999"): "admin",
    ("GET", "/health"): None,
}


@pytest.mark.parametrize(("method", "path"), LEAST)
def test_the_role_that_each_route_needs(service: Running, method: str, path: str) -> None:
    least, roles = LEAST[method, path], ["view", "submit", "admin"]
    body = {"nonsense": 1} if method == "POST" else None
    assert (service.request(method, path, body).status == 401) == (least is not None)
    for role in roles:
        answer = service.request(method, path, body, token=service.token("mallory", Role(role)))
        refused = answer.status == 403
        assert refused == (least is not None and roles.index(role) < roles.index(least)), (role, answer)
        if refused:
            assert answer.error == f"needs the role {least}; yours is {role}"


def test_guessing_is_slowed_down_but_locks_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guesses, "_FIRST_WAIT", 60.0)
    with running(tmp_path) as service:
        known, cookie = service.token("ann"), service.request("POST", "/login", {"token": service.token("bob")})
        session = {"Cookie": cookie.headers["set-cookie"].partition(";")[0]}
        assert service.request("GET", ME, token=known).status == 200
        statuses = [service.request("GET", ME, token=f"guess {number}").status for number in range(12)]
        assert statuses == [401] * 10 + [429] * 2
        answer = service.request("POST", "/login", {"token": service.token("eve")})
        assert (answer.status, int(answer.headers["retry-after"]) >= 1) == (429, True)
        assert answer.error.startswith("too many wrong tokens: try again in")
        assert service.request("GET", ME, token=known).status == 200
        assert service.request("GET", ME, headers=session).status == 200
        assert service.over_unix("GET", ME).status == 200


def test_a_clock_that_is_set_back_makes_no_client_wait_for_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guesses, "_FIRST_WAIT", 5.0)
    with running(tmp_path) as service:
        statuses = [service.request("GET", ME, token=f"guess {number}").status for number in range(11)]
        assert statuses[-1] == 429
        before = time.time() - 86_400
        monkeypatch.setattr(authentication.time, "time", lambda: before)
        time.sleep(5.1)
        assert service.request("GET", ME, token="guess").status == 401


def test_behind_a_proxy_the_guesser_is_its_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guesses, "_FIRST_WAIT", 60.0)
    with running(tmp_path, behind_proxy=True, public_hosts=("train.example",)) as service:

        def status(client: str, token: str = "wrong") -> int:
            headers = {"X-Forwarded-For": f"203.0.113.{token[:1] == 'w'}, {client}"}
            return service.request("GET", ME, headers=headers, token=token, host="train.example").status

        assert {status("192.0.2.1") for _ in range(12)} == {401, 429}
        assert status("192.0.2.1", service.token("ann")) == 429
        assert status("192.0.2.2", service.token("ann")) == 200
        headers = {"Origin": "https://train.example"}
        answer = service.request("POST", "/login", {"token": service.token("bob")}, headers, host="train.example")
        assert answer.headers["set-cookie"].endswith("; Secure")
