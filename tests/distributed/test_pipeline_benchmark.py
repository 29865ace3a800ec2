"""The pipeline benchmarks: all contestants train, torch's the same thing as ours; and what a schedule holds."""

import json
import subprocess
import sys

import pytest
from conftest import REPOSITORY

pytestmark = pytest.mark.distributed


def bench(module, *words):
    command = [sys.executable, "-m", f"benchmarks.{module}", *map(str, words)]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_all_contestants_train_the_same(tmp_path):
    pytest.importorskip("horovod", reason="needs Horovod")
    # The second step's loss is after an update, so it says that the gradients, too, are the same.
    text = bench("pipeline", "--rounds", 1, "--steps", 1, "--warmup", 1, "--json", tmp_path / "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    rates, losses = figures["tokens_per_second"], figures["losses"]
    assert len(rates) == 4
    assert all(rate > 0 for (rate,) in rates.values())
    (expected,) = losses["no pipeline"]
    for name, (loss,) in losses.items():
        assert loss == pytest.approx(expected, rel=1e-6), name
    seconds, ideal = figures["stages"]["seconds"], figures["stages"]["ideal"]
    assert len(seconds) == 2
    assert 1 < ideal <= 2 * 8 / 9
    assert f"ideal speed-up {ideal:.3f}" in text


def test_1f1b_holds_the_micro_batches_of_the_stages_behind(tmp_path):
    text = bench("pipeline_memory", "--json", tmp_path / "figures.json")
    assert "no stage held more" in text
    memories = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    held = {(memory["schedule"], memory["recompute"]): memory["held"] for memory in memories}
    assert held["gpipe", "never"] == pytest.approx([8, 8, 8, 8], abs=0.1)
    assert held["1f1b", "never"] == pytest.approx([4, 3, 2, 1], abs=0.1)
    saved = {(memory["schedule"], memory["recompute"]): sum(memory["saved"]) for memory in memories}
    for schedule in ("gpipe", "1f1b"):
        assert saved[schedule, "always"] < saved[schedule, "never"] / 5
