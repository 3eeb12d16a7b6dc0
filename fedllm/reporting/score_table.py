"""A table of one algorithm's scores on several tasks, with a paper's scores in a column beside them."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from fedllm.common.errors import RunError, UserError
from fedllm.common.files import replace_text
from fedllm.common.schema import nearest
from fedllm.reporting.text_tables import in_markdown, markdown_table
from fedllm.results.names import metric_name, printable

_NONE = "-"
SCORES_FILE = "scores.csv"


@dataclass(frozen=True)
class Beside:
    """Scores of another source: the heading of their column, and the text of each task's cell."""

    heading: str
    cells: dict[str, str]

    @classmethod
    def read(cls, path: Path, tasks: Sequence[str]) -> Beside:
        """The columns `task` and `final` of a CSV file: a scores.csv of this module, or a paper's numbers. The first
        cell of a column `source` becomes the heading. Raises UserError."""
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                rows = list(csv.DictReader(file))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise UserError(f"{path}: scores to show beside ours cannot be read: {error}") from error
        if not rows or not {"task", "final"} <= rows[0].keys():
            found = ", ".join(map(str, rows[0])) if rows else "no rows"
            raise UserError(f"{path}: found {found}, expected a CSV with the columns task and final, one row each")
        known = [*tasks, "average"]
        cells: dict[str, str] = {}
        for row in rows:
            task = row["task"] or ""
            if task not in known:
                raise UserError(f"{path}: task: found '{task}'{nearest(task, known)}, expected {', '.join(known)}")
            if task in cells:
                raise UserError(f"{path}: task: found '{task}' twice, expected one row per task")
            cells[task] = printable((row["final"] or "").strip()) or _NONE
        heading = rows[0].get("source") or (path.parent.name if path.name == SCORES_FILE else path.stem)
        return cls(printable(heading.strip()), cells)


@dataclass(frozen=True)
class ScoreTable:
    """The scores of one algorithm times 100, one line per task.

    results: result.json of each task's run as a dict, None where a task has no run. beside: another source's scores.
    """

    caption: str
    tasks: Sequence[str]
    results: Sequence[dict[str, Any] | None]
    beside: Beside | None = None

    @property
    def headings(self) -> tuple[str, ...]:
        """The headings of the columns."""
        others = (self.beside.heading,) if self.beside else ()
        return ("task", "metric", "final", *others, "best", "of round", "rounds", "MB sent", "seconds")

    def lines(self) -> list[tuple[str, ...]]:
        """One line per task."""
        return [self._wide(_line(task, result)) for task, result in zip(self.tasks, self.results, strict=True)]

    def average(self) -> list[tuple[str, ...]]:
        """A line with the average of the headline metrics, if there are several tasks and each has its scores."""
        done = [result for result in self.results if result is not None]
        if len(self.tasks) == 1 or len(done) < len(self.tasks):
            return []
        final = [result["final"][result["primary"]] for result in done]
        best = [result["best"].get(result["primary"], {}).get("value") for result in done]
        scores = [_score(None if None in column else fmean(column)) for column in (final, best)]
        return [self._wide(("average", "headline metrics", *scores, *[""] * 4))]

    def _wide(self, line: tuple[str, ...]) -> tuple[str, ...]:
        """The line with the other source's cell after the final scores."""
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
        markdown = markdown_table(self.headings, lines, words=self.headings[:2])
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.headings, *lines])
        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace_text(folder / "scores.md", f"{in_markdown(self.caption)}\n\n{markdown}")
            replace_text(folder / SCORES_FILE, text.getvalue())
        except OSError as error:
            raise RunError(f"{folder} could not be written: {error}") from error


def _line(task: str, result: dict[str, Any] | None) -> tuple[str, ...]:
    if result is None:
        return (task, *[_NONE] * 7)
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
