"""The decoder-only language model."""

from torch import Tensor, nn

from hvd_transformer.config.schema import ModelConfig
from hvd_transformer.models.layers import Block, TokenEmbedding, VocabularyHead
from hvd_transformer.nn.contracts import Layer, TensorSplit
from hvd_transformer.nn.dropout import number_dropouts


class LanguageModel(nn.Module):
    """Predicts each next token. `layers` is the whole model, in order: embedding, blocks, head."""

    def __init__(self, vocab_size: int, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(vocab_size, config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.head = VocabularyHead(vocab_size, config)
        if config.tie_embeddings:
            self.head.weight = self.embedding.embedding.weight
        number_dropouts(self)

    @property
    def layers(self) -> list[nn.Module]:
        return [self.embedding, *self.blocks, self.head]

    def cuts(self, vocabulary: bool) -> dict[str, TensorSplit]:
        """How ranks may share the weights, by name; the rows of the embedding and of the output layer with
        `vocabulary`."""
        cuts = {
            f"blocks.{number}.{name}": cut for number in range(len(self.blocks)) for name, cut in Block.CUTS.items()
        }
        if vocabulary:
            cuts |= dict.fromkeys(("embedding.embedding.weight", "head.weight", "head.bias"), TensorSplit(0))
        names = {name for name, _ in self.named_parameters()}  # a tied weight has one name alone
        return {name: cut for name, cut in cuts.items() if name in names}

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


def language_model_layers(model: LanguageModel) -> list[Layer]:
    """The pipeline layers, from token numbers to the sum of the cross-entropies."""
    return [
        Layer("embedding", model.embedding, model.embedding, recompute=False),
        *(Layer(f"blocks.{number}", block, block) for number, block in enumerate(model.blocks)),
        Layer("head", model.head, model.head.loss, recompute=False),  # it computes its gradients in forward
    ]
