"""What the ranks do, and which one is late."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest

from hvd_transformer.monitoring.stall_report import PeerHeartbeat
from hvd_transformer.monitoring.watchdog import Watchdog
from hvd_transformer.service.runs.ranks import rank_states, read_heartbeats


def _beat(rank: int, age: float = 0.2, **fields: Any) -> PeerHeartbeat:
    """As `Watchdog.beat` makes it."""
    return PeerHeartbeat({**Watchdog(rank, 4).beat(), "host": f"h{rank}", "step": 30, **fields}, age)


def test_a_healthy_run_has_no_late_rank() -> None:
    beats = [_beat(1, phase="allreduce", waits_for="bucket 4"), _beat(0, phase="forward", tokens_per_second=9.5)]
    states, late = rank_states(beats, [], launched=True)
    assert late is None
    assert [(state.rank, state.host, state.step, state.phase, state.waits_for) for state in states] == [
        (0, "h0", 30, "forward", None),
        (1, "h1", 30, "allreduce", "bucket 4"),
    ]
    assert [state.late for state in states] == [False, False]
    assert [state.tokens_per_second for state in states] == [9.5, None]
    assert all(state.memory and state.memory > 2**20 for state in states)


def test_the_rank_that_the_others_wait_for_is_late() -> None:
    waiting = {"phase": "allreduce", "waits_for": "bucket 4", "progress_seconds": 20.0, "phase_seconds": 20.0}
    beats = [
        _beat(0, **waiting),
        _beat(1, phase="data", progress_seconds=20.0, phase_seconds=19.0),
        _beat(2, **waiting),
    ]
    states, late = rank_states(beats, [], launched=True)
    assert late == (
        "rank 1 on host h1 is late: in data of step 31 for 19 s; "
        "ranks 0, 2 wait for it in allreduce of bucket 4 of step 31"
    )
    assert [state.late for state in states] == [False, True, False]


@pytest.mark.parametrize(("launched", "age", "silent"), [(True, 5.5, True), (False, 4.5, False), (False, 30.0, True)])
def test_a_silent_rank_is_late(launched: bool, age: float, silent: bool) -> None:
    states, late = rank_states([_beat(0), _beat(1, age, phase="update")], [], launched=launched)
    assert [state.late for state in states] == [False, silent]
    assert (late is not None) == silent
    if late is not None:
        assert late.startswith("rank 1 on host h1 is late: no sign of life for ")
        assert "rank 0" not in late


_SLOW = {"slowest_rank": 1.0, "slowest_work_milliseconds": 120.0, "others_work_milliseconds": 80.0}


def test_a_slow_rank_is_named() -> None:
    states, late = rank_states([_beat(0), _beat(1)], [_SLOW, _SLOW, _SLOW], launched=True)
    assert late == "rank 1 on host h1 is slow: 120 ms of work per step, the others need 80 ms"
    assert [state.late for state in states] == [False, True]


@pytest.mark.parametrize(
    "last",
    [
        {"slowest_rank": 0.0},
        {"slowest_rank": None},
        {"slowest_work_milliseconds": 95.0},
        {"slowest_work_milliseconds": 5.9, "others_work_milliseconds": 1.0},
        {"others_work_milliseconds": "x"},
    ],
)
def test_a_rank_that_was_not_slow_each_time_is_not_named(last: dict[str, Any]) -> None:
    assert rank_states([_beat(0), _beat(1)], [_SLOW, _SLOW, _SLOW | last], launched=True)[1] is None


def test_the_work_of_each_rank_is_compared_with_that_of_the_others() -> None:
    beats = [_beat(rank, work_seconds=work) for rank, work in enumerate([0.08, 0.12, 0.1, None])]
    states, late = rank_states(beats, [], launched=True)
    assert late is None
    assert [state.work_seconds for state in states] == [0.08, 0.12, 0.1, None]
    assert [state.work_ratio for state in states] == [pytest.approx(0.08 / 0.09), pytest.approx(0.12 / 0.09),
                                                      pytest.approx(0.1 / 0.09), None]  # fmt: skip
    two = rank_states([_beat(0, work_seconds=0.08), _beat(1, work_seconds=0.12)], [_SLOW] * 3, launched=True)
    assert [(state.work_ratio, state.late) for state in two[0]] == [(1.0, False), (pytest.approx(1.5), True)]
    assert two[1] is not None and "120 ms of work per step, the others need 80 ms" in two[1]


@pytest.mark.parametrize("work", [math.nan, math.inf, -1.0, True, "0.1", [0.1], 10**400, None])
def test_work_that_is_no_duration_is_left_out(work: Any) -> None:
    beats = [_beat(0, work_seconds=0.1), _beat(1, work_seconds=work, memory=work), _beat(2, work_seconds=0.2)]
    first, second, third = rank_states(beats, [], launched=True)[0]
    assert (second.work_seconds, second.work_ratio, second.memory) == (None, None, None)
    assert (first.work_ratio, third.work_ratio) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("works", "ratios"),
    [([0.1], [None]), ([0.0, 0.1], [None, None]), ([1e-308, 1e308], [1.0, None]), ([0.0, 0.0, 0.0], [None] * 3)],
)
def test_ratios_that_have_no_value(works: list[float], ratios: list[float | None]) -> None:
    states, _ = rank_states([_beat(n, work_seconds=work) for n, work in enumerate(works)], [], launched=True)
    assert [state.work_ratio for state in states] == ratios


def test_heartbeats_of_an_earlier_version_have_no_work() -> None:
    old = _beat(0)
    del old.beat["work_seconds"]
    (state,), _ = rank_states([old], [], launched=True)
    assert (state.work_seconds, state.work_ratio) == (None, None)


def test_a_slow_rank_of_an_earlier_start_is_not_named() -> None:
    assert rank_states([_beat(0)], [_SLOW, _SLOW, _SLOW], launched=True)[1] is None
    assert rank_states([_beat(0), _beat(1)], [_SLOW, _SLOW], launched=True)[1] is None


def test_heartbeats_of_the_run_directory(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    assert read_heartbeats(tmp_path) == []
    logs.mkdir()
    now = time.time() + 20  # the storage has a clock of its own
    for rank, age in ((0, 0.0), (1, 12.0)):
        (logs / f"beat-{rank}").write_text(json.dumps(_beat(rank).beat))
        os.utime(logs / f"beat-{rank}", (now - age, now - age))
    (logs / "beat-2").write_text('{"rank": ')
    (logs / "beat-3").symlink_to("/dev/zero")
    (logs / "beat-late").touch()
    found = {beat.beat["rank"]: beat.age for beat in read_heartbeats(tmp_path)}
    assert found == {0: 0.0, 1: pytest.approx(12.0)}


def test_old_heartbeats_are_old(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "beat-0").write_text(json.dumps(_beat(0).beat))
    os.utime(tmp_path / "logs" / "beat-0", (time.time() - 3600,) * 2)
    assert read_heartbeats(tmp_path)[0].age == pytest.approx(3600, abs=60)


def test_rubbish_does_no_harm() -> None:
    rubbish: list[Any] = [
        None,
        [],
        {},
        {"rank": "1"},
        {"rank": 10**9},
        {"rank": -1},
        {"rank": 3},
        {"rank": 4, "step": "x", "waits_for": [1], "late": 1},
    ]
    states, late = rank_states([PeerHeartbeat(beat, 0.0) for beat in rubbish], [], launched=True)
    assert [(state.rank, state.host, state.step) for state in states] == [(3, "unknown", 0), (4, "unknown", 0)]
    assert late is None
    assert rank_states([], [], launched=False) == ([], None)
