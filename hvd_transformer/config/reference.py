"""The documentation of every key, written from the schema itself: the lower half of `hvd-train --help`."""

from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from hvd_transformer.config.load import preset_names, preset_summary
from hvd_transformer.config.schema import Config, Section


def reference() -> str:
    """Keys grouped by section, one a line with default, allowed values and meaning; then the presets."""
    top = {name: field for name, field in Config.model_fields.items() if not _is_section(field)}
    blocks = [_block("", "The job", top)]
    for name, field in Config.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            blocks.append(_block(f"{name}.", (section.__doc__ or name).rstrip("."), section.model_fields))
    presets = "\n".join(f"  {name:<18} {preset_summary(name)}" for name in preset_names())
    return "\n\n".join([*blocks, f"Presets\n{presets}"])


def _block(prefix: str, title: str, fields: dict[str, FieldInfo]) -> str:
    lines = [title]
    for name, field in fields.items():
        lines.append(f"  {prefix + name}={_word(field.default)}{_choices(field)}")
        lines.append(f"      {field.description}")
    return "\n".join(lines)


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, Section)


def _choices(field: FieldInfo) -> str:
    if get_origin(field.annotation) is Literal:
        return "  (" + " | ".join(get_args(field.annotation)) + ")"
    return ""


def _word(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)
