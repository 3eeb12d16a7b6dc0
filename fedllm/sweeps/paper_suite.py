"""The papers' tables in one command: a recipe per task, run one after the other, and one table of their scores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedllm.common.console import console, say, warn
from fedllm.common.errors import RunError, UserError
from fedllm.config.recipe import Recipe
from fedllm.experiment.build import with_dir
from fedllm.experiment.launch import executor_for
from fedllm.experiment.run import RunResult, run
from fedllm.experiment.run_lock import run_each_when_free
from fedllm.experiment.stopping import stop_requests
from fedllm.federation.executor import Executor
from fedllm.reporting.score_table import SCORES_FILE, Beside, ScoreTable
from fedllm.sweeps.suite_plan import default_model, plan_suite


def run_suite(
    name: str,
    model: str | None = None,
    algorithm: str | None = None,
    overrides: Sequence[str] = (),
    *,
    recipes: Path = Path("recipes"),
    out: Path = Path("runs"),
    beside: Path | None = None,
    executor: Executor | None = None,
) -> bool:
    """Runs every task of a suite, prints the table of their scores and writes it to `out`; whether all tasks finished.

    model: of Suite.models; None: the first that can be had, which is said. algorithm: None for the recipes' own.
    overrides: "section.key=value", for every run. Runs are in out/<recipe>-s<seed>. An interrupted one is resumed, a
    finished one is not run again, and one that another process is at work on comes last. A task that cannot be run is
    named, and the others go on. beside: a CSV of scores for a column of their own; None: the paper's,
    where recipes/paper/<suite>_<model>_<algorithm>.csv holds them. executor: see run.
    Raises UserError for mistakes in what was given, before anything runs.
    """
    plan = plan_suite(name, model, algorithm, overrides, recipes=recipes)
    executor = executor or executor_for(plan.first.run)
    if model is None:
        chosen = executor.on_first(lambda: default_model(name, overrides, recipes=recipes))
        plan = plan_suite(name, chosen, algorithm, overrides, recipes=recipes)
    if plan.unlisted:
        said = "it runs with its own defaults where no override says more"
        warn(f"{plan.unlisted} lists no settings for {plan.algorithm}: {said}")
    paper = recipes / "paper" / f"{name}_{plan.model}_{plan.algorithm}.csv"
    other = beside or (paper if paper.is_file() else None)
    column = Beside.read(other, plan.tasks) if other else None
    found = _run_all(plan.recipes, out, executor)
    results = [found[recipe.name].result if recipe.name in found else None for recipe in plan.recipes]
    table = ScoreTable(_caption(plan.model, plan.first), plan.tasks, results, column)
    folder = out / f"report-{name}-{plan.model}-{plan.algorithm}-s{plan.first.run.seed}"
    executor.on_first(lambda: table.write(folder))
    console.print(table.rich())
    say(f"written to {folder}: scores.md, {SCORES_FILE}")
    return all(result is not None for result in results)


def _run_all(recipes: Sequence[Recipe], out: Path, executor: Executor) -> dict[str, RunResult]:
    """The results of the recipes that could be run, by name; says why of the others."""
    found: dict[str, RunResult] = {}

    def attempt(recipe: Recipe, wait: bool) -> None:
        stop.check(executor, recipe.run.max_hours, f"stopped before {recipe.name}")
        say(f"{recipes.index(recipe) + 1} of {len(recipes)}: {recipe.name}", "bold")
        folder = out / f"{recipe.name}-s{recipe.run.seed}"
        found[recipe.name] = run(with_dir(recipe, folder), executor=executor, wait=wait, stop=stop)

    def failed(recipe: Recipe, error: UserError | RunError) -> None:
        warn(f"{recipe.name} cannot be run: {error}")

    with stop_requests(executor.size) as stop:
        run_each_when_free(recipes, attempt, failed)
    return found


def _caption(model: str, recipe: Recipe) -> str:
    partition, sampled = recipe.partition, recipe.federation.clients_per_round
    split = f"{partition.scheme} {partition.alpha:g} over {partition.clients} clients, {sampled} per round"
    return f"{recipe.algorithm['name']}, {model}, {split}, seed {recipe.run.seed}"
