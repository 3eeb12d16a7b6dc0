"""What a suite will run: the recipes of a paper's table, read and checked before torch is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedllm.algorithms import canonical_name
from fedllm.common.console import say, warn
from fedllm.common.errors import UserError
from fedllm.common.schema import nearest
from fedllm.config.recipe import Recipe, load_recipe
from fedllm.config.yaml_layers import read_layers


@dataclass(frozen=True)
class Suite:
    """A suite: one recipe <task>_<model>.yaml per task and model.

    The default model is the first available one. The last model needs no network.
    """

    tasks: tuple[str, ...]
    models: tuple[str, ...]


SUITES = {
    "glue": Suite(("cola", "rte", "sst2", "qqp", "mrpc", "qnli", "mnli"), ("roberta", "minilm")),
    "20news": Suite(("20news",), ("gpt2", "minilm")),
}


@dataclass(frozen=True)
class SuitePlan:
    """The recipes of a suite, in the order of its tasks. unlisted: a file of theirs that has no settings for their
    algorithm, or None."""

    model: str
    tasks: tuple[str, ...]
    recipes: list[Recipe]
    unlisted: Path | None

    @property
    def first(self) -> Recipe:
        """The recipe of the first task."""
        return self.recipes[0]

    @property
    def algorithm(self) -> str:
        """The algorithm of all runs."""
        return str(self.first.algorithm["name"])


def plan_suite(
    name: str, model: str | None = None, algorithm: str | None = None, overrides: Sequence[str] = (), *, recipes: Path
) -> SuitePlan:
    """The recipes of a suite for one model, None for the last of Suite.models; see `run_suite` for the other arguments.

    Raises UserError for mistakes in what was given.
    """
    suite = SUITES[name]
    chosen = model or suite.models[-1]
    paths = [_recipe_file(recipes, suite, task, chosen) for task in suite.tasks]
    wanted = [*([f"algorithm={algorithm}"] if algorithm else []), *overrides]
    loaded = [load_recipe(path, wanted) for path in paths]
    require_no_dir(loaded[0])
    listed = map(canonical_name, read_layers(paths[0]).sections().get("algorithms", {}))
    unlisted = None if loaded[0].algorithm["name"] in listed else paths[0]
    return SuitePlan(chosen, suite.tasks, loaded, unlisted)


def default_model(name: str, overrides: Sequence[str] = (), *, recipes: Path) -> str:
    """The first model of a suite that can be had here, or else its last; says which, and why."""
    import torch

    from fedllm.models.sources import check_available  # here: it brings transformers

    suite = SUITES[name]
    *preferred, last = suite.models
    for model in preferred:
        recipe = load_recipe(_recipe_file(recipes, suite, suite.tasks[0], model), overrides)
        name = recipe.model.name
        try:
            check_available(name, recipe.run.local_hub)
        except UserError as error:
            reason = str(error.__cause__ or error).strip().partition("\n")[0]
            say(f"model: {last}, because {name} cannot be had here ({reason})")
        else:
            say(f"model: {model} ({name})")
            if not torch.cuda.is_available():
                warn(f"no GPU here: {model} may take days on a CPU; {last} is made for one")
            return model
    return last


def _recipe_file(recipes: Path, suite: Suite, task: str, model: str) -> Path:
    require_recipes_folder(recipes)
    path = recipes / f"{task}_{model}.yaml"
    if model not in suite.models and not path.is_file():
        raise UserError(
            f"model: found '{model}'{nearest(model, list(suite.models))}, expected one of {', '.join(suite.models)}, "
            f"or one that has a recipe {path}"
        )
    return path


def require_recipes_folder(recipes: Path) -> None:
    """Raises UserError if the folder of the recipes does not exist."""
    if not recipes.is_dir():
        raise UserError(f"{recipes}: no such folder; name that of the recipes with --recipes, or leave the option out")


def require_no_dir(recipe: Recipe) -> None:
    """Raises UserError if a recipe of a suite names its run folder."""
    if (folder := recipe.run.dir) is not None:
        raise UserError(f"run.dir: found {folder}, but every run of a suite has its own folder; give --out")
