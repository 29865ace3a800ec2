"""Peak memory of a process; CPU and network of its host from one look to the next."""

import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from hvd_transformer.monitoring.host_usage import HostMeter, HostUsage, peak_resident_bytes

GROW = """
from hvd_transformer.monitoring.host_usage import peak_resident_bytes
before = peak_resident_bytes()
block = bytearray(b"x" * 2**27)
del block
print(before, peak_resident_bytes())
"""


def test_the_peak_stays_and_is_not_that_of_the_parent() -> None:
    mine = bytearray(b"x" * 2**28)
    found = subprocess.run([sys.executable, "-c", GROW], capture_output=True, text=True, check=True)
    del mine
    before, after = map(int, found.stdout.split())
    assert 2**20 < before < 2**28 <= peak_resident_bytes()
    assert after - before > 0.9 * 2**27


def test_traffic_per_second_without_that_to_the_host_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    now, sent, received = 100.0, 7000, 900

    def cards(pernic: bool) -> dict[str, SimpleNamespace]:
        assert pernic
        other = SimpleNamespace(bytes_sent=10, bytes_recv=20)
        own = SimpleNamespace(bytes_sent=sent, bytes_recv=received)
        return {"lo": SimpleNamespace(bytes_sent=9 * sent, bytes_recv=9 * sent), "eth0": own, "ib0": other}

    monkeypatch.setattr(psutil, "net_io_counters", cards)
    monkeypatch.setattr(psutil, "cpu_percent", lambda: 40.0)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    meter = HostMeter()
    now, sent, received = 104.0, 15000, 1900
    assert meter.read() == HostUsage(0.4, 2000.0, 250.0)
    now, sent = 104.2, 10**9  # too soon to tell
    assert meter.read() == HostUsage(0.4, 2000.0, 250.0)
    now, sent, received = 106.0, 3, 2  # a card was replaced: no negative traffic
    assert meter.read() == HostUsage(0.4, 0.0, 0.0)


def test_without_psutil_there_is_nothing_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert HostMeter().read() is None
