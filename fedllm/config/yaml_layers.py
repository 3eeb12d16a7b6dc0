"""The layers of a recipe, as plain data: files that extend one another, then overrides from the command line."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedllm.common.errors import UserError

Sections = dict[str, Any]
Aliases = Mapping[tuple[str, str], str]  # (section, alias) -> key
NO_ALIASES: Aliases = {}


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice. YAML's own reader silently takes the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise ValueError(f"the key '{key.value}' is there twice (line {key.start_mark.line + 1})")
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """Plain data from YAML. Raises ValueError for what is not YAML, has a key twice, or nests too deeply."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError("it nests too deeply") from error


def read_layers(path: Path, overrides: Sequence[str] = (), aliases: Aliases = NO_ALIASES) -> Sections:
    """The sections of a recipe's file over those of the file it `extends`, with overrides on top; nothing is checked.

    Sections are merged key by key. A name in place of a section's keys (`algorithm: fedavg`) replaces the section.
    aliases: other names of keys, (section, alias) -> key; a key that is given under one name replaces what a lower
    layer gives under another. Raises UserError naming the file or the override that cannot be read, and where two
    overrides give one key two values under two names.
    """
    values = _read(path, (), aliases)
    named: dict[tuple[str, str], tuple[str, Any]] = {}
    for override in overrides:
        section, name, value = _parsed(override)
        if name is None:
            values[section] = value
            continue
        own = (section, aliases.get((section, name), name))
        before, found = named.setdefault(own, (name, value))
        if before != name and found != value:
            raise UserError(
                f"override '{override}': {section}.{before} is {found!r} in another override, and they are one "
                f"setting; give {section}.{own[1]} alone"
            )
        current = _spelled_out(section, values.get(section))
        values[section] = _over(section, current if isinstance(current, Mapping) else {}, {name: value}, aliases)
    return {section: _spelled_out(section, keys) for section, keys in values.items()}


def _spelled_out(section: str, keys: Any) -> Any:
    """`algorithm: fedavg` is short for `algorithm: {name: fedavg}`."""
    return {"name": keys} if section == "algorithm" and isinstance(keys, str) else keys


def _read(path: Path, seen: tuple[Path, ...], aliases: Aliases) -> Sections:
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*.yaml")], n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise UserError(f"{path}: no such recipe file{hint}")
    if path.resolve() in seen:
        raise UserError(f"{path}: extends itself through {' -> '.join(str(file) for file in seen)}")
    try:
        values = parse_yaml(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not readable as YAML: {error}") from error
    if not isinstance(values, dict):
        found = "nothing" if values is None else type(values).__name__
        raise UserError(f"{path}: found {found}, expected sections such as model: and algorithm:")
    parent = values.pop("extends", None)
    if parent is None:
        return values
    return _merge(_read(path.parent / str(parent), (*seen, path.resolve()), aliases), values, aliases)


def _merge(base: Sections, top: Mapping[str, Any], aliases: Aliases) -> Sections:
    """`top` over `base`, section by section and key by key."""
    merged = dict(base)
    for section, values in top.items():
        below = _spelled_out(section, merged.get(section))
        both = isinstance(values, Mapping) and isinstance(below, Mapping)
        merged[section] = _over(section, below, values, aliases) if both else values
    return merged


def _over(section: str, below: Mapping[str, Any], above: Mapping[str, Any], aliases: Aliases) -> Sections:
    """The keys of a section over those of a lower layer, which loses the same keys under all their names."""
    replaced = {aliases.get((section, key), key) for key in above}
    left = {
        key: value for key, value in below.items() if key in above or aliases.get((section, key), key) not in replaced
    }
    return {**left, **above}


def _parsed(override: str) -> tuple[str, str | None, Any]:
    """Section, key and value of an override; the key is None where it gives a whole section."""
    key, equals, text = override.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (equals and section and bool(dot) == bool(name)):
        raise UserError(f"override '{override}': expected section.key=value, for example algorithm.lr=3e-4")
    try:
        return section, name or None, parse_yaml(text)
    except ValueError as error:
        raise UserError(f"override '{override}': the value is not readable as YAML: {error}") from error
