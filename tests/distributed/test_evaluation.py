"""Validation and test losses do not depend on the number of ranks, nor on how the data divides."""

import plain
import pytest
from jobs import MANY_RUNS, summary, tiny, weights, write_corpus, write_runs

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
def folder(ranks, corpora, tmp_path_factory):
    """Every run on 1, 2, 3 and 4 ranks: FOLDER/WORLD-NUMBER."""
    folder = tmp_path_factory.mktemp("runs")
    for world in (1, 2, 3, 4):
        runs = [
            [
                *tiny(corpora[size]),
                *case(precision).words(dp=world),
                f"output_dir={folder / f'{world}-{number}'}",
                f"training.batch_size={SAMPLES // world}",
                f"training.eval_batch_size={batch}",
            ]
            for number, (size, batch, precision) in enumerate(RUNS)
        ]
        result = ranks(world, [*MANY_RUNS, write_runs(folder / f"{world}.json", runs)])
        assert result.returncode == 0, result.stdout + result.stderr
    return folder


def case(precision: str) -> plain.Case:
    return plain.Case("evaluation", "sgd", 0.3, precision=precision, num_steps=5)


@pytest.mark.parametrize("number", range(len(RUNS)), ids=[f"{run[0]}-{run[1]}-{run[2]}" for run in RUNS])
def test_any_number_of_ranks_gives_the_same_loss(folder, corpora, number):
    size, _, precision = RUNS[number]
    for split in ("valid", "test"):
        losses = [summary(folder / f"{world}-{number}")[f"{split}_loss"] for world in (1, 2, 3, 4)]
        alone = plain.evaluate(corpora[size], split, case(precision), weights(folder / f"1-{number}"))
        print(split, [abs(loss / alone - 1) for loss in losses])
        assert losses == pytest.approx([alone] * 4, rel=1e-6)
