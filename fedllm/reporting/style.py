"""The style of all figures: colours, axes, names at the ends of lines, and how a figure is written to a file."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, StrMethodFormatter

from fedllm.common.errors import UserError
from fedllm.results.format import Axis

Style = dict[str, Any]
End = tuple[float, float, str, Style]  # of a line: x, y, its name, the style of the name

SUFFIXES = (".png", ".svg", ".pdf")
# The colours of Okabe and Ito, which colour-blind readers can tell apart, without their yellow: too faint for a line.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
INK, FAINT, GRID, PAPER = "#333333", "#707070", "#E4E4E4", "#ffffff"
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": 9.0,
    "axes.titlesize": 9.5, "axes.titlelocation": "left", "axes.titleweight": "bold", "axes.titlepad": 9.0,
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
    "axes.edgecolor": FAINT, "axes.labelcolor": INK, "axes.xmargin": 0.02, "axes.ymargin": 0.08,
    "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": GRID, "grid.linewidth": 0.8,
    "xtick.color": FAINT, "xtick.labelcolor": INK, "xtick.major.size": 3.0,
    "ytick.color": FAINT, "ytick.labelcolor": INK, "ytick.major.size": 0.0, "ytick.minor.size": 0.0,
    "lines.linewidth": 1.7, "lines.markersize": 3.5, "text.color": INK, "legend.frameon": False,
    "text.parse_math": False, "svg.hashsalt": "fedllm",
}  # fmt: skip
TARGET: Style = {"color": FAINT, "linewidth": 0.9, "linestyle": (0, (4, 3))}
_LEADER: Style = {"arrowstyle": "-", "linewidth": 0.7, "linestyle": ":", "shrinkA": 1, "shrinkB": 3, "relpos": (0, 0.5)}
_UNITS: dict[Axis, tuple[str, list[tuple[float, str]]]] = {
    "round": ("round", [(1, "")]),
    "bytes": ("traffic up and down", [(1e9, "GB"), (1e6, "MB"), (1e3, "kB")]),
    "epsilon": ("epsilon", [(1, "")]),
    "simulated_seconds": ("simulated run time", [(3600, "h"), (60, "min"), (1, "s")]),
}


def require_drawable(path: Path) -> None:
    """Raises UserError unless a command's `--draw PATH` names a picture of a known kind in a folder that exists."""
    if path.suffix not in SUFFIXES:
        raise UserError(f"--draw {path}: found suffix '{path.suffix}', expected {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise UserError(f"--draw {path}: no such folder: {path.parent}")


def save(figure: Figure, path: Path) -> Path:
    """Writes a figure to a temporary file and renames it. The same figure gives the same bytes at any time."""
    undated = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with _drawing():
            figure.savefig(
                aside, format=path.suffix[1:], dpi=200, metadata=undated, bbox_inches="tight", pad_inches=0.08
            )
        return aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def svg(figure: Figure) -> str:
    """The figure as the text of an SVG file without metadata."""
    text = io.StringIO()
    none = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with _drawing():
        figure.savefig(text, format="svg", metadata=none, bbox_inches="tight", pad_inches=0.08)
    return text.getvalue()


@contextlib.contextmanager
def _drawing() -> Iterator[None]:
    """The style, without the warning about a character that the font lacks: it is drawn as a box."""
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph .* missing from")
        yield


def short(text: str, length: int) -> str:
    """The text, cut to `length` characters where it is longer."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def set_axis(axes: Axes, over: Axis, longest: float) -> float:
    """Labels the x axis with a unit that suits values up to `longest`, and returns the size of that unit."""
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=over == "round", steps=[1, 2, 5, 10], min_n_ticks=1))
    name, units = _UNITS[over]
    size, unit = next((known for known in units if longest >= 2 * known[0]), units[-1])
    axes.set_xlabel(f"{name} ({unit})" if unit else name)
    return size


def set_log(axes: Axes) -> None:
    """A logarithmic y axis with plain numbers at its powers of ten."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def marker(points: int) -> str | None:
    """The marker of a line: dots where it has 20 points or fewer."""
    return "o" if points <= 20 else None


def under_title(axes: Axes, text: str) -> None:
    """Faint text between the title and the axes."""
    axes.annotate(text, (0, 1), (0, 9), "axes fraction", "offset points", color=FAINT, linespacing=1.5)


def draw_targets(axes: Axes, targets: Sequence[dict[str, float]], metric: str) -> list[End]:
    """A dashed line at each target of the metric."""
    values = sorted({target[metric] for target in targets if metric in target})
    for value in values:
        axes.axhline(value, zorder=1, **TARGET)
    right = axes.get_xlim()[1]
    return [(right, value, f"target {value:g}", {"color": FAINT}) for value in values]


def label_ends(axes: Axes, ends: Sequence[End]) -> None:
    """Writes each line's name right of the axes at the height of its end, moved up or down where two would overlap."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    with _drawing():
        figure.draw_without_rendering()  # computes the layout: the height of the axes in points is needed
    axes.set_ylim(axes.get_ylim())
    gap = 12.5 / (axes.get_window_extent().height * 72 / figure.dpi)
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = sorted(ends, key=lambda end: end[1])
    heights = apart([float(to_axes.transform((x, y))[1]) for x, y, _, _ in ends], gap)
    for (x, y, text, style), height in zip(ends, heights, strict=True):
        axes.annotate(
            text, (x, y), (1.025, height), "data", "axes fraction", va="center", annotation_clip=False,
            arrowprops={**_LEADER, "color": style["color"]}, **style,
        )  # fmt: skip


def apart(heights: list[float], gap: float) -> list[float]:
    """Sorted heights, moved by as little as makes neighbours `gap` apart."""
    heights = list(heights)
    for _ in range(200):
        for i in range(len(heights) - 1):
            overlap = gap - (heights[i + 1] - heights[i])
            if overlap > 0:
                heights[i] -= overlap / 2
                heights[i + 1] += overlap / 2
    return heights
