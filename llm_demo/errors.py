"""Exceptions for the user: scripts print the message and exit, without a traceback."""

STOPPED = 75  # exit code of a run that was asked to stop and has saved (sysexits' EX_TEMPFAIL)


class UserError(Exception):
    """Bad input. The message is one clear line: what, where, what to do."""


class Stopped(Exception):
    """A signal asked the run to stop, and it stopped between two steps, with a checkpoint."""
