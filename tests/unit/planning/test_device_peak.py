"""The peak of a device: measured on this kind of device, else published, else none."""

from pathlib import Path

import pytest
import torch

from hvd_transformer.planning import device_peak
from hvd_transformer.planning.constants import Constants, save
from hvd_transformer.planning.device_peak import device_name, find_peak

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where measurements are; there are none yet."""
    file = tmp_path / "constants.yaml"
    monkeypatch.setattr(device_peak, "MEASURED", file)
    return file


def write(file: Path, device: str) -> None:
    rates = {"fp32": {64: 1e9, 256: 5e9, 1024: 4e9}}
    save(Constants(device=device, matmul=rates, memory_bandwidth=1e9, memory_bytes=1), file)


def test_the_fastest_product_that_was_measured_on_this_device(measured: Path) -> None:
    write(measured, device_name(CPU))
    peak, told = find_peak(CPU, "fp32")
    assert peak is not None and peak.rate == 5e9
    assert told == f"mfu: of 5.0 GFLOP/s per device, a matrix product of side 256 on {device_name(CPU)}, measured, " + (
        str(measured)
    )
    assert find_peak(CPU, "bf16")[0] is None


def test_no_peak_of_another_device_or_of_a_damaged_file(measured: Path) -> None:
    assert find_peak(CPU, "fp32") == (
        None,
        f"no mfu: the peak of {device_name(CPU)} in fp32 is not known; `bench train` measures it",
    )
    write(measured, "another CPU")
    assert find_peak(CPU, "fp32")[0] is None
    measured.write_text("matmul: [")
    peak, told = find_peak(CPU, "fp32")
    assert peak is None and told.startswith(f"no mfu: {measured}: not valid YAML")


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        # NVIDIA's datasheets: dense bf16 TFLOP/s.
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA H100 PCIe", None),  # slower than the SXM module
        ("Tesla V100-SXM2-32GB", None),  # it has no bf16
    ],
)
def test_published_peaks_by_the_name_of_the_gpu(
    measured: Path, monkeypatch: pytest.MonkeyPatch, name: str, bf16: float | None
) -> None:
    monkeypatch.setattr(device_peak, "processor_name", lambda _: name)
    peak, told = find_peak(GPU, "bf16")
    assert (peak and peak.rate) == bf16
    assert ("published for NVIDIA" in told) == (bf16 is not None)
