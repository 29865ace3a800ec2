"""A linear layer that gives its products away: the same numbers as torch's own, and none in the weight."""

import pytest
import torch
from grad_sinks import Sink
from torch import Tensor, nn

from hvd_transformer.nn.parallel_layers import Linear


def pair(
    bias: bool = True, dtype: torch.dtype = torch.float64
) -> tuple[Linear, nn.Linear, list[tuple[Tensor, Tensor]]]:
    """Ours, torch's own with the same weights, and what ours gave away."""
    torch.manual_seed(0)
    linear, plain = Linear(5, 7, bias, dtype=dtype), nn.Linear(5, 7, bias, dtype=dtype)
    plain.load_state_dict(linear.state_dict())
    taken: list[tuple[Tensor, Tensor]] = []
    linear.weight_grads = Sink(lambda values, grad: taken.append((values, grad)))
    return linear, plain, taken


def check(plain: nn.Linear, taken: list[tuple[Tensor, Tensor]]) -> None:
    ((values, grad),) = taken
    torch.testing.assert_close(grad.t() @ values, plain.weight.grad)
    if plain.bias is not None:
        torch.testing.assert_close(grad.sum(0), plain.bias.grad)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(4, 5), (2, 3, 5), (0, 5)])
def test_products_are_torchs_gradients(shape: tuple[int, ...], bias: bool) -> None:
    linear, plain, taken = pair(bias)
    own, other = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
    other.copy_(own)
    results = [module(values.requires_grad_()) for module, values in ((linear, own), (plain, other))]
    assert torch.equal(*results)
    for result in results:
        (result.sin() * result).sum().backward()
    check(plain, taken)
    torch.testing.assert_close(own.grad, other.grad)
    assert linear.weight.grad is None and (linear.bias is None or linear.bias.grad is None)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("is_contiguous", [True, False])
@pytest.mark.parametrize("gives_away", [True, False])
def test_a_residual_is_added(gives_away: bool, is_contiguous: bool, bias: bool) -> None:
    linear, plain, taken = pair(bias)
    if not gives_away:
        linear.weight_grads = None
    values = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    residual = torch.randn(2, 3, 7, dtype=torch.float64)
    if not is_contiguous:
        residual = residual.transpose(0, 1).contiguous().transpose(0, 1)
    residual.requires_grad_()
    before = residual.detach().clone()
    found, wanted = linear(values, residual), plain(values) + residual
    torch.testing.assert_close(found, wanted)
    assert torch.equal(residual, before)
    grads = [torch.autograd.grad((result * result).sum(), [values, residual]) for result in (found, wanted)]
    torch.testing.assert_close(*grads)
    with torch.no_grad():
        torch.testing.assert_close(linear(values, residual), wanted)
    assert len(taken) == gives_away


@pytest.mark.parametrize("gives_away", [True, False])
def test_a_bias_that_the_caller_adds_gets_its_gradient(gives_away: bool) -> None:
    linear, plain, taken = pair()
    if not gives_away:
        linear.weight_grads = None
    own, other = (torch.ones(2, 3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    found, wanted = linear(own, adds_bias=False) + linear.bias.detach(), plain(other)
    torch.testing.assert_close(found, wanted)
    for result in (found, wanted):
        (result * result).sum().backward()
    torch.testing.assert_close(own.grad, other.grad)
    if gives_away:
        check(plain, taken)
    else:
        torch.testing.assert_close([linear.weight.grad, linear.bias.grad], [plain.weight.grad, plain.bias.grad])
    with torch.no_grad():
        torch.testing.assert_close(linear(own, adds_bias=False), wanted - plain.bias)


def test_gradcheck_of_the_input() -> None:
    linear, _, _ = pair()
    assert torch.autograd.gradcheck(linear, torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True))


def test_an_input_without_a_gradient_and_a_gradient_in_another_order_of_memory() -> None:
    linear, plain, taken = pair()
    values = torch.randn(2, 3, 5, dtype=torch.float64)
    for module in (linear, plain):
        module(values).transpose(0, 1).flatten(1).sin().sum().backward()
    check(plain, taken)


def test_autocast_is_as_torch_has_it() -> None:
    linear, plain, taken = pair(dtype=torch.float32)
    own, other = (torch.linspace(-1, 1, 15).view(3, 5).requires_grad_() for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        results = linear(own), plain(other)
    assert results[0].dtype == torch.bfloat16 and torch.equal(*results)
    for result in results:
        result.float().sin().sum().backward()
    ((values, grad),) = taken
    assert values.dtype == grad.dtype == torch.bfloat16
    assert torch.equal(own.grad, other.grad)
    assert torch.equal((grad.t() @ values).float(), plain.weight.grad)


def test_it_is_torchs_own_layer_otherwise() -> None:
    linear, _, taken = pair()
    values = torch.randn(4, 5, dtype=torch.float64)
    with torch.no_grad():
        assert not linear(values).requires_grad
    linear.weight_grads = None
    linear(values).sum().backward()
    assert linear.weight.grad is not None and not taken


def test_products_take_the_weight_in_16_bits() -> None:
    """The optimizer has written it: no cast at each call."""
    linear, _, taken = pair(dtype=torch.float32)
    linear.shadow = (2 * linear.weight).bfloat16()
    values = torch.randn(4, 5, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        result = linear(values)
    wanted = torch.nn.functional.linear(values.bfloat16(), linear.shadow, linear.bias.bfloat16())
    torch.testing.assert_close(result, wanted)
    result.sum().backward()
    torch.testing.assert_close(values.grad, linear.shadow.float().sum(0).expand(4, 5), rtol=1e-2, atol=1e-2)
    assert len(taken) == 1
