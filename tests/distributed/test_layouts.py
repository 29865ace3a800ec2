"""A checkpoint of any layout of ranks, shares, stages and shards goes on under any other, as plain torch does."""

import json
import os
from pathlib import Path

import plain
import pytest
from jobs import lines, relative_difference, summary, tiny, weights, write_corpus
from safetensors.torch import load_file

pytestmark = pytest.mark.distributed

SAVED, MORE = 6, 10  # steps
# World size and settings. The parameters' sizes divide nothing evenly.
LAYOUTS = {
    "one rank": (1, []),
    "pipeline": (1, ["parallel.pipeline=3", "parallel.micro_batches=2"]),
    "replicas": (2, []),
    "shared matrices": (2, ["parallel.tensor=2"]),
    "shared state": (2, ["parallel.optimizer_shard=state", "communication.bucket_mb=0.01"]),
    "shared gradients": (
        3,
        ["parallel.optimizer_shard=gradients", "communication.embedding_rows=always", "parallel.micro_batches=2"],
    ),
    "shared vocabulary and state": (
        4,
        ["parallel.tensor=2", "parallel.vocab_parallel=true", "parallel.optimizer_shard=state"],
    ),
    "everything": (
        4,
        [
            "parallel.tensor=2", "parallel.vocab_parallel=true", "parallel.pipeline=2", "parallel.partition=uniform",
            "parallel.micro_batches=2", "parallel.optimizer_shard=gradients", "parallel.recompute=always",
            "communication.bucket_mb=0.01",
        ],
    ),
}  # fmt: skip
SAMPLES = 16  # a step, over all ranks and rounds
CASE = plain.Case("adamw", "adamw", 4e-3, eps=1e-4, precision="fp32", num_steps=SAVED + MORE)
COMMON = [*CASE.words(1), "training.batch_size=4", f"training.global_batch_size={SAMPLES}", "training.epochs=9"]


def run_all(world, folder: Path, runs: dict[str, tuple[str, list[str]]]) -> None:
    """Runs by name, each of a layout."""
    for name, (layout, words) in runs.items():
        size, own = LAYOUTS[layout]
        world(size).train([*words, *own, f"output_dir={folder / name}"])


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in lines(run) if "loss" in line and line["step"] > SAVED]


@pytest.mark.timeout(600)
def test_a_layout_goes_on_from_another_layouts_checkpoint(world, tmp_path):
    """The files hold the same, whichever ranks wrote them, and the losses stay the same.

    With EVERY_PAIR in the environment all 64 pairs, else as many as there are layouts.
    """
    corpus = write_corpus(tmp_path / "text", train=4000)
    common = [*tiny(corpus), *COMMON]
    saved = {layout: layout.replace(" ", "-") for layout in LAYOUTS}
    run_all(world, tmp_path, {saved[name]: (name, [*common, f"training.max_steps={SAVED}"]) for name in LAYOUTS})
    first = load_file(tmp_path / "one-rank/checkpoints/latest/optimizer.safetensors")
    for name in saved.values():
        folder = tmp_path / name / "checkpoints/latest"
        assert sorted(json.loads((folder / "MANIFEST.json").read_text())["files"]) == [
            "model.safetensors", "optimizer.safetensors", "state.json", "vocabulary.json"
        ]  # fmt: skip
        found = load_file(folder / "optimizer.safetensors")
        assert found.keys() == first.keys()
        for key, tensor in first.items():
            assert found[key].shape == tensor.shape
            assert (found[key] - tensor).abs().max() <= 1e-5 * tensor.abs().max(), (name, key)
    chosen = [(here, there) for here in LAYOUTS for there in LAYOUTS]
    if "EVERY_PAIR" not in os.environ:
        chosen = list(zip(LAYOUTS, [*LAYOUTS][3:] + [*LAYOUTS][:3], strict=True))
    pairs = {f"{saved[here]}-to-{saved[there]}": (here, there) for here, there in chosen}
    run_all(
        world,
        tmp_path,
        {
            pair: (
                there,
                [*common, f"checkpoint.resume={tmp_path / saved[here]}"],
            )
            for pair, (here, there) in pairs.items()
        },
    )
    steps = plain.window_steps(plain.encode(corpus, "train"), CASE, SAMPLES)
    wanted = plain.train(corpus, CASE, common, steps).losses[SAVED:]
    worst = 0.0
    for pair, (_, there) in pairs.items():
        found = losses(tmp_path / pair)
        assert len(found) == MORE == len(wanted)
        assert found == pytest.approx(wanted, rel=2e-6), pair
        worst = max(worst, *(abs(a - b) / b for a, b in zip(found, wanted, strict=True)))
        tp = 2 if "parallel.tensor=2" in LAYOUTS[there][1] else 1
        assert (summary(tmp_path / pair)["tp"], summary(tmp_path / pair)["world"]) == (tp, LAYOUTS[there][0])
    print(f"largest relative difference of a loss in {len(pairs)} pairs: {worst:.1e}")


def test_muon_and_averaged_weights_go_on_under_other_layouts(world, tmp_path):
    """One run, whose ranks change twice, is the reference's. Its use is that of the averaged weights."""
    case = plain.Case("muon", "muon", 8e-3, ema=0.9, num_steps=9)
    corpus = write_corpus(tmp_path / "text", train=4000)
    common = [*tiny(corpus), *case.words(1), "training.batch_size=4", f"training.global_batch_size={SAMPLES}"]
    for steps, layout in ((3, "shared gradients"), (6, "everything"), (9, "one rank")):
        run_all(world, tmp_path, {"run": (layout, [*common, f"training.max_steps={steps}"])})
    wanted = plain.train(corpus, case, common, plain.window_steps(plain.encode(corpus, "train"), case, SAMPLES))
    assert [line["loss"] for line in lines(tmp_path / "run") if "loss" in line] == pytest.approx(
        wanted.losses, rel=1e-9
    )
    assert relative_difference(weights(tmp_path / "run"), wanted.weights) < 1e-9
    assert summary(tmp_path / "run")["valid_loss"] == pytest.approx(
        plain.evaluate(corpus, "valid", case, wanted.weights), rel=1e-9
    )
    found = world(2).command("hvd-transformer", "evaluate", tmp_path / "run")
    assert f"{summary(tmp_path / 'run')['test_loss']:.4f}" in found.stdout, found.stdout + found.stderr
    stored = load_file(tmp_path / "run/checkpoints/latest/optimizer.safetensors")
    by_muon, by_adam = (
        {name.removeprefix(key) for name in stored if name.startswith(key)} for key in ("momentum_buffer.", "exp_avg.")
    )
    assert len(by_muon) == 2 * 4 and by_muon | by_adam == wanted.weights.keys() and not by_muon & by_adam
