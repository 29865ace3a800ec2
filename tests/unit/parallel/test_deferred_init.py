"""A model that is built in parts has bit for bit the weights of the same model built whole, and never is whole."""

import logging
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvd_transformer.config.schema import ModelConfig
from hvd_transformer.models.classifier import Classifier
from hvd_transformer.models.encoder_decoder import EncoderDecoder
from hvd_transformer.models.language_model import LanguageModel
from hvd_transformer.nn.contracts import TensorSplit
from hvd_transformer.parallel.deferred_init import DeferredInit, deferred_init
from hvd_transformer.parallel.tensor_parallel import shard_model
from hvd_transformer.planning.pass_memory import AllocationTracker

V = 37  # no multiple of the ranks


def config(**options: Any) -> ModelConfig:
    return ModelConfig(num_layers=2, d_model=16, num_heads=4, d_feedforward=24, max_length=9, **options)


def seeded(make: Callable[[], Any]) -> tuple[Any, Tensor]:
    """What it makes, and the state that it leaves torch's generator in."""
    torch.manual_seed(7)
    return make(), torch.get_rng_state()


def is_deferred(tensor: Tensor) -> bool:
    return tensor.is_meta


def joined(pieces: list[Tensor], split: TensorSplit) -> Tensor:
    """The whole of all ranks' pieces."""
    dim, parts = split
    stacked = [own.chunk(parts, dim) for own in pieces]
    return torch.cat([own for part in zip(*stacked, strict=True) for own in part], dim)


def assert_equal_in_parts(make: Callable[[], Any], vocabulary: bool = True) -> None:
    whole, state = seeded(make)
    splits, shapes = whole.cuts(vocabulary), {name: weight.shape for name, weight in whole.named_parameters()}

    def build(index: int, count: int) -> nn.Module:
        model, init = deferred_init(make)
        assert all(is_deferred(weight) for weight in model.parameters() if weight.ndim > 1)
        assert shard_model(model, model.cuts(vocabulary), index, count, init) == shapes
        return model

    for count in (1, 2, 4):
        parts = []
        for index in range(count):
            model, after = seeded(partial(build, index, count))
            assert torch.equal(after, state)
            parts.append(dict(model.named_parameters()))
        for name, weight in whole.named_parameters():
            pieces = [part[name] for part in parts]
            assert all(type(own) is nn.Parameter and own.requires_grad and own.is_contiguous() for own in pieces)
            if count > 1 and name in splits:
                assert torch.equal(joined(pieces, splits[name]), weight), name
            else:
                assert all(torch.equal(own, weight) for own in pieces), name


OPTIONS = [
    {"norm": norm, "tie_embeddings": tied, "position": position, "activation": activation}
    for norm, tied, (position, activation) in product(
        ("pre", "post"), (True, False), (("sinusoidal", "gelu"), ("learned", "relu"), ("rotary", "gelu"))
    )
]


# --- models of this package -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_language_model(options: dict[str, Any], vocabulary: bool) -> None:
    assert_equal_in_parts(lambda: LanguageModel(V, config(**options)), vocabulary)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_classifier(options: dict[str, Any]) -> None:
    weights = torch.tensor([1.0, 2.0, 3.0])
    assert_equal_in_parts(lambda: Classifier(V, 3, config(**options), class_weights=weights))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_translation_model(options: dict[str, Any], shared: bool) -> None:
    own = config(**options, share_embeddings=shared, num_decoder_layers=1)
    assert_equal_in_parts(lambda: EncoderDecoder(V, V if shared else V + 2, own))


def test_in_double_precision() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert_equal_in_parts(lambda: LanguageModel(V, config()))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("tied", [False, True])
def test_tied_weights_stay_one(tied: bool) -> None:
    model, init = deferred_init(lambda: LanguageModel(V, config(tie_embeddings=tied)))
    shard_model(model, model.cuts(True), 1, 2, init)
    assert (model.head.weight is model.embedding.embedding.weight) == tied


def test_few_weights_are_whole_at_a_time() -> None:
    """Beside the rank's own part: one block and one tensor at most, of a model of 16 blocks."""
    size = config().model_copy(update={"num_layers": 16})
    model, init = deferred_init(lambda: LanguageModel(V, size))
    block = sum(weight.nbytes for weight in model.blocks[0].parameters())
    whole = sum(weight.nbytes for weight in model.parameters())
    with AllocationTracker() as tracker:
        shard_model(model, model.cuts(True), 0, 4, init)
        own = sum(weight.nbytes for weight in model.parameters())
        assert tracker.now == own < 0.4 * whole
        assert own < tracker.take_peak() < own + 1.5 * block


def test_weights_that_are_filled_again_are_not_kept_until_then() -> None:
    def refilled() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(16)))
        for layer in model:
            nn.init.normal_(layer.weight)
        return model

    model, init = deferred_init(refilled)
    with AllocationTracker() as tracker:
        init.materialize(model, lambda name, whole: whole[:2].clone())
        own = sum(weight.nbytes for weight in model.parameters())
        assert own < tracker.take_peak() <= own + 3 * 16 * 16 * 4


def test_weights_that_will_be_loaded_are_not_drawn() -> None:
    model, init = deferred_init(lambda: LanguageModel(V, config()))
    state = torch.get_rng_state()
    shapes = shard_model(model, model.cuts(True), 1, 2, init, draw=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert shapes["blocks.0.attention.qkv.weight"] == (48, 16)
    assert model.blocks[0].attention.qkv.weight.shape == (24, 16)
    for name, weight in model.named_parameters():
        assert name == "head.bias" or not weight.any(), name
        assert weight.is_contiguous() and weight.untyped_storage().nbytes() == weight.nbytes


# --- models of others -------------------------------------------------------------------------------------------------


class Refilled(nn.Module):
    """As many models do: torch.nn's layers, filled again at the end, an index without a vector, a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, 8, padding_idx=2)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 12) for _ in range(2))
        self.norm = nn.BatchNorm1d(8)
        self.scale = nn.Parameter(torch.ones(8))
        self.frozen = nn.Parameter(torch.empty(3).fill_(2.0), requires_grad=False)
        self.frozen.note = "kept"
        self.register_buffer("mask", torch.ones(5, 5, device=self.embedding.weight.device).tril())
        self.table = torch.arange(5.0)
        self.output = nn.Linear(8, V)
        self.apply(self._fill)
        nn.init.kaiming_uniform_(self.output.weight)
        with torch.no_grad():
            self.output.weight[3:5].mul_(2)

    def _fill(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)


def everything(model: nn.Module) -> dict[str, Tensor]:
    return {**model.state_dict(), **{name: value for name, value in vars(model).items() if isinstance(value, Tensor)}}


def test_a_model_of_torchs_layers_is_deferred() -> None:
    whole, state = seeded(Refilled)

    def build() -> nn.Module:
        model, init = deferred_init(Refilled)
        assert is_deferred(model.output.weight) and is_deferred(model.layers[1].linear1.weight)
        init.materialize(model, lambda name, values: values)
        return model

    model, after = seeded(build)
    assert torch.equal(after, state)
    found = everything(model)
    for name, values in everything(whole).items():
        assert torch.equal(found[name], values), name
    assert not model.frozen.requires_grad and model.frozen.note == "kept"


class DrawnAtOnce(nn.Module):
    """Its draws lie between those of torch.nn's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.drawn = nn.Parameter(torch.randn(5))
        self.last = nn.Linear(4, 2)


class Reader(nn.Module):
    """It reads a weight while it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(3, 4)
        self.last.weight.data.copy_(self.first.weight * 2)


class Filled(nn.Module):
    """It fills a weight from another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(3, 4)
        self.last.weight.data.copy_(self.first.weight.data)


class Array(nn.Module):
    """It reads a weight as an array."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.largest = torch.tensor(self.layer.weight.data.numpy().max())


class Copied(nn.Module):
    """Its second layer begins as the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = deepcopy(self.first)


class Truncated(nn.Module):
    """On the meta device torch does not draw these values (from 2.12 on), nor the next class's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        nn.init.trunc_normal_(self.layer.weight, std=0.5)


class Orthogonal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        nn.init.orthogonal_(self.layer.weight)


class Hidden(nn.Module):
    """A tensor that only an attribute refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.noise = nn.Linear(3, 4), torch.empty(5).normal_()


class Listed(nn.Module):
    """Tensors that only a list refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.tables = nn.Linear(3, 4), [torch.empty(5).normal_()]


class Slices(nn.Module):
    """Two parameters in one block of memory."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.empty(2, 3).normal_()
        self.first, self.second = nn.Parameter(both[0]), nn.Parameter(both[1])


class Alias(nn.Module):
    """Two parameters with the same values, which no module ties."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.again = nn.Parameter(self.layer.weight.data)


@pytest.mark.parametrize(
    "kind",
    [
        Alias,
        DrawnAtOnce,
        Reader,
        Array,
        Copied,
        Filled,
        Hidden,
        Listed,
        Orthogonal,
        Slices,
        Truncated,
        partial(nn.LSTM, 3, 4),
    ],
)
def test_a_model_that_cannot_be_deferred_is_built_as_usual(
    kind: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    whole, state = seeded(kind)

    def build() -> nn.Module:
        with caplog.at_level(logging.INFO, "hvd_transformer"):
            model, init = deferred_init(kind)
        init.materialize(model, lambda name, values: values)
        return model

    model, after = seeded(build)
    assert torch.equal(after, state)
    assert "whole on every rank" in caplog.text or (kind is Truncated and torch.__version__.startswith("2.11."))
    found = everything(model)
    for name, values in everything(whole).items():
        assert torch.equal(found[name], values), name


def test_an_error_of_the_model_is_its_own() -> None:
    with pytest.raises(ZeroDivisionError):
        deferred_init(lambda: nn.Linear(1 // 0, 2))


def test_nothing_is_deferred_outside() -> None:
    with DeferredInit():
        assert is_deferred(torch.empty(3))
        assert not is_deferred(torch.zeros(3))
    assert not is_deferred(torch.empty(3))
