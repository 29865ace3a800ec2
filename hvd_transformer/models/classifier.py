"""The Transformer encoder with a pooled classification head."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvd_transformer.config.schema import ModelConfig
from hvd_transformer.models.layers import Block, TokenEmbedding
from hvd_transformer.models.norms import make_last_norm
from hvd_transformer.nn.contracts import Layer, Tensors
from hvd_transformer.nn.dropout import Dropout, number_dropouts
from hvd_transformer.nn.parallel_layers import Linear, tensor_splits


class PooledHead(nn.Module):
    """The final norm (of pre-norm models), the mean over the tokens of a text, and one logit per class.

    `class_weights` [C]: the weight of a sample of each class.
    """

    def __init__(
        self, num_classes: int, config: ModelConfig, smoothing: float = 0.0, class_weights: Tensor | None = None
    ) -> None:
        super().__init__()
        self.smoothing, self.class_weights = smoothing, class_weights
        self.norm = make_last_norm(config)
        self.dense = Linear(config.d_model, config.d_model)
        self.dropout = Dropout(config.dropout)
        self.output = Linear(config.d_model, num_classes)
        for linear in (self.dense, self.output):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, hidden: Tensor, allowed: Tensor) -> Tensor:
        """[B, T, D] to logits [B, C]; the mean is over the positions `allowed` [B, T]."""
        counts = allowed.to(hidden.dtype)[..., None]
        mean = (self.norm(hidden) * counts).sum(1) / counts.sum(1)
        logits: Tensor = self.output(self.dropout(torch.tanh(self.dense(mean))))
        return logits

    def loss(self, hidden: Tensor, allowed: Tensor, labels: Tensor) -> Tensor:
        """The `classification_loss` of `labels` [B]."""
        logits = self(hidden, allowed)
        return classification_loss(logits, labels, self.smoothing, self.class_weights, training=self.training)


def class_loss(logits: Tensor, labels: Tensor, smoothing: float, class_weights: Tensor | None = None) -> Tensor:
    """The sum of the cross-entropies of `labels` [B] given `logits` [B, C], weighted by `class_weights` [C]."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    weights = None if class_weights is None else class_weights.to(wide, non_blocking=True)
    # With smoothing, torch weights the smoothed part by every class, not by the class of the sample.
    return F.cross_entropy(wide, labels, weight=weights, reduction="sum", label_smoothing=smoothing)


def classification_loss(
    logits: Tensor, labels: Tensor, smoothing: float, class_weights: Tensor | None, *, training: bool
) -> Tensor:
    """`class_loss`; in evaluation a vector [1 + 3 × C]: the loss without smoothing, then the numbers of hits, of
    `labels` [B] and of predictions, the most likely classes of `logits` [B, C], of each class."""
    if training:
        return class_loss(logits, labels, smoothing, class_weights)
    num_classes, predicted = logits.size(-1), logits.argmax(-1)
    hits = torch.where(predicted == labels, labels, 3 * num_classes)  # the last place: of wrong ones
    places = torch.cat([hits, labels + num_classes, predicted + 2 * num_classes])
    # Not `bincount`, for which the host waits until a GPU knows the largest place.
    counts = places.new_zeros(3 * num_classes + 1).scatter_add_(0, places, torch.ones_like(places))[:-1]
    loss = class_loss(logits, labels, 0.0, class_weights)
    return torch.cat([loss[None], counts.to(loss.dtype)])


class Classifier(nn.Module):
    """Assigns a text to one of `num_classes` classes."""

    cuts = tensor_splits  # for tensor parallelism

    def __init__(
        self,
        vocab_size: int,
        num_classes: int,
        config: ModelConfig,
        smoothing: float = 0.0,
        class_weights: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(vocab_size, config.model_copy(update={"tie_embeddings": False}))
        self.blocks = nn.ModuleList(Block(config, causal=False) for _ in range(config.num_layers))
        self.head = PooledHead(num_classes, config, smoothing, class_weights)
        number_dropouts(self)

    def forward(self, tokens: Tensor, allowed: Tensor) -> Tensor:
        """Token numbers [B, T] to logits [B, C]; `allowed` [B, T] marks the tokens that are not padding."""
        hidden: Tensor = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, allowed)
        logits: Tensor = self.head(hidden, allowed)
        return logits


def classifier_layers(model: Classifier) -> list[Layer]:
    """The pipeline layers, from (tokens, allowed) to the sum of the losses."""

    def embed(tokens: Tensor, allowed: Tensor) -> Tensors:
        return model.embedding(tokens), allowed

    return [
        Layer("embedding", model.embedding, embed, recompute=False),
        *(Layer(f"blocks.{number}", block, partial(_block, block)) for number, block in enumerate(model.blocks)),
        Layer("head", model.head, model.head.loss, recompute=False),
    ]


def _block(block: nn.Module, hidden: Tensor, allowed: Tensor) -> Tensors:
    return block(hidden, allowed), allowed
