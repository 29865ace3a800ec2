"""Which embeddings travel as rows, and that a job trains alike whichever way they go."""

from contextlib import nullcontext
from typing import Any, Literal

import pytest
import torch
from small_job import run, settings, trainer, weights
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hvd_transformer.comm.world import World
from hvd_transformer.gradients import embedding_grads
from hvd_transformer.gradients.embedding_grads import EmbeddingGrad, plan_embedding_grads
from hvd_transformer.gradients.wire.plain import Wire
from hvd_transformer.nn.parallel_layers import VocabParallelEmbedding

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
    grad = EmbeddingGrad(weight.detach(), "rows", Wire(World(), {}))
    grad.put(tokens, factors)
    grad.send()
    shard = torch.zeros(stop - first, 3, dtype=torch.float64)
    with _NoHostWaits() if on_gpu else nullcontext():
        grad.add_gathered(shard, first)
    torch.testing.assert_close(shard, weight.grad[first:stop])
