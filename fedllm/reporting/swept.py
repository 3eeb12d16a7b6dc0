"""Groups of runs that differ in one numeric setting: lines over its values, and their numbers as a CSV file."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fedllm.reporting.groups import Group, Target, settings_of
from fedllm.reporting.quantities import target_words
from fedllm.results.format import is_number, rounds_to, settings_key
from fedllm.results.names import metric_name, printable, setting_text
from fedllm.results.run_record import RunRecord

_TRACKED, _SAMPLED = ("federation", "tracked_per_round"), ("federation", "clients_per_round")

Where = tuple[str, str]  # section and key of a setting
Settings = dict[Where, Any]


@dataclass(frozen=True)
class Point:
    """One group on a line.

    x: the swept value. seeds: the number of the group's seeds. y: mean over seeds; of rounds to a target, a seed that
    did not reach it counts with the rounds that it ran, so that y is then a lower bound. deviation: sample standard
    deviation over seeds, 0 for one. reached: seeds that reached the target; None where y is a score.
    """

    x: float
    y: float
    deviation: float
    seeds: int
    reached: int | None

    @property
    def is_bound(self) -> bool:
        """Whether a seed did not reach the target."""
        return self.reached is not None and self.reached < self.seeds


@dataclass(frozen=True)
class Panel:
    """One swept setting of a data set. setting: its name. target: y is the number of rounds to it; None: y is the final
    value of `metric`. lines: points by rising x, by the name of the line: the algorithm, with the settings that tell it
    from other lines."""

    task: str
    setting: str
    metric: str
    target: Target | None
    lines: dict[str, list[Point]]

    @property
    def measure(self) -> str:
        """What y is: 'rounds to accuracy 0.8' or 'final accuracy'."""
        return f"final {metric_name(self.metric)}" if self.target is None else f"rounds to {target_words(self.target)}"

    @property
    def values(self) -> list[float]:
        """The swept values, rising."""
        return sorted({point.x for points in self.lines.values() for point in points})

    @property
    def is_logarithmic(self) -> bool:
        """Whether all values are positive and span more than a decade."""
        return self.values[0] > 0 and self.values[-1] > 10 * self.values[0]


def swept_panels(groups: Sequence[Group]) -> list[Panel]:
    """The panels of one data set: one for each numeric setting that has a line of three values or two lines of two.

    A line holds finished groups that are equal but for this setting (and the seed). y is the number of rounds to the
    first target that all groups of the panel have and some seed reached, else the final headline score.
    """
    finished = [group for group in groups if not group.note and all(map(_is_scored, group.runs))]
    runs = [group.runs[0] for group in groups]
    settings = [_numbered(settings_of(group.runs[0], runs)) for group in finished]
    panels = []
    for where in dict.fromkeys(where for own in settings for where, value in own.items() if is_number(value)):
        found = _lines(where, finished, settings)
        for metric in dict.fromkeys(finished[members[0]].metric for members in found):
            alike = [members for members in found if finished[members[0]].metric == metric]
            panels.append(_panel(where, alike, finished, settings))
    return panels


def swept_csv(panels: Sequence[Panel]) -> str:
    """The points of all panels, unrounded. at_least: 1 where y is a lower bound."""
    file = io.StringIO()
    keys = ("task", "setting", "value", "line", "measure", "mean", "std", "seeds", "reached", "at_least")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(keys)
    for panel in panels:
        for name, points in panel.lines.items():
            for point in points:
                shared = (panel.task, panel.setting, setting_text(point.x), name, panel.measure)
                deviation = point.deviation if point.seeds > 1 else None
                writer.writerow((*shared, point.y, deviation, point.seeds, point.reached, int(point.is_bound)))
    return file.getvalue()


def _is_scored(run: RunRecord) -> bool:
    """Whether the run has a final headline score."""
    return is_number(run.result["final"].get(run.primary))


def _numbered(settings: Settings) -> Settings:
    """The settings, with the two of algorithm.betas one by one."""
    found = {where: value for where, value in settings.items() if where != ("algorithm", "betas")}
    betas = settings.get(("algorithm", "betas"))
    return found | {("algorithm", f"beta{number}"): beta for number, beta in enumerate(betas or (), 1)}


def _lines(where: Where, groups: Sequence[Group], settings: Sequence[Settings]) -> list[list[int]]:
    """The lines over a setting: indices of their groups, by rising value. [] for a single line of two values, which the
    table compares as well."""
    lines: dict[str, list[int]] = {}
    for index, own in enumerate(settings):
        if is_number(_value(own, where)):
            rest = {other: value for other, value in own.items() if other != where}
            lines.setdefault(settings_key(rest | {("", "metric"): groups[index].metric}), []).append(index)
    rising = [sorted(members, key=lambda index: _value(settings[index], where)) for members in lines.values()]
    sizes = [len({_value(settings[index], where) for index in members}) for members in rising]
    found = [members for members, size in zip(rising, sizes, strict=True) if size > 1]
    return found if len(found) > 1 or max(sizes, default=0) > 2 else []


def _value(settings: Settings, where: Where) -> Any:
    """The value of a setting. Without tracked_per_round all sampled clients are tracked."""
    value = settings.get(where)
    return settings.get(_SAMPLED) if where == _TRACKED and value is None else value


def _panel(
    where: Where, lines: Sequence[Sequence[int]], groups: Sequence[Group], settings: Sequence[Settings]
) -> Panel:
    members = [groups[index] for line in lines for index in line]
    target = next(_targets(members), None)
    names = _names(where, [settings[line[0]] for line in lines])
    drawn = {
        name: [_point(groups[index], float(_value(settings[index], where)), target) for index in line]
        for name, line in zip(names, lines, strict=True)
    }
    return Panel(members[0].task, printable(".".join(where)), members[0].metric, target, drawn)


def _targets(groups: Sequence[Group]) -> Iterator[Target]:
    """The targets that all groups have and that some seed reached."""
    for target in groups[0].targets:
        shared = all(target in group.targets for group in groups)
        if shared and any(rounds_to(target, run.rounds) is not None for group in groups for run in group.runs):
            yield target


def _point(group: Group, x: float, target: Target | None) -> Point:
    if target is None:
        finals = [run.result["final"][run.primary] for run in group.runs]
        values, reached = [float(value) for value in finals if value is not None], None
    else:
        rounds = [rounds_to(target, run.rounds) for run in group.runs]
        values = [
            float(run.result["rounds"] if found is None else found)
            for run, found in zip(group.runs, rounds, strict=True)
        ]
        reached = len(rounds) - rounds.count(None)
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return Point(x, statistics.fmean(values), deviation, len(values), reached)


def _names(swept: Where, lines: Sequence[Settings]) -> list[str]:
    """A name for each line: the algorithm, with the settings but the swept one that differ. An algorithm's own settings
    are compared among lines of the same algorithm."""
    places = dict.fromkeys(where for own in lines for where in own if where not in (swept, ("algorithm", "name")))
    names = []
    for own in lines:
        algorithm = own["algorithm", "name"]
        kin = [other for other in lines if other["algorithm", "name"] == algorithm]
        differing = [
            f"{key if section == 'algorithm' else f'{section}.{key}'}={_text(own, (section, key))}"
            for section, key in places
            if len({_text(other, (section, key)) for other in (kin if section == "algorithm" else lines)}) > 1
        ]
        names.append(printable(f"{algorithm} {', '.join(differing)}".strip()))
    return names


def _text(settings: Settings, where: Where) -> str:
    return setting_text(settings[where]) if where in settings else "absent"
