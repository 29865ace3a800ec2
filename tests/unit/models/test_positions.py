"""Rotations for longer texts: the rates of transformers, and of the closed forms at their ends."""

import math

import pytest
import torch

from hvd_transformer.models.positions import RotaryPositions, rotary_rates

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
SCALINGS = [
    {"rope_type": "linear", "factor": 3.0},
    LLAMA3,
    YARN,
    {**YARN, "beta_fast": 8.0, "attention_factor": 1.5},
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
def test_rates_are_those_of_transformers(scaling: dict) -> None:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        rope_parameters={**scaling, "rope_theta": 5000.0},
    )
    wanted, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
    rates, own = rotary_rates(64, 5000.0, scaling)
    torch.testing.assert_close(rates, wanted.double(), rtol=1e-6, atol=0)
    assert own == pytest.approx(factor)


def test_llama3_keeps_short_wavelengths_and_stretches_long_ones() -> None:
    plain, _ = rotary_rates(64, 5000.0, None)
    rates, factor = rotary_rates(64, 5000.0, LLAMA3)
    turns = 256 * plain / (2 * math.pi)
    assert factor == 1.0 and torch.equal(rates[turns >= 4], plain[turns >= 4])
    assert torch.equal(rates[turns <= 1], plain[turns <= 1] / 8)
    assert ((turns > 1) & (turns < 4)).any()


def test_a_text_that_grows_by_tokens_makes_few_tables() -> None:
    rotary, whole, tables = RotaryPositions(8, 500.0), RotaryPositions(8, 500.0), set()
    heads = torch.randn(1, 1, 300, 8)
    wanted, _ = whole(heads, heads)
    for place in range(300):
        found, _ = rotary(heads[:, :, place : place + 1], heads[:, :, place : place + 1], place)
        assert torch.equal(found, wanted[:, :, place : place + 1])
        tables.add(rotary.table.size(1))
    assert len(tables) <= 10


def test_numbers_of_another_dtype_need_no_longer_table() -> None:
    """As training in bfloat16 and text samples in float32 take turns."""
    rotary, heads = RotaryPositions(8, 500.0), torch.randn(1, 1, 30, 8)
    for _ in range(5):
        for dtype in (torch.bfloat16, torch.float32):
            found, _ = rotary(heads.to(dtype), heads.to(dtype))
            assert found.dtype == rotary.table.dtype == dtype
            assert rotary.table.size(1) == 30


def test_a_product_depends_on_the_distance_alone() -> None:
    torch.manual_seed(1)
    rotary = RotaryPositions(16, 500.0, YARN)
    query, key = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)

    def product(first: int, second: int) -> float:
        return float((rotary(query, query, first)[0] * rotary(key, key, second)[0]).sum())

    assert product(3, 10) == pytest.approx(product(103, 110), rel=1e-12)
    assert product(3, 10) != pytest.approx(product(3, 11), rel=1e-3)
