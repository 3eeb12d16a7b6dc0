"""Runs read back from their folders, and put into groups that differ in the seed alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import yaml

from fedllm.errors import UserError
from fedllm.recipe import FREE_KEYS

Axis = Literal["round", "bytes", "simulated_seconds"]
Sections = dict[str, dict[str, Any]]

_FREE = FREE_KEYS | {("run", "seed")}
_RECIPE_KEYS = (
    "algorithm.name", "data.name", "eval.target", "run.seed", "partition.scheme", "federation.rounds",
    "federation.clients_per_round",
)  # fmt: skip
_RESULT_KEYS = ("primary", "final", "best", "target", "rounds", "rounds_to_target", "totals")
_COSTS = ("bytes_up", "bytes_down", "seconds", "simulated_seconds")
_LINE_KEYS = ("round", *_COSTS)
_DRIFT = ("update_norm", "mean_update_norm", "update_cosine", "v_spread")
_NOT_SCORES = {*_LINE_KEYS, *_DRIFT, "train_loss", "clients", "rejected", "eval_loss", "eval_seconds"}


@dataclass(frozen=True)
class Run:
    """A run as its folder holds it.

    recipe: the sections of recipe.yaml. rounds: the lines of metrics.jsonl. result: result.json, or for a run without
    one, which is unfinished, what it has reached so far, in the same form.
    """

    folder: Path
    recipe: Sections
    rounds: list[dict[str, Any]]
    result: dict[str, Any]

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return bool(self.result["status"] == "finished")

    @property
    def seed(self) -> int:
        """run.seed."""
        return int(self.recipe["run"]["seed"])

    @property
    def algorithm(self) -> str:
        """The algorithm's name in the recipe."""
        return str(self.recipe["algorithm"]["name"])

    @property
    def task(self) -> str:
        """The data set, or the training file, in short."""
        data = self.recipe["data"]
        return str(data.get("name") or Path(str(data.get("train"))).name).removeprefix("package:")

    @property
    def primary(self) -> str:
        """The headline metric; empty for an unfinished run that was not evaluated yet."""
        return str(self.result["primary"])

    def curve(self, metric: str, over: Axis = "round") -> tuple[list[float], list[float]]:
        """x and y of a metric wherever it was measured; bytes (up and down) and simulated seconds are totals."""
        steps = {
            "round": [line["round"] for line in self.rounds],
            "bytes": list(accumulate(line["bytes_up"] + line["bytes_down"] for line in self.rounds)),
            "simulated_seconds": list(accumulate(line["simulated_seconds"] for line in self.rounds)),
        }
        points = [
            (x, line[metric]) for x, line in zip(steps[over], self.rounds, strict=True) if _measured(line, metric)
        ]
        return [float(x) for x, _ in points], [float(y) for _, y in points]


@dataclass(frozen=True)
class Group:
    """Finished runs of one recipe that differ in the seed alone, or one unfinished run.

    name: the algorithm and the settings in which the groups of this task differ. note: how far an unfinished run came.
    """

    name: str
    runs: list[Run]
    note: str = ""

    @property
    def label(self) -> str:
        """Name and note."""
        return f"{self.name} ({self.note})" if self.note else self.name

    @property
    def task(self) -> str:
        """The data set."""
        return self.runs[0].task

    @property
    def metric(self) -> str:
        """The headline metric."""
        return self.runs[0].primary

    @property
    def target(self) -> dict[str, float]:
        """Metric values to reach; empty where the recipe sets none."""
        return self.runs[0].result["target"] or {}


def load_run(folder: str | Path) -> Run:
    """The run in a folder. Of an unfinished run a torn last line of metrics.jsonl is left out.

    Raises UserError, saying why, if the folder is no run folder, is damaged, or has no finished round.
    """
    folder = Path(folder)
    if not (folder / "recipe.yaml").is_file():
        raise UserError(f"{folder}: {_foreign(folder)}")
    try:
        recipe = _read_recipe(folder / "recipe.yaml")
        finished = (folder / "result.json").is_file()
        rounds = _read_rounds(folder / "metrics.jsonl", torn=not finished)
        result = _read_result(folder / "result.json") if finished else _so_far(rounds, recipe["eval"]["target"])
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{folder}: cannot be read: {error}") from error
    except _DamagedError as error:
        raise UserError(f"{folder}: {error}") from None
    return Run(folder, recipe, rounds, result)


def read_runs(folders: Iterable[str | Path]) -> tuple[list[Run], list[str]]:
    """The readable runs among folders, and for every folder left out a line that names it and says why.

    A folder given twice counts once. A second run of the same recipe and seed is left out, the finished one kept: it
    would count as a seed that was never run.
    """
    runs: list[Run] = []
    problems: list[str] = []
    for folder in {path.resolve(): path for path in map(Path, folders)}.values():
        try:
            runs.append(load_run(folder))
        except UserError as error:
            problems.append(str(error))
    kept: dict[tuple[str, int], Run] = {}
    for run in sorted(runs, key=lambda run: not run.finished):
        first = kept.setdefault((_recipe_key(run.recipe), run.seed), run)
        if first is not run:
            problems.append(f"{run.folder}: the same recipe and seed as {first.folder}, which stands for both")
    return [run for run in runs if run in kept.values()], problems


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Runs in groups, in the order of their first runs, task by task. Only seeds are ever averaged; an unfinished run
    is a group of its own."""
    tasks: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        tasks.setdefault(run.task, {}).setdefault(_recipe_key(run.recipe), []).append(run)
    groups: list[Group] = []
    for recipes in tasks.values():
        names = _names([members[0].recipe for members in recipes.values()])
        for name, members in zip(names, recipes.values(), strict=True):
            finished = [run for run in members if run.finished]
            groups += [Group(name, finished)] if finished else []
            groups += [Group(name, [run], _unfinished(run)) for run in members if not run.finished]
    return groups


class _DamagedError(Exception):
    """Why a run folder cannot be read."""


def _foreign(folder: Path) -> str:
    if not folder.exists():
        return "no such folder"
    if not folder.is_dir():
        return "not a folder"
    if next(folder.glob("*/recipe.yaml"), None):
        return f"not a run folder, but it holds some; name them: {folder}/*"
    return "not a run folder: it has no recipe.yaml"


def _read_recipe(path: Path) -> Sections:
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise _DamagedError(f"recipe.yaml is not YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(recipe, dict) or not all(isinstance(section, dict) for section in recipe.values()):
        raise _DamagedError("recipe.yaml has no sections with keys and values; not a run folder, or damaged")
    for place in _RECIPE_KEYS:
        section, key = place.split(".")
        if key not in recipe.get(section, {}):
            raise _DamagedError(f"recipe.yaml lacks {place}; not a run folder, or damaged")
    return recipe


def _read_rounds(path: Path, *, torn: bool) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; torn: whether the last may be broken off."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    rounds = []
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            if torn and number == len(lines):
                break
            raise _DamagedError(f"metrics.jsonl, line {number} is not JSON: {error.msg}; damaged") from error
        rounds.append(_with_numbers(line, _LINE_KEYS, f"metrics.jsonl, line {number}"))
    if not rounds:
        raise _DamagedError("no round has finished yet" if torn else "metrics.jsonl has no rounds; damaged")
    return rounds


def _read_result(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise _DamagedError(f"result.json is not JSON: {error.msg} in line {error.lineno}; damaged") from error
    _with_keys(result, ("status", *_RESULT_KEYS), "result.json")
    _with_numbers(result["totals"], _COSTS, "result.json: totals")
    for key in ("final", "best"):
        _with_keys(result[key], (), f"result.json: {key}")
    return dict(result)


def _with_keys(found: Any, keys: Sequence[str], where: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise _DamagedError(f"{where} is {type(found).__name__}, expected an object; damaged")
    if missing := [key for key in keys if key not in found]:
        raise _DamagedError(f"{where} lacks {', '.join(missing)}; damaged")
    return found


def _with_numbers(found: Any, keys: Sequence[str], where: str) -> dict[str, Any]:
    for key in keys:
        if not isinstance(value := _with_keys(found, keys, where)[key], int | float):
            raise _DamagedError(f"{where}: {key} is {value!r}, expected a number; damaged")
    return dict(found)


def _measured(line: dict[str, Any], metric: str) -> bool:
    value = line.get(metric)
    return isinstance(value, int | float) and math.isfinite(value)


def _so_far(rounds: list[dict[str, Any]], target: dict[str, float] | None) -> dict[str, Any]:
    """What result.json would say if the run had ended here. The first score of an evaluation is the headline."""
    names = dict.fromkeys(name for line in rounds for name in line if name not in _NOT_SCORES and _measured(line, name))
    scored = {name: [line for line in rounds if _measured(line, name)] for name in names}
    best = {name: max(lines, key=lambda line: line[name]) for name, lines in scored.items()}
    hits = [line["round"] for line in rounds if target and _reached(line, target)]
    return {
        "status": "unfinished",
        "primary": next(iter(names), ""),
        "final": {name: lines[-1][name] for name, lines in scored.items()},
        "best": {name: {"value": line[name], "round": line["round"]} for name, line in best.items()},
        "target": target,
        "rounds": rounds[-1]["round"],
        "rounds_to_target": hits[0] if hits else None,
        "totals": {name: sum(line[name] for line in rounds) for name in _COSTS},
    }


def _reached(line: dict[str, Any], target: dict[str, float]) -> bool:
    return all(_measured(line, name) and line[name] >= value for name, value in target.items())


def _unfinished(run: Run) -> str:
    return f"seed {run.seed} unfinished, round {run.result['rounds']} of {run.recipe['federation']['rounds']}"


def _compared(recipe: Sections) -> dict[tuple[str, str], Any]:
    """The settings in which two runs must agree to be averaged."""
    settings = {(section, key): value for section, values in recipe.items() for key, value in values.items()}
    return {where: value for where, value in settings.items() if where not in _FREE}


def _recipe_key(recipe: Sections) -> str:
    return "\n".join(
        sorted(f"{section}.{key}={setting_text(value)}" for (section, key), value in _compared(recipe).items())
    )


def _names(recipes: list[Sections]) -> list[str]:
    """Each recipe's algorithm with the settings that tell it from the others. An algorithm's own settings count only
    against those of the same algorithm: others have other ones."""
    compared = [_compared(recipe) for recipe in recipes]
    names = []
    for mine in compared:
        algorithm = mine["algorithm", "name"]
        kin = [other for other in compared if other["algorithm", "name"] == algorithm]
        differing = []
        places = dict.fromkeys(where for other in compared for where in other)
        for where in sorted(places, key=lambda where: where[0] != "algorithm"):
            section, key = where
            others = kin if section == "algorithm" else compared
            if len({setting_text(other.get(where)) for other in others}) > 1:
                prefix = "" if section == "algorithm" else f"{section}."
                differing.append(f"{prefix}{key}={setting_text(mine.get(where))}")
        names.append(" ".join([algorithm, ", ".join(differing)]).strip())
    return names


def setting_text(value: Any) -> str:
    """A setting as it is written in a recipe, 1.0e-3 and 0.001 alike."""
    if isinstance(value, float):
        return f"{value:.15g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {setting_text(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(setting_text, value)) + "]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
