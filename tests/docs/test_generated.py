"""The generated pages are what the code gives, and the picture of the architecture shows its rooms and imports."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from repository import REPO

from docs import architecture, generate

PAGES = generate.pages()
ROOMS = architecture.read_rooms()
PICTURE = architecture.PICTURE.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_is_the_generated_one(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == PAGES[path], "run: make docs"


def test_pages_have_every_key_command_and_public_name() -> None:
    keys, commands, api = (PAGES[generate.REFERENCE / f"{name}.md"] for name in ("recipe_keys", "cli", "api"))
    assert "| `federation.rounds` | a whole number | `100` | number of rounds T |" in keys
    assert keys.count("\n| `") > 45
    assert re.findall(r"^## fedllm (.+)$", commands, flags=re.MULTILINE) == [
        "run", "tune", "sweep", "suite", "new recipe", "serve", "site", "federation new", "federation try", "list",
        "report", "evaluate", "predict", "export", "chat", "push", "partition", "blocks", "hessian", "theory",
        "algorithms", "doctor", "completion",
    ]  # fmt: skip
    assert "fedllm report runs [runs ...] [--out OUT] [--target METRIC=VALUE]" in commands
    assert {"simulate", "run_recipe", "partition", "Client", "Server"} <= set(
        re.findall(r"^### (\w+)", api, re.MULTILINE)
    )


def test_every_package_is_in_the_contract_and_on_the_page() -> None:
    packages = {path.parent.name for path in (REPO / "fedllm").glob("*/__init__.py")}
    assert packages == {room for layer in ROOMS.layers for room in layer} == set(ROOMS.lines)
    assert packages == set(architecture.captions())


def test_no_import_goes_up() -> None:
    assert ROOMS.upward() == set()


def test_imports_are_found_wherever_they_stand() -> None:
    lines = [
        "def f():",
        "    from fedllm.data import tables",
        "import fedllm.models.lora",
        "from ..common import errors",
    ]
    path = REPO / "fedllm" / "cli" / "doctor.py"
    assert architecture.imported_rooms(path, "\n".join(lines)) == {"data", "models", "common"}


def test_the_picture_shows_the_rooms_and_imports_of_the_code() -> None:
    """Lines of code are not compared, since they change with every commit."""
    assert set(re.findall(r'id="room-(\w+)"', PICTURE)) == set(ROOMS.lines)
    assert set(re.findall(r'id="arrow-(\w+)-(\w+)"', PICTURE)) == ROOMS.arrows(), "run: make docs"


def test_arrows_leave_out_only_what_follows_from_others() -> None:
    layers = (("a",), ("b",), ("c",), ("common",))
    edges = {("a", "b"), ("b", "c"), ("a", "c"), ("c", "common"), ("a", "common")}
    rooms = architecture.Rooms(layers, {}, frozenset(edges))
    assert rooms.arrows() == {("a", "b"), ("b", "c")}
    assert architecture.Rooms(layers, {}, frozenset({("c", "a")})).upward() == {("c", "a")}


def test_the_picture_follows_light_and_dark() -> None:
    assert "prefers-color-scheme:dark" in PICTURE
    assert not re.search(r"(fill|stroke): #", PICTURE)


def test_the_contract_is_the_only_one_of_its_kind() -> None:
    contracts = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert [one["type"] for one in contracts].count("layers") == 1
