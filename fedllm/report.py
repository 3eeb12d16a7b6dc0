"""The report of runs: tables for the terminal and for papers, figures, and one page with all of it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from os.path import realpath
from pathlib import Path

from matplotlib.figure import Figure

from fedllm import plots
from fedllm.client_plots import client_figure, without_clients
from fedllm.console import console, say, stage, warn
from fedllm.errors import RunError, UserError
from fedllm.files import replace_text
from fedllm.folders import read_runs
from fedllm.groups import Group, group_runs
from fedllm.look import save, svg
from fedllm.page import page
from fedllm.results import Run, printable
from fedllm.settings import nearest
from fedllm.summary import Target, summarise

FORMATS = ("html", "md", "csv", "tex", "png", "svg")
_DRAWN = {"html", "png", "svg"}
_NAMES = (  # of the files that a report may leave
    "report.html", "summary.md", "summary.csv", "summary.tex",
    *(f"{figure}.{kind}" for figure in (*plots.PLOTS, "client_labels") for kind in ("png", "svg")),
)  # fmt: skip


def report(
    folders: Sequence[str | Path],
    out: str | Path | None = None,
    formats: Sequence[str] = FORMATS,
    targets: Sequence[Target] = (),
) -> list[Path]:
    """Prints the summary table of run folders, writes it and the figures into `out`, and returns what was written.

    out: default `report/` beside the first run. formats: of html (report.html, one page with all of it), md,
    csv, tex (summary.*) and png, svg (the figures).
    targets: scores, each {metric: value}, to count the rounds to instead of each run's own target; a loss is reached
    from above.
    Folders that cannot be read are named, with why, and left out; said is also what a figure lacks. What an earlier
    report wrote into `out` and this one does not, is removed. Raises UserError if no folder is left, or none of the
    runs was measured in a target's metric.
    """
    if unknown := [kind for kind in formats if kind not in FORMATS]:
        raise UserError(f"format '{unknown[0]}': unknown; known formats: {', '.join(FORMATS)}")
    if not folders:
        raise UserError("no run folder was named; for example: fedllm report runs/*")
    out = Path(out) if out else _beside(Path(folders[0])) / "report"
    runs, problems = read_runs(folder for folder in folders if realpath(folder) != realpath(out))
    if not runs:
        raise UserError("\n  ".join(["none of the folders holds a run that can be read:", *problems]))
    _require_measured(targets, runs)
    for problem in problems:
        warn(f"left out: {problem}")
    groups = group_runs(runs)
    summary = summarise(groups, targets)
    console.print(summary.caption, style="bold", markup=False)
    for table in summary.tables(console.width):
        console.print("", table)
    console.print()
    figures, lacking = _draw(groups) if _DRAWN & {*formats} else ({}, [])
    for line in lacking:
        say(line, "dim")
    try:
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
    except OSError as error:
        raise RunError(f"{out} could not be written: {error}") from error
    say(f"written to {out}: {', '.join(path.name for path in written)}")
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
    """The figures by the names of their files, and a line for each that lacks some groups."""
    clients = client_figure(groups)
    drawn = {**plots.figures(groups), **({} if clients is None else {"client_labels": clients})}
    return drawn, [*plots.undrawn(groups), *without_clients(groups)]


def parse_target(text: str) -> Target:
    """{metric: value} of 'metric=value', as it is typed on the command line. UserError for anything else."""
    name, _, value = (part.strip() for part in text.partition("="))
    with contextlib.suppress(ValueError):
        if name and math.isfinite(number := float(value)):
            return {name: number}
    raise UserError(f"--target: found '{text}', expected metric=value, for example accuracy=0.8")


def _require_measured(targets: Sequence[Target], runs: Sequence[Run]) -> None:
    known = list(dict.fromkeys(name for run in runs for name in run.result["final"]))
    for name in (name for target in targets for name in target):
        if name not in known:
            found = f"these runs were measured in {', '.join(known)}" if known else "no run was evaluated yet"
            raise UserError(printable(f"--target: found metric '{name}'{nearest(name, known)}, but {found}"))
