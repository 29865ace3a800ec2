"""Runs the commands of a scheduler, each within a time limit."""

import errno
import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress

from hvd_transformer.service.engines.backend import EngineFault

_SECONDS = 60.0  # a busy controller may take long
_LINE = 300  # characters of a message


class CommandFailed(EngineFault):
    """A command ended with an exit code above 0, or its arguments are too long. The message is its last line; `errors`:
    all that it printed as errors.
    """

    def __init__(self, message: str, errors: str = "") -> None:
        super().__init__(message)
        self.errors = errors


class CommandMissing(EngineFault):
    """There is no such command."""


class Commands:
    """Runs one command at a time. `close` may be called from any thread."""

    def __init__(self, seconds: float = _SECONDS) -> None:
        self._seconds, self._closed = seconds, False
        self._process: subprocess.Popen[str] | None = None

    def run(self, *words: str, text: str = "", env: Mapping[str, str] | None = None, cwd: str | None = None) -> str:
        """Run the command and return its output. `text`: its input; `env`: more variables.

        Raises `CommandFailed`, `CommandMissing`, and `EngineFault` if it cannot be started or does not end.
        """
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                cwd=cwd,
                env={**os.environ, "LC_ALL": "C", **(env or {})},
                start_new_session=True,
            )
        except OSError as error:
            missing = isinstance(error, FileNotFoundError) and error.filename == words[0]
            too_long = error.errno == errno.E2BIG  # for good
            fault = CommandMissing if missing else CommandFailed if too_long else EngineFault
            raise fault(f"{error.filename or words[0]}: {error.strerror or error}") from None
        self._process = process
        if self._closed:
            _kill(process)
        try:
            printed, errors = process.communicate(text, self._seconds)
        except subprocess.TimeoutExpired:
            raise EngineFault(f"{words[0]}: did not end within {self._seconds:g} s") from None
        finally:
            _kill(process)
            self._process = None
        if process.returncode:
            last = _last_line(errors) or f"exit code {process.returncode}"
            raise CommandFailed(f"{words[0]}: {last}", errors)
        return printed

    def close(self) -> None:
        """End the command that runs; later ones end at once."""
        self._closed = True
        if (process := self._process) is not None:
            _kill(process)


def _kill(process: "subprocess.Popen[str]") -> None:
    """End a command that runs, with its children."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_line(text: str) -> str:
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    return lines[-1][:_LINE] if lines else ""
