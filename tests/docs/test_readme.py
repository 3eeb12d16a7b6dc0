"""Facts of README.md and CITATION.cff that the code knows better."""

from __future__ import annotations

import re
import tomllib

import yaml
from repository import REPO

from fedllm.algorithms import algorithm_names

README = (REPO / "README.md").read_text(encoding="utf-8")
INDEX = (REPO / "docs" / "index.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_number_of_optimizers() -> None:
    number = len(algorithm_names())
    assert f"{number} federated optimizers" in " ".join(README.split())
    assert f"{number} federated optimizers" in " ".join(INDEX.split())
    assert f"| optimizers | **{number}** |" in README


def test_the_readme_is_a_page_and_a_half() -> None:
    assert len(README.split()) < 1100


def test_the_comparison_has_a_cell_for_everyone_and_its_date() -> None:
    rows = [line for line in README.split("## Beside other projects")[1].splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} == {8}
    assert len(rows) >= 12
    assert all(cell.strip() for line in rows[1:] for cell in line.strip("|").split("|")[1:])
    assert re.search(r"source on \d{4}-\d{2}-\d{2}", README)


def test_the_citation() -> None:
    found = yaml.safe_load((REPO / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors", "version", "license"} <= set(found)
    assert found["version"] == PROJECT["version"]
    assert found["license"] == PROJECT["license"]
    assert "doi" not in found
