"""The host queues whole steps and waits for none of them: the GPU always has the next one."""

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
import small_job
import torch

from hvd_transformer.comm.world import World
from hvd_transformer.training.state import TrainState
from hvd_transformer.training.trainer import Trainer

pytestmark = pytest.mark.gpu

CARD = torch.device("cuda", 0)
NAP = 2_000_000_000  # clock cycles, about a second
WARM_UP = 4  # loads kernels, for which CUDA may wait until all streams are idle, and fills the allocators


def job_on(card: torch.device, *words: str) -> Trainer:
    plain = small_job.trainer(small_job.settings(*words))
    plain.close()
    mesh = replace(plain.mesh, devices=(card,) * len(plain.mesh.devices))
    return Trainer(plain.config, World(), mesh, plain.task, TrainState())


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["training.precision=bf16", "model.dropout=0.2", "training.accumulation=2"],
        ["training.precision=bf16", "parallel.pipeline=2", "parallel.partition=uniform", "parallel.micro_batches=2"],
    ],
    ids=" ".join,
)
def test_two_steps_are_queued_before_the_first_has_ended(words: Sequence[str]) -> None:
    job = job_on(CARD, *words)
    assert job.reads_late
    plans = job.steps()
    for _ in range(WARM_UP // 2):  # as below: later two results and three steps' batches have pinned memory
        for step in [job.queue(next(plans)) for _ in range(2)]:
            step.result()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        began = time.perf_counter()
        torch.cuda._sleep(NAP)  # what the GPU still has to do
        steps = [job.queue(next(plans)) for _ in range(2)]
        queued = time.perf_counter() - began
        results = [step.result() for step in steps]
        ended = time.perf_counter() - began
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert queued < ended / 2
    assert [result.step for result in results] == [WARM_UP + 1, WARM_UP + 2]
    job.close()
