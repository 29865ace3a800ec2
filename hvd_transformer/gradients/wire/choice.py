"""Which format: the one of `communication.compression`, or with `auto` one that the link decides.

`auto` sends the first steps as they are and measures meanwhile: the link, with a small and a large allreduce, when each
message of a step is ready, and what encoding costs on this device. From that each rank estimates the time of a step
with each format, as if the messages went through one link one after the other:

    computation  |------- forward -------|------- backward -------|
    link                                      | 1 |   | 2 |     | 3 | 4 |      the step ends when both have

The slowest rank counts, and the shortest of `none`, `fp16`, `int8` and `int4` is taken: they keep the loss within
0.5 % (`benchmarks.compressed_loss`). `powersgd` is not among them, as it cost several per cent.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvd_transformer.comm.group import Group, Link
from hvd_transformer.comm.streams import has_streams
from hvd_transformer.gradients.buffers import ParamSlot
from hvd_transformer.gradients.wire.fp16 import Fp16Fp32SumWire, Fp16Wire
from hvd_transformer.gradients.wire.plain import InTransit, Layout, Wire, WireOptions
from hvd_transformer.gradients.wire.powersgd import PowerSgdWire
from hvd_transformer.gradients.wire.quantized import Int4Wire, Int8Wire

# Steps that are sent as they are, of which the first two are slower than the rest.
MEASURED_STEPS, SLOW_STEPS = 6, 2
SMALL, LARGE = 1 << 10, 1 << 18  # float32 values: 4 KiB and 1 MiB
_FORMATS: dict[str, type[Wire]] = {
    kind.format: kind for kind in (Wire, Fp16Wire, Fp16Fp32SumWire, Int8Wire, Int4Wire, PowerSgdWire)
}
# Bytes in transit per byte of gradients.
RATIOS = {"none": 1.0, "fp16": 0.5} | {
    wire.format: (wire.bits / 8 + 4 / wire.block) / 4 for wire in (Int8Wire, Int4Wire)
}


class Message(NamedTuple):
    """A message of a step: when it is ready, in seconds from the step's beginning, and its bytes uncompressed."""

    ready: float
    nbytes: float
    rows: bool = False  # of embeddings, whose format has at least 8 bits


@dataclass(frozen=True)
class Measured:
    """What the choice follows from: seconds, of encoding per byte of gradients, and a step's messages.

    `exchanges` is how often the ranks exchange messages for a sum that Horovod does not form.
    """

    latency: float
    seconds_per_byte: float
    computation: float
    messages: Sequence[Message]
    encoding: Mapping[str, float]
    exchanges: int = 1

    def step_seconds(self, kind: str) -> float:
        """The estimated time of a step."""
        encoding, sent = 0.0, 0.0
        latency = self.latency * (self.exchanges if kind in ("int8", "int4") else 1)
        for message in self.messages:
            ratio = max(RATIOS[kind], RATIOS["int8"]) if message.rows else RATIOS[kind]
            encoding += message.nbytes * self.encoding.get(kind, 0.0)
            sent = max(sent, message.ready + encoding) + latency + message.nbytes * ratio * self.seconds_per_byte
        return max(sent, self.computation + encoding) + (self.latency if kind == "fp16" else 0.0)  # the largest values


class AutoWire(Wire):
    """Sends as it is while it measures, then becomes what `Measured.choose` says on all ranks.

    A checkpoint has the choice. A resumed run keeps it, unless it is on another number of hosts.
    """

    def __init__(self, group: Group, layouts: Mapping[str, Layout], options: WireOptions | None = None) -> None:
        super().__init__(group, layouts, options)
        self._inner = Wire(group, layouts, self.options)
        self._devices = list(dict.fromkeys(layout.values.device for layout in layouts.values()))  # of all stages
        self._chosen = False
        self._num_steps = 0
        self._news: str | None = None
        self._messages: list[Message] = []  # of this step
        self._steps: list[tuple[float, list[Message]]] = []  # with their computation

    @property
    def overflowed(self) -> bool:
        return self._inner.overflowed

    def begin_step(self, step: int, total_steps: int, scale: float) -> None:
        if not self._chosen:
            if self._num_steps == 0:
                self._link = _measure_link(self.group, self._devices[0])
            if self._num_steps == MEASURED_STEPS:
                self._choose()
            self._num_steps += 1
        self._messages = []
        self._inner.begin_step(step, total_steps, scale)
        self._began = self._now(*self._devices)

    def all_reduce_async(self, gradients: Tensor, name: str) -> InTransit:
        return self._note(self._inner.all_reduce_async(gradients, name), gradients.device)

    def reduce_scatter_async(self, gradients: Tensor, name: str) -> InTransit:
        return self._note(self._inner.reduce_scatter_async(gradients, name), gradients.device)

    def all_gather_async(self, rows: Tensor, name: str) -> InTransit:
        return self._note(self._inner.all_gather_async(rows, name), rows.device, rows=True)

    def finish_sending(self) -> None:
        if not self._chosen and self._num_steps > SLOW_STEPS:
            self._steps.append((self._now(*self._devices) - self._began, self._messages))
        self._inner.finish_sending()

    def end_step(self) -> None:
        self._inner.end_step()

    def skip_step(self) -> None:
        self._inner.skip_step()

    def state(self) -> dict[str, Any]:
        if not self._chosen:
            return {}
        return {"chosen": self.format, "num_hosts": self.options.num_hosts, "inner": self._inner.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        # powersgd: an older version's choice
        if state.get("num_hosts") == self.options.num_hosts and state["chosen"] != PowerSgdWire.format:
            self._become(state["chosen"])
            self._inner.load(state["inner"])

    def tensors(self) -> dict[str, Tensor]:
        return self._inner.tensors()

    def take_news(self) -> str | None:
        news, self._news = self._news, None
        return news

    def _note(self, sent: InTransit, device: torch.device, *, rows: bool = False) -> InTransit:
        if not self._chosen:
            # An all-gather of rows takes as long as an allreduce of half of all ranks' rows.
            nbytes = sent.nbytes * (self.group.size / 2 if rows else 1)
            self._messages.append(Message(self._now(device) - self._began, nbytes, rows))
        return sent

    def _now(self, *devices: torch.device) -> float:
        """The time when the computations of these devices are done: while it measures, the host waits for GPUs."""
        for device in devices:
            if not self._chosen and has_streams(device):
                torch.cuda.current_stream(device).synchronize()
        return time.perf_counter()

    def _become(self, kind: str) -> None:
        self._inner, self._chosen, self.format = _FORMATS[kind](self.group, self.layouts, self.options), True, kind

    def _choose(self) -> None:
        """Agree on the largest of all ranks' estimates, and choose. Collective."""
        latency, per_byte = self._link
        computation, messages = sorted(self._steps)[len(self._steps) // 2]
        exchanges = 1 if self.group.size == 2 or self.options.sharded else 2
        encoding = _measure_encoding(self.layouts, self.options)
        measured = Measured(latency, per_byte, computation, messages, encoding, exchanges)
        own = [latency, per_byte, *map(measured.step_seconds, RATIOS)]
        world = self.options.world or self.group
        slowest = world.all_reduce_(torch.tensor(own, dtype=torch.float64), "wire.choice", "max")
        latency, per_byte, *seconds = slowest.tolist()
        estimates = dict(zip(RATIOS, seconds, strict=True))
        self._become(min(estimates, key=estimates.__getitem__))
        times = ", ".join(f"{kind} {1000 * step:.0f} ms" for kind, step in estimates.items())
        self._news = (
            f"communication.compression=auto: {self.format} (allreduce: {1000 * latency:.2f} ms, "
            f"{8e-6 / per_byte:,.0f} Mbit/s; estimated steps: {times})"
        )


def _measure_link(group: Group, device: torch.device) -> tuple[float, float]:
    """Seconds of a small allreduce between these devices, and seconds per byte of a large one. Collective."""

    def seconds(count: int, repeats: int) -> float:
        values, found = group.zeros_like(torch.empty(count, device=device)), []
        for _ in range(repeats):
            group.barrier()
            began = time.perf_counter()
            group.all_reduce_(values, f"wire.link.{count}")[0].item()  # waits for a GPU
            found.append(time.perf_counter() - began)
        return statistics.median(found)

    seconds(SMALL, 1)  # connections may be made now
    small, large = seconds(SMALL, 5), seconds(LARGE, 3)
    return small, max(large - small, 1e-9) / (4 * (LARGE - SMALL))


def _measure_encoding(layouts: Mapping[str, Layout], options: WireOptions) -> dict[str, float]:
    """The seconds per byte of gradients that each format computes: the shortest of some steps."""
    device = next(iter(layouts.values())).values.device
    weight = torch.nn.Parameter(torch.randn(LARGE, device=device))
    layout = Layout(weight.data, [ParamSlot("probe", weight, 0)])
    alone, found = Group(Link(None, "probe"), [0], 0), {}

    def seconds(wire: Wire, step: int) -> float:
        gradients = layout.values.clone()
        began = time.perf_counter()
        wire.begin_step(step, 0, 1.0)
        sent = wire.all_reduce_async(gradients, "probe")
        wire.finish_sending()
        sent.wait()[0].item()  # waits for a GPU
        wire.end_step()
        return time.perf_counter() - began

    for kind in ("fp16", "int8", "int4"):
        wire = _FORMATS[kind](alone, {"probe": layout}, options)
        found[kind] = min(seconds(wire, step) for step in range(5)) / layout.values.nbytes
    return found


def make_wire(
    compression: str, group: Group, layouts: Mapping[str, Layout], options: WireOptions | None = None
) -> Wire:
    """The format of `communication.compression`; a single rank sends nothing."""
    kind = AutoWire if compression == "auto" else _FORMATS[compression]
    return (Wire if group.size == 1 else kind)(group, layouts, options)
