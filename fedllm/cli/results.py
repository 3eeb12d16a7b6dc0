"""The commands over what several runs left: list and report."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from fedllm.cli.options import add_command, importing
from fedllm.common.console import WIDEST, console, table_width

if TYPE_CHECKING:
    from rich.table import Table

    from fedllm.cli.options import Commands
    from fedllm.results.listing import ListedRun


def add_commands(commands: Commands) -> None:
    """Adds list and report."""
    listing = add_command(commands, "list", _list, "the runs below a folder, with their state and best score")
    listing.add_argument("folders", nargs="*", type=Path, default=[Path("runs")], help="default: runs")
    listing.add_argument("--json", action="store_true", help="one JSON object per line, for programs")
    report = add_command(commands, "report", _report, "tables, figures and a page of run folders")
    report.add_argument("runs", nargs="+", type=Path, help="run folders")
    report.add_argument("--out", type=Path, help="folder of the report; default report/ beside the first run")
    report.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="METRIC=VALUE",
        help="target of tables and figures, instead of the recipes' own; may be repeated",
    )


def _list(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from fedllm.results.listing import list_runs

    found = list_runs(arguments.folders)
    if arguments.json:
        for run in found:
            print(json.dumps({**asdict(run), "folder": str(run.folder)}))
        return 0
    if console.is_terminal:
        console.print(_table(found, console.width))
    else:
        table = _table(found, WIDEST)
        Console(width=table_width(table)).print(table)
    return 0


def _table(found: Sequence[ListedRun], width: int) -> Table:
    """The runs as a table. Where it is wider than that, columns that a run's recipe tells are left out."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    columns = {
        "run": [str(run.folder) for run in found],
        "algorithm": [run.algorithm for run in found],
        "data": [run.data for run in found],
        "seed": ["" if run.seed is None else str(run.seed) for run in found],
        "state": [run.state for run in found],
        "best": [run.score for run in found],
        "changed": [run.ago for run in found],
    }
    for left_out in ((), ("changed",), ("changed", "data"), ("changed", "data", "algorithm", "seed")):
        table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
        shown = {name: cells for name, cells in columns.items() if name not in left_out}
        for name in shown:
            table.add_column(name, overflow="fold")
        for row in zip(*shown.values(), strict=True):
            table.add_row(*map(Text, row))
        if table_width(table) <= width:
            break
    return table


def _report(arguments: argparse.Namespace) -> int:
    from fedllm.results.reader import require_readable

    require_readable(arguments.runs)  # before what draws is loaded
    with importing():
        from fedllm.reporting.report import parse_target, report

    report(arguments.runs, arguments.out, targets=[parse_target(text) for text in arguments.target])
    return 0
