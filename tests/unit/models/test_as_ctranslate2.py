"""CTranslate2 gives the tokens of a target the probabilities that our encoder-decoder gives them."""

from pathlib import Path

import pytest
import torch

from hvd_transformer.config.schema import ModelConfig
from hvd_transformer.data.tokenizers import BEGIN, END, PAD, SPECIALS
from hvd_transformer.errors import UserError
from hvd_transformer.inference.predict import padded
from hvd_transformer.models.as_ctranslate2 import Vocabularies, as_ctranslate2
from hvd_transformer.models.encoder_decoder import EncoderDecoder

ctranslate2 = pytest.importorskip("ctranslate2")

CASES = {
    "pre-norm, tied": {},
    "post-norm, untied, one vocabulary": {"norm": "post", "tie_embeddings": False, "share_embeddings": True},
    "learned positions, no √D, other decoder": {
        "position": "learned",
        "scale_embedding": False,
        "num_decoder_layers": 1,
    },
    "relu, no biases, large epsilon": {"activation": "relu", "bias": False, "norm_eps": 0.1},
    "RMSNorm, SwiGLU": {"norm_type": "rms", "activation": "swiglu"},
}
SOURCES = [[7, 4, 9], [5, 8, 6, 4, 10, 4, 9]]
TARGETS = [[6, 5, 12, 4], [4, 13]]


def settings(**more: object) -> ModelConfig:
    common = {"num_layers": 2, "d_model": 16, "num_heads": 4, "d_feedforward": 24, "max_length": 12}
    return ModelConfig(**{**common, **more})


def vocabulary(size: int) -> list[str]:
    return [*SPECIALS, *(f"word{number}" for number in range(size - len(SPECIALS)))]


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_it_computes_the_same(name: str, tmp_path: Path) -> None:
    config = settings(**CASES[name])
    target_size = 14
    source_size = target_size if config.share_embeddings else 11
    torch.manual_seed(1)
    model = EncoderDecoder(source_size, target_size, config).eval()
    for weight in model.parameters():  # also norms and biases that are not the usual ones
        weight += 0.3 * torch.randn_like(weight)
    source, target = vocabulary(source_size), vocabulary(target_size)
    weights = {name: weight.data for name, weight in model.named_parameters()}
    as_ctranslate2(config, weights, Vocabularies(source, target, "<unk>", "<s>", "</s>")).save(str(tmp_path))
    found = ctranslate2.Translator(str(tmp_path)).score_batch(
        [[source[number] for number in row] for row in SOURCES],
        [[target[number] for number in row] for row in TARGETS],
    )
    tokens = padded([torch.tensor(row).numpy() for row in SOURCES])
    goals = padded([torch.tensor([BEGIN, *row, END]).numpy() for row in TARGETS])
    probabilities = model(tokens, tokens != PAD, goals[:, :-1]).log_softmax(-1)
    for row, (own, theirs) in enumerate(zip(TARGETS, found, strict=True)):
        wanted = [float(probabilities[row, place, token]) for place, token in enumerate([*own, END])]
        assert theirs.log_probs == pytest.approx(wanted, abs=2e-5)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"position": "rotary"}, "model.position=rotary: this export has position=sinusoidal or learned"),
        ({"num_kv_heads": 2}, "model.num_kv_heads=2: this export has num_kv_heads=none"),
        ({"head_width": 8}, "model.head_width=8: this export has head_width=none"),
        ({"qk_norm": True}, "model.qk_norm=true: this export has qk_norm=false"),
    ],
)
def test_what_does_not_fit_is_refused(more: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        as_ctranslate2(settings(**more), {}, Vocabularies([], [], "", "", ""))
