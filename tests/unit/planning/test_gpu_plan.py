"""The memory that `plan` tells for a GPU, beside what an H200 had at its peak (`benchmarks.gpu`, RESULTS.md)."""

import pytest

from hvd_transformer.config import load
from hvd_transformer.planning.memory_plan import make_plan

COMMON = ["training.precision=bf16", "parallel.partition=uniform", "parallel.recompute=never", "training.device=cuda"]
TUTORIAL = ["parallel.pipeline=1", "parallel.micro_batches=1", "training.batch_size=234"]
COMPILED = "training.compile=true"
SLOW = pytest.mark.slow

# Preset, settings, size of the vocabulary, GiB.
PEAKS = [
    ("tutorial-1b", TUTORIAL, 28_783, 18.01),
    pytest.param("tutorial-1b", [*TUTORIAL, COMPILED], 28_783, 17.76, marks=SLOW),
    pytest.param("llama-1b", ["training.batch_size=4"], 32_768, 32.04, marks=SLOW),
    pytest.param("llama-1b", ["training.batch_size=4", COMPILED], 32_768, 29.54, marks=SLOW),
    pytest.param("gpt-small", ["training.batch_size=16"], 32_768, 8.84, marks=SLOW),
    ("gpt-small", ["training.batch_size=16", COMPILED], 32_768, 8.56),
]


@pytest.mark.parametrize(("preset", "words", "vocab_size", "measured"), PEAKS)
def test_the_plan_is_what_a_gpu_had(preset: str, words: list[str], vocab_size: int, measured: float) -> None:
    (stage,) = (plan := make_plan(load(preset, overrides=[*COMMON, *words]), vocab_size, 1)).stages
    assert sum(plan.memory(stage)) / 2**30 == pytest.approx(measured, rel=0.05)
