"""The layers of a Transformer: embedding, blocks, vocabulary head."""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvd_transformer.config.schema import ModelConfig
from hvd_transformer.models.attention import CrossAttention, KVCache, SelfAttention
from hvd_transformer.models.documents import Documents
from hvd_transformer.models.norms import FusibleNorm, make_last_norm, make_norm
from hvd_transformer.models.positions import LearnedPositions, SinusoidalPositions
from hvd_transformer.nn.cross_entropy import fused_cross_entropy
from hvd_transformer.nn.dropout import Dropout
from hvd_transformer.nn.kernels import FusibleLayer
from hvd_transformer.nn.matmul import autocast_dtype, linear
from hvd_transformer.nn.parallel_layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelLayer,
    WeightGradLayer,
    split_range,
)


class TokenEmbedding(nn.Module):
    """Token numbers [B, T] to vectors [B, T, D]: embedding × √D, positions, dropout (Vaswani et al. 2017, sec. 3.4).

    Llama and its kin do not multiply (`scale_embedding`).
    """

    def __init__(self, vocab_size: int, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = VocabParallelEmbedding(vocab_size, config.d_model)
        self.scale = config.d_model**0.5 if config.scale_embedding else None
        # 1 / √D gives vectors of unit variance. With tied embeddings each token would then predict itself at first.
        std = 0.02 if config.tie_embeddings or self.scale is None else 1 / self.scale
        init_vocabulary(self.embedding.weight, config, std)
        self.positions: nn.Module | None = None  # rotary positions are applied in the attention
        if config.position == "sinusoidal":
            self.positions = SinusoidalPositions(config.max_length, config.d_model)
        elif config.position == "learned":
            self.positions = LearnedPositions(config.max_length, config.d_model, std * (self.scale or 1.0))
        self.dropout = Dropout(config.dropout)

    def forward(self, tokens: Tensor, start: int = 0, places: Tensor | None = None) -> Tensor:
        """[B, T] to [B, T, D]. `start`: the position of the first token; `places` [B, T]: of each token."""
        embedded = self.embedding(tokens)
        if self.scale is not None:
            embedded = embedded * self.scale
        placed = embedded if self.positions is None else self.positions(embedded, start, places)
        hidden: Tensor = self.dropout(placed)
        return hidden


class FeedForward(FusibleLayer):
    """Two linear layers with a nonlinearity between them (Vaswani et al. 2017, section 3.3); with `swiglu` the first
    one makes gate and values, SiLU(gate) × values (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        parts = 2 if config.activation == "swiglu" else 1
        self.input = ColumnParallelLinear(config.d_model, parts * config.d_feedforward, parts=parts, bias=config.bias)
        self.output = RowParallelLinear(config.d_feedforward, config.d_model, bias=config.bias)
        self.activation = _ACTIVATIONS[config.activation]
        self.dropout = Dropout(config.dropout, sharded=True)
        if config.init == "tutorial":
            return  # they have the values of nn.Linear
        for weight in (*self.input.weight.chunk(parts), self.output.weight):
            nn.init.xavier_uniform_(weight)
        for layer in (self.input, self.output):
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        """[..., D] to [..., D], plus `residual`."""
        kernels, gelu = self.kernels, self.activation is F.gelu
        fits = kernels is not None and kernels.fit(hidden, self.input.weight, self.input.bias)
        if self.training and kernels is not None and fits and gelu and autocast_dtype(hidden) is None:
            values = self.input(hidden, adds_bias=False)
            drawn = self.dropout.draw_bits(values.shape) if self.dropout.active else None
            values = kernels.gelu(values, drawn, self.input.bias)
        else:
            values = self.dropout(self.activation(self.input(hidden)))
        output: Tensor = self.output(values, residual)
        return output


def _swiglu(stacked: Tensor) -> Tensor:
    gate, values = stacked.chunk(2, -1)
    return F.silu(gate) * values


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu, "swiglu": _swiglu}


def init_vocabulary(weight: Tensor, config: ModelConfig, std: float) -> None:
    """Initial values of an embedding or an output layer [V, D]; `std` of the default ones."""
    if config.init == "tutorial":
        nn.init.uniform_(weight, -0.1, 0.1)
    else:
        nn.init.normal_(weight, std=std)


def init_residual(linear: nn.Linear, config: ModelConfig) -> None:
    """Scale the initial weight of a layer whose output is added to the residual stream, or set it to zero.

    Zero: Zhang et al. 2019, "Fixup", arXiv 1901.09321, section 3. Other weights have the same values either way.
    """
    if config.init_output == "zero":
        nn.init.zeros_(linear.weight)
    elif config.norm == "pre" and config.init == "default":
        # Each block adds twice to the residual stream; this keeps its variance (Radford et al. 2019, section 2.3).
        linear.weight.data.mul_((2 * config.num_layers) ** -0.5)


class Block(nn.Module):
    """Attention and feed-forward, each with a residual connection and a norm before (pre) or after (post) it."""

    def __init__(self, config: ModelConfig, causal: bool = True) -> None:
        super().__init__()
        self.attention = SelfAttention(config, causal)
        self.feedforward = FeedForward(config)
        self.norm1 = make_norm(config)
        self.norm2 = make_norm(config)
        self.dropout = Dropout(config.dropout)
        self.norm: Literal["pre", "post"] = config.norm
        for layer in (self.attention.output, self.feedforward.output):
            init_residual(layer, config)

    def forward(
        self,
        hidden: Tensor,
        allowed: Tensor | None = None,
        past: KVCache | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """[B, T, D] to [B, T, D]; the others as in `SelfAttention`."""
        hidden = self._around(
            self.norm1, hidden, partial(self.attention, allowed=allowed, past=past, documents=documents)
        )
        return self._around(self.norm2, hidden, self.feedforward)

    def _around(self, norm: FusibleNorm, hidden: Tensor, part: Callable[..., Tensor]) -> Tensor:
        """`part` with a residual connection, which it adds itself if it is given a `residual`."""
        if self.norm == "pre":
            return self._add(part, *norm.fork(hidden))
        normed: Tensor = norm(self._add(part, hidden, hidden))
        return normed

    def _add(self, part: Callable[..., Tensor], values: Tensor, residual: Tensor) -> Tensor:
        if self.training and self.dropout.kernels is not None and not self.dropout.active:
            return part(values, residual=residual)  # in its last product
        result: Tensor = self.dropout(part(values), residual)
        return result


class DecoderCache(NamedTuple):
    """The caches of one decoder block: for its own positions, and for the memory."""

    own: KVCache
    memory: KVCache


class DecoderBlock(Block):
    """A causal block with cross-attention over the output of an encoder, between self-attention and feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.cross = CrossAttention(config)
        self.norm3 = make_norm(config)  # of the cross-attention, although that is the second in order
        init_residual(self.cross.output, config)

    def forward(  # type: ignore[override]  # it takes more arguments
        self, hidden: Tensor, memory: Tensor | None, allowed: Tensor, past: DecoderCache | None = None
    ) -> Tensor:
        """[B, T, D] over `memory` [B, S, D] to [B, T, D]; `allowed` [B, S] marks the positions to attend to.

        A `past` that is not empty has all that is needed of the memory.
        """
        own, of_memory = past or (None, None)
        hidden = self._around(self.norm1, hidden, partial(self.attention, past=own))
        hidden = self._around(self.norm3, hidden, partial(self.cross, memory=memory, allowed=allowed, past=of_memory))
        return self._around(self.norm2, hidden, self.feedforward)


class VocabularyHead(VocabParallelLayer, WeightGradLayer):
    """The final norm (of pre-norm models) and the vocabulary projection. Label `smoothing` applies only in training."""

    def __init__(self, vocab_size: int, config: ModelConfig, smoothing: float = 0.0) -> None:
        super().__init__()
        self.norm = make_last_norm(config)
        self.weight: Tensor = nn.Parameter(torch.empty(vocab_size, config.d_model))
        # As in the PyTorch tutorial, an untied output layer has a bias; a tied one is the embedding matrix alone.
        has_bias = not config.tie_embeddings if config.head_bias is None else config.head_bias
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if has_bias else None
        self.loss_chunk, self.smoothing = config.loss_chunk, smoothing
        init_vocabulary(self.weight, config, 0.02)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., D] to logits [..., V], or of its part."""
        shadow = None if torch.is_grad_enabled() else self._shadow(hidden)
        return linear(self.norm(hidden), self.weight if shadow is None else shadow, self.bias)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] to logits [..., V] of the whole vocabulary, on every share."""
        own: Tensor = self(hidden)
        if self.shard is None:
            return own
        group, _, total = self.shard
        sizes = [len(split_range(total, index, group.count)) for index in range(group.count)]
        pieces = group.gather(F.pad(own, (0, max(sizes) - own.size(-1))))
        return torch.cat([piece[..., :size] for piece, size in zip(pieces, sizes, strict=True)], -1)

    def loss(self, hidden: Tensor, targets: Tensor, places: Tensor | None = None) -> Tensor:
        """The sum of the cross-entropies of `targets` [B, T] given `hidden` [B, T, D]; with `places` [N], of `targets`
        [N] at these of B × T: the others are padding and cost nothing."""
        values = hidden.flatten(0, 1)
        return fused_cross_entropy(
            self.norm(values if places is None else values.index_select(0, places)),
            self.weight,
            self.bias,
            targets.flatten(),
            self.loss_chunk,
            self.weight_grads,
            self.shard,
            self.smoothing if self.training else 0.0,
            self.kernels,
            self._shadow(hidden),
        )
