"""Which format: the one of `communication.compression`, or with `auto` one that the link decides.

`auto` sends the first steps as they are and measures meanwhile: the link, with a small and a large allreduce, the
computation of a step, and what encoding costs on this device. The slowest rank counts. From that it estimates the time
of a step with each format and takes the shortest,

    step = computation + encoding + what the computation cannot hide of: messages × latency + bytes ÷ bandwidth

of `none`, `fp16`, `int8` and `int4`, with which the loss stays within 0.5 % (`benchmarks.compressed_loss`). `powersgd`
is not among them: it cost several per cent.
"""

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hvd_transformer.comm.group import Group, Link
from hvd_transformer.gradients.buffers import ParamSlot
from hvd_transformer.gradients.wire.fp16 import Fp16Fp32SumWire, Fp16Wire
from hvd_transformer.gradients.wire.plain import InTransit, Layout, Wire, WireOptions
from hvd_transformer.gradients.wire.powersgd import PowerSgdWire
from hvd_transformer.gradients.wire.quantized import Int4Wire, Int8Wire

# Steps that are sent as they are, of which the first two are slower than the rest.
MEASURED_STEPS, SLOW_STEPS = 6, 2
HIDDEN = 2 / 3  # the part of a step's computation during which gradients are sent: backward
SMALL, LARGE = 1 << 10, 1 << 18  # float32 values: 4 KiB and 1 MiB
# Of a value in transit.
_BYTES = {wire.format: wire.bits / 8 + 4 / wire.block for wire in (Int8Wire, Int4Wire)}
_FORMATS: dict[str, type[Wire]] = {
    kind.format: kind for kind in (Wire, Fp16Wire, Fp16Fp32SumWire, Int8Wire, Int4Wire, PowerSgdWire)
}


@dataclass(frozen=True)
class Measured:
    """What the choice follows from: seconds, and bytes per step that travel with each format, with their messages.

    `last`: the part of a step's bytes that is sent when backward has ended, which nothing hides.
    """

    latency: float
    seconds_per_byte: float
    computation: float
    last: float
    encoding: Mapping[str, float]
    traffic: Mapping[str, tuple[float, float]]

    def step_seconds(self, kind: str) -> float:
        """The estimated time of a step."""
        num_bytes, messages = self.traffic[kind]
        transfer = num_bytes * self.seconds_per_byte
        sending = messages * self.latency + transfer
        shown = max(sending - HIDDEN * self.computation, self.latency + self.last * transfer)
        return self.computation + self.encoding.get(kind, 0.0) + shown

    def choose(self) -> str:
        """The format with the shortest step; the first of equals, in the order of `traffic`."""
        return min(self.traffic, key=self.step_seconds)


class AutoWire(Wire):
    """Sends as it is while it measures, then becomes what `Measured.choose` says on all ranks.

    A checkpoint has the choice. A resumed run keeps it, unless it is on another number of hosts.
    """

    def __init__(self, group: Group, layouts: Mapping[str, Layout], options: WireOptions | None = None) -> None:
        super().__init__(group, layouts, options)
        self._inner = Wire(group, layouts, self.options)
        self._chosen = False
        self._num_steps = 0
        self._news: str | None = None
        self._computation: list[float] = []
        self._sent: list[int] = []  # bytes of each message of buffers in this step
        self._sent_rows: list[int] = []

    @property
    def overflowed(self) -> bool:  # type: ignore[override]
        return self._inner.overflowed

    def begin_step(self, step: int, total_steps: int, scale: float) -> None:
        if not self._chosen:
            if self._num_steps == 0:
                self._link = _measure_link(self.group)
            if self._num_steps == MEASURED_STEPS:
                self._choose()
            self._num_steps += 1
        self._sent.clear()
        self._sent_rows.clear()
        self._inner.begin_step(step, total_steps, scale)
        self._began = time.perf_counter()

    def all_reduce_async(self, gradients: Tensor, name: str) -> InTransit:
        return self._note(self._inner.all_reduce_async(gradients, name), self._sent)

    def reduce_scatter_async(self, gradients: Tensor, name: str) -> InTransit:
        return self._note(self._inner.reduce_scatter_async(gradients, name), self._sent)

    def all_gather_async(self, rows: Tensor, name: str) -> InTransit:
        return self._note(self._inner.all_gather_async(rows, name), self._sent_rows)

    def finish_sending(self) -> None:
        if not self._chosen and self._num_steps > SLOW_STEPS:
            self._computation.append(time.perf_counter() - self._began)
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

    def _note(self, sent: InTransit, notes: list[int]) -> InTransit:
        notes.append(sent.nbytes)
        return sent

    def _become(self, kind: str) -> None:
        self._inner, self._chosen, self.format = _FORMATS[kind](self.group, self.layouts, self.options), True, kind

    def _choose(self) -> None:
        """Agree on the largest of all ranks' measurements, and choose from it. Collective."""
        encoding = _measure_encoding(self.layouts, self.options)
        # An all-gather of rows takes as long as an allreduce of half of all ranks' rows.
        rows = sum(self._sent_rows) * self.group.size / 2
        of_buffers = sum(self._sent)
        last = self._sent[-1] / max(1, of_buffers) if self._sent else 1.0
        own = [*self._link, statistics.median(self._computation), of_buffers, rows, len(self._sent), last]
        numbers = torch.tensor([*own, *encoding.values()], dtype=torch.float64)
        world = self.options.world or self.group
        latency, per_byte, computation, whole, rows, messages, last, *costs = world.all_reduce_(
            numbers, "wire.choice", "max"
        ).tolist()
        exchanges = 1 if self.group.size == 2 or self.options.sharded else 2
        traffic = {
            "none": (whole + rows, messages),
            "fp16": ((whole + rows) / 2, messages + 1),
            "int8": ((whole + rows) * _BYTES["int8"] / 4, messages * exchanges),
            "int4": ((whole * _BYTES["int4"] + rows * _BYTES["int8"]) / 4, messages * exchanges),
        }
        seconds = {kind: cost * whole for kind, cost in zip(encoding, costs, strict=True)}
        measured = Measured(latency, per_byte, computation, last, seconds, traffic)
        self._become(measured.choose())
        times = ", ".join(f"{kind} {1000 * measured.step_seconds(kind):.0f} ms" for kind in traffic)
        self._news = (
            f"communication.compression=auto: {self.format} (allreduce: {1000 * latency:.2f} ms, "
            f"{8e-6 / per_byte:,.0f} Mbit/s; estimated steps: {times})"
        )


def _measure_link(group: Group) -> tuple[float, float]:
    """Seconds of a small allreduce, and seconds per byte of a large one. Collective."""

    def seconds(count: int, repeats: int) -> float:
        values, found = torch.zeros(count), []
        for _ in range(repeats):
            group.barrier()
            began = time.perf_counter()
            group.all_reduce_(values, f"wire.link.{count}")
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
