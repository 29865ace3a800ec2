"""Any task without data: its model as `plan` sketches it, on random tokens of full length."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor, nn

from hvd_transformer.config.batch_size import step_samples
from hvd_transformer.config.schema import Config
from hvd_transformer.data.sampler import Replica, StepSampler
from hvd_transformer.nn.contracts import Layer, MicroBatch, TensorSplit
from hvd_transformer.parallel.deferred_init import deferred_init
from hvd_transformer.planning.memory_plan import batch_samples
from hvd_transformer.tasks.registry import task_class
from hvd_transformer.tasks.task import Batch, Data, ModelSketch, PrepareContext, Task

_SPECIAL_TOKENS = 4  # at the start of a vocabulary, padding among them
_SAMPLES = 2**40  # of an epoch, which no benchmark reaches


def samples_per_step(config: Config, replicas: int) -> int:
    """Samples of a step of all replicas together."""
    return step_samples(config.training, replicas) * batch_samples(config) // config.training.batch_samples


class SyntheticTask(Task):
    """A task of this configuration on random tokens; each replica has others. Raises `UserError` if the task has no
    `sketch`."""

    def __init__(self, config: Config, vocab_size: int, replica: Replica) -> None:
        super().__init__(config, None, replica)
        self._vocab_size = vocab_size
        self._micro_batch = cache(self._make_micro_batch)
        self._per_step = samples_per_step(config, replica.size)
        self.sampler = StepSampler(_SAMPLES, self._per_step, batch_samples(config), replica)
        self.targets_per_step = self.num_targets((torch.zeros(self._per_step),))

    @property
    def lookups_per_step(self) -> int:
        return self._micro_batch(1).inputs[0].numel() * self._per_step

    def make_model(self) -> nn.Module:
        found = self._sketch(1)
        self._layers, self._cuts = found.layers, found.cuts
        return found.model

    @classmethod
    def prepare(cls, config: Config, context: PrepareContext) -> Data:
        raise NotImplementedError("a synthetic task has no data")

    def describe(self) -> str:
        return f"random tokens, vocabulary {self._vocab_size:,}"

    @property
    def layers(self) -> Sequence[Layer]:
        assert self.model is not None  # made at first use
        return self._layers

    @property
    def cuts(self) -> Mapping[str, TensorSplit]:
        assert self.model is not None
        return self._cuts

    def batch(self, epoch: int, items: range) -> Batch:
        """One number per sample [B]: `micro_batch` has the tensors."""
        return (torch.zeros(len(items)),)

    def micro_batch(self, batch: Batch) -> MicroBatch:
        return self._micro_batch(batch[0].size(0))

    def num_targets(self, batch: Batch) -> int:
        return self._micro_batch(1).targets[-1].numel() * batch[0].size(0)

    def has_split(self, split: str) -> bool:
        return False

    def evaluation_batches(self, split: str) -> Iterator[Batch]:
        return iter(())

    def _sketch(self, num_samples: int) -> ModelSketch:
        return task_class(self.config).sketch(self.config, self._vocab_size, num_samples)

    def _make_micro_batch(self, num_samples: int) -> MicroBatch:
        found: list[MicroBatch] = []

        def build() -> nn.Module:
            sketch = self._sketch(num_samples)
            found.append(sketch.micro_batch)
            return sketch.model

        deferred_init(build)  # a second model, whose weights take no memory
        draw = torch.Generator().manual_seed(self.replica.rank)
        inputs = tuple(self._random(tensor, draw) for tensor in found[-1].inputs)
        return MicroBatch(tuple(map(self._pinned, inputs)), tuple(map(self._pinned, found[-1].targets)))

    def _pinned(self, tensor: Tensor) -> Tensor:
        """Pin the batch's memory for copies to a GPU, as training does."""
        on_gpu = torch.cuda.is_available() and self.config.training.device != "cpu"
        return tensor.pin_memory() if on_gpu else tensor

    def _random(self, tensor: Tensor, draw: torch.Generator) -> Tensor:
        if tensor.dtype != torch.int64:  # a mask
            return torch.ones_like(tensor)
        low = min(_SPECIAL_TOKENS, self._vocab_size - 1)
        return torch.randint(low, self._vocab_size, tensor.shape, generator=draw)
