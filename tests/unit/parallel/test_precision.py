"""The formats of weights and products, and the factor that keeps float16 gradients off zero."""

import pytest
import torch

from hvd_transformer.parallel.precision import LossScaler, autocast, weight_dtype

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("precision", "weights", "products"),
    [
        ("fp32", torch.float32, torch.float32),
        ("bf16", torch.float32, torch.bfloat16),
        ("fp16", torch.float32, torch.float16),
        ("fp64", torch.float64, torch.float64),
    ],
)
def test_weights_are_never_below_float32_and_products_are_as_asked(
    precision: str, weights: torch.dtype, products: torch.dtype
) -> None:
    assert weight_dtype(precision) == weights
    matrix = torch.ones(2, 2, dtype=weights)
    with autocast(precision, CPU):
        assert (matrix @ matrix).dtype == products
    assert (matrix @ matrix).dtype == weights


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_only_float16_is_scaled(precision: str) -> None:
    scaler = LossScaler(precision, patience=1)
    for _ in range(5):
        scaler.good()
    scaler.load({"scale": 64.0, "good_steps": 0})
    assert scaler.scale == 1.0


def test_the_factor_is_halved_by_an_overflow_and_doubled_by_patience() -> None:
    scaler = LossScaler("fp16", patience=3)
    assert scaler.scale == 65536
    scaler.overflowed()
    assert scaler.scale == 32768
    for expected in (32768, 32768, 65536, 65536, 65536, 131072):
        scaler.good()
        assert scaler.scale == expected
    scaler.good()
    scaler.good()
    scaler.overflowed()  # patience begins again
    for expected in (65536, 65536, 131072):
        scaler.good()
        assert scaler.scale == expected


def test_the_factor_never_falls_below_one() -> None:
    scaler = LossScaler("fp16")
    for _ in range(40):
        scaler.overflowed()
    assert scaler.scale == 1.0


def test_its_state_goes_on_elsewhere() -> None:
    first, second = LossScaler("fp16", patience=3), LossScaler("fp16", patience=3)
    first.overflowed()
    first.good()
    first.good()
    second.load(first.state())
    for scaler in (first, second):
        scaler.good()
    assert first.scale == second.scale == 65536
