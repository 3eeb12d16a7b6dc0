"""What a run folder says, in memory: its curves, its clients, and the settings by which runs are compared."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, TypeGuard

from fedllm.recipe import FREE_KEYS

Axis = Literal["round", "bytes", "simulated_seconds"]
Sections = dict[str, dict[str, Any]]

LOSS = "eval_loss"  # of an evaluation's numbers the one that is better the lower it is
COSTS = ("bytes_up", "bytes_down", "seconds", "simulated_seconds")
MADE_WITH = (("machine", "precision"), ("versions", "fedllm"))
_FREE = FREE_KEYS | {("run", "seed")}


@dataclass(frozen=True)
class ClientData:
    """partition.json: how many samples each client has (sizes [N]), and of each class (counts [N, classes]); a
    regression has no classes."""

    sizes: list[int]
    classes: list[str]
    counts: list[list[int]]


@dataclass(frozen=True)
class Run:
    """A run as its folder holds it.

    recipe: the sections of recipe.yaml. rounds: the lines of metrics.jsonl. result: result.json, or for a run without
    one, which is unfinished, what it has reached so far, in the same form. start: COSTS of what came before round 1.
    clients: None if there is no partition.json.
    """

    folder: Path
    recipe: Sections
    rounds: list[dict[str, Any]]
    result: dict[str, Any]
    start: dict[str, float]
    clients: ClientData | None = None

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return bool(self.result["status"] == "finished")

    @property
    def seed(self) -> int:
        """run.seed."""
        return int(self.recipe["run"]["seed"])

    @property
    def made_with(self) -> dict[tuple[str, str], Any]:
        """What else two finished runs must agree in to be averaged, as far as result.json tells: the precision that
        they ran in, which run.precision=auto leaves to the machine, and fedllm's version."""
        places = {where: self.result.get(where[0]) for where in MADE_WITH}
        return {(section, key): told[key] for (section, key), told in places.items() if _has(told, key)}

    @property
    def algorithm(self) -> str:
        """The algorithm's name in the recipe."""
        return printable(self.recipe["algorithm"]["name"])

    @property
    def task(self) -> str:
        """The data set, or the training file, in short."""
        data = self.recipe["data"]
        return printable(str(data.get("name") or Path(str(data.get("train"))).name).removeprefix("package:"))

    @property
    def primary(self) -> str:
        """The headline metric; empty for an unfinished run that was not evaluated yet."""
        return str(self.result["primary"])

    def curve(self, metric: str, over: Axis = "round") -> tuple[list[float], list[float]]:
        """x and y of a metric wherever it was measured; bytes (up and down) and simulated seconds are totals, with
        what came before round 1."""
        spent = [self.start, *self.rounds]
        steps = {
            "round": [line["round"] for line in self.rounds],
            "bytes": list(accumulate(line["bytes_up"] + line["bytes_down"] for line in spent))[1:],
            "simulated_seconds": list(accumulate(line["simulated_seconds"] for line in spent))[1:],
        }
        points = [
            (x, line[metric]) for x, line in zip(steps[over], self.rounds, strict=True) if is_number(line.get(metric))
        ]
        return [float(x) for x, _ in points], [float(y) for _, y in points]


def rounds_to(target: dict[str, float] | None, rounds: Sequence[dict[str, Any]]) -> int | None:
    """The first round whose scores reach every target, or None. A loss is reached from above."""
    for line in rounds if target else []:
        if all(_reached(name, line.get(name), value) for name, value in (target or {}).items()):
            return int(line["round"])
    return None


def _reached(name: str, score: Any, value: float) -> bool:
    return is_number(score) and (score <= value if name == LOSS else score >= value)


def outcome(names: Iterable[str], target: dict[str, float] | None, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What result.json says that follows from the lines of metrics.jsonl alone. names: of the scores and the loss."""
    names = list(names)
    scored = [line for line in rounds if LOSS in line]
    last = scored[-1] if scored else {}
    best = {}
    for name in names:
        if lines := [line for line in scored if line.get(name) is not None]:
            top = (min if name == LOSS else max)(lines, key=lambda line: line[name])
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
    """COSTS of a whole run. start: what came before round 1."""
    return {name: round_to(start[name] + sum(line[name] for line in rounds)) for name in COSTS}


def round_to(seconds: float) -> float:
    """Seconds to the tenth of a millisecond, as they are logged."""
    return round(seconds, 4)


def compared(recipe: Sections) -> dict[tuple[str, str], Any]:
    """The settings in which two runs must agree to be averaged."""
    settings = {(section, key): value for section, values in recipe.items() for key, value in values.items()}
    return {where: value for where, value in settings.items() if where not in _FREE}


def settings_key(settings: dict[tuple[str, str], Any]) -> str:
    """The same text for the same settings."""
    named = {f"{section}.{key}": _exact(value) for (section, key), value in settings.items()}
    return json.dumps(named, sort_keys=True, default=str)


def recipe_key(recipe: Sections) -> str:
    """The same text for recipes that differ in the seed alone."""
    return settings_key(compared(recipe))


def _has(told: Any, key: str) -> TypeGuard[dict[str, Any]]:
    return isinstance(told, dict) and key in told


def _exact(value: Any) -> Any:
    """1.0 as 1, in all depths; a word stays another thing than the number that it spells."""
    if isinstance(value, dict):
        return {str(key): _exact(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_exact(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def setting_text(value: Any) -> str:
    """A setting as it is written in a recipe, 1.0e-3 and 0.001 alike."""
    if isinstance(value, float):
        return f"{value:.15g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {setting_text(value[key])}" for key in sorted(value, key=str)) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(setting_text, value)) + "]"
    return json.dumps(value) if value is None or isinstance(value, bool) else printable(str(value))


def printable(text: str) -> str:
    """The text with a mark for every character that is not one to print: line ends, control codes, half surrogates."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def is_number(value: Any) -> TypeGuard[float]:
    """Whether this is a number that can be averaged and drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300
