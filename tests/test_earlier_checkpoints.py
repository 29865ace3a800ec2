"""Checkpoints of format 2, with one SHA-256 per file, still resume and are evaluated as the version that made them did.

tests/checkpoints/format-2 is a run of six steps, made by the last version that wrote format 2; the numbers here are
what that version printed when it went on from there.
"""

import json
import shutil
from pathlib import Path

import pytest
from commands import command

FOLDER = Path(__file__).parent / "checkpoints" / "format-2"
LOSSES = [
    2.8586994806925454, 2.8855158487955728, 2.868405024210612, 2.8750489552815757, 2.865450859069824, 2.867521603902181,
]  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    shutil.copytree(FOLDER, tmp_path / "old")
    return tmp_path / "old" / "run"


def test_a_run_resumes_and_saves_as_now(run: Path) -> None:
    words = ["--config", run / "config.yaml", "output_dir=run", "training.max_steps=12"]
    done = command("hvd-train", *words, folder=run.parent)
    assert done.returncode == 0, done.stderr
    assert "resuming from run/checkpoints/step-00000006" in done.stdout + done.stderr
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in metrics if "lr" in line] == pytest.approx(LOSSES, rel=1e-6)
    formats = {
        path.name: json.loads((path / "state.json").read_text())["format"] for path in run.glob("checkpoints/step-*")
    }
    assert formats["step-00000012"] == 3


def test_it_is_evaluated(run: Path) -> None:
    done = command("hvd-transformer", "evaluate", "run", folder=run.parent)
    assert done.returncode == 0, done.stderr
    assert "test loss 2.8678, perplexity 17.60" in done.stdout


def test_damage_is_found(run: Path) -> None:
    file = run / "checkpoints" / "step-00000006" / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    done = command("hvd-transformer", "evaluate", "run", folder=run.parent)
    assert done.returncode == 2 and "optimizer.safetensors: damaged: " in done.stderr
