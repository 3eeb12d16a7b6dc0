"""Checks that a recipe can continue the run that its folder already holds."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedllm.common.console import say
from fedllm.common.errors import UserError
from fedllm.config.recipe import CHOSEN_KEYS, DECIDED_KEYS, FREE_KEYS, OPTIONAL, Recipe, make_recipe, own_sections
from fedllm.config.yaml_layers import parse_yaml
from fedllm.distributed.process_group import restarted
from fedllm.experiment.job import Job
from fedllm.experiment.run_facts import RunFacts

# Where data and model lie. They may change if the content is the same: RunFacts has digests of it under these names.
_PLACES = {
    "data.name": "training",
    "data.train": "training",
    "data.validation": "validation",
    "partition.file": "partition",
    "model.name": "base",
}
_FREE = {f"{section}.{key}" for section, key in FREE_KEYS} | {f"run.{key}" for key in CHOSEN_KEYS}
_ROUNDS = "federation.rounds"
_Changes = dict[str, tuple[Any, Any]]  # section.key -> its value in the folder, and in the recipe


class OtherRunError(UserError):
    """The folder holds a run that this recipe cannot continue."""


def check_folder(folder: Path, recipe: Recipe) -> list[str]:
    """Raises UserError if the folder is not writable, OtherRunError if the recipe cannot continue the run in it.

    Returns the keys of data and model that have changed: `check_data` has to compare the content.
    """
    _require_usable(folder)
    saved = folder / "recipe.yaml"
    if not saved.is_file():
        return []
    if recipe.run.resume == "never" and not restarted():
        raise OtherRunError(f"{folder} holds a run, and run.resume=never asks for a new one; {_other_folder(folder)}")
    changes = _changes(_read_saved(saved), _with_its_clients(recipe, folder))
    refused = {key: why for key, change in changes.items() if (why := _refusal(key, change, recipe)) is not None}
    if refused:
        listed = [f"{key}: {old!r} there, {new!r} here{refused.get(key, '')}" for key, (old, new) in changes.items()]
        raise OtherRunError(
            f"{folder} holds the run of another recipe; {_other_folder(folder)}. They differ in\n  "
            + "\n  ".join(sorted(listed))
        )
    return sorted(changes.keys() & _PLACES.keys())


def _require_usable(folder: Path) -> None:
    for path in (folder, *folder.absolute().parents):
        if path.is_symlink() and not path.exists():
            raise UserError(
                f"run.dir={folder}: {path} is a link to {os.readlink(path)}, which does not exist; make that folder, "
                f"or choose another run.dir"
            )
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise UserError(f"run.dir={folder}: {there} is a file, expected a folder")
    if not os.access(there, os.W_OK):
        raise UserError(f"run.dir={folder}: {there} cannot be written to; choose another run.dir")


def _other_folder(folder: Path) -> str:
    """Advice with a name that is free."""
    number = next(n for n in range(2, 10**6) if not os.path.lexists(f"{folder}-{n}"))
    return f"choose another run.dir, for example run.dir={folder}-{number}"


def _read_saved(path: Path) -> dict[str, dict[str, Any]]:
    """The recipe that a run folder holds, under the keys of this version."""
    try:
        found = parse_yaml(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise OtherRunError(f"{path}: not readable ({error}); {_other_folder(path.parent)}") from error
    if not (isinstance(found, dict) and all(isinstance(found[name], dict) or name in OPTIONAL for name in found)):
        raise OtherRunError(f"{path}: is no recipe that fedllm wrote; {_other_folder(path.parent)}")
    return own_sections(found)


def _changes(before: Mapping[str, Mapping[str, Any]], recipe: Recipe) -> _Changes:
    """The settings that differ, without those that any run may change. One that is newer than the folder had its
    default there. A section that is null in one of them differs as a whole."""
    given = {"algorithm": {"name": recipe.algorithm["name"]}, "data": {"name": "any"}}
    defaults = make_recipe(given, recipe.name, "defaults").sections()
    now = parse_yaml(recipe.yaml())
    pairs = {section: (before.get(section, defaults[section]) or None, now[section]) for section in OPTIONAL}
    whole: _Changes = {section: pair for section, pair in pairs.items() if (pair[0] is None) != (pair[1] is None)}
    return whole | {
        f"{section}.{key}": (old.get(key), values.get(key))
        for section, values in now.items()
        if values is not None and section not in whole
        for old in [{**defaults[section], **before.get(section, {})}]
        for key in {*values, *old}
        if f"{section}.{key}" not in _FREE and not _of_evaluation(section, key) and old.get(key) != values.get(key)
        if not ((section, key) in DECIDED_KEYS and values.get(key) in ("auto", None))
    }


def _of_evaluation(section: str, key: str) -> bool:
    """Whether a setting changes evaluations alone, so that a run may go on with another value."""
    return key == "finetune_steps" if section == "local" else section == "eval" and key != "per_client"


def _with_its_clients(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe for as many clients as the run in the folder has. check_data compares the clients themselves."""
    path = folder / "partition.json"
    if recipe.federation.clients_per_round is not None or not path.is_file():
        return recipe
    try:
        count = len(json.loads(path.read_text(encoding="utf-8"))["sizes"])
    except (ValueError, TypeError, KeyError) as error:
        raise OtherRunError(f"{path}: not readable ({error}); {_other_folder(folder)}") from error
    return recipe.for_clients(count)


def _refusal(key: str, change: tuple[Any, Any], recipe: Recipe) -> str | None:
    """Why a run cannot go on with this change, as an addition to the list of changes; None if it can."""
    if key in _PLACES:
        return None
    if key != _ROUNDS:
        return ""
    before, now = change
    if not isinstance(before, int) or now < before:
        return " (a run can only get longer)"
    why = recipe.load_algorithm().depends_on_total()
    return f" ({why} depends on the number of rounds)" if why else None


def check_data(job: Job, facts: RunFacts, folder: Path, moved: Sequence[str] = ()) -> None:
    """Raises UserError if the data differs from the data that the run began with, or what lies at a new place differs.

    moved: the settings of data and model that have changed, see check_folder.
    """
    labels, data = list(job.task.classes), job.data
    if facts.labels is not None and facts.labels != labels:
        raise UserError(
            f"{folder}: the run began with the classes {', '.join(facts.labels)}, now they are {', '.join(labels)}; "
            f"put the data back as they were, or choose another run.dir"
        )
    for name, before in facts.data.items():
        if data[name] != before:
            kinds = {"partition": "partition: its clients hold other samples", "template": "chat template"}
            what = kinds.get(name, f"{name} split")
            raise UserError(
                f"{folder}: the run began with another {what} (sha256 {before[:12]}, now {data[name][:12]}); "
                f"put the data back as they were, or choose another run.dir"
            )
    recorded = facts.data if facts.base is None else {**facts.data, "base": facts.base}
    for key in moved:
        if _PLACES[key] not in recorded:
            raise UserError(
                f"{folder}: the run began with another {key}, and its checkpoint is of an earlier version and has "
                f"no digest to compare the content by; give {key} as it is in {folder / 'recipe.yaml'}"
            )
    if "model.name" in moved and facts.base != job.base_digest():
        raise UserError(
            f"{folder}: the run began with another model.name, and {job.recipe.model.name} has other weights or "
            f"another tokenizer; give model.name as it is in {folder / 'recipe.yaml'}, or choose another run.dir"
        )


def as_before(recipe: Recipe, facts: RunFacts | None) -> Recipe:
    """The recipe with the head, stacked_clients and slices that the run began with, or that memory forced since.

    With these values the resumed run gives the same bits, also on a machine where "auto" would choose other values.
    """
    if facts is None:
        return recipe
    before: dict[str, Any] = {"stacked_clients": facts.stacked_clients, "slices": facts.slices}
    for name, value in before.items():
        if (now := getattr(recipe.run, name)) not in ("auto", value):
            say(f"run.{name}={now} is for a new run; this one goes on with {value}")
    if recipe.privacy is not None and facts.privacy:
        noise, delta = facts.privacy["noise"], facts.privacy["delta"]
        recipe = replace(recipe, privacy=replace(recipe.privacy, noise=noise, delta=delta))
    return replace(recipe, run=replace(recipe.run, **before), model=replace(recipe.model, head=facts.head))
