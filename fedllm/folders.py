"""Runs read back from their folders; what is no run, or damaged, is told apart and said."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedllm.errors import UserError
from fedllm.results import COSTS, LOSS, ClientData, Run, Sections, is_number, outcome, printable, recipe_key, totals
from fedllm.run_checks import (
    LINE,
    PARTITION,
    RECIPE,
    RESULT,
    SCORE,
    START,
    DamagedError,
    checked,
    older_start,
    require_agreement,
    require_totals,
)

_DRIFT = ("update_norm", "mean_update_norm", "update_cosine", "v_spread")
_NOT_SCORES = {"round", *COSTS, *_DRIFT, "train_loss", "clients", "rejected", LOSS, "eval_seconds"}


def load_run(folder: str | Path) -> Run:
    """The run in a folder. Of an unfinished run a torn last line of metrics.jsonl is left out.

    Raises UserError, saying why, if the folder is no run folder, is damaged, or has no finished round.
    """
    folder = Path(folder)
    try:
        if not (folder / "recipe.yaml").is_file():
            raise DamagedError(_foreign(folder))
        recipe = _read_recipe(folder / "recipe.yaml")
        finished = (folder / "result.json").is_file()
        rounds = _read_rounds(folder / "metrics.jsonl", torn=not finished)
        start = _read_start(folder / "start.json")
        if finished:
            result = checked(_read_json(folder / "result.json"), RESULT, "result.json")
            require_agreement(result, recipe, rounds)
            start = older_start(result["totals"], rounds) if start is None else start
            require_totals(result["totals"], start, rounds)
        else:
            start = start or dict.fromkeys(COSTS, 0)
            result = _so_far(rounds, recipe["eval"]["target"], start)
        clients = _read_clients(folder / "partition.json")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{folder}: cannot be read: {error}") from error
    except RecursionError:
        raise UserError(f"{folder}: cannot be read: nested too deep; damaged") from None
    except DamagedError as error:
        raise UserError(f"{folder}: {error}") from None
    return Run(folder, recipe, rounds, result, start, clients)


def read_runs(folders: Iterable[str | Path]) -> tuple[list[Run], list[str]]:
    """The readable runs among folders, and for every folder left out a line that names it and says why.

    A folder given twice counts once. Left out of the runs of one recipe are the second of a seed, the finished one
    kept, for it would count as a seed that was never run, and any over other data than the first by partition.json.
    """
    runs: list[Run] = []
    problems: list[str] = []
    for folder in {os.path.realpath(path): path for path in map(Path, folders)}.values():
        try:
            runs.append(load_run(folder))
        except UserError as error:
            problems.append(printable(str(error)))
    kept: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: not run.finished):
        kin = kept.setdefault(recipe_key(run.recipe), [])
        twin = next((other for other in kin if _stands_for(other, run)), None)
        sibling = next((other for other in kin if other.clients), run) if run.clients else run
        if twin:
            problems.append(
                printable(f"{run.folder}: the same recipe and seed as {twin.folder}, which stands for both")
            )
        elif sibling.clients != run.clients:
            problems.append(
                printable(f"{run.folder}: the same recipe as {sibling.folder}, but over other data: see partition.json")
            )
        else:
            kin.append(run)
    return [run for run in runs if any(run is member for kin in kept.values() for member in kin)], problems


def _stands_for(other: Run, run: Run) -> bool:
    """Whether `other`, of the same recipe, is what `run` is or will be."""
    return other.seed == run.seed and (not run.finished or other.made_with == run.made_with)


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
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise DamagedError("recipe.yaml has an alias (*), which fedllm never writes; not a run folder, or damaged")
        recipe = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none
        raise DamagedError(f"recipe.yaml is not YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(recipe, dict) or not all(isinstance(section, dict) for section in recipe.values()):
        raise DamagedError("recipe.yaml has no sections with keys and values; not a run folder, or damaged")
    flat = {f"{section}.{key}": value for section, values in recipe.items() for key, value in values.items()}
    checked(flat, RECIPE, "recipe.yaml", "not a run folder, or damaged")
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
            raise DamagedError(f"metrics.jsonl, line {number} is not JSON: {error}; damaged") from error
        where = f"metrics.jsonl, line {number}"
        rounds.append(checked(line, LINE, where))
        if line["round"] != number:
            raise DamagedError(f"{where}: found round {line['round']}, expected round {number}; damaged")
        checked(line, dict.fromkeys(line.keys() - (_NOT_SCORES - {LOSS}), SCORE), where)
    if not rounds:
        raise DamagedError("no round has finished yet" if torn else "metrics.jsonl has no rounds; damaged")
    return rounds


def _read_start(path: Path) -> dict[str, float] | None:
    """None where an older version of fedllm left no such file."""
    return checked(_read_json(path), START, path.name) if path.is_file() else None


def _read_clients(path: Path) -> ClientData | None:
    if not path.is_file():
        return None
    found = checked(_read_json(path), PARTITION, path.name)
    counts, classes = found["counts"] or [], found["classes"]
    if counts and (len(counts) != len(found["sizes"]) or any(len(row) != len(classes) for row in counts)):
        raise DamagedError("partition.json: counts has another form than clients x classes; damaged")
    return ClientData(found["sizes"], classes, counts)


def _read_json(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    try:
        return json.loads(text)
    except ValueError as error:
        raise DamagedError(f"{path.name} is not JSON: {error}; damaged") from error


def _so_far(
    rounds: Sequence[dict[str, Any]], target: dict[str, float] | None, start: dict[str, float]
) -> dict[str, Any]:
    """What result.json would say if the run had ended here. The first score of an evaluation is the headline."""
    names = dict.fromkeys(name for line in rounds for name, value in line.items() if is_number(value))
    scores = [name for name in names if name not in _NOT_SCORES]
    return {
        "status": "unfinished",
        "primary": next(iter(scores), ""),
        **outcome([*scores, *({LOSS} & names.keys())], target, rounds),
        "totals": totals(start, rounds),
    }
