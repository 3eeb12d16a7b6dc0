"""Frozen dataclasses as the only description of a setting, and the one function that fills them from plain data."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fedllm.errors import UserError

T = TypeVar("T")
_WHOLE = re.compile(r"\s*[+-]?\d+\s*")
_NUMBER = {int: "a whole number", float: "a number", str: "text", bool: "true or false", Any: "a value"}


def setting(default: Any = dataclasses.MISSING, help: str = "", *, symbol: str = "", key: str = "") -> Any:
    """A dataclass field with its one-line meaning, its symbol in the paper, and its key where that is not its name."""
    metadata = {"help": help, "symbol": symbol, "key": key}
    if isinstance(default, list | dict):
        kept = default
        return dataclasses.field(default_factory=lambda: type(kept)(kept), metadata=metadata)
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def keys(cls: type) -> dict[str, str]:
    """The keys by which a user sets a dataclass's fields, each with the name of its field."""
    return {field.metadata.get("key") or field.name: field.name for field in dataclasses.fields(cls) if field.init}


def nearest(key: str, known: list[str]) -> str:
    """' (did you mean X?)' for a misspelt key, or nothing."""
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
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
    if origin is list:
        return f"a list of {describe(args[0]).removeprefix('a ')}s"
    if origin is tuple:
        inner = [arg for arg in args if arg is not Ellipsis]
        return f"a list of {len(inner)} numbers" if len(args) == len(inner) else f"a list of {describe(inner[0])}"
    if origin is dict:
        return f"a mapping of {describe(args[0])} to {describe(args[1])}"
    return _NUMBER.get(annotation, getattr(annotation, "__name__", str(annotation)))


class MismatchError(Exception):
    """A value that does not fit its annotation; the caller names the key."""


def _number(value: Any, kind: type) -> Any:
    if isinstance(value, bool) or not isinstance(value, Real | str):
        raise MismatchError
    try:
        if kind is int and (isinstance(value, Integral) or (isinstance(value, str) and _WHOLE.fullmatch(value))):
            return int(value)
        number = float(value)
    except (ValueError, OverflowError):
        raise MismatchError from None
    if not math.isfinite(number) or (kind is int and number != int(number)):
        raise MismatchError
    return kind(number)


def coerce(value: Any, annotation: Any) -> Any:
    """`value` as its annotated type; PyYAML's strings such as '3e-4' become numbers. Raises MismatchError."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        for arg in (arg for arg in args if arg is not type(None)):
            try:
                return coerce(value, arg)
            except MismatchError:
                continue
        raise MismatchError
    if origin is Literal:
        for choice in args:
            if value == choice and isinstance(value, bool) == isinstance(choice, bool):
                return choice
        raise MismatchError
    if origin in (list, tuple):
        if not isinstance(value, list | tuple):
            raise MismatchError
        if origin is list or args[-1] is Ellipsis:
            return origin(coerce(item, args[0]) for item in value)
        if len(value) != len(args):
            raise MismatchError
        return tuple(coerce(item, arg) for item, arg in zip(value, args, strict=True))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise MismatchError
        return {coerce(key, args[0]): coerce(item, args[1]) for key, item in value.items()}
    if annotation in (int, float):
        return _number(value, annotation)
    if isinstance(annotation, type) and isinstance(value, annotation):
        return value
    raise MismatchError


def build(cls: type[T], values: Mapping[str, Any], where: str, *, ignore: tuple[str, ...] = ()) -> T:
    """An instance of the dataclass `cls` from plain data.

    where: how errors name the place, for example "recipes/x.yaml: algorithm".
    Raises UserError naming the key, the nearest known key, the value found and the type expected.
    """
    hints = get_type_hints(cls)
    known = keys(cls)
    filled: dict[str, Any] = {}
    for key, value in values.items():
        if key in ignore:
            continue
        if key not in known:
            raise UserError(
                f"{where}.{key}: unknown key{nearest(str(key), list(known))}; known keys: {', '.join(known)}"
            )
        name, hint = known[key], hints[known[key]]
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, Mapping):
                raise UserError(f"{where}.{key}: found {value!r}, expected a section with keys")
            filled[name] = build(hint, value, f"{where}.{key}")  # type: ignore[arg-type]
            continue
        try:
            filled[name] = coerce(value, hint)
        except MismatchError:
            raise UserError(f"{where}.{key}: found {value!r}, expected {describe(hint)}") from None
    try:
        return cls(**filled)
    except UserError as error:
        raise UserError(f"{where}.{error}") from None
