"""The data set `shell_commands`: what a command line shall do, and the command, from the packages `eg` and `cheat`.

Their example files are read where pip has put them. Nothing of the packages is imported or run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from fedllm.common.errors import UserError
from fedllm.data.tables import Table

NAME = "shell_commands"
INSTALL = "pip install --no-deps eg==1.2.3 cheat==2.5.1"
FEWEST = 10  # pairs of a tool that is a client
LONGEST = 160  # characters of what a command shall do; longer paragraphs explain
LEFT_OUT = frozenset({"sqlmap"})  # its only use is to break into data bases
TRAIN, OTHERS = "train", "other_tools"

Pair = tuple[str, str]  # what the command does, the command


def read_shell_commands(split: str) -> Table:
    """The pairs of one split: columns `prompt` ("git: show all branches"), `completion` ("git branch") and `tool`.

    split: TRAIN, the tools with at least FEWEST pairs, or OTHERS, the rest. Raises UserError if a package is missing.
    """
    pairs = _all_pairs()
    counts = Counter(tool for tool, _ in pairs)
    rows = [(tool, *pair) for tool, pair in pairs if (counts[tool] >= FEWEST) == (split == TRAIN)]
    columns = {
        "prompt": [f"{tool}: {wish}" for tool, wish, _ in rows],
        "completion": [command for _, _, command in rows],
        "tool": [tool for tool, _, _ in rows],
    }
    return Table(f"{NAME}, split '{split}'", columns)


def _all_pairs() -> list[tuple[str, Pair]]:
    """Every tool and pair once, in the order of the tools' names."""
    found: dict[tuple[str, Pair], None] = {}
    for package, folder, parse in (("eg", "eg/examples", markdown_pairs), ("cheat", "share/cheat", sheet_pairs)):
        for file in _files(package, folder):
            tool = file.name.removesuffix(".md")
            if tool not in LEFT_OUT:
                found |= dict.fromkeys((tool, pair) for pair in parse(file.read_text(encoding="utf-8")))
    return sorted(found, key=lambda pair: pair[0])


def _files(package: str, folder: str) -> list[Path]:
    """A package's example files, wherever pip has put them, by name."""
    try:
        installed: Distribution = distribution(package)
    except PackageNotFoundError as error:
        raise UserError(f"data.name={NAME}: the Python package '{package}' is missing; run: {INSTALL}") from error
    inside = [path for path in installed.files or [] if path.parent.as_posix().endswith(folder)]
    files = [Path(str(installed.locate_file(path))) for path in inside if path.suffix in ("", ".md")]
    if not files or not all(file.is_file() for file in files):
        raise UserError(
            f"data.name={NAME}: the Python package '{package}' {installed.version} holds no example files; "
            f"run: {INSTALL}"
        )
    return sorted(files, key=lambda file: file.name)


def markdown_pairs(text: str) -> Iterator[Pair]:
    """Pairs of eg's Markdown: a paragraph, and after an empty line the command, indented by four blanks.

    Of a command with its output, which eg writes with a `$`, the command alone is taken.
    """
    wish: list[str] = []
    for block in re.split(r"\n\s*\n", text):
        lines = block.strip("\n").splitlines()
        if all(line.startswith("    ") for line in lines) and lines:
            command = lines[0].strip()
            if wish and (command.startswith("$ ") or len(lines) == 1):
                yield from _pair(wish, command.removeprefix("$ "))
            wish = []
        else:
            wish = [] if lines and lines[0].startswith("#") else lines


def sheet_pairs(text: str) -> Iterator[Pair]:
    """Pairs of a cheat sheet: lines of comment, and the command on the one line that follows them."""
    wish: list[str] = []
    commands: list[str] = []
    for line in [*text.splitlines(), ""]:
        if commands and (not line.strip() or line.startswith("#")):
            if len(commands) == 1:
                yield from _pair(wish, commands[0])
            wish, commands = [], []
        if line.startswith("#"):
            wish.append(line.lstrip("#"))
        elif line.strip():
            commands.append(line.strip())
        else:
            wish = []


def _pair(wish: list[str], command: str) -> Iterator[Pair]:
    words = " ".join(" ".join(wish).split()).rstrip(":. ")
    if command and 0 < len(words) <= LONGEST:
        yield words, command
