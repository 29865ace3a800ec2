"""The language model as a good engineer writes it with torch alone: the layers of torch.nn, torch's fused attention,
whole logits. Its parameters have the names that they have in `LanguageModel`, so that both start with the same weights.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvd_transformer.config.schema import ModelConfig
from hvd_transformer.models.positions import sinusoidal_table


class PlainEmbedding(nn.Module):
    """[B, T] to [B, T, D]: embedding × √D and positions."""

    def __init__(self, vocab_size: int, config: ModelConfig, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, config.d_model)
        self.scale = math.sqrt(config.d_model)
        self.positions: nn.Module | None = None
        if config.position == "learned":
            self.positions = nn.ModuleDict({"embedding": nn.Embedding(config.max_length, config.d_model)})
        table = sinusoidal_table(length, config.d_model, torch.float32, torch.device("cpu"))
        self.register_buffer("table", table, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        table = self.table if self.positions is None else self.positions["embedding"].weight
        return self.embedding(tokens) * self.scale + table[: tokens.size(1)]


class PlainAttention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, num_heads: int, bias: bool = True) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width, bias)
        self.output = nn.Linear(width, width, bias)

    def forward(self, hidden: Tensor) -> Tensor:
        # [B, T, 3D] → three of [B, H, T, D/H]
        parts = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(hidden).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class PlainFeedForward(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, width: int, hidden_width: int, bias: bool = True) -> None:
        super().__init__()
        self.input, self.output = nn.Linear(width, hidden_width, bias), nn.Linear(hidden_width, width, bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.output(F.gelu(self.input(hidden)))


class PlainBlock(nn.Module):
    """A pre-norm block."""

    def __init__(self, width: int, num_heads: int, hidden_width: int, bias: bool = True) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=bias), nn.LayerNorm(width, bias=bias)
        self.attention = PlainAttention(width, num_heads, bias)
        self.feedforward = PlainFeedForward(width, hidden_width, bias)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.norm1(hidden))
        return hidden + self.feedforward(self.norm2(hidden))


class PlainHead(nn.Module):
    """The final norm and the projection to logits [B, T, V]."""

    def __init__(self, vocab_size: int, width: int, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.weight = nn.Parameter(torch.empty(vocab_size, width))
        self.bias = nn.Parameter(torch.empty(vocab_size)) if bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(self.norm(hidden), self.weight, self.bias)


class PlainLanguageModel(nn.Module):
    """Pre-norm blocks with GELU and without dropout, for samples of up to `length` tokens."""

    def __init__(self, vocab_size: int, config: ModelConfig, length: int) -> None:
        super().__init__()
        assert config.norm == "pre" and config.activation == "gelu" and not config.dropout
        assert config.position != "rotary"
        self.embedding = PlainEmbedding(vocab_size, config, length)
        self.blocks = nn.ModuleList(
            PlainBlock(config.d_model, config.num_heads, config.d_feedforward) for _ in range(config.num_layers)
        )
        self.head = PlainHead(vocab_size, config.d_model, bias=not config.tie_embeddings)
        if config.tie_embeddings:
            self.head.weight = self.embedding.embedding.weight

    @property
    def layers(self) -> list[nn.Module]:
        """In order, to be cut into stages."""
        return [self.embedding, *self.blocks, self.head]

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] to logits [B, T, V]."""
        return nn.Sequential(*self.layers)(tokens)


def sum_of_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum of the cross-entropies of `targets` [B, T]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
