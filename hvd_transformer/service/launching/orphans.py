"""When no rank of a launcher that was killed can be alive any more, so that its job may start again.

The ranks of a host end with the connection to their launcher (`launch/node/node_agent.py`), or once they know that they
are cut off from it. Until then they may hold the locks of their run directory, and renew them.
"""

import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from hvd_transformer.folder_lock import LEFT_OVER_SECONDS, owner_of
from hvd_transformer.launch.time_limits import TimeLimits

_END_SECONDS = 10.0  # for ranks that are cut off to save, and to be killed
_SILENCE = re.compile(r"(\d+(?:\.\d+)?)([smh]?)")


class Orphans:
    """The ranks that a launcher may have left, watched from construction, when it is known to have ended.

    `launch`: its options.
    """

    def __init__(
        self, run: Path, num_hosts: int, launch: Sequence[str], now: Callable[[], float] = time.monotonic
    ) -> None:
        limits = TimeLimits.of(num_hosts, silence=_silence(launch))
        self._now, self._since = now, now()
        self._seconds = max(LEFT_OVER_SECONDS, limits.launcher_silence + _END_SECONDS)
        self._locks = [_Lock(run / name, now) for name in (".launcher", ".lock")]

    def may_live(self) -> bool:
        """Whether a rank may be alive; to be asked again and again until none may."""
        held = [lock.is_held() for lock in self._locks]  # each is looked at every time
        return any(held) or self._now() - self._since < self._seconds


class _Lock:
    """A folder's lock, seen from outside: left over once its owner is known to be gone, or has not renewed it."""

    def __init__(self, path: Path, now: Callable[[], float]) -> None:
        self._path, self._now = path, now
        self._text, self._changed = b"", now()

    def is_held(self) -> bool:
        text = b""
        with suppress(OSError):
            text = self._path.read_bytes()
        if text != self._text:
            self._text, self._changed = text, self._now()
        owner = owner_of(self._path)
        if not text or owner is None:
            return False
        return owner.here or self._now() - self._changed < LEFT_OVER_SECONDS


def _silence(launch: Sequence[str]) -> float | None:
    """The seconds of --silence-timeout, if that is among the options."""
    for at, word in enumerate(launch):
        name, _, value = word.partition("=")
        if name == "--silence-timeout":
            found = _SILENCE.fullmatch(value or " ".join(launch[at + 1 : at + 2]))
            return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]] if found else None
    return None
