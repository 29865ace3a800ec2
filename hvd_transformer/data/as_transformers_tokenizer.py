"""Tokenizers of ours as tokenizer.json, and as the files that transformers' AutoTokenizer reads."""

import json
import re
from typing import Any

from hvd_transformer.data.pretrained_tokenizer import CLASS, CONFIG, PretrainedTokenizer
from hvd_transformer.data.tokenizers import (
    BASIC_ENGLISH,
    DOCUMENT_END,
    UNKNOWN,
    BPETokenizer,
    CharTokenizer,
    Tokenizer,
    WordTokenizer,
)
from hvd_transformer.errors import UserError

# White space to Python, but not to the library.
_SEPARATORS = "[\\x1c-\\x1f]"
# At the end of a word, where Python's lower() writes ς and the library σ (Unicode 15.0, section 3.13, Final_Sigma).
_CASED = r"[\p{Cased}&&[^\p{Case_Ignorable}]]"
_FINAL_SIGMA = rf"(?<={_CASED}\p{{Case_Ignorable}}*)Σ(?!\p{{Case_Ignorable}}*{_CASED})"


def transformers_files(tokenizer: Tokenizer, max_length: int) -> dict[str, str]:
    """tokenizer.json and tokenizer_config.json, as texts by file name. Raises `UserError` if they cannot hold it."""
    config: dict[str, Any]
    if isinstance(tokenizer, PretrainedTokenizer):
        # The class of a family, which transformers also takes without a name, may split text in its own way.
        config = {**tokenizer.config, "tokenizer_class": CLASS}
        return tokenizer.files() | {CONFIG: json.dumps(config, indent=2, ensure_ascii=False) + "\n"}
    config = {  # no unk_token: transformers would find it in texts, and tokenizer.json has it
        "tokenizer_class": CLASS,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    if tokenizer.document_end is not None:
        config |= {"eos_token": DOCUMENT_END, "split_special_tokens": True}  # in a text it is text
    return {BPETokenizer.file_name: tokenizer_json(tokenizer), CONFIG: json.dumps(config, indent=2) + "\n"}


def tokenizer_json(tokenizer: Tokenizer) -> str:
    """The text of a tokenizer.json with the same token numbers. Raises `UserError` if it cannot hold the tokenizer."""
    if isinstance(tokenizer, BPETokenizer):
        if not tokenizer.model.encode_special_tokens:
            return tokenizer.json_text
        # The file cannot say that special tokens in a text are text, unless they are tokens like any others.
        return json.dumps(json.loads(tokenizer.json_text) | {"added_tokens": []}, ensure_ascii=False)
    if isinstance(tokenizer, CharTokenizer | WordTokenizer):
        return _word_level(tokenizer)
    raise UserError(f"a tokenizer of the class {type(tokenizer).__name__} cannot be exported")


def vocabulary_of(text: str) -> list[str]:
    """The tokens of a tokenizer.json, in the order of their numbers."""
    from tokenizers import Tokenizer as Model

    numbers: dict[str, int] = Model.from_str(text).get_vocab()
    return sorted(numbers, key=numbers.__getitem__)


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
        hidden = "|".join(re.escape(token) for token in tokenizer.tokens if token not in tokenizer.numbers)
        unknown = [normalizers.Replace(Regex(rf"(?<!\S)({hidden})(?!\S)"), UNKNOWN)] if hidden else []
        sigma = normalizers.Replace(Regex(_FINAL_SIGMA), "ς")
        model.normalizer = normalizers.Sequence([sigma, normalizers.Lowercase(), *replaced, split, *unknown])
        model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return str(model.to_str())
