"""The processes that are measured: `python -m benchmarks.contestants KIND SOCKET [KEY=VALUE ...]`, one a rank.

trainer   the package's own `Trainer.step` over Horovod; started without a launcher, a world of one
ddp       torch's DistributedDataParallel over gloo, as its documentation has it; started by torchrun
zero      the same with torch's ZeroRedundancyOptimizer
torch1f1b torch's PipelineStage and Schedule1F1B over gloo, one stage a rank; started by torchrun
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise

import click
import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.channel import Done, serve
from benchmarks.workload import SyntheticTask, make_config
from hvd_transformer.comm.horovod_env import launched
from hvd_transformer.comm.world import World
from hvd_transformer.config.schema import Config
from hvd_transformer.data.sampler import Replica
from hvd_transformer.gradients.optimizer import names_without_decay
from hvd_transformer.models.language_model import LanguageModel
from hvd_transformer.parallel.mesh import ParallelMesh, process_groups
from hvd_transformer.parallel.replica_check import broadcast_parameters
from hvd_transformer.training.job_setup import compile_layers
from hvd_transformer.training.lr_schedule import peak_rate
from hvd_transformer.training.process import keep_freed_memory
from hvd_transformer.training.state import TrainState
from hvd_transformer.training.trainer import Trainer


def trainer(socket: str, settings: Sequence[str]) -> None:
    """Ours: what `training.train_job.run` assembles, less files and progress."""
    keep_freed_memory()
    config = make_config(settings)
    world = World.start(groups=process_groups(launched().size, config.parallel.tensor))
    layout = ParallelMesh.of(config, world)
    task = SyntheticTask(config, Replica(layout.dp_rank, layout.dp))
    job = Trainer(config, world, layout, task, TrainState())
    broadcast_parameters(job.engine.buffers, layout.dp_group)
    if (why := compile_layers(config, task, layout, world)) is not None:
        raise SystemExit(f"training.compile: off, {why}")
    plans = job.steps()

    def step() -> Done:
        plan = next(plans)
        loss = job.step(plan).totals.loss
        return Done(sum(map(len, plan.accumulation)) * task.length // layout.tp, loss)  # its share of them

    serve(socket, step)
    job.engine.check_replicas("after the benchmark")
    job.engine.close()
    world.close()


class LossModule(nn.Module):
    """DistributedDataParallel reduces what a module's `forward` used: here that is the loss."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.model.head.loss(self.model.hidden(inputs), targets) / targets.numel()


def ddp(socket: str, settings: Sequence[str], *, zero: bool = False) -> None:
    """The peer: the same model, data, rate and clipping, with torch's own tools."""
    config = make_config(settings)
    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    task = SyntheticTask(config, Replica(rank, size))
    model = nn.parallel.DistributedDataParallel(LossModule(task.model))
    optimizer = make_adamw(config, task.model, list(task.model.parameters()), size, zero)
    clip_norm, units = config.optimizer.clip_norm, make_units(config, task)
    assert clip_norm is not None

    def step() -> Done:
        part = next(units)
        optimizer.zero_grad(set_to_none=True)
        loss = model(*task.batch(0, part))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        return Done(len(part) * task.length, loss.item())

    serve(socket, step)
    torch.distributed.destroy_process_group()


def torch_1f1b(socket: str, settings: Sequence[str]) -> None:
    """The pipeline's peer: the same layers, cut at `parallel.partition`, a rank a stage, with torch's own tools."""
    config = make_config(settings)
    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    task = SyntheticTask(config, Replica(0, 1))  # each rank makes the same model and keeps its stage
    counts = config.parallel.partition
    assert isinstance(counts, list) and len(counts) == size
    *_, head = layers = task.layers
    start, stop = list(pairwise(accumulate(counts, initial=0)))[rank]
    own, last = [layer.module for layer in layers[start:stop]], rank == size - 1
    parameters = [weight for module in own for weight in module.parameters()]
    stage = PipelineStage(nn.Sequential(*(own[:-1] if last else own)), rank, size, torch.device("cpu"))

    def loss_of(hidden: Tensor, targets: Tensor) -> Tensor:
        loss = head.run(hidden, targets)
        assert isinstance(loss, Tensor)
        return loss / task.targets_per_step

    schedule = Schedule1F1B(stage, config.parallel.micro_batches, loss_fn=loss_of, scale_grads=False)
    optimizer = make_adamw(config, task.model, parameters, 1)
    clip_norm, units = config.optimizer.clip_norm, make_units(config, task)
    assert clip_norm is not None

    def step() -> Done:
        part = next(units)
        inputs, targets = task.batch(0, part)
        optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        schedule.step(
            *([] if rank else [inputs]),
            target=targets if last else None,
            losses=losses if last else None,
            return_outputs=False,
        )
        squared = nn.utils.get_total_norm([weight.grad for weight in parameters if weight.grad is not None]) ** 2
        torch.distributed.all_reduce(squared)
        nn.utils.clip_grads_with_norm_(parameters, clip_norm, squared.sqrt())
        optimizer.step()
        # The last rank speaks for all.
        return Done(len(part) * task.length, sum(loss.item() for loss in losses)) if last else Done(0, None)

    serve(socket, step)
    torch.distributed.destroy_process_group()


def make_adamw(
    config: Config, model: nn.Module, parameters: Sequence[nn.Parameter], dp: int, zero: bool = False
) -> torch.optim.Optimizer:
    """torch's AdamW of these of the model's parameters, set as ours; `zero`: its state shared by the ranks."""
    no_decay, options = names_without_decay(model), config.optimizer
    chosen = {id(weight) for weight in parameters}
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, weight in model.named_parameters():
        if id(weight) in chosen:
            groups[name not in no_decay].append(weight)
    chosen_groups = [
        {"params": groups[True], "weight_decay": options.weight_decay},
        {"params": groups[False], "weight_decay": 0.0},
    ]
    more = {"lr": peak_rate(options, dp), "betas": options.betas, "eps": options.eps, "fused": True}
    if zero:
        return ZeroRedundancyOptimizer(chosen_groups, torch.optim.AdamW, parameters_as_bucket_view=True, **more)
    return torch.optim.AdamW(chosen_groups, **more)


def make_units(config: Config, task: SyntheticTask) -> Iterator[range]:
    """What each round takes, epoch after epoch."""
    return (part for _ in range(config.training.epochs) for plan in task.sampler.epoch() for part in plan.accumulation)


KINDS: dict[str, Callable[[str, Sequence[str]], None]] = {
    "trainer": trainer,
    "ddp": ddp,
    "zero": partial(ddp, zero=True),
    "torch1f1b": torch_1f1b,
}


@click.command()
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.argument("socket")
@click.argument("settings", nargs=-1)
def main(kind: str, socket: str, settings: tuple[str, ...]) -> None:
    """One rank of a contestant."""
    KINDS[kind](socket, settings)


if __name__ == "__main__":
    main()
