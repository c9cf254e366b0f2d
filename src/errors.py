"""The one exception for what a user can put right: its text is shown without a stack trace."""


class UserError(Exception):
    """Something in the flags, the data or the environment that the user can put right.

    The message says what is wrong, where, and what to do.
    """
