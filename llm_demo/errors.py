"""The one exception meant for the user: scripts print its message and exit, no traceback."""


class UserError(Exception):
    """Bad input. The message is one clear line: what, where, what to do."""
