"""The figure of a partition: how many samples each client has, and of which classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator

from fedllm.reporting.curves import drawn_without
from fedllm.reporting.groups import Group, full_name
from fedllm.reporting.run_curves import partition_words
from fedllm.reporting.style import COLOURS, FAINT, STYLE, set_log, short
from fedllm.results.names import printable
from fedllm.results.run_record import ClientData

_STACKED = len(COLOURS)  # the most classes shown by colour; with more, each class has a row of its own
_NAMED = 24  # the most classes, or clients, named on an axis


def client_figure(groups: Sequence[Group]) -> Figure | None:
    """One panel per partition of a data set; None if no run has a partition.json. groups: of one data set.

    Above, the samples of each client. Below, if samples have classes, the share of each: as stacked bars, or with many
    classes as bubbles whose area is the share.
    """
    panels = _partitions(groups)
    return _draw(panels) if panels else None


def partition_figure(
    clients: ClientData, task: str, section: Mapping[str, Any], names: Sequence[str] | None = None
) -> Figure:
    """The panel of one partition, before a run. task: the data set's title. section: the recipe's `partition:`.
    names: of the clients, which stand on the axis where they are few."""
    return _draw({_title(task, section, clients): clients}, names)


def _draw(panels: Mapping[str, ClientData], names: Sequence[str] | None = None) -> Figure:
    columns = 1 if len(panels) <= 3 else 2
    rows = -(-len(panels) // columns)
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        heights = [0.9 + _height(clients) for clients in panels.values()]
        tallest = [max(heights[row * columns : (row + 1) * columns]) for row in range(rows)]
        figure = Figure(figsize=(6.8 if columns == 1 else 9.6, sum(tallest)), layout="constrained")
        parts = figure.subfigures(rows, columns, squeeze=False, height_ratios=tallest).flatten()
        for part, (title, clients) in zip(parts, panels.items(), strict=False):
            if not clients.counts:
                bottom = part.subplots()
                _draw_sizes(bottom, clients)
            else:
                top, bottom = part.subplots(2, 1, sharex=True, height_ratios=(0.55, _height(clients) - 0.3))
                _draw_sizes(top, clients)
                _draw_classes(bottom, clients)
            part.axes[0].set_title(short(title, 90))
            _label_clients(bottom, len(clients.sizes), names)
            part.align_ylabels()
    return figure


def without_clients(groups: Sequence[Group]) -> list[str]:
    """A line that names the groups without a partition.json, if there are any."""
    silent = [full_name(group, groups) for group in groups if not any(run.clients for run in group.runs)]
    why = "no partition.json in the run folder, as in runs of older versions of fedllm"
    return [drawn_without("Clients' labels", silent, len(groups), why)] if silent else []


def _partitions(groups: Sequence[Group]) -> dict[str, ClientData]:
    """Every partition once, by a title that no other one has."""
    found: dict[str, ClientData] = {}
    for group in groups:
        for run in group.runs:
            if run.clients is None or run.clients in found.values():
                continue
            section = run.recipe["partition"]
            title = _title(group.task, section, run.clients)
            seeded = printable(f"{title} · partition seed {section.get('seed')}")
            foldered = printable(f"{title} · {run.folder}")
            found[next(name for name in (title, seeded, foldered) if name not in found)] = run.clients
    return found


def _title(task: str, section: Mapping[str, Any], clients: ClientData) -> str:
    return f"{task} · {partition_words(section, clients.column)}"


def _height(clients: ClientData) -> float:
    """The height in inches of the panel of classes."""
    classes = len(clients.classes) if clients.counts else 0
    return 1.5 if classes <= _STACKED else min(0.17 * classes + 0.5, 6)


def _draw_sizes(axes: Axes, clients: ClientData) -> None:
    sizes = np.array(clients.sizes)
    wide = sizes.max() > 20 * max(sizes.min(), 1)
    floor = 0.5 if wide else 0.0
    _bars(axes, np.full(len(sizes), floor), np.maximum(sizes, floor), FAINT)
    axes.set_ylim(floor, sizes.max() * (1.6 if wide else 1.08) or 1)
    axes.set_ylabel("samples")
    if wide:
        set_log(axes)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(2, integer=True))


def _label_clients(axes: Axes, count: int, names: Sequence[str] | None) -> None:
    axes.set_xlabel("client")
    axes.set_xlim(-0.8, count - 0.2)
    if names is not None and count <= _NAMED:
        axes.set_xticks(range(count), [short(printable(name), 20) for name in names], rotation=35, ha="right")
    else:
        axes.xaxis.set_major_locator(MaxNLocator(10, integer=True, steps=[1, 2, 5, 10]))


def _draw_classes(axes: Axes, clients: ClientData) -> None:
    counts = np.array(clients.counts, dtype=float)
    shares = counts / counts.sum(axis=1, keepdims=True).clip(min=1)
    names = [short(printable(name), 28) for name in clients.classes]
    if len(names) <= _STACKED:
        edges = np.concatenate([np.zeros((len(shares), 1)), shares.cumsum(axis=1)], axis=1)
        for i in range(len(names)):
            _bars(axes, edges[:, i], edges[:, i + 1], COLOURS[i])
        axes.set_ylim(0, 1)
        axes.set_yticks([0, 0.5, 1])
        axes.set_ylabel("share")
        keys = [Patch(color=colour, label=name) for colour, name in zip(COLOURS, names, strict=False)]
        axes.legend(
            handles=keys,
            title=printable(clients.column) if clients.column else None,
            loc="upper left",
            bbox_to_anchor=(1, 1.03),
            handlelength=0.9,
            handleheight=0.9,
            reverse=True,
        )
    else:
        client, label = np.nonzero(shares)
        widest = min(1000 / len(shares), 11)  # points: a bubble of all samples of a client
        axes.scatter(client, label, widest**2 * shares[client, label], COLOURS[0], alpha=0.65, linewidths=0)
        axes.set_ylim(len(names) - 0.3, -0.7)
        axes.tick_params(axis="y", labelsize=7.5)
        axes.set_axisbelow(True)
        axes.grid(True, axis="y", linewidth=0.5)
        if len(names) <= _NAMED:
            axes.set_yticks(range(len(names)), names)
        else:
            axes.yaxis.set_major_locator(MaxNLocator(12, integer=True))
            axes.set_ylabel(printable(clients.column or "class"))


def _bars(axes: Axes, low: np.ndarray, high: np.ndarray, colour: str) -> None:
    """One bar per client, drawn as one path, so that the file of a thousand clients stays small."""
    middle = np.arange(len(low))
    half = 0.42 if len(low) <= 60 else 0.5 if len(low) > 150 else 0.46
    left, right = middle - half, middle + half
    corners = np.stack([np.stack([left, low], 1), np.stack([left, high], 1), np.stack([right, high], 1),
                        np.stack([right, low], 1), np.stack([left, low], 1)], axis=1)  # fmt: skip
    axes.add_patch(PathPatch(Path.make_compound_path_from_polys(corners), facecolor=colour, linewidth=0))
