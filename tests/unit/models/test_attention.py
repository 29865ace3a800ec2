"""Positions against their closed forms: sines, a table, and turns of complex numbers."""

import cmath
import math

import pytest
import torch
from torch import Tensor

from hvd_transformer.models.positions import LearnedPositions, RotaryPositions, SinusoidalPositions, sinusoidal_table


def test_sinusoids_are_those_of_the_paper() -> None:
    table = sinusoidal_table(50, 10, torch.float64, torch.device("cpu"))
    for position in range(50):
        for pair in range(5):
            angle = position / 10000 ** (2 * pair / 10)
            assert table[position, 2 * pair].item() == pytest.approx(math.sin(angle), abs=1e-13)
            assert table[position, 2 * pair + 1].item() == pytest.approx(math.cos(angle), abs=1e-13)


def test_sinusoids_far_out_are_exact_in_float32() -> None:
    """Angles of thousands of radians, rounded only at the end."""
    table = sinusoidal_table(5000, 4, torch.float32, torch.device("cpu"))
    assert table.dtype == torch.float32
    assert table[4999, 0].item() == pytest.approx(math.sin(4999.0), abs=1e-7)
    assert table[4999, 1].item() == pytest.approx(math.cos(4999.0), abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sinusoidal_positions_are_added_in_the_inputs_format(dtype: torch.dtype) -> None:
    positions = SinusoidalPositions(8, 6)
    positions(torch.zeros(1, 8, 6))  # a first use in another format
    hidden = torch.randn(2, 5, 6, dtype=dtype)
    added = positions(hidden) - hidden
    assert added.dtype == dtype
    expected = sinusoidal_table(8, 6, dtype, hidden.device)[:5]
    torch.testing.assert_close(added, expected.expand(2, 5, 6), rtol=1e-5, atol=1e-6)


def test_learned_positions_add_their_row() -> None:
    positions = LearnedPositions(8, 6, 1.0)
    hidden = torch.randn(2, 5, 6)
    torch.testing.assert_close(positions(hidden) - hidden, positions.embedding.weight[:5].expand(2, 5, 6))


def turned(heads: Tensor) -> Tensor:
    """The reference: channels i and i + width/2 as one complex number, turned by position / 10000^(2i/width)."""
    width = heads.size(-1)
    result = torch.empty_like(heads)
    flat, out = heads.flatten(0, -3), result.flatten(0, -3)
    for index in range(flat.size(0)):
        for position in range(heads.size(-2)):
            for i in range(width // 2):
                number = complex(flat[index, position, i], flat[index, position, i + width // 2])
                number *= cmath.exp(1j * position / 10000 ** (2 * i / width))
                out[index, position, i], out[index, position, i + width // 2] = number.real, number.imag
    return result


def test_rotary_turns_complex_numbers() -> None:
    query, key = torch.randn(2, 2, 3, 7, 8, dtype=torch.float64).unbind(0)
    rotated_query, rotated_key = RotaryPositions(8)(query, key)
    torch.testing.assert_close(rotated_query, turned(query), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(rotated_key, turned(key), rtol=1e-12, atol=1e-12)


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    query, key = torch.randn(2, 8, dtype=torch.float64).unbind(0)
    everywhere = RotaryPositions(8)(query.expand(1, 1, 40, 8), key.expand(1, 1, 40, 8))
    scores = (everywhere[0] @ everywhere[1].transpose(-1, -2))[0, 0]
    for distance in range(-39, 40):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-10, atol=1e-10)
    # And they do depend on it.
    assert len({round(scores.diagonal(distance)[0].item(), 6) for distance in range(-39, 40)}) > 70


def test_rotary_keeps_norms() -> None:
    heads = torch.randn(2, 3, 30, 6, dtype=torch.float64)
    rotated, _ = RotaryPositions(6)(heads, heads)
    torch.testing.assert_close(rotated.norm(dim=-1), heads.norm(dim=-1), rtol=1e-12, atol=0)


def test_rotary_tables_grow_and_shrink_with_the_text() -> None:
    rotary = RotaryPositions(4)
    heads = torch.randn(1, 1, 12, 4, dtype=torch.float64)
    for length in (3, 12, 5):
        part = heads[:, :, :length]
        torch.testing.assert_close(rotary(part, part)[0], turned(part), rtol=1e-12, atol=1e-12)
    single = heads.float()
    assert rotary(single, single)[0].dtype == torch.float32
