"""The report as one HTML page that needs nothing but itself: no script, no request, light or dark, fit to print."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedllm import __version__
from fedllm.groups import Group, full_name
from fedllm.inline import VARIABLES, inline_svg
from fedllm.look import metric_name
from fedllm.plots import PLOTS
from fedllm.results import Run, compared, printable, setting_text
from fedllm.summary import WORDS, Summary

Settings = dict[tuple[str, str], str]
_TOLD = ("machine", "versions")  # sections of result.json; an unfinished run has none
_HALF = 540  # points: what a figure may measure that shares the page's width with another

_CLIENTS = (
    "Clients' labels",
    "The samples of each client on top, the classes among them below; where there are many classes, a bubble for each, "
    "its area the class's share of the client.",
)
_COLUMNS = (
    "rejected: faulty uploads, which count nowhere but among the bytes. MB up and down: all bytes of all clients, in "
    "megabytes. seconds: wall clock of the rounds. simulated s: each round as long as its slowest client computes and "
    "sends. client MB: what a client holds in memory while it trains. A dash: at least one seed does not tell."
)


class Html(str):
    """Markup. Every other string is text, and is escaped where it becomes part of a page."""


def tag(name: str, *inner: str, **attributes: str) -> Html:
    """An element; attributes: `class_` stands for class."""
    opened = "".join(f' {key.rstrip("_")}="{_escape(value)}"' for key, value in attributes.items())
    return Html(f"<{name}{opened}>{_join(inner)}</{name}>")


def _join(parts: Iterable[str]) -> Html:
    return Html("".join(map(_escape, parts)))


def _escape(text: str) -> str:
    return text if isinstance(text, Html) else html.escape(printable(text))


def page(
    summary: Summary,
    groups: Sequence[Group],
    figures: Mapping[str, str],
    problems: Sequence[str],
    lacking: Sequence[str],
) -> str:
    """The text of the page. figures: SVG of those of plots.PLOTS and of `client_labels`. problems: a line for each
    folder that was left out. lacking: a line for each figure that lacks some groups.
    """
    tasks = ", ".join(dict.fromkeys(group.task for group in groups))
    sections = {
        "table": ("Scores and costs", _table(summary)),
        "figures": ("Figures", _figures(figures)),
        "runs": ("Runs", _runs(groups)),
        "settings": ("Settings", _settings(groups)),
        "left-out": ("Left out", _left_out(problems, lacking)),
    }
    caption = summary.caption.removeprefix(f"{tasks}; ")
    count = sum(len(group.runs) for group in groups)
    about = [f"{count} run{'s' * (count > 1)} in {len(groups)} group{'s' * (len(groups) > 1)}."]
    about += [f"{len(problems)} folder{'s' * (len(problems) > 1)} left out."] if problems else []
    links = (tag("a", title, href=f"#{name}") for name, (title, _) in sections.items())
    body = _join(
        [
            tag("header", tag("h1", tasks), tag("p", " ".join([f"{caption}.", *about])), tag("nav", *links)),
            *(tag("section", tag("h2", title), inner, id=name) for name, (title, inner) in sections.items()),
            tag("footer", f"fedllm {__version__}"),
        ]
    )
    return f"{_HEAD.format(title=_escape(f'{tasks}: fedllm report'), style=_style())}<body>\n{body}\n</body>\n</html>\n"


def _grid(headings: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[str]) -> Html:
    """A table; words: the headings whose columns hold words, the others hold numbers."""
    kinds = ["word" if heading in words else "number" for heading in headings]
    lines = [
        tag("tr", *(tag(cell, text, class_=kind) for kind, text in zip(kinds, row, strict=True)))
        for cell, row in [("th", headings), *(("td", row) for row in rows)]
    ]
    return tag("div", tag("table", tag("thead", lines[0]), tag("tbody", *lines[1:])), class_="scroll")


def _table(summary: Summary) -> Html:
    return _join([_grid(summary.headings, summary.rows, WORDS), tag("p", _COLUMNS, class_="note")])


def _figures(figures: Mapping[str, str]) -> Html:
    about = {**{name: (plot.title, plot.caption) for name, plot in PLOTS.items()}, "client_labels": _CLIENTS}
    shown = []
    for name, text in figures.items():
        title, caption = about[name]
        width = re.search(r'width="([\d.]+)pt"', text)
        size = "wide" if width and float(width[1]) > _HALF else "half"
        parts = (tag("h3", title), Html(inline_svg(text, name, title)), tag("figcaption", caption))
        shown.append(tag("figure", *parts, class_=size))
    return tag("div", *shown, class_="figures")


def _runs(groups: Sequence[Group]) -> Html:
    headings = ["folder", "group", "seed", "rounds", "best", "in round", "final", "to target", "rejected", "state"]
    rows = [(str(run.folder), full_name(group, groups), *_outcome(run)) for group in groups for run in group.runs]
    return _grid(headings, rows, ["folder", "group", "state"])


def _outcome(run: Run) -> list[str]:
    result = run.result
    best, final = result["best"].get(run.primary, {}), result["final"].get(run.primary)
    scores = [_number(best.get("value")), str(best.get("round", "-")), _number(final)]
    reached = str(result["rounds_to_target"] or "-")
    return [str(run.seed), str(result["rounds"]), *scores, reached, str(result["rejected"]), result["status"]]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _settings(groups: Sequence[Group]) -> Html:
    """What all groups share, then what each has of its own."""
    settings = [_all_settings(group) for group in groups]
    union = {where: text for own in settings for where, text in own.items()}
    silent = {where: text for where, text in union.items() if where[0] in _TOLD}
    shared = {where: text for where, text in union.items() if all({**silent, **s}.get(where) == text for s in settings)}
    parts = [tag("h3", "Shared by all groups" if len(groups) > 1 else "All settings"), _listed(shared)]
    for group, own in zip(groups, settings, strict=True):
        if rest := {where: text for where, text in own.items() if where not in shared}:
            parts += [tag("h3", full_name(group, groups)), _listed(rest)]
    return _join(parts)


def _all_settings(group: Group) -> Settings:
    """The recipe, but for seed and folders, the metric, and where and with what the runs were made."""
    found = {where: setting_text(value) for where, value in compared(group.runs[0].recipe).items()}
    found["eval", "metric"] = metric_name(group.metric) or "not evaluated yet"
    for section in _TOLD:
        told = [run.result.get(section) for run in group.runs]
        facts: list[dict[str, Any]] = [fact for fact in told if isinstance(fact, dict)]
        for key in dict.fromkeys(key for fact in facts for key in fact):
            texts = dict.fromkeys(setting_text(fact[key]) for fact in facts if key in fact)
            found[section, key] = " or ".join(texts)
    return found


def _listed(settings: Settings) -> Html:
    sections: dict[str, list[Html]] = {}
    for (section, key), text in settings.items():
        pair = tag("span", tag("b", str(key)), f" {text}")
        sections.setdefault(str(section), []).append(pair)
    return tag("dl", *(_join([tag("dt", name), tag("dd", *pairs)]) for name, pairs in sections.items()))


def _left_out(problems: Sequence[str], lacking: Sequence[str]) -> Html:
    parts = []
    for title, lines in {"Folders": problems, "In the figures": lacking}.items():
        if lines:
            parts += [tag("h3", title), tag("ul", *(tag("li", line) for line in lines))]
    return _join(parts or [tag("p", "Nothing: every folder was read, and every figure has all groups.")])


def _style() -> str:
    light, dark = (
        "".join(f"--{name}:{colours[side].lower()};" for name, colours in VARIABLES.items()) for side in (0, 1)
    )
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n{_CSS}"


_HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{style}</style>
</head>
"""

_CSS = """
body { margin: 0 auto; padding: 2.5rem 1.5rem; max-width: 76rem; background: var(--paper); color: var(--ink);
  font: 15px/1.55 system-ui, "Segoe UI", "DejaVu Sans", sans-serif }
h1, h3, p, td.word, dd, li { overflow-wrap: anywhere }
h1 { margin: 0; font-size: 1.7rem; line-height: 1.25 }
h2 { margin: 2.8rem 0 .8rem; padding-bottom: .25rem; border-bottom: 1px solid var(--grid); font-size: 1.2rem }
h3 { margin: 1.6rem 0 .5rem; font-size: 1rem }
header p { margin: .5rem 0 0; color: var(--faint) }
nav { margin-top: .9rem; display: flex; flex-wrap: wrap; gap: .3rem 1.2rem }
a { color: var(--line0); text-decoration: none }
a:hover { text-decoration: underline }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: .82rem; line-height: 1.4; font-variant-numeric: tabular-nums }
th, td { padding: .3rem 1rem .3rem 0; text-align: left; vertical-align: baseline;
  border-bottom: 1px solid var(--grid) }
th { color: var(--faint); font-weight: 600; vertical-align: bottom }
td.number { white-space: nowrap }
.number { text-align: right }
:is(th, td):last-child { padding-right: 0 }
td.word { min-width: 8rem }
.note, figcaption { max-width: 46rem; color: var(--faint); font-size: .86rem }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 34rem), 1fr)); gap: 2.2rem 2.5rem }
figure { margin: 0; min-width: 0 }
figure h3 { margin-top: 0 }
.wide { grid-column: 1 / -1; overflow-x: auto }
.wide svg { min-width: 44rem }
figcaption { margin-top: .5rem }
svg { display: block; max-width: 100%; height: auto }
dl { display: grid; grid-template-columns: 7rem 1fr; gap: .25rem 1rem; margin: 0; font-size: .86rem }
dt { color: var(--faint) }
dd { margin: 0; display: flex; flex-wrap: wrap; gap: .1rem 1.1rem }
dd b { font-weight: 600 }
ul { margin: 0; padding-left: 1.2rem }
footer { margin-top: 3rem; color: var(--faint); font-size: .86rem }
@media print {
  body { padding: 0; max-width: none; font-size: 10pt }
  nav { display: none }
  .scroll, .wide { overflow: visible }
  .figures { display: block }
  figure { margin-bottom: 1.4rem }
  .wide svg { min-width: 0 }
  table { font-size: 7.5pt }
  th, td { padding-right: .4rem; white-space: normal }
  figure, tr, dl { break-inside: avoid }
  h2, h3 { break-after: avoid }
}
"""
