"""The layers of a Transformer, each a plain module from [B, T, D] to [B, T, D]."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvd_transformer.config.schema import ModelConfig
from hvd_transformer.models.dropout import Dropout
from hvd_transformer.models.embedding import Embedding
from hvd_transformer.models.linear import Linear
from hvd_transformer.models.positions import LearnedPositions, RotaryPositions, SinusoidalPositions
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
            self.positions = nn.Identity()  # rotary: in the attention
        self.dropout = Dropout(config.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.dropout(self.positions(self.embedding(tokens) * self.scale))
        return hidden


class SelfAttention(nn.Module):
    """Causal multi-head attention (Vaswani et al. 2017, 3.2) through `scaled_dot_product_attention`.

    With dropout on the attention weights they exist as a whole in training: [B, H, T, T].
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_width = config.d_model // config.num_heads
        self.qkv = Linear(config.d_model, 3 * config.d_model)  # rows: query, key, value, as in torch.nn
        self.output = Linear(config.d_model, config.d_model)
        self.dropout = Dropout(config.dropout)
        self.rotary = RotaryPositions(config.d_model // config.num_heads) if config.position == "rotary" else None
        nn.init.xavier_uniform_(self.qkv.weight)
        nn.init.zeros_(self.qkv.bias)
        nn.init.zeros_(self.output.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        # [B, T, 3D] → three of [B, H, T, D/H], or of this share's heads
        query, key, value = self.qkv(hidden).unflatten(-1, (3, -1, self.head_width)).permute(2, 0, 3, 1, 4)
        if self.rotary is not None:
            query, key = self.rotary(query, key)
        if self.training and self.dropout.rate:  # the fused kernels draw from torch's own generator
            scores = (query @ key.transpose(-2, -1)) * query.size(-1) ** -0.5
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            mixed = self.dropout(scores.masked_fill(future, -torch.inf).softmax(-1)) @ value
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output


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
        "attention.qkv.weight": Cut(0, parts=3),
        "attention.qkv.bias": Cut(0, parts=3),
        "attention.output.weight": Cut(1),
        "feedforward.input.weight": Cut(0),
        "feedforward.input.bias": Cut(0),
        "feedforward.output.weight": Cut(1),
    }
    DROPPING_SHARES: ClassVar[Sequence[str]] = ("attention.dropout", "feedforward.dropout")

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config)
        self.feedforward = FeedForward(config)
        self.norm1 = nn.LayerNorm(config.d_model)
        self.norm2 = nn.LayerNorm(config.d_model)
        self.dropout = Dropout(config.dropout)
        self.norm: Literal["pre", "post"] = config.norm
        if config.norm == "pre":
            # Each block adds twice to the residual stream; this keeps its variance (Radford et al. 2019, 2.3).
            for linear in (self.attention.output, self.feedforward.output):
                linear.weight.data.mul_((2 * config.num_layers) ** -0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.norm == "pre":
            hidden = hidden + self.dropout(self.attention(self.norm1(hidden)))
            output: Tensor = hidden + self.dropout(self.feedforward(self.norm2(hidden)))
            return output
        hidden = self.norm1(hidden + self.dropout(self.attention(hidden)))
        normed: Tensor = self.norm2(hidden + self.dropout(self.feedforward(hidden)))
        return normed
