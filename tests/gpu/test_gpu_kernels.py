"""What a GPU computes in its own ways, against float64: dropout, attention with dropout, products of 16 bits."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hvd_transformer.nn import seeded_attention
from hvd_transformer.nn.cross_entropy import fused_cross_entropy
from hvd_transformer.nn.dropout import Dropout, dropout_key
from hvd_transformer.nn.matmul import matmul, weight_grad_

pytestmark = pytest.mark.gpu

RATE = 0.25
B, H, T, W = 2, 3, 64, 64  # T = W: with the identity as values, the result is the weights after dropout


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, *place: int) -> Tensor:
    with dropout_key(*place):
        return seeded_attention.attend(query, key, value, mask, causal, Dropout(RATE, sharded=True))


def heads(dtype: torch.dtype, length: int = T) -> list[Tensor]:
    draw = torch.Generator("cuda").manual_seed(1)
    return [torch.randn(B, H, length, W, generator=draw, device="cuda").to(dtype).requires_grad_() for _ in range(3)]


def masks(name: str) -> tuple[Tensor | None, bool]:
    if name == "keys":  # of a padded batch
        allowed = torch.ones(B, T, dtype=torch.bool, device="cuda")
        allowed[1, 40:] = False
        return allowed[:, None, None], False
    if name == "documents":
        added = torch.full((T, T), -torch.inf, device="cuda")
        for start, stop in ((0, 20), (20, T)):
            added[start:stop, start:stop] = torch.full((stop - start, stop - start), -torch.inf, device="cuda").triu(1)
        return added.expand(B, 1, T, T), False
    return None, name == "causal"


def weights_of(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """The attention weights before dropout, in float64."""
    scores = query.double() @ key.double().transpose(-2, -1) * W**-0.5
    if causal:
        scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool, device="cuda").triu(1), -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1)


@pytest.mark.parametrize("name", ["none", "causal", "keys", "documents"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_with_dropout_is_that_of_its_mask(dtype: torch.dtype, name: str) -> None:
    tolerance = 1e-4 if dtype == torch.float32 else 0.03
    query, key, value = heads(dtype)
    mask, causal = masks(name)
    identity = torch.eye(T, dtype=dtype, device="cuda").expand(B, H, T, W)
    dropped = attend(query, key, identity, mask, causal, 5, 7).double()
    weights = weights_of(query, key, mask, causal)
    kept = (dropped != 0).double()
    torch.testing.assert_close(dropped, weights * kept / (1 - RATE), rtol=tolerance, atol=tolerance / 10)
    counted = weights > 1e-3
    assert float(kept[counted].mean()) == pytest.approx(1 - RATE, abs=0.02)

    out = attend(query, key, value, mask, causal, 5, 7)
    wanted = (weights_of(query, key, mask, causal) * kept / (1 - RATE)) @ value.double()
    torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=tolerance)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (query, key, value), grad)
    for own, want in zip(found, torch.autograd.grad(wanted, (query, key, value), grad.double()), strict=True):
        torch.testing.assert_close(
            own.double(), want.double(), rtol=tolerance, atol=tolerance * float(want.abs().max())
        )


def test_attention_drops_by_place_whatever_other_threads_do() -> None:
    query, key, value = heads(torch.bfloat16)
    places = [(place, 1) for place in range(40)]
    wanted = [attend(query, key, value, None, True, *place) for place in places]
    assert not torch.equal(wanted[0], wanted[1])

    def work(place: tuple[int, int]) -> Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):
            found = attend(query, key, value, None, True, *place)
            torch.cuda.current_stream().synchronize()
        return found

    before = torch.cuda.get_rng_state()
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(work, places))
    assert torch.equal(torch.cuda.get_rng_state(), before)  # others may use the generator
    for own, want in zip(found, wanted, strict=True):
        assert torch.equal(own, want)


def test_no_attention_weights_exist() -> None:
    query, key, value = heads(torch.bfloat16, length=4096)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend(query, key, value, None, True, 1).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < B * H * 4096 * 4096  # a byte per weight


def test_dropout_draws_its_mask_again() -> None:
    values = torch.ones(1000, 1000, device="cuda", requires_grad=True)
    dropout = Dropout(RATE)
    with dropout_key(1, 2):
        before = torch.cuda.memory_allocated()
        dropped = dropout(values)
        assert torch.cuda.memory_allocated() - before < 1.01 * dropped.nbytes  # no mask is stored
        assert torch.equal(dropout(values.t().contiguous().t()), dropped)
    dropped.sum().backward()
    assert float((dropped != 0).double().mean()) == pytest.approx(1 - RATE, abs=0.01)
    torch.testing.assert_close(values.grad, (dropped != 0) / (1 - RATE))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_add_up_in_float32(dtype: torch.dtype) -> None:
    left, right = torch.randn(300, 5000, device="cuda").to(dtype), torch.randn(5000, 200, device="cuda").to(dtype)
    exact = left.double() @ right.double()
    closely = {"rtol": 1e-5, "atol": 1e-3}  # 16 bits would be off by up to a half
    torch.testing.assert_close(matmul(left, right, torch.float32).double(), exact, **closely)
    target = torch.empty(300, 200, device="cuda")
    weight_grad_(target, left.t(), right, first=True)
    weight_grad_(target, left.t(), right, first=False)
    torch.testing.assert_close(target.double(), 2 * exact, **closely)


@pytest.mark.parametrize("vocab_size", [28_783, 1000, 64])
@pytest.mark.parametrize("num_tokens", [40, 200])  # fewer and more than channels
def test_the_loss_of_any_vocabulary(vocab_size: int, num_tokens: int) -> None:
    hidden = torch.randn(num_tokens, 96, device="cuda", requires_grad=True)
    weight = (0.2 * torch.randn(vocab_size, 96, device="cuda")).requires_grad_()
    bias = torch.randn(vocab_size, device="cuda", requires_grad=True)
    targets = torch.randint(vocab_size, (num_tokens,), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = fused_cross_entropy(hidden, weight, bias, targets, smoothing=0.1)
    found = torch.autograd.grad(loss, (hidden, weight, bias))
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)]
    logits = F.linear(exact[0].bfloat16().double(), exact[1].bfloat16().double(), exact[2])
    wanted = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=0.1)
    torch.testing.assert_close(loss.double(), wanted, rtol=2e-3, atol=0)
    for own, want in zip(found, torch.autograd.grad(wanted, exact), strict=True):
        assert float((own.double() - want).norm() / want.norm()) < 0.02
