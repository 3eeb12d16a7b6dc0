"""Checks that the files of a run folder agree with one another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedllm.results.format import COSTS, Sections, outcome, round_to, totals
from fedllm.results.run_files import DamagedError, Result, brief


def require_agreement(result: Result, recipe: Sections, rounds: Sequence[dict[str, Any]]) -> None:
    """Raises DamagedError if result.json, except its totals, disagrees with recipe.yaml and metrics.jsonl.

    The expected values are computed by the functions that write result.json. A task's first metric is its headline.
    """
    given = {"algorithm": recipe["algorithm"]["name"], "seed": recipe["run"]["seed"]}
    given |= {"target": recipe["eval"]["target"]}
    followed = {"rounds": len(rounds), "primary": next(iter(result["final"]), "")}
    followed |= outcome(result["final"], given["target"], rounds)
    for source, expected in (("recipe.yaml has", given), ("by metrics.jsonl it is", followed)):
        for key, value in expected.items():
            if (found := result.get(key)) != value:
                raise DamagedError(f"result.json: {key} is {brief(found)}, {source} {brief(value)}; damaged")


def require_totals(spent: dict[str, float], start: dict[str, float], rounds: Sequence[dict[str, Any]]) -> None:
    """Raises DamagedError if the totals of result.json are not the sums over start.json and metrics.jsonl."""
    for name, value in totals(start, rounds).items():
        if abs(spent[name] - value) > 1e-3:
            raise DamagedError(
                f"result.json: totals.{name} is {brief(spent[name])}, by metrics.jsonl it is {brief(value)}; damaged"
            )


def older_start(spent: dict[str, float], rounds: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The costs before round 1 of a run by an older version: its totals minus the sums of its lines.

    Older versions sent as many bytes up as down before round 1. Raises DamagedError if the difference contradicts this
    or is negative.
    """
    over = {name: round_to(spent[name] - sum(line[name] for line in rounds)) for name in COSTS}
    sent = over["bytes_up"]
    if min(over.values()) < 0 or sent != over["bytes_down"] or (not sent and any(over.values())):
        raise DamagedError(f"result.json: totals differ from the lines of metrics.jsonl by {brief(over)}; damaged")
    return over
