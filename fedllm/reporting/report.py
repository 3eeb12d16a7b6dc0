"""The report of runs: tables for the terminal and for papers, figures, and one HTML page with all of it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from os.path import realpath
from pathlib import Path

from matplotlib.figure import Figure

from fedllm.common.console import console, say, stage, warn
from fedllm.common.errors import RunError, UserError
from fedllm.common.files import replace_text
from fedllm.common.schema import nearest
from fedllm.reporting import curves as plots
from fedllm.reporting.client_labels import client_figure, without_clients
from fedllm.reporting.groups import Group, group_runs
from fedllm.reporting.page import page
from fedllm.reporting.style import save, svg
from fedllm.reporting.summary import Summary, Target, summarise
from fedllm.results.names import printable
from fedllm.results.reader import none_readable, read_runs
from fedllm.results.run_record import RunRecord

FORMATS = ("html", "md", "csv", "tex", "png", "svg")
_DRAWN = {"html", "png", "svg"}
_NAMES = (  # of all files that a report can write
    "report.html", "summary.md", "summary.csv", "summary.tex",
    *(f"{figure}.{kind}" for figure in (*plots.PLOTS, "client_labels") for kind in ("png", "svg")),
)  # fmt: skip


def report(
    folders: Sequence[str | Path],
    out: str | Path | None = None,
    formats: Sequence[str] = FORMATS,
    targets: Sequence[Target] = (),
) -> list[Path]:
    """Prints the summary table of run folders, writes it and the figures into `out`, and returns the written files.

    out: default `report/` beside the first run. formats: any of html (report.html, one page with everything), md,
    csv, tex (summary.*) and png, svg (the figures).
    targets: scores, each {metric: value}; the table counts the rounds to these instead of each run's own target. A loss
    is reached from above.
    Warns about each folder that cannot be read and leaves it out. Says which groups a figure lacks. Removes files of an
    earlier report from `out` that this one does not write. Raises UserError if no folder is left, or if no run was
    measured in a target's metric.
    """
    if unknown := [kind for kind in formats if kind not in FORMATS]:
        raise UserError(f"format '{unknown[0]}': unknown; known formats: {', '.join(FORMATS)}")
    if not folders:
        raise UserError("no run folder was named; for example: fedllm report runs/*")
    out = Path(out) if out else _beside(Path(folders[0])) / "report"
    runs, problems = read_runs(folder for folder in folders if realpath(folder) != realpath(out))
    if not runs:
        raise none_readable(problems)
    _require_measured(targets, runs)
    for problem in problems:
        warn(f"left out: {problem}")
    groups = group_runs(runs)
    summary = summarise(groups, targets)
    console.print(summary.caption, style="bold", markup=False)
    for table in summary.tables(console.width):
        console.print("", table)
    console.print()
    try:
        written = _write(out, formats, summary, groups, problems)
    except OSError as error:
        raise RunError(f"{out} could not be written: {error}") from error
    say(f"written to {out}: {', '.join(path.name for path in written)}")
    return written


def _write(
    out: Path, formats: Sequence[str], summary: Summary, groups: Sequence[Group], problems: Sequence[str]
) -> list[Path]:
    """Writes the files of these formats, removes the other files of an earlier report, and returns what was written."""
    figures, lacking = _draw(groups) if _DRAWN & {*formats} else ({}, [])
    for line in lacking:
        say(line, "dim")
    out.mkdir(parents=True, exist_ok=True)
    svgs, pictures = _render(figures, out if "png" in formats else None)
    texts = {
        "html": {"report.html": page(summary, groups, svgs, problems, lacking)},
        "md": {"summary.md": summary.markdown()},
        "csv": {"summary.csv": summary.csv()},
        "tex": {"summary.tex": summary.latex()},
        "svg": {f"{name}.svg": text for name, text in svgs.items()},
    }
    asked = {name: text for kind in formats for name, text in texts.get(kind, {}).items()}
    for name, text in asked.items():
        replace_text(out / name, text)
    written = [*(out / name for name in asked), *pictures]
    for stale in {out / name for name in _NAMES}.difference(written):
        stale.unlink(missing_ok=True)
    return written


def _beside(folder: Path) -> Path:
    """The folder that holds this one, also where it is named '.' or '..'."""
    return folder.parent if folder.name not in ("", "..") else Path(realpath(folder)).parent


def _render(figures: Mapping[str, Figure], out: Path | None) -> tuple[dict[str, str], list[Path]]:
    """The figures as texts of SVG files, and as PNG files in a folder."""
    svgs, pictures = {}, []
    with stage("drawing the figures") as progress:
        for done, (name, figure) in enumerate(figures.items()):
            progress("figures", done, len(figures))
            svgs[name] = svg(figure)
            pictures += [save(figure, out / f"{name}.png")] if out else []
    return svgs, pictures


def _draw(groups: Sequence[Group]) -> tuple[dict[str, Figure], list[str]]:
    """The figures by the names of their files, and one line for each figure that lacks some groups."""
    clients = client_figure(groups)
    drawn = {**plots.figures(groups), **({} if clients is None else {"client_labels": clients})}
    return drawn, [*plots.undrawn(groups), *without_clients(groups)]


def parse_target(text: str) -> Target:
    """Reads 'metric=value' from the command line as {metric: value}. Raises UserError for anything else."""
    name, _, value = (part.strip() for part in text.partition("="))
    with contextlib.suppress(ValueError):
        if name and math.isfinite(number := float(value)):
            return {name: number}
    raise UserError(f"--target: found '{text}', expected metric=value, for example accuracy=0.8")


def _require_measured(targets: Sequence[Target], runs: Sequence[RunRecord]) -> None:
    known = list(dict.fromkeys(name for run in runs for name in run.result["final"]))
    for name in (name for target in targets for name in target):
        if name not in known:
            found = f"these runs were measured in {', '.join(known)}" if known else "no run was evaluated yet"
            raise UserError(printable(f"--target: found metric '{name}'{nearest(name, known)}, but {found}"))
