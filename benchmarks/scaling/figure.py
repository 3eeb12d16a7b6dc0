"""The figure of benchmarks.scaling.measure.

python -m benchmarks.scaling.figure benchmarks/results/scaling/measure.json
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_BLUE, _RED, _GREY = "#0072B2", "#D55E00", "#707070"
_PHASES = ("#000000", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#D55E00")
_STYLE: dict[Any, Any] = {
    "font.size": 9.0, "axes.titlesize": 9.5, "axes.titlelocation": "left", "axes.titleweight": "bold",
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "grid.color": "#E4E4E4", "lines.linewidth": 1.7, "lines.markersize": 4.5, "legend.frameon": False,
}  # fmt: skip


def draw(found: dict[str, Any], path: Path) -> None:
    """Cost per sampled client, memory, and start-up, from the content of measure.json."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(9.6, 3.1), layout="constrained")
        cost, memory, startup = figure.subplots(1, 3, width_ratios=(1, 1, 1.15))
        _cost(cost, found)
        _memory(memory, found)
        _startup(startup, found)
        figure.savefig(path, dpi=200)


def _cost(axes: Axes, found: dict[str, Any]) -> None:
    for name, batch, marker, place in (("sampled", 2, "o-", (5, 3)), ("sampled, larger batch", 16, "^-", (14, -60))):
        sampled = {int(size): 1e3 * statistics.median(v) for size, v in found[name]["seconds_per_client"].items()}
        axes.plot(list(sampled), list(sampled.values()), marker, color=_BLUE)
        axes.annotate(f"S varies, N = 1000,\nbatches of {batch}", (1, sampled[1]), place, **_beside(_BLUE))
    points = found["federation"]
    values = [1e3 * statistics.median(point["seconds_per_round"]) / 10 for point in points]
    axes.plot([point["clients"] for point in points], values, "s--", color=_RED)
    axes.annotate(
        "N varies, S = 10, batches of 2", (points[-1]["clients"], values[-1]), (4, 20), ha="right", **_beside(_RED)
    )
    axes.set(xscale="log", ylim=(0, None), xlabel="clients: S sampled, or N in all", title="CPU ms per sampled client")


def _beside(colour: str) -> dict[str, Any]:
    return {"textcoords": "offset points", "color": colour, "fontsize": 8}


def _memory(axes: Axes, found: dict[str, Any]) -> None:
    points = found["federation"]
    clients = [point["clients"] for point in points]
    memory, files = ([point[key] / 2**30 for point in points] for key in ("peak_bytes", "state_bytes"))
    axes.plot(clients, memory, "s-", color=_RED)
    axes.plot(clients, files, "--", color=_GREY)
    axes.annotate("peak memory", (clients[0], memory[0]), (0, 5), **_beside(_RED))
    axes.annotate("clients' files", (clients[-1], files[-1]), (-20, -6), ha="right", **_beside(_GREY))
    axes.set(
        xscale="log", ylim=(0, None), xlabel="clients in the federation, all with state", title="Memory and disk, GiB"
    )


def _startup(axes: Axes, found: dict[str, Any]) -> None:
    for place, phases in enumerate(found["startup"].values()):
        left = 0.0
        for colour, (name, seconds) in zip(_PHASES, phases.items(), strict=True):
            axes.barh(place, seconds, left=left, color=colour, height=0.55, label=name if place == 0 else None)
            left += seconds
        axes.annotate(f"{left:.1f}", (left, place), (3, 0), textcoords="offset points", va="center", fontsize=8)
    names = [Path(recipe).stem for recipe in found["startup"]]
    axes.set_yticks(range(len(names)), names)
    axes.set(ylim=(-0.5, len(names) + 0.6), xlabel="CPU seconds", title="From start to the first step")
    axes.grid(visible=False, axis="y")
    axes.legend(ncols=4, fontsize=7.5, loc="upper left", columnspacing=0.9, handlelength=1.0)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    draw(json.loads(source.read_text()), source.with_suffix(".png"))
