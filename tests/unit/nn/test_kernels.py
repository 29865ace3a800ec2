"""The fused kernels against torch's own operations, and where there is no compiler."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hvd_transformer.native_library import NativeLibrary
from hvd_transformer.nn.cross_entropy import fused_cross_entropy
from hvd_transformer.nn.kernel_library import CannotCompile, load_library
from hvd_transformer.nn.kernels import DropoutBits, Kernels

# Not multiples of a vector's width, and one that threads share.
SHAPES = [(3, 5), (7, 33), (260, 131)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="module")
def kernels(folder: Path) -> Kernels:
    return Kernels(load_library(folder))


def mask(drawn: DropoutBits) -> Tensor:
    return (drawn.bits >= drawn.threshold).double() * drawn.scale


def check(found: Tensor, wanted: Tensor, inputs: list[Tensor], doubles: list[Tensor], *, atol: float = 2e-6) -> None:
    """The values, and the gradients of a random weighting of them."""
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=atol)
    slope = torch.randn(found.shape)
    grads = torch.autograd.grad(found, inputs, slope)
    for grad, want in zip(grads, torch.autograd.grad(wanted, doubles, slope.double()), strict=True):
        torch.testing.assert_close(grad.double(), want, rtol=1e-5, atol=atol)


def rounding(terms: int) -> float:
    """The error of float32 sums of so many terms: it grows with the square root, and vectors of another width add in
    another order. Where a query sees one key alone, terms of several units must cancel each other."""
    return 2e-6 * max(1.0, math.sqrt(terms) / 3)


def inputs(*shapes: tuple[int, ...], spread: float = 1.0) -> tuple[list[Tensor], list[Tensor]]:
    """Random float32 leaves, and the same in float64."""
    torch.manual_seed(3)
    singles = [(torch.randn(shape) * spread).requires_grad_() for shape in shapes]
    return singles, [single.detach().double().requires_grad_() for single in singles]


def test_random_bits_are_those_of_numpy(kernels: Kernels) -> None:
    for count in (1, 6, 4096):
        drawn = kernels.draw((count,), 0.1, seed=12345)
        wanted = np.random.SFC64(12345).random_raw(-(-count // 4)).view(np.int16)[:count]
        assert drawn.bits.numpy().tolist() == wanted.tolist()


@pytest.mark.parametrize("shape", SHAPES)
def test_dropout_with_and_without_a_residual(kernels: Kernels, shape: tuple[int, int]) -> None:
    drawn = kernels.draw(shape, 0.25, seed=1)
    (values, residual), (wide, wide_residual) = both = inputs(shape, shape)
    check(kernels.dropout(values, drawn), wide * mask(drawn), [values], [wide])
    check(kernels.dropout(values, drawn, residual), wide_residual + wide * mask(drawn), *both)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("drops", [False, True])
def test_gelu(kernels: Kernels, shape: tuple[int, int], drops: bool) -> None:
    drawn = kernels.draw(shape, 0.5, seed=2) if drops else None
    both = inputs(shape, spread=3.0)
    wanted = F.gelu(both[1][0]) * (1 if drawn is None else mask(drawn))
    check(kernels.gelu(both[0][0], drawn), wanted, *both)
    with torch.no_grad():
        torch.testing.assert_close(kernels.gelu(both[0][0], drawn).double(), wanted.detach(), rtol=1e-5, atol=2e-6)
    bias = torch.randn(shape[-1], requires_grad=True)
    wanted = F.gelu(both[1][0] + bias.detach().double()) * (1 if drawn is None else mask(drawn))
    check(kernels.gelu(both[0][0], drawn, bias), wanted, *both)


@pytest.mark.parametrize("shape", [*SHAPES, (2, 3, 64), (1, 1)])
@pytest.mark.parametrize(("centers", "has_bias"), [(True, True), (True, False), (False, False)])
def test_norms_beside_a_residual_connection(
    kernels: Kernels, shape: tuple[int, ...], centers: bool, has_bias: bool
) -> None:
    width = shape[-1]
    both = inputs(shape, (width,), *[(width,)] * has_bias, spread=3.0)

    def plain(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        norm = F.layer_norm(values, (width,), weight, bias, 1e-3)
        return norm if centers else F.rms_norm(values, (width,), weight, 1e-3)

    (values, weight, *biases), wide = both
    bias = biases[0] if has_bias else None
    for residual in (0.0, 0.7):
        normed, same = kernels.norm(values, weight, bias, 1e-3, centers=centers)
        assert torch.equal(same, values)
        check(normed + residual * same, plain(*wide) + residual * wide[0], *both, atol=rounding(values.numel()))
    normed, _ = kernels.norm(values, weight, bias, 1e-3, centers=centers)
    check(normed, plain(*wide), *both, atol=rounding(values.numel()))
    _, same = kernels.norm(values, weight, bias, 1e-3, centers=centers)
    (grad,) = torch.autograd.grad(same.sum(), [values])
    assert torch.equal(grad, torch.ones_like(values))


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 5), (3, 18), (35, 35), (64, 80), (150, 150), (33, 520)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("drops", [False, True])
def test_attention(kernels: Kernels, queries: int, keys: int, causal: bool, padded: bool, drops: bool) -> None:
    batch, heads, width = 3, 2, 12 if padded else 16
    drawn = kernels.draw((batch, heads, queries, keys), 0.25, seed=4) if drops else None
    both = inputs((batch, queries, heads, width), *[(batch, keys, heads, width)] * 2)
    allowed = torch.arange(keys) < torch.tensor([[keys], [max(1, keys - 2)], [1]]) if padded else None
    seen = torch.ones(queries, keys, dtype=torch.bool)
    seen = seen.tril(keys - queries) if causal else seen
    seen = seen if allowed is None else seen & allowed[:, None, None]
    query, key, value = (tensor.transpose(1, 2) for tensor in both[1])
    weights = (query @ key.transpose(-2, -1) * width**-0.5).masked_fill(~seen, -math.inf).softmax(-1)
    wanted = ((weights if drawn is None else weights * mask(drawn)) @ value).transpose(1, 2)
    found = kernels.attention(*(tensor.transpose(1, 2) for tensor in both[0]), causal, allowed, drawn)
    check(found, wanted, *both, atol=rounding(keys))


@pytest.mark.parametrize("length", [5, 35, 80])
@pytest.mark.parametrize("drops", [False, True])
def test_attention_within_documents(kernels: Kernels, length: int, drops: bool) -> None:
    batch, heads, width = 3, 2, 12
    drawn = kernels.draw((batch, heads, length, length), 0.25, seed=4) if drops else None
    both = inputs(*[(batch, length, heads, width)] * 3)
    numbers = (torch.rand(batch, length) < 0.1).cumsum(1)  # of the document that each place belongs to
    starts = (numbers[:, :, None] == numbers[:, None]).int().argmax(-1)
    seen = (numbers[:, :, None] == numbers[:, None]).tril()[:, None]
    query, key, value = (tensor.transpose(1, 2) for tensor in both[1])
    weights = (query @ key.transpose(-2, -1) * width**-0.5).masked_fill(~seen, -math.inf).softmax(-1)
    wanted = ((weights if drawn is None else weights * mask(drawn)) @ value).transpose(1, 2)
    found = kernels.attention(*(tensor.transpose(1, 2) for tensor in both[0]), True, None, drawn, starts)
    check(found, wanted, *both, atol=rounding(length))


@pytest.mark.parametrize(("length", "width"), [(1, 16), (35, 12), (64, 32), (140, 32)])
def test_self_attention_of_one_tensor(kernels: Kernels, length: int, width: int) -> None:
    """The same numbers as of three, and one gradient."""
    stacked = torch.randn(2, length, 3, 4, width, requires_grad=True)
    drawn = kernels.draw((2, 4, length, length), 0.25, seed=4)
    allowed = torch.arange(length) < torch.tensor([[length], [1]])
    starts = torch.arange(length).expand(2, -1) // 3
    heads = [part.transpose(1, 2) for part in stacked.unbind(2)]
    for mask in ((False, None, None), (True, None, drawn), (True, allowed, None), (True, None, None, starts)):
        found, wanted = kernels.self_attention(stacked, *mask), kernels.attention(*heads, *mask)
        assert torch.equal(found, wanted)
        grad = torch.randn_like(found)
        both = [torch.autograd.grad(mixed, stacked, grad, retain_graph=True)[0] for mixed in (found, wanted)]
        assert torch.equal(*both)
        gapped = grad.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)  # the same in another order of memory
        for mixed in (found, wanted):
            assert torch.equal(torch.autograd.grad(mixed, stacked, gapped)[0], both[0])


@pytest.mark.parametrize("width", [144, 150])
def test_attention_of_wide_heads(kernels: Kernels, width: int) -> None:
    """In blocks of as many queries as there can be, over keys in several parts."""
    both = inputs(*[(1, 520, 2, width)] * 3)
    query, key, value = (tensor.transpose(1, 2) for tensor in both[1])
    wanted = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
    found = kernels.attention(*(tensor.transpose(1, 2) for tensor in both[0]), True, None, None)
    check(found, wanted, *both, atol=rounding(520))


def test_attention_where_rows_begin_at_any_number(kernels: Kernels) -> None:
    """Of a wider tensor: loads of vectors must not rely on their alignment."""
    both = inputs(*[(2, 20, 3, 19)] * 3)
    query, key, value = (tensor[..., 2:18].transpose(1, 2) for tensor in both[1])
    weights = (query @ key.transpose(-2, -1) * 16**-0.5).softmax(-1)
    heads = [tensor[..., 2:18].transpose(1, 2) for tensor in both[0]]
    assert kernels.fit(*heads, rows=True)
    check(kernels.attention(*heads, False, None, None), (weights @ value).transpose(1, 2), *both)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("num_tokens", "width"), [(9, 4), (9, 40), (260, 131)])
def test_cross_entropy(kernels: Kernels, num_tokens: int, width: int, smoothing: float) -> None:
    (hidden, weight), (wide, wide_weight) = both = inputs((num_tokens, width), (37, width), spread=0.5)
    targets = torch.randint(37, (num_tokens,))
    found = fused_cross_entropy(hidden, weight, None, targets, chunk=100, smoothing=smoothing, kernels=kernels)
    logits = wide @ wide_weight.T
    check(found, F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing), *both)


# Less and more than a vector, a panel and a block of columns; than a tile and a block of rows; than the rows at a time.
@pytest.mark.parametrize("num_inputs", [1, 15, 16, 64, 90, 530])
@pytest.mark.parametrize("num_outputs", [1, 5, 12, 200])
@pytest.mark.parametrize("num_tokens", [0, 1, 127, 300])
def test_weight_gradients(kernels: Kernels, num_tokens: int, num_outputs: int, num_inputs: int) -> None:
    torch.manual_seed(5)
    grad, values = torch.randn(num_tokens, num_outputs), torch.randn(num_tokens, num_inputs)
    memory = torch.full((num_outputs + 2, num_inputs), math.nan)  # what is around it stays
    own = memory[1:-1]
    wanted = grad.double().t() @ values.double()
    for times in (1, 2):
        kernels.weight_grad_(own, grad, values, first=times == 1)
        torch.testing.assert_close(own.double(), times * wanted, rtol=1e-5, atol=2e-5 * times)
    assert memory[[0, -1]].isnan().all()


def test_weight_gradients_are_the_same_on_any_number_of_threads(kernels: Kernels) -> None:
    grad, values = torch.randn(400, 450), torch.randn(400, 600)
    found = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(torch.empty(450, 600))
            kernels.weight_grad_(found[-1], grad, values, first=True)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_what_is_not_a_number_stays_so(kernels: Kernels) -> None:
    """Training finds out that it has diverged."""
    good = torch.ones(1, 1, 4, 40)
    bad = torch.full_like(good, math.nan)
    assert kernels.gelu(bad, kernels.draw(bad.shape, 0.1, seed=1)).isnan().any()
    assert kernels.norm(bad, torch.ones(40), None, 1e-5, centers=True)[0].isnan().all()
    for heads in ((bad, good, good), (good, bad, good), (good, good, bad)):
        assert kernels.attention(*heads, True, None, None).isnan().all()
    for value in (math.nan, math.inf):
        assert kernels.cross_entropy_(torch.full((1, 40), value), torch.tensor([3]), 0.0).isnan().all()


def test_tensors_that_do_not_fit_are_left_to_torch() -> None:
    values = torch.zeros(2, 3)
    assert Kernels.fit(values, None)
    for other in (values.double(), values.bfloat16(), values.t(), values.to("meta")):
        assert not Kernels.fit(values, other)
    heads = torch.zeros(2, 3, 4, 5).transpose(1, 2)
    assert Kernels.fit(heads, rows=True) and not Kernels.fit(heads) and not Kernels.fit(heads.mT, rows=True)


@pytest.mark.usefixtures("kernels")
def test_the_library_is_compiled_once(folder: Path, monkeypatch) -> None:
    (file,) = folder.iterdir()
    monkeypatch.setenv("CXX", "/nowhere/g++")
    load_library(folder)
    assert list(folder.iterdir()) == [file]


def test_a_change_of_a_header_compiles_the_library_again(tmp_path: Path) -> None:
    source, header = tmp_path / "answer.cpp", tmp_path / "answer.h"
    source.write_text('#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n')
    for number in (41, 42):
        header.write_text(f"#define ANSWER {number}\n")
        library = NativeLibrary(source)
        assert not library.is_kept(tmp_path / "kept")
        assert library.load(tmp_path / "kept").answer() == number
        assert library.is_kept(tmp_path / "kept")


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("left", [0, 1000, 20_000])
def test_a_damaged_library_is_compiled_again(tmp_path: Path, folder: Path, left: int) -> None:
    (kept,) = folder.iterdir()
    damaged = tmp_path / kept.name
    damaged.write_bytes(kept.read_bytes()[:left])
    assert load_library(tmp_path).gelu is not None
    assert list(tmp_path.iterdir()) == [damaged] and damaged.stat().st_size == kept.stat().st_size


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [("/nowhere/g++", "CXX=/nowhere/g++ is not a command"), ("false", "false: exit code 1")],
)
def test_without_a_compiler_one_line_says_why(tmp_path: Path, monkeypatch, compiler: str, reason: str) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(CannotCompile) as raised:
        load_library(tmp_path)
    assert str(raised.value) == reason
    assert not list(tmp_path.iterdir())
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotCompile, match="there is no C\\+\\+ compiler"):
        load_library(tmp_path)


def test_where_nothing_can_be_kept_it_is_compiled_all_the_same() -> None:
    assert load_library(Path("/dev/null/kernels")).gelu is not None
