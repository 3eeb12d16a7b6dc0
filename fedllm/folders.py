"""Runs read back from their folders; what is no run, or damaged, is told apart and said."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedllm.errors import UserError
from fedllm.results import ClientData, Run, Sections, is_number, printable, recipe_key, rounds_to

_COSTS = ("bytes_up", "bytes_down", "seconds", "simulated_seconds")
_DRIFT = ("update_norm", "mean_update_norm", "update_cosine", "v_spread")
_NOT_SCORES = {"round", *_COSTS, *_DRIFT, "train_loss", "clients", "rejected", "eval_loss", "eval_seconds"}

_Check = tuple[str, Callable[[Any], bool]]  # what is expected, in words and as a test


def _whole(value: Any) -> bool:
    return isinstance(value, int) and is_number(value)


def _list_of(test: Callable[[Any], bool], value: Any) -> bool:
    return isinstance(value, list) and all(map(test, value))


def _numbers_by_name(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(n, str) and (v is None or is_number(v)) for n, v in value.items())


_WORD: _Check = ("a word", lambda value: isinstance(value, str))
_WORD_OR_NULL: _Check = ("a word or null", lambda value: value is None or isinstance(value, str))
_WHOLE: _Check = ("a whole number", _whole)
_NUMBER: _Check = ("a number", is_number)
_TARGET: _Check = (
    "null or a number for each metric",
    lambda value: value is None or (_numbers_by_name(value) and None not in value.values()),
)
_RECIPE: dict[str, _Check] = {
    "algorithm.name": _WORD,
    "data.name": _WORD_OR_NULL,
    "eval.target": _TARGET,
    "run.seed": _WHOLE,
    "partition.scheme": _WORD_OR_NULL,
    "federation.rounds": _WHOLE,
    "federation.clients_per_round": _WHOLE,
}
_LINE: dict[str, _Check] = {"round": _WHOLE, **dict.fromkeys(_COSTS, _NUMBER)}
_RESULT: dict[str, _Check] = {
    "status": _WORD,
    "primary": _WORD,
    "final": ("a number for each metric", _numbers_by_name),
    "best": (
        "a value and a round for each metric",
        lambda value: isinstance(value, dict) and all(isinstance(b, dict) and _is_best(b) for b in value.values()),
    ),
    "target": _TARGET,
    "rounds": _WHOLE,
    "rounds_to_target": ("a whole number or null", lambda value: value is None or _whole(value)),
    "totals": (f"numbers {', '.join(_COSTS)}", lambda value: isinstance(value, dict) and _has_costs(value)),
}
_PARTITION: dict[str, _Check] = {
    "sizes": ("a list of whole numbers", lambda value: bool(value) and _list_of(_count, value)),
    "classes": ("a list of words", lambda value: _list_of(lambda name: isinstance(name, str), value)),
    "counts": (
        "null or a list of whole numbers for each client",
        lambda value: value is None or _list_of(lambda row: _list_of(_count, row), value),
    ),
}


def _count(value: Any) -> bool:
    return _whole(value) and 0 <= value < 2**53


def _has_costs(totals: dict[str, Any]) -> bool:
    return all(is_number(totals.get(name)) for name in _COSTS)


def _is_best(best: dict[str, Any]) -> bool:
    return is_number(best.get("value")) and _whole(best.get("round"))


def load_run(folder: str | Path) -> Run:
    """The run in a folder. Of an unfinished run a torn last line of metrics.jsonl is left out.

    Raises UserError, saying why, if the folder is no run folder, is damaged, or has no finished round.
    """
    folder = Path(folder)
    try:
        if not (folder / "recipe.yaml").is_file():
            raise _DamagedError(_foreign(folder))
        recipe = _read_recipe(folder / "recipe.yaml")
        finished = (folder / "result.json").is_file()
        rounds = _read_rounds(folder / "metrics.jsonl", torn=not finished)
        result = _read_result(folder / "result.json") if finished else _so_far(rounds, recipe["eval"]["target"])
        if result["rounds"] != rounds[-1]["round"]:
            ends = rounds[-1]["round"]
            raise _DamagedError(f"metrics.jsonl ends with round {ends}, result.json with {result['rounds']}; damaged")
        clients = _read_clients(folder / "partition.json")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{folder}: cannot be read: {error}") from error
    except RecursionError:
        raise UserError(f"{folder}: cannot be read: nested too deep; damaged") from None
    except _DamagedError as error:
        raise UserError(f"{folder}: {error}") from None
    return Run(folder, recipe, rounds, result, clients)


def read_runs(folders: Iterable[str | Path]) -> tuple[list[Run], list[str]]:
    """The readable runs among folders, and for every folder left out a line that names it and says why.

    A folder given twice counts once. Left out of the runs of one recipe are the second of a seed, the finished one
    kept, for it would count as a seed that was never run, and any over other data than the first by partition.json.
    """
    runs: list[Run] = []
    problems: list[str] = []
    for folder in {path.resolve(): path for path in map(Path, folders)}.values():
        try:
            runs.append(load_run(folder))
        except UserError as error:
            problems.append(printable(str(error)))
    seeds: dict[tuple[str, int], Run] = {}
    data: dict[str, Run] = {}
    kept = []
    for run in sorted(runs, key=lambda run: not run.finished):
        key = recipe_key(run.recipe)
        twin = seeds.setdefault((key, run.seed), run)
        sibling = data.setdefault(key, run) if run.clients else run
        if twin is not run:
            problems.append(
                printable(f"{run.folder}: the same recipe and seed as {twin.folder}, which stands for both")
            )
        elif sibling.clients != run.clients:
            problems.append(
                printable(f"{run.folder}: the same recipe as {sibling.folder}, but over other data: see partition.json")
            )
        else:
            kept.append(run)
    return [run for run in runs if run in kept], problems


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
    text = path.read_text(encoding="utf-8")
    try:
        recipe = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none
        raise _DamagedError(f"recipe.yaml is not YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(recipe, dict) or not all(isinstance(section, dict) for section in recipe.values()):
        raise _DamagedError("recipe.yaml has no sections with keys and values; not a run folder, or damaged")
    flat = {f"{section}.{key}": value for section, values in recipe.items() for key, value in values.items()}
    _checked(flat, _RECIPE, "recipe.yaml", "not a run folder, or damaged")
    return recipe


def _read_rounds(path: Path, *, torn: bool) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; torn: whether the last may be broken off."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    rounds: list[dict[str, Any]] = []
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
        except ValueError as error:
            if torn and number == len(lines):
                break
            raise _DamagedError(f"metrics.jsonl, line {number} is not JSON: {error}; damaged") from error
        rounds.append(_checked(line, _LINE, f"metrics.jsonl, line {number}"))
        if len(rounds) > 1 and line["round"] <= rounds[-2]["round"]:
            before = rounds[-2]["round"]
            raise _DamagedError(f"metrics.jsonl, line {number}: round {line['round']} after round {before}; damaged")
    if not rounds:
        raise _DamagedError("no round has finished yet" if torn else "metrics.jsonl has no rounds; damaged")
    return rounds


def _read_result(path: Path) -> dict[str, Any]:
    return _checked(_read_json(path), _RESULT, path.name)


def _read_clients(path: Path) -> ClientData | None:
    if not path.is_file():
        return None
    found = _checked(_read_json(path), _PARTITION, path.name)
    counts, classes = found["counts"] or [], found["classes"]
    if counts and (len(counts) != len(found["sizes"]) or any(len(row) != len(classes) for row in counts)):
        raise _DamagedError("partition.json: counts has another form than clients x classes; damaged")
    return ClientData(found["sizes"], classes, counts)


def _read_json(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    try:
        return json.loads(text)
    except ValueError as error:
        raise _DamagedError(f"{path.name} is not JSON: {error}; damaged") from error


def _checked(found: Any, checks: dict[str, _Check], where: str, verdict: str = "damaged") -> dict[str, Any]:
    """An object that has these keys with values as expected."""
    if not isinstance(found, dict):
        raise _DamagedError(f"{where} is {type(found).__name__}, expected an object; {verdict}")
    if missing := [key for key in checks if key not in found]:
        raise _DamagedError(f"{where} lacks {', '.join(missing)}; {verdict}")
    for key, (expected, test) in checks.items():
        if not test(found[key]):
            raise _DamagedError(f"{where}: {key} is {_brief(found[key])}, expected {expected}; {verdict}")
    return dict(found)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _so_far(rounds: Sequence[dict[str, Any]], target: dict[str, float] | None) -> dict[str, Any]:
    """What result.json would say if the run had ended here. The first score of an evaluation is the headline."""
    names = dict.fromkeys(name for line in rounds for name, value in line.items() if is_number(value))
    scored = {n: [line for line in rounds if is_number(line.get(n))] for n in names if n not in _NOT_SCORES}
    best = {name: max(lines, key=lambda line: line[name]) for name, lines in scored.items()}
    return {
        "status": "unfinished",
        "primary": next(iter(scored), ""),
        "final": {name: lines[-1][name] for name, lines in scored.items()},
        "best": {name: {"value": line[name], "round": line["round"]} for name, line in best.items()},
        "target": target,
        "rounds": rounds[-1]["round"],
        "rounds_to_target": rounds_to(target, rounds),
        "totals": {name: sum(line[name] for line in rounds) for name in _COSTS},
    }
