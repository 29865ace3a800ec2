"""An exported tokenizer.json, read by the tokenizers library alone, has our token numbers."""

import pytest
from tokenizers import Tokenizer as Model

from hvd_transformer.data.as_transformers_tokenizer import tokenizer_json, vocabulary_of
from hvd_transformer.data.tokenizers import SPECIALS, BPETokenizer, CharTokenizer, WordTokenizer, build_vocabulary

TEXT = "A room, <pad> b </s><s> x<pad> <PAD>\x1c</s>\t<s> <unk> c.</s>"


@pytest.mark.parametrize("kind", [BPETokenizer, CharTokenizer, WordTokenizer])
def test_special_tokens_in_a_sentence_are_text(kind: type) -> None:
    if kind is BPETokenizer:
        ours = BPETokenizer.train([TEXT] * 5, 600, 1, sentences=True)
    else:
        ours = build_vocabulary(kind.kind, kind.count(TEXT), None, 1, SPECIALS)
    text = tokenizer_json(ours)
    theirs, ids = Model.from_str(text), ours.encode_lines([TEXT])[0].tolist()
    assert theirs.encode(TEXT).ids == ids
    assert theirs.decode(ids).strip() == ours.decode_line(ids)
    assert tuple(vocabulary_of(text)[: len(SPECIALS)]) == SPECIALS
    assert len(vocabulary_of(text)) == ours.vocab_size
