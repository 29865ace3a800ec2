"""The peers' model is the same function as ours."""

import pytest
import torch
from plain_transformer import scatter_weights

from benchmarks.plain_model import PlainLanguageModel, sum_of_losses
from hvd_transformer.config import load
from hvd_transformer.models.language_model import LanguageModel

VOCABULARY, LENGTH = 17, 6


@pytest.mark.parametrize("position", ["sinusoidal", "learned"])
@pytest.mark.parametrize("tied", [True, False])
def test_loss_and_gradients_are_ours(position: str, tied: bool) -> None:
    words = ["model.d_model=8", "model.num_heads=2", "model.d_feedforward=12", "model.num_layers=2", "model.dropout=0"]
    config = load(overrides=[*words, f"model.position={position}", f"model.tie_embeddings={tied}"]).model
    ours, plain = LanguageModel(VOCABULARY, config), PlainLanguageModel(VOCABULARY, config, LENGTH)
    scatter_weights(ours)
    plain.load_state_dict(ours.state_dict())
    inputs, targets = torch.randint(VOCABULARY, (2, 3, LENGTH), generator=torch.Generator().manual_seed(1))
    losses = [ours.head.loss(ours.hidden(inputs), targets), sum_of_losses(plain(inputs), targets)]
    for loss in losses:
        loss.backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-5)
    expected = dict(ours.named_parameters())
    for name, weight in plain.named_parameters():
        torch.testing.assert_close(weight.grad, expected[name].grad, rtol=1e-3, atol=1e-4)
    assert len(expected) == len(list(plain.parameters()))
