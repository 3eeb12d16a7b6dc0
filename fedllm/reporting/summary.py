"""The comparison of groups of runs as one table: for the terminal, Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from fedllm.common.console import console
from fedllm.reporting.groups import Group
from fedllm.reporting.text_tables import in_markdown, latex_table, markdown_table
from fedllm.results.format import is_number, rounds_to
from fedllm.results.names import metric_name, printable, setting_text
from fedllm.results.run_record import RunRecord

Target = dict[str, float]
_NONE = "-"
WORDS = ("task", "run", "score")  # the columns that hold words, not numbers


@dataclass(frozen=True)
class Quantity:
    """A number of a run: its key in the CSV file, its heading, its decimals (None: by size) and how to read it."""

    key: str
    heading: str
    decimals: int | None
    value: Callable[[RunRecord], float | None]


def _total(name: str, unit: float = 1.0) -> Callable[[RunRecord], float]:
    return lambda run: run.result["totals"][name] / unit


def _best(run: RunRecord) -> float | None:
    return run.best_score(run.primary)


def _client_memory(run: RunRecord) -> float | None:
    """The memory of a client while it trains, in megabytes (costs.client_memory). Older runs have none."""
    held = run.result.get("client_memory_bytes")
    return held / 1e6 if is_number(held) else None


def _vectors(run: RunRecord) -> float | None:
    """V(t): model-sized vectors that one sampled client sends and receives in a round (costs.vectors_per_round)."""
    moved = run.result.get("vectors_per_round")
    sent = moved.get("sent") if isinstance(moved, dict) else None
    return sent if is_number(sent) else None


_SCORES = (
    Quantity("best", "best", 4, _best),
    Quantity("final", "final", 4, lambda run: run.result["final"].get(run.primary)),
)
_COSTS = (
    Quantity("mb_up", "MB up", None, _total("bytes_up", unit=1e6)),
    Quantity("mb_down", "MB down", None, _total("bytes_down", unit=1e6)),
    Quantity("seconds", "seconds", None, _total("seconds")),
    Quantity("simulated_seconds", "simulated s", None, _total("simulated_seconds")),
    Quantity("client_memory_mb", "client MB", None, _client_memory),
)
_REJECTED = Quantity("rejected", "rejected", None, lambda run: run.result["rejected"])
_VECTORS = Quantity("vectors_per_round", "vectors", None, _vectors)


@dataclass(frozen=True)
class Summary:
    """The table, one row per group. caption: what all rows share. rows: as text. numbers: as in the CSV file."""

    caption: str
    headings: list[str]
    rows: list[tuple[str, ...]]
    numbers: list[dict[str, Any]]

    def tables(self, width: int) -> list[Table]:
        """The table for a terminal of this width, in as many parts as needed. Each part names the rows."""
        named = self.headings.index("run") + 1
        parts: list[list[int]] = [[]]
        for column in range(named, len(self.headings)):
            if parts[-1] and _width(self._table([*range(named), *parts[-1], column])) > width:
                parts.append([])
            parts[-1].append(column)
        return [self._table([*range(named), *part]) for part in parts]

    def _table(self, columns: Sequence[int]) -> Table:
        table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for column in columns:
            if self.headings[column] in WORDS:
                table.add_column(self.headings[column], max_width=36)
            else:
                table.add_column(self.headings[column], justify="right", no_wrap=True)
        for row in self.rows:
            table.add_row(*(Text(row[column]) for column in columns))
        return table

    def markdown(self) -> str:
        """A Markdown table under its caption."""
        return f"{in_markdown(self.caption)}.\n\n{markdown_table(self.headings, self.rows, WORDS)}"

    def csv(self) -> str:
        """The numbers, unrounded: mean and sample standard deviation over seeds, empty where there is none."""
        file = io.StringIO()
        writer = csv.DictWriter(file, list(self.numbers[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.numbers)
        return file.getvalue()

    def latex(self) -> str:
        """A tabular for the booktabs package."""
        return f"% {self.caption}; needs \\usepackage{{booktabs}}\n{latex_table(self.headings, self.rows, WORDS)}"


def summarise(groups: Sequence[Group], targets: Sequence[Target] = ()) -> Summary:
    """The table of groups. Task, metric and target stand in the caption if all groups share them, else in columns. A
    column counts rejected uploads if there were any.

    targets: as for `report`.
    """
    any_rejected = any(run.result["rejected"] for group in groups for run in group.runs)
    costs = (_REJECTED, *_COSTS) if any_rejected else _COSTS
    rounds: dict[str, Callable[[Group], str]] = {
        f"rounds to {_in_words(target)}": partial(_rounds_to, target=target) for target in targets
    }
    columns: dict[str, Callable[[Group], str]] = {
        "task": lambda group: group.task,
        "run": lambda group: group.label,
        "score": _score,
        **(rounds or {"rounds to target": lambda group: _rounds_to(group, group.target)}),
        **{quantity.heading: partial(_spread, quantity) for quantity in _SCORES},
        "seeds": lambda group: str(len(group.runs)),
        **{quantity.heading: partial(_spread, quantity) for quantity in costs},
    }
    cells = {heading: [cell(group) for group in groups] for heading, cell in columns.items()}
    caption = [cells.pop(heading)[0] for heading in ("task", "score") if len(set(cells[heading])) == 1]
    if any(len(group.runs) > 1 for group in groups):
        caption.append("mean ± standard deviation over seeds")
    rows = list(zip(*cells.values(), strict=True))
    numbers = [_numbers(group, targets) for group in groups]
    return Summary("; ".join(caption) or "runs by task", list(cells), rows, numbers)


def _in_words(target: Target) -> str:
    return ", ".join(f"{metric_name(name)} {setting_text(value)}" for name, value in target.items())


def _rounds_to(group: Group, target: Target) -> str:
    """The mean number of rounds if every seed reached the target, else ">N", the rounds of the shortest run that did
    not. A dash where a seed was not measured in that metric."""
    if not target or any(name not in run.result["final"] for name in target for run in group.runs):
        return _NONE
    reached = [rounds_to(target, run.rounds) for run in group.runs]
    found = [rounds for rounds in reached if rounds is not None]
    if len(found) == len(reached):
        return _mean_and_deviation(found, 1 if len(reached) > 1 else 0)
    missed = zip(group.runs, reached, strict=True)
    without = min(run.result["rounds"] for run, rounds in missed if rounds is None)
    return f">{without} ({len(found)} of {len(reached)} reached)" if len(reached) > 1 else f">{without}"


def _spread(quantity: Quantity, group: Group) -> str:
    values = _all_or_none(map(quantity.value, group.runs))
    return _mean_and_deviation(values, quantity.decimals) if values else _NONE


def _all_or_none(values: Iterable[float | None]) -> list[float]:
    """The values if every run has one, else none: a mean over the successful runs alone would be biased."""
    found = list(values)
    numbers = [value for value in found if value is not None]
    return numbers if len(numbers) == len(found) else []


def _mean_and_deviation(values: Sequence[float], decimals: int | None) -> str:
    mean = statistics.fmean(values)
    if decimals is None:
        decimals = 0 if mean >= 100 else 1 if mean >= 10 else 2
    deviation = f" ± {statistics.stdev(values):,.{decimals}f}" if len(values) > 1 else ""
    return f"{mean:,.{decimals}f}{deviation}"


def _numbers(group: Group, targets: Sequence[Target]) -> dict[str, Any]:
    """The row of the CSV file."""
    reached = [rounds_to(group.target, run.rounds) for run in group.runs]
    row: dict[str, Any] = {
        "task": group.task, "run": group.name, "note": group.note, "metric": printable(group.metric),
        "target": " ".join(f"{printable(name)}={setting_text(value)}" for name, value in group.target.items()),
        "seeds": " ".join(str(run.seed) for run in group.runs),
        "rounds": max(run.result["rounds"] for run in group.runs), "reached": len(reached) - reached.count(None),
    }  # fmt: skip
    row |= _moments("rounds_to_target", _all_or_none(reached))
    for target in targets:
        key = "_".join(f"{name}_{setting_text(value)}" for name, value in target.items())
        row |= _moments(f"rounds_to_{key}", _all_or_none(rounds_to(target, run.rounds) for run in group.runs))
    for quantity in (*_SCORES, _REJECTED, *_COSTS, _VECTORS):
        row |= _moments(quantity.key, _all_or_none(map(quantity.value, group.runs)))
    return row


def _moments(key: str, values: Sequence[float]) -> dict[str, float | None]:
    return {
        f"{key}_mean": statistics.fmean(values) if values else None,
        f"{key}_std": statistics.stdev(values) if len(values) > 1 else None,
    }


def _score(group: Group) -> str:
    """The headline metric and the target: 'accuracy, target 0.8'; 'accuracy, target F1 0.7' if on another metric."""
    targets = [
        setting_text(value) if name == group.metric else _in_words({name: value})
        for name, value in group.target.items()
    ]
    return ", ".join([metric_name(group.metric) or "not evaluated yet", *(f"target {text}" for text in targets)])


def _width(table: Table) -> int:
    """The width of a table in a terminal that is wide enough."""
    return Measurement.get(console, console.options.update(max_width=10_000), table).maximum
