"""A Llama as the tensors and numbers of a GGUF file, for llama.cpp; written with gguf, an optional dependency.

llama.cpp rotates the channels 2i and 2i + 1 of a head where we rotate i and i + width / 2, so the rows of the query and
key projections change places.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hvd_transformer.config.schema import ModelConfig
from hvd_transformer.errors import UserError
from hvd_transformer.models.as_transformers import as_transformers
from hvd_transformer.models.positions import angular_rates, rotary_rates


def add_llama(writer: Any, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
    """Add a `LanguageModel` with these weights to a `gguf.GGUFWriter`. Raises `UserError` if it is no Llama."""
    import gguf

    for key, wanted in (("norm_type", "rms"), ("qk_norm", False)):
        if (value := getattr(config, key)) != wanted:
            raise UserError(f"model.{key}={value}: only a Llama, which has {key}={str(wanted).lower()}")
    made = as_transformers(config, dict(weights))
    factors = _rope_factors(config)
    found = made.config
    writer.add_context_length(found["max_position_embeddings"])
    writer.add_embedding_length(found["hidden_size"])
    writer.add_block_count(found["num_hidden_layers"])
    writer.add_feed_forward_length(found["intermediate_size"])
    writer.add_head_count(found["num_attention_heads"])
    writer.add_head_count_kv(found["num_key_value_heads"])
    writer.add_key_length(found["head_dim"])
    writer.add_value_length(found["head_dim"])
    writer.add_rope_dimension_count(found["head_dim"])
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(found["rms_norm_eps"])
    writer.add_vocab_size(found["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.float().numpy())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_layers)
    heads = {"q_proj": found["num_attention_heads"], "k_proj": found["num_key_value_heads"]}
    for theirs, weight in made.weights.items():
        layer, _, kind = theirs.rpartition(".")
        number = heads.get(layer.rpartition(".")[2])
        rows = weight if number is None else _neighbours(weight, number)
        writer.add_tensor(f"{names.get_name(layer)}.{kind}", rows.float().contiguous().numpy())


def _neighbours(weight: Tensor, num_heads: int) -> Tensor:
    """Put the two rows of each rotated pair side by side."""
    by_pair: Tensor = weight.unflatten(0, (num_heads, 2, -1)).transpose(1, 2)
    return by_pair.flatten(0, 2)


def _rope_factors(config: ModelConfig) -> Tensor | None:
    """How many times longer each wavelength is by `model.rope_scaling` [head width / 2]."""
    if config.rope_scaling is None:
        return None
    width = config.head_width or config.d_model // config.num_heads
    rates, sharper = rotary_rates(width, config.rope_theta, config.rope_scaling)
    if sharper != 1.0:
        raise UserError("model.rope_scaling: rope_type=yarn: only linear or llama3")
    factors: Tensor = torch.div(angular_rates(width, config.rope_theta), rates)
    return factors
