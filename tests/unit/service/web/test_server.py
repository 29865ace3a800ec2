"""The server's doors: the Unix socket, TCP and TLS, and how it ends."""

import http.client
import os
import resource
import shutil
import socket
import ssl
import stat
import subprocess
import threading
from pathlib import Path

import pytest
from web_service import running

from hvd_transformer.errors import UserError
from hvd_transformer.service.web import server
from hvd_transformer.service.web.listening import Listening
from hvd_transformer.service.web.server import WebServer


def test_the_socket_is_for_its_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with running(tmp_path) as service:
            mode = (tmp_path / "service.sock").stat().st_mode
            assert (stat.S_ISSOCK(mode), stat.S_IMODE(mode)) == (True, 0o600)
            assert service.server.url == f"http://127.0.0.1:{service.server.port}"
    finally:
        os.umask(before)
    assert not (tmp_path / "service.sock").exists()


def test_a_socket_that_a_killed_service_left_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "service.sock"))
    with running(tmp_path) as service:
        assert service.over_unix("GET", "/health").json == {"status": "ok"}


def test_a_long_path_of_the_state_folder(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    with running(folder) as service:
        assert (folder / "service.sock").is_socket()
        assert service.request("GET", "/health").status == 200


def test_addresses_that_cannot_be_used(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        for listening, line in (
            (
                Listening(tmp_path / "other.sock", port=service.server.port),
                f"--port {service.server.port}: another program uses it; choose another, or 0 for any",
            ),
            (Listening(tmp_path / "none" / "service.sock"), f"{tmp_path}/none/service.sock: cannot listen there"),
            (Listening(tmp_path / "other.sock", address="192.0.2.1"), "--address 192.0.2.1: tokens would cross"),
        ):
            with pytest.raises(UserError) as error:
                WebServer(service.server._server._application, listening)
            assert str(error.value).startswith(line)
        assert not (tmp_path / "other.sock").exists()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_tls(tmp_path: Path) -> None:
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "1",
    ]
    subprocess.run([*command, *names, *files], check=True, capture_output=True)
    (tmp_path / "state").mkdir()
    options = {"certificate": tmp_path / "cert.pem", "key": tmp_path / "key.pem"}
    with running(tmp_path / "state", **options) as service:
        assert service.server.url == f"https://127.0.0.1:{service.server.port}"
        context = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        connection = http.client.HTTPSConnection("127.0.0.1", service.server.port, timeout=10, context=context)
        headers = {"Content-Type": "application/json", "Origin": service.server.url}
        connection.request("POST", "/login", f'{{"token": "{service.token("ann")}"}}', headers)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200
        assert str(answer.getheader("set-cookie")).endswith("SameSite=Strict; Secure")
        connection.request("GET", "/health", headers={"Origin": service.server.url.replace("https", "http")})
        assert connection.getresponse().status == 403
        connection.close()
        with pytest.raises(http.client.HTTPException):
            service.request("GET", "/health")
        assert service.over_unix("GET", "/health").status == 200


def test_it_ends_while_clients_are_connected(tmp_path: Path) -> None:
    """Streams of events, half requests and idle connections do not hold it up; a request that runs gets its answer."""
    asked, go_on = threading.Event(), threading.Event()
    answers = []
    with running(tmp_path) as service:
        token = service.token("ann")
        open_for_ever = []
        for request in (
            f"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n",
            "GET /",
            "",
        ):
            connection = socket.create_connection(("127.0.0.1", service.server.port), timeout=10)
            connection.sendall(request.encode())
            open_for_ever.append(connection)
        assert open_for_ever[0].recv(12) == b"HTTP/1.1 200"
        check = service.tokens.check

        def slow_check(secret: str) -> object:
            asked.set()
            go_on.wait(10)
            return check(secret)

        service.tokens.check = slow_check  # type: ignore[method-assign, assignment]
        thread = threading.Thread(target=lambda: answers.append(service.request("GET", "/api/v1/me", token=token)))
        thread.start()
        assert asked.wait(10)
        service.server.stop()
        go_on.set()
        thread.join(10)
    assert answers[0].json["owner"] == "ann"
    for connection in open_for_ever:
        while connection.recv(4096):
            pass
        connection.close()


def test_a_thousand_commands_may_wait_at_once(tmp_path: Path) -> None:
    """Where the system lets the process have so many files, of which most shells allow 1,024 at first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        with running(tmp_path):
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(4096, hard), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(("files", "room"), [(4096, 1000), (1024, 324), (400, 100)])
def test_fewer_commands_where_few_files_may_be_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int, room: int
) -> None:
    monkeypatch.setattr(server, "_allow_open_files", lambda: files)
    with running(tmp_path) as service:
        assert [door[2].most for door in service.server._server._doors] == [room, 400]


def test_it_can_be_stopped_before_it_runs(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        app = service.server._server._application
        (tmp_path / "other").mkdir()
        other = WebServer(app, Listening(tmp_path / "other" / "service.sock"))
        other.stop()
        thread = threading.Thread(target=other.run)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
