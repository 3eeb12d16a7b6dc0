"""A grid file, and the cells that it makes of a recipe."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fedllm.common.errors import UserError
from fedllm.common.schema import build, nearest, setting
from fedllm.config.recipe import Recipe, load_recipe
from fedllm.config.shipped_recipes import find_recipe
from fedllm.config.yaml_layers import parse_yaml, without_private
from fedllm.results.format import LOSS
from fedllm.results.names import setting_text

Overrides = dict[str, Any]


@dataclass(frozen=True)
class Choose:
    """Every cell of a case is tried for a few rounds with the first seed; only its best cell is run in full."""

    rounds: int | None = setting(10, "rounds of a trial; null = as many as a run has")
    by: str = setting(LOSS, "what decides which trial is best: eval_loss (the lowest) or a metric (the highest)")
    set: Overrides = setting(dict, "overrides of the trials alone")

    def __post_init__(self) -> None:
        if self.rounds is not None and self.rounds < 1:
            raise UserError(f"rounds: found {self.rounds}, expected a positive number or null")


@dataclass(frozen=True)
class Grid:
    """A grid file. Overrides are 'section.key: value', or 'section: {...}' for several keys of a section."""

    feeds: str = setting("", "the figure or table that the sweep feeds")
    set: Overrides = setting(dict, "overrides of every cell")
    cases: dict[str, Overrides] = setting(
        dict, "named alternatives, each with its overrides and, if it has one, its own grid"
    )
    grid: dict[str, list[Any]] = setting(dict, "key: values; every combination of values is a cell")
    seeds: list[int] | None = setting(None, "run.seed of each cell; null = the recipe's")
    choose: Choose | None = setting(None, "rounds, by, set: try every cell briefly, run the best of each case in full")


@dataclass(frozen=True)
class Cell:
    """One combination: its case, the values of the grid in words, and all its overrides as on the command line."""

    case: str
    values: str
    overrides: tuple[str, ...]

    def recipe(self, path: str, more: Overrides | None = None) -> Recipe:
        """The recipe in a file with the cell's overrides, and `more` on top."""
        return load_recipe(path, [*self.overrides, *_texts((more or {}).items())])

    @property
    def title(self) -> str:
        """Case and values."""
        return ",".join(part for part in (self.case, self.values) if part) or "run"

    @property
    def name(self) -> str:
        """The title, fit for a folder's name."""
        return re.sub(r"[^\w.,=+-]+", "_", self.title)


def load_grid(path: str | Path) -> Grid:
    """The grid in a YAML file. Raises UserError naming file, key, what was found and what was expected."""
    path = Path(find_recipe(str(path)))
    try:
        values = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path}: not readable as YAML: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: found {type(values).__name__}, expected keys such as grid: and seeds:")
    return make_grid(values, str(path))


def make_grid(values: Mapping[str, Any], source: str) -> Grid:
    """A grid from plain data. source: how errors name it."""
    grid = build(Grid, without_private(dict(values)), f"{source}: ")
    own = {f"cases.{name}.grid": case["grid"] for name, case in grid.cases.items() if case.get("grid") is not None}
    for where, axes in {"grid": grid.grid, **own}.items():
        if not isinstance(axes, Mapping) or not all(isinstance(key, str) for key in axes):
            raise UserError(f"{source}: {where}: found {axes!r}, expected keys, each with a list of values")
        for key, choices in axes.items():
            if not isinstance(choices, list) or not choices:
                raise UserError(f"{source}: {where}.{key}: found {choices!r}, expected a list of values")
    if grid.seeds is not None and (not grid.seeds or len({*grid.seeds}) < len(grid.seeds)):
        raise UserError(f"{source}: seeds: found {grid.seeds}, expected different whole numbers")
    return grid


def cells(grid: Grid, overrides: Sequence[str] = ()) -> Iterator[Cell]:
    """Every cell, case by case. overrides: "section.key=value" on top of all of them."""
    for case, given in (grid.cases or {"": {}}).items():
        axes = grid.grid | (given.get("grid") or {})
        fixed = [*grid.set.items(), *((key, value) for key, value in given.items() if key != "grid")]
        for choice in itertools.product(*axes.values()):
            values = dict(zip(axes, choice, strict=True))
            words = ",".join(f"{_short(key, axes)}={setting_text(value)}" for key, value in values.items())
            yield Cell(case, words, (*_texts([*fixed, *values.items()]), *overrides))


def check_choice(choose: Choose, recipe: Recipe, *, trials: int) -> None:
    """Raises UserError where no trial of this recipe can be chosen so. Metrics of your own files are not known yet."""
    from fedllm.tasks.selection import score_names  # here: it brings scikit-learn, which no other grid waits for

    names = score_names(recipe.data)
    if choose.by not in names:
        raise UserError(
            f"choose.by: found '{choose.by}'{nearest(choose.by, names)}, expected one of {', '.join(names)}"
        )
    if trials > 1 and choose.rounds is not None and choose.rounds > recipe.federation.rounds:
        raise UserError(
            f"choose.rounds: found {choose.rounds}, expected at most the {recipe.federation.rounds} of "
            f"federation.rounds, for a trial is a short run"
        )


def _texts(overrides: Iterable[tuple[str, Any]]) -> list[str]:
    """Overrides as they are typed on the command line."""
    return [f"{key}={json.dumps(value)}" for key, value in overrides]


def _short(key: str, keys: Mapping[str, Any]) -> str:
    """A key without its section, where no other key of the grid ends alike."""
    last = key.rpartition(".")[2]
    return last if sum(other.rpartition(".")[2] == last for other in keys) == 1 else key


def help_text() -> str:
    """Every key of a grid file with its meaning."""
    return "\n".join(f"  {field.name:<8} {field.metadata['help']}" for field in fields(Grid))
