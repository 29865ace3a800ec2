"""The sentence that names the late ranks, from heartbeats as the ranks write them."""

from typing import Any

import pytest

from hvd_transformer.monitoring.stall_report import PeerHeartbeat, stall_report

HOSTS = ["h1", "h1", "h2", "h2"]


def seen(rank: int, phase: str, waits_for: str | None = None, age: float = 0.2, **other: Any) -> PeerHeartbeat:
    beat = {
        "rank": rank,
        "host": HOSTS[rank],
        "phase": phase,
        "waits_for": waits_for,
        "step": 30,
        "phase_seconds": 33.4,
    }
    return PeerHeartbeat(beat | other, age)


def waiting(*ranks: int) -> list[PeerHeartbeat]:
    return [seen(rank, "allreduce", "bucket 4") for rank in ranks]


CASES = {
    "a rank that works while the others wait": (
        [*waiting(0, 1, 3), seen(2, "forward")],
        "rank 2 on host h2 is late: in forward of step 31 for 33 s; "
        "ranks 0, 1, 3 wait for it in allreduce of bucket 4 of step 31",
    ),
    "a stopped rank, whatever it did last": (
        [*waiting(0, 1), seen(2, "allreduce", "bucket 3", age=34.0), *waiting(3)],
        "rank 2 on host h2 is late: no sign of life for 34 s, last in allreduce of bucket 3 of step 31; "
        "ranks 0, 1, 3 wait for it in allreduce of bucket 4 of step 31",
    ),
    "a host that is gone": (
        [*waiting(0, 1), seen(2, "data", age=34.0), seen(3, "backward", age=33.0)],
        "rank 2 on host h2 is late: no sign of life for 34 s, last in data of step 31; "
        "rank 3 on host h2 is late: no sign of life for 33 s, last in backward of step 31; "
        "ranks 0, 1 wait for them in allreduce of bucket 4 of step 31",
    ),
    "the late rank is out of sight": (
        waiting(0, 1),
        "ranks 0, 1 wait for others in allreduce of bucket 4 of step 31; "
        "no heartbeat is visible from here of ranks 2, 3 on host h2",
    ),
    "a network that is cut": (
        waiting(0, 1, 2, 3),
        "ranks 0 to 3 wait for each other in allreduce of bucket 4 of step 31",
    ),
    "a checkpoint that does not end": (
        [seen(0, "checkpoint"), *waiting(1, 2), seen(3, "evaluation", "evaluation")],
        "rank 0 on host h1 is late: in checkpoint after step 30 for 33 s; "
        "ranks 1, 2 wait for it in allreduce of bucket 4 of step 31; rank 3 waits for it in evaluation after step 30",
    ),
    "all in the first step": (
        [seen(rank, "forward", step=0) for rank in range(2)],
        "rank 0 on host h1 is late: in forward of step 1 for 33 s; "
        "rank 1 on host h1 is late: in forward of step 1 for 33 s",
    ),
    "before the first step": (
        [seen(0, "start"), seen(1, "start", "objects sizes")],
        "rank 0 on host h1 is late: in the start for 33 s; rank 1 waits for it in the start",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_late_rank_is_named(case: str) -> None:
    found, sentence = CASES[case]
    assert stall_report(found, HOSTS, silent_seconds=3.0) == sentence


def test_many_late_ranks_are_counted() -> None:
    hosts = [f"h{rank // 8}" for rank in range(64)]
    beats = [PeerHeartbeat(seen(0, "forward").beat | {"rank": rank, "host": hosts[rank]}, 0.0) for rank in range(8, 64)]
    told = stall_report(waiting(*range(3)) + beats, hosts, silent_seconds=3.0)
    assert told.count("is late") == 4
    assert told.endswith("; 52 more ranks are late; ranks 0 to 2 wait for them in allreduce of bucket 4 of step 31")
