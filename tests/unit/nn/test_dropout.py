"""Dropout against its definition: which values it keeps, by what it scales them, and when it draws anew."""

import math

import pytest
import torch
from torch import Tensor

from hvd_transformer.nn.dropout import Dropout, dropout_key, number_dropouts


def drop(module: Dropout, values: Tensor, *place: int) -> Tensor:
    with dropout_key(*place):
        result: Tensor = module(values)
    return result


@pytest.mark.parametrize("rate", [0.1, 0.25, 0.5, 0.9])
def test_kept_values_are_scaled_so_that_the_mean_stays(rate: float) -> None:
    count = 200_000
    dropped = drop(Dropout(rate), torch.full((count,), 3.0, dtype=torch.float64), 1)
    kept = dropped[dropped != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 3 / (1 - rate)), rtol=1e-4, atol=0)  # 65,536ths
    deviation = math.sqrt(count * rate * (1 - rate))
    assert abs(len(kept) - count * (1 - rate)) < 5 * deviation
    # The dropped share is rounded to 65,536ths, and the scale is exactly that share's.
    assert float(kept[0]) == 3 * (2**16 / (2**16 - round(rate * 2**16)))


def test_gradients_pass_where_values_were_kept() -> None:
    values = torch.randn(1000, dtype=torch.float64, requires_grad=True)
    dropped = drop(Dropout(0.5), values, 1)
    dropped.sum().backward()
    assert values.grad is not None
    torch.testing.assert_close(values.grad, dropped.detach() / values.detach())


def test_a_draw_depends_on_the_place_the_layer_and_the_piece_and_on_nothing_else() -> None:
    values = torch.ones(64, 64)
    first, second = Dropout(0.5), Dropout(0.5)
    number_dropouts(torch.nn.Sequential(first, second))
    piece = Dropout(0.5, sharded=True)
    piece.shard_index = 1
    draws = [
        drop(first, values, 1, 2),
        drop(first, values, 1, 3),
        drop(second, values, 1, 2),
        drop(piece, values, 1, 2),
    ]
    torch.manual_seed(5)
    assert torch.equal(draws[0], drop(first, values, 1, 2))
    for number, draw in enumerate(draws):
        for other in draws[:number]:
            assert 0.4 < float((draw == other).double().mean()) < 0.6  # independent: half of the places agree


def test_evaluation_and_rate_zero_keep_every_value() -> None:
    values = torch.randn(100)
    assert drop(Dropout(0.5).eval(), values, 1) is values
    assert drop(Dropout(0.0), values, 1) is values
