"""Tokenizers of ours as the files that transformers' AutoTokenizer reads."""

import json

from hvd_transformer.data.pretrained_tokenizer import CONFIG, PretrainedTokenizer
from hvd_transformer.data.tokenizers import (
    BASIC_ENGLISH,
    UNKNOWN,
    BPETokenizer,
    CharTokenizer,
    Tokenizer,
    WordTokenizer,
)
from hvd_transformer.errors import UserError

# White space to Python, but not to the library.
_SEPARATORS = "[\\x1c-\\x1f]"


def transformers_files(tokenizer: Tokenizer, max_length: int) -> dict[str, str]:
    """tokenizer.json and tokenizer_config.json, as texts by file name. Raises `UserError` if they cannot hold it."""
    if isinstance(tokenizer, PretrainedTokenizer):
        return tokenizer.files()
    if isinstance(tokenizer, BPETokenizer):
        text = tokenizer.json_text
    elif isinstance(tokenizer, CharTokenizer | WordTokenizer):
        text = _word_level(tokenizer)
    else:
        raise UserError(
            f"--format transformers: a tokenizer of the class {type(tokenizer).__name__} cannot be exported"
        )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": UNKNOWN,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    return {BPETokenizer.file_name: text, CONFIG: json.dumps(config, indent=2) + "\n"}


def _word_level(tokenizer: CharTokenizer | WordTokenizer) -> str:
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Model

    model = Model(models.WordLevel({token: number for number, token in enumerate(tokenizer.tokens)}, UNKNOWN))
    if isinstance(tokenizer, CharTokenizer):
        model.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        model.decoder = decoders.Fuse()
    else:
        replaced = [normalizers.Replace(mark, other) for mark, other in BASIC_ENGLISH.items()]
        split = normalizers.Replace(Regex(_SEPARATORS), " ")
        model.normalizer = normalizers.Sequence([normalizers.Lowercase(), *replaced, split])
        model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return str(model.to_str())
