"""Sessions of browsers: each stands for the token that somebody has logged in with, and ends with it at the latest."""

import hashlib
import hmac
import secrets
import threading
from collections import OrderedDict
from dataclasses import dataclass

SECONDS = 7 * 86_400.0
_MOST = 10_000  # the oldest ones end then


@dataclass(frozen=True)
class Session:
    """`token`: the secret that it stands for, checked again on every request. `csrf`: what each change must bring."""

    token: str
    csrf: str
    ends: float


class Sessions:
    """The sessions, in memory alone: a restart of the service ends them. Thread-safe."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()
        self._turn = threading.Lock()

    def open(self, token: str, now: float) -> str:
        """Begin a session, and return its secret."""
        secret = secrets.token_urlsafe(32)
        csrf = hmac.new(secret.encode(), b"csrf", hashlib.sha256).hexdigest()
        with self._turn:
            self._sessions[_digest(secret)] = Session(token, csrf, now + SECONDS)
            while len(self._sessions) > _MOST:
                self._sessions.popitem(last=False)
        return secret

    def find(self, secret: str, now: float) -> Session | None:
        """The session of a secret; None if there is none, or if it has ended."""
        with self._turn:
            session = self._sessions.get(_digest(secret))
            if session is not None and session.ends <= now:
                del self._sessions[_digest(secret)]
                return None
            return session

    def close(self, secret: str) -> None:
        """End a session."""
        with self._turn:
            self._sessions.pop(_digest(secret), None)


def _digest(secret: str) -> bytes:
    # Found by its digest: how long the search takes tells nothing that could be used.
    return hashlib.sha256(secret.encode(errors="surrogateescape")).digest()
