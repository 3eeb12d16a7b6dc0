"""The papers' tables in one command: a recipe a task, run one after the other, and one table of their scores."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from fedllm.algorithms import algorithm_class
from fedllm.assemble import with_dir
from fedllm.console import console, say, warn
from fedllm.crew import Crew
from fedllm.errors import RunError, UserError
from fedllm.files import replace_text
from fedllm.layers import read_layers
from fedllm.look import metric_name
from fedllm.models import check_available
from fedllm.processes import StoppedError
from fedllm.recipe import Recipe, load_recipe
from fedllm.results import printable
from fedllm.run import RunResult, run
from fedllm.settings import nearest
from fedllm.summary import in_markdown, markdown_table
from fedllm.turns import BusyError, in_turn

_NONE = "-"
_SCORES = "scores.csv"


@dataclass(frozen=True)
class Beside:
    """Scores from elsewhere: the heading of their column, and each task's cell as it is written there."""

    heading: str
    cells: dict[str, str]

    @classmethod
    def read(cls, path: Path, tasks: Sequence[str]) -> Beside:
        """The columns `task` and `final` of a CSV: a scores.csv of this module, or one typed off a paper, that names
        itself in a column `source` if it has one. Raises UserError."""
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                rows = list(csv.DictReader(file))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise UserError(f"{path}: scores to show beside ours cannot be read: {error}") from error
        if not rows or not {"task", "final"} <= rows[0].keys():
            found = ", ".join(map(str, rows[0])) if rows else "no rows"
            raise UserError(f"{path}: found {found}, expected a CSV with the columns task and final, a row a task")
        known = [*tasks, "average"]
        cells: dict[str, str] = {}
        for row in rows:
            task = row["task"] or ""
            if task not in known:
                raise UserError(f"{path}: task: found '{task}'{nearest(task, known)}, expected {', '.join(known)}")
            if task in cells:
                raise UserError(f"{path}: task: found '{task}' twice, expected a row a task")
            cells[task] = printable((row["final"] or "").strip()) or _NONE
        heading = rows[0].get("source") or (path.parent.name if path.name == _SCORES else path.stem)
        return cls(printable(heading.strip()), cells)


@dataclass(frozen=True)
class Suite:
    """tasks and models: the recipes are <task>_<model>.yaml. Of the models, the first that can be had is the default;
    the last is one that needs no network."""

    tasks: tuple[str, ...]
    models: tuple[str, ...]


SUITES = {
    "glue": Suite(("cola", "rte", "sst2", "qqp", "mrpc", "qnli", "mnli"), ("roberta", "minilm")),
    "20news": Suite(("20news",), ("gpt2", "minilm")),
}


def run_suite(
    name: str,
    model: str | None = None,
    algorithm: str | None = None,
    overrides: Sequence[str] = (),
    *,
    recipes: Path = Path("recipes"),
    out: Path = Path("runs"),
    beside: Path | None = None,
    crew: Crew | None = None,
) -> bool:
    """Runs every task of a suite, prints the table of their scores and writes it to `out`; whether all tasks finished.

    model: of Suite.models; None: the first that can be had, which is said. algorithm: None for the recipes' own.
    overrides: "section.key=value", for every run. Runs live in out/<recipe>-s<seed>, are resumed where they were
    interrupted, and kept where they are finished; those that another process is at work on come last. A task that
    cannot be run is named, and the others go on. beside: a CSV of scores for a column of their own; None: the paper's,
    where recipes/paper/<suite>_<model>_<algorithm>.csv holds them. crew: see run.
    Raises UserError for mistakes in what was given, before anything runs.
    """
    suite = SUITES[name]
    chosen = model or _default_model(suite, recipes, overrides)
    paths = [_recipe_file(recipes, suite, task, chosen) for task in suite.tasks]
    wanted = [*([f"algorithm={algorithm}"] if algorithm else []), *overrides]
    loaded = [load_recipe(path, wanted) for path in paths]
    _check(paths, loaded)
    used = loaded[0].algorithm["name"]
    paper = recipes / "paper" / f"{name}_{chosen}_{used}.csv"
    other = beside or (paper if paper.is_file() else None)
    column = Beside.read(other, suite.tasks) if other else None
    found: dict[str, RunResult] = {}

    def attempt(recipe: Recipe, wait: bool) -> None:
        say(f"{loaded.index(recipe) + 1} of {len(loaded)}: {recipe.name}", "bold")
        try:
            found[recipe.name] = run(with_dir(recipe, out / f"{recipe.name}-s{recipe.run.seed}"), crew=crew, wait=wait)
        except StoppedError:
            raise
        except (UserError, RunError) as error:
            if isinstance(error, BusyError) and not wait:
                raise
            warn(f"{recipe.name} cannot be run: {error}")

    in_turn(loaded, attempt)
    results = [found.get(recipe.name) for recipe in loaded]
    table = ScoreTable(_caption(chosen, loaded[0]), suite.tasks, results, column)
    folder = out / f"report-{name}-{chosen}-{used}-s{loaded[0].run.seed}"
    table.write(folder)
    console.print(table.rich())
    say(f"written to {folder}: scores.md, {_SCORES}")
    return all(result is not None for result in results)


@dataclass(frozen=True)
class ScoreTable:
    """The scores of one algorithm, a line a task, None where a task has none; scores are given times 100. beside:
    others, in a column of their own."""

    caption: str
    tasks: Sequence[str]
    results: Sequence[RunResult | None]
    beside: Beside | None = None

    @property
    def headings(self) -> tuple[str, ...]:
        """Of the columns."""
        others = (self.beside.heading,) if self.beside else ()
        return ("task", "metric", "final", *others, "best", "of round", "rounds", "MB sent", "seconds")

    def lines(self) -> list[tuple[str, ...]]:
        """A line a task."""
        return [self._wide(_line(task, result)) for task, result in zip(self.tasks, self.results, strict=True)]

    def average(self) -> list[tuple[str, ...]]:
        """The line of the headline metrics' average over several tasks, if every one of them has its scores."""
        done = [result.result for result in self.results if result is not None]
        if len(self.tasks) == 1 or len(done) < len(self.tasks):
            return []
        final = [result["final"][result["primary"]] for result in done]
        best = [result["best"].get(result["primary"], {}).get("value") for result in done]
        scores = [_score(None if None in column else fmean(column)) for column in (final, best)]
        return [self._wide(("average", "headline metrics", *scores, *[""] * 4))]

    def _wide(self, line: tuple[str, ...]) -> tuple[str, ...]:
        """The line with the other scores' cell after its final ones."""
        cell = (self.beside.cells.get(line[0], _NONE),) if self.beside else ()
        return (*line[:3], *cell, *line[3:])

    def rich(self) -> Table:
        """For the terminal."""
        table = Table(*map(escape, self.headings), title=self.caption, title_justify="left", box=SIMPLE_HEAD)
        for column in table.columns[2:]:
            column.justify = "right"
        for line in self.lines():
            table.add_row(*map(escape, line))
        for line in self.average():
            table.add_section()
            table.add_row(*line, style="bold")
        return table

    def write(self, folder: Path) -> None:
        """scores.md and scores.csv in `folder`."""
        lines = [*self.lines(), *self.average()]
        rule = tuple("---" for _ in self.headings)
        markdown = markdown_table([self.headings, rule, *lines])
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.headings, *lines])
        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace_text(folder / "scores.md", f"{in_markdown(self.caption)}\n\n{markdown}")
            replace_text(folder / _SCORES, text.getvalue())
        except OSError as error:
            raise RunError(f"{folder} could not be written: {error}") from error


def _line(task: str, done: RunResult | None) -> tuple[str, ...]:
    if done is None:
        return (task, *[_NONE] * 7)
    result = done.result
    names = [name for name in result["final"] if name != "eval_loss"]
    best = result["best"].get(result["primary"], {})
    return (
        task,
        " / ".join(map(metric_name, names)),
        " / ".join(_score(result["final"][name]) for name in names),
        _score(best.get("value")),
        str(best.get("round", _NONE)),
        str(result["rounds"]),
        f"{(result['totals']['bytes_up'] + result['totals']['bytes_down']) / 1e6:,.0f}",
        f"{result['totals']['seconds']:,.0f}",
    )


def _score(value: float | None) -> str:
    return _NONE if value is None else f"{100 * value:.2f}"


def _caption(model: str, recipe: Recipe) -> str:
    share = recipe.partition
    split = (
        f"{share.scheme} {share.alpha:g} over {share.clients} clients, {recipe.federation.clients_per_round} a round"
    )
    return f"{recipe.algorithm['name']}, {model}, {split}, seed {recipe.run.seed}"


def _default_model(suite: Suite, recipes: Path, overrides: Sequence[str]) -> str:
    """The first model of the suite that can be had here, or else its last; says which, and why."""
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
    if not recipes.is_dir():
        raise UserError(f"{recipes}: no such folder; start in a clone of fedllm, or name the recipes' with --recipes")
    path = recipes / f"{task}_{model}.yaml"
    if model not in suite.models and not path.is_file():
        raise UserError(
            f"model: found '{model}'{nearest(model, list(suite.models))}, expected one of {', '.join(suite.models)}, "
            f"or one that has a recipe {path}"
        )
    return path


def _check(paths: Sequence[Path], recipes: Sequence[Recipe]) -> None:
    """Refuses what cannot be meant for every run, and says where an algorithm has no settings of its own."""
    if recipes[0].run.dir is not None:
        raise UserError(f"run.dir: found {recipes[0].run.dir}, but every run of a suite has its own folder; give --out")
    algorithm = recipes[0].algorithm["name"]
    listed = map(algorithm_class, read_layers(paths[0]).get("algorithms", {}))
    if algorithm_class(algorithm) not in listed:
        warn(f"{paths[0]} lists no settings for {algorithm}: it runs with its own defaults where no override says more")
