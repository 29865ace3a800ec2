"""YAML in which a key may be set once: PyYAML keeps the last value, and drops the others without a word.

Numbers and quoted words remember how they were written: a folder 1.10 is not 1.1, and a label "none" is not a missing
one.
"""

from typing import Any

import yaml

# Words for "no value", without quotes; in any case.
NONE_WORDS = ("none", "null")
_MOST_LEVELS = 20
_MOST_VALUES = 100_000


class _Written:
    """A number that is text as it was written, where text is wanted."""

    text: str

    def __str__(self) -> str:  # pydantic asks it for the text of a number, too
        return self.text


class _WrittenInt(_Written, int):
    pass


class _WrittenFloat(_Written, float):
    pass


class QuotedText(str):
    """Text that was in quotes, so that "none" is a name."""


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":  # tables may be merged several times
                if key.value in seen:
                    raise yaml.composer.ComposerError(None, None, f"{key.value} is set twice", key.start_mark)
                seen.add(key.value)
                if key.tag in (_INT, _FLOAT):  # a label, such as 007
                    key.tag = _TEXT
        return node

    def _written_int(self, node: yaml.ScalarNode) -> int:
        made = _WrittenInt(self.construct_yaml_int(node))
        made.text = node.value
        return made

    def _written_float(self, node: yaml.ScalarNode) -> float:
        made = _WrittenFloat(self.construct_yaml_float(node))
        made.text = node.value
        return made

    def _written_text(self, node: yaml.ScalarNode) -> str:
        text: str = self.construct_yaml_str(node)
        return QuotedText(text) if node.style in ("'", '"') else text


_INT, _FLOAT, _TEXT = (f"tag:yaml.org,2002:{name}" for name in ("int", "float", "str"))
_Loader.add_constructor(_INT, _Loader._written_int)
_Loader.add_constructor(_FLOAT, _Loader._written_float)
_Loader.add_constructor(_TEXT, _Loader._written_text)


class _Dumper(yaml.SafeDumper):
    def represent_str(self, data: str) -> yaml.ScalarNode:
        node: yaml.ScalarNode = super().represent_str(data)
        if data.lower() in NONE_WORDS:  # else it would be read as no value
            node.style = "'"
        return node


_Dumper.add_representer(str, _Dumper.represent_str)


def dump(content: Any) -> str:
    """YAML that `parse` reads as this content."""
    text: str = yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


def parse(text: str) -> Any:
    """Like `yaml.safe_load`. Raises `yaml.YAMLError`, and `ValueError` for a value such as the date 2020-13-45, and for
    lists that are deeper or longer than anybody needs, such as one that contains itself by an alias."""
    try:
        content = yaml.load(text, Loader=_Loader)  # noqa: S506 - a safe loader
    except RecursionError:
        raise _too_deep() from None
    depth, values = _extent(content, {})
    if depth > _MOST_LEVELS:
        raise _too_deep()
    if values > _MOST_VALUES:
        raise ValueError(f"more than {_MOST_VALUES:,} values, with those that aliases repeat")
    return content


def _extent(content: Any, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """How deep lists and tables are nested, and how many values they hold in all. `known`: of those seen, by id, since
    aliases may repeat one endlessly."""
    if not isinstance(content, (list, dict)):
        return 0, 1
    if id(content) not in known:
        known[id(content)] = _MOST_LEVELS, 1  # until its values are known, one of which it may be itself
        inner = [_extent(value, known) for value in (content.values() if isinstance(content, dict) else content)]
        known[id(content)] = 1 + max((depth for depth, _ in inner), default=0), 1 + sum(values for _, values in inner)
    return known[id(content)]


def _too_deep() -> ValueError:
    return ValueError(f"lists or tables nested more than {_MOST_LEVELS} deep, or in themselves")
