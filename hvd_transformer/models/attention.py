"""Multi-head attention (Vaswani et al. 2017, section 3.2), and the key-value cache."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvd_transformer.config.schema import ModelConfig
from hvd_transformer.models.documents import Documents
from hvd_transformer.models.norms import HeadNorm
from hvd_transformer.models.positions import RotaryPositions
from hvd_transformer.nn import seeded_attention
from hvd_transformer.nn.dropout import Dropout
from hvd_transformer.nn.kernels import DropoutBits, FusibleLayer, Kernels
from hvd_transformer.nn.matmul import autocast_dtype
from hvd_transformer.nn.parallel_layers import ColumnParallelLinear, RowParallelLinear


class KVCache:
    """The keys and values of one attention layer for the positions so far, so that decoding computes them once."""

    def __init__(self) -> None:
        self.pair: tuple[Tensor, Tensor] | None = None  # [B, H, T, W] each

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
            rows = rows.to(self.pair[0].device)  # each pipeline stage may have a device of its own
            self.pair = self.pair[0].index_select(0, rows), self.pair[1].index_select(0, rows)


class Attention(FusibleLayer):
    """Common to self- and cross-attention. On a CPU, training with dropout and without `kernels` materializes the
    weights [B, H, T, S]."""

    def __init__(self, config: ModelConfig, causal: bool) -> None:
        super().__init__()
        self.head_width, self.causal = config.head_width or config.d_model // config.num_heads, causal
        self.output: RowParallelLinear
        self.dropout = Dropout(config.dropout, sharded=True)

    def mix(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        allowed: Tensor | None,
        documents: Documents | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Attend with queries [B, H, T, W] to keys and values [B, G, S, W]; returns [B, T, D], plus `residual`.

        Each of the G heads of keys and values serves H / G neighbouring heads of queries. `allowed` [B, S] marks the
        keys to attend to. In causal attention the queries are the last T of the S positions. With `documents`, which
        needs causal attention and no `allowed`, T = S and each query attends to its own document only.
        """
        drops, groups = self.dropout.active, query.size(1) // key.size(1)
        # A GPU's kernels for 16 bits read each head of keys and values for all of its queries.
        shares = query.is_cuda and query.dtype.itemsize == 2 and not drops and allowed is None and documents is None
        shares = shares and seeded_attention.is_ampere(query)  # else torch would form the weights [B, H, T, S]
        if groups > 1 and not shares:
            key, value = (heads.repeat_interleave(groups, 1) for heads in (key, value))
        if (kernels := self._fitting_kernels(query, key, value)) is not None:
            drawn, starts = self._drawn((*query.shape[:3], key.size(2))), _starts(documents)
            mixed = kernels.attention(query, key, value, self.causal, allowed, drawn, starts)
        elif drops and not seeded_attention.fits(query):  # torch's would draw from torch's generator
            mixed = (self._weights(query, key, allowed, documents) @ value).transpose(1, 2)
        else:
            length, keys = query.size(2), key.size(2)
            mask = None if allowed is None else allowed[:, None, None]
            causal = self.causal if length > 1 else False  # `and` would be a symbol in a graph for any length
            if documents is not None:
                mask, causal = documents.added(query.dtype), False
            elif causal and (mask is not None or length < keys):  # beyond torch's own causal mask
                mask, causal = self._mask(length, keys, allowed, query.device), False
            if drops:
                heads = seeded_attention.attend(query, key, value, mask, causal, self.dropout)
            else:
                heads = F.scaled_dot_product_attention(
                    query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=groups > 1 and shares
                )
            mixed = heads.transpose(1, 2)
        output: Tensor = self.output(mixed.flatten(2), residual)
        return output

    def _fitting_kernels(self, *tensors: Tensor) -> Kernels | None:
        """The kernels, if this layer trains with them and they support these tensors."""
        if self.training and self.kernels is not None and self.kernels.fit(*tensors, rows=True):
            return self.kernels
        return None

    def _drawn(self, shape: Sequence[int]) -> DropoutBits | None:
        """The dropout of weights of this shape, for the kernels."""
        return self.dropout.draw_bits(shape) if self.dropout.active else None

    def _weights(self, query: Tensor, key: Tensor, allowed: Tensor | None, documents: Documents | None) -> Tensor:
        """The attention weights [B, H, T, S] after dropout."""
        scale = self.head_width**-0.5
        if torch.float16 in (query.dtype, autocast_dtype(query)):  # whose products overflow before they are scaled
            scores = (query * scale) @ key.transpose(-2, -1)
        else:
            scores = query @ key.transpose(-2, -1) * scale
        if documents is not None:
            scores = scores + documents.added(scores.dtype)
        elif (mask := self._mask(scores.size(-2), scores.size(-1), allowed, scores.device)) is not None:
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


def _zero_biases(*layers: nn.Linear) -> None:
    for layer in layers:
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


def _starts(documents: Documents | None) -> Tensor | None:
    return None if documents is None else documents.starts


def _split_heads(projected: Tensor, parts: int, width: int) -> list[Tensor]:
    """[B, T, parts × H × W] to as many [B, H, T, W]; in this order backward copies their gradients once."""
    return [part.transpose(1, 2) for part in projected.unflatten(-1, (parts, -1, width)).unbind(2)]


class SelfAttention(Attention):
    """Attention over the sequence itself; the ranks of a tensor group have some of the heads each.

    With fewer heads of keys and values than of queries it is grouped-query attention (Ainslie et al. 2023, arXiv
    2305.13245).
    """

    def __init__(self, config: ModelConfig, causal: bool = True) -> None:
        super().__init__(config, causal)
        num_kv_heads = config.num_kv_heads or config.num_heads
        width, kv_width = config.num_heads * self.head_width, num_kv_heads * self.head_width
        self.qkv: ColumnParallelLinear | None = None
        if num_kv_heads == config.num_heads:
            # Rows: query, key, value, as in torch.nn.
            self.qkv = ColumnParallelLinear(config.d_model, 3 * width, parts=3, bias=config.bias)
            inputs = [self.qkv]
        else:
            self.query = ColumnParallelLinear(config.d_model, width, bias=config.bias)
            self.key_value = ColumnParallelLinear(config.d_model, 2 * kv_width, parts=2, bias=config.bias)
            inputs = [self.query, self.key_value]
        self.output = RowParallelLinear(width, config.d_model, bias=config.bias)
        self.rotary: RotaryPositions | None = None
        if config.position == "rotary":
            self.rotary = RotaryPositions(self.head_width, config.rope_theta, config.rope_scaling)
        if config.qk_norm:
            self.query_norm, self.key_norm = (HeadNorm(self.head_width, config.norm_eps) for _ in range(2))
        self.qk_norm = config.qk_norm
        self._is_plain = self.rotary is None and not config.qk_norm  # the kernels take the projection as it is
        for linear in inputs:
            nn.init.xavier_uniform_(linear.weight)
        _zero_biases(*inputs, self.output)

    def forward(
        self,
        hidden: Tensor,
        allowed: Tensor | None = None,
        past: KVCache | None = None,
        documents: Documents | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """[B, T, D] to [B, T, D], plus `residual`. `allowed` [B, T] marks the keys to attend to; `past` caches previous
        positions; `documents` keeps documents apart, where rotary positions, which are relative, need not start anew.
        """
        narrow = autocast_dtype(hidden)
        if narrow is not None:
            hidden = hidden.to(narrow)  # once for all of its products
        if self.qkv is not None:
            group, projected = self.qkv.column_group, self.qkv(hidden)
            if past is None and self._is_plain and (kernels := self._fitting_kernels(projected)) is not None:
                return self._mix_stacked(kernels, projected, allowed, documents, residual)
            query, key, value = _split_heads(projected, 3, self.head_width)
        else:
            group = self.query.column_group
            (query,) = _split_heads(self.query(hidden), 1, self.head_width)
            key, value = _split_heads(self.key_value(hidden), 2, self.head_width)
        if self.qk_norm:
            query, key = self.query_norm(query, group), self.key_norm(key, group)
        if self.rotary is not None:
            query, key = self.rotary(query, key, 0 if past is None else past.length)
        if past is not None:
            key, value = past.add(key, value)
        return self.mix(query, key, value, allowed, documents, residual)

    def _mix_stacked(
        self,
        kernels: Kernels,
        projected: Tensor,
        allowed: Tensor | None,
        documents: Documents | None,
        residual: Tensor | None,
    ) -> Tensor:
        """`mix` of queries, keys and values as the projection [B, T, 3 × H × W] makes them."""
        stacked = projected.unflatten(-1, (3, -1, self.head_width))
        batch_size, length, _, num_heads, _ = stacked.shape
        drawn, starts = self._drawn((batch_size, num_heads, length, length)), _starts(documents)
        mixed = kernels.self_attention(stacked, self.causal, allowed, drawn, starts)
        output: Tensor = self.output(mixed.flatten(2), residual)
        return output


class CrossAttention(Attention):
    """Attention over an encoder's output; the ranks of a tensor group have some of the heads each."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, causal=False)
        width = config.num_heads * self.head_width
        self.query = ColumnParallelLinear(config.d_model, width, bias=config.bias)
        self.key_value = ColumnParallelLinear(config.d_model, 2 * width, parts=2, bias=config.bias)
        self.output = RowParallelLinear(width, config.d_model, bias=config.bias)
        # The bound for the three matrices as one (as in torch.nn), so that both kinds of attention start alike.
        bound = (6 / (config.d_model + 3 * width)) ** 0.5
        for linear in (self.query, self.key_value):
            nn.init.uniform_(linear.weight, -bound, bound)
        _zero_biases(self.query, self.key_value, self.output)

    def forward(
        self,
        hidden: Tensor,
        memory: Tensor | None,
        allowed: Tensor,
        past: KVCache | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """[B, T, D] over `memory` [B, S, D] to [B, T, D], plus `residual`. `allowed` [B, S] marks the positions to
        attend to.

        `past` caches the keys and values of the memory; from the second call on nothing else of it is needed.
        """
        query = self.query(hidden).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
        if past is not None and past.pair is not None:
            key, value = past.pair
        else:
            assert memory is not None
            key, value = _split_heads(self.key_value(memory), 2, self.head_width)
            if past is not None:
                past.pair = key, value
        return self.mix(query, key, value, allowed, residual=residual)
