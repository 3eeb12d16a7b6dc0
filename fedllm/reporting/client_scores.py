"""The scores of the clients on their own samples: the quantities of their table, and the figure of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.figure import Figure

from fedllm.reporting.groups import Group, full_name
from fedllm.reporting.quantities import Quantity
from fedllm.reporting.style import COLOURS, STYLE, marker, short
from fedllm.results.client_scores import OfClient
from fedllm.results.format import is_number
from fedllm.results.names import metric_name
from fedllm.results.run_record import RunRecord
from fedllm.tasks.base import lower_is_better

NAME = "client_scores"
TITLE = "Scores of the clients"
CAPTION = (
    "The final headline score of each client on its own samples, from the worst client to the best, means over seeds "
    "by rank. Solid: the global model. Dashed: the client's fine-tuned copy. Dotted: clients that never train. Each "
    "run's client_scores.json has all."
)
NOTE = (
    "Scores of clients on samples of their own that they do not train on, after the last evaluation. Every client "
    "counts alike, in the weighted mean each by its samples. std: over clients. Worst and best tenth: the mean of that "
    "tenth of the clients, rounded up. gap: the mean of the clients that train, less that of those that never do."
)
Who = Literal["training", "held_out"]


def client_quantities(groups: Sequence[Group]) -> list[Quantity]:
    """The columns of the table: those that a run of the groups has."""
    found = [
        _of("mean", "mean"),
        _of("weighted_mean", "weighted mean"),
        _of("std", "std", best="lowest"),
        _of("worst_tenth", "worst tenth"),
        _of("best_tenth", "best tenth"),
        _of("mean", "fine-tuned mean", "finetuned"),
        _of("worst_tenth", "fine-tuned worst tenth", "finetuned"),
        _of("mean", "never train mean", who="held_out"),
        _of("mean", "never train fine-tuned", "finetuned", "held_out"),
        Quantity("clients_gap", "gap", 4, _gap, None),
    ]
    runs = [run for group in groups for run in group.runs]
    return [quantity for quantity in found if any(quantity.value(run) is not None for run in runs)]


def _of(
    name: str,
    heading: str,
    kind: str = "scores",
    who: Who = "training",
    best: Literal["lowest", "metric"] = "metric",
) -> Quantity:
    return Quantity(f"{who}_{kind}_{name}", heading, 4, lambda run: _value(run, name, kind, who), best)


def _value(run: RunRecord, name: str, kind: str = "scores", who: Who = "training") -> float | None:
    """A number of the spread of the headline score; None where the run has none."""
    of_who: Mapping[str, Any] = run.per_client.get(who) or {}
    value = of_who.get(kind, {}).get(run.primary, {}).get(name)
    return value if is_number(value) else None


def _gap(run: RunRecord) -> float | None:
    seen, unseen = _value(run, "mean"), _value(run, "mean", who="held_out")
    return None if seen is None or unseen is None else seen - unseen


def score_figure(groups: Sequence[Group]) -> Figure | None:
    """A line per group and kind of score over the clients; None if no run has client_scores.json. groups: of one data
    set."""
    lines = [
        (f"{full_name(group, groups)}{which}", colour, dashes, heights)
        for group, colour in zip(groups, COLOURS * len(groups), strict=False)
        for which, dashes, trains, kind in _KINDS
        if (heights := _ranked(group, trains, kind))
    ]
    if not lines:
        return None
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.8, 3.6 + 0.14 * len(lines)), layout="constrained")
        axes = figure.subplots()
        axes.set_title(short(groups[0].task, 60))
        for name, colour, dashes, heights in lines:
            places = [100 * (rank + 0.5) / len(heights) for rank in range(len(heights))]
            axes.plot(
                places, heights, color=colour, linestyle=dashes, marker=marker(len(heights)), label=short(name, 60)
            )
        axes.set_xlim(0, 100)
        axes.set_xlabel("clients, from the worst to the best (%)")
        axes.set_ylabel(f"{metric_name(groups[0].metric)} on a client's own samples")
        figure.legend(loc="outside lower center", ncols=1 if len(lines) < 3 else 2)
    return figure


_KINDS = (
    ("", "-", True, "scores"),
    (", fine-tuned", "--", True, "finetuned"),
    (", never train", ":", False, "scores"),
)


def _ranked(group: Group, trains: bool, kind: str) -> list[float]:
    """The clients' scores from the worst to the best, means over the seeds by rank; [] where a seed has none, has one
    that is not finite, or another number of clients."""
    worst_first = lower_is_better(group.metric)
    seeds = [sorted(_scores(run.client_scores, group.metric, trains, kind), reverse=worst_first) for run in group.runs]
    if len({len(scores) for scores in seeds}) != 1:
        return []
    return [fmean(at_rank) for at_rank in zip(*seeds, strict=True)]


def _scores(clients: Sequence[OfClient], metric: str, trains: bool, kind: str) -> list[float]:
    own: list[dict[str, Any]] = [{**each}.get(kind) or {} for each in clients if each["trains"] == trains]  # type: ignore[misc]
    found = [scores.get(metric) for scores in own]
    return [score for score in found if is_number(score)] if all(map(is_number, found)) else []
