"""The tokenizer of a Hugging Face folder (`model.pretrained`): read once by transformers, then kept as its files."""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from hvd_transformer.data.convert_tokenizer import convert
from hvd_transformer.data.tokenizers import Ids, Tokenizer, encode_all, sha256
from hvd_transformer.errors import UserError
from hvd_transformer.huggingface import from_folder, origin

CONFIG = "tokenizer_config.json"  # no tokenizer of ours has this file
_TEMPLATE = "chat_template.jinja"
_MAP = "special_tokens_map.json"  # of older folders
_FILES = ("tokenizer.json", CONFIG, _MAP, _TEMPLATE)
_TOKENS = ("bos_token", "eos_token", "pad_token")
_END = "<|endoftext|>"  # of GPT-2 and others, some of whose folders do not name it
# Keys that tell how it was read, not what it is.
_READ_KEYS = ("backend", "is_local", "local_files_only", "name_or_path")
# The class that reads tokenizer.json as it is: its name in transformers 5, and the one that older versions know, too.
_CLASS_5, CLASS = "TokenizersBackend", "PreTrainedTokenizerFast"


class PretrainedTokenizer(Tokenizer):
    """Sentences get the special tokens that the model was trained with; running text gets none."""

    kind = "pretrained"
    file_name = "tokenizer.json"

    def __init__(self, files: Mapping[str, str]) -> None:
        """Raises `UserError`, which begins with the file's name, for a damaged one, and for tokenizer.json any other
        exception."""
        from tokenizers import Tokenizer as Model

        self._files = dict(files)
        self.config = _read_object(CONFIG, files[CONFIG])
        if self.config.get("tokenizer_class") == _CLASS_5:
            self.config["tokenizer_class"] = CLASS
            self._files[CONFIG] = _config_text(self.config)
        self._map = _read_object(_MAP, files.get(_MAP, "{}"))
        self.model = Model.from_str(files["tokenizer.json"])
        self.model.no_padding()
        self.model.no_truncation()
        # Of transformers: special tokens in a text are text. tokenizer.json cannot say it.
        self.model.encode_special_tokens = bool(self.config.get("split_special_tokens"))

    @classmethod
    def load(cls, folder: Path) -> "PretrainedTokenizer":
        """Load what `save` wrote. Raises `UserError` if it is damaged."""
        try:
            return cls(_texts(folder))
        except Exception as error:  # tokenizers raises Exception itself
            raise UserError(f"{folder / CONFIG}: the tokenizer beside it is invalid: {error}") from None

    @classmethod
    def read(cls, folder: Path, given: str | None = None) -> "PretrainedTokenizer":
        """Read the tokenizer of a Hugging Face folder, whatever form it has there.

        Raises `UserError`, which begins with `given`, if the folder has none, or none that tokenizer.json can hold.
        """
        tokenizer = from_folder("AutoTokenizer", folder, given)
        given = given or origin(folder)
        if not getattr(tokenizer, "is_fast", False):
            raise UserError(f"{given}: its tokenizer has no tokenizer.json and cannot be converted to one")
        if not tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens):
            raise UserError(f"{given}: has no tokenizer, such as tokenizer.json")
        with TemporaryDirectory() as aside:
            tokenizer.save_pretrained(aside)
            files = _texts(Path(aside))
        config = {key: value for key, value in json.loads(files[CONFIG]).items() if key not in _READ_KEYS}
        return cls(files | {CONFIG: _config_text(config)})

    @classmethod
    def open(cls, path: Path) -> "PretrainedTokenizer":
        """Read a tokenizer.json, a .tiktoken file, a .model file of SentencePiece, or a folder with a tokenizer.json or
        with another file that transformers can make one of (`data.tokenizer`). Raises `UserError`."""
        given, file = f"data.tokenizer={path}", path / cls.file_name if path.is_dir() else path
        if path.is_dir() and not file.is_file():
            return cls.read(path, given)
        try:
            if not path.is_dir() and (converted := convert(path, given)):
                return cls({cls.file_name: converted.tokenizer.to_str(), CONFIG: json.dumps(converted.special)})
            # The small files beside a tokenizer.json belong to it, beside another file perhaps not.
            texts = _texts(file.parent) if file.name == cls.file_name else {}
            texts[cls.file_name] = _read(file)
        except OSError as error:
            raise UserError(f"{given}: cannot be read: {error.strerror}") from None
        try:
            return cls({CONFIG: "{}", **texts})
        except UserError as error:
            raise UserError(f"{given}: {error}") from None
        except Exception as error:  # tokenizers raises Exception itself
            said = str(error).splitlines() or [type(error).__name__]
            raise UserError(f"{given}: not a valid tokenizer.json: {said[0]}") from None

    @cached_property
    def vocab_size(self) -> int:
        return 1 + int(max(self.model.get_vocab().values()))  # some numbers may be unused

    @property
    def longest(self) -> int | None:
        """The maximum number of tokens of a sentence, if the folder states one."""
        found = self.config.get("model_max_length")
        return int(found) if isinstance(found, int | float) and found < 10**9 else None

    @property
    def pad(self) -> int:
        return self.own_pad or 0

    @cached_property
    def own_pad(self) -> int | None:
        """The token number that fills a batch, if the folder has one."""
        return self._special("pad_token")

    def with_pad(self) -> "PretrainedTokenizer | None":
        """This tokenizer, if it has a pad token; else a copy that pads with `eos_token`, as is usual for GPT-2; None
        without that."""
        if self.own_pad is not None:
            return self
        if self.document_end is None:
            return None
        config = {**self.config, "pad_token": self._given("eos_token")}
        return type(self)({**self._files, CONFIG: _config_text(config)})

    def _special(self, key: str) -> int | None:
        token = self._given(key)
        found = self.model.token_to_id(token["content"] if isinstance(token, dict) else token) if token else None
        return None if found is None else int(found)

    def _given(self, key: str) -> Any:
        """The special token that the folder names by this key, as a text or a table with its content."""
        found = self.config.get(key) or self._map.get(key)
        return _END if not found and key == "eos_token" and self._has_end else found

    @cached_property
    def _has_end(self) -> bool:
        added = self.model.get_added_tokens_decoder().values()
        return any(token.special and token.content == _END for token in added)

    def encode(self, text: str) -> Ids:
        return np.array(self.model.encode(text, add_special_tokens=False).ids, np.uint32)

    def encode_texts(self, texts: Sequence[str]) -> list[Ids]:
        return list(encode_all(self.model, texts))

    @property
    def document_end(self) -> int | None:
        return self._special("eos_token")

    @property
    def begin(self) -> int | None:
        """The token number of `bos_token`."""
        return self._special("bos_token")

    @property
    def chat_template(self) -> str | None:
        """The Jinja template of a conversation, if the folder has a single one."""
        found = self._files.get(_TEMPLATE, self.config.get("chat_template"))
        return found if isinstance(found, str) else None

    def encode_lines(self, lines: Sequence[str]) -> list[Ids]:
        """The token numbers of each line (T,), with special tokens; an empty line has no tokens."""
        encodings = self.model.encode_batch(list(lines))
        return [
            np.array(encoding.ids if not all(encoding.special_tokens_mask) else [], np.uint32) for encoding in encodings
        ]

    def shorten(self, ids: Ids, limit: int) -> Ids:
        """Truncate a line to at most `limit` tokens, but keep its last special tokens."""
        if len(ids) <= limit:
            return ids
        kept = min(self._num_last, limit)
        return np.concatenate([ids[: limit - kept], ids[len(ids) - kept :]])

    @cached_property
    def _num_last(self) -> int:
        """The number of special tokens after a sentence."""
        for token in self.model.get_vocab():
            if self.model.encode(token, add_special_tokens=False).ids:
                mask = self.model.encode(token).special_tokens_mask
                return next((number for number, special in enumerate(reversed(mask)) if not special), 0)
        return 0

    def decode(self, ids: Iterable[int]) -> str:
        return str(self.model.decode([int(number) for number in ids], skip_special_tokens=False))

    def decode_line(self, ids: Iterable[int]) -> str:
        return str(self.model.decode([int(number) for number in ids], skip_special_tokens=True)).strip()

    def files(self) -> dict[str, str]:
        return dict(self._files)

    @cached_property
    def json_text(self) -> str:
        return json.dumps(self._files, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "PretrainedTokenizer":
        return cls(json.loads(text))

    @cached_property
    def digest(self) -> str:
        """Excludes the other settings, which another version of transformers may write differently."""
        splits = " split_special_tokens" if self.model.encode_special_tokens else ""
        return sha256(f"{self._files['tokenizer.json']} {self.own_pad}{splits}")


def _read_object(name: str, text: str) -> dict[str, Any]:
    """A JSON file with special tokens. Raises `UserError`, which begins with its name."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}: not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{name}: must be a JSON object")
    for key in _TOKENS:
        token = found.get(key)
        if not isinstance(token["content"] if isinstance(token, dict) and "content" in token else token or "", str):
            raise UserError(f"{name}: {key} must be a token, such as </s>, not {json.dumps(token)[:40]}")
    return found


def _config_text(config: Mapping[str, Any]) -> str:
    return json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False)


def _texts(folder: Path) -> dict[str, str]:
    """The files of a folder. Raises `UserError` for one that is not UTF-8, and `OSError`."""
    return {name: _read(folder / name) for name in _FILES if (folder / name).is_file()}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not valid UTF-8: {error.reason}") from None
