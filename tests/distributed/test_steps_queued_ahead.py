"""Ranks that read each step when the next one is queued, as on GPUs: one order on all, and the same training."""

from pathlib import Path

import pytest
from jobs import relative_difference, steps, summary, tiny, weights, write_corpus
from worlds import Worlds

pytestmark = pytest.mark.distributed

LAYOUTS = {
    "replicas": ["training.log_every=1"],
    "zero-2, two stages": ["parallel.optimizer_shard=gradients", "parallel.pipeline=2", "parallel.micro_batches=2"],
    "tensor": ["parallel.tensor=2"],
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text", train=3000)


def job(source: Path, run: Path, layout: str) -> list[str]:
    return [
        *tiny(source), "parallel.partition=uniform", "training.max_steps=12", "training.eval_every=5",
        "training.text_samples=0", f"output_dir={run}", *LAYOUTS[layout],
    ]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_read_in_one_order_and_train_the_same(
    world: Worlds, source: Path, tmp_path: Path, layout: str
) -> None:
    world(2).train(job(source, tmp_path / "plain", layout))
    (code, order), other = world(2).call("late:train", job(source, tmp_path / "late", layout))
    assert code == 0 and other == [0, order]
    assert " ".join(order) == "q1 q2 r1 q3 r2 q4 r3 q5 r4 r5 q6 q7 r6 q8 r7 q9 r8 q10 r9 r10 q11 q12 r11 r12"
    found, wanted = (steps(tmp_path / name, "loss", "grad_norm", "samples") for name in ("late", "plain"))
    assert found == wanted
    assert relative_difference(weights(tmp_path / "late"), weights(tmp_path / "plain")) == 0


def test_a_stop_of_one_rank_ends_all_after_the_same_step(world: Worlds, source: Path, tmp_path: Path) -> None:
    words = [*job(source, tmp_path / "run", "replicas"), "checkpoint.every_seconds=0.01"]
    first, second = world(2).call("late:train", words, 1)
    assert first == second and first[0] == 1
    # The wish travels with step 8, which may be read when step 9 is queued; a checkpoint by time has all read before.
    assert first[1][-1] in ("r8", "r9")
    assert summary(tmp_path / "run")["status"] == "stopped"
    world(2).train(words, job(source, tmp_path / "plain", "replicas"))
    assert relative_difference(weights(tmp_path / "run"), weights(tmp_path / "plain")) == 0
