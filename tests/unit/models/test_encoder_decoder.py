"""Encoder-decoder and classifier equal torch.nn's layers with the same weights, and decoding by steps the whole."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvd_transformer.config.schema import ModelConfig
from hvd_transformer.models.classifier import Classifier, classifier_layers
from hvd_transformer.models.encoder_decoder import EncoderDecoder, encoder_decoder_layers
from hvd_transformer.models.positions import sinusoidal_table

B, S, T, D, SOURCES, TARGETS, PAD = 3, 7, 5, 16, 13, 11, 1


@pytest.fixture(autouse=True)
def float64():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def config(**keys: object) -> ModelConfig:
    sizes = {"num_layers": 2, "d_model": D, "num_heads": 4, "d_feedforward": 24, "max_length": 32}
    return ModelConfig(**(sizes | keys))


def batch() -> tuple[Tensor, Tensor]:
    """Sources [B, S] and targets [B, T], each row but one with padding at its end."""
    source, target = torch.randint(4, SOURCES, (B, S)), torch.randint(4, TARGETS, (B, T))
    source[1, 4:], source[2, 6:], target[0, 3:] = PAD, PAD, PAD
    return source, target


def shaken(model: nn.Module) -> nn.Module:
    """Biases and norms, too, are something."""
    for weight in model.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    return model


def torchs(model: EncoderDecoder, settings: ModelConfig) -> nn.Transformer:
    """torch.nn.Transformer with the model's weights; a post-norm one has no norms at its ends, as in the paper."""
    pre = settings.norm == "pre"
    kinds = {"nhead": settings.num_heads, "dim_feedforward": settings.d_feedforward, "dropout": 0.0}
    kinds |= {"activation": settings.activation, "batch_first": True, "norm_first": pre}
    depth = settings.num_decoder_layers or settings.num_layers
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(D, **kinds), settings.num_layers, nn.LayerNorm(D) if pre else None, False
    )
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(D, **kinds), depth, nn.LayerNorm(D) if pre else None)
    result = nn.Transformer(D, custom_encoder=encoder, custom_decoder=decoder, batch_first=True)  # which fills them
    for ours, theirs in zip([*model.encoder, *model.decoder], [*encoder.layers, *decoder.layers], strict=True):
        copy(ours.attention.qkv, (theirs.self_attn.in_proj_weight, theirs.self_attn.in_proj_bias))
        copy(ours.attention.output, theirs.self_attn.out_proj)
        copy(ours.feedforward.input, theirs.linear1)
        copy(ours.feedforward.output, theirs.linear2)
        copy(ours.norm1, theirs.norm1)
        if hasattr(ours, "cross"):
            joined = [torch.cat([one, two]) for one, two in zip(*(
                (layer.weight.data, layer.bias.data) for layer in (ours.cross.query, ours.cross.key_value)
            ), strict=True)]  # fmt: skip
            theirs.multihead_attn.in_proj_weight.data.copy_(joined[0])
            theirs.multihead_attn.in_proj_bias.data.copy_(joined[1])
            copy(ours.cross.output, theirs.multihead_attn.out_proj)
            copy(ours.norm3, theirs.norm2)
            copy(ours.norm2, theirs.norm3)
        else:
            copy(ours.norm2, theirs.norm2)
    if pre:
        copy(model.encoder_norm, encoder.norm)
        copy(model.head.norm, decoder.norm)
    return result


def copy(ours: nn.Module, theirs: nn.Module | tuple[Tensor, Tensor]) -> None:
    weight, bias = theirs if isinstance(theirs, tuple) else (theirs.weight, theirs.bias)
    weight.data.copy_(ours.weight.data)
    bias.data.copy_(ours.bias.data)


def embedded(table: nn.Embedding, tokens: Tensor) -> Tensor:
    return F.embedding(tokens, table.weight) * D**0.5 + sinusoidal_table(tokens.size(1), D, torch.float64, "cpu")


KINDS = [
    {"norm": "pre", "activation": "gelu", "tie_embeddings": False},
    {"norm": "post", "activation": "relu", "tie_embeddings": True, "num_decoder_layers": 3},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_logits_are_torchs(kind: dict) -> None:
    settings = config(**kind)
    model = shaken(EncoderDecoder(SOURCES, TARGETS, settings))
    source, target = batch()
    reference = torchs(model, settings)
    hidden = reference(
        embedded(model.source_embedding.embedding, source),
        embedded(model.target_embedding.embedding, target),
        tgt_mask=nn.Transformer.generate_square_subsequent_mask(T),
        src_key_padding_mask=source == PAD,
        tgt_key_padding_mask=torch.zeros(B, T).masked_fill(target == PAD, -torch.inf),  # as torch wants both alike
        memory_key_padding_mask=source == PAD,
        tgt_is_causal=True,
    )
    wanted = F.linear(hidden, model.head.weight, model.head.bias)
    found = model(source, source != PAD, target)
    there = target != PAD  # what follows padding nobody looks at
    assert (found - wanted)[there].abs().max() < 1e-9 * wanted.abs().max()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_loss_and_gradients_through_the_layers_are_torchs(kind: dict, smoothing: float) -> None:
    """As the pipeline calls them; the padding's places cost nothing and count nothing."""
    model = shaken(EncoderDecoder(SOURCES, TARGETS, config(**kind, loss_chunk=3), smoothing))
    source, target = batch()
    goals = torch.cat([target[:, 1:], torch.full((B, 1), PAD)], 1).flatten()
    logits = model(source, source != PAD, target)
    wanted = F.cross_entropy(logits.flatten(0, 1), goals, ignore_index=PAD, reduction="sum", label_smoothing=smoothing)
    gradients = torch.autograd.grad(wanted, list(model.parameters()))
    places = (goals != PAD).nonzero().flatten()
    tensors: tuple[Tensor, ...] = (source, source != PAD, target)
    layers = encoder_decoder_layers(model)
    for layer in layers:
        found = layer.run(*tensors, *((places, goals[places]) if layer is layers[-1] else ()))
        tensors = found if isinstance(found, tuple) else (found,)
    torch.testing.assert_close(tensors[0], wanted, rtol=1e-12, atol=0)
    for own, whole in zip(torch.autograd.grad(tensors[0], list(model.parameters())), gradients, strict=True):
        torch.testing.assert_close(own, whole, rtol=1e-9, atol=1e-11)
    model.eval()
    tensors = (source, source != PAD, target)
    for layer in layers:
        found = layer.run(*tensors, *((places, goals[places]) if layer is layers[-1] else ()))
        tensors = found if isinstance(found, tuple) else (found,)
    plain = F.cross_entropy(logits.flatten(0, 1), goals, ignore_index=PAD, reduction="sum")
    torch.testing.assert_close(tensors[0], plain, rtol=1e-12, atol=0)  # evaluation smooths nothing


def test_shared_embeddings_are_one_weight() -> None:
    model = EncoderDecoder(SOURCES, SOURCES, config(share_embeddings=True))
    names = [name for name, _ in model.named_parameters() if "embedding" in name or name == "head.weight"]
    assert names == ["source_embedding.embedding.weight"]


@pytest.mark.parametrize("position", ["sinusoidal", "learned", "rotary"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_decoding_token_by_token_is_decoding_at_once(norm: str, position: str) -> None:
    model = shaken(EncoderDecoder(SOURCES, TARGETS, config(norm=norm, position=position))).eval()
    source, target = batch()
    allowed = source != PAD
    with torch.no_grad():
        memory, pasts = model.encode(source, allowed), model.new_pasts()
        whole = model.decode(target, memory, allowed)
        pieces = [target[:, :2], *target[:, 2:].split(1, dim=1)]  # a beginning of two, then one at a time
        found = torch.cat([model.decode(piece, memory, allowed, pasts) for piece in pieces], 1)
    torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_classifier_is_torchs_encoder_and_a_mean(norm: str) -> None:
    settings = config(norm=norm)
    model = shaken(Classifier(SOURCES, 3, settings)).eval()
    layer = nn.TransformerEncoderLayer(
        D, 4, 24, 0.0, activation=settings.activation, batch_first=True, norm_first=norm == "pre"
    )
    encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(D) if norm == "pre" else None, enable_nested_tensor=False)
    for ours, theirs in zip(model.blocks, encoder.layers, strict=True):
        copy(ours.attention.qkv, (theirs.self_attn.in_proj_weight, theirs.self_attn.in_proj_bias))
        for own, other in (
            (ours.attention.output, theirs.self_attn.out_proj), (ours.feedforward.input, theirs.linear1),
            (ours.feedforward.output, theirs.linear2), (ours.norm1, theirs.norm1), (ours.norm2, theirs.norm2),
        ):  # fmt: skip
            copy(own, other)
    if norm == "pre":
        copy(model.head.norm, encoder.norm)
    source, _ = batch()
    encoder.train()  # its fast path leaves padding's rows zero, which changes nothing here, but warns
    hidden = encoder(embedded(model.embedding.embedding, source), src_key_padding_mask=source == PAD)
    means = torch.stack([row[own != PAD].mean(0) for row, own in zip(hidden, source, strict=True)])
    wanted = model.head.output(torch.tanh(model.head.dense(means)))
    found = model(source, source != PAD)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)

    labels = torch.tensor([2, 0, 2])
    tensors: tuple[Tensor, ...] = (source, source != PAD)
    layers = classifier_layers(model)
    for one in layers:
        result = one.run(*tensors, *((labels,) if one is layers[-1] else ()))
        tensors = result if isinstance(result, tuple) else (result,)
    loss, *counts = tensors[0].tolist()
    assert loss == pytest.approx(F.cross_entropy(wanted, labels, reduction="sum").item())
    matrix = torch.zeros(3, 3)
    for label, best in zip(labels.tolist(), wanted.argmax(-1).tolist(), strict=True):
        matrix[label, best] += 1
    assert counts == torch.cat([matrix.diag(), matrix.sum(1), matrix.sum(0)]).tolist()  # hits, labels, predictions
