"""A paper's table of methods and tasks: our runs' means beside the numbers that the paper prints."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from fedllm.common.console import console, table_width
from fedllm.common.errors import RunError, UserError
from fedllm.common.files import replace_text
from fedllm.reporting.groups import Group
from fedllm.reporting.quantities import NONE, ROUNDS_TO_TARGET, Quantity, ToTarget, costs_to_target, mean_and_deviation
from fedllm.reporting.text_tables import in_markdown, markdown_table
from fedllm.results.format import is_number
from fedllm.results.names import metric_name, printable
from fedllm.results.run_record import RunRecord

SCORE, LOSS, ROUNDS, MINUTES, VECTORS, GIB = "score", "train loss", "rounds", "minutes", "vectors", "GiB"
AVERAGE = "average"
TABLE_FILES = ("table.md", "table.csv")
_ROUNDING = 0.02  # a printed average that is further from the mean of its row is not that mean

_LOSS_NOTE = (
    "Our training losses are means over the local steps of the last round, without weight decay; the paper does not "
    "say over what its own are means."
)

Place = tuple[str, str, str]  # method, task, quantity
Printed = Mapping[Place, str]


def read_printed(path: Path, quantities: Sequence[str]) -> dict[Place, str]:
    """The cells of a CSV file with the columns task and algorithm, and some of `quantities`. Raises UserError."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: the paper's numbers cannot be read: {error}") from error
    if not rows or not {"task", "algorithm"} <= rows[0].keys():
        found = ", ".join(map(str, rows[0])) if rows else "no rows"
        raise UserError(f"{path}: found {found}, expected a CSV with the columns task, algorithm, {quantities[0]}")
    return {
        (row["algorithm"], row["task"], quantity): printable(row[quantity])
        for row in rows
        for quantity in quantities
        if row.get(quantity)
    }


@dataclass(frozen=True)
class PaperTableReport:
    """Methods by tasks, two lines per method: ours, and the paper's.

    methods: stable name -> the paper's name. quantities: SCORE and LOSS, or costs of reaching the target. runs: the
    finished runs of a method and a task, one per seed. averaged: the tasks of a last column with the average score; ()
    for none.
    """

    caption: str
    methods: Mapping[str, str]
    tasks: Sequence[str]
    quantities: Sequence[str]
    runs: Mapping[tuple[str, str], Sequence[RunRecord]]
    printed: Printed
    averaged: Sequence[str] = ()
    notes: Sequence[str] = field(default=())

    @property
    def headings(self) -> tuple[str, ...]:
        """The headings of the columns."""
        several = len(self.quantities) > 1
        columns = [f"{task} {quantity}" if several else task for task, quantity in self._columns()]
        return ("method", "whose", *columns)

    def lines(self) -> list[tuple[str, ...]]:
        """Two lines per method."""
        return [
            (name, whose, *(cell(method, task, quantity) for task, quantity in self._columns()))
            for method, name in self.methods.items()
            for whose, cell in (("ours", self.ours), ("paper", self._theirs))
        ]

    def ours(self, method: str, task: str, quantity: str) -> str:
        """The mean and standard deviation over the seeds that are there; a dash where there is none."""
        if task == AVERAGE:
            averages = self._averages(method)
            return mean_and_deviation(averages, 2) if averages else NONE
        runs = self.runs.get((method, task), ())
        return _QUANTITIES[quantity].cell(Group(task, method, [*runs])) if runs else NONE

    def all_notes(self) -> list[str]:
        """The notes, with those that follow from the runs and from the printed numbers."""
        seeds = {tuple(run.seed for run in runs) for runs in self.runs.values() if runs}
        said = [f"Ours: mean ± standard deviation; {_seeds_text(seeds)}."] if seeds else []
        return [*said, *self._metrics(), *self.notes, *self._wrong_averages()]

    def rich(self) -> Table:
        """For the terminal: the table, or where that is too wide a line per task and method, of the tasks with runs;
        where that is too wide as well, each task on a line of its own above its methods."""
        for form in self._forms():
            table = self._rich(*form)
            if table_width(table) <= console.width:
                break
        return table

    def _forms(self) -> Iterator[tuple[Sequence[str], list[list[tuple[str, ...]]], int]]:
        """Headings, groups of lines, and the columns of words at the left, the widest first."""
        lines = self.lines()
        yield self.headings, [lines[row : row + 2] for row in range(0, len(lines), 2)], 2
        columns = [name for quantity in self.quantities for name in (quantity, "paper")]
        tasks = {task: [*self._task_lines(task)] for task in self._tasks_with_runs()}
        yield ("task", "method", *columns), [*tasks.values()], 2
        below = [[(task, *("" for _ in columns)), *(line[1:] for line in lines)] for task, lines in tasks.items()]
        yield ("method", *columns), below, 1

    def _tasks_with_runs(self) -> list[str]:
        found = {task for (_, task), runs in self.runs.items() if runs}
        return [*(task for task in self.tasks if task in found), *([AVERAGE] if self.averaged and found else [])]

    def _task_lines(self, task: str) -> Iterator[tuple[str, ...]]:
        for method, name in self.methods.items():
            pairs = ((self.ours(method, task, one), self._theirs(method, task, one)) for one in self.quantities)
            yield (task, name, *itertools.chain.from_iterable(pairs))

    def _rich(self, headings: Sequence[str], groups: list[list[tuple[str, ...]]], words: int) -> Table:
        table = Table(*map(escape, headings), title=escape(self.caption), title_justify="left", box=SIMPLE_HEAD)
        for column in table.columns[words:]:
            column.justify = "right"
        for group in groups:
            table.add_section()
            for line in group:
                table.add_row(*map(escape, line))
        return table

    def write(self, folder: Path) -> None:
        """TABLE_FILES in `folder`: the table as Markdown with its notes, and a CSV file with a row per cell."""
        table = markdown_table(self.headings, self.lines(), words=self.headings[:2])
        notes = "".join(f"\n- {in_markdown(note)}" for note in self.all_notes())
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(self._csv_rows())
        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace_text(folder / TABLE_FILES[0], f"{in_markdown(self.caption)}\n\n{table}{notes}\n")
            replace_text(folder / TABLE_FILES[1], text.getvalue())
        except OSError as error:
            raise RunError(f"{folder} could not be written: {error}") from error

    def _columns(self) -> list[tuple[str, str]]:
        columns = [(task, quantity) for task in self.tasks for quantity in self.quantities]
        return [*columns, (AVERAGE, SCORE)] if self.averaged else columns

    def _theirs(self, method: str, task: str, quantity: str) -> str:
        return self.printed.get((method, task, quantity), NONE)

    def _averages(self, method: str) -> list[float]:
        """The average score of each seed that has a score on every averaged task."""
        scores = [{run.seed: _score(run) for run in self.runs.get((method, task), ())} for task in self.averaged]
        seeds = sorted(set.intersection(*map(set, scores)))
        rows = [[score for task in scores if (score := task[seed]) is not None] for seed in seeds]
        return [fmean(row) for row in rows if len(row) == len(self.averaged)]

    def _csv_rows(self) -> Iterator[tuple[str, ...]]:
        yield ("method", "task", "quantity", "ours", "paper", "seeds")
        for method in self.methods:
            for task, quantity in self._columns():
                seeds = " ".join(str(run.seed) for run in self.runs.get((method, task), ()))
                cells = (self.ours(method, task, quantity), self._theirs(method, task, quantity))
                yield (method, task, quantity, *cells, seeds)

    def _metrics(self) -> list[str]:
        """Notes on what the scores and losses are; [] for a table without scores or runs."""
        tasks: dict[str, list[str]] = {}
        for task in self.tasks if SCORE in self.quantities else ():
            if found := [run.primary for method in self.methods for run in self.runs.get((method, task), ())]:
                tasks.setdefault(metric_name(found[0]), []).append(task)
        said = "; ".join(f"{metric}: {', '.join(members)}" for metric, members in tasks.items())
        scores = [f"Our scores are of the last round, on the validation split, times 100. {said}."] if said else []
        return [*scores, *([_LOSS_NOTE] if said and LOSS in self.quantities else [])]

    def _wrong_averages(self) -> list[str]:
        """A note on the printed averages that are not the means of their rows; [] where all are."""
        wrong: list[str] = []
        for method, name in self.methods.items() if self.averaged else ():
            cells = [self._theirs(method, task, SCORE) for task in (*self.averaged, AVERAGE)]
            *row, average = map(_mean_of, cells)
            mean = None if None in row else fmean(value for value in row if value is not None)
            if mean is not None and average is not None and abs(mean - average) > _ROUNDING:
                wrong.append(f"{name} {mean:.2f}")
        said = "Printed averages that are not the means of the printed rows; these means are"
        return [f"{said}: {', '.join(wrong)}."] if wrong else []


def _mean_of(cell: str) -> float | None:
    """The mean in a printed cell such as "56.12 ± 0.18"; None where it is no number."""
    try:
        return float(cell.partition("±")[0])
    except ValueError:
        return None


def _score(run: RunRecord) -> float | None:
    """The last value of the headline metric, times 100."""
    value = run.result["final"].get(run.primary)
    return 100 * value if is_number(value) else None


def _train_loss(run: RunRecord) -> float | None:
    """The training loss of the last round."""
    value = run.rounds[-1]["train_loss"] if run.rounds else None
    return value if is_number(value) else None


def _times(cost: ToTarget, decimals: int, factor: Callable[[RunRecord], float | None]) -> ToTarget:
    """The cost in other units; None where a run does not tell the factor."""

    def of(value: Callable[[RunRecord], float | None]) -> Callable[[RunRecord], float | None]:
        def product(run: RunRecord) -> float | None:
            found, scale = value(run), factor(run)
            return None if found is None or scale is None else found * scale

        return product

    return replace(cost, decimals=decimals, value=of(cost.value), whole=of(cost.whole))


def _gib(run: RunRecord) -> float | None:
    """GiB of a model-sized vector in float32. Older runs do not tell its size."""
    size = run.result.get("trainable_parameters")
    return 4 * size / 2**30 if is_number(size) else None


_, _SECONDS, _VECTORS = costs_to_target()
_QUANTITIES = {
    SCORE: Quantity(SCORE, SCORE, 2, _score),
    LOSS: Quantity(LOSS, LOSS, 3, _train_loss),
    ROUNDS: ROUNDS_TO_TARGET,
    MINUTES: _times(_SECONDS, 1, lambda run: 1 / 60),
    VECTORS: replace(_VECTORS, decimals=1),
    GIB: _times(_VECTORS, 2, _gib),
}


def _seeds_text(seeds: set[tuple[int, ...]]) -> str:
    if len(seeds) > 1:
        return f"the seeds of each cell are in {TABLE_FILES[1]}"
    (same,) = seeds
    return f"seed{'s' * (len(same) > 1)} {', '.join(map(str, same))}"
