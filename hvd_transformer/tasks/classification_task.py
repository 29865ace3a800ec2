"""The classification task: labelled texts, and the encoder with a pooled head."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hvd_transformer.config.schema import Config
from hvd_transformer.data.prepare_examples import TrainedVocabulary, prepare_examples
from hvd_transformer.data.prepared import PreparedExamples
from hvd_transformer.data.published import source_path
from hvd_transformer.data.sampler import Replica
from hvd_transformer.data.splits import ExampleSource
from hvd_transformer.data.tables import TableFiles
from hvd_transformer.data.tokenizers import PAD, Tokenizer
from hvd_transformer.errors import UserError
from hvd_transformer.inference.predict import padded
from hvd_transformer.models.classifier import Classifier, classifier_layers
from hvd_transformer.models.flops import classifier_flops
from hvd_transformer.nn.contracts import Layer, MicroBatch
from hvd_transformer.tasks.metrics import classification_metrics
from hvd_transformer.tasks.task import Batch, EvaluationSpec, ExampleTask, ModelSketch, PrepareContext

ROLE = "text"
_MOST_SHOWN = 50  # labels on the screen


class ClassificationTask(ExampleTask):
    """Predicts the label of a text. With class weights the sum of the losses is weighted, but still divided by the
    number of samples."""

    unit = "samples"
    data: PreparedExamples

    def __init__(self, config: Config, data: PreparedExamples, replica: Replica) -> None:
        super().__init__(config, data, replica)
        self.labels, positive = data.labels, config.data.positive_label
        if positive is not None and positive not in self.labels:
            labels = ", ".join(self.labels)
            raise UserError(f"data.positive_label={positive}: no such label; the labels are {labels}")
        # The class whose precision, recall and F1 are reported: as configured, else the second of two, else none.
        second_of_two = 1 if len(self.labels) == 2 else None
        self.positive = second_of_two if positive is None else self.labels.index(positive)
        self.num_sums = 1 + 3 * len(self.labels)
        self.weights = self.class_weights()

    def make_model(self) -> nn.Module:
        config, tokenizer = self.config, self.data.tokenizers[ROLE]
        smoothing = config.training.label_smoothing
        return Classifier(tokenizer.vocab_size, len(self.labels), config.model, smoothing, self.weights)

    @classmethod
    def prepare(cls, config: Config, context: PrepareContext) -> PreparedExamples:
        return prepare_examples(config.data, open_examples(config, context), (ROLE,), context=context)

    @classmethod
    def prepare_evaluation(cls, config: Config, context: PrepareContext, wanted: EvaluationSpec) -> PreparedExamples:
        data, state = config.data, wanted.state
        if wanted.path is not None:
            source = TableFiles(data, context.should_stop).open_split(wanted.path, wanted.split)
        else:
            source = open_examples(config, context).only(wanted.split, f"data.source={data.source}")
        learned = TrainedVocabulary({ROLE: wanted.tokenizers[""]}, state["labels"])
        found = prepare_examples(data, source, (ROLE,), learned=learned, context=context)
        counts = state.get("label_counts")
        if counts is None and data.class_weights == "balanced":
            raise UserError("data.class_weights=balanced: the checkpoint is too old to hold the counts of the labels")
        return replace(found, label_counts=counts)

    def describe(self) -> str:
        counts = self.data.label_counts
        assert counts is not None
        shown = [f"{label} {count:,}" for label, count in zip(self.labels, counts, strict=True)][:_MOST_SHOWN]
        more = len(self.labels) - len(shown)
        classes = ", ".join(shown) + (f", and {more:,} more labels" if more else "")
        vocabulary = f"vocabulary {self.data.tokenizers[ROLE].vocab_size:,}"
        return f"{len(self.data.splits['train']):,} training texts ({classes}), {vocabulary}"

    @classmethod
    def layer_names(cls, config: Config) -> list[str]:
        return ["embedding", *(f"blocks.{number}" for number in range(config.model.num_layers)), "head"]

    @classmethod
    def sketch(cls, config: Config, vocab_size: int, num_samples: int) -> ModelSketch:
        """The model for texts of maximum length, with two classes."""
        model = Classifier(vocab_size, 2, config.model)
        tokens = torch.zeros(num_samples, config.data.sequence_length, dtype=torch.int64)
        batch = MicroBatch((tokens, tokens != PAD), (torch.zeros(num_samples, dtype=torch.int64),))
        return ModelSketch(model, classifier_layers(model), batch, model.cuts(config.parallel.vocab_parallel))

    @property
    def layers(self) -> list[Layer]:
        assert isinstance(self.model, Classifier)
        return classifier_layers(self.model)

    @property
    def tokenizers(self) -> Mapping[str, Tokenizer]:
        return {"": self.data.tokenizers[ROLE]}

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"labels": self.labels, "label_counts": self.data.label_counts}

    def collate(self, split: str, numbers: NDArray[np.int64]) -> Batch:
        """Texts [B, T] and labels [B]."""
        examples = self.data.splits[split]
        assert examples.labels is not None
        labels = examples.labels[:][numbers].astype(np.int64)
        texts, pad = [examples.texts[ROLE][number] for number in numbers], self.data.tokenizers[ROLE].pad
        return padded(texts, pad), torch.from_numpy(labels)

    def micro_batch(self, batch: Batch) -> MicroBatch:
        tokens, labels = batch
        return MicroBatch((tokens, tokens != self.data.tokenizers[ROLE].pad), (labels,))

    def num_targets(self, batch: Batch) -> int:
        return batch[1].numel()

    def flops(self, batch: Batch) -> float:
        samples, length = batch[0].shape
        return classifier_flops(self.config.model, len(self.labels), (samples, length))

    def metrics(self, sums: Sequence[float], count: int) -> dict[str, float]:
        counts = np.array(sums[1:]).reshape(3, -1)
        return {"loss": sums[0] / count} | classification_metrics(counts, self.positive)

    @classmethod
    def possible_metrics(cls, config: Config) -> list[str]:
        """Metrics with and without a positive class: only the data say whether there is one."""
        return ["loss", *classification_metrics(np.ones((3, 2)), positive=1)]

    def class_weights(self) -> Tensor | None:
        """The configured weights [C]; "balanced" as in scikit-learn: samples / (classes × samples of the class).

        Raises `UserError` if they do not fit the labels.
        """
        given = self.config.data.class_weights
        if given is None:
            return None
        if given == "balanced":
            counts = np.array(self.data.label_counts)
            if not counts.all():
                raise UserError(
                    f"data.class_weights=balanced: no sample with the label {self.labels[int(counts.argmin())]} is "
                    "left in the training split; see data.sequence_length and data.too_long"
                )
            return torch.from_numpy(counts.sum() / (len(self.labels) * counts))
        assert isinstance(given, dict)
        if odd := sorted(given.keys() ^ set(self.labels)):
            problem = f"{odd[0]} is not a label" if odd[0] in given else f"the label {odd[0]} is missing"
            raise UserError(f"data.class_weights: {problem}; the labels are {', '.join(self.labels)}")
        return torch.tensor([given[label] for label in self.labels])


def open_examples(config: Config, context: PrepareContext) -> ExampleSource:
    """The labelled texts of `data.source`. Raises `UserError`."""
    return TableFiles(config.data, context.should_stop).open(source_path(config.data, {}, context), config.seed)
