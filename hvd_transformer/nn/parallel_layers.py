"""Linear and embedding layers that can be tensor parallel, and that hand their weight gradients to the gradient engine.

Column- and row-parallel layers: Shoeybi et al. 2019, "Megatron-LM", arXiv 1909.08053, section 3.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hvd_transformer.nn.contracts import EmbeddingGrads, TensorGroup, TensorSplit, WeightGrads
from hvd_transformer.nn.products import autocast_dtype, product


class VocabShard(NamedTuple):
    """The rows of a vocabulary that this rank holds: `rows` of `total`."""

    group: TensorGroup
    rows: range
    total: int


def split_range(size: int, index: int, count: int) -> range:
    """The indices of piece `index` when `size` is split into `count` pieces as evenly as possible."""
    return range(size * index // count, size * (index + 1) // count)


def local_vocab_index(numbers: Tensor, rows: range) -> tuple[Tensor, Tensor]:
    """Which of these token numbers [...] are among `rows`, and their index there; 0 for the others."""
    inside = (numbers >= rows.start) & (numbers < rows.stop)
    return inside, (numbers - rows.start).masked_fill(~inside, 0)


def reduce_from_tensor_group(values: Tensor, group: TensorGroup) -> Tensor:
    """The sum of `values` over the group. In backward each rank's values get the sum's gradient."""
    result: Tensor = _Sum.apply(values, group)  # type: ignore[no-untyped-call]
    return result


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: TensorGroup) -> Tensor:
        result = values.clone(memory_format=torch.contiguous_format)
        group.sum_(result)()
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def copy_to_tensor_group(values: Tensor, group: TensorGroup) -> Tensor:
    """`values`, which every rank has and uses for other things. In backward the gradient is the sum over the group."""
    result: Tensor = _Copy.apply(values, group)  # type: ignore[no-untyped-call]
    return result


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        summed = grad.clone(memory_format=torch.contiguous_format)
        ctx.group.sum_(summed)()
        return summed, None


class SplitLayer(nn.Module):
    """A layer whose weights the ranks of a tensor group can split between them."""

    def splits(self) -> dict[str, TensorSplit]:
        """How its own parameters are split, by name."""
        return {}

    def set_tensor_group(self, group: TensorGroup, whole: Sequence[int]) -> None:
        """From now on compute with the other ranks of `group`. `whole` is the shape of the unsplit weight."""
        raise NotImplementedError


class VocabParallelLayer(SplitLayer):
    """A layer with one row of its weight per token of the vocabulary."""

    shard: VocabShard | None = None

    def splits(self) -> dict[str, TensorSplit]:
        return dict.fromkeys((name for name, _ in self.named_parameters(recurse=False)), TensorSplit(0))

    def set_tensor_group(self, group: TensorGroup, whole: Sequence[int]) -> None:
        self.shard = VocabShard(group, split_range(whole[0], group.index, group.count), whole[0])


def tensor_splits(model: nn.Module, vocabulary: bool) -> dict[str, TensorSplit]:
    """How a model's parameters are split, by name; with `vocabulary` also those of embeddings and output layers."""
    splits = {
        f"{prefix}.{name}" if prefix else name: split
        for prefix, module in model.named_modules()
        if isinstance(module, SplitLayer) and (vocabulary or not isinstance(module, VocabParallelLayer))
        for name, split in module.splits().items()
    }
    names = {name for name, _ in model.named_parameters()}  # a tied weight has one name only
    return {name: split for name, split in splits.items() if name in names}


class WeightGradLayer(SplitLayer):
    """A layer `values @ weight.T + bias`.

    While `weight_grads` is set, autograd computes no gradient for weight and bias: `weight_grads` gets the two
    matrices instead, and adds their product to the gradient buffer, now or when the stage has time.

    `shadow` is the weight in the number format of autocast, which it then need not be converted to at each call.
    """

    weight: Tensor
    bias: Any  # a tensor or None
    weight_grads: WeightGrads | None = None
    shadow: Tensor | None = None

    def _shadow(self, values: Tensor) -> Tensor | None:
        """The shadow, where autocast is on."""
        return None if self.shadow is None or autocast_dtype(values) is None else self.shadow


def out_of_graph(values: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Weight and bias detached, and an anchor that makes autograd call backward: None if `values` do that."""
    anchor = None if values.requires_grad else torch.empty(0, requires_grad=True, device=values.device)
    return weight.detach(), None if bias is None else bias.detach(), anchor


class Linear(WeightGradLayer, nn.Linear):
    """`nn.Linear` whose weight gradients go where `WeightGradLayer` says."""

    column_group: TensorGroup | None = None  # its ranks have some of the outputs each
    row_group: TensorGroup | None = None  # its ranks have some of the inputs each

    def forward(self, values: Tensor) -> Tensor:
        """[..., D_in] to [..., D_out]."""
        is_split = self.column_group is not None or self.row_group is not None
        shadow = self._shadow(values)
        if not torch.is_grad_enabled():
            return _product(values, self.weight if shadow is None else shadow, self.bias, self.row_group)
        if self.weight_grads is None and shadow is None and not is_split:
            return _product(values, self.weight, self.bias, self.row_group)
        weight, bias, anchor = self.weight, self.bias, None
        if self.weight_grads is not None:
            weight, bias, anchor = out_of_graph(values, weight, bias)
        result: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
            values, weight, bias, self.weight_grads, anchor, self.column_group, self.row_group, shadow
        )
        return result


class ColumnParallelLinear(Linear):
    """Each rank of a tensor group computes some of the outputs; a weight that stacks `parts` matrices splits each."""

    def __init__(self, in_features: int, out_features: int, *, parts: int = 1, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        self.parts = parts

    def splits(self) -> dict[str, TensorSplit]:
        return dict.fromkeys(("weight", "bias"), TensorSplit(0, self.parts))

    def set_tensor_group(self, group: TensorGroup, whole: Sequence[int]) -> None:
        self.column_group = group


class RowParallelLinear(Linear):
    """Each rank of a tensor group takes some of the inputs; the outputs are summed, then the bias is added."""

    def splits(self) -> dict[str, TensorSplit]:
        return {"weight": TensorSplit(1)}

    def set_tensor_group(self, group: TensorGroup, whole: Sequence[int]) -> None:
        self.row_group = group


def _product(values: Tensor, weight: Tensor, bias: Tensor | None, row: TensorGroup | None) -> Tensor:
    if row is None:
        return F.linear(values, weight, bias)
    result = F.linear(values, weight)
    row.sum_(result)()
    return result if bias is None else result.add_(bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        grads: WeightGrads | None,
        anchor: Tensor | None,
        column: TensorGroup | None,
        row: TensorGroup | None,
        shadow: Tensor | None,
    ) -> Tensor:
        narrow = autocast_dtype(values)
        if narrow is not None:
            values = values.to(narrow)  # kept in this format for backward, as autocast does
        factor = weight if shadow is None else shadow
        ctx.save_for_backward(values, factor)
        ctx.grads, ctx.column, ctx.types = grads, column, (weight.dtype, None if bias is None else bias.dtype)
        return _product(values, factor, bias, row)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Without torch's `once_differentiable`, which costs as much as the rest of this.
        values, weight = ctx.saved_tensors
        grad_values = grad @ weight.to(grad.dtype) if ctx.needs_input_grad[0] else None
        summed = None if grad_values is None or ctx.column is None else ctx.column.sum_(grad_values)
        # Detached: deferred, they would keep the graph that they came from alive.
        values, rows = values.detach().flatten(0, -2), grad.flatten(0, -2)
        grad_weight = grad_bias = None
        if ctx.grads is not None:
            ctx.grads.put(values, rows)
        else:
            weight_type, bias_type = ctx.types
            grad_weight = product(rows.t(), values, weight_type)
            grad_bias = None if bias_type is None else rows.sum(0, dtype=bias_type)
        if summed is not None:
            summed()
        return grad_values, grad_weight, grad_bias, None, None, None, None, None


class VocabParallelEmbedding(VocabParallelLayer, nn.Embedding):
    """`nn.Embedding` whose lookups can give their gradient as rows, one per token.

    While `embedding_grads` is set it gets these rows, and the weight gets no gradient from lookups. The gradient of a
    tied weight is then complete at the start of backward, as soon as the output layer has added its part. With a
    `shard` the weight has that shard's rows only, and `embedding_grads` gets indices among them.
    """

    embedding_grads: EmbeddingGrads | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        """Token numbers [...] to vectors [..., D]."""
        if self.shard is None:
            return self._lookup(tokens)
        inside, rows = local_vocab_index(tokens, self.shard.rows)
        # Tokens of other shards give zeros to row 0: to leave them out, a GPU would have to tell the host their number.
        return reduce_from_tensor_group(self._lookup(rows).masked_fill(~inside[..., None], 0), self.shard.group)

    def _lookup(self, tokens: Tensor) -> Tensor:
        if self.embedding_grads is None or not torch.is_grad_enabled():
            return F.embedding(tokens.to(self.weight.device), self.weight).to(tokens.device)
        # The anchor makes autograd call backward; the weight itself stays out of the graph.
        anchor = torch.empty(0, requires_grad=True, device=tokens.device)
        weight = self.weight.detach()
        vectors: Tensor = _Lookup.apply(anchor, tokens, weight, self.embedding_grads)  # type: ignore[no-untyped-call]
        return vectors


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tokens: Tensor, weight: Tensor, grads: EmbeddingGrads) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.grads = grads
        # Tied to an output layer on another device, the matrix stays there and the rows travel.
        return F.embedding(tokens.to(weight.device), weight).to(tokens.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        (tokens,) = ctx.saved_tensors
        ctx.grads.put(tokens.flatten(), grad.flatten(0, -2))
        return None, None, None, None
