"""Groups of runs that differ only in the seed, and the names of the groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedllm.reporting.data_sets import by_data_set
from fedllm.results.format import compared, settings_key
from fedllm.results.names import printable, setting_text
from fedllm.results.run_record import DATA_FILES, MADE_WITH, RunRecord

Target = dict[str, float]
_SHOWN = 3  # groups that differ in more settings than this are numbered
_LONGEST = 60  # and so are groups with a longer name


@dataclass(frozen=True)
class Group:
    """Finished runs with one recipe, data and RunRecord.made_with that differ only in the seed, or one unfinished run.

    task: the name of the data set. name: the algorithm and the settings in which the groups of this data set differ; a
    number and the algorithm if these settings are many, which then are `settings`. note: the progress of an unfinished
    run. targets: metric values to reach.
    """

    task: str
    name: str
    runs: list[RunRecord]
    targets: tuple[Target, ...] = ()
    settings: str = ""
    note: str = ""

    @property
    def label(self) -> str:
        """Name and note."""
        return f"{self.name} ({self.note})" if self.note else self.name

    @property
    def metric(self) -> str:
        """The headline metric."""
        return self.runs[0].primary

    @property
    def own_target(self) -> Target:
        """The target of the recipe; empty where it sets none."""
        return self.runs[0].result["target"] or {}


def group_runs(runs: Sequence[RunRecord], targets: Sequence[Target] = ()) -> list[Group]:
    """The groups in the order of their first runs, data set by data set. Groups average over seeds only; an unfinished
    run is a group of its own. targets: count instead of the targets of the recipes."""
    groups: list[Group] = []
    for task, members in by_data_set(runs).items():
        recipes: dict[str, list[RunRecord]] = {}
        for run in members:
            recipes.setdefault(run.key, []).append(run)
        parts = [part for alike in recipes.values() for part in _parts(alike)]
        for (name, settings), part in zip(_names([part[0] for part in parts]), parts, strict=True):
            own = part[0].result["target"]
            wanted = tuple(targets) or ((own,) if own else ())
            groups.append(Group(task, name, part, wanted, settings, _unfinished(part[0])))
    return groups


def by_task(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """The groups of each data set by its name."""
    tasks: dict[str, list[Group]] = {}
    for group in groups:
        tasks.setdefault(group.task, []).append(group)
    return tasks


def legend(groups: Sequence[Group]) -> dict[str, str]:
    """The settings of the groups that are numbered, by their names."""
    return {group.name: group.settings for group in groups if group.settings}


def _parts(members: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Runs of one recipe: the finished ones by made_with, then each unfinished one alone."""
    finished: dict[str, list[RunRecord]] = {}
    for run in members:
        if run.finished:
            finished.setdefault(settings_key(run.made_with), []).append(run)
    return [*finished.values(), *([run] for run in members if not run.finished)]


def full_name(group: Group, groups: Sequence[Group]) -> str:
    """The group's label, with its data set where there are several."""
    return group.label if len({other.task for other in groups}) == 1 else f"{group.task} {group.label}"


def _unfinished(run: RunRecord) -> str:
    if run.finished:
        return ""
    return f"seed {run.seed} unfinished, round {run.result['rounds']} of {run.recipe['federation']['rounds']}"


def _names(runs: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """Each run's name and, if the groups are numbered, its settings.

    A name is the algorithm with the settings in which the run differs from the others of its data set.
    """
    algorithms = [run.algorithm for run in runs]
    differing = _differing(runs)
    names = [f"{algorithm} {', '.join(own)}".strip() for algorithm, own in zip(algorithms, differing, strict=True)]
    if max(map(len, differing)) <= _SHOWN and max(map(len, names)) <= _LONGEST:
        return [(name, "") for name in names]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names), 1)}
    return [
        (f"{numbers[name]} {algorithm}", ", ".join(own) or "the settings that all share")
        for name, algorithm, own in zip(names, algorithms, differing, strict=True)
    ]


def _differing(runs: Sequence[RunRecord]) -> list[list[str]]:
    """For each run the settings in which it differs from the others. An algorithm's own settings are compared among
    runs of the same algorithm. An unfinished run has no made_with."""
    settings = [settings_of(run, runs) for run in runs]
    finished = [own for run, own in zip(runs, settings, strict=True) if run.finished]
    places = dict.fromkeys(where for own in settings for where in own)
    found = []
    for run, mine in zip(runs, settings, strict=True):
        kin = [other for other in settings if other["algorithm", "name"] == mine["algorithm", "name"]]
        differing = []
        for where in sorted(places, key=lambda where: where[0] != "algorithm"):
            section, key = where
            if where in MADE_WITH and not run.finished:
                continue
            others = kin if section == "algorithm" else finished if where in MADE_WITH else settings
            if len({_text(other, where) for other in others}) > 1:
                prefix = "" if section == "algorithm" else f"{section}."
                differing.append(printable(f"{prefix}{key}={_text(mine, where)}"))
        found.append(differing)
    return found


def settings_of(run: RunRecord, runs: Sequence[RunRecord]) -> dict[tuple[str, str], Any]:
    """The settings of a run that can tell it from `runs`, runs of its data set. Files of equal content are equal; a
    digest tells files of the same name apart."""
    settings = compared(run.recipe) | run.made_with
    if not run.data:
        return settings
    training = run.data["training"]
    if all(other.data.get("training") == training for other in runs):
        return {where: value for where, value in settings.items() if where not in DATA_FILES}
    twins = {other.data.get("training") for other in runs if compared(other.recipe) == compared(run.recipe)}
    return settings if len(twins) == 1 else settings | {("data", "training digest"): training[:8]}


def _text(settings: dict[tuple[str, str], Any], where: tuple[str, str]) -> str:
    return setting_text(settings[where]) if where in settings else "absent"
