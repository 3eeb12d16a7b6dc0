"""The numbers that a report compares: of a run, and as means over the seeds of a group."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from fedllm.reporting.groups import Group, Target
from fedllm.results.format import is_number, rounds_to
from fedllm.results.names import metric_name, setting_text
from fedllm.results.run_record import RunRecord
from fedllm.tasks.base import lower_is_better

NONE = "-"
_MOST_DECIMALS = 5


@dataclass(frozen=True)
class Quantity:
    """A number of a run: its key in the CSV file, its heading, its decimals (None: by size) and how to read it.

    best: which value is the best one; "metric": the best one of the headline metric; None: no value is.
    """

    key: str
    heading: str
    decimals: int | None
    value: Callable[[RunRecord], float | None]
    best: Literal["lowest", "metric"] | None = "lowest"

    def values(self, group: Group) -> list[float]:
        """The value of each seed, or none if a seed has none: a mean over some seeds alone would be biased."""
        found = [self.value(run) for run in group.runs]
        numbers = [value for value in found if value is not None]
        return numbers if len(numbers) == len(found) else []

    def lowest_is_best(self, metric: str) -> bool:
        """Whether the lowest value is the best one. metric: the headline metric."""
        return self.best == "lowest" or lower_is_better(metric)

    def cell(self, group: Group) -> str:
        """The mean over seeds as text, with the standard deviation; a dash if a seed has no value."""
        values = self.values(group)
        return mean_and_deviation(values, self.decimals) if values else NONE


@dataclass(frozen=True)
class RoundsTo(Quantity):
    """The number of rounds to a target. measured: whether a run has the target's metrics."""

    measured: Callable[[RunRecord], bool] = lambda run: True

    def cell(self, group: Group) -> str:
        """The mean number of rounds if every seed reached the target, else ">N", the rounds of the shortest run that
        did not. A dash where a seed was not measured in that metric."""
        if not all(map(self.measured, group.runs)):
            return NONE
        reached = [self.value(run) for run in group.runs]
        found = [rounds for rounds in reached if rounds is not None]
        if len(found) == len(reached):
            return mean_and_deviation(found, 1 if len(reached) > 1 else 0)
        missed = zip(group.runs, reached, strict=True)
        without = min(run.result["rounds"] for run, rounds in missed if rounds is None)
        return f">{without} ({len(found)} of {len(reached)} reached)" if len(reached) > 1 else f">{without}"


def rounds_to_target(target: Target) -> RoundsTo:
    """The rounds to a target that was asked for. A loss is reached from above."""
    key = "_".join(f"{name}_{setting_text(value)}" for name, value in target.items())
    return RoundsTo(
        f"rounds_to_{key}",
        f"rounds to {target_words(target)}",
        None,
        lambda run: rounds_to(target, run.rounds),
        measured=lambda run: all(name in run.result["final"] for name in target),
    )


def target_words(target: Target) -> str:
    """'accuracy 0.8'."""
    return ", ".join(f"{metric_name(name)} {setting_text(value)}" for name, value in target.items())


def _total(name: str, unit: float = 1.0) -> Callable[[RunRecord], float]:
    return lambda run: run.result["totals"][name] / unit


def _client_memory(run: RunRecord) -> float | None:
    """The memory of a client while it trains, in megabytes (costs.client_memory). Older runs have none."""
    held = run.result.get("client_memory_bytes")
    return held / 1e6 if is_number(held) else None


def _vectors(run: RunRecord) -> float | None:
    """V(t): model-sized vectors that one sampled client sends and receives in a round (costs.vectors_per_round)."""
    moved = run.result.get("vectors_per_round")
    sent = moved.get("sent") if isinstance(moved, dict) else None
    return sent if is_number(sent) else None


ROUNDS_TO_TARGET = RoundsTo(
    "rounds_to_target",
    "rounds to target",
    None,
    lambda run: rounds_to(run.result["target"], run.rounds),
    measured=lambda run: (
        bool(run.result["target"]) and all(n in run.result["final"] for n in run.result["target"] or {})
    ),
)
SCORES = (
    Quantity("best", "best", 4, lambda run: run.best_score(run.primary), "metric"),
    Quantity("final", "final", 4, lambda run: run.result["final"].get(run.primary), "metric"),
)
COSTS = (
    Quantity("mb_up", "MB up", None, _total("bytes_up", unit=1e6)),
    Quantity("mb_down", "MB down", None, _total("bytes_down", unit=1e6)),
    Quantity("seconds", "seconds", None, _total("seconds")),
    Quantity("simulated_seconds", "simulated s", None, _total("simulated_seconds")),
    Quantity("client_memory_mb", "client MB", None, _client_memory),
)
REJECTED = Quantity("rejected", "rejected", None, lambda run: run.result["rejected"], None)
VECTORS = Quantity("vectors_per_round", "vectors", None, _vectors, None)


def mean_and_deviation(values: Sequence[float], decimals: int | None) -> str:
    """The mean, and of several values "± deviation" with two significant digits and as many decimals in the mean.

    decimals: of one value alone, and where the values do not differ; None: by size.
    """
    mean = statistics.fmean(values)
    if decimals is None:
        decimals = 0 if mean >= 100 else 1 if mean >= 10 else 2
    deviation = statistics.stdev(values) if len(values) > 1 else None
    if deviation is None:
        return f"{mean:,.{decimals}f}"
    if deviation > 0:
        power = int(f"{deviation:.1e}".partition("e")[2])
        decimals = min(max(1 - power, 0), _MOST_DECIMALS)
    return f"{mean:,.{decimals}f} ± {deviation:,.{decimals}f}"


def best_groups(quantity: Quantity, groups: Sequence[Group]) -> set[int]:
    """The indices of the finished groups with the best mean, among those of equal headline metric; none if all are
    equal or there is nothing to compare."""
    means: dict[str, dict[int, float]] = {}
    for index, group in enumerate(groups):
        if not group.note and (values := quantity.values(group)):
            means.setdefault(group.metric, {})[index] = statistics.fmean(values)
    return {index for metric, found in means.items() for index in _best(found, quantity.lowest_is_best(metric))}


def _best(means: dict[int, float], lowest: bool) -> Iterable[int]:
    if len({*means.values()}) < 2:
        return ()
    top = (min if lowest else max)(means.values())
    return [index for index, mean in means.items() if mean == top]
