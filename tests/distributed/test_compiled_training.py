"""`training.compile` changes no result: every task, and matrices that ranks share."""

import random
from pathlib import Path

import pytest
from commands import command
from jobs import relative_difference, steps, tiny, weights, write_corpus

pytestmark = pytest.mark.distributed

COMMON = ["training.max_steps=5", "model.dropout=0.2", "optimizer.name=sgd", "optimizer.lr=0.1"]
WORDS = ["ein", "zwei", "drei", "rot", "blau", "Haus", "Hund", "geht", "nicht"]
LAYOUT = ["parallel.pipeline=2", "parallel.partition=uniform", "parallel.micro_batches=2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A text, pairs and labelled texts; their lengths differ."""
    root, rng = tmp_path_factory.mktemp("compiled"), random.Random(3)
    write_corpus(root / "text", train=2000)
    for name in ("pairs", "texts"):
        (root / name).mkdir()
    for split, number in {"train": 61, "valid": 13, "test": 7}.items():
        rows = [rng.choices(WORDS, k=rng.randint(1, 9)) for _ in range(number)]
        (root / "pairs" / f"{split}.de").write_text("".join(" ".join(row) + "\n" for row in rows))
        (root / "pairs" / f"{split}.en").write_text("".join(" ".join(reversed(row)) + "\n" for row in rows))
        lines = ["label,text", *(f"{'good' if 'rot' in row else 'bad'},{' '.join(row)}" for row in rows)]
        (root / "texts" / f"{split}.csv").write_text("\n".join(lines) + "\n")
    return root


def task(folder: Path, name: str) -> list[str]:
    if name == "language_model":
        return tiny(folder / "text")
    source = {"translation": "pairs", "classification": "texts"}[name]
    return [*tiny(folder / source)[:2], f"task={name}", "data.tokenizer=basic_english", *tiny(folder / source)[4:]]


@pytest.mark.parametrize(
    ("size", "name", "words"),
    [
        (1, "translation", ["data.batch_tokens=60"]),
        pytest.param(1, "classification", [], marks=pytest.mark.slow),
        (2, "language_model", ["parallel.tensor=2", "parallel.vocab_parallel=true", *LAYOUT]),
        pytest.param(2, "translation", ["parallel.tensor=2", "parallel.recompute=always"], marks=pytest.mark.slow),
        pytest.param(
            2,
            "language_model",
            [*LAYOUT, "parallel.schedule=zero_bubble", "parallel.optimizer_shard=state"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_compiled_is_eager(world, folder: Path, tmp_path: Path, size: int, name: str, words: list[str]) -> None:
    runs = {
        choice: [
            *task(folder, name), *COMMON, *words, f"training.compile={choice}", f"output_dir={tmp_path / choice}"
        ]
        for choice in ("false", "true")
    }  # fmt: skip
    world(size, "gloo").train(*runs.values())
    (_, *eager), (_, *found) = (list(zip(*steps(tmp_path / choice, "loss"), strict=True)) for choice in runs)
    assert found[0] == pytest.approx(eager[0], rel=1e-5)
    difference = relative_difference(weights(tmp_path / "true"), weights(tmp_path / "false"))
    assert 0 < difference < 1e-4  # other kernels, other rounding


def test_without_a_compiler_training_goes_on(folder: Path, tmp_path: Path) -> None:
    outputs = {}
    for choice in ("false", "true"):
        settings = [*tiny(folder / "text"), *COMMON, f"training.compile={choice}", f"output_dir={tmp_path / choice}"]
        cache = f"data.cache_dir={tmp_path / 'cache'}"  # without kernels
        words = [cache if "cache_dir" in word else word for word in settings]
        done = command("hvd-train", *words, environment={"CXX": "no-such-compiler"})
        assert done.returncode == 0, done.stderr
        outputs[choice] = done.stdout + done.stderr
    assert outputs["true"].count("training.compile: off, CXX=no-such-compiler is not a command") == 1
    assert steps(tmp_path / "true", "loss") == steps(tmp_path / "false", "loss")
