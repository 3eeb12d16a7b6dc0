"""Grids and seeds of a recipe, cell by cell in one process: what is finished is skipped, what was cut off goes on."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedllm.common.console import say, warn
from fedllm.common.errors import RunError, UserError
from fedllm.common.files import replace_text, replaced_folder
from fedllm.config.recipe import Recipe, load_recipe
from fedllm.distributed.process_group import StoppedError
from fedllm.experiment.build import ReadCache, with_dir
from fedllm.experiment.launch import executor_for
from fedllm.experiment.run import run
from fedllm.experiment.run_lock import LEASE, LOCK, RunInUseError, run_each_when_free, run_lock
from fedllm.experiment.stopping import StopRequests, stop_requests
from fedllm.federation.executor import Executor
from fedllm.reporting.report import report
from fedllm.reporting.text_tables import markdown_table
from fedllm.results.reader import load_run
from fedllm.sweeps.cell_list import amount
from fedllm.sweeps.grid import Cell, Choose
from fedllm.sweeps.sweep_plan import SweepPlan, plan_sweep
from fedllm.tasks.base import lower_is_better


@dataclass(frozen=True)
class SweepResult:
    """A sweep that has ended. folder: of all its runs. runs: the run folders of the cells that were run, or were run
    before, in the order of the grid. report: the folder of the tables and figures."""

    folder: Path
    runs: list[Path]
    report: Path


def sweep(
    recipe: str | Path,
    grid: str | Path | Mapping[str, Any],
    out: str | Path | None = None,
    overrides: Sequence[str] = (),
    only: Sequence[str] = (),
    executor: Executor | None = None,
) -> SweepResult:
    """Runs every cell of the grid over the recipe and reports them together; the same as `fedllm sweep`.

    grid: a YAML file, or what it would hold. out: folder of the runs, default runs/<recipe>-<grid>; a cell's run is in
    <out>/<cell>-s<seed>, a trial in <out>/trials/<cell>, the tables in <out>/report and <out>/trials.md. The run with
    the first seed goes on from a copy of the best trial where the trial's rounds are its first rounds. only: the cases
    to run; the tables show what there is of the others too. executor: see run.
    Finished cells are skipped and interrupted cells continue, so the same command can be repeated until all are done.
    If it runs several times at once, each process takes cells that no other process is working on.
    Raises UserError for a mistake in any cell before the first one runs; RunError at the end if some cells failed.
    """
    return run_sweep(plan_sweep(recipe, grid, out, overrides, only), executor)


def run_sweep(plan: SweepPlan, executor: Executor | None = None) -> SweepResult:
    """Runs the cells of a plan and reports them together, see `sweep`."""
    feeds = f", for {plan.grid.feeds}" if plan.grid.feeds else ""
    executor = executor or executor_for(plan.any_recipe().run)
    say(f"{amount(plan)}, into {plan.out}{feeds}")
    with stop_requests(executor.size) as stop:
        runner = _Runner(executor, stop, len(plan.tried_cells()))
        folders = _run_cells(plan, runner)
    executor.on_first(lambda: _write_tables(plan, folders))
    if runner.failed:
        raise RunError(f"{len(runner.failed)} runs of the sweep failed:\n  " + "\n  ".join(runner.failed))
    return SweepResult(plan.out, [folder for folder in folders if _has_begun(folder)], _report_folder(plan))


def _run_cells(plan: SweepPlan, runner: _Runner) -> list[Path]:
    """Runs the wanted cases; the folders of all cases."""
    folders: list[Path] = []
    todo: dict[Path, Recipe] = {}
    for case, members in plan.cases.items():
        if not plan.is_wanted(case):
            folders += [folder for cell in members for folder in plan.folders(cell).values()]
            continue
        runs = {
            folder: plan.load(cell, {"run.seed": seed})
            for cell in (_best(members, plan, plan.grid.choose, runner) if plan.grid.choose else members)
            for seed, folder in plan.folders(cell).items()
        }
        folders += runs
        todo |= runs
    runner.run(todo)
    return folders


def _write_tables(plan: SweepPlan, folders: Sequence[Path]) -> None:
    """The table of the trials, and the report of the runs that have begun."""
    if plan.grid.choose:
        _write_trials(plan.out, plan.grid.choose, [cell for members in plan.cases.values() for cell in members])
    if done := [folder for folder in folders if _has_begun(folder)]:
        with run_lock(_report_folder(plan), wait=True):
            report(done, _report_folder(plan))


def _has_begun(folder: Path) -> bool:
    return (folder / "metrics.jsonl").is_file()


def _report_folder(plan: SweepPlan) -> Path:
    return plan.out / "report"


class _Runner:
    """Runs one recipe after the other. A failed run is recorded, and the next one begins.

    Runs that another process is working on come last. A run that a signal or run.max_hours ends is the last one.
    trials: how many trials the sweep has.
    """

    def __init__(self, executor: Executor, stop: StopRequests, trials: int) -> None:
        self.failed: list[str] = []
        self.executor = executor
        self._stop = stop
        self._cache = ReadCache()
        self._trials, self._tried = trials, 0

    def run(self, recipes: Mapping[Path, Recipe]) -> None:
        self._run_all(recipes, {folder: f"run {n} of {len(recipes)}" for n, folder in enumerate(recipes, 1)})

    def try_out(self, recipes: Mapping[Path, Recipe]) -> None:
        first = self._tried + 1
        self._tried += len(recipes)
        self._run_all(recipes, {folder: f"trial {n} of {self._trials}" for n, folder in enumerate(recipes, first)})

    def _run_all(self, recipes: Mapping[Path, Recipe], titles: Mapping[Path, str]) -> None:
        def attempt(folder: Path, wait: bool) -> None:
            say(f"{titles[folder]}: {folder}", "bold")
            self._run(recipes[folder], folder, wait)

        run_each_when_free(recipes, attempt)

    def _run(self, recipe: Recipe, folder: Path, wait: bool) -> None:
        self._stop.check(self.executor, recipe.run.max_hours, f"stopped before {folder}")
        try:
            run(with_dir(recipe, folder), self._cache, self.executor, wait=wait, stop=self._stop)
        except StoppedError:
            raise
        except RunInUseError as error:
            if not wait:
                raise
            self.failed.append(str(error))
        except RunError as error:
            warn(f"{folder}: {error}")
            self.failed.append(f"{folder}: {error}")
        except UserError as error:
            raise UserError(f"{folder}: {error}") from error


def _best(members: list[Cell], plan: SweepPlan, choose: Choose, runner: _Runner) -> list[Cell]:
    """The cell with the best trial, or no cell if every trial failed. A case of one cell needs no trial."""
    if len(members) == 1:
        return members
    trials = {cell: plan.out / "trials" / cell.name for cell in members}
    recipes = {cell: plan.trial(cell) for cell in members}
    runner.try_out({trials[cell]: recipe for cell, recipe in recipes.items()})
    outcomes = {
        cell: runner.executor.on_first(lambda folder=folder: _outcome(folder, choose.by))  # type: ignore[misc]
        for cell, folder in trials.items()
    }
    values = {cell: value for cell, value in outcomes.items() if value is not None}
    if not values:
        return []
    best = (min if lower_is_better(choose.by) else max)(values, key=lambda cell: values[cell])
    say(f"best of {len(members)} trials: {best.name}, {choose.by} {values[best]:.4f}", "bold")
    seed, folder = next(iter(plan.folders(best).items()))
    if _begins(recipes[best], plan.load(best, {"run.seed": seed})):
        runner.executor.on_first(lambda: _copy_run(trials[best], folder))
    return [best]


def _begins(trial: Recipe, run: Recipe) -> bool:
    """Whether the rounds and evaluations of a trial are the first of the run's, so that the run can go on from them."""
    rounds, total = trial.federation.rounds, run.federation.rounds
    as_long = replace(trial, federation=replace(trial.federation, rounds=total))
    if as_long != run or run.run.resume == "never":
        return False
    if rounds == total:
        return True
    depends = run.load_algorithm().depends_on_total() or run.privacy is not None  # the noise is for all rounds
    return rounds < total and not depends and rounds % run.eval.every == 0


def _copy_run(trial: Path, folder: Path) -> None:
    """Copies a finished trial to the run folder `folder`, unless there is a run."""
    if not folder.exists():
        with replaced_folder(folder) as copy:
            shutil.copytree(trial, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns(LOCK, LEASE))
            saved = copy / "recipe.yaml"
            saved.write_text(with_dir(load_recipe(saved), folder).yaml(), encoding="utf-8")


def _outcome(folder: Path, by: str) -> float | None:
    """The best value of `by` in a finished trial; None for one that failed or never had a finite value."""
    if not (folder / "result.json").is_file():
        return None
    try:
        trial = load_run(folder)
    except UserError as error:
        warn(f"left out: {error}")
        return None
    if by not in trial.result["final"]:
        raise UserError(f"choose.by: found '{by}', expected one of {', '.join(trial.result['final'])}")
    return trial.best_score(by)


def _write_trials(out: Path, choose: Choose, tried: Sequence[Cell]) -> None:
    """The table of all trials, so that a choice can be judged by who reads its result."""
    values = {cell: _outcome(out / "trials" / cell.name, choose.by) for cell in tried}
    rows = [
        (cell.case, cell.values, "failed" if value is None else f"{value:.4f}")
        for cell, value in values.items()
        if (out / "trials" / cell.name).is_dir()
    ]
    table = markdown_table(("case", "cell", choose.by), rows, words=("case", "cell"))
    replace_text(out / "trials.md", f"Best {choose.by} of {choose.rounds or 'all'} rounds.\n\n{table}")
