"""The report of runs: tables for the terminal and for papers, figures, and one HTML page with all of it."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os.path import realpath
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from fedllm.common.console import console, say, stage, warn
from fedllm.common.errors import RunError, UserError
from fedllm.common.files import replace_text
from fedllm.common.schema import nearest
from fedllm.reporting import by_value, class_scores, client_scores
from fedllm.reporting import curves as plots
from fedllm.reporting.client_labels import client_figure, without_clients
from fedllm.reporting.groups import Group, Target, by_task, group_runs
from fedllm.reporting.page import Section, page
from fedllm.reporting.style import save, svg
from fedllm.reporting.summary import Summary, csv_text, summarise, summarise_classes, summarise_clients, summarise_costs
from fedllm.reporting.swept import Panel, swept_csv, swept_panels
from fedllm.reporting.swept_figure import NAME, swept_figure, without_swept
from fedllm.results.names import printable
from fedllm.results.reader import none_readable, read_runs
from fedllm.results.run_record import RunRecord
from fedllm.tasks.base import require_reachable

FORMATS = ("html", "md", "csv", "tex", "png", "svg")
# Of each data set: the scores and costs, what targets take, the clients' scores and the classes'.
Tables = tuple[list[Summary], list[Summary | None], list[Summary | None], list[Summary | None]]
_DRAWN = {"html", "png", "svg"}
_FIGURES = (*plots.PLOTS, "client_labels", NAME, by_value.NAME, class_scores.NAME, client_scores.NAME)
_NAMES = (  # patterns of all files that a report can write; a figure of one of several data sets has its name inside
    "report.html", "summary.md", "summary.csv", "summary.tex", "swept.csv",
    *(f"{figure}{inside}.{kind}" for figure in _FIGURES for inside in ("", ".*") for kind in ("png", "svg")),
)  # fmt: skip


@dataclass(frozen=True)
class Report:
    """What `report` wrote.

    files: in the order of the formats. scores: the lines of summary.csv, one per group of runs that differ only in the
    seed, with the mean and the standard deviation of each number; None where there is none.
    """

    folder: Path
    files: list[Path]
    scores: list[dict[str, Any]]


def report(
    folders: Sequence[str | Path],
    out: str | Path | None = None,
    formats: Sequence[str] = FORMATS,
    targets: Sequence[Target] = (),
) -> Report:
    """Prints the summary tables of run folders, one for each data set, and writes them and the figures into `out`; the
    same as `fedllm report`.

    out: default `report/` beside the first run. formats: any of html (report.html, one page with everything), md,
    csv, tex (summary.*; csv also swept.csv) and png, svg (the figures).
    targets: scores, each {metric: value}; tables and figures use these instead of each run's own target. A loss is
    reached from above.
    Warns about each folder that cannot be read and leaves it out. Says which groups a figure lacks. Removes files of an
    earlier report from `out` that this one does not write. Raises UserError if no folder is left, if no run was
    measured in a target's metric, or if that metric cannot have its value.
    """
    if unknown := [kind for kind in formats if kind not in FORMATS]:
        raise UserError(f"format '{unknown[0]}': unknown; known formats: {', '.join(FORMATS)}")
    if not folders:
        raise UserError("no run folder was named; for example: fedllm report runs/*")
    out = Path(out) if out else _beside(Path(folders[0])) / "report"
    runs, problems = read_runs(folder for folder in folders if realpath(folder) != realpath(out))
    if not runs:
        raise none_readable(problems)
    _check_targets(targets, runs)
    for problem in problems:
        warn(f"left out: {problem}")
    tasks = by_task(group_runs(runs, targets))
    summaries = [summarise(groups, targets) for groups in tasks.values()]
    costs = [summarise_costs(groups, targets) for groups in tasks.values()]
    clients = [summarise_clients(groups) for groups in tasks.values()]
    classes = [summarise_classes(groups) for groups in tasks.values()]
    tables = (summaries, costs, clients, classes)
    for summary in _in_order(*tables):
        _print(summary)
    try:
        written = _write(out, formats, tables, list(tasks.values()), problems)
    except OSError as error:
        raise RunError(f"{out} could not be written: {error}") from error
    say(f"written to {out}: {_listed(written)}")
    return Report(out, written, [line for summary in summaries for line in summary.numbers])


def _in_order(*tables: Sequence[Summary | None]) -> list[Summary]:
    """The tables of each data set, one data set after the other."""
    return [table for of_one in zip(*tables, strict=True) for table in of_one if table is not None]


def _listed(written: Sequence[Path]) -> str:
    """The names of the page and the tables, and the number of files with figures."""
    names = [path.name for path in written if path.suffix not in (".png", ".svg")]
    figures = len(written) - len(names)
    return ", ".join([*names, *([f"{figures} files of figures"] if figures else [])])


def _print(summary: Summary) -> None:
    console.print(summary.title, style="bold", markup=False)
    for table in summary.tables(console.width):
        console.print("", table)
    if summary.note and console.is_terminal:  # elsewhere nothing is bold
        console.print("", summary.note, style="dim", markup=False)
    console.print()


def _write(
    out: Path,
    formats: Sequence[str],
    tables: Tables,
    tasks: Sequence[Sequence[Group]],
    problems: Sequence[str],
) -> list[Path]:
    """Writes the files of these formats, removes the other files of an earlier report, and returns what was written.

    tables, tasks: the tables and the groups of each data set.
    """
    summaries = tables[0]
    swept = [swept_panels(groups) for groups in tasks]
    drawn, lacking = _draw(tasks, swept) if _DRAWN & {*formats} else ([{} for _ in tasks], [])
    for line in lacking:
        say(line, "dim")
    out.mkdir(parents=True, exist_ok=True)
    endings = _endings([summary.task for summary in summaries])
    svgs, pictures = _render(drawn, endings, out if "png" in formats else None)
    sections = [Section(*parts) for parts in zip(summaries, tasks, svgs, *tables[1:], strict=True)]
    panels = [panel for own in swept for panel in own]
    named = [
        (f"{name}{ending}.svg", text)
        for texts, ending in zip(svgs, endings, strict=True)
        for name, text in texts.items()
    ]
    told = _in_order(*tables)
    texts = {
        "html": {"report.html": page(sections, problems, lacking)},
        "md": {"summary.md": "\n".join(table.markdown() for table in told)},
        "csv": {"summary.csv": csv_text(summaries)} | ({"swept.csv": swept_csv(panels)} if panels else {}),
        "tex": {"summary.tex": "\n".join(table.latex() for table in told)},
        "svg": dict(named),
    }
    asked = {name: text for kind in formats for name, text in texts.get(kind, {}).items()}
    for name, text in asked.items():
        replace_text(out / name, text)
    written = [*(out / name for name in asked), *pictures]
    for stale in {path for pattern in _NAMES for path in out.glob(pattern)}.difference(written):
        stale.unlink(missing_ok=True)
    return written


def _endings(tasks: Sequence[str]) -> list[str]:
    """What each data set adds to the names of its figures' files: nothing if it is the only one."""
    if len(tasks) == 1:
        return [""]
    slugs = [re.sub(r"[^\w-]+", "-", task).strip("-")[:60] for task in tasks]
    return [
        f".{slug}" if slug and slugs.count(slug) == 1 else f".{number}-{slug}".rstrip("-")
        for number, slug in enumerate(slugs, 1)
    ]


def _beside(folder: Path) -> Path:
    """The folder that holds this one, also where it is named '.' or '..'."""
    return folder.parent if folder.name not in ("", "..") else Path(realpath(folder)).parent


def _render(
    drawn: Sequence[Mapping[str, Figure]], endings: Sequence[str], out: Path | None
) -> tuple[list[dict[str, str]], list[Path]]:
    """The figures of each data set as texts of SVG files, and all of them as PNG files in a folder."""
    svgs: list[dict[str, str]] = []
    pictures = []
    done, total = 0, sum(map(len, drawn))
    with stage("drawing the figures") as progress:
        for figures, ending in zip(drawn, endings, strict=True):
            svgs.append({})
            for name, figure in figures.items():
                progress("figures", done, total)
                svgs[-1][name] = svg(figure)
                pictures += [save(figure, out / f"{name}{ending}.png")] if out else []
                done += 1
    return svgs, pictures


def _draw(
    tasks: Sequence[Sequence[Group]], swept: Sequence[Sequence[Panel]]
) -> tuple[list[dict[str, Figure]], list[str]]:
    """The figures of each data set by the names of their files, and one line for each figure that lacks some groups.

    swept: the panels of each data set's swept settings.
    """
    drawn, lacking = [], []
    for groups, panels in zip(tasks, swept, strict=True):
        more = {"client_labels": client_figure(groups), NAME: swept_figure(panels)}
        more[by_value.NAME] = by_value.value_figure(groups)
        more[class_scores.NAME] = class_scores.confusion_figure(groups)
        more[client_scores.NAME] = client_scores.score_figure(groups)
        drawn.append(plots.figures(groups) | {name: figure for name, figure in more.items() if figure is not None})
        prefix = f"{groups[0].task}: " if len(tasks) > 1 else ""
        lacking += [
            f"{prefix}{line}"
            for line in (*plots.undrawn(groups), *without_clients(groups), *without_swept(groups, panels))
        ]
    return drawn, lacking


def parse_target(text: str) -> Target:
    """Reads 'metric=value' from the command line as {metric: value}. Raises UserError for anything else."""
    name, _, value = (part.strip() for part in text.partition("="))
    with contextlib.suppress(ValueError):
        if name and math.isfinite(number := float(value)):
            return {name: number}
    raise UserError(f"--target: found '{text}', expected metric=value, for example accuracy=0.8")


def _check_targets(targets: Sequence[Target], runs: Sequence[RunRecord]) -> None:
    """Raises UserError for a metric that no run was measured in, and for a value that it cannot have."""
    known = list(dict.fromkeys(name for run in runs for name in run.result["final"]))
    for name in (name for target in targets for name in target):
        if name not in known:
            found = f"these runs were measured in {', '.join(known)}" if known else "no run was evaluated yet"
            raise UserError(printable(f"--target: found metric '{name}'{nearest(name, known)}, but {found}"))
    for target in targets:
        try:
            require_reachable(target)
        except UserError as error:
            raise UserError(f"--{error}") from None
