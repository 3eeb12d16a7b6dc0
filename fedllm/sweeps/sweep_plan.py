"""What a sweep will run: every cell of a grid over a recipe, checked before anything is loaded or run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedllm.common.errors import UserError
from fedllm.common.schema import nearest
from fedllm.config.recipe import Recipe
from fedllm.sweeps.grid import Cell, Choose, Grid, Overrides, cells, check_choice, load_grid, make_grid


@dataclass(frozen=True)
class SweepPlan:
    """A sweep whose cells are all sound. out: the folder of its runs. cases: the cells of each case; only: the names of
    the cases to run, () for all."""

    recipe: Path
    grid: Grid
    out: Path
    cases: dict[str, list[Cell]]
    only: tuple[str, ...] = ()

    def load(self, cell: Cell, more: Overrides | None = None) -> Recipe:
        """The recipe with the overrides of a cell, and `more` on top."""
        return cell.recipe(str(self.recipe), more)

    def trial(self, cell: Cell) -> Recipe:
        """The recipe of a cell's trial, with the first seed. The grid must say how to choose."""
        choose = self.grid.choose or Choose()
        seed = {"run.seed": self.grid.seeds[0]} if self.grid.seeds else {}
        length = {} if choose.rounds is None else {"federation.rounds": choose.rounds}
        return self.load(cell, choose.set | seed | length)

    def any_recipe(self) -> Recipe:
        """The recipe of the first cell."""
        return self.load(next(iter(self.cases.values()))[0])

    def folders(self, cell: Cell) -> dict[int, Path]:
        """The run folders of a cell, by seed."""
        return {seed: self.out / f"{cell.name}-s{seed}" for seed in self.grid.seeds or [self.load(cell).run.seed]}

    def is_wanted(self, case: str) -> bool:
        """Whether the cells of a case are to be run."""
        return not self.only or case in self.only

    def wanted_cases(self) -> list[list[Cell]]:
        """The cells of each case to run."""
        return [members for case, members in self.cases.items() if self.is_wanted(case)]

    def wanted_cells(self) -> list[Cell]:
        """The cells to run."""
        return [cell for members in self.wanted_cases() for cell in members]

    def tried_cells(self) -> list[Cell]:
        """The cells to run that have a trial first. A case of one cell needs none."""
        cases = self.wanted_cases() if self.grid.choose else []
        return [cell for members in cases if len(members) > 1 for cell in members]

    def num_runs(self) -> int:
        """The number of runs in full, if some trial of every case succeeds."""
        chosen = self.wanted_cases() if self.grid.choose else self.wanted_cells()
        return len(chosen) * len(self.grid.seeds or [None])


def plan_sweep(
    recipe: str | Path,
    grid: str | Path | Mapping[str, Any],
    out: str | Path | None = None,
    overrides: Sequence[str] = (),
    only: Sequence[str] = (),
) -> SweepPlan:
    """The plan of a sweep; for the arguments see `fedllm.sweeps.sweep.sweep`.

    Every recipe is read here, so that mistakes show before anything runs: UserError names the grid file and the cell.
    """
    recipe = Path(recipe)
    loaded, where = (make_grid(grid, "grid"), "grid") if isinstance(grid, Mapping) else (load_grid(grid), str(grid))
    for case in only:
        if case not in loaded.cases:
            raise UserError(f"--only {case}: no such case in {where}{nearest(case, list(loaded.cases))}")
    cases: dict[str, list[Cell]] = {}
    for cell in cells(loaded, overrides):
        cases.setdefault(cell.case, []).append(cell)
    place = Path(out) if out else Path("runs") / f"{recipe.stem}-{Path(where).stem}"
    plan = SweepPlan(recipe, loaded, place, cases, tuple(only))
    _check_cells(plan, where)
    return plan


def _check_cells(plan: SweepPlan, where: str) -> None:
    """Raises UserError for a cell that is no recipe, and for two cells that are one or would share a folder."""
    folders: dict[str, Cell] = {}
    for members in plan.cases.values():
        settings: dict[str, Cell] = {}
        for cell in members:
            try:
                loaded = _checked_recipe(plan, cell, trials=len(members))
            except UserError as error:
                raise UserError(f"{where}, cell {cell.name}: {error}") from error
            twin = settings.setdefault(loaded.yaml(), cell)
            if twin is not cell:
                raise UserError(f"{where}: two cells are one, {twin.title} and {cell.title}; expected different values")
            twin = folders.setdefault(cell.name, cell)
            if twin is not cell:
                raise UserError(
                    f"{where}: two cells would share the folder {cell.name}: {twin.title} and {cell.title}; make them "
                    f"cases, which have names"
                )


def _checked_recipe(plan: SweepPlan, cell: Cell, trials: int) -> Recipe:
    """The recipe of a cell. trials: how many cells its case has."""
    loaded, choose = plan.load(cell), plan.grid.choose
    if choose:
        plan.load(cell, choose.set)
        check_choice(choose, loaded, trials=trials)
    if loaded.run.dir is not None:
        raise UserError(f"run.dir: found {loaded.run.dir}, but every run of a sweep has its own folder; give --out")
    return loaded
