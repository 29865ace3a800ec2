"""The pipeline on one GPU: gradients as without one, and no memory that grows."""

import pytest
import torch
from torch import nn

from hvd_transformer.nn.contracts import Layer, MicroBatch
from hvd_transformer.parallel.pipeline import Pipeline, Stage
from hvd_transformer.parallel.pipeline_schedule import SCHEDULES

pytestmark = pytest.mark.gpu


class Loss(nn.Module):
    def forward(self, values: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return ((values - targets) ** 2).sum()


def made(num_stages: int, schedule: str) -> tuple[list[nn.Module], Pipeline]:
    torch.manual_seed(0)
    device = torch.device("cuda", 0)
    modules = [*(nn.Sequential(nn.Linear(64, 64), nn.GELU()).to(device) for _ in range(7)), Loss()]
    layers = [Layer(f"layer{number}", module, module) for number, module in enumerate(modules)]
    size = len(layers) // num_stages
    stages = [Stage(layers[start : start + size], device) for start in range(0, len(layers), size)]
    return modules, Pipeline(stages, schedule=schedule)


def micro_batches() -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(1)
    return [MicroBatch(*((torch.randn(5, 64, generator=generator),) for _ in range(2))) for _ in range(8)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_stages", [2, 4])
def test_gradients_are_those_of_one_stage_and_memory_stays(num_stages: int, schedule: str) -> None:
    plain, one = made(1, schedule)
    piped, several = made(num_stages, schedule)
    one.forward_backward([micro_batches()], 1.0, [].append)
    several.forward_backward([micro_batches()], 1.0, [].append)
    torch.cuda.synchronize()
    for own, wanted in zip(piped[:-1], plain[:-1], strict=True):
        for weight, other in zip(own.parameters(), wanted.parameters(), strict=True):
            torch.testing.assert_close(weight.grad, other.grad, rtol=1e-4, atol=1e-5)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(200):
        several.forward_backward([micro_batches()], 1.0, [].append)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 2**20
    several.close()
