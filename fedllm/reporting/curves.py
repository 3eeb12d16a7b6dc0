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
_BAND = "line: mean over seeds; band: lowest to highest seed"
_BAND_AND_ENDS = f"{_BAND}; a seed that has ended keeps its last value"
_KEPT = (
    "The seeds of a group end at different times. A seed that has ended keeps its last value until the slowest seed of "
    "its group ends, so that every line ends at the mean of the final values."
)


@dataclass(frozen=True)
class Plot:
    """A kind of figure: one panel per metric, over an axis. Without metrics: the headline score."""

    title: str
    caption: str
    over: Axis
    metrics: tuple[str, ...] = ()


PLOTS = {
    "score_by_round": Plot("Score over rounds", "", "round"),
    "score_by_traffic": Plot("Score over bytes", "Bytes that all clients together have sent and received.", "bytes"),
    "score_by_time": Plot(
        "Score over simulated time",
        "A round takes as long as its slowest client needs to compute and to send, at costs.bandwidth_mbit.",
        "simulated_seconds",
    ),
    "score_by_epsilon": Plot(
        "Score over epsilon",
        "Epsilon at privacy.delta, of what was released up to a round; runs without privacy have none.",
        "epsilon",
    ),
    "train_loss": Plot(
        "Training loss", "Mean over the clients of a round and their local steps.", "round", ("train_loss",)
    ),
    "client_drift": Plot(
        "Client drift",
        "Left: cosine between a client's update and the mean update; 1 if all updates have the same direction. "
        "Right: norm of a client's update. Both are means over the clients of a round.",
        "round",
        ("update_cosine", "update_norm"),
    ),
    "v_spread": Plot(
        "Spread of v between clients",
        "Standard deviation of the second moment v over the clients of a round, divided by the mean v and weighted by "
        "it; 0 if all clients have the same v.",
        "round",
        ("v_spread",),
    ),
}  # fmt: skip


def figures(groups: Sequence[Group]) -> dict[str, Figure]:
    """The figures of PLOTS for which there are data: one panel per metric, one line per group with the mean over its
    seeds, in a band from the lowest seed to the highest. A group is drawn if every seed has the metric.

    groups: of one data set."""
    with mpl.rc_context(STYLE):
        panels = {name: _panels(groups, plot) for name, plot in PLOTS.items()}
        styles = _styles(groups)
        return {name: _compare(panels[name], plot, styles) for name, plot in PLOTS.items() if panels[name]}


def captions(groups: Sequence[Group]) -> dict[str, str]:
    """The caption of each of PLOTS for the groups of one data set."""
    found = {}
    for name, plot in PLOTS.items():
        uneven = any(_uneven(*drawn, plot.over) for drawn in _drawn(_panels(groups, plot)))
        parts = [] if plot.metrics else [_validation(groups)]
        found[name] = " ".join(filter(None, [*parts, plot.caption, _KEPT if uneven else ""]))
    return found


def _validation(groups: Sequence[Group]) -> str:
    """On which samples the scores were measured."""
    limits: set[Any] = {run.recipe["data"].get("max_validation") for group in groups for run in group.runs}
    if None in limits:
        return "Scores on the whole validation split."
    return f"Scores on at most {max(limits):,} samples of the validation split (data.max_validation)."


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


Panels = dict[str, list[Group]]  # the groups that have a metric


def _panels(groups: Sequence[Group], plot: Plot) -> Panels:
    panels: Panels = {}
    for group in groups:
        for metric in plot.metrics or (group.metric,):
            if all(run.curve(metric, plot.over)[0] for run in group.runs):
                panels.setdefault(metric, []).append(group)
    return panels


def _drawn(panels: Panels) -> list[tuple[Group, str]]:
    """Every line of a figure: its group and metric."""
    return [(group, metric) for metric, members in panels.items() for group in members]


def _compare(panels: Panels, plot: Plot, styles: dict[str, Style]) -> Figure:
    """One figure. Names stand at the ends of the lines where there is one panel and they fit, else in a legend."""
    groups = list({id(group): group for members in panels.values() for group in members}.values())
    one = len(panels) == 1
    named = one and len(groups) <= 10 and all(len(_legend_name(group)) <= 28 for group in groups)
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    height = 3.9 if one else 2.6 * rows
    width = 6.8 if one else 3.4 * columns
    longest = max(len(_legend_name(group)) for group in groups)
    legend_columns = max(1, min(3, int(14 * width / (longest + 6))))  # 14 letters an inch, 6 for the line before a name
    legend_height = 0 if named else 0.2 * (len(groups) / legend_columns + 1)
    figure = Figure(figsize=(width, height + legend_height), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    note = _BAND if any(len(group.runs) > 1 for group in groups) else ""
    if any(_uneven(*drawn, plot.over) for drawn in _drawn(panels)):
        note = _BAND_AND_ENDS
    grid[0].set_title(short(groups[0].task, 40), pad=24 if one and note else None)
    for axes, (metric, members) in zip(grid, panels.items(), strict=False):
        ends = _draw_panel(axes, members, metric, plot.over, styles)
        if named:
            label_ends(axes, ends)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    if one:
        under_title(grid[0], note)
    if not named:
        targeted = any(metric in target for group, metric in _drawn(panels) for target in group.targets)
        _legend(figure, groups, styles, targeted, ncols=legend_columns, title="" if one else note)
    return figure


def _draw_panel(axes: Axes, groups: Sequence[Group], metric: str, over: Axis, styles: dict[str, Style]) -> list[End]:
    """Draws the lines of one metric, the targets and the axes. Norms of different magnitudes get a logarithmic axis.
    Returns the ends of the lines."""
    axes.set_ylabel(short(metric_name(metric), 36))
    scale = set_axis(axes, over, max(run.curve(metric, over)[0][-1] for group in groups for run in group.runs))
    if metric == "update_norm":
        values = [value for group in groups for run in group.runs for value in run.curve(metric)[1]]
        if 0 < 20 * min(values) < max(values):
            set_log(axes)
    ends = [_draw_group(axes, group, metric, over, scale, styles[group.name]) for group in groups]
    return ends + draw_targets(axes, [target for group in groups for target in group.targets], metric)


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
    """Draws the mean of a group's seeds in their band."""
    measured = [run.curve(metric, over) for run in group.runs]
    x, seeds = _together([([point / scale for point in xs], ys) for xs, ys in measured])
    if len(measured) > 1:
        only_point = 4 if len(x) == 1 else 0
        axes.fill_between(
            x, seeds.min(axis=0), seeds.max(axis=0), color=style["color"], alpha=0.16, linewidth=only_point
        )
    mean = seeds.mean(axis=0)
    axes.plot(x, mean, marker=marker(len(x)), **_style(group, style))
    return float(x[-1]), float(mean[-1]), _legend_name(group), {"color": style["color"]}


def _uneven(group: Group, metric: str, over: Axis) -> bool:
    """Whether some seeds of a group were measured further than others."""
    return len({run.curve(metric, over)[0][-1] for run in group.runs}) > 1


def _together(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """The x at which any seed was measured, from where all have been measured to the end of the longest, and every
    seed's values there [seeds, x], interpolated. A seed that has ended keeps its last value, so the means end at the
    mean of the final values."""
    begin = max(x[0] for x, _ in curves)
    grid = sorted({point for x, _ in curves for point in x if begin <= point})
    return np.array(grid), np.array([np.interp(grid, x, y) for x, y in curves])
