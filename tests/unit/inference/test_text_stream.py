"""Text that grows by tokens: exact, and at a cost that does not grow with it."""

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer as Model
from tokenizers import decoders, models, pre_tokenizers

from hvd_transformer.data.tokenizers import BPETokenizer, CharTokenizer, Tokenizer, WordTokenizer
from hvd_transformer.inference.text_stream import TextStream

TEXT = "Grüße an alle: 日本語 and 🙂🙂, naïve words, twice  spaced.\n" * 3


def byte_pairs() -> Tokenizer:
    return BPETokenizer.train(["plain words, twice spaced and all"], 300, 1)


def pieces() -> Tokenizer:
    """With SentencePiece's `▁` for spaces, the first of which its decoder drops."""
    model = Model(models.WordLevel({"<unk>": 0, "▁an": 1, "▁alle": 2, "n": 3}, unk_token="<unk>"))
    model.pre_tokenizer, model.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return BPETokenizer(model)


def characters() -> Tokenizer:
    return CharTokenizer(["<unk>", *sorted(set(TEXT))])


def words() -> Tokenizer:
    return WordTokenizer(["<unk>", "an", "alle"])


@pytest.mark.parametrize(
    ("make", "ids"),
    [
        (byte_pairs, lambda tokenizer: tokenizer.encode(TEXT).tolist()),
        (characters, lambda tokenizer: tokenizer.encode(TEXT).tolist()),
        (pieces, lambda tokenizer: [1, 2, 3, 2, 1, 1, 3]),
        (words, lambda tokenizer: [1, 2, 0, 2, 1]),
    ],
)
@pytest.mark.parametrize("prompt", [0, 1, 4])
def test_what_tokens_add_is_the_text_of_all(
    make: Callable[[], Tokenizer], ids: Callable[[Tokenizer], list[int]], prompt: int
) -> None:
    tokenizer = make()
    tokens = ids(tokenizer)
    stream = TextStream(tokenizer)
    text = stream.add(tokens[:prompt])
    for token in tokens[prompt:]:
        text += stream.add([token])
        assert "\ufffd" not in text
    assert text == tokenizer.decode(tokens)


def test_a_character_is_added_with_its_last_byte() -> None:
    tokenizer = byte_pairs()
    stream = TextStream(tokenizer)
    assert [stream.add([token]) for token in tokenizer.encode("a🙂b").tolist()] == ["a", "", "", "", "🙂", "b"]


def test_a_token_costs_as_much_at_the_end_of_a_long_text(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_pairs()
    decode, lengths = tokenizer.decode, []
    monkeypatch.setattr(tokenizer, "decode", lambda ids: (lengths.append(len(ids)), decode(ids))[1])
    stream = TextStream(tokenizer)
    for token in tokenizer.encode(10 * TEXT).tolist():
        stream.add([token])
    assert max(lengths) <= 8
