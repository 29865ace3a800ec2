"""Samples of text are the same on any layout, leave training as it is, and are there once per step after a resume."""

import json

import pytest
from jobs import lines, tiny, write_corpus

pytestmark = pytest.mark.distributed

# World size and settings: a replica alone, one of several, one whose ranks generate together while another waits.
LAYOUTS = {
    "pipeline": (1, ["parallel.pipeline=2", "parallel.partition=uniform"]),
    "replicas": (2, ["parallel.optimizer_shard=gradients"]),
    "tensor": (2, ["parallel.tensor=2"]),
    "all": (4, ["parallel.tensor=2", "parallel.vocab_parallel=true", "parallel.optimizer_shard=state"]),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text", train=2000)


@pytest.fixture(scope="module")
def settings(corpus):
    return [
        *tiny(corpus),
        "training.precision=fp64",
        "training.batch_size=2",
        "training.global_batch_size=8",
        "training.max_steps=8",
        "training.eval_every=4",
        "training.text_samples=2",
        "optimizer.lr_scaling=none",
        "optimizer.lr=0.02",
        "optimizer.schedule=constant",
        "checkpoint.every_steps=4",
    ]


@pytest.fixture(scope="module")
def reference(world, settings, tmp_path_factory):
    """The run of one rank."""
    run = tmp_path_factory.mktemp("reference") / "run"
    world(1).train([*settings, f"output_dir={run}"])
    return run


def samples(run):
    return [json.loads(line) for line in (run / "samples.jsonl").read_text(encoding="utf-8").splitlines()]


def same_training(found, wanted):
    """Bit for bit the same weights and optimizer, and the same lines."""
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (found / "checkpoints/latest" / name).read_bytes() == (wanted / "checkpoints/latest" / name).read_bytes()
    keys = ("step", "loss", "grad_norm", "valid_loss")
    first, second = ([[line.get(key) for key in keys] for line in lines(run)] for run in (found, wanted))
    assert first == second


def test_samples_of_each_evaluation_continue_the_validation_text(corpus, reference):
    found = samples(reference)
    assert [line["step"] for line in found] == [4, 8]
    valid = (corpus / "valid.txt").read_text(encoding="utf-8")
    for line in found:
        assert [sample["prompt"] for sample in line["samples"]] == [valid[:3], valid[75:78]]
        new = [sample["continuation"].replace("<unk>", "?") for sample in line["samples"]]
        assert [len(text) for text in new] == [9, 9]  # data.sequence_length=12
    assert found[0]["samples"] != found[1]["samples"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_writes_the_same(world, settings, reference, tmp_path, layout):
    size, words = LAYOUTS[layout]
    world(size).train([*settings, *words, f"output_dir={tmp_path / 'run'}"])
    assert samples(tmp_path / "run") == samples(reference)


@pytest.mark.parametrize("layout", ["pipeline", "replicas"])
def test_training_is_the_same_without(world, settings, tmp_path, layout):
    size, words = LAYOUTS[layout]
    runs = {number: tmp_path / f"{number}" for number in (0, 2)}
    words = [*settings, *words, "model.dropout=0.1"]
    world(size).train(
        *([*words, f"training.text_samples={number}", f"output_dir={run}"] for number, run in runs.items())
    )
    assert not (runs[0] / "samples.jsonl").exists()
    assert len(samples(runs[2])) == 2
    same_training(runs[0], runs[2])


def test_a_resumed_run_has_each_step_once(world, settings, reference, tmp_path):
    run = tmp_path / "run"
    world(1).train([*settings, "training.max_steps=4", f"output_dir={run}"])
    with (run / "samples.jsonl").open("a") as file:  # as a job that was killed after step 8
        file.write('{"step": 8, "samples": [{"prompt": "lost"}]}\n{"step": 12, "sam')
    world(1).train([*settings, f"output_dir={run}"])
    assert (run / "samples.jsonl").read_bytes() == (reference / "samples.jsonl").read_bytes()
    same_training(run, reference)
