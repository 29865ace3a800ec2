"""YAML in which a key may be set once: PyYAML keeps the last value, and drops the others without a word."""

from typing import Any

import yaml


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
    """Like `yaml.safe_load`. Raises `yaml.YAMLError`, and `ValueError` for a value such as the date 2020-13-45."""
    return yaml.load(text, Loader=_Loader)  # noqa: S506 - a safe loader
