"""The comparison of the groups of a data set as one table: for the terminal, Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fedllm.common.console import table_width
from fedllm.reporting.class_scores import class_quantities
from fedllm.reporting.client_scores import client_quantities
from fedllm.reporting.groups import Group, Target, legend
from fedllm.reporting.quantities import (
    COSTS,
    REJECTED,
    ROUNDS_TO_TARGET,
    SCORES,
    VECTORS,
    Quantity,
    ToTarget,
    best_groups,
    costs_to_target,
    rounds_to_target,
    target_words,
)
from fedllm.reporting.text_tables import in_markdown, latex_table, markdown_table
from fedllm.results.names import metric_name, printable, setting_text
from fedllm.tasks.base import lower_is_better

WORDS = ("run", "score")  # the columns that hold words, not numbers
_LONG = 8  # letters of a heading that stands on one line of a terminal


@dataclass(frozen=True)
class Summary:
    """The table of a data set, one row per group.

    task: the data set's name. caption: what all rows share. rows: as text. best: (row, column) of the best values.
    legend: the settings of numbered groups. note: which values are the best ones; "" if none are marked. numbers: as in
    the CSV file.
    """

    task: str
    caption: str
    headings: list[str]
    rows: list[tuple[str, ...]]
    best: frozenset[tuple[int, int]] = frozenset()
    legend: dict[str, str] = field(default_factory=dict)
    note: str = ""
    numbers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def title(self) -> str:
        """The data set and what all rows share."""
        return f"{self.task}; {self.caption}" if self.caption else self.task

    def tables(self, width: int) -> list[Table]:
        """The table for a terminal of this width, in as many parts as needed, each with the rows' names; and the
        legend."""
        parts: list[list[int]] = [[]]
        for column in range(1, len(self.headings)):
            if parts[-1] and table_width(self._table([0, *parts[-1], column])) > width:
                parts.append([])
            parts[-1].append(column)
        return [*(self._table([0, *part]) for part in parts), *([self._legend()] if self.legend else [])]

    def _table(self, columns: Sequence[int]) -> Table:
        table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
        for column in columns:
            heading = self.headings[column]
            if heading in WORDS:
                table.add_column(heading, max_width=36)
            else:
                at = " to " if " to " in heading else " "
                folded = heading.replace(at, f"\n{at.lstrip()}", 1) if len(heading) > _LONG else heading
                table.add_column(folded, justify="right", no_wrap=True)
        for index, row in enumerate(self.rows):
            styles = {column: "bold" if (index, column) in self.best else "" for column in columns}
            table.add_row(*(Text(row[column], style) for column, style in styles.items()))
        return table

    def _legend(self) -> Table:
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, settings in self.legend.items():
            table.add_row(Text(name), Text(settings))
        return table

    def markdown(self) -> str:
        """A Markdown table under its title, with the legend below."""
        below = [f"- {in_markdown(name)}: {in_markdown(settings)}\n" for name, settings in self.legend.items()]
        parts = [f"{in_markdown(self.title)}.\n", markdown_table(self.headings, self.rows, WORDS, bold=self.best)]
        parts += ["".join(below)] if below else []
        return "\n".join([*parts, *([f"{self.note}\n"] if self.note else [])])

    def latex(self) -> str:
        """A tabular for the booktabs package, with the legend as comments and below them the table."""
        above = [f"{name}: {settings}" for name, settings in self.legend.items()]
        comments = [f"{self.title}; needs \\usepackage{{booktabs}}", *above, *([self.note] if self.note else [])]
        return "".join(f"% {line}\n" for line in comments) + latex_table(
            self.headings, self.rows, WORDS, bold=self.best
        )


def csv_text(summaries: Sequence[Summary]) -> str:
    """The numbers of all data sets, unrounded: mean and sample standard deviation over seeds, empty where there is
    none."""
    rows = [row for summary in summaries for row in summary.numbers]
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


Column = tuple[str, Callable[[Group], str], Quantity | None]  # heading, cell, and the number that it shows
_RUN: Column = ("run", lambda group: group.label, None)


def summarise(groups: Sequence[Group], targets: Sequence[Target] = ()) -> Summary:
    """The table of the groups of one data set. Metric and target stand in the caption if all groups share them, else in
    a column. A column counts rejected uploads if there were any.

    targets: as for `report`. Those in metrics of other data sets have no column.
    """
    scores = {_score(group, targets) for group in groups}
    shared = len(scores) == 1
    columns: list[Column] = [
        _RUN,
        *([] if shared else [("score", lambda group: _score(group, targets), None)]),
        *map(_column, _rounds_columns(groups, targets)),
        *map(_column, SCORES),
        ("seeds", lambda group: str(len(group.runs)), None),
        *map(_column, _costs(groups)),
    ]
    numbers = [_numbers(group, targets) for group in groups]
    found = _summary(groups, columns, scores if shared else (), _direction(groups))
    return replace(found, legend=legend(groups), numbers=numbers)


def summarise_costs(groups: Sequence[Group], targets: Sequence[Target] = ()) -> Summary | None:
    """The table of what it takes to reach the targets of the groups of one data set; None if they have no target.

    targets: as for `summarise`.
    """
    if targets:
        asked = [costs_to_target(target, target_words(target)) for target in targets]
        costs = [cost for part in asked if _any_measured(part[0], groups) for cost in part]
    else:
        costs = [cost for cost in costs_to_target() if _any_measured(cost, groups)]
    if not costs:
        return None
    own = {_score(group, targets) for group in groups}
    apart: list[Column] = [("score", lambda group: _score(group, targets), None)] if len(own) > 1 else []
    caption = ["costs to the target", *(own if not targets and not apart else ())]
    note = "Bold: the lowest mean of the finished runs."
    return _summary(groups, [_RUN, *apart, *map(_column, costs)], caption, note)


def summarise_clients(groups: Sequence[Group]) -> Summary | None:
    """The table of the clients' scores on their own samples; None if no run of these groups has them."""
    if not (quantities := client_quantities(groups)):
        return None
    metrics = [metric_name(metric) for metric in dict.fromkeys(group.metric for group in groups)]
    caption = [f"{', '.join(metrics)} of the clients on their own samples"]
    return _summary(groups, [_RUN, *map(_column, quantities)], caption, "Bold: the best mean of the finished runs.")


def summarise_classes(groups: Sequence[Group]) -> Summary | None:
    """The table of the classes' scores; None if no run of these groups has them."""
    if not (quantities := class_quantities(groups)):
        return None
    note = "Bold: the best mean of the finished runs."
    return _summary(groups, [_RUN, *map(_column, quantities)], ["scores of the classes"], note)


def _column(quantity: Quantity) -> Column:
    return quantity.heading, quantity.cell, quantity


def _summary(groups: Sequence[Group], columns: Sequence[Column], caption: Iterable[str], note: str) -> Summary:
    """A table of these columns. caption: what all rows share. note: which values are bold."""
    several = any(len(group.runs) > 1 for group in groups)
    marked = {
        (row, number)
        for number, (_, _, quantity) in enumerate(columns)
        if quantity is not None and quantity.best
        for row in best_groups(quantity, groups)
    }
    return Summary(
        task=groups[0].task,
        caption="; ".join([*caption, *(["mean ± standard deviation over seeds"] if several else [])]),
        headings=[heading for heading, _, _ in columns],
        rows=[tuple(cell(group) for _, cell, _ in columns) for group in groups],
        best=frozenset(marked),
        note=note if marked else "",
    )


def _rounds_columns(groups: Sequence[Group], targets: Sequence[Target]) -> list[Quantity]:
    if not targets:
        return [ROUNDS_TO_TARGET]
    return [found for found in map(rounds_to_target, targets) if _any_measured(found, groups)]


def _any_measured(quantity: ToTarget, groups: Sequence[Group]) -> bool:
    return any(quantity.measured(run) for group in groups for run in group.runs)


def _costs(groups: Sequence[Group]) -> tuple[Quantity, ...]:
    any_rejected = any(run.result["rejected"] for group in groups for run in group.runs)
    return (REJECTED, *COSTS) if any_rejected else COSTS


def _direction(groups: Sequence[Group]) -> str:
    metrics = dict.fromkeys(group.metric for group in groups)
    higher = [metric_name(metric) for metric in metrics if metric and not lower_is_better(metric)]
    lower = [metric_name(metric) for metric in metrics if lower_is_better(metric)]
    least = ", ".join([*lower, "rounds, bytes, seconds and memory"])
    highest = f"the highest {', '.join(higher)}; " if higher else ""
    return f"Bold: the best mean of the finished runs ({highest}the lowest {least})."


def _score(group: Group, targets: Sequence[Target]) -> str:
    """The headline metric and the target: 'accuracy, target 0.8'; 'accuracy, target F1 0.7' if on another metric.
    Targets that were asked for have columns of their own."""
    own = {} if targets else group.own_target
    words = [
        setting_text(value) if name == group.metric else target_words({name: value}) for name, value in own.items()
    ]
    return ", ".join([metric_name(group.metric) or "not evaluated yet", *(f"target {text}" for text in words)])


def _numbers(group: Group, targets: Sequence[Target]) -> dict[str, Any]:
    """The row of the CSV file."""
    reached = [ROUNDS_TO_TARGET.value(run) for run in group.runs]
    row: dict[str, Any] = {
        "task": group.task, "run": group.name, "settings": group.settings, "note": group.note,
        "metric": printable(group.metric),
        "target": " ".join(f"{printable(name)}={setting_text(value)}" for name, value in group.own_target.items()),
        "seeds": " ".join(str(run.seed) for run in group.runs),
        "rounds": max(run.result["rounds"] for run in group.runs), "reached": len(reached) - reached.count(None),
    }  # fmt: skip
    asked = [quantity for target in targets for quantity in (rounds_to_target(target), *costs_to_target(target))]
    for quantity in (ROUNDS_TO_TARGET, *costs_to_target(), *asked, *SCORES, REJECTED, *COSTS, VECTORS):
        row |= _moments(quantity.key, quantity.values(group))
    return row


def _moments(key: str, values: Sequence[float]) -> dict[str, float | None]:
    return {
        f"{key}_mean": statistics.fmean(values) if values else None,
        f"{key}_std": statistics.stdev(values) if len(values) > 1 else None,
    }
