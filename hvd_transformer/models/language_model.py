"""The decoder-only language model."""

from torch import Tensor, nn

from hvd_transformer.config.schema import ModelConfig
from hvd_transformer.models.layers import Block, TokenEmbedding, VocabularyHead
from hvd_transformer.nn.contracts import Layer
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


def language_model_layers(model: LanguageModel) -> list[Layer]:
    """The pipeline layers, from token numbers to the sum of the cross-entropies."""
    return [
        Layer("embedding", model.embedding, model.embedding, recompute=False),
        *(Layer(f"blocks.{number}", block, block) for number, block in enumerate(model.blocks)),
        Layer("head", model.head, model.head.loss, recompute=False),  # it computes its gradients in forward
    ]
