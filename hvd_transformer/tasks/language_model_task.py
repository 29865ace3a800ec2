"""The language modelling task: token files in windows or columns, and the decoder-only model."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from torch import Tensor

from hvd_transformer.config.batch_size import step_samples
from hvd_transformer.config.mixture import mixed_sources, origin, source_names
from hvd_transformer.config.schema import LEARNED_TOKENIZERS, Config
from hvd_transformer.data.batches import Batch, ColumnDataset, WindowDataset, evaluation_batches
from hvd_transformer.data.blend import Blend, BlendedDataset, blend_sizes
from hvd_transformer.data.prepare_mixture import prepare_sources, prepare_split
from hvd_transformer.data.prepare_text import prepare_corpus
from hvd_transformer.data.prepared import PreparedData
from hvd_transformer.data.pretrained_tokenizer import PretrainedTokenizer
from hvd_transformer.data.sampler import ColumnSampler, Replica, StepSampler
from hvd_transformer.data.text_corpus import open_text
from hvd_transformer.data.token_file import MixedTokens, Tokens
from hvd_transformer.data.tokenizers import Tokenizer
from hvd_transformer.errors import UserError
from hvd_transformer.inference.generation import Sampling, generate
from hvd_transformer.models.flops import language_model_flops
from hvd_transformer.nn.contracts import MicroBatch
from hvd_transformer.tasks.decoder_task import DecoderTask
from hvd_transformer.tasks.task import EvaluationSpec, PrepareContext

# Of a text sample, at most: tokens of the prompt, and tokens that continue it.
_PROMPT_TOKENS, _NEW_TOKENS = 32, 128


class LanguageModelTask(DecoderTask):
    """Predicts each next token of a text."""

    data: PreparedData

    def __init__(self, config: Config, data: PreparedData, replica: Replica) -> None:
        super().__init__(config, data, replica)
        self.length = config.data.sequence_length
        self.sampler: StepSampler | ColumnSampler = StepSampler(0, 1, 1, replica)
        self.targets_per_step = 1  # no steps without a training split
        self.document_end = self._document_end() if config.data.document_mask else None
        if "train" in data.splits:
            self._begin_training(data.splits["train"])
        for split, tokens in data.splits.items():
            shortest = min(map(len, _files(tokens)))
            if split != "train" and shortest < 2:
                raise UserError(
                    f"{origin(config.data)}: the {split} split has {shortest} tokens; evaluation needs at least 2"
                )

    def _document_end(self) -> int:
        """The token that ends a document. Raises `UserError` if there are no documents."""
        if "train" in self.data.splits and not self.data.has_documents:
            raise UserError(
                f"data.document_mask=true: {origin(self.config.data)} has no documents; give JSON lines (.jsonl), "
                "Parquet files, or token files with end tokens"
            )
        found = self.data.tokenizer.document_end
        if found is None:
            raise UserError("data.document_mask=true: the tokenizer has no end-of-document token")
        return found

    def _begin_training(self, tokens: Tokens | MixedTokens) -> None:
        config, training, replica, length = self.config, self.config.training, self.replica, self.length
        num_samples = step_samples(training, replica.size)
        self.targets_per_step = num_samples * length
        self.samples: WindowDataset | BlendedDataset | ColumnDataset
        shortest = min(map(len, _files(tokens)))
        if isinstance(tokens, MixedTokens):
            needed = length + 1
            self.samples = self._mixture(tokens)
            self.sampler = StepSampler(self.samples.num_items, num_samples, training.batch_samples, replica)
        elif config.data.batching == "windows":
            needed = length + 1
            self.samples = WindowDataset(tokens, length, config.seed)
            self.sampler = StepSampler(self.samples.num_items, num_samples, training.batch_samples, replica)
        else:
            needed = 2 * training.batch_samples
            self.samples = ColumnDataset(tokens, training.batch_samples, length)
            num_stretches = num_samples // (training.batch_samples * training.accumulation)
            self.sampler = ColumnSampler(self.samples.num_items, num_stretches, training.accumulation, replica)
        if shortest < needed:
            raise UserError(
                f"{origin(config.data)}: the training split has {shortest} tokens, but one sample of "
                f"data.sequence_length={length} needs {needed}"
            )

    def _mixture(self, tokens: MixedTokens) -> BlendedDataset:
        seed, sources = self.config.seed, [source for source in mixed_sources(self.config.data) if source.weight != 0]
        datasets = [WindowDataset(file, self.length, seed + number) for number, file in enumerate(tokens.files)]
        available = [dataset.num_items for dataset in datasets]
        weights, epochs = [source.weight for source in sources], [source.epochs for source in sources]
        return BlendedDataset(datasets, blend_sizes(available, weights, epochs))

    @classmethod
    def prepare(cls, config: Config, context: PrepareContext) -> PreparedData:
        chosen = config.data.tokenizer
        tokenizer = None if chosen in LEARNED_TOKENIZERS else PretrainedTokenizer.open(Path(chosen).expanduser())
        return prepare_sources(config.data, tokenizer, context)

    @classmethod
    def prepare_evaluation(cls, config: Config, context: PrepareContext, wanted: EvaluationSpec) -> PreparedData:
        data, tokenizer = config.data, wanted.tokenizers[""]
        if wanted.path is None:
            return prepare_split(data, wanted.split, tokenizer, context)
        return prepare_corpus(data, open_text(data, wanted.path, wanted.split), tokenizer, context)

    def describe(self) -> str:
        return f"{len(self.data.splits['train']):,} training tokens, vocabulary {self.data.tokenizer.vocab_size:,}"

    @property
    def tokenizers(self) -> Mapping[str, Tokenizer]:
        return {"": self.data.tokenizer}

    def batch(self, epoch: int, items: range) -> Batch:
        return self.samples.batch(epoch, items)

    def has_split(self, split: str) -> bool:
        return split in self.data.splits

    def evaluation_batches(self, split: str) -> Iterator[Batch]:
        return chain.from_iterable(self._evaluation_parts(split))

    def evaluation_parts(self, split: str) -> Mapping[str, Iterator[Batch]]:
        """Evaluation batches by source for a mixture; otherwise under one empty name."""
        tokens = self.data.splits[split]
        if not isinstance(tokens, MixedTokens):
            return {"": self.evaluation_batches(split)}
        return dict(zip(tokens.names, self._evaluation_parts(split), strict=True))

    @property
    def metric_names(self) -> list[str]:
        """With the losses of the sources that an evaluation has samples of."""
        tokens = self.data.splits.get("valid")
        if not isinstance(tokens, MixedTokens):
            return super().metric_names
        counts = zip(tokens.names, self._evaluation_windows("valid"), strict=True)
        return [*super().metric_names, *(f"{name}_loss" for name, count in counts if count)]

    @classmethod
    def possible_metrics(cls, config: Config) -> list[str]:
        return [*super().possible_metrics(config), *(f"{name}_loss" for name in source_names(config.data))]

    def _evaluation_parts(self, split: str) -> list[Iterator[Batch]]:
        """The batches of each token file."""
        batch_size = self.config.training.eval_batch_size or self.config.training.batch_samples
        return [
            evaluation_batches(tokens, self.length, batch_size, self.replica, limit)
            for tokens, limit in zip(_files(self.data.splits[split]), self._evaluation_windows(split), strict=True)
        ]

    def _evaluation_windows(self, split: str) -> Sequence[int]:
        """How many windows of each token file are evaluated."""
        most = self.eval_samples
        windows = [-(-(len(tokens) - 1) // self.length) for tokens in _files(self.data.splits[split])]
        if most is None or most >= sum(windows):
            return windows
        return Blend(windows).counts(most)  # of a mixture, some of each source

    def micro_batch(self, batch: tuple[Tensor, ...]) -> MicroBatch:
        inputs, targets = batch
        return MicroBatch((inputs,), (targets,))

    def num_targets(self, batch: tuple[Tensor, ...]) -> int:
        return batch[1].numel()

    def flops(self, batch: tuple[Tensor, ...]) -> float:
        samples, length = batch[0].shape
        return language_model_flops(self.config.model, self.rows, (samples, length))

    def text_samples(self, split: str, number: int) -> Sequence[Mapping[str, str]]:
        """Continuations of passages that are spread evenly over the split, the first one at its beginning.

        Prompt and continuation together have at most `data.sequence_length` tokens, the length that the model learns.
        """
        files, tokenizer = _files(self.data.splits[split]), self.data.tokenizer
        size = min(_PROMPT_TOKENS, max(1, self.length // 4))
        chosen = [files[place % len(files)] for place in range(number)]  # of a mixture, its sources in turn
        starts = [len(tokens) * place // number for place, tokens in enumerate(chosen)]
        prompts = [tokens[start : start + size].tolist() for tokens, start in zip(chosen, starts, strict=True)]
        sampling = Sampling(seed=self.config.seed)
        ends = [] if tokenizer.document_end is None else [tokenizer.document_end]
        found = generate(
            self.model, prompts, _NEW_TOKENS, sampling, self.length, lambda *_: self.tick(), ends, tokenizer.vocab_size
        )
        return [
            {"prompt": tokenizer.decode(prompt), "continuation": tokenizer.decode(more)}
            for prompt, more in zip(prompts, found, strict=True)
        ]


def _files(tokens: Tokens | MixedTokens) -> Sequence[Tokens]:
    """The token files of a split: of a mixture, one per source."""
    return tokens.files if isinstance(tokens, MixedTokens) else [tokens]
