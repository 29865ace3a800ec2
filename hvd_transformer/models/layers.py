"""The layers of a Transformer, each a plain module from [B, T, D] to [B, T, D]."""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from hvd_transformer.config.schema import ModelConfig
from hvd_transformer.models.attention import CrossAttention, KeyValues, SelfAttention
from hvd_transformer.models.dropout import Dropout
from hvd_transformer.models.embedding import Embedding
from hvd_transformer.models.linear import Linear
from hvd_transformer.models.positions import LearnedPositions, NoPositions, SinusoidalPositions
from hvd_transformer.models.shares import Cut


class TokenEmbedding(nn.Module):
    """Token numbers [B, T] to vectors [B, T, D]: embedding × √D, positions, dropout (Vaswani et al. 2017, 3.4)."""

    def __init__(self, vocab_size: int, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = Embedding(vocab_size, config.d_model)
        self.scale = config.d_model**0.5
        # After × √D the vectors have unit variance. Tied, that would have each token predict itself at first.
        std = 0.02 if config.tie_embeddings else 1 / self.scale
        nn.init.normal_(self.embedding.weight, std=std)
        self.positions: nn.Module
        if config.position == "sinusoidal":
            self.positions = SinusoidalPositions(config.max_length, config.d_model)
        elif config.position == "learned":
            self.positions = LearnedPositions(config.max_length, config.d_model, std * self.scale)
        else:
            self.positions = NoPositions()  # rotary: in the attention
        self.dropout = Dropout(config.dropout)

    def forward(self, tokens: Tensor, start: int = 0) -> Tensor:
        """`start`: the first token's position."""
        hidden: Tensor = self.dropout(self.positions(self.embedding(tokens) * self.scale, start))
        return hidden


class FeedForward(nn.Module):
    """Two matrices with a nonlinearity between them (Vaswani et al. 2017, 3.3)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input = Linear(config.d_model, config.d_feedforward)
        self.output = Linear(config.d_feedforward, config.d_model)
        self.activation = F.gelu if config.activation == "gelu" else F.relu
        self.dropout = Dropout(config.dropout)
        for linear in (self.input, self.output):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.output(self.dropout(self.activation(self.input(hidden))))
        return output


class Block(nn.Module):
    """Attention and feed-forward, each with a residual connection and a layer norm before (pre) or after (post) it.

    `CUTS`: how ranks may share its weights. `DROPPING_SHARES` are the dropouts on what they then share, too.
    """

    CUTS: ClassVar[Mapping[str, Cut]] = {
        **{f"attention.{name}": cut for name, cut in SelfAttention.CUTS.items()},
        "feedforward.input.weight": Cut(0),
        "feedforward.input.bias": Cut(0),
        "feedforward.output.weight": Cut(1),
    }
    DROPPING_SHARES: ClassVar[Sequence[str]] = ("attention.dropout", "feedforward.dropout")

    def __init__(self, config: ModelConfig, causal: bool = True) -> None:
        super().__init__()
        self.attention = SelfAttention(config, causal)
        self.feedforward = FeedForward(config)
        self.norm1 = nn.LayerNorm(config.d_model)
        self.norm2 = nn.LayerNorm(config.d_model)
        self.dropout = Dropout(config.dropout)
        self.norm: Literal["pre", "post"] = config.norm
        if config.norm == "pre":
            # Each block adds twice to the residual stream; this keeps its variance (Radford et al. 2019, 2.3).
            for linear in (self.attention.output, self.feedforward.output):
                linear.weight.data.mul_((2 * config.num_layers) ** -0.5)

    def forward(self, hidden: Tensor, allowed: Tensor | None = None, past: KeyValues | None = None) -> Tensor:
        """[B, T, D] to [B, T, D]; `allowed` and `past` as in `SelfAttention`."""
        hidden = self._around(self.norm1, hidden, lambda values: self.attention(values, allowed, past))
        return self._around(self.norm2, hidden, self.feedforward)

    def _around(self, norm: nn.Module, hidden: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        if self.norm == "pre":
            result: Tensor = hidden + self.dropout(part(norm(hidden)))
        else:
            result = norm(hidden + self.dropout(part(hidden)))
        return result


class DecoderPast(NamedTuple):
    """What a decoder's block keeps of the positions so far, and of the memory."""

    own: KeyValues
    memory: KeyValues


class DecoderBlock(Block):
    """A causal block that also looks at an encoder's output, between its attention and its feed-forward part."""

    CUTS: ClassVar[Mapping[str, Cut]] = {
        **Block.CUTS,
        **{f"cross.{name}": cut for name, cut in CrossAttention.CUTS.items()},
    }
    DROPPING_SHARES: ClassVar[Sequence[str]] = (*Block.DROPPING_SHARES, "cross.dropout")

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.cross = CrossAttention(config)
        self.norm3 = nn.LayerNorm(config.d_model)  # of the cross attention, though the second in order
        if config.norm == "pre":
            self.cross.output.weight.data.mul_((2 * config.num_layers) ** -0.5)

    def forward(  # type: ignore[override]  # it takes more
        self, hidden: Tensor, memory: Tensor, allowed: Tensor, past: DecoderPast | None = None
    ) -> Tensor:
        """[B, T, D] over `memory` [B, S, D], of which the places `allowed` [B, S] count, to [B, T, D]."""
        own, of_memory = past or (None, None)
        hidden = self._around(self.norm1, hidden, lambda values: self.attention(values, None, own))
        hidden = self._around(self.norm3, hidden, lambda values: self.cross(values, memory, allowed, of_memory))
        return self._around(self.norm2, hidden, self.feedforward)
