"""Ranks that updated a shard each give each other the results, while the next forward begins.

update    | bucket 2 | bucket 1 | bucket 0 |
way                  | ==== 2 ==== | ==== 1 ==== | ==== 0 ==== |
forward                            | layer 1 | layer 2 | …          each waits for the weights it uses
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from hvd_transformer.comm.group import Group
from hvd_transformer.gradients.buffers import GradBuffer
from hvd_transformer.nn.contracts import Layer, Stage

# Bytes of buckets that can be on their way at once.
ON_THE_WAY = 64 << 20


class ParamAllGather:
    """The buckets' parameters; `names` are those of their collectives, `order` that in which forward needs them.

    After `start` each rank has its own shards alone: `need` before a bucket's parameters are used. The later ones begin
    their way as the first arrive, so where ranks may not need them alike they `settle` before they wait for each other.
    """

    def __init__(self, buckets: Sequence[GradBuffer], names: Sequence[str], group: Group) -> None:
        self.buckets, self._names, self._group = buckets, names, group
        self.order = list(range(len(buckets)))
        self._left: deque[int] = deque()
        self._waits: deque[tuple[int, Callable[[], Tensor]]] = deque()
        self._bytes = 0
        self._missing: set[int] = set()
        self._lock = threading.Lock()  # a tied weight is one of two stages'

    def start(self) -> None:
        """After the update."""
        self._left.extend(self.order)
        self._missing.update(self.order)
        self._send()

    def need(self, index: int) -> None:
        """Returns when this bucket is whole."""
        while index in self._missing:
            with self._lock:
                if index in self._missing:
                    self._arrive()

    def settle(self) -> None:
        """Returns when all are."""
        for index in range(len(self.buckets)):
            self.need(index)

    def _send(self) -> None:
        while self._left:
            index = self._left[0]
            bucket = self.buckets[index]
            if self._waits and self._bytes + bucket.parameters.nbytes > ON_THE_WAY:
                return
            self._left.popleft()
            self._bytes += bucket.parameters.nbytes
            self._waits.append((index, self._group.all_gather_async(bucket.own_parameters, self._names[index])))

    def _arrive(self) -> None:
        index, wait = self._waits.popleft()
        parameters = self.buckets[index].parameters
        parameters.copy_(wait())
        self._bytes -= parameters.nbytes
        self._missing.remove(index)
        self._send()


def waiting_stages(stages: Sequence[Stage], gatherings: Sequence[ParamAllGather]) -> list[Stage]:
    """The stages, whose layers wait for their weights, and which say in what order those are needed."""
    places = {
        id(slot.parameter): (gathering, index)
        for gathering in gatherings
        for index, bucket in enumerate(gathering.buckets)
        for slot in bucket.slots
    }

    def wrapped(layer: Layer) -> Layer:
        needed = list(dict.fromkeys(places[id(weight)] for weight in layer.module.parameters()))
        order.update(dict.fromkeys(needed))

        def run(*tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
            for gathering, index in needed:
                gathering.need(index)
            return layer.run(*tensors)

        return layer._replace(run=run)

    order: dict[tuple[ParamAllGather, int], None] = {}
    result = [stage._replace(layers=[wrapped(layer) for layer in stage.layers]) for stage in stages]
    for gathering in gatherings:
        gathering.order.clear()
    for gathering, index in order:
        gathering.order.append(index)
    return result
