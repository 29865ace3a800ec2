"""Tokens over HTTP."""

import time
from collections.abc import Iterator

import pytest
from web_service import Running, running

from hvd_transformer.service.storage.tokens import Role

TOKENS = "/api/v1/tokens"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("service")) as found:
        yield found


@pytest.fixture(scope="module")
def admin(service: Running) -> str:
    return service.token("root", Role.ADMIN)


def test_a_token_is_made_used_and_revoked(service: Running, admin: str) -> None:
    body = {"name": "laptop", "owner": "ann", "role": "submit", "expires": time.time() + 1000}
    answer = service.request("POST", TOKENS, body, token=admin)
    assert answer.status == 201
    secret = answer.json["token"]
    assert service.request("GET", "/api/v1/me", token=secret).json["owner"] == "ann"
    made = service.request("GET", TOKENS, token=admin).json["items"][-1]
    assert {key: made[key] for key in body} == body
    assert made["last_used"] == pytest.approx(time.time(), abs=600)
    revoked = service.request("DELETE", f"{TOKENS}/{made['id']}", token=admin)
    assert (revoked.status, revoked.body) == (204, b"")
    assert service.request("GET", "/api/v1/me", token=secret).status == 401
    assert service.request("DELETE", f"{TOKENS}/{made['id']}", token=admin).status == 404


@pytest.mark.parametrize(
    ("field", "value"),
    [("name", ""), ("name", "x" * 101), ("name", "a\nb"), ("owner", ""), ("role", "god"), ("expires", 1), ("more", 1)],
)
def test_wrong_tokens_are_refused(service: Running, admin: str, field: str, value: object) -> None:
    body = {"name": "other", "owner": "ann", "role": "view", field: value}
    answer = service.request("POST", TOKENS, body, token=admin)
    assert (answer.status, bool(answer.error)) == (422, True)
    assert "other" not in [token.name for token in service.tokens.list()]


def test_a_name_is_for_one_token(service: Running, admin: str) -> None:
    body = {"name": "same", "owner": "ann", "role": "view"}
    assert service.request("POST", TOKENS, body, token=admin).status == 201
    assert "same: there is one of this name" in service.request("POST", TOKENS, body, token=admin).error


@pytest.mark.parametrize("number", ["x", "-1", "9" * 30])
def test_unknown_tokens_are_not_found(service: Running, admin: str, number: str) -> None:
    assert service.request("DELETE", f"{TOKENS}/{number}", token=admin).status == 404


def test_a_session_may_revoke_only_with_its_header(service: Running, admin: str) -> None:
    cookie = service.request("POST", "/login", {"token": admin}).headers["set-cookie"].partition(";")[0]
    before = service.tokens.list()
    assert service.request("DELETE", f"{TOKENS}/{before[0].id}", headers={"Cookie": cookie}).status == 403
    assert service.tokens.list() == before
