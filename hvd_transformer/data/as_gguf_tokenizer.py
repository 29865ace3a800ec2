"""A byte-pair tokenizer as the metadata of a GGUF file, as llama.cpp reads it."""

import json
from typing import Any

from hvd_transformer.data.chat_template import end_tokens
from hvd_transformer.data.pretrained_tokenizer import PretrainedTokenizer
from hvd_transformer.data.tokenizers import UNKNOWN, BPETokenizer, Tokenizer
from hvd_transformer.errors import UserError

# How Llama 3 splits text before the merges.
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def add_tokenizer(writer: Any, tokenizer: Tokenizer, num_rows: int) -> None:
    """Add the tokenizer to a `gguf.GGUFWriter`, for a model of `num_rows` tokens. Raises `UserError` if llama.cpp would
    give other token numbers."""
    import gguf

    if not isinstance(tokenizer, BPETokenizer | PretrainedTokenizer):
        raise UserError(f"data.tokenizer={tokenizer.kind}: only byte-level BPE")
    found = json.loads(tokenizer.files()[BPETokenizer.file_name])
    model = found["model"]
    split = _split(found)
    if split is None or model["type"] != "BPE" or found["normalizer"] is not None:
        raise UserError("the tokenizer: only byte-level BPE that splits text as GPT-2 or Llama 3 does")
    tokens = [f"[PAD{number}]" for number in range(num_rows)]  # for rows that are no token's, as converters do
    types = [gguf.TokenType.UNUSED] * num_rows
    for token, number in model["vocab"].items():
        tokens[number], types[number] = token, gguf.TokenType.NORMAL
    for added in found["added_tokens"]:
        number = added["id"]
        tokens[number] = added["content"]
        types[number] = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    # Without an end llama.cpp would assume GPT-2's number.
    unknown = tokens.index(UNKNOWN) if UNKNOWN in tokens else 0
    end = unknown if tokenizer.document_end is None else tokenizer.document_end
    begin = tokenizer.begin if isinstance(tokenizer, PretrainedTokenizer) else None
    writer.add_bos_token_id(end if begin is None else begin)
    writer.add_eos_token_id(end)
    for number in end_tokens(tokenizer):
        if number != end:  # of a message in a conversation
            writer.add_eot_token_id(number)
    writer.add_unk_token_id(unknown)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    if isinstance(tokenizer, PretrainedTokenizer):
        if tokenizer.own_pad is not None:
            writer.add_pad_token_id(tokenizer.own_pad)
        if tokenizer.chat_template is not None:
            writer.add_chat_template(tokenizer.chat_template)


def _split(found: dict[str, Any]) -> str | None:
    """llama.cpp's name for how the tokenizer splits text; None if it has none."""
    before = found["pre_tokenizer"] or {}
    parts = before["pretokenizers"] if before.get("type") == "Sequence" else [before]
    *first, last = parts
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    if not first:
        return "gpt-2" if last.get("use_regex", True) else None
    if len(first) == 1 and first[0].get("type") == "Split" and not last.get("use_regex", True):
        return "llama-bpe" if first[0]["pattern"] == {"Regex": _LLAMA_3} else None
    return None
