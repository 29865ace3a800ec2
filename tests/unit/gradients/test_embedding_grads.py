"""Which embeddings travel as rows, and that a job trains alike whichever way they go."""

import threading
import time
from contextlib import nullcontext
from typing import Any, Literal

import pytest
import torch
from fake_gpu import GPU, operators_called
from small_job import run, settings, trainer, weights
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hvd_transformer.comm.world import World
from hvd_transformer.config import load
from hvd_transformer.gradients import embedding_grads
from hvd_transformer.gradients.embedding_grads import EmbeddingGrad, RowSink, plan_embedding_grads
from hvd_transformer.gradients.wire.plain import Wire
from hvd_transformer.models.encoder_decoder import EncoderDecoder, encoder_decoder_layers
from hvd_transformer.nn.contracts import MicroBatch
from hvd_transformer.nn.parallel_layers import VocabParallelEmbedding
from hvd_transformer.parallel.engine import Engine
from hvd_transformer.parallel.mesh import ParallelMesh

aten = torch.ops.aten


class Shared(nn.Module):
    """Two lookups and an output layer of one weight, and a lookup of another."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target, self.output = (
            VocabParallelEmbedding(10, 4),
            VocabParallelEmbedding(10, 4),
            nn.Linear(4, 10),
        )
        self.target.weight = self.output.weight = self.source.weight
        self.other = VocabParallelEmbedding(20, 4)


def test_tied_and_free_weights_are_told_apart() -> None:
    model = Shared()
    rows = plan_embedding_grads(model, "always", 10**6)
    assert {name: (row.embeddings, row.dense) for name, row in rows.items()} == {
        "source.weight": ([model.source, model.target], True),
        "other.weight": ([model.other], False),
    }


def test_auto_takes_rows_while_they_are_fewer_than_the_vocabulary() -> None:
    def gathered(choice: Literal["auto", "always", "never"], num_tokens: int) -> list[str]:
        return [name for name, row in plan_embedding_grads(Shared(), choice, num_tokens).items() if row.gather]

    assert gathered("auto", 9) == ["source.weight", "other.weight"]
    assert gathered("auto", 10) == ["other.weight"]
    assert not gathered("auto", 20)
    assert not gathered("never", 1)


def test_a_frozen_weight_has_no_rows() -> None:
    model = Shared()
    model.other.weight.requires_grad_(False)
    assert list(plan_embedding_grads(model, "always", 1)) == ["source.weight"]


@pytest.mark.parametrize("tied", [True, False])
def test_rows_train_like_matrices(tied: bool) -> None:
    jobs = {
        choice: trainer(
            settings(
                "training.precision=fp64",
                f"communication.embedding_rows={choice}",
                f"model.tie_embeddings={tied}",
            )
        )
        for choice in ("always", "never")
    }
    losses = {choice: run(job) for choice, job in jobs.items()}
    assert losses["always"] == pytest.approx(losses["never"], rel=1e-10)
    wanted = weights(jobs["never"])
    for name, weight in weights(jobs["always"]).items():
        torch.testing.assert_close(weight, wanted[name], rtol=1e-8, atol=1e-10)
    assert jobs["always"].task.model.embedding.embedding.embedding_grads is not None


class _NoHostWaits(TorchDispatchMode):
    """Fails at what makes the host wait for a GPU: numbers, and results whose size depends on them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (aten.index.Tensor, aten.nonzero.default, aten._local_scalar_dense.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize(("first", "stop"), [(0, 4), (4, 9), (9, 10), (10, 10)])
def test_a_shard_gets_its_own_rows(first: int, stop: int, on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding_grads, "has_streams", lambda device: on_gpu)
    weight = torch.randn(10, 3, dtype=torch.float64, requires_grad=True)
    tokens, factors = torch.tensor([9, 0, 3, 4, 9, 8, 3, 0, 1]), torch.randn(9, 3, dtype=torch.float64)
    (nn.functional.embedding(tokens, weight) * factors).sum().backward()
    grad = EmbeddingGrad(weight.detach(), "rows", Wire(World(), {}), gather=True)
    grad.sink().put(tokens, factors)
    grad.send()
    shard = torch.zeros(stop - first, 3, dtype=torch.float64)
    with _NoHostWaits() if on_gpu else nullcontext():
        grad.add_gathered(shard, first)
    torch.testing.assert_close(shard, weight.grad[first:stop])


@pytest.mark.parametrize("slow", ["stage-0", "stage-1"])
@pytest.mark.parametrize("rows", ["never", "always"])
def test_lookups_in_several_stages_are_added_in_the_same_order(
    rows: str, slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit as without a pipeline, whichever stage is faster."""
    put = RowSink.put

    def late(sink: RowSink, tokens: Tensor, values: Tensor) -> None:
        if threading.current_thread().name.startswith(slow):
            time.sleep(0.02)
        put(sink, tokens, values)

    monkeypatch.setattr(RowSink, "put", late)

    def gradient(stages: int) -> Tensor:
        words = [
            "task=translation", "data.source=multi30k", "training.device=cpu", "model.num_layers=1", "model.d_model=16",
            "model.num_heads=2", "model.d_feedforward=16", "model.share_embeddings=true", "data.sequence_length=20",
            f"parallel.pipeline={stages}", f"communication.embedding_rows={rows}",
        ]  # fmt: skip
        config, world = load(overrides=words), World()
        torch.manual_seed(0)
        model = EncoderDecoder(40, 40, config.model).train()
        layers = encoder_decoder_layers(model)
        partition, shapes = [len(layers)], {name: weight.shape for name, weight in model.named_parameters()}
        if stages == 2:
            partition = [3, len(layers) - 3]  # the second embedding is in the second stage
        mesh = ParallelMesh.of(config, world)
        engine = Engine(
            config, world, mesh, model, layers, partition=partition, splits={}, shapes=shapes, num_tokens=10
        )
        tokens = torch.randint(3, 40, (4, 2, 8, 20), generator=torch.Generator().manual_seed(5))
        batches = [
            MicroBatch((source, source != 0, target), (torch.arange(160), target.flatten()), (1, 0, number))
            for number, (source, target) in enumerate(tokens)
        ]
        engine.grad_sync.begin_step(len(batches))
        engine.begin_forward()
        engine.pipeline.forward_backward([batches], 1 / 640, lambda loss: None)
        engine.wait_params()
        engine.grad_sync.send_rest()
        engine.grad_sync.wait()
        found = [
            slot.view(buffer.gradients).clone()
            for buffer in engine.buffers
            for slot in buffer.slots
            if slot.name == "source_embedding.embedding.weight"
        ]
        engine.close()
        return found[0]

    assert torch.equal(gradient(1), gradient(2))


@pytest.mark.parametrize("count", [1, 4, 64])
def test_a_step_of_any_length_holds_no_more_rows_than_the_matrix_twice(count: int) -> None:
    weight = torch.randn(10, 3, dtype=torch.float64, requires_grad=True)
    grad = EmbeddingGrad(weight.detach(), "rows", Wire(World(), {}), gather=False)
    sinks = [grad.sink(), grad.sink()]
    matrix, generator = torch.zeros(10, 3, dtype=torch.float64), torch.Generator().manual_seed(0)
    for number in range(count):
        tokens = torch.randint(10, (4,), generator=generator)
        factors = torch.randn(4, 3, dtype=torch.float64, generator=generator)
        (nn.functional.embedding(tokens, weight) * factors).sum().backward()
        sinks[number % 2].put(tokens, factors)
        for sink in sinks:
            held = sum(rows.size(0) for _, rows in sink._rows) + (0 if sink._sum is None else sink._sum.size(0))
            assert held <= 2 * weight.size(0)
    grad.add(matrix)
    torch.testing.assert_close(matrix, weight.grad, rtol=1e-12, atol=1e-13)
    again = torch.zeros_like(matrix)
    grad.add(again)
    assert not again.any()  # the next step begins with nothing


def test_a_gpu_adds_rows_in_an_order_that_repeats() -> None:
    """`index_add_` adds them as they come there. All at once: each call makes a whole matrix."""
    with operators_called() as called:
        matrix = torch.empty(10, 4, device=GPU)
        held = [(torch.empty(6, dtype=torch.int64, device=GPU), torch.empty(6, 4, device=GPU)) for _ in range(3)]
        embedding_grads._add_all(matrix, held)
    assert called.count("embedding_dense_backward.default") == 1
    assert not [name for name in called if name.startswith(("index_", "scatter_"))]
