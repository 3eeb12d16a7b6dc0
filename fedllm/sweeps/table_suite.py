"""A paper's table in one command: every method on every task, then our means beside the paper's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from fedllm.common.console import console, say, warn
from fedllm.common.errors import RunError, UserError
from fedllm.common.hub import NotFoundError
from fedllm.config.recipe import Recipe
from fedllm.experiment.build import ReadCache, with_dir
from fedllm.experiment.launch import executor_for
from fedllm.experiment.resume import check_folder
from fedllm.experiment.run import run
from fedllm.experiment.run_lock import run_each_when_free, run_lock
from fedllm.experiment.session import ended_by
from fedllm.experiment.stopping import stop_requests
from fedllm.federation.executor import Executor
from fedllm.models.sources import check_available
from fedllm.reporting.paper_table import (
    SCORE,
    TABLE_FILES,
    PaperTableReport,
    Printed,
    read_printed,
)
from fedllm.reporting.quantities import target_words
from fedllm.reporting.score_table import Beside
from fedllm.results.reader import load_run
from fedllm.results.run_record import RunRecord
from fedllm.sweeps.table_plan import Cell, TablePlan


def run_table(plan: TablePlan, executor: Executor | None = None) -> bool:
    """Runs the wanted cells of a table, then prints the table and writes it to plan.out; whether every run succeeded.

    Finished runs are skipped and interrupted ones continue; runs that another process is at work on come last. The
    table also has the finished runs of the other cells that are in the folder. A task whose data cannot be had is
    named and left out; it counts as no failure, unless it leaves no task. A run that fails is named, and the others
    go on. Raises UserError, before anything runs, if the model cannot be had.
    """
    executor = executor or executor_for(plan.first.run)
    executor.on_first(lambda: _check(plan))
    failed = _run_all(plan, executor)
    executor.on_first(lambda: _write(plan))
    return not failed


def _check(plan: TablePlan) -> None:
    """Raises UserError if the paper's numbers cannot be read or the model cannot be had."""
    read_paper(plan)
    try:
        check_available(plan.first.model.name, plan.first.run.local_hub)
    except UserError as error:
        advice = (
            ""
            if plan.model == plan.table.small_model
            else f"\nThe same table with a small model for a CPU: fedllm suite {plan.name} --small"
        )
        raise UserError(f"{plan.name}: {error}{advice}") from error


def read_paper(plan: TablePlan) -> Printed:
    """The paper's cells. {} where the folder of the recipes has none. Raises UserError."""
    table = plan.table
    path = plan.printed / f"{plan.name.replace('-', '_')}.csv"
    if path.is_file():
        return read_printed(path, table.quantities)
    paths = {method: plan.printed / f"glue_{table.model}_{method}.csv" for method in table.methods}
    columns = {method: Beside.read(path, table.tasks) for method, path in paths.items() if path.is_file()}
    return {(method, task, SCORE): cell for method, column in columns.items() for task, cell in column.cells.items()}


def _run_all(plan: TablePlan, executor: Executor) -> bool:
    """Runs every run of the plan; whether any failed, or none could be made."""
    runs = plan.runs()
    numbers = {folder: number for number, folder in enumerate(runs, 1)}
    without_data: set[str] = set()
    failed: list[Path] = []
    cache = ReadCache()

    def attempt(folder: Path, wait: bool) -> None:
        (_, task), recipe = runs[folder]
        if task in without_data:
            return
        stop.check(executor, recipe.run.max_hours, f"stopped before {folder}")
        say(f"{numbers[folder]} of {len(runs)}: {folder}", "bold")
        run(with_dir(recipe, folder), cache, executor, wait=wait, stop=stop)

    def note(folder: Path, error: UserError | RunError) -> None:
        (_, task), _ = runs[folder]
        if executor.on_first(lambda: isinstance(error, NotFoundError)):
            without_data.add(task)
            warn(f"{task} is skipped: {error}")
        else:
            failed.append(folder)
            warn(f"{folder} cannot be run: {error}")

    with stop_requests(executor.size) as stop:
        run_each_when_free(runs, attempt, note)
    return bool(failed) or without_data == {task for _, task in plan.wanted}


def _write(plan: TablePlan) -> None:
    """Prints the table and writes it."""
    table = plan.table
    report = PaperTableReport(
        caption=f"{table.title}: {plan.model} ({plan.first.model.name})",
        methods=table.methods,
        tasks=plan.tasks,
        quantities=table.quantities,
        runs={cell: [*_finished(plan, cell)] for cell in plan.recipes},
        printed=read_paper(plan),
        averaged=table.tasks if table.average else (),
        notes=[*_notes(plan)],
    )
    with run_lock(plan.out / "report", wait=True):
        report.write(plan.out / "report")
    console.print(report.rich())
    for note in report.all_notes():
        say(note)
    say(f"written to {plan.out / 'report'}: {', '.join(TABLE_FILES)}")


def _finished(plan: TablePlan, cell: Cell) -> Iterator[RunRecord]:
    """The finished runs of a cell in the order of their seeds. Those of another recipe are named and left out."""
    stem = f"{plan.stem(cell)}-s"
    seeds = (path.name.removeprefix(stem) for path in plan.out.glob(f"{stem}*") if (path / "result.json").is_file())
    for seed in sorted(int(seed) for seed in seeds if seed.isdecimal()):
        folder, recipe = plan.folder(cell, seed), plan.seeded(cell, seed)
        recipe = replace(recipe, run=replace(recipe.run, resume="auto"))  # "never" is for the runs that begin
        try:
            check_folder(folder, recipe)
            found = load_run(folder)
        except UserError as error:
            warn(f"left out: {error}")
            continue
        if ended_by(recipe, recipe.eval.metric or found.primary, found.rounds):
            yield found
        else:
            warn(f"left out: {folder} has {len(found.rounds)} rounds, expected {recipe.federation.rounds}")


def _notes(plan: TablePlan) -> Iterator[str]:
    """What a reader must know to compare the two lines of a method."""
    table = plan.table
    federations: dict[str, list[str]] = {}
    for task, recipe in {task: recipe for (_, task), recipe in plan.recipes.items()}.items():
        federations.setdefault(_federation(recipe), []).append(task)
    said = "; ".join(f"{', '.join(tasks)}: {federation}" for federation, tasks in federations.items())
    yield f"Recipes <task>_{table.models[plan.model]}. {said}."
    yield f"The paper's numbers: {table.title}, means of {table.trials} trials.{' ' * bool(table.remark)}{table.remark}"
    if plan.model == table.small_model:
        yield f"The small model and federation are not those of {table.model}; compare the order of methods."
    if table.to_target:
        targets = {task: plan.recipes[method, task].eval.target for method, task in plan.recipes}
        said = ", ".join(f"{task} {target_words(target)}" for task, target in targets.items() if target)
        yield f"Rounds and simulated minutes to the target: {said}."
        yield "The time of our local steps is measured where they ran, unless costs.seconds_per_step says otherwise."


def _federation(recipe: Recipe) -> str:
    share, work, federation, every = recipe.partition, recipe.local, recipe.federation, recipe.eval.every
    amount, unit = (work.steps, "step") if work.steps else (work.epochs or 1, "epoch")
    local = f"{amount} local {unit}{'s' * (amount != 1)}"
    return (
        f"{share.scheme} {share.alpha:g} over {share.clients} clients, {federation.clients_per_round} per round, "
        f"{local} of batch {work.batch_size}, at most {federation.rounds} rounds, "
        f"evaluated every {f'{every} rounds' if every > 1 else 'round'}"
    )
