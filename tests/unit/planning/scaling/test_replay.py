"""The replay of work and messages: hidden, waiting, queued, and what messages take from a CPU."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_transformer.planning.scaling.collectives import Seconds
from hvd_transformer.planning.scaling.replay import Work, replay


def message(seconds: float, cpu: float = 0.0) -> Seconds:
    return Seconds(0.0, seconds, cpu)


def test_a_message_is_hidden_behind_later_work_and_the_last_one_is_not() -> None:
    # sent at 1, there at 3; sent at 5, there at 7
    played = replay([Work(1, [message(2)]), Work(4, [message(2)])])
    assert (played.end, played.work, played.waited, played.stolen) == (7, 5, 2, 0)


def test_messages_queue_on_the_link() -> None:
    # at 1 and at 2, 3 seconds each: 1 to 4, 4 to 7
    assert replay([Work(1, [message(3)]), Work(1, [message(3)])]).end == 7


def test_work_waits_for_what_it_needs() -> None:
    # Both gathers start at 0: there at 2 and at 4.
    played = replay([Work(0, [message(2), message(2)]), Work(1, needs=1), Work(1, needs=2)])
    assert played.end == 5 and played.waited == pytest.approx(2 + 1)


def test_a_message_takes_its_share_of_the_core() -> None:
    # 2 s on the link, 1 s of them on the core: the next 3 s of work end at 4 instead of 3.
    played = replay([Work(0, [message(2, cpu=1)]), Work(3)])
    assert (played.end, played.stolen) == (4, 1)
    # Half of the transfer meets work: half of its CPU is stolen.
    assert replay([Work(0, [message(2, cpu=1)]), Work(0.5)]).stolen == pytest.approx(0.5)


def test_a_transfer_that_needs_the_whole_core_stops_the_work() -> None:
    assert replay([Work(0, [message(2, cpu=2)]), Work(1)]).end == pytest.approx(3)


times = st.floats(0, 10)
steps = st.lists(st.tuples(times, st.lists(st.tuples(times, st.floats(0, 1)), max_size=3)), min_size=1, max_size=6)


@given(steps)
def test_end_is_between_the_longer_of_both_and_their_sum(found: list[tuple[float, list[tuple[float, float]]]]) -> None:
    played = replay([Work(seconds, [message(s, cpu=s * share) for s, share in sent]) for seconds, sent in found])
    work = sum(seconds for seconds, _ in found)
    link = sum(seconds for _, sent in found for seconds, _ in sent)
    cpu = sum(seconds * share for _, sent in found for seconds, share in sent)
    assert played.end >= max(work, link) - 1e-6
    assert played.end <= work + link + cpu + 1e-6
    assert played.stolen <= cpu + 1e-6
    assert played.end == pytest.approx(played.work + played.waited + played.stolen)
