"""Which micro-batch a pipeline's stages work on, in which order: plain lists, and a clock that runs them.

Three stages, four micro-batches, `[m]` the backward of micro-batch m:

    gpipe   stage 0   0  1  2  3  .  .  .  . [0][1][2][3]   every forward, then every backward
            stage 1   .  0  1  2  3  .  . [0][1][2][3] .
            stage 2   .  .  0  1  2  3 [0][1][2][3] .  .

    1f1b    stage 0   0  1  2  .  . [0] 3 [1] . [2] . [3]   a backward as soon as it can run, so that stage s
            stage 1   .  0  1  . [0] 2 [1] 3 [2] . [3] .    of N holds the activations of N - s micro-batches
            stage 2   .  .  0 [0] 1 [1] 2 [2] 3 [3] .  .

Both idle as long; they differ in what is held. Backwards run in the order of the micro-batches in both, so that
gradients add up in the same order as without a pipeline.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Literal, NamedTuple


class Operation(NamedTuple):
    """One pass of one micro-batch through one stage."""

    kind: Literal["forward", "backward"]
    micro_batch: int


Schedule = list[list[Operation]]  # of every stage, in order
Timeline = list[list[tuple[Operation, float, float]]]  # the same with start and end


def make_schedule(kind: Literal["gpipe", "1f1b"], num_stages: int, num_micro_batches: int) -> Schedule:
    """GPipe (Huang et al. 2019) or 1F1B with a flush (Narayanan et al. 2021, arXiv 2104.04473, section 2.2)."""
    if kind not in ("gpipe", "1f1b"):
        raise ValueError(f"no such schedule: {kind!r}")
    schedule = []
    for stage, forwards in enumerate(forward_only(num_stages, num_micro_batches)):
        backwards = [Operation("backward", operation.micro_batch) for operation in forwards]
        ahead = num_micro_batches if kind == "gpipe" else min(num_stages - stage - 1, num_micro_batches)
        in_turn = chain.from_iterable(zip(forwards[ahead:], backwards, strict=False))
        schedule.append([*forwards[:ahead], *in_turn, *backwards[num_micro_batches - ahead :]])
    return schedule


def forward_only(num_stages: int, num_micro_batches: int) -> Schedule:
    """Evaluation: every micro-batch forward, no backward."""
    if num_stages < 1 or num_micro_batches < 1:
        raise ValueError(f"{num_stages} stages and {num_micro_batches} micro-batches: there must be one of each")
    return [[Operation("forward", micro_batch) for micro_batch in range(num_micro_batches)] for _ in range(num_stages)]


def most_in_flight(operations: Sequence[Operation]) -> int:
    """Micro-batches whose activations a stage holds at most: from forward to backward, or to the forward's end
    where no backward follows."""
    kept = {operation.micro_batch for operation in operations if operation.kind == "backward"}
    held: set[int] = set()
    most = 0
    for kind, micro_batch in operations:
        if kind == "forward":
            held.add(micro_batch)
            most = max(most, len(held))
        if kind == "backward" or micro_batch not in kept:
            held.discard(micro_batch)
    return most


def simulate(schedule: Schedule, forward_times: Sequence[float], backward_times: Sequence[float]) -> Timeline:
    """Start and end of every operation, where stage s needs `forward_times[s]` and `backward_times[s]` for a
    micro-batch and passing it on costs nothing.

    Raises ValueError where stages wait for each other for ever, or for what no stage does.
    """
    if not len(schedule) == len(forward_times) == len(backward_times):
        raise ValueError(f"{len(schedule)} stages, times for {len(forward_times)} and {len(backward_times)}")
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
                end = start + (forward_times if operation.kind == "forward" else backward_times)[stage]
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
