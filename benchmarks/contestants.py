"""The processes that are measured: `python -m benchmarks.contestants KIND SOCKET [KEY=VALUE ...]`, one a rank.

trainer   the package's own `Trainer.step` over Horovod; started without a launcher, a world of one
ddp       torch's DistributedDataParallel over gloo, as its documentation has it; started by torchrun
"""

from collections.abc import Callable, Sequence

import click
import torch
from torch import Tensor, nn

from benchmarks.channel import serve
from benchmarks.workload import SyntheticTask, make_config
from hvd_transformer.comm.world import World
from hvd_transformer.data.sampler import Replica
from hvd_transformer.models.language_model import LanguageModel
from hvd_transformer.parallel.layout import Layout
from hvd_transformer.parallel.replicas import broadcast_parameters, check_replicas
from hvd_transformer.training.allocator import keep_freed_memory
from hvd_transformer.training.loop import Position, Trainer
from hvd_transformer.training.optimizer import names_without_decay
from hvd_transformer.training.schedule import peak_rate


def trainer(socket: str, settings: Sequence[str]) -> None:
    """Ours: what `training.job.run` assembles, less files and progress."""
    keep_freed_memory()
    config = make_config(settings)
    world = World.start()
    layout = Layout.of(config, world)
    task = SyntheticTask(config, Replica(layout.replica, layout.dp))
    job = Trainer(config, world, layout, task, Position())
    broadcast_parameters(job.buckets, world)
    plans = job.steps()

    def step() -> int:
        plan = next(plans)
        job.step(plan)
        return sum(map(len, plan.rounds)) * task.length

    serve(socket, step)
    check_replicas(job.buckets, world, "after the benchmark")
    world.close()


class LossModule(nn.Module):
    """DistributedDataParallel reduces what a module's `forward` used: here that is the loss."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss, count = self.model.loss(inputs, targets)
        return loss / count


def ddp(socket: str, settings: Sequence[str]) -> None:
    """The peer: the same model, data, rate and clipping, with torch's own tools."""
    config = make_config(settings)
    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    task = SyntheticTask(config, Replica(rank, size))
    model = nn.parallel.DistributedDataParallel(LossModule(task.model))
    no_decay, options = names_without_decay(task.model), config.optimizer
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, weight in task.model.named_parameters():
        groups[name not in no_decay].append(weight)
    optimizer = torch.optim.AdamW(
        [
            {"params": groups[True], "weight_decay": options.weight_decay},
            {"params": groups[False], "weight_decay": 0.0},
        ],
        lr=peak_rate(options, size),
        betas=options.betas,
        eps=options.eps,
        fused=True,
    )
    clip_norm = options.clip_norm
    assert clip_norm is not None
    units = (part for epoch in range(config.training.epochs) for plan in task.sampler.epoch() for part in plan.rounds)

    def step() -> int:
        part = next(units)
        optimizer.zero_grad(set_to_none=True)
        model(*task.batch(0, part)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        return len(part) * task.length

    serve(socket, step)
    torch.distributed.destroy_process_group()


KINDS: dict[str, Callable[[str, Sequence[str]], None]] = {"trainer": trainer, "ddp": ddp}


@click.command()
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.argument("socket")
@click.argument("settings", nargs=-1)
def main(kind: str, socket: str, settings: tuple[str, ...]) -> None:
    """One rank of a contestant."""
    KINDS[kind](socket, settings)


if __name__ == "__main__":
    main()
