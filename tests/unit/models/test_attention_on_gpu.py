"""Which kernels attention takes on a GPU; what they compute is in tests/gpu."""

import pytest
import torch
from fake_gpu import GPU, operators_called

from hvd_transformer.config.schema import ModelConfig
from hvd_transformer.models.attention import SelfAttention
from hvd_transformer.nn import seeded_attention
from hvd_transformer.nn.dropout import dropout_key
from hvd_transformer.nn.dry_run import assume_gpu


def layer(**values: int | float) -> SelfAttention:
    return SelfAttention(ModelConfig(d_model=64, num_heads=8, **values))


@pytest.mark.parametrize(("rate", "trains", "seeded"), [(0.1, True, True), (0.1, False, False), (0.0, True, False)])
def test_a_dropout_mask_is_made_inside_the_kernel(
    rate: float, trains: bool, seeded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend, causal = seeded_attention.attend, list[bool]()

    def recorded(*words):
        causal.append(words[4])
        return attend(*words)

    monkeypatch.setattr(seeded_attention, "attend", recorded)
    attention = layer(dropout=rate).train(trains)
    with assume_gpu(), dropout_key(1, 2):
        attention(torch.randn(2, 5, 64))
    assert causal == [True] * seeded


@pytest.mark.parametrize("trains", [True, False])
def test_a_head_of_keys_is_read_by_its_queries_where_the_kernel_can(
    trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a copy for each head of queries."""
    capability = (8, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = list[tuple[int, bool]]()

    def recorded(query, key, value, **options):
        found.append((key.size(1), options["enable_gqa"]))
        return query

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
    attention = layer(num_kv_heads=2).train(trains)
    monkeypatch.setattr(attention.output, "forward", lambda mixed, residual: mixed)

    def heads_of_keys(dtype: torch.dtype) -> tuple[int, bool]:
        with operators_called():
            query, key = (torch.empty(2, heads, 5, 8, dtype=dtype, device=GPU) for heads in (8, 2))
            attention.mix(query, key, key, None)
        return found.pop()

    assert heads_of_keys(torch.bfloat16) == (2, True)
    assert heads_of_keys(torch.float32) == (8, False)
    capability = (7, 5)  # for whose queries torch would form the weights
    assert heads_of_keys(torch.float16) == (8, False)
