"""Positions: added to the embeddings, or as rotations of queries and keys."""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def angular_rates(width: int, base: float = 10000.0) -> Tensor:
    """The angle of each pair of channels per position [width / 2], in float64 (Vaswani et al. 2017, section 3.5)."""
    return torch.exp(torch.arange(0, width, 2, dtype=torch.float64) * (-math.log(base) / width))


def sinusoidal_table(length: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Sines and cosines of every position [length, width] (Vaswani et al. 2017, section 3.5)."""
    positions = torch.arange(length, dtype=torch.float64, device=device)
    angles = positions[:, None] * angular_rates(width).to(device)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1).to(dtype)


class SinusoidalPositions(nn.Module):
    """Adds the fixed sinusoidal table to [B, T, D], from position `start` on or at the positions `places` [B, T]."""

    def __init__(self, max_length: int, width: int) -> None:
        super().__init__()
        self.max_length, self.width = max_length, width
        self.table: Tensor | None = None  # made at first use, with the dtype and device of the input; not a weight

    def forward(self, hidden: Tensor, start: int = 0, places: Tensor | None = None) -> Tensor:
        if self.table is None or self.table.dtype != hidden.dtype or self.table.device != hidden.device:
            self.table = sinusoidal_table(self.max_length, self.width, hidden.dtype, hidden.device)
        return hidden + self.table[slice(start, start + hidden.size(1)) if places is None else places]


class LearnedPositions(nn.Module):
    """Adds a learned vector per position to [B, T, D], from position `start` on or at the positions `places` [B, T]."""

    def __init__(self, max_length: int, width: int, std: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(max_length, width)
        nn.init.normal_(self.embedding.weight, std=std)

    def forward(self, hidden: Tensor, start: int = 0, places: Tensor | None = None) -> Tensor:
        weight = self.embedding.weight
        rows = weight[start : start + hidden.size(1)] if places is None else F.embedding(places, weight)
        return hidden + rows.to(hidden.dtype)


def rotary_rates(width: int, base: float, scaling: Mapping[str, float | str] | None) -> tuple[Tensor, float]:
    """The angle of each pair of channels per position [width / 2], and what queries and keys are multiplied by.

    `scaling` (`model.rope_scaling`) stretches the wavelengths for texts longer than those trained on before:

    linear   all of them (Chen et al. 2023, arXiv 2306.15595)
    llama3   those that are long beside the original length, and partly those between (Llama 3, arXiv 2407.21783)
    yarn     those of few turns in it, along a ramp; attention becomes sharper (Peng et al. 2023, arXiv 2309.00071, 3.3)
    """
    rates = angular_rates(width, base)
    if scaling is None:
        return rates, 1.0
    numbers = {key: float(value) for key, value in scaling.items() if key != "rope_type"}
    factor = numbers["factor"]
    if scaling["rope_type"] == "linear":
        return rates / factor, 1.0
    length = numbers["original_max_position_embeddings"]
    if scaling["rope_type"] == "llama3":
        low, high = numbers["low_freq_factor"], numbers["high_freq_factor"]
        turns = length * rates / (2 * math.pi)  # within the original length
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return rates * (kept + (1 - kept) / factor), 1.0

    def channel(turns: float) -> float:
        return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    first = max(0, math.floor(channel(numbers.get("beta_fast", 32.0))))
    last = min(width - 1, math.ceil(channel(numbers.get("beta_slow", 1.0))))
    pairs = torch.arange(width // 2, dtype=torch.float64)
    stretched = ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)
    sharper = numbers.get("attention_factor", 0.1 * math.log(factor) + 1 if factor > 1 else 1.0)
    return rates * (1 - stretched + stretched / factor), sharper


class RotaryPositions(nn.Module):
    """Rotates pairs of query and key channels by an angle proportional to the position (RoPE, Su et al. 2021, arXiv
    2104.09864). A pair consists of the channels i and i + width / 2 of a head. `base` and `scaling` as in
    `rotary_rates`."""

    def __init__(
        self, head_width: int, base: float = 10000.0, scaling: Mapping[str, float | str] | None = None
    ) -> None:
        super().__init__()
        self.head_width, self.base, self.scaling = head_width, base, scaling
        self.table: Tensor | None = None  # [2, T, head_width], made at first use

    def forward(self, query: Tensor, key: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        """Query and key, [B, H, T, head_width] each, for the positions from `start` on."""
        stop, table = start + query.size(-2), self.table
        if table is None or table.size(1) < stop or table.dtype != query.dtype or table.device != query.device:
            length = stop if table is None else table.size(1)
            if length < stop:  # a text that grows by single tokens would otherwise make it anew for each
                length = max(stop, 2 * length)
            self.table = table = self._make_table(length).to(query)
        cosine, sine = table[:, start:stop]
        return _rotate(query, cosine, sine), _rotate(key, cosine, sine)

    def _make_table(self, length: int) -> Tensor:
        rates, factor = rotary_rates(self.head_width, self.base, self.scaling)
        angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
        cosine, sine = factor * angles.cos(), factor * angles.sin()
        return torch.stack([torch.cat([cosine, cosine], -1), torch.cat([-sine, sine], -1)])


def _rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    return heads * cosine + heads.roll(heads.size(-1) // 2, dims=-1) * sine
