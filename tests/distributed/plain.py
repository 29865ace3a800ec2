"""The reference: training in plain torch.nn and torch.optim, of the model of `plain_transformer`.

Two things are taken from the project, and tested elsewhere: the first weights (they come from a seed) and the
shuffled order of the windows (`data.permutation`). What is done with them is written again here.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jobs import SIZE
from plain_muon import closed_form_in_torch
from plain_transformer import PlainTransformer
from torch import Tensor, nn

from hvd_transformer.config import load
from hvd_transformer.config.schema import ModelConfig
from hvd_transformer.data.sampler import Permutation
from hvd_transformer.models.language_model import LanguageModel

Pair = tuple[Tensor, Tensor]  # inputs and targets [B, T]
MODEL = ("norm", "activation", "position", "tie_embeddings", "init_output")  # what the cases' models differ in


@dataclass(frozen=True)
class Case:
    """What is trained and how, whatever the number of ranks. The keys are the configuration's."""

    name: str
    optimizer: str
    lr: float  # the peak rate that the update sees, after scaling
    schedule: str = "constant"
    lr_scaling: str = "none"
    warmup_steps: int = 0
    gamma: float = 0.1
    clip_norm: float | None = 0.5
    momentum: float = 0.0
    weight_decay: float = 0.1
    eps: float = 1e-8
    ema: float | None = None
    norm: str = "pre"
    activation: str = "gelu"
    position: str = "sinusoidal"
    tie_embeddings: bool = True
    init_output: str = "default"
    precision: str = "fp64"
    num_steps: int = 14
    length: int = 12
    seed: int = 3

    def words(self, dp: float) -> list[str]:
        """As settings of hvd-train."""
        scale = {"none": 1.0, "sqrt": math.sqrt(dp), "linear": float(dp)}[self.lr_scaling]
        optimizer = (
            "schedule",
            "lr_scaling",
            "warmup_steps",
            "gamma",
            "clip_norm",
            "momentum",
            "weight_decay",
            "eps",
            "ema",
        )
        return [
            f"seed={self.seed}",
            f"data.sequence_length={self.length}",
            f"training.precision={self.precision}",
            f"training.max_steps={self.num_steps}",
            "training.epochs=100",
            f"optimizer.name={self.optimizer}",
            f"optimizer.lr={self.lr / scale!r}",
            *(f"optimizer.{key}={getattr(self, key)}" for key in optimizer),
            *(f"model.{key}={getattr(self, key)}" for key in MODEL),
        ]

    def fresh_model(self, folder: Path) -> PlainTransformer:
        config = ModelConfig(**SIZE, **{key: getattr(self, key) for key in MODEL})
        return PlainTransformer(len(vocabulary(folder)) + 1, config).to(self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.precision == "fp64" else torch.float32


@dataclass(frozen=True)
class Trained:
    """What `train` gives: of every step, and the last weights by the project's names."""

    losses: list[float]
    norms: list[float]
    rates: list[float]
    weights: dict[str, Tensor]


def vocabulary(folder: Path) -> dict[str, int]:
    """The training split's characters by falling frequency, then by code point; number 0 is <unk>."""
    counts = Counter((folder / "train.txt").read_text(encoding="utf-8"))
    ordered = sorted(counts, key=lambda character: (-counts[character], character))
    return {character: number for number, character in enumerate(ordered, start=1)}


def encode(folder: Path, split: str) -> Tensor:
    numbers = vocabulary(folder)
    return torch.tensor([numbers.get(character, 0) for character in (folder / f"{split}.txt").read_text("utf-8")])


def first_weights(folder: Path, case: Case, words: Sequence[str]) -> dict[str, Tensor]:
    """What the project's model starts from with this seed."""
    torch.manual_seed(case.seed)
    torch.set_default_dtype(case.dtype)
    try:
        model = LanguageModel(len(vocabulary(folder)) + 1, load(overrides=words).model)
    finally:
        torch.set_default_dtype(torch.float32)
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def window_steps(tokens: Tensor, case: Case, samples_a_step: int) -> Iterator[tuple[int, list[Pair]]]:
    """(epoch, the step's samples) for ever: windows in shuffled order, an epoch's last step with what is left."""
    length = case.length
    count = (len(tokens) - 1) // length - 1
    epoch = 0
    while True:
        order = Permutation(count, (case.seed, epoch))[np.arange(count)].tolist()
        assert sorted(order) == list(range(count))
        spare = len(tokens) - count * length
        offset = int(np.random.SeedSequence((case.seed, epoch, 1)).generate_state(1)[0]) % spare
        for first in range(0, count, samples_a_step):
            starts = [offset + number * length for number in order[first : first + samples_a_step]]
            rows = torch.stack([tokens[start : start + length + 1] for start in starts])
            yield epoch, [(rows[:, :-1], rows[:, 1:])]
        epoch += 1


def column_steps(tokens: Tensor, case: Case, columns: int, dp: int, rounds: int) -> Iterator[tuple[int, list[Pair]]]:
    """The PyTorch tutorial's batchify and get_batch; rank r takes its own stretch of the batches, `rounds` a step."""
    rows = len(tokens) // columns
    table = tokens[: rows * columns].view(columns, rows).t()
    batches = []
    for first in range(0, rows - 1, case.length):
        size = min(case.length, rows - 1 - first)
        batches.append((table[first : first + size].t(), table[first + 1 : first + 1 + size].t()))
    cuts = [math.ceil(len(batches) * rank / dp) for rank in range(dp + 1)]
    stretches = [batches[start:stop] for start, stop in zip(cuts, cuts[1:], strict=False)]
    epoch = 0
    while True:
        for first in range(0, max(map(len, stretches)), rounds):
            yield epoch, [pair for stretch in stretches for pair in stretch[first : first + rounds]]
        epoch += 1


def train(folder: Path, case: Case, words: Sequence[str], steps: Iterator[tuple[int, list[Pair]]]) -> Trained:
    """Plain training in one process: the mean of the cross-entropies, clipped by norm, one torch optimizer."""
    model = case.fresh_model(folder).load(first_weights(folder, case, words))
    optimizer = make_optimizer(case, model)
    result, averaged = Trained([], [], [], {}), {}
    for step, (epoch, pairs) in zip(range(case.num_steps), steps, strict=False):
        optimizer.zero_grad()
        total = sum(
            F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
            for inputs, targets in pairs
        )
        loss = total / sum(targets.numel() for _, targets in pairs)
        loss.backward()
        limit = math.inf if case.clip_norm is None else case.clip_norm
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(case, step, epoch)
        optimizer.step()
        decay = 0.0 if case.ema is None else min(case.ema, step / (step + 9))
        for name, weight in model.by_our_names().items():
            averaged[name] = decay * averaged.get(name, 0.0) + (1 - decay) * weight.detach()
        result.losses.append(loss.item())
        result.norms.append(norm.item())
        result.rates.append(learning_rate(case, step, epoch))
    result.weights.update(averaged)
    return result


def evaluate(folder: Path, split: str, case: Case, weights: dict[str, Tensor]) -> float:
    """Mean cross-entropy of every token but the first, window by window."""
    model = case.fresh_model(folder).load(weights)
    tokens = encode(folder, split)
    total = 0.0
    for start in range(0, len(tokens) - 1, case.length):
        piece = tokens[start : start + case.length + 1]
        logits = model(piece[None, :-1])[0]
        total += F.cross_entropy(logits.double(), piece[1:], reduction="sum").item()
    return total / (len(tokens) - 1)


class MuonAndAdam:
    """torch's Muon for the decayed matrices, query, key and value apart, and its AdamW for the others."""

    def __init__(self, groups: list[dict], case: Case) -> None:
        decayed, free = groups
        self._weights = decayed["params"]
        self._parts = [part.detach() for weight in self._weights for part in self._of(weight, weight)]
        self._muon = torch.optim.Muon(
            self._parts, case.lr, weight_decay=case.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        self._adam = torch.optim.AdamW([free], case.lr, (0.9, 0.95), case.eps)
        self.param_groups = self._muon.param_groups + self._adam.param_groups

    def _of(self, weight: Tensor, values: Tensor) -> Sequence[Tensor]:
        stacked = weight.size(0) == 3 * weight.size(1)
        return values.chunk(3) if stacked else [values]

    def zero_grad(self) -> None:
        for weight in self._weights:
            weight.grad = None
        self._adam.zero_grad()

    def step(self) -> None:
        gradients = [part for weight in self._weights for part in self._of(weight, weight.grad)]
        for part, gradient in zip(self._parts, gradients, strict=True):
            part.grad = gradient
        with closed_form_in_torch():
            self._muon.step()
        self._adam.step()


def make_optimizer(case: Case, model: PlainTransformer) -> torch.optim.Optimizer | MuonAndAdam:
    """Biases, norms and embeddings without weight decay."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    free = [weight for weight in model.parameters() if weight.dim() < 2 or id(weight) in embeddings]
    decayed = [weight for weight in model.parameters() if not any(weight is other for other in free)]
    groups = [{"params": decayed, "weight_decay": case.weight_decay}, {"params": free, "weight_decay": 0.0}]
    if case.optimizer == "muon":
        return MuonAndAdam(groups, case)
    if case.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=case.lr, momentum=case.momentum)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[case.optimizer]
    return kind(groups, lr=case.lr, betas=(0.9, 0.95), eps=case.eps)


def learning_rate(case: Case, step: int, epoch: int) -> float:
    """The documented schedules, of the step and the epoch counted from 0."""
    rate = case.lr
    if case.schedule == "step":
        rate *= case.gamma**epoch
    if step < case.warmup_steps:
        return rate * (step + 1) / case.warmup_steps
    if case.schedule == "noam":
        return rate * case.warmup_steps**0.5 / (step + 1) ** 0.5
    if case.schedule == "cosine":
        angle = math.pi * (step - case.warmup_steps) / (case.num_steps - case.warmup_steps)
        return case.lr * case.gamma + case.lr * (1 - case.gamma) * math.cos(angle / 2) ** 2
    if case.schedule == "linear":
        return rate * (case.num_steps - step) / (case.num_steps - case.warmup_steps)
    return rate
