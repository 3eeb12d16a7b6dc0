"""The recipes that are installed with fedllm, for commands that start outside a clone of the repository."""

from __future__ import annotations

from pathlib import Path

from fedllm.common.errors import UserError

RECIPES = Path("recipes")
_PACKAGE = Path(__file__).resolve().parents[1]


def shipped_recipes() -> Path:
    """The folder of the recipes: in an installed package its own `recipes`, in a clone the one beside the package."""
    return next(folder / RECIPES for folder in (_PACKAGE, _PACKAGE.parent) if (folder / RECIPES).is_dir())


def find_recipe(given: str) -> str:
    """The path of a recipe's or grid's file: `given`, or where nothing is there the installed file of that name.

    Only names such as recipes/quickstart.yaml are looked for among the installed files.
    """
    path = Path(given)
    if path.exists() or path.is_absolute() or path.parts[:1] != RECIPES.parts:
        return given
    installed = shipped_recipes().joinpath(*path.parts[1:])
    return str(installed) if installed.is_file() else given


def find_recipes_folder(given: Path) -> Path:
    """The folder of the recipes: `given`, or the installed one where `recipes` was meant and is not there."""
    return shipped_recipes() if given == RECIPES and not given.exists() else given


def require_own(recipe: str, doing: str) -> None:
    """Raises UserError if a file that is to be changed is an installed one. doing: the command that would change it."""
    path = Path(recipe).resolve()
    if _PACKAGE in path.parents:
        raise UserError(
            f"{recipe}: is a recipe that was installed with fedllm, which {doing} would change; copy it to a folder "
            "of your own first"
        )
