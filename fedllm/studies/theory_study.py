"""The theory study: measures, writes two figures and the numbers."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedllm.common.console import ProgressCallback
from fedllm.common.errors import UserError
from fedllm.common.files import replace_text
from fedllm.studies.theory import ALGORITHMS, Findings, study

_CAPTION = "Mean over the second half of the rounds; mean ± standard deviation over seeds."


def run(out: Path, *, seeds: int, progress: ProgressCallback) -> Findings:
    """Measures with the seeds 0 to seeds - 1, and writes theory.json and the figures as PNG and SVG into `out`."""
    from fedllm.reporting.style import save
    from fedllm.studies.theory_figures import draw

    if seeds < 1:
        raise UserError(f"--seeds: found {seeds}, expected 1 or more")
    if out.exists() and not out.is_dir():
        raise UserError(f"--out: {out} is a file, expected a folder")
    findings = study(seeds, progress)
    out.mkdir(parents=True, exist_ok=True)
    for name, figure in draw(findings).items():
        for suffix in ("png", "svg"):
            save(figure, out / f"{name}.{suffix}")
    replace_text(out / "theory.json", json.dumps(_record(findings, seeds), indent=2) + "\n")
    return findings


def _record(findings: Findings, seeds: int) -> dict[str, object]:
    versions = {"python": platform.python_version(), "torch": torch.__version__, "fedllm": version("fedllm")}
    return {
        "seeds": list(range(seeds)),
        "speed_up": [asdict(point) for point in findings.speed_up],
        "slope": findings.slope,
        "heterogeneity": [asdict(point) for point in findings.heterogeneity],
        "longest_step_over_eta": {f"beta2={beta2:g}": longest for beta2, longest in findings.steps.items()},
        "versions": versions,
    }


def tables(findings: Findings) -> list[Table]:
    """The terminal tables: the errors over S, the errors over the spread, the longest steps."""
    shown = [
        _table("Linear speed-up of FAdamGC", "S", ("|grad f(x)|^2", "|x - x*|^2"), _CAPTION),
        _table("Heterogeneity: |grad f(x)|^2", "spread", ALGORITHMS, _CAPTION),
        _table("Longest step of FAdamGC", "beta2", ("longest |step| / eta",), ""),
    ]
    for point in findings.speed_up:
        shown[0].add_row(str(point.setting.sampled), _text(point.gradient), _text(point.distance))
    for points in zip(*map(findings.line, ALGORITHMS), strict=True):
        shown[1].add_row(f"{points[0].setting.spread:g}", *(_text(point.gradient) for point in points))
    for beta2, longest in findings.steps.items():
        shown[2].add_row(f"{beta2:g}", f"{longest:.3f}")
    return shown


def _table(title: str, first: str, headings: Sequence[str], caption: str) -> Table:
    shown = Table(title=title, box=SIMPLE_HEAD, show_edge=False, caption=caption or None)
    for heading in (first, *headings):
        shown.add_column(heading, justify="right", no_wrap=True)
    return shown


def _text(errors: Sequence[float]) -> str:
    deviation = f" ± {statistics.stdev(errors):.2g}" if len(errors) > 1 else ""
    return f"{statistics.fmean(errors):.2g}{deviation}"
