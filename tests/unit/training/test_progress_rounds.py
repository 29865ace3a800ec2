"""Ranks whose work takes different times: who sees progress, and who ends with whom."""

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from thread_world import make_worlds, on_ranks

from hvd_transformer.comm import rounds
from hvd_transformer.comm.world import World
from hvd_transformer.data.build_once import Stopped
from hvd_transformer.errors import UserError
from hvd_transformer.monitoring.heartbeat import Heartbeat
from hvd_transformer.training.process import StopRequest
from hvd_transformer.training.progress_rounds import agree_in_rounds

ROUND_SECONDS = 0.05
Work = Callable[[Callable[[], bool]], Any]


class Job:
    """`works` on one rank each; `stops` are their requests to stop, `beats` their heartbeats."""

    def __init__(self, *works: Work, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rounds, "ROUND_SECONDS", ROUND_SECONDS)
        self.works = works
        self.stops: list[Any] = [[] for _ in works]  # true once it has an item
        self.beats = [Heartbeat() for _ in works]

    def run(self) -> list[Any]:
        def one(world: World) -> Any:
            self.beats[world.rank].link = world.link
            return agree_in_rounds(self.works[world.rank], world, self.stops[world.rank])

        return on_ranks(make_worlds(len(self.works)), one)


def done(should_stop: Callable[[], bool]) -> str:
    return "own"


def test_a_rank_that_waits_sees_progress_only_while_another_one_makes_some(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, int]] = []

    def work(should_stop: Callable[[], bool]) -> str:
        for moves in (True, False, True):
            time.sleep(4 * ROUND_SECONDS)  # for the round of the phase before
            before = job.beats[0].signs()
            end = time.monotonic() + 10 * ROUND_SECONDS
            while time.monotonic() < end:
                assert not (moves and should_stop())
                time.sleep(ROUND_SECONDS / 5)
            seen.append((moves, job.beats[0].signs() - before))
        assert job.beats[0].place() == ("start", "other ranks")
        return "long"

    job = Job(done, work, monkeypatch=monkeypatch)
    assert job.run() == ["own", "long"]
    for moves, signs in seen:
        assert (signs > 3) if moves else (signs == 0)


def test_a_rank_whose_work_waits_for_that_of_another_sees_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "ROUND_SECONDS", ROUND_SECONDS)
    ended, seen = threading.Event(), dict[bool, list[int]]()

    worlds: list[World] = []

    def works(advance: Callable[[], bool]) -> None:
        end, before = time.monotonic() + 20 * ROUND_SECONDS, worlds[0].link.ended
        while time.monotonic() < end or (waits and worlds[0].link.ended - before < 4 and time.monotonic() < end + 30):
            advance()
            time.sleep(ROUND_SECONDS / 5)
        ended.set()

    for waits in (True, False):
        worlds[:] = make_worlds(2)

        def one(world: World, waits: bool = waits) -> int:
            if world.rank:
                rounds.Rounds(world).run(works)
                return 0
            before = world.link.ended
            return rounds.Rounds(world, waits=lambda: waits).run(lambda _: ended.wait(30) and world.link.ended - before)

        ended.clear()
        seen[waits] = on_ranks(worlds, one)
    assert seen[True][0] > 3 and seen[False][0] == 0


def until_asked(should_stop: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not should_stop():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    raise Stopped


def test_an_error_of_one_rank_ends_the_work_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(should_stop: Callable[[], bool]) -> None:
        raise UserError("no such file")

    errors = Job(until_asked, wrong, done, monkeypatch=monkeypatch).run()
    assert [type(error).__name__ for error in errors] == ["AgreedError"] * 3
    assert {str(error) for error in errors} == {"rank 1: no such file"}


@pytest.mark.parametrize("asked", [0, 1])
def test_all_stop_if_one_rank_is_asked_to(asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(should_stop: Callable[[], bool]) -> None:
        time.sleep(4 * ROUND_SECONDS)
        job.stops[asked].append(signal.SIGTERM)
        until_asked(should_stop)

    job = Job(done, work, monkeypatch=monkeypatch)
    assert [type(error) for error in job.run()] == [Stopped, Stopped]


def test_a_lost_rank_ends_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    (world,) = make_worlds(1)
    monkeypatch.setattr(world, "all_reduce_", lambda *_: (_ for _ in ()).throw(ConnectionError("rank 1 is lost")))
    with pytest.raises(ConnectionError, match="rank 1 is lost"):
        agree_in_rounds(until_asked, world, [])  # type: ignore[arg-type]


def test_a_single_process_needs_no_round() -> None:
    stop = StopRequest()
    try:
        began = time.monotonic()
        assert agree_in_rounds(done, World(), stop) == "own"
        assert time.monotonic() - began < rounds.ROUND_SECONDS / 2
    finally:
        stop.restore()
