"""How the driver and a contestant's processes talk: one Unix socket a process, one JSON message a packet.

process:  connects when it is ready to train
driver:   {"steps": 10, "warmup": 2}
process:  {"tokens": 10240, "seconds": 3.4, "loss": 9.6, "note": ""}    the next block, or it closes: the end
"""

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, SupportsFloat

from hvd_transformer.training.process import only_new_garbage

_LARGEST_MESSAGE = 1 << 16


class Done(NamedTuple):
    """What one step of a process brought."""

    tokens: int  # of the step's, this process's share
    loss: SupportsFloat | None  # read once per block, a tensor too; None: this process does not see it
    note: str = ""  # for the table


class Channel:
    """One end of a connection; a packet is a whole message."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    @classmethod
    def connect(cls, address: str) -> "Channel":
        connection = _make_socket()
        connection.connect(address)
        return cls(connection)

    def send(self, message: dict[str, Any]) -> None:
        self._connection.sendall(json.dumps(message).encode())

    def receive(self, timeout: float | None = None) -> dict[str, Any] | None:
        """The next message; None when the other end has gone. Raises TimeoutError after so many seconds."""
        self._connection.settimeout(timeout)
        try:
            packet = self._connection.recv(_LARGEST_MESSAGE)
        except ConnectionError:
            return None
        message: dict[str, Any] | None = json.loads(packet) if packet else None
        return message

    def close(self) -> None:
        self._connection.close()


class Listener:
    """The driver's address for one contestant."""

    def __init__(self, path: Path) -> None:
        self.address = str(path)
        self._socket = _make_socket()
        self._socket.bind(self.address)
        self._socket.listen()

    def accept(self, timeout: float) -> Channel:
        """The next process to connect; raises TimeoutError."""
        self._socket.settimeout(timeout)
        return Channel(self._socket.accept()[0])

    def close(self) -> None:
        self._socket.close()


def serve(address: str, step: Callable[[], Done]) -> None:
    """A process's side: runs blocks of steps until the driver closes. The loss is that of a block's last step."""
    channel = Channel.connect(address)
    with only_new_garbage():
        while (request := channel.receive()) is not None:
            for _ in range(request["warmup"]):
                step()
            began = time.perf_counter()
            done = [step() for _ in range(request["steps"])]
            seconds = time.perf_counter() - began
            last = done[-1].loss
            loss = None if last is None else float(last)
            tokens = sum(one.tokens for one in done)
            channel.send({"tokens": tokens, "seconds": seconds, "loss": loss, "note": done[-1].note})
    channel.close()


def _make_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
