"""The command over what several runs left: report."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fedllm.cli.options import add_command, importing

if TYPE_CHECKING:
    from fedllm.cli.options import Commands


def add_commands(commands: Commands) -> None:
    """Adds report."""
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


def _report(arguments: argparse.Namespace) -> int:
    from fedllm.results.reader import require_readable

    require_readable(arguments.runs)  # before what draws is loaded
    with importing():
        from fedllm.reporting.report import parse_target, report

    report(arguments.runs, arguments.out, targets=[parse_target(text) for text in arguments.target])
    return 0
