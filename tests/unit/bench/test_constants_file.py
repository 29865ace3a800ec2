"""Several benchmarks complete one file; of another device it begins anew."""

from pathlib import Path

import pytest
import torch
from thread_world import make_worlds, on_ranks

from hvd_transformer.bench import constants_file
from hvd_transformer.bench.constants_file import device_constants, with_device, with_link, write
from hvd_transformer.comm.world import World
from hvd_transformer.errors import UserError
from hvd_transformer.planning.constants import Constants, Link, load

CPU = torch.device("cpu")
SLOW, FAST = Link(latency=1e-3, bandwidth=1e6), Link(latency=1e-5, bandwidth=1e9)


def device(name: str, rate: float = 1e9) -> Constants:
    return Constants(device=name, matmul={"fp32": {64: rate}}, memory_bandwidth=1e10, memory_bytes=2**30)


@pytest.fixture(autouse=True)
def this_machine(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Its name, and a note of each measurement."""
    measured: list[str] = []

    def measure(_: torch.device) -> Constants:
        measured.append("measured")
        return device("this", 2e9)

    monkeypatch.setattr(constants_file, "device_name", lambda _: "this")
    monkeypatch.setattr(constants_file, "measure_device", measure)
    return measured


def test_each_run_keeps_what_the_others_measured(tmp_path: Path, this_machine: list[str]) -> None:
    file, world = tmp_path / "new" / "constants.yaml", World()
    for backend, link in (("gloo", SLOW), ("mpi", FAST), ("gloo", FAST)):
        known = device_constants(file, CPU, world)
        assert known is not None
        write(with_link(known, backend, "host", link), file)
    found = load(str(file))
    assert found.links == {"gloo": {"host": FAST}, "mpi": {"host": FAST}}
    assert found.matmul == {"fp32": {64: 2e9}} and "hvd-transformer bench" in found.origin
    assert this_machine == ["measured"]  # by the first one
    write(found.model_copy(update={"training_fraction": {"fp32": 0.5}}), file)
    again = device_constants(file, CPU, world, anew=True)
    assert again is not None and again.links == found.links and again.training_fraction == {"fp32": 0.5}
    assert this_machine == ["measured"] * 2


def test_a_link_between_hosts_is_beside_that_within_a_host() -> None:
    both = with_link(with_link(device("this"), "gloo", "host", FAST), "gloo", "network", SLOW)
    assert both.links == {"gloo": {"host": FAST, "network": SLOW}}
    assert with_link(both, "gloo", "host", None) == both


def test_what_was_measured_on_another_device_is_dropped(tmp_path: Path) -> None:
    file = tmp_path / "constants.yaml"
    write(with_link(device("another"), "gloo", "host", FAST), file)
    assert device_constants(file, CPU, World()) == device("this", 2e9)


def test_rates_are_measured_anew_and_the_rest_stays() -> None:
    known = with_link(device("this").model_copy(update={"jitter": 0.1}), "gloo", "host", FAST)
    found = with_device(known, device("this", 7e9))
    assert found == known.model_copy(update={"matmul": {"fp32": {64: 7e9}}})
    assert with_device(None, known) is known


def test_only_rank_0_reads_and_a_wrong_file_is_told_on_all_ranks(tmp_path: Path, this_machine: list[str]) -> None:
    file = tmp_path / "constants.yaml"
    found = on_ranks(make_worlds(2), lambda world: device_constants(file, CPU, world))
    assert found == [device("this", 2e9), None]
    assert this_machine == ["measured"]
    file.write_text("version: 1\nspeed: 3\n")
    for error in on_ranks(make_worlds(2), lambda world: device_constants(file, CPU, world)):
        assert isinstance(error, UserError) and "constants.yaml: device is missing" in str(error)
