"""The costs of a rank by the number of its sentence pairs: the start with prepared data, planning an epoch, batches.

A prepared folder of a few pairs is stretched to so many by holes in its files, which read as zeros: the order by length
then names pair 0 again and again. Only the table of lengths is written, with lengths as in WMT's news.
"""

import json
import os
import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.growth.fit import Point
from benchmarks.growth.memory import anonymous
from benchmarks.growth.stopwatch import Stopwatch, seconds
from hvd_transformer.config import Config, load
from hvd_transformer.data.build_once import ALONE
from hvd_transformer.data.prepared import INDEX
from hvd_transformer.data.sampler import Replica
from hvd_transformer.tasks.translation_task import TranslationTask

_REPLICA = Replica(3, 8)
_REAL, _LONGEST, _STEPS = 1000, 100, 100
_TOKENS_PER_TEXT = 30


def pairs(number: int) -> dict[str, Point]:
    """Of one of eight replicas, with and without `data.batch_tokens`."""
    with tempfile.TemporaryDirectory(prefix="growth-") as name:
        folder = Path(name)
        _write_pairs(folder / "pairs")
        _start(_config(folder))  # prepares, and imports what is needed
        (prepared,) = (path for path in (folder / "cache" / "prepared").iterdir() if path.is_dir())
        _stretch(prepared, number)
        found = {}
        for kind, words in (("batch_size", ()), ("batch_tokens", ("data.batch_tokens=256",))):
            config = _config(folder, *words)
            before, watch = anonymous(), Stopwatch()
            task = _start(config)
            found[f"start, {kind}"] = watch.seconds()
            found[f"plan of an epoch, {kind}"] = seconds(lambda task=task: _plan(task))
            found[f"{_STEPS} steps, {kind}"] = seconds(lambda task=task: _take(task))
            found[f"start and steps, {kind}, bytes"] = float(max(0, anonymous() - before))
        return {name: Point(number, [value]) for name, value in found.items()}


def _start(config: Config) -> TranslationTask:
    """To the first batch."""
    task = TranslationTask(config, TranslationTask.prepare(config, ALONE), _REPLICA)
    plan = next(task.sampler.epoch())
    task.batch(0, plan.accumulation[0])
    return task


def _plan(task: TranslationTask) -> None:
    """All that is known of an epoch before it begins."""
    task.sampler.num_steps()
    next(task.sampler.epoch())


def _take(task: TranslationTask) -> None:
    for _, plan in zip(range(_STEPS), task.sampler.epoch(epoch=1), strict=False):
        for items in plan.accumulation:
            task.batch(1, items)


def _config(folder: Path, *words: str) -> Config:
    torch.set_num_threads(1)
    return load(
        overrides=[
            "task=translation", f"data.source={folder / 'pairs'}", f"data.cache_dir={folder / 'cache'}",
            "data.tokenizer=char", "model.num_layers=1", "model.d_model=16", "model.num_heads=2",
            "model.d_feedforward=32", f"data.sequence_length={_LONGEST}", *words,
        ]
    )  # fmt: skip


def _write_pairs(folder: Path) -> None:
    folder.mkdir()
    for split in ("train", "valid"):
        for language in ("de", "en"):
            text = "abcdefghij" * 10
            lines = [text[: 1 + number % _LONGEST] for number in range(_REAL)]
            (folder / f"{split}.{language}").write_text("".join(f"{line}\n" for line in lines))


def _stretch(folder: Path, number: int) -> None:
    """Make the training split one of `number` pairs."""
    index = json.loads((folder / INDEX).read_text())
    lengths = np.random.default_rng(0).lognormal(3.2, 0.65, 100_000).round().clip(1, _LONGEST).astype(np.int64)
    shares = np.bincount(lengths, minlength=_LONGEST + 1).cumsum() / len(lengths)
    counts = np.diff((shares * number).round().astype(np.int64), prepend=0)
    counts.astype("<i8").tofile(folder / "train-lengths.bin")
    index["files"]["train-lengths"]["count"] = len(counts)
    for name in ("source", "target", "source-ends", "target-ends", "order"):
        entry = index["files"][f"train-{name}"]
        entry["count"] = number * (1 if name.endswith(("ends", "order")) else _TOKENS_PER_TEXT)
        os.truncate(folder / f"train-{name}.bin", entry["count"] * np.dtype(entry["dtype"]).itemsize)
    (folder / INDEX).write_text(json.dumps(index))
