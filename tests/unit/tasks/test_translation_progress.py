"""Translating a split for BLEU is progress to the watchdog, batch by batch."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hvd_transformer.comm.world import World
from hvd_transformer.config import load
from hvd_transformer.data.build_once import PrepareContext
from hvd_transformer.data.sampler import Replica
from hvd_transformer.monitoring.heartbeat import Heartbeat
from hvd_transformer.parallel.mesh import ParallelMesh
from hvd_transformer.tasks import translation_task
from hvd_transformer.training.state import TrainState
from hvd_transformer.training.trainer import Trainer

SENTENCES = 6


def test_each_batch_that_is_translated_is_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for split in ("train", "valid"):
        for language in ("de", "en"):
            text = "".join(f"{language} sentence {number % 3}\n" for number in range(SENTENCES))
            (tmp_path / f"{split}.{language}").write_text(text)
    small = ["num_layers=1", "num_decoder_layers=1", "d_model=8", "num_heads=2", "d_feedforward=12", "max_length=16"]
    config = load(
        overrides=[
            "task=translation",
            f"data.source={tmp_path}",
            f"data.cache_dir={tmp_path / 'cache'}",
            "data.tokenizer=basic_english",
            "data.sequence_length=15",
            "training.eval_batch_size=2",
            *(f"model.{word}" for word in small),
        ]
    )
    data = translation_task.TranslationTask.prepare(config, PrepareContext())
    torch.manual_seed(1)
    world = World()
    mesh = ParallelMesh.of(config, world)
    task = translation_task.TranslationTask(config, data, Replica(0, 1))
    trainer = Trainer(config, world, mesh, task, TrainState())
    heartbeat, signs, translate = Heartbeat(), [], translation_task.translate_texts
    heartbeat.timeline = trainer.engine.timeline

    def recording(*args: Any, **kwargs: Any) -> Any:
        signs.append(heartbeat.signs())
        return translate(*args, **kwargs)

    monkeypatch.setattr(translation_task, "translate_texts", recording)
    trainer.evaluate("valid")
    assert len(signs) == SENTENCES // 2 == len(set(signs))
