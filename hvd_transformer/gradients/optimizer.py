"""torch's optimizers over flat gradient buffers, the norm of the whole gradient, and clipping.

A buffer is two tensors at most (with and without weight decay), so an update is a few kernels. The optimizers are
called as functions: torch's classes around them import its compiler, which takes as long as torch itself.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from hvd_transformer.comm.group import Group
from hvd_transformer.config.schema import Config, OptimizerConfig
from hvd_transformer.gradients.buffers import GradBuffer


def names_without_decay(model: nn.Module) -> set[str]:
    """The parameters without weight decay: biases, norms and embeddings."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return {name for name, weight in model.named_parameters() if weight.ndim < 2 or id(weight) in embeddings}


def state_keys(config: OptimizerConfig) -> tuple[str, ...]:
    """The names of each weight's optimizer state, as in torch's optimizers."""
    if config.name == "sgd":
        return ("momentum_buffer",) if config.momentum else ()
    return ("exp_avg", "exp_avg_sq")


def copies_per_weight(config: Config, dp: int) -> tuple[float, float]:
    """The numbers of gradient and of optimizer state that a rank keeps per weight, with `dp` replicas.

    The errors of compressed gradients count as state.
    """
    shards = 1 if config.parallel.optimizer_shard == "none" else dp
    of_gradients = shards if config.parallel.optimizer_shard == "gradients" else 1
    errors = int(dp > 1 and config.communication.compression not in ("none", "fp16_fp32_sum"))
    return 1 / of_gradients, len(state_keys(config.optimizer)) / shards + errors


@dataclass
class _Group:
    """The parts of the buffers with one weight decay. `steps` has one number per part, on its device."""

    weight_decay: float
    parameters: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    state: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    steps: list[Tensor] = field(default_factory=list)


class FlatOptimizer:
    """Updates the buffers' own parameters from their gradients.

    `state` holds each buffer's state as flat tensors like its own parameters, {"exp_avg": …}; writing into it loads it.
    """

    def __init__(self, config: OptimizerConfig, buffers: Sequence[GradBuffer]) -> None:
        keys = state_keys(config)
        self._config = config
        self.state = [{key: torch.zeros_like(buffer.own_parameters) for key in keys} for buffer in buffers]
        groups = {True: _Group(config.weight_decay), False: _Group(0.0)}
        for buffer, state in zip(buffers, self.state, strict=True):
            for place, decays in buffer.decay_groups():
                group = groups[decays]
                group.parameters.append(buffer.own_parameters[place])
                group.gradients.append(buffer.own_gradients[place])
                group.steps.append(torch.zeros((), dtype=torch.float32, device=buffer.parameters.device))
                for key in keys:
                    group.state[key].append(state[key][place])
        self._groups = [group for group in groups.values() if group.parameters]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """One update at this learning rate."""
        for group in self._groups:
            if self._config.name == "sgd":
                self._sgd(group, learning_rate)
            else:
                self._adam(group, learning_rate)

    def set_updates(self, number: int) -> None:
        """Set the number of updates behind a loaded state."""
        for group in self._groups:
            for step in group.steps:
                step.fill_(number)

    def _sgd(self, group: _Group, rate: float) -> None:
        sgd(
            group.parameters,
            group.gradients,
            [*group.state["momentum_buffer"]] if group.state else [None] * len(group.parameters),
            fused=True,
            lr=rate,
            weight_decay=group.weight_decay,
            momentum=self._config.momentum,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )

    def _adam(self, group: _Group, rate: float) -> None:
        adam(
            group.parameters,
            group.gradients,
            group.state["exp_avg"],
            group.state["exp_avg_sq"],
            [],
            group.steps,
            fused=True,
            decoupled_weight_decay=self._config.name == "adamw",
            amsgrad=False,
            lr=rate,
            beta1=self._config.betas[0],
            beta2=self._config.betas[1],
            weight_decay=group.weight_decay,
            eps=self._config.eps,
            maximize=False,
        )


class GradNorm:
    """The norm of the whole gradient, over stages, tensor group and ZeRO shards.

    It joins the norms of the parameters' own gradients in the model's order, so that stages and buffers change no bit.
    `counts` says for each parameter, in that order, whether this rank's part of it counts: a weight that all ranks of a
    tensor group hold counts once. `group` are the ranks that hold the other parts.
    """

    def __init__(self, counts: Mapping[str, bool], dtype: torch.dtype, device: torch.device, group: Group) -> None:
        self._names, self._device, self._group = list(counts), device, group
        self._nothing = torch.zeros((), dtype=dtype, device=device)
        self._counts = torch.tensor(list(counts.values()), device=device)

    def __call__(self, own: Mapping[str, Tensor]) -> float:
        """`own`: the norms of this rank's gradients by the parameter's name. Collective."""
        joined = torch.stack([own.get(name, self._nothing).to(self._device) for name in self._names])
        if self._group.size == 1:
            return float(torch.linalg.vector_norm(joined))
        squares = self._group.all_reduce_((joined * self._counts).square(), "norms")
        return float(squares.sum().sqrt())


def clip_factor(norm: float, clip_norm: float | None) -> float:
    """What to multiply gradients of this norm by, as `torch.nn.utils.clip_grad_norm_` does."""
    return 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))
