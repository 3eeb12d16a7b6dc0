"""Outside a clone, the names of recipes stand for the installed ones; a user's own files come first."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedllm import load_recipe
from fedllm.cli import main
from fedllm.common.errors import UserError
from fedllm.config.shipped_recipes import find_recipe, find_recipes_folder, require_own, shipped_recipes
from fedllm.sweeps.grid import load_grid


def test_an_installed_recipe_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("quickstart.yaml", "sweeps/fedadamw_alpha.yaml"):
        assert find_recipe(f"recipes/{name}") == str(shipped_recipes() / name)
    assert find_recipes_folder(Path("recipes")) == shipped_recipes()


def test_the_python_api_finds_an_installed_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_recipe("recipes/quickstart.yaml").name == "quickstart"
    assert load_grid("recipes/sweeps/fedadamw_alpha.yaml")
    with pytest.raises(UserError, match=r"^recipes/none\.yaml: "):
        load_recipe("recipes/none.yaml")


def test_a_users_own_file_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "quickstart.yaml").write_text("own")
    assert find_recipe("recipes/quickstart.yaml") == "recipes/quickstart.yaml"
    assert find_recipes_folder(Path("recipes")) == Path("recipes")


@pytest.mark.parametrize(
    "given", ["quickstart.yaml", "recipes/none.yaml", "other/quickstart.yaml", "/recipes/quickstart.yaml"]
)
def test_other_names_stay(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_recipe(given) == given
    assert find_recipes_folder(Path("other")) == Path("other")


def test_no_command_changes_an_installed_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "fedllm"
    (package / "recipes").mkdir(parents=True)
    monkeypatch.setattr("fedllm.config.shipped_recipes._PACKAGE", package)
    installed = package / "recipes" / "some.yaml"
    installed.write_text("model: {name: x}\n")
    with pytest.raises(UserError, match="installed with fedllm, which fedllm tune would change; copy it"):
        require_own(str(installed), "fedllm tune")
    monkeypatch.chdir(tmp_path)
    assert main(["tune", "recipes/some.yaml"]) == 2
    require_own(str(tmp_path / "mine.yaml"), "fedllm tune")
