"""The chunked loss equals torch's cross-entropy of the whole projection, with no tensor of all logits."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from grad_sinks import Sink
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hvd_transformer.nn.cross_entropy import fused_cross_entropy
from hvd_transformer.planning.pass_memory import AllocationTracker

N, D, V = 7, 5, 11


def operands(
    with_bias: bool, dtype: torch.dtype = torch.float64, width: int = D
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(rows, width, generator=generator, dtype=dtype) for rows in (N, V))
    bias = torch.randn(V, generator=generator, dtype=dtype) if with_bias else None
    for tensor in (hidden, weight, bias):
        if tensor is not None:
            tensor.requires_grad_()
    return hidden, weight, bias, torch.randint(V, (N,), generator=generator)


def gradients(loss: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [tensor for tensor in tensors if tensor is not None]))


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("chunk", [1, 3, N, N + 5])
@pytest.mark.parametrize("width", [D, N, N + 2])  # more tokens than that, as many, fewer
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_value_and_gradients_equal_torchs(smoothing: float, width: int, chunk: int, with_bias: bool) -> None:
    hidden, weight, bias, targets = operands(with_bias, width=width)
    loss = fused_cross_entropy(hidden, weight, bias, targets, chunk, smoothing=smoothing)
    expected = F.cross_entropy(F.linear(hidden, weight, bias), targets, reduction="sum", label_smoothing=smoothing)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    # The factor stands for the scale of the mean and of float16.
    own = gradients(loss * 0.37, hidden, weight, bias)
    for ours, theirs in zip(own, gradients(expected * 0.37, hidden, weight, bias), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("chunk", [2, N])
def test_gradcheck(chunk: int) -> None:
    hidden, weight, bias, targets = operands(True)
    assert torch.autograd.gradcheck(lambda *args: fused_cross_entropy(*args, targets, chunk), (hidden, weight, bias))


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("chunk", [3, N])
@pytest.mark.parametrize("width", [D, N])
def test_weight_gradients_are_given_away_once_as_what_is_less_to_keep(width: int, chunk: int, with_bias: bool) -> None:
    hidden, weight, bias, targets = operands(with_bias, width=width)
    taken: list[tuple[Tensor, Tensor]] = []
    take = Sink(lambda values, grad: taken.append((values, grad)))
    loss = fused_cross_entropy(hidden, weight, bias, targets, chunk, take)
    (loss * 0.37).backward()
    expected = F.cross_entropy(F.linear(hidden, weight, bias), targets, reduction="sum") * 0.37
    wanted = gradients(expected, hidden, weight, bias)
    torch.testing.assert_close(hidden.grad, wanted[0])
    ((first, second),) = taken
    assert weight.grad is None and (bias is None or bias.grad is None)
    own = [first, second] if width < N else [second.t() @ first, second.sum(0)]
    torch.testing.assert_close(own[0], wanted[1])
    if with_bias:
        torch.testing.assert_close(own[1], wanted[2])


def test_equal_targets_in_a_chunk_are_all_counted() -> None:
    hidden, weight, _, _ = operands(False)
    targets = torch.full((N,), 4)
    loss = fused_cross_entropy(hidden, weight, None, targets, 4)
    expected = F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum")
    torch.testing.assert_close(gradients(loss, weight)[0], gradients(expected, weight)[0], rtol=1e-11, atol=1e-13)


def test_large_logits_overflow_nothing() -> None:
    hidden, weight, bias, targets = operands(True)
    loss = fused_cross_entropy(hidden * 1e4, weight, bias, targets, 3)
    expected = F.cross_entropy(F.linear(hidden * 1e4, weight, bias), targets, reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    assert all(grad.isfinite().all() for grad in gradients(loss, hidden, weight, bias))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
@pytest.mark.parametrize("chunk", [3, N])
def test_under_autocast_it_stays_close_to_float64(chunk: int, dtype: torch.dtype, tolerance: float) -> None:
    exact = operands(True)
    expected = F.cross_entropy(F.linear(*exact[:3]), exact[3], reduction="sum")
    hidden, weight, bias, targets = operands(True, torch.float64)
    single = [tensor.detach().float().requires_grad_() for tensor in (hidden, weight, bias)]
    with torch.autocast("cpu", dtype):
        loss = fused_cross_entropy(*single, targets, chunk)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=tolerance, atol=0)
    for ours, theirs in zip(gradients(loss, *single), gradients(expected, *exact[:3]), strict=True):
        assert ours.dtype == torch.float32
        assert ((ours.double() - theirs).norm() / theirs.norm()).item() < tolerance


def test_sums_over_many_tokens_are_not_made_in_half_precision() -> None:
    """5,000 tokens of loss log 2: a bfloat16 sum would stop growing at 256 or so, a float16 one be off by units."""
    hidden, weight = torch.zeros(5000, 4), torch.zeros(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        loss = fused_cross_entropy(hidden, weight, None, torch.zeros(5000, dtype=torch.int64), 64)
    assert loss.item() == pytest.approx(5000 * 0.6931471805599453, rel=1e-5)


class Watch(TorchDispatchMode):
    """Notes every operation and the largest tensor that one makes."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.operations: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.operations.append(str(function))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


def test_no_tensor_of_all_logits_exists() -> None:
    num_tokens, width, words, chunk = 64, 2, 50, 8
    hidden, weight = torch.randn(num_tokens, width, requires_grad=True), torch.randn(words, width, requires_grad=True)
    targets = torch.randint(words, (num_tokens,))
    with Watch() as watch:
        fused_cross_entropy(hidden, weight, None, targets, chunk).backward()
    assert watch.largest == chunk * words
    with Watch() as watch:  # the watch does see them where they are
        F.cross_entropy(hidden @ weight.t(), targets).backward()
    assert watch.largest == num_tokens * words


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [16, 64, 200])  # the last is smaller where they do not divide the tokens
def test_the_peak_is_at_most_the_gradients_and_three_chunks_of_logits(chunk: int, smoothing: float) -> None:
    num_tokens, width, words, item = 1024, 32, 500, 4
    hidden, weight = torch.randn(num_tokens, width, requires_grad=True), torch.randn(words, width, requires_grad=True)
    targets = torch.randint(words, (num_tokens,))
    with AllocationTracker() as chunked:
        fused_cross_entropy(hidden, weight, None, targets, chunk, smoothing=smoothing).backward()
    own = item * width * (num_tokens + words)  # of both gradients
    logits = item * chunk * words  # of a chunk: before and after softmax, and after it of the chunk before
    few = item * 16 * chunk  # a few numbers a token of the chunk
    # In backward they exist twice: as they were formed, and times the gradient of the loss.
    assert chunked.peak <= max(own + 3 * logits, 2 * own) + few
    with AllocationTracker() as plain:
        F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum", label_smoothing=smoothing).backward()
    assert plain.peak >= item * num_tokens * words > chunked.peak


def test_without_gradients_only_the_logits_are_computed() -> None:
    hidden, weight, bias, targets = operands(True)
    with torch.no_grad(), Watch() as watch:
        fused_cross_entropy(hidden, weight, bias, targets, N)
    products = [name for name in watch.operations if "mm" in name]
    assert len(products) == 1
