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
from hvd_transformer.nn.kernels import FusibleLayer, Kernels
from hvd_transformer.nn.matmul import autocast_dtype, linear, matmul


class VocabShard(NamedTuple):
    """The rows of a vocabulary that this rank holds: `rows` of `total`."""

    group: TensorGroup
    rows: range
    total: int


def split_range(size: int, index: int, count: int) -> range:
    """The indices of piece `index` when `size` is split into `count` pieces as evenly as possible."""
    return range(size * index // count, size * (index + 1) // count)


def local_vocab_index(tokens: Tensor, rows: range) -> tuple[Tensor, Tensor]:
    """Which of these token numbers [...] are among `rows`, and their index there; 0 for the others."""
    is_local = (tokens >= rows.start) & (tokens < rows.stop)
    return is_local, (tokens - rows.start).masked_fill(~is_local, 0)


def reduce_from_tensor_group(values: Tensor, group: TensorGroup) -> Tensor:
    """Sum `values` over the group (all-reduce). In backward each rank's values get the gradient of the sum."""
    result: Tensor = _ReduceFromTensorGroup.apply(values, group)  # type: ignore[no-untyped-call]
    return result


class _ReduceFromTensorGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: TensorGroup) -> Tensor:
        result = values.clone(memory_format=torch.contiguous_format)
        group.sum_(result)()
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def copy_to_tensor_group(values: Tensor, group: TensorGroup) -> Tensor:
    """Return `values`, which ranks share but use differently. In backward their gradients are summed over the group."""
    result: Tensor = _CopyToTensorGroup.apply(values, group)  # type: ignore[no-untyped-call]
    return result


class _CopyToTensorGroup(torch.autograd.Function):
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
        """The split of each of the layer's own parameters, by name."""
        return {}

    def set_tensor_group(self, group: TensorGroup, unsplit_shape: Sequence[int]) -> None:
        """Compute with the other ranks of `group` from now on. `unsplit_shape` is the shape of the unsplit weight."""
        raise NotImplementedError


class VocabParallelLayer(SplitLayer):
    """A layer with one row of its weight per token of the vocabulary."""

    shard: VocabShard | None = None

    def splits(self) -> dict[str, TensorSplit]:
        return dict.fromkeys((name for name, _ in self.named_parameters(recurse=False)), TensorSplit(0))

    def set_tensor_group(self, group: TensorGroup, unsplit_shape: Sequence[int]) -> None:
        vocab_size = unsplit_shape[0]
        self.shard = VocabShard(group, split_range(vocab_size, group.index, group.count), vocab_size)


def tensor_splits(model: nn.Module, vocabulary: bool) -> dict[str, TensorSplit]:
    """The split of each parameter of a model, by name; with `vocabulary` also those of embeddings and output layers."""
    splits = {
        f"{prefix}.{name}" if prefix else name: split
        for prefix, module in model.named_modules()
        if isinstance(module, SplitLayer) and (vocabulary or not isinstance(module, VocabParallelLayer))
        for name, split in module.splits().items()
    }
    names = {name for name, _ in model.named_parameters()}  # a tied weight has one name only
    return {name: split for name, split in splits.items() if name in names}


class WeightGradLayer(SplitLayer, FusibleLayer):
    """A layer `values @ weight.T + bias`.

    While `weight_grads` is set, autograd computes no gradient for weight and bias: `weight_grads` gets the layer's
    input and the gradient of its output instead, and adds their product to the gradient buffer, at once or deferred.

    `shadow` is a copy of the weight in the dtype of autocast, which saves the conversion in each call.
    """

    weight: Tensor
    bias: Any  # a tensor or None
    weight_grads: WeightGrads | None = None
    shadow: Tensor | None = None

    def _shadow(self, values: Tensor) -> Tensor | None:
        """The shadow if autocast is on, otherwise None."""
        return None if self.shadow is None or autocast_dtype(values) is None else self.shadow


def detach_with_anchor(
    values: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Detach weight and bias. The third tensor, the anchor, makes autograd call backward; None if `values` do that."""
    anchor = None if values.requires_grad else torch.empty(0, requires_grad=True, device=values.device)
    return weight.detach(), None if bias is None else bias.detach(), anchor


class Linear(WeightGradLayer, nn.Linear):
    """`nn.Linear` whose weight gradients go where `WeightGradLayer` says."""

    column_group: TensorGroup | None = None  # column parallel: each rank has some of the output features
    row_group: TensorGroup | None = None  # row parallel: each rank has some of the input features

    def forward(self, values: Tensor, residual: Tensor | None = None, *, adds_bias: bool = True) -> Tensor:
        """values [..., D_in] → [..., D_out], plus `residual` of that shape. Without `adds_bias` the caller adds the
        bias, whose gradient is still computed here (Megatron's `skip_bias_add`)."""
        is_split = self.column_group is not None or self.row_group is not None
        shadow = self._shadow(values)
        if not torch.is_grad_enabled():
            bias = self.bias if adds_bias else None
            return _linear(values, self.weight if shadow is None else shadow, bias, self.row_group, residual)
        if self.weight_grads is None and shadow is None and not is_split and adds_bias:
            return _linear(values, self.weight, self.bias, self.row_group, residual)
        weight, bias, anchor = self.weight, self.bias, None
        if self.weight_grads is not None:
            weight, bias, anchor = detach_with_anchor(values, weight, bias)
        result: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
            values, weight, bias, self.weight_grads, anchor, self.column_group, self.row_group, shadow, self.kernels,
            residual, adds_bias,
        )  # fmt: skip
        return result


class ColumnParallelLinear(Linear):
    """Each rank of a tensor group computes some of the outputs; a weight that stacks `parts` matrices splits each."""

    def __init__(self, in_features: int, out_features: int, *, parts: int = 1, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        self.parts = parts

    def splits(self) -> dict[str, TensorSplit]:
        return dict.fromkeys(("weight", "bias"), TensorSplit(0, self.parts))

    def set_tensor_group(self, group: TensorGroup, unsplit_shape: Sequence[int]) -> None:
        self.column_group = group


class RowParallelLinear(Linear):
    """Each rank of a tensor group takes some of the inputs; the outputs are summed, then the bias is added."""

    def splits(self) -> dict[str, TensorSplit]:
        return {"weight": TensorSplit(1)}

    def set_tensor_group(self, group: TensorGroup, unsplit_shape: Sequence[int]) -> None:
        self.row_group = group


def _linear(
    values: Tensor, weight: Tensor, bias: Tensor | None, row_group: TensorGroup | None, residual: Tensor | None
) -> Tensor:
    if row_group is None:
        return linear(values, weight, bias, residual)
    result = linear(values, weight)
    row_group.sum_(result)()
    if bias is not None:
        result.add_(bias)  # once, not on each rank
    return result if residual is None else result + residual


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_grads: WeightGrads | None,
        anchor: Tensor | None,
        column_group: TensorGroup | None,
        row_group: TensorGroup | None,
        shadow: Tensor | None,
        kernels: Kernels | None,
        residual: Tensor | None,
        adds_bias: bool,
    ) -> Tensor:
        compute_dtype = autocast_dtype(values)
        if compute_dtype is not None:
            values = values.to(compute_dtype)  # saved in this dtype for backward, as autocast does
        matmul_weight = weight if shadow is None else shadow
        ctx.save_for_backward(values, matmul_weight)
        ctx.weight_grads, ctx.column_group, ctx.kernels = weight_grads, column_group, kernels
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return _linear(values, matmul_weight, bias if adds_bias else None, row_group, residual)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # No `once_differentiable`: the decorator costs as much time as the rest of this function's Python code.
        values, weight = ctx.saved_tensors
        grad_residual = grad if ctx.needs_input_grad[9] else None
        # Detached: a deferred weight gradient would otherwise keep the graph of `values` alive.
        shape, values, grad = values.shape, values.detach().flatten(0, -2), grad.flatten(0, -2)  # [N, D_in], [N, D_out]
        grad_values = matmul(grad, weight.to(grad.dtype)).view(shape) if ctx.needs_input_grad[0] else None
        # Start the all-reduce of a column-parallel layer first: the weight gradient is computed meanwhile.
        wait = None if grad_values is None or ctx.column_group is None else ctx.column_group.sum_(grad_values)
        grad_weight = grad_bias = None
        if ctx.weight_grads is not None:
            ctx.weight_grads.put(values, grad, ctx.kernels)
        else:
            weight_dtype, bias_dtype = ctx.dtypes
            grad_weight = matmul(grad.t(), values, weight_dtype) if ctx.needs_input_grad[1] else None
            grad_bias = grad.sum(0, dtype=bias_dtype) if ctx.needs_input_grad[2] else None
        if wait is not None:
            wait()
        return grad_values, grad_weight, grad_bias, None, None, None, None, None, None, grad_residual, None


class VocabParallelEmbedding(VocabParallelLayer, nn.Embedding):
    """`nn.Embedding` whose lookups can give a sparse gradient: rows, one per token.

    While `embedding_grads` is set it gets these rows, and the weight gets no gradient from lookups. The gradient of a
    tied weight is then complete at the start of backward, as soon as the output layer has added its part. With a
    `shard` the weight has that shard's rows only, and `embedding_grads` gets indices among them.
    """

    embedding_grads: EmbeddingGrads | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [...] → vectors [..., D]."""
        if self.shard is None:
            return self._lookup(tokens)
        is_local, indices = local_vocab_index(tokens, self.shard.rows)
        # Tokens of other shards look up row 0, with a gradient of zero. To leave them out, the host would have to wait
        # until the GPU has counted them.
        local_vectors = self._lookup(indices).masked_fill(~is_local[..., None], 0)
        return reduce_from_tensor_group(local_vectors, self.shard.group)

    def _lookup(self, tokens: Tensor) -> Tensor:
        if self.embedding_grads is None or not torch.is_grad_enabled():
            return F.embedding(tokens.to(self.weight.device), self.weight).to(tokens.device)
        # The anchor makes autograd call backward, although the detached weight needs no gradient.
        anchor = torch.empty(0, requires_grad=True, device=tokens.device)
        weight = self.weight.detach()
        vectors: Tensor = _Lookup.apply(anchor, tokens, weight, self.embedding_grads)  # type: ignore[no-untyped-call]
        return vectors


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tokens: Tensor, weight: Tensor, embedding_grads: EmbeddingGrads) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.embedding_grads = embedding_grads
        # If the weight is tied to an output layer on another device, it stays there and only the rows are copied.
        return F.embedding(tokens.to(weight.device), weight).to(tokens.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        (tokens,) = ctx.saved_tensors
        ctx.embedding_grads.put(tokens.flatten(), grad.flatten(0, -2))
        return None, None, None, None
