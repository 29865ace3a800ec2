"""One rank of a peer of `compressed_loss`: DistributedDataParallel with a hook, on the text and settings of our run.

    torchrun --nproc-per-node 2 -m benchmarks.compressed_peer --peer '{"hook": "fp16"}' KEY=VALUE …

The same initial weights, samples, rate, clipping and decay as ours in the same order; rank 0 prints the loss over the
whole validation split as JSON.
"""

import json

import click
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.settings import Peer
from benchmarks.torch_loops import LossModule, compress, make_adamw
from hvd_transformer.config import Config, load
from hvd_transformer.data.build_once import ALONE
from hvd_transformer.data.sampler import Replica
from hvd_transformer.tasks.language_model_task import LanguageModelTask
from hvd_transformer.training.job_setup import initial_weights
from hvd_transformer.training.lr_schedule import learning_rate
from hvd_transformer.training.process import tune_memory

PRESET = "shakespeare-char"


def train(config: Config, task: LanguageModelTask, peer: Peer) -> LossModule:
    """The module after `training.max_steps` steps."""
    size, steps = torch.distributed.get_world_size(), config.training.max_steps
    assert config.optimizer.clip_norm is not None and steps is not None
    inner = LossModule(task.model)
    model = DistributedDataParallel(
        inner, bucket_cap_mb=peer.bucket_mb, gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False
    )
    compress(model, peer, steps)
    parameters = list(inner.parameters())
    optimizer, step = make_adamw(config, inner, parameters, size), 0
    for epoch in range(config.training.epochs):
        for plan in task.sampler.epoch():
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config.optimizer, size, step, epoch, steps)
            optimizer.zero_grad(set_to_none=True)
            model(*task.batch(epoch, plan.accumulation[0])).backward()
            nn.utils.clip_grad_norm_(parameters, config.optimizer.clip_norm, foreach=True)
            optimizer.step()
            step += 1
            if step == steps:
                return inner
    return inner


@torch.no_grad()
def validation_loss(model: LossModule, task: LanguageModelTask) -> float:
    """The mean over all targets of the validation split, of which each rank takes its part."""
    totals = torch.zeros(2, dtype=torch.float64)
    for inputs, targets in task.evaluation_batches("valid"):
        totals += torch.tensor([float(model(inputs, targets)) * targets.numel(), targets.numel()])
    torch.distributed.all_reduce(totals)
    return float(totals[0] / totals[1])


@click.command()
@click.option("--peer", required=True, help="A `settings.Peer` as JSON.")
@click.argument("settings", nargs=-1)
def main(peer: str, settings: tuple[str, ...]) -> None:
    """Train and evaluate one rank."""
    tune_memory()
    config = load(preset=PRESET, overrides=settings)
    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    data = LanguageModelTask.prepare(config, ALONE)
    with initial_weights(config):
        task = LanguageModelTask(config, data, Replica(rank, size))
        assert isinstance(task.model, nn.Module)
    model = train(config, task, Peer(**json.loads(peer)))
    loss = validation_loss(model, task)
    if rank == 0:
        click.echo(json.dumps({"valid_loss": loss}))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
