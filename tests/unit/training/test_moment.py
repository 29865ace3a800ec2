"""What a GPU still computes when its host begins to wait does not count as waiting."""

import time
from typing import Any

import pytest
import torch

from hvd_transformer.training.moment import Moment


def test_on_a_cpu_time_is_the_hosts() -> None:
    earlier = Moment([torch.device("cpu")] * 2)
    time.sleep(0.02)
    assert Moment([torch.device("cpu")] * 2).since(earlier) >= 0.02


def test_on_gpus_it_is_that_of_the_one_that_waited_least(monkeypatch: pytest.MonkeyPatch) -> None:
    milliseconds = {"cuda:0": [5.0, 30.0], "cuda:1": [20.0, 32.0]}  # when each gets there; the second has more to do

    class Event:
        """Reached at the next time of its stream's device, which is known when it has happened."""

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.happened = False

        def record(self, stream: str) -> None:
            self.time = milliseconds[stream].pop(0)

        def synchronize(self) -> None:
            self.happened = True

        def elapsed_time(self, later: Any) -> float:
            assert later.happened
            return float(later.time - self.time)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", str)
    devices = [torch.device("cuda", index) for index in (0, 1)]
    own_work, arrived = Moment(devices), Moment(devices)
    assert arrived.since(own_work) == pytest.approx(0.012)
