"""The norm of all gradients, whose parts the stages of a pipeline may have on several GPUs."""

import pytest
import torch
from device_tags import DEVICES, SeveralDevices

from hvd_transformer.comm.world import World
from hvd_transformer.gradients.optimizer import GradNorm


@pytest.mark.parametrize("devices", [DEVICES[:1], DEVICES])
def test_one_copy_from_each_device_makes_the_norm_of_all(devices: tuple[torch.device, ...]) -> None:
    values = torch.rand(20, dtype=torch.float64).tolist()
    with SeveralDevices() as tags:
        norm = GradNorm(dict.fromkeys(map(str, range(21)), True), torch.float64, DEVICES[0], World())
        # As from reductions on them; the norm of a weight without a gradient is not there.
        own = {
            str(number): torch.tensor([value, 0.0], dtype=torch.float64).to(devices[number % len(devices)]).sum()
            for number, value in enumerate(values)
        }
        before = tags.moves
        found = norm(own)
        assert tags.moves - before <= len(devices) - 1
    wanted = torch.linalg.vector_norm(torch.tensor([*values, 0.0], dtype=torch.float64))
    assert torch.equal(found, wanted)
