"""The output layer over a vocabulary, with its loss."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvd_transformer.config.schema import ModelConfig
from hvd_transformer.models.linear import Product
from hvd_transformer.models.losses import projected_cross_entropy
from hvd_transformer.models.shares import Part


class VocabularyHead(Product):
    """The final norm (pre-norm models) and the vocabulary projection. `smoothing` of targets is for training alone."""

    def __init__(self, vocab_size: int, config: ModelConfig, smoothing: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.d_model) if config.norm == "pre" else nn.Identity()
        self.weight: Tensor = nn.Parameter(torch.empty(vocab_size, config.d_model))
        # As in the tutorial, a free output layer has a bias; tied, it is the embedding's matrix alone.
        self.bias = None if config.tie_embeddings else nn.Parameter(torch.zeros(vocab_size))
        self.loss_chunk, self.smoothing = config.loss_chunk, smoothing
        self.part: Part | None = None  # of the vocabulary, where weight and bias have some rows alone
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., D] to logits [..., V], or of its part."""
        logits: Tensor = F.linear(self.norm(hidden), self.weight, self.bias)
        return logits

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] to logits [..., V] of the whole vocabulary, on every share."""
        own: Tensor = self(hidden)
        if self.part is None:
            return own
        shares, _, total = self.part
        ends = [total * index // shares.count for index in range(shares.count + 1)]
        sizes = [stop - start for start, stop in pairwise(ends)]
        pieces = shares.gather(F.pad(own, (0, max(sizes) - own.size(-1))))
        return torch.cat([piece[..., :size] for piece, size in zip(pieces, sizes, strict=True)], -1)

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Sum of the cross-entropies of `targets` [B, T] after `hidden` [B, T, D]."""
        return self._loss(hidden.flatten(0, 1), targets.flatten())

    def loss_at(self, hidden: Tensor, places: Tensor, targets: Tensor) -> Tensor:
        """The same of `targets` [N] at these `places` [N] of B × T alone: the others are padding, and cost nothing."""
        return self._loss(hidden.flatten(0, 1).index_select(0, places), targets)

    def _loss(self, values: Tensor, targets: Tensor) -> Tensor:
        return projected_cross_entropy(
            self.norm(values),
            self.weight,
            self.bias,
            targets,
            self.loss_chunk,
            self.take_product,
            self.part,
            self.smoothing if self.training else 0.0,
        )
