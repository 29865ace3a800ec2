"""The reference model: the language model of torch.nn's own layers, made from the same settings."""

import math

import torch
from torch import Tensor, nn

from hvd_transformer.config.schema import ModelConfig

# Their names of a layer's parts, and ours.
PARTS = [
    ("self_attn.in_proj_", "attention.qkv."),
    ("self_attn.out_proj.", "attention.output."),
    ("linear1.", "feedforward.input."),
    ("linear2.", "feedforward.output."),
    ("norm1.", "norm1."),
    ("norm2.", "norm2."),
]


class PlainTransformer(nn.Module):
    """The PyTorch tutorial's model (sinusoidal or learned positions), with the mask that it forgot."""

    def __init__(self, vocab_size: int, config: ModelConfig) -> None:
        super().__init__()
        width = config.d_model
        self.embedding = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(config.max_length, width) if config.position == "learned" else None
        layer = nn.TransformerEncoderLayer(
            width,
            config.num_heads,
            config.d_feedforward,
            config.dropout,
            config.activation,
            batch_first=True,
            norm_first=config.norm == "pre",
        )
        last = nn.LayerNorm(width) if config.norm == "pre" else None
        self.encoder = nn.TransformerEncoder(layer, config.num_layers, last, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocab_size, bias=not config.tie_embeddings)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        width, length = self.embedding.embedding_dim, tokens.size(1)
        weight = self.embedding.weight
        if self.positions is None:
            angles = [
                [position / 10000 ** (channel // 2 * 2 / width) for channel in range(width)]
                for position in range(length)
            ]
            rows = [[(math.sin, math.cos)[i % 2](angle) for i, angle in enumerate(row)] for row in angles]
            added = torch.tensor(rows, dtype=torch.float64).to(weight.dtype)
        else:
            added = self.positions.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=weight.dtype)
        return self.head(self.encoder(self.embedding(tokens) * math.sqrt(width) + added, mask))

    def by_our_names(self) -> dict[str, nn.Parameter]:
        """Its parameters by the names that they have in `LanguageModel`."""
        ours = {"embedding.embedding.weight": self.embedding.weight}
        if self.positions is not None:
            ours["embedding.positions.embedding.weight"] = self.positions.weight
        for number, layer in enumerate(self.encoder.layers):
            for name, parameter in layer.named_parameters():
                theirs, part = next(pair for pair in PARTS if name.startswith(pair[0]))
                ours[f"blocks.{number}.{part}{name.removeprefix(theirs)}"] = parameter
        if self.encoder.norm is not None:
            ours |= {f"head.norm.{name}": parameter for name, parameter in self.encoder.norm.named_parameters()}
        if self.head.weight is not self.embedding.weight:
            ours |= {"head.weight": self.head.weight, "head.bias": self.head.bias}
        return ours

    def load(self, weights: dict[str, Tensor]) -> "PlainTransformer":
        """Takes the weights of a `LanguageModel` by name: each of them, once."""
        ours = self.by_our_names()
        assert weights.keys() == ours.keys()
        with torch.no_grad():
            for name, parameter in ours.items():
                parameter.copy_(weights[name])
        return self


def scatter_weights(model: nn.Module, seed: int = 0) -> None:
    """Random values everywhere: fresh models have zeros and ones that hide what is mixed up."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise * 0.3 + (1.0 if parameter.ndim == 1 else 0.0))
