"""The sums of a step, and what the watchdog knows while the host waits for them."""

import threading
from types import SimpleNamespace

import pytest
import torch
from fake_world import FakeWorld

from hvd_transformer.monitoring.heartbeat import RESULTS, Heartbeat
from hvd_transformer.training import step_stats
from hvd_transformer.training.state import NO_WISHES, Sums
from hvd_transformer.training.step_stats import StepStats


@pytest.mark.parametrize(
    ("on_gpu", "ranks", "sends", "waits"),
    [
        (True, 2, True, True),
        (True, 2, False, False),  # a local step
        (True, 1, True, False),
        (False, 2, True, False),
    ],
)
def test_a_gpus_host_waits_for_the_other_ranks(
    on_gpu: bool, ranks: int, sends: bool, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are in the result of a step where one of them has not queued it: that one alone is late."""
    world, heartbeat = FakeWorld(size=ranks), Heartbeat()
    heartbeat.link, heartbeat.phase = world.link, "step"
    found = []

    def start_copy(values: torch.Tensor):
        def wait() -> torch.Tensor:
            found.append((dict(world.link.waiting), heartbeat.place()))
            return values

        return wait

    monkeypatch.setattr(step_stats, "start_copy", start_copy)
    monkeypatch.setattr(step_stats, "has_streams", lambda device: on_gpu)
    mesh = SimpleNamespace(devices=(torch.device("cpu"),), tp=1, tp_rank=0)
    stats = StepStats(world, mesh, (5, 2), NO_WISHES, Sums(), sends=sends)  # type: ignore[arg-type]
    stats.add_loss(torch.tensor(10.0))
    stats.send()
    stats.wait()
    totals, norm = stats.start_reading(torch.tensor(3.0))()
    assert norm == 3.0
    if sends:
        assert (totals.loss, totals.targets, totals.samples) == (2.0, 5 * ranks, 2 * ranks)
    ((waiting, place),) = found
    assert waiting == ({RESULTS: threading.get_ident()} if waits else {})
    assert place == ("update", RESULTS if waits else None)
    assert not world.link.waiting
