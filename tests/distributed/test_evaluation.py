"""Validation and test losses do not depend on the number of ranks, nor on how the data divides."""

import json

import plain
import pytest
from conftest import BIN
from jobs import started, summary, tiny, weights, write_corpus

pytestmark = pytest.mark.distributed

# Characters of the valid and the test split: below a window of 12, fewer windows than ranks, whole windows, uneven.
SIZES = [(7, 13), (12 * 8 + 1, 27), (150, 12 * 7), (401, 2)]
BATCHES = [1, 3, 8]
SAMPLES = 12  # a step, so that every number of ranks trains the same weights
RUNS = [(size, BATCHES[number % 3], precision) for number, size in enumerate(SIZES) for precision in ("fp64", "fp32")]
RUNS += [(SIZES[3], 8, "fp64"), (SIZES[3], None, "fp32")]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    return {size: write_corpus(folder / f"{size[0]}-{size[1]}", 800, *size) for size in SIZES}


@pytest.fixture(scope="module")
def folder(world, corpora, tmp_path_factory):
    """Every run on 1, 2, 3 and 4 ranks: FOLDER/SIZE-NUMBER."""
    folder = tmp_path_factory.mktemp("runs")
    for size in (1, 2, 3, 4):
        world(size).train(
            *(
                [
                    *tiny(corpora[text]),
                    *case(precision).words(dp=size),
                    f"output_dir={folder / f'{size}-{number}'}",
                    f"training.batch_size={SAMPLES // size}",
                    f"training.eval_batch_size={batch}",
                ]
                for number, (text, batch, precision) in enumerate(RUNS)
            )
        )
    return folder


def case(precision: str) -> plain.Case:
    return plain.Case("evaluation", "sgd", 0.3, precision=precision, num_steps=5)


@pytest.mark.parametrize("number", range(len(RUNS)), ids=[f"{run[0]}-{run[1]}-{run[2]}" for run in RUNS])
def test_any_number_of_ranks_gives_the_same_loss(folder, corpora, number):
    size, _, precision = RUNS[number]
    for split in ("valid", "test"):
        losses = [summary(folder / f"{ranks}-{number}")[f"{split}_loss"] for ranks in (1, 2, 3, 4)]
        alone = plain.evaluate(corpora[size], split, case(precision), weights(folder / f"1-{number}"))
        print(split, [abs(loss / alone - 1) for loss in losses])
        assert losses == pytest.approx([alone] * 4, rel=1e-6)


@pytest.mark.timeout(600)
def test_evaluate_gives_the_same_on_any_number_of_ranks_and_when_launched(folder, corpora, world, tmp_path):
    """Of a checkpoint of three ranks. Rank 0's line is the only one of standard output."""
    run, copy = folder / "3-6", tmp_path / "copy.txt"
    assert RUNS[6] == (SIZES[3], 1, "fp64")
    copy.write_text((corpora[SIZES[3]] / "valid.txt").read_text())
    evaluate = ["evaluate", run, "--json", "--data", copy]
    found = {}
    for ranks, words in ((1, []), (2, []), (3, []), (2, ["parallel.tensor=2", "parallel.pipeline=2"])):
        done = world(ranks).command("hvd-transformer", *evaluate, *words)
        assert done.returncode == 0, done.stdout + done.stderr
        (line,) = done.stdout.splitlines()
        found[(ranks, *words)] = json.loads(line)
    launch = [BIN / "hvd-transformer", "launch", "-np", "2", "-H", "localhost:2", "--", *evaluate]
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    with started(1, launch, "", tmp_path / "output") as job:
        assert job.wait(120) == 0, job.text()
        job.wait_gone(5)
    found["launch"] = next(json.loads(line) for line in job.text().splitlines() if line.startswith("{"))
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    for own in found.values():
        assert own["count"] == len(copy.read_text()) - 1
        assert own["metrics"]["loss"] == pytest.approx(summary(run)["valid_loss"], rel=1e-9)
        assert own["metrics"].keys() == {"loss", "perplexity"}
    assert [own["ranks"] for own in found.values()] == [1, 2, 3, 2, 2]
