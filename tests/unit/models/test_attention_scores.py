"""Attention with dropout in half precision, where products of queries and keys may overflow before they are scaled."""

from contextlib import nullcontext

import pytest
import torch

from hvd_transformer.config.schema import ModelConfig
from hvd_transformer.models.attention import SelfAttention


@pytest.mark.parametrize("autocast", [True, False])
def test_large_scores_fit_into_half_precision(autocast: bool) -> None:
    """Products of 102,400, above the largest half, 65,504; scaled they are 12,800, equal for all keys."""
    attention = SelfAttention(ModelConfig(d_model=64, num_heads=1, dropout=0.1)).train()
    heads = torch.full((1, 1, 5, 64), 40.0)
    with torch.autocast("cpu", torch.float16) if autocast else nullcontext():
        query = heads if autocast else heads.half()
        mixed = attention.mix(query, query, query, None) if autocast else None
        attention.dropout.rate = 0.0
        weights = attention._weights(query, query, None, None)
    assert mixed is None or mixed.isfinite().all()
    wanted = torch.ones(5, 5).tril() / torch.arange(1.0, 6.0)[:, None]
    torch.testing.assert_close(weights[0, 0].float(), wanted, rtol=2e-3, atol=0)
