"""`training.compile` on a GPU compiles blocks: their graphs, by a backend that computes them as eager torch does."""

import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partialmethod
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_job import settings
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from hvd_transformer.models.attention import SelfAttention
from hvd_transformer.models.layers import Block
from hvd_transformer.nn import matmul
from hvd_transformer.nn.contracts import Layer
from hvd_transformer.nn.dropout import dropout_key
from hvd_transformer.nn.dry_run import assume_gpu
from hvd_transformer.nn.parallel_layers import WeightGradLayer
from hvd_transformer.training.compiled_blocks import compile_blocks, why_no_blocks

Compile = Callable[[nn.Module], CompileCounterWithBackend]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compile:
    """Compiles a module as a block, as one graph at a time; returns their counter."""
    torch._dynamo.reset()

    def compile_as_block(module: nn.Module) -> CompileCounterWithBackend:
        counter = CompileCounterWithBackend("aot_eager")
        monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=counter, fullgraph=True))
        compile_blocks(SimpleNamespace(model=module, layers=[Layer("block", module, module)]))
        return counter

    return compile_as_block


class Halved(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values / 2


def test_a_stage_has_a_graph_for_each_shape(compiled: Compile) -> None:
    block = Halved()
    counter = compiled(block)
    with ThreadPoolExecutor(1) as stage:  # since torch 2.12 a thread does not see the settings of another
        for dims in range(1, 13):
            shape = (2,) * dims
            assert torch.equal(stage.submit(block, torch.ones(shape)).result(), torch.full(shape, 0.5))
    assert counter.frame_count == 12  # torch's own limit is 8, and then it compiles no more


def test_attention_to_texts_of_any_length_is_one_graph(compiled: Compile) -> None:
    attention = SelfAttention(settings("model.dropout=0.0").model)
    inputs = [torch.randn(2, length, 8) for length in (5, 7, 11)]
    wanted = [attention(values) for values in inputs]
    counter = compiled(attention)
    for values, want in zip(inputs, wanted, strict=True):
        torch.testing.assert_close(attention(values), want)
    assert counter.frame_count == 2  # the first length, and then all others


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_whole_block_is_one_graph(
    compiled: Compile, precision: str, trains: bool, norm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 16-bit copies of its weights, dropout by place and backward, as in training, and as in evaluation."""
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda into_sum: False)  # of CPUs, which compile otherwise
    torch.manual_seed(1)
    block = Block(settings("model.dropout=0.1", f"model.norm={norm}").model).train(trains)
    if precision == "bf16":
        for layer in block.modules():
            if isinstance(layer, WeightGradLayer):
                layer.shadow = layer.weight.detach().bfloat16()
    inputs = torch.randn(2, 8, 8)

    def results() -> list[Tensor]:
        hidden = inputs.clone().requires_grad_(trains)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
        with autocast, assume_gpu(), dropout_key(1, 2), torch.set_grad_enabled(trains):
            found = block(hidden)
        if not trains:
            return [found]
        found.square().sum().backward()
        grads = [weight.grad for weight in block.parameters()]
        block.zero_grad(set_to_none=True)
        return [found, hidden.grad, *grads]

    wanted = results()
    counter = compiled(block)
    for own, want in zip(results(), wanted, strict=True):
        torch.testing.assert_close(own, want, rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("tp", "there", "why"),
    [
        (2, "triton gcc Python.h", "torch.compile cannot take layers that wait for other ranks (parallel.tensor)"),
        (1, "gcc Python.h", "torch.compile needs the package triton"),
        (1, "triton Python.h", "torch.compile finds no C compiler: install gcc, or set CC"),
        (1, "triton clang", "torch.compile needs Python.h in {}: install python3-dev"),
        (1, "triton CC Python.h", None),
        (1, "triton clang Python.h", None),
    ],
)
def test_what_triton_needs_is_looked_for(
    tp: int, there: str, why: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = there.split()
    found = ModuleSpec("triton", None) if "triton" in words else None
    monkeypatch.setattr("hvd_transformer.training.compiled_blocks.find_spec", lambda name: found)
    monkeypatch.setattr("shutil.which", lambda name: name if name in words else None)
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme: str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    if "CC" in words:
        monkeypatch.setenv("CC", "cc")
    if "Python.h" in words:
        (tmp_path / "Python.h").touch()
    assert why_no_blocks(SimpleNamespace(tp=tp)) == (why and why.format(tmp_path))
