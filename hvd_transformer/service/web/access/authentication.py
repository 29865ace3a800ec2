"""Who sends a request, and whether it may: by the Unix socket's credentials, a token, or a browser's session."""

import hashlib
import hmac
import math
import os
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request

from hvd_transformer.own_folder import user_name
from hvd_transformer.service.storage.sessions import SESSION_SECONDS, Sessions
from hvd_transformer.service.storage.tokens import Principal, Role, Tokens
from hvd_transformer.service.web.access.guesses import Guesses

_RANK = {Role.VIEW: 0, Role.SUBMIT: 1, Role.ADMIN: 2}
_LONGEST_SECRET = 1000
_MOST_KNOWN = 1000
_SAFE = {"GET", "HEAD"}


class Peer(NamedTuple):
    """The other side of the Unix socket; the server puts it into `scope["state"]["peer"]`."""

    uid: int


@dataclass(frozen=True)
class User:
    """Who has sent a request. `csrf`: of the session, empty without one."""

    owner: str
    role: Role
    csrf: str = ""

    def may(self, role: Role) -> bool:
        """Whether the user may do what this role may."""
        return _RANK[self.role] >= _RANK[role]


class Authentication:
    """Finds out who sends a request. Its methods raise `HTTPException` with 401, 403 or 429 otherwise. Thread-safe."""

    def __init__(self, tokens: Tokens, sessions: Sessions, cookie: str, *, behind_proxy: bool = False) -> None:
        """`cookie`: the name of the session's. `behind_proxy`: a proxy tells the clients' addresses in
        X-Forwarded-For, as all of them come through it.
        """
        self._tokens, self._sessions, self._cookie = tokens, sessions, cookie
        self._behind_proxy = behind_proxy
        self._guesses = Guesses()
        self._known: OrderedDict[bytes, None] = OrderedDict()  # digests of secrets that were right
        self._turn = threading.Lock()

    def user(self, request: Request) -> User:
        """The user who sends this request."""
        peer: Peer | None = getattr(request.state, "peer", None)
        if peer is not None:
            return User(user_name(peer.uid), Role.ADMIN if peer.uid in (0, os.geteuid()) else Role.SUBMIT)
        authorization, cookie = request.headers.get("authorization"), request.cookies.get(self._cookie)
        if authorization is not None:
            kind, _, secret = authorization.partition(" ")
            if kind.lower() != "bearer":
                raise _unknown("Authorization: must be Bearer and a token")
            principal = self._check(request, secret.strip())
            return User(principal.owner, principal.role)
        if cookie is None:
            raise _unknown("log in, or send a token in the header Authorization: Bearer")
        session = self._sessions.find(cookie)
        if session is None:
            raise _unknown("the session has ended: log in")
        sent = request.headers.get("x-csrf", "")
        if request.method not in _SAFE and not hmac.compare_digest(sent.encode(), session.csrf.encode()):
            raise HTTPException(403, "X-CSRF: must be the value that GET /api/v1/me returns")
        return User(session.principal.owner, session.principal.role, session.csrf)

    def log_in(self, request: Request, token: str) -> str:
        """The cookie of a new session of the user with this token."""
        self._check(request, token)
        return self._set_cookie(request, self._sessions.open(token), int(SESSION_SECONDS))

    def log_out(self, request: Request) -> str:
        """End the session, and return the cookie that the browser forgets it with."""
        self._sessions.close(request.cookies.get(self._cookie, ""))
        return self._set_cookie(request, "", 0)

    def _check(self, request: Request, secret: str) -> Principal:
        """Whose token this is. Clients that guess must wait; tokens that were right once need not."""
        now, client = time.monotonic(), self._client(request)
        digest = hashlib.sha256(secret.encode(errors="surrogateescape")).digest()
        with self._turn:
            known = digest in self._known
        wait = 0.0 if known else self._guesses.wait(client, now)
        if wait > 0:
            seconds = math.ceil(wait)
            line = f"too many wrong tokens: try again in {seconds} s"
            raise HTTPException(429, line, {"Retry-After": str(seconds)})
        principal = self._tokens.check(secret) if len(secret) <= _LONGEST_SECRET else None
        with self._turn:
            self._known.pop(digest, None)
            if principal is not None:
                self._known[digest] = None
                if len(self._known) > _MOST_KNOWN:
                    self._known.popitem(last=False)
        if principal is None:
            self._guesses.wrong(client, now)
            raise _unknown("the token is wrong, has expired or was revoked")
        return principal

    def _client(self, request: Request) -> str:
        forwarded = request.headers.getlist("x-forwarded-for") if self._behind_proxy else []
        if forwarded:  # what the proxy has added, not what the client has sent
            return forwarded[-1].rpartition(",")[2].strip()
        return request.client.host if request.client else ""

    def _set_cookie(self, request: Request, secret: str, seconds: int) -> str:
        secure = "; Secure" if request.url.scheme == "https" or self._behind_proxy else ""
        return f"{self._cookie}={secret}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}"


def session_cookie(service_id: str) -> str:
    """The name of the session's cookie. Services on several ports of one host share its cookies, and not this name."""
    return f"hvd_session_{service_id}"


def _unknown(line: str) -> HTTPException:
    return HTTPException(401, line, {"WWW-Authenticate": "Bearer"})
