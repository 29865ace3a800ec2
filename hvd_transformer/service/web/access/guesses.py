"""Slows down clients that try tokens: after some wrong ones each further try must wait, longer every time."""

import threading
from collections import OrderedDict
from ipaddress import IPv6Address, ip_address

_FREE = 10  # wrong tokens before the first wait
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 300.0  # seconds
_FORGOTTEN = 3600.0  # seconds without a wrong token
_MOST_CLIENTS = 10_000  # those that have been quiet for longest are forgotten first


class Guesses:
    """Counts the wrong tokens of each client. Thread-safe."""

    def __init__(self) -> None:
        self._clients: OrderedDict[str, tuple[int, float]] = OrderedDict()  # wrong tokens, and when the last one came
        self._turn = threading.Lock()

    def wait(self, client: str, now: float) -> float:
        """Seconds until this client may try a token; 0: now."""
        with self._turn:
            wrong, last = self._clients.get(_network(client), (0, 0.0))
        if wrong < _FREE:
            return 0.0
        pause = min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** min(wrong - _FREE, 30))
        return max(0.0, last + pause - now)

    def wrong(self, client: str, now: float) -> None:
        """Count a wrong token."""
        with self._turn:
            wrong, last = self._clients.pop(_network(client), (0, now))
            self._clients[_network(client)] = (1 if now - last > _FORGOTTEN else wrong + 1, now)
            while len(self._clients) > _MOST_CLIENTS:
                self._clients.popitem(last=False)


def _network(client: str) -> str:
    """Who a client is: an IPv6 host has 2^64 addresses of its own."""
    try:
        address = ip_address(client.partition("%")[0])
    except ValueError:
        return client
    if isinstance(address, IPv6Address) and address.ipv4_mapped is None:
        return str(int(address) >> 64)
    return str(address)
