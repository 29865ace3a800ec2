"""The layers of a tensor group over torch.distributed compute what they compute over Horovod."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from jobs import FAULTY, lines, started, summary, tiny, write_corpus

pytestmark = pytest.mark.distributed

TORCH = "communication.tensor_backend=torch"
# A sum of two is the same in either order: two ranks a replica compute the same bits.
CASES = {
    "vocabulary, stages": (
        2,
        [
            "parallel.vocab_parallel=true", "parallel.pipeline=2", "parallel.partition=uniform",
            "parallel.micro_batches=2", "parallel.recompute=always", "training.precision=fp64",
        ],
    ),
    "bf16": (2, ["parallel.vocab_parallel=true", "training.precision=bf16", "model.loss_chunk=5"]),
    "replicas, shards": (
        4,
        [
            "parallel.vocab_parallel=true", "parallel.optimizer_shard=gradients", "parallel.pipeline=3",
            "parallel.partition=uniform", "parallel.micro_batches=2",
        ],
    ),
}  # fmt: skip
KEPT = [f"checkpoints/latest/{name}.safetensors" for name in ("model", "optimizer")]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text", train=3500)


def words(corpus: Path, run: Path, *more: str) -> list[str]:
    return [*tiny(corpus), f"output_dir={run}", "parallel.tensor=2", "training.max_steps=8", "training.epochs=9", *more]


def losses(run: Path) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in lines(run) if "loss" in line]


@pytest.mark.parametrize("backend", ["gloo", pytest.param("mpi", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "case", ["vocabulary, stages", "bf16", pytest.param("replicas, shards", marks=pytest.mark.slow)]
)
def test_both_libraries_train_the_same_bits(world, corpus, tmp_path, case, backend):
    size, more = CASES[case]
    dtype = {"bf16": "bfloat16", "vocabulary, stages": "float64"}.get(case, "float32")
    for library in ("horovod", "torch"):
        run = tmp_path / library
        asked = words(corpus, run, f"communication.tensor_backend={library}", *more)
        for found in world(size, backend).call("tensor_backends:train", asked):
            assert {name.split()[0] for name in found["calls"]} == {library}
            # Of bfloat16, too, which Horovod gets as float32.
            assert library == "horovod" or found["calls"][f"torch torch.{dtype}"] > 50
            assert not found["open"]
    first, second = tmp_path / "horovod", tmp_path / "torch"
    assert losses(second) == losses(first)
    assert len(losses(first)) == 8 and summary(first)["valid_loss"] == summary(second)["valid_loss"]
    for name in KEPT:
        assert (second / name).read_bytes() == (first / name).read_bytes(), name


def test_four_ranks_that_share_matrices_differ_by_rounding(world, corpus, tmp_path):
    more = ["parallel.tensor=4", "model.num_heads=4", "parallel.vocab_parallel=true", "training.precision=fp64"]
    for library in ("horovod", "torch"):
        world(4).train(words(corpus, tmp_path / library, *more, f"communication.tensor_backend={library}"))
    found, wanted = losses(tmp_path / "torch"), losses(tmp_path / "horovod")
    assert len(found) == 8
    for own, other in zip(found, wanted, strict=True):
        assert own == pytest.approx(other, rel=1e-12)


def test_stages_have_communicators_of_their_own(world):
    """And the watchdog sees which sum a rank waits for."""
    first, second = world(2).call("tensor_backends:collectives", 3)
    for found in (first, second):
        assert found["sums"] == [[3 * 10.0 ** (2 * number)] * 3 for number in range(3)]
        assert found["narrow"] == [2.0, 2.0**-8]
        assert found["gathered"] == [[[0, 7]], [[1, 7]]]
        assert (found["after"], found["ended"], found["open"]) == ([], 1, False)
    assert first["seen"] == ["tensor.stage0.3"] and second["seen"] == []


def test_without_a_tensor_group_torch_is_not_asked(world, corpus, tmp_path):
    alone = words(corpus, tmp_path / "run", TORCH, "parallel.tensor=1", "training.max_steps=2")
    assert [found["calls"] for found in world(2).call("tensor_backends:train", alone)] == [{}, {}]


def test_auto_is_horovod_on_the_cpu(world, corpus, tmp_path):
    for found in world(2).call("tensor_backends:train", words(corpus, tmp_path / "run", "training.max_steps=2")):
        assert set(found["calls"]) == {"horovod torch.float32"}


def test_an_error_of_all_ranks_leaves_no_group_behind(world, corpus, tmp_path):
    """The next job of the same processes opens one."""
    diverging = words(corpus, tmp_path / "lost", TORCH, "optimizer.lr=1e30", "optimizer.clip_norm=none")
    done = world(2).command("hvd-train", *diverging)
    assert done.returncode == 1 and "the loss is" in done.stderr, done.stdout + done.stderr
    world(2).train(words(corpus, tmp_path / "run", TORCH))


def ended(size: int, command: Sequence[object], output: Path) -> str:
    with started(size, [str(word) for word in command], "gloo", output) as job:
        assert job.wait(120) != 0
        job.wait_gone(20)
        return job.text()


def test_a_killed_rank_ends_the_job_and_it_resumes(world, corpus, tmp_path):
    """In the middle of a backward, in which the other rank waits for its sums."""
    more = [TORCH, "parallel.vocab_parallel=true", "checkpoint.every_steps=2", "communication.bucket_mb=0.001"]
    text = ended(2, [*FAULTY, 1, 6, "die", *words(corpus, tmp_path / "run", *more)], tmp_path / "output")
    assert re.search(r"hvd-train: rank 0 on \S+ lost another rank: [^\n]*Connection (closed|reset) by peer", text), text
    assert "rank 0 failed" not in text
    assert [line["step"] for line in lines(tmp_path / "run") if "loss" in line][-1] < 8
    world(2).train(words(corpus, tmp_path / "run", *more), words(corpus, tmp_path / "unbroken", *more))
    for name in KEPT:
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "unbroken" / name).read_bytes()
    assert losses(tmp_path / "run") == losses(tmp_path / "unbroken")
