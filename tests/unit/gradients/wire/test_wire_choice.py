"""`auto`: the estimate written out plainly, one choice on all ranks, and a resumed run that keeps it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from wires import all_reduced, layouts, of_ranks

from hvd_transformer.comm.world import World
from hvd_transformer.gradients.wire import choice
from hvd_transformer.gradients.wire.choice import MEASURED_STEPS, AutoWire, Measured, Message, make_wire
from hvd_transformer.gradients.wire.plain import WireOptions

MB = 2**20
# 28 MB of gradients in 4 messages, the last of which is ready when the computation of 0.25 s ends.
MESSAGES = [Message(0.1, 8 * MB), Message(0.15, 8 * MB), Message(0.2, 8 * MB), Message(0.25, 4 * MB)]
ENCODING = {kind: seconds / (28 * MB) for kind, seconds in {"fp16": 0.01, "int8": 0.02, "int4": 0.03}.items()}


def measured(megabits: float, latency: float = 3e-4) -> Measured:
    return Measured(latency, 8e-6 / megabits, 0.25, MESSAGES, ENCODING)


@pytest.mark.parametrize(
    ("megabits", "chosen"), [(20_000, "none"), (1000, "fp16"), (600, "int8"), (100, "int4"), (10, "int4")]
)
def test_the_slower_the_link_the_fewer_bytes(megabits: float, chosen: str) -> None:
    kinds = ("none", "fp16", "int8", "int4")
    assert min(kinds, key=measured(megabits).step_seconds) == chosen


def test_on_a_slow_link_messages_wait_for_each_other() -> None:
    found = measured(100).step_seconds("int8")
    assert found == pytest.approx(0.1 + 0.02 * 8 / 28 + 4 * 3e-4 + 28 * MB * 65 / 256 * 8 / 100e6)


def test_on_a_fast_link_only_the_last_message_is_waited_for() -> None:
    """At 10 Gbit/s the others take 7 ms each, while backward goes on."""
    found = measured(10_000).step_seconds("none")
    assert found == pytest.approx(0.25 + 3e-4 + 4 * MB * 8 / 10e9)


def test_more_ranks_exchange_twice_and_rows_have_8_bits() -> None:
    one = Measured(0.001, 1e-8, 0.0, [Message(0.0, MB), Message(0.0, MB, rows=True)], {}, exchanges=2)
    assert one.step_seconds("int4") == pytest.approx(4 * 0.001 + (17 / 128 + 65 / 256) * MB * 1e-8)
    assert one.step_seconds("fp16") == pytest.approx(3 * 0.001 + MB * 1e-8)


COSTS = {"fp16": 1e-6, "int8": 5e-6, "int4": 1.4e-5}  # seconds per byte of gradients


def slow_link(monkeypatch: pytest.MonkeyPatch, per_byte: float) -> None:
    """A link as slow as that, and costs of encoding that no machine decides."""
    monkeypatch.setattr(choice, "_measure_link", lambda group, device: (1e-6, per_byte * (1 + group.rank)))
    monkeypatch.setattr(choice, "_measure_encoding", lambda layouts, options: COSTS)


LAYOUT = {"a": (64, 80), "b": 300}


def gradient(step: int, rank: int) -> Tensor:
    return torch.randn(64, 80, generator=torch.Generator().manual_seed(10 * step + rank))


def run(world: World, num_steps: int, saved: Any = None, num_hosts: int = 2) -> tuple[Any, list[Tensor], list[str]]:
    """The wire after some steps of gradients that differ by rank, what it delivered of "a", and its news."""
    wire = make_wire("auto", world, layouts(LAYOUT), WireOptions(num_hosts=num_hosts))
    assert isinstance(wire, AutoWire)
    if saved is not None:
        wire.load(saved)
    found, news = [], []
    for step in range(num_steps):
        found.append(all_reduced(wire, {"a": gradient(step, world.rank), "b": torch.ones(300)}, step)["a"])
        news += filter(None, [wire.take_news()])
    return wire, found, news


@pytest.mark.parametrize(("per_byte", "chosen"), [(1e-12, "none"), (3e-6, "fp16"), (1.8e-5, "int8"), (1e-3, "int4")])
def test_all_ranks_measure_then_become_what_the_slowest_needs(
    per_byte: float, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_link(monkeypatch, per_byte)
    for wire, found, news in of_ranks(2, lambda world: run(world, MEASURED_STEPS + 2)):
        assert wire.format == chosen and wire.state()["chosen"] == chosen
        assert len(news) == 1 and news[0].startswith(f"communication.compression=auto: {chosen} (")
        for step in range(MEASURED_STEPS):
            assert torch.equal(found[step], gradient(step, 0) + gradient(step, 1))


def test_a_resumed_run_keeps_the_choice_unless_the_number_of_hosts_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_link(monkeypatch, 1.8e-5)
    (wire, _, _), _ = of_ranks(2, lambda world: run(world, MEASURED_STEPS + 1))
    saved = wire.state()
    for num_hosts, kept in ((2, "int8"), (3, "none")):
        again, _, news = of_ranks(2, lambda world, hosts=num_hosts: run(world, 1, saved, hosts))[0]
        assert again.format == kept and not news
        assert bool(again.tensors()) == (kept == "int8")


def test_the_real_measurements_are_positive() -> None:
    def measure(world: World) -> tuple[float, ...]:
        made = layouts(LAYOUT)
        return (
            *choice._measure_link(world, torch.device("cpu")),
            *choice._measure_encoding(made, WireOptions()).values(),
        )

    for numbers in of_ranks(2, measure):
        assert len(numbers) == 5 and min(numbers) > 0


def test_the_link_is_measured_between_the_devices_that_have_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of GPUs it is NCCL's, and the host's clock waits for what they compute."""
    seen, waited = [], []
    monkeypatch.setattr(choice, "_measure_link", lambda group, device: seen.append(device) or (1e-6, 1e-9))
    monkeypatch.setattr(choice, "has_streams", lambda device: True)
    stream = SimpleNamespace(synchronize=lambda: waited.append(True))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    made = {"a": layouts({"a": 8})["a"]}
    wire = AutoWire(World(), made)
    wire.begin_step(1, 9, 1.0)
    wire.all_reduce_async(made["a"].values, "a")
    wire.finish_sending()
    assert seen == [made["a"].values.device]
    assert len(waited) >= 2
