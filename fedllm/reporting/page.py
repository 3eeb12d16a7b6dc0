"""The report as one HTML page, complete in itself: no script, no request, light or dark, fit to print."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from fedllm.reporting import by_value, class_scores, client_scores, swept_figure
from fedllm.reporting.curves import PLOTS, captions
from fedllm.reporting.groups import Group, Target, full_name
from fedllm.reporting.inline_svg import VARIABLES, inline_svg
from fedllm.reporting.quantities import target_words
from fedllm.reporting.summary import WORDS, Summary
from fedllm.results.format import compared, rounds_to
from fedllm.results.names import metric_name, printable, setting_text
from fedllm.results.run_record import RunRecord

Settings = dict[tuple[str, str], str]  # (section, key) -> value as text
_RESULT_SECTIONS = ("machine", "versions")  # of result.json; an unfinished run has none
_HALF = 540  # points: the largest width of a figure that shares a line with another one
_CLIENTS = (
    "Clients' labels",
    "Top: the number of samples of each client. Bottom: the share of each class among them, or of each value of a "
    "column where samples have no labels. Many classes are drawn as bubbles: the area of a bubble is the share.",
)
_OTHERS = {
    "client_labels": _CLIENTS,
    swept_figure.NAME: (swept_figure.TITLE, swept_figure.CAPTION),
    by_value.NAME: (by_value.TITLE, by_value.CAPTION),
    class_scores.NAME: (class_scores.TITLE, class_scores.CAPTION),
    client_scores.NAME: (client_scores.TITLE, client_scores.CAPTION),
}
_ANSWERS = ("prompt", "reference", "before", "after")


@dataclass(frozen=True)
class Section:
    """One data set on the page. costs: what its targets take, None without a target. clients, classes: their scores,
    None where they are not evaluated. figures: SVG of those of curves.PLOTS and of _OTHERS."""

    summary: Summary
    groups: Sequence[Group]
    figures: Mapping[str, str]
    costs: Summary | None = None
    clients: Summary | None = None
    classes: Summary | None = None


def page(sections: Sequence[Section], problems: Sequence[str], lacking: Sequence[str]) -> str:
    """The text of the page, from templates/report.html.

    problems: a line for each folder that was left out. lacking: a line for each figure that lacks some groups.
    """
    groups = [group for section in sections for group in section.groups]
    shared, own = _settings(groups)
    targets = {target_words(target): target for group in groups for target in group.targets}
    return _template().render(
        tasks=", ".join(section.summary.task for section in sections),
        about=_about(groups, problems),
        colours={name: (light.lower(), dark.lower()) for name, (light, dark) in VARIABLES.items()},
        sections=sections,
        words=WORDS,
        clients_note=client_scores.NOTE,
        classes_note=class_scores.NOTE,
        figures=[_figures(section, number) for number, section in enumerate(sections)],
        answers=[_answers(section.groups) for section in sections],
        answer_headings=_ANSWERS,
        targets=[f"to {words}" for words in targets],
        runs=[_outcome(run, group, groups, targets) for group in groups for run in group.runs],
        several=len(groups) > 1,
        shared=_by_section(shared),
        own=[(full_name(group, groups), _by_section(rest)) for group, rest in zip(groups, own, strict=True)],
        problems=problems,
        lacking=lacking,
        version=version("fedllm"),
    )


def _template() -> Template:
    """templates/report.html. Values are text: unprintable characters are replaced (`printable`), markup is escaped."""
    environment = Environment(
        loader=PackageLoader("fedllm.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if hasattr(value, "__html__") else printable(str(value)),
    )
    return environment.get_template("report.html")


def _about(groups: Sequence[Group], problems: Sequence[str]) -> str:
    runs = sum(len(group.runs) for group in groups)
    counts = f"{runs} run{'s' * (runs > 1)} in {len(groups)} group{'s' * (len(groups) > 1)}."
    omitted = f" {len(problems)} folder{'s' * (len(problems) > 1)} left out." if problems else ""
    return f"{counts}{omitted}"


def _figures(section: Section, number: int) -> list[dict[str, Any]]:
    """The figures of a data set. number: of the data set, in the ids of its figures."""
    texts = captions(section.groups)
    found = []
    for name, svg in section.figures.items():
        title, caption = _OTHERS[name] if name in _OTHERS else (PLOTS[name].title, texts[name])
        width = re.search(r'width="([\d.]+)pt"', svg)
        wide = width is not None and float(width[1]) > _HALF
        drawn = inline_svg(svg, f"{name}-{number}", title)
        found.append({"title": title, "caption": caption, "svg": drawn, "wide": wide})
    return found


def _answers(groups: Sequence[Group]) -> list[tuple[str, list[list[str]]]]:
    """Of each group with answers, its name and those of its first run that has them."""
    found = []
    for group in groups:
        if lines := next((run.answers for run in group.runs if run.answers), None):
            found.append((full_name(group, groups), [[line[key] for key in _ANSWERS] for line in lines]))
    return found


def _outcome(run: RunRecord, group: Group, groups: Sequence[Group], targets: Mapping[str, Target]) -> list[str]:
    """The row of a run. A target that is not its group's has a dash."""
    result = run.result
    best, final = result["best"].get(run.primary), result["final"].get(run.primary)
    reached = [rounds_to(target, run.rounds) if target in group.targets else None for target in targets.values()]
    return [
        str(run.folder), full_name(group, groups), str(run.seed), str(result["rounds"]),
        _number(run.best_score(run.primary)), str(best["round"] if best else "-"), _number(final),
        *(str(rounds or "-") for rounds in reached), str(result["rejected"]), result["status"],
    ]  # fmt: skip


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _settings(groups: Sequence[Group]) -> tuple[Settings, list[Settings]]:
    """The settings that all groups share, and the others of each group."""
    settings = [_all_settings(group) for group in groups]
    union = {where: text for found in settings for where, text in found.items()}
    of_result = {where: text for where, text in union.items() if where[0] in _RESULT_SECTIONS}
    shared = {
        where: text
        for where, text in union.items()
        if all({**of_result, **found}.get(where) == text for found in settings)
    }
    return shared, [{where: text for where, text in found.items() if where not in shared} for found in settings]


def _all_settings(group: Group) -> Settings:
    """The recipe without seed and folders, the metric, and the machine and the versions that made the runs."""
    found = {where: setting_text(value) for where, value in compared(group.runs[0].recipe).items()}
    found["eval", "metric"] = metric_name(group.metric) or "not evaluated yet"
    for section in _RESULT_SECTIONS:
        told = [run.result.get(section) for run in group.runs]
        facts: list[dict[str, Any]] = [fact for fact in told if isinstance(fact, dict)]
        for key in dict.fromkeys(key for fact in facts for key in fact):
            texts = dict.fromkeys(setting_text(fact[key]) for fact in facts if key in fact)
            found[section, key] = " or ".join(texts)
    return found


def _by_section(settings: Settings) -> dict[str, list[tuple[str, str]]]:
    sections: dict[str, list[tuple[str, str]]] = {}
    for (section, key), text in settings.items():
        sections.setdefault(str(section), []).append((str(key), text))
    return sections
