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
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from hvd_transformer.comm.group import Group
from hvd_transformer.parallel.flat import Bucket, Slot
from hvd_transformer.parallel.later import Later
from hvd_transformer.parallel.rows import RowGradient, RowPlan
from hvd_transformer.parallel.timeline import Timeline


class GradientReducer:
    """One step: `begin`, backward any number of times (`last` before each bucket's last one), `finish`.

    Afterwards every bucket's `gradients` hold the sum over all backwards and all ranks, and `waited` the seconds that
    this rank, its own work done, waited for it.
    `compression="fp16"` sends half precision; the sums are then rounded to it. `rows` names the
    parameters whose lookups give their gradient to `take_rows`; one whose rows are gathered needs a bucket alone.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        group: Group,
        *,
        overlap: bool = True,
        compression: str = "none",
        rows: Mapping[str, RowPlan] | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self.buckets, self.group = buckets, group
        self.timeline = timeline or Timeline(0, [])
        self.overlap, self.compression = overlap and group.size > 1, compression
        self.waited = 0.0
        self._sending = [False] * len(buckets)
        self._missing = [0] * len(buckets)
        self._written: list[set[str]] = [set() for _ in buckets]
        self._waits: dict[int, Callable[[], None]] = {}
        self._rows: dict[str, RowGradient] = {}
        self._gathered: list[RowGradient] = []
        self._added: dict[int, list[RowGradient]] = {}  # by bucket, which then is not complete before `finish`
        self._rows_only: set[int] = set()  # buckets without any dense gradient
        self._slots: dict[str, tuple[int, Slot]] = {}  # by name, with the bucket's number
        self._gpus = {bucket.gradients.device for bucket in buckets if bucket.gradients.is_cuda}
        wire = torch.float16 if compression == "fp16" and group.size > 1 else None
        for index, bucket in enumerate(buckets):
            for slot in bucket.slots:
                self._slots[slot.name] = index, slot
                if rows is not None and slot.name in rows:
                    place = slot.view(bucket.gradients)
                    row = RowGradient(place, f"rows.{slot.name}", group, wire or place.dtype)
                    self._rows[slot.name] = row
                    if not rows[slot.name].gather:
                        self._added.setdefault(index, []).append(row)
                    else:
                        self._gathered.append(row)
                        if not rows[slot.name].dense:
                            self._rows_only.add(index)
                slot.parameter.register_post_accumulate_grad_hook(self._hook(index, slot))

    def take_rows(self, name: str) -> Callable[[Tensor, Tensor], None]:
        """What a lookup of this parameter calls in backward, with its tokens [N] and their gradients [N, D]."""
        return self._rows[name].take

    def take_product(self, weight: str, bias: str | None, later: Later) -> Callable[[Tensor, Tensor], None]:
        """What a linear layer calls in backward, with its input [N, D_in] and the gradient of its output [N, D_out].

        `later` is given the work of adding the gradients of these two parameters, which no other layer may use.
        """
        slots = [self._slots[name] for name in (weight, bias) if name is not None]

        def take(values: Tensor, grad: Tensor) -> None:
            sending = [self._sending[index] for index, _ in slots]  # `last` may come before an earlier backward's work

            def add() -> None:
                for (index, slot), sends in zip(slots, sending, strict=True):
                    place, first = slot.view(self.buckets[index].gradients), slot.name not in self._written[index]
                    self._written[index].add(slot.name)
                    if place.ndim == 1:
                        _add(place, grad.sum(0, dtype=place.dtype), first)
                    elif place.dtype != grad.dtype:
                        _add(place, grad.t() @ values, first)
                    else:
                        place.addmm_(grad.t(), values, beta=0 if first else 1)
                    if sends:
                        self._count(index)

            later(add)

        return take

    def begin(self) -> None:
        """Forgets the last step's gradients."""
        self._sending = [False] * len(self.buckets)
        self._drop_gradients()
        for written in self._written:
            written.clear()
        for row in self._rows.values():
            row.clear()

    def last(self, indices: Iterable[int] | None = None) -> None:
        """The next backward is this step's last one for these buckets (None: all): they are sent as they fill.

        Stages of a pipeline may call this, and run their backwards, side by side.
        """
        for index in range(len(self.buckets)) if indices is None else indices:
            self._missing[index] = len(self.buckets[index].slots)
            self._sending[index] = self.overlap and index not in self._added

    def finish(self) -> None:
        """Sends what was not sent, then waits until every bucket holds the sum over the ranks."""
        for index, bucket in enumerate(self.buckets):
            for slot in bucket.slots:
                if slot.name not in self._written[index]:  # no gradient here: unused, or a rank without samples
                    slot.view(bucket.gradients).zero_()
            for row in self._added.get(index, ()):
                row.add()
            if index not in self._waits and index not in self._rows_only:
                self._send(index)
        add_rows = [row.send() for row in self._gathered]
        if self.group.size > 1:
            for device in self._gpus:
                torch.cuda.current_stream(device).synchronize()
        began = time.perf_counter()
        for index in sorted(self._waits):
            self._waits[index]()
        self._waits.clear()
        for add in add_rows:
            add()
        self.waited = time.perf_counter() - began
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        for bucket in self.buckets:
            for slot in bucket.slots:
                slot.parameter.grad = None

    def _hook(self, index: int, slot: Slot) -> Callable[[nn.Parameter], None]:
        place = slot.view(self.buckets[index].gradients)
        written = self._written[index]

        def store(parameter: Tensor) -> None:
            assert parameter.grad is not None
            if parameter.grad is not place:  # the first of this step; the next ones autograd itself adds to it
                _add(place, parameter.grad, slot.name not in written)
                parameter.grad = place
                written.add(slot.name)
            if self._sending[index]:
                self._count(index)

        return store

    def _count(self, index: int) -> None:
        """One more of the bucket's gradients is complete."""
        self._missing[index] -= 1
        if self._missing[index] == 0:
            self._send(index)

    def _send(self, index: int) -> None:
        gradients = self.buckets[index].gradients
        if self.compression == "none" or self.group.size == 1:
            self._waits[index] = self._all_reduce(gradients, index)
            return
        small = gradients.to(torch.float16)
        wait = self._all_reduce(small, index)

        def arrive() -> None:
            wait()
            gradients.copy_(small)

        self._waits[index] = arrive

    def _all_reduce(self, tensor: Tensor, index: int) -> Callable[[], None]:
        wait = self.group.all_reduce_async_(tensor, f"bucket.{index}")
        size = tensor.numel() * tensor.element_size()
        return self.timeline.watch(f"allreduce bucket {index}", f"{size / 2**20:.1f} MiB", wait)


def _add(place: Tensor, gradient: Tensor, first: bool) -> None:
    if first:
        place.copy_(gradient)
    else:
        place.add_(gradient)
