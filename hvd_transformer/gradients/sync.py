"""Fills the gradient buckets during backward and sums them over the ranks, overlapped with backward.

    backward      | layer 4 | layer 3 | layer 2 | layer 1 |
    bucket 0                | ===== allreduce ===== |
    bucket 1                          | ===== allreduce ===== |
    bucket 2                                              | ===== |      `finish` waits for this one

A tied embedding's bucket is the exception: its dense part is there first and is sent alone, and the rows of its
lookups follow when backward ends (`parallel.rows`).

The hooks run after a parameter's gradient is complete (`register_post_accumulate_grad_hook`) and copy the step's first
into the bucket, where autograd adds the next ones: a gradient exists once. A linear layer's is multiplied right into
the bucket (`take_product`). With several rounds only the last one sends.

Where each rank updates a shard, it receives the sum of that alone (Rajbhandari et al. 2020, "ZeRO", arXiv 1910.02054,
section 5: stage 1); where it keeps no other gradients either (stage 2), every backward sends.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from hvd_transformer.comm.group import Group
from hvd_transformer.gradients.buffers import Filling, GradBuffer, ParamSlot, add
from hvd_transformer.gradients.embedding_grads import EmbeddingGrad, RowPlan
from hvd_transformer.gradients.weight_grads import WeightGradStore
from hvd_transformer.monitoring.timeline import Timeline

# Bytes of a stage's buckets that can be on their way at once where gradients are kept of the shard alone.
ON_THE_WAY = 16 << 20


class _InFlight:
    """The buckets of a stage that are on their way."""

    def __init__(self) -> None:
        self.buckets: deque[int] = deque()
        self.bytes = 0


class GradSync:
    """One step: `begin`, backward any number of times (`last` before each bucket's last one), `finish`.

    Afterwards every bucket's `own_gradients` hold the sum over all backwards and all ranks, and `waited` the seconds
    that this rank, its own work done, waited for it.
    `compression="fp16"` sends half precision; the sums are then rounded to it. `rows` names the
    parameters whose lookups give their gradient to `take_rows`; one whose rows are gathered needs a bucket alone.
    `stages` are the numbers of the buckets of each stage of the pipeline, which fill side by side.
    """

    def __init__(
        self,
        buckets: Sequence[GradBuffer],
        group: Group,
        *,
        overlap: bool = True,
        compression: str = "none",
        rows: Mapping[str, RowPlan] | None = None,
        timeline: Timeline | None = None,
        stages: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.buckets, self.group = buckets, group
        self.timeline = timeline or Timeline(0, [])
        self.overlap, self.compression = overlap and group.size > 1, compression
        self.waited = 0.0
        self._fillings = [Filling(bucket) for bucket in buckets]
        self._shared = group.size > 1 and any(bucket.shard.count > 1 for bucket in buckets)
        self._every = self._shared and buckets[0].shard.gradients  # backward sends
        self._backwards: Callable[[], int] = lambda: 1  # the most that any rank has in this step
        self._sent = [0] * len(buckets)
        self._waits: dict[int, Callable[[], None]] = {}
        self._way = [_InFlight() for _ in buckets]  # of each one's stage
        self._order: list[int] = []  # in which one micro-batch's backward fills them
        for indices in reversed(stages or [range(len(buckets))]):
            way = _InFlight()
            for index in indices:
                self._way[index] = way
                self._order.append(index)
        self._rows: dict[str, EmbeddingGrad] = {}
        self._gathered: list[str] = []
        self._added: dict[int, list[str]] = {}  # by bucket, which then is not complete before `finish`
        self._dense = [len(bucket.slots) for bucket in buckets]  # parameters that have another gradient than rows
        self._slots: dict[str, tuple[int, ParamSlot]] = {}  # by name, with the bucket's number
        self._gpus = {bucket.gradients.device for bucket in buckets if bucket.gradients.is_cuda}
        wire = torch.float16 if compression == "fp16" and group.size > 1 else None
        for index, bucket in enumerate(buckets):
            for slot in bucket.slots:
                self._slots[slot.name] = index, slot
                if rows is not None and slot.name in rows:
                    parameter, plan = slot.parameter, rows[slot.name]
                    self._rows[slot.name] = EmbeddingGrad(
                        parameter, f"rows.{slot.name}", group, wire or parameter.dtype
                    )
                    self._dense[index] -= not plan.dense
                    if plan.gather:
                        self._gathered.append(slot.name)
                    else:
                        self._added.setdefault(index, []).append(slot.name)
                slot.parameter.register_post_accumulate_grad_hook(self._hook(index, slot))

    def take_rows(self, name: str) -> Callable[[Tensor, Tensor], None]:
        """What a lookup of this parameter calls in backward, with its tokens [N] and their gradients [N, D]."""
        return self._rows[name].take

    def take_product(self, weight: str, bias: str | None, later: WeightGradStore) -> Callable[[Tensor, Tensor], None]:
        """What a linear layer calls in backward, with its input [N, D_in] and the gradient of its output [N, D_out].

        `later` is given the work of adding the gradients of these two parameters, which no other layer may use.
        """
        slots = [self._slots[name] for name in (weight, bias) if name is not None]

        def take(values: Tensor, grad: Tensor) -> None:
            # `last` may come before an earlier backward's work.
            sending = [self._fillings[index].sending for index, _ in slots]

            def add_product() -> None:
                for (index, slot), sends in zip(slots, sending, strict=True):
                    filling = self._fillings[index]
                    place, first = filling.place(slot.name), filling.first(slot.name)
                    if place.ndim == 1:
                        add(place, grad.sum(0, dtype=place.dtype), first)
                    elif place.dtype != grad.dtype:
                        add(place, grad.t() @ values, first)
                    else:
                        place.addmm_(grad.t(), values, beta=0 if first else 1)
                    if sends:
                        self._count(index)

            later(add_product)

        return take

    def begin(self, backwards: int = 1) -> None:
        """Forgets the last step's gradients. `backwards`: how many this rank has; ranks may differ."""
        for filling in self._fillings:
            filling.begin()
        for row in self._rows.values():
            row.clear()
        if self._every:
            for filling, dense in zip(self._fillings, self._dense, strict=True):
                filling.sending, filling.missing = True, dense
            self._sent = [0] * len(self.buckets)
            most = torch.tensor([backwards])
            wait = self.group.all_reduce_async_(most, "backwards", "max")

            def result() -> int:
                wait()
                return int(most)

            self._backwards = result

    def last(self, indices: Iterable[int] | None = None) -> None:
        """The next backward is this step's last one for these buckets (None: all): they are sent as they fill.

        Stages of a pipeline may call this, and run their backwards, side by side.
        """
        if self._every:
            return
        for index in range(len(self.buckets)) if indices is None else indices:
            filling = self._fillings[index]
            filling.missing = len(self.buckets[index].slots)
            filling.sending = self.overlap and index not in self._added

    def finish(self) -> None:
        """Sends what was not sent, then waits until every bucket holds the sum over the ranks."""
        if self._every:  # in the same order on a rank that had fewer backwards: all wait for each other's buckets
            for number in range(self._backwards()):
                for index in self._order:
                    if self._dense[index] and self._sent[index] <= number:
                        self._send(index)
        for index in self._order:
            added = self._added.get(index, ())
            if not self._dense[index] and not added:  # gathered rows alone
                self.buckets[index].own_gradients.zero_()
                continue
            for name in added:
                self._rows[name].add(self._fillings[index].zeroed(name))
            if added if self._every else index not in self._waits:
                self._send(index)
        add_rows = [self._send_rows(name) for name in self._gathered]
        if self.group.size > 1:
            for device in self._gpus:
                torch.cuda.current_stream(device).synchronize()
        began = time.perf_counter()
        for index in sorted(self._waits):
            self._arrive(index)
        for arrive in add_rows:
            arrive()
        self.waited = time.perf_counter() - began
        for filling in self._fillings:
            filling.drop()

    def _hook(self, index: int, slot: ParamSlot) -> Callable[[nn.Parameter], None]:
        filling = self._fillings[index]

        def store(_: Tensor) -> None:
            filling.store(slot)
            if filling.sending:
                self._count(index)

        return store

    def _count(self, index: int) -> None:
        """One more of the bucket's gradients is complete."""
        filling = self._fillings[index]
        filling.missing -= 1
        if filling.missing == 0:
            filling.missing = self._dense[index]
            self._send(index)

    def _send(self, index: int) -> None:
        bucket, first = self.buckets[index], self._sent[index] == 0
        if self._every:
            self._make_room(index)
            self._sent[index] += 1
        gradients = self._fillings[index].close()
        if self.compression == "fp16" and self.group.size > 1:
            gradients = gradients.to(torch.float16)
        wait = self._sum(gradients, index)

        def arrive() -> None:
            found, place = wait(), bucket.own_gradients
            if not found.is_set_to(place):
                add(place, found, first)

        self._waits[index] = arrive
        if self._every and not self.overlap:
            self._arrive(index)

    def _make_room(self, index: int) -> None:
        """Waits for what went before, so that little of the stage's is on its way at once."""
        way, size = self._way[index], self.buckets[index].parameters.nbytes
        if index in self._waits:  # this one's sum before
            self._arrive(index)
        while way.buckets and way.bytes + size > ON_THE_WAY:
            self._arrive(way.buckets[0])
        way.buckets.append(index)
        way.bytes += size

    def _arrive(self, index: int) -> None:
        self._waits.pop(index)()
        if self._every:
            self._way[index].buckets.remove(index)
            self._way[index].bytes -= self.buckets[index].parameters.nbytes

    def _sum(self, gradients: Tensor, index: int) -> Callable[[], Tensor]:
        """Begins the sum over the ranks; the function returned waits for this rank's shard of it."""
        size = f"{gradients.numel() * gradients.element_size() / 2**20:.1f} MiB"
        if self._shared:
            wait = self.group.reduce_scatter_async(gradients, f"bucket.{index}")
            return self.timeline.watch(f"reduce-scatter bucket {index}", size, wait)
        done = self.group.all_reduce_async_(gradients, f"bucket.{index}")
        done = self.timeline.watch(f"allreduce bucket {index}", size, done)

        def arrived() -> Tensor:
            done()
            return gradients

        return arrived

    def _send_rows(self, name: str) -> Callable[[], None]:
        index, slot = self._slots[name]
        bucket, width = self.buckets[index], slot.parameter.size(1)
        own = bucket.own_part(slot.start, slot.stop)
        place = bucket.own_gradients[own] if own is not None else bucket.own_gradients[:0]
        return self._rows[name].send(place.view(-1, width), bucket.own.start // width)
