"""Collectives: the closed forms of ring, tree and recursive doubling, limits, and what must never decrease."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_transformer.errors import UserError
from hvd_transformer.planning.constants import Backend, Constants, Link
from hvd_transformer.planning.scaling.collectives import NOTHING, Collective, Group, Seconds, added, collective_time

ALPHA, BETA = 1e-5, 1e9  # within a host
FAR_ALPHA, FAR_BETA = 1e-4, 1e8  # between hosts


def machine(host: Link | None = None, network: Link | None = None) -> Constants:
    links = {
        "host": host or Link(latency=ALPHA, bandwidth=BETA),
        "network": network or Link(latency=FAR_ALPHA, bandwidth=FAR_BETA, cpu_seconds_per_byte=2e-9),
    }
    return Constants(
        device="device",
        matmul={"fp32": {64: 1e9}},
        memory_bandwidth=1e9,
        memory_bytes=2**30,
        links=dict.fromkeys(("gloo", "mpi", "nccl"), links),
    )


def test_ring_of_two_ranks() -> None:
    found = collective_time(machine(), "gloo", "all_reduce", Group(2), 1e6)
    assert found == pytest.approx(Seconds(2 * ALPHA, 1e6 / BETA))  # 2 (P - 1) / P = 1


def test_ring_over_hosts_passes_each_link_once_a_round() -> None:
    found = collective_time(machine(), "gloo", "all_reduce", Group(8, hosts=2), 8e6)
    # 14 messages of a megabyte; each round crosses between the hosts once on the path of a chunk.
    assert found.latency == pytest.approx(2 * (6 * ALPHA + FAR_ALPHA))
    assert found.transfer == pytest.approx(14 * 1e6 / FAR_BETA)
    assert found.cpu == pytest.approx(14 * 1e6 * 2e-9)


def test_groups_that_share_a_link_have_a_part_of_it_each() -> None:
    alone = collective_time(machine(), "gloo", "all_reduce", Group(4, hosts=4), 1e6)
    shared = collective_time(machine(), "gloo", "all_reduce", Group(4, hosts=4, sharing=3), 1e6)
    assert shared.transfer == pytest.approx(3 * alone.transfer) and shared.latency == alone.latency


@pytest.mark.parametrize(("backend", "steps"), [("gloo", 3), ("mpi", 7), ("nccl", 7)])
def test_reduce_scatter_is_halving_over_gloo_and_a_ring_elsewhere(backend: Backend, steps: int) -> None:
    found = collective_time(machine(), backend, "reduce_scatter", Group(8), 8e6)
    assert found == pytest.approx(Seconds(steps * ALPHA, 7e6 / BETA))
    gathered = collective_time(machine(), backend, "all_gather", Group(8), 8e6)
    assert gathered == pytest.approx(Seconds(7 * ALPHA, 7e6 / BETA))


def test_small_messages_take_a_tree_over_nccl_and_doubling_over_mpi() -> None:
    hosts, group = 16, Group(128, hosts=16)
    tree = collective_time(machine(), "nccl", "all_reduce", group, 8)
    assert tree.latency == pytest.approx(2 * (7 * ALPHA + math.log2(hosts) * FAR_ALPHA))
    assert tree.transfer == pytest.approx(8 / (0.45 * FAR_BETA))
    doubling = collective_time(machine(), "mpi", "all_reduce", group, 8)
    assert doubling.latency == pytest.approx(3 * ALPHA + 4 * FAR_ALPHA)
    ring = collective_time(machine(), "gloo", "all_reduce", group, 8)
    assert ring.latency == pytest.approx(2 * (112 * ALPHA + 15 * FAR_ALPHA))


def test_large_messages_take_a_ring() -> None:
    for backend in ("nccl", "mpi"):
        found = collective_time(machine(), backend, "all_reduce", Group(16, hosts=2), 1e10)
        assert found.transfer == pytest.approx(2 * 15 / 16 * 1e10 / FAR_BETA)


def test_nccl_rings_over_hosts_have_a_plateau() -> None:
    slow_host = Link(latency=1.0, bandwidth=1.0)
    found = collective_time(machine(slow_host, slow_host), "nccl", "all_reduce", Group(2, hosts=2), 1e6)
    assert found.latency == pytest.approx(1.9 * 2)
    assert collective_time(machine(slow_host), "nccl", "all_reduce", Group(2), 1e6).latency == pytest.approx(2)


def test_nothing_is_sent_by_one_rank_or_without_bytes() -> None:
    assert collective_time(machine(), "gloo", "all_reduce", Group(1), 1e6) == NOTHING
    assert collective_time(machine(), "gloo", "all_reduce", Group(4), 0) == NOTHING


def test_a_link_that_is_not_needed_may_be_missing() -> None:
    known = machine()
    near = known.model_copy(update={"links": {"gloo": {"host": known.links["gloo"]["host"]}}})
    far = known.model_copy(update={"links": {"gloo": {"network": known.links["gloo"]["network"]}}})
    assert collective_time(near, "gloo", "all_reduce", Group(4), 1e6).total > 0
    assert collective_time(far, "gloo", "all_reduce", Group(4, hosts=4), 1e6).total > 0
    with pytest.raises(UserError, match=r"links.gloo.network is missing"):
        collective_time(near, "gloo", "all_reduce", Group(4, hosts=2), 1e6)
    with pytest.raises(UserError, match=r"links.gloo.host is missing"):
        collective_time(far, "gloo", "all_reduce", Group(4, hosts=2), 1e6)


@given(
    backend=st.sampled_from(["gloo", "mpi", "nccl"]),
    kind=st.sampled_from(["all_reduce", "reduce_scatter", "all_gather"]),
    per_host=st.integers(1, 8),
    hosts=st.integers(1, 64),
    num_bytes=st.floats(1, 1e10),
    more=st.floats(1, 100),
)
def test_time_grows_with_bytes_and_falls_with_bandwidth(
    backend: Backend, kind: Collective, per_host: int, hosts: int, num_bytes: float, more: float
) -> None:
    group = Group(per_host * hosts, hosts)
    own = collective_time(machine(), backend, kind, group, num_bytes).total
    assert own * (1 + 1e-9) >= collective_time(machine(), backend, kind, group, num_bytes / more).total
    faster = Link(latency=FAR_ALPHA, bandwidth=more * FAR_BETA)
    assert own * (1 + 1e-9) >= collective_time(machine(network=faster), backend, kind, group, num_bytes).total


def test_sums_of_times() -> None:
    assert added([Seconds(1, 2, 3), Seconds(4, 5, 6)]) == Seconds(5, 7, 9)
    assert added([]) == NOTHING
    assert Seconds(1, 2, 3).times(2) == Seconds(2, 4, 6)
