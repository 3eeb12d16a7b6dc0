"""Errors that a user can meet. The command line prints their message without a traceback."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_VALUE = 40


class UserError(ValueError):
    """A mistake in what the user gave: exit code 2. The message says what was found, what was expected, what to do."""


class RunError(RuntimeError):
    """A run that cannot go on (too few clients left, disk full, ...): exit code 1. Checkpoints stay intact."""


def shown(value: object) -> str:
    """A name or label from a user's data as a message shows it: cut, because it may be a text put into the wrong
    column. Values of text columns are never shown."""
    text = str(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."


def listed(names: Sequence[object], most: int = 5) -> str:
    """Names from a user's data as a message lists them: 'a', 'b' and 3 more."""
    quoted = ", ".join(f"'{shown(name)}'" for name in names[:most])
    return f"{quoted} and {len(names) - most:,} more" if len(names) > most else quoted
