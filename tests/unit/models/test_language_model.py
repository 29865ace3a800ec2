"""The language model equals torch.nn's layers with a causal mask, and has the tutorial's number of weights."""

import math

import pytest
import torch
import torch.nn.functional as F
from plain_transformer import PlainTransformer, scatter_weights
from torch import Tensor, nn

from hvd_transformer.config import load
from hvd_transformer.config.schema import ModelConfig
from hvd_transformer.models.language_model import LanguageModel, language_model_layers

VOCABULARY = 13


def settings(**changes: object) -> ModelConfig:
    small = {"num_layers": 3, "d_model": 12, "num_heads": 3, "d_feedforward": 20, "max_length": 16, "loss_chunk": 5}
    return ModelConfig(**{**small, **changes})


def model(dtype: torch.dtype = torch.float64, **changes: object) -> LanguageModel:
    made = LanguageModel(VOCABULARY, settings(**changes)).to(dtype)
    scatter_weights(made)
    return made


def some_tokens(batch: int = 2, length: int = 9) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("tie_embeddings", [True, False])
@pytest.mark.parametrize("position", ["sinusoidal", "learned"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_copied_weights_give_the_logits_and_gradients_of_torch_nn(
    norm: str, activation: str, position: str, tie_embeddings: bool
) -> None:
    changes = {"norm": norm, "activation": activation, "position": position, "tie_embeddings": tie_embeddings}
    ours = model(**changes)
    plain = PlainTransformer(VOCABULARY, settings(**changes)).double().load(dict(ours.named_parameters()))
    tokens = some_tokens()
    expected = plain(tokens[:, :-1])
    torch.testing.assert_close(ours(tokens[:, :-1]), expected, rtol=1e-10, atol=1e-10)

    loss = ours.head.loss(ours.hidden(tokens[:, :-1]), tokens[:, 1:])
    reference = F.cross_entropy(expected.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(loss, reference, rtol=1e-10, atol=0)
    loss.backward()
    reference.backward()
    for name, parameter in plain.by_our_names().items():
        own = ours.get_parameter(name).grad
        torch.testing.assert_close(own, parameter.grad, rtol=1e-8, atol=1e-10, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_float32_agrees_with_torch_nn_too(norm: str) -> None:
    ours = model(torch.float32, norm=norm)
    plain = PlainTransformer(VOCABULARY, settings(norm=norm)).load(dict(ours.named_parameters()))
    torch.testing.assert_close(ours(some_tokens()), plain(some_tokens()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("position", ["sinusoidal", "learned", "rotary"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_later_token_does_not_change_earlier_logits(norm: str, position: str) -> None:
    ours = model(norm=norm, position=position)
    tokens = some_tokens(1, 10)
    changed = tokens.clone()
    changed[0, 6] = (changed[0, 6] + 1) % VOCABULARY
    before, after = ours(tokens)[0], ours(changed)[0]
    torch.testing.assert_close(after[:6], before[:6], rtol=0, atol=1e-13)
    # And it does change its own and all later ones.
    assert ((after[6:] - before[6:]).abs().amax(-1) > 1e-6).all()


@pytest.mark.parametrize("position", ["sinusoidal", "learned", "rotary"])
def test_the_order_of_earlier_tokens_matters(position: str) -> None:
    """Without positions a causal attention of one layer could not tell it."""
    ours = model(position=position, num_layers=1)
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    swapped = torch.tensor([[2, 1, 3, 4, 5]])
    assert (ours(tokens)[0, -1] - ours(swapped)[0, -1]).abs().max() > 1e-4


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_layers_in_order_are_the_whole_model(norm: str) -> None:
    ours = model(norm=norm)
    hidden, layers = some_tokens(), language_model_layers(ours)
    for layer in layers[:-1]:
        hidden = layer.run(hidden)
    torch.testing.assert_close(layers[-1].module(hidden), ours(some_tokens()), rtol=0, atol=0)
    in_layers = {id(weight) for layer in layers for weight in layer.module.parameters()}
    assert in_layers == {id(weight) for weight in ours.parameters()}
    assert len(layers) == 5


def test_tied_embeddings_are_one_parameter_and_untied_are_two() -> None:
    tied, free = model(tie_embeddings=True), model(tie_embeddings=False)
    assert tied.head.weight is tied.embedding.embedding.weight
    assert tied.head.bias is None
    assert free.head.weight is not free.embedding.embedding.weight
    assert isinstance(free.head.bias, nn.Parameter)
    # A matrix less, and a bias less.
    difference = sum(map(Tensor.numel, free.parameters())) - sum(map(Tensor.numel, tied.parameters()))
    assert difference == VOCABULARY * 12 + VOCABULARY


def test_a_tied_matrix_gets_the_gradients_of_both_its_uses() -> None:
    tied = model(tie_embeddings=True)
    free = model(tie_embeddings=False)
    weights = dict(tied.named_parameters()) | {
        "head.weight": tied.head.weight,
        "head.bias": torch.zeros(VOCABULARY, dtype=torch.float64),
    }
    free.load_state_dict({name: weight.detach().clone() for name, weight in weights.items()})
    tokens = some_tokens()
    for one in (tied, free):
        one.head.loss(one.hidden(tokens[:, :-1]), tokens[:, 1:]).backward()
    both = free.embedding.embedding.weight.grad + free.head.weight.grad
    torch.testing.assert_close(tied.head.weight.grad, both, rtol=1e-10, atol=1e-12)


def test_tutorial_1b_has_exactly_the_tutorials_number_of_weights() -> None:
    with torch.device("meta"):
        big = LanguageModel(28_783, load("tutorial-1b").model)
    trainable = sum(weight.numel() for weight in big.parameters() if weight.requires_grad)
    assert trainable == 1_041_453_167
    width, forward, words = 4096, 4096, 28_783
    attention = 4 * width * width + 4 * width
    feedforward = 2 * width * forward + forward + width
    assert trainable == words * width + 8 * (attention + feedforward + 4 * width) + words * width + words


@pytest.mark.parametrize(
    ("name", "bound"), [("gpt-small", 0.7), ("python-docs", 0.1), ("shakespeare-char", 0.1), ("tutorial-small", 0.5)]
)
def test_an_untrained_model_of_every_preset_is_nearly_uniform(name: str, bound: float) -> None:
    """The loss of random targets is log V plus half the variance of the logits, 0.02² · D / 2, which is at most 0.15.

    In the widest tied model each token also predicts itself: its own logit is 0.02 · D times the cosine between its
    vector and the last hidden state, here about 10, which adds log(1 + exp(10) / V), 0.5. The tutorial's output layer
    is uniform within ±0.1, so that half the variance is 0.1² / 3 · 200 / 2, 0.33.
    """
    vocabulary, config = 32_768, load(name, overrides=["model.num_layers=1"]).model
    torch.manual_seed(1)
    made = LanguageModel(vocabulary, config).eval()
    tokens = torch.randint(vocabulary, (4, 33), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        loss = made.head.loss(made.hidden(tokens[:, :-1]), tokens[:, 1:])
    assert abs(loss.item() / (4 * 32) - math.log(vocabulary)) < bound


def test_a_seed_gives_the_same_weights_and_another_seed_others() -> None:
    made = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        made.append(torch.cat([weight.detach().flatten() for weight in LanguageModel(5, settings()).parameters()]))
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])


def test_dropout_is_active_in_training_alone() -> None:
    ours = model(dropout=0.5)
    tokens = some_tokens()
    ours.eval()
    assert torch.equal(ours(tokens), ours(tokens))
    torch.testing.assert_close(ours(tokens), model(dropout=0.0)(tokens), rtol=0, atol=0)
    ours.train()
    torch.manual_seed(1)
    first, second = ours(tokens), ours(tokens)
    torch.manual_seed(1)
    assert not torch.allclose(first, second) and torch.equal(first, ours(tokens))
