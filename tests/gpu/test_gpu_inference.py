"""Trained models used on a GPU: the texts, translations and losses of the CPU."""

import json
from pathlib import Path

import gpu_jobs
import pytest
import torch
from commands import output
from jobs import SIZE, tiny, write_corpus

from hvd_transformer.inference.generation import Sampling, generate
from hvd_transformer.inference.trained_model import load_trained

pytestmark = pytest.mark.gpu

WORDS = ["training.max_steps=60", "training.epochs=100", "optimizer.lr=0.02", "training.batch_size=16"]


@pytest.fixture(scope="module")
def language_model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lm")
    corpus = write_corpus(folder / "text", train=3000)
    return gpu_jobs.train(folder / "run", *tiny(corpus), *WORDS, "model.max_length=64", "training.text_samples=2")


@pytest.fixture(scope="module")
def translator(tmp_path_factory) -> Path:
    """Learns to repeat a sentence in capitals."""
    folder = tmp_path_factory.mktemp("pairs")
    for split, lines in {"train": 300, "valid": 20, "test": 20}.items():
        texts = [" ".join("abcdefgh"[(number * step) % 8] for step in range(1, 5)) for number in range(lines)]
        (folder / f"{split}.en").write_text("\n".join(texts) + "\n")
        (folder / f"{split}.de").write_text("\n".join(texts).upper() + "\n")
    settings = [
        "task=translation",
        f"data.source={folder}",
        "data.tokenizer=bpe",
        "data.vocab_size=280",
        "model.share_embeddings=true",
        f"data.cache_dir={folder / 'cache'}",
        "data.workers=1",
        *(f"model.{key}={value}" for key, value in SIZE.items()),
        *WORDS,
        "training.best_metric=bleu",
    ]
    return gpu_jobs.train(folder / "run", *settings)


def test_greedy_texts_are_the_cpus(language_model):
    texts = {}
    for device in ("cpu", "cuda"):
        trained = load_trained(language_model, "language_model", device)
        prompts = [trained.tokenizers["text"].encode(text).tolist() for text in ("the cat ", "my big red rug.\n")]
        texts[device] = generate(trained.model, prompts, 30, Sampling(temperature=0), trained.num_positions)
    assert texts["cuda"] == texts["cpu"]
    assert len(texts["cpu"][0]) == 30


def test_evaluations_are_the_cpus(language_model):
    found = [
        json.loads(output("hvd-transformer", "evaluate", "--json", language_model, f"training.device={device}"))
        for device in ("cpu", "cuda")
    ]
    assert found[1]["metrics"]["loss"] == pytest.approx(found[0]["metrics"]["loss"], rel=1e-5)


def test_translations_are_the_cpus(translator, tmp_path):
    lines = tmp_path / "lines"
    lines.write_text("a c e g\nb d f h\n")
    found = [
        output("hvd-transformer", "translate", translator, "--file", lines, "--beam", 4, "--device", device)
        for device in ("cpu", "cuda")
    ]
    assert found[1] == found[0]
    assert "valid_bleu" in gpu_jobs.evaluations(translator)[-1]


def test_a_gpu_is_found(language_model):
    assert torch.cuda.is_available()
    assert "NVIDIA" in (language_model / "logs" / "rank-000.log").read_text()
