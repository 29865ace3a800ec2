"""YAML that every reader takes alike, however strange the words in it are."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml


class Word(str):
    """A text that stands in quotes: readers of YAML do not agree which bare words are numbers or truth values."""


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(Word, lambda dumper, word: dumper.represent_scalar("tag:yaml.org,2002:str", word, style='"'))


def command(words: Sequence[str]) -> list[Word]:
    """A command's words. Kubernetes and compose put variables in where a word has a dollar sign; two are one."""
    return [Word(word.replace("$", "$$")) for word in words]


def text(header: str, *documents: Mapping[str, Any]) -> str:
    """The documents, below a comment."""
    comment = "".join(f"# {line}".rstrip() + "\n" for line in header.splitlines())
    return comment + "---\n".join(
        yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6) for document in documents
    )
