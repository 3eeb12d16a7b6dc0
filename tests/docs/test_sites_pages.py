"""The pages of real sites: commands that the parser knows, files that fedllm reads, tests that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml
from repository import REPO
from site_files import write_site

from fedllm import load_recipe
from fedllm.cli.commands import make_parser
from fedllm.common.schema import keys
from fedllm.deployment.site_settings import Policy, SiteSettings, load_site

FOLDER = REPO / "docs" / "guides" / "sites"
PAGES = [REPO / "docs" / "guides" / "deployment.md", *sorted(FOLDER.glob("*.md"))]
TEXTS = {page.stem: page.read_text(encoding="utf-8") for page in PAGES}


def blocks(page: str, language: str) -> list[str]:
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```", TEXTS[page], flags=re.DOTALL | re.MULTILINE)
    return [re.sub(rf"^{indent}", "", text, flags=re.MULTILINE) for indent, text in found]


def rows(page: str) -> list[list[str]]:
    """The rows of the page's tables whose last column is `test`."""
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", TEXTS[page], flags=re.MULTILINE):
        head, _, *lines = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()]
        if head[-1] == "test":
            assert all(len(line) == len(head) for line in lines)
            found += lines
    return found


COMMANDS = [line for page in TEXTS for block in blocks(page, "sh") for line in block.splitlines() if "fedllm" in line]


def test_the_commands_are_known() -> None:
    parsed = 0
    for line in COMMANDS:
        words = shlex.split(line.split("#")[0])
        if words[:2] == ["docker", "run"]:  # the image's name stands before the command's words
            words = words[words.index("fedllm") :]
        if words[0] == "fedllm":
            make_parser().parse_args(words[1:])
            parsed += 1
    assert parsed >= 7


def test_the_site_of_the_page_is_read(tmp_path: Path) -> None:
    (text,) = blocks("site", "yaml")
    values = yaml.safe_load(text)
    path = write_site(tmp_path)
    path.write_text(text)
    (tmp_path / "site.key").rename(tmp_path / values["key"])
    site = load_site(path)
    assert site.name == values["name"]
    assert site.allow.min_sites == 3


def test_every_key_of_a_site_is_on_its_page() -> None:
    cells = re.findall(r"^\| (`.*?) \|", TEXTS["site"], flags=re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert named == ({*keys(SiteSettings), *keys(Policy)} - {"allow"}) | {"allow"}


def test_the_recipe_of_the_page_is_read(tmp_path: Path) -> None:
    (text,) = blocks("server", "yaml")
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    recipe = load_recipe(path)
    assert recipe.sections()["deployment"]["sites"] == 3
    named = set(re.findall(r"^\| `deployment\.(\w+)` \|", TEXTS["server"], flags=re.MULTILINE))
    assert named <= set(recipe.sections()["deployment"])
    assert {"sites", "start", "deadline", "ask_again", "patience"} <= named


@pytest.mark.parametrize("page", ["faults", "security"])
def test_every_row_names_a_test_that_exists_or_says_not(page: str) -> None:
    assert len(rows(page)) >= 20
    for row in rows(page):
        if row[-1] == "not":
            continue
        found = re.findall(r"`([\w/]+\.py)::(test_\w+)`", row[-1])
        assert found, row
        for file, name in found:
            assert re.search(rf"^def {name}\(", (REPO / "tests" / file).read_text(), flags=re.MULTILINE), (file, name)


def test_what_is_not_protected_says_so() -> None:
    text = TEXTS["security"].split("## Not protected")[1].split("\n## ")[0]
    assert text.count("| not |\n") == len(re.findall(r"^\| ", text, flags=re.MULTILINE)) - 2 >= 6
