"""Training loops of torch's own tools, each a contestant's process: one process, DistributedDataParallel, ZeRO.

All are written for speed: fused AdamW, `foreach` clipping, gradients that are views of the buckets, no number read
before the block's end. `settings.Peer` has what is left to choose.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.channel import Done, serve
from benchmarks.plain_model import PlainLanguageModel, sum_of_losses
from benchmarks.settings import Peer
from benchmarks.workload import SyntheticTask, make_config
from hvd_transformer.config.schema import Config
from hvd_transformer.data.sampler import Replica
from hvd_transformer.gradients.optimizer import names_without_decay
from hvd_transformer.models.language_model import LanguageModel
from hvd_transformer.parallel.precision import autocast
from hvd_transformer.training.lr_schedule import peak_rate


class LossModule(nn.Module):
    """DistributedDataParallel reduces what a module's `forward` used: here that is the loss, of either model."""

    def __init__(self, model: LanguageModel | PlainLanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        model = self.model
        if isinstance(model, PlainLanguageModel):
            return sum_of_losses(model(inputs), targets) / targets.numel()
        return model.head.loss(model.hidden(inputs), targets) / targets.numel()


def plain(socket: str, settings: Sequence[str], peer: Peer) -> None:
    """One process without any communication."""
    config = make_config(settings)
    task = SyntheticTask(config, Replica(0, 1))
    model = make_loss_module(task, peer)
    optimizer = make_adamw(config, model, list(model.parameters()), 1)
    serve(socket, make_step(config, task, model, optimizer, peer))


def ddp(socket: str, settings: Sequence[str], peer: Peer, *, zero: bool = False) -> None:
    """The same model, data, rate and clipping as ours; `zero`: the optimizer's state is shared by the ranks."""
    config = make_config(settings)
    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    task = SyntheticTask(config, Replica(rank, size))
    inner = make_loss_module(task, peer)
    model = DistributedDataParallel(
        inner, bucket_cap_mb=peer.bucket_mb, gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False
    )
    compress(model, peer)
    optimizer = make_adamw(config, inner, list(inner.parameters()), size, zero)
    serve(socket, make_step(config, task, model, optimizer, peer))
    torch.distributed.destroy_process_group()


def make_loss_module(task: SyntheticTask, peer: Peer) -> LossModule:
    """The model with its loss, which is compiled in the first steps if the peer chose so."""
    module = LossModule(make_model(task, peer))
    if peer.compiled:
        module.compile()
    return module


def make_model(task: SyntheticTask, peer: Peer) -> LanguageModel | PlainLanguageModel:
    """The model that the peer chose, with the task's initial weights."""
    assert isinstance(task.model, LanguageModel)
    if not peer.plain:
        return task.model
    model = PlainLanguageModel(task.data.tokenizer.vocab_size, task.config.model, task.length)
    model.load_state_dict(task.model.state_dict())
    return model


def compress(model: DistributedDataParallel, peer: Peer, num_steps: int | None = None) -> None:
    """Register the peer's hook. PowerSGD begins with the second step, which it allows at the earliest with error
    feedback, or after the first tenth of so many steps, like ours; its two sums per bucket are batched by itself."""
    if peer.hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif peer.hook == "powersgd":
        first = 2 if num_steps is None else max(2, num_steps // 10)
        state = powerSGD_hook.PowerSGDState(None, peer.rank, start_powerSGD_iter=first)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def make_step(
    config: Config, task: SyntheticTask, model: nn.Module, optimizer: torch.optim.Optimizer, peer: Peer
) -> Callable[[], Done]:
    """The loop's body."""
    parameters, clip_norm, units = list(model.parameters()), config.optimizer.clip_norm, make_units(config, task)
    assert clip_norm is not None

    def step() -> Done:
        part = next(units)
        inputs, targets = task.batch(0, part)
        optimizer.zero_grad(set_to_none=not peer.keep_gradients)
        with autocast(config.training.precision, inputs.device):
            loss = model(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, clip_norm, foreach=True)
        optimizer.step()
        return Done(len(part) * task.length, loss.detach())

    return step


def make_adamw(
    config: Config, model: nn.Module, parameters: Sequence[nn.Parameter], dp: int, zero: bool = False
) -> torch.optim.Optimizer:
    """torch's AdamW of these of the model's parameters, set as ours; `zero`: its state shared by the ranks.

    `overlap_with_ddp` is not for us: it updates before the norm of the whole gradient is known, and refuses gloo.
    """
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
    """This rank's items of each accumulation step, epoch after epoch."""
    return (part for _ in range(config.training.epochs) for plan in task.sampler.epoch() for part in plan.accumulation)
