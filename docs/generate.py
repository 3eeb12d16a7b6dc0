"""Writes what is generated in docs/: reference/, the tables of explanation/scaling.md, images/architecture.svg.

python -m docs.generate      # the same as make docs; tests/docs/test_generated.py compares the pages with the code
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

from benchmarks.scaling import page as scaling
from docs import equations
from docs.architecture import PICTURE, picture, read_rooms
from fedllm.cli import algorithm_docs
from fedllm.cli.commands import _EXIT_CODES, make_parser
from fedllm.common.schema import describe
from fedllm.config.recipe import SECTION_TYPES

REFERENCE = Path(__file__).resolve().parent / "reference"
NOTE = "<!-- Generated from the code: change the code, then run `make docs`. -->\n"
MODULES = ("fedllm", "fedllm.blocks", "fedllm.client", "fedllm.server")


def main() -> None:
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    PICTURE.write_text(picture(read_rooms()), encoding="utf-8")


def pages() -> dict[Path, str]:
    """Every generated page and its text."""
    made = {
        "recipe_keys": recipe_keys(),
        "algorithms": equations.rendered(algorithm_docs.markdown()).replace(
            "## Choices\n", f"{notation()}\n## Choices\n"
        ),
        "cli": commands(),
        "api": api(),
    }
    return {REFERENCE / f"{name}.md": text for name, text in made.items()} | {
        scaling.PAGE: scaling.filled(scaling.PAGE.read_text(encoding="utf-8"))
    }


def notation() -> str:
    """How the sentences of an algorithm's section write the symbols of its equations."""
    names = [name for name in equations.NAMES if name not in ("x0", "floor")]
    pairs = ", ".join(f"{name} is $`{equations.symbol(name)}`$" for name in names)
    arrow = "An arrow assigns: the left side gets the value of the right."
    return f"Sentences write the symbols as code does: {pairs}. {arrow}\n"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def plain(text: str) -> str:
    """Text whose <words> are not taken for HTML."""
    return text.replace("<", "\\<")


# Recipe keys


def recipe_keys() -> str:
    """Every key of a recipe, from the dataclasses of its sections."""
    parts = [
        f"{NOTE}\n# Recipe keys\n",
        "A recipe is a YAML file with these sections, for example `lora: {rank: 8}`. On the command line a key is\n"
        "`section.key=value`, for example `lora.rank=8`. See also [recipes](../guides/recipes.md).\n",
    ]
    for section, cls in SECTION_TYPES.items():
        rows = [
            [
                f"`{section}.{field.name}`",
                describe(get_type_hints(cls)[field.name]),
                default(cls(), field.name),
                meaning(field),
            ]
            for field in dataclasses.fields(cls)
        ]
        parts.append(f"## {section}\n\n{(cls.__doc__ or '').splitlines()[0]}\n")
        parts.append(table(["key", "type", "default", "meaning"], rows))
    parts.append(
        "## algorithm\n\n"
        "`algorithm.name` is the name of an algorithm, its alias, or `package.module:Class` for your own. The\n"
        "[algorithm](algorithms.md) has the other keys. `algorithm: fedavg` is short for `algorithm: {name: fedavg}`.\n"
    )
    parts.append(
        "## algorithms\n\n"
        "The settings that each algorithm has in this recipe, for example `algorithms: {fedavg: {lr: 0.1}}`.\n"
        "`algorithm=fedavg` on the command line chooses one.\n"
    )
    return "\n".join(parts)


def default(section: Any, name: str) -> str:
    """A default as a recipe has it."""
    value = getattr(section, name)
    if value is None or isinstance(value, bool):
        return f"`{ {None: 'null', True: 'true', False: 'false'}[value] }`"
    if isinstance(value, list):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def meaning(field: dataclasses.Field[Any]) -> str:
    aliases = "".join(f"; earlier name: `{name}`" for name in field.metadata.get("aliases", ()))
    return plain(str(field.metadata["help"])) + aliases


# Commands


def commands() -> str:
    """Every command and its options, from the parser."""
    parts = [
        f"{NOTE}\n# Commands\n",
        exit_codes(),
        "`fedllm COMMAND --help` prints the same, and for `run`, `tune` and `partition` also the\n"
        "[keys of a recipe](recipe_keys.md).\n",
    ]
    for name, help, parser in subcommands():
        shown = [action for action in parser._actions if action.help != argparse.SUPPRESS and action.dest != "help"]
        words = [_word(action) for action in shown]
        parts.append(
            f"## fedllm {name}\n\n{help[0].upper()}{help[1:]}.\n\n```text\n{' '.join(['fedllm', name, *words])}\n```\n"
        )
        rows = [[f"`{_name(action)}`", plain(action.help or "")] for action in shown]
        if rows:
            parts.append(table(["argument", "meaning"], rows))
    return "\n".join(parts)


def exit_codes() -> str:
    """The exit codes as a table, and what is said below them, from the help."""
    head, text = _EXIT_CODES.split("\n\n", 1)
    rows = [re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in head.splitlines()[1:]]
    return f"{table(['exit code', 'meaning'], rows)}\n{text}"


def subcommands() -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """Name, help and parser of every command; `federation new` is one, `federation` is not."""
    yield from _below(make_parser(), "")


def _below(parser: argparse.ArgumentParser, above: str) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in action._choices_actions:
                name, below = above + choice.dest, action.choices[choice.dest]
                inner = list(_below(below, f"{name} "))
                yield from inner or [(name, choice.help or "", below)]


def _name(action: argparse.Action) -> str:
    """An argument as it is typed, with what it takes."""
    if not action.option_strings:
        return str(action.metavar or action.dest)
    takes = "" if action.nargs == 0 else f" {_values(action)}"
    return f"{', '.join(action.option_strings)}{takes}"


def _values(action: argparse.Action) -> str:
    return str(action.metavar) if action.metavar else "|".join(map(str, action.choices or [action.dest.upper()]))


def _word(action: argparse.Action) -> str:
    """An argument as a usage line has it."""
    name = _name(action) if action.option_strings or not action.choices else _values(action)
    if action.option_strings or action.nargs == "?":
        return f"[{name}]"
    return {"*": f"[{name} ...]", "+": f"{name} [{name} ...]"}.get(str(action.nargs), name)


# Python API


def api() -> str:
    """The public names of each public module: signature and docstring."""
    parts = [f"{NOTE}\n# Python API\n", "These names keep their meaning between versions. All others may change.\n"]
    for module in map(import_module, MODULES):
        parts.append(f"## {module.__name__}\n\n{inspect.getdoc(module)}\n")
        parts += [entry(name, getattr(module, name)) for name in module.__all__]
    return "\n".join(parts)


def entry(name: str, thing: Any) -> str:
    """One public name; of a class also its public methods and properties."""
    kind = "class " if inspect.isclass(thing) else ""
    call = signature(thing)
    if len(call) > 90:
        call = signature(thing, first="(\n    ", between=",\n    ", last=",\n)")
    text = f"### {name}\n\n```python\n{kind}{name}{call}\n```\n\n{doc(thing)}"
    if not inspect.isclass(thing) or issubclass(thing, Exception):
        return text
    rows = []
    for member in [
        key for base in reversed(thing.__mro__[:-1]) if base.__module__.startswith("fedllm") for key in vars(base)
    ]:
        found = inspect.getattr_static(thing, member)
        if member.startswith("_") or not (inspect.isfunction(found) or isinstance(found, property | classmethod)):
            continue
        call = "" if isinstance(found, property) else signature(getattr(thing, member), skip=inspect.isfunction(found))
        rows.append([f"`{member}{call}`", " ".join((inspect.getdoc(found) or "").split("\n\n")[0].split())])
    unique = list({row[0]: row for row in rows}.values())
    return f"{text}\n{table(['member', 'meaning'], unique)}" if unique else text


def signature(thing: Any, skip: bool = False, first: str = "(", between: str = ", ", last: str = ")") -> str:
    """Parameters with types and defaults. skip: without self. first, between, last: what joins them."""
    try:
        found = inspect.signature(thing)
    except ValueError:
        return ""
    words, starred = [], False
    for parameter in list(found.parameters.values())[skip:]:
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            words.append("*")
        starred |= parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        word = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "") + parameter.name
        if parameter.annotation is not parameter.empty:
            word += f": {_annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            word += f" = {'...' if repr(parameter.default).startswith('<') else repr(parameter.default)}"
        words.append(word)
    answer = (
        "" if found.return_annotation in (found.empty, None, "None") else f" -> {_annotation(found.return_annotation)}"
    )
    return f"{first}{between.join(words)}{last}{answer}"


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def doc(thing: Any) -> str:
    """The docstring; lines that start with spaces become a block of text."""
    lines = (inspect.getdoc(thing) or "").splitlines()
    text = "\n".join(lines)
    return f"```text\n{text}\n```\n" if any(line.startswith("  ") for line in lines) else f"{text}\n"


if __name__ == "__main__":
    main()
