"""torch.distributed.pipelining over gloo, two ranks: 1F1B and its zero-bubble schedules, contestants' processes.

    schedule            stages  layers a stage   rank 0   rank 1
    torch-1f1b          2       5 5              0        1
    torch-zb1p          2       5 5              0        1       InterleavedZeroBubble, one stage a rank (ZB-H1)
    torch-interleaved   4       3 2 2 3          0 2      1 3     InterleavedZeroBubble
    torch-zbv           4       3 2 2 3          0 3      1 2     ZBVZeroBubble: both halves even, but for the head

The layers are those of `plain_model`, whose head is a module of the last stage: torch's schedules find no gradient of
weights that only the loss function has.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from benchmarks.channel import Done, serve
from benchmarks.plain_model import PlainLanguageModel, sum_of_losses
from benchmarks.settings import Peer
from benchmarks.torch_loops import make_adamw, make_model, make_units
from benchmarks.workload import SyntheticTask, make_config
from hvd_transformer.data.sampler import Replica


class Pipelining(NamedTuple):
    """A schedule, its layers a stage, and its stages by rank."""

    schedule: Callable[..., Any]
    layers: Sequence[int]
    stages: Sequence[Sequence[int]]


TORCH_PIPELINES = {
    "torch-1f1b": Pipelining(Schedule1F1B, (5, 5), ((0,), (1,))),
    "torch-zb1p": Pipelining(ScheduleInterleavedZeroBubble, (5, 5), ((0,), (1,))),
    "torch-interleaved": Pipelining(ScheduleInterleavedZeroBubble, (3, 2, 2, 3), ((0, 2), (1, 3))),
    "torch-zbv": Pipelining(ScheduleZBVZeroBubble, (3, 2, 2, 3), ((0, 3), (1, 2))),
}


def torch_pipeline(socket: str, settings: Sequence[str], peer: Peer, kind: str) -> None:
    """The same model, data, rate and clipping as our pipeline."""
    config, chosen = make_config(settings), TORCH_PIPELINES[kind]
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    task = SyntheticTask(config, Replica(0, 1))  # each rank makes the same model and keeps its stages
    model = make_model(task, Peer(plain=True))
    assert isinstance(model, PlainLanguageModel)
    ranges = list(pairwise(accumulate(chosen.layers, initial=0)))
    own = {number: nn.Sequential(*model.layers[slice(*ranges[number])]) for number in chosen.stages[rank]}
    if peer.compiled:
        for module in own.values():
            module.compile()
    parameters = [weight for module in own.values() for weight in module.parameters()]
    first, last = 0 in own, len(ranges) - 1 in own

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return sum_of_losses(logits, targets) / task.targets_per_step

    stages = [PipelineStage(module, number, len(ranges), torch.device("cpu")) for number, module in own.items()]
    schedule = chosen.schedule(
        stages[0] if chosen.schedule is Schedule1F1B else stages,
        config.parallel.micro_batches,
        loss_fn=loss_of,
        scale_grads=False,
    )
    optimizer = make_adamw(config, model, parameters, 1)
    clip_norm, units = config.optimizer.clip_norm, make_units(config, task)
    assert clip_norm is not None

    def step() -> Done:
        part = next(units)
        inputs, targets = task.batch(0, part)
        optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        schedule.step(
            *([inputs] if first else []),
            target=targets if last else None,
            losses=losses if last else None,
            return_outputs=False,
        )
        gradients = [weight.grad for weight in parameters if weight.grad is not None]
        squared = nn.utils.get_total_norm(gradients, foreach=True) ** 2
        torch.distributed.all_reduce(squared)
        nn.utils.clip_grads_with_norm_(parameters, clip_norm, squared.sqrt(), foreach=True)
        optimizer.step()
        # The rank with the last stage speaks for all.
        return Done(len(part) * task.length, torch.stack(losses).sum().detach()) if last else Done(0, None)

    serve(socket, step)
    torch.distributed.destroy_process_group()
