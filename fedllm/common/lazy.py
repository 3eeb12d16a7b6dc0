"""torch, imported when it is first used, so that a recipe can be checked without waiting for it.

from fedllm.common.lazy import torch
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any


class _Module:
    """A module that is imported when one of its names is first asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(import_module(self._name), attribute)
        setattr(self, attribute, found)  # found without __getattr__ from now on
        return found


if TYPE_CHECKING:
    import torch as torch
else:
    torch = _Module("torch")
