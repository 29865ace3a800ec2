"""The average of the weights is its formula, and swapping it in and out changes no bit."""

import pytest
import torch
from torch import nn

from hvd_transformer.gradients.buffers import ZeroShard, make_grad_buffers
from hvd_transformer.gradients.weight_average import WeightAverage


@pytest.mark.parametrize("shard", [ZeroShard(0, 1), ZeroShard(1, 3)])
def test_it_is_the_formula_over_the_shard(shard: ZeroShard) -> None:
    torch.manual_seed(0)
    weights = {name: nn.Parameter(torch.randn(7, 5, dtype=torch.float64)) for name in "abc"}
    buffers = make_grad_buffers(weights, set(), 400, shard=shard)
    average = WeightAverage(buffers, 0.6)
    wanted = [torch.full_like(flat, torch.nan) for flat in average.beside]  # no weight of the first one
    for update, decay in enumerate([0, 1 / 10, 2 / 11, 3 / 12, *([None] * 20)]):
        decay = min(0.6, update / (update + 9)) if decay is None else decay
        for place, buffer in enumerate(buffers):
            buffer.own_parameters.copy_(torch.randn_like(buffer.own_parameters))
            before = torch.zeros_like(wanted[place]) if update == 0 else wanted[place]
            wanted[place] = decay * before + (1 - decay) * buffer.own_parameters
        average.update()
    torch.testing.assert_close(average.beside, wanted, rtol=1e-13, atol=1e-13)


def test_exchanged_twice_everything_is_as_before() -> None:
    weights = {"a": nn.Parameter(torch.randn(7, 5))}
    buffers = make_grad_buffers(weights, set(), 400)
    average = WeightAverage(buffers, 0.6)
    raw = torch.randn(35)
    buffers[0].own_parameters[:35] = raw
    averaged = average.beside[0].clone()
    average.exchange()
    assert torch.equal(weights["a"].data.flatten(), averaged[:35]) and torch.equal(average.beside[0][:35], raw)
    average.exchange()
    assert torch.equal(weights["a"].data.flatten(), raw) and torch.equal(average.beside[0], averaged)
