"""The algorithms, one file each.

Names: the module's or an alias of its class, in the spelling of a paper too ("FAdamGC-B"), or "package.module:Class".
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from fedllm.algorithms.base import Algorithm
from fedllm.common.errors import UserError
from fedllm.common.schema import build, nearest

__all__ = ["Algorithm", "algorithm_class", "algorithm_names", "canonical_name", "load_algorithm"]

_CLOSE = 0.8  # least likeness of a name that is proposed: many methods begin with "fed"


def algorithm_names() -> list[str]:
    """Stable names of the algorithms that come with fedllm."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base")


def _only_algorithm(module: Any) -> type[Algorithm]:
    (cls,) = (
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Algorithm) and value.__module__ == module.__name__
    )
    return cls


def _outside_class(name: str) -> type[Algorithm]:
    module_name, _, class_name = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # importing the user's module may raise anything
        kind = "" if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: "
        raise UserError(f"name: '{name}' could not be loaded: {kind}{error}; expected package.module:Class") from error
    if not (isinstance(cls, type) and issubclass(cls, Algorithm)):
        raise UserError(f"name: '{name}' is not a subclass of fedllm.algorithms.Algorithm")
    for field in fields(cls):
        if field.default is MISSING and field.default_factory is MISSING:
            raise UserError(
                f"name: {class_name}.{field.name} has no default; write {field.name} = setting(default, ...)"
            )
    return cls


def algorithm_class(name: str) -> type[Algorithm]:
    """The class for a name, an alias or "package.module:Class". Raises UserError with the nearest known name."""
    if ":" in name:
        return _outside_class(name)
    known = algorithm_names()
    if (own := canonical_name(name)) in known:
        return _named(own)
    aliases = {own: _named(own).aliases for own in known}
    listed = [f"{own} ({', '.join(others)})" if others else own for own, others in aliases.items()]
    every = [*known, *(alias for others in aliases.values() for alias in others)]
    advice = nearest(name.lower(), known, _CLOSE) or nearest(name.lower(), every, _CLOSE)
    raise UserError(f"name: unknown algorithm '{name}'{advice}; known: {', '.join(listed)}")


def canonical_name(name: str) -> str:
    """The stable name of a name or an alias in any spelling: "FAdamGC-B" is fadamgc_b. Any other name stays as it is.

    Case and all characters but letters and digits make no difference."""
    known = algorithm_names()
    if ":" in name or name in known:
        return name
    wanted = _letters(name)
    spelled = (own for own in known if wanted in map(_letters, (own, *_named(own).aliases)))
    return next(spelled, name)


def _named(name: str) -> type[Algorithm]:
    return _only_algorithm(importlib.import_module(f"{__name__}.{name}"))


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.casefold())


def load_algorithm(name: str, *, where: str = "algorithm", **keys: Any) -> Algorithm:
    """The algorithm `name` with hyper-parameters `keys`, the same keys as in a recipe's `algorithm:` section.

    Raises UserError for a key the algorithm does not know (listing the ones it does) or a value out of its range.
    """
    try:
        cls = algorithm_class(name)
    except UserError as error:
        raise UserError(f"{where}.{error}") from error
    return build(cls, keys, f"{where}.")
