"""The tokenizer of a folder of transformers that translates, for one side of the pairs; kept as its files.

Marian's and M2M100's are SentencePiece models beside a vocabulary, which no tokenizer.json can hold.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from hvd_transformer.data.tokenizers import Ids, Tokenizer
from hvd_transformer.errors import UserError
from hvd_transformer.huggingface import from_folder, origin


class PairTokenizer(Tokenizer):
    """`role` is "source" or "target": the sides differ in their special tokens, and for Marian in their pieces."""

    kind = "pair"
    file_name = "tokenizer.json"

    def __init__(self, role: str, files: Mapping[str, bytes]) -> None:
        self.role, self.folder_files = role, dict(files)

    @classmethod
    def read(cls, folder: Path, role: str, languages: Sequence[str] | None = None) -> "PairTokenizer":
        """Read the tokenizer of a folder. `languages`: those of source and target, which a tokenizer of many languages
        (NLLB, M2M100) knows by these codes; None: those in its files.

        Raises `UserError` if the folder has none, or not these languages.
        """
        theirs = from_folder("AutoTokenizer", folder)
        if languages is not None and hasattr(theirs, "src_lang"):
            for key, code in zip(("source_language", "target_language"), languages, strict=True):
                if _language(theirs, code) is None:
                    raise UserError(
                        f"data.{key}={code}: no language of {origin(folder)}; NLLB has codes such as deu_Latn, M2M100 "
                        "such as de"
                    )
            source, target = languages
            theirs = from_folder("AutoTokenizer", folder, src_lang=source, tgt_lang=target)
        with TemporaryDirectory() as aside:
            theirs.save_pretrained(aside)
            return cls(role, {path.name: path.read_bytes() for path in sorted(Path(aside).iterdir())})

    @cached_property
    def _theirs(self) -> Any:
        with TemporaryDirectory() as aside:
            for name, content in self.folder_files.items():
                (Path(aside) / name).write_bytes(content)
            return from_folder("AutoTokenizer", Path(aside), given="the checkpoint's tokenizer")

    @cached_property
    def vocab_size(self) -> int:
        languages = getattr(self._theirs, "lang_code_to_id", {})  # which M2M100's vocabulary lacks
        return 1 + int(max((*self._theirs.get_vocab().values(), *languages.values())))  # some numbers may be unused

    @property
    def pad(self) -> int:
        return int(self._theirs.pad_token_id)

    @property
    def longest(self) -> int | None:
        """The maximum number of tokens of a sentence, if the folder states one."""
        found = self._theirs.model_max_length
        return int(found) if found < 10**9 else None

    @cached_property
    def forced_begin(self) -> int | None:
        """The token that every translation begins with: its language, if there are many."""
        code = getattr(self._theirs, "tgt_lang", None)
        return None if code is None else _language(self._theirs, code)

    def encode(self, text: str) -> Ids:
        return self.encode_lines([text])[0]

    def encode_lines(self, lines: Sequence[str]) -> list[Ids]:
        """The token numbers of each line (T,), with special tokens; an empty line has no tokens."""
        found = self._theirs(**{"text" if self.role == "source" else "text_target": list(lines)})["input_ids"]
        return [np.array(ids if line.strip() else [], np.uint32) for line, ids in zip(lines, found, strict=True)]

    def shorten(self, ids: Ids, limit: int) -> Ids:
        """Truncate a line to at most `limit` tokens, but keep its end token."""
        return ids if len(ids) <= limit else np.concatenate([ids[: limit - 1], ids[-1:]])

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._theirs.decode([int(number) for number in ids]))

    def decode_line(self, ids: Iterable[int]) -> str:
        # To M2M100's a language is no special token.
        kept = [int(number) for number in ids if number != self.forced_begin]
        return str(self._theirs.decode(kept, skip_special_tokens=True)).strip()

    @cached_property
    def json_text(self) -> str:
        files = {name: b64encode(content).decode() for name, content in self.folder_files.items()}
        return json.dumps({"kind": self.kind, "role": self.role, "files": files}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "PairTokenizer":
        found = json.loads(text)
        return cls(found["role"], {name: b64decode(content) for name, content in found["files"].items()})


def _language(theirs: Any, code: str) -> int | None:
    """The number of a language's token; None if there is none."""
    if hasattr(theirs, "lang_code_to_id"):  # M2M100's
        found = theirs.lang_code_to_id.get(code)
    else:
        found = theirs.get_vocab().get(code) if code in theirs.all_special_tokens else None
    return None if found is None else int(found)
