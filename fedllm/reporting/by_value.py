"""The figure of the scores of each value of a column: which clients, sites or topics gain."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.figure import Figure

from fedllm.reporting.groups import Group, full_name
from fedllm.reporting.style import COLOURS, FAINT, STYLE, short
from fedllm.results.format import is_number
from fedllm.results.names import metric_name, printable
from fedllm.results.run_files import ByValue

NAME = "by_value"
TITLE = "By value of a column"
CAPTION = (
    "The final headline score of the validation samples of each value, or of each client's own samples where clients "
    "are the values of a column; means over seeds. Open grey: before round 1. Of many values, those with the most "
    "samples are drawn; result.json or client_scores.json has all."
)
_MOST = 40  # values that are drawn


def value_figure(groups: Sequence[Group]) -> Figure | None:
    """One row per value of the column `eval.by`, the best on top; None if no run has such scores. groups: of one data
    set; of several columns, the first is drawn."""
    told = [by for group in groups for run in group.runs if (by := run.by)]
    if not told:
        return None
    column, metric = told[0]["column"], groups[0].metric
    same = [by for by in told if by["column"] == column]
    sizes = {value: own["samples"] for by in same for value, own in by["values"].items()}
    drawn = sorted(sizes, key=lambda value: -sizes[value])[:_MOST]
    start = {value: _mean(same, value, "start", metric) for value in drawn}
    finals = {
        full_name(group, groups): {
            value: _mean([run.by for run in group.runs if run.by], value, "final", metric) for value in drawn
        }
        for group in groups
    }
    finals = {name: scores for name, scores in finals.items() if any(is_number(score) for score in scores.values())}
    if not finals:
        return None
    first = next(iter(finals.values()))
    order = sorted(drawn, key=lambda value: score if is_number(score := first[value]) else float("-inf"))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.8, 1.1 + 0.2 * len(order)), layout="constrained")
        axes = figure.subplots()
        axes.set_title(short(groups[0].task, 60))
        _dots(axes, order, start, color=FAINT, facecolors="none", label="before round 1")
        for (name, scores), colour in zip(finals.items(), COLOURS * len(finals), strict=False):
            _dots(axes, order, scores, color=colour, label=short(name, 40))
            for place, value in enumerate(order):
                before, after = start[value], scores[value]
                if len(finals) == 1 and before is not None and after is not None:
                    axes.plot([before, after], [place, place], color=colour, linewidth=0.8, alpha=0.5)
        axes.set_yticks(range(len(order)), [f"{short(printable(value), 28)} ({sizes[value]})" for value in order])
        axes.set_ylim(-0.8, len(order) - 0.2)
        axes.set_xlabel(metric_name(metric))
        axes.set_ylabel(f"{short(printable(column), 28)} (samples)")
        axes.legend(loc="best", frameon=False)
    return figure


def _mean(told: Sequence[ByValue], value: str, when: Literal["start", "final"], metric: str) -> float | None:
    """The mean of a value's score over runs, None if no run has it."""
    scores = [by["values"][value].get(when, {}).get(metric) for by in told if value in by["values"]]
    found = [score for score in scores if is_number(score)]
    return fmean(found) if found else None


def _dots(axes: Any, order: Sequence[str], scores: dict[str, float | None], **style: Any) -> None:
    points = [(score, place) for place, value in enumerate(order) if is_number(score := scores[value])]
    if points:
        x, y = zip(*points, strict=True)
        axes.scatter(x, y, s=22, zorder=3, **style)
