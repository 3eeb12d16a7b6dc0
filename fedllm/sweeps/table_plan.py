"""What a paper's table will run: a recipe per method and task, read and checked before torch is loaded."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedllm.common.errors import UserError
from fedllm.common.schema import nearest
from fedllm.config.recipe import Recipe, load_recipe
from fedllm.sweeps.paper_tables import TABLES, PaperTable
from fedllm.sweeps.suite_plan import require_no_dir, require_recipes_folder

Cell = tuple[str, str]  # method, task


@dataclass(frozen=True)
class TablePlan:
    """The runs of a paper's table.

    recipes: of every method and task of the table, except where the overrides do not fit the method. wanted: the cells
    to run. seeds: of their runs. out: the folder of the runs and the table. printed: that of the paper's numbers.
    """

    name: str
    model: str
    recipes: Mapping[Cell, Recipe]
    wanted: tuple[Cell, ...]
    seeds: tuple[int, ...]
    out: Path
    printed: Path

    @property
    def table(self) -> PaperTable:
        """The table's methods and tasks."""
        return TABLES[self.name]

    @property
    def tasks(self) -> tuple[str, ...]:
        """All tasks, with those of the small model."""
        return self.table.tasks_of(self.model)

    @property
    def first(self) -> Recipe:
        """The recipe of the first cell to run."""
        return self.recipes[self.wanted[0]]

    def runs(self) -> dict[Path, tuple[Cell, Recipe]]:
        """Every run by its folder, task by task, so that its data is read once."""
        cells = sorted(self.wanted, key=lambda cell: self.tasks.index(cell[1]))
        return {self.folder(cell, seed): (cell, self.seeded(cell, seed)) for cell in cells for seed in self.seeds}

    def folder(self, cell: Cell, seed: int) -> Path:
        """The folder of a run."""
        return self.out / f"{self.stem(cell)}-s{seed}"

    def stem(self, cell: Cell) -> str:
        """The name of a cell's run folders, without their seeds."""
        recipe, method = self.recipes[cell], cell[0]
        return recipe.name if recipe.algorithm["name"] == method else f"{recipe.name}_{method}"

    def seeded(self, cell: Cell, seed: int) -> Recipe:
        """The recipe of a cell with a seed."""
        recipe = self.recipes[cell]
        return replace(recipe, run=replace(recipe.run, seed=seed))


def plan_table(
    name: str,
    model: str | None = None,
    algorithms: Sequence[str] = (),
    tasks: Sequence[str] = (),
    seeds: Sequence[int] = (),
    overrides: Sequence[str] = (),
    *,
    recipes: Path = Path("recipes"),
    out: Path = Path("runs"),
) -> TablePlan:
    """The plan of a table; see `fedllm.sweeps.table_suite.run_table`.

    model: the paper's by default, or the table's small_model. algorithms, tasks: () for all of the table. seeds: ()
    for the recipes' own. out: the folder in which the table has a folder of its own. Raises UserError for a mistake in
    any of them.
    """
    table = TABLES[name]
    chosen = model or table.model
    _require(name, "model", [chosen], list(table.models))
    methods = [table.method(algorithm) for algorithm in algorithms]
    _require(name, "--algorithm", methods, list(table.methods))
    _require(name, "--task", tasks, list(table.tasks_of(chosen)))
    require_recipes_folder(recipes)
    asked = (methods or table.methods, tasks or table.tasks_of(chosen))
    cells = [*itertools.product(table.methods, table.tasks_of(chosen))]
    wanted = tuple((method, task) for method, task in cells if method in asked[0] and task in asked[1])
    loaded: dict[Cell, Recipe] = {}
    for method, task in cells:
        path = recipes / f"{task}_{table.models[chosen]}.yaml"
        try:
            loaded[method, task] = _load(path, name, table.algorithm(method), [*table.overrides(method), *overrides])
        except UserError:
            if (method, task) in wanted:
                raise
    folder = out / (name if chosen == table.model else f"{name}-{chosen}")
    own_seed = loaded[wanted[0]].run.seed
    return TablePlan(name, chosen, loaded, wanted, tuple(seeds) or (own_seed,), folder, recipes / "paper")


def _load(path: Path, name: str, algorithm: str, overrides: Sequence[str]) -> Recipe:
    """The recipe of a cell of table `name`, which has this algorithm. Raises UserError."""
    recipe = load_recipe(path, overrides)
    require_no_dir(recipe)
    if recipe.algorithm["name"] != algorithm:
        raise UserError(f"{name}: algorithm.name: found {recipe.algorithm['name']}; choose it with --algorithm")
    return recipe


def parse_seeds(text: str) -> tuple[int, ...]:
    """The seeds in a text such as "0,1,2". Raises UserError."""
    try:
        seeds = tuple(int(word) for word in text.split(","))
    except ValueError:
        seeds = ()
    if not seeds or min(seeds) < 0 or len({*seeds}) < len(seeds):
        raise UserError(f"--seeds: found '{text}', expected different whole numbers such as 0,1,2")
    return seeds


def small_model(table: PaperTable, small: bool, model: str | None) -> str | None:
    """The model that `--small` and `--model` ask for. Raises UserError if they contradict each other."""
    if small and model not in (None, table.small_model):
        raise UserError(f"--small runs the model {table.small_model}, but --model says {model}; give one of them")
    return table.small_model if small else model


def _require(table: str, what: str, found: Sequence[str], known: list[str]) -> None:
    """Raises UserError for a name that a table has not."""
    for name in found:
        if name not in known:
            raise UserError(f"{table}: {what}: found '{name}'{nearest(name, known)}, expected {', '.join(known)}")
