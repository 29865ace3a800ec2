"""torch's optimizers over flat buckets: a bucket is two tensors at most, so an update is a few kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hvd_transformer.config.schema import OptimizerConfig
from hvd_transformer.parallel.flat import Bucket


def names_without_decay(model: nn.Module) -> set[str]:
    """Biases, norms and embeddings: what weight decay leaves alone."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return {name for name, weight in model.named_parameters() if weight.ndim < 2 or id(weight) in embeddings}


def state_copies(config: OptimizerConfig) -> int:
    """Numbers of optimizer state a weight."""
    if config.name == "sgd":
        return 1 if config.momentum else 0
    return 2


class FlatOptimizer:
    """Updates the buckets' parameters from their gradients. No buckets (a stage without weights): nothing to do."""

    def __init__(self, config: OptimizerConfig, buckets: Sequence[Bucket]) -> None:
        self.buckets = buckets
        self._parts: list[list[tuple[slice, nn.Parameter]]] = []
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for bucket in buckets:
            parts = []
            for place, decayed in bucket.halves():
                part = nn.Parameter(bucket.parameters[place])
                part.grad = bucket.gradients[place]
                parts.append((place, part))
                groups[decayed].append(part)
            self._parts.append(parts)
        if buckets:
            self.optimizer = _make(
                config,
                [
                    {"params": params, "weight_decay": config.weight_decay if decayed else 0.0}
                    for decayed, params in groups.items()
                    if params
                ],
            )
            self._zero_state()

    def step(self, learning_rate: float) -> None:
        """One update at this rate."""
        if self.buckets:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()

    def flat_state(self) -> list[dict[str, Tensor]]:
        """The state of each bucket, as flat tensors like its parameters: {"exp_avg": …}."""
        result = []
        for bucket, parts in zip(self.buckets, self._parts, strict=True):
            flat: dict[str, Tensor] = {}
            for place, part in parts:
                for key, value in self.optimizer.state[part].items():
                    if isinstance(value, Tensor) and value.shape == part.shape:
                        flat.setdefault(key, torch.zeros_like(bucket.parameters))[place] = value
            result.append(flat)
        return result

    def load_flat_state(self, states: Sequence[dict[str, Tensor]], num_updates: int) -> None:
        """The reverse; `num_updates` is the number of steps behind that state."""
        for flat, parts in zip(states, self._parts, strict=True):
            for place, part in parts:
                state = self.optimizer.state[part]
                for key, value in flat.items():
                    state[key].copy_(value[place])
                if "step" in state:
                    state["step"].fill_(num_updates)

    def _zero_state(self) -> None:
        """The state before the first step: torch makes it only then, but it is saved and loaded at any time."""
        for parts in self._parts:
            for _, part in parts:
                state = self.optimizer.state[part]
                if isinstance(self.optimizer, torch.optim.SGD):
                    if self.optimizer.defaults["momentum"]:
                        state["momentum_buffer"] = torch.zeros_like(part)
                else:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=part.device)
                    state["exp_avg"] = torch.zeros_like(part)
                    state["exp_avg_sq"] = torch.zeros_like(part)


def _make(config: OptimizerConfig, groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=True)
    kind = torch.optim.Adam if config.name == "adam" else torch.optim.AdamW
    return kind(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
