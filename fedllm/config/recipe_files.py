"""Where a recipe's files may be that are not where they are looked for."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

from fedllm.common.errors import UserError


def missing_recipe(path: Path) -> UserError:
    """The error for a recipe's file that does not exist; it names a file that may be meant."""
    if path.is_dir():
        return UserError(f"{path}: is a folder, expected a recipe file")
    found = next((place for place in _places(path) if place.is_file()), None)
    return UserError(f"{path}: no such recipe file{f'; did you mean {found}?' if found else ''}")


def _places(path: Path) -> Iterator[Path]:
    """Files that may be meant, the likeliest first: the same path from a folder above, the same name in `recipes`, and
    a similar name beside it."""
    if not path.is_absolute():
        above = [Path(*[".."] * level) for level in range(len(Path.cwd().parents) + 1)]
        yield from (folder / path for folder in above[1:])
        names = [path.name] if path.suffix else [f"{path.name}.yaml", f"{path.name}.yml"]
        yield from (folder / "recipes" / name for folder in above for name in names)
    near = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*.yaml")], n=1)
    yield from (path.parent / name for name in near)
