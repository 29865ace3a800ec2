"""Multi-head attention (Vaswani et al. 2017, section 3.2), positions, and the key-value cache."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvd_transformer.config.schema import ModelConfig
from hvd_transformer.nn.dropout import Dropout
from hvd_transformer.nn.kernels import FusibleLayer
from hvd_transformer.nn.parallel_layers import ColumnParallelLinear, RowParallelLinear


def sinusoidal_table(length: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Sines and cosines of every position [length, width] (Vaswani et al. 2017, section 3.5)."""
    positions = torch.arange(length, dtype=torch.float64, device=device)
    rates = torch.exp(torch.arange(0, width, 2, dtype=torch.float64, device=device) * (-math.log(10000.0) / width))
    angles = positions[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1).to(dtype)


class SinusoidalPositions(nn.Module):
    """Adds the fixed sinusoidal table to [B, T, D], starting at position `start`."""

    def __init__(self, max_length: int, width: int) -> None:
        super().__init__()
        self.max_length, self.width = max_length, width
        self.table: Tensor | None = None  # made at first use, with the dtype and device of the input; not a weight

    def forward(self, hidden: Tensor, start: int = 0) -> Tensor:
        if self.table is None or self.table.dtype != hidden.dtype or self.table.device != hidden.device:
            self.table = sinusoidal_table(self.max_length, self.width, hidden.dtype, hidden.device)
        return hidden + self.table[start : start + hidden.size(1)]


class LearnedPositions(nn.Module):
    """Adds one learned vector per position to [B, T, D], starting at position `start`."""

    def __init__(self, max_length: int, width: int, std: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(max_length, width)
        nn.init.normal_(self.embedding.weight, std=std)

    def forward(self, hidden: Tensor, start: int = 0) -> Tensor:
        return hidden + self.embedding.weight[start : start + hidden.size(1)].to(hidden.dtype)


class RotaryPositions(nn.Module):
    """Rotates pairs of query and key channels by an angle proportional to the position (RoPE, Su et al. 2021, arXiv
    2104.09864). A pair consists of the channels i and i + width / 2 of a head."""

    def __init__(self, head_width: int) -> None:
        super().__init__()
        self.head_width = head_width
        self.table: Tensor | None = None  # [2, T, head_width], made at first use

    def forward(self, query: Tensor, key: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        """Query and key, [B, H, T, head_width] each, for the positions from `start` on."""
        stop, table = start + query.size(-2), self.table
        if table is None or table.size(1) < stop or table.dtype != query.dtype or table.device != query.device:
            pairs = sinusoidal_table(stop, self.head_width, torch.float64, query.device).unflatten(1, (-1, 2))
            sine, cosine = pairs.unbind(-1)
            self.table = table = torch.stack([torch.cat([cosine, cosine], -1), torch.cat([-sine, sine], -1)]).to(query)
        cosine, sine = table[:, start:stop]
        return _rotate(query, cosine, sine), _rotate(key, cosine, sine)


def _rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    return heads * cosine + heads.roll(heads.size(-1) // 2, dims=-1) * sine


class KVCache:
    """The keys and values of one attention layer for the positions so far, so that decoding computes them once."""

    def __init__(self) -> None:
        self.pair: tuple[Tensor, Tensor] | None = None  # [B, H, T, D/H] each

    @property
    def length(self) -> int:
        """The number of positions so far, T."""
        return 0 if self.pair is None else self.pair[0].size(2)

    def add(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append new positions; returns the keys and values of all positions."""
        if self.pair is not None:
            key, value = torch.cat([self.pair[0], key], 2), torch.cat([self.pair[1], value], 2)
        self.pair = key, value
        return self.pair

    def select(self, rows: Tensor) -> None:
        """Keep these rows [B'] of the batch, in this order; a row may be repeated."""
        if self.pair is not None:
            self.pair = self.pair[0].index_select(0, rows), self.pair[1].index_select(0, rows)


class Attention(FusibleLayer):
    """Common to self- and cross-attention. Without `kernels` training with dropout materializes the weights
    [B, H, T, S]."""

    def __init__(self, config: ModelConfig, causal: bool) -> None:
        super().__init__()
        self.head_width, self.causal = config.d_model // config.num_heads, causal
        self.output: RowParallelLinear
        self.dropout = Dropout(config.dropout, sharded=True)

    def mix(self, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None) -> Tensor:
        """Attend with queries [B, H, T, D/H] to keys and values [B, H, S, D/H]; returns [B, T, D].

        `allowed` [B, S] marks the keys to attend to. In causal attention the queries are the last T of the S positions.
        """
        kernels = self.kernels
        if self.training and kernels is not None and kernels.fit(query, key, value, rows=True):
            shape = (*query.shape[:3], key.size(2))
            drawn = self.dropout.draw_bits(shape) if self.dropout.active else None
            mixed = kernels.attention(query, key, value, self.causal, allowed, drawn)
        elif self.dropout.active:  # torch's fused attention would draw from torch's generator
            mixed = (self._weights(query @ key.transpose(-2, -1), allowed) @ value).transpose(1, 2)
        else:
            length, keys = query.size(2), key.size(2)
            mask = None if allowed is None else allowed[:, None, None]
            causal = self.causal and length > 1
            if causal and (mask is not None or length < keys):  # beyond torch's own causal mask
                mask, causal = self._mask(length, keys, allowed, query.device), False
            heads = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
            mixed = heads.transpose(1, 2)
        output: Tensor = self.output(mixed.flatten(2))
        return output

    def _weights(self, scores: Tensor, allowed: Tensor | None) -> Tensor:
        """The attention weights after dropout, from products of queries and keys [B, H, T, S]."""
        scores = scores * self.head_width**-0.5
        mask = self._mask(scores.size(-2), scores.size(-1), allowed, scores.device)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        dropped: Tensor = self.dropout(scores.softmax(-1))
        return dropped

    def _mask(self, length: int, keys: int, allowed: Tensor | None, device: torch.device) -> Tensor | None:
        """Which of the keys the last `length` positions may attend to; None: all."""
        mask = None if allowed is None else allowed[:, None, None]
        if not self.causal or length == 1:
            return mask
        past = torch.ones(length, keys, dtype=torch.bool, device=device).tril(keys - length)
        return past if mask is None else past & mask


def _split_heads(projected: Tensor, parts: int, width: int) -> list[Tensor]:
    """[B, T, parts × D] to as many [B, H, T, D/H]; in this order backward copies their gradients once."""
    return [part.transpose(1, 2) for part in projected.unflatten(-1, (parts, -1, width)).unbind(2)]


class SelfAttention(Attention):
    """Attention over the sequence itself; the ranks of a tensor group have some of the heads each."""

    def __init__(self, config: ModelConfig, causal: bool = True) -> None:
        super().__init__(config, causal)
        # Rows: query, key, value, as in torch.nn.
        self.qkv = ColumnParallelLinear(config.d_model, 3 * config.d_model, parts=3)
        self.output = RowParallelLinear(config.d_model, config.d_model)
        self.rotary = RotaryPositions(self.head_width) if config.position == "rotary" else None
        nn.init.xavier_uniform_(self.qkv.weight)
        for bias in (self.qkv.bias, self.output.bias):
            nn.init.zeros_(bias)

    def forward(self, hidden: Tensor, allowed: Tensor | None = None, past: KVCache | None = None) -> Tensor:
        """[B, T, D] to [B, T, D]. `allowed` [B, T] marks the keys to attend to; `past` caches previous positions."""
        query, key, value = _split_heads(self.qkv(hidden), 3, self.head_width)
        if self.rotary is not None:
            query, key = self.rotary(query, key, 0 if past is None else past.length)
        if past is not None:
            key, value = past.add(key, value)
        return self.mix(query, key, value, allowed)


class CrossAttention(Attention):
    """Attention over an encoder's output; the ranks of a tensor group have some of the heads each."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, causal=False)
        self.query = ColumnParallelLinear(config.d_model, config.d_model)
        self.key_value = ColumnParallelLinear(config.d_model, 2 * config.d_model, parts=2)
        self.output = RowParallelLinear(config.d_model, config.d_model)
        # The bound for the three matrices as one (as in torch.nn), so that both kinds of attention start alike.
        bound = (6 / (4 * config.d_model)) ** 0.5
        for linear in (self.query, self.key_value):
            nn.init.uniform_(linear.weight, -bound, bound)
        for bias in (self.query.bias, self.key_value.bias, self.output.bias):
            nn.init.zeros_(bias)

    def forward(self, hidden: Tensor, memory: Tensor, allowed: Tensor, past: KVCache | None = None) -> Tensor:
        """[B, T, D] over `memory` [B, S, D] to [B, T, D]. `allowed` [B, S] marks the positions to attend to.

        `past` caches the keys and values of the memory from the first call on.
        """
        query = self.query(hidden).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
        if past is not None and past.pair is not None:
            key, value = past.pair
        else:
            key, value = _split_heads(self.key_value(memory), 2, self.head_width)
            if past is not None:
                past.pair = key, value
        return self.mix(query, key, value, allowed)
