"""What `bench data` prepares and counts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_synthetic_task import SMALL

from hvd_transformer.bench.data import _checked, _empty_cache, bench_data
from hvd_transformer.comm.world import World
from hvd_transformer.config import load
from hvd_transformer.data.sampler import Replica, StepSampler
from hvd_transformer.errors import UserError
from hvd_transformer.monitoring.heartbeat import Heartbeat
from hvd_transformer.training.process import StopRequest


@pytest.fixture
def stop():
    made = StopRequest()
    yield made
    made.restore()


def test_all_tokens_are_prepared_anew_each_time(tmp_path: Path, stop: StopRequest) -> None:
    (tmp_path / "text.txt").write_text("a line of text\n" * 300)
    words = ["data.source=text.txt", "data.tokenizer=char", "data.workers=1"]
    words = [*SMALL, *words[1:], f"data.source={tmp_path / 'text.txt'}", f"data.cache_dir={tmp_path / 'cache'}"]
    config = load(overrides=words)
    for _ in range(2):
        found = bench_data(config, 0.01, World(), stop, Heartbeat())
        assert found.num_tokens == 15 * 300
        assert found.prepare_seconds > 0 and found.workers == 1
        assert found.targets == pytest.approx(found.batches * 6 * 12, rel=0.01) and found.unit == "tokens"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["prepared"]


def test_too_little_data(tmp_path: Path, stop: StopRequest) -> None:
    (tmp_path / "text.txt").write_text("ab\n" * 100)
    words = [f"data.source={tmp_path / 'text.txt'}", f"data.cache_dir={tmp_path / 'cache'}", "data.tokenizer=char"]
    with pytest.raises(UserError, match=r"data.source=.*: the training split has .* needs 513"):
        bench_data(load(overrides=[*SMALL, *words, "data.sequence_length=512"]), 0.01, World(), stop, Heartbeat())


def test_a_task_without_steps_is_refused() -> None:
    """It would never give a batch."""
    task: Any = SimpleNamespace(sampler=StepSampler(0, 1, 1, Replica()), config=load())
    with pytest.raises(UserError, match="data.source=python-docs: the training split is too small for one step"):
        _checked(task)


@pytest.mark.parametrize("name", ["not/yet/there", "file"])
def test_the_cache_s_folder_is_made_or_named(name: str, tmp_path: Path) -> None:
    """A task of one's own may make nothing in it before."""
    (tmp_path / "file").touch()
    config = load(overrides=[f"data.cache_dir={tmp_path / name}"])
    if name == "file":
        with (
            pytest.raises(UserError, match=r"^data.cache_dir=.*/file: cannot be written: "),
            _empty_cache(config, World()),
        ):
            pass
    else:
        with _empty_cache(config, World()) as made:
            assert Path(made.data.cache_dir).is_dir()
        assert list((tmp_path / name).iterdir()) == []
