"""The exceptions meant for the user: scripts print their message and exit, no traceback."""

STOPPED = 75  # exit code of a run that was asked to stop and has saved (sysexits' EX_TEMPFAIL)


class UserError(Exception):
    """Bad input. The message is one clear line: what, where, what to do."""


class Stopped(Exception):
    """A signal asked the run to stop, and it did, between two steps, with a checkpoint."""
