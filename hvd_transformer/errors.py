"""The one exception for what a user can put right, and the exit codes that say more than that something failed."""

WRONG_INPUT = 2  # one line on the screen, no traceback: starting it again will not help
STALLED = 75  # ended by the watchdog, for a launcher to start it again: EX_TEMPFAIL of sysexits.h


class UserError(Exception):
    """Names the file, line or key that is wrong, and what is allowed instead."""
