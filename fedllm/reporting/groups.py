"""Groups of runs that differ only in the seed, and the names of the groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedllm.results.format import compared, recipe_key, settings_key
from fedllm.results.names import printable, setting_text
from fedllm.results.run_record import MADE_WITH, RunRecord


@dataclass(frozen=True)
class Group:
    """Finished runs with one recipe and one RunRecord.made_with that differ only in the seed, or one unfinished run.

    name: the algorithm and the settings in which the groups of this task differ. note: the progress of an unfinished
    run.
    """

    name: str
    runs: list[RunRecord]
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


def group_runs(runs: Sequence[RunRecord]) -> list[Group]:
    """The groups in the order of their first runs, task by task. Groups average over seeds only; an unfinished run is a
    group of its own."""
    tasks: dict[str, dict[str, list[RunRecord]]] = {}
    for run in runs:
        tasks.setdefault(run.task, {}).setdefault(recipe_key(run.recipe), []).append(run)
    groups: list[Group] = []
    for recipes in tasks.values():
        parts = [part for members in recipes.values() for part in _parts(members)]
        for name, part in zip(_names([part[0] for part in parts]), parts, strict=True):
            groups.append(Group(name, part, _unfinished(part[0])))
    return groups


def _parts(members: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Runs of one recipe: the finished ones by made_with, then each unfinished one alone."""
    finished: dict[str, list[RunRecord]] = {}
    for run in members:
        if run.finished:
            finished.setdefault(settings_key(run.made_with), []).append(run)
    return [*finished.values(), *([run] for run in members if not run.finished)]


def full_name(group: Group, groups: Sequence[Group]) -> str:
    """The group's label, with its task where there are several."""
    return group.label if len({other.task for other in groups}) == 1 else f"{group.task} {group.label}"


def _unfinished(run: RunRecord) -> str:
    if run.finished:
        return ""
    return f"seed {run.seed} unfinished, round {run.result['rounds']} of {run.recipe['federation']['rounds']}"


def _names(runs: Sequence[RunRecord]) -> list[str]:
    """Each run's algorithm with the settings in which it differs from the others. An algorithm's own settings are
    compared among runs of the same algorithm. An unfinished run has no made_with."""
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
