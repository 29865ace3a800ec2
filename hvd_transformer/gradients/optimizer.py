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
from hvd_transformer.gradients.local_steps import keeps_outer_weights
from hvd_transformer.gradients.muon import Muon
from hvd_transformer.gradients.shared_matrices import SharedMatrices
from hvd_transformer.gradients.update_factor import UpdateFactor
from hvd_transformer.gradients.weight_average import WeightAverage

# The key of the weights that training goes on with, in a checkpoint whose model file has the averaged ones.
RAW = "raw"


def names_without_decay(model: nn.Module) -> set[str]:
    """The parameters without weight decay: biases (also Marian's of the shape [1, V]), norms and embeddings."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return {
        name
        for name, weight in model.named_parameters()
        if weight.ndim < 2 or id(weight) in embeddings or (name.endswith("bias") and weight.size(0) == 1)
    }


def state_keys(config: OptimizerConfig, *, by_muon: bool = False) -> tuple[str, ...]:
    """The names of each weight's optimizer state, as in torch's optimizers."""
    if by_muon:
        return ("momentum_buffer",)
    if config.name == "sgd":
        return ("momentum_buffer",) if config.momentum else ()
    return ("exp_avg", "exp_avg_sq")


def copies_per_weight(config: Config, dp: int, *, by_muon: bool = False) -> tuple[float, float]:
    """The numbers of gradient and of optimizer state that a rank keeps per weight, with `dp` replicas.

    `by_muon`: of a weight that Muon updates. The errors of compressed gradients count as state, and so do, with local
    steps, outer weights, their momentum and differences in flight.
    """
    shards = 1 if config.parallel.optimizer_shard == "none" else dp
    of_gradients = shards if config.parallel.optimizer_shard == "gradients" else 1
    sharded = len(state_keys(config.optimizer, by_muon=by_muon)) + (config.optimizer.ema is not None)
    errors = int(dp > 1 and config.communication.compression not in ("none", "fp16_fp32_sum"))
    outer = 3 if keeps_outer_weights(config.communication, dp) else 0
    return 1 / of_gradients, sharded / shards + errors + outer


@dataclass
class _Group:
    """The parts of the buffers with one weight decay. `steps` has one number per part, on its device."""

    weight_decay: float
    parameters: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    state: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    steps: list[Tensor] = field(default_factory=list)


class FlatOptimizer:
    """Updates the buffers' own parameters from their gradients; Muon those of `matrices`.

    `state` holds each buffer's state as flat tensors like its own parameters, {"exp_avg": …}; writing into it loads it.
    """

    def __init__(
        self, config: OptimizerConfig, buffers: Sequence[GradBuffer], matrices: SharedMatrices | None = None
    ) -> None:
        self._config = config
        by_muon = set(matrices.buffers) if matrices else set()
        self.state = [
            {key: torch.zeros_like(buffer.own_parameters) for key in state_keys(config, by_muon=buffer in by_muon)}
            for buffer in buffers
        ]
        state_of = dict(zip(buffers, self.state, strict=True))
        self._muon: Muon | None = None
        if matrices is not None:
            momenta = [state_of[buffer]["momentum_buffer"] for buffer in matrices.buffers]
            self._muon = Muon(matrices, momenta, config.weight_decay)
        groups = {True: _Group(config.weight_decay), False: _Group(0.0)}
        for buffer, state in state_of.items():
            for place, decays in () if buffer in by_muon else buffer.decay_groups():
                group = groups[decays]
                group.parameters.append(buffer.own_parameters[place])
                group.gradients.append(buffer.own_gradients[place])
                group.steps.append(torch.zeros((), dtype=torch.float32, device=buffer.parameters.device))
                for key, flat in state.items():
                    group.state[key].append(flat[place])
        self._groups = [group for group in groups.values() if group.parameters]
        self.average: WeightAverage | None = None
        if config.ema is not None:
            self.average = WeightAverage(buffers, config.ema)
            for state, beside in zip(self.state, self.average.beside, strict=True):
                state[RAW] = beside

    @torch.no_grad()
    def step(self, learning_rate: float, factor: float | UpdateFactor = 1.0) -> None:
        """One update at this learning rate with the gradients × `factor`; may change them. Collective with Muon.

        An `UpdateFactor` only where `takes_factor`.
        """
        if isinstance(factor, UpdateFactor):
            for group in self._groups:
                self._update(group, learning_rate, *factor)
            return
        if self._muon is not None:
            self._muon.step(learning_rate, factor)
        for group in self._groups:
            divisor = None
            if factor != 1.0 and group.parameters[0].dtype == torch.float32:
                # In the same pass over memory. The kernels divide, by a float32 number; `full`, unlike `tensor`, does
                # not wait for a GPU.
                divisor = torch.full((), 1 / factor, dtype=torch.float32, device=group.parameters[0].device)
            elif factor != 1.0:
                torch._foreach_mul_(group.gradients, factor)
            self._update(group, learning_rate, divisor)
        if self.average is not None:
            self.average.update()

    @property
    def takes_factor(self) -> bool:
        """Whether all that an update does can be left out by a number on the device."""
        in_single = all(group.parameters[0].dtype == torch.float32 for group in self._groups)
        return self._muon is None and self.average is None and in_single

    def set_updates(self, number: int) -> None:
        """Set the number of updates behind a loaded state."""
        for group in self._groups:
            for step in group.steps:
                step.fill_(number)
        if self.average is not None:
            self.average.num_updates = number

    def _update(self, group: _Group, rate: float, divisor: Tensor | None, skip: Tensor | None = None) -> None:
        if self._config.name == "sgd":
            self._sgd(group, rate, divisor, skip)
        else:
            self._adam(group, rate, divisor, skip)

    def _sgd(self, group: _Group, rate: float, divisor: Tensor | None, skip: Tensor | None) -> None:
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
            grad_scale=divisor,
            found_inf=skip,
        )

    def _adam(self, group: _Group, rate: float, divisor: Tensor | None, skip: Tensor | None) -> None:
        adam(
            group.parameters,
            group.gradients,
            group.state["exp_avg"],
            group.state["exp_avg_sq"],
            [],
            group.steps,
            fused=True,
            decoupled_weight_decay=self._config.name != "adam",
            amsgrad=False,
            lr=rate,
            beta1=self._config.betas[0],
            beta2=self._config.betas[1],
            weight_decay=group.weight_decay,
            eps=self._config.eps,
            maximize=False,
            grad_scale=divisor,
            found_inf=skip,
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

    def __call__(self, own: Mapping[str, Tensor]) -> Tensor:
        """A scalar. `own`: the norms of this rank's gradients by the parameter's name. Collective."""
        joined = self._joined([own.get(name, self._nothing) for name in self._names])
        if self._group.size == 1:
            alone: Tensor = torch.linalg.vector_norm(joined)
            return alone
        squares = self._group.all_reduce_((joined * self._counts).square(), "norms")
        norm: Tensor = squares.sum().sqrt()
        return norm

    def _joined(self, norms: Sequence[Tensor]) -> Tensor:
        """In one tensor [N], in this order. The stages of a pipeline may be on several GPUs: one copy from each."""
        places: dict[torch.device, list[int]] = {}
        for place, norm in enumerate(norms):
            places.setdefault(norm.device, []).append(place)
        if len(places) == 1:
            return torch.stack(list(norms)).to(self._device)
        parts = [torch.stack([norms[place] for place in own]).to(self._device) for own in places.values()]
        order = torch.tensor([place for own in places.values() for place in own]).argsort()
        return torch.cat(parts)[order.to(self._device, non_blocking=True)]


def clip_factor(norm: float, clip_norm: float | None) -> float:
    """What to multiply gradients of this norm by, as `torch.nn.utils.clip_grad_norm_` does."""
    return 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))
