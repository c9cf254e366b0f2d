"""The one exception for what a user can put right, and how what ends a run is said: without a stack trace."""

import sys


class UserError(Exception):
    """Something in the flags, the data or the environment that the user can put right.

    The message says what is wrong, where, and what to do.
    """


def complain(text: str) -> None:
    """Say `text` on standard error, as one write: lines that several processes say at once do not mix."""
    # `print` writes the end of the line by itself where PYTHONUNBUFFERED is set.
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
