"""One connection to the service: uvicorn's, with limits for clients that are slow, silent or too many.

uvicorn ends connections that are idle between two requests. It would wait for ever for the rest of a request, and for a
client that does not read its answer.
"""

import asyncio
import socket
import struct
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from hvd_transformer.service.web.access.authentication import Peer

REQUEST_SECONDS = 15.0  # for a whole request, from its first byte or from the connection
READ_SECONDS = 60.0  # for the client to read what is ready for it
_WHY_BUSY = b'{"error":"the service has too many connections: try again"}'
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: %d\r\nRetry-After: 5\r\n"
    b"Connection: close\r\n\r\n%s"
) % (len(_WHY_BUSY), _WHY_BUSY)


class Room:
    """How many connections there are through one door, and may be; and how many of them are streams of events.

    Streams last: they may take half of the room, and the rest is for requests.
    """

    def __init__(self, most: int) -> None:
        self.most, self.taken, self.streams = most, 0, 0

    @property
    def most_streams(self) -> int:
        """How many streams there may be."""
        return self.most // 2


class Connection(H11Protocol):
    """Tells requests its "room" and, on the Unix socket, the user on the other side, "peer", in `scope["state"]`."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        room: Room,
        seconds: tuple[float, float] = (REQUEST_SECONDS, READ_SECONDS),
    ) -> None:
        super().__init__(config, server_state, {**app_state, "room": room})
        self._room = room
        self._request_seconds, self._read_seconds = seconds
        self._receiving: asyncio.TimerHandle | None = None  # while a part of a request is missing
        self._sending: asyncio.TimerHandle | None = None  # while the client has not read everything

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._room.taken += 1
        connected = transport.get_extra_info("socket")
        if connected.family == socket.AF_UNIX:
            self.app_state = {**self.app_state, "peer": Peer(_user(connected))}
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=1, low=0)  # so that anything that is not read is noticed
        if self._room.taken > self._room.most:
            transport.write(_BUSY)
            transport.close()
            return
        self._receiving = self.loop.call_later(self._request_seconds, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # reads the head of a request that came together with the one before
        if self.conn.their_state is h11.SEND_BODY:
            self._watch_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._sending is None:
            self._sending = self.loop.call_later(self._read_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_sending()

    def connection_lost(self, exc: Exception | None) -> None:
        self._room.taken -= 1
        self._end_receiving()
        self._end_sending()
        super().connection_lost(exc)

    def _watch_request(self) -> None:
        """End the connection unless the rest of the request comes in time."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._end_receiving()
        elif self._receiving is None:
            self._receiving = self.loop.call_later(self._request_seconds, self.transport.abort)

    def _end_receiving(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    def _end_sending(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None


def _user(connected: socket.socket) -> int:
    """The number of the user who has connected, as the kernel saw it then."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid)
