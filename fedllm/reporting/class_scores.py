"""The scores of the classes: the quantities of their table, and the figure of confusion matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedllm.reporting.groups import Group, full_name
from fedllm.reporting.quantities import Quantity
from fedllm.reporting.style import STYLE, short
from fedllm.results.names import printable
from fedllm.results.run_files import OfClasses
from fedllm.results.run_record import RunRecord

NAME = "confusion"
TITLE = "Confusion of classes"
CAPTION = (
    "Rows: the class of a validation sample. Columns: the class that the final model predicts, as a share of the row, "
    "means over seeds; so the diagonal is the recall. Drawn are at most six groups, and at most 100 classes; "
    "result.json has the counts."
)
NOTE = (
    "On the validation split, by the final model. balanced accuracy: the mean of the classes' recall. macro AUROC: the "
    "mean over the classes of the area under the ROC curve of a class against all others."
)
_PANELS = 6
_WRITTEN = 8  # the most classes whose shares are written into the cells
_NAMED = 40  # the most classes named on the axes
_MOST = 100  # the most classes that are drawn
_ON_LIGHT, _ON_DARK = "#222222", "#fefefe"  # of text on a cell; the page's dark colours leave them as they are


def class_quantities(groups: Sequence[Group]) -> list[Quantity]:
    """The columns of the table; [] where no run of these groups has scores by class."""
    if not any(of_classes(run) for group in groups for run in group.runs):
        return []
    return [
        _of("balanced accuracy", lambda found: found["balanced_accuracy"]),
        _of("macro AUROC", lambda found: found["macro_auroc"]),
        _of("lowest recall", lambda found: min(_known(found["recall"]), default=None)),
        _of("lowest precision", lambda found: min(_known(found["precision"]), default=None)),
    ]


def of_classes(run: RunRecord) -> OfClasses | None:
    """The run's scores by class, if it has them."""
    return run.result.get("by_class")


def _of(heading: str, read: Callable[[OfClasses], float | None]) -> Quantity:
    def value(run: RunRecord) -> float | None:
        found = of_classes(run)
        return None if found is None else read(found)

    return Quantity(heading.replace(" ", "_").lower(), heading, 4, value, "highest")


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def confusion_figure(groups: Sequence[Group]) -> Figure | None:
    """One panel per group with scores by class; None if no group has them. groups: of one data set."""
    drawn = [(full_name(group, groups), found) for group in groups if (found := _shares(group)) is not None][:_PANELS]
    if not drawn:
        return None
    columns = min(len(drawn), 2 if len(drawn[0][1][0]) > _WRITTEN else 3)
    rows = -(-len(drawn) // columns)
    side = min(3.0 + 0.12 * len(drawn[0][1][0]), 6.8)
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(max(side * columns, 4.2), side * rows), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).flatten()
        for axes, (name, (names, shares)) in zip(grid, drawn, strict=False):
            axes.set_title(short(name, 40))
            _draw(axes, names, shares)
        for axes in grid[len(drawn) :]:
            axes.set_visible(False)
    return figure


def _shares(group: Group) -> tuple[list[str], np.ndarray] | None:
    """The names of the classes, and the means over seeds of the shares [C, C] of predictions by class; None where a
    seed has none, and for more than _MOST classes."""
    found = [told for run in group.runs if (told := of_classes(run)) is not None]
    if len(found) < len(group.runs) or len({tuple(told["names"]) for told in found}) != 1:
        return None
    if len(found[0]["names"]) > _MOST:
        return None
    counts = [np.array(told["confusion"], float) / np.array(told["samples"]).clip(min=1)[:, None] for told in found]
    return found[0]["names"], np.mean(counts, axis=0)


def _draw(axes: Axes, names: Sequence[str], shares: np.ndarray) -> None:
    axes.pcolormesh(shares, cmap="Blues", vmin=0, vmax=1, edgecolors="none")
    axes.set_aspect("equal")
    axes.invert_yaxis()
    axes.set_xlabel("predicted")
    axes.set_ylabel("class")
    places = [number + 0.5 for number in range(len(names))]
    axes.set_xticks([])
    axes.set_yticks([])
    if len(names) <= _NAMED:
        shown = [short(printable(name), 18) for name in names]
        upright = len(shown) <= _WRITTEN and max(map(len, shown)) <= 5
        axes.set_xticks(places, shown, rotation=0 if upright else 45, ha="center" if upright else "right")
        axes.set_yticks(places, shown)
    if len(names) <= _WRITTEN:
        for (row, column), share in np.ndenumerate(shares):
            colour = _ON_DARK if share > 0.6 else _ON_LIGHT
            place = column + 0.5, row + 0.5
            axes.text(*place, f"{share:.2f}", ha="center", va="center", color=colour, fontsize=8)
