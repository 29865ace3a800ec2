"""GET /api/v1/events: a response that lasts until the client, the token or the service is gone."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hvd_transformer.service.web.connection import Room


class EventResponse(Response):
    """Sends the parts of an event stream as they come, and counts in its room meanwhile."""

    media_type = "text/event-stream"

    def __init__(self, parts: AsyncGenerator[bytes, None], room: Room) -> None:
        super().__init__(headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._parts, self._room = parts, room

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._room.streams += 1
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(receive())  # the body has been read: what comes is the end
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._room.streams -= 1
            leaving.cancel()
            if not sending.done():
                sending.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
        if not sending.cancelled():
            sending.result()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._parts) as parts:
            async for part in parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
