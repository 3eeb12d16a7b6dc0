"""The report as one HTML page, complete in itself: no script, no request, light or dark, fit to print."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from fedllm.reporting.curves import PLOTS
from fedllm.reporting.groups import Group, full_name
from fedllm.reporting.inline_svg import VARIABLES, inline_svg
from fedllm.reporting.summary import WORDS, Summary
from fedllm.results.format import compared
from fedllm.results.names import metric_name, printable, setting_text
from fedllm.results.run_record import RunRecord

Settings = dict[tuple[str, str], str]  # (section, key) -> value as text
_RESULT_SECTIONS = ("machine", "versions")  # of result.json; an unfinished run has none
_HALF = 540  # points: the largest width of a figure that shares a line with another one
_CLIENTS = (
    "Clients' labels",
    "The samples of each client on top, the classes among them below. Where there are many classes, a bubble for each: "
    "its area is the class's share of the client.",
)


def page(
    summary: Summary,
    groups: Sequence[Group],
    figures: Mapping[str, str],
    problems: Sequence[str],
    lacking: Sequence[str],
) -> str:
    """The text of the page, from templates/report.html.

    figures: SVG of those of curves.PLOTS and of `client_labels`. problems: a line for each folder that was left out.
    lacking: a line for each figure that lacks some groups.
    """
    tasks = ", ".join(dict.fromkeys(group.task for group in groups))
    shared, own = _settings(groups)
    return _template().render(
        tasks=tasks,
        about=_about(summary.caption.removeprefix(f"{tasks}; "), groups, problems),
        colours={name: (light.lower(), dark.lower()) for name, (light, dark) in VARIABLES.items()},
        summary=summary,
        words=WORDS,
        figures=[_figure(name, text) for name, text in figures.items()],
        runs=[(run.folder, full_name(group, groups), *_outcome(run)) for group in groups for run in group.runs],
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


def _about(caption: str, groups: Sequence[Group], problems: Sequence[str]) -> str:
    runs = sum(len(group.runs) for group in groups)
    counts = f"{runs} run{'s' * (runs > 1)} in {len(groups)} group{'s' * (len(groups) > 1)}."
    omitted = f" {len(problems)} folder{'s' * (len(problems) > 1)} left out." if problems else ""
    return f"{caption}. {counts}{omitted}"


def _figure(name: str, text: str) -> dict[str, Any]:
    title, caption = _CLIENTS if name == "client_labels" else (PLOTS[name].title, PLOTS[name].caption)
    width = re.search(r'width="([\d.]+)pt"', text)
    wide = width is not None and float(width[1]) > _HALF
    return {"title": title, "caption": caption, "svg": inline_svg(text, name, title), "wide": wide}


def _outcome(run: RunRecord) -> list[str]:
    result = run.result
    best, final = result["best"].get(run.primary), result["final"].get(run.primary)
    scores = [_number(run.best_score(run.primary)), str(best["round"] if best else "-"), _number(final)]
    reached = str(result["rounds_to_target"] or "-")
    return [str(run.seed), str(result["rounds"]), *scores, reached, str(result["rejected"]), result["status"]]


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
