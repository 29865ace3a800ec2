"""A service that answers as a test tells it, over the socket in a state folder; its documents have the real shapes."""

import json
import os
import socket
import socketserver
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from hvd_transformer.service.web.api import models

BASE = "/api/v1/"


class Asked(NamedTuple):
    """One request that has come."""

    what: str  # such as "POST jobs/7/cancel"
    query: dict[str, list[str]]
    body: Any
    headers: dict[str, str]


Answer = Callable[[Asked], Any]


class FakeService:
    """`answers`: by "METHOD path", a document, or a function that returns it; a pair is a status and a document."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {"GET me": {"owner": "ann"}}
        self.asked: list[Asked] = []
        self.connections: list[socket.socket] = []
        self.streams: list[list[bytes]] = []  # what each connection to `events` gets; then it ends

    def bodies(self, what: str) -> list[Any]:
        """What has been sent there."""
        return [asked.body for asked in self.asked if asked.what == what]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    service: FakeService

    def setup(self) -> None:
        super().setup()
        self.service.connections.append(self.connection)

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        assert parts.path.startswith(BASE)
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size)) if size else None
        what = f"{self.command} {parts.path.removeprefix(BASE)}"
        asked = Asked(what, parse_qs(parts.query), body, dict(self.headers))
        self.service.asked.append(asked)
        if what == "GET events":
            self._stream()
            return
        answer = self.service.answers.get(what, (404, {"error": f"{what}: not here"}))
        answer = answer(asked) if callable(answer) else answer
        status, document = answer if isinstance(answer, tuple) else (200, answer)
        data = document if isinstance(document, bytes) else json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_DELETE = do_GET

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for part in self.service.streams.pop(0) if self.service.streams else ():
            self.wfile.write(part)
            self.wfile.flush()
        self.close_connection = True

    def log_message(self, *words: object) -> None: ...

    def address_string(self) -> str:
        return "socket"


class _Quiet(socketserver.ThreadingMixIn):
    daemon_threads = True

    def handle_error(self, *connection: object) -> None:
        """The client has gone."""


class _UnixServer(_Quiet, socketserver.UnixStreamServer):
    def server_bind(self) -> None:
        """However long the folder's path is."""
        path = Path(str(self.server_address))
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
        try:
            self.socket.bind(f"/proc/self/fd/{folder}/{path.name}")
        finally:
            os.close(folder)


class _TcpServer(_Quiet, HTTPServer): ...


@contextmanager
def fake_service(state: Path) -> Iterator[FakeService]:
    """Serves in the state folder `state`."""
    service = FakeService()
    state.mkdir(exist_ok=True)
    with _serving(service, _UnixServer(str(state / "service.sock"), _handler(service))):
        yield service
    (state / "service.sock").unlink()


@contextmanager
def fake_tls_service(certificate: Path, key: Path) -> Iterator[tuple[FakeService, int]]:
    """Serves on a port of this host."""
    service = FakeService()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = _TcpServer(("127.0.0.1", 0), _handler(service))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    with _serving(service, server):
        yield service, server.server_address[1]


def _handler(service: FakeService) -> type[_Handler]:
    return type("Handler", (_Handler,), {"service": service})


@contextmanager
def _serving(service: FakeService, server: socketserver.BaseServer) -> Iterator[None]:
    with server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield
        server.shutdown()
    for connection in service.connections:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def event(kind: str, **data: object) -> bytes:
    """An event as the service sends it."""
    return f"id: 1-1-ab\nevent: {kind}\ndata: {json.dumps(data)}\n\n".encode()


def job(number: int, state: str = "QUEUED", **fields: Any) -> dict[str, Any]:
    """A job in detail."""
    given = {
        "id": number, "name": f"tiny-{number}", "owner": "ann", "state": state, "priority": 0, "submitted": 1e9,
        "needs": models.Needs(num_ranks=4, min_ranks=4, tensor=1, gpus_per_rank=0),
        "output_dir": f"/runs/tiny-{number}", "folder": "/work", "words": ["seed=2"], "launch": [], "code": "",
        "env_names": [], "tags": [], "after": [], "array": None, "time_limit": None, "max_retries": 3, "retries": 0,
        "stopping": None, "reason": "", "estimated_start": None, "ended": None, "run": f"{number:012x}",
        "allocation": [], "config": {}, "attempts": [], "engine": "hosts", "sbatch": [],
    }  # fmt: skip
    return models.JobDetails(**{**given, **fields}).model_dump(mode="json")


def attempt(number: int = 1, code: int | None = None, **fields: Any) -> dict[str, Any]:
    """An attempt of a job."""
    given = {
        "number": number, "allocation": [{"host": "h1", "ranks": 4, "gpus": []}], "began": 1e9, "ended": 1e9 + 60,
        "first_step": 0, "last_step": 10, "code": code, "cause": "", "external": None,
    }  # fmt: skip
    return models.Attempt(**{**given, **fields}).model_dump(mode="json")


def run(number: int, state: str = "RUNNING", **fields: Any) -> dict[str, Any]:
    """A run in detail."""
    given = {
        "id": f"{number:012x}", "name": f"tiny-{number}", "state": state, "job": None, "user": "ann", "tags": [],
        "step": 5, "total_steps": 10, "epoch": 1, "metrics": {"loss": 2.5}, "best": {}, "task": "language_model",
        "world": 4, "tokens_per_second": 1234.5, "began": 1e9, "updated": 1e9, "estimated_end": None, "cause": "",
        "problem": "", "config": {}, "attempts": [],
    }  # fmt: skip
    return models.RunDetails(**{**given, **fields}).model_dump(mode="json")
