"""Checks that a recipe's own data files are where it says."""

from __future__ import annotations

from pathlib import Path

from fedllm.common.errors import UserError
from fedllm.common.hub import find_local
from fedllm.config.recipe import Recipe


def require_own_files(recipe: Recipe) -> None:
    """Raises UserError for a relative data.train or data.validation that is missing; it says where the file is looked
    for, and whether it is beside the recipe."""
    if recipe.data.name is not None:
        return
    for key in ("train", "validation"):
        given = getattr(recipe.data, key)
        path = Path(given or "").expanduser()
        if given is None or path.is_absolute() or find_local("datasets", given) is not None:
            continue
        beside = None if recipe.folder is None else recipe.folder / path
        hint = f"; it is beside the recipe: write data.{key}={beside}" if beside and beside.exists() else ""
        raise UserError(
            f"data.{key}={given}: no such file or folder in {Path.cwd()}, the current folder, from which paths are "
            f"read{hint}"
        )
