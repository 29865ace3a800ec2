"""The costs of a corpus by its megabytes: preparing it with each tokenizer, the start of a rank that finds it prepared,
evaluation of its validation split."""

import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from benchmarks.growth.fit import Point
from benchmarks.growth.memory import added_at_most
from benchmarks.growth.model import SETTINGS, first_step
from benchmarks.growth.stopwatch import Stopwatch, seconds
from hvd_transformer.config import Config, load
from hvd_transformer.data.build_once import ALONE
from hvd_transformer.data.prepared import PreparedData
from hvd_transformer.data.tokenizers import WordTokenizer
from hvd_transformer.data.words import LIBRARY
from hvd_transformer.native_library import CannotCompile
from hvd_transformer.tasks.language_model_task import LanguageModelTask
from hvd_transformer.training.session import Session

_VOCABULARY = 20_000


def characters(megabytes: int) -> dict[str, Point]:
    """All of it, cut into characters."""
    with tempfile.TemporaryDirectory(prefix="growth-") as name:
        folder = Path(name)
        write_text(folder / "text.txt", megabytes)
        found = _preparation(folder, "char", "characters")

        def evaluate(session: Session) -> None:
            found["evaluation"] = seconds(lambda: session.trainer.evaluate("valid"))

        first_step(_config(folder, "warm", "char"))
        starts = [first_step(_config(folder, f"start-{number}", "char")) for number in range(5)]
        found["start, prepared before"] = min(starts)
        first_step(_config(folder, "run", "char"), evaluate)
        return {name: Point(megabytes, [value]) for name, value in found.items()}


def words(megabytes: int) -> dict[str, Point]:
    """basic_english, learned and encoded."""
    return _prepare(megabytes, "basic_english", "words")


def byte_pairs(megabytes: int) -> dict[str, Point]:
    """Byte pairs, learned and encoded."""
    return _prepare(megabytes, "bpe", "byte pairs")


def _prepare(megabytes: int, tokenizer: str, name: str) -> dict[str, Point]:
    with tempfile.TemporaryDirectory(prefix="growth-") as folder:
        write_text(Path(folder) / "text.txt", megabytes)
        found = _preparation(Path(folder), tokenizer, name)
        return {name: Point(megabytes, [value]) for name, value in found.items()}


def _preparation(folder: Path, tokenizer: str, name: str) -> dict[str, float]:
    """Seconds, and the most anonymous memory. The compiler's seconds do not grow: it is called before."""
    if tokenizer == WordTokenizer.kind:
        with suppress(CannotCompile):
            LIBRARY.load(folder / "cache" / "kernels")
    watch = Stopwatch()
    most = added_at_most(lambda: _prepared(folder, "prepared", tokenizer))
    return {f"prepare {name}": watch.seconds(), f"prepare {name}, bytes": float(most)}


def _prepared(folder: Path, run: str, tokenizer: str) -> PreparedData:
    return LanguageModelTask.prepare(_config(folder, run, tokenizer), ALONE)


def _config(folder: Path, run: str, tokenizer: str) -> Config:
    torch.set_num_threads(1)
    return load(
        overrides=[
            *SETTINGS, f"data.source={folder / 'text.txt'}", f"data.cache_dir={folder / 'cache'}",
            f"output_dir={folder / run}", f"data.tokenizer={tokenizer}", "data.split=[0.999, 0.001]",
            "model.num_layers=1", "training.eval_batch_size=64",
        ]
    )  # fmt: skip


def write_text(file: Path, megabytes: int) -> None:
    """Words by Zipf's law, in lines of 12; the lines come again and again, each time in another order."""
    generator = np.random.default_rng(0)
    shares = 1 / np.arange(1, _VOCABULARY + 1)
    chosen = _words(generator)[generator.choice(_VOCABULARY, (10_000, 12), p=shares / shares.sum())].tolist()
    lines = np.array([" ".join(line) + " .\n" for line in chosen])
    with file.open("wb") as opened:
        while (missing := megabytes * 10**6 - opened.tell()) > 0:
            text = "".join(generator.permutation(lines).tolist()).encode()
            opened.write(text if len(text) < missing else text[: missing - 1] + b"\n")


def _words(generator: np.random.Generator) -> np.ndarray:
    """The frequent ones are short."""
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    lengths = 2 + np.log2(np.arange(1, _VOCABULARY + 1)).astype(int) // 2
    return np.array(["".join(letters[(26 * generator.random(n) ** 2).astype(int)]) for n in lengths])
