"""The cells of a sweep in words: how many runs they are, and what each resolves to. It is the output of --dry-run."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedllm.common.console import console, say
from fedllm.common.errors import UserError
from fedllm.config.recipe import Recipe, load_recipe
from fedllm.results.names import setting_text
from fedllm.sweeps.sweep_plan import SweepPlan

Sections = Mapping[str, Mapping[str, Any]]


def list_cells(plan: SweepPlan) -> None:
    """Prints the number of runs, and for each cell the settings that differ from the recipe."""
    say(_folded(f"{amount(plan)}, into {plan.out}"))
    if (choose := plan.grid.choose) and choose.set:
        say(f"Trials also have {setting_text(choose.set).strip('{}')}.")
    loaded = {cell: plan.load(cell) for cell in plan.wanted_cells()}
    base, said = _baseline(plan, list(loaded.values()))
    say(f"Settings of each cell that differ {said}:")
    for cell, recipe in loaded.items():
        say(f"\n{cell.name}", "bold")
        for line in [*_differences(recipe.sections(), base), *recipe.notes] or ["no difference"]:
            say(_folded(line, "  ", "    "))


def _folded(text: str, first: str = "", others: str = "") -> str:
    """Text in lines that fit the terminal, with an indent of the first line and of the others. Words stay whole."""
    fold = textwrap.TextWrapper(console.width, first, others, break_long_words=False, break_on_hyphens=False)
    return fold.fill(text)


def amount(plan: SweepPlan) -> str:
    """How many cells, trials and runs a sweep has."""
    cells, seeds, cases = len(plan.wanted_cells()), len(plan.grid.seeds or [None]), len(plan.wanted_cases())
    each = f"with {seeds} seeds" if seeds > 1 else "once"
    runs = f"{_count(plan.num_runs(), 'run')}"
    if plan.grid.choose is None:
        return f"{_count(cells, 'cell')}: {runs}, every cell {each}"
    rounds = plan.grid.choose.rounds
    length = "as many rounds as a run" if rounds is None else _count(rounds, "round")
    trials = f"{_count(len(plan.tried_cells()), 'trial')} of {length}"
    best = "the best cell" if cases == 1 else f"the best cell of each of {cases} cases"
    return f"{_count(cells, 'cell')}: {trials}, then {runs}, {best} {each}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _baseline(plan: SweepPlan, cells: Sequence[Recipe]) -> tuple[Sections, str]:
    """What the cells are compared with, and its name: the recipe, or what all cells share where it needs the grid."""
    try:
        return load_recipe(plan.recipe).sections(), f"from {plan.recipe}"
    except UserError:
        first, *others = (cell.sections() for cell in cells)
        shared = {
            section: {
                key: value
                for key, value in values.items()
                if all(key in other[section] and other[section][key] == value for other in others)
            }
            for section, values in first.items()
        }
        return shared, "between cells"


def _differences(found: Sections, base: Sections) -> Iterator[str]:
    """One line for each section that differs, as a recipe has it."""
    for section, values in found.items():
        below = base[section]
        changed = {key: value for key, value in values.items() if key not in below or below[key] != value}
        if below and not values:
            yield f"{section}: null"
        if changed:
            yield f"{section}: {{{', '.join(f'{key}: {setting_text(value)}' for key, value in changed.items())}}}"
