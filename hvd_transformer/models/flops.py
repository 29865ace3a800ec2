"""FLOPs of a training step in closed form: forward and backward of a batch, padding included.

Only matrix products count, with two FLOPs per multiplication and addition: a weight of N numbers takes 2 N per position
in forward and 4 N in backward. So do attention's two products of queries, keys and values. Forwards that are computed
again in backward do not count, as in model FLOPs utilization (MFU; Chowdhery et al. 2022, arXiv 2204.02311, appendix
B), nor does the mask save anything.
"""

from hvd_transformer.config.schema import ModelConfig

_BOTH_WAYS = 6  # per position and number of a weight


def language_model_flops(
    config: ModelConfig, vocab_size: int, shape: tuple[int, int], num_targets: int | None = None
) -> float:
    """FLOPs of the decoder-only language model on tokens of `shape` (B, T). Only `num_targets` positions (None: all)
    reach the output layer of `vocab_size` tokens."""
    samples, length = shape
    blocks = config.num_layers * _block_weights(config)
    scores = config.num_layers * length * length
    head = (samples * length if num_targets is None else num_targets) * config.d_model * vocab_size
    return _BOTH_WAYS * (samples * (length * blocks + 2 * scores * _width(config)) + head)


def classifier_flops(config: ModelConfig, num_classes: int, shape: tuple[int, int]) -> float:
    """FLOPs of the encoder with a pooled head on tokens of `shape` (B, T)."""
    samples, length = shape
    blocks = config.num_layers * _block_weights(config)
    scores = config.num_layers * length * length
    head = config.d_model * (config.d_model + num_classes)  # of one vector per text
    return _BOTH_WAYS * samples * (length * blocks + 2 * scores * _width(config) + head)


def encoder_decoder_flops(
    config: ModelConfig, vocab_size: int, source: tuple[int, int], target: tuple[int, int], num_targets: int
) -> float:
    """FLOPs of the encoder-decoder on a source (B, S) and a target (B, T). Of the B × T target positions only the
    `num_targets` without padding reach the output layer of `vocab_size` tokens."""
    (samples, sources), (_, targets) = source, target
    encoders, decoders = config.num_layers, config.num_decoder_layers or config.num_layers
    block, crossed = _block_weights(config), 2 * config.d_model * _width(config)  # query and output; key and value
    of_sources = sources * (encoders * block + decoders * crossed)
    of_targets = targets * decoders * (block + crossed)
    scores = encoders * sources * sources + decoders * targets * (targets + sources)
    head = num_targets * config.d_model * vocab_size
    return _BOTH_WAYS * (samples * (of_sources + of_targets + 2 * scores * _width(config)) + head)


def _width(config: ModelConfig) -> int:
    """Total width of all query heads."""
    return config.num_heads * (config.head_width or config.d_model // config.num_heads)


def _block_weights(config: ModelConfig) -> int:
    """Numbers in the matrices of self-attention and feed-forward."""
    width = _width(config)
    keys_and_values = 2 * width * (config.num_kv_heads or config.num_heads) // config.num_heads
    attention = config.d_model * (width + keys_and_values + width)
    return attention + (3 if config.activation == "swiglu" else 2) * config.d_model * config.d_feedforward
