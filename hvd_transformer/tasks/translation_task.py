"""The translation task: pairs of sentences, and the encoder-decoder model."""

from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from hvd_transformer.comm.group import Group
from hvd_transformer.config.schema import Config
from hvd_transformer.data.parallel_text import PairFiles
from hvd_transformer.data.prepare_examples import TrainedVocabulary, prepare_examples
from hvd_transformer.data.prepared import PreparedExamples, tokenizer_prefix
from hvd_transformer.data.published import PAIRS, source_path
from hvd_transformer.data.splits import ExampleSource
from hvd_transformer.data.tokenizers import BEGIN, END, PAD, Tokenizer
from hvd_transformer.inference.predict import padded, translate_texts
from hvd_transformer.models.encoder_decoder import EncoderDecoder, encoder_decoder_layers
from hvd_transformer.models.flops import encoder_decoder_flops
from hvd_transformer.nn.contracts import Layer, MicroBatch
from hvd_transformer.tasks.metrics import TRANSLATION_METRICS, signature, translation_metrics
from hvd_transformer.tasks.task import Batch, EvaluationSpec, ExampleTask, ModelSketch, PrepareContext

ROLES = ("source", "target")


class TranslationTask(ExampleTask):
    """Predicts each next token of a target from the tokens before it and the source."""

    model: EncoderDecoder
    data: PreparedExamples
    _samples: Sequence[Mapping[str, str]] = ()  # of the last evaluation

    def make_model(self) -> EncoderDecoder:
        source, target = (self.data.tokenizers[role].vocab_size for role in ROLES)
        return EncoderDecoder(source, target, self.config.model, self.config.training.label_smoothing)

    @classmethod
    def prepare(cls, config: Config, context: PrepareContext) -> PreparedExamples:
        shared = config.model.share_embeddings
        return prepare_examples(config.data, open_pairs(config, context), ROLES, shared=shared, context=context)

    @classmethod
    def prepare_evaluation(cls, config: Config, context: PrepareContext, wanted: EvaluationSpec) -> PreparedExamples:
        data, shared = config.data, config.model.share_embeddings
        if wanted.path is not None:
            source = PairFiles(data, context.should_stop).open_split(wanted.path, wanted.split)
        else:
            source = open_pairs(config, context).only(wanted.split, f"data.source={data.source}")
        learned = TrainedVocabulary(
            {role: wanted.tokenizers[tokenizer_prefix(role, ROLES, shared)] for role in ROLES}, []
        )
        return prepare_examples(data, source, ROLES, shared=shared, learned=learned, context=context)

    def describe(self) -> str:
        source, target = (f"{self.data.tokenizers[role].vocab_size:,}" for role in ROLES)
        shared = self.config.model.share_embeddings
        vocabulary = f"vocabulary {source}" if shared else f"vocabularies {source} and {target}"
        return f"{len(self.data.splits['train']):,} training pairs, {vocabulary}"

    @classmethod
    def layer_names(cls, config: Config) -> list[str]:
        model = config.model
        return [
            "source_embedding",
            *(f"encoder.{number}" for number in range(model.num_layers)),
            *(["encoder_norm"] if model.norm == "pre" else []),
            "target_embedding",
            *(f"decoder.{number}" for number in range(model.num_decoder_layers or model.num_layers)),
            "head",
        ]

    @classmethod
    def sketch(cls, config: Config, vocab_size: int, num_samples: int) -> ModelSketch:
        """The model for pairs of maximum length, with vocabularies of equal size."""
        model = EncoderDecoder(vocab_size, vocab_size, config.model)
        source, target = (torch.zeros(num_samples, config.data.length_of(role), dtype=torch.int64) for role in ROLES)
        places = torch.arange(target.numel())
        batch = MicroBatch((source, source != PAD, target), (places, torch.zeros_like(places)))
        return ModelSketch(model, encoder_decoder_layers(model), batch, model.cuts(config.parallel.vocab_parallel))

    @property
    def layers(self) -> list[Layer]:
        return encoder_decoder_layers(self.model)

    @property
    def tokenizers(self) -> Mapping[str, Tokenizer]:
        shared = self.config.model.share_embeddings
        return {tokenizer_prefix(role, ROLES, shared): self.data.tokenizers[role] for role in ROLES}

    @property
    def num_training_targets(self) -> int:
        targets = self.data.splits["train"].texts["target"]
        return len(targets.tokens) + len(targets)  # each ends with </s>

    @property
    def lookups_per_step(self) -> int:
        """Tokens looked up per step, by the longer side of each pair; both sides may share an embedding."""
        return super().lookups_per_step * (2 if self.config.model.share_embeddings else 1)

    def collate(self, split: str, numbers: NDArray[np.int64]) -> Batch:
        """Sources [B, S], and targets that begin with <s> and end with </s> [B, T + 1]."""
        sources, targets = (self.data.splits[split].texts[role] for role in ROLES)
        ends = [np.concatenate([[BEGIN], targets[number], [END]]) for number in numbers]
        return padded([sources[number] for number in numbers]), padded(ends)

    def micro_batch(self, batch: Batch) -> MicroBatch:
        source, target = batch
        goals = target[:, 1:].flatten()
        places = (goals != PAD).nonzero().flatten()
        return MicroBatch((source, source != PAD, target[:, :-1].contiguous()), (places, goals[places]))

    def num_targets(self, batch: Batch) -> int:
        return int((batch[1][:, 1:] != PAD).sum())

    def flops(self, batch: Batch) -> float:
        (samples, sources), (_, ends) = batch[0].shape, batch[1].shape
        vocab_size = self.data.tokenizers["target"].vocab_size
        source, target = (samples, sources), (samples, ends - 1)
        return encoder_decoder_flops(self.config.model, vocab_size, source, target, self.num_targets(batch))

    @property
    def metric_names(self) -> list[str]:
        return self.possible_metrics(self.config)

    @classmethod
    def possible_metrics(cls, config: Config) -> list[str]:
        return [*super().possible_metrics(config), *TRANSLATION_METRICS]

    @property
    def num_positions(self) -> int:
        """The maximum number of tokens of a source, and of a target with its begin token."""
        return self.config.model.max_length

    @property
    def notes(self) -> list[str]:
        return [f"bleu and chrf are sacrebleu's, bleu {signature()}; bleu_words is computed on lower-cased words"]

    def more_metrics(self, split: str, group: Group) -> dict[str, float]:
        """BLEU and chrF of the translations of the split; each replica translates its part, the first one compares."""
        settings, examples, tokenizer = self.config.translation, self.data.splits[split], self.data.tokenizers["target"]
        own: list[tuple[int, str]] = []
        for numbers in self.evaluation_numbers(split):
            sources = [examples.texts["source"][number] for number in numbers]
            texts = translate_texts(
                self.model, self.num_positions, tokenizer, sources, settings, self.config.data.target_length
            )
            own += zip(numbers.tolist(), texts, strict=True)
        every = dict(pair for pairs in group.gather_objects(own) for pair in pairs)
        metrics: dict[str, float] = {}
        if group.rank == 0:
            hypotheses = [every[number] for number in range(len(every))]
            pairs = list(islice(self.data.raw_texts(split), len(every)))
            metrics = translation_metrics(hypotheses, [reference for _, reference in pairs])
            number = self.config.training.text_samples
            self._samples = [
                {"source": source, "reference": reference, "translation": translation}
                for (source, reference), translation in zip(pairs[:number], hypotheses[:number], strict=True)
            ]
        return dict(group.broadcast_object(metrics))

    def text_samples(self, split: str, number: int) -> Sequence[Mapping[str, str]]:
        """The first sentences of the split with the translations that `more_metrics` has found."""
        return self._samples[:number]


def open_pairs(config: Config, context: PrepareContext) -> ExampleSource:
    return PairFiles(config.data, context.should_stop).open(source_path(config.data, PAIRS, context), config.seed)
