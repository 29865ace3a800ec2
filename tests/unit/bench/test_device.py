"""The constants of a device: of products of the measured sides, in all precisions."""

import pytest
import torch

from hvd_transformer.bench import device
from hvd_transformer.bench.device import free_bytes, measure_device
from hvd_transformer.monitoring.host_usage import HostMemory
from hvd_transformer.nn import matmul
from hvd_transformer.planning.device_peak import device_name

CPU = torch.device("cpu")


def test_constants_of_this_cpu(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setattr(device, "_SIDES", {"cpu": (8, 16)})
    monkeypatch.setattr(device, "_SECONDS", 0.001)
    monkeypatch.setattr(device, "_COPY_BYTES", {"cpu": 1 << 16})
    found = measure_device(CPU)
    assert found.device == device_name(CPU) and found.device.endswith(", 1 thread")
    assert found.matmul.keys() == {"fp32", "bf16", "fp16", "fp64"}
    assert all(rates.keys() == {8, 16} for rates in found.matmul.values())
    assert found.memory_bytes * found.devices_per_host > free_bytes(CPU) > 0
    monkeypatch.setattr(device, "host_memory_left", lambda: HostMemory(8 << 30, 3 << 30))  # of a container
    assert (measure_device(CPU).memory_bytes * found.devices_per_host, free_bytes(CPU)) == (8 << 30, 3 << 30)


def test_products_are_those_of_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which take another library on some CPUs, outside of autograd only."""
    monkeypatch.setattr(device, "_SIDES", {"cpu": (128,)})
    monkeypatch.setattr(device, "_SECONDS", 0.001)
    monkeypatch.setattr(device, "_COPY_BYTES", {"cpu": 1 << 16})
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda _: True)
    used = set()
    uses = matmul._uses_onednn

    def watched(left: torch.Tensor, columns: int) -> bool:
        if answer := uses(left, columns):
            used.add(left.dtype)
        return answer

    monkeypatch.setattr(matmul, "_uses_onednn", watched)
    measure_device(CPU)
    assert used == {torch.float32}


def test_rates_are_flops_over_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_SIDES", {"cpu": (8, 16, 32)})
    seconds = iter([1e-6, 0.2])
    monkeypatch.setattr(device, "_seconds", lambda action, _: next(seconds))
    assert dict(device._matmul_rates(CPU, torch.float32)) == {8: 2 * 8**3 / 1e-6, 16: 2 * 16**3 / 0.2}  # 32: too long
    monkeypatch.setattr(device, "_COPY_BYTES", {"cpu": 1000})
    monkeypatch.setattr(device, "_seconds", lambda action, _: 0.5)
    assert device._memory_bandwidth(CPU) == 2 * 1000 / 0.5  # read and written
