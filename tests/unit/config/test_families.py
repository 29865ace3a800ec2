"""The `model` of a Llama's or a Qwen3's config.json, and what is refused."""

import json
from pathlib import Path

import pytest

from hvd_transformer.config import load
from hvd_transformer.config.families import model_keys
from hvd_transformer.errors import UserError

LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 8192, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 500000.0, "head_dim": 64,
}  # fmt: skip
SCALING = {
    "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip


def folder(path: Path, **more: object) -> Path:
    (path / "config.json").write_text(json.dumps({**LLAMA, **more}))
    return path


def test_the_folder_says_what_the_model_is(tmp_path: Path) -> None:
    """As Llama 3.2 1B has it, in the words of transformers 4."""
    words = [
        f"model.pretrained={folder(tmp_path, rope_scaling=SCALING)}",
        "parallel.tensor=4",
        "model.dropout=0.1",
    ]
    model = load(overrides=words).model
    assert (model.num_layers, model.d_model, model.num_heads, model.num_kv_heads) == (
        16,
        2048,
        32,
        8,
    )
    assert (model.head_width, model.norm_type, model.activation, model.position) == (
        None,
        "rms",
        "swiglu",
        "rotary",
    )
    assert (model.rope_theta, model.rope_scaling, model.vocab_size) == (
        500000.0,
        SCALING,
        128256,
    )
    assert (
        model.bias,
        model.head_bias,
        model.scale_embedding,
        model.tie_embeddings,
    ) == (False, False, False, True)
    assert (model.dropout, model.in_own_blocks) == (0.1, True)


def test_a_key_that_is_null_is_as_transformers_takes_it(tmp_path: Path) -> None:
    keys = model_keys({**LLAMA, "model_type": "qwen3", "num_key_value_heads": None, "head_dim": None}, "config.json")
    assert (keys["num_heads"], keys["num_kv_heads"], keys["head_width"]) == (32, None, None)


def test_what_is_trained_by_transformers_own_modules_has_no_rotary_position_of_ours(tmp_path: Path) -> None:
    """Else it would be taken for a model in our blocks, which has no LoRA."""
    pretrained = f"model.pretrained={folder(tmp_path)}"
    for words, told in (
        (["model.lora_rank=8"], "task=language_model, model.pretrained=.* and model.lora_rank=8"),
        (["task=classification", "data.source=rows.csv"], "task=classification, model.pretrained=.*"),
    ):
        with pytest.raises(UserError, match=rf"^model.position=rotary: not with {told}; leave it at sinusoidal$"):
            load(overrides=[pretrained, *words, "model.position=rotary"])
    folder(tmp_path, model_type="gpt2")
    with pytest.raises(UserError, match="model.position=rotary: not with .*, whose model_type is gpt2; leave it at"):
        load(overrides=[pretrained, "model.position=rotary"])


def test_a_folder_that_is_not_here_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^parallel.tensor=2: needs .*/absent/config.json, which cannot be read here$"):
        load(overrides=[f"model.pretrained={tmp_path / 'absent'}", "parallel.tensor=2"])


def test_versions_of_transformers_and_what_they_leave_out() -> None:
    new = {key: value for key, value in LLAMA.items() if key not in ("rope_theta", "head_dim", "rms_norm_eps")}
    found = model_keys({**new, "rope_parameters": {**SCALING, "rope_theta": 7.0}}, "")
    assert (found["rope_theta"], found["rope_scaling"], found["norm_eps"]) == (
        7.0,
        SCALING,
        1e-6,
    )
    old = {
        **new,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "num_key_value_heads": None,
    }
    found = model_keys(old, "")
    assert (found["rope_scaling"], found["num_kv_heads"]) == (
        {"rope_type": "linear", "factor": 2.0},
        None,
    )
    # Added to a file of transformers 5, as many guides say: it is what counts there, too.
    both = {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_scaling": SCALING}
    found = model_keys(both, "")
    theirs = pytest.importorskip("transformers").LlamaConfig.from_dict(both).rope_parameters
    assert {**found["rope_scaling"], "rope_theta": found["rope_theta"]} == theirs
    qwen = {key: value for key, value in new.items() if key != "num_key_value_heads"}
    found = model_keys({**qwen, "model_type": "qwen3"}, "")
    assert (found["head_width"], found["num_kv_heads"], found["qk_norm"]) == (
        128,
        None,
        True,
    )


def test_other_families_are_transformers_own_modules(tmp_path: Path) -> None:
    origin = folder(tmp_path, model_type="gpt2")
    model = load(overrides=[f"model.pretrained={origin}"]).model
    assert not model.in_own_blocks and model.num_layers == type(model).model_fields["num_layers"].default
    with pytest.raises(UserError, match=r"parallel\.tensor=2: not with model\.pretrained="):
        load(overrides=[f"model.pretrained={origin}", "parallel.tensor=2"])
    folder(tmp_path)  # a Llama, whose classifier is transformers' own
    assert not load(overrides=[f"model.pretrained={origin}", "task=classification"]).model.in_own_blocks


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"hidden_act": "gelu"},
            "hidden_act=gelu in its config.json: only silu is supported",
        ),
        (
            {"attention_bias": True},
            "mlp_bias=None in its config.json: only attention_bias is supported",
        ),
        (
            {"model_type": "qwen3", "attention_bias": True},
            "attention_bias=True in its config.json: only false is",
        ),
        (
            {"model_type": "qwen3", "use_sliding_window": True},
            "use_sliding_window=True in its config.json",
        ),
        ({"hidden_size": None}, "its config.json is not a llama's: TypeError"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_type=dynamic: must be one of linear, llama3, yarn",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "rope_scaling.* in its config.json: ",
        ),
        ({"rope_scaling": [1]}, "its config.json is not a llama's: TypeError"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
            "rope_type=llama3 needs low_freq_factor",
        ),
    ],
)
def test_variants_that_our_blocks_are_not(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(overrides=[f"model.pretrained={folder(tmp_path, **change)}"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["model.num_layers=3"],
            r"model\.num_layers=3: not with model\.pretrained=.*, which has 16; leave it at 4",
        ),
        (
            ["data.tokenizer=char"],
            r"data\.tokenizer=char: not with model\.pretrained=.*, which has its own",
        ),
        (
            ["parallel.tensor=16"],
            r"parallel\.tensor=16: must divide model\.num_kv_heads=8",
        ),
    ],
)
def test_what_contradicts_the_folder(tmp_path: Path, words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(overrides=[f"model.pretrained={folder(tmp_path)}", *words])
