"""Load the tokenizer of a folder, whichever class it has. The only module that knows all classes."""

import json
from pathlib import Path

from hvd_transformer.data.pair_tokenizer import PairTokenizer
from hvd_transformer.data.pretrained_tokenizer import CONFIG, PretrainedTokenizer
from hvd_transformer.data.tokenizers import VOCABULARY_KINDS, BPETokenizer, Tokenizer, VocabularyTokenizer
from hvd_transformer.errors import UserError

_CLASSES: dict[str, type[Tokenizer]] = {
    **VOCABULARY_KINDS,
    BPETokenizer.kind: BPETokenizer,
    PretrainedTokenizer.kind: PretrainedTokenizer,
    PairTokenizer.kind: PairTokenizer,
}


def load_tokenizer(folder: Path, prefix: str = "") -> Tokenizer:
    """The tokenizer that `Tokenizer.save` wrote, or that of a Hugging Face folder; there a `prefix` names a side of
    pairs, such as "source-". Raises `UserError` if it is missing or damaged."""
    if (folder / CONFIG).is_file():
        if prefix:
            return PairTokenizer.read(folder, prefix.removesuffix("-"))
        return PretrainedTokenizer.load(folder)
    for file_name in (BPETokenizer.file_name, VocabularyTokenizer.file_name):
        path = folder / f"{prefix}{file_name}"
        if not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8")
            # A tokenizer.json of the library tokenizers does not say its kind.
            return tokenizer_from_json(json.loads(text).get("kind", BPETokenizer.kind), text)
        except Exception as error:  # tokenizers raises Exception itself
            raise UserError(f"{path}: not a valid tokenizer: {error}") from None
    raise UserError(f"{folder}: no tokenizer; it must hold {BPETokenizer.file_name} or {VocabularyTokenizer.file_name}")


def tokenizer_from_json(kind: str, text: str) -> Tokenizer:
    """The tokenizer of this kind and `Tokenizer.json_text`."""
    return _CLASSES[kind].from_json(text)
