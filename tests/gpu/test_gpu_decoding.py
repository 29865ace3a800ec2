"""Texts of a model whose stages are on a GPU and the CPU, and on two GPUs: those of one device."""

from dataclasses import replace

import pytest
import small_job
import torch

from hvd_transformer.comm.world import World
from hvd_transformer.training.state import TrainState
from hvd_transformer.training.trainer import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

CARD, CPU = torch.device("cuda", 0), torch.device("cpu")


def texts(*devices: torch.device, evaluates: bool = False) -> list[dict[str, str]]:
    words = ("training.text_samples=3", "data.sequence_length=12", "model.num_layers=3", "training.precision=fp64")
    words += (f"parallel.pipeline={len(devices)}", "parallel.partition=uniform")
    plain = small_job.trainer(small_job.settings(*words))
    plain.close()
    job = Trainer(plain.config, World(), replace(plain.mesh, devices=devices), plain.task, TrainState())
    if evaluates:
        job.evaluate("valid")
    job.task.model.eval()
    found = [dict(sample) for sample in job.text_samples("valid")]
    job.close()
    return found


@pytest.mark.parametrize("devices", [(CARD,), (CARD, CPU), (CPU, CARD), (CARD, CARD)])
def test_texts_are_those_of_the_cpu(devices: tuple[torch.device, ...]) -> None:
    assert texts(*devices) == texts(CPU)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_texts_on_two_gpus_are_those_of_the_cpu() -> None:
    assert texts(CARD, torch.device("cuda", 1), evaluates=True) == texts(CPU)
