"""Our language models as classes of transformers: its modules compute the same logits from the converted weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hvd_transformer.config import load
from hvd_transformer.errors import UserError
from hvd_transformer.models.as_transformers import as_transformers
from hvd_transformer.models.language_model import LanguageModel

transformers = pytest.importorskip("transformers")
V, T = 61, 24
SIZE = ["model.num_layers=2", "model.d_model=32", "model.num_heads=4", "model.d_feedforward=56", "model.max_length=48"]
LLAMA = ["model.norm_type=rms", "model.activation=swiglu", "model.position=rotary", "model.bias=false"]
CASES = {
    "GPT-2, sinusoidal": ["data.sequence_length=48"],
    "GPT-2, learned, relu": ["model.position=learned", "model.activation=relu", "model.bias=false"],
    "GPT-2, tied": ["model.position=learned", "model.scale_embedding=false"],
    "GPT-NeoX": ["model.position=rotary", "model.rope_theta=500"],
    "GPT-NeoX, untied": ["model.position=rotary", "model.tie_embeddings=false", "model.head_bias=false"],
    "GPT-NeoX, linear": ["model.position=rotary", "model.rope_scaling={rope_type: linear, factor: 2}"],
    "Llama": [*LLAMA, "model.num_kv_heads=2", "model.norm_eps=1e-6"],
    "Llama, biased, tied": [*LLAMA, "model.bias=true", "model.scale_embedding=false"],
    "Llama, yarn": [
        *LLAMA, "model.rope_scaling={rope_type: yarn, factor: 4, original_max_position_embeddings: 12}",
        "model.head_width=12",
    ],
    "Qwen3": [
        *LLAMA, "model.qk_norm=true", "model.num_kv_heads=1", "model.tie_embeddings=false", "model.head_bias=false",
    ],
}  # fmt: skip


def made(words: list[str]) -> LanguageModel:
    """With norms and biases that are not the usual ones."""
    torch.manual_seed(3)
    config = load(overrides=["data.sequence_length=48", *SIZE, *words])
    model = LanguageModel(V, config.model)
    for weight in model.parameters():
        if weight.dim() == 1:
            torch.nn.init.normal_(weight, 0.8, 0.3)
        else:
            weight.data.mul_(3)
    return model.eval()


def converted(words: list[str], folder: Path) -> tuple[LanguageModel, torch.nn.Module, int]:
    """Our model, transformers' one of the folder, and the number of untied weights."""
    model = made(words)
    config = load(overrides=["data.sequence_length=48", *SIZE, *words]).model
    found = as_transformers(config, {name: weight.data for name, weight in model.named_parameters()})
    (folder / "config.json").write_text(json.dumps(found.config))
    save_file(found.weights, folder / "model.safetensors", {"format": "pt"})
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert type(theirs).__name__ == found.config["architectures"][0]
    return model, theirs.eval(), found.untied


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_transformers_computes_the_same_logits(name: str, tmp_path: Path) -> None:
    model, theirs, untied = converted(CASES[name], tmp_path)
    tokens = torch.randint(V, (3, T))
    ours, found = model(tokens), theirs(input_ids=tokens).logits
    assert ours.std() > 0.1
    torch.testing.assert_close(found, ours, rtol=1e-5, atol=1e-5 * float(ours.abs().max()))
    count = sum(weight.numel() for weight in model.parameters())
    words = CASES[name]
    is_tied = "model.tie_embeddings=false" not in words
    assert untied == (V * 32 if is_tied and "model.scale_embedding=false" not in words else 0)
    assert sum(weight.numel() for weight in theirs.parameters()) >= count + untied


def test_a_number_of_tokens_is_an_integer() -> None:
    """Readers of the file refuse others, or warn."""
    words = CASES["Llama, yarn"]
    config = load(overrides=["data.sequence_length=48", *SIZE, *words]).model
    found = as_transformers(config, {name: weight.data for name, weight in made(words).named_parameters()}).config
    for key in ("rope_parameters", "rope_scaling"):
        assert repr(found[key]["original_max_position_embeddings"]) == "12"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.norm=post"], r"model\.norm=post: every class of language models has norm=pre"),
        (["model.tie_embeddings=false"], r"model\.head_bias=true: every class .* without bias"),
        (["model.activation=swiglu"], r"model\.activation=swiglu: with norm_type=layer, GPT-2 has activation=gelu or"),
        (["model.norm_type=rms"], r"model\.activation=gelu: with norm_type=rms, llama has activation=swiglu"),
        ([*LLAMA, "model.position=learned"], r"model\.position=learned: .* llama has position=rotary"),
        ([*LLAMA, "model.qk_norm=true", "model.bias=true"], r"model\.bias=True: qwen3 has bias=false"),
        ([*LLAMA, "model.num_heads=3", "model.head_width=12"], r"model\.d_model=32: llama has a multiple of num_heads"),
        (["model.num_kv_heads=2"], r"model\.num_kv_heads=2: with norm_type=layer, GPT-2 has num_kv_heads=none"),
    ],
)  # fmt: skip
def test_what_no_class_computes_is_refused(words: list[str], message: str) -> None:
    config = load(overrides=["data.sequence_length=48", *SIZE, *words]).model
    weights = {name: weight.data for name, weight in LanguageModel(V, config).named_parameters()}
    with pytest.raises(UserError, match=f"^{message}"):
        as_transformers(config, weights)
