"""The commands' side of the service: its HTTP interface over the Unix socket or a URL, with the standard library."""

import http.client
import json
import os
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit
from uuid import uuid4

from hvd_transformer.errors import UserError
from hvd_transformer.service.remote.address import SOCKET, TOKEN, Address, read_token, token_file

_SECONDS = 60.0
_BASE = "/api/v1/"
_PAUSES = (0.5, 2.0, 5.0, 10.0)  # seconds, between attempts to submit once a connection broke
# Of a proxy that got no answer from the service, which may be just being restarted.
_NO_ANSWER = (HTTPStatus.BAD_GATEWAY, HTTPStatus.GATEWAY_TIMEOUT)


class NoService(UserError):
    """No service answers."""


class Interrupted(NoService):
    """The connection broke or took too long before the answer: what was asked for may have been done, or not."""


class Refused(UserError):
    """The service has refused a request, with an HTTP status."""

    def __init__(self, status: int, line: str) -> None:
        super().__init__(line)
        self.status = status


class Busy(Refused):
    """The service has too much to do at the moment, or a proxy tells that it is away: nothing was done."""


class Client:
    """Speaks to one service. Raises `NoService`, `Refused` or another `UserError` for all that goes wrong."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._headers = {"Accept": "application/json", "User-Agent": "hvd-transformer"}
        if address.state is None and (token := read_token()):
            self._headers["Authorization"] = f"Bearer {token}"
        self._kept: http.client.HTTPConnection | None = None  # between two `get`

    def get(self, path: str, **query: Any) -> Any:
        """The JSON value of a page of the API. `None` and empty texts in the query are left out."""
        target = _target(path, query)
        if self._kept is not None:
            # The service ends connections that were idle for some seconds.
            with suppress(http.client.HTTPException, OSError):
                return self._answer(_exchange(self._kept, "GET", target, self._headers))
            self.close()
        self._kept = self._connect()
        try:
            return self._fresh(self._kept, "GET", target)
        except NoService:
            self.close()
            raise

    def post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Any:
        """The answer to a change."""
        data = json.dumps(body).encode()
        with closing(self._connect()) as connection:
            return self._fresh(
                connection, "POST", _target(path), data, {"Content-Type": "application/json", **(headers or {})}
            )

    def delete(self, path: str) -> Any:
        """The answer to a removal."""
        with closing(self._connect()) as connection:
            return self._fresh(connection, "DELETE", _target(path))

    def submit(self, request: Mapping[str, Any]) -> Any:
        """Add jobs, once, also if the service is just being restarted."""
        key = {"Idempotency-Key": uuid4().hex}
        with suppress(Interrupted):
            return self.post("jobs", request, key)
        *pauses, last = _PAUSES  # meanwhile there may be no service
        for pause in pauses:
            time.sleep(pause)
            with suppress(NoService, Busy):
                return self.post("jobs", request, key)
        time.sleep(last)
        return self.post("jobs", request, key)

    def items(self, path: str, **query: Any) -> Iterator[dict[str, Any]]:
        """All items of a page and of those that follow it."""
        cursor = None
        while True:
            page = self.get(path, **query, cursor=cursor)
            yield from page["items"]
            cursor = page.get("next")
            if cursor is None:
                return

    def events(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The events from now on, each with its data, until the service ends. Raises `Busy` if too many listen.

        The first one is "open", and the service's signs of life are "ping"; neither has data.
        """
        with closing(self._connect()) as connection:
            try:
                headers = {**self._headers, "Accept": "text/event-stream"}
                response = _ask(connection, "GET", _target("events"), headers)
                if response.status != HTTPStatus.OK:
                    raise self._refusal(response, response.read())
            except (http.client.HTTPException, OSError) as error:
                raise self._no_service(error) from None
            yield "open", {}
            kind, data = "", ""
            with suppress(http.client.HTTPException, OSError):
                for line in response:
                    name, _, value = line.decode().rstrip("\r\n").partition(":")
                    value = value.removeprefix(" ")
                    if name == "event":
                        kind = value
                    elif name == "data":
                        data += value
                    elif not name and value:  # a comment
                        yield "ping", {}
                    elif not name:
                        if kind and data:
                            yield kind, json.loads(data)
                        kind = data = ""

    def close(self) -> None:
        """End the connection; the next request makes a new one."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def _connect(self) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection
        if self.address.state is not None:
            connection = _UnixConnection(self.address.state)
        else:
            parts = urlsplit(self.address.url)
            kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
            connection = kind(str(parts.hostname), parts.port, timeout=_SECONDS)
        try:
            connection.connect()
        except ssl.SSLCertVerificationError as error:
            raise UserError(
                f"{self.address}: its certificate is not trusted: {error.verify_message}; name the file of the "
                "authority that signed it in $SSL_CERT_FILE"
            ) from None
        except ssl.SSLError:
            raise NoService(f"{self.address}: does not speak TLS; through an ssh tunnel it is http://") from None
        except OSError as error:
            raise self._no_service(error) from None
        return connection

    def _fresh(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        target: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """The answer over a connection that has just been made."""
        try:
            return self._answer(_exchange(connection, method, target, {**self._headers, **(headers or {})}, body))
        except TimeoutError:
            raise Interrupted(f"{self.address}: the service did not answer within {_SECONDS:.0f} seconds") from None
        except (http.client.HTTPException, OSError) as error:
            raise Interrupted(f"{self.address}: the service ended before it answered: {_reason(error)}") from None

    def _answer(self, exchanged: tuple[http.client.HTTPResponse, bytes]) -> Any:
        response, data = exchanged
        if not HTTPStatus.OK <= response.status < HTTPStatus.MULTIPLE_CHOICES:
            raise self._refusal(response, data)
        if response.status == HTTPStatus.NO_CONTENT:
            return None
        try:
            return json.loads(data)
        except ValueError:
            raise UserError(f"{self.address}: does not answer like hvd-transformer serve") from None

    def _no_service(self, error: Exception) -> UserError:
        if self.address.state is not None and isinstance(error, FileNotFoundError | ConnectionRefusedError):
            return NoService(f"{self.address}: no service is running; start it with hvd-transformer serve")
        if self.address.state is not None and isinstance(error, PermissionError):
            return UserError(
                f"{self.address}: is the folder of another user's service; ask its admin for a token, and give the "
                "service's address with --server"
            )
        return NoService(f"{self.address}: no service answers: {_reason(error)}")

    def _refusal(self, response: http.client.HTTPResponse, data: bytes) -> UserError:
        """The service's own line; in front of it there may be a proxy, whose pages are of no use here."""
        if response.status == HTTPStatus.UNAUTHORIZED and "Authorization" not in self._headers:
            return Refused(response.status, f"{self.address}: needs a token; {_how_to_give_a_token()}")
        line = ""
        with suppress(ValueError, AttributeError):
            line = " ".join(str(json.loads(data).get("error") or "").split())
        if not line:
            line = f"{self.address}: answers with HTTP status {response.status} {response.reason}".rstrip()
        if response.status == HTTPStatus.UNAUTHORIZED:
            line += f"; {_how_to_give_a_token()}"
        if response.status in _NO_ANSWER:
            return Interrupted(line)
        kind = Busy if response.status == HTTPStatus.SERVICE_UNAVAILABLE else Refused
        return kind(response.status, line)


def _exchange(
    connection: http.client.HTTPConnection,
    method: str,
    target: str,
    headers: Mapping[str, str],
    body: bytes | None = None,
) -> tuple[http.client.HTTPResponse, bytes]:
    """Raises what http.client raises."""
    response = _ask(connection, method, target, headers, body)
    return response, response.read()


def _ask(
    connection: http.client.HTTPConnection,
    method: str,
    target: str,
    headers: Mapping[str, str],
    body: bytes | None = None,
) -> http.client.HTTPResponse:
    """Raises what http.client raises."""
    # A service that has too many connections says so without reading anything.
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.request(method, target, body, dict(headers))
    return connection.getresponse()


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over the socket in a state folder, however long the folder's path is."""

    def __init__(self, state: Path) -> None:
        super().__init__("localhost", timeout=_SECONDS)
        self._state = state

    def connect(self) -> None:
        folder = os.open(self._state, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self.sock = socket.socket(socket.AF_UNIX)
        try:
            self.sock.settimeout(_SECONDS)
            self.sock.connect(f"/proc/self/fd/{folder}/{SOCKET}")
        except BaseException:
            self.sock.close()
            raise
        finally:
            os.close(folder)


def _how_to_give_a_token() -> str:
    return f"put one into {token_file()} (mode 0600) or ${TOKEN}; admins make them with hvd-transformer token add"


def _reason(error: Exception) -> str:
    words = error.strerror if isinstance(error, OSError) else None
    return words or str(error) or type(error).__name__


def _target(path: str, query: Mapping[str, Any] | None = None) -> str:
    given = {name: value for name, value in (query or {}).items() if value not in (None, "")}
    try:
        return _BASE + quote(path) + (f"?{urlencode(given, doseq=True)}" if given else "")
    except UnicodeEncodeError as error:  # a command line need not be text
        raise UserError(f"{error.object!r} is not valid UTF-8") from None
