"""The encoder-decoder Transformer (Vaswani et al. 2017)."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from hvd_transformer.config.schema import ModelConfig
from hvd_transformer.models.attention import KVCache
from hvd_transformer.models.layers import Block, DecoderBlock, DecoderCache, TokenEmbedding, VocabularyHead
from hvd_transformer.models.norms import make_last_norm
from hvd_transformer.nn.contracts import Layer, Tensors
from hvd_transformer.nn.dropout import number_dropouts
from hvd_transformer.nn.parallel_layers import tensor_splits


class EncoderDecoder(nn.Module):
    """Predicts each next token of a target from the tokens before it and the whole source.

    With `model.share_embeddings`, source and target have one vocabulary and one embedding.
    """

    cuts = tensor_splits  # for tensor parallelism

    def __init__(
        self, source_vocab_size: int, target_vocab_size: int, config: ModelConfig, smoothing: float = 0.0
    ) -> None:
        super().__init__()
        of_decoder = config.model_copy(update={"num_layers": config.num_decoder_layers or config.num_layers})
        self.source_embedding = TokenEmbedding(source_vocab_size, config)
        self.encoder = nn.ModuleList(Block(config, causal=False) for _ in range(config.num_layers))
        self.encoder_norm = make_last_norm(config)
        self.target_embedding = TokenEmbedding(target_vocab_size, of_decoder)
        self.decoder = nn.ModuleList(DecoderBlock(of_decoder) for _ in range(of_decoder.num_layers))
        self.head = VocabularyHead(target_vocab_size, config, smoothing)
        if config.share_embeddings:
            self.target_embedding.embedding.weight = self.source_embedding.embedding.weight
        if config.tie_embeddings:
            self.head.weight = self.target_embedding.embedding.weight
        number_dropouts(self)

    def encode(self, source: Tensor, allowed: Tensor) -> Tensor:
        """Token numbers [B, S] to the decoder's memory [B, S, D]; `allowed` [B, S] marks what is not padding."""
        hidden: Tensor = self.source_embedding(source)
        for block in self.encoder:
            hidden = block(hidden, allowed)
        memory: Tensor = self.encoder_norm(hidden)
        return memory

    def new_pasts(self) -> list[DecoderCache]:
        """Empty caches, one per decoder block."""
        return [DecoderCache(KVCache(), KVCache()) for _ in self.decoder]

    def decode(
        self, target: Tensor, memory: Tensor | None, allowed: Tensor, pasts: Sequence[DecoderCache] | None = None
    ) -> Tensor:
        """Token numbers [B, T] over `memory` [B, S, D] to the last block's output [B, T, D].

        With `pasts` the tokens continue those in the caches, which need no `memory`.
        """
        hidden: Tensor = self.target_embedding(target, pasts[0].own.length if pasts else 0)
        for number, block in enumerate(self.decoder):
            hidden = block(hidden, memory, allowed, pasts[number] if pasts else None)
        return hidden

    def forward(self, source: Tensor, allowed: Tensor, target: Tensor) -> Tensor:
        """Sources [B, S] and targets [B, T] to logits [B, T, V]."""
        logits: Tensor = self.head(self.decode(target, self.encode(source, allowed), allowed))
        return logits


def encoder_decoder_layers(model: EncoderDecoder) -> list[Layer]:
    """The pipeline layers, from (source, allowed, target) to the sum of the cross-entropies. In between they pass on
    (hidden state of the source, allowed, target), then (memory, allowed, hidden state of the target)."""

    def embed_source(source: Tensor, allowed: Tensor, target: Tensor) -> Tensors:
        return model.source_embedding(source), allowed, target

    def norm(hidden: Tensor, allowed: Tensor, target: Tensor) -> Tensors:
        return model.encoder_norm(hidden), allowed, target

    def embed_target(memory: Tensor, allowed: Tensor, target: Tensor) -> Tensors:
        return memory, allowed, model.target_embedding(target)

    def loss(memory: Tensor, allowed: Tensor, hidden: Tensor, places: Tensor, goals: Tensor) -> Tensor:
        return model.head.loss(hidden, goals, places)

    norms = [] if isinstance(model.encoder_norm, nn.Identity) else [model.encoder_norm]
    return [
        Layer("source_embedding", model.source_embedding, embed_source, recompute=False),
        *(Layer(f"encoder.{number}", block, partial(_encode, block)) for number, block in enumerate(model.encoder)),
        *(Layer("encoder_norm", module, norm, recompute=False) for module in norms),
        Layer("target_embedding", model.target_embedding, embed_target, recompute=False),
        *(Layer(f"decoder.{number}", block, partial(_decode, block)) for number, block in enumerate(model.decoder)),
        Layer("head", model.head, loss, recompute=False),  # it computes its gradients in forward
    ]


def _encode(block: nn.Module, hidden: Tensor, allowed: Tensor, target: Tensor) -> Tensors:
    return block(hidden, allowed), allowed, target


def _decode(block: nn.Module, memory: Tensor, allowed: Tensor, hidden: Tensor) -> Tensors:
    return memory, allowed, block(hidden, memory, allowed)
