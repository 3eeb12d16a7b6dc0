"""Figures of groups of runs: scores over rounds, traffic and time, training losses, and the drift of clients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedllm.reporting.groups import Group, full_name
from fedllm.reporting.style import (
    COLOURS,
    STYLE,
    TARGET,
    End,
    Style,
    draw_targets,
    label_ends,
    marker,
    set_axis,
    set_log,
    short,
    under_title,
)
from fedllm.results.format import Axis
from fedllm.results.names import metric_name
from fedllm.results.run_record import RunRecord

Curve = tuple[list[float], list[float]]
_DASHES = ("-", "--", "-.", ":")
_BAND = "mean over seeds, in a band from the lowest to the highest"
_BAND_AND_TAILS = "mean over seeds, lowest to highest in a band; dotted: seeds that go on"


@dataclass(frozen=True)
class Plot:
    """A kind of figure: one panel per metric, over an axis. Without metrics: the headline score of each task."""

    title: str
    caption: str
    over: Axis
    metrics: tuple[str, ...] = ()


PLOTS = {
    "score_by_round": Plot("Score over rounds", "On the whole validation split.", "round"),
    "score_by_traffic": Plot("Score over bytes", "All bytes sent until then, up and down, of all clients.", "bytes"),
    "score_by_time": Plot(
        "Score over simulated time",
        "Each round takes as long as its slowest client computes and sends, over a link of costs.bandwidth_mbit.",
        "simulated_seconds",
    ),
    "train_loss": Plot(
        "Training loss", "Mean over a round's clients and their local steps.", "round", ("train_loss",)
    ),
    "client_drift": Plot(
        "Client drift",
        "Mean over a round's clients of the cosine between a client's update and the mean update (1 where all updates "
        "have the same direction), and of the norm of a client's update.",
        "round",
        ("update_cosine", "update_norm"),
    ),
    "v_spread": Plot(
        "Spread of v between clients",
        "Standard deviation over a round's clients of their second moments v, relative to the mean v and weighted by "
        "it (0 where all clients have the same v).",
        "round",
        ("v_spread",),
    ),
}  # fmt: skip


def figures(groups: Sequence[Group]) -> dict[str, Figure]:
    """The figures of PLOTS for which there are data: one panel per task and metric, one line per group with the mean
    over its seeds, in a band from the lowest seed to the highest. A group is drawn if every seed has the metric."""
    with mpl.rc_context(STYLE):
        panels = {name: _panels(groups, plot) for name, plot in PLOTS.items()}
        styles = _styles(groups)
        return {name: _compare(panels[name], plot, styles) for name, plot in PLOTS.items() if panels[name]}


def undrawn(groups: Sequence[Group]) -> list[str]:
    """One line per figure and reason: which groups the figure lacks, and why."""
    lines = []
    kinds: dict[str, tuple[str, ...]] = {"Score": ()}
    kinds |= {plot.title: plot.metrics for plot in PLOTS.values() if plot.metrics}
    for title, metrics in kinds.items():
        reasons: dict[str, list[str]] = {}
        for group in groups:
            lacking = [_why(run, m) for m in metrics or (group.metric,) for run in group.runs if not run.curve(m)[0]]
            for reason in dict.fromkeys(lacking):
                reasons.setdefault(reason, []).append(full_name(group, groups))
        lines += [drawn_without(title, names, len(groups), reason) for reason, names in reasons.items()]
    return lines


def drawn_without(title: str, names: Sequence[str], of: int, reason: str) -> str:
    """'Client drift: drawn without fedavg; scaffold (why)', or that none of the groups is drawn."""
    drawn = "not drawn" if len(names) == of else f"drawn without {'; '.join(names)}"
    return f"{title}: {drawn} ({reason})"


def _why(run: RunRecord, metric: str) -> str:
    """Why a run has no curve of a metric."""
    if metric == run.primary:
        return "not evaluated yet"
    if any(metric in line for line in run.rounds):
        return "no value in any round"
    if metric == "v_spread" and any("update_norm" in line for line in run.rounds):
        return "no second moment v in the clients"
    return "not in metrics.jsonl, as in runs of older versions of fedllm"


Panels = dict[tuple[str, str], list[Group]]  # the groups of a task and metric


def _panels(groups: Sequence[Group], plot: Plot) -> Panels:
    panels: Panels = {}
    for group in groups:
        for metric in plot.metrics or (group.metric,):
            if all(run.curve(metric)[0] for run in group.runs):
                panels.setdefault((group.task, metric), []).append(group)
    return panels


def _compare(panels: Panels, plot: Plot, styles: dict[str, Style]) -> Figure:
    """One figure. Names stand at the ends of the lines where there is one panel and they fit, else in a legend."""
    groups = list({id(group): group for members in panels.values() for group in members}.values())
    one = len(panels) == 1
    named = one and len(groups) <= 10 and all(len(_legend_name(group)) <= 28 for group in groups)
    columns = min(len(plot.metrics) if len(plot.metrics) > 1 else 3, len(panels))
    rows = math.ceil(len(panels) / columns)
    height = 3.9 if one else 2.6 * rows
    width = 6.8 if one else 3.4 * columns
    longest = max(len(_legend_name(group)) for group in groups)
    legend_columns = max(1, min(3, int(14 * width / (longest + 6))))  # 14 letters an inch, 6 for the line before a name
    legend_height = 0 if named else 0.2 * (len(groups) / legend_columns + 1)
    figure = Figure(figsize=(width, height + legend_height), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    first = dict(reversed(panels))
    note = _BAND if any(len(group.runs) > 1 for group in groups) else ""
    if any(_uneven(group, metric, plot.over) for (_, metric), members in panels.items() for group in members):
        note = _BAND_AND_TAILS
    for axes, ((task, metric), members) in zip(grid, panels.items(), strict=False):
        if not plot.metrics or first[task] == metric:
            axes.set_title(short(task, 40), pad=24 if one and note else None)
        ends = _draw_panel(axes, members, metric, plot.over, styles)
        if named:
            label_ends(axes, ends)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    if one:
        under_title(grid[0], note)
    if not named:
        targeted = any(metric in group.target for (_, metric), members in panels.items() for group in members)
        _legend(figure, groups, styles, targeted, ncols=legend_columns, title="" if one else note)
    return figure


def _draw_panel(axes: Axes, groups: Sequence[Group], metric: str, over: Axis, styles: dict[str, Style]) -> list[End]:
    """Draws the lines of one task and metric, the targets and the axes. Norms of different magnitudes get a logarithmic
    axis. Returns the ends of the lines."""
    axes.set_ylabel(short(metric_name(metric), 36))
    scale = set_axis(axes, over, max(run.curve(metric, over)[0][-1] for group in groups for run in group.runs))
    if metric == "update_norm":
        values = [value for group in groups for run in group.runs for value in run.curve(metric)[1]]
        if 0 < 20 * min(values) < max(values):
            set_log(axes)
    ends = [_draw_group(axes, group, metric, over, scale, styles[group.name]) for group in groups]
    return ends + draw_targets(axes, [group.target for group in groups], metric)


def _legend(figure: Figure, groups: Sequence[Group], styles: dict[str, Style], targeted: bool, **layout: Any) -> None:
    handles = {_legend_name(group): Line2D([], [], **_style(group, styles[group.name])) for group in groups}
    if targeted:
        handles["target"] = Line2D([], [], **TARGET)
    figure.legend(list(handles.values()), list(handles), alignment="left", loc="outside lower left", **layout)


def _styles(groups: Sequence[Group]) -> dict[str, Style]:
    """Colour and dashes by a group's name, so that a name has the same style in every panel."""
    names = dict.fromkeys(group.name for group in groups)
    return {
        name: {"color": COLOURS[i % len(COLOURS)], "linestyle": _DASHES[i // len(COLOURS) % len(_DASHES)]}
        for i, name in enumerate(names)
    }


def _style(group: Group, style: Style) -> Style:
    """The style of a group's name, with a thin line for an unfinished run."""
    return {**style, "linewidth": 0.9} if group.note else style


def _legend_name(group: Group) -> str:
    return short(group.name, 100) + (", unfinished" if group.note else "")


def _draw_group(axes: Axes, group: Group, metric: str, over: Axis, scale: float, style: Style) -> End:
    """Draws the mean of a group's seeds in their band. Where some seeds end, the others continue as dotted lines."""
    measured = [run.curve(metric, over) for run in group.runs]
    curves = [([point / scale for point in xs], ys) for xs, ys in measured]
    x, seeds = _together(curves)
    if len(curves) > 1:
        only_point = 4 if len(x) == 1 else 0
        axes.fill_between(
            x, seeds.min(axis=0), seeds.max(axis=0), color=style["color"], alpha=0.16, linewidth=only_point
        )
        for (xs, ys), seed in zip(curves, seeds, strict=True):
            rest = sum(point < x[-1] for point in xs)
            axes.plot([x[-1], *xs[rest:]], [seed[-1], *ys[rest:]], color=style["color"], linewidth=0.9, linestyle=":")
    mean = seeds.mean(axis=0)
    axes.plot(x, mean, marker=marker(len(x)), **_style(group, style))
    return float(x[-1]), float(mean[-1]), _legend_name(group), {"color": style["color"]}


def _uneven(group: Group, metric: str, over: Axis) -> bool:
    """Whether some seeds of a group were measured further than others."""
    return len({run.curve(metric, over)[0][-1] for run in group.runs}) > 1


def _together(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """The x at which any seed was measured, up to the end of the shortest, and every seed's values there [seeds, x],
    interpolated."""
    begin, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    grid = sorted({point for x, _ in curves for point in x if begin <= point <= end}) or [(begin + end) / 2]
    return np.array(grid), np.array([np.interp(grid, x, y) for x, y in curves])
