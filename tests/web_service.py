"""A whole service without launchers, under the real web server, and a browser's or command's view of it."""

import http.client
import json
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from hvd_transformer.service.actions import Actions
from hvd_transformer.service.histogram import Histogram
from hvd_transformer.service.jobs import Host, Placement
from hvd_transformer.service.launching.host_checks import HostState
from hvd_transformer.service.runs.index import RunIndex, run_id
from hvd_transformer.service.runs.launcher_beats import LauncherBeats
from hvd_transformer.service.runs.metrics.curves import Curves
from hvd_transformer.service.storage.store import Store
from hvd_transformer.service.storage.tokens import Role, Tokens
from hvd_transformer.service.submitting.checker import Checked, CheckedJob, Checker
from hvd_transformer.service.web.app import create_app
from hvd_transformer.service.web.listening import Listening
from hvd_transformer.service.web.parts import Queue, Service
from hvd_transformer.service.web.server import WebServer


class AgreeingChecker:
    """Takes any arguments; KEY=VALUE ones are the configuration."""

    def check(
        self, folder: str, jobs: Sequence[Sequence[str]], launch: Sequence[str], num_ranks: int | None, *more: Any
    ) -> Checked:
        checked = []
        for words in jobs:
            config: dict[str, Any] = {"task": "language_model", "checkpoint.resume": "auto"}
            config.update(word.split("=", 1) for word in words if "=" in word)
            checked.append(CheckedJob(config, list(words), 1, 1, "cpu", None, "tiny", num_ranks or 1, list(launch)))
        return Checked(checked, "")


class QuietManager:
    """A manager that has measured nothing yet."""

    def __init__(self) -> None:
        self.pass_seconds, self.wait_seconds = Histogram((0.01, 0.1)), Histogram((1.0, 60.0))
        self.ends: dict[int, float] = {}

    def estimated_end(self, id: int) -> float | None:
        return self.ends.get(id)


@dataclass
class Answer:
    """What came back. `json` is None for anything else."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        line = self.json["error"]
        assert "\n" not in line
        return str(line)


@dataclass
class Running:
    """The service and its server. `taken`, `host_states` and `problem` are what other parts tell."""

    folder: Path
    store: Store
    tokens: Tokens
    runs: RunIndex
    manager: QuietManager
    server: WebServer
    taken: list[Placement] = field(default_factory=list)
    host_states: dict[str, HostState] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        token: str = "",
        host: str | None = "own",
    ) -> Answer:
        """Over TCP. `body`: bytes as they are, anything else as JSON. `host`: None for no such header."""
        sent = dict(headers or {})
        if token:
            sent["Authorization"] = f"Bearer {token}"
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            sent.setdefault("Content-Type", "application/json")
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=10)
        return _exchange(
            connection, method, path, body, sent, f"127.0.0.1:{self.server.port}" if host == "own" else host
        )

    def over_unix(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Answer:
        """As this user, an admin."""
        sent = {"Content-Type": "application/json", **(headers or {})}
        data = None if body is None else json.dumps(body).encode()
        connection = http.client.HTTPConnection("localhost", timeout=10)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(10)
        connection.sock.connect(str(self.folder / "service.sock"))
        return _exchange(connection, method, path, data, sent, "localhost")

    def token(self, owner: str, role: Role = Role.SUBMIT) -> str:
        """A new token."""
        return self.tokens.add(f"{owner} {role.value} {len(self.tokens.list())}", owner, role)

    def make_run(self, name: str, config: Mapping[str, Any] | None = None, lines: Sequence[Any] = ()) -> str:
        """A run directory, and its id."""
        folder = self.folder / "runs" / name
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(yaml.safe_dump({"task": "language_model", **(config or {})}))
        text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
        (folder / "metrics.jsonl").write_text(text)
        self.runs.refresh()
        return run_id(folder)

    def submit(self, token: str, **fields: Any) -> dict[str, Any]:
        """The job of a request of one job."""
        answer = self.request("POST", "/api/v1/jobs", {"folder": "/", **fields}, token=token)
        assert answer.status == 201, answer
        job: dict[str, Any] = answer.json["jobs"][0]
        return job


def _exchange(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: bytes | None,
    headers: Mapping[str, str],
    host: str | None,
) -> Answer:
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        if host is not None:
            connection.putheader("Host", host)
        for name, value in headers.items():
            connection.putheader(name, value)
        if body is not None or method == "POST":
            connection.putheader("Content-Length", str(len(body or b"")))
        connection.endheaders(body)
        response = connection.getresponse()
        return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()


@contextmanager
def running(
    folder: Path, queue: bool = True, seconds: tuple[float, float] = (10.0, 10.0), **options: Any
) -> Iterator[Running]:
    """A service in an empty folder, with two hosts. `options`: of `Listening`."""
    (folder / "runs").mkdir()
    store = Store(folder / "service.db")
    launchers = LauncherBeats()
    tokens, runs, manager = Tokens(store.database), RunIndex(folder / "runs"), QuietManager()
    found = Running(folder, store, tokens, runs, manager, cast(WebServer, None))
    store.put_hosts([Host("h1", 4, (0, 1)), Host("h2", 4)])
    actions = Actions(store, cast(Checker, AgreeingChecker()), folder / "runs", lambda: None, lambda job: None)
    service = Service(
        version="1.2.3",
        store=store,
        tokens=tokens,
        runs=runs,
        curves=Curves(),
        launchers=launchers,
        queue=Queue(actions, manager, lambda: found.taken, lambda: found.host_states) if queue else None,
        problem=lambda: found.problems[0] if found.problems else None,
    )
    listening = Listening(folder / "service.sock", **options)
    app = create_app(service, listening.names, listening.behind_proxy)
    found.server = WebServer(app, listening, seconds)
    thread = threading.Thread(target=found.server.run, name="web server")
    thread.start()
    try:
        yield found
    finally:
        found.server.stop()
        thread.join(20)
        assert not thread.is_alive()
        with suppress(OSError):
            launchers.close()
        store.close()
