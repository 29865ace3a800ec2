"""The "auto" partition: layers are measured once a configuration, and each stage must fit its device."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import small_job

from hvd_transformer.config import Config
from hvd_transformer.errors import UserError
from hvd_transformer.planning import partition
from hvd_transformer.planning.layer_profile import LayerProfile
from hvd_transformer.planning.partition import best_partition
from hvd_transformer.planning.pass_memory import PASS_MODES, PassMemory
from hvd_transformer.planning.profile_cache import to_json

pytestmark = pytest.mark.usefixtures("one_thread")

MIB = 2**20


def layer(seconds: float = 1, held: int = 8, again: int = 0, weights: int = 8) -> LayerProfile:
    """It holds so many bytes for a micro-batch, and while it is computed again so many more."""
    whole, shed = PassMemory(0, held + again, held + again, held + again, 0), PassMemory(0, held, held, held + again, 0)
    return LayerProfile(seconds, weights, {mode: shed if mode.recompute else whole for mode in PASS_MODES})


class Measuring:
    """In place of the clock: the layers' seconds, and how often they were asked for."""

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


def cut(config: Config) -> list[int]:
    return [len(stage.layers) for stage in small_job.trainer(config).engine.stages]


def test_a_configuration_is_measured_once(
    tmp_path: Path, measuring: Measuring, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hvd_transformer")
    assert cut(config(tmp_path)) == [5, 1]
    measuring.seconds = [5, 1, 1, 1, 1, 1]
    assert cut(config(tmp_path)) == [5, 1]
    # These change no layer's cost.
    assert cut(config(tmp_path, "optimizer.lr=0.1", "training.max_steps=3", "seed=7")) == [5, 1]
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
    assert cut(config(tmp_path)) == [5, 1]
    measuring.seconds = [5, 1, 1, 1, 1, 1]
    assert cut(config(tmp_path, word)) == [1, 5]
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
    cut(config(tmp_path))
    (file,) = (tmp_path / "layers").iterdir()
    whole = file.read_text(encoding="utf-8")
    file.write_text(text, encoding="utf-8")
    assert cut(config(tmp_path)) == [5, 1]
    assert measuring.calls == 2
    assert file.read_text(encoding="utf-8") == whole


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, measuring: Measuring) -> None:
    (tmp_path / "layers").write_text("no folder", encoding="utf-8")
    assert cut(config(tmp_path)) == cut(config(tmp_path)) == [5, 1]
    assert measuring.calls == 2


def costs(*held: int, weights: int = 0, again: int = 0) -> list[LayerProfile]:
    """Layers of one second each, that hold so many MiB for a micro-batch."""
    return [layer(1.0, size * MIB, again * MIB, weights * MIB) for size in held]


def fitting(
    config: Config, costs: Sequence[LayerProfile], mib: float, num_micro_batches: int = 4, dp: int = 1
) -> list[int]:
    """On devices of which so much is left for the stages."""
    return best_partition(config, costs, num_micro_batches, round(mib * MIB / (1 - partition._RESERVE)) + 1, dp)


def test_memory_is_a_limit(tmp_path: Path) -> None:
    f1b, gpipe = config(tmp_path), config(tmp_path, "parallel.schedule=gpipe")
    even = costs(2, 2, 2, 2, 2, 2)
    assert best_partition(f1b, even, 4, None, 1) == [3, 3]
    # 1F1B: the first stage holds two micro-batches, the last one.
    assert fitting(f1b, even, 12) == [3, 3]
    assert fitting(f1b, even, 11) == [2, 4]
    with pytest.raises(
        UserError, match=r"parallel\.partition=auto: no partition into 2 stages fits .* at least 8,388,608 bytes"
    ):
        fitting(f1b, even, 7)
    # GPipe: both hold all four.
    assert fitting(gpipe, even, 24) == [3, 3]
    with pytest.raises(UserError, match="at least 25,165,824 bytes"):
        fitting(gpipe, even, 23)


def test_weights_gradients_and_optimizer_state_count(tmp_path: Path) -> None:
    heavy_first = [*costs(0, weights=10), *costs(0, 0, 0, 0, 0, weights=1)]
    for words, copies in ((["optimizer.name=adamw"], 4), (["optimizer.name=sgd"], 2)):
        settings = config(tmp_path, *words)
        assert fitting(settings, heavy_first, copies * 12) == [3, 3]
        assert fitting(settings, heavy_first, copies * 12 - 1) == [2, 4]


def test_replicas_that_share_the_optimizer_need_less_each(tmp_path: Path) -> None:
    heavy_first = [*costs(0, weights=10), *costs(0, 0, 0, 0, 0, weights=1)]
    for shard, copies in (("none", 4), ("state", 2 + 2 / 4), ("gradients", 1 + 3 / 4)):  # AdamW on 4 replicas
        settings = config(tmp_path, "optimizer.name=adamw", f"parallel.optimizer_shard={shard}")
        assert fitting(settings, heavy_first, copies * 12, dp=4) == [3, 3]
        assert fitting(settings, heavy_first, copies * 12 - 1, dp=4) == [2, 4]


def test_what_is_computed_again_counts_once_or_for_the_micro_batch_that_keeps_it(tmp_path: Path) -> None:
    again = costs(1, 1, 1, 1, 1, 1, again=3)
    always, except_last = (config(tmp_path, f"parallel.recompute={kind}") for kind in ("always", "except_last"))
    assert fitting(always, again, 2 * 3 + 3) == [3, 3]
    assert fitting(always, again, 2 * 3 + 2) == [2, 4]
    # The first stage holds the last micro-batch as a whole while it computes the one before again.
    assert fitting(except_last, again, 2 * 3 + 3 * 3 + 3) == [3, 3]
    assert fitting(except_last, again, 2 * 3 + 3 * 3 + 2) == [2, 4]
    with pytest.raises(UserError, match="no partition into 2 stages fits"):
        fitting(except_last, again, 4 * (1 + 3) - 1)


def test_the_users_function_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "counting_stages.py").write_text(
        "names = []\ndef of(name):\n    names.append(name)\n    return int(name == 'head')\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    settings = config(tmp_path, "parallel.partition=counting_stages:of")
    partition.check_partition(settings)
    assert cut(settings) == [5, 1]
    import counting_stages

    assert counting_stages.names == ["embedding", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]
