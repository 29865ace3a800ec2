"""Which micro-batch a pipeline's stages work on, in which order: plain lists, and a clock that runs them.

Three stages, four micro-batches, `[m]` the backward of micro-batch m:

    gpipe   stage 0   0  1  2  3  .  .  .  . [0][1][2][3]   every forward, then every backward
            stage 1   .  0  1  2  3  .  . [0][1][2][3] .
            stage 2   .  .  0  1  2  3 [0][1][2][3] .  .

    1f1b    stage 0   0  1  2  .  . [0] 3 [1] . [2] . [3]   a backward as soon as it can run, so that stage s
            stage 1   .  0  1  . [0] 2 [1] 3 [2] . [3] .    of N holds the activations of N - s micro-batches
            stage 2   .  .  0 [0] 1 [1] 2 [2] 3 [3] .  .

    zero_bubble          0  1  2  .  . [0](0) 3 [1](1)[2](2)[3](3)   1f1b with its backwards in two: [m] makes the
                         .  0  1  . [0] 2 [1](0) 3 [2](1)[3](2)(3)   gradient that the stage before waits for, (m)
                         .  .  0 [0] 1 [1] 2 [2](0) 3 [3](1)(2)(3)   the weights', where a stage would have to wait

The first two idle as long; they differ in what is held. Backwards run in the order of the micro-batches in all, so
that gradients add up in the same order as without a pipeline.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Literal, NamedTuple, get_args


class Operation(NamedTuple):
    """One pass of one micro-batch through one stage."""

    kind: Literal["forward", "backward", "weights"]
    micro_batch: int


Schedule = list[list[Operation]]  # of every stage, in order
Timeline = list[list[tuple[Operation, float, float]]]  # the same with start and end
ScheduleName = Literal["gpipe", "1f1b", "zero_bubble"]
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)


def make_schedule(kind: ScheduleName, num_stages: int, num_micro_batches: int) -> Schedule:
    """GPipe (Huang et al. 2019), 1F1B with a flush (Narayanan et al. 2021, arXiv 2104.04473, section 2.2), or ZB-H1
    (Qi et al. 2023, arXiv 2401.10241, section 3.1), where stage s is s micro-batches late with the weights'
    gradients, so that all stages hold as much as 1F1B's first."""
    if kind not in SCHEDULES:
        raise ValueError(f"no such schedule: {kind!r}")
    schedule = []
    for stage, forwards in enumerate(forward_only(num_stages, num_micro_batches)):
        backwards = [[Operation("backward", operation.micro_batch)] for operation in forwards]
        if kind == "zero_bubble":
            weights = [Operation("weights", operation.micro_batch) for operation in forwards]
            for operations, late in zip(backwards[stage:], weights, strict=False):
                operations.append(late)
            backwards[-1] += weights[max(num_micro_batches - stage, 0) :]
        ahead = num_micro_batches if kind == "gpipe" else min(num_stages - stage - 1, num_micro_batches)
        in_turn = ([forward, *backward] for forward, backward in zip(forwards[ahead:], backwards, strict=False))
        schedule.append([*forwards[:ahead], *chain(*in_turn), *chain(*backwards[num_micro_batches - ahead :])])
    return schedule


def forward_only(num_stages: int, num_micro_batches: int) -> Schedule:
    """Evaluation: every micro-batch forward, no backward."""
    if num_stages < 1 or num_micro_batches < 1:
        raise ValueError(f"{num_stages} stages and {num_micro_batches} micro-batches: there must be one of each")
    return [[Operation("forward", micro_batch) for micro_batch in range(num_micro_batches)] for _ in range(num_stages)]


def most_in_flight(operations: Sequence[Operation]) -> int:
    """Micro-batches whose activations a stage holds at most: from its first operation on one to the end of its last."""
    last = {operation.micro_batch: index for index, operation in enumerate(operations)}
    held: set[int] = set()
    most = 0
    for index, (_, micro_batch) in enumerate(operations):
        held.add(micro_batch)
        most = max(most, len(held))
        if index == last[micro_batch]:
            held.remove(micro_batch)
    return most


def simulate(
    schedule: Schedule,
    forward_times: Sequence[float],
    backward_times: Sequence[float],
    weights_times: Sequence[float] | None = None,
) -> Timeline:
    """Start and end of every operation, where stage s needs `forward_times[s]` and `backward_times[s]` for a
    micro-batch and passing it on costs nothing. Of a backward in two, `weights_times[s]` (None: half) is the weights'.

    Raises ValueError where stages wait for each other for ever, or for what no stage does.
    """
    if not len(schedule) == len(forward_times) == len(backward_times):
        raise ValueError(f"{len(schedule)} stages, times for {len(forward_times)} and {len(backward_times)}")
    split = any(operation.kind == "weights" for operations in schedule for operation in operations)
    weights_times = weights_times or [time / 2 for time in backward_times]
    times: dict[str, Sequence[float]] = {
        "forward": forward_times,
        "weights": weights_times,
        "backward": [
            whole - weights if split else whole for whole, weights in zip(backward_times, weights_times, strict=True)
        ],
    }
    timeline: Timeline = [[] for _ in schedule]
    ends: dict[tuple[int, Operation], float] = {}
    moved = True
    while moved:
        moved = False
        for stage, operations in enumerate(schedule):
            done = timeline[stage]
            for operation in operations[len(done) :]:
                needs = list(_needs(stage, operation, len(schedule)))
                if any(need not in ends for need in needs):
                    break
                start = max([done[-1][2] if done else 0.0, *(ends[need] for need in needs)])
                end = start + times[operation.kind][stage]
                ends[stage, operation] = end
                done.append((operation, start, end))
                moved = True
    stuck = [
        f"stage {stage} before {operations[len(done)].kind} {operations[len(done)].micro_batch}"
        for stage, (operations, done) in enumerate(zip(schedule, timeline, strict=True))
        if len(done) < len(operations)
    ]
    if stuck:
        raise ValueError(f"the schedule deadlocks: {', '.join(stuck)}")
    return timeline


def _needs(stage: int, operation: Operation, num_stages: int) -> Iterator[tuple[int, Operation]]:
    """What must have ended before this can start."""
    if operation.kind == "weights":
        yield stage, Operation("backward", operation.micro_batch)
        return
    if operation.kind == "backward":
        yield stage, Operation("forward", operation.micro_batch)
    before = stage - 1 if operation.kind == "forward" else stage + 1
    if 0 <= before < num_stages:
        yield before, operation


def makespan(timeline: Timeline) -> float:
    """When the last operation ends."""
    return max((end for operations in timeline for _, _, end in operations), default=0.0)


def bubble(timeline: Timeline) -> float:
    """The share of the stages' time that is idle: (N - 1) / (M + N - 1) for N equal stages, M micro-batches."""
    total = len(timeline) * makespan(timeline)
    busy = sum(end - start for operations in timeline for _, start, end in operations)
    return 1 - busy / total if total else 0.0
