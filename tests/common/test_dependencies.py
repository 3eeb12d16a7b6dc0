"""What fedllm imports is what pyproject.toml declares and constraints.txt pins."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from repository import REPO

PACKAGE = REPO / "fedllm"
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))
CORE = [Requirement(text) for text in PROJECT["project"]["dependencies"]]
EXTRAS = {
    extra: [need for need in map(Requirement, texts) if need.name != "fedllm"]
    for extra, texts in PROJECT["project"]["optional-dependencies"].items()
}
IMPORTED_BY_OTHERS = {"tensorboard"}  # accelerate imports it for run.trackers
UNPINNED = {"flower"}  # not part of `make setup`


def imported(path: Path) -> set[str]:
    """The top-level modules that a file imports anywhere: at its top, in functions, for type checking, by name."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module or "")
        elif isinstance(node, ast.Call) and re.search(r"(import_module|find_spec)$", ast.unparse(node.func)):
            names.update(word.value for word in node.args if isinstance(word, ast.Constant))
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"fedllm"}


def distributions() -> dict[str, set[str]]:
    """The distributions that fedllm imports, each with the files that do."""
    providers = packages_distributions()
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for module in imported(path):
            for name in providers.get(module, [module]):
                found.setdefault(canonicalize_name(name), set()).add(str(path.relative_to(REPO)))
    return found


def names(requirements: list[Requirement]) -> set[str]:
    return {canonicalize_name(need.name) for need in requirements}


@pytest.mark.slow
def test_every_import_is_of_a_declared_dependency() -> None:
    declared = names(CORE).union(*map(names, EXTRAS.values()))
    assert {name: files for name, files in distributions().items() if name not in declared} == {}


@pytest.mark.slow
def test_every_core_dependency_is_imported() -> None:
    assert names(CORE) - set(distributions()) == IMPORTED_BY_OTHERS


@pytest.mark.parametrize("part", ["core", *EXTRAS])
def test_every_dependency_is_pinned_to_a_version_that_it_allows(part: str) -> None:
    lines = (REPO / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    for need in CORE if part == "core" else EXTRAS[part]:
        if part not in UNPINNED:
            assert need.specifier.contains(pins[canonicalize_name(need.name)]), need
