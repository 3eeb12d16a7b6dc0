"""The figure of one run: its headline score and its training loss over the rounds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedllm.reporting.style import (
    COLOURS,
    FAINT,
    INK,
    STYLE,
    draw_targets,
    label_ends,
    marker,
    save,
    set_axis,
    short,
    under_title,
)
from fedllm.results.names import metric_name, printable, setting_text
from fedllm.results.reader import load_run
from fedllm.results.run_record import RunRecord


def plot_run(folder: str | Path) -> Path:
    """Draws `curves.png` into a run folder, its headline score and training loss over the rounds, and returns its path.

    Raises UserError if the folder holds no run that can be read.
    """
    run = load_run(folder)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 5.0), layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(5, 2))
        _draw_score(top, run)
        top.set_title(short(f"{run.algorithm} on {run.task}", 80), pad=38, fontsize=12)
        under_title(top, subtitle(run))
        x, y = run.curve("train_loss")
        bottom.plot(x, y, color=INK, linewidth=1.2, marker=marker(len(x)))
        bottom.set_ylabel("train loss")
        set_axis(bottom, "round", run.result["rounds"])
        figure.align_ylabels()
        return save(figure, Path(folder) / "curves.png")


def _draw_score(axes: Axes, run: RunRecord) -> None:
    """Draws the headline score of one run with its last value, its best value and the target."""
    x, y = run.curve(run.primary)
    axes.set_ylabel(short(metric_name(run.primary), 36) or "score")
    if not x:
        axes.annotate("not evaluated yet", (0.5, 0.5), xycoords="axes fraction", ha="center", color=FAINT)
        return
    axes.plot(x, y, color=COLOURS[0], marker=marker(len(x)))
    axes.plot(x[-1], y[-1], color=COLOURS[0], marker="o", markersize=5.5)
    ends = [(x[-1], y[-1], f"{y[-1]:.4f}", {"color": COLOURS[0], "weight": "bold"})]
    best = int(np.argmax(y))
    if y[best] > y[-1]:
        axes.plot(x[best], y[best], color=COLOURS[0], marker="o", markersize=7.5, markerfacecolor="none")
    label_ends(axes, ends + draw_targets(axes, [run.result["target"] or {}], run.primary))


def subtitle(run: RunRecord) -> str:
    """Two lines: the partition and the clients per round, then the outcome."""
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
    column = run.clients.column if run.clients else None
    setting = [partition_words(run.recipe["partition"], column), f"{federation['clients_per_round']} per round"]
    return " · ".join([*setting, f"seed {run.seed}"]) + "\n" + " · ".join(outcome)


def _rounds(count: int) -> str:
    return "1 round" if count == 1 else f"{count} rounds"


def partition_words(section: Mapping[str, Any], column: str | None = None) -> str:
    """The partition and its clients in words. With a file or a column, partition.clients does not count.

    column: the column whose values stand in for classes, for data without labels.
    """
    if section.get("file"):
        return printable(f"clients of {Path(str(section['file'])).name}")
    if section["scheme"] == "by_column":
        most = section.get("max_size")
        limit = f", at most {most} samples" if most is not None else ""
        column = section.get("column")
        return printable(f"{'natural clients' if column == 'client' else f'one client per {column}'}{limit}")
    alpha = setting_text(section.get("alpha"))
    schemes = {
        "dirichlet_classes": f"Dirichlet({alpha}) over {column or 'classes'}",
        "dirichlet_clients": f"Dirichlet({alpha}) over clients",
        "dirichlet_clusters": f"Dirichlet({alpha}) over {section.get('clusters')} clusters",
        "quantity": f"sizes by Dirichlet({alpha})",
        "shards": f"{section.get('shards_per_client')} shards per client",
        "iid": "IID",
    }
    return printable(f"{schemes.get(section['scheme'], section['scheme'])} · {section.get('clients')} clients")
