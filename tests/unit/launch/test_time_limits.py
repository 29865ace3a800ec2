"""Limits of time: the user's, or those that so many hosts need."""

import pytest

from hvd_transformer.launch.time_limits import TimeLimits


@pytest.mark.parametrize(
    ("hosts", "limits"),
    [
        (1, TimeLimits(30, 8, 120)),
        (64, TimeLimits(30, 8, 120)),
        (128, TimeLimits(60, 16, 240)),
        (640, TimeLimits(300, 20, 1200)),  # a dead host is still noticed within half a minute
    ],
)
def test_many_hosts_get_more_time(hosts: int, limits: TimeLimits) -> None:
    assert TimeLimits.of(hosts) == limits


@pytest.mark.parametrize("hosts", [1, 1000])
def test_what_the_user_chooses_holds(hosts: int) -> None:
    assert TimeLimits.of(hosts, start=5, silence=60, save=7) == TimeLimits(5, 60, 7, preflight=5)


@pytest.mark.parametrize("hosts", [1, 128, 1000])
def test_a_host_waits_longer_for_its_launcher_than_that_for_the_host(hosts: int) -> None:
    limits = TimeLimits.of(hosts)
    assert limits.launcher_silence > limits.silence
