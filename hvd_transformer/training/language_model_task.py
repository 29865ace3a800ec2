"""Language modelling as a task: token files in windows or columns, and the decoder-only model."""

from collections.abc import Iterator

from torch import Tensor

from hvd_transformer.config.schema import Config, ModelConfig
from hvd_transformer.data.batches import Batch, Columns, Windows, evaluation_batches
from hvd_transformer.data.prepare import PreparedData
from hvd_transformer.data.sampler import ColumnSampler, Replica, WindowSampler
from hvd_transformer.errors import UserError
from hvd_transformer.models.language_model import LanguageModel
from hvd_transformer.parallel.pipeline import Layer, MicroBatch
from hvd_transformer.training.step_size import step_samples


class LanguageModelTask:
    """Implements `training.task.Task`. The model is made on the default device, in the default type."""

    def __init__(self, config: Config, data: PreparedData, replica: Replica) -> None:
        training, length = config.training, config.data.sequence_length
        self.data, self.replica, self.length = data, replica, length
        self.eval_batch_size = training.eval_batch_size or training.batch_size
        self.vocab_size = data.tokenizer.vocab_size
        self.model = LanguageModel(self.vocab_size, config.model)
        self.cuts = self.model.cuts(config.parallel.vocab_parallel)
        self.dropping_shares = self.model.dropping_shares
        num_samples = step_samples(training, replica.size)
        self.usual_count = num_samples * length
        tokens = data.splits["train"]
        self.samples: Windows | Columns
        self.sampler: WindowSampler | ColumnSampler
        if config.data.batching == "windows":
            needed = length + 1
            self.samples = Windows(tokens, length, config.seed)
            self.sampler = WindowSampler(self.samples.num_units, num_samples, training.batch_size, replica)
        else:
            needed = 2 * training.batch_size
            self.samples = Columns(tokens, training.batch_size, length)
            num_stretches = num_samples // (training.batch_size * training.accumulation)
            self.sampler = ColumnSampler(self.samples.num_units, num_stretches, training.accumulation, replica)
        if len(tokens) < needed:
            raise UserError(
                f"data.source={config.data.source}: the training split has {len(tokens)} tokens, but one sample of "
                f"data.sequence_length={length} needs {needed}"
            )
        for split in ("valid", "test"):
            if self.has_split(split) and len(data.splits[split]) < 2:
                raise UserError(
                    f"data.source={config.data.source}: the {split} split has {len(data.splits[split])} tokens; "
                    "evaluation needs at least 2"
                )

    def batch(self, epoch: int, units: range) -> Batch:
        return self.samples.batch(epoch, units)

    def has_split(self, split: str) -> bool:
        return split in self.data.splits

    def evaluation_batches(self, split: str) -> Iterator[Batch]:
        return evaluation_batches(self.data.splits[split], self.length, self.eval_batch_size, self.replica)

    @property
    def layers(self) -> list[Layer]:
        return language_model_layers(self.model)

    def micro_batch(self, batch: tuple[Tensor, ...]) -> MicroBatch:
        inputs, targets = batch
        return MicroBatch((inputs,), (targets,))

    def num_targets(self, batch: tuple[Tensor, ...]) -> int:
        return batch[1].numel()


def layer_names(config: ModelConfig) -> list[str]:
    """The names of `language_model_layers`, without a model."""
    return ["embedding", *(f"blocks.{number}" for number in range(config.num_layers)), "head"]


def language_model_layers(model: LanguageModel) -> list[Layer]:
    """Token numbers in, the sum of the cross-entropies out."""
    return [
        Layer("embedding", model.embedding, model.embedding, recompute=False),
        *(Layer(f"blocks.{number}", block, block) for number, block in enumerate(model.blocks)),
        Layer("head", model.head, model.head.loss, recompute=False),  # it forms its gradients in forward
    ]
