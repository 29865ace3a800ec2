"""YAML in which a key may be set once: PyYAML keeps the last value, and drops the others without a word."""

from typing import Any

import yaml

_MOST_LEVELS = 20
_MOST_VALUES = 100_000


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":  # tables may be merged several times
                if key.value in seen:
                    raise yaml.composer.ComposerError(None, None, f"{key.value} is set twice", key.start_mark)
                seen.add(key.value)
        return node


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
