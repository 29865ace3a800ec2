"""All-gathers ZeRO-sharded parameters after the update, while the next forward begins.

update     | bucket 2 | bucket 1 | bucket 0 |
in flight             | ==== 2 ==== | ==== 1 ==== | ==== 0 ==== |
forward                             | layer 1 | layer 2 | …          each layer waits for the weights it uses
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from torch import Tensor

from hvd_transformer.comm.group import Group
from hvd_transformer.gradients.buffers import GradBuffer
from hvd_transformer.nn.contracts import Layer


class ParamAllGather:
    """The parameters of one stage's `buffers`, in the order in which forward needs them, by their collectives' names.

    After `start` each rank has its own shards only: `wait` before a buffer's parameters are used. Later ones are sent
    as earlier ones arrive, so ranks that may need different buffers call `wait_all` before they wait for each other.
    At most `bytes_in_flight` are.
    """

    def __init__(self, buffers: Mapping[str, GradBuffer], group: Group, bytes_in_flight: float = math.inf) -> None:
        self._most = bytes_in_flight
        self._names, self._buffers, self._group = list(buffers), list(buffers.values()), group
        self._num_sent = self._num_arrived = len(buffers)
        self._in_flight: deque[Callable[[], Tensor]] = deque()
        self._bytes = 0  # in flight
        # Two stages may share a tied weight. On GPUs the second stage's stream comes after the copy on the first one's:
        # it waits for what the first stage has computed with the weight.
        self._lock = threading.Lock()

    def start(self) -> None:
        """Call after the update."""
        self._num_sent = self._num_arrived = 0
        self._send()

    def wait(self, number: int) -> None:
        """Return when the parameters of the buffer in this place are whole."""
        while self._num_arrived <= number:
            with self._lock:
                if self._num_arrived <= number:
                    self._arrive()
        with self._lock:
            self._buffers[number].renew_shadow()

    def wait_all(self) -> None:
        """Return when all parameters are whole."""
        if self._buffers:  # a stage of an embedding alone has none if the output layer's stage has the tied weight
            self.wait(len(self._buffers) - 1)

    def _send(self) -> None:
        while self._num_sent < len(self._buffers):
            buffer = self._buffers[self._num_sent]
            if self._in_flight and self._bytes + buffer.parameters.nbytes > self._most:
                return
            name = self._names[self._num_sent]
            self._in_flight.append(self._group.all_gather_async(buffer.own_parameters, name))
            self._bytes += buffer.parameters.nbytes
            self._num_sent += 1

    def _arrive(self) -> None:
        parameters = self._buffers[self._num_arrived].parameters
        parameters.copy_(self._in_flight.popleft()())
        self._bytes -= parameters.nbytes
        self._num_arrived += 1
        self._send()


# What a layer waits for, by its name: all-gathers, each with the place of one of its buffers.
ParamWaits = Mapping[str, Sequence[tuple[ParamAllGather, int]]]


def make_param_all_gathers(
    layers: Sequence[Layer], stages: Sequence[Sequence[GradBuffer]], group: Group, bytes_in_flight: float = math.inf
) -> tuple[list[ParamAllGather], ParamWaits]:
    """One for the buffers of each stage, and what each of `layers`, the whole model, waits for."""
    names = {buffer: f"shards.{index}" for index, buffer in enumerate(chain.from_iterable(stages))}
    home = {id(slot.parameter): buffer for buffer in names for slot in buffer.slots}
    needs = {
        layer.name: list(dict.fromkeys(home[id(own)] for own in layer.module.parameters() if id(own) in home))
        for layer in layers  # a weight that is not trained is in no buffer
    }
    order = list(dict.fromkeys(chain.from_iterable(needs.values())))
    gathers = []
    places: dict[GradBuffer, tuple[ParamAllGather, int]] = {}
    for stage in map(set, stages):
        own = [buffer for buffer in order if buffer in stage]
        gather = ParamAllGather({names[buffer]: buffer for buffer in own}, group, bytes_in_flight)
        gathers.append(gather)
        places |= {buffer: (gather, place) for place, buffer in enumerate(own)}
    return gathers, {name: [places[buffer] for buffer in buffers] for name, buffers in needs.items()}
