"""Runs put into groups that differ in the seed alone, and the groups' names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedllm.results import Run, Sections, compared, printable, recipe_key, setting_text


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


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Runs in groups, in the order of their first runs, task by task. Only seeds are ever averaged; an unfinished run
    is a group of its own."""
    tasks: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        tasks.setdefault(run.task, {}).setdefault(recipe_key(run.recipe), []).append(run)
    groups: list[Group] = []
    for recipes in tasks.values():
        names = _names([members[0].recipe for members in recipes.values()])
        for name, members in zip(names, recipes.values(), strict=True):
            finished = [run for run in members if run.finished]
            groups += [Group(name, finished)] if finished else []
            groups += [Group(name, [run], _unfinished(run)) for run in members if not run.finished]
    return groups


def full_name(group: Group, groups: Sequence[Group]) -> str:
    """The group's label, with its task where there are several."""
    return group.label if len({other.task for other in groups}) == 1 else f"{group.task} {group.label}"


def _unfinished(run: Run) -> str:
    return f"seed {run.seed} unfinished, round {run.result['rounds']} of {run.recipe['federation']['rounds']}"


def _names(recipes: list[Sections]) -> list[str]:
    """Each recipe's algorithm with the settings that tell it from the others. An algorithm's own settings count only
    against those of the same algorithm: others have other ones."""
    settings = [compared(recipe) for recipe in recipes]
    names = []
    for mine in settings:
        algorithm = mine["algorithm", "name"]
        kin = [other for other in settings if other["algorithm", "name"] == algorithm]
        differing = []
        places = dict.fromkeys(where for other in settings for where in other)
        for where in sorted(places, key=lambda where: where[0] != "algorithm"):
            section, key = where
            others = kin if section == "algorithm" else settings
            if len({_text(other, where) for other in others}) > 1:
                prefix = "" if section == "algorithm" else f"{section}."
                differing.append(printable(f"{prefix}{key}={_text(mine, where)}"))
        names.append(" ".join([printable(algorithm), ", ".join(differing)]).strip())
    return names


def _text(settings: dict[tuple[str, str], Any], where: tuple[str, str]) -> str:
    return setting_text(settings[where]) if where in settings else "absent"
