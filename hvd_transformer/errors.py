"""The exception for errors that the user can fix, the exit codes with a meaning, and words of messages."""

WRONG_INPUT = 2  # one line on stderr, no traceback; never retried
STALLED = 75  # ended by the watchdog; a launcher may restart it (EX_TEMPFAIL of sysexits.h)


class UserError(Exception):
    """An error that the user can fix: names the file, line or key that is wrong, and what is allowed instead."""


def missing_extra(given: str | None, package: str, extra: str) -> UserError:
    """The error that `given` needs a package that is missing; `extra` of this package installs it. None: the caller
    names what is given."""
    needs = f"needs {package}; install it with: pip install 'hvd-transformer[{extra}]'"
    return UserError(f"{given}: {needs}" if given else needs)


def counted(number: int, what: str) -> str:
    """Such as "1 rank" and "2 ranks"."""
    return f"{number} {what}{'s' * (number != 1)}"
