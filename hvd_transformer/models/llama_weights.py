"""The weights of transformers' Llama and Qwen3, by the names that they have in `LanguageModel`.

A weight of ours is theirs, or several of theirs one below the other:

    blocks.0.attention.qkv.weight     model.layers.0.self_attn.{q,k,v}_proj.weight
    blocks.0.feedforward.input.weight model.layers.0.mlp.{gate,up}_proj.weight
"""

from collections.abc import Iterator, Sequence

from hvd_transformer.config.schema import ModelConfig


def their_names(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """For each parameter of the `LanguageModel`, the weights that make it, from the first row to the last."""
    names: dict[str, tuple[str, ...]] = {
        "embedding.embedding.weight": ("model.embed_tokens.weight",),
        "head.norm.weight": ("model.norm.weight",),
    }
    if not config.tie_embeddings:
        names["head.weight"] = ("lm_head.weight",)
    for block in range(config.num_layers):
        names |= dict(_block(config, f"blocks.{block}.", f"model.layers.{block}."))
    return names


def piece_shapes(config: ModelConfig, shape: Sequence[int], pieces: Sequence[str]) -> list[tuple[int, ...]]:
    """The shapes of the weights that make one of ours, of this shape."""
    width = config.head_width or config.d_model // config.num_heads
    of_keys = width * (config.num_kv_heads or config.num_heads)
    rows = {"q_proj": width * config.num_heads, "k_proj": of_keys, "v_proj": of_keys}
    return [(rows.get(piece.split(".")[-2], shape[0] // len(pieces)), *shape[1:]) for piece in pieces]


def _block(config: ModelConfig, ours: str, theirs: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    linears: dict[str, tuple[str, ...]]
    if config.num_kv_heads in (None, config.num_heads):
        linears = {"attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
    else:
        linears = {
            "attention.query": ("self_attn.q_proj",),
            "attention.key_value": ("self_attn.k_proj", "self_attn.v_proj"),
        }
    linears |= {
        "attention.output": ("self_attn.o_proj",),
        "feedforward.input": ("mlp.gate_proj", "mlp.up_proj"),
        "feedforward.output": ("mlp.down_proj",),
    }
    norms: dict[str, tuple[str, ...]] = {"norm1": ("input_layernorm",), "norm2": ("post_attention_layernorm",)}
    if config.qk_norm:
        norms |= {"attention.query_norm": ("self_attn.q_norm",), "attention.key_norm": ("self_attn.k_norm",)}
    for name, layers in (linears | norms).items():
        kinds = ("weight", "bias") if config.bias and name in linears else ("weight",)
        for kind in kinds:
            yield f"{ours}{name}.{kind}", tuple(f"{theirs}{layer}.{kind}" for layer in layers)
