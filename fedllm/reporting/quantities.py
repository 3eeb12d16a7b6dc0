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
    best: Literal["lowest", "highest", "metric"] | None = "lowest"

    def values(self, group: Group) -> list[float]:
        """The value of each seed, or none if a seed has none: a mean over some seeds alone would be biased."""
        found = [self.value(run) for run in group.runs]
        numbers = [value for value in found if value is not None]
        return numbers if len(numbers) == len(found) else []

    def lowest_is_best(self, metric: str) -> bool:
        """Whether the lowest value is the best one. metric: the headline metric."""
        return self.best == "lowest" or (self.best == "metric" and lower_is_better(metric))

    def cell(self, group: Group) -> str:
        """The mean over seeds as text, with the standard deviation; a dash if a seed has no value."""
        values = self.values(group)
        return mean_and_deviation(values, self.decimals) if values else NONE


@dataclass(frozen=True)
class ToTarget(Quantity):
    """What it takes to reach a target. measured: whether a run has the target's metrics. whole: what the whole run
    took."""

    measured: Callable[[RunRecord], bool] = lambda run: True
    whole: Callable[[RunRecord], float | None] = lambda run: run.result["rounds"]

    def cell(self, group: Group) -> str:
        """The mean if every seed reached the target, else ">N", what the least of the runs that did not reach it took.
        A dash where a seed was not measured in that metric, or has no such value."""
        if not all(map(self.measured, group.runs)):
            return NONE
        reached = [self.value(run) for run in group.runs]
        found = [value for value in reached if value is not None]
        if len(found) == len(reached):
            return mean_and_deviation(found, self.decimals if self.decimals is None or len(found) == 1 else 1)
        whole = [self.whole(run) for run, value in zip(group.runs, reached, strict=True) if value is None]
        missed = [value for value in whole if value is not None]
        if len(missed) < len(whole):
            return NONE
        least = f">{mean_and_deviation([min(missed)], self.decimals)}"
        return f"{least} ({len(found)} of {len(reached)} reached)" if len(reached) > 1 else least


Wanted = Callable[[RunRecord], Target | None]  # the target that counts for a run


def rounds_to_target(target: Target) -> ToTarget:
    """The rounds to a target that was asked for. A loss is reached from above."""
    return _rounds_to(f"rounds_to_{_key(target)}", f"rounds to {target_words(target)}", lambda run: target)


def costs_to_target(target: Target | None = None, words: str = "target") -> tuple[ToTarget, ...]:
    """What a target takes, the costs before round 1 included: megabytes of all clients both ways, simulated time, and
    model-sized vectors of a client that is sampled in every round. target: None is each run's own. words: its name in
    the headings."""
    key = "target" if target is None else _key(target)

    def wanted(run: RunRecord) -> Target | None:
        return run.result["target"] if target is None else target

    def cost(name: str, heading: str, spent: Callable[[RunRecord, int], float | None]) -> ToTarget:
        def value(run: RunRecord) -> float | None:
            reached = rounds_to(wanted(run), run.rounds)
            return None if reached is None else spent(run, reached)

        return ToTarget(
            f"{name}_to_{key}",
            f"{heading} to {words}",
            None,
            value,
            measured=lambda run: _measured(run, wanted(run)),
            whole=lambda run: spent(run, run.result["rounds"]),
        )

    return (
        cost("mb", "MB", lambda run, rounds: _spent(run, rounds, "bytes_up", "bytes_down") / 1e6),
        cost("simulated_seconds", "simulated s", lambda run, rounds: _spent(run, rounds, "simulated_seconds")),
        cost("vectors", "vectors", _communications),
    )


def _rounds_to(key: str, heading: str, wanted: Wanted) -> ToTarget:
    return ToTarget(
        key,
        heading,
        0,
        lambda run: rounds_to(wanted(run), run.rounds),
        measured=lambda run: _measured(run, wanted(run)),
    )


def _measured(run: RunRecord, target: Target | None) -> bool:
    return bool(target) and all(name in run.result["final"] for name in target or {})


def _spent(run: RunRecord, rounds: int, *costs: str) -> float:
    """The sum of these costs up to the end of a round, including those before round 1."""
    return sum(float(line[cost]) for line in (run.start, *run.rounds[:rounds]) for cost in costs)


def _communications(run: RunRecord, rounds: int) -> float | None:
    """V(t) times the rounds (PT Table 1), and 2 where each client received x0 and sent its gradient before round 1."""
    sent = _vectors(run)
    return None if sent is None else sent * rounds + (2 if run.start["bytes_up"] else 0)


def _key(target: Target) -> str:
    return "_".join(f"{name}_{setting_text(value)}" for name, value in target.items())


def target_words(target: Target) -> str:
    """'accuracy 0.8'."""
    return ", ".join(f"{metric_name(name)} {setting_text(value)}" for name, value in target.items())


def _total(name: str, unit: float = 1.0) -> Callable[[RunRecord], float]:
    return lambda run: run.result["totals"][name] / unit


def _client_memory(run: RunRecord) -> float | None:
    """The memory of a client while it trains, in megabytes (costs.client_memory). Older runs have none."""
    held = run.result.get("client_memory_bytes")
    return held / 1e6 if is_number(held) else None


def _client_vectors(run: RunRecord) -> float | None:
    """The vectors that a client holds by the count of GC Table 6 (Algorithm.held_vectors). Older runs have none."""
    held = run.result.get("client_vectors")
    return held if is_number(held) else None


def _vectors(run: RunRecord) -> float | None:
    """V(t): model-sized vectors that one sampled client sends and receives in a round (costs.vectors_per_round)."""
    moved = run.result.get("vectors_per_round")
    sent = moved.get("sent") if isinstance(moved, dict) else None
    return sent if is_number(sent) else None


ROUNDS_TO_TARGET = _rounds_to("rounds_to_target", "rounds to target", lambda run: run.result["target"])
SCORES = (
    Quantity("best", "best", 4, lambda run: run.best_score(run.primary), "metric"),
    Quantity("final", "final", 4, lambda run: run.result["final"].get(run.primary), "metric"),
)
COSTS = (
    Quantity("mb_up", "MB up", None, _total("bytes_up", unit=1e6)),
    Quantity("mb_down", "MB down", None, _total("bytes_down", unit=1e6)),
    Quantity("seconds", "seconds", None, _total("seconds")),
    Quantity("simulated_seconds", "simulated s", None, _total("simulated_seconds")),
    Quantity("client_vectors", "client vectors", 0, _client_vectors),
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
