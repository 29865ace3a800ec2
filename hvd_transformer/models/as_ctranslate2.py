"""The same encoder-decoder as a model of CTranslate2, an optional dependency, for `ctranslate2.Translator`."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hvd_transformer.config.schema import ModelConfig
from hvd_transformer.errors import UserError, missing_extra
from hvd_transformer.models.positions import sinusoidal_table


class Vocabularies(NamedTuple):
    """The tokens of both sides in the order of their numbers, and the special tokens of the target."""

    source: Sequence[str]
    target: Sequence[str]
    unknown: str
    begin: str
    end: str


def as_ctranslate2(config: ModelConfig, weights: Mapping[str, Tensor], vocabularies: Vocabularies) -> Any:
    """The `TransformerSpec` of an `EncoderDecoder` with these weights, ready to be saved.

    Raises `UserError` if CTranslate2 is not installed or does not compute the same.
    """
    _check(config)
    try:
        from ctranslate2.specs import common_spec, transformer_spec
    except ImportError:
        raise missing_extra(None, "ctranslate2", "ctranslate2") from None
    activations = common_spec.Activation
    spec = transformer_spec.TransformerSpec.from_config(
        (config.num_layers, config.num_decoder_layers or config.num_layers),
        config.num_heads,
        pre_norm=config.norm == "pre",
        activation={"relu": activations.RELU, "gelu": activations.GELU, "swiglu": activations.SWISH}[config.activation],
        ffn_glu=config.activation == "swiglu",
        rms_norm=config.norm_type == "rms",
    )
    _Filler(config, weights).fill(spec)
    spec.config.layer_norm_epsilon = config.norm_eps
    spec.config.unk_token, spec.config.eos_token = vocabularies.unknown, vocabularies.end
    # A source has neither begin nor end.
    spec.config.bos_token = spec.config.decoder_start_token = vocabularies.begin
    spec.register_source_vocabulary(list(vocabularies.source))
    spec.register_target_vocabulary(list(vocabularies.target))
    spec.validate()
    spec.optimize()
    return spec


def _check(config: ModelConfig) -> None:
    for key, wanted, allowed in (
        ("num_kv_heads", (None, config.num_heads), "none"),
        ("head_width", (None, config.d_model // config.num_heads), "none"),
        ("qk_norm", (False,), "false"),
        ("position", ("sinusoidal", "learned"), "sinusoidal or learned"),
    ):
        value = getattr(config, key)
        if value not in wanted:
            shown = str(value).lower() if isinstance(value, bool) else value
            raise UserError(f"model.{key}={shown}: this export has {key}={allowed}")


class _Filler:
    """Puts our weights where the specification has them."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
        self._config, self._weights = config, weights

    def fill(self, spec: Any) -> None:
        encoder, decoder = spec.encoder, spec.decoder
        shared = "source" if self._config.share_embeddings else "target"
        self._embed(encoder, encoder.embeddings[0], "source", "source")
        self._embed(decoder, decoder.embeddings, "target", shared)
        for number, layer in enumerate(encoder.layer):
            self._block(layer, f"encoder.{number}")
        for number, layer in enumerate(decoder.layer):
            self._block(layer, f"decoder.{number}")
            query, key_value, output = layer.attention.linear
            self._linear(query, f"decoder.{number}.cross.query")
            self._linear(key_value, f"decoder.{number}.cross.key_value")
            self._linear(output, f"decoder.{number}.cross.output")
            self._norm(layer.attention.layer_norm, f"decoder.{number}.norm3")
        if self._config.norm == "pre":
            self._norm(encoder.layer_norm, "encoder_norm")
            self._norm(decoder.layer_norm, "head.norm")
        if self._config.tie_embeddings:
            decoder.projection.weight = decoder.embeddings.weight
        else:
            decoder.projection.weight = self._array("head.weight")
        self._set(decoder.projection, "bias", "head.bias")

    def _embed(self, side: Any, embedding: Any, role: str, words_of: str) -> None:
        config = self._config
        embedding.weight = self._array(f"{words_of}_embedding.embedding.weight")
        side.scale_embeddings = config.d_model**0.5 if config.scale_embedding else 1.0
        if config.position == "learned":
            table = self._array(f"{role}_embedding.positions.embedding.weight")
        else:
            weight = self._weights["source_embedding.embedding.weight"]
            table = sinusoidal_table(config.max_length, config.d_model, weight.dtype, weight.device).float().numpy()
        side.position_encodings.encodings = table

    def _block(self, layer: Any, name: str) -> None:
        stacked, output = layer.self_attention.linear
        self._linear(stacked, f"{name}.attention.qkv")
        self._linear(output, f"{name}.attention.output")
        self._norm(layer.self_attention.layer_norm, f"{name}.norm1")
        self._linear(layer.ffn.linear_0, f"{name}.feedforward.input")
        self._linear(layer.ffn.linear_1, f"{name}.feedforward.output")
        self._norm(layer.ffn.layer_norm, f"{name}.norm2")
        if self._config.activation == "swiglu":
            gate, values = layer.ffn.linear_0, layer.ffn.linear_0_noact
            gate.weight, values.weight = np.split(gate.weight, 2)
            if gate.has_bias():
                gate.bias, values.bias = np.split(gate.bias, 2)

    def _linear(self, linear: Any, name: str) -> None:
        linear.weight = self._array(f"{name}.weight")
        self._set(linear, "bias", f"{name}.bias")

    def _norm(self, norm: Any, name: str) -> None:
        norm.gamma = self._array(f"{name}.weight")
        if self._config.norm_type == "layer":
            norm.beta = np.zeros_like(norm.gamma)  # model.bias=false
            self._set(norm, "beta", f"{name}.bias")

    def _set(self, layer: Any, attribute: str, name: str) -> None:
        if name in self._weights:
            setattr(layer, attribute, self._array(name))

    def _array(self, name: str) -> NDArray[np.float32]:
        array: NDArray[np.float32] = self._weights[name].float().numpy()
        return array
