"""The keys of the section `model`."""

from contextlib import suppress
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from hvd_transformer.config.sections.key import (
    OptionalCount,
    OptionalName,
    OptionalPositive,
    Section,
    changeable,
    fixed,
    none_word,
)


def _with_numbers(scaling: dict[str, float | str]) -> dict[str, float | str]:
    """YAML reads 2e0, which has no point, as text."""
    found = dict(scaling)
    for key, value in scaling.items():
        with suppress(ValueError):  # the name in `rope_type`; `config.checks` refuses others
            found[key] = float(value)
    return found


# As in the config.json of transformers; `config.checks` knows the keys.
_RopeTable = Annotated[dict[str, float | str], AfterValidator(_with_numbers)]
RopeScaling = Annotated[_RopeTable | None, BeforeValidator(none_word)]
LoraTargets = Annotated[
    Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] | None, BeforeValidator(none_word)
]
_MOST_LAYERS = 10_000
OptionalLayers = Annotated[Annotated[int, Field(ge=1, le=_MOST_LAYERS)] | None, BeforeValidator(none_word)]
OptionalBool = Annotated[bool | None, BeforeValidator(none_word)]


class ModelConfig(Section):
    """The Transformer."""

    pretrained: OptionalName = fixed(
        None,
        "Hugging Face folder to fine-tune, with its tokenizer: an encoder for classification, a causal model for "
        "language_model, a Marian, M2M100 or NLLB for translation; its config.json replaces all other keys of model, "
        "but for dropout and loss_chunk of a Llama or a Qwen3; none: train from scratch",
    )
    lora_rank: OptionalCount = fixed(
        None,
        "LoRA, for a causal pretrained: train nothing but two matrices of this rank beside each of lora_targets; none: "
        "train all weights",
    )
    lora_alpha: OptionalPositive = fixed(
        None, "LoRA: what the matrices add is multiplied by lora_alpha / lora_rank; none: 8, as in peft"
    )
    lora_targets: LoraTargets = fixed(
        None,
        "LoRA: names of the layers, such as [q_proj, v_proj]; all-linear: all linear layers but the last one; none: "
        "peft's choice for the family",
        allowed="none, all-linear, or a list of layer names such as [q_proj, v_proj]",
    )
    vocab_size: OptionalCount = fixed(
        None,
        "language_model: rows of the embedding and the output layer, at least one per token of the tokenizer; none: as "
        "many as it has tokens",
    )
    num_layers: int = fixed(4, "number of Transformer blocks; in the encoder, if there is one", ge=1, le=_MOST_LAYERS)
    num_decoder_layers: OptionalLayers = fixed(None, "number of decoder blocks, for translation; none: num_layers")
    d_model: int = fixed(192, "model width; a multiple of num_heads", ge=1)
    num_heads: int = fixed(6, "number of attention heads", ge=1)
    num_kv_heads: OptionalCount = fixed(
        None,
        "number of key and value heads in self-attention, each for num_heads / num_kv_heads query heads (grouped-query "
        "attention); none: num_heads",
    )
    head_width: OptionalCount = fixed(None, "width of an attention head; none: d_model / num_heads")
    d_feedforward: int = fixed(768, "hidden width of the feed-forward layers", ge=1)
    dropout: float = fixed(0.0, "dropout probability during training", ge=0, lt=1)
    max_length: int = fixed(1024, "longest sequence that the model has positions for, in tokens", ge=1)
    norm: Literal["pre", "post"] = fixed(
        "pre", "layer norm before each sub-layer (and once at the end), or after each sub-layer"
    )
    norm_type: Literal["layer", "rms"] = fixed("layer", "layer norm, or root mean square norm (RMSNorm)")
    norm_eps: float = fixed(1e-5, "added to the variance in each norm", gt=0)
    qk_norm: bool = fixed(False, "RMSNorm of the queries and keys of each head in self-attention")
    activation: Literal["relu", "gelu", "swiglu"] = fixed(
        "gelu",
        "activation function of the feed-forward layers; swiglu: SiLU of one projection times another one, three "
        "matrices in all",
    )
    bias: bool = fixed(True, "biases in attention, feed-forward layers and layer norms")
    head_bias: OptionalBool = fixed(None, "a bias in the output layer; none: if tie_embeddings=false")
    scale_embedding: bool = fixed(True, "multiply token embeddings by the square root of d_model")
    position: Literal["sinusoidal", "learned", "rotary"] = fixed("sinusoidal", "type of position encoding")
    rope_theta: float = fixed(10000.0, "rotary: base of the wavelengths, 2π to 2π × rope_theta positions", gt=1)
    rope_scaling: RopeScaling = fixed(
        None,
        "rotary: how wavelengths are stretched for longer texts, as rope_scaling in a config.json: linear, llama3 or "
        "yarn, such as {rope_type: linear, factor: 2}",
        allowed="none, or a table such as {rope_type: linear, factor: 2}, rope_type being linear, llama3 or yarn",
    )
    init: Literal["default", "tutorial"] = fixed(
        "default",
        "initial weights; tutorial: as in the PyTorch tutorial, embeddings and output layer uniform within ±0.1, all "
        "other layers as torch.nn.TransformerEncoderLayer",
    )
    init_output: Literal["default", "zero"] = fixed(
        "default",
        "initial weights of the last matrix of each attention and feed-forward layer; zero: with norm=pre each block "
        "starts as the identity",
    )
    tie_embeddings: bool = fixed(True, "share the weights of the output layer and the (target) token embedding")
    share_embeddings: bool = fixed(
        False, "one vocabulary, learned from both languages, and one embedding for source and target"
    )
    loss_chunk: OptionalCount = changeable(
        None,
        "number of tokens whose logits are in memory at once in the loss; none: 256 on a CPU, or more up to"
        " 16 MiB of logits; 4096 on a GPU",
    )

    @property
    def in_own_blocks(self) -> bool:
        """Whether the model consists of this package's blocks: not with a `pretrained` of another family or with LoRA,
        which leaves all other keys at their defaults (`config.families`)."""
        return self.pretrained is None or (self.position == "rotary" and self.lora_rank is None)
