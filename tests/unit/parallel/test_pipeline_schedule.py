"""Every stage does every micro-batch once, in the papers' order, and the clock agrees with the closed forms."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_transformer.parallel.pipeline_schedule import (
    SCHEDULES,
    Operation,
    Schedule,
    ScheduleName,
    forward_only,
    make_schedule,
)
from hvd_transformer.planning.pass_memory import PASS_MODES, PassMemory, stage_activations
from hvd_transformer.planning.schedule_drawing import bubble, makespan, simulate

Kind = Literal["gpipe", "1f1b"]
WHOLE: tuple[Kind, ...] = ("gpipe", "1f1b")  # their backwards are one operation
sizes = st.integers(1, 7)


def operations(text: str) -> list[Operation]:
    """`F0 B0 W0` as operations."""
    kinds: dict[str, Literal["forward", "backward", "weights"]] = {"F": "forward", "B": "backward", "W": "weights"}
    return [Operation(kinds[word[0]], int(word[1:])) for word in text.split()]


@pytest.mark.parametrize(
    ("kind", "stages"),
    [
        ("gpipe", ["F0 F1 F2 F3 B0 B1 B2 B3"] * 3),
        # Figure 4 of Narayanan et al. 2021, with one stage and four micro-batches fewer.
        ("1f1b", ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]),
        (
            "zero_bubble",
            [
                "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
                "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
                "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
            ],
        ),
    ],
)
def test_three_stages_and_four_micro_batches_as_in_the_papers(kind: ScheduleName, stages: list[str]) -> None:
    assert make_schedule(kind, 3, 4) == [operations(stage) for stage in stages]


def test_one_micro_batch_goes_through_and_back() -> None:
    for kind in WHOLE:
        assert make_schedule(kind, 4, 1) == [operations("F0 B0")] * 4
    assert make_schedule("zero_bubble", 4, 1) == [operations("F0 B0 W0")] * 4


@pytest.mark.parametrize("kind", SCHEDULES)
@given(sizes, sizes)
def test_every_stage_does_every_micro_batch_once_and_in_order(kind: ScheduleName, num_stages: int, count: int) -> None:
    schedule = make_schedule(kind, num_stages, count)
    assert len(schedule) == num_stages
    directions = ["forward", "backward", *(["weights"] if kind == "zero_bubble" else [])]
    for stage in schedule:
        assert Counter(operation.kind for operation in stage) == dict.fromkeys(directions, count)
        for direction in directions:
            assert [operation.micro_batch for operation in stage if operation.kind == direction] == list(range(count))


def most_in_flight(operations: Sequence[Operation]) -> int:
    """The largest number of micro-batches whose activations a stage holds at the same time."""
    one = PassMemory(inputs=0, forward=1, kept=1, backward=1, late=1)
    return stage_activations(operations, 0, "never", dict.fromkeys(PASS_MODES, one))


@given(sizes, sizes)
def test_in_flight_are_all_in_gpipe_and_the_stages_that_follow_in_1f1b(num_stages: int, count: int) -> None:
    assert [most_in_flight(stage) for stage in make_schedule("gpipe", num_stages, count)] == [count] * num_stages
    assert [most_in_flight(stage) for stage in make_schedule("1f1b", num_stages, count)] == [
        min(num_stages - stage, count) for stage in range(num_stages)
    ]
    zero_bubble = make_schedule("zero_bubble", num_stages, count)
    assert [most_in_flight(stage) for stage in zero_bubble] == [min(num_stages, count)] * num_stages


def test_evaluation_goes_forward_alone() -> None:
    assert forward_only(2, 3) == [operations("F0 F1 F2")] * 2


@pytest.mark.parametrize("kind", WHOLE)
@given(sizes, sizes, st.integers(1, 9), st.integers(1, 9))
def test_equal_stages_idle_as_long_as_the_closed_form(
    kind: Kind, num_stages: int, count: int, forward: int, backward: int
) -> None:
    schedule = make_schedule(kind, num_stages, count)
    timeline = simulate(schedule, [forward] * num_stages, [backward] * num_stages)
    assert makespan(timeline) == (count + num_stages - 1) * (forward + backward)
    assert math.isclose(bubble(timeline), (num_stages - 1) / (count + num_stages - 1), abs_tol=1e-12)


@given(sizes, st.integers(1, 9), st.integers(0, 9))
def test_the_zero_bubble_schedule_idles_as_long_as_its_paper_says(num_stages: int, time: int, more: int) -> None:
    """(N - 1)(F + B - W), of a forward F and the halves B and W of a backward: section 3.1 and table 1 of Qi et al.
    2023, for at least as many micro-batches as stages, and here for F = B = W."""
    count = num_stages + more
    timeline = simulate(make_schedule("zero_bubble", num_stages, count), [time] * num_stages, [2 * time] * num_stages)
    assert makespan(timeline) == (3 * count + num_stages - 1) * time


@given(sizes, sizes, st.integers(0, 9), st.integers(0, 9))
def test_the_zero_bubble_schedule_is_never_slower(num_stages: int, count: int, forward: int, backward: int) -> None:
    times = [forward] * num_stages, [backward] * num_stages
    slower, faster = (
        makespan(simulate(make_schedule(kind, num_stages, count), *times)) for kind in ("1f1b", "zero_bubble")
    )
    assert faster <= slower


@given(sizes, sizes)
def test_forwards_alone_have_the_same_bubble(num_stages: int, count: int) -> None:
    timeline = simulate(forward_only(num_stages, count), [3] * num_stages, [0] * num_stages)
    assert makespan(timeline) == 3 * (count + num_stages - 1)
    assert math.isclose(bubble(timeline), (num_stages - 1) / (count + num_stages - 1), abs_tol=1e-12)


@settings(deadline=None)
@given(st.data(), st.sampled_from(SCHEDULES), sizes, sizes)
def test_an_operation_starts_as_soon_as_what_it_needs_has_ended(
    data: st.DataObject, kind: ScheduleName, num_stages: int, count: int
) -> None:
    times = st.lists(st.integers(0, 9), min_size=num_stages, max_size=num_stages)
    forward, backward = data.draw(times), data.draw(times)
    schedule = make_schedule(kind, num_stages, count)
    timeline = simulate(schedule, forward, backward)
    ends = {(stage, *operation): end for stage, line in enumerate(timeline) for operation, _, end in line}
    for stage, line in enumerate(timeline):
        assert [operation for operation, _, _ in line] == schedule[stage]
        free = 0.0
        for (direction, micro_batch), start, end in line:
            needed = [free]
            if direction == "forward":
                assert end - start == forward[stage]
                if stage > 0:
                    needed.append(ends[stage - 1, "forward", micro_batch])
            elif direction == "weights":
                assert end - start == backward[stage] / 2
                needed.append(ends[stage, "backward", micro_batch])
            else:
                assert end - start == (backward[stage] / 2 if kind == "zero_bubble" else backward[stage])
                needed.append(ends[stage, "forward", micro_batch])
                if stage < num_stages - 1:
                    needed.append(ends[stage + 1, "backward", micro_batch])
            assert start == max(needed)
            free = end


def test_unequal_stages_by_hand() -> None:
    timeline = simulate(make_schedule("1f1b", 2, 2), [1, 2], [3, 4])
    assert [[(start, end) for _, start, end in line] for line in timeline] == [
        [(0, 1), (1, 2), (7, 10), (13, 16)],
        [(1, 3), (3, 7), (7, 9), (9, 13)],
    ]
    assert bubble(timeline) == 1 - (8 + 12) / 32


@pytest.mark.parametrize(
    ("schedule", "stuck"),
    [
        # Each waits for what the other does next.
        (["F0 B0 F1 B1", "F1 F0 B0 B1"], "stage 0 before backward 0, stage 1 before forward 1"),
        (["B0 F0"], "stage 0 before backward 0"),
        (["F0 B0", "F0"], "stage 0 before backward 0"),  # no stage will do it
        (["F0", "F0 F1"], "stage 1 before forward 1"),
    ],
)
def test_a_deadlock_is_told_with_the_stages_that_wait(schedule: list[str], stuck: str) -> None:
    stages: Schedule = [operations(stage) for stage in schedule]
    with pytest.raises(ValueError, match=f"^the schedule deadlocks: {stuck}$"):
        simulate(stages, [1.0] * len(stages), [1.0] * len(stages))


def test_no_time_at_all_has_no_bubble() -> None:
    assert bubble(simulate(forward_only(2, 2), [0, 0], [0, 0])) == 0
