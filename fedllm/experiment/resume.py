"""Checks that a recipe can continue the run that its folder already holds."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedllm.common.console import say
from fedllm.common.errors import UserError
from fedllm.config.recipe import CHOSEN_KEYS, DECIDED_KEYS, FREE_KEYS, Recipe, own_keys
from fedllm.config.yaml_layers import parse_yaml
from fedllm.distributed.process_group import restarted
from fedllm.experiment.build import Job
from fedllm.experiment.run_facts import RunFacts


def check_folder(folder: Path, recipe: Recipe) -> None:
    """Raises UserError if the folder is not writable, holds another recipe's run, or any run with run.resume=never."""
    saved = folder / "recipe.yaml"
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise UserError(f"run.dir={folder}: {there} is a file, expected a folder")
    if not os.access(there, os.W_OK):
        raise UserError(f"run.dir={folder}: {there} cannot be written to; choose another run.dir")
    if not saved.is_file():
        return
    if recipe.run.resume == "never" and not restarted():
        raise UserError(f"{folder} holds a run, and run.resume=never asks for a new one; choose another run.dir")
    try:
        before = parse_yaml(saved.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{saved}: not readable ({error}); choose another run.dir") from error
    if not (isinstance(before, dict) and all(isinstance(keys, dict) for keys in before.values())):
        raise UserError(f"{saved}: is no recipe that fedllm wrote; choose another run.dir")
    before = {section: own_keys(section, values) for section, values in before.items()}
    recipe = _with_its_clients(recipe, folder)
    free = FREE_KEYS | {("run", key) for key in CHOSEN_KEYS}
    differing = [
        f"{section}.{key}: {old.get(key)!r} there, {values.get(key)!r} here"
        for section, values in parse_yaml(recipe.yaml()).items()
        for old in [before.get(section, {})]
        for key in {*values, *old}
        if (section, key) not in free and old.get(key) != values.get(key)
        if not ((section, key) in DECIDED_KEYS and values.get(key) == "auto")
    ]
    if differing:
        listed = "\n  ".join(sorted(differing))
        raise UserError(f"{folder} holds the run of another recipe; choose another run.dir. They differ in\n  {listed}")


def _with_its_clients(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe for as many clients as the run in the folder has. check_data compares the clients themselves."""
    path = folder / "partition.json"
    if recipe.federation.clients_per_round is not None or not path.is_file():
        return recipe
    try:
        count = len(json.loads(path.read_text(encoding="utf-8"))["sizes"])
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path}: not readable ({error}); choose another run.dir") from error
    return recipe.for_clients(count)


def check_data(job: Job, facts: RunFacts, folder: Path) -> None:
    """Raises UserError if the data differs from the data that the run began with."""
    labels, data = list(job.task.classes), job.data
    if facts.labels is not None and facts.labels != labels:
        raise UserError(
            f"{folder}: the run began with the classes {', '.join(facts.labels)}, now they are {', '.join(labels)}; "
            f"put the data back as they were, or choose another run.dir"
        )
    for name, before in facts.data.items():
        if data[name] != before:
            what = "partition: its clients hold other samples" if name == "partition" else f"{name} split"
            raise UserError(
                f"{folder}: the run began with another {what} (sha256 {before[:12]}, now {data[name][:12]}); "
                f"put the data back as they were, or choose another run.dir"
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
    return replace(recipe, run=replace(recipe.run, **before), model=replace(recipe.model, head=facts.head))
