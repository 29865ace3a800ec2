"""YAML in which a key may be set once: PyYAML keeps the last value, and drops the others without a word."""

from typing import Any

import yaml

_MOST_LEVELS = 20


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
    lists that are nested deeper than anybody needs, such as one that contains itself by an alias."""
    try:
        content = yaml.load(text, Loader=_Loader)  # noqa: S506 - a safe loader
    except RecursionError:
        raise _too_deep() from None
    _check_depth(content, _MOST_LEVELS)
    return content


def _check_depth(content: Any, levels: int) -> None:
    if isinstance(content, (list, dict)):
        if not levels:
            raise _too_deep()
        for value in content.values() if isinstance(content, dict) else content:
            _check_depth(value, levels - 1)


def _too_deep() -> ValueError:
    return ValueError(f"lists or tables nested more than {_MOST_LEVELS} deep, or in themselves")
