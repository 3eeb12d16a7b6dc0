"""Reads runs from their folders. Errors distinguish a folder without a run from a damaged run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from fedllm.algorithms import canonical_name
from fedllm.common.errors import UserError
from fedllm.config.recipe import OPTIONAL, own_keys, own_sections
from fedllm.results.checks import older_start, require_agreement, require_totals
from fedllm.results.client_scores import FILE, OfClient
from fedllm.results.data_digests import read_digests, with_digests
from fedllm.results.format import COSTS, LOSS, Sections, is_number, outcome, totals
from fedllm.results.names import printable
from fedllm.results.run_files import (
    Answer,
    Clients,
    ClientScores,
    Costs,
    DamagedError,
    RecipeKeys,
    Result,
    RoundLine,
    checked,
)
from fedllm.results.run_record import ClientData, RunRecord


def load_run(folder: str | Path) -> RunRecord:
    """Reads the run in a folder. In an unfinished run, an incomplete last line of metrics.jsonl is ignored.

    Raises UserError with the reason if the folder is not a run folder, is damaged, or has no finished round.
    """
    folder = Path(folder)
    try:
        require_run_folder(folder)
        recipe = _read_recipe(folder / "recipe.yaml")
        finished = (folder / "result.json").is_file()
        rounds = _read_rounds(folder / "metrics.jsonl", torn=not finished)
        start = _read_start(folder / "start.json")
        if finished:
            result = _read_result(folder / "result.json")
            require_agreement(result, recipe, rounds)
            start = older_start(result["totals"], rounds) if start is None else start
            require_totals(result["totals"], start, rounds)
        else:
            start = start or dict.fromkeys(COSTS, 0)
            result = _so_far(rounds, recipe, start)
        partition = _read_partition(folder / "partition.json")
        answers = _read_answers(folder / "samples.jsonl") if finished else []
        scores = _read_client_scores(folder / FILE)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{folder}: cannot be read: {error}") from error
    except RecursionError:
        raise UserError(f"{folder}: cannot be read: nested too deep; damaged") from None
    except DamagedError as error:
        raise UserError(f"{folder}: {error}") from None
    clients = _clients(partition) if partition else None
    digests = read_digests(folder, partition)
    return RunRecord(folder, recipe, rounds, result, start, clients, digests, answers, scores)


def read_runs(folders: Iterable[str | Path]) -> tuple[list[RunRecord], list[str]]:
    """Reads the runs in `folders`. Returns them, and one line per omitted folder with the folder and the reason.

    A folder given twice counts once. Two kinds of run are omitted among runs of the same recipe and data. First, a
    second run of a seed, because it would count as one more seed; a finished run has priority over an unfinished one.
    Second, a run whose partition.json shows other clients than that of the first run. A run without digests of its data
    gets those of the runs with the same data settings, if these agree.
    """
    runs: list[RunRecord] = []
    problems: list[str] = []
    for folder in {os.path.realpath(path): path for path in map(Path, folders)}.values():
        try:
            runs.append(load_run(folder))
        except UserError as error:
            problems.append(printable(str(error)))
    runs = with_digests(runs)
    by_key: dict[str, list[RunRecord]] = {}
    for run in sorted(runs, key=lambda run: not run.finished):
        others = by_key.setdefault(run.key, [])
        same_seed = next((other for other in others if _stands_for(other, run)), None)
        first = next((other for other in others if other.clients), run) if run.clients else run
        if same_seed:
            why = f"the same recipe and seed as {same_seed.folder}, which is used instead"
            problems.append(printable(f"{run.folder}: {why}"))
        elif first.clients != run.clients:
            why = f"the same recipe as {first.folder}, but with other clients' data (partition.json differs)"
            problems.append(printable(f"{run.folder}: {why}"))
        else:
            others.append(run)
    chosen = {id(run) for members in by_key.values() for run in members}
    return [run for run in runs if id(run) in chosen], problems


def require_readable(folders: Iterable[str | Path]) -> None:
    """Raises UserError with a reason for each folder if no folder holds a readable run."""
    problems = []
    for folder in folders:
        try:
            load_run(folder)
        except UserError as error:
            problems.append(printable(str(error)))
        else:
            return
    raise none_readable(problems)


def none_readable(problems: Iterable[str]) -> UserError:
    """The error for folders without a readable run. problems: one line per folder."""
    return UserError("\n  ".join(["none of the folders holds a run that can be read:", *problems]))


def require_run_folder(folder: Path) -> None:
    """Raises UserError if `folder` is not a run folder; the message says what it is instead."""
    if not (folder / "recipe.yaml").is_file():
        raise UserError(f"{folder}: {_foreign(folder)}")


def _stands_for(other: RunRecord, run: RunRecord) -> bool:
    """Whether `other`, a run of the same recipe, has the same outcome as `run`, now or when `run` is finished."""
    return other.seed == run.seed and (not run.finished or other.made_with == run.made_with)


def _foreign(folder: Path) -> str:
    if not folder.exists():
        return "no such folder"
    if not folder.is_dir():
        return "not a folder"
    if next(folder.glob("*/recipe.yaml"), None):
        return f"not a run folder, but it holds run folders; name these: {folder}/*"
    return "not a run folder: it has no recipe.yaml"


def _read_recipe(path: Path) -> Sections:
    text = path.read_text(encoding="utf-8")
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise DamagedError("recipe.yaml has an alias (*), which fedllm never writes; not a run folder, or damaged")
        recipe = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an invalid date
        raise DamagedError(f"recipe.yaml is not YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(recipe, dict) or not all(
        isinstance(section, dict) or (name in OPTIONAL and section is None) for name, section in recipe.items()
    ):
        raise DamagedError("recipe.yaml has no sections with keys and values; not a run folder, or damaged")
    flat = {f"{section}.{key}": value for section, values in recipe.items() for key, value in (values or {}).items()}
    checked(flat, RecipeKeys, "recipe.yaml", "not a run folder, or damaged")
    return own_sections(recipe)


def _read_rounds(path: Path, *, torn: bool) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl. torn: whether the last line may be incomplete."""
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
        rounds.append(checked(line, RoundLine, where))
        if line["round"] != number:
            raise DamagedError(f"{where}: found round {line['round']}, expected round {number}; damaged")
    if not rounds:
        raise DamagedError("no round has finished yet" if torn else "metrics.jsonl has no rounds; damaged")
    return rounds


def _read_start(path: Path) -> dict[str, float] | None:
    """The content of start.json, or None if the run's version of fedllm wrote no such file."""
    return checked(_read_json(path), Costs, path.name) if path.is_file() else None


def _read_partition(path: Path) -> dict[str, Any] | None:
    """The content of partition.json, or None if the run's version of fedllm wrote no such file."""
    if not path.is_file():
        return None
    found: dict[str, Any] = checked(_read_json(path), Clients, path.name)
    counts, classes = found["counts"] or [], found["classes"]
    if counts and (len(counts) != len(found["sizes"]) or any(len(row) != len(classes) for row in counts)):
        raise DamagedError("partition.json: counts has another form than clients x classes; damaged")
    return found


def _read_answers(path: Path) -> list[dict[str, str]]:
    """The lines of samples.jsonl, [] if the run wrote no such file."""
    found = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines() if path.is_file() else [], 1):
        try:
            line = json.loads(text)
        except ValueError as error:
            raise DamagedError(f"{path.name}, line {number} is not JSON: {error}; damaged") from error
        found.append(checked(line, Answer, f"{path.name}, line {number}"))
    return found


def _read_client_scores(path: Path) -> list[OfClient]:
    """The clients of client_scores.json, [] if the run wrote no such file."""
    if not path.is_file():
        return []
    found: list[OfClient] = checked(_read_json(path), ClientScores, path.name)["clients"]
    return found


def _clients(partition: dict[str, Any]) -> ClientData:
    counts = partition["counts"] or []
    return ClientData(partition["sizes"], partition["classes"], counts, partition.get("column"))


def _read_json(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    try:
        return json.loads(text)
    except ValueError as error:
        raise DamagedError(f"{path.name} is not JSON: {error}; damaged") from error


def _read_result(path: Path) -> Result:
    """The content of result.json; older keys about the machine, and other names of the algorithm, are replaced."""
    result: Result = checked(_read_json(path), Result, path.name)
    result["algorithm"] = canonical_name(result["algorithm"])
    machine = result.get("machine")
    if isinstance(machine, dict):
        result["machine"] = machine = own_keys("run", machine)
        if isinstance(steps := machine.get("stepped_down"), list):
            machine["stepped_down"] = [own_keys("run", step) if isinstance(step, dict) else step for step in steps]
    return result


def _so_far(rounds: Sequence[dict[str, Any]], recipe: Sections, start: dict[str, float]) -> Result:
    """The result.json of a run that ends after `rounds`. The first score of an evaluation is the headline."""
    names = dict.fromkeys(name for line in rounds for name, value in line.items() if is_number(value))
    scores = [name for name in names if name not in {*RoundLine.__annotations__, LOSS}]
    so_far = {
        "status": "unfinished",
        "algorithm": recipe["algorithm"]["name"],
        "seed": recipe["run"]["seed"],
        "primary": next(iter(scores), ""),
        **outcome([*scores, *({LOSS} & names.keys())], recipe["eval"]["target"], rounds),
        "totals": totals(start, rounds),
    }
    return cast(Result, so_far)
