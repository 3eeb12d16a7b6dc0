"""Runs put into groups that differ in the seed alone, and the groups' names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedllm.results import MADE_WITH, Run, compared, printable, recipe_key, setting_text, settings_key


@dataclass(frozen=True)
class Group:
    """Finished runs of one recipe and one make (Run.made_with) that differ in the seed alone, or one unfinished run.

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


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Runs in groups, in the order of their first runs, task by task. Only seeds are ever averaged; an unfinished run
    is a group of its own."""
    tasks: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        tasks.setdefault(run.task, {}).setdefault(recipe_key(run.recipe), []).append(run)
    groups: list[Group] = []
    for recipes in tasks.values():
        parts = [part for members in recipes.values() for part in _parts(members)]
        for name, part in zip(_names([part[0] for part in parts]), parts, strict=True):
            groups.append(Group(name, part, _unfinished(part[0])))
    return groups


def _parts(members: Sequence[Run]) -> list[list[Run]]:
    """Runs of one recipe: the finished ones by their make, then each of the others alone."""
    makes: dict[str, list[Run]] = {}
    for run in members:
        if run.finished:
            makes.setdefault(settings_key(run.made_with), []).append(run)
    return [*makes.values(), *([run] for run in members if not run.finished)]


def full_name(group: Group, groups: Sequence[Group]) -> str:
    """The group's label, with its task where there are several."""
    return group.label if len({other.task for other in groups}) == 1 else f"{group.task} {group.label}"


def _unfinished(run: Run) -> str:
    if run.finished:
        return ""
    return f"seed {run.seed} unfinished, round {run.result['rounds']} of {run.recipe['federation']['rounds']}"


def _names(runs: Sequence[Run]) -> list[str]:
    """Each run's algorithm with the settings that tell it from the others. An algorithm's own settings count only
    against those of the same algorithm: others have other ones. An unfinished run does not tell its make."""
    settings = [compared(run.recipe) | run.made_with for run in runs]
    finished = [own for run, own in zip(runs, settings, strict=True) if run.finished]
    places = dict.fromkeys(where for own in settings for where in own)
    names = []
    for run, mine in zip(runs, settings, strict=True):
        algorithm = mine["algorithm", "name"]
        kin = [other for other in settings if other["algorithm", "name"] == algorithm]
        differing = []
        for where in sorted(places, key=lambda where: where[0] != "algorithm"):
            section, key = where
            if where in MADE_WITH and not run.finished:
                continue
            others = kin if section == "algorithm" else finished if where in MADE_WITH else settings
            if len({_text(other, where) for other in others}) > 1:
                prefix = "" if section == "algorithm" else f"{section}."
                differing.append(printable(f"{prefix}{key}={_text(mine, where)}"))
        names.append(" ".join([printable(algorithm), ", ".join(differing)]).strip())
    return names


def _text(settings: dict[tuple[str, str], Any], where: tuple[str, str]) -> str:
    return setting_text(settings[where]) if where in settings else "absent"
