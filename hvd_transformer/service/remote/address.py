"""Where the service is that a command talks to, and the token for it."""

import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from hvd_transformer.errors import UserError

SERVER, TOKEN = "HVD_TRANSFORMER_SERVER", "HVD_TRANSFORMER_TOKEN"
SOCKET, DATABASE = "service.sock", "service.db"  # in the state folder
_MAX_TOKEN = 1000


@dataclass(frozen=True)
class Address:
    """Where the service is: a state folder of this host, or a URL."""

    state: Path | None
    url: str = ""

    @classmethod
    def find(cls, server: str | None) -> "Address":
        """The service of --server, else of $HVD_TRANSFORMER_SERVER, else that of this user. Raises `UserError`."""
        origin, given = ("--server", server) if server else (f"${SERVER}", os.environ.get(SERVER))
        if not given:
            return cls(default_state())
        if "://" not in given:
            return cls(expanded(given).absolute())
        try:
            parts = urlsplit(given)
            fits = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
            fits = fits and not (parts.path.strip("/") or parts.query or parts.fragment or parts.username)
        except ValueError:  # the port is not a number, or a bracket of an IPv6 address lacks
            fits = False
        if not fits:
            raise UserError(f"{origin} {given}: must be like https://host:8080, or the service's state folder")
        if parts.scheme == "http" and not _is_loopback(str(parts.hostname)):
            raise UserError(f"{origin} {given}: the token would cross the network unencrypted; use https://")
        return cls(None, given.rstrip("/"))

    def __str__(self) -> str:
        return self.url or str(self.state)


def expanded(word: str) -> Path:
    """The path; with ~ and a user whom this machine does not know, it stays as it is."""
    with suppress(RuntimeError):
        return Path(word).expanduser()
    return Path(word)


def default_state() -> Path:
    """The state folder of this user's service."""
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data).expanduser() / "hvd-transformer" / "service"


def token_file() -> Path:
    """Where this user keeps a token."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "hvd-transformer" / "token"


def read_token() -> str | None:
    """The token of the environment or of the private file. Raises `UserError` if others can read the file."""
    if given := os.environ.get(TOKEN):
        return _checked(given, f"${TOKEN}")
    file = token_file()
    try:
        with file.open(encoding="utf-8", errors="replace") as stream:
            status = os.fstat(stream.fileno())
            if status.st_uid not in (0, os.geteuid()) or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise UserError(f"{file}: must be yours, and others must not read it; use: chmod 600 {file}")
            return _checked(stream.read(_MAX_TOKEN + 1), str(file))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None


def _checked(token: str, origin: str) -> str:
    token = token.strip()
    if not token or len(token) > _MAX_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise UserError(f"{origin}: is not a token")
    return token


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return False
