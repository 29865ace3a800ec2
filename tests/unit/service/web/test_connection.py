"""Clients that are slow, silent or too many: they are ended, and others do not notice."""

import http.client
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from web_service import Running, running

from hvd_transformer.service.remote.address import Address
from hvd_transformer.service.remote.client import Busy, Client
from hvd_transformer.service.web import server

HEAD = b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """With short patience."""
    with running(tmp_path_factory.mktemp("service"), seconds=(0.3, 0.3)) as found:
        yield found


def connect(service: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", service.server.port), timeout=10)


def is_ended(connection: socket.socket) -> bool:
    """Waits for the end; `TimeoutError` if there is none."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"G",
        b"GET / HTTP/1.1\r\nHost: loc",
        HEAD + b"Content-Length: 9\r\n\r\n",
        HEAD + b"Content-Length: 9\r\n\r\n{",
    ],
)
def test_a_request_that_is_never_whole_is_ended(service: Running, sent: bytes) -> None:
    with connect(service) as connection:
        connection.sendall(sent)
        assert is_ended(connection)


@pytest.mark.parametrize("slow", [HEAD, HEAD + b"Content-Length: 100000\r\n\r\n"])
def test_a_byte_now_and_then_does_not_help(service: Running, slow: bytes) -> None:
    """Slowloris: the limit is for the whole request."""
    with connect(service) as connection:
        connection.sendall(slow)
        connection.settimeout(0.05)
        for _ in range(200):
            try:
                connection.sendall(b"x")
                if connection.recv(1) == b"":
                    return
            except TimeoutError:
                continue
            except ConnectionError:
                return
    pytest.fail("the connection lives on")


def test_the_second_request_of_a_connection_has_the_limit_too(service: Running) -> None:
    with connect(service) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        while b'{"status":"ok"}' not in answer:
            assert (part := connection.recv(4096))
            answer += part
        connection.sendall(b"GET /health HT")
        assert is_ended(connection)


def test_a_request_that_comes_with_the_one_before_has_the_limit_too(service: Running) -> None:
    with connect(service) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + HEAD + b"Content-Length: 9\r\n\r\n")
        answer = b""
        while found := connection.recv(4096):
            answer += found
        assert b'{"status":"ok"}' in answer


def test_who_does_not_read_is_ended(service: Running) -> None:
    """More than the kernel takes; the connection ends though the client is there."""
    run = service.make_run("long")
    log = service.folder / "runs" / "long" / "logs" / "rank-000.log"
    log.write_bytes((b"x" * 99 + b"\n") * 10_000)
    headers = f"Host: localhost\r\nAuthorization: Bearer {service.token('ann')}"
    request = f"GET /api/v1/runs/{run}/log?limit=1000000 HTTP/1.1\r\n{headers}\r\n\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(10)
        connection.connect(("127.0.0.1", service.server.port))
        connection.sendall(request.encode() * 20)
        connection.recv(1)
        poller = select.poll()
        poller.register(connection, select.POLLERR | select.POLLHUP)
        with suppress(ConnectionError):
            while not poller.poll(20):
                connection.sendall(b"x")


@pytest.mark.parametrize(
    "sent",
    [b"\x16\x03\x01\x02\x00", b"GET / HTTP/9\r\n\r\n", b"\r\n" * 10, b"GET /\x00 HTTP/1.1\r\n\r\n", b"x" * 100_000],
)
def test_what_is_no_request_is_ended(service: Running, sent: bytes) -> None:
    with connect(service) as connection:
        connection.sendall(sent)
        data = b""
        try:
            while part := connection.recv(65536):
                data += part
        except ConnectionError:
            pass
        assert data == b"" or data.startswith(b"HTTP/1.1 400 ")


def test_a_command_is_told_that_there_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends while the service ends the connection: the answer counts, and not that the pipe is broken."""
    monkeypatch.setattr(server, "_MOST_UNIX", 2)
    monkeypatch.setattr(server, "_LEAST_UNIX", 2)
    with running(tmp_path) as service, ExitStack() as stack:
        for _ in range(2):
            other = stack.enter_context(socket.socket(socket.AF_UNIX))
            other.connect(str(tmp_path / "service.sock"))
        client = Client(Address(tmp_path))
        connect = client._connect

        def slow() -> http.client.HTTPConnection:
            connection = connect()
            select.select([connection.sock], [], [], 10)  # it has been refused
            return connection

        monkeypatch.setattr(client, "_connect", slow)
        for ask in (lambda: client.get("me"), lambda: client.post("jobs/1/cancel", {}), lambda: next(client.events())):
            with pytest.raises(Busy, match="^the service has too many connections: try again$"):
                ask()
        assert service.request("GET", "/health").status == 200


def test_strangers_cannot_keep_commands_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MOST_TCP", 5)
    with running(tmp_path) as service, ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(connect(service))
        for _ in range(2):
            with connect(service) as late:
                assert late.recv(1000).startswith(b"HTTP/1.1 503 ")
                assert is_ended(late)
        assert service.over_unix("GET", "/api/v1/me").status == 200
        stack.close()
        while service.request("GET", "/health").status == 503:
            pass
        assert service.request("GET", "/health").status == 200
