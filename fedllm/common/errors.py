"""Errors that a user can meet, and runs that end early on request. The command line prints them without a traceback."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_VALUE = 40


class UserError(ValueError):
    """A mistake in what the user gave. The message says what was found, what was expected, what to do."""

    exit_code = 2


class RunError(RuntimeError):
    """A run that cannot go on (too few clients left, disk full, ...). Checkpoints stay intact."""

    exit_code = 1


class Interrupted(KeyboardInterrupt):
    """A run that a signal or run.max_hours ended before its last round; the same command goes on.

    It is a KeyboardInterrupt, so that no `except Exception` takes it for a failure. exit_code: of the command.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def cut_name(value: object) -> str:
    """A name or label from a user's data as a message shows it: cut, because it may be a text put into the wrong
    column. Values of text columns are never shown."""
    text = str(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."


def listed(names: Sequence[object], most: int = 5) -> str:
    """Names from a user's data as a message lists them: 'a', 'b' and 3 more."""
    quoted = ", ".join(f"'{cut_name(name)}'" for name in names[:most])
    return f"{quoted} and {len(names) - most:,} more" if len(names) > most else quoted
