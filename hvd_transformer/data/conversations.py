"""Conversations for instruction tuning: JSON lines, each with a list of messages."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvd_transformer.data.splits import ExampleFiles, Files, RawExample, Reader, file_identity, find_splits, first_file
from hvd_transformer.data.tables import json_objects
from hvd_transformer.data.text_files import is_text
from hvd_transformer.errors import UserError

ROLES = ("system", "user", "assistant", "tool")
_KINDS = (".jsonl", ".json")
_PATTERNS = tuple(f"{{}}{kind}{end}" for kind in _KINDS for end in ("", ".gz"))


class ConversationFiles(ExampleFiles):
    """One file of JSON lines per split, with the column `data.messages_column`. The only text of an example is the
    list of its messages, as JSON."""

    def find(self, folder: Path) -> dict[str, Files]:
        return find_splits(self.stems, lambda stem: first_file(folder, stem, _PATTERNS))

    def reader(self, files: Files) -> Reader:
        (path,) = files
        if not path.name.removesuffix(".gz").endswith(_KINDS):
            raise UserError(f"{path}: conversations must be JSON lines; it must end in .jsonl or .jsonl.gz")
        return lambda: _conversations(path, str(self.config.messages_column))

    def accepted(self, folder: Path, split: str) -> str:
        return f"{self.stems[split][0]}.jsonl"

    def identity(self, files: Files) -> Any:
        return file_identity(files[0])

    @property
    def settings(self) -> dict[str, str]:
        return {"messages": str(self.config.messages_column)}


def _conversations(path: Path, column: str) -> Iterator[RawExample]:
    for place, values in json_objects(path, {"data.messages_column": column}):
        try:
            yield RawExample((_checked(values[column], column),), None, place)
        except ValueError as error:
            raise UserError(f"{place}: {error}") from None


def _checked(messages: Any, column: str) -> str:
    """The messages as JSON. Raises `ValueError`, which says what is wrong."""
    if not isinstance(messages, list):
        raise ValueError(f"{column} must be a list of messages, each with role and content")
    if not messages:
        raise ValueError(f"{column} is empty")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise ValueError(f"message {number} must be an object with role and content")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                found = f"{key} must be a text" if message.get(key) is not None else f"has no {key}"
                raise ValueError(f"message {number}: {found}")
        if message["role"] not in ROLES:
            raise ValueError(f"message {number}: unknown role {message['role']!r}; the roles are {', '.join(ROLES)}")
    text = json.dumps(messages, ensure_ascii=False)
    if not is_text(text):
        raise ValueError(f"{column} contains an unpaired surrogate (invalid Unicode)")
    return text
