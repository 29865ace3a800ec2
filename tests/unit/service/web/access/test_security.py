"""Attacks on the real server: each must be refused, and change nothing."""

import re
import socket
from collections.abc import Iterator
from urllib.parse import quote

import pytest
from web_service import Answer, Running, running

from hvd_transformer.service.storage.tokens import Role
from hvd_transformer.service.web.access.security import MOST_BODY

JOBS = "/api/v1/jobs"
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("service"), public_hosts=("Head.Example.org",)) as found:
        yield found


@pytest.fixture(scope="module")
def token(service: Running) -> str:
    return service.token("ann", Role.ADMIN)


def log_in(service: Running, token: str) -> tuple[dict[str, str], str]:
    """A browser's cookie, and its CSRF value."""
    answer = service.request("POST", "/login", {"token": token})
    assert answer.status == 200
    cookie = {"Cookie": answer.headers["set-cookie"].partition(";")[0]}
    return cookie, service.request("GET", "/api/v1/me", headers=cookie).json["csrf"]


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "127.0.0.2",
        "",
        "localhost@evil.example",
        "[::1",
        "localhost/",
        None,
    ],
)
@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/static/app.js", JOBS, "/login", "/nothing"])
def test_another_name_of_this_address_is_refused(service: Running, token: str, host: str | None, path: str) -> None:
    """DNS rebinding: a page of evil.example whose name now leads here would be of the same origin."""
    method, body = ("POST", {"token": token}) if path == "/login" else ("GET", None)
    try:
        answer = service.request(method, path, body, host=host, token="" if path == "/login" else token)
    except ConnectionError:
        return
    assert answer.status in (400, 403)
    assert token.encode() not in answer.body
    if answer.status == 403:
        assert answer.error.startswith("Host: not a name of this service")


@pytest.mark.parametrize(
    "name", ["127.0.0.1", "localhost", "LOCALHOST", "[::1]", "head.example.org", "HEAD.example.org.", "0:0:0:0:0:0:0:1"]
)
def test_its_own_names_with_any_port_are_allowed(service: Running, token: str, name: str) -> None:
    """An ssh tunnel has another port here than there."""
    for host in (f"{name}:9000", name):
        if name.startswith("0:"):
            host = "[0:0:0:0:0:0:0:1]"
        assert service.request("GET", "/api/v1/me", host=host, token=token).status == 200


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "http://127.0.0.1:1", "https://{host}", "http://{host}.evil.example", "{host}", ""],
)
def test_pages_of_other_origins_are_refused(service: Running, token: str, origin: str) -> None:
    cookie, csrf = log_in(service, token)
    host = f"127.0.0.1:{service.server.port}"
    headers = {**cookie, "X-CSRF": csrf, "Origin": origin.format(host=host)}
    for method, path, body in (
        ("POST", JOBS, {"folder": "/"}),
        ("GET", JOBS, None),
        ("POST", "/login", {"token": token}),
    ):
        answer = service.request(method, path, body, headers)
        assert (answer.status, answer.error[:7]) == (403, "Origin:")
        assert "access-control-allow-origin" not in answer.headers
    assert service.request("GET", JOBS, headers={**cookie, "Origin": f"http://{host}"}).status == 200


def test_a_form_of_another_site_is_refused(service: Running, token: str) -> None:
    """Old browsers send neither Origin nor SameSite: then the header that no form can send, and the type, protect."""
    cookie, csrf = log_in(service, token)
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    before = len(service.store.jobs())
    assert service.request("POST", JOBS, b'{"folder": "/"}', {**cookie, **form}).status == 403
    for kind in ("application/x-www-form-urlencoded", "text/plain", "multipart/form-data; boundary=x", ""):
        answer = service.request("POST", JOBS, b'{"folder": "/"}', {**cookie, "X-CSRF": csrf, "Content-Type": kind})
        assert (answer.status, answer.error) == (400, "Content-Type: must be application/json")
    for wrong in ("", "0" * 64, csrf[:-1], csrf + "0", "ä"):
        answer = service.request("POST", JOBS, {"folder": "/"}, {**cookie, "X-CSRF": wrong})
        assert (answer.status, answer.error[:7]) == (403, "X-CSRF:")
    assert (
        service.request(
            "POST", JOBS, {"folder": "/"}, {**cookie, "Sec-Fetch-Site": "cross-site", "X-CSRF": csrf}
        ).status
        == 403
    )
    assert len(service.store.jobs()) == before
    other, _ = log_in(service, token)
    assert service.request("POST", JOBS, {"folder": "/"}, {**other, "X-CSRF": csrf}).status == 403
    assert service.request("POST", JOBS, {"folder": "/"}, {**cookie, "X-CSRF": csrf}).status == 201


@pytest.mark.parametrize(
    "path",
    ["/", "/runs/abc", "/static/index.html", "/static/none", "/api/v1/me", "/api/v1/none", "/health", "/metrics", JOBS],
)
def test_headers_of_every_answer(service: Running, token: str, path: str) -> None:
    for sent in (token, ""):
        answer = service.request("GET", path, token=sent)
        assert answer.headers["content-security-policy"] == CSP
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cross-origin-opener-policy"] == "same-origin"
        assert "server" not in answer.headers
        if not path.startswith("/static") and answer.headers["content-type"].startswith("application/json"):
            assert answer.headers["cache-control"] == "no-store"


def test_the_cookie_is_for_nobody_but_the_server(service: Running, token: str) -> None:
    cookie = service.request("POST", "/login", {"token": token}).headers["set-cookie"]
    assert re.fullmatch(r"hvd_session_[0-9a-f]{8}=[\w-]{43}; Path=/; Max-Age=\d+; HttpOnly; SameSite=Strict", cookie)
    assert token not in cookie


@pytest.mark.parametrize("size", [MOST_BODY + 1, 3 * MOST_BODY])
def test_bodies_that_are_too_large_are_refused(service: Running, token: str, size: int) -> None:
    headers = {"Content-Type": "application/json"}
    answer = service.request("POST", JOBS, b" " * size, headers, token)
    assert (answer.status, answer.error) == (413, "the body is larger than 256 KiB")
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (size, b" " * size)
    answer = raw(service, token, b"Transfer-Encoding: chunked\r\n\r\n" + chunked)
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_a_body_of_the_allowed_size(service: Running, token: str) -> None:
    answer = service.request(
        "POST", JOBS, b'{"folder": "/"}'.ljust(MOST_BODY), {"Content-Type": "application/json"}, token
    )
    assert answer.status == 201


def raw(service: Running, token: str, rest: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", service.server.port), timeout=10) as connection:
        head = f"POST {JOBS} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
        connection.sendall(head.encode() + b"Content-Type: application/json\r\n" + rest)
        return connection.recv(65536)


@pytest.mark.parametrize(
    "run",
    [
        "..",
        "../../etc/passwd",
        "..%2f..%2fetc%2fpasswd",
        "%2e%2e",
        "abcdef012345%00",
        "ABCDEF012345",
        "abcdef01234",
        ".",
        "%",
        "日本",
    ],
)
@pytest.mark.parametrize("rest", ["", "/log", "/metrics"])
def test_paths_in_run_ids_lead_nowhere(service: Running, token: str, run: str, rest: str) -> None:
    answer = service.request("GET", f"/api/v1/runs/{quote(run, safe='%/.')}{rest}", token=token)
    assert answer.status in (400, 404)
    assert b"root:" not in answer.body


@pytest.mark.parametrize(
    "rank",
    ["../../config.yaml", "/etc/passwd", "0/../../secret", "launch.log", "-1", "0%00", "１", "*", "rank-000.log"],
)
def test_paths_in_log_names_lead_nowhere(service: Running, token: str, rank: str) -> None:
    run = service.make_run("logged")
    (service.folder / "runs" / "logged" / "secret").write_text("planted")
    answer = service.request("GET", f"/api/v1/runs/{run}/log?rank={quote(rank, safe='%')}", token=token)
    assert answer.status == 404
    assert b"planted" not in answer.body


@pytest.mark.parametrize(
    "name", ["../app.py", "..%2fapp.py", "%2e%2e/app.py", "/etc/passwd", "uplot/../../app.py", "", "uplot", "app.js%00"]
)
def test_only_the_pages_files_are_served(service: Running, name: str) -> None:
    assert service.request("GET", f"/static/{name}").status == 404


def test_script_in_names_stays_data(service: Running, token: str) -> None:
    script = "<script>alert(1)</script>"
    run = service.make_run(
        f"{script[:-9]}x", {"data.source": script, script: 1}, [{"step": 1, script: 2.0, "loss": 1.0}]
    )
    for path in (
        f"/api/v1/runs/{run}",
        "/api/v1/runs",
        f"/api/v1/runs/{run}/metrics?keys={script}",
        f"/api/v1/runs?where={script}",
        f"/api/v1/compare?runs={run}",
        f"/{script}",
        f"/static/{script}",
    ):
        answer = service.request("GET", path.replace("<", "%3C").replace(">", "%3E"), token=token)
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-content-type-options"] == "nosniff"
        answer.json  # noqa: B018 - it is JSON
    submitted = service.request("POST", JOBS, {"folder": "/", "name": script}, token=token)
    assert (submitted.status, submitted.headers["content-type"]) == (422, "application/json")


def test_a_planted_secret_is_in_no_answer(service: Running, token: str) -> None:
    """The values of --env are in a private file alone; its path is not told either."""
    secret = "s3cr3t-of-ann"
    private = service.folder / "private.env"
    private.touch(mode=0o600)
    private.write_text(f"WANDB_API_KEY={secret}\n")
    job = service.submit(token, env_names=["WANDB_API_KEY"], env_file=str(private))
    assert job["env_names"] == ["WANDB_API_KEY"]
    answers: list[Answer] = [
        service.request("GET", path, token=token)
        for path in (
            JOBS,
            f"{JOBS}/{job['id']}",
            "/api/v1/runs",
            f"/api/v1/runs/{job['run']}",
            "/metrics",
            "/api/v1/hosts",
            "/api/v1/tokens",
        )
    ]
    assert all(answer.status == 200 for answer in answers)
    for answer in answers:
        assert secret.encode() not in answer.body
        assert str(private).encode() not in answer.body


def test_tokens_are_told_once(service: Running, token: str) -> None:
    made = service.request("POST", "/api/v1/tokens", {"name": "ci", "owner": "ci", "role": "view"}, token=token).json[
        "token"
    ]
    for path in ("/api/v1/tokens", "/api/v1/me"):
        for secret in (made, token):
            answer = service.request("GET", path, token=token)
            assert answer.status == 200
            assert secret.encode() not in answer.body
