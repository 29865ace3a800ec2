"""Local steps: each replica updates its own weights, and the replicas exchange each bucket every H steps, in turn.

    H = 8, two buckets; after local step
                  1    2    3    4    5    6    7    8    9   10   11   12   13
    bucket 0                                      send move                          differences travel while the next
    bucket 1                  send move                               send move      steps are computed

Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512, algorithm 2), after DiLoCo (Douillard et al. 2023, arXiv
2311.08105). Each bucket has outer weights W and their momentum M, the same on all replicas:

    D = mean over the replicas of W - w        their own weights w at `send`
    M = momentum × M + D                       Nesterov's SGD, as `torch.optim.SGD` computes it
    W = W - lr × (D + momentum × M)
    w = w + (1 - KEPT) × (W - w)               at `move`

This is not the mathematics of averaged gradients: replicas differ until `average`.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from hvd_transformer.comm.group import Group
from hvd_transformer.comm.streams import has_streams
from hvd_transformer.config.schema import CommunicationConfig
from hvd_transformer.gradients.buffers import GradBuffer
from hvd_transformer.monitoring.timeline import Timeline

# The local steps that a transfer overlaps (the paper's tau), at most.
MOST_DELAY = 5
# What a replica keeps of its own weights when the outer ones have arrived (the paper's alpha).
KEPT = 0.5


def keeps_outer_weights(config: CommunicationConfig, dp: int) -> bool:
    """Whether each rank stores outer weights and their momentum: a single replica has nobody to exchange with."""
    return config.local_steps > 1 and dp > 1


class LocalSteps:
    """The exchange between the replicas of `group`, whose weights are `buffers`.

    Steps from number `first` on are local; before, the replicas average gradients. `state` has each buffer's outer
    weights and their momentum as flat tensors, and no tensors where steps are never local. All replicas call `exchange`
    and `average` after the same steps.
    """

    def __init__(
        self,
        buffers: Sequence[GradBuffer],
        group: Group,
        config: CommunicationConfig,
        first: int,
        timeline: Timeline | None = None,
    ) -> None:
        self._buffers, self._group, self._config, self._first = buffers, group, config, first
        self._timeline = timeline or Timeline(0, [])
        self.active = keeps_outer_weights(config, group.size)
        keys = ("weights", "momentum") if self.active else ()
        self.state = [{key: torch.zeros_like(buffer.parameters) for key in keys} for buffer in buffers]
        self._delay = max(1, min(MOST_DELAY, config.local_steps // 8))
        self._in_flight: dict[int, Callable[[], Tensor]] = {}
        self._begun = False  # the outer weights are set
        self._weights_differ = self._states_differ = False  # between replicas

    def includes(self, step: int) -> bool:
        """Whether this step, counted from 0, is local. The first one begins with the outer weights where they are."""
        local = self.active and step >= self._first
        if local and not self._begun:
            self._begun = True
            for buffer, outer in zip(self._buffers, self.state, strict=True):
                outer["weights"].copy_(buffer.parameters)
                outer["momentum"].zero_()
        return local

    def restored(self, step: int) -> None:
        """`state` was loaded as it was after `step` steps."""
        self._begun = step > self._first

    def exchange(self, step: int) -> None:
        """After local step number `step`: send the buckets whose turn it is, and move those whose differences arrive.

        Collective, also for a replica that skipped its update.
        """
        self._weights_differ = self._states_differ = True
        period, count = self._config.local_steps, len(self._buffers)
        since_turn = [(step + 1 - self._first - period * index // count) % period for index in range(count)]
        for index in range(count):
            if since_turn[index] == 0:
                self._send(index)
        for index in range(count):
            if since_turn[index] == self._delay and index in self._in_flight:
                self._move(index)

    def average(self) -> None:
        """Make the replicas' weights equal, if they may differ: their mean. Outer weights keep their turns. Collective.

        What is in flight moves before.
        """
        if not self._weights_differ:
            return
        for index in sorted(self._in_flight):
            self._move(index)
        self._average((f"weights.{index}", buffer.parameters) for index, buffer in enumerate(self._buffers))
        self._weights_differ = False

    def average_all(self, optimizer_state: Sequence[dict[str, Tensor]]) -> bool:
        """`average`, and the same for the optimizer's state; returns whether they may have differed. Collective."""
        self.average()
        if not self._states_differ:
            return False
        self._average(
            (f"{key}.{index}", state[key]) for index, state in enumerate(optimizer_state) for key in sorted(state)
        )
        self._states_differ = False
        return True

    def _send(self, index: int) -> None:
        difference = self.state[index]["weights"] - self._buffers[index].parameters
        wait = self._group.all_reduce_async_(difference, f"outer.{index}")
        size = f"{difference.nbytes / 2**20:.1f} MiB"
        aside = not has_streams(difference.device)  # on a GPU another thread has another stream
        self._in_flight[index] = self._timeline.watch(f"outer bucket {index}", size, wait, aside=aside)

    def _move(self, index: int) -> None:
        weights, momentum = self.state[index]["weights"], self.state[index]["momentum"]
        difference = self._in_flight.pop(index)().div_(self._group.size)
        rate, beta = self._config.outer_lr, self._config.outer_momentum
        momentum.mul_(beta).add_(difference)
        weights.add_(difference, alpha=-rate).add_(momentum, alpha=-rate * beta)
        self._buffers[index].parameters.lerp_(weights, 1 - KEPT)

    def _average(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        waits = [self._group.all_reduce_async_(tensor, f"average.{name}") for name, tensor in tensors]
        for wait in waits:
            wait().div_(self._group.size)
