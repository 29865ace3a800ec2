"""Fine-tuning what a Hugging Face folder holds (`model.pretrained`): the same tasks with its model and tokenizer."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from hvd_transformer.config.schema import Config
from hvd_transformer.data.corpora import open_corpus
from hvd_transformer.data.examples import PreparedExamples
from hvd_transformer.data.prepare import PreparedData, prepare_corpus
from hvd_transformer.data.prepare_examples import Learned, prepare_examples
from hvd_transformer.data.pretrained_tokenizer import PretrainedTokenizer
from hvd_transformer.errors import UserError
from hvd_transformer.models import pretrained
from hvd_transformer.models.classifier import class_loss, confusion
from hvd_transformer.parallel.pipeline import Layer, MicroBatch
from hvd_transformer.pretrained import origin
from hvd_transformer.training.classification_task import ROLE, ClassificationTask, open_rows
from hvd_transformer.training.language_model_task import LanguageModelTask
from hvd_transformer.training.task import Preparing, Sketch, Task

_NAME = "model"  # of the one layer


def folder_of(config: Config) -> Path:
    """The folder of `model.pretrained`."""
    return Path(str(config.model.pretrained)).expanduser()


class PretrainedTask(Task):
    """What both kinds have in common."""

    @classmethod
    def layer_names(cls, config: Config) -> list[str]:
        return [_NAME]

    @classmethod
    def sketch(cls, config: Config, vocab_size: int, num_samples: int) -> Sketch:
        raise UserError(f"{origin(folder_of(config))}: plan knows the layers of this package's own models alone")

    @property
    def files(self) -> Mapping[str, str]:
        return pretrained.config_files(self.model)


class PretrainedClassificationTask(PretrainedTask, ClassificationTask):
    """The label of a text, by an encoder with a new head."""

    new: list[str]

    @classmethod
    def prepare(cls, config: Config, preparing: Preparing) -> PreparedExamples:
        tokenizer = PretrainedTokenizer.read(folder_of(config))
        if not tokenizer.has_pad:
            raise UserError(f"{origin(folder_of(config))}: its tokenizer has no pad token, which fills a batch")
        _check_longest(config, tokenizer.longest)
        rows, learned = open_rows(config, preparing), Learned({ROLE: tokenizer}, None)
        return prepare_examples(config.data, rows, (ROLE,), learned=learned, **preparing._asdict())

    def make_model(self) -> nn.Module:
        model, self.new = pretrained.load_classifier(folder_of(self.config), self.labels)
        _check_longest(self.config, pretrained.num_positions(model))
        self.logits = pretrained.ClassLogits(model)
        self.smoothing, self.weights = self.config.training.label_smoothing, self.class_weights()
        return model

    def describe(self) -> str:
        new = f"; new weights: {', '.join(self.new)}" if self.new else ""
        return super().describe() + new

    @property
    def layers(self) -> list[Layer]:
        return [Layer(_NAME, self.model, self._loss, recompute=False)]

    def micro_batch(self, batch: tuple[Tensor, ...]) -> MicroBatch:
        tokens, labels = batch
        return MicroBatch((tokens, tokens != self.data.tokenizers[ROLE].pad), (labels,))

    def _loss(self, tokens: Tensor, allowed: Tensor, labels: Tensor) -> Tensor:
        logits = self.logits(tokens, allowed)
        if self.model.training:
            return class_loss(logits, labels, self.smoothing, self.weights)
        return torch.cat([class_loss(logits, labels, 0.0, self.weights)[None], confusion(logits, labels)])


class PretrainedLanguageModelTask(PretrainedTask, LanguageModelTask):
    """Each next token of a text, by a causal language model."""

    @classmethod
    def prepare(cls, config: Config, preparing: Preparing) -> PreparedData:
        tokenizer = PretrainedTokenizer.read(folder_of(config))
        corpus = open_corpus(config.data, *preparing[1:])
        return prepare_corpus(config.data, corpus, tokenizer, *preparing)

    def make_model(self) -> nn.Module:
        model = pretrained.load_language_model(folder_of(self.config))
        _check_longest(self.config, pretrained.num_positions(model))
        return model

    @property
    def layers(self) -> list[Layer]:
        return [Layer(_NAME, self.model, self._loss, recompute=False)]

    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        smoothing = self.config.training.label_smoothing if self.model.training else 0.0
        return class_loss(pretrained.next_token_logits(self.model, tokens).flatten(0, 1), targets.flatten(), smoothing)


def _check_longest(config: Config, longest: int | None) -> None:
    if longest is not None and config.data.sequence_length > longest:
        raise UserError(
            f"data.sequence_length={config.data.sequence_length}: longer than {origin(folder_of(config))} can take, "
            f"{longest} tokens"
        )
