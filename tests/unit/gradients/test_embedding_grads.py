"""Which embeddings travel as rows, and that a job trains alike whichever way they go."""

from typing import Literal

import pytest
import torch
from small_job import run, settings, trainer, weights
from torch import nn

from hvd_transformer.gradients.embedding_grads import plan_embedding_grads
from hvd_transformer.nn.parallel_layers import VocabParallelEmbedding


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
