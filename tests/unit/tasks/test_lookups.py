"""How many tokens a step looks up in an embedding, by which `communication.embedding_rows=auto` chooses."""

import random
from pathlib import Path

import pytest

from hvd_transformer.config import load
from hvd_transformer.data.build_once import PrepareContext
from hvd_transformer.data.sampler import Replica
from hvd_transformer.tasks.registry import task_class
from hvd_transformer.tasks.task import ExampleTask

WORDS = ["ein", "zwei", "drei", "rot", "blau", "Haus", "Hund", "geht", "nicht"]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("name", ["translation", "classification"])
def test_they_are_those_of_the_batches(name: str, share: bool, tmp_path: Path) -> None:
    generator = random.Random(3)
    for split, count in {"train": 120, "valid": 10}.items():
        rows = [" ".join(generator.choices(WORDS, k=generator.randint(3, 9))) for _ in range(count)]
        (tmp_path / f"{split}.de").write_text("".join(f"{row}\n" for row in rows))
        (tmp_path / f"{split}.en").write_text("".join(f"{row}\n" for row in rows))
        (tmp_path / f"{split}.csv").write_text("label,text\n" + "".join(f"{len(row) % 2},{row}\n" for row in rows))
    config = load(
        overrides=[
            f"task={name}", f"data.source={tmp_path}", f"data.cache_dir={tmp_path / 'cache'}", "data.workers=1",
            "data.tokenizer=basic_english", "training.batch_size=6", "training.global_batch_size=24",
            "optimizer.lr_scaling=none", f"model.share_embeddings={share and name == 'translation'}",
        ]
    )  # fmt: skip
    kind = task_class(config)
    task = kind(config, kind.prepare(config, PrepareContext(map, lambda text: None, lambda: False)), Replica(0, 1))
    assert isinstance(task, ExampleTask)
    steps = [[task.batch(0, items) for items in plan.accumulation] for plan in task.sampler.epoch()]
    inputs = [task.micro_batch(batch).inputs for step in steps for batch in step]
    counts = [(batch[0].numel(), batch[2].numel() if name == "translation" else 0) for batch in inputs]
    found = sum(sum(pair) if share else pair[0] for pair in counts) / len(steps)
    assert task.lookups_per_step == pytest.approx(found, rel=0.25)  # without padding and special tokens
    assert name == "translation" or task.targets_per_step == 24
