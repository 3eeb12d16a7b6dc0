"""The two kinds of failure a user can meet; neither shows a traceback on the command line."""


class UserError(ValueError):
    """A mistake in what the user gave: exit code 2. The message says what was found, what was expected, what to do."""


class RunError(RuntimeError):
    """A run that cannot go on (too few clients left, disk full, ...): exit code 1. What was committed stays intact."""
