"""What the user names as `package.module:name`: imported from where they stand, or from what is installed."""

import sys
from importlib import import_module
from typing import Any

from hvd_transformer.errors import UserError


def load_plugin(path: str, origin: str, kind: str) -> Any:
    """The named function or class. Raises `UserError` that begins with `origin`, the setting."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise UserError(f"{origin}: must be of the form package.module:{kind}")
    if "" not in sys.path:
        sys.path.insert(0, "")  # a console script does not look where the user stands
    try:
        found = getattr(import_module(module), name)
    except Exception as error:
        raise UserError(f"{origin}: cannot be imported: {first_line(error)}") from error
    if not callable(found):
        raise UserError(f"{origin}: {name} is no {kind}")
    return found


def first_line(error: Exception) -> str:
    """What an error of the user's code says, for one line."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]
