"""Opens a message and checks its head: each value must be of the kind that the message has."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from fedllm.common import tensor_file
from fedllm.common.errors import UserError
from fedllm.common.tensors import State

_RUN = re.compile(r"[0-9a-f]{32}")
_SITES = 100_000  # most sites of a run: a site has a list of them
MOST_TEXT = 2000  # characters of an error or a name that are kept
Check = Callable[[Any], bool]


def open_message(data: bytes, says: str, checks: Mapping[str, Check]) -> tuple[dict[str, Any], State]:
    """The head and the tensors of a message. Raises UserError if it is another one, or a value is of another kind."""
    head, tensors = tensor_file.unpack(data)
    if head.pop("says", None) != says or head.keys() != checks.keys():
        raise UserError(f"found another message, expected '{says}' with {sorted(checks)}, of the same fedllm version")
    for key, check in checks.items():
        if not check(head[key]):
            raise UserError(f"{key}: found {type(head[key]).__name__}, which does not fit a message '{says}'")
    return head, tensors


def is_bool(value: Any) -> bool:
    """Whether the value is true or false."""
    return isinstance(value, bool)


def is_text(value: Any) -> bool:
    """Whether the value is a short printable text."""
    return isinstance(value, str) and len(value) <= MOST_TEXT and value.isprintable()


def is_run(value: Any) -> bool:
    """Whether the value is a run's name, 32 hex digits."""
    return isinstance(value, str) and _RUN.fullmatch(value) is not None


def is_count(value: Any) -> bool:
    """Whether the value is a whole number from 0."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def is_size(value: Any) -> bool:
    """Whether the value is a whole number above 0."""
    return is_count(value) and value > 0


def is_sites(value: Any) -> bool:
    """Whether the value is a number of sites."""
    return is_size(value) and bool(value <= _SITES)


def is_seconds(value: Any) -> bool:
    """Whether the value is a number of seconds."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9


def is_score(value: Any) -> bool:
    """Whether the value is a finite number, or null."""
    if value is None:
        return True
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def is_object(value: Any) -> bool:
    """Whether the value is an object."""
    return isinstance(value, dict)


def is_scores(value: Any) -> bool:
    """Whether the value is a finite number or null for each of at most 100 names."""
    return (
        isinstance(value, dict)
        and len(value) <= 100
        and all(map(is_text, value))
        and all(map(is_score, value.values()))
    )


def is_texts(value: Any) -> bool:
    """Whether the value is a list of texts."""
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def is_sections(value: Any) -> bool:
    """Whether the value is an object or null for each section of a recipe."""
    return isinstance(value, dict) and all(isinstance(each, dict | None) for each in value.values())


def is_versions(value: Any) -> bool:
    """Whether the value is a short text for each of at most 100 names."""
    return isinstance(value, dict) and len(value) <= 100 and all(map(is_text, [*value, *value.values()]))
