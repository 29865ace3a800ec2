"""How a token's position enters the model: sinusoidal, learned or rotary."""

import math

import torch
from torch import Tensor, nn


def sinusoidal_table(length: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Sines and cosines of every position, [length, width] (Vaswani et al. 2017, section 3.5)."""
    positions = torch.arange(length, dtype=torch.float64, device=device)
    rates = torch.exp(torch.arange(0, width, 2, dtype=torch.float64, device=device) * (-math.log(10000.0) / width))
    angles = positions[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1).to(dtype)


class NoPositions(nn.Module):
    """Where positions enter elsewhere."""

    def forward(self, hidden: Tensor, start: int = 0) -> Tensor:
        return hidden


class SinusoidalPositions(nn.Module):
    """Adds the fixed sinusoidal table, from position `start` on, to [B, T, D]."""

    def __init__(self, max_length: int, width: int) -> None:
        super().__init__()
        self.max_length, self.width = max_length, width
        self.table: Tensor | None = None  # made at first use, in the input's dtype and place; no weight

    def forward(self, hidden: Tensor, start: int = 0) -> Tensor:
        if self.table is None or self.table.dtype != hidden.dtype or self.table.device != hidden.device:
            self.table = sinusoidal_table(self.max_length, self.width, hidden.dtype, hidden.device)
        return hidden + self.table[start : start + hidden.size(1)]


class LearnedPositions(nn.Module):
    """Adds a learned vector a position, from `start` on, to [B, T, D]."""

    def __init__(self, max_length: int, width: int, std: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(max_length, width)
        nn.init.normal_(self.embedding.weight, std=std)

    def forward(self, hidden: Tensor, start: int = 0) -> Tensor:
        return hidden + self.embedding.weight[start : start + hidden.size(1)].to(hidden.dtype)


class RotaryPositions(nn.Module):
    """Turns pairs of query and key channels by an angle that grows with the position (Su et al. 2021, 2104.09864).

    The pairs are channel i and i + width/2 of a head.
    """

    def __init__(self, head_width: int) -> None:
        super().__init__()
        self.head_width = head_width
        self.table: tuple[Tensor, Tensor] | None = None

    def forward(self, query: Tensor, key: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        """[B, H, T, head_width] each, of the positions from `start` on."""
        cosine, sine = (table[start:] for table in self._tables(start + query.size(-2), query))
        return _rotate(query, cosine, sine), _rotate(key, cosine, sine)

    def _tables(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        table = self.table
        if table is None or table[0].size(0) < length or table[0].dtype != like.dtype or table[0].device != like.device:
            pairs = sinusoidal_table(length, self.head_width, torch.float64, like.device).unflatten(1, (-1, 2))
            sine, cosine = pairs.unbind(-1)
            table = (
                torch.cat([cosine, cosine], dim=-1).to(like.dtype),
                torch.cat([-sine, sine], dim=-1).to(like.dtype),
            )
            self.table = table
        return table[0][:length], table[1][:length]


def _rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    return heads * cosine + heads.roll(heads.size(-1) // 2, dims=-1) * sine
