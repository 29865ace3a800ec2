"""A metric is a sum over everything divided once, whatever the batches and the ranks."""

import math

import pytest
import torch
from fake_world import FakeWorld
from torch import Tensor, nn

from hvd_transformer.comm.world import World
from hvd_transformer.tasks.metrics import Evaluation, evaluate, perplexity


def total(batch: Tensor) -> tuple[Tensor, int]:
    return batch.sum(), batch.numel()


@pytest.mark.parametrize("sizes", [[7], [1, 6], [3, 3, 1], [1] * 7])
def test_the_mean_is_over_tokens_not_over_batches(sizes: list[int]) -> None:
    values = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0])
    result = evaluate(map(total, values.split(sizes)), World())
    assert result == Evaluation([127.0], 7)
    assert result.loss == 127 / 7


def test_ranks_are_summed_before_the_division() -> None:
    class OtherRank(FakeWorld):
        """Has one more batch, of two tokens with loss 10 each."""

        def all_reduce_async_(self, tensor: Tensor, name: str, operation: str = "sum") -> object:
            assert operation == "sum" and tensor.dtype == torch.float64
            return lambda: tensor.add_(torch.tensor([20.0, 2.0], dtype=torch.float64))

    result = evaluate([total(torch.ones(8))], OtherRank())
    assert result == Evaluation([28.0], 10)


def test_sums_are_double_precision() -> None:
    """A float32 sum of 2^24 and ones stays at 2^24."""
    batches = [torch.tensor([2.0**24]), *[torch.ones(1)] * 100]
    assert evaluate(map(total, batches), World()).loss == (2**24 + 100) / 101


def test_no_graph_is_kept() -> None:
    weight = nn.Parameter(torch.ones(3))

    def loss(batch: Tensor) -> tuple[Tensor, int]:
        product = weight * batch
        assert not product.requires_grad
        return product.sum(), 3

    assert evaluate(map(loss, [torch.ones(3)]), World()).loss == 1.0


def test_a_rank_without_a_batch_has_part_in_all_sums() -> None:
    assert evaluate([], FakeWorld(), num_sums=3) == Evaluation([0.0, 0.0, 0.0], 0)


def test_perplexity_is_the_exponential_and_infinite_beyond_a_float() -> None:
    assert perplexity(0.0) == 1.0
    assert Evaluation([2 * math.log(50)], 2).perplexity == pytest.approx(50)
    assert perplexity(708.9) < math.inf
    assert perplexity(1e6) == math.inf
    assert not perplexity(math.nan) < math.inf
