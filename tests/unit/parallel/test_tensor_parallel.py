"""Layers and models cut for two and four ranks compute what they compute whole."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from grad_sinks import Sink, parameter_grads
from plain_transformer import PlainTransformer
from small_job import SPLITS, VOCABULARY, settings
from thread_shares import ThreadShares, together
from torch import Tensor, nn

from hvd_transformer.config.schema import ModelConfig
from hvd_transformer.data.sampler import Replica
from hvd_transformer.models.language_model import LanguageModel
from hvd_transformer.nn.contracts import TensorSplit
from hvd_transformer.nn.cross_entropy import fused_cross_entropy
from hvd_transformer.nn.dropout import Dropout, dropout_key
from hvd_transformer.nn.parallel_layers import (
    Linear,
    VocabParallelEmbedding,
    VocabShard,
    reduce_from_tensor_group,
    split_range,
)
from hvd_transformer.parallel.tensor_parallel import piece, set_tensor_groups, shard_model
from hvd_transformer.tasks.language_model_task import LanguageModelTask

V = 37  # no multiple of the ranks
WIDTH = 16
COUNTS = (2, 4)


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def near(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


def join(pieces: list[Tensor], split: tuple[int, int]) -> Tensor:
    """The whole of all ranks' pieces."""
    dim, parts = split
    return torch.cat([own.unflatten(dim, (parts, -1)) for own in pieces], dim + 1).flatten(dim, dim + 1)


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize(("shape", "cut"), [((12, 5), (0, 3)), ((5, 12), (1, 1)), ((37, 2), (0, 1)), ((24,), (0, 2))])
def test_pieces_join_to_the_whole(shape: tuple[int, ...], cut: tuple[int, int], count: int) -> None:
    whole = torch.randn(shape)
    pieces = [piece(whole, cut, index, count) for index in range(count)]
    assert sum(part.numel() for part in pieces) == whole.numel()
    assert torch.equal(join(pieces, cut), whole)


def test_a_piece_of_stacked_matrices_has_its_rows_of_each() -> None:
    query, key, value = torch.arange(12.0).view(3, 4)
    assert piece(torch.cat([query, key, value]), (0, 3), 1, 2).tolist() == [2, 3, 6, 7, 10, 11]


# --- layers alone -----------------------------------------------------------------------------------------------------


def linear(weight: Tensor, bias: Tensor | None, cut: TensorSplit, shares: ThreadShares) -> Linear:
    """The rank's part of a whole linear layer."""
    layer = Linear(weight.size(1), weight.size(0), bias=bias is not None)
    layer.weight = nn.Parameter(piece(weight, cut, shares.index, shares.count).clone())
    if bias is not None:
        layer.bias = nn.Parameter(
            piece(bias, cut, shares.index, shares.count).clone() if cut.dim == 0 else bias.clone()
        )
    if cut.dim == 0:
        layer.column_group = shares
    else:
        layer.row_group = shares
    return layer


@pytest.mark.parametrize("takes", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("count", COUNTS)
def test_a_column_and_a_row_are_two_linear_layers(count: int, with_bias: bool, takes: bool) -> None:
    first, second = nn.Linear(6, 8, bias=with_bias), nn.Linear(8, 5, bias=with_bias)
    values = torch.randn(2, 3, 6, requires_grad=True)
    wanted = second(F.relu(first(values)))
    wanted.square().sum().backward()

    def work(shares: ThreadShares) -> None:
        column = linear(
            first.weight.detach(), first.bias if first.bias is None else first.bias.detach(), TensorSplit(0), shares
        )
        row = linear(
            second.weight.detach(), second.bias if second.bias is None else second.bias.detach(), TensorSplit(1), shares
        )
        own = values.detach().clone().requires_grad_()
        if takes:  # as the gradient buffers do
            column.weight_grads, row.weight_grads = parameter_grads(column), parameter_grads(row)
        found = row(F.relu(column(own)))
        found.square().sum().backward()
        near(found.detach(), wanted.detach())
        near(own.grad, values.grad)
        near(column.weight.grad, piece(first.weight.grad, (0, 1), shares.index, count))
        near(row.weight.grad, piece(second.weight.grad, (1, 1), shares.index, count))
        if with_bias:
            near(column.bias.grad, piece(first.bias.grad, (0, 1), shares.index, count))
            near(row.bias.grad, second.bias.grad)
        with torch.no_grad():
            near(row(F.relu(column(own))), wanted.detach())

    together(count, work)


@pytest.mark.parametrize("takes", [False, True])
@pytest.mark.parametrize("count", COUNTS)
def test_an_embedding_cut_by_rows_is_an_embedding(count: int, takes: bool) -> None:
    whole, tokens = nn.Embedding(V, 6), torch.randint(V, (3, 5))
    slope = torch.randn(3, 5, 6)
    wanted = whole(tokens)
    (wanted * slope).sum().backward()

    def work(shares: ThreadShares) -> None:
        layer, places = VocabParallelEmbedding(V, 6), split_range(V, shares.index, count)
        layer.weight = nn.Parameter(whole.weight.detach()[places.start : places.stop].clone())
        layer.shard = VocabShard(shares, places, V)
        grad = torch.zeros_like(layer.weight)
        if takes:
            layer.embedding_grads = Sink(partial(grad.index_add_, 0))
        found = layer(tokens)
        near(found.detach(), wanted.detach())
        (found * slope).sum().backward()
        near(grad if takes else layer.weight.grad, whole.weight.grad[places.start : places.stop])

    together(count, work)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk", [3, 100])
@pytest.mark.parametrize("num_tokens", [4, 9])  # fewer than the width, and more
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("count", COUNTS)
def test_a_loss_over_parts_of_the_vocabulary_is_torchs(
    count: int, smoothing: float, num_tokens: int, chunk: int, with_bias: bool
) -> None:
    hidden, weight = torch.randn(num_tokens, 6, requires_grad=True), torch.randn(V, 6, requires_grad=True)
    bias = torch.randn(V, requires_grad=True) if with_bias else None
    targets = torch.randint(V, (num_tokens,))
    logits = 30 * F.linear(hidden, weight, bias)
    wanted = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
    wanted.backward()

    def work(shares: ThreadShares) -> None:
        places = split_range(V, shares.index, count)
        own = [
            None if whole is None else (30 * whole.detach()[places.start : places.stop]).requires_grad_()
            for whole in (weight, bias)
        ]
        values = hidden.detach().clone().requires_grad_()
        loss = fused_cross_entropy(
            values, *own, targets, chunk, shard=VocabShard(shares, places, V), smoothing=smoothing
        )
        loss.backward()
        near(loss.detach(), wanted.detach())
        near(values.grad, hidden.grad)
        for found, whole in zip(own, (weight, bias), strict=True):
            if found is not None:
                near(30 * found.grad, whole.grad[places.start : places.stop])

    together(count, work)


# --- gradients by differences -----------------------------------------------------------------------------------------


class _Own(torch.autograd.Function):
    """A rank's piece of what all ranks have; its gradient is the sum of theirs, so that it can be checked whole."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, cut: TensorSplit, shares: ThreadShares) -> Tensor:
        ctx.shape, ctx.cut, ctx.shares = whole.shape, cut, shares
        return piece(whole, cut, shares.index, shares.count).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return join(list(_gathered(ctx.shares, grad, ctx.shape, ctx.cut)), ctx.cut), None, None


def _gathered(shares: ThreadShares, grad: Tensor, shape: torch.Size, cut: TensorSplit) -> Iterator[Tensor]:
    """Every rank's piece, of which some may be larger than others."""
    shapes = [piece(torch.empty(shape, device="meta"), cut, index, shares.count).shape for index in range(shares.count)]
    flat = torch.zeros(max(size.numel() for size in shapes))
    flat[: grad.numel()] = grad.flatten()
    for size, part in zip(shapes, shares.gather(flat), strict=True):
        yield part[: size.numel()].view(size)


def gradcheck(count: int, function: Callable[..., Tensor], *inputs: Tensor) -> None:
    """On all ranks in step: all have the whole inputs, and change the same number of them at a time."""

    def work(shares: ThreadShares) -> None:
        own = tuple(tensor.detach().clone().requires_grad_() for tensor in inputs)
        assert torch.autograd.gradcheck(partial(function, shares), own)

    together(count, work)


@pytest.mark.parametrize("count", COUNTS)
def test_gradcheck_of_a_column_and_a_row(count: int) -> None:
    def function(shares: ThreadShares, values: Tensor, first: Tensor, bias: Tensor, second: Tensor) -> Tensor:
        column, row = Linear(3, 4), Linear(4, 2)
        for layer, weights in (
            (column, (_Own.apply(first, TensorSplit(0), shares), _Own.apply(bias, TensorSplit(0), shares))),
            (row, (_Own.apply(second, TensorSplit(1), shares), None)),
        ):
            for name, weight in zip(("weight", "bias"), weights, strict=True):
                delattr(layer, name)
                setattr(layer, name, weight)
        column.column_group, row.row_group = shares, shares
        return row(column(values).square())

    gradcheck(count, function, torch.randn(2, 3), torch.randn(4, 3), torch.randn(4), torch.randn(2, 4))


@pytest.mark.parametrize("count", COUNTS)
def test_gradcheck_of_the_loss_over_parts(count: int) -> None:
    targets = torch.randint(V, (4,))

    def function(shares: ThreadShares, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        own = [_Own.apply(whole, TensorSplit(0), shares) for whole in (weight, bias)]
        return fused_cross_entropy(
            hidden, *own, targets, 3, shard=VocabShard(shares, split_range(V, shares.index, count), V)
        )

    gradcheck(count, function, torch.randn(4, 2), torch.randn(V, 2), torch.randn(V))


@pytest.mark.parametrize("count", COUNTS)
def test_gradcheck_of_a_sum(count: int) -> None:
    gradcheck(
        count,
        lambda shares, whole: reduce_from_tensor_group(_Own.apply(whole, TensorSplit(0), shares).exp(), shares),
        torch.randn(8, 2),
    )


# --- whole models -----------------------------------------------------------------------------------------------------

MODELS = [
    {"norm": norm, "tie_embeddings": tied, "position": position, "activation": activation}
    for (norm, tied), (position, activation) in zip(
        product(("pre", "post"), (True, False)),
        (("sinusoidal", "gelu"), ("learned", "relu"), ("learned", "gelu"), ("sinusoidal", "relu")),
        strict=True,
    )
]


@pytest.mark.parametrize("batch", [2, 4])  # 14 tokens, fewer than the width, and 28
@pytest.mark.parametrize("vocabulary", [False, True])
@pytest.mark.parametrize("kind", MODELS, ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_a_whole_model_is_torchs(count: int, kind: dict[str, Any], vocabulary: bool, batch: int) -> None:
    """Loss and every gradient, against torch.nn's own layers."""
    config = ModelConfig(num_layers=2, d_model=WIDTH, num_heads=4, d_feedforward=24, loss_chunk=5, **kind)
    torch.manual_seed(3)
    plain, model = PlainTransformer(V, config), LanguageModel(V, config)
    ours = dict(model.named_parameters())
    plain.load({name: weight.detach() + 0.1 * torch.randn_like(weight) for name, weight in ours.items()})
    for name, weight in plain.by_our_names().items():
        ours[name].data.copy_(weight.detach())
    inputs, targets = torch.randint(V, (2, batch, 7))
    wanted = F.cross_entropy(plain(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
    wanted.backward()
    cuts, shapes = model.cuts(vocabulary), {name: weight.shape for name, weight in model.named_parameters()}
    assert ("head.weight" in cuts) == (vocabulary and not config.tie_embeddings)

    def work(shares: ThreadShares) -> None:
        own = deepcopy(model)
        shard_model(own, cuts, shares.index, count)
        set_tensor_groups(own, cuts, shapes, lambda name: shares)
        loss = own.head.loss(own.hidden(inputs), targets)
        loss.backward()
        near(loss.detach(), wanted.detach())
        for name, weight in own.named_parameters():
            whole = plain.by_our_names()[name].grad
            assert weight.grad is not None and whole is not None
            # Those of the key biases are zero but for rounding.
            torch.testing.assert_close(
                weight.grad,
                piece(whole, cuts[name], shares.index, count) if name in cuts else whole,
                rtol=1e-9,
                atol=1e-10 * float(whole.abs().max()) + 1e-12,
            )

    together(count, work)


# --- dropout ----------------------------------------------------------------------------------------------------------


def test_dropout_is_the_same_where_ranks_have_the_same_values_and_another_where_each_has_its_own() -> None:
    config = settings("model.dropout=0.5", "parallel.tensor=2", "training.precision=fp64")
    data = SimpleNamespace(tokenizer=SimpleNamespace(vocab_size=VOCABULARY), splits=SPLITS)
    drawn: dict[str, list[Tensor]] = {}
    for shard in range(2):
        task = LanguageModelTask(config, data, Replica(0, 1))
        shard_model(task.model, task.cuts, shard, 2)
        task.model.train()
        for name, module in task.model.named_modules():
            if isinstance(module, Dropout):
                with dropout_key(1, 2, 3):
                    drawn.setdefault(name, []).append(module(torch.ones(50)))
    own = {name for name, (first, second) in drawn.items() if not torch.equal(first, second)}
    assert own == {"blocks.0.attention.dropout", "blocks.0.feedforward.dropout"}
    assert drawn.keys() - own == {"embedding.dropout", "blocks.0.dropout"}
