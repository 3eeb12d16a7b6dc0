"""The two figures of the theory study."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from fedllm.reporting.style import COLOURS, STYLE, TARGET, label_ends, set_log, under_title
from fedllm.studies.theory import ALGORITHMS, Findings, Point

_ERROR = "mean |grad f(x)|²"
_DASHES = ("-", "-", "--")  # FA-NT and LocalAdam are nearly equal: the one must show below the other
_NAMES = {"fadamgc": "FAdamGC", "fa_nt": "FA-NT", "localadam": "LocalAdam"}


def draw(findings: Findings) -> dict[str, Figure]:
    """The figures by the names of their files: the mean over seeds, and bars from the lowest seed to the highest."""
    return {"theory_speed_up": _speed_up(findings), "theory_heterogeneity": _heterogeneity(findings)}


def _speed_up(findings: Findings) -> Figure:
    """The error over S, beside a line that falls as 1/S."""
    figure, axes = _axes("Linear speed-up", "sampled clients S")
    points = findings.speed_up
    sampled = [point.setting.sampled for point in points]
    end = _line(axes, sampled, points, COLOURS[0])
    guide = [points[0].mean / s for s in sampled]
    axes.plot(sampled, guide, **TARGET)
    ends = [(*end, "FAdamGC", {"color": COLOURS[0]}), (sampled[-1], guide[-1], "1/S", {"color": TARGET["color"]})]
    label_ends(axes, ends)
    return figure


def _heterogeneity(findings: Findings) -> Figure:
    """The error of each algorithm over the spread of the clients' minimisers."""
    figure, axes = _axes("Bounded heterogeneity", "spread of the clients' minimisers")
    ends = []
    for name, colour, dashes in zip(ALGORITHMS, COLOURS, _DASHES, strict=False):
        points = findings.line(name)
        end = _line(axes, [point.setting.spread for point in points], points, colour, dashes)
        ends.append((*end, _NAMES[name], {"color": colour}))
    label_ends(axes, ends)
    return figure


def _axes(title: str, over: str) -> tuple[Figure, Axes]:
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.4, 3.4), layout="constrained")
        axes = figure.subplots()
        axes.set_title(title, pad=24)
        axes.set_xscale("log")
        set_log(axes)
        axes.set_xlabel(over)
        axes.set_ylabel(_ERROR)
        under_title(axes, "mean over seeds; bars: lowest to highest seed")
    return figure, axes


def _line(
    axes: Axes, x: Sequence[float], points: Sequence[Point], colour: str, dashes: str = "-"
) -> tuple[float, float]:
    """Draws the points of one line, and returns its end."""
    means = np.array([point.mean for point in points])
    seeds = np.array([point.gradient for point in points])
    bars = [means - seeds.min(axis=1), seeds.max(axis=1) - means]
    axes.errorbar(x, means, yerr=bars, color=colour, linestyle=dashes, marker="o", markersize=4, capsize=2)
    axes.xaxis.set_major_locator(FixedLocator(list(x)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    return float(x[-1]), float(means[-1])
