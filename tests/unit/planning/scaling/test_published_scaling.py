"""Predictions beside published tables: within ten points of efficiency, nothing fitted per row."""

import pytest

from benchmarks.published_scaling import Row, fsdp, horovod, horovod_efficiency


@pytest.mark.parametrize("row", [*horovod(), *fsdp()], ids=lambda row: f"{row.name} {row.gpus}")
def test_within_ten_points(row: Row) -> None:
    assert row.predicted == pytest.approx(row.published, abs=0.1)


def test_the_network_with_most_weights_loses_most() -> None:
    found = {row.name: row.predicted for row in horovod()}
    assert found["Horovod, VGG-16"] < found["Horovod, ResNet-101"] - 0.1
    assert horovod_efficiency("VGG-16", 512) < horovod_efficiency("VGG-16", 64) < horovod_efficiency("VGG-16", 4) < 1
