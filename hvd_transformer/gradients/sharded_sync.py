"""Reduces the gradient buffers in ZeRO stage 2, where a rank keeps the gradients of its shard only.

Every backward sends, and ranks may have different numbers of them: each sends as often as the one with the most, all in
one order, since a rank that has no room for what it sends waits for what the others have sent before.
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from hvd_transformer.comm.group import Group
from hvd_transformer.gradients.buffers import GradBuffer, ParamSlot
from hvd_transformer.gradients.sync import GradSync, raise_used_again


class _StageQueue(dict[GradBuffer, None]):
    """The buffers of one stage that are in flight, the oldest first."""

    bytes = 0


class ShardedGradSync(GradSync):
    """ZeRO stage 2: every backward sends, since between backwards a rank keeps its shard's gradients only.

    Of each stage's buffers at most `bytes_in_flight` are in flight.
    """

    def __init__(
        self, stages: Sequence[Sequence[GradBuffer]], group: Group, *, bytes_in_flight: float = math.inf, **options: Any
    ) -> None:
        super().__init__(stages, group, **options)
        self._most, self._waits = bytes_in_flight, True
        self._filled: list[GradBuffer] = []  # by the last step's backwards, a stage's in this order
        self._queues: dict[GradBuffer, _StageQueue] = {}  # one per stage
        self._stage: dict[GradBuffer, int] = {}  # its number
        self._counts: dict[GradBuffer, Counter[str]] = {buffer: Counter() for buffer in self.buffers}  # of gradients
        for number, stage in enumerate(stages):
            self._queues.update(dict.fromkeys(stage, _StageQueue()))
            self._stage.update(dict.fromkeys(stage, number))

    def begin_step(self, num_backwards: int = 1, *, local: bool = False) -> None:
        super().begin_step(num_backwards, local=local)
        self._num_backwards = num_backwards
        if num_backwards:
            self._filled = []
        for buffer in self.buffers:
            buffer.missing = self._num_dense[buffer]
            self._counts[buffer].clear()
        backwards = torch.tensor([num_backwards])
        self._wait_max_backwards = self.group.all_reduce_async_(backwards, "backwards", "max")

    def expect_last_backward(self, buffers: Sequence[GradBuffer]) -> None:
        pass

    def check_unsent(self, buffer: GradBuffer, slot: ParamSlot) -> None:
        if self._num_sent[buffer] >= self._num_backwards:  # each backward sends once
            raise_used_again(slot)

    def count_grad(self, buffer: GradBuffer, slot: ParamSlot) -> None:
        # Parameter by parameter: a bucket with an unused one would else be sent amid a later backward, where ranks with
        # fewer backwards do not send it.
        counts, sent = self._counts[buffer], self._num_sent[buffer]
        counts[slot.name] += 1
        if counts[slot.name] == sent + 1:  # else of a later backward, whose weight gradients are deferred
            if buffer.missing == 1 and not sent:
                self._filled.append(buffer)
            super().count_grad(buffer, slot)

    def send_rest(self) -> None:
        # A rank that had fewer backwards sends in the order of the others' backwards, which wait for it as it waits
        # for them: stage by stage, the last one first, since the threads of the stages fill their buffers at times that
        # differ from rank to rank. If it has never had one, and so does not know that order, it waits for nobody.
        self._filled.sort(key=self._stage.__getitem__, reverse=True)
        filled = set(self._filled)
        rest = [buffer for buffer in self._order if self._num_dense[buffer] and buffer not in filled]
        most, self._waits = int(self._wait_max_backwards()), bool(self._filled)
        for buffers in (self._filled, rest):
            for number in range(most):
                for buffer in buffers:
                    if self._num_sent[buffer] <= number:
                        self._send(buffer)
        self._waits = True
        super().send_rest()

    def _send(self, buffer: GradBuffer) -> None:
        if buffer in self._in_flight:
            self._arrive(buffer)
        queue, size = self._queues[buffer], buffer.parameters.nbytes
        while queue and self._waits and queue.bytes + size > self._most:
            self._arrive(next(iter(queue)))
        queue[buffer] = None
        queue.bytes += size
        super()._send(buffer)
        sent = self._num_sent[buffer]
        buffer.missing = self._num_dense[buffer] - sum(count > sent for count in self._counts[buffer].values())
        if not self.overlap and self._waits:
            self._arrive(buffer)

    def _arrive(self, buffer: GradBuffer) -> None:
        super()._arrive(buffer)
        queue = self._queues[buffer]
        del queue[buffer]
        queue.bytes -= buffer.parameters.nbytes


def make_grad_sync(
    stages: Sequence[Sequence[GradBuffer]], group: Group, *, bytes_in_flight: float = math.inf, **options: Any
) -> GradSync:
    """The `GradSync` that the buffers' sharding needs, with its arguments."""
    if next(chain.from_iterable(stages)).shard.gradients:
        return ShardedGradSync(stages, group, bytes_in_flight=bytes_in_flight, **options)
    return GradSync(stages, group, **options)
