"""How a launcher ended, for the program that started it: HVD_TRANSFORMER_EXIT_FILE names the file.

Unlike exit.json of a run directory it is written at every end, also before the ranks ran. It is a JSON object: `code`,
`cause`, `stopped` (the signal that asked it to stop, such as "SIGTERM", "request" if that was `hvd-transformer stop`,
or null), `restarts`, `step`, `hosts`, `refused` (hosts that could not be used for a start, and why) and `lost` (hosts
that the last start lost). Wrong input has code 2 and neither; with code 2 and refused hosts, it is they that are wrong.
"""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import click

from hvd_transformer.atomic import write_text
from hvd_transformer.errors import WRONG_INPUT, UserError

EXIT_FILE = "HVD_TRANSFORMER_EXIT_FILE"
_NOTHING: Mapping[str, Any] = {
    "cause": "",
    "stopped": None,
    "restarts": 0,
    "step": None,
    "hosts": [],
    "refused": {},
    "lost": [],
}


class ExitFile:
    """A context manager around all that a launcher does. Nothing is written if nobody has named a file."""

    def __init__(self) -> None:
        self._name = os.environ.pop(EXIT_FILE, None)  # for this process alone
        self._how: Callable[[], Mapping[str, Any]] = dict

    def watch(self, how: Callable[[], Mapping[str, Any]]) -> None:
        """`how` is asked at the end for all but the exit code (`Supervisor.how`)."""
        self._how = how

    def leave(self, code: int) -> NoReturn:
        """Write the file and end this process with `code` at once, where Python would wait for a blocked terminal."""
        self.__exit__(SystemExit, SystemExit(code), None)
        os._exit(code)

    def __enter__(self) -> "ExitFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._name is None:
            return
        code, cause = _code_and_cause(error)
        how = {"code": code, **_NOTHING, **self._how()}
        with suppress(OSError):  # a full disk: who started this process has its exit code
            write_text(Path(self._name), json.dumps(how | ({"cause": cause} if cause else {})) + "\n")


def _code_and_cause(error: BaseException | None) -> tuple[int, str]:
    """The exit code that the error will give this process (`cli/main.py`), and the cause in words, if it has any."""
    if error is None:
        return 0, ""
    if isinstance(error, SystemExit):
        return (error.code if isinstance(error.code, int) else int(error.code is not None)), ""
    if isinstance(error, UserError):
        return WRONG_INPUT, str(error)
    if isinstance(error, click.ClickException):
        return error.exit_code, error.format_message()
    return 1, "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
