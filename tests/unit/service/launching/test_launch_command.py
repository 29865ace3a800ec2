"""The threads of a job's ranks. The command line is in test_attempts.py, as launchers get it."""

import pytest

from hvd_transformer.service.jobs import Host, Placement
from hvd_transformer.service.launching.launch_command import thread_limit

HOSTS = [Host("h1", 4, threads=8), Host("h2", 4, threads=3), Host("h3", 4)]


@pytest.mark.parametrize(
    ("names", "limit"),
    [
        (["h1"], {"OMP_NUM_THREADS": "8"}),
        (["h1", "h2"], {"OMP_NUM_THREADS": "3"}),
        (["h1", "h3"], {}),
        (["h1", "gone"], {}),
        ([], {}),
    ],
)
def test_ranks_have_the_threads_of_a_slot_of_the_smallest_host(names: list[str], limit: dict[str, str]) -> None:
    assert thread_limit(tuple(Placement(name, 2) for name in names), HOSTS) == limit
