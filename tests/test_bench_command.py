"""`hvd-transformer bench` in one process: what it prints and writes, and what it refuses in one line."""

import json
from pathlib import Path

import pytest
import torch
from commands import Done, command
from test_command_line import refused_without_torch, told

from hvd_transformer.bench import device
from hvd_transformer.planning.constants import load

SMALL = [
    "model.num_layers=2", "model.d_model=16", "model.num_heads=2", "model.d_feedforward=32", "training.device=cpu",
    "data.sequence_length=12",
]  # fmt: skip
ONE_RANK = "over 1 rank it sends nothing; start it on several ranks, for example: hvd-transformer launch -np 2 -- bench"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of matrices take seconds."""
    monkeypatch.setattr(device, "_SIDES", {"cpu": (16,)})
    monkeypatch.setattr(device, "_SECONDS", 0.001)


def bench(folder: Path, *words: str) -> Done:
    done = command("hvd-transformer", "bench", *words, folder=folder, environment={"HOME": str(folder)})
    assert done.returncode == 0, done.stderr
    return done


def shown(done: Done) -> dict[str, str]:
    """The values by name."""
    return {name.strip(): value for name, _, value in (line.partition("  ") for line in done.stdout.splitlines())}


def test_train_prints_a_step_and_its_parts_and_writes_constants(tmp_path: Path) -> None:
    done = bench(tmp_path, "train", "--seconds", "0.1", "--vocab-size", "50", "--json", "train.json", *SMALL)
    values = json.loads((tmp_path / "train.json").read_text())
    assert values["bench"] == "train" and values["ranks"] == 1 and values["config"]["model"]["d_model"] == 16
    assert values["targets_per_second"] == pytest.approx(8 * 12 / values["step_seconds"])
    assert values["mfu"] == pytest.approx(
        values["flops_per_rank_and_step"] / values["step_seconds"] / values["matmul_rate"]
    )
    for word in ("forward and backward", "waiting for communication", "update", "data", "tokens per second", "MFU"):
        assert word in done.stdout
    constants = load(str(tmp_path / ".cache" / "hvd-transformer" / "constants.yaml"))
    assert constants.training_fraction.keys() == {"fp32"} and constants.optimizer_seconds
    assert not constants.links  # `bench allreduce` adds them


def test_what_does_not_use_its_gpus_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, cpu = "training.device=auto: two GPUs, but why", (torch.device("cpu"),)
    monkeypatch.setattr("hvd_transformer.parallel.mesh.choose_devices", lambda *_: (cpu, told))
    done = bench(tmp_path, "train", "--seconds", "0.01", "--vocab-size", "50", *SMALL)
    assert done.stdout.count(f"warning: {told}\n") == 1


def test_checkpoint_prints_speeds_and_leaves_nothing(tmp_path: Path) -> None:
    done = bench(tmp_path, "checkpoint", "--seconds", "0.05", "--vocab-size", "50", *SMALL)
    assert [name for name in ("stall of a step", "save", "load") if name not in done.stdout] == []
    assert list(tmp_path.iterdir()) == []


def test_data_prints_speeds(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a line of text\n" * 300)
    words = ["data.source=text.txt", "data.cache_dir=cache", "data.tokenizer=char", "data.workers=1"]
    done = bench(tmp_path, "data", "--seconds", "0.05", "--json", "data.json", *SMALL, *words)
    assert json.loads((tmp_path / "data.json").read_text())["num_tokens"] == 15 * 300
    assert "preparation" in done.stdout and "batches per second" in done.stdout


def test_what_is_wrong_is_told_in_one_line_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("")
    (tmp_path / "folder").mkdir()
    calls = {
        "bench allreduce": ONE_RANK,
        "bench allreduce --sizes 1K,lots": "--sizes 'lots': must be sizes such as 1K,8M,1G",
        "launch -np 2 -- bench allreduce --sizes lots": "--sizes 'lots': must be sizes",
        "launch -np 2 -- bench trian": "No such command 'trian'",
        "bench train --json absent/a.json": "--json absent/a.json: there is no folder",
        "bench train --json folder": "--json folder: is a folder; name a file",
        "bench train --json text/a.json": "--json text/a.json: there is no folder",
        "bench train --constants folder": "--constants folder: is a folder; name a file",
        "bench train --constants text/new/a.yaml": "--constants text/new/a.yaml: there is no folder",
        "bench checkpoint --folder absent": "--folder absent: no such folder",
        "bench trian": "No such command 'trian'",
    }
    lines = refused_without_torch(tmp_path, *(f"hvd-transformer {call}" for call in calls))
    for line, (call, message) in zip(lines, calls.items(), strict=True):
        assert message in line, call


def test_wrong_constants_are_told_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "constants.yaml").write_text("speed: 3")
    done = command("hvd-transformer", "bench", "train", "--constants", "constants.yaml", *SMALL, folder=tmp_path)
    assert told(done).endswith("constants.yaml: version=None: must be 1; run `hvd-transformer bench` again")


def test_a_vocabulary_that_only_the_data_tells(tmp_path: Path) -> None:
    words = ["bench", "train", "data.tokenizer=char", *SMALL]
    line = told(command("hvd-transformer", *words, folder=tmp_path, environment={"HOME": str(tmp_path)}))
    assert "the vocabulary size is known only after the data is prepared; give --vocab-size N" in line


@pytest.mark.parametrize("name", ["allreduce", "train", "checkpoint", "data"])
def test_help(name: str, tmp_path: Path) -> None:
    done = command("hvd-transformer", "bench", name, "--help", folder=tmp_path)
    assert done.returncode == 0 and "--json FILE" in done.stdout
