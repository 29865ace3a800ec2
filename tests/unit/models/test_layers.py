"""A block equals torch.nn.TransformerEncoderLayer, and drops as much and where that one does."""

import pytest
import torch
from plain_transformer import PARTS, scatter_weights
from torch import nn

from hvd_transformer.config.schema import ModelConfig
from hvd_transformer.models.layers import Block, DecoderBlock, TokenEmbedding


def config(**changes: object) -> ModelConfig:
    return ModelConfig(**{"num_layers": 1, "d_model": 8, "num_heads": 2, "d_feedforward": 12, **changes})


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_a_block_equals_torchs_encoder_layer(norm: str, activation: str) -> None:
    block = Block(config(norm=norm, activation=activation, position="learned")).double()
    scatter_weights(block)
    layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, activation, batch_first=True, norm_first=norm == "pre").double()
    weights = dict(block.named_parameters())
    for name, parameter in layer.named_parameters():
        theirs, ours = next(pair for pair in PARTS if name.startswith(pair[0]))
        parameter.data.copy_(weights.pop(ours + name.removeprefix(theirs)))
    assert not weights
    hidden = torch.randn(3, 7, 8, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
    torch.testing.assert_close(block(hidden), layer(hidden, mask, is_causal=True), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [Block, DecoderBlock])
def test_a_block_with_zero_outputs_starts_as_the_identity_and_is_else_the_same(kind: type[Block]) -> None:
    def make(init_output: str) -> Block:
        torch.manual_seed(3)
        return kind(config(init_output=init_output))

    block, usual = make("zero"), make("default")
    hidden = torch.randn(3, 7, 8)
    more = (torch.randn(3, 5, 8), torch.ones(3, 5, dtype=torch.bool)) if kind is DecoderBlock else ()
    assert torch.equal(block(hidden, *more), hidden)
    assert not torch.allclose(usual(hidden, *more), hidden)
    zero = {name for name, weight in block.named_parameters() if not torch.equal(weight, usual.get_parameter(name))}
    parts = ["attention", "feedforward", "cross"][: 3 if more else 2]
    assert zero == {f"{part}.output.weight" for part in parts}
    block(hidden, *more).square().sum().backward()
    assert all(block.get_parameter(name).grad.any() for name in zero)  # it does not stay so


def test_an_embedding_is_its_row_times_the_root_of_the_width() -> None:
    embedding = TokenEmbedding(5, config(position="rotary")).double()
    tokens = torch.tensor([[4, 0], [2, 2]])
    torch.testing.assert_close(embedding(tokens), embedding.embedding.weight[tokens] * 8**0.5, rtol=1e-14, atol=0)


def test_dropout_of_the_embedding_keeps_the_mean_and_drops_its_share() -> None:
    embedding = TokenEmbedding(2, config(position="rotary", dropout=0.25))
    embedding.embedding.weight.data.fill_(1.0)
    torch.manual_seed(0)
    dropped = embedding(torch.zeros(50, 40, dtype=torch.int64)) / 8**0.5
    assert dropped.unique().tolist() == [0.0, pytest.approx(1 / 0.75)]
    assert (dropped == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize("position", ["sinusoidal", "learned", "rotary"])
def test_only_learned_positions_are_weights(position: str) -> None:
    names = [name for name, _ in TokenEmbedding(5, config(position=position, max_length=6)).named_parameters()]
    assert names == ["embedding.weight"] + ["positions.embedding.weight"] * (position == "learned")
