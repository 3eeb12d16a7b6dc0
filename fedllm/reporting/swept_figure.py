"""The figure of swept settings: rounds to the target, or the final score, over the value of a setting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from fedllm.reporting.curves import drawn_without
from fedllm.reporting.groups import Group, full_name
from fedllm.reporting.style import COLOURS, FAINT, PAPER, STYLE, End, Style, label_ends, short, under_title
from fedllm.reporting.swept import Panel, Point

NAME = "swept"
TITLE = "Over the swept setting"
CAPTION = (
    "Means over seeds, with the standard deviation as bars. A line holds runs that are equal but for this setting and "
    "the seed. An open marker with >N: not every seed reached the target, and one that did not counts with the rounds "
    "that it ran. Numbers: swept.csv."
)
_DASHES = ("-", "--", "-.", ":")
_NOTE = "mean over seeds; bars: standard deviation"
_BOUND = "open: target not reached by every seed"
_MOST_TICKS = 8


def swept_figure(panels: Sequence[Panel]) -> Figure | None:
    """One panel per swept setting of a data set; None without panels. Names stand at the ends of the lines where there
    is one panel and they fit, else in a legend."""
    if not panels:
        return None
    styles = _styles(panels)
    one = len(panels) == 1
    named = one and len(styles) <= 10 and all(len(name) <= 28 for name in styles)
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    width = 6.8 if one else 3.4 * columns
    legend_columns = max(1, min(3, int(14 * width / (max(map(len, styles)) + 6))))  # 14 letters an inch, 6 for the line
    height = (3.9 if one else 2.8 * rows) + (0 if named else 0.2 * (len(styles) / legend_columns + 1))
    note = _note(panels)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).flatten()
        grid[0].set_title(short(panels[0].task, 40), pad=24 if one and note else None)
        for axes, panel in zip(grid, panels, strict=False):
            ends = _draw(axes, panel, styles)
            if named:
                label_ends(axes, ends)
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        if one:
            under_title(grid[0], note)
        if not named:
            _legend(figure, styles, ncols=legend_columns, title="" if one else note)
    return figure


def _styles(panels: Sequence[Panel]) -> dict[str, Style]:
    """Colour and dashes by a line's name, the same in every panel."""
    names = dict.fromkeys(name for panel in panels for name in panel.lines)
    return {
        name: {"color": COLOURS[i % len(COLOURS)], "linestyle": _DASHES[i // len(COLOURS) % len(_DASHES)]}
        for i, name in enumerate(names)
    }


def _note(panels: Sequence[Panel]) -> str:
    """What bars and open markers are, if there are any."""
    points = [point for panel in panels for line in panel.lines.values() for point in line]
    bars = [_NOTE] if any(point.seeds > 1 for point in points) else []
    return "; ".join([*bars, *([_BOUND] if any(point.is_bound for point in points) else [])])


def _legend(figure: Figure, styles: dict[str, Style], **layout: Any) -> None:
    handles = [Line2D([], [], **style) for style in styles.values()]
    names = [short(name, 100) for name in styles]
    figure.legend(handles, names, alignment="left", loc="outside lower left", **layout)


def without_swept(groups: Sequence[Group], panels: Sequence[Panel]) -> list[str]:
    """A line that names the unfinished groups, if there is a figure, which has only finished ones.

    panels: those of the figure.
    """
    unfinished = [full_name(group, groups) for group in groups if group.note]
    if not unfinished or not panels:
        return []
    return [drawn_without(TITLE, unfinished, len(groups), "unfinished runs have no final values")]


def _draw(axes: Axes, panel: Panel, styles: dict[str, Style]) -> list[End]:
    """Draws the lines of a panel and returns their ends."""
    if panel.is_logarithmic:
        axes.set_xscale("log")
    if len(panel.values) <= _MOST_TICKS:
        axes.xaxis.set_major_locator(FixedLocator(panel.values))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_xlabel(short(panel.setting, 40))
    axes.set_ylabel(short(panel.measure, 36))
    ends = [_draw_line(axes, name, points, styles[name]) for name, points in panel.lines.items()]
    if panel.target is not None:
        axes.set_ylim(bottom=0)
    return ends


def _draw_line(axes: Axes, name: str, points: Sequence[Point], style: Style) -> End:
    """Draws a line, bars, closed markers, and open ones with their ">N"."""
    colour = style["color"]
    axes.plot([point.x for point in points], [point.y for point in points], **style)
    for point in points:
        face = PAPER if point.is_bound else colour
        bar = point.deviation if point.seeds > 1 else None
        axes.errorbar(
            point.x, point.y, yerr=bar, color=colour, marker="o", markersize=4.5, markerfacecolor=face, capsize=2,
            elinewidth=1,
        )  # fmt: skip
        if point.is_bound:
            least = f"{point.y:,.1f}".removesuffix(".0")
            axes.annotate(f">{least}", (point.x, point.y), (4, 5), textcoords="offset points", color=FAINT)
    return points[-1].x, points[-1].y, name, {"color": colour}
