"""What `bench checkpoint` writes, and leaves behind: nothing."""

from pathlib import Path

import pytest
from test_synthetic_task import SMALL, V

from hvd_transformer.bench.checkpoint import CheckpointResult, bench_checkpoint
from hvd_transformer.comm.world import World
from hvd_transformer.config import load
from hvd_transformer.errors import UserError
from hvd_transformer.monitoring.heartbeat import Heartbeat
from hvd_transformer.training.process import StopRequest


def measured(folder: Path, stop: StopRequest) -> CheckpointResult:
    return bench_checkpoint(load(overrides=SMALL), V, folder, 0.01, World(), stop, Heartbeat())


@pytest.fixture
def stop():
    made = StopRequest()
    yield made
    made.restore()


def test_weights_and_optimizer_state_are_saved_and_loaded(tmp_path: Path, stop: StopRequest, one_thread: None) -> None:
    found = measured(tmp_path, stop)
    tensors = 3 * 4 * found.num_parameters  # weights and both moments of AdamW, float32
    assert tensors < found.num_bytes < tensors + 30_000
    assert 0 < found.stall < found.save and found.load > 0 and found.repeats >= 2
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path, stop: StopRequest, one_thread: None) -> None:
    with pytest.raises(UserError, match=r"--folder .*absent: cannot be written: No such file or directory"):
        measured(tmp_path / "absent", stop)


def test_a_signal_ends_it_and_nothing_is_left(tmp_path: Path, stop: StopRequest, one_thread: None) -> None:
    stop.signal = "SIGTERM"
    with pytest.raises(UserError, match="bench checkpoint: stopped by SIGTERM"):
        measured(tmp_path, stop)
    assert list(tmp_path.iterdir()) == []
