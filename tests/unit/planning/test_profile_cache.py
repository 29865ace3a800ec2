"""Layers are measured once per configuration: another one, or a damaged file, is measured again."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import small_job

from hvd_transformer.config import Config
from hvd_transformer.planning import partition
from hvd_transformer.planning.layer_profile import LayerProfile
from hvd_transformer.planning.pass_memory import PASS_MODES, PassMemory
from hvd_transformer.planning.profile_cache import to_json

pytestmark = pytest.mark.usefixtures("one_thread")


def layer(seconds: float = 1) -> LayerProfile:
    return LayerProfile(seconds, 8, {mode: PassMemory(0, 8, 8, 8, 0) for mode in PASS_MODES})


class Measuring:
    """Replaces `measure_layers`: given seconds per layer, and a count of calls."""

    def __init__(self) -> None:
        self.seconds: Sequence[float] = [1, 1, 1, 1, 1, 5]
        self.calls = 0

    def __call__(self, layers: Sequence[object], *_: object, **__: object) -> list[LayerProfile]:
        self.calls += 1
        assert len(layers) == len(self.seconds)
        return [layer(seconds) for seconds in self.seconds]


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> Measuring:
    result = Measuring()
    monkeypatch.setattr(partition, "measure_layers", result)
    return result


def config(cache: Path, *words: str) -> Config:
    common = [f"data.cache_dir={cache}", "model.num_layers=4", "parallel.pipeline=2", "parallel.micro_batches=2"]
    return small_job.settings(*common, *words)


def chosen(config: Config) -> list[int]:
    return [len(stage.layers) for stage in small_job.trainer(config).engine.stages]


def test_a_configuration_is_measured_once(
    tmp_path: Path, measuring: Measuring, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hvd_transformer")
    assert chosen(config(tmp_path)) == [5, 1]
    measuring.seconds = [5, 1, 1, 1, 1, 1]
    assert chosen(config(tmp_path)) == [5, 1]
    # These change no layer's cost.
    assert chosen(config(tmp_path, "optimizer.lr=0.1", "training.max_steps=3", "seed=7")) == [5, 1]
    assert measuring.calls == 1
    assert caplog.messages == [
        "partition [5, 1]: all layers take 10000.0 ms per micro-batch, measured now",
        *["partition [5, 1]: all layers take 10000.0 ms per micro-batch, cached"] * 2,
    ]


@pytest.mark.parametrize(
    "word",
    [
        "model.d_feedforward=16",
        "model.dropout=0.1",
        "data.sequence_length=6",
        "parallel.micro_batches=4",
        "parallel.recompute=always",
        "training.precision=bf16",
    ],
)
def test_another_configuration_is_measured_anew(tmp_path: Path, measuring: Measuring, word: str) -> None:
    assert chosen(config(tmp_path)) == [5, 1]
    measuring.seconds = [5, 1, 1, 1, 1, 1]
    assert chosen(config(tmp_path, word)) == [1, 5]
    assert measuring.calls == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "[]",
        "[1, 2, 3, 4, 5, 6]",
        json.dumps([{"seconds": 1}] * 6),
        json.dumps([to_json(layer())] * 5),
        json.dumps([to_json(layer(seconds=float("nan")))] * 6),
        json.dumps([to_json(layer(seconds="1"))] * 6),
        json.dumps([{**to_json(layer()), "passes": [{}]}] * 6),
    ],
)
def test_a_broken_file_is_measured_again(tmp_path: Path, measuring: Measuring, text: str) -> None:
    chosen(config(tmp_path))
    (file,) = (tmp_path / "layers").iterdir()
    whole = file.read_text(encoding="utf-8")
    file.write_text(text, encoding="utf-8")
    assert chosen(config(tmp_path)) == [5, 1]
    assert measuring.calls == 2
    assert file.read_text(encoding="utf-8") == whole


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, measuring: Measuring) -> None:
    (tmp_path / "layers").write_text("no folder", encoding="utf-8")
    assert chosen(config(tmp_path)) == chosen(config(tmp_path)) == [5, 1]
    assert measuring.calls == 2
