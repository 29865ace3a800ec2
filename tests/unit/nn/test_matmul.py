"""Matrix products by oneDNN against float64 ones, on any processor; what must be left to torch; memory."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fake_gpu import GPU, operators_called
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from hvd_transformer.nn import matmul as products
from hvd_transformer.nn.kernels import Kernels
from hvd_transformer.nn.matmul import linear, matmul, weight_grad_
from hvd_transformer.nn.parallel_layers import Linear

pytestmark = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")),
    reason="this torch has no oneDNN",
)

N, K, M = 96, 80, 144  # more than 2^20 multiplications
IS_FASTER = products._onednn_is_faster.__wrapped__  # without the cache
KERNELS_ARE = products._kernels_are_faster.__wrapped__


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a processor where oneDNN is faster, and where products are called from."""
    monkeypatch.setattr(products, "_onednn_is_faster", lambda into_sum: True)
    with torch.no_grad():
        yield


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """The shapes that oneDNN was called with."""
    found: list[tuple[int, ...]] = []
    real = torch.ops.mkldnn._linear_pointwise

    class Counted:
        @staticmethod
        def _linear_pointwise(values: Tensor, *rest: object) -> Tensor:
            found.append(tuple(values.shape))
            return real(values, *rest)

    monkeypatch.setattr(torch.ops, "mkldnn", Counted)
    yield found


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "instructions", "onednn", "kernels"),
    [
        (None, "avx512f", (False, False), False),  # not AMD's
        (25, "avx2", (False, False), False),  # Zen 3
        (25, "avx512f", (True, False), True),  # Zen 4
        (26, "avx512f", (True, True), False),  # Zen 5
    ],
)
def test_what_is_faster(
    family: int | None, instructions: str, onednn: tuple[bool, bool], kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneDNN for products alone and for those that are added to a sum, and the kernels for these."""
    monkeypatch.setattr(products, "amd_family", lambda: family)
    monkeypatch.setattr(products, "has_instructions", lambda name: name == instructions)
    assert tuple(map(IS_FASTER, (False, True))) == onednn
    assert KERNELS_ARE() == kernels


def test_products_of_any_layout(calls: list[tuple[int, ...]]) -> None:
    left, right, bias = torch.randn(N, K), torch.randn(K, M), torch.randn(M)
    wanted = left.double() @ right.double()
    close(matmul(left, right), wanted)
    close(matmul(left.t().contiguous().t(), right.t().contiguous().t()), wanted)
    close(matmul(left.view(4, N // 4, K), right, torch.float64).view(N, M), wanted)
    close(linear(left, right.t(), bias), wanted + bias)
    close(linear(left, right.t(), bias, torch.ones(N, M)), wanted + bias + 1)
    close(linear(torch.randn(N, 2 * K)[:, :K].copy_(left), right.t().contiguous()), wanted)
    assert len(calls) == 6


@pytest.mark.parametrize(
    "weight", [torch.randn(M, 2 * K)[:, :K], torch.randn(2 * M, K)[::2], torch.randn(1, K).expand(M, K)]
)
def test_operands_with_gaps_are_copied(weight: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN has no kernel for a weight with gaps: it takes a thousand times as long."""
    dense, real = [], torch.ops.mkldnn._linear_pointwise

    class Seen:
        @staticmethod
        def _linear_pointwise(values: Tensor, weight: Tensor, *rest: object) -> Tensor:
            dense.append(weight.is_contiguous() or weight.t().is_contiguous())
            return real(values, weight, *rest)

    monkeypatch.setattr(torch.ops, "mkldnn", Seen)
    values, out = torch.randn(N, K), torch.zeros(N, K)
    close(linear(values, weight), values.double() @ weight.double().t())
    weight_grad_(out, torch.randn(N, 2 * M)[:, :M].zero_().t(), weight, first=True)
    close(linear(torch.randn(2 * N, K)[::2].copy_(values), weight), values.double() @ weight.double().t())
    assert dense == [True] * 3


def test_sums_of_products(calls: list[tuple[int, ...]]) -> None:
    left, right = torch.randn(N, K), torch.randn(K, M)
    out = torch.full((N, M), torch.nan)
    weight_grad_(out, left.t(), right, first=True)
    weight_grad_(out, left.t(), right, first=False)
    close(out, 2 * left.double() @ right.double())
    assert len(calls) == 2


def test_a_sum_of_products_asks_for_what_is_faster_at_sums(
    calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_onednn_is_faster", lambda into_sum: not into_sum)
    left, right, out = torch.randn(N, K), torch.randn(K, M), torch.zeros(N, M)
    weight_grad_(out, left.t(), right, first=False)
    assert not calls
    matmul(left, right)
    assert len(calls) == 1


class CountedKernels:
    """Kernels that multiply what fits them."""

    def __init__(self) -> None:
        self.calls = 0

    fit = staticmethod(Kernels.fit)

    def weight_grad_(self, out: Tensor, grad: Tensor, values: Tensor, *, first: bool) -> None:
        self.calls += 1
        out.addmm_(grad.t(), values, beta=0 if first else 1)


@pytest.mark.parametrize("faster", [True, False])
def test_kernels_are_used_where_they_are_faster_and_fit(faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_kernels_are_faster", lambda: faster)
    kernels, grad, values = CountedKernels(), torch.randn(K, N), torch.randn(K, M)
    wanted = grad.double().t() @ values.double()

    def give(grad: Tensor, dtype: torch.dtype = torch.float32) -> int:
        before, out = kernels.calls, torch.full((N, M), torch.nan, dtype=dtype)
        weight_grad_(out, grad, values.to(grad.dtype), first=True, kernels=kernels)  # type: ignore[arg-type]
        weight_grad_(out, grad, values.to(grad.dtype), first=False, kernels=kernels)  # type: ignore[arg-type]
        torch.testing.assert_close(out.double(), 2 * wanted, rtol=1e-5, atol=0.5 if grad.dtype.itemsize == 2 else 1e-4)
        return kernels.calls - before

    assert give(grad) == 2 * faster
    assert give(grad.t().contiguous().t()) == give(grad.double(), torch.float64) == give(grad.bfloat16()) == 0
    small = torch.zeros(1, 2)
    weight_grad_(small, torch.randn(3, 1), torch.randn(3, 2), first=True, kernels=kernels)  # type: ignore[arg-type]
    assert kernels.calls == 2 * faster


def test_the_product_before_a_sum_is_small(calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_MOST_TEMPORARY", 40 * M)
    left, right = torch.randn(N + 3, 5 * K), torch.randn(5 * K, M)
    out = torch.zeros(N + 3, M)
    weight_grad_(out, left.t(), right, first=False)
    close(out, left.double() @ right.double())
    assert calls == [(40, 5 * K), (40, 5 * K), (N + 3 - 80, 5 * K)]


def test_what_is_no_number_stays_so() -> None:
    left = torch.randn(N, K)
    left[3, 5], left[7, 2] = torch.nan, torch.inf
    found = matmul(left, torch.ones(K, M))
    assert found[3].isnan().all() and found[7].isinf().all() and found[8:].isfinite().all()


@pytest.mark.parametrize("shape", [(0, K, M), (1, K, M), (N, 0, M), (N, K, 0), (15, 512, 512), (32, 32, 32)])
def test_small_products_are_torchs(shape: tuple[int, int, int], calls: list[tuple[int, ...]]) -> None:
    rows, depth, columns = shape
    left, right = torch.randn(rows, depth), torch.randn(depth, columns)
    close(matmul(left, right), left.double() @ right.double())
    assert not calls


def test_other_number_formats_are_torchs(calls: list[tuple[int, ...]]) -> None:
    left, right = torch.randn(N, K), torch.randn(K, M)
    assert matmul(left.double(), right.double()).dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(left, right.t()).dtype == torch.bfloat16
    assert not calls


def test_the_switch_of_torch_holds(calls: list[tuple[int, ...]]) -> None:
    with torch.backends.mkldnn.flags(enabled=False):
        matmul(torch.randn(N, K), torch.randn(K, M))
    assert not calls


def test_counters_see_torchs_operators() -> None:
    with FlopCounterMode(display=False) as counter:
        linear(torch.randn(N, K), torch.randn(M, K))
    assert counter.get_total_flops() == 2 * N * K * M


def test_a_layer_and_its_gradients(calls: list[tuple[int, ...]]) -> None:
    """Those of torch's layer in float64, with the weight's gradients going to a sink."""

    class Sink:
        def put(self, values: Tensor, grad: Tensor, kernels: None) -> None:
            self.weight = torch.zeros(M, K)
            weight_grad_(self.weight, grad, values, first=True, kernels=kernels)

    layer, values = Linear(K, M), torch.randn(3, N // 3, K, requires_grad=True)
    wanted, wanted_values = torch.nn.Linear(K, M).double(), values.detach().double().requires_grad_()
    wanted.load_state_dict(layer.state_dict())
    layer.weight_grads = sink = Sink()  # type: ignore[assignment]
    factor = torch.randn(3, N // 3, M)
    with torch.enable_grad():
        (layer(values) * factor).sum().backward()
        (wanted(wanted_values) * factor).sum().backward()
    assert values.grad is not None and wanted_values.grad is not None and wanted.weight.grad is not None
    close(values.grad, wanted_values.grad)
    close(sink.weight, wanted.weight.grad)
    assert len(calls) == 3
    close(layer(values), wanted(wanted_values))
    assert len(calls) == 4


def test_autograd_follows_torchs_products(calls: list[tuple[int, ...]]) -> None:
    left, right = torch.randn(N, K, requires_grad=True), torch.randn(M, K)
    with torch.enable_grad():
        linear(left, right).sum().backward()
    assert left.grad is not None
    close(left.grad, right.double().sum(0).expand(N, K))
    assert not calls


PROGRAM = """
import sys, torch
from hvd_transformer.nn import matmul
matmul._onednn_is_faster = lambda _: True
torch.set_grad_enabled(False)
if sys.argv[1] == "few":
    matmul.limit_onednn_caches()
weight, values = torch.randn(512, 128), torch.randn(800, 128)
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
matmul.linear(values, weight)
before = resident()
for rows in range(799, 300, -1):  # each fits into the memory of the one before
    matmul.linear(values[:rows], weight)
print(resident() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_the_caches_of_shapes_stay_small() -> None:
    def grown(word: str) -> float:
        clean = {key: value for key, value in os.environ.items() if "CACHE_CAPACITY" not in key}
        output = subprocess.run(
            [sys.executable, "-c", PROGRAM, word], env=clean, check=True, capture_output=True, text=True
        )
        return float(output.stdout)

    assert grown("few") < 0.75 * grown("all")  # a fifth with torch 2.13, 0.6 with torch 2.11


def test_the_users_choice_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    products.limit_onednn_caches()
    assert os.environ["LRU_CACHE_CAPACITY"] == "7"
    assert os.environ.pop("ONEDNN_PRIMITIVE_CACHE_CAPACITY") == "64"


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.skipif(not products._HAS_FLOAT32_OUT, reason="this torch has no such product")
def test_on_a_gpu_products_of_16_bits_are_written_to_float32(dtype: torch.dtype, first: bool) -> None:
    """Not rounded to 16 bits, and not added up in a matrix of their own."""
    with operators_called() as called:
        grad, values, out = (
            torch.empty(size, device=GPU, dtype=dtype or torch.float32)
            for size, dtype in (((8, 16), dtype), ((8, 4), dtype), ((16, 4), None))
        )
        called.clear()
        assert matmul(grad.t(), values, torch.float32).dtype == torch.float32
        weight_grad_(out, grad, values, first=first)
    assert [name for name in called if "mm" in name] == ["mm.dtype", "addmm.dtype_out"]
    assert not any(name.startswith(("_to_copy", "add_", "copy_")) for name in called)
