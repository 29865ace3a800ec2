"""How a group calls Horovod's collectives, with a stand-in that records the calls and answers at once."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hvd_transformer.comm.group import Group, Link


class Noted:
    """A world in which the other ranks hold zeros."""

    Sum = "Sum"
    Min = Max = None

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.polled = 0

    def allreduce_async_(self, tensor: Tensor, **_: object) -> Tensor:
        self.calls.append("allreduce")
        return tensor

    def reducescatter_async(self, parts: Tensor, **_: object) -> Tensor:
        self.calls.append("reducescatter")
        return parts[1]

    def poll(self, handle: object) -> bool:
        self.polled += 1
        return True

    def synchronize(self, handle: Any) -> Any:
        return handle


def make_group(size: int, **link: bool) -> tuple[Group, Noted]:
    horovod: Any = Noted()
    made = Link(horovod, "rank 1")
    for name, value in link.items():
        assert hasattr(made, name)
        setattr(made, name, value)
    return Group(made, range(size), 1), horovod


@pytest.fixture(autouse=True)
def exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only class that `Link.guard` imports."""
    package = SimpleNamespace(HorovodInternalError=RuntimeError)
    monkeypatch.setitem(sys.modules, "horovod.common.exceptions", package)


@pytest.mark.parametrize(
    ("size", "link", "used"),
    [
        (2, {"gloo": True}, "reducescatter"),
        (4, {"gloo": True}, "reducescatter"),
        (3, {"gloo": True}, "allreduce"),
        (6, {"gloo": True}, "allreduce"),
        (3, {}, "reducescatter"),
        (4, {"gloo": True, "sums_whole": True}, "allreduce"),
    ],
)
def test_a_rank_gets_its_part_of_the_sum_and_gloo_sums_whole_where_it_cannot_be_trusted(
    size: int, link: dict[str, bool], used: str
) -> None:
    group, horovod = make_group(size, **link)
    part = group.reduce_scatter_async(torch.arange(2.0 * size), "sums")()
    assert part.tolist() == [2.0, 3.0]
    assert horovod.calls == [used]


def test_gpus_scatter_their_sums_by_nccl_also_where_gloo_s_cannot_be_trusted() -> None:
    group, horovod = make_group(3, gloo=True)
    group.reduce_scatter_async(torch.empty(6, device="meta"), "sums")  # stands for a GPU's
    assert horovod.calls == ["reducescatter"]


@pytest.mark.parametrize("asleep", [True, False])
def test_only_a_published_horovod_is_polled(asleep: bool) -> None:
    group, horovod = make_group(2, waits_asleep=asleep)
    group.all_reduce_(torch.ones(1), "sum")
    assert horovod.polled == (0 if asleep else 1)
