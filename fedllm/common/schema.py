"""Frozen dataclasses as the only description of a setting, and the one function that fills them from plain data."""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Mapping
from functools import cache, partial, reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import BeforeValidator, ConfigDict, StrictBool, TypeAdapter, ValidationError

from fedllm.common.errors import UserError

T = TypeVar("T")
_NUMBER = {int: "a whole number", float: "a number", str: "text", bool: "true or false", Any: "a value", Path: "a path"}


def setting(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    symbol: str = "",
    key: str = "",
    aliases: tuple[str, ...] = (),
) -> Any:
    """A dataclass field with its one-line meaning, its symbol in the paper, and its key where that is not its name.
    aliases: other names that a user may give for the key; what is written has the key."""
    metadata = {"help": help, "symbol": symbol, "key": key, "aliases": aliases}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=partial(type(default), default), metadata=metadata)
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def keys(cls: type) -> dict[str, str]:
    """The keys by which a user sets a dataclass's fields, each with the name of its field."""
    return {field.metadata.get("key") or field.name: field.name for field in dataclasses.fields(cls) if field.init}


def key_aliases(cls: type) -> dict[str, str]:
    """The other names that a user may give for keys of a dataclass, each with its key."""
    names = {name: key for key, name in keys(cls).items()}
    fields = (field for field in dataclasses.fields(cls) if field.init)
    return {alias: names[field.name] for field in fields for alias in field.metadata.get("aliases", ())}


def nearest(key: str, known: list[str], likeness: float = 0.6) -> str:
    """' (did you mean X?)' for a misspelt key, or nothing where none is at least that much alike, from 0 to 1."""
    close = difflib.get_close_matches(key, known, n=1, cutoff=likeness)
    return f" (did you mean '{close[0]}'?)" if close else ""


def describe(annotation: Any) -> str:
    """A type as a user reads it: 'a whole number', 'one of: a, b', 'a list of numbers or null'."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "one of: " + ", ".join(map(str, args))
    if origin in (Union, types.UnionType):
        return " or ".join("null" if arg is type(None) else describe(arg) for arg in args)
    if origin is list and get_origin(args[0]) is Literal:
        return "a list of any of: " + ", ".join(get_args(args[0]))
    if origin is list or (origin is tuple and args[-1] is Ellipsis):
        return f"a list of {describe(args[0]).removeprefix('a ')}s"
    if origin is tuple:
        return f"a list of {len(args)} numbers"
    if origin is dict:
        return f"a mapping of {describe(args[0])} to {describe(args[1])}"
    return _NUMBER.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _no_bool(value: Any) -> Any:
    """pydantic alone would take true for 1."""
    if isinstance(value, bool):
        raise ValueError("true or false is no number")
    return value


_EXACT: dict[Any, Any] = {
    int: Annotated[int, BeforeValidator(_no_bool)],
    float: Annotated[float, BeforeValidator(_no_bool)],
    bool: StrictBool,
}


def _exact(annotation: Any) -> Any:
    """The annotation with every int, float and bool in it replaced by its entry in _EXACT."""
    origin, args = get_origin(annotation), tuple(map(_exact, get_args(annotation)))
    if origin in (Union, types.UnionType):
        return reduce(or_, args)
    return _EXACT.get(annotation, annotation) if origin in (None, Literal) else origin[args]


@cache
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(_exact(annotation), config=ConfigDict(allow_inf_nan=False, arbitrary_types_allowed=True))


def build(cls: type[T], values: Mapping[str, Any], prefix: str) -> T:
    """An instance of the dataclass `cls` from plain data; strings that are numbers, such as PyYAML's '3e-4', become
    numbers.

    prefix: what errors have before a key, for example "recipes/x.yaml: algorithm.".
    Raises UserError naming the key, the nearest known key, the value found and the type expected.
    """
    hints = get_type_hints(cls)
    known, aliases = keys(cls), key_aliases(cls)
    filled: dict[str, Any] = {}
    given: dict[str, str] = {}
    for key, value in values.items():
        own = aliases.get(key, key)
        if own not in known:
            raise UserError(
                f"{prefix}{key}: unknown key{nearest(str(key), list(known))}; known keys: {', '.join(known)}"
            )
        if own != key and values.get(own, value) != value:
            raise UserError(
                f"{prefix}{key}: found {value!r}, but {own} is {values[own]!r}: they are one setting; give {own} alone"
            )
        name = known[own]
        filled[name], given[name] = _value(value, hints[name], f"{prefix}{key}"), key
    try:
        return cls(**filled)
    except UserError as error:
        name, colon, rest = str(error).partition(": ")
        raise UserError(f"{prefix}{given.get(name, name)}{colon}{rest}") from None


def _value(value: Any, hint: Any, where: str) -> Any:
    """A value as its annotated type."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if section := next(filter(dataclasses.is_dataclass, kinds), None):
        if value is None and section is not hint:
            return None
        if not isinstance(value, Mapping):
            raise UserError(f"{where}: found {value!r}, expected keys and values")
        return build(section, value, f"{where}.")  # type: ignore[arg-type]
    try:
        return _adapter(hint).validate_python(value)
    except ValidationError:
        raise UserError(f"{where}: found {value!r}, expected {describe(hint)}") from None


def without_nulls(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a section of `cls` less each null of a key that takes none: there it stands for the default."""
    hints, known, aliases = get_type_hints(cls), keys(cls), key_aliases(cls)

    def resets(key: str, value: Any) -> bool:
        name = known.get(aliases.get(key, key))
        return value is None and name is not None and not _takes_null(hints[name])

    return {key: value for key, value in values.items() if not resets(key, value)}


def _takes_null(hint: Any) -> bool:
    return hint in (None, Any) or type(None) in get_args(hint)


def require_positive_settings(section: Any, *names: str) -> None:
    """Raises UserError for the first of these settings that is a number and not above 0."""
    for name in names:
        value = getattr(section, name)
        if isinstance(value, int | float) and not value > 0:
            raise UserError(f"{name}: found {value}, expected a positive number")
