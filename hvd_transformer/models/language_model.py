"""The decoder-only language model."""

from functools import partial

from torch import Tensor, nn

from hvd_transformer.config.schema import ModelConfig
from hvd_transformer.models.documents import Documents, SharedMasks, document_places, document_starts
from hvd_transformer.models.layers import Block, TokenEmbedding, VocabularyHead
from hvd_transformer.nn.contracts import Layer, Tensors
from hvd_transformer.nn.dropout import number_dropouts
from hvd_transformer.nn.parallel_layers import tensor_splits


class LanguageModel(nn.Module):
    """Predicts each next token."""

    cuts = tensor_splits  # for tensor parallelism

    def __init__(self, vocab_size: int, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(vocab_size, config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.head = VocabularyHead(vocab_size, config)
        if config.tie_embeddings:
            self.head.weight = self.embedding.embedding.weight
        number_dropouts(self)

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


def language_model_layers(model: LanguageModel, document_end: int | None = None) -> list[Layer]:
    """The pipeline layers, from token numbers to the sum of the cross-entropies.

    With a `document_end`, the token that ends a document, no document of a window sees another.
    """
    if document_end is not None:
        return _document_layers(model, document_end)
    return [
        Layer("embedding", model.embedding, model.embedding, recompute=False),
        *(Layer(f"blocks.{number}", block, block) for number, block in enumerate(model.blocks)),
        Layer("head", model.head, model.head.loss, recompute=False),  # it computes its gradients in forward
    ]


def _document_layers(model: LanguageModel, document_end: int) -> list[Layer]:
    """Between these layers, hidden vectors travel with the starts of their documents [B, T]: the mask of T × T values
    is made from them once per micro-batch and stage, and never sent."""
    masks = SharedMasks()

    def embed(tokens: Tensor) -> Tensors:
        starts = document_starts(tokens, document_end)
        return model.embedding(tokens, places=document_places(starts)), starts

    def attend(block: Block, hidden: Tensor, starts: Tensor) -> Tensors:
        in_kernels = block.training and block.attention.kernels is not None
        documents = Documents(starts, None if in_kernels else masks.of(starts, hidden.dtype))
        return block(hidden, documents=documents), starts

    def loss(hidden: Tensor, starts: Tensor, targets: Tensor) -> Tensor:
        return model.head.loss(hidden, targets)

    blocks = [block for block in model.blocks if isinstance(block, Block)]
    return [
        Layer("embedding", model.embedding, embed, recompute=False),
        *(Layer(f"blocks.{number}", block, partial(attend, block)) for number, block in enumerate(blocks)),
        Layer("head", model.head, loss, recompute=False),
    ]
