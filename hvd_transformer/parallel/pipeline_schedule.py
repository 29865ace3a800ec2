"""Pipeline schedules: the order of forwards and backwards in each stage, for gpipe, 1f1b and zero_bubble."""

from itertools import chain
from typing import Literal, NamedTuple, get_args


class Operation(NamedTuple):
    """One pass of one micro-batch through one stage."""

    kind: Literal["forward", "backward", "weights"]
    micro_batch: int


Schedule = list[list[Operation]]  # by stage

ScheduleName = Literal["gpipe", "1f1b", "zero_bubble"]
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)


def make_schedule(kind: ScheduleName, num_stages: int, num_micro_batches: int) -> Schedule:
    """Return the operations of every stage for one accumulation step.

    gpipe: Huang et al. 2019, arXiv 1811.06965. 1f1b with a flush: Narayanan et al. 2021, arXiv 2104.04473, section 2.2.
    zero_bubble: ZB-H1 of Qi et al. 2023, arXiv 2401.10241, section 3.1, where stage s defers weight gradients by s
    micro-batches, so that every stage holds as many activations as the first stage of 1f1b.
    """
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
    """The schedule of evaluation: every micro-batch forward, no backward."""
    return [[Operation("forward", micro_batch) for micro_batch in range(num_micro_batches)] for _ in range(num_stages)]
