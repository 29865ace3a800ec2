"""FLOPs in closed form against torch's counter, on forward and backward of the whole model without memory."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hvd_transformer.config import load
from hvd_transformer.config.schema import ModelConfig
from hvd_transformer.models.classifier import Classifier
from hvd_transformer.models.encoder_decoder import EncoderDecoder
from hvd_transformer.models.flops import classifier_flops, encoder_decoder_flops, language_model_flops
from hvd_transformer.models.language_model import LanguageModel

V, B, S, T = 5000, 3, 48, 40


def counted(loss: Callable[[], Tensor]) -> int:
    """Of forward and backward. Attention keeps its weights for backward: no kernel computes them again."""
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):
        loss().backward()
    return counter.get_total_flops()


def of_preset(name: str, *words: str) -> ModelConfig:
    return load(preset=name, overrides=["data.source=text", "model.dropout=0", *words]).model


def tokens(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64, device="meta")


@pytest.mark.parametrize(
    ("preset", "words"),
    [
        ("python-docs", ()),
        ("gpt-small", ()),
        ("llama-tiny", ()),
        ("llama-tiny", ("model.head_width=48", "model.num_kv_heads=1")),
        ("tutorial-small", ()),
    ],
)
@pytest.mark.parametrize("length", [16, 1000])
def test_language_models(preset: str, words: tuple[str, ...], length: int) -> None:
    config = of_preset(preset, "model.max_length=1024", *words)
    with torch.device("meta"):
        model = LanguageModel(V, config)
    total = counted(lambda: F.cross_entropy(model(tokens(B, length)).flatten(0, 1), tokens(B * length)))
    assert language_model_flops(config, V, (B, length)) == pytest.approx(total, rel=1e-9)


def test_translation_counts_targets_alone_in_the_output_layer() -> None:
    config = of_preset("multi30k", "model.num_decoder_layers=2")
    with torch.device("meta"):
        model = EncoderDecoder(2 * V, V, config)
    allowed = torch.ones(B, S, dtype=torch.bool, device="meta")
    num_targets = B * T - 7

    def loss() -> Tensor:
        hidden = model.decode(tokens(B, T), model.encode(tokens(B, S), allowed), allowed)
        return F.cross_entropy(model.head(hidden.flatten(0, 1)[:num_targets]), tokens(num_targets))

    found = encoder_decoder_flops(config, V, (B, S), (B, T), num_targets)
    assert found == pytest.approx(counted(loss), rel=1e-9)


def test_classifiers() -> None:
    config = of_preset("chnsenticorp")
    with torch.device("meta"):
        model = Classifier(V, 3, config)
    allowed = torch.ones(B, S, dtype=torch.bool, device="meta")
    total = counted(lambda: F.cross_entropy(model(tokens(B, S), allowed), tokens(B)))
    assert classifier_flops(config, 3, (B, S)) == pytest.approx(total, rel=1e-9)
