"""The layers of a recipe, as plain data: files that extend one another, then overrides from the command line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import Path
from typing import Any

import yaml

from fedllm.algorithms import canonical_name
from fedllm.common.errors import UserError
from fedllm.config.algorithm_choice import Choice
from fedllm.config.recipe_files import missing_recipe

Sections = dict[str, Any]
PRIVATE = "x-"  # top-level keys that begin so hold YAML anchors, and are ignored


@dataclass(frozen=True)
class KeyRules:
    """What a key of a higher layer replaces besides the same key.

    aliases: other names of keys, (section, alias) -> key. rivals: keys of which a section has only one.
    """

    aliases: Mapping[tuple[str, str], str]
    rivals: Mapping[tuple[str, str], str]

    def own(self, section: str, key: str) -> str:
        """The key that a name in a section stands for."""
        return canonical_name(key) if section == "algorithms" else self.aliases.get((section, key), key)


NO_RULES = KeyRules({}, {})


@dataclass(frozen=True)
class Layers:
    """What a recipe's files say, lowest first, and the overrides, which count together as one layer above them.

    where: how errors name the recipe.
    """

    files: list[Sections]
    overrides: list[Sections]
    where: str

    def sections(self, rules: KeyRules = NO_RULES) -> Sections:
        """All layers, merged section by section and key by key. `algorithm` is in `choice`."""
        alike = KeyRules(rules.aliases, {})
        top: Sections = reduce(lambda below, above: _merge(below, above, alike), self.overrides, {})
        merged: Sections = reduce(lambda below, above: _merge(below, above, rules), [*self.files, top], {})
        return {section: keys for section, keys in merged.items() if section != "algorithm"}

    def choice(self) -> Choice:
        """The algorithm that the layers choose, and its settings."""
        return self._folded(self.files).under(self._folded(self.overrides))

    def _folded(self, layers: Iterable[Sections]) -> Choice:
        given = (Choice.of(layer["algorithm"], self.where) for layer in layers if "algorithm" in layer)
        return reduce(Choice.under, given, Choice())


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice, of which YAML's own reader silently takes the last, and one without value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                line = key.start_mark.line + 1
                if key.value in seen:
                    raise ValueError(f"the key '{key.value}' is there twice (line {line})")
                if isinstance(value, yaml.ScalarNode) and not value.value and value.style is None:
                    raise ValueError(f"the key '{key.value}' has no value (line {line}); give one, or leave it out")
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """Plain data from YAML. Raises ValueError for what is not YAML, has a key twice or without value, or nests too
    deeply."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError("it nests too deeply") from error


def read_layers(path: Path, overrides: Sequence[str] = (), rules: KeyRules = NO_RULES) -> Layers:
    """The layers of a recipe's file, of the files it `extends`, and of the overrides; their content is not checked.

    Raises UserError naming the file or the override that cannot be read, and where two overrides give one key two
    values under two names.
    """
    layers = [_layer(*_parsed(override)) for override in overrides]
    _require_one_name(overrides, layers, rules)
    return Layers(_read(path, ()), layers, str(path))


def require_keys_of_no_null(layers: Layers, sections: Sequence[str]) -> None:
    """Raises UserError where an override sets a key of one of these sections, which is null below it."""
    for section in sections:
        null = False
        for layer in layers.files:
            null = layer[section] is None if section in layer else null
        for layer in layers.overrides:
            if null and isinstance(layer.get(section), Mapping):
                key = next(iter(layer[section]), "")
                raise UserError(
                    f"{layers.where}: {section}.{key}: found {layer[section].get(key)!r}, but {section} is null here; "
                    f"leave the override out, or give the section {section} in a recipe"
                )
            null = layer[section] is None if section in layer else null


def _layer(section: str, name: str | None, value: Any) -> Sections:
    return {section: value if name is None else {name: value}}


def _require_one_name(overrides: Sequence[str], layers: Sequence[Sections], rules: KeyRules) -> None:
    """Raises UserError where two overrides give one key two values under two names."""
    named: dict[tuple[str, str], tuple[str, Any]] = {}
    for override, layer in zip(overrides, layers, strict=True):
        for section, keys in layer.items():
            for name, value in keys.items() if isinstance(keys, Mapping) else ():
                own = rules.own(section, str(name))
                before, found = named.setdefault((section, own), (name, value))
                if before != name and found != value:
                    raise UserError(
                        f"override '{override}': {section}.{before} is {found!r} in another override, and they are "
                        f"one setting; give {section}.{own} alone"
                    )


def _read(path: Path, seen: tuple[Path, ...]) -> list[Sections]:
    """The sections of a file, after those of the files that it extends."""
    if not path.exists() or path.is_dir():
        raise missing_recipe(path)
    if path.resolve() in seen:
        raise UserError(f"{path}: extends itself through {' -> '.join(str(file) for file in seen)}")
    try:
        values = parse_yaml(path.read_text(encoding="utf-8") if path.is_file() else _piped(path))
    except ValueError as error:
        raise UserError(f"{path}: not readable as YAML: {error}") from error
    if not isinstance(values, dict):
        found = "nothing" if values is None else type(values).__name__
        raise UserError(f"{path}: found {found}, expected sections such as model: and algorithm:")
    values = without_private(values)
    parent = values.pop("extends", None)
    if parent is None:
        return [values]
    beside = path.parent if path.is_file() else Path()
    return [*_read(beside / str(parent), (*seen, path.resolve())), values]


def _piped(path: Path) -> str:
    """The text of a pipe or of the standard input, which can be read only once."""
    found = path.stat()
    return _read_once(path, found.st_dev, found.st_ino)


@cache
def _read_once(path: Path, device: int, inode: int) -> str:
    """The text at `path`. device, inode: which pipe it is, as a later one may have the same path (/dev/fd/63)."""
    return path.read_text(encoding="utf-8")


def without_private(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """The top level of a file without the keys that hold YAML anchors."""
    return {key: value for key, value in values.items() if not str(key).startswith(PRIVATE)}


def _merge(base: Sections, top: Mapping[str, Any], rules: KeyRules) -> Sections:
    """`top` over `base`, section by section and key by key."""
    merged = dict(base)
    for section, values in top.items():
        below = merged.get(section)
        if isinstance(values, Mapping) and isinstance(below, Mapping):
            merged[section] = _over(section, below, values, rules)
        else:
            merged[section] = values
    return merged


def _over(section: str, below: Mapping[str, Any], above: Mapping[str, Any], rules: KeyRules) -> Sections:
    """The keys of a section over those of a lower layer, which loses the same keys under all their names, and their
    rivals."""
    if section == "algorithms":
        return _entries(below, above, rules)
    given = {rules.own(section, str(key)): value for key, value in above.items()}
    rivals = {rules.rivals.get((section, key)) for key, value in given.items() if value is not None}
    left = {
        key: value
        for key, value in below.items()
        if key in above or rules.own(section, str(key)) not in {*given, *rivals}
    }
    return {**left, **above}


def _entries(below: Mapping[str, Any], above: Mapping[str, Any], rules: KeyRules) -> Sections:
    """The entries of `algorithms` over those of a lower layer: each is merged key by key, under all its names."""
    merged = {rules.own("algorithms", str(name)): settings for name, settings in below.items()}
    for name, settings in above.items():
        lower = merged.get(own := rules.own("algorithms", str(name)))
        mappings = [each for each in (lower, settings) if isinstance(each, Mapping)]
        merged[own] = {**mappings[0], **mappings[1]} if len(mappings) == 2 else settings
    return merged


def _parsed(override: str) -> tuple[str, str | None, Any]:
    """Section, key and value of an override; the key is None where it gives several keys of a section."""
    key, equals, text = override.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (equals and section and bool(dot) == bool(name)):
        raise UserError(f"override '{override}': expected section.key=value, for example algorithm.lr=3e-4")
    if not text.strip():
        raise UserError(f"override '{override}': found no value; for the default write {key.strip()}=null")
    try:
        return section, name or None, parse_yaml(text)
    except ValueError as error:
        raise UserError(f"override '{override}': the value is not readable as YAML: {error}") from error
