"""torch's optimizers over flat buckets: a bucket is two tensors at most, so an update is a few kernels.

They are called as functions: the classes around them import torch's compiler, which takes as long as torch itself.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from hvd_transformer.comm.world import World
from hvd_transformer.config.schema import Config, OptimizerConfig
from hvd_transformer.gradients.buffers import GradBuffer
from hvd_transformer.parallel.mesh import ParallelMesh


def names_without_decay(model: nn.Module) -> set[str]:
    """Biases, norms and embeddings: what weight decay leaves alone."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return {name for name, weight in model.named_parameters() if weight.ndim < 2 or id(weight) in embeddings}


def state_keys(config: OptimizerConfig) -> tuple[str, ...]:
    """The names of the numbers of optimizer state that each weight has, as in torch's optimizers."""
    if config.name == "sgd":
        return ("momentum_buffer",) if config.momentum else ()
    return ("exp_avg", "exp_avg_sq")


def copies_per_weight(config: Config, dp: int) -> tuple[float, float]:
    """How many numbers of gradient and of optimizer state a rank keeps for each weight, of `dp` replicas."""
    shards = 1 if config.parallel.optimizer_shard == "none" else dp
    of_gradients = shards if config.parallel.optimizer_shard == "gradients" else 1
    return 1 / of_gradients, len(state_keys(config.optimizer)) / shards


@dataclass
class _Group:
    """The parts of the buckets that have one weight decay. `steps` is a number a part, on its device."""

    weight_decay: float
    parameters: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    state: list[list[Tensor]] = field(default_factory=list)  # by key, then part
    steps: list[Tensor] = field(default_factory=list)


class FlatOptimizer:
    """Updates the buckets' own parameters from their gradients. No buckets (a stage without weights): nothing to do.

    `state` is that of each bucket, as flat tensors like its own parameters, {"exp_avg": …}: what is written there
    counts.
    """

    def __init__(self, config: OptimizerConfig, buckets: Sequence[GradBuffer]) -> None:
        keys = state_keys(config)
        self._config = config
        self.state = [{key: torch.zeros_like(bucket.own_parameters) for key in keys} for bucket in buckets]
        decayed, others = _Group(config.weight_decay, state=[[] for _ in keys]), _Group(0.0, state=[[] for _ in keys])
        for bucket, state in zip(buckets, self.state, strict=True):
            for place, decays in bucket.halves():
                group = decayed if decays else others
                group.parameters.append(bucket.own_parameters[place])
                group.gradients.append(bucket.own_gradients[place])
                group.steps.append(torch.zeros((), dtype=torch.float32, device=bucket.parameters.device))
                for parts, key in zip(group.state, keys, strict=True):
                    parts.append(state[key][place])
        self._groups = [group for group in (decayed, others) if group.parameters]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """One update at this rate."""
        for group in self._groups:
            if self._config.name == "sgd":
                self._sgd(group, learning_rate)
            else:
                self._adam(group, learning_rate)

    def set_updates(self, number: int) -> None:
        """How many steps are behind the state that was loaded."""
        for group in self._groups:
            for step in group.steps:
                step.fill_(number)

    def _sgd(self, group: _Group, rate: float) -> None:
        sgd(
            group.parameters,
            group.gradients,
            [*group.state[0]] if group.state else [None] * len(group.parameters),
            fused=True,
            lr=rate,
            weight_decay=group.weight_decay,
            momentum=self._config.momentum,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )

    def _adam(self, group: _Group, rate: float) -> None:
        first, second = group.state
        adam(
            group.parameters,
            group.gradients,
            first,
            second,
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


class GradientNorm:
    """Joins the norms of the parameters' own gradients in the model's order: stages and buckets change no bit."""

    def __init__(
        self, names: Sequence[str], shared: Collection[str], dtype: torch.dtype, layout: ParallelMesh, world: World
    ) -> None:
        self.device, self.size = layout.device, len(names)
        self._nothing = torch.zeros((), dtype=dtype, device=self.device)
        self._group = world if layout.update_shard.count > 1 else layout.tensor_group
        # Each share of a weight counts, and a weight that all ranks of a tensor group have counts once.
        self._counts = torch.tensor([layout.shard == 0 or name in shared for name in names], device=layout.device)

    def __call__(self, own: Mapping[int, Tensor]) -> float:
        """`own`: by the parameter's number, of what this rank has of its gradient. Collective."""
        joined = torch.stack([own.get(number, self._nothing).to(self.device) for number in range(self.size)])
        if self._group.size == 1:
            return float(torch.linalg.vector_norm(joined))
        squares = self._group.all_reduce_((joined * self._counts).square(), "norms")
        return float(squares.sum().sqrt())
