"""The one exception for what a user can put right: one line on the screen, exit code 2, no traceback."""


class UserError(Exception):
    """Names the file, line or key that is wrong, and what is allowed instead."""
