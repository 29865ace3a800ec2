"""What tasks of the decoder-only model have in common, whatever their data are."""

import torch
from torch import nn

from hvd_transformer.config.schema import Config
from hvd_transformer.errors import UserError
from hvd_transformer.models.language_model import LanguageModel, language_model_layers
from hvd_transformer.nn.contracts import Layer, MicroBatch
from hvd_transformer.tasks.task import ModelSketch, Task


class DecoderTask(Task):
    """Predicts each next token by a `LanguageModel`. The tokenizer is the only one of `tokenizers`."""

    document_end: int | None = None
    """The token after which another document begins that is apart from it; None: all is one text."""

    def make_model(self) -> nn.Module:
        model = LanguageModel(self.rows, self.config.model)
        model.head.smoothing = self.config.training.label_smoothing
        return model

    @property
    def rows(self) -> int:
        """Rows of the embedding matrix. Raises `UserError` if the tokenizer has more tokens."""
        tokens, rows = self.tokenizers[""].vocab_size, self.config.model.vocab_size
        if rows is not None and rows < tokens:
            raise UserError(f"model.vocab_size={rows}: must be at least {tokens}, the tokens of the tokenizer")
        return rows or tokens

    @classmethod
    def layer_names(cls, config: Config) -> list[str]:
        return ["embedding", *(f"blocks.{number}" for number in range(config.model.num_layers)), "head"]

    @classmethod
    def sketch(cls, config: Config, vocab_size: int, num_samples: int) -> ModelSketch:
        model = LanguageModel(config.model.vocab_size or vocab_size, config.model)
        tokens = torch.zeros(num_samples, config.data.sequence_length, dtype=torch.int64)
        document_end = -1 if config.data.document_mask else None  # another token than all of these
        layers, batch = language_model_layers(model, document_end), MicroBatch((tokens,), (tokens,))
        return ModelSketch(model, layers, batch, model.cuts(config.parallel.vocab_parallel))

    @property
    def layers(self) -> list[Layer]:
        assert isinstance(self.model, LanguageModel)
        return language_model_layers(self.model, self.document_end)
