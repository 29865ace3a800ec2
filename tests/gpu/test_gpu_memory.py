"""Memory that runs out on a GPU: what is said, and which batch size fits."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import small_job
import torch

from hvd_transformer.comm.world import World
from hvd_transformer.config import Config
from hvd_transformer.monitoring.heartbeat import Heartbeat
from hvd_transformer.training.batch_size_search import by_trial, longest_micro_batches, search
from hvd_transformer.training.out_of_memory import OutOfMemory, explain_out_of_memory
from hvd_transformer.training.state import TrainState
from hvd_transformer.training.trainer import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

CARD = torch.device("cuda", 0)
SIZES = [2**power for power in range(17)]


@pytest.fixture
def little_memory() -> Iterator[int]:
    """256 MiB for this process, as its allocator counts them."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(CARD).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(CARD) + 2**28) / total, CARD)
    yield 2**28
    torch.cuda.set_per_process_memory_fraction(1.0, CARD)


def job(*words: str) -> Trainer:
    model = ("model.num_layers=2", "model.d_model=64", "model.d_feedforward=256", "model.max_length=128")
    more = ("data.sequence_length=128", "training.global_batch_size=65536", "optimizer.lr_scaling=none")
    config: Config = small_job.settings(*model, *more, *words)
    plain = small_job.trainer(config)
    plain.close()
    return Trainer(config, World(), replace(plain.mesh, devices=(CARD,)), plain.task, TrainState())


def test_trials_find_what_fits_and_leave_nothing(little_memory: int) -> None:
    made = job()
    fits = by_trial(made)
    assert fits(1)  # also allocates what cuBLAS works in, which stays
    before = torch.cuda.memory_allocated(CARD)
    found = search(World(), SIZES, fits, Heartbeat())
    assert 1 < found < SIZES[-1]
    assert torch.cuda.memory_allocated(CARD) <= before + 2**20
    assert fits(found) and not fits(2 * found)
    made.close()


def test_the_line_names_device_plan_and_keys(little_memory: int) -> None:
    made = job(f"training.batch_size={2**14}")
    heartbeat = Heartbeat()
    heartbeat.phase = "step"
    with (
        pytest.raises(OutOfMemory, match=r"out of memory in step 1.*cuda:0 has .* GiB.*weights .*=") as caught,
        explain_out_of_memory(made.config, made.mesh, made.task, World(), heartbeat),
    ):
        batches = longest_micro_batches(made.config, made.task, 2**14)
        made.engine.pipeline.forward_backward([batches], 1.0, lambda loss: None)
    assert caught.value.code == 2 and "\n" not in str(caught.value)
    made.close()
