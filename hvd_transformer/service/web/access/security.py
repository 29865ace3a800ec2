"""What holds for every request: headers of the answer, the name of the host, the size of the body."""

from collections.abc import Collection
from email.utils import formatdate
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_BODY = 256 * 1024
_DRAINED = 4 * MOST_BODY  # bytes of a body that is too large which are read before it is refused, so that it is heard

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def failure(status: int, line: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """The answer to a request that is refused."""
    return JSONResponse({"error": " ".join(line.split())}, status, headers)


class SecurityHeaders:
    """Adds the headers that tell browsers what these answers may do. They are never cached unless they say so."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers.setdefault("Cache-Control", "no-store")
                headers["Date"] = formatdate(usegmt=True)
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)


class SameOrigin:
    """Refuses requests that other sites make: by a name of theirs that leads here (DNS rebinding), or from their pages.

    Ports are not compared, as an ssh tunnel has another one. A client of the Unix socket is no browser.
    """

    def __init__(self, app: ASGIApp, names: Collection[str], schemes: Collection[str] | None = None) -> None:
        """`names`: of this host, in lower case. `schemes`: of the pages' address; None: that of the connection."""
        self._app, self._names, self._schemes = app, names, schemes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        line = self._wrong(scope) if scope["type"] == "http" and "peer" not in scope.get("state", {}) else ""
        if line:
            await failure(403, line)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _wrong(self, scope: Scope) -> str:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if _name(host) not in self._names:
            return "Host: not a name of this service; serve --public-host NAME adds one"
        schemes = self._schemes or (scope["scheme"],)
        if origin is not None and origin.lower() not in [f"{scheme}://{host.lower()}" for scheme in schemes]:
            return "Origin: requests from pages of other sites are refused"
        if headers.get("sec-fetch-site") == "cross-site" and scope["path"].startswith("/api/"):
            return "Sec-Fetch-Site: requests from pages of other sites are refused"
        return ""


def _name(host: str) -> str:
    """The name in a Host header, without its port; empty if it is not one."""
    try:
        parts = urlsplit(f"//{host}")
        if parts.netloc != host or parts.username is not None or parts.path:
            return ""
        return canonical(parts.hostname or "")
    except ValueError:
        return ""


def canonical(name: str) -> str:
    """A host name or address as it is compared."""
    try:
        return str(ip_address(name.strip("[]")))
    except ValueError:
        return name.lower().rstrip(".")


class LimitedBody:
    """Refuses bodies above `MOST_BODY`, whatever Content-Length says."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body, size, more = bytearray(), 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
            if size <= MOST_BODY:
                body += message.get("body", b"")
            elif not more or size > _DRAINED:
                line = f"the body is larger than {MOST_BODY >> 10} KiB"
                await failure(413, line, {"Connection": "close"})(scope, receive, send)
                return
        whole: Message | None = {"type": "http.request", "body": bytes(body), "more_body": False}

        async def receive_whole() -> Message:
            nonlocal whole
            if whole is None:
                return await receive()
            message, whole = whole, None
            return message

        await self._app(scope, receive_whole, send)
