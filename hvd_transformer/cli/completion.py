"""Shell completion of what hvd-train takes: presets, keys, and the values of keys that are a choice.

    eval "$(_HVD_TRAIN_COMPLETE=bash_source hvd-train)"

click asks these functions for each Tab; they import the schema themselves, so that other commands start fast.
"""

from typing import Any, Literal, get_args, get_origin

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class


class _Bash(BashComplete):
    """click's for bash, which leaves no space after KEY=."""

    source_template = BashComplete.source_template.replace(
        "    return 0\n", '    [[ "${COMPREPLY[0]}" == *= ]] && compopt -o nospace\n\n    return 0\n'
    )


add_completion_class(_Bash)


def presets(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The presets that begin like this."""
    from hvd_transformer.config.load import preset_names, preset_summary

    return [CompletionItem(name, help=preset_summary(name)) for name in preset_names() if name.startswith(incomplete)]


def settings(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """KEY= for the keys that begin like this; after KEY= the key's values."""
    from hvd_transformer.config.schema import KEYS, field

    # bash makes three words of KEY=VALUE and replaces the last; zsh and fish leave it one.
    before = [word for word in ctx.params.get(str(param.name)) or () if word != "="]
    key, equals, value = incomplete.rpartition("=")
    if not equals and before and before[-1] in KEYS:
        return [CompletionItem(choice) for choice in _choices(before[-1]) if choice.startswith(incomplete)]
    if equals:
        return [CompletionItem(f"{key}={choice}") for choice in _choices(key) if choice.startswith(value)]
    return [CompletionItem(f"{key}=", help=field(key).description) for key in KEYS if key.startswith(incomplete)]


def _choices(key: str) -> list[str]:
    """The words that may be the value of a key, as far as it is a choice; empty for an unknown key."""
    from hvd_transformer.config.schema import KEYS, built_in, field

    if key not in KEYS:
        return []
    patterns = [getattr(limit, "pattern", None) for limit in field(key).metadata]
    return [*_words(field(key).annotation), *(word for pattern in patterns if pattern for word in built_in(pattern))]


def _words(kind: Any) -> list[str]:
    """Words that values of this type may be: true and false, a literal's words, none."""
    if kind is bool:
        return ["true", "false"]
    if kind is type(None):
        return ["none"]
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [word for part in get_args(kind) if get_origin(kind) not in (list, dict, tuple) for word in _words(part)]
