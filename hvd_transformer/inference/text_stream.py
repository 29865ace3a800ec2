"""A text that grows by tokens."""

from collections.abc import Sequence

from hvd_transformer.data.tokenizers import Tokenizer

_INCOMPLETE = "\ufffd"  # what bytes decode to that are not yet a whole character


class TextStream:
    """Tells what each token adds to a text, at a cost that does not grow with the text.

    What a token means depends on the tokens before it: a space in front, the first bytes of its character. So the
    tokens that completed the last character are decoded again, with those that follow them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._done: list[int] = []  # the tokens that completed the last character
        self._new: list[int] = []  # those since then
        self._shown = 0  # characters that these have added

    def add(self, tokens: Sequence[int]) -> str:
        """The text that the tokens add, without a last character whose bytes are still incomplete."""
        self._new += tokens
        decoded = self._tokenizer.decode([*self._done, *self._new])
        before = len(self._tokenizer.decode(self._done)) + self._shown
        text = decoded.rstrip(_INCOMPLETE)[before:]
        if decoded.endswith(_INCOMPLETE):
            self._shown += len(text)
        elif len(decoded) > before:
            self._done, self._new, self._shown = self._new, [], 0
        return text
