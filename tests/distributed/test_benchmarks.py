"""The benchmarks: all contestants train, torch's the same thing as ours; what is held at the peak; all cuts."""

import json
import re
import subprocess
import sys

import pytest
from conftest import REPOSITORY

from benchmarks.namespace_hosts import missing

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def bench(module, *words, statuses=(0,), timeout=240):
    command = [sys.executable, "-m", f"benchmarks.{module}", *map(str, words)]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout)
    assert result.returncode in statuses and "Traceback" not in result.stderr, result.stdout + result.stderr
    return result.stdout


@pytest.mark.timeout(600)
def test_all_contestants_train_the_same(tmp_path):
    pytest.importorskip("horovod", reason="needs Horovod")
    # The last step's loss is after updates, so it says that the gradients, too, are the same.
    words = ["--rounds", 1, "--steps", 1, "--warmup", 1, "--json", tmp_path / "figures.json"]
    text = bench("pipeline", *words, timeout=550)
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    rates, losses = figures["tokens_per_second"], figures["losses"]
    assert len(rates) == 12
    assert all(rate > 0 for (rate,) in rates.values())
    (expected,) = losses["no pipeline"]
    for name, (loss,) in losses.items():
        assert loss == pytest.approx(expected, rel=1e-6), name
    seconds, ideal = figures["stages"]["seconds"], figures["stages"]["ideal"]
    assert len(seconds) == 2
    assert 1 < ideal <= 2 * 8 / 9
    # Both are rounded: to three places, and to five digits.
    assert float(text.partition("ideal speed-up ")[2].split()[0]) == pytest.approx(ideal, abs=1e-3)


def test_memory_is_what_the_plan_says(tmp_path):
    text = bench("pipeline_memory", "--schedule", "1f1b", "--json", tmp_path / "figures.json")
    assert "no stage held more" in text
    assert "the plan is within 15%" in text
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    held = {(memory["schedule"], memory["recompute"]): memory["held"] for memory in figures["memories"]}
    assert held["1f1b", "never"] == pytest.approx([4, 3, 2, 1], abs=0.1)
    (factor,) = (part for part in figures["comparisons"] if part["name"] == "1f1b never / always")
    assert len(factor["measured"]) == 5  # the stages and their sum
    assert factor["measured"] == pytest.approx(factor["planned"], rel=0.15)
    assert min(factor["measured"]) > 1.5


def test_memory_of_a_shared_optimizer_is_what_the_plan_says(tmp_path):
    pytest.importorskip("horovod", reason="needs Horovod")
    words = ["--way", "none", "--way", "gradients", "--json", tmp_path / "figures.json", "model.num_layers=4"]
    assert "within 15% of the plan: met" in bench("sharded_memory", *words)
    whole, shared = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    for key in ("state", "gradients"):
        assert shared[key] == pytest.approx(whole[key] / 2, rel=1e-4)
    assert shared["peak"] < 0.8 * whole["peak"]


def test_a_rank_that_builds_its_part_of_a_model_needs_little_more(tmp_path):
    pytest.importorskip("horovod", reason="needs Horovod")
    # More optimizer state than this would hide a model that was whole for a while.
    words = ["parallel.tensor=4", "parallel.vocab_parallel=true", "optimizer.name=sgd", "optimizer.momentum=0.9"]
    text = bench("model_memory", "--ranks", 4, "--json", tmp_path / "figures.json", *words)
    assert "at most 15% above own: met" in text
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    # A quarter of 201,332,736 weights, gradients and momenta of 4 bytes; norms and some biases are on every rank.
    assert [own["own"] for own in figures] == pytest.approx([3 * 201_332_736] * 4, rel=0.01)


def test_the_loss_in_chunks_is_the_same_and_takes_less(tmp_path):
    bench("loss_memory", "--tokens", 4096, "--vocabulary", 8000, "--width", 32, "--json", tmp_path / "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    chunked, whole = figures["memories"]
    assert chunked["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    logits = 4 * 4096 * 8000
    assert whole["allocated"] >= logits > chunked["allocated"]
    # What the process took is what was counted, but for the kernels' own room.
    assert whole["process"] >= 0.9 * logits and chunked["process"] < 1.2 * logits


def test_every_partition_is_measured(tmp_path):
    words = ["--rounds", 1, "--steps", 1, "--json", tmp_path / "figures.json"]
    text = bench("partition", *words, statuses=(0, 1))  # one round says nothing about the best
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert len(figures["layers"]) == 10
    assert list(figures["seconds_a_step"]) == [f"{first}+{10 - first}" for first in range(1, 10)]
    assert all(seconds > 0 for times in figures["seconds_a_step"].values() for seconds in times)
    assert sum(figures["auto"]) == sum(figures["best"]) == 10
    assert f"auto is within {100 * figures['excess']:.1f} % of the best" in text


def test_growth_of_a_run(tmp_path):
    text = bench("growth", "steps", "--most", 3162, "--rounds", 1, "--json", tmp_path / "figures.json", statuses=(0, 1))
    results = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))["results"]
    assert [result["cost"] for result in results] == ["log", "report", "resume"]
    assert all([point["n"] for point in result["points"]] == [100, 316, 1000, 3162] for result in results)
    assert all(point["values"][0] > 0 for result in results for point in result["points"])
    assert "100 to 3,162 steps" in text


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("part", "most"),
    [("layers", 24), ("parameters", 256), ("vocabulary", 16_000), ("ranks", 6), ("hosts", 8), ("corpus", 30),
     ("words", 30), ("pairs", 10**7), ("byte-pairs", 8)],
)  # fmt: skip
def test_growth_still_runs(part, most):
    """One round at the least sizes says little about the growth."""
    pytest.importorskip("horovod", reason="needs Horovod")
    assert bench("growth", part, "--most", most, "--rounds", 1, statuses=(0, 1), timeout=800)


HOW = ("eager", "compiled")
SHORT = ["--rounds", 1, "--steps", 1, "--warmup", 1]
OTHERS = {
    "data_parallel": ["--model", "small", "--sweep", 1, *SHORT],
    "one_rank": ["--model", "small", *SHORT],
    "tensor_parallel": SHORT,
    "sharded": SHORT,
    "checkpoint": ["shakespeare-char", "--rounds", 1],
    "wake_up": ["--rounds", 1],
    "start_up": ["--rounds", 1],
    "attention": ["--tokens", 64, "--dropout", 0.1, "--rounds", 1],
}


@pytest.mark.timeout(600)
def test_the_gpu_benchmark_runs_in_a_small_size_on_the_cpu(tmp_path, monkeypatch):
    words = ["--dry-run", "--steps", 1, "--tests", "--profile", tmp_path / "tables" / "profile.txt"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    shown = bench("gpu", *words, "--json", tmp_path / "figures.json", timeout=590)
    (tests,) = [line for line in shown.splitlines() if re.search(r"\d+ skipped", line)]
    assert "error" not in tests and "failed" not in tests
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    cases = {name: found for name, found in figures.items() if isinstance(found, dict)}
    models = ["tutorial-1b, 8k", "llama-1b, 8k", "gpt-small, 16k", "tutorial-1b, 16k", "llama-1b, 16k"]
    assert {f"{model} tokens, {how}" for model in models for how in HOW} < cases.keys()
    piped = [cases[name]["losses"][-1] for name in cases if "4 micro-batches" in name]
    assert len(cases) == 13 and piped == [pytest.approx(piped[0], rel=1e-4)] * 3
    assert all(found["losses"][-1] > 0 and found["flops"] > 0 for found in cases.values())
    assert "checkpoint" in cases["llama-1b, 8k tokens, eager"]
    assert all(name in (tmp_path / "tables" / "profile.txt").read_text(encoding="utf-8") for name in cases)


@pytest.mark.timeout(600)
def test_time_to_a_loss_leaves_evaluation_out(tmp_path):
    pytest.importorskip("horovod", reason="needs Horovod")
    (tmp_path / "text.txt").write_text("the cat sat on my big red rug.\n" * 1000)
    words = [tmp_path / "text.txt", "--seeds", 1, "--every", 10, "--iterations", 30]
    words += ["--json", tmp_path / "figures.json", "training.max_steps=30", "optimizer.warmup_steps=5"]
    text = bench("time_to_loss", *words, statuses=(0, 1), timeout=500)
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))["step_seconds_loss"]
    for who in ("nanoGPT", "ours"):
        steps, seconds, losses = zip(*figures[who]["1"], strict=True)
        assert steps == (10, 20, 30) and 0 < seconds[0] < seconds[1] < seconds[2], who
        assert losses[0] > losses[-1] > 0, who
    assert "seed 1: to loss" in text


def test_prepared_tokens_are_torchtexts(tmp_path):
    (tmp_path / "text.txt").write_text("The cat's on my \"big\" red rug, isn't it?\n(No.)  \n\n" * 100)
    words = [tmp_path, "--megabytes", 0.1, "--rounds", 1, "--json", tmp_path / "figures.json"]
    bench("preparation", *words, statuses=(0, 1))  # it ends with another message where tokens differ
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in figures["seconds"].values())


@pytest.mark.timeout(600)
def test_peers_of_compressed_training_have_our_loss(tmp_path):
    pytest.importorskip("horovod", reason="needs Horovod")
    (tmp_path / "text.txt").write_text("the cat sat on my big red rug.\n" * 1000)
    chosen = [word for name in ("ours, none", "DDP", "DDP, fp16 hook") for word in ("--only", name)]
    file = tmp_path / "figures.json"
    bench("compressed_loss", tmp_path / "text.txt", *chosen, "--seeds", 1, "--steps", 3, "--json", file, timeout=500)
    above = json.loads(file.read_text(encoding="utf-8"))["above"]  # per cent
    assert abs(above["DDP"]) < 1e-4 and above["DDP, fp16 hook"] != above["DDP"]


@pytest.mark.timeout(900)
def test_slow_links(tmp_path):
    pytest.importorskip("horovod", reason="needs Horovod")
    if (why := missing(["tc"])) is not None:
        pytest.skip(why)
    bench("slow_link", "--mbit", 100, "--rounds", 1, "--json", tmp_path / "figures.json", timeout=800)
    rates = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))["100"]["tokens_per_second"]
    # 3.3 MB of gradients each way take 0.264 s at 100 Mbit/s, and a step has 2 × 12 × 64 tokens.
    assert all(rate < 1.05 * 1536 / 0.264 for (rate,) in (rates["ours, none"], rates["DDP, 25 MB, plain modules"]))
    assert rates["DDP, 25 MB, plain modules, PowerSGD 1"] > rates["DDP, 25 MB, plain modules"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("module", OTHERS)
def test_the_others_still_run(module):
    """One round says nothing about who is faster."""
    pytest.importorskip("horovod", reason="needs Horovod")
    assert bench(module, *OTHERS[module], statuses=(0, 1), timeout=800)
