"""The user's own functions and classes, named as `package.module:name`."""

import os
import sys
from importlib import import_module
from typing import Any

from hvd_transformer.errors import UserError

CODE = "HVD_TRANSFORMER_CODE"  # set by the service: a folder with the user's code as it was when the job was submitted
KEPT_CODE = ".code"  # that folder, in the run directory


def load_plugin(path: str, origin: str, kind: str) -> Any:
    """Import the function or class at `path`, from the current folder or an installed package.

    The folder of `HVD_TRANSFORMER_CODE`, if it is set, precedes the current one.

    Raises `UserError`, which begins with `origin`, the setting that names it. `kind` is "function" or "Class".
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise UserError(f"{origin}: must be of the form package.module:{kind}")
    if module.partition(".")[0] != __package__:
        _search_users_folders()
    try:
        found = getattr(import_module(module), name)
    except (Exception, SystemExit) as error:  # a script that reads its own command line ends the process
        raise UserError(f"{origin}: cannot be imported: {first_line(error)}") from error
    if not callable(found):
        raise UserError(f"{origin}: {name} is not a {kind}")
    return found


def _search_users_folders() -> None:
    """Console scripts do not import from the current folder."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    code = os.environ.get(CODE)
    if code and code not in sys.path:
        sys.path.insert(0, code)


def first_line(error: BaseException) -> str:
    """An error of the user's code as one line."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]
