"""The failures a user can meet, and runs that end early on request; none shows a traceback on the command line."""


class UserError(ValueError):
    """A mistake in what the user gave. The message says what was found, what was expected, what to do."""

    exit_code = 2


class RunError(RuntimeError):
    """A run that cannot go on (too few clients left, disk full, ...). What was committed stays intact."""

    exit_code = 1


class Interrupted(KeyboardInterrupt):
    """A run that a signal or run.max_hours ended before its last round; the same command goes on.

    It is a KeyboardInterrupt, so that no `except Exception` takes it for a failure. exit_code: of the command.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
