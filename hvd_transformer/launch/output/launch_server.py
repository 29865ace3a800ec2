"""Lets other processes of this user see a launched job and stop it: the launcher's side of `attach` and `stop`.

A Linux socket without a file, so that nothing is left behind. A message is a line of JSON: to the clients what
`LaunchOutput` is told (`event` and its arguments), from them `{"do": "stop"}` or `{"do": "kill"}`.
"""

import json
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from uuid import uuid4

from hvd_transformer.launch.output.outlet import Outlet

_RECENT = 40  # events that a new client is told first
_END_SECONDS = 5.0
_ASKS = ({"do": "stop"}, {"do": "kill"})

Event = dict[str, Any]


class LaunchServer:
    """Serves from construction to `close`. `ask` is called with what a client wants: "stop" or "kill"."""

    def __init__(self, ask: Callable[[str], object]) -> None:
        self.name = f"hvd-transformer-{uuid4().hex}"
        self._ask = ask
        self._lock = threading.Lock()
        self._clients: dict[socket.socket, Outlet] = {}
        self._start: Event | None = None  # of the ranks that run now
        self._recent: deque[Event] = deque(maxlen=_RECENT)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen()
        self._thread = threading.Thread(target=self._accept, name="launch server", daemon=True)
        self._thread.start()

    def publish(self, event: str, **values: Any) -> None:
        """Tell all clients. One that takes too little is left."""
        message = {"event": event, **values}
        with self._lock:
            if event == "start":
                self._start = message
                shown = [own for own in self._recent if own["event"] != "end"]  # of an earlier start
                self._recent = deque(shown, maxlen=_RECENT)
            elif event != "look":
                self._recent.append(message)
            for client in list(self._clients):
                self._send(client, message)

    def close(self, code: int) -> None:
        """Tell the clients the job's exit code and end."""
        self.publish("exit", code=code)
        with suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept`, which outlives a mere `close`
        self._listener.close()
        self._thread.join()
        with self._lock:
            for client, outlet in self._clients.items():
                outlet.close(_END_SECONDS)
                client.close()
            self._clients.clear()

    def _send(self, client: socket.socket, message: Event) -> None:
        if (outlet := self._clients.get(client)) is None:  # it was left at an earlier message
            return
        data = json.dumps(message).encode() + b"\n"
        if not outlet.put(partial(client.sendall, data), size=len(data)):
            del self._clients[client]
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)  # `close` alone waits for `_serve`, which reads from it
            outlet.close(0)
            client.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client = self._listener.accept()[0]
                if not is_trusted(client):
                    client.close()
                    continue
                with self._lock:
                    self._clients[client] = Outlet("client")
                    for message in ([self._start] if self._start else []) + list(self._recent):
                        self._send(client, message)
                threading.Thread(target=self._serve, args=(client,), name="client", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError, ValueError), client.makefile("rb") as lines:
            for line in lines:
                if (what := json.loads(line)) in _ASKS:
                    self._ask(what["do"])
        with self._lock:
            if (outlet := self._clients.pop(client, None)) is not None:
                outlet.close(0)
                client.close()


def is_trusted(connection: socket.socket) -> bool:
    """Whether the process at the other end is of this user, or root's: any user may connect, or take a free name."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return user in (os.geteuid(), 0)
