"""Values computed from a run's recipe and metrics: target rounds, best scores, totals and comparison keys."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeGuard

from fedllm.config.recipe import FREE_KEYS
from fedllm.tasks.base import LOSS as LOSS
from fedllm.tasks.base import lower_is_better

Axis = Literal["round", "bytes", "simulated_seconds", "epsilon"]
Sections = dict[str, dict[str, Any]]

COSTS = ("bytes_up", "bytes_down", "seconds", "simulated_seconds")
_FREE = FREE_KEYS | {("run", "seed")}


def rounds_to(target: dict[str, float] | None, rounds: Sequence[dict[str, Any]]) -> int | None:
    """The first round whose scores reach every target, or None. A loss reaches its target from above."""
    for line in rounds if target else []:
        if all(_reached(name, line.get(name), value) for name, value in (target or {}).items()):
            return int(line["round"])
    return None


def _reached(name: str, score: Any, value: float) -> bool:
    return is_number(score) and (score <= value if lower_is_better(name) else score >= value)


def outcome(names: Iterable[str], target: dict[str, float] | None, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The part of result.json that is computed from metrics.jsonl alone. names: names of the scores and the loss."""
    names = list(names)
    scored = [line for line in rounds if LOSS in line]
    last = scored[-1] if scored else {}
    best = {}
    for name in names:
        if lines := [line for line in scored if line.get(name) is not None]:
            top = (min if lower_is_better(name) else max)(lines, key=lambda line: line[name])
            best[name] = {"value": top[name], "round": top["round"]}
    return {
        "final": {name: last.get(name) for name in names},
        "best": best,
        "target": target,
        "rounds": rounds[-1]["round"],
        "rounds_to_target": rounds_to(target, rounds),
        "rejected": sum(len(line["rejected"]) for line in rounds),
    }


def totals(start: dict[str, float], rounds: Sequence[dict[str, Any]]) -> dict[str, float]:
    """COSTS of a whole run. start: the costs before round 1."""
    return {name: round_to(start[name] + sum(line[name] for line in rounds)) for name in COSTS}


def round_to(seconds: float) -> float:
    """Rounds seconds to 0.1 milliseconds, the precision of the logs."""
    return round(seconds, 4)


def compared(recipe: Sections) -> dict[tuple[str, str], Any]:
    """The settings that must be equal in two runs for their results to be averaged."""
    settings = {(section, key): value for section, values in recipe.items() for key, value in values.items()}
    return {where: value for where, value in settings.items() if where not in _FREE}


def settings_key(settings: dict[tuple[str, str], Any]) -> str:
    """A text that is equal for equal settings."""
    named = {f"{section}.{key}": _exact(value) for (section, key), value in settings.items()}
    return json.dumps(named, sort_keys=True, default=str)


def _exact(value: Any) -> Any:
    """Converts 1.0 to 1 at every depth of `value`. The text "1" stays different from the number 1."""
    if isinstance(value, dict):
        return {str(key): _exact(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_exact(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def is_number(value: Any) -> TypeGuard[float]:
    """Whether `value` is a number that can be averaged and plotted."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300
