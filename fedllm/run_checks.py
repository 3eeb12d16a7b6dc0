"""What the files of a run folder must hold, and what in them contradicts itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fedllm.results import COSTS, Sections, is_number, outcome, round_to, totals

Check = tuple[str, Callable[[Any], bool]]  # what is expected, in words and as a test


class DamagedError(Exception):
    """Why a run folder cannot be read."""


def _whole(value: Any) -> bool:
    return isinstance(value, int) and is_number(value)


def _list_of(test: Callable[[Any], bool], value: Any) -> bool:
    return isinstance(value, list) and all(map(test, value))


def _numbers_by_name(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(n, str) and (v is None or is_number(v)) for n, v in value.items())


def _count(value: Any) -> bool:
    return _whole(value) and 0 <= value < 2**53


def _has_costs(totals: dict[str, Any]) -> bool:
    return all(is_number(totals.get(name)) for name in COSTS)


def _is_best(best: dict[str, Any]) -> bool:
    return is_number(best.get("value")) and _whole(best.get("round"))


_WORD: Check = ("a word", lambda value: isinstance(value, str))
_WORD_OR_NULL: Check = ("a word or null", lambda value: value is None or isinstance(value, str))
_WHOLE: Check = ("a whole number", _whole)
_COST: Check = ("a number of 0 or more", lambda value: is_number(value) and value >= 0)
_TARGET: Check = (
    "null or a number for each metric",
    lambda value: value is None or (_numbers_by_name(value) and None not in value.values()),
)
SCORE: Check = ("a number or null", lambda value: value is None or is_number(value))
RECIPE: dict[str, Check] = {
    "algorithm.name": _WORD,
    "data.name": _WORD_OR_NULL,
    "eval.target": _TARGET,
    "run.seed": _WHOLE,
    "partition.scheme": _WORD_OR_NULL,
    "federation.rounds": _WHOLE,
    "federation.clients_per_round": _WHOLE,
}
START: dict[str, Check] = dict.fromkeys(COSTS, _COST)
LINE: dict[str, Check] = {
    "round": _WHOLE,
    **START,
    "rejected": ("a reason for each client", lambda value: isinstance(value, dict)),
}
RESULT: dict[str, Check] = {
    "status": ("'finished'", lambda value: value == "finished"),
    "algorithm": _WORD,
    "seed": _WHOLE,
    "primary": _WORD,
    "final": ("a number for each metric", _numbers_by_name),
    "best": (
        "a value and a round for each metric",
        lambda value: isinstance(value, dict) and all(isinstance(b, dict) and _is_best(b) for b in value.values()),
    ),
    "target": _TARGET,
    "rounds": _WHOLE,
    "rounds_to_target": ("a whole number or null", lambda value: value is None or _whole(value)),
    "rejected": _WHOLE,
    "totals": (f"numbers {', '.join(COSTS)}", lambda value: isinstance(value, dict) and _has_costs(value)),
}
PARTITION: dict[str, Check] = {
    "sizes": ("a list of whole numbers", lambda value: bool(value) and _list_of(_count, value)),
    "classes": ("a list of words", lambda value: _list_of(lambda name: isinstance(name, str), value)),
    "counts": (
        "null or a list of whole numbers for each client",
        lambda value: value is None or _list_of(lambda row: _list_of(_count, row), value),
    ),
}


def checked(found: Any, checks: dict[str, Check], where: str, verdict: str = "damaged") -> dict[str, Any]:
    """An object that has these keys with values as expected. Raises DamagedError."""
    if not isinstance(found, dict):
        raise DamagedError(f"{where} is {type(found).__name__}, expected an object; {verdict}")
    if missing := [key for key in checks if key not in found]:
        raise DamagedError(f"{where} lacks {', '.join(missing)}; {verdict}")
    for key, (expected, test) in checks.items():
        if not test(found[key]):
            raise DamagedError(f"{where}: {key} is {brief(found[key])}, expected {expected}; {verdict}")
    return dict(found)


def brief(value: Any) -> str:
    """A value as an error shows it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def require_agreement(result: dict[str, Any], recipe: Sections, rounds: Sequence[dict[str, Any]]) -> None:
    """Raises DamagedError where result.json says other than recipe.yaml and metrics.jsonl do, by the functions that
    made it, its totals aside. Of a task's metrics the first is the headline."""
    given = {"algorithm": recipe["algorithm"]["name"], "seed": recipe["run"]["seed"]}
    given |= {"target": recipe["eval"]["target"]}
    followed = {"rounds": len(rounds), "primary": next(iter(result["final"]), "")}
    followed |= outcome(result["final"], given["target"], rounds)
    for source, expected in (("recipe.yaml has", given), ("by metrics.jsonl it is", followed)):
        for key, value in expected.items():
            if result[key] != value:
                raise DamagedError(f"result.json: {key} is {brief(result[key])}, {source} {brief(value)}; damaged")


def require_totals(spent: dict[str, float], start: dict[str, float], rounds: Sequence[dict[str, Any]]) -> None:
    """Raises DamagedError where the totals of result.json are not those of the start and the lines."""
    for name, value in totals(start, rounds).items():
        if abs(spent[name] - value) > 1e-3:
            raise DamagedError(
                f"result.json: totals.{name} is {brief(spent[name])}, by metrics.jsonl it is {brief(value)}; damaged"
            )


def older_start(spent: dict[str, float], rounds: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What a run of an older version spent before round 1: what its totals have over its lines. Such a pass sent as
    much up as down. Raises DamagedError where that cannot be."""
    over = {name: round_to(spent[name] - sum(line[name] for line in rounds)) for name in COSTS}
    sent = over["bytes_up"]
    if min(over.values()) < 0 or sent != over["bytes_down"] or (not sent and any(over.values())):
        raise DamagedError(f"result.json: totals differ from the lines of metrics.jsonl by {brief(over)}; damaged")
    return over
