"""The same language model as a class of transformers: Llama, Qwen3, GPT-NeoX or GPT-2.

Those classes do not multiply embeddings by √D, so the embedding is multiplied once, here; an output layer that was tied
to it becomes a matrix of its own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvd_transformer.config.schema import ModelConfig
from hvd_transformer.errors import UserError
from hvd_transformer.models.llama_weights import piece_shapes, their_names
from hvd_transformer.models.positions import sinusoidal_table

Weights = dict[str, Tensor]


class TransformersModel(NamedTuple):
    """What its folder holds; `untied` numbers are those of an output layer that is no longer tied."""

    config: dict[str, Any]
    weights: Weights
    untied: int


class _Family(NamedTuple):
    """Its config.json, the name of its output layer, and how it has our weights."""

    config: dict[str, Any]
    head: str
    convert: Callable[[ModelConfig, Weights], Weights]


def as_transformers(config: ModelConfig, weights: Weights) -> TransformersModel:
    """Convert the weights of a `LanguageModel`. Raises `UserError` if none of the classes computes the same."""
    family = _as_llama(config) if config.norm_type == "rms" else _as_gpt(config)
    embedding = weights["embedding.embedding.weight"]
    scale = config.d_model**0.5 if config.scale_embedding else None
    is_tied = config.tie_embeddings and scale is None
    weights = dict(weights)
    if config.tie_embeddings:
        weights["head.weight"] = embedding
    if scale is not None:
        weights["embedding.embedding.weight"] = embedding * scale
    found = {
        "vocab_size": embedding.size(0),
        "tie_word_embeddings": is_tied,
        # Not those that the class would have by default; the export sets the tokenizer's.
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        "dtype": str(embedding.dtype).removeprefix("torch."),
    }
    converted = family.convert(config, weights)
    if is_tied:
        del converted[family.head]
    untied = embedding.numel() if config.tie_embeddings and not is_tied else 0
    own = {name: weight.contiguous() for name, weight in converted.items()}
    return TransformersModel({**family.config, **found}, own, untied)


def _refuse(key: str, value: object, why: str) -> None:
    raise UserError(f"model.{key}={value}: {why}")


def _check(config: ModelConfig, family: str, **wanted: object) -> None:
    for key, value in wanted.items():
        if (own := getattr(config, key)) != value:
            shown = "none" if value is None else str(value).lower() if isinstance(value, bool) else value
            _refuse(key, own, f"{family} has {key}={shown}")


def _check_head(config: ModelConfig) -> None:
    _check(config, "every class of language models", norm="pre")
    if config.head_bias or (config.head_bias is None and not config.tie_embeddings):
        _refuse("head_bias", "true", "every class of language models has an output layer without bias")


def _rope(config: ModelConfig) -> dict[str, Any]:
    """The keys of positions: as transformers 5 reads them, and as its older versions do."""
    scaling: dict[str, float | str] | None = None
    if config.rope_scaling is not None:
        length = "original_max_position_embeddings"  # a number of tokens: readers want an integer
        scaling = {key: int(value) if key == length else value for key, value in config.rope_scaling.items()}
    now = {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"})}
    return {"rope_parameters": now, "rope_scaling": scaling}


def _as_llama(config: ModelConfig) -> _Family:
    family = "qwen3" if config.qk_norm else "llama"
    _check_head(config)
    _check(config, f"with norm_type=rms, {family}", activation="swiglu", position="rotary")
    if config.qk_norm:
        _check(config, family, bias=False)
    elif config.d_model % config.num_heads:
        _refuse("d_model", config.d_model, f"{family} has a multiple of num_heads={config.num_heads}")
    found = {
        "model_type": family,
        "architectures": ["Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLM"],
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads or config.num_heads,
        "head_dim": config.head_width or config.d_model // config.num_heads,
        "intermediate_size": config.d_feedforward,
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "attention_bias": config.bias,
        **_rope(config),
        "rope_theta": config.rope_theta,
    }
    if not config.qk_norm:
        found["mlp_bias"] = config.bias
    return _Family(found, "lm_head.weight", _llama_weights)


def _llama_weights(config: ModelConfig, weights: Weights) -> Weights:
    converted: Weights = {}
    names = their_names(config) | {"head.weight": ("lm_head.weight",)}
    for own, theirs in names.items():
        weight = weights[own]
        rows = [shape[0] for shape in piece_shapes(config, weight.shape, theirs)]
        converted |= dict(zip(theirs, weight.split(rows), strict=True))
    return converted


def _as_gpt(config: ModelConfig) -> _Family:
    is_rotary = config.position == "rotary"
    family = "GPT-NeoX" if is_rotary else "GPT-2"
    _check_head(config)
    _check(config, f"with norm_type=layer, {family}", qk_norm=False, num_kv_heads=None, head_width=None)
    if config.activation == "swiglu":
        _refuse("activation", "swiglu", f"with norm_type=layer, {family} has activation=gelu or relu")
    if is_rotary:
        return _Family(_neox_config(config), "embed_out.weight", _neox_weights)
    return _Family(_gpt2_config(config), "lm_head.weight", _gpt2_weights)


def _neox_config(config: ModelConfig) -> dict[str, Any]:
    rope = _rope(config)
    return {
        "model_type": "gpt_neox",
        "architectures": ["GPTNeoXForCausalLM"],
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.d_feedforward,
        "hidden_act": config.activation,
        "max_position_embeddings": config.max_length,
        "layer_norm_eps": config.norm_eps,
        "use_parallel_residual": False,
        "attention_bias": True,
        **rope,
        "rope_parameters": {**rope["rope_parameters"], "partial_rotary_factor": 1.0},
        # As versions of transformers before 5 read them.
        "rotary_pct": 1.0,
        "rotary_emb_base": config.rope_theta,
    }


def _neox_weights(config: ModelConfig, weights: Weights) -> Weights:
    def by_head(stacked: Tensor) -> Tensor:
        """Rows of [query, key, value] of all heads to rows of all heads' [query, key, value]."""
        heads: Tensor = stacked.unflatten(0, (3, config.num_heads, -1)).transpose(0, 1)
        return heads.flatten(0, 2)

    converted = {
        "gpt_neox.embed_in.weight": weights["embedding.embedding.weight"],
        "embed_out.weight": weights["head.weight"],
        **_with_bias(weights, "head.norm", "gpt_neox.final_layer_norm"),
    }
    for number in range(config.num_layers):
        ours, theirs = f"blocks.{number}", f"gpt_neox.layers.{number}"
        own = _with_bias(weights, f"{ours}.attention.qkv", f"{theirs}.attention.query_key_value")
        converted |= {name: by_head(weight) for name, weight in own.items()}
        for one, other in {
            "attention.output": "attention.dense",
            "feedforward.input": "mlp.dense_h_to_4h",
            "feedforward.output": "mlp.dense_4h_to_h",
            "norm1": "input_layernorm",
            "norm2": "post_attention_layernorm",
        }.items():
            converted |= _with_bias(weights, f"{ours}.{one}", f"{theirs}.{other}")
    return converted


def _gpt2_config(config: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": config.d_model,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.d_feedforward,
        "n_positions": config.max_length,
        "activation_function": config.activation,
        "layer_norm_epsilon": config.norm_eps,
        **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), config.dropout),
    }


def _gpt2_weights(config: ModelConfig, weights: Weights) -> Weights:
    embedding = weights["embedding.embedding.weight"]
    positions = weights.get("embedding.positions.embedding.weight")
    if positions is None:
        positions = sinusoidal_table(config.max_length, config.d_model, embedding.dtype, embedding.device)
    converted = {
        "transformer.wte.weight": embedding,
        "transformer.wpe.weight": positions,
        "lm_head.weight": weights["head.weight"],
        **_with_bias(weights, "head.norm", "transformer.ln_f"),
    }
    for number in range(config.num_layers):
        ours, theirs = f"blocks.{number}", f"transformer.h.{number}"
        for one, other in {"norm1": "ln_1", "norm2": "ln_2"}.items():
            converted |= _with_bias(weights, f"{ours}.{one}", f"{theirs}.{other}")
        for one, other in {
            "attention.qkv": "attn.c_attn",
            "attention.output": "attn.c_proj",
            "feedforward.input": "mlp.c_fc",
            "feedforward.output": "mlp.c_proj",
        }.items():  # a column per output
            own = _with_bias(weights, f"{ours}.{one}", f"{theirs}.{other}")
            converted |= {name: weight.t() for name, weight in own.items()}
    return converted


def _with_bias(weights: Weights, ours: str, theirs: str) -> Weights:
    """Weight and bias of a layer; a bias that ours does not have is zero."""
    weight = weights[f"{ours}.weight"]
    bias = weights.get(f"{ours}.bias")
    if bias is None:
        bias = torch.zeros(weight.size(0), dtype=weight.dtype)
    return {f"{theirs}.weight": weight, f"{theirs}.bias": bias}
