"""Whether this host has enough GPUs for its ranks and their stages."""

import os
import threading
from pathlib import Path

import pytest

from hvd_transformer.config import Config
from hvd_transformer.errors import UserError
from hvd_transformer.launch import horovodrun_command
from hvd_transformer.launch.horovodrun_command import check_devices, num_gpus
from hvd_transformer.launch.hostfile import Host
from hvd_transformer.launch.node import probe


def config(device: str, stages: int = 1) -> Config:
    return Config.model_validate({"training": {"device": device}, "parallel": {"pipeline": stages}})


@pytest.mark.parametrize(
    ("value", "count"),
    [
        ("0", 1),
        ("0,1,2", 3),
        ("1,-1,0", 1),
        ("-1", 0),
        ("", 0),
        ("GPU-8932f937,MIG-1/2", 2),
        (" 0, 3 ", 2),
        ("NoDevFiles", 0),
        ("0,void", 1),
    ],
)
def test_the_chosen_devices(value: str, count: int) -> None:
    assert num_gpus({"CUDA_VISIBLE_DEVICES": value}) == count


@pytest.mark.parametrize(
    ("script", "count"),
    [
        ("echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'; echo 'GPU 1: NVIDIA H100 (UUID: GPU-2)'", 2),
        ("echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'; echo '  MIG 1g.10gb Device 0: (UUID: MIG-1)'", 1),
        ("echo 'No devices found'", 0),
        ("echo 'cannot reach the driver' >&2; exit 9", None),
    ],
)
def test_the_driver_s_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, count: int | None) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert num_gpus({}) == count


SMI = '#!/bin/sh\nfor at in 0 1 2 3; do echo "GPU of slot $at, 80, $((at + 1))"; done\n'


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, [1, 2, 3, 4]),
        ("3,1", [4, 2]),
        ("1,4,0", [2]),
        ("", []),
        ("GPU-1,GPU-2", [1, 2]),
        (" 2 , 0", [3, 1]),
        ("NoDevFiles", []),
        ("3,void,1", [4]),
    ],
)
def test_the_probe_tells_of_the_chosen_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, seen: list[int]
) -> None:
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [device["memory_free"] >> 20 for device in probe._visible(probe._all_devices())] == seen


def test_where_nvidia_smi_takes_long_the_driver_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It loads the driver anew each time where that is not kept loaded, for seconds per GPU."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 20\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(probe, "_LATE", 0.2)
    monkeypatch.setattr(probe, "_DRIVER", tmp_path)
    for place, text in (("0000:b1:00.0", "IRQ: 7\nModel: \t NVIDIA A100 \n"), ("0000:18:00.0", "?")):
        (tmp_path / "gpus" / place).mkdir(parents=True)
        (tmp_path / "gpus" / place / "information").write_text(text)
    names = [(device["name"], device["memory"]) for device in probe._all_devices()]
    assert names == [("GPU", 0), ("NVIDIA A100", 0)]
    monkeypatch.setattr(probe, "_LATE", 20.0)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")  # the driver does not work
    assert probe._all_devices() == []


FOUR = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
NONE = {"CUDA_VISIBLE_DEVICES": ""}
FAR = Host("192.0.2.1", 8)  # reserved for documentation: no machine has it


@pytest.mark.parametrize(("slots", "stages", "message"), [
    (5, 1, "has 4 GPUs for 5 ranks (training.device={}); at most 4 ranks fit, or set training.device=cpu"),
    (3, 2, "has 4 GPUs for 3 ranks × 2 stages (training.device={}); at most 2 ranks fit"),
    (1, 8, "has 4 GPUs for 1 rank × 8 stages (training.device={}); set training.device=cpu"),
])  # fmt: skip
@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_too_few_devices(device: str, slots: int, stages: int, message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_devices([FAR, Host("localhost", slots)], config(device, stages), FOUR)
    assert str(caught.value).startswith(f"host localhost: {message.format(device)}")


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_too_few_named_devices(device: str) -> None:
    """On any host, whatever this one has."""
    with pytest.raises(UserError) as caught:
        check_devices([Host("localhost", 1), Host(FAR.name, 2, (4, 5, 6))], config(device, 2), FOUR)
    assert str(caught.value) == (
        f"host {FAR.name}: has 3 GPUs (gpus=4,5,6) for 2 ranks × 2 stages (training.device={device}); at most 1 rank "
        "fits, or set training.device=cpu"
    )


def test_none_at_all() -> None:
    check_devices([Host("localhost", 2)], config("auto"), NONE)
    with pytest.raises(UserError, match="has 0 GPUs for 2 ranks"):
        check_devices([Host("localhost", 2)], config("cuda"), NONE)


@pytest.mark.parametrize(
    ("host", "wanted"),
    [
        (Host("localhost", 4), config("cuda")),
        (Host("localhost", 2), config("cuda", 2)),
        (FAR, config("cuda")),
        (Host("localhost", 8), config("cpu", 2)),
        (Host("localhost", 5, (9, 8, 7, 6, 5)), config("cuda")),
        (Host("localhost", 2, (0, 1)), config("cpu", 2)),
    ],
)
def test_what_is_not_refused(host: Host, wanted: Config) -> None:
    check_devices([host], wanted, FOUR)


def test_the_names_of_many_hosts_are_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server may take seconds for each."""
    asked: list[int] = []
    together = threading.Barrier(8, timeout=30)

    def slow(name: str) -> bool:
        together.wait()
        asked.append(1)
        return False

    monkeypatch.setattr(horovodrun_command, "is_local", slow)
    check_devices([Host(f"node{number}", 8) for number in range(16)], config("auto"), {"CUDA_VISIBLE_DEVICES": "0"})
    assert len(asked) == 16
