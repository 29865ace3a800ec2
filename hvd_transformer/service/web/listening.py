"""Where the service may be reached, and under which names: what is not safe is refused before anything listens."""

import re
import ssl
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from hvd_transformer.errors import UserError
from hvd_transformer.service.web.access.security import canonical

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252})")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Listening:
    """The options of `serve`. `public_hosts`: names by which browsers reach it. `port` 0: any that is free."""

    socket: Path
    address: str = "127.0.0.1"
    port: int = 0
    certificate: Path | None = None
    key: Path | None = None
    behind_proxy: bool = False
    public_hosts: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise `UserError` for what is not safe or makes no sense."""
        if not 0 <= self.port <= 65535:
            raise UserError(f"--port {self.port}: must be from 0 (any free one) to 65535")
        for name in self.public_hosts:
            if not _HOST.fullmatch(name) and not _is_address(name):
                raise UserError(f"--public-host {name}: must be a host name, without https:// and without a port")
        if (self.certificate is None) != (self.key is None):
            raise UserError("--certificate and --key: give both or neither")
        if self.behind_proxy and self.certificate is not None:
            raise UserError("--behind-proxy: the proxy has the certificate; leave out --certificate and --key")
        if self.behind_proxy and not self.public_hosts:
            raise UserError("--behind-proxy: needs --public-host NAME, the name that browsers know the proxy by")
        if not self._is_loopback() and self.certificate is None and not self.behind_proxy:
            raise UserError(
                f"--address {self.address}: tokens would cross the network unencrypted; give --certificate and --key, "
                "or --behind-proxy and --public-host if a proxy with TLS stands before it"
            )
        if _is_address(self.address) and ip_address(self.address).is_unspecified and not self.public_hosts:
            raise UserError(f"--address {self.address}: needs --public-host NAME, the name that browsers use")

    @property
    def names(self) -> list[str]:
        """The hosts that requests may name."""
        return [canonical(name) for name in (*_LOOPBACK, self.address, *self.public_hosts)]

    def url(self, port: int) -> str:
        """The address of the pages, for a browser."""
        if self.behind_proxy:
            return f"https://{self.public_hosts[0]}"
        host = self.public_hosts[0] if self.public_hosts else self.address
        host = f"[{host}]" if ":" in host else host
        return f"{'http' if self.certificate is None else 'https'}://{host}:{port}"

    def tls(self) -> ssl.SSLContext | None:
        """The certificate, ready to be used; None without one. Raises `UserError` if it cannot be read."""
        if self.certificate is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        for option, path in (("--certificate", self.certificate), ("--key", self.key)):
            try:
                Path(str(path)).read_bytes()
            except OSError as error:
                raise UserError(f"{option} {path}: {error.strerror}") from None
        try:
            # Without this, OpenSSL would ask for a password on the terminal.
            context.load_cert_chain(self.certificate, self.key, password=lambda: b"")
        except (ssl.SSLError, OSError, ValueError) as error:
            why = getattr(error, "reason", None) or error
            raise UserError(
                f"--certificate {self.certificate}, --key {self.key}: not a certificate in PEM and its key without a "
                f"password: {why}"
            ) from None
        return context

    def _is_loopback(self) -> bool:
        if _is_address(self.address):
            return ip_address(self.address).is_loopback
        return self.address.lower() == "localhost"


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
