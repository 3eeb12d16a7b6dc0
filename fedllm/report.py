"""The comparison of runs: one table for the terminal and for papers, and the figures beside it."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from fedllm.console import console
from fedllm.errors import RunError, UserError
from fedllm.groups import Group, group_runs
from fedllm.plots import figures, metric_name, plot_run, save
from fedllm.results import Run, load_run, read_runs, rounds_to

__all__ = ["FORMATS", "load_run", "parse_target", "plot_run", "read_runs", "report", "summarise"]

Target = dict[str, float]
FORMATS = ("md", "csv", "tex", "png", "svg")
_NONE = "-"
_WORDS = ("task", "run", "score")  # the columns that hold words, not numbers


def report(
    folders: Sequence[str | Path],
    out: str | Path | None = None,
    formats: Sequence[str] = FORMATS,
    targets: Sequence[Target] = (),
) -> list[Path]:
    """Prints the summary table of run folders, writes it and the figures into `out`, and returns what was written.

    out: default `report/` beside the first run. formats: of md, csv, tex (summary.*) and png, svg (the figures).
    targets: scores, each {metric: value}, to count the rounds to instead of each run's own target.
    Folders that cannot be read are named, with why, and left out. Raises UserError if none is left.
    """
    if unknown := [kind for kind in formats if kind not in FORMATS]:
        raise UserError(f"format '{unknown[0]}': unknown; known formats: {', '.join(FORMATS)}")
    if not folders:
        raise UserError("no run folder was named; for example: fedllm report runs/*")
    out = Path(out) if out else Path(folders[0]).parent / "report"
    runs, problems = read_runs(folder for folder in folders if Path(folder).resolve() != out.resolve())
    if not runs:
        raise UserError("\n  ".join(["none of the folders holds a run that can be read:", *problems]))
    for problem in problems:
        console.print(f"left out: {problem}", style="yellow", markup=False, soft_wrap=True)
    groups = group_runs(runs)
    summary = summarise(groups, targets)
    console.print(summary.caption, style="bold", markup=False)
    for table in summary.tables(console.width):
        console.print("", table)
    console.print()
    written = _write(summary, groups, out, formats)
    console.print(f"written to {out}: {', '.join(path.name for path in written)}", markup=False, soft_wrap=True)
    return written


def _write(summary: Summary, groups: Sequence[Group], out: Path, formats: Sequence[str]) -> list[Path]:
    texts = {"md": summary.markdown, "csv": summary.csv, "tex": summary.latex}
    pictures = [kind for kind in formats if kind not in texts]
    written = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        for kind in formats:
            if kind in texts:
                written.append(out / f"summary.{kind}")
                written[-1].write_text(texts[kind](), encoding="utf-8")
        for name, figure in figures(groups).items() if pictures else ():
            written += [save(figure, out / f"{name}.{kind}") for kind in pictures]
    except OSError as error:
        raise RunError(f"{out} could not be written: {error}") from error
    return written


@dataclass(frozen=True)
class Quantity:
    """A number that every run has: its name in the CSV file, its heading, its decimals (None: by size), its value."""

    key: str
    heading: str
    decimals: int | None
    value: Callable[[Run], float | None]


def _total(name: str, unit: float = 1.0) -> Callable[[Run], float]:
    return lambda run: run.result["totals"][name] / unit


def _best(run: Run) -> float | None:
    return (run.result["best"].get(run.primary) or {}).get("value")


_SCORES = (
    Quantity("best", "best", 4, _best),
    Quantity("final", "final", 4, lambda run: run.result["final"].get(run.primary)),
)
_COSTS = (
    Quantity("mb_up", "MB up", None, _total("bytes_up", unit=1e6)),
    Quantity("mb_down", "MB down", None, _total("bytes_down", unit=1e6)),
    Quantity("seconds", "seconds", None, _total("seconds")),
    Quantity("simulated_seconds", "simulated s", None, _total("simulated_seconds")),
)


@dataclass(frozen=True)
class Summary:
    """The table: what all rows share, the headings, a row a group in words, and a row a group in plain numbers."""

    caption: str
    headings: list[str]
    rows: list[tuple[str, ...]]
    numbers: list[dict[str, Any]]

    def tables(self, width: int) -> list[Table]:
        """One table for a terminal of this width, or as many parts of it as it takes, each of which names the rows."""
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
            if self.headings[column] in _WORDS:
                table.add_column(self.headings[column], max_width=36)
            else:
                table.add_column(self.headings[column], justify="right", no_wrap=True)
        for row in self.rows:
            table.add_row(*(Text(row[column]) for column in columns))
        return table

    def markdown(self) -> str:
        """A Markdown table under its caption."""
        rule = [":--" if heading in _WORDS else "--:" for heading in self.headings]
        lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in [self.headings, rule, *self.rows]]
        return "\n".join([f"{self.caption}.", "", *(f"| {line} |" for line in lines), ""])

    def csv(self) -> str:
        """The numbers, unrounded: mean and sample standard deviation over seeds, empty where there is none."""
        file = io.StringIO()
        writer = csv.DictWriter(file, list(self.numbers[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.numbers)
        return file.getvalue()

    def latex(self) -> str:
        """A tabular for the booktabs package."""
        alignment = "".join("l" if heading in _WORDS else "r" for heading in self.headings)
        lines = [" & ".join(map(_escape, row)) + r" \\" for row in [self.headings, *self.rows]]
        return "\n".join(
            [
                f"% {self.caption}; needs \\usepackage{{booktabs}}",
                rf"\begin{{tabular}}{{{alignment}}}",
                r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule",
                r"\end{tabular}", "",
            ]
        )  # fmt: skip


def parse_target(text: str) -> Target:
    """{metric: value} of 'metric=value', as it is typed on the command line. UserError for anything else."""
    name, _, value = text.partition("=")
    try:
        return {name.strip(): float(value)}
    except ValueError:
        raise UserError(f"--target: found '{text}', expected metric=value, for example accuracy=0.8") from None


def summarise(groups: Sequence[Group], targets: Sequence[Target] = ()) -> Summary:
    """The table of groups. Task, metric and target are in the caption if all groups share them, else in columns.

    targets: see report.
    """
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
        **{quantity.heading: partial(_spread, quantity) for quantity in _COSTS},
    }
    cells = {heading: [cell(group) for group in groups] for heading, cell in columns.items()}
    caption = [cells.pop(heading)[0] for heading in ("task", "score") if len(set(cells[heading])) == 1]
    if any(len(group.runs) > 1 for group in groups):
        caption.append("mean ± standard deviation over seeds")
    rows = list(zip(*cells.values(), strict=True))
    numbers = [_numbers(group, targets) for group in groups]
    return Summary("; ".join(caption) or "runs by task", list(cells), rows, numbers)


def _in_words(target: Target) -> str:
    return ", ".join(f"{metric_name(name)} {value:g}" for name, value in target.items())


def _rounds_to(group: Group, target: Target) -> str:
    """The mean over seeds only if every seed reached the target; else the bound that the others put on it."""
    if not target:
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
    """The values if every run has one, else none: a mean without the runs that failed would flatter."""
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
    reached = [run.result["rounds_to_target"] for run in group.runs]
    row: dict[str, Any] = {
        "task": group.task, "run": group.name, "note": group.note, "metric": group.metric,
        "target": " ".join(f"{name}={value:g}" for name, value in group.target.items()),
        "seeds": " ".join(str(run.seed) for run in group.runs),
        "rounds": max(run.result["rounds"] for run in group.runs), "reached": len(reached) - reached.count(None),
    }  # fmt: skip
    row |= _moments("rounds_to_target", _all_or_none(reached))
    for target in targets:
        key = "_".join(f"{name}_{value:g}" for name, value in target.items())
        row |= _moments(f"rounds_to_{key}", _all_or_none(rounds_to(target, run.rounds) for run in group.runs))
    for quantity in (*_SCORES, *_COSTS):
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
        f"{value:g}" if name == group.metric else f"{metric_name(name)} {value:g}"
        for name, value in group.target.items()
    ]
    return ", ".join([metric_name(group.metric) or "not evaluated yet", *(f"target {text}" for text in targets)])


def _width(table: Table) -> int:
    """Columns of a terminal that a table takes unless it is squeezed."""
    return Measurement.get(console, console.options.update(max_width=10_000), table).maximum


_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    ">": "$>$",
    "<": "$<$",
}


def _escape(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)
