"""What the probe finds on a host: its GPUs, and folders that may not be entered."""

import os
import sys
from pathlib import Path

import pytest

from hvd_transformer.launch.node import probe
from hvd_transformer.processor import number_formats

TWO = "NVIDIA H200, 143771, 143000\nNVIDIA H200, 143771, 143000\n"


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 2), ("0,1", 2), ("1", 1), ("-1", 0), ("0,-1", 1), ("", 0), ("0,7,1", 1), ("GPU-1234", 1)],
)
def test_gpus_are_those_that_cuda_shows(visible: str | None, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_output", lambda command, late: TWO)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert len(probe._visible(probe._all_devices())) == count


def test_the_cores_are_those_that_a_rank_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_cores", lambda: 3)
    monkeypatch.setattr(sys, "path", sys.path)
    monkeypatch.setattr(probe, "_all_devices", list)
    assert probe.facts({}, str(Path.cwd()), {}, full=False)["cores"] == 3


def test_a_gpu_that_shares_the_host_s_memory_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_output", lambda command, late: "NVIDIA GB10, [N/A], [N/A]\n")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert probe._visible(probe._all_devices()) == [{"name": "NVIDIA GB10", "memory": 0, "memory_free": 0}]


@pytest.mark.parametrize(
    ("cpuinfo", "formats"),
    [
        ("model name\t: one\nflags\t\t: fpu avx512f avx512_bf16\n", ["bf16"]),
        ("flags\t\t: amx_bf16 amx_tile avx512_fp16\n", ["bf16", "fp16"]),
        ("flags\t\t: fpu avx2\nvmx flags\t: vnmi\n", []),
        ("processor\t: 0\nFeatures\t: fp asimd\n", ["bf16", "fp16"]),
    ],
)
def test_the_number_formats_of_the_cpu(cpuinfo: str, formats: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor's and the training's agree."""
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: cpuinfo)
    assert probe._number_formats() == number_formats() == formats


def test_a_folder_that_may_not_be_entered_is_told_and_does_not_end_the_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = tmp_path / "closed"
    real = os.stat

    def stat(path: object, *more: object, **named: object) -> os.stat_result:
        if str(path).startswith(f"{closed}/"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *more, **named)  # type: ignore[call-overload, no-any-return]

    closed.mkdir()
    monkeypatch.setattr(os, "stat", stat)
    found = probe._folder(closed / "runs" / "x")
    assert not found["exists"] and found["free"] > 0
    assert not probe.exists(str(closed / "runs"))


def test_a_file_system_without_a_size_is_not_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as /proc, which takes no files, and a tmpfs without limit, which does."""
    assert not probe._folder(Path("/proc/runs"))["writable"]
    real = os.statvfs(tmp_path)
    without = os.statvfs_result([*real[:2], 0, 0, 0, *real[5:]])
    monkeypatch.setattr(os, "statvfs", lambda _: without)
    found = probe._folder(tmp_path)
    assert found["writable"] and found["free"] > 2**50
    assert not list(tmp_path.iterdir())
