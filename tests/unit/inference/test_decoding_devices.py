"""Decoding with a pipeline's model: on several devices it finds what it finds on one."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small_job
import torch
from device_tags import DEVICES, SeveralDevices

from hvd_transformer.comm.world import World
from hvd_transformer.config import Config, load
from hvd_transformer.data.build_once import PrepareContext
from hvd_transformer.data.sampler import Replica
from hvd_transformer.parallel.mesh import ParallelMesh
from hvd_transformer.tasks.translation_task import TranslationTask
from hvd_transformer.training import trainer as trainer_module
from hvd_transformer.training.state import TrainState
from hvd_transformer.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")

PIPED = ("parallel.pipeline=2", "parallel.partition=uniform")
POSITIONS = ["sinusoidal", "learned", "rotary"]
Found = tuple[dict[str, float], list[Mapping[str, str]]]


def decoded(job: Trainer) -> Found:
    """The metrics and the texts after an evaluation."""
    metrics = job.evaluate("valid").metrics
    texts = list(job.text_samples("valid"))
    job.close()
    return metrics, texts


def text_job(*words: str) -> Trainer:
    words = ("training.text_samples=3", "data.sequence_length=12", "model.num_layers=3", *words)
    return small_job.trainer(small_job.settings(*words))


def spread(job: Trainer, devices: tuple[torch.device, ...] = DEVICES) -> Trainer:
    """The same job with its stages on these devices."""
    job.close()
    return Trainer(job.config, World(), replace(job.mesh, devices=devices), job.task, TrainState())


def pairs(folder: Path, *words: str) -> tuple[Config, Any]:
    """Sentences of different lengths, so that some are finished before others."""
    for split in ("train", "valid"):
        for language in ("de", "en"):
            texts = [f"{language} {number} {'x ' * number}end\n" for number in range(5)]
            (folder / f"{split}.{language}").write_text("".join(texts))
    config = load(
        overrides=[
            "task=translation",
            f"data.source={folder}",
            f"data.cache_dir={folder / 'cache'}",
            "data.tokenizer=basic_english",
            "data.sequence_length=15",
            "training.eval_batch_size=3",
            "training.precision=fp64",
            "training.text_samples=3",
            "translation.beam=3",
            *("model.num_layers=2", "model.num_decoder_layers=2", "model.d_model=8", "model.num_heads=2"),
            *("model.d_feedforward=12", "model.max_length=16"),
            *words,
        ]
    )
    return config, TranslationTask.prepare(config, PrepareContext())


def translation_job(made: tuple[Config, Any]) -> Trainer:
    config, data = made
    world = World()
    task = TranslationTask(config, data, Replica(0, 1))
    return Trainer(config, world, ParallelMesh.of(config, world), task, TrainState())


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("tied", [True, False])
def test_texts_are_those_of_one_device(position: str, tied: bool) -> None:
    words = (f"model.position={position}", f"model.tie_embeddings={tied}")
    wanted = decoded(text_job(*words))
    job = text_job(*words, *PIPED)
    with SeveralDevices() as tags:
        found = decoded(spread(job))
    assert found == wanted
    assert len(wanted[1]) == 3 and all(text["continuation"] for text in wanted[1])
    assert tags.moves > 0


PRE, POST = ("model.norm=pre",), ("model.norm=post", "model.tie_embeddings=false")


@pytest.mark.parametrize(
    ("cut", "words"),
    [("[2, 6]", PRE), ("[6, 2]", PRE), ("[5, 2]", POST)],
    ids=["in the encoder", "in the decoder", "in the decoder, not tied"],
)
def test_translations_and_bleu_are_those_of_one_device(tmp_path: Path, cut: str, words: tuple[str, ...]) -> None:
    wanted = decoded(translation_job(pairs(tmp_path, *words)))
    job = translation_job(pairs(tmp_path, *words, "parallel.pipeline=2", f"parallel.partition={cut}"))
    with SeveralDevices():
        found = decoded(spread(job))
    assert found[1] == wanted[1]
    assert found[0] == pytest.approx(wanted[0], rel=1e-9)
    assert "bleu" in found[0]


def test_unmoved_tensors_would_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "inputs_moved", lambda stages: torch.no_grad())
    job = text_job(*PIPED)
    with SeveralDevices(), pytest.raises(RuntimeError, match="tensors on cpu"):
        decoded(spread(job))


def test_nothing_moves_and_no_hook_stays_on_one_device() -> None:
    job = text_job(*PIPED)
    with SeveralDevices() as tags:
        job = spread(job, (DEVICES[0],) * 2)
        tags.moves = 0
        job.text_samples("valid")
    assert tags.moves == 0
    several = spread(text_job(*PIPED))
    several.text_samples("valid")
    assert not any(module._forward_pre_hooks for module in several.task.model.modules())


def test_decoding_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that grow would be compiled anew for many lengths."""
    stances: list[str] = []

    def stance(name: str) -> Any:
        stances.append(name)
        return nullcontext()

    monkeypatch.setattr(torch.compiler, "set_stance", stance)
    job = text_job()
    job.config = job.config.model_copy(update={"training": job.config.training.model_copy(update={"compile": True})})
    for devices in (job.mesh.devices, (torch.device("cuda", 0),)):
        job.mesh = replace(job.mesh, devices=devices)
        job.text_samples("valid")
    assert stances == ["force_eager"]
    monkeypatch.setattr(job, "_pinned", lambda batch: batch)
    job.evaluate("valid")
    assert stances == ["force_eager"] * 2
    job.close()
