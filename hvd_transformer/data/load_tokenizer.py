"""Loads the tokenizer that a folder holds, whichever class it is."""

import json
from functools import lru_cache
from pathlib import Path

from hvd_transformer.data.tokenizers import UNKNOWN, VOCABULARY_KINDS, BPETokenizer, Tokenizer, VocabularyTokenizer
from hvd_transformer.errors import UserError


def load_tokenizer(folder: Path, prefix: str = "") -> Tokenizer:
    """What `Tokenizer.save` wrote. Raises `UserError` where there is none, or a damaged one."""
    from hvd_transformer.data.pretrained_tokenizer import CONFIG, PretrainedTokenizer

    if (folder / CONFIG).is_file():
        return PretrainedTokenizer.load(folder)
    for file_name in (BPETokenizer.file_name, VocabularyTokenizer.file_name):
        path = folder / f"{prefix}{file_name}"
        if not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8")
            content = json.loads(text)
            kind = BPETokenizer.kind if file_name == BPETokenizer.file_name else content["kind"]
            return restore(kind, text)
        except Exception as error:  # tokenizers raises the bare class
            raise UserError(f"{path}: no valid tokenizer: {error}") from None
    raise UserError(f"{folder}: no tokenizer; it must hold {BPETokenizer.file_name} or {VocabularyTokenizer.file_name}")


@lru_cache(maxsize=2)  # a process that gets one piece after the other builds its tables once
def restore(kind: str, text: str) -> Tokenizer:
    """The tokenizer of this kind with this JSON text."""
    if kind == BPETokenizer.kind:
        from tokenizers import Tokenizer as Model

        return BPETokenizer(Model.from_str(text))
    if kind not in VOCABULARY_KINDS:
        from hvd_transformer.data.pretrained_tokenizer import PretrainedTokenizer

        return PretrainedTokenizer(json.loads(text))
    tokens = json.loads(text)["tokens"]
    if not tokens or tokens[0] != UNKNOWN or not all(isinstance(token, str) for token in tokens):
        raise ValueError(f"its tokens must be a list of strings, {UNKNOWN} first")
    return VOCABULARY_KINDS[kind](tokens)
