"""One bucket's gradients while backward fills them: which are there, and what is missing until it can be sent."""

import torch
from torch import Tensor

from hvd_transformer.parallel.flat import Bucket, Slot


class Filling:
    """The parameters' gradients of one step, each written first and added to by the backwards after.

    Where the bucket keeps its shard's alone, the memory for all of them is there from the first gradient to `close`.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.sending = False  # the bucket goes when nothing is missing
        self.missing = 0  # gradients
        self._slots = {slot.name: slot for slot in bucket.slots}
        self._written: set[str] = set()
        self._flat: Tensor | None = None
        self._places: dict[str, Tensor] = {}
        if not bucket.shard.gradients:
            self._open(bucket.gradients)

    def begin(self) -> None:
        """Forgets the last step's gradients."""
        self.sending = False
        self._written.clear()
        self.drop()

    def place(self, name: str) -> Tensor:
        """The parameter's gradient, in its shape; anything may be there unless it was written."""
        if self._flat is None:
            self._open(torch.empty_like(self.bucket.parameters))
        return self._places[name]

    def first(self, name: str) -> bool:
        """Whether the parameter has no gradient so far; afterwards it has one."""
        if name in self._written:
            return False
        self._written.add(name)
        return True

    def zeroed(self, name: str) -> Tensor:
        """The parameter's gradient so far, to which more can be added: zero if there is none."""
        place = self.place(name)
        return place.zero_() if self.first(name) else place

    def store(self, slot: Slot) -> None:
        """Takes what autograd left as the parameter's gradient; it adds the next ones to that place itself."""
        gradient, place = slot.parameter.grad, self.place(slot.name)
        assert gradient is not None
        if gradient is place:
            return
        add(place, gradient, self.first(slot.name))
        slot.parameter.grad = place

    def close(self) -> Tensor:
        """All of the bucket's gradients, zero where there is none: the next backward writes anew, if memory goes."""
        for name in self._slots.keys() - self._written:  # unused, or a rank without samples
            self.place(name).zero_()
        flat = self._flat
        assert flat is not None
        if self.bucket.shard.gradients:
            for gap in self.bucket.gaps():
                flat[gap].zero_()
            self._written.clear()
            self.drop()
            self._flat, self._places = None, {}
        return flat

    def _open(self, flat: Tensor) -> None:
        self._flat = flat
        self._places = {name: slot.view(flat) for name, slot in self._slots.items()}

    def drop(self) -> None:
        """Leaves no gradient at the parameters."""
        for slot in self.bucket.slots:
            slot.parameter.grad = None


def add(place: Tensor, gradient: Tensor, first: bool) -> None:
    """Adds to what is there; with `first` that is nothing."""
    if first:
        place.copy_(gradient)
    else:
        place.add_(gradient)
