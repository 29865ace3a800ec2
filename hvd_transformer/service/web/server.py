"""Serves the application on a Unix socket and over TCP, in one event loop, until it is told to stop."""

import asyncio
import contextlib
import errno
import os
import resource
import signal
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import uvicorn

from hvd_transformer.errors import UserError
from hvd_transformer.service.web.app import App
from hvd_transformer.service.web.connection import READ_SECONDS, REQUEST_SECONDS, Connection, Room
from hvd_transformer.service.web.listening import Listening

# Connections: strangers on the network cannot keep the commands out. Each `wait` has two.
_MOST_TCP, _MOST_UNIX = 400, 1000
_LEAST_UNIX = 100
_OPEN_FILES = 4096  # that the process may have, where the system lets it: those of the queue and of runs are others
_OTHER_FILES = 300  # that are not connections, where it may not have so many
_KEEP_ALIVE_SECONDS = 5
_END_SECONDS = 3  # for requests that run when the service ends
_HANDSHAKE_SECONDS = 10.0
_LARGEST_HEAD = 32 * 1024  # bytes of a request before its body


class WebServer:
    """Listens from the moment it is made; answers while `run` runs."""

    def __init__(
        self, app: App, listening: Listening, seconds: tuple[float, float] = (REQUEST_SECONDS, READ_SECONDS)
    ) -> None:
        """`seconds`: for a whole request, and for an answer to be read. Raises `UserError` if it cannot listen."""
        listening.check()
        tls = listening.tls()
        tcp = _listen_tcp(listening)
        try:
            unix = _listen_unix(listening.socket)
        except BaseException:
            tcp.close()
            raise
        self.port: int = tcp.getsockname()[1]
        self.url = listening.url(self.port)
        self._path = listening.socket
        files = _allow_open_files()
        most = max(_LEAST_UNIX, min(_MOST_UNIX, files - _MOST_TCP - _OTHER_FILES))
        self._server = _Server(app, [(unix, None, Room(most)), (tcp, tls, Room(_MOST_TCP))], seconds)

    def run(self) -> None:
        """Serve until `stop`, SIGTERM or SIGINT (in the main thread); then let running requests end."""
        try:
            asyncio.run(self._server.serve())
        finally:
            self._path.unlink(missing_ok=True)

    def stop(self) -> None:
        """Make `run` return; from any thread, before or while it runs."""
        self._server.stop()


_Door = tuple[socket.socket, ssl.SSLContext | None, Room]


class _Server(uvicorn.Server):
    """uvicorn's server with several doors, and without its ten looks per second at whether it is to end."""

    def __init__(self, app: App, doors: Sequence[_Door], seconds: tuple[float, float]) -> None:
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_END_SECONDS,
            h11_max_incomplete_event_size=_LARGEST_HEAD,
        )
        super().__init__(config)
        self._application, self._doors, self._seconds = app, doors, seconds
        self._turn = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Event | None = None

    async def startup(self, sockets: object = None) -> None:
        loop = asyncio.get_running_loop()
        with self._turn:
            self._loop, self._ending = loop, asyncio.Event()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self._end)
        await self.lifespan.startup()
        self.servers = [
            await loop.create_server(
                partial(Connection, self.config, self.server_state, {}, room, self._seconds),
                sock=door,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else _HANDSHAKE_SECONDS,
            )
            for door, tls, room in self._doors
        ]
        self.started = True

    async def main_loop(self) -> None:
        assert self._ending is not None
        if not self.should_exit:
            await self._ending.wait()

    async def shutdown(self, sockets: object = None) -> None:
        self._application.end_streams()
        await super().shutdown()
        self._application.close()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        with self._turn:
            self.should_exit = True
            if self._loop is not None:
                with contextlib.suppress(RuntimeError):  # it has ended
                    self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        """The second time, without waiting for requests that run."""
        assert self._ending is not None
        self.force_exit = self._ending.is_set()
        self._ending.set()


def _allow_open_files() -> int:
    """Raise the limit of open files as far as is needed and allowed; returns it. Programs that it starts inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < (wanted := min(_OPEN_FILES, hard)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft


def _listen_tcp(listening: Listening) -> socket.socket:
    family = socket.AF_INET6 if ":" in listening.address else socket.AF_INET
    try:
        return socket.create_server((listening.address, listening.port), family=family, backlog=128)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"--port {listening.port}: another program uses it; choose another, or 0 for any") from None
        raise UserError(f"--address {listening.address}, --port {listening.port}: {error.strerror}") from None


def _listen_unix(path: Path) -> socket.socket:
    """The socket in the state folder, which nobody but its user may open, however long the folder's path is."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        path.unlink(missing_ok=True)  # of a service that was killed; the database lets only one run
        os.fchmod(listener.fileno(), 0o600)  # before it has a name
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            listener.bind(f"/proc/self/fd/{folder}/{path.name}")
        finally:
            os.close(folder)
        listener.listen(_MOST_UNIX)  # beyond that the kernel refuses clients that do not wait
    except OSError as error:
        listener.close()
        raise UserError(f"{path}: cannot listen there: {error.strerror}") from None
    return listener
