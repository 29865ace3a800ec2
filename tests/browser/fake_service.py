"""A small service for the pages' tests: the real pages, and the HTTP interface over data in memory.

`cd tests && python -m browser.fake_service [--port 8123]` serves it for a look by hand: open the link that it prints.
"""

import argparse
import gzip
import json
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from browser import fake_api
from browser.fake_api import Refused, State
from hvd_transformer.service import web

assert web.__file__
PAGES = Path(web.__file__).parent / "pages"
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
TOKENS = {"admin-token": ("ada", "admin"), "submit-token": ("ada", "submit"), "view-token": ("eve", "view")}
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "FakeServer"

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not printed."""

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def _serve(self, method: str) -> None:
        state = self.server.state
        url = urlsplit(self.path)
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or b"{}") if length else {}
        if state.down:
            self.close_connection = True
            return
        try:
            if url.path.startswith("/api/v1/"):
                self._api(method, url.path[8:], parse_qs(url.query, keep_blank_values=True), body)
            elif method == "POST":
                self._session(url.path, body)
            else:
                self._page(url.path)
        except Refused as error:
            self._send(error.status, {"error": str(error)})
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _who(self) -> tuple[str, str] | None:
        cookie = SimpleCookie(self.headers.get("Cookie", "")).get("hvd_session")
        return TOKENS.get(cookie.value) if cookie else None

    def _session(self, path: str, body: dict[str, Any]) -> None:
        token = body.get("token", "")
        if path == "/login" and token not in TOKENS:
            raise Refused(401, "this token is not valid")
        cookie = f"hvd_session={token if path == '/login' else ''}; HttpOnly; SameSite=Strict; Path=/"
        self._send(200, {}, {"Set-Cookie": cookie})

    def _page(self, path: str) -> None:
        name = path.removeprefix("/static/") if path.startswith("/static/") else "index.html"
        file = (PAGES / unquote(name)).resolve()
        if not file.is_relative_to(PAGES) or not file.is_file():
            raise Refused(404, f"no file {name}")
        # As the service does.
        self._write(
            200, gzip.compress(file.read_bytes()), _TYPES.get(file.suffix, "text/plain"), {"Content-Encoding": "gzip"}
        )

    def _api(self, method: str, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> None:
        state, who = self.server.state, self._who()
        if who is None:
            raise Refused(401, "log in first")
        if state.refuse:
            raise Refused(*state.refuse)
        if path == "events":
            self._events()
            return
        if method == "GET":
            self._send(200, self._read(path, query, who))
            return
        if self.headers.get("X-CSRF") != "csrf-value":
            raise Refused(403, "X-CSRF is missing or wrong")
        state.calls.append((method, path, body))
        self._send(200, self._change(path, body, who))

    def _read(self, path: str, query: dict[str, list[str]], who: tuple[str, str]) -> Any:
        state, parts, now = self.server.state, path.split("/"), time.time()
        if path == "me":
            user = {"owner": who[0], "role": who[1], "csrf": "csrf-value"}
            return user | {"version": "0.1.0", "queue": state.queue_on, "events": str(state.last_event)}
        if path == "runs":
            return fake_api.matching(state, query)
        if path == "compare":
            return fake_api.compared(state, query)
        if path == "hosts":
            return {"items": state.hosts}
        if path == "jobs":
            jobs = [run.job for run in state.runs if run.job and fake_api.one(query, "state") in ("", run.state)]
            return {"items": jobs[: int(fake_api.one(query, "limit") or 50)], "next": None}
        if parts[0] == "runs" and len(parts) == 2:
            time.sleep(state.head_seconds)
            return fake_api.details(state.run(parts[1]), now)
        readers: dict[str, Callable[[], Any]] = {
            "metrics": lambda: fake_api.curves(state, parts[1], query),
            "log": lambda: fake_api.log_part(state, query),
        }
        if parts[0] == "runs" and parts[2] in readers:
            return readers[parts[2]]()
        raise Refused(404, f"nothing at {path}")

    def _change(self, path: str, body: dict[str, Any], who: tuple[str, str]) -> Any:
        state, parts = self.server.state, path.split("/")
        if who[1] == "view":
            raise Refused(403, "your token may only look")
        if path == "runs/tags":
            return fake_api.tag_runs(state, body)
        if path == "jobs/bulk":
            return fake_api.bulk(state, body)
        if parts[0] == "jobs":
            return fake_api.change(state, state.job(int(parts[1])), parts[2], body)
        if path == "hosts":
            return fake_api.add_hosts(state, body)
        return fake_api.change_host(state, unquote(parts[1]), parts[2])

    def _events(self) -> None:
        state = self.server.state
        mine: queue.Queue[str | None] = queue.Queue()
        state.opening.wait()
        with state.lock:
            since = self.headers.get("Last-Event-ID")
            if since:
                state.resumed.append(since)
                for number, text in state.events:
                    if number > int(since):
                        mine.put(text)
            state.streams.append(mine)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        try:
            self.wfile.write(b": hello\n\n")
            while True:
                try:
                    event = mine.get(timeout=1)
                except queue.Empty:
                    event = ": ping\n\n"  # also finds out that the browser has gone
                if event is None:
                    return
                self.wfile.write(event.encode())
                self.wfile.flush()
        finally:
            with state.lock:
                state.streams.remove(mine)

    def _send(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        data, headers = json.dumps(body).encode(), dict(headers or {})
        if len(data) >= 2000:  # as the service does
            data, headers["Content-Encoding"] = gzip.compress(data, 4), "gzip"
        self._write(status, data, "application/json", headers)

    def _write(self, status: int, data: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(HTTPStatus(status))
        sent = {
            "Content-Type": kind,
            "Content-Length": str(len(data)),
            "Content-Security-Policy": CSP,
            "Cache-Control": "no-cache",
        }
        for key, value in {**sent, **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)


class FakeServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, state: State, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.state = state
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Also end the connections that the browser keeps, each of which has a thread here."""
        super().server_close()
        with self._lock:
            for request in self._open:
                with suppress(OSError):  # the browser has closed it
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that closes a tab in the middle of an answer is no error."""


def _grow(state: State) -> None:
    """Say once a second that the running runs have new steps."""
    while True:
        time.sleep(1)
        for run in state.runs:
            if run.state == "RUNNING":
                state.emit("run", {"id": run.id, "step": run.last_step(time.time())})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--tracker", action="store_true", help="no queue")
    parser.add_argument("--archived", type=int, default=3000)
    given = parser.parse_args()
    state = State(given.archived, not given.tracker)
    server = FakeServer(state, given.port)
    threading.Thread(target=_grow, args=(state,), daemon=True).start()
    print(f"{server.url}/#token=admin-token", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
