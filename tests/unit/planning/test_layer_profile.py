"""What is measured of each layer: times that order them, a recomputed forward among them, and the bytes it holds."""

import time

import pytest
import torch
from torch import Tensor, nn

from hvd_transformer.config import load
from hvd_transformer.models.language_model import LanguageModel, language_model_layers
from hvd_transformer.nn.contracts import Layer, MicroBatch
from hvd_transformer.planning.layer_profile import LayerProfile, measure_layers
from hvd_transformer.planning.pass_memory import PASS_MODES

WIDTH, SAMPLES = 8, 3
PAUSE = 0.1
CPU = torch.device("cpu")


class Sleeping(nn.Module):
    """Takes its time in forward, and autograd saves its output: exp(weight × x)."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.seconds = seconds

    def forward(self, values: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return (values * self.weight).exp()


def layers() -> list[Layer]:
    slow, quick = Sleeping(PAUSE), Sleeping(0.0)
    return [
        Layer("slow", slow, slow),
        Layer("quick", quick, quick),
        Layer("loss", quick, lambda values, targets: (values - targets).sum(), recompute=False),
    ]


def measured(**options: object) -> list[LayerProfile]:
    values = torch.zeros(SAMPLES, WIDTH)
    return measure_layers(layers(), MicroBatch((values,), (values,)), CPU, seconds=0, **options)


def test_a_recomputed_layers_forward_counts_twice() -> None:
    once, twice = measured(), measured(recompute=True)
    assert PAUSE <= once[0].seconds < 1.9 * PAUSE
    assert twice[0].seconds >= 2 * PAUSE
    for costs in (once, twice):
        assert costs[1].seconds < PAUSE / 2
        assert costs[2].seconds < PAUSE / 2


def test_bytes_of_each_layer() -> None:
    """A weight that two layers have counts at the last."""
    tensor, weights = 4 * SAMPLES * WIDTH, 4 * WIDTH
    for recompute in (False, True):
        costs = measured(recompute=recompute)
        assert [cost.weights for cost in costs] == [weights, 0, weights]
        kept = [[found.kept for (again, _), found in cost.passes.items() if again == recompute] for cost in costs]
        # The input and what exp gave, and in the end a sum; exp's output is the last thing that a layer has, so that
        # computing it again saves nothing here.
        assert kept == [[2 * tensor] * 2, [2 * tensor] * 2, [tensor + 4] * 2]
        assert all(
            set(cost.passes) == {mode for mode in PASS_MODES if recompute or not mode.recompute} for cost in costs
        )
        assert all(found.inputs == tensor and found.late == 0 for cost in costs for found in cost.passes.values())


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_nothing_is_left_behind(tied: bool, recompute: bool) -> None:
    words = ["model.num_layers=2", "model.d_model=8", "model.num_heads=2", f"model.tie_embeddings={tied}"]
    torch.manual_seed(0)
    model = LanguageModel(13, load(overrides=words).model)
    before = [weight.detach().clone() for weight in model.parameters()]
    threads, random = torch.get_num_threads(), torch.get_rng_state()
    tokens = torch.arange(12).view(2, 6)
    costs = measure_layers(
        language_model_layers(model), MicroBatch((tokens,), (tokens,)), CPU, recompute=recompute, threads=1, seconds=0
    )
    assert len(costs) == 4
    assert all(cost.seconds > 0 and cost.passes[False, True].kept > 0 for cost in costs)
    assert sum(cost.weights for cost in costs) == 4 * sum(weight.numel() for weight in model.parameters())
    hidden = sum(weight.numel() for weight in model.parameters() if weight.ndim == 2 and 13 not in weight.shape)
    assert sum(cost.hidden for cost in costs) == 4 * hidden
    assert sum(cost.shadow for cost in costs) == 2 * (hidden + 13 * 8)  # and the output layer
    assert all(weight.grad is None for weight in model.parameters())
    assert all(map(torch.equal, model.parameters(), before))
    assert model.embedding.embedding.embedding_grads is None
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), random)
