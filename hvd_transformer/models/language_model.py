"""The decoder-only language model: an ordered list of layers, so that a pipeline can cut it anywhere."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvd_transformer.config.schema import ModelConfig
from hvd_transformer.models.dropout import number_dropouts
from hvd_transformer.models.layers import Block, TokenEmbedding
from hvd_transformer.models.linear import Product
from hvd_transformer.models.losses import projected_cross_entropy
from hvd_transformer.models.shares import Cut, Part


class LanguageModelHead(Product):
    """The final norm (pre-norm models) and the vocabulary projection, with its loss."""

    def __init__(self, vocab_size: int, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.d_model) if config.norm == "pre" else nn.Identity()
        self.weight: Tensor = nn.Parameter(torch.empty(vocab_size, config.d_model))
        # As in the tutorial, a free output layer has a bias; tied, it is the embedding's matrix alone.
        self.bias = None if config.tie_embeddings else nn.Parameter(torch.zeros(vocab_size))
        self.loss_chunk = config.loss_chunk
        self.part: Part | None = None  # of the vocabulary, where weight and bias have some rows alone
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, T, D] to logits [B, T, V], or of its part."""
        return F.linear(self.norm(hidden), self.weight, self.bias)

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Sum of the cross-entropies of `targets` [B, T]."""
        values = self.norm(hidden).flatten(0, 1)
        return projected_cross_entropy(
            values, self.weight, self.bias, targets.flatten(), self.loss_chunk, self.take_product, self.part
        )


class LanguageModel(nn.Module):
    """Predicts each next token. `layers` is the whole model, in order: embedding, blocks, head."""

    def __init__(self, vocab_size: int, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(vocab_size, config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.head = LanguageModelHead(vocab_size, config)
        if config.tie_embeddings:
            self.head.weight = self.embedding.embedding.weight
        number_dropouts(self)

    @property
    def layers(self) -> list[nn.Module]:
        return [self.embedding, *self.blocks, self.head]

    def cuts(self, vocabulary: bool) -> dict[str, Cut]:
        """How ranks may share the weights, by name; the rows of the embedding and of the output layer with
        `vocabulary`."""
        cuts = {
            f"blocks.{number}.{name}": cut for number in range(len(self.blocks)) for name, cut in Block.CUTS.items()
        }
        if vocabulary:
            cuts |= dict.fromkeys(("embedding.embedding.weight", "head.weight", "head.bias"), Cut(0))
        return {name: cut for name, cut in cuts.items() if name in dict(self.named_parameters())}

    @property
    def dropping_shares(self) -> list[str]:
        """The names of the dropouts that drop from what such ranks share."""
        return [f"blocks.{number}.{name}" for number in range(len(self.blocks)) for name in Block.DROPPING_SHARES]

    def hidden(self, tokens: Tensor) -> Tensor:
        """Token numbers [B, T] to the last block's output [B, T, D]."""
        hidden: Tensor = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def forward(self, tokens: Tensor) -> Tensor:
        """Token numbers [B, T] to logits [B, T, V]."""
        logits: Tensor = self.head(self.hidden(tokens))
        return logits

    def loss(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        """(sum of the cross-entropies, number of tokens) of `targets` [B, T] after `tokens` [B, T]."""
        return self.head.loss(self.hidden(tokens), targets), targets.numel()
