"""The constants file: what is written is read, names of built-in devices, and one line for each kind of wrong file."""

import re
from pathlib import Path

import pytest
import yaml

from hvd_transformer.errors import UserError
from hvd_transformer.planning import constants
from hvd_transformer.planning.constants import Constants, Link, device_names, load, save, step_side

SMALL = Constants(
    device="a CPU",
    threads=2,
    matmul={"fp32": {64: 1e9, 256: 3e9, 1024: 4e9}},
    memory_bandwidth=1e10,
    memory_bytes=2**30,
    training_fraction={"fp32": 0.5},
    links={"gloo": {"host": Link(latency=1e-4, bandwidth=1e9, cpu_seconds_per_byte=1e-10)}},
)


def test_what_is_saved_is_loaded_again(tmp_path: Path) -> None:
    file = tmp_path / "new" / "constants.yaml"
    save(SMALL, file)
    assert load(str(file)) == SMALL
    assert [path.name for path in file.parent.iterdir()] == ["constants.yaml"]


def test_built_in_constants_are_valid() -> None:
    assert "h100" in device_names()
    for name in device_names():
        loaded = load(name)
        assert loaded.origin and loaded.links["nccl"].keys() == {"host", "network"}


def test_default_is_what_was_measured_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "MEASURED", tmp_path / "constants.yaml")
    with pytest.raises(UserError, match=r"constants.yaml does not exist: run `hvd-transformer bench` .* h100"):
        load()
    save(SMALL, tmp_path / "constants.yaml")
    assert load() == SMALL


def test_rate_is_linear_in_the_logarithm_of_the_side() -> None:
    assert SMALL.matmul_rate("fp32", 64) == 1e9
    assert SMALL.matmul_rate("fp32", 128) == pytest.approx(2e9)  # halfway: 64, 128, 256
    assert SMALL.matmul_rate("fp32", 8) == 1e9 and SMALL.matmul_rate("fp32", 9999) == 4e9
    assert SMALL.training_rate("fp32", 128) == pytest.approx(1e9)
    assert step_side(64, 64) == pytest.approx(64) and step_side(8 * 64, 64) == pytest.approx(128)


def test_what_the_constants_lack_is_said() -> None:
    with pytest.raises(UserError, match=r"precision=bf16: constants of a CPU have no matmul.bf16; known: fp32"):
        SMALL.matmul_rate("bf16", 64)
    with pytest.raises(UserError, match=r"--backend mpi: no constants of a CPU; known: gloo"):
        SMALL.backend("mpi")
    assert SMALL.backend(None) == "gloo"
    with pytest.raises(UserError, match=r"links is missing; run `hvd-transformer bench allreduce`"):
        SMALL.model_copy(update={"links": {}}).backend(None)
    with pytest.raises(UserError, match=r"no training_fraction.fp32; known: none; run `hvd-transformer bench train`"):
        SMALL.model_copy(update={"training_fraction": {}}).training_rate("fp32", 64)
    with pytest.raises(UserError, match=r"links.gloo.network is missing: its link between hosts"):
        SMALL.link("gloo", "network")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"matmul": None}, "matmul=None: must be a valid dictionary"),
        ({"matmul": {"fp32": {0: 1.0}}}, "matmul.fp32.0=0: must be greater than or equal to 1"),
        ({"matmul": {"tf32": {8: 1.0}}}, "matmul.tf32='tf32': must be 'fp32', 'bf16', 'fp16' or 'fp64'"),
        ({"memory_bandwidth": "fast"}, "memory_bandwidth='fast': must be a valid number"),
        ({"memory_bandwidth": float("inf")}, "memory_bandwidth=inf: must be a finite number"),
        ({"links": {"gloo": {"host": {"latency": -1, "bandwidth": 1}}}}, "links.gloo.host.latency=-1: must be greater"),
        ({"links": {"gloo": {"host": {"latency": 1}}}}, "links.gloo.host.bandwidth is missing"),
        ({"training_fraction": {"fp32": 1.5}}, "training_fraction.fp32=1.5: must be less than or equal to 1"),
        ({"speed": 3}, "speed: unknown key"),
        ({"version": 2}, "version=2: must be 1; run `hvd-transformer bench` again"),
    ],
)
def test_wrong_value_is_one_line_with_file_key_and_what_is_allowed(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "constants.yaml"
    file.write_text(yaml.safe_dump({**SMALL.model_dump(mode="json"), **change}))
    with pytest.raises(UserError, match=f"^{re.escape(f'{file}: {message}')}[^\n]*$"):
        load(str(file))


@pytest.mark.parametrize("text", ["", "- 1", "just text"])
def test_file_without_keys(text: str, tmp_path: Path) -> None:
    file = tmp_path / "constants.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=r"constants.yaml: must contain keys and values"):
        load(str(file))


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--constants h300: no such file, nor the name of built-in constants: .*h100"):
        load("h300")
    with pytest.raises(UserError, match=r"cannot be read: Is a directory"):
        load(str(tmp_path))
    (tmp_path / "broken.yaml").write_text("matmul: [1")
    with pytest.raises(UserError, match=r"broken.yaml: not valid YAML: "):
        load(str(tmp_path / "broken.yaml"))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"binary.yaml: not valid UTF-8 at byte 0"):
        load(str(tmp_path / "binary.yaml"))
    with pytest.raises(UserError, match=r"cannot be written: "):
        save(SMALL, tmp_path / "broken.yaml" / "constants.yaml")
