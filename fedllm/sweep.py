"""Grids and seeds of a recipe, cell by cell in one process: what is finished is skipped, what was cut off goes on."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from fedllm.assemble import Shelf, with_dir
from fedllm.console import say, warn
from fedllm.crew import Crew
from fedllm.errors import RunError, UserError
from fedllm.files import replace_text
from fedllm.folders import load_run
from fedllm.layers import parse_yaml
from fedllm.metrics import METRICS
from fedllm.processes import StoppedError
from fedllm.recipe import Recipe, load_recipe
from fedllm.report import report
from fedllm.results import LOSS, setting_text
from fedllm.run import run
from fedllm.settings import build, nearest, setting
from fedllm.summary import markdown_table
from fedllm.tasks import TASKS
from fedllm.turns import BusyError, alone, in_turn

Overrides = dict[str, Any]


@dataclass(frozen=True)
class Choose:
    """Every cell of a case is tried for a few rounds with the first seed; only its best cell is run in full."""

    rounds: int = setting(10, "rounds of a trial")
    by: str = setting(LOSS, "what tells the best trial: eval_loss (its lowest) or a metric (its highest)")
    set: Overrides = setting(dict, "overrides of the trials alone")

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise UserError(f"rounds: found {self.rounds}, expected a positive number")


@dataclass(frozen=True)
class Grid:
    """A grid file. Overrides are 'section.key: value', or 'section: {...}' for a whole section."""

    feeds: str = setting("", "the figure or table that the sweep feeds")
    set: Overrides = setting(dict, "overrides of every cell")
    cases: dict[str, Overrides] = setting(dict, "named alternatives, each its overrides and, if it likes, its own grid")
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
    path = Path(path)
    try:
        values = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path}: not readable as YAML: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: found {type(values).__name__}, expected keys such as grid: and seeds:")
    choose = values.pop("choose", None)
    if choose is not None and not isinstance(choose, Mapping):
        raise UserError(f"{path}: choose: found {choose!r}, expected keys and values, such as {{rounds: 10}}")
    grid = build(Grid, values, str(path))
    if choose is not None:
        grid = replace(grid, choose=build(Choose, choose, f"{path}: choose"))
    own = {f"cases.{name}.grid": case["grid"] for name, case in grid.cases.items() if case.get("grid") is not None}
    for where, axes in {"grid": grid.grid, **own}.items():
        if not isinstance(axes, Mapping) or not all(isinstance(key, str) for key in axes):
            raise UserError(f"{path}: {where}: found {axes!r}, expected keys, each with a list of values")
        for key, choices in axes.items():
            if not isinstance(choices, list) or not choices:
                raise UserError(f"{path}: {where}.{key}: found {choices!r}, expected a list of values")
    if grid.seeds is not None and (not grid.seeds or len({*grid.seeds}) < len(grid.seeds)):
        raise UserError(f"{path}: seeds: found {grid.seeds}, expected different whole numbers")
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


def sweep(
    recipe: str | Path,
    grid: str | Path,
    out: str | Path | None = None,
    overrides: Sequence[str] = (),
    only: Sequence[str] = (),
    crew: Crew | None = None,
) -> Path:
    """Runs every cell of the grid over the recipe and reports them together; the same as `fedllm sweep`.

    out: folder of the runs, default runs/<recipe>-<grid>; a cell's run is in <out>/<cell>-s<seed>, a trial in
    <out>/trials/<cell>, the tables in <out>/report and <out>/trials.md. only: the cases to run; the tables
    show what there is of the others too. crew: see run.
    Cells that are finished are skipped, and one that was cut off goes on, so that the same command may be given until
    all is done; given several times at once, each process takes cells that no other one is at work on.
    Raises UserError for a mistake in any cell before the first one runs; RunError at the end if some cells failed.
    """
    plan = load_grid(grid)
    out = Path(out) if out else Path("runs") / f"{Path(recipe).stem}-{Path(grid).stem}"
    cases = _cases(str(recipe), str(grid), plan, overrides, only)
    total = sum(len(members) for case, members in cases.items() if not only or case in only)
    say(f"{total} {'cells' if total > 1 else 'cell'} into {out}" + (f", for {plan.feeds}" if plan.feeds else ""))
    runner = _Runner(crew)
    folders: list[Path] = []
    todo: dict[Path, Recipe] = {}
    for case, members in cases.items():
        if only and case not in only:
            folders += [folder for cell in members for folder in _folders(cell, plan, str(recipe), out).values()]
            continue
        if plan.choose:
            members = _best(members, plan.choose, plan, str(recipe), out, runner)
        runs = {
            folder: cell.recipe(str(recipe), {"run.seed": seed})
            for cell in members
            for seed, folder in _folders(cell, plan, str(recipe), out).items()
        }
        folders += runs
        todo |= runs
    runner.run(todo)
    if plan.choose:
        _write_trials(out, plan.choose, [cell for members in cases.values() for cell in members])
    if done := [folder for folder in folders if (folder / "metrics.jsonl").is_file()]:
        with alone(out / "report", wait=True):
            report(done, out / "report")
    if runner.failed:
        raise RunError(f"{len(runner.failed)} runs of the sweep failed:\n  " + "\n  ".join(runner.failed))
    return out


def list_cells(
    recipe: str | Path, grid: str | Path, overrides: Sequence[str] = (), only: Sequence[str] = ()
) -> list[Cell]:
    """Every cell, checked as `sweep` would check it, with nothing run; the output of --dry-run."""
    cases = _cases(str(recipe), str(grid), load_grid(grid), overrides, only)
    found = [cell for case, members in cases.items() if not only or case in only for cell in members]
    for cell in found:
        say(f"{cell.name}: {' '.join(cell.overrides)}")
    return found


def _cases(recipe: str, grid: str, plan: Grid, overrides: Sequence[str], only: Sequence[str]) -> dict[str, list[Cell]]:
    """Every cell, by case; the recipes of all are read here, so that mistakes show before anything runs."""
    for case in only:
        if case not in plan.cases:
            raise UserError(f"--only {case}: no such case in {grid}{nearest(case, list(plan.cases))}")
    found: dict[str, list[Cell]] = {}
    for cell in cells(plan, overrides):
        found.setdefault(cell.case, []).append(cell)
    folders: dict[str, Cell] = {}
    for members in found.values():
        settings: dict[str, Cell] = {}
        for cell in members:
            try:
                loaded = cell.recipe(recipe)
                if plan.choose:
                    cell.recipe(recipe, plan.choose.set)
                    _check_choice(plan.choose, loaded, trials=len(members))
                if loaded.run.dir is not None:
                    raise UserError(
                        f"run.dir: found {loaded.run.dir}, but every run of a sweep has its own folder; give --out"
                    )
            except UserError as error:
                raise UserError(f"{grid}, cell {cell.name}: {error}") from error
            twin = settings.setdefault(loaded.yaml(), cell)
            if twin is not cell:
                raise UserError(f"{grid}: two cells are one, {twin.title} and {cell.title}; expected different values")
            twin = folders.setdefault(cell.name, cell)
            if twin is not cell:
                raise UserError(
                    f"{grid}: two cells would share the folder {cell.name}: {twin.title} and {cell.title}; make them "
                    f"cases, which have names"
                )
    return found


def _check_choice(choose: Choose, recipe: Recipe, *, trials: int) -> None:
    """Refuses what no trial of this recipe could be chosen by. Which metrics your own files have, the data tell."""
    known = TASKS.get(recipe.data.name or "")
    kinds = [known.metric] if known else ["accuracy_macro_f1", "pearson_spearman"]
    names = [*dict.fromkeys(name for kind in kinds for name in METRICS[kind][0]), LOSS]
    if choose.by not in names:
        raise UserError(
            f"choose.by: found '{choose.by}'{nearest(choose.by, names)}, expected one of {', '.join(names)}"
        )
    if trials > 1 and choose.rounds > recipe.federation.rounds:
        raise UserError(
            f"choose.rounds: found {choose.rounds}, expected at most the {recipe.federation.rounds} of "
            f"federation.rounds, for a trial is a short run"
        )


def _folders(cell: Cell, plan: Grid, recipe: str, out: Path) -> dict[int, Path]:
    """The run folders of a cell, by seed."""
    return {seed: out / f"{cell.name}-s{seed}" for seed in plan.seeds or [cell.recipe(recipe).run.seed]}


class _Runner:
    """Runs one recipe after the other; a run that cannot go on is noted and the next one begins. What another process
    is at work on comes last."""

    def __init__(self, crew: Crew | None) -> None:
        self.failed: list[str] = []
        self._shelf, self._crew = Shelf(), crew

    def run(self, recipes: Mapping[Path, Recipe]) -> None:
        in_turn(recipes, lambda folder, wait: self._run(recipes[folder], folder, wait))

    def _run(self, recipe: Recipe, folder: Path, wait: bool) -> None:
        say(str(folder), "bold")
        try:
            run(with_dir(recipe, folder), self._shelf, self._crew, wait=wait)
        except StoppedError:
            raise
        except BusyError as error:
            if not wait:
                raise
            self.failed.append(str(error))
        except RunError as error:
            warn(f"{folder}: {error}")
            self.failed.append(f"{folder}: {error}")
        except UserError as error:
            raise UserError(f"{folder}: {error}") from error


def _best(members: list[Cell], choose: Choose, plan: Grid, recipe: str, out: Path, runner: _Runner) -> list[Cell]:
    """The cell whose trial came out best; none where every trial failed. A case of one cell needs no trial."""
    if len(members) == 1:
        return members
    seed = {"run.seed": plan.seeds[0]} if plan.seeds else {}
    trials = {cell: out / "trials" / cell.name for cell in members}
    length = {"federation.rounds": choose.rounds}
    runner.run({folder: cell.recipe(recipe, choose.set | seed | length) for cell, folder in trials.items()})
    outcomes = {cell: _outcome(folder, choose.by) for cell, folder in trials.items()}
    values = {cell: value for cell, value in outcomes.items() if value is not None}
    if not values:
        return []
    best = (min if choose.by == LOSS else max)(values, key=lambda cell: values[cell])
    say(f"best of {len(members)} trials: {best.name}, {choose.by} {values[best]:.4f}", "bold")
    return [best]


def _outcome(folder: Path, by: str) -> float | None:
    """The best value of `by` in a finished trial; None for one that failed or never had a finite value."""
    if not (folder / "result.json").is_file():
        return None
    try:
        result = load_run(folder).result
    except UserError as error:
        warn(f"left out: {error}")
        return None
    if by not in result["final"]:
        raise UserError(f"choose.by: found '{by}', expected one of {', '.join(result['final'])}")
    value = (result["best"].get(by) or {}).get("value")
    return value if value is not None and math.isfinite(value) else None


def _write_trials(out: Path, choose: Choose, tried: Sequence[Cell]) -> None:
    """The table of all trials, so that a choice can be judged by who reads its result."""
    values = {cell: _outcome(out / "trials" / cell.name, choose.by) for cell in tried}
    rows = [
        (cell.case, cell.values, "failed" if value is None else f"{value:.4f}")
        for cell, value in values.items()
        if (out / "trials" / cell.name).is_dir()
    ]
    table = markdown_table([("case", "cell", choose.by), (":--", ":--", "--:"), *rows])
    replace_text(out / "trials.md", f"Best {choose.by} of {choose.rounds} rounds.\n\n{table}")


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
