"""What every command does with an error: a user's mistake is one line on stderr and exit code 2."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from hvd_transformer.errors import WRONG_INPUT, UserError


@contextmanager
def one_line_errors(command: str) -> Iterator[None]:
    """Turns a `UserError` into its message on stderr and exit code 2."""
    try:
        yield
    except UserError as error:
        print(f"{command}: {error}", file=sys.stderr)
        sys.exit(WRONG_INPUT)
