"""The texts that a model writes after an evaluation: which they are, and that training does not notice them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_job
import torch
from small_job import TOKENIZER, VOCABULARY, run, settings, trainer, weights

from hvd_transformer.comm.world import World
from hvd_transformer.config import Config, load
from hvd_transformer.data.build_once import PrepareContext
from hvd_transformer.data.sampler import Replica
from hvd_transformer.errors import UserError
from hvd_transformer.inference import predict
from hvd_transformer.inference.predict import translate
from hvd_transformer.parallel.mesh import ParallelMesh
from hvd_transformer.tasks import translation_task
from hvd_transformer.training.state import TrainState
from hvd_transformer.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTH = 16


def config(*words: str) -> Config:
    return settings("training.text_samples=3", f"data.sequence_length={LENGTH}", *words)


def written(job: Trainer) -> list[Mapping[str, str]]:
    job.evaluate("valid")
    return list(job.text_samples("valid"))


def predictable(count: int) -> np.ndarray:
    """Each token plus three."""
    return (3 * np.arange(count) % VOCABULARY).astype("<u2")


def test_passages_of_the_split_are_continued_as_the_model_has_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    valid = predictable(100)
    monkeypatch.setattr(small_job, "SPLITS", {"train": predictable(400), "valid": valid})
    job = trainer(config("training.max_steps=120", "model.d_model=16"))
    before = written(job)
    run(job)
    after = written(job)
    prompts = [valid[start : start + LENGTH // 4] for start in (0, 33, 66)]
    true = [valid[start + LENGTH // 4 : start + LENGTH] for start in (0, 33, 66)]
    for samples in (before, after):
        assert [sample["prompt"] for sample in samples] == [TOKENIZER.decode(prompt) for prompt in prompts]
    found = "".join(sample["continuation"] for sample in after)
    wanted = "".join(TOKENIZER.decode(text) for text in true)
    assert found == wanted
    assert "".join(sample["continuation"] for sample in before) != wanted


def test_training_does_not_notice() -> None:
    words = ("model.dropout=0.3", "training.max_steps=6", "data.sequence_length=8")
    plain, sampled = trainer(config(*words)), trainer(config(*words))
    wanted, generators = run(plain), torch.get_rng_state()
    found = run(sampled, 3)
    first = written(sampled)
    found += run(sampled)
    assert found == wanted
    assert all(torch.equal(weight, weights(plain)[name]) for name, weight in weights(sampled).items())
    assert torch.equal(torch.get_rng_state(), generators)
    assert written(sampled) != first


def test_the_seed_alone_decides_what_is_drawn() -> None:
    assert written(trainer(config())) == written(trainer(config()))
    piped = config("parallel.pipeline=2", "parallel.partition=uniform")
    assert written(trainer(piped)) == written(trainer(config()))
    # Of the same weights: the seed of the job draws them, too.
    job = trainer(config())
    first = written(job)
    job.task.config = config("seed=2")
    assert written(job) != first


def test_a_replica_other_than_the_first_writes_nothing() -> None:
    job = trainer(config())
    job.mesh = replace(job.mesh, dp=2, dp_rank=1)
    assert job.text_samples("valid") == ()


def test_a_task_without_text_refuses_the_key() -> None:
    with pytest.raises(UserError, match="training.text_samples=1: not with task=classification"):
        load(overrides=["task=classification", "training.text_samples=1"])


def test_translations_are_those_of_bleu_and_searched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = {language: [f"{language} {number} {'x ' * number}end" for number in range(5)] for language in ("de", "en")}
    for split in ("train", "valid"):
        for language, texts in lines.items():
            (tmp_path / f"{split}.{language}").write_text("".join(f"{text}\n" for text in texts))
    small = ["num_layers=1", "num_decoder_layers=1", "d_model=8", "num_heads=2", "d_feedforward=12", "max_length=16"]
    made = load(
        overrides=[
            "task=translation",
            f"data.source={tmp_path}",
            f"data.cache_dir={tmp_path / 'cache'}",
            "data.tokenizer=basic_english",
            "data.sequence_length=15",
            "training.eval_batch_size=2",
            "training.precision=fp64",
            "training.text_samples=3",
            *(f"model.{word}" for word in small),
        ]
    )
    data = translation_task.TranslationTask.prepare(made, PrepareContext())
    world = World()
    task = translation_task.TranslationTask(made, data, Replica(0, 1))
    job = Trainer(made, world, ParallelMesh.of(made, world), task, TrainState())
    searched: list[int] = []

    def counting(model: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        searched.append(len(sources))
        return translate(model, sources, *args, **kwargs)

    monkeypatch.setattr(predict, "translate", counting)
    samples = written(job)
    assert sum(searched) == 5
    assert [sample["source"] for sample in samples] == lines["de"][:3]
    assert [sample["reference"] for sample in samples] == lines["en"][:3]
    source, target = data.tokenizers["source"], data.tokenizers["target"]
    for sample in samples:
        best = translate(task.model, [source.encode(sample["source"])], 16, beam=4)[0][0]
        assert sample["translation"] == target.decode_line(best.tokens)
