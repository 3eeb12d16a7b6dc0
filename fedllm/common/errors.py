"""Errors that a user can meet. The command line prints their message without a traceback."""


class UserError(ValueError):
    """A mistake in what the user gave: exit code 2. The message says what was found, what was expected, what to do."""


class RunError(RuntimeError):
    """A run that cannot go on (too few clients left, disk full, ...): exit code 1. Checkpoints stay intact."""
