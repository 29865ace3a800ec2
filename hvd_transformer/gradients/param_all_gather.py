"""All-gathers ZeRO-sharded parameters after the update, while the next forward begins.

update     | bucket 2 | bucket 1 | bucket 0 |
in flight             | ==== 2 ==== | ==== 1 ==== | ==== 0 ==== |
forward                             | layer 1 | layer 2 | …          each layer waits for the weights it uses
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from hvd_transformer.comm.group import Group
from hvd_transformer.gradients.buffers import GradBuffer
from hvd_transformer.nn.contracts import Layer

# Bytes of buffers in flight at most.
MAX_IN_FLIGHT = 64 << 20


class ParamAllGather:
    """The parameters of one stage's buffers; `names` are those of their collectives.

    After `start` each rank has its own shards only: `wait` before a buffer's parameters are used. `order` is the order
    in which forward needs the buffers. Later ones are sent as earlier ones arrive, so ranks that may need different
    buffers call `wait_all` before they wait for each other.
    """

    def __init__(self, buffers: Sequence[GradBuffer], names: Sequence[str], group: Group) -> None:
        self.buffers, self._names, self._group = buffers, names, group
        self.order = list(range(len(buffers)))
        self._left: deque[int] = deque()
        self._in_flight: deque[tuple[int, Callable[[], Tensor]]] = deque()
        self._bytes = 0
        self._missing: set[int] = set()
        self._lock = threading.Lock()  # two stages may share a tied weight

    def start(self) -> None:
        """Call after the update."""
        self._left.extend(self.order)
        self._missing.update(self.order)
        self._send()

    def wait(self, index: int) -> None:
        """Return when this buffer's parameters are whole."""
        while index in self._missing:
            with self._lock:
                if index in self._missing:
                    self._arrive()

    def wait_all(self) -> None:
        """Return when all parameters are whole."""
        for index in range(len(self.buffers)):
            self.wait(index)

    def _send(self) -> None:
        while self._left:
            index = self._left[0]
            buffer = self.buffers[index]
            if self._in_flight and self._bytes + buffer.parameters.nbytes > MAX_IN_FLIGHT:
                return
            self._left.popleft()
            self._bytes += buffer.parameters.nbytes
            self._in_flight.append((index, self._group.all_gather_async(buffer.own_parameters, self._names[index])))

    def _arrive(self) -> None:
        index, wait = self._in_flight.popleft()
        parameters = self.buffers[index].parameters
        parameters.copy_(wait())
        self._bytes -= parameters.nbytes
        self._missing.remove(index)
        self._send()


# What a layer waits for, by its name: gathers, each with the index of one of its buffers.
ParamWaits = Mapping[str, Sequence[tuple[ParamAllGather, int]]]


def plan_param_waits(layers: Sequence[Layer], gathers: Sequence[ParamAllGather]) -> ParamWaits:
    """What each layer waits for. The gathers learn the order in which `layers`, the whole model, need their buffers."""
    places = {
        id(slot.parameter): (gather, index)
        for gather in gathers
        for index, buffer in enumerate(gather.buffers)
        for slot in buffer.slots
    }
    waits = {
        layer.name: list(dict.fromkeys(places[id(weight)] for weight in layer.module.parameters())) for layer in layers
    }
    for gather in gathers:
        gather.order.clear()
    for gather, index in dict.fromkeys(needed for layer in layers for needed in waits[layer.name]):
        gather.order.append(index)
    return waits
