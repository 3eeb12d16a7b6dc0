"""Figures of runs: a score against rounds, traffic and time, the training loss, and the picture that one run leaves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fedllm.groups import Group
from fedllm.results import Axis, Run, load_run

Curve = tuple[list[float], list[float]]
Look = dict[str, Any]
End = tuple[float, float, str, Look]  # of a line: x, y, its name, the look of the name

# The colours of Okabe and Ito, which colour-blind readers tell apart, but for their yellow, too faint for a line.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", "-.", ":")
_INK, _FAINT = "#333333", "#707070"
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": 9.0,
    "axes.titlesize": 9.5, "axes.titlelocation": "left", "axes.titleweight": "bold", "axes.titlepad": 9.0,
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
    "axes.edgecolor": _FAINT, "axes.labelcolor": _INK, "axes.xmargin": 0.02, "axes.ymargin": 0.08,
    "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": "#E4E4E4", "grid.linewidth": 0.8,
    "xtick.color": _FAINT, "xtick.labelcolor": _INK, "xtick.major.size": 3.0,
    "ytick.color": _FAINT, "ytick.labelcolor": _INK, "ytick.major.size": 0.0,
    "lines.linewidth": 1.7, "lines.markersize": 3.5, "text.color": _INK, "legend.frameon": False,
    "text.parse_math": False, "svg.hashsalt": "fedllm",
}  # fmt: skip
_FIGURES: dict[str, tuple[Axis, str]] = {
    "score_by_round": ("round", ""),
    "score_by_traffic": ("bytes", ""),
    "score_by_time": ("simulated_seconds", ""),
    "train_loss": ("round", "train_loss"),
}
_TARGET: Look = {"color": _FAINT, "linewidth": 0.9, "linestyle": (0, (4, 3))}
_LEADER: Look = {"arrowstyle": "-", "linewidth": 0.7, "linestyle": ":", "shrinkA": 1, "shrinkB": 3, "relpos": (0, 0.5)}
_UNITS: dict[Axis, tuple[str, list[tuple[float, str]]]] = {
    "round": ("round", [(1, "")]),
    "bytes": ("traffic up and down", [(1e9, "GB"), (1e6, "MB"), (1e3, "kB")]),
    "simulated_seconds": ("simulated run time", [(3600, "h"), (60, "min"), (1, "s")]),
}
_NAMES = {
    "f1": "F1",
    "macro_f1": "macro F1",
    "matthews_correlation": "Matthews correlation",
    "pearson": "Pearson correlation",
    "spearmanr": "Spearman correlation",
}


def figures(groups: Sequence[Group]) -> dict[str, Figure]:
    """score_by_round, score_by_traffic, score_by_time and train_loss, each with a panel a task and a line a group: the
    mean over its seeds, in a band from the lowest seed to the highest."""
    with mpl.rc_context(_STYLE):
        drawn = {name: (_with_points(groups, metric), over, metric) for name, (over, metric) in _FIGURES.items()}
        return {name: _compare(*what) for name, what in drawn.items() if what[0]}


def plot_run(folder: str | Path) -> Path:
    """Draws `curves.png` into a run folder, its headline score and training loss over the rounds, and returns its path.

    Raises UserError if the folder holds no run that can be read.
    """
    run = load_run(folder)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(7.2, 5.0), layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(5, 2))
        _draw_score(top, run)
        top.set_title(f"{run.algorithm} on {run.task}", pad=38, fontsize=12)
        _under_title(top, _subtitle(run))
        x, y = run.curve("train_loss")
        bottom.plot(x, y, color=_INK, linewidth=1.2, marker=_marker(len(x)))
        bottom.set_ylabel("train loss")
        _axis(bottom, "round", run.result["rounds"])
        figure.align_ylabels()
        return save(figure, Path(folder) / "curves.png")


def save(figure: Figure, path: Path) -> Path:
    """Writes a figure; the same figure gives the same bytes, whenever it is written."""
    undated = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    with mpl.rc_context(_STYLE):
        figure.savefig(path, dpi=200, metadata=undated, bbox_inches="tight", pad_inches=0.08)
    return path


def _draw_score(axes: Axes, run: Run) -> None:
    """The headline score of one run with its last value, its best where that is another, and the target."""
    x, y = run.curve(run.primary)
    axes.set_ylabel(metric_name(run.primary) or "score")
    if not x:
        axes.annotate("not evaluated yet", (0.5, 0.5), xycoords="axes fraction", ha="center", color=_FAINT)
        return
    axes.plot(x, y, color=_COLOURS[0], marker=_marker(len(x)))
    axes.plot(x[-1], y[-1], color=_COLOURS[0], marker="o", markersize=5.5)
    ends = [(x[-1], y[-1], f"{y[-1]:.4f}", {"color": _COLOURS[0], "weight": "bold"})]
    best = int(np.argmax(y))
    if y[best] > y[-1]:
        axes.plot(x[best], y[best], color=_COLOURS[0], marker="o", markersize=7.5, markerfacecolor="none")
    _label_ends(axes, ends + _draw_targets(axes, [run.result["target"] or {}], run.primary))


def _subtitle(run: Run) -> str:
    """Two lines: what was federated how, and what came of it."""
    federation, result = run.recipe["federation"], run.result
    score = result["final"].get(run.primary)
    best = result["best"].get(run.primary)
    outcome = [] if score is None else [f"{metric_name(run.primary)} {score:.4f} after {_rounds(result['rounds'])}"]
    if best and score is not None and best["value"] > score:
        outcome.append(f"best {best['value']:.4f} in round {best['round']}")
    if result["target"]:
        hit = result["rounds_to_target"]
        outcome.append("target not reached" if hit is None else f"target reached in round {hit}")
    if not run.finished:
        outcome.append(f"unfinished, {_rounds(federation['rounds'])} planned")
    setting = [*_partition(run.recipe["partition"]), f"{federation['clients_per_round']} a round", f"seed {run.seed}"]
    return " · ".join(setting) + "\n" + " · ".join(outcome)


def _rounds(count: int) -> str:
    return "1 round" if count == 1 else f"{count} rounds"


def _partition(section: dict[str, Any]) -> list[str]:
    """The partition and its clients in words. A file and a column have their own number of clients, not `clients`."""
    if section.get("file"):
        return [f"clients of {Path(section['file']).name}"]
    if section["scheme"] == "by_column":
        return [f"a client for each {section['column']}"]
    schemes = {
        "dirichlet_classes": f"Dirichlet({section.get('alpha')}) over classes",
        "dirichlet_clients": f"Dirichlet({section.get('alpha')}) over clients",
        "shards": f"{section.get('shards_per_client')} shards a client",
        "iid": "IID",
    }
    return [schemes.get(section["scheme"], section["scheme"]), f"{section.get('clients')} clients"]


def _with_points(groups: Sequence[Group], metric: str) -> list[Group]:
    """The groups with at least one point of `metric`, or of their headline score, in every run."""
    return [group for group in groups if all(run.curve(metric or group.metric)[0] for run in group.runs)]


def _compare(groups: Sequence[Group], over: Axis, metric: str = "") -> Figure:
    """One figure of groups: `metric`, or each task's headline score, against `over`. Lines are named at their ends
    where there is one panel and the names fit, else in a legend."""
    panels: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        panels.setdefault((group.task, metric or group.metric), []).append(group)
    one = len(panels) == 1
    named = one and len(groups) <= 10 and all(len(_legend_name(group)) <= 28 for group in groups)
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    height = 3.9 if one else 2.6 * rows
    legend_columns = 3 if one else columns
    legend_height = 0 if named else 0.2 * (len(groups) / legend_columns + 1)
    figure = Figure(figsize=(6.8 if one else 3.4 * columns, height + legend_height), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    looks = _looks(groups)
    note = "mean over seeds, in a band from the lowest to the highest" if any(len(g.runs) > 1 for g in groups) else ""
    for axes, ((task, score), members) in zip(grid, panels.items(), strict=False):
        axes.set_title(task, pad=24 if one and note else None)
        ends = _draw_panel(axes, members, score, over, looks)
        if named:
            _label_ends(axes, ends)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    if one:
        _under_title(grid[0], note)
    if not named:
        targeted = any((metric or group.metric) in group.target for group in groups)
        _legend(figure, groups, looks, targeted, ncols=legend_columns, title="" if one else note)
    return figure


def _draw_panel(axes: Axes, groups: Sequence[Group], metric: str, over: Axis, looks: dict[str, Look]) -> list[End]:
    """The lines of one task, its targets and its axes."""
    axes.set_ylabel(metric_name(metric))
    scale = _axis(axes, over, max(run.curve(metric, over)[0][-1] for group in groups for run in group.runs))
    ends = [_draw_group(axes, group, metric, over, scale, looks[group.name]) for group in groups]
    return ends + _draw_targets(axes, [group.target for group in groups], metric)


def _legend(figure: Figure, groups: Sequence[Group], looks: dict[str, Look], targeted: bool, **layout: Any) -> None:
    handles = {_legend_name(group): Line2D([], [], **_look(group, looks[group.name])) for group in groups}
    if targeted:
        handles["target"] = Line2D([], [], **_TARGET)
    figure.legend(list(handles.values()), list(handles), alignment="left", loc="outside lower left", **layout)


def _under_title(axes: Axes, text: str) -> None:
    axes.annotate(text, (0, 1), (0, 9), "axes fraction", "offset points", color=_FAINT, linespacing=1.5)


def _looks(groups: Sequence[Group]) -> dict[str, Look]:
    """Colour and dashes by a group's name, so that a name looks the same in every panel."""
    names = dict.fromkeys(group.name for group in groups)
    return {
        name: {"color": _COLOURS[i % len(_COLOURS)], "linestyle": _DASHES[i // len(_COLOURS) % len(_DASHES)]}
        for i, name in enumerate(names)
    }


def _look(group: Group, look: Look) -> Look:
    """An unfinished run has its recipe's look, in a thin line."""
    return {**look, "linewidth": 0.9} if group.note else look


def _legend_name(group: Group) -> str:
    return f"{group.name}, unfinished" if group.note else group.name


def _draw_group(axes: Axes, group: Group, metric: str, over: Axis, scale: float, look: Look) -> End:
    """The mean of a group's seeds in their band; where some seeds have ended, the others go on as thin lines."""
    measured = [run.curve(metric, over) for run in group.runs]
    curves = [([point / scale for point in xs], ys) for xs, ys in measured]
    x, seeds = _together(curves)
    if len(curves) > 1:
        only_point = 4 if len(x) == 1 else 0
        axes.fill_between(
            x, seeds.min(axis=0), seeds.max(axis=0), color=look["color"], alpha=0.16, linewidth=only_point
        )
        for xs, ys in curves:
            rest = sum(point < x[-1] for point in xs)
            axes.plot(xs[rest:], ys[rest:], color=look["color"], linewidth=0.6, alpha=0.7)
    mean = seeds.mean(axis=0)
    axes.plot(x, mean, marker=_marker(len(x)), **_look(group, look))
    return float(x[-1]), float(mean[-1]), _legend_name(group), {"color": look["color"]}


def _together(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """The x at which any seed was measured, as far as all seeds go, and every seed there [seeds, x], interpolated."""
    begin, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    grid = sorted({point for x, _ in curves for point in x if begin <= point <= end}) or [(begin + end) / 2]
    return np.array(grid), np.array([np.interp(grid, x, y) for x, y in curves])


def _draw_targets(axes: Axes, targets: Sequence[dict[str, float]], metric: str) -> list[End]:
    """A dashed line at each target of the metric."""
    values = sorted({target[metric] for target in targets if metric in target})
    for value in values:
        axes.axhline(value, zorder=1, **_TARGET)
    right = axes.get_xlim()[1]
    return [(right, value, f"target {value:g}", {"color": _FAINT}) for value in values]


def _label_ends(axes: Axes, ends: Sequence[End]) -> None:
    """Each line's name right of the axes at the height of its end, moved up or down where two would overlap."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # lays the axes out: their height in points is needed
    low, high = axes.get_ylim()
    axes.set_ylim(low, high)
    gap = 12.5 / (axes.get_window_extent().height * 72 / figure.dpi)
    ends = sorted(ends, key=lambda end: end[1])
    heights = _apart([(y - low) / (high - low) for _, y, _, _ in ends], gap)
    for (x, y, text, look), height in zip(ends, heights, strict=True):
        axes.annotate(
            text, (x, y), (1.025, height), "data", "axes fraction", va="center", annotation_clip=False,
            arrowprops={**_LEADER, "color": look["color"]}, **look,
        )  # fmt: skip


def _apart(heights: list[float], gap: float) -> list[float]:
    """Sorted heights, moved as little as it takes to be `gap` apart."""
    heights = list(heights)
    for _ in range(200):
        for i in range(len(heights) - 1):
            overlap = gap - (heights[i + 1] - heights[i])
            if overlap > 0:
                heights[i] -= overlap / 2
                heights[i + 1] += overlap / 2
    return heights


def _axis(axes: Axes, over: Axis, longest: float) -> float:
    """Labels the x axis with its unit, fit for values up to `longest`, and returns what one of that unit is."""
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=over == "round", steps=[1, 2, 5, 10], min_n_ticks=1))
    name, units = _UNITS[over]
    size, unit = next((known for known in units if longest >= 2 * known[0]), units[-1])
    axes.set_xlabel(f"{name} ({unit})" if unit else name)
    return size


def _marker(points: int) -> str | None:
    return "o" if points <= 20 else None


def metric_name(metric: str) -> str:
    """A metric's name as people write it."""
    return _NAMES.get(metric, metric.replace("_", " "))
