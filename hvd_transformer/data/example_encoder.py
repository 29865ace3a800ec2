"""Samples as token numbers: by the tokenizer of each text, or by an encoder of one's own."""

from collections.abc import Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from hvd_transformer.data.splits import RawExample
from hvd_transformer.data.tokenizers import Tokenizer

Encoded = list[NDArray[Any]]  # the token numbers (T,) of each text of a sample


class Encoder(Protocol):
    """Makes token numbers of samples, an array for each role. It is copied to worker processes."""

    digest: str  # of all that the numbers depend on

    def encode(self, examples: Sequence[RawExample]) -> list[Encoded]:
        """Raises `UserError` with the place of a sample that cannot be encoded."""

    def shorten(self, arrays: Encoded, limits: Sequence[int]) -> Encoded:
        """A sample of at most so many tokens in each role."""


class TextEncoder:
    """Encodes each text by the tokenizer of its role."""

    def __init__(self, tokenizers: Sequence[Tokenizer]) -> None:
        self.tokenizers, self.digest = tokenizers, ""

    def encode(self, examples: Sequence[RawExample]) -> list[Encoded]:
        columns = [
            tokenizer.encode_lines([example.texts[column] for example in examples])
            for column, tokenizer in enumerate(self.tokenizers)
        ]
        return [list(texts) for texts in zip(*columns, strict=True)]

    def shorten(self, arrays: Encoded, limits: Sequence[int]) -> Encoded:
        columns = zip(self.tokenizers, arrays, limits, strict=True)
        return [tokenizer.shorten(text, limit) for tokenizer, text, limit in columns]
